//! The kernels of the lab: their names, what each consists of, and where it is kept.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use sha2::{Digest, Sha256};

use crate::{Error, Result, cache, source_root};

/// The modules that Debian's kernel needs to run on the host's files, to swap, and for CRIU.
pub const STOCK_MODULES: [&str; 18] = [
    "overlay",
    "zsmalloc",
    "zram",
    "unix_diag",
    "inet_diag",
    "tcp_diag",
    "udp_diag",
    "raw_diag",
    "af_packet_diag",
    "netlink_diag",
    "tun",
    "veth",
    "nfnetlink",
    "nf_tables",
    "nf_conntrack_netlink",
    "iptable_filter",
    "ip6table_filter",
    "xt_mark",
];

/// The modules that older kernels of Debian need besides: to reach the host's files, and to
/// compress what they swap out.
pub const OLDER_MODULES: [&str; 3] = ["virtio_pci", "virtiofs", "lzo-rle"];

/// The modules by which a machine of the lab runs machines of its own, on processors that QEMU and
/// Bochs emulate.
pub const HYPERVISOR_MODULES: [&str; 2] = ["kvm_amd", "kvm_intel"];

/// The suites that have the newest stable kernel, which the host's own need not have.
pub const NEWEST_SUITES: [&str; 2] = ["bookworm-backports", "trixie"];

/// A package of Debian that contains a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelPackage {
    /// The suites that have it, the preferred one first.
    pub suites: &'static [&'static str],
    /// The modules that are inserted before anything else.
    pub modules: Vec<&'static str>,
}

/// The version of the way in which kernels are built. Part of each kernel's key: raise it when the
/// way changes.
const RECIPE: u32 = 1;

/// A kernel of the lab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// With the patches of kernel/ldt.
    Ldt,
    /// The same as `Ldt`, without the patches.
    Plain,
    /// Debian's cloud kernel of the version that the lab builds kernels from.
    Stock,
    /// As `Stock`, with KVM.
    Hypervisor,
    /// The cloud kernel of Debian 12: Linux 6.1.
    Debian12,
    /// The cloud kernel of Debian 11: Linux 5.10.
    Debian11,
    /// As `Ldt`, with what a distribution's kernel has besides: Xen, memory of devices (DAX),
    /// io_uring, DAMON, and the balancing of nodes.
    LdtDistribution,
    /// As `LdtDistribution`, without the patches.
    PlainDistribution,
    /// As `Ldt`, with the kernel's own checks: DEBUG_VM, PAGE_TABLE_CHECK, lockdep, KASAN.
    LdtDebug,
    /// As `Plain`, with the same checks.
    PlainDebug,
}

impl Kernel {
    /// All kernels.
    pub const ALL: [Kernel; 10] = [
        Kernel::Ldt,
        Kernel::Plain,
        Kernel::Stock,
        Kernel::Hypervisor,
        Kernel::Debian12,
        Kernel::Debian11,
        Kernel::LdtDistribution,
        Kernel::PlainDistribution,
        Kernel::LdtDebug,
        Kernel::PlainDebug,
    ];

    /// The name that the command line uses.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Ldt => "ldt",
            Kernel::Plain => "plain",
            Kernel::Stock => "stock",
            Kernel::Hypervisor => "hypervisor",
            Kernel::Debian12 => "debian-12",
            Kernel::Debian11 => "debian-11",
            Kernel::LdtDistribution => "ldt-distribution",
            Kernel::PlainDistribution => "plain-distribution",
            Kernel::LdtDebug => "ldt-debug",
            Kernel::PlainDebug => "plain-debug",
        }
    }

    /// Whether the kernel has the patches of kernel/ldt.
    pub fn has_series(self) -> bool {
        matches!(self, Kernel::Ldt | Kernel::LdtDistribution | Kernel::LdtDebug)
    }

    /// Whether the kernel can be a guest of Xen, and has memory of devices.
    pub fn is_of_distribution(self) -> bool {
        matches!(self, Kernel::LdtDistribution | Kernel::PlainDistribution)
    }

    /// Whether the kernel has its own checks.
    pub fn checks_itself(self) -> bool {
        matches!(self, Kernel::LdtDebug | Kernel::PlainDebug)
    }

    /// How long the kernel takes to be had from nothing on two processors, in minutes.
    pub fn minutes(self) -> u32 {
        match self {
            Kernel::Stock | Kernel::Hypervisor | Kernel::Debian12 | Kernel::Debian11 => 1,
            Kernel::Ldt | Kernel::Plain => 8,
            Kernel::LdtDistribution | Kernel::PlainDistribution => 10,
            Kernel::LdtDebug | Kernel::PlainDebug => 12,
        }
    }

    /// Where the kernel comes from, if it is not built: Debian's suites that have it as a package,
    /// the preferred one first, and the modules that it needs.
    pub fn package(self) -> Option<KernelPackage> {
        let package = |suites, modules: &[&[&'static str]]| KernelPackage { suites, modules: modules.concat() };
        match self {
            // These modules are part of the kernel.
            Kernel::Stock => Some(package(&NEWEST_SUITES, &[&STOCK_MODULES])),
            Kernel::Hypervisor => Some(package(&NEWEST_SUITES, &[&STOCK_MODULES, &HYPERVISOR_MODULES])),
            Kernel::Debian12 => Some(package(&["bookworm"], &[&OLDER_MODULES, &STOCK_MODULES])),
            Kernel::Debian11 => Some(package(&["bullseye"], &[&OLDER_MODULES, &STOCK_MODULES])),
            Kernel::Ldt
            | Kernel::Plain
            | Kernel::LdtDistribution
            | Kernel::PlainDistribution
            | Kernel::LdtDebug
            | Kernel::PlainDebug => None,
        }
    }

    /// Regular expressions for the lines of tests that its machines may skip, because it lacks what
    /// they need. The host, or the machine of another kernel, runs them.
    pub fn allowed_skips(self) -> &'static str {
        match self {
            Kernel::Ldt | Kernel::LdtDistribution | Kernel::LdtDebug => "",
            Kernel::Stock | Kernel::Hypervisor | Kernel::Plain | Kernel::PlainDistribution | Kernel::PlainDebug => {
                "lightweight dirty tracking"
            }
            Kernel::Debian12 => {
                "lightweight dirty tracking\nLinux 6\\.(7|11)\nPAGEMAP_SCAN\nPROCMAP_QUERY\nasynchronous write-protection"
            }
            Kernel::Debian11 => {
                "lightweight dirty tracking\nLinux (5\\.19|6\\.(7|11))\nPAGEMAP_SCAN\nPROCMAP_QUERY\n\
                 asynchronous write-protection"
            }
        }
    }

    /// The fragments of its configuration, in the order in which they are merged.
    pub fn fragments(self) -> Vec<PathBuf> {
        let mut names = vec!["base.config"];
        if self.has_series() {
            names.push("ldt.config");
        }
        names.push("devices.config");
        if self.is_of_distribution() {
            names.push("distribution.config");
        }
        if self.checks_itself() {
            names.push("debug.config");
        }
        names.iter().map(|name| source_root().join("lab/config").join(name)).collect()
    }

    /// The patches that it has, in order.
    pub fn patches(self) -> Result<Vec<PathBuf>> {
        if !self.has_series() {
            return Ok(Vec::new());
        }
        patches_in(&source_root().join("kernel/ldt"))
    }

    /// Where the kernel is kept, whether it exists or not. `source_version` is what the file
    /// `version` beside the kernel's source contains; the name covers everything that the
    /// kernel is made from, and nothing else that a patch contains.
    pub fn directory(self, source_version: &[u8]) -> Result<PathBuf> {
        let key = if let Some(package) = self.package() {
            key([words(&package.modules).as_bytes()])
        } else {
            let mut parts = vec![source_version.to_vec(), format!("{RECIPE}\n").into_bytes()];
            for path in self.patches()? {
                let patch = std::fs::read_to_string(&path).map_err(Error::file("read", &path))?;
                parts.push(what_is_compiled(&patch).into_bytes());
            }
            for path in self.fragments() {
                parts.push(std::fs::read(&path).map_err(Error::file("read", &path))?);
            }
            key(parts.iter().map(Vec::as_slice))
        };
        Ok(cache::lab().join("kernels").join(format!("{}-{key}", self.name())))
    }
}

impl std::fmt::Display for Kernel {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

impl FromStr for Kernel {
    type Err = Error;

    fn from_str(name: &str) -> Result<Kernel> {
        Kernel::ALL.into_iter().find(|kernel| kernel.name() == name).ok_or_else(|| {
            let names = Kernel::ALL.map(Kernel::name).join(", ");
            Error::unmet(format!("no kernel has the name {name}"), format!("use one of: {names}"))
        })
    }
}

/// The patches in a directory, in order.
///
/// # Errors
/// If it cannot be read.
pub fn patches_in(directory: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(directory).map_err(Error::file("read", directory))?;
    let files = entries.flatten().map(|entry| entry.path());
    let mut patches: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|extension| extension == "patch")).collect();
    patches.sort();
    Ok(patches)
}

/// The changes of a patch that a build of the kernel may read: no message, no documentation, and no
/// selftest.
fn what_is_compiled(patch: &str) -> String {
    const NOT_COMPILED: [&str; 3] = ["Documentation/", "tools/testing/", "MAINTAINERS "];
    let mut is_compiled = false;
    let mut compiled = String::new();
    for line in patch.split_inclusive('\n') {
        if let Some(file) = line.strip_prefix("diff --git a/") {
            is_compiled = !NOT_COMPILED.iter().any(|start| file.starts_with(start));
        }
        if is_compiled {
            compiled += line;
        }
    }
    compiled
}

/// The first 16 hexadecimal digits of the parts' SHA-256.
pub fn key<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part);
    }
    hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect()
}

/// The words as a line of text.
pub fn words(words: &[&str]) -> String {
    words.join(" ") + "\n"
}

/// Those of the settings `CONFIG_…=y` in `fragments` that `config` does not have. What a fragment
/// asks for and the kernel does not get is a mistake in the fragment.
pub fn lost_settings<'a>(fragments: &'a str, config: &str) -> Vec<&'a str> {
    let there: std::collections::HashSet<&str> = config.lines().collect();
    let wanted = fragments.lines().filter(|line| line.starts_with("CONFIG_") && line.ends_with("=y"));
    wanted.filter(|line| !there.contains(line)).collect()
}

/// The release of the only kernel in a directory that an unpacked package has as `boot`: `6.12.1`
/// of `vmlinuz-6.12.1`.
pub fn release_of(boot: &Path) -> Result<String> {
    let entries = std::fs::read_dir(boot).map_err(Error::file("read", boot))?;
    let names = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter_map(|name| name.strip_prefix("vmlinuz-").map(str::to_owned)).next().ok_or_else(|| {
        Error::unmet(format!("{} has no vmlinuz", boot.display()), "run `lab/lab clean`, then repeat the command")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kernel_has_a_name_of_its_own() {
        for kernel in Kernel::ALL {
            assert_eq!(kernel.name().parse::<Kernel>().unwrap(), kernel);
        }
        assert!("ldt-".parse::<Kernel>().unwrap_err().to_string().contains("ldt-debug"));
    }

    #[test]
    fn a_key_is_sha256_of_its_parts() {
        // printf 'abc' | sha256sum
        assert_eq!(key([b"a".as_slice(), b"bc"]), "ba7816bf8f01cfea");
    }

    #[test]
    fn a_key_covers_source_patches_and_configuration() {
        let name = |kernel: Kernel, version: &[u8]| kernel.directory(version).unwrap().file_name().unwrap().to_owned();
        let keys: Vec<_> = [Kernel::Ldt, Kernel::Plain, Kernel::LdtDistribution, Kernel::LdtDebug, Kernel::PlainDebug]
            .iter()
            .flat_map(|&kernel| [name(kernel, b"6.12.1\n"), name(kernel, b"6.12.2\n")])
            .map(|name| name.into_string().unwrap().rsplit('-').next().unwrap().to_owned())
            .collect();
        for (index, key) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(key), "{keys:?}");
        }
        for kernel in [Kernel::Stock, Kernel::Hypervisor, Kernel::Debian12, Kernel::Debian11] {
            assert_eq!(name(kernel, b"6.12.1\n"), name(kernel, b"6.12.2\n"));
        }
    }

    #[test]
    fn a_kernel_is_made_from_the_code_of_its_patches() {
        let memory = "diff --git a/mm/memory.c b/mm/memory.c\n--- a/mm/memory.c\n@@ -1 +1 @@\n-a\n+b\n";
        let objtool = "diff --git a/tools/objtool/check.c b/tools/objtool/check.c\n+c\n";
        let others = ["Documentation/mm/x.rst", "tools/testing/selftests/mm/x.c", "MAINTAINERS"];
        let others = others.map(|file| format!("diff --git a/{file} b/{file}\n+d\n"));
        let [documentation, selftest, maintainers] = &others;
        let patch = format!("Subject: x\n---\n{documentation}{memory}{selftest}{objtool}{maintainers}");
        assert_eq!(what_is_compiled(&patch), format!("{memory}{objtool}"));
        assert_eq!(what_is_compiled("Subject: x\n\nThis diff --git a/mm/x.c is a message.\n"), "");
    }

    #[test]
    fn the_kernel_with_the_series_has_all_of_it_in_order() {
        let patches = Kernel::Ldt.patches().unwrap();
        assert!(patches.len() >= 13);
        for (index, patch) in patches.iter().enumerate() {
            let name = patch.file_name().unwrap().to_str().unwrap();
            assert!(name.starts_with(&format!("{:04}-", index + 1)), "{name}");
        }
        assert!(Kernel::Plain.patches().unwrap().is_empty());
        assert_eq!(Kernel::LdtDebug.fragments().len(), 4);
        assert_eq!(Kernel::LdtDistribution.patches().unwrap(), patches);
        assert_eq!(Kernel::Plain.fragments().len() + 1, Kernel::Ldt.fragments().len());
    }

    #[test]
    fn settings_that_are_lost_are_found() {
        let fragments = "# A comment\nCONFIG_A=y\n# CONFIG_B is not set\nCONFIG_C=y\nCONFIG_D=5\n";
        assert_eq!(lost_settings(fragments, "CONFIG_A=y\nCONFIG_C=m\n"), ["CONFIG_C=y"]);
        assert_eq!(lost_settings(fragments, "CONFIG_C=y\nCONFIG_A=y\n"), [""; 0]);
        assert_eq!(lost_settings(fragments, "CONFIG_A=yes\nCONFIG_C=y\n"), ["CONFIG_A=y"]);
    }
}
