//! How many threads this process has.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use super::proc;

/// Links of the directory of the threads of a process that has one: its own two, and one a thread.
const LINKS_OF_ONE: u64 = 3;

/// Asks for the threads of this process. A child made by `fork` has no use for it: the open
/// directory stays that of the parent.
#[derive(Debug)]
pub struct ThreadCount {
    directory: File,
}

impl ThreadCount {
    /// Opens the directory of the threads.
    ///
    /// # Errors
    /// `/proc` is not mounted; `EMFILE`.
    pub fn of_this_process() -> io::Result<ThreadCount> {
        Ok(ThreadCount { directory: File::open(proc::own_path("task"))? })
    }

    /// True if the calling thread is the only one, those that the kernel runs for the process
    /// (io_uring) among them. A thread that is no longer there has left nothing undone.
    pub fn is_one(&self) -> bool {
        self.directory.metadata().is_ok_and(|directory| directory.nlink() == LINKS_OF_ONE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_thread_is_seen_while_it_is_there() {
        // In a child, because the tests have threads.
        // SAFETY: the child of a C library that lets it allocate, which exits without its handlers.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let count = ThreadCount::of_this_process().unwrap();
            let before = count.is_one();
            let beside = std::thread::scope(|scope| {
                let (sender, receiver) = std::sync::mpsc::channel::<()>();
                scope.spawn(move || receiver.recv());
                let beside = count.is_one();
                drop(sender);
                beside
            });
            // A thread may be joined a moment before the kernel has ended it.
            while !count.is_one() {}
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!before || beside)) };
        }
        let mut status = 0;
        // SAFETY: waits for the child that was just made.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
        // This process has the thread of the tests, too.
        assert!(!ThreadCount::of_this_process().unwrap().is_one());
    }
}
