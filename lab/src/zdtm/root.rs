//! The root directory of a test that has namespaces of its own.
//!
//! It is the directory of all tests, with what their programs need in it: libraries, and a file
//! system with devices, which is mounted on `/dev` and comes from outside.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::catalog::{Flavor, Test};
use crate::{Error, Result, command};

/// Its directories.
const DIRECTORIES: [&str; 10] = ["bin", "sbin", "etc", "lib", "lib64", "dev", "tmp", "usr", "proc", "run"];
/// Those that are also below `usr`.
const LINKS: [&str; 4] = ["bin", "sbin", "lib", "lib64"];
/// Directories of devices.
const DEVICE_DIRECTORIES: [&str; 2] = ["pts", "net"];
/// Character devices, with their numbers.
const DEVICES: [(&str, u32, u32); 4] = [("tty", 5, 0), ("null", 1, 3), ("net/tun", 10, 200), ("autofs", 10, 235)];
/// By this name CRIU knows the file system of the devices.
const EXTERNAL: &str = "ZDTM_DEV";

/// A root directory in the mount namespace of a trial.
pub struct Root {
    directory: PathBuf,
    devices: PathBuf,
}

impl Root {
    /// Makes the root directory of a test of `tree` within `work`.
    ///
    /// # Errors
    /// A mount is not permitted, or a program that the test needs is not there.
    pub fn make(test: &Test, tree: &Path, work: &Path) -> Result<Root> {
        let root = Root { directory: work.join("root"), devices: work.join("dev") };
        for directory in DIRECTORIES {
            make_directory(&tree.join(directory))?;
        }
        for link in LINKS {
            let path = tree.join("usr").join(link);
            if path.symlink_metadata().is_err() {
                symlink(format!("../{link}"), &path).map_err(Error::file("make", &path))?;
            }
        }
        copy_libraries(&tree.join("zdtm").join(&test.kind).join(&test.program), tree)?;
        for dependency in test.words("deps") {
            let names: Vec<&Path> = dependency.split('|').map(Path::new).collect();
            let program = names.iter().find(|path| path.exists()).ok_or_else(|| {
                Error::unmet(format!("there is no {dependency}, which the test {} needs", test.name()), "install it")
            })?;
            copy(program, tree)?;
            copy_libraries(program, tree)?;
        }
        make_directory(&root.directory)?;
        make_directory(&root.devices)?;
        run(Command::new("mount").args(["-t", "tmpfs", "-o", "mode=0777", "criu-test-dev"]).arg(&root.devices))?;
        for directory in DEVICE_DIRECTORIES {
            make_directory(&root.devices.join(directory))?;
        }
        for (name, major, minor) in DEVICES {
            let path = root.devices.join(name);
            let numbers = [major.to_string(), minor.to_string()];
            run(Command::new("mknod").args(["-m", "666"]).arg(path).arg("c").args(numbers))?;
        }
        run(Command::new("mount").args(["--make-private", "--bind"]).arg(tree).arg(&root.directory))?;
        if test.flavor == Flavor::UserNamespace {
            // Root there is another user here. CRIU makes a directory below it.
            for directory in [tree.to_owned(), tree.join("zdtm").join(&test.kind)] {
                set_mode(&directory, 0o777)?;
            }
        } else {
            // As in a container: root alone can exchange what is in the root directory.
            set_mode(tree, 0o755)?;
        }
        Ok(root)
    }

    /// The command that starts a test, in this directory and with its variables.
    pub fn prepare(&self, test: &Test, start: &mut Command) {
        start.current_dir(&self.directory).env("ZDTM_NEWNS", "1");
        start.env("ZDTM_ROOT", &self.directory).env("ZDTM_DEV", &self.devices);
        start.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        if let Some(bind) = test.words("bind").first() {
            start.env("ZDTM_BIND", bind);
        }
        if test.flavor == Flavor::UserNamespace {
            start.env("ZDTM_USERNS", "1");
        }
    }

    /// What CRIU has to know of it to save a test.
    pub fn dump_options(&self, dump: &mut Command) {
        dump.arg("--root").arg(&self.directory).args(["--external", &format!("mnt[/dev]:{EXTERNAL}")]);
    }

    /// What CRIU has to know of it to restore a test.
    pub fn restore_options(&self, restore: &mut Command) {
        let devices = format!("mnt[{EXTERNAL}]:{}", self.devices.display());
        restore.arg("--root").arg(&self.directory).args(["--external", &devices]);
    }
}

fn make_directory(path: &Path) -> Result<()> {
    crate::cache::create(path)?;
    set_mode(path, 0o777)
}

fn set_mode(path: &Path, mode: u32) -> Result<()> {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).map_err(Error::file("set the mode of", path))
}

fn run(program: &mut Command) -> Result<()> {
    let what = format!("{:?}", program.get_program());
    command::output(program, &what, "it needs root").map(drop)
}

/// Copies the shared libraries of a program to where the program finds them in the root directory.
fn copy_libraries(program: &Path, tree: &Path) -> Result<()> {
    let mut list = Command::new("ldd");
    // It fails for a program without libraries, such as a script.
    let output = list.arg(program).output().map_err(Error::file("list the libraries of", program))?;
    let libraries = libraries(&String::from_utf8_lossy(&output.stdout));
    libraries.iter().try_for_each(|library| copy(library, tree))
}

/// The paths in the output of `ldd`.
fn libraries(output: &str) -> Vec<PathBuf> {
    let paths = output.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    paths.map(PathBuf::from).collect()
}

fn copy(file: &Path, tree: &Path) -> Result<()> {
    let path = tree.join(file.strip_prefix("/").unwrap_or(file));
    if path.exists() {
        return Ok(());
    }
    if let Some(directory) = path.parent() {
        crate::cache::create(directory)?;
    }
    std::fs::copy(file, &path).map(drop).map_err(Error::file("copy", file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_of_a_program() {
        let output = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n\tlibabsent.so => not found\n";
        assert_eq!(
            libraries(output),
            [Path::new("/lib/x86_64-linux-gnu/libc.so.6"), Path::new("/lib64/ld-linux-x86-64.so.2")]
        );
        assert!(libraries("\tnot a dynamic executable\n").is_empty());
    }
}
