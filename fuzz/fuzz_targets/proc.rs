//! The parsers of `/proc` accept any bytes: any user can choose names of programs and files.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark::sys::proc::{Fields, Stat, Status, descriptors, maps, stat};

fuzz_target!(|bytes: &[u8]| {
    let _ = Stat::parse(bytes);
    let _ = stat::state(bytes);
    let _ = Status::parse(bytes.to_vec());
    let _ = Fields::parse(bytes.to_vec()).bytes("VmSwap");
    descriptors::parse_unix_sockets(bytes).for_each(drop);
    for mapping in maps::parse(bytes).unwrap_or_default() {
        assert!(!mapping.range().is_empty());
        let _ = (mapping.permissions(), mapping.is_tracked());
    }
});
