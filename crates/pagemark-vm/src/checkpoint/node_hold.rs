//! Keeps others from changing the images of a disk during a checkpoint.
//!
//! If a disk's medium is ejected while a filter is before the disk, QEMU 7.2 crashes when the
//! filter is removed. A snapshot would make the filter a part of the user's chain of images, and
//! a job that copies the disk elsewhere and replaces it would be in vain, because the device is
//! given its old image back. QEMU refuses all that, and to resize the disk, for a node that is
//! the backing image of another. Such another is made here: an empty image that nobody reads.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;

use nix::sys::memfd::{MFdFlags, memfd_create};
use pagemark_linux::proc;
use serde_json::json;

use crate::qemu::command::Command;

/// QEMU's name for the node of the file of [`empty_image`].
pub(crate) const FILE_NODE: &str = "pagemark-hold";

/// Length of a cluster, the shortest that the format has.
const CLUSTER_BYTES: usize = 512;

/// An empty qcow2 image of one cluster, in memory, open for reading alone: QEMU takes no other
/// descriptor for a node that is read.
pub(crate) fn empty_image() -> io::Result<File> {
    let mut file = File::from(memfd_create(c"pagemark-hold", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(&content())?;
    File::open(proc::own_path(&format!("fd/{}", file.as_raw_fd())))
}

/// The clusters: the header, the table of reference counts, the counts, and the first table of the
/// content, which has none.
fn content() -> [u8; 4 * CLUSTER_BYTES] {
    let cluster = |number: usize| (number * CLUSTER_BYTES) as u64;
    let mut image = [0; 4 * CLUSTER_BYTES];
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb");
    put(4, &3u32.to_be_bytes());
    put(20, &CLUSTER_BYTES.ilog2().to_be_bytes());
    // The length of the disk, and the entries and place of its table.
    put(24, &cluster(1).to_be_bytes());
    put(36, &1u32.to_be_bytes());
    put(40, &cluster(3).to_be_bytes());
    // The table of reference counts, and how many clusters it has.
    put(48, &cluster(1).to_be_bytes());
    put(56, &1u32.to_be_bytes());
    // Reference counts have 16 bits; the length of the header.
    put(96, &4u32.to_be_bytes());
    put(100, &104u32.to_be_bytes());
    put(CLUSTER_BYTES, &cluster(2).to_be_bytes());
    for number in 0..4 {
        put(2 * CLUSTER_BYTES + 2 * number, &1u16.to_be_bytes());
    }
    image
}

/// The command that makes the node of the file, which QEMU has as the set of descriptors `set`.
pub(crate) fn open_file(set: u64) -> Command {
    let file = json!({
        "driver": "file", "node-name": FILE_NODE, "filename": format!("/dev/fdset/{set}"), "read-only": true,
        "locking": "off",
    });
    Command::new("blockdev-add", file)
}

/// The command that holds `node`, by a node with the name `hold`.
pub(crate) fn hold(node: &str, hold: &str) -> Command {
    let image = json!({"driver": "qcow2", "node-name": hold, "read-only": true, "file": FILE_NODE, "backing": node});
    Command::new("blockdev-add", image)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use pagemark_testing::skip;

    use super::*;

    #[test]
    fn the_image_is_one_without_a_fault() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content()).unwrap();
        let check = Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(file.path()).output();
        let Ok(check) = check else { skip!("no qemu-img") };
        assert!(check.status.success(), "{check:?}");
    }
}
