//! How long a test waits for what must come.

use std::time::Duration;

/// Long enough for anything that a test waits for, so that what does not come fails the test instead of keeping it for ever. An
/// emulated machine of the lab, which tells by `$PAGEMARK_LAB`, takes ten times as long for everything.
pub fn patience() -> Duration {
    let is_emulated = std::env::var_os("PAGEMARK_LAB").is_some();
    Duration::from_secs(if is_emulated { 1200 } else { 120 })
}
