//! A copy of the memory of a process at one instant, made by a fork that the program does not see.
//!
//! A stopped thread makes a process that shares its memory; that process forks, and ends. So the
//! copy is a child of no process of the program. It executes nothing but a call that waits, all its
//! signals are blocked, and it ends by itself soon, unless somebody stops it to read its memory
//! ([`MemoryCopy`]). Private pages are shared with it until one of the two is written.
//!
//! The thread is reached by whoever traces it ([`StoppedThread`]). It executes code that is written
//! behind the code of the vDSO, as for other injected calls. If whoever traces it dies, the thread
//! reaches the end of that code by itself, which puts back its blocked signals and its registers,
//! and continues where it was.
//!
//! Not in the copy: memory that processes share, and what the program keeps from its children
//! (`MADV_DONTFORK`, `MADV_WIPEONFORK`).

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pagemark::{ByteCount, RangeSet};
use pagemark_linux::memory::Memory;
use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap, SWAPPED};
use pagemark_linux::proc::{self, Process, Status};
use pagemark_linux::ptrace::{self, Registers, Stop, Until};

use super::detour::{BYTES, HEAD, PUT_BACK, REGISTERS, Room, registers_to_put_back};
use crate::error::{Error, ErrorKind, Object, Result};

/// How long the copy and the process between wait before they end by themselves.
const WAIT: Duration = Duration::from_secs(10);

/// How long the fork may take, for which page tables are copied.
const FORK_LIMIT: Duration = Duration::from_secs(60);

/// Pages that are looked for are found together if no more lies between them: less time passes than
/// for another call.
const NEAR: ByteCount = ByteCount::new(1 << 20);

/// Pause between two looks for the copy.
const POLL: Duration = Duration::from_micros(100);

/// What the copy and the program have together: the table of open files, so that a file that the
/// program closes is closed, and the working directory.
const SHARED: u32 = (libc::CLONE_FILES | libc::CLONE_FS) as u32;

/// A thread of a process whose threads are all stopped, reached by whoever traces it. Errors are
/// error numbers.
pub trait StoppedThread {
    /// Its id.
    fn id(&self) -> i32;

    /// Its registers.
    ///
    /// # Errors
    /// It cannot be reached.
    fn registers(&mut self) -> std::result::Result<Registers, i32>;

    /// Sets its registers.
    ///
    /// # Errors
    /// It cannot be reached.
    fn set_registers(&mut self, registers: &Registers) -> std::result::Result<(), i32>;

    /// The signals that it blocks.
    ///
    /// # Errors
    /// It cannot be reached.
    fn signal_mask(&mut self) -> std::result::Result<u64, i32>;

    /// Sets the signals that it blocks.
    ///
    /// # Errors
    /// It cannot be reached.
    fn set_signal_mask(&mut self, mask: u64) -> std::result::Result<(), i32>;

    /// True if it dispatches system calls to itself (`PR_SET_SYSCALL_USER_DISPATCH`).
    ///
    /// # Errors
    /// It cannot be reached.
    fn dispatches_system_calls(&mut self) -> std::result::Result<bool, i32>;

    /// Resumes it until it enters or leaves a system call.
    ///
    /// # Errors
    /// `ESRCH`: it has exited. It cannot be reached.
    fn run_to_system_call(&mut self) -> std::result::Result<(), i32>;

    /// Leaves it stopped with these registers and these blocked signals, in a stop after which the
    /// kernel makes an interrupted call again.
    ///
    /// # Errors
    /// `ESRCH`: it has exited. It cannot be reached.
    fn put_back(&mut self, registers: &Registers, mask: u64) -> std::result::Result<(), i32>;
}

/// A thread that the caller traces, which is stopped.
#[derive(Clone, Copy, Debug)]
pub struct Tracee(pub i32);

impl StoppedThread for Tracee {
    fn id(&self) -> i32 {
        self.0
    }

    fn registers(&mut self) -> std::result::Result<Registers, i32> {
        ptrace::registers(self.0)
    }

    fn set_registers(&mut self, registers: &Registers) -> std::result::Result<(), i32> {
        ptrace::set_registers(self.0, registers)
    }

    fn signal_mask(&mut self) -> std::result::Result<u64, i32> {
        ptrace::signal_mask(self.0)
    }

    fn set_signal_mask(&mut self, mask: u64) -> std::result::Result<(), i32> {
        ptrace::set_signal_mask(self.0, mask)
    }

    fn dispatches_system_calls(&mut self) -> std::result::Result<bool, i32> {
        Ok(ptrace::dispatches_system_calls(self.0))
    }

    fn run_to_system_call(&mut self) -> std::result::Result<(), i32> {
        let mut signal = 0;
        loop {
            ptrace::resume(self.0, Until::SystemCall, signal)?;
            signal = match ptrace::wait(self.0, None)? {
                Stop::SystemCall => return Ok(()),
                Stop::Exited | Stop::Exiting => return Err(libc::ESRCH),
                // Only SIGSTOP cannot be blocked. It takes effect when the thread is released.
                Stop::Signal(signal) => signal,
                Stop::Trap | Stop::Event => 0,
            }
        }
    }

    fn put_back(&mut self, registers: &Registers, mask: u64) -> std::result::Result<(), i32> {
        // First, for the case that this process dies before the end: the code puts back all else.
        ptrace::set_signal_mask(self.0, mask)?;
        ptrace::restore(self.0, registers, mask)
    }
}

/// Makes a stopped thread fork a copy of its process. `thread` is as it was afterwards. The copy
/// ends within seconds unless [`MemoryCopy::hold`] stops it.
///
/// # Errors
/// Why it could not be made; the thread is as it was.
pub fn fork(thread: &mut dyn StoppedThread) -> Result<Process> {
    let pid = thread.id();
    let status = Status::read(pid).map_err(|_| Error::no_process(pid))?;
    if status.seccomp_mode != 0 {
        return Err(cannot_copy(pid, "its seccomp filter may end a process that is forked from it"));
    }
    let system = |operation: &'static str| move |error: io::Error| failed(pid, operation, error);
    let room = Room::find(pid).map_err(system("reading its code"))?;
    let memory = proc::open_memory_for_writing(pid).map_err(system("opening its memory"))?;
    let room = room.ok_or_else(|| cannot_copy(pid, "it has no room for the code that forks"))?;
    let addresses = next_instructions(pid);
    let is_used = |row: Range<u64>| addresses.iter().any(|address| row.contains(address));
    let place = room.take_row(&memory, PLACES, is_used).map_err(system("reading its code"))?;
    let place = place.ok_or_else(|| cannot_copy(pid, "it has no room for the code that forks"))?;
    let made = fork_by(thread, &memory, place);
    // What is left there would be taken for code that a thread may still execute.
    room.give_back(&memory, place, PLACES).map_err(system("writing to its code"))?;
    made
}

/// Where the threads are that execute something in the memory of a frozen process: its own, and the
/// first ones of children that share it.
fn next_instructions(pid: i32) -> Vec<u64> {
    let sharing = proc::children(pid).unwrap_or_default().into_iter().filter(|&child| proc::share_memory(pid, child));
    let threads = proc::threads(pid).unwrap_or_default().into_iter().chain(sharing);
    threads.filter_map(proc::next_instruction).collect()
}

/// Does the work of [`fork`] with the code at `place`.
fn fork_by(thread: &mut dyn StoppedThread, memory: &File, place: u64) -> Result<Process> {
    let pid = thread.id();
    let traced = |errno: i32| failed(pid, "reaching it through its tracer", io::Error::from_raw_os_error(errno));
    let (original, mask) = (thread.registers().map_err(traced)?, thread.signal_mask().map_err(traced)?);
    if original.cs != ptrace::CODE_SEGMENT_64 {
        return Err(cannot_copy(pid, "it runs in 32-bit mode"));
    }
    if thread.dispatches_system_calls().map_err(traced)? {
        return Err(cannot_copy(pid, "it dispatches system calls to itself"));
    }
    let back = registers_to_put_back(&original, |address| {
        let mut code = [0; 2];
        memory.read_exact_at(&mut code, address).map(|()| u16::from_le_bytes(code))
    });
    let back = back.map_err(|error| failed(pid, "reading its code", error))?;
    let code = Code { place, mask, back };
    code.write(memory).map_err(|error| failed(pid, "writing to its code", error))?;

    // Of a call that blocks other signals while it waits (`sigsuspend`), the kernel forgets these. On the
    // way, a signal for the call would run its handler, and the call would wait for another one.
    thread.set_signal_mask(mask).map_err(traced)?;
    // If whoever traces it dies before it forks, it puts back its signals.
    let way_back = Registers { rip: code.way_back(), orig_rax: u64::MAX, ..original };
    thread.set_registers(&way_back).map_err(traced)?;
    thread.set_signal_mask(u64::MAX).map_err(traced)?;
    let before = proc::children(pid).unwrap_or_default();
    let made = run(thread, &code, &original, &before);
    let put_back = thread.put_back(&original, mask).map_err(traced);
    let made = made?;
    put_back?;
    Ok(made)
}

/// Has the thread execute the code until it would put back its signals.
fn run(thread: &mut dyn StoppedThread, code: &Code, original: &Registers, before: &[i32]) -> Result<Process> {
    let pid = thread.id();
    let traced = |errno: i32| failed(pid, "reaching it through its tracer", io::Error::from_raw_os_error(errno));
    let flags = u64::from(SHARED | libc::CLONE_VM as u32);
    let begin = Registers {
        rip: code.entry(),
        rax: libc::SYS_clone as u64,
        // Marks the thread as outside of a system call, so that the kernel restarts none.
        orig_rax: u64::MAX,
        rdi: flags,
        rsi: 0,
        rdx: 0,
        r10: 0,
        r8: 0,
        ..*original
    };
    thread.set_registers(&begin).map_err(traced)?;
    // The entry and the exit of `clone`.
    thread.run_to_system_call().map_err(traced)?;
    thread.run_to_system_call().map_err(traced)?;
    let result = thread.registers().map_err(traced)?.rax as i64;
    if result < 0 {
        let error = io::Error::from_raw_os_error(result.unsigned_abs() as i32);
        return Err(failed(pid, "forking it", error));
    }
    let children = proc::children(pid).unwrap_or_default();
    let between = children.into_iter().find(|child| !before.contains(child));
    let between = between.ok_or_else(|| cannot_copy(pid, "the kernel does not list its children"))?;
    let between = child_of(pid, between).ok_or_else(|| Error::no_process(pid))?;
    let copy = wait_for_copy(pid, between);
    let _ = between.signal(libc::SIGKILL);
    // The entry and the exit of `waitid`, and the entry of `rt_sigprocmask`.
    for _ in 0..3 {
        thread.run_to_system_call().map_err(traced)?;
    }
    // This call is left out: in a stop at the entry of a call, the kernel would carry out the one of the
    // registers that are put back.
    thread.set_signal_mask(code.mask).map_err(traced)?;
    let entered = thread.registers().map_err(traced)?;
    thread.set_registers(&Registers { orig_rax: u64::MAX, ..entered }).map_err(traced)?;
    thread.run_to_system_call().map_err(traced)?;
    copy
}

/// The process with an id that was listed as that of a child. None if the id is another's by now:
/// when a program is killed, who waits for its children gives their ids away.
fn child_of(parent: i32, pid: i32) -> Option<Process> {
    let child = Process::find(pid).ok()?;
    child.stat().filter(|stat| stat.parent_pid == parent).map(|_| child)
}

/// Waits until the process between the program and the copy has forked the copy.
fn wait_for_copy(pid: i32, between: Process) -> Result<Process> {
    let deadline = Instant::now() + FORK_LIMIT;
    loop {
        if let Some(&copy) = proc::children(between.pid).unwrap_or_default().first() {
            return child_of(between.pid, copy).ok_or_else(|| cannot_copy(pid, "its copy has ended"));
        }
        if between.stat().is_none_or(|stat| stat.is_zombie()) {
            let reason = "the kernel refuses to fork it: no memory for the page tables, or too many processes";
            return Err(cannot_copy(pid, reason));
        }
        if Instant::now() >= deadline {
            return Err(cannot_copy(pid, format!("forking it takes longer than {} s", FORK_LIMIT.as_secs())));
        }
        std::thread::sleep(POLL);
    }
}

/// The error of a copy that cannot be made, for this reason.
pub fn cannot_copy(pid: i32, reason: impl Into<Cow<'static, str>>) -> Error {
    Error::about(ErrorKind::CannotKeep, Object::Process(pid), reason)
        .during("cannot copy the memory of")
        .help("use the strategy pre-copy")
}

fn failed(pid: i32, step: &'static str, source: io::Error) -> Error {
    match source {
        gone if proc::is_gone(&gone) => Error::no_process(pid),
        source => cannot_copy(pid, step).caused_by(source),
    }
}

/// Places that the code takes: one for the thread, one for the processes that it makes, one for
/// what the code reads.
const PLACES: usize = 3;

/// The code that the thread executes, and the processes that it makes.
struct Code {
    /// The address of the first place.
    place: u64,
    /// The signals that the thread blocks in the end.
    mask: u64,
    /// The registers that it has in the end.
    back: [u64; REGISTERS],
}

impl Code {
    /// The address of a place, behind its head.
    fn part(&self, number: u64) -> u64 {
        self.place + number * BYTES + (HEAD * 8) as u64
    }

    /// Where the thread begins, at the call of `clone`.
    fn entry(&self) -> u64 {
        self.part(0)
    }

    /// Where the mask is. The time to wait follows it, and the registers.
    fn data(&self) -> u64 {
        self.part(2)
    }

    fn write(&self, memory: &File) -> io::Result<()> {
        let time = [WAIT.as_secs(), 0];
        let data: Vec<u8> =
            [self.mask].iter().chain(&time).chain(&self.back).flat_map(|word| word.to_le_bytes()).collect();
        memory.write_all_at(&data, self.data())?;
        memory.write_all_at(&self.of_copy(), self.part(1))?;
        memory.write_all_at(&[self.fork(), self.put_back()].concat(), self.entry())
    }

    /// Where the thread puts back its signals and its registers.
    fn way_back(&self) -> u64 {
        self.entry() + self.fork().len() as u64
    }

    /// The thread forks, and waits for the process between it and the copy. It changes no flags,
    /// which `syscall` keeps.
    fn fork(&self) -> Vec<u8> {
        let mut code = Assembler::at(self.entry());
        code.system_call();
        // xchg %eax,%ecx; jrcxz 1f; jmp 2f; 1: jmp copy; 2:
        code.bytes(&[0x91, 0xe3, 2, 0xeb, 5, 0xe9]);
        code.distance(self.part(1));
        // waitid(P_PID, child, NULL, WEXITED | __WALL, NULL). Without a child it fails at once.
        code.set(&[0xbf], libc::P_PID);
        code.bytes(&[0x89, 0xce]);
        code.set(&[0xba], 0);
        code.set(&[0x41, 0xba], (libc::WEXITED | libc::__WALL) as u32);
        code.set(&[0x41, 0xb8], 0);
        code.call(libc::SYS_waitid);
        code.bytes
    }

    /// The thread goes on as it was. It changes no flags, either.
    fn put_back(&self) -> Vec<u8> {
        let mut code = Assembler::at(self.way_back());
        // rt_sigprocmask(SIG_SETMASK, mask, NULL, 8)
        code.set(&[0xbf], libc::SIG_SETMASK as u32);
        code.bytes(&[0x48, 0x8d, 0x35]);
        code.distance(self.data());
        code.set(&[0xba], 0);
        code.set(&[0x41, 0xba], 8);
        code.call(libc::SYS_rt_sigprocmask);
        for (register, opcode) in (3..).zip(PUT_BACK) {
            code.bytes(opcode);
            code.distance(self.data() + register * 8);
        }
        code.bytes
    }

    /// What the processes execute that the thread makes: the first one forks the copy, and both
    /// wait.
    fn of_copy(&self) -> Vec<u8> {
        let mut code = Assembler::at(self.part(1));
        code.set(&[0xbf], SHARED);
        code.set(&[0xbe], 0);
        code.set(&[0xba], 0);
        code.set(&[0x41, 0xba], 0);
        code.set(&[0x41, 0xb8], 0);
        code.call(libc::SYS_clone);
        // test %eax,%eax; js end
        code.bytes(&[0x85, 0xc0, 0x78, 0]);
        let branch = code.bytes.len();
        // nanosleep(time, NULL)
        code.bytes(&[0x48, 0x8d, 0x3d]);
        code.distance(self.data() + 8);
        code.set(&[0xbe], 0);
        code.call(libc::SYS_nanosleep);
        code.bytes[branch - 1] = (code.bytes.len() - branch) as u8;
        code.set(&[0xbf], 0);
        code.call(libc::SYS_exit_group);
        code.bytes
    }
}

/// Instructions one after the other.
struct Assembler {
    address: u64,
    bytes: Vec<u8>,
}

impl Assembler {
    fn at(address: u64) -> Assembler {
        Assembler { address, bytes: Vec::new() }
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// An instruction that ends with a number of four bytes.
    fn set(&mut self, opcode: &[u8], number: u32) {
        self.bytes(opcode);
        self.bytes(&number.to_le_bytes());
    }

    /// The distance from the next instruction to an address, in the last four bytes of this one.
    fn distance(&mut self, to: u64) {
        let next = self.address + self.bytes.len() as u64 + 4;
        self.bytes(&(to.wrapping_sub(next) as u32).to_le_bytes());
    }

    fn system_call(&mut self) {
        self.bytes(&[0x0f, 0x05]);
    }

    fn call(&mut self, number: i64) {
        self.set(&[0xb8], number as u32);
        self.system_call();
    }
}

/// The copy of a process's memory, for reading. Dropped, it ends. It also ends when the thread ends
/// that stops it: however this process dies.
#[derive(Debug)]
pub struct MemoryCopy {
    pid: i32,
    memory: Memory,
    pagemap: Pagemap,
    /// Dropped to end the copy.
    held: Option<mpsc::Sender<()>>,
    holder: Option<JoinHandle<()>>,
}

impl MemoryCopy {
    /// Stops a copy that [`fork`] has made, so that it stays.
    ///
    /// # Errors
    /// It has ended, or cannot be traced.
    pub fn hold(copy: Process) -> Result<MemoryCopy> {
        let pid = copy.pid;
        let (held, end) = mpsc::channel();
        let (report, reported) = mpsc::channel();
        let hold = move || {
            let stopped = ptrace::seize(pid, ptrace::EXIT_KILL)
                .and_then(|()| ptrace::interrupt(pid))
                .and_then(|()| ptrace::wait_trap(pid, Some(ptrace::deadline(ptrace::STOP_LIMIT))));
            let is_stopped = stopped == Ok(true);
            let _ = report.send(stopped);
            if is_stopped {
                // Until the sender is dropped.
                let _ = end.recv();
                end_copy(pid);
            }
        };
        let thread = std::thread::Builder::new().name("pagemark-copy".to_owned());
        let holder = thread.spawn(hold).map_err(|error| failed(pid, "starting a thread", error))?;
        let stopped = reported.recv().unwrap_or(Err(libc::ESRCH));
        if stopped != Ok(true) || !Process::find(pid).is_ok_and(|found| found == copy) {
            let errno = stopped.err().unwrap_or(libc::ESRCH);
            return Err(cannot_copy(pid, "stopping its copy").caused_by(io::Error::from_raw_os_error(errno)));
        }
        let opened = Memory::open(pid).and_then(|memory| Ok((memory, Pagemap::of_process(pid)?)));
        let (memory, pagemap) = opened.map_err(|error| failed(pid, "opening the memory of its copy", error))?;
        memory.set_has_swapped(Status::read(pid).is_ok_and(|status| status.swapped_bytes > 0));
        Ok(MemoryCopy { pid, memory, pagemap, held: Some(held), holder: Some(holder) })
    }

    /// The pages that the copy has: those among `pages`, and perhaps some between them.
    ///
    /// # Errors
    /// It was killed.
    pub fn present(&self, pages: &RangeSet) -> Result<RangeSet> {
        let mut spans: Vec<pagemark::Range> = Vec::new();
        for range in pages.iter() {
            match spans.last_mut().filter(|span| span.end + NEAR >= range.start) {
                Some(span) => span.end = range.end,
                None => spans.push(range),
            }
        }
        let mut present = RangeSet::new();
        for span in spans {
            let filter = Filter { any: PRESENT | SWAPPED, ..Filter::default() };
            let found = self.pagemap.find(&span, filter, |run, _| present.insert(run));
            found.map_err(|error| failed(self.pid, "finding the pages of its copy", error))?;
        }
        Ok(present)
    }

    /// Reads pages as [`Memory::read`] does.
    ///
    /// # Errors
    /// It was killed.
    pub fn read(&self, ranges: &[pagemark::Range], buffer: &mut [u8]) -> Result<RangeSet> {
        self.memory.read(ranges, buffer).map_err(|error| failed(self.pid, "reading its copy", error))
    }
}

impl Drop for MemoryCopy {
    fn drop(&mut self) {
        drop(self.held.take());
        if let Some(holder) = self.holder.take() {
            let _ = holder.join();
        }
    }
}

/// Ends a copy, which this thread traces.
fn end_copy(pid: i32) {
    // SAFETY: a signal to a process that this thread traces, and has not waited for.
    unsafe { libc::kill(pid, libc::SIGKILL) };
    while !matches!(ptrace::wait(pid, None), Ok(Stop::Exited) | Err(_)) {}
}
