//! The commands of the README, and of the pages that show how to do something, run as they are
//! written there.
//!
//! Each line is run by a shell, in a new directory that is also the home directory. What stands for
//! something else is replaced: process ids, `…`, and intervals, which are shorter here.

#[path = "support/subject.rs"]
mod subject;
mod support;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use pagemark_testing::{ShownCommands, assert_oracle, in_own_session, pages_of_commands, skip, wait_for};
use subject::{has_criu, is_root};
use support::{children, command_line, is_alive, kill_and_wait};

/// The commands that are not run here, and where they are.
const ELSEWHERE: [(&str, &str); 20] = [
    ("make demo", "installs packages; tests/demo.rs runs the demo"),
    ("make test", "runs this"),
    ("crash vmlinux vm1.core", "needs a guest with a kernel; tests/vm.rs reads such files"),
    ("out/run.sh", "a machine that runs on; tests/vm.rs starts what is exported"),
    ("pagemark run --data /var/lib/db -- postgres -D /var/lib/db", "needs a database; tests/postgresql.rs"),
    ("pagemark attach --every 5s $(runc state web | jq .pid)", "needs a container; tests/containers.rs"),
    ("pagemark restore web@12 --detach", "needs a container; tests/containers.rs"),
    (SIMULATE_RECORD, MACHINES),
    ("pagemark simulate list vm1", MACHINES),
    ("pagemark simulate interval vm1@3 --plugin cache --results results", MACHINES),
    ("pagemark simulate run vm1 --plugin cache --results results", MACHINES),
    ("pagemark simulate run vm1 --plugin trace --results results", MACHINES),
    ("pagemark simulate trace vm1 --results results --from 5000000 --count 100 > accesses.csv", MACHINES),
    ("pagemark simulate report vm1 --plugin cache --results results --html report.html", MACHINES),
    ("pagemark simulate debug vm1 --at 1234567890", MACHINES),
    ("cargo build --release -p pagemark-malloc", "builds"),
    (
        "PAGEMARK_HEAP_PARTS=4 LD_PRELOAD=$PWD/target/release/libpagemark_malloc.so PROGRAM",
        "any program; pagemark-malloc's tests start several so",
    ),
    ("lab/lab run --kernel ldt -- uname -a", LAB),
    ("lab/lab run --kernel plain --memory 1G --smp 4 --share out -- ./measure", LAB),
    ("lab/lab run --kernel stock -- grep VmRSS /proc/self/status", LAB),
];

const SIMULATE_RECORD: &str = "pagemark simulate record --every 100M --job vm1 -- qemu-system-x86_64 -nodefaults -m 256 \
    -kernel vmlinuz -initrd initrd.gz -append \"console=ttyS0\" -serial file:serial";
const MACHINES: &str =
    "needs a guest with a kernel and some minutes; tests/simulate.rs; parsed by the command's unit tests";
const LAB: &str = "needs the lab's kernels; `lab/lab test` boots them";

const RUN: &str = "pagemark run --every 10s -- ./simulate --steps 1000000";
const RESTORES: [&str; 3] =
    ["pagemark restore simulate", "pagemark restore simulate@12", "pagemark restore simulate --lazy"];
const ATTACH: &str = "pagemark attach 4711 --every 1m";
const ATTACH_AUTO: &str = "pagemark attach 4711 --every auto --overhead 3%";
const TOP: &str = "pagemark top 4711";
const OF_PROCESS: [&str; 2] = ["pagemark checkpoint 4711", "pagemark advise 4711"];
const EXPORT: &str = "pagemark export simulate@12 --core core && gdb ./simulate core";
const EXAMINE: [&str; 4] = [
    "pagemark log",
    "pagemark log simulate",
    "pagemark show simulate@12",
    "pagemark diff simulate@11 simulate@12 --hex",
];
const KEEP: &str = "pagemark run --keep-last 10 --keep-every 1h -- ./simulate";
const TIDY: [&str; 2] = ["pagemark prune --keep-last 10", "pagemark verify"];

const COUNT: &str = "pagemark run --every 1s --job count -- sh -c 'while n=$((n + 1)); do echo $n; sleep 0.5; done'";
const SHOW_COUNT: &str = "pagemark show count";
const KILL: &str = "kill -KILL 4711";
const RESTORE_COUNT: &str = "pagemark restore count";
const EXAMINE_COUNT: [&str; 3] =
    ["pagemark log count", "pagemark diff count@1 count@2", "pagemark export count@2 --core core"];
const TIDY_COUNT: [&str; 2] = ["pagemark prune --keep-last 3", "pagemark verify"];

const VM_RUN: &str = "pagemark vm run --every 1s -- qemu-system-x86_64 -m 2G -name vm1 …";
const VM_RESTORES: [&str; 2] = ["pagemark restore vm1", "pagemark restore --lazy vm1"];
const VM_FORK: &str = "pagemark fork vm1@12 --count 3";
const QEMU: &str = "qemu-system-x86_64 -m 2G -name vm1 … -qmp unix:vm1.qmp,server=on,wait=off";
const VM_ATTACH: &str = "pagemark vm attach vm1.qmp --every 1s";
const OF_MACHINE: [&str; 2] = ["pagemark vm checkpoint vm1.qmp", "pagemark vm advise vm1.qmp"];
const VM_EXPORTS: [&str; 2] = ["pagemark export vm1@12 --core vm1.core", "pagemark export vm1@12 --qemu out"];

/// The commands of the pages that show how to do something, without comments.
fn commands() -> BTreeSet<String> {
    let mut commands = BTreeSet::new();
    for page in pages_of_commands() {
        let page = fs::read_to_string(page).expect("a page").replace(" \\\n    ", " ");
        for line in ShownCommands::of_page(&page).commands {
            let command = line.split_once(" #").map_or(line, |(command, _)| command).trim();
            commands.insert(command.to_owned());
        }
    }
    commands
}

#[test]
fn every_command_is_run_here_or_elsewhere() {
    let run = [RUN, ATTACH, ATTACH_AUTO, TOP, EXPORT, KEEP, VM_RUN, VM_FORK, QEMU, VM_ATTACH];
    let tutorial = [COUNT, SHOW_COUNT, KILL, RESTORE_COUNT];
    let lists: [&[&str]; 10] = [
        &RESTORES,
        &OF_PROCESS,
        &EXAMINE,
        &TIDY,
        &VM_RESTORES,
        &OF_MACHINE,
        &VM_EXPORTS,
        &tutorial,
        &EXAMINE_COUNT,
        &TIDY_COUNT,
    ];
    let known = run.iter().chain(lists.into_iter().flatten()).chain(ELSEWHERE.iter().map(|(command, _)| command));
    assert_eq!(commands(), known.map(|command| (*command).to_owned()).collect());
}

/// A directory in which commands are run.
struct Shell(tempfile::TempDir);

/// A command that runs on, killed when dropped.
struct Running {
    child: Child,
    log: tempfile::NamedTempFile,
}

impl Running {
    fn said(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log.path()).unwrap_or_default()).into_owned()
    }

    /// Ctrl-C, after which it must succeed.
    fn interrupt(mut self) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).expect("it runs");
        let status = self.child.wait().expect("it is our child");
        assert!(status.success(), "{status}: {}", self.said());
    }

    /// As a crash of everything: kills it and then its children.
    fn kill(mut self) {
        let targets = children(self.child.id() as i32);
        let _ = self.child.kill();
        let _ = self.child.wait();
        targets.into_iter().for_each(kill_and_wait);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Shell {
    fn new() -> Shell {
        Shell(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn command(&self, text: &str, replaced: &[(&str, &str)]) -> Command {
        let text = replaced.iter().fold(text.to_owned(), |text, (old, new)| {
            assert!(text.contains(old), "{text} without {old}");
            text.replace(old, new)
        });
        let programs = Path::new(env!("CARGO_BIN_EXE_pagemark")).parent().expect("a directory").display();
        let mut command = Command::new("sh");
        command.args(["-c", &text]).current_dir(self.path()).stdin(Stdio::null());
        command.env("PATH", format!("{programs}:{}", std::env::var("PATH").unwrap_or_default()));
        command.env("HOME", self.path()).env_remove("PAGEMARK_REPO").env_remove("XDG_DATA_HOME");
        // What is killed leaves its temporary files.
        command.env("TMPDIR", self.path());
        command
    }

    /// Runs a command to its end, and returns what it says.
    fn done(&self, text: &str, replaced: &[(&str, &str)]) -> String {
        let output = self.command(text, replaced).output().expect("a shell");
        let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success(), "{text}: {}: {said}", output.status);
        said
    }

    /// Runs a command until it has said `awaited`.
    fn until(&self, text: &str, replaced: &[(&str, &str)], awaited: &str) -> Running {
        let mut running = self.start(text, replaced);
        wait_for(awaited, || {
            let ended = running.child.try_wait().expect("it is our child");
            assert!(ended.is_none(), "{text}: {ended:?}: {}", running.said());
            running.said().contains(awaited).then_some(())
        });
        running
    }

    fn start(&self, text: &str, replaced: &[(&str, &str)]) -> Running {
        // In the directory where the program works: a restore asks before it writes elsewhere.
        let log = tempfile::NamedTempFile::new_in(self.path()).expect("a file");
        let file = || fs::OpenOptions::new().append(true).mode(0o600).open(log.path()).expect("a file");
        let mut command = self.command(&format!("exec {text}"), replaced);
        command.stdout(file()).stderr(file());
        Running { child: in_own_session(&mut command).spawn().expect("a shell"), log }
    }
}

/// The child of a process whose command line has a text.
fn child(of: i32, text: &str) -> i32 {
    wait_for("the child", || children(of).into_iter().find(|&pid| command_line(pid).contains(text)))
}

const SIMULATE: &str = "#include <unistd.h>\nstatic char memory[1 << 20];\n\
    int main(void) { for (unsigned at = 0;; at++) { memory[at * 4096 % sizeof memory]++; usleep(1000); } }\n";

#[test]
fn the_commands_for_processes_run_as_written() {
    if !is_root() || !has_criu() {
        skip!("restores need root and CRIU");
    }
    let shell = Shell::new();
    fs::write(shell.path().join("simulate.c"), SIMULATE).expect("a file");
    if !Command::new("cc").arg("--version").output().is_ok_and(|output| output.status.success()) {
        skip!("no C compiler");
    }
    shell.done("cc -g -o simulate simulate.c", &[]);

    let run = shell.until(RUN, &[("10s", "200ms")], "simulate@13: ");
    let target = child(run.child.id() as i32, "simulate");
    run.kill();
    kill_and_wait(target);
    for command in RESTORES {
        let restored = shell.until(command, &[], "runs as process");
        assert_oracle!(is_alive(target), "{command}: the restored program has ended: {}", restored.said());
        restored.kill();
        kill_and_wait(target);
    }

    let program = shell.start("./simulate", &[]);
    let pid = program.child.id().to_string();
    let of_program = [("4711", &pid[..])];
    for command in [ATTACH, ATTACH_AUTO] {
        shell.until(command, &of_program, "pages dirty").interrupt();
    }
    shell.until(TOP, &of_program, "pages/s").interrupt();
    for command in OF_PROCESS {
        shell.done(command, &of_program);
    }
    assert_oracle!(is_alive(program.child.id() as i32), "the program has ended");
    for command in EXAMINE {
        assert!(!shell.done(command, &[]).is_empty(), "{command}");
    }
    let has_gdb = Command::new("gdb").arg("--version").output().is_ok_and(|output| output.status.success());
    let said = shell.done(EXPORT, if has_gdb { &[] } else { &[(" && gdb ./simulate core", "")] });
    assert!(!has_gdb || said.contains("Core was generated by"), "{said}");

    shell.until(KEEP, &[], "pages dirty").kill();
    for command in TIDY {
        shell.done(command, &[]);
    }
}

#[test]
fn the_tutorial_runs_as_written() {
    if !is_root() || !has_criu() {
        skip!("restores need root and CRIU");
    }
    let shell = Shell::new();
    let run = shell.until(COUNT, &[], "count@3: ");
    let target = child(run.child.id() as i32, "while");
    let shown = shell.done(SHOW_COUNT, &[]);
    assert!(shown.contains(&target.to_string()), "{shown}");
    let last = |said: &str| said.lines().filter_map(|line| line.parse::<u64>().ok()).next_back();
    let sleeps = children(target);
    shell.done(KILL, &[("4711", &target.to_string())]);
    // Its id may be in the way.
    sleeps.into_iter().for_each(kill_and_wait);
    let before = last(&run.said()).expect("a number");
    let restored = shell.until(RESTORE_COUNT, &[], "runs as process");
    // The program goes on with its old output, beyond what it had printed before the kill.
    wait_for("greater numbers", || last(&run.said()).filter(|number| *number > before));
    assert_oracle!(is_alive(target), "the restored program has ended: {}", restored.said());
    restored.kill();
    kill_and_wait(target);
    for command in EXAMINE_COUNT.into_iter().chain(TIDY_COUNT) {
        assert!(!shell.done(command, &[]).is_empty(), "{command}");
    }
}

#[test]
fn the_commands_for_machines_run_as_written() {
    if !Command::new("qemu-system-x86_64").arg("--version").output().is_ok_and(|output| output.status.success()) {
        skip!("no QEMU");
    }
    const MACHINE: (&str, &str) = ("…", "-nodefaults -display none");
    let shell = Shell::new();
    shell.until(VM_RUN, &[MACHINE, ("1s", "100ms")], "vm1@13: ").kill();
    for command in VM_RESTORES {
        shell.until(command, &[], "runs in QEMU").kill();
    }
    let forked = shell.done(VM_FORK, &[]);
    let machines = forked.lines().filter_map(|line| line.split_once("runs in QEMU, process ")?.1.parse().ok());
    let machines: Vec<i32> = machines.collect();
    assert_eq!(machines.len(), 3, "{forked}");
    machines.into_iter().for_each(kill_and_wait);

    let _qemu = shell.start(QEMU, &[MACHINE]);
    wait_for("the monitor", || shell.path().join("vm1.qmp").exists().then_some(()));
    shell.until(VM_ATTACH, &[], "pages dirty").interrupt();
    for command in OF_MACHINE.iter().chain(&VM_EXPORTS) {
        shell.done(command, &[]);
    }
}
