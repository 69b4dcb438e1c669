//! What a store holds, and what is done with it.

use std::io;
use std::ops::Range;

use super::chunks::{Chunks, ENTRY_BYTES, Staged};
use super::nodes::{FAN_OUT, NODE_BYTES};
use super::packing::Packing;
use super::tree::{Change, Root, Trees};
use super::{Area, SnapshotError, Usage};
use crate::RangeSet;

/// When memory is scarce, so much more than is needed is freed: the budget by this.
const SPARE_SHARE: u64 = 16;

/// Chunks, trees and the budget that they keep within.
pub(super) struct State {
    chunks: Chunks,
    trees: Trees,
    budget_bytes: Option<u64>,
}

/// How many chunks ahead of a copy the table is looked at that says where they are.
const PLACES_AHEAD: usize = 4;

/// The chunks that a snapshot must look at, by position, and those that become zeros as a whole.
struct Touched {
    dirty: RangeSet,
    zeros: RangeSet,
}

impl State {
    pub fn new(chunk_bytes: usize, seed: u64, budget_bytes: Option<u64>) -> State {
        State { chunks: Chunks::new(chunk_bytes, seed, budget_bytes.is_some()), trees: Trees::new(seed), budget_bytes }
    }

    pub fn usage(&self) -> Usage {
        let [compressed_chunks, delta_chunks] = self.chunks.packed_chunks();
        Usage {
            chunks: self.chunks.used() as u64,
            compressed_chunks,
            delta_chunks,
            nodes: self.trees.nodes() as u64,
            content_bytes: self.chunks.content_bytes(),
            overhead_bytes: self.chunks.table_bytes() + self.trees.table_bytes(),
            held_bytes: self.held_bytes(),
            mapped_bytes: self.chunks.mapped_bytes(),
        }
    }

    /// What the budget limits: the content, and the parts of tables that are in use.
    fn held_bytes(&self) -> u64 {
        let packing_bytes = self.budget_bytes.map_or(0, |_| Packing::CHUNK_BYTES);
        self.chunks.content_bytes()
            + self.chunks.used() as u64 * (ENTRY_BYTES + packing_bytes)
            + self.trees.nodes() as u64 * NODE_BYTES
    }

    /// Packs chunks until so many bytes more can be held.
    fn make_room(&mut self, bytes: u64) -> Result<(), SnapshotError> {
        let Some(budget_bytes) = self.budget_bytes else { return Ok(()) };
        let fits = |held: u64, limit: u64| held.saturating_add(bytes) <= limit;
        if fits(self.held_bytes(), budget_bytes) {
            return Ok(());
        }
        while !fits(self.held_bytes(), budget_bytes - budget_bytes / SPARE_SHARE)
            && self.chunks.pack_coldest().map_err(SnapshotError::memory)?
        {}
        self.chunks.trim();
        match self.held_bytes() {
            held if fits(held, budget_bytes) => Ok(()),
            held => Err(SnapshotError::BudgetExceeded { budget_bytes, needed_bytes: held.saturating_add(bytes) }),
        }
    }

    /// A new tree: `previous`, with what the area holds in `dirty`, and zeros in `forget`. The caller has a reference to it.
    pub fn take(
        &mut self,
        previous: Option<Root>,
        area: &Area<'_>,
        dirty: &RangeSet,
        forget: &RangeSet,
    ) -> Result<Root, SnapshotError> {
        let bytes = area.bytes() as u64;
        let old = previous.unwrap_or_else(|| self.trees.zeros(self.positions(bytes)));
        let touched = self.touched(bytes, dirty, forget);
        let mut changes = Vec::new();
        let taken = self.put(old, area, touched, forget, &mut changes).and_then(|()| {
            let new_nodes = self.trees.most_new_nodes(old.height, &changes).ok_or(SnapshotError::Full)?;
            self.make_room(new_nodes * NODE_BYTES)
        });
        let root = taken.map(|()| self.trees.update(old, &changes, &mut self.chunks));
        // The tree has references of its own.
        changes.iter().for_each(|change| self.chunks.release(change.chunk));
        root
    }

    pub fn release(&mut self, root: Root) {
        self.trees.release(root, &mut self.chunks);
    }

    /// Which chunks an area of that length has.
    fn positions(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.chunks.chunk_bytes() as u64)
    }

    /// The bytes of an area of that length that a chunk covers.
    fn span(&self, position: u64, bytes: u64) -> Range<u64> {
        let chunk_bytes = self.chunks.chunk_bytes() as u64;
        position * chunk_bytes..((position + 1) * chunk_bytes).min(bytes)
    }

    /// Positions of the chunks that a set of bytes touches.
    fn rounded_out(&self, set: &RangeSet) -> RangeSet {
        let chunk_bytes = self.chunks.chunk_bytes() as u64;
        set.iter().map(|range| range.start / chunk_bytes..range.end.div_ceil(chunk_bytes)).collect()
    }

    fn touched(&self, bytes: u64, dirty: &RangeSet, forget: &RangeSet) -> Touched {
        let chunk_bytes = self.chunks.chunk_bytes() as u64;
        let end = |end: u64| if end == bytes { end.div_ceil(chunk_bytes) } else { end / chunk_bytes };
        let zeros: RangeSet = forget.iter().map(|range| range.start.div_ceil(chunk_bytes)..end(range.end)).collect();
        let mut dirty = self.rounded_out(dirty);
        dirty.extend(&self.rounded_out(forget));
        dirty.subtract(&zeros);
        Touched { dirty, zeros }
    }

    /// Puts the touched chunks, and names in `changes` those that differ from `old`, each with a reference.
    fn put(
        &mut self,
        old: Root,
        area: &Area<'_>,
        touched: Touched,
        forget: &RangeSet,
        changes: &mut Vec<Change>,
    ) -> Result<(), SnapshotError> {
        let mut zeros = touched.zeros.iter().peekable();
        let held = self.held_at(old, &touched.dirty);
        for (index, &(position, was)) in held.iter().enumerate() {
            self.prefetch(&held[index..], area);
            while let Some(run) = zeros.next_if(|run| run.start < position) {
                changes.push(Change { positions: run, chunk: 0 });
            }
            let chunk = self.put_chunk(position, was, area, forget)?;
            if chunk == was {
                self.chunks.release(chunk);
            } else {
                changes.push(Change { positions: position..position + 1, chunk });
            }
        }
        changes.extend(zeros.map(|positions| Change { positions, chunk: 0 }));
        Ok(())
    }

    /// The chunk for what the area holds at a position, where `was` was before; with a reference for the caller.
    fn put_chunk(&mut self, position: u64, was: u32, area: &Area<'_>, forget: &RangeSet) -> Result<u32, SnapshotError> {
        let span = self.span(position, area.bytes() as u64);
        let (start, length) = (span.start as usize, (span.end - span.start) as usize);
        if forget.within(span.clone()).next().is_none() {
            // Most of what was not written, or is zeros, is not even copied.
            if self.chunks.plain(was).is_some_and(|content| area.equals(start, &content[..length])) {
                self.chunks.retain(was);
                return Ok(was);
            }
            if area.is_zero(start..start + length) {
                return Ok(0);
            }
        }
        let staged = self.chunks.stage(was, |content| {
            area.read(start, &mut content[..length]);
            content[length..].fill(0);
            for hole in forget.within(span.clone()) {
                content[(hole.start - span.start) as usize..(hole.end - span.start) as usize].fill(0);
            }
        });
        match staged.map_err(SnapshotError::memory)? {
            Staged::Held(chunk) => Ok(chunk),
            Staged::New(tag) => {
                self.make_room(self.chunks.chunk_bytes() as u64 + ENTRY_BYTES + Packing::CHUNK_BYTES)?;
                self.chunks.keep(tag, was).ok_or(SnapshotError::Full)
            }
        }
    }

    /// Makes the area hold what the tree says. With `current`, it holds another tree's content but for what is dirty.
    /// Returns what was written.
    pub fn restore(&self, wanted: Root, current: Option<(Root, &RangeSet)>, area: &Area<'_>) -> RangeSet {
        let bytes = area.bytes() as u64;
        let unknown = match current {
            Some((_, dirty)) => self.rounded_out(dirty),
            None => RangeSet::from(0..self.positions(bytes)),
        };
        let mut differing = Vec::new();
        if let Some((current, _)) = current {
            let mut unknown = unknown.iter().peekable();
            self.trees.diff(current, wanted, &mut |position, _, chunk| {
                while unknown.next_if(|range| range.end <= position).is_some() {}
                if unknown.peek().is_none_or(|range| range.start > position) {
                    differing.push((position, chunk));
                }
            });
        }
        let mut written = self.write(&differing, area, |_, _| true);
        let differs = |offset: usize, content: &[u8]| !area.equals(offset, content);
        written.extend(&self.write(&self.held_at(wanted, &unknown), area, differs));
        written
    }

    /// Writes those of the chunks, by their positions, for which `is_wanted` holds, given offset and content. Returns what was written.
    fn write(&self, held: &[(u64, u32)], area: &Area<'_>, mut is_wanted: impl FnMut(usize, &[u8]) -> bool) -> RangeSet {
        let (mut written, mut scratch) = (RangeSet::new(), Vec::new());
        for (index, &(position, chunk)) in held.iter().enumerate() {
            self.prefetch(&held[index..], area);
            let span = self.span(position, area.bytes() as u64);
            let (start, length) = (span.start as usize, (span.end - span.start) as usize);
            let content = &self.chunks.content(chunk, &mut scratch)[..length];
            if is_wanted(start, content) {
                area.write(start, content);
                written.insert(span);
            }
        }
        written
    }

    /// The chunks of a tree at some positions.
    fn held_at(&self, root: Root, positions: &RangeSet) -> Vec<(u64, u32)> {
        let mut held = Vec::with_capacity(positions.total_bytes() as usize);
        for run in positions.iter() {
            let mut leaf = [0; FAN_OUT];
            for position in run.clone() {
                let child = position as usize % FAN_OUT;
                if child == 0 || position == run.start {
                    leaf = self.trees.leaf(root, position);
                }
                held.push((position, leaf[child]));
            }
        }
        held
    }

    /// Has the processor fetch the beginning of the next chunk, of the store's and of the area's, while the first one is
    /// copied: they lie on pages that it can't foresee.
    fn prefetch(&self, held: &[(u64, u32)], area: &Area<'_>) {
        if let Some(&(position, chunk)) = held.get(1) {
            area.prefetch(position as usize * self.chunks.chunk_bytes());
            self.chunks.prefetch_content(chunk);
        }
        if let Some(&(_, chunk)) = held.get(PLACES_AHEAD) {
            self.chunks.prefetch_place(chunk);
        }
    }

    /// Where two trees of areas of that length differ.
    pub fn diff(&self, a: Root, b: Root, bytes: u64) -> RangeSet {
        let mut differing = RangeSet::new();
        self.trees.diff(a, b, &mut |position, _, _| differing.insert(self.span(position, bytes)));
        differing
    }

    /// Reads from a tree.
    pub fn read(&self, root: Root, offset: u64, mut to: &mut [u8]) {
        let chunk_bytes = self.chunks.chunk_bytes();
        let (mut position, mut skipped) = (offset / chunk_bytes as u64, (offset % chunk_bytes as u64) as usize);
        let mut scratch = Vec::new();
        while !to.is_empty() {
            let content = &self.chunks.content(self.trees.chunk(root, position), &mut scratch)[skipped..];
            let (part, rest) = to.split_at_mut(content.len().min(to.len()));
            part.copy_from_slice(&content[..part.len()]);
            (to, position, skipped) = (rest, position + 1, 0);
        }
    }
}

impl SnapshotError {
    fn memory(source: io::Error) -> SnapshotError {
        SnapshotError::Memory { source }
    }
}
