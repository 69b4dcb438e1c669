//! `pagemark-kvm PROGRAM [ARGUMENT…]` runs a program in a virtual machine of its own.

// Rust's library would set the action of SIGPIPE and open closed descriptors before `main`: the
// program has to get both as this process got them.
#![cfg_attr(not(test), no_main)]
// The harness of tests has a main function of its own.
#![cfg_attr(test, allow(dead_code))]

use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use pagemark_kvm::start::{self, EXECUTE, MonitorDescriptors};

const USAGE: &str = "usage: pagemark-kvm [--check] PROGRAM [ARGUMENT...]";

/// The exit statuses of `env` and of shells, for programs that cannot be started.
const FAILED: u8 = 125;
const NOT_EXECUTABLE: u8 = 126;
const NOT_FOUND: u8 = 127;

/// The program's beginning, as the C library calls it. Returns the exit status.
#[cfg(not(test))]
#[unsafe(no_mangle)]
extern "C" fn main(_count: libc::c_int, _arguments: *const *const libc::c_char) -> libc::c_int {
    i32::from(begin())
}

fn begin() -> u8 {
    let mut arguments = std::env::args_os().skip(1).peekable();
    match arguments.peek().map(|argument| argument.as_bytes()) {
        None => return fail(USAGE),
        Some(b"--check") => {
            return match pagemark_kvm::check() {
                Ok(()) => 0,
                Err(error) => fail(&error.to_string()),
            };
        }
        Some(option) if option == EXECUTE.to_bytes() => {
            let inherited = arguments.nth(1).and_then(|text| MonitorDescriptors::of_argument(text.to_str()?));
            if inherited.is_none() {
                return fail(USAGE);
            }
            return execute(arguments.collect(), inherited);
        }
        Some(b"--") => {
            arguments.next();
        }
        Some(option) if option.starts_with(b"-") => return fail(USAGE),
        Some(_) => {}
    }
    // If this fails, they are the monitor's too.
    let _ = pagemark_kvm::leave_variables_to_program();
    let arguments: Vec<OsString> = arguments.collect();
    let Some(name) = arguments.first() else { return fail(USAGE) };
    let path = find(name);
    let mut arguments = arguments;
    arguments.insert(0, path.into_os_string());
    execute(arguments, None)
}

/// Runs the program whose path and arguments these are.
fn execute(arguments: Vec<OsString>, inherited: Option<MonitorDescriptors>) -> u8 {
    let strings = |values: &mut dyn Iterator<Item = OsString>| -> Vec<CString> {
        values.filter_map(|value| CString::new(value.into_vec()).ok()).collect()
    };
    let environment = start::shown(&pagemark_kvm::environment());
    let arguments = strings(&mut arguments.into_iter());
    let Some((path, arguments)) = arguments.split_first() else { return fail(USAGE) };
    let again = [c"pagemark-kvm".into()];
    let Err(error) = pagemark_kvm::run(path, arguments, &environment, &again, inherited);
    let status = match (error.kind(), error.io_error().map(std::io::Error::kind)) {
        (pagemark_kvm::ErrorKind::NotRunnable, Some(std::io::ErrorKind::NotFound)) => NOT_FOUND,
        (pagemark_kvm::ErrorKind::NotRunnable, _) => NOT_EXECUTABLE,
        _ => FAILED,
    };
    eprintln!("pagemark-kvm: {error}");
    status
}

/// The program of this name, in the directories of `PATH` if the name has no slash.
fn find(name: &OsStr) -> PathBuf {
    let is_program = |path: &PathBuf| path.is_file();
    if name.as_bytes().contains(&b'/') {
        return PathBuf::from(name);
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(is_program).unwrap_or_else(|| PathBuf::from(name))
}

fn fail(text: &str) -> u8 {
    eprintln!("pagemark-kvm: {text}");
    FAILED
}
