//! Executing the store at which a thread has stopped, for whoever has got its fault: the signal
//! handler of `emulate`, or the monitor of `pagemark-kvm`.

use std::io;

use super::cache::{Cache, Found};
use super::decode::{Kind, Operand};
use super::execute;
use crate::{Address, ByteCount, Range};

/// The direction flag: string instructions go down.
const FLAG_DIRECTION: i64 = 1 << 10;

/// The general registers of a thread, its instruction pointer and its flags, in the order of the
/// kernel's register array (`libc::REG_R8` and so on).
pub type Registers = [libc::greg_t; 23];

/// A vector state in the format of `XSAVE`, and which of its components may be loaded.
#[derive(Clone, Copy, Debug)]
pub struct Vectors {
    pub(super) state: *const u8,
    pub(super) components: u64,
}

impl Vectors {
    /// The state at `state`, whose components are those of XCR0 that are set in `components`.
    ///
    /// # Safety
    /// `state` is aligned to 64 bytes, and a state in the standard format that the processor can
    /// load. It stays there as long as the value is used.
    pub unsafe fn new(state: *const u8, components: u64) -> Vectors {
        Vectors { state, components: components & execute::VECTORS }
    }
}

/// The memory on which stores are executed, and the thread whose stores they are.
pub trait Memory {
    /// The addresses at which the program writes.
    fn range(&self) -> Range;
    /// Where the memory is written that the program has at `address`, which is in the range.
    fn writable(&self, address: Address) -> *mut u8;
    /// What the thread has in its vector registers; `None` if that is not known.
    fn vectors(&mut self) -> Option<Vectors>;
    /// The bytes at these addresses, which are in the range, are about to be written.
    fn record(&mut self, bytes: Range);
    /// Copies `bytes` bytes from an address of the program that may not be readable, and returns
    /// how many it has copied.
    ///
    /// # Safety
    /// So many bytes from `target` on may be written.
    unsafe fn copy_from(&mut self, source: u64, target: *mut u8, bytes: usize) -> usize;
}

/// The stores of this process that were decoded. A copy names the same.
#[derive(Clone, Copy)]
pub struct Stores {
    cache: &'static Cache,
}

impl std::fmt::Debug for Stores {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stores").finish_non_exhaustive()
    }
}

impl Stores {
    /// Those of this process. A child made by `fork` has to ask again.
    ///
    /// # Errors
    /// The system does not let programs make code.
    pub fn of_this_process() -> io::Result<Stores> {
        Ok(Stores { cache: Cache::get()? })
    }

    /// Executes the store at which a thread has stopped with `registers`, as the write to `fault`
    /// was not allowed, records it, and advances the registers past it. A string instruction may be
    /// done in part. `None`, with nothing done, if the store cannot be executed so.
    /// Async-signal-safe if `memory` is.
    ///
    /// # Safety
    /// The bytes of the instruction can be read. The addresses that `memory` says can be written,
    /// for as many bytes as are left in the range.
    pub unsafe fn execute(&self, registers: &mut Registers, fault: Address, memory: &mut impl Memory) -> Option<()> {
        let address = registers[libc::REG_RIP as usize] as u64;
        // SAFETY: by the contract of this function.
        let Found { store, code } = unsafe { self.cache.at(address) }?;
        let next = address.wrapping_add(store.length.into()) as libc::greg_t;
        match store.kind {
            Kind::Other => None,
            Kind::Execute { operand, bytes, uses_vectors, scratch, .. } => {
                let target = Address::new(operand_address(&operand, registers));
                let operand = within(&memory.range(), target, ByteCount::new(bytes.into()))?;
                // If the fault lies outside of the operand, the decoder has misunderstood the
                // instruction.
                if !operand.contains(&fault) {
                    return None;
                }
                let vectors = match uses_vectors {
                    true => memory.vectors()?,
                    false => Vectors { state: std::ptr::null(), components: 0 },
                };
                memory.record(operand);
                let writable = memory.writable(target) as libc::greg_t;
                let before = std::mem::replace(&mut registers[scratch], writable);
                // SAFETY: `decode` lets only such instructions through; what they write was just
                // found to lie within the memory; the vector state is as its maker promised.
                unsafe { execute::execute(registers, code, (vectors.state, vectors.components)) };
                registers[scratch] = before;
                registers[libc::REG_RIP as usize] = next;
                Some(())
            }
            Kind::Fill { unit, repeats } => {
                string(registers, memory, unit, repeats, next, |target, count, registers, _| {
                    let value = registers[libc::REG_RAX as usize];
                    // SAFETY: all units from there on can be written.
                    unsafe { fill(target, value, count, unit) };
                    Some(count)
                })
            }
            Kind::Copy { unit, repeats } => {
                string(registers, memory, unit, repeats, next, |target, count, registers, memory| {
                    let source = registers[libc::REG_RSI as usize];
                    let destination = registers[libc::REG_RDI as usize];
                    let bytes = count * usize::from(unit);
                    // A copy onto itself, ahead, repeats what it copied just before. One that goes back by
                    // less than a few words is not the kernel's either, which reads some bytes twice.
                    if source.abs_diff(destination) < bytes as u64 {
                        return None;
                    }
                    // SAFETY: that many bytes can be written.
                    let copied = unsafe { memory.copy_from(source as u64, target, bytes) } / usize::from(unit);
                    registers[libc::REG_RSI as usize] =
                        source.wrapping_add((copied * usize::from(unit)) as libc::greg_t);
                    (copied > 0).then_some(copied)
                })
            }
        }
    }
}

/// Does the part of a string instruction that lies in the range: `write` gets where, how many units
/// at most, the registers and the memory, and returns how many it wrote.
fn string<M: Memory>(
    registers: &mut Registers,
    memory: &mut M,
    unit: u8,
    repeats: bool,
    next: libc::greg_t,
    write: impl FnOnce(*mut u8, usize, &mut Registers, &mut M) -> Option<usize>,
) -> Option<()> {
    let target = Address::new(registers[libc::REG_RDI as usize] as u64);
    let range = memory.range();
    if registers[libc::REG_EFL as usize] & FLAG_DIRECTION != 0 || !range.contains(&target) {
        return None;
    }
    let wanted = if repeats { registers[libc::REG_RCX as usize] as u64 } else { 1 };
    let count = wanted.min((range.end - target).get() / u64::from(unit));
    if count == 0 {
        return None;
    }
    memory.record(within(&range, target, ByteCount::new(unit.into()) * count)?);
    let writable = memory.writable(target);
    let done = write(writable, count as usize, registers, memory)?;
    registers[libc::REG_RDI as usize] += (done * usize::from(unit)) as libc::greg_t;
    if repeats {
        registers[libc::REG_RCX as usize] -= done as libc::greg_t;
    }
    if !repeats || registers[libc::REG_RCX as usize] == 0 {
        registers[libc::REG_RIP as usize] = next;
    }
    Some(())
}

/// So many bytes from an address, if all of them lie in the range.
fn within(range: &Range, address: Address, bytes: ByteCount) -> Option<Range> {
    let end = address.checked_add(bytes)?;
    (address >= range.start && end <= range.end).then_some(address..end)
}

fn operand_address(operand: &Operand, registers: &Registers) -> u64 {
    let value = |register: Option<u8>| register.map_or(0, |index| registers[usize::from(index)] as u64);
    value(operand.base)
        .wrapping_add(value(operand.index).wrapping_mul(operand.scale.into()))
        .wrapping_add(operand.displacement)
}

/// `rep stos`.
///
/// # Safety
/// So many units from `target` on may be written.
unsafe fn fill(target: *mut u8, value: libc::greg_t, count: usize, unit: u8) {
    // SAFETY: the instruction writes what the caller allows, upwards as the direction flag is clear
    // in Rust code.
    unsafe {
        match unit {
            1 => {
                std::arch::asm!("rep stosb", inout("rcx") count => _, inout("rdi") target => _, in("rax") value, options(nostack, preserves_flags))
            }
            2 => {
                std::arch::asm!("rep stosw", inout("rcx") count => _, inout("rdi") target => _, in("rax") value, options(nostack, preserves_flags))
            }
            4 => {
                std::arch::asm!("rep stosd", inout("rcx") count => _, inout("rdi") target => _, in("rax") value, options(nostack, preserves_flags))
            }
            _ => {
                std::arch::asm!("rep stosq", inout("rcx") count => _, inout("rdi") target => _, in("rax") value, options(nostack, preserves_flags))
            }
        }
    }
}
