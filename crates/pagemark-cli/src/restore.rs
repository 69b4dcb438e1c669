//! `pagemark restore`: brings a program back.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, ValueEnum};
use nix::errno::Errno;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use pagemark::repository::{Checkpoint, Manifest, TargetKind};
use pagemark_process::ErrorKind;
use pagemark_process::files::{FileAction, PutBack};
use pagemark_process::restore::{self as library, Network, RestoreEvent, RestoreFailure, Restored, Stage};
use pagemark_process::saver::SignalGate;
use pagemark_report::escape::printable;
use pagemark_report::message;
use pagemark_report::text;
use serde::Serialize;

use crate::asides::{AsidesOptions, report_interrupted};
use crate::failure::{Failure, Outcome};
use crate::live::Progress;
use crate::output::print_json;
use crate::reference::{Reference, only_job, read_checkpoint};
use crate::repository::RepositoryOptions;
use crate::run::exit_code;
use crate::signals::Signals;
use crate::vm;

/// Bring a program back as it was at a checkpoint
///
/// The program continues in this terminal; signals and the exit status are passed on as with
/// `pagemark run`. Files that it had open for writing get the content that they had then; copies of
/// their present content are kept, as is reported (see `pagemark asides`).
/// Before set-uid files are changed, or files outside the directories in which the program worked,
/// they are listed and Pagemark asks.
#[derive(Args, Debug)]
pub struct Restore {
    #[command(flatten)]
    repository: RepositoryOptions,
    /// The checkpoint's number [default: the newest]
    #[arg(long, value_name = "N")]
    checkpoint: Option<u64>,
    /// Let the program run before its memory is there: pages that it touches are delivered at once,
    /// the rest one after the other. Until all are delivered, the program ends if Pagemark ends
    #[arg(long)]
    lazy: bool,
    /// Return at once (with --lazy, once all memory is there); the program continues by itself,
    /// without this terminal
    #[arg(long)]
    detach: bool,
    /// Change set-uid files, and files outside the program's own directories, without asking
    #[arg(long, short)]
    yes: bool,
    /// End the restore if CRIU takes longer [default: 2m, and a second for each 8 MiB of memory]
    #[arg(long, value_name = "TIME", value_parser = text::parse_duration)]
    time_limit: Option<Duration>,
    /// The root directory of a container, or of another program with mounts of its own [default: as
    /// at the checkpoint]
    #[arg(long, value_name = "DIR")]
    root: Option<PathBuf>,
    /// The network of a container: the path of a network namespace, such as /run/netns/NAME, or
    /// `loopback` for a new one with the loopback interface alone [default: that, if the container
    /// had no other interfaces]
    #[arg(long, value_name = "PATH", value_parser = parse_network)]
    network: Option<Network>,
    /// Let a program that was started by `run --kvm` continue without its virtual machine
    #[arg(long)]
    without_kvm: bool,
    /// Control groups: `restore` puts processes back into them where they still exist, `ignore`
    /// leaves processes in the groups of this command
    #[arg(long, value_name = "MODE", default_value = "restore", value_enum)]
    cgroups: GroupMode,
    /// Say nothing but errors
    #[arg(long, short)]
    quiet: bool,
    /// One JSON document on stdout, once the program runs; needs --detach
    #[arg(long, requires = "detach")]
    json: bool,
    #[command(flatten)]
    asides: AsidesOptions,
    /// The job, or one checkpoint of it; not needed where there is only one job
    #[arg(value_name = "JOB[@N]")]
    job: Option<Reference>,
}

/// What becomes of the control groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum GroupMode {
    Restore,
    Ignore,
}

fn parse_network(text: &str) -> Result<Network, std::convert::Infallible> {
    Ok(if text == "loopback" { Network::LoopbackAlone } else { Network::At(text.into()) })
}

#[derive(Serialize)]
struct Document<'a> {
    job: &'a str,
    sequence: u64,
    /// The root process.
    pid: i32,
    /// All processes, the root first.
    pids: &'a [i32],
    files: Vec<File>,
    /// The connections that are closed, each as `ADDRESS to PEER`.
    closed_connections: &'a [String],
}

/// The closed connections that are listed; of others, only their number is.
const SHOWN_CONNECTIONS: usize = 5;

#[derive(Serialize)]
struct File {
    path: String,
    /// What was done to it.
    action: &'static str,
    /// Path of the content that it had before the restore.
    set_aside: Option<String>,
}

impl Restore {
    pub fn run(self) -> Outcome {
        let repository = self.repository.open()?;
        let mut reference = match &self.job {
            Some(reference) => reference.clone(),
            None => Reference { job: only_job(&repository)?, sequence: None },
        };
        if self.checkpoint.is_some() && reference.sequence.is_some() && self.checkpoint != reference.sequence {
            return Err(Failure::usage("two different checkpoints are named").help("either JOB@N or --checkpoint N"));
        }
        reference.sequence = self.checkpoint.or(reference.sequence);
        let checkpoint = read_checkpoint(&repository, &reference)?;
        if checkpoint.manifest.kind == TargetKind::VirtualMachine {
            if self.without_kvm {
                return Err(Failure::usage("--without-kvm is for programs that `run --kvm` has started")
                    .help("QEMU itself decides by its command line whether it uses KVM"));
            }
            return self.restore_machine(checkpoint);
        }
        if !self.yes {
            self.ask(&checkpoint)?;
        }
        let signals = match (self.detach, self.lazy) {
            (false, _) => Some(Signals::hold_for_target()?),
            // The program ends with this process until all of its memory is there, so this process must not be
            // interrupted.
            (true, true) => Some(Signals::hold_for_stop()?),
            (true, false) => None,
        };
        let restored = self.restore(&checkpoint, signals)?;
        if self.detach {
            return Ok(ExitCode::SUCCESS);
        }
        // A checkpoint that is held can't be pruned.
        drop(checkpoint);
        let status = wait(Pid::from_raw(restored.child));
        if let Some(relay) = restored.relay {
            // It copies what the program wrote last, and gives the terminal its mode again.
            let _ = wait(Pid::from_raw(relay));
        }
        status
    }

    /// Restores a virtual machine.
    fn restore_machine(&self, checkpoint: Checkpoint) -> Outcome {
        let (pid, status) = vm::restore(&checkpoint, self.lazy, self.detach, self.quiet)?;
        if self.json {
            let (job, sequence) = (checkpoint.manifest.job.as_str(), checkpoint.manifest.sequence);
            print_json(&Document { job, sequence, pid, pids: &[pid], files: Vec::new(), closed_connections: &[] })?;
        }
        Ok(status.map_or(ExitCode::SUCCESS, exit_code))
    }

    /// Sets what a container gets.
    fn in_container<'a>(&self, restore: library::Restore<'a>) -> library::Restore<'a> {
        let restore = restore.network(self.network.clone().unwrap_or_default());
        match &self.root {
            Some(root) => restore.root(root),
            None => restore,
        }
    }

    /// Lists the unusual files that the restore would change, and asks for consent.
    fn ask(&self, checkpoint: &Checkpoint) -> Result<(), Failure> {
        let name = format!("{}@{}", checkpoint.manifest.job, checkpoint.manifest.sequence);
        let restore = self.in_container(library::Restore::new(checkpoint));
        let files = restore.unusual_files().map_err(|failure| describe(&name, &failure))?;
        if files.is_empty() {
            return Ok(());
        }
        message!("pagemark: to restore {name}, these files are changed:");
        files.iter().for_each(|file| message!("  {}", printable(&file.to_string())));
        let refused = |reason| {
            Failure::plain(format!("{name} was not restored: {reason}"))
                .help("nothing was changed; --yes restores it without asking")
        };
        if !io::stdin().is_terminal() {
            return Err(refused("there is no terminal to ask for consent"));
        }
        // Whoever does not see the question cannot answer it.
        io::stderr()
            .write_all(b"Change them? Their present content is kept. [y/N] ")
            .map_err(|_| refused("stderr, which is to ask for consent, cannot be written"))?;
        let mut answer = String::new();
        let read = io::stdin().read_line(&mut answer);
        match (read, answer.trim().to_lowercase().as_str()) {
            (Ok(_), "y" | "yes") => Ok(()),
            _ => Err(refused("there was no consent")),
        }
    }

    /// Restores the processes, and reports on it. Returns when they need nothing more.
    fn restore(&self, checkpoint: &Checkpoint, signals: Option<Signals>) -> Result<Restored, Failure> {
        let manifest = &checkpoint.manifest;
        let name = format!("{}@{}", manifest.job, manifest.sequence);
        let asides = self.asides.path(&self.repository)?;
        if !self.quiet {
            report_interrupted(&asides);
        }
        let mut files = Vec::new();
        let mut progress = None;
        // The processes run by then: what fails is reported at the end.
        let (mut reported, mut signals) = (Ok(()), signals);
        let mut events = |event: RestoreEvent<'_>| match event {
            RestoreEvent::Preparing { memory } => {
                if !self.quiet {
                    let memory = text::bytes(memory.get());
                    message!("pagemark: restoring {name} from {} ({memory})", text::ago(manifest.taken_unix_us));
                }
                progress = (!self.lazy).then(|| Progress::new("reading"));
            }
            RestoreEvent::Staging { reason } => {
                let first = if self.lazy { "--lazy has no effect, and memory" } else { "memory" };
                message!("pagemark: {first} is written into temporary files first, because {reason}");
            }
            RestoreEvent::Reading { done, total } => {
                if let Some(progress) = &mut progress {
                    progress.at(done.get(), total.get(), text::bytes);
                }
            }
            RestoreEvent::FilePutBack(file) => files.push(file.clone()),
            RestoreEvent::AsidesNotDescribed(error) => {
                message!("pagemark: the asides of this restore are listed as those of an interrupted restore: {error}");
            }
            RestoreEvent::Running(restored) => {
                progress = None;
                reported = self.report_running(manifest, restored, std::mem::take(&mut files), signals.take());
                // Where the program has the terminal, it has all of it.
                progress = (self.lazy && self.detach).then(|| Progress::new("delivering"));
            }
            RestoreEvent::Delivering { done_pages, total_pages } => {
                if let Some(progress) = &mut progress {
                    progress.at(done_pages, total_pages, text::count);
                }
            }
        };
        let restore = library::Restore::new(checkpoint)
            .lazy(self.lazy)
            .detach(self.detach)
            .allow_unusual_files(true)
            .ignore_cgroups(self.cgroups == GroupMode::Ignore)
            .on_terminal(true)
            .without_machine(self.without_kvm)
            .asides_in(asides);
        let restore = match self.time_limit {
            Some(limit) => restore.time_limit(limit),
            None => restore,
        };
        let restore = self.in_container(restore);
        let restored = restore.run(&mut events).map_err(|failure| describe(&name, &failure));
        drop(progress);
        restored.and_then(|restored| reported.map(|()| restored))
    }

    /// Passes signals on to the processes from now on, and reports that they run.
    fn report_running(
        &self,
        manifest: &Manifest,
        restored: &Restored,
        files: Vec<PutBack>,
        signals: Option<Signals>,
    ) -> Result<(), Failure> {
        if let (Some(signals), false) = (signals, self.detach) {
            signals.pass_on_to(Pid::from_raw(restored.root_pid), SignalGate::new())?;
        }
        let (job, sequence) = (manifest.job.as_str(), manifest.sequence);
        if !self.quiet {
            report_files(&files);
            restored.left_groups.iter().for_each(|group| message!("pagemark: {}", printable(group)));
            report_connections(&restored.closed_connections);
            message!("pagemark: {job}@{sequence} runs as process {}", restored.root_pid);
        }
        if self.json {
            let Restored { root_pid: pid, pids, closed_connections, .. } = restored;
            let files = files.iter().map(File::from).collect();
            print_json(&Document { job, sequence, pid: *pid, pids, files, closed_connections })?;
        }
        Ok(())
    }
}

/// The failure of a restore, with what to do about it.
fn describe(name: &str, failure: &RestoreFailure) -> Failure {
    let failed = Failure::new(format!("cannot restore {name}"), &failure.error);
    match failure.stage {
        Stage::FindCriu => failed.help("`make criu` in Pagemark's sources gets a CRIU"),
        Stage::Scratch => failed.help("TMPDIR names another place for temporary files"),
        Stage::Check | Stage::Prepare => failed.help(match failure.error.kind() {
            ErrorKind::System => "nothing was touched; memory needs room in TMPDIR meanwhile",
            _ => "nothing was touched",
        }),
        Stage::Files | Stage::Processes if failure.error.kind() == ErrorKind::NotUndone => {
            failed.help("`pagemark asides` lists what the files held before")
        }
        Stage::Files | Stage::Processes => failed.help("the files are as they were before"),
        Stage::Deliver => failed.help(
            "its memory did not come whole, so it was ended; it can be restored again; the files are as it left them",
        ),
    }
}

impl From<&PutBack> for File {
    fn from(file: &PutBack) -> Self {
        let text = |path: &PathBuf| path.display().to_string();
        File { path: text(&file.path), action: name_of(file.action), set_aside: file.set_aside.as_ref().map(text) }
    }
}

/// The name of an action in JSON.
fn name_of(action: FileAction) -> &'static str {
    match action {
        FileAction::Untouched => "untouched",
        FileAction::Permissions => "permissions",
        FileAction::Recreated => "recreated",
        FileAction::Rewritten => "rewritten",
        FileAction::Removed => "removed",
    }
}

/// Reports what was done to the files.
fn report_files(files: &[PutBack]) {
    files.iter().filter_map(describe_file).for_each(|line| message!("pagemark: {line}"));
}

/// What was done to a file. None if nothing was.
fn describe_file(file: &PutBack) -> Option<String> {
    let path = printable(&file.path.display().to_string());
    let kept = file.set_aside.as_ref().map(|aside| printable(&aside.display().to_string()));
    Some(match (file.action, kept) {
        (FileAction::Untouched, _) => return None,
        (FileAction::Permissions, _) => format!("{path} has its owner and permissions again"),
        (FileAction::Recreated, _) => format!("{path} was gone and is there again"),
        (FileAction::Rewritten, Some(kept)) => format!("{path} put back; its previous content is in {kept}"),
        (FileAction::Rewritten, None) => format!("{path} put back"),
        (FileAction::Removed, Some(kept)) => format!("{path} removed, as it is newer; its content is in {kept}"),
        (FileAction::Removed, None) => format!("{path} removed, as it is newer"),
    })
}

/// Reports the connections that are closed.
fn report_connections(closed: &[String]) {
    closed.iter().take(SHOWN_CONNECTIONS).for_each(|name| message!("pagemark: the connection {name} is closed"));
    match closed.len().saturating_sub(SHOWN_CONNECTIONS) {
        0 => {}
        more => message!("pagemark: {} more connections are closed", text::count(more as u64)),
    }
}

/// Waits until the program exits, and gives its status as a shell would.
fn wait(root: Pid) -> Outcome {
    loop {
        // Other processes of the tree whose parents have exited are children of this process, too.
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) if pid == root => return Ok(ExitCode::from(code as u8)),
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == root => return Ok(ExitCode::from(128 + signal as u8)),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(Failure::new("the program's exit status is not known", error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_says_what_was_done_to_each_file() {
        let describe = |action, kept: Option<&str>| {
            describe_file(&PutBack { path: "/d/file".into(), action, set_aside: kept.map(PathBuf::from) })
        };
        let lines = [
            (FileAction::Untouched, None, None),
            (FileAction::Permissions, None, Some("/d/file has its owner and permissions again")),
            (FileAction::Recreated, None, Some("/d/file was gone and is there again")),
            (FileAction::Rewritten, Some("/a/1"), Some("/d/file put back; its previous content is in /a/1")),
            (FileAction::Removed, Some("/a/1"), Some("/d/file removed, as it is newer; its content is in /a/1")),
            (FileAction::Removed, None, Some("/d/file removed, as it is newer")),
        ];
        for (action, kept, expected) in lines {
            assert_eq!(describe(action, kept).as_deref(), expected, "{action:?}");
        }
    }
}
