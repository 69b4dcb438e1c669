//! The programs that run in the machines of the lab: compiled from C, or found among cargo's test
//! binaries.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::kernel::{self, Kernel};
use crate::{Error, Result, cache, command, kernel_build, source_root};

/// The tests of the lab that are written in C, in the directory that has them.
pub struct CPrograms {
    directory: PathBuf,
}

impl CPrograms {
    /// Compiles them into `directory`.
    ///
    /// # Errors
    /// If the kernel's source cannot be fetched, or a compiler fails.
    pub fn build(directory: &Path) -> Result<CPrograms> {
        let guest = source_root().join("lab/guest");
        for name in ["oracle", "hostile", "users", "combined"] {
            compile(&guest.join(format!("{name}.c")), &directory.join(name), &["-pthread"])?;
        }
        // The selftests of the kernel that the patches add, and what they need of the kernel's source.
        let source = directory.join("source");
        cache::create(&source)?;
        let mut tar = Command::new("tar");
        tar.arg("-C").arg(&source).args(["--strip-components=1", "-xf"]).arg(kernel_build::source()?);
        tar.args(["--wildcards", "*/tools/testing/selftests/kselftest.h", "*/tools/include/uapi/linux/fs.h"]);
        tar.arg("*/tools/testing/selftests/mm/vm_util.[ch]");
        command::output(&mut tar, "unpacking headers of the kernel's source", "check the space on the disk")?;
        let fix = kernel::patches_in(&source_root().join("kernel/huge-page-fix"))?;
        for patch in Kernel::Ldt.patches()?.into_iter().chain(fix) {
            let mut apply = Command::new("git");
            apply.arg("-C").arg(&source).args(["apply", "--include=tools/include/*"]);
            apply.args([
                "--include=tools/testing/selftests/mm/lwd.c",
                "--include=tools/testing/selftests/mm/madv_free.c",
            ]);
            apply.arg(&patch);
            // Otherwise git looks for a repository above, and skips what is outside of its work tree.
            apply.env("GIT_CEILING_DIRECTORIES", directory.canonicalize().unwrap_or_else(|_| directory.to_owned()));
            command::output(&mut apply, &format!("applying {}", patch.display()), "adapt the series to the source")?;
        }
        let include = format!("-isystem{}", source.join("tools/include/uapi").display());
        let tests = source.join("tools/testing/selftests/mm");
        compile(&tests.join("lwd.c"), &directory.join("ldt"), &[&include])?;
        let utilities = tests.join("vm_util.c").display().to_string();
        compile(&tests.join("madv_free.c"), &directory.join("madv_free"), &[&include, &utilities])?;
        Ok(CPrograms { directory: directory.to_owned() })
    }

    /// The program that compares a copy made from a tracker's reports with the memory of a trackee.
    pub fn oracle(&self) -> String {
        self.directory.join("oracle").display().to_string()
    }

    /// The program that misuses the interfaces.
    pub fn hostile(&self) -> String {
        self.directory.join("hostile").display().to_string()
    }

    /// The program whose trackers come, pass their files on, and go, while a model knows whether
    /// tracking is on.
    pub fn users(&self) -> String {
        self.directory.join("users").display().to_string()
    }

    /// The program to whose memory much happens at the same time, for a tracker of the crate.
    pub fn combined(&self) -> String {
        self.directory.join("combined").display().to_string()
    }

    /// The selftest that finds what was written to huge pages and is lost, without the fix.
    pub fn madv_free(&self) -> String {
        self.directory.join("madv_free").display().to_string()
    }

    /// The series' selftest.
    pub fn selftest(&self) -> String {
        self.directory.join("ldt").display().to_string()
    }
}

fn compile(source: &Path, program: &Path, options: &[&str]) -> Result<()> {
    let mut gcc = Command::new("gcc");
    gcc.args(["-O2", "-Wall", "-static"]).args(options).arg("-o").arg(program).arg(source);
    command::output(&mut gcc, &format!("compiling {}", source.display()), "see the errors above").map(|_| ())
}

/// A test binary of the workspace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestBinary {
    /// The directory of the crate.
    pub package: PathBuf,
    /// The target that it tests: a library, a program, or a file of tests.
    pub target: String,
    /// The program.
    pub path: PathBuf,
}

impl TestBinary {
    /// The names of the crate and of the target.
    pub fn name(&self) -> String {
        format!("{} {}", self.crate_name(), self.target)
    }

    fn crate_name(&self) -> std::borrow::Cow<'_, str> {
        self.package.file_name().unwrap_or_default().to_string_lossy()
    }
}

/// The test binaries of the workspace.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TestBinaries {
    binaries: Vec<TestBinary>,
}

impl TestBinaries {
    /// Builds them: all, so that the dependencies are built as `cargo test --workspace` builds
    /// them.
    ///
    /// # Errors
    /// If cargo fails.
    pub fn build() -> Result<TestBinaries> {
        let mut cargo = Command::new("cargo");
        cargo.args(["test", "--workspace", "--locked", "--no-run", "--message-format=json"]);
        cargo.current_dir(source_root());
        Ok(TestBinaries::parse(&command::output(&mut cargo, "building the tests", "see the errors above")?))
    }

    /// Those in cargo's messages.
    pub fn parse(messages: &str) -> TestBinaries {
        let binary = |line: &str| {
            let message: serde_json::Value = serde_json::from_str(line).ok()?;
            if message["profile"]["test"] != true {
                return None;
            }
            let package = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
            let target = message["target"]["name"].as_str()?.to_owned();
            Some(TestBinary { package, target, path: PathBuf::from(message["executable"].as_str()?) })
        };
        TestBinaries { binaries: messages.lines().filter_map(binary).collect() }
    }

    /// The binary of a target, such as the library `pagemark`, of the crate in a directory of that
    /// name.
    ///
    /// # Errors
    /// If the crate has no such target.
    pub fn find(&self, crate_name: &str, target: &str) -> Result<&TestBinary> {
        let found = self.binaries.iter().find(|binary| binary.crate_name() == crate_name && binary.target == target);
        found.ok_or_else(|| {
            Error::unmet(format!("the crate {crate_name} has no tests {target}"), "correct its name in lab/src")
        })
    }

    /// A program of the workspace, which the tests use.
    pub fn program(&self, name: &str) -> PathBuf {
        self.directory().unwrap_or(Path::new("")).join(name)
    }

    /// A library of the workspace. Cargo leaves it in one of two places, where an older one may be.
    pub fn library(&self, name: &str) -> PathBuf {
        let places = [self.program(name), self.program("deps").join(name)];
        let changed = |place: &PathBuf| place.metadata().and_then(|found| found.modified()).ok();
        places.into_iter().max_by_key(changed).unwrap_or_default()
    }

    /// The directory of the build, which the tests use.
    pub fn directory(&self) -> Option<&Path> {
        self.binaries.first().and_then(|binary| binary.path.parent()?.parent())
    }

    /// All of them.
    pub fn all(&self) -> &[TestBinary] {
        &self.binaries
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MESSAGES: &str = r#"
{"reason":"compiler-artifact","manifest_path":"/s/crates/libc/Cargo.toml","target":{"name":"libc"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","manifest_path":"/s/crates/pagemark/Cargo.toml","target":{"name":"pagemark"},"profile":{"test":true},"executable":"/t/debug/deps/pagemark-1"}
{"reason":"compiler-artifact","manifest_path":"/s/crates/pagemark-cli/Cargo.toml","target":{"name":"pagemark"},"profile":{"test":true},"executable":"/t/debug/deps/pagemark-2"}
{"reason":"compiler-artifact","manifest_path":"/s/crates/pagemark-cli/Cargo.toml","target":{"name":"pagemark"},"profile":{"test":false},"executable":"/t/debug/pagemark"}
{"reason":"build-finished","success":true}
"#;

    #[test]
    fn test_binaries_are_found_by_crate_and_target() {
        let binaries = TestBinaries::parse(MESSAGES);
        assert_eq!(binaries.find("pagemark", "pagemark").unwrap().path, Path::new("/t/debug/deps/pagemark-1"));
        assert_eq!(binaries.find("pagemark-cli", "pagemark").unwrap().path, Path::new("/t/debug/deps/pagemark-2"));
        assert!(binaries.find("pagemark", "region").is_err());
        assert_eq!(binaries.directory(), Some(Path::new("/t/debug")));
    }
}
