//! Withholding from CRIU the memory that Pagemark keeps itself.
//!
//! Even where CRIU leaves memory out, it takes a reference to each page of it while the tree is frozen: 65 ms a GiB or more. So it is
//! not told of those pages. It asks by the system call `ioctl(PAGEMAP_SCAN)`, which a seccomp filter hands to Pagemark to answer:
//! with what the kernel says of other mappings, and nothing about private anonymous ones. What it asked about these is noted here; the
//! pages there that hold data, which the tracker knows, are added to CRIU's image of the memory afterwards, which then says the
//! same as if CRIU had left them out by itself.
//!
//! If Pagemark is killed, nobody can answer any more, the calls fail, and CRIU gives up the dump as after any error.

use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;
use pagemark::sys::pagemap::{Filter, Pagemap};
use pagemark::{Range, RangeSet};

use super::notify::{Answer, Call, Listener};

/// Category of pages that are protected against any access; they have no content, and CRIU restores the protection.
const GUARD: u64 = 1 << 8;

/// `struct pm_scan_arg` in words of 64 bits.
const SCAN_WORDS: usize = 12;
/// Where in it the kernel says how far it came.
const WALK_END: usize = 4;

/// Regions that are answered at once at most.
const MOST_REGIONS: usize = 1 << 16;

/// Answers CRIU's questions in a thread of its own.
#[derive(Debug)]
pub(super) struct Withholding {
    thread: std::thread::JoinHandle<HashMap<i32, RangeSet>>,
}

impl Withholding {
    /// Begins to answer for the program that has sent its listener to `socket`. `tree` are the processes being dumped.
    pub fn start(socket: &UnixStream, tree: Vec<i32>) -> io::Result<Withholding> {
        let listener = Listener::receive(socket)?;
        let spaces = tree.into_iter().map(|pid| (pid, None)).collect();
        let thread =
            std::thread::Builder::new().name("withhold".into()).spawn(move || Answers { listener, spaces }.run())?;
        Ok(Withholding { thread })
    }

    /// Waits until the program has ended. Returns the ranges of each process about which nothing was told; what they hold is not
    /// looked at.
    pub fn finish(self) -> HashMap<i32, RangeSet> {
        self.thread.join().unwrap_or_default()
    }
}

struct Answers {
    listener: Listener,
    /// Each process once CRIU has asked about it.
    spaces: HashMap<i32, Option<Space>>,
}

struct Space {
    pagemap: Pagemap,
    /// Private anonymous mappings.
    anonymous: RangeSet,
    withheld: RangeSet,
}

/// `struct page_region`.
struct Region {
    range: Range,
    categories: u64,
}

impl Answers {
    fn run(mut self) -> HashMap<i32, RangeSet> {
        loop {
            let mut fds = [PollFd::new(self.listener.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(_) => break,
            }
            let events = fds[0].revents().unwrap_or(PollFlags::empty());
            if events.contains(PollFlags::POLLIN) {
                let Ok(call) = self.listener.next() else { break };
                let Some(call) = call else { continue };
                // What can't be answered here the kernel answers: CRIU then saves those pages itself.
                let answer = self.answer(&call).unwrap_or(Answer::Continue);
                if self.listener.answer(&call, answer).is_err() {
                    break;
                }
            } else if !events.is_empty() {
                break;
            }
        }
        let withheld = self.spaces.into_iter().filter_map(|(pid, space)| Some((pid, space?.withheld)));
        withheld.collect()
    }

    fn answer(&mut self, call: &Call) -> Option<Answer> {
        let criu = Pid::from_raw(call.pid as i32);
        let path = std::fs::read_link(format!("/proc/{criu}/fd/{}", call.arguments[0] as i32)).ok()?;
        let pid = pid_of_pagemap(path)?;
        let mut words = [0_u64; SCAN_WORDS];
        read(criu, call.arguments[2], &mut words)?;
        let [_, flags, start, end, _, vector, length, most_pages, inverted, mask, any, report] = words;
        // The questions that CRIU asks are simple; another one is the kernel's.
        if flags != 0 || most_pages != 0 || inverted & !mask != 0 || start >= end || !self.listener.is_valid(call) {
            return None;
        }
        let space = self.spaces.get_mut(&pid)?;
        if space.is_none() {
            *space = Space::open(pid);
        }
        let space = space.as_mut()?;
        let filter = Filter { all: mask & !inverted, none: inverted, any, report, ..Filter::default() };
        let (mut regions, withheld) = space.look(start..end, filter)?;
        let room = (length as usize).min(MOST_REGIONS);
        let walk_end = if regions.len() > room { regions[room].range.start } else { end };
        regions.truncate(room);
        let bytes: Vec<u64> = regions.iter().flat_map(|r| [r.range.start, r.range.end, r.categories]).collect();
        write(criu, vector, &bytes)?;
        write(criu, call.arguments[2] + 8 * WALK_END as u64, &[walk_end])?;
        space.withheld.extend(&withheld);
        space.withheld.remove(walk_end..end);
        Some(Answer::Return(regions.len() as i64))
    }
}

impl Space {
    fn open(pid: i32) -> Option<Space> {
        let pagemap = Pagemap::open(&PathBuf::from(format!("/proc/{pid}/pagemap"))).ok()?;
        let maps = std::fs::read(format!("/proc/{pid}/maps")).ok()?;
        let anonymous = maps.split(|&byte| byte == b'\n').filter_map(anonymous_mapping).collect();
        Some(Space { pagemap, anonymous, withheld: RangeSet::new() })
    }

    /// What the kernel finds in `asked`, and the parts of it that are withheld.
    fn look(&self, asked: Range, filter: Filter) -> Option<(Vec<Region>, RangeSet)> {
        let mut withheld: RangeSet = self.anonymous.within(asked.clone()).collect();
        let mut told = Vec::new();
        for range in withheld.iter() {
            // What CRIU wants to know of a page makes the kernel look at each one; guards it finds in the page table alone.
            let guards = Filter { all: GUARD, report: filter.report, ..Filter::default() };
            let found = self.pagemap.scan(&range, guards, |range, categories| told.push(Region { range, categories }));
            match found {
                // A kernel that does not tell guards from other pages.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                other => other.ok()?,
            }
        }
        told.iter().for_each(|region| withheld.remove(region.range.clone()));
        let mut others = RangeSet::from(asked);
        others.subtract(&self.anonymous);
        for range in others.iter() {
            self.pagemap.scan(&range, filter, |range, categories| told.push(Region { range, categories })).ok()?;
        }
        told.sort_by_key(|region| region.range.start);
        Some((told, withheld))
    }
}

/// The addresses of a line of `/proc/PID/maps` if it is a private anonymous mapping.
fn anonymous_mapping(line: &[u8]) -> Option<Range> {
    let mut fields = line.split(|&byte| byte == b' ').filter(|field| !field.is_empty());
    let mut text = || std::str::from_utf8(fields.next()?).ok();
    let (start, end) = text()?.split_once('-')?;
    let permissions = text()?;
    let (_offset, _device, inode) = (text()?, text()?, text()?);
    // Mappings of the kernel's own, like [vdso], have no inode either.
    let of_kernel = fields.next().is_some_and(|name| name.starts_with(b"[v"));
    if !permissions.ends_with('p') || inode != "0" || of_kernel {
        return None;
    }
    Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
}

/// The process whose `/proc/PID/pagemap` it is.
fn pid_of_pagemap(path: PathBuf) -> Option<i32> {
    path.to_str()?.strip_prefix("/proc/")?.strip_suffix("/pagemap")?.parse().ok()
}

fn remote(address: u64, words: usize) -> Option<[RemoteIoVec; 1]> {
    Some([RemoteIoVec { base: usize::try_from(address).ok()?, len: words * 8 }])
}

fn read(pid: Pid, address: u64, words: &mut [u64]) -> Option<()> {
    let mut bytes = vec![0; words.len() * 8];
    let read = process_vm_readv(pid, &mut [io::IoSliceMut::new(&mut bytes)], &remote(address, words.len())?).ok()?;
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(bytes.try_into().ok()?);
    }
    (read == bytes.len()).then_some(())
}

fn write(pid: Pid, address: u64, words: &[u64]) -> Option<()> {
    if words.is_empty() {
        return Some(());
    }
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let written = process_vm_writev(pid, &[io::IoSlice::new(&bytes)], &remote(address, words.len())?).ok()?;
    (written == bytes.len()).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_anonymous_mappings_are_told_from_others() {
        let range = |line: &str| anonymous_mapping(line.as_bytes());
        assert_eq!(range("7f00-7f01 rw-p 00000000 00:00 0 "), Some(0x7f00..0x7f01));
        assert_eq!(range("1000-2000 rw-p 00000000 00:00 0                          [heap]"), Some(0x1000..0x2000));
        assert_eq!(range("1000-2000 r--p 00000000 00:00 0                          [vvar]"), None);
        assert_eq!(range("1000-2000 rw-s 00000000 00:00 0 "), None);
        assert_eq!(range("1000-2000 rw-p 00000000 08:01 77                         /bin/cat"), None);
        assert_eq!(range(""), None);
        assert_eq!(range("1000 rw-p"), None);
        assert_eq!(pid_of_pagemap("/proc/17/pagemap".into()), Some(17));
        assert_eq!(pid_of_pagemap("/proc/17/maps".into()), None);
    }
}
