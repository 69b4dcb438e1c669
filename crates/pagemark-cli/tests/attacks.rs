//! A hostile user swaps his files, directories, sockets and FIFOs for links to root's while root
//! restores his programs, his containers and his machines, exports into his directories, and cleans
//! up there. Nothing of root's is read, changed or taken, whatever the command makes of it.

#[path = "support/attacker.rs"]
mod attacker;
#[path = "support/subject.rs"]
mod subject;
mod support;

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use attacker::{ASIDES, Roots, UsersDirectory};
use pagemark_testing::{QEMU, SplitMix, assert_oracle, copy_executable, guest_program, repetitions, skip, wait_for};
use serde_json::Value;
use subject::{NOBODY, has_criu, public_directory, stderr};
use support::{Pagemark, Restored, children, kill_tree};

/// So often the same files are attacked.
const ROUNDS: u32 = 8;
/// Python for every user: that in PATH may be in root's home.
const PYTHON: &str = "/usr/bin/python3";

/// A program that has files of all kinds in its working directory, and counts in `count`.
const PROGRAM: &str = "
import os, socket, time
os.makedirs('a/b', exist_ok=True)
for name in ['log', 'a/log', 'a/b/log', 'a/read', 'a/gone', 'a/b/locked']:
    open(name, 'w').write('the user\\'s own\\n')
log = [open(name, 'a') for name in ['log', 'a/log', 'a/b/log']]
read = [open('a/read'), open('a/gone'), os.open('a/b', os.O_RDONLY)]
os.unlink('a/gone')
os.mkfifo('a/fifo')
pipe = os.open('a/fifo', os.O_RDWR)
listening = socket.socket(socket.AF_UNIX)
listening.bind('a/socket')
listening.listen(1)
gone = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
gone.bind('a/b/socket')
os.unlink('a/b/socket')
n = 0
while True:
    n += 1
    for file in log:
        file.write('%d\\n' % n)
        file.flush()
    with open('count.new', 'w') as file:
        file.write(str(n))
    try:
        os.rename('count.new', 'count')
    except FileNotFoundError:
        pass  # Frozen between the two lines, and renamed since.
    time.sleep(0.01)
";

/// Executed in the mounts of a container to be, in the directory of its user: the container gets
/// the root directory `way/root`, in which only root can write, and the user's directory at `data`.
const CONTAINER: &str = "
setpriv --reuid=65534 --regid=65534 --clear-groups mkdir -p way x/y src &&
mkdir way/root && mount --bind way/root way/root && cd way/root &&
mkdir proc data etc && for name in bin lib lib64 usr; do mkdir -p $name && mount --rbind /$name $name; done &&
mount -t proc proc proc && mount --bind ../.. data && mount --bind data/src data/x/y &&
mount -t tmpfs -o mode=777 tmpfs etc && pivot_root . . && umount -l . && cd /data &&
exec setsid setpriv --reuid=65534 --regid=65534 --clear-groups \"$@\"";

/// What is attacked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Program,
    Container,
    Machine,
    /// Several from one checkpoint.
    Machines,
}

impl Kind {
    fn is_machine(self) -> bool {
        matches!(self, Kind::Machine | Kind::Machines)
    }
}

/// A program of the user's, killed with all that it has started when dropped.
struct Target {
    child: Child,
    pid: i32,
}

impl Drop for Target {
    fn drop(&mut self) {
        // A container's first process is no child of the test, which waits for its children itself.
        if self.pid != self.child.id() as i32 && self.child.try_wait().is_ok_and(|ended| ended.is_none()) {
            kill_tree(self.pid);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn give(path: &Path) {
    chown(path, Some(NOBODY), Some(NOBODY)).expect("root gives it away");
}

/// Starts the user's program in his directory.
fn start(kind: Kind, directory: &Path) -> Target {
    let mut command = match kind {
        Kind::Program => {
            let mut command = Command::new("setsid");
            command.args(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", PYTHON, "-c", PROGRAM]);
            command
        }
        Kind::Container => {
            let mut command = Command::new("unshare");
            command.args(["--pid", "--fork", "--mount", "--mount-proc", "sh", "-c", CONTAINER.trim(), "sh"]);
            command.args([PYTHON, "-c", PROGRAM]);
            command
        }
        Kind::Machine | Kind::Machines => machine(directory),
    };
    let output = fs::File::create("/dev/null").expect("the null device");
    command.current_dir(directory).stdin(Stdio::null()).stdout(output.try_clone().expect("another")).stderr(output);
    let child = command.spawn().expect("it starts");
    let pid = child.id() as i32;
    let pid = match kind {
        Kind::Container => wait_for("the container", || children(pid).first().copied()),
        _ => pid,
    };
    let target = Target { child, pid };
    let counts = directory.join(if kind.is_machine() { "a/serial" } else { "count" });
    wait_for("the program", || fs::metadata(&counts).is_ok_and(|found| found.len() > 0).then_some(()));
    target
}

/// The command of a machine whose images, socket and logs are below the user's directory.
fn machine(directory: &Path) -> Command {
    let at = |name: &str| directory.join(name);
    fs::create_dir_all(at("a/b")).expect("a directory");
    copy_executable(guest_program().expect("looked for before"), &at("a/guest"));
    let image = |arguments: &[&str]| {
        let done = Command::new("qemu-img").arg("create").arg("-q").args(arguments).current_dir(directory).status();
        assert!(done.is_ok_and(|status| status.success()), "no image");
    };
    image(&["-f", "qcow2", "a/b/disk", "16M"]);
    image(&["-f", "raw", "a/raw", "16M"]);
    for name in ["a", "a/b", "a/guest", "a/b/disk", "a/raw"] {
        give(&at(name));
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", QEMU, "-nodefaults", "-display", "none"]);
    command.args(["-m", "16", "-accel", "tcg", "-name", "box"]);
    let qmp = format!("unix:{},server=on,wait=off", at("a/vm.qmp").display());
    let serial = format!("file:{}", at("a/serial").display());
    command.args(["-kernel"]).arg(at("a/guest")).args(["-serial", &serial, "-qmp", &qmp]);
    command.args(["-pidfile"]).arg(at("a/b/pid"));
    for (format, name) in [("qcow2", "a/b/disk"), ("raw", "a/raw")] {
        command.arg("-drive").arg(format!("file={},format={format},if=virtio", at(name).display()));
    }
    command
}

/// What the attacks of a campaign have met.
#[derive(Default, Debug)]
struct Met {
    restored: u32,
    refused: u32,
    swaps: u64,
}

/// Has root checkpoint a program of the user's, kill it, and restore it again and again while the
/// user attacks.
fn campaign(kind: Kind, random: &mut SplitMix, met: &mut Met) {
    let place = public_directory();
    let [users, traps, roots] = ["user", "traps", "roots"].map(|name| place.path().join(name));
    for directory in [&users, &roots] {
        fs::create_dir(directory).expect("a directory");
    }
    give(&users);
    let pagemark = Pagemark::new();
    let target = start(kind, &users);
    let taken = match kind {
        Kind::Machine | Kind::Machines => {
            vec!["vm".to_owned(), "checkpoint".into(), "--job".into(), "box".into(), monitor(&users)]
        }
        _ => vec!["checkpoint".into(), "--job".into(), "box".into(), target.pid.to_string()],
    };
    pagemark.done(&taken.iter().map(String::as_str).collect::<Vec<_>>());
    drop(target);
    let roots = Roots::make(&roots);
    let users = UsersDirectory::new(&users, &traps, NOBODY, &roots);
    for _ in 0..ROUNDS {
        let attack = users.attack(random.draw());
        let is_lazy = random.below(3) == 0 && !kind.is_machine();
        let options: &[&str] = if is_lazy { &["--lazy"] } else { &[] };
        let arguments = match kind {
            Kind::Machines => vec!["fork", "--json", "--count", "2", "box"],
            _ => [&["restore", "--yes", "--detach", "--json"], options, &["box"]].concat(),
        };
        let output = pagemark.output(&arguments);
        // The restored program has what it has got until now.
        let document: Value = match output.status.success() {
            true => serde_json::from_slice(&output.stdout).expect("JSON"),
            false => Value::Null,
        };
        let begun = document["machines"].as_array().cloned().unwrap_or_else(|| vec![document]);
        let pids = begun.iter().filter_map(|begun| begun["pid"].as_i64());
        let restored: Vec<Restored> = pids.map(|pid| Restored::new(pid as i32)).collect();
        assert_eq!(!restored.is_empty(), output.status.success(), "{}", stderr(&output));
        let reached: Vec<String> =
            restored.iter().flat_map(|restored| roots.reached_by(&descendants(restored.0))).collect();
        met.swaps += attack.end();
        let told = stderr(&output);
        assert_oracle!(reached.is_empty(), "{kind:?} has of root's: {told}");
        drop(restored);
        let harm = [roots.changes(), users.harm()].concat();
        assert_oracle!(harm.is_empty(), "{kind:?}: {harm:#?}: {told}");
        assert_oracle!(!told.contains("panicked"), "{told}");
        match output.status.success() {
            true => met.restored += 1,
            false => met.refused += 1,
        }
        if !users.is_whole() {
            return;
        }
    }
}

fn monitor(users: &Path) -> String {
    users.join("a/vm.qmp").display().to_string()
}

/// A process with all that it has started.
fn descendants(pid: i32) -> Vec<i32> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        found.extend(children(pid));
        next += 1;
    }
    found
}

/// Attacks for as many seconds as `PAGEMARK_ATTACK_SECONDS` says.
fn attack(kind: Kind) {
    if !has_criu() || !PathBuf::from(PYTHON).exists() {
        skip!("it needs root, CRIU and {PYTHON}");
    }
    if kind.is_machine() && guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    for_its_time(|random, met| campaign(kind, random, met));
}

/// Repeats campaigns for as many seconds as `PAGEMARK_ATTACK_SECONDS` says.
fn for_its_time(mut campaign: impl FnMut(&mut SplitMix, &mut Met)) {
    let seconds = std::env::var("PAGEMARK_ATTACK_SECONDS").ok().and_then(|text| text.parse().ok());
    let seconds = seconds.unwrap_or(repetitions(4, 10));
    let (begin, mut met) = (Instant::now(), Met::default());
    let mut random = SplitMix(std::process::id().into());
    while begin.elapsed() < Duration::from_secs(seconds) {
        campaign(&mut random, &mut met);
    }
    println!("{met:?} in {} s", begin.elapsed().as_secs());
    assert!(met.restored > 0 && met.swaps > 0, "{met:?}");
}

/// Has root do something in a directory of the user's, in which nothing runs, while the user
/// attacks: `prepare` makes what is there, and returns the arguments of a command for each round.
fn directory_campaign(
    pagemark: &Pagemark,
    random: &mut SplitMix,
    met: &mut Met,
    prepare: impl Fn(&Path) -> Vec<Vec<String>>,
) {
    let place = public_directory();
    let [users, traps, roots] = ["user", "traps", "roots"].map(|name| place.path().join(name));
    fs::create_dir_all(users.join("a/b")).expect("a directory");
    fs::create_dir(&roots).expect("a directory");
    ["", "a", "a/b"].iter().for_each(|name| give(&users.join(name)));
    let commands = prepare(&users);
    let roots = Roots::make(&roots);
    let users = UsersDirectory::new(&users, &traps, NOBODY, &roots);
    for command in commands {
        let attack = users.attack(random.draw());
        let output = pagemark.output(&command.iter().map(String::as_str).collect::<Vec<_>>());
        met.swaps += attack.end();
        let told = stderr(&output);
        let harm = [roots.changes(), users.leaks()].concat();
        assert_oracle!(harm.is_empty(), "{command:?}: {harm:#?}: {told}");
        assert_oracle!(!told.contains("panicked"), "{told}");
        match output.status.success() {
            true => met.restored += 1,
            false => met.refused += 1,
        }
    }
}

/// A repository with two checkpoints of a program and one of a machine, if there is QEMU.
fn with_checkpoints() -> Pagemark {
    let pagemark = Pagemark::new();
    let place = public_directory();
    let users = place.path().join("user");
    let of = |kind: Kind| {
        let _ = fs::remove_dir_all(&users);
        fs::create_dir(&users).expect("a directory");
        give(&users);
        start(kind, &users)
    };
    let target = of(Kind::Program);
    for _ in 0..2 {
        pagemark.done(&["checkpoint", "--job", "box", &target.pid.to_string()]);
    }
    drop(target);
    if guest_program().is_some() {
        let target = of(Kind::Machine);
        pagemark.done(&["vm", "checkpoint", "--job", "machine", &monitor(&users)]);
        drop(target);
    }
    pagemark
}

/// All arguments, of which the last is a path below a directory.
fn with_path(arguments: &[&str], directory: &Path, name: &str) -> Vec<String> {
    let path = directory.join(name).display().to_string();
    arguments.iter().map(|&argument| argument.to_owned()).chain([path]).collect()
}

#[test]
fn each_harm_is_seen() {
    if !subject::is_root() {
        skip!("not root");
    }
    let place = public_directory();
    let [users, traps, roots] = ["user", "traps", "roots"].map(|name| place.path().join(name));
    for directory in [&users, &roots] {
        fs::create_dir(directory).expect("a directory");
    }
    let of_root = Roots::make(&roots);
    let of_user = UsersDirectory::new(&users, &traps, NOBODY, &of_root);
    let swaps = of_user.attack(1);
    assert_eq!((of_root.changes(), of_user.harm()), (vec![], vec![]));
    assert_eq!(swaps.end(), 0, "there is nothing to swap");
    assert!(of_user.is_whole());

    // What root reads is no change.
    let own = std::process::id() as i32;
    let reached = of_root.reached_by(&[own]);
    let open = fs::File::open(roots.join("private/a/log")).expect("a file");
    assert_eq!(of_root.reached_by(&[own]).len(), reached.len() + 1);
    drop(open);
    assert_eq!(of_root.changes(), Vec::<String>::new());

    fs::write(users.join("copy"), fs::read(roots.join("log-of-nothing")).unwrap_or_default()).expect("a file");
    assert!(of_user.harm()[0].contains("is root's"));
    give(&users.join("copy"));
    assert_eq!(of_user.harm(), Vec::<String>::new());
    fs::write(users.join("copy"), fs::read(roots.join("private/log")).expect("a file")).expect("a file");
    assert!(of_user.harm()[0].contains("the content of root's file"));

    let was_changed = |change: &dyn Fn(&Path)| {
        let before = of_root.changes();
        change(&roots.join("open/a"));
        of_root.changes() != before
    };
    assert!(was_changed(&|path| give(path)));
    assert!(was_changed(&|path| fs::write(path.join("log"), "x").expect("a file")));
    assert!(was_changed(&|path| fs::rename(path.join("b"), path.join("c")).expect("a rename")));
    assert!(was_changed(
        &|path| fs::set_permissions(path.join("c/log"), Permissions::from_mode(0o4755)).expect("a mode")
    ));
    assert!(was_changed(&|path| fs::remove_file(path.with_file_name("log")).expect("it goes")));
}

#[test]
fn nothing_of_roots_is_touched_by_restores_of_an_attackers_program() {
    attack(Kind::Program);
}

#[test]
fn nothing_of_roots_is_touched_by_restores_of_an_attackers_container() {
    attack(Kind::Container);
}

#[test]
fn nothing_of_roots_is_touched_by_restores_of_an_attackers_machine() {
    attack(Kind::Machine);
}

#[test]
fn nothing_of_roots_is_touched_when_an_attackers_machine_is_forked() {
    attack(Kind::Machines);
}

#[test]
fn nothing_of_roots_is_touched_by_exports_into_an_attackers_directory() {
    if !has_criu() || !PathBuf::from(PYTHON).exists() {
        skip!("it needs root, CRIU and {PYTHON}");
    }
    let pagemark = with_checkpoints();
    let forms: &[[&str; 3]] = match guest_program() {
        Some(_) => &[
            ["export", "box", "--core"],
            ["export", "box", "--criu"],
            ["export", "machine", "--core"],
            ["export", "machine", "--qemu"],
        ],
        None => &[["export", "box", "--core"], ["export", "box", "--criu"]],
    };
    for_its_time(|random, met| {
        directory_campaign(&pagemark, random, met, |users| {
            let names = ["a/b/out", "a/out", "a/b/new/out", "a/log2", "a/a/out", "out"];
            let commands = names.iter().zip(0..).zip(forms.iter().cycle());
            commands.map(|((name, number), form)| with_path(form, users, &format!("{name}{number}"))).collect()
        });
    });
}

#[test]
fn nothing_of_roots_is_touched_when_asides_in_an_attackers_directory_are_removed() {
    if !subject::is_root() {
        skip!("not root");
    }
    let pagemark = Pagemark::new();
    for_its_time(|random, met| {
        directory_campaign(&pagemark, random, met, |users| {
            for parent in ["a/a", "a/b/a", "a/b/b"] {
                fs::create_dir_all(users.join(parent).join(ASIDES).join("files")).expect("a directory");
            }
            let command = |name: &&str| with_path(&["asides", "--remove-all", "--asides"], users, name);
            ["a/a", "a/b/a", "a/b/b", "a/a"].iter().map(command).collect()
        });
    });
}

#[test]
fn nothing_of_roots_is_touched_when_an_attackers_repository_is_pruned() {
    if !has_criu() || !PathBuf::from(PYTHON).exists() {
        skip!("it needs root, CRIU and {PYTHON}");
    }
    let pagemark = with_checkpoints();
    for_its_time(|random, met| {
        directory_campaign(&pagemark, random, met, |users| {
            let copied = Command::new("cp").arg("-r").arg(pagemark.repository()).arg(users.join("a/log")).status();
            assert!(copied.is_ok_and(|status| status.success()), "no copy");
            let given = Command::new("chown").args(["-R", &format!("{NOBODY}:{NOBODY}")]).arg(users).status();
            assert!(given.is_ok_and(|status| status.success()), "it is not given away");
            let prune = &["prune", "--keep-last", "1", "--trust-repo", "--repo"];
            vec![with_path(prune, users, "a/log"); 3]
        });
    });
}
