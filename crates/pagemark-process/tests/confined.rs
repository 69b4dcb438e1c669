//! Programs that confine themselves in a way that no restore gives back: a checkpoint is refused,
//! or names what the restored program lacks.

mod support;

use std::sync::Arc;

use pagemark::Mechanism;
use pagemark::job::{Job, JobOptions};
use pagemark::repository::{Checkpoint, Repository};
use pagemark_linux::confinement::VIEW;
use pagemark_linux::proc::Process;
use pagemark_process::criu::DumpOptions;
use pagemark_process::saver::CriuSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_testing::{skip, wait_until};
use support::{Checkpoints, Program, is_running};
use tempfile::TempDir;

/// How the program confines itself, as `confined.c` names it, and what a refusal says of it.
const WAYS: [(&str, &str); 5] = [
    ("LANDLOCK", "is under Landlock"),
    ("DISPATCH", "dispatches its system calls to itself"),
    ("THREAD_KEY", "has a keyring of its own that holds a key"),
    ("PROCESS_KEY", "has a keyring of its process that holds a key"),
    ("SESSION_KEY", "has a keyring of its session that holds a key"),
];

fn program(way: &str) -> Option<Program> {
    Program::c(&format!("#define HOW {way}\n{}", include_str!("trackee/confined.c")))
}

/// Has a program confine itself. Returns the thread that did. None if the kernel lacks the way.
fn confine(program: &Program) -> Option<i32> {
    std::fs::write(program.directory().join("confine"), "").unwrap();
    wait_until("the program confines itself", || program.read("confined").is_some());
    program.read("confined").unwrap().trim().parse().ok()
}

/// Takes checkpoints of a program, each after what is done before it.
fn take(
    checkpoints: &Checkpoints,
    program: &Program,
    options: DumpOptions,
    before: &[&dyn Fn()],
) -> Result<(Checkpoint, TempDir), String> {
    let directory = tempfile::tempdir().unwrap();
    let repository = Repository::open_or_create(directory.path()).unwrap();
    let saver = Arc::new(CriuSaver::new(checkpoints.criu.clone(), options));
    let process = Process::find(program.pid()).unwrap();
    let mechanism: Mechanism = "compare".parse().unwrap();
    let target = ProcessTarget::attach(process, mechanism, saver).map_err(|error| error.to_string())?;
    let mut job = Job::new(target, repository.clone(), JobOptions::new("job"));
    let mut last = Err("no checkpoint was taken".to_owned());
    for before in before {
        before();
        last = job.checkpoint().map_err(|error| error.to_string());
    }
    job.detach();
    let sequence = last?.sequence;
    Ok((repository.read("job", sequence).unwrap(), directory))
}

#[test]
fn a_confined_program_is_refused_by_name() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    if let Some(error) = VIEW.refusal() {
        skip!("the kernel does not show what confines threads: {error}");
    }
    for (way, words) in WAYS {
        let Some(program) = program(way) else { skip!("no C compiler") };
        let options = DumpOptions::default();
        // One that confines itself between two checkpoints is refused at the second.
        let confine = || assert!(confine(&program).is_none_or(|thread| thread > 0));
        let refused = take(&checkpoints, &program, options, &[&|| {}, &confine]).map(drop);
        let confined = program.read("confined").unwrap();
        let Ok(thread) = confined.trim().parse::<i32>() else {
            pagemark_testing::skipped(&format!("the kernel lacks {way}"));
            continue;
        };
        let again = take(&checkpoints, &program, options, &[&|| {}]).map(drop);
        for refused in [refused, again] {
            let reason = refused.unwrap_err();
            let named = format!("thread {thread} of process {} {words}", program.pid());
            assert!(reason.contains(&named) && reason.contains("--without-sandbox"), "{way}: {reason}");
        }
        assert!(is_running(program.pid()));
    }
}

#[test]
fn a_program_that_is_saved_without_is_named_after_the_restore() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    if let Some(error) = VIEW.refusal() {
        skip!("the kernel does not show what confines threads: {error}");
    }
    // The last is no reason to refuse a program: no key is lost.
    let ways = [
        ("LANDLOCK", "lost the rules of Landlock", true),
        ("DISPATCH", "lost the dispatch of system calls", true),
        ("EMPTY_SESSION", "lost the keyring of the session, which held no key", false),
    ];
    for (way, words, without_sandbox) in ways {
        let Some(mut program) = program(way) else { skip!("no C compiler") };
        let options = DumpOptions { without_sandbox, ..DumpOptions::default() };
        let Some(thread) = confine(&program) else {
            pagemark_testing::skipped(&format!("the kernel lacks {way}"));
            continue;
        };
        let (checkpoint, _directory) = take(&checkpoints, &program, options, &[&|| {}]).unwrap();
        program.kill();
        let restored = checkpoints.restore(&checkpoint).unwrap();
        program.adopt(&restored);
        let [lost] = &restored.lost_state[..] else { panic!("{way}: {:?}", restored.lost_state) };
        assert!(lost.starts_with(&format!("thread {thread} {words}")), "{way}: {lost}");
        assert_eq!(lost.contains("--without-sandbox"), without_sandbox, "{way}: {lost}");
    }
}
