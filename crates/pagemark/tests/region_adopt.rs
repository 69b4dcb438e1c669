//! Adopted memory: every kind of mapping with every mechanism. The oracle is the content that the
//! test wrote, by `write(2)` to the file or by stores, and nothing that Pagemark reports.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use pagemark::address::offsets;
use pagemark::region::{Region, RegionOptions};
use pagemark::{Error, ErrorKind, Mechanism, PAGE_SIZE};
use pagemark_testing::{HugePages, Swap, assert_oracle, assert_oracle_eq, finding, skip, skipped};

const HUGE_PAGE: usize = 2 << 20;

/// Where the content of a mapping comes from.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Source {
    Anonymous,
    File,
    Memfd,
    HugeMemfd,
    HugeAnonymous,
}

/// How the content lies in the source before the adoption.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Layout {
    /// All of the source holds data.
    Whole,
    /// Every other page of the file is a hole.
    Sparse,
    /// The file ends within the last page of the mapping.
    PartialPage,
}

/// Which pages the page table has at the adoption.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Populated {
    None,
    /// Some pages were read and some were written through the mapping.
    Half,
    /// As `Half`, and then swapped out.
    Swapped,
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct Kind {
    source: Source,
    is_shared: bool,
    layout: Layout,
    populated: Populated,
}

/// Memory of a kind, and the content that it and its file must have.
struct Subject {
    start: NonNull<u8>,
    kind: Kind,
    file: Option<File>,
    content: Vec<u8>,
    file_content: Vec<u8>,
}

impl Drop for Subject {
    fn drop(&mut self) {
        // SAFETY: the mapping is the subject's, and no region has it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.content.len()) };
    }
}

fn memfd(flags: libc::c_uint) -> io::Result<File> {
    // SAFETY: the call reads the name and returns a new descriptor or -1.
    let descriptor = unsafe { libc::memfd_create(c"adopted".as_ptr(), flags) };
    if descriptor < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and belongs to nothing else.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

/// A byte that is not zero.
fn byte(offset: usize) -> u8 {
    (offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[1] | 1
}

impl Kind {
    fn is_huge(self) -> bool {
        matches!(self.source, Source::HugeMemfd | Source::HugeAnonymous)
    }

    /// Bytes of a page of the mapping.
    fn page_bytes(self) -> usize {
        if self.is_huge() { HUGE_PAGE } else { PAGE_SIZE }
    }

    fn pages(self) -> usize {
        if self.is_huge() { 3 } else { 16 }
    }

    fn bytes(self) -> usize {
        self.pages() * self.page_bytes()
    }

    /// The file, filled by `write(2)`, and its content as a mapping shows it.
    fn file(self) -> io::Result<(Option<File>, Vec<u8>)> {
        let mut content = vec![0; self.bytes()];
        let file = match self.source {
            Source::Anonymous | Source::HugeAnonymous => return Ok((None, content)),
            Source::File => tempfile::tempfile()?,
            Source::Memfd => memfd(0)?,
            Source::HugeMemfd => memfd(libc::MFD_HUGETLB)?,
        };
        let file_bytes = if self.layout == Layout::PartialPage { self.bytes() - 1000 } else { self.bytes() };
        file.set_len(file_bytes as u64)?;
        for page in (0..self.pages()).filter(|page| self.layout != Layout::Sparse || page % 2 == 1) {
            let start = page * self.page_bytes();
            let end = (start + self.page_bytes()).min(file_bytes);
            (start..end).for_each(|offset| content[offset] = byte(offset));
            if self.is_huge() {
                write_by_mapping(&file, start, &content[start..end])?;
            } else {
                file.write_all_at(&content[start..end], start as u64)?;
            }
        }
        Ok((Some(file), content))
    }

    fn make(self) -> io::Result<Subject> {
        let (file, file_content) = self.file()?;
        let flags = if self.is_shared { libc::MAP_SHARED } else { libc::MAP_PRIVATE };
        let kind = match self.source {
            Source::Anonymous => libc::MAP_ANONYMOUS,
            Source::HugeAnonymous => libc::MAP_ANONYMOUS | libc::MAP_HUGETLB,
            _ => 0,
        };
        let start = map(file.as_ref(), self.bytes(), 0, flags | kind)?;
        let mut subject = Subject { start, kind: self, file, content: file_content.clone(), file_content };
        if self.populated != Populated::None {
            for page in 0..self.pages() {
                let offset = page * self.page_bytes() + 17 * page;
                match page % 4 {
                    0 => assert_eq!(subject.load(offset), subject.content[offset]),
                    1 => subject.store(offset, 200 + page as u8),
                    _ => {}
                }
            }
        }
        if self.populated == Populated::Swapped {
            // SAFETY: the advice changes no content.
            let result = unsafe { libc::madvise(start.as_ptr().cast(), self.bytes(), libc::MADV_PAGEOUT) };
            assert_eq!(result, 0, "{}", io::Error::last_os_error());
        }
        Ok(subject)
    }
}

fn map(file: Option<&File>, bytes: usize, offset: usize, flags: libc::c_int) -> io::Result<NonNull<u8>> {
    let descriptor = file.map_or(-1, AsRawFd::as_raw_fd);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, descriptor, offset as i64) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Files of huge pages have no `write(2)`.
fn write_by_mapping(file: &File, offset: usize, content: &[u8]) -> io::Result<()> {
    let start = map(Some(file), content.len(), offset, libc::MAP_SHARED)?;
    // SAFETY: the mapping is as long as the content, and is used only here.
    unsafe {
        std::ptr::copy_nonoverlapping(content.as_ptr(), start.as_ptr(), content.len());
        libc::munmap(start.as_ptr().cast(), content.len());
    }
    Ok(())
}

impl Subject {
    fn load(&self, offset: usize) -> u8 {
        assert!(offset < self.content.len());
        // SAFETY: the byte lies in the mapping, to which no reference exists.
        unsafe { self.start.as_ptr().add(offset).read_volatile() }
    }

    /// A store of the program.
    fn store(&mut self, offset: usize, value: u8) {
        assert!(offset < self.content.len());
        // SAFETY: as for `load`.
        unsafe { self.start.as_ptr().add(offset).write_volatile(value) };
        self.content[offset] = value;
        if self.kind.is_shared {
            self.file_content[offset] = value;
        }
    }

    /// Compares the memory and the file with what they must hold.
    fn check(&self, moment: &str) {
        let name = format!("{:?}, {moment}", self.kind);
        let compare = |found: &[u8], expected: &[u8], place: &str| {
            if found == expected {
                return;
            }
            let wrong = found.iter().zip(expected).filter(|(found, expected)| found != expected).count();
            let first = found.iter().zip(expected).position(|(found, expected)| found != expected);
            finding(&format!("{name}: {wrong} bytes of {place} are wrong, the first at {first:x?}"));
        };
        let mut memory = vec![0; self.content.len()];
        // SAFETY: the mapping is as long, and no reference to it exists.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr(), memory.as_mut_ptr(), memory.len()) };
        compare(&memory, &self.content, "the memory");
        if let Some(file) = &self.file
            && !self.kind.is_huge()
        {
            let mut found = vec![0; file.metadata().unwrap().len() as usize];
            file.read_exact_at(&mut found, 0).unwrap();
            compare(&found, &self.file_content[..found.len()], "the file");
        }
    }

    /// # Safety
    /// Those of [`Region::adopt_shared`].
    unsafe fn adopt(&self, mechanism: Mechanism, without_rollback: bool) -> Result<Region, Error> {
        let options = RegionOptions { mechanism: Some(mechanism), without_rollback, ..RegionOptions::default() };
        // SAFETY: the caller guarantees it.
        unsafe { Region::adopt_shared(self.start, self.content.len(), options) }
    }
}

/// Every kind that this machine has.
fn kinds() -> Vec<Kind> {
    let mut kinds = Vec::new();
    let sources = [Source::Anonymous, Source::File, Source::Memfd, Source::HugeMemfd, Source::HugeAnonymous];
    for source in sources {
        for is_shared in [false, true] {
            let layouts: &[Layout] = match source {
                Source::File | Source::Memfd => &[Layout::Whole, Layout::Sparse, Layout::PartialPage],
                Source::HugeMemfd => &[Layout::Whole, Layout::Sparse],
                Source::Anonymous | Source::HugeAnonymous => &[Layout::Whole],
            };
            for &layout in layouts {
                for populated in [Populated::None, Populated::Half, Populated::Swapped] {
                    let is_swappable = matches!(source, Source::Anonymous | Source::Memfd | Source::File);
                    if populated != Populated::Swapped || is_swappable {
                        kinds.push(Kind { source, is_shared, layout, populated });
                    }
                }
            }
        }
    }
    kinds
}

/// Serializes the tests, because an address space has only one set of soft-dirty bits.
static TURN: Mutex<()> = Mutex::new(());

/// Runs a test on each kind with each mechanism.
fn for_each(mut test: impl FnMut(&mut Subject, Mechanism)) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let huge_pages = HugePages::reserve();
    let swap = Swap::on();
    let mechanisms = mechanisms();
    for kind in kinds() {
        if kind.is_huge() && huge_pages.is_none() {
            skipped(&format!("{kind:?}: no huge pages can be reserved"));
            continue;
        }
        if kind.populated == Populated::Swapped && swap.is_none() && kind.source != Source::File {
            skipped(&format!("{kind:?}: no swap space"));
            continue;
        }
        for &mechanism in &mechanisms {
            let mut subject = kind.make().unwrap_or_else(|error| panic!("{kind:?}: {error}"));
            test(&mut subject, mechanism);
        }
    }
}

/// The mechanisms that work here.
fn mechanisms() -> Vec<Mechanism> {
    let works = |mechanism: &Mechanism| {
        let options = RegionOptions { mechanism: Some(*mechanism), ..RegionOptions::default() };
        match Region::with_options(PAGE_SIZE, options) {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                skipped(&format!("{mechanism}: {}", error.reason()));
                false
            }
            Err(error) => panic!("{mechanism}: {error}"),
        }
    };
    Mechanism::ALL.into_iter().filter(works).collect()
}

/// The region, or `None` if the mechanism does not work here or refuses this kind; the memory is
/// then as before.
fn adopted(subject: &Subject, mechanism: Mechanism, without_rollback: bool) -> Option<Region> {
    // SAFETY: the subject outlives the region, and only this thread uses its memory and its file.
    match unsafe { subject.adopt(mechanism, without_rollback) } {
        Ok(region) => Some(region),
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            let is_refused = match mechanism {
                Mechanism::Emulate => subject.kind.is_shared,
                Mechanism::Uffd => subject.kind.source == Source::File,
                _ => false,
            };
            assert!(is_refused, "{mechanism}, {:?}: {error}", subject.kind);
            subject.check("after a refused adoption");
            None
        }
        Err(error) => panic!("{mechanism}, {:?}: {error}", subject.kind),
    }
}

#[test]
fn rollback_restores_all_content() {
    for_each(|subject, mechanism| {
        let Some(region) = adopted(subject, mechanism, false) else { return };
        let before = (subject.content.clone(), subject.file_content.clone());
        for round in 0..2 {
            region.begin().unwrap();
            for page in [1, subject.kind.pages() - 1] {
                subject.store(page * subject.kind.page_bytes() + 5, 7 + round);
            }
            region.rollback().unwrap();
            (subject.content, subject.file_content) = before.clone();
            subject.check(&format!("{mechanism}, rolled back {round}"));
        }
        drop(region);
        subject.check(&format!("{mechanism}, released"));
        subject.store(3, 3);
        subject.check(&format!("{mechanism}, written after its release"));
    });
}

#[test]
fn adoption_changes_nothing() {
    for_each(|subject, mechanism| {
        let Some(region) = adopted(subject, mechanism, false) else { return };
        subject.check(&format!("{mechanism}, adopted"));
        region.begin().unwrap();
        region.rollback().unwrap();
        subject.check(&format!("{mechanism}, rolled back without a write"));
    });
}

#[test]
fn commit_reports_every_write() {
    for_each(|subject, mechanism| {
        for without_rollback in [false, true] {
            // `emulate` has turned private memory into shared memory, which it does not adopt.
            if without_rollback && mechanism == Mechanism::Emulate {
                return;
            }
            let Some(region) = adopted(subject, mechanism, without_rollback) else { return };
            for round in 0..4 {
                region.begin().unwrap();
                let mut written = vec![];
                for page in 0..subject.kind.pages() {
                    if (page + round) % 3 == 0 {
                        let offset = page * subject.kind.page_bytes() + 100 * round;
                        // A value that differs from those before, which `compare` would not report.
                        subject.store(offset, 40 + round as u8 + if without_rollback { 10 } else { 0 });
                        written.push(offset);
                    }
                }
                let reported = region.commit().unwrap();
                for offset in written {
                    assert_oracle!(
                        reported.covers(offsets(offset..offset + 1)),
                        "{mechanism}, {:?}: a write to {offset:#x} was missed: {reported:x?}",
                        subject.kind
                    );
                }
                subject.check(&format!("{mechanism}, committed"));
            }
        }
    });
}

#[test]
fn snapshots_hold_all_content() {
    for_each(|subject, mechanism| {
        let Some(region) = adopted(subject, mechanism, true) else { return };
        let first = region.snapshot().unwrap();
        let before = (subject.content.clone(), subject.file_content.clone());
        let mut held = vec![0; subject.content.len()];
        first.content().read_at(pagemark::Address::MIN, &mut held).unwrap();
        assert_oracle!(held == subject.content, "{mechanism}, {:?}: the snapshot is wrong", subject.kind);
        subject.store(subject.kind.page_bytes() + 9, 9);
        subject.store(2 * subject.kind.page_bytes() + 9, 9);
        let second = region.snapshot().unwrap();
        second.content().read_at(pagemark::Address::MIN, &mut held).unwrap();
        assert_oracle!(held == subject.content, "{mechanism}, {:?}: the second snapshot is wrong", subject.kind);
        region.restore(&first).unwrap();
        (subject.content, subject.file_content) = before;
        subject.check(&format!("{mechanism}, restored"));
    });
}

#[test]
fn discarded_pages_hold_zeros() {
    for_each(|subject, mechanism| {
        let Some(region) = adopted(subject, mechanism, false) else { return };
        let before = (subject.content.clone(), subject.file_content.clone());
        let page_bytes = subject.kind.page_bytes();
        // From the middle of a page to the middle of another one.
        let discarded = PAGE_SIZE..2 * page_bytes + 3;
        let whole_pages = PAGE_SIZE..2 * page_bytes;
        region.begin().unwrap();
        region.discard(discarded.clone()).unwrap();
        subject.content[whole_pages.clone()].fill(0);
        if subject.kind.is_shared {
            subject.file_content[whole_pages.clone()].fill(0);
        }
        subject.check(&format!("{mechanism}, discarded"));
        subject.store(PAGE_SIZE + 1, 1);
        region.rollback().unwrap();
        (subject.content, subject.file_content) = before;
        subject.check(&format!("{mechanism}, rolled back a discard"));
        region.begin().unwrap();
        region.discard(discarded).unwrap();
        assert_oracle!(
            region.commit().unwrap().covers(offsets(whole_pages.clone())),
            "{mechanism}, {:?}: discarded pages are not reported",
            subject.kind
        );
        subject.content[whole_pages.clone()].fill(0);
        if subject.kind.is_shared {
            subject.file_content[whole_pages].fill(0);
        }
        subject.check(&format!("{mechanism}, discarded again"));
        drop(region);
        subject.check(&format!("{mechanism}, discarded and released"));
    });
}

#[test]
fn pages_beyond_the_end_of_a_file_are_refused() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    for source in [Source::File, Source::Memfd] {
        for is_shared in [false, true] {
            let kind = Kind { source, is_shared, layout: Layout::Whole, populated: Populated::None };
            let mut subject = kind.make().unwrap();
            let file_bytes = kind.bytes() - 2 * PAGE_SIZE - 100;
            subject.file.as_ref().unwrap().set_len(file_bytes as u64).unwrap();
            for mechanism in Mechanism::ALL {
                // SAFETY: no region is made.
                let refused = unsafe { subject.adopt(mechanism, false) };
                let refused = refused.map_err(|error| error.kind()).map(drop);
                assert_eq!(refused, Err(ErrorKind::BeyondFile), "{mechanism}, {kind:?}");
            }
            // The pages that the file has can be adopted.
            let bytes = kind.bytes() - 2 * PAGE_SIZE;
            // SAFETY: the subject outlives the region, and only this thread uses its memory.
            let region = unsafe { Region::adopt_shared(subject.start, bytes, RegionOptions::default()) }.unwrap();
            region.begin().unwrap();
            subject.store(5, 5);
            region.rollback().unwrap();
            assert_oracle_eq!(subject.load(5), byte(5), "the content after the rollback");
        }
    }
}

#[test]
fn parts_of_huge_pages_are_refused() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(_huge_pages) = HugePages::reserve() else { skip!("no huge pages can be reserved") };
    let kind = Kind { source: Source::HugeMemfd, is_shared: false, layout: Layout::Whole, populated: Populated::None };
    let subject = kind.make().unwrap();
    for (offset, bytes) in [(PAGE_SIZE, HUGE_PAGE), (0, HUGE_PAGE + PAGE_SIZE)] {
        for mechanism in Mechanism::ALL {
            let options = RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
            // SAFETY: no region is made.
            let refused = unsafe { Region::adopt(subject.start.add(offset), bytes, options) };
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unaligned, "{mechanism}: {error}");
            assert!(error.to_string().contains("2097152 bytes"), "{mechanism}: {error}");
        }
    }
    subject.check("refused");
}

/// Writes to a shared file by `write(2)`, which stands for any other process.
#[test]
fn shared_memory_is_adopted_only_with_sole_use() {
    for_each(|subject, mechanism| {
        if !subject.kind.is_shared || subject.kind.source == Source::HugeMemfd {
            return;
        }
        let options = RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
        // SAFETY: the subject outlives the region, and its memory is used by this thread only.
        let adopted = unsafe { Region::adopt(subject.start, subject.content.len(), options) };
        let sees_every_write = [Mechanism::Compare, Mechanism::Full].contains(&mechanism);
        if !sees_every_write {
            let refused = adopted.map_err(|error| error.kind()).map(drop);
            assert_eq!(refused, Err(ErrorKind::Shared), "{mechanism}, {:?}", subject.kind);
            subject.check("after a refused adoption");
            return;
        }
        let region = adopted.unwrap();
        let Some(file) = &subject.file else { return };
        let first = region.snapshot().unwrap();
        for page in [3, 8] {
            let offset = page * PAGE_SIZE + 11;
            region.begin().unwrap();
            file.write_all_at(&[99], offset as u64).unwrap();
            let reported = region.commit().unwrap();
            assert_oracle!(
                reported.covers(offsets(offset..offset + 1)),
                "{mechanism}, {:?}: a write was missed: {reported:x?}",
                subject.kind
            );
            region.begin().unwrap();
            file.write_all_at(&[98], offset as u64).unwrap();
            region.rollback().unwrap();
            assert_oracle_eq!(
                subject.load(offset),
                99,
                "{mechanism}, {:?}: the content after the rollback",
                subject.kind
            );
        }
        assert_ne!(region.snapshot().unwrap(), first);
        region.restore(&first).unwrap();
        subject.check(&format!("{mechanism}, restored after writes of another process"));
    });
}
