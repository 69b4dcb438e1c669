//! The command line of QEMU, and what a machine's kernel said.

use std::path::Path;

use crate::stuck;

/// What carries out the machine's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accelerator {
    /// The host's processor.
    Kvm,
    /// QEMU's emulator.
    Tcg,
    /// QEMU's emulator with a clock that counts instructions, a nanosecond each.
    CountedTcg,
}

/// A virtual machine, as QEMU's arguments describe it.
#[derive(Clone, Debug)]
pub struct Hardware<'a> {
    /// What carries out the machine's instructions.
    pub accelerator: Accelerator,
    /// Its memory in QEMU's notation: `2G`.
    pub memory: &'a str,
    /// The number of its processors. With [`Accelerator::CountedTcg`] it is 1.
    pub processors: u32,
    /// The kernel.
    pub kernel: &'a Path,
    /// The hypervisor that boots the kernel as its first guest: Xen.
    pub hypervisor: Option<&'a Path>,
    /// The directory of this run: it has `initramfs` and `socket` and gets `kernel.log`.
    pub directory: &'a Path,
    /// More words for the kernel's command line.
    pub append: &'a str,
}

/// Emulated processors. Without cmpxchg16b: QEMU 7.2 leaves an address in the flags after it, with
/// which a kernel soon dies. Without smap: where a program executes iret, QEMU 7.2 reads the stack
/// with the rights of the kernel, which smap refuses, and the kernel dies.
const EMULATED: &str = "max,la57=off,cx16=off,smap=off";
/// An emulated processor on a busy host may be stopped for longer than a kernel accepts by default.
/// The kernel's tests of its ciphers, which warn if one takes a minute, are left out.
const PATIENCE: &str = "watchdog_thresh=60 sysctl.kernel.hung_task_timeout_secs=1200 \
                        rcupdate.rcu_cpu_stall_timeout=200 cryptomgr.notests";

/// Of Xen. Without smap: where a guest executes iret, QEMU 7.2 reads the stack with the rights of
/// the hypervisor, which smap refuses. What guards against faults of processors only slows
/// emulation down.
const XEN: &str = "console=com1 loglvl=warning guest_loglvl=warning smap=no spec-ctrl=no xpti=no";

impl Hardware<'_> {
    /// QEMU's arguments.
    pub fn arguments(&self) -> Vec<String> {
        let (processor, accelerator, processors): (String, &[&str], u32) = match self.accelerator {
            Accelerator::Kvm => ("host".to_owned(), &["-accel", "kvm"], self.processors),
            Accelerator::Tcg => (EMULATED.to_owned(), &["-accel", "tcg,thread=multi"], self.processors),
            // Without fast string instructions, by which the kernel would copy: the clock counts one for each
            // byte, far more than they cost.
            Accelerator::CountedTcg => {
                (format!("{EMULATED},erms=off,fsrm=off"), &["-accel", "tcg,thread=single", "-icount", "shift=0"], 1)
            }
        };
        let directory = self.directory.display();
        let patience = if self.accelerator == Accelerator::Tcg { PATIENCE } else { "" };
        let memory = self.memory;
        let mut arguments: Vec<String> = Vec::new();
        let mut add = |words: &[&str]| arguments.extend(words.iter().map(|&word| word.to_owned()));
        add(&["-machine", "q35,memory-backend=memory", "-cpu", &processor]);
        add(accelerator);
        add(&["-smp", &processors.to_string(), "-m", memory]);
        // The files' server reads and writes the machine's memory.
        add(&["-object", &format!("memory-backend-memfd,id=memory,size={memory},share=on")]);
        add(&["-display", "none", "-monitor", "none", "-nodefaults", "-no-user-config", "-no-reboot"]);
        add(&["-qmp", &format!("unix:{directory}/{},server=on,wait=off", stuck::SOCKET)]);
        add(&["-serial", &format!("file:{directory}/kernel.log")]);
        add(&["-chardev", "stdio,id=output,signal=off", "-serial", "chardev:output"]);
        add(&["-chardev", &format!("socket,id=files,path={directory}/socket")]);
        add(&["-device", "vhost-user-fs-pci,chardev=files,tag=host", "-device", "virtio-rng-pci"]);
        // On a busy host, the emulated timer may be late when the kernel checks that there is one, and panics if not.
        let report = stuck::KERNEL_PARAMETERS;
        let append = format!("panic=-1 oops=panic {report} no_timer_check lab={directory} {patience} {}", self.append);
        let append = append.split_whitespace().collect::<Vec<_>>().join(" ");
        let (kernel, initramfs) = (self.kernel.display(), format!("{directory}/initramfs"));
        if let Some(hypervisor) = self.hypervisor {
            // A multiboot kernel, whose modules are the guest with its command line, and the guest's first files. The
            // serial line of the log is Xen's, by which the guest's messages go, too.
            let guest = format!("{kernel} console=hvc0 {append}").replace(',', ",,");
            add(&["-kernel", &hypervisor.display().to_string(), "-append", XEN]);
            add(&["-initrd", &format!("{guest},{initramfs}")]);
        } else {
            add(&["-kernel", &kernel.to_string(), "-initrd", &initramfs]);
            add(&["-append", &format!("console=ttyS0 {append}")]);
        }
        arguments
    }
}

/// The lines of a kernel's log that report an error in the kernel.
pub fn kernel_warnings(log: &str) -> Vec<&str> {
    const WORDS: [&str; 6] = ["WARNING:", "BUG:", "kernel BUG", "Oops", "KASAN:", "bad page"];
    const PAIRS: [(&str, &str); 2] = [("INFO: task ", " blocked"), ("possible ", " detected")];
    let warns = |line: &&str| {
        WORDS.iter().any(|word| line.contains(word))
            || line.contains("Bad page")
            || PAIRS.iter().any(|(first, second)| {
                line.find(first).is_some_and(|start| line[start + first.len()..].contains(second))
            })
    };
    log.lines().filter(warns).collect()
}

/// Whether the kernel executed a breakpoint that it had removed while it changed its own code.
/// QEMU's emulation of several processors does that now and then.
pub fn met_removed_breakpoint(log: &str) -> bool {
    log.contains("Oops: int3")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(accelerator: Accelerator, append: &str) -> String {
        Hardware {
            accelerator,
            memory: "1G",
            processors: 4,
            kernel: Path::new("/cache/bzImage"),
            hypervisor: None,
            directory: Path::new("/cache/run.1"),
            append,
        }
        .arguments()
        .join(" ")
    }

    #[test]
    fn memory_is_shared_with_the_server_of_files() {
        let line = arguments(Accelerator::Tcg, "");
        assert!(line.contains("-m 1G") && line.contains("memory-backend-memfd,id=memory,size=1G,share=on"), "{line}");
        assert!(line.contains("socket,id=files,path=/cache/run.1/socket"), "{line}");
        assert!(line.contains("-kernel /cache/bzImage -initrd /cache/run.1/initramfs"), "{line}");
    }

    #[test]
    fn the_counted_clock_has_one_processor() {
        let line = arguments(Accelerator::CountedTcg, "");
        assert!(line.contains("-smp 1 ") && line.contains("-icount shift=0") && line.contains("erms=off"), "{line}");
        assert!(!line.contains("thread=multi"), "{line}");
    }

    #[test]
    fn each_accelerator_has_its_processor() {
        assert!(arguments(Accelerator::Kvm, "").contains("-cpu host -accel kvm -smp 4"));
        let line = arguments(Accelerator::Tcg, "");
        assert!(line.contains("-cpu max,la57=off,cx16=off,smap=off -accel tcg,thread=multi -smp 4"), "{line}");
    }

    #[test]
    fn the_kernels_command_line_is_one_argument() {
        let hardware = Hardware {
            accelerator: Accelerator::Tcg,
            memory: "1G",
            processors: 1,
            kernel: Path::new("k"),
            hypervisor: None,
            directory: Path::new("d"),
            append: "numa=fake=2",
        };
        let arguments = hardware.arguments();
        let at = arguments.iter().position(|argument| argument == "-append").unwrap();
        assert_eq!(arguments.len(), at + 2);
        let line = &arguments[at + 1];
        assert!(
            line.starts_with("console=ttyS0 ") && line.contains("lab=d ") && line.ends_with("numa=fake=2"),
            "{line}"
        );
        assert!(line.contains("hung_task_timeout_secs=1200"), "{line}");
        assert!(!arguments_of_kvm().contains("hung_task"));
    }

    #[test]
    fn xen_gets_the_kernel_and_its_command_line_as_a_module() {
        let hardware = Hardware {
            accelerator: Accelerator::Kvm,
            memory: "1G",
            processors: 1,
            kernel: Path::new("k"),
            hypervisor: Some(Path::new("x")),
            directory: Path::new("d"),
            append: "a=1,2",
        };
        let arguments = hardware.arguments();
        let after = |name: &str| &arguments[arguments.iter().position(|word| word == name).unwrap() + 1];
        assert_eq!(after("-kernel"), "x");
        assert!(after("-append").starts_with("console=com1 "));
        assert_eq!(
            after("-initrd"),
            "k console=hvc0 panic=-1 oops=panic unknown_nmi_panic panic_print=69 no_timer_check lab=d a=1,,2,d/initramfs"
        );
    }

    fn arguments_of_kvm() -> String {
        arguments(Accelerator::Kvm, "")
    }

    #[test]
    fn warnings_of_a_kernel_are_found() {
        for line in [
            "[    1.0] WARNING: CPU: 0 PID: 1 at mm/memory.c:1",
            "[    1.0] BUG: KASAN: slab-use-after-free in x",
            "[    1.0] kernel BUG at mm/rmap.c:1!",
            "[    1.0] Oops: 0002 [#1] PREEMPT SMP",
            "[    1.0] INFO: task oracle:12 blocked for more than 120 seconds.",
            "[    1.0] possible circular locking dependency detected",
            "[    1.0] BUG: Bad page state in process x",
        ] {
            assert_eq!(kernel_warnings(&format!("fine\n{line}\nfine\n")), [line]);
        }
        let fine = "[    1.0] INFO: lockdep is turned on\n[ 1.0] blocked INFO: task \n[ 1.0] it is possible to boot\n";
        assert_eq!(kernel_warnings(fine), [""; 0]);
        assert!(met_removed_breakpoint("[ 1.0] Oops: int3: 0000"));
    }
}
