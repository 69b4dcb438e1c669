//! What the kernel's schedulers know of a thread beside its policy: on which processors it may run,
//! the priority of its input and output, its slice, and how late its timers may be.
//!
//! All of it can be read, and changed, from outside of the thread.

use std::fmt;
use std::io;
use std::str::FromStr;

use nix::errno::Errno;

use crate::proc;

/// A set of processors, by their numbers. Its text is a list of ranges, as the kernel writes it.
///
/// ```
/// use pagemark_linux::scheduling::Processors;
///
/// let processors: Processors = "0-2,5".parse().unwrap();
/// assert_eq!(processors.numbers().collect::<Vec<_>>(), [0, 1, 2, 5]);
/// assert_eq!(processors.to_string(), "0-2,5");
/// ```
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Processors {
    /// A bit for each processor, the lowest of the first word for processor 0. The last word, if
    /// there is one, is not 0.
    words: Vec<u64>,
}

/// The text is no list of processors.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NoProcessors;

impl Processors {
    /// One more than the greatest number of a processor that a list may have. Linux has at most
    /// 8,192.
    const LIMIT: u32 = 1 << 16;

    fn from_words(mut words: Vec<u64>) -> Processors {
        while words.last() == Some(&0) {
            words.pop();
        }
        Processors { words }
    }

    /// The numbers of its processors, ascending.
    pub fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        let of_word = |(index, word): (usize, &u64)| {
            let word = *word;
            (0..u64::BITS).filter(move |bit| word >> bit & 1 == 1).map(move |bit| index as u32 * u64::BITS + bit)
        };
        self.words.iter().enumerate().flat_map(of_word)
    }

    /// True if it has no processor.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// The processors that both have.
    pub fn intersection(&self, other: &Processors) -> Processors {
        Processors::from_words(self.words.iter().zip(&other.words).map(|(a, b)| a & b).collect())
    }

    /// True if it has all processors of the other.
    pub fn contains(&self, other: &Processors) -> bool {
        self.intersection(other) == *other
    }

    /// The processors that are in use.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn online() -> io::Result<Processors> {
        let text = std::fs::read_to_string("/sys/devices/system/cpu/online")?;
        text.trim().parse().map_err(|NoProcessors| io::ErrorKind::InvalidData.into())
    }
}

impl fmt::Display for Processors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut numbers = self.numbers().peekable();
        let mut separator = "";
        while let Some(first) = numbers.next() {
            let mut last = first;
            while let Some(next) = numbers.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{separator}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

impl FromStr for Processors {
    type Err = NoProcessors;

    fn from_str(text: &str) -> Result<Processors, NoProcessors> {
        let number = |text: &str| -> Result<u32, NoProcessors> {
            text.parse().ok().filter(|number| *number < Processors::LIMIT).ok_or(NoProcessors)
        };
        let mut words = Vec::new();
        for range in text.split(',').filter(|_| !text.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            for processor in number(first)?..=number(last)? {
                let (word, bit) = ((processor / u64::BITS) as usize, processor % u64::BITS);
                if words.len() <= word {
                    words.resize(word + 1, 0);
                }
                words[word] |= 1 << bit;
            }
        }
        Ok(Processors::from_words(words))
    }
}

/// The processors on which a thread may run; 0 for the calling thread.
///
/// # Errors
/// `ESRCH`: there is no such thread.
pub fn processors(thread: i32) -> io::Result<Processors> {
    let mut words = vec![0_u64; 16];
    loop {
        let size = size_of_val(&words[..]);
        // SAFETY: the kernel writes at most `size` bytes, which the buffer has.
        let written = unsafe { libc::syscall(libc::SYS_sched_getaffinity, thread, size, words.as_mut_ptr()) };
        match Errno::result(written) {
            Ok(written) => {
                words.truncate((written as usize).div_ceil(size_of::<u64>()));
                return Ok(Processors::from_words(words));
            }
            // The kernel was built for more processors.
            Err(Errno::EINVAL) if words.len() * u64::BITS as usize <= Processors::LIMIT as usize => {
                words.resize(words.len() * 2, 0);
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Lets a thread run on these processors alone. The kernel leaves out those that the thread's
/// control group does not have.
///
/// # Errors
/// `EINVAL`: none is left. `EPERM`, `ESRCH`.
pub fn set_processors(thread: i32, processors: &Processors) -> io::Result<()> {
    let (words, size) = (&processors.words, size_of_val(&processors.words[..]));
    // SAFETY: the kernel reads `size` bytes, which the buffer has.
    let done = unsafe { libc::syscall(libc::SYS_sched_setaffinity, thread, size, words.as_ptr()) };
    Errno::result(done).map(drop).map_err(Into::into)
}

/// What a thread has of its scheduler: `struct sched_attr`, as far as all kernels have it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Attributes {
    bytes: u32,
    policy: u32,
    flags: u64,
    nice: i32,
    priority: u32,
    runtime_ns: u64,
    deadline_ns: u64,
    period_ns: u64,
}

/// Policies under which a thread may ask for a slice: the usual one, and that of batch work.
const FAIR_POLICIES: [u32; 2] = [libc::SCHED_OTHER as u32, libc::SCHED_BATCH as u32];

fn attributes(thread: i32) -> io::Result<Attributes> {
    let mut attributes = Attributes::default();
    let bytes = size_of::<Attributes>();
    // SAFETY: the kernel writes at most `bytes` bytes, which the structure has.
    let done = unsafe { libc::syscall(libc::SYS_sched_getattr, thread, &raw mut attributes, bytes, 0) };
    Errno::result(done)?;
    Ok(attributes)
}

/// For how long a thread runs before another one may, nanoseconds: what it has asked for, or the
/// kernel's own value. None if its policy has no slice, or before Linux 6.12.
///
/// # Errors
/// `ESRCH`: there is no such thread.
pub fn slice_ns(thread: i32) -> io::Result<Option<u64>> {
    let found = attributes(thread)?;
    Ok(Some(found.runtime_ns).filter(|&slice_ns| slice_ns != 0 && FAIR_POLICIES.contains(&found.policy)))
}

/// Has a thread ask for a slice, or with 0 for none; its policy and its niceness stay as they are.
///
/// # Errors
/// `EINVAL`: its policy has none. `EPERM`, `ESRCH`.
pub fn set_slice_ns(thread: i32, slice_ns: u64) -> io::Result<()> {
    let before = attributes(thread)?;
    if !FAIR_POLICIES.contains(&before.policy) {
        return Err(Errno::EINVAL.into());
    }
    let wanted = Attributes { bytes: size_of::<Attributes>() as u32, runtime_ns: slice_ns, ..before };
    // SAFETY: the kernel reads as many bytes as the structure says, which it has.
    let done = unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const wanted, 0) };
    Errno::result(done).map(drop).map_err(Into::into)
}

/// The priority of a thread's input and output: a class, and a level in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct IoPriority(pub u16);

impl IoPriority {
    /// Where the number has the class.
    const CLASS_SHIFT: u32 = 13;
    /// The class that goes before all others.
    const REAL_TIME: u16 = 1;
    const NAMES: [&str; 4] = ["none", "real-time", "best-effort", "idle"];

    const WHO_PROCESS: i32 = 1;

    /// That of a thread; 0 for the calling thread. None if it has none of its own, but that which
    /// its niceness gives.
    ///
    /// # Errors
    /// `ESRCH`: there is no such thread. `ENOSYS`: the kernel was built without.
    pub fn of_thread(thread: i32) -> io::Result<Option<IoPriority>> {
        // SAFETY: a system call with numbers as arguments.
        let number = unsafe { libc::syscall(libc::SYS_ioprio_get, IoPriority::WHO_PROCESS, thread) };
        let priority = IoPriority(Errno::result(number)? as u16);
        Ok((priority.class() != 0).then_some(priority))
    }

    /// Gives it to a thread.
    ///
    /// # Errors
    /// `EPERM`: the class is [real-time](IoPriority::is_real_time), and this process is not
    /// privileged, or the thread is another user's. `ESRCH`. `EINVAL`: the kernel does not know it.
    pub fn give(self, thread: i32) -> io::Result<()> {
        let number = i32::from(self.0);
        // SAFETY: a system call with numbers as arguments.
        let done = unsafe { libc::syscall(libc::SYS_ioprio_set, IoPriority::WHO_PROCESS, thread, number) };
        Errno::result(done).map(drop).map_err(Into::into)
    }

    fn class(self) -> u16 {
        self.0 >> IoPriority::CLASS_SHIFT
    }

    /// True if only a privileged process may give it.
    pub fn is_real_time(self) -> bool {
        self.class() == IoPriority::REAL_TIME
    }
}

impl fmt::Display for IoPriority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = self.0 & ((1 << IoPriority::CLASS_SHIFT) - 1);
        let class = IoPriority::NAMES.get(usize::from(self.class())).unwrap_or(&"unknown");
        write!(f, "{class} {level}")
    }
}

/// How late the timers of a thread may be, in nanoseconds. None if the kernel does not say, which
/// it does to a process with CAP_SYS_NICE, and of its own thread.
pub fn timer_slack_ns(thread: i32) -> Option<u64> {
    let text = proc::read(thread, "timerslack_ns").ok()?;
    std::str::from_utf8(&text).ok()?.trim().parse().ok()
}

/// Sets how late the timers of a thread may be.
///
/// # Errors
/// This process lacks CAP_SYS_NICE, or there is no such thread.
pub fn set_timer_slack_ns(thread: i32, slack_ns: u64) -> io::Result<()> {
    std::fs::write(proc::path(thread, "timerslack_ns"), slack_ns.to_string())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_text_is_parsed_or_refused(text in "[0-9,\\-]{0,20}|.{0,10}") {
            if let Ok(processors) = text.parse::<Processors>() {
                prop_assert_eq!(processors.to_string().parse(), Ok(processors));
            }
        }

        #[test]
        fn sets_behave_as_sets(a in prop::collection::btree_set(0_u32..200, 0..40),
                               b in prop::collection::btree_set(0_u32..200, 0..40)) {
            let of = |numbers: &std::collections::BTreeSet<u32>| -> Processors {
                numbers.iter().map(u32::to_string).collect::<Vec<_>>().join(",").parse().unwrap()
            };
            let both: Vec<u32> = a.intersection(&b).copied().collect();
            prop_assert_eq!(of(&a).intersection(&of(&b)).numbers().collect::<Vec<_>>(), both);
            prop_assert_eq!(of(&a).contains(&of(&b)), a.is_superset(&b));
            prop_assert_eq!(of(&a).is_empty(), a.is_empty());
            prop_assert_eq!(of(&a).to_string().parse(), Ok(of(&a)));
        }
    }

    #[test]
    fn what_is_no_list_is_refused() {
        for text in ["-", "1-", "a", "1,,2", "65536", "0-99999999999"] {
            assert_eq!(text.parse::<Processors>(), Err(NoProcessors), "{text}");
        }
        // A range that ends before it begins has none.
        assert_eq!("3-1".parse(), Ok(Processors::default()));
    }

    /// Runs this in a thread of its own, whose settings end with it.
    fn in_thread(test: impl FnOnce(i32) + Send + 'static) {
        std::thread::spawn(|| test(nix::unistd::gettid().as_raw())).join().unwrap();
    }

    #[test]
    fn a_thread_runs_where_it_may() {
        in_thread(|own| {
            let all = processors(own).unwrap();
            assert_eq!(processors(0).unwrap(), all);
            assert!(Processors::online().unwrap().contains(&all));
            let one: Processors = all.numbers().last().unwrap().to_string().parse().unwrap();
            set_processors(own, &one).unwrap();
            assert_eq!(processors(own).unwrap(), one);
            let none = set_processors(own, &"60000".parse().unwrap()).unwrap_err();
            assert_eq!(none.raw_os_error(), Some(libc::EINVAL));
            assert_eq!(processors(own).unwrap(), one);
        });
        assert_eq!(processors(i32::MAX).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn a_thread_has_the_priority_that_it_was_given() {
        in_thread(|own| {
            let idle = IoPriority(3 << 13);
            idle.give(own).unwrap();
            assert_eq!(IoPriority::of_thread(own).unwrap(), Some(idle));
            assert_eq!([idle.to_string(), IoPriority(2 << 13 | 6).to_string()], ["idle 0", "best-effort 6"]);
            assert!(!idle.is_real_time() && IoPriority(1 << 13 | 4).is_real_time());
        });
        assert!(IoPriority::of_thread(i32::MAX).is_err());
    }

    #[test]
    fn a_thread_has_the_slack_that_it_was_given() {
        in_thread(|own| {
            let Some(before) = timer_slack_ns(own) else {
                pagemark_testing::skipped("the kernel does not say it");
                return;
            };
            set_timer_slack_ns(own, before + 7).unwrap();
            assert_eq!(timer_slack_ns(own), Some(before + 7));
        });
        assert_eq!(timer_slack_ns(i32::MAX), None);
    }
}
