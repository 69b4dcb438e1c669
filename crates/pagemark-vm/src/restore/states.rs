//! The states of a restore of a virtual machine: see [`pagemark::restore`].

use std::path::PathBuf;
use std::process::{Child, ExitStatus};

use pagemark::ByteCount;
use pagemark::repository::SpaceRecord;
use pagemark::restore::{Gated, Opened, Prepared, Running};
use pagemark_linux::proc::maps;

use crate::error::{Error, Result};
use crate::qemu::command_line::arguments_of_restore;
use crate::qemu::machine::{Machine, Startup, WITHOUT_LAZY};
use crate::qemu::new_qemu::{NewQemu, Streams};
use crate::restore::images::NewImage;
use crate::restore::lazy::LazyMemory;
use crate::restore::{Fill, Progress, Restore, load_devices, pair};

/// A restore of a machine that can begin. Nothing was touched.
#[must_use = "nothing is restored until the machine is made and opened"]
pub struct PreparedMachine<'a> {
    pub(super) restore: Restore<'a>,
    pub(super) startup: Startup,
    pub(super) devices: Vec<u8>,
}

impl<'a> Prepared for PreparedMachine<'a> {
    type Error = Error;
    type Gated = GatedMachine<'a>;

    /// Starts QEMU, and gives it its memory and the state of its devices.
    fn make(self, progress: &mut dyn FnMut(ByteCount, ByteCount)) -> Result<GatedMachine<'a>> {
        let PreparedMachine { restore, startup, devices } = self;
        let spaces = restore.ram_spaces()?;
        let disks = restore.disk_spaces(&startup)?;
        let all = spaces.iter().map(|(space, _)| space.pages).chain(disks.iter().map(|disk| disk.pages)).sum();
        let mut progress = Progress { done: ByteCount::ZERO, all: ByteCount::of_pages(all), report: progress };
        progress.add(0);
        // Removed if the restore fails.
        let mut images = Vec::new();
        for disk in &disks {
            images.push(restore.image_writer(&startup, disk).write(&restore.checkpoint_name())?);
            progress.add(disk.pages);
        }
        let mut arguments = startup.arguments.clone();
        for (disk, image) in disks.iter().zip(&images) {
            image.replace_in(&mut arguments, disk.image)?;
        }
        let streams = if restore.is_detached { Streams::Detached } else { Streams::OfCaller };
        let arguments = arguments_of_restore(&arguments, startup.machine_type());
        let mut started = NewQemu::start(&startup, &arguments, streams, restore.signal_mask)?;
        let mut machine = started.machine()?;
        let (version, memory) = (restore.equip(&mut machine, &startup, &images, &spaces, devices, &mut progress))
            .map_err(|error| started.describe(error))?;
        let disks = disks.iter().zip(images).map(|(disk, image)| (disk.image.label.clone(), image)).collect();
        let has_own_session = restore.is_detached || startup.owner_for_root()?.is_some();
        let resumes = startup.is_running && !restore.is_paused;
        let checkpoint_version = startup.version;
        Ok(GatedMachine { memory, machine, started, disks, version, checkpoint_version, has_own_session, resumes })
    }
}

impl<'a> Restore<'a> {
    /// Gives a new QEMU what the machine had: media, memory and the state of the `devices`. Returns
    /// its version, and the memory that comes later.
    fn equip(
        &self,
        machine: &mut Machine,
        startup: &Startup,
        images: &[NewImage],
        spaces: &[(&SpaceRecord, ByteCount)],
        devices: Vec<u8>,
        progress: &mut Progress<'_>,
    ) -> Result<(String, Option<LazyMemory<'a>>)> {
        let version = machine.version()?;
        machine.insert_media(&startup.media)?;
        machine.check_written_files(startup, images.iter().map(|image| image.path()))?;
        let mappings = maps::read(machine.pid).map_err(Error::system("read the mappings of QEMU"))?;
        let blocks = machine.changed_blocks(&mappings)?.unwrap_or_default();
        let pairs = pair(spaces, &blocks)?;
        let (fill, memory) = match self.is_lazy {
            false => (Fill::Whole, None),
            true => {
                machine.check_keeps_memory(WITHOUT_LAZY)?;
                let memory = LazyMemory::begin(machine.pid, self.lazy_blocks(&pairs)?, self.store)?;
                (Fill::Present, Some(memory))
            }
        };
        self.fill(machine.pid, &pairs, fill, progress)?;
        while_served(&memory, || load_devices(machine, devices))?;
        Ok((version, memory))
    }
}

/// A machine that was restored, and has not run. Dropped, QEMU is killed, and the images of its
/// disks are removed. Dropped in this order.
#[must_use = "QEMU is killed when this is dropped"]
pub struct GatedMachine<'a> {
    /// Of a lazy restore.
    memory: Option<LazyMemory<'a>>,
    machine: Machine,
    started: NewQemu,
    disks: Vec<(String, NewImage)>,
    version: String,
    checkpoint_version: String,
    has_own_session: bool,
    /// It runs as it did at the checkpoint.
    resumes: bool,
}

impl<'a> GatedMachine<'a> {
    /// Lets the machine continue. Its memory, if that comes later, is not delivered yet.
    pub(super) fn run(mut self) -> Result<(RunningMachine, Option<LazyMemory<'a>>)> {
        if self.resumes {
            while_served(&self.memory, || self.machine.resume()).map_err(|error| self.started.describe(error))?;
        }
        let GatedMachine { memory, machine, started, disks, version, checkpoint_version, has_own_session, .. } = self;
        let child = started.into_child()?;
        let disks = disks.into_iter().map(|(name, image)| (name, image.keep())).collect();
        let machine = RunningMachine { child, machine, version, checkpoint_version, disks, has_own_session };
        Ok((machine, memory))
    }
}

impl Gated for GatedMachine<'_> {
    type Error = Error;
    type Running = RunningMachine;

    fn open(self, watch: &mut dyn FnMut(Opened<'_, RunningMachine>)) -> Result<RunningMachine> {
        let (machine, memory) = self.run()?;
        let mut report = |machine: &RunningMachine| watch(Opened::Runs(machine));
        match memory {
            Some(memory) => complete(machine, memory, &mut report, &|_| {}),
            None => {
                report(&machine);
                Ok(machine)
            }
        }
    }
}

/// Does `work` while QEMU gets pages that are missing, if any are.
fn while_served<T>(memory: &Option<LazyMemory<'_>>, work: impl FnOnce() -> Result<T>) -> Result<T> {
    match memory {
        Some(memory) => memory.while_served(work),
        None => work(),
    }
}

/// Delivers all memory to a machine that runs. Calls `begun` when pages are delivered.
fn complete(
    machine: RunningMachine,
    memory: LazyMemory<'_>,
    begun: &mut dyn FnMut(&RunningMachine),
    progress: &(dyn Fn(u64) + Sync),
) -> Result<RunningMachine> {
    match memory.complete(|| begun(&machine), progress) {
        Err(error) if !error.is_gone() => {
            // It was killed by the guard.
            let _ = machine.wait();
            Err(error)
        }
        _ => Ok(machine),
    }
}

/// A virtual machine that was restored.
#[derive(Debug)]
pub struct RunningMachine {
    child: Child,
    machine: Machine,
    version: String,
    checkpoint_version: String,
    disks: Vec<(String, PathBuf)>,
    has_own_session: bool,
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

    /// True if QEMU has a session of its own, so that signals of the terminal do not reach it.
    pub fn has_own_session(&self) -> bool {
        self.has_own_session
    }

    /// Waits until QEMU ends.
    ///
    /// # Errors
    /// [`ErrorKind::System`](crate::ErrorKind::System)
    pub fn wait(mut self) -> Result<ExitStatus> {
        self.child.wait().map_err(Error::system("wait for QEMU"))
    }
}

/// A virtual machine that was restored, and runs before all of its memory is there. Dropped before
/// [`LazyMachine::complete`], or if this process dies, QEMU is killed.
#[must_use = "QEMU is killed when this is dropped"]
pub struct LazyMachine<'a> {
    pub(super) machine: RunningMachine,
    pub(super) memory: LazyMemory<'a>,
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
        complete(machine, memory, &mut |_| {}, progress)
    }
}

impl Running for RunningMachine {
    type Error = Error;

    fn pids(&self) -> &[i32] {
        std::slice::from_ref(&self.machine.pid)
    }

    fn wait(self) -> Result<ExitStatus> {
        RunningMachine::wait(self)
    }
}
