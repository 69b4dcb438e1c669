//! Files that a tree with mounts of its own has open on mounts outside, such as the output of a
//! container. CRIU cannot open them from inside; at a restore it gets them open.

use std::collections::{BTreeMap, HashSet};
use std::fs::{Metadata, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use pagemark_linux::proc::{self, Mount};
use pagemark_trace::error::{Error, ErrorKind, Object};

use crate::files::{decode_path, encode_path};

/// Major number of memory devices, such as `/dev/null`.
const MEMORY_DEVICES: u32 = 1;

/// A file on a mount outside.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct OutsideFile {
    /// CRIU's name of it: `file[MOUNT:INODE]`, in base 16.
    pub name: String,
    /// Its path here, as [`encode_path`] writes it.
    pub path: String,
    /// The flags of `open` that the tree has it open with.
    pub flags: i32,
}

/// Finds the files that processes with mounts of their own have open on mounts outside.
pub(crate) fn find(pids: &[i32]) -> Vec<OutsideFile> {
    let mut found = BTreeMap::new();
    let ids = |mounts: io::Result<Vec<Mount>>| mounts.unwrap_or_default().into_iter().map(|mount| mount.id);
    // What they see, and a process that has exited meanwhile sees nothing. They may have several sets of mounts.
    let inside: HashSet<u32> = pids.iter().flat_map(|&pid| ids(Mount::of_process(pid))).collect();
    for &pid in pids {
        for descriptor in proc::descriptors(pid).unwrap_or_default() {
            let Ok(metadata) = std::fs::metadata(descriptor.path()) else { continue };
            let Ok(info) = descriptor.info() else { continue };
            let kind = metadata.file_type();
            let is_memory = kind.is_char_device() && libc::major(metadata.rdev()) == MEMORY_DEVICES;
            let mount = info.number::<u32>("mnt_id").filter(|mount| !inside.contains(mount));
            let (Some(mount), true) = (mount, kind.is_file() || kind.is_dir() || is_memory) else { continue };
            // A file without a name is none of a mount; CRIU saves it.
            let Some(path) = std::fs::read_link(descriptor.path()).ok().filter(|_| metadata.nlink() > 0) else {
                continue;
            };
            // A mount that is gone, a namespace, or a mount above the root directory of the process is none of ours.
            let is_it = |here: Metadata| (here.dev(), here.ino()) == (metadata.dev(), metadata.ino());
            if !std::fs::metadata(&path).is_ok_and(is_it) {
                continue;
            }
            let name = format!("file[{mount:x}:{:x}]", metadata.ino());
            let flags = info.in_base("flags", 8).and_then(|flags| i32::try_from(flags).ok()).unwrap_or_default();
            found.insert(name.clone(), OutsideFile { name, path: encode_path(&path), flags });
        }
    }
    found.into_values().collect()
}

impl OutsideFile {
    /// Its path here.
    ///
    /// # Errors
    /// The checkpoint is damaged.
    pub(crate) fn path(&self) -> Result<PathBuf, Error> {
        decode_path(&self.path).ok_or_else(|| Error::damaged("the path of an open file is damaged"))
    }

    /// Opens the file for CRIU, at `path`: its own, or one that leads to what is held.
    ///
    /// # Errors
    /// The file is not there.
    pub(crate) fn open(&self, path: &Path) -> Result<OwnedFd, Error> {
        let access = self.flags & libc::O_ACCMODE;
        let (reads, writes) = (access != libc::O_WRONLY, access != libc::O_RDONLY);
        let mut options = OpenOptions::new();
        let kept = libc::O_APPEND | libc::O_DIRECTORY | libc::O_NONBLOCK;
        options.read(reads).write(writes).custom_flags(self.flags & kept | libc::O_NOCTTY);
        let file = options.open(path).map_err(|error| {
            let reason = format!("cannot be opened, and the processes need it ({error})");
            Error::about(ErrorKind::InTheWay, Object::File(path.to_owned()), reason)
        })?;
        Ok(file.into())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    #[test]
    fn a_process_has_none_on_mounts_that_it_sees() {
        let directory = tempfile::tempdir().unwrap();
        let _file = std::fs::File::create(directory.path().join("file")).unwrap();
        let path = encode_path(directory.path());
        let found = find(&[std::process::id() as i32]);
        assert!(!found.iter().any(|file| file.path.starts_with(&path)), "{found:?}");
    }

    #[test]
    fn a_file_is_opened_as_it_was() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let file = |flags| OutsideFile { name: String::new(), path: encode_path(&path), flags };
        assert_eq!(file(libc::O_WRONLY).open(&path).unwrap_err().kind(), ErrorKind::InTheWay);
        std::fs::write(&path, "first").unwrap();
        let mut log = std::fs::File::from(file(libc::O_WRONLY | libc::O_APPEND).open(&path).unwrap());
        log.rewind().unwrap();
        log.write_all(b" second").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "first second");
    }
}
