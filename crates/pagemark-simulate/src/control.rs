//! What the plugin shares with the process that controls QEMU: a file of two numbers.
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

/// How often the waiting processor looks whether it may continue.
const WAIT_POLL: Duration = Duration::from_micros(200);

/// The content of the file.
#[repr(C)]
struct Shared {
    /// Instructions that the processor has begun. One that a fault interrupts is begun again.
    count: AtomicU64,
    /// The processor waits before the instruction with this number.
    stop_at: AtomicU64,
}

const SHARED_BYTES: usize = size_of::<Shared>();
const STOP_AT_OFFSET: u64 = 8;

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
    /// long as it is to stop there.
    pub(crate) fn begin_instruction(self) {
        let count = self.shared.count.load(Ordering::Relaxed);
        while count >= self.shared.stop_at.load(Ordering::Acquire) {
            std::thread::sleep(WAIT_POLL);
        }
        self.shared.count.store(count + 1, Ordering::Release);
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
        Ok(Control { file })
    }

    /// Instructions that the processor has begun.
    ///
    /// # Errors
    /// Those of reading a file.
    pub fn count(&self) -> io::Result<u64> {
        let mut count = [0; 8];
        self.file.read_exact_at(&mut count, 0)?;
        Ok(u64::from_ne_bytes(count))
    }

    /// Lets the processor run until it has begun `count` instructions since the plugin was loaded.
    ///
    /// # Errors
    /// Those of writing a file.
    pub fn stop_at(&self, count: u64) -> io::Result<()> {
        self.file.write_all_at(&count.to_ne_bytes(), STOP_AT_OFFSET)
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
        let processor = std::thread::spawn(move || (0..50).for_each(|_| counter.begin_instruction()));
        for stop in [0, 1, 20, 49] {
            control.stop_at(stop).unwrap();
            while control.count().unwrap() < stop {
                std::thread::yield_now();
            }
            std::thread::sleep(WAIT_POLL * 4);
            assert_eq!(control.count().unwrap(), stop);
        }
        control.stop_at(u64::MAX).unwrap();
        processor.join().unwrap();
        assert_eq!(control.count().unwrap(), 50);
    }

    #[test]
    fn a_file_that_is_too_short_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(Counter::map(file.path()).is_err());
    }
}
