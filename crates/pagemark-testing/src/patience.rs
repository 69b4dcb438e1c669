//! How long a test waits for what must come.

use std::time::{Duration, Instant};

/// True on an emulated machine of the lab, which tells by `$PAGEMARK_LAB`. There everything takes ten times as long.
pub fn is_emulated() -> bool {
    std::env::var_os("PAGEMARK_LAB").is_some()
}

/// Long enough for anything that a test waits for, so that what does not come fails the test instead of keeping it for ever.
pub fn patience() -> Duration {
    Duration::from_secs(if is_emulated() { 1200 } else { 120 })
}

/// Waits until `condition` gives something.
///
/// # Panics
/// If it does not within [`patience`].
#[track_caller]
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience();
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited too long: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits until something is so.
///
/// # Panics
/// If it is not within [`patience`].
#[track_caller]
pub fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    wait_for(what, || is_so().then_some(()));
}
