//! Programs of another user, which that user may prepare for a restore that root makes: root does
//! nothing for the user that the user could not do.

mod support;

use std::fs::{self, Permissions};
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use pagemark::repository::Checkpoint;
use pagemark_process::criu::Criu;
use pagemark_process::restore::{RestoreFailure, Restored};
use pagemark_testing::wait_until;
use support::{Checkpoints, Program, REPORT_AGAIN};

const USER: u32 = 65534;

fn reporting(set_up: &str) -> Option<Program> {
    let program = Program::of_a_user(&format!("import os, socket, time\n{set_up}\n{REPORT_AGAIN}"))?;
    wait_until("the program reports", || program.read("out").is_some());
    Some(program)
}

fn restore(checkpoints: &Checkpoints, checkpoint: &Checkpoint, criu: &Criu) -> Result<Restored, RestoreFailure> {
    checkpoints.restoring(checkpoint, criu).run(&mut |_| {})
}

/// A CRIU that does something at the moment at which Pagemark starts it for a restore.
fn criu_after(checkpoints: &Checkpoints, action: &str) -> Criu {
    let path = checkpoints.directory.path().join("criu-after");
    let criu = checkpoints.criu.path().display();
    let text = format!("#!/bin/sh\nif [ \"$1\" = restore ]; then {action}; fi\nexec {criu} \"$@\"\n");
    pagemark_testing::executable(&path, text.as_bytes());
    Criu::at(&path).unwrap()
}

/// A CRIU that does something when a container has its mounts, and Pagemark has looked up the files
/// in them: CRIU executes the script that was named last first.
fn criu_with_mounts(checkpoints: &Checkpoints, action: &str) -> Criu {
    let path = checkpoints.directory.path().join("criu-with-mounts");
    let script = checkpoints.directory.path().join("action");
    let text = format!("#!/bin/sh\n[ \"$CRTOOLS_SCRIPT_ACTION\" = post-setup-namespaces ] || exit 0\n{action}\n");
    pagemark_testing::executable(&script, text.as_bytes());
    let (criu, script) = (checkpoints.criu.path().display(), script.display());
    let text = format!(
        "#!/bin/sh\nif [ \"$1\" = restore ]; then shift; set -- restore --action-script {script} \"$@\"; fi\n\
         exec {criu} \"$@\"\n"
    );
    pagemark_testing::executable(&path, text.as_bytes());
    Criu::at(&path).unwrap()
}

/// A directory of root's that others can enter, below the program's, with a secret.
fn roots(program: &Program) -> PathBuf {
    let directory = program.directory().join("roots");
    fs::create_dir(&directory).unwrap();
    fs::write(directory.join("secret"), "SECRET").unwrap();
    fs::set_permissions(directory.join("secret"), Permissions::from_mode(0o600)).unwrap();
    directory
}

/// As the user.
fn make_link(target: &Path, link: &Path) {
    symlink(target, link).unwrap();
    std::os::unix::fs::lchown(link, Some(USER), Some(USER)).unwrap();
}

const READER: &str = "
os.mkdir('sub')
open('sub/f', 'w').write('mine..')
os.chmod('sub/f', 0o600)
file = os.open('sub/f', os.O_RDONLY)
def read():
    return os.pread(file, 100, 0).decode()
";

#[test]
fn a_link_in_place_of_an_open_file_ends_the_restore() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let fifo =
        "os.mkdir('sub')\nos.mkfifo('sub/f', 0o600)\nfile = os.open('sub/f', os.O_RDWR)\ndef read():\n    return ''";
    let directory = "os.mkdir('sub')\nos.chdir('sub')\ndef read():\n    return str(os.listdir('.'))";
    let directory = format!("{directory}\nopen_ = open\ndef open(name, mode):\n    return open_('../' + name, mode)");
    let directory = format!("{directory}\nrename = os.rename\nos.rename = lambda a, b: rename('../' + a, '../' + b)");
    for (set_up, swapped) in [(READER, "sub/f"), (READER, "sub"), (fifo, "sub/f"), (&directory, "sub")] {
        let Some(mut program) = reporting(set_up) else { return };
        let checkpoint = checkpoints.take(&program, &[]);
        program.kill();
        let roots = roots(&program);
        fs::copy(roots.join("secret"), roots.join("f")).unwrap();
        let path = program.directory().join(swapped);
        fs::rename(&path, program.directory().join("moved")).unwrap();
        let target = if swapped == "sub" { roots.clone() } else { roots.join("secret") };
        make_link(&target, &path);
        fs::remove_file(program.directory().join("out")).unwrap();
        let error = restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap_err().to_string();
        assert!(error.contains("a symbolic link now"), "{swapped}: {error}");
        assert!(error.contains(&path.display().to_string()), "{swapped}: {error}");
        assert_eq!(program.read("out"), None);
    }
}

#[test]
fn what_is_swapped_while_criu_starts_has_no_effect() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    for swapped in ["sub/f", "sub"] {
        let Some(mut program) = reporting(READER) else { return };
        let checkpoint = checkpoints.take(&program, &[]);
        program.kill();
        let roots = roots(&program);
        fs::copy(roots.join("secret"), roots.join("f")).unwrap();
        let target = if swapped == "sub" { roots.clone() } else { roots.join("secret") };
        let (path, moved) = (program.directory().join(swapped), program.directory().join("moved"));
        let swap = format!("mv {0} {1} && ln -s {2} {0}", path.display(), moved.display(), target.display());
        let criu = criu_after(&checkpoints, &swap);
        let restored = restore(&checkpoints, &checkpoint, &criu).unwrap();
        program.adopt(&restored);
        assert!(path.is_symlink());
        assert_eq!(program.report(), "mine..");
    }
}

#[test]
fn a_container_in_which_a_file_is_swapped_while_criu_starts_does_not_run() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    for (swapped, is_lazy) in [("sub/f", false), ("sub", false), ("sub", true)] {
        let Some(mut program) =
            Program::of_a_user_in_a_container(&format!("import os, time\n{READER}\n{REPORT_AGAIN}"))
        else {
            return;
        };
        wait_until("the program reports", || program.read("out").is_some());
        let checkpoint = checkpoints.take(&program, &[]);
        program.kill();
        let restored = checkpoints.restoring(&checkpoint, &checkpoints.criu).lazy(is_lazy).run(&mut |_| {}).unwrap();
        program.adopt(&restored);
        assert_eq!(program.report(), "mine..");
        program.kill();
        let roots = roots(&program);
        fs::copy(roots.join("secret"), roots.join("f")).unwrap();
        fs::remove_file(program.directory().join("out")).unwrap();
        let target = if swapped == "sub" { roots.clone() } else { roots.join("secret") };
        let (path, moved) = (program.directory().join(swapped), program.directory().join("moved"));
        let swap = format!("mv {0} {1} && ln -s {2} {0}", path.display(), moved.display(), target.display());
        let criu = criu_after(&checkpoints, &swap);
        let restore = checkpoints.restoring(&checkpoint, &criu).lazy(is_lazy);
        let error = restore.run(&mut |_| {}).unwrap_err().to_string();
        assert!(path.is_symlink());
        let reasons = ["was swapped while process 1 was restored", "a symbolic link now"];
        assert!(reasons.iter().any(|reason| error.contains(reason)), "{swapped}: {error}");
        assert_eq!(program.read("out"), None, "{swapped}");
    }
}

#[test]
fn a_file_that_the_user_may_not_use_ends_the_restore_unless_it_is_trusted() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = reporting(READER) else { return };
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    // As a file of root's that its user has moved there.
    let path = program.directory().join("sub/f");
    chown(&path, Some(0), Some(0)).unwrap();
    let error = restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap_err().to_string();
    for part in ["sub/f is a file that user 65534 may not read", "had it as descriptor", "--trust-path"] {
        assert!(error.contains(part), "{error}");
    }
    let trusting = checkpoints.restoring(&checkpoint, &checkpoints.criu).trust_paths(vec![path]);
    program.adopt(&trusting.run(&mut |_| {}).unwrap());
    assert_eq!(program.report(), "mine..");
}

#[test]
fn a_fifo_that_is_gone_is_made_again_by_its_user() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = reporting(
        "os.makedirs('a/b')\nos.umask(0)\nos.mkfifo('a/b/f', 0o620)\nfile = os.open('a/b/f', os.O_RDWR)\nos.write(file, b'kept')\n\
         def read():\n    return str(os.fstat(file).st_ino == os.stat('a/b/f').st_ino)",
    ) else {
        return;
    };
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    fs::remove_dir_all(program.directory().join("a")).unwrap();
    // CRIU fails: nothing is left.
    let broken = criu_after(&checkpoints, "exit 1");
    restore(&checkpoints, &checkpoint, &broken).unwrap_err();
    assert!(!program.directory().join("a").exists());
    program.adopt(&restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap());
    let fifo = fs::symlink_metadata(program.directory().join("a/b/f")).unwrap();
    assert!(fifo.file_type().is_fifo());
    assert_eq!((fifo.uid(), fifo.gid(), fifo.mode() & 0o7777), (USER, USER, 0o620));
    assert_eq!(fs::metadata(program.directory().join("a")).unwrap().uid(), USER);
    assert_eq!(program.report(), "True");
    program.kill();
    // In a directory of root's the user cannot make it.
    fs::remove_dir_all(program.directory().join("a")).unwrap();
    chown(program.directory(), Some(0), Some(0)).unwrap();
    let error = restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap_err().to_string();
    assert!(error.contains("a/b/f") && error.contains("user 65534 cannot make"), "{error}");
}

#[test]
fn files_without_names_are_made_by_their_user() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = reporting(
        "os.makedirs('a/b')\nfile = os.open('a/b/f', os.O_RDWR | os.O_CREAT, 0o640)\nos.write(file, b'x' * 20000)\n\
         os.pwrite(file, b'end', 1 << 20)\nos.unlink('a/b/f')\nagain = os.open('/proc/self/fd/%d' % file, os.O_RDONLY)\n\
         os.mkdir('d')\ngone = os.open('d', os.O_RDONLY)\nos.rmdir('d')\n\
         def read():\n    s = os.fstat(file)\n    os.fstat(gone)\n    return '%s %o %d %d %r %s' % (os.readlink('/proc/self/fd/%d' % file)[-11:], \
         s.st_mode, s.st_size, s.st_uid, os.pread(again, 3, 1 << 20), os.lseek(file, 0, 1))",
    ) else {
        return;
    };
    let before = program.report();
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let watched = program.directory().join("a/b");
    let listed = || fs::read_dir(&watched).unwrap().count();
    program.adopt(&restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap());
    assert_eq!(program.report(), before);
    assert_eq!(listed(), 0);
    program.kill();
    // The directory leads to root's while CRIU starts: nothing happens there.
    let roots = roots(&program);
    let changed = fs::metadata(&roots).unwrap().modified().unwrap();
    let (moved, to) = (program.directory().join("moved"), roots.display());
    let swap = format!("mv {0} {1} && ln -s {to} {0}", watched.display(), moved.display());
    program.adopt(&restore(&checkpoints, &checkpoint, &criu_after(&checkpoints, &swap)).unwrap());
    assert_eq!(program.report(), before);
    assert_eq!(fs::metadata(&roots).unwrap().modified().unwrap(), changed);
    program.kill();
    let error = restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap_err().to_string();
    assert!(error.contains("a symbolic link now"), "{error}");
    assert_eq!(fs::metadata(&roots).unwrap().modified().unwrap(), changed);
}

/// Unix sockets of each kind. What each gives is reported to a client.
const SOCKETS: &str = "
here = os.getcwd()
os.mkdir('d')
listening = socket.socket(socket.AF_UNIX)
listening.bind(here + '/d/s')
os.chmod('d/s', 0o640)
listening.listen(7)
listening.setblocking(False)
bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
bound.bind('relative')
client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
client.connect('relative')
client.send(b'queued')
gone = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
gone.bind(here + '/gone')
to_gone = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
to_gone.connect(here + '/gone')
os.unlink('gone')
unnamed = socket.socket(socket.AF_UNIX)
unnamed.bind('\\0pagemark-test-%d' % os.getpid())
unnamed.listen(3)
def read():
    try:
        peer, _ = listening.accept()
    except BlockingIOError:
        return ''
    first = bound.recv(99)
    client.send(b'again')
    to_gone.send(b'ghost')
    names = [s.getsockname().replace(here, '') for s in (listening, bound, gone)]
    peer.send(repr([names, first, bound.recv(99), gone.recv(99)]).encode())
    peer.close()
    return ''
";

#[test]
fn sockets_of_a_user_are_bound_by_the_process_itself() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = reporting(SOCKETS) else { return };
    let checkpoint = checkpoints.take(&program, &[]);
    let pid = program.pid();
    program.kill();
    for is_lazy in [false, true] {
        let restoring = checkpoints.restoring(&checkpoint, &checkpoints.criu).lazy(is_lazy);
        program.adopt(&restoring.run(&mut |_| {}).unwrap());
        let path = program.directory().join("d/s");
        let socket = fs::symlink_metadata(&path).unwrap();
        assert_eq!((socket.uid(), socket.gid(), socket.mode() & 0o7777), (USER, USER, 0o640));
        assert!(!program.directory().join("gone").exists());
        let mut client = UnixStream::connect(&path).unwrap();
        let peer = getsockopt(&client, PeerCredentials).unwrap();
        assert_eq!((peer.pid(), peer.uid(), peer.gid()), (pid, USER, USER));
        let mut text = String::new();
        client.read_to_string(&mut text).unwrap();
        assert_eq!(text, "[['/d/s', 'relative', '/gone'], b'queued', b'again', b'ghost']");
        let name = format!("pagemark-test-{pid}");
        use std::os::linux::net::SocketAddrExt;
        let address = std::os::unix::net::SocketAddr::from_abstract_name(name).unwrap();
        let peer = getsockopt(&UnixStream::connect_addr(&address).unwrap(), PeerCredentials).unwrap();
        assert_eq!((peer.pid(), peer.uid()), (pid, USER));
        program.kill();
    }
}

/// A path to its working directory could lead to another one by then.
#[test]
fn a_process_that_binds_a_relative_path_keeps_a_working_directory_that_has_moved() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let set_up = "bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\nbound.bind('relative')\n\
                  os.mkdir('w')\nos.chdir('w')\nhere = os.stat('.').st_ino\n\
                  open_, rename = open, os.rename\n\
                  def open(name, mode):\n    return open_(top + '/' + name, mode)\n\
                  os.rename = lambda a, b: rename(top + '/' + a, top + '/' + b)\n\
                  def read():\n    return str([os.stat('.').st_ino == here, sorted(os.listdir('/proc/self/fd'))[-1]])";
    let Some(mut program) = reporting(&format!("top = os.getcwd()\n{set_up}")) else { return };
    let before = program.report();
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let at = |name: &str| program.directory().join(name).display().to_string();
    let (moved, hidden) = (at("w"), at("hidden"));
    let swap = format!("mkdir {hidden} && mv {moved} {hidden} && chmod 0 {hidden}");
    program.adopt(&restore(&checkpoints, &checkpoint, &criu_after(&checkpoints, &swap)).unwrap());
    assert_eq!(program.report(), before);
}

#[test]
fn a_socket_of_root_is_not_replaced() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = reporting(SOCKETS) else { return };
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let roots = roots(&program);
    let daemon = UnixListener::bind(roots.join("s")).unwrap();
    let before = fs::symlink_metadata(roots.join("s")).unwrap();
    let (path, moved) = (program.directory().join("d"), program.directory().join("moved"));
    let swap = format!("mv {0} {1} && ln -s {2} {0}", path.display(), moved.display(), roots.display());
    let error = restore(&checkpoints, &checkpoint, &criu_after(&checkpoints, &swap)).unwrap_err().to_string();
    assert!(error.contains("d/s") && error.contains("of user 65534, cannot put back"), "{error}");
    // It leads there from the begin.
    let error = restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap_err().to_string();
    assert!(error.contains("a symbolic link now"), "{error}");
    let after = fs::symlink_metadata(roots.join("s")).unwrap();
    assert_eq!((after.ino(), after.mode(), after.uid()), (before.ino(), before.mode(), before.uid()));
    drop(UnixStream::connect(roots.join("s")).unwrap());
    drop(daemon);
}

#[test]
fn a_file_that_waits_in_the_queue_of_a_socket_is_not_swapped() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = reporting(
        "os.mkdir('sub')\nopen('sub/secret', 'w').write('MINE..')\nos.chmod('sub/secret', 0o600)\n\
         a, b = socket.socketpair()\nfile = os.open('sub/secret', os.O_RDONLY)\nsocket.send_fds(a, [b'x'], [file])\n\
         os.close(file)\ntext = ''\ndef read():\n    global text\n    \
             if not text and os.path.exists('receive'):\n        \
                 text = os.read(socket.recv_fds(b, 9, 2)[1][0], 99).decode()\n    return text",
    ) else {
        return;
    };
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let (roots, sub) = (roots(&program), program.directory().join("sub"));
    let moved = program.directory().join("moved");
    let swap = format!("mv {0} {1} && ln -s {2} {0}", sub.display(), moved.display(), roots.display());
    let restore = |criu: &Criu| checkpoints.restoring(&checkpoint, criu).root_peers(true).run(&mut |_| {});
    program.adopt(&restore(&criu_after(&checkpoints, &swap)).unwrap());
    fs::write(program.directory().join("receive"), "").unwrap();
    wait_until("the file is received", || !program.report().is_empty());
    assert_eq!(program.report(), "MINE..");
    program.kill();
    let error = restore(&checkpoints.criu).unwrap_err().to_string();
    assert!(error.contains("a symbolic link now"), "{error}");
}

/// Unix sockets whose paths lead to something else, or to nothing, and clients that wait.
const ODD_SOCKETS: &str = "
here = os.getcwd()
def bound(path):
    end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    end.bind(path)
    client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    client.connect(path)
    os.unlink(path)
    return end, client
os.makedirs('a/b')
gone, to_gone = bound(here + '/a/b/s')
again, to_again = bound('a/b/s')
os.removedirs('a/b')
replaced, to_replaced = bound(here + '/r')
os.mkfifo('r', 0o600)
fifo = os.open('r', os.O_RDWR)
waiting = []
for name in (here + '/l', '\\0pagemark-waiting-%d' % os.getpid()):
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(name)
    listening.listen(2)
    waiting.append((listening, socket.socket(socket.AF_UNIX)))
    waiting[-1][1].connect(name)
greetings = None
def read():
    global greetings
    if greetings is None and os.path.exists('accept'):
        accepted = [listening.accept()[0] for listening, _ in waiting]
        accepted = [end.send(b'hello') for end in accepted]
        greetings = [client.recv(9) for _, client in waiting]
    for end, text in (to_gone, b'gone'), (to_again, b'again'), (to_replaced, b'replaced'):
        end.send(text)
    os.write(fifo, b'fifo')
    names = [end.getsockname().replace(here, '') for end in (gone, again, replaced)]
    return repr([gone.recv(9), again.recv(9), replaced.recv(9), os.read(fifo, 9), names, greetings])
";

#[test]
fn sockets_that_have_lost_their_paths_and_clients_that_wait_are_put_back() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = reporting(ODD_SOCKETS) else { return };
    let before = program.report();
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let fifo = fs::symlink_metadata(program.directory().join("r")).unwrap().ino();
    program.adopt(&restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap());
    assert_eq!(program.report(), before);
    fs::write(program.directory().join("accept"), "").unwrap();
    wait_until("the clients are accepted", || program.report().contains("hello"));
    assert_eq!(program.report(), before.replace("None", "[b'hello', b'hello']"));
    let names = fs::read_dir(program.directory()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = names.filter(|name| !name.to_str().unwrap().starts_with("out")).collect();
    names.sort();
    assert_eq!(names, ["accept", "l", "r"]);
    assert_eq!(fs::symlink_metadata(program.directory().join("r")).unwrap().ino(), fifo);
}

/// Watches a directory in a file system in memory, where CRIU finds it by its path, and a file
/// without a name.
const WATCHES: &str = "
import ctypes, struct
libc = ctypes.CDLL(None)
IN_ATTRIB, IN_CREATE = 4, 0x100
watched = '/dev/shm/pagemark-watched-%d/w' % os.getpid()
os.makedirs(watched)
file = open('f', 'w')
notify = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(notify, watched.encode(), IN_CREATE) == 1
assert libc.inotify_add_watch(notify, b'f', IN_ATTRIB) == 2
os.unlink('f')
seen = set()
def read():
    os.fchmod(file.fileno(), 0o600)
    events = os.read(notify, 9999)
    while events:
        watch, mask, _, length = struct.unpack_from('iIII', events)
        seen.add((watch, mask, events[16:16 + length].rstrip(b'\\0')))
        events = events[16 + length:]
    return repr(sorted(seen))
";

/// A directory that is removed when dropped.
struct InMemory(PathBuf);

impl Drop for InMemory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn what_a_user_watches_is_watched_again_and_nothing_else() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = reporting(WATCHES) else { return };
    let above = InMemory(format!("/dev/shm/pagemark-watched-{}", program.pid()).into());
    let watched = above.0.join("w");
    let before = program.report();
    assert_eq!(before, "[(2, 4, b'')]");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    program.adopt(&restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap());
    assert_eq!(program.report(), before);
    fs::write(watched.join("new"), "").unwrap();
    wait_until("the new file is seen", || program.report().contains("(1, 256, b'new')"));
    program.kill();
    // The path leads to a private directory of root's while CRIU starts.
    let roots = roots(&program);
    fs::set_permissions(&roots, Permissions::from_mode(0o700)).unwrap();
    let swap = format!("mv {0} {0}.moved && ln -s {1} {0}", watched.display(), roots.display());
    program.adopt(&restore(&checkpoints, &checkpoint, &criu_after(&checkpoints, &swap)).unwrap());
    assert_eq!(program.report(), before);
    fs::write(roots.join("private"), "").unwrap();
    for _ in 0..3 {
        assert_eq!(program.report(), before);
    }
    program.kill();
    // It leads there from the begin, by a link or as it is.
    let refused = || restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap_err().to_string();
    assert!(refused().contains("is a symbolic link now"), "{}", refused());
    fs::remove_file(&watched).unwrap();
    fs::create_dir(&watched).unwrap();
    fs::set_permissions(&watched, Permissions::from_mode(0o700)).unwrap();
    assert!(refused().contains("is a file that user 65534 may not read"), "{}", refused());
    fs::remove_dir(&watched).unwrap();
    assert!(refused().contains("cannot be found"), "{}", refused());
}

#[test]
fn pipes_and_sockets_belong_to_their_user() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = reporting(
        "ends = os.pipe()\nos.fchown(ends[0], -1, os.getgid())\nserver = socket.socket()\n\
         server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\nserver.bind(('127.0.0.1', 0))\n\
         server.listen()\npair = socket.socketpair()\n\
         def read():\n    \
             owner = lambda number: (os.fstat(number).st_uid, os.fstat(number).st_gid)\n    \
             again = os.open('/proc/self/fd/%d' % ends[1], os.O_WRONLY)\n    \
             os.write(again, b'text')\n    os.close(again)\n    second = socket.socket()\n    \
             second.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)\n    \
             second.bind(server.getsockname())\n    second.listen()\n    second.close()\n    \
             return repr([os.read(ends[0], 9)] + [owner(n) for n in (*ends, server.fileno(), pair[0].fileno())])",
    ) else {
        return;
    };
    let before = program.report();
    assert_eq!(before, "[b'text', (65534, 65534), (65534, 65534), (65534, 65534), (65534, 65534)]");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    for is_lazy in [false, true] {
        let restoring = checkpoints.restoring(&checkpoint, &checkpoints.criu).lazy(is_lazy);
        program.adopt(&restoring.run(&mut |_| {}).unwrap());
        assert_eq!(program.report(), before);
        program.kill();
    }
}

#[test]
fn a_control_group_of_a_user_is_not_opened_for_writing_by_root() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(group) = Group::new() else {
        return pagemark_testing::skipped("no control groups of version 2 can be made here");
    };
    let open =
        |mode: &str| format!("file = os.open('{}/cgroup.procs', os.{mode})\ndef read(): return ''", group.0.display());
    for (mode, is_refused) in [("O_WRONLY", true), ("O_RDONLY", false)] {
        let Some(mut program) = reporting(&open(mode)) else { return };
        let checkpoint = checkpoints.take(&program, &[]);
        program.kill();
        match restore(&checkpoints, &checkpoint, &checkpoints.criu) {
            Ok(restored) => {
                program.adopt(&restored);
                assert!(!is_refused, "{mode}");
            }
            Err(error) => assert!(is_refused && error.to_string().contains("controls processes"), "{error}"),
        }
    }
}

/// A control group that user 65534 may use. It is removed when dropped.
struct Group(PathBuf);

impl Group {
    fn new() -> Option<Group> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mount = mounts.lines().find(|line| line.split(' ').nth(2) == Some("cgroup2"))?.split(' ').nth(1)?;
        let group = Group(Path::new(mount).join(format!("pagemark-test-{}", std::process::id())));
        fs::create_dir(&group.0).ok()?;
        chown(group.0.join("cgroup.procs"), Some(USER), Some(USER)).unwrap();
        Some(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

/// Files of each kind that CRIU would open or make by a path.
const IN_CONTAINER: &str = "
import mmap
os.mkdir('sub')
open('sub/f', 'w').write('mine..')
open('sub/m', 'w').write('m' * 4096)
os.mkfifo('sub/p')
file = os.open('sub/f', os.O_RDWR)
held = os.open('sub', os.O_RDONLY)
pipe = os.open('sub/p', os.O_RDWR)
mapped = mmap.mmap(os.open('sub/m', os.O_RDWR), 4096)
gone = os.open('sub/g', os.O_RDWR | os.O_CREAT, 0o640)
os.write(gone, b'ghost')
os.unlink('sub/g')
def read():
    s = os.fstat(gone)
    return repr([os.pread(file, 100, 0), sorted(os.listdir(held)), mapped[:4], os.pread(gone, 9, 0), s.st_nlink, s.st_uid,
        oct(s.st_mode), os.fstat(pipe).st_ino == os.stat('/proc/self/fd/%d' % pipe).st_ino])
";

#[test]
fn a_container_gets_the_files_that_were_looked_up_in_its_mounts() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let text = format!("import os, time\n{IN_CONTAINER}\n{REPORT_AGAIN}");
    let Some(mut program) = Program::of_a_user_in_a_container(&text) else { return };
    wait_until("the program reports", || program.read("out").is_some());
    let before = program.report();
    assert!(before.contains("b'ghost', 0, 65534, '0o100640', True"), "{before}");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let roots = roots(&program);
    for name in ["f", "m"] {
        fs::copy(roots.join("secret"), roots.join(name)).unwrap();
    }
    let changed = || fs::metadata(&roots).unwrap().modified().unwrap();
    let untouched = changed();
    let sub = program.directory().join("sub");
    for (is_swapped, is_lazy) in [(false, false), (true, false), (true, true)] {
        let moved = program.directory().join("moved");
        let swap = format!("mv {0} {1} && ln -s {2} {0}", sub.display(), moved.display(), roots.display());
        let criu = criu_with_mounts(&checkpoints, if is_swapped { &swap } else { "" });
        program.adopt(&checkpoints.restoring(&checkpoint, &criu).lazy(is_lazy).run(&mut |_| {}).unwrap());
        assert_eq!(program.report(), before);
        assert_eq!(sub.is_symlink(), is_swapped);
        // What was mounted for CRIU is gone.
        let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", program.pid())).unwrap();
        assert!(!mounts.contains("/proc/driver"), "{mounts}");
        // Its files are in its own mounts, so that it can be saved again.
        checkpoints.take(&program, &[]);
        program.kill();
        if is_swapped {
            let error = restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap_err().to_string();
            assert!(error.contains("sub") && error.contains("link"), "{error}");
            fs::remove_file(&sub).unwrap();
            fs::rename(&moved, &sub).unwrap();
        }
        assert_eq!(changed(), untouched);
        let text = fs::read_to_string(roots.join("secret")).unwrap();
        assert_eq!(text, "SECRET");
    }
}

/// As runtimes have it: they read the output of a container.
#[test]
fn a_container_whose_output_leads_out_comes_back_with_another() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let text = format!("import os, time\ndef read():\n    return os.readlink('/proc/self/fd/1')\n{REPORT_AGAIN}");
    let (_reader, writer) = std::io::pipe().unwrap();
    let Some(mut program) = Program::of_a_user_in_a_container_with("true", &text, writer.into()) else { return };
    wait_until("the program reports", || program.read("out").is_some());
    assert!(program.report().starts_with("pipe:"), "{}", program.report());
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    program.adopt(&checkpoints.restoring(&checkpoint, &checkpoints.criu).run(&mut |_| {}).unwrap());
    assert_eq!(program.report(), "/dev/null");
}

#[test]
fn sockets_of_a_container_are_bound_by_its_processes() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let text = format!("import os, socket, time\n{SOCKETS}\n{REPORT_AGAIN}");
    let Some(mut program) = Program::of_a_user_in_a_container(&text) else { return };
    wait_until("the program reports", || program.read("out").is_some());
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    program.adopt(&restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap());
    let path = program.directory().join("d/s");
    let socket = fs::symlink_metadata(&path).unwrap();
    assert_eq!((socket.uid(), socket.gid(), socket.mode() & 0o7777), (USER, USER, 0o640));
    let mut text = String::new();
    UnixStream::connect(&path).unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(text, "[['/d/s', 'relative', '/gone'], b'queued', b'again', b'ghost']");
    program.kill();
    let roots = roots(&program);
    let daemon = UnixListener::bind(roots.join("s")).unwrap();
    let before = fs::symlink_metadata(roots.join("s")).unwrap();
    let (path, moved) = (program.directory().join("d"), program.directory().join("moved"));
    let swap = format!("mv {0} {1} && ln -s {2} {0}", path.display(), moved.display(), roots.display());
    let error = restore(&checkpoints, &checkpoint, &criu_with_mounts(&checkpoints, &swap)).unwrap_err().to_string();
    assert!(error.contains("of user 65534, cannot put back"), "{error}");
    let after = fs::symlink_metadata(roots.join("s")).unwrap();
    assert_eq!((after.ino(), after.mode(), after.uid()), (before.ino(), before.mode(), before.uid()));
    drop(UnixStream::connect(roots.join("s")).unwrap());
    drop(daemon);
}

#[test]
fn a_process_connects_itself_with_a_socket_outside() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let text = format!(
        "import os, socket, time\nos.mkdir('o')\nopen('ready', 'w')\n\
         while not os.path.exists('go'):\n    time.sleep(0.01)\n\
         client = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\nclient.connect(os.getcwd() + '/o/out')\n\
         client.setblocking(False)\n\
         def read():\n    try:\n        return str(client.send(b'ping'))\n    except OSError as e:\n        return str(e)\n{REPORT_AGAIN}"
    );
    let Some(mut program) = Program::of_a_user(&text) else { return };
    wait_until("the program waits", || program.read("ready").is_some());
    let path = program.directory().join("o/out");
    let listener = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o666)).unwrap();
    fs::write(program.directory().join("go"), "").unwrap();
    wait_until("the program reports", || program.read("out").is_some());
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    listener.set_nonblocking(true).unwrap();
    let drain = |socket: &std::os::unix::net::UnixDatagram| {
        let mut count = 0;
        while socket.recv(&mut [0; 16]).is_ok() {
            count += 1;
        }
        count
    };
    drain(&listener);
    let restored = restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap();
    assert_eq!(restored.closed_connections, Vec::<String>::new());
    program.adopt(&restored);
    wait_until("the program sends", || drain(&listener) > 0);
    program.kill();
    // The path leads to a socket that is root's alone.
    let roots = roots(&program);
    let of_root = std::os::unix::net::UnixDatagram::bind(roots.join("out")).unwrap();
    fs::set_permissions(roots.join("out"), Permissions::from_mode(0o600)).unwrap();
    of_root.set_nonblocking(true).unwrap();
    fs::rename(program.directory().join("o"), program.directory().join("moved")).unwrap();
    make_link(&roots, &program.directory().join("o"));
    let error = restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap_err().to_string();
    assert!(error.contains("o/out") && error.contains("of user 65534, cannot put back"), "{error}");
    assert_eq!(drain(&of_root), 0);
}

#[test]
fn an_output_that_root_had_opened_is_opened_again() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let text = format!(
        "import os, time\nos.write(1, b'line\\n')\ndef read():\n    return str(os.fstat(1).st_ino)\n{REPORT_AGAIN}"
    );
    let Some(mut program) = Program::of_a_user_with_output_of_root(&text) else { return };
    wait_until("the program reports", || program.read("out").is_some());
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let log = program.directory().join("log");
    program.adopt(&restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap());
    assert_eq!(program.report(), fs::metadata(&log).unwrap().ino().to_string());
    program.kill();
    // Another file of root's, which its user has moved there.
    fs::rename(&log, program.directory().join("moved")).unwrap();
    fs::copy(program.directory().join("moved"), &log).unwrap();
    fs::set_permissions(&log, Permissions::from_mode(0o600)).unwrap();
    let error = restore(&checkpoints, &checkpoint, &checkpoints.criu).unwrap_err().to_string();
    assert!(error.contains("log") && error.contains("user 65534 may not"), "{error}");
}

#[test]
fn a_directory_from_outside_that_the_user_has_exchanged_is_not_mounted() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let line = "setpriv --reuid=65534 --regid=65534 --clear-groups mkdir -p way/sub && mkdir mnt && \
                echo mine > way/sub/f && mount --bind way/sub mnt";
    let text = "def read():\n    return open('mnt/f').read().strip()";
    let text = format!("import os, time\n{text}\n{REPORT_AGAIN}");
    let Some(mut program) = Program::of_a_user_in_a_container_after(line, &text) else { return };
    wait_until("the program reports", || program.read("out").is_some());
    assert_eq!(program.report(), "mine");
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    let directory = program.directory().to_owned();
    let at = |name: &str| directory.join(name);
    let roots = roots(&program);
    fs::create_dir(roots.join("sub")).unwrap();
    fs::write(roots.join("sub/f"), "SECRET").unwrap();
    fs::set_permissions(&roots, Permissions::from_mode(0o700)).unwrap();
    for is_lazy in [false, true] {
        fs::rename(at("way"), at("old")).unwrap();
        make_link(&roots, &at("way"));
        let restoring = || checkpoints.restoring(&checkpoint, &checkpoints.criu).lazy(is_lazy);
        let error = restoring().run(&mut |_| {}).unwrap_err().to_string();
        assert!(error.contains("way/sub") && error.contains("another place"), "{error}");
        fs::remove_file(at("way")).unwrap();
        // Another directory of the user's, which the user may reach, may be there.
        fs::create_dir_all(at("way/sub")).unwrap();
        fs::write(at("way/sub/f"), "other").unwrap();
        chown(at("way"), Some(USER), Some(USER)).unwrap();
        program.adopt(&restoring().run(&mut |_| {}).unwrap());
        assert_eq!(program.report(), "other");
        program.kill();
        fs::remove_dir_all(at("way")).unwrap();
        fs::rename(at("old"), at("way")).unwrap();
        program.adopt(&restoring().run(&mut |_| {}).unwrap());
        assert_eq!(program.report(), "mine");
        program.kill();
    }
}
