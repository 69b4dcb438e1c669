//! The result of examining a CRIU, kept until the next boot.
//!
//! An examination starts CRIU twice, which takes 90 ms or more. Its result is therefore kept in a
//! file, together with the [`Conditions`] under which it was found: the program,
//! the kernel, and the rights of this process. Under other conditions CRIU is examined anew.
//! Failures are not kept.
//!
//! The file is in `/run/pagemark`, for other users than root in `$XDG_RUNTIME_DIR/pagemark`. What
//! another user owns or could have written is not read. Where the file cannot be written, each
//! examination starts CRIU.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;
use pagemark_linux::proc::{self, Status};
use serde::{Deserialize, Serialize};

use crate::files::encode_path;

/// Name of the file.
const FILE: &str = "criu.json";

/// Limit of the size of the file, bytes.
const MAX_BYTES: u64 = 64 << 10;

/// Write permission for the group and for others.
const OTHERS_WRITE: u32 = 0o022;

/// What the result of an examination depends on.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Conditions {
    pagemark_version: String,
    /// Absolute path of the program, as [`encode_path`] writes it.
    program: String,
    /// Of the file: device, inode, bytes, and the times of the last change of its content and of
    /// its status, as seconds and nanoseconds.
    file: [u64; 7],
    kernel_release: String,
    boot_id: String,
    effective_uid: u32,
    capabilities: u64,
    /// Mode of seccomp, and number of the filters where the kernel tells it.
    seccomp: [u64; 2],
    /// The namespaces of this process, as `name:[inode]`.
    namespaces: Vec<String>,
}

impl Conditions {
    /// The conditions for the program at `path` now.
    pub(super) fn now(path: &Path) -> io::Result<Conditions> {
        let metadata = path.metadata()?;
        let times = [metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()];
        let [mtime, mtime_ns, ctime, ctime_ns] = times.map(i64::cast_unsigned);
        let file = [metadata.dev(), metadata.ino(), metadata.size(), mtime, mtime_ns, ctime, ctime_ns];
        let of_kernel = |name: &str| {
            let setting = proc::system::setting(&format!("kernel/{name}"));
            setting.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("/proc/sys/kernel has no {name}")))
        };
        let status = Status::of_this_process()?;
        let fields = proc::Fields::read(proc::own_path("status"))?;
        let mut namespaces = Vec::new();
        for entry in fs::read_dir(proc::own_path("ns"))? {
            namespaces.push(fs::read_link(entry?.path())?.display().to_string());
        }
        namespaces.sort();
        Ok(Conditions {
            pagemark_version: env!("CARGO_PKG_VERSION").into(),
            program: encode_path(&std::path::absolute(path)?),
            file,
            kernel_release: of_kernel("osrelease")?,
            boot_id: of_kernel("random/boot_id")?,
            effective_uid: status.effective_uid,
            capabilities: status.capabilities,
            seccomp: [status.seccomp_mode.into(), fields.number("Seccomp_filters").unwrap_or(0)],
            namespaces,
        })
    }
}

/// The file.
#[derive(Serialize, Deserialize)]
struct Examination {
    conditions: Conditions,
    version: String,
}

/// Where this user's result is kept. None if the user has no directory for files of this boot.
pub(super) fn directory() -> Option<PathBuf> {
    let parent = match geteuid().is_root() {
        true => Some("/run".into()),
        false => std::env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty()),
    };
    parent.map(|parent| PathBuf::from(parent).join("pagemark"))
}

/// The version of the CRIU that was examined under these conditions. None if none is known, or the
/// file is not trustworthy.
pub(super) fn version(directory: &Path, conditions: &Conditions) -> Option<String> {
    let file = open_trusted(&path_in(&open_directory(directory).ok()?), libc::O_NONBLOCK).ok()?;
    let metadata = file.metadata().ok().filter(|metadata| metadata.is_file() && metadata.size() <= MAX_BYTES)?;
    let mut text = Vec::with_capacity(metadata.size() as usize);
    file.take(MAX_BYTES).read_to_end(&mut text).ok()?;
    let examined: Examination = serde_json::from_slice(&text).ok()?;
    (examined.conditions == *conditions).then_some(examined.version)
}

/// Keeps the result of an examination that was begun under these conditions.
pub(super) fn keep(directory: &Path, conditions: Conditions, version: &str) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let directory = open_directory(directory)?;
    let text = serde_json::to_vec(&Examination { conditions, version: version.into() })?;
    let mut file = tempfile::NamedTempFile::new_in(path_of(&directory))?;
    file.write_all(&text)?;
    file.persist(path_in(&directory))?;
    Ok(())
}

fn path_of(directory: &File) -> PathBuf {
    proc::own_path(&format!("fd/{}", directory.as_raw_fd()))
}

fn path_in(directory: &File) -> PathBuf {
    path_of(directory).join(FILE)
}

fn open_directory(path: &Path) -> io::Result<File> {
    open_trusted(path, libc::O_DIRECTORY)
}

/// Opens what this user owns and nobody else can write, but not through a symbolic link.
fn open_trusted(path: &Path, flags: i32) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(flags | libc::O_NOFOLLOW).open(path)?;
    let metadata = file.metadata()?;
    if metadata.uid() == geteuid().as_raw() && metadata.mode() & OTHERS_WRITE == 0 {
        Ok(file)
    } else {
        Err(io::ErrorKind::PermissionDenied.into())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;
    use crate::criu::Criu;

    /// A program that takes itself for CRIU, and a directory to keep results in.
    struct Subject {
        parent: tempfile::TempDir,
    }

    impl Subject {
        fn new() -> Subject {
            let subject = Subject { parent: tempfile::tempdir().unwrap() };
            subject.install("4.2");
            subject
        }

        fn install(&self, version: &str) {
            let starts = self.parent.path().join("starts");
            let text = format!("#!/bin/sh\necho >> {}\necho Version: {version}\n", starts.display());
            pagemark_testing::executable(&self.program(), text.as_bytes());
        }

        fn program(&self) -> PathBuf {
            self.parent.path().join("criu")
        }

        fn directory(&self) -> PathBuf {
            self.parent.path().join("kept")
        }

        fn file(&self) -> PathBuf {
            self.directory().join(FILE)
        }

        /// Finds the program. Returns its version, and whether it was started.
        fn find(&self) -> (String, bool) {
            let starts = self.parent.path().join("starts");
            let _ = fs::remove_file(&starts);
            let criu = Criu::at_keeping(&self.program(), Some(&self.directory())).unwrap();
            (criu.version().into(), starts.exists())
        }
    }

    #[test]
    fn a_program_is_examined_once() {
        let subject = Subject::new();
        assert_eq!(subject.find(), ("4.2".into(), true));
        assert_eq!(subject.find(), ("4.2".into(), false));
        assert_eq!(fs::metadata(subject.directory()).unwrap().mode() & 0o777, 0o700);
        assert_eq!(fs::metadata(subject.file()).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn another_program_is_examined_anew() {
        let subject = Subject::new();
        subject.find();
        subject.install("4.3");
        assert_eq!(subject.find(), ("4.3".into(), true));
        assert_eq!(subject.find(), ("4.3".into(), false));
    }

    #[test]
    fn every_condition_counts() {
        let subject = Subject::new();
        let here = Conditions::now(&subject.program()).unwrap();
        assert_eq!(Conditions::now(&subject.program()).unwrap(), here);
        let others = [
            Conditions { pagemark_version: "0".into(), ..here.clone() },
            Conditions { program: "/other".into(), ..here.clone() },
            Conditions { file: [0; 7], ..here.clone() },
            Conditions { kernel_release: "4.18".into(), ..here.clone() },
            Conditions { boot_id: "other".into(), ..here.clone() },
            Conditions { effective_uid: here.effective_uid + 1, ..here.clone() },
            Conditions { capabilities: here.capabilities ^ 1, ..here.clone() },
            Conditions { seccomp: [2, 9], ..here.clone() },
            Conditions { namespaces: Vec::new(), ..here.clone() },
        ];
        for other in others {
            keep(&subject.directory(), other.clone(), "4.2").unwrap();
            assert_eq!(version(&subject.directory(), &here), None, "{other:?}");
        }
        keep(&subject.directory(), here.clone(), "4.2").unwrap();
        assert_eq!(version(&subject.directory(), &here).as_deref(), Some("4.2"));
    }

    #[test]
    fn what_others_could_have_written_is_not_read() {
        let subject = Subject::new();
        let set_mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
        subject.find();
        for mode in [0o620, 0o602] {
            set_mode(&subject.file(), mode);
            assert!(subject.find().1, "{mode:o}");
            // It was replaced by a file of this user alone.
            assert!(!subject.find().1, "{mode:o}");
        }
        for mode in [0o720, 0o702] {
            set_mode(&subject.directory(), mode);
            assert!(subject.find().1 && subject.find().1, "{mode:o}");
        }
        set_mode(&subject.directory(), 0o700);

        let elsewhere = subject.parent.path().join("elsewhere");
        fs::rename(subject.file(), &elsewhere).unwrap();
        symlink(&elsewhere, subject.file()).unwrap();
        assert!(subject.find().1);
        assert!(fs::symlink_metadata(subject.file()).unwrap().is_file());
        fs::write(subject.file(), "{").unwrap();
        assert!(subject.find().1);
        fs::remove_file(subject.file()).unwrap();
        // A FIFO would block.
        nix::unistd::mkfifo(&subject.file(), nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert!(subject.find().1);

        let elsewhere = subject.parent.path().join("another");
        fs::rename(subject.directory(), &elsewhere).unwrap();
        symlink(&elsewhere, subject.directory()).unwrap();
        assert!(subject.find().1 && subject.find().1);
    }

    #[test]
    fn what_others_own_is_not_read() {
        if !geteuid().is_root() {
            pagemark_testing::skip!("only root can give files away");
        }
        let subject = Subject::new();
        subject.find();
        chown(subject.file(), Some(1), None).unwrap();
        assert!(subject.find().1);
        assert!(!subject.find().1);
        chown(subject.directory(), Some(1), None).unwrap();
        assert!(subject.find().1 && subject.find().1);
    }

    #[test]
    fn a_program_is_found_where_nothing_can_be_kept() {
        let subject = Subject::new();
        fs::write(subject.directory(), "no directory").unwrap();
        assert!(subject.find().1 && subject.find().1);
        assert_eq!(Criu::at_keeping(&subject.program(), None).unwrap().version(), "4.2");
    }

    #[test]
    fn failures_and_old_versions_are_not_kept() {
        let subject = Subject::new();
        subject.install("4.1");
        Criu::at_keeping(&subject.program(), Some(&subject.directory())).unwrap_err();
        assert!(!subject.directory().exists());
        // A kept result that names a version too old is not used either.
        let conditions = Conditions::now(&subject.program()).unwrap();
        keep(&subject.directory(), conditions, "4.1").unwrap();
        Criu::at_keeping(&subject.program(), Some(&subject.directory())).unwrap_err();
    }
}
