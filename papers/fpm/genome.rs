//! `genome` of STAMP: puts a gene together from many overlapping segments of it. Equal segments are
//! left out by a hash table; then segments are joined, the longest overlaps first, by the hashes of
//! their beginnings.

use std::cell::Cell;

use super::Size;
use super::monitor::Monitor;
use super::objects::Objects;
use crate::BenchError;
use crate::measuring::random::Xorshift;

/// `-g65536`, `-s128`, `-n2097152`.
const FULL_GENE: u64 = 1 << 16;
const SEGMENT: usize = 128;
const SEGMENTS_PER_NUCLEOTIDE: usize = 32;

/// An entry of a hash table.
struct Entry<'h, T> {
    hash: u64,
    value: T,
    next: Cell<Option<&'h Entry<'h, T>>>,
}

/// A hash table with lists.
struct Table<'h, T> {
    objects: &'h Objects,
    buckets: &'h [Cell<Option<&'h Entry<'h, T>>>],
}

/// A segment that differs from all others.
struct Unique<'h> {
    text: &'h [u8],
    /// The segment that follows, and by how much they overlap.
    next: Cell<Option<&'h Unique<'h>>>,
    overlap: Cell<usize>,
    /// True if another one precedes it.
    has_previous: Cell<bool>,
    /// The other end of the chain that it is an end of; `None` if it is alone.
    other_end: Cell<Option<&'h Unique<'h>>>,
    /// Hashes of what remains of the text for the present overlap.
    begin_hash: Cell<u64>,
    end_hash: Cell<u64>,
}

impl<'h> Unique<'h> {
    fn other_end(&'h self) -> &'h Unique<'h> {
        self.other_end.get().unwrap_or(self)
    }

    /// True if both are one: each has its own text.
    fn is(&self, other: &Unique<'_>) -> bool {
        self.text.as_ptr() == other.text.as_ptr()
    }
}

/// Runs the program and checks its result.
pub(super) fn run(monitor: &Monitor<'_>, size: Size) -> Result<(), BenchError> {
    let (objects, mut random) = (monitor.objects(), Xorshift::new(1));
    let gene_bytes = size.of(FULL_GENE).max(4 * SEGMENT as u64) as usize;
    let gene = objects.make_all(gene_bytes, |_| b"acgt"[random.index(4)]);
    let starts = starts(gene_bytes, &mut random);
    let segments = objects.make_all(starts.len(), |_| Cell::new(None));
    for (segment, start) in segments.iter().zip(starts) {
        segment.set(Some(objects.make_all(SEGMENT, |index| gene[start + index])));
        monitor.step()?;
    }

    let mut uniques = Vec::new();
    let table: Table<'_, &[u8]> = Table::new(objects, gene_bytes);
    for text in segments.iter().filter_map(Cell::get) {
        let hash = text.iter().fold(0, |hash, &byte| extend(hash, byte));
        if table.find(hash, |other| *other == text).is_none() {
            table.insert(hash, text);
            let (begin_hash, end_hash) = (Cell::new(hash), Cell::new(hash));
            let (next, other_end) = (Cell::new(None), Cell::new(None));
            let (overlap, has_previous) = (Cell::new(0), Cell::new(false));
            uniques.push(objects.make(Unique { text, next, overlap, has_previous, other_end, begin_hash, end_hash }));
        }
        monitor.step()?;
    }
    join(monitor, &uniques)?;

    let mut whole = Vec::with_capacity(gene_bytes);
    for first in uniques.iter().filter(|unique| !unique.has_previous.get()) {
        let mut at = Some(*first);
        let mut overlap = 0;
        while let Some(unique) = at {
            whole.extend_from_slice(&unique.text[overlap..]);
            (at, overlap) = (unique.next.get(), unique.overlap.get());
            monitor.step()?;
        }
    }
    let built = objects.make_all(whole.len(), |index| whole[index]);
    monitor.finish()?;
    if built == gene {
        return Ok(());
    }
    let reason = format!("the gene of {gene_bytes} nucleotides came out as another one of {}", built.len());
    Err(BenchError::wrong_result("genome", reason))
}

/// Where the segments begin: at random, and wherever two neighbours would overlap by less than
/// half.
fn starts(gene_bytes: usize, random: &mut Xorshift) -> Vec<usize> {
    let last = gene_bytes - SEGMENT;
    let mut starts: Vec<usize> =
        (0..gene_bytes * SEGMENTS_PER_NUCLEOTIDE).map(|_| random.index(last + 1)).chain([0, last]).collect();
    let mut is_start = vec![false; last + 1];
    starts.iter().for_each(|&start| is_start[start] = true);
    let mut previous = 0;
    for (start, is_start) in is_start.into_iter().enumerate() {
        if is_start {
            previous = start;
        } else if start - previous == SEGMENT / 2 {
            starts.push(start);
            previous = start;
        }
    }
    starts
}

/// Joins each segment to the one that it overlaps most (Rabin and Karp).
fn join<'h>(monitor: &Monitor<'h>, uniques: &[&'h Unique<'h>]) -> Result<(), BenchError> {
    let objects = monitor.objects();
    let (mut ends, mut begins) = (uniques.to_vec(), uniques.to_vec());
    // The factor of the first byte of the text that is hashed.
    let mut factor = (1..SEGMENT).fold(1u64, |factor, _| factor.wrapping_mul(BASE));
    for overlap in (1..SEGMENT).rev() {
        let table: Table<'h, &'h Unique<'h>> = Table::new(objects, begins.len().max(1));
        for unique in &begins {
            // Without the last byte.
            let hash = unique.begin_hash.get().wrapping_sub(code(unique.text[overlap])).wrapping_mul(BASE_INVERSE);
            unique.begin_hash.set(hash);
            table.insert(hash, unique);
            monitor.step()?;
        }
        for unique in &ends {
            // Without the first byte.
            let first = code(unique.text[SEGMENT - overlap - 1]).wrapping_mul(factor);
            let hash = unique.end_hash.get().wrapping_sub(first);
            unique.end_hash.set(hash);
            let end = &unique.text[SEGMENT - overlap..];
            // Not the beginning of its own chain, which would close a ring.
            let own = unique.other_end();
            let fits =
                |other: &&'h Unique<'h>| !other.has_previous.get() && !other.is(own) && other.text[..overlap] == *end;
            if let Some(&next) = table.find(hash, fits) {
                let last = next.other_end();
                own.other_end.set(Some(last));
                last.other_end.set(Some(own));
                unique.next.set(Some(next));
                unique.overlap.set(overlap);
                next.has_previous.set(true);
            }
            monitor.step()?;
        }
        table.free();
        factor = factor.wrapping_mul(BASE_INVERSE);
        ends.retain(|unique| unique.next.get().is_none());
        begins.retain(|unique| !unique.has_previous.get());
    }
    Ok(())
}

/// Base of the hashes, which are polynomials, and its inverse modulo 2^64.
const BASE: u64 = 0x5851_f42d_4c95_7f2d;
const BASE_INVERSE: u64 = inverse(BASE);

/// Newton's method: each step doubles the number of right bits.
const fn inverse(odd: u64) -> u64 {
    let (mut inverse, mut step) = (odd, 0);
    while step < 6 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)));
        step += 1;
    }
    inverse
}

fn code(nucleotide: u8) -> u64 {
    u64::from(nucleotide).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn extend(hash: u64, nucleotide: u8) -> u64 {
    hash.wrapping_mul(BASE).wrapping_add(code(nucleotide))
}

impl<'h, T> Table<'h, T> {
    fn new(objects: &'h Objects, buckets: usize) -> Table<'h, T> {
        Table { objects, buckets: objects.make_all(buckets.next_power_of_two(), |_| Cell::new(None)) }
    }

    fn bucket(&self, hash: u64) -> &'h Cell<Option<&'h Entry<'h, T>>> {
        let mixed = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        &self.buckets[mixed as usize & (self.buckets.len() - 1)]
    }

    fn insert(&self, hash: u64, value: T) {
        let bucket = self.bucket(hash);
        bucket.set(Some(self.objects.make(Entry { hash, value, next: Cell::new(bucket.get()) })));
    }

    fn find(&self, hash: u64, is_wanted: impl Fn(&T) -> bool) -> Option<&'h T> {
        let mut next = self.bucket(hash).get();
        while let Some(entry) = next {
            if entry.hash == hash && is_wanted(&entry.value) {
                return Some(&entry.value);
            }
            next = entry.next.get();
        }
        None
    }

    fn free(self) {
        for bucket in self.buckets {
            let mut next = bucket.get();
            while let Some(entry) = next {
                next = entry.next.get();
                // SAFETY: no other entry leads to it, and the table is not used again.
                unsafe { self.objects.free(std::ptr::from_ref(entry)) };
            }
        }
        // SAFETY: the table, which alone has the buckets, is gone.
        unsafe { self.objects.free_all(std::ptr::from_ref(self.buckets)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_of_parts_follow_from_those_of_wholes() {
        assert_eq!(BASE.wrapping_mul(BASE_INVERSE), 1);
        let hash = |text: &[u8]| text.iter().fold(0, |hash, &byte| extend(hash, byte));
        let whole = hash(b"gatc");
        assert_eq!(whole.wrapping_sub(code(b'c')).wrapping_mul(BASE_INVERSE), hash(b"gat"));
        let factor = BASE.wrapping_mul(BASE).wrapping_mul(BASE);
        assert_eq!(whole.wrapping_sub(code(b'g').wrapping_mul(factor)), hash(b"atc"));
    }
}
