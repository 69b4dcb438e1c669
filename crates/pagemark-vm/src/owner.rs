//! Whose process a QEMU is. A machine that ran without root's rights must not get them by a
//! restore, which root can do.

use std::io;

use pagemark::sys::proc;
use serde::{Deserialize, Serialize};

use crate::command_line::option_name;

/// The user of a process, and its groups.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Owner {
    pub(crate) user: u32,
    pub(crate) group: u32,
    pub(crate) groups: Vec<u32>,
}

impl Owner {
    /// By the effective ids of a process.
    pub(crate) fn of_process(pid: i32) -> io::Result<Owner> {
        let status = std::fs::read_to_string(proc::path(pid, "status"))?;
        Owner::parse(&status).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no user is named"))
    }

    // Not by `proc::Status`, where a number that is missing is 0: that would be root.
    fn parse(status: &str) -> Option<Owner> {
        let numbers = |name: &str| -> Option<Vec<u32>> {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.split_ascii_whitespace().map(|number| number.parse().ok()).collect()
        };
        // The real, the effective, the saved and the file system's.
        let effective = |name| numbers(name)?.get(1).copied();
        Some(Owner { user: effective("Uid")?, group: effective("Gid")?, groups: numbers("Groups")? })
    }

    /// True if a new QEMU with these arguments must be given the owner: this process is root's, and
    /// QEMU does not change its user itself.
    pub(crate) fn is_to_be_set(&self, arguments: &[String]) -> bool {
        let changes = |argument: &String| matches!(option_name(argument), Some("runas" | "run-with"));
        self.user != 0 && nix::unistd::geteuid().is_root() && !arguments.iter().any(changes)
    }

    /// Gives this process to the owner. Makes only system calls.
    pub(crate) fn set(&self) -> io::Result<()> {
        // SAFETY: the groups live through the call; the other calls take numbers. The calls themselves are
        // made, not the library's functions, which would stop all threads.
        unsafe {
            let groups = libc::syscall(libc::SYS_setgroups, self.groups.len(), self.groups.as_ptr());
            let done = groups == 0
                && libc::syscall(libc::SYS_setresgid, self.group, self.group, self.group) == 0
                && libc::syscall(libc::SYS_setresuid, self.user, self.user, self.user) == 0;
            if done { Ok(()) } else { Err(io::Error::last_os_error()) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_effective_ids_are_read() {
        let status = "Name:\tqemu\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t9 10 \n";
        assert_eq!(Owner::parse(status), Some(Owner { user: 2, group: 6, groups: vec![9, 10] }));
        let alone = Owner::parse("Uid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nGroups:\t\n");
        assert_eq!(alone, Some(Owner { user: 2, group: 6, groups: Vec::new() }));
        for broken in ["", "Uid:\t1\nGid:\t5\t6\t7\t8\nGroups:\t\n", "Uid:\t1\tx\t3\t4\nGid:\t5\t6\nGroups:\t\n"] {
            assert_eq!(Owner::parse(broken), None, "{broken}");
        }
        let own = Owner::of_process(std::process::id() as i32).unwrap();
        assert_eq!(own.user, nix::unistd::geteuid().as_raw());
    }

    #[test]
    fn a_qemu_that_changes_its_user_itself_is_left_to_that() {
        let owner = Owner { user: 65534, group: 65534, groups: Vec::new() };
        let is_root = nix::unistd::geteuid().is_root();
        for (argument, is_set) in [("-m", is_root), ("-runas", false), ("--run-with", false)] {
            assert_eq!(owner.is_to_be_set(&[argument.to_owned()]), is_set);
        }
        assert!(!Owner { user: 0, ..owner }.is_to_be_set(&[]));
    }
}
