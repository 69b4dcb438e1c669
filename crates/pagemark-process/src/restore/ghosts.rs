//! Files without names: they were removed, and processes have them open. CRIU would make them anew
//! in the directory in which they were, with root's rights. In a directory of a user, the user
//! makes them.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, SFlag, fstat, mkdirat, mknodat};
use nix::unistd::{UnlinkatFlags, geteuid, symlinkat, unlinkat};
use pagemark_trace::error::{Error, Result};
use prost::Message;

use super::holders::Holder;
use super::made::not_made;
use super::opened::in_the_way;
use super::own_mounts::OwnMounts;
use crate::criu::images::schema::{GhostChunkEntry, GhostFileEntry, Timeval};
use crate::files::user::User;
use crate::files::walk::{Found, Lost, find_directory, open_at};

/// How many names are tried for a file that loses its name again.
const TRIED_NAMES: u32 = 100;

/// Limit of the length of a message in an image, bytes.
const LONGEST: u32 = 1 << 20;

/// A file without a name.
pub(super) struct Ghost {
    pub file: OwnedFd,
    /// The file system and inode that it had at the checkpoint, as CRIU has them.
    pub was: (Option<u32>, Option<u64>),
}

/// Makes file `ghost` of the images in `directory`, which was at `path`. None if CRIU can make it:
/// in a directory that only root can have put there.
pub(super) fn make(
    directory: &Path,
    ghost: u32,
    path: &Path,
    by: &[Holder],
    users: &[User],
    root: &OwnedFd,
) -> Result<Option<Ghost>> {
    let place = find_place(root, path)?;
    let is_roots = place.stat.st_uid == 0 && place.stat.st_mode & 0o022 == 0 && place.is_roots_choice();
    if is_roots || by.is_empty() {
        return Ok(None);
    }
    make_in(&place, directory, ghost, path, (by, users), None).map(Some)
}

/// Like [`make()`], in any directory of a container's `mounts`.
pub(super) fn make_anywhere(
    directory: &Path,
    ghost: u32,
    path: &Path,
    by: &[Holder],
    users: &[User],
    root: &OwnedFd,
    mounts: &OwnMounts<'_>,
) -> Result<Ghost> {
    make_in(&find_place(root, path)?, directory, ghost, path, (by, users), Some(mounts))
}

/// The file system and inode that file `ghost` of the images in `directory` had.
pub(super) fn inode_of(directory: &Path, ghost: u32) -> Result<(Option<u32>, Option<u64>)> {
    read(directory, ghost).map(|(entry, _)| (entry.dev, entry.ino))
}

fn read(directory: &Path, ghost: u32) -> Result<(GhostFileEntry, BufReader<File>)> {
    let image = directory.join(format!("ghost-file-{ghost:x}.img"));
    let damaged = |error: io::Error| Error::image(&image, error.to_string());
    let mut content = BufReader::new(File::open(&image).map_err(damaged)?);
    Ok((read_entry(&mut content).map_err(damaged)?, content))
}

/// The directory of a path; where it is gone too, the next one above.
fn find_place(root: &OwnedFd, path: &Path) -> Result<Found> {
    let mut above = path;
    loop {
        let Some(next) = above.parent() else { return Err(in_the_way(path, "is no path of a file")) };
        above = next;
        match (find_directory(root.as_fd(), above), above.parent()) {
            (Err(Lost::Missing(_)), Some(_)) => {}
            (found, _) => return found.map_err(|lost| lost.error(path)),
        }
    }
}

fn make_in(
    place: &Found,
    directory: &Path,
    ghost: u32,
    path: &Path,
    (by, users): (&[Holder], &[User]),
    mounts: Option<&OwnMounts<'_>>,
) -> Result<Ghost> {
    let (entry, mut content) = read(directory, ghost)?;
    let Some(name) = path.file_name() else { return Err(in_the_way(path, "is no path of a file")) };
    let by_users: Vec<&User> = by.iter().map(|holder| &users[holder.user]).collect();
    let own = by_users.iter().find(|user| user.identity.uid == entry.uid);
    let user = own.or_else(|| by_users.iter().find(|user| user.is_root)).copied();
    let user = user.ok_or_else(|| {
        let (owner, uid) = (entry.uid, by_users.first().map_or(0, |user| user.identity.uid));
        in_the_way(path, format!("was removed and is open, and its owner was user {owner}: user {uid} cannot make it"))
    })?;
    let maker = if user.is_root || !geteuid().is_root() { geteuid().as_raw() } else { user.identity.uid };
    let mut make = |place: Place<'_>| user.run(|| make_as_user(&mut content, &entry, place, name, maker))?;
    let here = place.file.as_fd();
    let mut made = make(Place { made_in: here, seen_in: None });
    if made.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::ReadOnlyFilesystem)
        && let Some(mounts) = mounts.filter(|_| user.is_root)
    {
        made = match mounts.has_made(path, here) {
            Ok(true) => {
                mounts.writable(here).and_then(|copy| make(Place { made_in: copy.as_fd(), seen_in: Some(here) }))
            }
            Ok(false) => made,
            Err(error) => Err(error),
        };
    }
    let file = made.map_err(|source| not_made(path, user, source))?;
    Ok(Ghost { file, was: (entry.dev, entry.ino) })
}

/// The directory in which a file is made.
#[derive(Clone, Copy)]
struct Place<'a> {
    /// A mount of it that can be written.
    made_in: BorrowedFd<'a>,
    /// The mount of it in which the processes have the file, if that is another one.
    seen_in: Option<BorrowedFd<'a>>,
}

/// Makes the file, without a name at the end.
fn make_as_user(
    content: &mut BufReader<File>,
    entry: &GhostFileEntry,
    Place { made_in: place, seen_in }: Place<'_>,
    name: &OsStr,
    maker: u32,
) -> io::Result<OwnedFd> {
    let kind = entry.mode & libc::S_IFMT;
    for number in 0..TRIED_NAMES {
        let mut name = name.to_owned();
        if number > 0 {
            name.push(OsString::from(format!(".{number}")));
        }
        let made = match kind {
            libc::S_IFREG => create(place, &name),
            libc::S_IFDIR => mkdirat(place, name.as_os_str(), Mode::S_IRWXU).and_then(|()| open_at(place, &name)),
            libc::S_IFIFO => {
                mknodat(place, name.as_os_str(), SFlag::S_IFIFO, Mode::S_IRWXU, 0).and_then(|()| open_at(place, &name))
            }
            // The kernel permits devices to root alone.
            libc::S_IFCHR => device(place, &name, SFlag::S_IFCHR, entry),
            libc::S_IFBLK => device(place, &name, SFlag::S_IFBLK, entry),
            libc::S_IFLNK => {
                let target = entry.symlnk_target.as_deref().ok_or(io::ErrorKind::InvalidData)?;
                symlinkat(target, place, name.as_os_str()).and_then(|()| open_at(place, &name))
            }
            _ => return Err(io::Error::other("it is a socket or of no known kind, which Pagemark does not make")),
        };
        let file = match made {
            Err(Errno::EEXIST) => continue,
            made => made?,
        };
        // What was made in a second step may be what another user has put in its place.
        let found = fstat(&file)?;
        if kind != libc::S_IFREG && (found.st_mode & libc::S_IFMT, found.st_uid) != (kind, maker) {
            return Err(io::Error::other("another user has put something else in its place"));
        }
        let seen = seen_in.map(|seen_in| open_at(seen_in, &name)).transpose();
        let is_directory = kind == libc::S_IFDIR;
        let flags = if is_directory { UnlinkatFlags::RemoveDir } else { UnlinkatFlags::NoRemoveDir };
        unlinkat(place, name.as_os_str(), flags)?;
        // What has lost its last name here is what was made, and no other of the same owner.
        if kind != libc::S_IFREG && fstat(&file)?.st_nlink != 0 {
            return Err(io::Error::other("another file has been put in its place"));
        }
        if kind == libc::S_IFREG {
            fill(content, entry, &file)?;
        }
        apply(entry, &file)?;
        let Some(seen) = seen? else { return Ok(file) };
        let [made, seen_file] = [fstat(&file)?, fstat(&seen)?];
        if (made.st_dev, made.st_ino) != (seen_file.st_dev, seen_file.st_ino) {
            return Err(io::Error::other("another file has been put in its place"));
        }
        return Ok(seen);
    }
    Err(io::Error::other("all names for it are taken"))
}

fn create(place: BorrowedFd<'_>, name: &OsStr) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(place, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)
}

fn device(place: BorrowedFd<'_>, name: &OsStr, kind: SFlag, entry: &GhostFileEntry) -> nix::Result<OwnedFd> {
    let number = entry.rdev.ok_or(Errno::EINVAL)?;
    mknodat(place, name, kind, Mode::S_IRWXU, number.into())?;
    open_at(place, name)
}

/// Gives the file its group, permissions and times.
fn apply(entry: &GhostFileEntry, file: &OwnedFd) -> io::Result<()> {
    // The file may be held for nothing. The path leads to what is held.
    let held = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let now = std::fs::metadata(&held)?;
    if (now.uid(), now.gid()) != (entry.uid, entry.gid) {
        match now.is_file() {
            true => fchown(file, Some(entry.uid), Some(entry.gid))?,
            false => std::os::unix::fs::chown(&held, Some(entry.uid), Some(entry.gid))?,
        }
    }
    // A link has none.
    if entry.mode & libc::S_IFMT != libc::S_IFLNK {
        std::fs::set_permissions(&held, std::fs::Permissions::from_mode(entry.mode & 0o7777))?;
    }
    if let (Some(read), Some(written), true) = (&entry.atim, &entry.mtim, now.is_file()) {
        let times = std::fs::FileTimes::new().set_accessed(time(read)).set_modified(time(written));
        File::from(file.try_clone()?).set_times(times)?;
    }
    Ok(())
}

fn time(time: &Timeval) -> SystemTime {
    let since = Duration::from_secs(time.tv_sec).saturating_add(Duration::from_micros(time.tv_usec));
    SystemTime::UNIX_EPOCH.checked_add(since).unwrap_or(SystemTime::UNIX_EPOCH)
}

fn fill(content: &mut BufReader<File>, entry: &GhostFileEntry, file: &OwnedFd) -> io::Result<()> {
    let mut file = File::from(file.try_clone()?);
    if entry.chunks != Some(true) {
        return io::copy(content, &mut file).map(drop);
    }
    file.set_len(entry.size.unwrap_or(0))?;
    while let Some(message) = read_message(content)? {
        let chunk = GhostChunkEntry::decode(message.as_slice()).map_err(io::Error::other)?;
        file.seek(SeekFrom::Start(chunk.off))?;
        if io::copy(&mut content.by_ref().take(chunk.len), &mut file)? != chunk.len {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    file.flush()
}

/// Reads the first message of the image of a file without a name.
fn read_entry(content: &mut impl Read) -> io::Result<GhostFileEntry> {
    let mut magic = [0; 8];
    content.read_exact(&mut magic)?;
    crate::criu::images::Image::decode(&magic, crate::criu::images::ImageKind::Ghost).map_err(io::Error::other)?;
    let message = read_message(content)?.ok_or(io::ErrorKind::UnexpectedEof)?;
    GhostFileEntry::decode(message.as_slice()).map_err(io::Error::other)
}

/// Reads the next message, or None at the end.
fn read_message(content: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    match content.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let length = u32::from_le_bytes(length);
    if length > LONGEST {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut message = vec![0; length as usize];
    content.read_exact(&mut message)?;
    Ok(Some(message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_user_has_put_in_place_of_a_new_file_is_not_given_away() {
        let own = geteuid().as_raw();
        for kind in [libc::S_IFDIR, libc::S_IFIFO] {
            let directory = tempfile::tempdir().unwrap();
            let place = File::open(directory.path()).unwrap();
            let entry = GhostFileEntry { mode: kind | 0o640, uid: own, gid: 0, ..GhostFileEntry::default() };
            let entry = GhostFileEntry { gid: nix::unistd::getegid().as_raw(), ..entry };
            let make = |maker| {
                let mut content = BufReader::new(File::open("/dev/null").unwrap());
                let place = Place { made_in: place.as_fd(), seen_in: None };
                make_as_user(&mut content, &entry, place, OsStr::new("name"), maker)
            };
            assert!(make(own + 1).unwrap_err().to_string().contains("something else"));
            let left = || std::fs::read_dir(directory.path()).unwrap().count();
            assert_eq!(left(), 1);
            make(own).unwrap();
            assert_eq!(left(), 1);
        }
    }
}
