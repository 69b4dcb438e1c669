//! Processes to attach to, which show whether they were disturbed.
#![allow(dead_code, reason = "each story uses a part")]

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use pagemark_testing::{assert_oracle, directory_until_exit, patience, wait_for};

use crate::support::{Pagemark, command_line, is_alive};

/// The user `nobody`, without permissions.
pub const NOBODY: u32 = 65534;

/// The compiled program `subject.c`, for every user; none where there is no C compiler.
pub fn subject() -> Option<PathBuf> {
    static PROGRAM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let compile = || {
        let program = directory_until_exit().join("subject");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/subject.c");
        let done = Command::new("cc").args(["-O1", "-o"]).arg(&program).arg(source).status().ok()?;
        assert!(done.success(), "subject.c does not compile");
        Some(program)
    };
    PROGRAM.get_or_init(compile).clone()
}

/// A directory that every user can read.
pub fn public_directory() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    let all = fs::Permissions::from_mode(0o755);
    tempfile::Builder::new().permissions(all).tempdir().expect("a temporary directory")
}

/// A running `subject`, killed when dropped.
pub struct Subject {
    child: Child,
    descriptors: Vec<String>,
}

impl Subject {
    pub fn start(mode: &[impl AsRef<OsStr>]) -> Option<Subject> {
        Self::start_as(None, mode)
    }

    /// Starts it without restartable sequences, which CRIU can save only since Linux 5.13.
    pub fn start_without_restartable_sequences(mode: &[impl AsRef<OsStr>]) -> Option<Subject> {
        let mut command = Command::new(subject()?);
        Some(Self::spawn(command.args(mode).env("GLIBC_TUNABLES", "glibc.pthread.rseq=0")))
    }

    /// Starts it as user `user`, if there is one.
    pub fn start_as(user: Option<u32>, mode: &[impl AsRef<OsStr>]) -> Option<Subject> {
        let mut command = Command::new(subject()?);
        if let Some(user) = user {
            command.uid(user).gid(user);
        }
        Some(Self::spawn(command.args(mode)))
    }

    /// Starts it by this command, which may have any attributes.
    pub fn spawn(command: &mut Command) -> Subject {
        // The directory of the file that it writes is its own, so that a restore changes the file
        // without asking.
        let file = command.get_args().last().map(Path::new).filter(|file| file.is_absolute());
        let directory = file.and_then(Path::parent).unwrap_or(Path::new("/")).to_owned();
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).current_dir(directory);
        // SAFETY: only system calls are made between fork and exec.
        unsafe {
            command.pre_exec(|| {
                // Descriptors of the test runner may lead anywhere. A kernel without this call keeps them
                // open.
                libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as i32);
                Ok(nix::unistd::setsid().map(drop)?)
            })
        };
        let mut child = command.spawn().expect("the subject starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n", "the subject did not start");
        let descriptors = usual_descriptors(child.id() as i32);
        Subject { child, descriptors }
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    pub fn pid_text(&self) -> String {
        self.pid().to_string()
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid()), signal).expect("it lives");
    }

    /// Asserts that it runs, and that it has no traces of Pagemark.
    #[track_caller]
    pub fn is_untouched(&self) {
        untouched(self.pid(), &self.descriptors);
    }

    /// The exit status, once it has ended by itself.
    pub fn wait(&mut self) -> Option<i32> {
        self.child.wait().expect("our child").code()
    }

    /// How it has ended, once it has.
    pub fn status(&mut self) -> std::process::ExitStatus {
        self.child.wait().expect("our child")
    }

    /// Kills the process, and waits until its id is free.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Subject {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The program `subject` that takes steps, by the file into which it writes them. It makes none
/// while it is paused.
pub struct Steps {
    file: PathBuf,
}

impl Steps {
    /// In a directory of the test.
    pub fn new(directory: &Path) -> Steps {
        Steps { file: directory.join("steps") }
    }

    /// The arguments that make `subject` take steps with `mib` MiB of data.
    pub fn arguments(&self, mib: u32) -> Vec<String> {
        vec!["steps".into(), mib.to_string(), self.file.display().to_string()]
    }

    /// Steps made, and whether it is paused.
    fn state(&self) -> (u64, bool) {
        let text = fs::read_to_string(&self.file).unwrap_or_default();
        let mut words = text.split_whitespace();
        (words.next().and_then(|word| word.parse().ok()).unwrap_or(0), words.next() == Some("paused"))
    }

    /// Waits until process `pid` has made some more steps, in which it has checked its data.
    pub fn goes_on(&self, pid: i32) {
        let before = self.state().0;
        wait_for("steps", || {
            assert_oracle!(is_alive(pid), "it has ended: its data was wrong");
            (self.state().0 > before + 20).then_some(())
        });
    }

    /// Pauses it from its next step on, also before it is started.
    pub fn order_pause(&self) {
        fs::write(self.file.with_extension("pause"), "").expect("a file");
    }

    /// Pauses it, and returns the number of steps.
    pub fn pause(&self) -> u64 {
        self.order_pause();
        wait_for("the pause", || Some(self.state()).filter(|(_, paused)| *paused)).0
    }

    /// Waits until a paused subject reports that it has made `steps` steps.
    pub fn is_paused_at(&self, steps: u64) {
        wait_for("the pause", || (self.state() == (steps, true)).then_some(()));
    }

    /// Lets it make steps.
    pub fn resume(&self) {
        fs::remove_file(self.file.with_extension("pause")).expect("it is paused");
    }
}

/// The open descriptors of a process: number and target.
pub fn descriptors(pid: i32) -> Vec<String> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let mut list: Vec<String> = entries
        .filter_map(|entry| {
            Some(format!("{} {}", entry.file_name().display(), fs::read_link(entry.path()).ok()?.display()))
        })
        .collect();
    list.sort();
    list
}

/// What is open most of the time. Some modes open a file for a moment, again and again.
fn usual_descriptors(pid: i32) -> Vec<String> {
    let mut seen: HashMap<Vec<String>, u32> = HashMap::new();
    for _ in 0..51 {
        *seen.entry(descriptors(pid)).or_default() += 1;
        std::thread::sleep(Duration::from_millis(2));
    }
    let usual = seen.into_iter().max_by_key(|(_, count)| *count);
    usual.map(|(list, _)| list).unwrap_or_default()
}

pub fn status_field(pid: i32, name: &str) -> Option<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim_start_matches(':').trim().into())
}

/// Asserts that a process runs, untraced, with these descriptors and no page watched by a
/// userfaultfd.
#[track_caller]
pub fn untouched(pid: i32, expected: &[String]) {
    assert_oracle!(is_alive(pid), "process {pid} is gone");
    assert_eq!(status_field(pid, "TracerPid").as_deref(), Some("0"), "it is traced");
    let state = status_field(pid, "State").unwrap_or_default();
    assert!(!state.starts_with(['T', 't']), "it is stopped: {state}");
    // Some programs open a file for a short time now and then. A leftover descriptor stays.
    let deadline = Instant::now() + patience();
    while descriptors(pid) != expected && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(descriptors(pid), expected, "its descriptors are not as they were");
    assert!(!is_watched(pid), "a userfaultfd still watches its memory");
}

/// True if a mapping of the process is registered with a userfaultfd.
pub fn is_watched(pid: i32) -> bool {
    let smaps = fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap_or_default();
    let flags = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
    flags.flat_map(str::split_whitespace).any(|flag| matches!(flag, "uw" | "um" | "ui"))
}

/// Waits until the helper processes of a killed Pagemark have left the process.
pub fn wait_until_left_alone(pid: i32) {
    wait_for("CRIU and helpers to end", || {
        let traced = status_field(pid, "TracerPid").is_some_and(|tracer| tracer != "0");
        (!traced && criu_on(pid).is_empty() && !is_watched(pid)).then_some(())
    });
}

/// CRIU's processes that dump the process.
pub fn criu_on(pid: i32) -> Vec<i32> {
    let wanted = " dump --no-default-config -D ";
    let target = format!(" -t {pid} ");
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|entry| entry.file_name().to_string_lossy().parse().ok())
        .filter(|&process| {
            let line = command_line(process);
            line.contains(wanted) && line.contains(&target)
        })
        .collect()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asserts that the command failed with status 1, and printed all of `texts` and a help line.
#[track_caller]
pub fn assert_fails(output: &Output, texts: &[&str]) {
    let told = stderr(output);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.starts_with("pagemark: "), "{told}");
    assert!(told.contains("\nhelp: "), "no help: {told}");
    for text in texts {
        assert!(told.contains(text), "{text:?} is not in: {told}");
    }
}

/// Asserts that the repository is undamaged.
#[track_caller]
pub fn verifies(pagemark: &Pagemark) {
    pagemark.verify(&[]);
}

pub fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

/// True if whole processes can be checkpointed here.
pub fn has_criu() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| is_root() && pagemark_process::criu::Criu::find().is_ok())
}

/// Waits until the target has checked its data a few times, or is gone: then false.
pub fn continues(data: &Path, pid: i32) -> bool {
    let content = || fs::read(data).unwrap_or_default();
    let before = content().len();
    wait_for("the restored target to go on or to end", || {
        let is_alive = is_alive(pid);
        let content = content();
        assert_oracle!(!content.contains(&b'!'), "the restored target has found its data wrong");
        (!is_alive || content.len() > before + 2).then_some(is_alive)
    })
}
