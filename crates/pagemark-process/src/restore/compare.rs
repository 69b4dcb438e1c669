//! Compares the files of processes with mounts of their own, before they run, with the files that
//! they must be: CRIU has opened them by their paths, with root's rights.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::geteuid;
use pagemark_linux::proc::maps::{self, Mapping};
use pagemark_linux::proc::{self, Process};
use pagemark_trace::PidsHere;
use pagemark_trace::error::{Error, Result};

use super::holders::{Holder, Holders, Purpose};
use super::images::RestoreOptions;
use super::mounts;
use super::opened::{check, check_control_file, find_open, in_the_way};
use crate::criu::images::schema::{FileEntry, RemapEntry};
use crate::criu::images::{ImageKind, read_all};
use crate::criu::regular_files::has_own_mounts;
use crate::criu::stdio::is_stand_in;
use crate::files::walk::{Found, open_at};

/// A file system that opens a file of another one for a mapping.
const OVERLAY: u64 = 0x794c_7630;

/// Compares the files of the processes that CRIU restores from the images in `directory`, and that
/// do not run yet. `root` is the root process. `trusted` are paths at which
/// every user may have any file but a link.
///
/// # Errors
/// A process has another file, or one that its user may not use.
pub(super) fn compare(directory: &Path, root: Option<Process>, options: &RestoreOptions) -> Result<()> {
    if !geteuid().is_root() || !has_own_mounts(directory) {
        return Ok(());
    }
    let process = root.ok_or_else(|| Error::criu_failed("restore a container", "it reported no process"))?;
    let path = directory.join("files.img");
    let entries: Vec<FileEntry> = read_all(&path, ImageKind::Files)?;
    let mut holders = Holders::read(directory, &entries)?;
    mounts::compare(directory, process, &holders, options)?;
    // Root inside may use what is inside.
    holders.users.iter_mut().for_each(|user| user.is_root |= user.is_root_inside);
    let remaps = directory.join("remap-fpath.img");
    let remaps: Vec<RemapEntry> = if remaps.exists() { read_all(&remaps, ImageKind::Remaps)? } else { Vec::new() };
    let root = std::fs::File::open(proc::path(process.pid, "root")).map_err(super::io("open the root directory"))?;
    let root = open_at(root.as_fd(), std::ffi::OsStr::new(".")).map_err(|error| super::io("open it")(error.into()))?;
    let mut processes = Processes { here: PidsHere::of_container(process), mappings: HashMap::new() };
    for file in entries.iter().filter_map(|entry| entry.reg.as_ref()) {
        let by = holders.of(file.id);
        let path = Path::new(&file.name);
        let is_of_kernel = ["/proc", "/dev/pts"].iter().any(|made| path.starts_with(made));
        let is_remapped = remaps.iter().any(|remap| remap.orig_id == file.id);
        let is_roots = by.iter().all(|holder| holders.users[holder.user].is_root);
        // CRIU has opened neither by its path.
        let is_handed_over = file.ext == Some(true) || is_stand_in(file);
        if is_roots || is_of_kernel || is_remapped || is_handed_over || !path.is_absolute() {
            continue;
        }
        let found = find_open(root.as_fd(), file).map_err(|lost| lost.error(path))?;
        check_control_file(&found, path, by, &holders.users)?;
        for holder in by {
            is_same(&found, path, holder, &mut processes)?;
        }
        if !options.trusted_paths.iter().any(|trusted| trusted == path) {
            check(&found, path, by, &holders)?;
        }
    }
    Ok(())
}

/// The processes, which do not run: what was read of one stays as it is.
struct Processes {
    here: PidsHere,
    /// Their mappings, by their ids here, as far as they were needed.
    mappings: HashMap<i32, Vec<Mapping>>,
}

impl Processes {
    fn mappings(&mut self, pid: i32) -> Result<&[Mapping]> {
        Ok(match self.mappings.entry(pid) {
            Entry::Occupied(read) => read.into_mut(),
            Entry::Vacant(none) => none.insert(maps::read(pid).map_err(|_| Error::no_process(pid))?),
        })
    }
}

/// Checks that a process has the file that was found.
fn is_same(found: &Found, path: &Path, holder: &Holder, processes: &mut Processes) -> Result<()> {
    let Some(pid) = processes.here.get(holder.pid) else { return Ok(()) };
    let link = match holder.purpose {
        Purpose::Descriptor(number) => proc::path(pid, &format!("fd/{number}")),
        Purpose::Program => proc::path(pid, "exe"),
        Purpose::WorkingDirectory => proc::path(pid, "cwd"),
        Purpose::RootDirectory => proc::path(pid, "root"),
        Purpose::Queue => {
            return Err(in_the_way(path, "waits in the queue of a socket, where it cannot be compared")
                .help("receive what was sent before a checkpoint"));
        }
        Purpose::Mapping(start) => {
            let mapping = processes
                .mappings(pid)?
                .iter()
                .find(|mapping| (mapping.start.get()..mapping.end.get()).contains(&start));
            let Some(mapping) = mapping else { return Ok(()) };
            proc::path(pid, &format!("map_files/{:x}-{:x}", mapping.start.get(), mapping.end.get()))
        }
    };
    let has = std::fs::metadata(&link).map_err(super::io(format!("examine {}", link.display())))?;
    let is_it = (has.dev(), has.ino()) == (found.stat.st_dev, found.stat.st_ino);
    let is_mapping = matches!(holder.purpose, Purpose::Mapping(_));
    let is_overlay =
        || nix::sys::statfs::fstatfs(&found.file).is_ok_and(|kind| kind.filesystem_type().0 as u64 == OVERLAY);
    if is_it || is_mapping && is_overlay() {
        return Ok(());
    }
    let reason = format!("was swapped while process {} was restored, which has it {}", holder.pid, holder.purpose);
    Err(in_the_way(path, reason))
}
