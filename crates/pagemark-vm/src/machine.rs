//! What the monitor of a machine reports, and the commands that a checkpoint needs.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use pagemark::ByteCount;
use pagemark::sys::proc::{self, Mapping};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::block_file;
use crate::command::{Command, text};
use crate::drive::{self, DiskImage, Drive};
use crate::error::{Error, ErrorKind, Object, Result};
use crate::medium::{self, Medium};
use crate::memory_map::MemoryMap;
use crate::owner::Owner;
use crate::qmp::Monitor;
use crate::ram_blocks::{self, ListedBlock, RamBlock};

/// Devices whose memory other processes or hardware write, by a part of their names.
const WRITTEN_ELSEWHERE: [(&str, &str); 3] = [
    ("vfio", "a device of the host writes the machine's memory by itself"),
    ("vhost-user", "another process writes the machine's memory"),
    ("ivshmem", "other processes share the machine's memory"),
];

/// Devices that give memory back to the host, by a part of their names.
const GIVING_BACK: [&str; 2] = ["virtio-balloon", "virtio-mem"];

/// The command of the human monitor that lists where the memory is.
const LIST_MAP: &str = "info mtree -f";

/// The command of the human monitor that lists the blocks of memory.
const LIST_BLOCKS: &str = "info ramblock";

/// What to do where memory that comes on demand cannot be given back.
pub(crate) const WITHOUT_LAZY: &str = "restore without --lazy, and without `fork`";

/// Where QEMU's tree of objects has the devices that users have added, with an id and without.
const USERS_DEVICES: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// States of a machine that the state of its devices does not have.
const UNSAVED: [&str; 6] =
    ["inmigrate", "postmigrate", "finish-migrate", "guest-panicked", "internal-error", "suspended"];

/// States of a migration that is in progress.
const MIGRATING: [&str; 8] =
    ["setup", "active", "device", "wait-unplug", "pre-switchover", "postcopy-active", "postcopy-paused", "colo"];

/// Mappings that are larger hold no records of QEMU's.
const MAX_HEAP_PART: ByteCount = ByteCount::new(64 << 20);

/// How a QEMU was started, and in which state the machine was: what a restore needs besides memory
/// and devices.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Startup {
    /// The program.
    pub(crate) program: PathBuf,
    /// Its arguments, without the program's name.
    pub(crate) arguments: Vec<String>,
    /// Its working directory, from which paths among the arguments start.
    pub(crate) directory: PathBuf,
    /// QEMU's version, for people.
    pub(crate) version: String,
    /// False if the machine was paused.
    pub(crate) is_running: bool,
    /// The images of the disks that belong to the checkpoint.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) disks: Vec<DiskImage>,
    /// The media of drives that can be emptied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) media: Vec<Medium>,
    /// Whose process QEMU was. None in checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) owner: Option<Owner>,
    /// None in checkpoints of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kind: Option<MachineKind>,
}

impl Startup {
    /// QEMU's name of the type of the machine, with the version. None in checkpoints of earlier
    /// versions.
    pub(crate) fn machine_type(&self) -> Option<&str> {
        self.kind.as_ref().map(|kind| kind.machine.as_str())
    }
}

/// What the machine is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct MachineKind {
    /// QEMU's name of its type, with the version: `pc-q35-7.2`.
    pub(crate) machine: String,
    /// QEMU's name of its processors.
    pub(crate) target: String,
}

/// A QEMU, by its monitor.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) monitor: Monitor,
    pub(crate) pid: i32,
    /// The table of memory blocks as it was last, and what it says.
    listed: (String, Vec<ListedBlock>),
    /// The devices that users have added, as they were last. None before the first look.
    devices: Option<Vec<String>>,
    /// None before it was asked for.
    kind: Option<MachineKind>,
}

impl Machine {
    /// Connects to the monitor at `path`.
    pub(crate) fn connect(path: &Path) -> Result<Machine> {
        let mut monitor = Monitor::connect(path)?;
        let pid = monitor.peer_pid()?;
        monitor.expect_end_of(pid);
        Machine::of(monitor, pid)
    }

    /// The machine of a QEMU whose process is known.
    pub(crate) fn of(monitor: Monitor, pid: i32) -> Result<Machine> {
        Ok(Machine { monitor, pid, listed: (String::new(), Vec::new()), devices: None, kind: None })
    }

    /// Checks that a checkpoint can hold all of the machine. Nothing is changed. True if the
    /// machine's processors run.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with the reason.
    pub(crate) fn check(&mut self) -> Result<bool> {
        let unsupported = |reason: String| Error::about(ErrorKind::Unsupported, Object::Process(self.pid), reason);
        self.monitor.expect_no_move();
        let state = self.monitor.execute("query-status", json!({}))?;
        let status = text(&state, "status");
        if UNSAVED.contains(&&*status) {
            return Err(unsupported(format!("cannot be checkpointed in its state, {status}")));
        }
        let migration = text(&self.monitor.execute("query-migrate", json!({}))?, "status");
        if MIGRATING.contains(&&*migration) {
            return Err(unsupported("is being migrated".into()).help("wait until the migration has ended"));
        }
        let devices = self.monitor.human("info qtree")? + &self.monitor.human("info network")?;
        if let Some((name, reason)) = WRITTEN_ELSEWHERE.iter().find(|(name, _)| devices.contains(name)) {
            return Err(unsupported(format!("has a {name} device: {reason}")));
        }
        self.check_plugged()?;
        Ok(state.get("running").and_then(Value::as_bool).unwrap_or(false))
    }

    /// Checks that no device of the machine gives memory back to the host. What is given back must
    /// hold zeros afterwards; memory that comes from elsewhere would come again, and what was given
    /// back before it was copied would be lost. `help` says what else can be done.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`]
    pub(crate) fn check_keeps_memory(&mut self, help: &'static str) -> Result<()> {
        let devices = self.monitor.human("info qtree")?;
        match GIVING_BACK.iter().find(|name| devices.contains(**name)) {
            Some(name) => {
                let reason = format!("has a {name} device, which gives memory back to the host");
                let error = Error::about(ErrorKind::Unsupported, Object::Process(self.pid), reason);
                Err(error.help(help))
            }
            None => Ok(()),
        }
    }

    /// Checks that the machine has the devices of its command line: those that a restore makes.
    fn check_plugged(&mut self) -> Result<()> {
        let mut devices = Vec::new();
        for place in USERS_DEVICES {
            let children = self.monitor.execute("qom-list", json!({ "path": place }))?;
            let children = children.as_array().map_or(&[][..], Vec::as_slice);
            let children = children.iter().filter(|child| text(child, "type").starts_with("child<"));
            devices.extend(children.map(|child| format!("{place}/{}", text(child, "name"))));
        }
        if self.devices.as_ref() == Some(&devices) {
            return Ok(());
        }
        let refused = |device: &str, what| {
            let object = Object::Device(device.rsplit('/').next().unwrap_or(device).to_owned());
            let reason = format!("{what} while the machine ran: a restore has the devices of the command line");
            let error = Error::about(ErrorKind::Unsupported, object, reason);
            Err(error.help("start QEMU with the devices that the machine is to have"))
        };
        if let Some(gone) = self.devices.iter().flatten().find(|device| !devices.contains(device)) {
            return refused(gone, "was unplugged");
        }
        for device in &devices {
            let hotplugged = json!({"path": device, "property": "hotplugged"});
            if self.monitor.execute("qom-get", hotplugged)?.as_bool() == Some(true) {
                return refused(device, "was plugged in");
            }
        }
        self.devices = Some(devices);
        Ok(())
    }

    /// Checks that no job of QEMU's works on disks, such as one that copies a disk elsewhere.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`]
    pub(crate) fn check_no_job(&mut self) -> Result<()> {
        let jobs = self.monitor.execute("query-block-jobs", json!({}))?;
        // What has ended may wait to be dismissed.
        let works = |job: &&Value| text(job, "status") != "concluded";
        let Some(job) = jobs.as_array().and_then(|jobs| jobs.iter().find(works)) else { return Ok(()) };
        let reason = format!("has a job that works on disks: {} {}", text(job, "type"), text(job, "device"));
        let error = Error::about(ErrorKind::Unsupported, Object::Process(self.pid), reason);
        Err(error.help("wait until the job has ended"))
    }

    /// The node that a device has as its medium.
    pub(crate) fn node_of(&mut self, device: &str) -> Result<Option<String>> {
        let blocks = self.monitor.execute("query-block", json!({}))?;
        let blocks = blocks.as_array().map_or(&[][..], Vec::as_slice);
        let block = blocks.iter().find(|block| drive::device_of(block) == device);
        Ok(block.and_then(|block| block.get("inserted")).map(|inserted| text(inserted, "node-name")))
    }

    /// The media of the drives that can be emptied.
    pub(crate) fn media(&mut self) -> Result<Vec<Medium>> {
        let blocks = self.monitor.execute("query-block", json!({}))?;
        Ok(blocks.as_array().map_or(&[][..], Vec::as_slice).iter().filter_map(medium::of_block).collect())
    }

    /// Gives the drives of the machine, which was started and has not run yet, the media that they
    /// had.
    ///
    /// # Errors
    /// [`ErrorKind::Mismatch`] if an image is missing or QEMU refuses it.
    pub(crate) fn insert_media(&mut self, media: &[Medium]) -> Result<()> {
        if media.is_empty() {
            return Ok(());
        }
        let present = self.media()?;
        for medium in media.iter().filter(|medium| !present.contains(medium)) {
            self.execute(&medium.insert()).map_err(|error| match error.kind() {
                ErrorKind::Command => {
                    let operation = format!("insert {}, which it had, into", medium.name());
                    Error::of(ErrorKind::Mismatch, operation, Object::Device(medium.device.clone()), error)
                }
                _ => error,
            })?;
        }
        Ok(())
    }

    /// The disks that the machine can write to.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if a checkpoint cannot hold one of them.
    pub(crate) fn drives(&mut self, startup: &Startup) -> Result<Vec<Drive>> {
        let blocks = self.monitor.execute("query-block", json!({}))?;
        let blocks = blocks.as_array().map_or(&[][..], Vec::as_slice);
        let drives = blocks.iter().map(|block| drive::of_block(block, &startup.arguments));
        drives.filter_map(Result::transpose).collect()
    }

    /// Opens an image as QEMU sees it, for reading.
    pub(crate) fn open_image(&self, image: &DiskImage) -> std::io::Result<File> {
        File::open(proc::path(self.pid, "cwd").join(&image.file))
    }

    /// True if KVM runs the machine's processors.
    pub(crate) fn has_kvm(&mut self) -> Result<bool> {
        let kvm = self.monitor.execute("query-kvm", json!({}))?;
        Ok(kvm.get("enabled").and_then(Value::as_bool) == Some(true))
    }

    /// The machine's name, if its user gave it one.
    pub(crate) fn name(&mut self) -> Result<Option<String>> {
        let name = text(&self.monitor.execute("query-name", json!({}))?, "name");
        Ok(Some(name).filter(|name| !name.is_empty()))
    }

    /// The pseudo-terminals of the machine: the name of each chardev, and the path.
    pub(crate) fn terminals(&mut self) -> Result<Vec<(String, PathBuf)>> {
        let chardevs = self.monitor.execute("query-chardev", json!({}))?;
        let chardevs = chardevs.as_array().map_or(&[][..], Vec::as_slice);
        let terminal = |chardev: &Value| {
            let path = text(chardev, "filename").strip_prefix("pty:").map(PathBuf::from)?;
            Some((text(chardev, "label"), path))
        };
        Ok(chardevs.iter().filter_map(terminal).collect())
    }

    /// Executes a command whose result is of no use.
    pub(crate) fn execute(&mut self, command: &Command) -> Result<()> {
        self.monitor.execute(command.name, command.arguments.clone()).map(drop)
    }

    /// Lets the machine continue.
    pub(crate) fn resume(&mut self) -> Result<()> {
        self.monitor.execute("cont", json!({})).map(drop)
    }

    /// Ends QEMU.
    pub(crate) fn quit(&mut self) -> Result<()> {
        self.monitor.execute("quit", json!({})).map(drop)
    }

    /// How the QEMU was started.
    pub(crate) fn startup(&mut self, is_running: bool) -> Result<Startup> {
        let version = self.version()?;
        let failed = |operation| Error::system(operation);
        let arguments = proc::arguments(self.pid).map_err(failed("read QEMU's command line"))?;
        let arguments =
            arguments.into_iter().skip(1).map(String::from_utf8).collect::<Result<Vec<_>, _>>().map_err(|error| {
                Error::of(ErrorKind::Unsupported, "record the command line of", Object::Process(self.pid), error)
            })?;
        let directory = proc::working_directory(self.pid).map_err(failed("read QEMU's directory"))?;
        let program = proc::executable(self.pid).map_err(failed("read QEMU's program"))?;
        let owner = Some(Owner::of_process(self.pid).map_err(failed("find the user of QEMU"))?);
        let kind = Some(self.kind()?);
        let (disks, media) = (Vec::new(), Vec::new());
        Ok(Startup { program, arguments, directory, version, is_running, disks, media, owner, kind })
    }

    /// QEMU's version, for people.
    pub(crate) fn version(&mut self) -> Result<String> {
        let version = self.monitor.execute("query-version", json!({}))?;
        let part = |name| version.pointer(&format!("/qemu/{name}")).and_then(Value::as_u64).unwrap_or_default();
        Ok(format!("{}.{}.{}", part("major"), part("minor"), part("micro")))
    }

    /// What the machine is.
    fn kind(&mut self) -> Result<MachineKind> {
        if let Some(kind) = &self.kind {
            return Ok(kind.clone());
        }
        let class = self.monitor.execute("qom-get", json!({"path": "/machine", "property": "type"}))?;
        let class = class.as_str().unwrap_or_default();
        let machine = class.strip_suffix("-machine").unwrap_or(class).to_owned();
        let target = text(&self.monitor.execute("query-target", json!({}))?, "arch");
        Ok(self.kind.insert(MachineKind { machine, target }).clone())
    }

    /// Where the memory is among the physical addresses. None if its form is unknown.
    pub(crate) fn memory_map(&mut self) -> Result<Option<MemoryMap>> {
        Ok(MemoryMap::parse(&self.monitor.human(LIST_MAP)?))
    }

    /// Lists where the memory is, for [`Machine::map_of`].
    pub(crate) fn list_map() -> Command {
        Command::of_human(LIST_MAP)
    }

    /// As [`Machine::memory_map`], of a reply to [`Machine::list_map`].
    pub(crate) fn map_of(&self, reply: &Value) -> Result<Option<MemoryMap>> {
        Ok(MemoryMap::parse(&self.monitor.text_of_human(reply)?))
    }

    /// Lists the blocks of memory, for [`Machine::changed_blocks_of`].
    pub(crate) fn list_blocks() -> Command {
        Command::of_human(LIST_BLOCKS)
    }

    /// The blocks of memory, if they have changed since the last call.
    pub(crate) fn changed_blocks(&mut self, mappings: &[Mapping]) -> Result<Option<Vec<RamBlock>>> {
        let table = self.monitor.human(LIST_BLOCKS)?;
        self.changed_blocks_in(table, || Ok(mappings))
    }

    /// As [`Machine::changed_blocks`], of a reply to [`Machine::list_blocks`]. The mappings are
    /// needed only if they have changed.
    pub(crate) fn changed_blocks_of<'m>(
        &mut self,
        reply: &Value,
        mappings: impl FnOnce() -> Result<&'m [Mapping]>,
    ) -> Result<Option<Vec<RamBlock>>> {
        let table = self.monitor.text_of_human(reply)?;
        self.changed_blocks_in(table, mappings)
    }

    fn changed_blocks_in<'m>(
        &mut self,
        table: String,
        mappings: impl FnOnce() -> Result<&'m [Mapping]>,
    ) -> Result<Option<Vec<RamBlock>>> {
        if table == self.listed.0 {
            return Ok(None);
        }
        let mappings = mappings()?;
        let listed = ram_blocks::parse(&table).filter(|listed| !listed.is_empty()).ok_or_else(|| {
            Error::about(ErrorKind::Memory, Object::Process(self.pid), "lists its memory in an unknown form")
        })?;
        let blocks = ram_blocks::locate(
            &listed,
            mappings,
            || read_heap(self.pid, mappings),
            |mapping| block_file::is_fixed(self.pid, mapping),
        )?;
        self.listed = (table, listed);
        Ok(Some(blocks))
    }

    /// Has QEMU, which was started with `-incoming defer`, read the state of processors and devices
    /// from a pipe. Returns when it has.
    pub(crate) fn begin_load(&mut self, pipe: BorrowedFd<'_>) -> Result<()> {
        self.monitor.execute_with("getfd", json!({"fdname": "pagemark-devices"}), Some(pipe))?;
        self.monitor.execute("migrate-incoming", json!({"uri": "fd:pagemark-devices"})).map(drop)
    }

    /// True when QEMU has read the state; an error if it refused it.
    pub(crate) fn has_loaded(&mut self) -> Result<bool> {
        let status = text(&self.monitor.execute("query-status", json!({}))?, "status");
        let migration = self.monitor.execute("query-migrate", json!({}))?;
        if text(&migration, "status") == "failed" {
            let reason = text(&migration, "error-desc");
            return Err(Error::of(ErrorKind::Mismatch, "restore the devices of", Object::Process(self.pid), reason));
        }
        Ok(status != "inmigrate")
    }
}

/// The content of the private memory of a process, but for large mappings.
fn read_heap(pid: i32, mappings: &[Mapping]) -> Result<Vec<Vec<u8>>> {
    let memory = proc::open_memory(pid).map_err(Error::system("read the memory of QEMU"))?;
    let parts = mappings.iter().filter(|mapping| {
        let is_small = mapping.end - mapping.start <= MAX_HEAP_PART;
        mapping.is_private_anonymous() && mapping.is_data() && is_small
    });
    // What is unmapped meanwhile is not QEMU's record of its memory, but what is left of the mapping
    // may be: an allocator gives the end of its heap back at any time.
    let read = |mapping: &Mapping| {
        let mut content = vec![0; (mapping.end - mapping.start).to_usize()];
        let mut read_bytes = 0;
        while read_bytes < content.len() {
            match memory.read_at(&mut content[read_bytes..], mapping.start.get() + read_bytes as u64) {
                Ok(more) if more > 0 => read_bytes += more,
                _ => break,
            }
        }
        content.truncate(read_bytes);
        content
    };
    Ok(parts.map(read).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_of_a_heap_is_read() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        // The heap that was listed was longer than the one that is read.
        let listed = pagemark_testing::wait_for("a heap", || {
            let mut mappings = proc::maps::read(pid).unwrap();
            mappings.retain(|mapping| mapping.name == b"[heap]");
            (!mappings.is_empty()).then_some(mappings)
        });
        let bytes = (listed[0].end - listed[0].start).to_usize();
        let longer = Mapping { end: listed[0].end + ByteCount::new(4096), ..listed[0].clone() };
        let heap = read_heap(pid, &[longer]);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(heap.unwrap().iter().map(Vec::len).collect::<Vec<_>>(), [bytes]);
    }
}
