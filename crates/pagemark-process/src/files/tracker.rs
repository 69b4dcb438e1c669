//! Tracks the content of the target's files: what changed since the last checkpoint.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use pagemark::repository::FileRecord;
use pagemark::{Address, Blob, ByteCount, PAGE_SIZE, PageNumber, PageTree, RangeSet, Store};
use pagemark_trace::error::{Error, ErrorKind, Object, Result};

use super::encode_path;
use super::list::{Key, OpenFile, SharedMapping, is_at};
use super::scan::{Fingerprints, Page, pages, sample_holds, scan};
use super::users::Users;
use super::writers::{FrozenMembers, Inode, writers_outside};

/// The addresses that each process has written since the previous call of the [`FileTracker`]. A
/// process whose writes are unknown is not in the map.
pub type Written = HashMap<i32, RangeSet>;

/// Tracks the content of files from one checkpoint to the next, so that the cost of a checkpoint
/// depends on what changed.
///
/// In every checkpoint: [`FileTracker::precopy`] any number of times while the target runs;
/// [`FileTracker::freeze_copy`] while it is frozen; [`FileTracker::finish`] when it runs again.
///
/// A file whose times and size are unchanged is not opened. Of a file that only grows by appending,
/// the new tail is read, and some sample pages of the rest, to notice that it was replaced. Any
/// other file is read whole, except holes, and compared by a fingerprint of each page, so that only
/// changed pages are held in memory and stored; reading takes 1 to 3 µs per page, and happens in
/// the freeze if the file changed since the pre-copy.
///
/// Changes by other programs are noticed like changes by the target. One change goes unnoticed: an
/// append-only file is truncated and written again to a greater length, with the same content in
/// all sample pages. Memory: 16 bytes per page of the files, and the page tree.
///
/// If the stored content is lost (a commit failed), call [`FileTracker::forget`].
pub struct FileTracker {
    held: HashMap<Key, TrackedFile>,
    /// The files of the checkpoint in progress.
    frozen: Vec<OpenFile>,
    /// When the processes that write outputs were listed last.
    listed_at: Option<Instant>,
    /// In whose name closed files are opened.
    users: Users,
}

impl Default for FileTracker {
    fn default() -> FileTracker {
        let users = Users::this_process();
        FileTracker { held: HashMap::new(), frozen: Vec::new(), listed_at: None, users }
    }
}

/// Cost of copying the files while the target was frozen.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CopyCost {
    /// Number of files that were read.
    pub read_files: u64,
    /// Number of bytes read from them.
    pub read_bytes: u64,
    /// Number of changed pages, held in memory until [`FileTracker::finish`].
    pub changed_pages: u64,
}

impl FileTracker {
    /// A tracker without files.
    pub fn new() -> FileTracker {
        FileTracker::default()
    }

    /// Opens closed files in the name of these users from now on. Until then, this process opens
    /// them with its own rights.
    pub(crate) fn set_users(&mut self, users: Users) {
        self.users = users;
    }

    /// The users that were set last.
    pub(crate) fn users(&self) -> &Users {
        &self.users
    }

    /// Reads and stores changes while the target runs, so that fewer are left for the freeze.
    /// Returns the number of bytes read.
    ///
    /// `written` must be collected before `files` are listed: the next `written` has the writes in
    /// between.
    ///
    /// # Errors
    /// [`ErrorKind::Store`]. A file that cannot be read is left for the freeze, which reports the
    /// error.
    pub fn precopy(&mut self, files: &[OpenFile], written: &Written, store: &mut dyn Store) -> Result<u64> {
        let mut read_bytes = 0;
        for file in files {
            let mut held = self.held.remove(&file.key()).unwrap_or_default();
            held.store_pending(&file.path, store)?;
            let TrackedFile { tree, known, seen, .. } = &mut held;
            let done = read_changes(seen, known, file, written, &self.users, &mut |page, content| {
                let id = store.put_changed(tree.get(page), content).map_err(super::store(&file.path))?;
                tree.set(page, id);
                Ok(())
            });
            match done {
                Ok(read) => {
                    read_bytes += read.unwrap_or(0);
                    held.truncate(file.size);
                    self.held.insert(file.key(), held);
                }
                // Dropped: it is unknown which of its pages were stored.
                Err(error) if [ErrorKind::System, ErrorKind::NotPermitted].contains(&error.kind()) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(read_bytes)
    }

    /// Reads the changes since the pre-copy, with the target frozen. `files` must be listed in the
    /// freeze. Later changes are not part of the checkpoint.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if a file cannot be read.
    pub fn freeze_copy(&mut self, files: &[OpenFile], written: &Written) -> Result<CopyCost> {
        let mut copied = CopyCost::default();
        self.frozen.clear();
        for file in files {
            let mut held = self.held.remove(&file.key()).unwrap_or_default();
            let TrackedFile { pending, known, seen, .. } = &mut held;
            let read = read_changes(seen, known, file, written, &self.users, &mut |page, content| {
                pending.numbers.push(page);
                pending.content.extend_from_slice(content);
                copied.changed_pages += 1;
                Ok(())
            })?;
            held.pending_size = Some(file.size);
            copied.read_files += u64::from(read.is_some());
            copied.read_bytes += read.unwrap_or(0);
            self.held.insert(file.key(), held);
        }
        self.frozen = files.to_vec();
        Ok(copied)
    }

    /// Stores the pages that [`FileTracker::freeze_copy`] read, and returns a record of each file
    /// at that time. Files that the target has no longer open are dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Store`].
    pub fn finish(&mut self, store: &mut dyn Store) -> Result<Vec<FileRecord>> {
        let mut records = Vec::with_capacity(self.frozen.len());
        let mut kept: HashMap<Key, TrackedFile> = HashMap::with_capacity(self.frozen.len());
        for file in std::mem::take(&mut self.frozen) {
            // A file may have several names.
            let Some(mut held) = self.held.remove(&file.key()).or_else(|| kept.remove(&file.key())) else { continue };
            held.store_pending(&file.path, store)?;
            records.push(FileRecord {
                path: encode_path(&file.path),
                content: Blob {
                    bytes: ByteCount::new(file.size),
                    root: held.tree.save(store).map_err(super::store(&file.path))?,
                },
                mode: file.mode,
                uid: file.uid,
                gid: file.gid,
                modified_unix_ns: file.mtime_ns,
                is_shared: held.is_shared || file.has_other_writer,
            });
            kept.insert(file.key(), held);
        }
        self.held = kept;
        Ok(records)
    }

    /// Finds out which files of the checkpoint in progress processes outside the tree can write,
    /// too. An output of that kind is not rolled back by a restore. Any other
    /// file in one of the directories `data` would not be consistent with the tree. The processes
    /// of the machine are listed only when a new output appears, and once a minute.
    ///
    /// # Errors
    /// [`ErrorKind::FileInUse`] if another process can write a file in `data` that is no output.
    /// [`ErrorKind::System`] if the processes cannot be listed.
    pub fn find_other_writers(&mut self, tree: &FrozenMembers, data: &[PathBuf]) -> Result<()> {
        const LISTING_INTERVAL: Duration = Duration::from_secs(60);
        let is_unknown = |file: &OpenFile| {
            let held = self.held.get(&file.key());
            file.is_output && held.is_some_and(|held| !held.is_shared && !held.is_known_own)
        };
        let is_due = self.listed_at.is_none_or(|listed| listed.elapsed() >= LISTING_INTERVAL);
        if !is_due && !self.frozen.iter().any(is_unknown) {
            return Ok(());
        }
        let is_data = |file: &OpenFile| data.iter().any(|directory| file.path.starts_with(directory));
        let files = self.frozen.iter().filter(|file| file.is_output || is_data(file));
        let files: HashMap<Inode, &OpenFile> = files.map(|file| ((file.dev, file.inode), file)).collect();
        let found = writers_outside(&files.keys().copied().collect(), tree)
            .map_err(Error::system("list the processes that write", Object::None))?;
        for (inode, file) in files {
            let writer = found.get(&inode);
            // The target may have removed the file since the freeze, and a new file got its inode number.
            let is_there = || is_at(&file.path, inode);
            if let (Some(writer), false) = (writer, file.is_output)
                && is_there()
            {
                let reason = format!("is open for writing by {}, which is not checkpointed", Object::command(*writer));
                return Err(Error::about(ErrorKind::FileInUse, Object::File(file.path.clone()), reason)
                    .help("the data directory must belong to the checkpointed processes alone"));
            }
            if let Some(held) = self.held.get_mut(&file.key()).filter(|_| file.is_output) {
                held.is_shared |= writer.is_some();
                held.is_known_own = !held.is_shared;
            }
        }
        self.listed_at = Some(Instant::now());
        Ok(())
    }

    /// Drops all state: the next checkpoint reads and stores every file again.
    pub fn forget(&mut self) {
        *self = FileTracker::default();
    }
}

/// A file as of its last reading.
#[derive(Default)]
struct TrackedFile {
    seen: Option<Attributes>,
    known: Fingerprints,
    tree: PageTree,
    pending: Pending,
    /// Size of the file when `pending` was read, bytes.
    pending_size: Option<u64>,
    /// True if the file is an output that processes outside the tree write too.
    is_shared: bool,
    /// True if no process outside the tree had the output open when the processes were listed last.
    is_known_own: bool,
}

/// Pages that were read in a freeze and are not stored yet.
#[derive(Default)]
struct Pending {
    numbers: Vec<PageNumber>,
    content: Vec<u8>,
}

/// Attributes of a file that reveal a change.
struct Attributes {
    size: u64,
    mtime_ns: i64,
    ctime_ns: i64,
    seen_ns: i64,
    mappings: Vec<SharedMapping>,
}

impl TrackedFile {
    /// Removes the pages after `size` bytes from the tree.
    fn truncate(&mut self, size: u64) {
        self.tree.clear(pages(size).end..PageNumber::MAX);
    }

    fn store_pending(&mut self, path: &Path, store: &mut dyn Store) -> Result<()> {
        let pending = std::mem::take(&mut self.pending);
        for (page, content) in pending.numbers.into_iter().zip(pending.content.as_chunks::<PAGE_SIZE>().0) {
            let id = store.put_changed(self.tree.get(page), content).map_err(super::store(path))?;
            self.tree.set(page, id);
        }
        if let Some(size) = self.pending_size.take() {
            self.truncate(size);
        }
        Ok(())
    }
}

/// Reads the parts of a file that may have changed since `seen` and emits the changed pages.
/// Returns the number of bytes read, or None if the file did not have to be opened.
fn read_changes(
    seen: &mut Option<Attributes>,
    known: &mut Fingerprints,
    file: &OpenFile,
    written: &Written,
    users: &Users,
    emit: &mut dyn FnMut(PageNumber, &Page) -> Result<()>,
) -> Result<Option<u64>> {
    // If this fails, the file is read whole the next time.
    let last = seen.take();
    let changed = last.as_ref().map_or(ChangedPart::Anything, |last| last.changed(file, written));
    let mut read_bytes = None;
    if changed != ChangedPart::Within(RangeSet::new()) {
        let opened = file.open(users)?;
        let whole = || RangeSet::from(Address::MIN..Address::new(file.size));
        let bytes = match changed {
            ChangedPart::Within(bytes) => bytes,
            ChangedPart::Anything => whole(),
            ChangedPart::From(old_size) => {
                if sample_holds(&opened.file, old_size, known).map_err(super::io("read", &file.path))? {
                    RangeSet::from(Address::new(old_size)..Address::new(file.size.max(old_size + 1)))
                } else {
                    whole()
                }
            }
        };
        known.truncate(pages(file.size).end);
        read_bytes = Some(scan(&opened, &file.path, file.size, &bytes, known, emit)?);
    }
    *seen = Some(Attributes::of(file));
    Ok(read_bytes)
}

/// The part of a file that may have changed.
#[derive(PartialEq, Eq)]
enum ChangedPart {
    /// At most these bytes.
    Within(RangeSet),
    /// At most the bytes from this offset on.
    From(u64),
    /// Any byte.
    Anything,
}

impl Attributes {
    fn of(file: &OpenFile) -> Attributes {
        let OpenFile { size, mtime_ns, ctime_ns, seen_ns, .. } = *file;
        Attributes { size, mtime_ns, ctime_ns, seen_ns, mappings: file.mappings.clone() }
    }

    fn changed(&self, file: &OpenFile, written: &Written) -> ChangedPart {
        let same = (self.size, self.mtime_ns, self.ctime_ns) == (file.size, file.mtime_ns, file.ctime_ns);
        match self.mapped(file, written) {
            Some(bytes) if same && !self.is_fresh() && !file.times_unreliable => ChangedPart::Within(bytes),
            Some(_) if file.append_only && file.size >= self.size && !file.times_unreliable => {
                ChangedPart::From(self.size)
            }
            _ => ChangedPart::Anything,
        }
    }

    /// True if the file changed so shortly before its attributes were read that a later change may
    /// have the same time.
    fn is_fresh(&self) -> bool {
        const TICK_NS: i64 = 20_000_000;
        const COARSE_NS: i64 = 2_000_000_000;
        let newest_ns = self.mtime_ns.max(self.ctime_ns);
        // Some file systems have a resolution of one or two seconds.
        let tick_ns = if newest_ns % 1_000_000_000 == 0 { COARSE_NS } else { TICK_NS };
        newest_ns > self.seen_ns.saturating_sub(tick_ns)
    }

    /// The bytes that were written through shared mappings; None if they are unknown.
    fn mapped(&self, file: &OpenFile, written: &Written) -> Option<RangeSet> {
        if !self.mappings.iter().all(|mapping| file.mappings.contains(mapping)) {
            // A mapping is gone, and the writes through it since the last call are unknown.
            return None;
        }
        let mut bytes = RangeSet::new();
        for SharedMapping { pid, addresses, offset } in &file.mappings {
            for part in written.get(pid)?.within(addresses.clone()) {
                let in_file = |address: Address| Address::new(*offset).saturating_add(address - addresses.start);
                bytes.insert(in_file(part.start)..in_file(part.end));
            }
        }
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::{self, File, OpenOptions};
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    use pagemark::MemoryStore;
    use pagemark_testing::assert_oracle;
    use proptest::prelude::*;

    use super::super::{FileAction, open_for_writing, put_back};
    use super::*;

    /// What this process has open below `directory`: the tests are their own target.
    fn open_below(directory: &Path) -> Vec<OpenFile> {
        let files = open_for_writing(&[own_pid()]).expect("our own files can be listed");
        files.into_iter().filter(|file| file.path.starts_with(directory)).collect()
    }

    /// Whether this process has the rights to list its mapped files.
    fn mapped_files_can_be_read() -> bool {
        let mut links = fs::read_dir("/proc/self/map_files").into_iter().flatten().flatten();
        links.next().is_some_and(|link| fs::read_link(link.path()).is_ok())
    }

    fn own_pid() -> i32 {
        std::process::id() as i32
    }

    fn tick() {
        std::thread::sleep(Duration::from_millis(30));
    }

    #[test]
    fn a_file_of_the_same_number_elsewhere_has_no_foreign_writer() {
        let (data, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = data.path().join("file");
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        let mut writer = std::process::Command::new("sleep");
        let mut writer = writer.arg("60").stdout(file.try_clone().unwrap()).spawn().unwrap();
        let mut tracker = FileTracker::new();
        tracker.freeze_copy(&open_below(data.path()), &Written::new()).unwrap();
        drop(file);
        let directories = [data.path().to_owned()];
        // This process, whose children would belong to it, is not in the tree.
        let tree = FrozenMembers::now(Vec::new());
        let there = tracker.find_other_writers(&tree, &directories);
        // Instead of a removed file and a new one that gets its number.
        fs::rename(&path, elsewhere.path().join("file")).unwrap();
        let gone = tracker.find_other_writers(&tree, &directories);
        writer.kill().unwrap();
        writer.wait().unwrap();
        assert_eq!(there.unwrap_err().kind(), ErrorKind::FileInUse);
        gone.unwrap();
    }

    #[derive(Clone, Debug)]
    enum Step {
        Append(usize, usize, u8),
        Overwrite(usize, u64, usize, u8),
        Cut(usize, u64),
        Move(usize),
        Close(usize),
        StartAgain(usize),
        Precopy,
        Wait,
        Checkpoint,
    }

    const FILES: usize = 3;

    fn step() -> impl Strategy<Value = Step> {
        let file = || 0..FILES;
        prop_oneof![
            6 => (file(), 0usize..9000, any::<u8>()).prop_map(|(file, length, byte)| Step::Append(file, length, byte)),
            4 => (file(), 0u64..40_000, 0usize..9000, any::<u8>())
                .prop_map(|(file, at, length, byte)| Step::Overwrite(file, at, length, byte)),
            2 => (file(), 0u64..3_000_000).prop_map(|(file, size)| Step::Cut(file, size)),
            1 => file().prop_map(Step::Move),
            1 => file().prop_map(Step::Close),
            1 => file().prop_map(Step::StartAgain),
            3 => Just(Step::Precopy),
            1 => Just(Step::Wait),
            4 => Just(Step::Checkpoint),
        ]
    }

    /// A program with some files: the first is only ever appended to, while it is open.
    struct Program {
        directory: PathBuf,
        files: [Option<(PathBuf, File)>; FILES],
        names: usize,
    }

    impl Program {
        fn create(&mut self, file: usize) {
            self.names += 1;
            let path = self.directory.join(format!("file{}", self.names));
            let mut options = OpenOptions::new();
            let options = match file {
                0 => options.append(true),
                1 => options.write(true),
                _ => options.read(true).write(true),
            };
            let opened = options.create(true).open(&path).unwrap();
            self.files[file] = Some((path, opened));
        }

        fn take(&mut self, step: &Step) {
            match *step {
                Step::Append(file, length, byte) => {
                    if let Some((_, open)) = &mut self.files[file] {
                        let end = open.metadata().unwrap().len();
                        let content = vec![byte; length];
                        if file == 0 { open.write_all(&content) } else { open.write_all_at(&content, end) }.unwrap();
                    }
                }
                Step::Overwrite(file, at, length, byte) if file != 0 => {
                    if let Some((_, open)) = &self.files[file] {
                        open.write_all_at(&vec![byte; length], at).unwrap();
                    }
                }
                Step::Cut(file, size) if file != 0 => {
                    if let Some((_, open)) = &self.files[file] {
                        open.set_len(size).unwrap();
                    }
                }
                Step::Move(file) => {
                    self.names += 1;
                    if let Some((path, _)) = &mut self.files[file] {
                        let new = self.directory.join(format!("file{}", self.names));
                        fs::rename(&path, &new).unwrap();
                        *path = new;
                    }
                }
                Step::Close(file) => self.files[file] = None,
                Step::StartAgain(file) => {
                    if let Some((path, _)) = self.files[file].take() {
                        fs::remove_file(path).unwrap();
                    }
                    self.create(file);
                }
                Step::Wait => tick(),
                _ => {}
            }
        }
    }

    proptest! {
        #![proptest_config(pagemark_testing::cases(64))]
        #[test]
        fn every_checkpoint_is_put_back_as_it_was(steps in prop::collection::vec(step(), 1..40)) {
            let directory = tempfile::tempdir().unwrap();
            let mut program = Program { directory: directory.path().to_path_buf(), files: [None, None, None], names: 0 };
            (0..FILES).for_each(|file| program.create(file));
            let (mut store, mut tracker) = (MemoryStore::new(), FileTracker::new());
            let mut checkpoints = Vec::new();
            for step in &steps {
                program.take(step);
                let nothing_mapped = Written::from([(own_pid(), RangeSet::new())]);
                match step {
                    Step::Precopy => {
                        tracker.precopy(&open_below(directory.path()), &nothing_mapped, &mut store).unwrap();
                    }
                    Step::Checkpoint => {
                        tracker.freeze_copy(&open_below(directory.path()), &nothing_mapped).unwrap();
                        let held: BTreeMap<PathBuf, Vec<u8>> = program.files.iter().flatten()
                            .map(|(path, _)| (path.clone(), fs::read(path).unwrap())).collect();
                        checkpoints.push((tracker.finish(&mut store).unwrap(), held));
                    }
                    _ => {}
                }
            }
            program.files = [None, None, None];
            let asides = tempfile::tempdir().unwrap();
            for (number, (records, held)) in checkpoints.iter().enumerate().rev() {
                prop_assert_eq!(records.len(), held.len());
                let before: BTreeMap<_, _> = held.keys().filter_map(|path| Some((path, fs::read(path).ok()?))).collect();
                for done in put_back(records, &[], &store, "job@1", asides.path()).unwrap().keep().unwrap() {
                    prop_assert_eq!(&fs::read(&done.path).unwrap(), &held[&done.path], "checkpoint {}", number);
                    match (before.get(&done.path), done.set_aside) {
                        (None, aside) => prop_assert_eq!((done.action, aside), (FileAction::Recreated, None)),
                        (Some(content), None) => prop_assert_eq!(content, &held[&done.path]),
                        (Some(content), Some(aside)) => prop_assert_eq!(content, &fs::read(aside).unwrap()),
                    }
                }
                let again = put_back(records, &[], &store, "job@1", asides.path()).unwrap().keep().unwrap();
                prop_assert!(again.iter().all(|done| done.action == FileAction::Untouched));
            }
        }
    }

    #[test]
    fn costs_what_changed() {
        let directory = tempfile::tempdir().unwrap();
        let mut log = OpenOptions::new().append(true).create(true).open(directory.path().join("log")).unwrap();
        let data =
            OpenOptions::new().write(true).create(true).truncate(true).open(directory.path().join("data")).unwrap();
        let content: Vec<u8> = (0..4_000_000u32).map(|n| (n / 5000) as u8 | 1).collect();
        log.write_all(&content).unwrap();
        data.write_all_at(&content, 0).unwrap();
        let (mut store, mut tracker, written) = (MemoryStore::new(), FileTracker::new(), Written::new());
        let mut checkpoint = |tracker: &mut FileTracker| {
            let copied = tracker.freeze_copy(&open_below(directory.path()), &written).unwrap();
            tracker.finish(&mut store).unwrap();
            copied
        };
        tick();
        let pages = content.len().div_ceil(PAGE_SIZE) as u64;
        assert_eq!(checkpoint(&mut tracker).changed_pages, 2 * pages);
        assert_eq!(checkpoint(&mut tracker), CopyCost::default());
        log.write_all(b"more").unwrap();
        let copied = checkpoint(&mut tracker);
        assert_eq!((copied.read_files, copied.changed_pages), (1, 1));
        assert!(copied.read_bytes <= ByteCount::PAGE.get(), "{copied:?}");
        tick();
        checkpoint(&mut tracker);
        data.write_all_at(b"x", 1_000_000).unwrap();
        let copied = checkpoint(&mut tracker);
        assert_eq!((copied.read_files, copied.changed_pages), (1, 1));
        tracker.forget();
        assert_eq!(checkpoint(&mut tracker).changed_pages, 2 * pages);
    }

    #[test]
    fn of_a_page_that_changes_again_and_again_what_changed_is_stored() {
        use pagemark::repository::{Cost, Manifest, Repository, TargetKind};

        const PAGES: u64 = 100;
        let directory = tempfile::tempdir().unwrap();
        let repository = Repository::open_or_create(&directory.path().join("repository")).unwrap();
        let files = tempfile::tempdir().unwrap();
        let path = files.path().join("data");
        let data = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
        let mut random = pagemark_testing::SplitMix(1);
        let words: Vec<u8> = (0..PAGES * 512).flat_map(|_| random.draw().to_le_bytes()).collect();
        data.write_all_at(&words, 0).unwrap();
        let (mut tracker, written) = (FileTracker::new(), Written::new());
        let mut checkpoint = || {
            tick();
            let mut writer = repository.writer("a test", Duration::from_secs(10)).unwrap();
            tracker.freeze_copy(&open_below(files.path()), &written).unwrap();
            let files = tracker.finish(&mut writer).unwrap();
            let content = files[0].content;
            let manifest = Manifest {
                job: "job".into(),
                sequence: 0,
                taken_unix_us: 0,
                command: Vec::new(),
                program: None,
                mechanism: pagemark::Mechanism::Full,
                kind: TargetKind::Memory,
                spaces: Vec::new(),
                files,
                state: Vec::new(),
                cost: Cost::default(),
            };
            let info = writer.commit(manifest).unwrap();
            let found = content.read_all(&repository.read("job", info.sequence).unwrap()).unwrap();
            assert_oracle!(found == fs::read(&path).unwrap(), "the checkpoint has other content of the file");
            info.written_bytes
        };
        let change = |byte: u8| (0..PAGES).for_each(|page| data.write_all_at(&[byte; 8], page * 4096 + 800).unwrap());
        let whole_bytes = PAGES * 4096;
        // New pages, and pages that have changed for the first time, are stored whole.
        assert!(checkpoint() > whole_bytes);
        change(1);
        assert!(checkpoint() > whole_bytes);
        for byte in 2..5 {
            change(byte);
            let written_bytes = checkpoint();
            assert!(written_bytes < whole_bytes / 10, "{written_bytes} bytes");
        }
    }

    #[test]
    fn a_log_that_was_replaced_in_place_is_noticed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let mut log = OpenOptions::new().append(true).create(true).open(&path).unwrap();
        log.write_all(&[1; 100_000]).unwrap();
        let (mut store, mut tracker, written) = (MemoryStore::new(), FileTracker::new(), Written::new());
        tracker.precopy(&open_below(directory.path()), &written, &mut store).unwrap();
        // As `logrotate` does with copytruncate.
        log.set_len(0).unwrap();
        log.write_all(&[2; 200_000]).unwrap();
        tracker.freeze_copy(&open_below(directory.path()), &written).unwrap();
        let records = tracker.finish(&mut store).unwrap();
        drop(log);
        fs::remove_file(&path).unwrap();
        let asides = tempfile::tempdir().unwrap();
        put_back(&records, &[], &store, "job@1", asides.path()).unwrap().keep().unwrap();
        assert_oracle!(fs::read(&path).unwrap() == [2; 200_000], "other content was put back");
    }

    #[test]
    fn writes_through_a_mapping_are_seen() {
        if !mapped_files_can_be_read() {
            pagemark_testing::skip!("reading /proc/self/map_files needs CAP_CHECKPOINT_RESTORE");
        }
        for place in [std::env::temp_dir(), PathBuf::from("/dev/shm")] {
            let directory = tempfile::tempdir_in(place).unwrap();
            let path = directory.path().join("mapped");
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
            file.set_len(ByteCount::of_pages(16).get()).unwrap();
            let mut memory = Mapped::new(&file);
            drop(file);
            let (mut store, mut tracker) = (MemoryStore::new(), FileTracker::new());
            let mut checkpoint = |written: &Written| {
                let files = open_below(directory.path());
                assert_eq!((files.len(), files[0].append_only), (1, false));
                let copied = tracker.freeze_copy(&files, written).unwrap();
                (copied, tracker.finish(&mut store).unwrap())
            };
            let start = memory.start();
            let written = |page: u64| {
                let page = Address::new(start).page() + page;
                Written::from([(own_pid(), RangeSet::from(page.addresses()))])
            };
            memory.bytes()[5 * PAGE_SIZE] = 1;
            tick();
            assert_eq!(checkpoint(&Written::new()).0.changed_pages, 1);
            memory.bytes()[6 * PAGE_SIZE] = 2;
            assert_eq!(checkpoint(&Written::new()).0.changed_pages, 1);
            tick();
            checkpoint(&Written::new());
            memory.bytes()[6 * PAGE_SIZE] = 3;
            let (copied, records) = checkpoint(&written(6));
            assert_eq!(copied.changed_pages, 1);
            let expected = memory.bytes().to_vec();
            memory.bytes()[7 * PAGE_SIZE] = 4;
            drop(memory);
            let asides = tempfile::tempdir().unwrap();
            let done = put_back(&records, &[], &store, "job@1", asides.path()).unwrap().keep().unwrap();
            assert_eq!(done[0].action, FileAction::Rewritten);
            assert_oracle!(fs::read(&path).unwrap() == expected, "other content was put back");
        }
    }

    /// A shared writable mapping of a whole file.
    struct Mapped {
        start: std::ptr::NonNull<std::ffi::c_void>,
        length: usize,
    }

    impl Mapped {
        fn new(file: &File) -> Mapped {
            use nix::sys::mman::{MapFlags, ProtFlags, mmap};
            let length = file.metadata().unwrap().len() as usize;
            let size = std::num::NonZeroUsize::new(length).unwrap();
            let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
            let start = unsafe { mmap(None, size, access, MapFlags::MAP_SHARED, file, 0) }.unwrap();
            Mapped { start, length }
        }

        fn start(&self) -> u64 {
            self.start.as_ptr() as u64
        }

        fn bytes(&mut self) -> &mut [u8] {
            // SAFETY: the mapping lives as long as `self`, is borrowed from it alone, and its file is not cut.
            unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.length) }
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            // SAFETY: made by `new`, and nothing borrows it any more.
            unsafe { nix::sys::mman::munmap(self.start, self.length) }.unwrap();
        }
    }
}
