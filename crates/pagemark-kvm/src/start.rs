//! What the monitor passes to itself when the program executes another.

use std::ffi::{CStr, CString};

/// The program that follows begins with `SIGPIPE` ignored.
pub const IGNORE_PIPE: &CStr = c"--exec-ignoring-sigpipe";
/// The program that follows begins with the default action of `SIGPIPE`. Rust's library ignores the
/// signal in each program that it starts.
pub const DEFAULT_PIPE: &CStr = c"--exec";

/// Before names of variables that would concern the monitor's own dynamic linker and C library.
const HIDDEN: &[u8] = b"PAGEMARK_KVM_KEEPS_";

/// An entry of the environment as it is passed through the monitor.
pub fn hidden(entry: &CStr) -> CString {
    let bytes = entry.to_bytes();
    let concerns = [&b"LD_"[..], b"GLIBC_TUNABLES=", b"MALLOC_", b"GCONV_PATH=", b"RUST_"];
    if !concerns.iter().any(|start| bytes.starts_with(start)) {
        return entry.to_owned();
    }
    CString::new([HIDDEN, bytes].concat()).unwrap_or_default()
}

/// The entry as the program gave it.
pub fn shown(entry: CString) -> CString {
    match entry.to_bytes().strip_prefix(HIDDEN) {
        Some(bytes) => CString::new(bytes).unwrap_or_default(),
        None => entry,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_comes_through() {
        for entry in [c"A=b", c"LD_PRELOAD=x", c"LD_=", c"PATH=LD_PRELOAD", c"GLIBC_TUNABLES=a=b"] {
            assert_eq!(shown(hidden(entry)).as_c_str(), entry);
        }
        assert_eq!(hidden(c"LD_PRELOAD=x").as_c_str(), c"PAGEMARK_KVM_KEEPS_LD_PRELOAD=x");
    }
}
