//! Processor time, page faults and memory of this process, as the kernel accounts for them.

use std::io;
use std::time::Duration;

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;
use nix::time::{ClockId, clock_gettime};
use pagemark_linux::proc::{self, Fields};

use crate::BenchError;

/// Processor time of this thread since it began, nanoseconds.
pub(crate) fn thread_cpu_ns() -> Result<f64, BenchError> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map_err(|error| BenchError::on("read the processor time of this thread")(error.into()))?;
    Ok(time.tv_sec() as f64 * 1e9 + time.tv_nsec() as f64)
}

/// How long this thread was ready to run and had no processor, since it began, nanoseconds.
pub(crate) fn thread_wait_ns() -> Result<f64, BenchError> {
    read_number("/proc/thread-self/schedstat", |text| number_at(text, 1))
}

fn number_at(text: &[u8], place: usize) -> Option<u64> {
    std::str::from_utf8(text).ok()?.split_ascii_whitespace().nth(place)?.parse().ok()
}

/// A number in a file of `/proc`.
fn read_number(path: &str, find: impl FnOnce(&[u8]) -> Option<u64>) -> Result<f64, BenchError> {
    let failed = || BenchError::on(format!("read {path}"));
    let number = find(&std::fs::read(path).map_err(failed())?);
    number.map(|number| number as f64).ok_or_else(|| failed()(io::ErrorKind::InvalidData.into()))
}

/// Processor time and page faults of a thread.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct ThreadUsage {
    /// Processor time, nanoseconds.
    pub cpu_ns: f64,
    /// Page faults that read nothing from a device.
    pub faults: f64,
}

impl ThreadUsage {
    /// Of the main thread of a process, since it began.
    pub fn of_main_thread(pid: i32) -> Result<ThreadUsage, BenchError> {
        /// The faults that read nothing from a device, in `stat`.
        const FAULTS: usize = 10;
        let directory = format!("/proc/{pid}/task/{pid}");
        Ok(ThreadUsage {
            cpu_ns: read_number(&format!("{directory}/schedstat"), |text| number_at(text, 0))?,
            faults: read_number(&format!("{directory}/stat"), |text| proc::stat::number(text, FAULTS))?,
        })
    }

    /// What was used between `begin` and this.
    pub fn since(self, begin: ThreadUsage) -> ThreadUsage {
        ThreadUsage { cpu_ns: self.cpu_ns - begin.cpu_ns, faults: self.faults - begin.faults }
    }

    /// Of this thread, since it began.
    pub fn now() -> Result<ThreadUsage, BenchError> {
        let faults = thread_faults()?;
        // The clock is read last, so that the time of reading the faults is not measured.
        Ok(ThreadUsage { cpu_ns: thread_cpu_ns()?, faults })
    }

    /// Of this thread, since `self` was read.
    pub fn elapsed(self) -> Result<ThreadUsage, BenchError> {
        let cpu_ns = thread_cpu_ns()?;
        Ok(ThreadUsage { cpu_ns: cpu_ns - self.cpu_ns, faults: thread_faults()? - self.faults })
    }
}

pub(crate) fn thread_faults() -> Result<f64, BenchError> {
    let usage =
        getrusage(UsageWho::RUSAGE_THREAD).map_err(|error| BenchError::on("count page faults")(error.into()))?;
    Ok(usage.minor_page_faults() as f64)
}

/// Processor time of this process in user mode and in the kernel.
pub(crate) fn process_cpu_time() -> Result<[Duration; 2], BenchError> {
    cpu_time(UsageWho::RUSAGE_SELF)
}

/// Processor time of this process, and of those of its children and their descendants that have
/// ended and were waited for.
pub(crate) fn processor_time() -> Result<Duration, BenchError> {
    let times = [cpu_time(UsageWho::RUSAGE_SELF)?, cpu_time(UsageWho::RUSAGE_CHILDREN)?];
    Ok(times.iter().flatten().sum())
}

fn cpu_time(who: UsageWho) -> Result<[Duration; 2], BenchError> {
    let usage =
        getrusage(who).map_err(|error| BenchError::on("read the processor time of this process")(error.into()))?;
    let duration = |time: TimeVal| Duration::new(time.tv_sec() as u64, time.tv_usec() as u32 * 1000);
    Ok([usage.user_time(), usage.system_time()].map(duration))
}

/// An amount of memory of this process, bytes: a field of `/proc/self/ENTRY`.
pub(crate) fn own_memory_bytes(entry: &str, field: &str) -> Result<u64, BenchError> {
    let path = proc::own_path(entry);
    let bytes = Fields::read(&path).and_then(|fields| {
        let missing = || io::Error::new(io::ErrorKind::InvalidData, format!("it has no {field}"));
        fields.bytes(field).ok_or_else(missing)
    });
    bytes.map_err(BenchError::on(format!("read {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ldt::page_buffer::PageBuffer;

    #[test]
    fn a_fault_is_counted_once() {
        let _alone = crate::ldt::alone();
        let buffer = PageBuffer::unpopulated(64).unwrap();
        buffer.write(0, 1);
        let before = ThreadUsage::now().unwrap();
        (1..64).for_each(|page| buffer.write(page, 1));
        let used = before.elapsed().unwrap();
        assert_eq!(used.faults, 63.0);
        assert!(used.cpu_ns > 0.0);
    }

    #[test]
    fn the_processor_time_of_a_child_counts_once_it_has_ended() {
        let _alone = crate::ldt::alone();
        let before = processor_time().unwrap();
        // It counts up to a number, whatever time that takes.
        let count = "i=0; while [ $i -lt 20000 ]; do i=$((i+1)); done; cat /proc/self/stat > /dev/null";
        assert!(std::process::Command::new("sh").args(["-c", count]).status().unwrap().success());
        assert!(processor_time().unwrap() > before);
    }

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let resident_bytes = own_memory_bytes("status", "VmRSS").unwrap();
        assert!(resident_bytes > 4096 && resident_bytes <= own_memory_bytes("status", "VmHWM").unwrap());
        let error = own_memory_bytes("status", "VmR").unwrap_err().to_string();
        assert!(error.contains("/proc/self/status") && error.contains("VmR"), "{error}");
    }
}
