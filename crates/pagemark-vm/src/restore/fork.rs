//! Several machines from one checkpoint, which share unchanged memory.
//!
//! The content of each memory block is written once, to a file in memory. Each QEMU is started as
//! for a restore, and is then made to map these files privately in place of its own memory: pages
//! that no machine has written are in the host's memory once. The disks are restored once, and each
//! machine gets an overlay of its own.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use pagemark::repository::SpaceRecord;
use pagemark::{ByteCount, ContentId, PageNumber};
use pagemark_linux::proc::maps;

use crate::checkpoint::map_file::map_privately;
use crate::error::{Error, ErrorKind, Object, Result};
use crate::memory::block_file;
use crate::memory::ram_blocks::RamBlock;
use crate::qemu::command_line::arguments_of_restore;
use crate::qemu::machine::{Machine, Startup, WITHOUT_LAZY};
use crate::qemu::new_qemu::{NewQemu, Streams};
use crate::qemu::user_files;
use crate::restore::fork_arguments::{ForkArguments, Replacement};
use crate::restore::images::{NewImage, SavedDisk, copy_pages};
use crate::restore::in_use::{refuse_if_served, refuse_if_written};
use crate::restore::{Fill, Progress, Restore, load_devices, pair, tree_within};

/// The name of the files in memory that the machines share.
const FORK_FILE: &CStr = c"pagemark-fork";

/// A machine that was started by [`Restore::fork`]. QEMU runs in a session of its own, and keeps
/// running when this is dropped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ForkedMachine {
    /// Its name: that of the original, and a number.
    pub name: String,
    /// The process id of QEMU.
    pub pid: i32,
    /// What differs from the original's command line: what was, and what is.
    pub changes: Vec<(String, String)>,
    /// Its disks by name, and the overlay of each.
    pub disks: Vec<(String, PathBuf)>,
    /// Its terminals, which are pseudo-terminals: the name of the chardev, and the path.
    pub terminals: Vec<(String, PathBuf)>,
}

/// A memory block in a file in memory.
struct SharedBlock<'a> {
    space: &'a SpaceRecord,
    bytes: ByteCount,
    file: File,
}

/// Checks that a disk is not put onto a block device, beside which there is no place for overlays.
fn check_is_no_device(startup: &Startup, disk: &SavedDisk<'_>) -> Result<()> {
    match &disk.target {
        Some(target) if user_files::is_device(startup.owner_for_root()?, target) => {
            let reason = "is a block device: machines that share a disk have it in a file";
            Err(Error::about(ErrorKind::Disk, Object::Image(target.clone()), reason))
        }
        _ => Ok(()),
    }
}

impl Restore<'_> {
    /// Starts `count` machines of the checkpoint, side by side, which share unchanged memory. Each
    /// has another name, other monitor sockets and files, other addresses of network cards, and a
    /// pseudo-terminal in place of the terminal. What two machines cannot both have is taken from
    /// `replacements`.
    ///
    /// A network card has its new address from its next reset on, because the driver in the guest
    /// knows the old one.
    ///
    /// # Errors
    /// Those of [`Restore::start`], and [`ErrorKind::Start`] for what two machines cannot both
    /// have. No QEMU and no image is left then.
    pub fn fork(self, count: u32, replacements: &[Replacement]) -> Result<Vec<ForkedMachine>> {
        let startup = self.startup()?;
        let devices = self.devices()?;
        let spaces = self.ram_spaces()?;
        let disks = self.disk_spaces(&startup)?;
        for disk in &disks {
            self.image_writer(&startup, disk).check_place()?;
            check_is_no_device(&startup, disk)?;
        }
        // What cannot be done is found out before anything is written.
        let lines = (1..=count).map(|number| {
            let line = ForkArguments::new(&startup.arguments, number, self.job(), replacements)?;
            refuse_if_served(&startup, &line.arguments)?;
            refuse_if_written(&startup, &line.arguments)?;
            Ok(line)
        });
        let lines: Vec<ForkArguments> = lines.collect::<Result<_>>()?;
        let blocks: Vec<SharedBlock<'_>> = spaces
            .iter()
            .map(|&(space, bytes)| Ok(SharedBlock { space, bytes, file: self.memory_file(space, bytes)? }))
            .collect::<Result<_>>()?;
        let images: Vec<NewImage> = disks
            .iter()
            .map(|disk| self.image_writer(&startup, disk).write(&self.checkpoint_name()))
            .collect::<Result<_>>()?;
        let mut prepared = Vec::new();
        for line in lines {
            prepared.push(self.start_fork(&startup, line, &devices, &blocks, &disks, &images)?);
        }
        // From here on nothing fails that would have to end all machines.
        let mut forked = Vec::new();
        for (machine, started, overlays) in prepared {
            started.into_child()?;
            let disks = disks.iter().zip(overlays).map(|(disk, overlay)| (disk.image.label.clone(), overlay.keep()));
            forked.push(ForkedMachine { disks: disks.collect(), ..machine });
        }
        images.into_iter().for_each(|image| drop(image.keep()));
        Ok(forked)
    }

    /// Writes the content of a memory block to a new file in memory.
    fn memory_file(&self, space: &SpaceRecord, bytes: ByteCount) -> Result<File> {
        let failed = |error: io::Error| {
            let object = Object::Block(space.label.clone());
            Error::of(ErrorKind::System, "write to memory for all machines", object, error)
        };
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = memfd_create(FORK_FILE, flags).map_err(|error| failed(error.into()))?;
        let file = File::from(file);
        file.set_len(ByteCount::of_pages(bytes.pages_rounded_up()).get()).map_err(failed)?;
        let tree = tree_within(space.root, bytes, &format!("the memory block {}", space.label), self.store())?;
        let (targets, ids): (Vec<PageNumber>, Vec<ContentId>) = tree.iter().unzip();
        let write = |page: PageNumber, content: &[u8]| file.write_all_at(content, page.address().get());
        copy_pages(self.store(), &ids, &targets, &write)?.map_err(failed)?;
        // So that a checkpoint of a forked machine can rely on what the machine has not written to.
        fcntl(&file, FcntlArg::F_ADD_SEALS(block_file::FIXED)).map_err(|error| failed(error.into()))?;
        Ok(file)
    }

    /// Starts one of the machines.
    fn start_fork(
        &self,
        startup: &Startup,
        line: ForkArguments,
        devices: &[u8],
        blocks: &[SharedBlock<'_>],
        disks: &[SavedDisk<'_>],
        images: &[NewImage],
    ) -> Result<(ForkedMachine, NewQemu, Vec<NewImage>)> {
        let mut arguments = line.arguments;
        let mut overlays = Vec::new();
        for (disk, image) in disks.iter().zip(images) {
            let overlay = self.image_writer(startup, disk).write_overlay(image, &line.name)?;
            overlay.replace_in_as_overlay(&mut arguments, disk.image)?;
            overlays.push(overlay);
        }
        let arguments = arguments_of_restore(&arguments, startup.machine_type());
        let mut started = NewQemu::start(startup, &arguments, Streams::Detached, self.mask())?;
        let mut machine = started.machine()?;
        let terminals = (self.equip_fork(&mut machine, startup, devices, blocks, &overlays))
            .map_err(|error| started.describe(error))?;
        let forked =
            ForkedMachine { name: line.name, pid: machine.pid, changes: line.changes, disks: Vec::new(), terminals };
        Ok((forked, started, overlays))
    }

    /// Gives a new QEMU what the machine had: media, memory and the state of the `devices`, and has
    /// it run. Returns its terminals.
    fn equip_fork(
        &self,
        machine: &mut Machine,
        startup: &Startup,
        devices: &[u8],
        blocks: &[SharedBlock<'_>],
        overlays: &[NewImage],
    ) -> Result<Vec<(String, PathBuf)>> {
        machine.insert_media(&startup.media)?;
        machine.check_written_files(startup, overlays.iter().map(NewImage::path))?;
        machine.check_keeps_memory(WITHOUT_LAZY)?;
        let mappings = maps::read(machine.pid).map_err(Error::system("read the mappings of QEMU"))?;
        let places = machine.changed_blocks(&mappings)?.unwrap_or_default();
        let spaces: Vec<_> = blocks.iter().map(|block| (block.space, block.bytes)).collect();
        // A block that can grow stays one mapping, by which it is found again.
        let is_whole = |place: &RamBlock| mappings.iter().any(|mapping| (mapping.start..mapping.end) == place.range);
        let (whole, parts): (Vec<_>, Vec<_>) =
            pair(&spaces, &places)?.into_iter().partition(|(_, place)| is_whole(place));
        for (space, place) in whole {
            let file = blocks.iter().find(|block| block.space.id == space.id).map(|block| &block.file);
            map_privately(machine, file.ok_or_else(|| Error::damaged("no memory"))?, place)?;
        }
        self.fill(machine.pid, &parts, Fill::Whole, &mut Progress::unseen(&mut |_, _| {}))?;
        load_devices(machine, devices.to_vec())?;
        if startup.is_running && !self.is_paused() {
            machine.resume()?;
        }
        machine.terminals()
    }
}
