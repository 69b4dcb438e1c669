//! The heap of `pagemark-heap` in place of a program's allocator: a library that the program's
//! dynamic linker loads first (`LD_PRELOAD`).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use pagemark_linux::elf;

use crate::error::{Error, ErrorKind, Object, Result};

/// The name of the library, which the package `pagemark-malloc` builds.
const NAME: &str = "libpagemark_malloc.so";

/// Names the library, before the other places are looked at.
const LIBRARY: &str = "PAGEMARK_HEAP_LIBRARY";

/// The variable that names the libraries to preload.
pub const PRELOAD: &str = "LD_PRELOAD";

/// Finds the library: in `$PAGEMARK_HEAP_LIBRARY`, beside this program, or in `../lib/pagemark`.
///
/// # Errors
/// [`ErrorKind::NoHeap`].
fn library() -> Result<PathBuf> {
    companion(NAME, LIBRARY).map_err(|missing| match missing {
        Missing::Named(path, source) => Error::of(ErrorKind::NoHeap, "find the heap", Object::File(path), source),
        Missing::Program(source) => Error::system("find the program of", Object::None)(source),
        Missing::Nowhere(reason) => Error::about(ErrorKind::NoHeap, Object::None, reason)
            .help(format!("build the package pagemark-malloc, or name the library in {LIBRARY}")),
    })
}

/// Why a file that comes with this program is not found.
#[derive(Debug)]
pub enum Missing {
    /// The one that the variable names is not there.
    Named(PathBuf, io::Error),
    /// The path of this program is not known.
    Program(io::Error),
    /// It is in none of the places; the text says which.
    Nowhere(String),
}

/// Finds a file that comes with this program: the one that the environment variable names, beside
/// this program, or in `../lib/pagemark`.
///
/// # Errors
/// [`Missing`].
pub fn companion(name: &str, variable: &str) -> std::result::Result<PathBuf, Missing> {
    if let Some(path) = std::env::var_os(variable).filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        return path.canonicalize().map_err(|error| Missing::Named(path, error));
    }
    let program = std::env::current_exe().map_err(Missing::Program)?;
    beside(&program, name).ok_or_else(|| {
        Missing::Nowhere(format!("{name} is neither beside {} nor in ../lib/pagemark", program.display()))
    })
}

/// Finds a file that comes with `program`: beside it, or in `../lib/pagemark`.
fn beside(program: &Path, name: &str) -> Option<PathBuf> {
    // `cargo test` leaves it in the second place, beside an older one of `cargo build`.
    let places =
        [name, &format!("deps/{name}"), &format!("../lib/pagemark/{name}")].map(|at| program.with_file_name(at));
    let changed = |place: &PathBuf| place.metadata().and_then(|found| found.modified()).ok();
    places.into_iter().filter(|place| place.exists()).max_by_key(changed)
}

/// Why a library cannot be preloaded.
#[derive(Debug)]
pub enum Unloadable {
    /// Its path has a blank or a colon, which separate libraries.
    Name,
    /// It cannot be read.
    Unreadable(io::Error),
    /// It is not a library of x86-64.
    NoLibrary,
}

/// The value of [`PRELOAD`] by which a program gets a library. What this process has preloaded is
/// preloaded after it.
///
/// # Errors
/// [`Unloadable`]. The dynamic linker would only warn, and start the program without the library.
pub fn ld_preload(library: PathBuf) -> std::result::Result<OsString, Unloadable> {
    if library.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b' ' | b':')) {
        return Err(Unloadable::Name);
    }
    if !File::open(&library).and_then(|file| elf::is_library(&file)).map_err(Unloadable::Unreadable)? {
        return Err(Unloadable::NoLibrary);
    }
    let mut preload = library.into_os_string();
    if let Some(others) = std::env::var_os(PRELOAD).filter(|others| !others.is_empty()) {
        preload.push(OsStr::new(":"));
        preload.push(others);
    }
    Ok(preload)
}

/// The variables by which a program has a heap with `parts` parts a page.
///
/// # Errors
/// [`ErrorKind::NoHeap`]: there is no library, or it cannot be preloaded.
pub fn variables(parts: usize) -> Result<Vec<(&'static str, OsString)>> {
    let library = library()?;
    let object = || Object::File(library.clone());
    let preload = ld_preload(library.clone()).map_err(|reason| match reason {
        Unloadable::Name => {
            let reason = "cannot be preloaded: its path has a blank or a colon";
            Error::about(ErrorKind::NoHeap, object(), reason).help(format!("name a copy elsewhere in {LIBRARY}"))
        }
        Unloadable::Unreadable(source) => Error::of(ErrorKind::NoHeap, "read", object(), source),
        Unloadable::NoLibrary => Error::about(ErrorKind::NoHeap, object(), "is not a library of x86-64"),
    })?;
    Ok(vec![(PRELOAD, preload), ("PAGEMARK_HEAP_PARTS", parts.to_string().into())])
}
