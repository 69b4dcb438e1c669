//! Processes that run in a machine of `pagemark-kvm`. To save their state they give up what they
//! have of KVM ([`pagemark_kvm_protocol::description`]), and make it again when they go on.

use std::ffi::OsStr;
use std::io;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::{Duration, Instant};

use pagemark::Address;
use pagemark_kvm_protocol::description::DEVICE;
use pagemark_kvm_protocol::outside::ProcessDescription;
use pagemark_linux::proc::descriptors::Descriptor;
use pagemark_linux::proc::{self, Mapping, Process, Stat, maps, tree};

use crate::attach;
use crate::error::{Error, ErrorKind, Object, Result};
use crate::inject;

/// How long an attempt may take in which no process begins to change its machine, and those wait
/// that need to. For a fault a process does so for some microseconds, and one that executes a
/// program has none for some milliseconds. CRIU, which waits for an attempt, gives up after 10 s.
const ATTEMPT_LIMIT: Duration = Duration::from_secs(4);

/// How long attempts are repeated, and how long a process is waited for that starts. On a busy
/// machine, a thread in the midst of a change is not scheduled for seconds.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long all processes go on between two attempts.
const RUN: Duration = Duration::from_millis(50);

/// Pause between two tries within an attempt: short at first, since most processes are ready within
/// microseconds, and longer the longer an attempt takes, since each try reads much of `/proc`.
const PAUSE: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_millis(20);

/// Waits for the pause after a try of what has begun then.
fn pause(begin: Instant) {
    std::thread::sleep((begin.elapsed() / 32).clamp(*PAUSE.start(), *PAUSE.end()));
}

/// True if a process runs in a machine.
pub fn is_in_machine(pid: i32) -> bool {
    ProcessDescription::of(pid).is_there()
}

/// Where the file of the program that is in the machine of a process has its first instruction.
/// None if there is no machine, or no program in it yet.
pub fn program_entry(pid: i32) -> Option<Address> {
    ProcessDescription::of(pid).program_entry()
}

/// The name of the file that a process executes before its program is in a machine.
const MONITOR: &[u8] = b"pagemark-kvm";

/// True if a process runs in a machine or may be about to.
pub fn may_have_machine(pid: i32) -> bool {
    // In the midst of `execve` it has the file, and no code of it yet.
    is_in_machine(pid) || proc::executable(pid).is_ok_and(|path| is_monitor(&path)) || holds_kvm(pid)
}

fn is_monitor(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_bytes() == MONITOR)
}

/// Waits while a process is about to make the machine in which its program will run, but not for
/// longer than a minute. It runs meanwhile.
pub fn wait_for_machine(pid: i32) {
    let begin = Instant::now();
    // Who only has KVM open may be another monitor.
    let starts = || executes_monitor(pid) || begin.elapsed() < ATTEMPT_LIMIT && holds_kvm(pid);
    while !is_in_machine(pid) && starts() && begin.elapsed() < PATIENCE {
        pause(begin);
    }
}

/// The processes of a tree, and those that have ended: a thread of KVM may still be in them.
///
/// # Errors
/// Those of [`tree::members`].
pub fn list_tree(root_pid: i32) -> io::Result<Vec<Process>> {
    let tree = tree::members(root_pid)?;
    let children = tree.iter().flat_map(|member| proc::children(member.process.pid).unwrap_or_default());
    let children = children.filter_map(|pid| Process::find(pid).ok());
    let mut processes: Vec<Process> = tree.iter().map(|member| member.process).chain(children).collect();
    processes.sort_unstable();
    processes.dedup();
    Ok(processes)
}

/// Decides whether processes that could not give up their machines are asked to once more.
#[derive(Debug)]
pub struct Repetition {
    deadline: Instant,
}

impl Default for Repetition {
    fn default() -> Repetition {
        Repetition { deadline: Instant::now() + PATIENCE }
    }
}

impl Repetition {
    /// True if an attempt that has failed by `error` is to be repeated. All processes have gone on
    /// for a moment then.
    pub fn is_due(&self, error: &Error) -> bool {
        let is_due = error.kind() == ErrorKind::Busy && Instant::now() < self.deadline && is_transient(error.object());
        if is_due {
            std::thread::sleep(RUN);
        }
        is_due
    }
}

/// True if a process that was busy leaves that state by itself. One that has KVM open and is
/// neither in a machine nor about to be may be another monitor, which keeps it.
fn is_transient(object: &Object) -> bool {
    let &Object::Process(pid) = object else { return true };
    is_in_machine(pid) || executes_monitor(pid) || !holds_kvm(pid)
}

/// Processes that have given up their machines. Dropped, they may make them again.
#[derive(Debug, Default)]
pub struct ParkedProcesses {
    parked: Vec<Process>,
    /// Those that were about to give it up when it was last tried.
    closing: Vec<Process>,
}

impl ParkedProcesses {
    /// Like [`ParkedProcesses::park`], of the tree of a process. As long as a process is busy, this
    /// is tried again, for a minute; between the attempts the processes run.
    ///
    /// # Errors
    /// A process cannot give it up, or the tree cannot be listed; all go on.
    pub fn park_tree(root_pid: i32) -> Result<ParkedProcesses> {
        let list = || list_tree(root_pid).map_err(attach::failed("list the processes below", root_pid));
        let repetition = Repetition::default();
        loop {
            match ParkedProcesses::park(list) {
                Err(error) if repetition.is_due(&error) => {}
                parked => return parked,
            }
        }
    }

    /// Has those processes of a tree that run in a machine give it up. `list` lists the tree. Until
    /// they are released, or this process is gone, their threads wait when they need it. In another
    /// namespace of process ids they wait for 10 s at most.
    ///
    /// # Errors
    /// A process cannot give it up within some seconds; all go on. [`ErrorKind::Busy`]: it may
    /// later ([`Repetition`]).
    pub fn park(list: impl Fn() -> Result<Vec<Process>>) -> Result<ParkedProcesses> {
        let begin = Instant::now();
        let mut parked = ParkedProcesses::default();
        loop {
            let (mut busy, known) = (None, parked.parked.len());
            for process in list()? {
                if parked.parked.contains(&process) {
                    continue;
                }
                match park(process) {
                    Ok(true) => parked.parked.push(process),
                    Ok(false) => {}
                    Err(error) if error.kind() == ErrorKind::Busy => {
                        if !parked.closing.contains(&process) {
                            parked.closing.push(process);
                        }
                        busy = Some(error);
                    }
                    Err(error) => {
                        // It may have been closed in part.
                        parked.parked.push(process);
                        return Err(error);
                    }
                }
            }
            // A process that has given up its machine makes no child; one may have come before.
            match busy {
                None if parked.parked.len() == known => return Ok(parked),
                None => {}
                Some(error) if begin.elapsed() > ATTEMPT_LIMIT => return Err(error),
                Some(_) => pause(begin),
            }
        }
    }

    /// The processes go on when they run. They may be frozen: memory that is saved after this is
    /// that of released processes.
    pub fn release(&mut self) {
        let all = self.parked.drain(..).chain(self.closing.drain(..));
        // A process that is gone needs nothing; others go on by themselves after a while.
        for process in all.filter(|process| process.stat().is_some()) {
            let _ = ProcessDescription::of(process.pid).release();
        }
    }
}

impl Drop for ParkedProcesses {
    fn drop(&mut self) {
        self.release();
    }
}

/// Has a process give up its machine. False if it has nothing of KVM.
fn park(process: Process) -> Result<bool> {
    let pid = process.pid;
    if !is_in_machine(pid) {
        return if executes_monitor(pid) || holds_kvm(pid) || ends_with_machine(pid) {
            Err(inject::busy(pid))
        } else {
            Ok(false)
        };
    }
    let is_same = proc::is_in_own_pid_namespace(pid).unwrap_or(false);
    match inject::park(process, is_same.then(|| std::process::id() as i32)) {
        // It executes another program, or ends.
        Err(error) if error.kind() == ErrorKind::Gone => Err(inject::busy(pid)),
        parked => parked.map(|()| true),
    }
}

/// True if a process executes the monitor, which may not have opened KVM yet.
pub fn executes_monitor(pid: i32) -> bool {
    proc::executable(pid).is_ok_and(|path| is_monitor(&path))
        && maps::read(pid).is_ok_and(|mappings| has_code_of_monitor(&mappings))
}

/// True if the monitor's code is among the mappings of a process that has executed it, or there is
/// no code yet, in the midst of `execve`. A process that has left its machine has the code of its
/// program alone, whatever `/proc/PID/exe` says.
fn has_code_of_monitor(mappings: &[Mapping]) -> bool {
    let mut code = mappings.iter().filter(|mapping| mapping.executable && mapping.name.starts_with(b"/")).peekable();
    code.peek().is_none() || code.any(|mapping| is_monitor(Path::new(OsStr::from_bytes(&mapping.name))))
}

/// True if a process has ended but for the thread that KVM had in it.
fn ends_with_machine(pid: i32) -> bool {
    Stat::read(pid).is_ok_and(|stat| stat.is_zombie()) && proc::threads(pid).is_ok_and(|threads| threads.len() > 1)
}

/// True if a process has a file of KVM open, as one has that executes another program in a machine.
fn holds_kvm(pid: i32) -> bool {
    let is_of_kvm = |open: &Descriptor| open.link == DEVICE.as_bytes() || open.link.starts_with(b"anon_inode:kvm-");
    proc::descriptors(pid).is_ok_and(|descriptors| descriptors.iter().any(is_of_kvm))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::process::{Child, Command};

    use pagemark_kvm_protocol::description::{ADDRESS, Header, MAGIC};
    use pagemark_kvm_protocol::state::MachineState;
    use pagemark_testing::{STARTED, skip, wait_until};

    use super::*;

    /// A program that has given up its machine, and a thread that has just begun to make it again.
    #[test]
    #[ignore = "is run by a_process_is_waited_for_whose_thread_is_not_scheduled"]
    fn has_a_machine() {
        if std::env::var_os(STARTED).is_none() {
            skip!("is run by a_process_is_waited_for_whose_thread_is_not_scheduled");
        }
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE);
        // SAFETY: a new mapping where nothing is mapped.
        let at = unsafe { libc::mmap(ADDRESS as *mut libc::c_void, 4096, protection, flags, -1, 0) };
        assert_eq!(at as u64, ADDRESS);
        for (offset, word) in [
            (std::mem::offset_of!(Header, users), 1),
            (std::mem::offset_of!(Header, state), MachineState::Released.word().into()),
            (std::mem::offset_of!(Header, magic), MAGIC),
        ] {
            write(std::process::id() as i32, offset, word);
        }
        loop {
            std::thread::sleep(Duration::from_secs(1000));
        }
    }

    /// Writes a word of the description, from the lowest byte on as far as it is not 0.
    fn write(pid: i32, offset: usize, word: u64) {
        let bytes = word.to_le_bytes();
        let length = if word <= u64::from(u32::MAX) { 4 } else { 8 };
        let memory = proc::open_memory_for_writing(pid).unwrap();
        memory.write_all_at(&bytes[..length], ADDRESS + offset as u64).unwrap();
    }

    /// Ended when it is dropped.
    struct Ended(Child);

    impl Drop for Ended {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_is_waited_for_whose_thread_is_not_scheduled() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--ignored", "--exact", "parked::tests::has_a_machine"]).env(STARTED, "1");
        command.stdout(std::process::Stdio::null());
        let program = Ended(command.spawn().unwrap());
        let pid = program.0.id() as i32;
        wait_until("the description", || is_in_machine(pid));
        // One attempt fails. The thread is done at last.
        assert_eq!(
            ParkedProcesses::park(|| Ok(vec![Process::find(pid).unwrap()])).unwrap_err().kind(),
            ErrorKind::Busy
        );
        let state = || ProcessDescription::of(pid).state().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(ATTEMPT_LIMIT + Duration::from_secs(1));
                write(pid, std::mem::offset_of!(Header, users), 0);
            });
            let parked = ParkedProcesses::park_tree(pid).unwrap();
            assert_eq!(state(), Some(MachineState::Parked));
            drop(parked);
        });
        assert_eq!(state(), Some(MachineState::Released));
    }

    #[test]
    fn who_has_kvm_open_for_ever_is_not_waited_for_long() {
        let Ok(device) = std::fs::File::open(OsStr::new(DEVICE)) else { skip!("no KVM") };
        let program = Ended(Command::new("sleep").arg("1000").stdin(device).spawn().unwrap());
        let begin = Instant::now();
        let error = ParkedProcesses::park_tree(program.0.id() as i32).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());
    }

    #[test]
    fn a_process_without_code_is_about_to_execute_the_monitor() {
        const STACK: &str =
            "7ffd0000-7ffd1000 rw-p 00000000 00:00 0 [stack]\n7fff0000-7fff1000 r-xp 0 00:00 0 [vdso]\n";
        const MONITOR: &str = "1000-2000 r-xp 00001000 fe:00 77 /usr/bin/pagemark-kvm\n";
        const PROGRAM: &str = "4000-5000 r-xp 00001000 fe:00 78 /usr/bin/cat\n";
        let has_code = |parts: &[&str]| has_code_of_monitor(&maps::parse(parts.concat().as_bytes()).unwrap());
        assert!(has_code(&[STACK]));
        assert!(has_code(&[MONITOR, PROGRAM, STACK]));
        assert!(!has_code(&[PROGRAM, STACK]), "it has left its machine");
    }
}
