//! How long a test waits for what must come.

use std::time::Duration;

/// True on an emulated machine of the lab, which tells by `$PAGEMARK_LAB`. There everything takes ten times as long.
pub fn is_emulated() -> bool {
    std::env::var_os("PAGEMARK_LAB").is_some()
}

/// Long enough for anything that a test waits for, so that what does not come fails the test instead of keeping it for ever.
pub fn patience() -> Duration {
    Duration::from_secs(if is_emulated() { 1200 } else { 120 })
}
