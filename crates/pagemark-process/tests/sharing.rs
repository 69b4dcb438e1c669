//! A checkpoint leaves the memory that forked processes share as it is, and a restore shares it
//! again.

mod support;

use std::sync::Arc;

use pagemark::repository::Repository;
use pagemark::track::Scope;
use pagemark::{Job, JobOptions, Mechanism};
use pagemark_linux::proc::{self, Fields, Process};
use pagemark_process::criu::DumpOptions;
use pagemark_process::saver::{CriuSaver, RegisterSaver, StateSaver};
use pagemark_process::target::ProcessTarget;
use pagemark_testing::{skip, skipped, wait_until};
use support::{Checkpoints, Program, tree};

/// MiB of memory that a process fills before it forks.
const SHARED_MIB: u64 = 24;

/// The most that a checkpoint may add to the memory of the processes, MiB: CRIU changes pages of
/// their code and stacks.
const ADDED_MIB: u64 = 2;

/// Fills memory, and forks three children that only wait.
const PREFORK: &str = r#"
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
int main(void) {
    size_t bytes = 24 << 20;
    char *memory = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (size_t at = 0; at < bytes; at += 64)
        memory[at] = 1 + at / 4096;
    for (int child = 0; child < 3; child++)
        if (fork() == 0)
            for (;;)
                pause();
    close(open("ready", O_CREAT | O_WRONLY, 0600));
    for (;;)
        pause();
}
"#;

/// The sum of the proportional set sizes of processes, MiB: each shared page counts once.
fn proportional_mib(pids: &[i32]) -> u64 {
    let of_process = |&pid: &i32| Fields::read(proc::path(pid, "smaps_rollup")).unwrap().bytes("Pss").unwrap();
    pids.iter().map(of_process).sum::<u64>() >> 20
}

fn checkpoints_leave_memory_shared(mechanism: Mechanism, saver: Arc<dyn StateSaver>) {
    let Some(program) = Program::c(PREFORK) else { return };
    wait_until("the program has forked", || program.read("ready").is_some());
    let pids = tree(program.pid());
    assert_eq!(pids.len(), 4);
    let before = proportional_mib(&pids);
    assert!((SHARED_MIB..SHARED_MIB + 8).contains(&before), "{before} MiB before");
    let directory = tempfile::tempdir().unwrap();
    let repository = Repository::create(&directory.path().join("repository")).unwrap();
    let target = ProcessTarget::attach(Process::find(program.pid()).unwrap(), mechanism, saver).unwrap();
    let mut job = Job::new(target, repository, JobOptions::new("prefork"));
    for _ in 0..2 {
        let taken = job.checkpoint().unwrap();
        let after = proportional_mib(&pids);
        assert!(after <= before + ADDED_MIB, "{mechanism}: {before} MiB before, {after} MiB after");
        assert!(taken.sequence > 1 || taken.cost.dirty_pages >= 4 * (SHARED_MIB << 20 >> 12), "{taken:?}");
    }
    job.detach();
}

#[test]
fn memory_that_forked_processes_share_stays_shared_with_each_mechanism() {
    for mechanism in Mechanism::of_scope(Scope::Process) {
        match pagemark::track::check(mechanism, Scope::Process) {
            Ok(_) => checkpoints_leave_memory_shared(mechanism, Arc::new(RegisterSaver)),
            Err(error) => skipped(&error.to_string()),
        }
    }
}

#[test]
fn memory_that_forked_processes_share_stays_shared_with_criu() {
    let Some(criu) = support::criu() else { skip!("no CRIU") };
    let saver = CriuSaver::new(criu, DumpOptions::default());
    checkpoints_leave_memory_shared(Mechanism::choose(Scope::Process), Arc::new(saver));
}

/// CRIU opens a program by its path if only root can change the path, and by a descriptor of
/// Pagemark otherwise.
#[test]
fn restored_processes_share_memory_again() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    for is_of_user in [false, true] {
        let Some(mut program) = Program::c(PREFORK) else { return };
        if is_of_user {
            std::os::unix::fs::chown(program.directory(), Some(65534), Some(65534)).unwrap();
        }
        wait_until("the program has forked", || program.read("ready").is_some());
        let before = proportional_mib(&tree(program.pid()));
        checkpoints.cycle(&mut program);
        let after = proportional_mib(&tree(program.pid()));
        let allowed = before + ADDED_MIB;
        assert!(after <= allowed, "in a directory of a user: {is_of_user}: {before} MiB before, {after} MiB after");
    }
}
