//! CRIU: saves and restores everything of a process but the memory that Pagemark keeps itself.
//!
//! It is used as it is, as a command. [`Criu::find`] looks for it in `$PAGEMARK_CRIU`, then for `criu` in `PATH`, then for
//! `pagemark/criu/criu` in the cache directory (`$XDG_CACHE_HOME`, else `~/.cache`).

pub mod dump;
pub mod images;
mod notify;
pub(crate) mod timers;
mod withhold;

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub use dump::{Dump, DumpOptions, ProcessImage, SavedState, Timings};
pub use images::ImageError;

/// The oldest version that is known to work with today's kernels.
pub const OLDEST_VERSION: (u32, u32) = (4, 2);

/// How many lines of CRIU's log an error shows.
const SHOWN_LINES: usize = 4;

/// A CRIU that can be started.
#[derive(Clone, Debug)]
pub struct Criu {
    path: PathBuf,
    version: String,
}

/// CRIU could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum CriuError {
    /// There is none.
    #[error(
        "CRIU was not found in $PAGEMARK_CRIU, in PATH or in {cache}: install CRIU 4.2 or later from Debian's unstable \
         (`make criu` does it); checkpoints of memory alone work without it"
    )]
    Missing {
        /// The last place looked at.
        cache: PathBuf,
    },
    /// Its version does not work with kernels of today.
    #[error(
        "{path} is CRIU {found}, and 4.2 or later is needed: install it from Debian's unstable (`make criu` does it); \
         checkpoints of memory alone work without it"
    )]
    TooOld {
        /// The command.
        path: PathBuf,
        /// Its version.
        found: String,
    },
    /// It does not run here.
    #[error("{path} does not work here: {reason}; checkpoints of memory alone work without it")]
    Unusable {
        /// The command.
        path: PathBuf,
        /// What it said.
        reason: String,
    },
    /// The process is gone.
    #[error("process {pid} is gone")]
    Gone {
        /// Its id.
        pid: i32,
    },
    /// CRIU refused or failed.
    #[error("CRIU could not {what}: {reason}")]
    Failed {
        /// What it was to do, and on what.
        what: String,
        /// CRIU's own words.
        reason: String,
    },
    /// CRIU does not answer. It is left alone, since to end it might harm the process.
    #[error(
        "CRIU (process {criu_pid}) did not {what} within {limit_s} s; it is left alone, and lets the process run on when it is done"
    )]
    NoAnswer {
        /// What was waited for.
        what: String,
        /// The process that does not answer.
        criu_pid: u32,
        /// The limit, seconds.
        limit_s: u64,
    },
    /// An image is not as it should be.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// What was being done, on what.
        what: String,
        /// Why it failed.
        source: std::io::Error,
    },
}

impl CriuError {
    /// Wraps an I/O error with what was being done.
    pub(crate) fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> CriuError {
        let what = what.into();
        move |source| CriuError::Io { what, source }
    }
}

impl Criu {
    /// Looks for CRIU, and checks its version and that it works with this kernel. Takes about 50 ms; keep the result.
    ///
    /// # Errors
    /// [`CriuError::Missing`], [`CriuError::TooOld`], [`CriuError::Unusable`].
    pub fn find() -> Result<Criu, CriuError> {
        if let Some(path) = std::env::var_os("PAGEMARK_CRIU").filter(|path| !path.is_empty()) {
            return Criu::at(Path::new(&path));
        }
        // An old CRIU in PATH does not hide a newer one in the cache, but its error is the more useful one.
        let in_path = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
            .map(|directory| directory.join("criu"))
            .find(|path| is_executable(path));
        let cache = cache_directory().join("pagemark/criu/criu");
        match in_path.map(|path| Criu::at(&path)) {
            Some(Err(_)) if is_executable(&cache) => Criu::at(&cache),
            Some(result) => result,
            None if is_executable(&cache) => Criu::at(&cache),
            None => Err(CriuError::Missing { cache }),
        }
    }

    /// Checks a given CRIU.
    ///
    /// # Errors
    /// [`CriuError::TooOld`], [`CriuError::Unusable`].
    pub fn at(path: &Path) -> Result<Criu, CriuError> {
        let unusable = |reason: String| CriuError::Unusable { path: path.into(), reason };
        let output = Command::new(path)
            .arg("--version")
            .stdin(Stdio::null())
            .output()
            .map_err(|error| unusable(error.to_string()))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text.lines().find_map(|line| line.strip_prefix("Version:")).map(str::trim).unwrap_or_default();
        let numbers = parse_version(version).ok_or_else(|| {
            unusable(format!("it gives no version ({})", String::from_utf8_lossy(&output.stderr).trim()))
        })?;
        if numbers < OLDEST_VERSION {
            return Err(CriuError::TooOld { path: path.into(), found: version.into() });
        }
        // This also makes CRIU probe the kernel and keep what it found, so that no dump has to.
        let check = Command::new(path)
            .args(["check", "--feature", "uffd"])
            .stdin(Stdio::null())
            .output()
            .map_err(|error| unusable(error.to_string()))?;
        if !check.status.success() {
            let text = [check.stdout, check.stderr].concat();
            return Err(unusable(last_errors(&String::from_utf8_lossy(&text))));
        }
        Ok(Criu { path: path.into(), version: version.into() })
    }

    /// The command.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version, as `4.2.1`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// A command that reads no configuration of the machine and logs into `log` of the images directory.
    pub(crate) fn command(&self, action: &str, images: &Path, log: &str) -> Command {
        let mut command = Command::new(&self.path);
        command.arg(action).arg("--no-default-config").arg("-D").arg(images).args(["-o", log, "-v1"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

fn cache_directory() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value: &OsString| !value.is_empty()).map(PathBuf::from);
    set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache"))).unwrap_or_else(|| "/var/cache".into())
}

/// Major and minor number of a version like `4.2`, `4.2.1` or `4.2-rc1`.
fn parse_version(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    Some((numbers.next()?.ok()?, numbers.next().and_then(Result::ok).unwrap_or(0)))
}

/// CRIU's own error lines from one of its logs.
pub(crate) fn errors_in_log(log: &Path) -> String {
    match std::fs::read(log) {
        Ok(bytes) => last_errors(&String::from_utf8_lossy(&bytes)),
        Err(error) => format!("no log is left: {error}"),
    }
}

/// The last error lines of a log, without where in CRIU's source they come from.
fn last_errors(log: &str) -> String {
    let errors: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("Error (") || line.contains("looks bad") || line.contains("isn't"))
        // Said on every machine where the limit can't be raised, and harmless.
        .filter(|line| !line.contains("RLIMIT_NOFILE"))
        .map(|line| line.split_once("): ").map_or(line, |(_, text)| text).trim())
        .collect();
    if errors.is_empty() {
        return "it left no error message".into();
    }
    // The first ones name the cause, the last ones only what failed because of it.
    errors[..errors.len().min(SHOWN_LINES)].join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!(parse_version("4.2.1"), Some((4, 2)));
        assert_eq!(parse_version("3.17"), Some((3, 17)));
        assert_eq!(parse_version("4.3-rc1"), Some((4, 3)));
        assert_eq!(parse_version("5"), Some((5, 0)));
        assert_eq!(parse_version("unknown"), None);
        assert_eq!(parse_version(""), None);
    }

    #[test]
    fn an_old_or_broken_criu_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let script = |name: &str, text: &str| {
            let path = directory.path().join(name);
            pagemark_testing::executable(&path, format!("#!/bin/sh\n{text}\n").as_bytes());
            path
        };
        let old = script("old", "echo Version: 3.17.1");
        assert!(matches!(Criu::at(&old), Err(CriuError::TooOld { found, .. }) if found == "3.17.1"));
        let broken = script("broken", "echo no such library >&2; exit 127");
        assert!(
            matches!(Criu::at(&broken), Err(CriuError::Unusable { reason, .. }) if reason.contains("no such library"))
        );
        let failing =
            script("failing", "[ $1 = --version ] && echo Version: 4.2 && exit; echo 'Error (a.c:1): no root'; exit 1");
        assert!(matches!(Criu::at(&failing), Err(CriuError::Unusable { reason, .. }) if reason == "no root"));
        assert!(matches!(Criu::at(Path::new("/nonexistent")), Err(CriuError::Unusable { .. })));
    }

    #[test]
    fn errors_are_taken_from_a_log() {
        let log = "Error (criu/util.c:1): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted\n\
                   (00.1) Warn  (x.c:1): something\n\
                   Error (criu/tty.c:42): tty: Found dangling tty\n";
        assert_eq!(last_errors(log), "tty: Found dangling tty");
        assert_eq!(last_errors(""), "it left no error message");
    }
}
