//! The arguments of a dump: what CRIU is to save of a tree, and how.

use std::process::Command;

use pagemark_linux::proc;
use pagemark_trace::error::Error;

use super::notes::Notes;
use super::stdio;
use crate::container;
use crate::container::network;

/// Adds the arguments for the tree of these processes below `pid`.
///
/// # Errors
/// The tree is gone.
pub(super) fn add(command: &mut Command, pid: i32, tree: &[i32], notes: &Notes) -> Result<(), Error> {
    command.args(["-t", &pid.to_string(), "--lazy-pages", "--leave-running", "--file-locks", "--skip-in-flight"]);
    command.args(["--ghost-limit", "1073741824", "--ext-unix-sk"]);
    command.arg(format!("--manage-cgroups={}", notes.cgroups.criu_mode()));
    command.arg(if notes.keep_connections { "--tcp-established" } else { "--tcp-close" });
    if notes.shell_job {
        command.arg("--shell-job");
    }
    if tree.iter().any(|pid| has_lease(*pid)) {
        // For the build ID of a file, CRIU opens the file, which would break a lease on it.
        command.args(["--file-validation", "filesize"]);
    }
    if notes.own_root.is_some() {
        command.args(container::MOUNT_OPTIONS);
        command.args(notes.outside_files.iter().flat_map(|file| ["--external", &file.name]));
    }
    if let Some(network) = &notes.own_network {
        if !network.is_saved {
            command.args(network::dump_arguments(pid).map_err(|_| Error::criu_gone(pid))?);
        }
        if !notes.keep_connections {
            // There is no connection whose packets would have to wait.
            command.args(network::UNLOCKED);
        }
    }
    command.args(stdio::dump_arguments(&notes.outside));
    Ok(())
}

/// True if a process holds a lease on a file.
fn has_lease(pid: i32) -> bool {
    let descriptors = proc::descriptors(pid).unwrap_or_default();
    descriptors.iter().any(|descriptor| descriptor.has_lease().unwrap_or(false))
}
