//! Results on stdout, and messages on stderr.

use std::fmt;
use std::io::{self, Write};
use std::process;

use crate::escape::{printable, printable_lines};

/// Exit status of a program whose reader has closed the pipe: as a shell reports death by
/// `SIGPIPE`.
const READER_GONE: i32 = 141;

/// Writes `text` to stdout, with the characters escaped that would steer a terminal. If the reader
/// has closed it, as `head` does, ends the process with status 141 and no message; if it cannot be
/// written, as on a full disk, with 1.
pub fn print(text: &str) {
    let mut out = io::stdout().lock();
    match out.write_all(printable_lines(text).as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => process::exit(READER_GONE),
        Err(error) => {
            crate::message!("cannot write the results: {error}");
            process::exit(1);
        }
    }
}

/// Writes a line to stderr. Whatever the message contains, such as the name of a file, it is one
/// line and does not steer the terminal: all messages go through here. Where that fails, the line
/// is lost, and the program goes on: a full disk or a closed pipe must not end what it only reports
/// ([`message!`](crate::message)).
pub fn write_message(message: fmt::Arguments<'_>) {
    // One call of the kernel, so that lines of several processes are not mixed.
    let _ = io::stderr().lock().write_all((printable(&message.to_string()) + "\n").as_bytes());
}

/// Writes a line to stderr, with the arguments of `format!`. Unlike `eprintln!` it does not panic
/// where that fails.
///
/// ```
/// pagemark_report::message!("pagemark: {} files are kept", 3);
/// ```
#[macro_export]
macro_rules! message {
    ($($argument:tt)*) => {
        $crate::output::write_message(format_args!($($argument)*))
    };
}
