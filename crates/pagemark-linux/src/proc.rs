//! `/proc`: what the kernel says about processes, and about the machine.
//!
//! All of Pagemark reads `/proc` through this module. Each parser takes bytes, because names of
//! programs and files are any bytes, and returns `None` for text that is not the kernel's; none of
//! them panics.

pub mod activity;
pub mod call;
pub mod control_groups;
pub mod core_dump_filter;
pub mod credentials;
pub mod descriptors;
pub mod fields;
pub mod identity;
pub mod ksm;
pub mod limits;
pub mod locks;
pub mod maps;
pub mod memory_failure;
pub mod mounts;
pub mod personality;
pub mod process;
pub mod smaps;
pub mod stat;
pub mod status;
pub mod system;
pub mod tree;

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

pub use activity::activity;
pub use call::{Call, wait_function};
pub use control_groups::{ControlGroup, control_groups, own_control_groups};
pub use credentials::Credentials;
pub use descriptors::descriptors;
pub use fields::Fields;
pub use identity::{birth, boot_id};
pub use limits::Limits;
pub use maps::{Mapping, MappingKind};
pub use mounts::Mount;
pub use process::Process;
pub use stat::{Stat, ticks_since_boot};
pub use status::Status;
pub use tree::{children, executes_program, has_exited_first, is_ending, live_thread, processes, threads};

use crate::Range;

/// Path of an entry of a process's directory, `/proc/PID/ENTRY`. Of a thread by its id, although
/// `/proc` does not list threads.
pub fn path(pid: i32, entry: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{entry}"))
}

/// Path of an entry of this process's own directory, `/proc/self/ENTRY`. Right also where `/proc`
/// belongs to another namespace of process ids.
pub fn own_path(entry: &str) -> PathBuf {
    PathBuf::from(format!("/proc/self/{entry}"))
}

/// Like [`own_path`], of the calling thread. Its memory and descriptors are those of the process,
/// and are there also after the first thread of the process has ended. To be used at once by this
/// thread alone: it may end before others, and CRIU restores no process that has such a file open.
pub fn thread_path(entry: &str) -> PathBuf {
    PathBuf::from(format!("/proc/thread-self/{entry}"))
}

/// True if it is the id of the process that calls this. It may be that of the parent of a child,
/// too: [`OfThisProcess`](super::this_process::OfThisProcess) tells whether the process is still
/// the same.
pub fn is_own_id(id: i32) -> bool {
    id.cast_unsigned() == std::process::id()
}

/// True if a process or thread has the id, zombies included.
pub fn exists(id: i32) -> bool {
    PathBuf::from(format!("/proc/{id}")).exists()
}

/// True of an error that means: there is no such process or thread (any more), or no such
/// descriptor or mapping of it.
pub fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// Reads an entry of a process's directory.
pub(super) fn read(pid: i32, entry: &str) -> io::Result<Vec<u8>> {
    fs::read(path(pid, entry))
}

fn garbled(path: PathBuf) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{} is not as the kernel writes it", path.display()))
}

/// Opens the memory of a process for reading.
///
/// # Errors
/// There is no such process, or tracing it is not permitted.
pub fn open_memory(pid: i32) -> io::Result<File> {
    File::open(path(pid, "mem"))
}

/// Opens `/proc/PID/mem` for writing.
///
/// # Errors
/// Those of [`open_memory`].
pub fn open_memory_for_writing(pid: i32) -> io::Result<File> {
    File::options().read(true).write(true).open(path(pid, "mem"))
}

/// The address of the next instruction of a thread that does not run.
pub fn next_instruction(thread: i32) -> Option<u64> {
    let text = fs::read_to_string(path(thread, "syscall")).ok()?;
    let last = text.split_ascii_whitespace().next_back()?;
    u64::from_str_radix(last.strip_prefix("0x")?, 16).ok()
}

/// Path of the program that a process executes.
///
/// # Errors
/// There is no such process, it has no program (kernel threads, zombies), or tracing it is not
/// permitted.
pub fn executable(pid: i32) -> io::Result<PathBuf> {
    fs::read_link(path(pid, "exe"))
}

/// True if a process executes a 32-bit (or x32) program.
///
/// # Errors
/// Those of [`executable`].
pub fn is_32_bit(pid: i32) -> io::Result<bool> {
    let mut header = [0; 5];
    File::open(path(pid, "exe"))?.read_exact(&mut header)?;
    Ok(header == *b"\x7fELF\x01")
}

/// The command line of a process or thread, for people: its arguments joined by spaces, or its name
/// in brackets if it has none.
///
/// # Errors
/// There is no such process.
pub fn command_line(pid: i32) -> io::Result<String> {
    let line = join_arguments(&arguments(pid)?);
    if line.is_empty() { Ok(format!("[{}]", Stat::read(pid)?.command)) } else { Ok(line) }
}

fn join_arguments(arguments: &[Vec<u8>]) -> String {
    let arguments = arguments.iter().filter(|argument| !argument.is_empty());
    arguments.map(|argument| String::from_utf8_lossy(argument)).collect::<Vec<_>>().join(" ")
}

/// The arguments of a process, beginning with its name. Empty if it has none: a kernel thread, a
/// zombie, or a process that is about to execute its program.
///
/// # Errors
/// There is no such process.
pub fn arguments(pid: i32) -> io::Result<Vec<Vec<u8>>> {
    read(pid, "cmdline").map(|line| split_arguments(&line))
}

/// Each argument ends with zero; the last one may lack it if the process has changed its title.
fn split_arguments(line: &[u8]) -> Vec<Vec<u8>> {
    if line.is_empty() {
        return Vec::new();
    }
    line.strip_suffix(b"\0").unwrap_or(line).split(|&byte| byte == 0).map(<[u8]>::to_vec).collect()
}

/// The root directory of a process: `/` unless it has changed that (`chroot`), from the root of the
/// mounts that it sees.
///
/// # Errors
/// Those of [`executable`].
pub fn root_directory(pid: i32) -> io::Result<PathBuf> {
    fs::read_link(path(pid, "root"))
}

/// The working directory of a process.
///
/// # Errors
/// Those of [`executable`].
pub fn working_directory(pid: i32) -> io::Result<PathBuf> {
    fs::read_link(path(pid, "cwd"))
}

/// Path that leads to the file which a process maps as a whole mapping, `/proc/PID/map_files/…`,
/// whatever the file's name means by now.
pub fn mapped_file(pid: i32, mapping: &Range) -> PathBuf {
    path(pid, &format!("map_files/{:x}-{:x}", mapping.start, mapping.end))
}

/// The auxiliary vector that the kernel gave a process: pairs of words. Empty for a process without
/// memory.
///
/// # Errors
/// There is no such process, or tracing it is not permitted.
pub fn auxiliary_vector(pid: i32) -> io::Result<Vec<u8>> {
    read(pid, "auxv")
}

/// True if a process is in this process's namespace of process ids.
///
/// # Errors
/// There is no such process, or tracing it is not permitted.
pub fn is_in_own_pid_namespace(pid: i32) -> io::Result<bool> {
    Ok(namespace(pid, "pid")? == own_namespace("pid")?)
}

/// The number of the namespace of a kind (`mnt`, `net`, `pid`, `user`, …) in which a process is.
///
/// # Errors
/// There is no such process, or tracing it is not permitted.
pub fn namespace(pid: i32, kind: &str) -> io::Result<u64> {
    Ok(fs::metadata(path(pid, &format!("ns/{kind}")))?.ino())
}

/// The number of this process's namespace of a kind.
///
/// # Errors
/// `/proc` is not mounted.
pub fn own_namespace(kind: &str) -> io::Result<u64> {
    Ok(fs::metadata(own_path(&format!("ns/{kind}")))?.ino())
}

/// True if two processes have the same memory, as a child made by vfork has its parent's until it
/// executes a program. False where the kernel does not say.
pub fn share_memory(pid: i32, other: i32) -> bool {
    /// `linux/kcmp.h`
    const KCMP_VM: libc::c_int = 1;
    // SAFETY: the call compares two processes by their ids; it reads and writes no memory of ours.
    unsafe { libc::syscall(libc::SYS_kcmp, pid, other, KCMP_VM, 0, 0) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_joined() {
        let join = |line| join_arguments(&split_arguments(line));
        assert_eq!(join(b"sleep\x0060\0"), "sleep 60");
        assert_eq!(join(b"\xff\0\0\0"), "\u{fffd}");
        assert_eq!(join(b""), "");
    }

    #[test]
    fn empty_arguments_are_arguments() {
        assert_eq!(split_arguments(b"a\0\0b\0"), [&b"a"[..], b"", b"b"]);
        assert_eq!(split_arguments(b"\0"), [b""]);
        assert_eq!(split_arguments(b"a title"), [b"a title"]);
        assert_eq!(split_arguments(b""), [[0; 0]; 0]);
    }

    #[test]
    fn this_process_is_described() {
        let pid = std::process::id() as i32;
        assert!(exists(pid) && is_in_own_pid_namespace(pid).unwrap() && !is_32_bit(pid).unwrap());
        assert_eq!(executable(pid).unwrap(), std::env::current_exe().unwrap());
        assert!(command_line(pid).unwrap().starts_with(&std::env::args().next().unwrap()));
        assert!(auxiliary_vector(pid).unwrap().len().is_multiple_of(16));
        assert!(share_memory(pid, pid));
        assert_eq!(arguments(pid).unwrap().len(), std::env::args_os().count());
        assert_eq!(working_directory(pid).unwrap(), std::env::current_dir().unwrap());
        assert_eq!(namespace(pid, "net").unwrap(), own_namespace("net").unwrap());
        assert!(is_gone(&executable(i32::MAX).unwrap_err()) && is_gone(&namespace(i32::MAX, "net").unwrap_err()));
    }
}
