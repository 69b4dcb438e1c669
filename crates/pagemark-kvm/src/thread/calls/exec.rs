//! Another program in this process: the kernel executes the monitor again, which loads the program.
//!
//! So the kernel does all that belongs to `execve`: it ends other threads, closes descriptors,
//! resets signal actions, and lets a parent go on that waits after `vfork`. What the call can
//! refuse is checked before.

use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::image::{Image, Unloadable};
use crate::start::{self, EXECUTE, MonitorDescriptors};
use crate::sys::host_call;
use crate::sys::program_memory;
use crate::thread::Thread;

use super::{Outcome, Refusal, files};

/// As long may a path be, and a string, as for Linux.
const MOST_PATH: usize = 4096;
const MOST_STRING: usize = 128 << 10;
/// As many strings as fit into the limit of Linux.
const MOST_STRINGS: usize = 1 << 20;

impl From<Unloadable> for Refusal {
    fn from(refused: Unloadable) -> Refusal {
        Refusal { errno: refused.errno, lacking: refused.lacking.map(str::to_owned) }
    }
}

fn string(address: u64, limit: usize, errno: i32) -> Result<CString, Refusal> {
    if files::is_monitor(address) {
        return Err(libc::EFAULT.into());
    }
    let bytes = program_memory::read_string(address, limit)?.ok_or(errno)?;
    CString::new(bytes).map_err(|_| libc::EINVAL.into())
}

/// A list of strings that ends with 0.
fn strings(address: u64) -> Result<Vec<CString>, Refusal> {
    let mut strings = Vec::new();
    if address == 0 {
        return Ok(strings);
    }
    for index in 0..MOST_STRINGS as u64 {
        let at = address.checked_add(index * 8).ok_or(libc::EFAULT)?;
        match program_memory::read_words(at, 1)?[..] {
            [0] => return Ok(strings),
            [text] => strings.push(string(text, MOST_STRING, libc::E2BIG)?),
            _ => return Err(libc::EFAULT.into()),
        }
    }
    Err(libc::E2BIG.into())
}

/// The list of addresses that the kernel takes.
fn pointers(strings: &[CString]) -> Vec<u64> {
    strings.iter().map(|string| string.as_ptr() as u64).chain([0]).collect()
}

impl Thread {
    /// `execve`.
    pub(super) fn execve(&mut self, path: u64, arguments: u64, environment: u64) -> Result<Outcome, Refusal> {
        let path = if self.names_own_program(path) {
            self.process.program()
        } else {
            string(path, MOST_PATH, libc::ENAMETOOLONG)?
        };
        self.execute(&path, arguments, environment)
    }

    /// `execveat`.
    pub(super) fn execveat(
        &mut self,
        [fd, path, arguments, environment, flags, _]: [u64; 6],
    ) -> Result<Outcome, Refusal> {
        let path = string(path, MOST_PATH, libc::ENAMETOOLONG)?;
        let is_here = fd as i32 == libc::AT_FDCWD || path.as_bytes().first() == Some(&b'/');
        if flags & !(libc::AT_EMPTY_PATH as u64) != 0 {
            return Err(Refusal::lacking(libc::EINVAL, format!("flags {flags:#x}")));
        }
        if is_here {
            return self.execute(&path, arguments, environment);
        }
        let fd = files::descriptor(fd)?;
        if path.is_empty() && flags == 0 {
            return Err(libc::ENOENT.into());
        }
        let directory = std::fs::read_link(format!("/proc/self/fd/{fd}")).map_err(|_| Refusal::from(libc::EBADF))?;
        let path = if path.is_empty() { directory } else { directory.join(OsStr::from_bytes(path.as_bytes())) };
        if !Path::new(&path).exists() {
            return Err(Refusal::lacking(libc::ENOENT, "a file without a name"));
        }
        let path = CString::new(path.as_os_str().as_bytes()).map_err(|_| Refusal::from(libc::EINVAL))?;
        self.execute(&path, arguments, environment)
    }

    fn execute(&mut self, path: &CStr, arguments: u64, environment: u64) -> Result<Outcome, Refusal> {
        let mut arguments = strings(arguments)?;
        let environment = strings(environment)?;
        if arguments.is_empty() {
            // As Linux does it since 5.18.
            arguments.push(CString::default());
        }
        if path.is_empty() {
            return Err(libc::ENOENT.into());
        }
        drop(Image::open(path, &arguments)?);
        let _in_use = self.machine.enter();
        Refusal::while_leaving(&self.machine)?;
        let mut list: Vec<CString> = self.process.again().to_vec();
        let inherited = MonitorDescriptors { device: self.machine.device(), monitor: self.process.monitor() };
        list.extend([EXECUTE.to_owned(), inherited.to_argument()]);
        list.push(path.to_owned());
        list.extend(arguments);
        let environment: Vec<CString> = environment.iter().map(|entry| start::hidden(entry)).collect();
        let (list, environment) = (pointers(&list), pointers(&environment));
        let empty = c"";
        let arguments = [
            self.process.monitor() as u64,
            empty.as_ptr() as u64,
            list.as_ptr() as u64,
            environment.as_ptr() as u64,
            libc::AT_EMPTY_PATH as u64,
            0,
        ];
        // SAFETY: replaces this process; if it fails, nothing has changed.
        let result = unsafe { host_call::immediate(libc::SYS_execveat, arguments) };
        Ok(Outcome::Return(result))
    }
}
