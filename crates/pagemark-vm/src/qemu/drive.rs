//! A disk that a machine can write to, as QEMU reports it, and the argument that names its image.

use pagemark::ByteCount;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, ErrorKind, Object, Result, printable};
use crate::qemu::command::text;
use crate::qemu::command_line::split_options;

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
pub struct DiskImage {
    /// The label of the disk's space.
    pub label: String,
    /// The name of the file, as the command line has it.
    pub(crate) file: String,
    /// The format of the file.
    pub(crate) format: ImageFormat,
    /// True if it is no file but a block device of the host.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) is_device: bool,
}

/// QEMU's drivers for a file, and for a block device of the host.
pub(crate) const FILE_DRIVER: &str = "file";
pub(crate) const DEVICE_DRIVER: &str = "host_device";

/// Formats of images that a restore can write.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ImageFormat {
    Raw,
    Qcow2,
}

/// The disk of an entry of `query-block`; none if there is no medium, or the machine cannot write
/// to it. `nodes` is QEMU's list of nodes, and `arguments` are those of QEMU.
pub(crate) fn of_block(block: &Value, nodes: &[Value], arguments: &[String]) -> Result<Option<Drive>> {
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
        let error = Error::about(ErrorKind::Unsupported, Object::Disk(label.clone()), printable(&reason));
        Err(error.help("attach a disk that needs no checkpoint with readonly=on"))
    };
    let image = inserted.get("image").unwrap_or(&Value::Null);
    if [inserted, image].iter().any(|place| place.get("encrypted").and_then(Value::as_bool) == Some(true)) {
        return refused("is encrypted: its content would be stored in clear".into());
    }
    let Some(bytes) = image.get("virtual-size").and_then(Value::as_u64) else {
        return refused("has no length that QEMU reports".into());
    };
    // Of a temporary overlay, the command line names the image below. QEMU lists what a filter is over
    // in the same way.
    let chain = std::iter::successors(Some(image), |image| image.get("backing-image"));
    let mut images = chain.filter(|image| !FILTERS.contains(&&*text(image, "format")));
    let Some(named) = images.find(|image| arguments_name(arguments, &named_file(&text(image, "filename")))) else {
        return refused(format!("has the image {}, which the command line does not name", text(image, "filename")));
    };
    let format = match &*text(named, "format") {
        "raw" | "host_device" => ImageFormat::Raw,
        "qcow2" => ImageFormat::Qcow2,
        other => return refused(format!("has the format {other}; checkpoints hold raw and qcow2")),
    };
    if let Some(reason) = misplaced(named, format, nodes) {
        return refused(reason);
    }
    let file = named_file(&text(named, "filename"));
    let is_device = nodes.iter().any(|node| text(node, "file") == file && text(node, "drv") == DEVICE_DRIVER);
    Ok(Some(Drive {
        device: device_of(block),
        node: text(inserted, "node-name"),
        bytes: ByteCount::new(bytes),
        image: DiskImage { label: label.clone(), file, format, is_device },
        label,
    }))
}

/// Why a restore cannot put a file in the place of an image. The file would be opened as the
/// command line says, so it must be all of the image.
fn misplaced(image: &Value, format: ImageFormat, nodes: &[Value]) -> Option<String> {
    let name = text(image, "filename");
    let file = named_file(&name);
    if let Some(offset) = described(&name).and_then(|node| first_byte(&node)) {
        return Some(format!("begins at byte {offset} of the file {file}: a restore writes files for one disk"));
    }
    let is_of_file =
        |node: &&Value| named_file(&text(node, "file")) == file && !text(node, "node-name").starts_with(OWN_NODE);
    let drivers: Vec<String> = nodes.iter().filter(is_of_file).map(|node| text(node, "drv")).collect();
    let has = |driver: &str| drivers.iter().any(|other| other == driver);
    if !has(FILE_DRIVER) && !has(DEVICE_DRIVER) {
        let place = drivers.iter().map(|driver| &**driver).find(|driver| !["raw", "qcow2"].contains(driver));
        return Some(format!("has its content in {file} ({}): a restore writes files", place.unwrap_or("no file")));
    }
    let data_file = image.pointer("/format-specific/data/data-file").and_then(Value::as_str);
    if let Some(outer) = OTHER_FORMATS.iter().find(|outer| has(outer)) {
        return Some(format!("is within the {outer} image {file}"));
    }
    match (format, data_file) {
        (ImageFormat::Raw, _) if has("qcow2") => Some(format!("is raw within the qcow2 image {file}")),
        (ImageFormat::Qcow2, Some(data_file)) => Some(format!("has its content in another file, {data_file}")),
        _ => None,
    }
}

/// Formats of nodes that have the content of the node below.
pub(crate) const FILTERS: [&str; 5] = ["throttle", "copy-on-read", "blkdebug", "preallocate", "compress"];

/// Formats of images that a restore does not write.
pub(crate) const OTHER_FORMATS: [&str; 11] =
    ["luks", "vmdk", "vdi", "vpc", "vhdx", "qcow", "qed", "parallels", "bochs", "cloop", "dmg"];

/// The node that QEMU's name describes by JSON, as it does if options make it another than the file
/// alone.
fn described(name: &str) -> Option<Value> {
    serde_json::from_str(name.strip_prefix("json:")?).ok()
}

/// The file in QEMU's name of a node: the name itself, or that in a description, which has further
/// options, such as another image below.
pub(crate) fn named_file(name: &str) -> String {
    let described = described(name);
    let Some(mut node) = described.as_ref() else { return name.to_owned() };
    while let Some(file) = node.get("file") {
        node = file;
    }
    text(node, "filename")
}

/// Where in its file the content of a node begins, if not with the file. QEMU has numbers as text
/// here where the command line is no JSON.
fn first_byte(node: &Value) -> Option<String> {
    let begins_later = |offset: &Value| offset.as_u64() != Some(0) && offset.as_str() != Some("0");
    let offset = node.get("offset").filter(|offset| begins_later(offset));
    let offset = offset.map(|offset| offset.as_str().map_or_else(|| offset.to_string(), str::to_owned));
    offset.or_else(|| first_byte(node.get("file")?))
}

/// The begin of the names of nodes that a checkpoint adds.
const OWN_NODE: &str = "pagemark-";

/// True if an argument names an image below another, also in a file of options.
pub(crate) fn names_backing(arguments: &[String]) -> bool {
    arguments.iter().any(|argument| argument.contains("backing") || argument.ends_with("-readconfig"))
}

/// Removes from the arguments which image is below that in `file`: its header says it.
pub(crate) fn remove_backing(arguments: &mut [String], file: &str) {
    let mut nodes: Vec<String> = Vec::new();
    // A node can be named before the one that it refers to.
    for _ in 0..2 {
        for argument in &mut *arguments {
            let is_above = |node: &String| is_file_of(argument, node);
            if !names_file(argument, file) && !nodes.iter().any(is_above) {
                continue;
            }
            if argument.starts_with('{')
                && let Ok(mut document) = serde_json::from_str::<Value>(argument)
            {
                nodes.extend(document.get("node-name").and_then(Value::as_str).map(str::to_owned));
                drop_backing(&mut document);
                *argument = document.to_string();
                continue;
            }
            let options = split_options(argument);
            nodes.extend(options.iter().find_map(|option| option.strip_prefix("node-name=")).map(str::to_owned));
            let is_kept = |option: &&&str| !option.starts_with("backing=") && !option.starts_with("backing.");
            *argument = options.iter().filter(is_kept).copied().collect::<Vec<_>>().join(",");
        }
    }
}

/// True if the argument is that of a node above another one.
fn is_file_of(argument: &str, node: &str) -> bool {
    match serde_json::from_str::<Value>(argument) {
        Ok(document) => document.get("file").and_then(Value::as_str) == Some(node),
        Err(_) => {
            let options = split_options(argument);
            options.iter().any(|option| option.strip_prefix("file=") == Some(node))
                && options.iter().any(|option| option.starts_with("driver="))
        }
    }
}

fn drop_backing(node: &mut Value) {
    if let Some(members) = node.as_object_mut() {
        members.remove("backing");
        members.get_mut("file").into_iter().for_each(drop_backing);
    }
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

/// An argument of `-blockdev` as a document, in whichever form it is.
fn node_document(argument: &str) -> Option<Value> {
    if argument.starts_with('{') {
        return serde_json::from_str(argument).ok();
    }
    let options = split_options(argument).into_iter().filter_map(|option| option.split_once('='));
    Some(options.map(|(key, value)| (key.to_owned(), Value::from(value.replace(",,", ",")))).collect::<Value>())
}

/// The name of the node for a file alone that an argument of `-blockdev` makes.
pub(crate) fn node_of_file(argument: &str) -> Option<String> {
    let document = node_document(argument)?;
    let name = text(&document, "node-name");
    (text(&document, "driver") == "file" && !name.is_empty()).then_some(name)
}

/// True for an argument of `-blockdev` that makes a node of the format raw over the whole of the
/// node `file`.
pub(crate) fn is_raw_over(argument: &str, file: &str) -> bool {
    let Some(document) = node_document(argument) else { return false };
    let is_part = ["offset", "size"].iter().any(|name| document.get(name).is_some());
    text(&document, "driver") == "raw" && text(&document, "file") == file && !is_part
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
        ["format=", "driver=", "snapshot=", "file.locking=", "backing.", "backing="]
            .iter()
            .any(|name| option.starts_with(name))
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

/// An argument that names `file`, with the driver for what that is. Without a driver, QEMU finds it
/// out by itself.
pub(crate) fn with_driver(argument: &str, file: &str, driver: &str) -> String {
    if argument.starts_with('{')
        && let Ok(mut document) = serde_json::from_str::<Value>(argument)
    {
        set_driver(&mut document, file, driver);
        return document.to_string();
    }
    let options = split_options(argument);
    let named = file.replace(',', ",,");
    let prefix = options.iter().find_map(|option| {
        let (key, value) = option.split_once('=')?;
        let (prefix, last) = key.rsplit_once('.').map_or(("", key), |(_, last)| (&key[..key.len() - last.len()], last));
        (value == named && FILE_KEYS.contains(&last)).then_some(prefix)
    });
    let Some(prefix) = prefix else { return argument.to_owned() };
    let with_driver = |option: &&str| match option.strip_prefix(prefix).and_then(|rest| rest.split_once('=')) {
        Some((key @ ("driver" | "format"), FILE_DRIVER | DEVICE_DRIVER)) => format!("{prefix}{key}={driver}"),
        _ => (*option).to_owned(),
    };
    options.iter().map(with_driver).collect::<Vec<_>>().join(",")
}

fn set_driver(value: &mut Value, file: &str, driver: &str) {
    let Value::Object(members) = value else { return };
    let is_of_file = members.get("filename").is_some_and(|name| name == file);
    match members.get_mut("driver") {
        Some(old) if is_of_file && [FILE_DRIVER, DEVICE_DRIVER].iter().any(|name| old == name) => *old = driver.into(),
        _ => members.values_mut().for_each(|member| set_driver(member, file, driver)),
    }
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
    fn a_file_has_the_driver_of_files_and_a_device_that_of_devices() {
        for (argument, expected) in [
            ("driver=host_device,filename=a,,b,node-name=n", "driver=file,filename=a,,b,node-name=n"),
            ("driver=raw,file.driver=host_device,file.filename=a,,b", "driver=raw,file.driver=file,file.filename=a,,b"),
            ("file=a,,b,format=host_device,if=ide", "file=a,,b,format=file,if=ide"),
            ("file=a,,b,format=raw,if=ide", "file=a,,b,format=raw,if=ide"),
            ("driver=host_device,filename=c", "driver=host_device,filename=c"),
            ("a,b", "a,b"),
        ] {
            assert_eq!(with_driver(argument, "a,b", FILE_DRIVER), expected);
        }
        let of = |driver: &str| json!({"driver": "raw", "file": {"driver": driver, "filename": "a,b"}, "backing": {"driver": "file", "filename": "c"}});
        let changed = with_driver(&of(FILE_DRIVER).to_string(), "a,b", DEVICE_DRIVER);
        assert_eq!(serde_json::from_str::<Value>(&changed).unwrap(), of(DEVICE_DRIVER));
        assert_eq!(with_driver("{", "a", FILE_DRIVER), "{");
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
    fn the_node_over_that_of_a_file_is_found() {
        for storage in [r#"{"driver":"file","filename":"a","node-name":"s"}"#, "driver=file,filename=a,node-name=s"] {
            assert_eq!(node_of_file(storage).as_deref(), Some("s"));
            assert!(!is_raw_over(storage, "s"));
        }
        for format in [r#"{"node-name":"f","driver":"raw","file":"s"}"#, "driver=raw,node-name=f,file=s"] {
            assert!(is_raw_over(format, "s") && !is_raw_over(format, "t"));
            assert_eq!(node_of_file(format), None);
        }
        for other in ["driver=raw,file=s,offset=512", "driver=qcow2,file=s", "file=s,format=raw", "s", "{"] {
            assert!(!is_raw_over(other, "s"), "{other}");
        }
    }

    #[test]
    fn a_served_disk_is_raw_and_has_no_overlay() {
        let served = |argument| with_served_file(argument, "a,b", "nbd:unix:/c,d");
        let all = "if=virtio,file=a,,b,format=qcow2,snapshot=on,backing.file.filename=c,cache=none";
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
        let nodes = ["raw", "file"].map(|driver| json!({"file": "a.img", "drv": driver, "node-name": "x"}));
        let of_block = |block: &Value, arguments: &[String]| of_block(block, &nodes, arguments);
        let found = of_block(&block(json!({"node-name": "n", "image": image("a.img", "raw")})), &arguments);
        let found = found.unwrap().unwrap();
        assert_eq!((&*found.label, &*found.device, &*found.node), ("virtio0", "/machine/x", "n"));
        assert_eq!((found.bytes, found.image.format), (ByteCount::new(512), ImageFormat::Raw));

        let mut overlay = image("/tmp/vl.x", "qcow2");
        overlay["backing-image"] = image("a.img", "raw");
        let found = of_block(&block(json!({"node-name": "n", "image": overlay})), &arguments).unwrap().unwrap();
        assert_eq!((&*found.image.file, found.image.format), ("a.img", ImageFormat::Raw));

        // Options that are not in the image's header have QEMU describe it, and what is over it.
        let file = json!({"driver": "file", "filename": "a.img"});
        let described = |node: Value| format!("json:{node}");
        let top = json!({"driver": "qcow2", "file": file, "backing": {"driver": "raw", "file": {"filename": "b"}}});
        let mut over = image(&described(json!({"driver": "throttle", "file": top})), "throttle");
        over["backing-image"] = image(&described(top), "qcow2");
        over["backing-image"]["backing-image"] = image("b", "raw");
        let both = [&arguments[..], &["-drive".to_owned(), "file=b,readonly=on".to_owned()]].concat();
        let found = of_block(&block(json!({"node-name": "n", "image": over})), &both).unwrap().unwrap();
        assert_eq!((&*found.image.file, found.image.format), ("a.img", ImageFormat::Qcow2));
        let part = |offset: Value| described(json!({"driver": "raw", "offset": offset, "size": 512, "file": file}));
        let of_part = |offset| of_block(&block(json!({"image": image(&part(offset), "raw")})), &arguments);
        assert_eq!(of_part(json!(0)).unwrap().unwrap().image.file, "a.img");
        assert_eq!(of_part(json!("0")).unwrap().unwrap().image.file, "a.img");
        for offset in [json!(512), json!("512")] {
            let error = of_part(offset).unwrap_err();
            assert!(error.to_string().contains("begins at byte 512 of the file a.img"), "{error}");
        }

        for ignored in [block(json!({"ro": true, "image": image("a.img", "raw")})), json!({"device": "cd"}), json!(7)] {
            assert_eq!(of_block(&ignored, &arguments).unwrap(), None);
        }
        for (inserted, words) in [
            (json!({"image": image("b.img", "raw")}), "does not name"),
            (json!({"image": image("a.img", "vmdk")}), "vmdk"),
            (json!({"encrypted": true, "image": image("a.img", "raw")}), "encrypted"),
            (json!({"image": {"encrypted": true, "filename": "a.img", "format": "qcow2"}}), "encrypted"),
            (json!({}), "length"),
        ] {
            let error = of_block(&block(inserted), &arguments).unwrap_err();
            assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn an_image_is_all_of_a_file() {
        let image = json!({"filename": "a"});
        let with_data = json!({"filename": "a", "format-specific": {"data": {"data-file": "b"}}});
        for (image, format, drivers, expected) in [
            (&image, ImageFormat::Raw, &["raw", "file"][..], None),
            (&image, ImageFormat::Qcow2, &["qcow2", "file"], None),
            (&image, ImageFormat::Raw, &["raw", "qcow2", "file"], Some("within")),
            (&image, ImageFormat::Raw, &["raw", "vmdk", "file"], Some("within the vmdk image")),
            (&image, ImageFormat::Qcow2, &["qcow2", "luks", "file"], Some("within the luks image")),
            (&image, ImageFormat::Raw, &["raw", "nbd"], Some("(nbd)")),
            (&image, ImageFormat::Raw, &["host_device"], None),
            (&image, ImageFormat::Raw, &["host_cdrom"], Some("(host_cdrom)")),
            (&image, ImageFormat::Raw, &["raw"], Some("(no file)")),
            (&with_data, ImageFormat::Qcow2, &["qcow2", "file"], Some("another file, b")),
        ] {
            let mut nodes: Vec<Value> =
                drivers.iter().map(|driver| json!({"file": "a", "drv": driver, "node-name": "x"})).collect();
            nodes.push(json!({"file": "a", "drv": "copy-before-write", "node-name": "pagemark-filter-0"}));
            nodes.push(json!({"file": "b", "drv": "qcow2", "node-name": "y"}));
            let found = misplaced(image, format, &nodes);
            assert_eq!(found.is_some(), expected.is_some(), "{found:?}");
            assert!(found.unwrap_or_default().contains(expected.unwrap_or_default()));
        }
    }

    #[test]
    fn the_image_below_is_that_of_the_header() {
        let mut arguments = [
            r#"{"driver":"qcow2","node-name":"top","file":"storage","backing":"base"}"#,
            r#"{"driver":"file","node-name":"storage","filename":"a,b"}"#,
            r#"{"driver":"qcow2","node-name":"base","file":"other","backing":null}"#,
            r#"{"driver":"qcow2","file":{"driver":"file","filename":"a,b"},"backing":{"driver":"file","filename":"c"}}"#,
            "file=a,,b,backing.driver=raw,backing.file.filename=c,if=virtio",
            "driver=qcow2,file=z,backing=base",
            "backing=base",
        ]
        .map(str::to_owned);
        assert!(names_backing(&arguments) && !names_backing(&["-m".into(), "memory-backend=ram".into()]));
        remove_backing(&mut arguments, "a,b");
        for changed in [0, 3, 4] {
            assert!(!arguments[changed].contains("backing"), "{}", arguments[changed]);
        }
        assert_eq!(arguments[4], "file=a,,b,if=virtio");
        for kept in [2, 5, 6] {
            assert!(arguments[kept].contains("backing"), "{}", arguments[kept]);
        }
    }
}
