//! Pagemark's plugin of QEMU, which simulates, and the options that it is loaded with.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use nix::sys::memfd::{MFdFlags, memfd_create};
use pagemark_trace::preload::{self, Missing};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::command_line::split_options;

/// The option of the plugin by which it completes requests to disks.
pub const COMPLETES_REQUESTS: &str = "disks=on";

/// Finds the plugin of the package `pagemark-simulate`: in `$PAGEMARK_SIMULATE_LIBRARY`, beside
/// this program, or in `../lib/pagemark`.
///
/// # Errors
/// [`ErrorKind::NotFound`]
pub fn simulator_library() -> Result<PathBuf> {
    const NAME: &str = "libpagemark_simulate.so";
    const LIBRARY: &str = "PAGEMARK_SIMULATE_LIBRARY";
    preload::companion(NAME, LIBRARY).map_err(|missing| match missing {
        Missing::Named(path, error) => {
            Error::of(ErrorKind::NotFound, format!("find the simulator {}", path.display()), Object::None, error)
        }
        Missing::Program(error) => Error::system("find the program of this process")(error),
        Missing::Nowhere(reason) => Error::about(ErrorKind::NotFound, Object::None, reason)
            .help(format!("build the package pagemark-simulate, or name the library in {LIBRARY}")),
    })
}

/// True if the arguments load the plugin for disks.
pub fn completes_requests(arguments: &[String]) -> bool {
    arguments.iter().any(|argument| split_options(argument).contains(&COMPLETES_REQUESTS))
}

/// A file in memory, and a path by which QEMU opens it. Where this process is killed, no file
/// stays.
pub fn shared_file() -> Result<(File, PathBuf)> {
    let file = memfd_create(c"pagemark-simulate", MFdFlags::MFD_CLOEXEC);
    let file = File::from(file.map_err(|error| Error::system("make a file in memory")(error.into()))?);
    let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    Ok((file, path.into()))
}

/// A path as the value of an option.
pub fn option_word(path: &Path) -> Result<String> {
    path.to_str().map(|path| path.replace(',', ",,")).ok_or_else(|| {
        let reason = format!("{} has a name that is no text", path.display());
        Error::about(ErrorKind::Unsupported, Object::None, reason)
    })
}
