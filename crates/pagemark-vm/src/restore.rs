//! Restores a virtual machine: starts a QEMU as the checkpointed one was started, fills its memory,
//! and gives it the state of its devices.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use pagemark::repository::{Checkpoint, Manifest, SpaceKind, SpaceRecord, TargetKind};
use pagemark::sys::pagemap::{Filter, PRESENT, Pagemap, SWAPPED};
use pagemark::sys::proc::{self, maps};
use pagemark::{AddressRangeExt, ByteCount, PAGE_SIZE, PageNumber, PageTree, RangeSet, Store};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::images::{SavedDisk, WriteImage, copy_pages};
use crate::machine::{Machine, Startup};
use crate::ram_blocks::RamBlock;
use crate::started::{MONITOR_ARGUMENTS, Started, Streams};
use crate::target::{DEVICES, STARTUP};

/// The arguments that a restore adds to those of the checkpointed QEMU.
const ADDED: [[&str; 2]; 5] = [
    MONITOR_ARGUMENTS[0],
    MONITOR_ARGUMENTS[1],
    ["-incoming", "defer"],
    // The stream of the devices alone has neither.
    ["-global", "migration.send-configuration=off"],
    ["-machine", "suppress-vmdesc=on"],
];

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
    disks: Vec<(String, PathBuf)>,
}

impl RunningMachine {
    /// The process id of QEMU.
    pub fn pid(&self) -> i32 {
        self.machine.pid
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
        let startup: Startup = serde_json::from_slice(&self.state(STARTUP)?).map_err(Error::damaged)?;
        let devices = self.state(DEVICES)?;
        let spaces = self.ram_spaces()?;
        let disks = self.disk_spaces(&startup)?;
        refuse_if_served(&startup)?;
        let all = spaces.iter().map(|(space, _)| space.pages).chain(disks.iter().map(|disk| disk.pages)).sum();
        let mut progress = Progress { done: ByteCount::ZERO, all: ByteCount::of_pages(all), report: progress };
        progress.add(0);
        // Removed if the restore fails.
        let mut images = Vec::new();
        for disk in &disks {
            let writing = WriteImage { startup: &startup, disk, store: self.store };
            images.push(writing.write(&self.manifest.job, self.manifest.sequence)?);
            progress.add(disk.pages);
        }
        let mut arguments = startup.arguments.clone();
        for (disk, image) in disks.iter().zip(&images) {
            image.replace_in(&mut arguments, disk.image)?;
        }
        let streams = if self.is_detached { Streams::Detached } else { Streams::OfCaller };
        let mut started = Started::start(&startup, &arguments_of_restore(&arguments), streams)?;
        let mut machine = started.machine(&startup)?;
        let pid = machine.pid;
        let mappings = maps::read(pid).map_err(Error::system("read the mappings of QEMU"))?;
        let blocks = machine.changed_blocks(&mappings)?.unwrap_or_default();
        let pairs = pair(&spaces, &blocks)?;
        self.fill(pid, &pairs, &mut progress)?;
        load_devices(&mut machine, devices)?;
        if startup.is_running && !self.is_paused {
            machine.resume()?;
        }
        let disks = disks.iter().zip(images).map(|(disk, image)| (disk.image.label.clone(), image.keep()));
        Ok(RunningMachine { child: started.into_child()?, machine, disks: disks.collect() })
    }

    /// The content of a record of the state.
    fn state(&self, name: &str) -> Result<Vec<u8>> {
        if self.manifest.kind != TargetKind::VirtualMachine {
            return Err(Error::damaged("it is not one of a virtual machine"));
        }
        let record = self.manifest.state.iter().find(|record| record.name == name);
        let record = record.ok_or_else(|| Error::damaged(format!("{name} is missing")))?;
        Ok(record.content.read_all(self.store)?)
    }

    fn ram_spaces(&self) -> Result<Vec<(&'a SpaceRecord, ByteCount)>> {
        let spaces = self.manifest.spaces.iter().filter_map(|space| match space.kind {
            SpaceKind::RamBlock { bytes } => Some(Ok((space, bytes))),
            SpaceKind::Disk { .. } => None,
            _ => Some(Err(Error::damaged(format!("space {} belongs to no machine", space.id)))),
        });
        spaces.collect()
    }

    /// The disks, each with its recorded image.
    fn disk_spaces<'s>(&self, startup: &'s Startup) -> Result<Vec<SavedDisk<'s>>> {
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

    /// Copies the checkpoint's memory into QEMU, which has not run the machine yet.
    fn fill(&self, pid: i32, pairs: &[(&SpaceRecord, &RamBlock)], progress: &mut Progress<'_>) -> Result<()> {
        let path = proc::path(pid, "mem");
        let memory = OpenOptions::new().read(true).write(true).open(path).map_err(write_failed(pid))?;
        let pagemap = Pagemap::of_process(pid).map_err(write_failed(pid))?;
        let write = |page: PageNumber, content: &[u8]| memory.write_all_at(content, page.address().get());
        let (mut targets, mut ids) = (Vec::new(), Vec::new());
        for (space, block) in pairs {
            let tree = PageTree::load(space.root, self.store)?;
            let pages = block.bytes().get() / PAGE_SIZE as u64;
            let first = block.range.start.page();
            let mut held = RangeSet::new();
            for (page, id) in tree.iter() {
                if page.get() >= pages {
                    return Err(Error::damaged(format!("the memory block {} has pages behind its end", block.id)));
                }
                let target = first + page.get();
                held.insert(target.addresses());
                targets.push(target);
                ids.push(id);
            }
            // QEMU itself has written some pages, such as those of its firmware, that held zeros later.
            let filter = Filter { any: PRESENT | SWAPPED, ..Filter::default() };
            let mut written = RangeSet::new();
            let found = pagemap.find(&block.range, filter, |run, _| written.insert(run));
            found.map_err(write_failed(pid))?;
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

/// How much of the memory and the disks was copied.
struct Progress<'a> {
    done: ByteCount,
    all: ByteCount,
    report: &'a mut dyn FnMut(ByteCount, ByteCount),
}

impl Progress<'_> {
    fn add(&mut self, pages: u64) {
        self.done = self.done.saturating_add(ByteCount::of_pages(pages));
        (self.report)(self.done, self.all);
    }
}

/// Refuses a restore beside the machine's original, whose monitor socket the new QEMU would
/// replace.
fn refuse_if_served(startup: &Startup) -> Result<()> {
    for path in startup.arguments.iter().filter_map(|argument| served_path(argument)) {
        let path = startup.directory.join(path);
        if UnixStream::connect(&path).is_ok() {
            let error = Error::about(ErrorKind::Start, Object::Monitor(path), "is in use by another process");
            return Err(error.help("end the machine that runs first"));
        }
    }
    Ok(())
}

/// The path of a socket on which QEMU listens because of this argument: `unix:PATH,server=on` or
/// `socket,path=PATH,server=on`.
fn served_path(argument: &str) -> Option<&str> {
    let mut options = argument.split(',');
    let is_served = options.clone().any(|option| ["server", "server=on"].contains(&option));
    let path = options.find_map(|option| option.strip_prefix("unix:").or(option.strip_prefix("path=")));
    path.filter(|_| is_served)
}

/// The arguments of the checkpointed QEMU as those of one that is restored.
fn arguments_of_restore(arguments: &[String]) -> Vec<String> {
    let mut kept = Vec::with_capacity(arguments.len());
    let mut rest = arguments.iter().map(String::as_str).peekable();
    while let Some(argument) = rest.next() {
        let name = argument.strip_prefix('-').unwrap_or(argument).trim_start_matches('-');
        let value = rest.peek().copied();
        match (name, value) {
            ("S" | "daemonize", _) if argument.starts_with('-') => {}
            // It was started from a state that is older than the checkpoint.
            ("incoming" | "loadvm", Some(_)) if argument.starts_with('-') => drop(rest.next()),
            // A restore of this library added these.
            (_, Some(value)) if ADDED.contains(&[argument, value]) => drop(rest.next()),
            _ => kept.push(argument.to_owned()),
        }
    }
    kept.push("-S".to_owned());
    kept.extend(ADDED.iter().flatten().map(|&argument| argument.to_owned()));
    kept
}

/// Finds the block of each space.
fn pair<'a>(
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
fn load_devices(machine: &mut Machine, devices: Vec<u8>) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(line: &str) -> Vec<String> {
        arguments_of_restore(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn sockets_on_which_qemu_listens_are_found() {
        assert_eq!(served_path("unix:/a/b,server=on,wait=off"), Some("/a/b"));
        assert_eq!(served_path("socket,id=q,path=c,server"), Some("c"));
        assert_eq!(served_path("unix:/a/b"), None);
        assert_eq!(served_path("socket,id=q,path=c,server=off"), None);
        assert_eq!(served_path("q35"), None);
    }

    #[test]
    fn arguments_are_kept_but_for_those_of_a_start() {
        let restored = arguments("-m 64 -S -daemonize -incoming defer -loadvm x -qmp unix:a,server=on -name S");
        let expected = "-m 64 -qmp unix:a,server=on -name S -S \
            -chardev socket,id=pagemark,fd=3 -mon chardev=pagemark,mode=control -incoming defer \
            -global migration.send-configuration=off -machine suppress-vmdesc=on";
        assert_eq!(restored.join(" "), expected);
        assert_eq!(arguments_of_restore(&restored), restored, "a restored machine is restored again");
    }
}
