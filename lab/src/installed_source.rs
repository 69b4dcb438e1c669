//! The source of a package of Debian that is installed, of the same version, in the cache.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::archive::{self, Apt};
use crate::{Result, cache, command, progress, setup};

/// The source of an installed package.
pub struct InstalledSource {
    /// The name of the source package, and of its directory in the cache.
    pub name: &'static str,
    /// What people call it.
    pub title: &'static str,
    /// The package that is installed.
    pub package: &'static str,
    /// A file that the source has.
    pub has: &'static str,
    /// A file that is there once the source is as the tests need it.
    pub complete: &'static str,
}

impl InstalledSource {
    /// The directory with the source. If it is not there, the source is fetched, and `prepare` gets
    /// it in a directory, with one for other files.
    ///
    /// # Errors
    /// If it cannot be fetched; those of `prepare`.
    pub fn directory(&self, prepare: impl FnOnce(&Path, &Path) -> Result<()>) -> Result<PathBuf> {
        let InstalledSource { name, title, package, has, complete } = self;
        let query = ["-W", "-f", "${source:Version}", package];
        let help = format!("reinstall {package}");
        let version = command::output(Command::new("dpkg-query").args(query), "dpkg-query", &help)?;
        let directory = cache::project().join(format!("{name}-{}", version.replace(':', "-")));
        if directory.join(complete).is_file() {
            return Ok(directory);
        }
        let archive = archive::address()?;
        progress!("fetching the source of {title} {version} at {archive}");
        let release = "sed -n 's/^VERSION_CODENAME=//p' /etc/os-release | tr -d '\\n'";
        let release = command::output(Command::new("sh").args(["-c", release]), "reading /etc/os-release", "")?;
        cache::create(&cache::project())?;
        setup::with_work_directory(&cache::project(), |work| {
            let unpacked = work.join("source");
            let apt = Apt::new(&work.join("apt"), &archive, &release, &["deb-src"])?;
            apt.unpack_source(name, &unpacked, &[], has)?;
            prepare(&unpacked, work)?;
            setup::replace(&unpacked, &directory)
        })?;
        Ok(directory)
    }
}
