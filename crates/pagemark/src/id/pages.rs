//! The ids of many pages at once: the lanes of a processor's vector unit hash as many pages side by
//! side, where one page alone has too few parts for all of them.
//!
//! A page has four chunks of BLAKE3, and its hash is the root of a binary tree over their hashes.
//! Each step is done for all pages of a group: chunk by chunk, then the two inner nodes of each
//! page, then the roots. The ids are those of [`ContentId::of`].

use std::sync::mpsc;
use std::thread;

use blake3::IncrementCounter;
use blake3::platform::Platform;

use crate::{ContentId, PAGE_SIZE};

/// Pages that are hashed side by side: as many as the widest vector unit has lanes.
const GROUP: usize = 16;
/// Pages whose ids a thread passes on at once.
const PART_PAGES: usize = 16 * GROUP;
/// Parts that a thread is ahead of what is done with the ids.
const PARTS_AHEAD: usize = 4;
/// The most threads that hash: with more, what is done with the ids takes longer than they.
const MAX_THREADS: usize = 4;
const CHUNK_BYTES: usize = 1024;
const CHUNKS: usize = PAGE_SIZE / CHUNK_BYTES;
const HASH_BYTES: usize = 32;
const NODE_BYTES: usize = 2 * HASH_BYTES;

/// Flags of BLAKE3's specification, section 2.2.
const CHUNK_START: u8 = 1 << 0;
const CHUNK_END: u8 = 1 << 1;
const PARENT: u8 = 1 << 2;
const ROOT: u8 = 1 << 3;
const KEYED_HASH: u8 = 1 << 4;

/// True for a page of zeros.
pub(crate) fn is_zero_page(content: &[u8]) -> bool {
    static ZEROS: [u8; PAGE_SIZE] = [0; PAGE_SIZE];
    content == ZEROS
}

impl ContentId {
    /// The ids of pages under `key`, in their order: [`ContentId::ZERO`] for pages of zeros.
    pub(crate) fn of_pages(key: &[u8; 32], pages: &[&[u8; PAGE_SIZE]]) -> Vec<ContentId> {
        let mut ids = vec![ContentId::ZERO; pages.len()];
        let hasher = PageHasher::new(key);
        let (mut group, mut positions) = ([&[0; PAGE_SIZE]; GROUP], [0; GROUP]);
        let mut filled = 0;
        for (position, page) in pages.iter().enumerate().filter(|(_, page)| !is_zero_page(&page[..])) {
            (group[filled], positions[filled]) = (page, position);
            filled += 1;
            if filled == GROUP {
                hasher.hash(&group, &mut |at, id| ids[positions[at]] = id);
                filled = 0;
            }
        }
        hasher.hash(&group[..filled], &mut |at, id| ids[positions[at]] = id);
        ids
    }
}

/// Passes the ids of pages on in their order, part by part. Other threads hash the parts that
/// follow, where there are many pages and processors.
///
/// # Errors
/// What `visit` returns.
pub(crate) fn visit_ids<E>(
    key: &[u8; 32],
    pages: &[&[u8; PAGE_SIZE]],
    visit: &mut dyn FnMut(&[ContentId]) -> Result<(), E>,
) -> Result<(), E> {
    // To count the processors takes longer than to hash a few pages.
    let threads = match (pages.len() / (2 * PART_PAGES)).min(MAX_THREADS) {
        0 => 0,
        most => thread::available_parallelism().map_or(0, |cores| cores.get() - 1).min(most),
    };
    thread::scope(|scope| {
        let mut receivers = Vec::new();
        for number in 0..threads {
            let (sender, receiver) = mpsc::sync_channel(PARTS_AHEAD);
            let mut parts = pages.chunks(PART_PAGES).skip(number).step_by(threads);
            // After an error of `visit` nobody receives.
            let hash = move || parts.all(|part| sender.send(ContentId::of_pages(key, part)).is_ok());
            // Under a limit of processes there may be no further thread.
            let thread = thread::Builder::new().name("hash".into()).spawn_scoped(scope, hash);
            receivers.push(thread.ok().map(|_| receiver));
        }
        for (number, part) in pages.chunks(PART_PAGES).enumerate() {
            let receiver = receivers.get(number % threads.max(1)).and_then(Option::as_ref);
            match receiver.and_then(|receiver| receiver.recv().ok()) {
                Some(ids) => visit(&ids)?,
                None => visit(&ContentId::of_pages(key, part))?,
            }
        }
        Ok(())
    })
}

struct PageHasher {
    platform: Platform,
    key: [u32; 8],
}

impl PageHasher {
    fn new(key: &[u8; 32]) -> PageHasher {
        let mut words = [0; 8];
        for (word, bytes) in words.iter_mut().zip(key.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        PageHasher { platform: Platform::detect(), key: words }
    }

    /// Hashes at most [`GROUP`] pages.
    fn hash(&self, pages: &[&[u8; PAGE_SIZE]], emit: &mut dyn FnMut(usize, ContentId)) {
        let mut leaves = [[0; CHUNKS * HASH_BYTES]; GROUP];
        let mut hashes = [0; 2 * GROUP * HASH_BYTES];
        for chunk in 0..CHUNKS {
            let mut inputs = [&[0; CHUNK_BYTES]; GROUP];
            for (input, page) in inputs.iter_mut().zip(pages) {
                *input = &page.as_chunks::<CHUNK_BYTES>().0[chunk];
            }
            let inputs = &inputs[..pages.len()];
            self.hash_many(inputs, chunk as u64, [KEYED_HASH, CHUNK_START, CHUNK_END], &mut hashes);
            for (leaves, hash) in leaves.iter_mut().zip(hashes.as_chunks::<HASH_BYTES>().0).take(pages.len()) {
                leaves.as_chunks_mut::<HASH_BYTES>().0[chunk] = *hash;
            }
        }
        let nodes = |bytes: &'_ [[u8; NODE_BYTES]], count: usize, flags: u8, hashes: &mut [u8]| {
            let mut inputs = [&[0; NODE_BYTES]; 2 * GROUP];
            inputs.iter_mut().zip(bytes).for_each(|(input, node)| *input = node);
            self.hash_many(&inputs[..count], 0, [KEYED_HASH | flags, 0, 0], hashes);
        };
        let inner = leaves.as_flattened().as_chunks().0;
        nodes(inner, 2 * pages.len(), PARENT, &mut hashes);
        let inner = hashes;
        nodes(inner.as_chunks().0, pages.len(), PARENT | ROOT, &mut hashes);
        for (at, hash) in hashes.as_chunks::<HASH_BYTES>().0.iter().take(pages.len()).enumerate() {
            emit(at, ContentId(std::array::from_fn(|byte| hash[byte])));
        }
    }

    /// Hashes inputs of equal length side by side. The flags are those of all blocks, and those of
    /// the first and of the last besides.
    fn hash_many<const BYTES: usize>(
        &self,
        inputs: &[&[u8; BYTES]],
        counter: u64,
        [all, first, last]: [u8; 3],
        hashes: &mut [u8],
    ) {
        let hashes = &mut hashes[..inputs.len() * HASH_BYTES];
        self.platform.hash_many(inputs, &self.key, counter, IncrementCounter::No, all, first, last, hashes);
    }
}

#[cfg(test)]
mod tests {
    use pagemark_testing::SplitMix;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pages_have_the_ids_that_they_have_alone(
            key in any::<[u8; 32]>(),
            seeds in prop::collection::vec(prop::option::of(any::<u64>()), 0..40),
        ) {
            let page = |seed: &Option<u64>| {
                let mut random = SplitMix(seed.unwrap_or(0));
                let mut page = [0; PAGE_SIZE];
                if seed.is_some() {
                    page.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = random.draw().to_le_bytes());
                }
                page
            };
            let pages: Vec<[u8; PAGE_SIZE]> = seeds.iter().map(page).collect();
            let alone = |page: &[u8; PAGE_SIZE]| match is_zero_page(page) {
                true => ContentId::ZERO,
                false => ContentId::of(&key, page),
            };
            let expected: Vec<ContentId> = pages.iter().map(alone).collect();
            prop_assert_eq!(ContentId::of_pages(&key, &pages.iter().collect::<Vec<_>>()), expected);
        }

        #[test]
        fn many_pages_have_their_ids_in_order(count in 0..3000_usize, fails_after in prop::option::of(0..3000_usize)) {
            let pages: Vec<[u8; PAGE_SIZE]> = (0..7).map(|number| [number; PAGE_SIZE]).collect();
            let pages: Vec<&[u8; PAGE_SIZE]> = pages.iter().cycle().take(count).collect();
            let expected = ContentId::of_pages(&[1; 32], &pages);
            let mut ids = Vec::new();
            let visited = visit_ids(&[1; 32], &pages, &mut |part| {
                ids.extend_from_slice(part);
                if fails_after.is_some_and(|count| ids.len() > count) { Err(()) } else { Ok(()) }
            });
            prop_assert_eq!(visited.is_err(), fails_after.is_some_and(|most| most < count));
            prop_assert_eq!(&ids[..], &expected[..ids.len()]);
            prop_assert!(visited.is_err() || ids.len() == count);
        }
    }
}
