//! What the plugin shares with the process that controls QEMU: a file of numbers.
//!
//! The plugin maps the file. The other process reads and writes it, so that a QEMU that is killed
//! leaves nothing behind.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::observation::Limits;

/// How often the waiting processor looks whether it may continue.
const WAIT_POLL: Duration = Duration::from_micros(200);

/// The content of the file.
#[repr(C)]
struct Shared {
    /// Instructions that the processor has begun. One that a fault interrupts is begun again.
    count: AtomicU64,
    /// The processor waits before the instruction with this number.
    stop_at: AtomicU64,
    /// The number of the simulator's first error, as the kernel counts them; 0 while there is none.
    error: AtomicU64,
    /// The limits of the interval ([`Limits`]).
    begin_at: AtomicU64,
    end_at: AtomicU64,
    hold_at: AtomicU64,
    /// 1 while the processor waits, otherwise 0.
    waits: AtomicU64,
}

const SHARED_BYTES: usize = size_of::<Shared>();
const STOP_AT_OFFSET: u64 = 8;
const ERROR_OFFSET: u64 = 16;
const BEGIN_AT_OFFSET: u64 = 24;
const END_AT_OFFSET: u64 = 32;
const HOLD_AT_OFFSET: u64 = 40;
const WAITS_OFFSET: u64 = 48;

/// The number of no instruction.
const NEVER: u64 = u64::MAX;

/// The plugin's side.
#[derive(Clone, Copy)]
pub(crate) struct Counter {
    shared: &'static Shared,
}

impl Counter {
    /// Maps the file at `path`, for the rest of the process's life.
    pub(crate) fn map(path: &Path) -> io::Result<Counter> {
        let file = File::options().read(true).write(true).open(path)?;
        if file.metadata()?.len() < SHARED_BYTES as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // SAFETY: a new mapping, at an address that the kernel chooses.
        let address = unsafe {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), SHARED_BYTES, protection, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if address == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the mapping is aligned to a page, as long as `Shared`, is never unmapped, and is valid with
        // any content.
        Ok(Counter { shared: unsafe { &*address.cast::<Shared>() } })
    }

    /// Counts an instruction, which the one processor of the machine is about to begin. Waits as
    /// long as it is to stop there. Returns its number.
    pub(crate) fn begin_instruction(self) -> u64 {
        let count = self.wait();
        self.shared.count.store(count + 1, Ordering::Release);
        count
    }

    /// Waits as long as the machine is to stop before the next instruction. Returns the number of
    /// that.
    pub(crate) fn wait(self) -> u64 {
        let count = self.shared.count.load(Ordering::Relaxed);
        if count >= self.shared.stop_at.load(Ordering::Acquire) {
            self.shared.waits.store(1, Ordering::Release);
            while count >= self.shared.stop_at.load(Ordering::Acquire) {
                std::thread::sleep(WAIT_POLL);
            }
            self.shared.waits.store(0, Ordering::Release);
        }
        count
    }

    /// True if the machine is to stop before the next instruction.
    pub(crate) fn is_stopping(self) -> bool {
        self.shared.count.load(Ordering::Relaxed) >= self.shared.stop_at.load(Ordering::Acquire)
    }

    /// Which instructions are the interval's, as far as that is known. Those that are written
    /// before [`Control::stop_at`] are seen by the instructions that it lets begin.
    pub(crate) fn limits(self) -> Limits {
        Limits {
            begin_at: self.shared.begin_at.load(Ordering::Relaxed),
            end_at: self.shared.end_at.load(Ordering::Relaxed),
            hold_at: self.shared.hold_at.load(Ordering::Relaxed),
        }
    }

    /// The simulator has failed.
    pub(crate) fn fail(self, error: &io::Error) {
        let number = error.raw_os_error().filter(|&number| number > 0).unwrap_or(libc::EIO);
        let _ = self.shared.error.compare_exchange(0, number as u64, Ordering::Release, Ordering::Relaxed);
    }
}

/// The side of the process that controls QEMU.
#[derive(Debug)]
pub struct Control {
    file: File,
}

impl Control {
    /// Prepares an empty file. The processor waits before its first instruction.
    ///
    /// # Errors
    /// Those of writing a file.
    pub fn of(file: File) -> io::Result<Control> {
        file.write_all_at(&[0; SHARED_BYTES], 0)?;
        let control = Control { file };
        control.write(END_AT_OFFSET, NEVER)?;
        control.write(HOLD_AT_OFFSET, NEVER)?;
        Ok(control)
    }

    /// Instructions that the processor has begun.
    ///
    /// # Errors
    /// Those of reading a file.
    pub fn count(&self) -> io::Result<u64> {
        self.read(0)
    }

    /// True if the processor waits before an instruction.
    ///
    /// # Errors
    /// Those of reading a file.
    pub fn waits(&self) -> io::Result<bool> {
        Ok(self.read(WAITS_OFFSET)? != 0)
    }

    /// The first error of the simulator, whose results are of no use then.
    ///
    /// # Errors
    /// Those of reading a file.
    pub fn failure(&self) -> io::Result<Option<io::Error>> {
        let number = self.read(ERROR_OFFSET)?;
        Ok((number != 0).then(|| io::Error::from_raw_os_error(i32::try_from(number).unwrap_or(libc::EIO))))
    }

    /// Has the interval begin with the instruction of this number, or not yet. Without a call it
    /// begins with the first.
    ///
    /// # Errors
    /// Those of writing a file.
    pub fn begin_at(&self, count: Option<u64>) -> io::Result<()> {
        self.write(BEGIN_AT_OFFSET, count.unwrap_or(NEVER))
    }

    /// Has the interval end before the instruction of this number.
    ///
    /// # Errors
    /// Those of writing a file.
    pub fn end_at(&self, count: u64) -> io::Result<()> {
        self.write(END_AT_OFFSET, count)
    }

    /// Holds what is observed from the instruction of this number on, until the limits of the
    /// interval are known. With None it is held no more.
    ///
    /// # Errors
    /// Those of writing a file.
    pub fn hold_at(&self, count: Option<u64>) -> io::Result<()> {
        self.write(HOLD_AT_OFFSET, count.unwrap_or(NEVER))
    }

    fn write(&self, offset: u64, number: u64) -> io::Result<()> {
        self.file.write_all_at(&number.to_ne_bytes(), offset)
    }

    fn read(&self, offset: u64) -> io::Result<u64> {
        let mut number = [0; 8];
        self.file.read_exact_at(&mut number, offset)?;
        Ok(u64::from_ne_bytes(number))
    }

    /// Lets the processor run until it has begun `count` instructions since the plugin was loaded.
    ///
    /// # Errors
    /// Those of writing a file.
    pub fn stop_at(&self, count: u64) -> io::Result<()> {
        self.write(STOP_AT_OFFSET, count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_stops_where_the_other_process_says() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let control = Control::of(file.reopen().unwrap()).unwrap();
        let counter = Counter::map(file.path()).unwrap();
        let processor = std::thread::spawn(move || (0..50).for_each(|at| assert_eq!(counter.begin_instruction(), at)));
        for stop in [0, 1, 20, 49] {
            control.stop_at(stop).unwrap();
            while control.count().unwrap() < stop || !control.waits().unwrap() {
                std::thread::yield_now();
            }
            std::thread::sleep(WAIT_POLL * 4);
            assert_eq!(control.count().unwrap(), stop);
        }
        control.stop_at(u64::MAX).unwrap();
        processor.join().unwrap();
        assert_eq!(counter.wait(), 50, "it begins nothing");
        assert!(!control.waits().unwrap());
        assert_eq!(control.count().unwrap(), 50);
        assert_eq!(counter.limits(), Limits { begin_at: 0, end_at: NEVER, hold_at: NEVER });
        control.begin_at(Some(1)).and_then(|()| control.end_at(2)).and_then(|()| control.hold_at(Some(3))).unwrap();
        assert_eq!(counter.limits(), Limits { begin_at: 1, end_at: 2, hold_at: 3 });
        control.begin_at(None).and_then(|()| control.hold_at(None)).unwrap();
        assert_eq!(counter.limits(), Limits { begin_at: NEVER, end_at: 2, hold_at: NEVER });
        assert!(control.failure().unwrap().is_none());
        counter.fail(&io::Error::from_raw_os_error(libc::ENOSPC));
        counter.fail(&io::ErrorKind::InvalidData.into());
        assert_eq!(control.failure().unwrap().unwrap().raw_os_error(), Some(libc::ENOSPC), "the first");
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(Counter::map(file.path()).is_err());
    }
}
