//! Failures of the command as messages and exit statuses.

use pagemark_report::message;
use std::error::Error;
use std::fmt::Display;
use std::process::ExitCode;

/// An operation that failed, its object, the reason, and what to do.
#[derive(Debug)]
pub struct Failure {
    message: String,
    help: Option<String>,
    exit_status: u8,
}

/// Result of a subcommand: the exit status.
pub type Outcome = Result<ExitCode, Failure>;

/// What an error, or an error that caused it, advises.
fn advice<'error>(error: &'error (dyn Error + 'static)) -> Option<&'error str> {
    let mut errors = std::iter::successors(Some(error), |&error| error.source());
    errors.find_map(|error| {
        let of_core = error.downcast_ref().map(pagemark::Error::advice);
        let of_process = error.downcast_ref().map(pagemark_process::Error::advice);
        let of_machine = error.downcast_ref().map(pagemark_vm::Error::advice);
        of_core.or(of_process).or(of_machine).filter(|advice| !advice.is_empty())
    })
}

/// Help by the kind of an error that advises nothing. `pagemark doctor` is named for what it
/// examines alone.
fn help_by_kind(error: &(dyn Error + 'static)) -> Option<&'static str> {
    use pagemark_process::ErrorKind::{Gone, KernelThread, OwnProcess, Thread, Zombie};
    let mut errors = std::iter::successors(Some(error), |&error| error.source());
    errors.find_map(|error| {
        let of_core = error.downcast_ref().map(pagemark::Error::kind);
        let of_process = error.downcast_ref().map(pagemark_process::Error::kind);
        match (of_core, of_process) {
            (Some(pagemark::ErrorKind::Unavailable), _) => {
                Some("`pagemark doctor` lists the mechanisms that work here, and what the others lack")
            }
            (Some(pagemark::ErrorKind::NoRoom), _) => {
                Some("`pagemark prune` removes checkpoints; or use a repository on another disk")
            }
            (Some(pagemark::ErrorKind::DamagedRecord), _) => Some("`pagemark verify` lists what is damaged"),
            (Some(pagemark::ErrorKind::Storage), _) => Some("examine the repository's directory, or use another"),
            (_, Some(pagemark_process::ErrorKind::NoCriu)) => {
                Some("--memory-only saves memory and registers without CRIU")
            }
            (_, Some(Gone | Zombie | Thread | KernelThread | OwnProcess)) => Some(PROCESSES),
            _ => None,
        }
    })
}

/// Help where the id is not that of a process that can be saved.
pub const PROCESSES: &str = "`ps -e` lists the processes; the first column is the id";

impl Failure {
    /// `operation` failed for `reason`; exit status 1.
    pub fn new(operation: impl Display, reason: impl Display) -> Self {
        Failure { message: format!("{operation}: {reason}"), help: None, exit_status: 1 }
    }

    /// A failure without a separate reason; exit status 1.
    pub fn plain(message: impl Display) -> Self {
        Failure { message: message.to_string(), help: None, exit_status: 1 }
    }

    /// A wrong command line; exit status 2.
    pub fn usage(message: impl Display) -> Self {
        Failure { message: message.to_string(), help: None, exit_status: 2 }
    }

    /// No checkpoint can be taken on this machine with these options.
    pub fn no_checkpoints_here(error: impl Display) -> Self {
        Failure::new("checkpoints can't be taken here as asked for", error)
            .help("`pagemark doctor` shows what works; --memory-only saves memory and registers alone, without CRIU")
    }

    /// A process could not be attached to, or a single checkpoint of it not be taken.
    pub fn checkpointing(pid: i32, error: impl Error + 'static) -> Self {
        Failure::of(format!("cannot checkpoint process {pid}"), error)
    }

    /// `operation` failed by `error`; exit status 1. The help is what the error advises, and
    /// otherwise follows from its kind.
    pub fn of(operation: impl Display, error: impl Error + 'static) -> Self {
        let text = error.to_string();
        if let Some(advice) = advice(&error) {
            let reason = text.strip_suffix(&format!("; {advice}")).unwrap_or(&text);
            return Failure::new(operation, reason).help(advice);
        }
        match help_by_kind(&error) {
            Some(help) => Failure::new(operation, text).help(help),
            None => Failure::new(operation, text),
        }
    }

    /// An operation that the text of `error` names has failed; exit status 1.
    pub fn cannot(error: pagemark_vm::Error) -> Self {
        let text = error.to_string();
        match error.advice() {
            "" => Failure::plain(format!("cannot {text}")),
            advice => {
                let reason = text.strip_suffix(&format!("; {advice}")).unwrap_or(&text);
                Failure::plain(format!("cannot {reason}")).help(advice)
            }
        }
    }

    /// Adds a line that says what to do.
    pub fn help(mut self, help: impl Display) -> Self {
        self.help = Some(help.to_string());
        self
    }

    /// Replaces the exit status.
    pub fn status(mut self, exit_status: u8) -> Self {
        self.exit_status = exit_status;
        self
    }

    /// Prints the message to stderr. Returns the exit status.
    pub fn report(self) -> ExitCode {
        message!("pagemark: {}", self.message);
        if let Some(help) = self.help {
            message!("help: {help}");
        }
        ExitCode::from(self.exit_status)
    }
}

#[cfg(test)]
mod tests {
    use pagemark::Mechanism;

    use super::*;

    #[test]
    fn doctor_is_named_for_what_it_examines_alone() {
        let gone = pagemark_trace::attach::check(i32::MAX).expect_err("there is no such process");
        assert_eq!(Failure::checkpointing(i32::MAX, gone).help.as_deref(), Some(PROCESSES));
        let unavailable = Mechanism::Uffd.process_tracking().expect_err("it tracks own memory alone");
        let help = Failure::checkpointing(7, unavailable).help.expect("there is help");
        assert!(help.contains("`pagemark doctor`"), "{help}");
    }

    #[test]
    fn the_advice_of_an_error_is_the_help() {
        let advised = pagemark_trace::attach::check(1).expect_err("it is the first process");
        let advice = advised.advice().to_owned();
        let failure = Failure::checkpointing(1, advised);
        assert!(!advice.is_empty() && !failure.message.contains(&advice), "{}", failure.message);
        assert_eq!(failure.help, Some(advice));
    }
}
