//! A virtual CPU: entering the program, and why the program left.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kvm_bindings::{
    CpuId, KVM_EXIT_DIRTY_RING_FULL, KVM_EXIT_EXCEPTION, KVM_EXIT_FAIL_ENTRY, KVM_EXIT_INTERNAL_ERROR, KVM_EXIT_IO,
    KVM_EXIT_SHUTDOWN, Msrs, kvm_msr_entry, kvm_regs, kvm_segment, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{SyncReg, VcpuFd};

use crate::error::{Error, ErrorKind};
use crate::layout::{PAGE, Physical};
use crate::sys::parking::Saved;
use crate::sys::program_memory;
use crate::sys::table_memory::TableMemory;
use crate::sys::tsc;

pub mod stubs;

/// Selectors, as Linux has them on x86-64: a program sees them in signal frames.
const KERNEL_CODE: u16 = 0x10;
/// The selector of the program's stack and data.
pub const USER_DATA: u16 = 0x2b;
/// The selector of the program's code.
pub const USER_CODE: u16 = 0x33;
const TASK: u16 = 0x40;

const MSR_STAR: u32 = 0xc000_0081;
const MSR_LSTAR: u32 = 0xc000_0082;
const MSR_SYSCALL_MASK: u32 = 0xc000_0084;

/// Flags that a program cannot set: its I/O privilege is 0 and interrupts are enabled.
const FLAGS_FIXED: u64 = 1 << 1 | 1 << 9;
const FLAGS_ALLOWED: u64 = 0x0024_4dd5;

/// Clocks that are read one after the other differ by less.
const LEAST_SUSPENSION: i64 = 1_000_000;

/// As often is KVM asked again that does not run a virtual CPU for now, and after as long each
/// time.
const MOST_ATTEMPTS: u32 = 20;
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(1);

/// The exception of an access that is not aligned.
const ALIGNMENT_CHECK: u32 = 17;

/// Why the program left the virtual CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// A system call, by `syscall`.
    Call,
    /// An exception.
    Exception(Exception),
    /// A signal, or no reason.
    Interrupted,
    /// The host has no memory for an access, for example behind the end of a mapped file.
    NoMemory,
    /// The ring of written pages has no room: it must be emptied.
    RingFull,
    /// An atomic access to two lines of the cache, which the host does not allow.
    SplitLock,
    /// The process has given up the virtual CPU, so that its state can be saved.
    Parked,
    /// KVM cannot go on; the text says why.
    Stuck(Stuck),
}

/// Why KVM cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stuck {
    /// The guest's kernel failed: a defect of the machine.
    Shutdown,
    /// KVM does not know an instruction, or failed otherwise; its code.
    Internal(u32),
    /// The processor refused the state; its code.
    Entry(u64),
    /// An exit for which there is no reason; its number.
    Unexpected(u32),
}

/// An exception of the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exception {
    /// Its number.
    pub vector: u8,
    /// The error code, or 0.
    pub code: u64,
    /// The faulting address of a page fault.
    pub address: u64,
}

/// A virtual CPU and the page of its stack.
pub struct Vcpu {
    fd: VcpuFd,
    /// Its number in the machine.
    number: usize,
    /// That of the machine to which the descriptor belongs.
    generation: u32,
    tables: Arc<TableMemory>,
    /// Guest-physical address of the page with the task state and the kernel stack.
    page: Physical,
    /// The program's registers are where the virtual CPU goes on.
    sregs: kvm_sregs,
    /// The stub of system calls.
    call_stub: u64,
    has_xsave: bool,
    xcr0: u64,
    /// Whether its time-stamp counter is the host's.
    has_host_time: bool,
    /// How long the host had been suspended when that was set.
    suspended: i64,
    /// The vector state, if there is no virtual CPU any more that has it.
    kept: Option<Box<kvm_xsave>>,
    /// How often KVM did not run it, since it did.
    attempts: u32,
}

/// The address of the instruction `out` that is at or before `instruction`: KVM may or may not have
/// gone on behind it.
fn before_out(instruction: u64) -> u64 {
    const PORT: u8 = stubs::CALL_PORT as u8;
    let mut bytes = [0; 4];
    let start = instruction.wrapping_sub(2);
    match program_memory::read(start, &mut bytes).map(|()| bytes) {
        Ok([_, _, 0xe6 | 0xe7, PORT]) | Ok([_, _, 0xee | 0xef, _]) => instruction,
        Ok([0xe6 | 0xe7, PORT, _, _]) => start,
        Ok([_, 0xee | 0xef, _, _]) => start + 1,
        _ => instruction,
    }
}

fn code_segment() -> kvm_segment {
    kvm_segment { selector: USER_CODE, type_: 11, l: 1, ..data_segment() }
}

fn data_segment() -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector: USER_DATA,
        type_: 3,
        present: 1,
        dpl: 3,
        db: 0,
        s: 1,
        l: 0,
        g: 1,
        ..kvm_segment::default()
    }
}

impl Vcpu {
    /// `page` is a page of the guest's kernel for its stack. The numbers are its own and the
    /// machine's generation.
    pub(crate) fn new(
        fd: VcpuFd,
        page: Physical,
        tables: Arc<TableMemory>,
        cpuid: &CpuId,
        (number, generation): (usize, u32),
    ) -> Result<Vcpu, Error> {
        fd.set_cpuid2(cpuid).map_err(Error::kvm("KVM_SET_CPUID2"))?;
        let sregs = fd.get_sregs().map_err(Error::kvm("KVM_GET_SREGS"))?;
        // PVM does not list XSAVE in leaf 1, and has it: the program executes CPUID natively, and so
        // finds AVX.
        let allowed = cpuid.as_slice().iter().find(|leaf| leaf.function == 0xd && leaf.index == 0);
        let has_xsave = allowed.is_some_and(|leaf| leaf.eax & 3 == 3);
        // x87, SSE, AVX, AVX-512 and protection keys. AMX (bits 17, 18) must be asked for, and its
        // state exceeds what `KVM_GET_XSAVE` transfers.
        let xcr0 = allowed.map_or(3, |leaf| u64::from(leaf.eax) & 0xe7);
        let mut vcpu = Vcpu {
            fd,
            number,
            generation,
            tables,
            page,
            sregs,
            call_stub: 0,
            has_xsave,
            xcr0,
            has_host_time: false,
            suspended: 0,
            kept: None,
            attempts: 0,
        };
        vcpu.follow_host_time();
        vcpu.fd.set_sync_valid_reg(SyncReg::Register);
        vcpu.fd.set_sync_valid_reg(SyncReg::SystemRegister);
        Ok(vcpu)
    }

    /// The state in which a program begins: user mode, all registers zero.
    pub(crate) fn reset(&mut self, stubs: &stubs::Stubs, root: Physical) -> Result<(), Error> {
        let mut sregs = self.sregs;
        sregs.cs = code_segment();
        let data = data_segment();
        (sregs.ss, sregs.ds, sregs.es) = (data, data, data);
        (sregs.fs, sregs.gs) = (data, data);
        sregs.gdt.base = stubs.descriptors;
        sregs.gdt.limit = stubs::DESCRIPTOR_BYTES - 1;
        sregs.idt.base = stubs.interrupts;
        sregs.idt.limit = stubs::INTERRUPT_BYTES - 1;
        let task = stubs::task(&self.tables, self.page);
        sregs.tr = kvm_segment {
            base: task,
            limit: stubs::TASK_BYTES as u32 - 1,
            selector: TASK,
            type_: 11,
            present: 1,
            ..kvm_segment::default()
        };
        sregs.cr3 = root.get();
        // PE, MP, ET, NE, WP, AM, PG.
        sregs.cr0 = 0x8005_0033;
        // PAE, OSFXSR, OSXMMEXCPT; FSGSBASE, OSXSAVE where they are.
        sregs.cr4 = 0x20 | 0x200 | 0x400 | if stubs::has_fsgsbase() { 1 << 16 } else { 0 };
        if self.has_xsave {
            sregs.cr4 |= 1 << 18;
        }
        // SCE, LME, LMA, NXE.
        sregs.efer = 0xd01;
        self.load_system_registers(&sregs, stubs)?;
        self.fd
            .set_regs(&kvm_regs { rflags: FLAGS_FIXED, ..kvm_regs::default() })
            .map_err(Error::kvm("KVM_SET_REGS"))?;
        // An exception may be on its way to what was interrupted there.
        self.fd.set_vcpu_events(&kvm_vcpu_events::default()).map_err(Error::kvm("KVM_SET_VCPU_EVENTS"))?;
        let synced = self.fd.sync_regs_mut();
        synced.regs = kvm_regs { rflags: FLAGS_FIXED, ..kvm_regs::default() };
        synced.sregs = sregs;
        (self.sregs, self.call_stub) = (sregs, stubs.call);
        self.fd.get_kvm_run().immediate_exit = 0;
        Ok(())
    }

    /// The program goes on elsewhere. An exception that KVM is about to raise is of the instruction
    /// that was interrupted, and comes again when that is executed.
    pub(crate) fn forget_exception(&self) {
        // A virtual CPU that was given up forgets it too.
        let Ok(mut events) = self.fd.get_vcpu_events() else { return };
        if events.exception.injected | events.exception.pending != 0 {
            events.exception = Default::default();
            let _ = self.fd.set_vcpu_events(&events);
        }
    }

    /// Sets the registers that a program cannot change, but for those of its segments.
    fn load_system_registers(&self, sregs: &kvm_sregs, stubs: &stubs::Stubs) -> Result<(), Error> {
        self.fd.set_sregs(sregs).map_err(Error::kvm("KVM_SET_SREGS"))?;
        if self.has_xsave {
            let mut xcrs = kvm_xcrs { nr_xcrs: 1, ..kvm_xcrs::default() };
            xcrs.xcrs[0].value = self.xcr0;
            self.fd.set_xcrs(&xcrs).map_err(Error::kvm("KVM_SET_XCRS"))?;
        }
        let entry = |index, data| kvm_msr_entry { index, data, ..kvm_msr_entry::default() };
        let star = u64::from(KERNEL_CODE) << 32 | u64::from(USER_DATA - 8) << 48;
        // TF, IF, DF, IOPL, NT, AC are cleared in the stub.
        let entries = [entry(MSR_STAR, star), entry(MSR_LSTAR, stubs.call), entry(MSR_SYSCALL_MASK, 0x4_7700)];
        let msrs = Msrs::from_entries(&entries)
            .map_err(|_| Error::new(ErrorKind::System, "KVM_SET_MSRS", "").reason("no memory"))?;
        let set = self.fd.set_msrs(&msrs).map_err(Error::kvm("KVM_SET_MSRS"))?;
        if set != entries.len() {
            let reason = format!("the machine specific register {:#x} was refused", entries[set].index);
            return Err(Error::new(ErrorKind::System, "KVM_SET_MSRS", "").reason(reason));
        }
        Ok(())
    }

    /// Takes `fresh`, the virtual CPU of the same number in the machine of `generation`, in place
    /// of the one that was given up: the descriptor is a copy of that of `fresh`. `shared_bytes`
    /// are shared by KVM.
    pub(crate) fn renew(
        &mut self,
        fresh: VcpuFd,
        generation: u32,
        shared_bytes: usize,
        cpuid: &CpuId,
        stubs: &stubs::Stubs,
        saved: &Saved,
    ) -> Result<(), Error> {
        fresh.set_cpuid2(cpuid).map_err(Error::kvm("KVM_SET_CPUID2"))?;
        let shared = std::ptr::from_mut(self.fd.get_kvm_run()).cast::<[u8; PAGE as usize]>();
        // The registers are there, as the thread has left or changed them since.
        // SAFETY: the mapping has at least one page.
        let content = unsafe { shared.read() };
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: takes the place of the mapping of this virtual CPU, which is as long. No reference to
        // it is held.
        let at = unsafe { libc::mmap(shared.cast(), shared_bytes, protection, flags, fresh.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED {
            return Err(Error::system("mmap", "of a virtual CPU")(io::Error::last_os_error()));
        }
        drop(fresh);
        // SAFETY: as above.
        unsafe { shared.write(content) };
        self.keep_from_children(shared_bytes);
        let synced = self.fd.sync_regs();
        self.load_system_registers(&synced.sregs, stubs)?;
        self.fd.set_regs(&synced.regs).map_err(Error::kvm("KVM_SET_REGS"))?;
        self.set_vector_state(&saved.vector)?;
        self.fd.set_vcpu_events(&saved.events).map_err(Error::kvm("KVM_SET_VCPU_EVENTS"))?;
        self.generation = generation;
        self.follow_host_time();
        Ok(())
    }

    /// Goes on with what was saved of it, without KVM, if it does not yet.
    pub(crate) fn keep(&mut self, saved: Saved) {
        // An exception that was on its way comes again: its instruction is executed anew.
        self.kept.get_or_insert(saved.vector);
    }

    fn follow_host_time(&mut self) {
        self.suspended = tsc::suspended();
        self.has_host_time = tsc::follow_host(&self.fd);
    }

    /// Whether its time-stamp counter is the host's.
    pub(crate) fn has_host_time(&self) -> bool {
        self.has_host_time
    }

    /// Its number in the machine.
    pub(crate) fn number(&self) -> usize {
        self.number
    }

    /// That of the machine to which it belongs.
    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// The number of its descriptor.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Where KVM shares memory with the monitor.
    pub(crate) fn shared_address(&mut self) -> u64 {
        std::ptr::from_mut(self.fd.get_kvm_run()) as u64
    }

    /// A child made by `fork` gets no mapping of this virtual CPU, which would keep the parent's
    /// machine alive. `size` is that of the mapping.
    pub(crate) fn keep_from_children(&mut self, size: usize) {
        let run = std::ptr::from_mut(self.fd.get_kvm_run());
        // SAFETY: the whole mapping of the virtual CPU; this process keeps it.
        unsafe { libc::madvise(run.cast(), size, libc::MADV_DONTFORK) };
    }

    /// The registers, bases and vector state of `other`.
    pub(crate) fn copy_state(&mut self, other: &mut Vcpu) -> Result<(), Error> {
        let (state, vector) = (other.state(), other.vector_state()?);
        self.set_state(&state, &vector)
    }

    /// The registers and the bases of FS and GS.
    pub(crate) fn state(&mut self) -> (kvm_regs, u64, u64) {
        let registers = *self.registers();
        let (fs, gs) = self.bases();
        (registers, *fs, *gs)
    }

    /// Goes on with these registers, bases and vector state.
    pub(crate) fn set_state(
        &mut self,
        &(registers, fs, gs): &(kvm_regs, u64, u64),
        vector: &kvm_xsave,
    ) -> Result<(), Error> {
        *self.registers() = registers;
        let bases = self.bases();
        (*bases.0, *bases.1) = (fs, gs);
        self.commit();
        self.set_vector_state(vector)
    }

    /// Where a signal handler makes the next entry return at once.
    pub(crate) fn immediate_exit(&mut self) -> *mut u8 {
        &raw mut self.fd.get_kvm_run().immediate_exit
    }

    /// The program's registers.
    pub fn registers(&mut self) -> &mut kvm_regs {
        &mut self.fd.sync_regs_mut().regs
    }

    /// The bases of the program's segments FS and GS.
    pub fn bases(&mut self) -> (&mut u64, &mut u64) {
        let sregs = &mut self.fd.sync_regs_mut().sregs;
        (&mut sregs.fs.base, &mut sregs.gs.base)
    }

    /// Goes on at a system call whose number says nothing.
    pub(crate) fn go_to_call_stub(&mut self) {
        self.registers().rip = self.call_stub;
        self.commit();
    }

    /// The registers and bases that were changed are those with which the program goes on. Has to
    /// be called after each change.
    pub fn commit(&mut self) {
        let synced = self.fd.sync_regs_mut();
        synced.regs.rflags = synced.regs.rflags & FLAGS_ALLOWED | FLAGS_FIXED;
        (synced.sregs.cs, synced.sregs.ss) = (code_segment(), data_segment());
        self.fd.set_sync_dirty_reg(SyncReg::Register);
        self.fd.set_sync_dirty_reg(SyncReg::SystemRegister);
    }

    /// Runs the program until it leaves. After a call or an exception the registers are the
    /// program's, and [`Vcpu::commit`] must follow.
    ///
    /// # Errors
    /// If KVM refuses.
    pub fn run(&mut self) -> Result<Exit, Error> {
        if self.has_host_time && (tsc::suspended() - self.suspended).abs() > LEAST_SUSPENSION {
            self.follow_host_time();
            if !self.has_host_time && self.is_given_up() {
                // A new one follows the host's time.
                self.has_host_time = true;
                return Ok(Exit::Parked);
            }
            if !self.has_host_time {
                let reason = "the host was suspended, and KVM does not set the counter again";
                return Err(Error::new(ErrorKind::System, "set", "the time-stamp counter").reason(reason));
            }
        }
        let error = match self.fd.run() {
            Ok(_) => None,
            Err(error) => Some(error.errno()),
        };
        let run = self.fd.get_kvm_run();
        let reason = run.exit_reason;
        match error {
            Some(libc::EINTR) => return Ok(self.interrupted()),
            // KVM has no memory for a thread of its own, or the process may have none more.
            Some(libc::EAGAIN) if self.attempts < MOST_ATTEMPTS => {
                self.attempts += 1;
                std::thread::sleep(BETWEEN_ATTEMPTS);
                return Ok(Exit::Interrupted);
            }
            Some(libc::EFAULT | libc::EHWPOISON) => return Ok(Exit::NoMemory),
            // The descriptor is closed, or its number kept by that of a machine.
            Some(libc::EBADF | libc::ENOTTY) => return Ok(Exit::Parked),
            Some(error) => {
                return Err(Error::new(ErrorKind::System, "KVM_RUN", "").source(io::Error::from_raw_os_error(error)));
            }
            None => self.attempts = 0,
        }
        // SAFETY: plain numbers, of which the kernel filled those of the exit's reason.
        let (port, internal, entry, exception) = unsafe {
            let of = &run.__bindgen_anon_1;
            (of.io.port, of.internal.suberror, of.fail_entry.hardware_entry_failure_reason, of.ex.exception)
        };
        Ok(match reason {
            KVM_EXIT_IO if port == stubs::CALL_PORT => {
                if !self.is_in_call_stub() {
                    // The program itself: it gets what `out` gives it outside.
                    let registers = self.registers();
                    registers.rip = before_out(registers.rip);
                    return Ok(Exit::Exception(Exception { vector: 13, code: 0, address: 0 }));
                }
                self.begin_call()
            }
            KVM_EXIT_IO if (stubs::EXCEPTION_PORT..stubs::EXCEPTION_PORT + 32).contains(&port) => {
                Exit::Exception(self.exception((port - stubs::EXCEPTION_PORT) as u8))
            }
            KVM_EXIT_DIRTY_RING_FULL => Exit::RingFull,
            KVM_EXIT_EXCEPTION if exception == ALIGNMENT_CHECK => Exit::SplitLock,
            KVM_EXIT_SHUTDOWN => Exit::Stuck(Stuck::Shutdown),
            KVM_EXIT_INTERNAL_ERROR => Exit::Stuck(Stuck::Internal(internal)),
            KVM_EXIT_FAIL_ENTRY => Exit::Stuck(Stuck::Entry(entry)),
            _ => Exit::Stuck(Stuck::Unexpected(reason)),
        })
    }

    /// True if its descriptor is closed, or its number kept by that of a machine.
    fn is_given_up(&self) -> bool {
        self.fd.get_regs().is_err_and(|error| matches!(error.errno(), libc::EBADF | libc::ENOTTY))
    }

    /// Why the program left where a signal made KVM return. In a stub, its `out` was about to be
    /// executed, and the registers are not yet the program's.
    fn interrupted(&mut self) -> Exit {
        if self.is_in_call_stub() {
            return self.begin_call();
        }
        let (registers, first) = (*self.registers(), self.call_stub - stubs::EXCEPTION_STUBS_BYTES);
        let is_kernel = self.fd.sync_regs().sregs.cs.dpl == 0;
        match registers.rip.checked_sub(first) {
            Some(offset) if is_kernel && offset < stubs::EXCEPTION_STUBS_BYTES => {
                Exit::Exception(self.exception((offset / stubs::STUB_BYTES) as u8))
            }
            _ => Exit::Interrupted,
        }
    }

    fn is_in_call_stub(&mut self) -> bool {
        let stub = self.call_stub;
        (stub..stub + 4).contains(&self.registers().rip)
    }

    /// The registers are the program's again.
    fn begin_call(&mut self) -> Exit {
        let registers = self.registers();
        registers.rip = registers.rcx;
        registers.rflags = registers.r11;
        Exit::Call
    }

    /// Reads the frame that the processor pushed.
    fn exception(&mut self, vector: u8) -> Exception {
        let has_code = matches!(vector, 8 | 10..=14 | 17 | 21);
        let word = |index: u64| self.tables.word(self.page.plus(PAGE - 8 * index)).load(Ordering::Acquire);
        // From the top: SS, RSP, RFLAGS, CS, RIP, the error code.
        let (rsp, rflags, rip) = (word(2), word(3), word(5));
        let code = if has_code { word(6) } else { 0 };
        let address = self.fd.sync_regs_mut().sregs.cr2;
        let registers = self.registers();
        (registers.rsp, registers.rflags, registers.rip) = (rsp, rflags, rip);
        Exception { vector, code, address }
    }

    /// The state of the vector and floating-point registers, as `XSAVE` writes it.
    ///
    /// # Errors
    /// If KVM refuses.
    pub fn vector_state(&self) -> Result<kvm_xsave, Error> {
        if let Some(kept) = &self.kept {
            return Ok(kvm_xsave { region: kept.region, ..kvm_xsave::default() });
        }
        self.fd.get_xsave().map_err(Error::kvm("KVM_GET_XSAVE"))
    }

    /// Sets the state of the vector and floating-point registers.
    ///
    /// # Errors
    /// If KVM refuses it, for example as it has bits set that must be zero.
    pub fn set_vector_state(&mut self, state: &kvm_xsave) -> Result<(), Error> {
        if let Some(kept) = &mut self.kept {
            kept.region = state.region;
            return Ok(());
        }
        // SAFETY: AMX is not enabled, so that the state fits into 4096 bytes.
        unsafe { self.fd.set_xsave(state) }.map_err(Error::kvm("KVM_SET_XSAVE"))
    }

    /// The components of the vector state that are enabled (`XCR0`).
    pub fn vector_components(&self) -> u64 {
        if self.has_xsave { self.xcr0 } else { 3 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagemark_kvm_protocol::write_record::WriteRecord;

    use crate::machine::{self, Machine};
    use crate::sys::descriptors;

    macro_rules! machine_or_skip {
        () => {
            match machine::open().and_then(|kvm| Machine::new(kvm, WriteRecord::Log)) {
                Ok((machine, _)) => machine,
                Err(error) => pagemark_testing::skip!("no machine under KVM: {error}"),
            }
        };
    }

    /// A signal may come when the program has just entered a stub.
    #[test]
    fn an_interrupted_stub_is_what_led_there() {
        let machine = machine_or_skip!();
        let mut vcpu = machine.take_vcpu().expect("the first");
        let stub = vcpu.call_stub;
        let interrupt = |vcpu: &mut Vcpu| {
            // SAFETY: a byte of the page that KVM shares.
            unsafe { vcpu.immediate_exit().write_volatile(1) };
            vcpu.run().expect("KVM_RUN")
        };
        let registers = vcpu.registers();
        (registers.rip, registers.rcx, registers.r11) = (stub, 0x4000_1000, 0x246);
        vcpu.commit();
        assert_eq!(interrupt(&mut vcpu), Exit::Call);
        let registers = vcpu.registers();
        assert_eq!((registers.rip, registers.rflags), (0x4000_1000, 0x246));

        // A page fault: the processor has pushed SS, RSP, RFLAGS, CS, RIP, the error code.
        for (index, word) in [0x2b, 0x4000_3000, 0x246, 0x33, 0x4000_2000, 6].into_iter().enumerate() {
            vcpu.tables.word(vcpu.page.plus(PAGE - 8 * (index as u64 + 1))).store(word, Ordering::Release);
        }
        let synced = vcpu.fd.sync_regs_mut();
        synced.regs.rip = stub - stubs::EXCEPTION_STUBS_BYTES + 14 * stubs::STUB_BYTES;
        let data = data_segment();
        synced.sregs.cs = kvm_segment { selector: KERNEL_CODE, dpl: 0, ..code_segment() };
        synced.sregs.ss = kvm_segment { selector: KERNEL_CODE + 8, dpl: 0, ..data };
        synced.sregs.cr2 = 0x4000_5000;
        vcpu.fd.set_sync_dirty_reg(SyncReg::Register);
        vcpu.fd.set_sync_dirty_reg(SyncReg::SystemRegister);
        let fault = Exception { vector: 14, code: 6, address: 0x4000_5000 };
        assert_eq!(interrupt(&mut vcpu), Exit::Exception(fault));
        let registers = vcpu.registers();
        assert_eq!((registers.rip, registers.rsp, registers.rflags), (0x4000_2000, 0x4000_3000, 0x246));

        vcpu.commit();
        assert_eq!(interrupt(&mut vcpu), Exit::Interrupted);
        machine.put_vcpu(vcpu);
    }

    /// Neither the program that begins nor a handler did cause it.
    #[test]
    fn an_exception_on_its_way_does_not_reach_what_follows() {
        let machine = machine_or_skip!();
        let vcpu = machine.take_vcpu().expect("the first");
        let mut events = vcpu.fd.get_vcpu_events().expect("KVM_GET_VCPU_EVENTS");
        events.exception.injected = 1;
        events.exception.nr = 14;
        events.exception.has_error_code = 1;
        vcpu.fd.set_vcpu_events(&events).expect("KVM_SET_VCPU_EVENTS");
        vcpu.forget_exception();
        let now = vcpu.fd.get_vcpu_events().expect("KVM_GET_VCPU_EVENTS");
        assert_eq!((now.exception.injected, now.exception.pending), (0, 0));
        vcpu.fd.set_vcpu_events(&events).expect("KVM_SET_VCPU_EVENTS");
        machine.put_vcpu(vcpu);
        let vcpu = machine.take_vcpu().expect("the same");
        let events = vcpu.fd.get_vcpu_events().expect("KVM_GET_VCPU_EVENTS");
        assert_eq!((events.exception.injected, events.exception.pending), (0, 0));
        machine.put_vcpu(vcpu);
    }

    /// The process may have given it up when a suspension of the host is noticed.
    #[test]
    fn a_virtual_cpu_that_was_given_up_follows_no_time() {
        let machine = machine_or_skip!();
        let mut vcpu = machine.take_vcpu().expect("the first");
        if !vcpu.has_host_time() {
            pagemark_testing::skip!("no machine under KVM has the time-stamp counter of the host here");
        }
        let null = std::fs::File::open("/dev/null").expect("a file");
        descriptors::replace(null.as_raw_fd(), vcpu.descriptor(), false).expect("another file");
        vcpu.suspended -= 10_000_000_000;
        assert_eq!(vcpu.run().expect("no failure"), Exit::Parked);
    }
}
