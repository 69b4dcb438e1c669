//! Whose process a QEMU is. A machine that ran without root's rights must not get them by a
//! restore, which root can do: what root does for it, it does with the rights of the owner.

use std::io;

use pagemark_linux::proc;
use pagemark_trace::identity::Identity;
use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorKind, Object, Result};

/// The user of a process, and its groups.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Owner {
    /// The id of the user.
    pub user: u32,
    pub(crate) group: u32,
    pub(crate) groups: Vec<u32>,
    /// The capabilities that a program of the process can get. None in checkpoints of earlier
    /// versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) bounding: Option<u64>,
    /// True if no program of the process can get more rights than the process has.
    #[serde(default)]
    pub(crate) no_new_privileges: bool,
}

impl Owner {
    /// By the ids of a process.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if it does not belong to one user alone: it has rights that it
    /// can give up, or that its user does not have.
    pub(crate) fn of_process(pid: i32) -> Result<Owner> {
        let status = std::fs::read_to_string(proc::path(pid, "status")).map_err(|error| {
            let kind = if error.kind() == io::ErrorKind::NotFound { ErrorKind::Gone } else { ErrorKind::System };
            Error::of(kind, "find the user of", Object::Process(pid), error)
        })?;
        Owner::parse(&status).ok_or_else(|| {
            let reason = "has the rights of several users: its real and its effective user or group differ";
            Error::about(ErrorKind::Unsupported, Object::Process(pid), reason)
        })
    }

    // Not by `proc::Status`, where a number that is missing is 0: that would be root.
    fn parse(status: &str) -> Option<Owner> {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let numbers = |name: &str| -> Option<Vec<u32>> {
            field(name)?.split_ascii_whitespace().map(|number| number.parse().ok()).collect()
        };
        // The real, the effective, the saved and the file system's.
        let only = |name| match numbers(name)?[..] {
            [real, effective, saved, files] if [effective, saved, files] == [real; 3] => Some(real),
            _ => None,
        };
        Some(Owner {
            user: only("Uid")?,
            group: only("Gid")?,
            groups: numbers("Groups")?,
            bounding: Some(u64::from_str_radix(field("CapBnd")?.trim(), 16).ok()?),
            // The field is newer than Linux 4.9.
            no_new_privileges: field("NoNewPrivs")?.trim() == "1",
        })
    }

    /// True if this process has rights that the owner does not have.
    pub(crate) fn is_to_be_set(&self) -> bool {
        self.user != 0 && nix::unistd::geteuid().is_root()
    }

    /// Gives this process to the owner, where the owner has not its rights, and lets no program get
    /// more rights than the owner's QEMU could get. Makes only system calls.
    pub(crate) fn set(&self) -> io::Result<()> {
        let call = |number: libc::c_long, arguments: [u64; 5]| {
            let [a, b, c, d, e] = arguments;
            // SAFETY: the numbers and the pointer to the groups, which live through the call, are what the calls
            // take. The calls themselves are made, not the library's functions, which would stop all threads.
            match unsafe { libc::syscall(number, a, b, c, d, e) } {
                -1 => Err(io::Error::last_os_error()),
                result => Ok(result),
            }
        };
        let is_to_be_set = self.is_to_be_set();
        if nix::unistd::geteuid().is_root() {
            for capability in (0..64).filter(|capability| self.bounding.is_some_and(|held| held >> capability & 1 == 0))
            {
                // The kernel may know fewer.
                match call(libc::SYS_prctl, [libc::PR_CAPBSET_DROP as u64, capability, 0, 0, 0]) {
                    Err(error) if error.raw_os_error() != Some(libc::EINVAL) => return Err(error),
                    _ => {}
                }
            }
        }
        if is_to_be_set {
            let (user, group) = (u64::from(self.user), u64::from(self.group));
            call(libc::SYS_setgroups, [self.groups.len() as u64, self.groups.as_ptr() as u64, 0, 0, 0])?;
            call(libc::SYS_setresgid, [group, group, group, 0, 0])?;
            call(libc::SYS_setresuid, [user, user, user, 0, 0])?;
            // Keys of the session are for whoever is in it.
            match call(libc::SYS_keyctl, [u64::from(libc::KEYCTL_JOIN_SESSION_KEYRING), 0, 0, 0, 0]) {
                // Without the call there are no keys either.
                Err(error) if !matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EACCES)) => {
                    return Err(error);
                }
                _ => {}
            }
        }
        // Root writes the memory of this process, which must stay one that the owner could write.
        if is_to_be_set || self.no_new_privileges {
            call(libc::SYS_prctl, [libc::PR_SET_NO_NEW_PRIVS as u64, 1, 0, 0, 0])?;
        }
        Ok(())
    }

    /// Does `act` with the owner's rights to files, and with no other.
    fn act<T: Send>(&self, act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
        Identity { uid: self.user, gid: self.group, groups: self.groups.clone() }.run(act)?
    }
}

/// Does `act` with the rights of `owner`, which is that of a QEMU, or with those of this process if
/// it has none.
pub(crate) fn act_as<T: Send>(owner: Option<&Owner>, act: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    match owner {
        Some(owner) => owner.act(act),
        None => act(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    fn status(user: &str, group: &str, groups: &str) -> String {
        format!("Name:\tqemu\nUid:\t{user}\nGid:\t{group}\nGroups:\t{groups} \nCapBnd:\t00ff\nNoNewPrivs:\t1\n")
    }

    #[test]
    fn the_ids_of_one_user_are_read_and_those_of_several_refused() {
        let parsed = |user, group| Owner::parse(&status(user, group, "9 10"));
        let expected = Owner { user: 2, group: 6, groups: vec![9, 10], bounding: Some(0xff), no_new_privileges: true };
        assert_eq!(parsed("2\t2\t2\t2", "6\t6\t6\t6"), Some(expected));
        assert_eq!(Owner::parse(&status("2\t2\t2\t2", "6\t6\t6\t6", "")).unwrap().groups, [0; 0]);
        for (user, group) in [
            ("2\t0\t2\t2", "6\t6\t6\t6"),
            ("2\t2\t0\t2", "6\t6\t6\t6"),
            ("0\t2\t2\t2", "6\t6\t6\t6"),
            ("2\t2\t2\t0", "6\t6\t6\t6"),
            ("2\t2\t2\t2", "6\t6\t0\t6"),
            ("2", "6\t6\t6\t6"),
            ("2\t2\t2\tx", "6\t6\t6\t6"),
            ("2\t2\t2\t2", ""),
        ] {
            assert_eq!(parsed(user, group), None, "{user} {group}");
        }
        let own = Owner::of_process(std::process::id() as i32).unwrap();
        assert_eq!(own.user, nix::unistd::geteuid().as_raw());
    }

    #[test]
    fn what_is_done_for_an_owner_is_done_with_its_rights() {
        if !nix::unistd::geteuid().is_root() {
            pagemark_testing::skip!("only root acts for others");
        }
        let owner = Owner { user: 4711, group: 4712, groups: vec![4713], bounding: None, no_new_privileges: false };
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::set_permissions(directory.path(), Permissions::from_mode(0o777)).unwrap();
        fs::write(path("of-root"), "secret").unwrap();
        fs::set_permissions(path("of-root"), Permissions::from_mode(0o600)).unwrap();
        fs::write(path("of-group"), "shared").unwrap();
        std::os::unix::fs::chown(path("of-group"), None, Some(4713)).unwrap();
        fs::set_permissions(path("of-group"), Permissions::from_mode(0o640)).unwrap();
        let denied = owner.act(|| fs::read(path("of-root"))).unwrap_err();
        assert_eq!(denied.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(owner.act(|| fs::read(path("of-group"))).unwrap(), b"shared");
        owner.act(|| fs::write(path("new"), "")).unwrap();
        let made = fs::metadata(path("new")).unwrap();
        assert_eq!((made.uid(), made.gid()), (4711, 4712));
        // Files of other processes are not reached around their directories.
        let denied = owner.act(|| fs::read_dir("/proc/1/root/").map(drop)).unwrap_err();
        assert_eq!(denied.kind(), io::ErrorKind::PermissionDenied);
        // This thread has what it had.
        assert_eq!(fs::read(path("of-root")).unwrap(), b"secret");
    }
}
