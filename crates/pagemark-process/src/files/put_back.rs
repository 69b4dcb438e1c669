//! Puts back the content that files had at a checkpoint, in place, and sets their present content
//! aside.
//!
//! A file keeps its inode: a program that is restored compares it with the inode that it knows, as
//! SQLite does. The order of the steps makes the present content recoverable at every instant:
//!
//! 1. Every file is examined and its content compared; nothing is changed. Whatever can be known to
//!    fail fails here.
//! 2. The present content of the files that are going to change is copied to a directory of its own
//!    ([`asides`](super::asides)) and synced, with a description of it.
//! 3. The files are changed and synced. If this fails, or what follows it in the restore, the files
//!    are changed back from the copies.

use std::collections::{HashMap, HashSet};
use std::fs::{File, FileTimes, Metadata, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::statvfs::fstatvfs;
use nix::unistd::{AccessFlags, faccessat};
use pagemark::blob::{BlobReader, Difference};
use pagemark::repository::FileRecord;
use pagemark::{ByteCount, Store};

use super::asides::{AsideDirectory, AsideFile};
use super::change::{Change, ChangeKind, set_file_attributes};
use super::data_tree::TreeRecord;
use super::decode_path;
use super::directory::{Directory, Entry, UnsyncedDirectories};
use super::put_back_tree::TreePlan;
use super::writers::{inode, is_own_output, writers};
use crate::error::{Error, ErrorKind, Object, Result};

/// Pause before a process counts as a writer.
const WRITER_RETRY: Duration = Duration::from_millis(50);

/// A file that was put back.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PutBack {
    /// Its path.
    pub path: PathBuf,
    /// What was done to it.
    pub action: FileAction,
    /// Path of the copy of its previous content, if that differed from the checkpoint.
    pub set_aside: Option<PathBuf>,
}

/// What was done to a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileAction {
    /// Nothing: its content is that of the checkpoint, or it is an output that other programs write
    /// too.
    Untouched,
    /// Its content is that of the checkpoint; permissions or owner were put back.
    Permissions,
    /// It was gone, and was created again together with its directories.
    Recreated,
    /// The checkpoint's content was written into it.
    Rewritten,
    /// It is new since the checkpoint, in a directory that belongs to the job, and was removed.
    Removed,
}

/// The files that [`put_back`] has changed. The changes stay, unless they are undone.
#[derive(Debug)]
#[must_use = "the asides of changes that are neither kept nor undone count as those of an interrupted restore"]
pub struct ChangedFiles {
    files: Vec<PutBack>,
    /// In the order in which they were made.
    changes: Vec<Change>,
    aside: Option<AsideDirectory>,
}

/// Puts back the files of `records`, with their content from `store`, and makes `trees` as they
/// were: what is new in them is removed and kept among the asides. `checkpoint` is the name of the
/// checkpoint, such as `simulate@12`. The present content of the files that change is copied to a
/// new directory in `asides`.
///
/// # Errors
/// No file was changed, or all changes were undone, unless the kind is [`ErrorKind::NotUndone`].
/// [`ErrorKind::BadPath`]: the checkpoint names a file that cannot be put back at its path, and
/// what is in the way. [`ErrorKind::FileInUse`]: a process has a file open for writing.
/// [`ErrorKind::Store`], [`ErrorKind::System`]: content cannot be read, or a file cannot be
/// written.
pub fn put_back(
    records: &[FileRecord],
    trees: &[TreeRecord],
    store: &dyn Store,
    checkpoint: &str,
    asides: &Path,
) -> Result<ChangedFiles> {
    let mut names = HashSet::new();
    let mut paths = Vec::with_capacity(records.len());
    for record in records {
        let bad = |reason: &'static str| {
            Error::about(ErrorKind::BadPath, Object::Recorded(record.path.clone()), reason)
                .during("the checkpoint names the file")
                .help("nothing was changed; is the repository damaged?")
        };
        let path = checked(record).map_err(bad)?;
        if !names.insert(path.clone()) {
            return Err(bad("it is named twice"));
        }
        paths.push(path);
    }
    let plans = records.iter().zip(paths).map(|(record, path)| Plan::new(record, path, store));
    let plans = plans.collect::<Result<Vec<_>>>()?;
    let tree_plan = TreePlan::new(trees, &names)?;
    check_writers(&plans, &tree_plan)?;
    check_space(&plans)?;
    if plans.iter().all(|plan| matches!(plan.step, Step::Nothing)) && tree_plan.is_empty() {
        let files = plans.into_iter().map(|plan| plan.done(FileAction::Untouched, None)).collect();
        return Ok(ChangedFiles { files, changes: Vec::new(), aside: None });
    }
    let mut aside = AsideDirectory::create(asides, checkpoint, SystemTime::now())?;
    match set_aside(&plans, &tree_plan, &mut aside) {
        Ok(asides) => carry_out(&plans, &tree_plan, asides, aside),
        Err(error) => {
            aside.remove()?;
            Err(error)
        }
    }
}

/// The paths of the asides; None where there is no previous content.
struct Asides {
    /// The copy for each plan.
    copies: Vec<Option<PathBuf>>,
    /// The aside of each file that is removed.
    removed: Vec<Option<PathBuf>>,
}

/// Copies the present content of the files whose content changes, and describes all files that
/// change.
fn set_aside(plans: &[Plan<'_>], trees: &TreePlan, aside: &mut AsideDirectory) -> Result<Asides> {
    let (mut copies, mut files) = (Vec::with_capacity(plans.len()), Vec::new());
    for plan in plans {
        let (copy, present) = match &plan.step {
            Step::Nothing => {
                copies.push(None);
                continue;
            }
            Step::SetAttributes { present } => (None, Some(present)),
            Step::Create => (None, None),
            Step::Rewrite { present, .. } => {
                let file = plan.open_same(present, false)?;
                (Some(aside.copy(&plan.path, &file)?), Some(present))
            }
        };
        copies.push(copy.as_ref().map(|name| aside.path_of(name)));
        files.push(AsideFile::new(&plan.path, copy, present));
    }
    let removed = trees.set_aside(aside, &mut files)?;
    aside.describe(files)?;
    Ok(Asides { copies, removed })
}

fn carry_out(plans: &[Plan<'_>], trees: &TreePlan, asides: Asides, aside: AsideDirectory) -> Result<ChangedFiles> {
    let mut changed = ChangedFiles { files: Vec::with_capacity(plans.len()), changes: Vec::new(), aside: Some(aside) };
    match changed.carry_out(plans, trees, asides) {
        Ok(()) => Ok(changed),
        Err(error) => {
            changed.undo().map_err(|undo| undo.during(format!("{error}; then the change back failed:")))?;
            Err(error)
        }
    }
}

impl ChangedFiles {
    fn carry_out(&mut self, plans: &[Plan<'_>], trees: &TreePlan, asides: Asides) -> Result<()> {
        let (changes, mut unsynced, mut tree_files) = (&mut self.changes, UnsyncedDirectories::default(), Vec::new());
        trees.carry_out(asides.removed, changes, &mut unsynced, &mut tree_files)?;
        for (plan, copy) in plans.iter().zip(asides.copies) {
            let action = plan.carry_out(copy.as_deref(), changes, &mut unsynced)?;
            self.files.push(plan.done(action, copy));
        }
        trees.make_links(changes, &mut unsynced, &mut tree_files)?;
        trees.set_attributes(changes, &mut tree_files)?;
        self.files.append(&mut tree_files);
        unsynced.sync()
    }

    /// The files, in the order of the records; then what was removed or made in data trees.
    pub fn files(&self) -> &[PutBack] {
        &self.files
    }

    /// Keeps the changes. The asides stay until they are removed ([`asides::remove`]).
    ///
    /// [`asides::remove`]: super::asides::remove
    ///
    /// # Errors
    /// [`ErrorKind::System`]: the description of the asides could not be written; they count as
    /// those of an interrupted restore.
    pub fn keep(self) -> Result<Vec<PutBack>> {
        if let Some(aside) = self.aside {
            aside.complete()?;
        }
        Ok(self.files)
    }

    /// Makes the files as they were before. Then nothing is set aside any more.
    ///
    /// # Errors
    /// [`ErrorKind::NotUndone`]: a file could not be changed back; the asides stay.
    pub fn undo(self) -> Result<()> {
        let aside = self.aside.as_ref().map_or(Path::new("/"), AsideDirectory::path);
        let (mut failure, mut unsynced) = (None, UnsyncedDirectories::default());
        for change in self.changes.into_iter().rev() {
            // The others are changed back all the same.
            if let Err(error) = change.undo(aside, &mut unsynced) {
                failure.get_or_insert(error);
            }
        }
        failure.map_or(Ok(()), Err)?;
        unsynced.sync()?;
        self.aside.map_or(Ok(()), AsideDirectory::remove)
    }
}

/// A file to put back. All that can be checked is checked, and nothing is changed.
struct Plan<'a> {
    record: &'a FileRecord,
    path: PathBuf,
    content: BlobReader<'a>,
    step: Step,
}

/// The step that is left to do for a file.
enum Step {
    /// None: it is as in the checkpoint.
    Nothing,
    /// Set owner and mode.
    SetAttributes { present: Metadata },
    /// Write the content in place.
    Rewrite { present: Metadata, difference: Difference },
    /// Create the file and missing directories above it.
    Create,
}

impl<'a> Plan<'a> {
    fn new(record: &'a FileRecord, path: PathBuf, store: &'a dyn Store) -> Result<Plan<'a>> {
        let content = record.content.reader(store).map_err(super::store(&path))?;
        let mut plan = Plan { record, path, content, step: Step::Nothing };
        let (directory, missing) = Directory::open(plan.parent())?;
        let entry = Entry::in_directory(directory, &plan.path);
        let present = if missing.is_empty() { entry.present().map_err(plan.io("examine"))? } else { None };
        let Some(present) = present else {
            // Opened for reading, the checkpoint's content is known to be there.
            plan.content.check().map_err(super::store(&plan.path))?;
            let (access, flags) = (AccessFlags::W_OK | AccessFlags::X_OK, nix::fcntl::AtFlags::AT_EACCESS);
            faccessat(entry.directory(), ".", access, flags).map_err(|errno| plan.io("create")(errno.into()))?;
            plan.step = Step::Create;
            return Ok(plan);
        };
        if !present.is_file() {
            let reason = "was a regular file at the checkpoint and is something else now";
            return Err(Error::about(ErrorKind::BadPath, Object::File(plan.path), reason)
                .help("nothing was changed; move it away and try again"));
        }
        let readable = entry.open(false).map_err(plan.io("open"))?;
        let present = readable.metadata().map_err(plan.io("examine"))?;
        if record.is_shared || is_own_output(&present) {
            return Ok(plan);
        }
        let difference = plan.content.difference(&readable).map_err(plan.content_error("compare"))?;
        let held = (present.mode() & 0o7777, present.uid(), present.gid());
        if !difference.is_empty() {
            entry.open(true).map_err(plan.io("open for writing"))?;
            plan.step = Step::Rewrite { present, difference };
        } else if held != (record.mode, record.uid, record.gid) {
            plan.step = Step::SetAttributes { present };
        }
        Ok(plan)
    }

    fn done(&self, action: FileAction, set_aside: Option<PathBuf>) -> PutBack {
        PutBack { path: self.path.clone(), action, set_aside }
    }

    /// The path of the file's directory.
    fn parent(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// Opens the file, which must be the one that was examined.
    fn open_same(&self, present: &Metadata, write: bool) -> Result<File> {
        Entry::of(&self.path)?.open_same(inode(present), write).map_err(self.io("open"))
    }

    /// Changes the file. What was changed is added to `changes`, also if this fails. `copy` has the
    /// present content.
    fn carry_out(
        &self,
        copy: Option<&Path>,
        changes: &mut Vec<Change>,
        unsynced: &mut UnsyncedDirectories,
    ) -> Result<FileAction> {
        let mut change = |kind| changes.push(Change { path: self.path.clone(), kind });
        match &self.step {
            Step::Nothing => Ok(FileAction::Untouched),
            Step::SetAttributes { present } => {
                let file = self.open_same(present, false)?;
                change(ChangeKind::FileAttributes { before: present.clone() });
                self.give_owner_and_mode(&file)?;
                Ok(FileAction::Permissions)
            }
            Step::Rewrite { present, difference } => {
                // There is a copy for each file that is rewritten.
                let Some(copy) = copy else { return Ok(FileAction::Untouched) };
                let file = self.open_same(present, true)?;
                change(ChangeKind::Content { copy: copy.to_owned(), before: present.clone() });
                self.content.apply(difference, &file).map_err(self.content_error("write"))?;
                self.give_attributes(&file)?;
                file.sync_all().map_err(self.io("sync"))?;
                Ok(FileAction::Rewritten)
            }
            Step::Create => {
                let entry = Entry::in_directory(self.make_directories(changes, unsynced)?, &self.path);
                let options = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(entry.path());
                let file = options.map_err(self.io("create"))?;
                let created = file.metadata().map_err(self.io("examine"))?;
                let kind = ChangeKind::CreatedFile { inode: inode(&created) };
                changes.push(Change { path: self.path.clone(), kind });
                unsynced.add(entry.directory());
                self.content.copy_to_file(&file).map_err(self.content_error("write"))?;
                self.give_attributes(&file)?;
                file.sync_all().map_err(self.io("sync"))?;
                Ok(FileAction::Recreated)
            }
        }
    }

    /// Makes the missing directories above the file, one in the other. Returns the last.
    fn make_directories(&self, changes: &mut Vec<Change>, unsynced: &mut UnsyncedDirectories) -> Result<Directory> {
        let (mut directory, missing) = Directory::open(self.parent())?;
        for name in missing {
            unsynced.add(&directory);
            let path = directory.path().join(&name);
            let made = directory.make(&name, self.record.uid, self.record.gid);
            if directory.path() == path || made.is_ok() {
                changes.push(Change { path: path.clone(), kind: ChangeKind::CreatedDirectory });
            }
            made.map_err(super::io("create the directory", path))?;
        }
        Ok(directory)
    }

    fn give_attributes(&self, file: &File) -> Result<()> {
        self.give_owner_and_mode(file)?;
        let since = Duration::from_nanos(self.record.modified_unix_ns.unsigned_abs());
        let modified = if self.record.modified_unix_ns < 0 { UNIX_EPOCH - since } else { UNIX_EPOCH + since };
        file.set_times(FileTimes::new().set_modified(modified)).map_err(self.io("set the time of"))
    }

    fn give_owner_and_mode(&self, file: &File) -> Result<()> {
        let FileRecord { mode, uid, gid, .. } = *self.record;
        set_file_attributes(file, uid, gid, mode).map_err(self.io("set the owner and the mode of"))
    }

    fn io(&self, operation: &'static str) -> impl FnOnce(io::Error) -> Error + use<> {
        super::io(operation, self.path.clone())
    }

    /// For `map_err`: `operation` on the file failed, or the content could not be read from the
    /// store.
    fn content_error(&self, operation: &'static str) -> impl FnOnce(pagemark::Error) -> Error + use<> {
        super::content(operation, self.path.clone())
    }
}

/// A file whose content would change must not have a writer: it would work on with content that is
/// not its own.
fn check_writers(plans: &[Plan<'_>], trees: &TreePlan) -> Result<()> {
    let removed = trees.removed_files();
    let mut changing: HashMap<_, _> = removed.map(|(path, file)| (inode(file), path)).collect();
    for plan in plans {
        if let Step::Rewrite { present, .. } = &plan.step {
            changing.insert(inode(present), &plan.path);
        }
    }
    // This process may have them open, too.
    let own = [std::process::id() as i32];
    let list = || {
        let files = changing.keys().copied().collect();
        writers(&files, &own).map_err(Error::system("list the processes that write", Object::None))
    };
    let mut found = list()?;
    if !found.is_empty() {
        // A process that starts a program has the descriptors of its parent for an instant.
        std::thread::sleep(WRITER_RETRY);
        let again = list()?;
        found.retain(|file, _| again.contains_key(file));
    }
    match found.into_iter().next() {
        Some((file, pid)) => {
            let path = changing.get(&file).map_or(PathBuf::new(), |path| path.to_path_buf());
            let reason = format!("is open for writing by {}", Object::command(pid));
            Err(Error::about(ErrorKind::FileInUse, Object::File(path), reason)
                .help("nothing was changed; end that process and try again"))
        }
        None => Ok(()),
    }
}

/// The file systems must have room for what the files grow by.
fn check_space(plans: &[Plan<'_>]) -> Result<()> {
    let mut needed: HashMap<u64, (ByteCount, &Path)> = HashMap::new();
    for plan in plans {
        // The file may be a mount point, on another file system than its directory.
        let (open, pages) = match &plan.step {
            Step::Rewrite { present, difference } => (plan.open_same(present, false)?, difference.unallocated_pages),
            Step::Create => {
                let (directory, _) = Directory::open(plan.parent())?;
                let open = directory.open_self().map_err(plan.io("open the directory of"))?;
                (open, plan.content.allocated_pages())
            }
            Step::Nothing | Step::SetAttributes { .. } => continue,
        };
        let device = open.metadata().map_err(plan.io("examine"))?.dev();
        let space = fstatvfs(&open);
        let space = space.map_err(|errno| plan.io("examine the file system of")(errno.into()))?;
        let (sum, _) = needed.entry(device).or_insert((ByteCount::ZERO, &plan.path));
        *sum += ByteCount::of_pages(pages);
        let free = ByteCount::new(space.blocks_available().saturating_mul(space.fragment_size()));
        if *sum > free {
            let reason = format!("needs {} more bytes on its file system, which has {}", sum.get(), free.get());
            return Err(Error::about(ErrorKind::NoSpace, Object::File(plan.path.clone()), reason)
                .help("nothing was changed; free some space and try again"));
        }
    }
    Ok(())
}

/// Decodes the path of a record and checks that Pagemark can have written the record.
fn checked(record: &FileRecord) -> Result<PathBuf, &'static str> {
    let path = decode_path(&record.path).ok_or("its escapes are not right")?;
    check_path(&path)?;
    if i64::try_from(record.content.bytes.get()).is_err() {
        return Err("no file has that size");
    }
    Ok(path)
}

/// Checks that Pagemark can have recorded a path.
pub(super) fn check_path(path: &Path) -> Result<(), &'static str> {
    let bytes = path.as_os_str().as_bytes();
    if bytes.contains(&0) {
        return Err("it holds a zero byte");
    }
    if !bytes.starts_with(b"/") || bytes.ends_with(b"/") {
        return Err("it is not absolute, or ends with a slash");
    }
    // `components` drops single dots: a plain path is unchanged by it.
    let plain: PathBuf = path.components().collect();
    if plain.as_os_str() != path.as_os_str() || path.components().any(|part| part == Component::ParentDir) {
        return Err("it is not a plain path");
    }
    let in_devices = path.starts_with("/dev") && !path.starts_with("/dev/shm");
    if in_devices || path.starts_with("/proc") || path.starts_with("/sys") {
        return Err("no regular file is there");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::process::Command;

    use pagemark::{Blob, ByteCount, ContentId, MemoryStore, PageNumber, PageTree};

    use super::super::asides::{self, RestoreState};
    use super::super::encode_path;
    use super::*;

    /// A record of `content` at `path`, owned by whoever runs the test.
    fn record(path: &Path, content: &[u8], store: &mut MemoryStore) -> FileRecord {
        FileRecord {
            path: encode_path(path),
            content: Blob::write(store, &mut &*content).unwrap(),
            mode: 0o640,
            uid: nix::unistd::geteuid().as_raw(),
            gid: nix::unistd::getegid().as_raw(),
            modified_unix_ns: 1_234_567_890_123_456_789,
            is_shared: false,
        }
    }

    /// A directory of files, and one for asides.
    struct Directories {
        directory: tempfile::TempDir,
        asides: tempfile::TempDir,
    }

    impl Directories {
        fn new() -> Directories {
            Directories { directory: tempfile::tempdir().unwrap(), asides: tempfile::tempdir().unwrap() }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.directory.path().join(name)
        }

        fn change(&self, records: &[FileRecord], store: &MemoryStore) -> Result<ChangedFiles> {
            put_back(records, &[], store, "job@7", self.asides.path())
        }

        fn put_back(&self, records: &[FileRecord], store: &MemoryStore) -> Vec<PutBack> {
            self.change(records, store).unwrap().keep().unwrap()
        }

        /// Every name below the directory of files, with content or target and the attributes.
        fn state(&self) -> Vec<String> {
            let mut state = Vec::new();
            let mut directories = vec![self.directory.path().to_path_buf()];
            while let Some(directory) = directories.pop() {
                for entry in fs::read_dir(directory).unwrap() {
                    let path = entry.unwrap().path();
                    let metadata = fs::symlink_metadata(&path).unwrap();
                    let content = match metadata.file_type() {
                        kind if kind.is_file() => format!("{:?}", fs::read(&path).unwrap()),
                        kind if kind.is_symlink() => format!("{:?}", fs::read_link(&path).unwrap()),
                        _ => {
                            directories.push(path.clone());
                            String::new()
                        }
                    };
                    let time = if metadata.is_file() { metadata.modified().ok() } else { None };
                    state.push(format!("{path:?} {} {:o} {time:?} {content}", metadata.ino(), metadata.mode()));
                }
            }
            state.sort();
            state
        }

        fn asides(&self) -> Vec<RestoreState> {
            asides::list(self.asides.path()).unwrap().iter().map(|found| found.state).collect()
        }
    }

    #[test]
    fn a_file_is_put_back_in_place_and_its_present_content_is_kept() {
        let place = Directories::new();
        let path = place.at("file");
        let mut store = MemoryStore::new();
        fs::write(&path, b"").unwrap();
        let inode = fs::metadata(&path).unwrap().ino();
        for content in [&b"first"[..], b"second"] {
            fs::write(&path, content).unwrap();
            let then = record(&path, b"then", &mut store);
            let done = place.put_back(&[then], &store);
            let aside = done[0].set_aside.clone().unwrap();
            assert!(aside.starts_with(place.asides.path()) && aside.ends_with("1-file"), "{aside:?}");
            assert_eq!((done[0].action, fs::read(aside).unwrap()), (FileAction::Rewritten, content.to_vec()));
            assert_eq!(fs::read(&path).unwrap(), b"then");
        }
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!(
            (metadata.ino(), metadata.mode() & 0o7777, metadata.mtime(), metadata.mtime_nsec()),
            (inode, 0o640, 1_234_567_890, 123_456_789)
        );
        assert_eq!(place.state().len(), 1, "nothing else is in the directory");
        assert_eq!(place.asides(), [RestoreState::Complete; 2]);

        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let then = [record(&path, b"then", &mut store)];
        assert_eq!(place.put_back(&then, &store)[0].action, FileAction::Permissions);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
        assert_eq!(place.put_back(&then, &store)[0].action, FileAction::Untouched);
    }

    #[test]
    fn asides_are_made_on_another_file_system() {
        let place =
            Directories { directory: tempfile::tempdir_in("/dev/shm").unwrap(), asides: tempfile::tempdir().unwrap() };
        let mut store = MemoryStore::new();
        fs::write(place.at("shared"), [3; 10_000]).unwrap();
        let then = record(&place.at("shared"), &[4; 20_000], &mut store);
        let done = place.put_back(&[then], &store);
        assert_eq!(fs::read(done[0].set_aside.as_ref().unwrap()).unwrap(), [3; 10_000]);
        assert_eq!((place.state().len(), fs::read(place.at("shared")).unwrap().len()), (1, 20_000));
    }

    #[test]
    fn missing_directories_come_back() {
        let place = Directories::new();
        let mut store = MemoryStore::new();
        let paths = [place.at("a/b/file"), place.at("a/b/c/file")];
        let then = paths.each_ref().map(|path| record(path, &[7; 10_000], &mut store));
        let done = place.put_back(&then, &store);
        assert!(done.iter().all(|done| (done.action, &done.set_aside) == (FileAction::Recreated, &None)));
        assert!(paths.iter().all(|path| fs::read(path).unwrap() == [7; 10_000]));
    }

    #[test]
    fn a_file_with_further_names_keeps_them() {
        let place = Directories::new();
        let (path, second) = (place.at("file"), place.at("second"));
        fs::write(&path, [9; 9000]).unwrap();
        fs::hard_link(&path, &second).unwrap();
        let mut store = MemoryStore::new();
        let mut content = vec![0; 20_000];
        content[15_000] = 1;
        let then = record(&path, &content, &mut store);
        let done = place.put_back(&[then], &store);
        assert_eq!(done[0].action, FileAction::Rewritten);
        assert_eq!(fs::read(done[0].set_aside.as_ref().unwrap()).unwrap(), [9; 9000]);
        assert!(fs::read(&path).unwrap() == content && fs::read(&second).unwrap() == content);
        assert_eq!(fs::metadata(&path).unwrap().nlink(), 2);
    }

    #[test]
    fn a_mount_point_is_rewritten() {
        let place = Directories::new();
        let (path, below) = (place.at("file"), place.at("below"));
        fs::write(&path, b"covered").unwrap();
        fs::write(&below, b"now").unwrap();
        if let Err(error) = bind_for_this_thread(&below, &path) {
            pagemark_testing::skip!("mount in a namespace of its own: {error}");
        }
        let mut store = MemoryStore::new();
        let then = record(&path, b"then", &mut store);
        let done = place.put_back(&[then], &store);
        assert_eq!(done[0].action, FileAction::Rewritten);
        assert_eq!(fs::read(done[0].set_aside.as_ref().unwrap()).unwrap(), b"now");
        assert_eq!(fs::read(&below).unwrap(), b"then");
    }

    /// Mounts one file over another, for the running thread alone: nobody has to unmount it.
    fn bind_for_this_thread(from: &Path, to: &Path) -> io::Result<()> {
        use std::ffi::CString;
        let [from, to] = [from, to].map(|path| CString::new(path.as_os_str().as_bytes()).unwrap());
        let none = std::ptr::null();
        // SAFETY: the strings end with a zero and live longer than the calls; `none` stands for what is not
        // used.
        let failed = unsafe {
            libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) != 0
                || libc::mount(none, c"/".as_ptr(), none, libc::MS_PRIVATE | libc::MS_REC, none.cast()) != 0
                || libc::mount(from.as_ptr(), to.as_ptr(), none, libc::MS_BIND, none.cast()) != 0
        };
        if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    #[test]
    fn what_is_no_file_any_more_is_in_the_way_and_left_alone() {
        let place = Directories::new();
        let mut store = MemoryStore::new();
        fs::write(place.at("secret"), b"secret").unwrap();
        fs::write(place.at("file"), b"now").unwrap();
        symlink(place.at("secret"), place.at("link")).unwrap();
        fs::create_dir(place.at("folder")).unwrap();
        fs::create_dir(place.at("elsewhere")).unwrap();
        symlink("elsewhere", place.at("way")).unwrap();
        let before = place.state();
        for (wanted, in_the_way) in
            [("link", "link"), ("folder", "folder"), ("way/file", "way"), ("file/below", "file")]
        {
            let records = [("file2", "new"), (wanted, "then")];
            let records = records.map(|(name, content)| record(&place.at(name), content.as_bytes(), &mut store));
            let error = place.change(&records, &store).unwrap_err();
            assert_eq!(
                (error.kind(), error.object()),
                (ErrorKind::BadPath, &Object::File(place.at(in_the_way))),
                "{error}"
            );
            assert_eq!((place.state(), place.asides()), (before.clone(), vec![]));
        }
    }

    #[test]
    fn a_file_that_another_process_writes_is_left_alone_unless_it_is_a_shared_output() {
        let place = Directories::new();
        let path = place.at("log");
        let mut store = MemoryStore::new();
        fs::write(&path, b"now").unwrap();
        let log = OpenOptions::new().append(true).open(&path).unwrap();
        let mut writer = Command::new("sleep").arg("60").stdout(log).spawn().unwrap();
        let then = record(&path, b"then", &mut store);
        let before = place.state();
        let error = place.change(std::slice::from_ref(&then), &store).unwrap_err();
        assert_eq!((error.kind(), error.object()), (ErrorKind::FileInUse, &Object::File(path.clone())));
        assert!(error.to_string().contains(&format!("process {} (sleep)", writer.id())), "{error}");
        assert_eq!(place.state(), before);

        let shared = FileRecord { is_shared: true, ..then };
        assert_eq!(place.put_back(std::slice::from_ref(&shared), &store)[0].action, FileAction::Untouched);
        assert_eq!(place.state(), before);
        writer.kill().unwrap();
        writer.wait().unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(place.put_back(&[shared], &store)[0].action, FileAction::Recreated);
        assert_eq!(fs::read(path).unwrap(), b"then");
    }

    /// Files of every kind of change: the records, and the place with them.
    fn one_of_each(store: &mut MemoryStore) -> (Directories, Vec<FileRecord>) {
        let place = Directories::new();
        fs::write(place.at("same"), b"same").unwrap();
        fs::write(place.at("mode"), b"mode").unwrap();
        fs::write(place.at("short"), b"now").unwrap();
        let mut sparse = File::create(place.at("sparse")).unwrap();
        sparse.write_all(&[1; 50_000]).unwrap();
        sparse.set_len(1 << 20).unwrap();
        let contents: [(&str, &[u8]); 6] = [
            ("same", b"same"),
            ("mode", b"mode"),
            ("new/directory/file", b"new"),
            ("short", &[2; 30_000]),
            ("sparse", b"then"),
            ("new/other", b"other"),
        ];
        let records = contents.map(|(name, content)| record(&place.at(name), content, store));
        fs::set_permissions(place.at("same"), Permissions::from_mode(0o640)).unwrap();
        (place, records.to_vec())
    }

    #[test]
    fn changes_are_undone_exactly() {
        let mut store = MemoryStore::new();
        let (place, records) = one_of_each(&mut store);
        let before = place.state();
        let changed = place.change(&records, &store).unwrap();
        let kinds: Vec<_> = changed.files().iter().map(|file| file.action).collect();
        use FileAction::{Permissions, Recreated, Rewritten, Untouched};
        assert_eq!(kinds, [Untouched, Permissions, Recreated, Rewritten, Rewritten, Recreated]);
        assert_ne!(place.state(), before);
        assert_eq!(place.asides(), [RestoreState::InProgress]);
        changed.undo().unwrap();
        assert_eq!((place.state(), place.asides()), (before, vec![]));
    }

    /// Names the directory of a test for the process that it starts to be killed.
    const KILLED: &str = "PAGEMARK_TEST_PUT_BACK";

    const FILES: u8 = 6;

    /// The content that a file is given by turns.
    fn content(file: u8, turn: u8) -> Vec<u8> {
        vec![10 * turn + file; 100_000 + usize::from(turn) * 50_000]
    }

    /// The process that is killed: puts files back again and again.
    #[test]
    fn puts_files_back_until_it_is_killed() {
        let Some(directory) = std::env::var_os(KILLED).map(PathBuf::from) else { return };
        let mut store = MemoryStore::new();
        let path = |file| directory.join(format!("files/{file}"));
        let turns = [1, 2].map(|turn| -> Vec<_> {
            (0..FILES).map(|file| record(&path(file), &content(file, turn), &mut store)).collect()
        });
        fs::write(directory.join("ready"), b"").unwrap();
        for turn in turns.iter().cycle() {
            put_back(turn, &[], &store, "job@7", &directory.join("asides")).unwrap().keep().unwrap();
        }
    }

    #[test]
    fn killed_at_any_instant_the_present_content_is_recoverable() {
        const TRIALS: u64 = 40;
        let mut interrupted = 0;
        for trial in 0.. {
            if trial >= TRIALS && interrupted > 0 {
                break;
            }
            assert!(trial < 5 * TRIALS, "no process was killed while it changed files");
            // On a slow disk, the copies of the first turn alone can take longer than the first trials.
            let delay_ms = trial * 9 + trial.saturating_sub(TRIALS) * 100;
            let directory = tempfile::tempdir().unwrap();
            let at = |name: &str| directory.path().join(name);
            fs::create_dir(at("files")).unwrap();
            (0..FILES).for_each(|file| fs::write(at(&format!("files/{file}")), content(file, 0)).unwrap());
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "files::put_back::tests::puts_files_back_until_it_is_killed", "--nocapture"])
                .env(KILLED, directory.path())
                .stdout(std::process::Stdio::null())
                .spawn()
                .unwrap();
            pagemark_testing::wait_until("the process is ready", || at("ready").exists());
            std::thread::sleep(Duration::from_millis(delay_ms));
            child.kill().unwrap();
            child.wait().unwrap();
            let found = asides::list(&at("asides")).unwrap();
            let last: Vec<_> = found.iter().filter(|found| found.state == RestoreState::Interrupted).collect();
            assert!(last.len() <= 1 && found.iter().all(|found| found.state != RestoreState::InProgress));
            interrupted += last.len();
            for file in 0..FILES {
                let path = at(&format!("files/{file}"));
                let is_whole = |held: &[u8]| (0..3).any(|turn| held == content(file, turn));
                let aside = last.first().and_then(|found| Some((&found.path, found.aside.as_ref()?)));
                let copy = aside.and_then(|(directory, aside)| {
                    let described = aside.files.iter().find(|described| described.path == encode_path(&path))?;
                    Some(fs::read(directory.join(described.copy.as_ref()?)).unwrap())
                });
                // The description says where the content is that the file had before.
                assert!(copy.as_ref().is_none_or(|copy| is_whole(copy)), "trial {trial}, file {file}: the copy");
                assert!(copy.is_some() || is_whole(&fs::read(&path).unwrap()), "trial {trial}, file {file}");
            }
        }
    }

    #[test]
    fn hostile_records_are_refused() {
        let (place, mut store) = (Directories::new(), MemoryStore::new());
        let good = record(Path::new("/tmp/x"), b"then", &mut store);
        for path in [
            "",
            "x",
            "/",
            "/tmp/",
            "/tmp/../x",
            "/tmp/./x",
            "//tmp/x",
            r"/tmp/\x00",
            r"/tmp/\q",
            "/proc/1/mem",
            "/dev/vda",
        ] {
            let bad = FileRecord { path: path.into(), ..good.clone() };
            let error = place.change(&[bad], &store).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::BadPath, "{path}: {error}");
        }
        let twice = place.change(&[good.clone(), good.clone()], &store).unwrap_err();
        assert_eq!(twice.kind(), ErrorKind::BadPath, "{twice}");
        let huge = FileRecord { content: Blob { bytes: ByteCount::MAX, ..good.content }, ..good };
        assert_eq!(place.change(&[huge], &store).unwrap_err().kind(), ErrorKind::BadPath);
    }

    #[test]
    fn content_that_cannot_be_read_touches_nothing() {
        let mut store = MemoryStore::new();
        let (place, mut records) = one_of_each(&mut store);
        let before = place.state();
        let mut tree = PageTree::new();
        tree.set(PageNumber::MIN, ContentId([7; 16]));
        let content = Blob { bytes: ByteCount::new(4), root: tree.save(&mut store).unwrap() };
        for name in ["short", "another"] {
            records.push(FileRecord { content, ..record(&place.at(name), b"then", &mut store) });
            if name == "short" {
                records.remove(3);
            }
            let error = place.change(&records, &store).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Store, "{error}");
            assert_eq!((place.state(), place.asides()), (before.clone(), vec![]));
            records.pop();
        }
    }

    #[test]
    fn a_full_file_system_is_noticed_before_a_file_is_changed() {
        let place = Directories::new();
        if let Err(error) = mount_small_for_this_thread(place.directory.path()) {
            pagemark_testing::skip!("mount in a namespace of its own: {error}");
        }
        let mut store = MemoryStore::new();
        fs::write(place.at("first"), b"now").unwrap();
        let random: Vec<u8> = (0..2 << 20).map(|byte: u32| (byte / 4096) as u8 | 1).collect();
        let records =
            [record(&place.at("first"), b"then", &mut store), record(&place.at("large"), &random, &mut store)];
        let before = place.state();
        let error = place.change(&records, &store).unwrap_err();
        assert_eq!((error.kind(), error.object()), (ErrorKind::NoSpace, &Object::File(place.at("large"))));
        assert_eq!((place.state(), place.asides()), (before.clone(), vec![]));

        // Asides that do not fit: the same.
        let asides = tempfile::tempdir().unwrap();
        mount_small_for_this_thread(asides.path()).unwrap();
        let place = Directories { directory: tempfile::tempdir().unwrap(), asides };
        fs::write(place.at("first"), b"now").unwrap();
        fs::write(place.at("large"), &random).unwrap();
        let records = ["first", "large"].map(|name| record(&place.at(name), b"then", &mut store));
        let before = place.state();
        let error = place.change(&records, &store).unwrap_err();
        assert!(error.to_string().contains("no file was changed"), "{error}");
        assert_eq!((place.state(), place.asides()), (before, vec![]));
    }

    /// Mounts a file system of 1 MiB, for the running thread alone.
    fn mount_small_for_this_thread(at: &Path) -> io::Result<()> {
        use std::ffi::CString;
        let at = CString::new(at.as_os_str().as_bytes()).unwrap();
        let none = std::ptr::null();
        // SAFETY: the strings end with a zero and live longer than the calls; `none` stands for what is not
        // used.
        let failed = unsafe {
            libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) != 0
                || libc::mount(none, c"/".as_ptr(), none, libc::MS_PRIVATE | libc::MS_REC, none.cast()) != 0
                || libc::mount(c"none".as_ptr(), at.as_ptr(), c"tmpfs".as_ptr(), 0, c"size=1m".as_ptr().cast()) != 0
        };
        if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}
