//! The library that is preloaded into a QEMU whose machine is to be tracked by `kvm-log` or
//! `kvm-ring`.

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use pagemark_kvm_log::kernel::Keeping;
use pagemark_kvm_log::protocol::{LIBRARY, RINGS, SOCKET};
use pagemark_kvm_log::ring::ENTRIES;
use pagemark_linux::elf;
use pagemark_trace::preload::{self, Missing, Unloadable};

use crate::error::{Error, ErrorKind, Object, Result};

/// Names the library, before the other places are looked at.
const VARIABLE: &str = "PAGEMARK_KVM_LOG_LIBRARY";

/// The variables by which QEMU, the program `program`, gets the library, and the library its
/// socket, and what its machine is to keep.
///
/// # Errors
/// [`ErrorKind::KvmLog`]: the library is not there, or this program takes none.
pub(crate) fn variables(program: &OsStr, socket: &Path, keeping: Keeping) -> Result<Vec<(&'static str, OsString)>> {
    let library = library()?;
    if let Some(reason) = find(program).and_then(|path| refusal(&path)) {
        let error = Error::about(ErrorKind::KvmLog, Object::None, format!("{} {reason}", Path::new(program).display()));
        let help = "use a QEMU that is linked dynamically, without rights of its own, or another mechanism";
        return Err(error.help(help));
    }
    let value = preload::ld_preload(library.clone()).map_err(|reason| {
        let reason = match reason {
            Unloadable::Name => "has a blank or a colon in its path, and cannot be preloaded".to_owned(),
            Unloadable::Unreadable(error) => format!("cannot be read: {error}"),
            Unloadable::NoLibrary => "is not a library of x86-64".to_owned(),
        };
        let error = Error::about(ErrorKind::KvmLog, Object::None, format!("{} {reason}", library.display()));
        error.help(format!("name another copy in {VARIABLE}"))
    })?;
    let rings = (keeping == Keeping::Rings).then(|| (RINGS, ENTRIES.to_string().into()));
    Ok([(preload::PRELOAD, value), (SOCKET, socket.as_os_str().to_owned())].into_iter().chain(rings).collect())
}

/// Finds the library: in `$PAGEMARK_KVM_LOG_LIBRARY`, beside this program, or in `../lib/pagemark`.
///
/// # Errors
/// [`ErrorKind::KvmLog`]
pub(crate) fn library() -> Result<PathBuf> {
    preload::companion(LIBRARY, VARIABLE).map_err(|missing| match missing {
        Missing::Named(path, error) => {
            Error::of(ErrorKind::KvmLog, format!("find the library {}", path.display()), Object::None, error)
        }
        Missing::Program(error) => Error::system("find the program of this process")(error),
        Missing::Nowhere(reason) => Error::about(ErrorKind::KvmLog, Object::None, reason)
            .help(format!("build the package pagemark-kvm-preload, or name the library in {VARIABLE}")),
    })
}

/// The file of a program. None if there is none: starting it says so.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(PathBuf::from(program));
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|directory| directory.join(program)).find(|file| file.is_file())
}

/// Why the dynamic linker would preload nothing into a program. What cannot be read is not refused:
/// then the library is missed later.
fn refusal(program: &Path) -> Option<&'static str> {
    let file = File::open(program).ok()?;
    let status = file.metadata().ok()?;
    // SAFETY: the calls have no arguments and cannot fail.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    let changes_user = status.mode() & libc::S_ISUID != 0 && status.uid() != user;
    let changes_group = status.mode() & libc::S_ISGID != 0 && status.gid() != group;
    if changes_user || changes_group || has_capabilities(program) && user != 0 {
        return Some("gets rights from its file, so that nothing can be preloaded");
    }
    match elf::is_static(&file) {
        Ok(true) => Some("is linked statically, so that nothing can be preloaded"),
        _ => None,
    }
}

/// True if the file gives its program capabilities.
fn has_capabilities(program: &Path) -> bool {
    let Ok(path) = CString::new(program.as_os_str().as_bytes()) else { return false };
    // SAFETY: both names are strings, and nothing is written.
    unsafe { libc::getxattr(path.as_ptr(), c"security.capability".as_ptr(), std::ptr::null_mut(), 0) > 0 }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_program_that_takes_no_library_is_refused() {
        assert_eq!(refusal(&std::env::current_exe().unwrap()), None);
        assert_eq!(refusal(Path::new("/no/such/program")), None);
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("script");
        std::fs::write(&script, "#!/bin/sh\nexec qemu-system-x86_64 \"$@\"\n").unwrap();
        assert_eq!(refusal(&script), None);
        // A program with no program headers at all names no linker.
        let program = directory.path().join("static");
        let mut header = b"\x7fELF\x02\x01".to_vec();
        header.resize(64, 0);
        header[54] = 56;
        std::fs::write(&program, &header).unwrap();
        assert!(refusal(&program).is_some_and(|reason| reason.contains("statically")));
        // Headers that are not there: whatever starts it says what is wrong.
        header[56] = 9;
        std::fs::write(&program, &header).unwrap();
        assert_eq!(refusal(&program), None);
        std::fs::write(&program, b"\x7fELF\x02").unwrap();
        assert_eq!(refusal(&program), None);
        let rights = directory.path().join("rights");
        std::fs::write(&rights, "").unwrap();
        if std::os::unix::fs::chown(&rights, Some(12345), None).is_ok() {
            std::fs::set_permissions(&rights, std::fs::Permissions::from_mode(0o4755)).unwrap();
            assert!(refusal(&rights).is_some_and(|reason| reason.contains("rights")));
        }
    }

    #[test]
    fn a_program_is_found_as_a_shell_finds_it() {
        assert!(find(OsStr::new("sh")).is_some_and(|path| path.is_absolute()));
        assert_eq!(find(OsStr::new("./sh")), Some(PathBuf::from("./sh")));
        assert_eq!(find(OsStr::new("no-such-program-anywhere")), None);
    }
}
