//! What a person sees when something did not work.

use std::fmt::Display;
use std::process::ExitCode;

/// What failed, on what, why, and what to do about it.
#[derive(Debug)]
pub struct Failure {
    message: String,
    help: Option<String>,
    exit_status: u8,
}

/// What every subcommand gives back: the status to exit with.
pub type Outcome = Result<ExitCode, Failure>;

impl Failure {
    /// `what` failed for `reason`; exit status 1.
    pub fn new(what: impl Display, reason: impl Display) -> Self {
        Failure { message: format!("{what}: {reason}"), help: None, exit_status: 1 }
    }

    /// A failure that says everything itself.
    pub fn plain(message: impl Display) -> Self {
        Failure { message: message.to_string(), help: None, exit_status: 1 }
    }

    /// The command line asks for something that cannot be; exit status 2.
    pub fn usage(message: impl Display) -> Self {
        Failure { message: message.to_string(), help: None, exit_status: 2 }
    }

    /// Adds what to do.
    pub fn help(mut self, help: impl Display) -> Self {
        self.help = Some(help.to_string());
        self
    }

    /// Exits with another status than 1.
    pub fn status(mut self, exit_status: u8) -> Self {
        self.exit_status = exit_status;
        self
    }

    /// Says it on stderr and gives the status to exit with.
    pub fn report(self) -> ExitCode {
        eprintln!("pagemark: {}", self.message);
        if let Some(help) = self.help {
            eprintln!("help: {help}");
        }
        ExitCode::from(self.exit_status)
    }
}
