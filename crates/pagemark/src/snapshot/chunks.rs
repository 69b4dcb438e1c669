//! The chunks of all snapshots, each held once (the page store of SPM).

use std::io;

use pagemark_linux::room;
use pagemark_linux::shared_bytes::prefetch;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::delta;
use super::index::Index;
use super::packing::{Packing, cell_sizes};
use super::pool::Pool;

/// Maximum size of a chunk, bytes.
pub(super) const MAX_CHUNK_BYTES: usize = 64 << 10;

/// Maximum number of chunks. The references of leaves and deltas to a chunk then fit into 32 bits.
const MAX_CHUNKS: usize = 1 << 31;

static ZEROS: [u8; MAX_CHUNK_BYTES] = [0; MAX_CHUNK_BYTES];

/// Bytes that a chunk takes besides its content: its entries in the tables and its slot in the
/// index.
pub(super) const ENTRY_BYTES: u64 = (4 + 4 + size_of::<ChunkLocation>() + 8) as u64;

/// Chunks by number. Chunk 0 has no entry: it is all zeros. Equal chunks have equal numbers: a hash
/// finds the candidate, and a comparison decides.
pub(super) struct Chunks {
    chunk_bytes: usize,
    seed: u64,
    /// At `number - 1`; 0 for a free number.
    references: Vec<u32>,
    /// At `number - 1`: the part of the hash that the index holds.
    tags: Vec<u32>,
    /// At `number - 1`. In a free entry, the cell is the next free number.
    locations: Vec<ChunkLocation>,
    free: u32,
    used: usize,
    index: Index,
    /// Cells for plain chunks.
    plain: Pool,
    /// Cells for packed chunks, by size.
    packed: Vec<Pool>,
    packed_chunks: [u64; 2],
    /// Cells of `plain` into which chunks are copied before it is known whether they are new.
    spare: Vec<u32>,
    /// The number of staged chunks whose content is not held yet.
    staged: usize,
    packing: Option<Packing>,
    scratch: Vec<u8>,
}

/// The location of the content of a chunk.
#[derive(Clone, Copy)]
struct ChunkLocation {
    cell: u32,
    /// Bytes in use of a cell for packed content.
    length: u16,
    /// Index of the pool for packed content.
    pool: u8,
    form: Form,
}

/// The form in which a chunk is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Form {
    Plain,
    /// Compressed by LZ4.
    Compressed,
    /// The number of another chunk, which is not itself a delta, and the difference from that.
    Delta,
}

/// The result of staging content.
pub(super) enum Staged {
    /// The store holds the content already: the number of the chunk, with one more reference.
    Held(u32),
    /// [`Chunks::find`] looks for the content in the index.
    Hashed(Hashed),
}

/// Content that was copied and hashed, for [`Chunks::find`], [`Chunks::keep`] or
/// [`Chunks::give_up`].
#[must_use]
pub(super) struct Hashed {
    cell: u32,
    tag: u32,
}

/// Bytes of the number of the base, which precedes a delta.
pub(super) const BASE_BYTES: usize = 4;

impl Chunks {
    /// `with_packing` allows chunks to be packed.
    pub fn new(chunk_bytes: usize, seed: u64, with_packing: bool) -> Chunks {
        Chunks {
            chunk_bytes,
            seed,
            references: Vec::new(),
            tags: Vec::new(),
            locations: Vec::new(),
            free: 0,
            used: 0,
            index: Index::default(),
            // With packing, memory is freed in pages, so huge pages are not used.
            plain: Pool::new(chunk_bytes, !with_packing),
            packed: cell_sizes(chunk_bytes).map(|bytes| Pool::new(bytes, false)).collect(),
            packed_chunks: [0; 2],
            spare: Vec::new(),
            staged: 0,
            packing: with_packing.then(Packing::default),
            scratch: Vec::new(),
        }
    }

    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// The number in use.
    pub fn used(&self) -> usize {
        self.used
    }

    /// The number of compressed chunks, and the number of deltas.
    pub fn packed_chunks(&self) -> [u64; 2] {
        self.packed_chunks
    }

    /// Bytes of the cells in use.
    pub fn content_bytes(&self) -> u64 {
        let unused = (self.spare.len() + self.staged) * self.chunk_bytes;
        self.plain.used_bytes() - unused as u64 + self.packed.iter().map(Pool::used_bytes).sum::<u64>()
    }

    /// Bytes that the tables take.
    pub fn table_bytes(&self) -> u64 {
        let vectors = self.references.capacity() * size_of::<u32>()
            + self.tags.capacity() * size_of::<u32>()
            + self.locations.capacity() * size_of::<ChunkLocation>();
        let pools: u64 = self.packed.iter().map(Pool::table_bytes).sum();
        let packing = self.packing.as_ref().map_or(0, Packing::table_bytes);
        vectors as u64 + self.index.bytes() + self.plain.table_bytes() + pools + packing
    }

    /// Address space for content, bytes.
    pub fn mapped_bytes(&self) -> u64 {
        self.plain.mapped_bytes() + self.packed.iter().map(Pool::mapped_bytes).sum::<u64>()
    }

    /// The content of a chunk that is not packed.
    pub fn plain(&self, chunk: u32) -> Option<&[u8]> {
        if chunk == 0 {
            return Some(&ZEROS[..self.chunk_bytes]);
        }
        let location = self.location(chunk);
        (location.form == Form::Plain).then(|| self.plain.cell(location.cell))
    }

    /// Prefetches the location of a chunk into the cache.
    pub fn prefetch_location(&self, chunk: u32) {
        if chunk != 0 {
            prefetch(&self.locations[chunk as usize - 1..chunk as usize]);
        }
    }

    /// Prefetches the beginning of the content of a chunk into the cache.
    pub fn prefetch_content(&self, chunk: u32) {
        if chunk != 0
            && let Some(content) = self.plain(chunk)
        {
            prefetch(content);
        }
    }

    /// The content of a chunk. A packed chunk is unpacked into `scratch`.
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
        let location = self.location(chunk);
        let packed = &self.packed[location.pool as usize].cell(location.cell)[..location.length as usize];
        content.resize(self.chunk_bytes, 0);
        match location.form {
            Form::Plain => unreachable!("chunk {chunk} is not packed"),
            Form::Compressed => {
                let unpacked = lz4_flex::block::decompress_into(packed, content);
                assert_eq!(unpacked.ok(), Some(self.chunk_bytes), "chunk {chunk} was compressed by this store");
            }
            Form::Delta => {
                let (base, delta) = split_delta(packed);
                debug_assert!(self.location(base).form != Form::Delta, "chunk {chunk} is a delta of a delta");
                match self.plain(base) {
                    Some(base) => content.copy_from_slice(base),
                    None => self.unpack(base, content),
                }
                delta::apply(delta, content);
            }
        }
    }

    /// Calls `fill` to write the content of a chunk. `was` is the chunk that was at the same
    /// position before. The line of the index that [`Chunks::find`] reads is prefetched: another
    /// chunk may be staged meanwhile.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn stage(&mut self, was: u32, fill: impl FnOnce(&mut [u8])) -> io::Result<Staged> {
        let cell = match self.spare.pop() {
            Some(cell) => cell,
            None => self.plain.take()?,
        };
        fill(self.plain.cell_mut(cell));
        let content = self.plain.cell(cell);
        let known = if content == &ZEROS[..self.chunk_bytes] {
            Some(0)
        } else {
            self.plain(was).is_some_and(|held| held == content).then_some(was)
        };
        if let Some(chunk) = known {
            self.spare.push(cell);
            self.retain(chunk);
            return Ok(Staged::Held(chunk));
        }
        let tag = xxh3_64_with_seed(content, self.seed) as u32;
        self.index.prefetch(tag);
        self.staged += 1;
        Ok(Staged::Hashed(Hashed { cell, tag }))
    }

    /// Finds the chunk that holds staged content, and returns its number, with one more reference.
    /// If it is new, returns the staged content for [`Chunks::keep`].
    pub fn find(&mut self, staged: Hashed) -> Result<u32, Hashed> {
        let mut scratch = std::mem::take(&mut self.scratch);
        let content = self.plain.cell(staged.cell);
        let held = self.index.find(staged.tag, |chunk| self.content(chunk, &mut scratch) == content);
        self.scratch = scratch;
        let Some(chunk) = held else { return Err(staged) };
        self.discard(staged);
        self.retain(chunk);
        Ok(chunk)
    }

    /// Gives up what was staged, and the reference to a chunk that is held.
    pub fn give_up(&mut self, staged: Staged) {
        match staged {
            Staged::Held(chunk) => self.release(chunk),
            Staged::Hashed(content) => self.discard(content),
        }
    }

    fn discard(&mut self, content: Hashed) {
        self.staged -= 1;
        self.spare.push(content.cell);
    }

    /// Makes room for the tables of one more chunk.
    ///
    /// # Errors
    /// `ENOMEM`
    pub fn reserve(&mut self) -> io::Result<()> {
        room::reserve(&mut self.references, 1)?;
        room::reserve(&mut self.tags, 1)?;
        room::reserve(&mut self.locations, 1)?;
        self.packing.as_mut().map_or(Ok(()), Packing::reserve)?;
        self.index.reserve(1)
    }

    /// Holds staged content, which is new and for which [`Chunks::reserve`] has made room. `was` is
    /// the chunk that was at the same position before. `None` if no number is free.
    pub fn keep(&mut self, staged: Hashed, was: u32) -> Option<u32> {
        let location = ChunkLocation { cell: staged.cell, length: 0, pool: 0, form: Form::Plain };
        let tag = staged.tag;
        let chunk = if self.free != 0 {
            let chunk = self.free;
            let at = chunk as usize - 1;
            self.free = self.locations[at].cell;
            (self.references[at], self.tags[at], self.locations[at]) = (1, tag, location);
            chunk
        } else {
            if self.locations.len() == MAX_CHUNKS {
                self.discard(staged);
                return None;
            }
            let chunk = self.locations.len() as u32 + 1;
            self.references.push(1);
            self.tags.push(tag);
            self.locations.push(location);
            chunk
        };
        self.staged -= 1;
        self.index.insert(tag, chunk);
        self.used += 1;
        if let Some(packing) = &mut self.packing {
            packing.add(chunk, was);
        }
        Some(chunk)
    }

    /// Prefetches the references of chunks into the cache.
    pub fn prefetch_references(&self, chunks: &[u32]) {
        for &chunk in chunks.iter().filter(|&&chunk| chunk != 0) {
            prefetch(std::slice::from_ref(&self.references[chunk as usize - 1]));
        }
    }

    pub fn retain(&mut self, chunk: u32) {
        if chunk != 0 {
            self.references[chunk as usize - 1] += 1;
        }
    }

    /// Releases a reference. Releasing the last reference frees the chunk.
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
        let location = self.locations[at];
        self.locations[at].cell = self.free;
        self.free = chunk;
        self.used -= 1;
        match location.form {
            Form::Plain => self.plain.give_back(location.cell),
            form => {
                self.packed_chunks[usize::from(form == Form::Delta)] -= 1;
                let pool = &mut self.packed[location.pool as usize];
                let base = (form == Form::Delta).then(|| split_delta(pool.cell(location.cell)).0);
                pool.give_back(location.cell);
                self.release(base.unwrap_or(0));
            }
        }
    }

    /// Packs the coldest chunk that was not tried yet. False if all were tried.
    ///
    /// # Errors
    /// The kernel has no memory; the chunk stays plain.
    pub fn pack_coldest(&mut self) -> io::Result<bool> {
        let Some(mut packing) = self.packing.take() else { return Ok(false) };
        let coldest = packing
            .take_coldest(|chunk| self.references[chunk as usize - 1] > 0 && self.location(chunk).form == Form::Plain);
        let packed = coldest.map_or(Ok(()), |chunk| self.pack(chunk, &mut packing));
        self.packing = Some(packing);
        packed.map(|()| coldest.is_some())
    }

    /// Packs a plain chunk if the packed form is smaller.
    fn pack(&mut self, chunk: u32, packing: &mut Packing) -> io::Result<()> {
        let plain_cell = self.location(chunk).cell;
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
        self.locations[chunk as usize - 1] =
            ChunkLocation { cell, length: encoded.len() as u16, pool: pool as u8, form };
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

    /// The possible base of a delta: the chunk that was at the same position before, or its base if
    /// that chunk is a delta itself. No delta has a delta as its base.
    fn base_for(&self, chunk: u32, packing: &Packing) -> Option<u32> {
        let origin = packing.origin(chunk)?;
        // The origin may have been freed since.
        if self.references[origin as usize - 1] == 0 {
            return None;
        }
        let location = self.location(origin);
        let base = match location.form {
            Form::Delta => split_delta(self.packed[location.pool as usize].cell(location.cell)).0,
            _ => origin,
        };
        (base != chunk).then_some(base)
    }

    /// Returns free memory to the kernel.
    pub fn trim(&mut self) {
        self.plain.trim();
    }

    fn location(&self, chunk: u32) -> ChunkLocation {
        self.locations[chunk as usize - 1]
    }
}

fn split_delta(packed: &[u8]) -> (u32, &[u8]) {
    let (base, delta) = packed.split_at(BASE_BYTES);
    (u32::from_ne_bytes([base[0], base[1], base[2], base[3]]), delta)
}
