//! Whether protected pages may have been written, without a look at them.
//!
//! In asynchronous mode, the first write to a page that userfaultfd protects is a page fault of the
//! thread that writes, also within a system call. If the process had none, its threads wrote to no
//! protected page. Writes of other processes (of debuggers, by `process_vm_writev`) are faults of
//! theirs, which this process cannot count.
//!
//! The kernel makes the page writable first, and counts the fault a moment later. In between,
//! another thread can write the page without a fault. Nothing is concluded from the count of a
//! process that has several threads.

use std::io;
use std::sync::{Arc, OnceLock};

use pagemark_linux::at_fork::made_once;
use pagemark_linux::own_memory::Mapping;
use pagemark_linux::page_faults;
use pagemark_linux::per_process::PerProcess;
use pagemark_linux::room;
use pagemark_linux::thread_count::ThreadCount;
use pagemark_linux::userfaultfd::Userfaultfd;

use crate::PAGE_SIZE;

/// The page faults that were seen at the last look at the pages.
#[derive(Debug)]
pub(super) struct FaultWatch {
    seen: Option<u64>,
    threads: Arc<ThreadCount>,
}

impl FaultWatch {
    /// `None` where the kernel does not count the faults of protected pages, or `/proc` does not
    /// show the threads.
    pub fn new() -> Option<FaultWatch> {
        static ARE_COUNTED: OnceLock<bool> = OnceLock::new();
        let are_counted = ARE_COUNTED.get().copied().unwrap_or_else(|| match are_counted() {
            // Another region may be luckier.
            Err(error) if room::is_passing(&error) => false,
            tried => *made_once(&ARE_COUNTED, || tried.unwrap_or(false)),
        });
        static THREADS: PerProcess<ThreadCount> = PerProcess::new();
        let threads = are_counted.then(|| THREADS.get(ThreadCount::of_this_process).ok())??;
        Some(FaultWatch { seen: None, threads })
    }

    /// The faults until now, for [`FaultWatch::is_quiet`] and [`FaultWatch::record`]. `None` while
    /// the process has several threads.
    pub fn now(&self) -> Option<u64> {
        // In this order: the faults of a thread that has just ended are counted.
        self.threads.is_one().then(page_faults::of_this_process)
    }

    /// True if there were no faults from the last recorded look until `now`.
    pub fn is_quiet(&self, now: u64) -> bool {
        self.seen == Some(now)
    }

    /// Records a look at the pages, after which those are protected that count as not written.
    /// `before` are the faults until the look began.
    pub fn record(&mut self, before: u64) {
        self.seen = Some(before);
    }

    /// Pages were unprotected, so that writes to them are no faults.
    pub fn forget(&mut self) {
        self.seen = None;
    }
}

/// Tries whether the write to a protected page is counted as a fault.
fn are_counted() -> io::Result<bool> {
    let page = Mapping::new(PAGE_SIZE)?;
    let userfaultfd = Userfaultfd::of_this_process()?;
    userfaultfd.register(&page.range())?;
    // SAFETY: the page is mapped, and only this function accesses it.
    let write = |value| unsafe { page.start().as_ptr().write_volatile(value) };
    write(1);
    userfaultfd.write_protect(&page.range(), true)?;
    let before = page_faults::of_this_thread();
    write(2);
    Ok(page_faults::of_this_thread() > before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_is_quiet_until_it_is_forgotten() {
        let Some(mut watch) = FaultWatch::new() else { return };
        assert_eq!(watch.now(), None, "the thread of the tests is there, too");
        let now = page_faults::of_this_process();
        assert!(!watch.is_quiet(now));
        watch.record(now);
        assert!(watch.is_quiet(now) && !watch.is_quiet(now + 1));
        watch.forget();
        assert!(!watch.is_quiet(now));
    }
}
