//! Opens the files of the processes for CRIU, which would open them by their paths, with root's
//! rights, and so follow whatever their user has put there meanwhile.
//!
//! A path that only root can have changed is left to CRIU. Every other file is looked up by the
//! [way](super::walk) to it, and must be one that the users of all processes that have it may use
//! so, or one whose path they cannot have changed. CRIU gets a descriptor of that very file and
//! opens the file at the path of the descriptor, `/proc/PID/fd/N`.
//!
//! It is not handed over as an inherited descriptor (`--inherit-fd`): while a process of CRIU's
//! opens such a file, the file's entry, which all its processes share, has a pointer into the stack
//! of that process. A second process that opens the entry meanwhile opens nothing, or another file.
//! With an entry for each process, CRIU takes their programs for different ones, and shares no
//! memory of a parent with its child.
//!
//! A tree with mounts of its own has other paths, which lead nowhere before CRIU has made the
//! mounts: see [`Inside`].

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::sys::statfs::{CGROUP_SUPER_MAGIC, CGROUP2_SUPER_MAGIC, fstatfs};
use nix::unistd::geteuid;
use pagemark_linux::access::Access;
use pagemark_trace::RecordedPid;
use pagemark_trace::error::{Error, ErrorKind, Object, Result};

use super::ghosts;
use super::holders::{Holder, Holders};
use super::inside::{self, Inside};
use super::made::Made;
use super::watches::{self, path_of};
use crate::criu::images::schema::{FileEntry, REMAP_GHOST, RegFileEntry, RemapEntry};
use crate::criu::images::{Image, ImageKind, bytes_of, with_bytes, with_varint};
use crate::criu::outside_files::OutsideFile;
use crate::criu::regular_files::{has_image, has_own_mounts};
use crate::files::user::User;
use crate::files::walk::{Found, Lost, find, find_link, own_root};

/// What CRIU opens by descriptor.
#[derive(Default)]
pub(super) struct HandedFiles {
    /// The files, and what the processes watch.
    files: Vec<OwnedFd>,
    /// Files and directories that were made for it, and are removed again when this is dropped.
    pub made: Made,
    /// What is handed over when the mounts of the tree are there.
    pub inside: Option<Inside>,
}

impl HandedFiles {
    /// Opens the files that the images in `directory` name, and changes the images accordingly.
    /// `trusted` are paths at which every user may have any file but a link.
    ///
    /// # Errors
    /// A file is missing or a link, or a user of a process may not use it.
    pub(super) fn new(directory: &Path, trusted: &[PathBuf]) -> Result<HandedFiles> {
        if !geteuid().is_root() {
            return Ok(HandedFiles::default());
        }
        let mut images = Images::read(directory)?;
        let holders = Holders::read(directory, &images.entries)?;
        let opened = match has_own_mounts(directory) {
            // Root of the tree's own users opens the files.
            true if has_image(directory, "userns-") => return Ok(HandedFiles::default()),
            true => HandedFiles::inside(directory, &mut images, holders, trusted)?,
            false => HandedFiles::here(directory, &mut images, &holders, trusted)?,
        };
        images.write()?;
        Ok(opened)
    }

    fn inside(directory: &Path, images: &mut Images<'_>, holders: Holders, trusted: &[PathBuf]) -> Result<HandedFiles> {
        if let Some(place) = inside::place(directory)? {
            let inside = Inside::new(directory, place, images, holders, trusted)?;
            return Ok(HandedFiles { inside: Some(inside), ..HandedFiles::default() });
        }
        // CRIU would make them by their paths.
        for (_, ids) in images.ghosts() {
            let path = images.reg(ids[0]).map(|reg| PathBuf::from(reg.name)).unwrap_or_default();
            let mut by = ids.iter().flat_map(|id| holders.of(*id));
            if by.any(|holder| !holders.users[holder.user].is_root) && !trusted.contains(&path) {
                let reason = "was removed and is open, and the container has no /proc by which its user could make it";
                return Err(in_the_way(&path, reason).help(
                    "restore with --trust-path and its path if nobody but root can change the directory of the file",
                ));
            }
        }
        Ok(HandedFiles::default())
    }

    fn here(directory: &Path, images: &mut Images<'_>, holders: &Holders, trusted: &[PathBuf]) -> Result<HandedFiles> {
        let mut opened = HandedFiles::default();
        let root = own_root().map_err(super::io("open /"))?;
        let mut paths: HashMap<(u64, u64), String> = HashMap::new();
        for file in images.regular() {
            let by = holders.of(file.id);
            if by.is_empty() || file.ext == Some(true) || !file.name.starts_with('/') || images.is_remapped(file.id) {
                continue;
            }
            let path = PathBuf::from(&file.name);
            let is_trusted = trusted.contains(&path);
            let Some(found) = find_for(&root, &file, by, holders, is_trusted, &mut opened.made)? else {
                continue;
            };
            let key = (found.stat.st_dev, found.stat.st_ino);
            let path = paths.entry(key).or_insert_with(|| opened.add(found.file)).clone();
            images.open_at(file.id, &path);
        }
        let mut ghosts_made = Vec::new();
        for (ghost, ids) in images.ghosts() {
            let reg = images.reg(ids[0]).ok_or_else(|| Error::damaged("a file without a name has no entry"))?;
            let by: Vec<Holder> = ids.iter().flat_map(|id| holders.of(*id)).copied().collect();
            if let Some(made) = ghosts::make(directory, ghost, Path::new(&reg.name), &by, &holders.users, &root)? {
                let path = opened.add(made.file);
                ids.iter().for_each(|id| images.open_at(*id, &path));
                images.forget_remap(ghost);
                ghosts_made.push((made.was, path));
            }
        }
        images.change_watches(holders, &mut |inode, path, by| {
            if let Some((_, path)) = ghosts_made.iter().find(|(was, _)| *was == (Some(inode.0), Some(inode.1))) {
                return Ok(Some(path.clone()));
            }
            // Without a path it is found by its inode, and is the same.
            let Some(path) = path else { return Ok(None) };
            let found = watches::look_up(&root, path, by, holders, trusted)?;
            if found.is_roots_choice() {
                return Ok(None);
            }
            Ok(Some(opened.add(found.file)))
        })?;
        Ok(opened)
    }

    /// Adds a file. Returns the path at which CRIU opens it.
    fn add(&mut self, file: OwnedFd) -> String {
        let path = path_of(file.as_raw_fd());
        self.files.push(file);
        path
    }

    /// Leaves what was made: the processes run.
    pub(super) fn keep(&mut self) {
        self.made.keep();
        if let Some(inside) = &mut self.inside {
            inside.made.keep();
        }
    }
}

/// The file for CRIU to open, or None if CRIU finds it by its path.
fn find_for(
    root: &OwnedFd,
    file: &RegFileEntry,
    by: &[Holder],
    holders: &Holders,
    is_trusted: bool,
    made: &mut Made,
) -> Result<Option<Found>> {
    let path = Path::new(&file.name);
    if path.starts_with("/dev/pts") {
        return Ok(None);
    }
    if let Ok(of_proc) = path.strip_prefix("/proc") {
        return check_process_file(of_proc, path, by, &holders.users).map(|()| None);
    }
    let found = look_up(root, file, by, &holders.users, made)?;
    if found.is_roots_choice() {
        return Ok(None);
    }
    if !is_trusted {
        check(&found, path, by, holders)?;
    }
    Ok(Some(found))
}

/// Finds a file that a process has open, below `root`, and makes it again if it is a FIFO that is
/// gone.
pub(super) fn look_up(
    root: &OwnedFd,
    file: &RegFileEntry,
    by: &[Holder],
    users: &[User],
    made: &mut Made,
) -> Result<Found> {
    let path = Path::new(&file.name);
    let kind = |mode: u32| mode & libc::S_IFMT;
    let found = match find_open(root.as_fd(), file) {
        Err(Lost::Missing(_)) if file.mode.is_some_and(|mode| kind(mode) == libc::S_IFIFO) => {
            let user = &users[by[0].user];
            made.fifo(root.as_fd(), path, file.mode.unwrap_or(0) & 0o7777, user)?;
            find(root.as_fd(), path).map_err(|lost| lost.error(path))?
        }
        found => found.map_err(|lost| lost.error(path))?,
    };
    if kind(found.stat.st_mode) == libc::S_IFLNK && file.mode.is_some_and(|mode| kind(mode) != libc::S_IFLNK) {
        return Err(Lost::Link(path.to_owned()).error(path));
    }
    if let Some(mode) = file.mode.filter(|mode| kind(*mode) != kind(found.stat.st_mode)) {
        return Err(in_the_way(path, format!("is no {} any more", kind_name(mode))));
    }
    check_control_file(&found, path, by, users)?;
    Ok(found)
}

/// Finds a file that was open: a link itself, if that was open.
pub(super) fn find_open(root: BorrowedFd<'_>, file: &RegFileEntry) -> std::result::Result<Found, Lost> {
    let path = Path::new(&file.name);
    match file.mode.is_some_and(|mode| mode & libc::S_IFMT == libc::S_IFLNK) {
        true => find_link(root, path),
        false => find(root, path),
    }
}

/// Opens the files on mounts outside, by the names that the images in `directory` have for them.
pub(super) fn outside_files(
    directory: &Path,
    files: &[OutsideFile],
    trusted: &[PathBuf],
) -> Result<Vec<(OwnedFd, String)>> {
    if files.is_empty() {
        return Ok(Vec::new());
    }
    let root = own_root().map_err(super::io("open /"))?;
    let images = Images::read(directory)?;
    let holders = Holders::read(directory, &images.entries)?;
    let mut opened = Vec::new();
    for file in files {
        let path = file.path()?;
        let is_it = |entry: &&RegFileEntry| entry.ext == Some(true) && entry.name == file.name;
        let by: Vec<Holder> =
            images.regular().iter().filter(is_it).flat_map(|entry| holders.of(entry.id)).copied().collect();
        let found = match geteuid().is_root() {
            true => find(root.as_fd(), &path).map_err(|lost| lost.error(&path))?,
            false => {
                opened.push((file.open(&path)?, file.name.clone()));
                continue;
            }
        };
        if found.stat.st_mode & libc::S_IFMT == libc::S_IFLNK {
            return Err(Lost::Link(path.clone()).error(&path));
        }
        if !found.is_roots_choice() && !trusted.contains(&path) {
            check(&found, &path, &by, &holders)?;
        }
        let held = PathBuf::from(path_of(found.file.as_raw_fd()));
        opened.push((file.open(&held).map_err(|error| in_the_way(&path, error.to_string()))?, file.name.clone()));
    }
    Ok(opened)
}

/// Checks that all who have a file may have it, or had it from someone who could open it.
pub(super) fn check(found: &Found, path: &Path, by: &[Holder], holders: &Holders) -> Result<()> {
    let failed = |source| Error::system("find out who may use", Object::File(path.to_owned()))(source);
    for (at, holder) in by.iter().enumerate() {
        let user = &holders.users[holder.user];
        let is_checked = by[..at].iter().any(|other| (other.user, other.access) == (holder.user, holder.access));
        if user.is_root || is_checked || holders.had(found, holder) {
            continue;
        }
        if !found.permits(user, holder.access).map_err(failed)? && !found.is_out_of_reach_of(user).map_err(failed)? {
            return Err(not_permitted(path, holder, user));
        }
    }
    Ok(())
}

/// Checks that no user has a file of a control group open for writing. What is written there is
/// done with the rights of who has opened it, which would be root.
pub(super) fn check_control_file(found: &Found, path: &Path, by: &[Holder], users: &[User]) -> Result<()> {
    let Some(holder) = by.iter().find(|holder| holder.access.writes && !users[holder.user].is_root) else {
        return Ok(());
    };
    let failed = |error: Errno| Error::system("examine", Object::File(path.to_owned()))(error.into());
    let kind = fstatfs(&found.file).map_err(failed)?.filesystem_type();
    if kind != CGROUP_SUPER_MAGIC && kind != CGROUP2_SUPER_MAGIC {
        return Ok(());
    }
    let (pid, purpose, uid) = (holder.pid, holder.purpose, users[holder.user].identity.uid);
    let reason = format!(
        "controls processes, and process {pid} of user {uid} had it open for writing {purpose}: opened by root, it \
         would let the user control those of others"
    );
    Err(in_the_way(path, reason).help("have the program close it before a checkpoint"))
}

/// A file of a process's own, which CRIU opens when the process is there. One of a process outside
/// of the tree would be opened with root's rights.
fn check_process_file(of_proc: &Path, path: &Path, by: &[Holder], users: &[User]) -> Result<()> {
    let first =
        of_proc.components().next().and_then(|name| name.as_os_str().to_str()?.parse().ok()).map(RecordedPid::new);
    let is_of_tree = first.is_none_or(|pid| by.iter().any(|holder| holder.pid == pid));
    match by.iter().find(|holder| !users[holder.user].is_root) {
        Some(holder) if !is_of_tree => Err(in_the_way(
            path,
            format!("is a file of another process, and process {} had it open {}", holder.pid, holder.purpose),
        )),
        _ => Ok(()),
    }
}

impl Lost {
    /// The error of a restore that needs the file.
    pub(super) fn error(self, path: &Path) -> Error {
        match self {
            Lost::Missing(_) => in_the_way(path, "cannot be found, and the processes need it"),
            Lost::Link(link) if link == path => {
                in_the_way(path, "is a symbolic link now, which a user may lead anywhere")
            }
            Lost::Link(link) => {
                let link = link.display().to_string().replace(char::is_control, "?");
                in_the_way(path, format!("is behind {link}, a symbolic link now, which a user may lead anywhere"))
            }
            Lost::Failed(at, source) => Error::of(
                ErrorKind::InTheWay,
                "the processes need a file that cannot be opened:",
                Object::File(at),
                source,
            ),
        }
    }
}

pub(super) fn in_the_way(path: &Path, reason: impl Into<String>) -> Error {
    Error::about(ErrorKind::InTheWay, Object::File(path.to_owned()), reason.into())
}

pub(super) fn not_permitted(path: &Path, holder: &Holder, user: &User) -> Error {
    let Holder { pid, purpose, access, .. } = holder;
    let (to, uid) = (describe(*access), user.identity.uid);
    in_the_way(path, format!("is a file that user {uid} may not {to}, and process {pid} had it {purpose}")).help(
        "give the user the right to use it; or, if it is the right file and nobody else can put another one there, \
         restore with --trust-path and its path",
    )
}

fn describe(access: Access) -> &'static str {
    match access {
        Access { reads: true, writes: true, .. } => "read and write",
        Access { writes: true, .. } => "write",
        Access { reads: true, .. } => "read",
        _ => "reach",
    }
}

fn kind_name(mode: u32) -> &'static str {
    match mode & libc::S_IFMT {
        libc::S_IFREG => "regular file",
        libc::S_IFDIR => "directory",
        libc::S_IFIFO => "FIFO",
        libc::S_IFLNK => "symbolic link",
        libc::S_IFSOCK => "socket",
        _ => "device",
    }
}

/// The images that name files.
pub(super) struct Images<'a> {
    directory: &'a Path,
    files: Image,
    entries: Vec<FileEntry>,
    remaps: Option<(Image, Vec<RemapEntry>)>,
}

const FILES: &str = "files.img";
const REMAPS: &str = "remap-fpath.img";

impl Images<'_> {
    pub(super) fn read(directory: &Path) -> Result<Images<'_>> {
        let (path, remaps_path) = (directory.join(FILES), directory.join(REMAPS));
        let files = Image::read(&path, ImageKind::Files)?;
        let entries = files.decoded(&path)?;
        let remaps = match remaps_path.exists() {
            true => {
                let image = Image::read(&remaps_path, ImageKind::Remaps)?;
                let entries = image.decoded(&remaps_path)?;
                Some((image, entries))
            }
            false => None,
        };
        Ok(Images { directory, files, entries, remaps })
    }

    fn remaps(&self) -> &[RemapEntry] {
        self.remaps.as_ref().map_or(&[], |(_, entries)| entries.as_slice())
    }

    pub(super) fn is_remapped(&self, id: u32) -> bool {
        self.remaps().iter().any(|remap| remap.orig_id == id)
    }

    pub(super) fn reg(&self, id: u32) -> Option<RegFileEntry> {
        self.entries.iter().find_map(|entry| entry.reg.clone().filter(|reg| reg.id == id))
    }

    /// The files without names, each with the entries that are it.
    pub(super) fn ghosts(&self) -> Vec<(u32, Vec<u32>)> {
        let mut ghosts: Vec<(u32, Vec<u32>)> = Vec::new();
        for remap in self.remaps().iter().filter(|remap| remap.remap_type == Some(REMAP_GHOST)) {
            match ghosts.iter_mut().find(|(ghost, _)| *ghost == remap.remap_id) {
                Some((_, ids)) => ids.push(remap.orig_id),
                None => ghosts.push((remap.remap_id, vec![remap.orig_id])),
            }
        }
        ghosts
    }

    /// The files that were opened by their paths.
    pub(super) fn regular(&self) -> Vec<RegFileEntry> {
        self.entries.iter().filter_map(|entry| entry.reg.clone()).collect()
    }

    /// True if the entry has the path of a terminal.
    pub(super) fn is_of_terminal(&self, id: u32) -> bool {
        self.entries.iter().filter_map(|entry| entry.tty.as_ref()).any(|terminal| terminal.regf_id == Some(id))
    }

    /// Has CRIU open a file at a path that leads through a link of the kernel's.
    pub(super) fn open_at(&mut self, id: u32, path: &str) {
        for (message, entry) in self.files.messages.iter_mut().zip(&self.entries) {
            let Some(reg) = entry.reg.as_ref().filter(|reg| reg.id == id) else { continue };
            let Some(encoded) = bytes_of(message, FileEntry::REG) else { continue };
            let encoded = with_bytes(encoded, RegFileEntry::NAME, path.as_bytes());
            // The path of the descriptor is itself a link.
            let flags = reg.flags & !(libc::O_NOFOLLOW as u32);
            let encoded = with_varint(&encoded, RegFileEntry::FLAGS, flags.into());
            *message = with_bytes(message, FileEntry::REG, &encoded);
        }
    }

    /// Has CRIU find what the processes watch at the paths that `path_of` gives, as
    /// [`watches::changed`].
    pub(super) fn change_watches(&mut self, holders: &Holders, path_of: &mut watches::PathOf<'_>) -> Result<()> {
        for (message, entry) in self.files.messages.iter_mut().zip(&self.entries) {
            if let Some(changed) = watches::changed(message, entry, holders, path_of)? {
                *message = changed;
            }
        }
        Ok(())
    }

    pub(super) fn forget_remap(&mut self, ghost: u32) {
        let Some((image, entries)) = &mut self.remaps else { return };
        let is_it = |remap: &RemapEntry| remap.remap_type == Some(REMAP_GHOST) && remap.remap_id == ghost;
        let mut kept = entries.iter().map(|remap| !is_it(remap)).collect::<Vec<_>>().into_iter();
        image.messages.retain(|_| kept.next().unwrap_or(true));
        entries.retain(|remap| !is_it(remap));
    }

    pub(super) fn write(self) -> Result<()> {
        let remaps = self.remaps.map(|(image, _)| (image, REMAPS));
        for (image, name) in [(self.files, FILES)].into_iter().chain(remaps) {
            let path = self.directory.join(name);
            std::fs::write(&path, image.encode()).map_err(Error::criu_io(format!("write {}", path.display())))?;
        }
        Ok(())
    }
}
