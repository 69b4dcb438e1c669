//! Containers for the tests, without a runtime.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use pagemark_testing::wait_for;

use crate::support::{children, kill_and_wait};

/// Makes a root directory of its own for the program that follows, and executes the program there:
/// the programs of the host, a `tmpfs` that holds a file, and the directory of the test at `/data`.
/// The output goes to a file that is open outside, as runtimes have it.
const START: &str = r#"
root=$1 data=$2; shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
for name in bin lib lib64 usr sbin etc tmp proc dev data; do mkdir -p "$root/$name"; done
for name in bin lib lib64 usr sbin etc dev; do mount --rbind "/$name" "$root/$name"; done
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind "$data" "$root/data"
echo kept >"$root/tmp/file"
cd "$root"
pivot_root . .
umount -l .
exec </dev/null
cd /data
exec "$@"
"#;

/// A container of the test, which ends with it.
pub struct Container {
    starter: Child,
    /// Its first process.
    pub pid: i32,
}

impl Container {
    /// Starts a program in a container with the root directory `root` and the volume `data`.
    /// Options of `unshare` add to what the container has of its own.
    pub fn start(options: &[&str], root: &Path, data: &Path, program: &[&str]) -> Container {
        let mut unshare = Command::new("unshare");
        unshare.args(["--fork", "--pid", "--mount", "--uts", "--ipc"]).args(options).args(["sh", "-c", START, "sh"]);
        unshare.args([root, data]).args(program);
        let output = File::create(data.join("output")).expect("a file");
        unshare.stdin(Stdio::null()).stderr(output.try_clone().expect("a descriptor")).stdout(output);
        // SAFETY: only system calls are made between fork and exec.
        unsafe {
            unshare.pre_exec(|| {
                // Descriptors of the test runner lead out of the container. A kernel without this call keeps them.
                libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as i32);
                Ok(())
            });
        }
        let starter = unshare.spawn().expect("unshare");
        let pid = wait_for("the container", || children(starter.id() as i32).first().copied());
        Container { starter, pid }
    }

    pub fn kill(&mut self) {
        // Once it has ended, another process may have its id.
        if matches!(self.starter.try_wait(), Ok(None)) {
            kill_and_wait(self.pid);
        }
        let _ = self.starter.kill();
        let _ = self.starter.wait();
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        self.kill();
    }
}
