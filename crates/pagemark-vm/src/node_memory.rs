//! The memory of machines that run again on one node, from checkpoints of one run: a file on the
//! node has the memory of one of the checkpoints, the base. Each QEMU maps it privately. So only
//! what differs from the base is read from the repository, and the host's memory holds once what
//! they have in common.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::unistd::geteuid;
use pagemark::repository::SpaceRecord;
use pagemark::{ByteCount, ContentId, PageNumber, PageTree, Store};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::images::copy_pages;

/// Blocks that are shorter are read whole.
const MIN_BLOCK: ByteCount = ByteCount::new(1 << 20);

/// A checkpoint may differ from the base by the quotient of its pages and this number. Where it
/// differs by more, it becomes the base.
const BASE_SHARE: u64 = 4;

/// How long a file is kept that no interval uses.
const UNUSED_LIMIT: Duration = Duration::from_secs(24 * 3600);

/// A directory of this node.
#[derive(Debug)]
pub(crate) struct NodeMemory {
    directory: PathBuf,
}

/// The file of a base, and the pages that differ from it.
pub(crate) struct Base {
    pub(crate) file: File,
    pub(crate) changed: Vec<(PageNumber, ContentId)>,
}

impl NodeMemory {
    /// Opens the directory, which is made if it is missing. It must be this user's alone: whoever
    /// can write to its files has the machines.
    pub(crate) fn open(directory: &Path) -> Result<NodeMemory> {
        let failed = |error| Error::of(ErrorKind::System, "use the directory", path(directory), error);
        match DirBuilder::new().mode(0o700).create(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
        let found = fs::symlink_metadata(directory).map_err(failed)?;
        if !found.is_dir() || found.uid() != geteuid().as_raw() || found.mode() & 0o022 != 0 {
            let reason = "is not a directory that only this user can write to";
            return Err(Error::about(ErrorKind::System, path(directory), reason).help("name another directory"));
        }
        Ok(NodeMemory { directory: directory.to_owned() })
    }

    /// The base of a block. None for one that is not worth a file.
    pub(crate) fn base(
        &self,
        space: &SpaceRecord,
        bytes: ByteCount,
        store: &(dyn Store + Sync),
    ) -> Result<Option<Base>> {
        if bytes < MIN_BLOCK {
            return Ok(None);
        }
        let failed = |error| Error::of(ErrorKind::System, "keep memory in", path(&self.directory), error);
        // One process at a time looks for a base, and makes it where there is none: others share it.
        let lock = File::options().write(true).create(true).truncate(false).open(self.directory.join("lock"));
        let lock = lock.map_err(failed)?;
        lock.lock().map_err(failed)?;
        let kind = format!("{:016x}-{}", bytes.get(), name(&space.label));
        for (root, file) in self.files(&kind).map_err(failed)? {
            // Without an error, its checkpoint is of this repository, and was not pruned.
            let Ok(changed) = differing(root, space.root, store) else { continue };
            if changed.len() as u64 <= space.pages / BASE_SHARE {
                let base = File::open(&file).map_err(failed)?;
                // It is in use: the file is one of the last to be removed.
                fs::File::options()
                    .append(true)
                    .open(&file)
                    .and_then(|file| file.set_modified(SystemTime::now()))
                    .map_err(failed)?;
                return Ok(Some(Base { file: base, changed }));
            }
        }
        self.remove_unused().map_err(failed)?;
        let file = self.write(&kind, space, bytes, store)?;
        Ok(Some(Base { file, changed: Vec::new() }))
    }

    /// The files of blocks of this kind, the last used first, with the roots of their trees.
    fn files(&self, kind: &str) -> io::Result<Vec<(ContentId, PathBuf)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let root = root_of(&entry.file_name(), kind);
            // Another process may have removed it.
            if let (Some(root), Ok(metadata)) = (root, entry.metadata()) {
                found.push((metadata.modified()?, root, entry.path()));
            }
        }
        found.sort_unstable_by_key(|(modified, ..)| std::cmp::Reverse(*modified));
        Ok(found.into_iter().map(|(_, root, path)| (root, path)).collect())
    }

    /// Removes files that were not completed, and those that nobody has used for long. A QEMU that
    /// has one mapped keeps it. What is not a file of a base stays: the directory may be any.
    fn remove_unused(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            let unused = entry.metadata()?.modified()?.elapsed().is_ok_and(|age| age > UNUSED_LIMIT);
            let name = entry.file_name().to_string_lossy().into_owned();
            let (name, is_partial) = name.strip_suffix(PARTIAL).map_or((&*name, false), |name| (name, true));
            if (is_partial || unused) && is_of_base(name) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Writes the file of a base, whole or not at all.
    fn write(&self, kind: &str, space: &SpaceRecord, bytes: ByteCount, store: &(dyn Store + Sync)) -> Result<File> {
        let wanted = self.directory.join(format!("{kind}-{}", space.root));
        let partial = self.directory.join(format!("{kind}-{}{PARTIAL}", space.root));
        let failed = |error| Error::of(ErrorKind::System, "write", path(&partial), error);
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&partial).map_err(failed)?;
        file.set_permissions(Permissions::from_mode(0o600)).map_err(failed)?;
        file.set_len(ByteCount::of_pages(bytes.pages_rounded_up()).get()).map_err(failed)?;
        let tree = PageTree::load(space.root, store)?;
        let (targets, ids): (Vec<PageNumber>, Vec<ContentId>) = tree.iter().unzip();
        if targets.last().is_some_and(|last| last.get() >= bytes.pages_rounded_up()) {
            return Err(Error::damaged(format!("the memory block {} has pages behind its end", space.label)));
        }
        let write = |page: PageNumber, content: &[u8]| file.write_all_at(content, page.address().get());
        copy_pages(store, &ids, &targets, &write)?.map_err(failed)?;
        fs::rename(&partial, &wanted).map_err(failed)?;
        File::open(&wanted).map_err(failed)
    }
}

/// The end of the name of a file that is being written.
const PARTIAL: &str = ".partial";

/// The pages that a later tree has otherwise, with their content there.
fn differing(from: ContentId, to: ContentId, store: &dyn Store) -> Result<Vec<(PageNumber, ContentId)>> {
    let mut changed = Vec::new();
    PageTree::diff(store, from, to, &mut |page, _, id| {
        changed.push((page, id));
        Ok(())
    })?;
    Ok(changed)
}

/// The root in the name of a file of this kind.
fn root_of(file: &OsStr, kind: &str) -> Option<ContentId> {
    ContentId::from_hex(file.to_str()?.strip_prefix(kind)?.strip_prefix('-')?)
}

/// True for the name of a file of any base: a length, a block, and a root.
fn is_of_base(name: &str) -> bool {
    let parts: Vec<&str> = name.split('-').collect();
    let is_length = |text: &str| text.len() == 16 && u64::from_str_radix(text, 16).is_ok();
    matches!(parts[..], [length, _, root] if is_length(length) && ContentId::from_hex(root).is_some())
}

/// The name of a block as part of the name of a file.
fn name(label: &str) -> String {
    label.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

fn path(path: &Path) -> Object {
    Object::Image(path.to_owned())
}

#[cfg(test)]
mod tests {
    use pagemark::repository::SpaceKind;
    use pagemark::{Kind, MemoryStore, PAGE_SIZE};

    use super::*;

    const BYTES: ByteCount = ByteCount::new(1 << 20);

    /// A block of 256 pages, of which some are of another content than 1.
    fn block(store: &mut MemoryStore, others: u64) -> SpaceRecord {
        let mut tree = PageTree::new();
        for page in 0..256u64 {
            let id = store.put(Kind::Page, &[if page < others { 2 } else { 1 }; PAGE_SIZE]).unwrap();
            tree.set(PageNumber::new(page), id);
        }
        let root = tree.save(store).unwrap();
        let kind = SpaceKind::RamBlock { bytes: BYTES };
        SpaceRecord { id: 0, label: "pc.ram".into(), kind, mappings: Vec::new(), pages: 256, root }
    }

    fn page(file: &File, page: u64) -> u8 {
        let mut content = [0];
        file.read_exact_at(&mut content, page * PAGE_SIZE as u64).unwrap();
        content[0]
    }

    #[test]
    fn what_a_base_has_is_read_once() {
        let directory = tempfile::tempdir().unwrap();
        let memory = NodeMemory::open(&directory.path().join("new")).unwrap();
        let mut store = MemoryStore::new();
        let blocks = [0, 3, 200].map(|others| block(&mut store, others));
        let base = |space: &SpaceRecord, store: &MemoryStore| memory.base(space, BYTES, store).unwrap().unwrap();
        let first = base(&blocks[0], &store);
        assert_eq!((first.changed.len(), page(&first.file, 0)), (0, 1));
        let second = base(&blocks[1], &store);
        assert_eq!(second.changed.iter().map(|(page, _)| page.get()).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(page(&second.file, 0), 1, "it is that of the base");
        let third = base(&blocks[2], &store);
        assert_eq!((third.changed.len(), page(&third.file, 0)), (0, 2), "too much differs");
        assert_eq!(base(&blocks[1], &store).changed.len(), 3, "the first base is still there");
        // A base of another repository, whose trees this one does not have.
        let mut other = MemoryStore::new();
        let block = block(&mut other, 1);
        assert_eq!(base(&block, &other).changed.len(), 0);
        assert!(memory.base(&block, ByteCount::new(4096), &other).unwrap().is_none(), "short");
    }

    #[test]
    fn files_that_nobody_uses_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let memory = NodeMemory::open(directory.path()).unwrap();
        let mut store = MemoryStore::new();
        memory.base(&block(&mut store, 0), BYTES, &store).unwrap();
        let files = || memory.files(&format!("{:016x}-pc_ram", BYTES.get())).unwrap();
        let old = SystemTime::now() - UNUSED_LIMIT * 2;
        File::options().append(true).open(&files()[0].1).unwrap().set_modified(old).unwrap();
        let partial = PathBuf::from(format!("{}{PARTIAL}", files()[0].1.display()));
        let others = ["x.partial", "notes", "0000000000100000-pc_ram"].map(|name| directory.path().join(name));
        for path in others.iter().chain([&partial]) {
            fs::write(path, "").unwrap();
            File::options().append(true).open(path).unwrap().set_modified(old).unwrap();
        }
        memory.base(&block(&mut store, 255), BYTES, &store).unwrap();
        assert_eq!(files().len(), 1);
        assert!(!partial.exists() && others.iter().all(|other| other.exists()), "what is not ours stays");
    }

    #[test]
    fn a_directory_of_others_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let open = |mode| {
            fs::set_permissions(directory.path(), Permissions::from_mode(mode)).unwrap();
            NodeMemory::open(directory.path())
        };
        assert!(open(0o700).is_ok() && open(0o777).is_err() && open(0o720).is_err());
        let link = directory.path().join("link");
        fs::set_permissions(directory.path(), Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::symlink(directory.path(), &link).unwrap();
        assert!(NodeMemory::open(&link).is_err());
        assert!(NodeMemory::open(Path::new("/nowhere/else")).is_err());
    }
}
