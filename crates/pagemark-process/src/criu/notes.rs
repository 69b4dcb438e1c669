//! What Pagemark itself remembers about a dump, beside CRIU's images.

use std::path::Path;

use nix::unistd::{Pid, getsid};
use pagemark_linux::proc::{self, Process};
use pagemark_trace::cgroups::{Cgroups, Memberships};
use pagemark_trace::error::{Error, ErrorKind, Object};
use pagemark_trace::{PidsHere, RecordedPid};

use super::dump_options::DumpOptions;
use super::held_files::{self, HeldFile};
use super::mounted::Mounted;
use super::outside_files::{self, OutsideFile};
use super::owners::Owner;
use super::stdio::{self, Outside};
use super::sysv_memory::Segment;
use super::sysv_semaphores::SemaphoreSet;

use crate::container::network::OwnNetwork;
use crate::container::{self, FileLocation, HostPaths};
use crate::files::encode_path;
use crate::state::State;

/// What Pagemark itself has to remember for the restore, in the images directory.
pub(crate) const NOTES: &str = "pagemark.json";

/// What Pagemark has to remember about a dump to restore it.
#[derive(Clone, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Notes {
    /// Connections are in the images.
    pub keep_connections: bool,
    /// The root was no session leader: it gets the restoring command's session.
    pub shell_job: bool,
    /// Standard streams that lead out of the tree.
    pub outside: Vec<Outside>,
    /// The working directories of the processes, as
    /// [`encode_path`](crate::files::encode_path) writes them. Earlier versions noted none.
    #[serde(default)]
    pub working_directories: Vec<String>,
    /// What becomes of control groups. (Absent in the oldest checkpoints.)
    #[serde(default)]
    pub cgroups: Cgroups,
    /// The control groups in the freeze, if a restore joins them.
    #[serde(default)]
    pub memberships: Memberships,
    /// The root directory of the tree as it is here, as
    /// [`encode_path`](crate::files::encode_path) writes it, if the tree has mounts of its own.
    #[serde(default)]
    pub own_root: Option<String>,
    /// Files that are open on mounts outside, of a tree that has mounts of its own.
    #[serde(default)]
    pub outside_files: Vec<OutsideFile>,
    /// What a tree that has mounts of its own has mounted from outside. Earlier versions noted
    /// none.
    #[serde(default)]
    pub mounted: Vec<Mounted>,
    /// Files that processes have open and that are not their users' own.
    #[serde(default)]
    pub held_files: Vec<HeldFile>,
    /// The network of a tree that has one of its own.
    #[serde(default)]
    pub own_network: Option<OwnNetwork>,
    /// The root process, if it is the first process of a namespace of process ids: a restore makes
    /// a new namespace, in which no id is in use.
    #[serde(default)]
    pub first_process: Option<Process>,
    /// System V shared memory that the processes have attached.
    #[serde(default)]
    pub segments: Vec<Segment>,
    /// System V semaphores that the processes alone have changed.
    #[serde(default)]
    pub semaphores: Vec<SemaphoreSet>,
    /// Connections by Unix sockets to processes outside, which a restore finds closed.
    #[serde(default)]
    pub closed_sockets: Vec<String>,
    /// The processes in a machine. If a restore takes them out of it, their `/proc/PID/exe` leads
    /// to the program's file.
    #[serde(default)]
    pub in_machines: Vec<InMachine>,
    /// The owners of pipes and sockets that are not root's.
    #[serde(default)]
    pub owners: Vec<Owner>,
    /// What CRIU does not save, and the restore gives back.
    #[serde(default)]
    pub state: State,
}

/// A process in a machine.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct InMachine {
    /// Its id in the images.
    pub pid: RecordedPid,
    /// Where the program's file has its first instruction.
    pub program_entry: u64,
}

impl Notes {
    /// What is known of the tree below `pid`, of these processes, before it is frozen.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`], or the root directory of the tree is nowhere here.
    pub fn before_freeze(pid: i32, tree: &[i32], options: &DumpOptions) -> Result<Notes, Error> {
        let session = getsid(Some(Pid::from_raw(pid))).map_err(|_| Error::criu_gone(pid))?;
        let own_root = own_root(pid)?;
        Ok(Notes {
            keep_connections: options.keep_connections,
            shell_job: session.as_raw() != pid,
            outside: stdio::find_terminals(tree),
            working_directories: working_directories(tree),
            cgroups: options.cgroups,
            outside_files: if own_root.is_some() { outside_files::find(tree) } else { Vec::new() },
            // Without the right to find out, a restore does not tell them apart.
            mounted: if own_root.is_some() { Mounted::of_tree(tree).unwrap_or_default() } else { Vec::new() },
            own_root,
            held_files: held_files::find(tree),
            own_network: OwnNetwork::of_process(pid, options.save_network).map_err(|_| Error::criu_gone(pid))?,
            first_process: container::first_process(pid),
            ..Notes::default()
        })
    }

    /// The ids here of the restored tree, whose root process is `root`, if it is known.
    pub fn pids_here(&self, root: Option<Process>) -> PidsHere {
        match (&self.first_process, root) {
            (None, _) => PidsHere::as_recorded(),
            (Some(_), Some(root)) => PidsHere::of_container(root),
            // Any process here may have an id that the container had.
            (Some(_), None) => PidsHere::unknown(),
        }
    }

    /// Writes the notes into the directory of the images.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, directory: &Path) -> Result<(), Error> {
        let path = directory.join(NOTES);
        let failed = || Error::criu_io(format!("write {}", path.display()));
        let text = serde_json::to_vec(self).map_err(|error| failed()(error.into()))?;
        std::fs::write(&path, text).map_err(failed())
    }
}

/// The root directory of a process as it is here, as [`encode_path`](crate::files::encode_path)
/// writes it. None if the process has no mounts of its own.
fn own_root(pid: i32) -> Result<Option<String>, Error> {
    let gone = |_| Error::criu_gone(pid);
    if !container::has_own_mounts(pid).map_err(gone)? {
        return Ok(None);
    }
    let root = proc::root_directory(pid).map_err(gone)?;
    match HostPaths::of_tree(&[pid]).and_then(|mut paths| paths.place(pid, &root, None)).map_err(gone)? {
        FileLocation::Outside(root) => Ok(Some(encode_path(&root))),
        FileLocation::InsideAlone | FileLocation::Unknown => {
            let reason = "has mounts of its own, and its root directory is not mounted here";
            Err(Error::about(ErrorKind::PidNamespace, Object::command(pid), reason)
                .help("mount its file system here too, run pagemark inside, or save memory alone with --memory-only"))
        }
    }
}

/// The working directories of the processes, each once.
pub(super) fn working_directories(tree: &[i32]) -> Vec<String> {
    let Ok(mut paths) = HostPaths::of_tree(tree) else { return Vec::new() };
    // A process that has just ended has none, and a directory that was removed holds no files.
    let read = |pid: &i32| {
        let path = proc::working_directory(*pid).ok()?;
        match paths.place(*pid, &path, None) {
            Ok(FileLocation::Outside(path)) => Some(path),
            Ok(FileLocation::InsideAlone | FileLocation::Unknown) => None,
            // It may not be traced.
            Err(_) => Some(path),
        }
    };
    let mut directories: Vec<String> = tree.iter().filter_map(read).map(|path| encode_path(&path)).collect();
    directories.sort();
    directories.dedup();
    directories
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_of_a_container_is_no_id_here() {
        let seven = RecordedPid::new(7);
        assert_eq!(Notes::default().pids_here(None).get(seven), Some(7));
        let first_process = Process::find(std::process::id() as i32).ok();
        let of_container = Notes { first_process, ..Notes::default() };
        assert_eq!(of_container.pids_here(None).get(seven), None);
    }
}
