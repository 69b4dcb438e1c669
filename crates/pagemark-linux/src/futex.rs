//! A number for whose change threads and signal handlers can wait.

use super::sync::atomic::AtomicU32;

/// A number, and the threads that sleep until it changes. All operations are async-signal-safe.
#[derive(Debug, Default)]
pub struct Futex {
    number: AtomicU32,
    #[cfg(feature = "loom")]
    sleepers: model::Sleepers,
}

impl Futex {
    /// 0, and nobody sleeps.
    #[cfg(not(feature = "loom"))]
    pub const fn new() -> Futex {
        Futex { number: AtomicU32::new(0) }
    }

    /// The number.
    pub fn number(&self) -> &AtomicU32 {
        &self.number
    }

    /// Sleeps until the next wake-up, unless the number differs from `expected`. May return early.
    #[cfg(not(feature = "loom"))]
    pub fn sleep(&self, expected: u32) {
        // SAFETY: the futex word is borrowed for the call, which only reads it.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.number.as_ptr(),
                libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                expected,
                std::ptr::null::<libc::timespec>(),
            )
        };
    }

    /// Wakes all sleeping threads.
    #[cfg(not(feature = "loom"))]
    pub fn wake_all(&self) {
        // SAFETY: the kernel uses the address only to find who sleeps on it.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.number.as_ptr(),
                libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
                libc::c_int::MAX,
            )
        };
    }
}

/// What the kernel does: it looks at the number and falls asleep in one step, as seen by those who
/// wake.
#[cfg(feature = "loom")]
mod model {
    use loom::sync::atomic::Ordering;
    use loom::sync::{Condvar, Mutex};

    #[derive(Debug, Default)]
    pub struct Sleepers {
        kernel: Mutex<()>,
        awake: Condvar,
    }

    impl super::Futex {
        /// Sleeps while the number is `expected`, as far as threads of the model can see.
        pub fn sleep(&self, expected: u32) {
            let kernel = self.sleepers.kernel.lock().unwrap();
            if self.number.load(Ordering::Relaxed) == expected {
                drop(self.sleepers.awake.wait(kernel).unwrap());
            }
        }

        /// Wakes all that sleep.
        pub fn wake_all(&self) {
            let _kernel = self.sleepers.kernel.lock().unwrap();
            self.sleepers.awake.notify_all();
        }
    }
}
