//! Checks whether a process can be attached to, with an error that says why not and what to do.

use std::collections::HashMap;
use std::io;
use std::os::unix::ffi::OsStringExt;

use pagemark_linux::proc::{self, Process, Stat, Status, system, tree};
use pagemark_linux::ptrace;

use crate::error::{Error, ErrorKind, Object, Result};
use crate::namespace_ids;

/// The error of a system call that an attach needs.
pub fn failed(operation: &'static str, pid: i32) -> impl FnOnce(io::Error) -> Error {
    move |source| match source.kind() {
        _ if proc::is_gone(&source) => Error::no_process(pid),
        io::ErrorKind::PermissionDenied => not_permitted(pid),
        _ => Error::system(operation, Object::Process(pid))(source),
    }
}

/// The process that has an id now.
///
/// # Errors
/// Those of [`failed`]: there is none.
pub fn find(pid: i32) -> Result<Process> {
    Process::find(pid).map_err(failed("find", pid))
}

/// The process uses userfaultfd itself, as `found` shows.
pub fn uses_userfaultfd(pid: i32, found: &str) -> Error {
    let reason = format!("uses userfaultfd itself ({found})");
    Error::about(ErrorKind::UsesUserfaultfd, Object::command(pid), reason).help("use --mechanism compare")
}

/// Checks that no process of the tree below `root_pid` has a first thread that has exited before
/// the others.
///
/// # Errors
/// [`ErrorKind::FirstThreadExited`]
pub fn check_first_threads(root_pid: i32) -> Result<()> {
    // The root is gone if its members cannot be listed, which others report.
    let members = tree::members(root_pid).unwrap_or_default();
    match members.iter().find(|member| proc::has_exited_first(member.process.pid)) {
        Some(member) => Err(Error::first_thread_exited(member.process.pid)),
        None => Ok(()),
    }
}

/// Thread `tid` of process `pid` does not stop.
pub fn does_not_stop(pid: i32, tid: i32) -> Error {
    let activity = proc::activity(tid).unwrap_or_else(|| "state ?".into());
    let tracer = Status::read(tid).map_or(0, |status| status.tracer_pid);
    let is_other = tracer != 0 && !Stat::read(tracer).is_ok_and(|stat| is_ours(&stat));
    let traced = if is_other { format!(", traced by {}", Object::command(tracer)) } else { String::new() };
    let limit_s = ptrace::STOP_LIMIT.as_secs();
    let reason = format!("did not stop within {limit_s} s: it is in {activity}{traced}");
    Error::about(ErrorKind::DoesNotStop, Object::Thread { tid, pid }, reason)
        .help("it may wait for a disk, a file server or a child made by vfork: try again later")
}

/// Tracing the process is not permitted.
pub fn not_permitted(pid: i32) -> Error {
    // Nobody may trace a process that exits. That takes a while if it has a virtual machine.
    if !proc::executes_program(pid) {
        return Error::no_process(pid);
    }
    let owner = Status::read(pid).map(|status| status.effective_uid);
    // SAFETY: the call has no arguments and cannot fail.
    let own_uid = unsafe { libc::geteuid() };
    let scope = system::setting("kernel/yama/ptrace_scope").unwrap_or_default();
    let (reason, help) = match (owner, scope.as_str()) {
        (Ok(owner), _) if owner != own_uid => {
            (format!("it belongs to user {owner}"), "run pagemark as that user or as root")
        }
        (_, "1") => (
            "Yama lets a process be traced only by the process that started it (kernel.yama.ptrace_scope is 1)".into(),
            "start it with pagemark run, or run pagemark as root",
        ),
        (_, "2") => ("Yama lets only root trace (kernel.yama.ptrace_scope is 2)".into(), "run pagemark as root"),
        (_, "3") => (
            "Yama forbids all tracing until the next boot (kernel.yama.ptrace_scope is 3)".into(),
            "set kernel.yama.ptrace_scope to a lower value before that boot",
        ),
        _ => ("it has more privileges, or has made itself not dumpable".into(), "run pagemark with CAP_SYS_PTRACE"),
    };
    let reason = format!("may not be traced: {reason}");
    Error::about(ErrorKind::NotPermitted, Object::command(pid), reason).help(help)
}

/// The process that has the id, which can be attached to.
///
/// # Errors
/// [`ErrorKind::Gone`], [`ErrorKind::NotPermitted`] and others that say why it cannot.
pub fn check(pid: i32) -> Result<Process> {
    let own = std::process::id() as i32;
    if pid == own {
        return Err(Error::about(ErrorKind::OwnProcess, Object::Process(pid), "is pagemark itself"));
    }
    if pid == 1 {
        let reason = "holds the system together and can't be stopped";
        return Err(
            Error::about(ErrorKind::FirstProcess, Object::Process(pid), reason).help("attach to one of its services")
        );
    }
    if pid <= 0 {
        return Err(Error::no_process(pid));
    }
    let stat = Stat::read(pid).map_err(failed("read the state of", pid))?;
    if let Some(process) = process_of(pid)
        && process != pid
    {
        let reason = format!("is a thread of process {process}");
        return Err(Error::about(ErrorKind::Thread, Object::Process(pid), reason).help(format!("attach to {process}")));
    }
    if stat.is_kernel_thread {
        let reason = "is a thread of the kernel, which has no memory of its own";
        return Err(Error::about(ErrorKind::KernelThread, Object::Command(pid, stat.command), reason));
    }
    let Some(thread) = proc::live_thread(pid) else {
        let reason = "has exited and waits only for its parent to notice";
        return Err(Error::about(ErrorKind::Zombie, Object::Command(pid, stat.command), reason));
    };
    if is_ancestor(pid, own) {
        let reason = "has started pagemark, and to stop it would stop pagemark with it";
        return Err(Error::about(ErrorKind::Ancestor, Object::Command(pid, stat.command), reason)
            .help("run pagemark from elsewhere"));
    }
    proc::open_memory(thread).map_err(failed("open the memory of", pid))?;
    if proc::is_32_bit(thread).map_err(failed("read the program of", pid))? {
        return Err(Error::about(ErrorKind::Is32Bit, Object::Command(pid, stat.command), "is a 32-bit program")
            .help("only 64-bit ones can be attached to"));
    }
    Ok(Process { pid, start_ticks: stat.start_ticks })
}

/// Checks that a process is not traced. Every mechanism that stops it needs that.
///
/// # Errors
/// [`ErrorKind::Traced`].
pub fn check_untraced(pid: i32) -> Result<()> {
    let status = Status::read(pid).map_err(failed("read the status of", pid))?;
    match status.tracer_pid {
        0 => Ok(()),
        thread => {
            let tracer = process_of(thread).unwrap_or(thread);
            let reason = format!("is traced by {}", Object::command(tracer));
            Err(Error::about(ErrorKind::Traced, Object::Process(pid), reason).help("detach that first"))
        }
    }
}

/// Checks that no other Pagemark tracks a process of the tree below `root_pid`: each would count
/// the writes that the other's checkpoints need, and stop the processes while the other saves them.
/// An unprivileged caller does not see those of other users.
///
/// # Errors
/// [`ErrorKind::Watched`].
pub fn check_unwatched(root_pid: i32) -> Result<()> {
    let members = tree::members(root_pid).map_err(failed("list the processes of", root_pid))?;
    let members: Vec<i32> = members.into_iter().map(|member| member.process.pid).collect();
    watched(&members).map_or(Ok(()), Err)
}

/// The error that another Pagemark tracks one of these processes, if one does.
pub fn watched(members: &[i32]) -> Option<Error> {
    // What a tracker keeps open, and nothing else does for long.
    let link_of = |thread: i32| proc::path(thread, "pagemap").into_os_string().into_vec();
    let links: HashMap<Vec<u8>, i32> =
        members.iter().filter_map(|&pid| Some((link_of(proc::live_thread(pid)?), pid))).collect();
    let own = std::process::id() as i32;
    for other in tree::processes().ok()?.into_iter().filter(|&other| other != own && !members.contains(&other)) {
        let descriptors = proc::descriptors(other).unwrap_or_default();
        let Some(&pid) = descriptors.iter().find_map(|found| links.get(&found.link)) else { continue };
        // What a Pagemark that has died leaves to repair the processes ends soon, and a child of this
        // process has its descriptors until it closes them. CRIU, also by itself, traces what it saves.
        let is_helper = Stat::read(other).is_ok_and(|stat| is_ours(&stat));
        let traces = Status::read(pid).is_ok_and(|status| process_of(status.tracer_pid) == Some(other));
        if !is_helper && !traces {
            let reason = format!("is tracked by another Pagemark already: {}", Object::command(other));
            return Some(Error::about(ErrorKind::Watched, Object::command(pid), reason).help(
                "restore from the checkpoints that it takes, or end it first: after Ctrl-C of `attach`, the program \
                           keeps running",
            ));
        }
    }
    None
}

/// True for a helper of Pagemark, and for a child of this process.
fn is_ours(stat: &Stat) -> bool {
    stat.command.starts_with("pagemark-") || stat.parent_pid == std::process::id() as i32
}

/// Checks that a process has no userfaultfd open.
///
/// # Errors
/// [`ErrorKind::UsesUserfaultfd`].
pub fn check_userfaultfd(pid: i32) -> Result<()> {
    let descriptors =
        proc::descriptors(proc::live_thread(pid).unwrap_or(pid)).map_err(failed("list the descriptors of", pid))?;
    if let Some(found) = descriptors.iter().find(|found| found.link == b"anon_inode:[userfaultfd]") {
        return Err(uses_userfaultfd(pid, &format!("descriptor {}", found.number)));
    }
    Ok(())
}

/// Checks that a process is in our namespace of process ids, or the first process of a container,
/// as saving its whole state needs.
///
/// # Errors
/// [`ErrorKind::PidNamespace`].
pub fn check_namespace(pid: i32) -> Result<()> {
    // This reports a process that is gone, or that we may not trace, as such.
    check(pid)?;
    let thread = proc::live_thread(pid).ok_or_else(|| Error::no_process(pid))?;
    let status = Status::read(pid).map_err(failed("read the status of", pid))?;
    match proc::is_in_own_pid_namespace(thread) {
        Ok(true) => Ok(()),
        Ok(false) if status.is_first_of_container() => Ok(()),
        Ok(false) => {
            let reason = "is in a container, which can be saved whole from outside, but not in part";
            let whole = match namespace_ids::first_process(pid) {
                Some(first) => format!("name process {first}, the first of the container, "),
                None => String::new(),
            };
            Err(Error::about(ErrorKind::PidNamespace, Object::command(pid), reason).help(format!(
                "{whole}run pagemark inside (`nsenter --target {pid} --all` leads there), or save memory alone with \
                 --memory-only"
            )))
        }
        Err(error) => Err(failed("read the namespaces of", pid)(error)),
    }
}

/// The process that a thread belongs to.
fn process_of(thread: i32) -> Option<i32> {
    Status::read(thread).ok().map(|status| status.process_id).filter(|&process| process > 0)
}

fn is_ancestor(pid: i32, of: i32) -> bool {
    let mut current = of;
    // The limit ends the search if the chain of parents changes meanwhile.
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

    fn kind(checked: Result<Process>) -> Option<ErrorKind> {
        checked.err().map(|error| error.kind())
    }

    #[test]
    fn each_reason_against_attaching_has_its_error() {
        let own = std::process::id() as i32;
        assert_eq!(kind(check(own)), Some(ErrorKind::OwnProcess));
        assert_eq!(kind(check(1)), Some(ErrorKind::FirstProcess));
        assert_eq!(kind(check(0)), Some(ErrorKind::Gone));
        assert_eq!(kind(check(-5)), Some(ErrorKind::Gone));
        assert_eq!(kind(check(i32::MAX)), Some(ErrorKind::Gone));
        let parent = Stat::read(own).unwrap().parent_pid;
        assert!(parent == 1 || kind(check(parent)) == Some(ErrorKind::Ancestor));
        match Stat::read(2) {
            Ok(stat) if stat.is_kernel_thread => assert!(kind(check(2)) == Some(ErrorKind::KernelThread)),
            _ => pagemark_testing::skipped("process 2 is no thread of the kernel here"),
        }
        let thread = std::thread::spawn(|| {
            // SAFETY: the call has no arguments and can't fail.
            let thread = unsafe { libc::gettid() };
            assert_eq!(kind(check(thread)), Some(ErrorKind::Thread));
        });
        thread.join().unwrap();
    }

    #[test]
    fn a_zombie_and_a_traced_process_are_refused() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = child.id() as i32;
        check_untraced(pid).unwrap();
        pagemark_linux::ptrace::seize(pid, 0).unwrap();
        check(pid).unwrap();
        let traced = check_untraced(pid).unwrap_err();
        assert_eq!(traced.kind(), ErrorKind::Traced);
        assert!(traced.to_string().contains(&format!("is traced by process {} (", std::process::id())), "{traced}");
        child.kill().unwrap();
        while !Stat::read(pid).unwrap().is_zombie() {
            std::thread::yield_now();
        }
        assert_eq!(kind(check(pid)), Some(ErrorKind::Zombie));
        child.wait().unwrap();
        assert_eq!(kind(check(pid)), Some(ErrorKind::Gone));
    }
}
