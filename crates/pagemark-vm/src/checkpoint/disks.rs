//! The disks of a machine in a checkpoint.
//!
//! From one checkpoint to the next, a dirty bitmap of QEMU records what the machine writes to a
//! disk. While the machine is stopped, a filter is put before the disk that keeps the old content
//! of what is written (copy-before-write), and a new bitmap begins. When the machine runs again,
//! the parts in the old bitmap are read through the filter by the NBD protocol, as they were in the
//! stop. Then the filter is removed. The images themselves are not changed.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use pagemark::target::{SpaceId, VisitPage};
use pagemark::{Address, ByteCount, PAGE_SIZE, PageNumber, RangeSet};
use pagemark_linux::scratch_directory::{Purpose, ScratchDirectory};
use serde_json::json;

use crate::checkpoint::changes::{Changes, Undo};
use crate::checkpoint::given_files::{self, FILE_SET};
use crate::checkpoint::nbd::{Client, REQUEST_BYTES};
use crate::checkpoint::node_hold;
use crate::error::{Error, ErrorKind, Object, Result};
use crate::qemu::command::Command;
use crate::qemu::drive::Drive;
use crate::qemu::machine::Machine;

/// Bytes that one bit of a dirty bitmap stands for, up to [`LARGE_DISK`] and above.
const GRANULARITY_BYTES: u64 = 4096;
const COARSE_GRANULARITY_BYTES: u64 = 65536;

/// The bitmap of a larger disk would take more than 32 MiB.
const LARGE_DISK: ByteCount = ByteCount::new(1 << 40);

/// QEMU's name for the socket on which it serves the disks.
const SERVER: &str = "pagemark-disks";

/// The disks that a machine can write to.
#[derive(Debug, Default)]
pub(crate) struct Disks {
    disks: Vec<Disk>,
    last_bitmap: u64,
}

/// A disk, and the bitmaps that record what is written to it.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) space: SpaceId,
    pub(crate) drive: Drive,
    /// The bitmap that has all that was written since the last checkpoint that is known to be
    /// complete; none before the first.
    recorded: Option<String>,
    /// The bitmap that began with a checkpoint that is not known to be complete.
    candidate: Option<String>,
    /// Bitmaps that are not needed any more, and that QEMU may still have.
    unneeded: Vec<String>,
}

/// QEMU's names for what a checkpoint adds for one disk.
struct Nodes {
    set: u64,
    kept: String,
    detour: String,
    filter: String,
    snapshot: String,
    export: String,
    /// Hold the disk and the filter.
    holds: [String; 2],
}

impl Nodes {
    fn of(index: usize) -> Nodes {
        Nodes {
            set: FILE_SET + 1 + index as u64,
            kept: format!("pagemark-kept-{index}"),
            detour: format!("pagemark-detour-{index}"),
            filter: format!("pagemark-filter-{index}"),
            snapshot: format!("pagemark-snapshot-{index}"),
            export: format!("pagemark-disk-{index}"),
            holds: ["disk", "filter"].map(|held| format!("pagemark-hold-{held}-{index}")),
        }
    }
}

/// Connections to the socket on which QEMU will serve the disks. They were made before QEMU got the
/// socket, and the socket has no path any more, so that nobody else can connect.
#[derive(Debug)]
pub(crate) struct Connections {
    listener: OwnedFd,
    streams: Vec<UnixStream>,
}

impl Connections {
    /// As many connections to a socket as there are disks.
    pub(crate) fn new(count: usize) -> Result<Connections> {
        let failed = || Error::system("make a socket for the disks");
        let directory = ScratchDirectory::new_in(&std::env::temp_dir(), Purpose::Disks).map_err(failed())?;
        let path = directory.path().join("disks");
        let listener = UnixListener::bind(&path).map_err(failed())?;
        let streams: io::Result<_> = (0..count).map(|_| UnixStream::connect(&path)).collect();
        Ok(Connections { listener: listener.into(), streams: streams.map_err(failed())? })
    }

    /// Gives QEMU the socket.
    pub(crate) fn give(&self, machine: &mut Machine) -> Result<()> {
        machine.monitor.execute_with("getfd", json!({"fdname": SERVER}), Some(self.listener.as_fd())).map(drop)
    }

    /// The command by which QEMU, which has the socket, serves disks on it.
    pub(crate) fn start_server(&self) -> Command {
        let address = json!({"type": "fd", "data": {"str": SERVER}});
        // QEMU takes zero for no limit.
        let limit = self.streams.len().max(1);
        Command::new("nbd-server-start", json!({"addr": address, "max-connections": limit}))
    }

    /// The connections.
    pub(crate) fn into_streams(self) -> Vec<UnixStream> {
        self.streams
    }
}

/// The content of the disks at the stop.
#[derive(Debug, Default)]
pub(crate) struct DiskContents {
    disks: Vec<DiskContent>,
}

#[derive(Debug)]
struct DiskContent {
    space: SpaceId,
    label: String,
    client: RefCell<Client>,
}

impl Disks {
    /// The disks, as they were listed last.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Disk> {
        self.disks.iter()
    }

    /// Takes over the list of disks. All of a new one counts as written.
    pub(crate) fn set_drives(&mut self, drives: Vec<Drive>, next_space: &mut SpaceId) {
        let mut old = std::mem::take(&mut self.disks);
        for drive in drives {
            // The machine may have been given a longer disk.
            let is_known = |disk: &Disk| disk.drive.device == drive.device && disk.drive.node == drive.node;
            let disk = match old.iter().position(is_known) {
                Some(index) => Disk { drive, ..old.swap_remove(index) },
                None => {
                    *next_space += 1;
                    Disk { space: *next_space - 1, drive, recorded: None, candidate: None, unneeded: Vec::new() }
                }
            };
            self.disks.push(disk);
        }
    }

    /// Checks that QEMU can serve disks, if there are any.
    pub(crate) fn check(&self, machine: &mut Machine, changes: &mut Changes) -> Result<()> {
        match self.disks.is_empty() {
            true => Ok(()),
            false => serve(machine, changes, &Connections::new(0)?),
        }
    }

    /// Prepares a checkpoint: the last one was complete. The machine runs.
    pub(crate) fn prepare(&mut self, machine: &mut Machine, changes: &mut Changes) -> Result<Connections> {
        for disk in &mut self.disks {
            if let Some(candidate) = disk.candidate.take() {
                disk.unneeded.extend(disk.recorded.replace(candidate));
            }
            while let Some(bitmap) = disk.unneeded.last() {
                match machine.execute(&remove_bitmap(&disk.drive.node, bitmap)) {
                    Err(error) if error.kind() != ErrorKind::Command => return Err(error),
                    // A bitmap that was perhaps not made.
                    _ => disk.unneeded.pop(),
                };
            }
        }
        changes.set_lasting(self.undo_bitmaps())?;
        self.hold(machine, changes)?;
        for (index, disk) in self.disks.iter().enumerate() {
            let nodes = Nodes::of(index);
            let file = temporary_file(disk.drive.bytes).map_err(Error::system("make a temporary file for a disk"))?;
            given_files::add_file(machine, changes, nodes.set, file.as_fd())?;
            let path = format!("/dev/fdset/{}", nodes.set);
            let add = json!({"driver": "file", "node-name": nodes.kept, "filename": path, "locking": "off"});
            changes.execute(machine, Command::new("blockdev-add", add), remove_node(&nodes.kept))?;
            let detour = json!({"driver": "raw", "node-name": nodes.detour, "file": disk.drive.node});
            changes.execute(machine, Command::new("blockdev-add", detour), remove_node(&nodes.detour))?;
            // In the stop, QEMU brings to disk what the machine has written until then. What cannot be done now is
            // done then.
            let _ = machine.open_image(&disk.drive.image).map(|image| image.sync_data());
        }
        Connections::new(self.disks.len())
    }

    /// Keeps others from changing the images of the disks, and checks that nobody does.
    fn hold(&self, machine: &mut Machine, changes: &mut Changes) -> Result<()> {
        if self.disks.is_empty() {
            return Ok(());
        }
        // A job must not find that another node uses what it works on.
        machine.check_no_job()?;
        let set = FILE_SET + 1 + self.disks.len() as u64;
        let file = node_hold::empty_image().map_err(Error::system("make a file in memory"))?;
        given_files::add_file(machine, changes, set, file.as_fd())?;
        changes.execute(machine, node_hold::open_file(set), remove_node(node_hold::FILE_NODE))?;
        for (index, disk) in self.disks.iter().enumerate() {
            let [hold, _] = &Nodes::of(index).holds;
            changes.execute(machine, node_hold::hold(&disk.drive.node, hold), remove_node(hold))?;
        }
        // Behind the holds, none can begin any more but a backup, and the disks stay what they are.
        let now = machine.blocks_without_job()?;
        for Disk { drive, .. } in &self.disks {
            if now.node_of(&drive.device).as_ref() != Some(&drive.node) {
                let reason = "was given another image when the checkpoint began";
                return Err(Error::about(ErrorKind::Unsupported, Object::Disk(drive.label.clone()), reason));
            }
        }
        Ok(())
    }

    /// The commands that put the filters before the disks and begin new bitmaps, executed while the
    /// machine is stopped.
    pub(crate) fn begin(&mut self, changes: &mut Changes) -> Result<Vec<(Command, Option<Undo>)>> {
        if self.disks.is_empty() {
            return Ok(Vec::new());
        }
        let mut steps = Vec::new();
        for (index, Disk { drive, .. }) in self.disks.iter().enumerate() {
            let nodes = Nodes::of(index);
            // If the temporary file cannot take what the machine overwrites, the checkpoint fails, not the machine.
            let filter = json!({
                "driver": "copy-before-write", "node-name": nodes.filter, "file": drive.node,
                "target": nodes.kept, "on-cbw-error": "break-snapshot",
            });
            steps.push((Command::new("blockdev-add", filter), Some(Undo::by(remove_node(&nodes.filter)))));
            // QEMU 7.2 crashes if a device is given the node that it has. If it is not known which node that is,
            // the device is therefore given the detour first, which it never has otherwise.
            let undo = Undo::by_both(set_node(drive, &nodes.detour), set_node(drive, &drive.node));
            let undo = undo.while_used(&drive.device, &nodes.filter);
            steps.push((set_node(drive, &nodes.filter), Some(undo)));
            let [_, hold] = &nodes.holds;
            steps.push((node_hold::hold(&nodes.filter, hold), Some(Undo::by(remove_node(hold)))));
        }
        self.last_bitmap += 1;
        let name = format!("pagemark-{}", self.last_bitmap);
        let mut actions = Vec::new();
        for Disk { drive, recorded, .. } in &self.disks {
            let is_large = drive.bytes > LARGE_DISK;
            let granularity = if is_large { COARSE_GRANULARITY_BYTES } else { GRANULARITY_BYTES };
            let add = json!({"node": drive.node, "name": name, "granularity": granularity});
            actions.push(json!({"type": "block-dirty-bitmap-add", "data": add}));
            if let Some(recorded) = recorded {
                let disable = json!({"node": drive.node, "name": recorded});
                actions.push(json!({"type": "block-dirty-bitmap-disable", "data": disable}));
            }
        }
        steps.push((Command::new("transaction", json!({ "actions": actions })), None));
        self.disks.iter_mut().for_each(|disk| disk.candidate = Some(name.clone()));
        changes.set_lasting(self.undo_bitmaps())?;
        Ok(steps)
    }

    /// Opens the disks for reading, as they were in the stop.
    pub(crate) fn open(
        &self,
        machine: &mut Machine,
        changes: &mut Changes,
        connections: Connections,
    ) -> Result<DiskContents> {
        if self.disks.is_empty() {
            return Ok(DiskContents::default());
        }
        for index in 0..self.disks.len() {
            let nodes = Nodes::of(index);
            let add = json!({"driver": "snapshot-access", "node-name": nodes.snapshot, "file": nodes.filter});
            changes.execute(machine, Command::new("blockdev-add", add), remove_node(&nodes.snapshot))?;
        }
        serve(machine, changes, &connections)?;
        for (index, disk) in self.disks.iter().enumerate() {
            let nodes = Nodes::of(index);
            let bitmaps: Vec<_> =
                disk.recorded.iter().map(|name| json!({"node": disk.drive.node, "name": name})).collect();
            let export = json!({
                "type": "nbd", "id": nodes.export, "node-name": nodes.snapshot, "name": nodes.export, "bitmaps": bitmaps,
            });
            // The end of the server removes its exports.
            machine.execute(&Command::new("block-export-add", export))?;
        }
        // QEMU may wait for requests while it adds an export, and hangs if a client begins then.
        let mut contents = DiskContents::default();
        for ((index, disk), stream) in self.disks.iter().enumerate().zip(connections.into_streams()) {
            let label = disk.drive.label.clone();
            let client = Client::open(stream, &Nodes::of(index).export, disk.recorded.as_deref());
            let client = RefCell::new(client.map_err(|error| read_failed(&label, error))?);
            contents.disks.push(DiskContent { space: disk.space, label, client });
        }
        Ok(contents)
    }

    /// What the last checkpoint would have saved belongs to the next one.
    pub(crate) fn capture_failed(&mut self, machine: &mut Machine, changes: &mut Changes) -> Result<()> {
        for Disk { drive, recorded, candidate, .. } in &mut self.disks {
            let Some(begun) = candidate.as_ref() else { continue };
            let Some(recorded) = recorded else {
                machine.execute(&remove_bitmap(&drive.node, begun))?;
                *candidate = None;
                continue;
            };
            let merge = json!({"node": drive.node, "target": recorded, "bitmaps": [begun]});
            let actions = [
                json!({"type": "block-dirty-bitmap-enable", "data": {"node": drive.node, "name": recorded}}),
                json!({"type": "block-dirty-bitmap-merge", "data": merge}),
                json!({"type": "block-dirty-bitmap-remove", "data": {"node": drive.node, "name": begun}}),
            ];
            machine.execute(&Command::new("transaction", json!({ "actions": actions })))?;
            *candidate = None;
        }
        changes.set_lasting(self.undo_bitmaps())
    }

    /// Uses the bitmaps no more: the next checkpoint reads all of each disk.
    pub(crate) fn forget(&mut self) {
        for disk in &mut self.disks {
            disk.unneeded.extend(disk.recorded.take().into_iter().chain(disk.candidate.take()));
        }
    }

    /// Removes all bitmaps that there are.
    fn undo_bitmaps(&self) -> Vec<Command> {
        let bitmaps = |disk: &Disk| {
            let names = disk.unneeded.iter().chain(&disk.recorded).chain(&disk.candidate);
            names.map(|name| remove_bitmap(&disk.drive.node, name)).collect::<Vec<_>>()
        };
        self.disks.iter().flat_map(bitmaps).collect()
    }
}

impl DiskContents {
    /// Visits the pages of a disk that may have changed since the last checkpoint, in ascending
    /// order.
    pub(crate) fn visit(&self, space: SpaceId, visit: VisitPage<'_>) -> Result<(), pagemark::Error> {
        let Some(disk) = self.disks.iter().find(|disk| disk.space == space) else { return Ok(()) };
        let mut client = disk.client.borrow_mut();
        let failed = |error| read_failed(&disk.label, error);
        let disk_end = client.bytes().get();
        let (mut written, mut with_data) = (RangeSet::new(), RangeSet::new());
        for extent in client.extents().map_err(failed)?.into_iter().filter(|extent| extent.is_written) {
            written.insert(extent.range.clone());
            if !extent.is_zero {
                with_data.insert(extent.range);
            }
        }
        let (written, with_data) = (written.into_whole_pages(), with_data.into_whole_pages());
        let mut zeros = written;
        zeros.subtract(&with_data);
        let mut zeros = zeros.iter().flat_map(|range| pages(range.start, range.end)).peekable();
        let parts = with_data.iter().flat_map(|range| {
            let end = range.end.get().min(disk_end);
            let starts = (range.start.get()..end).step_by(REQUEST_BYTES as usize);
            starts.map(move |start| start..(start + REQUEST_BYTES).min(end))
        });
        let mut visited = |start: u64, content: &[u8]| -> Result<(), Visited> {
            let first = Address::new(start).page();
            while let Some(page) = zeros.next_if(|page| *page < first) {
                visit(page, &ZERO_PAGE).map_err(Visited::Visit)?;
            }
            let (whole, rest) = content.as_chunks::<PAGE_SIZE>();
            for (page, content) in pages(Address::new(start), Address::MAX).zip(whole) {
                visit(page, content).map_err(Visited::Visit)?;
            }
            if !rest.is_empty() {
                // The end of the disk need not be that of a page.
                let mut last = ZERO_PAGE;
                last[..rest.len()].copy_from_slice(rest);
                visit(first + whole.len() as u64, &last).map_err(Visited::Visit)?;
            }
            Ok(())
        };
        client.read(parts, &mut visited).map_err(|error| match error {
            Visited::Read(error) => failed(error).into(),
            Visited::Visit(error) => error,
        })?;
        zeros.try_for_each(|page| visit(page, &ZERO_PAGE))
    }
}

static ZERO_PAGE: [u8; PAGE_SIZE] = [0; PAGE_SIZE];

/// Why a disk was not visited to its end.
enum Visited {
    Read(io::Error),
    Visit(pagemark::Error),
}

impl From<io::Error> for Visited {
    fn from(error: io::Error) -> Visited {
        Visited::Read(error)
    }
}

/// The pages from `start` up to `end`, both at borders of pages.
fn pages(start: Address, end: Address) -> impl Iterator<Item = PageNumber> {
    (start.page().get()..end.page().get()).map(PageNumber::new)
}

fn read_failed(label: &str, error: io::Error) -> Error {
    // QEMU's error for a part whose old content it could not keep; the protocol has no better number.
    let is_broken = error.raw_os_error() == Some(libc::EINVAL);
    let error = Error::of(ErrorKind::Disk, "read", Object::Disk(label.to_owned()), error);
    match is_broken {
        true => error.help(format!("make room in {}, or set TMPDIR", temporary_directory().display())),
        false => error,
    }
}

/// Has QEMU serve disks on the socket until the end of the checkpoint.
fn serve(machine: &mut Machine, changes: &mut Changes, connections: &Connections) -> Result<()> {
    connections.give(machine)?;
    let started = changes.execute(machine, connections.start_server(), Command::new("nbd-server-stop", json!({})));
    if started.is_err() {
        // QEMU keeps the descriptor then.
        let _ = machine.execute(&Command::new("closefd", json!({"fdname": SERVER})));
    }
    started.map_err(|error| error.help("QEMU serves disks to one user at a time: end its NBD server"))
}

/// Where temporary files with the content of disks are.
fn temporary_directory() -> PathBuf {
    // `/tmp` may be memory.
    std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from)
}

/// A file without a name, as long as a disk.
fn temporary_file(bytes: ByteCount) -> io::Result<File> {
    let file = tempfile::tempfile_in(temporary_directory())?;
    file.set_len(bytes.get())?;
    Ok(file)
}

fn remove_node(name: &str) -> Command {
    Command::new("blockdev-del", json!({ "node-name": name }))
}

fn remove_bitmap(node: &str, name: &str) -> Command {
    Command::new("block-dirty-bitmap-remove", json!({"node": node, "name": name}))
}

/// Lets a device use another node.
fn set_node(drive: &Drive, node: &str) -> Command {
    Command::new("qom-set", json!({"path": drive.device, "property": "drive", "value": node}))
}
