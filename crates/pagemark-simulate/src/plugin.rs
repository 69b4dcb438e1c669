//! The entry of the plugin, and its callbacks.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::control::Counter;
use crate::interface::{Block, Functions, Info, PluginId, needs_version_2};
use crate::simulators::{Access, Kind, Simulator};

/// The version of the interface, which QEMU reads when it has loaded the library.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "QEMU's name")]
static qemu_plugin_version: AtomicI32 = AtomicI32::new(1);

/// Sets the version before QEMU reads it.
#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    if needs_version_2() {
        qemu_plugin_version.store(2, Ordering::Relaxed);
    }
}

/// The plugin that is installed.
struct Plugin {
    functions: Functions,
    counter: Counter,
    /// None if another plugin observes the machine, and this one only stops it.
    observer: Option<Observer>,
}

/// A simulator, and where its results go.
struct Observer {
    simulator: Mutex<Box<dyn Simulator>>,
    /// True if it needs accesses to memory.
    has_accesses: bool,
    out: PathBuf,
}

static PLUGIN: OnceLock<Plugin> = OnceLock::new();

impl Observer {
    fn simulator(&self) -> MutexGuard<'_, Box<dyn Simulator>> {
        self.simulator.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Installs the plugin. QEMU ends if the result is not 0.
///
/// # Safety
/// Only QEMU calls it: `info` is valid, and `arguments` are `count` strings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn qemu_plugin_install(
    id: PluginId,
    info: *const Info,
    count: c_int,
    arguments: *const *const c_char,
) -> c_int {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: QEMU passes `count` strings.
    let arguments = (0..count).map(|at| unsafe { CStr::from_ptr(*arguments.add(at)) });
    let arguments = arguments.map(|argument| argument.to_string_lossy().into_owned()).collect();
    // SAFETY: QEMU passes its own description.
    match install(id, unsafe { &*info }, arguments) {
        Ok(()) => 0,
        Err(reason) => {
            eprintln!("pagemark-simulate: {reason}");
            1
        }
    }
}

fn install(id: PluginId, info: &Info, arguments: Vec<String>) -> Result<(), String> {
    if !info.is_system || info.processors != 1 {
        return Err("it simulates machines with one processor".into());
    }
    let option = |name: &str| {
        let values = arguments.iter().filter_map(|argument| argument.split_once('='));
        values.rev().find_map(|(key, value)| (key == name).then(|| value.to_owned()))
    };
    let needed = |name: &str| option(name).ok_or_else(|| format!("the option {name}= is missing"));
    let control = needed("control")?;
    let observer = match option("simulator") {
        Some(kind) => {
            let kind: Kind = kind.parse()?;
            let (simulator, has_accesses) = (Mutex::new(kind.simulator()), kind.needs_accesses());
            Some(Observer { simulator, has_accesses, out: needed("out")?.into() })
        }
        None => None,
    };
    let counter = Counter::map(control.as_ref()).map_err(|error| format!("cannot map {control}: {error}"))?;
    let functions = Functions::find().map_err(|name| format!("this QEMU has no function {name}"))?;
    PLUGIN.set(Plugin { functions, counter, observer }).map_err(|_| "it is loaded twice".to_owned())?;
    functions.on_translate(id, translated);
    functions.on_exit(id, ended);
    Ok(())
}

extern "C" fn translated(_: PluginId, block: *mut Block) {
    let Some(Plugin { functions, observer, .. }) = PLUGIN.get() else { return };
    let mut simulator = observer.as_ref().map(Observer::simulator);
    for instruction in functions.instructions(block) {
        let text = || functions.text(instruction).map(|text| text.to_string_lossy().into_owned());
        let address = functions.address(instruction);
        let token = simulator.as_mut().map_or(0, |simulator| simulator.translated(address, &text));
        functions.on_instruction(instruction, begun, token);
        if observer.as_ref().is_some_and(|observer| observer.has_accesses) {
            functions.on_access(instruction, accessed);
        }
    }
}

extern "C" fn begun(_: c_uint, token: *mut c_void) {
    let Some(plugin) = PLUGIN.get() else { return };
    plugin.counter.begin_instruction();
    if let Some(observer) = &plugin.observer {
        observer.simulator().begun(token as usize);
    }
}

extern "C" fn accessed(_: c_uint, info: u32, address: u64, _: *mut c_void) {
    let Some(Plugin { functions, observer: Some(observer), .. }) = PLUGIN.get() else { return };
    let (bytes, is_store, physical) = functions.access(info, address);
    observer.simulator().accessed(Access { bytes, is_store, physical });
}

extern "C" fn ended(_: PluginId, _: *mut c_void) {
    let Some(Plugin { observer: Some(observer), .. }) = PLUGIN.get() else { return };
    let results = observer.simulator().results();
    // Whoever controls QEMU sees that there are no results.
    if let Err(error) = results.write(&observer.out) {
        eprintln!("pagemark-simulate: cannot write {}: {error}", observer.out.display());
    }
}
