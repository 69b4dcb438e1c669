//! A module of Redis that has the server take checkpoints of its heap: an example of a program that
//! knows nothing of the heap, and calls it from a plug-in, where its data is consistent.
//!
//! ```text
//! cargo build --release -p pagemark-malloc --lib --examples
//! PAGEMARK_HEAP_PARTS=4 LD_PRELOAD=$PWD/target/release/libpagemark_malloc.so \
//!     redis-server --loadmodule $PWD/target/release/examples/libredis_module.so
//! redis-cli pagemark.track by-cost
//! redis-cli pagemark.checkpoint /tmp/checkpoints
//! ```
//!
//! `pagemark.track STRATEGY` starts to track. `pagemark.checkpoint FILE` appends to the file what
//! was written since the last call, and returns when it is on disk; with an empty name, it only
//! finds out what was written. Its reply has the numbers of [`Checkpoint`], in their order.
//!
//! Redis executes commands in one thread, so no other one writes its data meanwhile.

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_long, c_longlong, c_void};
use std::fs::File;
use std::mem::transmute;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

/// The version of the interface between Redis and its modules.
const API_VERSION: c_int = 1;
const MODULE_VERSION: c_int = 1;
/// What the functions of modules return.
const OK: c_int = 0;
const FAILED: c_int = 1;

/// A context and a string of Redis, which only Redis looks into.
type Context = c_void;
type Text = c_void;
type Command = unsafe extern "C" fn(*mut Context, *mut *mut Text, c_int) -> c_int;

/// The result of `pagemark_heap_checkpoint`, as `pagemark_malloc.h` declares it.
#[repr(C)]
#[derive(Default)]
struct Checkpoint {
    faults: u64,
    merges: u64,
    splits: u64,
    bytes: u64,
    ranges: u64,
    collect_ns: u64,
    save_ns: u64,
}

type StringBytes = unsafe extern "C" fn(*const Text, *mut usize) -> *const c_char;
type ReplyArray = unsafe extern "C" fn(*mut Context, c_long) -> c_int;
type ReplyNumber = unsafe extern "C" fn(*mut Context, c_longlong) -> c_int;
type ReplyError = unsafe extern "C" fn(*mut Context, *const c_char) -> c_int;
type Track = unsafe extern "C" fn(*const c_char) -> c_int;
type TakeCheckpoint = unsafe extern "C" fn(c_int, *mut Checkpoint) -> c_int;

/// The functions of Redis and of the heap.
struct Functions {
    string: StringBytes,
    reply_array: ReplyArray,
    reply_number: ReplyNumber,
    reply_error: ReplyError,
    track: Track,
    checkpoint: TakeCheckpoint,
}

static FUNCTIONS: OnceLock<Functions> = OnceLock::new();

/// Where Redis begins with a module.
///
/// # Safety
/// Redis calls it with a context, which begins with the function that finds the others.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn RedisModule_OnLoad(context: *mut Context, _: *mut *mut Text, _: c_int) -> c_int {
    // SAFETY: the caller guarantees it.
    if unsafe { load(context) }.is_some() { OK } else { FAILED }
}

/// # Safety
/// Those of [`RedisModule_OnLoad`].
unsafe fn load(context: *mut Context) -> Option<()> {
    type GetApi = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
    type SetAttributes = unsafe extern "C" fn(*mut Context, *const c_char, c_int, c_int);
    type Create =
        unsafe extern "C" fn(*mut Context, *const c_char, Command, *const c_char, c_int, c_int, c_int) -> c_int;
    // SAFETY: the context begins with the address of this function.
    let get_api = unsafe { transmute::<*mut c_void, GetApi>(*context.cast::<*mut c_void>()) };
    let api = |name: &CStr| {
        let mut function = std::ptr::null_mut();
        // SAFETY: the name is a string, and the function is stored in the variable.
        let result = unsafe { get_api(name.as_ptr(), &mut function) };
        (result == OK && !function.is_null()).then_some(function)
    };
    // SAFETY: the name is a string.
    let of_heap =
        |name: &CStr| Some(unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }).filter(|it| !it.is_null());
    // SAFETY: `redismodule.h` and `pagemark_malloc.h` declare the functions so.
    unsafe {
        let set_attributes = transmute::<*mut c_void, SetAttributes>(api(c"RedisModule_SetModuleAttribs")?);
        set_attributes(context, c"pagemark".as_ptr(), MODULE_VERSION, API_VERSION);
        let _ = FUNCTIONS.set(Functions {
            string: transmute::<*mut c_void, StringBytes>(api(c"RedisModule_StringPtrLen")?),
            reply_array: transmute::<*mut c_void, ReplyArray>(api(c"RedisModule_ReplyWithArray")?),
            reply_number: transmute::<*mut c_void, ReplyNumber>(api(c"RedisModule_ReplyWithLongLong")?),
            reply_error: transmute::<*mut c_void, ReplyError>(api(c"RedisModule_ReplyWithError")?),
            track: transmute::<*mut c_void, Track>(of_heap(c"pagemark_heap_track")?),
            checkpoint: transmute::<*mut c_void, TakeCheckpoint>(of_heap(c"pagemark_heap_checkpoint")?),
        });
        let create = transmute::<*mut c_void, Create>(api(c"RedisModule_CreateCommand")?);
        let commands: [(&CStr, Command); 2] = [(c"pagemark.track", track), (c"pagemark.checkpoint", checkpoint)];
        for (name, command) in commands {
            if create(context, name.as_ptr(), command, c"admin".as_ptr(), 0, 0, 0) != OK {
                return None;
            }
        }
    }
    Some(())
}

/// The argument of a command that has one.
///
/// # Safety
/// Redis has passed the arguments.
unsafe fn argument<'a>(functions: &Functions, arguments: *mut *mut Text, count: c_int) -> Option<&'a [u8]> {
    if count != 2 {
        return None;
    }
    let mut length = 0;
    // SAFETY: there are as many arguments, which exist during the command.
    unsafe {
        let bytes = (functions.string)(*arguments.add(1), &mut length);
        Some(std::slice::from_raw_parts(bytes.cast(), length))
    }
}

/// # Safety
/// Redis has passed the context.
unsafe fn reply_error(functions: &Functions, context: *mut Context, reason: &str) -> c_int {
    let text = CString::new(format!("ERR {reason}")).unwrap_or_default();
    // SAFETY: the caller guarantees it. Redis copies the text.
    unsafe { (functions.reply_error)(context, text.as_ptr()) }
}

unsafe extern "C" fn track(context: *mut Context, arguments: *mut *mut Text, count: c_int) -> c_int {
    let Some(functions) = FUNCTIONS.get() else { return FAILED };
    // SAFETY: Redis has passed all of this.
    unsafe {
        let Some(strategy) = argument(functions, arguments, count).and_then(|name| CString::new(name).ok()) else {
            return reply_error(functions, context, "name a strategy: separate, by-history or by-cost");
        };
        match (functions.track)(strategy.as_ptr()) {
            0 => (functions.reply_number)(context, 0),
            error => reply_error(functions, context, &std::io::Error::from_raw_os_error(error).to_string()),
        }
    }
}

unsafe extern "C" fn checkpoint(context: *mut Context, arguments: *mut *mut Text, count: c_int) -> c_int {
    let Some(functions) = FUNCTIONS.get() else { return FAILED };
    // SAFETY: Redis has passed all of this, and the file is open.
    unsafe {
        let Some(name) = argument(functions, arguments, count) else {
            return reply_error(functions, context, "name a file");
        };
        let opened = match name {
            [] => Ok(None),
            name => File::options().create(true).append(true).open(OsStr::from_bytes(name)).map(Some),
        };
        let file = match opened {
            Ok(file) => file,
            Err(error) => return reply_error(functions, context, &error.to_string()),
        };
        let mut taken = Checkpoint::default();
        match (functions.checkpoint)(file.as_ref().map_or(-1, AsRawFd::as_raw_fd), &mut taken) {
            0 => {}
            error => {
                return reply_error(functions, context, &std::io::Error::from_raw_os_error(error).to_string());
            }
        }
        let Checkpoint { faults, merges, splits, bytes, ranges, collect_ns, save_ns } = taken;
        let numbers = [faults, merges, splits, bytes, ranges, collect_ns, save_ns];
        (functions.reply_array)(context, numbers.len() as c_long);
        for number in numbers {
            (functions.reply_number)(context, number as c_longlong);
        }
        OK
    }
}
