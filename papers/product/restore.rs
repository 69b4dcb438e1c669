//! `pagemark-bench restore`: how long a restore takes, with all memory first and with memory on
//! demand, beside `criu restore` from CRIU's own images on the same disk. It reproduces no
//! experiment of the papers.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use pagemark::repository::Repository;
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_linux::proc::{self, Process};
use pagemark_process::criu::{Criu, DumpOptions};
use pagemark_process::restore::{Restore, RestoreEvent};
use pagemark_process::saver::CriuSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_report::output::print;
use pagemark_report::samples::Samples;
use pagemark_report::table::Table;

use crate::product::criu_dump::{full_dump, run_criu};
use crate::product::trackee::Trackee;
use crate::product::workload::Workload;
use crate::{BenchError, print_json};

/// Pause between two looks at the counter of a process, which updates a page in 0.2 ms.
const UPDATE_POLL: Duration = Duration::from_micros(100);

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// The restored program's memory, MiB
    #[arg(long, value_delimiter = ',', default_values_t = [256, 1024])]
    mib: Vec<usize>,
    /// Restores of each kind
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// Leave out restores with memory on demand
    #[arg(long)]
    eager: bool,
    /// Directory for the repository and CRIU's images [default: the directory for temporary files]
    #[arg(long)]
    directory: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Where the repository and the images are when a restore begins.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
enum Cache {
    /// In the page cache.
    Warm,
    /// On disk alone.
    Cold,
}

/// A row of the result.
#[derive(serde::Serialize)]
struct Row {
    mib: usize,
    cache: Cache,
    /// `criu restore` from its own images.
    criu_us: Samples,
    /// The same for a process of 1 MiB, until that has updated a page.
    small_criu_us: Samples,
    /// Pagemark, all memory first.
    eager_us: Samples,
    /// Pagemark with memory on demand, until the process has updated a page.
    lazy_answer_us: Samples,
    /// The same, until all memory is there.
    lazy_complete_us: Samples,
    /// [`Row::eager_us`] divided by [`Row::criu_us`] of the same round.
    eager_ratio: Samples,
    /// [`Row::lazy_answer_us`] divided by [`Row::small_criu_us`] of the same round.
    lazy_answer_ratio: Samples,
    /// [`Row::lazy_complete_us`] divided by [`Row::eager_us`] of the same round.
    lazy_complete_ratio: Samples,
    images_bytes: u64,
    repository_bytes: u64,
    /// Disk space of the temporary files of a restore with memory on demand when the process runs.
    staged_bytes: u64,
}

/// Measures and prints.
///
/// # Errors
/// A checkpoint, a dump or a restore failed.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let criu = Criu::find().map_err(BenchError::pagemark)?;
    let make = || match &options.directory {
        Some(directory) => tempfile::tempdir_in(directory),
        None => tempfile::tempdir(),
    };
    let mut rows = Vec::new();
    for &mib in &options.mib {
        let directory = make().map_err(BenchError::on("make a directory"))?;
        // An update of a page takes the same time in both.
        let workload = |mib, percent, pass_ms| Workload { mib, percent, run_pages: 16, pass_ms, children: 0 };
        let large = workload(mib, 1.0, (mib as u64 / 2).max(1));
        let saved = Saved::make(&large, &criu, &directory.path().join("large"))?;
        let small = Saved::make(&workload(1, 100.0, 50), &criu, &directory.path().join("small"))?;
        for cache in [Cache::Warm, Cache::Cold] {
            eprintln!("{mib} MiB, {cache:?} …");
            rows.push(measure(options, mib, cache, &criu, &saved, &small)?);
        }
    }
    if options.json {
        print_json(&rows)?;
    } else {
        print(&table(options, &rows));
    }
    Ok(())
}

/// A process that was saved by both, and has ended.
struct Saved {
    images: PathBuf,
    repository: PathBuf,
    scratch: PathBuf,
    pid: i32,
    counter_address: u64,
    images_bytes: u64,
    repository_bytes: u64,
}

/// What a restore by Pagemark took.
struct Taken {
    /// Until the process runs.
    running: Duration,
    /// Until the process has updated a page.
    answered: Duration,
    complete: Duration,
    staged_bytes: u64,
}

impl Saved {
    fn make(workload: &Workload, criu: &Criu, directory: &Path) -> Result<Saved, BenchError> {
        let (images, repository) = (directory.join("images"), directory.join("repository"));
        let scratch = directory.join("scratch");
        for made in [&images, &scratch] {
            std::fs::create_dir_all(made).map_err(BenchError::on("make a directory"))?;
        }
        let trackee = Trackee::start(workload)?;
        let counter_address = trackee.counter_address();
        let saver = CriuSaver::new(criu.clone(), DumpOptions::default());
        let target = ProcessTarget::attach(
            Process::find(trackee.pid()).unwrap(),
            Mechanism::choose(Scope::Process),
            Arc::new(saver),
        );
        let repository_handle = Repository::create(&repository).map_err(BenchError::pagemark)?;
        let mut job = Job::new(target.map_err(BenchError::pagemark)?, repository_handle, JobOptions::new("bench"));
        let taken = job.checkpoint().map_err(BenchError::pagemark)?;
        job.detach();
        let dump = full_dump(criu.path(), trackee.pid(), &images)?;
        let (pid, repository_bytes) = (trackee.pid(), taken.cost.written_bytes);
        Ok(Saved { images, repository, scratch, pid, counter_address, images_bytes: dump.bytes, repository_bytes })
    }

    /// Times of `criu restore`: until the process runs, and until it has updated a page.
    fn restore_by_criu(&self, criu: &Criu) -> Result<[Duration; 2], BenchError> {
        let begin = Instant::now();
        let elapsed = run_criu(criu.path(), &self.images, "restore.log", |command| {
            command.args(["restore", "--no-default-config", "--restore-detached", "--restore-sibling", "--tcp-close"])
        })?;
        self.wait_for_update()?;
        let answered = begin.elapsed();
        self.end()?;
        Ok([elapsed, answered])
    }

    /// Restores the process. The repository is opened and CRIU is looked for within the time.
    fn restore(&self, is_lazy: bool) -> Result<Taken, BenchError> {
        let begin = Instant::now();
        let repository = Repository::open(&self.repository).map_err(BenchError::pagemark)?;
        let checkpoint = repository.read("bench", 1).map_err(BenchError::pagemark)?;
        let restore = Restore::new(&checkpoint).lazy(is_lazy).allow_unusual_files(true).scratch_in(&self.scratch);
        let mut taken =
            Taken { running: Duration::ZERO, answered: Duration::ZERO, complete: Duration::ZERO, staged_bytes: 0 };
        let mut updated = Ok(());
        let restored = restore.run(&mut |event| match event {
            RestoreEvent::Staging { reason } => eprintln!("memory is staged: {reason}"),
            RestoreEvent::Running(_) => {
                taken.running = begin.elapsed();
                updated = self.wait_for_update();
                taken.answered = begin.elapsed();
                taken.staged_bytes = disk_bytes(&self.scratch);
            }
            _ => {}
        });
        taken.complete = begin.elapsed();
        restored.map_err(BenchError::pagemark)?;
        updated?;
        self.end()?;
        Ok(taken)
    }

    /// Waits until the process, which runs, has updated a page.
    fn wait_for_update(&self) -> Result<(), BenchError> {
        let memory = proc::open_memory(self.pid).map_err(BenchError::on("open the process's memory"))?;
        let count = || {
            let mut count = [0; 8];
            let read = memory.read_exact_at(&mut count, self.counter_address);
            read.map(|()| count).map_err(BenchError::on("read the process's counter"))
        };
        let first = count()?;
        while count()? == first {
            std::thread::sleep(UPDATE_POLL);
        }
        Ok(())
    }

    /// Kills the restored process, a child of this one, and waits for its end.
    fn end(&self) -> Result<(), BenchError> {
        let pid = Pid::from_raw(self.pid);
        let failed = |error: Errno| BenchError::on("end the restored process")(error.into());
        kill(pid, Signal::SIGKILL).map_err(failed)?;
        waitpid(pid, None).map(drop).map_err(failed)
    }
}

/// Disk space of the files below a directory.
fn disk_bytes(directory: &Path) -> u64 {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let of_entry = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => disk_bytes(&entry.path()),
        Ok(metadata) => metadata.blocks() * 512,
        Err(_) => 0,
    };
    entries.map(of_entry).sum()
}

/// Empties the page cache.
fn drop_caches() -> Result<(), BenchError> {
    nix::unistd::sync();
    let write = || File::create("/proc/sys/vm/drop_caches")?.write_all(b"3");
    write().map_err(BenchError::on("empty the page cache"))
}

fn measure(
    options: &Options,
    mib: usize,
    cache: Cache,
    criu: &Criu,
    saved: &Saved,
    small: &Saved,
) -> Result<Row, BenchError> {
    let mut row = Row {
        mib,
        cache,
        criu_us: Samples::default(),
        small_criu_us: Samples::default(),
        eager_us: Samples::default(),
        lazy_answer_us: Samples::default(),
        lazy_complete_us: Samples::default(),
        eager_ratio: Samples::default(),
        lazy_answer_ratio: Samples::default(),
        lazy_complete_ratio: Samples::default(),
        images_bytes: saved.images_bytes,
        repository_bytes: saved.repository_bytes,
        staged_bytes: 0,
    };
    let ready = || if cache == Cache::Cold { drop_caches() } else { Ok(()) };
    // The first round fills the page cache, and is not counted.
    let first = if cache == Cache::Warm { 0 } else { 1 };
    for round in first..=options.rounds {
        ready()?;
        let [by_criu, _] = saved.restore_by_criu(criu)?;
        ready()?;
        let eager = saved.restore(false)?.running;
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        if round > 0 {
            row.criu_us.push(us(by_criu));
            row.eager_us.push(us(eager));
            row.eager_ratio.push(us(eager) / us(by_criu));
        }
        if options.eager {
            continue;
        }
        ready()?;
        let [_, small] = small.restore_by_criu(criu)?;
        ready()?;
        let Taken { answered: answer, complete, staged_bytes, .. } = saved.restore(true)?;
        if round == 0 {
            continue;
        }
        row.staged_bytes = row.staged_bytes.max(staged_bytes);
        row.small_criu_us.push(us(small));
        row.lazy_answer_us.push(us(answer));
        row.lazy_complete_us.push(us(complete));
        row.lazy_answer_ratio.push(us(answer) / us(small));
        row.lazy_complete_ratio.push(us(complete) / us(eager));
    }
    Ok(row)
}

fn table(options: &Options, rows: &[Row]) -> String {
    let mut out =
        format!("{} restores of each kind, taking turns; medians, and ratios with their range\n", options.rounds);
    let mut table = Table::new([
        ">memory",
        "cache",
        ">images",
        ">repository",
        ">CRIU",
        ">Pagemark",
        ">to CRIU",
        ">CRIU, 1 MiB",
        ">lazy, answer",
        ">to CRIU, 1 MiB",
        ">lazy, complete",
        ">to eager",
        ">staged",
    ]);
    for row in rows {
        let mib = |bytes: u64| format!("{:.0} MiB", bytes as f64 / 1048576.0);
        let ms = |samples: &Samples| match samples.count() {
            0 => String::new(),
            _ => format!("{:.0} ms", samples.median() / 1e3),
        };
        let ratio = |samples: &Samples| match samples.count() {
            0 => String::new(),
            _ => format!("{:.2} ({:.2} to {:.2})", samples.median(), samples.least(), samples.greatest()),
        };
        table.row([
            format!("{} MiB", row.mib),
            format!("{:?}", row.cache).to_lowercase(),
            mib(row.images_bytes),
            mib(row.repository_bytes),
            ms(&row.criu_us),
            ms(&row.eager_us),
            ratio(&row.eager_ratio),
            ms(&row.small_criu_us),
            ms(&row.lazy_answer_us),
            ratio(&row.lazy_answer_ratio),
            ms(&row.lazy_complete_us),
            ratio(&row.lazy_complete_ratio),
            format!("{:.1} MiB", row.staged_bytes as f64 / 1048576.0),
        ]);
    }
    out += &table.to_string();
    out
}
