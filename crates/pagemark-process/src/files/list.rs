//! Which files a target can write: from `/proc`, while it runs or is frozen.

use std::collections::HashMap;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::statfs::{HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};
use pagemark::Range;

use super::FilesError;

/// A regular file that a target can write, as it was when it was listed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OpenFile {
    /// Its absolute path.
    pub path: PathBuf,
    /// The descriptors that can write it.
    pub descriptors: Vec<Descriptor>,
    /// The shared mappings that can write it.
    pub mappings: Vec<SharedMapping>,
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last change of the content, nanoseconds since 1970 UTC.
    pub mtime_ns: i64,
    /// Last change of anything, nanoseconds since 1970 UTC.
    pub ctime_ns: i64,
    /// The file system's device.
    pub dev: u64,
    /// The file's number in the file system.
    pub inode: u64,
    /// When the file was made, nanoseconds since 1970 UTC, where the file system knows: tells apart two files that
    /// had the same number one after the other.
    pub born_ns: Option<i64>,
    /// When this was looked up, nanoseconds since 1970 UTC, from just before.
    pub seen_ns: i64,
    /// True if every writer appends and none maps it.
    pub append_only: bool,
    /// True if the times may not tell of a write: the file system does not note those through a mapping, and the
    /// file is open so that it could be mapped.
    pub times_unreliable: bool,
}

/// A descriptor of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// The process.
    pub pid: i32,
    /// Its number there.
    pub fd: i32,
}

/// A shared writable mapping of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedMapping {
    /// The process.
    pub pid: i32,
    /// Addresses.
    pub addresses: Range,
    /// Where in the file the first address is, bytes.
    pub offset: u64,
}

/// What tells one file from every other.
pub(super) type Key = (u64, u64, Option<i64>);

impl OpenFile {
    pub(super) fn key(&self) -> Key {
        (self.dev, self.inode, self.born_ns)
    }

    /// Opens it for reading: this very file, whatever its name means by now.
    pub(super) fn open(&self) -> Result<File, FilesError> {
        let through_descriptors =
            self.descriptors.iter().map(|d| PathBuf::from(format!("/proc/{}/fd/{}", d.pid, d.fd)));
        let through_mappings = self.mappings.iter().map(map_file);
        let mut failure = io::Error::from(io::ErrorKind::NotFound);
        for path in through_descriptors.chain(through_mappings).chain([self.path.clone()]) {
            // The target's access time stays its own, where that is allowed.
            let open = |flags| {
                OpenOptions::new().read(true).custom_flags(flags | libc::O_NONBLOCK | libc::O_NOCTTY).open(&path)
            };
            match open(libc::O_NOATIME).or_else(|_| open(0)).and_then(|file| Ok((file.metadata()?, file))) {
                Ok((metadata, file)) if (metadata.dev(), metadata.ino()) == (self.dev, self.inode) => return Ok(file),
                Ok(_) => {}
                Err(error) => failure = error,
            }
        }
        Err(FilesError::io("open", &self.path)(failure))
    }

    fn new(path: PathBuf, metadata: &Metadata, seen_ns: i64) -> OpenFile {
        OpenFile {
            path,
            descriptors: Vec::new(),
            mappings: Vec::new(),
            size: metadata.size(),
            mode: metadata.mode() & 0o7777,
            uid: metadata.uid(),
            gid: metadata.gid(),
            mtime_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            ctime_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
            dev: metadata.dev(),
            inode: metadata.ino(),
            born_ns: metadata.created().ok().map(unix_ns),
            seen_ns,
            append_only: true,
            times_unreliable: false,
        }
    }
}

/// The regular files that the processes can write, by a descriptor or a shared mapping, each once.
///
/// Left out: what has no name any more (CRIU saves those), and what is no regular file. Shared memory under
/// `/dev/shm` is regular files and is in. A process that is gone has none open.
///
/// # Errors
/// [`FilesError::Process`] if one may not be looked into, [`FilesError::OutOfReach`] if a file's name does not
/// lead to it from here.
pub fn open_for_writing(pids: &[i32]) -> Result<Vec<OpenFile>, FilesError> {
    let mut files: HashMap<(u64, u64), OpenFile> = HashMap::new();
    for &pid in pids {
        match descriptors(pid, &mut files).and_then(|()| mappings(pid, &mut files)) {
            Ok(()) => {}
            Err(Failure::Process(error)) if is_gone(&error) => {}
            Err(Failure::Process(source)) => return Err(FilesError::Process { pid, source }),
            Err(Failure::OutOfReach(path)) => return Err(FilesError::OutOfReach { pid, path }),
        }
    }
    let mut files: Vec<OpenFile> = files.into_values().collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(files)
}

enum Failure {
    Process(io::Error),
    OutOfReach(PathBuf),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::Process(error)
    }
}

type Files = HashMap<(u64, u64), OpenFile>;

fn descriptors(pid: i32, files: &mut Files) -> Result<(), Failure> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let Some(fd) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let link = PathBuf::from(format!("/proc/{pid}/fd/{fd}"));
        let Some(flags) = unless_gone(open_flags(pid, fd))?.flatten() else { continue };
        if flags & libc::O_PATH != 0 || flags & libc::O_ACCMODE == libc::O_RDONLY {
            continue;
        }
        if let Some(file) = entry_of(&link, files)? {
            file.descriptors.push(Descriptor { pid, fd });
            file.append_only &= flags & libc::O_APPEND != 0;
            // Only a descriptor that also reads can be mapped shared and writable.
            file.times_unreliable |= flags & libc::O_ACCMODE == libc::O_RDWR && hides_mapped_writes(&link);
        }
    }
    Ok(())
}

fn mappings(pid: i32, files: &mut Files) -> Result<(), Failure> {
    // Names in it need not be UTF-8; only what stands before them is read.
    for line in fs::read(format!("/proc/{pid}/maps"))?.split(|&byte| byte == b'\n') {
        let Some((addresses, offset)) = shared_writable(&String::from_utf8_lossy(line)) else { continue };
        let mapping = SharedMapping { pid, addresses, offset };
        if let Some(file) = entry_of(&map_file(&mapping), files)? {
            file.mappings.push(mapping);
            file.append_only = false;
        }
    }
    Ok(())
}

/// Addresses and offset, if the line of `/proc/PID/maps` is a shared writable mapping of something with an inode.
fn shared_writable(line: &str) -> Option<(Range, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let (permissions, offset, _device, inode) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    (permissions.contains('w') && permissions.ends_with('s') && inode != "0")
        .then_some((hex(start)?..hex(end)?, hex(offset)?))
}

fn map_file(mapping: &SharedMapping) -> PathBuf {
    let Range { start, end } = mapping.addresses;
    PathBuf::from(format!("/proc/{}/map_files/{start:x}-{end:x}", mapping.pid))
}

/// The entry of the file behind a link under `/proc`; none if that is gone or no file that counts.
fn entry_of<'a>(link: &Path, files: &'a mut Files) -> Result<Option<&'a mut OpenFile>, Failure> {
    // A file may be renamed between two looks at a running target.
    for attempt in 0.. {
        let seen_ns = unix_ns(SystemTime::now());
        let Some((path, metadata)) = unless_gone(fs::read_link(link).and_then(|path| Ok((path, fs::metadata(link)?))))?
        else {
            break;
        };
        if !metadata.is_file() || metadata.nlink() == 0 || path.starts_with("/proc") || path.starts_with("/sys") {
            break;
        }
        let key = (metadata.dev(), metadata.ino());
        if files.contains_key(&key) {
            return Ok(files.get_mut(&key));
        }
        match fs::symlink_metadata(&path) {
            Ok(named) if (named.dev(), named.ino()) == key => {
                return Ok(Some(files.entry(key).or_insert(OpenFile::new(path, &metadata, seen_ns))));
            }
            _ if attempt < 3 => {}
            _ => return Err(Failure::OutOfReach(path)),
        }
    }
    Ok(None)
}

fn open_flags(pid: i32, fd: i32) -> io::Result<Option<i32>> {
    let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}"))?;
    let octal = text.lines().find_map(|line| line.strip_prefix("flags:"));
    Ok(octal.and_then(|digits| i32::from_str_radix(digits.trim(), 8).ok()))
}

fn hides_mapped_writes(link: &Path) -> bool {
    statfs(link).is_ok_and(|fs| [TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&fs.filesystem_type()))
}

/// What a process closes or leaves while it is looked at was not open.
fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

fn nanoseconds(seconds: i64, nanoseconds: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

pub(super) fn unix_ns(time: SystemTime) -> i64 {
    match time.duration_since(UNIX_EPOCH) {
        Ok(since) => i64::try_from(since.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_nanos()).map_or(i64::MIN, |ns| -ns),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use super::*;

    /// What this process has open below `directory`.
    fn listed(directory: &Path) -> Vec<OpenFile> {
        let files = open_for_writing(&[std::process::id() as i32]).expect("our own files can be listed");
        files.into_iter().filter(|file| file.path.starts_with(directory)).collect()
    }

    #[test]
    fn finds_what_can_be_written_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let mut log = OpenOptions::new().append(true).create(true).open(at("log")).unwrap();
        log.write_all(b"line").unwrap();
        let both = OpenOptions::new().write(true).open(at("log")).unwrap();
        let _data = OpenOptions::new().read(true).write(true).create_new(true).open(at("data")).unwrap();
        symlink(at("data"), at("link")).unwrap();
        let _link = OpenOptions::new().write(true).open(at("link")).unwrap();
        let _gone = File::create(at("gone")).unwrap();
        fs::remove_file(at("gone")).unwrap();
        fs::write(at("read"), b"").unwrap();
        let _read = File::open(at("read")).unwrap();

        let files = listed(directory.path());
        let summary: Vec<_> =
            files.iter().map(|f| (f.path.clone(), f.descriptors.len(), f.size, f.append_only)).collect();
        assert_eq!(summary, [(at("data"), 2, 0, false), (at("log"), 2, 4, false)]);
        drop(both);
        assert!(listed(directory.path())[1].append_only);

        fs::rename(at("log"), at("moved")).unwrap();
        assert_eq!(listed(directory.path())[1].path, at("moved"));
    }

    #[test]
    fn a_process_that_is_gone_has_no_files() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        child.wait().unwrap();
        assert_eq!(open_for_writing(&[pid]).unwrap(), []);
    }

    #[test]
    fn a_file_whose_name_is_gone_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let out = File::create(&path).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").stdout(out).spawn().unwrap();
        fs::hard_link(&path, directory.path().join("second")).unwrap();
        fs::remove_file(&path).unwrap();
        let result = open_for_writing(&[child.id() as i32]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(result, Err(FilesError::OutOfReach { .. })), "{result:?}");
    }

    #[test]
    fn reads_lines_of_maps() {
        let shared = "7f00-7f01 rw-s 00002000 fd:00 77   /a b";
        assert_eq!(shared_writable(shared), Some((0x7f00..0x7f01, 0x2000)));
        for other in
            ["7f00-7f01 r--s 0 fd:00 77 /a", "7f00-7f01 rw-p 0 fd:00 77 /a", "7f00-7f01 rw-s 0 00:00 0", "x", ""]
        {
            assert_eq!(shared_writable(other), None, "{other}");
        }
    }
}
