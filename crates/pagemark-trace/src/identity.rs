//! The user in whose name Pagemark reaches files for a process.
//!
//! A process may be hostile: its user can swap any file or directory that it may write for another
//! one, at any time. What root does with a path of that user is therefore done with the user's own
//! ids and without capabilities, so that the kernel permits nothing that the user could not do.

use std::io;

use nix::errno::Errno;
use pagemark_linux::proc::Credentials;
use serde::{Deserialize, Serialize};

/// A user as the permissions of files see it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Identity {
    /// The user.
    pub uid: u32,
    /// The group of what the user creates.
    pub gid: u32,
    /// The other groups.
    pub groups: Vec<u32>,
}

impl Identity {
    /// The user of a process or thread. Where its ids differ, as in a set-uid program, it is not
    /// root if one of them is another user: that user may control it.
    ///
    /// # Errors
    /// There is no such process.
    pub fn of_process(pid: i32) -> io::Result<Identity> {
        Credentials::read(pid).map(Identity::of)
    }

    /// The user with these ids.
    pub fn of(credentials: Credentials) -> Identity {
        let Credentials { uids, gids, groups, .. } = credentials;
        // Who executed a set-uid program has the real id, and what a process of root became for a while
        // are the others.
        let least = |[real, effective, saved, files]: [u32; 4]| {
            [real, files, effective, saved].into_iter().find(|&id| id != 0).unwrap_or(0)
        };
        Identity { uid: least(uids), gid: if uids == [0; 4] { gids[3] } else { least(gids) }, groups }
    }

    /// True if it is root of the namespace of users of this process. For root, nothing is switched.
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }

    /// True if the user is in the group.
    pub fn is_member(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.contains(&gid)
    }

    /// Calls `work` with the file system's ids and the groups of this user and without
    /// capabilities, in a thread of its own. If this process is not root, or the user is, `work` is
    /// called here.
    ///
    /// Descriptors stay open, and what they allow is allowed.
    ///
    /// # Errors
    /// No thread can be made, or this process may not take the ids; `work` was not called.
    pub fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        if self.is_root() || !nix::unistd::geteuid().is_root() {
            return Ok(work());
        }
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("as-user".into());
            let thread = thread.spawn_scoped(scope, || self.take().map(|()| work()))?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Gives the running thread these ids, for ever.
    fn take(&self) -> io::Result<()> {
        let (uid, gid) = (u64::from(self.uid), u64::from(self.gid));
        // `-1` is no id: the call changes nothing and returns the present one.
        let none = u64::from(u32::MAX);
        // The functions of the C library change all threads, the system calls only this one.
        // SAFETY: `setgroups` reads as many numbers as it is told, which `groups` has; the others take
        // numbers alone.
        let (uid_now, gid_now) = unsafe {
            Errno::result(libc::syscall(libc::SYS_setgroups, self.groups.len(), self.groups.as_ptr()))?;
            libc::syscall(libc::SYS_setfsgid, gid);
            libc::syscall(libc::SYS_setfsuid, uid);
            (libc::syscall(libc::SYS_setfsuid, none), libc::syscall(libc::SYS_setfsgid, none))
        };
        // These calls report no errors.
        if (uid_now as u32, gid_now as u32) != (self.uid, self.gid) {
            return Err(io::Error::new(
                io::ErrorKind::PermissionDenied,
                "taking the ids of another user needs CAP_SETUID and CAP_SETGID",
            ));
        }
        drop_capabilities()
    }
}

/// Takes all capabilities from the running thread. The kernel has taken those for files when the
/// user id became another one, unless this process asks it not to (`SECBIT_NO_SETUID_FIXUP`).
fn drop_capabilities() -> io::Result<()> {
    const VERSION_3: u32 = 0x2008_0522;
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    let header = Header { version: VERSION_3, pid: 0 };
    // Effective, permitted, inheritable, in two halves.
    let none = [0_u32; 6];
    // SAFETY: the call reads the header and, for this version, six numbers; both outlive it.
    let result = unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) };
    Errno::result(result).map(drop).map_err(io::Error::from)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

    use super::*;

    fn nobody() -> Identity {
        Identity { uid: 65534, gid: 65534, groups: vec![12345] }
    }

    #[test]
    fn work_is_done_with_the_rights_of_the_user_and_leaves_nothing() {
        if !nix::unistd::geteuid().is_root() {
            return pagemark_testing::skipped("taking the ids of another user needs root");
        }
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
        fs::write(at("roots"), b"secret").unwrap();
        fs::set_permissions(at("roots"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::write(at("groups"), b"shared").unwrap();
        fs::set_permissions(at("groups"), fs::Permissions::from_mode(0o640)).unwrap();
        chown(at("groups"), None, Some(12345)).unwrap();
        let before = Credentials::read(std::process::id() as i32).unwrap();
        let denied = nobody().run(|| fs::read(at("roots")).unwrap_err().kind()).unwrap();
        assert_eq!(denied, io::ErrorKind::PermissionDenied);
        assert_eq!(nobody().run(|| fs::read(at("groups")).unwrap()).unwrap(), b"shared");
        nobody().run(|| fs::write(at("new"), b"").unwrap()).unwrap();
        let made = fs::metadata(at("new")).unwrap();
        assert_eq!((made.uid(), made.gid()), (65534, 65534));
        assert!(nobody().run(|| chown(at("new"), Some(0), None).is_err()).unwrap());
        assert_eq!(fs::read(at("roots")).unwrap(), b"secret");
        assert_eq!(Credentials::read(std::process::id() as i32).unwrap(), before);
        let own = nobody().run(|| Credentials::read(nix::unistd::gettid().as_raw()).unwrap()).unwrap();
        assert_eq!((own.uids[3], own.gids[3], own.groups, own.capabilities), (65534, 65534, vec![12345], 0));
        // A descriptor is open as the thread has it.
        let held = fs::File::open(directory.path()).unwrap();
        let number = std::os::fd::AsRawFd::as_raw_fd(&held);
        assert!(nobody().run(|| fs::metadata(format!("/proc/self/fd/{number}/new")).is_ok()).unwrap());
    }

    #[test]
    fn a_program_whose_ids_differ_is_not_root() {
        let of = |uids, gids| Identity::of(Credentials { uids, gids, ..Credentials::default() });
        assert!(of([0; 4], [0; 4]).is_root());
        assert_eq!(of([0; 4], [0, 0, 0, 5]).gid, 5);
        for uids in [[7, 0, 0, 0], [0, 7, 0, 7], [0, 0, 7, 0], [0, 0, 0, 7]] {
            assert_eq!(of(uids, [0, 9, 0, 0]), Identity { uid: 7, gid: 9, groups: vec![] });
        }
        assert_eq!(of([7, 8, 8, 8], [9, 5, 5, 5]), Identity { uid: 7, gid: 9, groups: vec![] });
    }

    #[test]
    #[should_panic(expected = "on purpose")]
    fn a_panic_reaches_the_caller() {
        let _ = nobody().run(|| panic!("on purpose"));
    }
}
