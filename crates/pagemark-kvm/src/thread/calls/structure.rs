//! Structures of the program that say where the kernel writes, and how much. The kernel is given a
//! copy, so that no other thread changes them after they were read.

use crate::sys::host_call::Call;
use crate::sys::program_memory;
use crate::thread::Thread;
use crate::writes::Writes;

use super::{Refusal, files, userfault};

/// `ioctl`: finds pages of a process.
const PAGEMAP_SCAN: u64 = 0xc060_6610;
/// `ioctl`: describes a mapping of a process.
const PROCMAP_QUERY: u64 = 0xc068_6611;
/// Bytes of `struct page_region`, of which `PAGEMAP_SCAN` fills a list.
const PAGE_REGION_BYTES: u64 = 24;
/// Bytes of the largest of them.
const MOST_BYTES: usize = 104;

/// A structure whose address is an argument of a call.
#[derive(Clone, Debug)]
pub struct Structure {
    /// The number of the `ioctl`; zero for the length of `getsockopt`.
    request: u64,
    /// Which argument of the call it is.
    index: usize,
    /// Where the program has it.
    at: u64,
    /// Its bytes; zero if it cannot be read.
    len: usize,
    before: [u8; MOST_BYTES],
    given: [u8; MOST_BYTES],
}

impl Structure {
    /// That of `call`, if the call has one.
    pub fn of(call: &Call) -> Option<Structure> {
        let request = call.arguments[1] & 0xffff_ffff;
        let (request, index, len) = match (call.number as i64, request) {
            (libc::SYS_getsockopt, _) => (0, 4, 4),
            // The number of an `ioctl` says how many bytes its structure has.
            (libc::SYS_ioctl, PAGEMAP_SCAN | PROCMAP_QUERY | userfault::API) => (request, 2, request >> 16 & 0x3fff),
            _ => return None,
        };
        let (at, mut len) = (call.arguments[index], len as usize);
        let mut before = [0; MOST_BYTES];
        if program_memory::read(at, &mut before[..len]).is_err() {
            len = 0;
        }
        Some(Structure { request, index, at, len, before, given: before })
    }

    fn word(&self, index: usize) -> u64 {
        u64::from_le_bytes(self.before[index * 8..index * 8 + 8].try_into().unwrap_or_default())
    }

    /// What it leads to: addresses and bytes that the kernel writes there.
    fn leads_to(&self) -> [(u64, u64); 2] {
        match self.request {
            PAGEMAP_SCAN => [(self.word(5), self.word(6).saturating_mul(PAGE_REGION_BYTES)), (0, 0)],
            // A name and a build identifier.
            PROCMAP_QUERY => [(self.word(11), self.word(10) & 0xffff_ffff), (self.word(12), self.word(10) >> 32)],
            _ => [(0, 0); 2],
        }
    }

    /// Where the kernel writes, but for the structure itself.
    pub fn writes(&self) -> Writes {
        self.leads_to().into_iter().fold(Writes::NONE, |writes, (at, len)| writes.and(at, len))
    }

    /// As `getsockopt` has it: how many bytes the kernel may write; none if it cannot be read.
    pub fn length(&self) -> Option<u64> {
        (self.len == 4).then(|| self.word(0) & 0xffff_ffff)
    }

    /// Gives it to the kernel in the program's place.
    ///
    /// # Errors
    /// If it leads to addresses of the monitor, or asks for what the machine does not have.
    pub fn give(&mut self, call: &mut Call) -> Result<(), Refusal> {
        if self.leads_to().into_iter().any(|(at, _)| files::is_monitor(at)) {
            return Err(libc::EFAULT.into());
        }
        if self.request == userfault::API {
            userfault::check_features(self.word(1))?;
        }
        // The program has nothing mapped at address 0: the kernel says what is wrong first.
        call.arguments[self.index] = if self.len == 0 { 0 } else { self.given.as_mut_ptr() as u64 };
        Ok(())
    }

    /// The program gets what the kernel has changed of it.
    ///
    /// # Errors
    /// If the program's memory cannot be written.
    pub fn take_back(&self, thread: &Thread) -> Result<(), Refusal> {
        if self.given == self.before { Ok(()) } else { Ok(thread.write(self.at, &self.given[..self.len])?) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{PAGE, PROGRAM_BASE, PROGRAM_END, PROGRAM_START};

    /// A page at an address that a program may have, for one test each.
    fn page(number: u64) -> *mut u64 {
        let (at, flags) = (0x4200 << 30, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE);
        let at = at + number * PAGE;
        // SAFETY: a new mapping at addresses that nothing here uses.
        let page = unsafe { libc::mmap(at as *mut _, PAGE as usize, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        assert_eq!(page as u64, at);
        page.cast()
    }

    fn ioctl(request: u64, at: u64) -> Call {
        Call { number: libc::SYS_ioctl as u64, arguments: [3, request, at, 0, 0, 0] }
    }

    #[test]
    fn the_kernel_gets_what_was_read() {
        let page = page(0);
        // SAFETY: the page is this test's.
        let words = unsafe { std::slice::from_raw_parts_mut(page, 13) };
        (words[5], words[6]) = (PROGRAM_BASE, 10);
        let mut call = ioctl(PAGEMAP_SCAN, page as u64);
        let mut structure = Structure::of(&call).expect("it has one");
        // Another thread has the kernel write more than was announced.
        words[6] = 1000;
        structure.give(&mut call).expect("nothing of the monitor");
        assert_eq!(structure.writes().iter().collect::<Vec<_>>(), [(PROGRAM_BASE, PROGRAM_BASE + 240)]);
        // SAFETY: 96 bytes of the structure, which is not moved.
        let given = unsafe { std::slice::from_raw_parts(call.arguments[2] as *const u64, 12) };
        assert_eq!(given[6], 10);
    }

    #[test]
    fn lengths_are_read_once() {
        let page = page(1);
        // SAFETY: the page is this test's.
        unsafe { *page = 0xffff_ffff_0000_0010 };
        let mut call = Call { number: libc::SYS_getsockopt as u64, arguments: [3, 1, 2, PROGRAM_BASE, page as u64, 0] };
        let mut structure = Structure::of(&call).expect("it has one");
        assert_eq!(structure.length(), Some(16));
        structure.give(&mut call).expect("nothing of the monitor");
        assert_ne!(call.arguments[4], page as u64);
        call.arguments[4] = PROGRAM_START - 8;
        let mut structure = Structure::of(&call).expect("it has one");
        assert_eq!(structure.length(), None);
        structure.give(&mut call).expect("the kernel says that it cannot be read");
        assert_eq!(call.arguments[4], 0);
    }

    #[test]
    fn addresses_of_the_monitor_are_refused() {
        let page = page(2);
        for (request, word) in [(PAGEMAP_SCAN, 5), (PROCMAP_QUERY, 11), (PROCMAP_QUERY, 12)] {
            // SAFETY: the page is this test's.
            let words = unsafe { std::slice::from_raw_parts_mut(page, 13) };
            words.fill(0);
            words[word] = PROGRAM_END;
            let mut call = ioctl(request, page as u64);
            let refused = Structure::of(&call).expect("it has one").give(&mut call);
            assert_eq!(refused, Err(libc::EFAULT.into()), "{request:#x}");
        }
    }

    #[test]
    fn other_calls_have_none() {
        assert!(Structure::of(&ioctl(0x5413, PROGRAM_BASE)).is_none());
        assert!(Structure::of(&Call { number: libc::SYS_read as u64, arguments: [0; 6] }).is_none());
    }
}
