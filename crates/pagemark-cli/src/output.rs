//! Results on stdout.

use std::process::ExitCode;

use pagemark_report::escape::printable_json;
pub use pagemark_report::output::print;
use serde::Serialize;

use crate::failure::{Failure, Outcome};

/// Prints `value` as one JSON document.
pub fn print_json<T: Serialize + ?Sized>(value: &T) -> Outcome {
    let text = serde_json::to_string_pretty(value).map_err(|error| Failure::new("cannot write JSON", error))?;
    print(&(printable_json(&text) + "\n"));
    Ok(ExitCode::SUCCESS)
}
