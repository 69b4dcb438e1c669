//! The media of removable drives that the machine only reads, and of empty drives.
//!
//! The machine can have another medium than the command line says: it was changed or ejected since.
//! A restored machine is given the one that it had.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::machine::{Machine, text};

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

/// Gives the drives of a machine that was started, and has not run yet, the media that they had.
///
/// # Errors
/// [`ErrorKind::Mismatch`] if an image is missing or QEMU refuses it.
pub(crate) fn put_back(machine: &mut Machine, media: &[Medium]) -> Result<()> {
    if media.is_empty() {
        return Ok(());
    }
    let present = machine.media()?;
    for medium in media.iter().filter(|medium| !present.contains(medium)) {
        let (command, arguments) = match &medium.image {
            None => ("eject", json!({"id": medium.device, "force": true})),
            Some(MediumImage { file, format }) => {
                let change = json!({
                    "id": medium.device, "filename": file, "format": format, "force": true,
                    "read-only-mode": "read-only",
                });
                ("blockdev-change-medium", change)
            }
        };
        machine.monitor.execute(command, arguments).map_err(|error| match error.kind() {
            ErrorKind::Command => {
                let what = medium.image.as_ref().map_or("nothing", |image| &image.file);
                let object = Object::Device(medium.device.clone());
                Error::of(ErrorKind::Mismatch, format!("insert {what}, which it had, into"), object, error)
            }
            _ => error,
        })?;
    }
    Ok(())
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
