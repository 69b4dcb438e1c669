//! `/proc/PID/limits`: the resource limits of a process. Every user may read them, while the system
//! call `prlimit` needs CAP_SYS_RESOURCE for the processes of another user.

use std::io;

/// The names of the limits, by the numbers of `getrlimit`.
const NAMES: [&str; 16] = [
    "Max cpu time",
    "Max file size",
    "Max data size",
    "Max stack size",
    "Max core file size",
    "Max resident set",
    "Max processes",
    "Max open files",
    "Max locked memory",
    "Max address space",
    "Max file locks",
    "Max pending signals",
    "Max msgqueue size",
    "Max nice priority",
    "Max realtime priority",
    "Max realtime timeout",
];

/// A limit of a resource, in the unit of `getrlimit`; `u64::MAX` is no limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limit {
    /// The limit that holds, which the process may raise up to `hard`.
    pub soft: u64,
    /// The highest soft limit.
    pub hard: u64,
}

/// The resource limits of a process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits([Limit; NAMES.len()]);

impl Limits {
    /// Reads the limits of a process.
    ///
    /// # Errors
    /// `NotFound`, or ESRCH: there is no such process (any more).
    pub fn read(pid: i32) -> io::Result<Limits> {
        let text = super::read(pid, "limits")?;
        Limits::parse(&text).ok_or_else(|| super::garbled(super::path(pid, "limits")))
    }

    /// The limit of a resource, such as `RLIMIT_NOFILE`. None for a number that is unknown.
    pub fn get(&self, resource: u64) -> Option<Limit> {
        self.0.get(usize::try_from(resource).ok()?).copied()
    }

    /// Parses the content of a `limits` file.
    pub fn parse(text: &[u8]) -> Option<Limits> {
        let text = std::str::from_utf8(text).ok()?;
        let mut limits = [Limit { soft: 0, hard: 0 }; NAMES.len()];
        for (limit, name) in limits.iter_mut().zip(NAMES) {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
            let mut values = line.split_ascii_whitespace().map(|value| match value {
                "unlimited" => Some(u64::MAX),
                number => number.parse().ok(),
            });
            *limit = Limit { soft: values.next()??, hard: values.next()?? };
        }
        Some(Limits(limits))
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::resource::{Resource, getrlimit};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn limits_are_those_of_the_system_call() {
        let read = Limits::read(std::process::id() as i32).unwrap();
        for resource in [
            Resource::RLIMIT_CPU,
            Resource::RLIMIT_FSIZE,
            Resource::RLIMIT_DATA,
            Resource::RLIMIT_STACK,
            Resource::RLIMIT_CORE,
            Resource::RLIMIT_RSS,
            Resource::RLIMIT_NPROC,
            Resource::RLIMIT_NOFILE,
            Resource::RLIMIT_MEMLOCK,
            Resource::RLIMIT_AS,
            Resource::RLIMIT_LOCKS,
            Resource::RLIMIT_SIGPENDING,
            Resource::RLIMIT_MSGQUEUE,
            Resource::RLIMIT_NICE,
            Resource::RLIMIT_RTPRIO,
            Resource::RLIMIT_RTTIME,
        ] {
            let (soft, hard) = getrlimit(resource).unwrap();
            assert_eq!(read.get(resource as u64), Some(Limit { soft, hard }), "{resource:?}");
        }
        assert_eq!((read.get(16), read.get(u64::MAX)), (None, None));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Limits::parse(&text);
        }
    }
}
