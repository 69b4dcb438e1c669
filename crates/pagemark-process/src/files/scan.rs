//! Finds the pages of a file that have changed, by a fingerprint of each page.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::Path;

use pagemark::{Address, AddressRangeExt, ByteCount, PAGE_SIZE, PageNumber, PageRange, RangeSet};
use pagemark_linux::sparse::{next_data, read_full};
use pagemark_trace::error::Result;
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::list::ReadableFile;

const BUFFER: usize = 1 << 20;
const GROUP: u64 = 256;

/// Content of a page, filled with zeros after the end of the file.
pub(super) type Page = [u8; PAGE_SIZE];

/// The pages of a file of `size` bytes.
pub(super) fn pages(size: u64) -> PageRange {
    (Address::MIN..Address::new(size)).page_range()
}

/// A fingerprint of every page of a file: 16 bytes per page, none for groups of pages that were
/// never written.
///
/// The seed is random, so that nobody can construct content whose change goes unnoticed.
pub(super) struct Fingerprints {
    seed: u64,
    groups: BTreeMap<u64, Box<[u128; GROUP as usize]>>,
}

impl Default for Fingerprints {
    fn default() -> Fingerprints {
        Fingerprints { seed: RandomState::new().hash_one(0), groups: BTreeMap::new() }
    }
}

impl Fingerprints {
    /// The fingerprint of a page; zero for a page of zeros.
    fn of(&self, page: &[u8]) -> u128 {
        if page.iter().all(|&byte| byte == 0) { 0 } else { xxh3_128_with_seed(page, self.seed).max(1) }
    }

    fn get(&self, page: PageNumber) -> u128 {
        let page = page.get();
        self.groups.get(&(page / GROUP)).map_or(0, |group| group[(page % GROUP) as usize])
    }

    fn set(&mut self, page: PageNumber, fingerprint: u128) {
        let page = page.get();
        if fingerprint != 0 {
            let group = self.groups.entry(page / GROUP).or_insert_with(|| Box::new([0; GROUP as usize]));
            group[(page % GROUP) as usize] = fingerprint;
        } else if let Some(group) = self.groups.get_mut(&(page / GROUP)) {
            group[(page % GROUP) as usize] = 0;
        }
    }

    /// The pages in `pages` that hold other content than zeros.
    fn written(&self, pages: PageRange) -> Vec<PageNumber> {
        let groups = self.groups.range(pages.start.get() / GROUP..pages.end.get().div_ceil(GROUP));
        groups
            .flat_map(|(number, group)| (number * GROUP..).map(PageNumber::new).zip(group.iter()))
            .filter(|(page, fingerprint)| **fingerprint != 0 && pages.contains(page))
            .map(|(page, _)| page)
            .collect()
    }

    /// Drops the fingerprints after the first `pages` pages.
    pub(super) fn truncate(&mut self, end: PageNumber) {
        let pages = end.get();
        self.groups.split_off(&pages.div_ceil(GROUP));
        if let Some(mut last) = self.groups.last_entry() {
            let first = *last.key() * GROUP;
            let keep = usize::try_from(pages.saturating_sub(first)).unwrap_or(usize::MAX).min(GROUP as usize);
            last.get_mut()[keep..].fill(0);
        }
    }
}

/// Receives the number and content of each changed page.
pub(super) type Emit<'a> = &'a mut dyn FnMut(PageNumber, &Page) -> Result<()>;

/// Reads the pages that overlap `bytes` of a file at `path` of `size` bytes, emits those whose
/// fingerprint differs from `known`, and updates `known`. Holes are not read. Returns the number of
/// bytes read.
pub(super) fn scan(
    opened: &ReadableFile,
    path: &Path,
    size: u64,
    bytes: &RangeSet,
    known: &mut Fingerprints,
    emit: Emit<'_>,
) -> Result<u64> {
    let file = &opened.file;
    let mut buffer = Vec::new();
    let mut read_bytes = 0;
    for range in bytes.iter() {
        let end = range.end.min(Address::new(size)).page_aligned_up();
        let mut at = range.start.page_aligned_down();
        while at < end {
            // Finding holes moves the position.
            let data =
                if opened.is_targets { at..end } else { next_data(file, at, end).map_err(super::io("read", path))? };
            for page in known.written(at.page()..data.start.page()) {
                known.set(page, 0);
                emit(page, &[0; PAGE_SIZE])?;
            }
            at = data.start;
            while at < data.end {
                buffer.resize(BUFFER.min((data.end - at).to_usize()), 0);
                let read = read_full(file, &mut buffer, at, ByteCount::new(size)).map_err(super::io("read", path))?;
                buffer[read..].fill(0);
                read_bytes += read as u64;
                for (number, page) in (at..data.end).pages().zip(buffer.as_chunks::<PAGE_SIZE>().0) {
                    let fingerprint = known.of(page);
                    if fingerprint != known.get(number) {
                        known.set(number, fingerprint);
                        emit(number, page)?;
                    }
                }
                at += ByteCount::from(buffer.len());
            }
        }
    }
    Ok(read_bytes)
}

/// True if sample pages, spread over the first `size` bytes, have the fingerprints in `known`.
pub(super) fn sample_holds(file: &File, size: u64, known: &Fingerprints) -> io::Result<bool> {
    const SAMPLES: u64 = 8;
    let full_pages = ByteCount::new(size).pages_rounded_down();
    let mut page: Page = [0; PAGE_SIZE];
    for sample in 0..SAMPLES.min(full_pages) {
        // Includes the first and the last page.
        let number = PageNumber::new((full_pages - 1) * sample / (SAMPLES.min(full_pages) - 1).max(1));
        if read_full(file, &mut page, number.address(), ByteCount::new(size))? != PAGE_SIZE
            || known.of(&page) != known.get(number)
        {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn holes_are_zeros_and_are_not_read() {
        let opened = ReadableFile { file: tempfile::tempfile().unwrap(), is_targets: false };
        let file = &opened.file;
        let size = 1 << 40;
        file.set_len(size).unwrap();
        file.write_all_at(b"far", size - 10).unwrap();
        file.write_all_at(b"near", 5000).unwrap();
        let mut known = Fingerprints::default();
        let mut changed = Vec::new();
        let all = RangeSet::from(Address::MIN..Address::new(size));
        let mut run = |known: &mut Fingerprints| {
            changed.clear();
            let read = scan(&opened, Path::new("far"), size, &all, known, &mut |page, content| {
                changed.push((page.get(), content.iter().filter(|&&byte| byte != 0).count()));
                Ok(())
            });
            (read.unwrap(), changed.clone())
        };
        let (read_bytes, changed) = run(&mut known);
        assert_eq!(changed, [(1, 4), (pages(size).end.get() - 1, 3)]);
        assert!(read_bytes < 1 << 21, "{read_bytes}");
        assert_eq!(run(&mut known).1, []);
        file.set_len(4096).unwrap();
        file.set_len(size).unwrap();
        assert_eq!(run(&mut known).1, [(1, 0), (pages(size).end.get() - 1, 0)]);
    }

    #[test]
    fn fingerprints_after_the_end_are_dropped() {
        let mut known = Fingerprints::default();
        (0..600).for_each(|page| known.set(PageNumber::new(page), u128::from(page) + 1));
        known.truncate(PageNumber::new(300));
        assert_eq!(known.written(PageNumber::MIN..PageNumber::MAX).len(), 300);
        known.truncate(PageNumber::MIN);
        assert!(known.written(PageNumber::MIN..PageNumber::MAX).is_empty());
    }
}
