//! A file as a block of QEMU's memory: QEMU is made to map it.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use pagemark_linux::proc;
use pagemark_linux::proc::descriptors::Descriptor;
use pagemark_trace::attach;
use pagemark_trace::inject::{self, Call};
use serde_json::json;

use crate::error::{Error, ErrorKind, Object, Result};
use crate::memory::ram_blocks::RamBlock;
use crate::qemu::machine::Machine;

/// Makes QEMU map `file` privately in place of a block of its memory.
pub fn map_privately(machine: &mut Machine, file: &File, block: &RamBlock) -> Result<()> {
    const NAME: &str = "pagemark-memory";
    let failed =
        |error: io::Error| Error::of(ErrorKind::System, "map shared memory into", Object::Process(machine.pid), error);
    machine.monitor.execute_with("getfd", json!({ "fdname": NAME }), Some(file.as_fd()))?;
    let number = descriptor_of(machine.pid, file).map_err(failed)?;
    let (start, bytes) = (block.range.start.get(), block.bytes().get());
    let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE) as u64;
    let map = [start, bytes, protection, flags, number as u64, 0];
    // As QEMU does with its own memory: what it forks has no use for it.
    let advise = [start, bytes, libc::MADV_DONTFORK as u64, 0, 0, 0];
    let calls = [(libc::SYS_mmap, map), (libc::SYS_madvise, advise)];
    inject::system_calls(
        attach::find(machine.pid)?,
        calls.map(|(number, arguments)| Call { number, arguments }).into(),
    )?;
    machine.monitor.execute("closefd", json!({ "fdname": NAME })).map(drop)
}

/// The number under which a process has the file open.
fn descriptor_of(pid: i32, file: &File) -> io::Result<i32> {
    let wanted = file.metadata()?;
    let is_wanted = |descriptor: &Descriptor| {
        // A descriptor may be closed meanwhile.
        let found = fs::metadata(descriptor.path());
        found.is_ok_and(|found| (found.dev(), found.ino()) == (wanted.dev(), wanted.ino()))
    };
    let found = proc::descriptors(pid)?.into_iter().find(is_wanted);
    found.map(|descriptor| descriptor.number).ok_or_else(|| io::ErrorKind::NotFound.into())
}
