//! Child processes of the monitor.

use std::io;
use std::os::fd::RawFd;

/// Makes a child with a copy of this memory. Returns the child's number, and 0 in the child, which
/// has one thread.
pub fn fork() -> io::Result<u32> {
    // SAFETY: the C library keeps its own state whole; the caller holds the locks of the monitor.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        id => Ok(id as u32),
    }
}

/// Whether the child `id` has ended, without a wait for it: its parent can still do so.
pub fn has_ended(id: u32) -> bool {
    // SAFETY: zeros are a valid value, which the kernel fills.
    let (mut about, flags): (libc::siginfo_t, _) =
        (unsafe { std::mem::zeroed() }, libc::WEXITED | libc::WNOHANG | libc::WNOWAIT | libc::__WALL);
    // SAFETY: fills the value.
    let result = unsafe { libc::waitid(libc::P_PID, id, &mut about, flags) };
    // SAFETY: filled, or zero.
    result != 0 || unsafe { about.si_pid() } != 0
}

/// Waits for the end of the child `id`, of which nobody else learns then.
pub fn wait_for(id: u32) {
    let mut status = 0;
    // SAFETY: fills the value.
    while unsafe { libc::waitpid(id as i32, &mut status, libc::__WALL) } < 0
        && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
    {}
}

/// Ends this child, which has not begun.
pub fn end() -> ! {
    // SAFETY: ends the process; nothing of the monitor outlives it.
    unsafe { libc::syscall(libc::SYS_exit_group, 1) };
    std::process::abort()
}

struct Start<'a, F> {
    body: &'a mut F,
}

extern "C" fn start<F: FnMut()>(argument: *mut libc::c_void) -> libc::c_int {
    // SAFETY: the argument of `sharing_memory`, which waits until this process is done with it.
    let start = unsafe { &mut *argument.cast::<Start<'_, F>>() };
    (start.body)();
    0
}

/// Makes a child that shares this memory and runs `body` on a stack of `stack` bytes of its own.
/// The calling thread waits until the child has executed a program or ended, and both use the same
/// thread-local storage. `exit_signal` is sent when the child ends, unless it is 0. `pidfd` gets a
/// descriptor of the child, if it is to have one. Returns the child's number.
pub fn sharing_memory<F: FnMut()>(
    body: &mut F,
    stack: usize,
    exit_signal: i32,
    pidfd: Option<&mut RawFd>,
) -> io::Result<u32> {
    let mut memory = vec![0u128; stack / 16];
    let mut argument = Start { body };
    let has_pidfd = if pidfd.is_some() { libc::CLONE_PIDFD } else { 0 };
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | has_pidfd | exit_signal;
    let pidfd = pidfd.map_or(std::ptr::null_mut(), std::ptr::from_mut);
    let end = memory.as_mut_ptr_range().end;
    // SAFETY: stack and argument outlive the child's use of them, because this thread waits.
    let id = unsafe { libc::clone(start::<F>, end.cast(), flags, (&raw mut argument).cast(), pidfd) };
    if id < 0 { Err(io::Error::last_os_error()) } else { Ok(id as u32) }
}
