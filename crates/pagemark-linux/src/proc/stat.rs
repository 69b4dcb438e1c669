//! `/proc/PID/stat`: what a process or thread is.

use std::io;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use nix::unistd::{SysconfVar, sysconf};

/// Fields of `/proc/PID/stat`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stat {
    /// Process id, or thread id.
    pub pid: i32,
    /// Name of the command, as the kernel has it; bytes that are not UTF-8 are replaced.
    pub command: String,
    /// State, one letter: R, S, D, T, t, Z, X …
    pub state: char,
    /// The parent's process id.
    pub parent_pid: i32,
    /// The process group's id.
    pub process_group: i32,
    /// The session's process id.
    pub session_id: i32,
    /// Device number of the controlling terminal, as `st_rdev` has it; 0 for none.
    pub terminal: u64,
    /// When the process was started, in clock ticks since boot. Together with the process id this
    /// identifies a process for ever.
    pub start_ticks: u64,
    /// True for a thread of the kernel.
    pub is_kernel_thread: bool,
    /// True once it exits: it executes nothing of its program any more.
    pub is_exiting: bool,
}

/// The first field behind the name of the command, as proc(5) counts.
const FIRST_FIELD: usize = 3;

const PF_EXITING: u64 = 0x4;
const PF_KTHREAD: u64 = 0x0020_0000;

impl Stat {
    /// Reads the fields of a process, or of a thread by its id.
    ///
    /// # Errors
    /// `NotFound`, or ESRCH: there is no such process (any more).
    pub fn read(pid: i32) -> io::Result<Stat> {
        Stat::parse(&super::read(pid, "stat")?).ok_or_else(|| super::garbled(super::path(pid, "stat")))
    }

    /// Parses the content of a `stat` file.
    pub fn parse(text: &[u8]) -> Option<Stat> {
        // The command is in parentheses, and may hold spaces, parentheses and newlines: the last
        // parenthesis ends it.
        let open = text.iter().position(|&byte| byte == b'(')?;
        let close = end_of_command(text)?;
        let pid = std::str::from_utf8(&text[..open]).ok()?.trim().parse().ok()?;
        let command = String::from_utf8_lossy(text.get(open + 1..close)?).into_owned();
        let fields: Vec<&str> = std::str::from_utf8(&text[close + 1..]).ok()?.split_ascii_whitespace().collect();
        let flags: u64 = fields.get(6)?.parse().ok()?;
        Some(Stat {
            pid,
            command,
            state: state(text)?,
            parent_pid: fields.get(1)?.parse().ok()?,
            process_group: fields.get(2)?.parse().ok()?,
            session_id: fields.get(3)?.parse().ok()?,
            // Negative where the number of the device is large.
            terminal: fields.get(4)?.parse::<i32>().ok()? as u32 as u64,
            start_ticks: fields.get(19)?.parse().ok()?,
            is_kernel_thread: flags & PF_KTHREAD != 0,
            is_exiting: flags & PF_EXITING != 0,
        })
    }

    /// True if the process or thread has exited and its parent has not waited for it yet.
    pub fn is_zombie(&self) -> bool {
        is_dead(self.state)
    }
}

/// The time now, as [`Stat::start_ticks`] has it.
pub fn ticks_since_boot() -> u64 {
    // Every kernel has the clock and the number.
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from);
    let ticks_per_s = ticks_per_s();
    now.as_secs() * ticks_per_s + u64::from(now.subsec_nanos()) / (1_000_000_000 / ticks_per_s)
}

/// Clock ticks a second.
pub fn ticks_per_s() -> u64 {
    // Every kernel has the number.
    let ticks = sysconf(SysconfVar::CLK_TCK).ok().flatten();
    ticks.and_then(|ticks| u64::try_from(ticks).ok()).filter(|ticks| *ticks > 0).unwrap_or(100)
}

fn end_of_command(text: &[u8]) -> Option<usize> {
    text.iter().rposition(|&byte| byte == b')')
}

/// The state in the content of a `stat` file. Does not allocate.
pub fn state(text: &[u8]) -> Option<char> {
    text.get(end_of_command(text)? + 2).map(|&letter| char::from(letter))
}

/// The parent's process id and the start time, in clock ticks since boot, in the content of a
/// `stat` file. Does not allocate.
pub fn parent_and_start(text: &[u8]) -> Option<(i32, u64)> {
    let mut fields = std::str::from_utf8(text.get(end_of_command(text)? + 1..)?).ok()?.split_ascii_whitespace();
    let parent_pid = fields.nth(1)?.parse().ok()?;
    Some((parent_pid, fields.nth(17)?.parse().ok()?))
}

/// A number in the content of a `stat` file. Fields are counted as in proc(5), from 1 on; `field`
/// is one behind the name of the command. Does not allocate.
pub fn number(text: &[u8], field: usize) -> Option<u64> {
    let fields = std::str::from_utf8(text.get(end_of_command(text)? + 1..)?).ok()?;
    fields.split_ascii_whitespace().nth(field.checked_sub(FIRST_FIELD)?)?.parse().ok()
}

/// True of the thread of the kernel that KVM keeps in a process that has a machine (Linux 6.14), by
/// the content of its `stat` file. It executes nothing of the program. Does not allocate.
pub fn is_worker_of_kvm(text: &[u8]) -> bool {
    const PF_USER_WORKER: u64 = 0x4000;
    let Some(close) = end_of_command(text) else { return false };
    let fields = text.get(close + 1..).and_then(|rest| std::str::from_utf8(rest).ok());
    let flags = fields.and_then(|fields| fields.split_ascii_whitespace().nth(6)?.parse::<u64>().ok());
    let is_of_kvm = text.split(|&byte| byte == b'(').nth(1).is_some_and(|name| name.starts_with(b"kvm-"));
    is_of_kvm && flags.is_some_and(|flags| flags & PF_USER_WORKER != 0)
}

/// True of the state of a process or thread that has exited, waited for or not.
pub fn is_dead(state: char) -> bool {
    matches!(state, 'Z' | 'X' | 'x')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = (Stat::parse(&bytes), state(&bytes), parent_and_start(&bytes), number(&bytes, 22));
        }

        #[test]
        fn a_command_may_hold_any_bytes(command in prop::collection::vec(any::<u8>(), 0..16)) {
            let rest = b") S 5 77 66 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 12345 0 0\n";
            let stat = Stat::parse(&[b"77 (", &command[..], rest].concat()).unwrap();
            let text = [b"77 (", &command[..], rest].concat();
            prop_assert_eq!(parent_and_start(&text), Some((5, 12345)));
            prop_assert_eq!([number(&text, 4), number(&text, 22), number(&text, 99)], [Some(5), Some(12345), None]);
            prop_assert_eq!([number(&text, 0), number(&text, 3)], [None, None]);
            prop_assert_eq!(&stat.command, &String::from_utf8_lossy(&command));
            prop_assert_eq!((stat.pid, stat.state, stat.parent_pid, stat.session_id, stat.start_ticks), (77, 'S', 5, 66, 12345));
        }
    }

    #[test]
    fn the_time_of_starts_is_the_time_since_boot() {
        let before = ticks_since_boot();
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let started = Stat::read(child.id() as i32).unwrap().start_ticks;
        child.wait().unwrap();
        assert!((before..=ticks_since_boot()).contains(&started), "{before} {started}");
    }

    #[test]
    fn only_a_thread_of_the_kernel_is_a_worker_of_kvm() {
        let stat =
            |name: &str, flags: u64| format!("77 ({name}) S 5 77 66 0 -1 {flags} 0 0 0 0 0 0 0 0 20 0 1 0 12 0 0\n");
        assert!(is_worker_of_kvm(stat("kvm-nx-lpage-re", 0x0040_4040).as_bytes()));
        assert!(!is_worker_of_kvm(stat("kvm-nx-lpage-re", 0x0040_0040).as_bytes()));
        assert!(!is_worker_of_kvm(stat("vhost-77", 0x0040_4040).as_bytes()));
        assert!(!is_worker_of_kvm(b"77 (kvm-"));
    }

    #[test]
    fn incomplete_text_is_refused() {
        assert_eq!(Stat::parse(b"77 (a S 5"), None);
        assert_eq!(Stat::parse(b") 77 ("), None);
        assert_eq!(state(b"77 (a)"), None);
    }

    #[test]
    fn a_process_is_known_until_it_is_waited_for() {
        let pid = std::process::id() as i32;
        let stat = Stat::read(pid).unwrap();
        assert_eq!(stat.pid, pid);
        assert!(!stat.is_kernel_thread && !stat.is_zombie());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let child_pid = child.id() as i32;
        assert_eq!(Stat::read(child_pid).unwrap().parent_pid, pid);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(super::super::is_gone(&Stat::read(child_pid).unwrap_err()));
    }
}
