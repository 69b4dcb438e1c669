//! Files that QEMU is given for the time of a checkpoint: for the state of the devices, and for
//! disks.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::sys::memfd::{MFdFlags, memfd_create};
use pagemark_linux::proc;
use serde_json::json;

use crate::checkpoint::changes::{Changes, Undo};
use crate::error::{Error, ErrorKind, Result};
use crate::qemu::command::Command;
use crate::qemu::machine::Machine;

/// QEMU's number of the set of descriptors that has the file for the state of the devices: two
/// letters, `pm`. The sets with the next numbers have files for disks.
pub(crate) const FILE_SET: u64 = 28781;

/// The command by which QEMU writes the state of processors and devices into the file that
/// [`add_device_file`] gave it. The machine is stopped.
pub fn save_devices() -> Command {
    let path = format!("/dev/fdset/{FILE_SET}");
    // QEMU has the command in all builds. It does not stop the machine, and with `live: false` it leaves
    // the disks with this QEMU.
    Command::new("xen-save-devices-state", json!({"filename": path, "live": false}))
}

/// Gives QEMU a file in memory for [`save_devices`].
pub fn add_device_file(machine: &mut Machine, changes: &mut Changes) -> Result<File> {
    let file = memory_file().map_err(Error::system("make a file in memory"))?;
    // QEMU takes a descriptor from the set only if it is open for writing alone.
    let path = proc::own_path(&format!("fd/{}", file.as_raw_fd()));
    let for_qemu = File::options().write(true).open(path).map_err(Error::system("open a file in memory"))?;
    add_file(machine, changes, FILE_SET, for_qemu.as_fd())?;
    Ok(file)
}

/// Gives QEMU a descriptor as the only one of a set, until the end of the checkpoint.
pub(crate) fn add_file(machine: &mut Machine, changes: &mut Changes, set: u64, file: BorrowedFd<'_>) -> Result<()> {
    let remove = Command::new("remove-fd", json!({ "fdset-id": set }));
    // A set that was left over would have two files.
    match machine.execute(&remove) {
        Err(error) if error.kind() != ErrorKind::Command => return Err(error),
        _ => {}
    }
    let add = |machine: &mut Machine| machine.monitor.execute_with("add-fd", json!({ "fdset-id": set }), Some(file));
    changes.make(machine, Undo::by(remove), add).map(drop)
}

fn memory_file() -> std::io::Result<File> {
    Ok(File::from(memfd_create(c"pagemark-devices", MFdFlags::MFD_CLOEXEC)?))
}
