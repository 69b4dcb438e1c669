//! Lists the files that a target can write, by `/proc`, while it runs or is frozen.

use std::collections::HashMap;
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::statfs::{HUGETLBFS_MAGIC, TMPFS_MAGIC, statfs};
use pagemark::Range;
use pagemark_linux::pidfd;
use pagemark_linux::proc::locks::{self, WriteLease};
use pagemark_linux::proc::{self, Mapping, maps};
use pagemark_trace::error::{Error, ErrorKind, Object, Result};

use super::directory::{Entry, Held};
use super::users::{Actor, Users};
use super::writers::inode;
use crate::container::{FileLocation, HostPaths};

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
    /// Device of the file system.
    pub dev: u64,
    /// Inode number.
    pub inode: u64,
    /// Creation time, nanoseconds since 1970 UTC, if the file system records it. It distinguishes
    /// two files that had the same inode number one after the other.
    pub born_ns: Option<i64>,
    /// Time just before these attributes were read, nanoseconds since 1970 UTC.
    pub seen_ns: i64,
    /// True if every descriptor appends and no mapping can write the file.
    pub append_only: bool,
    /// True if every descriptor appends or cannot read, and no mapping can write the file: it may
    /// be a log.
    pub is_output: bool,
    /// True if a descriptor has a lease on the file (`fcntl` with `F_SETLEASE`).
    pub has_lease: bool,
    /// True if a write may leave the times unchanged: the file system does not update them for
    /// writes through a mapping, and a descriptor allows one to be made.
    pub times_unreliable: bool,
    /// True if the file is closed, and a process outside of the target has written it.
    pub has_other_writer: bool,
}

/// A descriptor of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Descriptor {
    /// The process.
    pub pid: i32,
    /// Its number there.
    pub fd: i32,
    /// True if it allows reading the file by `pread`.
    pub is_readable: bool,
}

/// A file that is open for reading.
#[derive(Debug)]
pub(super) struct ReadableFile {
    pub file: File,
    /// True if the target has the same open file: its position must not change.
    pub is_targets: bool,
}

/// A shared writable mapping of a file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedMapping {
    /// The process.
    pub pid: i32,
    /// Addresses.
    pub addresses: Range,
    /// Offset of the first address in the file, bytes.
    pub offset: u64,
}

/// Identity of a file: device, inode number, creation time.
pub(super) type Key = (u64, u64, Option<i64>);

impl OpenFile {
    pub(super) fn key(&self) -> Key {
        (self.dev, self.inode, self.born_ns)
    }

    /// Opens this very file for reading, whatever its path means by now: through a process that has
    /// it open, else by its path, in the name of the users of the job. A file with a lease is not
    /// opened, because that would break the lease; the target's own descriptor is copied.
    pub(super) fn open(&self, users: &Users) -> Result<ReadableFile> {
        if self.has_lease {
            return self.copy_descriptor(None);
        }
        if let Some(lease) = self.lease().map_err(super::io("find out who has a lease on", &self.path))? {
            return self.copy_descriptor(Some(&lease));
        }
        let through_descriptors = self.descriptors.iter().map(|d| proc::descriptors::path(d.pid, d.fd));
        let through_mappings = self.mappings.iter().map(|mapping| proc::mapped_file(mapping.pid, &mapping.addresses));
        let is_it = |held: &Held| inode(&held.metadata) == (self.dev, self.inode);
        for link in through_descriptors.chain(through_mappings) {
            // What the process has there may be another file by now, which is not opened.
            if let Some(held) = Held::of_process(&link).ok().filter(is_it)
                && let Ok(file) = held.read(&Actor::This)
            {
                return Ok(ReadableFile { file, is_targets: false });
            }
        }
        let failed = || super::io("open", &self.path);
        users.find(&self.path, |actor| {
            let held = Entry::of(actor, &self.path)?.hold().map_err(failed())?.filter(is_it);
            let held = held.ok_or_else(|| failed()(io::ErrorKind::NotFound.into()))?;
            Ok(ReadableFile { file: held.read(actor).map_err(failed())?, is_targets: false })
        })
    }

    /// The lease of a process that cannot write the file, or is none of the target's, which opening
    /// the file would break.
    fn lease(&self) -> io::Result<Option<WriteLease>> {
        let leases = locks::write_leases()?;
        // The file system may have another device here than there.
        let is_it = |lease: &WriteLease| {
            lease.inode == self.inode && (lease.device == self.dev || self.descriptor_of(lease.pid).is_some())
        };
        Ok(leases.into_iter().find(is_it))
    }

    /// A descriptor by which a process can read the file.
    fn descriptor_of(&self, pid: i32) -> Option<Descriptor> {
        let is_it = |descriptor: &proc::descriptors::Descriptor| {
            let reads = || descriptor.info().ok()?.in_base("flags", 8).and_then(|flags| i32::try_from(flags).ok());
            let without = libc::O_PATH | libc::O_DIRECT;
            fs::metadata(descriptor.path()).is_ok_and(|found| inode(&found) == (self.dev, self.inode))
                && reads().is_some_and(|flags| flags & without == 0 && flags & libc::O_ACCMODE != libc::O_WRONLY)
        };
        let found = proc::descriptors(pid).ok()?.into_iter().find(is_it)?;
        Some(Descriptor { pid, fd: found.number, is_readable: true })
    }

    fn copy_descriptor(&self, lease: Option<&WriteLease>) -> Result<ReadableFile> {
        let own = self.descriptors.iter().find(|descriptor| descriptor.is_readable).copied();
        let readable = own.or_else(|| self.descriptor_of(lease?.pid)).ok_or_else(|| {
            let reason = "has a lease, and the process that holds the lease cannot read it";
            Error::about(ErrorKind::Leased, Object::File(self.path.clone()), reason)
                .help("opening the file would break the lease; the checkpoint is possible without the lease")
        })?;
        let copy = pidfd::duplicate(readable.pid, readable.fd).map_err(|source| {
            super::io("copy the descriptor (pidfd_getfd, Linux 5.6) of", &self.path)(source)
                .help("the file has a lease, and opening the file would break it")
        })?;
        Ok(ReadableFile { file: File::from(copy), is_targets: true })
    }

    /// A file that no process has open. Its times are unreliable if a process may have mapped it
    /// and written through the mapping (`hides_writes`) between two listings.
    pub(super) fn closed(path: PathBuf, metadata: &Metadata, seen_ns: i64, hides_writes: bool) -> OpenFile {
        let file = OpenFile::new(path, metadata, seen_ns);
        OpenFile { append_only: false, is_output: false, times_unreliable: hides_writes, ..file }
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
            is_output: true,
            has_lease: false,
            times_unreliable: false,
            has_other_writer: false,
        }
    }
}

/// The regular files that the processes can write, by a descriptor or a shared mapping, each once.
///
/// Left out are files without a name (CRIU saves those) and files that are not regular. Shared
/// memory under `/dev/shm` consists of regular files and is included. A process that is gone has no
/// open files.
///
/// # Errors
/// [`ErrorKind::System`] if tracing a process is not permitted, [`ErrorKind::BadPath`] if a file
/// cannot be reached by its path.
pub fn open_for_writing(pids: &[i32]) -> Result<Vec<OpenFile>> {
    let mut files = Files { found: HashMap::new(), tree: pids, host_paths: None };
    for &pid in pids {
        match descriptors(pid, &mut files).and_then(|()| mappings(pid, &mut files)) {
            Ok(()) => {}
            Err(Failure::Process(error)) if proc::is_gone(&error) => {}
            Err(Failure::Process(source)) => {
                return Err(Error::system("list the open files of", Object::Process(pid))(source)
                    .help("this needs the process's own user, or root"));
            }
            Err(Failure::OutOfReach(path)) => {
                let reason = format!(
                    "cannot be reached by the path under which process {pid} has it open for writing: it was removed or replaced \
                     while another link to it exists, or only the process has its file system mounted"
                );
                return Err(Error::about(ErrorKind::BadPath, Object::File(path), reason)
                    .help("close it, or checkpoint memory alone"));
            }
        }
    }
    let mut files: Vec<OpenFile> = files.found.into_values().collect();
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

/// Files by device and inode number, and where those are that the processes name by other paths.
struct Files<'a> {
    found: HashMap<(u64, u64), OpenFile>,
    tree: &'a [i32],
    /// Most trees need none.
    host_paths: Option<HostPaths>,
}

impl Files<'_> {
    fn location(&mut self, pid: i32, path: &Path, mount: Option<u32>) -> io::Result<FileLocation> {
        let mut paths = self.host_paths.take().map_or_else(|| HostPaths::of_tree(self.tree), Ok)?;
        let location = paths.place(pid, path, mount);
        self.host_paths = Some(paths);
        location
    }
}

fn descriptors(pid: i32, files: &mut Files<'_>) -> Result<(), Failure> {
    for descriptor in proc::descriptors(pid)? {
        let Some(info) = unless_gone(descriptor.info())? else { continue };
        let Some(flags) = info.in_base("flags", 8).and_then(|flags| i32::try_from(flags).ok()) else { continue };
        if flags & libc::O_PATH != 0 || flags & libc::O_ACCMODE == libc::O_RDONLY {
            continue;
        }
        let link = descriptor.path();
        if let Some(file) = entry_of(pid, &link, info.number("mnt_id"), files)? {
            let reads = flags & libc::O_ACCMODE == libc::O_RDWR;
            // Direct reads need aligned memory.
            let is_readable = reads && flags & libc::O_DIRECT == 0;
            file.descriptors.push(Descriptor { pid, fd: descriptor.number, is_readable });
            file.append_only &= flags & libc::O_APPEND != 0;
            file.is_output &= !reads || flags & libc::O_APPEND != 0;
            file.has_lease |= proc::descriptors::lease_in(&info);
            // Only a descriptor that also reads allows a shared writable mapping.
            file.times_unreliable |= reads && hides_mapped_writes(&link);
        }
    }
    Ok(())
}

fn mappings(pid: i32, files: &mut Files<'_>) -> Result<(), Failure> {
    let is_writable_file = |mapping: &Mapping| mapping.writable && mapping.shared && mapping.inode != 0;
    for mapping in maps::read(pid)?.into_iter().filter(is_writable_file) {
        let mapping = SharedMapping { pid, addresses: mapping.range(), offset: mapping.offset };
        if let Some(file) = entry_of(pid, &proc::mapped_file(pid, &mapping.addresses), None, files)? {
            file.mappings.push(mapping);
            file.append_only = false;
            file.is_output = false;
        }
    }
    Ok(())
}

/// The entry of the file behind a link of a process under `/proc`, on the mount with this id, if
/// that is known. None if the link is gone or the file is left out.
fn entry_of<'a>(
    pid: i32,
    link: &Path,
    mount: Option<u32>,
    files: &'a mut Files<'_>,
) -> Result<Option<&'a mut OpenFile>, Failure> {
    // A running target may rename the file between reading its path and using that.
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
        if files.found.contains_key(&key) {
            return Ok(files.found.get_mut(&key));
        }
        let is_it = |path: &Path| is_at(path, key);
        // A file that was opened outside has its path there.
        let place = if is_it(&path) { None } else { unless_gone(files.location(pid, &path, mount))? };
        let path = match place {
            Some(FileLocation::InsideAlone) => break,
            Some(FileLocation::Outside(outside)) => outside,
            Some(FileLocation::Unknown) | None => path,
        };
        match is_it(&path) {
            true => return Ok(Some(files.found.entry(key).or_insert(OpenFile::new(path, &metadata, seen_ns)))),
            false if attempt < 3 => {}
            false => return Err(Failure::OutOfReach(path)),
        }
    }
    Ok(None)
}

/// True if a file is at a path to which no link leads.
pub(super) fn is_at(path: &Path, file: (u64, u64)) -> bool {
    let entry = Entry::existing(&Actor::This, path).ok().flatten();
    entry.is_some_and(|entry| entry.is(file).unwrap_or(false))
}

pub(super) fn hides_mapped_writes(link: &Path) -> bool {
    statfs(link).is_ok_and(|fs| [TMPFS_MAGIC, HUGETLBFS_MAGIC].contains(&fs.filesystem_type()))
}

/// Takes a descriptor or mapping that has gone meanwhile for one that was not open.
fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if proc::is_gone(&error) => Ok(None),
        Err(error) => Err(error),
    }
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
    use std::fs::OpenOptions;
    use std::io::Write;
    use std::os::unix::fs::symlink;

    use super::*;

    /// The files below `directory` that this process has open.
    fn listed(directory: &Path) -> Vec<OpenFile> {
        let files = open_for_writing(&[std::process::id() as i32]).expect("our own files can be listed");
        files.into_iter().filter(|file| file.path.starts_with(directory)).collect()
    }

    #[test]
    fn a_lease_on_a_file_that_nobody_writes_is_not_broken() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("leased");
        fs::write(&path, b"content").unwrap();
        let holder = File::open(&path).unwrap();
        // The signal at a break would end this process.
        let lease = |command: i32, kind: i32| {
            nix::errno::Errno::result(
                // SAFETY: the call takes numbers alone.
                unsafe { libc::fcntl(std::os::fd::AsRawFd::as_raw_fd(&holder), command, kind) },
            )
        };
        lease(libc::F_SETLEASE, libc::F_WRLCK).unwrap();
        let file = OpenFile::closed(path, &holder.metadata().unwrap(), 0, false);
        let opened = file.open(&Users::this_process()).unwrap();
        assert!(opened.is_targets);
        assert_eq!(lease(libc::F_GETLEASE, 0).unwrap(), libc::F_WRLCK);
        let mut content = [0; 7];
        std::os::unix::fs::FileExt::read_exact_at(&opened.file, &mut content, 0).unwrap();
        assert_eq!(&content, b"content");
    }

    #[test]
    fn writable_files_are_found_and_no_others() {
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
    fn a_file_whose_name_is_gone_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let out = File::create(&path).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").stdout(out).spawn().unwrap();
        fs::hard_link(&path, directory.path().join("second")).unwrap();
        fs::remove_file(&path).unwrap();
        let result = open_for_writing(&[child.id() as i32]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(result.unwrap_err().kind(), ErrorKind::BadPath);
    }
}
