//! A file system with little room.

use std::path::Path;
use std::process::{Command, Stdio};

/// A small file system, unmounted when dropped.
pub struct SmallDisk {
    directory: tempfile::TempDir,
}

impl SmallDisk {
    /// None where no file system can be mounted.
    pub fn mount(options: &str) -> Option<SmallDisk> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "pagemark-test"]).arg(directory.path()).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then_some(SmallDisk { directory })
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l"]).arg(self.directory.path()).status();
    }
}
