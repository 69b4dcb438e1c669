//! Blocking signals for a short time.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Blocks all signals of this thread until it is dropped. They are delivered afterwards.
///
/// A thread that keeps fault handlers out needs this: a signal handler on the same thread that
/// wrote to tracked memory would wait for its own thread.
#[derive(Debug)]
pub struct BlockedSignals {
    before: libc::sigset_t,
    /// The mask belongs to the thread.
    stays: PhantomData<*const ()>,
}

impl BlockedSignals {
    /// Blocks them.
    pub fn all() -> BlockedSignals {
        let mut all = MaybeUninit::uninit();
        let mut before = MaybeUninit::uninit();
        // SAFETY: both sets are ours and are filled in by the calls, which can't fail with these
        // arguments.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
            BlockedSignals { before: before.assume_init(), stays: PhantomData }
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        // SAFETY: the set is the one that the kernel gave.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut()) };
    }
}
