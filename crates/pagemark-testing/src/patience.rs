//! Time limits of tests.

use std::time::{Duration, Instant};

/// True on an emulated machine of the lab, which sets `$PAGEMARK_LAB`. Programs take ten times as
/// long there.
pub fn is_emulated() -> bool {
    std::env::var_os("PAGEMARK_LAB").is_some()
}

/// The time limit of a wait. It is longer than any event that a test waits for takes, so that only
/// a missing event fails the test.
pub fn patience() -> Duration {
    Duration::from_secs(if is_emulated() { 1200 } else { 120 })
}

/// Waits until `condition` returns a value. `event` describes it in the message of a panic.
///
/// # Panics
/// If it returns none within [`patience`].
#[track_caller]
pub fn wait_for<T>(event: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited too long: {event}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until `condition` is true. `event` describes it in the message of a panic.
///
/// # Panics
/// If it is false for longer than [`patience`].
#[track_caller]
pub fn wait_until(event: &str, mut condition: impl FnMut() -> bool) {
    wait_for(event, || condition().then_some(()));
}
