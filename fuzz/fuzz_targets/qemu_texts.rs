//! Texts that QEMU writes for people, and its command line, which its user chooses.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark_vm::fuzzing::{command_line, texts};

fuzz_target!(|text: &str| {
    texts(text);
    let arguments: Vec<String> = text.split('\n').map(str::to_owned).collect();
    command_line(&arguments);
});
