//! Results on stdout.

use std::io::{self, Write};
use std::process;

/// Exit status of a program whose reader has closed the pipe: as a shell reports death by
/// `SIGPIPE`.
const READER_GONE: i32 = 141;

/// Writes `text` to stdout. If the reader has closed it, as `head` does, ends the process with
/// status 141 and no message.
pub fn print(text: &str) {
    let mut out = io::stdout().lock();
    if out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err() {
        process::exit(READER_GONE);
    }
}
