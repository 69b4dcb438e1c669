//! Brings a Debian-like host, which has only Rust and Python, to the state that building and
//! testing Pagemark needs. Does nothing, quickly, where everything is there.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

use crate::archive::{self, Apt};
use crate::version::is_at_least;
use crate::{Error, Result, cache, command, packages, progress, source_root};

/// Packages of the host's own distribution.
const PACKAGES: [&str; 24] = [
    "bochs",
    "bochs-term",
    "build-essential",
    "busybox-static",
    "ca-certificates",
    "cmake",
    "cpio",
    "e2fsprogs",
    "gdb",
    "iproute2",
    "iptables",
    "kmod",
    "libsigsegv2",
    "libtokyocabinet9",
    "musl-tools",
    "pkg-config",
    "python3",
    "python3-venv",
    "qemu-system-x86",
    "qemu-utils",
    "redis-server",
    "redis-tools",
    "sqlite3",
    "valgrind",
];
/// Servers and other programs that only the full tests checkpoint, or run in a machine.
const PROGRAMS: [&str; 5] = ["default-jdk-headless", "ffmpeg", "nodejs", "postgresql", "postgresql-contrib"];
/// The oldest CRIU that Pagemark works with.
const CRIU: &str = "4.2";
const CBINDGEN: &str = "0.29.4";
const SEMVER_CHECKS: &str = "0.51.0";
const MDBOOK: &str = "0.4.52";

/// A part of the set-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Packages of the distribution. Needs root, or sudo.
    Packages,
    /// Servers and other programs that only the full tests need. Needs root, or sudo.
    Programs,
    /// CRIU, and the description of its images.
    Criu,
    /// The parts of the Rust toolchain.
    Rust,
    /// What fuzzing needs: a nightly toolchain.
    Fuzz,
    /// What only the full tests need of the nightly toolchain: Miri, and the sources of the
    /// standard library.
    Miri,
    /// What makes the C header.
    C,
    /// Rust's standard library for musl, for the static C library.
    Musl,
    /// What compares the interfaces of the libraries with those of the last release.
    Semver,
    /// What makes the book of the documents.
    Book,
    /// The environment in which the Python package is built and tested.
    Python,
    /// What `make demo` needs: packages and CRIU.
    Demo,
    /// Everything.
    All,
}

impl Part {
    const NAMED: [(&'static str, Part); 13] = [
        ("packages", Part::Packages),
        ("programs", Part::Programs),
        ("criu", Part::Criu),
        ("rust", Part::Rust),
        ("fuzz", Part::Fuzz),
        ("miri", Part::Miri),
        ("c", Part::C),
        ("musl", Part::Musl),
        ("semver", Part::Semver),
        ("book", Part::Book),
        ("python", Part::Python),
        ("demo", Part::Demo),
        ("all", Part::All),
    ];
}

impl FromStr for Part {
    type Err = Error;

    fn from_str(name: &str) -> Result<Part> {
        Part::NAMED.iter().find(|(known, _)| *known == name).map(|&(_, part)| part).ok_or_else(|| {
            let names = Part::NAMED.map(|(name, _)| name).join(", ");
            Error::unmet(format!("no part of the set-up has the name {name}"), format!("use one of: {names}"))
        })
    }
}

/// Sets a part up.
///
/// # Errors
/// If something that tests cannot do without cannot be had. What only some tests need is reported
/// and left out; these tests are skipped then.
pub fn set_up(part: Part) -> Result<()> {
    match part {
        Part::Packages => packages::install(&PACKAGES),
        Part::Programs => packages::install(&PROGRAMS),
        Part::Criu => {
            criu()?;
            optional("the description of CRIU's images", "Pagemark's is not compared with it", criu_images());
            Ok(())
        }
        Part::Rust => rust(),
        Part::Fuzz => {
            optional("nightly toolchain with cargo-fuzz", "fuzzing is skipped", fuzzing());
            Ok(())
        }
        Part::Miri => {
            optional("Miri", "neither Miri nor the sanitizers run", miri());
            Ok(())
        }
        Part::C => {
            optional("cbindgen", "the C header is not compared with the sources", cbindgen());
            Ok(())
        }
        Part::Musl => {
            optional("Rust for musl", "the static library for musl is not tested", musl());
            Ok(())
        }
        Part::Semver => {
            optional(
                "cargo-semver-checks",
                "interfaces are not compared with those of the last release",
                semver_checks(),
            );
            Ok(())
        }
        Part::Book => {
            optional("mdBook", "the book of the documents is not built", mdbook());
            Ok(())
        }
        Part::Python => {
            optional("a Python environment (Python 3.9 or later)", "the Python package is not tested", python());
            Ok(())
        }
        Part::Demo => {
            set_up(Part::Packages)?;
            criu()
        }
        Part::All => [Part::Packages, Part::Criu, Part::Rust, Part::Fuzz, Part::C, Part::Book, Part::Python]
            .into_iter()
            .try_for_each(set_up),
    }
}

fn optional(object: &str, consequence: &str, result: Result<()>) {
    if let Err(error) = result {
        progress!("{error}");
        progress!("there is no {object}: {consequence}");
    }
}

fn criu() -> Result<()> {
    let directory = cache::project().join("criu");
    // Also for a CRIU that an earlier version has set up.
    if directory.join("root").exists() {
        write_criu_wrapper(&directory)?;
    }
    if find_criu().is_none() {
        fetch_criu(&directory)?;
    }
    let Some((path, version)) = find_criu() else {
        return Err(Error::unmet(
            "the fetched CRIU does not start",
            format!("remove {}, then repeat the command", directory.display()),
        ));
    };
    if command::is_root() {
        command::output(
            Command::new(&path).arg("check"),
            &format!("{} check", path.display()),
            "CRIU needs root in the initial namespaces and CONFIG_CHECKPOINT_RESTORE; \
             memory-only checkpoints work without",
        )?;
    }
    progress!("CRIU {version}: {}", path.display());
    Ok(())
}

/// The path of the CRIU to use.
///
/// # Errors
/// If there is none.
pub fn criu_path() -> Result<PathBuf> {
    let found = find_criu().map(|(path, _)| path);
    found.ok_or_else(|| Error::unmet(format!("there is no CRIU {CRIU} or later"), "install it: make criu"))
}

/// The CRIU to use, in the order in which Pagemark itself looks for it, and its version.
fn find_criu() -> Option<(PathBuf, String)> {
    let given = std::env::var_os("PAGEMARK_CRIU").filter(|path| !path.is_empty()).map(PathBuf::from);
    let candidates = [given, command::find_in_path("criu"), Some(cache::project().join("criu/criu"))];
    candidates.into_iter().flatten().find_map(|path| {
        let version = criu_version(&path)?;
        is_at_least(&version, CRIU).then_some((path, version))
    })
}

fn criu_version(path: &Path) -> Option<String> {
    let output = command::output(Command::new(path).arg("--version"), "criu --version", "").ok()?;
    version_line(&output)
}

/// The version in what `criu --version` prints.
fn version_line(output: &str) -> Option<String> {
    output.lines().find_map(|line| line.strip_prefix("Version:")).map(|version| version.trim().to_owned())
}

/// Fetches Debian's unstable CRIU with all its libraries, down to the C library. It lies beside the
/// system and not in it, and is started through its own dynamic loader.
fn fetch_criu(directory: &Path) -> Result<()> {
    let help = format!("build CRIU {CRIU} or later and set PAGEMARK_CRIU to its path");
    if std::env::consts::ARCH != "x86_64" {
        let problem = format!("the host has no CRIU {CRIU} or later, and the packaged one is fetched for amd64 only");
        return Err(Error::unmet(problem, help));
    }
    let archive = archive::address()?;
    progress!("fetching CRIU from Debian unstable at {archive} (less than a minute)");
    with_work_directory(directory, |work| {
        Apt::new(&work.join("apt"), &archive, "unstable", &["deb"])?
            .unpack_with_dependencies("criu", &work.join("root"))?;
        write_criu_wrapper(work)?;
        if !criu_version(&work.join("criu")).is_some_and(|version| is_at_least(&version, CRIU)) {
            let problem = format!("the suite unstable of {archive} has no CRIU {CRIU} or later that starts here");
            return Err(Error::unmet(problem, help));
        }
        replace(&work.join("root"), &directory.join("root"))
    })?;
    write_criu_wrapper(directory)
}

/// The command that starts the CRIU below `directory`. Its plugins would be another version's, and
/// without a directory of plugins every dump fails.
fn write_criu_wrapper(directory: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    cache::create(&directory.join("no-plugins"))?;
    let (new, wrapper) = (directory.join("criu.new"), directory.join("criu"));
    std::fs::write(&new, include_str!("criu-wrapper.sh")).map_err(Error::file("write", &new))?;
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).map_err(Error::file("change", &new))?;
    std::fs::rename(&new, &wrapper).map_err(Error::file("rename", &new))
}

/// The messages of CRIU's images (*.proto), from Debian's source package: a test compares
/// Pagemark's declarations with them.
fn criu_images() -> Result<()> {
    let directory = cache::project().join("criu");
    let images = directory.join("images");
    if images.join("pagemap.proto").exists() {
        return Ok(());
    }
    let archive = archive::address()?;
    progress!("fetching the description of CRIU's images from Debian unstable at {archive}");
    with_work_directory(&directory, |work| {
        let apt = Apt::new(&work.join("apt"), &archive, "unstable", &["deb-src"])?;
        let source = work.join("source");
        apt.unpack_source("criu", &source, &["*/images/*.proto"], "images/pagemap.proto")?;
        replace(&source.join("images"), &images)
    })
}

/// Has `work` make something in a directory in `parent` that is removed afterwards.
pub(crate) fn with_work_directory(parent: &Path, work: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let directory = parent.join(format!("work.{}", std::process::id()));
    cache::remove(&directory)?;
    cache::create(&directory)?;
    let result = work(&directory);
    cache::remove(&directory)?;
    result
}

/// Moves `new` to `target`, which it replaces.
pub(crate) fn replace(new: &Path, target: &Path) -> Result<()> {
    cache::remove(target)?;
    std::fs::rename(new, target).map_err(Error::file("rename", new))
}

fn rust() -> Result<()> {
    for (component, subcommand) in [("clippy", "clippy"), ("rustfmt", "fmt")] {
        if !command::succeeds(Command::new("cargo").args([subcommand, "--version"])) {
            let help = format!("install the toolchain's {component}");
            let operation = format!("rustup component add {component}");
            command::run(Command::new("rustup").args(["component", "add", component]), &operation, &help)?;
        }
    }
    Ok(())
}

fn fuzzing() -> Result<()> {
    nightly_toolchain()?;
    if command::succeeds(Command::new("cargo").args(["fuzz", "--version"])) {
        return Ok(());
    }
    progress!("installing cargo-fuzz (about a minute)");
    install_tool(&["cargo-fuzz"])
}

fn miri() -> Result<()> {
    nightly_toolchain()?;
    // A component that is there already is no error.
    let add = ["component", "add", "--toolchain", "nightly", "miri", "rust-src"];
    command::run(Command::new("rustup").args(add), "rustup component add miri rust-src", "see above")
}

fn nightly_toolchain() -> Result<()> {
    let toolchains = command::output(Command::new("rustup").args(["toolchain", "list"]), "rustup", "install rustup")?;
    if !toolchains.lines().any(|line| line.starts_with("nightly")) {
        progress!("fetching a nightly toolchain (about a minute)");
        let install = ["toolchain", "install", "nightly", "--profile", "minimal"];
        command::run(Command::new("rustup").args(install), "rustup toolchain install nightly", "see above")?;
    }
    Ok(())
}

fn cbindgen() -> Result<()> {
    pinned_tool("cbindgen", CBINDGEN, "cbindgen", "a minute", &[])
}

fn musl() -> Result<()> {
    const TARGET: &str = "x86_64-unknown-linux-musl";
    let libraries = ["--print", "target-libdir", "--target", TARGET];
    let libraries = command::output(Command::new("rustc").args(libraries), "rustc", "install Rust")?;
    if Path::new(libraries.trim()).exists() {
        return Ok(());
    }
    progress!("fetching Rust's standard library for musl (some seconds)");
    let operation = format!("rustup target add {TARGET}");
    command::run(Command::new("rustup").args(["target", "add", TARGET]), &operation, "install rustup")
}

fn semver_checks() -> Result<()> {
    pinned_tool("cargo-semver-checks", SEMVER_CHECKS, "semver", "ten minutes", &[])
}

/// With the search, and without its server.
fn mdbook() -> Result<()> {
    let features = ["--no-default-features", "--features", "search"];
    pinned_tool("mdbook", MDBOOK, "mdbook", "a minute", &features)
}

/// Installs a version of a tool into a directory of the cache, unless it is there.
fn pinned_tool(tool: &str, version: &str, directory: &str, time: &str, features: &[&str]) -> Result<()> {
    let root = cache::project().join(directory);
    let present = command::output(Command::new(root.join("bin").join(tool)).arg("--version"), tool, "");
    if present.is_ok_and(|present| is_version(&present, tool, version)) {
        return Ok(());
    }
    progress!("installing {tool} {version} (about {time})");
    let root = root.display().to_string();
    install_tool(&[&[tool, "--version", version, "--root", &root], features].concat())
}

/// Whether a tool says that it has a version: some write `v` before it.
fn is_version(said: &str, tool: &str, version: &str) -> bool {
    let said = said.trim().strip_prefix(tool).and_then(|said| said.strip_prefix(' '));
    said.is_some_and(|said| said.strip_prefix('v').unwrap_or(said) == version)
}

/// Builds a tool without optimization: it works for a second, and an optimized build takes minutes.
fn install_tool(arguments: &[&str]) -> Result<()> {
    let mut cargo = Command::new("cargo");
    // Not in a build directory that the caller may have set. Without what only a debugger needs.
    cargo
        .env_remove("CARGO_TARGET_DIR")
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .args(["install", "--locked", "--debug", "--quiet"])
        .args(arguments);
    command::run(&mut cargo, &format!("cargo install {}", arguments[0]), "see above; this needs the network")
}

fn python() -> Result<()> {
    let directory = cache::project().join("python");
    let requirements = source_root().join("crates/pagemark-python/requirements.txt");
    let wanted = std::fs::read(&requirements).map_err(Error::file("read", &requirements))?;
    let installed = directory.join("installed");
    if std::fs::read(&installed).is_ok_and(|installed| installed == wanted) {
        return Ok(());
    }
    progress!("making a Python environment in {} (less than a minute)", directory.display());
    cache::remove(&directory)?;
    let make = || -> Result<()> {
        let help = "see above; this needs the network";
        let mut venv = Command::new("python3");
        command::run(venv.args(["-m", "venv"]).arg(&directory), "python3 -m venv", help)?;
        let mut pip = Command::new(directory.join("bin/pip"));
        pip.args(["install", "--quiet", "--disable-pip-version-check", "--requirement"]).arg(&requirements);
        command::run(&mut pip, "pip install", help)?;
        std::fs::write(&installed, &wanted).map_err(Error::file("write", &installed))
    };
    make().inspect_err(|_| {
        // A partial environment is no environment; the error above is the one to report.
        let _ = cache::remove(&directory);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_of_criu_is_in_its_own_line() {
        assert_eq!(version_line("Version: 4.2.1\nGitID: v4.2.1\n").as_deref(), Some("4.2.1"));
        assert_eq!(version_line("error\n"), None);
    }

    #[test]
    fn a_tool_says_its_version() {
        assert!(is_version("cbindgen 0.29.4\n", "cbindgen", "0.29.4"));
        assert!(is_version("mdbook v0.4.52\n", "mdbook", "0.4.52"));
        assert!(!is_version("mdbook v0.4.521", "mdbook", "0.4.52"));
        assert!(!is_version("mdbook0.4.52", "mdbook", "0.4.52"));
    }

    #[test]
    fn parts_have_names() {
        assert_eq!("demo".parse::<Part>().unwrap(), Part::Demo);
        assert!("everything".parse::<Part>().unwrap_err().to_string().contains("packages, programs, criu"));
    }
}
