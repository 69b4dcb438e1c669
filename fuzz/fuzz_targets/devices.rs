//! The state of a machine's devices: QEMU writes it, and the guest chooses much of it.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark_replay::fuzzing::devices;
use pagemark_vm::fuzzing::processors;

fuzz_target!(|input: (&[u8], &[u8])| {
    processors(input.0);
    devices(input.0, input.1);
});
