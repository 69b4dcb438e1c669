//! A virtual machine as a target.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

use pagemark::repository::{SpaceKind, StateRecord, TargetKind};
use pagemark::sys::proc::{self, Mapping, maps};
use pagemark::sys::sparse;
use pagemark::target::{
    Captured, CapturedSpace, Frozen, Recorded, SpaceId, Target, TargetDescription, TargetMemory, VisitPage,
    WhileFreezing,
};
use pagemark::{Address, AddressRangeExt, Blob, Mechanism, Range, RangeSet, Store};
use pagemark_process::space::{AddressSpace, SharedScope};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::guard::Guard;
use crate::machine::{Machine, Startup};
use crate::ram_blocks::RamBlock;

/// Name of the record that holds the state of processors and devices, as QEMU writes it.
pub(crate) const DEVICES: &str = "qemu-devices";

/// Name of the record that says how QEMU was started.
pub(crate) const STARTUP: &str = "qemu-startup.json";

/// A virtual machine of a QEMU that runs.
///
/// Its spaces are the blocks of its memory, by offset. Dropped at any point, also by the death of
/// this process, the machine continues.
pub struct VmTarget {
    machine: Machine,
    memory: MachineMemory,
    guard: Guard,
    command: Vec<String>,
    label: String,
}

/// The memory of a machine, tracked from outside.
struct MachineMemory {
    space: AddressSpace,
    blocks: Vec<Block>,
    next_space: SpaceId,
    /// True if blocks came after their mappings could be registered.
    has_new_blocks: bool,
}

struct Block {
    space: SpaceId,
    place: RamBlock,
    /// Offsets that were found written and are not reported yet.
    written: RangeSet,
}

/// What the machine does while its memory is collected.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Running,
    Stopped,
}

impl VmTarget {
    /// Attaches to the QEMU that listens on the monitor socket (QMP) at `path`. Its memory is
    /// tracked by `mechanism`. QEMU is stopped for a fraction of a millisecond with the
    /// mechanisms that need it.
    ///
    /// # Errors
    /// [`ErrorKind::Monitor`], [`ErrorKind::Unsupported`], [`ErrorKind::Memory`],
    /// [`ErrorKind::Process`]; the machine is unchanged.
    pub fn attach(path: &Path, mechanism: Mechanism) -> Result<VmTarget> {
        let mut machine = Machine::connect(path)?;
        machine.check()?;
        let label = match machine.name()? {
            Some(name) => name,
            None => path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned()),
        };
        let startup = machine.startup(true)?;
        let command = [startup.program.display().to_string()].into_iter().chain(startup.arguments).collect();
        let guard = Guard::start(machine.monitor.descriptor())?;
        // Whether QEMU takes a file is found out before the machine is stopped.
        guard.begin(false)?;
        machine.add_device_file()?;
        machine.remove_device_file()?;
        guard.end()?;
        // A socket may belong to another program, which is left alone: it has no such memory.
        let mappings = maps::read(machine.pid).map_err(Error::system("read the mappings of QEMU"))?;
        let places = machine.changed_blocks(&mappings)?.unwrap_or_default();
        let mut space = AddressSpace::attach_with(machine.pid, mechanism, SharedScope::FilesAndMemory)?;
        space.refresh_mappings()?;
        let mut memory = MachineMemory { space, blocks: Vec::new(), next_space: 0, has_new_blocks: false };
        memory.set_blocks(places)?;
        // Those of now were registered by the attach.
        memory.has_new_blocks = false;
        Ok(VmTarget { machine, memory, guard, command, label })
    }

    /// The process id of QEMU.
    pub fn pid(&self) -> i32 {
        self.machine.pid
    }

    /// A name for people: the machine's name, or that of its monitor socket without the extension.
    pub fn label(&self) -> &str {
        &self.label
    }
}

impl MachineMemory {
    /// Finds the blocks of the machine's memory, if they have changed. All of a new one counts as
    /// written.
    fn find_blocks(&mut self, machine: &mut Machine) -> Result<()> {
        match machine.changed_blocks(self.space.mappings())? {
            Some(places) => self.set_blocks(places),
            None => Ok(()),
        }
    }

    fn set_blocks(&mut self, places: Vec<RamBlock>) -> Result<()> {
        let mut old = std::mem::take(&mut self.blocks);
        for place in places {
            let known = old.iter().position(|block| block.place == place);
            let block = match known {
                Some(index) => old.swap_remove(index),
                None => {
                    let space = self.next_space;
                    self.next_space += 1;
                    self.has_new_blocks = true;
                    Block { space, written: self.content(&place)?, place }
                }
            };
            self.blocks.push(block);
        }
        Ok(())
    }

    /// The offsets of a new block that may hold data.
    fn content(&self, place: &RamBlock) -> Result<RangeSet> {
        let all = Address::MIN..Address::MIN + place.bytes();
        if !place.is_shared {
            return Ok(all.into());
        }
        // Holes of a shared file must not be read: that would fill them.
        let has = |mapping: &&Mapping| mapping.start <= place.range.start && place.range.end <= mapping.end;
        let Some(mapping) = self.space.mappings().iter().find(has) else { return Ok(all.into()) };
        let name = format!("map_files/{:x}-{:x}", mapping.start.get(), mapping.end.get());
        let failed = || Error::system("find the content of a shared memory block");
        let file = File::open(proc::path(self.space.pid(), &name)).map_err(failed())?;
        let in_file = Address::new(mapping.offset) + (place.range.start - mapping.start);
        let (mut at, end) = (in_file, in_file + place.bytes());
        let mut content = RangeSet::new();
        while at < end {
            let data = sparse::next_data(&file, at, end).map_err(failed())?;
            if data.is_empty() {
                break;
            }
            let start = Address::MIN + (data.start - in_file);
            content.insert(start..start + data.byte_count());
            at = data.end;
        }
        Ok(content.into_whole_pages())
    }

    /// Collects what was written in all blocks.
    fn collect_all(&mut self, phase: Phase) -> Result<()> {
        // What was compared must be what is copied.
        if phase == Phase::Running && self.space.mechanism() == Mechanism::Compare {
            return Ok(());
        }
        let mut written = RangeSet::new();
        // QEMU itself runs while the machine is stopped. New memory can be registered only while QEMU is
        // stopped too; QEMU's own memory need not be.
        if phase == Phase::Stopped && std::mem::take(&mut self.has_new_blocks) {
            self.space.collect_in_stop(&mut written)?;
        } else {
            self.space.collect_unstopped(&mut written)?;
        }
        for block in &mut self.blocks {
            let start = block.place.range.start;
            for range in written.within(block.place.range.clone()) {
                let offset = Address::MIN + (range.start - start);
                block.written.insert(offset..offset + range.byte_count());
            }
        }
        Ok(())
    }

    fn spaces(&mut self, phase: Phase) -> Result<Vec<SpaceId>> {
        self.collect_all(phase)?;
        Ok(self.blocks.iter().map(|block| block.space).collect())
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<()> {
        if let Some(block) = self.blocks.iter_mut().find(|block| block.space == space) {
            dirty.append(&mut block.written);
        }
        Ok(())
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        let Some(block) = self.blocks.iter().find(|block| block.space == space) else {
            return Ok(ranges.iter().cloned().collect());
        };
        let (start, bytes) = (block.place.range.start, block.place.bytes());
        let in_qemu = |range: &Range| start + (range.start - Address::MIN)..start + (range.end - Address::MIN);
        if ranges.iter().any(|range| range.end > Address::MIN + bytes) {
            let object = Object::Block(block.place.id.clone());
            return Err(Error::about(ErrorKind::Memory, object, "is shorter than what is read of it"));
        }
        let ranges: Vec<Range> = ranges.iter().map(in_qemu).collect();
        let missing = self.space.read(&ranges, buffer)?;
        let offset = |range: Range| Address::MIN + (range.start - start)..Address::MIN + (range.end - start);
        Ok(missing.iter().map(offset).collect())
    }
}

impl TargetMemory for VmTarget {
    type Error = Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>> {
        self.memory.spaces(Phase::Running)
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
            mechanism: self.memory.space.mechanism(),
        }
    }

    fn precopy(&mut self, _: &mut dyn Store) -> Result<(), pagemark::Error> {
        Ok(())
    }

    /// Stops the machine and saves the state of its devices. QEMU answers within a millisecond, so
    /// nothing is copied meanwhile.
    fn freeze(&mut self, _: WhileFreezing<'_, Error>) -> Result<FrozenVm<'_>> {
        self.machine.check()?;
        let is_running = self.machine.is_running()?;
        let startup = self.machine.startup(is_running)?;
        self.guard.begin(is_running)?;
        let (since, taken_at) = (Instant::now(), SystemTime::now());
        // From here on the machine continues when this value is dropped.
        let mut frozen = FrozenVm { target: self, devices: None, is_ended: false, startup, since, taken_at };
        frozen.begin()?;
        Ok(frozen)
    }

    fn capture_failed(&mut self) {}
}

/// A virtual machine that is stopped, with the state of its devices saved. Dropped, it continues.
pub struct FrozenVm<'target> {
    target: &'target mut VmTarget,
    /// What QEMU wrote.
    devices: Option<File>,
    is_ended: bool,
    startup: Startup,
    since: Instant,
    taken_at: SystemTime,
}

impl FrozenVm<'_> {
    fn begin(&mut self) -> Result<()> {
        let VmTarget { machine, memory, .. } = &mut *self.target;
        self.devices = Some(machine.add_device_file()?);
        if self.startup.is_running {
            (self.since, self.taken_at) = (Instant::now(), SystemTime::now());
            machine.stop()?;
        }
        machine.save_devices()?;
        memory.space.refresh_mappings()?;
        memory.find_blocks(machine)
    }

    /// Lets the machine continue, and takes the file back. Returns how long it was stopped.
    fn end(&mut self) -> Result<Duration> {
        if std::mem::replace(&mut self.is_ended, true) {
            return Ok(Duration::ZERO);
        }
        let VmTarget { machine, guard, .. } = &mut *self.target;
        if self.startup.is_running {
            machine.resume()?;
        }
        let stopped_time = self.since.elapsed();
        machine.remove_device_file()?;
        guard.end()?;
        Ok(stopped_time)
    }
}

impl Drop for FrozenVm<'_> {
    fn drop(&mut self) {
        // If QEMU does not answer, the guard tries again when this process ends.
        let _ = self.end();
    }
}

impl TargetMemory for FrozenVm<'_> {
    type Error = Error;

    fn spaces(&mut self) -> Result<Vec<SpaceId>> {
        self.target.memory.spaces(Phase::Stopped)
    }

    fn collect(&mut self, space: SpaceId, dirty: &mut RangeSet) -> Result<()> {
        self.target.memory.collect(space, dirty)
    }

    fn read(&mut self, space: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet> {
        self.target.memory.read(space, ranges, buffer)
    }
}

impl Frozen for FrozenVm<'_> {
    type Captured = CapturedVm;

    fn thaw(mut self) -> Result<CapturedVm> {
        let stopped_time = self.end()?;
        let memory = &mut self.target.memory;
        memory.space.begin_interval()?;
        let downtime = if self.startup.is_running { stopped_time } else { Duration::ZERO };
        let downtime = downtime + memory.space.take_stopped_time();
        let spaces = memory.blocks.iter().zip(0..).map(|(block, id)| CapturedSpace {
            space: block.space,
            id,
            label: block.place.id.clone(),
            kind: SpaceKind::RamBlock { bytes: block.place.bytes() },
            mappings: Vec::new(),
            held_pages: None,
        });
        let (startup, taken_at, devices) = (self.startup.clone(), self.taken_at, self.devices.take());
        Ok(CapturedVm { spaces: spaces.collect(), devices, startup, taken_at, downtime })
    }
}

/// What was captured of a virtual machine besides its memory. The machine runs.
pub struct CapturedVm {
    spaces: Vec<CapturedSpace>,
    devices: Option<File>,
    startup: Startup,
    taken_at: SystemTime,
    downtime: Duration,
}

impl Captured for CapturedVm {
    type Error = Error;

    fn taken_at(&self) -> SystemTime {
        self.taken_at
    }

    fn downtime(&self) -> Duration {
        self.downtime
    }

    fn spaces(&self) -> Vec<CapturedSpace> {
        self.spaces.clone()
    }

    fn saved_pages(&self, _: SpaceId, _: VisitPage<'_>) -> Result<(), pagemark::Error> {
        Ok(())
    }

    fn record(self, store: &mut dyn Store) -> Result<Recorded, pagemark::Error> {
        let mut state = Vec::new();
        if let Some(mut devices) = self.devices {
            devices.seek(SeekFrom::Start(0)).map_err(Error::system("read the state of the devices"))?;
            let content = Blob::write(store, &mut devices)?;
            state.push(StateRecord { name: DEVICES.to_owned(), content });
        }
        let startup = serde_json::to_vec_pretty(&self.startup)
            .map_err(|error| Error::of(ErrorKind::System, "record the command line of", Object::None, error))?;
        state.push(StateRecord { name: STARTUP.to_owned(), content: Blob::write(store, &mut startup.as_slice())? });
        Ok(Recorded { files: Vec::new(), state })
    }
}
