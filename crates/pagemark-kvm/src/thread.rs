//! A thread of the program: it runs on a virtual CPU, and this thread of the host carries out what
//! it asks for.

use std::sync::Arc;

use pagemark_linux::ptrace::SYSCALL_BYTES;

use crate::error::Error;
use crate::layout::{PAGE, TABLE_SPAN, page_floor};
use crate::loader::Start;
use crate::machine::tracking::Announcer;
use crate::machine::{FaultOutcome, Machine};
use crate::mappings::{Mapping, Protection};
use crate::operands;
use crate::process::Process;
use crate::sys::guard_page;
use crate::sys::host_call::Call;
use crate::sys::owned_lock::own_id;
use crate::sys::parking::InUse;
use crate::sys::program_memory::{self, Fault};
use crate::sys::robust::{self, Lock, Marked};
use crate::sys::signals::{self, Slot};
use crate::vcpu::{Exception, Exit, Stuck, Vcpu};
use crate::writes::Writes;

mod breakpoints;
mod calls;
mod leaving;
mod vsyscall;

use breakpoints::Breakpoint;
use calls::Outcome;
use calls::signal::{AlternateStack, fault_info};

/// `si_code` values of faults (`asm-generic/siginfo.h`).
mod code {
    pub const SEGV_MAPERR: i32 = 1;
    pub const SEGV_ACCERR: i32 = 2;
    pub const BUS_ADRALN: i32 = 1;
    pub const BUS_ADRERR: i32 = 2;
    pub const ILL_ILLOPN: i32 = 2;
    pub const FPE_INTDIV: i32 = 1;
    pub const FPE_FLTDIV: i32 = 3;
    pub const FPE_FLTOVF: i32 = 4;
    pub const FPE_FLTUND: i32 = 5;
    pub const FPE_FLTRES: i32 = 6;
    pub const FPE_FLTINV: i32 = 7;
    pub const TRAP_BRKPT: i32 = 1;
    pub const TRAP_TRACE: i32 = 2;
    pub const SI_KERNEL: i32 = 0x80;
}

/// A thread of the program.
pub struct Thread {
    pub(crate) machine: Arc<Machine>,
    pub(crate) process: Arc<Process>,
    pub(crate) vcpu: Vcpu,
    pub(crate) slot: Box<Slot>,
    /// Tells trackers what is written for the thread.
    pub(crate) announcer: Announcer,
    /// Where the kernel would write 0 when the thread ends (`set_tid_address`).
    pub(crate) clear_tid: u64,
    pub(crate) alternate: AlternateStack,
    /// The signal mask of the call that a signal has interrupted, if it has one of its own.
    pub(crate) call_mask: Option<u64>,
    /// Of the last exception: error code, vector, address. Signal frames have them.
    pub(crate) last_fault: (u64, u64, u64),
    /// The exit status of the thread.
    status: i32,
    /// The search for the page that the host does not have, while it goes on.
    search: Option<Search>,
}

/// Bits of the error code of a page fault.
const FAULT_WRITE: u64 = 1 << 1;
const FAULT_USER: u64 = 1 << 2;
const FAULT_FETCH: u64 = 1 << 4;

/// A search for the address of an access for which the host has no memory.
#[derive(Clone, Copy, Debug, Default)]
struct Search {
    /// The last page fault since it began: its address and error code.
    last: Option<u64>,
    code: u64,
    attempts: u32,
}

/// As often may other threads disturb a search.
const MOST_ATTEMPTS: u32 = 100;

impl Thread {
    /// The thread in which the program begins.
    ///
    /// # Errors
    /// If the machine has no virtual CPU for it.
    pub fn new(machine: Arc<Machine>, process: Arc<Process>, start: Start) -> Result<Thread, Error> {
        let mut thread = Thread::with(machine, process)?;
        let registers = thread.vcpu.registers();
        registers.rip = start.instruction;
        registers.rsp = start.stack;
        thread.vcpu.commit();
        Ok(thread)
    }

    fn with(machine: Arc<Machine>, process: Arc<Process>) -> Result<Thread, Error> {
        let mut vcpu = machine.take_vcpu()?;
        let slot = Slot::new(vcpu.immediate_exit());
        let announcer = Announcer::new(&machine, vcpu.number());
        let alternate = AlternateStack::default();
        Ok(Thread {
            machine,
            process,
            vcpu,
            slot,
            announcer,
            clear_tid: 0,
            alternate,
            call_mask: None,
            last_fault: (0, 0, 0),
            status: 0,
            search: None,
        })
    }

    /// Runs the program in the main thread of this process, until the process ends.
    pub fn run_main(mut self) -> ! {
        self.run_with_mask(signals::mask(Some(u64::MAX)));
        std::process::abort()
    }

    /// Runs the program with the signal mask `mask` until this thread of it ends. Before and after
    /// that all signals are blocked. Where the process ends, this does not return.
    fn run_with_mask(&mut self, mask: u64) {
        // SAFETY: slot and virtual CPU live as long as this thread is run, and all signals are
        // blocked otherwise.
        unsafe { self.slot.make_current() };
        signals::mask(Some(mask));
        loop {
            self.deliver();
            if self.machine.is_leaving() {
                let mask = signals::mask(Some(u64::MAX));
                // A signal that has come before is delivered first, and sets the mask.
                if !self.slot.waits() {
                    self.leave(mask);
                }
                continue;
            }
            if !self.machine.has(&self.vcpu) {
                // Its descriptor may be open: whoever parked the process may not have got that far.
                drop(self.use_kvm());
                continue;
            }
            if !is_address(self.vcpu.registers().rip) {
                // A processor that is to go on there refuses its whole state.
                self.on_exception(Exception { vector: 13, code: 0, address: 0 });
                self.vcpu.commit();
                continue;
            }
            match self.vcpu.run() {
                Ok(Exit::Interrupted) => {}
                Ok(Exit::Call) => {
                    self.machine.count_call();
                    self.search = None;
                    if self.on_call() == Outcome::EndThread {
                        return self.end();
                    }
                }
                Ok(Exit::Exception(exception)) => {
                    self.machine.count_exception();
                    self.on_exception(exception);
                    self.vcpu.commit();
                }
                Ok(Exit::RingFull) => {
                    if let Err(errno) = self.machine.take_rings() {
                        let error = std::io::Error::from_raw_os_error(errno);
                        self.fail(&format!("the rings of written pages cannot be emptied: {error}"));
                    }
                }
                Ok(Exit::NoMemory) => self.on_no_memory(),
                Ok(Exit::SplitLock) => {
                    self.last_fault = (0, 17, 0);
                    self.force(&fault_info(libc::SIGBUS as u32, code::BUS_ADRALN, 0));
                    self.vcpu.commit();
                }
                Ok(Exit::Parked) => {
                    let generation = self.vcpu.generation();
                    drop(self.use_kvm());
                    if self.vcpu.generation() == generation && !self.machine.is_leaving() {
                        self.fail("the descriptor of its virtual CPU was closed");
                    }
                }
                Ok(Exit::Stuck(stuck)) => self.fail(&describe(stuck)),
                Err(error) => self.fail(&error.to_string()),
            }
        }
    }

    /// Begins to use KVM for this thread's virtual CPU, which is made anew if it was given up.
    pub(crate) fn use_kvm(&mut self) -> InUse {
        let in_use = self.machine.enter();
        if let Err(error) = self.machine.renew_vcpu(&mut self.vcpu) {
            self.fail(&error.to_string());
        }
        in_use
    }

    fn on_call(&mut self) -> Outcome {
        let registers = self.vcpu.registers();
        let call = Call {
            // Linux takes no other bits.
            number: registers.rax & 0xffff_ffff,
            arguments: [registers.rdi, registers.rsi, registers.rdx, registers.r10, registers.r8, registers.r9],
        };
        // Outside of the machine the call is made again.
        let outcome = if self.machine.is_leaving() { Outcome::Restart } else { self.call(call) };
        match outcome {
            Outcome::Return(result) => self.vcpu.registers().rax = result as u64,
            // `rax` still is the number.
            Outcome::Restart => {
                let registers = self.vcpu.registers();
                registers.rip = registers.rip.wrapping_sub(SYSCALL_BYTES);
            }
            Outcome::Resume | Outcome::EndThread => {}
        }
        self.vcpu.commit();
        outcome
    }

    fn on_exception(&mut self, exception: Exception) {
        let Exception { vector, code: error, address } = self.corrected(exception);
        // Other exceptions come again outside of the machine: the instruction has not been executed.
        if self.machine.is_leaving() && !matches!(vector, 1 | 3 | 4) {
            return;
        }
        if vector == 14 {
            if error & FAULT_FETCH != 0 && self.calls_by_address(address) {
                return;
            }
            let most = if self.search.is_some() { PAGE } else { TABLE_SPAN };
            if let Some(search) = &mut self.search {
                (search.last, search.code) = (Some(address), error);
            }
            if error & 2 != 0 && self.machine.is_tracking() {
                let _in_use = self.use_kvm();
                if self.machine.emulate(&mut self.vcpu, address) {
                    return;
                }
            }
            match self.machine.resolve(address, error & 2 != 0, error & 16 != 0, most) {
                Ok(FaultOutcome::Mapped) => return,
                Ok(result) => {
                    self.last_fault = (error, 14, address);
                    let code = if result == FaultOutcome::NotMapped { code::SEGV_MAPERR } else { code::SEGV_ACCERR };
                    return self.force(&fault_info(libc::SIGSEGV as u32, code, address));
                }
                Err(error) => self.fail(&error.to_string()),
            }
        }
        self.last_fault = (error, u64::from(vector), 0);
        let instruction = self.vcpu.registers().rip;
        let (signal, code, address) = match vector {
            0 => (libc::SIGFPE, code::FPE_INTDIV, instruction),
            1 => (libc::SIGTRAP, self.trap_code(), instruction),
            3 => {
                if self.passes_breakpoint() {
                    return;
                }
                (libc::SIGTRAP, code::SI_KERNEL, 0)
            }
            6 => (libc::SIGILL, code::ILL_ILLOPN, instruction),
            11 | 12 => (libc::SIGBUS, code::SI_KERNEL, 0),
            16 | 19 => (libc::SIGFPE, self.float_code(vector), instruction),
            17 => (libc::SIGBUS, code::BUS_ADRALN, 0),
            _ => {
                // An error code of `int 0x80` names entry 128 of the interrupt table.
                if vector == 13 && error == 0x80 << 3 | 2 {
                    self.process
                        .report(u64::MAX, "the machine has no system calls by int 0x80; the program gets SIGSEGV");
                }
                (libc::SIGSEGV, code::SI_KERNEL, 0)
            }
        };
        self.force(&fault_info(signal as u32, code, address));
    }

    /// Goes back to a breakpoint that is not the program's, after it was taken out. False if it is
    /// the program's, or cannot be taken out.
    fn passes_breakpoint(&mut self) -> bool {
        let at = self.vcpu.registers().rip.wrapping_sub(1);
        let is_out = match breakpoints::at(at) {
            Breakpoint::Own => return false,
            Breakpoint::Gone => true,
            Breakpoint::Foreign(original) => {
                let _announced = self.announcer.announce(&self.machine, Writes::to(at, 1));
                breakpoints::take_out(at, original)
            }
        };
        let effect = if is_out { "has it no more, and the tracer does not see it" } else { "gets SIGTRAP" };
        let text = "there is a breakpoint in its code that its file does not have, for example of a uprobe, which the \
                    machine does not have; the program";
        self.process.report(u64::MAX, &format!("{text} {effect}"));
        if is_out {
            self.vcpu.registers().rip = at;
        }
        is_out
    }

    /// PVM does not know the instruction `int N` (#UD). On a processor it is a trap for N = 3, and
    /// otherwise not allowed (#GP), as the interrupt table says.
    fn corrected(&mut self, exception: Exception) -> Exception {
        const INT: u8 = 0xcd;
        let registers = self.vcpu.registers();
        let mut bytes = [0; 2];
        if exception.vector != 6 || program_memory::read(registers.rip, &mut bytes).is_err() || bytes[0] != INT {
            return exception;
        }
        if bytes[1] == 3 {
            registers.rip = registers.rip.wrapping_add(2);
            return Exception { vector: 3, code: 0, address: 0 };
        }
        Exception { vector: 13, code: u64::from(bytes[1]) << 3 | 2, address: 0 }
    }

    fn trap_code(&mut self) -> i32 {
        // TF: the program steps itself.
        if self.vcpu.registers().rflags & 1 << 8 != 0 { code::TRAP_TRACE } else { code::TRAP_BRKPT }
    }

    /// The code of a floating-point exception, from the status that the processor saved.
    fn float_code(&mut self, vector: u8) -> i32 {
        let _in_use = self.use_kvm();
        let Ok(state) = self.vcpu.vector_state() else { return code::FPE_FLTINV };
        let raised = if vector == 19 {
            let control = state.region[6];
            control & !(control >> 7) & 0x3f
        } else {
            let (control, status) = (state.region[0] & 0xffff, state.region[0] >> 16);
            status & !control & 0x3f
        };
        match raised {
            raised if raised & 1 != 0 => code::FPE_FLTINV,
            raised if raised & 4 != 0 => code::FPE_FLTDIV,
            raised if raised & 8 != 0 => code::FPE_FLTOVF,
            raised if raised & 0x12 != 0 => code::FPE_FLTUND,
            raised if raised & 0x20 != 0 => code::FPE_FLTRES,
            _ => 0,
        }
    }

    /// The guest's tables map a page that the host does not have, for example behind the end of a
    /// mapped file. KVM does not say which: it is among those that the instruction accesses.
    fn on_no_memory(&mut self) {
        match self.missing_page() {
            Some((address, code)) => {
                self.search = None;
                self.signal_missing(address, code);
            }
            None => self.search_page(),
        }
    }

    /// The address that the instruction accesses in vain, and the error code of that access. None
    /// if the host has all that is known of the instruction.
    fn missing_page(&mut self) -> Option<(u64, u64)> {
        let (registers, fs, gs) = self.vcpu.state();
        let mut code = [0; operands::LONGEST];
        let mut len = 0;
        // Up to the end of the page, and then into the next one, if that is there.
        for end in [code.len().min((PAGE - registers.rip % PAGE) as usize), code.len()] {
            let at = registers.rip.wrapping_add(len as u64);
            if len < end && program_memory::read(at, &mut code[len..end]).is_ok() {
                len = end;
            }
        }
        // Where the mapping does not allow the access, the processor has an exception for it.
        let allows = |address, is_right: fn(Protection) -> bool| {
            self.machine.space().mappings.find(address).is_some_and(|mapping| is_right(mapping.protection))
        };
        if len == 0 && allows(registers.rip, Protection::executable) {
            return Some((registers.rip, FAULT_USER | FAULT_FETCH));
        }
        let accessed = operands::of(&code[..len], &registers, (fs, gs)).into_iter().flat_map(|operand| {
            let last = operand.address.saturating_add(operand.len - 1);
            // The page of the first byte, and that of the last one.
            let mut places = vec![operand.address];
            places.extend((page_floor(last) > page_floor(operand.address)).then_some(page_floor(last)));
            places.into_iter().map(move |address| (address, operand.writes))
        });
        let is_missing = |&(address, writes): &(u64, bool)| {
            let is_right = if writes { Protection::writable } else { Protection::readable };
            allows(address, is_right) && !program_memory::has_page(address, writes)
        };
        let code = |writes| FAULT_USER | if writes { FAULT_WRITE } else { 0 };
        accessed.into_iter().find(is_missing).map(|(address, writes)| (address, code(writes)))
    }

    /// Searches the page: all entries are cleared and then made page by page, so that the last page
    /// that the program faults on is the one.
    fn search_page(&mut self) {
        let Some(searched) = self.search.replace(Search::default()) else {
            return self.machine.clear_entries(&mut self.machine.space(), 0, crate::layout::PROGRAM_END);
        };
        let Some(address) = searched.last else {
            if searched.attempts > MOST_ATTEMPTS {
                self.fail("the host lacks memory that the program uses, and does not say where");
            }
            // Another thread has made the entry.
            self.search = Some(Search { attempts: searched.attempts + 1, ..Search::default() });
            return self.machine.clear_entries(&mut self.machine.space(), 0, crate::layout::PROGRAM_END);
        };
        self.search = None;
        self.signal_missing(address, searched.code);
    }

    /// The program gets the signal of an access to `address`, for which the host has no page.
    fn signal_missing(&mut self, address: u64, fault: u64) {
        let result = {
            let mut space = self.machine.space();
            self.machine.reload(&mut space).map(|()| space.mappings.find(address).is_some())
        };
        let (signal, code) = match result {
            Ok(true) if guard_page::is_at(address) => (libc::SIGSEGV, code::SEGV_MAPERR),
            Ok(true) => (libc::SIGBUS, code::BUS_ADRERR),
            Ok(false) => (libc::SIGSEGV, code::SEGV_MAPERR),
            Err(error) => self.fail(&error.to_string()),
        };
        self.last_fault = (fault, 14, address);
        self.force(&fault_info(signal as u32, code, address));
    }

    /// Copies `bytes` to the program's memory at `address`.
    pub(crate) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Fault> {
        let _announced = self.announcer.announce(&self.machine, Writes::to(address, bytes.len() as u64));
        program_memory::write(address, bytes)
    }

    /// Copies `words` to the program's memory at `address`.
    pub(crate) fn write_words(&self, address: u64, words: &[u64]) -> Result<(), Fault> {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write(address, &bytes)
    }

    /// The machine cannot go on: the reason is reported, and the process ends by `SIGKILL`.
    fn fail(&mut self, reason: &str) -> ! {
        let at = self.vcpu.registers().rip;
        crate::process::report(self.process.program(), &format!("the machine failed at {at:#x}: {reason}"));
        signals::die(libc::SIGKILL as u32, &fault_info(libc::SIGKILL as u32, code::SI_KERNEL, 0))
    }

    /// Wakes a thread that waits for a change of the word at `address`.
    fn wake(&self, address: u64) {
        let arguments = [address, libc::FUTEX_WAKE as u64, 1, 0, 0, 0];
        self.interruptible(&Call { number: libc::SYS_futex as u64, arguments }, Writes::NONE);
    }

    /// The locks that this thread holds say that it has ended.
    fn end_locks(&self) {
        for lock in robust::locks() {
            if lock.inherits {
                // The kernel writes to it once more, after this thread's end.
                self.machine.space().tracking.mark_always();
            }
            if self.end_lock(&lock) == Marked::Wakes {
                self.wake(lock.address);
            }
        }
        robust::forget();
    }

    fn end_lock(&self, lock: &Lock) -> Marked {
        let _announced = self.announcer.announce(&self.machine, Writes::to(lock.address, 4));
        let space = self.machine.space();
        let is_writable = |mapping: Mapping| mapping.protection.writable() && mapping.protection.says_readable();
        let is_there = lock.address.is_multiple_of(4)
            && space.mappings.find(lock.address).is_some_and(is_writable)
            && program_memory::read(lock.address, &mut [0; 4]).is_ok();
        // SAFETY: the mapping was just found, and does not change while the space is locked. Nothing of
        // the monitor is at addresses of the program.
        if is_there { unsafe { robust::mark(lock, own_id()) } } else { Marked::Done }
    }

    /// What the kernel does when a thread ends.
    fn end(&mut self) {
        signals::mask(Some(u64::MAX));
        // Whoever joins this thread may unmap its locks.
        self.end_locks();
        if self.clear_tid != 0 && self.write(self.clear_tid, &[0; 4]).is_ok() {
            self.wake(self.clear_tid);
        }
        // SAFETY: only asks.
        let is_first = unsafe { libc::syscall(libc::SYS_getpid) == libc::syscall(libc::SYS_gettid) };
        self.process.end_thread(is_first, self.status);
        if is_first {
            // SAFETY: ends this thread; the process goes on while it has others.
            unsafe { libc::syscall(libc::SYS_exit, 0) };
        }
    }
}

/// Whether a processor with four levels of page tables has the address.
fn is_address(address: u64) -> bool {
    const UNUSED_BITS: u32 = 16;
    ((address << UNUSED_BITS) as i64 >> UNUSED_BITS) as u64 == address
}

fn describe(stuck: Stuck) -> String {
    match stuck {
        Stuck::Shutdown => "the guest's kernel had a fault".to_owned(),
        Stuck::Internal(code) => {
            format!("KVM had an internal error ({code}), for example at an instruction that it does not know")
        }
        Stuck::Entry(code) => format!("the processor refused the state of the virtual CPU ({code:#x})"),
        Stuck::Unexpected(reason) => format!("KVM returned for an unexpected reason ({reason})"),
    }
}
