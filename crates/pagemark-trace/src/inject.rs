//! Makes system calls in another process: creates a userfaultfd for its memory, or replaces
//! mappings.
//!
//! All threads of the process are stopped by ptrace, so that none of them can see the new
//! descriptor or pass it to a child. One of them is made to call `userfaultfd`, the descriptor is
//! copied by `pidfd_getfd`, the thread closes it, and all threads resume as they were. Of the
//! memory of the process, only bytes that no program has are written (`detour.rs`).
//!
//! A helper process in a session of its own does this. If the calling process is killed meanwhile,
//! the helper finishes. If the helper is killed, the thread finds back by itself.

mod detour;
mod leaving;
pub mod memory_copy;
mod parked;
#[cfg(test)]
mod tests;

use std::ffi::{CStr, CString};
use std::io;
use std::mem::MaybeUninit;
use std::ops::{ControlFlow, Range};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStringExt;
use std::time::Instant;

#[cfg(doc)]
use pagemark_kvm_protocol::description;
use pagemark_linux::exit_reports::ExitReports;
use pagemark_linux::helper;
use pagemark_linux::plain_proc::{StatText, each_number, has_exited};
use pagemark_linux::proc::{self, Process, stat};
use pagemark_linux::ptrace;
use pagemark_linux::userfaultfd::FLAGS;

use self::detour::{Detour, Room};
use crate::attach;
use crate::error::{Error, ErrorKind, Object, Result};

/// Limit of the number of threads that the helper can hold.
const MAX_THREADS: usize = 1 << 16;

/// How long the helper waits until the caller has looked at a thread that does not stop.
const LOOK_MS: libc::c_int = 1000;

/// The step at which the helper succeeded or failed, as it reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i32)]
enum Step {
    Done = 0,
    Seize,
    Stop,
    Inspect,
    SystemCall,
    Refused,
    Copy,
    Gone,
    Is32Bit,
    NoRoom,
    Dispatch,
    Threads,
    Busy,
    Device,
}

impl Step {
    const ALL: [Step; 14] = [
        Step::Done,
        Step::Seize,
        Step::Stop,
        Step::Inspect,
        Step::SystemCall,
        Step::Refused,
        Step::Copy,
        Step::Gone,
        Step::Is32Bit,
        Step::NoRoom,
        Step::Dispatch,
        Step::Threads,
        Step::Busy,
        Step::Device,
    ];

    /// The error of a failure at this step in process `pid`.
    fn error(self, pid: i32, errno: libc::c_int) -> Error {
        let cannot = |kind, reason: String, help: &'static str| {
            Error::about(kind, Object::Process(pid), reason).during("cannot track").help(help)
        };
        let system = |operation: &'static str| failed(operation, pid)(io::Error::from_raw_os_error(errno));
        match (self, errno) {
            (Step::Gone, _) | (_, libc::ESRCH) => Error::no_process(pid),
            (Step::Seize, libc::EPERM) => attach::not_permitted(pid),
            (Step::Is32Bit, _) => cannot(ErrorKind::Is32Bit, "a thread runs in 32-bit mode".into(), COMPARE),
            (Step::NoRoom, _) => no_room(pid),
            (Step::Dispatch, _) => cannot(
                ErrorKind::Dispatch,
                "it dispatches system calls to itself (PR_SET_SYSCALL_USER_DISPATCH)".into(),
                COMPARE,
            ),
            (Step::Refused, _) => {
                let help = match errno {
                    libc::EMFILE | libc::ENFILE => {
                        "it has as many files open as it may: raise its limit (prlimit --nofile)"
                    }
                    libc::ENOSYS | libc::EINVAL => "Linux 6.7 or later is needed, or --mechanism compare",
                    _ => COMPARE,
                };
                cannot(ErrorKind::Refused, "userfaultfd in the process".into(), help)
                    .caused_by(io::Error::from_raw_os_error(errno))
            }
            (Step::Busy, _) => busy(pid),
            (Step::Device, _) => {
                Error::about(ErrorKind::NotPermitted, Object::Process(pid), "it could not open /dev/kvm again")
                    .during("cannot take the virtual machine from")
                    .help("a program that gives up its rights, or its root directory, must keep the right to /dev/kvm")
                    .caused_by(io::Error::from_raw_os_error(errno))
            }
            (Step::Seize, _) => system("attaching with ptrace"),
            (Step::Copy, _) => system("copying the descriptor by pidfd_getfd"),
            (Step::Threads, _) => system("listing its threads"),
            // A call by path fails so too, and the process is there.
            (Step::SystemCall, libc::ENOENT) => {
                Error::about(ErrorKind::System, Object::Process(pid), "making a system call in the process")
                    .during("cannot track")
                    .caused_by(io::Error::from_raw_os_error(errno))
            }
            _ => system("making a system call in the process"),
        }
    }
}

/// Help for processes that another mechanism can track.
const COMPARE: &str = "use --mechanism compare";

/// The error of a failed system call while a userfaultfd is created in a process.
fn failed(step: &'static str, pid: i32) -> impl FnOnce(io::Error) -> Error {
    move |source| match source {
        gone if proc::is_gone(&gone) => Error::no_process(pid),
        _ => Error::about(ErrorKind::System, Object::Process(pid), step).during("cannot track").caused_by(source),
    }
}

fn no_room(pid: i32) -> Error {
    let reason = "it has no vDSO, and no free bytes behind the code of a file, where a thread could make a system call";
    Error::about(ErrorKind::NoRoom, Object::Process(pid), reason).during("cannot track").help(COMPARE)
}

/// Limit of the number of threads that are tried because the previous thread has exited meanwhile.
const MAX_TRIES: u32 = 10;

/// Creates a userfaultfd for write-protection of the memory of a process. The process must not
/// be traced.
///
/// # Errors
/// An error whose kind says why not; the process is unchanged and keeps running.
pub fn userfaultfd(process: Process) -> Result<OwnedFd> {
    userfaultfd_with(process, FLAGS)
}

/// Like [`userfaultfd`], with these flags of `userfaultfd(2)`.
///
/// # Errors
/// Those of [`userfaultfd`].
pub fn userfaultfd_with(process: Process, flags: libc::c_int) -> Result<OwnedFd> {
    let made = inject(process, Work::OneThread(ThreadWork::Userfaultfd { flags }))?;
    made.ok_or_else(|| Step::Copy.error(process.pid, libc::EBADF))
}

/// A system call with its arguments.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Call {
    /// The number of the call.
    pub number: i64,
    /// Its arguments; those that it does not have are 0.
    pub arguments: [u64; 6],
}

/// Makes a thread of a process carry out system calls one after the other, while all threads
/// are stopped. The process must not be traced.
///
/// # Errors
/// A call failed: those before it were carried out, the others not. Or an error whose kind says why
/// none was.
pub fn system_calls(process: Process, calls: Vec<Call>) -> Result<()> {
    inject(process, Work::OneThread(ThreadWork::Calls(calls))).map(drop)
}

/// Like [`system_calls`], by this thread of the process.
///
/// # Errors
/// Those of [`system_calls`].
pub fn system_calls_of_thread(process: Process, thread: i32, calls: Vec<Call>) -> Result<()> {
    inject_by(process.pid, thread, Work::OneThread(ThreadWork::Calls(calls)), &mut Step::Seize).map(drop)
}

/// Makes a process that runs in a machine of `pagemark-kvm` give up what it has of KVM; see
/// [`description`]. The process must not be traced. `parker` is the id that this process has there.
///
/// # Errors
/// [`ErrorKind::Busy`]: its threads use KVM at this moment, and it is unchanged. Another error says
/// why it could not be done; the process goes on in any case.
pub fn park(process: Process, parker: Option<i32>) -> Result<()> {
    inject(process, Work::OneThread(ThreadWork::Park { parker })).map(drop)
}

/// Has the threads of a process that leaves its machine not wait in calls for the program.
/// `place` is what [`description::Header::blocking_call`] says. The process must not be traced.
///
/// # Errors
/// An error whose kind says why not.
pub fn interrupt_calls(process: Process, place: [u64; 2]) -> Result<()> {
    inject(process, Work::InterruptCalls { place }).map(drop)
}

/// Removes what is left of the monitor in a process whose threads have all left it. The
/// process must not be traced.
///
/// # Errors
/// [`ErrorKind::Busy`]: a thread still is in it, and nothing was removed. Another error says why it
/// could not be done.
pub fn remove_monitor(process: Process, mappings: Vec<Range<u64>>) -> Result<()> {
    inject(process, Work::OneThread(ThreadWork::Remove(mappings))).map(drop)
}

/// Removes mappings of code that the threads of a process execute no more. The process must not
/// be traced.
///
/// # Errors
/// [`ErrorKind::Busy`]: a thread still is in it, and nothing was removed. Another error says why it
/// could not be done.
pub fn unmap_code(process: Process, mappings: Vec<Range<u64>>) -> Result<()> {
    inject(process, Work::OneThread(ThreadWork::Unmap(mappings))).map(drop)
}

/// The error of a process that cannot give up its machine at this moment.
pub fn busy(pid: i32) -> Error {
    let reason = "changes its virtual machine, starts a program in one, or waits for a child made by vfork";
    Error::about(ErrorKind::Busy, Object::Process(pid), reason)
}

/// What is done while all threads of the process are stopped.
#[derive(Clone)]
enum Work {
    /// One of them is made to carry out system calls.
    OneThread(ThreadWork),
    /// Those that wait in calls for the program are made not to. `place` is what
    /// [`description::Header::blocking_call`] says.
    InterruptCalls { place: [u64; 2] },
}

/// What a thread is made to do.
#[derive(Clone)]
enum ThreadWork {
    /// To create a userfaultfd, which is copied.
    Userfaultfd { flags: libc::c_int },
    /// To carry out calls.
    Calls(Vec<Call>),
    /// To give up what its process has of KVM.
    Park { parker: Option<i32> },
    /// To remove these mappings, which are all that is left of the monitor.
    Remove(Vec<Range<u64>>),
    /// To remove these mappings.
    Unmap(Vec<Range<u64>>),
}

/// Does `work` by system calls of a thread of the process. If that has exited, and nothing was done
/// or the work can be done twice, it is tried with another.
fn inject(process: Process, work: Work) -> Result<Option<OwnedFd>> {
    let is_repeatable = matches!(work, Work::OneThread(ThreadWork::Userfaultfd { .. }));
    let mut tries = 0;
    loop {
        let thread = process.live_thread().ok_or_else(|| Error::no_process(process.pid))?;
        let mut failed_at = Step::Seize;
        let made = inject_by(process.pid, thread, work.clone(), &mut failed_at);
        tries += 1;
        // Other threads of the process may run.
        let has_exited = made.is_err() && process.live_thread() != Some(thread);
        let can_repeat = is_repeatable || matches!(failed_at, Step::Seize | Step::Gone);
        if !has_exited || !can_repeat || tries == MAX_TRIES {
            return made;
        }
    }
}

/// Does `work` by system calls of the given thread. Returns the descriptor that was copied. The
/// step that failed is in `failed_at`, as it was before if none was begun.
fn inject_by(pid: i32, thread: i32, work: Work, failed_at: &mut Step) -> Result<Option<OwnedFd>> {
    let status = proc::Status::read(thread).map_err(|_| Error::no_process(pid))?;
    let has_filters = status.seccomp_mode != 0;
    let room = Room::find(thread).map_err(failed("reading its code", pid))?;
    let room = room.ok_or_else(|| if proc::exists(pid) { no_room(pid) } else { Error::no_process(pid) })?;
    let (ours, theirs) = socket_pair().map_err(failed("making a socket pair", pid))?;
    let mut task = Task {
        thread,
        work,
        is_leader: thread == pid,
        room,
        options: ptrace::TRACE_SYSGOOD | ptrace::SUSPEND_SECCOMP,
        must_suspend_seccomp: has_filters,
        can_close: status.seccomp_mode != libc::SECCOMP_MODE_STRICT,
        threads_directory: CString::new(proc::path(pid, "task").into_os_string().into_vec())
            .map_err(|_| Error::no_process(pid))?,
        socket: theirs.as_raw_fd(),
        threads: Vec::with_capacity(MAX_THREADS),
        waits_for: thread,
    };
    // SAFETY: the helper makes only system calls.
    let helper = unsafe { helper::start(|| run_helper(&mut task)) };
    let helper = helper.map_err(|error| failed("starting the helper process", pid)(error.into()))?.as_raw();
    drop(theirs);
    let answer = receive(ours.as_raw_fd());
    let late = answer.as_ref().ok().filter(|report| is_late(report.step, report.errno));
    let late = late.map(|report| attach::does_not_stop(pid, report.waits_for));
    drop(ours);
    // SAFETY: no status is requested. The helper ends by itself, soon; where children are reaped
    // automatically, the call fails at once.
    while unsafe { libc::waitpid(helper, std::ptr::null_mut(), 0) } < 0 && ptrace::errno() == libc::EINTR {}
    let Report { step, errno, descriptor, .. } =
        answer.map_err(failed("receiving the report of the helper process", pid))?;
    *failed_at = step;
    if let Some(late) = late {
        return Err(late);
    }
    match (step, descriptor) {
        (Step::Done, descriptor) => Ok(descriptor),
        (Step::Seize, _) if errno == libc::EPERM && has_filters && can_trace_without_suspending(thread) => {
            Err(Error::about(
                ErrorKind::Seccomp,
                Object::Process(pid),
                "its seccomp filter can only be suspended with CAP_SYS_ADMIN",
            )
            .during("cannot track")
            .help("run pagemark as root, or use --mechanism compare"))
        }
        (step, _) => Err(step.error(pid, errno)),
    }
}

/// True if a thread did not stop in time.
fn is_late(step: Step, errno: libc::c_int) -> bool {
    step == Step::Stop && errno == libc::ETIMEDOUT
}

/// True if tracing a thread is permitted, so that only the suspension of seccomp was refused.
/// Opening its memory needs the same right as ptrace.
fn can_trace_without_suspending(thread: i32) -> bool {
    proc::open_memory(thread).is_ok()
}

fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut pair = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the kernel writes two descriptors to the array, which lives through the call.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: both descriptors were just made, and nothing else owns them.
    Ok(unsafe { (OwnedFd::from_raw_fd(pair[0]), OwnedFd::from_raw_fd(pair[1])) })
}

/// The helper's report.
struct Report {
    /// The step at which it failed, or [`Step::Done`].
    step: Step,
    errno: libc::c_int,
    /// The thread for which it waited last.
    waits_for: i32,
    /// What was copied.
    descriptor: Option<OwnedFd>,
}

/// Receives the helper's report. Fails if the helper was killed before it reported.
fn receive(socket: RawFd) -> io::Result<Report> {
    let mut report = [0i32; 3];
    let mut vector = libc::iovec { iov_base: report.as_mut_ptr().cast(), iov_len: size_of_val(&report) };
    let mut control = Control::new();
    let received = loop {
        let mut message = control.message(&mut vector);
        // SAFETY: the message points to a vector over `report` and to the control buffer, which all live
        // through the call.
        let received = unsafe { libc::recvmsg(socket, &mut message, libc::MSG_CMSG_CLOEXEC) };
        if received >= 0 || ptrace::errno() != libc::EINTR {
            break (received, message.msg_controllen);
        }
    };
    let descriptor = control.descriptor(received.1);
    match received.0 {
        0 => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it was killed")),
        length if length < 0 => Err(io::Error::last_os_error()),
        _ => {
            let step = Step::ALL.into_iter().find(|&step| step as i32 == report[0]).unwrap_or(Step::Inspect);
            Ok(Report { step, errno: report[1], waits_for: report[2], descriptor })
        }
    }
}

/// A control buffer with room for one descriptor.
#[repr(C, align(8))]
struct Control {
    header: libc::cmsghdr,
    descriptor: RawFd,
    padding: i32,
}

impl Control {
    fn new() -> Self {
        let length = size_of::<libc::cmsghdr>() + size_of::<RawFd>();
        // SAFETY: the header consists of numbers, for which zeros are valid.
        let mut header: libc::cmsghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        header.cmsg_len = length;
        header.cmsg_level = libc::SOL_SOCKET;
        header.cmsg_type = libc::SCM_RIGHTS;
        Control { header, descriptor: -1, padding: 0 }
    }

    fn message(&mut self, vector: &mut libc::iovec) -> libc::msghdr {
        // SAFETY: the structure consists of numbers and pointers, for which zeros are valid.
        let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
        message.msg_iov = vector;
        message.msg_iovlen = 1;
        message.msg_control = std::ptr::from_mut(self).cast();
        message.msg_controllen = size_of::<Control>();
        message
    }

    /// The descriptor that was received, given how much of the buffer the kernel filled.
    fn descriptor(&self, filled: usize) -> Option<OwnedFd> {
        let is_there = filled >= size_of::<libc::cmsghdr>() + size_of::<RawFd>() && self.descriptor >= 0;
        // SAFETY: the kernel has just made this descriptor for us, and nothing else owns it.
        is_there.then(|| unsafe { OwnedFd::from_raw_fd(self.descriptor) })
    }
}

/// The task of the helper. All memory that the helper needs is allocated before the fork.
struct Task {
    thread: i32,
    work: Work,
    is_leader: bool,
    /// Where the thread makes the calls.
    room: Room,
    options: usize,
    /// True if the process is known to have seccomp filters.
    must_suspend_seccomp: bool,
    /// Seccomp lets the process close descriptors, unless a filter is very odd.
    can_close: bool,
    threads_directory: CString,
    socket: RawFd,
    /// The stopped threads; the first makes the system calls.
    threads: Vec<i32>,
    /// The thread that was last to stop.
    waits_for: i32,
}

/// Has a thread that has stopped make an interrupted call again. At once: if we die, it goes on.
fn prepare(thread: i32) -> Result<(), libc::c_int> {
    let mut registers = ptrace::registers(thread)?;
    if ptrace::restart_interrupted_call(&mut registers, u64::MAX) {
        ptrace::set_registers(thread, &registers)?;
    }
    Ok(())
}

/// The main function of the helper.
fn run_helper(task: &mut Task) -> libc::c_int {
    // SAFETY: this process is the helper alone, and ends by _exit.
    unsafe { helper::detach_from_caller(c"pagemark-inject", [task.socket]) };
    let stopped = match ExitReports::take() {
        Ok(_reports) => stop_threads(task, ptrace::deadline(ptrace::STOP_LIMIT)),
        Err(errno) => Err((Step::Stop, errno as libc::c_int)),
    };
    let result = stopped.and_then(|()| do_work(task));
    let late = matches!(result, Err((step, errno)) if is_late(step, errno));
    let mut is_sent = false;
    if late {
        // The threads are as they were when one did not stop, until the caller has seen what that one does.
        is_sent = send(task, result);
        let mut end = libc::pollfd { fd: helper::DESCRIPTOR, events: libc::POLLIN, revents: 0 };
        // SAFETY: the kernel writes to the structure, which lives through the call.
        unsafe { libc::poll(&mut end, 1, LOOK_MS) };
    }
    for &thread in &task.threads {
        // One that has been killed is gone.
        let _ = ptrace::detach(thread);
    }
    libc::c_int::from(!(is_sent || send(task, result)))
}

/// Sends the caller the report. False if that failed.
fn send(task: &Task, result: Helped<RawFd>) -> bool {
    let (step, errno, descriptor) = match result {
        Ok(descriptor) => (Step::Done, 0, descriptor),
        Err((step, errno)) => (step, errno, -1),
    };
    let mut report = [step as i32, errno, task.waits_for];
    let mut vector = libc::iovec { iov_base: report.as_mut_ptr().cast(), iov_len: size_of_val(&report) };
    let mut control = Control::new();
    control.descriptor = descriptor;
    let mut message = control.message(&mut vector);
    message.msg_controllen = if descriptor >= 0 { control.header.cmsg_len } else { 0 };
    // SAFETY: the message points to a vector over `report` and to the control buffer, which all live
    // through the call.
    let sent = unsafe { libc::sendmsg(helper::DESCRIPTOR, &message, libc::MSG_NOSIGNAL) };
    sent >= 0
}

/// A step that failed, and the number of the error.
type Helped<T> = Result<T, (Step, libc::c_int)>;

/// Makes a system call in the process.
type MakeCall<'c> = &'c dyn Fn(i64, [u64; 6]) -> Helped<i64>;

/// Stops all threads, until no new thread appears.
fn stop_threads(task: &mut Task, deadline: Instant) -> Helped<()> {
    // The thread that will make the system calls comes first, since tracing it may not be permitted.
    // Seccomp is suspended even if the process has no filter yet: it may install one before the thread
    // stops.
    let mut seized = ptrace::seize(task.thread, task.options);
    if seized == Err(libc::EPERM) && !task.must_suspend_seccomp {
        task.options &= !ptrace::SUSPEND_SECCOMP;
        seized = ptrace::seize(task.thread, task.options);
    }
    seized.map_err(|errno| (Step::Seize, errno))?;
    ptrace::interrupt(task.thread).map_err(|errno| (Step::Seize, errno))?;
    if !ptrace::wait_trap(task.thread, Some(deadline)).map_err(|errno| (Step::Stop, errno))? {
        return Err((Step::Gone, 0));
    }
    prepare(task.thread).map_err(|errno| (Step::Stop, errno))?;
    task.threads.push(task.thread);
    loop {
        let known = task.threads.len();
        each_thread(&task.threads_directory, |directory, thread| {
            if task.threads.contains(&thread) {
                return Ok(());
            }
            if task.threads.len() == MAX_THREADS {
                return Err((Step::Threads, libc::E2BIG));
            }
            // It has to end when the machine is closed.
            if matches!(task.work, Work::OneThread(ThreadWork::Park { .. }))
                && StatText::read(directory, thread).is_ok_and(|stat| stat::is_worker_of_kvm(stat.text()))
            {
                return Ok(());
            }
            match ptrace::seize(thread, task.options) {
                Ok(()) => {}
                Err(libc::ESRCH) => return Ok(()),
                // A main thread that has exited keeps its id until the process ends. A live thread of another tracer,
                // in contrast, may resume at any moment.
                Err(libc::EPERM) if has_exited(directory, thread) => return Ok(()),
                Err(errno) => return Err((Step::Seize, errno)),
            }
            task.waits_for = thread;
            let stopped = ptrace::interrupt(thread).and_then(|()| ptrace::wait_trap(thread, Some(deadline)));
            match stopped.and_then(|is_there| is_there.then(|| prepare(thread)).transpose()) {
                Ok(Some(())) => task.threads.push(thread),
                Ok(None) | Err(libc::ESRCH) => {}
                Err(errno) => return Err((Step::Stop, errno)),
            }
            Ok(())
        })?;
        if task.threads.len() == known {
            return Ok(());
        }
    }
}

/// Calls `each` with the descriptor of a directory and each number in it. Does not allocate, unlike
/// the functions of the C library.
fn each_thread(directory: &CStr, mut each: impl FnMut(BorrowedFd<'_>, i32) -> Helped<()>) -> Helped<()> {
    let visited = each_number(directory, |descriptor, thread| match each(descriptor, thread) {
        Ok(()) => ControlFlow::Continue(()),
        Err(failure) => ControlFlow::Break(failure),
    });
    match visited {
        Ok(ControlFlow::Continue(())) => Ok(()),
        Ok(ControlFlow::Break(failure)) => Err(failure),
        Err(errno) => Err((Step::Threads, errno)),
    }
}

/// Does the work on the stopped threads. Returns the descriptor that was copied, or -1.
fn do_work(task: &Task) -> Helped<RawFd> {
    match &task.work {
        Work::OneThread(work) => {
            let detour = Detour::begin(&task.threads, &task.room)?;
            let copied = carry_out(task, work, &detour);
            detour.end()?;
            copied
        }
        &Work::InterruptCalls { place } => leaving::interrupt_calls(&task.threads, place).map(|()| -1),
    }
}

/// Makes a stopped thread do the work. Returns as [`do_work`].
fn carry_out(task: &Task, work: &ThreadWork, detour: &Detour) -> Helped<RawFd> {
    let call = |number, arguments| detour.call(number, arguments);
    match work {
        ThreadWork::Userfaultfd { flags } => return create_userfaultfd(task, detour, *flags),
        ThreadWork::Calls(calls) => {
            let failed = |result: i64| {
                if result < 0 { Err((Step::SystemCall, result.unsigned_abs() as libc::c_int)) } else { Ok(()) }
            };
            calls.iter().try_for_each(|each| call(each.number, each.arguments).and_then(failed))?;
        }
        ThreadWork::Park { parker } => parked::park(task.thread, *parker, &call)?,
        ThreadWork::Remove(mappings) => leaving::remove(&task.threads, mappings, &task.room, &call)?,
        ThreadWork::Unmap(mappings) => leaving::unmap(&task.threads, mappings, &task.room, &call)?,
    }
    Ok(-1)
}

/// Makes the stopped thread create the descriptor, copies it, and makes the thread close it.
fn create_userfaultfd(task: &Task, detour: &Detour, flags: libc::c_int) -> Helped<RawFd> {
    let arguments = [flags as u64, 0, 0, 0, 0, 0];
    let there = detour.make_descriptor(libc::SYS_userfaultfd, arguments, task.can_close)?;
    if there < 0 {
        return Err((Step::Refused, -there as libc::c_int));
    }
    let copied = copy_descriptor(task, there as RawFd);
    detour.close(there, task.can_close)?;
    copied
}

fn copy_descriptor(task: &Task, descriptor: RawFd) -> Helped<RawFd> {
    // O_EXCL is PIDFD_THREAD (Linux 6.9): it is needed for a thread that is not the main thread.
    let flags = if task.is_leader { 0 } else { libc::O_EXCL };
    // SAFETY: plain system calls with numbers as arguments.
    let copied = unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, task.thread, flags);
        if pidfd < 0 { pidfd } else { libc::syscall(libc::SYS_pidfd_getfd, pidfd, descriptor, 0) }
    };
    if copied < 0 { Err((Step::Copy, ptrace::errno())) } else { Ok(copied as RawFd) }
}
