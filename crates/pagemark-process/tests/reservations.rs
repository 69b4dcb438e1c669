//! Reservations come back: mappings of which CRIU could not make a second copy, since together they
//! are more than half of all addresses.

mod support;

use pagemark_linux::pagemap;
use pagemark_testing::wait_until;
use support::{Checkpoints, Program, REPORT};

/// Reserves memory, in units of BITS bits of addresses: some that may not be accessed, some that is
/// never written, some with a few pages that a child shares, with guard pages in it. When there is
/// a file `check`, both processes check what they have written.
const PROGRAM: &str = r#"
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>
#define PAGE 4096L
#define UNIT (1L << BITS)
#define RW (PROT_READ | PROT_WRITE)
#define GUARD_INSTALL 102

static unsigned char *sparse;
static int has_guard;
static const long places[] = {0, UNIT * 7 + 5 * PAGE, UNIT * 19, UNIT * 34 - PAGE};

static unsigned char *map(long units, int protection, int flags) {
    void *made = mmap(0, units * UNIT, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (made == MAP_FAILED)
        exit(1);
    return made;
}

static const char *check(int is_child) {
    for (int place = 0; place < 4; place++) {
        if (sparse[places[place]] != 'a' + place)
            return "what was written is not there";
        if (sparse[places[place] + 9] != (is_child ? 'c' : 'p'))
            return "the page of the other process is there";
    }
    for (int unit = 1; unit < 34; unit++)
        if (unit != 3 && unit != 7 && unit != 19 && sparse[unit * UNIT])
            return "something is where nothing was";
    if (has_guard && (access((char *)sparse + 3 * UNIT, F_OK) == 0 || errno != EFAULT))
        return "the guard page is missing";
    return "fine";
}

int main(void) {
    unsigned char *hidden = map(20, PROT_NONE, 0);
    madvise(hidden + UNIT, UNIT, MADV_DONTFORK);
    unsigned char *unused = map(8, RW, MAP_NORESERVE);
    madvise(unused, UNIT * 2, MADV_DONTDUMP);
    madvise(unused + UNIT, UNIT * 3, MADV_NOHUGEPAGE);
    map(6, PROT_READ, MAP_NORESERVE);
    sparse = map(34, RW, MAP_NORESERVE);
    madvise(sparse + 20 * UNIT, UNIT, MADV_DONTDUMP);
    mprotect(sparse + 30 * UNIT, UNIT, PROT_READ);
    for (int place = 0; place < 4; place++)
        sparse[places[place]] = 'a' + place;
    has_guard = !madvise(sparse + 3 * UNIT, PAGE, GUARD_INSTALL);
    int is_child = fork() == 0;
    if (is_child)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int place = 0; place < 4; place++)
        sparse[places[place] + 9] = is_child ? 'c' : 'p';
    report(is_child ? "ready.1" : "ready.0", "");
    for (;;) {
        if (access("check", F_OK) == 0 && access(is_child ? "checked.1" : "checked.0", F_OK))
            report(is_child ? "checked.1" : "checked.0", check(is_child));
        usleep(1000);
    }
}
"#;

/// A run of mappings without a file that are alike: begin, end, and what `smaps` says of them.
type Reserved = (u64, u64, String);

/// The large ones of a process. The kernel may have divided what was one mapping.
fn reserved(pid: i32) -> Vec<Reserved> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let (mut found, mut head): (Vec<Reserved>, _) = (Vec::new(), None);
    for line in text.lines() {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        if let Some((start, end)) = fields[0].split_once('-').filter(|_| fields.len() >= 5) {
            let address = |text| u64::from_str_radix(text, 16).unwrap();
            head =
                (fields[4] == "0" && fields.len() == 5).then(|| (address(start), address(end), fields[1].to_owned()));
        }
        if let Some((start, end, permissions)) = head.clone().filter(|_| fields[0] == "VmFlags:") {
            // Written since the kernel was last asked; has guard pages in any of its parts.
            let is_same = |flag: &&str| !["sd", "gu"].contains(flag);
            let flags: Vec<&str> = fields[1..].iter().copied().filter(is_same).collect();
            let kind = format!("{permissions} {}", flags.join(" "));
            match found.last_mut().filter(|last| (last.1, &last.2) == (start, &kind)) {
                Some(last) => last.1 = end,
                None => found.push((start, end, kind)),
            }
        }
    }
    found.retain(|(start, end, _)| end - start >= 1 << 28);
    found
}

#[test]
fn most_of_all_addresses_are_reserved_again() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    // An older kernel has an entry of pagemap read for each page.
    let bits = if pagemap::SCAN.is_there() { "40" } else { "28" };
    let Some(mut program) = Program::c(&(REPORT.to_owned() + &PROGRAM.replace("BITS", bits))) else { return };
    for process in ["ready.0", "ready.1"] {
        wait_until("the program has its memory", || program.read(process).is_some());
    }
    let all = |program: &Program| -> Vec<_> { support::tree(program.pid()).into_iter().map(reserved).collect() };
    let before = all(&program);
    assert_eq!(before.len(), 2);
    // The child lacks what is not inherited.
    assert_eq!([before[0].len(), before[1].len()], [13, 12], "{before:x?}");
    let checkpoint = checkpoints.take(&program, &[]);
    assert_eq!(all(&program), before, "a checkpoint changed mappings");
    program.checks_its_memory();
    program.kill();
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    wait_until("CRIU has left", || support::tree(program.pid()).len() == 2);
    assert_eq!(all(&program), before);
    program.checks_its_memory();
    checkpoints.cycle(&mut program);
    assert_eq!(all(&program), before);
    program.checks_its_memory();
}
