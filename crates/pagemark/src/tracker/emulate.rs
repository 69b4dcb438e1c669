//! `emulate`: pages stay protected, and each store is decoded, logged by the word, and done through a second mapping. HAC's
//! Emul.
//!
//! What a store instruction does is not reimplemented. The instruction itself is executed in the signal handler, with the registers of the
//! interrupted thread, but with its operand redirected to the same memory in the alias mapping: atomic instructions are
//! atomic, masked ones masked, and flags and results are the processor's own. `stos` and `movs`, whose operands can't be
//! redirected, are done by hand. Whatever else writes (`push`, `call`, x87, scatters, …) opens its page, as with `mprotect`, and
//! all of the page counts as written.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::mprotect::{ByAccess, forked};
use super::pins::Pins;
use super::populated::{Pages, populated};
use super::protected::{Lock, Protected, Taken};
use crate::sys::alias::Alias;
use crate::sys::fault::{self, Armed, Fault, Outcome, WriteFault};
use crate::sys::own_memory;
use crate::sys::pagemap::Pagemap;
use crate::{Mechanism, Range, RangeSet, TrackError, Tracker};

mod cache;
mod decode;
mod execute;
mod words;

use cache::{Cache, Found};
use decode::{Kind, Operand};
use words::{TakenWords, Words};

/// The direction flag: string instructions go down.
const FLAG_DIRECTION: i64 = 1 << 10;

/// Tracks by emulating stores. Only for private memory of this process.
///
/// When a range is first collected, its memory is replaced by shared anonymous memory with the same content, which children
/// made by `fork` do not have; nobody may access it at that moment. It stays so when it is no longer tracked.
#[derive(Debug)]
pub struct Emulate {
    pagemap: Arc<Pagemap>,
    cache: &'static Cache,
    areas: Vec<Area>,
    pins: Pins,
    taken: Taken,
}

/// What became of stores so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Those that were emulated.
    pub emulated_stores: u64,
    /// Those that were not, and opened a page instead.
    pub opened_pages: u64,
}

/// A range that is tracked, as long as this exists.
#[derive(Debug)]
struct Area {
    shared: Arc<Shared>,
    taken: TakenWords,
    _armed: Armed,
}

/// What the signal handler uses.
#[derive(Debug)]
struct Shared {
    pages: Protected<ByAccess>,
    alias: Alias,
    words: Words,
    cache: &'static Cache,
    process: u32,
    emulated_stores: AtomicU64,
    opened_pages: AtomicU64,
}

impl Emulate {
    /// Tracks the address space of this process, whose pagemap it is given.
    ///
    /// # Errors
    /// [`TrackError::Unavailable`]: the system does not let programs make code.
    pub fn new(pagemap: Arc<Pagemap>) -> Result<Self, TrackError> {
        let cache = Cache::get().map_err(|error| TrackError::Unavailable {
            mechanism: Mechanism::Emulate,
            reason: format!(
                "no memory that can be written and executed, as instructions need that are redirected ({error})"
            ),
        })?;
        Ok(Emulate { pagemap, cache, areas: Vec::new(), pins: Pins::default(), taken: Taken::default() })
    }

    /// What became of the stores to all ranges that are tracked now.
    pub fn counts(&self) -> Counts {
        self.areas.iter().fold(Counts::default(), |sum, area| Counts {
            emulated_stores: sum.emulated_stores + area.shared.emulated_stores.load(Ordering::Relaxed),
            opened_pages: sum.opened_pages + area.shared.opened_pages.load(Ordering::Relaxed),
        })
    }

    /// Starts to track a range, and adds what holds data there to `dirty`.
    fn arm(&mut self, range: Range, dirty: &mut RangeSet) -> Result<(), TrackError> {
        let failed = |error| TrackError::from_io(error, || format!("mapping the memory of {range:#x?} twice"));
        if own_memory::describe(&range).map_err(failed)?.iter().any(|mapping| mapping.is_shared) {
            return Err(TrackError::Unavailable {
                mechanism: Mechanism::Emulate,
                reason: format!("the memory of {range:#x?} is shared, and only private memory can be mapped anew"),
            });
        }
        let held = populated(&self.pagemap, Pages::All, &range.clone().into())?;
        // SAFETY: the range is plain private data, and `Emulate` demands that nobody accesses it now.
        let alias = unsafe { Alias::take_over(&range, &held) }.map_err(failed)?;
        let words = Words::new((range.end - range.start) as usize / crate::PAGE_SIZE);
        let taken = words.room();
        let shared = Arc::new(Shared {
            pages: Protected::new(range.clone(), ByAccess),
            alias,
            words,
            cache: self.cache,
            process: std::process::id(),
            emulated_stores: AtomicU64::new(0),
            opened_pages: AtomicU64::new(0),
        });
        let armed = fault::arm(range.clone(), shared.clone()).map_err(failed)?;
        let area = Area { shared, taken, _armed: armed };
        area.shared.pages.close_all().map_err(failed)?;
        self.pins.open_in(&area.shared.pages).map_err(failed)?;
        dirty.extend(&held);
        self.areas.push(area);
        Ok(())
    }
}

impl Tracker for Emulate {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Emulate
    }

    fn granularity_bytes(&self) -> u64 {
        words::WORD as u64
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), TrackError> {
        self.areas.retain(|area| ranges.iter().any(|range| range == *area.shared.pages.range()));
        let pinned = self.pins.pages();
        for range in ranges.iter() {
            let Some(area) = self.areas.iter_mut().find(|area| *area.shared.pages.range() == range) else {
                self.arm(range, dirty)?;
                continue;
            };
            let (shared, taken) = (&area.shared, &mut area.taken);
            let mut opened = RangeSet::new();
            let closed = shared.pages.close(&pinned, &mut self.taken, &mut opened, || shared.words.take(taken));
            let mut written = RangeSet::new();
            taken.add_to(range.start, &mut written);
            written.extend(&opened);
            dirty.extend(&written);
            closed.map_err(|error| TrackError::from_io(error, || format!("protecting {range:#x?}")))?;
        }
        Ok(())
    }

    fn pin(&mut self, range: &Range) -> Result<(), TrackError> {
        self.pins.add(range, self.areas.iter().map(|area| &area.shared.pages))
    }

    fn unpin(&mut self, range: &Range) {
        self.pins.remove(range);
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // Before the handler goes. If the range was unmapped meanwhile, there is nothing to do. A child does not have it.
        if !forked(self.shared.process) {
            let _ = self.shared.pages.lock().allow(self.shared.pages.range());
        }
    }
}

impl WriteFault for Shared {
    fn handle(&self, fault: &mut Fault<'_>) -> Outcome {
        if forked(self.process) {
            return Outcome::Crash;
        }
        let _inside = self.pages.gate().enter();
        if self.emulate(fault).is_some() {
            self.emulated_stores.fetch_add(1, Ordering::Relaxed);
            return Outcome::Resume;
        }
        self.opened_pages.fetch_add(1, Ordering::Relaxed);
        match self.pages.open_inside(&(fault.address..fault.address + 1)) {
            Ok(()) => Outcome::Resume,
            Err(_) => Outcome::Crash,
        }
    }
}

impl Shared {
    /// Does the store through the alias and logs it, and moves the thread on. None, with nothing done, if it can't be emulated.
    fn emulate(&self, fault: &mut Fault<'_>) -> Option<()> {
        let address = fault.context.uc_mcontext.gregs[libc::REG_RIP as usize] as u64;
        // SAFETY: the thread was interrupted in executing the instruction there.
        let Found { store, code } = unsafe { self.cache.at(address) }?;
        let next = address.wrapping_add(store.length.into()) as libc::greg_t;
        match store.kind {
            Kind::Other => None,
            Kind::Execute { operand, bytes, uses_vectors, scratch, .. } => {
                let target = operand_address(&operand, &fault.context.uc_mcontext.gregs);
                let written = self.within(target, u64::from(bytes))?;
                // Unless the fault lies in what is said to be written, something was not understood.
                if !(target..target + u64::from(bytes)).contains(&fault.address) {
                    return None;
                }
                let vectors = match uses_vectors {
                    true => execute::vector_state(fault.context)?,
                    false => (std::ptr::null(), 0),
                };
                let registers = &mut fault.context.uc_mcontext.gregs;
                let alias = self.alias_of(target).as_ptr() as libc::greg_t;
                self.words.set(written);
                let before = std::mem::replace(&mut registers[scratch], alias);
                // SAFETY: `decode` lets only such instructions through; what they write, in the alias of the region, was just
                // found to lie within it; the vector state is the context's.
                unsafe { execute::execute(registers, code, vectors) };
                registers[scratch] = before;
                registers[libc::REG_RIP as usize] = next;
                Some(())
            }
            Kind::Fill { unit, repeats } => self.string(fault, unit, repeats, next, |target, count, registers| {
                let value = registers[libc::REG_RAX as usize];
                // SAFETY: so many units from there lie within the alias.
                unsafe { fill(target, value, count, unit) };
                Some(count)
            }),
            Kind::Copy { unit, repeats } => self.string(fault, unit, repeats, next, |target, count, registers| {
                let source = registers[libc::REG_RSI as usize];
                let destination = registers[libc::REG_RDI as usize];
                let bytes = count * usize::from(unit);
                // A copy onto itself, ahead, repeats what it copied just before.
                if source < destination && destination < source.wrapping_add(bytes as libc::greg_t) {
                    return None;
                }
                // SAFETY: so much lies within the alias.
                let copied = unsafe { copy_from(source as u64, target, bytes) } / usize::from(unit);
                registers[libc::REG_RSI as usize] = source.wrapping_add((copied * usize::from(unit)) as libc::greg_t);
                (copied > 0).then_some(copied)
            }),
        }
    }

    /// Does the part of a string instruction that lies in the range: `write` gets where, how many units at most, and the
    /// registers, and returns how many it wrote.
    fn string(
        &self,
        fault: &mut Fault<'_>,
        unit: u8,
        repeats: bool,
        next: libc::greg_t,
        write: impl FnOnce(*mut u8, usize, &mut [libc::greg_t; 23]) -> Option<usize>,
    ) -> Option<()> {
        let registers = &mut fault.context.uc_mcontext.gregs;
        let target = registers[libc::REG_RDI as usize] as u64;
        let range = self.pages.range();
        if registers[libc::REG_EFL as usize] & FLAG_DIRECTION != 0 || !range.contains(&target) {
            return None;
        }
        let wanted = if repeats { registers[libc::REG_RCX as usize] as u64 } else { 1 };
        let count = wanted.min((range.end - target) / u64::from(unit));
        if count == 0 {
            return None;
        }
        self.words.set(self.within(target, count * u64::from(unit))?);
        let done = write(self.alias_of(target).as_ptr(), count as usize, registers)?;
        registers[libc::REG_RDI as usize] += (done * usize::from(unit)) as libc::greg_t;
        if repeats {
            registers[libc::REG_RCX as usize] -= done as libc::greg_t;
        }
        if !repeats || registers[libc::REG_RCX as usize] == 0 {
            registers[libc::REG_RIP as usize] = next;
        }
        Some(())
    }

    /// The offsets of so many bytes from an address, if all of them lie in the range.
    fn within(&self, address: u64, bytes: u64) -> Option<std::ops::Range<usize>> {
        let range = self.pages.range();
        let end = address.checked_add(bytes)?;
        if address < range.start || end > range.end {
            return None;
        }
        Some((address - range.start) as usize..(end - range.start) as usize)
    }

    fn alias_of(&self, address: u64) -> std::ptr::NonNull<u8> {
        // SAFETY: callers name addresses within the range, of which the alias has as many bytes.
        unsafe { self.alias.start().add((address - self.pages.range().start) as usize) }
    }
}

fn operand_address(operand: &Operand, registers: &[libc::greg_t; 23]) -> u64 {
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
    // SAFETY: the instruction writes what the caller allows, upwards as the direction flag is clear in Rust code.
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

/// Copies from an address that may not be readable, and returns how many bytes that were. Async-signal-safe.
///
/// # Safety
/// So many bytes from `target` on may be written.
unsafe fn copy_from(source: u64, target: *mut u8, bytes: usize) -> usize {
    let local = libc::iovec { iov_base: target.cast(), iov_len: bytes };
    let remote = libc::iovec { iov_base: source as *mut libc::c_void, iov_len: bytes };
    // SAFETY: the kernel writes to the target, which the caller allows, and checks the source.
    let copied = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    usize::try_from(copied).unwrap_or(0)
}

impl std::fmt::Debug for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cache").finish_non_exhaustive()
    }
}
