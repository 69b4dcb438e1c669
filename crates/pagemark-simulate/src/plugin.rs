//! The entry of the plugin, and its callbacks.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::control::Counter;
use crate::delivery::{self, Recording};
use crate::interface::{Block, BlockLayer, Functions, Info, PluginId, Processors, needs_version_2};
use crate::kind::Kind;
use crate::observation::Observation;
use crate::simulators;

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
    /// None while a machine is recorded.
    counter: Option<Counter>,
    /// None if another plugin observes the machine, and this one only stops it.
    observer: Option<Observer>,
    /// None if the machine has no disks.
    disks: Option<BlockLayer>,
    /// None if QEMU does not export its functions, and the machine has neither disks nor inputs.
    processors: Option<Processors>,
}

/// A simulator, and where its results go.
struct Observer {
    observation: Mutex<Observation>,
    /// True if it needs accesses to memory.
    has_accesses: bool,
    out: PathBuf,
}

static PLUGIN: OnceLock<Plugin> = OnceLock::new();

impl Plugin {
    /// Lets whoever controls QEMU know of an error of the simulator.
    fn report(&self, done: io::Result<()>) {
        if let (Err(error), Some(counter)) = (done, self.counter) {
            counter.fail(&error);
        }
    }

    /// Behind an access of an instruction.
    fn pass_access(&self, info: u32, address: u64) {
        let Plugin { functions, counter, disks, .. } = self;
        let is_stopping = counter.is_some_and(|counter| counter.is_stopping());
        let completes = disks.is_some() && functions.is_store(info);
        if !(is_stopping || completes) || !functions.is_of_device(info, address) {
            return;
        }
        // Requests to disks that the access has begun. Their time would otherwise be that of the host.
        if let Some(disks) = disks.as_ref().filter(|_| completes) {
            disks.complete_requests();
        }
        // QEMU begins an instruction that uses a device twice, and says so once. Where it was to stop, it has stopped
        // between the two. Then this is the last instruction.
        if let Some(counter) = counter {
            counter.wait();
        }
    }
}

impl Observer {
    fn observation(&self) -> MutexGuard<'_, Observation> {
        self.observation.lock().unwrap_or_else(PoisonError::into_inner)
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
            // Without a message, QEMU says that the plugin has failed.
            let _ = writeln!(io::stderr(), "pagemark-simulate: {reason}");
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
    let disks = match option("disks").as_deref() {
        None => None,
        Some("on") => Some(BlockLayer::find().map_err(|name| {
            format!("this QEMU exports no function {name}, so requests to disks cannot be completed at once")
        })?),
        Some(_) => return Err("the option disks= is on, or missing".into()),
    };
    let inputs = option("inputs");
    let control = match disks.is_some() || inputs.is_some() {
        true => option("control"),
        false => Some(needed("control")?),
    };
    let observer = match option("simulator") {
        Some(kind) => {
            let kind: Kind = kind.parse()?;
            let trace = option("trace");
            let simulator = simulators::simulator(kind, trace.as_deref().map(Path::new)).map_err(|error| {
                format!("cannot begin the simulation of {kind} in {}: {error}", trace.unwrap_or_default())
            })?;
            let (observation, has_accesses) = (Mutex::new(Observation::new(simulator)), kind.needs_accesses());
            Some(Observer { observation, has_accesses, out: needed("out")?.into() })
        }
        None => None,
    };
    let map =
        |control: String| Counter::map(control.as_ref()).map_err(|error| format!("cannot map {control}: {error}"));
    let counter = control.map(map).transpose()?;
    let functions = Functions::find().map_err(|name| format!("this QEMU has no function {name}"))?;
    let processors = match Processors::find() {
        Err(name) if disks.is_some() || inputs.is_some() => {
            return Err(format!("this QEMU exports no function {name}, so the machine cannot wait at the same time"));
        }
        found => found.ok(),
    };
    PLUGIN
        .set(Plugin { functions, counter, observer, disks, processors })
        .map_err(|_| "it is loaded twice".to_owned())?;
    if let Some(list) = inputs {
        let is_on = |name: &str| option(name).as_deref() == Some("on");
        let packets = option("network");
        let recording = match is_on("repeats") {
            true => Recording::Repeat,
            false => Recording::Record { has_console: is_on("console"), packets: packets.as_deref().map(Path::new) },
        };
        delivery::begin(list.as_ref(), recording)?;
    }
    functions.on_translate(id, translated);
    functions.on_exit(id, ended);
    Ok(())
}

extern "C" fn translated(_: PluginId, block: *mut Block) {
    let Some(Plugin { functions, counter, observer, disks, processors }) = PLUGIN.get() else { return };
    let mut observation = observer.as_ref().map(Observer::observation);
    // As all are in single steps, by which a machine ends its run.
    let is_single = functions.is_single(block);
    for instruction in functions.instructions(block) {
        let text = || functions.text(instruction).map(|text| text.to_string_lossy().into_owned());
        let address = functions.address(instruction);
        let token = observation.as_mut().map_or(0, |observation| observation.translated(address, &text));
        if counter.is_some() {
            functions.on_instruction(instruction, begun, token);
        }
        if observer.as_ref().is_some_and(|observer| observer.has_accesses) {
            functions.on_access(instruction, accessed);
        } else if counter.is_some() && is_single {
            functions.on_access(instruction, passed);
        } else if disks.is_some() {
            functions.on_store(instruction, passed);
        }
    }
    if let Some(instruction) = processors.and_then(|_| functions.waiting_instruction(block)) {
        functions.on_instruction(instruction, waits, 0);
    }
}

extern "C" fn waits(_: c_uint, _: *mut c_void) {
    if let Some(Plugin { processors: Some(processors), .. }) = PLUGIN.get() {
        processors.begin_wait();
    }
}

extern "C" fn begun(_: c_uint, token: *mut c_void) {
    let Some(plugin @ Plugin { counter: Some(counter), .. }) = PLUGIN.get() else { return };
    let number = counter.begin_instruction();
    if let Some(observer) = &plugin.observer {
        plugin.report(observer.observation().begun(number, token as usize, counter.limits()));
    }
}

extern "C" fn accessed(_: c_uint, info: u32, address: u64, _: *mut c_void) {
    let Some(plugin @ Plugin { functions, observer: Some(observer), .. }) = PLUGIN.get() else { return };
    plugin.report(observer.observation().accessed(functions.access(info, address)));
    plugin.pass_access(info, address);
}

extern "C" fn passed(_: c_uint, info: u32, address: u64, _: *mut c_void) {
    if let Some(plugin) = PLUGIN.get() {
        plugin.pass_access(info, address);
    }
}

extern "C" fn ended(_: PluginId, _: *mut c_void) {
    let Some(plugin @ Plugin { observer: Some(observer), counter: Some(counter), .. }) = PLUGIN.get() else { return };
    let results = observer.observation().results(counter.limits());
    plugin.report(results.and_then(|results| results.write(&observer.out)));
}
