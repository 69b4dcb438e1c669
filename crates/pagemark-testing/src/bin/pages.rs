//! `pages DIRECTORY`: checks memory of every kind, and changes its mappings on request.
//!
//! The memory is private memory, 2 MiB huge pages, private and shared mappings of files, shared
//! memory without a file, and memory that is swapped out where there is swap. On SIGUSR1 the
//! program maps, grows and unmaps memory. On SIGUSR2 it forks a child, which has the same memory
//! and checks it itself, with its progress in `progress.PID`. Each completed request is appended to
//! `done`.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::{mem, ptr};

use pagemark_testing::{FilledMapping, Report};

const MIB: usize = 1 << 20;

fn main() {
    let mut report = Report::from_arguments();
    let mut space = block_signals().and_then(|()| Space::new(report.directory())).unwrap_or_else(|error| {
        eprintln!("set up memory: {error}");
        std::process::exit(2);
    });
    loop {
        let done = match wait_for_signal() {
            Some(libc::SIGUSR1) => space.change().and_then(|()| note(report.directory(), "changed")),
            Some(libc::SIGUSR2) => fork().and_then(|is_child| {
                if is_child {
                    let directory = report.directory().to_path_buf();
                    report = Report::new(&directory, &format!("progress.{}", std::process::id()))?;
                    return Ok(());
                }
                note(report.directory(), "forked")
            }),
            _ => Ok(()),
        };
        report.require(done.is_ok(), format_args!("{done:?}"));
        if let Err(wrong) = space.round(report.rounds()) {
            report.require(false, wrong);
        }
        report.ok();
    }
}

/// All memory of the program.
struct Space {
    /// In each round one of these regions gets other content.
    private: Vec<FilledMapping>,
    /// Written in each round with unchanged content, because a parent and its children share them.
    shared: Vec<FilledMapping>,
    /// Never written, so that it can stay swapped out.
    cold: FilledMapping,
}

impl Space {
    fn new(directory: &Path) -> io::Result<Space> {
        let file = |name: &str| -> io::Result<File> {
            let path = directory.join(name);
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
            file.set_len(MIB as u64)?;
            Ok(file)
        };
        Ok(Space {
            private: vec![
                FilledMapping::map(2 * MIB, 1, None, false)?,
                FilledMapping::map_huge(8 * MIB, 2)?,
                FilledMapping::map(MIB, 3, Some(&file("mapped-private")?), false)?,
            ],
            shared: vec![
                FilledMapping::map(MIB, 4, Some(&file("mapped-shared")?), true)?,
                FilledMapping::map(MIB, 5, None, true)?,
            ],
            cold: FilledMapping::map(4 * MIB, 6, None, false)?,
        })
    }

    fn change(&mut self) -> io::Result<()> {
        let seed = 100 + self.private.len() as u64;
        self.private.push(FilledMapping::map(MIB, seed, None, false)?);
        self.private[0].resize(3 * MIB)?;
        self.private[0].resize(MIB)?;
        if self.private.len() > 6 {
            self.private.swap_remove(4);
        }
        Ok(())
    }

    /// Writes some of the memory and checks all of it. The error is the problem.
    fn round(&mut self, round: u64) -> Result<(), String> {
        let turn = round as usize % self.private.len();
        self.private[turn].fill(round << 32);
        self.shared.iter_mut().for_each(FilledMapping::touch);
        for (number, region) in self.private.iter_mut().chain(&mut self.shared).enumerate() {
            check(&format!("region {number}"), region)?;
        }
        if round.is_multiple_of(50) {
            check("the cold region", &mut self.cold)?;
            // The advice fails where there is no swap space.
            let _ = self.cold.advise(libc::MADV_PAGEOUT);
        }
        Ok(())
    }
}

fn check(name: &str, region: &mut FilledMapping) -> Result<(), String> {
    region.damage().map_or(Ok(()), |(address, word)| Err(format!("{name}: {address:#x} holds {word:#x}")))
}

/// Appends the name of a completed request to `done`.
fn note(directory: &Path, request: &str) -> io::Result<()> {
    let mut done = OpenOptions::new().append(true).create(true).open(directory.join("done"))?;
    done.write_all(format!("{request}\n").as_bytes())
}

/// The signals that request a change.
fn request_signals() -> libc::sigset_t {
    // SAFETY: the set is emptied before it is filled.
    unsafe {
        let mut set = mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGUSR1);
        libc::sigaddset(&mut set, libc::SIGUSR2);
        set
    }
}

fn block_signals() -> io::Result<()> {
    // SAFETY: the set outlives the call.
    match unsafe { libc::sigprocmask(libc::SIG_BLOCK, &request_signals(), ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The next request, if it comes within 20 ms.
fn wait_for_signal() -> Option<i32> {
    let timeout = libc::timespec { tv_sec: 0, tv_nsec: 20_000_000 };
    // SAFETY: set and time outlive the call, which returns no details.
    let signal = unsafe { libc::sigtimedwait(&request_signals(), ptr::null_mut(), &timeout) };
    (signal > 0).then_some(signal)
}

/// True in the child.
fn fork() -> io::Result<bool> {
    // SAFETY: this program has one thread, so that the child may do whatever the parent may.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        pid => Ok(pid == 0),
    }
}
