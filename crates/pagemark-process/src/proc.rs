//! What `/proc/PID` says about a process.

use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// Fields of `/proc/PID/stat`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stat {
    /// Process id, or thread id.
    pub pid: i32,
    /// Name of the command, as the kernel has it; bytes that are not UTF-8 are replaced.
    pub command: String,
    /// One letter: R, S, D, T, t, Z, X …
    pub state: char,
    /// The parent's process id.
    pub parent_pid: i32,
    /// The session's process id.
    pub session_id: i32,
    /// When it was started, in clock ticks since boot. With the process id it names a process for ever.
    pub start_ticks: u64,
    /// A thread of the kernel.
    pub is_kernel_thread: bool,
}

const PF_KTHREAD: u64 = 0x0020_0000;

impl Stat {
    /// That of a process, or of a thread by its id.
    ///
    /// # Errors
    /// `NotFound`, or ESRCH: there is no such process (any more).
    pub fn read(pid: i32) -> io::Result<Stat> {
        let text = fs::read(format!("/proc/{pid}/stat"))?;
        Stat::parse(&text)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("/proc/{pid}/stat is garbled")))
    }

    fn parse(text: &[u8]) -> Option<Stat> {
        // The command may itself hold spaces and parentheses: its end is the last one.
        let open = text.iter().position(|&byte| byte == b'(')?;
        let close = text.iter().rposition(|&byte| byte == b')')?;
        let pid = std::str::from_utf8(&text[..open]).ok()?.trim().parse().ok()?;
        let command = String::from_utf8_lossy(text.get(open + 1..close)?).into_owned();
        let fields: Vec<&str> = std::str::from_utf8(&text[close + 1..]).ok()?.split_ascii_whitespace().collect();
        let flags: u64 = fields.get(6)?.parse().ok()?;
        Some(Stat {
            pid,
            command,
            state: state(text)?,
            parent_pid: fields.get(1)?.parse().ok()?,
            session_id: fields.get(3)?.parse().ok()?,
            start_ticks: fields.get(19)?.parse().ok()?,
            is_kernel_thread: flags & PF_KTHREAD != 0,
        })
    }

    /// Dead, but not yet waited for by its parent.
    pub fn is_zombie(&self) -> bool {
        is_dead(self.state)
    }
}

/// The state in the text of a `/proc/PID/stat`. Does not allocate.
pub(crate) fn state(stat: &[u8]) -> Option<char> {
    // It follows the command, which is in parentheses and may hold some.
    let close = stat.iter().rposition(|&byte| byte == b')')?;
    stat.get(close + 2).map(|&letter| char::from(letter))
}

/// True of the state of what is dead, waited for or not.
pub(crate) fn is_dead(state: char) -> bool {
    matches!(state, 'Z' | 'X' | 'x')
}

/// Fields of `/proc/PID/status`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Status {
    /// The process that traces it with ptrace; 0 if none does.
    pub tracer_pid: i32,
    /// 0: none; 1: strict; 2: a filter.
    pub seccomp_mode: u32,
    /// The effective user id.
    pub effective_uid: u32,
    /// How much of its private memory is swapped out, bytes.
    pub swapped_bytes: u64,
}

impl Status {
    /// That of a process or thread.
    ///
    /// # Errors
    /// `NotFound`, or ESRCH: there is no such process (any more).
    pub fn read(pid: i32) -> io::Result<Status> {
        let text = fs::read(format!("/proc/{pid}/status"))?;
        let mut status = Status::default();
        for line in String::from_utf8_lossy(&text).lines() {
            let Some((name, value)) = line.split_once(':') else { continue };
            let mut values = value.split_ascii_whitespace();
            match name {
                "TracerPid" => status.tracer_pid = values.next().and_then(|v| v.parse().ok()).unwrap_or(0),
                "Seccomp" => status.seccomp_mode = values.next().and_then(|v| v.parse().ok()).unwrap_or(0),
                "VmSwap" => status.swapped_bytes = values.next().and_then(|v| v.parse().ok()).unwrap_or(0) << 10,
                "Uid" => status.effective_uid = values.nth(1).and_then(|v| v.parse().ok()).unwrap_or(0),
                _ => {}
            }
        }
        Ok(status)
    }
}

/// The threads of a process, in ascending order.
///
/// # Errors
/// `NotFound`: there is no such process.
pub fn threads(pid: i32) -> io::Result<Vec<i32>> {
    let mut threads: Vec<i32> = fs::read_dir(format!("/proc/{pid}/task"))?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    threads.sort_unstable();
    Ok(threads)
}

/// A thread of a process that has not exited: the main one, unless it has. By its number the memory of the process can be
/// reached, which under that of a main thread that has exited is hidden. None if the process is gone or a zombie.
pub fn live_thread(pid: i32) -> Option<i32> {
    let is_live = |&thread: &i32| Stat::read(thread).is_ok_and(|stat| !stat.is_zombie());
    if is_live(&pid) { Some(pid) } else { threads(pid).ok()?.into_iter().find(is_live) }
}

/// The children of a process, those of all its threads, in ascending order.
///
/// # Errors
/// `NotFound`: there is no such process. Otherwise `/proc` can't be read.
pub fn children(pid: i32) -> io::Result<Vec<i32>> {
    let mut children = Vec::new();
    for thread in threads(pid)? {
        match fs::read_to_string(format!("/proc/{pid}/task/{thread}/children")) {
            Ok(list) => children.extend(list.split_ascii_whitespace().filter_map(|child| child.parse::<i32>().ok())),
            // The thread is gone (its children now belong to another), or a kernel without CONFIG_PROC_CHILDREN.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return children_by_parent(pid),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => return children_by_parent(pid),
            Err(error) => return Err(error),
        }
    }
    children.sort_unstable();
    children.dedup();
    Ok(children)
}

/// The same, found by asking every process for its parent.
fn children_by_parent(pid: i32) -> io::Result<Vec<i32>> {
    let mut children: Vec<i32> = fs::read_dir("/proc")?
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|&other| Stat::read(other).is_ok_and(|stat| stat.parent_pid == pid))
        .collect();
    children.sort_unstable();
    Ok(children)
}

/// The program file of a process.
///
/// # Errors
/// There is no such process, it has none (kernel threads, zombies), or it is not ours to see.
pub fn executable(pid: i32) -> io::Result<PathBuf> {
    fs::read_link(format!("/proc/{pid}/exe"))
}

/// The command line of a process, for people: its arguments joined by spaces, or its name in brackets if it has none.
///
/// # Errors
/// There is no such process.
pub fn command_line(pid: i32) -> io::Result<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline"))?;
    let arguments: Vec<_> =
        bytes.split(|&byte| byte == 0).filter(|a| !a.is_empty()).map(String::from_utf8_lossy).collect();
    if arguments.is_empty() { Ok(format!("[{}]", Stat::read(pid)?.command)) } else { Ok(arguments.join(" ")) }
}

/// The auxiliary vector that the kernel gave a process: words in pairs, as `/proc/PID/auxv` has them. Empty for one without memory.
///
/// # Errors
/// There is no such process, or it is not ours to see.
pub fn auxiliary_vector(pid: i32) -> io::Result<Vec<u8>> {
    fs::read(format!("/proc/{pid}/auxv"))
}

/// True if two processes have one and the same memory, as a child made by vfork has its parent's until it executes a program. False
/// where the kernel does not tell.
pub fn share_memory(pid: i32, other: i32) -> bool {
    /// `linux/kcmp.h`
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: the call compares two processes by their ids; it reads and writes no memory of ours.
    unsafe { libc::syscall(libc::SYS_kcmp, pid, other, KCMP_VM, 0, 0) == 0 }
}

/// True if the process runs a 32-bit (or x32) program.
///
/// # Errors
/// As [`executable`].
pub fn is_32_bit(pid: i32) -> io::Result<bool> {
    let mut header = [0; 5];
    fs::File::open(format!("/proc/{pid}/exe"))?.read_exact(&mut header)?;
    Ok(header == *b"\x7fELF\x01")
}

/// What the open descriptors of a process are, as `/proc/PID/fd` names them.
///
/// # Errors
/// There is no such process, or it is not ours to see.
pub fn descriptors(pid: i32) -> io::Result<Vec<(i32, Vec<u8>)>> {
    let mut descriptors = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // One that was closed meanwhile is not open.
        if let Ok(link) = fs::read_link(entry.path()) {
            descriptors.push((number, link.into_os_string().into_vec()));
        }
    }
    Ok(descriptors)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_may_look_like_the_rest_of_the_line() {
        let line = b"77 (a) R (b c) S 5 77 66 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 12345 0 0";
        let stat = Stat::parse(line).unwrap();
        assert_eq!((stat.command.as_str(), stat.state, stat.parent_pid), ("a) R (b c", 'S', 5));
        assert_eq!((stat.session_id, stat.start_ticks, stat.is_kernel_thread), (66, 12345, false));
        assert_eq!(Stat::parse(b"77 (a S 5"), None);
        assert_eq!(Stat::parse(b") 77 ("), None);
    }

    #[test]
    fn knows_this_process_and_its_children() {
        let pid = std::process::id() as i32;
        let stat = Stat::read(pid).unwrap();
        assert_eq!(stat.pid, pid);
        assert!(!stat.is_kernel_thread && !stat.is_zombie());
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let child_pid = child.id() as i32;
        assert!(children(pid).unwrap().contains(&child_pid));
        assert!(children_by_parent(pid).unwrap().contains(&child_pid));
        assert_eq!(Stat::read(child_pid).unwrap().parent_pid, pid);
        assert!(!is_32_bit(pid).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(Stat::read(child_pid).is_err());
    }
}
