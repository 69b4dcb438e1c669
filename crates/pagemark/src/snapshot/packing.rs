//! Which chunks are packed when memory is scarce, and how.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use super::chunks::{BASE_BYTES, Form};
use super::{delta, push_gently};

/// Smallest cell for packed content, bytes.
const SMALLEST_CELL: usize = 64;

/// A delta of at most this part of a chunk is good enough not to try compression.
const GOOD_DELTA: usize = 8;

/// The chunk was used since it was last considered.
const WARM: u8 = 1;
/// The chunk stands in the queue.
const QUEUED: u8 = 2;
/// Another chunk is a delta of it.
const BASE: u8 = 4;

/// Sizes of the cells for packed content: powers of two and half-way between, up to three quarters of a chunk.
pub(super) fn cell_sizes(chunk_bytes: usize) -> impl Iterator<Item = usize> {
    let powers = std::iter::successors(Some(SMALLEST_CELL), |bytes| Some(bytes * 2));
    powers.flat_map(|bytes| [bytes, bytes / 2 * 3]).take_while(move |bytes| *bytes <= chunk_bytes / 4 * 3)
}

/// What is known of each chunk for the day when memory is scarce. Chunks are considered once, in the order in which they
/// came; one that was used since is sent to the end of the queue once more.
#[derive(Default)]
pub(super) struct Packing {
    /// At `chunk - 1`: the chunk that was at the same place in the parent snapshot.
    origins: Vec<u32>,
    /// At `chunk - 1`: how many chunks had come before it. Numbers are used again, and by this a chunk that has the number of
    /// an origin that is gone is told from it: it came later. One that came 2^31 chunks later may not be, which only
    /// wastes memory.
    births: Vec<u32>,
    next_birth: u32,
    /// At `chunk - 1`. Readers, which share the store, set `WARM`.
    marks: Vec<AtomicU8>,
    queue: VecDeque<u32>,
    delta: Vec<u8>,
    compressed: Vec<u8>,
}

impl Packing {
    /// Bytes for a chunk.
    pub const CHUNK_BYTES: u64 = 4 + 4 + 1 + 4;

    /// Bytes that the tables take.
    pub fn table_bytes(&self) -> u64 {
        let words = self.origins.capacity() + self.births.capacity() + self.queue.capacity();
        (words * size_of::<u32>() + self.marks.capacity()) as u64
    }

    /// Notes a new plain chunk.
    pub fn add(&mut self, chunk: u32, origin: u32) {
        let at = chunk as usize - 1;
        if at == self.marks.len() {
            push_gently(&mut self.origins, origin);
            push_gently(&mut self.births, 0);
            push_gently(&mut self.marks, AtomicU8::new(0));
        }
        self.origins[at] = origin;
        self.births[at] = self.next_birth;
        self.next_birth = self.next_birth.wrapping_add(1);
        let mark = self.marks[at].get_mut();
        // The number may still stand in the queue for a chunk that is gone.
        if *mark & QUEUED == 0 {
            self.queue.push_back(chunk);
        }
        *mark = WARM | QUEUED;
    }

    /// Notes that a chunk was used.
    pub fn mark_warm(&self, chunk: u32) {
        let mark = &self.marks[chunk as usize - 1];
        if mark.load(Relaxed) & WARM == 0 {
            mark.fetch_or(WARM, Relaxed);
        }
    }

    /// Notes that a chunk has a delta.
    pub fn mark_base(&mut self, chunk: u32) {
        *self.marks[chunk as usize - 1].get_mut() |= BASE;
    }

    /// What a chunk may be a delta of.
    pub fn origin(&self, chunk: u32) -> Option<u32> {
        let at = chunk as usize - 1;
        let is_base = self.marks[at].load(Relaxed) & BASE != 0;
        let is_older = |origin: u32| self.births[at].wrapping_sub(self.births[origin as usize - 1]).cast_signed() > 0;
        Some(self.origins[at]).filter(|&origin| origin != 0 && !is_base && is_older(origin))
    }

    /// Takes the coldest of those chunks out of the queue that are plain.
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

    /// The shorter of the two forms of a chunk, if it has at most `most_bytes`.
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
