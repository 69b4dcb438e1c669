//! The memory of machines that run again on one node, from checkpoints of one run: a file on the
//! node has the memory of one of the checkpoints, the base. Each QEMU maps it privately. So only
//! what differs from the base is read from the repository, and the host's memory holds once what
//! they have in common.
//!
//! In a file system in memory a base can have holes, where no machine has used a page yet: those
//! are filled when a machine first needs them. Elsewhere a base is written whole.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use nix::sys::statvfs::statvfs;
use nix::unistd::geteuid;
use pagemark::repository::{Checkpoint, SpaceKind, SpaceRecord};
use pagemark::{Address, ByteCount, ContentId, PAGE_SIZE, PageNumber, PageTree, RangeSet, Store};
use pagemark_linux::file_pages::FilePages;
use pagemark_linux::sparse::next_data;
use pagemark_vm::parts::{SharedPages, copy_pages};
use pagemark_vm::{Error, ErrorKind, Object, Result};

/// Blocks that are shorter are read whole.
pub(crate) const MIN_BLOCK: ByteCount = ByteCount::new(1 << 20);

/// A checkpoint may differ from the base by the quotient of its pages and this number. Where it
/// differs by more, it becomes the base.
const BASE_SHARE: u64 = 4;

/// How long a file is kept that no interval uses: on a disk, and in memory.
const UNUSED_LIMITS: (Duration, Duration) = (Duration::from_secs(24 * 3600), Duration::from_secs(3600));

/// Bytes of a file that are checked at a time.
const CHECKED_BYTES: usize = 1 << 20;

/// Where intervals share memory if nothing else is said, the better place first.
const PLACES: [&str; 2] = ["/dev/shm", "/var/tmp"];

/// A directory of this node.
#[derive(Debug)]
pub(crate) struct NodeMemory {
    directory: PathBuf,
    handle: File,
    /// True if it is in memory.
    is_in_memory: bool,
}

/// The file of a base, and the pages that differ from it.
pub(crate) struct Base {
    pub(crate) file: File,
    /// By which missing pages are filled. None if all are there.
    pub(crate) missing: Option<SharedPages>,
    is_lazy: bool,
    pub(crate) changed: Vec<(PageNumber, ContentId)>,
    /// The root of its tree.
    pub(crate) root: ContentId,
    /// Pages that were read for it.
    pub(crate) count: u64,
    path: PathBuf,
}

/// The directory in which intervals from a checkpoint share memory if nothing else is said. It is
/// in memory where that has room for all that the machine uses.
pub fn default_shared_directory(checkpoint: &Checkpoint) -> PathBuf {
    let is_memory = |space: &&SpaceRecord| matches!(space.kind, SpaceKind::RamBlock { .. });
    let pages: u64 = checkpoint.manifest.spaces.iter().filter(is_memory).map(|space| space.pages).sum();
    let has_room = statvfs(PLACES[0]).is_ok_and(|system| {
        let bytes = system.blocks_available().saturating_mul(system.fragment_size());
        bytes >= ByteCount::of_pages(pages).get()
    });
    let place = if has_room { PLACES[0] } else { PLACES[1] };
    format!("{place}/pagemark-simulate-{}", geteuid()).into()
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
        let flags = libc::O_DIRECTORY | libc::O_NOFOLLOW;
        let refused = || {
            let reason = "is not a directory that only this user can write to";
            Error::about(ErrorKind::System, path(directory), reason).help("name another directory")
        };
        let handle = match File::options().read(true).custom_flags(flags).open(directory) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ELOOP | libc::ENOTDIR)) => return Err(refused()),
            opened => opened.map_err(failed)?,
        };
        let found = handle.metadata().map_err(failed)?;
        if found.uid() != geteuid().as_raw() || found.mode() & 0o022 != 0 {
            return Err(refused());
        }
        let system = fstatfs(&handle).map_err(|error| failed(error.into()))?;
        let is_in_memory = system.filesystem_type() == TMPFS_MAGIC;
        Ok(NodeMemory { directory: directory.to_owned(), handle, is_in_memory })
    }

    /// The base of a block. None for one that is not worth a file. With `is_lazy` pages of it may
    /// be missing.
    pub(crate) fn base(
        &self,
        space: &SpaceRecord,
        bytes: ByteCount,
        store: &(dyn Store + Sync),
        is_lazy: bool,
    ) -> Result<Option<Base>> {
        if bytes < MIN_BLOCK {
            return Ok(None);
        }
        let failed = |error| Error::of(ErrorKind::System, "keep memory in", path(&self.directory), error);
        // One process at a time looks for a base, and makes it where there is none: others share it. No other
        // user can hold the lock.
        let lock = self.at("lock");
        let lock = File::options().write(true).create(true).truncate(false).mode(0o600).open(lock).map_err(failed)?;
        lock.lock().map_err(failed)?;
        self.remove_unused().map_err(failed)?;
        let kind = Kind { bytes, label: &space.label, is_lazy: is_lazy && self.is_in_memory };
        for (root, file) in self.files(&kind).map_err(failed)? {
            // Without an error, its checkpoint is of this repository, and was not pruned.
            let Ok(changed) = differing(root, space.root, bytes, store) else { continue };
            if changed.len() as u64 <= space.pages / BASE_SHARE {
                // It is in use: the file is one of the last to be removed.
                let used = File::options().append(true).open(&file);
                used.and_then(|file| file.set_modified(SystemTime::now())).map_err(failed)?;
                return self.opened(file, &kind, root, changed).map(Some);
            }
        }
        let pages = self.write(&kind, space, store)?;
        let mut base = self.opened(self.at(&kind.file_name(space.root)), &kind, space.root, Vec::new())?;
        base.count = pages;
        Ok(Some(base))
    }

    /// A path by which the directory is found that was checked, whatever has its name now.
    fn at(&self, name: &str) -> PathBuf {
        format!("/proc/self/fd/{}/{name}", self.handle.as_raw_fd()).into()
    }

    fn opened(
        &self,
        file: PathBuf,
        kind: &Kind<'_>,
        root: ContentId,
        changed: Vec<(PageNumber, ContentId)>,
    ) -> Result<Base> {
        let name = file.file_name().unwrap_or_default();
        let shown = self.directory.join(name);
        let failed = |error| Error::of(ErrorKind::System, "share memory by", path(&shown), error);
        let missing = match kind.is_lazy {
            true => {
                let file = File::options().read(true).write(true).open(&file).map_err(failed)?;
                let pages = FilePages::new(&file, kind.length()).map_err(failed)?;
                Some(SharedPages { path: shown.clone(), file, pages })
            }
            false => None,
        };
        // QEMU does not get one by which it can be written.
        let file = File::open(&file).map_err(failed)?;
        Ok(Base { file, missing, is_lazy: kind.is_lazy, changed, root, count: 0, path: shown })
    }

    /// The files of blocks of this kind, the last used first, with the roots of their trees.
    fn files(&self, kind: &Kind<'_>) -> io::Result<Vec<(ContentId, PathBuf)>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(self.at(""))? {
            let entry = entry?;
            let root = kind.root_of(&entry.file_name());
            // Another process may have removed it. One of another length is damaged.
            if let (Some(root), Ok(metadata)) = (root, entry.metadata())
                && metadata.len() == kind.length().get()
            {
                found.push((metadata.modified()?, root, entry.path()));
            }
        }
        found.sort_unstable_by_key(|(modified, ..)| std::cmp::Reverse(*modified));
        Ok(found.into_iter().map(|(_, root, path)| (root, path)).collect())
    }

    /// Removes files that were not completed, and those that nobody has used for long. A QEMU that
    /// has one mapped keeps it. What is not a file of a base stays: the directory may be any.
    fn remove_unused(&self) -> io::Result<()> {
        let limit = if self.is_in_memory { UNUSED_LIMITS.1 } else { UNUSED_LIMITS.0 };
        for entry in fs::read_dir(self.at(""))? {
            let entry = entry?;
            let Ok(metadata) = entry.metadata() else { continue };
            let unused = metadata.modified()?.elapsed().is_ok_and(|age| age > limit);
            let name = entry.file_name().to_string_lossy().into_owned();
            let (name, is_partial) = name.strip_suffix(PARTIAL).map_or((&*name, false), |name| (name, true));
            if (is_partial || unused) && is_of_base(name) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }

    /// Writes the file of a base, whole or not at all, or one whose pages are all missing. Returns
    /// the number of pages that were read for it.
    fn write(&self, kind: &Kind<'_>, space: &SpaceRecord, store: &(dyn Store + Sync)) -> Result<u64> {
        let name = kind.file_name(space.root);
        let (wanted, partial) = (self.at(&name), self.at(&format!("{name}{PARTIAL}")));
        let failed = |error| Error::of(ErrorKind::System, "write", path(&self.directory.join(&name)), error);
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&partial).map_err(failed)?;
        file.set_permissions(Permissions::from_mode(0o600)).map_err(failed)?;
        file.set_len(kind.length().get()).map_err(failed)?;
        let mut count = 0;
        if !kind.is_lazy {
            let tree = tree_of(space, kind.bytes, store)?;
            let (targets, ids): (Vec<PageNumber>, Vec<ContentId>) = tree.iter().unzip();
            let write = |page: PageNumber, content: &[u8]| file.write_all_at(content, page.address().get());
            copy_pages(store, &ids, &targets, &write)?.map_err(failed)?;
            count = ids.len() as u64;
        }
        fs::rename(&partial, &wanted).map_err(failed)?;
        Ok(count)
    }
}

impl Base {
    /// Removes the file if it is not what the checkpoint of the base says, and says so.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`]
    pub(crate) fn check(&self, checkpoint: &Checkpoint) -> Result<()> {
        let failed = |error| Error::of(ErrorKind::System, "read", path(&self.path), error);
        let tree = PageTree::load(self.root, checkpoint)?;
        let end = Address::MIN + ByteCount::new(self.file.metadata().map_err(failed)?.len());
        let mut checked = RangeSet::new();
        let mut at = Address::MIN;
        while at < end {
            let data = next_data(&self.file, at, end).map_err(failed)?;
            at = data.end;
            checked.insert(data);
        }
        // Otherwise the others are holes because no machine has used them.
        if !self.is_lazy {
            let pages = PageNumber::MIN..end.page_aligned_up().page();
            tree.range(pages).for_each(|(page, _)| checked.insert(page.addresses()));
        }
        let mut content = vec![0; CHECKED_BYTES];
        for range in checked.iter() {
            let mut at = range.start;
            while at < range.end {
                let length = (range.end - at).to_usize().min(CHECKED_BYTES);
                self.file.read_exact_at(&mut content[..length], at.get()).map_err(failed)?;
                for (page, held) in (at.page().get()..).zip(content[..length].as_chunks::<PAGE_SIZE>().0) {
                    if checkpoint.page_id(held) != tree.get(PageNumber::new(page)) {
                        // Where another process has removed it, it is not used again, either.
                        let _ = fs::remove_file(&self.path);
                        let reason = format!("was damaged at {:#x}, and is removed", page * PAGE_SIZE as u64);
                        let error = Error::about(ErrorKind::Damaged, path(&self.path), reason);
                        return Err(error.help("simulate the interval again"));
                    }
                }
                at += ByteCount::new(length as u64);
            }
        }
        Ok(())
    }
}

/// What bases of a block have in common.
struct Kind<'a> {
    bytes: ByteCount,
    label: &'a str,
    /// True if pages of them may be missing.
    is_lazy: bool,
}

impl Kind<'_> {
    fn length(&self) -> ByteCount {
        ByteCount::of_pages(self.bytes.pages_rounded_up())
    }

    /// The name of the file of the base with this root.
    fn file_name(&self, root: ContentId) -> String {
        let end = if self.is_lazy { LAZY } else { "" };
        format!("{:016x}-{}-{root}{end}", self.bytes.get(), name(self.label))
    }

    /// The root in the name of a file of this kind.
    fn root_of(&self, file: &OsStr) -> Option<ContentId> {
        let file = file.to_str()?;
        let (file, is_lazy) = file.strip_suffix(LAZY).map_or((file, false), |file| (file, true));
        let root = ContentId::from_hex(file.rsplit('-').next()?)?;
        (is_lazy == self.is_lazy && self.file_name(root).starts_with(file)).then_some(root)
    }
}

/// The tree of a block, whose pages lie in it.
pub(crate) fn tree_of(space: &SpaceRecord, bytes: ByteCount, store: &dyn Store) -> Result<PageTree> {
    let tree = PageTree::load(space.root, store)?;
    match tree.is_before(PageNumber::new(bytes.pages_rounded_up())) {
        true => Ok(tree),
        false => Err(Error::damaged(format!("the memory block {} has pages behind its end", space.label))),
    }
}

/// The end of the name of a file whose pages may be missing.
const LAZY: &str = ".lazy";

/// The end of the name of a file that is being written.
const PARTIAL: &str = ".partial";

/// The pages that a later tree of a block has otherwise, with their content there.
fn differing(
    from: ContentId,
    to: ContentId,
    bytes: ByteCount,
    store: &dyn Store,
) -> Result<Vec<(PageNumber, ContentId)>> {
    let (mut changed, mut is_longer) = (Vec::new(), false);
    PageTree::diff(store, from, to, &mut |page, _, id| {
        match page.get() < bytes.pages_rounded_up() {
            true => changed.push((page, id)),
            false => is_longer = true,
        }
        Ok(())
    })?;
    match is_longer {
        true => Err(Error::damaged(format!("the memory block with the tree {to} has pages behind its end"))),
        false => Ok(changed),
    }
}

/// True for the name of a file of any base: a length, a block, and a root.
fn is_of_base(name: &str) -> bool {
    let name = name.strip_suffix(LAZY).unwrap_or(name);
    let parts: Vec<&str> = name.split('-').collect();
    let is_length = |text: &str| text.len() == 16 && u64::from_str_radix(text, 16).is_ok();
    matches!(parts[..], [length, _, root] if is_length(length) && ContentId::from_hex(root).is_some())
}

/// The name of a block as part of the name of a file.
fn name(label: &str) -> String {
    label.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect()
}

fn path(path: &Path) -> Object {
    Object::File(path.to_owned())
}

#[cfg(test)]
mod tests {
    use pagemark::MemoryStore;
    use pagemark::repository::SpaceKind;

    use super::*;

    const BYTES: ByteCount = ByteCount::new(1 << 20);

    /// A block of 256 pages, of which some are of another content than 1.
    fn block(store: &mut MemoryStore, others: u64) -> SpaceRecord {
        let mut tree = PageTree::new();
        for page in 0..256u64 {
            let id = store.put(pagemark::Kind::Page, &[if page < others { 2 } else { 1 }; PAGE_SIZE]).unwrap();
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
        let base = |space: &SpaceRecord, store: &MemoryStore| memory.base(space, BYTES, store, false).unwrap().unwrap();
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
        assert!(memory.base(&block, ByteCount::new(4096), &other, false).unwrap().is_none(), "short");
    }

    /// Trees of a few nodes that name more pages than there is memory for their numbers.
    #[test]
    fn pages_behind_the_end_of_a_block_are_refused_before_they_are_listed() {
        let directory = tempfile::tempdir().unwrap();
        let memory = NodeMemory::open(directory.path()).unwrap();
        let mut store = MemoryStore::new();
        let good = block(&mut store, 0);
        memory.base(&good, BYTES, &store, false).unwrap();
        let mut trees = vec![store.put(pagemark::Kind::Page, &[3; PAGE_SIZE]).unwrap()];
        for level in 0..16 {
            let children = std::iter::repeat_n(trees[level].0, 16).flatten();
            let node: Vec<u8> = [level as u8, 0xff, 0xff].into_iter().chain(children).collect();
            trees.push(store.put(pagemark::Kind::Node, &node).unwrap());
        }
        // Three levels name 4096 pages.
        for root in [trees[3], trees[16]] {
            let hostile = SpaceRecord { root, pages: u64::MAX, ..good.clone() };
            let error = memory.base(&hostile, BYTES, &store, false).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
        }
    }

    #[test]
    fn files_that_nobody_uses_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let memory = NodeMemory::open(directory.path()).unwrap();
        let mut store = MemoryStore::new();
        memory.base(&block(&mut store, 0), BYTES, &store, false).unwrap();
        let kind = Kind { bytes: BYTES, label: "pc.ram", is_lazy: false };
        let files = || memory.files(&kind).unwrap();
        let old = SystemTime::now() - UNUSED_LIMITS.0 * 2;
        File::options().append(true).open(&files()[0].1).unwrap().set_modified(old).unwrap();
        let partial = PathBuf::from(format!("{}{PARTIAL}", files()[0].1.display()));
        let others = ["x.partial", "notes", "0000000000100000-pc_ram"].map(|name| directory.path().join(name));
        for path in others.iter().chain([&partial]) {
            fs::write(path, "").unwrap();
            File::options().append(true).open(path).unwrap().set_modified(old).unwrap();
        }
        memory.base(&block(&mut store, 255), BYTES, &store, false).unwrap();
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
