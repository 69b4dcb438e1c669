//! A restore by CRIU, from what CRIU is given to the processes that run.
//!
//! [`Prepared::begin`] starts CRIU. With a gate, [`Restoring::wait`] comes back while CRIU waits in
//! it. [`Restoring::finish`] waits for CRIU's end, and does what CRIU cannot do. Dropped before
//! that, nothing is left of the processes.

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use nix::unistd::Pid;
use pagemark_linux::proc::{Process, tree};
use pagemark_trace::cgroups::{Joining, Memberships};
use pagemark_trace::error::Error;
use pagemark_trace::{PidsHere, RecordedPid, attach, leaving};

use super::attempt::{Attempt, Reached};
use super::image_files::set_program;
use super::images::{Prepared, RestoreOptions, Restored, Streams};
use super::launch::{Launch, duplicate, streams};
use super::opened::{HandedFiles, outside_files};
use super::root::root_of;
use super::running::WAIT_POLL;
use super::sockets::OwnSockets;
use super::{give_state_back, io, peers, surroundings};
use crate::criu::connections::LockedConnections;
use crate::criu::images::schema::CoreEntry;
use crate::criu::images::{ImageKind, read_first};
use crate::criu::stdio;
use crate::criu::{Criu, outside_sockets, sysv_memory, sysv_semaphores};
use crate::terminal::{self, Terminal};

/// The two ends of a TCP connection: the address of the tree's, and that of its peer.
type Connection = (SocketAddr, SocketAddr);

/// CRIU's number of the state of a process that job control has stopped.
const TASK_STOPPED: u32 = 3;

/// CRIU at work, and what the processes get that CRIU cannot give them. Dropped in this order.
pub(super) struct Restoring {
    attempt: Attempt,
    _locked: LockedConnections,
    opened: HandedFiles,
    sockets: OwnSockets,
    joining: Joining,
    /// With the process group that had the terminal.
    terminal: Option<(Terminal, i32)>,
    closed_connections: Vec<String>,
    /// What of the state that CRIU does not save did not come back. None before it was given back.
    lost_state: Option<Vec<String>>,
    options: RestoreOptions,
}

/// The ids of restored processes.
struct RestoredIds {
    root_pid: i32,
    /// All, the root first.
    pids: Vec<i32>,
    processes: Vec<Process>,
    here: PidsHere,
}

impl Prepared {
    /// Starts CRIU, with further arguments.
    ///
    /// # Errors
    /// Those of [`Prepared::run`]. Nothing of the tree is left.
    pub(super) fn begin(self, criu: &Criu, options: &RestoreOptions, further: &[&str]) -> Result<Restoring, Error> {
        self.check_free()?;
        if options.without_machine {
            for process in &self.notes.in_machines {
                set_program(&self.directory, process)?;
            }
        }
        let root_pid = *self.pids().first().ok_or_else(|| Error::damaged("it has no process"))?;
        let root = root_of(&self.notes, options.root.as_deref())?;
        let mut streams = streams(options.streams)?;
        let terminal = self.terminal(options, &mut streams)?;
        if self.notes.shell_job {
            let own = streams.iter().find(|stream| stream.is_terminal());
            stdio::adopt_terminals(&self.directory, self.session(), own.and_then(terminal::size_of))?;
        }
        let sockets = OwnSockets::take_out(&self.directory, &options.trusted_paths)?;
        let memberships = if options.ignore_cgroups { Memberships::new() } else { self.notes.memberships.clone() };
        let mut joining = Joining::new(memberships);

        let mut launch = Launch::new(&self, options, criu, streams)?;
        launch.command.args(further);
        if options.stopped || self.is_completed_stopped(&sockets) {
            launch.command.arg("--leave-stopped");
        }
        launch.set_root(root.as_deref())?;
        let opened = HandedFiles::new(&self.directory, &options.trusted_paths)?;
        if let Some(inside) = &opened.inside {
            launch.command.arg("--action-script").arg(inside.script());
        }
        launch.redirect_streams()?;
        launch.set_network()?;
        for (file, name) in outside_files(&self.directory, &self.notes.outside_files, &options.trusted_paths)? {
            launch.pass(file.as_fd(), &name)?;
        }
        let top = root.as_deref().unwrap_or(Path::new("/"));
        let (kept, closed_connections) = self.settle_connections(top)?;
        for (socket, name) in peers::make(&self.directory, &self.notes, launch.network())? {
            launch.pass(socket.as_fd(), &name)?;
        }
        // In a network of the tree's own, CRIU locks all.
        let has_own_network = self.notes.own_network.is_some();
        let _locked = LockedConnections::lock(if has_own_network { &[] } else { &kept })?;
        let root_pid_here = self.pids_here().and_then(|pids| pids.first().copied());
        let started = launch.start(terminal.as_ref(), root_pid_here, joining.open_groups_of(root_pid))?;
        let attempt = Attempt::new(self, started, root_pid);
        let options = options.clone();
        let lost_state = None;
        Ok(Restoring { attempt, _locked, opened, sockets, joining, terminal, closed_connections, lost_state, options })
    }

    /// True if the processes get something while they are stopped, before they run.
    fn is_completed_stopped(&self, sockets: &OwnSockets) -> bool {
        let has_system_v = !(self.notes.segments.is_empty() && self.notes.semaphores.is_empty());
        has_system_v || !sockets.is_empty()
    }

    /// Has the images describe as closed what no restore can connect again. Returns the connections
    /// that come back, and descriptions of those that do not.
    fn settle_connections(&self, top: &Path) -> Result<(Vec<Connection>, Vec<String>), Error> {
        let connections = surroundings::connections(&self.directory)?;
        let (kept, closed) = if self.notes.keep_connections { (connections, vec![]) } else { (vec![], connections) };
        let mut closed_connections: Vec<String> = closed.iter().map(|(own, peer)| format!("{own} to {peer}")).collect();
        let text = |closed: &String| closed.replace(|c: char| c.is_control(), "?");
        closed_connections.extend(self.notes.closed_sockets.iter().map(text));
        let has_own_network = self.notes.own_network.is_some();
        closed_connections.extend(outside_sockets::disconnect(&self.directory, top, has_own_network)?);
        Ok((kept, closed_connections))
    }

    /// Has the processes, which CRIU has left stopped, put back their sockets, attach their System
    /// V shared memory and put back their semaphores, and lets them run.
    fn complete_stopped(&self, sockets: &OwnSockets, here: &PidsHere, options: &RestoreOptions) -> Result<(), Error> {
        sysv_memory::attach(&self.notes.segments, here)?;
        if let Some(root) = self.pids().first() {
            sysv_semaphores::put_back(&self.notes.semaphores, here.find(*root)?)?;
        }
        sockets.put_back(here)?;
        let was_stopped = |image_pid: RecordedPid| {
            let path = self.directory.join(format!("core-{image_pid}.img"));
            let core: Result<CoreEntry, Error> = read_first(&path, ImageKind::Core);
            core.is_ok_and(|core| core.tc.is_some_and(|task| task.task_state == TASK_STOPPED))
        };
        let continued = self.pids().into_iter().filter(|&pid| !options.stopped && !was_stopped(pid));
        // A process that has ended needs no signal.
        continued.filter_map(|pid| here.find(pid).ok()).for_each(|process| drop(process.signal(libc::SIGCONT)));
        Ok(())
    }

    /// The id here of the root process of a container, as CRIU has written it.
    fn read_root_pid(&self) -> Result<i32, Error> {
        let path = self.root_pid_file();
        let text = std::fs::read_to_string(&path).map_err(io(format!("read {}", path.display())))?;
        text.trim().parse().map_err(|_| Error::criu_failed("report the root process", format!("it wrote {text:?}")))
    }

    /// A pseudo-terminal for a tree that was the job of a terminal outside, with the process group
    /// that had the terminal. It takes the place of those `streams` that are the terminal of this
    /// process.
    fn terminal(&self, options: &RestoreOptions, streams: &mut [OwnedFd; 3]) -> Result<Option<(Terminal, i32)>, Error> {
        let is_container = self.notes.first_process.is_some();
        let may_have = options.on_terminal && options.as_child && options.streams == Streams::Inherit && !is_container;
        if !may_have || !self.notes.shell_job || !stdio::has_terminal(&self.notes.outside) {
            return Ok(None);
        }
        let Some(foreground) = stdio::foreground(&self.directory, self.session())? else { return Ok(None) };
        let Some(terminal) = Terminal::open()? else { return Ok(None) };
        terminal.input().keep();
        let mut set_up = || -> std::io::Result<()> {
            for (stream, of_terminal) in streams.iter_mut().zip(terminal.streams()?) {
                if let Some(of_terminal) = of_terminal {
                    *stream = duplicate(of_terminal.as_fd())?;
                }
            }
            Ok(())
        };
        set_up().map_err(io("set up a pseudo-terminal"))?;
        Ok(Some((terminal, foreground)))
    }
}

impl Restoring {
    /// Waits until CRIU ends, or until `meanwhile`, which is called again and again, says that CRIU
    /// has reached the gate.
    ///
    /// # Errors
    /// CRIU failed, or `meanwhile` did: nothing of the tree is left.
    pub(super) fn wait(&mut self, meanwhile: &mut dyn FnMut() -> Result<bool, Error>) -> Result<Reached, Error> {
        self.attempt.wait(&mut self.opened, meanwhile)
    }

    /// Waits until CRIU ends, and lets the processes run.
    ///
    /// # Errors
    /// CRIU failed, or the processes could not be completed. Nothing of the tree is left.
    pub(super) fn finish(mut self) -> Result<Restored, Error> {
        self.wait(&mut || {
            std::thread::sleep(WAIT_POLL);
            Ok(false)
        })?;
        self.finish_restored()
    }

    /// The state was given back that CRIU does not save, up to this.
    pub(super) fn set_lost_state(&mut self, lost_state: Vec<String>) {
        self.lost_state = Some(lost_state);
    }

    /// Like [`Restoring::finish`], of a CRIU that has ended.
    pub(super) fn finish_restored(mut self) -> Result<Restored, Error> {
        let ids = self.ids()?;
        if let Err(error) = self.complete(&ids) {
            self.attempt.undo(&ids.processes);
            return Err(error);
        }
        // Where no gate could be made, the processes run already.
        let prepared = &self.attempt.prepared;
        let give = || give_state_back(&prepared.directory, &prepared.notes, &ids.here);
        let lost_state = self.lost_state.take().unwrap_or_else(give);
        self.opened.keep();
        let left_groups = self.joining.join_others(&ids.here).iter().map(ToString::to_string).collect();
        let child = self.attempt.leader().unwrap_or(ids.root_pid);
        let relay = self.terminal.and_then(|(terminal, _)| terminal.leave()).map(Pid::as_raw);
        let RestoredIds { root_pid, pids, .. } = ids;
        let closed_connections = self.closed_connections;
        Ok(Restored { root_pid, pids, left_groups, closed_connections, lost_state, child, relay })
    }

    /// Ends the processes of a CRIU that has ended without having waited in the gate.
    pub(super) fn refuse(mut self) {
        if let Ok(ids) = self.ids() {
            self.attempt.undo(&ids.processes);
        }
    }

    /// The ids of the processes that CRIU has restored.
    fn ids(&self) -> Result<RestoredIds, Error> {
        let prepared = &self.attempt.prepared;
        if let Some(pids) = prepared.pids_here() {
            let (root_pid, processes) = (self.attempt.root_pid.get(), Process::find_all(&pids));
            return Ok(RestoredIds { root_pid, pids, processes, here: PidsHere::as_recorded() });
        }
        let root_pid = prepared.read_root_pid()?;
        let members = tree::members(root_pid).unwrap_or_default();
        let processes: Vec<Process> = members.iter().map(|member| member.process).collect();
        let pids = processes.iter().map(|process| process.pid).collect();
        let here = PidsHere::of_container(attach::find(root_pid)?);
        Ok(RestoredIds { root_pid, pids, processes, here })
    }

    /// Does what CRIU cannot do with the processes.
    fn complete(&self, ids: &RestoredIds) -> Result<(), Error> {
        let prepared = &self.attempt.prepared;
        if prepared.is_completed_stopped(&self.sockets) {
            prepared.complete_stopped(&self.sockets, &ids.here, &self.options)?;
        }
        if self.options.without_machine { leaving::complete(&ids.processes) } else { Ok(()) }
    }
}
