//! `pagemark-bench peers`: snapshots and transactions of a region beside what programs use without
//! Pagemark: `fork` for snapshots, and for rollback a private mapping of a file in memory, whose
//! written pages `MADV_DONTNEED` drops, and a handler of libsigsegv or a thread with the crate
//! `userfaultfd`, which copy pages. Times are also given as user and system time, as in the table
//! of "Results on same-page-merging snapshots".
//!
//! The crate is a peer where this one is built with its feature `userfaultfd`, which needs
//! libclang.

mod libsigsegv;
mod undo_log;
#[cfg(feature = "userfaultfd")]
mod userfaultfd;

use std::fs::File;
use std::hint::black_box;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};
use pagemark::{PAGE_SIZE, Region};
use pagemark_linux::own_memory::Mapping;
use pagemark_linux::proc::Fields;
use pagemark_report::output::print;
use pagemark_report::samples::Samples;
use pagemark_report::table::Table;

use crate::measuring::random::Xorshift;
use crate::measuring::usage::{own_memory_bytes, process_cpu_time};
use crate::{BenchError, print_json};
use libsigsegv::{HandledMemory, Library};
use undo_log::UndoneMemory;

/// Options of the measurement.
#[derive(clap::Args, Clone, Debug)]
pub struct Options {
    /// Size of the memory, MiB
    #[arg(long, default_value_t = 1024)]
    mib: usize,
    /// Pages written in a cycle, per cent, at random
    #[arg(long, default_value_t = 1.0)]
    percent: f64,
    /// Cycles of each subject in a series
    #[arg(long, default_value_t = 20)]
    cycles: usize,
    /// Series; the subjects take turns
    #[arg(long, default_value_t = 3)]
    series: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Small accesses that are measured together.
const ACCESSES: usize = 1_000_000;

/// An operation of a subject.
#[derive(Default, serde::Serialize)]
struct Row {
    subject: &'static str,
    operation: &'static str,
    ms: Samples,
    user_ms: f64,
    system_ms: f64,
}

#[derive(Default, serde::Serialize)]
struct Report {
    rows: Vec<Row>,
    /// Memory besides one copy of the content, MiB, in the last series.
    memory_mib: Vec<(&'static str, f64)>,
    /// A read or a write of 8 bytes, and the same by a pointer.
    access_ns: Samples,
    pointer_ns: Samples,
}

const REGION: &str = "pagemark";
const FORK: &str = "fork";
const PRIVATE: &str = "MAP_PRIVATE";
const SIGSEGV: &str = "libsigsegv";
const USERFAULTFD: &str = "userfaultfd";

const FIRST: &str = "first snapshot";
const SPARSE: &str = "first snapshot, of the written pages alone";
const CYCLE: &str = "writes, snapshot, release";
const WRITES: &str = "writes of a transaction";
const ROLLBACK: &str = "begin and rollback";

impl Report {
    /// Runs a part of an operation, and adds its time to `spent`.
    fn timed<T>(spent: &mut [Duration; 3], operation: impl FnOnce() -> T) -> Result<T, BenchError> {
        let (cpu, begin) = (process_cpu_time()?, Instant::now());
        let done = operation();
        let wall = begin.elapsed();
        let after = process_cpu_time()?;
        spent[0] += wall;
        spent[1] += after[0].saturating_sub(cpu[0]);
        spent[2] += after[1].saturating_sub(cpu[1]);
        Ok(done)
    }

    fn add(&mut self, subject: &'static str, operation: &'static str, spent: [Duration; 3]) {
        let position = self.rows.iter().position(|row| row.subject == subject && row.operation == operation);
        let index = position.unwrap_or_else(|| {
            self.rows.push(Row { subject, operation, ..Row::default() });
            self.rows.len() - 1
        });
        let [wall, user, system] = spent.map(|time| time.as_secs_f64() * 1e3);
        let row = &mut self.rows[index];
        row.ms.push(wall);
        row.user_ms += user;
        row.system_ms += system;
    }

    /// Records the memory that a subject takes.
    fn memory(&mut self, subject: &'static str, bytes: u64) {
        self.memory_mib.retain(|(other, _)| *other != subject);
        self.memory_mib.push((subject, bytes as f64 / f64::from(1 << 20)));
    }

    fn median(&self, subject: &str, operation: &str) -> f64 {
        let row = self.rows.iter().find(|row| row.subject == subject && row.operation == operation);
        row.map_or(f64::NAN, |row| row.ms.median())
    }
}

/// Measures and prints.
///
/// # Errors
/// There is not enough memory, or the kernel refuses an operation.
pub fn run(options: &Options) -> Result<(), BenchError> {
    let pages = (options.mib << 20) / PAGE_SIZE;
    let dirty = ((pages as f64 * options.percent / 100.0) as usize).clamp(1, pages);
    let mut random = Xorshift::new(2);
    let written: Vec<Vec<usize>> =
        (0..options.cycles).map(|_| (0..dirty).map(|_| random.index(pages)).collect()).collect();
    let mut report = Report::default();
    let library = Library::load();
    if library.is_none() {
        eprintln!("libsigsegv is not installed, and left out");
    }
    for series in 0..options.series {
        eprintln!("series {series} …");
        measure_region(&mut report, pages, &written)?;
        measure_sparse(&mut report, pages, &written)?;
        measure_fork(&mut report, pages, &written)?;
        measure_private(&mut report, pages, &written)?;
        if let Some(library) = library {
            let memory = HandledMemory::new(library, pages).map_err(BenchError::on("use libsigsegv"))?;
            measure_undone(&mut report, SIGSEGV, memory, pages, &written)?;
        }
        #[cfg(feature = "userfaultfd")]
        {
            let memory = userfaultfd::WatchedMemory::new(pages).map_err(BenchError::on("use userfaultfd"))?;
            measure_undone(&mut report, USERFAULTFD, memory, pages, &written)?;
        }
    }
    if options.json {
        print_json(&report)?;
    } else {
        print(&text(&report, options));
    }
    Ok(())
}

/// Fills memory with content that is different in each page.
///
/// # Safety
/// `start` is the begin of memory of `pages` pages, which nobody else uses.
unsafe fn fill(start: NonNull<u8>, pages: usize) {
    let mut random = Xorshift::new(3);
    for word in 0..pages * PAGE_SIZE / 8 {
        // SAFETY: the word lies within the memory.
        unsafe { start.cast::<u64>().add(word).write_volatile(random.next_u64()) };
    }
}

/// Writes a word to each of some pages.
///
/// # Safety
/// The memory has these pages, and nobody else uses it.
unsafe fn write(start: NonNull<u8>, pages: &[usize], value: usize) {
    for &page in pages {
        // SAFETY: the page belongs to the memory.
        unsafe { (*start.add(page * PAGE_SIZE).cast::<AtomicU64>().as_ptr()).store(value as u64, Ordering::Relaxed) };
    }
}

fn measure_region(report: &mut Report, pages: usize, written: &[Vec<usize>]) -> Result<(), BenchError> {
    let region = Region::new(pages * PAGE_SIZE)?;
    let start = NonNull::new(region.as_ptr()).unwrap_or(NonNull::dangling());
    // SAFETY: the region has these pages, and only this function uses it.
    unsafe { fill(start, pages) };
    let before = own_memory_bytes("status", "VmRSS")?;
    let mut spent = [Duration::ZERO; 3];
    let mut last = Report::timed(&mut spent, || region.snapshot())??;
    report.add(REGION, FIRST, spent);
    for (cycle, pages) in written.iter().enumerate() {
        let mut spent = [Duration::ZERO; 3];
        last = Report::timed(&mut spent, || {
            // SAFETY: as above.
            unsafe { write(start, pages, cycle) };
            let snapshot = region.snapshot()?;
            drop(last);
            Ok::<_, pagemark::Error>(snapshot)
        })??;
        report.add(REGION, CYCLE, spent);
    }
    for (cycle, pages) in written.iter().enumerate() {
        let (mut around, mut writes) = ([Duration::ZERO; 3], [Duration::ZERO; 3]);
        Report::timed(&mut around, || region.begin())??;
        // SAFETY: as above.
        Report::timed(&mut writes, || unsafe { write(start, pages, cycle + 100) })?;
        black_box(Report::timed(&mut around, || region.rollback())??);
        report.add(REGION, WRITES, writes);
        report.add(REGION, ROLLBACK, around);
    }
    report.memory(REGION, own_memory_bytes("status", "VmRSS")?.saturating_sub(before));
    measure_accesses(report, &region)?;
    drop(last);
    Ok(())
}

/// The first snapshot of a region of which only the pages of one cycle were ever written.
fn measure_sparse(report: &mut Report, pages: usize, written: &[Vec<usize>]) -> Result<(), BenchError> {
    let region = Region::new(pages * PAGE_SIZE)?;
    let start = NonNull::new(region.as_ptr()).unwrap_or(NonNull::dangling());
    let populated = written.first().map_or(&[][..], Vec::as_slice);
    for (value, page) in populated.iter().enumerate() {
        // SAFETY: the region has these pages, and only this function uses it.
        unsafe { write(start, &[*page], value + 1) };
    }
    let mut spent = [Duration::ZERO; 3];
    black_box(Report::timed(&mut spent, || region.snapshot())??);
    report.add(REGION, SPARSE, spent);
    Ok(())
}

/// Reads and writes of 8 bytes at random places of the first MiB, by the region and by a pointer.
fn measure_accesses(report: &mut Report, region: &Region) -> Result<(), BenchError> {
    let words = region.bytes().min(1 << 20) / 8;
    let mut random = Xorshift::new(4);
    let mut number = [0; 8];
    let begin = Instant::now();
    for _ in 0..ACCESSES / 2 {
        let offset = random.index(words) * 8;
        region.read(offset, &mut number)?;
        region.write(offset, &number)?;
    }
    report.access_ns.push(begin.elapsed().as_nanos() as f64 / ACCESSES as f64);
    let begin = Instant::now();
    for _ in 0..ACCESSES / 2 {
        let offset = random.index(words) * 8;
        // SAFETY: the word lies within the region, and only this function uses it.
        unsafe {
            let word = region.as_ptr().add(offset).cast::<u64>();
            word.write_volatile(word.read_volatile());
        }
    }
    report.pointer_ns.push(begin.elapsed().as_nanos() as f64 / ACCESSES as f64);
    Ok(())
}

/// A child made by `fork`, which holds the memory as it was then.
struct Child {
    pid: libc::pid_t,
}

impl Child {
    fn fork() -> io::Result<Child> {
        // SAFETY: the child makes system calls only, which are async-signal-safe.
        let pid = unsafe { libc::fork() };
        match pid {
            -1 => Err(io::Error::last_os_error()),
            0 => loop {
                // SAFETY: the calls wait for the signal that ends the child.
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    libc::pause();
                }
            },
            _ => Ok(Child { pid }),
        }
    }

    /// Bytes that the child does not share with its parent, and those of its page tables.
    fn own_bytes(&self) -> Result<u64, BenchError> {
        let field = |file: &str, name: &str| {
            let path = format!("/proc/{}/{file}", self.pid);
            let fields = Fields::read(&path).map_err(BenchError::on(format!("read {path}")))?;
            Ok::<_, BenchError>(fields.bytes(name).unwrap_or(0))
        };
        Ok(field("smaps_rollup", "Private_Dirty")?
            + field("smaps_rollup", "Private_Clean")?
            + field("status", "VmPTE")?)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: the child is ours and was not waited for.
        unsafe {
            libc::kill(self.pid, libc::SIGKILL);
            libc::waitpid(self.pid, std::ptr::null_mut(), 0);
        }
    }
}

fn measure_fork(report: &mut Report, pages: usize, written: &[Vec<usize>]) -> Result<(), BenchError> {
    let mapping = Mapping::new(pages * PAGE_SIZE).map_err(BenchError::on("map memory"))?;
    let start = mapping.start();
    // SAFETY: the mapping has these pages, and only this function uses it.
    unsafe { fill(start, pages) };
    let mut spent = [Duration::ZERO; 3];
    let mut last = Report::timed(&mut spent, Child::fork)?.map_err(BenchError::on("fork"))?;
    report.add(FORK, FIRST, spent);
    let mut taken = 0;
    for (cycle, pages) in written.iter().enumerate() {
        let mut spent = [Duration::ZERO; 3];
        let forked = Report::timed(&mut spent, || {
            // SAFETY: as above.
            unsafe { write(start, pages, cycle) };
            Child::fork()
        })?;
        let child = forked.map_err(BenchError::on("fork"))?;
        // Once only, because the kernel walks over all pages for it.
        if cycle + 1 == written.len() {
            taken = last.own_bytes()? + child.own_bytes()?;
        }
        Report::timed(&mut spent, || drop(std::mem::replace(&mut last, child)))?;
        report.add(FORK, CYCLE, spent);
    }
    report.memory(FORK, taken);
    Ok(())
}

/// A private mapping of a file in memory.
struct PrivateMapping {
    start: NonNull<u8>,
    bytes: usize,
}

impl PrivateMapping {
    /// Maps a file whose pages differ.
    fn new(pages: usize) -> io::Result<PrivateMapping> {
        let file = File::from(memfd_create(c"peer", MFdFlags::MFD_CLOEXEC)?);
        let bytes = pages * PAGE_SIZE;
        file.set_len(bytes as u64)?;
        let map = |flags| {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping at an address that the kernel chooses.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, file.as_raw_fd(), 0) };
            if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start) }
        };
        let shared = map(libc::MAP_SHARED)?;
        // SAFETY: the mapping has these pages, only this function uses it, and it is unmapped once.
        unsafe {
            fill(NonNull::new(shared.cast()).unwrap_or(NonNull::dangling()), pages);
            libc::munmap(shared, bytes);
        }
        let start = NonNull::new(map(libc::MAP_PRIVATE)?.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(PrivateMapping { start, bytes })
    }

    /// Makes the content that of the file.
    fn roll_back(&self) -> io::Result<()> {
        // SAFETY: the mapping is ours, and its content is no longer needed.
        let result = unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes, libc::MADV_DONTNEED) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for PrivateMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody uses it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

fn measure_private(report: &mut Report, pages: usize, written: &[Vec<usize>]) -> Result<(), BenchError> {
    let mapping = PrivateMapping::new(pages).map_err(BenchError::on("map a file in memory"))?;
    for (cycle, pages) in written.iter().enumerate() {
        let (mut around, mut writes) = ([Duration::ZERO; 3], [Duration::ZERO; 3]);
        // SAFETY: the mapping has these pages, and only this function uses it.
        Report::timed(&mut writes, || unsafe { write(mapping.start, pages, cycle) })?;
        Report::timed(&mut around, || mapping.roll_back())?.map_err(BenchError::on("drop written pages"))?;
        report.add(PRIVATE, WRITES, writes);
        report.add(PRIVATE, ROLLBACK, around);
    }
    Ok(())
}

fn measure_undone(
    report: &mut Report,
    subject: &'static str,
    mut memory: impl UndoneMemory,
    pages: usize,
    written: &[Vec<usize>],
) -> Result<(), BenchError> {
    let start = memory.start();
    // SAFETY: the memory has these pages, and only this function uses it.
    unsafe { fill(start, pages) };
    let protecting = || BenchError::on("protect memory");
    for (cycle, pages) in written.iter().enumerate() {
        let (mut around, mut writes) = ([Duration::ZERO; 3], [Duration::ZERO; 3]);
        Report::timed(&mut around, || memory.begin())?.map_err(protecting())?;
        // SAFETY: as above; the peer opens the pages.
        Report::timed(&mut writes, || unsafe { write(start, pages, cycle) })?;
        black_box(Report::timed(&mut around, || memory.roll_back())?.map_err(protecting())?);
        report.add(subject, WRITES, writes);
        report.add(subject, ROLLBACK, around);
    }
    Ok(())
}

fn text(report: &Report, options: &Options) -> String {
    let mut table = Table::new(["", "", ">ms", ">±", ">user, ms", ">system, ms"]);
    for row in &report.rows {
        let runs = row.ms.count() as f64;
        table.row([
            row.operation.to_owned(),
            row.subject.to_owned(),
            format!("{:.3}", row.ms.median()),
            format!("{:.0} %", row.ms.spread() * 100.0),
            format!("{:.3}", row.user_ms / runs),
            format!("{:.3}", row.system_ms / runs),
        ]);
    }
    let ratio = |operation, peer| report.median(REGION, operation) / report.median(peer, operation);
    let measured = [SIGSEGV, USERFAULTFD].into_iter().filter(|peer| report.rows.iter().any(|row| row.subject == *peer));
    let copying: String = measured
        .map(|peer| {
            let (around, writes) = (ratio(ROLLBACK, peer), ratio(WRITES, peer));
            format!("of {peer}: begin and rollback {around:.2}, writes {writes:.2}\n")
        })
        .collect();
    let memory =
        |subject| report.memory_mib.iter().find(|(name, _)| *name == subject).map_or(f64::NAN, |found| found.1);
    format!(
        "{} MiB, {} % of the pages written at random, {} series of {} cycles; medians, means of processor times\n\n\
         {table}\n\
         first snapshot: {:.2} of fork (goal: at most 2); of the written pages alone: {:.1} ms\n\
         cycle of a snapshot: {:.2} of fork (goal: at most 0.15)\n\
         begin and rollback: {:.2} of MAP_PRIVATE (goal: at most 1.5), writes: {:.2} (goal: at most 0.5)\n\
         {copying}\
         memory besides the content, MiB: {:.0}; fork: {:.0} (goal: never more)\n\
         a read or write of 8 bytes: {:.1} ns; by a pointer: {:.1} ns (goal: at most 30 ns)\n",
        options.mib,
        options.percent,
        options.series,
        options.cycles,
        ratio(FIRST, FORK),
        report.median(REGION, SPARSE),
        ratio(CYCLE, FORK),
        ratio(ROLLBACK, PRIVATE),
        ratio(WRITES, PRIVATE),
        memory(REGION),
        memory(FORK),
        report.access_ns.median(),
        report.pointer_ns.median(),
    )
}
