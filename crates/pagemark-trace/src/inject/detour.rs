//! Has a stopped thread make system calls, after each of which it finds back by itself.
//!
//! If a tracer dies, the kernel resumes its tracees as they are. A thread with registers for a call
//! would go on with them, and its program end. So the thread is led over a detour: a piece of code
//! behind the code of the vDSO, in bytes of its last page that the program does not have and the
//! kernel has zeroed. The code makes a call, puts back all registers that a call changes, from
//! memory beside it, and jumps to where the thread was. It needs no stack, which may be small,
//! on a signal stack, or used below its end; it leaves the blocked signals, the vector registers
//! and a shadow stack alone.
//!
//! * Until the thread is at the entry of a call, it is about to make a call without effect, which
//!   every seccomp filter allows that lets the program read. Then the number and the arguments are
//!   exchanged.
//! * A thread that was in a system call makes it again, as the kernel has it do: by its number, or
//!   by `restart_syscall`, which keeps the time that is left. No call on the detour resets this.
//! * A signal that arrives meanwhile is delivered to the thread with its own registers, and the
//!   thread stops again. So no call that a signal interrupts is made again instead.
//! * A signal that is blocked but for the call in which the thread was (`sigsuspend`, `ppoll`)
//!   stays blocked on the detour, and is delivered when the thread makes the call again. If we die,
//!   the handler would run on the detour otherwise, and the thread wait for ever for the next
//!   signal.
//! * A process that job control has stopped takes no signal before SIGCONT: all are blocked until
//!   the thread is back. If the tracer dies before, they stay blocked.
//! * A descriptor that was made for the tracer is closed by the code itself.
//!
//! Each injection takes a place with a code of its own, and zeroes it at its end. A place that is
//! not zero was left by a tracer that died; a thread may still be on its way there, or come back
//! from the handler of a signal. The oldest of these is taken when there is no other.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use pagemark::PAGE_SIZE;
use pagemark_linux::proc::{self, maps};
use pagemark_linux::ptrace::{self, Registers, Stop, Until};

use super::{Helped, Step};

/// Words before the code: a mark, and the age.
pub(super) const HEAD: usize = 2;
const CODE_WORDS: usize = 10;
/// Registers that are put back.
pub(super) const REGISTERS: usize = 10;
const WORDS: usize = HEAD + CODE_WORDS + REGISTERS;
/// Length of a place.
pub(super) const BYTES: u64 = (WORDS * 8) as u64;
/// First word of a place that is in use, or was left.
const MARK: u64 = u64::from_le_bytes(*b"detour\x0f\x0b");

/// Where the code begins that makes a call and closes the descriptor which that returns.
const CLOSING: u64 = (HEAD * 8) as u64;
/// Where the code begins that makes a call.
const PLAIN: u64 = CLOSING + 9;
/// Where the registers are.
const SAVED: u64 = ((HEAD + CODE_WORDS) * 8) as u64;
/// Length of the instruction `syscall`.
const SYSCALL: u64 = 2;

/// mov saved(%rip),REGISTER of rdi, rsi, rdx, r10, r8, r9, rcx, r11, rax; jmp *saved(%rip). A
/// distance of four bytes follows each.
pub(super) const PUT_BACK: [&[u8]; REGISTERS] = [
    &[0x48, 0x8b, 0x3d],
    &[0x48, 0x8b, 0x35],
    &[0x48, 0x8b, 0x15],
    &[0x4c, 0x8b, 0x15],
    &[0x4c, 0x8b, 0x05],
    &[0x4c, 0x8b, 0x0d],
    &[0x48, 0x8b, 0x0d],
    &[0x4c, 0x8b, 0x1d],
    &[0x48, 0x8b, 0x05],
    &[0xff, 0x25],
];

/// It changes no flags, which `syscall` keeps.
const CODE: [u64; CODE_WORDS] = {
    let mut code = [0x90; CODE_WORDS * 8];
    // syscall; mov %eax,%edi; mov $3,%eax; syscall
    let calls = [0x0f, 0x05, 0x89, 0xc7, 0xb8, 3, 0, 0, 0, 0x0f, 0x05];
    let mut at = 0;
    while at < calls.len() {
        code[at] = calls[at];
        at += 1;
    }
    let mut register = 0;
    while register < REGISTERS {
        let mut byte = 0;
        while byte < PUT_BACK[register].len() {
            code[at] = PUT_BACK[register][byte];
            at += 1;
            byte += 1;
        }
        // The distance from the next instruction, in four bytes.
        code[at] = (CODE_WORDS * 8 + register * 8 - (at + 4)) as u8;
        (code[at + 1], code[at + 2], code[at + 3]) = (0, 0, 0);
        at += 4;
        register += 1;
    }
    assert!(at == code.len());
    let mut words = [0; CODE_WORDS];
    let mut byte = 0;
    while byte < code.len() {
        words[byte / 8] |= (code[byte] as u64) << (byte % 8 * 8);
        byte += 1;
    }
    words
};

/// Memory of a process with room for detours.
#[derive(Clone, Debug)]
pub(super) struct Room {
    /// The places.
    range: Range<u64>,
    /// The address of the mapping, and the word that is there. It is another one when the process
    /// executes another program.
    begin: (u64, u64),
}

impl Room {
    /// Finds memory of a process in which a thread can make a detour: behind the code of the vDSO,
    /// or of a file. None if there is none.
    pub fn find(thread: i32) -> io::Result<Option<Room>> {
        let is_file =
            |name: &[u8]| name.starts_with(b"/") && !name.starts_with(b"/memfd:") && !name.starts_with(b"/dev/");
        let mut code = maps::read(thread)?;
        code.retain(|mapping| {
            let is_constant = mapping.readable && mapping.executable && !mapping.writable && !mapping.shared;
            is_constant && (mapping.name == b"[vdso]" || is_file(&mapping.name))
        });
        code.sort_by_key(|mapping| mapping.name != b"[vdso]");
        // Through this file, reading copies no shared page.
        let memory = proc::open_memory(thread)?;
        let room = |mapping: &maps::Mapping| {
            let (mut page, mut begin) = (vec![0; PAGE_SIZE], [0; 8]);
            let (start, end) = (mapping.start.get(), mapping.end.get());
            memory.read_exact_at(&mut page, end - PAGE_SIZE as u64).ok()?;
            memory.read_exact_at(&mut begin, start).ok()?;
            let words: Vec<u64> = page.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
            let count = count_places(&words);
            (count > 0).then(|| Room { range: end - count * BYTES..end, begin: (start, u64::from_le_bytes(begin)) })
        };
        Ok(code.iter().find_map(room))
    }

    /// Its first address.
    pub fn start(&self) -> u64 {
        self.range.start
    }

    /// Takes a place of the process of stopped threads: one that is free, or that was left the
    /// longest time ago.
    fn take(&self, threads: &[i32]) -> Helped<u64> {
        let &thread = threads.first().ok_or((Step::Gone, 0))?;
        let word = |address| ptrace::word(thread, address).map_err(inspect);
        if word(self.begin.0)? != self.begin.1 {
            // It has executed another program since.
            return Err((Step::Gone, 0));
        }
        let is_used = |place: u64| {
            let is_there =
                |&thread: &i32| ptrace::registers(thread).is_ok_and(|now| (place..place + BYTES).contains(&now.rip));
            threads.iter().any(is_there)
        };
        let (mut free, mut left, mut last) = (None, None, 0);
        for place in self.range.clone().step_by(BYTES as usize) {
            match (word(place)?, word(place + 8)?) {
                (0, _) => free = Some(place),
                (MARK, age) => {
                    last = last.max(age);
                    if left.is_none_or(|(oldest, _)| age < oldest) && !is_used(place) {
                        left = Some((age, place));
                    }
                }
                _ => return Err((Step::Gone, 0)),
            }
        }
        let place = free.or(left.map(|(_, place)| place)).ok_or((Step::NoRoom, 0))?;
        // The mark first: whoever comes after our death must not take the place for a free one.
        write(thread, place, &[MARK, last + 1])?;
        write(thread, place + CLOSING, &CODE)?;
        Ok(place)
    }

    /// Takes `count` places in a row, and returns the address of the first: free ones, or those
    /// that were left the longest time ago. None if there are not as many, without those in which
    /// `is_used` says that a thread is. For a process of which no thread runs.
    pub fn take_row(
        &self,
        memory: &File,
        count: usize,
        is_used: impl Fn(Range<u64>) -> bool,
    ) -> io::Result<Option<u64>> {
        let word = |address| {
            let mut word = [0; 8];
            memory.read_exact_at(&mut word, address).map(|()| u64::from_le_bytes(word))
        };
        if word(self.begin.0)? != self.begin.1 {
            // It has executed another program since.
            return Ok(None);
        }
        let places: Vec<u64> = self.range.clone().step_by(BYTES as usize).collect();
        let ages = places.iter().map(|&place| Ok(if word(place)? == 0 { 0 } else { word(place + 8)? }));
        let ages: Vec<u64> = ages.collect::<io::Result<_>>()?;
        let rows = places.windows(count).zip(ages.windows(count)).rev();
        let rows = rows.filter(|(row, _)| !is_used(row[0]..row[0] + count as u64 * BYTES));
        let Some((row, _)) = rows.min_by_key(|(_, ages)| ages.iter().max().copied()) else { return Ok(None) };
        let age = ages.iter().max().map_or(1, |last| last + 1);
        for &place in row {
            memory.write_all_at(&[MARK.to_le_bytes(), age.to_le_bytes()].concat(), place)?;
        }
        Ok(Some(row[0]))
    }

    /// Makes places free that [`Room::take_row`] has taken.
    pub fn give_back(&self, memory: &File, first: u64, count: usize) -> io::Result<()> {
        memory.write_all_at(&vec![0; count * BYTES as usize], first)
    }
}

/// The number of places at the end of a page.
fn count_places(page: &[u64]) -> u64 {
    let is_place = |words: &&[u64]| words[0] == MARK || words.iter().all(|&word| word == 0);
    page.rchunks_exact(WORDS).take_while(is_place).count() as u64
}

fn inspect(errno: libc::c_int) -> (Step, libc::c_int) {
    match errno {
        libc::EIO | libc::EFAULT => (Step::Gone, 0),
        errno => (Step::Inspect, errno),
    }
}

fn failed(errno: libc::c_int) -> (Step, libc::c_int) {
    (Step::SystemCall, errno)
}

fn write(thread: i32, address: u64, words: &[u64]) -> Helped<()> {
    let mut each = (address..).step_by(8).zip(words);
    each.try_for_each(|(at, &word)| ptrace::set_word(thread, at, word)).map_err(inspect)
}

/// A call that a thread makes.
#[derive(Clone, Copy)]
struct Made {
    number: i64,
    arguments: [u64; 6],
    /// Where the code begins.
    entry: u64,
    /// The thread may also make it if we die.
    is_sure: bool,
}

/// A stopped thread that makes system calls for us, until [`Detour::end`].
pub(super) struct Detour {
    thread: i32,
    place: u64,
    /// The registers with which the thread goes on.
    original: Cell<Registers>,
    /// The blocked signals of a process that job control has stopped. No signal is delivered to it
    /// before SIGCONT, so all are blocked on the detour.
    blocked: Option<u64>,
}

impl Detour {
    /// Begins a detour of the first of the threads of a process, which are all stopped.
    pub fn begin(threads: &[i32], room: &Room) -> Helped<Detour> {
        let &first = threads.first().ok_or((Step::Gone, 0))?;
        let original = original(first)?;
        if ptrace::dispatches_system_calls(first) {
            return Err((Step::Dispatch, 0));
        }
        let is_in_group_stop = ptrace::is_in_group_stop(first).map_err(inspect)?;
        let mask = ptrace::signal_mask(first).map_err(inspect)?;
        let blocked = is_in_group_stop.then_some(mask);
        let detour = Detour { thread: first, place: room.take(threads)?, original: Cell::new(original), blocked };
        detour.save()?;
        // The kernel forgets the mask that the thread has only in the call in which it is (`sigsuspend`).
        let on_detour = if is_in_group_stop { u64::MAX } else { mask };
        ptrace::set_signal_mask(first, on_detour).map_err(failed)?;
        Ok(detour)
    }

    /// Makes the thread carry out a system call, however long that takes. Returns the result.
    pub fn call(&self, number: i64, arguments: [u64; 6]) -> Helped<i64> {
        self.carry_out(Made { number, arguments, entry: PLAIN, is_sure: false })
    }

    /// As [`Detour::call`], for a call that makes a descriptor. If we die, the thread closes it,
    /// unless it may not (`can_close`).
    pub fn make_descriptor(&self, number: i64, arguments: [u64; 6], can_close: bool) -> Helped<i64> {
        let entry = if can_close { CLOSING } else { PLAIN };
        self.carry_out(Made { number, arguments, entry, is_sure: false })
    }

    /// Closes a descriptor of the thread, also if we die, unless it may not (`can_close`).
    pub fn close(&self, descriptor: i64, can_close: bool) -> Helped<()> {
        let arguments = [descriptor as u64, 0, 0, 0, 0, 0];
        self.carry_out(Made { number: libc::SYS_close, arguments, entry: PLAIN, is_sure: can_close }).map(drop)
    }

    fn carry_out(&self, made: Made) -> Helped<i64> {
        loop {
            if let Some(result) = self.try_call(made)? {
                return Ok(result);
            }
        }
    }

    /// As [`Detour::carry_out`]. None if a signal came first, or has interrupted the call: the
    /// thread has its own registers then, perhaps at the begin of the handler of the signal.
    fn try_call(&self, made: Made) -> Helped<Option<i64>> {
        let Made { number, arguments, entry, is_sure } = made;
        // Of no descriptor: it has no effect.
        let nothing = (libc::SYS_read, [u64::MAX, 0, 0, 0, 0, 0]);
        let (first_number, first_arguments) = if is_sure { (number, arguments) } else { nothing };
        let begin = Registers {
            rip: self.place + entry,
            rax: first_number as u64,
            // Marks the thread as outside of a system call, so that the kernel restarts none.
            orig_rax: u64::MAX,
            ..self.original.get()
        };
        ptrace::set_registers(self.thread, &with_arguments(begin, first_arguments)).map_err(failed)?;
        if let Some(signal) = self.next_stop()? {
            return self.deliver(signal).map(|()| None);
        }
        if !is_sure {
            let entered = ptrace::registers(self.thread).map_err(failed)?;
            let exchanged = Registers { orig_rax: number as u64, ..with_arguments(entered, arguments) };
            ptrace::set_registers(self.thread, &exchanged).map_err(failed)?;
        }
        if let Some(signal) = self.next_stop()? {
            return self.deliver(signal).map(|()| None);
        }
        let result = ptrace::registers(self.thread).map_err(failed)?.rax as i64;
        if ptrace::is_restarted(result) {
            return self.deliver(0).map(|()| None);
        }
        Ok(Some(result))
    }

    /// Resumes the thread until the entry or the exit of a call. Returns the signal before which it
    /// has stopped instead.
    fn next_stop(&self) -> Helped<Option<libc::c_int>> {
        loop {
            ptrace::resume(self.thread, Until::SystemCall, 0).map_err(failed)?;
            match ptrace::wait(self.thread, None).map_err(failed)? {
                Stop::SystemCall => return Ok(None),
                Stop::Signal(signal) => return Ok(Some(signal)),
                Stop::Exited => return Err((Step::Gone, 0)),
                Stop::Trap | Stop::Event | Stop::Exiting => {}
            }
        }
    }

    /// Has the thread take a signal, and those that wait, as if it had made no detour.
    fn deliver(&self, signal: libc::c_int) -> Helped<()> {
        ptrace::set_registers(self.thread, &self.original.get()).map_err(failed)?;
        // It stops again before it executes an instruction.
        ptrace::interrupt(self.thread).map_err(failed)?;
        ptrace::resume(self.thread, Until::Event, signal).map_err(failed)?;
        if !ptrace::wait_trap(self.thread, None).map_err(failed)? {
            return Err((Step::Gone, 0));
        }
        let mut now = original(self.thread)?;
        ptrace::restart_interrupted_call(&mut now, u64::MAX);
        self.original.set(now);
        self.save()
    }

    /// Writes what the code puts back.
    fn save(&self) -> Helped<()> {
        let code_at = |address| ptrace::word(self.thread, address).map(|word| word as u16).map_err(inspect);
        let back = registers_to_put_back(&self.original.get(), code_at)?;
        write(self.thread, self.place + SAVED, &back)
    }

    /// Ends the detour: the thread is stopped with its own registers.
    pub fn end(self) -> Helped<()> {
        // Until the thread is resumed, the kernel looks whether it has to restart a call: it does so
        // where a stop is due, and then also if we die.
        ptrace::interrupt(self.thread).map_err(failed)?;
        ptrace::set_registers(self.thread, &self.original.get()).map_err(failed)?;
        write(self.thread, self.place + CLOSING, &[0; WORDS - HEAD])?;
        write(self.thread, self.place, &[0; HEAD])?;
        if let Some(blocked) = self.blocked {
            ptrace::set_signal_mask(self.thread, blocked).map_err(failed)?;
        }
        // The stop that is due comes before any signal.
        ptrace::resume(self.thread, Until::Event, 0).map_err(failed)?;
        if ptrace::wait_trap(self.thread, None).map_err(failed)? { Ok(()) } else { Err((Step::Gone, 0)) }
    }
}

/// The registers that the code puts back, in its order, so that the thread goes on from `original`.
/// `code_at` reads two bytes of the program.
pub(super) fn registers_to_put_back<E>(
    original: &Registers,
    code_at: impl Fn(u64) -> Result<u16, E>,
) -> Result<[u64; REGISTERS], E> {
    const INT_80: u16 = 0x80cd;
    const X32: u64 = 0x4000_0000;
    let mut back = *original;
    if back.orig_rax as i64 >= 0 && ptrace::is_restarted(back.rax as i64) {
        back.rip = back.rip.wrapping_sub(SYSCALL);
        back.rax = match back.rax as i64 {
            // The number of `restart_syscall`, for the instruction to which these registers point.
            ptrace::WITH_ITS_TIME if code_at(back.rip)? == INT_80 => 0,
            ptrace::WITH_ITS_TIME => libc::SYS_restart_syscall as u64 | back.orig_rax & X32,
            _ => back.orig_rax,
        };
    }
    let Registers { rdi, rsi, rdx, r10, r8, r9, rcx, r11, rax, rip, .. } = back;
    Ok([rdi, rsi, rdx, r10, r8, r9, rcx, r11, rax, rip])
}

/// The registers with which a stopped thread goes on.
fn original(thread: i32) -> Helped<Registers> {
    let mut original = ptrace::registers(thread).map_err(inspect)?;
    // The thread continues at the abort handler, as after any other interruption. (The kernel itself
    // aborts the sequences of the threads that only stop.)
    ptrace::abort_restartable_sequence(thread, &mut original).map_err(inspect)?;
    if original.cs != ptrace::CODE_SEGMENT_64 {
        return Err((Step::Is32Bit, 0));
    }
    Ok(original)
}

fn with_arguments(registers: Registers, [rdi, rsi, rdx, r10, r8, r9]: [u64; 6]) -> Registers {
    Registers { rdi, rsi, rdx, r10, r8, r9, ..registers }
}
