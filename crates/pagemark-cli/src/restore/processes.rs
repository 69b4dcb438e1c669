//! Restores of processes.

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;

use nix::sys::signal::SigSet;
use nix::unistd::Pid;
use pagemark::repository::Checkpoint;
use pagemark_process::ErrorKind;
use pagemark_process::files::{FileAction, PutBack};
use pagemark_process::restore::{self as library, PreparedTree, RestoreFailure, RunningTree, Stage};
use pagemark_process::saver::SignalGate;
use pagemark_report::escape::printable;
use pagemark_report::message;
use pagemark_report::text;

use super::{File, GroupMode, Kind, Restore, name_of};
use crate::asides::report_interrupted;
use crate::failure::Failure;
use crate::signals::Signals;

/// The closed connections that are listed; of others, only their number is.
const SHOWN_CONNECTIONS: usize = 5;

/// A process tree.
pub struct Processes;

impl Kind for Processes {
    type Prepared<'a> = PreparedTree<'a>;
    type Running = RunningTree;

    fn check(options: &Restore, checkpoint: &Checkpoint) -> Result<(), Failure> {
        if !options.disk.is_empty() {
            return Err(Failure::usage("--disk is for virtual machines"));
        }
        if options.yes { Ok(()) } else { options.ask(checkpoint) }
    }

    fn prepare<'a>(options: &Restore, checkpoint: &'a Checkpoint, _: SigSet) -> Result<PreparedTree<'a>, Failure> {
        let asides = options.asides.path(&options.repository)?;
        if !options.quiet {
            report_interrupted(&asides);
        }
        let restore = library::Restore::new(checkpoint)
            .lazy(options.lazy)
            .detach(options.detach)
            .allow_unusual_files(true)
            .ignore_cgroups(options.cgroups == GroupMode::Ignore)
            .on_terminal(true)
            .without_machine(options.without_kvm)
            .trust_paths(options.trust_path.clone())
            .root_peers(options.root_peers)
            .asides_in(asides);
        let restore = match options.time_limit {
            Some(limit) => restore.time_limit(limit),
            None => restore,
        };
        let prepared = options.in_container(restore).prepare();
        prepared.map_err(|failure| Processes::failure(&name_of(checkpoint), failure))
    }

    fn announce(options: &Restore, checkpoint: &Checkpoint, prepared: &PreparedTree<'_>) {
        if !options.quiet {
            let (taken, memory) = (checkpoint.manifest.taken_unix_us, prepared.memory().get());
            let (ago, memory) = (text::ago(taken), text::bytes(memory));
            message!("pagemark: restoring {} from {ago} ({memory})", name_of(checkpoint));
        }
        if let Some(reason) = prepared.staging() {
            let first = if options.lazy { "--lazy has no effect, and memory" } else { "memory" };
            message!("pagemark: {first} is written into temporary files first, because {reason}");
        }
    }

    fn failure(name: &str, failure: RestoreFailure) -> Failure {
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

    fn warn(running: &RunningTree) {
        if let Some(error) = running.asides_error() {
            message!("pagemark: the asides of this restore are listed as those of an interrupted restore: {error}");
        }
    }

    fn pass_signals(running: &RunningTree, signals: Signals) -> Result<(), Failure> {
        signals.pass_on_to(Pid::from_raw(running.restored().root_pid), SignalGate::new())
    }

    fn child(running: &RunningTree) -> Pid {
        Pid::from_raw(running.restored().child)
    }

    fn report(name: &str, running: &RunningTree) {
        running.files().iter().filter_map(describe_file).for_each(|line| message!("pagemark: {line}"));
        let restored = running.restored();
        restored.left_groups.iter().for_each(|group| message!("pagemark: {}", printable(group)));
        report_connections(&restored.closed_connections);
        restored.lost_state.iter().for_each(|lost| message!("pagemark: did not come back: {}", printable(lost)));
        message!("pagemark: {name} runs as process {}", restored.root_pid);
    }

    fn files(running: &RunningTree) -> Vec<File> {
        running.files().iter().map(File::from).collect()
    }

    fn closed_connections(running: &RunningTree) -> &[String] {
        &running.restored().closed_connections
    }

    fn lost_state(running: &RunningTree) -> &[String] {
        &running.restored().lost_state
    }
}

impl Restore {
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
        let name = name_of(checkpoint);
        let restore = self.in_container(library::Restore::new(checkpoint));
        let files = restore.unusual_files().map_err(|failure| Processes::failure(&name, failure))?;
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
}

impl From<&PutBack> for File {
    fn from(file: &PutBack) -> Self {
        let text = |path: &PathBuf| path.display().to_string();
        File { path: text(&file.path), action: action_name(file.action), set_aside: file.set_aside.as_ref().map(text) }
    }
}

/// The name of an action in JSON.
fn action_name(action: FileAction) -> &'static str {
    match action {
        FileAction::Untouched => "untouched",
        FileAction::Permissions => "permissions",
        FileAction::Recreated => "recreated",
        FileAction::Rewritten => "rewritten",
        FileAction::Removed => "removed",
    }
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
