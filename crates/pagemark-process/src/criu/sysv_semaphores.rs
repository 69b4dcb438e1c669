//! System V semaphores (`semget`, `semop`) of processes that have no IPC namespace of their own.
//!
//! CRIU saves and restores semaphores only together with a whole IPC namespace. Outside of one, a
//! set of semaphores belongs to no process: it is found by its key or its id, and stays when all
//! processes have ended. The kernel remembers for each semaphore which process has changed it last.
//! A set counts as a tree's own if a process of the tree was the last to change one of its
//! semaphores, and none was last changed by another process that still runs. The checkpoint takes
//! the values of such sets in the freeze. A restore puts them back, and makes a set that is gone
//! anew, with its id and key. The first process of the tree, which CRIU leaves stopped, is made to
//! change the values: so the set is the tree's own again.

use std::ffi::c_ushort;
use std::io;

use pagemark_linux::proc::{self, Process, Stat, Status};
use pagemark_trace::error::Error;
use pagemark_trace::inject::{self, Call};

use super::sysv_ids::{Objects, PERMISSIONS};

const SETS: Objects = Objects {
    name: "System V semaphore set",
    help: "`ipcs -s` shows the sets",
    next_id: "/proc/sys/kernel/sem_next_id",
    // SAFETY: it only looks for a set.
    find: |key| unsafe { libc::semget(key, 0, 0) },
    remove,
};

/// A set of semaphores that processes of a tree alone have changed.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct SemaphoreSet {
    id: i32,
    key: i32,
    uid: u32,
    gid: u32,
    mode: u32,
    values: Vec<u16>,
}

/// Finds the sets of a frozen tree. `members` are its processes; they are asked for only if there
/// are semaphores at all.
///
/// # Errors
/// [`ErrorKind::System`]: a set may not be examined.
pub(crate) fn find<'a>(root_pid: i32, members: impl FnOnce() -> &'a [i32]) -> Result<Vec<SemaphoreSet>, Error> {
    // Those of another namespace are CRIU's, or cannot be seen.
    if proc::namespace(root_pid, "ipc").ok() != proc::own_namespace("ipc").ok() {
        return Ok(Vec::new());
    }
    let ids = ids();
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let tree = members();
    let mut found = Vec::new();
    for id in ids {
        match SemaphoreSet::of_tree(id, tree) {
            Ok(set) => found.extend(set),
            // It was removed meanwhile.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EIDRM)) => {}
            Err(error) => return Err(SETS.failed("examine", id)(error)),
        }
    }
    Ok(found)
}

/// The sets of this process's IPC namespace.
fn ids() -> Vec<i32> {
    // SAFETY: all fields are numbers, for which zeros are valid.
    let mut status: libc::semid_ds = unsafe { std::mem::zeroed() };
    // A `struct seminfo` of ten numbers, which `semid_ds` has space for.
    const { assert!(size_of::<libc::semid_ds>() >= 10 * size_of::<libc::c_int>()) };
    // SAFETY: the command fills in a `struct seminfo`, which ends within `status`.
    let highest = unsafe { libc::semctl(0, 0, libc::SEM_INFO, &raw mut status) };
    // SAFETY: the command fills in the structure, and returns the id of the set at an index.
    let id_at = |index| unsafe { libc::semctl(index, 0, libc::SEM_STAT, &raw mut status) };
    // An index without a set is an error.
    (0..=highest).map(id_at).filter(|id| *id >= 0).collect()
}

fn status(id: i32) -> io::Result<libc::semid_ds> {
    // SAFETY: all fields are numbers, for which zeros are valid.
    let mut status: libc::semid_ds = unsafe { std::mem::zeroed() };
    // SAFETY: the command fills in the structure.
    done(unsafe { libc::semctl(id, 0, libc::IPC_STAT, &raw mut status) })?;
    Ok(status)
}

/// The values of the first `count` semaphores of a set.
fn values(id: i32, count: usize) -> io::Result<Vec<u16>> {
    // One at a time: GETALL writes as many values as the set has, whatever the length of the buffer.
    // SAFETY: the call takes numbers alone.
    let value = |index| done(unsafe { libc::semctl(id, index as i32, libc::GETVAL) });
    (0..count).map(|index| value(index).map(|value| value as u16)).collect()
}

/// The process that has changed a semaphore last; zero if none has.
fn last_user(id: i32, index: usize) -> io::Result<i32> {
    // SAFETY: the call takes numbers alone.
    done(unsafe { libc::semctl(id, index as i32, libc::GETPID) })
}

/// True of a process that has not ended.
fn is_running(pid: i32) -> bool {
    pid != 0 && Stat::read(pid).is_ok_and(|stat| !stat.is_zombie())
}

fn remove(id: i32) {
    // SAFETY: the call takes numbers alone.
    let _ = unsafe { libc::semctl(id, 0, libc::IPC_RMID) };
}

fn done(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl SemaphoreSet {
    /// The set, if it is the tree's own.
    fn of_tree(id: i32, tree: &[i32]) -> io::Result<Option<SemaphoreSet>> {
        let status = status(id)?;
        let count = status.sem_nsems as usize;
        let mut is_own = false;
        for index in 0..count {
            let user = last_user(id, index)?;
            if tree.contains(&user) {
                is_own = true;
            } else if is_running(user) {
                return Ok(None);
            }
        }
        if !is_own {
            return Ok(None);
        }
        let owner = &status.sem_perm;
        Ok(Some(SemaphoreSet {
            id,
            key: owner.__key,
            uid: owner.uid,
            gid: owner.gid,
            mode: u32::from(owner.mode) & PERMISSIONS,
            values: values(id, count)?,
        }))
    }

    /// Checks that the set can be put back, before the tree runs. `pids` are the ids that the tree
    /// gets: a process that has one of them is to end first, and is no user of the set then.
    ///
    /// # Errors
    /// [`ErrorKind::InTheWay`]: another set has the id or the key, or a process uses this one.
    pub(crate) fn check(&self, pids: &[i32]) -> Result<(), Error> {
        if !self.is_there()? {
            return Ok(());
        }
        for index in 0..self.values.len() {
            let user = last_user(self.id, index).map_err(SETS.failed("examine", self.id))?;
            if is_running(user) && !pids.contains(&user) {
                return Err(SETS.in_the_way(self.id, &format!("is in use by process {user}")));
            }
        }
        Ok(())
    }

    /// True if the set is still there.
    ///
    /// # Errors
    /// [`ErrorKind::InTheWay`]: another set has the id or the key.
    fn is_there(&self) -> Result<bool, Error> {
        match status(self.id) {
            Ok(status) if status.sem_perm.__key == self.key && status.sem_nsems as usize == self.values.len() => {
                Ok(true)
            }
            Ok(_) => Err(SETS.in_the_way(self.id, "is another one now, of another key or length")),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                SETS.check_key(self.id, self.key).map(|()| false)
            }
            Err(error) => Err(SETS.failed("examine", self.id)(error)),
        }
    }

    /// Makes the set, which is not there.
    fn make(&self) -> Result<(), Error> {
        let count = i32::try_from(self.values.len())
            .map_err(|_| Error::damaged(format!("the set of System V semaphores {} is too long", self.id)))?;
        // SAFETY: the call takes numbers alone.
        SETS.make(self.id, self.mode, |flags| unsafe { libc::semget(self.key, count, flags) })
    }

    /// Gives the set an owner and permissions.
    fn set_owner(&self, uid: u32, mode: u32) -> io::Result<()> {
        let mut status = status(self.id)?;
        (status.sem_perm.uid, status.sem_perm.gid) = (uid, self.gid);
        status.sem_perm.mode = mode as c_ushort;
        // SAFETY: the command reads the structure.
        done(unsafe { libc::semctl(self.id, 0, libc::IPC_SET, &raw mut status) }).map(drop)
    }

    /// Has a process give the semaphores of the set these values.
    fn set_values(&self, process: Process) -> Result<(), Error> {
        let status = Status::read(process.pid).map_err(|_| Error::no_process(process.pid))?;
        // The process may have given up the right to change them.
        self.set_owner(status.effective_uid, 0o600).map_err(SETS.failed("give to a process", self.id))?;
        let call = |(index, value): (usize, &u16)| Call {
            number: libc::SYS_semctl,
            arguments: [self.id as u64, index as u64, libc::SETVAL as u64, u64::from(*value), 0, 0],
        };
        inject::system_calls(process, self.values.iter().enumerate().map(call).collect())?;
        self.set_owner(self.uid, self.mode).map_err(SETS.failed("give back to its owner", self.id))
    }
}

/// Puts back the sets of a tree, by a process of the tree that is stopped.
///
/// # Errors
/// A set cannot be made or changed. Then no set is changed, and the processes are to be killed.
pub(crate) fn put_back(sets: &[SemaphoreSet], process: Process) -> Result<(), Error> {
    let mut undo = Undo::default();
    for set in sets {
        if set.is_there()? {
            undo.changed.push((set.id, values(set.id, set.values.len()).map_err(SETS.failed("read", set.id))?));
        } else {
            set.make()?;
            undo.made.push(set.id);
        }
        set.set_values(process)?;
    }
    undo.nothing();
    Ok(())
}

/// What a restore has changed. Dropped, all is as it was before.
#[derive(Debug, Default)]
struct Undo {
    /// Sets with their former values.
    changed: Vec<(i32, Vec<u16>)>,
    made: Vec<i32>,
}

impl Undo {
    fn nothing(mut self) {
        self.changed.clear();
        self.made.clear();
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        for (id, values) in &self.changed {
            for (index, value) in values.iter().enumerate() {
                // A set that was removed meanwhile has no values.
                // SAFETY: the call takes numbers alone.
                let _ = unsafe { libc::semctl(*id, index as i32, libc::SETVAL, libc::c_int::from(*value)) };
            }
        }
        self.made.iter().for_each(|id| remove(*id));
    }
}
