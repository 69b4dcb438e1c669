//! A lock that says who holds it.
//!
//! A child made by `vfork` shares the memory, and can be killed while it holds a lock. Its parent,
//! which waits for the child's end, then takes the lock over.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

use pagemark_linux::futex::Futex;

/// Set if a thread may sleep until the lock is free.
const AWAITED: u32 = 1 << 31;

/// A value, and a lock: the number of the thread or child that holds it, or 0.
pub struct OwnedLock<T> {
    owner: Futex,
    value: UnsafeCell<T>,
}

// SAFETY: only the holder of the lock gets to the value, one at a time.
unsafe impl<T: Send> Sync for OwnedLock<T> {}

/// The value, locked.
pub struct Guard<'l, T> {
    lock: &'l OwnedLock<T>,
}

/// The number of the calling thread. A child that shares the memory also shares the C library's
/// notes, so the kernel is asked.
pub fn own_id() -> u32 {
    // SAFETY: only asks.
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

impl<T> OwnedLock<T> {
    /// A lock that nobody holds.
    pub fn new(value: T) -> OwnedLock<T> {
        OwnedLock { owner: Futex::default(), value: UnsafeCell::new(value) }
    }

    /// Waits until nobody else holds the lock.
    pub fn lock(&self) -> Guard<'_, T> {
        let owner = self.owner.number();
        let own = own_id();
        let mut next = own;
        while let Err(held) = owner.compare_exchange(0, next, Ordering::Acquire, Ordering::Relaxed) {
            // Other threads may sleep too, of which the next holder has to know.
            next = own | AWAITED;
            let awaited = held | AWAITED;
            if owner.compare_exchange(held, awaited, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                self.owner.sleep(awaited);
            }
        }
        Guard { lock: self }
    }

    /// In a child made by `fork`, where the calling thread is the only one: nobody holds the lock.
    pub fn release_in_child(&self) {
        self.owner.number().store(0, Ordering::Release);
    }

    /// The value, if `task` holds the lock. That task must have ended.
    pub fn take_over(&self, task: u32) -> Option<Guard<'_, T>> {
        let owner = self.owner.number();
        if owner.load(Ordering::Acquire) & !AWAITED != task {
            return None;
        }
        // Other threads may sleep, or be about to.
        owner.store(own_id() | AWAITED, Ordering::Release);
        Some(Guard { lock: self })
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the guard exists while its thread holds the lock.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as above.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if self.lock.owner.number().swap(0, Ordering::Release) & AWAITED != 0 {
            self.lock.owner.wake_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn one_thread_at_a_time_has_the_value() {
        let lock = Arc::new(OwnedLock::new(0u64));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let lock = lock.clone();
                std::thread::spawn(move || {
                    for _ in 0..5000 {
                        let mut value = lock.lock();
                        let now = *value;
                        std::hint::black_box(now);
                        *value = now + 1;
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
        assert_eq!(*lock.lock(), 20_000);
    }

    #[test]
    fn the_lock_of_a_task_that_ended_is_taken_over() {
        let lock = Arc::new(OwnedLock::new(1));
        assert!(lock.take_over(own_id()).is_none());
        let held = lock.clone();
        let ended = std::thread::spawn(move || {
            std::mem::forget(held.lock());
            own_id()
        });
        let ended = ended.join().expect("no panic");
        let sleeper = {
            let lock = lock.clone();
            std::thread::spawn(move || *lock.lock())
        };
        assert!(lock.take_over(own_id()).is_none());
        *lock.take_over(ended).expect("that thread has locked it") = 2;
        assert_eq!(sleeper.join().expect("no panic"), 2);
        assert_eq!(*lock.lock(), 2);
    }
}
