//! Restores a virtual machine: starts a QEMU as the checkpointed one was started, fills its memory,
//! and gives it the state of its devices.

pub(crate) mod demanded;
pub(crate) mod fork;
pub(crate) mod fork_arguments;
pub(crate) mod images;
pub(crate) mod in_use;
pub(crate) mod lazy;
pub(crate) mod served_disk;
mod states;

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::SigSet;
use pagemark::repository::{Checkpoint, Manifest, SpaceKind, SpaceRecord, StateRecord, TargetKind};
use pagemark::restore::Prepared;
use pagemark::{AddressRangeExt, ByteCount, ContentId, PageNumber, PageTree, RangeSet, Store};
use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap, SWAPPED};
use pagemark_linux::proc::{self, Mapping, maps};

use crate::checkpoint::target::{DEVICES, INPUTS, MEMORY_MAP, STARTUP};
use crate::error::{Error, ErrorKind, Object, Result, printable};
use crate::memory::block_file::BlockFile;
use crate::memory::memory_map::MemoryMap;
use crate::memory::ram_blocks::{BlockMemory, RamBlock};
use crate::qemu::drive::DiskImage;
use crate::qemu::machine::{Machine, Startup};
use crate::restore::images::{SavedDisk, WriteImage, copy_pages};
use crate::restore::in_use::{refuse_if_served, refuse_if_written};
use crate::restore::lazy::LazyBlock;

pub use states::{GatedMachine, LazyMachine, PreparedMachine, RunningMachine};

/// How long QEMU may take to read the state of its devices.
const LOAD_LIMIT: Duration = Duration::from_secs(60);
const LOAD_POLL: Duration = Duration::from_millis(1);

/// How many zeros are written at a time.
const ZEROS: ByteCount = ByteCount::new(1 << 20);

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
    is_lazy: bool,
    is_detached: bool,
    is_paused: bool,
    signal_mask: SigSet,
    /// Where disks are put, by their names.
    targets: Vec<(String, PathBuf)>,
}

impl<'a> Restore<'a> {
    /// A restore of `checkpoint`. QEMU becomes a child of this process, with its standard streams.
    pub fn new(checkpoint: &'a Checkpoint) -> Restore<'a> {
        Restore::from_store(&checkpoint.manifest, checkpoint)
    }

    /// Like [`Restore::new`], of a checkpoint whose content is in any store.
    pub fn from_store(manifest: &'a Manifest, store: &'a (dyn Store + Sync)) -> Restore<'a> {
        Restore {
            manifest,
            store,
            is_lazy: false,
            is_detached: false,
            is_paused: false,
            signal_mask: SigSet::empty(),
            targets: Vec::new(),
        }
    }

    /// Lets the machine continue before its memory is there. The images of its disks are there.
    pub fn lazy(mut self, is_lazy: bool) -> Self {
        self.is_lazy = is_lazy;
        self
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

    /// Gives QEMU this mask of blocked signals [default: none is blocked].
    pub fn signal_mask(mut self, signal_mask: SigSet) -> Self {
        self.signal_mask = signal_mask;
        self
    }

    /// Puts the disk with this name to `path`, in place of an image beside the old one: into a new
    /// file, or onto a block device, which is overwritten. The user who ran QEMU must be able to
    /// write there. What was on a block device of the host at the checkpoint needs this.
    pub fn disk(mut self, name: impl Into<String>, path: impl Into<PathBuf>) -> Self {
        self.targets.push((name.into(), path.into()));
        self
    }

    /// Checks all that can be checked without touching anything.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`], [`ErrorKind::Disk`] and others.
    pub fn prepare(self) -> Result<PreparedMachine<'a>> {
        let mut startup = self.startup()?;
        let process = self.manifest.program.as_ref().and_then(|program| program.process.as_ref());
        startup.birth = process.and_then(|process| process.birth.clone());
        let devices = self.devices()?;
        self.ram_spaces()?;
        let disks = self.disk_spaces(&startup)?;
        disks.iter().try_for_each(|disk| self.image_writer(&startup, disk).check_place())?;
        refuse_if_served(&startup, &startup.arguments)?;
        refuse_if_written(&startup, &startup.arguments)?;
        Ok(PreparedMachine { restore: self, startup, devices })
    }

    /// Starts QEMU, fills its memory, and lets the machine continue if it ran at the checkpoint.
    /// Calls `progress` with the memory that was copied, and all of it.
    ///
    /// # Errors
    /// [`ErrorKind::Start`], [`ErrorKind::Mismatch`], [`ErrorKind::Damaged`] and others. No QEMU is
    /// left then.
    pub fn start(self, progress: &mut dyn FnMut(ByteCount, ByteCount)) -> Result<RunningMachine> {
        self.lazy(false).prepare()?.make(progress)?.run().map(|(machine, _)| machine)
    }

    /// Like [`Restore::start`], but lets the machine continue before its memory is there.
    ///
    /// # Errors
    /// Those of [`Restore::start`]; also [`ErrorKind::Process`] if QEMU may not have a userfaultfd,
    /// and [`ErrorKind::Unsupported`] if the machine gives memory back to the host.
    pub fn start_lazily(self, progress: &mut dyn FnMut(ByteCount, ByteCount)) -> Result<LazyMachine<'a>> {
        let (machine, memory) = self.lazy(true).prepare()?.make(progress)?.run()?;
        let memory = memory.ok_or_else(|| Error::damaged("no memory"))?;
        Ok(LazyMachine { machine, memory })
    }

    /// How QEMU was started.
    pub fn startup(&self) -> Result<Startup> {
        serde_json::from_slice(&self.state(STARTUP)?).map_err(Error::damaged)
    }

    /// The state of processors and devices.
    pub fn devices(&self) -> Result<Vec<u8>> {
        self.state(DEVICES)
    }

    /// The list of what came to the machine from outside since its start.
    pub fn inputs(&self) -> Result<Vec<u8>> {
        match self.record(INPUTS) {
            Some(_) => self.state(INPUTS),
            None => Ok(Vec::new()),
        }
    }

    /// The length of that list.
    pub fn inputs_length(&self) -> u64 {
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

    pub(crate) fn mask(&self) -> SigSet {
        self.signal_mask
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

    /// The blocks of the machine's memory, with their lengths.
    pub fn ram_spaces(&self) -> Result<Vec<(&'a SpaceRecord, ByteCount)>> {
        let spaces = self.manifest.spaces.iter().filter_map(|space| match space.kind {
            SpaceKind::RamBlock { bytes } => Some(Ok((space, bytes))),
            SpaceKind::Disk { .. } => None,
            _ => Some(Err(Error::damaged(format!("space {} belongs to no machine", space.id)))),
        });
        spaces.collect()
    }

    /// The disks, each with its recorded image.
    pub fn disk_spaces<'s>(&self, startup: &'s Startup) -> Result<Vec<SavedDisk<'s>>> {
        let target_of = |label: &str| {
            let target = self.targets.iter().find(|(name, _)| name == label);
            target.map(|(_, path)| std::path::absolute(path)).transpose().map_err(Error::system("find the directory"))
        };
        let disks = self.manifest.spaces.iter().filter_map(|space| match space.kind {
            SpaceKind::Disk { bytes } => {
                let image = startup.disks.iter().find(|image| image.label == space.label);
                let image = image.ok_or_else(|| Error::damaged(format!("the disk {} has no image", space.label)));
                let saved = |image: &'s DiskImage| {
                    let target = target_of(&image.label)?;
                    Ok(SavedDisk { image, root: space.root, pages: space.pages, bytes, target })
                };
                Some(image.and_then(saved))
            }
            _ => None,
        });
        let disks = disks.collect::<Result<Vec<SavedDisk<'s>>>>()?;
        match self.targets.iter().find(|(name, _)| disks.iter().all(|disk| disk.image.label != *name)) {
            Some((name, _)) => {
                let names: Vec<&str> = disks.iter().map(|disk| disk.image.label.as_str()).collect();
                let reason = format!("is not part of the checkpoint, which has {}", printable(&names.join(", ")));
                Err(Error::about(ErrorKind::Disk, Object::Disk(name.clone()), reason))
            }
            None => Ok(disks),
        }
    }

    fn lazy_blocks(&self, pairs: &[(&SpaceRecord, &RamBlock)]) -> Result<Vec<LazyBlock>> {
        let block = |(space, block): &(&SpaceRecord, &RamBlock)| {
            let tree = tree_within(space.root, block.bytes(), &format!("the memory block {}", block.id), self.store)?;
            Ok(LazyBlock { range: block.range.clone(), tree })
        };
        pairs.iter().map(block).collect()
    }

    /// Copies the checkpoint's memory into QEMU, which has not run the machine yet.
    pub fn fill(
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
            let tree = tree_within(space.root, block.bytes(), &format!("the memory block {}", block.id), self.store)?;
            let first = block.range.start.page();
            // QEMU itself has written some pages, such as those of its firmware, that held zeros later.
            let filter = Filter { any: PRESENT | SWAPPED, ..Filter::default() };
            let mut written = RangeSet::new();
            let found = pagemap.find(&block.range, filter, |run, _| written.insert(run));
            found.map_err(write_failed(pid))?;
            written.extend(&content_of_file(pid, block)?);
            let mut held = RangeSet::new();
            for (page, id) in tree.iter() {
                let target = first + page.get();
                held.insert(target.addresses());
                if fill == Fill::Whole || written.contains(target.address()) {
                    targets.push(target);
                    ids.push(id);
                }
            }
            written.subtract(&held);
            for range in pagemark::ranges::split(written.iter(), ZEROS).flatten() {
                write(range.start.page(), &vec![0; range.byte_count().to_usize()]).map_err(write_failed(pid))?;
            }
        }
        copy_pages(self.store, &ids, &targets, &write)?.map_err(write_failed(pid))?;
        progress.add(ids.len() as u64);
        Ok(())
    }
}

/// The pages of a block that hold data in its file, which may be older than QEMU: the memory of the
/// machine when it last ran.
fn content_of_file(pid: i32, block: &RamBlock) -> Result<RangeSet> {
    if block.memory != BlockMemory::Shared {
        return Ok(RangeSet::new());
    }
    let mappings = maps::read(pid).map_err(write_failed(pid))?;
    let has = |mapping: &&Mapping| mapping.start <= block.range.start && block.range.end <= mapping.end;
    let Some(mapping) = mappings.iter().find(has) else { return Ok(RangeSet::new()) };
    let content = BlockFile::open(pid, mapping, block)?.content()?;
    Ok(content.iter().map(|offsets| block.addresses(&offsets)).collect())
}

/// Which pages of the memory are filled before the machine continues.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// All.
    Whole,
    /// Those that are there already, because QEMU has written to them.
    Present,
}

/// How much of the memory and the disks was copied.
pub struct Progress<'a> {
    done: ByteCount,
    all: ByteCount,
    report: &'a mut dyn FnMut(ByteCount, ByteCount),
}

impl<'a> Progress<'a> {
    /// Progress that nobody is shown.
    pub fn unseen(report: &'a mut dyn FnMut(ByteCount, ByteCount)) -> Progress<'a> {
        Progress { done: ByteCount::ZERO, all: ByteCount::ZERO, report }
    }
}

impl Progress<'_> {
    fn add(&mut self, pages: u64) {
        self.done = self.done.saturating_add(ByteCount::of_pages(pages));
        (self.report)(self.done, self.all);
    }
}

/// Finds the block of each space.
pub fn pair<'a>(
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
pub fn load_devices(machine: &mut Machine, devices: Vec<u8>) -> Result<()> {
    let (read, mut write) = io::pipe().map_err(Error::system("make a pipe"))?;
    // Not waited for: QEMU may leave the end of the stream unread. Without a reader the writer fails.
    let thread = std::thread::Builder::new().name("pagemark-devices".into());
    thread.spawn(move || write.write_all(&devices)).map_err(Error::system("start a thread"))?;
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

/// The tree of a memory block or disk, whose pages lie in it. A small tree can name any number of
/// pages: they are not listed before.
fn tree_within(root: ContentId, bytes: ByteCount, name: &str, store: &dyn Store) -> Result<PageTree> {
    let tree = PageTree::load(root, store)?;
    match tree.is_before(PageNumber::new(bytes.pages_rounded_up())) {
        true => Ok(tree),
        false => Err(Error::damaged(format!("{name} has pages behind its end"))),
    }
}

fn write_failed(pid: i32) -> impl FnOnce(io::Error) -> Error {
    move |error| Error::of(ErrorKind::System, "write the memory of", Object::Process(pid), error)
}

#[cfg(test)]
mod tests {
    use pagemark::{Kind, MemoryStore, PAGE_SIZE};

    use super::*;

    #[test]
    fn pages_behind_the_end_of_a_block_are_refused_before_they_are_listed() {
        let mut store = MemoryStore::new();
        let mut trees = vec![store.put(Kind::Page, &[1; PAGE_SIZE]).unwrap()];
        for level in 0..16 {
            let children = std::iter::repeat_n(trees[level].0, 16).flatten();
            let node: Vec<u8> = [level as u8, 0xff, 0xff].into_iter().chain(children).collect();
            trees.push(store.put(Kind::Node, &node).unwrap());
        }
        let of = |root, bytes| tree_within(root, ByteCount::new(bytes), "the disk a", &store);
        assert_eq!(of(trees[1], 15 * 4096 + 1).unwrap().page_count(), 16);
        for (root, bytes) in [(trees[1], 15 * 4096), (trees[16], u64::MAX), (trees[16], 0)] {
            let error = of(root, bytes).err().unwrap();
            assert_eq!(error.kind(), ErrorKind::Damaged);
            assert!(error.to_string().contains("the disk a"), "{error}");
        }
    }
}
