//! One test in one mode, run as the first process of a PID namespace.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::catalog::{Flavor, Test, is_executable};
use super::root::Root;
use super::text::{end_of, read};
use super::{Mode, Verdict};
use crate::{Error, Result};

/// How long a test may take to start, to end, or to run one of its hooks.
const TEST_LIMIT: Duration = Duration::from_secs(40);
/// How long a save or a restore may take.
const SAVE_LIMIT: Duration = Duration::from_secs(100);
/// Checkpoints that are taken before a test is killed.
const CHECKPOINTS: usize = 3;
/// The options of CRIU that Pagemark always uses.
const DUMP_OPTIONS: [&str; 5] =
    ["--leave-running", "--file-locks", "--skip-in-flight", "--ghost-limit=1073741824", "--manage-cgroups=ignore"];
const RESTORE_OPTIONS: [&str; 3] = ["--file-locks", "--skip-in-flight", "--manage-cgroups=ignore"];

/// Runs a test of `tree`, CRIU's directory `test`, in a mode, and writes the verdict to a file.
/// This process must be the first of its PID namespace, and is to have all of `work` for its files.
///
/// # Errors
/// If the trial itself failed.
pub fn run(
    test: &str,
    mode: Mode,
    tree: &Path,
    work: &Path,
    criu: &Path,
    pagemark: &Path,
    verdict: &Path,
) -> Result<()> {
    keep_descriptors_from_children();
    let test = Test::read(tree, test)?;
    let directory = tree.join("zdtm").join(&test.kind);
    let (tree, work) = (tree.to_owned(), work.to_owned());
    let (criu, pagemark) = (criu.to_owned(), pagemark.to_owned());
    let (root, sockets, ended) = Default::default();
    let mut trial = Trial { test, mode, directory, tree, work, criu, pagemark, root, sockets, ended };
    let result = trial.run();
    trial.clean()?;
    let found = match result {
        Ok(()) => Verdict::Passed,
        Err(End::Verdict(found)) => found,
        Err(End::Error(error)) => return Err(error),
    };
    std::fs::write(verdict, found.to_string().replace('\n', " ")).map_err(Error::file("write", verdict))
}

/// Why a trial ended early.
enum End {
    Verdict(Verdict),
    Error(Error),
}

impl From<Error> for End {
    fn from(error: Error) -> End {
        End::Error(error)
    }
}

fn failed(reason: impl Into<String>) -> End {
    End::Verdict(Verdict::Failed(reason.into()))
}

struct Trial {
    test: Test,
    mode: Mode,
    /// Where the test and its files are.
    directory: PathBuf,
    /// CRIU's directory `test`.
    tree: PathBuf,
    work: PathBuf,
    criu: PathBuf,
    pagemark: PathBuf,
    /// Of a test that has namespaces of its own.
    root: Option<Root>,
    /// The paths of the sockets that the test has bound, as it sees them.
    sockets: Vec<PathBuf>,
    /// The exit status of each child that has ended. Orphans of the namespace become children, so
    /// that children are awaited together.
    ended: HashMap<i32, i32>,
}

impl Trial {
    fn run(&mut self) -> Result<(), End> {
        self.set_up()?;
        let pid = self.start()?;
        self.hook("--pre-dump", pid)?;
        self.sockets = self.socket_paths(pid);
        match self.mode {
            Mode::Criu => self.save_with_criu(pid)?,
            Mode::Checkpoint | Mode::Lazy => self.checkpoint(pid)?,
            Mode::Attach => self.attach(pid)?,
        }
        self.hook("--pre-restore", pid)?;
        let pid = self.restore(pid)?;
        self.hook("--post-restore", pid)?;
        if !is_alive(pid) {
            return Err(failed("the restore reported success, but the process is not there"));
        }
        sleep(Duration::from_millis(100));
        self.ask_for_verdict(pid).map_err(|reason| failed(format!("after the restore: {reason}")))?;
        if self.test.expects_refusal() {
            println!("it was saved, although the test expects that this is impossible");
        }
        Ok(())
    }

    /// Terminals and a network of the namespaces' own.
    fn set_up(&mut self) -> Result<(), End> {
        for command in [
            &["mount", "-t", "devpts", "-o", "newinstance,ptmxmode=0666", "devpts", "/dev/pts"][..],
            &["mount", "--bind", "/dev/pts/ptmx", "/dev/ptmx"],
            &["ip", "link", "set", "up", "dev", "lo"],
        ] {
            let (status, output) = self.call(Command::new(command[0]).args(&command[1..]), "set-up", TEST_LIMIT)?;
            if status != Some(0) {
                return Err(Error::unmet(format!("{}: {output}", command.join(" ")), "see above").into());
            }
        }
        if self.test.flavor != Flavor::Host {
            self.root = Some(Root::make(&self.test, &self.tree, &self.work)?);
        }
        Ok(())
    }

    /// Starts the test. When its makefile's rule ends, the test has set up its state.
    fn start(&mut self) -> Result<i32, End> {
        self.clean()?;
        let target = format!("{}.pid", self.test.program);
        let (status, output) = self.make(&target, "start")?;
        let not_started = |reason: String| End::Verdict(Verdict::NotStarted(reason));
        if status != Some(0) {
            return Err(not_started(end_of(&format!("{output} {}", self.output_of_test()))));
        }
        // A test that has ended by itself removes the file.
        let text = read(&self.directory.join(&target));
        let pid = text.lines().next().and_then(|line| line.trim().parse().ok());
        let pid = pid.filter(|pid| is_alive(*pid)).ok_or_else(|| not_started(end_of(&self.output_of_test())))?;
        self.hook("--post-start", pid)?;
        // A test of the second kind is to be saved while it changes its state.
        sleep(Duration::from_millis(if self.test.kind == "transition" { 700 } else { 100 }));
        Ok(pid)
    }

    /// Removes what an earlier run of the test has left.
    fn clean(&mut self) -> Result<()> {
        let target = format!("{}.cleanout", self.test.program);
        match self.make(&target, "clean") {
            Ok(_) => Ok(()),
            Err(End::Error(error)) => Err(error),
            Err(End::Verdict(_)) => Ok(()),
        }
    }

    fn make(&mut self, target: &str, log: &str) -> Result<(Option<i32>, String), End> {
        let mut make = Command::new("make");
        make.args(["--no-print-directory", "--silent", "-C"]);
        match &self.root {
            Some(root) => {
                make.arg(Path::new("zdtm").join(&self.test.kind));
                root.prepare(&self.test, &mut make);
            }
            None => drop(make.arg(&self.directory)),
        }
        self.call(make.arg(target).env("ZDTM_THREAD_BOMB", "5"), log, TEST_LIMIT)
    }

    /// Runs the test's hook of this name, if it has one.
    fn hook(&mut self, stage: &str, pid: i32) -> Result<(), End> {
        let hook = self.directory.join(format!("{}.hook", self.test.program));
        // Those for TCP block packets in the network of the host.
        if self.test.program.starts_with("socket-tcp") || !is_executable(&hook) {
            return Ok(());
        }
        let mut command = Command::new(&hook);
        command.arg(stage).current_dir(&self.tree).env("ZDTM_TEST_PID", pid.to_string());
        match self.call(&mut command, "hook", TEST_LIMIT)? {
            (Some(0), _) => Ok(()),
            (_, output) => Err(failed(format!("the hook {stage}: {}", end_of(&output)))),
        }
    }

    fn save_with_criu(&mut self, pid: i32) -> Result<(), End> {
        let mut dump = Command::new(&self.criu);
        dump.args(["dump", "--no-default-config", "-v4", "-o", "dump.log", "--timeout", "10"]);
        dump.arg("-D").arg(self.directory_of_images()?).args(["-t", &pid.to_string()]).args(DUMP_OPTIONS);
        dump.arg(self.connections("--tcp-established", "--tcp-close"));
        if let Some(root) = &self.root {
            root.dump_options(&mut dump);
        }
        let (status, _) = self.call(&mut dump, "dump", SAVE_LIMIT)?;
        if status != Some(0) {
            let reason = self.errors_of_criu("dump.log");
            return self.refused(pid, &reason);
        }
        self.kill(pid)
    }

    fn checkpoint(&mut self, pid: i32) -> Result<(), End> {
        let mut checkpoint = Command::new(&self.pagemark);
        checkpoint.args(["checkpoint", &pid.to_string(), "--job", "test", "--repo"]).arg(self.work.join("repository"));
        checkpoint.args(self.keep_connections()).args(self.save_network());
        let (status, output) = self.call(&mut checkpoint, "checkpoint", SAVE_LIMIT)?;
        if status != Some(0) {
            return self.refused(pid, &output);
        }
        self.kill(pid)
    }

    fn attach(&mut self, pid: i32) -> Result<(), End> {
        let mut attach = Command::new(&self.pagemark);
        attach.args(["attach", &pid.to_string(), "--every", "200ms", "--json", "--job", "test", "--repo"]);
        attach.arg(self.work.join("repository")).args(self.keep_connections());
        attach.args(self.save_network());
        let log = self.work.join("attach");
        let attached = self.start_command(&mut attach, &log)?;
        let limit = Instant::now() + TEST_LIMIT;
        let mut refused_since = None;
        loop {
            let output = read(&log);
            let taken = output.lines().filter(|line| line.contains("\"event\":\"checkpoint\"")).count();
            let has_failed = output.contains("\"event\":\"failed\"");
            let has_ended = self.has_ended(attached).is_some();
            if taken >= CHECKPOINTS || (taken > 0 && (has_ended || Instant::now() > limit)) {
                break;
            }
            let since = *refused_since.get_or_insert(Instant::now());
            if !has_failed {
                refused_since = None;
            }
            if has_ended || Instant::now() > limit || (has_failed && since.elapsed() > Duration::from_secs(2)) {
                let _ = kill(Pid::from_raw(attached), Signal::SIGINT);
                if self.wait(attached, TEST_LIMIT).is_none() {
                    let _ = kill(Pid::from_raw(attached), Signal::SIGKILL);
                }
                return self.refused(pid, &output);
            }
            sleep(Duration::from_millis(30));
        }
        self.kill(pid)?;
        match self.wait(attached, SAVE_LIMIT) {
            Some(_) => Ok(()),
            None => Err(failed("pagemark attach did not end although its target had")),
        }
    }

    /// The save was refused: then the test must not have been harmed by it.
    fn refused(&mut self, pid: i32, reason: &str) -> Result<(), End> {
        let reason = end_of(reason);
        let verdict = match self.ask_for_verdict(pid) {
            Ok(()) if self.test.expects_refusal() => Verdict::Passed,
            Ok(()) => Verdict::Failed(format!("not saved: {reason}")),
            // A test that needs another way of being run ends by itself.
            Err(state) if self.has_passed() => Verdict::NotStarted(state),
            // Plain CRIU is not what is tested.
            Err(state) if self.mode == Mode::Criu => Verdict::Failed(format!("not saved: {reason}; {state}")),
            Err(state) => Verdict::Harmed(format!("{state}; it was not saved: {reason}")),
        };
        Err(End::Verdict(verdict))
    }

    /// The paths of the sockets of the test's network, which is its alone. Relative ones begin
    /// where tests are started.
    fn socket_paths(&self, pid: i32) -> Vec<PathBuf> {
        let begin = if self.root.is_some() { Path::new("/zdtm").join(&self.test.kind) } else { self.directory.clone() };
        let listed = read(Path::new(&format!("/proc/{pid}/net/unix")));
        let names = listed.lines().skip(1).filter_map(|line| line.split_whitespace().nth(7));
        names.filter(|name| !name.starts_with('@')).map(|name| begin.join(name)).collect()
    }

    /// Restores the test, and returns the id of its process, which had `pid` before. In a namespace
    /// of process ids of its own, it has another one here.
    fn restore(&mut self, pid: i32) -> Result<i32, End> {
        let pid_file = self.directory.join(format!("{}.pid", self.test.program));
        let mut restore;
        if self.mode == Mode::Criu {
            let _ = std::fs::remove_file(&pid_file);
            restore = Command::new(&self.criu);
            restore.args(["restore", "--no-default-config", "-v4", "-o", "restore.log", "--restore-detached"]);
            restore.arg("-D").arg(self.directory_of_images()?).arg("--pidfile").arg(&pid_file).args(RESTORE_OPTIONS);
            restore.arg(self.connections("--tcp-established", "--tcp-close"));
            if let Some(root) = &self.root {
                root.restore_options(&mut restore);
            }
        } else {
            restore = Command::new(&self.pagemark);
            restore.args(["restore", "test", "--detach", "--yes", "--repo"]).arg(self.work.join("repository"));
            restore.args((self.mode == Mode::Lazy).then_some("--lazy"));
            // No test asks who its peer is.
            restore.arg("--root-peers");
            if self.root.is_some() {
                // Some tests become users who could exchange their output, and may not write it.
                let output = format!("/zdtm/{}/{}.out.inprogress", self.test.kind, self.test.program);
                restore.args(["--trust-path", &output]);
            }
            // Every user can change the directory of the tests.
            for path in &self.sockets {
                restore.arg("--trust-path").arg(path);
            }
            if self.test.words("ropts").iter().any(|option| option == "--manage-cgroups=ignore") {
                restore.args(["--cgroups", "ignore"]);
            }
        }
        let (status, output) = self.call(&mut restore, "restore", SAVE_LIMIT)?;
        match (status, self.mode) {
            (Some(0), _) if self.root.is_none() => Ok(pid),
            (Some(0), Mode::Criu) => read(&pid_file).trim().parse().map_err(|_| failed("CRIU wrote no process id")),
            (Some(0), _) => restored_pid(&output).ok_or_else(|| failed(format!("no process id in: {output}"))),
            (None, _) => Err(failed(format!("the restore did not end: {}", end_of(&output)))),
            (_, Mode::Criu) => Err(failed(format!("not restored: {}", self.errors_of_criu("restore.log")))),
            _ => Err(failed(format!("not restored: {}", end_of(&output)))),
        }
    }

    fn connections(&self, kept: &'static str, closed: &'static str) -> &'static str {
        let options = [self.test.words("opts"), self.test.words("dopts")].concat();
        if options.iter().any(|option| option == "--tcp-established") { kept } else { closed }
    }

    fn keep_connections(&self) -> Option<&'static str> {
        Some(self.connections("--keep-connections", "")).filter(|option| !option.is_empty())
    }

    /// As plain CRIU does in a namespace of the test's own.
    fn save_network(&self) -> Option<&'static str> {
        self.root.as_ref().map(|_| "--save-network")
    }

    fn directory_of_images(&self) -> Result<PathBuf> {
        let images = self.work.join("images");
        crate::cache::create(&images)?;
        Ok(images)
    }

    fn errors_of_criu(&self, log: &str) -> String {
        let log = read(&self.work.join("images").join(log));
        end_of(&log.lines().filter(|line| line.contains("Error (")).collect::<Vec<_>>().join("; "))
    }

    /// Sends SIGTERM, upon which a test checks its state and writes `PASS` or why not.
    fn ask_for_verdict(&mut self, pid: i32) -> Result<(), String> {
        if kill(Pid::from_raw(pid), Signal::SIGTERM).is_err() {
            return Err(format!("the test has ended by itself: {}", end_of(&self.output_of_test())));
        }
        let ended = self.until(TEST_LIMIT, |_| !is_alive(pid));
        match (ended, self.has_passed()) {
            (true, true) => Ok(()),
            (true, false) => Err(format!("the test says: {}", end_of(&self.output_of_test()))),
            (false, _) => Err(format!("the test did not end within {} s after SIGTERM", TEST_LIMIT.as_secs())),
        }
    }

    /// Whether the last line of the test's output is its good verdict.
    fn has_passed(&self) -> bool {
        let output = self.output_of_test();
        output.lines().last().unwrap_or_default().split_whitespace().any(|word| word == "PASS")
    }

    fn output_of_test(&self) -> String {
        let output = |suffix: &str| read(&self.directory.join(format!("{}.{suffix}", self.test.program)));
        // It has the second name until the test has its verdict.
        Some(output("out")).filter(|text| !text.is_empty()).unwrap_or_else(|| output("out.inprogress"))
    }

    /// Kills a process and all its descendants.
    fn kill(&mut self, pid: i32) -> Result<(), End> {
        sleep(Duration::from_millis(50));
        let killed = self.until(TEST_LIMIT, |_| {
            let tree = descendants(pid);
            for pid in &tree {
                let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
            }
            tree.is_empty()
        });
        if killed { Ok(()) } else { Err(failed("the test could not be killed")) }
    }

    /// Runs a command with its output in a file of the work directory. Returns its exit status,
    /// None if it had to be killed, and its output.
    fn call(&mut self, command: &mut Command, log: &str, limit: Duration) -> Result<(Option<i32>, String), End> {
        let log = self.work.join(log);
        let pid = self.start_command(command, &log)?;
        let status = self.wait(pid, limit);
        if status.is_none() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            self.wait(pid, limit);
        }
        let output = read(&log);
        println!("{:?}: {status:?}\n{output}", command.get_program());
        Ok((status, output))
    }

    fn start_command(&mut self, command: &mut Command, log: &Path) -> Result<i32> {
        let file = File::create(log).map_err(Error::file("create", log))?;
        crate::command::redirect(command, file, log)?;
        Ok(crate::command::start(command.process_group(0))?.id() as i32)
    }

    fn wait(&mut self, pid: i32, limit: Duration) -> Option<i32> {
        self.until(limit, |trial| trial.has_ended(pid).is_some());
        self.has_ended(pid)
    }

    fn has_ended(&mut self, pid: i32) -> Option<i32> {
        self.reap();
        self.ended.get(&pid).copied()
    }

    /// Awaits every child that has ended, the orphans among them.
    fn reap(&mut self) {
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, status)) => self.ended.insert(pid.as_raw(), status),
                Ok(WaitStatus::Signaled(pid, signal, _)) => self.ended.insert(pid.as_raw(), 128 + signal as i32),
                Err(Errno::EINTR) => continue,
                _ => return,
            };
        }
    }

    /// Waits until a condition holds. False if it did not within the limit.
    fn until(&mut self, limit: Duration, mut condition: impl FnMut(&mut Trial) -> bool) -> bool {
        let end = Instant::now() + limit;
        loop {
            self.reap();
            if condition(self) {
                return true;
            }
            if Instant::now() > end {
                return false;
            }
            sleep(Duration::from_millis(10));
        }
    }
}

/// Marks all descriptors but the standard streams to be closed in programs that are started: a file
/// that was opened outside of the mount namespace cannot be saved.
fn keep_descriptors_from_children() {
    // SAFETY: the call closes nothing in this process, and only sets a flag of its descriptors.
    // Where the kernel lacks it, descriptors of the caller remain, and tests report them.
    unsafe { nix::libc::close_range(3, u32::MAX, nix::libc::CLOSE_RANGE_CLOEXEC as i32) };
}

/// The process id that `pagemark restore` reports.
fn restored_pid(output: &str) -> Option<i32> {
    output.lines().find_map(|line| line.split_once("runs as process ")?.1.trim().parse().ok())
}

fn is_alive(pid: i32) -> bool {
    kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH)
}

/// A process and its descendants, as far as they are alive.
fn descendants(root: i32) -> Vec<i32> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    for pid in entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()) {
        let stat = read(Path::new(&format!("/proc/{pid}/stat")));
        // The name in parentheses can hold anything.
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse().ok());
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut tree = vec![root];
    let mut next = 0;
    while let Some(pid) = tree.get(next) {
        tree.extend(children.remove(pid).unwrap_or_default());
        next += 1;
    }
    tree.retain(|pid| is_alive(*pid));
    tree
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_of_a_restored_test() {
        let output = "pagemark: note\npagemark: test@1 runs as process 4711\n";
        assert_eq!((restored_pid(output), restored_pid("pagemark: error")), (Some(4711), None));
    }

    #[test]
    fn a_child_is_a_descendant() {
        let mut child = Command::new("sleep").arg("100").spawn().unwrap();
        let tree = descendants(std::process::id() as i32);
        assert!(tree.contains(&(child.id() as i32)));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(descendants(child.id() as i32).is_empty());
    }
}
