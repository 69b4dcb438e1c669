//! Puts back the directories and symbolic links of a data tree, and removes what is new in it.

use std::collections::{HashMap, HashSet};
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use pagemark_trace::error::{Error, ErrorKind, Object, Result};

use super::asides::{AsideDirectory, AsideFile};
use super::change::{Change, ChangeKind};
use super::data_tree::{DirectoryRecord, LinkRecord, Listing, TreeRecord, link_record, list_tree};
use super::directory::{Directory, Entry, UnsyncedDirectories};
use super::list::{OpenFile, unix_ns};
use super::put_back::{FileAction, PutBack, check_path};
use super::users::{Actor, Users};
use super::writers::inode;
use super::{decode_path, encode_path};

/// The changes of the trees besides those of the content of their files.
#[derive(Default)]
pub(super) struct TreePlan {
    /// What is new since the checkpoint: files and links first, then directories, the innermost
    /// first.
    removals: Vec<Removal>,
    /// The missing directories, the outermost first.
    directories: Vec<(PathBuf, Actor, DirectoryRecord)>,
    /// The directories that have another mode or owner now.
    attributes: Vec<(PathBuf, Actor, Metadata, DirectoryRecord)>,
    /// The missing links.
    links: Vec<(PathBuf, Actor, LinkRecord)>,
}

struct Removal {
    path: PathBuf,
    /// In whose name it is removed.
    actor: Actor,
    present: Metadata,
    /// What it leads to, if it is a link.
    target: Option<PathBuf>,
}

impl TreePlan {
    /// Compares the trees with what is there now; `files` are the files of the checkpoint.
    pub fn new(trees: &[TreeRecord], files: &HashSet<PathBuf>, users: &Users) -> Result<TreePlan> {
        let mut plan = TreePlan::default();
        let mut roots: Vec<PathBuf> = Vec::new();
        for tree in trees {
            let root = checked(&tree.path, Path::new("/"))?;
            // A directory that was named may be in one that the job made.
            if roots.iter().any(|other| root.starts_with(other)) {
                continue;
            }
            if root == Path::new("/") {
                return Err(bad(&tree.path, "the whole file system is no data directory"));
            }
            let mut directories = HashMap::new();
            for directory in &tree.directories {
                directories.insert(checked(&directory.path, &root)?, directory);
            }
            let mut links = HashMap::new();
            for link in &tree.links {
                links.insert(checked(&link.path, &root)?, link);
            }
            plan.add(&present_at(&root, users)?, files, &directories, &links, users)?;
            roots.push(root);
        }
        plan.directories.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(plan)
    }

    fn add(
        &mut self,
        present: &Listing,
        files: &HashSet<PathBuf>,
        directories: &HashMap<PathBuf, &DirectoryRecord>,
        links: &HashMap<PathBuf, &LinkRecord>,
        users: &Users,
    ) -> Result<()> {
        for file in present.files.iter().filter(|file| !files.contains(&file.path)) {
            self.removals.push(Removal::new(&file.path, users)?);
        }
        let mut kept_links = HashSet::new();
        for link in &present.record.links {
            let path = decode_path(&link.path).unwrap_or_default();
            if links.get(&path).is_some_and(|record| record.target == link.target) {
                kept_links.insert(path);
            } else {
                self.removals.push(Removal::new(&path, users)?);
            }
        }
        let there: HashSet<PathBuf> = present.record.directories.iter().filter_map(|d| decode_path(&d.path)).collect();
        let mut new: Vec<&PathBuf> = there.iter().filter(|path| !directories.contains_key(*path)).collect();
        new.sort();
        for path in new.into_iter().rev() {
            self.removals.push(Removal::new(path, users)?);
        }
        for now in &present.record.directories {
            let path = decode_path(&now.path).unwrap_or_default();
            if let Some(record) = directories.get(&path).filter(|record| **record != now) {
                let (actor, present) = find_attributes(&path, record, users)?;
                self.attributes.push((path, actor, present, (*record).clone()));
            }
        }
        for (path, record) in directories.iter().filter(|(path, _)| !there.contains(*path)) {
            let actor = find_maker(path, record.uid, record.gid, users)?;
            self.directories.push((path.clone(), actor, (*record).clone()));
        }
        for (path, record) in links.iter().filter(|(path, _)| !kept_links.contains(*path)) {
            let actor = find_maker(path, record.uid, record.gid, users)?;
            self.links.push((path.clone(), actor, (*record).clone()));
        }
        Ok(())
    }

    /// The paths at which something is removed.
    pub fn removed(&self) -> impl Iterator<Item = &PathBuf> {
        self.removals.iter().map(|removal| &removal.path)
    }

    pub fn is_empty(&self) -> bool {
        self.removals.is_empty() && self.directories.is_empty() && self.attributes.is_empty() && self.links.is_empty()
    }

    /// The files that are removed.
    pub fn removed_files(&self) -> impl Iterator<Item = (&PathBuf, &Metadata)> {
        self.removals
            .iter()
            .filter(|removal| removal.present.is_file())
            .map(|removal| (&removal.path, &removal.present))
    }

    /// Keeps the files that are removed among the asides. Returns the name of each there.
    pub fn set_aside(&self, aside: &mut AsideDirectory, files: &mut Vec<AsideFile>) -> Result<Vec<Option<String>>> {
        let mut kept = Vec::with_capacity(self.removals.len());
        for removal in &self.removals {
            let mut described = AsideFile::new(&removal.path, None, Some(&removal.present));
            if removal.present.is_file() {
                let held = removal.entry()?.hold_same(inode(&removal.present));
                let held = held.map_err(super::io("examine", &removal.path))?;
                let open = || held.open(&removal.actor, false).map_err(super::io("open", &removal.path));
                described.copy = Some(aside.keep(&removal.path, &held, open)?);
            }
            described.link_target = removal.target.as_deref().map(encode_path);
            kept.push(described.copy.clone());
            files.push(described);
        }
        files.extend(self.attributes.iter().map(|(path, _, present, _)| AsideFile::new(path, None, Some(present))));
        let directories = self.directories.iter().map(|(path, ..)| path);
        let made = directories.chain(self.links.iter().map(|(path, ..)| path));
        files.extend(made.map(|path| AsideFile::new(path, None, None)));
        Ok(kept)
    }

    /// Removes what is new, and makes missing directories. `kept` is what `set_aside` returned, and
    /// `path_of` returns the path of what was kept.
    pub fn carry_out(
        &self,
        kept: Vec<Option<String>>,
        path_of: &dyn Fn(String) -> PathBuf,
        changes: &mut Vec<Change>,
        unsynced: &mut UnsyncedDirectories,
        done: &mut Vec<PutBack>,
    ) -> Result<()> {
        for (removal, kept) in self.removals.iter().zip(kept) {
            removal.carry_out(kept.as_deref(), changes, unsynced)?;
            let set_aside = kept.map(path_of);
            done.push(PutBack { path: removal.path.clone(), action: FileAction::Removed, set_aside });
        }
        for (path, actor, record) in &self.directories {
            let entry = Entry::of(actor, path)?;
            let made = entry.make_directory(record.uid, record.gid, record.mode);
            if made.is_ok() || entry.present().is_ok_and(|present| present.is_some()) {
                let (actor, kind) = (actor.clone(), ChangeKind::CreatedDirectory);
                changes.push(Change { path: path.clone(), actor, kind });
            }
            made.map_err(super::io("create the directory", path))?;
            unsynced.add(entry.directory());
            done.push(PutBack { path: path.clone(), action: FileAction::Recreated, set_aside: None });
        }
        Ok(())
    }

    /// Gives directories the mode and the owner that they had.
    pub fn set_attributes(&self, changes: &mut Vec<Change>, done: &mut Vec<PutBack>) -> Result<()> {
        for (path, actor, before, record) in &self.attributes {
            let entry = Entry::of(actor, path)?;
            let kind = ChangeKind::DirectoryAttributes { before: before.clone() };
            changes.push(Change { path: path.clone(), actor: actor.clone(), kind });
            let set = entry.set_attributes(inode(before), record.uid, record.gid, record.mode);
            set.map_err(super::io("set the owner and the mode of", path))?;
            done.push(PutBack { path: path.clone(), action: FileAction::Permissions, set_aside: None });
        }
        Ok(())
    }

    /// Makes missing links.
    pub fn make_links(
        &self,
        changes: &mut Vec<Change>,
        unsynced: &mut UnsyncedDirectories,
        done: &mut Vec<PutBack>,
    ) -> Result<()> {
        for (path, actor, record) in &self.links {
            let target = decode_path(&record.target).ok_or_else(|| bad(&record.target, "its escapes are not right"))?;
            let entry = Entry::of(actor, path)?;
            let made = entry.make_link(&target, record.uid, record.gid);
            let inode = made.map_err(super::io("create the link", path))?;
            let kind = ChangeKind::CreatedLink { inode };
            changes.push(Change { path: path.clone(), actor: actor.clone(), kind });
            unsynced.add(entry.directory());
            done.push(PutBack { path: path.clone(), action: FileAction::Recreated, set_aside: None });
        }
        Ok(())
    }
}

/// Who may give a directory the attributes of the record. Also returns those that it has.
fn find_attributes(path: &Path, record: &DirectoryRecord, users: &Users) -> Result<(Actor, Metadata)> {
    users.find(path, |actor| {
        let failed = || super::io("set the owner and the mode of", path);
        let present = Entry::of(actor, path)?.present().map_err(failed())?;
        let present = present.ok_or_else(|| failed()(io::ErrorKind::NotFound.into()))?;
        match actor.owns(present.uid()) && actor.may_give(record.uid, record.gid, Some(present.gid())) {
            true => Ok((actor.clone(), present)),
            false => Err(failed()(io::ErrorKind::PermissionDenied.into())),
        }
    })
}

/// Who may make a directory or link with that owner.
fn find_maker(path: &Path, uid: u32, gid: u32, users: &Users) -> Result<Actor> {
    users.find(path, |actor| {
        let failed = || super::io("create", path);
        let (directory, _) = Directory::open(actor, path.parent().unwrap_or(Path::new("/")))?;
        let may_make = directory.could_write().map_err(failed())?;
        let group = directory.group_of_new().map_err(failed())?;
        match may_make && actor.may_give(uid, gid, group) {
            true => Ok(actor.clone()),
            false => Err(failed()(io::ErrorKind::PermissionDenied.into())),
        }
    })
}

impl Removal {
    fn new(path: &Path, users: &Users) -> Result<Removal> {
        let failed = || super::io("examine", path);
        users.find(path, |actor| {
            let entry = Entry::of(actor, path)?;
            let held = entry.hold().map_err(failed())?.ok_or_else(|| failed()(io::ErrorKind::NotFound.into()))?;
            let directory = entry.directory().metadata().map_err(failed())?;
            let is_sticky = directory.mode() & libc::S_ISVTX != 0;
            let is_owner = actor.owns(held.metadata.uid()) || actor.owns(directory.uid());
            if !entry.directory().could_write().map_err(failed())? || (is_sticky && !is_owner) {
                return Err(super::io("remove", path)(io::ErrorKind::PermissionDenied.into()));
            }
            let target = held.metadata.is_symlink().then(|| held.read_link()).transpose().map_err(failed())?;
            Ok(Removal { path: path.to_owned(), actor: actor.clone(), present: held.metadata, target })
        })
    }

    fn entry(&self) -> Result<Entry> {
        Entry::of(&self.actor, &self.path)
    }

    fn carry_out(
        &self,
        kept: Option<&str>,
        changes: &mut Vec<Change>,
        unsynced: &mut UnsyncedDirectories,
    ) -> Result<()> {
        let entry = self.entry()?;
        let failed = || super::io("remove", &self.path);
        let (file, before) = (inode(&self.present), self.present.clone());
        let kind = match (kept, &self.target) {
            (Some(kept), _) => {
                let parent = inode(&entry.directory().metadata().map_err(failed())?);
                entry.remove(file).map_err(failed())?;
                ChangeKind::RemovedFile { kept: kept.to_owned(), parent, before }
            }
            (None, Some(target)) => {
                entry.remove(file).map_err(failed())?;
                ChangeKind::RemovedLink { target: target.clone(), before }
            }
            (None, None) => match entry.hold_same(file).and_then(|_| entry.remove_directory()) {
                // Sockets and other files that do not belong to the tree stay, and the directory with them.
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => return Ok(()),
                removed => {
                    removed.map_err(failed())?;
                    ChangeKind::RemovedDirectory { before }
                }
            },
        };
        changes.push(Change { path: self.path.clone(), actor: self.actor.clone(), kind });
        unsynced.add(entry.directory());
        Ok(())
    }
}

/// What is at the root of a tree now, in the directories that no link leads to.
pub(super) fn present_at(root: &Path, users: &Users) -> Result<Listing> {
    let seen_ns = unix_ns(SystemTime::now());
    let failed = || super::io("examine", root);
    let held = users.find(root, |actor| match Entry::existing(actor, root)? {
        Some(entry) => entry.hold().map_err(failed()),
        None => Ok(None),
    })?;
    let mut listing = Listing::default();
    let Some(held) = held else { return Ok(listing) };
    if held.metadata.is_dir() {
        return list_tree(root, users);
    } else if held.metadata.is_file() {
        listing.files.push(OpenFile::closed(root.to_owned(), &held.metadata, seen_ns, false));
    } else if held.metadata.is_symlink() {
        let target = held.read_link().map_err(super::io("read", root))?;
        listing.record.links.push(link_record(root, &target, &held.metadata));
    }
    // Sockets, pipes and devices do not belong to a tree.
    Ok(listing)
}

/// Decodes a path of a record, which must be in `root`.
fn checked(text: &str, root: &Path) -> Result<PathBuf> {
    let path = decode_path(text).ok_or_else(|| bad(text, "its escapes are not right"))?;
    check_path(&path).map_err(|reason| bad(text, reason))?;
    if path.starts_with(root) { Ok(path) } else { Err(bad(text, "it is not in its tree")) }
}

fn bad(text: &str, reason: &'static str) -> Error {
    Error::about(ErrorKind::BadPath, Object::Recorded(text.into()), reason)
        .during("the checkpoint names the file")
        .help("nothing was changed; is the repository damaged?")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs::{self, File};
    use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
    use std::os::unix::process::CommandExt;

    use nix::errno::Errno;
    use pagemark::repository::FileRecord;
    use pagemark::{MemoryStore, RangeSet};
    use proptest::prelude::*;

    use super::super::asides;
    use super::super::data_tree::DataTree;
    use super::super::put_back::{ChangedFiles, put_back};
    use super::super::tracker::{FileTracker, Written};
    use super::*;

    /// Every name below a directory, with its kind, its content and its permission bits. This is
    /// all that the tests know of a tree.
    type State = BTreeMap<PathBuf, (char, Vec<u8>, u32)>;

    fn state(directory: &Path) -> State {
        let mut state = State::new();
        let mut directories = vec![directory.to_path_buf()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                let metadata = fs::symlink_metadata(&path).unwrap();
                let (kind, content) = match metadata.file_type() {
                    kind if kind.is_dir() => ('d', Vec::new()),
                    kind if kind.is_symlink() => {
                        ('l', fs::read_link(&path).unwrap().into_os_string().into_encoded_bytes())
                    }
                    _ => ('f', fs::read(&path).unwrap()),
                };
                if kind == 'd' {
                    directories.push(path.clone());
                }
                state.insert(path, (kind, content, metadata.mode() & 0o7777));
            }
        }
        state
    }

    #[derive(Clone, Debug)]
    enum Step {
        Write(usize, u64, usize, u8),
        Cut(usize, u64),
        Rename(usize, usize),
        Remove(usize),
        MakeDirectory(usize),
        RemoveDirectory(usize),
        Link(usize, usize),
        Mode(usize, u32),
        Wait,
        Precopy,
        Checkpoint,
        Restore(usize),
    }

    /// Names of files and directories; a file may be in each directory.
    const NAMES: usize = 8;

    fn step() -> impl Strategy<Value = Step> {
        let name = || 0..NAMES;
        prop_oneof![
            8 => (name(), 0u64..20_000, 1usize..9000, any::<u8>()).prop_map(|(n, at, len, byte)| Step::Write(n, at, len, byte)),
            2 => (name(), 0u64..30_000).prop_map(|(n, size)| Step::Cut(n, size)),
            3 => (name(), name()).prop_map(|(from, to)| Step::Rename(from, to)),
            2 => name().prop_map(Step::Remove),
            2 => name().prop_map(Step::MakeDirectory),
            1 => name().prop_map(Step::RemoveDirectory),
            1 => (name(), name()).prop_map(|(from, to)| Step::Link(from, to)),
            1 => (name(), 0u32..3).prop_map(|(n, mode)| Step::Mode(n, mode)),
            1 => Just(Step::Wait),
            1 => Just(Step::Precopy),
            4 => Just(Step::Checkpoint),
            1 => (0usize..8).prop_map(Step::Restore),
        ]
    }

    fn carry_out(step: &Step, root: &Path) {
        let directory = |n: usize| root.join(format!("d{}", n % 3));
        let file = |n: usize| if n < 4 { root.join(format!("f{n}")) } else { directory(n).join(format!("f{n}")) };
        // A step that is not possible now is none.
        match *step {
            Step::Write(n, at, length, byte) => {
                let mut options = fs::OpenOptions::new();
                if let Ok(open) = options.write(true).create(true).truncate(false).open(file(n)) {
                    open.write_all_at(&vec![byte; length], at).unwrap();
                }
            }
            Step::Cut(n, size) => {
                if let Ok(open) = fs::OpenOptions::new().write(true).open(file(n)) {
                    open.set_len(size).unwrap();
                }
            }
            Step::Rename(from, to) => drop(fs::rename(file(from), file(to))),
            Step::Remove(n) => drop(fs::remove_file(file(n))),
            Step::MakeDirectory(n) => drop(fs::create_dir(directory(n))),
            Step::RemoveDirectory(n) => drop(fs::remove_dir_all(directory(n))),
            Step::Link(from, to) => drop(symlink(file(from), directory(to).join(format!("l{to}")))),
            Step::Mode(n, mode) => {
                let path = if n == 0 { directory(n) } else { file(n) };
                if let Ok(open) = File::open(path) {
                    open.set_permissions(fs::Permissions::from_mode([0o700, 0o740, 0o755][mode as usize])).unwrap();
                }
            }
            _ => {}
        }
    }

    struct Job {
        root: tempfile::TempDir,
        asides: tempfile::TempDir,
        store: MemoryStore,
        tracker: FileTracker,
    }

    impl Job {
        fn new() -> Job {
            let (root, asides) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            Job { root, asides, store: MemoryStore::new(), tracker: FileTracker::new() }
        }

        fn root(&self) -> PathBuf {
            self.root.path().canonicalize().unwrap()
        }

        fn list(&self) -> (Vec<super::super::OpenFile>, TreeRecord) {
            DataTree::new(self.root.path()).unwrap().list_with(Vec::new(), &Users::this_process()).unwrap()
        }

        fn precopy(&mut self) {
            self.tracker.precopy(&self.list().0, &Written::new(), &mut self.store).unwrap();
        }

        fn checkpoint(&mut self) -> (Vec<FileRecord>, TreeRecord) {
            let (files, tree) = self.list();
            self.tracker.freeze_copy(&files, &Written::from([(1, RangeSet::new())])).unwrap();
            (self.tracker.finish(&mut self.store).unwrap(), tree)
        }

        fn restore(&self, (files, tree): &(Vec<FileRecord>, TreeRecord)) -> Result<ChangedFiles> {
            // A process that another test starts has copies of this one's open files for a moment.
            let deadline = std::time::Instant::now() + pagemark_testing::patience();
            loop {
                match put_back(files, std::slice::from_ref(tree), &self.store, "job@1", self.asides.path()) {
                    Err(error) if error.kind() == ErrorKind::FileInUse && std::time::Instant::now() < deadline => {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                    result => return result,
                }
            }
        }
    }

    proptest! {
        #![proptest_config(pagemark_testing::cases(48))]
        #[test]
        fn every_checkpoint_of_a_tree_is_put_back_as_it_was(steps in prop::collection::vec(step(), 1..60)) {
            let mut job = Job::new();
            let root = job.root();
            let mut checkpoints = Vec::new();
            for step in &steps {
                carry_out(step, &root);
                match step {
                    Step::Wait => std::thread::sleep(std::time::Duration::from_millis(25)),
                    Step::Precopy => job.precopy(),
                    Step::Checkpoint => checkpoints.push((job.checkpoint(), state(&root))),
                    Step::Restore(n) if *n < checkpoints.len() => {
                        job.restore(&checkpoints[*n].0).unwrap().keep().unwrap();
                        prop_assert_eq!(&state(&root), &checkpoints[*n].1);
                    }
                    _ => {}
                }
            }
            for (records, then) in checkpoints.iter().rev() {
                let before = state(&root);
                job.restore(records).unwrap().undo().unwrap();
                prop_assert_eq!(&state(&root), &before);
                job.restore(records).unwrap().keep().unwrap();
                prop_assert_eq!(&state(&root), then);
                let again = job.restore(records).unwrap();
                prop_assert!(again.files().iter().all(|file| file.action == FileAction::Untouched));
            }
        }
    }

    #[test]
    fn what_is_new_is_kept_among_the_asides() {
        let mut job = Job::new();
        let at = |name: &str| job.root.path().canonicalize().unwrap().join(name);
        let (new, deep) = (at("new"), at("a/b/deep"));
        fs::write(at("old"), b"old").unwrap();
        let records = job.checkpoint();
        fs::create_dir_all(deep.parent().unwrap()).unwrap();
        fs::write(&new, b"new").unwrap();
        fs::write(&deep, b"deep").unwrap();
        symlink("old", new.with_file_name("link")).unwrap();
        let done = job.restore(&records).unwrap().keep().unwrap();
        let kept = |path: &Path| {
            let done = done.iter().find(|done| done.path == path).unwrap();
            (done.action, fs::read(done.set_aside.as_ref().unwrap()).unwrap())
        };
        assert_eq!(
            (kept(&new), kept(&deep)),
            ((FileAction::Removed, b"new".to_vec()), (FileAction::Removed, b"deep".to_vec()))
        );
        assert_eq!(state(&job.root()).len(), 1);
        let found = asides::list(job.asides.path()).unwrap();
        let described = &found[0].aside.as_ref().unwrap().files;
        assert!(described.iter().any(|file| file.link_target.as_deref() == Some("old")));
    }

    /// Set for the process that may have few files open.
    const FEW_FILES: &str = "PAGEMARK_TEST_FEW_FILES";

    #[test]
    fn more_files_are_put_back_than_may_be_open() {
        const COUNT: usize = 120;
        if std::env::var_os(FEW_FILES).is_none() {
            let name = "files::put_back_tree::tests::more_files_are_put_back_than_may_be_open";
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", name, "--nocapture"]).env(FEW_FILES, "");
            let limit = libc::rlimit { rlim_cur: COUNT as u64 / 2, rlim_max: COUNT as u64 / 2 };
            // SAFETY: one system call that reads `limit`, which the closure owns.
            unsafe {
                command.pre_exec(move || {
                    Errno::result(libc::setrlimit(libc::RLIMIT_NOFILE, &limit)).map(drop).map_err(io::Error::from)
                })
            };
            assert!(command.status().unwrap().success());
            return;
        }
        let mut job = Job::new();
        let root = job.root();
        let at = |kind: &str, n: usize| root.join(format!("{kind}{n}/file"));
        let create = |path: PathBuf, content: &[u8]| {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        for n in 0..COUNT {
            ["changed", "gone", "mode"].into_iter().for_each(|kind| create(at(kind, n), b"then"));
        }
        let (records, then) = (job.checkpoint(), state(&root));
        for n in 0..COUNT {
            create(at("changed", n), b"now");
            create(at("new", n), b"new");
            fs::remove_dir_all(at("gone", n).parent().unwrap()).unwrap();
            fs::set_permissions(at("mode", n), fs::Permissions::from_mode(0o600)).unwrap();
        }
        let now = state(&root);
        job.restore(&records).unwrap().undo().unwrap();
        assert_eq!(state(&root), now);
        job.restore(&records).unwrap().keep().unwrap();
        assert_eq!(state(&root), then);
    }

    #[test]
    fn a_file_under_two_names_comes_back_under_both() {
        let mut job = Job::new();
        let at = |name: &str| job.root.path().canonicalize().unwrap().join(name);
        let (first, second) = (at("first"), at("second"));
        fs::write(&first, [1; 9000]).unwrap();
        fs::hard_link(&first, &second).unwrap();
        for _ in 0..3 {
            let records = job.checkpoint();
            let then = state(&job.root());
            fs::write(&first, b"changed").unwrap();
            fs::remove_file(&second).unwrap();
            job.restore(&records).unwrap().keep().unwrap();
            assert_eq!(state(&job.root()), then);
        }
    }

    #[test]
    fn hostile_trees_are_refused() {
        let job = Job::new();
        let root = encode_path(&job.root());
        let directory = |path: &str| DirectoryRecord { path: path.into(), mode: 0o755, uid: 0, gid: 0 };
        let link = |path: &str| LinkRecord { path: path.into(), target: "x".into(), uid: 0, gid: 0 };
        let tree = |path: &str, directories: Vec<DirectoryRecord>, links: Vec<LinkRecord>| {
            (Vec::new(), TreeRecord { path: path.into(), directories, links, ..TreeRecord::default() })
        };
        for tree in [
            tree("/", vec![directory("/")], vec![]),
            tree("", vec![], vec![]),
            tree("/proc", vec![], vec![]),
            tree(&format!("{root}/.."), vec![], vec![]),
            tree(&root, vec![directory("/tmp")], vec![]),
            tree(&root, vec![], vec![link("/etc/link")]),
            tree(&root, vec![], vec![link(&format!("{root}/../link"))]),
        ] {
            assert_eq!(job.restore(&tree).unwrap_err().kind(), ErrorKind::BadPath, "{:?}", tree.1);
        }
    }
}
