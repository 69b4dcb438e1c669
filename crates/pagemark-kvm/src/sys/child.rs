//! Child processes of the monitor.

use std::io;

/// Makes a child with a copy of this memory. Returns the child's number, and 0 in the child, which
/// has one thread.
pub fn fork() -> io::Result<u32> {
    // SAFETY: the C library keeps its own state whole; the caller holds the locks of the monitor.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        id => Ok(id as u32),
    }
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
/// thread-local storage. `exit_signal` is sent when the child ends, unless it is 0. Returns the
/// child's number.
pub fn sharing_memory<F: FnMut()>(body: &mut F, stack: usize, exit_signal: i32) -> io::Result<u32> {
    let mut memory = vec![0u128; stack / 16];
    let mut argument = Start { body };
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | exit_signal;
    let end = memory.as_mut_ptr_range().end;
    // SAFETY: stack and argument outlive the child's use of them, because this thread waits.
    let id = unsafe { libc::clone(start::<F>, end.cast(), flags, (&raw mut argument).cast()) };
    if id < 0 { Err(io::Error::last_os_error()) } else { Ok(id as u32) }
}
