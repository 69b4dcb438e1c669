//! Who can be attached to, and a clear answer to who can't.

use std::io;

use pagemark::TrackError;

use crate::freezer::FreezeError;
use crate::inject::InjectError;
use crate::proc::{self, Stat, Status};

/// A process can't be attached to. It is as it was.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// There is none.
    #[error("there is no process {pid}")]
    NoSuchProcess {
        /// The process id.
        pid: i32,
    },
    /// It is a thread of another process.
    #[error("{pid} is a thread of process {process}; attach to {process}")]
    Thread {
        /// The thread id.
        pid: i32,
        /// The process to which the thread belongs.
        process: i32,
    },
    /// It has no memory of its own.
    #[error("process {pid} ({command}) is a thread of the kernel, which has no memory of its own")]
    KernelThread {
        /// The process id.
        pid: i32,
        /// Its name.
        command: String,
    },
    /// It has already exited.
    #[error("process {pid} ({command}) has exited and waits only for its parent to notice")]
    Zombie {
        /// The process id.
        pid: i32,
        /// Its name.
        command: String,
    },
    /// It is the first process.
    #[error("process 1 holds the system together and can't be stopped; attach to one of its services")]
    Init,
    /// It is this process.
    #[error("process {pid} is pagemark itself")]
    Own {
        /// The process id.
        pid: i32,
    },
    /// It waits for this process.
    #[error(
        "process {pid} ({command}) has started pagemark, and to stop it would stop pagemark with it; run pagemark from elsewhere"
    )]
    Ancestor {
        /// The process id.
        pid: i32,
        /// Its name.
        command: String,
    },
    /// It is not ours to see.
    #[error("process {pid} ({command}) may not be traced: {hint}")]
    NotPermitted {
        /// The process id.
        pid: i32,
        /// Its name.
        command: String,
        /// What stands in the way and what would allow it.
        hint: String,
    },
    /// It is a 32-bit program.
    #[error("process {pid} ({command}) is a 32-bit program; only 64-bit ones can be attached to")]
    Is32Bit {
        /// The process id.
        pid: i32,
        /// Its name.
        command: String,
    },
    /// A debugger has it.
    #[error("process {pid} is traced by process {tracer} ({tracer_command}); detach that first")]
    Traced {
        /// The process id.
        pid: i32,
        /// The process that traces it.
        tracer: i32,
        /// Its name.
        tracer_command: String,
    },
    /// It uses userfaultfd itself.
    #[error("process {pid} ({command}) uses userfaultfd itself ({found}); use --mechanism compare")]
    UsesUserfaultfd {
        /// The process id.
        pid: i32,
        /// Its name.
        command: String,
        /// By what that is known.
        found: String,
    },
    /// Its process ids are another kind than ours, so that CRIU's images name other ids than we know it by.
    #[error(
        "process {pid} ({command}) has process ids of its own, as in a container, so it can't be saved whole from outside: run \
         pagemark inside (`nsenter --target {pid} --all` leads there), or save memory alone with --memory-only"
    )]
    PidNamespace {
        /// The process id.
        pid: i32,
        /// Its name.
        command: String,
    },
    /// The userfaultfd could not be made in it.
    #[error("cannot track process {pid}: {source}{}", hint(source))]
    Inject {
        /// The process id.
        pid: i32,
        /// Why not.
        source: InjectError,
    },
    /// It could not be stopped to read its mappings.
    #[error("cannot track process {pid}: {source}")]
    Stop {
        /// The process id.
        pid: i32,
        /// Why not.
        source: FreezeError,
    },
    /// It can't be tracked.
    #[error("cannot track process {pid}: {source}")]
    Track {
        /// The process id.
        pid: i32,
        /// Why not.
        source: TrackError,
    },
    /// A file of it under `/proc` can't be read.
    #[error("process {pid}: {operation}: {source}")]
    System {
        /// The process id.
        pid: i32,
        /// What was done.
        operation: String,
        /// Why it failed.
        source: io::Error,
    },
}

fn hint(error: &InjectError) -> &'static str {
    match error {
        InjectError::Seccomp => "; run pagemark as root, or use --mechanism compare",
        InjectError::Is32Bit | InjectError::NoInstruction | InjectError::Dispatch => "; use --mechanism compare",
        InjectError::DoesNotStop => {
            "; it waits in the kernel, for a disk, a file server or a child made by vfork: try again later"
        }
        InjectError::Refused(error) => match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => {
                "; it has as many files open as it may: raise its limit (prlimit --nofile)"
            }
            Some(libc::ENOSYS | libc::EINVAL) => "; Linux 6.7 or later is needed, or --mechanism compare",
            _ => "; use --mechanism compare",
        },
        _ => "",
    }
}

impl AttachError {
    /// True if the process is gone, or as good as gone.
    pub fn is_gone(&self) -> bool {
        matches!(self, AttachError::NoSuchProcess { .. } | AttachError::Zombie { .. })
    }

    pub(crate) fn system(pid: i32, operation: &str, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => AttachError::NoSuchProcess { pid },
            io::ErrorKind::PermissionDenied => not_permitted(pid),
            _ if source.raw_os_error() == Some(libc::ESRCH) => AttachError::NoSuchProcess { pid },
            _ => AttachError::System { pid, operation: operation.to_owned(), source },
        }
    }

    pub(crate) fn uses_userfaultfd(pid: i32, found: String) -> Self {
        AttachError::UsesUserfaultfd { pid, command: command(pid), found }
    }

    pub(crate) fn inject(pid: i32, source: InjectError) -> Self {
        match source {
            InjectError::Gone => AttachError::NoSuchProcess { pid },
            InjectError::NotAllowed => not_permitted(pid),
            source => AttachError::Inject { pid, source },
        }
    }
}

fn command(pid: i32) -> String {
    Stat::read(pid).map(|stat| stat.command).unwrap_or_default()
}

fn not_permitted(pid: i32) -> AttachError {
    let owner = Status::read(pid).map(|status| status.effective_uid);
    // SAFETY: the call has no arguments and can't fail.
    let we = unsafe { libc::geteuid() };
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let hint = match (owner, scope.trim()) {
        (Ok(owner), _) if owner != we => format!("it belongs to user {owner}; run pagemark as that user or as root"),
        (_, "1") => "Yama lets a process be traced only by the one that started it (kernel.yama.ptrace_scope is 1); start it with \
                     pagemark run, or run pagemark as root"
            .to_owned(),
        (_, "2") => "Yama lets only root trace (kernel.yama.ptrace_scope is 2); run pagemark as root".to_owned(),
        (_, "3") => "Yama forbids all tracing until the next boot (kernel.yama.ptrace_scope is 3)".to_owned(),
        _ => "it has more privileges, or has made itself not dumpable; run pagemark with CAP_SYS_PTRACE".to_owned(),
    };
    AttachError::NotPermitted { pid, command: command(pid), hint }
}

/// Makes sure that a process can be attached to.
///
/// # Errors
/// [`AttachError`] says why it can't.
pub fn check(pid: i32) -> Result<(), AttachError> {
    let own = std::process::id() as i32;
    if pid == own {
        return Err(AttachError::Own { pid });
    }
    if pid == 1 {
        return Err(AttachError::Init);
    }
    if pid <= 0 {
        return Err(AttachError::NoSuchProcess { pid });
    }
    let stat = Stat::read(pid).map_err(|error| AttachError::system(pid, "reading its state", error))?;
    if let Some(process) = process_of(pid)
        && process != pid
    {
        return Err(AttachError::Thread { pid, process });
    }
    if stat.is_kernel_thread {
        return Err(AttachError::KernelThread { pid, command: stat.command });
    }
    let Some(thread) = proc::live_thread(pid) else {
        return Err(AttachError::Zombie { pid, command: stat.command });
    };
    if is_ancestor(pid, own) {
        return Err(AttachError::Ancestor { pid, command: stat.command });
    }
    std::fs::File::open(format!("/proc/{thread}/mem"))
        .map_err(|error| AttachError::system(pid, "opening its memory", error))?;
    if proc::is_32_bit(thread).map_err(|error| AttachError::system(pid, "reading its program", error))? {
        return Err(AttachError::Is32Bit { pid, command: stat.command });
    }
    Ok(())
}

/// Makes sure that nothing traces a process, as everything that stops it needs.
///
/// # Errors
/// [`AttachError::Traced`].
pub fn check_untraced(pid: i32) -> Result<(), AttachError> {
    let status = Status::read(pid).map_err(|error| AttachError::system(pid, "reading its status", error))?;
    match status.tracer_pid {
        0 => Ok(()),
        thread => {
            let tracer = process_of(thread).unwrap_or(thread);
            Err(AttachError::Traced { pid, tracer, tracer_command: command(tracer) })
        }
    }
}

/// Makes sure that a process has no userfaultfd open.
///
/// # Errors
/// [`AttachError::UsesUserfaultfd`].
pub fn check_userfaultfd(pid: i32) -> Result<(), AttachError> {
    let descriptors = proc::descriptors(proc::live_thread(pid).unwrap_or(pid))
        .map_err(|error| AttachError::system(pid, "listing its descriptors", error))?;
    if let Some((number, _)) = descriptors.iter().find(|(_, link)| link == b"anon_inode:[userfaultfd]") {
        return Err(AttachError::uses_userfaultfd(pid, format!("descriptor {number}")));
    }
    Ok(())
}

/// Makes sure that a process lives in our namespace of process ids, as everything that saves its whole state needs.
///
/// # Errors
/// [`AttachError::PidNamespace`].
pub fn check_namespace(pid: i32) -> Result<(), AttachError> {
    // One that is gone, or not ours to see, is told as such by `check`.
    check(pid)?;
    let of = |process: &str| {
        std::fs::read_link(format!("/proc/{process}/ns/pid"))
            .map_err(|error| AttachError::system(pid, "reading its namespaces", error))
    };
    let thread = proc::live_thread(pid).ok_or(AttachError::NoSuchProcess { pid })?;
    if of(&thread.to_string())? == of("self")? {
        Ok(())
    } else {
        Err(AttachError::PidNamespace { pid, command: command(pid) })
    }
}

/// The process to which a thread belongs.
fn process_of(thread: i32) -> Option<i32> {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok())
}

fn is_ancestor(pid: i32, of: i32) -> bool {
    let mut current = of;
    // A chain of parents that changes meanwhile can't be longer than this.
    for _ in 0..1024 {
        match Stat::read(current) {
            Ok(stat) if stat.parent_pid == pid => return true,
            Ok(stat) if stat.parent_pid > 1 => current = stat.parent_pid,
            _ => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn what_cannot_be_attached_to_is_told_apart() {
        let own = std::process::id() as i32;
        assert!(matches!(check(own), Err(AttachError::Own { .. })));
        assert!(matches!(check(1), Err(AttachError::Init)));
        assert!(matches!(check(0), Err(AttachError::NoSuchProcess { .. })));
        assert!(matches!(check(-5), Err(AttachError::NoSuchProcess { .. })));
        assert!(matches!(check(i32::MAX), Err(AttachError::NoSuchProcess { .. })));
        let parent = Stat::read(own).unwrap().parent_pid;
        assert!(parent == 1 || matches!(check(parent), Err(AttachError::Ancestor { .. })));
        match Stat::read(2) {
            Ok(stat) if stat.is_kernel_thread => assert!(matches!(check(2), Err(AttachError::KernelThread { .. }))),
            _ => pagemark_testing::skipped("process 2 is no thread of the kernel here"),
        }
        let thread = std::thread::spawn(|| {
            // SAFETY: the call has no arguments and can't fail.
            let thread = unsafe { libc::gettid() };
            assert!(matches!(check(thread), Err(AttachError::Thread { .. })));
        });
        thread.join().unwrap();
    }

    #[test]
    fn a_zombie_and_a_traced_process_are_told() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = child.id() as i32;
        check_untraced(pid).unwrap();
        crate::ptrace::seize(pid, 0).unwrap();
        check(pid).unwrap();
        assert!(
            matches!(check_untraced(pid), Err(AttachError::Traced { tracer, .. }) if tracer == std::process::id() as i32)
        );
        child.kill().unwrap();
        while !Stat::read(pid).unwrap().is_zombie() {
            std::thread::yield_now();
        }
        assert!(matches!(check(pid), Err(AttachError::Zombie { .. })));
        child.wait().unwrap();
        assert!(matches!(check(pid), Err(AttachError::NoSuchProcess { .. })));
    }
}
