//! Trees that change between the start of CRIU and the freeze, and those that CRIU cannot save.

mod support;

use std::collections::HashSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pagemark::repository::Repository;
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_linux::proc::Process;
use pagemark_process::ErrorKind;
use pagemark_process::criu::{Criu, Dump, DumpOptions};
use pagemark_process::saver::{CriuSaver, StateSaver};
use pagemark_process::target::ProcessTarget;
use pagemark_testing::{assert_oracle_eq, wait_until};
use support::{Checkpoints, Program, REPORT};

/// A CRIU that makes a file `begin` in `directory` before it saves a process, and waits for a file
/// `begun`. It does so once; a second dump fails.
fn criu_that_waits(criu: &Criu, directory: &Path) -> Criu {
    let path = directory.join("criu");
    let [begin, begun] = ["begin", "begun"].map(|name| directory.join(name).display().to_string());
    let script = format!(
        "#!/bin/sh\nif [ \"$1\" = dump ]; then\n[ ! -e '{begin}' ] || exit 1\n: > '{begin}'\n\
         until [ -e '{begun}' ]; do sleep 0.01; done\nfi\nexec '{}' \"$@\"\n",
        criu.path().display()
    );
    pagemark_testing::executable(&path, script.as_bytes());
    Criu::at(&path).unwrap()
}

/// A process with System V shared memory that makes a child when there is a file `begin`. Each
/// counts in this memory. When there is a file `check`, the first process checks that both count
/// and writes `fine` or what is wrong into `checked`.
const FORKING: &str = r#"
#include <signal.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <unistd.h>

int main(void) {
    int id = shmget(IPC_PRIVATE, 65536, 0600), has_child = 0, own = 0;
    volatile long *counts = shmat(id, 0, 0);
    if (counts == (void *)-1 || shmctl(id, IPC_RMID, 0))
        return 1;
    report("ready", "");
    for (;;) {
        counts[own]++;
        if (!own && !has_child && access("begin", F_OK) == 0) {
            has_child = 1;
            if (fork() == 0) {
                own = 1;
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                report("begun", "");
            }
        }
        if (!own && access("check", F_OK) == 0 && access("checked", F_OK)) {
            long other = counts[1];
            for (int tries = 0; tries < 20000 && counts[1] < other + 3; tries++)
                usleep(500);
            report("checked", counts[1] < other + 3 ? "the child is not seen" : "fine");
        }
        usleep(1000);
    }
}
"#;

#[test]
fn a_child_that_was_made_since_criu_was_started_keeps_its_shared_memory() {
    let Some(mut checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = Program::c(&(REPORT.to_owned() + FORKING)) else { return };
    wait_until("the program has its memory", || program.read("ready").is_some());
    checkpoints.criu = criu_that_waits(&checkpoints.criu, program.directory());
    let checkpoint = checkpoints.take(&program, &[]);
    assert_eq!(support::tree(program.pid()).len(), 2);
    program.kill();
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    assert_eq!(support::tree(program.pid()).len(), 2);
    std::fs::write(program.directory().join("check"), "").unwrap();
    wait_until("the program has checked its memory", || program.read("checked").is_some());
    assert_oracle_eq!(program.read("checked").unwrap(), "fine", "what the program has found in its memory");
}

/// A server that accepts a connection and makes a file `begun`. It sends back what it receives, and
/// writes `ended` into a file of that name when the connection ends.
const SERVER: &str = r#"
import os, socket
server = socket.socket(socket.AF_UNIX)
server.bind('socket')
server.listen()
open('ready', 'w').close()
connection, _ = server.accept()
open('begun', 'w').close()
while data := connection.recv(100):
    connection.sendall(data)
with open('making', 'w') as file:
    file.write('ended')
os.rename('making', 'ended')
server.accept()
"#;

#[test]
fn a_connection_from_outside_that_was_made_since_criu_was_started_is_left_out() {
    let Some(mut checkpoints) = Checkpoints::new() else { return };
    let mut program = Program::python(SERVER);
    wait_until("the program listens", || program.read("ready").is_some());
    checkpoints.criu = criu_that_waits(&checkpoints.criu, program.directory());
    let [begin, path] = ["begin", "socket"].map(|name| program.directory().join(name));
    let client = std::thread::spawn(move || {
        wait_until("CRIU is started", || begin.exists());
        UnixStream::connect(path).unwrap()
    });
    let checkpoint = checkpoints.take(&program, &[]);
    let mut client = client.join().unwrap();
    client.write_all(b"here").unwrap();
    let mut answer = [0; 4];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"here", "the checkpoint disturbed a connection");
    program.kill();
    assert_eq!(program.read("ended"), None);
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    wait_until("the restored program notices that the connection has ended", || program.read("ended").is_some());
}

/// A program whose first thread ends, while another counts on.
const WITHOUT_FIRST_THREAD: &str = r#"
#include <pthread.h>
#include <unistd.h>

static void *count(void *first) {
    pthread_join(*(pthread_t *)first, NULL);
    report("ready", "");
    for (;;)
        pause();
}

int main(void) {
    static pthread_t first, other;
    first = pthread_self();
    pthread_create(&other, NULL, count, &first);
    pthread_exit(NULL);
}
"#;

#[test]
fn a_program_whose_first_thread_has_exited_is_refused_with_that_reason() {
    let Some(criu) = support::criu() else { return };
    let Some(mut program) = Program::c(&(REPORT.to_owned() + WITHOUT_FIRST_THREAD)) else { return };
    wait_until("the first thread has exited", || program.read("ready").is_some());
    let saver = CriuSaver::new(criu.clone(), DumpOptions::default());
    let refused = saver.check(Process::find(program.pid()).unwrap()).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::FirstThreadExited);
    assert!(refused.to_string().contains("its first thread has exited"), "{refused}");
    // It may exit when the program is tracked already.
    let refused = saver.freeze(Process::find(program.pid()).unwrap(), &HashSet::new(), &mut |_| Ok(())).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::FirstThreadExited, "{refused}");
    program.kill();
}

#[test]
fn more_pipes_than_criu_saves_are_refused_before_the_program_is_touched() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let text = "import os, resource, signal
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
pipes = [os.pipe() for _ in range(1025)]
open('ready', 'w').close()
signal.pause()
";
    let mut program = Program::python(text);
    wait_until("the program has its pipes", || program.read("ready").is_some());
    let refused = checkpoints.refusal(&program);
    assert!(refused.contains("reads 1025 pipes, and CRIU saves at most 1024"), "{refused}");
    program.kill();
}

/// A program with a child whose output is a pipe. The other end is on its way in a socket until
/// there is a file `begin`; then it becomes the input of another child. That makes a file `read`
/// when it has read, and makes the file again if it is removed.
const PIPELINE: &str = r#"
import os, socket, time
reader, writer = os.pipe()
if os.fork() == 0:
    os.dup2(writer, 1)
    os.closerange(3, 100)
    while True:
        os.write(1, b'x')
        time.sleep(0.01)
one, other = socket.socketpair()
socket.send_fds(one, [b'x'], [reader])
os.close(reader)
os.close(writer)
open('ready', 'w').close()
while not os.path.exists('begin'):
    time.sleep(0.01)
reader = socket.recv_fds(other, 1, 1)[1][0]
if os.fork() == 0:
    os.dup2(reader, 0)
    os.closerange(3, 100)
    open('begun', 'w').close()
    while os.read(0, 1):
        if not os.path.exists('read'):
            open('read', 'w').close()
    os._exit(1)
os.closerange(3, 100)
os.wait()
"#;

#[test]
fn a_pipe_to_a_child_that_was_made_since_criu_was_started_stays_within_the_tree() {
    let Some(mut checkpoints) = Checkpoints::new() else { return };
    let mut program = Program::python(PIPELINE);
    wait_until("the first child runs", || program.read("ready").is_some());
    checkpoints.criu = criu_that_waits(&checkpoints.criu, program.directory());
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    let read = program.directory().join("read");
    let _ = std::fs::remove_file(&read);
    wait_until("the restored child reads what the other writes", || read.exists());
    assert_eq!(support::tree(program.pid()).len(), 3);
}

/// A child that ends with the test.
struct Sleep(i32);

impl Drop for Sleep {
    fn drop(&mut self) {
        let pid = nix::unistd::Pid::from_raw(self.0);
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
        let _ = nix::sys::wait::waitpid(pid, None);
    }
}

/// Starts a process with an id that is free, in a session of its own.
fn sleep_with_id(pid: i32) -> Sleep {
    // SAFETY: zeros are valid for a record of numbers.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.exit_signal = libc::SIGCHLD as u64;
    arguments.set_tid = (&raw const pid) as u64;
    arguments.set_tid_size = 1;
    // SAFETY: as fork: the child makes only system calls, with texts that end with zeros.
    let made = unsafe {
        match libc::syscall(libc::SYS_clone3, &raw const arguments, size_of::<libc::clone_args>()) {
            0 => {
                libc::setsid();
                let words = [c"sleep".as_ptr(), c"1000".as_ptr(), std::ptr::null()];
                libc::execv(c"/bin/sleep".as_ptr(), words.as_ptr());
                libc::_exit(1)
            }
            made => made,
        }
    };
    assert_eq!(made, i64::from(pid), "{}", std::io::Error::last_os_error());
    Sleep(pid)
}

/// A job for the program, of which nothing is taken yet.
fn job_for(program: &Program, checkpoints: &Checkpoints) -> Job<ProcessTarget> {
    let repository = Repository::open_or_create(&checkpoints.directory.path().join("repository")).unwrap();
    let saver = Arc::new(CriuSaver::new(checkpoints.criu.clone(), DumpOptions::default()));
    let target =
        ProcessTarget::attach(Process::find(program.pid()).unwrap(), Mechanism::choose(Scope::Process), saver).unwrap();
    Job::new(target, repository, JobOptions::new("job"))
}

/// Waits until a process that was just made executes its program.
fn wait_for_sleep(pid: i32) {
    wait_until("the later process executes its program", || {
        std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|path| path.ends_with("sleep"))
    });
}

#[test]
fn a_later_process_with_the_id_of_the_target_is_not_saved() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let mut program = Program::counter("", "show(n)\ntime.sleep(0.005)");
    let pid = program.pid();
    let mut job = job_for(&program, &checkpoints);
    program.kill();
    let _later = sleep_with_id(pid);
    wait_for_sleep(pid);
    let error = job.checkpoint().unwrap_err();
    assert!(error.to_string().contains("has exited"), "{error}");
}

#[test]
fn a_target_whose_id_is_taken_while_criu_starts_is_not_waited_for() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let directory = tempfile::tempdir().unwrap();
    let criu = criu_that_waits(&checkpoints.criu, directory.path());
    let mut program = Program::counter("", "show(n)\ntime.sleep(0.005)");
    let pid = program.pid();
    let images = tempfile::tempdir().unwrap();
    let mut dump = Dump::start(&criu, pid, images.path(), &DumpOptions::default()).unwrap();
    wait_until("CRIU is started", || directory.path().join("begin").exists());
    program.kill();
    // Whoever looks all the time sees that it is gone.
    std::thread::sleep(Duration::from_millis(20));
    let later = sleep_with_id(pid);
    wait_for_sleep(pid);
    std::fs::write(directory.path().join("begun"), "").unwrap();
    let error = dump.wait_frozen(Duration::from_secs(5)).unwrap_err();
    assert!(error.to_string().contains("is gone"), "{error}");
    drop(dump);
    wait_until("the later process goes on", || support::tracer(later.0) == 0);
}
