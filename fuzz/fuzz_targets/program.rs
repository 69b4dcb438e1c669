//! The ELF files of programs for the machine of a process, and the vDSO.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark_kvm::fuzzing::{elf, vdso};

fuzz_target!(|bytes: &[u8]| {
    elf(bytes);
    vdso(bytes);
    // The header as it must be, so that the fuzzer gets to the program headers.
    if let Some((count, rest)) = bytes.split_first() {
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0\x3e\0\x01\0\0\0".to_vec();
        file.extend([0; 8]);
        file.extend(64_u64.to_le_bytes());
        file.resize(54, 0);
        file.extend(56_u16.to_le_bytes());
        file.extend(u16::from(count % 16).to_le_bytes());
        file.resize(64, 0);
        file.extend(rest);
        elf(&file);
    }
});
