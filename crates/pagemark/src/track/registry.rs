//! The registry of mechanisms. Each mechanism has a file, whose `ENTRY` says everything that other
//! code has to know about it: its name, what it needs, and how its trackers are made in each
//! [`Scope`].
//!
//! To add a mechanism, write its file with its `ENTRY`, and add a line to the list below.
//!
//! The names are Pagemark's own. Papers have other names for some mechanisms:
//!
//! | paper | name there | name here |
//! |---|---|---|
//! | HAC, II-B | PT (page tracking) | `mprotect` |
//! | HAC, IV-B | Emul | `emulate` |
//! | HAC, IV-A | PTxen | `kvm-log`, `kvm-ring` |
//! | PML, 3 | PML, dirty logging | `kvm-log` |
//! | HAC, IV-D | Scanxen | `kvm-scan` |
//! | HAC, IV-C | Emulxen (in the hypervisor) | `kvm-emulate` |
//! | LDT, III | LDT | `ldt` |
//! | LDT, II-B; SPM | soft-dirty | `soft-dirty` |
//! | SPM | comparison of all pages | `compare` |
//! | PML, 2.4 | stop-and-copy of all memory | `full` |

use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::{fmt, io};

use pagemark_linux::at_fork::hold_off;
use pagemark_linux::memory::Memory;
use pagemark_linux::own_mappings::OwnMappings;
use pagemark_linux::pagemap::Pagemap;
use pagemark_linux::per_process::PerProcess;
use pagemark_linux::room;
use pagemark_linux::userfaultfd::Userfaultfd;
use serde::{Deserialize, Serialize};

use super::registration::Registration;
use super::{OwnMemory, Pages, Tracker, pagemap_scan};
use crate::Error;

/// Declares [`Mechanism`] and the entry of each.
macro_rules! registry {
    ($($variant:ident: $module:ident),+ $(,)?) => {
        /// A way to find out which memory was written.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        pub enum Mechanism {
            $(#[doc = concat!("See [`", stringify!($module), "`](super::", stringify!($module), ").")] $variant),+
        }

        impl Mechanism {
            /// Every mechanism, the preferred one first.
            pub const ALL: [Mechanism; [$(Mechanism::$variant),+].len()] = [$(Mechanism::$variant),+];

            /// What is known of the mechanism.
            pub fn entry(self) -> &'static MechanismEntry {
                match self {
                    $(Mechanism::$variant => &super::$module::ENTRY),+
                }
            }
        }
    };
}

// In the order of preference.
registry! {
    Ldt: ldt,
    Adaptive: adaptive,
    PagemapScan: pagemap_scan,
    SoftDirty: soft_dirty,
    KvmLog: kvm_log,
    KvmRing: kvm_ring,
    KvmScan: kvm_scan,
    Uffd: uffd,
    Mprotect: mprotect,
    KvmEmulate: kvm_emulate,
    Emulate: emulate,
    Compare: compare,
    Full: full,
}

/// A tracker of any mechanism, or why it could not be made.
pub type NewTracker = Result<Box<dyn Tracker>, Error>;

/// What a mechanism is, and how its trackers are made.
#[derive(Debug)]
pub struct MechanismEntry {
    /// Name in commands, reports and manifests.
    pub name: &'static str,
    /// How the mechanism finds written memory: one sentence without a full stop.
    pub description: &'static str,
    /// What it needs of the machine.
    pub requirement: &'static str,
    /// True if an address space can have one tracker of the mechanism only, whose collects clear
    /// the marks of all memory. Such a mechanism is chosen for regions only by name.
    pub is_exclusive: bool,
    /// True if writes through other mappings of shared memory, by other processes for example, are
    /// reported too.
    pub sees_other_mappings: bool,
    /// Makes a tracker of a region.
    pub own_memory: fn(&OwnMemory) -> NewTracker,
    /// For mechanisms that track virtual machines.
    pub machine: Option<MachineTracking>,
    /// For mechanisms that track other processes.
    pub process: Option<ProcessTracking>,
}

/// How a mechanism tracks the memory of a virtual machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MachineTracking {
    /// As memory of QEMU's process, by [`MechanismEntry::process`].
    OfProcess,
    /// Each first write to a page waits for a thread of Pagemark, which can copy the page before.
    /// `pagemark-vm` makes the trackers: they also keep pages for
    /// [`Strategy::CopyOnWrite`](crate::checkpointer::Strategy::CopyOnWrite).
    HoldsWrites,
    /// The hypervisor knows what the machine's processors write, and another mechanism what QEMU
    /// does. `pagemark-vm` makes the trackers.
    ByHypervisor,
}

/// How a mechanism tracks another process.
#[derive(Clone, Copy, Debug)]
pub struct ProcessTracking {
    /// True if [`ProcessMemory::userfaultfd`] must be there.
    pub needs_userfaultfd: bool,
    /// True if the threads of the process must be stopped during each collect: a write at that
    /// moment would be missed.
    pub needs_stop: bool,
    /// True if the process runs in a machine of `pagemark-kvm`, and must have given it up
    /// ([`pagemark_kvm_protocol::description`]) during each collect.
    pub needs_parking: bool,
    /// True if writes are found by comparing content. Between a comparison and the copy of what
    /// differs, the memory must not change, so it is compared only while the target is frozen.
    pub compares_content: bool,
    /// Number of intervals in a row in which a page must be written before its writes cost the
    /// program nothing. None if each interval's first write to a page costs the same.
    pub hot_after: Option<usize>,
    /// The parts of private memory, each of which has a tracker of its own.
    pub private_parts: &'static [MemoryPart],
    /// Makes the tracker of a part: of one of `private_parts`, or of [`MemoryPart::SharedFile`].
    pub tracker: fn(&ProcessMemory, MemoryPart) -> NewTracker,
}

/// A part of the memory of a process, by the kind of its mappings.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryPart {
    /// Private mappings, whether of files or not.
    Private,
    /// Private mappings without a file.
    Anonymous,
    /// Private mappings of files.
    PrivateFile,
    /// Shared mappings of files.
    SharedFile,
}

impl MemoryPart {
    /// The parts in which a mechanism tracks private memory if it must tell mappings of files from
    /// others.
    pub(super) const BY_FILE: &[MemoryPart] = &[MemoryPart::Anonymous, MemoryPart::PrivateFile];

    /// Which pages of the part hold data of their own.
    pub fn pages(self) -> Pages {
        match self {
            MemoryPart::Anonymous | MemoryPart::SharedFile => Pages::All,
            MemoryPart::Private | MemoryPart::PrivateFile => Pages::NotOfFile,
        }
    }
}

/// What trackers of a process are made of.
#[derive(Clone, Debug)]
pub struct ProcessMemory {
    /// A thread of the process that runs.
    pub thread: i32,
    /// Its pagemap.
    pub pagemap: Arc<Pagemap>,
    /// Its memory.
    pub memory: Arc<Memory>,
    /// A userfaultfd that was made in the process.
    pub userfaultfd: Option<Arc<Userfaultfd>>,
    /// Registers the mappings; `None` if nobody changes them meanwhile, so that a tracker does.
    pub registration: Option<Arc<Registration>>,
}

impl ProcessMemory {
    /// This process, as if it were another one: for probes and tests.
    ///
    /// # Errors
    /// `/proc` is not mounted, or `ErrorKind::Unavailable` without the userfaultfd that
    /// `mechanism` needs.
    pub fn of_this_process(mechanism: Mechanism) -> Result<ProcessMemory, Error> {
        let needs_userfaultfd = mechanism.entry().process.is_some_and(|process| process.needs_userfaultfd);
        let userfaultfd = needs_userfaultfd.then(Userfaultfd::of_this_process).transpose();
        let userfaultfd = userfaultfd.map_err(|error| pagemap_scan::unavailable(mechanism, error))?;
        Ok(ProcessMemory {
            thread: std::process::id() as i32,
            pagemap: own_pagemap()?,
            memory: Arc::new(own_file("mem", Memory::of_this_process())?),
            userfaultfd: userfaultfd.map(Arc::new),
            registration: None,
        })
    }
}

/// The pagemap of this process, which all trackers share: each region would need a descriptor
/// otherwise.
pub(crate) fn own_pagemap() -> Result<Arc<Pagemap>, Error> {
    static SHARED: PerProcess<Pagemap> = PerProcess::new();
    own_file("pagemap", SHARED.get(Pagemap::of_this_process))
}

/// The list of the mappings of this process, which all trackers share.
pub(super) fn own_mappings() -> Result<Arc<OwnMappings>, Error> {
    static SHARED: PerProcess<OwnMappings> = PerProcess::new();
    own_file("maps", SHARED.get(OwnMappings::open))
}

pub(super) fn own_file<T>(name: &str, opened: io::Result<T>) -> Result<T, Error> {
    opened.map_err(|error| {
        let is_hidden = error.kind() == io::ErrorKind::PermissionDenied;
        let error = Error::while_tracking(error, || format!("opening /proc/self/{name}"));
        match is_hidden {
            // A program of which the kernel makes no core dump owns none of these files.
            true => error.help(
                "a program that has changed its user, or has rights from its file, calls prctl(PR_SET_DUMPABLE, 1) \
                 before",
            ),
            false => error,
        }
    })
}

/// Whose memory is tracked.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// Regions of the program's own memory.
    OwnMemory,
    /// Other processes.
    Process,
    /// Virtual machines of QEMU.
    Machine,
}

impl Scope {
    /// Every scope.
    pub const ALL: [Scope; 3] = [Scope::OwnMemory, Scope::Process, Scope::Machine];
}

impl Mechanism {
    /// The name in commands and reports.
    pub fn name(self) -> &'static str {
        self.entry().name
    }

    /// True if it tracks other processes, by comparing content:
    /// [`ProcessTracking::compares_content`].
    pub fn compares_content(self) -> bool {
        self.entry().process.is_some_and(|process| process.compares_content)
    }

    /// True if the mechanism can track memory of that scope.
    pub fn has_scope(self, scope: Scope) -> bool {
        match scope {
            Scope::OwnMemory => true,
            Scope::Process => self.entry().process.is_some(),
            Scope::Machine => self.entry().machine.is_some(),
        }
    }

    /// True if writes to a virtual machine's memory wait for a thread of Pagemark
    /// ([`MachineTracking::HoldsWrites`]), as copy-on-write needs.
    pub fn holds_writes(self) -> bool {
        self.entry().machine == Some(MachineTracking::HoldsWrites)
    }

    /// True if checkpoints of virtual machines that it tracks can use copy-on-write: it holds
    /// writes, or writes can be held beside it.
    pub fn allows_copy_on_write(self) -> bool {
        matches!(self.entry().machine, Some(MachineTracking::HoldsWrites | MachineTracking::ByHypervisor))
    }

    /// The mechanisms that can track memory of a scope, the preferred one first.
    pub fn of_scope(scope: Scope) -> impl Iterator<Item = Mechanism> {
        Mechanism::ALL.into_iter().filter(move |mechanism| mechanism.has_scope(scope))
    }

    /// Makes a tracker of memory of this process, of the type that is used in the scope: that of
    /// regions, or that of anonymous memory of other processes.
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`, also for [`MachineTracking::HoldsWrites`] and
    /// [`MachineTracking::ByHypervisor`], whose trackers are made by `pagemark-vm`; or `/proc` is
    /// not mounted.
    pub fn tracker(self, scope: Scope, memory: &OwnMemory) -> NewTracker {
        match (scope, self.entry().machine) {
            (Scope::OwnMemory, _) => (self.entry().own_memory)(memory),
            (Scope::Machine, None) => Err(Error::unavailable(self, "it does not track virtual machines")),
            (Scope::Machine, Some(MachineTracking::HoldsWrites | MachineTracking::ByHypervisor)) => {
                Err(Error::unavailable(self, "its trackers of virtual machines are made by pagemark-vm"))
            }
            (Scope::Process, _) | (Scope::Machine, Some(MachineTracking::OfProcess)) => {
                let process = self.process_tracking()?;
                let part = process.private_parts.first().copied().unwrap_or(MemoryPart::Private);
                (process.tracker)(&ProcessMemory::of_this_process(self)?, part)
            }
        }
    }

    /// How the mechanism tracks other processes.
    ///
    /// # Errors
    /// `ErrorKind::Unavailable`: it tracks a program's own memory only.
    pub fn process_tracking(self) -> Result<ProcessTracking, Error> {
        self.entry()
            .process
            .ok_or_else(|| Error::unavailable(self, "it tracks only a program's own memory, as a region"))
    }

    /// What `auto` means: the preferred mechanism of the scope among those that work on this
    /// machine. For own memory that leaves out the exclusive mechanism, `soft-dirty`: a program may
    /// have many regions, and with `soft-dirty` no thread may write while a region is collected.
    /// For virtual machines it leaves out what holds writes, see
    /// [`Mechanism::choose_to_hold_writes`], and what not every machine has.
    pub fn choose(scope: Scope) -> Mechanism {
        static CHOSEN: [OnceLock<Mechanism>; Scope::ALL.len()] = [const { OnceLock::new() }; Scope::ALL.len()];
        let chosen = &CHOSEN[scope as usize];
        if let Some(&chosen) = chosen.get() {
            return chosen;
        }
        let _forks = hold_off();
        // A mechanism that was left out because something was used up is tried again.
        let mut is_final = true;
        let found = Mechanism::of_scope(scope).filter(|mechanism| mechanism.may_be_chosen(scope)).find(|&mechanism| {
            let checked = super::probe::check(mechanism, scope);
            is_final &= !checked.as_ref().is_err_and(|error| error.io_error().is_some_and(room::is_passing));
            checked.is_ok()
        });
        let found = found.unwrap_or(Mechanism::Full);
        if is_final { *chosen.get_or_init(|| found) } else { found }
    }

    /// What `auto` means for virtual machines with the strategy
    /// [`CopyOnWrite`](crate::checkpointer::Strategy::CopyOnWrite). None if no mechanism holds
    /// writes.
    pub fn choose_to_hold_writes() -> Option<Mechanism> {
        Mechanism::of_scope(Scope::Machine).find(|mechanism| mechanism.holds_writes())
    }

    /// False for what [`Mechanism::choose`] leaves out although it may work.
    pub fn may_be_chosen(self, scope: Scope) -> bool {
        match scope {
            Scope::OwnMemory => !self.entry().is_exclusive,
            Scope::Process => true,
            Scope::Machine => self.entry().machine == Some(MachineTracking::OfProcess),
        }
    }
}

impl fmt::Display for Mechanism {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mechanism {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        Mechanism::ALL.into_iter().find(|mechanism| mechanism.name() == name).ok_or_else(|| {
            let names: Vec<_> = Mechanism::ALL.iter().map(|mechanism| mechanism.name()).collect();
            format!("no mechanism is called {name}; there are {}", names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use pagemark_linux::scratch::Scratch;

    use super::*;
    use crate::ErrorKind;

    #[test]
    fn names_are_unique_and_are_the_same_everywhere() {
        let names: BTreeSet<_> = Mechanism::ALL.iter().map(|mechanism| mechanism.name()).collect();
        assert_eq!(names.len(), Mechanism::ALL.len());
        for mechanism in Mechanism::ALL {
            assert_eq!(mechanism.name().parse(), Ok(mechanism));
            assert_eq!(serde_json::to_value(mechanism).unwrap(), mechanism.name());
            let entry = mechanism.entry();
            assert!(!entry.description.is_empty() && !entry.requirement.is_empty(), "{mechanism}");
            assert!(!entry.description.ends_with('.'), "{mechanism}");
        }
        assert!("auto".parse::<Mechanism>().is_err());
    }

    #[test]
    fn the_reference_lists_every_mechanism_in_the_order_of_preference() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/mechanisms.md");
        let reference = std::fs::read_to_string(page).unwrap();
        let rows: Vec<_> = reference
            .lines()
            .filter_map(|line| line.strip_prefix("| `")?.split_once("` |"))
            .filter_map(|(name, _)| name.parse::<Mechanism>().ok())
            .collect();
        assert_eq!(rows, Mechanism::of_scope(Scope::Process).collect::<Vec<_>>());
        for mechanism in Mechanism::ALL {
            assert!(reference.contains(&format!("`{mechanism}`")), "{mechanism}");
        }
    }

    #[test]
    fn each_tracker_is_of_its_mechanism() {
        for mechanism in Mechanism::ALL {
            for scope in Scope::ALL {
                let scratch = Scratch::new(1);
                // SAFETY: the memory is private anonymous memory of this test.
                let memory = unsafe { OwnMemory::anonymous(scratch.range()) };
                match mechanism.tracker(scope, &memory) {
                    Ok(tracker) => {
                        assert_eq!(tracker.mechanism(), mechanism, "{scope:?}");
                        assert!(mechanism.has_scope(scope));
                    }
                    Err(error) if error.kind() == ErrorKind::Unavailable => {
                        assert_eq!(error.object().to_string(), mechanism.to_string());
                    }
                    Err(error) => panic!("{mechanism}, {scope:?}: {error}"),
                }
            }
        }
    }

    #[test]
    fn every_part_of_a_process_has_a_tracker() {
        for mechanism in Mechanism::of_scope(Scope::Process) {
            let process = mechanism.process_tracking().unwrap();
            assert!(!process.private_parts.is_empty() && !process.private_parts.contains(&MemoryPart::SharedFile));
            let Ok(memory) = ProcessMemory::of_this_process(mechanism) else { continue };
            for &part in process.private_parts.iter().chain([&MemoryPart::SharedFile]) {
                match (process.tracker)(&memory, part) {
                    Ok(_) => {}
                    Err(error) if error.kind() == ErrorKind::Unavailable => {}
                    Err(error) => panic!("{mechanism}, {part:?}: {error}"),
                }
            }
        }
    }
}
