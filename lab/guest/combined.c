// SPDX-License-Identifier: GPL-2.0
/*
 * A program whose memory is written while all that the kernel does with memory happens to it at the same time.
 *
 *   combined [-r SEED] [-g]
 *
 * Some threads write pages of any mapping. Other threads, and another process, advise, lock, pin, splice, fork, migrate,
 * merge and reclaim the same pages. The caller tracks the program, and compares (crates/pagemark/tests/ldt_combined.rs). It
 * sends a byte, and is answered with a line:
 *   p    all threads and the other process rest, and change no content until they go on      -> resting
 *   g    they go on                                                                          -> going
 *   e    the program ends, and prints a line `did NAME SUCCESSES ATTEMPTS` for all it did    -> ended
 * At first it prints a line `memory KIND START END STEP` for each mapping, and `ready`: it rests. Of a mapping with a step
 * other than 1, only each STEPth page is ever written. KIND is that of the crate's trackers.
 *
 * -g also maps a huge page of 1 GiB, of which the machine needs one.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define HUGE (512 * PAGE)
#define GIB (512 * HUGE)
#define WRITERS 2
#define SOURCE_SIZE (64 * PAGE)
#define MOST_PAGES 64ul

#ifndef MADV_COLD
#define MADV_COLD 20
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MFD_HUGE_1GB
#define MFD_HUGE_1GB (30u << 26)
#endif
#ifndef MAP_HUGE_1GB
#define MAP_HUGE_1GB (30u << 26)
#endif

/* What is counted, to know that it happened. */
#define ACTS(act) \
	act(WRITE, "write") \
	act(KERNEL_WRITE, "read-into") \
	act(LARGE_WRITEV, "process_vm_writev") \
	act(LARGE_READV, "process_vm_readv") \
	act(FOREIGN_WRITEV, "process_vm_writev-of-another") \
	act(FOREIGN_READV, "process_vm_readv-of-another") \
	act(FOREIGN_MEM, "proc-mem-of-another") \
	act(RING_REGISTER, "io_uring-buffers-registered") \
	act(RING_WRITE, "io_uring-write-into-buffer") \
	act(VMSPLICE, "vmsplice") \
	act(SPLICED_READ, "read-of-spliced") \
	act(LOCK, "mlock") \
	act(LOCK_ONFAULT, "mlock2-onfault") \
	act(UNLOCK, "munlock") \
	act(DROP, "MADV_DONTNEED") \
	act(DROP_LOCKED, "MADV_DONTNEED_LOCKED") \
	act(FREE, "MADV_FREE") \
	act(COLD, "MADV_COLD") \
	act(PAGEOUT, "MADV_PAGEOUT") \
	act(COLLAPSE, "MADV_COLLAPSE") \
	act(HUGEPAGE, "MADV_HUGEPAGE") \
	act(MERGE, "MADV_MERGEABLE") \
	act(FORK, "fork") \
	act(FOREIGN_COLD, "process_madvise-COLD") \
	act(FOREIGN_PAGEOUT, "process_madvise-PAGEOUT") \
	act(FOREIGN_COLLAPSE, "process_madvise-COLLAPSE") \
	act(FOREIGN_WILLNEED, "process_madvise-WILLNEED") \
	act(MOVE, "move_pages") \
	act(FOREIGN_MOVE, "move_pages-of-another") \
	act(MIGRATE, "migrate_pages") \
	act(COMPACT, "compact_memory") \
	act(DROP_CACHES, "drop_caches") \
	act(SHRINK, "swap-of-shared-memory") \
	act(MONITOR, "DAMON")

enum act {
#define NAMED(name, text) name,
	ACTS(NAMED)
	ACT_COUNT
};

static const char *const act_names[] = {
#define TEXT(name, text) text,
	ACTS(TEXT)
};

enum kind { ANONYMOUS, PRIVATE_FILE, SHARED, HUGETLB, SHARED_HUGETLB, SHARED_GIB, KINDS };

static const char *const kind_names[] = { "anonymous", "private-file", "shared", "anonymous", "shared", "shared" };

struct mapping {
	enum kind kind;
	char *start;
	unsigned long pages, step;
};

struct control {
	atomic_uint pause, resting, stop;
	atomic_ulong done[ACT_COUNT], tried[ACT_COUNT];
};

static struct control *control;
static struct mapping mappings[KINDS + 1];
static unsigned int mapping_count, resters;
static uint64_t seed = 1;
static pid_t program;

static void die(const char *what)
{
	fprintf(stderr, "combined: %s: %s\n", what, strerror(errno));
	exit(2);
}

static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static bool count(enum act act, bool done)
{
	atomic_fetch_add(&control->tried[act], 1);
	if (done)
		atomic_fetch_add(&control->done[act], 1);
	return done;
}

static void rest(void)
{
	if (!atomic_load(&control->pause))
		return;
	atomic_fetch_add(&control->resting, 1);
	while (atomic_load(&control->pause))
		usleep(200);
	atomic_fetch_sub(&control->resting, 1);
}

static bool is_over(void)
{
	rest();
	return atomic_load(&control->stop);
}

/* The mappings. */

static void map(enum kind kind, unsigned long length, unsigned long step, int file, int flags)
{
	char *at = mmap(NULL, length + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (at == MAP_FAILED)
		die("mmap");
	at = (char *)(((uintptr_t)at + HUGE - 1) & -HUGE);
	if (kind == SHARED_GIB)
		at = mmap(NULL, length, PROT_READ | PROT_WRITE, flags, file, 0);
	else
		at = mmap(at, length, PROT_READ | PROT_WRITE, flags | MAP_FIXED, file, 0);
	if (at == MAP_FAILED) {
		/* The machine may have no huge pages of that size; the counts say which mappings there are. */
		if (kind < HUGETLB)
			die("mmap of a file");
		return;
	}
	mappings[mapping_count++] = (struct mapping){ kind, at, length / PAGE, step };
}

static int file_of(const char *name, unsigned int flags, unsigned long length)
{
	int file = memfd_create(name, flags);

	if (file >= 0 && ftruncate(file, (off_t)length))
		die("ftruncate");
	return file;
}

static void map_all(bool gigabyte)
{
	const unsigned long length = 3 * HUGE;
	int file;

	map(ANONYMOUS, length, 1, -1, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
	map(ANONYMOUS, length, 1, -1, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
	file = file_of("private", 0, length);
	for (unsigned long page = 0; page < length / PAGE; page++) {
		char content[PAGE];

		memset(content, (int)page | 1, PAGE);
		if (pwrite(file, content, PAGE, (off_t)(page * PAGE)) != (ssize_t)PAGE)
			die("writing the file");
	}
	map(PRIVATE_FILE, length, 1, file, MAP_PRIVATE);
	map(SHARED, length, 1, file_of("shared", 0, length), MAP_SHARED);
	map(HUGETLB, 2 * HUGE, 1, -1, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB);
	file = file_of("huge", MFD_HUGETLB, 2 * HUGE);
	if (file >= 0)
		map(SHARED_HUGETLB, 2 * HUGE, 1, file, MAP_SHARED);
	if (gigabyte) {
		file = file_of("gigabyte", MFD_HUGETLB | MFD_HUGE_1GB, GIB);
		if (file < 0)
			die("memfd_create of a huge page of 1 GiB");
		map(SHARED_GIB, GIB, 4096, file, MAP_SHARED);
	}
	for (unsigned int i = 0; i < mapping_count; i++)
		if (mappings[i].kind == ANONYMOUS || mappings[i].kind == SHARED)
			madvise(mappings[i].start, mappings[i].pages * PAGE, MADV_HUGEPAGE);
}

struct part {
	const struct mapping *mapping;
	char *start;
	unsigned long pages;
};

/* Some pages of any mapping; of a huge one of which few pages are written, one that may be written. */
static struct part any_part(uint64_t *state)
{
	const struct mapping *mapping = &mappings[next(state) % mapping_count];
	unsigned long most = next(state) % 4 ? 8 : MOST_PAGES, pages = 1 + next(state) % most;
	unsigned long page = next(state) % (mapping->pages - pages);

	if (mapping->step != 1) {
		pages = 1;
		page -= page % mapping->step;
	}
	return (struct part){ mapping, mapping->start + page * PAGE, pages };
}

static bool is_huge(const struct mapping *mapping)
{
	return mapping->kind >= HUGETLB;
}

/* Writes. */

static void fill(char *to, unsigned long length, uint64_t *state)
{
	for (unsigned long i = 0; i + 8 <= length; i += 8)
		memcpy(to + i, &(uint64_t){ next(state) }, 8);
}

static void write_some(uint64_t *state)
{
	struct part part = any_part(state);
	static __thread int zero = -1;

	for (unsigned long page = 0; page < part.pages; page++) {
		char *at = part.start + page * PAGE;

		switch (next(state) % 8) {
		case 0:
			memset(at, (int)next(state), PAGE);
			break;
		case 1:
			if (zero < 0)
				zero = open("/dev/urandom", O_RDONLY);
			count(KERNEL_WRITE, read(zero, at + next(state) % 2048, 1 + next(state) % 2048) > 0);
			break;
		default:
			((volatile uint64_t *)at)[next(state) % 512] = next(state);
		}
	}
	count(WRITE, true);
}

/* Copies into many pages at once, which are pinned that long; of this process, or of the program that it was forked from. */
static void copy_into(uint64_t *state, enum act act)
{
	static __thread char content[MOST_PAGES * PAGE];
	struct part part = any_part(state);
	struct iovec local = { content, part.pages * PAGE }, remote = { part.start, part.pages * PAGE };

	fill(content, part.pages * PAGE, state);
	count(act, process_vm_writev(program, &local, 1, &remote, 1, 0) > 0);
}

static void copy_from(uint64_t *state, enum act act)
{
	static __thread char content[MOST_PAGES * PAGE];
	struct part part = any_part(state);
	struct iovec local = { content, part.pages * PAGE }, remote = { part.start, part.pages * PAGE };

	count(act, process_vm_readv(program, &local, 1, &remote, 1, 0) > 0);
}

static void *writer(void *argument)
{
	uint64_t state = seed * 1000003 + (uintptr_t)argument;

	while (!is_over()) {
		switch (next(&state) % 16) {
		case 0: copy_into(&state, LARGE_WRITEV); break;
		case 1: copy_from(&state, LARGE_READV); break;
		default: write_some(&state);
		}
		/* Intervals in which most pages are not written tell more. */
		if (next(&state) % 4 == 0)
			usleep(next(&state) % 2000);
	}
	return NULL;
}

/* Buffers of io_uring: pages that stay pinned from interval to interval, and that the kernel writes at any time. */
struct ring {
	int file, source;
	struct io_uring_params params;
	char *queue, *completions;
	struct io_uring_sqe *entries;
};

static atomic_uint *ring_word(char *ring, unsigned int offset)
{
	return (atomic_uint *)(ring + offset);
}

static bool open_ring(struct ring *ring, uint64_t *state)
{
	static char content[SOURCE_SIZE];

	memset(ring, 0, sizeof(*ring));
	ring->file = (int)syscall(SYS_io_uring_setup, 4, &ring->params);
	if (ring->file < 0)
		return false;
	ring->queue = mmap(NULL, ring->params.sq_off.array + ring->params.sq_entries * sizeof(unsigned int),
			   PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->file, IORING_OFF_SQ_RING);
	ring->completions = mmap(NULL, ring->params.cq_off.cqes + ring->params.cq_entries * sizeof(struct io_uring_cqe),
				 PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring->file, IORING_OFF_CQ_RING);
	ring->entries = mmap(NULL, ring->params.sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE,
			     MAP_SHARED | MAP_POPULATE, ring->file, IORING_OFF_SQES);
	if (ring->queue == MAP_FAILED || ring->completions == MAP_FAILED || ring->entries == MAP_FAILED)
		die("mapping a ring");
	ring->source = file_of("source", 0, SOURCE_SIZE);
	fill(content, sizeof(content), state);
	if (pwrite(ring->source, content, sizeof(content), 0) != (ssize_t)sizeof(content))
		die("writing the source of a ring");
	return true;
}

/* Has the kernel read a file into a registered buffer, and waits for it. */
static bool ring_read(struct ring *ring, char *to, unsigned int length, uint64_t *state)
{
	atomic_uint *tail = ring_word(ring->queue, ring->params.sq_off.tail);
	atomic_uint *head = ring_word(ring->completions, ring->params.cq_off.head);
	unsigned int at = atomic_load(tail) % ring->params.sq_entries, done;
	struct io_uring_cqe *results = (void *)(ring->completions + ring->params.cq_off.cqes);
	long submitted;
	int result;

	ring->entries[at] = (struct io_uring_sqe){
		.opcode = IORING_OP_READ_FIXED, .fd = ring->source, .addr = (uintptr_t)to, .len = length,
		.off = next(state) % (SOURCE_SIZE - length), .buf_index = 0,
		/* By a thread of the kernel, or by this one. */
		.flags = next(state) % 2 ? IOSQE_ASYNC : 0,
	};
	((unsigned int *)(ring->queue + ring->params.sq_off.array))[at] = at;
	atomic_store(tail, atomic_load(tail) + 1);
	do
		submitted = syscall(SYS_io_uring_enter, ring->file, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0);
	while (submitted < 0 && errno == EINTR);
	if (submitted != 1)
		die("io_uring_enter");
	while (atomic_load(ring_word(ring->completions, ring->params.cq_off.tail)) == atomic_load(head))
		usleep(100);
	done = atomic_load(head) % ring->params.cq_entries;
	result = results[done].res;
	atomic_store(head, atomic_load(head) + 1);
	return result == (int)length;
}

static void *pinner(void *argument)
{
	uint64_t state = seed * 1000033 + (uintptr_t)argument;
	struct part part = { 0 };
	struct ring ring;

	if (!open_ring(&ring, &state)) {
		while (!is_over())
			usleep(1000);
		return NULL;
	}
	while (!is_over()) {
		if (!part.start) {
			struct part any = any_part(&state);
			struct iovec buffer = { any.start, any.pages * PAGE };

			if (count(RING_REGISTER,
				  !syscall(SYS_io_uring_register, ring.file, IORING_REGISTER_BUFFERS, &buffer, 1)))
				part = any;
		} else if (next(&state) % 16) {
			unsigned int length = 1 + (unsigned int)(next(&state) % PAGE);
			char *to = part.start + next(&state) % part.pages * PAGE;

			if (to + length > part.start + part.pages * PAGE)
				length = (unsigned int)(part.start + part.pages * PAGE - to);
			count(RING_WRITE, ring_read(&ring, to, length, &state));
		} else {
			if (syscall(SYS_io_uring_register, ring.file, IORING_UNREGISTER_BUFFERS, NULL, 0))
				die("IORING_UNREGISTER_BUFFERS");
			part.start = NULL;
		}
		usleep(next(&state) % 3000);
	}
	return NULL;
}

/* Pages that are referred to from a pipe, and written later to other pages. */
static void *splicer(void *argument)
{
	uint64_t state = seed * 1000037 + (uintptr_t)argument;
	int ends[2];

	if (pipe2(ends, O_NONBLOCK))
		die("pipe");
	while (!is_over()) {
		struct part part = any_part(&state), to = any_part(&state);
		struct iovec vector = { part.start, part.pages * PAGE };

		count(VMSPLICE, vmsplice(ends[1], &vector, 1, SPLICE_F_NONBLOCK) > 0);
		usleep(next(&state) % 5000);
		rest();
		if (next(&state) % 2)
			count(SPLICED_READ, read(ends[0], to.start, to.pages * PAGE) > 0);
	}
	return NULL;
}

/* Advice and locks. */

static void *adviser(void *argument)
{
	uint64_t state = seed * 1000039 + (uintptr_t)argument;

	while (!is_over()) {
		struct part part = any_part(&state);
		size_t length = part.pages * PAGE;
		char *huge = (char *)((uintptr_t)part.start & -HUGE);

		/* The other thread of this kind advises small parts, this one often the whole huge page. */
		if ((uintptr_t)argument % 2 && part.mapping->step == 1 && next(&state) % 2) {
			part.start = huge;
			length = HUGE;
		}
		switch (next(&state) % 16) {
		case 0: count(LOCK, !mlock(part.start, length)); break;
		case 1: count(LOCK_ONFAULT, !mlock2(part.start, length, MLOCK_ONFAULT)); break;
		case 2:
		case 3:
		case 4:
			count(UNLOCK, !munlock(part.mapping->start, part.mapping->pages * PAGE));
			break;
		case 5: count(DROP, !madvise(part.start, length, MADV_DONTNEED)); break;
		case 6: count(DROP_LOCKED, !madvise(part.start, length, MADV_DONTNEED_LOCKED)); break;
		case 7: count(FREE, !madvise(part.start, length, MADV_FREE)); break;
		case 8:
		case 9:
			count(COLD, !madvise(part.start, length, MADV_COLD));
			break;
		case 10:
		case 11:
			count(PAGEOUT, !madvise(part.start, length, MADV_PAGEOUT));
			break;
		case 12: count(COLLAPSE, !madvise(huge, HUGE, MADV_COLLAPSE)); break;
		case 13:
			if (!is_huge(part.mapping))
				count(HUGEPAGE, !madvise(huge, HUGE, next(&state) % 4 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE));
			break;
		case 14:
			if (part.mapping->kind == ANONYMOUS)
				count(MERGE, !madvise(part.start, length, next(&state) % 2 ? MADV_MERGEABLE : MADV_UNMERGEABLE));
			break;
		default:
			if (next(&state) % 8 == 0) {
				pid_t child = fork();

				if (!child) {
					usleep(next(&state) % 5000);
					_exit(0);
				}
				count(FORK, child > 0);
				if (child > 0)
					waitpid(child, NULL, 0);
			}
		}
		usleep(next(&state) % 2000);
	}
	return NULL;
}

static bool move(pid_t pid, struct part part, int node)
{
	void *pages[MOST_PAGES];
	int nodes[MOST_PAGES], status[MOST_PAGES];
	bool moved = false;

	for (unsigned long i = 0; i < part.pages; i++) {
		pages[i] = part.start + i * PAGE;
		nodes[i] = node;
		status[i] = -1;
	}
	/* Also pages that several processes map. */
	if (syscall(SYS_move_pages, pid, part.pages, pages, nodes, status, 4 /* MPOL_MF_MOVE_ALL */) < 0)
		return false;
	for (unsigned long i = 0; i < part.pages; i++)
		moved |= status[i] == node;
	return moved;
}

static void *mover(void *argument)
{
	uint64_t state = seed * 1000081 + (uintptr_t)argument;

	while (!is_over()) {
		count(MOVE, move(0, any_part(&state), (int)(next(&state) % 2)));
		usleep(next(&state) % 4000);
	}
	return NULL;
}

static bool write_file(const char *path, const char *text)
{
	int file = open(path, O_WRONLY);
	bool done = file >= 0 && write(file, text, strlen(text)) > 0;

	if (file >= 0)
		close(file);
	return done;
}

/* DAMON: the kernel looks at the program's entries all the time, clears their accessed bits, and pages out what it finds. */

#define DAMON "/sys/kernel/mm/damon/admin/kdamonds/"
#define CONTEXT DAMON "0/contexts/0/"

static bool start_monitoring(void)
{
	char pid[16];
	const char *const settings[][2] = {
		{ DAMON "nr_kdamonds", "1" },
		{ DAMON "0/contexts/nr_contexts", "1" },
		{ CONTEXT "operations", "vaddr" },
		{ CONTEXT "monitoring_attrs/intervals/sample_us", "2000" },
		{ CONTEXT "monitoring_attrs/intervals/aggr_us", "20000" },
		{ CONTEXT "monitoring_attrs/intervals/update_us", "100000" },
		{ CONTEXT "targets/nr_targets", "1" },
		{ CONTEXT "targets/0/pid_target", pid },
		{ CONTEXT "schemes/nr_schemes", "1" },
		{ CONTEXT "schemes/0/action", "pageout" },
		{ CONTEXT "schemes/0/access_pattern/sz/max", "1073741824" },
		{ CONTEXT "schemes/0/access_pattern/age/max", "1000" },
		{ DAMON "0/state", "on" },
	};

	snprintf(pid, sizeof(pid), "%d", program);
	for (unsigned int i = 0; i < sizeof(settings) / sizeof(*settings); i++)
		if (!write_file(settings[i][0], settings[i][1]))
			return false;
	return true;
}

/* Whether it has done what it was told to any part of the memory. */
static bool has_monitored(void)
{
	char text[32] = "";
	int file;

	if (!write_file(DAMON "0/state", "update_schemes_stats"))
		return false;
	file = open(CONTEXT "schemes/0/stats/nr_applied", O_RDONLY);
	if (file < 0)
		return false;
	if (read(file, text, sizeof(text) - 1) < 0)
		text[0] = 0;
	close(file);
	return strtoul(text, NULL, 10) > 0;
}

/* What another process does to this one's memory. */
static void foreign(uint64_t *state, int process, int memory)
{
	struct part part = any_part(state);
	struct iovec vector = { part.start, part.pages * PAGE };
	struct iovec huge = { (char *)((uintptr_t)part.start & -HUGE), HUGE };
	unsigned long nodes[2] = { 1, 2 };
	char word[64];

	switch (next(state) % 16) {
	case 0:
	case 1:
		copy_into(state, FOREIGN_WRITEV);
		break;
	case 2: copy_from(state, FOREIGN_READV); break;
	case 3:
		fill(word, sizeof(word), state);
		count(FOREIGN_MEM, pwrite(memory, word, sizeof(word), (off_t)(uintptr_t)part.start) > 0);
		break;
	case 4: count(FOREIGN_COLD, syscall(SYS_process_madvise, process, &huge, 1, MADV_COLD, 0) > 0); break;
	case 5: count(FOREIGN_COLD, syscall(SYS_process_madvise, process, &vector, 1, MADV_COLD, 0) > 0); break;
	case 6:
	case 7:
		count(FOREIGN_PAGEOUT, syscall(SYS_process_madvise, process, &vector, 1, MADV_PAGEOUT, 0) > 0);
		break;
	case 8: count(FOREIGN_COLLAPSE, syscall(SYS_process_madvise, process, &huge, 1, MADV_COLLAPSE, 0) > 0); break;
	case 9: count(FOREIGN_WILLNEED, syscall(SYS_process_madvise, process, &vector, 1, MADV_WILLNEED, 0) > 0); break;
	case 10:
	case 11:
		count(FOREIGN_MOVE, move(program, part, (int)(next(state) % 2)));
		break;
	case 12: {
		unsigned int from = next(state) % 2;

		if (next(state) % 8 == 0)
			count(MIGRATE, syscall(SYS_migrate_pages, program, 64ul, &nodes[from], &nodes[!from]) >= 0);
		break;
	}
	case 13:
		if (next(state) % 4 == 0)
			count(COMPACT, write_file("/proc/sys/vm/compact_memory", "1"));
		break;
	case 14:
		if (next(state) % 16 == 0)
			count(DROP_CACHES, write_file("/proc/sys/vm/drop_caches", "1"));
		break;
	default:
		for (unsigned int i = 0; i < mapping_count; i++)
			if (mappings[i].kind == SHARED) {
				struct iovec all = { mappings[i].start, mappings[i].pages * PAGE };

				count(SHRINK, syscall(SYS_process_madvise, process, &all, 1, MADV_PAGEOUT, 0) > 0);
			}
	}
}

static void another_process(void)
{
	uint64_t state = seed * 1000099 + 1;
	int process = (int)syscall(SYS_pidfd_open, program, 0), memory;
	bool monitors;
	char path[64];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	monitors = start_monitoring();
	snprintf(path, sizeof(path), "/proc/%d/mem", program);
	memory = open(path, O_RDWR);
	if (process < 0 || memory < 0)
		die("opening the program");
	while (!is_over()) {
		foreign(&state, process, memory);
		if (monitors && next(&state) % 64 == 0)
			count(MONITOR, has_monitored());
		usleep(next(&state) % 2000);
	}
	if (monitors)
		write_file(DAMON "0/state", "off");
	_exit(0);
}

static void answer(const char *text)
{
	puts(text);
	fflush(stdout);
}

static void pause_all(bool yes)
{
	atomic_store(&control->pause, yes);
	while (atomic_load(&control->resting) != (yes ? resters : 0))
		usleep(200);
}

int main(int argc, char **argv)
{
	void *(*const threads[])(void *) = { writer, writer, pinner, pinner, splicer, adviser, adviser, mover };
	const unsigned int thread_count = sizeof(threads) / sizeof(*threads);
	pthread_t ids[sizeof(threads) / sizeof(*threads)];
	bool gigabyte = false;
	char command;
	int option;
	pid_t other;

	while ((option = getopt(argc, argv, "r:g")) != -1) {
		switch (option) {
		case 'r': seed = strtoul(optarg, NULL, 10); break;
		case 'g': gigabyte = true; break;
		default: return 2;
		}
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	program = getpid();
	control = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (control == MAP_FAILED)
		die("mmap");
	map_all(gigabyte);
	resters = thread_count + 1;
	atomic_store(&control->pause, 1);
	other = fork();
	if (other < 0)
		die("fork");
	if (!other)
		another_process();
	for (unsigned int i = 0; i < thread_count; i++)
		if (pthread_create(&ids[i], NULL, threads[i], (void *)(uintptr_t)(i + 1)))
			die("pthread_create");
	pause_all(true);
	for (unsigned int i = 0; i < mapping_count; i++)
		printf("memory %s %" PRIx64 " %" PRIx64 " %lu\n", kind_names[mappings[i].kind],
		       (uint64_t)(uintptr_t)mappings[i].start,
		       (uint64_t)(uintptr_t)mappings[i].start + mappings[i].pages * PAGE, mappings[i].step);
	answer("ready");
	while (read(0, &command, 1) == 1 && command != 'e') {
		pause_all(command == 'p');
		answer(command == 'p' ? "resting" : "going");
	}
	atomic_store(&control->stop, 1);
	pause_all(false);
	for (unsigned int i = 0; i < thread_count; i++)
		pthread_join(ids[i], NULL);
	waitpid(other, NULL, 0);
	for (unsigned int i = 0; i < ACT_COUNT; i++)
		printf("did %s %lu %lu\n", act_names[i], atomic_load(&control->done[i]), atomic_load(&control->tried[i]));
	answer("ended");
	return 0;
}
