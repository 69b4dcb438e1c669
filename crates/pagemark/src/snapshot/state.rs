//! The content of a store, and the operations on it.

use std::io;
use std::iter::Peekable;
use std::ops::Range;

use pagemark_linux::room;

use super::chunks::{Chunks, ENTRY_BYTES, Hashed, Staged};
use super::nodes::{FAN_OUT, NODE_BYTES};
use super::packing::Packing;
use super::tree::{Change, Root, Trees};
use super::{SharedBytes, Usage};
use crate::{Address, ByteCount, Error, ErrorKind, Range as AddressRange, RangeSet};

/// When memory is scarce, packing frees more than needed: the budget divided by this.
const SPARE_SHARE: u64 = 16;

/// Chunks, trees and their budget.
pub(super) struct State {
    chunks: Chunks,
    trees: Trees,
    budget_bytes: Option<u64>,
}

/// Number of chunks ahead of a copy whose locations are prefetched.
const LOCATIONS_AHEAD: usize = 4;

/// The positions of the chunks that a snapshot must read, and of the chunks that become zeros as a
/// whole.
struct TouchedChunks {
    dirty: RangeSet<u64>,
    zeros: RangeSet<u64>,
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

    /// Bytes that the budget limits: the content, and the used parts of tables.
    fn held_bytes(&self) -> u64 {
        let packing_bytes = self.budget_bytes.map_or(0, |_| Packing::CHUNK_BYTES);
        self.chunks.content_bytes()
            + self.chunks.used() as u64 * (ENTRY_BYTES + packing_bytes)
            + self.trees.nodes() as u64 * NODE_BYTES
    }

    /// Packs chunks until `bytes` more fit into the budget.
    fn make_room(&mut self, bytes: u64) -> Result<(), Error> {
        let Some(budget_bytes) = self.budget_bytes else { return Ok(()) };
        let fits = |held: u64, limit: u64| held.saturating_add(bytes) <= limit;
        if fits(self.held_bytes(), budget_bytes) {
            return Ok(());
        }
        while !fits(self.held_bytes(), budget_bytes - budget_bytes / SPARE_SHARE)
            && self.chunks.pack_coldest().map_err(Error::no_memory)?
        {}
        self.chunks.trim();
        match self.held_bytes() {
            held if fits(held, budget_bytes) => Ok(()),
            held => Err(Error::budget_exceeded(budget_bytes, held.saturating_add(bytes))),
        }
    }

    /// Makes a tree of `previous` with the content of the area at `dirty`, and zeros at `forget`.
    /// The caller owns a reference to the tree.
    pub fn take(
        &mut self,
        previous: Option<Root>,
        memory: &SharedBytes<'_>,
        dirty: &RangeSet,
        forget: &RangeSet,
    ) -> Result<Root, Error> {
        let bytes = ByteCount::from(memory.bytes());
        let old = previous.unwrap_or_else(|| self.trees.zeros(self.positions(bytes)));
        let touched = self.touched(bytes, dirty, forget);
        let mut changes = Vec::new();
        let taken = self.put(old, memory, touched, forget, &mut changes).and_then(|()| {
            let new_nodes = self.trees.most_new_nodes(old.height, &changes).ok_or_else(Error::store_full)?;
            self.make_room(new_nodes.iter().sum::<u64>() * NODE_BYTES)?;
            self.trees.reserve(&new_nodes).map_err(Error::no_memory)
        });
        let root = taken.map(|()| self.trees.update(old, &changes, &mut self.chunks));
        // The tree has references of its own.
        changes.iter().for_each(|change| self.chunks.release(change.chunk));
        root
    }

    pub fn release(&mut self, root: Root) {
        self.trees.release(root, &mut self.chunks);
    }

    /// The number of chunks of an area of this length.
    fn positions(&self, bytes: ByteCount) -> u64 {
        bytes.get().div_ceil(self.chunks.chunk_bytes() as u64)
    }

    /// The bytes that a chunk covers in an area of this length.
    fn span(&self, position: u64, bytes: ByteCount) -> AddressRange {
        let chunk_bytes = self.chunks.chunk_bytes() as u64;
        Address::new(position * chunk_bytes)..Address::new(((position + 1) * chunk_bytes).min(bytes.get()))
    }

    /// Positions of the chunks that a set of bytes touches.
    fn rounded_out(&self, set: &RangeSet) -> RangeSet<u64> {
        let chunk_bytes = self.chunks.chunk_bytes() as u64;
        set.iter().map(|range| range.start.get() / chunk_bytes..range.end.get().div_ceil(chunk_bytes)).collect()
    }

    fn touched(&self, bytes: ByteCount, dirty: &RangeSet, forget: &RangeSet) -> TouchedChunks {
        let chunk_bytes = self.chunks.chunk_bytes() as u64;
        let end = |end: u64| if end == bytes.get() { end.div_ceil(chunk_bytes) } else { end / chunk_bytes };
        let zeros: RangeSet<u64> =
            forget.iter().map(|range| range.start.get().div_ceil(chunk_bytes)..end(range.end.get())).collect();
        let mut dirty = self.rounded_out(dirty);
        dirty.extend(&self.rounded_out(forget));
        dirty.subtract(&zeros);
        TouchedChunks { dirty, zeros }
    }

    /// Puts the touched chunks, and appends to `changes` the chunks that differ from `old`, each
    /// with a reference.
    fn put(
        &mut self,
        old: Root,
        memory: &SharedBytes<'_>,
        touched: TouchedChunks,
        forget: &RangeSet,
        changes: &mut Vec<Change>,
    ) -> Result<(), Error> {
        let mut zeros = touched.zeros.iter().peekable();
        let held = self.held_at(old, &touched.dirty).map_err(Error::no_memory)?;
        room::reserve(changes, held.len() + touched.zeros.range_count()).map_err(Error::no_memory)?;
        // Each chunk is looked up when the next one has been copied: by then, the line of the index
        // that it needs has been fetched.
        let mut staged = None;
        for index in 0..=held.len() {
            let copied = held.get(index).map(|&(position, was)| {
                self.prefetch(&held[index..], memory);
                self.copy_chunk(position, was, memory, forget)
            });
            let copied = copied.transpose();
            if let Some((before, content)) = staged.take() {
                let (position, was) = held[before];
                match self.hold(content, was) {
                    Ok(chunk) => self.add_change(position, was, chunk, &mut zeros, changes),
                    Err(error) => {
                        if let Ok(Some(copied)) = copied {
                            self.chunks.give_up(copied);
                        }
                        let ErrorKind::BudgetExceeded { budget_bytes, needed_bytes } = error.kind() else {
                            return Err(error);
                        };
                        let rest_bytes = self.most_new_bytes(old, &held[before..], memory, changes);
                        return Err(Error::budget_exceeded(budget_bytes, needed_bytes.saturating_add(rest_bytes)));
                    }
                }
            }
            match copied? {
                Some(Staged::Hashed(content)) => staged = Some((index, content)),
                Some(Staged::Held(chunk)) => {
                    let (position, was) = held[index];
                    self.add_change(position, was, chunk, &mut zeros, changes);
                }
                None => {}
            }
        }
        changes.extend(zeros.map(|positions| Change { positions, chunk: 0 }));
        Ok(())
    }
    /// Bytes that a snapshot takes at most besides the first of the chunks in `held`, which did not
    /// fit: for the other chunks, and for the nodes.
    fn most_new_bytes(&self, old: Root, held: &[(u64, u32)], area: &SharedBytes<'_>, changes: &[Change]) -> u64 {
        let differs = |&&(position, was): &&(u64, u32)| {
            let span = self.span(position, ByteCount::from(area.bytes()));
            let (start, length) = (span.start.to_usize(), (span.end - span.start).to_usize());
            let is_known = self.chunks.plain(was).is_some_and(|content| area.equals(start, &content[..length]));
            !is_known && !area.is_zero(start..start + length)
        };
        let mut changes = changes.to_vec();
        let new =
            held.iter().filter(differs).map(|&(position, _)| Change { positions: position..position + 1, chunk: 1 });
        let before = changes.len();
        changes.extend(new);
        let new_chunks = (changes.len() - before).saturating_sub(1) as u64;
        let new_nodes = self.trees.most_new_nodes(old.height, &changes).map_or(0, |nodes| nodes.iter().sum());
        new_chunks * (self.chunks.chunk_bytes() as u64 + ENTRY_BYTES + Packing::CHUNK_BYTES) + new_nodes * NODE_BYTES
    }

    /// Copies the content of the area at a position, at which the chunk `was` was before, unless it
    /// is known to be held. The caller owns a reference to a held chunk.
    fn copy_chunk(
        &mut self,
        position: u64,
        was: u32,
        memory: &SharedBytes<'_>,
        forget: &RangeSet,
    ) -> Result<Staged, Error> {
        let span = self.span(position, ByteCount::from(memory.bytes()));
        let (start, length) = (span.start.to_usize(), (span.end - span.start).to_usize());
        if forget.within(span.clone()).next().is_none() {
            // Avoids the copy of unchanged content and of zeros.
            if self.chunks.plain(was).is_some_and(|content| memory.equals(start, &content[..length])) {
                self.chunks.retain(was);
                return Ok(Staged::Held(was));
            }
            if memory.is_zero(start..start + length) {
                return Ok(Staged::Held(0));
            }
        }
        let staged = self.chunks.stage(was, |content| {
            memory.read(start, &mut content[..length]);
            content[length..].fill(0);
            for hole in forget.within(span.clone()) {
                content[(hole.start - span.start).to_usize()..(hole.end - span.start).to_usize()].fill(0);
            }
        });
        staged.map_err(Error::no_memory)
    }

    /// The chunk that holds staged content, with a reference that the caller owns. `was` is the
    /// chunk that was at the same position before.
    fn hold(&mut self, content: Hashed, was: u32) -> Result<u32, Error> {
        let new = match self.chunks.find(content) {
            Ok(chunk) => return Ok(chunk),
            Err(new) => new,
        };
        let room = self.make_room(self.chunks.chunk_bytes() as u64 + ENTRY_BYTES + Packing::CHUNK_BYTES);
        if let Err(error) = room.and_then(|()| self.chunks.reserve().map_err(Error::no_memory)) {
            self.chunks.give_up(Staged::Hashed(new));
            return Err(error);
        }
        self.chunks.keep(new, was).ok_or_else(Error::store_full)
    }

    /// Appends the chunk at a position to the changes, behind the runs of `zeros` before it, unless
    /// it is the chunk that was there.
    fn add_change(
        &mut self,
        position: u64,
        was: u32,
        chunk: u32,
        zeros: &mut Peekable<impl Iterator<Item = Range<u64>>>,
        changes: &mut Vec<Change>,
    ) {
        while let Some(positions) = zeros.next_if(|run| run.start < position) {
            changes.push(Change { positions, chunk: 0 });
        }
        if chunk == was {
            self.chunks.release(chunk);
        } else {
            changes.push(Change { positions: position..position + 1, chunk });
        }
    }

    /// Writes the content of a tree to the area. With `current`, the area holds the content of
    /// another tree, except at dirty offsets. Returns the written offsets.
    ///
    /// # Errors
    /// `ENOMEM`; then nothing was written.
    pub fn restore(
        &self,
        wanted: Root,
        current: Option<(Root, &RangeSet)>,
        memory: &SharedBytes<'_>,
    ) -> io::Result<RangeSet> {
        let bytes = ByteCount::from(memory.bytes());
        let unknown = match current {
            Some((_, dirty)) => self.rounded_out(dirty),
            None => RangeSet::from(0..self.positions(bytes)),
        };
        let (mut differing, mut has_room) = (Vec::new(), Ok(()));
        if let Some((current, _)) = current {
            let mut unknown = unknown.iter().peekable();
            self.trees.diff(current, wanted, &mut |position, _, chunk| {
                while unknown.next_if(|range| range.end <= position).is_some() {}
                if unknown.peek().is_none_or(|range| range.start > position) && has_room.is_ok() {
                    has_room = room::reserve(&mut differing, 1).map(|()| differing.push((position, chunk)));
                }
            });
        }
        has_room?;
        let compared = self.held_at(wanted, &unknown)?;
        let mut written = self.write(&differing, memory, |_, _| true);
        let differs = |offset: usize, content: &[u8]| !memory.equals(offset, content);
        written.extend(&self.write(&compared, memory, differs));
        Ok(written)
    }

    /// Writes the chunks for whose offset and content `is_wanted` returns true. `held` has them
    /// with their positions. Returns the written offsets.
    fn write(
        &self,
        held: &[(u64, u32)],
        memory: &SharedBytes<'_>,
        mut is_wanted: impl FnMut(usize, &[u8]) -> bool,
    ) -> RangeSet {
        let (mut written, mut scratch) = (RangeSet::new(), Vec::new());
        for (index, &(position, chunk)) in held.iter().enumerate() {
            self.prefetch(&held[index..], memory);
            let span = self.span(position, ByteCount::from(memory.bytes()));
            let (start, length) = (span.start.to_usize(), (span.end - span.start).to_usize());
            let content = &self.chunks.content(chunk, &mut scratch)[..length];
            if is_wanted(start, content) {
                memory.write(start, content);
                written.insert(span);
            }
        }
        written
    }

    /// Calls `each` with the parts of `offsets`, split at the borders of chunks, and their content
    /// in a tree, in ascending order.
    ///
    /// # Errors
    /// `ENOMEM`; then `each` was not called.
    pub fn each_part(
        &self,
        root: Root,
        offsets: &RangeSet,
        memory: &SharedBytes<'_>,
        mut each: impl FnMut(AddressRange, &[u8]),
    ) -> io::Result<()> {
        let bytes = ByteCount::from(memory.bytes());
        let held = self.held_at(root, &self.rounded_out(offsets))?;
        let mut scratch = Vec::new();
        for (index, &(position, chunk)) in held.iter().enumerate() {
            self.prefetch(&held[index..], memory);
            let span = self.span(position, bytes);
            let content = self.chunks.content(chunk, &mut scratch);
            for part in offsets.within(span.clone()) {
                let within = (part.start - span.start).to_usize()..(part.end - span.start).to_usize();
                each(part, &content[within]);
            }
        }
        Ok(())
    }

    /// The chunks of a tree at some positions.
    ///
    /// # Errors
    /// `ENOMEM`
    fn held_at(&self, root: Root, positions: &RangeSet<u64>) -> io::Result<Vec<(u64, u32)>> {
        let count: u64 = positions.iter().map(|run| run.end - run.start).sum();
        let mut held = room::vector(count as usize)?;
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
        Ok(held)
    }

    /// Prefetches the beginning of the next chunk, in the store and in the area, while the first
    /// chunk is copied: the hardware prefetcher cannot predict their pages.
    fn prefetch(&self, held: &[(u64, u32)], memory: &SharedBytes<'_>) {
        if let Some(&(position, chunk)) = held.get(1) {
            memory.prefetch(position as usize * self.chunks.chunk_bytes());
            self.chunks.prefetch_content(chunk);
        }
        if let Some(&(_, chunk)) = held.get(LOCATIONS_AHEAD) {
            self.chunks.prefetch_location(chunk);
        }
    }

    /// The offsets at which two trees of areas of this length differ.
    pub fn diff(&self, a: Root, b: Root, bytes: ByteCount) -> RangeSet {
        let mut differing = RangeSet::new();
        self.trees.diff(a, b, &mut |position, _, _| differing.insert(self.span(position, bytes)));
        differing
    }

    /// The offsets of the chunks of a tree that hold anything else than zeros.
    pub fn holding(&self, root: Root, bytes: ByteCount) -> RangeSet {
        self.diff(Root { node: 0, ..root }, root, bytes)
    }

    /// Reads from a tree.
    pub fn read(&self, root: Root, address: Address, mut to: &mut [u8]) {
        let chunk_bytes = self.chunks.chunk_bytes();
        let (mut position, mut skipped) =
            (address.get() / chunk_bytes as u64, (address.get() % chunk_bytes as u64) as usize);
        let mut scratch = Vec::new();
        while !to.is_empty() {
            let content = &self.chunks.content(self.trees.chunk(root, position), &mut scratch)[skipped..];
            let (part, rest) = to.split_at_mut(content.len().min(to.len()));
            part.copy_from_slice(&content[..part.len()]);
            (to, position, skipped) = (rest, position + 1, 0);
        }
    }
}
