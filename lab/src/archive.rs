//! Debian's archive: packages of other suites than the host's, unpacked into the cache and not
//! installed.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Error, Result, cache, command};

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// The program that makes roots of Debian, which knows the address of Debian's archive also where
/// the host's apt does not, as on Ubuntu.
const DEBOOTSTRAP: &str = "/usr/sbin/debootstrap";

/// `$PAGEMARK_DEBIAN_ARCHIVE`, or the address of the first Debian archive that the host's apt is
/// configured with, or the one that debootstrap knows. What is missing for the last is installed.
///
/// # Errors
/// If there is none, or its keyring is missing.
pub fn address() -> Result<String> {
    let configured = || {
        let format = ["indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(LABEL)", "Created-By: Packages"];
        let targets = command::output(Command::new("apt-get").args(format), "apt-get indextargets", "").ok()?;
        first_debian(&targets)
    };
    let address = std::env::var("PAGEMARK_DEBIAN_ARCHIVE").ok().filter(|address| !address.is_empty());
    let address = address.or_else(configured).or_else(|| {
        // Where apt's lists were removed, apt does not know whose archive an address is.
        crate::packages::update().ok()?;
        configured()
    });
    if address.is_none() || !Path::new(KEYRING).exists() {
        // Without them the error below says what to do.
        let _ = crate::packages::install(&["debian-archive-keyring"]);
        if address.is_none() {
            let _ = crate::packages::install(&["debootstrap"]);
        }
    }
    let address = address.or_else(|| default_mirror(&std::fs::read_to_string(DEBOOTSTRAP).ok()?));
    address.filter(|_| Path::new(KEYRING).exists()).ok_or_else(|| {
        Error::unmet(
            format!(
                "apt is not configured with a Debian archive and debootstrap is not installed, or {KEYRING} is missing"
            ),
            "install the packages debian-archive-keyring and debootstrap, or set PAGEMARK_DEBIAN_ARCHIVE to the address \
             of a mirror of Debian",
        )
    })
}

/// The address that the script debootstrap has for Debian.
fn default_mirror(script: &str) -> Option<String> {
    let value = script.lines().find_map(|line| line.strip_prefix("DEF_MIRROR="))?;
    let address = value.trim().trim_matches('"');
    (address.contains("://") && address.contains("debian")).then(|| address.to_owned())
}

/// The first address in lines of `ADDRESS ORIGIN LABEL` whose origin and label are Debian.
fn first_debian(targets: &str) -> Option<String> {
    targets.lines().find_map(|line| match line.split_whitespace().collect::<Vec<_>>()[..] {
        [address, "Debian", "Debian"] => Some(address.to_owned()),
        _ => None,
    })
}

/// apt with a state of its own in a directory: one suite of the archive, and no package installed,
/// so that a package's download includes all libraries that it needs.
pub struct Apt {
    directory: PathBuf,
}

impl Apt {
    /// Fetches the lists of `suite` of the archive into `directory`, which it replaces. `types` are
    /// the words of sources.list: `deb`, `deb-src`.
    pub fn new(directory: &Path, archive: &str, suite: &str, types: &[&str]) -> Result<Apt> {
        cache::remove(directory)?;
        for part in ["lists/partial", "cache/archives/partial", "none"] {
            cache::create(&directory.join(part))?;
        }
        let write = |name: &str, text: String| {
            let path = directory.join(name);
            std::fs::write(&path, text).map_err(Error::file("write", &path))
        };
        write("status", String::new())?;
        let sources =
            types.iter().map(|kind| format!("{kind} [arch=amd64 signed-by={KEYRING}] {archive} {suite} main\n"));
        write("sources.list", sources.collect())?;
        write("apt.conf", configuration(directory))?;
        let apt = Apt { directory: directory.to_owned() };
        let help = "see above; this needs the network";
        command::output(apt.command("apt-get").arg("update"), &format!("fetching the lists of {suite}"), help)?;
        Ok(apt)
    }

    /// A command of apt with this state, such as `apt-get`.
    pub fn command(&self, tool: &str) -> Command {
        let mut command = Command::new(tool);
        command.env("APT_CONFIG", self.directory.join("apt.conf")).arg("-q");
        command
    }

    /// Downloads a package without its dependencies and unpacks it into `target`, with its version
    /// in the file `version` there.
    pub fn unpack(&self, package: &str, target: &Path) -> Result<()> {
        cache::create(target)?;
        let help = "see above; this needs the network";
        command::output(
            self.command("apt-get").args(["download", package]).current_dir(target),
            &format!("downloading {package}"),
            help,
        )?;
        for file in packages_in(target)? {
            unpack_file(&file, target)?;
            let version =
                command::output(Command::new("dpkg-deb").arg("-f").arg(&file).arg("Version"), "dpkg-deb", help)?;
            let path = target.join("version");
            std::fs::write(&path, version).map_err(Error::file("write", &path))?;
            std::fs::remove_file(&file).map_err(Error::file("remove", &file))?;
        }
        Ok(())
    }

    /// Downloads the source of a package as it came to Debian, without Debian's changes, and
    /// unpacks those of its files that match `files` into `target`: all if there are none.
    /// `expected` must be among them.
    pub fn unpack_source(&self, package: &str, target: &Path, files: &[&str], expected: &str) -> Result<()> {
        cache::create(target)?;
        let help = "see above; this needs the network";
        let download = ["source", "--download-only", "--tar-only", package];
        let operation = format!("downloading the source of {package}");
        command::output(self.command("apt-get").args(download).current_dir(target), &operation, help)?;
        let unpack = r#"tar -x -f "$0"_*.orig.tar.* --strip-components=1 --wildcards "$@" && rm "$0"_*"#;
        let mut shell = Command::new("sh");
        shell.args(["-c", unpack, package]).args(files).current_dir(target);
        command::output(&mut shell, &format!("unpacking the source of {package}"), help)?;
        match target.join(expected).exists() {
            true => Ok(()),
            false => Err(Error::unmet(format!("the source of {package} has no {expected}"), help)),
        }
    }

    /// Downloads a package with everything that it depends on, and unpacks it all into `target`.
    pub fn unpack_with_dependencies(&self, package: &str, target: &Path) -> Result<()> {
        cache::create(target)?;
        let arguments =
            ["install", "-y", "--download-only", "--no-install-recommends", "-o", "Debug::NoLocking=1", package];
        command::output(
            self.command("apt-get").args(arguments),
            &format!("downloading {package} and its libraries"),
            "see above; this needs the network",
        )?;
        for file in packages_in(&self.directory.join("cache/archives"))? {
            unpack_file(&file, target)?;
        }
        Ok(())
    }
}

fn packages_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(directory).map_err(Error::file("read", directory))?;
    let files = entries.flatten().map(|entry| entry.path());
    Ok(files.filter(|path| path.extension().is_some_and(|extension| extension == "deb")).collect())
}

fn unpack_file(file: &Path, target: &Path) -> Result<()> {
    let operation = format!("unpacking {}", file.display());
    command::run(Command::new("dpkg-deb").arg("-x").arg(file).arg(target), &operation, "check the space on the disk")
}

fn configuration(directory: &Path) -> String {
    let at = directory.display();
    format!(
        r#"Dir::Etc::sourcelist "{at}/sources.list";
Dir::Etc::sourceparts "{at}/none";
Dir::Etc::preferences "{at}/none/preferences";
Dir::Etc::preferencesparts "{at}/none";
Dir::State "{at}";
Dir::State::lists "{at}/lists";
Dir::State::status "{at}/status";
Dir::Cache "{at}/cache";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
APT::Sandbox::User "";
APT::Architecture "amd64";
APT::Architectures {{ "amd64"; }};
Acquire::Languages "none";
Acquire::Retries "3";
"#
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_is_debians_own() {
        let targets = "http://other.example/ Docker Docker CE\nhttp://security.example/ Debian Debian-Security\n\
                       http://deb.example/debian Debian Debian\nhttp://second.example/ Debian Debian\n";
        assert_eq!(first_debian(targets).as_deref(), Some("http://deb.example/debian"));
        assert_eq!(first_debian("http://other.example/ Ubuntu Ubuntu\n"), None);
    }

    #[test]
    fn debootstrap_knows_an_archive() {
        let script = "#!/bin/sh\nset -e\nDEF_MIRROR=\"http://deb.example/debian\"\nMIRRORS=\"$DEF_MIRROR\"\n";
        assert_eq!(default_mirror(script).as_deref(), Some("http://deb.example/debian"));
        assert_eq!(default_mirror("DEF_MIRROR=\"http://archive.example/ubuntu\"\n"), None);
        assert_eq!(default_mirror("DEF_MIRROR=\"$OTHER\"\n"), None);
    }
}
