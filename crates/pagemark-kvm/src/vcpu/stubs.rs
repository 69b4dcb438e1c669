//! The guest's kernel: a few instructions and tables. A system call or an exception of the program
//! reaches a stub, whose `out` leaves to the host.

use crate::layout::{PAGE, Physical};
use crate::page_table::{OutOfTables, PageTable};
use crate::sys::table_memory::TableMemory;

use super::KERNEL_CODE;

/// The port of a system call.
pub const CALL_PORT: u16 = 0x11;
/// The port of exception 0; that of exception N is N more.
pub const EXCEPTION_PORT: u16 = 0x20;

/// Bytes of the descriptor table: null, null, kernel code and data, null, user data and code, null,
/// and two for the task.
pub const DESCRIPTOR_BYTES: u16 = 10 * 8;
/// Bytes of the interrupt table: the 32 exceptions.
pub const INTERRUPT_BYTES: u16 = 32 * 16;
/// Where the bitmap of ports is in the task state.
const PORTS_AT: u16 = 0x68;
/// Ports 0 to 23, and the end of the bitmap: only [`CALL_PORT`] is allowed. Under PVM the stub of
/// system calls runs with the program's rights. A program that uses the port itself is recognized
/// by where it does.
const PORTS: [u8; 4] = [0xff, 0xff, 0xff ^ 1 << (CALL_PORT - 16), 0xff];
/// Bytes of the task state, with the bitmap.
pub const TASK_BYTES: u16 = PORTS_AT + PORTS.len() as u16;

/// Bytes of the stub of an exception.
pub const STUB_BYTES: u64 = 16;
/// Bytes of the stubs of all exceptions, behind which that of system calls is.
pub const EXCEPTION_STUBS_BYTES: u64 = 32 * STUB_BYTES;

/// Guest-virtual addresses of the guest's kernel.
#[derive(Clone, Copy, Debug)]
pub struct Stubs {
    /// The descriptor table.
    pub descriptors: u64,
    /// The interrupt table.
    pub interrupts: u64,
    /// The stub of system calls.
    pub call: u64,
}

/// Writes the stubs and tables to new pages of `memory`, and maps them.
pub fn write(memory: &TableMemory, table: &PageTable<'_>) -> Result<Stubs, OutOfTables> {
    let page = || memory.allocate().ok_or(OutOfTables);
    let (descriptors, interrupts, code) = (page()?, page()?, page()?);
    table.map_kernel(descriptors.in_kernel(), descriptors)?;
    table.map_kernel(interrupts.in_kernel(), interrupts)?;
    table.map_stubs(code.in_kernel(), code)?;
    let entries: [u64; 8] =
        [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0, 0x00cf_f300_0000_ffff, 0x00af_fb00_0000_ffff, 0];
    let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    memory.write(descriptors, &bytes);
    for vector in 0..32u64 {
        // An entry of the interrupt table has as many bytes.
        let offset = vector * STUB_BYTES;
        // out imm8, al; hlt: the host never goes on behind the `out`.
        memory.write(code.plus(offset), &[0xe6, EXCEPTION_PORT as u8 + vector as u8, 0xf4, 0xf4]);
        let handler = code.plus(offset).in_kernel();
        // Programs may execute `int3` and `into`, but no other `int`.
        let kind: u64 = if matches!(vector, 3 | 4) { 0xee } else { 0x8e };
        let low = handler & 0xffff | u64::from(KERNEL_CODE) << 16 | kind << 40 | (handler >> 16 & 0xffff) << 48;
        memory.write(interrupts.plus(offset), &low.to_le_bytes());
        memory.write(interrupts.plus(offset + 8), &(handler >> 32).to_le_bytes());
    }
    let call = code.plus(EXCEPTION_STUBS_BYTES);
    memory.write(call, &[0xe6, CALL_PORT as u8, 0xf4, 0xf4]);
    Ok(Stubs { descriptors: descriptors.in_kernel(), interrupts: interrupts.in_kernel(), call: call.in_kernel() })
}

/// Writes the task state of a virtual CPU to its page, whose rest is the kernel stack. Returns its
/// guest-virtual address.
pub fn task(memory: &TableMemory, page: Physical) -> u64 {
    let stack = page.plus(PAGE).in_kernel();
    let mut state = [0; TASK_BYTES as usize];
    // RSP0, and the offset of the bitmap of ports.
    state[4..12].copy_from_slice(&stack.to_le_bytes());
    state[0x66..0x68].copy_from_slice(&PORTS_AT.to_le_bytes());
    state[usize::from(PORTS_AT)..].copy_from_slice(&PORTS);
    memory.write(page, &state);
    page.in_kernel()
}

/// Whether programs may use the instructions that read and write the bases of FS and GS.
pub fn has_fsgsbase() -> bool {
    // Bit 1 of AT_HWCAP2: the host's kernel allows them.
    // SAFETY: reads the auxiliary vector.
    unsafe { libc::getauxval(libc::AT_HWCAP2) & 2 != 0 }
}
