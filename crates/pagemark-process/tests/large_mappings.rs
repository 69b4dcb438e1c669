//! Large mappings, of which CRIU learns the first page alone, are saved and restored as they are.

mod support;

use std::time::Duration;

use pagemark_linux::pagemap;
use pagemark_testing::wait_until;
use support::{Checkpoints, Program, REPORT};

/// Reserves memory twice, BITS bits of addresses each, and writes a few pages in each. One of them
/// may not be accessed but for these pages, and so needs no MAP_NORESERVE. Also has large mappings
/// that begin with guard pages or have some in the middle, a large heap, a thread with a stack of
/// 64 MiB, and a child that shares what it had. When there is a file `check`, both processes check
/// all that they have written, and that nothing else is there: each writes `fine` or what is wrong
/// into `checked.N`.
const PROGRAM: &str = r#"
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>
#define PAGE 4096L
#define RESERVED (1L << BITS)
#define RW (PROT_READ | PROT_WRITE)
#define GUARD_INSTALL 102
#define LARGE (32L << 20)

static unsigned char *hidden, *reserved, *large, *heap;
static int guards;
static sigjmp_buf back;

static void *map(long bytes, int protection, int flag) {
    void *made = mmap(0, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | flag, -1, 0);
    if (made == MAP_FAILED)
        exit(1);
    return made;
}

static unsigned char pattern(long page) { return (page * 31 + 7) % 251 + 1; }

static void fill(unsigned char *at, long pages) {
    for (long page = 0; page < pages; page++)
        memset(at + page * PAGE, pattern(page), PAGE);
}

static const char *check(unsigned char *at, long pages) {
    for (long page = 0; page < pages; page++)
        for (long byte = 0; byte < PAGE; byte++)
            if (at[page * PAGE + byte] != pattern(page))
                return "a byte is wrong";
    return 0;
}

static void on_fault(int signal) { (void)signal; siglongjmp(back, 1); }

static int faults(volatile unsigned char *at) {
    if (sigsetjmp(back, 1))
        return 1;
    (void)*at;
    return 0;
}

static const char *check_all(void) {
    const char *wrong;
    if ((wrong = check(hidden + RESERVED / 2, 16)) || (wrong = check(reserved, 1)) || (wrong = check(reserved + RESERVED - 16 * PAGE, 16)))
        return wrong;
    if ((wrong = check(large + 4 * PAGE, 1000)) || (wrong = check(heap, 2000)))
        return wrong;
    for (long page = 1; page < 1000; page++)
        if (reserved[page * (RESERVED >> 12)])
            return "something is where nothing was";
    if (!faults(hidden) || !faults(hidden + RESERVED - 1) || !faults(hidden + RESERVED / 2 - 1))
        return "what must not be read can be";
    if (guards && (!faults(large) || !faults(large + 2000 * PAGE)))
        return "a guard page is missing";
    return "fine";
}

static void *thread(void *none) {
    unsigned char deep[32 << 20];
    memset(deep, 9, sizeof deep);
    for (;;) {
        usleep(1000);
        for (unsigned at = 0; at < sizeof deep; at += 4096)
            if (deep[at] != 9)
                abort();
    }
    return none;
}

int main(void) {
    hidden = map(RESERVED, PROT_NONE, 0);
    reserved = map(RESERVED, RW, MAP_NORESERVE);
    large = map(LARGE, RW, 0);
    heap = sbrk(LARGE);
    mprotect(hidden + RESERVED / 2, 16 * PAGE, RW);
    fill(hidden + RESERVED / 2, 16);
    mprotect(hidden + RESERVED / 2, 16 * PAGE, PROT_READ);
    fill(reserved, 1);
    fill(reserved + RESERVED - 16 * PAGE, 16);
    fill(large + 4 * PAGE, 1000);
    fill(heap, 2000);
    guards = !madvise(large, PAGE, GUARD_INSTALL) && !madvise(large + 2000 * PAGE, 3 * PAGE, GUARD_INSTALL);
    signal(SIGSEGV, on_fault);
    signal(SIGBUS, on_fault);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 64 << 20);
    pthread_t made;
    if (pthread_create(&made, &attributes, thread, 0))
        return 1;
    int is_child = fork() == 0;
    if (is_child)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    report(is_child ? "ready.1" : "ready.0", "");
    for (long round = 0;; round++) {
        large[900 * PAGE + 4 * PAGE] = pattern(900);
        if (access("check", F_OK) == 0 && access(is_child ? "checked.1" : "checked.0", F_OK))
            report(is_child ? "checked.1" : "checked.0", check_all());
        usleep(1000 + 500 * is_child);
    }
}
"#;

/// Addresses and permissions of the mappings that have no file.
fn mappings(pid: i32) -> Vec<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let fields = text.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let own = fields.filter(|fields| fields[4] == "0" && !fields.iter().any(|field| field.starts_with("[v")));
    own.map(|fields| fields[..2].join(" ")).collect()
}

#[test]
fn terabytes_that_are_reserved_are_saved_and_restored() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    // An older kernel has an entry of pagemap read for each page.
    let bits = if pagemap::SCAN.is_there() { "40" } else { "33" };
    let Some(mut program) = Program::c(&(REPORT.to_owned() + &PROGRAM.replace("BITS", bits))) else { return };
    for process in ["ready.0", "ready.1"] {
        wait_until("the program has its memory", || program.read(process).is_some());
    }
    let family = || support::tree(program.pid());
    assert_eq!(family().len(), 2);
    let before: Vec<_> = family().into_iter().map(mappings).collect();
    let checkpoint = checkpoints.take(&program, &[&|| std::thread::sleep(Duration::from_millis(50)), &|| ()]);
    let after: Vec<_> = family().into_iter().map(mappings).collect();
    assert_eq!(after, before, "a checkpoint changed mappings");
    program.checks_its_memory();
    program.kill();
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    wait_until("CRIU has left", || support::tree(program.pid()).len() == 2);
    let restored: Vec<_> = support::tree(program.pid()).into_iter().map(mappings).collect();
    assert_eq!(restored, before);
    program.checks_its_memory();
    // The restored processes can be saved again.
    checkpoints.cycle(&mut program);
    program.checks_its_memory();
}
