//! `compare`: reads everything and compares it with what was there before, by a hash of each page. What SPM does where there
//! is no soft-dirty.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::populated::{Pages, Seen, populated};
use crate::sys::memory::Memory;
use crate::sys::pagemap::Pagemap;
use crate::{ContentId, Mechanism, PAGE_SIZE, Range, RangeSet, TrackError, Tracker};

/// Pages of a block: hashes are kept in blocks, 16 bytes a page.
const BLOCK_PAGES: u64 = 64;
const BLOCK_BYTES: u64 = BLOCK_PAGES * PAGE_SIZE as u64;

/// Pages read at once.
const BATCH_PAGES: u64 = 256;

/// Reports the pages whose content differs from that at the last collect.
#[derive(Debug)]
pub struct Compare {
    pagemap: Arc<Pagemap>,
    memory: Arc<Memory>,
    pages: Pages,
    seen: Seen,
    /// By block number, the hashes of its pages. Without meaning for pages that are not in `seen`.
    hashes: BTreeMap<u64, Box<[ContentId; BLOCK_PAGES as usize]>>,
}

impl Compare {
    /// Tracks the address space of `pagemap`, from which `memory` must be too.
    pub fn new(pagemap: Arc<Pagemap>, memory: Arc<Memory>, pages: Pages) -> Self {
        Compare { pagemap, memory, pages, seen: Seen::default(), hashes: BTreeMap::new() }
    }

    /// Hashes `range`, and adds to `dirty` what is new or differs.
    fn compare(&mut self, range: &Range, buffer: &mut Vec<u8>, dirty: &mut RangeSet) -> Result<(), TrackError> {
        buffer.resize((range.end - range.start) as usize, 0);
        let missing = self
            .memory
            .read(std::slice::from_ref(range), buffer)
            .map_err(|error| TrackError::from_io(error, || format!("reading {range:#x?}")))?;
        for (address, page) in range.clone().step_by(PAGE_SIZE).zip(buffer.chunks_exact(PAGE_SIZE)) {
            // The key may be known: a program that makes its own pages collide loses only its own writes, and
            // 128 bits do not collide by accident.
            let hash = ContentId::of(&[0; 32], page);
            let block = self
                .hashes
                .entry(address / BLOCK_BYTES)
                .or_insert_with(|| Box::new([ContentId::ZERO; BLOCK_PAGES as usize]));
            let old = &mut block[(address % BLOCK_BYTES) as usize / PAGE_SIZE];
            if *old != hash || missing.contains(address) || !self.seen.pages().contains(address) {
                *old = hash;
                dirty.insert(address..address + PAGE_SIZE as u64);
            }
        }
        Ok(())
    }
}

impl Tracker for Compare {
    fn mechanism(&self) -> Mechanism {
        Mechanism::Compare
    }

    fn populated(&self) -> Option<&RangeSet> {
        Some(self.seen.pages())
    }

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), TrackError> {
        let now = populated(&self.pagemap, self.pages, ranges)?;
        let mut buffer = Vec::new();
        let mut changed = RangeSet::new();
        let compared = now.iter().try_for_each(|run| {
            let mut start = run.start;
            while start < run.end {
                let end = run.end.min(start + BATCH_PAGES * PAGE_SIZE as u64);
                self.compare(&(start..end), &mut buffer, &mut changed)?;
                start = end;
            }
            Ok(())
        });
        dirty.extend(&changed);
        compared?;
        super::populated::check_alive(&self.pagemap)?;
        self.hashes.retain(|block, _| now.within(block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES).next().is_some());
        dirty.extend(&self.seen.advance(ranges, now));
        Ok(())
    }
}
