//! Starts a program as a shell does, but in a session of its own.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, signal, sigprocmask};
use pagemark_trace::error::{Error, ErrorKind, Object, Result};

use crate::terminal::{Leader, Terminal};

/// The signals that users, terminals and schedulers send to end or to notify a program. SIGALRM and
/// SIGCHLD, which CRIU uses itself, are not among them: a child inherits the mask of its parent.
pub const FROM_OUTSIDE: [Signal; 7] = [
    Signal::SIGHUP,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGTERM,
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGWINCH,
];

/// In a process that was just forked: ignores the signals by which service managers, terminals and
/// users ask a process to end, and exempts it from the out-of-memory killer where that is
/// permitted. CRIU would end at once, whatever code of its own a target executes. Makes only system
/// calls.
pub(crate) fn outlive_requests_to_end() -> std::io::Result<()> {
    for number in FROM_OUTSIDE.into_iter().chain([Signal::SIGXCPU]) {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { signal(number, SigHandler::SigIgn)? };
    }
    // SAFETY: the path ends with a zero byte, the buffer lives through the call, and the descriptor that
    // is closed is the one that was just opened.
    unsafe {
        let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file >= 0 {
            // Not permitted without CAP_SYS_RESOURCE, which `pagemark doctor` reports.
            libc::write(file, c"-1000".as_ptr().cast(), 5);
            libc::close(file);
        }
    }
    Ok(())
}

/// Variables of the environment, and their values.
pub type Variables = [(&'static str, OsString)];

/// Starts `command` with this process's standard streams and working directory, with its
/// environment and `variables` in addition, and with `signal_mask` as its mask of blocked signals.
///
/// The program leads a session of its own, so its state can be saved and restored without the
/// terminal's session that Pagemark belongs to. It has no controlling terminal, so the caller has
/// to forward the terminal's signals; [`spawn_on`] gives it one.
///
/// # Errors
/// [`ErrorKind::NotFound`] and others; no program was started.
pub fn spawn(command: &[OsString], variables: &Variables, signal_mask: SigSet) -> Result<Child> {
    let mut command = to_command(command, variables)?;
    // SAFETY: between fork and exec this calls setsid and sigprocmask alone, which are
    // async-signal-safe, and neither allocates nor takes a lock.
    unsafe {
        command.pre_exec(move || {
            nix::unistd::setsid()?;
            sigprocmask(SigmaskHow::SIG_SETMASK, Some(&signal_mask), None)?;
            Ok(())
        });
    }
    command.spawn().map_err(not_started(&command))
}

/// Like [`spawn`], with the pseudo-terminal `terminal` in place of the terminal of this process.
/// The program is in a session whose controlling terminal that is, and leads its process group.
///
/// Returns a child that ends with the program and has its exit status, 128 + n for a signal n; and
/// the id of the program.
///
/// # Errors
/// Those of [`spawn`].
pub fn spawn_on(
    terminal: &mut Terminal,
    command: &[OsString],
    variables: &Variables,
    signal_mask: SigSet,
) -> Result<(Child, i32)> {
    let mut command = to_command(command, variables)?;
    let failed = |source| Error::system("start a program on a pseudo-terminal", Object::None)(source);
    let (reports, for_leader) = io::pipe().map_err(failed)?;
    let session = terminal.session(for_leader.as_raw_fd());
    let session = session.ok_or_else(|| failed(io::Error::other("another program has the pseudo-terminal")))?;
    let [input, output, errors] = terminal.streams().map_err(failed)?;
    input.map(|stream| command.stdin(stream));
    output.map(|stream| command.stdout(stream));
    errors.map(|stream| command.stderr(stream));
    // SAFETY: only system calls are made between fork and exec, which is allowed in a child of a
    // process with threads.
    unsafe {
        command.pre_exec(move || {
            session.begin()?;
            sigprocmask(SigmaskHow::SIG_SETMASK, Some(&signal_mask), None)?;
            Ok(())
        });
    }
    let child = command.spawn().map_err(not_started(&command))?;
    // The command has copies of the program's end.
    drop((command, for_leader));
    terminal.is_given();
    let mut leader = Leader::new(child, File::from(std::os::fd::OwnedFd::from(reports)));
    let pid = leader.first_child().map_err(failed)?;
    Ok((leader.into_child(), pid))
}

fn to_command(words: &[OsString], variables: &Variables) -> Result<Command> {
    let (program, arguments) = words
        .split_first()
        .ok_or_else(|| Error::about(ErrorKind::System, Object::None, "there is no program to start"))?;
    let mut command = Command::new(program);
    command.args(arguments).envs(variables.iter().cloned());
    Ok(command)
}

/// For `map_err`: a program could not be started.
fn not_started(command: &Command) -> impl FnOnce(io::Error) -> Error {
    let program = Object::File(command.get_program().into());
    move |source| {
        let is_missing = source.kind() == io::ErrorKind::NotFound;
        let kind = if is_missing { ErrorKind::NotFound } else { ErrorKind::System };
        Error::of(kind, "cannot start", program, source)
    }
}

/// The exit status that `env`, `nohup` and shells use if a program cannot be started: 127 if it was
/// not found, 126 if it could not be executed.
pub fn exit_status(error: &Error) -> u8 {
    if error.kind() == ErrorKind::NotFound { 127 } else { 126 }
}

#[cfg(test)]
mod tests {
    use nix::sys::signal::Signal;
    use nix::unistd::{Pid, getsid};
    use pagemark_linux::proc::Status;

    use super::*;

    fn words(command: &[&str]) -> Vec<OsString> {
        command.iter().map(OsString::from).collect()
    }

    #[test]
    fn the_program_leads_its_own_session_with_the_requested_mask() {
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGUSR2);
        let mut child = spawn(&words(&["sleep", "60"]), &[], mask).expect("sleep exists");
        let pid = child.id() as i32;
        let session = getsid(Some(Pid::from_raw(pid)));
        let status = Status::read(pid);
        child.kill().expect("it runs");
        child.wait().expect("it is ours");
        assert_eq!(session, Ok(Pid::from_raw(pid)));
        assert_eq!(status.expect("it runs").blocked_signals, 1 << (Signal::SIGUSR2 as u64 - 1));
    }

    #[test]
    fn exit_statuses_are_those_of_a_shell() {
        let none = SigSet::empty();
        assert_eq!(spawn(&[], &[], none).map(drop).map_err(|error| exit_status(&error)).unwrap_err(), 126);
        let missing = spawn(&words(&["/no/such/program"]), &[], none).expect_err("there is none");
        assert_eq!(exit_status(&missing), 127);
        assert_eq!(missing.to_string(), "cannot start /no/such/program: No such file or directory (os error 2)");
        let directory = spawn(&words(&["/"]), &[], none).expect_err("not a program");
        assert_eq!(exit_status(&directory), 126);
    }
}
