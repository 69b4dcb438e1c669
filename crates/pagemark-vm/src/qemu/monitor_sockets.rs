//! The monitor sockets of a QEMU that runs, by its command line.

use std::path::PathBuf;

use pagemark_linux::proc;

use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::command_line::monitor_paths;

/// The sockets on which the QEMU with this process id serves its monitor (QMP), as its command line
/// has them, in its order. Each serves one client at a time, so one may be in use.
///
/// ```no_run
/// use pagemark::Mechanism;
/// use pagemark_vm::{VmTarget, monitor_sockets};
///
/// for socket in monitor_sockets(4321)? {
///     if let Ok(machine) = VmTarget::attach(&socket, Mechanism::PagemapScan) {
///         assert_eq!(machine.pid(), 4321);
///     }
/// }
/// # Ok::<(), pagemark_vm::Error>(())
/// ```
///
/// # Errors
/// [`ErrorKind::Gone`] if there is no such process, [`ErrorKind::Monitor`] if its command line
/// names no such socket, [`ErrorKind::System`].
pub fn monitor_sockets(pid: i32) -> Result<Vec<PathBuf>> {
    let failed = |operation: &'static str| {
        move |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => Error::about(ErrorKind::Gone, Object::Process(pid), "does not exist"),
            _ => Error::of(ErrorKind::System, operation, Object::Process(pid), error),
        }
    };
    let arguments = proc::arguments(pid).map_err(failed("read the command line of"))?;
    let arguments: Vec<String> =
        arguments.into_iter().skip(1).map(|word| String::from_utf8_lossy(&word).into_owned()).collect();
    let directory = proc::working_directory(pid).map_err(failed("read the directory of"))?;
    let root = root_of(pid).map_err(failed("read the root directory of"))?;
    let place = |path: String| {
        let path = directory.join(path);
        match &root {
            Some(root) => root.join(path.strip_prefix("/").unwrap_or(&path)),
            None => path,
        }
    };
    let paths: Vec<PathBuf> = monitor_paths(&arguments).into_iter().map(place).collect();
    if paths.is_empty() {
        let reason = "has no monitor socket on its command line";
        let error = Error::about(ErrorKind::Monitor, Object::Process(pid), reason);
        return Err(error.help("start QEMU with `-qmp unix:PATH,server=on,wait=off`, or name the socket"));
    }
    Ok(paths)
}

/// Where this process finds the root directory of another one, if it has another.
fn root_of(pid: i32) -> std::io::Result<Option<PathBuf>> {
    let mounts = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/mnt"));
    let has_own_mounts = mounts(&pid.to_string())? != mounts("self")?;
    let root = PathBuf::from(format!("/proc/{pid}/root"));
    let is_plain = !has_own_mounts && std::fs::read_link(&root)? == std::fs::read_link("/proc/self/root")?;
    Ok((!is_plain).then_some(root))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_sockets_of_a_process_are_found_and_others_named() {
        let directory = tempfile::tempdir().unwrap();
        // Any program with such a command line.
        let mut command = Command::new("sh");
        command.args(["-c", "read line", "-qmp", "unix:own.qmp,server=on,wait=off", "-qmp", "unix:/a,,b,server"]);
        let mut child = command.current_dir(directory.path()).stdin(Stdio::piped()).spawn().unwrap();
        pagemark_testing::wait_until_it_has(child.id(), "unix:/a,,b,server");
        let pid = child.id() as i32;
        let directory = directory.path().canonicalize().unwrap();
        assert_eq!(monitor_sockets(pid).unwrap(), [directory.join("own.qmp"), Path::new("/a,b").to_owned()]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(monitor_sockets(pid).unwrap_err().kind(), ErrorKind::Gone);
        let error = monitor_sockets(std::process::id() as i32).unwrap_err();
        assert!(error.kind() == ErrorKind::Monitor && error.advice().contains("-qmp unix:"), "{error}");
    }
}
