//! The entries of pagemap, one for each page.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::{FILE, Filter, MAYBE_ZERO, PRESENT, Pagemap, SOFT_DIRTY, SWAPPED, ZERO};
use crate::{AddressRangeExt, PageNumber, PageRangeExt, Range};

/// Most entries that are read at once.
const ENTRIES: usize = 8192;

/// The bit of the zero page in `/proc/kpageflags` (`KPF_ZERO_PAGE`).
const FLAG_ZERO_PAGE: u64 = 1 << 24;

/// An entry of pagemap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry(u64);

impl Entry {
    /// In memory or in swap.
    pub fn is_populated(self) -> bool {
        self.0 & (1 << 63 | 1 << 62) != 0
    }

    /// In swap, or being migrated.
    pub fn is_swapped(self) -> bool {
        self.0 & 1 << 62 != 0
    }

    /// Belongs to a file or to shared memory.
    pub fn is_file(self) -> bool {
        self.0 & 1 << 61 != 0
    }

    /// In memory.
    fn is_present(self) -> bool {
        self.0 & 1 << 63 != 0
    }

    /// In memory, and mapped only once. False also where the kernel is not certain, as for parts of
    /// a huge page that several processes map.
    pub fn is_exclusive(self) -> bool {
        self.0 & (1 << 63 | 1 << 56) == 1 << 63 | 1 << 56
    }

    /// The number of the page frame. `None` if the kernel hides it from this process.
    fn frame(self) -> Option<u64> {
        Some(self.0 & ((1 << 55) - 1)).filter(|&frame| self.is_present() && frame != 0)
    }

    /// Written since `clear_refs`, where the kernel has soft-dirty bits.
    pub fn is_soft_dirty(self) -> bool {
        self.0 & 1 << 55 != 0
    }
}

impl Pagemap {
    /// Calls `each` for every page that `range` touches with its entry, in ascending order.
    ///
    /// # Errors
    /// The file can't be read; `UnexpectedEof`: the process has exited or executed another program.
    pub fn entries(&self, range: &Range, mut each: impl FnMut(PageNumber, Entry)) -> io::Result<()> {
        let pages = range.page_range();
        let mut page = pages.start;
        let mut buffer = vec![0; (pages.page_count() as usize).min(ENTRIES) * 8];
        while page < pages.end {
            let wanted = ((pages.end - page) as usize).min(ENTRIES) * 8;
            self.file.read_exact_at(&mut buffer[..wanted], page.get() * 8)?;
            let (entries, _) = buffer[..wanted].as_chunks::<8>();
            for entry in entries {
                each(page, Entry(u64::from_ne_bytes(*entry)));
                page = page + 1;
            }
        }
        Ok(())
    }

    /// Like [`Pagemap::find`], by reading an entry for each page.
    pub(super) fn find_in_entries(
        &self,
        range: &Range,
        filter: Filter,
        mut each: impl FnMut(Range, u64),
    ) -> io::Result<()> {
        if !range.start.is_page_aligned() || !range.end.is_page_aligned() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let mut zero_pages = (filter.report & (ZERO | MAYBE_ZERO) != 0).then(ZeroPages::new);
        let mut run: Option<(Range, u64)> = None;
        self.entries(range, |page, entry| {
            let flag = |is_set, category| if is_set { category } else { 0 };
            let categories = flag(entry.is_present(), PRESENT)
                | flag(entry.is_swapped(), SWAPPED)
                | flag(entry.is_file(), FILE)
                | flag(entry.is_soft_dirty(), SOFT_DIRTY);
            if categories & filter.all != filter.all
                || categories & filter.none != 0
                || (filter.any != 0 && categories & filter.any == 0)
            {
                return;
            }
            let zero = zero_pages.as_mut().map_or(0, |zero_pages| zero_pages.category(entry));
            let reported = (categories | zero) & filter.report;
            let addresses = page.addresses();
            match &mut run {
                Some((run, categories)) if run.end == addresses.start && *categories == reported => {
                    run.end = addresses.end;
                }
                _ => {
                    if let Some((run, categories)) = run.replace((addresses, reported)) {
                        each(run, categories);
                    }
                }
            }
        })?;
        if let Some((run, categories)) = run {
            each(run, categories);
        }
        Ok(())
    }
}

/// Tells the zero page from other pages.
struct ZeroPages {
    /// `/proc/kpageflags`: a number of 64 bits for each page frame. `None` without the right to
    /// read it.
    flags: Option<File>,
    /// The frame that was looked up last, and whether it is the zero page: most zero pages of an
    /// address space are one frame.
    last: Option<(u64, bool)>,
}

impl ZeroPages {
    fn new() -> ZeroPages {
        ZeroPages { flags: File::open("/proc/kpageflags").ok(), last: None }
    }

    /// [`ZERO`], [`MAYBE_ZERO`] or 0.
    fn category(&mut self, entry: Entry) -> u64 {
        // The zero page does not count as being in a page table. Since Linux 6.11 the huge zero page
        // counts as belonging to a file.
        if !entry.is_present() || entry.is_exclusive() {
            return 0;
        }
        match entry.frame().and_then(|frame| self.is_zero_frame(frame)) {
            Some(true) => ZERO,
            Some(false) => 0,
            None => MAYBE_ZERO,
        }
    }

    fn is_zero_frame(&mut self, frame: u64) -> Option<bool> {
        if let Some((last, is_zero)) = self.last
            && last == frame
        {
            return Some(is_zero);
        }
        let mut flags = [0; 8];
        self.flags.as_ref()?.read_exact_at(&mut flags, frame * 8).ok()?;
        let is_zero = u64::from_ne_bytes(flags) & FLAG_ZERO_PAGE != 0;
        self.last = Some((frame, is_zero));
        Some(is_zero)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{FromRawFd, OwnedFd};

    use pagemark_testing::{Swap, cases};
    use proptest::prelude::*;

    use super::*;
    use crate::pagemap::SCAN;
    use crate::scratch::Scratch;
    use crate::userfaultfd::Userfaultfd;
    use crate::{ByteCount, PAGE_SIZE};

    const PAGES: usize = 1200;

    /// Kinds of mappings.
    #[derive(Clone, Copy, Debug)]
    enum Kind {
        Anonymous,
        SharedAnonymous,
        PrivateFile,
        SharedFile,
        PrivateMemfd,
        SharedMemfd,
    }

    #[derive(Clone, Debug)]
    enum Step {
        Map {
            page: usize,
            count: usize,
            kind: Kind,
        },
        Write {
            page: usize,
            count: usize,
        },
        Read {
            page: usize,
            count: usize,
        },
        Advise {
            page: usize,
            count: usize,
            advice: libc::c_int,
        },
        /// Registers with userfaultfd and write-protects, which leaves markers where there is no
        /// page.
        WriteProtect {
            page: usize,
            count: usize,
        },
    }

    fn part() -> impl Strategy<Value = (usize, usize)> {
        (0usize..PAGES - 1, prop_oneof![4 => 1usize..6, 1 => 100usize..700])
            .prop_map(|(page, count)| (page, count.min(PAGES - page)))
    }

    fn step() -> impl Strategy<Value = Step> {
        use Kind::*;
        let kind =
            prop::sample::select(vec![Anonymous, SharedAnonymous, PrivateFile, SharedFile, PrivateMemfd, SharedMemfd]);
        let advice = prop::sample::select(vec![
            libc::MADV_DONTNEED,
            libc::MADV_FREE,
            libc::MADV_PAGEOUT,
            libc::MADV_HUGEPAGE,
            libc::MADV_NOHUGEPAGE,
            libc::MADV_COLLAPSE,
        ]);
        prop_oneof![
            3 => (part(), kind).prop_map(|((page, count), kind)| Step::Map { page, count, kind }),
            4 => part().prop_map(|(page, count)| Step::Write { page, count }),
            4 => part().prop_map(|(page, count)| Step::Read { page, count }),
            4 => (part(), advice).prop_map(|((page, count), advice)| Step::Advise { page, count, advice }),
            1 => part().prop_map(|(page, count)| Step::WriteProtect { page, count }),
        ]
    }

    /// Files with content and holes that end within the mappings.
    struct Files {
        disk: File,
        memory: File,
    }

    impl Files {
        fn new() -> Files {
            // SAFETY: the call reads only the name, and returns a new descriptor or -1.
            let memory = unsafe {
                let descriptor = libc::memfd_create(c"pagemap-test".as_ptr(), libc::MFD_CLOEXEC);
                assert!(descriptor >= 0);
                File::from(OwnedFd::from_raw_fd(descriptor))
            };
            let files = Files { disk: tempfile::tempfile().unwrap(), memory };
            for file in [&files.disk, &files.memory] {
                for page in (0..PAGES).filter(|page| page % 7 < 4) {
                    file.write_all_at(b"content", (page * PAGE_SIZE) as u64).unwrap();
                }
                file.set_len(((PAGES - 3) * PAGE_SIZE) as u64).unwrap();
            }
            files
        }
    }

    struct Machine {
        scratch: Scratch,
        files: Files,
        userfaultfd: Option<Userfaultfd>,
        /// Pages behind the end of a file, whose access raises a signal.
        beyond: Vec<bool>,
        /// Reading might map the huge zero page, which counts as belonging to a file in pagemap
        /// alone.
        may_be_huge: bool,
    }

    impl Machine {
        fn new() -> Machine {
            Machine {
                scratch: Scratch::new(PAGES),
                files: Files::new(),
                userfaultfd: Userfaultfd::of_this_process().ok(),
                beyond: vec![false; PAGES],
                may_be_huge: false,
            }
        }

        fn run(&mut self, step: &Step) {
            let scratch = &self.scratch;
            match *step {
                Step::Map { page, count, kind } => {
                    self.beyond[page..page + count].fill(false);
                    match kind {
                        Kind::Anonymous => scratch.remap_new(page, count),
                        Kind::SharedAnonymous => scratch.remap_shared(page, count),
                        Kind::PrivateFile | Kind::SharedFile | Kind::PrivateMemfd | Kind::SharedMemfd => {
                            let is_memfd = matches!(kind, Kind::PrivateMemfd | Kind::SharedMemfd);
                            let file = if is_memfd { &self.files.memory } else { &self.files.disk };
                            let is_shared = matches!(kind, Kind::SharedFile | Kind::SharedMemfd);
                            scratch.map_file(page, count, file, is_shared);
                            self.beyond[page..page + count]
                                .iter_mut()
                                .skip(PAGES - 3)
                                .for_each(|beyond| *beyond = true);
                        }
                    }
                }
                Step::Write { page, count } => {
                    let pages = (page..page + count).filter(|&page| !self.beyond[page]);
                    pages.for_each(|page| scratch.write(page, 1));
                }
                Step::Read { page, count } => {
                    let pages = (page..page + count).filter(|&page| !self.beyond[page]);
                    if !self.may_be_huge {
                        pages.for_each(|page| _ = scratch.read(page));
                    }
                }
                Step::Advise { page, count, advice } => {
                    self.may_be_huge |= advice == libc::MADV_HUGEPAGE;
                    let range = scratch.address(page)..scratch.address(page + count);
                    // SAFETY: nobody needs the content of these pages. Not every kind of mapping takes every
                    // advice.
                    unsafe { libc::madvise(range.start.as_mut_ptr(), range.byte_count().to_usize(), advice) };
                }
                Step::WriteProtect { page, count } => {
                    let range = scratch.address(page)..scratch.address(page + count);
                    if let Some(userfaultfd) = &self.userfaultfd
                        && userfaultfd.register(&range).is_ok()
                    {
                        userfaultfd.write_protect(&range, true).unwrap();
                    }
                }
            }
        }

        /// What both ways say.
        fn compare(&self) -> Result<(), TestCaseError> {
            for (none, report) in [(0, 0), (FILE, 0), (0, FILE | PRESENT | SWAPPED | ZERO | SOFT_DIRTY), (FILE, ZERO)] {
                let filter = Filter { none, any: PRESENT | SWAPPED, report, ..Filter::default() };
                same(&self.scratch.range(), filter)?;
            }
            let filter = Filter { all: PRESENT | FILE, ..Filter::default() };
            same(&self.scratch.range(), filter)
        }
    }

    /// Compares the two ways. The kernel itself may change what is populated at any time, so that
    /// a difference must stay.
    fn same(range: &Range, filter: Filter) -> Result<(), TestCaseError> {
        let pagemap = Pagemap::of_this_process().unwrap();
        let mut tries = 0;
        loop {
            let (mut scanned, mut read) = (Vec::new(), Vec::new());
            pagemap.scan(range, filter, |run, categories| scanned.push((run, categories))).unwrap();
            pagemap.find_in_entries(range, filter, |run, categories| read.push((run, categories))).unwrap();
            if joined(&scanned) == joined(&read) {
                return Ok(());
            }
            tries += 1;
            prop_assert!(tries < 20, "{filter:x?}:\n{:x?}\n{:x?}", joined(&scanned), joined(&read));
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Joins adjacent runs of the same categories: the ioctl splits runs at the ends of mappings.
    fn joined(runs: &[(Range, u64)]) -> Vec<(Range, u64)> {
        let mut joined: Vec<(Range, u64)> = Vec::new();
        for (run, categories) in runs {
            match joined.last_mut() {
                Some((last, same)) if last.end == run.start && same == categories => last.end = run.end,
                _ => joined.push((run.clone(), *categories)),
            }
        }
        joined
    }

    fn is_comparable() -> bool {
        match SCAN.refusal() {
            None => true,
            Some(error) => {
                pagemark_testing::skipped(&format!("no PAGEMAP_SCAN to compare with: {error}"));
                false
            }
        }
    }

    #[test]
    fn entries_say_what_a_scan_says() {
        if !is_comparable() {
            return;
        }
        let steps = prop::collection::vec(step(), 1..40);
        let config = ProptestConfig { source_file: Some(file!()), max_shrink_iters: 300, ..cases(96) };
        let _swap = Swap::on();
        proptest::test_runner::TestRunner::new(config)
            .run(&steps, |steps| {
                let mut machine = Machine::new();
                for step in &steps {
                    machine.run(step);
                    machine.compare()?;
                }
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn pages_that_processes_share_are_not_the_zero_page() {
        if !is_comparable() {
            return;
        }
        let scratch = Scratch::new(64);
        (0..32).for_each(|page| scratch.write(page, 1));
        (16..64).for_each(|page| _ = scratch.read(page));
        // SAFETY: the child makes only calls that are safe after a fork.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: the call only waits.
                unsafe { libc::pause() };
            }
        }
        let filter = Filter { any: PRESENT | SWAPPED, report: ZERO, ..Filter::default() };
        let compared = same(&scratch.range(), filter);
        // SAFETY: the child is ours, and was not waited for.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        compared.unwrap();
    }

    #[test]
    fn huge_zero_pages_are_zero_pages() {
        if !is_comparable() {
            return;
        }
        let scratch = Scratch::new(2048);
        scratch.advise(0, 2048, libc::MADV_HUGEPAGE);
        (0..2048).for_each(|page| _ = scratch.read(page));
        scratch.write(700, 1);
        let filter = Filter { any: PRESENT | SWAPPED, report: ZERO, ..Filter::default() };
        same(&scratch.range(), filter).unwrap();
    }

    #[test]
    fn huge_pages_of_hugetlbfs_are_the_same() {
        if !is_comparable() {
            return;
        }
        let Some(_huge_pages) = pagemark_testing::HugePages::reserve() else {
            pagemark_testing::skip!("no huge pages can be reserved (vm.nr_hugepages)");
        };
        for flags in [libc::MAP_PRIVATE, libc::MAP_SHARED] {
            let bytes = 4 << 21;
            // SAFETY: a new mapping at an address that the kernel chooses touches no other memory.
            let start = unsafe {
                let flags = flags | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB;
                libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
            };
            assert_ne!(start, libc::MAP_FAILED);
            // SAFETY: the mapping is ours, and as long as that.
            unsafe { start.cast::<u8>().byte_add(1 << 21).write_volatile(1) };
            let range = crate::Address::of(start)..crate::Address::of(start) + ByteCount::from(bytes);
            let filter = Filter { any: PRESENT | SWAPPED, report: FILE, ..Filter::default() };
            let compared = same(&range, filter);
            // SAFETY: the mapping is ours.
            unsafe { libc::munmap(start, bytes) };
            compared.unwrap();
        }
    }

    #[test]
    fn without_the_right_to_see_frames_any_shared_page_may_be_the_zero_page() {
        let entry = Entry(1 << 63);
        let mut zero_pages = ZeroPages::new();
        assert_eq!(zero_pages.category(entry), MAYBE_ZERO);
        assert_eq!(zero_pages.category(Entry(1 << 63 | 1 << 56)), 0);
        assert_eq!(zero_pages.category(Entry(1 << 62 | 5)), 0);
    }

    #[test]
    fn only_what_every_kernel_knows_can_be_found() {
        let pagemap = Pagemap::of_this_process().unwrap();
        let scratch = Scratch::new(1);
        for filter in [
            Filter { all: super::super::WRITTEN, ..Filter::default() },
            Filter { report: super::super::WP_ALLOWED, ..Filter::default() },
            Filter { protect: true, ..Filter::default() },
        ] {
            assert_eq!(
                pagemap.find(&scratch.range(), filter, |_, _| {}).unwrap_err().raw_os_error(),
                Some(libc::EINVAL)
            );
        }
        let unaligned = scratch.address(0) + ByteCount::new(1)..scratch.address(1);
        assert!(pagemap.find_in_entries(&unaligned, Filter::default(), |_, _| {}).is_err());
    }
}
