//! Machines of a user that root checkpoints, restores and exports: root does nothing for them that
//! their user could not do.

#[path = "support/restored.rs"]
mod restored;

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::Signal;
use pagemark::repository::{Checkpoint, Repository};
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_testing::{MachinePaths, QEMU, copy_executable, guest_program, skip, wait_for, with_disk};
use pagemark_vm::{ErrorKind, Restore, VmTarget, export_qemu};
use restored::{Restored, restore};

/// A user without a name, in two groups.
const USER: u32 = 4711;
const GROUPS: [u32; 2] = [4713, 4714];
const DISK_BYTES: u64 = 16 << 20;

/// A machine of that user, with a disk.
struct OfUser {
    paths: MachinePaths,
    image: PathBuf,
    child: Child,
}

impl Drop for OfUser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn give(path: &Path) {
    chown(path, Some(USER), Some(USER)).unwrap();
}

/// A command that runs as the user.
fn as_user(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args([
        format!("--reuid={USER}"),
        format!("--regid={USER}"),
        format!("--groups={},{}", GROUPS[0], GROUPS[1]),
    ]);
    command.arg(program);
    command
}

impl OfUser {
    /// Starts the machine. None, with the reason, if that does not work here.
    fn start(format: &str, further: &[&str]) -> Result<OfUser, &'static str> {
        OfUser::start_with(format, further, false)
    }

    /// Like [`OfUser::start`], maybe with the user's own copy of QEMU, `own-qemu`.
    fn start_with(format: &str, further: &[&str], has_own_program: bool) -> Result<OfUser, &'static str> {
        let guest_of_test = guest_program().ok_or("no QEMU, or no compiler for its guest")?;
        if !nix::unistd::geteuid().is_root() {
            return Err("only root restores the machines of others");
        }
        let paths = MachinePaths::default();
        let (image, guest) = (paths.join("disk"), paths.join("guest"));
        fs::copy(guest_of_test, &guest).unwrap();
        let made = match format {
            "raw" => fs::File::create(&image).and_then(|file| file.set_len(DISK_BYTES)).is_ok(),
            _ => {
                let mut create = Command::new("qemu-img");
                create.args(["create", "-q", "-f", format]).arg(&image).arg(DISK_BYTES.to_string());
                create.status().is_ok_and(|status| status.success())
            }
        };
        if !made {
            return Err("no qemu-img");
        }
        for path in [&paths.join(""), &image, &guest] {
            give(path);
        }
        let mut arguments = with_disk(&image, format, "");
        arguments.extend(["-kernel".into(), guest.display().to_string()]);
        arguments.extend(further.iter().map(|&word| word.to_owned()));
        let program = match has_own_program {
            true => own_qemu(&paths).ok_or("no QEMU")?,
            false => QEMU.to_owned(),
        };
        let mut command = as_user(&program);
        command.args(paths.arguments(&arguments)).current_dir(paths.join("")).stdin(Stdio::null());
        command.env("HOME", "/nonexistent").env("OF_THE_USER", "yes");
        if has_own_program {
            // Debian's QEMU looks for its modules beside itself.
            command.env("QEMU_MODULE_DIR", "/usr/lib/x86_64-linux-gnu/qemu");
        }
        let child = command.spawn().map_err(|_| "no setpriv")?;
        let machine = OfUser { paths, image, child };
        wait_for("the machine to start", || (machine.paths.steps() > 3).then_some(()));
        Ok(machine)
    }

    /// Checkpoints the machine, and ends it.
    fn checkpoint(&mut self) -> Checkpoint {
        // The repository is root's.
        let place = self.paths.join("repository");
        let repository = Repository::create(&place).unwrap();
        let target = VmTarget::attach(&self.paths.monitor(), Mechanism::choose(Scope::Process)).unwrap();
        let mut job = Job::new(target, repository, JobOptions::new("vm"));
        job.checkpoint().unwrap();
        job.detach();
        self.end();
        Repository::open(&place).unwrap().read("vm", 1).unwrap()
    }

    fn end(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// The QEMU of this system.
fn qemu() -> Option<PathBuf> {
    let directories = std::env::var_os("PATH")?;
    std::env::split_paths(&directories).map(|directory| directory.join(QEMU)).find(|path| path.exists())
}

/// A copy of QEMU that belongs to the user.
fn own_qemu(paths: &MachinePaths) -> Option<String> {
    let own = paths.join("own-qemu");
    copy_executable(&qemu()?, &own);
    give(&own);
    Some(own.display().to_string())
}

/// A program of root's that gives root's rights, for a link of the user's to lead to.
fn of_root(directory: &Path) -> PathBuf {
    let path = directory.join("of-root");
    fs::write(&path, "root's").unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o4755)).unwrap();
    path
}

fn pid(machine: &Restored) -> i32 {
    machine.0.as_ref().unwrap().pid()
}

fn status(pid: i32) -> String {
    fs::read_to_string(format!("/proc/{pid}/status")).unwrap()
}

fn field(status: &str, name: &str) -> Vec<String> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.split_whitespace().map(str::to_owned).collect()
}

#[test]
fn a_restored_machine_has_the_rights_of_its_user_and_no_others() {
    let mut machine = match OfUser::start("raw", &[]) {
        Ok(machine) => machine,
        Err(reason) => skip!("{reason}"),
    };
    let checkpoint = machine.checkpoint();
    let restored = restore(&checkpoint).unwrap();
    let pid = pid(&restored);
    let status = status(pid);
    let ids = |name| field(&status, name).iter().map(|id| id.parse().unwrap()).collect::<Vec<u32>>();
    assert_eq!((ids("Uid"), ids("Gid"), ids("Groups")), (vec![USER; 4], vec![USER; 4], GROUPS.to_vec()));
    for name in ["CapEff", "CapPrm", "CapInh", "CapAmb"] {
        assert_eq!(field(&status, name), ["0000000000000000"], "{name}");
    }
    // Otherwise the user could have root write the memory of a program with more rights.
    assert_eq!(field(&status, "NoNewPrivs"), ["1"]);
    // QEMU blocks others, which it reads by itself.
    let blocked = u64::from_str_radix(&field(&status, "SigBlk")[0], 16).unwrap();
    for signal in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM] {
        assert_eq!(blocked >> (signal as u64 - 1) & 1, 0, "{signal}");
    }
    // Neither what root has in its environment, nor what the user had there besides.
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
    let names: Vec<&[u8]> =
        environment.split(|byte| *byte == 0).filter_map(|text| text.split(|byte| *byte == b'=').next()).collect();
    assert!(names.contains(&&b"HOME"[..]), "{names:?}");
    for name in ["CARGO_MANIFEST_DIR", "OF_THE_USER"] {
        assert!(!names.contains(&name.as_bytes()), "{name}");
    }
    // In root's session it could type at root's terminal.
    let session = |pid: i32| nix::unistd::getsid(Some(nix::unistd::Pid::from_raw(pid))).unwrap();
    assert_eq!(session(pid).as_raw(), pid);
    // Nothing of this process is open there.
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let open = fs::read_link(entry.unwrap().path()).unwrap();
        assert!(!open.to_string_lossy().contains("repository"), "{}", open.display());
    }
    machine.paths.wait_for_steps(20);
}

#[test]
fn a_restored_machine_in_the_foreground_has_a_session_of_its_own() {
    let mut machine = match OfUser::start("raw", &[]) {
        Ok(machine) => machine,
        Err(reason) => skip!("{reason}"),
    };
    let checkpoint = machine.checkpoint();
    let restored = Restore::new(&checkpoint).start(&mut |_, _| {}).unwrap();
    assert!(restored.has_own_session());
    let restored = Restored(Some(restored));
    let pid = nix::unistd::Pid::from_raw(pid(&restored));
    assert_eq!(nix::unistd::getsid(Some(pid)).unwrap(), pid);
}

#[test]
fn images_of_a_restore_are_the_users_and_get_no_rights_through_links() {
    for format in ["raw", "qcow2"] {
        let mut machine = match OfUser::start(format, &[]) {
            Ok(machine) => machine,
            Err(reason) => skip!("{reason}"),
        };
        let checkpoint = machine.checkpoint();
        let elsewhere = tempfile::tempdir().unwrap();
        let target = of_root(elsewhere.path());
        fs::rename(&machine.image, machine.paths.join("old")).unwrap();
        symlink(&target, &machine.image).unwrap();
        let restored = restore(&checkpoint).unwrap();
        let image = &restored.0.as_ref().unwrap().disks()[0].1;
        let made = fs::symlink_metadata(image).unwrap();
        assert_eq!((made.uid(), made.gid(), made.mode() & 0o7777), (USER, USER, 0o600), "{format}");
        machine.paths.wait_for_steps(20);
        drop(restored);

        // A directory of root's in place of the user's own.
        fs::set_permissions(elsewhere.path(), Permissions::from_mode(0o755)).unwrap();
        let directory: PathBuf = machine.paths.join("").components().collect();
        let moved = directory.with_extension("moved");
        fs::rename(&directory, &moved).unwrap();
        symlink(elsewhere.path(), &directory).unwrap();
        let error = restore(&checkpoint).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Disk, "{error}");
        let names = fs::read_dir(elsewhere.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.collect::<Vec<_>>(), ["of-root"]);
        fs::remove_file(&directory).unwrap();
        fs::rename(&moved, &directory).unwrap();
    }
}

#[test]
fn the_overlays_of_a_fork_are_the_users() {
    let mut machine = match OfUser::start("raw", &[]) {
        Ok(machine) => machine,
        Err(reason) => skip!("{reason}"),
    };
    let checkpoint = machine.checkpoint();
    for forked in Restore::new(&checkpoint).fork(2, &[]).unwrap() {
        assert_eq!(field(&status(forked.pid), "Uid"), vec![USER.to_string(); 4]);
        let made = fs::symlink_metadata(&forked.disks[0].1).unwrap();
        assert_eq!((made.uid(), made.mode() & 0o7777), (USER, 0o600 | made.mode() & 0o44));
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(forked.pid), Signal::SIGKILL).unwrap();
    }
}

/// The user has put another program in the place of the QEMU that its process executed.
#[test]
fn the_program_of_a_user_is_never_executed_by_root() {
    let mut machine = match OfUser::start_with("qcow2", &["-L", "/usr/share/qemu", "-L", "/usr/share/seabios"], true) {
        Ok(machine) => machine,
        Err(reason) => skip!("{reason}"),
    };
    let checkpoint = machine.checkpoint();
    let (own, record) = (machine.paths.join("own-qemu"), machine.paths.join("record"));
    let text = format!(
        "#!/bin/sh\n{{ echo begin; cat /proc/$$/status; env; }} >> {}\nexec {} \"$@\"\n",
        record.display(),
        qemu().unwrap().display()
    );
    let executed = || {
        let text = fs::read_to_string(&record).unwrap_or_default();
        fs::write(&record, "").unwrap();
        give(&record);
        let runs: Vec<String> = text.split("begin\n").skip(1).map(str::to_owned).collect();
        for run in &runs {
            assert_eq!(field(run, "Uid"), vec![USER.to_string(); 4]);
            assert_eq!(field(run, "Gid"), vec![USER.to_string(); 4]);
            assert_eq!(field(run, "Groups"), GROUPS.map(|group| group.to_string()));
            assert_eq!(field(run, "NoNewPrivs"), ["1"]);
            for capabilities in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
                assert_eq!(field(run, capabilities), ["0000000000000000"], "{capabilities}");
            }
            // Of root's environment it has nothing but places and languages.
            assert!(!run.contains("CARGO_"), "{run}");
        }
        runs.len()
    };
    fs::remove_file(&own).unwrap();
    pagemark_testing::executable(&own, text.as_bytes());
    give(&own);
    executed();
    drop(restore(&checkpoint).unwrap());
    assert!(executed() >= 2, "one that writes the image, and one that runs");
    for forked in Restore::new(&checkpoint).fork(1, &[]).unwrap() {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(forked.pid), Signal::SIGKILL).unwrap();
    }
    assert!(executed() >= 1);
    let directory = tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().unwrap();
    export_qemu(&checkpoint, directory.path()).unwrap();
    assert!(executed() >= 1);
}

#[test]
fn a_qemu_that_gave_up_root_is_started_without_root() {
    // QEMU's own user is set already, so it does not set it itself.
    let mut machine = match OfUser::start("raw", &[]) {
        Ok(machine) => machine,
        Err(reason) => skip!("{reason}"),
    };
    machine.end();
    let mut arguments = machine.paths.arguments(&with_disk(&machine.image, "raw", ""));
    arguments.extend(["-runas".to_owned(), format!("{USER}:{USER}")]);
    fs::remove_file(machine.paths.join("serial")).unwrap();
    fs::File::create(&machine.image).unwrap().set_len(DISK_BYTES).unwrap();
    machine.child = Command::new(QEMU).args(arguments).stdin(Stdio::null()).spawn().unwrap();
    wait_for("the machine to start", || (machine.paths.steps() > 3).then_some(()));
    // As it was with root's rights.
    give(&machine.paths.join("serial"));
    for socket in ["vm.qmp", "test.qmp"] {
        give(&machine.paths.join(socket));
    }
    let checkpoint = machine.checkpoint();
    let restored = restore(&checkpoint).unwrap();
    assert_eq!(field(&status(pid(&restored)), "Uid"), vec![USER.to_string(); 4]);
}

#[test]
fn an_exported_machine_is_the_users_and_is_not_run_by_root() {
    for format in ["raw", "qcow2"] {
        let mut machine = match OfUser::start(format, &[]) {
            Ok(machine) => machine,
            Err(reason) => skip!("{reason}"),
        };
        let checkpoint = machine.checkpoint();
        let directory = tempfile::Builder::new().permissions(Permissions::from_mode(0o700)).tempdir().unwrap();
        let exported = export_qemu(&checkpoint, directory.path()).unwrap();
        for path in [&exported.stream, &exported.disks[0].1] {
            let made = fs::symlink_metadata(path).unwrap();
            assert_eq!((made.uid(), made.mode() & 0o7777), (USER, 0o600), "{}", path.display());
        }
        let script = fs::symlink_metadata(&exported.script).unwrap();
        assert_eq!((script.uid(), script.mode() & 0o7777), (0, 0o755));
        let refused = Command::new(&exported.script).stdin(Stdio::null()).output().unwrap();
        let words = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && words.contains(&format!("setpriv --reuid={USER}")), "{words}");
        let before = machine.paths.steps();
        machine.child = as_user("sh").arg(&exported.script).stdin(Stdio::null()).spawn().unwrap();
        wait_for("the machine to go on", || (machine.paths.steps() > before + 20).then_some(()));
        // What others can write to is not exported to.
        let open = tempfile::tempdir().unwrap();
        fs::set_permissions(open.path(), Permissions::from_mode(0o777)).unwrap();
        assert!(export_qemu(&checkpoint, open.path()).is_err());
        assert_eq!(fs::read_dir(open.path()).unwrap().count(), 0);
    }
}

/// A process that listens can become a program with more rights, while another one answers.
#[test]
fn a_monitor_of_a_user_names_no_process_of_another() {
    if !nix::unistd::geteuid().is_root() {
        skip!("only root attaches to the machines of others");
    }
    let script = "import os, socket, sys\n\
        listener = socket.socket(socket.AF_UNIX)\n\
        listener.bind(sys.argv[1])\n\
        os.chmod(sys.argv[1], 0o777)\n\
        os.setresuid(4711, 4711, 0)\n\
        listener.listen()\n\
        if sys.argv[2] == 'root': os.setresuid(0, 0, 0)\n\
        if sys.argv[2] == 'other': os.setresuid(0, 0, 0); os.setresuid(4712, 4712, 4712)\n\
        connection = listener.accept()[0]\n\
        connection.sendall(b'{\"QMP\": {\"version\": {}, \"capabilities\": []}}\\n')\n\
        connection.recv(1000)\n\
        connection.sendall(b'{\"return\": {}, \"id\": 1}\\n')\n\
        connection.recv(1000)\n";
    for (then, reason) in [("saved", "several users"), ("root", "belongs to the user 0"), ("other", "user 4712")] {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("monitor");
        let mut command = Command::new("python3");
        command.args(["-c", script]).arg(&socket).arg(then);
        let Ok(mut child) = command.spawn() else { skip!("no Python") };
        let error =
            wait_for("the monitor to listen", || match VmTarget::attach(&socket, Mechanism::choose(Scope::Process)) {
                Err(error) if error.kind() == ErrorKind::Monitor => None,
                attached => Some(attached.err().unwrap()),
            });
        assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains(reason), "{then}: {error}");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

/// A user's link may lead to a socket that the user may not connect to.
#[test]
fn a_monitor_behind_a_link_of_a_user_is_a_socket_of_that_user() {
    if !nix::unistd::geteuid().is_root() {
        skip!("only root attaches to the machines of others");
    }
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in ["of-root", "of-user", "of-other"] {
        fs::create_dir(path(name)).unwrap();
    }
    let listen = |name: &str, user: u32| {
        let listener = UnixListener::bind(path(name)).unwrap();
        listener.set_nonblocking(true).unwrap();
        chown(path(name), Some(user), Some(user)).unwrap();
        listener
    };
    let of_root = listen("of-root/socket", 0);
    let of_user = listen("of-user/socket", USER);
    let of_other = listen("of-other/socket", USER + 1);
    let lead = |name: &str, target: &Path, user: u32| {
        symlink(target, path(name)).unwrap();
        lchown(path(name), Some(user), Some(user)).unwrap();
    };
    lead("to-root", &path("of-root"), USER);
    lead("by-root", Path::new("to-root"), 0);
    lead("to-other", Path::new("of-other/socket"), USER);
    lead("to-user", Path::new("of-other/../of-user"), USER);
    lead("to-all", &path("of-other"), 0);
    let connected = |name: &str, listener: &UnixListener| {
        // Who accepts and leaves is no QEMU.
        let accepting = listener.try_clone().unwrap();
        let attaching = std::thread::spawn({
            let name = path(name);
            move || VmTarget::attach(&name, Mechanism::choose(Scope::Process)).err().unwrap()
        });
        wait_for("a connection", || accepting.accept().ok());
        attaching.join().unwrap()
    };
    for name in ["to-root/socket", "by-root/socket", "to-other"] {
        let error = VmTarget::attach(&path(name), Mechanism::choose(Scope::Process)).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{name}: {error}");
        assert!(error.to_string().contains(&format!("a link of the user {USER}")), "{name}: {error}");
        assert!(error.advice().contains("the socket itself"), "{}", error.advice());
    }
    assert!(of_root.accept().is_err(), "the socket of root was connected to");
    for (name, listener) in [("to-user/socket", &of_user), ("of-root/socket", &of_root)] {
        let error = connected(name, listener);
        assert_eq!(error.kind(), ErrorKind::Gone, "{name}: {error}");
    }
    // The paths of a process lead where no text says.
    let by_process = format!("/proc/self/root{}", path("to-all/socket").display());
    drop(connected(&by_process, &of_other));
}
