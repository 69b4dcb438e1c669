//! Each process that `attach` starts is killed at any instant, alone and with all others. The
//! program continues undisturbed, and nobody stays stopped.

#[path = "support/group.rs"]
mod group;
#[path = "support/subject.rs"]
mod subject;
mod support;

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use group::{Group, below};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;
use pagemark_linux::proc;
use pagemark_testing::{SplitMix, assert_oracle, patience, rounds, skip, trackee, violation, wait_until};
use subject::{has_criu, verifies};
use support::Pagemark;

/// Roles of the main thread, which makes the injected calls.
const ROLES: [&str; 8] = ["compute", "sleep", "futex", "epoll", "read", "sigwait", "sigsuspend", "stack"];

/// Names of the processes that are killed alone. A process that holds or copies has the name of the
/// command.
const HELPERS: [&str; 4] = ["pagemark-inject", "pagemark-guard", "criu", "pagemark"];

/// How the problem begins of a program that does not go on in time.
const LATE: &str = "it is stuck";

/// Who is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Victim {
    Helper(&'static str),
    /// The process group of the command.
    Group,
    /// All processes of the control group of the command at once.
    ControlGroup,
    /// One process of the control group after the other.
    EachOfControlGroup,
}

/// A program whose threads check that nothing disturbs them.
struct States {
    child: Child,
    directory: tempfile::TempDir,
    role: &'static str,
}

impl States {
    fn start(random: &mut SplitMix) -> States {
        let role = ROLES[random.below(ROLES.len() as u64) as usize];
        let directory = tempfile::tempdir().expect("a directory");
        let mut command = Command::new(trackee("states"));
        command
            .arg(directory.path())
            .args([role, "saved-whole"])
            .stdin(Stdio::null())
            .process_group(0)
            .current_dir("/");
        let states = States { child: command.spawn().expect("it starts"), directory, role };
        states.assert_goes_on();
        states
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Requires that all threads complete another round, and none is stopped.
    #[track_caller]
    fn assert_goes_on(&self) {
        let goes_on = self.goes_on();
        assert_oracle!(!goes_on.as_ref().is_err_and(|problem| !is_late(problem)), "{goes_on:?}");
        assert_eq!(goes_on, Ok(()));
    }

    /// Whether all threads complete another round, and none is stopped.
    fn goes_on(&self) -> Result<(), String> {
        let before = rounds(self.directory.path());
        let deadline = Instant::now() + patience();
        loop {
            if let Some(wrong) = violation(self.directory.path()) {
                return Err(wrong);
            }
            if proc::live_thread(self.pid()).is_none() {
                let how = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
                return Err(format!("it has ended: {:?}", waitid(Id::Pid(Pid::from_raw(self.pid())), how)));
            }
            let statuses = || proc::threads(self.pid()).unwrap_or_default().into_iter().map(proc::Status::read);
            // A tracer that dies lets go of its tracees when it is gone.
            let is_stopped = || statuses().flatten().any(|status| status.state == 'T' || status.tracer_pid != 0);
            if rounds(self.directory.path()) > before + 1 && !is_stopped() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(format!("{LATE}: {:?}", statuses().collect::<Vec<_>>()));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for States {
    fn drop(&mut self) {
        let _ = killpg(Pid::from_raw(self.pid()), Signal::SIGKILL);
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// True if this is the name of a process, or what it executes. A loader may have started CRIU.
fn has_name(pid: i32, name: &str) -> bool {
    let is_name = fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|found| found.trim_end() == name);
    is_name || name == "criu" && support::command_line(pid).contains("/criu ")
}

/// How often a victim is looked for. Each search reads all of `/proc`: without a pause, two
/// searches take both processors, and others wait for seconds.
const SEARCH_POLL: Duration = Duration::from_micros(200);

/// Kills `victim` of a command that is attached to a process. False if it was not found.
fn strike(victim: Victim, attached: &mut Child, target: i32, group: Option<&Group>, random: &mut SplitMix) -> bool {
    let command = attached.id() as i32;
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut is_over = || attached.try_wait().is_ok_and(|ended| ended.is_some()) || Instant::now() > deadline;
    let pause = match random.below(4) {
        0 => 0,
        1 => random.below(1_000),
        2 => random.below(10_000),
        _ => random.below(80_000),
    };
    if let Victim::Helper(name) = victim {
        loop {
            let found = below(command).into_iter().filter(|&pid| has_name(pid, name)).collect::<Vec<i32>>();
            if !found.is_empty() {
                std::thread::sleep(Duration::from_micros(pause));
                return group::end(found[random.below(found.len() as u64) as usize]);
            }
            if is_over() {
                return false;
            }
            std::thread::sleep(SEARCH_POLL);
        }
    }
    // Within the first checkpoint, or one of those that follow.
    std::thread::sleep(Duration::from_millis(random.below(400)));
    // While it is traced there is most to disturb.
    let is_traced = || proc::Status::read(target).is_ok_and(|status| status.tracer_pid != 0);
    while !is_traced() && !is_over() {
        std::thread::sleep(SEARCH_POLL);
    }
    std::thread::sleep(Duration::from_micros(pause));
    match (victim, group) {
        (Victim::ControlGroup, Some(group)) => group.kill(),
        (Victim::EachOfControlGroup, Some(group)) => group.kill_each(),
        _ => killpg(Pid::from_raw(command), Signal::SIGKILL).is_ok(),
    }
}

/// Starts a command that is attached to the program, in this control group.
fn attach(pagemark: &Pagemark, states: &States, group: Option<&Group>) -> Child {
    let mut command = pagemark.command(&["attach", "--every", "100ms", "--keep-last", "3", "--job", "subject"]);
    command.arg(states.pid().to_string()).process_group(0).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    group.iter().for_each(|group| group.have(&mut command));
    command.spawn().expect("pagemark starts")
}

/// True if a killed CRIU has left the SIGTRAP at the end of a call that it injects: in the
/// microseconds before it sees this end. The program ends by that.
fn is_trap_of_criu((victim, problem): &(Victim, String)) -> bool {
    *victim == Victim::Helper("criu") && problem.contains("SIGTRAP")
}

/// True if a program is not harmed as far as is known, but has not gone on in time.
fn is_late(problem: &str) -> bool {
    problem.starts_with(LATE)
}

/// What was killed so far, and what it harmed.
struct Counts {
    killed: Vec<(Victim, u64)>,
    tried: u64,
    harmful: Vec<(Victim, String)>,
}

impl Counts {
    fn new(victims: impl IntoIterator<Item = Victim>) -> Counts {
        Counts { killed: victims.into_iter().map(|victim| (victim, 0)).collect(), tried: 0, harmful: Vec::new() }
    }

    fn total(&self) -> u64 {
        self.killed.iter().map(|(_, count)| count).sum()
    }

    /// The victim that was killed least often. None after this number of kills.
    fn next(&mut self, kills: u64) -> Option<Victim> {
        let total = self.total();
        assert!(self.tried < 20 * kills.max(10), "somebody is not found to be killed: {self}");
        self.tried += 1;
        // What others kill at the moment is not counted yet: the order is that of the list.
        let at = self.tried as usize % self.killed.len();
        let (later, sooner) = (self.killed[at..].iter(), self.killed[..at].iter());
        let least = later.chain(sooner).min_by_key(|(_, count)| *count)?;
        (total < kills).then_some(least.0)
    }

    fn add(&mut self, victim: Victim, report_each: u64) {
        self.killed.iter_mut().filter(|(killed, _)| *killed == victim).for_each(|(_, count)| *count += 1);
        if self.total().is_multiple_of(report_each) {
            eprintln!("{self}");
        }
    }
}

impl std::fmt::Display for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} kills: {:?}; {} were harmful: {:?}", self.total(), self.killed, self.harmful.len(), self.harmful)
    }
}

/// Attaches to a program of its own and kills, until all have killed this number of times together.
fn kill_until(kills: u64, counts: &Mutex<Counts>, group: Option<&Group>, mut random: SplitMix) {
    const REPORT_EACH: u64 = 100;
    let counts = || counts.lock().expect("no other has failed");
    let pagemark = Pagemark::new();
    let mut states = States::start(&mut random);
    loop {
        let Some(victim) = counts().next(kills) else { break };
        let mut attached = attach(&pagemark, &states, group);
        let is_killed = strike(victim, &mut attached, states.pid(), group, &mut random);
        if is_killed && matches!(victim, Victim::Helper(_)) {
            // It may go on, or report what is missing.
            std::thread::sleep(Duration::from_millis(random.below(200)));
        }
        let _ = attached.kill();
        attached.wait().expect("our child");
        let goes_on = states.goes_on();
        if is_killed {
            counts().add(victim, REPORT_EACH);
        }
        if let Err(problem) = goes_on {
            eprintln!("{victim:?}, role {}: {problem}", states.role);
            counts().harmful.push((victim, problem));
            states = States::start(&mut random);
        }
    }
    verifies(&pagemark);
}

/// Kills as often as this, `side_by_side` programs at once, and asserts that no kill harms a
/// program, except at most `harmful` kills of CRIU.
fn kill_helpers(kills: u64, side_by_side: usize, harmful: usize) {
    if !nix::unistd::geteuid().is_root() || !has_criu() {
        skip!("whole checkpoints need root and CRIU");
    }
    let groups: Vec<Group> = (0..side_by_side).filter_map(|_| Group::new()).collect();
    let has_groups = groups.len() == side_by_side;
    if !has_groups {
        eprintln!("no control group can be made and killed at once");
    }
    let mut victims: Vec<Victim> = HELPERS.into_iter().map(Victim::Helper).collect();
    victims.push(Victim::Group);
    victims.extend([Victim::ControlGroup, Victim::EachOfControlGroup].into_iter().filter(|_| has_groups));
    let counts = Mutex::new(Counts::new(victims));
    std::thread::scope(|scope| {
        for number in 0..side_by_side {
            let (counts, group) = (&counts, groups.get(number).filter(|_| has_groups));
            let random = SplitMix(u64::from(std::process::id()) << 20 | (number as u64) << 16 | kills);
            scope.spawn(move || kill_until(kills, counts, group, random));
        }
    });
    let counts = counts.into_inner().expect("none has failed");
    eprintln!("{counts}");
    let is_harmed = |harmful: &(Victim, String)| !is_trap_of_criu(harmful) && !is_late(&harmful.1);
    assert_oracle!(!counts.harmful.iter().any(is_harmed), "{counts}");
    assert!(counts.harmful.iter().all(is_trap_of_criu) && counts.harmful.len() <= harmful, "{counts}");
}

#[test]
fn a_member_of_a_control_group_that_has_no_id_here_is_not_killed() {
    assert_eq!(group::members_of("81\n0\n82\n"), [81, 82]);
}

#[test]
fn some_kills_of_helpers_harm_nobody() {
    kill_helpers(14, 1, 1);
}

/// CRIU must not be killed in the midst of a call that it injects.
#[test]
fn who_kills_the_control_group_of_the_command_kills_no_criu() {
    if !nix::unistd::geteuid().is_root() || !has_criu() {
        skip!("whole checkpoints need root and CRIU");
    }
    let Some(group) = Group::new() else { skip!("there are no control groups of version 2 that can be killed") };
    let pagemark = Pagemark::new();
    let states = States::start(&mut SplitMix(1));
    let mut attached = attach(&pagemark, &states, Some(&group));
    let mut criu = 0;
    wait_until("CRIU to freeze the program", || {
        criu = proc::Status::read(states.pid()).map_or(0, |status| status.tracer_pid);
        criu != 0 && has_name(criu, "criu")
    });
    assert_eq!(group.members(), [attached.id() as i32], "CRIU is {criu}");
    assert!(group.kill());
    attached.wait().expect("our child");
    states.assert_goes_on();
}

#[test]
#[ignore = "some minutes; PAGEMARK_KILLS is the number of kills"]
fn kills_of_helpers_harm_nobody() {
    let kills = std::env::var("PAGEMARK_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(1000);
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    kill_helpers(kills, processors.min(4), (kills / 200) as usize);
}
