//! How often page-modification logs were full (PML, section 3.1). KVM has no count of it, but a
//! tracepoint, which the kernel counts for each thread of a process that has a machine.

use std::path::{Path, PathBuf};

use perf_event::events::Tracepoint;
use perf_event::{Builder, Counter};
use serde::Serialize;

/// Where the kernel describes its tracepoints.
const TRACING: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];

/// The tracepoint.
const FULL_LOG: &str = "kvm/kvm_pml_full";

/// Counters of a tracepoint in the threads of a process.
pub(crate) struct FullLogs(Vec<Counter>);

/// Why there are no counts.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct NotCounted(String);

impl std::fmt::Display for NotCounted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl FullLogs {
    /// Counts from now on, in all threads that the process has.
    pub(crate) fn of(pid: i32) -> Result<FullLogs, NotCounted> {
        FullLogs::of_tracepoint(pid, FULL_LOG)
    }

    fn of_tracepoint(pid: i32, name: &str) -> Result<FullLogs, NotCounted> {
        let described = TRACING.iter().map(|root| Path::new(root).join("events")).find(|events| events.exists());
        let Some(events) = described else {
            let reason = "tracing is not mounted: mount -t tracefs tracefs /sys/kernel/tracing, as root";
            return Err(NotCounted(reason.to_owned()));
        };
        let file: PathBuf = events.join(name).join("id");
        let failed = |error: std::io::Error| NotCounted(format!("{}: {error}", file.display()));
        let id = std::fs::read_to_string(&file).map_err(failed)?;
        let id = id.trim().parse().map_err(|_| NotCounted(format!("{}: no number", file.display())))?;
        let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
        let threads = threads.map_err(|error| NotCounted(format!("the threads of process {pid}: {error}")))?;
        let numbers = threads.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let counters = numbers.map(|thread: i32| {
            let mut builder = Builder::new(Tracepoint::with_id(id));
            // The tracepoint is in the kernel.
            let counter = builder.observe_pid(thread).any_cpu().exclude_kernel(false).build();
            counter.and_then(|mut counter| counter.enable().map(|()| counter)).map_err(|error| {
                NotCounted(format!(
                    "the kernel does not count {name}: {error}; kernel.perf_event_paranoid may forbid it"
                ))
            })
        });
        counters.collect::<Result<Vec<Counter>, NotCounted>>().map(FullLogs)
    }

    /// How often since the begin.
    pub(crate) fn count(&mut self) -> Option<u64> {
        self.0.iter_mut().map(|counter| counter.read().ok()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tracepoint_is_counted_or_the_reason_is_given() {
        // Each sleep leaves the processor.
        let mut counted = match FullLogs::of_tracepoint(std::process::id() as i32, "sched/sched_switch") {
            Ok(counted) => counted,
            Err(reason) => return assert!(!reason.to_string().is_empty()),
        };
        let before = counted.count().expect("a count");
        // The counters are those of the threads that there were, of which this is one.
        (0..5).for_each(|_| std::thread::sleep(std::time::Duration::from_millis(1)));
        assert!(counted.count().expect("a count") >= before + 5);
    }

    #[test]
    fn a_tracepoint_that_is_not_there_is_named() {
        let Err(reason) = FullLogs::of_tracepoint(std::process::id() as i32, "kvm/no_such_tracepoint") else {
            panic!("there is no such tracepoint")
        };
        let reason = reason.to_string();
        assert!(reason.contains("no_such_tracepoint") || reason.contains("tracefs"), "{reason}");
    }
}
