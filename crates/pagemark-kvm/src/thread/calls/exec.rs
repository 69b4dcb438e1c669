//! Another program in this process: the kernel executes the monitor again, which loads the program.
//!
//! So the kernel does all that belongs to `execve`: it ends other threads, closes descriptors,
//! resets signal actions, and lets a parent go on that waits after `vfork`. What the call can
//! refuse is checked before.

use std::ffi::CString;
use std::fs::File;

use crate::image::{DESCRIPTORS, Image, Place, Unloadable};
use crate::start::{self, EXECUTE, MonitorDescriptors};
use crate::sys::descriptors::PassedOn;
use crate::sys::host_call;
use crate::sys::program_memory;
use crate::thread::Thread;

use super::{Outcome, Refusal, files, os_error};

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
        self.execveat([libc::AT_FDCWD as u64, path, arguments, environment, 0, 0])
    }

    /// `execveat`.
    pub(super) fn execveat(
        &mut self,
        [fd, path, arguments, environment, flags, _]: [u64; 6],
    ) -> Result<Outcome, Refusal> {
        let is_own = self.names_own_program(path);
        let path = string(path, MOST_PATH, libc::ENAMETOOLONG)?;
        let unknown = flags & !(libc::AT_EMPTY_PATH | libc::AT_SYMLINK_NOFOLLOW) as u64;
        if unknown != 0 {
            return Err(Refusal::lacking(libc::EINVAL, format!("flags {unknown:#x}")));
        }
        if path.is_empty() && flags & libc::AT_EMPTY_PATH as u64 == 0 {
            return Err(libc::ENOENT.into());
        }
        let is_here = fd as i32 == libc::AT_FDCWD || path.as_bytes().first() == Some(&b'/');
        let directory = if is_here { libc::AT_FDCWD } else { files::descriptor(fd)? };
        let named = match path.as_bytes() {
            _ if is_here => path.clone(),
            [] => CString::new([DESCRIPTORS, directory.to_string().as_bytes()].concat()).unwrap_or_default(),
            rest => {
                CString::new([DESCRIPTORS, directory.to_string().as_bytes(), b"/", rest].concat()).unwrap_or_default()
            }
        };
        let path = if is_own { self.process.path_of_file() } else { path };
        let follows = flags & libc::AT_SYMLINK_NOFOLLOW as u64 == 0;
        self.execute(&Place { directory, path: &path, named: &named, follows }, arguments, environment)
    }

    fn execute(&mut self, place: &Place<'_>, arguments: u64, environment: u64) -> Result<Outcome, Refusal> {
        let mut arguments = strings(arguments)?;
        let environment = strings(environment)?;
        if arguments.is_empty() {
            // As Linux does it since 5.18.
            arguments.push(CString::default());
        }
        let image = Image::open_at(place, &arguments)?;
        if let Some(lacking) = image.lacking {
            self.process.report_lacking(lacking);
        }
        let _in_use = self.machine.enter();
        Refusal::while_leaving(&self.machine)?;
        // The next monitor gets what was checked, not what has its name by then.
        let pass_on = |file: File| PassedOn::new(file, self.process.shares_memory()).map_err(|error| os_error(&error));
        let program = pass_on(image.file)?;
        let linker = image.linker.map(|(file, _)| pass_on(file)).transpose()?;
        let inherited = MonitorDescriptors {
            device: self.machine.device(),
            monitor: self.process.monitor(),
            program: program.number(),
            linker: linker.as_ref().map(PassedOn::number),
        };
        Ok(Outcome::Return(self.execute_monitor(inherited, (image.named, image.arguments), &environment)))
    }

    /// Has the kernel execute the monitor for the program of that name and arguments. Returns if
    /// that fails.
    fn execute_monitor(
        &self,
        inherited: MonitorDescriptors,
        (named, arguments): (CString, Vec<CString>),
        environment: &[CString],
    ) -> i64 {
        let mut list: Vec<CString> = self.process.again().to_vec();
        list.extend([EXECUTE.to_owned(), inherited.to_argument(), named]);
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
        unsafe { host_call::immediate(libc::SYS_execveat, arguments) }
    }
}
