//! Fetches and builds kernels into the cache.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::archive::{self, Apt};
use crate::kernel::{Kernel, KernelPackage, NEWEST_SUITES, lost_settings, release_of};
use crate::{Error, Result, cache, command, progress};

/// What building a kernel and booting it needs.
pub const PACKAGES: [&str; 16] = [
    "bc",
    "bison",
    "busybox-static",
    "ca-certificates",
    "cpio",
    "e2fsprogs",
    "flex",
    "gcc",
    "kmod",
    "libelf-dev",
    "libssl-dev",
    "make",
    "patch",
    "qemu-system-x86",
    "xz-utils",
    "libc6-dev",
];
const SOURCE_PACKAGE: &str = "linux-source-6.12";
const KERNEL_PACKAGE: &str = "linux-image-cloud-amd64";
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// A kernel that is ready to boot.
pub struct Image {
    /// Which one.
    pub kernel: Kernel,
    directory: PathBuf,
}

impl Image {
    /// The compressed kernel.
    pub fn path(&self) -> PathBuf {
        self.directory.join("bzImage")
    }

    /// The modules to insert before anything else, in the order of their names.
    pub fn modules(&self) -> PathBuf {
        self.directory.join("modules")
    }
}

/// Whether the kernel is in the cache.
pub fn is_there(kernel: Kernel) -> bool {
    let version = std::fs::read(cache::lab().join("source/version")).unwrap_or_default();
    kernel.directory(&version).is_ok_and(|directory| directory.join("bzImage").exists())
}

/// The kernel, which is fetched or built first unless it is in the cache.
///
/// # Errors
/// If a download, a patch, the configuration or the build fails.
pub fn image(kernel: Kernel) -> Result<Image> {
    let package = kernel.package();
    let version = if package.is_some() { Vec::new() } else { source_version()? };
    let directory = kernel.directory(&version)?;
    let image = Image { kernel, directory };
    if image.path().exists() {
        return Ok(image);
    }
    // One build at a time: two would take the same time together, and may be of the same kernel.
    let _lock = cache::lock(if package.is_some() { "fetching" } else { "building" })?;
    if !image.path().exists() {
        let minutes = kernel.minutes();
        let start = Instant::now();
        if let Some(package) = package {
            progress!("fetching the kernel {kernel} (about {minutes} min)");
            fetch_kernel(&package, &image.directory)?;
        } else {
            progress!("building the kernel {kernel} (about {minutes} min on two idle processors)");
            build(kernel, &image.directory)?;
        }
        progress!("the kernel {kernel} is ready after {} s", start.elapsed().as_secs());
    }
    Ok(image)
}

/// The kernel's source, as an archive in the cache. It is fetched once; `lab clean` makes room for
/// a newer one.
pub fn source() -> Result<PathBuf> {
    let directory = cache::lab().join("source");
    if !directory.join("version").exists() {
        let _lock = cache::lock("fetching")?;
        if !directory.join("version").exists() {
            progress!("fetching {SOURCE_PACKAGE}, 150 MB (about 1 min)");
            fetch(SOURCE_PACKAGE, &NEWEST_SUITES, &directory, |_| Ok(()))?;
        }
    }
    Ok(directory.join(format!("usr/src/{SOURCE_PACKAGE}.tar.xz")))
}

/// The version of the source, as the cache's file has it.
pub fn source_version() -> Result<Vec<u8>> {
    source()?;
    let path = cache::lab().join("source/version");
    std::fs::read(&path).map_err(Error::file("read", &path))
}

/// Unpacks a package of the first of `suites` that has it into `target`, which appears only when
/// `prepare` has succeeded. The caller has locked `fetching`.
pub(crate) fn fetch(
    package: &str,
    suites: &[&str],
    target: &Path,
    prepare: impl FnOnce(&Path) -> Result<()>,
) -> Result<()> {
    let archive = archive::address()?;
    let new = target.with_extension("new");
    let mut failure = None;
    for suite in suites {
        cache::remove(&new)?;
        let unpacked = Apt::new(&cache::lab().join("apt"), &archive, suite, &["deb"]).and_then(|apt| {
            let package = if package == KERNEL_PACKAGE { newest_kernel(&apt)? } else { package.to_owned() };
            apt.unpack(&package, &new)
        });
        match unpacked {
            Ok(()) => {
                prepare(&new)?;
                return std::fs::rename(&new, target).map_err(Error::file("rename", &new));
            }
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.expect("there is a suite"))
}

/// The package that the name without a version stands for.
fn newest_kernel(apt: &Apt) -> Result<String> {
    let help = "the suite lacks the package";
    let depends =
        command::output(apt.command("apt-cache").args(["depends", KERNEL_PACKAGE]), "apt-cache depends", help)?;
    first_dependency(&depends).ok_or_else(|| Error::unmet(format!("{KERNEL_PACKAGE} depends on nothing"), help))
}

fn first_dependency(depends: &str) -> Option<String> {
    depends.lines().find_map(|line| line.trim().strip_prefix("Depends: ").map(str::to_owned))
}

fn build(kernel: Kernel, directory: &Path) -> Result<()> {
    cache::remove_abandoned(&cache::lab(), "work");
    let work = cache::lab().join(format!("work.{}", std::process::id()));
    cache::remove(&work)?;
    let built = build_in(&work, kernel, directory);
    cache::remove(&work)?;
    built
}

/// Unpacks the kernel's source into `target`, without the files that the patterns of tar match.
///
/// # Errors
/// If the source cannot be fetched or unpacked.
pub fn unpack_source(target: &Path, excluded: &[&str]) -> Result<()> {
    cache::create(target)?;
    let mut tar = Command::new("tar");
    tar.arg("-C").arg(target).args(["--strip-components=1", "-xf"]).arg(source()?);
    tar.args(excluded.iter().map(|pattern| format!("--exclude={pattern}")));
    command::output(&mut tar, "unpacking the kernel's source", "check the space on the disk").map(|_| ())
}

/// Applies a patch to the source; `log` gets what `patch` prints.
///
/// # Errors
/// If it does not apply.
pub fn apply(patch: &Path, source: &Path, log: &Path) -> Result<()> {
    let file = File::open(patch).map_err(Error::file("open", patch))?;
    let mut command = Command::new("patch");
    command.arg("-d").arg(source).args(["-p1", "--no-backup-if-mismatch"]);
    let log_file = File::create(log).map_err(Error::file("create", log))?;
    command::redirect(&mut command, log_file, log)?;
    if command.stdin(file).status().is_ok_and(|status| status.success()) {
        return Ok(());
    }
    Err(Error::unmet(
        format!(
            "{} does not apply to {SOURCE_PACKAGE}:\n{}",
            patch.display(),
            command::last_lines(&std::fs::read(log).unwrap_or_default(), 30)
        ),
        "adapt the series to this version of the source",
    ))
}

fn build_in(work: &Path, kernel: Kernel, directory: &Path) -> Result<()> {
    let (source, output, log) = (work.join("source"), work.join("build"), work.join("log"));
    cache::create(&output)?;
    unpack_source(&source, &[])?;
    for patch in kernel.patches()? {
        apply(&patch, &source, &log)?;
    }
    let make = || {
        // With the priority of the tests' own build, beside which it runs: it is ready when they begin.
        let mut make = Command::new("make");
        make.arg("-C").arg(&source).arg(format!("O={}", output.display())).arg(format!("-j{}", processors())).args([
            "LOCALVERSION=",
            "KBUILD_BUILD_HOST=lab",
            "KBUILD_BUILD_USER=lab",
            "KBUILD_BUILD_TIMESTAMP=@0",
        ]);
        make
    };
    let configuring = format!("configuring the kernel {kernel}");
    let help = "see above";
    command::logged(make().arg("tinyconfig"), &log, &configuring, help)?;
    let config = output.join(".config");
    let mut merge = Command::new("scripts/kconfig/merge_config.sh");
    merge.current_dir(&source).arg("-m").arg("-O").arg(&output).arg(&config).args(kernel.fragments());
    command::logged(&mut merge, &log, &configuring, help)?;
    command::logged(make().arg("olddefconfig"), &log, &configuring, help)?;
    check_configuration(kernel, &config)?;
    compile(make().arg("bzImage"), &log, kernel)?;

    cache::create(directory)?;
    for (from, to) in [(config, "config"), (log, "build.log"), (output.join("arch/x86/boot/bzImage"), "bzImage.new")] {
        let to = directory.join(to);
        std::fs::copy(&from, &to).map_err(Error::file("copy", &from))?;
    }
    let new = directory.join("bzImage.new");
    std::fs::rename(&new, directory.join("bzImage")).map_err(Error::file("rename", &new))
}

fn check_configuration(kernel: Kernel, config: &Path) -> Result<()> {
    let mut fragments = String::new();
    for path in kernel.fragments() {
        fragments += &std::fs::read_to_string(&path).map_err(Error::file("read", &path))?;
    }
    let config = std::fs::read_to_string(config).map_err(Error::file("read", config))?;
    let lost = lost_settings(&fragments, &config);
    if lost.is_empty() {
        return Ok(());
    }
    Err(Error::unmet(
        format!("the configuration of the kernel {kernel} lacks {}", lost.join(" ")),
        "correct the fragments in lab/config: a setting depends on another that is missing",
    ))
}

/// Runs the build, and reports every minute how far it is.
fn compile(make: &mut Command, log: &Path, kernel: Kernel) -> Result<()> {
    let errors = File::create(log).map_err(Error::file("create", log))?;
    let mut child = command::start(make.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors))?;
    let (start, mut reported, mut files) = (Instant::now(), Instant::now(), 0);
    // make has a line for each file that it compiles.
    for line in BufReader::new(child.stdout.take().expect("the output is a pipe")).lines() {
        files += usize::from(line.is_ok_and(|line| line.starts_with("  CC ")));
        if reported.elapsed() >= REPORT_INTERVAL {
            reported = Instant::now();
            progress!("the kernel {kernel}: {files} files compiled in {} s", start.elapsed().as_secs());
        }
    }
    let status = command::wait_for(&mut child, Duration::MAX / 4)?;
    if status.is_some_and(|status| status.success()) {
        return Ok(());
    }
    let text = std::fs::read(log).unwrap_or_default();
    Err(Error::unmet(
        format!("building the kernel {kernel} failed:\n{}", command::last_lines(&text, 30)),
        "see the compiler's errors above",
    ))
}

/// A kernel of Debian, without what the lab does not use.
fn fetch_kernel(package: &KernelPackage, directory: &Path) -> Result<()> {
    fetch(KERNEL_PACKAGE, package.suites, directory, |unpacked| {
        let boot = unpacked.join("boot");
        let release = release_of(&boot)?;
        for (from, to) in [(format!("vmlinuz-{release}"), "bzImage"), (format!("config-{release}"), "config")] {
            let from = boot.join(from);
            std::fs::copy(&from, unpacked.join(to)).map_err(Error::file("copy", &from))?;
        }
        // depmod and modprobe look in lib, which current packages have in usr.
        let lib = unpacked.join("lib");
        if unpacked.join("usr/lib/modules").exists() {
            cache::create(&lib)?;
            std::os::unix::fs::symlink("../usr/lib/modules", lib.join("modules")).map_err(Error::file("link", &lib))?;
        }
        let help = "install the package kmod";
        command::run(Command::new("depmod").arg("-b").arg(unpacked).arg(&release), "depmod", help)?;
        let mut files: Vec<String> = Vec::new();
        for module in &package.modules {
            let mut modprobe = Command::new("modprobe");
            modprobe.arg("-d").arg(unpacked).args(["-S", &release, "--show-depends", module]);
            let shown = command::output(&mut modprobe, &format!("looking for the module {module}"), help)?;
            for file in inserted(&shown) {
                if !files.iter().any(|known| known == file) {
                    files.push(file.to_owned());
                }
            }
        }
        let modules = unpacked.join("modules");
        cache::create(&modules)?;
        for (index, file) in files.iter().enumerate() {
            copy_module(Path::new(file), &modules, index)?;
        }
        [boot, lib, unpacked.join("usr")].iter().try_for_each(|part| cache::remove(part))
    })
}

/// The files that `modprobe --show-depends` would insert.
fn inserted(shown: &str) -> impl Iterator<Item = &str> {
    shown.lines().filter_map(|line| line.strip_prefix("insmod ")).filter_map(|rest| rest.split_whitespace().next())
}

/// Copies a module, uncompressed, under a name that keeps the order.
fn copy_module(file: &Path, modules: &Path, index: usize) -> Result<()> {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let target = modules.join(format!("{index:03}-{}", name.trim_end_matches(".xz")));
    if !name.ends_with(".xz") {
        std::fs::copy(file, &target).map_err(Error::file("copy", file))?;
        return Ok(());
    }
    let output = File::create(&target).map_err(Error::file("create", &target))?;
    command::run(Command::new("xz").arg("-dc").arg(file).stdout(output), "unpacking a module", "install xz-utils")
}

/// The number of processors of the host.
pub fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_without_a_version_stands_for_its_first_dependency() {
        let depends = "linux-image-cloud-amd64\n  Depends: linux-image-6.12.1-cloud-amd64\n  Depends: other\n";
        assert_eq!(first_dependency(depends).as_deref(), Some("linux-image-6.12.1-cloud-amd64"));
        assert_eq!(first_dependency("linux-image-cloud-amd64\n"), None);
    }

    #[test]
    fn modules_are_those_that_modprobe_inserts() {
        let shown = "builtin ext4\ninsmod /lib/modules/a.ko.xz \ninsmod /lib/modules/b.ko x=1\n";
        assert_eq!(inserted(shown).collect::<Vec<_>>(), ["/lib/modules/a.ko.xz", "/lib/modules/b.ko"]);
    }
}
