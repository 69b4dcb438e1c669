//! `pagemark restore`: brings a program back.

use std::process::ExitCode;

use clap::Args;
use nix::errno::Errno;
use nix::sys::prctl::set_child_subreaper;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use pagemark_process::restore::{RestoreOptions, Restored, restore};
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::output::print_json;
use crate::place::{Place, Reference, only_job, read};
use crate::signals::Signals;
use crate::text::{self, clean};

/// Bring a program back as it was at a checkpoint
///
/// The program goes on in this terminal; signals and the exit status are passed on as with `pagemark run`. Files that
/// it had open for writing hold again what they held then; what they hold now is kept under a name that is told.
#[derive(Args, Debug)]
pub struct Restore {
    #[command(flatten)]
    place: Place,
    /// The checkpoint's number [default: the newest]
    #[arg(long, value_name = "N")]
    checkpoint: Option<u64>,
    /// Let the program run before its memory is there; pages come as it touches them
    #[arg(long)]
    lazy: bool,
    /// Go on with the client connections, which must have been kept in the checkpoint
    #[arg(long)]
    keep_connections: bool,
    /// Return at once; the program goes on by itself, without this terminal
    #[arg(long)]
    detach: bool,
    /// Say nothing but errors
    #[arg(long, short)]
    quiet: bool,
    /// One JSON document on stdout, once the program runs; needs --detach
    #[arg(long, requires = "detach")]
    json: bool,
    /// The job, or one checkpoint of it; not needed where there is only one job
    #[arg(value_name = "JOB[@N]")]
    job: Option<Reference>,
}

#[derive(Serialize)]
struct Document<'a> {
    job: &'a str,
    sequence: u64,
    pid: i32,
    files: Vec<File>,
}

#[derive(Serialize)]
struct File {
    path: String,
    /// Where what it held before is now.
    set_aside: Option<String>,
}

impl Restore {
    pub fn run(self) -> Outcome {
        let repository = self.place.open()?;
        let mut reference = match &self.job {
            Some(reference) => reference.clone(),
            None => Reference { job: only_job(&repository)?, sequence: None },
        };
        if self.checkpoint.is_some() && reference.sequence.is_some() && self.checkpoint != reference.sequence {
            return Err(Failure::usage("two different checkpoints are named").help("either JOB@N or --checkpoint N"));
        }
        reference.sequence = self.checkpoint.or(reference.sequence);
        let checkpoint = read(&repository, &reference)?;
        let manifest = &checkpoint.manifest;
        let name = format!("{}@{}", manifest.job, manifest.sequence);

        // The program becomes a child of this process, so that its exit status can be had.
        let signals = if self.detach {
            None
        } else {
            set_child_subreaper(true).map_err(|error| Failure::new("cannot become the program's parent", error))?;
            Some(Signals::hold_for_target()?)
        };
        let options =
            RestoreOptions { lazy: self.lazy, keep_connections: self.keep_connections, detached: self.detach };
        if !self.quiet && !self.json {
            eprintln!("pagemark: restoring {name} from {}", text::ago(manifest.taken_unix_us));
        }
        let restored = restore(&checkpoint, &options).map_err(|error| {
            Failure::new(format!("cannot restore {name}"), error)
                .help("nothing of the checkpoint is lost; `pagemark log` lists others")
        })?;
        let files = files(&restored);
        if self.json {
            return print_json(&Document {
                job: &manifest.job,
                sequence: manifest.sequence,
                pid: restored.root_pid,
                files,
            });
        }
        if !self.quiet {
            for file in &files {
                match &file.set_aside {
                    Some(aside) => {
                        eprintln!("pagemark: {} put back; what it held is in {}", clean(&file.path), clean(aside))
                    }
                    None => eprintln!("pagemark: {} put back", clean(&file.path)),
                }
            }
            eprintln!("pagemark: {name} runs as process {}", restored.root_pid);
        }
        match signals {
            None => Ok(ExitCode::SUCCESS),
            Some(signals) => {
                let pid = Pid::from_raw(restored.root_pid);
                signals.pass_on_to(pid)?;
                wait(pid)
            }
        }
    }
}

fn files(restored: &Restored) -> Vec<File> {
    restored
        .files_put_back
        .iter()
        .map(|file| File {
            path: file.path.display().to_string(),
            set_aside: file.set_aside.as_ref().map(|aside| aside.display().to_string()),
        })
        .collect()
}

/// Waits until the program exits, and gives its status as a shell would.
fn wait(root: Pid) -> Outcome {
    loop {
        // Other processes of the tree whose parents have exited are ours to bury too.
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) if pid == root => return Ok(ExitCode::from(code as u8)),
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == root => return Ok(ExitCode::from(128 + signal as u8)),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(Failure::new("the program's exit status is not known", error)),
        }
    }
}
