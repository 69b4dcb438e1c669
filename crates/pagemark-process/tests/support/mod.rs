//! Support of the tests: programs to save, and checkpoints in a repository or in memory.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use pagemark::repository::{Checkpoint, Cost, Manifest, Repository, SpaceRecord, StateRecord, TargetKind};
use pagemark::track::Scope;
use pagemark::{
    Address, AddressRangeExt, Blob, ByteCount, Job, JobOptions, Kind, Mechanism, PAGE_SIZE, PageNumber, PageTree,
    Store, store::MemoryStore,
};
use pagemark_linux::proc::{Process, Stat};
use pagemark_process::criu::images::schema::CoreEntry;
use pagemark_process::criu::images::{ImageKind, read_first};
use pagemark_process::criu::{Criu, Dump, DumpOptions, Timings, dump::Populated};
use pagemark_process::files::{DataTree, FileWatch};
use pagemark_process::restore::{Restore, RestoreEvent, RestoreFailure, RestoreOptions, Restored, prepare};
use pagemark_process::saver::CriuSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_process::{Error, RecordedPid};
use pagemark_testing::{assert_oracle, assert_oracle_eq, in_own_session, skipped, wait_until};

/// The kernel leaves these bytes below a stack pointer alone.
const RED_ZONE: u64 = 128;
/// The frame of a signal ends within these bytes below a stack pointer, vector registers included.
const SIGNAL_FRAME: u64 = 16 << 10;

/// A CRIU that works here. Otherwise reports why the test is skipped, and returns None.
pub fn criu() -> Option<Criu> {
    if !nix::unistd::geteuid().is_root() {
        skipped("not root");
        return None;
    }
    Criu::find().map_err(|error| skipped(&error.to_string())).ok()
}

/// The number of the next line that ends with `line N`. Other lines are from the test harness; a
/// program that ends by an error writes others, too, which are in the message of the panic.
pub fn read_number(lines: &mut impl BufRead) -> u64 {
    let mut others = String::new();
    loop {
        let mut line = String::new();
        match lines.read_line(&mut line) {
            Ok(0) => panic!("the output ends: {others}"),
            Err(error) => panic!("{error}: {others}"),
            Ok(_) => {}
        }
        match line.trim_end().rsplit_once("line ").map(|(_, number)| number.parse()) {
            Some(Ok(number)) => return number,
            _ => others += &line,
        }
    }
}

pub fn status_field(pid: i32, name: &str) -> Option<String> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_string())
}

pub fn tracer(pid: i32) -> i32 {
    status_field(pid, "TracerPid:").map_or(0, |value| value.parse().unwrap())
}

pub fn is_running(pid: i32) -> bool {
    status_field(pid, "State:").is_some_and(|state| !state.starts_with(['Z', 'X', 'T', 't']))
}

pub fn is_alive(pid: i32) -> bool {
    status_field(pid, "State:").is_some_and(|state| !state.starts_with(['Z', 'X']))
}

pub fn executable_mappings(pid: i32) -> Vec<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().filter(|line| line.split(' ').nth(1).unwrap().contains('x')).map(str::to_string).collect()
}

/// The program of [`Program::counter`] up to its set-up, and from there to its round.
const COUNTER_BEGIN: &str = "import os, time\n";
const COUNTER_SHOW: &str = "
count = os.open('count.new', os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
def show(n):
    os.pwrite(count, b'%-20d' % n, 0)
show(0)
os.rename('count.new', 'count')
n = 0
while True:
    n += 1
";

/// The begin of a program in C: `report` writes a text into a file, of which readers see all or
/// nothing.
pub const REPORT: &str = r#"
#define _GNU_SOURCE
#include <stdio.h>

static void report(const char *name, const char *text) {
    char making[64];
    snprintf(making, sizeof making, "making %s", name);
    FILE *file = fopen(making, "w");
    fputs(text, file);
    fclose(file);
    rename(making, name);
}
"#;

/// The end of a program in Python that defines `read()`: reports again and again what that gives,
/// in the file `out`, of which readers see all or nothing.
pub const REPORT_AGAIN: &str = "
n = 0
while True:
    n += 1
    with open('out.new', 'w') as out:
        out.write('%d %s' % (n, read()))
    try:
        os.rename('out.new', 'out')
    except FileNotFoundError:
        pass  # Frozen between the two lines, and renamed since.
    time.sleep(0.01)
";

/// The Python of user 65534: that in PATH may be in root's home.
const USERS_PYTHON: &str = "/usr/bin/python3";

/// A directory of user 65534. None after reporting why the test is skipped, where that user has no
/// Python.
fn directory_of_a_user() -> Option<tempfile::TempDir> {
    if !Path::new(USERS_PYTHON).exists() {
        skipped("no /usr/bin/python3");
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(directory.path(), Some(65534), Some(65534)).unwrap();
    Some(directory)
}

/// A program that is saved, killed and restored. It is killed when dropped.
pub struct Program {
    directory: tempfile::TempDir,
    child: Option<Child>,
    pids: Vec<i32>,
    /// When its processes have started.
    starts: Vec<Option<u64>>,
}

impl Program {
    /// Runs a Python text in a directory of its own.
    pub fn python(text: &str) -> Program {
        Program::python_with(text, Stdio::null())
    }

    /// Runs a Python text as user 65534, in a directory of that user. None after reporting why the
    /// test is skipped, where that user has no Python.
    pub fn of_a_user(text: &str) -> Option<Program> {
        let directory = directory_of_a_user()?;
        let mut command = Command::new(USERS_PYTHON);
        command.arg("-c").arg(text).stdin(Stdio::null()).stdout(Stdio::null()).uid(65534).gid(65534);
        Some(Program::start_in(&mut command, directory))
    }

    /// Like [`Program::of_a_user`], with the file `log` as output, which root has opened and which
    /// is root's alone.
    pub fn of_a_user_with_output_of_root(text: &str) -> Option<Program> {
        let directory = directory_of_a_user()?;
        let log = std::fs::File::create(directory.path().join("log")).unwrap();
        log.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let mut command = Command::new(USERS_PYTHON);
        command.arg("-c").arg(text).stdin(Stdio::null()).stdout(log).uid(65534).gid(65534);
        Some(Program::start_in(&mut command, directory))
    }

    /// Runs a Python text as root, in a directory of user 65534.
    pub fn of_root_in_a_directory_of_a_user(text: &str) -> Option<Program> {
        let directory = directory_of_a_user()?;
        let mut command = Command::new(USERS_PYTHON);
        command.arg("-c").arg(text).stdin(Stdio::null()).stdout(Stdio::null());
        Some(Program::start_in(&mut command, directory))
    }

    /// Like [`Program::of_a_user`], as the first process of a container with process ids and mounts
    /// of its own.
    pub fn of_a_user_in_a_container(text: &str) -> Option<Program> {
        Program::of_a_user_in_a_container_after("true", text)
    }

    /// The same, after root has executed a line of the shell in the container's mounts, in the
    /// program's directory.
    pub fn of_a_user_in_a_container_after(line: &str, text: &str) -> Option<Program> {
        Program::of_a_user_in_a_container_with(line, text, Stdio::null())
    }

    /// The same, with this output.
    pub fn of_a_user_in_a_container_with(line: &str, text: &str, output: Stdio) -> Option<Program> {
        let line = format!("{line} && exec setsid setpriv --reuid=65534 --regid=65534 --clear-groups \"$@\"");
        Program::in_a_container(&line, text, output)
    }

    /// Runs a Python program of root's in namespaces of processes and mounts of its own, after
    /// root has executed a line of the shell there.
    pub fn of_root_in_a_container_after(line: &str, text: &str) -> Option<Program> {
        Program::in_a_container(&format!("{line} && exec setsid \"$@\""), text, Stdio::null())
    }

    fn in_a_container(line: &str, text: &str, output: Stdio) -> Option<Program> {
        let directory = directory_of_a_user()?;
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount", "--mount-proc", "sh", "-c", line, "sh", USERS_PYTHON, "-c", text]);
        command.stdin(Stdio::null()).stdout(output);
        let mut program = Program::start_in(&mut command, directory);
        let mut pids = Vec::new();
        wait_until("the container has a process", || {
            pids = tree(program.pid());
            pids.len() > 1
        });
        program.pids = vec![pids[1]];
        Some(program)
    }

    pub fn python_with(text: &str, output: Stdio) -> Program {
        Program::start(Command::new(python()).arg("-c").arg(text).stdin(Stdio::null()).stdout(output))
    }

    /// Runs a Python program that executes `set_up` once, and then for each number from 1 on
    /// executes `round`, which may call `show(n)` to write the number into the file `count`. The
    /// program keeps this file open, and the file keeps its size. Returns when the file is there.
    pub fn counter(set_up: &str, round: &str) -> Program {
        let mut text = format!("{COUNTER_BEGIN}{}\n{COUNTER_SHOW}", set_up.trim());
        text.extend(round.trim().lines().flat_map(|line| ["    ", line, "\n"]));
        let program = Program::python(&text);
        wait_until("the program counts", || program.read("count").is_some());
        program
    }

    /// The number in the file `count` of a [`Program::counter`].
    pub fn count(&self) -> u64 {
        self.read("count").and_then(|count| count.parse().ok()).unwrap_or(0)
    }

    /// Waits until a [`Program::counter`] has counted further than a number.
    pub fn wait_until_count_exceeds(&self, number: u64) {
        wait_until("the program counts", || {
            self.has_found_nothing_wrong();
            self.count() > number
        });
    }

    /// Requires that a program that checks itself has written nothing into the file `wrong`.
    #[track_caller]
    pub fn has_found_nothing_wrong(&self) {
        assert_oracle_eq!(self.read("wrong"), None, "what the program has found");
    }

    /// Runs a Python text on a terminal, which may be its controlling terminal.
    pub fn python_on(text: &str, terminal: &Terminal, controlling: bool) -> Program {
        let mut command = Command::new(python());
        command.arg("-c").arg(text);
        terminal.attach(&mut command, controlling);
        Program::start_as_it_is(&mut command, tempfile::tempdir().unwrap())
    }

    /// Compiles and runs a C program.
    pub fn c(text: &str) -> Option<Program> {
        let directory = tempfile::tempdir().unwrap();
        compile(text, directory.path())?;
        let mut command = Command::new(directory.path().join("program"));
        // The output of the tests may be a file, which grows on, so that CRIU would refuse to open it
        // again.
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Some(Program::start_in(&mut command, directory))
    }

    pub fn start(command: &mut Command) -> Program {
        Program::start_in(command, tempfile::tempdir().unwrap())
    }

    fn start_in(command: &mut Command, directory: tempfile::TempDir) -> Program {
        command.stderr(Stdio::null());
        Program::start_as_it_is(in_own_session(command), directory)
    }

    fn start_as_it_is(command: &mut Command, directory: tempfile::TempDir) -> Program {
        let child = command.current_dir(directory.path()).spawn().unwrap();
        let pids = vec![child.id() as i32];
        Program { directory, child: Some(child), starts: starts(&pids), pids }
    }

    pub fn pid(&self) -> i32 {
        self.pids[0]
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn stdout(&mut self) -> ChildStdout {
        self.child.as_mut().unwrap().stdout.take().unwrap()
    }

    /// A file in the program's directory.
    pub fn read(&self, name: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.directory.path().join(name)).ok()?;
        Some(text.trim().to_owned())
    }

    /// What [`REPORT_AGAIN`] reports from now on.
    pub fn report(&self) -> String {
        wait_until("the program reports", || self.read("out").is_some());
        std::fs::remove_file(self.directory().join("out")).unwrap();
        wait_until("the program reports", || self.read("out").is_some());
        self.read("out").unwrap().split_once(' ').map_or_else(String::new, |(_, text)| text.to_owned())
    }

    /// Has a program end what it has: when there is a file `end`, it writes `ended`, or what is
    /// wrong, into a file of that name.
    pub fn ends(&self) {
        std::fs::write(self.directory().join("end"), "").unwrap();
        wait_until("the program has ended what it has", || self.read("ended").is_some());
        assert_oracle_eq!(self.read("ended").unwrap(), "ended", "what the program has found");
    }

    /// Has a program of two processes check its memory: when there is a file `check`, each writes
    /// `fine` or what is wrong into `checked.N`.
    pub fn checks_its_memory(&self) {
        for process in ["checked.0", "checked.1"] {
            let _ = std::fs::remove_file(self.directory().join(process));
        }
        std::fs::write(self.directory().join("check"), "").unwrap();
        for process in ["checked.0", "checked.1"] {
            wait_until("the program has checked its memory", || self.read(process).is_some());
            assert_oracle_eq!(self.read(process).unwrap(), "fine", "what the program has found in its memory");
        }
        std::fs::remove_file(self.directory().join("check")).unwrap();
    }

    /// Kills the whole tree and waits until its process ids are free.
    pub fn kill(&mut self) {
        let own = self.living();
        let pids = stopped_tree(self.pid());
        let started = starts(&pids);
        for &pid in pids.iter().chain(&own) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        if let Some(mut child) = self.child.take() {
            child.wait().unwrap();
        }
        // One that has ended by itself, and was reaped, has no start.
        for (pid, started) in pids.into_iter().zip(started).filter(|(_, started)| started.is_some()) {
            wait_until("a killed process is gone", || {
                let _ = waitpid(Pid::from_raw(pid), Some(nix::sys::wait::WaitPidFlag::WNOHANG));
                starts(&[pid]) != [started]
            });
        }
    }

    /// Its processes that are there. Another process may have the id of one that has ended.
    fn living(&self) -> Vec<i32> {
        let is_there = |&(&pid, start): &(&i32, &Option<u64>)| start.is_some() && starts(&[pid]) == [*start];
        self.pids.iter().zip(&self.starts).filter(is_there).map(|(&pid, _)| pid).collect()
    }

    /// Takes over restored processes.
    pub fn adopt(&mut self, restored: &Restored) {
        self.pids = restored.pids.clone();
        self.starts = starts(&self.pids);
    }

    /// Lets restored processes run.
    pub fn resume(&self) {
        for &pid in &self.pids {
            kill(Pid::from_raw(pid), Signal::SIGCONT).unwrap();
        }
    }

    pub fn descriptors(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(format!("/proc/{}/fd", self.pid())).unwrap();
        let mut targets: Vec<_> = entries.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok()).collect();
        // The program itself opens and closes these.
        targets.retain(|target| !target.starts_with(self.directory.path()));
        targets.sort();
        targets
    }

    pub fn executable_mappings(&self) -> Vec<String> {
        executable_mappings(self.pid())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // One that was restored, and not taken over, has its directory at least.
        let directory = std::fs::read_link(format!("/proc/{}/cwd", self.pid()));
        if !self.living().is_empty() || directory.is_ok_and(|directory| directory.starts_with(self.directory())) {
            self.kill();
        }
    }
}

/// When processes have started, in ticks since the boot. None for those that are gone.
fn starts(pids: &[i32]) -> Vec<Option<u64>> {
    pids.iter().map(|&pid| Stat::read(pid).ok().map(|stat| stat.start_ticks)).collect()
}

/// The interpreter itself; the program in PATH may be a script that starts it.
fn python() -> PathBuf {
    let output = Command::new("python3").args(["-c", "import sys; print(sys.executable)"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().trim().into()
}

pub fn compile(text: &str, directory: &Path) -> Option<()> {
    std::fs::write(directory.join("program.c"), text).unwrap();
    let compiler = Command::new("cc")
        .args(["-g", "-O0", "-pthread", "-o", "program", "program.c", "-lrt"])
        .current_dir(directory)
        .status();
    match compiler {
        Ok(status) => assert!(status.success(), "the program does not compile"),
        Err(error) => {
            skipped(&format!("no C compiler: {error}"));
            return None;
        }
    }
    Some(())
}

pub fn tree(root: i32) -> Vec<i32> {
    let mut pids = vec![root];
    let mut next = 0;
    while let Some(&pid) = pids.get(next) {
        next += 1;
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for task in tasks.flatten() {
            let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
            pids.extend(children.split_whitespace().map(|pid| pid.parse::<i32>().unwrap()));
        }
    }
    pids
}

/// The same, after its processes have stopped: none of them forks any more. One that does not stop,
/// since it waits for something, does not fork either.
fn stopped_tree(root: i32) -> Vec<i32> {
    let mut stopped = Vec::new();
    loop {
        let pids = tree(root);
        let Some(&running) = pids.iter().find(|pid| !stopped.contains(*pid)) else { return pids };
        let _ = kill(Pid::from_raw(running), Signal::SIGSTOP);
        let deadline = Instant::now() + Duration::from_secs(1);
        while is_running(running) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(1));
        }
        stopped.push(running);
    }
}

/// The content of a process's memory: page number to page, without empty pages and unchanged pages
/// of files.
pub type Memory = BTreeMap<u64, Box<[u8; PAGE_SIZE]>>;

/// The populated private memory of a process, and its shared anonymous memory.
pub fn memory(pid: i32) -> Memory {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let pagemap = File::open(format!("/proc/{pid}/pagemap")).unwrap();
    let mem = File::open(format!("/proc/{pid}/mem")).unwrap();
    let mut memory = Memory::new();
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next().unwrap().split_once('-').unwrap();
        let permissions = fields.next().unwrap();
        let name = fields.nth(3).unwrap_or("");
        let anonymous_shared = permissions.ends_with('s') && name.starts_with("/dev/zero");
        if name.starts_with("[v") || permissions.ends_with('s') && !anonymous_shared {
            continue;
        }
        let address = |text| Address::new(u64::from_str_radix(text, 16).unwrap());
        for number in (address(start)..address(end)).pages() {
            let page = number.get();
            let mut entry = [0; 8];
            pagemap.read_exact_at(&mut entry, page * 8).unwrap();
            let entry = u64::from_ne_bytes(entry);
            let (held, of_file) = (entry >> 62 != 0, entry >> 61 & 1 != 0);
            if !held || of_file && !anonymous_shared {
                continue;
            }
            let mut content = Box::new([0; PAGE_SIZE]);
            // A page without access rights can be read by the kernel all the same.
            mem.read_exact_at(&mut content[..], number.address().get()).unwrap();
            memory.insert(page, content);
        }
    }
    memory
}

/// The ranges of pages that hold data, by process.
pub fn populated(memory: &BTreeMap<i32, Memory>) -> Populated {
    let range = |page: &u64| PageNumber::new(*page).addresses();
    memory.iter().map(|(pid, pages)| (*pid, (RecordedPid::new(*pid), pages.keys().map(range).collect()))).collect()
}

/// The address of a byte of a page.
fn byte_of(page: u64, at: usize) -> Address {
    PageNumber::new(page).address() + ByteCount::from(at)
}

/// A repository for the checkpoints of one program.
pub struct Checkpoints {
    /// With the repository, the asides, and images in progress.
    pub directory: tempfile::TempDir,
    pub criu: Criu,
}

impl Checkpoints {
    /// None after reporting why the test is skipped, where CRIU does not work.
    pub fn new() -> Option<Checkpoints> {
        let criu = criu()?;
        Some(Checkpoints { directory: tempfile::tempdir().unwrap(), criu })
    }

    /// The directory for asides.
    pub fn asides(&self) -> PathBuf {
        self.directory.path().join("asides")
    }

    /// A restore of a checkpoint that leaves the program by itself, by this CRIU.
    pub fn restoring<'a>(&self, checkpoint: &'a Checkpoint, criu: &Criu) -> Restore<'a> {
        Restore::new(checkpoint)
            .detach(true)
            .criu(criu.clone())
            .scratch_in(self.directory.path())
            .asides_in(self.asides())
            .allow_unusual_files(true)
    }

    /// Takes checkpoints of the program, with `between` before each but the first. Returns the
    /// last.
    pub fn take(&self, program: &Program, between: &[&dyn Fn()]) -> Checkpoint {
        self.take_all(program, Vec::new(), None, between).pop().unwrap()
    }

    /// Like [`Checkpoints::take`], with directories that belong to the program, or with what
    /// `watch` finds. Returns all checkpoints.
    pub fn take_all(
        &self,
        program: &Program,
        data: Vec<DataTree>,
        watch: Option<FileWatch>,
        between: &[&dyn Fn()],
    ) -> Vec<Checkpoint> {
        let repository = Repository::open_or_create(&self.directory.path().join("repository")).unwrap();
        let saver = Arc::new(CriuSaver::new(self.criu.clone(), DumpOptions::default()));
        let mut target =
            ProcessTarget::attach(Process::find(program.pid()).unwrap(), Mechanism::choose(Scope::Process), saver)
                .unwrap();
        target.set_data(data);
        if let Some(watch) = watch {
            target.set_watch(Arc::new(watch));
        }
        let mut job = Job::new(target, repository.clone(), JobOptions::new("job"));
        let mut taken = vec![job.checkpoint().unwrap().sequence];
        for between in between {
            between();
            taken.push(job.checkpoint().unwrap().sequence);
        }
        job.detach();
        taken.into_iter().map(|sequence| repository.read("job", sequence).unwrap()).collect()
    }

    /// Why a checkpoint of the program is refused.
    pub fn refusal(&self, program: &Program) -> String {
        let repository = Repository::open_or_create(&self.directory.path().join("repository")).unwrap();
        let saver = Arc::new(CriuSaver::new(self.criu.clone(), DumpOptions::default()));
        let target =
            ProcessTarget::attach(Process::find(program.pid()).unwrap(), Mechanism::choose(Scope::Process), saver)
                .unwrap();
        let mut job = Job::new(target, repository, JobOptions::new("job"));
        let refused = job.checkpoint().expect_err("the checkpoint is to be refused");
        job.detach();
        refused.to_string()
    }

    /// Saves a program, kills it and restores it.
    pub fn cycle(&self, program: &mut Program) {
        let checkpoint = self.take(program, &[]);
        program.kill();
        program.adopt(&self.restore(&checkpoint).unwrap());
    }

    /// Restores a checkpoint with the CRIU that was found.
    pub fn restore(&self, checkpoint: &Checkpoint) -> Result<Restored, RestoreFailure> {
        self.restore_by(checkpoint, &self.criu)
    }

    /// Restores a checkpoint with `criu`.
    pub fn restore_by(&self, checkpoint: &Checkpoint, criu: &Criu) -> Result<Restored, RestoreFailure> {
        let restore = Restore::new(checkpoint).criu(criu.clone()).asides_in(self.asides()).detach(true);
        restore.run(&mut |event| {
            if let RestoreEvent::AsidesNotDescribed(error) = event {
                panic!("{error}");
            }
        })
    }
}

/// A checkpoint in memory.
pub struct Taken {
    pub manifest: Manifest,
    pub store: MemoryStore,
    pub memory: BTreeMap<i32, Memory>,
    pub timings: Timings,
    /// Of the saved state.
    pub listed_mappings: u32,
    /// Of all threads.
    pub stack_pointers: Vec<u64>,
}

/// Takes a checkpoint, but reads all memory while the program is frozen.
pub fn take(criu: &Criu, pid: i32, options: &DumpOptions) -> Taken {
    let directory = tempfile::tempdir().unwrap();
    let mut dump = Dump::start(criu, pid, directory.path(), options).unwrap();
    while !dump.wait_frozen(Duration::from_millis(5)).unwrap() {}
    dump.wait_state_saved().unwrap();
    let memory: BTreeMap<i32, Memory> = tree(pid).into_iter().map(|pid| (pid, memory(pid))).collect();
    let (timings, state) = dump.thaw(|| populated(&memory)).unwrap();
    assert!(timings.frozen_at <= timings.state_saved_at && timings.state_saved_at <= timings.thawed_at);

    let mut store = MemoryStore::new();
    let mut spaces = Vec::new();
    for process in &state.processes {
        let mut tree = PageTree::new();
        let content = &memory[&process.pid.get()];
        for (&page, bytes) in content {
            tree.set(PageNumber::new(page), store.put(Kind::Page, &bytes[..]).unwrap());
        }
        process
            .for_each_present::<Error>(&mut |page, bytes| {
                match content.get(&page) {
                    Some(seen) => assert_oracle!(seen[..] == bytes[..], "page {page:#x} is not as it was"),
                    // CRIU also saves the code that the kernel gives to each process.
                    None => tree.set(PageNumber::new(page), store.put(Kind::Page, bytes).unwrap()),
                }
                Ok(())
            })
            .unwrap();
        let root = tree.save(&mut store).unwrap();
        let pages = tree.page_count();
        spaces.push(SpaceRecord::of_process(process.pid.get(), "program".into(), root, pages, Vec::new()));
    }
    let mut files = Vec::new();
    let mut stack_pointers = Vec::new();
    for path in &state.files {
        if path.file_name().unwrap().to_str().unwrap().starts_with("core-") {
            let core: CoreEntry = read_first(path, ImageKind::Core).unwrap();
            stack_pointers.push(core.thread_info.unwrap().gpregs.sp);
        }
        let content = std::fs::read(path).unwrap();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        files.push(StateRecord { name, content: Blob::write(&mut store, &mut &content[..]).unwrap() });
    }
    let manifest = Manifest {
        job: "test".into(),
        sequence: 1,
        taken_unix_us: 0,
        command: Vec::new(),
        program: None,
        mechanism: Mechanism::Full,
        kind: TargetKind::Process,
        spaces,
        files: Vec::new(),
        state: files,
        cost: Cost::default(),
    };
    let listed_mappings = state.listed_mappings;
    Taken { manifest, store, memory, timings, listed_mappings, stack_pointers }
}

impl Taken {
    /// Restores with this process as the restoring command.
    pub fn restore(&self, criu: &Criu, options: &RestoreOptions) -> Restored {
        let directory = tempfile::tempdir().unwrap();
        let prepared = prepare(&self.manifest, &self.store, directory.path()).unwrap();
        match prepared.run(criu, options) {
            Ok(restored) => restored,
            Err(error) => {
                let log = std::fs::read_to_string(directory.path().join("restore.log")).unwrap_or_default();
                panic!("{error}\n{log}");
            }
        }
    }

    /// True of memory below a stack pointer. It is unused; the kernel writes the frame of a signal
    /// there before the processes stop.
    fn is_dead(&self, address: Address) -> bool {
        self.stack_pointers.iter().any(|&sp| (sp - SIGNAL_FRAME..sp - RED_ZONE).contains(&address.get()))
    }

    /// Compares memory of restored, stopped processes with memory at the freeze.
    pub fn compare(&self, pids: &[i32]) {
        for pid in pids {
            let (then, now) = (&self.memory[pid], memory(*pid));
            let mut differing = Vec::new();
            // The kernel itself writes the processor's number into a thread's `struct rseq` whenever the
            // thread resumes.
            let mut rseq = 0;
            let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().count();
            for (page, content) in then {
                let zeros = [0; PAGE_SIZE];
                let restored = now.get(page).map_or(&zeros[..], |page| &page[..]);
                if restored != &content[..] {
                    let dead = |at: usize| self.is_dead(byte_of(*page, at));
                    let differs = |at: &usize| restored[*at] != content[*at] && !dead(*at);
                    let (Some(at), Some(last)) = ((0..PAGE_SIZE).find(differs), (0..PAGE_SIZE).rfind(differs)) else {
                        continue;
                    };
                    if at / 32 == last / 32 {
                        rseq += 1;
                        if rseq <= threads {
                            continue;
                        }
                    }
                    differing.push(format!("{:#x}", byte_of(*page, at)));
                }
            }
            for (page, content) in &now {
                let held = |(at, byte): (usize, &u8)| *byte != 0 && !self.is_dead(byte_of(*page, at));
                if !then.contains_key(page) && content.iter().enumerate().any(held) {
                    differing.push(format!("new page {:#x}", byte_of(*page, 0)));
                }
            }
            assert_oracle!(
                differing.is_empty(),
                "process {pid}: of {} pages these have other content: {differing:?}",
                then.len()
            );
        }
    }

    /// Restores by a restoring command that is a process of its own, with this output.
    pub fn restore_by_command(&self, criu: &Criu, output: Stdio) -> (Child, Restored) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.stdin(Stdio::null()).stdout(output).stderr(Stdio::null());
        self.run_command(criu, command)
    }

    /// The same on a terminal.
    pub fn restore_on(&self, criu: &Criu, terminal: &Terminal) -> (Child, Restored) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        terminal.attach(&mut command, true);
        self.run_command(criu, command)
    }

    fn run_command(&self, criu: &Criu, mut command: Command) -> (Child, Restored) {
        let directory = tempfile::tempdir().unwrap();
        let prepared = prepare(&self.manifest, &self.store, directory.path()).unwrap();
        let pids = prepared.pids_here().unwrap();
        let done = directory.path().join("done");
        let child = command
            .args(["--exact", "restoring_command", "--nocapture"])
            .env("PAGEMARK_TEST_RESTORE", directory.path())
            .env("PAGEMARK_CRIU", criu.path())
            .spawn()
            .unwrap();
        wait_until("the restoring command is done", || done.exists());
        let outcome = std::fs::read_to_string(&done).unwrap();
        assert_eq!(outcome, "restored");
        let root_pid = pids[0];
        let (left_groups, closed_connections, lost_state) = (Vec::new(), Vec::new(), Vec::new());
        let restored =
            Restored { root_pid, pids, left_groups, closed_connections, lost_state, child: root_pid, relay: None };
        (child, restored)
    }
}

/// The restoring command: `criu restore` on a prepared directory.
pub fn restoring_command() {
    let Some(directory) = std::env::var_os("PAGEMARK_TEST_RESTORE").map(PathBuf::from) else { return };
    let criu = Criu::find().unwrap();
    let prepared = pagemark_process::restore::open_prepared(&directory).unwrap();
    let outcome = match prepared.run(&criu, &RestoreOptions::default()) {
        Ok(_) => "restored".to_string(),
        Err(error) => {
            let log = std::fs::read_to_string(directory.join("restore.log")).unwrap_or_default();
            format!("{error}\n{log}")
        }
    };
    std::fs::write(directory.join("done.new"), outcome).unwrap();
    std::fs::rename(directory.join("done.new"), directory.join("done")).unwrap();
}

/// A pseudo-terminal.
pub struct Terminal {
    master: OwnedFd,
    slave: PathBuf,
}

impl Terminal {
    pub fn open() -> Terminal {
        use nix::pty::{PtyMaster, grantpt, posix_openpt, ptsname_r, unlockpt};
        let master: PtyMaster =
            posix_openpt(nix::fcntl::OFlag::O_RDWR | nix::fcntl::OFlag::O_NOCTTY | nix::fcntl::OFlag::O_CLOEXEC)
                .unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let slave = ptsname_r(&master).unwrap().into();
        Terminal { master: master.as_fd().try_clone_to_owned().unwrap(), slave }
    }

    /// Makes the terminal a command's standard streams, in a session of its own.
    pub fn attach(&self, command: &mut Command, controlling: bool) {
        use std::os::unix::fs::OpenOptionsExt;
        let open = || {
            let mut options = std::fs::OpenOptions::new();
            options.read(true).write(true).custom_flags(libc::O_NOCTTY).open(&self.slave).unwrap()
        };
        command.stdin(open()).stdout(open()).stderr(open());
        // SAFETY: two system calls between fork and exec.
        unsafe {
            command.pre_exec(move || {
                nix::unistd::setsid()?;
                if controlling && libc::ioctl(0, libc::TIOCSCTTY, 0) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
                Ok(())
            })
        };
    }

    /// The output on the terminal.
    pub fn lines(&self) -> impl BufRead {
        BufReader::new(File::from(self.master.try_clone().unwrap()))
    }
}
