//! What a restored QEMU can write to: the images that the restore made, and no others. The images
//! of the original machine stay as they are, whatever the command line names.

use std::path::Path;

use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::command::text;
use crate::qemu::drive::{Drive, FILTERS, OTHER_FORMATS, named_file, names_file, remove_backing};
use crate::qemu::machine::{Machine, Startup};
use crate::qemu::user_files;

/// Drivers of nodes that are at the end of a chain, and hold nothing outside of QEMU.
const EMPTY: [&str; 2] = ["null-co", "null-aio"];

impl Machine {
    /// Checks that the machine, which has not run yet, writes to none but the images `made`.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] names another one.
    pub(crate) fn check_written_files<'a>(
        &mut self,
        startup: &Startup,
        made: impl Iterator<Item = &'a Path>,
    ) -> Result<()> {
        let made: Vec<_> = made.map(|path| startup.directory.join(path)).collect();
        let nodes = self.monitor.execute("query-named-block-nodes", json!({}))?;
        let nodes = nodes.as_array().map_or(&[][..], Vec::as_slice);
        for file in written(nodes) {
            let path = startup.directory.join(&file);
            // A temporary overlay has no name any more.
            let is_temporary = || !user_files::exists(startup.owner_for_root().ok().flatten(), &path);
            let is_local = file.starts_with('/') || !file.contains(':');
            if made.contains(&path) || is_local && is_temporary() {
                continue;
            }
            let reason = "is open for writing in the restored QEMU, and was not made by the restore";
            let error = Error::about(ErrorKind::Mismatch, Object::Image(path), reason);
            return Err(error.help("the machine had no such disk at the checkpoint: it was perhaps unplugged before"));
        }
        Ok(())
    }
}

/// Checks that QEMU, which has these nodes, has no image of the command line open for writing but
/// those of `drives`: a restored QEMU would open it, too.
///
/// # Errors
/// [`ErrorKind::Unsupported`] names another one.
pub(crate) fn check_images_have_devices(nodes: &[Value], startup: &Startup, drives: &[Drive]) -> Result<()> {
    let restored = without_what_is_below(&startup.arguments, drives);
    let is_known = |file: &String| {
        let is_named = restored.iter().any(|argument| names_file(argument, file));
        !is_named || drives.iter().any(|drive| drive.image.file == *file)
    };
    let Some(file) = written(nodes).find(|file| !is_known(file)) else { return Ok(()) };
    let reason = "is open for writing, and no device of the machine has it";
    let error = Error::about(ErrorKind::Unsupported, Object::Image(file.into()), reason);
    Err(error.help("leave it out of the command line, or open it with readonly=on"))
}

/// The arguments without the images below those of disks: a restored image has none below it. They
/// can be open for writing, too, as Proxmox VE has the images of snapshots.
fn without_what_is_below(arguments: &[String], drives: &[Drive]) -> Vec<String> {
    let mut arguments = arguments.to_vec();
    drives.iter().for_each(|drive| remove_backing(&mut arguments, &drive.image.file));
    arguments
}

/// The files that nodes write to by themselves. A node of a file that can become one for reading
/// alone (`auto-read-only`, as libvirt has it) does not say so: the nodes above it do.
fn written(nodes: &[Value]) -> impl Iterator<Item = String> {
    let is_read_only = |node: &Value| node.get("ro").and_then(Value::as_bool).unwrap_or(false);
    let written = nodes.iter().filter(move |node| !is_read_only(node) && is_protocol(&text(node, "drv")));
    let files = written.map(|node| text(node, "file")).filter(|file| !file.is_empty());
    files.filter(move |file| {
        let is_above = |node: &&Value| !is_protocol(&text(node, "drv")) && named_file(&text(node, "file")) == *file;
        let mut above = nodes.iter().filter(is_above).peekable();
        above.peek().is_none() || above.any(|node| !is_read_only(node))
    })
}

/// True for a driver that reaches a file or a device by itself.
fn is_protocol(driver: &str) -> bool {
    let by_others: [&[&str]; 4] = [&["raw", "qcow2", "quorum"], &FILTERS, &OTHER_FORMATS, &EMPTY];
    !by_others.iter().any(|drivers| drivers.contains(&driver))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_nodes_that_write_to_something_outside_count() {
        let node = |driver: &str, read_only: bool| json!({"drv": driver, "ro": read_only, "file": "a"});
        let found = |nodes: &[Value]| written(nodes).collect::<Vec<_>>();
        assert_eq!(found(&[node("file", false)]), ["a"]);
        assert_eq!(found(&[node("nbd", false), node("raw", false)]), ["a"]);
        for other in [node("file", true), node("qcow2", false), node("raw", false), node("null-co", false), json!(7)] {
            assert!(found(std::slice::from_ref(&other)).is_empty(), "{other}");
        }
        let compressed = json!({"driver": "compress", "file": {"driver": "qcow2", "file": {"filename": "a"}}});
        let filter = json!({"drv": "compress", "ro": false, "file": format!("json:{compressed}")});
        assert!(found(&[filter, node("qcow2", false), node("file", false)]).into_iter().eq(["a"]));
        // A base image, as libvirt has it.
        let described = |ro: bool, name: Value| json!({"drv": "qcow2", "ro": ro, "file": format!("json:{name}")});
        let overridden = described(true, json!({"file": {"file": {"filename": "a"}}, "backing": null}));
        let over_it = described(false, json!({"file": {"filename": "b"}, "backing": {"file": {"filename": "a"}}}));
        for above in [node("qcow2", true), overridden] {
            assert!(found(&[node("file", false), above.clone(), over_it.clone()]).is_empty());
            assert_eq!(found(&[node("file", false), above, node("raw", false)]), ["a"]);
        }
        assert_eq!(found(&[node("file", false), json!({"drv": "qcow2", "ro": true, "file": "b"})]), ["a"]);
    }
}
