//! The stack of signal handlers.

use std::io;

use pagemark_linux::own_memory::Mapping;

/// Bytes for handlers, with room for the largest register state.
const BYTES: usize = 64 << 10;

/// An alternate stack for the signal handlers of this thread. While an actor runs, its stack may be
/// write-protected, so the handler of a write fault could not run on it.
#[derive(Debug)]
pub(crate) struct AlternateStack {
    /// None if the thread has one of somebody else's.
    own: Option<Mapping>,
}

impl AlternateStack {
    /// Sees to it that the thread has one.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn ensure() -> io::Result<AlternateStack> {
        let mut now = none();
        // SAFETY: asks only.
        if unsafe { libc::sigaltstack(std::ptr::null(), &mut now) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if now.ss_flags & libc::SS_DISABLE == 0 {
            return Ok(AlternateStack { own: None });
        }
        let mapping = Mapping::new(BYTES)?;
        let stack = libc::stack_t { ss_sp: mapping.start().as_ptr().cast(), ss_flags: 0, ss_size: BYTES };
        // SAFETY: the memory is ours, and stays until it is no longer the thread's alternate stack.
        if unsafe { libc::sigaltstack(&stack, std::ptr::null_mut()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(AlternateStack { own: Some(mapping) })
    }
}

impl Drop for AlternateStack {
    fn drop(&mut self) {
        if self.own.is_some() {
            // SAFETY: no handler runs on it, since this is not one.
            unsafe { libc::sigaltstack(&none(), std::ptr::null_mut()) };
        }
    }
}

fn none() -> libc::stack_t {
    libc::stack_t { ss_sp: std::ptr::null_mut(), ss_flags: libc::SS_DISABLE, ss_size: 0 }
}
