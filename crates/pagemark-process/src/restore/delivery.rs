//! Memory that is delivered into the processes while CRIU restores the rest of them.
//!
//! CRIU makes the private anonymous mappings of the processes without their content, registers them
//! with a userfaultfd for each process (`--lazy-pages`), and sends the descriptors over a socket in
//! the images directory. Once every process has its mappings, CRIU waits in a [`Gate`]. The pages
//! are read from the store, in its order and on all processors, and copied into the processes. The
//! read of the page trees and then of the pages begins before CRIU is started: until CRIU waits in
//! the gate, pages are kept in memory, up to a limit. The gate is opened when all pages are there,
//! so no process runs before every page was checked.
//!
//! If a page or a page tree is damaged, or this process dies, the gate fails, and CRIU kills the
//! processes.

use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pagemark::repository::Manifest;
use pagemark::store::Piece;
use pagemark::{ByteCount, ContentId, Kind, PageNumber, Store};
use pagemark_linux::proc::system;
use pagemark_linux::userfaultfd::{MissingPages, probe_missing_pages};
use pagemark_trace::RecordedPid;
use pagemark_trace::error::{Error, ErrorKind};
use pagemark_trace::leaving;

use super::attempt::Reached;
use super::before_they_run;
use super::connection::{Connection, POLL_MS, ReachedGate, no_script, not_filled};
use super::gate::{Gate, SHELL};
use super::guard::Guard;
use super::images::{Prepared, RestoreOptions, Restored};
use super::memory::ProcessMemory;
use super::restoring::Restoring;
use crate::criu::Criu;

/// The most memory that is read before the processes have their mappings, bytes. Reading more than
/// this takes longer than CRIU takes to make the mappings of most processes.
const MAX_AHEAD_BYTES: u64 = 128 << 20;

/// Divisor of the available memory that gives the part for pages that are read ahead.
const AHEAD_SHARE: u64 = 8;

/// How the memory of a restore is delivered.
pub(super) struct Delivery {
    gate: Gate,
}

/// Why memory cannot be delivered into the processes, with what would enable it.
pub(super) type Refusal = String;

impl Delivery {
    /// Finds out whether memory can be delivered here.
    ///
    /// # Errors
    /// The reason why not.
    pub(super) fn find(manifest: &Manifest) -> Result<Delivery, Refusal> {
        probe_missing_pages().map_err(|error| {
            format!(
                "userfaultfd is refused ({error}): it needs CAP_SYS_PTRACE, and in containers a seccomp filter that \
                 allows it"
            )
        })?;
        if manifest.state.iter().any(|record| record.name.starts_with("userns-")) {
            return Err("the processes have a user namespace of their own, in which userfaultfd is refused".into());
        }
        // A container may have none.
        if !Path::new(SHELL).exists() {
            return Err(format!("the script that CRIU executes before the processes run needs {SHELL}"));
        }
        let gate = Gate::new().map_err(|error| {
            format!("files in memory may not be executed ({error}): sysctl vm.memfd_noexec=1 or lower allows it")
        })?;
        Ok(Delivery { gate })
    }

    /// Has CRIU restore the processes up to the gate, and delivers their memory. Calls `progress`
    /// with the bytes delivered so far.
    ///
    /// # Errors
    /// Those of [`Prepared::run`]; also if a page cannot be read. Nothing of the tree is left then.
    pub(super) fn make(
        self,
        prepared: Prepared,
        memory: &[ProcessMemory],
        store: &(dyn Store + Sync),
        criu: &Criu,
        options: &RestoreOptions,
        progress: &mut dyn FnMut(ByteCount),
    ) -> Result<WaitingTree, Error> {
        prepared.check_free()?;
        let state = FillState::new();
        let script = self.gate.path();
        let leaving = options.without_machine.then(|| prepared.pids_here());
        std::thread::scope(|scope| {
            let fill = Some(start_fill(memory, store, &state, scope)?);
            let connection = Connection::new(&prepared.directory, memory, self.gate, store)?;
            let images = (prepared.directory.clone(), options);
            let mut server =
                Server { connection, images, fill, state: &state, leaving, guard: None, lost_state: Vec::new() };
            let mut failure = None;
            let mut restoring = prepared.begin(criu, options, &["--lazy-pages", "--action-script", &script])?;
            let reached = restoring.wait(&mut || {
                let mut is_complete = false;
                if failure.is_none() {
                    match server.step() {
                        Ok(is_now) => is_complete = is_now,
                        Err(error) => {
                            // CRIU fails at the gate and kills the processes.
                            server.abandon();
                            failure = Some(error);
                        }
                    }
                }
                if failure.is_some() {
                    std::thread::sleep(std::time::Duration::from_millis(u64::from(POLL_MS)));
                }
                progress(ByteCount::of_pages(state.filled_pages.load(Ordering::Relaxed)));
                Ok(is_complete)
            });
            match (reached, failure) {
                (Ok(Reached::Gate), _) => {
                    let gate = server.connection.take_gate()?;
                    restoring.set_lost_state(std::mem::take(&mut server.lost_state));
                    Ok(WaitingTree { gate, restoring, _guard: server.guard.take() })
                }
                (Ok(Reached::End), failure) => {
                    server.abandon();
                    restoring.refuse();
                    Err(failure.unwrap_or_else(no_script))
                }
                // That a process is gone follows from what CRIU reports.
                (Err(error), Some(failure)) if failure.kind() == ErrorKind::Gone => Err(error),
                (Err(error), failure) => Err(failure.unwrap_or(error)),
            }
        })
    }

    /// The gate, for a delivery while the processes run.
    pub(super) fn into_gate(self) -> Gate {
        self.gate
    }
}

/// Processes that have all of their memory, and have not run: CRIU waits in the gate. Dropped in
/// this order.
pub(super) struct WaitingTree {
    gate: ReachedGate,
    restoring: Restoring,
    /// Kills the processes if this one dies while they leave their machines.
    _guard: Option<Guard>,
}

impl WaitingTree {
    /// Lets the processes run.
    ///
    /// # Errors
    /// Those of [`Prepared::run`]. Nothing of the tree is left.
    pub(super) fn open(self) -> Result<Restored, Error> {
        let _stream = self.gate.open()?;
        self.restoring.finish()
    }
}

/// Has CRIU restore the processes, whose memory is in the images, up to a gate where their files
/// are compared.
pub(super) fn make_staged(prepared: Prepared, criu: &Criu, options: &RestoreOptions) -> Result<WaitingTree, Error> {
    let mut gate = Gate::new().map_err(|error| {
        let error = Error::criu_io("make a file in memory that may be executed")(error);
        error.help("sysctl vm.memfd_noexec=1 or lower allows it")
    })?;
    let script = gate.path();
    let directory = prepared.directory.clone();
    let mut restoring = prepared.begin(criu, options, &["--action-script", &script])?;
    let reached = restoring.wait(&mut || {
        let mut reached = [PollFd::new(gate.reached(), PollFlags::POLLIN)];
        Ok(poll(&mut reached, PollTimeout::from(POLL_MS)).is_ok_and(|count| count > 0))
    })?;
    if reached == Reached::End {
        restoring.refuse();
        return Err(no_script());
    }
    let root = gate.take_root().map_err(Error::criu_io("wait for CRIU"))?;
    let mut waiting = WaitingTree { gate: ReachedGate::without_connection(gate), restoring, _guard: None };
    waiting.restoring.set_lost_state(before_they_run(&directory, root, options)?);
    Ok(waiting)
}

/// Begins to read the memory of all processes, and to fill it as soon as they have their mappings.
fn start_fill<'scope, 'env>(
    processes: &'env [ProcessMemory],
    store: &'env (dyn Store + Sync),
    state: &'env FillState,
    scope: &'scope Scope<'scope, 'env>,
) -> Result<Filling<'scope>, Error> {
    let thread = std::thread::Builder::new().name("pagemark-fill".into());
    let fill = thread.spawn_scoped(scope, move || {
        let mut fill = Fill { pages: Vec::new(), state };
        let mut ids = Vec::new();
        let incomplete = processes.iter().filter(|memory| !memory.delivered.is_empty());
        for (index, memory) in incomplete.enumerate() {
            let pages = memory.pages(store)?;
            fill.pages.extend(pages.numbers.iter().map(|&page| (index as u32, page)));
            ids.extend_from_slice(&pages.ids);
        }
        fill.run(&ids, store)
    });
    fill.map_err(Error::criu_io("start a thread"))
}

/// The processes whose memory is delivered, with the userfaultfd of each.
type Targets = Arc<[(RecordedPid, Arc<MissingPages>)]>;

/// What the filling threads share.
struct FillState {
    filled_pages: AtomicU64,
    is_stopped: AtomicBool,
    failure: Mutex<Option<Error>>,
    ahead: Mutex<Ahead>,
    /// Notified when the processes have their mappings, and when the filling is stopped.
    changed: Condvar,
}

/// What is read before the processes have their mappings.
struct Ahead {
    /// None until all processes have their mappings.
    targets: Option<Targets>,
    batches: Vec<(Vec<Piece>, Vec<u8>)>,
    /// How many bytes further batches may take up.
    room_bytes: u64,
}

impl FillState {
    fn new() -> FillState {
        let available_bytes = system::available_bytes().unwrap_or(0);
        let room_bytes = (available_bytes / AHEAD_SHARE).min(MAX_AHEAD_BYTES);
        FillState {
            filled_pages: AtomicU64::new(0),
            is_stopped: AtomicBool::new(false),
            failure: Mutex::default(),
            ahead: Mutex::new(Ahead { targets: None, batches: Vec::new(), room_bytes }),
            changed: Condvar::new(),
        }
    }

    fn ahead(&self) -> MutexGuard<'_, Ahead> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for_change<'a>(&self, ahead: MutexGuard<'a, Ahead>) -> MutexGuard<'a, Ahead> {
        self.changed.wait(ahead).unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the threads copy into the processes, or with None no longer.
    fn set_targets(&self, targets: Option<Targets>) {
        self.ahead().targets = targets;
        self.changed.notify_all();
    }

    /// Has all threads end as soon as they can.
    fn stop(&self) {
        let mut ahead = self.ahead();
        self.is_stopped.store(true, Ordering::Relaxed);
        ahead.targets = None;
        drop(ahead);
        self.changed.notify_all();
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    /// Keeps pages for later if the processes do not have their mappings yet; waits for the
    /// mappings where there is no room. Returns the processes once they have their mappings, and
    /// breaks if the filling is stopped.
    fn keep_or_wait(&self, pieces: &[Piece], content: &[u8]) -> ControlFlow<(), Option<Targets>> {
        let mut ahead = self.ahead();
        loop {
            if self.is_stopped() {
                return ControlFlow::Break(());
            }
            if let Some(targets) = &ahead.targets {
                return ControlFlow::Continue(Some(targets.clone()));
            }
            if let Some(left_bytes) = ahead.room_bytes.checked_sub(content.len() as u64) {
                ahead.room_bytes = left_bytes;
                drop(ahead);
                let batch = (pieces.to_vec(), content.to_vec());
                self.ahead().batches.push(batch);
                return ControlFlow::Continue(None);
            }
            ahead = self.wait_for_change(ahead);
        }
    }

    /// Waits until the processes have their mappings. None if the filling is stopped.
    fn wait_for_targets(&self) -> Option<Targets> {
        let mut ahead = self.ahead();
        while !self.is_stopped() && ahead.targets.is_none() {
            ahead = self.wait_for_change(ahead);
        }
        ahead.targets.clone()
    }
}

type Filling<'scope> = ScopedJoinHandle<'scope, Result<(), Error>>;

struct Server<'scope, 'env> {
    connection: Connection<'env>,
    /// The directory of the images, and the options of the restore.
    images: (PathBuf, &'env RestoreOptions),
    fill: Option<Filling<'scope>>,
    state: &'env FillState,
    /// The processes continue without their machines; their ids, if they are known.
    leaving: Option<Option<Vec<i32>>>,
    /// Kills the processes if this one dies while they leave their machines.
    guard: Option<Guard>,
    /// What of the state that CRIU does not save did not come back.
    lost_state: Vec<String>,
}

impl Drop for Server<'_, '_> {
    /// No thread waits for mappings any more.
    fn drop(&mut self) {
        self.abandon();
    }
}

impl Server<'_, '_> {
    /// Gives up: the gate fails, and nothing waits for a page any more.
    fn abandon(&mut self) {
        self.connection.abandon();
        self.state.stop();
    }

    /// Waits a moment for something to do, and does it. True once all pages are there.
    fn step(&mut self) -> Result<bool, Error> {
        if self.fill.as_ref().is_some_and(ScopedJoinHandle::is_finished)
            && let Some(fill) = self.fill.take()
        {
            let panicked = || Error::criu_io("fill memory")(io::Error::other("a thread panicked"));
            fill.join().map_err(|_| panicked())??;
            self.state.set_targets(None);
            if let Some(pids) = &self.leaving {
                let processes = self.connection.all_processes(pids.as_deref())?;
                self.guard = Some(Guard::start(&processes).map_err(Error::criu_io("start a guard"))?);
                leaving::begin(&processes)?;
            }
            return Ok(true);
        }
        if self.connection.step()? {
            self.lost_state = before_they_run(&self.images.0, self.connection.root(), self.images.1)?;
            self.state.set_targets(Some(self.connection.targets()?.into()));
        }
        Ok(false)
    }
}

/// The copy of pages into processes.
struct Fill<'a> {
    /// For each page that is read: an index into the [`Targets`], and the page.
    pages: Vec<(u32, PageNumber)>,
    state: &'a FillState,
}

impl Fill<'_> {
    fn run(&self, ids: &[ContentId], store: &dyn Store) -> Result<(), Error> {
        store.get_many(Kind::Page, ids, &|pieces, content| match self.visit(pieces, content) {
            Ok(flow) => flow,
            Err(error) => {
                self.state.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                ControlFlow::Break(())
            }
        })?;
        let failure = self.state.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        failure.map_or(Ok(()), Err)?;
        if let Some(targets) = self.state.wait_for_targets() {
            self.fill_from_ahead_in_parallel(&targets)?;
        }
        match self.state.filled_pages.load(Ordering::Relaxed) == ids.len() as u64 {
            true => Ok(()),
            false => Err(Error::criu_io("fill memory")(io::ErrorKind::Interrupted.into())),
        }
    }

    fn visit(&self, pieces: &[Piece], content: &[u8]) -> Result<ControlFlow<()>, Error> {
        match self.state.keep_or_wait(pieces, content) {
            ControlFlow::Break(()) => return Ok(ControlFlow::Break(())),
            ControlFlow::Continue(None) => {}
            ControlFlow::Continue(Some(targets)) => {
                self.fill_from_ahead(&targets)?;
                self.fill(&targets, pieces, content)?;
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Copies the pages that were read ahead, on all processors.
    fn fill_from_ahead_in_parallel(&self, targets: &Targets) -> Result<(), Error> {
        let thread_count = std::thread::available_parallelism().map_or(1, usize::from);
        let thread_count = thread_count.min(self.state.ahead().batches.len());
        std::thread::scope(|scope| {
            // Where no thread can be created, this thread does all the work.
            let start = |_| std::thread::Builder::new().spawn_scoped(scope, || self.fill_from_ahead(targets)).ok();
            let others: Vec<_> = (1..thread_count).filter_map(start).collect();
            let panicked = |_| Err(Error::criu_io("fill memory")(io::Error::other("a thread panicked")));
            let filled = self.fill_from_ahead(targets);
            others.into_iter().map(|other| other.join().unwrap_or_else(panicked)).fold(filled, Result::and)
        })
    }

    /// Copies the pages that were read ahead and that no other thread copies.
    fn fill_from_ahead(&self, targets: &Targets) -> Result<(), Error> {
        loop {
            let batch = if self.state.is_stopped() { None } else { self.state.ahead().batches.pop() };
            let Some((pieces, content)) = batch else { return Ok(()) };
            self.fill(targets, &pieces, &content)?;
        }
    }

    /// Copies pages that were read to where they belong, neighbours at once.
    fn fill(&self, targets: &Targets, pieces: &[Piece], content: &[u8]) -> Result<(), Error> {
        let follows = |a: &Piece, b: &Piece| {
            let (a_page, b_page) = (self.pages[a.position], self.pages[b.position]);
            (a_page.0, a_page.1 + 1) == b_page && a.bytes.end == b.bytes.start
        };
        for run in pieces.chunk_by(follows) {
            let (space, page) = self.pages[run[0].position];
            let (pid, missing) = &targets[space as usize];
            let (pages, rest) = content[run[0].bytes.start..run[run.len() - 1].bytes.end].as_chunks();
            if !rest.is_empty() || pages.len() != run.len() {
                return Err(Error::damaged(format!("the content of page {:#x} is no page", page.address().get())));
            }
            missing.fill(page.address(), pages).map_err(|error| not_filled(*pid, page.address(), error))?;
            self.state.filled_pages.fetch_add(run.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A state with room for one batch of [`CONTENT`], which it has.
    fn full() -> FillState {
        let state = FillState::new();
        state.ahead().room_bytes = CONTENT.len() as u64;
        assert!(matches!(state.keep_or_wait(&[], CONTENT), ControlFlow::Continue(None)));
        state
    }

    const CONTENT: &[u8] = b"content";

    #[test]
    fn what_has_no_room_waits_for_the_mappings() {
        let state = full();
        std::thread::scope(|scope| {
            let waiting = [(); 2].map(|()| scope.spawn(|| state.keep_or_wait(&[], CONTENT)));
            let last = scope.spawn(|| state.wait_for_targets());
            state.set_targets(Some([].into()));
            for waiting in waiting {
                assert!(matches!(waiting.join().unwrap(), ControlFlow::Continue(Some(_))));
            }
            assert!(last.join().unwrap().is_some());
        });
        assert_eq!(state.ahead().batches.len(), 1);
    }

    #[test]
    fn nothing_waits_once_the_filling_is_stopped() {
        let state = full();
        std::thread::scope(|scope| {
            let waiting = [(); 2].map(|()| scope.spawn(|| state.keep_or_wait(&[], CONTENT)));
            let last = scope.spawn(|| state.wait_for_targets());
            state.stop();
            for waiting in waiting {
                assert!(waiting.join().unwrap().is_break());
            }
            assert!(last.join().unwrap().is_none());
        });
    }
}
