//! The thread that serves Pagemark over a socket.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use pagemark_kvm_log::machine::Refusal;
use pagemark_kvm_log::protocol::{Request, SOCKET, Status, greet, send_reply};
use pagemark_linux::this_process::LastProcess;

use crate::machines::{OwnMachine, current};

/// How long Pagemark may take to read or send the rest of a message.
const PATIENCE: Duration = Duration::from_secs(10);

const STACK_BYTES: usize = 256 << 10;

/// The process that has the thread.
static SERVING: LastProcess = LastProcess::none();

/// Starts the thread, if this process has none and its environment names a socket. Nobody is told
/// of a failure here: Pagemark finds no socket.
pub fn start() {
    let Some(path) = std::env::var_os(SOCKET).filter(|path| !path.is_empty()) else { return };
    if SERVING.set() {
        return;
    }
    let Ok(listener) = listen(&PathBuf::from(path)) else { return };
    // Signals are for the program's own threads.
    let before = block_signals();
    let thread = std::thread::Builder::new().name("pagemark-kvm".to_owned()).stack_size(STACK_BYTES);
    // Without a thread, the listener is closed again.
    let _ = thread.spawn(move || while serve(&listener).is_ok() {});
    // SAFETY: the mask is one that the system has given.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, null_mut()) };
}

fn block_signals() -> libc::sigset_t {
    let mut all = MaybeUninit::uninit();
    let mut before = MaybeUninit::uninit();
    // SAFETY: the sets are written before they are read.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::sigemptyset(before.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

/// Listens on the socket. One that a program has left behind is removed.
fn listen(path: &Path) -> io::Result<UnixListener> {
    UnixListener::bind(path).or_else(|error| {
        if error.kind() != io::ErrorKind::AddrInUse || UnixStream::connect(path).is_ok() {
            return Err(error);
        }
        std::fs::remove_file(path)?;
        UnixListener::bind(path)
    })
}

/// Serves one Pagemark, until it is gone.
///
/// # Errors
/// The socket does not work any more.
fn serve(listener: &UnixListener) -> io::Result<()> {
    let (mut stream, _) = listener.accept()?;
    let mut log = OpenLog(None);
    // An error here is one of the connection, which ends then.
    let _ = stream.set_read_timeout(Some(PATIENCE));
    let _ = stream.set_write_timeout(Some(PATIENCE));
    if greet(&mut stream, Status::Done).is_err() {
        return Ok(());
    }
    loop {
        let [is_new, is_asked] = wait([listener.as_raw_fd(), stream.as_raw_fd()])?;
        if is_new && let Ok((mut other, _)) = listener.accept() {
            let _ = other.set_write_timeout(Some(PATIENCE));
            let _ = greet(&mut other, Status::Busy);
        }
        if !is_asked {
            continue;
        }
        let Ok(request) = Request::receive(&mut stream) else { return Ok(()) };
        let (status, entries) = match log.answer(request) {
            Ok(entries) => (Status::Done, entries),
            Err(status) => (status, Vec::new()),
        };
        if send_reply(&mut stream, status, &entries).is_err() {
            return Ok(());
        }
    }
}

/// The machine whose log is read. Dropped, it is not read any longer.
struct OpenLog(Option<Arc<OwnMachine>>);

impl OpenLog {
    fn answer(&mut self, request: Request) -> Result<Vec<pagemark_kvm_log::machine::Written>, Status> {
        match request {
            Request::Begin => {
                self.close();
                let machine = current().ok_or(Status::NoMachine)?;
                machine.lock().begin(machine.kernel()).map_err(Status::Refused)?;
                self.0 = Some(machine);
                Ok(Vec::new())
            }
            Request::Collect => {
                let machine = self.begun()?;
                machine.lock().collect(machine.kernel()).map_err(Status::Refused)
            }
            Request::KeepViews | Request::ReleaseViews => {
                self.begun()?.lock().keep_views(request == Request::KeepViews);
                Ok(Vec::new())
            }
        }
    }

    fn begun(&self) -> Result<&Arc<OwnMachine>, Status> {
        self.0.as_ref().ok_or(Status::Refused(Refusal::NotBegun))
    }

    fn close(&mut self) {
        if let Some(machine) = self.0.take() {
            machine.lock().end(machine.kernel());
        }
    }
}

impl Drop for OpenLog {
    fn drop(&mut self) {
        self.close();
    }
}

/// Waits until something can be read, and says from which.
fn wait(descriptors: [RawFd; 2]) -> io::Result<[bool; 2]> {
    let mut polled = descriptors.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    loop {
        // SAFETY: the array has two elements.
        let count = unsafe { libc::poll(polled.as_mut_ptr(), 2, -1) };
        if count >= 0 {
            return Ok(polled.map(|polled| polled.revents != 0));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
