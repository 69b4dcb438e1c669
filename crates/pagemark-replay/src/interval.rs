//! The simulation of an interval: a machine runs again from a checkpoint to a later one, watched by
//! a plugin of QEMU, and must be there what it was (SimuBoost; PML, section 2.2).

use std::path::Path;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use pagemark::repository::Checkpoint;
use pagemark_simulate::control::Control;
use pagemark_simulate::{Kind, Results};
use pagemark_vm::parts::{option_word, shared_file};
use pagemark_vm::{Error, ErrorKind, Object, Restore, Result};
use serde::{Deserialize, Serialize};

use crate::instruction_count::instruction_count;
use crate::node_memory::NodeMemory;
use crate::observer::Observer;
use crate::run::{Run, check_simulator, control_failed, controller};

/// An interval between two checkpoints of a machine.
///
/// ```no_run
/// use std::path::Path;
///
/// use pagemark::repository::Repository;
/// use pagemark_replay::{Interval, Observer};
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

impl SimulatedInterval {
    /// Microseconds that it took.
    pub fn taken_us(&self) -> u64 {
        let parts = [self.start_us, self.warm_up_us, self.run_us, self.compare_us];
        parts.into_iter().fold(0, u64::saturating_add)
    }
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
