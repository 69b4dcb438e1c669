//! `pagemark restore`: brings a program back.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, SystemTime};

use clap::Args;
use nix::errno::Errno;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;
use pagemark::PAGE_SIZE;
use pagemark::repository::{Checkpoint, Manifest};
use pagemark_process::criu::Criu;
use pagemark_process::files::{FilesError, PutBack, What, put_back};
use pagemark_process::lazy;
use pagemark_process::restore::{RestoreError, RestoreOptions, Restored, Streams, check, prepare};
use pagemark_process::scratch::{self, ScratchDirectory};
use serde::Serialize;

use crate::failure::{Failure, Outcome};
use crate::live::Progress;
use crate::output::print_json;
use crate::place::{Place, Reference, only_job, read};
use crate::signals::Signals;
use crate::text::{self, clean};

/// Bring a program back as it was at a checkpoint
///
/// The program goes on in this terminal; signals and the exit status are passed on as with `pagemark run`. Files that
/// it had open for writing hold again what they held then; what they hold now is kept under a name that is told.
#[derive(Args, Debug)]
pub struct Restore {
    #[command(flatten)]
    place: Place,
    /// The checkpoint's number [default: the newest]
    #[arg(long, value_name = "N")]
    checkpoint: Option<u64>,
    /// Let the program run before its memory is there: what it touches comes at once, the rest one after the other. Until all
    /// of it is there, it ends if Pagemark ends
    #[arg(long)]
    lazy: bool,
    /// Return at once (with --lazy, once all memory is there); the program goes on by itself, without this terminal
    #[arg(long)]
    detach: bool,
    /// Say nothing but errors
    #[arg(long, short)]
    quiet: bool,
    /// One JSON document on stdout, once the program runs; needs --detach
    #[arg(long, requires = "detach")]
    json: bool,
    /// The job, or one checkpoint of it; not needed where there is only one job
    #[arg(value_name = "JOB[@N]")]
    job: Option<Reference>,
}

#[derive(Serialize)]
struct Document<'a> {
    job: &'a str,
    sequence: u64,
    /// The root process.
    pid: i32,
    /// All of them, the root first.
    pids: &'a [i32],
    files: Vec<File>,
}

#[derive(Serialize)]
struct File {
    path: String,
    /// Where what it held before is now.
    set_aside: Option<String>,
}

impl Restore {
    pub fn run(self) -> Outcome {
        let repository = self.place.open()?;
        let mut reference = match &self.job {
            Some(reference) => reference.clone(),
            None => Reference { job: only_job(&repository)?, sequence: None },
        };
        if self.checkpoint.is_some() && reference.sequence.is_some() && self.checkpoint != reference.sequence {
            return Err(Failure::usage("two different checkpoints are named").help("either JOB@N or --checkpoint N"));
        }
        reference.sequence = self.checkpoint.or(reference.sequence);
        let checkpoint = read(&repository, &reference)?;
        if self.detach {
            // A tree whose memory is still to come ends with this process, so it is not to end in between.
            let _held = if self.lazy { Some(Signals::hold_for_stop()?) } else { None };
            self.bring_back(&checkpoint, |restored, files| self.told(&checkpoint.manifest, restored, files))?;
            return Ok(ExitCode::SUCCESS);
        }
        let signals = Signals::hold_for_target()?;
        let root = self.bring_back(&checkpoint, |restored, files| {
            signals.pass_on_to(Pid::from_raw(restored.root_pid))?;
            self.told(&checkpoint.manifest, restored, files)
        })?;
        // A checkpoint that is held can't be pruned.
        drop(checkpoint);
        wait(Pid::from_raw(root))
    }

    /// Puts the files and the processes back, and calls `running` once they run. Returns the root process's id once they need
    /// nothing more.
    fn bring_back(
        &self,
        checkpoint: &Checkpoint,
        running: impl FnOnce(&Restored, Vec<File>) -> Result<(), Failure>,
    ) -> Result<i32, Failure> {
        let manifest = &checkpoint.manifest;
        let name = format!("{}@{}", manifest.job, manifest.sequence);
        let failed = |error: &dyn Display| Failure::new(format!("cannot restore {name}"), error);
        let untouched = |error: RestoreError| {
            failed(&error).help(match error {
                RestoreError::Io { .. } => "nothing was touched; memory needs room in TMPDIR meanwhile",
                _ => "nothing was touched",
            })
        };
        check(manifest).map_err(untouched)?;
        let criu =
            Criu::find().map_err(|error| failed(&error).help("`make criu` in Pagemark's sources gets a CRIU"))?;
        // Goes when this returns. What a restore that was killed left holds secrets and much room.
        let place = std::env::temp_dir();
        scratch::sweep(&place);
        let images = ScratchDirectory::new_in(&place);
        let images = images.map_err(|error| failed(&error).help("TMPDIR names another place for temporary files"))?;
        if !self.quiet {
            let pages: u64 = manifest.spaces.iter().map(|space| space.pages).sum();
            let memory = text::bytes(pages * PAGE_SIZE as u64);
            eprintln!("pagemark: restoring {name} from {} ({memory})", text::ago(manifest.taken_unix_us));
        }
        let options = RestoreOptions {
            as_child: !self.detach,
            stopped: false,
            streams: if self.detach { Streams::Null } else { Streams::Inherit },
        };
        if self.lazy {
            let prepared = lazy::prepare(manifest, checkpoint, images.path()).map_err(untouched)?;
            let files = put_files_back(checkpoint).map_err(|error| failed(&error))?;
            let restoring = prepared.run(&criu, checkpoint, &options);
            let restoring = restoring.inspect_err(|_| tell_files(&files)).map_err(|error| failed(&error))?;
            running(restoring.restored(), files)?;
            let (root, total_pages) = (restoring.restored().root_pid, restoring.total_pages());
            // Where the program has the terminal, it has all of it.
            let mut progress = self.detach.then(|| Progress::new("delivering"));
            let delivered = restoring.deliver(&mut |pages| {
                if let Some(progress) = &mut progress {
                    progress.at(pages, total_pages, text::count);
                }
            });
            delivered.map_err(|error| {
                failed(&error).help("its memory did not come whole, so it was ended; it can be restored again")
            })?;
            return Ok(root);
        }
        let prepared = with_progress(images.path(), manifest, || prepare(manifest, checkpoint, images.path()));
        let prepared = prepared.map_err(untouched)?;
        let files = put_files_back(checkpoint).map_err(|error| failed(&error))?;
        let restored = prepared.run(&criu, &options);
        let restored = restored.inspect_err(|_| tell_files(&files)).map_err(|error| failed(&error))?;
        running(&restored, files)?;
        Ok(restored.root_pid)
    }

    fn told(&self, manifest: &Manifest, restored: &Restored, files: Vec<File>) -> Result<(), Failure> {
        if !self.quiet {
            tell_files(&files);
            eprintln!("pagemark: {}@{} runs as process {}", manifest.job, manifest.sequence, restored.root_pid);
        }
        if self.json {
            let (job, sequence) = (manifest.job.as_str(), manifest.sequence);
            print_json(&Document { job, sequence, pid: restored.root_pid, pids: &restored.pids, files })?;
        }
        Ok(())
    }
}

impl From<PutBack> for File {
    fn from(file: PutBack) -> Self {
        let text = |path: PathBuf| path.display().to_string();
        File { path: text(file.path), set_aside: file.set_aside.map(text) }
    }
}

/// Gives the files what they held, and returns those that were changed for it.
fn put_files_back(checkpoint: &Checkpoint) -> Result<Vec<File>, FilesError> {
    let files = put_back(&checkpoint.manifest.files, checkpoint, SystemTime::now())?;
    Ok(files.into_iter().filter(|file| file.what != What::Untouched).map(File::from).collect())
}

/// Told also where the restore fails afterwards.
fn tell_files(files: &[File]) {
    for file in files {
        let path = clean(&file.path);
        match &file.set_aside {
            Some(aside) => eprintln!("pagemark: {path} put back; what it held is in {}", clean(aside)),
            None => eprintln!("pagemark: {path} put back"),
        }
    }
}

/// Does `work`, which fills `directory` with the checkpoint's memory, and shows how far it is.
fn with_progress<T>(directory: &Path, manifest: &Manifest, work: impl FnOnce() -> T) -> T {
    let total: u64 = manifest.spaces.iter().map(|space| space.pages * PAGE_SIZE as u64).sum();
    thread::scope(|scope| {
        let (done, is_done) = mpsc::channel::<()>();
        scope.spawn(move || {
            let mut progress = Progress::new("reading");
            while is_done.recv_timeout(Duration::from_millis(100)) == Err(RecvTimeoutError::Timeout) {
                let files = fs::read_dir(directory).into_iter().flatten().flatten();
                let written: u64 = files.filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum();
                progress.at(written.min(total), total, text::bytes);
            }
        });
        let result = work();
        drop(done);
        result
    })
}

/// Waits until the program exits, and gives its status as a shell would.
fn wait(root: Pid) -> Outcome {
    loop {
        // Other processes of the tree whose parents have exited are ours to bury too.
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, code)) if pid == root => return Ok(ExitCode::from(code as u8)),
            Ok(WaitStatus::Signaled(pid, signal, _)) if pid == root => return Ok(ExitCode::from(128 + signal as u8)),
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(Failure::new("the program's exit status is not known", error)),
        }
    }
}
