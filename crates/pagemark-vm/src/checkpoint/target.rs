//! A virtual machine as a target.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use pagemark::blob::BlobHistory;
use pagemark::repository::{SpaceKind, StateRecord, TargetKind};
use pagemark::target::{
    Captured, CapturedSpace, Frozen, Keep, KeptCounts, Recorded, SpaceId, Target, TargetDescription, TargetMemory,
    VisitPage, WhileFreezing,
};
use pagemark::{Address, Mechanism, PageNumber, Range, RangeSet, Store};
use pagemark_kvm_log::kernel::Keeping;
use pagemark_linux::proc::{Mapping, Process, maps};
use pagemark_linux::scratch_directory;
use pagemark_trace::space::{AddressSpace, Moment, SharedScope};
use serde_json::Value;

use crate::checkpoint::changes::Changes;
use crate::checkpoint::disks::{Connections, DiskContents, Disks};
use crate::checkpoint::given_files;
use crate::checkpoint::input_list::InputList;
use crate::checkpoint::simulator::completes_requests;
use crate::checkpoint::written_files::check_images_have_devices;
use crate::error::{Error, ErrorKind, Object, Result};
use crate::memory::block_file::BlockFile;
use crate::memory::kvm_log::{self, KvmLog, outside};
use crate::memory::memory_map::MemoryMap;
use crate::memory::ram_blocks::{BlockMemory, RamBlock};
use crate::memory::views;
use crate::memory::write_watch::{Activation, OTHER_STRATEGY, WriteWatch};
use crate::qemu::event::MachineEvent;
use crate::qemu::machine::{Machine, Startup};
use crate::qemu::refused;

/// Name of the record that holds the state of processors and devices, as QEMU writes it.
pub(crate) const DEVICES: &str = "qemu-devices";

/// Name of the record that says how QEMU was started.
pub(crate) const STARTUP: &str = "qemu-startup.json";

/// Name of the record that says where the memory is among the physical addresses.
pub(crate) const MEMORY_MAP: &str = "qemu-memory-map.json";

/// Name of the record that has what came to the machine from outside, and when.
pub(crate) const INPUTS: &str = "qemu-inputs";

/// A virtual machine of a QEMU that runs.
///
/// Its spaces are the blocks of its memory, by offset. Dropped at any point, also by the death of
/// this process, the machine continues.
pub struct VmTarget {
    machine: Machine,
    changes: Changes,
    memory: MachineMemory,
    disks: Disks,
    /// What the saved state held in the last checkpoint.
    states: BlobHistory,
    next_space: SpaceId,
    /// The command line of QEMU.
    command: Vec<String>,
    label: String,
    /// What comes to the machine from outside, if that is recorded.
    inputs: Option<InputList>,
    on_event: Option<EventHandler>,
    last_stop: StopTimes,
}

/// What QEMU did in the stop of a checkpoint, and how long it took.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct StopTimes {
    /// To stop the processors, and to bring what is written to the disks so far to their images.
    pub stop: Duration,
    /// To begin to keep the old content of the disks.
    pub disks: Duration,
    /// To save the state of processors and devices.
    pub devices: Duration,
}

/// Gets what happens to a machine.
pub type EventHandler = Box<dyn FnMut(MachineEvent) + Send>;

/// The memory of a machine, tracked from outside.
struct MachineMemory {
    mechanism: Mechanism,
    space: AddressSpace,
    /// For a mechanism that holds writes. What the address space finds is of no use then.
    watch: Option<WriteWatch>,
    /// For `kvm-log` and `kvm-ring`: what the machine's processors write, besides what the address
    /// space finds.
    log: Option<KvmLog>,
    blocks: Vec<Block>,
    /// True if blocks came after their mappings could be registered.
    has_new_blocks: bool,
}

struct Block {
    space: SpaceId,
    place: RamBlock,
    /// What QEMU has not written to, of a block of [`BlockMemory::FixedFile`].
    file: Option<BlockFile>,
    /// Offsets that were found written and are not reported yet.
    written: RangeSet,
}

/// QEMU's moment while the machine runs.
const WHILE_RUNNING: Moment = Moment::Freezing;

/// QEMU's moment while the machine is stopped: QEMU itself runs.
const WHILE_STOPPED: Moment = Moment::Unstopped;

impl VmTarget {
    /// Attaches to the QEMU that listens on the monitor socket (QMP) at `path`. Its memory is
    /// tracked by `mechanism`. QEMU is stopped for a fraction of a millisecond with the
    /// mechanisms that need it.
    ///
    /// With a mechanism that [holds writes](Mechanism::holds_writes), the first write to a page in
    /// each interval waits for a thread of this process, and checkpoints can use
    /// [`Strategy::CopyOnWrite`](pagemark::checkpointer::Strategy::CopyOnWrite).
    ///
    /// With [`Mechanism::KvmLog`] and [`Mechanism::KvmRing`], QEMU must have been started by
    /// [`OwnQemu::start_for`] with the same mechanism, by this process or another.
    ///
    /// # Errors
    /// [`ErrorKind::Monitor`], [`ErrorKind::Unsupported`], [`ErrorKind::Memory`],
    /// [`ErrorKind::Process`], [`ErrorKind::KvmLog`]; the machine is unchanged.
    ///
    /// [`OwnQemu::start_for`]: crate::OwnQemu::start_for
    pub fn attach(path: &Path, mechanism: Mechanism) -> Result<VmTarget> {
        VmTarget::attach_with(path, mechanism, mechanism.holds_writes().then(Activation::default))
    }

    /// Like [`VmTarget::attach`] with a mechanism that reads what KVM keeps, for checkpoints that
    /// use [`Strategy::CopyOnWrite`](pagemark::checkpointer::Strategy::CopyOnWrite): KVM's log says
    /// what the machine writes, and writes to pages that a checkpoint keeps wait until these are
    /// copied (PML, sections 4.3 to 4.5). QEMU's own writes are found as with the mechanism `uffd`,
    /// and so are the machine's to memory that is not shared.
    ///
    /// # Errors
    /// Those of [`VmTarget::attach`].
    pub fn attach_to_hold(path: &Path, mechanism: Mechanism, activation: Activation) -> Result<VmTarget> {
        VmTarget::attach_with(path, mechanism, Some(activation))
    }

    /// `holding` is given if writes are to wait for this process.
    fn attach_with(path: &Path, mechanism: Mechanism, holding: Option<Activation>) -> Result<VmTarget> {
        let mut machine = Machine::connect(path)?;
        let is_running = machine.check()?;
        // What commands that were killed have left there.
        scratch_directory::sweep(&std::env::temp_dir());
        let label = match machine.name()? {
            Some(name) => name,
            None => path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned()),
        };
        let startup = machine.startup(is_running)?;
        let (mut disks, mut next_space) = (Disks::default(), 0);
        let found = machine.blocks()?;
        let drives = machine.drives(&startup, &found)?;
        check_images_have_devices(&found.nodes, &startup, &drives)?;
        disks.set_drives(drives, &mut next_space);
        let command = [startup.program.display().to_string()].into_iter().chain(startup.arguments).collect();
        let mut changes = Changes::new(&machine)?;
        // Whether QEMU takes a file, and serves disks, is found out before the machine is stopped.
        let tried = given_files::add_device_file(&mut machine, &mut changes)
            .and_then(|_| disks.check(&mut machine, &mut changes));
        // Also where the guard, which would undo it at the end of this process, is gone.
        let ended = changes.end_checkpoint(&mut machine);
        tried.and(ended)?;
        // A socket may belong to another program, which is left alone: it has no such memory.
        let mut mappings = maps::read(machine.pid).map_err(Error::system("read the mappings of QEMU"))?;
        let left_out = views::span(&mappings);
        views::check(mechanism, &mappings, left_out.as_ref(), machine.pid)?;
        views::leave_out(&mut mappings, left_out.as_ref());
        let places = machine.changed_blocks(&mappings)?.unwrap_or_default();
        if holding.is_some() {
            machine.check_keeps_memory(OTHER_STRATEGY)?;
        }
        let keeping = kvm_log::keeping(mechanism);
        let mut log = keeping.map(|keeping| connect_to_log(&mut machine, mechanism, keeping)).transpose()?;
        let watch = holding.map(|activation| WriteWatch::start(machine.pid, activation)).transpose()?;
        let of_space = match mechanism {
            _ if watch.is_some() => Mechanism::Full,
            _ if keeping.is_some() => outside(mechanism)?,
            other => other,
        };
        let qemu = pagemark_trace::attach::check(machine.pid)?;
        let mut space = AddressSpace::attach_without(qemu, of_space, SharedScope::FilesAndMemory, left_out)?;
        space.refresh_mappings()?;
        // The first collect reports all that holds data; what is written from now on is in the log.
        log.as_mut().map_or(Ok(()), KvmLog::begin)?;
        let mut memory = MachineMemory { mechanism, space, watch, log, blocks: Vec::new(), has_new_blocks: false };
        memory.set_blocks(places, &mut next_space)?;
        // Those of now were registered by the attach.
        memory.has_new_blocks = false;
        let states = BlobHistory::default();
        Ok(VmTarget {
            machine,
            changes,
            memory,
            disks,
            states,
            next_space,
            command,
            label,
            inputs: None,
            on_event: None,
            last_stop: StopTimes::default(),
        })
    }

    /// The process id of QEMU.
    pub fn pid(&self) -> i32 {
        self.machine.pid
    }

    /// The process of QEMU.
    pub fn process(&self) -> Process {
        self.memory.space.process()
    }

    /// A name for people: the machine's name, or that of its monitor socket without the extension.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// What QEMU did in the stop of the last checkpoint, and how long it took. The stop of a
    /// machine that did not run takes no time.
    pub fn last_stop(&self) -> StopTimes {
        self.last_stop
    }

    /// Has `handler` called with each event of the machine. QEMU's reports are read at each
    /// checkpoint and when this value is dropped.
    pub fn on_event(&mut self, handler: EventHandler) {
        self.on_event = Some(handler);
    }

    /// Checks that the machine repeats its run: that nothing but its own instructions decides what
    /// it does.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] names what else does.
    pub fn check_deterministic(&mut self) -> Result<()> {
        self.machine.check_deterministic()
    }

    /// Has checkpoints keep what comes to the machine from outside: `inputs` is the list that its
    /// command line names ([`deterministic_inputs`](crate::deterministic_inputs)).
    pub fn keep_inputs(&mut self, inputs: InputList) {
        self.inputs = Some(inputs);
    }

    /// How many instructions the machine has executed since its start. While it runs, how many they
    /// were a short time before.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if it does not count them.
    pub fn instructions(&mut self) -> Result<u64> {
        self.machine.instructions()
    }

    /// True if the machine's processors run.
    ///
    /// # Errors
    /// QEMU does not answer, or the machine is in a state that a checkpoint cannot hold.
    pub fn is_running(&mut self) -> Result<bool> {
        self.machine.check()
    }

    /// Lets a machine run that is paused.
    ///
    /// # Errors
    /// QEMU refuses, or does not answer.
    pub fn resume(&mut self) -> Result<()> {
        self.machine.resume()
    }

    /// Ends QEMU.
    ///
    /// # Errors
    /// QEMU does not answer.
    pub fn quit(&mut self) -> Result<()> {
        self.machine.quit()
    }

    fn report_events(&mut self) {
        let events = self.machine.monitor.take_events();
        if let Some(handler) = &mut self.on_event {
            events.into_iter().for_each(handler);
        }
    }

    fn spaces(&mut self, moment: Moment) -> Result<Vec<SpaceId>> {
        let mut spaces = self.memory.spaces(moment)?;
        // What was written to a disk is found by QEMU: see `CapturedVm::saved_pages`.
        spaces.extend(self.disks.iter().map(|disk| disk.space));
        Ok(spaces)
    }
}

impl Drop for VmTarget {
    fn drop(&mut self) {
        // If QEMU does not answer, the guard tries again when this process ends.
        let _ = self.changes.end(&mut self.machine);
        self.report_events();
    }
}

impl MachineMemory {
    /// Finds the blocks of the machine's memory, if they have changed, in the reply to
    /// [`Machine::list_blocks`]. All of a new one counts as written.
    fn find_blocks(&mut self, machine: &mut Machine, listed: &Value, next_space: &mut SpaceId) -> Result<()> {
        match machine.changed_blocks_of(listed, || Ok(self.space.refresh_mappings()?))? {
            Some(places) => self.set_blocks(places, next_space),
            None => Ok(()),
        }
    }

    fn set_blocks(&mut self, places: Vec<RamBlock>, next_space: &mut SpaceId) -> Result<()> {
        let mut old = std::mem::take(&mut self.blocks);
        if let Some(watch) = &self.watch {
            old.retain(|block| places.contains(&block.place));
            watch.retain(&old.iter().map(|block| block.place.range.clone()).collect::<Vec<_>>());
        }
        for place in places {
            let known = old.iter().position(|block| block.place == place);
            let block = match known {
                Some(index) => old.swap_remove(index),
                None => {
                    let space = *next_space;
                    *next_space += 1;
                    self.has_new_blocks = true;
                    let (file, written) = self.content(&place)?;
                    Block { space, file, written, place }
                }
            };
            self.blocks.push(block);
        }
        Ok(())
    }

    /// The file behind a new block, if its content is not in QEMU alone, and the offsets of the
    /// block that may hold data.
    fn content(&self, place: &RamBlock) -> Result<(Option<BlockFile>, RangeSet)> {
        let mut held = RangeSet::from(Address::MIN..Address::MIN + place.bytes());
        let offsets = |range: Range| place.offsets(&range);
        let has = |mapping: &&Mapping| mapping.start <= place.range.start && place.range.end <= mapping.end;
        let mapping = self.space.mappings().iter().find(has);
        // Watched before it is looked at, so that no write is missed.
        if let (Some(watch), Some(mapping)) = (&self.watch, mapping)
            && !watch.has(&place.range)
        {
            held = watch.add(&place.id, &place.range, mapping.range())?.iter().map(offsets).collect();
        }
        let (Some(mapping), true) = (mapping, place.memory != BlockMemory::Private) else {
            return Ok((None, held));
        };
        // Holes of a file in memory must not be read through a mapping: that would fill them.
        let file = BlockFile::open(self.space.pid(), mapping, place)?;
        let mut content = file.content()?;
        if place.memory != BlockMemory::FixedFile {
            return Ok((None, content));
        }
        match &self.watch {
            Some(_) => content.extend(&held),
            None => content.extend(&self.space.populated().within(place.range.clone()).map(offsets).collect()),
        }
        Ok((Some(file), content))
    }

    /// Collects what was written in all blocks.
    fn collect_all(&mut self, moment: Moment) -> Result<()> {
        // What was compared must be what is copied.
        if moment == WHILE_RUNNING && self.space.mechanism().compares_content() {
            return Ok(());
        }
        self.renew_log()?;
        let mut written = RangeSet::new();
        let by_page_table = self.collect_by_page_table(moment, &mut written);
        let by_log = self.log.as_mut().map_or(Ok(()), |log| log.collect(&mut written));
        // What was found is not found again.
        for block in &mut self.blocks {
            for range in written.within(block.place.range.clone()) {
                block.written.insert(block.place.offsets(&range));
            }
        }
        by_page_table?;
        by_log
    }

    /// Collects what was written through QEMU's page table.
    fn collect_by_page_table(&mut self, moment: Moment, written: &mut RangeSet) -> Result<()> {
        if let Some(watch) = &self.watch {
            return self.blocks.iter().try_for_each(|block| watch.collect(&block.place.range, written));
        }
        // New memory can be registered only while QEMU is stopped too; QEMU's own memory need not be.
        let must_register = moment == WHILE_STOPPED && std::mem::take(&mut self.has_new_blocks);
        self.space.collect(if must_register { Moment::InStop } else { moment }, written)?;
        Ok(())
    }

    /// From here on until the end of the checkpoint, the machine gets no other mappings of its own
    /// than those that it has.
    fn keep_views(&mut self) -> Result<()> {
        if self.watch.is_none() || self.log.is_none() {
            return Ok(());
        }
        self.renew_log()?;
        self.log.as_mut().map_or(Ok(()), KvmLog::keep_views)
    }

    /// Has pages that are kept be protected also where else the machine reaches its memory.
    fn find_views(&mut self) -> Result<()> {
        let Some(watch) = &self.watch else { return Ok(()) };
        for Block { place, .. } in &self.blocks {
            let views = views::of_block(&place.range, self.space.mappings(), self.space.left_out_mappings());
            watch.set_views(&place.id, &place.range, views)?;
        }
        Ok(())
    }

    /// Ends what a checkpoint needed to keep pages.
    fn end_checkpoint(&mut self) {
        if let Some(watch) = &self.watch {
            watch.end_checkpoint();
            // If the library does not answer, it is connected to anew.
            let _ = self.log.as_mut().map_or(Ok(()), KvmLog::release_views);
        }
    }

    /// Reads KVM's log anew if its library was lost. All of the memory counts as written then.
    fn renew_log(&mut self) -> Result<()> {
        let Some(keeping) = kvm_log::keeping(self.mechanism) else { return Ok(()) };
        if !self.log.as_ref().is_some_and(KvmLog::is_lost) {
            return Ok(());
        }
        let mut log = KvmLog::connect(self.space.pid(), keeping)?;
        log.begin()?;
        let written = self.blocks.iter().map(|block| self.content(&block.place).map(|(_, written)| written));
        let written = written.collect::<Result<Vec<RangeSet>>>()?;
        for (block, all) in self.blocks.iter_mut().zip(written) {
            block.written.extend(&all);
        }
        self.log = Some(log);
        Ok(())
    }

    fn spaces(&mut self, moment: Moment) -> Result<Vec<SpaceId>> {
        self.collect_all(moment)?;
        Ok(self.blocks.iter().map(|block| block.space).collect())
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<()> {
        if let Some(block) = self.blocks.iter_mut().find(|block| block.space == space) {
            dirty.append(&mut block.written);
        }
        Ok(())
    }

    /// Has the content of pages kept beyond the stop. False if the memory is not watched.
    fn keep(&self, space: SpaceId, pages: &RangeSet) -> Result<Option<RangeSet>> {
        let Some(watch) = &self.watch else { return Ok(None) };
        if let Some(block) = self.blocks.iter().find(|block| block.space == space) {
            let addresses = pages.iter().map(|part| block.place.addresses(&part)).collect();
            watch.keep(&block.place.range, &addresses)?;
        }
        Ok(Some(RangeSet::new()))
    }

    fn read(&self, space: SpaceId, wanted: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        self.read_by(space, wanted, buffer, |ranges, buffer| match &self.watch {
            Some(watch) => watch.read(ranges, buffer),
            None => Ok(self.space.read(ranges, buffer)?),
        })
    }

    fn read_kept(&self, space: SpaceId, wanted: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        self.read_by(space, wanted, buffer, |ranges, buffer| match &self.watch {
            Some(watch) => watch.read_kept(ranges, buffer),
            None => Err(Error::damaged("memory was to be kept that is not watched")),
        })
    }

    /// Reads ranges of a space by `read`, which gets where they are in QEMU.
    fn read_by(
        &self,
        space: SpaceId,
        wanted: &[Range],
        buffer: &mut [u8],
        read: impl FnOnce(&[Range], &mut [u8]) -> Result<RangeSet>,
    ) -> Result<RangeSet> {
        let Some(block) = self.blocks.iter().find(|block| block.space == space) else {
            return Ok(wanted.iter().cloned().collect());
        };
        if wanted.iter().any(|range| range.end > Address::MIN + block.place.bytes()) {
            let object = Object::Block(block.place.id.clone());
            return Err(Error::about(ErrorKind::Memory, object, "is shorter than what is read of it"));
        }
        let ranges: Vec<Range> = wanted.iter().map(|range| block.place.addresses(range)).collect();
        let missing = read(&ranges, buffer)?;
        let missing = missing.iter().map(|range| block.place.offsets(&range)).collect();
        match &block.file {
            // What QEMU has not written to is there all the same.
            Some(file) => file.read_missing(wanted, &missing, buffer).map(|()| RangeSet::new()),
            None => Ok(missing),
        }
    }
}

impl TargetMemory for VmTarget {
    type Error = Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>> {
        self.spaces(WHILE_RUNNING)
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<()> {
        self.memory.collect(space, dirty)
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        self.memory.read(space, ranges, buffer)
    }
}

impl Target for VmTarget {
    type Frozen<'target> = FrozenVm<'target>;

    fn description(&self) -> TargetDescription {
        TargetDescription {
            label: format!("virtual machine {}", self.label),
            command: self.command.clone(),
            kind: TargetKind::VirtualMachine,
            mechanism: self.memory.mechanism,
        }
    }

    fn precopy(&mut self, _: &mut dyn Store) -> Result<(), pagemark::Error> {
        Ok(())
    }

    /// Stops the machine and saves the state of its devices. QEMU answers within a millisecond, so
    /// nothing is copied meanwhile.
    fn freeze(&mut self, _: WhileFreezing<'_, Error>) -> Result<FrozenVm<'_>> {
        self.report_events();
        // Where the end of the last checkpoint got no reply.
        self.changes.end_checkpoint(&mut self.machine)?;
        let is_running = self.machine.check()?;
        if self.memory.watch.is_some() {
            self.machine.check_keeps_memory(OTHER_STRATEGY)?;
        }
        let mut startup = self.machine.startup(is_running)?;
        let found = self.machine.blocks()?;
        let drives = self.machine.drives(&startup, &found)?;
        check_images_have_devices(&found.nodes, &startup, &drives)?;
        self.disks.set_drives(drives, &mut self.next_space);
        startup.media = found.media();
        startup.disks = self.disks.iter().map(|disk| disk.drive.image.clone()).collect();
        // From here on QEMU is as it was when this value is dropped.
        let hold = Hold(self);
        let VmTarget { machine, changes, disks, memory, next_space, last_stop, .. } = &mut *hold.0;
        let connections = disks.prepare(machine, changes)?;
        let devices = given_files::add_device_file(machine, changes)?;
        memory.keep_views()?;
        // Not in the stop, which would take a quarter longer.
        memory.space.refresh_mappings()?;
        // QEMU takes some µs to read each byte of a command. It lists the map, which takes several ms, before it stops
        // the machine, and reads the other commands meanwhile.
        let mut steps = vec![(Machine::list_map(), None)];
        let before_stop = steps.len();
        steps.extend(startup.is_running.then(Changes::stop));
        let of_stop = steps.len();
        steps.extend(disks.begin(changes)?);
        let before_devices = steps.len();
        // The guest may have mounted what QEMU cannot save then.
        let in_stop = [given_files::save_devices(), Machine::list_blocks(), refused::list_reasons()];
        steps.extend(in_stop.map(|command| (command, None)));
        let sent = Instant::now();
        let replies = changes.execute_all(machine, steps)?;
        // QEMU executes one command after the other.
        let after = |steps: usize| replies.get(steps - 1).map_or(sent, |reply| reply.at);
        let listed = after(before_stop);
        let since = if startup.is_running { machine.monitor.stopped_since(sent, listed) } else { listed };
        let taken_at = SystemTime::now() - since.elapsed();
        *last_stop = StopTimes {
            stop: after(of_stop) - since,
            disks: after(before_devices) - after(of_stop),
            devices: after(before_devices + 1) - after(before_devices),
        };
        let [blocks, reasons] =
            [1, 2].map(|behind| replies.get(before_devices + behind).map_or(&Value::Null, |reply| &reply.result));
        refused::check_saved(reasons, machine.pid)?;
        memory.find_blocks(machine, blocks, next_space)?;
        memory.find_views()?;
        let map = replies.into_iter().next().map_or(Value::Null, |reply| reply.result);
        let inputs = hold.0.inputs.as_ref().map(InputList::read).transpose()?;
        Ok(FrozenVm { inputs, hold, devices, connections, startup, map, since, taken_at })
    }

    fn capture_failed(&mut self) {
        let VmTarget { machine, changes, disks, states, .. } = self;
        states.forget();
        if disks.capture_failed(machine, changes).is_err() {
            // Without the bitmaps, all of the disks counts as written.
            disks.forget();
        }
    }
}

/// Connects to the library that reads KVM's log, before anything is changed.
fn connect_to_log(machine: &mut Machine, mechanism: Mechanism, keeping: Keeping) -> Result<KvmLog> {
    if !machine.has_kvm()? {
        let error = Error::about(ErrorKind::KvmLog, Object::Process(machine.pid), "does not run its machine under KVM");
        return Err(error.help("start it with -accel kvm, or use another mechanism"));
    }
    outside(mechanism)?;
    KvmLog::connect(machine.pid, keeping)
}

/// A machine in a checkpoint. Dropped, QEMU is as it was before, and the machine continues.
struct Hold<'target>(&'target mut VmTarget);

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        let VmTarget { machine, changes, memory, .. } = &mut *self.0;
        memory.end_checkpoint();
        // If QEMU does not answer, the guard tries again when this process ends.
        let _ = changes.end_checkpoint(machine);
    }
}

/// A virtual machine that is stopped, with the state of its devices saved. Dropped, it continues.
pub struct FrozenVm<'target> {
    /// The list of what came to the machine from outside.
    inputs: Option<Vec<u8>>,
    hold: Hold<'target>,
    /// What QEMU wrote.
    devices: File,
    connections: Connections,
    startup: Startup,
    /// Where the memory was before the stop, as QEMU says it.
    map: Value,
    since: Instant,
    taken_at: SystemTime,
}

impl TargetMemory for FrozenVm<'_> {
    type Error = Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>> {
        self.hold.0.spaces(WHILE_STOPPED)
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<()> {
        self.hold.0.memory.collect(space, dirty)
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        self.hold.0.memory.read(space, ranges, buffer)
    }
}

impl<'target> Frozen for FrozenVm<'target> {
    type Captured = CapturedVm<'target>;

    fn keep(&mut self, space: SpaceId, pages: &RangeSet, _: Keep) -> Result<Option<RangeSet>> {
        self.hold.0.memory.keep(space, pages)
    }

    fn thaw(self) -> Result<CapturedVm<'target>> {
        let FrozenVm { inputs, hold, devices, connections, startup, map, since, taken_at } = self;
        let VmTarget { machine, changes, memory, disks, .. } = &mut *hold.0;
        // The plugin has the processor of a recorded machine wait for each request to a disk. If a
        // client of QEMU's block server begins in such a wait, the wait does not end.
        let mut connections = Some(connections);
        let in_stop = connections.take_if(|_| completes_requests(&startup.arguments));
        let mut contents = in_stop.map(|connections| disks.open(machine, changes, connections)).transpose()?;
        if !changes.resume(machine)? {
            let reason = "was continued or reset by somebody else while it was stopped for the checkpoint";
            return Err(Error::about(ErrorKind::Unsupported, Object::Process(machine.pid), reason));
        }
        let stopped_time = if startup.is_running { since.elapsed() } else { Duration::ZERO };
        memory.space.begin_interval()?;
        let downtime = stopped_time + memory.space.take_stopped_time();
        if let Some(connections) = connections {
            contents = Some(disks.open(machine, changes, connections)?);
        }
        let contents = contents.unwrap_or_default();
        // Listing it takes as long as all of the stop. If it is the same before and after, it was so in the
        // stop.
        let later = machine.memory_map()?;
        let map = machine.map_of(&map)?.filter(|map| later.as_ref() == Some(map));
        machine.check_as_before(&startup.media)?;
        let blocks = memory.blocks.iter().map(|block| {
            (block.space, block.place.id.clone(), SpaceKind::RamBlock { bytes: block.place.bytes() }, None)
        });
        let disks = disks.iter().map(|disk| {
            let bytes = disk.drive.bytes;
            let pages = PageNumber::MIN..PageNumber::new(bytes.pages_rounded_up());
            (disk.space, disk.drive.label.clone(), SpaceKind::Disk { bytes }, Some(vec![pages]))
        });
        let spaces = blocks.chain(disks).zip(0..).map(|((space, label, kind, held_pages), id)| CapturedSpace {
            space,
            id,
            label,
            kind,
            mappings: Vec::new(),
            held_pages,
        });
        let spaces = spaces.collect();
        Ok(CapturedVm { inputs, spaces, devices, contents, startup, map, taken_at, downtime, hold })
    }
}

/// What was captured of a virtual machine besides its memory. The machine runs.
pub struct CapturedVm<'target> {
    inputs: Option<Vec<u8>>,
    spaces: Vec<CapturedSpace>,
    devices: File,
    contents: DiskContents,
    startup: Startup,
    /// None if it was changing, or its form is unknown.
    map: Option<MemoryMap>,
    taken_at: SystemTime,
    downtime: Duration,
    /// QEMU serves the disks until then.
    hold: Hold<'target>,
}

impl Captured for CapturedVm<'_> {
    fn taken_at(&self) -> SystemTime {
        self.taken_at
    }

    fn downtime(&self) -> Duration {
        self.downtime
    }

    fn spaces(&self) -> Vec<CapturedSpace> {
        self.spaces.clone()
    }

    fn read_kept(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, pagemark::Error> {
        Ok(self.hold.0.memory.read_kept(space, ranges, buffer)?)
    }

    fn kept_counts(&self) -> KeptCounts {
        self.hold.0.memory.watch.as_ref().map_or_else(KeptCounts::default, WriteWatch::counts)
    }

    fn saved_pages(&self, space: SpaceId, visit: VisitPage<'_>) -> Result<(), pagemark::Error> {
        self.contents.visit(space, visit)
    }

    fn record(mut self, store: &mut dyn Store) -> Result<Recorded, pagemark::Error> {
        self.hold.0.report_events();
        self.hold.0.machine.check_none_unplugged()?;
        self.devices.seek(SeekFrom::Start(0)).map_err(Error::system("read the state of the devices"))?;
        let history = &mut self.hold.0.states;
        let devices = history.write(DEVICES, store, &mut self.devices)?;
        let failed = |operation| move |error| Error::of(ErrorKind::System, operation, Object::None, error);
        let startup = serde_json::to_vec_pretty(&self.startup).map_err(failed("record the command line of"))?;
        let startup = history.write(STARTUP, store, &mut startup.as_slice())?;
        let record = |name: &str, content| StateRecord { name: name.to_owned(), content };
        let mut state = vec![record(DEVICES, devices), record(STARTUP, startup)];
        if let Some(map) = &self.map {
            let map = serde_json::to_vec(map).map_err(failed("record the addresses of the memory of"))?;
            state.push(record(MEMORY_MAP, history.write(MEMORY_MAP, store, &mut map.as_slice())?));
        }
        if let Some(inputs) = &self.inputs {
            state.push(record(INPUTS, history.write(INPUTS, store, &mut inputs.as_slice())?));
        }
        history.end_checkpoint();
        Ok(Recorded { files: Vec::new(), state })
    }
}
