//! What QEMU, which may be the process of another user, sends over its monitor.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark_vm::fuzzing::{monitor, monitor_message};

/// What a monitor sends until it is ready.
const READY: &[u8] = b"{\"QMP\":{\"capabilities\":[\"oob\"]}}\n{\"return\":{},\"id\":1}\n";

fuzz_target!(|bytes: &[u8]| {
    let Some((mode, rest)) = bytes.split_first() else { return };
    match mode % 4 {
        0 => monitor(rest),
        1 => monitor(&[READY, rest].concat()),
        _ => {
            if let Ok(message) = serde_json::from_slice(rest) {
                monitor_message(&message, &["-drive".to_owned(), "file=disk.img,format=raw".to_owned()]);
            }
        }
    }
});
