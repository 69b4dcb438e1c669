//! Results on stdout.

use std::io::{self, Write};
use std::process::{self, ExitCode};

use serde::Serialize;

use crate::failure::{Failure, Outcome};

/// Writes `text`. Ends the process quietly if the reader has gone away, as `head` does.
pub fn print(text: &str) {
    let mut out = io::stdout().lock();
    if out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err() {
        process::exit(141);
    }
}

/// Writes `value` as one JSON document.
pub fn print_json<T: Serialize + ?Sized>(value: &T) -> Outcome {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::new("cannot write JSON", error))?;
    print(&(text + "\n"));
    Ok(ExitCode::SUCCESS)
}
