//! Boots a kernel of the lab in QEMU on the host's files, and runs a command there.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::bochs::{self, Bochs};
use crate::kernel::Kernel;
use crate::kernel_build::{self, Image};
use crate::qemu::{Accelerator, Hardware, kernel_warnings, met_removed_breakpoint};
use crate::{Error, Result, cache, command, hypervisor, packages, progress, source_root, stuck};

/// A machine, and what is run in it.
#[derive(Clone, Debug)]
pub struct Machine {
    /// The kernel that it boots.
    pub kernel: Kernel,
    /// Its memory, as QEMU reads it: `2G`.
    pub memory: String,
    /// The number of its processors.
    pub processors: u32,
    /// Whether the kernel is the first guest of Xen, a paravirtualized one. It has to be
    /// [`Kernel::LdtDistribution`].
    pub on_xen: bool,
    /// Whether Bochs emulates it, with one processor that has VMX, EPT and PML. It has copies of
    /// [`Machine::files`] and [`Machine::shares`] in place of the host's files.
    pub on_bochs: bool,
    /// Files that a machine without the host's files has, with the libraries that they load.
    pub files: Vec<PathBuf>,
    /// Whether it has one emulated processor whose clock counts instructions, a nanosecond each.
    pub counts_instructions: bool,
    /// Directories of the host that the command can change. Its other changes are lost.
    pub shares: Vec<PathBuf>,
    /// The limit of the whole run.
    pub limit: Duration,
    /// More words for the kernel's command line.
    pub append: String,
    /// Where the kernel's log is copied to.
    pub log: Option<PathBuf>,
    /// Whether a warning of the kernel is not a failure.
    pub allows_warnings: bool,
    /// How far it gives way to other programs of the host: 0 to 19.
    pub niceness: u32,
}

/// How a command in a machine ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With this exit status, and without a warning of the kernel.
    Exited(i32),
    /// It did not end within the limit.
    TimedOut,
    /// With this exit status, but the kernel reported an error in the kernel.
    Warned(i32),
}

impl Outcome {
    /// The exit status that `lab run` ends with.
    pub fn exit_code(self) -> i32 {
        match self {
            Outcome::Exited(status) => status,
            Outcome::TimedOut => 124,
            Outcome::Warned(_) => 70,
        }
    }
}

impl std::fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Outcome::Exited(status) => write!(formatter, "exit status {status}"),
            Outcome::TimedOut => formatter.write_str("time limit exceeded"),
            Outcome::Warned(status) => write!(formatter, "kernel warning, exit status {status}"),
        }
    }
}

/// QEMU is started again that often after an error of its own.
const BOOTS: u32 = 3;

impl Machine {
    /// A machine with 2 GiB and two processors, and a limit of ten minutes.
    pub fn new(kernel: Kernel) -> Machine {
        Machine {
            kernel,
            memory: "2G".to_owned(),
            processors: 2,
            on_xen: false,
            on_bochs: false,
            files: Vec::new(),
            counts_instructions: false,
            shares: Vec::new(),
            limit: Duration::from_secs(600),
            append: String::new(),
            log: None,
            allows_warnings: false,
            niceness: 0,
        }
    }

    /// The kernel, and what it runs on.
    pub fn name(&self) -> String {
        let below = match (self.on_xen, self.on_bochs) {
            (true, _) => "-on-xen",
            (_, true) => "-on-bochs",
            _ => "",
        };
        format!("{}{below}", self.kernel)
    }

    /// Regular expressions for the lines of tests that it may skip.
    pub fn allowed_skips(&self) -> &'static str {
        // As a kernel without the series: it has no lightweight dirty tracking there.
        match (self.on_xen, self.on_bochs) {
            (true, _) => Kernel::Plain.allowed_skips(),
            (_, true) => bochs::ALLOWED_SKIPS,
            _ => self.kernel.allowed_skips(),
        }
    }

    /// Boots the machine and runs a command, in the caller's working directory. Its output goes to
    /// `output`, or to the caller's standard output.
    ///
    /// # Errors
    /// If the machine cannot be started, or ends before the command does. Needs root.
    pub fn run(&self, words: &[OsString], output: Option<&File>) -> Result<Outcome> {
        if !command::is_root() {
            return Err(Error::unmet("a machine of the lab needs root, for virtiofsd", "run the command as root"));
        }
        if self.on_xen && !self.kernel.is_of_distribution() {
            let help = format!("use {} or {}", Kernel::LdtDistribution, Kernel::PlainDistribution);
            return Err(Error::unmet(format!("the kernel {} is no guest of Xen", self.kernel), help));
        }
        set_up()?;
        let image = kernel_build::image(self.kernel)?;
        if self.on_bochs {
            return self.run_on_bochs(&image, words, output);
        }
        let accelerator = if self.counts_instructions { Accelerator::CountedTcg } else { accelerator(self.kernel)? };
        self.run_on(&image, accelerator, words, output)
    }

    fn run_on(
        &self,
        image: &Image,
        accelerator: Accelerator,
        words: &[OsString],
        output: Option<&File>,
    ) -> Result<Outcome> {
        let hypervisor = if self.on_xen { Some(hypervisor::xen()?) } else { None };
        let directory = RunDirectory::new()?;
        let root = directory.0.join("root");
        first_files(image, "init", &root)?;
        pack(&root, &directory.0.join("initramfs"), "gzip -1")?;
        self.describe_command(&directory.0, words)?;
        let hardware = Hardware {
            accelerator,
            memory: &self.memory,
            processors: self.processors,
            kernel: &image.path(),
            hypervisor: hypervisor.as_deref(),
            directory: &directory.0,
            append: &self.append,
        };
        let kernel_log = directory.0.join("kernel.log");
        let read_log = || read_log(&kernel_log);
        let mut boots = 0;
        let status = loop {
            let _files = FileServer::start(&directory.0)?;
            let mut qemu = tied_to_this_process("qemu-system-x86_64", self.niceness);
            qemu.args(hardware.arguments()).stdin(Stdio::null());
            if let Some(output) = output {
                qemu.stdout(output.try_clone().map_err(Error::file("open", &directory.0))?);
            }
            let mut qemu = command::start(&mut qemu)?;
            let status = command::end_within(&mut qemu, self.limit)?;
            if status.is_none() {
                if let Err(error) = stuck::report_tasks(&directory.0) {
                    progress!("the machine cannot say what its tasks wait for: {error}");
                }
                command::wait_for(&mut qemu, stuck::REPORT_LIMIT)?;
            }
            boots += 1;
            let has_started = directory.0.join("started").exists();
            if has_started || boots == BOOTS || !met_removed_breakpoint(&read_log()) {
                break status;
            }
            progress!("the emulator executed a breakpoint that the kernel had removed; booting again");
        };
        self.outcome(status.is_some(), &directory.0, &read_log(), kernel_warnings)
    }

    fn run_on_bochs(&self, image: &Image, words: &[OsString], output: Option<&File>) -> Result<Outcome> {
        let directory = RunDirectory::new()?;
        let root = directory.0.join("root");
        let memory_mib = mebibytes(&self.memory)?;
        let bochs = Bochs { image, memory_mib, append: &self.append, directory: &directory.0 };
        first_files(image, "bochs-init", &root)?;
        self.describe_command(&directory.0, words)?;
        let described = ["command", "shares"].map(|name| directory.0.join(name));
        let files = [&self.files[..], &described].concat();
        bochs.prepare(&root, &files, &self.whole_shares()?)?;
        let ended = bochs.run(self.limit, self.niceness, output)?;
        let log = read_log(&directory.0.join(bochs::KERNEL_LOG));
        // It has warnings of the emulated processor, and no others: see lab/guest/bochs-init.
        self.outcome(ended, &directory.0, &log, |_| Vec::new())
    }

    /// How a machine ended, by the status in its directory and the lines of the kernel's log that
    /// are failures.
    fn outcome(
        &self,
        has_ended: bool,
        directory: &Path,
        log: &str,
        warnings: impl Fn(&str) -> Vec<&str>,
    ) -> Result<Outcome> {
        if let Some(copy) = &self.log {
            write(copy, log.as_bytes())?;
        }
        if !has_ended {
            let (before, tasks) = stuck::divide(log);
            eprintln!("{}\n{tasks}", command::last_lines(before.as_bytes(), 20));
            progress!("the machine exceeded its time limit of {} s", self.limit.as_secs());
            return Ok(Outcome::TimedOut);
        }
        let ended = std::fs::read_to_string(directory.join("status")).unwrap_or_default();
        let Ok(exit_status) = ended.trim().parse() else {
            let (log, _) = stuck::divide(log);
            return Err(Error::unmet(
                format!("the machine ended before its command:\n{}", command::last_lines(log.as_bytes(), 40)),
                "see the end of the kernel's log above",
            ));
        };
        let warnings = warnings(log);
        if self.allows_warnings || warnings.is_empty() {
            return Ok(Outcome::Exited(exit_status));
        }
        eprintln!("{}\n\n{}", warnings.join("\n"), command::last_lines(log.as_bytes(), 60));
        progress!("the kernel reported an error (the command's exit status is {exit_status})");
        Ok(Outcome::Warned(exit_status))
    }

    /// The shares, by their whole paths.
    fn whole_shares(&self) -> Result<Vec<PathBuf>> {
        let whole = |share: &PathBuf| share.canonicalize().map_err(Error::file("find", share));
        self.shares.iter().map(whole).collect()
    }

    /// Writes what the machine's first program reads: the command, and the directories.
    fn describe_command(&self, directory: &Path, words: &[OsString]) -> Result<()> {
        let working = std::env::current_dir().map_err(Error::file("find", Path::new("the working directory")))?;
        let mut script = Vec::new();
        let path = std::env::var_os("PATH").unwrap_or_default();
        for part in [
            "cd ".as_ref(),
            command::shell_word(working.as_os_str()).as_os_str(),
            " || exit 125\nexport HOME=/root TERM=dumb PAGEMARK_LAB=".as_ref(),
            self.kernel.name().as_ref(),
            " PATH=".as_ref(),
            command::shell_word(&path).as_os_str(),
            (if self.counts_instructions { "\nexport PAGEMARK_CLOCK=instructions" } else { "" }).as_ref(),
            "\nexec ".as_ref(),
            command::shell_words(words).as_os_str(),
            "\n".as_ref(),
        ] {
            script.extend_from_slice(part.as_bytes());
        }
        write(&directory.join("command"), &script)?;
        let mut shares = self.whole_shares()?;
        shares.push(directory.to_owned());
        write(&directory.join("shares"), &lines(shares.iter().map(PathBuf::as_path)))?;
        // The machine has a /tmp of its own; these parts of the host's are bound into it.
        write(&directory.join("kept"), &lines(below_tmp([source_root(), &working])))
    }
}

/// Installs what building and booting kernels needs.
pub fn set_up() -> Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        return Err(Error::unmet("the lab needs an x86-64 host", "run it on one"));
    }
    packages::install(&kernel_build::PACKAGES)?;
    if virtiofsd().is_none() {
        packages::install(&["virtiofsd"])?;
    }
    if virtiofsd().is_none() {
        return Err(Error::unmet("the host has no virtiofsd", "install the package that contains it"));
    }
    cache::create(&cache::lab())
}

/// The accelerator of this host: KVM if a machine reaches its first program under it in reasonable
/// time, because /dev/kvm may exist and not work, or be slower than emulation. Found once for each
/// start of the host; `PAGEMARK_LAB_ACCEL=kvm` or `tcg` decides instead.
pub fn accelerator(kernel: Kernel) -> Result<Accelerator> {
    match std::env::var("PAGEMARK_LAB_ACCEL").as_deref() {
        Ok("kvm") => return Ok(Accelerator::Kvm),
        Ok("tcg") => return Ok(Accelerator::Tcg),
        Ok("") | Err(_) => {}
        Ok(other) => {
            return Err(Error::unmet(format!("PAGEMARK_LAB_ACCEL={other}"), "set it to kvm or tcg, or remove it"));
        }
    }
    let boot = Path::new("/proc/sys/kernel/random/boot_id");
    let boot = std::fs::read_to_string(boot).map_err(Error::file("read", boot))?;
    let known = cache::lab().join(format!("accelerator-{}", boot.trim()));
    if let Ok(name) = std::fs::read_to_string(&known) {
        return Ok(if name.trim() == "kvm" { Accelerator::Kvm } else { Accelerator::Tcg });
    }
    let works = || {
        File::options().read(true).write(true).open("/dev/kvm").is_ok() && {
            let trial = Machine { memory: "512M".to_owned(), limit: Duration::from_secs(30), ..Machine::new(kernel) };
            let outcome = kernel_build::image(kernel).and_then(|image| {
                let null = File::options()
                    .write(true)
                    .open("/dev/null")
                    .map_err(Error::file("open", Path::new("/dev/null")))?;
                trial.run_on(&image, Accelerator::Kvm, &["true".into()], Some(&null))
            });
            matches!(outcome, Ok(Outcome::Exited(0)))
        }
    };
    let (found, name) = if works() { (Accelerator::Kvm, "kvm") } else { (Accelerator::Tcg, "tcg") };
    write(&known, format!("{name}\n").as_bytes())?;
    progress!("the accelerator is {name}");
    Ok(found)
}

/// A directory of a run in the cache, removed at its end. `PAGEMARK_LAB_KEEP=1` keeps it.
struct RunDirectory(PathBuf);

impl RunDirectory {
    fn new() -> Result<RunDirectory> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        cache::remove_abandoned(&cache::lab(), "run");
        let name = format!("run.{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = cache::lab().join(name);
        cache::remove(&path)?;
        cache::create(&path)?;
        Ok(RunDirectory(path))
    }
}

impl Drop for RunDirectory {
    fn drop(&mut self) {
        if std::env::var_os("PAGEMARK_LAB_KEEP").is_some() {
            progress!("kept {}", self.0.display());
        } else {
            // Nothing can be done about a failure here; the next run removes it.
            let _ = cache::remove(&self.0);
        }
    }
}

/// virtiofsd, which gives a machine the host's files.
struct FileServer(Child);

impl FileServer {
    fn start(directory: &Path) -> Result<FileServer> {
        let (socket, log) = (directory.join("socket"), directory.join("virtiofsd.log"));
        // virtiofsd makes the socket anew.
        let _ = std::fs::remove_file(&socket);
        let program = virtiofsd().ok_or_else(|| Error::unmet("the host has no virtiofsd", "run `lab/lab setup`"))?;
        let mut daemon = tied_to_this_process(program, 0);
        daemon.arg(format!("--socket-path={}", socket.display()));
        daemon.args(["-o", "source=/", "-o", "cache=auto", "-o", "sandbox=chroot"]);
        command::redirect(&mut daemon, File::create(&log).map_err(Error::file("create", &log))?, &log)?;
        let mut server = FileServer(command::start(&mut daemon)?);
        let end = Instant::now() + Duration::from_secs(60);
        while !socket.exists() {
            let ended = server.0.try_wait().map_err(Error::file("wait for", &socket))?.is_some();
            if ended || Instant::now() > end {
                let text = std::fs::read(&log).unwrap_or_default();
                return Err(Error::unmet("virtiofsd does not start", command::last_lines(&text, 10)));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }
}

impl Drop for FileServer {
    fn drop(&mut self) {
        // It may have ended with the machine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn virtiofsd() -> Option<&'static str> {
    ["/usr/libexec/virtiofsd", "/usr/lib/qemu/virtiofsd"].into_iter().find(|path| Path::new(path).exists())
}

/// The program, which the kernel kills when the thread that starts it ends.
fn tied_to_this_process(program: &str, niceness: u32) -> Command {
    let mut command = command::at_low_priority("setpriv", niceness);
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// Makes `root`, with the first program of the machine, `lab/guest/INIT`, and the kernel's modules.
fn first_files(image: &Image, init: &str, root: &Path) -> Result<()> {
    for part in ["bin", "dev", "proc", "sys", "host", "new", "upper", "modules"] {
        cache::create(&root.join(part))?;
    }
    let busybox = Path::new("/bin/busybox");
    let init = source_root().join("lab/guest").join(init);
    std::fs::copy(busybox, root.join("bin/busybox")).map_err(Error::file("copy", busybox))?;
    std::fs::copy(&init, root.join("init")).map_err(Error::file("copy", &init))?;
    if let Ok(modules) = std::fs::read_dir(image.modules()) {
        for module in modules.flatten() {
            let target = root.join("modules").join(module.file_name());
            std::fs::copy(module.path(), target).map_err(Error::file("copy", &module.path()))?;
        }
    }
    Ok(())
}

/// Packs a directory, which has the machine's first program, as an archive that `filter` changes.
pub(crate) fn pack(root: &Path, archive: &Path, filter: &str) -> Result<()> {
    let pack = format!("chmod 755 init && find . | cpio -o -H newc --quiet | {filter} >\"$0\"");
    let mut shell = Command::new("bash");
    shell.args(["-o", "pipefail", "-c", &pack]).arg(archive).current_dir(root);
    command::run(&mut shell, "packing the machine's first program", "check the space on the disk")
}

fn read_log(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

/// Mebibytes of a size as QEMU reads it: `512M`, `2G`.
fn mebibytes(size: &str) -> Result<u32> {
    let read = |number: &str, unit: u32| number.parse::<u32>().ok().and_then(|number| number.checked_mul(unit));
    let found = match size.strip_suffix('G') {
        Some(number) => read(number, 1024),
        None => read(size.strip_suffix('M').unwrap_or(size), 1),
    };
    found.ok_or_else(|| Error::unmet(format!("{size} is no size of memory"), "use a form such as 512M or 2G"))
}

/// The paths below /tmp, each once.
fn below_tmp<'a>(paths: impl IntoIterator<Item = &'a Path>) -> BTreeSet<&'a Path> {
    paths.into_iter().filter(|path| path.starts_with("/tmp") && *path != Path::new("/tmp")).collect()
}

fn lines<'a>(paths: impl IntoIterator<Item = &'a Path>) -> Vec<u8> {
    let mut text = Vec::new();
    for path in paths {
        text.extend_from_slice(path.as_os_str().as_bytes());
        text.push(b'\n');
    }
    text
}

pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    File::create(path).and_then(|mut file| file.write_all(bytes)).map_err(Error::file("write", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_tmp_are_kept() {
        let paths = ["/tmp/b", "/tmp/a/c", "/tmp", "/var/tmp", "/tmpfoo", "/tmp/b"].map(Path::new);
        assert_eq!(below_tmp(paths).into_iter().collect::<Vec<_>>(), [Path::new("/tmp/a/c"), Path::new("/tmp/b")]);
    }

    #[test]
    fn sizes_of_memory_are_read() {
        assert_eq!([mebibytes("2G").unwrap(), mebibytes("512M").unwrap()], [2048, 512]);
        assert!(["", "G", "2T", "99999999999G"].iter().all(|size| mebibytes(size).is_err()));
    }

    #[test]
    fn outcomes_have_the_exit_statuses_that_scripts_know() {
        assert_eq!(Outcome::Exited(3).exit_code(), 3);
        assert_eq!(Outcome::TimedOut.exit_code(), 124);
        assert_eq!(Outcome::Warned(0).exit_code(), 70);
    }
}
