//! In whose name the files of a job are reached.
//!
//! The users of a job may be hostile: they may exchange whatever they may write, at any time. Root
//! therefore reaches their files with their rights ([`Identity`]). Root's own rights are used only
//! where no user of the job can change any directory on the way to a file.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use pagemark::repository::{Manifest, StateRecord};
use pagemark::{Blob, Store};
use pagemark_linux::proc::{self, Credentials};
use pagemark_trace::error::{Error, ErrorKind, Object, Result};
use pagemark_trace::identity::Identity;
use serde::{Deserialize, Serialize};

/// Name of the record of the users among the files of a checkpoint's state.
const USERS: &str = "pagemark-users.json";

/// The users of the processes of a job.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Users(Arc<UserList>);

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct UserList {
    /// Those other than root.
    users: Vec<Identity>,
    /// True if root's rights may be used, too: the first process of the job is root's, or the
    /// restoring user has consented.
    with_root: bool,
    /// False if it is not known who the users are: then any user may be one.
    is_known: bool,
}

impl Users {
    /// This process alone: it reaches files with its own rights.
    pub fn this_process() -> Users {
        Users(Arc::new(UserList { users: Vec::new(), with_root: true, is_known: true }))
    }

    /// The users of these processes. `root_pid` is the first of them. If it is not root's, its user
    /// is the only one: another user in the tree came there by a set-uid program, and is not the
    /// one who asks. In a namespace of users of its own, whoever may take other ids there has them.
    ///
    /// # Errors
    /// There is no process `root_pid`.
    pub fn of_tree(root_pid: i32, pids: &[i32]) -> Result<Users> {
        const CAP_SETUID: u64 = 1 << 7;
        if !nix::unistd::geteuid().is_root() {
            return Ok(Users::this_process());
        }
        let failed = || Error::system("find the user of", Object::Process(root_pid));
        let credentials = Credentials::read(root_pid).map_err(failed())?;
        let may_take_ids = credentials.capabilities & CAP_SETUID != 0;
        let first = Identity::of(credentials);
        let (is_root, mut users) = (first.is_root(), vec![first]);
        let has_own_users =
            || -> io::Result<bool> { Ok(proc::namespace(root_pid, "user")? != proc::own_namespace("user")?) };
        if is_root || (may_take_ids && has_own_users().map_err(failed())?) {
            // A process that has ended reaches no file.
            users.extend(pids.iter().filter_map(|&pid| Identity::of_process(pid).ok()));
        }
        users.retain(|user| !user.is_root());
        users.sort();
        users.dedup();
        Ok(Users(Arc::new(UserList { users, with_root: is_root, is_known: true })))
    }

    /// One user, for tests.
    #[cfg(test)]
    pub fn of_identity(user: Identity) -> Users {
        Users(Arc::new(UserList { users: vec![user], with_root: false, is_known: true }))
    }

    /// These, and root: the restoring user has consented to it.
    pub fn with_root(&self) -> Users {
        Users(Arc::new(UserList { with_root: true, ..(*self.0).clone() }))
    }

    /// In whose name a file may be reached, the least privileged first.
    fn actors(&self) -> Vec<Actor> {
        let UserList { users, with_root, is_known } = &*self.0;
        if !nix::unistd::geteuid().is_root() || (users.is_empty() && *with_root && *is_known) {
            return vec![Actor::This];
        }
        let users = users.iter().map(|user| Actor::User(Arc::new(user.clone()), self.clone()));
        users.chain(with_root.then(|| Actor::Guarded(self.clone()))).collect()
    }

    /// Calls `attempt` in the name of each user until one is permitted what it does to `path`.
    ///
    /// # Errors
    /// [`ErrorKind::NotPermitted`]: none is. Other errors are those of `attempt`.
    pub(super) fn find<T>(&self, path: &Path, mut attempt: impl FnMut(&Actor) -> Result<T>) -> Result<T> {
        let mut denied = None;
        for actor in self.actors() {
            match attempt(&actor) {
                Err(error) if is_denied(&error) && !matches!(actor, Actor::This) => drop(denied.get_or_insert(error)),
                result => return result,
            }
        }
        let ids: Vec<String> = self.0.users.iter().map(|user| user.uid.to_string()).collect();
        let who = match &ids[..] {
            [] => "the users of the job are not known, or none".to_owned(),
            ids => format!("the job belongs to user {}", ids.join(" and user ")),
        };
        let reason = match denied {
            Some(error) => format!("is left alone, because its users may not change it so: {who}; {error}"),
            None => format!("is left alone: {who}"),
        };
        Err(Error::about(ErrorKind::NotPermitted, Object::File(path.into()), reason).help(
            "nothing was changed; give that user the permission, or move the file away; `restore --yes` uses root's \
                 rights where the job's users can change no directory above the file",
        ))
    }

    /// True if a user of the job can change the entries of a directory, as far as that can be known
    /// from its mode: where it cannot be known, it is true.
    fn can_change(&self, directory: &Metadata, has_acl: impl FnOnce() -> bool) -> bool {
        let UserList { users, is_known, .. } = &*self.0;
        let mode = directory.mode();
        let is_owner =
            if *is_known { users.iter().any(|user| user.uid == directory.uid()) } else { directory.uid() != 0 };
        let is_member = || users.iter().any(|user| user.is_member(directory.gid()));
        let is_writable =
            mode & libc::S_IWOTH != 0 || (mode & libc::S_IWGRP != 0 && (!is_known || is_member() || has_acl()));
        // In a sticky directory, a user can remove or rename what the user owns, alone.
        is_owner || (is_writable && mode & libc::S_ISVTX == 0)
    }
}

/// True if an error says that a user may not do something.
pub(super) fn is_denied(error: &Error) -> bool {
    let is_denied = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
    error.kind() == ErrorKind::NotPermitted || error.io_error().is_some_and(is_denied)
}

/// In whose name a file is reached.
#[derive(Clone, Debug)]
pub(super) enum Actor {
    /// This process: all of the job is root's, or this process is not root.
    This,
    /// A user of the job.
    User(Arc<Identity>, Users),
    /// This process, where none of the users can change a directory on the way.
    Guarded(Users),
}

impl Actor {
    /// Does `work` with the rights of the actor.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        match self {
            Actor::User(user, _) => user.run(work)?,
            Actor::This | Actor::Guarded(_) => work(),
        }
    }

    /// True if the actor may do with a file of this owner what an owner may do.
    pub fn owns(&self, uid: u32) -> bool {
        match self {
            Actor::User(user, _) => user.uid == uid,
            Actor::This | Actor::Guarded(_) => true,
        }
    }

    /// True if the actor may give a file that it owns this owner, group and mode. `present` is the
    /// group that the file has, or that it gets from its directory.
    pub fn may_give(&self, uid: u32, gid: u32, present: Option<u32>) -> bool {
        match self {
            Actor::User(user, _) => user.uid == uid && (user.is_member(gid) || present == Some(gid)),
            Actor::This | Actor::Guarded(_) => true,
        }
    }

    /// True unless the mode of a directory or file forbids the actor to write it.
    pub fn could_write(&self, held: &Metadata, has_acl: impl FnOnce() -> bool) -> bool {
        self.could(held, 0o2, has_acl)
    }

    /// True unless the mode of a directory or file forbids the actor to read it.
    pub fn could_read(&self, held: &Metadata, has_acl: impl FnOnce() -> bool) -> bool {
        self.could(held, 0o4, has_acl)
    }

    fn could(&self, held: &Metadata, bit: u32, has_acl: impl FnOnce() -> bool) -> bool {
        let Actor::User(user, _) = self else { return true };
        let mode = held.mode();
        // An owner can change the mode.
        user.uid == held.uid()
            || mode & bit != 0
            || (mode & (bit << 3) != 0 && (user.is_member(held.gid()) || has_acl()))
    }

    /// True if root may pass this directory, for the actor: none of the users can change it.
    pub fn is_guarded(&self, directory: &Metadata, has_acl: impl FnOnce() -> bool) -> bool {
        match self {
            Actor::This => true,
            Actor::User(_, users) | Actor::Guarded(users) => !users.can_change(directory, has_acl),
        }
    }
}

/// Stores the users of a checkpoint.
pub(crate) fn record(users: &Users, store: &mut dyn Store) -> Result<StateRecord> {
    let failed = |source| Error::of(ErrorKind::Store, "store the users of the processes", Object::None, source);
    let text = serde_json::to_vec(&*users.0).map_err(io::Error::from).map_err(super::io("describe", USERS))?;
    let content = Blob::write(store, &mut &text[..]).map_err(failed)?;
    Ok(StateRecord { name: USERS.into(), content })
}

/// The users of a checkpoint. If it does not have them, any user may be one.
pub(crate) fn read(manifest: &Manifest, store: &dyn Store) -> Result<Users> {
    let Some(record) = manifest.state.iter().find(|state| state.name == USERS) else {
        return Ok(Users(Arc::new(UserList { users: Vec::new(), with_root: false, is_known: false })));
    };
    let failed = |source| Error::of(ErrorKind::Store, "read the users of the processes", Object::None, source);
    let text = record.content.read_all(store).map_err(failed)?;
    serde_json::from_slice(&text).map(|known| Users(Arc::new(known))).map_err(|error| {
        Error::about(ErrorKind::Damaged, Object::Recorded(USERS.into()), format!("is not as it was written: {error}"))
    })
}
