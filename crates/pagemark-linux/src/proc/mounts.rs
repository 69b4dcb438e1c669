//! `/proc/PID/mountinfo`: the mounts that a process sees.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// A mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mount {
    /// Its id, which open files have as `mnt_id` in `/proc/PID/fdinfo`.
    pub id: u32,
    /// Device of the file system, as `stat` gives it for most file systems.
    pub device: u64,
    /// The directory of the file system that is mounted.
    pub root: PathBuf,
    /// Where it is mounted, from the root directory of the process.
    pub point: PathBuf,
    /// Type of the file system.
    pub file_system: String,
    /// Options of the file system.
    pub options: String,
}

impl Mount {
    /// The mounts below the root directory of a process. A mount comes after those that it hides.
    ///
    /// # Errors
    /// There is no such process, or tracing it is not permitted.
    pub fn of_process(pid: i32) -> io::Result<Vec<Mount>> {
        super::read(pid, "mountinfo").map(|text| Mount::parse(&text))
    }

    /// The mounts below the root directory of this process.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn of_this_process() -> io::Result<Vec<Mount>> {
        std::fs::read(super::own_path("mountinfo")).map(|text| Mount::parse(&text))
    }

    /// Parses the content of a `mountinfo` file. Lines that are not the kernel's are left out.
    pub fn parse(text: &[u8]) -> Vec<Mount> {
        text.split(|&byte| byte == b'\n').filter_map(parse_line).collect()
    }

    /// The place of a path in the file system that is mounted here, if the path is below the mount.
    pub fn in_file_system(&self, path: &Path) -> Option<PathBuf> {
        path.strip_prefix(&self.point).ok().map(|below| self.root.join(below))
    }

    /// The path under which a place of the file system is seen, if it is mounted here.
    pub fn seen(&self, in_file_system: &Path) -> Option<PathBuf> {
        in_file_system.strip_prefix(&self.root).ok().map(|below| self.point.join(below))
    }
}

/// Tells when the mounts that this process sees have changed.
#[derive(Debug)]
pub struct MountChanges(File);

impl MountChanges {
    /// Of changes from now on.
    ///
    /// # Errors
    /// `/proc` is not mounted.
    pub fn new() -> io::Result<MountChanges> {
        File::open(super::own_path("mountinfo")).map(MountChanges)
    }

    /// True if something was mounted or unmounted since the last time, or since it was made. The
    /// kernel forgets that when it has said so once, to a call of `poll` as well.
    pub fn have_come(&self) -> bool {
        let mut polled = [PollFd::new(self.0.as_fd(), PollFlags::POLLPRI)];
        poll(&mut polled, PollTimeout::ZERO).is_ok_and(|count| count > 0)
    }
}

impl AsFd for MountChanges {
    /// Has `POLLPRI` after a change.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The mount on which a path lies, of all `mounts` of a process.
pub fn of_path<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    // The last one of equal depth hides the others.
    mounts.iter().filter(|mount| path.starts_with(&mount.point)).max_by_key(|mount| mount.point.components().count())
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    let mut words = line.split(|&byte| byte == b' ');
    let id = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
    let device = std::str::from_utf8(words.nth(1)?).ok()?;
    let (major, minor) = device.split_once(':')?;
    let device = libc::makedev(major.parse().ok()?, minor.parse().ok()?);
    let (root, point) = (path(words.next()?), path(words.next()?));
    let mut words = words.skip_while(|word| *word != b"-").skip(1);
    let file_system = String::from_utf8_lossy(words.next()?).into_owned();
    let options = String::from_utf8_lossy(words.nth(1)?).into_owned();
    Some(Mount { id, device, root, point, file_system, options })
}

/// A path in which the kernel has written some characters as `\` and three octal digits.
fn path(word: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let [first, behind @ ..] = rest {
        match (first, behind) {
            (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', behind @ ..]) => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                rest = behind;
            }
            _ => {
                bytes.push(*first);
                rest = behind;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_mounts(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Mount::parse(&bytes);
            prop_assert!(path(&bytes).as_os_str().as_bytes().len() <= bytes.len());
        }
    }

    const TEXT: &[u8] = b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n\
                          30 22 0:26 /images/a /srv/with\\040space rw master:3 propagate_from:2 - tmpfs none rw,size=1k\n\
                          31 22 8:1 /srv /mnt rw - ext4 /dev/sda1 rw\n\
                          32 22 0:30 / /mnt ro - overlay overlay ro\n\
                          garbled\n";

    #[test]
    fn mounts_are_parsed() {
        let mounts = Mount::parse(TEXT);
        assert_eq!(mounts.len(), 4);
        let expected = Mount {
            id: 30,
            device: libc::makedev(0, 26),
            root: "/images/a".into(),
            point: "/srv/with space".into(),
            file_system: "tmpfs".into(),
            options: "rw,size=1k".into(),
        };
        assert_eq!(mounts[1], expected);
        assert!(Mount::of_this_process().unwrap().iter().any(|mount| mount.file_system == "proc"));
    }

    #[test]
    fn a_path_is_on_the_last_and_deepest_mount() {
        let mounts = Mount::parse(TEXT);
        let device = |path: &str| of_path(&mounts, Path::new(path)).unwrap().device;
        assert_eq!(device("/mntx"), libc::makedev(8, 1));
        assert_eq!(device("/mnt/x"), libc::makedev(0, 30));
        let mount = of_path(&mounts, Path::new("/srv/with space/b")).unwrap();
        assert_eq!(mount.in_file_system(Path::new("/srv/with space/b")).unwrap(), Path::new("/images/a/b"));
        assert_eq!(mount.seen(Path::new("/images/a/b")).unwrap(), Path::new("/srv/with space/b"));
        assert_eq!(mount.seen(Path::new("/images/b")), None);
    }
}
