//! Memory that is delivered while the restored processes run.
//!
//! The processes get userfaultfds as for a [`delivery`](super::delivery) before they run, but the
//! gate is opened as soon as the page trees are read, which happens while CRIU starts. From then
//! on, one thread reads the events of all processes: it fills the pages for which threads wait,
//! then their neighbours, and follows the changes of mappings. Once the processes run and wait for
//! few pages, other threads read all pages in the order of the store, on all processors, and copy
//! them to where they belong. Processes that are forked meanwhile get their pages after the others.
//! When a process has all its pages, its userfaultfd is closed.
//!
//! Without the delivery, missing pages would become zeros. If a page is damaged, the processes are
//! killed before the userfaultfds are closed; if this process dies, its [`guard`](super::guard) kills them.

mod layout;
mod space;

use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use pagemark::store::Piece;
use pagemark::{ContentId, Kind, PAGE_SIZE, PageNumber, Store};
use pagemark_linux::proc::Process;
use pagemark_linux::userfaultfd::MissingPages;
use pagemark_trace::error::Error;
use pagemark_trace::leaving;

use super::attempt::Reached;
use super::before_they_run;
use super::connection::{Connection, POLL_MS, ReachedGate, no_script};
use super::gate::Gate;
use super::guard::Guard;
use super::images::{Prepared, RestoreOptions, Restored};
use super::memory::ProcessMemory;
use super::restoring::Restoring;
use crate::criu::Criu;
use space::{Filled, Requests, Space};

/// Pause between two reports of progress.
const PROGRESS: Duration = Duration::from_millis(20);

/// Milliseconds after which the thread that answers looks for processes that are gone.
const IDLE_MS: u16 = 100;

/// How often new processes are looked for after a fork.
const SCANS_AFTER_FORK: u32 = 3;

/// Limit of the pages that are delivered because of earlier faults, when another fault comes.
const MAX_AHEAD: usize = 256;

/// Pause until an event is read, or a change of mappings has ended.
const EVENT_WAIT: Duration = Duration::from_micros(50);

/// A program that has waited for no page for this long does not need all processors to itself.
const CALM: Duration = Duration::from_millis(5);

/// Divisor of the time until the processes run that gives the longest wait for a calm.
const CALM_SHARE: u32 = 8;

/// Pause between two looks whether a program is calm.
const CALM_POLL: Duration = Duration::from_millis(1);

/// How long processes that were killed may hold their memory.
const END_LIMIT: Duration = Duration::from_secs(2);

/// Processes that have not run, and of whose memory pages are missing: CRIU waits in the gate.
/// Dropped in this order.
pub(super) struct WaitingTree<'a> {
    gate: ReachedGate,
    restoring: Restoring,
    guard: Guard,
    delivery: Delivery<'a>,
    /// The processes, if they leave their machines.
    leaving: Option<Vec<Process>>,
}

/// Has CRIU restore the processes up to the gate.
///
/// # Errors
/// The processes were not restored. Nothing of the tree is left.
pub(super) fn make<'a>(
    gate: Gate,
    prepared: Prepared,
    memory: &[ProcessMemory],
    store: &'a (dyn Store + Sync),
    criu: &Criu,
    options: &RestoreOptions,
) -> Result<WaitingTree<'a>, Error> {
    prepared.check_free()?;
    let known_pids = prepared.pids_here();
    let script = gate.path();
    let mut connection = Connection::new(&prepared.directory, memory, gate, store)?;
    let directory = prepared.directory.clone();
    let delivery = Delivery::new(store).map_err(Error::criu_io("make a pipe"))?;
    let restoring = std::thread::scope(|scope| {
        // Where no thread can be created, and where a tree cannot be read, `add` reads it.
        let read_trees = || memory.iter().all(|memory| memory.pages(store).is_ok());
        drop(std::thread::Builder::new().name("pagemark-trees".into()).spawn_scoped(scope, read_trees));
        let mut failure = None;
        let mut lost_state = Vec::new();
        let mut restoring = prepared.begin(criu, options, &["--lazy-pages", "--action-script", &script])?;
        let reached = restoring.wait(&mut || {
            if failure.is_some() {
                std::thread::sleep(Duration::from_millis(u64::from(POLL_MS)));
                return Ok(false);
            }
            let step = connection.step().and_then(|is_reached| match is_reached {
                true => before_they_run(&directory, connection.root(), options)
                    .and_then(|lost| {
                        lost_state = lost;
                        delivery.add(connection.take_processes()?)
                    })
                    .map(|()| true),
                false => Ok(false),
            });
            step.or_else(|error| {
                // CRIU fails at the gate and kills the processes.
                connection.abandon();
                failure = Some(error);
                Ok(false)
            })
        });
        match reached {
            Ok(Reached::Gate) => {
                restoring.set_lost_state(lost_state);
                Ok(restoring)
            }
            Ok(Reached::End) => {
                restoring.refuse();
                Err(failure.unwrap_or_else(no_script))
            }
            Err(error) => Err(failure.unwrap_or(error)),
        }
    })?;
    let processes = connection.all_processes(known_pids.as_deref())?;
    let guard = Guard::start(&processes).map_err(Error::criu_io("start a guard"))?;
    let leaving = options.without_machine.then_some(processes);
    Ok(WaitingTree { gate: connection.take_gate()?, restoring, guard, delivery, leaving })
}

impl WaitingTree<'_> {
    /// Lets the processes run, and delivers their memory. Calls `running` once they run, whose
    /// result this returns, and `progress` with the pages that were delivered, and those that are
    /// delivered in all.
    ///
    /// # Errors
    /// The processes were not restored, or they were killed because a page could not be delivered.
    /// If it was reported that they run, they were killed.
    pub(super) fn open<T>(
        self,
        running: &mut dyn FnMut(Restored) -> T,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<T, Error> {
        let WaitingTree { gate, mut restoring, guard, delivery, leaving } = self;
        let restored = std::thread::scope(|scope| {
            // However this thread leaves, the others end.
            let _stop = StopOnDrop(&delivery);
            for work in [Delivery::answer, Delivery::fill_all] {
                let (thread, delivery) = (std::thread::Builder::new().name("pagemark-deliver".into()), &delivery);
                let started = thread.spawn_scoped(scope, move || delivery.finish(work(delivery)));
                started.map_err(Error::criu_io("start a thread"))?;
            }
            leaving.as_deref().map_or(Ok(()), leaving::begin)?;
            let _stream = gate.open()?;
            let mut is_killed = false;
            restoring.wait(&mut || {
                std::thread::sleep(Duration::from_millis(u64::from(POLL_MS)));
                is_killed = is_killed || delivery.kill_if_failed(&guard);
                Ok(false)
            })?;
            let restored = restoring.finish_restored()?;
            if is_killed || delivery.kill_if_failed(&guard) {
                return Err(Error::criu_failed("deliver memory", "the processes were killed"));
            }
            delivery.let_fill();
            let running = running(restored);
            delivery.wait(&guard, progress);
            delivery.kill_if_failed(&guard);
            Ok(running)
        });
        match delivery.take_failure() {
            Some(failure) => {
                delivery.end(guard);
                Err(failure)
            }
            None => restored,
        }
    }
}

/// A delivery to processes that run.
struct Delivery<'a> {
    store: &'a (dyn Store + Sync),
    spaces: Mutex<Spaces>,
    /// Notified when there are new spaces, and when the delivery ends.
    changed: Condvar,
    /// Wakes the thread that answers.
    wake: (PipeReader, PipeWriter),
    is_stopped: AtomicBool,
    failure: Mutex<Option<Error>>,
    done_pages: AtomicU64,
    total_pages: AtomicU64,
    /// Processes that were forked since they run.
    forks: AtomicU64,
    begin: Instant,
    /// When a thread last waited for a page, in µs since `begin`.
    last_fault_us: AtomicU64,
}

#[derive(Default)]
struct Spaces {
    /// Those that are not complete, or not known to be.
    open: Vec<Arc<Space>>,
    /// No space is added any more.
    is_ended: bool,
    /// The processes run: the pages for which none waits may be filled, from this time on at the
    /// latest.
    fill_from: Option<Instant>,
}

/// A page of a process.
type Fault = (Arc<Space>, PageNumber);

impl<'a> Delivery<'a> {
    fn new(store: &'a (dyn Store + Sync)) -> io::Result<Delivery<'a>> {
        Ok(Delivery {
            store,
            spaces: Mutex::default(),
            changed: Condvar::new(),
            wake: io::pipe()?,
            is_stopped: AtomicBool::new(false),
            failure: Mutex::default(),
            done_pages: AtomicU64::new(0),
            total_pages: AtomicU64::new(0),
            forks: AtomicU64::new(0),
            begin: Instant::now(),
            last_fault_us: AtomicU64::new(0),
        })
    }

    fn spaces(&self) -> MutexGuard<'_, Spaces> {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the processes of the checkpoint.
    fn add(&self, processes: Vec<(&ProcessMemory, Arc<MissingPages>)>) -> Result<(), Error> {
        for (memory, missing) in processes {
            let pages = memory.pages(self.store)?;
            self.add_space(Space::new(memory.pid, pages, missing, &memory.deliverable));
        }
        Ok(())
    }

    /// Lets the pages be filled for which no thread waits. The processes run.
    fn let_fill(&self) {
        let now = Instant::now();
        self.note_fault();
        self.spaces().fill_from = Some(now + now.duration_since(self.begin) / CALM_SHARE);
        self.changed.notify_all();
    }

    /// Notes that a thread waits for a page.
    fn note_fault(&self) {
        self.last_fault_us.store(self.begin.elapsed().as_micros() as u64, Ordering::Relaxed);
    }

    /// Waits until the processes run and their threads have waited for no page for a while, or have
    /// run for some time. Until then they need the processors.
    fn wait_for_calm(&self) {
        let mut spaces = self.spaces();
        let latest = loop {
            match spaces.fill_from {
                _ if spaces.is_ended => return,
                Some(latest) => break latest,
                None => spaces = self.changed.wait(spaces).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(spaces);
        let is_calm = || {
            let last_fault = Duration::from_micros(self.last_fault_us.load(Ordering::Relaxed));
            self.begin.elapsed() >= last_fault + CALM
        };
        while !self.is_stopped() && Instant::now() < latest && !is_calm() {
            std::thread::sleep(CALM_POLL);
        }
    }

    fn add_space(&self, space: Space) {
        self.total_pages.fetch_add(space.left_count() as u64, Ordering::Relaxed);
        self.spaces().open.push(Arc::new(space));
        self.changed.notify_all();
    }

    /// Has all threads end as soon as they can.
    fn stop(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.end_spaces();
        self.wake();
    }

    fn is_stopped(&self) -> bool {
        self.is_stopped.load(Ordering::Relaxed)
    }

    fn wake(&self) {
        // The pipe is full only if the thread is to wake up already.
        let _ = (&self.wake.1).write(&[0]);
    }

    fn end_spaces(&self) {
        self.spaces().is_ended = true;
        self.changed.notify_all();
    }

    /// Notes that a thread ends.
    fn finish(&self, result: Result<(), Error>) {
        if let Err(error) = result {
            self.failure().get_or_insert(error);
            self.stop();
        }
    }

    fn failure(&self) -> MutexGuard<'_, Option<Error>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_failure(&self) -> Option<Error> {
        self.failure().take()
    }

    /// Kills the processes if their memory cannot be delivered. True if it cannot.
    fn kill_if_failed(&self, guard: &Guard) -> bool {
        let has_failed = self.failure().is_some();
        if has_failed {
            guard.kill_tree();
        }
        has_failed
    }

    /// Waits until all memory is delivered, or that failed. Reports progress.
    fn wait(&self, guard: &Guard, progress: &mut dyn FnMut(u64, u64)) {
        let (mut forks, mut scans) = (0, 0);
        let mut spaces = self.spaces();
        while !spaces.is_ended {
            (spaces, _) = self.changed.wait_timeout(spaces, PROGRESS).unwrap_or_else(PoisonError::into_inner);
            drop(spaces);
            // A process that is forked has its id some time after the event.
            let forks_now = self.forks.load(Ordering::Relaxed);
            scans = if forks_now > forks { SCANS_AFTER_FORK } else { scans };
            forks = forks_now;
            if scans > 0 {
                guard.add_children();
                scans -= 1;
            }
            progress(self.done_pages.load(Ordering::Relaxed), self.total_pages.load(Ordering::Relaxed));
            spaces = self.spaces();
        }
    }

    /// Ends a delivery that failed, after the processes were killed.
    fn end(&self, guard: Guard) {
        let begin = Instant::now();
        let has_processes = || self.spaces().open.iter().any(|space| space.missing.has_process());
        while has_processes() {
            if begin.elapsed() > END_LIMIT {
                // The userfaultfds stay open.
                std::mem::forget(std::mem::take(&mut self.spaces().open));
                guard.leave();
                return;
            }
            std::thread::sleep(Duration::from_millis(u64::from(POLL_MS)));
        }
    }

    /// Answers the faults and follows the changes of mappings, until every process is complete.
    fn answer(&self) -> Result<(), Error> {
        let mut requests = Requests::default();
        let mut faults: Vec<Fault> = Vec::new();
        // Pages near those for which threads waited. The last come first.
        let mut ahead: Vec<(Arc<Space>, usize)> = Vec::new();
        while !self.is_stopped() {
            let spaces = {
                let mut spaces = self.spaces();
                // A process waits until its events are read, also one that has all pages, as long as another
                // thread holds its userfaultfd open.
                let is_held = |space: &Arc<Space>| !space.is_gone() && Arc::strong_count(space) > 1;
                spaces.open.retain(|space| !space.is_complete() || is_held(space));
                spaces.open.clone()
            };
            if spaces.is_empty() {
                self.end_spaces();
                return Ok(());
            }
            let is_idle = faults.is_empty() && ahead.is_empty();
            for space in self.wait_for_events(&spaces, is_idle)? {
                space.read_events(&mut requests)?;
                if !requests.faults.is_empty() {
                    self.note_fault();
                }
                faults.extend(requests.faults.drain(..).map(|page| (space.clone(), page)));
                for forked in requests.forked.drain(..) {
                    self.forks.fetch_add(1, Ordering::Relaxed);
                    self.add_space(forked);
                }
            }
            let mut unanswered = Vec::new();
            for (space, page) in faults.drain(..) {
                match self.answer_fault(&space, page)? {
                    Some(neighbours) => {
                        ahead.truncate(MAX_AHEAD);
                        ahead.extend(neighbours.into_iter().rev().map(|position| (space.clone(), position)));
                    }
                    None => unanswered.push((space, page)),
                }
            }
            faults = unanswered;
            if !faults.is_empty() {
                std::thread::sleep(EVENT_WAIT);
            } else if let Some((space, position)) = ahead.pop()
                && !space.is_done(position)
            {
                self.deliver(&space, position)?;
            }
        }
        Ok(())
    }

    /// The processes of which events wait to be read. Waits for events if there is nothing else to
    /// do.
    fn wait_for_events(&self, spaces: &[Arc<Space>], is_idle: bool) -> Result<Vec<Arc<Space>>, Error> {
        let mut watched = vec![PollFd::new(self.wake.0.as_fd(), PollFlags::POLLIN)];
        watched.extend(spaces.iter().map(|space| PollFd::new(space.missing.as_fd(), PollFlags::POLLIN)));
        let timeout = if is_idle { PollTimeout::from(IDLE_MS) } else { PollTimeout::ZERO };
        match poll(&mut watched, timeout) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok(Vec::new()),
            Err(error) => return Err(Error::criu_io("wait for page faults")(error.into())),
        }
        if watched[0].any() == Some(true) {
            (&self.wake.0).read(&mut [0; 64]).map_err(Error::criu_io("read a pipe"))?;
        }
        let is_ready = |space: &Space, polled: &PollFd| polled.any() != Some(false) || space.is_unsettled();
        let ready = spaces.iter().zip(&watched[1..]).filter(|(space, polled)| is_ready(space, polled));
        Ok(ready.map(|(space, _)| space.clone()).collect())
    }

    /// Fills a page for which a thread waits. Returns the positions of pages near it, or None if an
    /// event must be read first.
    fn answer_fault(&self, space: &Space, page: PageNumber) -> Result<Option<Vec<usize>>, Error> {
        let Some(position) = space.position(page) else {
            return Ok((!matches!(space.fill_with_zeros(page)?, Filled::Changing)).then(Vec::new));
        };
        let is_filled = self.deliver(space, position)?;
        Ok(is_filled.then(|| space.neighbours(position).collect()))
    }

    /// Delivers a page. False if an event must be read first.
    fn deliver(&self, space: &Space, position: usize) -> Result<bool, Error> {
        let mut content = [0; PAGE_SIZE];
        self.store.get_page(space.pages.ids[position], &mut content)?;
        let (filled, new_pages) = space.fill(position, &[content])?;
        self.done_pages.fetch_add(new_pages as u64, Ordering::Relaxed);
        Ok(!matches!(filled, Filled::Changing))
    }

    /// Fills all memory that is missing: first that of the processes of the checkpoint, then that
    /// of processes that were forked since.
    fn fill_all(&self) -> Result<(), Error> {
        self.wait_for_calm();
        loop {
            let mut spaces = self.spaces();
            let open = loop {
                if spaces.is_ended {
                    return Ok(());
                }
                let open: Vec<Arc<Space>> = spaces.open.iter().filter(|space| !space.is_complete()).cloned().collect();
                if !open.is_empty() {
                    break open;
                }
                self.wake();
                spaces = self.changed.wait(spaces).unwrap_or_else(PoisonError::into_inner);
            };
            drop(spaces);
            let has_first = open.iter().any(|space| !space.is_forked());
            let now: Vec<Arc<Space>> = open.into_iter().filter(|space| !has_first || !space.is_forked()).collect();
            self.fill_pass(&now)?;
        }
    }

    /// Fills what is missing in some processes.
    fn fill_pass(&self, spaces: &[Arc<Space>]) -> Result<(), Error> {
        let missing = spaces.iter().flat_map(|space| space.left().map(move |position| (space, position)));
        let missing: Vec<(&Arc<Space>, usize)> = missing.collect();
        let ids: Vec<ContentId> = missing.iter().map(|(space, position)| space.pages.ids[*position]).collect();
        let failure = Mutex::new(None);
        let follows = |a: &Piece, b: &Piece| {
            let ((a_space, a_position), (b_space, b_position)) = (missing[a.position], missing[b.position]);
            let is_next = Arc::ptr_eq(a_space, b_space) && a_position + 1 == b_position;
            is_next && a_space.follows(a_position) && a.bytes.end == b.bytes.start
        };
        self.store.get_many(Kind::Page, &ids, &|pieces, content| {
            for run in pieces.chunk_by(follows) {
                let (space, position) = missing[run[0].position];
                let content = &content[run[0].bytes.start..run[run.len() - 1].bytes.end];
                match self.fill_run(space, position, run.len(), content) {
                    Ok(ControlFlow::Continue(())) => {}
                    Ok(ControlFlow::Break(())) => return ControlFlow::Break(()),
                    Err(error) => {
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                        return ControlFlow::Break(());
                    }
                }
            }
            ControlFlow::Continue(())
        })?;
        failure.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }

    /// Fills pages whose numbers follow each other.
    fn fill_run(&self, space: &Space, position: usize, count: usize, content: &[u8]) -> Result<ControlFlow<()>, Error> {
        let (pages, rest) = content.as_chunks();
        if !rest.is_empty() || pages.len() != count {
            let page = space.pages.numbers[position].address();
            return Err(Error::damaged(format!("the content of page {:#x} is no page", page.get())));
        }
        let mut done = 0;
        while done < count {
            if self.is_stopped() {
                return Ok(ControlFlow::Break(()));
            }
            let (filled, new_pages) = space.fill(position + done, &pages[done..])?;
            self.done_pages.fetch_add(new_pages as u64, Ordering::Relaxed);
            match filled {
                Filled::Pages(filled) => done += filled,
                Filled::Changing => std::thread::sleep(EVENT_WAIT),
                Filled::Gone => break,
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// Has all threads of a delivery end.
struct StopOnDrop<'a>(&'a Delivery<'a>);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}
