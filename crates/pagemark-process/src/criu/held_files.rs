//! Files that processes have open and that are not their users' own. A user may have got a
//! descriptor from someone who could open the file, such as an output that root has opened. A
//! restore opens the same file with the same rights again.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;
use nix::sys::stat::FileStat;
use pagemark_linux::access::Access;
use pagemark_linux::proc;
use pagemark_trace::identity::Identity;

/// The longest handle that the kernel gives, bytes.
const LONGEST_HANDLE: usize = 128;

/// A file that a process has open.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct HeldFile {
    /// The user of the process.
    user: u32,
    device: u64,
    inode: u64,
    /// Its file system's own name of it, which no later file of the same inode has: kind and bytes,
    /// in base 16.
    handle: String,
    reads: bool,
    writes: bool,
}

/// Finds the regular files that processes of users have open, and that do not belong to them.
pub(crate) fn find(pids: &[i32]) -> Vec<HeldFile> {
    let mut found: Vec<HeldFile> = Vec::new();
    for &pid in pids {
        let Ok(user) = Identity::of_process(pid) else { continue };
        if user.is_root() {
            continue;
        }
        for descriptor in proc::descriptors(pid).unwrap_or_default() {
            let Ok(metadata) = std::fs::metadata(descriptor.path()) else { continue };
            if !metadata.is_file() || metadata.uid() == user.uid {
                continue;
            }
            let flags = descriptor.info().ok().and_then(|info| i32::try_from(info.in_base("flags", 8)?).ok());
            let access = Access::of_flags(flags.unwrap_or(libc::O_PATH));
            let Ok(handle) = handle_at(&descriptor.path()) else { continue };
            let (user, device, inode) = (user.uid, metadata.dev(), metadata.ino());
            let held = HeldFile { user, device, inode, handle, reads: access.reads, writes: access.writes };
            if (held.reads || held.writes) && !found.contains(&held) {
                found.push(held);
            }
        }
    }
    found
}

impl HeldFile {
    /// True if this is a file that this user had open with these rights. `file` is open for
    /// nothing.
    pub(crate) fn is_it(&self, file: BorrowedFd<'_>, stat: &FileStat, user: &Identity, access: Access) -> bool {
        (self.user, self.device, self.inode) == (user.uid, stat.st_dev, stat.st_ino)
            && (self.reads || !access.reads)
            && (self.writes || !access.writes)
            && !access.executes
            && handle_of(file).is_ok_and(|handle| handle == self.handle)
    }
}

/// The handle of the file that a path in `/proc` leads to.
fn handle_at(path: &Path) -> io::Result<String> {
    let path = std::ffi::CString::new(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()))?;
    handle(libc::AT_FDCWD, &path, libc::AT_SYMLINK_FOLLOW)
}

fn handle_of(file: BorrowedFd<'_>) -> io::Result<String> {
    handle(file.as_raw_fd(), c"", libc::AT_EMPTY_PATH)
}

fn handle(directory: i32, path: &std::ffi::CStr, flags: i32) -> io::Result<String> {
    #[repr(C)]
    struct Handle {
        length: u32,
        kind: i32,
        bytes: [u8; LONGEST_HANDLE],
    }
    let mut handle = Handle { length: LONGEST_HANDLE as u32, kind: 0, bytes: [0; LONGEST_HANDLE] };
    let mut mount = MaybeUninit::<libc::c_int>::uninit();
    // SAFETY: the path ends with a zero byte. The kernel writes as many bytes of the handle as its
    // length says there are, and one number.
    let result = unsafe {
        let (path, handle, mount) = (path.as_ptr(), &raw mut handle, mount.as_mut_ptr());
        libc::syscall(libc::SYS_name_to_handle_at, directory, path, handle, mount, flags)
    };
    Errno::result(result)?;
    let bytes = handle.bytes.get(..handle.length as usize).ok_or(io::ErrorKind::InvalidData)?;
    let bytes: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{:x}:{bytes}", handle.kind))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_file_is_known_again_with_the_rights_that_it_was_open_with() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = std::fs::File::create(&path).unwrap();
        let stat = nix::sys::stat::fstat(&file).unwrap();
        let user = Identity { uid: 7, gid: 7, groups: Vec::new() };
        let handle = handle_at(&path).unwrap();
        assert_eq!(handle_of(file.as_fd()).unwrap(), handle);
        let held = HeldFile { user: 7, device: stat.st_dev, inode: stat.st_ino, handle, reads: false, writes: true };
        let is_it = |held: &HeldFile, user: &Identity, access| held.is_it(file.as_fd(), &stat, user, access);
        assert!(is_it(&held, &user, Access::WRITE));
        assert!(!is_it(&held, &user, Access::of_flags(libc::O_RDWR)));
        assert!(!is_it(&held, &Identity { uid: 8, ..user.clone() }, Access::WRITE));
        // A later file of the same inode.
        assert!(!is_it(&HeldFile { handle: "1:00".into(), ..held.clone() }, &user, Access::WRITE));
        assert!(!is_it(&HeldFile { inode: stat.st_ino + 1, ..held }, &user, Access::WRITE));
    }
}
