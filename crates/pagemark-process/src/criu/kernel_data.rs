//! What CRIU found out about the kernel, kept from one dump to the next.
//!
//! CRIU examines the kernel at each start, for which it also starts iptables three times, and keeps
//! the result in `/run/criu.kdat` if `/run` is in memory. In many containers and small systems it
//! is not, and CRIU then spends more time on the examination than on a dump. There, Pagemark
//! answers the system calls by which CRIU reads and writes that file: the file is in the memory of
//! Pagemark, and as old as Pagemark at most. CRIU itself recognises a result of another version of
//! CRIU.
//!
//! CRIU makes these calls before it freezes anything. Of the other calls that the same filter hands
//! over, because they have the same flags, CRIU makes few later; they fail if Pagemark is killed,
//! and CRIU then cancels the dump as after any error.

use std::fs::{self, File};
use std::io::{self, Seek, Write};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};

/// The file, and the end of its name while CRIU writes it.
pub(super) const PATH: &str = "/run/criu.kdat";
pub(super) const TEMPORARY_PATH: &str = "/run/criu.kdat.tmp";

/// The directory of the file.
const DIRECTORY: &str = "/run";

/// Limit of the size of the file, bytes.
const MAX_BYTES: u64 = 64 << 10;

/// The content of the file, shared by all clones.
#[derive(Clone, Debug, Default)]
pub(super) struct KernelData(Arc<Mutex<Option<Arc<[u8]>>>>);

/// True if CRIU itself has no file here, and cannot keep one.
pub(super) fn is_needed() -> bool {
    let has_file = fs::metadata(PATH).is_ok_and(|metadata| metadata.len() > 0);
    let is_in_memory = statfs(DIRECTORY).is_ok_and(|system| system.filesystem_type() == TMPFS_MAGIC);
    // A CRIU that was killed has left the temporary file, and no other CRIU writes one then.
    let can_keep = is_in_memory && !fs::exists(TEMPORARY_PATH).unwrap_or(true);
    !has_file && !can_keep
}

impl KernelData {
    fn content(&self) -> MutexGuard<'_, Option<Arc<[u8]>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A file with the content, at its begin. None if nothing is known.
    pub(super) fn open(&self) -> io::Result<Option<File>> {
        let Some(content) = self.content().clone() else { return Ok(None) };
        let mut file = KernelData::create()?;
        file.write_all(&content)?;
        file.rewind()?;
        Ok(Some(file))
    }

    /// A file for CRIU to write into.
    pub(super) fn create() -> io::Result<File> {
        Ok(memfd_create(c"criu.kdat", MFdFlags::MFD_CLOEXEC)?.into())
    }

    /// Keeps what CRIU has written.
    pub(super) fn keep(&self, file: &File) -> io::Result<()> {
        let bytes = file.metadata()?.len();
        if bytes == 0 || bytes > MAX_BYTES {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let mut content = vec![0; bytes as usize];
        file.read_exact_at(&mut content, 0)?;
        *self.content() = Some(content.into());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;
    use crate::criu::{Criu, Dump, DumpOptions};

    struct Sleep(Child);

    impl Drop for Sleep {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn the_kernel_is_examined_once() {
        let criu = match Criu::find() {
            Ok(criu) => criu,
            Err(error) => pagemark_testing::skip!("{error}"),
        };
        let mut command = Command::new("setsid");
        let sleep = Sleep(command.arg("sleep").arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap());
        let dump = || {
            let directory = tempfile::tempdir().unwrap();
            let pid = sleep.0.id() as i32;
            let mut dump = Dump::start(&criu, pid, directory.path(), &DumpOptions::default()).unwrap();
            dump.wait_state_saved().unwrap();
            drop(dump);
            criu.kernel_data.content().clone()
        };
        let (first, second) = (dump(), dump());
        match (first, second) {
            // CRIU has read what it had written, and not written it again.
            (Some(first), Some(second)) => assert!(Arc::ptr_eq(&first, &second)),
            // CRIU keeps it, or no calls are answered on this kernel.
            (None, None) => assert!(!is_needed() || !pagemark_linux::pagemap::SCAN.is_there()),
            (first, second) => panic!("{first:?}, {second:?}"),
        }
    }

    #[test]
    fn what_was_not_written_whole_is_not_kept() {
        let data = KernelData::default();
        let file = KernelData::create().unwrap();
        data.keep(&file).unwrap_err();
        file.set_len(MAX_BYTES + 1).unwrap();
        data.keep(&file).unwrap_err();
        assert!(data.content().is_none());
        file.set_len(9).unwrap();
        data.clone().keep(&file).unwrap();
        assert_eq!(data.content().as_deref(), Some(&[0; 9][..]));
    }
}
