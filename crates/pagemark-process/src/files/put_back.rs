//! Gives files back what they held at a checkpoint, and keeps what they hold now beside them.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, FileTimes, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown, lchown};
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, RenameFlags, openat, renameat2};
use nix::sys::stat::Mode;
use pagemark::repository::FileRecord;
use pagemark::{PAGE_SIZE, PageTree, Store};

use super::scan::{Page, next_data, page_count, read_full};
use super::{FilesError, decode_path};

const PAGE: u64 = PAGE_SIZE as u64;
const NAME_MAX: usize = 255;

/// A file that was looked at by [`put_back`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PutBack {
    /// Its path.
    pub path: PathBuf,
    /// What was done to it.
    pub what: What,
    /// Under which name what it held is kept now, if it held something else than at the checkpoint.
    pub set_aside: Option<PathBuf>,
}

/// What was done to a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    /// Nothing: it holds what it held.
    Untouched,
    /// It holds what it held; permissions or owner were put back.
    Permissions,
    /// It was gone and is there again, its directories too.
    Recreated,
    /// Another file with the checkpoint's content stands in its place.
    Replaced,
    /// The checkpoint's content was written into it, since it has further names or is a mount point.
    Rewritten,
}

/// Puts the files back as `records` tell, their content from `store`. What a file holds now is kept beside it as
/// `NAME.pagemark-aside-YYYYmmddTHHMMSS` (`now`, in UTC; with `-2` … if there is one already).
///
/// The content of all files is written and synced before the first one is touched. A file is replaced by a rename,
/// after what it holds got its second name, so at every instant both contents can be reached.
///
/// # Errors
/// [`FilesError::BadPath`] and [`FilesError::NoDirectory`] before anything is changed; [`FilesError::Store`] or
/// [`FilesError::Io`] when a content cannot be read or written, with no file touched either, or when one cannot be
/// replaced, with those before it put back; [`FilesError::HalfWay`] when a file's present content was set aside
/// already.
pub fn put_back(records: &[FileRecord], store: &dyn Store, now: SystemTime) -> Result<Vec<PutBack>, FilesError> {
    let mut names = HashSet::new();
    let mut paths = Vec::with_capacity(records.len());
    for record in records {
        let bad = |reason| FilesError::BadPath { path: record.path.clone(), reason };
        let path = checked(record).map_err(bad)?;
        if !names.insert(path.clone()) {
            return Err(bad("it is named twice"));
        }
        paths.push(path);
    }
    let stamp = stamp(now);
    let planned: Vec<Plan<'_>> =
        records.iter().zip(paths).map(|(record, path)| Plan::new(record, path, store)).collect::<Result<_, _>>()?;
    planned.into_iter().map(|plan| plan.carry_out(&stamp)).collect()
}

/// A file that is to be put back, with everything that can fail for want of space or content done.
struct Plan<'a> {
    record: &'a FileRecord,
    path: PathBuf,
    tree: PageTree,
    store: &'a dyn Store,
    way: Way,
}

enum Way {
    Untouched,
    Permissions(File),
    Place { directory: Directory, new: Unnamed },
}

impl<'a> Plan<'a> {
    fn new(record: &'a FileRecord, path: PathBuf, store: &'a dyn Store) -> Result<Plan<'a>, FilesError> {
        let tree = PageTree::load(record.root, store).map_err(FilesError::store(&path))?;
        let directory = Directory::open(&path, record)?;
        let mut plan = Plan { record, path, tree, store, way: Way::Untouched };
        if let Some((file, metadata)) = directory.regular().map_err(plan.io("open"))?
            && plan.is_content_of(&file, &metadata)?
        {
            let held = (metadata.mode() & 0o7777, metadata.uid(), metadata.gid());
            if held != (record.mode, record.uid, record.gid) {
                plan.way = Way::Permissions(file);
            }
            return Ok(plan);
        }
        let new = directory.create_temporary().map_err(plan.io("create a file beside"))?;
        plan.write_into(&new.file, "write the checkpoint's content beside")?;
        plan.give_attributes(&new.file)?;
        new.file.sync_all().map_err(plan.io("sync the checkpoint's content beside"))?;
        plan.way = Way::Place { directory, new };
        Ok(plan)
    }

    fn carry_out(mut self, stamp: &str) -> Result<PutBack, FilesError> {
        let (what, set_aside) = match std::mem::replace(&mut self.way, Way::Untouched) {
            Way::Untouched => (What::Untouched, None),
            Way::Permissions(file) => {
                self.give_owner_and_mode(&file)?;
                (What::Permissions, None)
            }
            Way::Place { directory, new } => self.place(&directory, new, stamp)?,
        };
        Ok(PutBack { path: self.path, what, set_aside })
    }

    fn place(
        &self,
        directory: &Directory,
        mut new: Unnamed,
        stamp: &str,
    ) -> Result<(What, Option<PathBuf>), FilesError> {
        let named = directory.at(&directory.name);
        let present = match fs::symlink_metadata(&named) {
            Ok(present) => Some(present),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(self.io("look at")(error)),
        };
        let Some(present) = present else {
            // Should another program make one of that name right now, it stays.
            rename_to_free_name(&new.path, &named).map_err(self.io("create"))?;
            new.is_placed = true;
            directory.sync().map_err(self.io("sync the directory of"))?;
            return Ok((What::Recreated, None));
        };
        let has_more_names = present.is_file() && present.nlink() > 1;
        let aside =
            if has_more_names { None } else { directory.set_aside(&present, stamp).map_err(self.io("set aside"))? };
        let Some(aside) = aside else {
            let aside = self.copy_aside(directory, &present, stamp)?;
            self.rewrite(directory).map_err(self.half_way(&aside))?;
            return Ok((What::Rewritten, Some(aside)));
        };
        fs::rename(&new.path, &named)
            .and_then(|()| {
                new.is_placed = true;
                directory.sync()
            })
            .map_err(self.io("replace"))
            .map_err(self.half_way(&aside))?;
        Ok((What::Replaced, Some(aside)))
    }

    /// Copies what the file holds to a file of its own beside it.
    fn copy_aside(&self, directory: &Directory, present: &Metadata, stamp: &str) -> Result<PathBuf, FilesError> {
        let failed = |error| self.io("copy aside what is in")(error);
        let mut from = directory.open_named(false).map_err(failed)?;
        let mut copy = directory.create_temporary().map_err(failed)?;
        io::copy(&mut from, &mut copy.file).map_err(failed)?;
        fchown(&copy.file, Some(present.uid()), Some(present.gid())).map_err(failed)?;
        copy.file.set_permissions(Permissions::from_mode(present.mode() & 0o7777)).map_err(failed)?;
        copy.file.sync_all().map_err(failed)?;
        let aside = directory.free_name(stamp, |aside| rename_to_free_name(&copy.path, aside)).map_err(failed)?;
        copy.is_placed = true;
        directory.sync().map_err(failed)?;
        Ok(aside)
    }

    fn rewrite(&self, directory: &Directory) -> Result<(), FilesError> {
        let file = directory.open_named(true).map_err(self.io("open"))?;
        file.set_len(0).map_err(self.io("cut"))?;
        self.write_into(&file, "rewrite")?;
        self.give_attributes(&file)?;
        file.sync_all().map_err(self.io("sync"))
    }

    /// Writes the content into an empty file; pages of zeros stay holes.
    fn write_into(&self, file: &File, operation: &'static str) -> Result<(), FilesError> {
        let size = self.record.size;
        file.set_len(size).map_err(self.io(operation))?;
        let mut page: Page = [0; PAGE_SIZE];
        for (number, id) in self.tree.range(0..page_count(size)) {
            self.store.get_page(id, &mut page).map_err(FilesError::store(&self.path))?;
            let at = number * PAGE;
            let length = usize::try_from(size - at).unwrap_or(usize::MAX).min(PAGE_SIZE);
            file.write_all_at(&page[..length], at).map_err(self.io(operation))?;
        }
        Ok(())
    }

    /// True if the file holds what it held at the checkpoint.
    fn is_content_of(&self, file: &File, metadata: &Metadata) -> Result<bool, FilesError> {
        let size = self.record.size;
        if metadata.len() != size {
            return Ok(false);
        }
        let end = page_count(size) * PAGE;
        let (mut held, mut page): (Page, Page) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        let mut at = 0;
        while at < end {
            let data = next_data(file, at, end).map_err(self.io("read"))?;
            if self.tree.range(at / PAGE..data.start / PAGE).next().is_some() {
                return Ok(false);
            }
            for number in data.start / PAGE..data.end / PAGE {
                let read = read_full(file, &mut held, number * PAGE, size).map_err(self.io("read"))?;
                held[read..].fill(0);
                self.store.get_page(self.tree.get(number), &mut page).map_err(FilesError::store(&self.path))?;
                if held != page {
                    return Ok(false);
                }
            }
            at = data.end;
        }
        Ok(true)
    }

    fn give_attributes(&self, file: &File) -> Result<(), FilesError> {
        self.give_owner_and_mode(file)?;
        let since = Duration::from_nanos(self.record.modified_unix_ns.unsigned_abs());
        let modified = if self.record.modified_unix_ns < 0 { UNIX_EPOCH - since } else { UNIX_EPOCH + since };
        file.set_times(FileTimes::new().set_modified(modified)).map_err(self.io("set the time of"))
    }

    fn give_owner_and_mode(&self, file: &File) -> Result<(), FilesError> {
        let FileRecord { mode, uid, gid, .. } = *self.record;
        let held = file.metadata().map_err(self.io("look at"))?;
        // Without privilege one may set the mode of one's own files, but not give them to oneself again.
        if (held.uid(), held.gid()) != (uid, gid) {
            fchown(file, Some(uid), Some(gid)).map_err(self.io("set the owner of"))?;
        }
        file.set_permissions(Permissions::from_mode(mode & 0o7777)).map_err(self.io("set the mode of"))
    }

    fn io(&self, operation: &'static str) -> impl FnOnce(io::Error) -> FilesError + use<> {
        FilesError::io(operation, self.path.clone())
    }

    fn half_way(&self, aside: &Path) -> impl FnOnce(FilesError) -> FilesError + use<> {
        let (path, aside) = (self.path.clone(), aside.to_path_buf());
        move |source| FilesError::HalfWay { path, aside, source: Box::new(source) }
    }
}

/// The path of a record, if it is one that a checkpoint of ours can hold.
fn checked(record: &FileRecord) -> Result<PathBuf, &'static str> {
    let path = decode_path(&record.path).ok_or("its escapes are not right")?;
    let bytes = path.as_os_str().as_bytes();
    if bytes.contains(&0) {
        return Err("it holds a zero byte");
    }
    if !bytes.starts_with(b"/") || bytes.ends_with(b"/") {
        return Err("it is not absolute, or ends with a slash");
    }
    // `components` drops single dots: only what comes out as it went in is plain.
    let plain: PathBuf = path.components().collect();
    if plain.as_os_str() != path.as_os_str() || path.components().any(|part| part == Component::ParentDir) {
        return Err("it is not a plain path");
    }
    let in_devices = path.starts_with("/dev") && !path.starts_with("/dev/shm");
    if in_devices || path.starts_with("/proc") || path.starts_with("/sys") {
        return Err("no regular file is there");
    }
    if i64::try_from(record.size).is_err() {
        return Err("no file has that size");
    }
    Ok(path)
}

/// `YYYYmmddTHHMMSS` in UTC.
fn stamp(now: SystemTime) -> String {
    let seconds = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Days since 1 March of the year 0: leap days then come at the end of a year.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}{month:02}{day:02}T{:02}{:02}{:02}", second / 3600, second / 60 % 60, second % 60)
}

/// The directory of a file, held open, so that everything happens in this one, whatever its path means meanwhile.
struct Directory {
    handle: Rc<OwnedFd>,
    path: PathBuf,
    /// The file's name in it.
    name: OsString,
}

impl Directory {
    /// Walks down to the directory of `path`, through no symbolic link, and makes those that are missing.
    fn open(path: &Path, record: &FileRecord) -> Result<Directory, FilesError> {
        let name = path.file_name().unwrap_or_default().to_os_string();
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let failed = |path: &Path, errno: Errno| FilesError::io("open", path)(errno.into());
        let root = openat(AT_FDCWD, "/", flags, Mode::empty()).map_err(|errno| failed(Path::new("/"), errno))?;
        let mut directory = Directory { handle: Rc::new(root), path: PathBuf::from("/"), name };
        let parent = path.parent().unwrap_or(Path::new("/"));
        for part in parent.components() {
            let Component::Normal(part) = part else { continue };
            let below = directory.path.join(part);
            let handle = match openat(&*directory.handle, part, flags, Mode::empty()) {
                Err(Errno::ENOENT) => directory
                    .make(part, record)
                    .map_err(FilesError::io("create the directory", &below))
                    .and_then(|()| {
                        openat(&*directory.handle, part, flags, Mode::empty()).map_err(|errno| failed(&below, errno))
                    })?,
                Err(Errno::ENOTDIR | Errno::ELOOP) => return Err(FilesError::NoDirectory { path: below }),
                opened => opened.map_err(|errno| failed(&below, errno))?,
            };
            directory.handle = Rc::new(handle);
            directory.path = below;
        }
        Ok(directory)
    }

    fn make(&self, name: &OsStr, record: &FileRecord) -> io::Result<()> {
        fs::create_dir(self.at(name))?;
        let made = fs::symlink_metadata(self.at(name))?;
        if (made.uid(), made.gid()) != (record.uid, record.gid) {
            lchown(self.at(name), Some(record.uid), Some(record.gid))?;
        }
        self.sync()
    }

    /// A path to a name in this directory that depends on nothing above it.
    fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.handle.as_raw_fd())).join(name)
    }

    fn sync(&self) -> io::Result<()> {
        File::open(self.at("."))?.sync_all()
    }

    fn open_named(&self, write: bool) -> io::Result<File> {
        let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
        OpenOptions::new().read(true).write(write).custom_flags(flags).open(self.at(&self.name))
    }

    /// The file as it is now, if it is a regular file.
    fn regular(&self) -> io::Result<Option<(File, Metadata)>> {
        match fs::symlink_metadata(self.at(&self.name)) {
            Ok(present) if present.is_file() => {}
            Ok(_) => return Ok(None),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        }
        let file = self.open_named(false)?;
        let metadata = file.metadata()?;
        Ok(metadata.is_file().then_some((file, metadata)))
    }

    fn create_temporary(&self) -> io::Result<Unnamed> {
        for attempt in 0.. {
            let path = self.at(format!(".pagemark-new-{}-{attempt}", std::process::id()));
            match OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists && attempt < 10_000 => {}
                opened => {
                    let _directory = Rc::clone(&self.handle);
                    return Ok(Unnamed { file: opened?, path, is_placed: false, _directory });
                }
            }
        }
        Err(ErrorKind::AlreadyExists.into())
    }

    /// Gives what is there now its second name, or its only one if it can have no two. None if it is a mount
    /// point, which keeps its name.
    fn set_aside(&self, present: &Metadata, stamp: &str) -> io::Result<Option<PathBuf>> {
        let named = self.at(&self.name);
        let kept = self.free_name(stamp, |aside| {
            if present.is_file() {
                match fs::hard_link(&named, aside) {
                    Ok(()) => return Ok(()),
                    Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(error),
                    // A file system without links, or a mount point: the rename tells.
                    Err(_) => {}
                }
            }
            rename_to_free_name(&named, aside)
        });
        match kept {
            Ok(aside) => self.sync().map(|()| Some(aside)),
            Err(error) if matches!(error.raw_os_error(), Some(libc::EBUSY | libc::EXDEV)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Calls `take` with names for what is set aside until one is free.
    fn free_name(&self, stamp: &str, mut take: impl FnMut(&Path) -> io::Result<()>) -> io::Result<PathBuf> {
        for number in 1.. {
            let mut suffix = format!(".pagemark-aside-{stamp}");
            if number > 1 {
                suffix.push_str(&format!("-{number}"));
            }
            let bytes = self.name.as_bytes();
            let mut name = OsStr::from_bytes(&bytes[..bytes.len().min(NAME_MAX - suffix.len())]).to_os_string();
            name.push(suffix);
            match take(&self.at(&name)) {
                Err(error) if error.kind() == ErrorKind::AlreadyExists && number < 10_000 => {}
                taken => return taken.map(|()| self.path.join(name)),
            }
        }
        Err(ErrorKind::AlreadyExists.into())
    }
}

fn rename_to_free_name(from: &Path, to: &Path) -> io::Result<()> {
    Ok(renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE)?)
}

/// A new file under a name of no meaning, removed if it is not placed.
struct Unnamed {
    file: File,
    path: PathBuf,
    is_placed: bool,
    /// What `path` leads through.
    _directory: Rc<OwnedFd>,
}

impl Drop for Unnamed {
    fn drop(&mut self) {
        if !self.is_placed {
            // Nothing depends on it being gone, and there is nobody to tell.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use pagemark::{ContentId, Kind, MemoryStore};

    use super::super::encode_path;
    use super::*;

    /// A record of `content` at `path`, owned by whoever runs the test.
    fn record(path: &Path, content: &[u8], store: &mut MemoryStore) -> FileRecord {
        let mut tree = PageTree::new();
        for (number, chunk) in (0..).zip(content.chunks(PAGE_SIZE)) {
            let mut page = [0; PAGE_SIZE];
            page[..chunk.len()].copy_from_slice(chunk);
            tree.set(number, store.put(Kind::Page, &page).unwrap());
        }
        FileRecord {
            path: encode_path(path),
            size: content.len() as u64,
            root: tree.save(store).unwrap(),
            mode: 0o640,
            uid: nix::unistd::geteuid().as_raw(),
            gid: nix::unistd::getegid().as_raw(),
            modified_unix_ns: 1_234_567_890_123_456_789,
        }
    }

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    const NOW: Duration = Duration::from_secs(1_709_210_096);
    const ASIDE: &str = "pagemark-aside-20240229T123456";

    #[test]
    fn times_are_told_in_utc() {
        assert_eq!(stamp(UNIX_EPOCH), "19700101T000000");
        assert_eq!(stamp(UNIX_EPOCH + NOW), "20240229T123456");
        assert_eq!(stamp(UNIX_EPOCH + Duration::from_secs(951_868_799)), "20000229T235959");
        assert_eq!(stamp(UNIX_EPOCH + Duration::from_secs(4_107_542_400)), "21000301T000000");
    }

    #[test]
    fn what_is_there_is_kept_under_a_free_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let mut store = MemoryStore::new();
        for (number, content) in [&b"first"[..], b"second"].into_iter().enumerate() {
            fs::write(&path, content).unwrap();
            let then = record(&path, b"then", &mut store);
            let done = put_back(&[then], &store, UNIX_EPOCH + NOW).unwrap();
            let aside = done[0].set_aside.clone().unwrap();
            let name = if number == 0 { format!("file.{ASIDE}") } else { format!("file.{ASIDE}-2") };
            assert_eq!(aside, directory.path().join(name));
            assert_eq!(fs::read(aside).unwrap(), content);
            assert_eq!(fs::read(&path).unwrap(), b"then");
        }
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!(
            (metadata.mode() & 0o7777, metadata.mtime(), metadata.mtime_nsec()),
            (0o640, 1_234_567_890, 123_456_789)
        );
        assert_eq!(names(directory.path()).len(), 3);

        fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let then = record(&path, b"then", &mut store);
        assert_eq!(put_back(&[then], &store, UNIX_EPOCH + NOW).unwrap()[0].what, What::Permissions);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
    }

    #[test]
    fn a_name_as_long_as_can_be_still_gets_its_aside() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("n".repeat(NAME_MAX));
        let mut store = MemoryStore::new();
        fs::write(&path, b"now").unwrap();
        let then = record(&path, b"then", &mut store);
        let done = put_back(&[then], &store, UNIX_EPOCH + NOW).unwrap();
        assert_eq!(fs::read(done[0].set_aside.as_ref().unwrap()).unwrap(), b"now");
    }

    #[test]
    fn missing_directories_come_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/b/file");
        let mut store = MemoryStore::new();
        let then = record(&path, &[7; 10_000], &mut store);
        assert_eq!(put_back(&[then], &store, UNIX_EPOCH + NOW).unwrap()[0].what, What::Recreated);
        assert_eq!(fs::read(path).unwrap(), [7; 10_000]);
    }

    #[test]
    fn a_file_with_further_names_keeps_them() {
        let directory = tempfile::tempdir().unwrap();
        let (path, second) = (directory.path().join("file"), directory.path().join("second"));
        fs::write(&path, [9; 9000]).unwrap();
        fs::hard_link(&path, &second).unwrap();
        let mut store = MemoryStore::new();
        let mut content = vec![0; 20_000];
        content[15_000] = 1;
        let then = record(&path, &content, &mut store);
        let done = put_back(&[then], &store, UNIX_EPOCH + NOW).unwrap();
        assert_eq!(done[0].what, What::Rewritten);
        assert_eq!(fs::read(done[0].set_aside.as_ref().unwrap()).unwrap(), [9; 9000]);
        assert!(fs::read(&path).unwrap() == content && fs::read(&second).unwrap() == content);
        assert_eq!(fs::metadata(&path).unwrap().nlink(), 2);
        assert_eq!(names(directory.path()).len(), 3);
    }

    #[test]
    fn a_mount_point_is_rewritten() {
        let directory = tempfile::tempdir().unwrap();
        let (path, below) = (directory.path().join("file"), directory.path().join("below"));
        fs::write(&path, b"covered").unwrap();
        fs::write(&below, b"now").unwrap();
        if let Err(error) = bind_for_this_thread(&below, &path) {
            pagemark_testing::skip!("mount in a namespace of its own: {error}");
        }
        let mut store = MemoryStore::new();
        let then = record(&path, b"then", &mut store);
        let done = put_back(&[then], &store, UNIX_EPOCH + NOW).unwrap();
        assert_eq!(done[0].what, What::Rewritten);
        assert_eq!(fs::read(done[0].set_aside.as_ref().unwrap()).unwrap(), b"now");
        assert_eq!(fs::read(&below).unwrap(), b"then");
        assert_eq!(names(directory.path()), ["below", "file", &format!("file.{ASIDE}")]);
    }

    /// Mounts one file over another, for the running thread alone: nobody has to unmount it.
    fn bind_for_this_thread(from: &Path, to: &Path) -> io::Result<()> {
        use std::ffi::CString;
        let [from, to] = [from, to].map(|path| CString::new(path.as_os_str().as_bytes()).unwrap());
        let none = std::ptr::null();
        // SAFETY: the strings end with a zero and live longer than the calls; `none` stands for what is not used.
        let failed = unsafe {
            libc::unshare(libc::CLONE_NEWNS | libc::CLONE_FS) != 0
                || libc::mount(none, c"/".as_ptr(), none, libc::MS_PRIVATE | libc::MS_REC, none.cast()) != 0
                || libc::mount(from.as_ptr(), to.as_ptr(), none, libc::MS_BIND, none.cast()) != 0
        };
        if failed { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    #[test]
    fn what_is_no_file_any_more_is_moved_aside() {
        let directory = tempfile::tempdir().unwrap();
        let mut store = MemoryStore::new();
        let secret = directory.path().join("secret");
        fs::write(&secret, b"secret").unwrap();
        let (link, folder) = (directory.path().join("link"), directory.path().join("folder"));
        symlink(&secret, &link).unwrap();
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("inside"), b"inside").unwrap();
        let records = [record(&link, b"then", &mut store), record(&folder, b"then", &mut store)];
        let done = put_back(&records, &store, UNIX_EPOCH + NOW).unwrap();
        assert_eq!(fs::read(&secret).unwrap(), b"secret");
        assert_eq!(fs::read_link(done[0].set_aside.as_ref().unwrap()).unwrap(), secret);
        assert_eq!(fs::read(done[1].set_aside.as_ref().unwrap().join("inside")).unwrap(), b"inside");
        assert!([link, folder].iter().all(|path| fs::symlink_metadata(path).unwrap().is_file()));
    }

    #[test]
    fn no_link_leads_elsewhere() {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("elsewhere")).unwrap();
        symlink("elsewhere", directory.path().join("way")).unwrap();
        let mut store = MemoryStore::new();
        let then = record(&directory.path().join("way/file"), b"then", &mut store);
        let error = put_back(&[then], &store, UNIX_EPOCH + NOW).unwrap_err();
        assert!(matches!(&error, FilesError::NoDirectory { path } if path.ends_with("way")), "{error}");
        assert_eq!(names(&directory.path().join("elsewhere")), [""; 0]);
    }

    #[test]
    fn hostile_records_are_refused() {
        let mut store = MemoryStore::new();
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
            let error = put_back(&[bad], &store, UNIX_EPOCH + NOW).unwrap_err();
            assert!(matches!(error, FilesError::BadPath { .. }), "{path}: {error}");
        }
        let twice = put_back(&[good.clone(), good.clone()], &store, UNIX_EPOCH + NOW).unwrap_err();
        assert!(matches!(twice, FilesError::BadPath { .. }), "{twice}");
        let huge = FileRecord { size: u64::MAX, ..good };
        assert!(matches!(put_back(&[huge], &store, UNIX_EPOCH + NOW), Err(FilesError::BadPath { .. })));
    }

    #[test]
    fn what_cannot_be_read_touches_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let mut store = MemoryStore::new();
        let (one, two) = (directory.path().join("one"), directory.path().join("two"));
        fs::write(&one, b"now").unwrap();
        fs::write(&two, b"now").unwrap();
        let good = record(&one, b"then", &mut store);
        let mut tree = PageTree::new();
        tree.set(0, ContentId([7; 16]));
        let bad = FileRecord { root: tree.save(&mut store).unwrap(), ..record(&two, b"then", &mut store) };
        let error = put_back(&[good, bad], &store, UNIX_EPOCH + NOW).unwrap_err();
        assert!(matches!(error, FilesError::Store { .. }), "{error}");
        assert_eq!(names(directory.path()), ["one", "two"]);
        assert_eq!((fs::read(one).unwrap(), fs::read(two).unwrap()), (b"now".to_vec(), b"now".to_vec()));
    }
}
