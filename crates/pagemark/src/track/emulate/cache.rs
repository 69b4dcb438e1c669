//! Instructions that were decoded, by their address, and the code that executes them elsewhere.

use std::cell::UnsafeCell;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use pagemark_linux::alias::CodeMemory;
use pagemark_linux::at_fork::hold_off;
use pagemark_linux::this_process::OfThisProcess;

use super::decode::{self, Kind, LONGEST, Store};
use crate::PAGE_SIZE;

/// Instructions that are remembered. Programs have few that write to one region; what does not fit
/// is not emulated.
const ENTRIES: usize = 8192;

/// Places in which an instruction may be, from its first on.
const TRIES: usize = 16;

/// Bytes of each entry's code: a cache line, so that making one never touches what another thread
/// executes.
const CODE_BYTES: usize = 64;

const EMPTY: u32 = 0;
const FILLING: u32 = 1;
const READY: u32 = 2;

/// The decoded instructions of the process. Looking up and adding are async-signal-safe, and never
/// wait.
pub struct Cache {
    entries: Box<[Entry]>,
    code: CodeMemory,
}

struct Entry {
    state: AtomicU32,
    address: AtomicU64,
    /// Written by whoever changed the state from empty to filling, and never after it is ready.
    known: UnsafeCell<DecodedStore>,
}

#[derive(Clone, Copy)]
struct DecodedStore {
    /// The instruction: other code may be at the address by now.
    bytes: [u8; LONGEST],
    store: Store,
}

// SAFETY: `known` is written by one thread while the state is `FILLING`, which it alone has set,
// and read only after the state was seen to be `READY`.
unsafe impl Sync for Entry {}

/// A decoded instruction, and where the code is that executes it.
#[derive(Clone, Copy)]
pub struct Found<'a> {
    pub store: &'a Store,
    pub code: *const u8,
}

impl Cache {
    /// The cache of this process. A child made by `fork` makes its own: the memory of the code is
    /// shared with its parent, which decodes other instructions.
    pub fn get() -> io::Result<&'static Cache> {
        static CACHE: Mutex<Option<(OfThisProcess, &'static Cache)>> = Mutex::new(None);
        let _forks = hold_off();
        let mut known = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, cache)) = known.filter(|(maker, _)| maker.is_here()) {
            return Ok(cache);
        }
        decode::warm_up();
        let code = CodeMemory::new(ENTRIES * CODE_BYTES)?;
        let store = Store { length: 0, kind: Kind::Other };
        let empty = || Entry {
            state: AtomicU32::new(EMPTY),
            address: AtomicU64::new(0),
            known: UnsafeCell::new(DecodedStore { bytes: [0; LONGEST], store }),
        };
        // Never freed: a signal handler may use it at any time.
        let cache = Box::leak(Box::new(Cache { entries: (0..ENTRIES).map(|_| empty()).collect(), code }));
        *known = Some((OfThisProcess::new(), cache));
        Ok(cache)
    }

    /// The instruction at an address, decoded if that is new. None if it can't be decoded, or there
    /// is no room.
    ///
    /// # Safety
    /// An instruction at the address was just executed by this thread, so that its bytes can be
    /// read.
    pub unsafe fn at(&self, address: u64) -> Option<Found<'_>> {
        let first = (address.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize;
        for index in (first..first + TRIES).map(|index| index % ENTRIES) {
            let entry = &self.entries[index];
            let state = entry.state.load(Ordering::Acquire);
            // Where another thread is quicker, the next place will do.
            if state == EMPTY
                && entry.state.compare_exchange(EMPTY, FILLING, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                // SAFETY: see the caller's promise; the entry is ours.
                return unsafe { self.fill(index, address) };
            }
            if state != READY || entry.address.load(Ordering::Relaxed) != address {
                continue;
            }
            // SAFETY: the state is `READY`.
            let known = unsafe { &*entry.known.get() };
            let length = usize::from(known.store.length);
            // SAFETY: nothing was promised of the bytes behind the first, if there is other code
            // now. Known bytes that are equal so far belong to the known instruction, so that the
            // next is there too, as the processor read it.
            let is_same = (0..length)
                .all(|offset| unsafe { (address as *const u8).add(offset).read_volatile() } == known.bytes[offset]);
            if is_same {
                return Some(Found { store: &known.store, code: self.code.address(index * CODE_BYTES) });
            }
        }
        None
    }

    /// Decodes the instruction at an address into an entry that this thread has just set to
    /// `FILLING`.
    ///
    /// # Safety
    /// Those of [`Cache::at`].
    unsafe fn fill(&self, index: usize, address: u64) -> Option<Found<'_>> {
        let entry = &self.entries[index];
        // SAFETY: see the caller's promise.
        let Some((bytes, store)) = (unsafe { read_and_decode(address) }) else {
            entry.state.store(EMPTY, Ordering::Release);
            return None;
        };
        // SAFETY: the state says that we alone have the entry.
        unsafe { *entry.known.get() = DecodedStore { bytes, store } };
        if let Kind::Execute { code, code_length, .. } = &store.kind {
            // SAFETY: nobody executes the code of an entry that is not ready.
            unsafe { self.code.write(index * CODE_BYTES, &code[..usize::from(*code_length)]) };
        }
        entry.address.store(address, Ordering::Relaxed);
        entry.state.store(READY, Ordering::Release);
        // SAFETY: nobody writes it any more.
        Some(Found { store: unsafe { &(*entry.known.get()).store }, code: self.code.address(index * CODE_BYTES) })
    }
}

/// Reads an instruction, not beyond the page in which it ends.
///
/// # Safety
/// There is one at the address.
unsafe fn read_and_decode(address: u64) -> Option<([u8; LONGEST], Store)> {
    let in_page = PAGE_SIZE - address as usize % PAGE_SIZE;
    let mut bytes = [0; LONGEST];
    for length in [in_page.min(LONGEST), LONGEST] {
        // SAFETY: the bytes up to the page's end are there. If they are not a whole instruction, it
        // goes on in the next page, which is there too.
        unsafe { std::ptr::copy_nonoverlapping(address as *const u8, bytes.as_mut_ptr(), length) };
        if let Some(store) = decode::decode(&bytes[..length], address) {
            return Some((bytes, store));
        }
        if length == LONGEST {
            break;
        }
    }
    None
}
