//! What QEMU reports of a machine without being asked.

use std::fmt;
use std::time::{Duration, SystemTime};

use serde_json::Value;

use crate::qemu::command::text;

/// What happened to a machine.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum MachineEvent {
    /// It was reset.
    Reset,
    /// It was powered off, by the guest or by a user: QEMU ends, unless it was told not to.
    PoweredOff {
        /// True if the guest asked for it.
        is_by_guest: bool,
    },
    /// The guest has crashed, as it reports itself.
    GuestPanicked,
    /// A device was unplugged.
    Unplugged {
        /// The device's id, or its place in QEMU's tree of objects.
        device: String,
    },
    /// The medium of a drive was changed, inserted or ejected.
    MediumMoved {
        /// The device, by its id or place.
        device: String,
    },
    /// A read or write of a disk failed.
    DiskFailed {
        /// The device, by its id or place.
        device: String,
        /// The reason, in QEMU's words.
        reason: String,
    },
}

impl MachineEvent {
    /// Reads a message of QEMU's. None if it tells nothing that concerns checkpoints.
    pub(crate) fn of_message(message: &Value) -> Option<MachineEvent> {
        let data = message.get("data").unwrap_or(&Value::Null);
        let named = |fields: [&str; 2]| fields.map(|field| text(data, field)).into_iter().find(|name| !name.is_empty());
        let device = |fields| named(fields).unwrap_or_default();
        Some(match message.get("event").and_then(Value::as_str)? {
            // Where the event has no reason, an old QEMU sent it.
            "RESET" if text(data, "reason") != "snapshot-load" => MachineEvent::Reset,
            "SHUTDOWN" => {
                MachineEvent::PoweredOff { is_by_guest: data.get("guest").and_then(Value::as_bool).unwrap_or(false) }
            }
            "GUEST_PANICKED" => MachineEvent::GuestPanicked,
            "DEVICE_DELETED" => MachineEvent::Unplugged { device: device(["device", "path"]) },
            "DEVICE_TRAY_MOVED" => MachineEvent::MediumMoved { device: device(["device", "id"]) },
            "BLOCK_IO_ERROR" => {
                MachineEvent::DiskFailed { device: device(["device", "node-name"]), reason: text(data, "reason") }
            }
            _ => return None,
        })
    }
}

/// True if a message of QEMU's says that a stopped machine continues, or has other memory or
/// devices than before.
pub(crate) fn moves_the_machine(message: &Value) -> bool {
    matches!(message.get("event").and_then(Value::as_str), Some("RESUME" | "RESET" | "WAKEUP"))
}

/// When QEMU says that an event happened. None if it does not say so.
pub(crate) fn time(message: &Value) -> Option<SystemTime> {
    let field = |name| message["timestamp"][name].as_u64();
    let since_epoch =
        Duration::from_secs(field("seconds")?).checked_add(Duration::from_micros(field("microseconds")?))?;
    SystemTime::UNIX_EPOCH.checked_add(since_epoch)
}

impl fmt::Display for MachineEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MachineEvent::Reset => write!(f, "the machine was reset"),
            MachineEvent::PoweredOff { is_by_guest: true } => write!(f, "the machine has powered itself off"),
            MachineEvent::PoweredOff { is_by_guest: false } => write!(f, "the machine was powered off"),
            MachineEvent::GuestPanicked => write!(f, "the guest has crashed"),
            MachineEvent::Unplugged { device } => write!(f, "the device {} was unplugged", device.escape_debug()),
            MachineEvent::MediumMoved { device } => {
                write!(f, "the medium of the drive {} was moved", device.escape_debug())
            }
            MachineEvent::DiskFailed { device, reason } => {
                write!(f, "the disk {} has failed: {}", device.escape_debug(), reason.escape_debug())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_concerns_checkpoints_is_read() {
        let read = |name: &str, data| MachineEvent::of_message(&json!({"event": name, "data": data}));
        assert_eq!(read("RESET", json!({"guest": true, "reason": "guest-reset"})), Some(MachineEvent::Reset));
        assert_eq!(read("SHUTDOWN", json!({"guest": true})), Some(MachineEvent::PoweredOff { is_by_guest: true }));
        let unplugged = read("DEVICE_DELETED", json!({"path": "/machine/peripheral/net1"}));
        assert_eq!(unplugged.unwrap().to_string(), "the device /machine/peripheral/net1 was unplugged");
        for other in [read("STOP", json!({})), read("RESET", json!({"reason": "snapshot-load"}))] {
            assert_eq!(other, None);
        }
        assert_eq!(MachineEvent::of_message(&json!({"return": {}})), None);
        assert_eq!(MachineEvent::of_message(&json!({"event": 7})), None);
    }
}
