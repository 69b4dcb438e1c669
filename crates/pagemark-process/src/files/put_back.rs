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
use std::fs::{File, FileTimes, Metadata};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::statvfs::fstatvfs;
use nix::unistd::{AccessFlags, faccessat, geteuid};
use pagemark::blob::{BlobReader, Difference};
use pagemark::repository::FileRecord;
use pagemark::{ByteCount, Store};
use pagemark_trace::error::{Error, ErrorKind, Object, Result};

use super::asides::{AsideDirectory, AsideFile};
use super::change::{Change, ChangeKind};
use super::data_tree::TreeRecord;
use super::decode_path;
use super::directory::{Directory, Entry, UnsyncedDirectories, set_attributes};
use super::put_back_tree::TreePlan;
use super::users::{Actor, Users};
use super::writers::{inode, is_own_output, writers};

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
    /// The file was new since the checkpoint, in a directory of the job, and was removed.
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
/// new directory in `asides`. All of it is done with the rights of this process: for a job of a
/// user who may be hostile, use [`Restore`](crate::restore::Restore).
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
    put_back_for(&Users::this_process(), records, trees, store, checkpoint, asides)
}

/// Like [`put_back`], in the name of the users of the job: nothing is done that none of them could
/// do.
///
/// # Errors
/// Also [`ErrorKind::NotPermitted`]: no user of the job may do it. No file was changed.
pub(crate) fn put_back_for(
    users: &Users,
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
    let plans = records.iter().zip(paths).map(|(record, path)| Plan::new(record, path, store, users));
    let plans = plans.collect::<Result<Vec<_>>>()?;
    let tree_plan = TreePlan::new(trees, &names, users)?;
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

/// The names of the asides; None where there is no previous content.
struct Asides {
    /// The copy for each plan.
    copies: Vec<Option<String>>,
    /// The aside of each file that is removed.
    removed: Vec<Option<String>>,
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
                let file = plan.entry()?.open_same(inode(present), false).map_err(plan.io("open"))?;
                (Some(aside.copy(&plan.path, &file)?), Some(present))
            }
        };
        copies.push(copy.clone());
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
        let path_of = |name: String| self.aside.as_ref().map_or_else(PathBuf::new, |aside| aside.path_of(&name));
        trees.carry_out(asides.removed, &path_of, changes, &mut unsynced, &mut tree_files)?;
        for (plan, copy) in plans.iter().zip(asides.copies) {
            let action = plan.carry_out(copy.as_deref(), changes, &mut unsynced)?;
            self.files.push(plan.done(action, copy.map(path_of)));
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
        // Without asides, nothing was changed.
        let Some(aside) = &self.aside else { return Ok(()) };
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
    /// In whose name it is put back.
    actor: Actor,
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
    fn new(record: &'a FileRecord, path: PathBuf, store: &'a dyn Store, users: &Users) -> Result<Plan<'a>> {
        let content = record.content.reader(store).map_err(super::store(&path))?;
        let mut plan = Plan { record, path, content, actor: Actor::This, step: Step::Nothing };
        // What is as it was is not touched, whoever may change it.
        if let Ok(Step::Nothing) = plan.examine() {
            return Ok(plan);
        }
        let path = plan.path.clone();
        users.find(&path, |actor| {
            plan.actor = actor.clone();
            plan.step = plan.examine()?;
            Ok(())
        })?;
        Ok(plan)
    }

    /// Finds the step that is left to do, and whether the actor may do it.
    fn examine(&self) -> Result<Step> {
        let record = self.record;
        let (directory, missing) = Directory::open(&self.actor, self.parent())?;
        let entry = Entry::in_directory(directory, &self.path);
        let held = if missing.is_empty() { entry.hold().map_err(self.io("examine"))? } else { None };
        let Some(held) = held else {
            // Opened for reading, the checkpoint's content is known to be there.
            self.content.check().map_err(super::store(&self.path))?;
            self.check_create(entry.directory()).map_err(self.io("create"))?;
            return Ok(Step::Create);
        };
        let present = held.metadata.clone();
        if !present.is_file() {
            let reason = "was a regular file at the checkpoint and is something else now";
            return Err(Error::about(ErrorKind::BadPath, Object::File(self.path.clone()), reason)
                .help("nothing was changed; move it away and try again"));
        }
        if record.is_shared || is_own_output(&present) {
            return Ok(Step::Nothing);
        }
        // That user may have put it there and have it open: root's content is not for it.
        let is_planted =
            matches!(self.actor, Actor::This) && geteuid().is_root() && ![0, record.uid].contains(&present.uid());
        if is_planted {
            let reason =
                format!("was a file of user {} at the checkpoint and is one of user {} now", record.uid, present.uid());
            return Err(Error::about(ErrorKind::BadPath, Object::File(self.path.clone()), reason)
                .help("nothing was changed; move it away, or give it to its owner, and try again"));
        }
        let readable = held.open(&self.actor, false).map_err(self.io("open"))?;
        let difference = self.content.difference(&readable).map_err(self.content_error("compare"))?;
        let is_changed =
            (present.mode() & 0o7777, present.uid(), present.gid()) != (record.mode, record.uid, record.gid);
        let is_owner = self.actor.owns(present.uid());
        if is_changed && !(is_owner && self.actor.may_give(record.uid, record.gid, Some(present.gid()))) {
            return Err(self.io("set the owner and the mode of")(io::ErrorKind::PermissionDenied.into()));
        }
        if difference.is_empty() {
            return Ok(if is_changed { Step::SetAttributes { present } } else { Step::Nothing });
        }
        // A set-uid file that a user writes loses that bit, but not one that this process writes.
        if !is_owner && present.mode() & (libc::S_ISUID | libc::S_ISGID) != 0 {
            return Err(self.io("write")(io::ErrorKind::PermissionDenied.into()));
        }
        held.open(&self.actor, true).map_err(self.io("open for writing"))?;
        Ok(Step::Rewrite { present, difference })
    }

    /// Fails if the actor may not create the file in `directory`, or in one below it that is
    /// missing.
    fn check_create(&self, directory: &Directory) -> io::Result<()> {
        if matches!(self.actor, Actor::This) {
            let (access, flags) = (AccessFlags::W_OK | AccessFlags::X_OK, nix::fcntl::AtFlags::AT_EACCESS);
            return Ok(faccessat(directory, ".", access, flags)?);
        }
        let FileRecord { uid, gid, .. } = *self.record;
        let is_permitted = directory.could_write()? && self.actor.may_give(uid, gid, directory.group_of_new()?);
        if is_permitted { Ok(()) } else { Err(io::ErrorKind::PermissionDenied.into()) }
    }

    fn done(&self, action: FileAction, set_aside: Option<PathBuf>) -> PutBack {
        PutBack { path: self.path.clone(), action, set_aside }
    }

    /// The path of the file's directory.
    fn parent(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// The file's place in its directory.
    fn entry(&self) -> Result<Entry> {
        Entry::of(&self.actor, &self.path)
    }

    /// Changes the file. What was changed is added to `changes`, also if this fails. `copy` has the
    /// present content.
    fn carry_out(
        &self,
        copy: Option<&str>,
        changes: &mut Vec<Change>,
        unsynced: &mut UnsyncedDirectories,
    ) -> Result<FileAction> {
        let FileRecord { mode, uid, gid, .. } = *self.record;
        match &self.step {
            Step::Nothing => Ok(FileAction::Untouched),
            Step::SetAttributes { present } => {
                let held = self.entry()?.hold_same(inode(present)).map_err(self.io("open"))?;
                changes.push(self.change(ChangeKind::FileAttributes { before: present.clone() }));
                let set = held.set_attributes(&self.actor, uid, gid, mode);
                set.map_err(self.io("set the owner and the mode of"))?;
                Ok(FileAction::Permissions)
            }
            Step::Rewrite { present, difference } => {
                // There is a copy for each file that is rewritten.
                let Some(copy) = copy else { return Ok(FileAction::Untouched) };
                let file = self.entry()?.open_same(inode(present), true).map_err(self.io("open"))?;
                changes.push(self.change(ChangeKind::Content { copy: copy.to_owned(), before: present.clone() }));
                self.content.apply(difference, &file).map_err(self.content_error("write"))?;
                self.give_attributes(&file, present)?;
                file.sync_all().map_err(self.io("sync"))?;
                Ok(FileAction::Rewritten)
            }
            Step::Create => {
                let entry = Entry::in_directory(self.make_directories(changes, unsynced)?, &self.path);
                let file = entry.create().map_err(self.io("create"))?;
                let created = file.metadata().map_err(self.io("examine"))?;
                changes.push(self.change(ChangeKind::CreatedFile { inode: inode(&created) }));
                unsynced.add(entry.directory());
                self.content.copy_to_file(&file).map_err(self.content_error("write"))?;
                self.give_attributes(&file, &created)?;
                file.sync_all().map_err(self.io("sync"))?;
                Ok(FileAction::Recreated)
            }
        }
    }

    fn change(&self, kind: ChangeKind) -> Change {
        Change { path: self.path.clone(), actor: self.actor.clone(), kind }
    }

    /// Makes the missing directories above the file, one in the other. Returns the last.
    fn make_directories(&self, changes: &mut Vec<Change>, unsynced: &mut UnsyncedDirectories) -> Result<Directory> {
        let (mut directory, missing) = Directory::open(&self.actor, self.parent())?;
        for name in missing {
            unsynced.add(&directory);
            let path = directory.path().join(&name);
            let made = directory.make(&name, self.record.uid, self.record.gid);
            if directory.path() == path || made.is_ok() {
                let (actor, kind) = (self.actor.clone(), ChangeKind::CreatedDirectory);
                changes.push(Change { path: path.clone(), actor, kind });
            }
            made.map_err(super::io("create the directory", path))?;
        }
        Ok(directory)
    }

    /// Gives an open file its attributes; `present` are those that it has.
    fn give_attributes(&self, file: &File, present: &Metadata) -> Result<()> {
        let FileRecord { mode, uid, gid, .. } = *self.record;
        let set = set_attributes(&self.actor, file, uid, gid, mode);
        set.map_err(self.io("set the owner and the mode of"))?;
        if !self.actor.owns(present.uid()) {
            // The right to write another user's file is not the right to set its time.
            return Ok(());
        }
        let since = Duration::from_nanos(self.record.modified_unix_ns.unsigned_abs());
        let modified = if self.record.modified_unix_ns < 0 { UNIX_EPOCH - since } else { UNIX_EPOCH + since };
        file.set_times(FileTimes::new().set_modified(modified)).map_err(self.io("set the time of"))
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
    let own = std::process::id() as i32;
    let list = || {
        let files = changing.keys().copied().collect();
        writers(&files, |pid| pid == own).map_err(Error::system("list the processes that write", Object::None))
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
            Step::Rewrite { present, difference } => {
                let open = plan.entry()?.open_same(inode(present), false).map_err(plan.io("open"))?;
                (open, difference.unallocated_pages)
            }
            Step::Create => {
                let (directory, _) = Directory::open(&plan.actor, plan.parent())?;
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
mod tests;
