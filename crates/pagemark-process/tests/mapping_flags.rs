//! The flags of mappings that a BPF program lists are those that `/proc/PID/smaps` shows.

mod support;

use pagemark_linux::mapping_flags;
use pagemark_linux::proc::smaps;
use pagemark_process::criu::DumpOptions;
use pagemark_testing::{skip, wait_until};
use support::{Checkpoints, Program, take};

/// Has mappings of every kind that can be made here, and holds 300 MiB. UNSAVED stands for 1 with
/// those that CRIU cannot save, or 0. When there is a file `more`, the program makes more mappings,
/// and then a file `done`.
const KINDS: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <unistd.h>
#define PAGE 4096L
#define RW (PROT_READ | PROT_WRITE)
#define ANONYMOUS (MAP_PRIVATE | MAP_ANONYMOUS)

static char *map(int protection, int flags, int file) {
    return mmap(0, 4 * PAGE, protection, flags, file, 0);
}

static void advise(int advice) {
    char *page = map(RW, ANONYMOUS, -1);
    madvise(page + PAGE, PAGE, advice);
}

static int file(const char *name) {
    int made = open(name, O_RDWR | O_CREAT, 0600);
    if (ftruncate(made, 4 * PAGE))
        exit(1);
    return made;
}

static void create(const char *name) {
    close(open(name, O_CREAT | O_WRONLY, 0600));
}

int main(void) {
    char *large = mmap(0, 300L << 20, RW, ANONYMOUS, -1, 0);
    madvise(large, 300L << 20, MADV_NOHUGEPAGE);
    memset(large, 1, 300L << 20);
    int protections[] = {PROT_NONE, PROT_READ, PROT_WRITE, RW, PROT_READ | PROT_EXEC, RW | PROT_EXEC};
    for (int at = 0; at < 6; at++) {
        map(protections[at], ANONYMOUS, -1);
        map(protections[at], MAP_SHARED | MAP_ANONYMOUS, -1);
    }
    int advice[] = {MADV_SEQUENTIAL, MADV_RANDOM, MADV_DONTFORK, MADV_DONTDUMP, MADV_WIPEONFORK,
                    MADV_MERGEABLE, MADV_HUGEPAGE, MADV_NOHUGEPAGE};
    for (int at = 0; at < 8; at++)
        advise(advice[at]);
    map(RW, ANONYMOUS | MAP_NORESERVE, -1);
    map(RW, ANONYMOUS | MAP_GROWSDOWN, -1);
    map(RW, ANONYMOUS | MAP_LOCKED, -1);
    map(RW, 8 | MAP_ANONYMOUS, -1);
    char *locked = map(RW, ANONYMOUS, -1);
    mlock2(locked, PAGE, MLOCK_ONFAULT);
    int kept = file("a name with spaces"), deleted = file("deleted"), memory = memfd_create("memory", 0);
    unlink("deleted");
    if (ftruncate(memory, 4 * PAGE))
        return 1;
    int readable = open("a name with spaces", O_RDONLY);
    map(RW, MAP_SHARED, kept);
    map(RW, MAP_PRIVATE, kept);
    map(PROT_READ, MAP_SHARED, readable);
    mmap(0, PAGE, PROT_READ, MAP_PRIVATE, kept, 2 * PAGE);
    map(RW, MAP_SHARED, deleted);
    map(RW, MAP_PRIVATE, memory);
    map(RW, MAP_SHARED, memory);
    if (UNSAVED) {
        int segment = shmget(IPC_PRIVATE, 4 * PAGE, IPC_CREAT | 0600);
        shmat(segment, 0, 0);
        shmctl(segment, IPC_RMID, 0);
        mmap(0, 2L << 20, RW, ANONYMOUS | MAP_HUGETLB | MAP_NORESERVE, -1, 0);
        aio_context_t context = 0;
        syscall(SYS_io_setup, 16, &context);
    }
    create("ready");
    while (access("more", F_OK))
        usleep(1000);
    for (int number = 0; number < 1000; number++)
        map(number % 2 ? RW : PROT_READ, ANONYMOUS, -1);
    create("done");
    for (;;)
        pause();
}
"#;

/// The lines of the file that CRIU uses.
fn used(text: &[u8]) -> Vec<String> {
    let text = String::from_utf8_lossy(text);
    let is_header = |line: &str| line.split(' ').next().is_some_and(|range| range.contains('-'));
    text.lines().filter(|line| is_header(line) || line.starts_with("VmFlags:")).map(str::to_owned).collect()
}

fn start(with_unsaved: bool) -> Option<Program> {
    let program = Program::c(&KINDS.replace("UNSAVED", if with_unsaved { "1" } else { "0" }))?;
    wait_until("the program has its mappings", || program.read("ready").is_some());
    Some(program)
}

fn compare(pid: i32) -> usize {
    let shown = used(&std::fs::read(format!("/proc/{pid}/smaps")).unwrap());
    let made = used(&smaps::without_figures(pid).unwrap());
    assert_eq!(made, shown);
    made.len()
}

#[test]
fn each_flag_is_as_the_kernel_shows_it() {
    if let Some(error) = mapping_flags::LIST.refusal() {
        skip!("{error}: {}", mapping_flags::LIST.without);
    }
    let Some(program) = start(true) else { return };
    let before = compare(program.pid());
    std::fs::write(program.directory().join("more"), "").unwrap();
    wait_until("the program has more mappings", || program.read("done").is_some());
    assert!(compare(program.pid()) >= before + 1000);
    smaps::without_figures(i32::MAX).unwrap_err();
    let made = ["gd", "lo", "sr", "rr", "dc", "dd", "mg", "hg", "nh", "wf", "nr", "ms", "io", "pf"];
    let text = String::from_utf8_lossy(&smaps::without_figures(program.pid()).unwrap()).into_owned();
    for flag in made {
        assert!(text.contains(&format!(" {flag} ")), "no mapping has {flag}");
    }
}

#[test]
fn a_restored_process_has_the_flags_it_had() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some(mut program) = start(false) else { return };
    let shown = |pid: i32| String::from_utf8(std::fs::read(format!("/proc/{pid}/smaps")).unwrap()).unwrap();
    let counts = |text: &str| {
        ["gd", "lo", "sr", "rr", "dc", "dd", "mg", "hg", "nh", "wf", "dp"]
            .map(|flag| text.matches(&format!(" {flag} ")).count())
    };
    let before = shown(program.pid());
    let checkpoint = checkpoints.take(&program, &[&|| ()]);
    program.kill();
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    let after = shown(program.pid());
    assert_eq!(counts(&after), counts(&before));
}

#[test]
fn a_dump_of_a_large_process_lists_its_mappings_without_the_kernels_count() {
    let Some(criu) = support::criu() else { return };
    let Some(program) = start(false) else { return };
    let taken = take(&criu, program.pid(), &DumpOptions::default());
    match mapping_flags::LIST.refusal() {
        // CRIU reads the list more than once.
        None => assert!(taken.listed_mappings >= 1),
        Some(_) => assert_eq!(taken.listed_mappings, 0),
    }
    let small = Program::counter("", "show(n)\ntime.sleep(0.005)");
    assert_eq!(take(&criu, small.pid(), &DumpOptions::default()).listed_mappings, 0, "it does not pay");
}
