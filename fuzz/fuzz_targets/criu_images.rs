//! CRIU's images hold names that the checkpointed programs choose, and a restore changes them.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pagemark_process::fuzzing::{image_file, images};

/// An image file, the number of a field, and messages with the images that they belong to.
type Input<'a> = (&'a [u8], u32, Vec<(u8, &'a [u8])>);

fuzz_target!(|input: Input| {
    let (file, field, messages) = input;
    image_file(file, field % (1 << 29));
    if !messages.is_empty() {
        let directory = tempfile::tempdir().unwrap();
        images(directory.path(), &messages);
    }
});
