//! CRIU: saves and restores everything of a process but the memory that Pagemark keeps itself.
//!
//! It is used as it is, as a command. [`Criu::find`] looks for it in `$PAGEMARK_CRIU`, then for
//! `criu` in `PATH`, then for `pagemark/criu/criu` in the cache directory (`$XDG_CACHE_HOME`, else
//! `~/.cache`).

mod attach_deadlock;
pub(crate) mod connections;
pub(crate) mod descriptors;
pub mod dump;
mod dump_arguments;
mod dump_options;
mod examined;
mod guard;
pub(crate) mod held_files;
pub mod images;
mod injected;
mod interrupted_calls;
mod job_stops;
mod kernel_data;
mod late_sockets;
mod leave_code;
mod limits;
mod machines;
mod memory_copies;
pub(crate) mod mounted;
pub(crate) mod notes;
mod notify;
pub(crate) mod outside_files;
pub(crate) mod outside_sockets;
pub(crate) mod own_network;
pub(crate) mod owners;
mod record_changes;
mod records;
pub(crate) mod regular_files;
mod releases;
mod shortened;
mod smaps;
pub mod stdio;
mod stops;
pub(crate) mod submission;
mod sysv_ids;
pub(crate) mod sysv_memory;
pub(crate) mod sysv_semaphores;
pub(crate) mod timers;
mod traced_stops;
mod watch;
mod withhold;

use std::ffi::OsString;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::{Pid, User, geteuid};
use pagemark_linux::proc::Status;
use pagemark_trace::error::{Error, ErrorKind, Object};

use examined::Conditions;
use interrupted_calls::InterruptedCalls;
use kernel_data::KernelData;

pub use dump::{Dump, ProcessImage, SavedState, Timings};
pub use dump_options::DumpOptions;

/// The oldest version that is known to work with today's kernels.
pub const OLDEST_VERSION: (u32, u32) = (4, 2);

/// The capability to exceed resource limits, and to read those of other users' processes.
const CAP_SYS_RESOURCE: u32 = 24;

/// How many lines of CRIU's log an error shows.
const SHOWN_LINES: usize = 4;

/// A CRIU that can be started.
#[derive(Clone, Debug)]
pub struct Criu {
    path: PathBuf,
    version: String,
    kernel_data: KernelData,
    interrupted: InterruptedCalls,
}

/// What to do where there is no CRIU, or an old one.
const GET_CRIU: &str = "install CRIU 4.2 or later from Debian's unstable (`make criu` does it); checkpoints of memory \
                        alone work without it";

impl Criu {
    /// Looks for CRIU, and checks its version and that it works with this kernel. That takes 90 ms
    /// or more the first time after boot; the result is kept in `/run/pagemark`, for other users
    /// than root in `$XDG_RUNTIME_DIR/pagemark`, as long as the program, the kernel and the rights
    /// of this process are the same.
    ///
    /// # Errors
    /// [`ErrorKind::NoCriu`].
    pub fn find() -> Result<Criu, Error> {
        Criu::find_by(&Criu::at)
    }

    /// Like [`Criu::find`], but examines CRIU even if a result is kept.
    ///
    /// # Errors
    /// [`ErrorKind::NoCriu`].
    pub fn find_anew() -> Result<Criu, Error> {
        Criu::find_by(&Criu::examine)
    }

    fn find_by(at: &dyn Fn(&Path) -> Result<Criu, Error>) -> Result<Criu, Error> {
        if let Some(path) = std::env::var_os("PAGEMARK_CRIU").filter(|path| !path.is_empty()) {
            return at(Path::new(&path));
        }
        // An old CRIU in PATH does not hide a newer one in the cache, but its error is the more useful one.
        let in_path = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
            .map(|directory| directory.join("criu"))
            .find(|path| is_executable(path));
        let caches = cache_directories().map(|directory| directory.join("pagemark/criu/criu"));
        let cache = caches.iter().find(|path| is_executable(path)).unwrap_or(&caches[0]).clone();
        match in_path.map(|path| at(&path)) {
            Some(Err(_)) if is_executable(&cache) => at(&cache),
            Some(result) => result,
            None if is_executable(&cache) => at(&cache),
            None => {
                let reason = format!("CRIU was not found in $PAGEMARK_CRIU, in PATH or in {}", cache.display());
                Err(Error::about(ErrorKind::NoCriu, Object::None, reason).help(GET_CRIU))
            }
        }
    }

    /// Checks a given CRIU, as [`Criu::find`] does.
    ///
    /// # Errors
    /// [`ErrorKind::NoCriu`].
    pub fn at(path: &Path) -> Result<Criu, Error> {
        Criu::at_keeping(path, examined::directory().as_deref())
    }

    /// Checks a given CRIU, unless `directory` has the result of an examination.
    fn at_keeping(path: &Path, directory: Option<&Path>) -> Result<Criu, Error> {
        let (Some(directory), Ok(conditions)) = (directory, Conditions::now(path)) else {
            return Criu::examine(path);
        };
        if let Some(version) = examined::version(directory, &conditions)
            && parse_version(&version).is_some_and(|numbers| numbers >= OLDEST_VERSION)
            && is_executable(path)
        {
            return Ok(Criu::new(path, &version));
        }
        let criu = Criu::examine(path)?;
        // Where the result cannot be kept, CRIU is examined again the next time.
        let _ = examined::keep(directory, conditions, criu.version());
        Ok(criu)
    }

    fn new(path: &Path, version: &str) -> Criu {
        Criu {
            path: path.into(),
            version: version.into(),
            kernel_data: KernelData::default(),
            interrupted: InterruptedCalls::default(),
        }
    }

    /// Starts CRIU, for its version and for what it needs of this kernel.
    fn examine(path: &Path) -> Result<Criu, Error> {
        let unusable = |reason: String| {
            Error::about(ErrorKind::NoCriu, Object::File(path.into()), "does not work here")
                .caused_by(reason)
                .help(format!("{}checkpoints of memory alone work without it", lacked_rights()))
        };
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
            let reason = format!("is CRIU {version}, and 4.2 or later is needed");
            return Err(Error::about(ErrorKind::NoCriu, Object::File(path.into()), reason).help(GET_CRIU));
        }
        // This also makes CRIU probe the kernel and keep what it found, so that no dump has to.
        let mut check = Command::new(path);
        check.args(["check", "--feature", "uffd"]).stdin(Stdio::null());
        let check = output_of_group(&mut check).map_err(|error| unusable(error.to_string()))?;
        if !check.status.success() {
            let text = [check.stdout, check.stderr].concat();
            let killed = check.status.signal().map(|_| format!("`{} check`: {}", path.display(), check.status));
            return Err(unusable(killed.unwrap_or_else(|| last_errors(&String::from_utf8_lossy(&text)))));
        }
        Ok(Criu::new(path, version))
    }

    /// The command.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its version, as `4.2.1`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// A command that reads no configuration of the machine and logs into `log` of the images
    /// directory.
    pub(crate) fn command(&self, action: &str, images: &Path, log: &str) -> Command {
        let mut command = Command::new(&self.path);
        command.arg(action).arg("--no-default-config").arg("-D").arg(images).args(["-o", log, "-v1"]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }
}

/// What CRIU cannot do here for want of a capability, and what would enable it; none if nothing is
/// missing. Root in a container often lacks CAP_SYS_RESOURCE.
pub fn missing_capability() -> Option<&'static str> {
    (!has_capability(CAP_SYS_RESOURCE)).then_some(
        "CAP_SYS_RESOURCE is missing: processes of other users that have seccomp filters can't be saved, processes \
         with higher limits or a lower oom_score_adj than pagemark's can't be restored, and CRIU can't be exempted \
         from the out-of-memory killer; give pagemark that capability (containers: --cap-add SYS_RESOURCE)",
    )
}

/// The capabilities without which CRIU does not work at all, as far as this process lacks them, and
/// what would enable them.
fn lacked_rights() -> String {
    const NEEDED: [(u32, &str); 2] = [(19, "SYS_PTRACE"), (21, "SYS_ADMIN")];
    let lacked = NEEDED.iter().filter(|(number, _)| !has_capability(*number));
    lacked.map(|(_, name)| format!("CAP_{name} is missing (containers: --cap-add {name}); ")).collect()
}

/// True if this process has the capability.
fn has_capability(number: u32) -> bool {
    Status::of_this_process().is_ok_and(|status| status.capabilities >> number & 1 == 1)
}

/// Like `output`, for a CRIU that may be killed: while it examines the kernel, it has children that
/// stop themselves, until CRIU kills them, and that have its standard streams open. They are killed
/// with it. The command writes less than a pipe holds.
fn output_of_group(command: &mut Command) -> std::io::Result<Output> {
    let child = command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let group = Pid::from_raw(child.id() as i32);
    // The group has this id at least until its leader is waited for.
    let ended = loop {
        match waitid(Id::Pid(group), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) {
            Err(nix::errno::Errno::EINTR) => {}
            ended => break ended?,
        }
    };
    if matches!(ended, WaitStatus::Signaled(..)) {
        let _ = killpg(group, Signal::SIGKILL);
    }
    child.wait_with_output()
}

fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

/// The cache directory that the environment names, and the one in the home that the user database
/// names: services have no HOME, and `sudo` may keep that of another user.
fn cache_directories() -> [PathBuf; 2] {
    let set = |name: &str| std::env::var_os(name).filter(|value: &OsString| !value.is_empty()).map(PathBuf::from);
    if let Some(cache) = set("XDG_CACHE_HOME") {
        return [cache.clone(), cache];
    }
    let below = |home: PathBuf| home.join(".cache");
    let registered = User::from_uid(geteuid()).ok().flatten().map(|user| below(user.dir));
    let registered = registered.unwrap_or_else(|| "/var/cache".into());
    let named = set("HOME").map(below);
    [named.unwrap_or_else(|| registered.clone()), registered]
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
        let refused = |path: &Path| {
            let error = Criu::at(path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoCriu, "{error}");
            error.to_string()
        };
        assert!(refused(&old).contains("is CRIU 3.17.1"), "{}", refused(&old));
        let broken = script("broken", "echo no such library >&2; exit 127");
        assert!(refused(&broken).contains("no such library"));
        let failing =
            script("failing", "[ $1 = --version ] && echo Version: 4.2 && exit; echo 'Error (a.c:1): no root'; exit 1");
        assert!(refused(&failing).contains("does not work here: no root;"));
        refused(Path::new("/nonexistent"));
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
