//! Finds the pages of a file that differ from what it held, by a fingerprint of each.

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;

use nix::errno::Errno;
use nix::unistd::{Whence, lseek};
use pagemark::{PAGE_SIZE, Range, RangeSet};
use xxhash_rust::xxh3::xxh3_128_with_seed;

use super::FilesError;

const PAGE: u64 = PAGE_SIZE as u64;
const BUFFER: usize = 1 << 20;
const GROUP: u64 = 256;

/// One page's content, filled with zeros behind the end of the file.
pub(super) type Page = [u8; PAGE_SIZE];

/// Pages in a file of `size` bytes.
pub(super) fn page_count(size: u64) -> u64 {
    size.div_ceil(PAGE)
}

/// A fingerprint of every page of a file: 16 bytes a page, nothing for what was never written.
///
/// The seed is drawn at random, so that no content can be made whose change goes unseen.
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
    /// Zero for a page of zeros.
    fn of(&self, page: &[u8]) -> u128 {
        if page.iter().all(|&byte| byte == 0) { 0 } else { xxh3_128_with_seed(page, self.seed).max(1) }
    }

    fn get(&self, page: u64) -> u128 {
        self.groups.get(&(page / GROUP)).map_or(0, |group| group[(page % GROUP) as usize])
    }

    fn set(&mut self, page: u64, fingerprint: u128) {
        if fingerprint != 0 {
            let group = self.groups.entry(page / GROUP).or_insert_with(|| Box::new([0; GROUP as usize]));
            group[(page % GROUP) as usize] = fingerprint;
        } else if let Some(group) = self.groups.get_mut(&(page / GROUP)) {
            group[(page % GROUP) as usize] = 0;
        }
    }

    /// The pages in `pages` that hold anything but zeros.
    fn written(&self, pages: Range) -> Vec<u64> {
        let groups = self.groups.range(pages.start / GROUP..pages.end.div_ceil(GROUP));
        groups
            .flat_map(|(number, group)| (number * GROUP..).zip(group.iter()))
            .filter(|(page, fingerprint)| **fingerprint != 0 && pages.contains(page))
            .map(|(page, _)| page)
            .collect()
    }

    /// Forgets what lies behind the end of the file.
    pub(super) fn truncate(&mut self, pages: u64) {
        self.groups.split_off(&pages.div_ceil(GROUP));
        if let Some(mut last) = self.groups.last_entry() {
            let first = *last.key() * GROUP;
            let keep = usize::try_from(pages.saturating_sub(first)).unwrap_or(usize::MAX).min(GROUP as usize);
            last.get_mut()[keep..].fill(0);
        }
    }
}

/// Where a scan hands over pages that changed.
pub(super) type Emit<'a> = &'a mut dyn FnMut(u64, &Page) -> Result<(), FilesError>;

/// Reads the pages of `file`, which is called `path` and has `size` bytes, that touch `bytes`, and emits those that are not what
/// `known` says, which then says what they are. Holes are not read. Returns the bytes read.
pub(super) fn scan(
    file: &File,
    path: &Path,
    size: u64,
    bytes: &RangeSet,
    known: &mut Fingerprints,
    emit: Emit<'_>,
) -> Result<u64, FilesError> {
    let mut buffer = Vec::new();
    let mut read_bytes = 0;
    for range in bytes.iter() {
        let end = range.end.min(size).next_multiple_of(PAGE);
        let mut at = range.start / PAGE * PAGE;
        while at < end {
            let data = next_data(file, at, end).map_err(FilesError::io("read", path))?;
            for page in known.written(at / PAGE..data.start / PAGE) {
                known.set(page, 0);
                emit(page, &[0; PAGE_SIZE])?;
            }
            at = data.start;
            while at < data.end {
                buffer.resize(BUFFER.min(usize::try_from(data.end - at).unwrap_or(BUFFER)), 0);
                let read = read_full(file, &mut buffer, at, size).map_err(FilesError::io("read", path))?;
                buffer[read..].fill(0);
                read_bytes += read as u64;
                for (number, page) in (at / PAGE..).zip(buffer.as_chunks::<PAGE_SIZE>().0) {
                    let fingerprint = known.of(page);
                    if fingerprint != known.get(number) {
                        known.set(number, fingerprint);
                        emit(number, page)?;
                    }
                }
                at += buffer.len() as u64;
            }
        }
    }
    Ok(read_bytes)
}

/// True if some pages of the first `size` bytes, picked from all over, are what `known` says.
pub(super) fn sample_holds(file: &File, size: u64, known: &Fingerprints) -> io::Result<bool> {
    const SAMPLES: u64 = 8;
    let full_pages = size / PAGE;
    let mut page: Page = [0; PAGE_SIZE];
    for sample in 0..SAMPLES.min(full_pages) {
        // The first and the last are among them.
        let number = (full_pages - 1) * sample / (SAMPLES.min(full_pages) - 1).max(1);
        if read_full(file, &mut page, number * PAGE, size)? != PAGE_SIZE || known.of(&page) != known.get(number) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The next pages from `at` on, up to `end`, that are no hole; empty at `end` if there are none.
pub(super) fn next_data(file: &File, at: u64, end: u64) -> io::Result<Range> {
    let offset = |at: u64| i64::try_from(at).map_err(|_| io::Error::from(ErrorKind::FileTooLarge));
    let (at_offset, end_offset) = (offset(at)?, offset(end)?);
    let data = match lseek(file, at_offset, Whence::SeekData) {
        Ok(data) => data.min(end_offset) as u64 / PAGE * PAGE,
        // Only a hole is left, or the file ended earlier meanwhile.
        Err(Errno::ENXIO) => return Ok(end..end),
        // No notion of holes here.
        Err(Errno::EINVAL | Errno::EOPNOTSUPP) => return Ok(at..end),
        Err(error) => return Err(error.into()),
    };
    let data = data.max(at);
    if data >= end {
        return Ok(end..end);
    }
    match lseek(file, offset(data.max(at))?, Whence::SeekHole) {
        Ok(hole) => Ok(data..(hole as u64).next_multiple_of(PAGE).clamp(data + PAGE, end)),
        Err(Errno::ENXIO | Errno::EINVAL | Errno::EOPNOTSUPP) => Ok(data..end),
        Err(error) => Err(error.into()),
    }
}

/// Reads from `at` until the buffer is full or `size` or the end of the file is reached.
pub(super) fn read_full(file: &File, buffer: &mut [u8], at: u64, size: u64) -> io::Result<usize> {
    let wanted = usize::try_from(size.saturating_sub(at)).unwrap_or(usize::MAX).min(buffer.len());
    let mut done = 0;
    while done < wanted {
        match file.read_at(&mut buffer[done..wanted], at + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holes_are_zeros_and_are_not_read() {
        let file = tempfile::tempfile().unwrap();
        let size = 1 << 40;
        file.set_len(size).unwrap();
        file.write_all_at(b"far", size - 10).unwrap();
        file.write_all_at(b"near", 5000).unwrap();
        let mut known = Fingerprints::default();
        let mut changed = Vec::new();
        let all = RangeSet::from(0..size);
        let mut run = |known: &mut Fingerprints| {
            changed.clear();
            let read = scan(&file, Path::new("far"), size, &all, known, &mut |page, content| {
                changed.push((page, content.iter().filter(|&&byte| byte != 0).count()));
                Ok(())
            });
            (read.unwrap(), changed.clone())
        };
        let (read_bytes, changed) = run(&mut known);
        assert_eq!(changed, [(1, 4), (size / PAGE - 1, 3)]);
        assert!(read_bytes < 1 << 21, "{read_bytes}");
        assert_eq!(run(&mut known).1, []);
        file.set_len(4096).unwrap();
        file.set_len(size).unwrap();
        assert_eq!(run(&mut known).1, [(1, 0), (size / PAGE - 1, 0)]);
    }

    #[test]
    fn what_is_behind_the_end_is_forgotten() {
        let mut known = Fingerprints::default();
        (0..600).for_each(|page| known.set(page, u128::from(page) + 1));
        known.truncate(300);
        assert_eq!(known.written(0..u64::MAX).len(), 300);
        known.truncate(0);
        assert!(known.written(0..u64::MAX).is_empty());
    }
}
