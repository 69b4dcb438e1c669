//! Which job the checkpoints of a program are filed under.
//!
//! A job belongs to one program at a time. Who names a job gets that one, or is refused while
//! another program has it. Without a name the job is called as the program, or as that with a
//! number where such a job has the checkpoints of another program.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::time::Duration;

use pagemark::repository::{JobClaim, Manifest, ProcessRecord, ProgramRecord, Repository};
use pagemark::{Error, ErrorKind};
use pagemark_linux::proc::{self, Process, Stat, Status};
use pagemark_vm::restored_birth;

use crate::failure::Failure;

/// The longest name of a job.
const MAX_NAME_BYTES: usize = 64;
/// The longest command that is shown in a line.
const SHOWN_CHARACTERS: usize = 120;
/// More jobs of one name are not looked through.
const MAX_JOBS: usize = 10_000;
/// How long a job that the user names is waited for.
const NAMED_PATIENCE: Duration = Duration::from_secs(1);

/// What batch systems number equal programs by.
const TASKS: [&str; 8] = [
    "SLURM_ARRAY_TASK_ID",
    "SLURM_PROCID",
    "PBS_ARRAY_INDEX",
    "PBS_ARRAYID",
    "SGE_TASK_ID",
    "LSB_JOBINDEX",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
];

/// A job that is this program's while the value exists.
pub struct OwnJob {
    claim: JobClaim,
    /// What the checkpoints record of the program.
    pub program: ProgramRecord,
    /// What is to be said of the name.
    pub notice: Option<String>,
}

impl OwnJob {
    /// The name of the job.
    pub fn name(&self) -> String {
        self.claim.job().to_owned()
    }
}

/// A program that Pagemark is about to start.
pub fn of_command(command: &[OsString]) -> ProgramRecord {
    ProgramRecord {
        command: command.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        directory: std::env::current_dir().ok().map(|path| path.display().to_string()),
        task: task_of(|name| std::env::var(name).ok()),
        ..ProgramRecord::default()
    }
}

/// A program that runs.
pub fn of_process(process: Process) -> ProgramRecord {
    let pid = process.pid;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let environment = fs::read(proc::path(pid, "environ")).unwrap_or_default();
    let variable = |name: &str| {
        let mut variables = environment.split(|&byte| byte == 0);
        variables.find_map(|variable| variable.strip_prefix(name.as_bytes())?.strip_prefix(b"=").map(text))
    };
    ProgramRecord {
        command: proc::arguments(pid).unwrap_or_default().iter().map(|argument| text(argument)).collect(),
        directory: fs::read_link(proc::path(pid, "cwd")).ok().map(|path| path.display().to_string()),
        name: None,
        task: task_of(variable),
        process: record(process),
    }
}

/// What tells the process from others, also after a boot. None if it is gone.
pub fn record(process: Process) -> Option<ProcessRecord> {
    let Process { pid, start_ticks } = process;
    process.stat()?;
    // Without it, only the process itself is known again, not that as which it is restored.
    let birth = proc::birth(pid).ok().flatten();
    Some(ProcessRecord { pid, start_ticks, boot: proc::boot_id().ok()?, birth })
}

fn task_of(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let tasks = TASKS.iter().filter_map(|name| variable(name).map(|value| format!("{name}={value}")));
    Some(tasks.collect::<Vec<_>>().join(" ")).filter(|tasks| !tasks.is_empty())
}

/// The command of a checkpoint, in one line.
pub fn command_of(manifest: &Manifest) -> String {
    manifest.command.join(" ")
}

fn shown(command: &str) -> String {
    match command.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}…", &command[..end]),
        None => command.to_owned(),
    }
}

/// The command and the directory of the program of a checkpoint, for people.
fn described(manifest: &Manifest) -> String {
    let command = command_of(manifest);
    let command = if command.is_empty() { "unknown".to_owned() } else { shown(&command) };
    match manifest.program.as_ref().and_then(|program| program.directory.as_ref()) {
        Some(directory) => format!("{command}, in {directory}"),
        None => command,
    }
}

/// Claims the job `named`, or a job of the name `default` that has no checkpoints of another
/// program.
///
/// # Errors
/// The job that is named is another's, the program is checkpointed already, or the repository
/// failed.
pub fn claim(
    repository: &Repository,
    named: Option<&str>,
    default: &str,
    program: ProgramRecord,
) -> Result<OwnJob, Failure> {
    let claims = Claims { repository, program, holder: String::new() };
    let holder = format!("Pagemark (process {}) for {}", std::process::id(), shown(&claims.program.command.join(" ")));
    let claims = Claims { holder, ..claims };
    match named {
        Some(name) => claims.named(name),
        None => claims.free(default),
    }
}

struct Claims<'a> {
    repository: &'a Repository,
    program: ProgramRecord,
    /// Who is named to others who want the job.
    holder: String,
}

impl Claims<'_> {
    /// Claims a job. An error in the result if it is another's after that time.
    fn attempt(&self, name: &str, patience: Duration) -> Result<Result<JobClaim, Error>, Failure> {
        match self.repository.claim_within(name, &self.holder, patience) {
            Err(error) if error.kind() == ErrorKind::JobInUse => Ok(Err(error)),
            claimed => claimed.map(Ok).map_err(|error| Failure::of(format!("cannot use the job {name}"), error)),
        }
    }

    fn named(self, name: &str) -> Result<OwnJob, Failure> {
        let claim = self
            .attempt(name, NAMED_PATIENCE)?
            .map_err(|error| Failure::plain(error).help("name another job with --job, or end that program first"))?;
        let newest = self.newest(name);
        let others = newest.as_ref().filter(|newest| !self.is_own(newest));
        let notice =
            others.map(|newest| format!("the job {name} has checkpoints of another program: {}", described(newest)));
        Ok(self.own(claim, newest.as_ref(), notice))
    }

    /// The first job of the name that continues, or else the first that is free.
    fn free(self, default: &str) -> Result<OwnJob, Failure> {
        let jobs = self.repository.jobs().map_err(|error| {
            Failure::of(format!("cannot list the jobs in {}", self.repository.path().display()), error)
        })?;
        let mut taken = None;
        let existing = (1..=MAX_JOBS.min(jobs.len() + 1)).map(|number| numbered(default, number));
        let existing = jobs.iter().filter(|job| existing.clone().any(|name| name == **job) || has_number(default, job));
        for name in existing {
            let Some(newest) = self.newest(name) else { continue };
            let is_own = self.is_own(&newest);
            match self.attempt(name, Duration::ZERO)? {
                Ok(claim) if is_own => {
                    let notice = (name != default).then(|| own_name(taken.as_deref(), name));
                    return Ok(self.own(claim, Some(&newest), notice));
                }
                Ok(_) => drop(taken.get_or_insert(format!(
                    "the job {name} has the checkpoints of another program ({})",
                    described(&newest)
                ))),
                Err(error) if self.is_own_process(&newest) => {
                    let failure = Failure::plain(format!("this program is checkpointed already: {error}"));
                    return Err(failure.help("end that Pagemark first, or name a job with --job"));
                }
                Err(error) => drop(taken.get_or_insert(error.to_string())),
            }
        }
        for number in 1..=MAX_JOBS {
            let name = numbered(default, number);
            if jobs.contains(&name) {
                continue;
            }
            match self.attempt(&name, Duration::ZERO)? {
                // Another program may have begun it meanwhile.
                Ok(claim) if self.newest(&name).is_none() => {
                    let notice = (name != default).then(|| own_name(taken.as_deref(), &name));
                    return Ok(self.own(claim, None, notice));
                }
                Ok(_) => {}
                Err(error) => drop(taken.get_or_insert(error.to_string())),
            }
        }
        Err(Failure::plain(format!("there are {MAX_JOBS} jobs of the name {default}")).help("name one with --job"))
    }

    /// The newest checkpoint of a job that can be read.
    fn newest(&self, job: &str) -> Option<Manifest> {
        let records = self.repository.records(job).ok()?;
        let mut readable = records.into_iter().rev().filter_map(|(sequence, record)| record.ok().map(|_| sequence));
        readable.find_map(|sequence| self.repository.read(job, sequence).ok()).map(|checkpoint| checkpoint.manifest)
    }

    fn is_own_process(&self, newest: &Manifest) -> bool {
        newest.program.as_ref().is_some_and(|program| program.is_same_process(&self.program))
    }

    /// True if the checkpoint is of the same program: of its process, of one that is as it was
    /// before a restore, or of one that ended and is now started again.
    fn is_own(&self, newest: &Manifest) -> bool {
        let Some(program) = &newest.program else {
            // An earlier version of Pagemark took it.
            return command_of(newest) == self.program.command.join(" ");
        };
        self.is_own_process(newest) || (program.is_started_again(&self.program) && !runs(program))
    }

    fn own(self, claim: JobClaim, newest: Option<&Manifest>, notice: Option<String>) -> OwnJob {
        let mut program = self.program;
        if let Some(before) = newest.and_then(|newest| newest.program.as_ref())
            && before.is_same_process(&program)
        {
            // It stays known by the command that started it, whatever title it has now.
            program = ProgramRecord { process: program.process, ..before.clone() };
        }
        OwnJob { claim, program, notice }
    }
}

fn own_name(taken: Option<&str>, name: &str) -> String {
    let taken = taken.map(|taken| format!("{taken}; ")).unwrap_or_default();
    format!("{taken}the checkpoints of this program are those of the job {name}")
}

/// True if the process of a program runs, or that as which it was restored.
fn runs(program: &ProgramRecord) -> bool {
    let Some(process) = &program.process else { return false };
    let lives = |stat: &Stat| !matches!(stat.state, 'Z' | 'X');
    let original = Process { pid: process.pid, start_ticks: process.start_ticks };
    if proc::boot_id().is_ok_and(|boot| boot == process.boot) && original.stat().is_some_and(|stat| lives(&stat)) {
        return true;
    }
    let Some(birth) = &process.birth else { return false };
    let is_restored = |pid: &i32| {
        if program.name.is_some() {
            return restored_birth(*pid).as_ref() == Some(birth);
        }
        // It has its id again, or is in a namespace of its own.
        let may_be = *pid == process.pid || Status::read(*pid).is_ok_and(|status| status.namespace_ids.len() > 1);
        may_be && proc::birth(*pid).is_ok_and(|found| found.as_ref() == Some(birth))
    };
    // Threads of the kernel have no arguments.
    let is_program = |pid: &i32| proc::arguments(*pid).is_ok_and(|arguments| !arguments.is_empty());
    let processes = proc::tree::processes().unwrap_or_default();
    let found = processes.iter().filter(|pid| is_program(pid)).find(|pid| is_restored(pid));
    found.is_some_and(|pid| Stat::read(*pid).is_ok_and(|stat| lives(&stat)))
}

/// `redis`, `redis-2`, `redis-3`.
fn numbered(default: &str, number: usize) -> String {
    if number < 2 {
        return default.to_owned();
    }
    let number = format!("-{number}");
    // Names consist of ASCII.
    let end = default.len().min(MAX_NAME_BYTES - number.len());
    format!("{}{number}", &default[..end])
}

/// True if a job has the default name with any number.
fn has_number(default: &str, job: &str) -> bool {
    let number = job.rsplit_once('-').and_then(|(_, number)| number.parse().ok());
    number.is_some_and(|number| numbered(default, number) == job)
}

/// The name of a job for a program. Characters that a name of a job cannot have become `-`, and it
/// begins with neither `.` nor `-`, so that no command takes it for an option.
pub fn default_name(program: &Path) -> String {
    let name = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy();
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let name: String = name.chars().map(|c| if allowed(c) { c } else { '-' }).collect();
    match name.trim_start_matches(['.', '-']) {
        "" => "job".into(),
        name => name.chars().take(MAX_NAME_BYTES).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;

    use pagemark::repository::check_job_name;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_job_is_called_as_its_program() {
        for (program, name) in [
            ("/usr/bin/redis-server", "redis-server"),
            ("./.hidden job é", "hidden-job--"),
            ("/", "job"),
            ("..", "job"),
            ("", "job"),
            ("/bin/-x", "x"),
            ("\x1b]0;P", "0-P"),
            ("web@3", "web-3"),
        ] {
            assert_eq!(default_name(Path::new(program)), name);
        }
    }

    #[test]
    fn jobs_of_one_name_have_numbers() {
        assert_eq!([1, 2, 10].map(|number| numbered("web", number)), ["web", "web-2", "web-10"]);
        assert_eq!(numbered(&"a".repeat(64), 12), format!("{}-12", "a".repeat(61)));
        assert!(has_number("web", "web-7") && !has_number("web", "web-x") && !has_number("web", "api-2"));
    }

    proptest! {
        #[test]
        fn every_default_name_is_one_that_every_command_takes(bytes in any::<Vec<u8>>(), number in 1usize..3000) {
            let name = default_name(Path::new(OsStr::from_bytes(&bytes)));
            for name in [numbered(&name, number), name] {
                prop_assert!(check_job_name(&name).is_ok() && !name.starts_with('-'), "{name:?}");
                let reference: crate::reference::Reference = name.parse().expect("it is a reference");
                prop_assert_eq!(reference.job, name);
            }
        }
    }
}
