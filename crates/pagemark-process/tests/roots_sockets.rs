//! Sockets of root's programs in directories of users, who can lead their paths elsewhere at any
//! time: a restore does there what the user could do, and no more.

mod support;

use std::fs::{self, Permissions};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
use pagemark_process::restore::{RestoreFailure, Restored};
use pagemark_testing::wait_until;
use support::{Checkpoints, Program, REPORT_AGAIN};

const USER: u32 = 65534;

/// Sockets of each kind in directory `d`: bound, without a path, replaced, and with clients.
const SOCKETS: &str = "
here = os.getcwd()
def datagrams(path):
    end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    end.bind(path)
    client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    client.connect(path)
    return end, client
def without_path(path):
    ends = datagrams(path)
    os.unlink(path)
    return ends
listening = socket.socket(socket.AF_UNIX)
listening.bind(here + '/d/s')
os.chmod('d/s', 0o640)
listening.listen(7)
waiting = socket.socket(socket.AF_UNIX)
waiting.connect(here + '/d/s')
os.makedirs('d/a/b')
pairs = [datagrams('d/relative'), without_path(here + '/d/gone'), without_path(here + '/d/a/b/s')]
os.removedirs('d/a/b')
pairs.append(without_path(here + '/d/r'))
os.mkfifo('d/r', 0o600)
greeting = None
def read():
    global greeting
    if greeting is None and os.path.exists('accept'):
        listening.accept()[0].send(b'hello')
        greeting = waiting.recv(9)
    for number, (_, client) in enumerate(pairs):
        client.send(b'%d' % number)
    received = [end.recv(9) for end, _ in pairs]
    names = [end.getsockname().replace(here, '') for end, _ in pairs]
    return repr([received, names, listening.getsockname().replace(here, ''), greeting])
";

fn reporting() -> Option<Program> {
    let set_up = "os.mkdir('d')\nos.mkdir('d/keep')\nos.chown('d', 65534, 65534)\nos.chmod('d', 0o755)";
    let text = format!("import os, socket, time\n{set_up}\n{SOCKETS}\n{REPORT_AGAIN}");
    let program = Program::of_root_in_a_directory_of_a_user(&text)?;
    wait_until("the program reports", || program.read("out").is_some());
    Some(program)
}

/// A directory of root's that others can enter, below the program's, in which root's socket is.
fn roots(program: &Program) -> PathBuf {
    let directory = program.directory().join("roots");
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, Permissions::from_mode(0o755)).unwrap();
    directory
}

/// What has changed in a directory of root's if anything has.
fn state(directory: &Path) -> (std::time::SystemTime, Vec<std::ffi::OsString>) {
    let mut names: Vec<_> = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    names.sort();
    (fs::metadata(directory).unwrap().modified().unwrap(), names)
}

/// As the user.
fn make_link(target: &Path, link: &Path) {
    symlink(target, link).unwrap();
    std::os::unix::fs::lchown(link, Some(USER), Some(USER)).unwrap();
}

fn names(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn they_are_put_back_with_their_owner_and_clients() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = reporting() else { return };
    let before = program.report();
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let directory = program.directory().join("d");
    let listed = names(&directory);
    let fifo = fs::symlink_metadata(directory.join("r")).unwrap().ino();
    for _ in 0..2 {
        program.adopt(&checkpoints.restore(&checkpoint).unwrap());
        assert_eq!(program.report(), before);
        fs::write(program.directory().join("accept"), "").unwrap();
        wait_until("the client is accepted", || program.report().contains("hello"));
        for (name, mode) in [("s", 0o640), ("relative", 0o755)] {
            let socket = fs::symlink_metadata(directory.join(name)).unwrap();
            assert!(socket.file_type().is_socket());
            assert_eq!((socket.uid(), socket.gid(), socket.mode() & 0o7777), (0, 0, mode), "{name}");
        }
        assert_eq!(names(&directory), listed);
        assert_eq!(fs::symlink_metadata(directory.join("r")).unwrap().ino(), fifo);
        program.kill();
        fs::remove_file(program.directory().join("accept")).unwrap();
    }
}

#[test]
fn they_are_not_bound_where_the_user_leads_their_path() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = reporting() else { return };
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let roots = roots(&program);
    let at = |name: &str| program.directory().join(name);
    let before = state(&roots);
    fs::rename(at("d"), at("moved")).unwrap();
    make_link(&roots, &at("d"));
    let restore = || checkpoints.restore(&checkpoint);
    let error = restore().unwrap_err().to_string();
    assert!(error.contains("a symbolic link now"), "{error}");
    assert_eq!(state(&roots), before);
    // What can be changed by several users is left alone, unless root consents.
    fs::remove_file(at("d")).unwrap();
    fs::rename(at("moved"), at("d")).unwrap();
    fs::set_permissions(at("d"), Permissions::from_mode(0o777)).unwrap();
    let error = restore().unwrap_err().to_string();
    assert!(error.contains("several users can change") && error.contains("--trust-path"), "{error}");
    let paths = ["d/s", "d/relative", "d/gone", "d/a/b/s", "d/r"].map(at).to_vec();
    let restoring = checkpoints.restoring(&checkpoint, &checkpoints.criu).trust_paths(paths);
    program.adopt(&restoring.run(&mut |_| {}).unwrap());
}

#[test]
fn a_user_who_exchanges_the_directory_all_the_time_makes_root_do_nothing() {
    const RESTORES: u32 = 12;
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = reporting() else { return };
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let roots = roots(&program);
    let (path, link) = (program.directory().join("d"), program.directory().join("link"));
    make_link(&roots, &link);
    let before = state(&roots);
    let (ends, swaps) = (AtomicBool::new(false), AtomicU64::new(0));
    let restored: Vec<Result<Restored, RestoreFailure>> = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                renameat2(AT_FDCWD, &path, AT_FDCWD, &link, RenameFlags::RENAME_EXCHANGE).unwrap();
                swaps.fetch_add(1, Ordering::Relaxed);
                std::thread::yield_now();
            }
        });
        let restored = (0..RESTORES)
            .map(|_| {
                let restored = checkpoints.restore(&checkpoint);
                if let Ok(restored) = &restored {
                    program.adopt(restored);
                    program.kill();
                }
                restored
            })
            .collect();
        ends.store(true, Ordering::Relaxed);
        restored
    });
    assert!(swaps.load(Ordering::Relaxed) > 100);
    assert_eq!(state(&roots), before);
    for error in restored.into_iter().filter_map(Result::err) {
        let error = error.to_string();
        assert!(error.contains("/d") || error.contains("socket"), "{error}");
    }
}

#[test]
fn a_socket_that_another_user_has_put_into_a_sticky_directory_stays() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let set_up = "os.mkdir('d')\nos.chmod('d', 0o1777)\nend = socket.socket(socket.AF_UNIX)\n\
                  end.bind(os.getcwd() + '/d/s')\nend.listen()\ndef read():\n    return end.getsockname()[-3:]";
    let text = format!("import os, socket, time\n{set_up}\n{REPORT_AGAIN}");
    let program = Program::of_root_in_a_directory_of_a_user(&text);
    let Some(mut program) = program else { return };
    wait_until("the program reports", || program.read("out").is_some());
    chown(program.directory(), Some(0), Some(0)).unwrap();
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    assert_eq!(program.report(), "d/s");
    program.kill();
    let path = program.directory().join("d/s");
    chown(&path, Some(USER), Some(USER)).unwrap();
    let planted = fs::symlink_metadata(&path).unwrap();
    let error = checkpoints.restore(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("d/s"), "{error}");
    let after = fs::symlink_metadata(&path).unwrap();
    assert_eq!((after.ino(), after.uid()), (planted.ino(), planted.uid()));
}
