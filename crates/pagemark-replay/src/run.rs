//! A machine that runs again from a checkpoint, until an exact instruction.
//!
//! QEMU counts the instructions that were completed, and shows the count of a machine that is
//! stopped. The plugin counts those that were begun: more, by those that faults interrupted. So the
//! machine is stopped some way before the end, where the two counts are compared, and goes on in
//! single steps: each block of QEMU's has one instruction, and QEMU looks behind each whether it is
//! to stop.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::SigSet;
use pagemark::repository::{Checkpoint, SpaceRecord};
use pagemark::{Address, ByteCount, ContentId, PAGE_SIZE, PageNumber, PageTree, RangeSet};
use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap, SWAPPED};
use pagemark_linux::proc::{self, Call, Mapping, maps};
use pagemark_linux::sparse;
use pagemark_simulate::control::Control;
use pagemark_vm::parts::{
    COMPLETES_REQUESTS, Changes, DemandedBlock, DemandedMemory, Fill, Machine, MissingMemory, NewQemu, Progress,
    RamBlock, ServedDisk, Streams, add_device_file, arguments_of_restore, arguments_of_simulation, completes_requests,
    copy_pages, load_devices, map_privately, option_word, pair, records_inputs, save_devices, shared_file, text,
};
use pagemark_vm::{Error, ErrorKind, InputList, Object, Restore, Result};
use serde_json::json;

use crate::instruction_count::first_difference;
use crate::node_memory::{Base, MIN_BLOCK, NodeMemory, tree_of};

/// How many instructions before its end the machine is stopped first. Single steps are slow, and
/// what is executed after the machine was to stop must be less.
const STEPPED: u64 = 20_000;

const POLL: Duration = Duration::from_millis(1);

/// How long QEMU may take to begin a stop.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// How long a machine executes nothing until QEMU is asked whether it runs.
const IDLE: Duration = Duration::from_millis(100);

/// How long a machine may execute nothing. Its clock follows its instructions, and passes over the
/// time in which it waits.
const IDLE_LIMIT: Duration = Duration::from_secs(60);

/// The same behind the end of an interval, where it may have nothing to do any more.
const LAST_IDLE_LIMIT: Duration = Duration::from_secs(10);

/// How many pages may differ where a machine is one instruction away from a checkpoint.
const MAX_CHANGED_PAGES: usize = 256;

/// The option of the plugin by which the machine gets the inputs that were written down.
const REPEATS_INPUTS: &str = "repeats=on";

/// Bytes of memory that are compared at a time.
const COMPARED_BYTES: usize = 1 << 20;

/// How often QEMU's main thread must be found in the same wait until it is known to wait.
const WAITING_COUNT: u32 = 3;

/// The pages of a machine that are not those of a checkpoint.
#[derive(Default)]
struct ChangedPages {
    count: usize,
    /// What the first of them hold, by the name of the memory and the page.
    pages: BTreeMap<(String, PageNumber), Vec<u8>>,
}

/// What a block of memory holds where QEMU has not written.
struct Origin {
    /// The root of the tree of pages that are given to QEMU when it needs them. None if all are
    /// there.
    demanded: Option<ContentId>,
    /// The file that QEMU has mapped, if it shares it with others.
    base: Option<Base>,
}

/// A machine that runs again.
pub(crate) struct Run {
    // Killed before what serves it ends.
    started: NewQemu,
    pub(crate) machine: Machine,
    pub(crate) control: Control,
    blocks: Vec<RamBlock>,
    disks: Vec<ServedDisk>,
    /// Pages that QEMU gets when it needs them.
    demanded: Option<DemandedMemory>,
    /// What was shared or is missing, by the names of blocks.
    origins: BTreeMap<String, Origin>,
    /// Pages of memory that were read before the machine ran.
    read_pages: u64,
    /// The count of completed instructions now, and at the end.
    position: u64,
    end: u64,
    idle_limit: Duration,
}

impl Run {
    /// The machine of a checkpoint, with that state of its devices, which is to run from the first
    /// to the second of `counts`. `inputs` are those that come to it.
    pub(crate) fn start(
        from: &Checkpoint,
        devices: Vec<u8>,
        counts: (u64, u64),
        plugins: Vec<String>,
        control: Control,
        inputs: &[u8],
    ) -> Result<Run> {
        Run::start_sharing(from, devices, counts, plugins, control, inputs, None)
    }

    /// Like [`Run::start`], with the memory that intervals on this node share.
    pub(crate) fn start_sharing(
        from: &Checkpoint,
        devices: Vec<u8>,
        counts: (u64, u64),
        mut plugins: Vec<String>,
        control: Control,
        inputs: &[u8],
        shared: Option<&NodeMemory>,
    ) -> Result<Run> {
        let restore = Restore::new(from);
        let startup = restore.startup()?;
        if completes_requests(&startup.arguments) {
            plugins[1] += &format!(",{COMPLETES_REQUESTS}");
        }
        // QEMU reads it when it starts.
        let inputs = InputList::of(inputs)?;
        if startup.arguments.iter().any(|argument| records_inputs(argument)) {
            plugins[1] += &format!(",{},{REPEATS_INPUTS}", inputs.option()?);
        }
        if let Some(owner) = startup.owner_for_root()? {
            let reason = format!("the machine is that of the user {}, and root must not act for it", owner.user);
            let error = Error::about(ErrorKind::Unsupported, Object::None, reason);
            return Err(error.help("simulate as that user"));
        }
        let mut arguments = arguments_of_simulation(&startup.arguments);
        let mut disks = Vec::new();
        for disk in restore.disk_spaces(&startup)? {
            let served = ServedDisk::start(&disk, from.store())?;
            served.replace_in(&mut arguments, disk.image)?;
            disks.push(served);
        }
        let mut arguments = arguments_of_restore(&arguments, startup.machine_type());
        arguments.extend(plugins);
        let mut started = NewQemu::start(&startup, &arguments, Streams::Detached, SigSet::empty())?;
        let mut machine = started.machine()?;
        let mappings = maps::read(machine.pid).map_err(Error::system("read the mappings of QEMU"))?;
        let blocks = machine.changed_blocks(&mappings)?.unwrap_or_default();
        let spaces = restore.ram_spaces()?;
        let pairs = pair(&spaces, &blocks)?;
        let memory = Memory::share(shared, from, &mut machine, pairs, &mappings)?;
        let Memory { missing, demanded, origins, whole, present, mut read_pages } = memory;
        let mut count = |done: ByteCount, _| read_pages += done.pages_rounded_up();
        restore.fill(machine.pid, &whole, Fill::Whole, &mut Progress::unseen(&mut count))?;
        restore.fill(machine.pid, &present, Fill::Present, &mut Progress::unseen(&mut count))?;
        let demanded = missing.map(|missing| missing.serve(demanded, from.store())).transpose()?;
        let (position, end) = counts;
        let idle_limit = IDLE_LIMIT;
        let mut run =
            Run { started, machine, control, blocks, disks, demanded, origins, read_pages, position, end, idle_limit };
        match load_devices(&mut run.machine, devices) {
            Ok(()) => Ok(run),
            Err(error) => Err(run.explain(error, from)),
        }
    }

    /// Why the machine has failed, which began at a checkpoint: the error, or what has led to it.
    pub(crate) fn explain(&self, error: Error, start: &Checkpoint) -> Error {
        if let Some(failure) = self.demanded.as_ref().and_then(DemandedMemory::take_failure) {
            return failure;
        }
        let bases = || self.origins.values().filter_map(|origin| origin.base.as_ref());
        match error.kind() {
            // What the machine was given may not be what the checkpoint has.
            ErrorKind::Differs => bases().find_map(|base| base.check(start).err()).unwrap_or(error),
            _ => error,
        }
    }

    /// Pages of memory that were read from the repository.
    pub(crate) fn read_pages(&self) -> u64 {
        self.read_pages + self.demanded.as_ref().map_or(0, DemandedMemory::count)
    }

    /// Runs the machine to the begin of the interval, a checkpoint. Returns how many instructions
    /// had begun there.
    pub(crate) fn warm_up(&mut self, checkpoint: &Checkpoint, library: &Path) -> Result<u64> {
        self.control.begin_at(None).map_err(control_failed())?;
        self.run_to_the_end()?;
        let begin = self.pass(checkpoint, library, true)?;
        self.control.begin_at(Some(begin)).map_err(control_failed())?;
        self.control.hold_at(None).map_err(control_failed())?;
        self.step_singly(false)?;
        Ok(begin)
    }

    /// Compares the machine, which has completed as many instructions as a checkpoint, with it.
    /// Returns how many instructions had begun when it was as in the checkpoint.
    ///
    /// Several states have the same count of completed instructions: those before and behind the
    /// timers that are due, an interrupt, or an instruction that a fault interrupts. The checkpoint
    /// is of any of them. So where the machine is not as the checkpoint, both go on until one more
    /// instruction is completed, and must be the same then.
    ///
    /// With `is_passed` the machine goes on so far in any case: then the simulator has seen all
    /// that belongs to the instruction before the checkpoint. What follows is held.
    pub(crate) fn pass(&mut self, checkpoint: &Checkpoint, library: &Path, is_passed: bool) -> Result<u64> {
        let (here, count) = (self.begun()?, self.position);
        self.control.hold_at(Some(here)).map_err(control_failed())?;
        let difference = self.difference(checkpoint)?;
        if difference.is_none() && !is_passed {
            return Ok(here);
        }
        self.idle_limit = LAST_IDLE_LIMIT;
        let passed = self.run_on_to(count + 1);
        self.idle_limit = IDLE_LIMIT;
        let Some(difference) = difference else {
            return match passed {
                // It executes nothing any more.
                Err(error) if error.kind() == ErrorKind::Differs => Ok(here),
                passed => passed.map(|()| here),
            };
        };
        passed?;
        let (control, path) = shared_file()?;
        let control = Control::of(control).map_err(control_failed())?;
        let (devices, plugins) = (Restore::new(checkpoint).devices()?, controller(library, &path)?);
        let mut recorded = Run::start(checkpoint, devices, (count, count + 1), plugins, control, &[])?;
        recorded.run_to_the_end()?;
        let (ours, theirs) = (self.changed_pages(checkpoint)?, recorded.changed_pages(checkpoint)?);
        let has_same_memory = ours.pages == theirs.pages && ours.count.max(theirs.count) <= MAX_CHANGED_PAGES;
        let mut has_same_disks = true;
        for (ours, theirs) in self.disks.iter().zip(&recorded.disks) {
            has_same_disks &= ours.is_same(theirs, checkpoint)?;
        }
        if !has_same_memory
            || !has_same_disks
            || first_difference(&recorded.save_devices()?, &self.save_devices()?).is_some()
        {
            return Err(differs(difference));
        }
        let behind = recorded.begun()?;
        // As many instructions begin behind the checkpoint as in the machine that has begun there.
        self.begun()?.checked_sub(behind).ok_or_else(|| differs(difference))
    }

    /// Instructions that have begun since QEMU's start.
    fn begun(&self) -> Result<u64> {
        self.control.count().map_err(control_failed())
    }

    /// Runs the machine on, to a later end.
    pub(crate) fn run_on_to(&mut self, end: u64) -> Result<()> {
        self.end = end;
        self.run_to_the_end()
    }

    /// Runs the machine to the end.
    pub(crate) fn run_to_the_end(&mut self) -> Result<()> {
        let mut is_stepped = false;
        while self.position < self.end {
            let remaining = self.end - self.position;
            // As many instructions are completed as are begun, or fewer.
            let ahead = match remaining <= STEPPED {
                true if !is_stepped => {
                    self.step_singly(true)?;
                    is_stepped = true;
                    remaining - 1
                }
                true => remaining - 1,
                false => remaining - STEPPED,
            };
            let begun = self.control.count().map_err(control_failed())?;
            self.run_to(begun + ahead)?;
            self.position = self.machine.instructions()?;
        }
        match self.position == self.end {
            true => Ok(()),
            false => {
                Err(differs(format!("stopped at instruction {}, and not at instruction {}", self.position, self.end)))
            }
        }
    }

    /// Has QEMU make blocks of one instruction, or of many again.
    pub(crate) fn step_singly(&mut self, singly: bool) -> Result<()> {
        let switch = if singly { "on" } else { "off" };
        // The first is the name since QEMU 8.1.
        for command in ["one-insn-per-tb", "singlestep"] {
            if self.machine.monitor.human(&format!("{command} {switch}"))?.trim().is_empty() {
                return Ok(());
            }
        }
        let reason = "cannot run in single steps";
        Err(Error::about(ErrorKind::Unsupported, Object::Process(self.machine.pid), reason))
    }

    /// Lets the machine run until it has begun `count` instructions, and stops it behind the next.
    fn run_to(&mut self, count: u64) -> Result<()> {
        let set = |control: &Control, count| control.stop_at(count).map_err(control_failed());
        set(&self.control, count)?;
        self.machine.resume()?;
        let (mut last, mut idle, mut looked, mut ask_after) = (0, Duration::ZERO, Instant::now(), IDLE);
        loop {
            let now = self.control.count().map_err(control_failed())?;
            // Not before it waits: otherwise QEMU could stop it without the last instruction.
            if now >= count && self.control.waits().map_err(control_failed())? {
                break;
            }
            // While this process is stopped, it cannot give the machine what that needs.
            let passed = looked.elapsed().min(IDLE);
            looked = Instant::now();
            let waits_for_pages = self.demanded.as_ref().is_some_and(DemandedMemory::is_busy);
            if now != last || waits_for_pages {
                (last, idle, ask_after) = (now, Duration::ZERO, IDLE);
            } else {
                idle += passed;
            }
            if idle >= self.idle_limit {
                return Err(differs("executes nothing more".into()));
            }
            check_simulator(&self.control)?;
            std::thread::sleep(POLL);
            // Seldom: while QEMU's main thread answers, it also passes over the time in which the processor
            // waits, and takes one that is about to wait for one that does.
            if idle < ask_after {
                continue;
            }
            ask_after = idle * 2;
            let status = text(&self.machine.monitor.execute("query-status", json!({}))?, "status");
            if status != "running" {
                // It was switched off, or has crashed: what the counts say is compared.
                return Ok(());
            }
        }
        let (control, pid) = (&self.control, self.machine.pid);
        self.machine.monitor.execute_while("stop", || {
            // Not earlier: the machine would go on until QEMU has read the command.
            wait_for_stop(pid)?;
            set(control, u64::MAX)
        })?;
        Ok(())
    }

    /// How the machine differs from a checkpoint.
    fn difference(&mut self, checkpoint: &Checkpoint) -> Result<Option<String>> {
        // A request is complete before the instruction behind it, so disks say more than the rest.
        if let Some(reason) = self.disk_difference(checkpoint)? {
            return Err(differs(reason));
        }
        let changed = self.changed_pages(checkpoint)?;
        if let Some((block, page)) = changed.pages.keys().next() {
            let reason = format!("has another page at {:#x} of its memory {block}", page.address().get());
            // An instruction and an interrupt write some pages.
            return if changed.count <= MAX_CHANGED_PAGES { Ok(Some(reason)) } else { Err(differs(reason)) };
        }
        let devices = Restore::new(checkpoint).devices()?;
        let section = first_difference(&devices, &self.save_devices()?);
        Ok(section.map(|section| format!("has another state of its device {section}")))
    }

    /// How the disks differ from those of a checkpoint.
    fn disk_difference(&self, checkpoint: &Checkpoint) -> Result<Option<String>> {
        let restore = Restore::new(checkpoint);
        let startup = restore.startup()?;
        let recorded = restore.disk_spaces(&startup)?;
        for disk in &self.disks {
            let Some(expected) = recorded.iter().find(|recorded| recorded.image.label == disk.label()) else {
                return Ok(Some(format!("has a disk {}, which the checkpoint has not", disk.label())));
            };
            if let Some(page) = disk.first_difference(expected.root, checkpoint)? {
                let (at, label) = (page.address().get(), disk.label());
                return Ok(Some(format!("has another content at {at:#x} of its disk {label}")));
            }
        }
        let is_known = |label: &str| self.disks.iter().any(|disk| disk.label() == label);
        let unknown = recorded.iter().find(|recorded| !is_known(&recorded.image.label));
        Ok(unknown.map(|disk| format!("has no disk {}, which the checkpoint has", disk.image.label)))
    }

    /// The pages that are not those of a checkpoint.
    fn changed_pages(&self, checkpoint: &Checkpoint) -> Result<ChangedPages> {
        let mut changed = ChangedPages::default();
        for (space, block) in pair(&Restore::new(checkpoint).ram_spaces()?, &self.blocks)? {
            let origin = self.origins.get(&block.id);
            visit_differing_pages(checkpoint, self.machine.pid, space, block, origin, &mut |page, content| {
                changed.count += 1;
                changed.pages.insert((block.id.clone(), page), content.to_vec());
                if changed.pages.len() > MAX_CHANGED_PAGES {
                    changed.pages.pop_last();
                }
            })?;
        }
        Ok(changed)
    }

    fn save_devices(&mut self) -> Result<Vec<u8>> {
        let mut changes = Changes::new(&self.machine)?;
        let file = add_device_file(&mut self.machine, &mut changes)?;
        self.machine.execute(&save_devices())?;
        changes.end_checkpoint(&mut self.machine)?;
        let failed = || Error::system("read the state of the devices");
        let mut devices = vec![0; file.metadata().map_err(failed())?.len() as usize];
        file.read_exact_at(&mut devices, 0).map_err(failed())?;
        Ok(devices)
    }

    /// Lets the machine go on, without single steps, when QEMU is told to.
    pub(crate) fn release(&mut self) -> Result<()> {
        self.step_singly(false)?;
        self.control.stop_at(u64::MAX).map_err(control_failed())
    }

    /// The process that is killed when it is dropped, its monitor, and what serves it.
    pub(crate) fn into_parts(self) -> (NewQemu, Machine, (Vec<ServedDisk>, Option<DemandedMemory>)) {
        (self.started, self.machine, (self.disks, self.demanded))
    }

    /// Ends QEMU, whose plugins write their results then. Returns what they share with this
    /// process.
    pub(crate) fn quit(mut self) -> Result<Control> {
        self.machine.quit()?;
        let status = self.started.into_child()?.wait().map_err(Error::system("wait for QEMU"))?;
        match status.success() {
            true => Ok(self.control),
            false => {
                let reason = format!("ended with {status} behind the simulation");
                Err(Error::about(ErrorKind::Gone, Object::Process(self.machine.pid), reason))
            }
        }
    }
}

/// How the memory of a QEMU comes from a checkpoint.
struct Memory<'b> {
    /// None if nothing is missing.
    missing: Option<MissingMemory>,
    demanded: Vec<DemandedBlock>,
    origins: BTreeMap<String, Origin>,
    /// Blocks that are to be filled as a whole.
    whole: Vec<(&'b SpaceRecord, &'b RamBlock)>,
    /// Blocks of which the pages are to be filled that QEMU has written to.
    present: Vec<(&'b SpaceRecord, &'b RamBlock)>,
    /// Pages that were read.
    read_pages: u64,
}

impl<'b> Memory<'b> {
    /// Maps into QEMU the blocks of its memory of which the node has a base, and writes what
    /// differs from that. Pages of large blocks are missing then, where QEMU may have a
    /// userfaultfd.
    fn share(
        shared: Option<&NodeMemory>,
        checkpoint: &Checkpoint,
        machine: &mut Machine,
        blocks: Vec<(&'b SpaceRecord, &'b RamBlock)>,
        mappings: &[Mapping],
    ) -> Result<Memory<'b>> {
        let failed = || Error::system("write the memory of QEMU");
        let may_miss = machine.check_keeps_memory("").is_ok();
        let missing = if may_miss { MissingMemory::of(machine.pid)? } else { None };
        let (demanded, origins) = (Vec::new(), BTreeMap::new());
        let mut memory = Memory { missing, demanded, origins, whole: Vec::new(), present: Vec::new(), read_pages: 0 };
        for (space, block) in blocks {
            // One that can grow stays one mapping, by which it is found again.
            let is_whole = mappings.iter().any(|mapping| mapping.range() == block.range);
            if !is_whole || block.bytes() < MIN_BLOCK {
                memory.whole.push((space, block));
                continue;
            }
            let base = match shared {
                Some(shared) => shared.base(space, block.bytes(), checkpoint, memory.missing.is_some())?,
                None => None,
            };
            let range = block.range.clone();
            let Some(mut base) = base else {
                let Some(missing) = &memory.missing else {
                    memory.whole.push((space, block));
                    continue;
                };
                missing.register(&range)?;
                let tree = tree_of(space, block.bytes(), checkpoint)?;
                memory.demanded.push(DemandedBlock { range, tree, base: None });
                memory.origins.insert(block.id.clone(), Origin { demanded: Some(space.root), base: None });
                memory.present.push((space, block));
                continue;
            };
            map_privately(machine, &base.file, block)?;
            let first = block.range.start.page();
            let (targets, ids): (Vec<PageNumber>, Vec<ContentId>) =
                std::mem::take(&mut base.changed).into_iter().map(|(page, id)| (first + page.get(), id)).unzip();
            memory.read_pages += base.count + ids.len() as u64;
            let pages = base.missing.take();
            let is_demanded = pages.is_some();
            match (&memory.missing, pages) {
                (Some(missing), Some(pages)) => {
                    missing.register(&range)?;
                    let fill = |page: PageNumber, content: &[u8]| missing.fill(page, content);
                    copy_pages(checkpoint, &ids, &targets, &fill)?.map_err(failed())?;
                    let tree = PageTree::load(base.root, checkpoint)?;
                    memory.demanded.push(DemandedBlock { range, tree, base: Some(pages) });
                }
                _ => {
                    let written = proc::open_memory_for_writing(machine.pid).map_err(failed())?;
                    let write = |page: PageNumber, content: &[u8]| written.write_all_at(content, page.address().get());
                    copy_pages(checkpoint, &ids, &targets, &write)?.map_err(failed())?;
                }
            }
            let demanded = is_demanded.then_some(base.root);
            memory.origins.insert(block.id.clone(), Origin { demanded, base: Some(base) });
        }
        Ok(memory)
    }
}

/// Waits until QEMU has read the command `stop`, and waits for the processor: its main thread
/// sleeps then, where it otherwise waits for the monitor.
fn wait_for_stop(pid: i32) -> Result<()> {
    let deadline = Instant::now() + STOP_LIMIT;
    let (mut last, mut count) = (None, 0);
    while count < WAITING_COUNT {
        let now = Call::of_thread(pid).map_err(Error::system("find out what QEMU's main thread waits for"))?;
        let waits = now.is_some_and(|call| call.number == libc::SYS_futex);
        count = if waits && (count == 0 || now == last) { count + 1 } else { 0 };
        last = now;
        if Instant::now() >= deadline {
            return Err(Error::about(ErrorKind::Monitor, Object::Process(pid), "does not stop its machine"));
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

/// Calls `found` with each page of a block of memory that is not that of a checkpoint, and with
/// what it holds. Pages are compared by the ids under which the repository holds them, so that none
/// is read from it. Pages that QEMU would get now are not compared if the checkpoint has the same.
fn visit_differing_pages(
    checkpoint: &Checkpoint,
    pid: i32,
    space: &SpaceRecord,
    block: &RamBlock,
    origin: Option<&Origin>,
    found: &mut dyn FnMut(PageNumber, &[u8]),
) -> Result<()> {
    let failed = || Error::system("compare the memory of QEMU");
    let memory = proc::open_memory(pid).map_err(failed())?;
    let start = block.range.start;
    let tree = tree_of(space, block.bytes(), checkpoint)?;
    let addresses = |page: PageNumber| (start.page() + page.get()).addresses();
    let mut compared = RangeSet::new();
    match origin.and_then(|origin| origin.demanded) {
        Some(root) => PageTree::diff(checkpoint, root, space.root, &mut |page, _, _| {
            // The other tree may have pages behind the end.
            if page.get() < block.bytes().pages_rounded_up() {
                compared.insert(addresses(page));
            }
            Ok(())
        })?,
        // The others of the checkpoint are zeros, as are those that QEMU has not touched, and its base does not hold.
        None => tree.iter().for_each(|(page, _)| compared.insert(addresses(page))),
    }
    let filter = Filter { any: PRESENT | SWAPPED, ..Filter::default() };
    let pagemap = Pagemap::of_process(pid).map_err(failed())?;
    pagemap.find(&block.range, filter, |run, _| compared.insert(run)).map_err(failed())?;
    let base = origin.and_then(|origin| origin.base.as_ref());
    let (mut at, end) = (Address::MIN, Address::MIN + block.bytes());
    while let Some(base) = base.filter(|_| at < end) {
        let data = sparse::next_data(&base.file, at, end).map_err(failed())?;
        if data.is_empty() {
            break;
        }
        at = data.end;
        compared.insert(start + (data.start - Address::MIN)..start + (data.end - Address::MIN));
    }
    let mut content = vec![0; COMPARED_BYTES];
    for range in compared.iter() {
        let mut at = range.start;
        while at < range.end {
            let length = (range.end - at).to_usize().min(COMPARED_BYTES);
            memory.read_exact_at(&mut content[..length], at.get()).map_err(failed())?;
            let first = at.page().get() - start.page().get();
            for (page, held) in (first..).map(PageNumber::new).zip(content[..length].as_chunks::<PAGE_SIZE>().0) {
                if checkpoint.page_id(held) != tree.get(page) {
                    found(page, held);
                }
            }
            at += ByteCount::new(length as u64);
        }
    }
    Ok(())
}

fn differs(reason: String) -> Error {
    let error = Error::about(ErrorKind::Differs, Object::None, format!("the machine {reason}"));
    error.help("something that is not recorded decides what it does")
}

pub(crate) fn control_failed() -> impl FnOnce(std::io::Error) -> Error {
    Error::system("control the plugin of the simulation")
}

/// The arguments that load Pagemark's plugin, which stops the machine.
pub(crate) fn controller(library: &Path, control: &Path) -> Result<Vec<String>> {
    Ok(vec!["-plugin".into(), format!("{},control={}", option_word(library)?, option_word(control)?)])
}

/// Fails if the simulator in QEMU has: where its file cannot be written.
pub(crate) fn check_simulator(control: &Control) -> Result<()> {
    match control.failure().map_err(control_failed())? {
        None => Ok(()),
        Some(error) => {
            let operation = "write what the simulator observes";
            Err(Error::of(ErrorKind::System, operation, Object::None, error).help("free room on its disk"))
        }
    }
}
