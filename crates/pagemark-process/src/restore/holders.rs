//! Who holds the files of a checkpoint, and how: by the images, the users of the processes, and for
//! each file the processes that have it open or mapped, or as program or directory.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::AsFd;
use std::path::Path;

use pagemark_linux::access::Access;
use pagemark_linux::proc::Credentials;
use pagemark_trace::RecordedPid;
use pagemark_trace::error::Result;
use pagemark_trace::identity::Identity;

use super::root::read_notes;
use crate::criu::dump::read_pstree;
use crate::criu::held_files::HeldFile;
use crate::criu::images::schema::{
    CoreEntry, CredsEntry, FdinfoEntry, FileEntry, FsEntry, IdExtent, MmEntry, TaskIdsEntry, UserNamespaceEntry,
    VmaEntry,
};
use crate::criu::images::{ImageKind, read_all, read_first};
use crate::criu::owners::Peer;
use crate::criu::regular_files::images_of;
use crate::files::user::User;
use crate::files::walk::Found;

/// The capability to use any file.
const CAP_DAC_OVERRIDE: u32 = 1;

/// Bits of a mapping's status, by CRIU: it maps a file, privately or shared.
const MAPS_FILE_PRIVATELY: u32 = 1 << 6;
const MAPS_FILE_SHARED: u32 = 1 << 7;
/// The file is one in memory.
const MAPS_MEMORY_FILE: u32 = 1 << 14;

/// What a process has a file for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Purpose {
    /// The descriptor of this number.
    Descriptor(u32),
    /// A mapping at this address.
    Mapping(u64),
    Program,
    WorkingDirectory,
    RootDirectory,
    /// No process has it: it waits in the queue of a socket, for whoever receives it.
    Queue,
}

impl fmt::Display for Purpose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Purpose::Descriptor(number) => write!(f, "as descriptor {number}"),
            Purpose::Mapping(start) => write!(f, "mapped at {start:#x}"),
            Purpose::Program => f.write_str("as its program"),
            Purpose::WorkingDirectory => f.write_str("as its working directory"),
            Purpose::RootDirectory => f.write_str("as its root directory"),
            Purpose::Queue => f.write_str("in the queue of a socket"),
        }
    }
}

/// A process that holds a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Holder {
    /// Its id in the images.
    pub pid: RecordedPid,
    /// Index of its user.
    pub user: usize,
    pub purpose: Purpose,
    /// What it must be permitted.
    pub access: Access,
}

/// The users of a tree, and who holds which file.
#[derive(Debug, Default)]
pub(super) struct Holders {
    pub users: Vec<User>,
    /// The first process of each user.
    first: Vec<RecordedPid>,
    /// What they had open at the checkpoint although it was not theirs.
    held: Vec<HeldFile>,
    by_file: HashMap<u32, Vec<Holder>>,
    /// User and group here of root of the tree's own namespace of users.
    root: (u32, u32),
}

impl Holders {
    /// Reads the images in `directory`. `files` are the open files of all processes.
    pub(super) fn read(directory: &Path, files: &[FileEntry]) -> Result<Holders> {
        let mut holders = Holders { held: read_notes(directory)?.held_files, ..Holders::default() };
        let flags: HashMap<u32, i32> = files.iter().filter_map(|file| Some((file.id, flags_of(file)?))).collect();
        // FIFOs and some terminals have their paths in entries of their own.
        let path_of: HashMap<u32, u32> = files.iter().filter_map(|file| Some((file.id, path_entry(file)?))).collect();
        let ids = Ids::read(directory)?;
        holders.root = (ids.user(0), ids.group(0));
        for process in read_pstree(directory)? {
            let pid = RecordedPid::from(process.pid);
            let image = |kind: &str| directory.join(format!("{kind}-{pid}.img"));
            let core: CoreEntry = read_first(&image("core"), ImageKind::Core)?;
            let Some(credentials) = core.thread_core.and_then(|thread| thread.creds) else { continue };
            let user = holders.user(User::of(&credentials, &ids), pid);
            let mut add = |file: u32, purpose, access| {
                holders.by_file.entry(file).or_default().push(Holder { pid, user, purpose, access });
            };
            // A zombie has none of these.
            if image("fs").exists() {
                let directories: FsEntry = read_first(&image("fs"), ImageKind::Directories)?;
                add(directories.cwd_id, Purpose::WorkingDirectory, Access::SEARCH);
                add(directories.root_id, Purpose::RootDirectory, Access::SEARCH);
            }
            if image("mm").exists() {
                let memory: MmEntry = read_first(&image("mm"), ImageKind::Mm)?;
                add(memory.exe_file_id, Purpose::Program, Access::SEARCH);
                for mapping in &memory.vmas {
                    let Some(file) = file_of(mapping) else { continue };
                    let is_shared = mapping.status & MAPS_FILE_SHARED != 0;
                    let writable = mapping.prot & libc::PROT_WRITE as u32 != 0;
                    let opened = mapping.fdflags.unwrap_or(if writable { libc::O_RDWR as u32 } else { 0 }) as i32;
                    let writes = is_shared && Access::of_flags(opened).writes;
                    add(file, Purpose::Mapping(mapping.start), Access { reads: true, writes, executes: false });
                }
            }
            if image("ids").exists() {
                let shared: TaskIdsEntry = read_first(&image("ids"), ImageKind::Ids)?;
                let path = directory.join(format!("fdinfo-{}.img", shared.files_id));
                let entries: Vec<FdinfoEntry> = match path.exists() {
                    true => read_all(&path, ImageKind::Descriptors)?,
                    false => Vec::new(),
                };
                for entry in entries {
                    let access = Access::of_flags(flags.get(&entry.id).copied().unwrap_or(libc::O_RDWR));
                    for id in [Some(&entry.id), path_of.get(&entry.id)].into_iter().flatten() {
                        add(*id, Purpose::Descriptor(entry.fd), access);
                    }
                }
            }
        }
        holders.add_queued(files.iter().map(|file| file.id), &flags);
        Ok(holders)
    }

    /// Adds every user as a holder of the files that no process has: one of them receives each.
    fn add_queued(&mut self, files: impl Iterator<Item = u32>, flags: &HashMap<u32, i32>) {
        for file in files {
            if self.by_file.contains_key(&file) {
                continue;
            }
            let access = Access::of_flags(flags.get(&file).copied().unwrap_or(libc::O_RDWR));
            let holder = |(user, &pid): (usize, &RecordedPid)| Holder { pid, user, purpose: Purpose::Queue, access };
            self.by_file.insert(file, self.first.iter().enumerate().map(holder).collect());
        }
    }

    fn user(&mut self, user: User, pid: RecordedPid) -> usize {
        let found = self.users.iter().position(|other| *other == user);
        found.unwrap_or_else(|| {
            self.users.push(user);
            self.first.push(pid);
            self.users.len() - 1
        })
    }

    /// True if the user of this holder had this very file open at the checkpoint, with these
    /// rights.
    pub(super) fn had(&self, found: &Found, holder: &Holder) -> bool {
        let user = &self.users[holder.user].identity;
        let is_it = |held: &HeldFile| held.is_it(found.file.as_fd(), &found.stat, user, holder.access);
        matches!(holder.purpose, Purpose::Descriptor(_)) && self.held.iter().any(is_it)
    }

    /// User and group here of what CRIU's processes are, which make the files.
    pub(super) fn root(&self) -> (u32, u32) {
        self.root
    }

    /// The user of the process with the least rights among those that have the file.
    pub(super) fn least_of(&self, file: u32) -> Peer {
        let users = self.of(file).iter().map(|holder| &self.users[holder.user]);
        let least = users.min_by_key(|user| user.is_root || user.is_root_inside);
        let (user, group) = self.root;
        least.map_or(Peer { user, group, ..Peer::default() }, |user| {
            let Identity { uid: user, gid: group, groups } = user.identity.clone();
            Peer { pid: 0, user, group, groups }
        })
    }

    /// Those who hold a file.
    pub(super) fn of(&self, file: u32) -> &[Holder] {
        self.by_file.get(&file).map_or(&[], Vec::as_slice)
    }
}

fn flags_of(file: &FileEntry) -> Option<i32> {
    let flags = match (&file.reg, &file.usk, &file.tty) {
        (Some(reg), ..) => reg.flags,
        (_, Some(socket), _) => socket.flags,
        (.., Some(terminal)) => terminal.flags,
        _ => return None,
    };
    Some(flags as i32)
}

/// The id of the file that a mapping maps, unless that is one in memory.
fn file_of(mapping: &VmaEntry) -> Option<u32> {
    let is_file = mapping.status & (MAPS_FILE_PRIVATELY | MAPS_FILE_SHARED) != 0;
    u32::try_from(mapping.shmid).ok().filter(|_| is_file && mapping.status & MAPS_MEMORY_FILE == 0)
}

/// The id of the entry that has the path of a file.
fn path_entry(file: &FileEntry) -> Option<u32> {
    let of_fifo = file.fifo.as_ref().and_then(|fifo| fifo.regf_id);
    of_fifo.or_else(|| file.tty.as_ref().and_then(|terminal| terminal.regf_id))
}

/// The ids of a user namespace as they are here.
struct Ids(Option<UserNamespaceEntry>);

impl Ids {
    fn read(directory: &Path) -> Result<Ids> {
        let images = images_of(directory, "userns-")?;
        let first = images.first().map(|path| read_first(path, ImageKind::UserNamespace));
        Ok(Ids(first.transpose()?))
    }

    fn user(&self, id: u32) -> u32 {
        self.0.as_ref().map_or(id, |map| outside(&map.uid_map, id))
    }

    fn group(&self, id: u32) -> u32 {
        self.0.as_ref().map_or(id, |map| outside(&map.gid_map, id))
    }
}

/// The id here of one in a user namespace. One that is not mapped is nobody's.
fn outside(map: &[IdExtent], id: u32) -> u32 {
    const NOBODY: u32 = 65534;
    let inside = |extent: &&IdExtent| id.checked_sub(extent.first).is_some_and(|offset| offset < extent.count);
    let extent = map.iter().find(inside);
    extent.map_or(NOBODY, |extent| extent.lower_first.saturating_add(id - extent.first))
}

impl User {
    fn of(credentials: &CredsEntry, ids: &Ids) -> User {
        let users = [credentials.uid, credentials.euid, credentials.suid, credentials.fsuid];
        let groups = [credentials.gid, credentials.egid, credentials.sgid, credentials.fsgid];
        let identity = Identity::of(Credentials {
            uids: users.map(|user| ids.user(user)),
            gids: groups.map(|group| ids.group(group)),
            groups: credentials.groups.iter().map(|group| ids.group(*group)).collect(),
            ..Credentials::default()
        });
        let can = |capability: u32| credentials.cap_prm.first().is_some_and(|word| word >> capability & 1 == 1);
        let is_root = identity.is_root() || ids.0.is_none() && can(CAP_DAC_OVERRIDE);
        User { identity, is_root, is_root_inside: users.iter().all(|user| *user == 0) }
    }
}
