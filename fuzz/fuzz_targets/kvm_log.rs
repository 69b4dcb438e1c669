//! What Pagemark reads from the library in QEMU, which is the process of another user, and what
//! the library reads from Pagemark.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark_kvm_log::protocol::{Request, receive_greeting, receive_reply, send_reply};
use pagemark_kvm_log::views::covers;

fuzz_target!(|bytes: &[u8]| {
    let _ = receive_greeting(&mut &*bytes);
    let _ = Request::receive(&mut &*bytes);
    if let Ok((status, entries)) = receive_reply(&mut &*bytes) {
        let mut again = Vec::new();
        send_reply(&mut again, status, &entries).unwrap();
        assert_eq!(receive_reply(&mut again.as_slice()).unwrap().1.len(), entries.len());
    }
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = covers(text, 0x1000, 0x9000);
    }
});
