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
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pagemark::sys::proc::{self, Status, tree};
use pagemark::sys::{pagemap, pidfd};
use pagemark::{PAGE_SIZE, RangeSet};

use super::connections::{Rules, Sockets};
use super::guard::Guard;
use super::images::schema::PstreeEntry;
use super::images::{PageRun, Pagemap, read_all};
use super::interrupted::Interrupted;
use super::machines::Machines;
use super::notify::Submitted;
use super::outside_files::{self, OutsideFile};
use super::shortened::{self, Shortened};
use super::stdio::{self, Outside};
use super::sysv_memory::{self, Segment};
use super::sysv_semaphores::{self, SemaphoreSet};
use super::withhold::{Withheld, Withholding};
use super::{CAP_SYS_RESOURCE, Criu, errors_in_log, has_capability, images, kernel_data, outside_sockets, smaps};
use crate::cgroups::{self, Cgroups, Memberships};
use crate::container::network::{self, OwnNetwork};
use crate::container::{self, FileLocation, FirstProcess, HostPaths};
use crate::error::{Error, ErrorKind, Object};
use crate::files::encode_path;
use crate::objects::ObjectId;
use crate::parked;
use crate::scratch;
use crate::spawn::FROM_OUTSIDE;

/// CRIU's log in the images directory.
const LOG: &str = "dump.log";

/// What Pagemark itself has to remember for the restore, in the images directory.
pub(crate) const NOTES: &str = "pagemark.json";

/// How long CRIU may take to save the state. Its own limit for freezing is 10 s.
const SAVE_LIMIT: Duration = Duration::from_secs(120);

/// How long CRIU may take to let the tree resume.
const THAW_LIMIT: Duration = Duration::from_secs(30);

/// Pause between two polls of the state of the tree, or of CRIU.
const POLL: Duration = Duration::from_micros(200);

/// Message of CRIU's page protocol that ends the page server: command, pages, address, image; 32
/// bytes with padding.
const FORCE_CLOSE: u32 = 0x1024;

/// What to save, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DumpOptions {
    /// Saves established TCP connections too. Without it they are restored closed, and never
    /// disturbed by the dump.
    pub keep_connections: bool,
    /// What becomes of control groups.
    pub cgroups: Cgroups,
    /// Saves the interfaces, addresses, routes, rules and settings of the network, if the tree has
    /// one of its own. CRIU executes some ten programs for it in the freeze.
    pub save_network: bool,
}

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
    /// The network of a tree that has one of its own.
    #[serde(default)]
    pub own_network: Option<OwnNetwork>,
    /// The root process, if it is the first process of a namespace of process ids: a restore makes
    /// a new namespace, in which no id is in use.
    #[serde(default)]
    pub first_process: Option<FirstProcess>,
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
}

/// A process in a machine.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct InMachine {
    /// Its id in the images.
    pub pid: i32,
    /// Where the program's file has its first instruction.
    pub program_entry: u64,
}

/// By process: its id in the images, and the pages of its private mappings that held data in the
/// freeze.
pub type Populated = HashMap<i32, (i32, RangeSet)>;

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
    withholding: Option<Withholding>,
    /// CRIU is to ask Pagemark for the mappings of the processes.
    lists_mappings: bool,
    /// Processes have System V shared memory attached that CRIU is not to learn of.
    has_segments: bool,
    interrupted: Interrupted,
    watch: Watch,
    state_saved_at: Option<Instant>,
    /// Processes that run in machines, if there are any.
    machines: Option<Machines>,
    /// None once CRIU's rules are removed, or if it makes none.
    rules: Option<Rules>,
    /// Waited for when CRIU has ended.
    _guard: Option<Guard>,
}

/// Sees when the tree is frozen, whatever Pagemark does meanwhile: what is not seen would not count
/// as downtime.
#[derive(Debug)]
struct Watch {
    shared: Arc<Watched>,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Watched {
    frozen_at: OnceLock<Instant>,
    is_over: AtomicBool,
}

impl Watch {
    fn start(pid: i32, criu_pid: i32) -> std::io::Result<Watch> {
        let shared = Arc::new(Watched::default());
        let watched = shared.clone();
        let thread = std::thread::Builder::new().name("pagemark-watch".into()).spawn(move || {
            while !watched.is_over.load(Ordering::Relaxed) {
                match tracer(pid) {
                    Some(tracer) if tracer == criu_pid => {
                        let _ = watched.frozen_at.set(Instant::now());
                        return;
                    }
                    Some(_) => std::thread::sleep(POLL),
                    None => return,
                }
            }
        })?;
        Ok(Watch { shared, thread: Some(thread) })
    }

    fn frozen_at(&self) -> Option<Instant> {
        self.shared.frozen_at.get().copied()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It does not panic.
            let _ = thread.join();
        }
    }
}

impl Dump {
    /// Starts CRIU and returns at once. The tree under `pid` keeps running for some 40 ms, then it
    /// is frozen. CRIU writes its images into `directory`, which must exist and be empty. The
    /// images hold secrets of the processes, so the directory should be its owner's alone.
    ///
    /// # Errors
    /// [`ErrorKind::Gone`], or CRIU could not be started.
    pub fn start(criu: &Criu, pid: i32, directory: &Path, options: &DumpOptions) -> Result<Dump, Error> {
        Dump::start_without(criu, pid, directory, options, &HashSet::new())
    }

    /// As [`Dump::start`], without the content of these objects of shared memory. Where it cannot
    /// be withheld from CRIU, the images have it; see [`SavedState::withheld_objects`].
    ///
    /// # Errors
    /// As [`Dump::start`].
    pub fn start_without(
        criu: &Criu,
        pid: i32,
        directory: &Path,
        options: &DumpOptions,
        objects: &HashSet<ObjectId>,
    ) -> Result<Dump, Error> {
        let tree = tree::members(pid).map_err(|_| Error::criu_gone(pid))?;
        let tree: Vec<i32> = tree.iter().map(|member| member.pid).collect();
        let notes = Notes {
            keep_connections: options.keep_connections,
            shell_job: nix::unistd::getsid(Some(nix::unistd::Pid::from_raw(pid)))
                .map_err(|_| Error::criu_gone(pid))?
                .as_raw()
                != pid,
            outside: stdio::find_outside(&tree),
            working_directories: working_directories(&tree),
            cgroups: options.cgroups,
            memberships: Memberships::new(),
            own_root: own_root(pid)?,
            outside_files: Vec::new(),
            own_network: OwnNetwork::of_process(pid, options.save_network).map_err(|_| Error::criu_gone(pid))?,
            first_process: FirstProcess::of_container(pid),
            segments: Vec::new(),
            semaphores: Vec::new(),
            closed_sockets: Vec::new(),
            in_machines: Vec::new(),
        };
        let outside_files = if notes.own_root.is_some() { outside_files::find(&tree) } else { Vec::new() };
        let notes = Notes { outside_files, ..notes };
        write_notes(directory, &notes)?;

        let io = |what: &str| Error::criu_io(format!("{what} for CRIU"));
        let (socket, page_server) = UnixStream::pair().map_err(io("make a socket pair"))?;
        let (status_read, status_write) =
            nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).map_err(|e| io("make a pipe")(e.into()))?;

        let mut command = criu.command("dump", directory, LOG);
        command.args(["-t", &pid.to_string(), "--lazy-pages", "--leave-running", "--file-locks", "--skip-in-flight"]);
        command.args(["--ghost-limit", "1073741824", "--ext-unix-sk"]);
        command.arg(format!("--manage-cgroups={}", options.cgroups.criu_mode()));
        command.args(["--ps-socket", &page_server.as_raw_fd().to_string()]);
        command.args(["--status-fd", &status_write.as_raw_fd().to_string()]);
        command.arg(if options.keep_connections { "--tcp-established" } else { "--tcp-close" });
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
        command.args(outside_sockets::dump_arguments(&tree));
        // CRIU also gets the reading end of its status pipe: if Pagemark is killed, writing to it must not
        // fail. And the directory: it is not left over while CRIU writes into it.
        let images = scratch::hold(directory).map_err(io(&format!("hold {}", directory.display())))?;
        let inherited =
            [page_server.as_raw_fd(), status_write.as_raw_fd(), status_read.as_raw_fd(), images.as_raw_fd()];
        let (receiver, sender) = UnixStream::pair().map_err(io("make a socket pair"))?;
        let sender_number = sender.as_raw_fd();
        let with_limits = !has_capability(CAP_SYS_RESOURCE);
        // Without PAGEMAP_SCAN, CRIU reads pagemap itself.
        let may_withhold = may_withhold(&tree);
        let has_segments = sysv_memory::is_used(&tree);
        let mappings = may_withhold && (has_segments || smaps::pays(&tree));
        // The calls that are left to the kernel need Linux 5.5; the interface is as old as 5.6.
        let registers = pidfd::GET_DESCRIPTOR.is_there();
        let data = !objects.is_empty();
        let machines = Machines::of_tree(pid, &tree, &criu.interrupted);
        let stops = registers || machines.is_some();
        let withhold =
            (pagemap::SCAN.is_there() || with_limits || mappings || registers || data || stops) && may_withhold;
        let files = kernel_data::is_needed();
        let submitted = Submitted { limits: with_limits, files, mappings, registers, data, stops };
        // What matters of a process shows at its first thread.
        let others =
            tree.iter().flat_map(|&pid| proc::threads(pid).unwrap_or_default().into_iter().filter(move |&t| t != pid));
        let mut filter = super::notify::filter(submitted, &others.collect::<Vec<i32>>());
        // SAFETY: only system calls are made between fork and exec, which is allowed in a child of a
        // process with threads.
        unsafe {
            command.pre_exec(move || {
                stdio::begin_session_with(&inherited)?;
                outlive_requests_to_end()?;
                if withhold { super::notify::submit(sender_number, &mut filter) } else { Ok(()) }
            });
        }
        criu.interrupted.observe(&tree);
        let connections = options.keep_connections.then(|| {
            let rules = Rules::of_tree(pid, &tree, notes.own_network.is_some()).map_err(|_| Error::criu_gone(pid))?;
            Ok::<_, Error>((rules, Sockets::of_tree(&tree)))
        });
        let (rules, sockets) = connections.transpose()?.unzip();
        let child = command.spawn().map_err(io(&format!("start {}", criu.path().display())))?;
        let guard = Guard::start(child.id() as i32, pid, &tree, sockets).map_err(io("start a guard"))?;
        let watch = Watch::start(pid, child.id() as i32).map_err(io("start a thread"))?;
        let withholding =
            withhold.then(|| Withholding::start(&receiver, tree, objects, criu, submitted, machines.clone()));
        let withholding = withholding.transpose().map_err(io("answer system calls"))?.flatten();
        if let (None, Some(machines)) = (&withholding, &machines) {
            // Nobody says when CRIU attaches: the processes wait while it starts. An error is that of the dump.
            machines.park();
        }
        Ok(Dump {
            pid,
            directory: directory.into(),
            notes,
            child,
            socket: Some(socket),
            status: File::from(status_read),
            withholding,
            lists_mappings: mappings,
            has_segments,
            interrupted: criu.interrupted.clone(),
            watch,
            state_saved_at: None,
            machines,
            rules,
            _guard: guard,
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
            tracer(self.pid).ok_or_else(|| Error::criu_gone(self.pid))?;
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
        if !self.lists_mappings {
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
        // The tree is still frozen. Only the ids of a container are others in the images.
        let pid = self.pid;
        let pids = LazyCell::new(|| members(pid));
        let image_id = if self.notes.first_process.is_some() { container::image_id } else { std::convert::identity };
        if self.notes.cgroups == Cgroups::Restore {
            self.notes.memberships = cgroups::memberships(&pids, image_id);
        }
        if self.machines.is_some() {
            let in_machine = |&pid: &i32| {
                let program_entry = parked::program_entry(pid)?.get();
                Some(InMachine { pid: image_id(pid), program_entry })
            };
            self.notes.in_machines = pids.iter().filter_map(in_machine).collect();
        }
        if self.has_segments {
            self.notes.segments = sysv_memory::find(&pids, image_id)?;
        }
        self.notes.semaphores = sysv_semaphores::find(pid, || &pids)?;
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
        if !status.success() {
            return Err(self.failure());
        }
        let thawed_at = thawed_at.unwrap_or_else(Instant::now);
        let closed = outside_sockets::close(&self.directory)?;
        self.notes.closed_sockets = closed.connections;
        self.notes.outside.extend(closed.streams);
        write_notes(&self.directory, &self.notes)?;
        let withheld = self.withholding.take().map(Withholding::finish).unwrap_or_default();
        let populated = populated();
        add_withheld(&self.directory, &withheld.ranges, &populated)?;
        lengthen(&self.directory, &withheld.shortened, &populated)?;
        let host_id = |image_pid| Some(*populated.iter().find(|(_, (pid, _))| *pid == image_pid)?.0);
        self.interrupted.repair_images(&self.directory, host_id)?;
        let Withheld { listed_mappings, objects: withheld_objects, .. } = withheld;
        let state = SavedState { listed_mappings, withheld_objects, ..SavedState::read(&self.directory)? };
        Ok((Timings { frozen_at, state_saved_at, thawed_at }, state))
    }

    fn has_ended(&mut self) -> Result<bool, Error> {
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
        let reason = errors_in_log(&self.directory.join(LOG));
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
        self.socket = None;
        let deadline = Instant::now() + THAW_LIMIT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < deadline {
            std::thread::sleep(POLL);
        }
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
            // Nobody has asked for the outcome of this dump, so nobody hears of this either.
            let _ = rules.remove();
        }
    }
}

/// The processes of a tree; none if it is gone.
fn members(pid: i32) -> Vec<i32> {
    tree::members(pid).unwrap_or_default().iter().map(|member| member.pid).collect()
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
fn lengthen(directory: &Path, shortened: &HashMap<i32, Vec<Shortened>>, populated: &Populated) -> Result<(), Error> {
    for (&pid, mappings) in shortened {
        let (image_pid, _) = tracked(populated, pid)?;
        shortened::lengthen(&directory.join(format!("mm-{image_pid}.img")), mappings)?;
    }
    Ok(())
}

fn tracked(populated: &Populated, pid: i32) -> Result<&(i32, RangeSet), Error> {
    populated.get(&pid).ok_or_else(|| {
        let reason = format!("it saved process {pid}, whose memory was not tracked");
        Error::criu_failed("leave the memory to Pagemark", reason)
    })
}

/// True if memory of a tree of these processes can be withheld from CRIU. A filtered process may
/// not suspend the filters of another, which CRIU has to if the tree has any.
pub(crate) fn may_withhold(pids: &[i32]) -> bool {
    !pids.iter().any(|pid| has_seccomp(*pid))
}

/// True if a process or one of its threads is under a seccomp filter.
fn has_seccomp(pid: i32) -> bool {
    let threads = proc::threads(pid).unwrap_or_default();
    threads.into_iter().any(|thread| Status::read(thread).is_ok_and(|status| status.seccomp_mode != 0))
}

/// True if a process holds a lease on a file.
fn has_lease(pid: i32) -> bool {
    let descriptors = proc::descriptors(pid).unwrap_or_default();
    descriptors.iter().any(|descriptor| descriptor.has_lease().unwrap_or(false))
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

/// The tracer of a process; zero if there is none. None if the process is gone.
fn tracer(pid: i32) -> Option<i32> {
    Status::read(pid).ok().filter(|status| !status.is_dead()).map(|status| status.tracer_pid)
}

/// In a process that was just forked: ignores the signals by which service managers, terminals and
/// users ask a process to end, and exempts it from the out-of-memory killer where that is
/// permitted. CRIU would end at once, whatever code of its own a target executes. Makes only system
/// calls.
pub(crate) fn outlive_requests_to_end() -> std::io::Result<()> {
    use nix::sys::signal::{SigHandler, Signal, signal};
    for number in FROM_OUTSIDE.into_iter().chain([Signal::SIGXCPU]) {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { signal(number, SigHandler::SigIgn)? };
    }
    // SAFETY: the path ends with a zero byte, the buffer lives through the call, and the descriptor that
    // is closed is the one that was just opened.
    unsafe {
        let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if file >= 0 {
            // Not permitted without CAP_SYS_RESOURCE, which `pagemark doctor` reports.
            libc::write(file, c"-1000".as_ptr().cast(), 5);
            libc::close(file);
        }
    }
    Ok(())
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
fn working_directories(tree: &[i32]) -> Vec<String> {
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

fn write_notes(directory: &Path, notes: &Notes) -> Result<(), Error> {
    let path = directory.join(NOTES);
    let text = serde_json::to_vec(notes).map_err(|e| Error::criu_io(format!("write {}", path.display()))(e.into()))?;
    std::fs::write(&path, text).map_err(Error::criu_io(format!("write {}", path.display())))
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
    pub pid: i32,
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
            processes.push(ProcessImage { pid: process.pid as i32, runs: pagemap.runs().collect(), pages_path });
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
