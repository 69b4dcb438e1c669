//! The chunks of all snapshots, each held once.

use std::io;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::delta;
use super::index::Index;
use super::packing::{Packing, cell_sizes};
use super::pool::Pool;
use super::push_gently;
use crate::sys::area::prefetch;

/// Most bytes of a chunk.
pub(super) const MOST_CHUNK_BYTES: usize = 64 << 10;

/// Most chunks. References from leaves and from deltas then fit into a count of 32 bits.
const MOST_CHUNKS: usize = 1 << 31;

static ZEROS: [u8; MOST_CHUNK_BYTES] = [0; MOST_CHUNK_BYTES];

/// Bytes that a chunk takes besides its content: its entry in the tables and its place in the index.
pub(super) const ENTRY_BYTES: u64 = (4 + 4 + size_of::<Place>() + 8) as u64;

/// Chunks by number. Chunk 0 has no entry: it is all zeros. Equal chunks have equal numbers: a hash finds the candidate, and
/// a comparison decides.
pub(super) struct Chunks {
    chunk_bytes: usize,
    seed: u64,
    /// At `number - 1`; 0 for a free number.
    references: Vec<u32>,
    /// At `number - 1`: what the index knows of the hash.
    tags: Vec<u32>,
    /// At `number - 1`. Of a free number, the cell is the next free one.
    places: Vec<Place>,
    free: u32,
    used: usize,
    index: Index,
    /// Cells for chunks as they are.
    plain: Pool,
    /// Cells for packed chunks, by size.
    packed: Vec<Pool>,
    packed_chunks: [u64; 2],
    /// A cell of `plain` into which the next chunk is copied before it is known whether it is new.
    staging: Option<u32>,
    packing: Option<Packing>,
    scratch: Vec<u8>,
}

/// Where a chunk's content is.
#[derive(Clone, Copy)]
struct Place {
    cell: u32,
    /// Bytes that are used of a cell for packed content.
    length: u16,
    /// Which of the pools for packed content.
    pool: u8,
    form: Form,
}

/// How a chunk is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    Plain,
    /// Compressed by LZ4.
    Compressed,
    /// The number of another chunk, which is not itself a delta, and the difference from that.
    Delta,
}

/// What became of content that was staged.
pub(super) enum Staged {
    /// It is held already: the number, with a reference more.
    Held(u32),
    /// It is not; [`Chunks::keep`] holds it under this tag.
    New(u32),
}

/// Bytes of the base's number ahead of a delta.
pub(super) const BASE_BYTES: usize = 4;

impl Chunks {
    /// `with_packing` prepares for chunks to be packed.
    pub fn new(chunk_bytes: usize, seed: u64, with_packing: bool) -> Chunks {
        Chunks {
            chunk_bytes,
            seed,
            references: Vec::new(),
            tags: Vec::new(),
            places: Vec::new(),
            free: 0,
            used: 0,
            index: Index::default(),
            // Memory is given back page by page when it is scarce.
            plain: Pool::new(chunk_bytes, !with_packing),
            packed: cell_sizes(chunk_bytes).map(|bytes| Pool::new(bytes, false)).collect(),
            packed_chunks: [0; 2],
            staging: None,
            packing: with_packing.then(Packing::default),
            scratch: Vec::new(),
        }
    }

    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// How many there are.
    pub fn used(&self) -> usize {
        self.used
    }

    /// How many are held compressed, and how many as a delta.
    pub fn packed_chunks(&self) -> [u64; 2] {
        self.packed_chunks
    }

    /// Bytes of the cells in use.
    pub fn content_bytes(&self) -> u64 {
        let staging = self.staging.map_or(0, |_| self.chunk_bytes as u64);
        self.plain.used_bytes() - staging + self.packed.iter().map(Pool::used_bytes).sum::<u64>()
    }

    /// Bytes that the tables take.
    pub fn table_bytes(&self) -> u64 {
        let vectors = self.references.capacity() * size_of::<u32>()
            + self.tags.capacity() * size_of::<u32>()
            + self.places.capacity() * size_of::<Place>();
        let pools: u64 = self.packed.iter().map(Pool::table_bytes).sum();
        let packing = self.packing.as_ref().map_or(0, Packing::table_bytes);
        vectors as u64 + self.index.bytes() + self.plain.table_bytes() + pools + packing
    }

    /// Address space for content, bytes.
    pub fn mapped_bytes(&self) -> u64 {
        self.plain.mapped_bytes() + self.packed.iter().map(Pool::mapped_bytes).sum::<u64>()
    }

    /// The content of a chunk that is held as it is.
    pub fn plain(&self, chunk: u32) -> Option<&[u8]> {
        if chunk == 0 {
            return Some(&ZEROS[..self.chunk_bytes]);
        }
        let place = self.place(chunk);
        (place.form == Form::Plain).then(|| self.plain.cell(place.cell))
    }

    /// Has the processor fetch where a chunk's content is.
    pub fn prefetch_place(&self, chunk: u32) {
        if chunk != 0 {
            prefetch(&self.places[chunk as usize - 1..chunk as usize]);
        }
    }

    /// Has the processor fetch the beginning of a chunk's content.
    pub fn prefetch_content(&self, chunk: u32) {
        if chunk != 0
            && let Some(content) = self.plain(chunk)
        {
            prefetch(content);
        }
    }

    /// The content of a chunk. `scratch` is used if it must be unpacked.
    pub fn content<'a>(&'a self, chunk: u32, scratch: &'a mut Vec<u8>) -> &'a [u8] {
        match self.plain(chunk) {
            Some(content) => {
                if let Some(packing) = &self.packing
                    && chunk != 0
                {
                    packing.mark_warm(chunk);
                }
                content
            }
            None => {
                self.unpack(chunk, scratch);
                scratch
            }
        }
    }

    fn unpack(&self, chunk: u32, content: &mut Vec<u8>) {
        let place = self.place(chunk);
        let packed = &self.packed[place.pool as usize].cell(place.cell)[..place.length as usize];
        content.resize(self.chunk_bytes, 0);
        match place.form {
            Form::Plain => unreachable!("chunk {chunk} is not packed"),
            Form::Compressed => {
                let unpacked = lz4_flex::block::decompress_into(packed, content);
                assert_eq!(unpacked.ok(), Some(self.chunk_bytes), "chunk {chunk} was compressed by this store");
            }
            Form::Delta => {
                let (base, delta) = split_delta(packed);
                debug_assert!(self.place(base).form != Form::Delta, "chunk {chunk} is a delta of a delta");
                match self.plain(base) {
                    Some(base) => content.copy_from_slice(base),
                    None => self.unpack(base, content),
                }
                delta::apply(delta, content);
            }
        }
    }

    /// Has `fill` write a chunk's content, and finds out whether it is held. `was` is the chunk that was at the same place
    /// before.
    ///
    /// # Errors
    /// The kernel gives no memory.
    pub fn stage(&mut self, was: u32, fill: impl FnOnce(&mut [u8])) -> io::Result<Staged> {
        let cell = match self.staging {
            Some(cell) => cell,
            None => self.plain.take()?,
        };
        self.staging = Some(cell);
        fill(self.plain.cell_mut(cell));
        let content = self.plain.cell(cell);
        if content == &ZEROS[..self.chunk_bytes] {
            return Ok(Staged::Held(0));
        }
        if self.plain(was).is_some_and(|held| held == content) {
            self.retain(was);
            return Ok(Staged::Held(was));
        }
        let tag = xxh3_64_with_seed(content, self.seed) as u32;
        let mut scratch = std::mem::take(&mut self.scratch);
        let held = self.index.find(tag, |chunk| self.content(chunk, &mut scratch) == content);
        self.scratch = scratch;
        Ok(match held {
            Some(chunk) => {
                self.retain(chunk);
                Staged::Held(chunk)
            }
            None => Staged::New(tag),
        })
    }

    /// Holds the content that was staged last, which is new. `was` is the chunk that was at the same place before.
    /// `None` if there are no more numbers.
    pub fn keep(&mut self, tag: u32, was: u32) -> Option<u32> {
        let cell = self.staging?;
        let place = Place { cell, length: 0, pool: 0, form: Form::Plain };
        let chunk = if self.free != 0 {
            let chunk = self.free;
            let at = chunk as usize - 1;
            self.free = self.places[at].cell;
            (self.references[at], self.tags[at], self.places[at]) = (1, tag, place);
            chunk
        } else {
            if self.places.len() == MOST_CHUNKS {
                return None;
            }
            let chunk = self.places.len() as u32 + 1;
            push_gently(&mut self.references, 1);
            push_gently(&mut self.tags, tag);
            push_gently(&mut self.places, place);
            chunk
        };
        self.staging = None;
        self.index.insert(tag, chunk);
        self.used += 1;
        if let Some(packing) = &mut self.packing {
            packing.add(chunk, was);
        }
        Some(chunk)
    }

    pub fn retain(&mut self, chunk: u32) {
        if chunk != 0 {
            self.references[chunk as usize - 1] += 1;
        }
    }

    /// Gives a reference back; if it was the last, the chunk's memory too.
    pub fn release(&mut self, chunk: u32) {
        if chunk == 0 {
            return;
        }
        let at = chunk as usize - 1;
        self.references[at] -= 1;
        if self.references[at] > 0 {
            return;
        }
        self.index.remove(self.tags[at], chunk);
        let place = self.places[at];
        self.places[at].cell = self.free;
        self.free = chunk;
        self.used -= 1;
        match place.form {
            Form::Plain => self.plain.give_back(place.cell),
            form => {
                self.packed_chunks[usize::from(form == Form::Delta)] -= 1;
                let pool = &mut self.packed[place.pool as usize];
                let base = (form == Form::Delta).then(|| split_delta(pool.cell(place.cell)).0);
                pool.give_back(place.cell);
                self.release(base.unwrap_or(0));
            }
        }
    }

    /// Packs the coldest chunk that was not tried yet. False if there is none left.
    ///
    /// # Errors
    /// The kernel gives no memory; the chunk stays as it is.
    pub fn pack_coldest(&mut self) -> io::Result<bool> {
        let Some(mut packing) = self.packing.take() else { return Ok(false) };
        let coldest = packing
            .take_coldest(|chunk| self.references[chunk as usize - 1] > 0 && self.place(chunk).form == Form::Plain);
        let packed = coldest.map_or(Ok(()), |chunk| self.pack(chunk, &mut packing));
        self.packing = Some(packing);
        packed.map(|()| coldest.is_some())
    }

    /// Packs a plain chunk, if that makes it smaller.
    fn pack(&mut self, chunk: u32, packing: &mut Packing) -> io::Result<()> {
        let plain_cell = self.place(chunk).cell;
        let base = self.base_for(chunk, packing);
        let mut scratch = std::mem::take(&mut self.scratch);
        let base_content = base.map(|base| (base, self.content(base, &mut scratch)));
        let most_bytes = self.packed.last().map_or(0, Pool::cell_bytes);
        let encoded = packing.encode(self.plain.cell(plain_cell), base_content, most_bytes);
        self.scratch = scratch;
        let Some((form, encoded)) = encoded else { return Ok(()) };

        let pool = self.packed.partition_point(|pool| pool.cell_bytes() < encoded.len());
        let cell = self.packed[pool].take()?;
        self.packed[pool].cell_mut(cell)[..encoded.len()].copy_from_slice(encoded);
        self.places[chunk as usize - 1] = Place { cell, length: encoded.len() as u16, pool: pool as u8, form };
        self.plain.give_back(plain_cell);
        self.packed_chunks[usize::from(form == Form::Delta)] += 1;
        if form == Form::Delta
            && let Some(base) = base
        {
            self.retain(base);
            packing.mark_base(base);
        }
        Ok(())
    }

    /// What a chunk may be a delta of: what was at its place before, or that's base, so that no delta has a delta as its base.
    fn base_for(&self, chunk: u32, packing: &Packing) -> Option<u32> {
        let origin = packing.origin(chunk)?;
        // It may be gone since.
        if self.references[origin as usize - 1] == 0 {
            return None;
        }
        let place = self.place(origin);
        let base = match place.form {
            Form::Delta => split_delta(self.packed[place.pool as usize].cell(place.cell)).0,
            _ => origin,
        };
        (base != chunk).then_some(base)
    }

    /// Gives free memory back to the kernel.
    pub fn trim(&mut self) {
        self.plain.trim();
    }

    fn place(&self, chunk: u32) -> Place {
        self.places[chunk as usize - 1]
    }
}

fn split_delta(packed: &[u8]) -> (u32, &[u8]) {
    let (base, delta) = packed.split_at(BASE_BYTES);
    (u32::from_ne_bytes([base[0], base[1], base[2], base[3]]), delta)
}
