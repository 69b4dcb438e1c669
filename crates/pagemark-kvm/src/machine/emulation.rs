//! `kvm-emulate`: the program cannot write to pages that are tracked so. The monitor executes each
//! store in the program's place, with the emulator of the mechanism `emulate`.
//!
//! The guest's page tables alone protect the pages: the monitor itself writes at the addresses that
//! the program has.

use std::sync::atomic::Ordering;

use kvm_bindings::{kvm_regs, kvm_xsave};
use pagemark::track::emulate::HOT_STORES;
use pagemark::track::emulate::stores::{Memory, Registers, Stores, Vectors};
use pagemark::{Address, Range};
use pagemark_kvm_protocol::machine_calls::Means;

use super::Machine;
use crate::layout::page_floor;
use crate::mappings::Mappings;
use crate::sys::descriptors;
use crate::sys::program_memory;
use crate::vcpu::Vcpu;
use crate::writes::Tracking;

/// The longest instruction, bytes.
const LONGEST: u64 = 15;

/// The trap flag: the program wants an exception behind each instruction.
const FLAG_TRAP: u64 = 1 << 8;

/// The emulator. It makes code, in memory that has a descriptor while it is made.
///
/// # Errors
/// `EOPNOTSUPP`: the system does not let programs make code.
pub(super) fn emulator() -> Result<Stores, i32> {
    let made = descriptors::above_limit(|_| Stores::of_this_process()).and_then(|made| made);
    made.map_err(|error| match error.raw_os_error() {
        Some(passing @ (libc::ENOMEM | libc::EMFILE | libc::ENFILE)) => passing,
        _ => libc::EOPNOTSUPP,
    })
}

impl Machine {
    /// Whether the program's memory is tracked.
    pub fn is_tracking(&self) -> bool {
        self.is_tracking.load(Ordering::SeqCst)
    }

    /// Executes the store at which the program has stopped, as its write to `address` was not
    /// allowed, if that is tracked by the word. Returns true if that is done, and the registers of
    /// `vcpu` are behind the store. Otherwise the fault is to be resolved, and the page may be
    /// written. The thread uses KVM.
    pub fn emulate(&self, vcpu: &mut Vcpu, address: u64) -> bool {
        let mut guard = self.space();
        let space = &mut *guard;
        let tracking = &mut space.tracking;
        let ranges = &tracking.by[Means::Emulate as usize].ranges;
        let Some(range) = ranges.iter().find(|range| range.contains(&address)) else { return false };
        if tracking.stores.is_open(address) {
            return false;
        }
        let registers = *vcpu.registers();
        let done = tracking.emulator.filter(|_| is_code(&space.mappings, registers.rip)).and_then(|emulator| {
            if registers.rflags & FLAG_TRAP != 0 || tracking.stores.count(address) >= u32::from(HOT_STORES) {
                return None;
            }
            let mut list = list(&registers);
            let range = Address::new(range.start)..Address::new(range.end);
            let mut memory = OfProgram { range, tracking, vcpu, state: VectorState(kvm_xsave::default()) };
            // SAFETY: the code and the tracked memory are mapped as the test above and `track` found
            // them, and stay so, as the space is locked. What is written there is the program's.
            unsafe { emulator.execute(&mut list, Address::new(address), &mut memory) }?;
            Some(list)
        });
        match done {
            Some(list) => set(vcpu.registers(), &list),
            None => space.tracking.stores.open(address),
        }
        done.is_some()
    }
}

/// Whether the longest instruction at `address` can be read.
fn is_code(mappings: &Mappings, address: u64) -> bool {
    let is_code = |address| {
        mappings
            .find(address)
            .is_some_and(|mapping| mapping.protection.says_readable() && mapping.protection.executable())
    };
    let last = address.saturating_add(LONGEST - 1);
    is_code(address) && (page_floor(address) == page_floor(last) || is_code(last))
}

/// The vector state as the processor loads it.
#[repr(C, align(64))]
struct VectorState(kvm_xsave);

/// Tracked memory of the program, and the virtual CPU whose store is executed.
struct OfProgram<'a> {
    range: Range,
    tracking: &'a mut Tracking,
    vcpu: &'a Vcpu,
    state: VectorState,
}

impl Memory for OfProgram<'_> {
    fn range(&self) -> Range {
        self.range.clone()
    }

    fn writable(&self, address: Address) -> *mut u8 {
        address.as_mut_ptr()
    }

    fn vectors(&mut self) -> Option<Vectors> {
        self.state = VectorState(self.vcpu.vector_state().ok()?);
        // SAFETY: KVM has just written it in that format; the components are those that the virtual
        // CPU has enabled, which the processor has.
        Some(unsafe { Vectors::new((&raw const self.state).cast(), self.vcpu.vector_components()) })
    }

    fn record(&mut self, bytes: Range) {
        let (start, end) = (bytes.start.get(), bytes.end.get());
        self.tracking.stores.record(start, end);
        // The write passes neither through KVM nor through the guest's tables.
        for means in [Means::Log, Means::Ring, Means::Scan] {
            self.tracking.by[means as usize].mark(means.unit(), start, end);
        }
        self.tracking.listed.add(start, end);
    }

    unsafe fn copy_from(&mut self, source: u64, target: *mut u8, bytes: usize) -> usize {
        // SAFETY: by the contract of this function.
        let target = unsafe { std::slice::from_raw_parts_mut(target, bytes) };
        // Where a part cannot be read, the program copies by itself.
        program_memory::read(source, target).map_or(0, |()| bytes)
    }
}

/// The registers in the order of a list of the kernel's.
fn list(registers: &kvm_regs) -> Registers {
    let mut list = Registers::default();
    let mut from = *registers;
    pairs(&mut from).into_iter().for_each(|(index, value)| list[index as usize] = *value as i64);
    list
}

fn set(registers: &mut kvm_regs, list: &Registers) {
    pairs(registers).into_iter().for_each(|(index, value)| *value = list[index as usize] as u64);
}

fn pairs(registers: &mut kvm_regs) -> [(libc::c_int, &mut u64); 18] {
    [
        (libc::REG_R8, &mut registers.r8),
        (libc::REG_R9, &mut registers.r9),
        (libc::REG_R10, &mut registers.r10),
        (libc::REG_R11, &mut registers.r11),
        (libc::REG_R12, &mut registers.r12),
        (libc::REG_R13, &mut registers.r13),
        (libc::REG_R14, &mut registers.r14),
        (libc::REG_R15, &mut registers.r15),
        (libc::REG_RDI, &mut registers.rdi),
        (libc::REG_RSI, &mut registers.rsi),
        (libc::REG_RBP, &mut registers.rbp),
        (libc::REG_RBX, &mut registers.rbx),
        (libc::REG_RDX, &mut registers.rdx),
        (libc::REG_RAX, &mut registers.rax),
        (libc::REG_RCX, &mut registers.rcx),
        (libc::REG_RSP, &mut registers.rsp),
        (libc::REG_RIP, &mut registers.rip),
        (libc::REG_EFL, &mut registers.rflags),
    ]
}
