//! The media of removable drives that the machine only reads, and of empty drives.
//!
//! The machine can have another medium than the command line says: it was changed or ejected since.
//! A restored machine is given the one that it had.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::qemu::command::{Command, text};

/// A removable drive at the checkpoint.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Medium {
    /// The device, by its id or its place in QEMU's tree of objects.
    pub(crate) device: String,
    /// None if the drive was empty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) image: Option<MediumImage>,
}

/// An image that a drive reads.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct MediumImage {
    /// The name of the file, from QEMU's directory.
    pub(crate) file: String,
    /// QEMU's name of the format.
    pub(crate) format: String,
}

/// The drive of an entry of `query-block`; none if it cannot be emptied, or the machine can write
/// to its medium, which is a disk of the checkpoint then.
pub(crate) fn of_block(block: &Value) -> Option<Medium> {
    let is = |value: Option<&Value>| value.and_then(Value::as_bool).unwrap_or(false);
    let device = text(block, "qdev");
    if device.is_empty() || !is(block.get("removable")) {
        return None;
    }
    let Some(inserted) = block.get("inserted") else { return Some(Medium { device, image: None }) };
    let image = inserted.get("image").unwrap_or(&Value::Null);
    let image = MediumImage { file: text(image, "filename"), format: text(image, "format") };
    (is(inserted.get("ro")) && !image.file.is_empty()).then_some(Medium { device, image: Some(image) })
}

impl Medium {
    /// The command that gives the drive this medium.
    pub(crate) fn insert(&self) -> Command {
        match &self.image {
            None => Command::new("eject", json!({"id": self.device, "force": true})),
            Some(MediumImage { file, format }) => {
                let change = json!({
                    "id": self.device, "filename": file, "format": format, "force": true,
                    "read-only-mode": "read-only",
                });
                Command::new("blockdev-change-medium", change)
            }
        }
    }

    /// The name of the image, for messages.
    pub(crate) fn name(&self) -> &str {
        self.image.as_ref().map_or("nothing", |image| &image.file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_drives_whose_medium_is_read_are_remembered() {
        let image = json!({"filename": "a.iso", "format": "raw"});
        let read_only = json!({"ro": true, "image": image});
        let expected = MediumImage { file: "a.iso".into(), format: "raw".into() };
        let of = |removable: bool, inserted: Option<Value>| {
            let mut block = json!({"qdev": "cd0", "removable": removable});
            if let Some(inserted) = inserted {
                block["inserted"] = inserted;
            }
            of_block(&block)
        };
        assert_eq!(of(true, None), Some(Medium { device: "cd0".into(), image: None }));
        assert_eq!(of(true, Some(read_only.clone())), Some(Medium { device: "cd0".into(), image: Some(expected) }));
        assert_eq!(of(false, Some(read_only)), None);
        assert_eq!(of(true, Some(json!({"ro": false, "image": image}))), None);
        assert_eq!(of(true, Some(json!({"ro": true}))), None);
        assert_eq!(of_block(&json!({"removable": true})), None);
        assert_eq!(of_block(&json!(7)), None);
    }
}
