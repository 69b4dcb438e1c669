//! A checkpoint as a dump of a machine: the format of QEMU's `dump-guest-memory`, an ELF core file
//! by physical address, which `crash` and `gdb` open.

use std::fs::File;
use std::os::unix::fs::FileExt;

use object::elf::{EM_386, EM_X86_64, NT_PRSTATUS};
use pagemark::repository::Checkpoint;
use pagemark::{Address, ByteCount, PageTree};
use pagemark_linux::elf::{self, CoreSegment};

use crate::error::{Error, ErrorKind, Object, Result};
use crate::memory::memory_map::Segment;
use crate::memory::registers::{self, Registers, SegmentRegister};
use crate::restore::Restore;
use crate::restore::images::copy_pages;

/// The processors whose registers are known here, by QEMU's name.
const TARGET: &str = "x86_64";

/// The kind and the version of QEMU's own note.
const NT_QEMU: u32 = 0;
const QEMU_NOTE_VERSION: u32 = 1;

/// Writes the memory of a virtual machine, by physical address, and the registers of its processors
/// to an empty file: what QEMU's `dump-guest-memory` writes of a machine that is stopped. Zeros
/// become holes of the file. Video memory and ROM that have an address are part of it. The note of
/// the device `vmcoreinfo`, which the guest supplies, is not.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if the checkpoint does not say where its memory is, or if the machine
/// has other processors than x86-64; [`ErrorKind::Memory`], [`ErrorKind::Damaged`],
/// [`ErrorKind::Store`], [`ErrorKind::System`].
///
/// ```no_run
/// use std::fs::File;
/// use std::path::Path;
///
/// use pagemark::repository::Repository;
///
/// let checkpoint = Repository::open(Path::new("checkpoints"))?.read("vm1", 12)?;
/// pagemark_vm::export_core(&checkpoint, &File::create_new("vm1.core")?)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn export_core(checkpoint: &Checkpoint, file: &File) -> Result<()> {
    let restore = Restore::new(checkpoint);
    let unsupported = |reason: String| Error::about(ErrorKind::Unsupported, Object::None, reason);
    let target = restore.startup()?.kind.map(|kind| kind.target);
    if let Some(other) = target.filter(|target| target != TARGET) {
        return Err(unsupported(format!("a machine with processors of type {other} cannot be written as a core file")));
    }
    let map = restore.memory_map()?.ok_or_else(|| {
        let reason = "the checkpoint does not say at which addresses its memory is";
        let help = "the machine was rearranging its memory at that moment, or the checkpoint was made by an earlier \
                    version of Pagemark: take another checkpoint";
        unsupported(reason.into()).help(help)
    })?;
    let spaces = restore.ram_spaces()?;
    let blocks: Vec<(&str, ByteCount)> = spaces.iter().map(|(space, bytes)| (space.label.as_str(), *bytes)).collect();
    let segments = map.segments(&blocks)?;
    let processors = registers::of_processors(&restore.devices()?)?;

    let failed = |error| Error::system("write the core file")(error);
    let is_long_mode = processors.first().is_some_and(Registers::is_long_mode);
    // QEMU gives the physical address as the virtual one, too.
    let parts = segments.iter().map(|&Segment { start, bytes, .. }| CoreSegment {
        address: start,
        physical: start,
        bytes,
        file_bytes: bytes,
        ..CoreSegment::default()
    });
    let parts: Vec<_> = parts.collect();
    let head = elf::core_head(if is_long_mode { EM_X86_64 } else { EM_386 }, &notes(&processors), &parts);
    let memory_at = head.len() as u64;
    file.write_all_at(&head, 0).map_err(failed)?;
    file.set_len(memory_at + segments.iter().map(|segment| segment.bytes).sum::<u64>()).map_err(failed)?;
    let mut at = memory_at;
    for segment in &segments {
        let root = spaces.get(segment.block).map(|(space, _)| space.root);
        let tree = PageTree::load(root.unwrap_or(pagemark::ContentId::ZERO), restore.store())?;
        write_segment(&restore, &tree, segment, &|bytes, offset| file.write_all_at(bytes, at + offset))?;
        at += segment.bytes;
    }
    Ok(())
}

/// Writes the content of a segment: bytes, and where they are in the segment.
fn write_segment(
    restore: &Restore<'_>,
    tree: &PageTree,
    segment: &Segment,
    write: &(dyn Fn(&[u8], u64) -> std::io::Result<()> + Sync),
) -> Result<()> {
    let wanted = segment.offset..segment.offset + segment.bytes;
    let pages = Address::new(wanted.start).page()..Address::new(wanted.end).page_aligned_up().page();
    let (targets, ids): (Vec<_>, Vec<_>) = tree.range(pages).unzip();
    let copied = copy_pages(restore.store(), &ids, &targets, &|page, content| {
        // A segment need not begin or end with a page.
        let start = page.address().get();
        let from = wanted.start.max(start);
        let to = wanted.end.min(start + content.len() as u64);
        write(&content[(from - start) as usize..(to - start) as usize], from - wanted.start)
    });
    copied?.map_err(Error::system("write the core file"))
}

/// The notes of all processors, in QEMU's order.
fn notes(processors: &[Registers]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (registers, id) in processors.iter().zip(1u32..) {
        let status = if registers.is_long_mode() { status_64(registers, id) } else { status_32(registers, id) };
        elf::add_note(&mut bytes, "CORE", NT_PRSTATUS, &status);
    }
    for registers in processors {
        elf::add_note(&mut bytes, "QEMU", NT_QEMU, &qemu_note(registers));
    }
    bytes
}

/// `struct elf_prstatus` of 64 bits, of which QEMU sets the id and the registers.
fn status_64(registers: &Registers, id: u32) -> Vec<u8> {
    let [ax, cx, dx, bx, sp, bp, si, di, r8, r9, r10, r11, r12, r13, r14, r15] = registers.general;
    let [es, cs, ss, ds, fs, gs] = registers.segments;
    let selector = |segment: SegmentRegister| u64::from(segment.selector);
    let mut bytes = vec![0; 32];
    bytes.extend(id.to_le_bytes());
    bytes.resize(112, 0);
    // The last number of a system call is none.
    let call = 0;
    let words = [r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di, call, registers.rip];
    words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    let words = [
        selector(cs),
        registers.flags,
        sp,
        selector(ss),
        fs.base,
        gs.base,
        selector(ds),
        selector(es),
        selector(fs),
        selector(gs),
    ];
    words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    bytes.resize(bytes.len() + 8, 0);
    bytes
}

/// `struct elf_prstatus` of 32 bits, for a processor that is not in 64-bit mode.
fn status_32(registers: &Registers, id: u32) -> Vec<u8> {
    let [ax, cx, dx, bx, sp, bp, si, di, ..] = registers.general;
    let [es, cs, ss, ds, fs, gs] = registers.segments.map(|segment| u64::from(segment.selector & 0xffff));
    let mut bytes = vec![0; 24];
    bytes.extend(id.to_le_bytes());
    bytes.resize(72, 0);
    let call = 0;
    let words = [bx, cx, dx, si, di, bp, ax, ds, es, fs, gs, call, registers.rip, cs, registers.flags, sp, ss];
    words.iter().for_each(|word| bytes.extend((*word as u32).to_le_bytes()));
    bytes.resize(bytes.len() + 4, 0);
    bytes
}

/// QEMU's own note: all registers that a debugger needs to translate addresses.
fn qemu_note(registers: &Registers) -> Vec<u8> {
    const BYTES: u32 = 440;
    let [ax, cx, dx, bx, sp, bp, si, di, rest @ ..] = registers.general;
    let [es, cs, ss, ds, fs, gs] = registers.segments;
    let [ldt, task, gdt, idt] = registers.tables;
    let [cr0, cr2, cr3, cr4] = registers.control;
    let mut bytes = Vec::with_capacity(BYTES as usize);
    bytes.extend(QEMU_NOTE_VERSION.to_le_bytes());
    bytes.extend(BYTES.to_le_bytes());
    let words = [ax, bx, cx, dx, si, di, sp, bp].into_iter().chain(rest).chain([registers.rip, registers.flags]);
    words.for_each(|word| bytes.extend(word.to_le_bytes()));
    for segment in [cs, ds, es, fs, gs, ss, ldt, task, gdt, idt] {
        let words = [segment.selector, segment.limit, segment.flags, 0];
        words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
        bytes.extend(segment.base.to_le_bytes());
    }
    // There is no CR1.
    let words = [cr0, 0, cr2, cr3, cr4, registers.kernel_gs_base];
    words.iter().for_each(|word| bytes.extend(word.to_le_bytes()));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_have_the_lengths_of_their_structures() {
        let registers = Registers::default();
        assert_eq!((status_64(&registers, 1).len(), status_32(&registers, 1).len()), (336, 144));
        assert_eq!(qemu_note(&registers).len(), 440);
    }
}
