//! What a parent and its child made by `fork` tell each other until the child can begin: whether it
//! has a machine, and whether the parent has all that the call promises.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use super::child;

/// The child makes its machine.
const MAKING: u32 = 0;
/// The child has its machine, and waits for the parent if it was told to.
const READY: u32 = 1;
/// The child has none. The text says why.
const FAILED: u32 = 2;
/// The child can begin.
const BEGIN: u32 = 3;
/// The child is to end.
const END: u32 = 4;

/// Bytes of the memory that both share.
const BYTES: usize = 4096;
const TEXT_BYTES: usize = BYTES - 2 * size_of::<u32>();

#[repr(C)]
struct Shared {
    state: AtomicU32,
    text_len: AtomicU32,
    text: [u8; TEXT_BYTES],
}

/// Memory that the parent and the child share. It is unmapped in both when this is dropped.
pub struct Birth {
    shared: NonNull<Shared>,
    parent: u32,
}

/// How the making of a child's machine ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Made {
    /// The child waits, or has begun.
    Ready,
    /// The child has ended by itself, and was waited for.
    Failed(String),
    /// Something else has ended the child.
    Ended,
}

impl Birth {
    /// To be made before the `fork`.
    ///
    /// # Errors
    /// There is no memory.
    pub fn new() -> io::Result<Birth> {
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), BYTES, protection, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let shared = NonNull::new(at.cast()).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Birth { shared, parent: std::process::id() })
    }

    fn state(&self) -> &AtomicU32 {
        // SAFETY: the memory is mapped as long as this exists, and zeros are valid. The other side
        // changes the numbers atomically.
        unsafe { &(*self.shared.as_ptr()).state }
    }

    fn set_state(&self, state: u32) {
        self.state().store(state, Ordering::Release);
        // SAFETY: the address says only who sleeps.
        unsafe { libc::syscall(libc::SYS_futex, self.state().as_ptr(), libc::FUTEX_WAKE, libc::c_int::MAX) };
    }

    /// Sleeps while the state is `expected`, for a while.
    fn sleep(&self, expected: u32) {
        let limit = libc::timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        // SAFETY: reads the two values.
        unsafe {
            libc::syscall(libc::SYS_futex, self.state().as_ptr(), libc::FUTEX_WAIT, expected, &raw const limit);
        }
    }

    /// In the parent: waits until the child `id` has a machine, or has none.
    pub fn wait_for_machine(&self, id: u32) -> Made {
        loop {
            match self.state().load(Ordering::Acquire) {
                MAKING if child::has_ended(id) => return Made::Ended,
                MAKING => self.sleep(MAKING),
                FAILED => {
                    child::wait_for(id);
                    return Made::Failed(self.text());
                }
                _ => return Made::Ready,
            }
        }
    }

    /// In the parent: the child that waits begins, or ends and is waited for.
    pub fn decide(&self, id: u32, begins: bool) {
        self.set_state(if begins { BEGIN } else { END });
        if !begins {
            child::wait_for(id);
        }
    }

    /// In the child: it has its machine. If it `waits`, the parent decides whether it begins.
    pub fn has_machine(&self, waits: bool) {
        self.set_state(READY);
        if waits {
            self.wait_for_decision();
        }
    }

    fn wait_for_decision(&self) {
        loop {
            match self.state().load(Ordering::Acquire) {
                BEGIN => return,
                END => child::end(),
                // SAFETY: only asks. A parent that is gone decides nothing.
                _ if unsafe { libc::syscall(libc::SYS_getppid) } as u32 != self.parent => return,
                _ => self.sleep(READY),
            }
        }
    }

    /// In the child: it has no machine, and ends.
    pub fn fail(&self, reason: &str) -> ! {
        let len = reason.len().min(TEXT_BYTES);
        // SAFETY: within the mapping. The parent reads it after the state has changed.
        unsafe {
            let shared = self.shared.as_ptr();
            std::ptr::copy_nonoverlapping(reason.as_ptr(), (&raw mut (*shared).text).cast(), len);
            (*shared).text_len.store(len as u32, Ordering::Relaxed);
        }
        self.set_state(FAILED);
        child::end()
    }

    fn text(&self) -> String {
        let shared = self.shared.as_ptr();
        // SAFETY: the child has written it, and does not any more.
        let text = unsafe {
            let len = ((*shared).text_len.load(Ordering::Relaxed) as usize).min(TEXT_BYTES);
            std::slice::from_raw_parts((&raw const (*shared).text).cast::<u8>(), len)
        };
        String::from_utf8_lossy(text).into_owned()
    }
}

impl Drop for Birth {
    fn drop(&mut self) {
        // SAFETY: the mapping of `new`, which nothing uses any more in this process.
        unsafe { libc::munmap(self.shared.as_ptr().cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child whose memory is a copy.
    fn made(body: impl FnOnce(&Birth)) -> (Birth, u32) {
        let birth = Birth::new().expect("memory");
        let id = child::fork().expect("a child");
        if id == 0 {
            body(&birth);
            child::end();
        }
        (birth, id)
    }

    #[test]
    fn a_parent_learns_how_its_child_began() {
        let (birth, id) = made(|birth| birth.fail("there is no room"));
        assert_eq!(birth.wait_for_machine(id), Made::Failed("there is no room".to_owned()));
        let (birth, id) = made(|_| {});
        assert_eq!(birth.wait_for_machine(id), Made::Ended);
        child::wait_for(id);
        for begins in [true, false] {
            let (birth, id) = made(|birth| birth.has_machine(true));
            assert_eq!(birth.wait_for_machine(id), Made::Ready);
            assert!(!child::has_ended(id));
            birth.decide(id, begins);
            if begins {
                child::wait_for(id);
            }
            assert!(child::has_ended(id), "it was waited for");
        }
    }
}
