//! Groups of processes that are killed together.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pagemark_linux::proc;

use crate::support::children;

/// A control group of version 2 below the root. Removed when dropped.
pub struct Group(PathBuf);

impl Group {
    /// None where none can be made.
    pub fn new() -> Option<Group> {
        let mounts = proc::mounts::Mount::of_this_process().ok()?;
        let root = mounts.into_iter().find(|mount| mount.file_system == "cgroup2" && mount.root == Path::new("/"))?;
        static MADE: AtomicU32 = AtomicU32::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let directory = root.point.join(format!("pagemark-kills-{}-{number}", std::process::id()));
        fs::create_dir(&directory).ok()?;
        let group = Group(directory);
        // Linux 5.14.
        group.0.join("cgroup.kill").exists().then_some(group)
    }

    /// Starts the command in the group.
    pub fn have(&self, command: &mut Command) {
        let path = self.0.join("cgroup.procs");
        // SAFETY: the file is opened and written between fork and exec, by a child that nobody waits for
        // with a lock.
        unsafe { command.pre_exec(move || fs::write(&path, "0")) };
    }

    /// Kills all processes at once.
    pub fn kill(&self) -> bool {
        fs::write(self.0.join("cgroup.kill"), "1").is_ok()
    }

    /// Kills one process after the other.
    pub fn kill_each(&self) -> bool {
        let mut is_any = false;
        loop {
            is_any |= self.members().into_iter().filter(|&pid| end(pid)).count() > 0;
            if self.members().is_empty() {
                return is_any;
            }
        }
    }

    /// The processes in it.
    pub fn members(&self) -> Vec<i32> {
        members_of(&fs::read_to_string(self.0.join("cgroup.procs")).unwrap_or_default())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        pagemark_testing::wait_until("the group to be empty", || fs::remove_dir(&self.0).is_ok());
    }
}

/// The processes that `cgroup.procs` names. One whose id the reader's namespace does not have is
/// listed as 0; a signal to 0 would go to the process group of the test.
pub fn members_of(text: &str) -> Vec<i32> {
    text.lines().filter_map(|line| line.parse().ok()).filter(|&pid| pid > 0).collect()
}

/// The processes below one.
pub fn below(pid: i32) -> Vec<i32> {
    let mut found = children(pid);
    let mut at = 0;
    while at < found.len() {
        found.extend(children(found[at]));
        at += 1;
    }
    found
}

/// Kills one process.
pub fn end(pid: i32) -> bool {
    assert!(pid > 0, "{pid} is the id of no process");
    kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok()
}
