//! Asides: what files held before a restore changed them.
//!
//! A restore that changes files makes one directory. It copies the present content of each file
//! there, syncs the copies, and writes a description, before it changes the first file. Whatever
//! happens to the restore then, the description names each file and the copy of its content.
//!
//! The directory is not beside the files: a server may scan its data directory, and what is in
//! `/dev/shm` takes up memory. Copies are thus made across file systems, if need be.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::fcntl::{OFlag, openat, renameat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::geteuid;
use pagemark_trace::error::{Error, ErrorKind, Object, Result};
use serde::{Deserialize, Serialize};

use super::copy::copy;
use super::directory::{Held, path_of};
use super::output_directory::OutputDirectory;
use super::path::encode_path;

/// The description in a directory.
pub(crate) const DESCRIPTION: &str = "aside.json";
/// Longest part of a copy's name that is taken from the file's name.
const NAME_MAX: usize = 100;

/// The directory for asides of restores that name no other: `pagemark/asides` in the user's
/// directory for state, `$XDG_STATE_HOME`, else `~/.local/state`; else in `/var/lib`. A directory
/// of another user's, as `HOME` may be after `su`, does not count.
pub fn default_directory() -> PathBuf {
    let own = |path: &PathBuf| {
        // The directory for state may be missing.
        let existing = path.ancestors().find_map(|path| fs::metadata(path).ok());
        existing.is_some_and(|found| found.uid() == geteuid().as_raw())
    };
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from).filter(own);
    let home = || set("HOME").map(|home| home.join(".local/state"));
    set("XDG_STATE_HOME").or_else(home).unwrap_or_else(|| "/var/lib".into()).join("pagemark/asides")
}

/// The content that the files of one restore had before.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Aside {
    /// The checkpoint that was restored, such as `simulate@12`.
    pub checkpoint: String,
    /// When the restore began, microseconds since 1970 UTC.
    pub begun_unix_us: u64,
    /// True if the restore succeeded. While it is false, the restore is in progress, or it was
    /// killed and may have changed any of the files.
    pub is_complete: bool,
    /// The files that the restore changes.
    pub files: Vec<AsideFile>,
}

/// A file that a restore changes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct AsideFile {
    /// Absolute path, escaped as by [`encode_path`].
    pub path: String,
    /// Name of the copy in the directory. None if the content does not change, or there was no
    /// file.
    pub copy: Option<String>,
    /// What the file led to, escaped, if it was a symbolic link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_target: Option<String>,
    /// False if the restore creates the file.
    pub existed: bool,
    /// Permission bits that it had.
    pub mode: u32,
    /// Owner that it had.
    pub uid: u32,
    /// Group that it had.
    pub gid: u32,
    /// Last modification, nanoseconds since 1970 UTC.
    pub modified_unix_ns: i64,
}

impl AsideFile {
    /// A file that has these attributes now; None if there is no file.
    pub(super) fn new(path: &Path, copy: Option<String>, present: Option<&Metadata>) -> AsideFile {
        AsideFile {
            path: encode_path(path),
            copy,
            link_target: None,
            existed: present.is_some(),
            mode: present.map_or(0, |present| present.mode() & 0o7777),
            uid: present.map_or(0, Metadata::uid),
            gid: present.map_or(0, Metadata::gid),
            modified_unix_ns: present.map_or(0, |present| {
                present.mtime().saturating_mul(1_000_000_000).saturating_add(present.mtime_nsec())
            }),
        }
    }
}

/// The directory that a restore in progress fills.
#[derive(Debug)]
pub(super) struct AsideDirectory {
    path: PathBuf,
    aside: Aside,
    /// Files that were copied or kept.
    file_count: u64,
    /// The directory. Locked as long as the restore is in progress.
    lock: File,
    /// The directory that it is in.
    parent: File,
}

impl AsideDirectory {
    /// Makes a directory in `parent` for the restore of `checkpoint`.
    pub(super) fn create(parent: &Path, checkpoint: &str, now: SystemTime) -> Result<AsideDirectory> {
        let failed = |error| {
            let object = Object::File(parent.into());
            Error::system("make a directory for the present content of files in", object)(error)
                .help("name another directory for asides")
        };
        let held = make_parent(parent).map_err(failed)?;
        check_private(parent, &held)?;
        let name = format!("{checkpoint}-{}", stamp(now));
        for number in 1.. {
            let name = if number == 1 { name.clone() } else { format!("{name}-{number}") };
            match mkdirat(&held, &*name, Mode::S_IRWXU) {
                Err(nix::Error::EEXIST) if number < 10_000 => {}
                made => {
                    made.map_err(|errno| failed(errno.into()))?;
                    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
                    let lock = openat(&held, &*name, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
                    let lock = File::from(lock);
                    lock.lock().map_err(failed)?;
                    let begun_unix_us = now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
                    let (checkpoint, files) = (checkpoint.to_owned(), Vec::new());
                    let aside = Aside { checkpoint, begun_unix_us, is_complete: false, files };
                    return Ok(AsideDirectory { path: parent.join(name), aside, file_count: 0, lock, parent: held });
                }
            }
        }
        Err(failed(io::ErrorKind::AlreadyExists.into()))
    }

    /// Path of a copy.
    pub(super) fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Keeps the file at `path`, which is going to be removed; `held` is it. Returns its name here.
    /// The file gets a second name if the directory is in the same file system, else a copy.
    pub(super) fn keep(&mut self, path: &Path, held: &Held, open: impl FnOnce() -> Result<File>) -> Result<String> {
        let name = self.new_name(path);
        if held.link_to(&self.lock, &name).is_ok() {
            return Ok(name);
        }
        self.copy(path, &open()?)
    }

    /// Holds what was kept under this name.
    pub(super) fn hold(&self, name: &str) -> io::Result<Held> {
        Held::in_directory(&self.lock, name)
    }

    /// Opens what was kept under this name.
    pub(super) fn open(&self, name: &str) -> io::Result<File> {
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        Ok(openat(&self.lock, name, flags, Mode::empty())?.into())
    }

    /// A new name for what the file at `path` holds.
    fn new_name(&mut self, path: &Path) -> String {
        self.file_count += 1;
        let name = path.file_name().unwrap_or_default().as_bytes();
        let name = String::from_utf8_lossy(&name[..name.len().min(NAME_MAX)]).into_owned();
        // What cannot be shown or would be ambiguous is left out.
        let name: String = name.chars().filter(|c| !c.is_control() && *c != '\u{fffd}').collect();
        format!("{}-{name}", self.file_count)
    }

    /// Copies the present content of the file at `path`. Returns the name of the copy.
    pub(super) fn copy(&mut self, path: &Path, file: &File) -> Result<String> {
        let name = self.new_name(path);
        let copied = self.new_file(&name).and_then(|to| {
            copy(file, &to)?;
            to.sync_all()
        });
        let failed = Error::system("copy the present content of", Object::File(path.into()));
        copied.map(|()| name).map_err(|error| {
            failed(error).help(format!("no file was changed; the copy needs room in {}", self.path.display()))
        })
    }

    /// Describes the files that are going to change. They may be changed from now on.
    pub(super) fn describe(&mut self, files: Vec<AsideFile>) -> Result<()> {
        self.aside.files = files;
        self.publish()?;
        // The name of this directory is as durable as what is in it.
        self.parent.sync_all().map_err(super::io("sync the directory of", &self.path))
    }

    /// The restore has succeeded.
    pub(super) fn complete(mut self) -> Result<()> {
        self.aside.is_complete = true;
        self.publish()
    }

    /// The files are as they were, so nothing has to be kept.
    pub(super) fn remove(self) -> Result<()> {
        let name = self.path.file_name().unwrap_or_default();
        fs::remove_dir_all(path_of(&self.parent).join(name)).map_err(super::io("remove", &self.path))
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn publish(&self) -> Result<()> {
        let new = format!("{DESCRIPTION}.new");
        let written = serde_json::to_vec_pretty(&self.aside).map_err(io::Error::from).and_then(|text| {
            let mut file = self.new_file(&new)?;
            file.write_all(&text)?;
            file.sync_all()?;
            renameat(&self.lock, &*new, &self.lock, DESCRIPTION)?;
            self.lock.sync_all()
        });
        written.map_err(super::io("write", self.path.join(DESCRIPTION)))
    }

    fn new_file(&self, name: &str) -> io::Result<File> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        Ok(openat(&self.lock, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?.into())
    }
}

/// Fails if another user could exchange what is in the directory: what is set aside comes back if
/// the restore fails.
fn check_private(path: &Path, directory: &File) -> Result<()> {
    let found = directory.metadata().map_err(super::io("examine", path))?;
    if found.uid() == geteuid().as_raw() && found.mode() & 0o022 == 0 {
        return Ok(());
    }
    let reason = "can be changed by other users: the present content of files cannot be kept there";
    Err(Error::about(ErrorKind::InTheWay, Object::File(path.into()), reason)
        .help("no file was changed; name another directory with --asides, which is yours alone"))
}

impl Drop for AsideDirectory {
    fn drop(&mut self) {
        // A process that another thread is starting has a copy of the descriptor until it executes its
        // program, so that closing the descriptor may leave the directory locked.
        let _ = self.lock.unlock();
    }
}

/// The asides of one restore, as they are found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FoundAside {
    /// Its directory.
    pub path: PathBuf,
    /// Space that it takes up, bytes.
    pub allocated_bytes: u64,
    /// The state of the restore.
    pub state: RestoreState,
    /// The description; None if the restore was ended before it changed a file.
    pub aside: Option<Aside>,
}

/// The state of a restore that changes files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RestoreState {
    /// It succeeded.
    Complete,
    /// The restore is in progress.
    InProgress,
    /// The restore was killed. Each of its files may have been changed.
    Interrupted,
    /// It was killed before it changed a file.
    Unused,
}

/// Lists the asides in `parent`, the oldest first; none if there is no such directory.
///
/// # Errors
/// [`ErrorKind::System`] if the directory cannot be read.
pub fn list(parent: &Path) -> Result<Vec<FoundAside>> {
    Ok(held(parent)?.map(|held| list_in(parent, &held)).transpose()?.unwrap_or_default())
}

/// Opens a directory of asides, which nobody else can exchange then. None if there is none.
fn held(parent: &Path) -> Result<Option<File>> {
    match open_parent(parent) {
        Ok(held) => check_private(parent, &held).map(|()| Some(held)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(super::io("read the directory", parent)(error)),
    }
}

fn list_in(parent: &Path, held: &File) -> Result<Vec<FoundAside>> {
    let failed = || super::io("read the directory", parent);
    let entries = fs::read_dir(path_of(held)).map_err(failed())?;
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed())?;
        // Directories alone are asides, and a directory may be removed meanwhile.
        if entry.file_type().is_ok_and(|kind| kind.is_dir())
            && let Some(aside) = find(&entry.path(), parent.join(entry.file_name()))?
            && (aside.aside.is_some() || is_of_restore(&entry.file_name()))
        {
            found.push(aside);
        }
    }
    found.sort_by_key(|found| (found.aside.as_ref().map(|aside| aside.begun_unix_us), found.path.clone()));
    Ok(found)
}

/// The asides in the directory `path`, which is open at `at`. None if it is gone.
fn find(at: &Path, path: PathBuf) -> Result<Option<FoundAside>> {
    let read = |path: &Path| -> io::Result<(Option<Aside>, bool, u64)> {
        let is_locked = open_directory(path)?.try_lock_shared().is_err();
        let description = match fs::read(path.join(DESCRIPTION)) {
            Ok(text) => Some(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let mut bytes = 0;
        for file in fs::read_dir(path)? {
            bytes += file?.metadata().map_or(0, |metadata| metadata.blocks() * 512);
        }
        Ok((description, is_locked, bytes))
    };
    match read(at) {
        Ok((aside, is_locked, allocated_bytes)) => {
            let state = match &aside {
                _ if is_locked => RestoreState::InProgress,
                Some(aside) if aside.is_complete => RestoreState::Complete,
                Some(_) => RestoreState::Interrupted,
                None => RestoreState::Unused,
            };
            Ok(Some(FoundAside { path, allocated_bytes, state, aside }))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(super::io("read the aside", path)(error)),
    }
}

/// Removes the asides `name` in `parent`: the content that the files had before that restore is
/// lost.
///
/// # Errors
/// [`ErrorKind::NoAside`]: there are none of that name. [`ErrorKind::FileInUse`]: the restore is in
/// progress. [`ErrorKind::System`].
pub fn remove(parent: &Path, name: &OsStr) -> Result<()> {
    let path = parent.join(name);
    let is_plain = path.file_name() == Some(name) && path.parent() == Some(parent);
    let held = if is_plain { held(parent)? } else { None };
    let found = match &held {
        Some(held) => list_in(parent, held)?.into_iter().find(|found| found.path == path),
        None => None,
    };
    let Some((found, held)) = found.zip(held) else {
        return Err(Error::about(ErrorKind::NoAside, Object::File(path), "holds no asides of a restore"));
    };
    if found.state == RestoreState::InProgress {
        return Err(Error::about(ErrorKind::FileInUse, Object::File(path), "belongs to a restore that is in progress"));
    }
    fs::remove_dir_all(path_of(&held).join(name)).map_err(super::io("remove", path))
}

fn open_directory(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY | libc::O_NOFOLLOW).open(path)
}

/// Opens a directory of asides. Another user may own one on the way to it.
fn open_parent(path: &Path) -> io::Result<File> {
    OutputDirectory::open_itself(path)?.readable()
}

/// Opens a directory of asides, and makes it and those above it if they are missing.
fn make_parent(path: &Path) -> io::Result<File> {
    OutputDirectory::open_or_make(path)?;
    open_parent(path)
}

/// True for the names that [`AsideDirectory::create`] gives, whatever else lies beside these.
fn is_of_restore(name: &OsStr) -> bool {
    let is_stamp = |part: &[u8]| {
        part.len() == 15
            && part
                .iter()
                .enumerate()
                .all(|(at, byte)| (at == 8) == (*byte == b'T') && (at == 8 || byte.is_ascii_digit()))
    };
    name.as_bytes().contains(&b'@') && name.as_bytes().split(|byte| *byte == b'-').any(is_stamp)
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn stamps_are_in_utc() {
        let stamp_at = |seconds| stamp(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(stamp_at(0), "19700101T000000");
        assert_eq!(stamp_at(1_709_210_096), "20240229T123456");
        assert_eq!(stamp_at(951_868_799), "20000229T235959");
        assert_eq!(stamp_at(4_107_542_400), "21000301T000000");
    }

    #[test]
    fn each_state_of_a_restore_is_listed_and_only_finished_asides_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let parent = directory.path().join("asides");
        assert_eq!(list(&parent).unwrap(), []);
        let now = UNIX_EPOCH + Duration::from_secs(1_709_210_096);
        let state = || list(&parent).unwrap().iter().map(|found| found.state).collect::<Vec<_>>();
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"before").unwrap();

        let mut aside = AsideDirectory::create(&parent, "job@1", now).unwrap();
        assert!(aside.path().ends_with("job@1-20240229T123456"));
        assert_eq!(fs::metadata(aside.path()).unwrap().mode() & 0o777, 0o700);
        let name = aside.copy(file.path(), file.as_file()).unwrap();
        assert_eq!(fs::read(aside.path_of(&name)).unwrap(), b"before");
        assert_eq!(state(), [RestoreState::InProgress]);
        let path = aside.path().to_owned();
        let in_use = remove(&parent, path.file_name().unwrap()).unwrap_err();
        assert_eq!(in_use.kind(), ErrorKind::FileInUse, "{in_use}");

        let unused = AsideDirectory::create(&parent, "job@1", now).unwrap();
        assert!(unused.path().ends_with("job@1-20240229T123456-2"));
        drop(unused);
        let present = file.as_file().metadata().unwrap();
        aside.describe(vec![AsideFile::new(file.path(), Some(name), Some(&present))]).unwrap();
        // As a process has it that another thread is starting.
        let copy = aside.lock.try_clone().unwrap();
        drop(aside);
        assert_eq!(state(), [RestoreState::Unused, RestoreState::Interrupted]);
        drop(copy);
        let mut done = AsideDirectory::create(&parent, "job@2", now + Duration::from_secs(1)).unwrap();
        done.describe(Vec::new()).unwrap();
        done.complete().unwrap();
        assert_eq!(state(), [RestoreState::Unused, RestoreState::Interrupted, RestoreState::Complete]);

        for name in ["..", ".", "", "a/b", "nothing"] {
            assert_eq!(remove(&parent, OsStr::new(name)).unwrap_err().kind(), ErrorKind::NoAside, "{name}");
        }
        for found in list(&parent).unwrap() {
            remove(&parent, found.path.file_name().unwrap()).unwrap();
        }
        assert_eq!((state(), parent.exists()), (vec![], true));
    }

    #[test]
    fn a_directory_that_others_can_exchange_is_neither_listed_nor_emptied() {
        let directory = tempfile::tempdir().unwrap();
        let parent = directory.path().join("asides");
        drop(AsideDirectory::create(&parent, "job@1", UNIX_EPOCH).unwrap());
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&parent, &link).unwrap();
        let name = OsStr::new("job@1-19700101T000000");
        assert!(list(&link).is_err() && remove(&link, name).is_err());
        let mode = |mode| fs::set_permissions(&parent, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        mode(0o777);
        assert_eq!(list(&parent).unwrap_err().kind(), ErrorKind::InTheWay);
        assert_eq!(remove(&parent, name).unwrap_err().kind(), ErrorKind::InTheWay);
        mode(0o700);
        assert_eq!(list(&parent).unwrap().len(), 1);
        // Another one takes its place while it is held.
        let held = held(&parent).unwrap().unwrap();
        fs::rename(&parent, directory.path().join("moved")).unwrap();
        fs::create_dir_all(parent.join("other")).unwrap();
        assert_eq!(list_in(&parent, &held).unwrap()[0].path, parent.join(name));
    }

    #[test]
    fn a_name_of_any_bytes_gets_a_copy() {
        let directory = tempfile::tempdir().unwrap();
        let mut aside = AsideDirectory::create(directory.path(), "job@1", UNIX_EPOCH).unwrap();
        let file = tempfile::tempfile().unwrap();
        let long = [b"\xff\n".as_slice(), &[b'n'; 253]].concat();
        let name = aside.copy(&Path::new("/").join(OsStr::from_bytes(&long)), &file).unwrap();
        assert!(name.starts_with("1-n") && name.len() < 150, "{name}");
        assert!(aside.copy(Path::new("/a"), &file).unwrap().starts_with("2-a"));
    }
}
