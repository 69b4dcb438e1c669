//! System V shared memory outside of an IPC namespace.

mod support;

use std::time::Duration;

use pagemark_process::ErrorKind;
use pagemark_testing::wait_until;
use support::{Checkpoints, Program, REPORT};

/// Two processes that share a segment with the key KEY, which each has attached twice, once to read
/// alone, and a large one that was removed when it was attached, a page of which may not be
/// accessed. When there is a file `check`, each checks the memory, its attachments and that the
/// other one continues to count, and writes `fine` or what is wrong into `checked.N`. When there is
/// a file `end`, the first detaches and removes the segments, and writes `ended` or what is wrong.
const PROGRAM: &str = r#"
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <unistd.h>
#define PAGE 4096L
#define LARGE (16L << 20)
#define REMOVED 01000

static unsigned char *small, *seen, *large;
static int small_id, large_id;
static volatile long *counts;

static const char *check(int own) {
    struct shmid_ds status;
    for (long at = 64; at < 3 * PAGE + 56; at++)
        if (small[at] != (unsigned char)(at * 7) || seen[at] != small[at])
            return "a byte of the small segment is wrong";
    for (long at = 0; at < LARGE; at += PAGE)
        if (at != 5 * PAGE && large[at] != (at % (64 * PAGE) ? 0 : 1 + at / PAGE % 251))
            return "a byte of the large segment is wrong";
    if (shmctl(small_id, IPC_STAT, &status))
        return "the small segment is gone";
    if (status.shm_perm.__key != KEY || status.shm_segsz != 3 * PAGE + 56 || (status.shm_perm.mode & 0777) != 0640)
        return "the small segment is another";
    if (status.shm_nattch != 4)
        return "the small segment has other attachments";
    if (shmctl(large_id, IPC_STAT, &status) || !(status.shm_perm.mode & REMOVED))
        return "the large segment is not removed";
    long other = counts[!own];
    for (int tries = 0; tries < 20000 && counts[!own] < other + 3; tries++) {
        usleep(500);
        counts[own]++;
    }
    return counts[!own] < other + 3 ? "the other process is not seen" : "fine";
}

int main(void) {
    small_id = shmget(KEY, 3 * PAGE + 56, IPC_CREAT | IPC_EXCL | 0640);
    large_id = shmget(IPC_PRIVATE, LARGE, 0600);
    small = shmat(small_id, 0, 0);
    seen = shmat(small_id, 0, SHM_RDONLY);
    large = shmat(large_id, 0, 0);
    if (small == (void *)-1 || seen == (void *)-1 || large == (void *)-1 || shmctl(large_id, IPC_RMID, 0)) {
        perror("shared memory");
        return 1;
    }
    for (long at = 64; at < 3 * PAGE + 56; at++)
        small[at] = at * 7;
    for (long at = 0; at < LARGE; at += 64 * PAGE)
        large[at] = 1 + at / PAGE % 251;
    mprotect(large + 5 * PAGE, PAGE, PROT_NONE);
    counts = (volatile long *)small;
    int own = fork() == 0;
    if (own)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    report(own ? "ready.1" : "ready.0", "");
    for (;;) {
        counts[own]++;
        if (access("check", F_OK) == 0 && access(own ? "checked.1" : "checked.0", F_OK))
            report(own ? "checked.1" : "checked.0", check(own));
        if (!own && access("end", F_OK) == 0 && access("ended", F_OK))
            report("ended", shmdt(seen) || shmdt(large) || shmctl(small_id, IPC_RMID, 0) ? "an error" : "ended");
        usleep(1000);
    }
}
"#;

/// The segments that a process has attached: addresses, permissions and name of each mapping.
fn segments(pid: i32) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let lines = text.lines().filter(|line| line.contains("/SYSV"));
    lines.map(|line| line.split_ascii_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// A segment with a key, which ends with the test.
struct Segment(i32);

impl Segment {
    fn id(&self) -> Option<i32> {
        // SAFETY: it only looks for a segment.
        Some(unsafe { libc::shmget(self.0, 0, 0) }).filter(|id| *id >= 0)
    }

    fn remove(&self) {
        if let Some(id) = self.id() {
            // SAFETY: the command needs no structure.
            assert_eq!(unsafe { libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()) }, 0);
        }
    }

    /// Calls `work` while this process has the segment attached.
    fn while_attached<T>(&self, work: impl FnOnce() -> T) -> T {
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { libc::shmat(self.id().unwrap(), std::ptr::null(), 0) };
        assert_ne!(at as isize, -1);
        let result = work();
        // SAFETY: nothing refers to the mapping.
        assert_eq!(unsafe { libc::shmdt(at) }, 0);
        result
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.remove();
    }
}

#[test]
fn segments_come_back_with_their_ids_keys_and_attachments() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let segment = Segment(0x5000_0000 + std::process::id() as i32);
    let Some(mut program) = Program::c(&(REPORT.to_owned() + &PROGRAM.replace("KEY", &segment.0.to_string()))) else {
        return;
    };
    for process in ["ready.0", "ready.1"] {
        wait_until("the program has its memory", || program.read(process).is_some());
    }
    program.checks_its_memory();
    let family = |program: &Program| support::tree(program.pid()).into_iter().map(segments).collect::<Vec<_>>();
    let (before, id) = (family(&program), segment.id());
    assert_eq!(before[0].len(), 5, "{before:?}");

    let refused = segment.while_attached(|| checkpoints.refusal(&program));
    assert!(refused.contains("outside of the tree"), "{refused}");
    program.checks_its_memory();
    let checkpoint = checkpoints.take(&program, &[&|| std::thread::sleep(Duration::from_millis(50)), &|| ()]);
    assert_eq!(family(&program), before, "a checkpoint changed mappings");
    program.checks_its_memory();
    program.kill();

    let refused = segment.while_attached(|| checkpoints.restore(&checkpoint));
    assert_eq!(refused.unwrap_err().error.kind(), ErrorKind::InTheWay);
    // At first the segment is still there, then it is made.
    for _ in 0..2 {
        program.adopt(&checkpoints.restore(&checkpoint).unwrap());
        assert_eq!((family(&program), segment.id()), (before.clone(), id));
        program.checks_its_memory();
        program.kill();
        segment.remove();
    }
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    // The restored processes can be saved again.
    checkpoints.cycle(&mut program);
    program.checks_its_memory();
    program.ends();
    program.kill();
    assert_eq!(segment.id(), None, "it was removed, and its last attachment is gone");
}
