//! What the fuzz targets in `fuzz/` call: readers that are private otherwise.

use std::io::{self, Write};
use std::net::Shutdown;
use std::ops::Range;
use std::os::unix::net::UnixStream;

use serde_json::{Value, json};

use crate::checkpoint::nbd;
use crate::memory::memory_map::MemoryMap;
use crate::memory::{ram_blocks, registers};
use crate::qemu::event::{self, MachineEvent};
use crate::qemu::qmp::Monitor;
use crate::qemu::{command_line, drive, medium};

/// A socket from which `bytes` can be read, and then the end.
fn sender(bytes: &[u8]) -> io::Result<(UnixStream, UnixStream)> {
    let (ours, mut theirs) = UnixStream::pair()?;
    theirs.set_nonblocking(true)?;
    theirs.write_all(bytes)?;
    theirs.shutdown(Shutdown::Write)?;
    Ok((ours, theirs))
}

/// Executes commands over a monitor that sends `replies` and ends.
pub fn monitor(replies: &[u8]) {
    let Ok((ours, _theirs)) = sender(replies) else { return };
    let Ok(mut monitor) = Monitor::over(ours) else { return };
    monitor.expect_no_move();
    let _ = monitor.execute("query-status", json!({}));
    let _ = monitor.human("info ramblock").map(|text| ram_blocks::parse(&text));
    let _ = monitor.resume();
    let _ = monitor.stood_still();
    let _ = monitor.take_events();
}

/// Examines a message of the monitor and the parts of one that describe disks.
pub fn monitor_message(message: &Value, arguments: &[String]) {
    let _ = (MachineEvent::of_message(message), event::moves_the_machine(message), event::time(message));
    let _ = drive::of_block(message, std::slice::from_ref(message), arguments);
    let _ = medium::of_block(message).map(|medium| medium.insert());
}

/// Reads a disk from a block server that sends `replies` and ends.
pub fn block_server(replies: &[u8]) {
    let read = || -> io::Result<()> {
        let (ours, _theirs) = sender(replies)?;
        let mut client = nbd::Client::open(ours, "disk", Some("written"))?;
        let extents = client.extents()?;
        let parts = extents.iter().map(|extent| extent.range.start.get()..extent.range.end.get());
        let parts = parts.map(|part: Range<u64>| part.start..part.end.min(part.start + nbd::REQUEST_BYTES));
        client.read(parts.take(64), &mut |_, _| Ok::<(), io::Error>(()))
    };
    let _ = read();
}

/// Reads texts that QEMU writes for people.
pub fn texts(text: &str) {
    let blocks = ram_blocks::parse(text).unwrap_or_default();
    let blocks: Vec<_> = blocks.iter().map(|block| (block.id.as_str(), block.total)).collect();
    if let Some(map) = MemoryMap::parse(text) {
        let _ = map.segments(&blocks);
    }
}

/// Examines a command line of QEMU.
pub fn command_line(arguments: &[String]) {
    let _ = command_line::machine_name(arguments);
    let _ = command_line::monitor_paths(arguments);
    let _ = command_line::own_arguments(arguments);
    let _ = command_line::arguments_of_restore(arguments, Some("pc-q35-7.2"));
    for argument in arguments {
        let _ = command_line::split_options(argument);
        let _ = command_line::served_path(argument);
        let _ = drive::with_qcow2(argument);
        let _ = drive::with_other_file(argument, "disk.img", "other,image");
        let _ = drive::names_file(argument, "disk.img");
    }
}

/// Reads the registers in the state of a machine's devices, as QEMU writes it.
pub fn processors(state: &[u8]) {
    let _ = registers::of_processors(state);
}
