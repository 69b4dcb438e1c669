//! Gives the pipes and sockets that CRIU has made as root to the users that had them.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, chown};
use std::path::Path;

use nix::unistd::geteuid;
use pagemark_linux::proc::{self, Process};
use pagemark_trace::error::{Error, Object, Result};

use super::holders::{Holder, Holders, Purpose};
use super::root::read_notes;
use crate::criu::images::schema::FileEntry;
use crate::criu::images::{ImageKind, read_all};
use crate::criu::owners::Owner;

/// Changes the owners of what processes have open that CRIU restores from the images in
/// `directory`, and that do not run yet. `root` is the root process.
///
/// # Errors
/// The system refuses it.
pub(super) fn give(directory: &Path, root: Option<Process>) -> Result<()> {
    let notes = read_notes(directory)?;
    if notes.owners.is_empty() || !geteuid().is_root() {
        return Ok(());
    }
    let path = directory.join("files.img");
    let entries: Vec<FileEntry> = read_all(&path, ImageKind::Files)?;
    let holders = Holders::read(directory, &entries)?;
    let here = notes.pids_here(root);
    for entry in &entries {
        let of_pipe = entry.pipe.as_ref().map(|pipe| pipe.pipe_id);
        let of_socket = || entry.usk.as_ref().map(|socket| socket.ino).or(entry.isk.as_ref().map(|socket| socket.ino));
        let Some(inode) = of_pipe.or_else(of_socket) else { continue };
        // CRIU keeps the lower half of an inode number.
        let Some(owner) = notes.owners.iter().find(|owner| owner.inode as u32 == inode) else { continue };
        let number = |holder: &Holder| match holder.purpose {
            Purpose::Descriptor(number) => Some((here.get(holder.pid)?, number)),
            _ => None,
        };
        if let Some((pid, number)) = holders.of(entry.id).iter().find_map(number) {
            give_descriptor(pid, number, owner).map_err(|error| {
                Error::system(format!("give descriptor {number} to user {}, of", owner.user), Object::Process(pid))(
                    error,
                )
            })?;
        }
    }
    Ok(())
}

fn give_descriptor(pid: i32, number: u32, owner: &Owner) -> io::Result<()> {
    let path = proc::path(pid, &format!("fd/{number}"));
    let found = std::fs::metadata(&path)?;
    let is_made = found.file_type().is_fifo() || found.file_type().is_socket();
    if !is_made || (found.uid(), found.gid()) == (owner.user, owner.group) {
        return Ok(());
    }
    chown(&path, Some(owner.user), Some(owner.group))
}
