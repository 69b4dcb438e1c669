//! `compare`: reads all memory, and compares each page with its content at the previous collect:
//! memory of this process with a copy (`compare/copies.rs`), other processes by hashes. SPM does so
//! where the kernel has no soft-dirty bits.

use std::collections::BTreeMap;
use std::sync::Arc;

use pagemark_linux::memory::Memory;
use pagemark_linux::pagemap::Pagemap;

use super::full::Full;
use super::populated::{DataPages, Seen};
use super::registry::{self, MachineTracking, MechanismEntry, MemoryPart, ProcessTracking};
use crate::{
    AddressRangeExt, ByteCount, ContentId, Error, Mechanism, PAGE_SIZE, PageNumber, PageRangeExt, Range, RangeSet,
    Tracker, ranges,
};

mod copies;

use copies::CompareCopies;

/// The mechanism `compare`.
pub const ENTRY: MechanismEntry = MechanismEntry {
    name: "compare",
    description: "each page, or a hash of it, is compared with that of the previous interval",
    requirement: "nothing; reads all memory each time",
    is_exclusive: false,
    sees_other_mappings: true,
    own_memory: |memory| Ok(Box::new(CompareCopies::new(registry::own_pagemap()?, memory)?)),
    machine: Some(MachineTracking::OfProcess),
    process: Some(ProcessTracking {
        needs_userfaultfd: false,
        needs_stop: false,
        needs_parking: false,
        compares_content: true,
        hot_after: None,
        private_parts: &[MemoryPart::Private],
        tracker: |memory, part| match part {
            // Whether a file was written shows in its times.
            MemoryPart::SharedFile => Ok(Box::new(Full::new(memory.pagemap.clone(), part.pages()))),
            _ => Ok(Box::new(Compare::new(memory.pagemap.clone(), memory.memory.clone(), part.pages()))),
        },
    }),
};

/// Pages of a block: hashes are kept in blocks, 16 bytes a page.
const BLOCK_PAGES: u64 = 64;

/// Read at once.
const BATCH: ByteCount = ByteCount::of_pages(256);

/// Reports the pages of another process whose content differs from that at the last collect.
#[derive(Debug)]
pub struct Compare {
    pagemap: Arc<Pagemap>,
    memory: Arc<Memory>,
    data: DataPages,
    seen: Seen,
    /// The hashes of the pages, by block number. Those of pages that are not in `seen` are
    /// meaningless.
    hashes: BTreeMap<u64, Box<[ContentId; BLOCK_PAGES as usize]>>,
}

impl Compare {
    /// Tracks the address space of `pagemap`. `memory` is the memory of the same address space.
    pub fn new(pagemap: Arc<Pagemap>, memory: Arc<Memory>, data: impl Into<DataPages>) -> Self {
        Compare { pagemap, memory, data: data.into(), seen: Seen::default(), hashes: BTreeMap::new() }
    }

    /// Hashes `range`, and adds to `dirty` what is new or differs.
    fn compare(&mut self, range: &Range, buffer: &mut Vec<u8>, dirty: &mut RangeSet) -> Result<(), Error> {
        buffer.resize(range.byte_count().to_usize(), 0);
        let missing = self
            .memory
            .read(std::slice::from_ref(range), buffer)
            .map_err(|error| Error::while_tracking(error, || format!("reading {range:#x?}")))?;
        for (number, page) in range.pages().zip(buffer.chunks_exact(PAGE_SIZE)) {
            // The key need not be secret: a program that makes its own pages collide loses only its
            // own writes, and 128 bits do not collide by accident.
            let hash = ContentId::of(&[0; 32], page);
            let block = self
                .hashes
                .entry(number.get() / BLOCK_PAGES)
                .or_insert_with(|| Box::new([ContentId::ZERO; BLOCK_PAGES as usize]));
            let old = &mut block[(number.get() % BLOCK_PAGES) as usize];
            let address = number.address();
            if *old != hash || missing.contains(address) || !self.seen.pages().contains(address) {
                *old = hash;
                dirty.insert(number.addresses());
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

    fn collect(&mut self, ranges: &RangeSet, dirty: &mut RangeSet) -> Result<(), Error> {
        let now = self.data.find(&self.pagemap, ranges)?;
        let mut buffer = Vec::new();
        let mut changed = RangeSet::new();
        let compared = now.iter().try_for_each(|run| {
            ranges::split(std::iter::once(run), BATCH)
                .flatten()
                .try_for_each(|part| self.compare(&part, &mut buffer, &mut changed))
        });
        dirty.extend(&changed);
        compared?;
        super::populated::check_alive(&self.pagemap)?;
        self.hashes.retain(|block, _| {
            let first = PageNumber::new(block * BLOCK_PAGES);
            now.within((first..first + BLOCK_PAGES).addresses()).next().is_some()
        });
        dirty.extend(&self.seen.advance(ranges, now));
        Ok(())
    }
}
