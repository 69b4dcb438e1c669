//! The regular files that CRIU's images name, and the lengths and positions that a restore
//! demands.
//!
//! CRIU refuses a file whose length differs from that at the dump. For a program, library or other
//! mapped file that is right. But a file that the processes only read, such as a log that another
//! program writes, may have grown; and an output that other programs write too is continued at its
//! present end.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use pagemark_trace::error::Error;
use prost::Message;

use super::images::schema::{FileEntry, MmEntry, RegFileEntry, RemapEntry};
use super::images::{Image, ImageKind, read_all, read_first, with_bytes, with_varint, without};

/// Begin of the names of the images of mounts, one for each set of mounts.
pub(crate) const MOUNTS: &str = "mountpoints-";

/// A regular file that a restore opens by its path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RegularFile {
    /// Its absolute path.
    pub path: PathBuf,
    /// Length at the dump, if the restore demands it.
    pub size: Option<u64>,
    /// True if the processes could only read it, and did not map it.
    pub is_only_read: bool,
    /// True if writes go to its end.
    pub appends: bool,
    /// True if it was a FIFO.
    pub is_fifo: bool,
}

/// What a restore demands of a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Demand {
    /// The length at the dump.
    SameLength,
    /// Nothing.
    AnyLength,
    /// Nothing; the position becomes this one, bytes.
    Position(u64),
}

/// Calls `demand` for each regular file that a restore opens by its path, and changes the images in
/// `directory` accordingly. `path_of` gives the path of a file by its name in the images, and by
/// whether it is on a mount outside; None leaves the file as it is.
pub(crate) fn revise(
    directory: &Path,
    path_of: &dyn Fn(&str, bool) -> Option<PathBuf>,
    demand: &mut dyn FnMut(&RegularFile) -> Result<Demand, Error>,
) -> Result<(), Error> {
    let path = directory.join("files.img");
    let mut image = Image::read(&path, ImageKind::Files)?;
    let (remapped, mapped) = (remapped(directory)?, mapped(directory)?);
    let mut is_changed = false;
    for message in &mut image.messages {
        let decoded = FileEntry::decode(message.as_slice());
        let entry = decoded.map_err(|error| Error::image(path.clone(), error.to_string()))?;
        let Some(reg) = entry.reg.filter(|reg| !remapped.contains(&reg.id)) else { continue };
        let Some(path) = path_of(&reg.name, reg.ext.unwrap_or(false)) else { continue };
        let flags = reg.flags as i32;
        let is_only_read = flags & libc::O_ACCMODE == libc::O_RDONLY && !mapped.contains(&u64::from(reg.id));
        let appends = flags & libc::O_APPEND != 0;
        let is_fifo = reg.mode.is_some_and(|mode| mode & libc::S_IFMT == libc::S_IFIFO);
        let file = RegularFile { path, size: reg.size, is_only_read, appends, is_fifo };
        let revised = match demand(&file)? {
            Demand::SameLength => continue,
            Demand::AnyLength => without(&encoded(message), RegFileEntry::SIZE),
            Demand::Position(position) => {
                with_varint(&without(&encoded(message), RegFileEntry::SIZE), RegFileEntry::POS, position)
            }
        };
        *message = with_bytes(message, FileEntry::REG, &revised);
        is_changed = true;
    }
    if is_changed {
        std::fs::write(&path, image.encode()).map_err(Error::criu_io(format!("write {}", path.display())))?;
    }
    Ok(())
}

/// The encoded `reg` of a `file_entry`, with the fields that are not declared here. The message was
/// decoded before.
fn encoded(message: &[u8]) -> Vec<u8> {
    #[derive(Clone, PartialEq, Message)]
    struct Raw {
        #[prost(bytes = "vec", optional, tag = 3)]
        reg: Option<Vec<u8>>,
    }
    Raw::decode(message).ok().and_then(|raw| raw.reg).unwrap_or_default()
}

/// Ids of the files whose paths did not lead to them.
fn remapped(directory: &Path) -> Result<HashSet<u32>, Error> {
    let path = directory.join("remap-fpath.img");
    if !path.exists() {
        return Ok(HashSet::new());
    }
    let entries: Vec<RemapEntry> = read_all(&path, ImageKind::Remaps)?;
    Ok(entries.iter().map(|entry| entry.orig_id).collect())
}

/// Ids of the files that are mapped. Those of shared memory are among them, which does no harm: a
/// file that has the same id counts as mapped.
fn mapped(directory: &Path) -> Result<HashSet<u64>, Error> {
    let mut ids = HashSet::new();
    for path in images_of(directory, "mm-")? {
        let memory: MmEntry = read_first(&path, ImageKind::Mm)?;
        ids.extend(memory.vmas.iter().map(|vma| vma.shmid));
    }
    Ok(ids)
}

/// True if the images hold mounts of their own, so that paths do not mean what they mean here.
pub(crate) fn has_own_mounts(directory: &Path) -> bool {
    has_image(directory, MOUNTS)
}

/// The images whose names begin so.
///
/// # Errors
/// The directory cannot be read.
pub(crate) fn images_of(directory: &Path, prefix: &str) -> Result<Vec<PathBuf>, Error> {
    let failed = || Error::criu_io(format!("read directory {}", directory.display()));
    let mut images = Vec::new();
    for entry in std::fs::read_dir(directory).map_err(failed())? {
        let entry = entry.map_err(failed())?;
        if entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()) {
            images.push(entry.path());
        }
    }
    Ok(images)
}

/// True if there is an image whose name begins so.
pub(crate) fn has_image(directory: &Path, prefix: &str) -> bool {
    let mut entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.any(|entry| entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::criu::images::schema::{FILE_REGULAR, FownEntry};

    #[test]
    fn a_length_is_no_longer_demanded_and_unknown_fields_are_kept() {
        let directory = tempfile::tempdir().unwrap();
        let file = |id: u32, name: &str, flags: i32| {
            let fown = FownEntry::default();
            let (name, size) = (name.to_owned(), Some(10));
            let reg = RegFileEntry { id, flags: flags as u32, pos: 5, fown, name, size, ..Default::default() };
            // Field 99 of `reg`, a string.
            let reg = [reg.encode_to_vec(), vec![0x9a, 0x06, 0x01, b'x']].concat();
            let entry = FileEntry { r#type: FILE_REGULAR, id, ..Default::default() };
            with_bytes(&entry.encode_to_vec(), FileEntry::REG, &reg)
        };
        let mut image = Image::new(ImageKind::Files);
        image.messages = vec![
            file(1, "/read", libc::O_RDONLY),
            file(2, "/log", libc::O_WRONLY | libc::O_APPEND),
            file(3, "/ghost", libc::O_RDONLY),
            file(4, "/data", libc::O_RDWR),
        ];
        std::fs::write(directory.path().join("files.img"), image.encode()).unwrap();
        let mut remaps = Image::new(ImageKind::Remaps);
        remaps.messages = vec![RemapEntry { orig_id: 3, ..Default::default() }.encode_to_vec()];
        std::fs::write(directory.path().join("remap-fpath.img"), remaps.encode()).unwrap();
        let mut seen = Vec::new();
        let mut demand = |file: &RegularFile| {
            seen.push((file.path.display().to_string(), file.is_only_read, file.appends));
            Ok::<_, Error>(match file.path.to_str() {
                Some("/read") => Demand::AnyLength,
                Some("/log") => Demand::Position(77),
                _ => Demand::SameLength,
            })
        };
        let path_of = |name: &str, is_outside: bool| (!is_outside).then(|| PathBuf::from(name));
        revise(directory.path(), &path_of, &mut demand).unwrap();
        let expected = [("/read", true, false), ("/log", false, true), ("/data", false, false)];
        assert_eq!(seen, expected.map(|(path, is_only_read, appends)| (path.to_owned(), is_only_read, appends)));
        let revised = Image::read(&directory.path().join("files.img"), ImageKind::Files).unwrap();
        let regs = revised.messages.iter().map(|message| FileEntry::decode(&message[..]).unwrap().reg.unwrap());
        let sizes: Vec<_> = regs.map(|reg| (reg.id, reg.size, reg.pos)).collect();
        assert_eq!(sizes, [(1, None, 5), (2, None, 77), (3, Some(10), 5), (4, Some(10), 5)]);
        assert!(revised.messages.iter().all(|message| message.windows(4).any(|part| part == [0x9a, 0x06, 0x01, b'x'])));
    }
}
