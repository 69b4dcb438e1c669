//! The virtual machine of a process: KVM, memory slots, page tables.

use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use pagemark_kvm_protocol::description::{DEVICE, MOST_VCPUS};
use pagemark_kvm_protocol::machine_calls::{Counts, CountsOfKvm, Means, Move};
use pagemark_kvm_protocol::write_record::WriteRecord;
use pagemark_linux::proc::maps;

use crate::error::{Error, ErrorKind};
use crate::layout::{MMAP_TOP, PAGE, PROGRAM_END, Physical, RANDOM_SPAN, SLOT_SPAN, TABLE_MEMORY, TABLE_SPAN};
use crate::mappings::{Mapping, Mappings, Protection};
use crate::page_table::{Dirty, OutOfTables, PageTable};
use crate::sys::descriptors;
use crate::sys::dirty_ring::{self, Ring};
use crate::sys::noted_writes::NotedWrites;
use crate::sys::owned_lock::{Guard, OwnedLock};
use crate::sys::parking::{InUse, Parking};
use crate::sys::statistics;
use crate::sys::table_memory::{self, TableMemory};
use crate::vcpu::{Exit, Vcpu, stubs};
use crate::views::Views;
use crate::write_list::WriteList;
use crate::writes::Tracking;

mod clock;
mod emulation;
mod renewal;
pub mod tracking;
mod views;

use clock::Clock;

/// What the machine needs of KVM, and what has it.
const NEEDED: [(Cap, &str, &str); 4] = [
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY", "Linux 2.6.21 or newer has it"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT", "Linux 4.11 or newer has it"),
    (Cap::SyncRegs, "KVM_CAP_SYNC_REGS", "Linux 4.16 or newer has it"),
    (Cap::Xcrs, "KVM_CAP_XCRS", "Linux 2.6.34 or newer has it, on a processor with XSAVE"),
];

/// Opens KVM and checks that it has what the machine needs. Programs that are executed keep the
/// device open: they may have lost the right to it.
///
/// # Errors
/// Of kind [`ErrorKind::Unavailable`], with what would enable it.
pub fn open() -> Result<Kvm, Error> {
    let kvm = open_device()?;
    let fd = raise(kvm.as_raw_fd(), true)?;
    drop(kvm);
    // SAFETY: a descriptor of the device, and owned by nothing else.
    checked(unsafe { Kvm::from_raw_fd(fd) })
}

fn open_device() -> Result<Kvm, Error> {
    Kvm::new().map_err(|error| {
        let error = io::Error::from_raw_os_error(error.errno());
        let help = match error.kind() {
            io::ErrorKind::NotFound => {
                "load the module kvm_intel or kvm_amd; in a virtual machine, its host must allow nested virtualization"
            }
            io::ErrorKind::PermissionDenied => "add the user to the group that owns /dev/kvm, usually kvm",
            _ => "a container must be given the device of the host",
        };
        Error::new(ErrorKind::Unavailable, "open", DEVICE).source(error).help(help)
    })
}

/// The device that a monitor left open as descriptor `fd` for the program that this process is.
///
/// # Errors
/// Of kind [`ErrorKind::Unavailable`] if it is not the device.
pub fn take_over(fd: RawFd) -> Result<Kvm, Error> {
    let error = |error| Error::new(ErrorKind::Unavailable, "take over", format!("descriptor {fd}")).source(error);
    let fd = descriptors::take_over(fd).map_err(error)?;
    // SAFETY: from here on the descriptor is the monitor's, and owned by nothing else.
    checked(unsafe { Kvm::from_raw_fd(fd) })
}

fn checked(kvm: Kvm) -> Result<Kvm, Error> {
    let version = kvm.get_api_version();
    if version != 12 {
        let reason = "is not the device of KVM, or has another version of its interface than 12";
        let help = "a container must be given the device of the host";
        return Err(Error::new(ErrorKind::Unavailable, "", DEVICE).reason(reason).help(help));
    }
    for (capability, name, help) in NEEDED {
        if kvm.check_extension_int(capability) == 0 {
            let reason = format!("lacks the capability {name}");
            return Err(Error::new(ErrorKind::Unavailable, "", DEVICE).reason(reason).help(help));
        }
    }
    Ok(kvm)
}

/// The parts of the machine that belong to one address space: what is mapped, which slots there
/// are. Locked during each change of the program's mappings, and during each fault.
pub struct Space {
    /// What the program has mapped.
    pub mappings: Mappings,
    /// The start of the program's heap.
    pub heap_start: u64,
    /// The end of the program's heap, as `brk` reports it.
    pub heap_end: u64,
    /// The stack of the first thread, as far as it was mapped.
    pub stack: Range<u64>,
    /// The span of [`SLOT_SPAN`] that each memory slot from 1 on stands for. Slot N is at
    /// guest-physical address N * [`SLOT_SPAN`]. There is room for all, so that the list is whole
    /// whenever a child that shares it is killed.
    slots: Vec<u64>,
    /// What trackers of the program know.
    pub tracking: Tracking,
    /// By what the program tells the time without system calls.
    clock: Option<Clock>,
    /// The views that the program has declared.
    pub views: Views,
    /// The ring of each virtual CPU that was made, by its number, if the machine keeps rings. There
    /// is room for all.
    rings: Vec<Ring>,
}

/// What the environment of this process says; the log if it says nothing.
///
/// # Errors
/// It says neither.
pub(crate) fn write_record_of_environment() -> Result<WriteRecord, Error> {
    match std::env::var_os(WriteRecord::VARIABLE).as_ref().map(|text| text.as_encoded_bytes()) {
        None | Some(b"" | b"log") => Ok(WriteRecord::Log),
        Some(b"rings") => Ok(WriteRecord::Rings),
        Some(other) => {
            let reason = format!("is {:?}, and neither log nor rings", String::from_utf8_lossy(other));
            Err(Error::new(ErrorKind::Unavailable, "", format!("the variable {}", WriteRecord::VARIABLE))
                .reason(reason))
        }
    }
}

/// As often may a virtual CPU be interrupted before it has begun.
const MOST_INTERRUPTIONS: u32 = 1000;

/// How a fault ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultOutcome {
    /// The program can go on.
    Mapped,
    /// Nothing is mapped there.
    NotMapped,
    /// The mapping does not allow it.
    NotAllowed,
}

/// The virtual machine of this process. Its threads share it.
pub struct Machine {
    kvm: Kvm,
    vm: VmFd,
    cpuid: CpuId,
    /// The guest's page tables and kernel pages.
    tables: Arc<TableMemory>,
    root: Physical,
    /// Guest-physical address of the stubs and descriptor tables.
    stubs: stubs::Stubs,
    space: Arc<OwnedLock<Space>>,
    /// Whether memory is tracked.
    is_tracking: AtomicBool,
    /// What trackers outside are told.
    listed: WriteList,
    /// What KVM notes for them.
    noted: NotedWrites,
    /// How KVM notes the pages that the program writes.
    keeps: WriteRecord,
    /// Whether KVM's log can be used; known once it was tried.
    log: OnceLock<Result<(), i32>>,
    most_slots: u32,
    most_vcpus: usize,
    /// How many virtual CPUs there are. KVM never frees one before its machine.
    made: AtomicUsize,
    /// Numbers of those that could not be made.
    unused: Mutex<Vec<usize>>,
    /// Those whose threads have ended.
    idle: Mutex<Vec<Vcpu>>,
    parking: Parking,
    /// How often the machine was made anew after it was given up. A virtual CPU has that of the
    /// machine that it belongs to.
    generation: AtomicU32,
    /// Locked while the machine is made anew.
    renewal: Mutex<()>,
    /// How many system calls, and how many exceptions, the program has had.
    calls: AtomicU64,
    exceptions: AtomicU64,
}

/// The program's mappings, locked, by a thread that uses KVM.
pub struct LockedSpace<'m> {
    space: Guard<'m, Space>,
    _in_use: InUse,
}

impl Deref for LockedSpace<'_> {
    type Target = Space;

    fn deref(&self) -> &Space {
        &self.space
    }
}

impl DerefMut for LockedSpace<'_> {
    fn deref_mut(&mut self) -> &mut Space {
        &mut self.space
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic of a thread ends the process, so that no other thread sees what it left.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Machine {
    /// A machine of `kvm` without memory for this process. The process is not parked as long as the
    /// second value exists.
    ///
    /// # Errors
    /// If a call to KVM fails.
    pub fn new(kvm: Kvm, keeps: WriteRecord) -> Result<(Arc<Machine>, InUse), Error> {
        let tables = Arc::new(TableMemory::new().map_err(Error::system("reserve", "memory for page tables"))?);
        let root = tables.allocate().ok_or_else(out_of_tables)?;
        let stubs = stubs::write(&tables, &PageTable::new(&tables, root)).map_err(|OutOfTables| out_of_tables())?;
        let top = MMAP_TOP - crate::random::below(RANDOM_SPAN) / PAGE * PAGE;
        let parking = Parking::of_this_process()
            .map_err(Error::system("map", "the description of the machine, at an address of its own"))?;
        let space = Space {
            mappings: Mappings::below(top),
            heap_start: 0,
            heap_end: 0,
            stack: 0..0,
            slots: Vec::new(),
            tracking: Tracking::new(parking.listed()),
            clock: None,
            views: Views::default(),
            rings: Vec::new(),
        };
        // Who parks processes finds this one as soon as the machine is described.
        let early = parking.enter();
        let machine = Machine::with((kvm, keeps), tables, root, stubs, Arc::new(OwnedLock::new(space)), parking)?;
        let in_use = early.unwrap_or_else(|| machine.enter());
        Ok((machine, in_use))
    }

    /// The machine of a child made by `fork`, which has copies of the parent's memory and tables.
    /// The calling thread uses KVM.
    ///
    /// # Errors
    /// If a call to KVM fails.
    ///
    /// # Safety
    /// The parent's machine must neither be used nor dropped any more.
    pub unsafe fn after_fork(parent: &Machine) -> Result<Arc<Machine>, Error> {
        // SAFETY: by the contract of this function, nothing else owns the descriptor.
        let kvm = unsafe { Kvm::from_raw_fd(parent.kvm.as_raw_fd()) };
        let (tables, space) = (parent.tables.clone(), parent.space.clone());
        {
            // The parent's rings are not mapped here, and its descriptors are closed.
            let mut space = space.lock();
            space.tracking.clear();
            space.rings.clear();
            // The child's table is empty, as its machine is.
            let (_, moves) = space.views.forget(0, PROGRAM_END);
            let table = PageTable::new(&tables, parent.root);
            moves.iter().for_each(|moved| _ = table.clear(moved.page, moved.page + PAGE));
        }
        let machine = Machine::with((kvm, parent.keeps), tables, parent.root, parent.stubs, space, parent.parking)?;
        machine.add_slots(&machine.space())?;
        Ok(machine)
    }

    /// Who tracks this process from outside.
    pub fn tracker(&self) -> u64 {
        self.listed.tracker()
    }

    /// In a child made by `fork`: it has nothing of KVM yet, and the calling thread uses it.
    /// `tracker` tracks the parent.
    pub fn begin_child(&self, in_use: &InUse, tracker: u64) {
        self.parking.begin_child(in_use);
        self.listed.begin_child(tracker);
        self.noted.begin_child();
        descriptors::begin_child();
    }

    /// Says outside where the program's file has its first instruction.
    pub fn describe_program(&self, entry: u64) {
        self.parking.describe_program(entry);
    }

    /// The descriptor of `/dev/kvm`.
    pub fn device(&self) -> RawFd {
        self.kvm.as_raw_fd()
    }

    /// Sets right what the child `task`, which shared the memory, was changing when it was killed.
    ///
    /// # Errors
    /// If the program's mappings cannot be read.
    pub fn take_over(&self, task: u32) -> Result<(), Error> {
        descriptors::child_has_ended(task);
        let Some(mut space) = self.space.take_over(task) else { return Ok(()) };
        // The child may have made a slot that is not in the list yet. If there is none, this fails.
        let _ = self.set_slot(space.slots.len() as u32 + 1, 0, Physical::ZERO, 0, 0);
        self.noted.describe_slots(&space.slots);
        space.mappings.abandon();
        space.tracking.abandon();
        std::mem::forget(std::mem::take(&mut space.views));
        let generation = self.generation.load(Ordering::Relaxed);
        // A ring that cannot be mapped has nothing to recover from.
        let rings = space.rings.iter_mut().filter(|ring| ring.generation() == generation);
        rings.for_each(|ring| _ = ring.recover());
        let clock = space.clock.take();
        self.clear(&mut space, 0, PROGRAM_END);
        // What the child has unmapped of it is not found among the mappings.
        space.clock = clock;
        self.reload(&mut space)
    }

    fn with(
        (kvm, keeps): (Kvm, WriteRecord),
        tables: Arc<TableMemory>,
        root: Physical,
        stubs: stubs::Stubs,
        space: Arc<OwnedLock<Space>>,
        parking: Parking,
    ) -> Result<Arc<Machine>, Error> {
        let cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(Error::kvm("KVM_GET_SUPPORTED_CPUID"))?;
        let vm = create_vm(&kvm)?;
        let fd = raise(vm.as_raw_fd(), false)?;
        drop(vm);
        // SAFETY: `fd` is a descriptor of a virtual machine, and owned by nothing else.
        let vm = unsafe { kvm.create_vmfd_from_rawfd(fd) }.map_err(Error::kvm("KVM_CREATE_VM"))?;
        begin_rings(&vm, keeps)?;
        let width =
            cpuid.as_slice().iter().find(|entry| entry.function == 0x8000_0008).map_or(36, |leaf| leaf.eax & 255);
        let by_address = 1u64 << (u64::from(width.clamp(31, 52)) - SLOT_SPAN.trailing_zeros() as u64);
        let most_slots = (kvm.get_nr_memslots() as u64).min(by_address) as u32;
        let most_vcpus = kvm.get_max_vcpus().min(MOST_VCPUS);
        {
            let mut space = space.lock();
            let room = (most_slots as usize).saturating_sub(space.slots.len());
            space.slots.reserve_exact(room);
            if keeps == WriteRecord::Rings {
                space.rings.reserve_exact(most_vcpus);
            }
        }
        let machine = Machine {
            kvm,
            vm,
            cpuid,
            tables,
            root,
            stubs,
            space,
            is_tracking: AtomicBool::new(false),
            listed: parking.listed(),
            noted: parking.noted(),
            keeps,
            log: OnceLock::new(),
            most_slots,
            most_vcpus,
            made: AtomicUsize::new(0),
            unused: Mutex::default(),
            idle: Mutex::default(),
            parking,
            generation: AtomicU32::new(0),
            renewal: Mutex::default(),
            calls: AtomicU64::new(0),
            exceptions: AtomicU64::new(0),
        };
        machine.noted.begin(keeps);
        machine.add_slot(0, Physical::ZERO, TABLE_MEMORY, machine.tables.host_address())?;
        parking.describe_tables(machine.tables.host_address(), machine.root);
        parking.describe(machine.kvm.as_raw_fd(), machine.vm.as_raw_fd(), machine.vm.run_size());
        Ok(Arc::new(machine))
    }

    /// The program's mappings, locked.
    pub fn space(&self) -> LockedSpace<'_> {
        let in_use = self.enter();
        LockedSpace { space: self.space.lock(), _in_use: in_use }
    }

    /// Makes a slot for each span that the program uses.
    fn add_slots(&self, space: &Space) -> Result<(), Error> {
        for (slot, span) in (1..).zip(&space.slots) {
            self.add_slot(slot, Physical::of_slot(slot), SLOT_SPAN, span * SLOT_SPAN)?;
        }
        self.add_clock_slot(space)
    }

    fn add_slot(&self, slot: u32, physical: Physical, len: u64, address: u64) -> Result<(), Error> {
        // The monitor's own memory counts as written in any case.
        let flags = if slot > 0 && self.noted.is_wanted() { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
        self.make_slot(slot, flags, physical, len, address)
    }

    fn make_slot(&self, slot: u32, flags: u32, physical: Physical, len: u64, address: u64) -> Result<(), Error> {
        self.set_slot(slot, flags, physical, len, address).map_err(|error| {
            let error = io::Error::from_raw_os_error(error.errno());
            Error::new(ErrorKind::Exhausted, "KVM_SET_USER_MEMORY_REGION", format!("{address:#x}")).source(error)
        })
    }

    fn set_slot(
        &self,
        slot: u32,
        flags: u32,
        physical: Physical,
        len: u64,
        address: u64,
    ) -> Result<(), kvm_ioctls::Error> {
        let region = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: physical.get(),
            memory_size: len,
            userspace_addr: address,
        };
        // SAFETY: slot 0 is the table memory, which lives as long as the machine and is accessed
        // atomically. All other slots are addresses of the program, where no value of the monitor
        // lies, or the kernel's data for the vDSO, which nothing but the kernel can write.
        uninterrupted(|| unsafe { self.vm.set_user_memory_region(region) })
    }

    /// The guest-physical address of the program's `address`, whose memory slot is made if needed.
    fn physical(&self, space: &mut Space, address: u64) -> Result<Physical, Error> {
        let span = address / SLOT_SPAN;
        let slot = match space.slots.iter().position(|known| *known == span) {
            Some(index) => index as u32 + 1,
            None => {
                let slot = space.slots.len() as u32 + 1;
                if slot >= self.clock_slot() {
                    let reason = format!("the machine has {} memory slots of 1 GiB", self.clock_slot() - 1);
                    let object = format!("{address:#x}");
                    return Err(Error::new(ErrorKind::Exhausted, "map", object)
                        .reason(reason)
                        .help("a program that spreads over fewer spans of 1 GiB can run"));
                }
                self.add_slot(slot, Physical::of_slot(slot), SLOT_SPAN, span * SLOT_SPAN)?;
                self.begin_noting(slot)?;
                space.slots.push(span);
                self.noted.describe_slots(&space.slots);
                slot
            }
        };
        Ok(Physical::of_slot(slot).plus(address % SLOT_SPAN))
    }

    /// Resolves a fault of the program at `address`: `write` or `execute` say what it tried. Maps
    /// as much of the mapping as lies within the same `most` bytes, at most [`TABLE_SPAN`].
    ///
    /// # Errors
    /// If the machine has no slots or tables left.
    pub fn resolve(&self, address: u64, write: bool, execute: bool, most: u64) -> Result<FaultOutcome, Error> {
        if address >= PROGRAM_END {
            return Ok(FaultOutcome::NotMapped);
        }
        let mut space = self.space();
        let mut found = space.mappings.find(address);
        if found.is_none() {
            // The kernel knows best: for example, a mapping that another call made.
            if self.reload(&mut space).is_err() {
                // For example, the program has as many files open as it may. What is known is all
                // that the monitor has mapped.
                return Ok(FaultOutcome::NotMapped);
            }
            found = space.mappings.find(address);
        }
        let Some(Mapping { start, end, protection }) = found else { return Ok(FaultOutcome::NotMapped) };
        let allowed = if execute {
            protection.executable()
        } else if write {
            protection.writable()
        } else {
            protection.readable()
        };
        if !allowed {
            return Ok(FaultOutcome::NotAllowed);
        }
        let most = most.clamp(PAGE, TABLE_SPAN);
        let around = address / most * most;
        let (mut start, mut end) = (start.max(around), end.min(around + most));
        let table = PageTable::new(&self.tables, self.root);
        if let Some(data) = space.clock.as_ref().map(|clock| clock.data()) {
            if data.contains(&address) {
                if write || execute {
                    return Ok(FaultOutcome::NotAllowed);
                }
                let (start, end) = (start.max(data.start), end.min(data.end));
                let physical = Physical::of_slot(self.clock_slot()).plus(start - data.start);
                let table = table.map(start, end, physical, Protection::new(libc::PROT_READ as u64), Dirty::Kept);
                return table.map(|()| FaultOutcome::Mapped).map_err(|OutOfTables| out_of_tables());
            }
            // A neighbour may be one mapping with it.
            (start, end) = if address < data.start { (start, end.min(data.start)) } else { (start.max(data.end), end) };
        }
        let physical = self.physical(&mut space, start)?;
        let moved: Vec<Move> = space.views.moved(start, end).collect();
        let places = moved.iter().map(|moved| self.physical(&mut space, moved.to));
        let places = places.collect::<Result<Vec<Physical>, Error>>()?;
        // Of pages whose dirty bits are read, none is set before they are written.
        let is_scanned = self.listed.is_wanted();
        let scanned = &space.tracking.by[Means::Scan as usize].ranges;
        // The stores to these are the monitor's.
        let closed = space.tracking.closed(start, end);
        let mut cuts: Vec<u64> =
            scanned.within(start..end).chain(closed.iter()).flat_map(|part| [part.start, part.end]).collect();
        cuts.extend([start, end]);
        cuts.extend(moved.iter().flat_map(|moved| [moved.page, moved.page + PAGE]));
        cuts.sort_unstable();
        for (from, to) in cuts.iter().copied().zip(cuts.iter().copied().skip(1)).filter(|(from, to)| from < to) {
            let protection = if closed.contains(from) { protection.without_writes() } else { protection };
            let dirty = if is_scanned || scanned.contains(from) { Dirty::Kept } else { Dirty::InAdvance };
            let physical = match moved.binary_search_by_key(&from, |moved| moved.page) {
                Ok(index) => places[index],
                Err(_) => physical.plus(from - start),
            };
            table.map(from, to, physical, protection, dirty).map_err(|OutOfTables| out_of_tables())?;
        }
        Ok(FaultOutcome::Mapped)
    }

    /// Forgets the guest's entries for `start..end`, and that it is tracked. To be called before
    /// the host's mapping there changes.
    pub fn clear(&self, space: &mut Space, start: u64, end: u64) {
        self.leave_clock(space, start, end);
        self.clear_to_protect(space, start, end);
        space.tracking.listed.add(start, end);
    }

    /// Like [`Machine::clear`], where the memory stays what it is.
    pub fn clear_to_protect(&self, space: &mut Space, start: u64, end: u64) {
        self.forget_views(space, start, end);
        self.clear_entries(space, start, end);
        space.tracking.remapped(start, end);
    }

    /// Forgets the guest's entries for `start..end`.
    pub fn clear_entries(&self, space: &mut Space, start: u64, end: u64) {
        let lost = PageTable::new(&self.tables, self.root).clear(start, end);
        self.listed.add_pages(&lost);
        // With their dirty bits.
        space.tracking.by[Means::Scan as usize].mark(PAGE, start, end);
    }

    /// Takes the program's mappings from the kernel. Entries of ranges that are gone are cleared.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn reload(&self, space: &mut Space) -> Result<(), Error> {
        let now = mapped()?;
        let mut gone = Vec::new();
        for old in space.mappings.iter() {
            let kept: Vec<Mapping> =
                now.within(old.start, old.end).into_iter().filter(|new| new.protection == old.protection).collect();
            let mut from = old.start;
            for part in kept {
                gone.push((from, part.start));
                from = part.end;
            }
            gone.push((from, old.end));
        }
        gone.into_iter().filter(|(start, end)| start < end).for_each(|(start, end)| self.clear(space, start, end));
        space.mappings.replace(now);
        Ok(())
    }

    /// A virtual CPU for a thread: one whose thread has ended, or a new one.
    ///
    /// # Errors
    /// Of kind [`ErrorKind::Exhausted`] if KVM allows no more.
    pub fn take_vcpu(&self) -> Result<Vcpu, Error> {
        let _in_use = self.enter();
        let idle = lock(&self.idle).pop();
        if let Some(mut vcpu) = idle {
            self.renew_vcpu(&mut vcpu)?;
            vcpu.reset(&self.stubs, self.root)?;
            return Ok(vcpu);
        }
        let (id, vcpu) = self.create_next_vcpu()?;
        let fd = raise(vcpu.as_raw_fd(), false)?;
        drop(vcpu);
        // SAFETY: `fd` is a descriptor of a virtual CPU of this machine, and owned by nothing else.
        let vcpu = unsafe { self.vm.create_vcpu_from_rawfd(fd) }.map_err(|error| {
            descriptors::forget(fd);
            Error::kvm("mmap of a virtual CPU")(error)
        })?;
        let stack = self.kernel_page()?;
        let generation = self.generation.load(Ordering::Relaxed);
        let vcpu = Vcpu::new(vcpu, stack, self.tables.clone(), &self.cpuid, (id, generation));
        let mut vcpu = vcpu.inspect_err(|_| descriptors::forget(fd))?;
        vcpu.keep_from_children(self.vm.run_size());
        vcpu.reset(&self.stubs, self.root).inspect_err(|_| descriptors::forget(fd))?;
        self.add_ring(&vcpu);
        self.parking.set_vcpu(id, vcpu.descriptor(), vcpu.shared_address());
        self.check_time_of(&vcpu);
        Ok(vcpu)
    }

    /// Runs a new virtual CPU for the first time, which is when KVM makes what it still needs.
    ///
    /// # Errors
    /// KVM cannot run it.
    pub fn try_vcpu(&self, vcpu: &mut Vcpu) -> Result<(), Error> {
        vcpu.go_to_call_stub();
        for _ in 0..MOST_INTERRUPTIONS {
            match vcpu.run()? {
                Exit::Call => return Ok(()),
                Exit::Interrupted => {}
                _ => break,
            }
        }
        Err(Error::new(ErrorKind::System, "run", "a virtual CPU").reason("it does not begin"))
    }

    /// A virtual CPU of a number that no other one has.
    fn create_next_vcpu(&self) -> Result<(usize, VcpuFd), Error> {
        // KVM does not give back the number of one that it has made, and that could not be mapped.
        table_memory::check_room(self.vm.run_size()).map_err(Error::system("map", "a virtual CPU"))?;
        loop {
            let unused = lock(&self.unused).pop();
            let id = unused.unwrap_or_else(|| self.made.fetch_add(1, Ordering::Relaxed));
            if id >= self.most_vcpus {
                let reason = format!("KVM allows {} virtual CPUs, one for each thread", self.most_vcpus);
                return Err(Error::new(ErrorKind::Exhausted, "create", "a virtual CPU").reason(reason));
            }
            match self.create_vcpu(id) {
                Ok(vcpu) => return Ok((id, vcpu)),
                Err(error) if error.io_error().and_then(io::Error::raw_os_error) == Some(libc::EEXIST) => {}
                Err(error) => {
                    lock(&self.unused).push(id);
                    return Err(error);
                }
            }
        }
    }

    fn create_vcpu(&self, id: usize) -> Result<VcpuFd, Error> {
        above_limit(|| uninterrupted(|| self.vm.create_vcpu(id as u64)).map_err(Error::kvm("KVM_CREATE_VCPU")))
    }

    /// The program made a system call.
    pub fn count_call(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// The program had an exception.
    pub fn count_exception(&self) {
        self.exceptions.fetch_add(1, Ordering::Relaxed);
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
        let _in_use = self.enter();
        let mut of_kvm = Some(CountsOfKvm::default());
        for descriptor in self.parking.open_vcpus() {
            of_kvm = match (of_kvm, statistics::of_vcpu(descriptor)) {
                (Some(CountsOfKvm { exits, faults, flushes }), Ok(of_it)) => Some(CountsOfKvm {
                    exits: exits + of_it.exits,
                    faults: faults + of_it.faults,
                    flushes: flushes + of_it.flushes,
                }),
                _ => None,
            };
        }
        let [calls, exceptions] = [&self.calls, &self.exceptions].map(|count| count.load(Ordering::Relaxed));
        Counts { calls, exceptions, of_kvm }
    }

    /// Takes back the virtual CPU of a thread that ends.
    pub fn put_vcpu(&self, vcpu: Vcpu) {
        lock(&self.idle).push(vcpu);
    }

    /// A page for the guest's kernel: its guest-physical address.
    fn kernel_page(&self) -> Result<Physical, Error> {
        let page = self.tables.allocate().ok_or_else(out_of_tables)?;
        let _space = self.space();
        PageTable::new(&self.tables, self.root)
            .map_kernel(page.in_kernel(), page)
            .map_err(|OutOfTables| out_of_tables())?;
        Ok(page)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        descriptors::forget(self.vm.as_raw_fd());
        descriptors::forget(self.kvm.as_raw_fd());
    }
}

/// Has a new machine keep rings if it is to.
fn begin_rings(vm: &VmFd, keeps: WriteRecord) -> Result<(), Error> {
    if keeps == WriteRecord::Log {
        return Ok(());
    }
    dirty_ring::enable(vm).map_err(|errno| match errno {
        libc::EOPNOTSUPP => Error::new(ErrorKind::Unavailable, "", format!("the variable {}", WriteRecord::VARIABLE))
            .reason("asks for rings, which KVM does not have, or not with the log of Intel's processors")
            .help("Linux 5.11 or newer has them, with the parameter pml=N of the module kvm_intel; without the variable, KVM keeps a log"),
        errno => Error::system("begin", "the rings of written pages")(io::Error::from_raw_os_error(errno)),
    })
}

fn create_vm(kvm: &Kvm) -> Result<VmFd, Error> {
    above_limit(|| uninterrupted(|| kvm.create_vm()).map_err(Error::kvm("KVM_CREATE_VM")))
}

/// Makes a call of KVM again that a stop of the thread has interrupted.
fn uninterrupted<T>(call: impl Fn() -> Result<T, kvm_ioctls::Error>) -> Result<T, kvm_ioctls::Error> {
    loop {
        match call() {
            Err(error) if error.errno() == libc::EINTR => {}
            done => return done,
        }
    }
}

/// Calls `make`, which makes a descriptor, although the program may have as many as it may have.
fn above_limit<T>(make: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
    descriptors::above_limit(|_| make()).map_err(Error::system("raise", "the limit of descriptors"))?
}

fn raise(fd: RawFd, stays: bool) -> Result<RawFd, Error> {
    descriptors::raise(fd, stays).map_err(Error::system("move", "a descriptor above those of the program"))
}

fn out_of_tables() -> Error {
    Error::new(ErrorKind::Exhausted, "extend", "the guest's page tables").reason("1 GiB of them is in use")
}

/// What this process has mapped at the program's addresses, as the kernel says.
fn mapped() -> Result<Mappings, Error> {
    let name = "/proc/thread-self/maps";
    let read = || maps::of_this_process().map_err(Error::system("read", name));
    let all = match read() {
        // The program may have as many files open as it may have.
        Err(error) if error.io_error().and_then(io::Error::raw_os_error) == Some(libc::EMFILE) => above_limit(read)?,
        done => done?,
    };
    // A list without the monitor is not that of this memory.
    let own = mapped as fn() -> Result<Mappings, Error> as usize as u64;
    if !all.iter().any(|mapping| (mapping.start.get()..mapping.end.get()).contains(&own)) {
        return Err(Error::new(ErrorKind::System, "read", name).reason("the monitor is not in it"));
    }
    let mut mappings = Mappings::default();
    for mapping in all.iter().filter(|mapping| mapping.start.get() < PROGRAM_END) {
        let bits = [(mapping.readable, 1), (mapping.writable, 2), (mapping.executable, 4)];
        let protection = Protection::new(bits.into_iter().map(|(set, bit)| if set { bit } else { 0 }).sum());
        mappings.insert(mapping.start.get(), mapping.end.get(), protection);
    }
    Ok(mappings)
}

/// Whether the program's addresses are free, as they must be before a program is loaded.
///
/// # Errors
/// Of kind [`ErrorKind::Layout`], with what would help.
pub fn check_layout() -> Result<(), Error> {
    match mapped()?.iter().next() {
        None => Ok(()),
        Some(mapping) => Err(Error::new(ErrorKind::Layout, "load a program", "")
            .reason(format!("this process itself has {:#x}-{:#x} mapped", mapping.start, mapping.end))
            .help("limit the size of stacks (ulimit -s 8192): without a limit, Linux maps libraries low")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    /// A page of the program in the span `span`.
    fn map(span: u64) -> u64 {
        let (start, flags) = (span * SLOT_SPAN, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE);
        // SAFETY: a new mapping at addresses that nothing here uses.
        let at = unsafe { libc::mmap(start as *mut _, PAGE as usize, libc::PROT_READ, flags, -1, 0) };
        assert_eq!(at as u64, start);
        start
    }

    #[test]
    fn what_is_exhausted_is_said() {
        let machine = open().and_then(|kvm| Machine::new(kvm, WriteRecord::Log));
        let mut machine = match machine {
            Ok((machine, _)) => machine,
            Err(error) => pagemark_testing::skip!("no machine under KVM: {error}"),
        };
        let limits = Arc::get_mut(&mut machine).expect("nothing else has it");
        // The last slot is that of the clock.
        (limits.most_slots, limits.most_vcpus) = (3, 1);
        let (first, second) = (map(0x4100), map(0x4102));
        assert_eq!(machine.resolve(first, false, false, TABLE_SPAN).expect("a slot"), FaultOutcome::Mapped);
        let error = machine.resolve(second, false, false, TABLE_SPAN).expect_err("there is one slot");
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        let text = error.to_string();
        assert!(text.contains("1 memory slots of 1 GiB") && text.contains("fewer spans"), "{text}");

        let vcpu = machine.take_vcpu().expect("the first");
        let Err(error) = machine.take_vcpu() else { panic!("there is one virtual CPU") };
        assert_eq!(error.kind(), ErrorKind::Exhausted);
        assert!(error.to_string().contains("1 virtual CPUs, one for each thread"), "{error}");
        machine.put_vcpu(vcpu);
        machine.take_vcpu().expect("the first again");
    }
}
