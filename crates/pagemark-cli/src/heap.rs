//! `--heap`: a program that knows nothing of it has the heap whose objects are tracked by parts of
//! pages.

use std::ffi::{CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use clap::Args;
use pagemark_kvm::image::Image;
use pagemark_trace::preload;

use crate::failure::Failure;

/// The allocator of the program.
#[derive(Args, Debug, Clone)]
pub struct HeapOptions {
    /// Give the program, in place of its allocator, a heap that tells writes to N parts of a page
    /// apart; PAGEMARK_HEAP_GIB is its capacity [default: 64]
    #[arg(long, value_name = "N", value_parser = ["1", "2", "4", "8"])]
    heap: Option<String>,
}

impl HeapOptions {
    /// The variables by which the program has the heap; none if it is to have its own allocator.
    ///
    /// # Errors
    /// There is no library, or a program of that kind does not load it.
    pub fn variables(&self, program: &OsStr) -> Result<Vec<(&'static str, OsString)>, Failure> {
        let Some(parts) = self.heap.as_ref().and_then(|parts| parts.parse().ok()) else { return Ok(Vec::new()) };
        check(program)?;
        let variables = preload::variables(parts);
        let mut variables = variables.map_err(|error| Failure::of("the program cannot have the heap", error))?;
        variables.push(("PAGEMARK_HEAP_TRACKED", "1".into()));
        Ok(variables)
    }
}

/// Checks that the dynamic linker loads libraries first for this program. Whatever else is wrong
/// with it, starting it reports.
fn check(program: &OsStr) -> Result<(), Failure> {
    let Some(path) = find(program) else { return Ok(()) };
    let Ok(name) = CString::new(path.as_os_str().as_bytes()) else { return Ok(()) };
    let reason = match Image::open(&name, &[]) {
        Ok(image) if image.linker.is_none() => format!("{} is linked statically", image.path.display()),
        Err(refused) if refused.errno == libc::EPERM && refused.lacking.is_some() => {
            "it has the rights of its file's owner, and such programs are started without the heap".to_owned()
        }
        Err(refused) => match refused.lacking {
            Some(lacking) => format!("{lacking} is not possible with it"),
            None => return Ok(()),
        },
        Ok(_) => return Ok(()),
    };
    let operation = format!("{} cannot have the heap", path.display());
    Err(Failure::new(operation, reason).help("run it without --heap").status(126))
}

/// The file that a program's name stands for. None if there is none.
fn find(program: &OsStr) -> Option<PathBuf> {
    if program.as_bytes().contains(&b'/') {
        return Some(Path::new(program).to_owned());
    }
    let directories = std::env::var_os("PATH")?;
    let mut paths = std::env::split_paths(&directories).map(|directory| directory.join(program));
    paths.find(|path| nix::unistd::access(path, nix::unistd::AccessFlags::X_OK).is_ok() && path.is_file())
}
