//! A process with mappings that cannot be tracked is saved all the same.

mod support;

use std::sync::Arc;

use pagemark::checkpointer::{Checkpointer, Strategy};
use pagemark::repository::MappingException;
use pagemark::store::MemoryStore;
use pagemark::track::Scope;
use pagemark::{Address, AddressRangeExt, ByteCount, Kind, Mechanism, PAGE_SIZE, PageTree, Store};
use pagemark_linux::proc::{Process, smaps};
use pagemark_process::saver::RegisterSaver;
use pagemark_process::target::ProcessTarget;
use pagemark_testing::{assert_oracle_eq, skipped, wait_until};
use support::{Checkpoints, Program};

/// Bytes of each kind of memory.
const BYTES: ByteCount = ByteCount::of_pages(64);

/// The byte that the program fills its droppable memory with.
const SECRET: u8 = 0xd7;

/// Ordinary memory directly before and behind droppable memory, memory that is wiped on fork, and a
/// context of asynchronous I/O. When there is a file `check`, the program writes what it finds into
/// `result`.
const ODD: &str = r#"
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#define BYTES (64 * 4096)

static int holds(const char *memory, int byte) {
    for (int at = 0; at < BYTES; at++)
        if (memory[at] != (char)byte)
            return 0;
    return 1;
}

int main(void) {
    char *before = mmap(0, 3 * BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *droppable = mmap(before + BYTES, BYTES, PROT_READ | PROT_WRITE, 8 | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    char *behind = before + 2 * BYTES;
    char *wiped = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    aio_context_t context = 0;
    if (droppable != before + BYTES || madvise(wiped, BYTES, MADV_WIPEONFORK) || syscall(SYS_io_setup, 16, &context))
        return 1;
    memset(before, 1, BYTES);
    memset(droppable, 0xd7, BYTES);
    memset(behind, 2, BYTES);
    memset(wiped, 3, BYTES);
    FILE *addresses = fopen("addresses.new", "w");
    fprintf(addresses, "%ld\n", (long)droppable);
    fclose(addresses);
    rename("addresses.new", "addresses");
    for (int round = 0; access("check", F_OK); round++) {
        before[0] = behind[BYTES - 1] = round;
        usleep(1000);
    }
    before[0] = 1;
    behind[BYTES - 1] = 2;
    FILE *result = fopen("result.new", "w");
    fprintf(result, "ordinary %d", holds(before, 1) && holds(behind, 2));
    fprintf(result, ", droppable %s", holds(droppable, 0) ? "zeros" : holds(droppable, 0xd7) ? "kept" : "mixed");
    fprintf(result, ", wiped on fork %d", holds(wiped, 3));
    fflush(result);
    memset(droppable, 4, BYTES);
    if (fork() == 0)
        _exit(holds(wiped, 0) && holds(droppable, 0) ? 0 : 1);
    int status = -1;
    wait(&status);
    fprintf(result, ", in a child %s", status == 0 ? "zeros" : "kept");
    char byte = 0;
    int file = open("/dev/zero", O_RDONLY);
    struct iocb request = {.aio_fildes = file, .aio_lio_opcode = IOCB_CMD_PREAD, .aio_buf = (long)&byte, .aio_nbytes = 1};
    struct iocb *requests[] = {&request};
    struct io_event event = {0};
    int done = syscall(SYS_io_submit, context, 1, requests) == 1;
    done = done && syscall(SYS_io_getevents, context, 1, 1, &event, NULL) == 1 && event.res == 1;
    fprintf(result, ", asynchronous I/O %s\n", done ? "works" : "fails");
    fclose(result);
    rename("result.new", "result");
    for (;;)
        pause();
}
"#;

/// The program, and the address of its droppable memory.
fn start() -> Option<(Program, Address)> {
    if !smaps::has_droppable() {
        skipped("the kernel has no droppable mappings, which Linux 6.11 has");
        return None;
    }
    let program = Program::c(ODD)?;
    wait_until("the program has its memory", || program.read("addresses").is_some());
    let droppable = Address::new(program.read("addresses").unwrap().parse().unwrap());
    Some((program, droppable))
}

#[test]
fn droppable_memory_is_never_stored() {
    for mechanism in Mechanism::of_scope(Scope::Process) {
        if let Err(error) = pagemark::track::check(mechanism, Scope::Process) {
            skipped(&error.to_string());
            continue;
        }
        let Some((program, droppable)) = start() else { return };
        let mut target =
            ProcessTarget::attach(Process::find(program.pid()).unwrap(), mechanism, Arc::new(RegisterSaver)).unwrap();
        let (mut checkpointer, mut store) = (Checkpointer::new(), MemoryStore::new());
        for _ in 0..3 {
            let capture = checkpointer.capture(&mut target, &mut store, Strategy::default()).unwrap();
            checkpointer.committed();
            let space = &capture.spaces[0];
            let tree = PageTree::load(space.root, &store).unwrap();
            let held = |start: Address| tree.range((start..start + BYTES).page_range()).count() as u64;
            let pages = BYTES.pages_rounded_down();
            assert_eq!(held(droppable), 0, "{mechanism}: droppable memory is in the checkpoint");
            assert_oracle_eq!(held(droppable - BYTES), pages, "{mechanism}: memory before it is missing");
            assert_oracle_eq!(held(droppable + BYTES), pages, "{mechanism}: memory behind it is missing");
            let mapping = space.mappings.iter().find(|mapping| mapping.start == droppable.get()).unwrap();
            assert_eq!(mapping.exception, Some(MappingException::Droppable), "{mechanism}");
            let exceptions = space.mappings.iter().filter(|mapping| mapping.exception.is_some()).count();
            assert_eq!(exceptions, 1, "{mechanism}: {:?}", space.mappings);
        }
        let content_count = store.content_count();
        store.put(Kind::Page, &[SECRET; PAGE_SIZE]).unwrap();
        assert_eq!(store.content_count(), content_count + 1, "{mechanism}: the store held the secret");
    }
}

#[test]
fn each_kind_of_memory_comes_back_as_it_promises() {
    let Some(checkpoints) = Checkpoints::new() else { return };
    let Some((mut program, _)) = start() else { return };
    let checkpoint = checkpoints.take(&program, &[&|| ()]);
    program.kill();
    program.adopt(&checkpoints.restore(&checkpoint).unwrap());
    std::fs::write(program.directory().join("check"), "").unwrap();
    wait_until("the program has checked its memory", || program.read("result").is_some());
    let expected = "ordinary 1, droppable zeros, wiped on fork 1, in a child zeros, asynchronous I/O works";
    assert_eq!(program.read("result").unwrap(), expected);
}
