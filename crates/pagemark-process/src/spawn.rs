//! Starts a program the way a shell would, but as the leader of a session of its own.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use nix::sys::signal::{SigSet, SigmaskHow, sigprocmask};

/// Starts `command` with this process's standard streams, environment and working directory, and with `signal_mask`
/// as its mask of blocked signals.
///
/// The program leads a session of its own: its state can be saved and restored without the terminal's session
/// that Pagemark belongs to. It has no controlling terminal, so whoever starts it passes the terminal's signals on.
///
/// # Errors
/// [`SpawnError`]; nothing was started then.
pub fn spawn(command: &[OsString], signal_mask: SigSet) -> Result<Child, SpawnError> {
    let (program, arguments) = command.split_first().ok_or(SpawnError::Empty)?;
    let mut command = Command::new(program);
    command.args(arguments);
    // SAFETY: between fork and exec this calls setsid and sigprocmask alone, which are async-signal-safe, and
    // neither allocates nor takes a lock.
    unsafe {
        command.pre_exec(move || {
            nix::unistd::setsid()?;
            sigprocmask(SigmaskHow::SIG_SETMASK, Some(&signal_mask), None)?;
            Ok(())
        });
    }
    command.spawn().map_err(|source| SpawnError::Start { program: program.clone(), source })
}

/// A program could not be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// There is no program in the command.
    #[error("there is no program to start")]
    Empty,
    /// The program is missing, is not executable, or the system lacks what a process needs.
    #[error("cannot start {}: {source}", program.display())]
    Start {
        /// The program as it was named.
        program: OsString,
        /// Why not.
        source: io::Error,
    },
}

impl SpawnError {
    /// The exit status that `env`, `nohup` and shells use for this: 127 where nothing was found, 126 where it could not
    /// be executed.
    pub fn exit_status(&self) -> u8 {
        match self {
            SpawnError::Start { source, .. } if source.kind() == io::ErrorKind::NotFound => 127,
            _ => 126,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use nix::sys::signal::Signal;
    use nix::unistd::{Pid, getsid};

    use super::*;

    fn words(command: &[&str]) -> Vec<OsString> {
        command.iter().map(OsString::from).collect()
    }

    #[test]
    fn the_program_leads_its_own_session_with_the_mask_that_was_asked_for() {
        let mut mask = SigSet::empty();
        mask.add(Signal::SIGUSR2);
        let mut child = spawn(&words(&["sleep", "60"]), mask).expect("sleep exists");
        let pid = child.id() as i32;
        let session = getsid(Some(Pid::from_raw(pid)));
        let status = fs::read_to_string(format!("/proc/{pid}/status"));
        child.kill().expect("it runs");
        child.wait().expect("it is ours");
        assert_eq!(session, Ok(Pid::from_raw(pid)));
        let blocked = status.expect("it runs").lines().find_map(|line| line.strip_prefix("SigBlk:").map(str::to_owned));
        let bits = u64::from_str_radix(blocked.expect("Linux says it").trim(), 16).expect("hexadecimal");
        assert_eq!(bits, 1 << (Signal::SIGUSR2 as u64 - 1));
    }

    #[test]
    fn exit_statuses_are_those_of_a_shell() {
        let none = SigSet::empty();
        assert_eq!(spawn(&[], none).map(drop).map_err(|error| error.exit_status()), Err(126));
        let missing = spawn(&words(&["/no/such/program"]), none).expect_err("there is none");
        assert_eq!(missing.exit_status(), 127);
        assert_eq!(missing.to_string(), "cannot start /no/such/program: No such file or directory (os error 2)");
        let directory = spawn(&words(&["/"]), none).expect_err("not a program");
        assert_eq!(directory.exit_status(), 126);
    }
}
