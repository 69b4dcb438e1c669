//! `pagemark run`: starts a program and keeps it checkpointed.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, ExitCode};
use std::sync::mpsc;

use clap::Args;
use nix::unistd::Pid;
use pagemark_process::spawn::spawn;

use crate::failure::{Failure, Outcome};
use crate::place::{Place, job_name};
use crate::report::{self, Report};
use crate::signals::{Signals, announce_exit};
use crate::take::{How, Series, When, cannot_here, last_word};

/// Start a program and keep it checkpointed
///
/// The program has this terminal, environment and directory, gets the signals that are sent to Pagemark, and its exit
/// status becomes Pagemark's. Pagemark's own lines go to stderr. If a checkpoint fails, the program runs on.
#[derive(Args, Debug)]
pub struct Run {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    how: How,
    #[command(flatten)]
    when: When,
    /// A line of JSON on stderr for each checkpoint
    #[arg(long)]
    json: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    command: Vec<OsString>,
}

impl Run {
    pub fn run(self) -> Outcome {
        let program = self.command.first().map(Path::new).unwrap_or(Path::new(""));
        let job = self.how.job.clone().unwrap_or_else(|| job_name(program));
        // Whatever would make every checkpoint fail is said before the program starts.
        let repository = self.place.open_or_create()?;
        let options = self.how.options(job.clone());
        options.check().map_err(cannot_here)?;

        let signals = Signals::hold_for_target()?;
        let mut child = spawn(&self.command, signals.before())
            .map_err(|error| Failure::plain(&error).status(error.exit_status()))?;
        let pid = Pid::from_raw(child.id() as i32);
        let (sender, events) = mpsc::channel();
        announce_exit(pid, sender)?;
        signals.pass_on_to(pid)?;

        let mut report = Report::choose(self.when.quiet, self.json, report::stderr());
        let series = Series {
            pid,
            repository,
            options,
            every: self.when.every,
            policy: self.when.keep.policy(),
            report: &mut report,
        };
        let (_, done) = series.take(&events);
        let status = exit_status(&mut child);
        report.say(&last_word(&job, &done));
        status
    }
}

/// The program's exit status, as a shell gives it: 128 + n for a signal n.
fn exit_status(child: &mut Child) -> Outcome {
    use std::os::unix::process::ExitStatusExt;
    let status = child.wait().map_err(|error| Failure::new("the program's exit status is not known", error))?;
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    Ok(ExitCode::from(code as u8))
}
