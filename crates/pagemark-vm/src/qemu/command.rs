//! A command of QEMU's monitor, and fields of its replies.

use serde_json::{Value, json};

/// A command of the monitor, with its arguments.
#[derive(Clone, PartialEq, Debug)]
pub struct Command {
    pub(crate) name: &'static str,
    pub(crate) arguments: Value,
}

impl Command {
    pub(crate) fn new(name: &'static str, arguments: Value) -> Command {
        Command { name, arguments }
    }

    /// A command of the human monitor.
    pub(crate) fn of_human(command_line: &str) -> Command {
        Command::new("human-monitor-command", json!({"command-line": command_line}))
    }
}

/// A command as a line, with the id of its reply if it has one.
pub(crate) fn line(name: &str, arguments: &Value, id: Option<Value>) -> String {
    let mut message = json!({"execute": name});
    if let Some(id) = id {
        message["id"] = id;
    }
    // QEMU reads byte by byte, 3 to 5 µs each.
    if arguments.as_object().is_none_or(|arguments| !arguments.is_empty()) {
        message["arguments"] = arguments.clone();
    }
    message.to_string() + "\n"
}

/// A field of a reply that is text; empty if it is missing.
pub fn text(value: &Value, field: &str) -> String {
    value.get(field).and_then(Value::as_str).unwrap_or_default().to_owned()
}
