/* Misuse of the library, and the error for each. Ends with 0 if each error is as expected. */
#define _DEFAULT_SOURCE
#include "expect.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096

/* What the handlers of nested_handlers() touch. */
static char *volatile tracked, *volatile forbidden;
static sigjmp_buf back;
static struct sigaction below;
static volatile sig_atomic_t passed_on;

static void null_pointers(pagemark_region *region, pagemark_snapshot *snapshot)
{
    pagemark_region *made = region;
    pagemark_ranges ranges = {(pagemark_range *)region, 7};
    pagemark_usage usage;
    size_t count;
    char byte;

    FAILS(pagemark_region_new(PAGE, NULL, NULL), NULL_POINTER, "region is null");
    FAILS(pagemark_region_adopt(NULL, PAGE, NULL, &made), NULL_POINTER, "start is null");
    TRUE(made == NULL);
    FAILS(pagemark_region_begin(NULL), NULL_POINTER, "region is null");
    FAILS(pagemark_region_commit(NULL, &ranges), NULL_POINTER, "region is null");
    TRUE(ranges.items == NULL && ranges.count == 0);
    FAILS(pagemark_region_rollback(NULL, NULL), NULL_POINTER, "region is null");
    FAILS(pagemark_region_discard(NULL, 0, 1), NULL_POINTER, "region is null");
    FAILS(pagemark_region_read(NULL, 0, &byte, 1), NULL_POINTER, "region is null");
    FAILS(pagemark_region_read(region, 0, NULL, 1), NULL_POINTER, "to is null");
    FAILS(pagemark_region_write(NULL, 0, &byte, 1), NULL_POINTER, "region is null");
    FAILS(pagemark_region_write(region, 0, NULL, 1), NULL_POINTER, "from is null");
    FAILS(pagemark_region_read_from(NULL, 0, 0, 1, &count), NULL_POINTER, "region is null");
    FAILS(pagemark_region_read_from(region, 0, 0, 1, NULL), NULL_POINTER, "read is null");
    FAILS(pagemark_region_make_writable(region, 0, 1, NULL), NULL_POINTER, "writable is null");
    FAILS(pagemark_region_snapshot(region, NULL), NULL_POINTER, "snapshot is null");
    FAILS(pagemark_region_snapshot_without(region, NULL, 1, &snapshot), NULL_POINTER, "forget is null");
    TRUE(snapshot == NULL);
    FAILS(pagemark_region_restore(region, NULL, NULL), NULL_POINTER, "snapshot is null");
    FAILS(pagemark_snapshot_read(NULL, 0, &byte, 1), NULL_POINTER, "snapshot is null");
    FAILS(pagemark_snapshot_diff(NULL, NULL, NULL), NULL_POINTER, "a is null");
    FAILS(pagemark_store_new(NULL, NULL), NULL_POINTER, "store is null");
    FAILS(pagemark_store_usage(NULL, &usage), NULL_POINTER, "store is null");
    TRUE(pagemark_region_data(NULL) == NULL);
    TRUE(pagemark_region_bytes(NULL) == 0);
    TRUE(pagemark_region_granularity_bytes(NULL) == 0);
    TRUE(pagemark_region_mechanism(NULL) == NULL);
    TRUE(!pagemark_region_in_transaction(NULL));
    TRUE(pagemark_snapshot_bytes(NULL) == 0);
    TRUE(!pagemark_snapshot_equal(NULL, NULL));
    pagemark_region_free(NULL);
    pagemark_snapshot_free(NULL);
    pagemark_store_free(NULL);
    pagemark_writable_free(NULL);
    pagemark_ranges_free(NULL);
}

static void transactions(pagemark_region *region)
{
    char *data = pagemark_region_data(region);
    pagemark_options forward = {0};
    pagemark_region *other;

    FAILS(pagemark_region_commit(region, NULL), NO_TRANSACTION, "call begin first");
    FAILS(pagemark_region_rollback(region, NULL), NO_TRANSACTION, "call begin first");
    WORKS(pagemark_region_begin(region));
    data[5] = 'x';
    FAILS(pagemark_region_begin(region), TRANSACTION_OPEN, "do not nest");
    TRUE(pagemark_region_in_transaction(region) && data[5] == 'x');
    WORKS(pagemark_region_rollback(region, NULL));
    TRUE(!pagemark_region_in_transaction(region) && data[5] == 0);
    FAILS(pagemark_region_commit(region, NULL), NO_TRANSACTION, "call begin first");

    forward.without_rollback = true;
    WORKS(pagemark_region_new(PAGE, &forward, &other));
    WORKS(pagemark_region_begin(other));
    FAILS(pagemark_region_rollback(other, NULL), NO_ROLLBACK, "without rollback");
    WORKS(pagemark_region_commit(other, NULL));
    pagemark_region_free(other);
}

static void adoption(void)
{
    pagemark_options options = {0};
    pagemark_region *region, *other;
    char *memory = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED)
        abort();
    FAILS(pagemark_region_adopt(memory + 8, PAGE, NULL, &region), UNALIGNED, "whole pages");
    TRUE(region == NULL);
    FAILS(pagemark_region_adopt(memory, PAGE - 1, NULL, &region), UNALIGNED, "whole pages");
    FAILS(pagemark_region_adopt(memory, 0, NULL, &region), UNALIGNED, "whole pages");
    FAILS(pagemark_region_adopt(memory, (size_t)-PAGE, NULL, &region), UNALIGNED, "whole pages");
    WORKS(pagemark_region_adopt(memory, 2 * PAGE, NULL, &region));
    FAILS(pagemark_region_adopt(memory + PAGE, 2 * PAGE, NULL, &other), OVERLAPS, "overlaps");
    memory[0] = 'a';
    pagemark_region_free(region);
    TRUE(memory[0] == 'a');
    mprotect(memory, PAGE, PROT_READ);
    FAILS(pagemark_region_adopt(memory, 2 * PAGE, NULL, &region), NOT_DATA, "writable");
    munmap(memory + PAGE, PAGE);
    FAILS(pagemark_region_adopt(memory, 2 * PAGE, NULL, &region), NOT_MAPPED, "mapped");
    munmap(memory, 4 * PAGE);

    memory = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        abort();
    memory[0] = 'a';
    options.mechanism = "mprotect";
    FAILS(pagemark_region_adopt(memory, 2 * PAGE, &options, &region), SHARED, "sole use");
    options.sole_use = true;
    WORKS(pagemark_region_adopt(memory, 2 * PAGE, &options, &region));
    WORKS(pagemark_region_begin(region));
    memory[0] = 'b';
    WORKS(pagemark_region_rollback(region, NULL));
    TRUE(memory[0] == 'a');
    pagemark_region_free(region);
    munmap(memory, 2 * PAGE);
    options.sole_use = false;

    options.mechanism = "guess";
    FAILS(pagemark_region_new(PAGE, &options, &region), INVALID_ARGUMENT, "no mechanism is called guess");
    options.mechanism = "\xff";
    FAILS(pagemark_region_new(PAGE, &options, &region), INVALID_ARGUMENT, "no mechanism is called");

    /* Memory that was not cleared. */
    options.mechanism = NULL;
    memset(&options.sole_use, 0x5a, 1);
    FAILS(pagemark_region_new(PAGE, &options, &region), INVALID_ARGUMENT, "sole_use is neither true nor false");
    memset(&options.sole_use, 0, 1);
    memset(&options.without_rollback, 2, 1);
    FAILS(pagemark_region_new(PAGE, &options, &region), INVALID_ARGUMENT, "without_rollback is neither");
    FAILS(pagemark_region_new(0, NULL, &region), SYSTEM, "region of 0 bytes");
    FAILS(pagemark_region_new((size_t)-1, NULL, &region), SYSTEM, "mapping a region");
    TRUE(region == NULL);
}

static void offsets(pagemark_region *region, pagemark_snapshot *snapshot)
{
    size_t bytes = pagemark_region_bytes(region), count;
    pagemark_range backwards = {5, 4}, beyond = {0, bytes + 1};
    pagemark_snapshot *made;
    pagemark_writable *writable;
    char byte = 'b';

    FAILS(pagemark_region_read(region, bytes, &byte, 1), OUT_OF_RANGE, "not within");
    FAILS(pagemark_region_read(region, 1, &byte, (size_t)-1), OUT_OF_RANGE, "not within");
    FAILS(pagemark_region_write(region, bytes - 1, &byte, 2), OUT_OF_RANGE, "not within");
    FAILS(pagemark_region_write(region, (size_t)-1, &byte, 1), OUT_OF_RANGE, "not within");
    WORKS(pagemark_region_read(region, bytes, NULL, 0));
    WORKS(pagemark_region_write(region, bytes, NULL, 0));
    FAILS(pagemark_region_discard(region, bytes, 1), OUT_OF_RANGE, "not within");
    FAILS(pagemark_region_discard(region, 1, (size_t)-1), OUT_OF_RANGE, "not within");
    FAILS(pagemark_region_make_writable(region, 0, bytes + 1, &writable), OUT_OF_RANGE, "not within");
    TRUE(writable == NULL);
    FAILS(pagemark_region_read_from(region, 0, bytes, 1, &count), OUT_OF_RANGE, "not within");
    FAILS(pagemark_region_read_from(region, -1, 0, 1, &count), INVALID_ARGUMENT, "no file descriptor");
    FAILS(pagemark_region_read_from(region, 987654, 0, 1, &count), SYSTEM, "reading into a region");
    FAILS(pagemark_region_snapshot_without(region, &backwards, 1, &made), INVALID_ARGUMENT, "ends before it starts");
    FAILS(pagemark_region_snapshot_without(region, &beyond, 1, &made), OUT_OF_RANGE, "not within");
    FAILS(pagemark_region_snapshot_without(region, &beyond, SIZE_MAX / 16, &made), OUT_OF_RANGE, "no memory has");
    FAILS(pagemark_region_snapshot_without(region, &beyond, SIZE_MAX, &made), OUT_OF_RANGE, "no memory has");
    FAILS(pagemark_snapshot_read(snapshot, bytes, &byte, 1), OUT_OF_RANGE, "not within");
    FAILS(pagemark_snapshot_read(snapshot, UINT64_MAX, &byte, 1), OUT_OF_RANGE, "not within");
    FAILS(pagemark_snapshot_read(snapshot, 0, &byte, (size_t)-1), OUT_OF_RANGE, "not within");
    TRUE(byte == 'b');
}

static void copies(pagemark_region *region)
{
    pagemark_ranges written;
    char held[6];

    WORKS(pagemark_region_begin(region));
    WORKS(pagemark_region_write(region, PAGE - 3, "across", 6));
    WORKS(pagemark_region_read(region, PAGE - 3, held, 6));
    TRUE(memcmp(held, "across", 6) == 0);
    TRUE(memcmp((char *)pagemark_region_data(region) + PAGE - 3, "across", 6) == 0);
    WORKS(pagemark_region_rollback(region, &written));
    TRUE(written.count > 0 && written.items[0].start <= PAGE - 3);
    pagemark_ranges_free(&written);
    WORKS(pagemark_region_read(region, PAGE - 3, held, 6));
    TRUE(memcmp(held, "\0\0\0\0\0\0", 6) == 0);
}

/* A page is unmapped behind Pagemark's back. Last, and with nothing mapped in between that could take its place. */
static void unmapped(const char *mechanism)
{
    pagemark_options options = {0};
    pagemark_region *region;
    pagemark_snapshot *snapshot, *more;
    char *data;

    options.mechanism = mechanism;
    WORKS(pagemark_region_new(8 * PAGE, &options, &region));
    WORKS(pagemark_region_snapshot(region, &snapshot));
    data = pagemark_region_data(region);
    WORKS(pagemark_region_begin(region));
    data[0] = 'k';
    munmap(data + 4 * PAGE, PAGE);
    FAILS(pagemark_region_commit(region, NULL), NOT_MAPPED, "unmapped");
    FAILS(pagemark_region_rollback(region, NULL), NOT_MAPPED, "unmapped");
    FAILS(pagemark_region_snapshot(region, &more), NOT_MAPPED, "unmapped");
    FAILS(pagemark_region_restore(region, snapshot, NULL), NOT_MAPPED, "unmapped");
    FAILS(pagemark_region_discard(region, 0, PAGE), NOT_MAPPED, "unmapped");
    TRUE(pagemark_region_in_transaction(region) && data[0] == 'k');
    pagemark_region_free(region);
    TRUE(pagemark_snapshot_bytes(snapshot) == 8 * PAGE);
    pagemark_snapshot_free(snapshot);
}

/* Snapshots of one store are equal if their content is, whichever region they are of. */
static void equal_content(void)
{
    pagemark_options options = {0};
    pagemark_region *a, *b;
    pagemark_snapshot *of_a, *of_b, *later;
    pagemark_store *store;

    WORKS(pagemark_store_new(NULL, &store));
    options.store = store;
    WORKS(pagemark_region_new(2 * PAGE, &options, &a));
    WORKS(pagemark_region_new(2 * PAGE, &options, &b));
    WORKS(pagemark_region_write(a, 9, "equal", 5));
    WORKS(pagemark_region_write(b, 9, "equal", 5));
    WORKS(pagemark_region_snapshot(a, &of_a));
    WORKS(pagemark_region_snapshot(b, &of_b));
    TRUE(pagemark_snapshot_equal(of_a, of_b));
    FAILS(pagemark_region_restore(a, of_b, NULL), WRONG_REGION, "another region");
    WORKS(pagemark_region_write(b, 9, "other", 5));
    WORKS(pagemark_region_snapshot(b, &later));
    TRUE(!pagemark_snapshot_equal(of_a, later));
    pagemark_snapshot_free(of_a);
    pagemark_snapshot_free(of_b);
    pagemark_snapshot_free(later);
    pagemark_region_free(a);
    pagemark_region_free(b);
    pagemark_store_free(store);
}

static void snapshots(pagemark_region *region, pagemark_snapshot *snapshot)
{
    pagemark_store_options options = {0};
    char *data = pagemark_region_data(region);
    pagemark_region *other;
    pagemark_snapshot *foreign;
    pagemark_store *store;

    WORKS(pagemark_region_new(2 * PAGE, NULL, &other));
    WORKS(pagemark_region_snapshot(other, &foreign));
    data[3] = 'k';
    FAILS(pagemark_region_restore(region, foreign, NULL), WRONG_REGION, "another region");
    TRUE(data[3] == 'k');
    data[3] = 0;
    FAILS(pagemark_snapshot_diff(snapshot, foreign, NULL), WRONG_STORE, "another store");
    TRUE(!pagemark_snapshot_equal(snapshot, foreign));
    equal_content();
    pagemark_region_free(other);
    TRUE(pagemark_snapshot_bytes(foreign) == 2 * PAGE);
    pagemark_snapshot_free(foreign);
    options.chunk_bytes = 1000;
    FAILS(pagemark_store_new(&options, &store), INVALID_ARGUMENT, "power of two");
    TRUE(store == NULL);
}

static void budget(void)
{
    pagemark_store_options store_options = {0};
    pagemark_options options = {0};
    pagemark_region *region, *second;
    pagemark_snapshot *snapshot, *more;
    pagemark_store *store;
    pagemark_usage usage;
    unsigned state = 1;
    char *data, *copy = malloc(64 * PAGE);

    store_options.budget_bytes = 100 * 1000;
    WORKS(pagemark_store_new(&store_options, &store));
    options.store = store;
    WORKS(pagemark_region_new(64 * PAGE, &options, &region));
    WORKS(pagemark_region_new(PAGE, &options, &second));
    pagemark_store_free(store);
    data = pagemark_region_data(region);
    WORKS(pagemark_region_snapshot(region, &snapshot));
    for (size_t i = 0; i < 64 * PAGE; i++)
        data[i] = (char)((state = state * 1103515245 + 12345) >> 16);
    memcpy(copy, data, 64 * PAGE);
    WORKS(pagemark_region_begin(region));
    data[9]++;
    FAILS(pagemark_region_snapshot(region, &more), BUDGET_EXCEEDED, "budget");
    TRUE(more == NULL);
    TRUE(pagemark_region_in_transaction(region) && data[9] == (char)(copy[9] + 1));
    WORKS(pagemark_region_rollback(region, NULL));
    TRUE(memcmp(data, copy, 64 * PAGE) == 0);
    free(copy);
    pagemark_region_free(second);
    WORKS(pagemark_region_restore(region, snapshot, NULL));
    TRUE(data[5] == 0);
    pagemark_snapshot_free(snapshot);
    pagemark_region_free(region);

    WORKS(pagemark_store_new(NULL, &store));
    WORKS(pagemark_store_usage(store, &usage));
    TRUE(usage.chunks == 0 && usage.content_bytes == 0);
    pagemark_store_free(store);
}

/* With an open transaction: the child has no part in it, and the parent loses nothing of it. */
static void forked_child(pagemark_region *region)
{
    char *data = pagemark_region_data(region);
    int status;
    pid_t child;

    WORKS(pagemark_region_begin(region));
    data[7] = 'p';
    child = fork();

    if (child == 0) {
        failures = 0;
        FAILS(pagemark_region_begin(region), FORKED_CHILD, "forked");
        FAILS(pagemark_region_commit(region, NULL), FORKED_CHILD, "forked");
        FAILS(pagemark_region_rollback(region, NULL), FORKED_CHILD, "forked");
        fflush(stderr);
        _exit(failures != 0);
    }
    TRUE(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    TRUE(data[7] == 'p');
    WORKS(pagemark_region_rollback(region, NULL));
    TRUE(data[7] == 0);
}

/* The program's handler from before there was a region. */
static void on_crash(int signal, siginfo_t *info, void *context)
{
    (void)signal;
    (void)context;
    if (info->si_addr != forbidden)
        _exit(99);
    tracked[PAGE] = 'n';
    raise(SIGUSR1);
    siglongjmp(back, 1);
}

static void on_user(int signal)
{
    (void)signal;
    tracked[2 * PAGE] = 'u';
}

/* The program's handler that came later. It lets the one below it do the work. */
static void on_top(int signal, siginfo_t *info, void *context)
{
    passed_on++;
    below.sa_sigaction(signal, info, context);
}

static void handle(int signal, void (*handler)(int, siginfo_t *, void *), int flags, struct sigaction *before)
{
    struct sigaction action = {0};

    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO | flags;
    TRUE(sigaction(signal, &action, before) == 0);
}

/* Writes to the region in a handler that a crash within a transaction has called, and in one that interrupts that. */
static void crash_and_write(pagemark_region *region)
{
    pagemark_ranges put_back;

    WORKS(pagemark_region_begin(region));
    tracked[0] = 'a';
    if (sigsetjmp(back, 1) == 0) {
        *forbidden = 'x';
        TRUE(!"a write that is forbidden");
    }
    tracked[3 * PAGE] = 'c';
    TRUE(tracked[0] == 'a' && tracked[PAGE] == 'n' && tracked[2 * PAGE] == 'u');
    WORKS(pagemark_region_rollback(region, &put_back));
    TRUE(put_back.count > 0 && put_back.items[0].start == 0 && put_back.items[put_back.count - 1].end > 3 * PAGE);
    for (int page = 0; page < 4; page++)
        TRUE(tracked[page * PAGE] == 0);
    pagemark_ranges_free(&put_back);
}

static void nested_handlers(pagemark_region *region)
{
    struct sigaction user = {0};
    struct sigaction ours;

    user.sa_handler = on_user;
    TRUE(sigaction(SIGUSR1, &user, NULL) == 0);
    tracked = pagemark_region_data(region);
    forbidden = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    crash_and_write(region);

    handle(SIGSEGV, on_top, SA_NODEFER, &below);
    crash_and_write(region);
    TRUE(passed_on > 0);
    TRUE(sigaction(SIGSEGV, &below, &ours) == 0 && ours.sa_sigaction == on_top);
    munmap(forbidden, PAGE);
}

/* A system call writes to the region, by each of the two ways that every mechanism allows. */
static void system_calls(pagemark_region *region)
{
    char *data = pagemark_region_data(region);
    pagemark_writable *writable;
    size_t count = 0;
    int ends[2];

    TRUE(pipe(ends) == 0 && write(ends[1], "abcdef", 6) == 6);
    WORKS(pagemark_region_begin(region));
    WORKS(pagemark_region_read_from(region, ends[0], PAGE - 1, 3, &count));
    TRUE(count == 3);
    WORKS(pagemark_region_make_writable(region, PAGE + 2, 3, &writable));
    TRUE(read(ends[0], data + PAGE + 2, 3) == 3);
    pagemark_writable_free(writable);
    TRUE(memcmp(data + PAGE - 1, "abcdef", 6) == 0);
    WORKS(pagemark_region_rollback(region, NULL));
    TRUE(data[PAGE - 1] == 0 && data[PAGE + 4] == 0);
    close(ends[0]);
    close(ends[1]);
}

static int ends_of_cancelled[2];

static void *waits(void *region)
{
    size_t count = 0;

    WORKS(pagemark_region_read_from(region, ends_of_cancelled[0], 0, 3, &count));
    TRUE(count == 3);
    return NULL;
}

/* A thread that is cancelled in a call ends the call first. */
static void cancelled(pagemark_region *region)
{
    pthread_t thread;

    TRUE(pipe(ends_of_cancelled) == 0 && pthread_create(&thread, NULL, waits, region) == 0);
    usleep(50000);
    TRUE(pthread_cancel(thread) == 0);
    TRUE(write(ends_of_cancelled[1], "abc", 3) == 3 && pthread_join(thread, NULL) == 0);
    WORKS(pagemark_region_begin(region));
    WORKS(pagemark_region_commit(region, NULL));
    close(ends_of_cancelled[0]);
    close(ends_of_cancelled[1]);
}

/* A snapshot leaves by a repository, and comes back as a snapshot and as a region. */
static void saved_snapshots(pagemark_region *region)
{
    char *data = pagemark_region_data(region), directory[] = "/tmp/pagemark-snapshots-XXXXXX", name[64], remove[96];
    pagemark_snapshot *snapshot, *opened, *again;
    pagemark_repository *repository;
    pagemark_region *made;
    pagemark_store *store;
    uint64_t sequence = 7;

    TRUE(mkdtemp(directory) != NULL);
    snprintf(name, sizeof name, "%s/repository", directory);
    WORKS(pagemark_repository_open(name, &repository));
    WORKS(pagemark_store_new(NULL, &store));
    memcpy(data + 3 * PAGE, "kept", 4);
    WORKS(pagemark_region_snapshot(region, &snapshot));
    FAILS(pagemark_snapshot_open(repository, "job", NULL, &opened), NEVER_SAVED, "save a region");
    TRUE(opened == NULL);
    FAILS(pagemark_snapshot_save(NULL, repository, "job", &sequence), NULL_POINTER, "snapshot is null");
    TRUE(sequence == 0);
    WORKS(pagemark_snapshot_save(snapshot, repository, "job", &sequence));
    TRUE(sequence == 1);
    WORKS(pagemark_snapshot_open(repository, "job", store, &opened));
    WORKS(pagemark_snapshot_open(repository, "job", store, &again));
    TRUE(pagemark_snapshot_equal(opened, again) && !pagemark_snapshot_equal(opened, snapshot));
    WORKS(pagemark_region_from_snapshot(opened, NULL, &made));
    TRUE(memcmp(pagemark_region_data(made), data, 8 * PAGE) == 0);
    FAILS(pagemark_region_restore(made, opened, NULL), WRONG_REGION, "another region");
    pagemark_region_free(made);
    FAILS(pagemark_region_from_snapshot(NULL, NULL, &made), NULL_POINTER, "snapshot is null");
    TRUE(made == NULL);
    pagemark_snapshot_free(again);
    pagemark_snapshot_free(opened);
    pagemark_snapshot_free(snapshot);
    pagemark_store_free(store);
    pagemark_repository_free(repository);
    snprintf(remove, sizeof remove, "rm -rf %s", directory);
    TRUE(system(remove) == 0);
}

/* A second region follows the first one by the changes of its transactions, which travel as bytes. */
static void replicas(pagemark_region *region)
{
    char *data = pagemark_region_data(region), *message;
    pagemark_changes *changes, *received;
    pagemark_region *replica, *other;
    const pagemark_change *items;
    size_t count, bytes;

    WORKS(pagemark_region_new(8 * PAGE, NULL, &replica));
    WORKS(pagemark_region_new(PAGE, NULL, &other));
    FAILS(pagemark_region_commit_changes(region, &changes), NO_TRANSACTION, "begin first");
    TRUE(changes == NULL);
    WORKS(pagemark_region_begin(region));
    memcpy(data + 2 * PAGE - 2, "over", 4);
    FAILS(pagemark_region_commit_changes(region, NULL), NULL_POINTER, "changes is null");
    TRUE(pagemark_region_in_transaction(region));
    WORKS(pagemark_region_commit_changes(region, &changes));
    items = pagemark_changes_items(changes, &count);
    TRUE(count > 0 && items[0].offset <= 2 * PAGE - 2 && items[0].offset + items[0].bytes >= 2 * PAGE);
    TRUE(items[0].new_content[2 * PAGE - 2 - items[0].offset] == 'o');
    TRUE(items[0].old_content[2 * PAGE - 2 - items[0].offset] == 0);
    TRUE(pagemark_changes_items(NULL, &count) == NULL && count == 0);
    TRUE(pagemark_changes_encoded_bytes(NULL) == 0);

    bytes = pagemark_changes_encoded_bytes(changes);
    WORKS(pagemark_changes_forget_old(changes));
    TRUE(pagemark_changes_items(changes, &count)[0].old_content == NULL);
    TRUE(pagemark_changes_encoded_bytes(changes) < bytes);
    FAILS(pagemark_changes_revert(changes, region), NO_ROLLBACK, "no content to restore");
    bytes = pagemark_changes_encoded_bytes(changes);
    message = malloc(bytes);
    FAILS(pagemark_changes_encode(changes, message, bytes - 1), OUT_OF_RANGE, "there is room for");
    FAILS(pagemark_changes_encode(changes, NULL, bytes), NULL_POINTER, "to is null");
    WORKS(pagemark_changes_encode(changes, message, bytes));
    FAILS(pagemark_changes_decode(message, bytes - 1, &received), DAMAGED, "checksum");
    TRUE(received == NULL);
    WORKS(pagemark_changes_decode(message, bytes, &received));
    FAILS(pagemark_changes_apply(received, other), LENGTH_DIFFERS, "4096 bytes");
    FAILS(pagemark_changes_apply(received, NULL), NULL_POINTER, "region is null");
    WORKS(pagemark_changes_apply(received, replica));
    TRUE(memcmp((char *)pagemark_region_data(replica) + 2 * PAGE - 2, "over", 4) == 0);
    pagemark_changes_free(received);
    pagemark_changes_free(changes);

    WORKS(pagemark_region_begin(region));
    memset(data + 2 * PAGE - 2, 0, 4);
    WORKS(pagemark_region_commit_changes(region, &changes));
    WORKS(pagemark_changes_revert(changes, region));
    TRUE(memcmp(data + 2 * PAGE - 2, "over", 4) == 0);
    WORKS(pagemark_changes_apply(changes, region));
    TRUE(data[2 * PAGE - 2] == 0);
    pagemark_changes_free(changes);
    pagemark_changes_free(NULL);
    free(message);
    pagemark_region_free(replica);
    pagemark_region_free(other);
}

int main(int argc, char **argv)
{
    pagemark_options options = {0};
    pagemark_region *region;
    pagemark_snapshot *snapshot;
    pagemark_status made;

    TRUE(strlen(pagemark_version()) >= 5);
    TRUE(strcmp(pagemark_last_error(), "") == 0);
    options.mechanism = argc > 1 ? argv[1] : "auto";
    handle(SIGSEGV, on_crash, SA_NODEFER, NULL);
    made = pagemark_region_new(8 * PAGE, &options, &region);
    if (made == PAGEMARK_STATUS_UNAVAILABLE) {
        fprintf(stderr, "%s\n", pagemark_last_error());
        return 77;
    }
    WORKS(made);
    if (made != PAGEMARK_STATUS_OK)
        return 1;
    TRUE(!strcmp(options.mechanism, "auto") || !strcmp(pagemark_region_mechanism(region), options.mechanism));
    TRUE(pagemark_region_bytes(region) == 8 * PAGE);
    WORKS(pagemark_region_snapshot(region, &snapshot));
    null_pointers(region, snapshot);
    transactions(region);
    adoption();
    offsets(region, snapshot);
    snapshots(region, snapshot);
    budget();
    forked_child(region);
    nested_handlers(region);
    system_calls(region);
    cancelled(region);
    copies(region);
    replicas(region);
    saved_snapshots(region);
    pagemark_snapshot_free(snapshot);
    pagemark_region_free(region);
    unmapped(options.mechanism);
    return failures != 0;
}
