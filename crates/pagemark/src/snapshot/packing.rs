//! Selects the chunks that are packed when memory is scarce, and their form (SPM, "Conclusion":
//! compression and delta encoding).

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use pagemark_linux::room;

use super::chunks::{BASE_BYTES, Form};
use super::delta;

/// Smallest cell for packed content, bytes.
const SMALLEST_CELL: usize = 64;

/// Compression is not tried if the delta takes at most a chunk divided by this.
const GOOD_DELTA: usize = 8;

/// The chunk was used since it was last considered.
const WARM: u8 = 1;
/// The chunk is in the queue.
const QUEUED: u8 = 2;
/// The chunk is the base of a delta.
const BASE: u8 = 4;

/// Sizes of the cells for packed content: powers of two and the sizes half-way between, up to three
/// quarters of a chunk.
pub(super) fn cell_sizes(chunk_bytes: usize) -> impl Iterator<Item = usize> {
    let powers = std::iter::successors(Some(SMALLEST_CELL), |bytes| Some(bytes * 2));
    powers.flat_map(|bytes| [bytes, bytes / 2 * 3]).take_while(move |bytes| *bytes <= chunk_bytes / 4 * 3)
}

/// Records of each chunk for the time when memory is scarce. Chunks are considered in the order in
/// which they were added. A chunk that was used since is moved to the end of the queue.
#[derive(Default)]
pub(super) struct Packing {
    /// At `chunk - 1`: the chunk that was at the same position in the parent snapshot.
    origins: Vec<u32>,
    /// At `chunk - 1`: the number of chunks that were added before it. Numbers are reused. A chunk
    /// that has reused the number of a freed origin was added later, and is thereby distinguished
    /// from the origin. A chunk that was added 2^31 chunks later may not be distinguished, which
    /// only wastes memory.
    births: Vec<u32>,
    next_birth: u32,
    /// At `chunk - 1`. Concurrent readers set `WARM`.
    marks: Vec<AtomicU8>,
    queue: VecDeque<u32>,
    delta: Vec<u8>,
    compressed: Vec<u8>,
}

impl Packing {
    /// Bytes of the records of a chunk.
    pub const CHUNK_BYTES: u64 = 4 + 4 + 1 + 4;

    /// Bytes that the tables take.
    pub fn table_bytes(&self) -> u64 {
        let words = self.origins.capacity() + self.births.capacity() + self.queue.capacity();
        (words * size_of::<u32>() + self.marks.capacity()) as u64
    }

    /// Makes room for the records of one more chunk.
    ///
    /// # Errors
    /// `ENOMEM`
    pub fn reserve(&mut self) -> io::Result<()> {
        room::reserve(&mut self.origins, 1)?;
        room::reserve(&mut self.births, 1)?;
        room::reserve(&mut self.marks, 1)?;
        self.queue.try_reserve(1).map_err(|_| room::none())
    }

    /// Records a new plain chunk, for which [`Packing::reserve`] has made room.
    pub fn add(&mut self, chunk: u32, origin: u32) {
        let at = chunk as usize - 1;
        if at == self.marks.len() {
            self.origins.push(origin);
            self.births.push(0);
            self.marks.push(AtomicU8::new(0));
        }
        self.origins[at] = origin;
        self.births[at] = self.next_birth;
        self.next_birth = self.next_birth.wrapping_add(1);
        let mark = self.marks[at].get_mut();
        // The number may still be in the queue for a freed chunk.
        if *mark & QUEUED == 0 {
            self.queue.push_back(chunk);
        }
        *mark = WARM | QUEUED;
    }

    /// Records that a chunk was used.
    pub fn mark_warm(&self, chunk: u32) {
        let mark = &self.marks[chunk as usize - 1];
        if mark.load(Relaxed) & WARM == 0 {
            mark.fetch_or(WARM, Relaxed);
        }
    }

    /// Records that a chunk is the base of a delta.
    pub fn mark_base(&mut self, chunk: u32) {
        *self.marks[chunk as usize - 1].get_mut() |= BASE;
    }

    /// The possible base of a delta of a chunk.
    pub fn origin(&self, chunk: u32) -> Option<u32> {
        let at = chunk as usize - 1;
        let is_base = self.marks[at].load(Relaxed) & BASE != 0;
        let is_older = |origin: u32| self.births[at].wrapping_sub(self.births[origin as usize - 1]).cast_signed() > 0;
        Some(self.origins[at]).filter(|&origin| origin != 0 && !is_base && is_older(origin))
    }

    /// Removes the coldest plain chunk from the queue and returns it.
    pub fn take_coldest(&mut self, is_plain: impl Fn(u32) -> bool) -> Option<u32> {
        while let Some(chunk) = self.queue.pop_front() {
            let mark = self.marks[chunk as usize - 1].get_mut();
            if is_plain(chunk) && *mark & WARM != 0 {
                *mark &= !WARM;
                self.queue.push_back(chunk);
                continue;
            }
            *mark &= !QUEUED;
            if is_plain(chunk) {
                return Some(chunk);
            }
        }
        None
    }

    /// Returns the shorter of the two packed forms of a chunk, if it takes at most `most_bytes`.
    pub fn encode(&mut self, content: &[u8], base: Option<(u32, &[u8])>, most_bytes: usize) -> Option<(Form, &[u8])> {
        self.delta.clear();
        let has_delta = base.is_some_and(|(base, base_content)| {
            self.delta.extend(base.to_ne_bytes());
            delta::encode(base_content, content, &mut self.delta, most_bytes.saturating_sub(BASE_BYTES))
        });
        if has_delta && self.delta.len() <= content.len() / GOOD_DELTA {
            return Some((Form::Delta, &self.delta));
        }
        self.compressed.resize(lz4_flex::block::get_maximum_output_size(content.len()), 0);
        let compressed_bytes = lz4_flex::block::compress_into(content, &mut self.compressed).unwrap_or(usize::MAX);
        if has_delta && self.delta.len() <= compressed_bytes {
            Some((Form::Delta, &self.delta))
        } else if compressed_bytes <= most_bytes {
            Some((Form::Compressed, &self.compressed[..compressed_bytes]))
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_come_and_go_stand_in_the_queue_once() {
        let mut packing = Packing::default();
        for _ in 0..100 {
            packing.add(1, 0);
            packing.add(2, 1);
        }
        assert_eq!(packing.queue.len(), 2);
        packing.mark_base(2);
        assert_eq!(packing.origin(2), None);
        packing.add(2, 1);
        assert_eq!(packing.origin(2), Some(1), "the base was another chunk");
        packing.add(1, 0);
        assert_eq!(packing.origin(2), None, "the origin was another chunk");
    }

    #[test]
    fn the_coldest_is_the_oldest_that_was_not_used_since() {
        let mut packing = Packing::default();
        (1..=4).for_each(|chunk| packing.add(chunk, 0));
        let is_plain = |chunk| chunk != 3;
        assert_eq!(packing.take_coldest(is_plain), Some(1), "all are new: the oldest");
        packing.mark_warm(2);
        assert_eq!(packing.take_coldest(is_plain), Some(4));
        assert_eq!(packing.take_coldest(is_plain), Some(2));
        assert_eq!(packing.take_coldest(is_plain), None);
    }
}
