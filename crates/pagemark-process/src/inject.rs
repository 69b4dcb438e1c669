//! Makes a userfaultfd inside another process, and takes it out.
//!
//! The process is stopped by ptrace, with all its threads, so that none of them can see the new descriptor or inherit it to a
//! child. One of them makes the system call `userfaultfd`, the descriptor is copied by `pidfd_getfd`, the thread closes
//! it, and all run on as they were. No memory of the process is written.
//!
//! This is done by a helper process in a session of its own: should this process be killed meanwhile, the helper
//! finishes, and the target is never left with foreign registers.

use std::ffi::CString;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use pagemark::sys::userfaultfd::FLAGS;

use crate::mappings;
use crate::proc;
use crate::ptrace::{self, Registers, Stop, Until};

/// How long the target's threads are given to stop.
const PATIENCE: Duration = Duration::from_secs(10);

/// Threads of a process that the helper can hold at once.
const MOST_THREADS: usize = 1 << 16;

/// How often a thread is let go because it stopped within a restartable sequence.
const SEQUENCE_TRIES: u32 = 100;

/// A userfaultfd could not be had.
#[derive(Debug, thiserror::Error)]
pub enum InjectError {
    /// The process has exited, or executed another program meanwhile.
    #[error("the process is gone")]
    Gone,
    /// Ptrace is not allowed.
    #[error("ptrace is not allowed")]
    NotAllowed,
    /// The process runs with seccomp, which can't be suspended without privilege.
    #[error("its seccomp filter can only be suspended with CAP_SYS_ADMIN")]
    Seccomp,
    /// A thread did not stop: it waits in the kernel where nothing interrupts it.
    #[error("a thread did not stop within {} s", PATIENCE.as_secs())]
    DoesNotStop,
    /// A thread runs in 32-bit mode.
    #[error("a thread runs in 32-bit mode")]
    Is32Bit,
    /// No `syscall` instruction was found in its code.
    #[error("there is no syscall instruction in its code")]
    NoInstruction,
    /// The process turns system calls into signals.
    #[error("it dispatches system calls to itself (PR_SET_SYSCALL_USER_DISPATCH)")]
    Dispatch,
    /// The system call failed in the process.
    #[error("userfaultfd in the process: {0}")]
    Refused(io::Error),
    /// Something else failed.
    #[error("{step}: {source}")]
    System {
        /// What was done.
        step: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// What the helper reports.
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
    Instruction,
    Dispatch,
    Threads,
}

impl Step {
    const ALL: [Step; 12] = [
        Step::Done,
        Step::Seize,
        Step::Stop,
        Step::Inspect,
        Step::SystemCall,
        Step::Refused,
        Step::Copy,
        Step::Gone,
        Step::Is32Bit,
        Step::Instruction,
        Step::Dispatch,
        Step::Threads,
    ];

    fn error(self, errno: libc::c_int) -> InjectError {
        let source = io::Error::from_raw_os_error(errno);
        match (self, errno) {
            (Step::Gone, _) | (_, libc::ESRCH) => InjectError::Gone,
            (_, libc::ETIMEDOUT) => InjectError::DoesNotStop,
            (Step::Seize, libc::EPERM) => InjectError::NotAllowed,
            (Step::Is32Bit, _) => InjectError::Is32Bit,
            (Step::Instruction, _) => InjectError::NoInstruction,
            (Step::Dispatch, _) => InjectError::Dispatch,
            (Step::Refused, _) => InjectError::Refused(source),
            (Step::Seize, _) => InjectError::System { step: "attaching with ptrace", source },
            (Step::Copy, _) => InjectError::System { step: "copying the descriptor by pidfd_getfd", source },
            (Step::Threads, _) => InjectError::System { step: "listing its threads", source },
            _ => InjectError::System { step: "making a system call in the process", source },
        }
    }
}

/// Threads that may exit one after the other while they are made to make it.
const MOST_TRIES: u32 = 10;

/// Makes a userfaultfd in the process `pid` and takes it out. The process must not be traced.
///
/// # Errors
/// [`InjectError`]; the process runs on as it was.
pub fn userfaultfd(pid: i32) -> Result<OwnedFd, InjectError> {
    for _ in 1..MOST_TRIES {
        let thread = proc::live_thread(pid).ok_or(InjectError::Gone)?;
        match userfaultfd_by(pid, thread) {
            // The thread has exited meanwhile, whatever failed because of that: others of the process run.
            Err(_) if proc::live_thread(pid).is_some_and(|now| now != thread) => {}
            made => return made,
        }
    }
    userfaultfd_by(pid, proc::live_thread(pid).ok_or(InjectError::Gone)?)
}

/// As [`userfaultfd`], by calls that this thread of the process makes.
fn userfaultfd_by(pid: i32, thread: i32) -> Result<OwnedFd, InjectError> {
    let system = |step| move |source| InjectError::System { step, source };
    let status = proc::Status::read(thread).map_err(|_| InjectError::Gone)?;
    let has_filters = status.seccomp_mode != 0;
    let (ours, theirs) = socket_pair().map_err(system("making a socket pair"))?;
    let mut order = Order {
        thread,
        is_leader: thread == pid,
        instruction: syscall_instruction(thread)?,
        options: ptrace::TRACE_SYSGOOD | ptrace::SUSPEND_SECCOMP,
        must_suspend_seccomp: has_filters,
        threads_directory: CString::new(format!("/proc/{pid}/task")).map_err(|_| InjectError::Gone)?,
        socket: theirs.as_raw_fd(),
        threads: Vec::with_capacity(MOST_THREADS),
    };
    let helper = fork_helper(&mut order).map_err(system("starting the helper process"))?;
    drop(theirs);
    let answer = receive(ours.as_raw_fd());
    // SAFETY: no status is asked for. The helper ends by itself, soon; where children are reaped automatically there is nothing
    // to wait for.
    while unsafe { libc::waitpid(helper, std::ptr::null_mut(), 0) } < 0 && ptrace::errno() == libc::EINTR {}
    let (step, errno, descriptor) = answer.map_err(system("hearing from the helper process"))?;
    match (step, descriptor) {
        (Step::Done, Some(descriptor)) => Ok(descriptor),
        (Step::Seize, _) if errno == libc::EPERM && has_filters && can_trace_without_suspending(thread) => {
            Err(InjectError::Seccomp)
        }
        (step, _) => Err(step.error(errno)),
    }
}

/// True if only the suspension of seccomp was refused: then its memory may be seen, which needs the same right as ptrace.
fn can_trace_without_suspending(thread: i32) -> bool {
    std::fs::File::open(format!("/proc/{thread}/mem")).is_ok()
}

/// Finds a `syscall` instruction in the vdso or, where that has none, in other code.
fn syscall_instruction(thread: i32) -> Result<u64, InjectError> {
    let system = |step| move |source| InjectError::System { step, source };
    let mut code: Vec<_> = mappings::read(thread)
        .map_err(system("reading its mappings"))?
        .into_iter()
        .filter(|mapping| mapping.executable && mapping.readable && mapping.name != b"[vsyscall]")
        .collect();
    if code.is_empty() {
        return Err(InjectError::Gone);
    }
    code.sort_by_key(|mapping| mapping.name != b"[vdso]");
    let memory = pagemark::sys::memory::Memory::open(thread).map_err(system("opening its memory"))?;
    for mapping in code {
        let mut start = mapping.start;
        while start < mapping.end {
            let end = mapping.end.min(start + (1 << 20));
            let mut bytes = vec![0; (end - start) as usize];
            memory.read(std::slice::from_ref(&(start..end)), &mut bytes).map_err(system("reading its code"))?;
            if let Some(offset) = bytes.windows(2).position(|pair| pair == [0x0f, 0x05]) {
                return Ok(start + offset as u64);
            }
            start = end;
        }
    }
    Err(InjectError::NoInstruction)
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

/// Receives the helper's report. An error if the helper was killed before it made one.
fn receive(socket: RawFd) -> io::Result<(Step, libc::c_int, Option<OwnedFd>)> {
    let mut report = [0i32; 2];
    let mut vector = libc::iovec { iov_base: report.as_mut_ptr().cast(), iov_len: size_of_val(&report) };
    let mut control = Control::new();
    let received = loop {
        let mut message = control.message(&mut vector);
        // SAFETY: the message points to a vector over `report` and to the control buffer, which all live through the call.
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
            Ok((step, report[1], descriptor))
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

/// What the helper is to do. Everything it needs is allocated before it is forked.
struct Order {
    thread: i32,
    is_leader: bool,
    instruction: u64,
    options: usize,
    /// False if the process has no filters, as far as is known.
    must_suspend_seccomp: bool,
    threads_directory: CString,
    socket: RawFd,
    /// The threads that are held, the first of them the one that makes the calls.
    threads: Vec<i32>,
}

fn fork_helper(order: &mut Order) -> io::Result<libc::pid_t> {
    // SAFETY: zeros are a valid signal set, and the calls fill the sets that they are given.
    let old = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut old);
        old
    };
    // SAFETY: the child calls only functions that are safe after fork in a program with threads: system calls, no
    // allocation, no locks, and it ends by _exit. Signals stay blocked in it, so that no handler runs there.
    let helper = unsafe { libc::fork() };
    if helper == 0 {
        let code = help(order);
        // SAFETY: ends the process at once, without running anything of the parent's.
        unsafe { libc::_exit(code) };
    }
    let error = io::Error::last_os_error();
    // SAFETY: the set was filled above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &old, std::ptr::null_mut()) };
    if helper < 0 { Err(error) } else { Ok(helper) }
}

/// The life of the helper process.
fn help(order: &mut Order) -> libc::c_int {
    /// Where the socket is kept in the helper; everything above is closed.
    const SOCKET: RawFd = 0;
    // SAFETY: plain system calls on this process, which is the helper alone. What it closes belongs to no Rust
    // value that will be used or dropped here: the helper ends by _exit.
    unsafe {
        libc::setsid();
        libc::prctl(libc::PR_SET_NAME, c"pagemark-inject".as_ptr());
        libc::dup2(order.socket, SOCKET);
        libc::syscall(libc::SYS_close_range, SOCKET + 1, libc::c_uint::MAX, 0);
    }
    let deadline = ptrace::deadline(PATIENCE);
    let result = hold(order, deadline).and_then(|()| make(order, deadline));
    for &thread in order.threads.iter() {
        // Those that were held for others' sake alone: as they were, but for calls that the stop has interrupted.
        let _ = let_go(thread);
    }
    let (step, errno, descriptor) = match result {
        Ok(descriptor) => (Step::Done, 0, descriptor),
        Err((step, errno)) => (step, errno, -1),
    };
    let mut report = [step as i32, errno];
    let mut vector = libc::iovec { iov_base: report.as_mut_ptr().cast(), iov_len: size_of_val(&report) };
    let mut control = Control::new();
    control.descriptor = descriptor;
    let mut message = control.message(&mut vector);
    message.msg_controllen = if descriptor >= 0 { control.header.cmsg_len } else { 0 };
    // SAFETY: the message points to a vector over `report` and to the control buffer, which all live through the call.
    let sent = unsafe { libc::sendmsg(SOCKET, &message, libc::MSG_NOSIGNAL) };
    libc::c_int::from(sent < 0)
}

type Helped<T> = Result<T, (Step, libc::c_int)>;

/// Lets a thread go that was not used.
fn let_go(thread: i32) -> Result<(), libc::c_int> {
    let mut registers = ptrace::registers(thread)?;
    if ptrace::make_interrupted_call_again(thread, &mut registers, u64::MAX)? {
        ptrace::set_registers(thread, &registers)?;
    }
    ptrace::detach(thread)
}

/// Stops all threads, until no new one appears.
fn hold(order: &mut Order, deadline: Instant) -> Helped<()> {
    // The one that will make the calls first: whether it may be traced decides.
    // Suspended also if there is no filter yet: there may be one before the thread stops.
    let mut seized = ptrace::seize(order.thread, order.options);
    if seized == Err(libc::EPERM) && !order.must_suspend_seccomp {
        order.options &= !ptrace::SUSPEND_SECCOMP;
        seized = ptrace::seize(order.thread, order.options);
    }
    seized.map_err(|errno| (Step::Seize, errno))?;
    ptrace::interrupt(order.thread).map_err(|errno| (Step::Seize, errno))?;
    if !ptrace::wait_trap(order.thread, deadline).map_err(|errno| (Step::Stop, errno))? {
        return Err((Step::Gone, 0));
    }
    order.threads.push(order.thread);
    loop {
        let known = order.threads.len();
        each_thread(&order.threads_directory, |directory, thread| {
            if order.threads.contains(&thread) {
                return Ok(());
            }
            if order.threads.len() == MOST_THREADS {
                return Err((Step::Threads, libc::E2BIG));
            }
            match ptrace::seize(thread, order.options) {
                Ok(()) => {}
                Err(libc::ESRCH) => return Ok(()),
                // Its number may still be there though it has exited: the main thread's is until the process ends. Another
                // tracer's thread, on the other hand, may run on any moment.
                Err(libc::EPERM) if has_exited(directory, thread) => return Ok(()),
                Err(errno) => return Err((Step::Seize, errno)),
            }
            let stopped = ptrace::interrupt(thread).and_then(|()| ptrace::wait_trap(thread, deadline));
            match stopped {
                Ok(true) => order.threads.push(thread),
                Ok(false) | Err(libc::ESRCH) => {}
                Err(errno) => return Err((Step::Stop, errno)),
            }
            Ok(())
        })?;
        if order.threads.len() == known {
            return Ok(());
        }
    }
}

/// True if a thread is gone from the directory of its process's threads, or is dead there. Does not allocate.
fn has_exited(directory: RawFd, thread: i32) -> bool {
    let mut path = [0u8; 32];
    // Eleven digits at most, and the terminating zero is there.
    if write!(&mut path[..31], "{thread}/stat").is_err() {
        return false;
    }
    // SAFETY: the path is a terminated string that lives through the call.
    let file = unsafe { libc::openat(directory, path.as_ptr().cast(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if file < 0 {
        return ptrace::errno() == libc::ENOENT;
    }
    let mut text = [0u8; 256];
    // SAFETY: the kernel writes at most the buffer's length to it; the descriptor was opened above and is used no more.
    let (length, errno) = unsafe {
        let length = libc::read(file, text.as_mut_ptr().cast(), text.len());
        let errno = ptrace::errno();
        libc::close(file);
        (length, errno)
    };
    let Ok(length) = usize::try_from(length) else { return errno == libc::ESRCH };
    proc::state(&text[..length]).is_some_and(proc::is_dead)
}

/// Calls `each` for the numbers in a directory, with the directory's descriptor. The functions of the C library would
/// allocate.
fn each_thread(directory: &CString, mut each: impl FnMut(RawFd, i32) -> Helped<()>) -> Helped<()> {
    // SAFETY: the path is a terminated string that lives through the call.
    let descriptor = unsafe { libc::open(directory.as_ptr(), libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC) };
    if descriptor < 0 {
        return Err((Step::Threads, ptrace::errno()));
    }
    let mut buffer = [0u8; 4096];
    let result = loop {
        // SAFETY: the kernel writes at most the buffer's length to it.
        let length = unsafe { libc::syscall(libc::SYS_getdents64, descriptor, buffer.as_mut_ptr(), buffer.len()) };
        if length <= 0 {
            break if length < 0 { Err((Step::Threads, ptrace::errno())) } else { Ok(()) };
        }
        // struct linux_dirent64: inode and offset, 8 bytes each; record length, 2; type, 1; name.
        let mut rest = &buffer[..length as usize];
        let mut outcome = Ok(());
        while let Some(&[low, high]) = rest.get(16..18).and_then(|bytes| bytes.first_chunk::<2>()) {
            let record = (u16::from_ne_bytes([low, high]) as usize).clamp(19, rest.len());
            let name = rest[19..record].split(|&byte| byte == 0).next().unwrap_or_default();
            if let Some(thread) = std::str::from_utf8(name).ok().and_then(|name| name.parse().ok()) {
                outcome = each(descriptor, thread);
                if outcome.is_err() {
                    break;
                }
            }
            rest = &rest[record..];
        }
        if outcome.is_err() {
            break outcome;
        }
    };
    // SAFETY: the descriptor was opened above and is used no more.
    unsafe { libc::close(descriptor) };
    result
}

/// Makes the descriptor in the stopped thread, copies it, closes it there.
fn make(order: &Order, deadline: Instant) -> Helped<RawFd> {
    let thread = order.thread;
    let inspect = |errno| (Step::Inspect, errno);
    let mut original = ptrace::registers(thread).map_err(inspect)?;
    for _ in 0..SEQUENCE_TRIES {
        if !ptrace::is_in_restartable_sequence(thread, &original).map_err(inspect)? {
            break;
        }
        // Having been stopped there, it goes on at the sequence's abort handler.
        ptrace::resume(thread, Until::Event, 0).map_err(inspect)?;
        ptrace::interrupt(thread).map_err(inspect)?;
        if !ptrace::wait_trap(thread, deadline).map_err(inspect)? {
            return Err((Step::Gone, 0));
        }
        original = ptrace::registers(thread).map_err(inspect)?;
    }
    if ptrace::is_in_restartable_sequence(thread, &original).map_err(inspect)? {
        return Err((Step::Stop, libc::ETIMEDOUT));
    }
    if original.cs != ptrace::CODE_SEGMENT_64 {
        return Err((Step::Is32Bit, 0));
    }
    if ptrace::dispatches_system_calls(thread) {
        return Err((Step::Dispatch, 0));
    }
    match ptrace::word(thread, order.instruction) {
        Ok(code) if code & 0xffff == 0x050f => {}
        // It has executed another program since, which has something else there, or nothing.
        Ok(_) | Err(libc::EIO | libc::EFAULT) => return Err((Step::Gone, 0)),
        Err(errno) => return Err(inspect(errno)),
    }
    let mask = ptrace::signal_mask(thread).map_err(inspect)?;
    ptrace::make_interrupted_call_again(thread, &mut original, u64::MAX).map_err(inspect)?;

    // Signals wait until the thread is as it was.
    ptrace::set_signal_mask(thread, u64::MAX).map_err(inspect)?;
    let copied = system_call(order, &original, libc::SYS_userfaultfd, FLAGS as u64, deadline).and_then(|there| {
        if there < 0 {
            return Err((Step::Refused, -there as libc::c_int));
        }
        let copied = copy_descriptor(order, there as RawFd);
        // The time for making it may be over, if this process was not let run meanwhile; that for cleaning up begins now.
        system_call(order, &original, libc::SYS_close, there as u64, ptrace::deadline(PATIENCE))?;
        copied
    });
    give_back(thread, &original, mask, ptrace::deadline(PATIENCE)).map_err(|errno| (Step::SystemCall, errno))?;
    copied
}

/// Makes the stopped thread make one system call. It is left at the call's exit.
fn system_call(order: &Order, original: &Registers, number: i64, argument: u64, deadline: Instant) -> Helped<i64> {
    let thread = order.thread;
    let failed = |errno| (Step::SystemCall, errno);
    let registers = Registers {
        rip: order.instruction,
        rax: number as u64,
        // Not in a system call: the kernel does not try to restart one.
        orig_rax: u64::MAX,
        rdi: argument,
        rsi: 0,
        rdx: 0,
        ..*original
    };
    ptrace::set_registers(thread, &registers).map_err(failed)?;
    for _ in ["entry", "exit"] {
        let mut signal = 0;
        loop {
            ptrace::resume(thread, Until::SystemCall, signal).map_err(failed)?;
            signal = match ptrace::wait(thread, deadline).map_err(failed)? {
                Stop::SystemCall => break,
                Stop::Exited => return Err((Step::Gone, 0)),
                // Only SIGSTOP can't be blocked. It takes effect when the thread is let go.
                Stop::Signal(signal) => signal,
                Stop::Trap | Stop::Event => 0,
            };
        }
    }
    Ok(ptrace::registers(thread).map_err(failed)?.rax as i64)
}

/// Makes the thread what it was, and lets it go.
fn give_back(thread: i32, original: &Registers, mask: u64, deadline: Instant) -> Result<(), libc::c_int> {
    ptrace::set_registers(thread, original)?;
    // From a stop of this kind, unlike the exit of a system call, the kernel goes on to restart what was interrupted.
    ptrace::interrupt(thread)?;
    ptrace::resume(thread, Until::Event, 0)?;
    if !ptrace::wait_trap(thread, deadline)? {
        return Err(libc::ESRCH);
    }
    ptrace::set_registers(thread, original)?;
    ptrace::set_signal_mask(thread, mask)
}

fn copy_descriptor(order: &Order, descriptor: RawFd) -> Helped<RawFd> {
    // Of a thread other than the main one, which may have exited: PIDFD_THREAD, Linux 6.9.
    let flags = if order.is_leader { 0 } else { libc::O_EXCL };
    // SAFETY: plain system calls with numbers as arguments.
    let copied = unsafe {
        let pidfd = libc::syscall(libc::SYS_pidfd_open, order.thread, flags);
        if pidfd < 0 { pidfd } else { libc::syscall(libc::SYS_pidfd_getfd, pidfd, descriptor, 0) }
    };
    if copied < 0 { Err((Step::Copy, ptrace::errno())) } else { Ok(copied as RawFd) }
}
