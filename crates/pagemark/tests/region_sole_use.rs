//! Regions of which the program promises that no other process writes them. One test, because the
//! page faults and threads of others in the same process would hide what it is about.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use pagemark::address::offsets;
use pagemark::region::{Region, RegionOptions};
use pagemark::{Mechanism, PAGE_SIZE, PageNumber, RangeSet};
use pagemark_testing::assert_oracle;

const PAGES: usize = 300;
/// More than the longest distance of two probes, and their transactions.
const ENOUGH_FOR_A_PROBE: usize = 400;

fn is_hot(page: usize) -> bool {
    page % 3 == 1
}

/// A transaction that writes the hot pages, and what `also` writes. Returns what was written.
fn transaction(region: &Region, value: u8, also: impl FnOnce()) -> RangeSet {
    region.begin().unwrap();
    (0..PAGES).filter(|&page| is_hot(page)).for_each(|page| region.write(page * PAGE_SIZE, &[value]).unwrap());
    also();
    region.commit().unwrap()
}

/// A child that writes a byte to an address of this process for each byte that it reads, and
/// answers by a byte.
fn remote_writer(address: usize) -> (std::io::PipeWriter, std::io::PipeReader) {
    let (requests, request) = std::io::pipe().unwrap();
    let (reply, replies) = std::io::pipe().unwrap();
    let parent = std::process::id().cast_signed();
    // SAFETY: the child calls only functions that are safe in a signal handler.
    if unsafe { libc::fork() } == 0 {
        drop(request);
        let (requests, replies) = (OwnedFd::from(requests), OwnedFd::from(replies));
        let mut byte = 0u8;
        let own = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
        let other = libc::iovec { iov_base: address as *mut _, iov_len: 1 };
        // SAFETY: the buffers are one byte long; the child ends without its handlers.
        unsafe {
            while libc::read(requests.as_raw_fd(), (&raw mut byte).cast(), 1) == 1 {
                let written = libc::process_vm_writev(parent, &raw const own, 1, &raw const other, 1, 0);
                byte = u8::from(written == 1);
                libc::write(replies.as_raw_fd(), (&raw const byte).cast(), 1);
            }
            libc::_exit(0);
        }
    }
    (request, reply)
}

fn region(sole_use: bool) -> Result<Region, pagemark::Error> {
    let mechanism = Some(Mechanism::Adaptive);
    let options = RegionOptions { mechanism, sole_use, without_rollback: true, store: None };
    let region = Region::with_options(PAGES * PAGE_SIZE, options)?;
    region.write(0, &[1; PAGES * PAGE_SIZE])?;
    Ok(region)
}

/// Runs a part of the test in a child, which has one thread: the tests have two.
fn in_one_thread(part: fn()) {
    // SAFETY: the C library lets the child allocate and make threads; it ends without its handlers.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "{}", std::io::Error::last_os_error());
    if child == 0 {
        let failed = std::panic::catch_unwind(part).err().map(|failure| match failure.downcast::<String>() {
            Ok(text) => *text,
            Err(failure) => failure.downcast_ref::<&str>().map_or_else(String::new, |text| (*text).to_owned()),
        });
        let text = failed.as_ref().map_or_else(String::new, |text| format!("in one thread: {text}\n"));
        // SAFETY: the text is as long as is said; the call ends the child.
        unsafe {
            libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len());
            libc::_exit(i32::from(failed.is_some()));
        }
    }
    let mut status = 0;
    // SAFETY: the call waits for the child that was just made.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_oracle!(status == 0, "the part in one thread failed: status {status:#x}");
}

#[test]
fn only_writes_of_other_processes_are_found_late() {
    let promised = match region(true) {
        Ok(region) => region,
        Err(error) => return pagemark_testing::skipped(&error.to_string()),
    };
    own_writes_are_found_at_once(&promised);
    // A thread may be in a fault that is not counted yet, after which others write the page without
    // one.
    assert_oracle!(late_remote_writes(&promised) == 0, "a process with several threads looked at no page");
    drop(promised);
    in_one_thread(|| {
        let [promised, plain] = [true, false].map(|sole_use| region(sole_use).unwrap());
        own_writes_are_found_at_once(&promised);
        assert_eq!(late_remote_writes(&plain), 0, "without the promise, each is found at once");
        let late = late_remote_writes(&promised);
        assert!(late > 0, "each commit looked at the pages");
    });
}

fn own_writes_are_found_at_once(region: &Region) {
    let hot: RangeSet =
        (0..PAGES).filter(|&page| is_hot(page)).map(|page| PageNumber::from(page).addresses()).collect();
    let memory = std::fs::File::options().write(true).open("/proc/self/mem").unwrap();
    for round in 0..2000 {
        let page = round * 7 % PAGES;
        let offset = page * PAGE_SIZE + round % PAGE_SIZE;
        // SAFETY: the offset is within the region.
        let address = unsafe { region.as_ptr().add(offset) };
        let value = round as u8 | 1;
        let mut source = [value];
        let own = libc::iovec { iov_base: source.as_mut_ptr().cast(), iov_len: 1 };
        let other = libc::iovec { iov_base: address.cast(), iov_len: 1 };
        let is_written = round % 5 == 0 && !is_hot(page);
        let written = transaction(region, value, || match (is_written, round / 5 % 5) {
            (false, _) => {}
            (true, 0) => region.write(offset, &source).unwrap(),
            (true, 1) => std::thread::scope(|scope| {
                scope.spawn(|| region.write(offset, &source).unwrap());
            }),
            (true, 2) => {
                let (mut reader, mut writer) = std::io::pipe().unwrap();
                writer.write_all(&source).unwrap();
                // SAFETY: nothing else accesses the byte.
                reader.read_exact(unsafe { std::slice::from_raw_parts_mut(address, 1) }).unwrap();
            }
            (true, 3) => memory.write_all_at(&source, address as u64).unwrap(),
            (true, _) => {
                // SAFETY: both are one byte long.
                let count =
                    unsafe { libc::process_vm_writev(libc::getpid(), &raw const own, 1, &raw const other, 1, 0) };
                assert_eq!(count, 1, "{}", std::io::Error::last_os_error());
            }
        });
        if is_written {
            assert_oracle!(written.covers(offsets(offset..offset + 1)), "round {round}: a write was missed");
        }
        if round > 10 {
            assert_oracle!(hot.iter().all(|range| written.covers(range)), "round {round}: hot pages were missed");
        }
    }
}

/// How many of some writes of another process are not in the commit that follows. Each must be in
/// one of the next commits.
fn late_remote_writes(region: &Region) -> usize {
    const COLD: usize = 5 * PAGE_SIZE;
    assert!(!is_hot(5));
    // SAFETY: the offset is within the region.
    let (mut request, mut reply) = remote_writer(unsafe { region.as_ptr().add(COLD) } as usize);
    let mut late = 0;
    for round in 0..20 {
        (0..50).for_each(|_| _ = transaction(region, round, || ()));
        let mut answer = [0];
        let is_in = |written: &RangeSet| written.covers(offsets(COLD..COLD + 1));
        let written = transaction(region, round, || {
            request.write_all(&[round]).unwrap();
            reply.read_exact(&mut answer).unwrap();
        });
        if answer[0] == 0 {
            pagemark_testing::skipped("process_vm_writev is refused");
            return 0;
        }
        if !is_in(&written) {
            late += 1;
            let is_found = (0..ENOUGH_FOR_A_PROBE).any(|_| is_in(&transaction(region, round, || ())));
            assert_oracle!(is_found, "a write of another process was never found");
        }
    }
    late
}
