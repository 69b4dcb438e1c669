//! What KVM has noted of the program's writes, for whoever tracks the process from outside
//! ([`pagemark_kvm_protocol::guest_tables`]): a bit for each page of each memory slot, at fixed
//! addresses.
//!
//! The log of a machine is read there when it is given up. What is taken out of rings is noted
//! there before. The bits change only while the program's mappings are locked, by threads that use
//! KVM, so that nobody changes them in a process that is parked.

use std::sync::atomic::{AtomicU64, Ordering};

use pagemark_kvm_protocol::description::{
    Header, LOG_BYTES, LOGS_ADDRESS, MOST_SLOTS, SLOT_SPAN, SLOTS_ADDRESS, log_address, tracks_by,
};
use pagemark_kvm_protocol::write_record::WriteRecord;

use crate::layout::PAGE;

/// What is noted of this process.
#[derive(Clone, Copy, Debug)]
pub struct NotedWrites {
    header: &'static Header,
}

impl NotedWrites {
    /// Described by `header`, which is at its address.
    pub(super) fn new(header: &'static Header) -> NotedWrites {
        NotedWrites { header }
    }

    /// A new machine without memory slots keeps `record`. Returns whether it is to note all writes
    /// for a tracker outside.
    pub fn begin(&self, record: WriteRecord) -> bool {
        let tracker = self.header.tracker.load(Ordering::SeqCst);
        let is_wanted = tracks_by(tracker, record.means());
        self.header.keeps.store(record.word(), Ordering::Relaxed);
        self.header.logged.store(if is_wanted { tracker } else { 0 }, Ordering::SeqCst);
        is_wanted
    }

    /// Whether the machine notes all writes.
    pub fn is_wanted(&self) -> bool {
        self.header.logged.load(Ordering::Relaxed) != 0
    }

    /// Describes the memory slots that stand for `spans`, the slot 1 first.
    pub fn describe_slots(&self, spans: &[u64]) {
        let described = self.header.slots.load(Ordering::Relaxed) as usize;
        // SAFETY: within the description, which is never unmapped, and zeros are valid words.
        let words = unsafe { std::slice::from_raw_parts(SLOTS_ADDRESS as *const AtomicU64, MOST_SLOTS) };
        for (word, span) in words.iter().zip(spans).skip(described) {
            word.store(*span, Ordering::Relaxed);
        }
        self.header.slots.store(spans.len() as u64, Ordering::Release);
    }

    /// The page of that number in the memory slot `slot` was written.
    pub fn add(&self, slot: usize, page: u64) {
        if let Some(bits) = bits(slot)
            && let Some(word) = bits.get(page as usize / 64)
        {
            word.fetch_or(1 << (page % 64), Ordering::Relaxed);
        }
    }

    /// Takes what is noted: calls `each` with the addresses of written pages.
    pub fn take(&self, mut each: impl FnMut(u64, u64)) {
        let slots = (self.header.slots.load(Ordering::Relaxed) as usize).min(MOST_SLOTS);
        for slot in 1..=slots {
            // SAFETY: within the description, as above.
            let span = unsafe { &*((SLOTS_ADDRESS + (slot as u64 - 1) * 8) as *const AtomicU64) };
            let base = span.load(Ordering::Relaxed) * SLOT_SPAN;
            for (index, word) in (0..).zip(bits(slot).unwrap_or_default()) {
                let mut word = word.load(Ordering::Relaxed);
                while word != 0 {
                    let page = base + (index * 64 + u64::from(word.trailing_zeros())) * PAGE;
                    each(page, page + PAGE);
                    word &= word - 1;
                }
            }
        }
        self.forget(slots);
    }

    /// In a child made by `fork`: nothing is noted of it.
    pub fn begin_child(&self) {
        self.header.logged.store(0, Ordering::Relaxed);
        self.forget((self.header.slots.load(Ordering::Relaxed) as usize).min(MOST_SLOTS));
    }

    /// All bits of the first `slots` slots are 0, and take no memory.
    fn forget(&self, slots: usize) {
        if slots > 0 {
            let bytes = slots * LOG_BYTES as usize;
            // SAFETY: private anonymous memory of the description, which holds bits alone.
            unsafe { libc::madvise(LOGS_ADDRESS as *mut libc::c_void, bytes, libc::MADV_DONTNEED) };
        }
    }
}

/// The bits of a memory slot; none if it is not described.
fn bits(slot: usize) -> Option<&'static [AtomicU64]> {
    // SAFETY: within the description, which is never unmapped; zeros are valid words, and all
    // accesses are atomic.
    let of =
        |slot| unsafe { std::slice::from_raw_parts(log_address(slot) as *const AtomicU64, LOG_BYTES as usize / 8) };
    (1..=MOST_SLOTS).contains(&slot).then(|| of(slot))
}
