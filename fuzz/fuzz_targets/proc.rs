//! The parsers of `/proc` accept any bytes: any user can choose names of programs and files.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark_linux::proc::{
    Call, Credentials, Fields, Limits, Mount, Stat, Status, control_groups, descriptors, maps, stat,
};

fuzz_target!(|bytes: &[u8]| {
    let _ = Stat::parse(bytes);
    let _ = stat::state(bytes);
    let _ = Status::parse(bytes.to_vec());
    let _ = Fields::parse(bytes.to_vec()).bytes("VmSwap");
    descriptors::parse_unix_sockets(bytes).for_each(drop);
    descriptors::parse_inet_sockets(bytes).for_each(drop);
    let _ = (Call::parse(bytes), Credentials::parse(bytes.to_vec()), Limits::parse(bytes));
    let _ = (Mount::parse(bytes), control_groups::parse(bytes));
    for mapping in maps::parse(bytes).unwrap_or_default() {
        assert!(!mapping.range().is_empty());
        let _ = (mapping.permissions(), mapping.is_tracked());
    }
});
