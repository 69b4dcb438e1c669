//! A gate between those who record writes, also in signal handlers, and the one who takes what they recorded.

use std::sync::atomic::{AtomicU32, Ordering};

/// Set while the gate is closed, or about to be: nobody enters.
const CLOSED: u32 = 1 << 31;
/// Set while somebody sleeps on the gate.
const AWAITED: u32 = 1 << 30;
/// How many are inside.
const INSIDE: u32 = AWAITED - 1;

/// Lets any number in at once, or shuts all of them out.
///
/// Entering and leaving are async-signal-safe: atomics, and the futex system call. What must not happen is that a thread
/// waits for itself: whoever closes the gate does so with all signals blocked ([`Blocked`](super::signals::Blocked)), and whoever
/// is inside is a signal handler with all signals blocked, or does not wait there.
#[derive(Debug, Default)]
pub struct Gate {
    state: AtomicU32,
}

impl Gate {
    /// Enters; waits while the gate is closed.
    pub fn enter(&self) -> Inside<'_> {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            if state & CLOSED == 0 {
                match self.state.compare_exchange_weak(state, state + 1, Ordering::Acquire, Ordering::Relaxed) {
                    Ok(_) => return Inside { gate: self },
                    Err(now) => state = now,
                }
            } else {
                state = self.sleep(state);
            }
        }
    }

    /// Closes the gate and waits until nobody is inside. One closes it at a time.
    pub fn close(&self) -> Closed<'_> {
        let mut state = self.state.fetch_or(CLOSED, Ordering::Acquire) | CLOSED;
        debug_assert!(state & CLOSED != 0);
        while state & INSIDE != 0 {
            state = self.sleep(state);
        }
        std::sync::atomic::fence(Ordering::Acquire);
        Closed { gate: self }
    }

    /// Sleeps until the state may no longer be the given one, and returns what it is then.
    fn sleep(&self, state: u32) -> u32 {
        let awaited = state | AWAITED;
        if state == awaited || self.state.compare_exchange(state, awaited, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            // Returns at once if the state is another one by now.
            // SAFETY: the futex word is borrowed for the call, which only reads it.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    self.state.as_ptr(),
                    libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG,
                    awaited,
                    std::ptr::null::<libc::timespec>(),
                )
            };
        }
        self.state.load(Ordering::Acquire)
    }

    fn wake(&self) {
        // SAFETY: the kernel uses the address only to find who sleeps on it.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.state.as_ptr(),
                libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG,
                libc::c_int::MAX,
            )
        };
    }
}

/// Somebody is inside as long as this exists.
#[must_use]
#[derive(Debug)]
pub struct Inside<'a> {
    gate: &'a Gate,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let left = self.gate.state.fetch_sub(1, Ordering::Release) - 1;
        // The last one lets the closer go on. Those who want to enter are woken too, and sleep again.
        if left == CLOSED | AWAITED {
            self.gate.wake();
        }
    }
}

/// The gate is closed as long as this exists.
#[must_use]
#[derive(Debug)]
pub struct Closed<'a> {
    gate: &'a Gate,
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let before = self.gate.state.fetch_and(!(CLOSED | AWAITED), Ordering::Release);
        if before & AWAITED != 0 {
            self.gate.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn nobody_is_inside_while_it_is_closed() {
        let gate = Gate::default();
        // Each visitor makes the number odd and even again; whoever closes sees it even.
        let numbers: [AtomicU64; 4] = Default::default();
        std::thread::scope(|scope| {
            let visitors: Vec<_> = numbers
                .iter()
                .map(|number| {
                    let gate = &gate;
                    scope.spawn(move || {
                        for _ in 0..20_000 {
                            let _inside = gate.enter();
                            number.fetch_add(1, Ordering::Relaxed);
                            std::hint::spin_loop();
                            number.fetch_add(1, Ordering::Relaxed);
                        }
                    })
                })
                .collect();
            while visitors.iter().any(|visitor| !visitor.is_finished()) {
                let _closed = gate.close();
                let sum = || numbers.iter().map(|number| number.load(Ordering::Relaxed)).sum::<u64>();
                let before = sum();
                assert!(before.is_multiple_of(2), "somebody is inside");
                std::thread::yield_now();
                assert_eq!(sum(), before, "somebody came in");
            }
        });
        assert_eq!(numbers.each_ref().map(|number| number.load(Ordering::Relaxed)), [40_000; 4]);
        assert_eq!(gate.state.load(Ordering::Relaxed), 0);
    }
}
