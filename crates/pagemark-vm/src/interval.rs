//! The simulation of an interval: a machine runs again from a checkpoint to a later one, watched by
//! a plugin of QEMU, and must be there what it was (SimuBoost; PML, section 2.2).
//!
//! The machine has to stop at an exact instruction. QEMU counts those that were completed, and
//! shows the count of a machine that is stopped. The plugin counts those that were begun: more, by
//! those that faults interrupted. So the machine is stopped some way before the end, where the two
//! counts are compared, and goes on in single steps: each block of QEMU's has one instruction, and
//! QEMU looks behind each whether it is to stop.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use pagemark::repository::{Checkpoint, SpaceRecord};
use pagemark::sys::pagemap::{Filter, PRESENT, Pagemap, SWAPPED};
use pagemark::sys::proc::{self, Call, Mapping, maps};
use pagemark::sys::sparse;
use pagemark::{Address, ByteCount, ContentId, PAGE_SIZE, PageNumber, PageTree, RangeSet};
use pagemark_simulate::control::Control;
use pagemark_simulate::{Kind, Results};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::changes::Changes;
use crate::command::text;
use crate::command_line::{arguments_of_restore, records_inputs};
use crate::demanded::{DemandedBlock, DemandedMemory, MissingMemory};
use crate::deterministic::arguments_of_simulation;
use crate::error::{Error, ErrorKind, Object, Result};
use crate::given_files;
use crate::images::copy_pages;
use crate::input_list::InputList;
use crate::instruction_count::{first_difference, instruction_count};
use crate::machine::Machine;
use crate::map_file::map_privately;
use crate::node_memory::{Base, MIN_BLOCK, NodeMemory, tree_of};
use crate::ram_blocks::RamBlock;
use crate::restore::{Fill, Progress, Restore, load_devices, pair};
use crate::served_disk::ServedDisk;
use crate::simulator::{COMPLETES_REQUESTS, completes_requests, option_word, shared_file};
use crate::started::{Started, Streams};

/// How many instructions before its end the machine is stopped first. Single steps are slow, and
/// what is executed after the machine was to stop must be less.
const STEPPED: u64 = 20_000;

const POLL: Duration = Duration::from_millis(1);

/// How long QEMU may take to begin a stop.
const STOP_LIMIT: Duration = Duration::from_secs(60);

/// How long a machine executes nothing until QEMU is asked whether it runs.
const IDLE: Duration = Duration::from_millis(100);

/// How long a machine may execute nothing. Its clock follows its instructions, and passes over the
/// time in which it waits.
const IDLE_LIMIT: Duration = Duration::from_secs(60);

/// The same behind the end of an interval, where it may have nothing to do any more.
const LAST_IDLE_LIMIT: Duration = Duration::from_secs(10);

/// How many pages may differ where a machine is one instruction away from a checkpoint.
const MAX_CHANGED_PAGES: usize = 256;

/// The option of the plugin by which the machine gets the inputs that were written down.
const REPEATS_INPUTS: &str = "repeats=on";

/// Bytes of memory that are compared at a time.
const COMPARED_BYTES: usize = 1 << 20;

/// How often QEMU's main thread must be found in the same wait until it is known to wait.
const WAITING_COUNT: u32 = 3;

/// What observes the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Observer {
    /// A simulator of Pagemark's, other than [`Kind::Trace`].
    Simulator(Kind),
    /// The simulator [`Kind::Trace`], which writes to this file. Its content is replaced.
    Trace(PathBuf),
    /// A plugin of QEMU: the value of its option `-plugin`.
    Plugin(String),
}

/// An interval between two checkpoints of a machine.
///
/// ```no_run
/// use std::path::Path;
///
/// use pagemark::repository::Repository;
/// use pagemark_vm::{Interval, Observer};
///
/// let repository = Repository::open(Path::new("checkpoints"))?;
/// let (from, to) = (repository.read("vm1", 3)?, repository.read("vm1", 4)?);
/// let observer = Observer::Simulator("cache".parse()?);
/// let library = Path::new("libpagemark_simulate.so");
/// let done = Interval::new(&from, &to)?.simulate(&observer, library)?;
/// println!("{} instructions", done.instructions);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Interval<'a> {
    from: &'a Checkpoint,
    to: &'a Checkpoint,
    /// The counts of completed instructions at the checkpoints.
    counts: (u64, u64),
    /// Where the machine begins, and the count there, if that is before the interval.
    warm_up: Option<(&'a Checkpoint, u64)>,
    /// Where intervals on this node share memory.
    shared: Option<NodeMemory>,
}

/// An interval that was simulated, and ended as the checkpoint at its end.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SimulatedInterval {
    /// The number of the checkpoint at its begin.
    pub from: u64,
    /// The number of the checkpoint at its end.
    pub to: u64,
    /// Instructions that were completed.
    pub instructions: u64,
    /// Instructions that were begun: also those that a fault interrupted.
    pub begun: u64,
    /// Microseconds since 1970 UTC at the start.
    pub started_unix_us: u64,
    /// Microseconds until the machine was there.
    pub start_us: u64,
    /// Microseconds of the warm-up before the interval.
    #[serde(default)]
    pub warm_up_us: u64,
    /// Microseconds of its run.
    pub run_us: u64,
    /// Microseconds of the comparison with the checkpoint.
    pub compare_us: u64,
    /// Pages of memory that were read from the repository.
    #[serde(default)]
    pub read_pages: u64,
    /// What Pagemark's simulator found. None for a plugin, which writes its own results.
    pub results: Option<Results>,
}

impl<'a> Interval<'a> {
    /// The interval from one checkpoint of a machine to a later one.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the machine does not count its instructions, or executed none.
    pub fn new(from: &'a Checkpoint, to: &'a Checkpoint) -> Result<Interval<'a>> {
        let counts = (instructions_of(from)?, instructions_of(to)?);
        if from.manifest.job != to.manifest.job || counts.0 >= counts.1 {
            let reason = format!(
                "from {}@{} to {}@{} no instruction was executed",
                from.manifest.job, from.manifest.sequence, to.manifest.job, to.manifest.sequence
            );
            return Err(Error::about(ErrorKind::Unsupported, Object::None, reason));
        }
        Ok(Interval { from, to, counts, warm_up: None, shared: None })
    }

    /// Has the machine run from an earlier checkpoint, `earlier`, so that the caches of the
    /// simulator hold something when the interval begins. What is counted is that of the interval.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if it is not an earlier checkpoint of the machine.
    pub fn with_warm_up(self, earlier: &'a Checkpoint) -> Result<Interval<'a>> {
        let before = Interval::new(earlier, self.from)?;
        Ok(Interval { warm_up: Some((earlier, before.counts.0)), ..self })
    }

    /// Shares memory with other intervals of the run on this node, by files in `directory`: what
    /// they have in common is read from the repository once, and is once in the host's memory. The
    /// directory is made if it is missing, and the files stay, for later intervals.
    ///
    /// # Errors
    /// [`ErrorKind::System`] if others can write to the directory, or it cannot be made.
    pub fn sharing(self, directory: &Path) -> Result<Interval<'a>> {
        Ok(Interval { shared: Some(NodeMemory::open(directory)?), ..self })
    }

    /// Instructions that were completed in the interval.
    pub fn instructions(&self) -> u64 {
        self.counts.1 - self.counts.0
    }

    /// Runs the machine again, and compares it with the checkpoint at the end. `library` is the
    /// plugin of the package `pagemark-simulate`.
    ///
    /// # Errors
    /// [`ErrorKind::Differs`] if the machine has not done what it did; others as those of
    /// [`Restore::start`]. No QEMU is left.
    pub fn simulate(&self, observer: &Observer, library: &Path) -> Result<SimulatedInterval> {
        let began = Instant::now();
        let started_unix_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
        let (control, control_path) = shared_file()?;
        let (_out, out) = shared_file()?;
        let control = Control::of(control).map_err(control_failed())?;
        let plugins = plugin_arguments(observer, library, &control_path, &out)?;
        let has_warm_up = matches!(observer, Observer::Simulator(kind) if kind.has_warm_up());
        if self.warm_up.is_some() && !has_warm_up {
            let reason = "the simulator keeps nothing that a warm-up could improve";
            return Err(Error::about(ErrorKind::Unsupported, Object::None, reason));
        }
        let (start, begin) = self.warm_up.unwrap_or((self.from, self.counts.0));
        let devices = Restore::new(start).devices()?;
        let (counts, inputs) = ((begin, self.counts.0), inputs_between(start, self.to)?);
        let mut run = Run::start_sharing(start, devices, counts, plugins, control, &inputs, self.shared.as_ref())?;
        let ready = Instant::now();
        let has_limits = !matches!(observer, Observer::Plugin(_));
        let watched = self.watch(&mut run, library, has_limits);
        let Watched { warmed_up, warm, ended, end } = watched.map_err(|error| run.explain(error, start))?;
        let read_pages = run.read_pages();
        run.control.end_at(end).map_err(control_failed())?;
        let control = run.quit()?;
        check_simulator(&control)?;
        let compared = Instant::now();
        let results = match observer {
            Observer::Plugin(_) => None,
            Observer::Simulator(_) | Observer::Trace(_) => {
                Some(Results::read(&out).map_err(Error::system("read the results of the simulator"))?)
            }
        };
        let micros = |from: Instant, to: Instant| (to - from).as_micros() as u64;
        Ok(SimulatedInterval {
            from: self.from.manifest.sequence,
            to: self.to.manifest.sequence,
            instructions: self.instructions(),
            begun: end - warmed_up,
            started_unix_us,
            start_us: micros(began, ready),
            warm_up_us: micros(ready, warm),
            run_us: micros(warm, ended),
            compare_us: micros(ended, compared),
            read_pages,
            results,
        })
    }

    /// Runs the machine to the end of the interval, where it must be the next checkpoint.
    fn watch(&self, run: &mut Run, library: &Path, has_limits: bool) -> Result<Watched> {
        let warmed_up = match self.warm_up {
            Some(_) => run.warm_up(self.from, library)?,
            None => 0,
        };
        let warm = Instant::now();
        run.run_on_to(self.counts.1)?;
        let ended = Instant::now();
        let end = run.pass(self.to, library, has_limits)?;
        Ok(Watched { warmed_up, warm, ended, end })
    }
}

/// An interval that ended as the checkpoint.
struct Watched {
    /// Instructions that had begun before the interval, and at its end.
    warmed_up: u64,
    end: u64,
    /// When it began, and when it ended.
    warm: Instant,
    ended: Instant,
}

/// The pages of a machine that are not those of a checkpoint.
#[derive(Default)]
struct ChangedPages {
    count: usize,
    /// What the first of them hold, by the name of the memory and the page.
    pages: BTreeMap<(String, PageNumber), Vec<u8>>,
}

/// The number of instructions that a machine had executed at a checkpoint, since its start.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if it does not count them.
pub fn instructions_of(checkpoint: &Checkpoint) -> Result<u64> {
    instruction_count(&Restore::new(checkpoint).devices()?).ok_or_else(|| {
        let name = format!("{}@{}", checkpoint.manifest.job, checkpoint.manifest.sequence);
        let reason = format!("{name} is of a machine that does not count its instructions");
        Error::about(ErrorKind::Unsupported, Object::None, reason).help("record it with `pagemark simulate record`")
    })
}

/// What came to a machine between two of its checkpoints, as a list.
pub(crate) fn inputs_between(from: &Checkpoint, to: &Checkpoint) -> Result<Vec<u8>> {
    let before = Restore::new(from).inputs_length();
    let mut all = Restore::new(to).inputs()?;
    if before > all.len() as u64 {
        return Err(Error::damaged("the checkpoint has fewer inputs than an earlier one"));
    }
    Ok(all.split_off(before as usize))
}

/// The arguments that load the plugins.
fn plugin_arguments(observer: &Observer, library: &Path, control: &Path, out: &Path) -> Result<Vec<String>> {
    let mut own = controller(library, control)?;
    match observer {
        Observer::Simulator(kind) => own[1] += &format!(",simulator={kind},out={}", option_word(out)?),
        Observer::Trace(file) => {
            let file = std::path::absolute(file).map_err(Error::system("find the file of the trace"))?;
            let (kind, out, file) = (Kind::Trace, option_word(out)?, option_word(&file)?);
            own[1] += &format!(",simulator={kind},out={out},trace={file}");
        }
        Observer::Plugin(other) => own.extend(["-plugin".into(), other.clone()]),
    }
    Ok(own)
}

/// The arguments that load Pagemark's plugin, which stops the machine.
pub(crate) fn controller(library: &Path, control: &Path) -> Result<Vec<String>> {
    Ok(vec!["-plugin".into(), format!("{},control={}", option_word(library)?, option_word(control)?)])
}

/// What a block of memory holds where QEMU has not written.
struct Origin {
    /// The root of the tree of pages that are given to QEMU when it needs them. None if all are
    /// there.
    demanded: Option<ContentId>,
    /// The file that QEMU has mapped, if it shares it with others.
    base: Option<Base>,
}

/// A machine that runs again.
pub(crate) struct Run {
    // Killed before what serves it ends.
    started: Started,
    pub(crate) machine: Machine,
    control: Control,
    blocks: Vec<RamBlock>,
    disks: Vec<ServedDisk>,
    /// Pages that QEMU gets when it needs them.
    demanded: Option<DemandedMemory>,
    /// What was shared or is missing, by the names of blocks.
    origins: BTreeMap<String, Origin>,
    /// Pages of memory that were read before the machine ran.
    read_pages: u64,
    /// The count of completed instructions now, and at the end.
    position: u64,
    end: u64,
    idle_limit: Duration,
}

impl Run {
    /// The machine of a checkpoint, with that state of its devices, which is to run from the first
    /// to the second of `counts`. `inputs` are those that come to it.
    pub(crate) fn start(
        from: &Checkpoint,
        devices: Vec<u8>,
        counts: (u64, u64),
        plugins: Vec<String>,
        control: Control,
        inputs: &[u8],
    ) -> Result<Run> {
        Run::start_sharing(from, devices, counts, plugins, control, inputs, None)
    }

    /// As [`Run::start`], with the memory that intervals on this node share.
    fn start_sharing(
        from: &Checkpoint,
        devices: Vec<u8>,
        counts: (u64, u64),
        mut plugins: Vec<String>,
        control: Control,
        inputs: &[u8],
        shared: Option<&NodeMemory>,
    ) -> Result<Run> {
        let restore = Restore::new(from);
        let startup = restore.startup()?;
        if completes_requests(&startup.arguments) {
            plugins[1] += &format!(",{COMPLETES_REQUESTS}");
        }
        // QEMU reads it when it starts.
        let inputs = InputList::of(inputs)?;
        if startup.arguments.iter().any(|argument| records_inputs(argument)) {
            plugins[1] += &format!(",{},{REPEATS_INPUTS}", inputs.option()?);
        }
        let mut arguments = arguments_of_simulation(&startup.arguments);
        let mut disks = Vec::new();
        for disk in restore.disk_spaces(&startup)? {
            let served = ServedDisk::start(&disk, from.store())?;
            served.replace_in(&mut arguments, disk.image)?;
            disks.push(served);
        }
        let mut arguments = arguments_of_restore(&arguments, startup.machine_type());
        arguments.extend(plugins);
        let mut started = Started::start(&startup, &arguments, Streams::Detached)?;
        let mut machine = started.machine(&startup)?;
        let mappings = maps::read(machine.pid).map_err(Error::system("read the mappings of QEMU"))?;
        let blocks = machine.changed_blocks(&mappings)?.unwrap_or_default();
        let spaces = restore.ram_spaces()?;
        let pairs = pair(&spaces, &blocks)?;
        let memory = Memory::share(shared, from, &mut machine, pairs, &mappings)?;
        let Memory { missing, demanded, origins, whole, present, mut read_pages } = memory;
        let mut count = |done: ByteCount, _| read_pages += done.pages_rounded_up();
        restore.fill(machine.pid, &whole, Fill::Whole, &mut Progress::unseen(&mut count))?;
        restore.fill(machine.pid, &present, Fill::Present, &mut Progress::unseen(&mut count))?;
        let demanded = missing.map(|missing| missing.serve(demanded, from.store())).transpose()?;
        let (position, end) = counts;
        let idle_limit = IDLE_LIMIT;
        let mut run =
            Run { started, machine, control, blocks, disks, demanded, origins, read_pages, position, end, idle_limit };
        match load_devices(&mut run.machine, devices) {
            Ok(()) => Ok(run),
            Err(error) => Err(run.explain(error, from)),
        }
    }

    /// Why the machine has failed, which began at a checkpoint: the error, or what has led to it.
    fn explain(&self, error: Error, start: &Checkpoint) -> Error {
        if let Some(failure) = self.demanded.as_ref().and_then(DemandedMemory::take_failure) {
            return failure;
        }
        let bases = || self.origins.values().filter_map(|origin| origin.base.as_ref());
        match error.kind() {
            // What the machine was given may not be what the checkpoint has.
            ErrorKind::Differs => bases().find_map(|base| base.check(start).err()).unwrap_or(error),
            _ => error,
        }
    }

    /// Pages of memory that were read from the repository.
    fn read_pages(&self) -> u64 {
        self.read_pages + self.demanded.as_ref().map_or(0, DemandedMemory::count)
    }

    /// Runs the machine to the begin of the interval, a checkpoint. Returns how many instructions
    /// had begun there.
    fn warm_up(&mut self, checkpoint: &Checkpoint, library: &Path) -> Result<u64> {
        self.control.begin_at(None).map_err(control_failed())?;
        self.run_to_the_end()?;
        let begin = self.pass(checkpoint, library, true)?;
        self.control.begin_at(Some(begin)).map_err(control_failed())?;
        self.control.hold_at(None).map_err(control_failed())?;
        self.step_singly(false)?;
        Ok(begin)
    }

    /// Compares the machine, which has completed as many instructions as a checkpoint, with it.
    /// Returns how many instructions had begun when it was as in the checkpoint.
    ///
    /// Several states have the same count of completed instructions: those before and behind the
    /// timers that are due, an interrupt, or an instruction that a fault interrupts. The checkpoint
    /// is of any of them. So where the machine is not as the checkpoint, both go on until one more
    /// instruction is completed, and must be the same then.
    ///
    /// With `is_passed` the machine goes on so far in any case: then the simulator has seen all
    /// that belongs to the instruction before the checkpoint. What follows is held.
    fn pass(&mut self, checkpoint: &Checkpoint, library: &Path, is_passed: bool) -> Result<u64> {
        let (here, count) = (self.begun()?, self.position);
        self.control.hold_at(Some(here)).map_err(control_failed())?;
        let difference = self.difference(checkpoint)?;
        if difference.is_none() && !is_passed {
            return Ok(here);
        }
        self.idle_limit = LAST_IDLE_LIMIT;
        let passed = self.run_on_to(count + 1);
        self.idle_limit = IDLE_LIMIT;
        let Some(difference) = difference else {
            return match passed {
                // It executes nothing any more.
                Err(error) if error.kind() == ErrorKind::Differs => Ok(here),
                passed => passed.map(|()| here),
            };
        };
        passed?;
        let (control, path) = shared_file()?;
        let control = Control::of(control).map_err(control_failed())?;
        let (devices, plugins) = (Restore::new(checkpoint).devices()?, controller(library, &path)?);
        let mut recorded = Run::start(checkpoint, devices, (count, count + 1), plugins, control, &[])?;
        recorded.run_to_the_end()?;
        let (ours, theirs) = (self.changed_pages(checkpoint)?, recorded.changed_pages(checkpoint)?);
        let has_same_memory = ours.pages == theirs.pages && ours.count.max(theirs.count) <= MAX_CHANGED_PAGES;
        let mut has_same_disks = true;
        for (ours, theirs) in self.disks.iter().zip(&recorded.disks) {
            has_same_disks &= ours.is_same(theirs, checkpoint)?;
        }
        if !has_same_memory
            || !has_same_disks
            || first_difference(&recorded.save_devices()?, &self.save_devices()?).is_some()
        {
            return Err(differs(difference));
        }
        let behind = recorded.begun()?;
        // As many instructions begin behind the checkpoint as in the machine that has begun there.
        self.begun()?.checked_sub(behind).ok_or_else(|| differs(difference))
    }

    /// Instructions that have begun since QEMU's start.
    fn begun(&self) -> Result<u64> {
        self.control.count().map_err(control_failed())
    }

    /// Runs the machine on, to a later end.
    fn run_on_to(&mut self, end: u64) -> Result<()> {
        self.end = end;
        self.run_to_the_end()
    }

    /// Runs the machine to the end.
    pub(crate) fn run_to_the_end(&mut self) -> Result<()> {
        let mut is_stepped = false;
        while self.position < self.end {
            let remaining = self.end - self.position;
            // As many instructions are completed as are begun, or fewer.
            let ahead = match remaining <= STEPPED {
                true if !is_stepped => {
                    self.step_singly(true)?;
                    is_stepped = true;
                    remaining - 1
                }
                true => remaining - 1,
                false => remaining - STEPPED,
            };
            let begun = self.control.count().map_err(control_failed())?;
            self.run_to(begun + ahead)?;
            self.position = self.machine.instructions()?;
        }
        match self.position == self.end {
            true => Ok(()),
            false => {
                Err(differs(format!("stopped at instruction {}, and not at instruction {}", self.position, self.end)))
            }
        }
    }

    /// Has QEMU make blocks of one instruction, or of many again.
    pub(crate) fn step_singly(&mut self, singly: bool) -> Result<()> {
        let switch = if singly { "on" } else { "off" };
        // The first is the name since QEMU 8.1.
        for command in ["one-insn-per-tb", "singlestep"] {
            if self.machine.monitor.human(&format!("{command} {switch}"))?.trim().is_empty() {
                return Ok(());
            }
        }
        let reason = "cannot run in single steps";
        Err(Error::about(ErrorKind::Unsupported, Object::Process(self.machine.pid), reason))
    }

    /// Lets the machine run until it has begun `count` instructions, and stops it behind the next.
    fn run_to(&mut self, count: u64) -> Result<()> {
        let set = |control: &Control, count| control.stop_at(count).map_err(control_failed());
        set(&self.control, count)?;
        self.machine.resume()?;
        let (mut last, mut idle, mut looked, mut ask_after) = (0, Duration::ZERO, Instant::now(), IDLE);
        loop {
            let now = self.control.count().map_err(control_failed())?;
            // Not before it waits: otherwise QEMU could stop it without the last instruction.
            if now >= count && self.control.waits().map_err(control_failed())? {
                break;
            }
            // While this process is stopped, it cannot give the machine what that needs.
            let passed = looked.elapsed().min(IDLE);
            looked = Instant::now();
            let waits_for_pages = self.demanded.as_ref().is_some_and(DemandedMemory::is_busy);
            if now != last || waits_for_pages {
                (last, idle, ask_after) = (now, Duration::ZERO, IDLE);
            } else {
                idle += passed;
            }
            if idle >= self.idle_limit {
                return Err(differs("executes nothing more".into()));
            }
            check_simulator(&self.control)?;
            std::thread::sleep(POLL);
            // Seldom: while QEMU's main thread answers, it also passes over the time in which the processor
            // waits, and takes one that is about to wait for one that does.
            if idle < ask_after {
                continue;
            }
            ask_after = idle * 2;
            let status = text(&self.machine.monitor.execute("query-status", json!({}))?, "status");
            if status != "running" {
                // It was switched off, or has crashed: what the counts say is compared.
                return Ok(());
            }
        }
        let (control, pid) = (&self.control, self.machine.pid);
        self.machine.monitor.execute_while("stop", || {
            // Not earlier: the machine would go on until QEMU has read the command.
            wait_for_stop(pid)?;
            set(control, u64::MAX)
        })?;
        Ok(())
    }

    /// How the machine differs from a checkpoint.
    fn difference(&mut self, checkpoint: &Checkpoint) -> Result<Option<String>> {
        // A request is complete before the instruction behind it, so disks say more than the rest.
        if let Some(reason) = self.disk_difference(checkpoint)? {
            return Err(differs(reason));
        }
        let changed = self.changed_pages(checkpoint)?;
        if let Some((block, page)) = changed.pages.keys().next() {
            let reason = format!("has another page at {:#x} of its memory {block}", page.address().get());
            // An instruction and an interrupt write some pages.
            return if changed.count <= MAX_CHANGED_PAGES { Ok(Some(reason)) } else { Err(differs(reason)) };
        }
        let devices = Restore::new(checkpoint).devices()?;
        let section = first_difference(&devices, &self.save_devices()?);
        Ok(section.map(|section| format!("has another state of its device {section}")))
    }

    /// How the disks differ from those of a checkpoint.
    fn disk_difference(&self, checkpoint: &Checkpoint) -> Result<Option<String>> {
        let restore = Restore::new(checkpoint);
        let startup = restore.startup()?;
        let recorded = restore.disk_spaces(&startup)?;
        for disk in &self.disks {
            let Some(expected) = recorded.iter().find(|recorded| recorded.image.label == disk.label()) else {
                return Ok(Some(format!("has a disk {}, which the checkpoint has not", disk.label())));
            };
            if let Some(page) = disk.first_difference(expected.root, checkpoint)? {
                let (at, label) = (page.address().get(), disk.label());
                return Ok(Some(format!("has another content at {at:#x} of its disk {label}")));
            }
        }
        let is_known = |label: &str| self.disks.iter().any(|disk| disk.label() == label);
        let unknown = recorded.iter().find(|recorded| !is_known(&recorded.image.label));
        Ok(unknown.map(|disk| format!("has no disk {}, which the checkpoint has", disk.image.label)))
    }

    /// The pages that are not those of a checkpoint.
    fn changed_pages(&self, checkpoint: &Checkpoint) -> Result<ChangedPages> {
        let mut changed = ChangedPages::default();
        for (space, block) in pair(&Restore::new(checkpoint).ram_spaces()?, &self.blocks)? {
            let origin = self.origins.get(&block.id);
            visit_differing_pages(checkpoint, self.machine.pid, space, block, origin, &mut |page, content| {
                changed.count += 1;
                changed.pages.insert((block.id.clone(), page), content.to_vec());
                if changed.pages.len() > MAX_CHANGED_PAGES {
                    changed.pages.pop_last();
                }
            })?;
        }
        Ok(changed)
    }

    fn save_devices(&mut self) -> Result<Vec<u8>> {
        let mut changes = Changes::new(&self.machine)?;
        let file = given_files::add_device_file(&mut self.machine, &mut changes)?;
        self.machine.execute(&given_files::save_devices())?;
        changes.end_checkpoint(&mut self.machine)?;
        let failed = || Error::system("read the state of the devices");
        let mut devices = vec![0; file.metadata().map_err(failed())?.len() as usize];
        file.read_exact_at(&mut devices, 0).map_err(failed())?;
        Ok(devices)
    }

    /// Lets the machine go on, without single steps, when QEMU is told to.
    pub(crate) fn release(&mut self) -> Result<()> {
        self.step_singly(false)?;
        self.control.stop_at(u64::MAX).map_err(control_failed())
    }

    /// The process that is killed when it is dropped, its monitor, and what serves it.
    pub(crate) fn into_parts(self) -> (Started, Machine, (Vec<ServedDisk>, Option<DemandedMemory>)) {
        (self.started, self.machine, (self.disks, self.demanded))
    }

    /// Ends QEMU, whose plugins write their results then. Returns what they share with this
    /// process.
    fn quit(mut self) -> Result<Control> {
        self.machine.quit()?;
        let status = self.started.into_child()?.wait().map_err(Error::system("wait for QEMU"))?;
        match status.success() {
            true => Ok(self.control),
            false => {
                let reason = format!("ended with {status} behind the simulation");
                Err(Error::about(ErrorKind::Gone, Object::Process(self.machine.pid), reason))
            }
        }
    }
}

/// How the memory of a QEMU comes from a checkpoint.
struct Memory<'b> {
    /// None if nothing is missing.
    missing: Option<MissingMemory>,
    demanded: Vec<DemandedBlock>,
    origins: BTreeMap<String, Origin>,
    /// Blocks that are to be filled as a whole.
    whole: Vec<(&'b SpaceRecord, &'b RamBlock)>,
    /// Blocks of which the pages are to be filled that QEMU has written to.
    present: Vec<(&'b SpaceRecord, &'b RamBlock)>,
    /// Pages that were read.
    read_pages: u64,
}

impl<'b> Memory<'b> {
    /// Maps into QEMU the blocks of its memory of which the node has a base, and writes what
    /// differs from that. Pages of large blocks are missing then, where QEMU may have a
    /// userfaultfd.
    fn share(
        shared: Option<&NodeMemory>,
        checkpoint: &Checkpoint,
        machine: &mut Machine,
        blocks: Vec<(&'b SpaceRecord, &'b RamBlock)>,
        mappings: &[Mapping],
    ) -> Result<Memory<'b>> {
        let failed = || Error::system("write the memory of QEMU");
        let may_miss = machine.check_keeps_memory("").is_ok();
        let missing = if may_miss { MissingMemory::of(machine.pid)? } else { None };
        let (demanded, origins) = (Vec::new(), BTreeMap::new());
        let mut memory = Memory { missing, demanded, origins, whole: Vec::new(), present: Vec::new(), read_pages: 0 };
        for (space, block) in blocks {
            // One that can grow stays one mapping, by which it is found again.
            let is_whole = mappings.iter().any(|mapping| mapping.range() == block.range);
            if !is_whole || block.bytes() < MIN_BLOCK {
                memory.whole.push((space, block));
                continue;
            }
            let base = match shared {
                Some(shared) => shared.base(space, block.bytes(), checkpoint, memory.missing.is_some())?,
                None => None,
            };
            let range = block.range.clone();
            let Some(mut base) = base else {
                let Some(missing) = &memory.missing else {
                    memory.whole.push((space, block));
                    continue;
                };
                missing.register(&range)?;
                let tree = tree_of(space, block.bytes(), checkpoint)?;
                memory.demanded.push(DemandedBlock { range, tree, base: None });
                memory.origins.insert(block.id.clone(), Origin { demanded: Some(space.root), base: None });
                memory.present.push((space, block));
                continue;
            };
            map_privately(machine, &base.file, block)?;
            let first = block.range.start.page();
            let (targets, ids): (Vec<PageNumber>, Vec<ContentId>) =
                std::mem::take(&mut base.changed).into_iter().map(|(page, id)| (first + page.get(), id)).unzip();
            memory.read_pages += base.count + ids.len() as u64;
            let pages = base.missing.take();
            let is_demanded = pages.is_some();
            match (&memory.missing, pages) {
                (Some(missing), Some(pages)) => {
                    missing.register(&range)?;
                    let fill = |page: PageNumber, content: &[u8]| missing.fill(page, content);
                    copy_pages(checkpoint, &ids, &targets, &fill)?.map_err(failed())?;
                    let tree = PageTree::load(base.root, checkpoint)?;
                    memory.demanded.push(DemandedBlock { range, tree, base: Some(pages) });
                }
                _ => {
                    let written = proc::open_memory_for_writing(machine.pid).map_err(failed())?;
                    let write = |page: PageNumber, content: &[u8]| written.write_all_at(content, page.address().get());
                    copy_pages(checkpoint, &ids, &targets, &write)?.map_err(failed())?;
                }
            }
            let demanded = is_demanded.then_some(base.root);
            memory.origins.insert(block.id.clone(), Origin { demanded, base: Some(base) });
        }
        Ok(memory)
    }
}

/// Waits until QEMU has read the command `stop`, and waits for the processor: its main thread
/// sleeps then, where it otherwise waits for the monitor.
fn wait_for_stop(pid: i32) -> Result<()> {
    let deadline = Instant::now() + STOP_LIMIT;
    let (mut last, mut count) = (None, 0);
    while count < WAITING_COUNT {
        let now = Call::of_thread(pid).map_err(Error::system("find out what QEMU's main thread waits for"))?;
        let waits = now.is_some_and(|call| call.number == libc::SYS_futex);
        count = if waits && (count == 0 || now == last) { count + 1 } else { 0 };
        last = now;
        if Instant::now() >= deadline {
            return Err(Error::about(ErrorKind::Monitor, Object::Process(pid), "does not stop its machine"));
        }
        std::thread::sleep(POLL);
    }
    Ok(())
}

/// Calls `found` with each page of a block of memory that is not that of a checkpoint, and with
/// what it holds. Pages are compared by the ids under which the repository holds them, so that none
/// is read from it. Pages that QEMU would get now are not compared if the checkpoint has the same.
fn visit_differing_pages(
    checkpoint: &Checkpoint,
    pid: i32,
    space: &SpaceRecord,
    block: &RamBlock,
    origin: Option<&Origin>,
    found: &mut dyn FnMut(PageNumber, &[u8]),
) -> Result<()> {
    let failed = || Error::system("compare the memory of QEMU");
    let memory = proc::open_memory(pid).map_err(failed())?;
    let start = block.range.start;
    let tree = PageTree::load(space.root, checkpoint)?;
    let addresses = |page: PageNumber| (start.page() + page.get()).addresses();
    let mut compared = RangeSet::new();
    match origin.and_then(|origin| origin.demanded) {
        Some(root) => PageTree::diff(checkpoint, root, space.root, &mut |page, _, _| {
            compared.insert(addresses(page));
            Ok(())
        })?,
        // The others of the checkpoint are zeros, as are those that QEMU has not touched, and its base does not hold.
        None => tree.iter().for_each(|(page, _)| compared.insert(addresses(page))),
    }
    let filter = Filter { any: PRESENT | SWAPPED, ..Filter::default() };
    let pagemap = Pagemap::of_process(pid).map_err(failed())?;
    pagemap.find(&block.range, filter, |run, _| compared.insert(run)).map_err(failed())?;
    let base = origin.and_then(|origin| origin.base.as_ref());
    let (mut at, end) = (Address::MIN, Address::MIN + block.bytes());
    while let Some(base) = base.filter(|_| at < end) {
        let data = sparse::next_data(&base.file, at, end).map_err(failed())?;
        if data.is_empty() {
            break;
        }
        at = data.end;
        compared.insert(start + (data.start - Address::MIN)..start + (data.end - Address::MIN));
    }
    let mut content = vec![0; COMPARED_BYTES];
    for range in compared.iter() {
        let mut at = range.start;
        while at < range.end {
            let length = (range.end - at).to_usize().min(COMPARED_BYTES);
            memory.read_exact_at(&mut content[..length], at.get()).map_err(failed())?;
            let first = at.page().get() - start.page().get();
            for (page, held) in (first..).map(PageNumber::new).zip(content[..length].as_chunks::<PAGE_SIZE>().0) {
                if checkpoint.page_id(held) != tree.get(page) {
                    found(page, held);
                }
            }
            at += ByteCount::new(length as u64);
        }
    }
    Ok(())
}

fn differs(reason: String) -> Error {
    let error = Error::about(ErrorKind::Differs, Object::None, format!("the machine {reason}"));
    error.help("something that is not recorded decides what it does")
}

/// Fails if the simulator in QEMU has: where its file cannot be written.
fn check_simulator(control: &Control) -> Result<()> {
    match control.failure().map_err(control_failed())? {
        None => Ok(()),
        Some(error) => {
            let operation = "write what the simulator observes";
            Err(Error::of(ErrorKind::System, operation, Object::None, error).help("free room on its disk"))
        }
    }
}

pub(crate) fn control_failed() -> impl FnOnce(std::io::Error) -> Error {
    Error::system("control the plugin of the simulation")
}
