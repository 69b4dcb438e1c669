//! Restores a virtual machine: starts a QEMU as the checkpointed one was started, fills its memory,
//! and gives it the state of its devices.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use pagemark::repository::{Checkpoint, Manifest, SpaceKind, SpaceRecord, StateRecord, TargetKind};
use pagemark::sys::pagemap::{Filter, PRESENT, Pagemap, SWAPPED};
use pagemark::sys::proc::{self, maps};
use pagemark::{AddressRangeExt, ByteCount, PageNumber, PageTree, RangeSet, Store};

use crate::command_line::{arguments_of_restore, served_path};
use crate::error::{Error, ErrorKind, Object, Result};
use crate::images::{SavedDisk, WriteImage, copy_pages};
use crate::lazy::{LazyBlock, LazyMemory};
use crate::machine::{Machine, Startup, WITHOUT_LAZY};
use crate::memory_map::MemoryMap;
use crate::ram_blocks::RamBlock;
use crate::started::{Started, Streams};
use crate::target::{DEVICES, INPUTS, MEMORY_MAP, STARTUP};

/// How long QEMU may take to read the state of its devices.
const LOAD_LIMIT: Duration = Duration::from_secs(60);
const LOAD_POLL: Duration = Duration::from_millis(1);

/// A restore of a virtual machine.
///
/// ```no_run
/// use std::path::Path;
///
/// use pagemark::repository::Repository;
///
/// let repository = Repository::open(Path::new("checkpoints"))?;
/// let checkpoint = repository.read("vm1", 12)?;
/// let machine = pagemark_vm::Restore::new(&checkpoint).start(&mut |_, _| {})?;
/// println!("QEMU runs as process {}", machine.pid());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "nothing is restored until it is started"]
pub struct Restore<'a> {
    manifest: &'a Manifest,
    store: &'a (dyn Store + Sync),
    is_detached: bool,
    is_paused: bool,
}

/// A virtual machine that was restored.
#[derive(Debug)]
pub struct RunningMachine {
    child: Child,
    machine: Machine,
    version: String,
    checkpoint_version: String,
    disks: Vec<(String, PathBuf)>,
}

impl RunningMachine {
    /// The process id of QEMU.
    pub fn pid(&self) -> i32 {
        self.machine.pid
    }

    /// The version of QEMU.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The version of the QEMU that ran when the checkpoint was taken. QEMU takes the state of
    /// devices from another version as it does in a migration, by the type of the machine.
    pub fn checkpoint_version(&self) -> &str {
        &self.checkpoint_version
    }

    /// The disks of the machine by name, and the images that were written for them.
    pub fn disks(&self) -> &[(String, PathBuf)] {
        &self.disks
    }

    /// Waits until QEMU ends.
    ///
    /// # Errors
    /// [`ErrorKind::System`]
    pub fn wait(mut self) -> Result<ExitStatus> {
        self.child.wait().map_err(Error::system("wait for QEMU"))
    }
}

/// A virtual machine that was restored, and runs before all of its memory is there. Dropped before
/// [`LazyMachine::complete`], or if this process dies, QEMU is killed.
#[must_use = "QEMU is killed when this is dropped"]
pub struct LazyMachine<'a> {
    machine: RunningMachine,
    memory: LazyMemory<'a>,
}

impl LazyMachine<'_> {
    /// The machine. What it needs of its memory comes during [`LazyMachine::complete`].
    pub fn machine(&self) -> &RunningMachine {
        &self.machine
    }

    /// Delivers memory until all of it is there: pages that the machine waits for at once, the
    /// others one after the other. Then QEMU needs nothing more. Calls `progress` with the pages
    /// that were delivered since the last call, also from several threads at a time.
    ///
    /// # Errors
    /// A page cannot be read; QEMU was killed. If QEMU has ended by itself, that is no error.
    pub fn complete(self, progress: &(dyn Fn(u64) + Sync)) -> Result<RunningMachine> {
        let LazyMachine { machine, memory } = self;
        match memory.complete(progress) {
            Err(error) if !error.is_gone() => {
                // It was killed by the guard.
                let _ = machine.wait();
                Err(error)
            }
            _ => Ok(machine),
        }
    }
}

impl<'a> Restore<'a> {
    /// A restore of `checkpoint`. QEMU becomes a child of this process, with its standard streams.
    pub fn new(checkpoint: &'a Checkpoint) -> Restore<'a> {
        Restore::from_store(&checkpoint.manifest, checkpoint)
    }

    /// As [`Restore::new`], of a checkpoint whose content is in any store.
    pub fn from_store(manifest: &'a Manifest, store: &'a (dyn Store + Sync)) -> Restore<'a> {
        Restore { manifest, store, is_detached: false, is_paused: false }
    }

    /// Gives QEMU a session of its own, and `/dev/null` as standard streams.
    pub fn detach(mut self, is_detached: bool) -> Self {
        self.is_detached = is_detached;
        self
    }

    /// Leaves the machine paused, until its monitor gets `cont`.
    pub fn paused(mut self, is_paused: bool) -> Self {
        self.is_paused = is_paused;
        self
    }

    /// Starts QEMU, fills its memory, and lets the machine continue if it ran at the checkpoint.
    /// Calls `progress` with the memory that was copied, and all of it.
    ///
    /// # Errors
    /// [`ErrorKind::Start`], [`ErrorKind::Mismatch`], [`ErrorKind::Damaged`] and others. No QEMU is
    /// left then.
    pub fn start(self, progress: &mut dyn FnMut(ByteCount, ByteCount)) -> Result<RunningMachine> {
        self.restore(Fill::Whole, progress).map(|(machine, _)| machine)
    }

    /// As [`Restore::start`], but lets the machine continue before its memory is there. The images
    /// of its disks are there.
    ///
    /// # Errors
    /// As [`Restore::start`]; also [`ErrorKind::Process`] if QEMU may not have a userfaultfd, and
    /// [`ErrorKind::Unsupported`] if the machine gives memory back to the host.
    pub fn start_lazily(self, progress: &mut dyn FnMut(ByteCount, ByteCount)) -> Result<LazyMachine<'a>> {
        let (machine, memory) = self.restore(Fill::Present, progress)?;
        let memory = memory.ok_or_else(|| Error::damaged("no memory"))?;
        Ok(LazyMachine { machine, memory })
    }

    fn restore(
        self,
        fill: Fill,
        progress: &mut dyn FnMut(ByteCount, ByteCount),
    ) -> Result<(RunningMachine, Option<LazyMemory<'a>>)> {
        let startup = self.startup()?;
        let devices = self.devices()?;
        let spaces = self.ram_spaces()?;
        let disks = self.disk_spaces(&startup)?;
        refuse_if_served(&startup)?;
        let all = spaces.iter().map(|(space, _)| space.pages).chain(disks.iter().map(|disk| disk.pages)).sum();
        let mut progress = Progress { done: ByteCount::ZERO, all: ByteCount::of_pages(all), report: progress };
        progress.add(0);
        // Removed if the restore fails.
        let mut images = Vec::new();
        for disk in &disks {
            images.push(self.image_writer(&startup, disk).write(&self.checkpoint_name())?);
            progress.add(disk.pages);
        }
        let mut arguments = startup.arguments.clone();
        for (disk, image) in disks.iter().zip(&images) {
            image.replace_in(&mut arguments, disk.image)?;
        }
        let streams = if self.is_detached { Streams::Detached } else { Streams::OfCaller };
        let mut started =
            Started::start_as_owner(&startup, &arguments_of_restore(&arguments, startup.machine_type()), streams)?;
        let mut machine = started.machine(&startup)?;
        let version = machine.version()?;
        machine.insert_media(&startup.media)?;
        let pid = machine.pid;
        let mappings = maps::read(pid).map_err(Error::system("read the mappings of QEMU"))?;
        let blocks = machine.changed_blocks(&mappings)?.unwrap_or_default();
        let pairs = pair(&spaces, &blocks)?;
        let lazy = match fill {
            Fill::Whole => None,
            Fill::Present => {
                machine.check_keeps_memory(WITHOUT_LAZY)?;
                Some(LazyMemory::begin(pid, self.lazy_blocks(&pairs)?, self.store)?)
            }
        };
        self.fill(pid, &pairs, fill, &mut progress)?;
        let runs = startup.is_running && !self.is_paused;
        let load = || {
            load_devices(&mut machine, devices)?;
            if runs { machine.resume() } else { Ok(()) }
        };
        match &lazy {
            Some(memory) => memory.while_served(load)?,
            None => load()?,
        }
        let disks = disks.iter().zip(images).map(|(disk, image)| (disk.image.label.clone(), image.keep()));
        let (child, disks, checkpoint_version) = (started.into_child()?, disks.collect(), startup.version);
        Ok((RunningMachine { child, machine, version, checkpoint_version, disks }, lazy))
    }

    /// How QEMU was started.
    pub(crate) fn startup(&self) -> Result<Startup> {
        serde_json::from_slice(&self.state(STARTUP)?).map_err(Error::damaged)
    }

    /// The state of processors and devices.
    pub(crate) fn devices(&self) -> Result<Vec<u8>> {
        self.state(DEVICES)
    }

    /// The list of what came to the machine from outside since its start.
    pub(crate) fn inputs(&self) -> Result<Vec<u8>> {
        match self.record(INPUTS) {
            Some(_) => self.state(INPUTS),
            None => Ok(Vec::new()),
        }
    }

    /// The length of that list.
    pub(crate) fn inputs_length(&self) -> u64 {
        self.record(INPUTS).map_or(0, |record| record.content.bytes.get())
    }

    /// Where the memory is among the physical addresses. None if the checkpoint does not say it.
    pub(crate) fn memory_map(&self) -> Result<Option<MemoryMap>> {
        match self.record(MEMORY_MAP) {
            Some(_) => serde_json::from_slice(&self.state(MEMORY_MAP)?).map_err(Error::damaged),
            None => Ok(None),
        }
    }

    /// The name of the job.
    pub(crate) fn job(&self) -> &'a str {
        &self.manifest.job
    }

    /// `JOB@N`, for names of files.
    pub(crate) fn checkpoint_name(&self) -> String {
        format!("{}@{}", self.manifest.job, self.manifest.sequence)
    }

    pub(crate) fn store(&self) -> &'a (dyn Store + Sync) {
        self.store
    }

    pub(crate) fn is_paused(&self) -> bool {
        self.is_paused
    }

    pub(crate) fn image_writer<'w>(&self, startup: &'w Startup, disk: &'w SavedDisk<'w>) -> WriteImage<'w>
    where
        'a: 'w,
    {
        WriteImage { startup, disk, store: self.store }
    }

    fn record(&self, name: &str) -> Option<&'a StateRecord> {
        self.manifest.state.iter().find(|record| record.name == name)
    }

    /// The content of a record of the state.
    fn state(&self, name: &str) -> Result<Vec<u8>> {
        if self.manifest.kind != TargetKind::VirtualMachine {
            return Err(Error::damaged("it is not one of a virtual machine"));
        }
        let record = self.record(name).ok_or_else(|| Error::damaged(format!("{name} is missing")))?;
        Ok(record.content.read_all(self.store)?)
    }

    pub(crate) fn ram_spaces(&self) -> Result<Vec<(&'a SpaceRecord, ByteCount)>> {
        let spaces = self.manifest.spaces.iter().filter_map(|space| match space.kind {
            SpaceKind::RamBlock { bytes } => Some(Ok((space, bytes))),
            SpaceKind::Disk { .. } => None,
            _ => Some(Err(Error::damaged(format!("space {} belongs to no machine", space.id)))),
        });
        spaces.collect()
    }

    /// The disks, each with its recorded image.
    pub(crate) fn disk_spaces<'s>(&self, startup: &'s Startup) -> Result<Vec<SavedDisk<'s>>> {
        let disks = self.manifest.spaces.iter().filter_map(|space| match space.kind {
            SpaceKind::Disk { bytes } => {
                let image = startup.disks.iter().find(|image| image.label == space.label);
                let image = image.ok_or_else(|| Error::damaged(format!("the disk {} has no image", space.label)));
                Some(image.map(|image| SavedDisk { image, root: space.root, pages: space.pages, bytes }))
            }
            _ => None,
        });
        disks.collect()
    }

    fn lazy_blocks(&self, pairs: &[(&SpaceRecord, &RamBlock)]) -> Result<Vec<LazyBlock>> {
        let block = |(space, block): &(&SpaceRecord, &RamBlock)| {
            Ok(LazyBlock { range: block.range.clone(), tree: PageTree::load(space.root, self.store)? })
        };
        pairs.iter().map(block).collect()
    }

    /// Copies the checkpoint's memory into QEMU, which has not run the machine yet.
    pub(crate) fn fill(
        &self,
        pid: i32,
        pairs: &[(&SpaceRecord, &RamBlock)],
        fill: Fill,
        progress: &mut Progress<'_>,
    ) -> Result<()> {
        let memory = proc::open_memory_for_writing(pid).map_err(write_failed(pid))?;
        let pagemap = Pagemap::of_process(pid).map_err(write_failed(pid))?;
        let write = |page: PageNumber, content: &[u8]| memory.write_all_at(content, page.address().get());
        let (mut targets, mut ids) = (Vec::new(), Vec::new());
        for (space, block) in pairs {
            let tree = PageTree::load(space.root, self.store)?;
            let pages = block.bytes().pages_rounded_down();
            let first = block.range.start.page();
            // QEMU itself has written some pages, such as those of its firmware, that held zeros later.
            let filter = Filter { any: PRESENT | SWAPPED, ..Filter::default() };
            let mut written = RangeSet::new();
            let found = pagemap.find(&block.range, filter, |run, _| written.insert(run));
            found.map_err(write_failed(pid))?;
            let mut held = RangeSet::new();
            for (page, id) in tree.iter() {
                if page.get() >= pages {
                    return Err(Error::damaged(format!("the memory block {} has pages behind its end", block.id)));
                }
                let target = first + page.get();
                held.insert(target.addresses());
                if fill == Fill::Whole || written.contains(target.address()) {
                    targets.push(target);
                    ids.push(id);
                }
            }
            written.subtract(&held);
            for range in written.iter() {
                write(range.start.page(), &vec![0; range.byte_count().to_usize()]).map_err(write_failed(pid))?;
            }
        }
        copy_pages(self.store, &ids, &targets, &write)?.map_err(write_failed(pid))?;
        progress.add(ids.len() as u64);
        Ok(())
    }
}

/// Which pages of the memory are filled before the machine continues.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fill {
    /// All.
    Whole,
    /// Those that are there already, because QEMU has written to them.
    Present,
}

/// How much of the memory and the disks was copied.
pub(crate) struct Progress<'a> {
    done: ByteCount,
    all: ByteCount,
    report: &'a mut dyn FnMut(ByteCount, ByteCount),
}

impl<'a> Progress<'a> {
    /// Progress that nobody is shown.
    pub(crate) fn unseen(report: &'a mut dyn FnMut(ByteCount, ByteCount)) -> Progress<'a> {
        Progress { done: ByteCount::ZERO, all: ByteCount::ZERO, report }
    }
}

impl Progress<'_> {
    fn add(&mut self, pages: u64) {
        self.done = self.done.saturating_add(ByteCount::of_pages(pages));
        (self.report)(self.done, self.all);
    }
}

/// Refuses a restore beside the machine's original, whose monitor socket the new QEMU would
/// replace.
pub(crate) fn refuse_if_served(startup: &Startup) -> Result<()> {
    for path in startup.arguments.iter().filter_map(|argument| served_path(argument)) {
        let path = startup.directory.join(path);
        if UnixStream::connect(&path).is_ok() {
            let error = Error::about(ErrorKind::Start, Object::Monitor(path), "is in use by another process");
            return Err(error.help("end the machine that runs first"));
        }
    }
    Ok(())
}

/// Finds the block of each space.
pub(crate) fn pair<'a>(
    spaces: &[(&'a SpaceRecord, ByteCount)],
    blocks: &'a [RamBlock],
) -> Result<Vec<(&'a SpaceRecord, &'a RamBlock)>> {
    let differs = |id: &str, reason: String| {
        let error = Error::about(ErrorKind::Mismatch, Object::Block(id.to_owned()), reason);
        error.help("restore with the version of QEMU that the checkpoint is of")
    };
    if let Some(block) = blocks.iter().find(|block| spaces.iter().all(|(space, _)| space.label != block.id)) {
        return Err(differs(&block.id, "is not part of the checkpoint".into()));
    }
    let pairs = spaces.iter().map(|&(space, bytes)| {
        let block = blocks.iter().find(|block| block.id == space.label);
        let block = block.ok_or_else(|| differs(&space.label, "does not exist in the new QEMU".into()))?;
        if block.bytes() != bytes {
            let reason = format!("has {} bytes in the new QEMU, not {}", block.bytes().get(), bytes.get());
            return Err(differs(&space.label, reason));
        }
        Ok((space, block))
    });
    pairs.collect()
}

/// Gives QEMU the state of its devices.
pub(crate) fn load_devices(machine: &mut Machine, devices: Vec<u8>) -> Result<()> {
    let (read, mut write) = io::pipe().map_err(Error::system("make a pipe"))?;
    // Not waited for: QEMU may leave the end of the stream unread. Without a reader the writer fails.
    std::thread::spawn(move || write.write_all(&devices));
    machine.begin_load(read.as_fd())?;
    drop(read);
    let deadline = Instant::now() + LOAD_LIMIT;
    while !machine.has_loaded()? {
        if Instant::now() >= deadline {
            let object = Object::Process(machine.pid);
            return Err(Error::about(ErrorKind::Mismatch, object, "does not take the state of its devices"));
        }
        std::thread::sleep(LOAD_POLL);
    }
    Ok(())
}

fn write_failed(pid: i32) -> impl FnOnce(io::Error) -> Error {
    move |error| Error::of(ErrorKind::System, "write the memory of", Object::Process(pid), error)
}
