//! The way to a file by its path, one name after the other, each directory held. Only links that
//! root has made in a directory of root's are followed.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, openat, readlinkat};
use nix::sys::stat::{FileStat, Mode, fstat};
use pagemark_linux::access::{Access, is_permitted};

use super::user::User;

/// How many links a path may lead through.
const MOST_LINKS: u32 = 40;

/// A file system that a user's program answers for, which may say anything.
const FUSE: u64 = 0x6573_5546;

const STICKY: u32 = libc::S_ISVTX;

/// A directory on the way to a file.
#[derive(Debug)]
struct PassedDirectory {
    directory: OwnedFd,
    names: Names,
}

/// Who can change what the next name of the way leads to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Names {
    Root,
    /// Root, and the group of root's choice.
    Group,
    Others,
}

/// Who, besides root, can change what the path of a directory leads to, and the names in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Changer {
    Nobody,
    /// This user alone.
    User(u32),
    Several,
}

impl Changer {
    fn and(self, other: Changer) -> Changer {
        match (self, other) {
            (Changer::Nobody, one) | (one, Changer::Nobody) => one,
            (one, other) if one == other => one,
            _ => Changer::Several,
        }
    }
}

/// A file that was found by its path.
#[derive(Debug)]
pub(crate) struct Found {
    /// The file, opened for nothing (`O_PATH`).
    pub file: OwnedFd,
    pub stat: FileStat,
    passed: Vec<PassedDirectory>,
}

/// Why the way to a file ends before.
#[derive(Debug)]
pub(crate) enum Lost {
    /// There is nothing of this path.
    Missing(PathBuf),
    /// There is a link that root has not made.
    Link(PathBuf),
    Failed(PathBuf, io::Error),
}

impl Found {
    /// True if nobody but root can have changed what the path leads to.
    pub(crate) fn is_roots_choice(&self) -> bool {
        self.passed.iter().all(|passed| passed.names == Names::Root)
    }

    /// Who can change what the path of this directory leads to, and the names in it. In a sticky
    /// directory nobody can change the names of root's files.
    pub(crate) fn changer(&self) -> io::Result<Changer> {
        let stats: Vec<FileStat> =
            self.passed.iter().map(|passed| fstat(&passed.directory)).collect::<nix::Result<_>>()?;
        let next = stats.iter().skip(1).chain([&self.stat]);
        let on_the_way = self.passed.iter().zip(stats.iter().zip(next)).map(|(passed, (directory, next))| {
            let is_sticky = directory.st_mode & STICKY != 0;
            let owners = Changer::User(directory.st_uid);
            match passed.names {
                Names::Root => Changer::Nobody,
                // A file system of a user's, which may say anything.
                _ if directory.st_uid == 0 && (!is_sticky || next.st_uid == 0) => Changer::Several,
                _ if directory.st_uid == 0 => Changer::User(next.st_uid),
                _ if directory.st_mode & 0o022 == 0 => owners,
                _ if is_sticky && next.st_uid == 0 => owners,
                _ if is_sticky => owners.and(Changer::User(next.st_uid)),
                _ => Changer::Several,
            }
        });
        let is_open = self.stat.st_mode & 0o022 != 0 && self.stat.st_mode & STICKY == 0;
        let here = match (is_open, self.stat.st_uid) {
            (true, _) => Changer::Several,
            (false, 0) => Changer::Nobody,
            (false, user) => Changer::User(user),
        };
        Ok(on_the_way.fold(here, Changer::and))
    }

    /// True if this user cannot have changed what the path leads to, and nobody could but root and
    /// whom root has chosen.
    pub(crate) fn is_out_of_reach_of(&self, user: &User) -> io::Result<bool> {
        if self.passed.iter().any(|passed| passed.names == Names::Others) {
            return Ok(false);
        }
        let of_groups: Vec<&PassedDirectory> =
            self.passed.iter().filter(|passed| passed.names == Names::Group).collect();
        user.run(|| {
            for passed in of_groups {
                if is_permitted(passed.directory.as_fd(), Access::WRITE)? {
                    return Ok(false);
                }
            }
            Ok(true)
        })?
    }

    /// True if this user may reach the file by its path, and use it so.
    pub(crate) fn permits(&self, user: &User, access: Access) -> io::Result<bool> {
        user.run(|| {
            for passed in &self.passed {
                if !is_permitted(passed.directory.as_fd(), Access::SEARCH)? {
                    return Ok(false);
                }
            }
            is_permitted(self.file.as_fd(), access)
        })?
    }
}

/// Finds a directory, as [`find`].
pub(crate) fn find_directory(root: BorrowedFd<'_>, path: &Path) -> Result<Found, Lost> {
    let found = find(root, path)?;
    match found.stat.st_mode & libc::S_IFMT {
        libc::S_IFDIR => Ok(found),
        libc::S_IFLNK => Err(Lost::Link(path.to_owned())),
        _ => Err(Lost::Failed(path.to_owned(), io::Error::from_raw_os_error(libc::ENOTDIR))),
    }
}

/// Finds a file below `root` by its absolute path.
pub(crate) fn find(root: BorrowedFd<'_>, path: &Path) -> Result<Found, Lost> {
    Way::new(root, path).walk()
}

/// Finds a link itself, as [`find`].
pub(crate) fn find_link(root: BorrowedFd<'_>, path: &Path) -> Result<Found, Lost> {
    Way { ends_at_link: true, ..Way::new(root, path) }.walk()
}

struct Way<'a> {
    root: BorrowedFd<'a>,
    names: VecDeque<OsString>,
    /// The part that is behind.
    seen: PathBuf,
    passed: Vec<PassedDirectory>,
    links: u32,
    /// The last name is that of a link, which is not followed.
    ends_at_link: bool,
}

impl<'a> Way<'a> {
    fn new(root: BorrowedFd<'a>, path: &Path) -> Way<'a> {
        let (names, passed, seen) = (VecDeque::new(), Vec::new(), PathBuf::from("/"));
        let mut way = Way { root, names, seen, passed, links: 0, ends_at_link: false };
        way.push(path);
        way
    }

    /// Names that come next.
    fn push(&mut self, path: &Path) {
        let names = path.components().filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            _ => None,
        });
        for name in names.collect::<Vec<_>>().into_iter().rev() {
            self.names.push_front(name);
        }
    }

    fn failed(&self, error: impl Into<io::Error>) -> Lost {
        Lost::Failed(self.seen.clone(), error.into())
    }

    fn walk(mut self) -> Result<Found, Lost> {
        let mut file = open_at(self.root, OsStr::new(".")).map_err(|error| self.failed(error))?;
        let mut stat = fstat(&file).map_err(|error| self.failed(error))?;
        let mut is_trusted = true;
        while let Some(name) = self.names.pop_front() {
            if name == ".." {
                // Only from a link of root's: what is above a directory that is held, is held too.
                self.seen.pop();
                let above = self.passed.pop();
                (file, stat) = match above {
                    Some(above) => {
                        let stat = fstat(&above.directory).map_err(|error| self.failed(error))?;
                        (above.directory, stat)
                    }
                    None => (file, stat),
                };
                continue;
            }
            self.seen.push(&name);
            let next = open_at(file.as_fd(), &name).map_err(|error| match error {
                Errno::ENOENT => Lost::Missing(self.seen.clone()),
                error => self.failed(error),
            })?;
            let next_stat = fstat(&next).map_err(|error| self.failed(error))?;
            if next_stat.st_dev != stat.st_dev {
                let kind = nix::sys::statfs::fstatfs(&next).map_err(|error| self.failed(error))?;
                is_trusted = is_trusted && kind.filesystem_type().0 as u64 != FUSE;
            }
            let names = if is_trusted { names_of(&stat, &next_stat) } else { Names::Others };
            let is_link = next_stat.st_mode & libc::S_IFMT == libc::S_IFLNK;
            if is_link && (!self.names.is_empty() || names == Names::Root && !self.ends_at_link) {
                // Of others, the last name may be that of a link that is open itself.
                let made_by_root = next_stat.st_uid == 0
                    && names == Names::Root
                    && self.passed.iter().all(|passed| passed.names == Names::Root);
                self.links += 1;
                if !made_by_root || self.links > MOST_LINKS {
                    return Err(Lost::Link(self.seen));
                }
                let target = readlinkat(&next, "").map_err(|error| self.failed(error))?;
                self.seen.pop();
                let target = PathBuf::from(target);
                if target.is_absolute() {
                    self.passed.clear();
                    self.seen = PathBuf::from("/");
                    file = open_at(self.root, OsStr::new(".")).map_err(|error| self.failed(error))?;
                    stat = fstat(&file).map_err(|error| self.failed(error))?;
                }
                self.push(&target);
                continue;
            }
            self.passed.push(PassedDirectory { directory: std::mem::replace(&mut file, next), names });
            stat = next_stat;
        }
        Ok(Found { file, stat, passed: self.passed })
    }
}

/// Who can change what a name in `directory` leads to, which is `next` now.
fn names_of(directory: &FileStat, next: &FileStat) -> Names {
    if directory.st_uid != 0 {
        return Names::Others;
    }
    let is_roots_directory = next.st_uid == 0 && next.st_mode & libc::S_IFMT == libc::S_IFDIR;
    // There, others can make names, and change their own. A directory of root's they can't move there
    // either: that needs the right to write into it.
    match directory.st_mode & 0o022 {
        0 => Names::Root,
        _ if directory.st_mode & STICKY != 0 && is_roots_directory => Names::Root,
        0o020 => Names::Group,
        _ => Names::Others,
    }
}

/// Opens a name for nothing; a link itself, if it is one.
pub(crate) fn open_at(directory: BorrowedFd<'_>, name: &OsStr) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(directory, name, flags, Mode::empty())
}

/// The root directory of this process.
pub(crate) fn own_root() -> io::Result<OwnedFd> {
    let opened = std::fs::File::open("/")?;
    Ok(open_at(opened.as_fd(), OsStr::new("."))?)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};

    use pagemark_trace::identity::Identity;

    use super::*;

    fn nobody() -> User {
        User { identity: Identity { uid: 65534, gid: 65534, groups: vec![] }, is_root: false, is_root_inside: false }
    }

    fn found(path: &Path) -> Found {
        find(own_root().unwrap().as_fd(), path).unwrap()
    }

    #[test]
    fn a_file_is_found_and_links_of_users_are_not_followed() {
        if !nix::unistd::geteuid().is_root() {
            return pagemark_testing::skipped("files of two users need root");
        }
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
        fs::create_dir(at("own")).unwrap();
        fs::create_dir(at("roots")).unwrap();
        fs::write(at("roots/file"), "text").unwrap();
        fs::set_permissions(at("roots/file"), Permissions::from_mode(0o600)).unwrap();
        symlink("roots", at("of_root")).unwrap();
        symlink(at("roots"), at("own/link")).unwrap();
        symlink("../roots/file", at("own/last")).unwrap();
        chown(at("own"), Some(65534), Some(65534)).unwrap();
        let inode = fs::metadata(at("roots/file")).unwrap().ino();
        for path in ["roots/file", "of_root/file"] {
            let found = found(&at(path));
            assert_eq!(found.stat.st_ino, inode);
            assert!(found.is_roots_choice() && found.is_out_of_reach_of(&nobody()).unwrap());
            assert!(!found.permits(&nobody(), Access::of_flags(libc::O_RDONLY)).unwrap());
        }
        let lost = find(own_root().unwrap().as_fd(), &at("own/link/file")).unwrap_err();
        assert!(matches!(&lost, Lost::Link(path) if *path == at("own/link")), "{lost:?}");
        // The link itself is opened.
        let link = found(&at("own/last"));
        assert_eq!(link.stat.st_mode & libc::S_IFMT, libc::S_IFLNK);
        // So it is in a directory of root's in one of a user.
        fs::create_dir(at("own/roots")).unwrap();
        symlink("..", at("own/roots/open")).unwrap();
        let root = own_root().unwrap();
        assert!(matches!(find(root.as_fd(), &at("own/roots/open")), Err(Lost::Link(_))));
        let link = find_link(root.as_fd(), &at("own/roots/open")).unwrap();
        assert_eq!(link.stat.st_mode & libc::S_IFMT, libc::S_IFLNK);
        assert!(matches!(find_link(root.as_fd(), &at("own/link/file")), Err(Lost::Link(_))));
        let missing = find(own_root().unwrap().as_fd(), &at("own/none/file")).unwrap_err();
        assert!(matches!(&missing, Lost::Missing(path) if *path == at("own/none")), "{missing:?}");
        fs::write(at("own/file"), "").unwrap();
        let own = found(&at("own/file"));
        assert!(!own.is_roots_choice() && !own.is_out_of_reach_of(&nobody()).unwrap());
        assert!(!own.permits(&nobody(), Access::WRITE).unwrap());
        chown(at("own/file"), Some(65534), None).unwrap();
        assert!(found(&at("own/file")).permits(&nobody(), Access::WRITE).unwrap());
    }

    #[test]
    fn who_can_change_a_directory_is_found() {
        if !nix::unistd::geteuid().is_root() {
            return pagemark_testing::skipped("files of two users need root");
        }
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for (name, owner, mode) in [
            ("own", 7, 0o755),
            ("own/below", 7, 0o700),
            ("own/roots", 0, 0o700),
            ("own/others", 8, 0o755),
            ("open", 7, 0o775),
            ("shared", 0, 0o777),
            ("sticky", 0, 0o1777),
            ("sticky/own", 7, 0o755),
            ("roots", 0, 0o755),
        ] {
            fs::create_dir(at(name)).unwrap();
            fs::set_permissions(at(name), Permissions::from_mode(mode)).unwrap();
            chown(at(name), Some(owner), None).unwrap();
        }
        for (name, changer) in [
            ("own", Changer::User(7)),
            ("own/below", Changer::User(7)),
            ("own/roots", Changer::User(7)),
            ("own/others", Changer::Several),
            ("open", Changer::Several),
            ("shared", Changer::Several),
            ("sticky", Changer::Nobody),
            ("sticky/own", Changer::User(7)),
            ("roots", Changer::Nobody),
        ] {
            assert_eq!(found(&at(name)).changer().unwrap(), changer, "{name}");
        }
    }

    #[test]
    fn names_in_a_directory_of_a_group_are_out_of_reach_of_others() {
        if !nix::unistd::geteuid().is_root() {
            return pagemark_testing::skipped("files of two users need root");
        }
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        fs::write(&path, "").unwrap();
        chown(directory.path(), None, Some(12345)).unwrap();
        for (mode, groups, is_out_of_reach) in
            [(0o775, vec![], true), (0o775, vec![12345], false), (0o777, vec![], false), (0o1777, vec![], false)]
        {
            fs::set_permissions(directory.path(), Permissions::from_mode(mode)).unwrap();
            let user =
                User { identity: Identity { uid: 65534, gid: 65534, groups }, is_root: false, is_root_inside: false };
            let found = found(&path);
            assert!(!found.is_roots_choice());
            assert_eq!(found.is_out_of_reach_of(&user).unwrap(), is_out_of_reach, "{mode:o} {user:?}");
        }
    }
}
