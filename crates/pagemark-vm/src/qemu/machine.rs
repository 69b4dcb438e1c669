//! What the monitor of a machine reports, and the commands that a checkpoint needs.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use pagemark::{AddressRangeExt, ByteCount, RangeSet};
use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap, SWAPPED};
use pagemark_linux::proc::{self, Mapping};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Object, Result, printable};
use crate::memory::block_file;
use crate::memory::memory_map::MemoryMap;
use crate::memory::ram_blocks::{self, ListedBlock, RamBlock};
use crate::qemu::command::{Command, text};
use crate::qemu::command_line::{relative_path_of_daemon, with_descriptor};
use crate::qemu::drive::{self, DiskImage, Drive};
use crate::qemu::medium::{self, Medium};
use crate::qemu::owner::Owner;
use crate::qemu::plugged;
use crate::qemu::qmp::Monitor;
use crate::qemu::refused;
use crate::qemu::user_files;

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

/// States of a machine that the state of its devices does not have.
const UNSAVED: [&str; 6] =
    ["inmigrate", "postmigrate", "finish-migrate", "guest-panicked", "internal-error", "suspended"];

/// States of a migration that is in progress.
const MIGRATING: [&str; 8] =
    ["setup", "active", "device", "wait-unplug", "pre-switchover", "postcopy-active", "postcopy-paused", "colo"];

/// Mappings that are larger hold no records of QEMU's, but for the heap of its main thread: that
/// has no limit, and devices with large tables make it longer than this.
const MAX_HEAP_PART: ByteCount = ByteCount::new(64 << 20);

/// How a QEMU was started, and in which state the machine was: what a restore needs besides memory
/// and devices.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Startup {
    /// The program.
    pub(crate) program: PathBuf,
    /// Its arguments, without the program's name.
    pub arguments: Vec<String>,
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
    /// The variables of its environment that [`KEPT_VARIABLES`] names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) variables: BTreeMap<String, String>,
    /// What a restored QEMU has in [`BIRTH`].
    #[serde(skip)]
    pub(crate) birth: Option<String>,
}

/// The variable of a restored QEMU that tells whose machine it continues: what
/// [`ProcessRecord::birth`](pagemark::repository::ProcessRecord::birth) was at the checkpoint.
pub(crate) const BIRTH: &str = "PAGEMARK_MACHINE";

/// The value of `BIRTH` in the environment of a QEMU. None if it was not restored.
pub fn restored_birth(pid: i32) -> Option<String> {
    let environment = std::fs::read(proc::path(pid, "environ")).ok()?;
    let mut variables = environment.split(|byte| *byte == 0);
    variables.find_map(|variable| {
        let value = variable.strip_prefix(BIRTH.as_bytes())?.strip_prefix(b"=")?;
        String::from_utf8(value.to_vec()).ok()
    })
}

/// Variables by which QEMU and its libraries find files, the user's session, and words. What else
/// is in an environment may be secret.
const KEPT_VARIABLES: [&str; 16] = [
    "PATH",
    "HOME",
    "TMPDIR",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "LC_MESSAGES",
    "TZ",
    "DISPLAY",
    "WAYLAND_DISPLAY",
    "XAUTHORITY",
    "XDG_RUNTIME_DIR",
    "PULSE_SERVER",
    "SDL_VIDEODRIVER",
    "LD_LIBRARY_PATH",
    "QEMU_MODULE_DIR",
];

/// Where programs are found without `PATH`.
const PATH: &str = "/usr/local/bin:/usr/bin:/bin";

impl Startup {
    /// The environment of a QEMU that root starts for another user, who can read it.
    pub(crate) fn environment(&self) -> BTreeMap<String, String> {
        let mut variables = self.variables.clone();
        variables.retain(|name, _| KEPT_VARIABLES.contains(&&**name));
        variables.entry("PATH".to_owned()).or_insert_with(|| PATH.to_owned());
        variables
    }

    /// QEMU's name of the type of the machine, with the version. None in checkpoints of earlier
    /// versions.
    pub fn machine_type(&self) -> Option<&str> {
        self.kind.as_ref().map(|kind| kind.machine.as_str())
    }

    /// The user with whose rights this process, which is root's, does what it does for QEMU. None
    /// for the rights of this process.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if root does not know whose process QEMU was.
    pub fn owner_for_root(&self) -> Result<Option<&Owner>> {
        match &self.owner {
            Some(owner) => Ok(Some(owner).filter(|owner| owner.is_to_be_set())),
            None if nix::unistd::geteuid().is_root() => {
                let reason = "the checkpoint does not say whose process its QEMU was";
                let error = Error::about(ErrorKind::Unsupported, Object::None, reason);
                Err(error.help("it was made by an earlier version of Pagemark: restore it as the user that ran QEMU"))
            }
            None => Ok(None),
        }
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

/// What QEMU says of its disks: the drives, and the nodes that they are made of.
pub(crate) struct Blocks {
    pub(crate) blocks: Vec<Value>,
    pub(crate) nodes: Vec<Value>,
}

impl Blocks {
    /// The media of the drives that can be emptied.
    pub(crate) fn media(&self) -> Vec<Medium> {
        self.blocks.iter().filter_map(medium::of_block).collect()
    }

    /// The node that a device has as its medium.
    pub(crate) fn node_of(&self, device: &str) -> Option<String> {
        let block = self.blocks.iter().find(|block| drive::device_of(block) == device)?;
        Some(text(block.get("inserted")?, "node-name"))
    }
}

/// A QEMU, by its monitor.
#[derive(Debug)]
pub struct Machine {
    /// The connection to its monitor.
    pub monitor: Monitor,
    /// The process id of QEMU.
    pub pid: i32,
    /// The table of memory blocks as it was last, and what it says.
    listed: (String, Vec<ListedBlock>),
    /// The devices that users have added, as they were last. None before the first look.
    devices: Option<Vec<String>>,
    /// The devices with disks, in QEMU's tree of objects, that are known to have no other thread.
    on_main_thread: Vec<String>,
    /// None before it was asked for.
    kind: Option<MachineKind>,
    /// None before it was asked for.
    version: Option<[u64; 3]>,
    /// The user that had the monitor listen. None for a QEMU that this process has started.
    opener: Option<u32>,
}

impl Machine {
    /// Connects to the monitor at `path`.
    pub(crate) fn connect(path: &Path) -> Result<Machine> {
        let mut monitor = Monitor::connect(path)?;
        let (pid, opener) = monitor.peer()?;
        monitor.expect_end_of(pid);
        let machine = Machine { opener: Some(opener), ..Machine::of(monitor, pid)? };
        // Before anything of the process is read.
        machine.owner()?;
        machine.check_surroundings()?;
        Ok(machine)
    }

    /// The machine of a QEMU whose process is known.
    pub(crate) fn of(monitor: Monitor, pid: i32) -> Result<Machine> {
        let (listed, devices, on_main_thread, kind, version, opener) = Default::default();
        Ok(Machine { monitor, pid, listed, devices, on_main_thread, kind, version, opener })
    }

    /// Checks that a restored QEMU would find what QEMU finds: that this process has the same root
    /// directory, network and numbers of users.
    fn check_surroundings(&self) -> Result<()> {
        let failed = || Error::system("find the surroundings of QEMU");
        let root = |pid: &str| std::fs::metadata(format!("/proc/{pid}/root/")).map(|root| (root.dev(), root.ino()));
        let namespace = |pid: &str, name: &str| std::fs::read_link(format!("/proc/{pid}/ns/{name}"));
        let pid = self.pid.to_string();
        let mut other = (root(&pid).map_err(failed())? != root("self").map_err(failed())?).then_some("root directory");
        for (name, words) in [("user", "user namespace"), ("net", "network namespace")] {
            // A kernel need not have each.
            let differs = namespace(&pid, name).ok() != namespace("self", name).ok();
            other = other.or(differs.then_some(words));
        }
        let Some(other) = other else { return Ok(()) };
        let reason = format!("has another {other} than pagemark, where a restored QEMU would have that of pagemark");
        let error = Error::about(ErrorKind::Unsupported, Object::Process(self.pid), reason);
        Err(error.help(format!("run pagemark where QEMU runs: nsenter --target {} --all pagemark …", self.pid)))
    }

    /// Checks that a checkpoint can hold all of the machine. Nothing is changed. True if the
    /// machine's processors run.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with the reason.
    pub(crate) fn check(&mut self) -> Result<bool> {
        let unsupported = |reason: String| Error::about(ErrorKind::Unsupported, Object::Process(self.pid), reason);
        self.monitor.expect_no_move();
        let [with_id, without_id] = plugged::list();
        let state = Command::new("query-status", json!({}));
        let [state, migration, with_id, without_id] =
            self.monitor.ask([state, refused::list_reasons(), with_id, without_id])?;
        let (state, migration) = (state?, migration?);
        let status = text(&state, "status");
        if UNSAVED.contains(&&*status) {
            return Err(unsupported(format!("cannot be checkpointed in its state, {status}")));
        }
        if MIGRATING.contains(&&*text(&migration, "status")) {
            return Err(unsupported("is being migrated".into()).help("wait until the migration has ended"));
        }
        refused::check_saved(&migration, self.pid)?;
        self.owner()?;
        // A device of before may have been replaced by another one of the same name.
        if self.monitor.take_unplugged() {
            (self.devices, self.on_main_thread) = Default::default();
        }
        self.check_devices(plugged::listed([&with_id?, &without_id?]))?;
        Ok(state.get("running").and_then(Value::as_bool).unwrap_or(false))
    }

    /// Checks that QEMU has reported since [`Machine::check`] no device that was unplugged: it was
    /// perhaps plugged in after that. QEMU reports it up to some 60 ms late.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`]
    pub(crate) fn check_none_unplugged(&self) -> Result<()> {
        if !self.monitor.has_unplugged() {
            return Ok(());
        }
        let reason = "had a device that was unplugged during the checkpoint";
        Err(Error::about(ErrorKind::Unsupported, Object::Process(self.pid), reason))
    }

    /// Checks that the machine still has the devices that [`Machine::check`] has found, and the
    /// `media`. So it had them in the stop between the two, and its saved state is of them.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with the device.
    pub(crate) fn check_as_before(&mut self, media: &[Medium]) -> Result<()> {
        let [with_id, without_id] = plugged::list();
        let [with_id, without_id, blocks] =
            self.monitor.ask([with_id, without_id, Command::new("query-block", json!({}))])?;
        self.check_none_unplugged()?;
        self.check_devices(plugged::listed([&with_id?, &without_id?]))?;
        let blocks = Blocks { blocks: blocks?.as_array().cloned().unwrap_or_default(), nodes: Vec::new() };
        let now = blocks.media();
        let changed = media.iter().find(|medium| !now.contains(medium)).or(now.iter().find(|now| !media.contains(now)));
        match changed {
            Some(Medium { device, .. }) => {
                let reason = "was given another medium during the checkpoint";
                Err(Error::about(ErrorKind::Unsupported, Object::Device(device.clone()), reason))
            }
            None => Ok(()),
        }
    }

    /// Checks that no device of the machine gives memory back to the host. What is given back must
    /// hold zeros afterwards; memory that comes from elsewhere would come again, and what was given
    /// back before it was copied would be lost. `help` says what else can be done.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`]
    pub fn check_keeps_memory(&mut self, help: &'static str) -> Result<()> {
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

    /// Checks that the machine has the devices of its command line: those that a restore makes, and
    /// that a checkpoint can hold them. `devices` are those that users have added. What was checked
    /// is not checked again as long as they are the same.
    fn check_devices(&mut self, devices: Vec<String>) -> Result<()> {
        if self.devices.as_ref() == Some(&devices) {
            return Ok(());
        }
        let pid = self.pid;
        let [tree, network, tpms] = self.monitor.ask([
            Command::of_human("info qtree"),
            Command::of_human("info network"),
            refused::list_tpms(),
        ])?;
        let types = self.monitor.text_of_human(&tree?)? + &self.monitor.text_of_human(&network?)?;
        refused::check_types(&types, self.version_numbers()?[0], pid)?;
        refused::check_no_tpm(tpms)?;
        if let Some((name, reason)) = WRITTEN_ELSEWHERE.iter().find(|(name, _)| types.contains(name)) {
            let reason = format!("has a {name} device: {reason}");
            return Err(Error::about(ErrorKind::Unsupported, Object::Process(pid), reason));
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
        let arguments = proc::arguments(self.pid).map_err(Error::system("read QEMU's command line"))?;
        let arguments: Vec<String> =
            arguments.into_iter().map(|word| String::from_utf8_lossy(&word).into_owned()).collect();
        if let Some(gone) = plugged::unplugged(&arguments, &devices) {
            return refused(&gone, "is not there any more: it was unplugged");
        }
        let hotplugged = |device: &String| Command::new("qom-get", json!({"path": device, "property": "hotplugged"}));
        let answers = self.monitor.try_all(&devices.iter().map(hotplugged).collect::<Vec<_>>())?;
        for (device, answer) in devices.iter().zip(answers) {
            match answer {
                Ok(reply) if reply.result == true => return refused(device, "was plugged in"),
                Ok(_) => {}
                Err(_) => return refused(device, "was unplugged"),
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
        self.refuse_jobs(&jobs)
    }

    fn refuse_jobs(&self, jobs: &Value) -> Result<()> {
        // What has ended may wait to be dismissed.
        let works = |job: &&Value| text(job, "status") != "concluded";
        let Some(job) = jobs.as_array().and_then(|jobs| jobs.iter().find(works)) else { return Ok(()) };
        let reason = format!("has a job that works on disks: {} {}", text(job, "type"), text(job, "device"));
        let error = Error::about(ErrorKind::Unsupported, Object::Process(self.pid), reason);
        Err(error.help("wait until the job has ended"))
    }

    /// Like [`Machine::check_no_job`], and the drives as they are then.
    pub(crate) fn blocks_without_job(&mut self) -> Result<Blocks> {
        let [jobs, blocks] =
            self.monitor.ask(["query-block-jobs", "query-block"].map(|name| Command::new(name, json!({}))))?;
        self.refuse_jobs(&jobs?)?;
        Ok(Blocks { blocks: blocks?.as_array().cloned().unwrap_or_default(), nodes: Vec::new() })
    }

    /// What QEMU says of its disks.
    pub(crate) fn blocks(&mut self) -> Result<Blocks> {
        let nodes = Command::new("query-named-block-nodes", json!({"flat": true}));
        let [blocks, nodes] = self.monitor.ask([Command::new("query-block", json!({})), nodes])?;
        let list = |answer: Result<Value>| answer.map(|list| list.as_array().cloned().unwrap_or_default());
        Ok(Blocks { blocks: list(blocks)?, nodes: list(nodes)? })
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
        let present = self.blocks()?.media();
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
    pub(crate) fn drives(&mut self, startup: &Startup, found: &Blocks) -> Result<Vec<Drive>> {
        let drives = found.blocks.iter().map(|block| drive::of_block(block, &found.nodes, &startup.arguments));
        let drives = drives.filter_map(Result::transpose).collect::<Result<Vec<Drive>>>()?;
        // A device keeps its thread.
        let unknown: Vec<&Drive> = drives.iter().filter(|drive| !self.on_main_thread.contains(&drive.device)).collect();
        if !unknown.is_empty() && refused::has_threads(&mut self.monitor)? {
            unknown.iter().try_for_each(|drive| refused::check_thread(&mut self.monitor, drive))?;
        }
        let checked: Vec<String> = unknown.iter().map(|drive| drive.device.clone()).collect();
        self.on_main_thread.extend(checked);
        Ok(drives)
    }

    /// Opens an image of QEMU for reading, with the rights of its user.
    pub(crate) fn open_image(&self, image: &DiskImage) -> Result<File> {
        let failed = |error| Error::of(ErrorKind::System, "open", Object::Image((&image.file).into()), error);
        let owner = Some(self.owner()?).filter(Owner::is_to_be_set);
        let directory = proc::working_directory(self.pid).map_err(failed)?;
        user_files::open_file(owner.as_ref(), &directory.join(&image.file)).map_err(failed)
    }

    /// The user of QEMU: that which has opened the monitor, or root, which QEMU was then before.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the process is not that user's alone, or not any more: it may
    /// be another program by now, which its user may not have read.
    fn owner(&self) -> Result<Owner> {
        let owner = Owner::of_process(self.pid)?;
        match self.opener {
            Some(opener) if opener != 0 && opener != owner.user => {
                let reason = format!("belongs to the user {}, and its monitor to the user {opener}", owner.user);
                Err(Error::about(ErrorKind::Unsupported, Object::Process(self.pid), reason))
            }
            _ => Ok(owner),
        }
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
    pub fn execute(&mut self, command: &Command) -> Result<()> {
        self.monitor.execute(command.name, command.arguments.clone()).map(drop)
    }

    /// Lets the machine continue.
    pub fn resume(&mut self) -> Result<()> {
        self.monitor.execute("cont", json!({})).map(drop)
    }

    /// Ends QEMU.
    pub fn quit(&mut self) -> Result<()> {
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
        if let Some(argument) = relative_path_of_daemon(&arguments) {
            let reason = format!("has changed its directory (-daemonize), and {argument} begins in the one before");
            let error = Error::about(ErrorKind::Unsupported, Object::Process(self.pid), reason);
            return Err(error.help("start QEMU with the whole path, from the root directory on"));
        }
        if let Some(argument) = with_descriptor(&arguments) {
            let reason = format!("was started with a descriptor that a restore does not have: {}", printable(argument));
            let error = Error::about(ErrorKind::Unsupported, Object::Process(self.pid), reason);
            return Err(error.help("start QEMU with a path in its place, such as path= of a socket"));
        }
        let program = proc::executable(self.pid).map_err(failed("read QEMU's program"))?;
        let owner = Some(self.owner()?);
        let kind = Some(self.kind()?);
        let (disks, media) = (Vec::new(), Vec::new());
        let variables = kept_variables(self.pid).map_err(failed("read QEMU's environment"))?;
        Ok(Startup {
            program,
            arguments,
            directory,
            version,
            is_running,
            disks,
            media,
            owner,
            kind,
            variables,
            birth: None,
        })
    }

    /// QEMU's version, for people.
    pub(crate) fn version(&mut self) -> Result<String> {
        Ok(self.version_numbers()?.map(|number| number.to_string()).join("."))
    }

    fn version_numbers(&mut self) -> Result<[u64; 3]> {
        if let Some(numbers) = self.version {
            return Ok(numbers);
        }
        let version = self.monitor.execute("query-version", json!({}))?;
        let part = |name| version["qemu"][name].as_u64().unwrap_or_default();
        Ok(*self.version.insert(["major", "minor", "micro"].map(part)))
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

    /// Like [`Machine::memory_map`], of a reply to [`Machine::list_map`].
    pub(crate) fn map_of(&self, reply: &Value) -> Result<Option<MemoryMap>> {
        Ok(MemoryMap::parse(&self.monitor.text_of_human(reply)?))
    }

    /// Lists the blocks of memory, for [`Machine::changed_blocks_of`].
    pub(crate) fn list_blocks() -> Command {
        Command::of_human(LIST_BLOCKS)
    }

    /// The blocks of memory, if they have changed since the last call.
    pub fn changed_blocks(&mut self, mappings: &[Mapping]) -> Result<Option<Vec<RamBlock>>> {
        let table = self.monitor.human(LIST_BLOCKS)?;
        self.changed_blocks_in(table, || Ok(mappings))
    }

    /// Like [`Machine::changed_blocks`], of a reply to [`Machine::list_blocks`]. The mappings are
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
            || heap(self.pid, mappings),
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

/// The variables of a process's environment that are kept.
fn kept_variables(pid: i32) -> std::io::Result<BTreeMap<String, String>> {
    let environment = std::fs::read(proc::path(pid, "environ"))?;
    let variables = environment.split(|byte| *byte == 0).filter_map(|variable| {
        let (name, value) = std::str::from_utf8(variable).ok()?.split_once('=')?;
        KEPT_VARIABLES.contains(&name).then(|| (name.to_owned(), value.to_owned()))
    });
    Ok(variables.collect())
}

/// The content of the private memory of a process, but for large mappings: what the program's
/// allocator has from the kernel first, then one part after the other, the small ones first. Each
/// is read when it is asked for, and only the pages that the process has touched.
fn heap(pid: i32, mappings: &[Mapping]) -> Result<impl Iterator<Item = Vec<u8>>> {
    let memory = proc::open_memory(pid).map_err(Error::system("read the memory of QEMU"))?;
    let pagemap = Pagemap::of_process(pid).map_err(Error::system("read the memory of QEMU"))?;
    let mut parts: Vec<Mapping> = mappings
        .iter()
        .filter(|mapping| {
            let is_heap = mapping.name == b"[heap]" || mapping.end - mapping.start <= MAX_HEAP_PART;
            mapping.is_private_anonymous() && mapping.is_data() && is_heap
        })
        .cloned()
        .collect();
    parts.sort_by_key(|mapping| (mapping.name != b"[heap]", mapping.end - mapping.start));
    let touched = move |part: Mapping| {
        let mut runs = RangeSet::new();
        let filter = Filter { any: PRESENT | SWAPPED, ..Filter::default() };
        // What cannot be looked at is read as a whole.
        if pagemap.find(&part.range(), filter, |run, _| runs.insert(run)).is_err() {
            runs.insert(part.range());
        }
        runs.iter().collect::<Vec<_>>()
    };
    // What is unmapped meanwhile is not QEMU's record of its memory, but what is left of the mapping
    // may be: an allocator gives the end of its heap back at any time.
    let read = move |run: pagemark::Range| {
        let mut content = vec![0; run.byte_count().to_usize()];
        let mut read_bytes = 0;
        while read_bytes < content.len() {
            match memory.read_at(&mut content[read_bytes..], run.start.get() + read_bytes as u64) {
                Ok(more) if more > 0 => read_bytes += more,
                _ => break,
            }
        }
        content.truncate(read_bytes);
        content
    };
    Ok(parts.into_iter().flat_map(touched).map(read))
}

#[cfg(test)]
mod tests {
    use pagemark_linux::flight::FlightBuffer;

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
        let parts: Vec<Vec<u8>> = heap(pid, &[longer]).unwrap().collect();
        child.kill().unwrap();
        child.wait().unwrap();
        let read: usize = parts.iter().map(Vec::len).sum();
        assert!((1..=bytes).contains(&read), "{read} of {bytes}");
    }

    #[test]
    fn untouched_memory_is_not_read_and_the_heap_comes_first() {
        let size = ByteCount::new(8 << 20).to_usize();
        // What lies around it cannot be accessed, so that it is a mapping of its own.
        let mut buffer = FlightBuffer::new(2 * size).unwrap();
        buffer.open(size).unwrap();
        let memory = buffer.slice(0..size);
        let touched = memory.len() / 2;
        memory[touched..touched + 4].copy_from_slice(b"here");
        let pid = std::process::id() as i32;
        let mut mappings = proc::maps::read(pid).unwrap();
        let address = pagemark::Address::new(memory.as_ptr() as u64);
        mappings.retain(|mapping| mapping.name == b"[heap]" || mapping.range().contains(&address));
        mappings.reverse();
        let mut parts = heap(pid, &mappings).unwrap();
        let is_heap = |content: &[u8]| content.len() < size / 2;
        assert!(is_heap(&parts.next().unwrap()));
        let of_memory: Vec<Vec<u8>> = parts.filter(|part| part.windows(4).any(|word| word == b"here")).collect();
        assert!(!of_memory.is_empty() && of_memory.iter().all(|part| part.len() < size / 2));
    }

    #[test]
    fn a_heap_of_any_length_is_read() {
        let size = MAX_HEAP_PART.to_usize() + (8 << 20);
        // What lies around it cannot be accessed, so that it is a mapping of its own.
        let mut buffer = FlightBuffer::new(2 * size).unwrap();
        buffer.open(size).unwrap();
        let memory = buffer.slice(0..size);
        memory[size / 2..size / 2 + 4].copy_from_slice(b"here");
        let address = pagemark::Address::new(memory.as_ptr() as u64);
        let pid = std::process::id() as i32;
        let mut mappings = proc::maps::read(pid).unwrap();
        mappings.retain(|mapping| mapping.range().contains(&address));
        assert_eq!(heap(pid, &mappings).unwrap().count(), 0, "it is memory of the machine");
        mappings[0].name = b"[heap]".into();
        assert!(heap(pid, &mappings).unwrap().any(|part| part.windows(4).any(|word| word == b"here")));
    }
}
