//! A machine that Bochs emulates: its processor has VMX with EPT and page-modification logging
//! (PML), and counts of what happens there are exact. Times mean nothing.
//!
//! The machine does not reach the host's files. What the command needs is packed with it, libraries
//! included, and the directories that the command can change come back by a serial line.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::kernel_build::Image;
use crate::machine::{self, write};
use crate::{Error, Result, cache, command, packages};

/// The emulator, its display, and what starts a kernel from a disk.
pub const PACKAGES: [&str; 7] =
    ["bochs", "bochs-term", "bochsbios", "vgabios", "isolinux", "syslinux-common", "xorriso"];

/// The program that starts the kernel, and what it needs.
const LOADER: [&str; 2] = ["/usr/lib/ISOLINUX/isolinux.bin", "/usr/lib/syslinux/modules/bios/ldlinux.c32"];

/// The serial lines: the kernel's log, what the command prints, and an archive of directories.
const LINES: [&str; 3] = [KERNEL_LOG, OUTPUT, SHARES];
pub(crate) const KERNEL_LOG: &str = "kernel.log";
const OUTPUT: &str = "output";
const SHARES: &str = "shares.tar";

/// Commands for its debugger, which Debian's build begins with.
const DEBUGGER: &str = "c\nq\n";

/// Extensions of the emulated processor that the kernel leaves out. Bochs 2.7 loses the registers
/// of AVX, and gives the state of the others, and compacted states, sizes that no kernel accepts.
const WITHOUT: &str = "avx,avx512f,pku,mpx,xsaves,xsavec";

/// Regular expressions for the lines of tests that such a machine may skip.
pub(crate) const ALLOWED_SKIPS: &str = "lightweight dirty tracking\nthe processor has no AVX\nis run by";

/// A machine that is about to be run.
pub(crate) struct Bochs<'a> {
    /// The kernel.
    pub(crate) image: &'a Image,
    /// Mebibytes of memory.
    pub(crate) memory_mib: u32,
    /// More words for the kernel's command line.
    pub(crate) append: &'a str,
    /// The directory of this run.
    pub(crate) directory: &'a Path,
}

impl Bochs<'_> {
    /// Packs `files` and the directories `shares` into `root`, which has the machine's first
    /// program, and describes the machine.
    pub(crate) fn prepare(&self, root: &Path, files: &[PathBuf], shares: &[PathBuf]) -> Result<()> {
        packages::install(&PACKAGES)?;
        let mut missing: Vec<PathBuf> = vec![PathBuf::from("/bin/bash")];
        missing.extend(files.iter().cloned());
        let mut packed = BTreeSet::new();
        while let Some(file) = missing.pop() {
            if packed.insert(file.clone()) {
                copy_stripped(&file, root)?;
                missing.extend(libraries(&file));
            }
        }
        shares.iter().try_for_each(|share| copy(share, root))?;
        let working = std::env::current_dir().map_err(Error::file("find", Path::new("the working directory")))?;
        cache::create(&below(root, &working))?;
        let disk = self.directory.join("disk");
        cache::create(&disk)?;
        // To unpack it takes longer there than to read it.
        machine::pack(root, &disk.join("initrd"), "cat")?;
        let image = self.image.path();
        std::fs::copy(&image, disk.join("kernel")).map_err(Error::file("copy", &image))?;
        for file in LOADER.map(Path::new) {
            let to = disk.join(file.file_name().unwrap_or_default());
            std::fs::copy(file, to).map_err(Error::file("copy", file))?;
        }
        write(&disk.join("isolinux.cfg"), self.boot_options().as_bytes())?;
        write(&self.directory.join("machine"), self.description().as_bytes())?;
        write(&self.directory.join("debugger"), DEBUGGER.as_bytes())?;
        let mut make = Command::new("xorriso");
        make.args(["-as", "mkisofs", "-quiet", "-o"]).arg(self.directory.join("disk.iso"));
        make.args(["-b", "isolinux.bin", "-c", "boot.cat", "-no-emul-boot", "-boot-load-size", "4"]);
        make.arg("-boot-info-table").arg(&disk);
        command::output(&mut make, "making the machine's disk", "check the space on the disk").map(drop)
    }

    /// What the loader reads. Without ACPI and its interrupts, the kernel starts faster; there is
    /// one processor.
    fn boot_options(&self) -> String {
        let lab = self.directory.display();
        let append = self.append;
        format!(
            "DEFAULT kernel\nLABEL kernel\n KERNEL kernel\n APPEND initrd=initrd console=ttyS0,115200 panic=-1 oops=panic \
             reboot=t acpi=off mitigations=off tsc=reliable cryptomgr.notests clearcpuid={WITHOUT} lab={lab} {append}\n"
        )
    }

    /// What Bochs reads.
    fn description(&self) -> String {
        let lines: String = LINES
            .iter()
            .zip(1..)
            .map(|(file, number)| format!("com{number}: enabled=1, mode=file, dev={file}\n"))
            .collect();
        format!(
            "megs: {}\n\
             romimage: file=/usr/share/bochs/BIOS-bochs-latest\n\
             vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest\n\
             ata0-master: type=cdrom, path=disk.iso, status=inserted\n\
             boot: cdrom\n\
             clock: sync=none\n\
             display_library: term\n\
             plugin_ctrl: unmapped=1, serial=1, biosdev=0, speaker=0, extfpuirq=0, parallel=0\n\
             {lines}\
             log: bochs.log\n\
             panic: action=fatal\nerror: action=ignore\ninfo: action=ignore\n\
             cpu: model=corei7_skylake_x, count=1, ips=100000000, reset_on_triple_fault=0\n",
            self.memory_mib
        )
    }

    /// Runs the machine until it ends, or the limit has passed: false. What the command has printed
    /// goes to `output`, or to the standard output; the directories that it can change come back.
    pub(crate) fn run(&self, limit: Duration, niceness: u32, output: Option<&File>) -> Result<bool> {
        // Its display wants a terminal. It ends with a panic, so its status says nothing.
        let mut bochs = command::at_low_priority("script", niceness);
        bochs.args(["-qec", "exec bochs -q -rc debugger -f machine", "/dev/null"]).env("TERM", "vt100");
        bochs.current_dir(self.directory).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let ended = command::wait_for(&mut command::start(&mut bochs)?, limit)?.is_some();
        let path = self.directory.join(OUTPUT);
        let mut printed = File::open(&path).map_err(Error::file("open", &path))?;
        let copied = match output {
            Some(mut output) => std::io::copy(&mut printed, &mut output),
            None => std::io::copy(&mut printed, &mut std::io::stdout()),
        };
        copied.map_err(Error::file("copy", &path))?;
        let shares = self.directory.join(SHARES);
        if ended && shares.exists() {
            let mut unpack = Command::new("tar");
            unpack.args(["-C", "/", "-xf"]).arg(shares);
            command::output(&mut unpack, "unpacking what the machine gives back", "see its kernel's log")?;
        }
        Ok(ended)
    }
}

/// Copies a file without what debuggers need of it, under the same path below `root`.
fn copy_stripped(file: &Path, root: &Path) -> Result<()> {
    copy(file, root)?;
    if is_elf(file) {
        // What cannot be made smaller stays as it is.
        command::succeeds(Command::new("strip").arg("--strip-debug").arg(below(root, file)));
    }
    Ok(())
}

/// Copies a file, or a directory with its contents, under the same path below `root`.
fn copy(path: &Path, root: &Path) -> Result<()> {
    let target = below(root, path);
    cache::create(target.parent().unwrap_or(root))?;
    let mut copy = Command::new("cp");
    copy.args(["-rL", "--no-target-directory"]).arg(path).arg(target);
    command::output(&mut copy, &format!("copying {}", path.display()), "name a file that exists").map(drop)
}

fn below(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}

fn is_elf(file: &Path) -> bool {
    let mut start = [0; 4];
    File::open(file).and_then(|mut file| file.read_exact(&mut start)).is_ok() && start == *b"\x7fELF"
}

/// The libraries that a program loads at its start.
fn libraries(program: &Path) -> Vec<PathBuf> {
    if !is_elf(program) {
        return Vec::new();
    }
    // It fails for static programs.
    let listed = command::output(Command::new("ldd").arg(program), "ldd", "").unwrap_or_default();
    paths_in(&listed)
}

/// The paths in what ldd prints: `NAME => PATH (ADDRESS)` or `PATH (ADDRESS)`.
fn paths_in(listed: &str) -> Vec<PathBuf> {
    let path = |line: &str| {
        let words = line.split_whitespace();
        words.map(OsStr::new).map(Path::new).find(|word| word.is_absolute()).map(Path::to_owned)
    };
    listed.lines().filter_map(path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_read_from_the_list() {
        let listed = "\tlinux-vdso.so.1 (0x00007f28)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                      \tlibnone.so => not found\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f28)\n";
        let expected = ["/lib/x86_64-linux-gnu/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from);
        assert_eq!(paths_in(listed), expected);
        assert!(paths_in("\tnot a dynamic executable\n").is_empty());
    }
}
