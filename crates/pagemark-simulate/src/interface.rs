//! QEMU's interface for plugins, as far as it is the same in all versions since 6.0. The functions
//! are QEMU's own, found by name when the plugin is loaded.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

use crate::access::Access;

/// QEMU's number of a plugin.
pub(crate) type PluginId = u64;

/// A block of instructions while it is translated.
#[repr(C)]
pub(crate) struct Block {
    _opaque: [u8; 0],
}

/// An instruction while it is translated.
#[repr(C)]
pub(crate) struct Instruction {
    _opaque: [u8; 0],
}

/// The address of an access in the machine's physical memory.
#[repr(C)]
pub(crate) struct HardwareAddress {
    _opaque: [u8; 0],
}

/// What QEMU tells a plugin of the machine.
#[repr(C)]
pub(crate) struct Info {
    pub(crate) target: *const c_char,
    pub(crate) min_version: c_int,
    pub(crate) version: c_int,
    pub(crate) is_system: bool,
    pub(crate) processors: c_int,
    pub(crate) max_processors: c_int,
}

pub(crate) type OnTranslate = extern "C" fn(PluginId, *mut Block);
pub(crate) type OnInstruction = extern "C" fn(c_uint, *mut c_void);
pub(crate) type OnAccess = extern "C" fn(c_uint, u32, u64, *mut c_void);
pub(crate) type OnExit = extern "C" fn(PluginId, *mut c_void);

/// A callback reads no registers.
const NO_REGISTERS: c_int = 0;
/// Writes.
const STORES: c_int = 2;
/// Reads and writes.
const ALL_ACCESSES: c_int = 3;

/// The functions of QEMU.
#[derive(Clone, Copy)]
pub(crate) struct Functions {
    register_translate: extern "C" fn(PluginId, OnTranslate),
    register_instruction: extern "C" fn(*mut Instruction, OnInstruction, c_int, *mut c_void),
    register_access: extern "C" fn(*mut Instruction, OnAccess, c_int, c_int, *mut c_void),
    register_exit: extern "C" fn(PluginId, OnExit, *mut c_void),
    block_length: extern "C" fn(*const Block) -> usize,
    block_instruction: extern "C" fn(*const Block, usize) -> *mut Instruction,
    instruction_address: extern "C" fn(*const Instruction) -> u64,
    instruction_bytes: extern "C" fn(*const Instruction) -> usize,
    instruction_text: extern "C" fn(*const Instruction) -> *mut c_char,
    access_shift: extern "C" fn(u32) -> c_uint,
    access_is_store: extern "C" fn(u32) -> bool,
    hardware_address: extern "C" fn(u32, u64) -> *mut HardwareAddress,
    address_is_io: extern "C" fn(*const HardwareAddress) -> bool,
    physical_address: extern "C" fn(*const HardwareAddress) -> u64,
}

/// Looks up a function of this process by its name, whose type is that of the result.
macro_rules! function {
    ($name:literal) => {{
        // SAFETY: the name is a string; the lookup has no other conditions.
        let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, concat!($name, "\0").as_ptr().cast()) };
        if found.is_null() {
            return Err($name);
        }
        // SAFETY: it is QEMU's function of that name, whose type is the same in all versions since 6.0.
        unsafe { std::mem::transmute::<*mut std::ffi::c_void, _>(found) }
    }};
}
pub(crate) use function;

impl Functions {
    /// The functions of the QEMU that this process is.
    ///
    /// # Errors
    /// The name of a function that there is not.
    #[allow(clippy::missing_transmute_annotations, reason = "the fields have the types")]
    pub(crate) fn find() -> Result<Functions, &'static str> {
        Ok(Functions {
            register_translate: function!("qemu_plugin_register_vcpu_tb_trans_cb"),
            register_instruction: function!("qemu_plugin_register_vcpu_insn_exec_cb"),
            register_access: function!("qemu_plugin_register_vcpu_mem_cb"),
            register_exit: function!("qemu_plugin_register_atexit_cb"),
            block_length: function!("qemu_plugin_tb_n_insns"),
            block_instruction: function!("qemu_plugin_tb_get_insn"),
            instruction_address: function!("qemu_plugin_insn_vaddr"),
            instruction_bytes: function!("qemu_plugin_insn_size"),
            instruction_text: function!("qemu_plugin_insn_disas"),
            access_shift: function!("qemu_plugin_mem_size_shift"),
            access_is_store: function!("qemu_plugin_mem_is_store"),
            hardware_address: function!("qemu_plugin_get_hwaddr"),
            address_is_io: function!("qemu_plugin_hwaddr_is_io"),
            physical_address: function!("qemu_plugin_hwaddr_phys_addr"),
        })
    }

    pub(crate) fn on_translate(&self, id: PluginId, callback: OnTranslate) {
        (self.register_translate)(id, callback);
    }

    pub(crate) fn on_exit(&self, id: PluginId, callback: OnExit) {
        (self.register_exit)(id, callback, std::ptr::null_mut());
    }

    /// True if a block that is being translated has one instruction.
    pub(crate) fn is_single(&self, block: *const Block) -> bool {
        (self.block_length)(block) == 1
    }

    /// The instructions of a block that is being translated.
    pub(crate) fn instructions(&self, block: *mut Block) -> impl Iterator<Item = *mut Instruction> {
        (0..(self.block_length)(block)).map(move |at| (self.block_instruction)(block, at))
    }

    /// Has `callback` called with `token` before each execution of an instruction.
    pub(crate) fn on_instruction(&self, instruction: *mut Instruction, callback: OnInstruction, token: usize) {
        (self.register_instruction)(instruction, callback, NO_REGISTERS, token as *mut c_void);
    }

    /// Has `callback` called behind each access of an instruction to memory.
    pub(crate) fn on_access(&self, instruction: *mut Instruction, callback: OnAccess) {
        (self.register_access)(instruction, callback, NO_REGISTERS, ALL_ACCESSES, std::ptr::null_mut());
    }

    /// Has `callback` called behind each write of an instruction to memory.
    pub(crate) fn on_store(&self, instruction: *mut Instruction, callback: OnAccess) {
        (self.register_access)(instruction, callback, NO_REGISTERS, STORES, std::ptr::null_mut());
    }

    /// True if an access is one to a device, in its callback.
    pub(crate) fn is_of_device(&self, info: u32, address: u64) -> bool {
        let hardware = (self.hardware_address)(info, address);
        !hardware.is_null() && (self.address_is_io)(hardware)
    }

    /// True if an access is a write, in its callback.
    pub(crate) fn is_store(&self, info: u32) -> bool {
        (self.access_is_store)(info)
    }

    /// The virtual address of an instruction.
    pub(crate) fn address(&self, instruction: *const Instruction) -> u64 {
        (self.instruction_address)(instruction)
    }

    /// The instruction at the end of a block by which the processor waits for an interrupt, if
    /// there is one.
    pub(crate) fn waiting_instruction(&self, block: *mut Block) -> Option<*mut Instruction> {
        // Both end a block.
        const NAMES: [(&str, usize); 2] = [("hlt", 1), ("mwait", 3)];
        let last = (self.block_instruction)(block, (self.block_length)(block).checked_sub(1)?);
        let bytes = (self.instruction_bytes)(last);
        if !NAMES.iter().any(|(_, length)| *length == bytes) {
            return None;
        }
        // Without a disassembler it may be one.
        let is_one = self.text(last).is_none_or(|text| {
            let text = text.to_string_lossy();
            NAMES.iter().any(|(name, _)| text.split_whitespace().next() == Some(name))
        });
        is_one.then_some(last)
    }

    /// The instruction as text. None if this QEMU has no disassembler.
    pub(crate) fn text(&self, instruction: *const Instruction) -> Option<CString> {
        let text = (self.instruction_text)(instruction);
        if text.is_null() {
            return None;
        }
        // SAFETY: QEMU gives a string that belongs to the caller. Its allocator is that of the C library.
        unsafe {
            let owned = CStr::from_ptr(text).to_owned();
            libc::free(text.cast());
            Some(owned)
        }
    }

    /// An access to a virtual address, in its callback.
    pub(crate) fn access(&self, info: u32, address: u64) -> Access {
        let hardware = (self.hardware_address)(info, address);
        let physical =
            (!hardware.is_null() && !(self.address_is_io)(hardware)).then(|| (self.physical_address)(hardware));
        Access { bytes: 1 << (self.access_shift)(info), is_store: (self.access_is_store)(info), address, physical }
    }
}

/// Functions of QEMU that are not part of its interface for plugins. A QEMU that loads modules
/// exports them.
#[derive(Clone, Copy)]
pub(crate) struct BlockLayer {
    lock: extern "C" fn(*const c_char, c_int),
    unlock: extern "C" fn(),
    is_locked: extern "C" fn() -> bool,
    complete_all: extern "C" fn(),
}

impl BlockLayer {
    /// The functions of the QEMU that this process is.
    ///
    /// # Errors
    /// The name of a function that there is not.
    #[allow(clippy::missing_transmute_annotations, reason = "the fields have the types")]
    pub(crate) fn find() -> Result<BlockLayer, &'static str> {
        let complete_all = function!("blk_drain_all");
        // The lock has another name since QEMU 9.0.
        let current = || {
            Ok(BlockLayer {
                lock: function!("bql_lock_impl"),
                unlock: function!("bql_unlock"),
                is_locked: function!("bql_locked"),
                complete_all,
            })
        };
        let earlier = || {
            Ok(BlockLayer {
                lock: function!("qemu_mutex_lock_iothread_impl"),
                unlock: function!("qemu_mutex_unlock_iothread"),
                is_locked: function!("qemu_mutex_iothread_locked"),
                complete_all,
            })
        };
        current().or_else(|_: &str| earlier())
    }

    /// Completes all requests to disks that have begun. Called by the thread of a processor, where
    /// devices may be used.
    pub(crate) fn complete_requests(&self) {
        let is_locked = (self.is_locked)();
        if !is_locked {
            (self.lock)(c"pagemark-simulate".as_ptr(), 0);
        }
        (self.complete_all)();
        if !is_locked {
            (self.unlock)();
        }
    }
}

/// A processor.
#[repr(C)]
struct Processor {
    _opaque: [u8; 0],
}

type OnWork = extern "C" fn(*mut Processor, *mut c_void);

/// Functions by which a processor gets work. They are no part of the interface for plugins, either.
#[derive(Clone, Copy)]
pub(crate) struct Processors {
    find: extern "C" fn(c_int) -> *mut Processor,
    give_work: extern "C" fn(*mut Processor, OnWork, *mut c_void),
}

impl Processors {
    /// The functions of the QEMU that this process is.
    ///
    /// # Errors
    /// The name of a function that there is not.
    #[allow(clippy::missing_transmute_annotations, reason = "the fields have the types")]
    pub(crate) fn find() -> Result<Processors, &'static str> {
        Ok(Processors { find: function!("qemu_get_cpu"), give_work: function!("async_run_on_cpu") })
    }

    /// Called by the one processor before an instruction by which it waits.
    ///
    /// QEMU's main thread passes over the time in which the processor waits. It would do that as
    /// soon as this instruction has said that the processor waits, and before the instructions
    /// since the last pause are added to the clock, which would go too far by as many. To QEMU a
    /// processor that has work does not wait. It does the work, nothing, when its clock is right.
    pub(crate) fn begin_wait(&self) {
        extern "C" fn nothing(_: *mut Processor, _: *mut c_void) {}
        let processor = (self.find)(0);
        if !processor.is_null() {
            (self.give_work)(processor, nothing, std::ptr::null_mut());
        }
    }
}

/// True if QEMU has a version of the interface that no longer takes plugins of version 1.
pub(crate) fn needs_version_2() -> bool {
    // Removed in the version 2, which came with QEMU 9.0.
    // SAFETY: the name is a string; the lookup has no other conditions.
    unsafe {
        let removed = libc::dlsym(libc::RTLD_DEFAULT, c"qemu_plugin_n_vcpus".as_ptr());
        let present = libc::dlsym(libc::RTLD_DEFAULT, c"qemu_plugin_tb_n_insns".as_ptr());
        removed.is_null() && !present.is_null()
    }
}
