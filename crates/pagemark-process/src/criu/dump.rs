//! Saving everything of a process tree but its memory, while that is frozen for some milliseconds.
//!
//! `criu dump --lazy-pages` freezes the tree, writes all state, and then waits as a page server
//! with the tree still frozen, and with its own code already taken out of the processes. A byte on
//! its status descriptor says so. In that moment the last dirty pages are collected; then a message
//! on the page server's socket ends CRIU, and the tree resumes.
//!
//! CRIU must not be killed before that moment, because it may be running code inside a process. So
//! it runs in a session of its own, ignores the signals that ask it to end, is exempt from the
//! out-of-memory killer where that is permitted, and its page server's socket is one end of a pair
//! whose other end only Pagemark has: when Pagemark is killed, at any instant, CRIU reaches the
//! moment at which it would serve pages, finds the socket closed, and ends as after a complete
//! dump.

use std::cell::LazyCell;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pagemark::{PAGE_SIZE, RangeSet};
use pagemark_linux::proc::{Process, tree};
use pagemark_linux::scratch_directory;
use pagemark_trace::RecordedPid;
use pagemark_trace::cgroups::{self, Cgroups};
use pagemark_trace::error::Error;
#[cfg(doc)]
use pagemark_trace::error::ErrorKind;
#[cfg(doc)]
use pagemark_trace::inject::memory_copy::MemoryCopy;
use pagemark_trace::objects::ObjectId;
use pagemark_trace::parked;

use super::attach_deadlock::AttachDeadlock;
use super::connections::{Rules, Sockets};
use super::dump_options::DumpOptions;
use super::guard::Guard;
use super::images::schema::PstreeEntry;
use super::images::{PageRun, Pagemap, read_all};
use super::interrupted_calls::InterruptedCalls;
use super::late_sockets;
use super::machines::Machines;
use super::notes::{InMachine, NOTES, Notes, working_directories};
use super::outside_sockets::ConnectedSockets;
use super::owners;
use super::shortened::{self, ShortenedMapping};
use super::stdio;
use super::submission::{Submission, may_withhold};
use super::sysv_memory;
use super::sysv_semaphores;
use super::watch::{Watch, tracer};
use super::withhold::{WithheldMemory, Withholding};
use super::{Criu, dump_arguments, errors_in_log, images, limits, outside_sockets};
use crate::refusal::{EXECUTES, NEW_FILTER};
use crate::spawn::outlive_requests_to_end;
use crate::state::{Observing, State, confinement, descriptors};

/// CRIU's log in the images directory.
const LOG: &str = "dump.log";

/// How long CRIU may take to save the state. Its own limit for freezing is 10 s.
const SAVE_LIMIT: Duration = Duration::from_secs(120);

/// How long CRIU may take to let the tree resume.
const THAW_LIMIT: Duration = Duration::from_secs(30);

/// Pause between two polls of the state of the tree, or of CRIU.
const POLL: Duration = Duration::from_micros(200);

/// Message of CRIU's page protocol that ends the page server: command, pages, address, image; 32
/// bytes with padding.
const FORCE_CLOSE: u32 = 0x1024;

/// By process: its id in the images, and the pages of its private mappings that held data in the
/// freeze.
pub type Populated = HashMap<i32, (RecordedPid, RangeSet)>;

/// When what happened.
#[derive(Clone, Copy, Debug)]
pub struct Timings {
    /// The root process was stopped.
    pub frozen_at: Instant,
    /// All state but memory was saved.
    pub state_saved_at: Instant,
    /// The root process ran again.
    pub thawed_at: Instant,
}

impl Timings {
    /// How long the tree was frozen.
    pub fn downtime(&self) -> Duration {
        self.thawed_at - self.frozen_at
    }
}

/// By which CRIU and Pagemark speak.
struct Channels {
    /// To the page server that CRIU becomes.
    socket: UnixStream,
    page_server: UnixStream,
    /// CRIU says here that it has saved the state.
    status: OwnedFd,
    status_of_criu: OwnedFd,
    images: OwnedFd,
}

impl Channels {
    fn open(directory: &Path) -> Result<Channels, Error> {
        let (socket, page_server) = UnixStream::pair().map_err(for_criu("make a socket pair"))?;
        let pipe = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC);
        let (status, status_of_criu) = pipe.map_err(|error| for_criu("make a pipe")(error.into()))?;
        let images = scratch_directory::hold(directory).map_err(for_criu(&format!("hold {}", directory.display())))?;
        Ok(Channels { socket, page_server, status, status_of_criu, images: images.into() })
    }

    fn arguments(&self) -> [String; 4] {
        let [page_server, status] = [self.page_server.as_raw_fd(), self.status_of_criu.as_raw_fd()];
        ["--ps-socket".into(), page_server.to_string(), "--status-fd".into(), status.to_string()]
    }

    /// The descriptors that CRIU gets. The reading end of its status pipe is among them: if
    /// Pagemark is killed, writing to it must not fail. And the directory: it is not left over
    /// while CRIU writes into it.
    fn of_criu(&self) -> [RawFd; 4] {
        let [page_server, images] = [self.page_server.as_raw_fd(), self.images.as_raw_fd()];
        [page_server, self.status_of_criu.as_raw_fd(), self.status.as_raw_fd(), images]
    }
}

/// The error of a step on the way to CRIU.
fn for_criu(step: &str) -> impl FnOnce(std::io::Error) -> Error {
    Error::criu_io(format!("{step} for CRIU"))
}

/// A dump that is under way. Dropped at any point, the tree resumes.
#[derive(Debug)]
pub struct Dump {
    pid: i32,
    directory: PathBuf,
    notes: Notes,
    child: Child,
    /// None once CRIU was asked to end.
    socket: Option<UnixStream>,
    status: File,
    submission: Submission,
    withholding: Option<Withholding>,
    interrupted: InterruptedCalls,
    watch: Watch,
    attach_deadlock: AttachDeadlock,
    state_saved_at: Option<Instant>,
    /// None before the state is saved.
    observing: Option<Observing>,
    /// Processes that run in machines, if there are any.
    machines: Option<Machines>,
    /// The processes when CRIU was started.
    tree: Vec<i32>,
    /// What the program loses is noted, and does not refuse it.
    without_sandbox: bool,
    /// None once CRIU's rules are removed, or if it makes none.
    rules: Option<Rules>,
    /// Waited for when CRIU has ended.
    guard: Option<Guard>,
}

impl Dump {
    /// Starts CRIU and returns at once. The tree under `pid` keeps running for some 40 ms, then it
    /// is frozen. CRIU writes its images into `directory`, which must exist and be empty. The
    /// images hold secrets of the processes, so the directory should be its owner's alone.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`], [`ErrorKind::CannotSave`], [`ErrorKind::Confined`], or CRIU could not
    /// be started.
    pub fn start(criu: &Criu, pid: i32, directory: &Path, options: &DumpOptions) -> Result<Dump, Error> {
        Dump::start_without(criu, pid, directory, options, &HashSet::new())
    }

    /// Like [`Dump::start`], without the content of these objects of shared memory. Where it cannot
    /// be withheld from CRIU, the images have it; see [`SavedState::withheld_objects`].
    ///
    /// # Errors
    /// Those of [`Dump::start`].
    pub fn start_without(
        criu: &Criu,
        pid: i32,
        directory: &Path,
        options: &DumpOptions,
        objects: &HashSet<ObjectId>,
    ) -> Result<Dump, Error> {
        let tree = tree::members(pid).map_err(|_| Error::criu_gone(pid))?;
        let tree: Vec<i32> = tree.iter().map(|member| member.process.pid).collect();
        limits::check(pid, &tree)?;
        descriptors::check(&tree)?;
        if !options.without_sandbox {
            confinement::check(&tree)?;
        }
        let notes = Notes::before_freeze(pid, &tree, options)?;
        notes.write(directory)?;

        let channels = Channels::open(directory)?;
        let mut command = criu.command("dump", directory, LOG);
        command.args(channels.arguments());
        dump_arguments::add(&mut command, pid, &tree, &notes)?;
        let connected = ConnectedSockets::of_tree(&tree);
        command.args(connected.arguments());
        let (receiver, sender) = UnixStream::pair().map_err(for_criu("make a socket pair"))?;
        let sender_number = sender.as_raw_fd();
        let mut submission = Submission::of_tree(criu, pid, &tree, connected, !objects.is_empty());
        if submission.late_sockets.is_some() {
            command.args(late_sockets::dump_arguments());
        }
        let (is_submitted, mut filter) = (submission.is_needed, submission.filter(&tree));
        stand_apart(&mut command, options, channels.of_criu(), move || {
            if is_submitted { super::notify::submit(sender_number, &mut filter) } else { Ok(()) }
        });
        criu.interrupted.observe(&tree);
        let rules = || Rules::of_tree(pid, &tree, notes.own_network.is_some()).map_err(|_| Error::criu_gone(pid));
        let rules = options.keep_connections.then(rules).transpose()?;
        let sockets = options.keep_connections.then(|| Sockets::of_tree(&tree));
        let child = command.spawn().map_err(for_criu(&format!("start {}", criu.path().display())))?;
        let guard = Guard::start(child.id() as i32, pid, &tree, sockets).map_err(for_criu("start a guard"))?;
        let attach_deadlock = AttachDeadlock::new(child.id() as i32);
        let watch = Watch::start(pid, child.id() as i32).map_err(for_criu("start a thread"))?;
        let (withholding, machines) =
            submission.answer(&receiver, objects, criu).map_err(for_criu("answer system calls"))?;
        Ok(Dump {
            pid,
            directory: directory.into(),
            notes,
            child,
            socket: Some(channels.socket),
            status: File::from(channels.status),
            submission,
            withholding,
            interrupted: criu.interrupted.clone(),
            watch,
            attach_deadlock,
            state_saved_at: None,
            observing: None,
            machines,
            rules,
            tree,
            without_sandbox: options.without_sandbox,
            guard,
        })
    }

    /// Waits at most this long until the tree is being frozen. True if it is. The root process is
    /// stopped then, others of its threads or processes may still run;
    /// [`Dump::wait_state_saved`] waits for all.
    ///
    /// # Errors
    /// CRIU failed. The tree resumes.
    pub fn wait_frozen(&mut self, at_most: Duration) -> Result<bool, Error> {
        self.poll_frozen(at_most).map_err(|error| self.failed(error))
    }

    fn poll_frozen(&mut self, at_most: Duration) -> Result<bool, Error> {
        let deadline = Instant::now() + at_most;
        loop {
            if self.watch.frozen_at().is_some() {
                return Ok(true);
            }
            if self.watch.is_gone() || tracer(self.pid).is_none() {
                return Err(Error::criu_gone(self.pid));
            }
            if self.has_ended()? {
                return Err(self.failure());
            }
            if Instant::now() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits until no thread of the tree runs any more. False if that is not known before the state
    /// is saved.
    ///
    /// # Errors
    /// CRIU failed. The tree resumes.
    pub fn wait_all_frozen(&mut self) -> Result<bool, Error> {
        if !self.submission.calls.mappings {
            return Ok(false);
        }
        while let Some(withholding) = &self.withholding {
            if withholding.is_frozen() {
                return Ok(true);
            }
            let is_saved = wait_readable(&self.status, Duration::ZERO);
            if is_saved.and_then(|is_saved| Ok(is_saved || self.has_ended()?)).map_err(|error| self.failed(error))? {
                break;
            }
            std::thread::sleep(POLL);
        }
        Ok(false)
    }

    /// Waits until the whole tree is frozen and all its state but memory is saved. The tree stays
    /// frozen until [`Dump::thaw`].
    ///
    /// # Errors
    /// CRIU failed; the error has its message. The tree resumes.
    pub fn wait_state_saved(&mut self) -> Result<(), Error> {
        self.poll_state_saved().map_err(|error| self.failed(error))
    }

    fn poll_state_saved(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + SAVE_LIMIT;
        while !self.poll_frozen(Duration::from_secs(1))? {
            if Instant::now() >= deadline {
                return Err(self.no_answer("freeze the processes", SAVE_LIMIT));
            }
        }
        if let Some(rules) = &mut self.rules {
            // They may be gone when the dump has failed.
            rules.observe(&members(self.pid));
        }
        // The reading end is in CRIU too, so the end of CRIU is no end of file and has to be polled.
        while !wait_readable(&self.status, Duration::from_millis(100))? {
            if self.has_ended()? {
                return Err(self.failure());
            }
            if Instant::now() >= deadline {
                return Err(self.no_answer("save the state", SAVE_LIMIT));
            }
        }
        let mut byte = [0];
        match self.status.read(&mut byte) {
            Ok(1) => {
                self.state_saved_at = Some(Instant::now());
                // In their memory, which is saved from now on, they are released.
                self.machines.iter().for_each(Machines::release);
                self.observing = Some(Observing::start(members(self.pid), self.image_pid()));
                Ok(())
            }
            Ok(_) => {
                self.child.wait().map_err(Error::criu_io("wait for CRIU"))?;
                Err(self.failure())
            }
            Err(error) => Err(Error::criu_io("read CRIU's status")(error)),
        }
    }

    /// True once [`Dump::wait_state_saved`] has succeeded: every process is frozen.
    pub fn is_state_saved(&self) -> bool {
        self.state_saved_at.is_some()
    }

    /// Makes a copy of the memory of a process of the tree, after [`Dump::wait_state_saved`]. The
    /// copy ends within seconds, unless [`MemoryCopy::hold`] stops it.
    ///
    /// # Errors
    /// Why it could not be made. The tree stays frozen.
    pub fn copy_memory(&self, pid: i32) -> Result<Process, Error> {
        let guard = self.guard.as_ref().ok_or_else(|| Error::criu_gone(self.pid))?;
        guard.copy_memory(self.child.id() as i32, pid)
    }

    /// Lets the tree resume, and waits until it runs. Then calls `populated` for the pages of
    /// private mappings that held data in the freeze and were withheld from CRIU.
    ///
    /// # Errors
    /// The state was not saved: no [`Dump::wait_state_saved`] has succeeded, or CRIU failed after
    /// it. The tree resumes all the same.
    pub fn thaw(mut self, populated: impl FnOnce() -> Populated) -> Result<(Timings, SavedState), Error> {
        self.resume(populated).map_err(|error| self.failed(error))
    }

    fn resume(&mut self, populated: impl FnOnce() -> Populated) -> Result<(Timings, SavedState), Error> {
        let (Some(frozen_at), Some(state_saved_at)) = (self.watch.frozen_at(), self.state_saved_at) else {
            return Err(Error::criu_failed(self.what(), "the state is not saved yet"));
        };
        let waiting_since = self.machines.as_ref().and_then(Machines::since);
        let frozen_at = waiting_since.map_or(frozen_at, |since| since.min(frozen_at));
        self.note_frozen()?;
        let thawed_at = self.end_freeze()?;
        let state = self.complete_images(populated)?;
        Ok((Timings { frozen_at, state_saved_at, thawed_at }, state))
    }

    /// Only the ids of a container are others in the images.
    fn image_pid(&self) -> fn(i32) -> RecordedPid {
        if self.notes.first_process.is_some() { RecordedPid::in_images } else { RecordedPid::new }
    }

    /// Notes what is known of the tree while it is frozen.
    fn note_frozen(&mut self) -> Result<(), Error> {
        let pid = self.pid;
        let pids = LazyCell::new(|| members(pid));
        let image_pid = self.image_pid();
        if self.notes.cgroups == Cgroups::Restore {
            self.notes.memberships = cgroups::memberships(&pids, image_pid);
        }
        if self.machines.as_ref().is_some_and(Machines::are_there) {
            let in_machine = |&pid: &i32| {
                let program_entry = parked::program_entry(pid)?.get();
                Some(InMachine { pid: image_pid(pid), program_entry })
            };
            self.notes.in_machines = pids.iter().filter_map(in_machine).collect();
        }
        // Those that were born since CRIU was started.
        let born: Vec<i32> = pids.iter().copied().filter(|pid| !self.tree.contains(pid)).collect();
        self.notes.working_directories.extend(working_directories(&born));
        if self.submission.has_segments {
            self.notes.segments = sysv_memory::find(&pids, image_pid)?;
        }
        self.notes.semaphores = sysv_semaphores::find(pid, || &pids)?;
        self.notes.owners = owners::find(&pids);
        if !self.without_sandbox {
            confinement::check(&pids)?;
        }
        self.notes.state = self.observing.take().map_or_else(|| State::observe(&pids, image_pid), Observing::finish);
        Ok(())
    }

    /// Lets the tree resume, and waits until CRIU has ended. Returns when the tree ran again.
    fn end_freeze(&mut self) -> Result<Instant, Error> {
        // It must stay open until CRIU has ended, because CRIU answers.
        let mut socket = self.socket.take();
        if let Some(socket) = &mut socket {
            let mut message = [0; 32];
            message[..4].copy_from_slice(&FORCE_CLOSE.to_le_bytes());
            // If it can't be sent, closing the socket has the same effect.
            let _ = socket.write_all(&message);
        }
        let deadline = Instant::now() + THAW_LIMIT;
        let mut thawed_at = None;
        let status = loop {
            // A root process that was killed meanwhile is not frozen either.
            if thawed_at.is_none() && tracer(self.pid).unwrap_or(0) == 0 {
                thawed_at = Some(Instant::now());
            }
            if let Some(status) = self.child.try_wait().map_err(Error::criu_io("wait for CRIU"))? {
                break status;
            }
            if Instant::now() >= deadline {
                return Err(self.no_answer("let the processes run on", THAW_LIMIT));
            }
            std::thread::sleep(POLL);
        };
        drop(socket);
        self.interrupted.resumed();
        if !status.success() {
            return Err(self.failure());
        }
        Ok(thawed_at.unwrap_or_else(Instant::now))
    }

    /// Completes the images and the notes by what CRIU did not save.
    fn complete_images(&mut self, populated: impl FnOnce() -> Populated) -> Result<SavedState, Error> {
        let closed = outside_sockets::close(&self.directory)?;
        self.notes.closed_sockets = closed.connections;
        self.notes.outside.extend(closed.streams);
        self.notes.outside.extend(stdio::find_pipes(&self.directory)?);
        self.notes.write(&self.directory)?;
        let withheld = self.withholding.take().map(Withholding::finish).unwrap_or_default();
        let populated = populated();
        add_withheld(&self.directory, &withheld.ranges, &populated)?;
        lengthen(&self.directory, &withheld.shortened, &populated)?;
        let pid_here = |image_pid| Some(*populated.iter().find(|(_, (pid, _))| *pid == image_pid)?.0);
        self.interrupted.repair_images(&self.directory, pid_here)?;
        let WithheldMemory { listed_mappings, objects: withheld_objects, .. } = withheld;
        Ok(SavedState { listed_mappings, withheld_objects, ..SavedState::read(&self.directory)? })
    }

    /// True if CRIU has ended, or would never answer.
    fn has_ended(&mut self) -> Result<bool, Error> {
        if self.attach_deadlock.look() {
            self.child.kill().map_err(Error::criu_io("end CRIU"))?;
        }
        Ok(self.child.try_wait().map_err(Error::criu_io("wait for CRIU"))?.is_some())
    }

    fn what(&self) -> String {
        format!("save the state of process {}", self.pid)
    }

    /// Why CRIU ended, from its log.
    fn failure(&self) -> Error {
        if tracer(self.pid).is_none() {
            return Error::criu_gone(self.pid);
        }
        if let Some(error) = self.machines.as_ref().and_then(Machines::take_error) {
            return error;
        }
        if self.attach_deadlock.is_found() {
            return Error::criu_failed(self.what(), EXECUTES);
        }
        let reason = errors_in_log(&self.directory.join(LOG));
        if self.submission.may_withhold && !may_withhold(&members(self.pid)) {
            return Error::criu_failed(self.what(), format!("{NEW_FILTER}; {reason}"));
        }
        let lacks_right = reason.contains("get rlimit");
        let error = Error::criu_failed(self.what(), reason);
        if !lacks_right {
            return error;
        }
        error.help(
            "saving a process of another user that has seccomp filters needs CAP_SYS_RESOURCE, which pagemark lacks \
             here (containers: --cap-add SYS_RESOURCE)",
        )
    }

    fn no_answer(&self, what: &str, limit: Duration) -> Error {
        Error::criu_no_answer(what, self.child.id(), limit.as_secs())
    }
}

impl Dump {
    /// Waits until CRIU has ended, and removes what it has left outside of the tree if it failed.
    fn failed(&mut self, error: Error) -> Error {
        self.end();
        match self.rules.take().filter(|_| self.has_failed()).map(|rules| rules.remove()) {
            Some(Err(left)) => error.help(left.to_string()),
            _ => error,
        }
    }

    /// Ends CRIU as soon as that is harmless.
    fn end(&mut self) {
        // It reads what is frozen.
        self.observing = None;
        self.socket = None;
        let deadline = Instant::now() + THAW_LIMIT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
        self.interrupted.resumed();
    }

    /// True if CRIU has ended, without success.
    fn has_failed(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(status)) if !status.success())
    }
}

impl Drop for Dump {
    fn drop(&mut self) {
        self.end();
        if let Some(rules) = self.rules.take().filter(|_| self.has_failed()) {
            // The caller has dropped the dump without its outcome, so there is nowhere to report this.
            let _ = rules.remove();
        }
    }
}

/// The processes of a tree; none if it is gone.
fn members(pid: i32) -> Vec<i32> {
    tree::members(pid).unwrap_or_default().iter().map(|member| member.process.pid).collect()
}

/// Names in CRIU's images what was withheld from it.
fn add_withheld(directory: &Path, withheld: &HashMap<i32, RangeSet>, populated: &Populated) -> Result<(), Error> {
    for (&pid, ranges) in withheld {
        let (image_pid, populated) = tracked(populated, pid)?;
        let path = directory.join(format!("pagemap-{image_pid}.img"));
        let mut pagemap = Pagemap::read(&path)?;
        pagemap.add_withheld(&ranges.intersection(populated));
        std::fs::write(&path, pagemap.encode()).map_err(Error::criu_io(format!("write {}", path.display())))?;
    }
    Ok(())
}

/// Gives the mappings that were shortened for CRIU their ends in its images.
fn lengthen(
    directory: &Path,
    shortened: &HashMap<i32, Vec<ShortenedMapping>>,
    populated: &Populated,
) -> Result<(), Error> {
    for (&pid, mappings) in shortened {
        let (image_pid, _) = tracked(populated, pid)?;
        shortened::lengthen(&directory.join(format!("mm-{image_pid}.img")), mappings)?;
    }
    Ok(())
}

fn tracked(populated: &Populated, pid: i32) -> Result<&(RecordedPid, RangeSet), Error> {
    populated.get(&pid).ok_or_else(|| {
        let reason = format!("it saved process {pid}, whose memory was not tracked");
        Error::criu_failed("leave the memory to Pagemark", reason)
    })
}

fn wait_readable(file: &File, at_most: Duration) -> Result<bool, Error> {
    use std::os::fd::AsFd;
    let mut fds = [PollFd::new(file.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(at_most).unwrap_or(PollTimeout::MAX);
    match poll(&mut fds, timeout) {
        Ok(count) => Ok(count > 0),
        Err(nix::errno::Errno::EINTR) => Ok(false),
        Err(error) => Err(Error::criu_io("wait for CRIU")(error.into())),
    }
}

/// Has CRIU begin in a session of its own, with the `inherited` descriptors, and outlive what ends
/// this process. Then `submit` is called, which makes only system calls.
fn stand_apart(
    command: &mut Command,
    options: &DumpOptions,
    inherited: [RawFd; 4],
    mut submit: impl FnMut() -> std::io::Result<()> + Send + Sync + 'static,
) {
    // CRIU leaves this control group: a kill of the whole group must not kill CRIU during a call that it
    // injects, and CRIU's memory is not charged to the group. CRIU's own modes need the groups it is in.
    let ways_out = if matches!(options.cgroups, Cgroups::Criu(_)) { Vec::new() } else { cgroups::ways_out() };
    // SAFETY: only system calls are made between fork and exec, which is allowed in a child of a
    // process with threads.
    unsafe {
        command.pre_exec(move || {
            stdio::begin_session_with(&inherited)?;
            cgroups::take(&ways_out);
            outlive_requests_to_end()?;
            submit()
        });
    }
}

/// What CRIU saved, in its images directory.
#[derive(Debug)]
pub struct SavedState {
    /// The files that belong to the checkpoint as they are. The content of the processes' private
    /// pages is not among them.
    pub files: Vec<PathBuf>,
    /// The processes, the root first.
    pub processes: Vec<ProcessImage>,
    /// How often Pagemark listed the mappings of a process for CRIU, without the walk of the page
    /// tables that CRIU's own way costs. Zero for small trees, and where the kernel cannot list
    /// them.
    pub listed_mappings: u32,
    /// The objects of shared memory whose content the images lack, as was asked for.
    pub withheld_objects: HashSet<ObjectId>,
}

/// The private memory of a process as CRIU's images describe it.
#[derive(Debug)]
pub struct ProcessImage {
    /// The process.
    pub pid: RecordedPid,
    /// Its pages that hold something, in ascending order. The content of those which are not
    /// present is Pagemark's to keep.
    pub runs: Vec<PageRun>,
    pages_path: PathBuf,
}

impl SavedState {
    /// Reads what a dump left in `directory`.
    ///
    /// # Errors
    /// [`ErrorKind::Image`] if an image can't be understood.
    pub fn read(directory: &Path) -> Result<SavedState, Error> {
        let mut processes = Vec::new();
        let mut pages_of_processes = Vec::new();
        for process in read_pstree(directory)? {
            let path = directory.join(format!("pagemap-{}.img", process.pid));
            // A zombie has no memory.
            if !path.exists() {
                continue;
            }
            let pagemap = Pagemap::read(&path)?;
            let pages_path = directory.join(format!("pages-{}.img", pagemap.pages_id));
            pages_of_processes.push(pages_path.clone());
            processes.push(ProcessImage { pid: process.pid.into(), runs: pagemap.runs().collect(), pages_path });
        }
        let mut files = Vec::new();
        let entries =
            std::fs::read_dir(directory).map_err(Error::criu_io(format!("read directory {}", directory.display())))?;
        for entry in entries {
            let path = entry.map_err(Error::criu_io(format!("read directory {}", directory.display())))?.path();
            let is_image = path.extension().is_some_and(|extension| extension == "img");
            let is_notes = path.file_name().is_some_and(|name| name == NOTES);
            if (is_image || is_notes) && !pages_of_processes.contains(&path) {
                files.push(path);
            }
        }
        files.sort();
        Ok(SavedState { files, processes, listed_mappings: 0, withheld_objects: HashSet::new() })
    }
}

/// The processes of an images directory, the root first.
pub(crate) fn read_pstree(directory: &Path) -> Result<Vec<PstreeEntry>, Error> {
    read_all(&directory.join("pstree.img"), images::ImageKind::Pstree)
}

/// Takes a page's number and its content.
pub type Visit<'a, E> = &'a mut dyn FnMut(u64, &[u8; PAGE_SIZE]) -> Result<(), E>;

impl ProcessImage {
    /// Visits each page whose content CRIU saved itself, as page number and content, in ascending
    /// order.
    ///
    /// # Errors
    /// The pages image could not be read, or what `visit` gives.
    pub fn for_each_present<E: From<Error>>(&self, visit: Visit<'_, E>) -> Result<(), E> {
        if !self.runs.iter().any(|run| run.present) {
            return Ok(());
        }
        let what = || format!("read {}", self.pages_path.display());
        let file = File::open(&self.pages_path).map_err(Error::criu_io(what()))?;
        let mut reader = std::io::BufReader::with_capacity(1 << 20, file);
        let mut page = [0; PAGE_SIZE];
        for run in self.runs.iter().filter(|run| run.present) {
            for number in run.page..run.page + run.pages {
                reader.read_exact(&mut page).map_err(Error::criu_io(what()))?;
                visit(number, &page)?;
            }
        }
        Ok(())
    }
}
