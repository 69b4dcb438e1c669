//! System V semaphores outside of an IPC namespace.

mod support;

use std::time::Duration;

use pagemark_process::ErrorKind;
use pagemark_testing::wait_until;
use support::{Checkpoints, Program, REPORT};

/// Two processes with a set of three semaphores and the key KEY, and one without a key. The first
/// process changes semaphore 0 of both sets all the time, and counts what their values have to be.
/// The second waits at semaphore 1 of the first set. When there is a file `check`, the first
/// compares the values with its counts, the second is checked to wait still, and each writes `fine`
/// or what is wrong into `checked.N`. When there is a file `end`, the first lets the second
/// continue, which writes `ended`.
const PROGRAM: &str = r#"
#include <errno.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/sem.h>
#include <unistd.h>

static int add(int id, int index, int number) {
    struct sembuf operation = { index, number, 0 };
    return semop(id, &operation, 1);
}

int main(void) {
    int keyed = semget(KEY, 3, IPC_CREAT | IPC_EXCL | 0640), private = semget(IPC_PRIVATE, 1, 0600);
    if (keyed < 0 || private < 0) {
        perror("semget");
        return 1;
    }
    FILE *file = fopen("private", "w");
    fprintf(file, "%d", private);
    fclose(file);
    if (semctl(keyed, 2, SETVAL, 77))
        return 1;
    if (fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        report("ready.1", "");
        int result = add(keyed, 1, -1);
        report("ended", result ? errno == EINTR ? "interrupted" : "an error" : "ended");
        for (;;)
            pause();
    }
    report("ready.0", "");
    for (int count = 0, up = 1;; up = count == 30000 ? 0 : count == 0 ? 1 : up) {
        if (add(keyed, 0, up ? 1 : -1) || add(private, 0, up ? 1 : -1))
            return 1;
        count += up ? 1 : -1;
        if (access("check", F_OK) == 0 && access("checked.0", F_OK)) {
            struct semid_ds status;
            /* After a restore, it waits again when it first runs, which may be later on a busy machine. */
            for (int tries = 0; tries < 30000 && semctl(keyed, 1, GETNCNT) != 1; tries++)
                usleep(1000);
            report("checked.1", semctl(keyed, 1, GETNCNT) == 1 ? "fine" : "the second process does not wait");
            report("checked.0",
                semctl(keyed, 0, IPC_STAT, &status) ? "the set is gone" :
                (status.sem_perm.mode & 0777) != 0640 || status.sem_perm.__key != KEY ? "the set is another" :
                semctl(keyed, 0, GETVAL) != count || semctl(private, 0, GETVAL) != count ? "a count is wrong" :
                semctl(keyed, 1, GETVAL) != 0 || semctl(keyed, 2, GETVAL) != 77 ? "a value is wrong" : "fine");
        }
        if (access("end", F_OK) == 0 && access("told", F_OK)) {
            report("told", "");
            add(keyed, 1, 1);
        }
        usleep(200);
    }
}
"#;

/// A set with a key, which ends with the test.
struct Set(i32);

impl Set {
    fn id(&self) -> Option<i32> {
        // SAFETY: it only looks for a set.
        Some(unsafe { libc::semget(self.0, 0, 0) }).filter(|id| *id >= 0)
    }

    fn remove(&self) {
        self.id().into_iter().for_each(remove);
    }

    /// Makes a set with the key.
    fn make(&self) {
        // SAFETY: the call takes numbers alone.
        assert!(unsafe { libc::semget(self.0, 3, libc::IPC_CREAT | libc::IPC_EXCL | 0o600) } >= 0);
    }

    fn value(&self, index: i32) -> i32 {
        // SAFETY: the call takes numbers alone.
        unsafe { libc::semctl(self.id().unwrap(), index, libc::GETVAL) }
    }

    fn set_value(&self, index: i32, value: i32) {
        // SAFETY: the call takes numbers alone.
        assert_eq!(unsafe { libc::semctl(self.id().unwrap(), index, libc::SETVAL, value) }, 0);
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        self.remove();
    }
}

fn remove(id: i32) {
    // SAFETY: the call takes numbers alone.
    assert_eq!(unsafe { libc::semctl(id, 0, libc::IPC_RMID) }, 0);
}

fn start(set: &Set) -> Option<Program> {
    let program = Program::c(&(REPORT.to_owned() + &PROGRAM.replace("KEY", &set.0.to_string())))?;
    for process in ["ready.0", "ready.1"] {
        wait_until("the program has its semaphores", || program.read(process).is_some());
    }
    Some(program)
}

#[test]
fn values_come_back_with_ids_and_keys() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let set = Set(0x5100_0000 + std::process::id() as i32);
    let Some(mut program) = start(&set) else { return };
    program.checks_its_memory();
    let (id, private) = (set.id(), program.read("private").unwrap().parse().unwrap());
    let go_on = || std::thread::sleep(Duration::from_millis(50));
    let checkpoint = checkpoints.take(&program, &[&go_on, &|| ()]);
    program.checks_its_memory();
    program.kill();
    // At first the sets are still there, then one or both are made.
    for removed in [vec![], vec![private], vec![private, id.unwrap()]] {
        removed.into_iter().for_each(remove);
        program.adopt(&checkpoints.restore(&checkpoint).unwrap());
        assert_eq!(set.id(), id);
        program.checks_its_memory();
        go_on();
        program.kill();
    }
    // Another set with the key is in the way, and stays as it is.
    set.remove();
    set.make();
    set.set_value(2, 5);
    assert_eq!(checkpoints.restore(&checkpoint).unwrap_err().error.kind(), ErrorKind::InTheWay);
    assert_eq!(set.value(2), 5);
    set.remove();
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    // The restored processes can be saved again, also before they have changed anything.
    checkpoints.cycle(&mut program);
    program.checks_its_memory();
    program.ends();
    program.kill();
    remove(private);
}

#[test]
fn sets_that_other_processes_use_stay_as_they_are() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let set = Set(0x5200_0000 + std::process::id() as i32);
    let Some(mut program) = start(&set) else { return };
    let private = program.read("private").unwrap().parse().unwrap();
    set.set_value(2, 78);
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    set.set_value(0, 3);
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    assert_eq!(set.value(2), 78);
    program.kill();
    // A set that was the tree's own at the checkpoint is not taken from who uses it now.
    set.remove();
    let Some(mut program) = start(&set) else { return };
    let checkpoint = checkpoints.take(&program, &[]);
    program.kill();
    set.set_value(0, 4);
    assert_eq!(checkpoints.restore(&checkpoint).unwrap_err().error.kind(), ErrorKind::InTheWay);
    assert_eq!((set.value(0), set.value(2)), (4, 77));
    remove(private);
    remove(program.read("private").unwrap().parse().unwrap());
}
