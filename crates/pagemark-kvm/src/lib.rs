//! A virtual machine for one process: an unmodified Linux program under KVM, whose memory lies
//! behind page tables of Pagemark.
//!
//! `docs/design/process-machine.md` explains how it works. [`run`] turns the calling process into a
//! program; the command `pagemark-kvm` does little else.
//!
//! # Example
//!
//! ```no_run
//! # fn main() -> Result<(), pagemark_kvm::Error> {
//! pagemark_kvm::check()?;
//! let arguments = [c"echo".into(), c"from the machine".into()];
//! // If the program executes another, this file is executed again, and must then call `run` with
//! // what it gets.
//! let again = [c"pagemark-kvm".into()];
//! let Err(error) = pagemark_kvm::run(c"/bin/echo", &arguments, &[], &again, None);
//! Err(error)
//! # }
//! ```

mod call_table;
mod elf;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod image;
mod layout;
mod loader;
mod machine;
mod mappings;
mod operands;
mod page_table;
mod process;
mod random;
pub mod start;
mod stores;
mod sys;
mod thread;
mod vcpu;
mod vdso;
mod views;
mod write_list;
mod writes;

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStringExt;
use std::sync::Arc;

pub use error::{Error, ErrorKind};
pub use pagemark_kvm_protocol::write_record::WriteRecord;

use image::{Image, Unloadable};

/// Whether the machine works here.
///
/// # Errors
/// Of kind [`ErrorKind::Unavailable`] with what would enable it, or another if a call fails.
pub fn check() -> Result<(), Error> {
    machine::Machine::new(machine::open()?, machine::write_record_of_environment()?).map(drop)
}

/// Whether programs in the machine tell the time without system calls here.
///
/// # Errors
/// Those of [`check`].
pub fn tells_time() -> Result<bool, Error> {
    machine::check_layout()?;
    let (machine, _in_use) = machine::Machine::new(machine::open()?, machine::write_record_of_environment()?)?;
    let works = machine.begin_clock().is_some();
    machine.remove_clock();
    Ok(works)
}

/// The environment of this process, with the entries that are not of the form `NAME=VALUE`. The
/// process must have no other thread, which could change it.
pub fn environment() -> Vec<CString> {
    sys::arguments::environment()
}

/// Executes this process's file again with the same arguments, if its environment is not
/// [`start::undisturbed`]. The process must have no other thread.
///
/// # Errors
/// The kernel does not execute it.
pub fn leave_variables_to_program() -> Result<(), Error> {
    let (now, path) = (environment(), c"/proc/self/exe");
    let environment = start::undisturbed(&now);
    if environment == now {
        return Ok(());
    }
    let arguments: Vec<CString> =
        std::env::args_os().filter_map(|argument| CString::new(argument.into_vec()).ok()).collect();
    let error = sys::arguments::execute(path, &arguments, &environment);
    Err(Error::system("execute", path.to_string_lossy())(error))
}

/// Turns this process into the program at `path` with `arguments` (the first is its name) and
/// `environment`, in a machine. Returns only if the program cannot be started. The process must
/// have no other thread, which would continue beside the program.
///
/// When the program executes another, the file of this process is executed with the arguments
/// `again`, then [`start::EXECUTE`], what the next monitor gets as `inherited`, the path, and the
/// arguments of the program. The next monitor does not look at the path, but gives it to the
/// program: the file is among the descriptors.
///
/// # Errors
/// If the machine does not work here, or the file is no program for it.
pub fn run(
    path: &CStr,
    arguments: &[CString],
    environment: &[CString],
    again: &[CString],
    inherited: Option<start::MonitorDescriptors>,
) -> Result<std::convert::Infallible, Error> {
    machine::check_layout()?;
    let image = match inherited {
        Some(inherited) => inherited_image(inherited, path, arguments)?,
        None => Image::open(path, arguments).map_err(|refused| not_runnable(path, &refused))?,
    };
    if inherited.is_none() {
        sys::limits::begin();
    }
    let device = match inherited {
        Some(inherited) => machine::take_over(inherited.device)?,
        None => machine::open()?,
    };
    // Saved before the program begins, the process could not go on outside of the machine.
    let (machine, in_use) = machine::Machine::new(device, machine::write_record_of_environment()?)?;
    let start = loader::load(&machine, &image, environment)?;
    machine.describe_program(start.entry);
    // SAFETY: the name is copied, and ends with zero.
    unsafe {
        let name = CString::new(image.short_name()).unwrap_or_default();
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
    }
    // Without it, the monitor's arguments are shown.
    let _ = sys::arguments::show(&start.arguments, &start.environment);
    let lacking = image.lacking;
    let program = process::Program::of(image, inherited.is_some())?;
    let monitor = inherited.map(|inherited| inherited.monitor);
    let process = Arc::new(process::Process::new(program, again.to_vec(), monitor, start.stack)?);
    if let Some(lacking) = lacking {
        process.report_lacking(lacking);
    }
    let thread = thread::Thread::new(machine, process, start)?;
    drop(in_use);
    thread.run_main()
}

/// The program that the monitor before this one has opened.
fn inherited_image(inherited: start::MonitorDescriptors, path: &CStr, arguments: &[CString]) -> Result<Image, Error> {
    let take_over =
        |fd| sys::descriptors::open_file(fd).map_err(Error::system("take over", format!("descriptor {fd}")));
    let program = take_over(inherited.program)?;
    let linker = inherited.linker.map(take_over).transpose()?;
    Image::of_open(program, linker, path, arguments.to_vec()).map_err(|refused| not_runnable(path, &refused))
}

fn not_runnable(path: &CStr, refused: &Unloadable) -> Error {
    let error = std::io::Error::from_raw_os_error(refused.errno);
    let error = Error::new(ErrorKind::NotRunnable, "run", path.to_string_lossy().into_owned()).source(error);
    match refused.lacking {
        Some(what) => error.help(format!("the machine does not have: {what}")),
        None => error,
    }
}
