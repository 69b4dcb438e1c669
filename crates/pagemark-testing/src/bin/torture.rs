//! `torture DIRECTORY`: eight threads with much of the state that is hard to checkpoint, which
//! check that state.
//!
//! Money moves between accounts under a mutex; thread-local data lies between canaries; memory is
//! mapped, grown, moved and unmapped, and the heap grows; one signal is pending for the process and
//! one for each thread, and must stay pending; an interval timer, a POSIX timer and a timerfd must
//! continue to expire.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read};
use std::mem::{self, ManuallyDrop};
use std::os::fd::FromRawFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

use pagemark_testing::{FilledMapping, Report, SplitMix};

const WORKERS: u64 = 6;
const ACCOUNTS: usize = 64;
const MONEY: u64 = 1_000_000;
const PAGE: usize = 4096;
const TICK: Duration = Duration::from_millis(20);
/// A timer that does not expire for this number of rounds of 20 ms has stopped.
const SILENT_ROUNDS: u32 = 500;

static ALARMS: AtomicU64 = AtomicU64::new(0);
static TIMER_SIGNALS: AtomicU64 = AtomicU64::new(0);
static TIMERFD_TICKS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static LOCAL: RefCell<Local> = const { RefCell::new(Local { before: [0; 32], counter: 0, behind: [0; 32] }) };
}

/// Thread-local data between canaries.
struct Local {
    before: [u64; 32],
    counter: u64,
    behind: [u64; 32],
}

type Bank = Arc<Mutex<[u64; ACCOUNTS]>>;

fn main() {
    let mut report = Report::from_arguments();
    let bank: Bank = Arc::new(Mutex::new([MONEY; ACCOUNTS]));
    if let Err(error) = prepare_signals().and_then(|()| start_timers()) {
        eprintln!("set up signals and timers: {error}");
        std::process::exit(2);
    }
    // Six workers, the reader of the timerfd and this thread are eight.
    let (problem, problems) = mpsc::channel::<String>();
    for worker in 0..WORKERS {
        let (bank, problem) = (bank.clone(), problem.clone());
        std::thread::spawn(move || {
            let error = Worker::new(worker, bank).run();
            let _ = problem.send(format!("worker {worker}: {error}"));
        });
    }
    std::thread::spawn(move || {
        let error = read_timerfd();
        let _ = problem.send(format!("timerfd: {error}"));
    });

    let timers = [("interval timer", &ALARMS), ("POSIX timer", &TIMER_SIGNALS), ("timerfd", &TIMERFD_TICKS)];
    let mut last = [(0, 0); 3];
    let mut heap = Heap::default();
    loop {
        if let Ok(message) = problems.recv_timeout(TICK) {
            report.require(false, message);
        }
        report.require(is_pending(libc::SIGUSR1), "the signal that was pending for the process is gone");
        for ((name, count), (seen, silent)) in timers.iter().zip(&mut last) {
            let now = count.load(Ordering::Relaxed);
            *silent = if now == *seen { *silent + 1 } else { 0 };
            *seen = now;
            report
                .require(*silent < SILENT_ROUNDS, format_args!("the {name} has stopped after it expired {now} times"));
        }
        if let Err(wrong) = heap.round(report.rounds()) {
            report.require(false, format_args!("heap: {wrong}"));
        }
        report.ok();
    }
}

/// The state of one thread.
struct Worker {
    number: u64,
    random: SplitMix,
    bank: Bank,
    regions: Vec<FilledMapping>,
    thread_id: i32,
    rounds: u64,
}

impl Worker {
    fn new(number: u64, bank: Bank) -> Worker {
        let random = SplitMix(number << 32);
        Worker { number, random, bank, regions: Vec::new(), thread_id: thread_id(), rounds: 0 }
    }

    /// Works until an invariant is violated; returns the problem.
    fn run(mut self) -> String {
        let canary = self.canary();
        LOCAL.with_borrow_mut(|local| (local.before, local.behind) = (canary, canary));
        // SAFETY: the call sends a blocked signal to this thread.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGUSR2) };
        loop {
            self.rounds += 1;
            let done = self.bank().and_then(|()| self.local()).and_then(|()| self.memory()).and_then(|()| self.own());
            if let Err(wrong) = done {
                return wrong;
            }
            if self.rounds.is_multiple_of(16) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    fn bank(&mut self) -> Result<(), String> {
        let mut accounts = self.bank.lock().unwrap_or_else(PoisonError::into_inner);
        let from = self.random.below(ACCOUNTS as u64) as usize;
        let to = self.random.below(ACCOUNTS as u64) as usize;
        let amount = self.random.below(accounts[from] + 1);
        accounts[from] -= amount;
        accounts[to] += amount;
        let (sum, expected) = (accounts.iter().sum::<u64>(), MONEY * ACCOUNTS as u64);
        if sum == expected { Ok(()) } else { Err(format!("the accounts hold {sum}, not {expected}")) }
    }

    fn canary(&self) -> [u64; 32] {
        std::array::from_fn(|index| pagemark_testing::expected(self.number, index))
    }

    fn local(&self) -> Result<(), String> {
        let canary = self.canary();
        LOCAL.with_borrow_mut(|local| {
            local.counter += 1;
            if (local.before, local.counter, local.behind) == (canary, self.rounds, canary) {
                Ok(())
            } else {
                Err(format!("thread-local data is wrong in round {}: the counter is {}", self.rounds, local.counter))
            }
        })
    }

    /// Maps, fills, grows, moves, shrinks, checks and unmaps.
    fn memory(&mut self) -> Result<(), String> {
        let seed = self.random.draw();
        let bytes = PAGE * (1 + self.random.below(32) as usize);
        let pick = self.random.below(8) as usize;
        let failed = |error: io::Error| format!("memory: {error}");
        match (self.regions.get_mut(pick), self.random.below(4)) {
            (None, _) => self.regions.push(FilledMapping::map(bytes, seed, None, false).map_err(failed)?),
            (Some(region), 0) => region.resize(bytes).map_err(failed)?,
            (Some(region), 1) => region.fill(seed),
            (Some(_), 2) => drop(self.regions.swap_remove(pick)),
            (Some(region), _) => check(region)?,
        }
        Ok(())
    }

    fn own(&self) -> Result<(), String> {
        if thread_id() != self.thread_id {
            return Err(format!("thread {} is now {}", self.thread_id, thread_id()));
        }
        if is_pending(libc::SIGUSR2) {
            Ok(())
        } else {
            Err("the signal that was pending for the thread is gone".into())
        }
    }
}

fn check(region: &mut FilledMapping) -> Result<(), String> {
    match region.damage() {
        None => Ok(()),
        Some((address, word)) => Err(format!("memory at {address:#x} holds {word:#x}")),
    }
}

fn thread_id() -> i32 {
    // SAFETY: the call accesses no memory.
    unsafe { libc::gettid() }
}

/// The memory by which the program has moved the end of the heap. Only the main thread moves it:
/// the C library's allocator uses the heap for that thread alone.
#[derive(Default)]
struct Heap {
    added: Vec<ManuallyDrop<FilledMapping>>,
}

impl Heap {
    const MAX_PARTS: usize = 256;

    fn round(&mut self, round: u64) -> Result<(), String> {
        if round.is_multiple_of(8) && self.added.len() < Heap::MAX_PARTS {
            self.added.push(extend_heap(16 * PAGE, round).map_err(|error| format!("sbrk: {error}"))?);
        }
        if !self.added.is_empty() {
            let turn = round as usize % self.added.len();
            check(&mut self.added[turn])?;
            self.added[turn].fill(round << 8);
        }
        self.added.iter_mut().try_for_each(|region| check(region))
    }
}

/// Moves the end of the heap by `bytes`, and fills the new memory.
fn extend_heap(bytes: usize, seed: u64) -> io::Result<ManuallyDrop<FilledMapping>> {
    // SAFETY: the call grows the heap; the allocator allows other callers of `sbrk`.
    let start = unsafe { libc::sbrk(bytes as isize) };
    if start as isize == -1 {
        return Err(io::Error::last_os_error());
    }
    let shift = start.align_offset(mem::align_of::<u64>());
    // SAFETY: the memory that `sbrk` added belongs to its caller for ever, and contains the part
    // from the next word on.
    Ok(unsafe { FilledMapping::adopt(start.add(shift).cast(), bytes - PAGE, seed) })
}

extern "C" fn count_alarm(_signal: i32) {
    ALARMS.fetch_add(1, Ordering::Relaxed);
}

extern "C" fn count_timer(_signal: i32) {
    TIMER_SIGNALS.fetch_add(1, Ordering::Relaxed);
}

fn succeeded(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Blocks the signals that are to stay pending, in this thread and those that it starts, makes one
/// of them pending, and installs the handlers of the timers' signals.
fn prepare_signals() -> io::Result<()> {
    // SAFETY: `set` and `action` are filled before they are used, and the handlers only add to
    // atomics.
    unsafe {
        let mut set = mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGUSR1);
        libc::sigaddset(&mut set, libc::SIGUSR2);
        succeeded(libc::sigprocmask(libc::SIG_BLOCK, &set, ptr::null_mut()))?;
        succeeded(libc::kill(libc::getpid(), libc::SIGUSR1))?;
        for (signal, handler) in [(libc::SIGALRM, count_alarm as extern "C" fn(i32)), (libc::SIGRTMIN(), count_timer)] {
            let mut action: libc::sigaction = mem::zeroed();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_RESTART;
            succeeded(libc::sigaction(signal, &action, ptr::null_mut()))?;
        }
    }
    Ok(())
}

fn is_pending(signal: i32) -> bool {
    // SAFETY: `sigpending` fills `set` before it is read.
    unsafe {
        let mut set = mem::zeroed();
        libc::sigpending(&mut set) == 0 && libc::sigismember(&set, signal) == 1
    }
}

fn start_timers() -> io::Result<()> {
    let microseconds = libc::timeval { tv_sec: 0, tv_usec: TICK.as_micros() as i64 };
    // SAFETY: all structures are filled and outlive the calls; the timer's identity is written
    // before it is used.
    unsafe {
        let interval = libc::itimerval { it_interval: microseconds, it_value: microseconds };
        succeeded(libc::setitimer(libc::ITIMER_REAL, &interval, ptr::null_mut()))?;
        let mut event: libc::sigevent = mem::zeroed();
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = libc::SIGRTMIN();
        let mut timer = ptr::null_mut();
        succeeded(libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer))?;
        succeeded(libc::timer_settime(timer, 0, &every_tick(), ptr::null_mut()))
    }
}

fn every_tick() -> libc::itimerspec {
    let nanoseconds = libc::timespec { tv_sec: 0, tv_nsec: TICK.as_nanos() as i64 };
    libc::itimerspec { it_interval: nanoseconds, it_value: nanoseconds }
}

/// Counts the expirations of a timerfd; returns the error that ended the loop.
fn read_timerfd() -> io::Error {
    // SAFETY: the call takes numbers only, and makes a descriptor.
    let timer = unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_CLOEXEC) };
    if timer < 0 {
        return io::Error::last_os_error();
    }
    // SAFETY: the descriptor is open, the setting outlives the call, and nothing else owns the
    // descriptor.
    let mut timer = unsafe {
        libc::timerfd_settime(timer, 0, &every_tick(), ptr::null_mut());
        File::from_raw_fd(timer)
    };
    let mut ticks = [0; 8];
    loop {
        match timer.read_exact(&mut ticks) {
            Ok(()) => TIMERFD_TICKS.fetch_add(u64::from_ne_bytes(ticks), Ordering::Relaxed),
            Err(error) => return error,
        };
    }
}
