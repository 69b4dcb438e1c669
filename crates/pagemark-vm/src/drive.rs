//! A disk that a machine can write to, as QEMU reports it, and the argument that names its image.

use pagemark::ByteCount;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::command::text;
use crate::command_line::split_options;
use crate::error::{Error, ErrorKind, Object, Result};

/// A disk that the machine can write to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Drive {
    /// A name for people: that of the device, or of the drive.
    pub(crate) label: String,
    /// The device, in QEMU's tree of objects.
    pub(crate) device: String,
    /// QEMU's name for the top of the chain of images.
    pub(crate) node: String,
    /// Length of the disk.
    pub(crate) bytes: ByteCount,
    /// The image that the command line names.
    pub(crate) image: DiskImage,
}

/// The image of a disk, as it is recorded in checkpoints.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct DiskImage {
    /// The label of the disk's space.
    pub(crate) label: String,
    /// The name of the file, as the command line has it.
    pub(crate) file: String,
    /// The format of the file.
    pub(crate) format: ImageFormat,
}

/// Formats of images that a restore can write.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ImageFormat {
    Raw,
    Qcow2,
}

/// The disk of an entry of `query-block`; none if there is no medium, or the machine cannot write
/// to it. `arguments` are those of QEMU.
pub(crate) fn of_block(block: &Value, arguments: &[String]) -> Result<Option<Drive>> {
    let Some(inserted) = block.get("inserted") else { return Ok(None) };
    let is_read_only = inserted.get("ro").and_then(Value::as_bool).unwrap_or(false);
    let (device, name) = (text(block, "qdev"), text(block, "device"));
    // Without a device the machine does not reach it.
    if is_read_only || device.is_empty() {
        return Ok(None);
    }
    let label = match (device.starts_with('/'), name.is_empty()) {
        (false, _) => device.clone(),
        (true, false) => name,
        (true, true) => text(inserted, "node-name"),
    };
    let refused = |reason: String| {
        let error = Error::about(ErrorKind::Unsupported, Object::Disk(label.clone()), reason);
        Err(error.help("attach a disk that needs no checkpoint with readonly=on"))
    };
    if inserted.get("encrypted").and_then(Value::as_bool) == Some(true) {
        return refused("is encrypted: its content would be stored in clear".into());
    }
    let image = inserted.get("image").unwrap_or(&Value::Null);
    let Some(bytes) = image.get("virtual-size").and_then(Value::as_u64) else {
        return refused("has no length that QEMU reports".into());
    };
    // Of a temporary overlay, the command line names the image below.
    let chain = std::iter::successors(Some(image), |image| image.get("backing-image"));
    let named = chain.clone().find(|image| arguments_name(arguments, &text(image, "filename")));
    let Some(named) = named else {
        return refused(format!("has the image {}, which the command line does not name", text(image, "filename")));
    };
    let format = match &*text(named, "format") {
        "raw" | "host_device" => ImageFormat::Raw,
        "qcow2" => ImageFormat::Qcow2,
        other => return refused(format!("has the format {other}; checkpoints hold raw and qcow2")),
    };
    Ok(Some(Drive {
        device: device_of(block),
        node: text(inserted, "node-name"),
        bytes: ByteCount::new(bytes),
        image: DiskImage { label: label.clone(), file: text(named, "filename"), format },
        label,
    }))
}

/// The device of an entry of `query-block`, in QEMU's tree of objects.
pub(crate) fn device_of(block: &Value) -> String {
    let device = text(block, "qdev");
    if device.starts_with('/') { device } else { format!("/machine/peripheral/{device}") }
}

/// True if one of the arguments names the file.
fn arguments_name(arguments: &[String], file: &str) -> bool {
    !file.is_empty() && arguments.iter().any(|argument| names_file(argument, file))
}

/// True if the argument names the file.
pub(crate) fn names_file(argument: &str, file: &str) -> bool {
    with_other_file(argument, file, file).is_some()
}

/// An argument that names a raw image, with the format qcow2. None if it is that of a node for the
/// file alone, whose format another argument has.
pub(crate) fn with_qcow2(argument: &str) -> Option<String> {
    if argument.starts_with('{')
        && let Ok(mut document) = serde_json::from_str::<Value>(argument)
    {
        let driver = document.get_mut("driver").filter(|driver| **driver == "raw")?;
        *driver = "qcow2".into();
        return Some(document.to_string());
    }
    let options = split_options(argument);
    if options.contains(&"driver=file") {
        return None;
    }
    // Without a format, QEMU finds it out.
    let format = |option: &&str| {
        match *option {
            "format=raw" => "format=qcow2",
            "driver=raw" => "driver=qcow2",
            other => other,
        }
        .to_owned()
    };
    Some(options.iter().map(format).collect::<Vec<_>>().join(","))
}

/// An argument of `-drive` that names `file`, for the same disk by `address`, which QEMU reads and
/// writes as it is. None if the file is named in another way.
pub(crate) fn with_served_file(argument: &str, file: &str, address: &str) -> Option<String> {
    let named = format!("file={}", file.replace(',', ",,"));
    let options = split_options(argument);
    if !options.contains(&named.as_str()) {
        return None;
    }
    // A temporary overlay would keep what the machine writes from the disk.
    let dropped = |option: &&&str| {
        ["format=", "driver=", "snapshot=", "file.locking="].iter().any(|name| option.starts_with(name))
    };
    let kept = options.iter().filter(|option| **option != named && !dropped(option)).map(|option| (*option).to_owned());
    let served = [format!("file={}", address.replace(',', ",,")), "format=raw".to_owned()];
    Some(served.into_iter().chain(kept).collect::<Vec<_>>().join(","))
}

/// The argument with another file in place of `file`; none if it does not name that. A file is
/// named by the whole argument (`-hda FILE`), by an option's value (`file=FILE`,
/// `file.filename=FILE`), in which a comma is doubled, or by a value of a JSON object.
pub(crate) fn with_other_file(argument: &str, file: &str, other: &str) -> Option<String> {
    if argument == file {
        return Some(other.to_owned());
    }
    if argument.starts_with('{')
        && let Ok(mut document) = serde_json::from_str::<Value>(argument)
    {
        return replace_value(&mut document, file, other).then(|| document.to_string());
    }
    let (file, other) = (file.replace(',', ",,"), other.replace(',', ",,"));
    let mut is_named = false;
    let options = split_options(argument).into_iter().map(|option| match option.split_once('=') {
        Some((key, value)) if value == file && key.rsplit('.').next().is_some_and(|key| FILE_KEYS.contains(&key)) => {
            is_named = true;
            format!("{key}={other}")
        }
        _ => option.to_owned(),
    });
    let options: Vec<String> = options.collect();
    is_named.then(|| options.join(","))
}

/// The last parts of the names of options that have a file as value.
const FILE_KEYS: [&str; 2] = ["file", "filename"];

/// Replaces the file in a document. Returns true if the document has it.
fn replace_value(value: &mut Value, file: &str, other: &str) -> bool {
    match value {
        Value::Object(members) => {
            let mut is_named = false;
            for (key, value) in members {
                if FILE_KEYS.contains(&&**key) && value == file {
                    *value = other.into();
                    is_named = true;
                } else {
                    is_named |= replace_value(value, file, other);
                }
            }
            is_named
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_file_is_replaced_wherever_an_argument_can_name_it() {
        let replaced = |argument| with_other_file(argument, "a,b.img", "c,d");
        assert_eq!(replaced("a,b.img").as_deref(), Some("c,d"));
        assert_eq!(replaced("file=a,,b.img,if=virtio").as_deref(), Some("file=c,,d,if=virtio"));
        assert_eq!(replaced("driver=raw,file.filename=a,,b.img").as_deref(), Some("driver=raw,file.filename=c,,d"));
        assert_eq!(replaced("if=ide,file=a,,b.img").as_deref(), Some("if=ide,file=c,,d"));
        let json = r#"{"driver":"qcow2","file":{"driver":"file","filename":"a,b.img"}}"#;
        let expected = json!({"driver": "qcow2", "file": {"driver": "file", "filename": "c,d"}});
        assert_eq!(serde_json::from_str::<Value>(&replaced(json).unwrap()).unwrap(), expected);
        for other in ["file=a,b.img", "file=xa,,b.img", "id=a,,b.img", "{\"id\": \"a,b.img\"}", "{a", "", ",", "=,,"] {
            assert_eq!(replaced(other), None, "{other}");
        }
    }

    #[test]
    fn a_raw_image_is_given_another_format() {
        assert_eq!(with_qcow2("file=a,format=raw,if=ide").as_deref(), Some("file=a,format=qcow2,if=ide"));
        assert_eq!(with_qcow2("a.img").as_deref(), Some("a.img"));
        assert_eq!(with_qcow2("driver=file,filename=a"), None);
        let json = r#"{"driver":"raw","file":{"driver":"file","filename":"a"}}"#;
        assert!(with_qcow2(json).unwrap().contains(r#""driver":"qcow2""#));
        assert_eq!(with_qcow2(r#"{"driver":"file","filename":"a"}"#), None);
    }

    #[test]
    fn a_served_disk_is_raw_and_has_no_overlay() {
        let served = |argument| with_served_file(argument, "a,b", "nbd:unix:/c,d");
        let all = "if=virtio,file=a,,b,format=qcow2,snapshot=on,cache=none";
        assert_eq!(served(all).as_deref(), Some("file=nbd:unix:/c,,d,format=raw,if=virtio,cache=none"));
        assert_eq!(served("file=a,,b").as_deref(), Some("file=nbd:unix:/c,,d,format=raw"));
        for other in ["a,b", "file=a", "driver=raw,file.filename=a,,b", r#"{"filename":"a,b"}"#] {
            assert_eq!(served(other), None, "{other}");
        }
    }

    #[test]
    fn a_disk_is_one_that_can_be_written_and_put_back() {
        let arguments = ["-drive".to_owned(), "file=a.img,format=raw".to_owned()];
        let block = |inserted: Value| json!({"device": "virtio0", "qdev": "/machine/x", "inserted": inserted});
        let image = |file: &str, format: &str| json!({"filename": file, "format": format, "virtual-size": 512});
        let found = of_block(&block(json!({"node-name": "n", "image": image("a.img", "raw")})), &arguments);
        let found = found.unwrap().unwrap();
        assert_eq!((&*found.label, &*found.device, &*found.node), ("virtio0", "/machine/x", "n"));
        assert_eq!((found.bytes, found.image.format), (ByteCount::new(512), ImageFormat::Raw));

        let mut overlay = image("/tmp/vl.x", "qcow2");
        overlay["backing-image"] = image("a.img", "raw");
        let found = of_block(&block(json!({"node-name": "n", "image": overlay})), &arguments).unwrap().unwrap();
        assert_eq!((&*found.image.file, found.image.format), ("a.img", ImageFormat::Raw));

        for ignored in [block(json!({"ro": true, "image": image("a.img", "raw")})), json!({"device": "cd"}), json!(7)] {
            assert_eq!(of_block(&ignored, &arguments).unwrap(), None);
        }
        for (inserted, words) in [
            (json!({"image": image("b.img", "raw")}), "does not name"),
            (json!({"image": image("a.img", "vmdk")}), "vmdk"),
            (json!({"encrypted": true, "image": image("a.img", "raw")}), "encrypted"),
            (json!({}), "length"),
        ] {
            let error = of_block(&block(inserted), &arguments).unwrap_err();
            assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains(words), "{error}");
        }
    }
}
