//! A gate that excludes the recording of writes, which also happens in signal handlers, while the
//! records are taken.

use super::futex::Futex;
use super::sync::atomic::Ordering;

/// Set while the gate is closed or closing: nothing can enter.
const CLOSED: u32 = 1 << 31;
/// Set while a thread sleeps on the gate.
const AWAITED: u32 = 1 << 30;
/// The number of recorders inside.
const INSIDE: u32 = AWAITED - 1;

/// Admits any number of recorders at once, or none.
///
/// Entering and leaving are async-signal-safe: atomics, and the futex system call. A thread must
/// not wait for itself. The gate is therefore closed with all signals blocked
/// ([`BlockedSignals`](super::signals::BlockedSignals)), and code inside is a signal handler with all
/// signals blocked, or does not wait.
#[derive(Debug, Default)]
pub struct Gate {
    state: Futex,
}

impl Gate {
    /// Open and empty.
    #[cfg(not(feature = "loom"))]
    pub const fn new() -> Gate {
        Gate { state: Futex::new() }
    }

    /// Enters, after waiting while the gate is closed.
    pub fn enter(&self) -> Inside<'_> {
        let number = self.state.number();
        let mut state = number.load(Ordering::Relaxed);
        loop {
            if state & CLOSED == 0 {
                match number.compare_exchange_weak(state, state + 1, Ordering::Acquire, Ordering::Relaxed) {
                    Ok(_) => return Inside { gate: self },
                    Err(now) => state = now,
                }
            } else {
                state = self.sleep(state);
            }
        }
    }

    /// Closes the gate and waits until it is empty. Only one thread can close it at a time.
    pub fn close(&self) -> Closed<'_> {
        let mut state = self.state.number().fetch_or(CLOSED, Ordering::Acquire) | CLOSED;
        while state & INSIDE != 0 {
            state = self.sleep(state);
        }
        Closed { gate: self }
    }

    /// Leaves, in place of dropping an [`Inside`] that was forgotten.
    pub fn leave(&self) {
        let left = self.state.number().fetch_sub(1, Ordering::Release) - 1;
        // The last one lets the closer go on. Those who want to enter are woken too, and sleep
        // again.
        if left == CLOSED | AWAITED {
            self.state.wake_all();
        }
    }

    /// Opens, in place of dropping a [`Closed`] that was forgotten.
    pub fn open(&self) {
        let before = self.state.number().fetch_and(!(CLOSED | AWAITED), Ordering::Release);
        if before & AWAITED != 0 {
            self.state.wake_all();
        }
    }

    /// Sleeps until the state may differ from the given one, and returns the state.
    fn sleep(&self, state: u32) -> u32 {
        let number = self.state.number();
        let awaited = state | AWAITED;
        if state == awaited || number.compare_exchange(state, awaited, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            // Returns at once if the state is another one by now.
            self.state.sleep(awaited);
        }
        number.load(Ordering::Acquire)
    }
}

/// A recorder is inside until this is dropped.
#[must_use]
#[derive(Debug)]
pub struct Inside<'a> {
    gate: &'a Gate,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.gate.leave();
    }
}

/// The gate is closed until this is dropped.
#[must_use]
#[derive(Debug)]
pub struct Closed<'a> {
    gate: &'a Gate,
}

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        self.gate.open();
    }
}

#[cfg(all(test, not(feature = "loom")))]
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
        assert_eq!(gate.state.number().load(Ordering::Relaxed), 0);
    }
}

#[cfg(all(test, feature = "loom"))]
mod models {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::sync::model;

    /// What whoever closes writes, and those inside only read. Loom finds out whether one does so
    /// while, or without having seen what, the other does.
    #[derive(Default)]
    struct Guarded {
        gate: Gate,
        number: UnsafeCell<u32>,
    }

    impl Guarded {
        fn read(&self) -> u32 {
            let _inside = self.gate.enter();
            // SAFETY: if the gate is right, nobody writes it now.
            self.number.with(|number| unsafe { *number })
        }

        fn raise(&self) {
            let _closed = self.gate.close();
            // SAFETY: if the gate is right, nobody accesses it now.
            self.number.with_mut(|number| unsafe { *number += 1 });
        }
    }

    fn nobody_is_inside_while_it_is_closed(visitors: usize, times: u32, interruptions: usize) {
        model(interruptions, move || {
            let guarded = Arc::new(Guarded::default());
            let visitors: Vec<_> = (0..visitors)
                .map(|_| {
                    let guarded = guarded.clone();
                    thread::spawn(move || {
                        let seen = guarded.read();
                        assert!(seen <= guarded.read());
                    })
                })
                .collect();
            (0..times).for_each(|_| guarded.raise());
            visitors.into_iter().for_each(|visitor| visitor.join().unwrap());
            assert_eq!(guarded.read(), times);
            assert_eq!(guarded.gate.state.number().load(Ordering::Relaxed), 0);
        });
    }

    #[test]
    fn one_visitor_meets_whoever_closes() {
        nobody_is_inside_while_it_is_closed(1, 2, 4);
    }

    #[test]
    fn two_visitors_meet_whoever_closes() {
        nobody_is_inside_while_it_is_closed(2, 2, 2);
    }
}
