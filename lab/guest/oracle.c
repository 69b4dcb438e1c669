// SPDX-License-Identifier: GPL-2.0
/*
 * Does a mechanism of dirty tracking miss a write?
 *
 * A trackee of several threads writes, maps, unmaps, moves, protects, forks, advises, swaps and merges its memory at
 * random. The tracker collects and restarts while the trackee runs, and copies only the reported pages. From time to time
 * the trackee is stopped: after one more collect, the copy must equal the trackee's memory byte for byte.
 *
 *   oracle [-s SECONDS] [-t THREADS] [-p PAGES] [-r SEED] [-m MODE] [-u] [-b]
 *
 * MODE is
 *   scan          lightweight dirty tracking: PAGEMAP_SCAN collects and restarts in one step, whether the trackee runs or not
 *   written       the same, but PAGEMAP_SCAN is asked for the written pages alone, which takes another path in the kernel;
 *                 while the trackee is stopped, sometimes in two steps
 *   soft-dirty    the trackee is stopped, pagemap is read, and 4 is written to clear_refs
 *   pagemap-scan  userfaultfd write-protects asynchronously; PAGEMAP_SCAN collects and protects again, while the trackee runs
 *
 * Lightweight dirty tracking ends from time to time, by closing its file, and begins anew while the trackee goes on.
 *
 * In three places the kernel loses a write of soft-dirty; this mode leaves these out: whole page tables that mremap moves,
 * pages that KSM merges, and shared memory that was written, reclaimed and read again.
 *
 * -u also write-protects with userfaultfd, which must not affect the other mechanisms. -b ignores a reported page from time
 * to time; the oracle must detect that (a test of the test). It then runs until it does, however slow the machine is, or
 * until it has ignored FORGOTTEN_MAX reports.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define HUGE (512 * PAGE)
#define MAX_THREADS 16
/* -b: of so many reports, one is noticed at the latest. */
#define FORGOTTEN_MAX 5000

#define PAGEMAP_SCAN _IOWR('f', 16, struct pm_scan_arg)
#define PAGE_IS_WRITTEN (1 << 1)
#define PAGE_IS_FILE (1 << 2)
#define PAGE_IS_PRESENT (1 << 3)
#define PAGE_IS_SWAPPED (1 << 4)
#define PAGE_IS_PFNZERO (1 << 5)
#define PAGE_IS_LDT_DIRTY (1 << 9)
#define PM_SCAN_WP_MATCHING (1 << 0)
#define PM_SCAN_LDT_RESTART (1 << 2)

#ifndef UFFD_FEATURE_WP_UNPOPULATED
#define UFFD_FEATURE_WP_UNPOPULATED (1 << 13)
#endif
#ifndef UFFD_FEATURE_WP_ASYNC
#define UFFD_FEATURE_WP_ASYNC (1 << 15)
#endif
#ifndef MADV_COLD
#define MADV_COLD 20
#endif
#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

struct page_region {
	uint64_t start, end, categories;
};

struct pm_scan_arg {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

/* Shared by the tracker and the trackee; not tracked. */
struct control {
	atomic_uint pause;	/* the tracker wants the trackee to stop */
	atomic_uint resting;	/* threads that have stopped */
	atomic_uint stop;
	atomic_ulong operations;
	atomic_int userfaultfd;	/* its number in the trackee, once it exists */
};

enum kind { ANONYMOUS, PRIVATE_FILE, SHARED_MEMORY, KINDS };

static struct control *control;
static unsigned int threads = 3;
static unsigned long arena_pages = 3 * 512;
static unsigned long seconds = 20, seed = 1;
static enum mode { SCAN, WRITTEN, SOFT_DIRTY, PAGEMAP_SCAN_WRITTEN } mode;
static bool while_running = true;	/* SOFT_DIRTY collects only while the trackee is stopped */
static bool with_userfaultfd, broken;
static char *base;
static size_t size;
static int backing[MAX_THREADS];	/* the files that are mapped in arenas that are not anonymous */

static void die(const char *what)
{
	fprintf(stderr, "oracle: %s: %s\n", what, strerror(errno));
	exit(2);
}

static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static enum kind kind_of(unsigned int thread)
{
	return thread == 1 ? PRIVATE_FILE : thread == 3 && mode != SOFT_DIRTY ? SHARED_MEMORY : ANONYMOUS;
}

static char *arena(unsigned int thread)
{
	return base + thread * arena_pages * PAGE;
}

/* Maps pages of an arena as they were at the start. */
static void map_arena(unsigned int thread, unsigned long page, unsigned long count)
{
	int prot = PROT_READ | PROT_WRITE;
	char *at = arena(thread) + page * PAGE;
	void *got;

	if (kind_of(thread) == ANONYMOUS)
		got = mmap(at, count * PAGE, prot, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
	else
		got = mmap(at, count * PAGE, prot,
			   MAP_FIXED | (kind_of(thread) == PRIVATE_FILE ? MAP_PRIVATE : MAP_SHARED), backing[thread],
			   page * PAGE);
	if (got == MAP_FAILED)
		die("mmap in the arena");
}

static void write_page(char *page, uint64_t *state)
{
	/* Writes one word, some words, or the whole page; the program writes, or the kernel on its behalf. */
	uint64_t words[8];
	struct iovec local = { words, sizeof(words) }, remote = { page + (next(state) % 504) * 8, sizeof(words) };
	static __thread int zero = -1;

	switch (next(state) % 8) {
	case 0:
		memset(page, (int)next(state), PAGE);
		break;
	case 1:
		for (int i = 0; i < 8; i++)
			words[i] = next(state);
		/* The pages are pinned, and written through the kernel's mapping. */
		process_vm_writev(getpid(), &local, 1, &remote, 1, 0);
		break;
	case 2:
		if (zero < 0)
			zero = open("/dev/zero", O_RDONLY);
		if (read(zero, page + next(state) % 2048, 1 + next(state) % 2048) < 0 && errno != EFAULT)
			die("read");
		break;
	default:
		((volatile uint64_t *)page)[next(state) % 512] = next(state);
	}
}

static void child_that_writes(char *at, unsigned long count, uint64_t state)
{
	pid_t child = fork();

	if (child < 0)
		return;
	if (child == 0) {
		for (unsigned long i = 0; i < count; i += 3)
			((volatile uint64_t *)(at + i * PAGE))[7] = next(&state);
		_exit(0);
	}
	/* The parent also writes the pages that it shares with the child. */
	for (unsigned long i = 0; i < count; i += 2)
		((volatile uint64_t *)(at + i * PAGE))[9] = next(&state);
	waitpid(child, NULL, 0);
}

/*
 * A mapping that is removed takes along what is known of its writes; a tracker takes all of a new mapping of shared memory.
 * To test that nothing else is lost, the oracle does not, and the trackee leaves such a mapping in its place.
 */
static bool may_unmap(unsigned int thread)
{
	return kind_of(thread) != SHARED_MEMORY || mode == PAGEMAP_SCAN_WRITTEN;
}

static void step(unsigned int thread, uint64_t *state)
{
	unsigned long count = 1 + next(state) % (next(state) % 4 ? 8 : arena_pages / 4);
	unsigned long page = next(state) % (arena_pages - count);
	char *at = arena(thread) + page * PAGE;
	size_t length = count * PAGE;
	volatile char sum = 0;

	switch (next(state) % 40) {
	case 0:
		if (!may_unmap(thread))
			break;
		munmap(at, length);
		map_arena(thread, page, count);
		break;
	case 1:
		if (!may_unmap(thread))
			break;
		munmap(at, length);
		if (next(state) % 2)
			for (volatile int i = 0; i < 5000; i++)
				;
		map_arena(thread, page, count);
		for (unsigned long i = 0; i < count; i++)
			sum += at[i * PAGE];
		break;
	case 2: {
		/*
		 * Moves pages over others, and maps the old place anew. Not shared memory, which would then be mapped
		 * twice: a write through one mapping is not seen in the other.
		 */
		unsigned long to = next(state) % (arena_pages - count);

		if (kind_of(thread) == SHARED_MEMORY)
			break;
		if (to + count <= page || page + count <= to) {
			/* Fails for several mappings at once, after it has unmapped the target. */
			if (mremap(at, length, length, MREMAP_MAYMOVE | MREMAP_FIXED,
				   arena(thread) + to * PAGE) == MAP_FAILED)
				map_arena(thread, to, count);
			map_arena(thread, page, count);
		}
		break;
	}
	case 3:
		/* A whole page table, if alignment allows it. */
		if (mode != SOFT_DIRTY && kind_of(thread) == ANONYMOUS && arena_pages >= 1024) {
			char *to = arena(thread) + HUGE;

			if (mremap(arena(thread), HUGE, HUGE, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED)
				map_arena(thread, 512, 512);
			map_arena(thread, 0, 512);
		}
		break;
	case 4:
	case 5:
		/* Writes before, between and after the calls. */
		write_page(at, state);
		mprotect(at, length, next(state) % 2 ? PROT_READ : PROT_NONE);
		mprotect(at, length, PROT_READ | PROT_WRITE);
		write_page(at, state);
		break;
	case 6:
		madvise(at, length, MADV_DONTNEED);
		break;
	case 7:
		madvise(at, length, MADV_DONTNEED);
		for (unsigned long i = 0; i < count; i++)
			sum += at[i * PAGE];
		break;
	case 8:
		/*
		 * From now on the kernel may drop the pages at any time, also between the list and the restart.
		 */
		if (while_running)
			madvise(at, length, MADV_FREE);
		break;
	case 9:
	case 10:
	case 11:
		madvise(at, length, MADV_PAGEOUT);
		break;
	case 12:
		madvise(at, length, MADV_COLD);
		break;
	case 13:
		madvise(arena(thread), arena_pages * PAGE, next(state) % 4 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
		break;
	case 14:
		madvise((char *)((uintptr_t)at & -HUGE), HUGE, MADV_COLLAPSE);
		break;
	case 15:
		if (mode != SOFT_DIRTY && kind_of(thread) == ANONYMOUS)
			madvise(at, length, next(state) % 2 ? MADV_MERGEABLE : MADV_UNMERGEABLE);
		break;
	case 16:
		if (next(state) % 4 == 0 && kind_of(thread) != SHARED_MEMORY)
			child_that_writes(at, count, next(state));
		break;
	case 17:
		if (kind_of(thread) != ANONYMOUS)
			msync(at, length, MS_SYNC);
		break;
	case 18:
	case 19:
		for (unsigned long i = 0; i < count; i++)
			sum += at[i * PAGE];
		break;
	case 21: {
		/* Moves pages to the other node, if there are two. */
		static __thread int node;
		void *pages[64];
		int nodes[64], status[64];
		unsigned long some = count < 64 ? count : 64;

		node = !node;
		for (unsigned long i = 0; i < some; i++) {
			pages[i] = at + i * PAGE;
			nodes[i] = node;
		}
		syscall(SYS_move_pages, 0, some, pages, nodes, status, 2 /* MPOL_MF_MOVE */);
		break;
	}
	case 20:
		/* The same content in all pages, for KSM. */
		for (unsigned long i = 0; i < count; i++)
			memset(at + i * PAGE, 7, PAGE);
		break;
	default:
		for (unsigned long i = 0; i < count; i++)
			write_page(at + i * PAGE, state);
	}
	atomic_fetch_add(&control->operations, 1);
}

static void *writer(void *argument)
{
	unsigned int thread = (uintptr_t)argument;
	uint64_t state = seed * 1000003 + thread + 1;

	for (int i = 0; i < 10; i++)
		next(&state);
	while (!atomic_load(&control->stop)) {
		if (atomic_load(&control->pause)) {
			atomic_fetch_add(&control->resting, 1);
			while (atomic_load(&control->pause))
				usleep(100);
			atomic_fetch_sub(&control->resting, 1);
		}
		step(thread, &state);
	}
	return NULL;
}

static void trackee(void)
{
	pthread_t ids[MAX_THREADS];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (with_userfaultfd) {
		struct uffdio_api api = {
			.api = UFFD_API,
			.features = UFFD_FEATURE_WP_ASYNC | UFFD_FEATURE_WP_UNPOPULATED,
		};
		int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);

		if (fd < 0 || ioctl(fd, UFFDIO_API, &api))
			die("userfaultfd");
		atomic_store(&control->userfaultfd, fd);
	}
	for (unsigned int i = 0; i < threads; i++)
		if (pthread_create(&ids[i], NULL, writer, (void *)(uintptr_t)i))
			die("pthread_create");
	for (unsigned int i = 0; i < threads; i++)
		pthread_join(ids[i], NULL);
	_exit(0);
}

/* The tracker's side. */
static int pagemap, memory, clear_refs, userfaultfd;
static char *copy;
static unsigned long beginnings, collects, reported_pages, compared_pages, dropped_pages, forgotten;

static void pause_trackee(bool yes)
{
	atomic_store(&control->pause, yes);
	while (atomic_load(&control->resting) != (yes ? threads : 0)) {
		int status;

		if (waitpid(-1, &status, WNOHANG) > 0) {
			fprintf(stderr, "oracle: the trackee has died (%x)\n", status);
			exit(2);
		}
		usleep(100);
	}
}

static void read_pages(uint64_t start, uint64_t end)
{
	for (uint64_t at = start; at < end;) {
		ssize_t got = pread(memory, copy + (at - (uintptr_t)base), end - at, (off_t)at);

		/* The range was just unmapped: the next mapping there is new. */
		if (got <= 0)
			got = PAGE;
		at += ((uint64_t)got + PAGE - 1) & -PAGE;
	}
}

static bool forget(uint64_t *state)
{
	if (!broken || next(state) % 50)
		return false;
	forgotten++;
	return true;
}

/*
 * Anonymous pages without content have changed to zeros. For a private page of a file that is not mapped, the kernel does
 * not report which page of the file it is. Shared memory that was written and is not mapped any more must be reported by
 * lightweight dirty tracking; write protection does not report it.
 */
static void hole(uint64_t start, uint64_t end)
{
	for (; start < end; start += PAGE) {
		size_t offset = start - (uintptr_t)base;
		enum kind kind = kind_of((unsigned int)(offset / PAGE / arena_pages));

		if (kind == ANONYMOUS)
			memset(copy + offset, 0, PAGE);
		else if (kind == PRIVATE_FILE || mode == PAGEMAP_SCAN_WRITTEN)
			read_pages(start, start + PAGE);
	}
}

/* Counts a range as reported. */
static void written(uint64_t start, uint64_t end, uint64_t *state)
{
	if (forget(state))
		return;
	read_pages(start, end);
	reported_pages += (end - start) / PAGE;
}

/*
 * If a private page of a file mapping is dropped and the file's page returns, the write protection stays and does not
 * report that. A tracker of this kind takes only pages that are not the file's, as CRIU does. A page that is swapped out may
 * have been dropped.
 */
static bool is_of_file(uint64_t at, uint64_t categories)
{
	unsigned int thread = (unsigned int)((at - (uintptr_t)base) / PAGE / arena_pages);

	if (mode == SCAN || mode == WRITTEN || kind_of(thread) != PRIVATE_FILE)
		return false;
	return categories & (PAGE_IS_FILE | PAGE_IS_SWAPPED);
}

/* Memory that was mapped since then is not write-protected yet: it counts as written, and can be protected from now on. */
static void register_all(void)
{
	struct uffdio_register argument = {
		.range = { (uintptr_t)base, size },
		.mode = UFFDIO_REGISTER_MODE_WP,
	};

	if (ioctl(userfaultfd, UFFDIO_REGISTER, &argument))
		die("UFFDIO_REGISTER");
}

/* Write-protects all written pages, to disturb the other mechanisms. */
static void protect_all(void)
{
	struct pm_scan_arg argument = {
		.size = sizeof(argument),
		.flags = PM_SCAN_WP_MATCHING,
		.start = (uintptr_t)base,
		.end = (uintptr_t)base + size,
		.category_mask = PAGE_IS_WRITTEN,
		.return_mask = PAGE_IS_WRITTEN,
	};

	if (ioctl(pagemap, PAGEMAP_SCAN, &argument) < 0)
		die("PAGEMAP_SCAN");
}

/* Records holes, and written pages if the scan reports them; it then restarts these in the same step. */
static void scan(uint64_t *state)
{
	bool ldt = mode == SCAN, by_scan = ldt || mode == PAGEMAP_SCAN_WRITTEN;
	uint64_t dirty = ldt ? PAGE_IS_LDT_DIRTY : PAGE_IS_WRITTEN;
	static struct page_region regions[1000];
	uint64_t at = (uintptr_t)base, end = at + size, last = at;

	while (at < end) {
		struct pm_scan_arg argument = {
			.size = sizeof(argument),
			.flags = !by_scan ? 0 : ldt ? PM_SCAN_LDT_RESTART : PM_SCAN_WP_MATCHING,
			.start = at,
			.end = end,
			.vec = (uintptr_t)regions,
			/* Also with outputs that are too short. */
			.vec_len = 1 + next(state) % 1000,
			.max_pages = next(state) % 3 ? 0 : 1 + next(state) % 3000,
			.category_anyof_mask = PAGE_IS_PRESENT | PAGE_IS_SWAPPED | (ldt ? PAGE_IS_LDT_DIRTY : 0),
			.return_mask = (by_scan ? dirty : 0) | PAGE_IS_PRESENT | PAGE_IS_FILE | PAGE_IS_SWAPPED |
				       (mode == SOFT_DIRTY ? PAGE_IS_PFNZERO : 0),
		};
		int found = ioctl(pagemap, PAGEMAP_SCAN, &argument);

		if (found < 0)
			die("PAGEMAP_SCAN");
		for (int i = 0; i < found; i++) {
			hole(last, regions[i].start);
			last = regions[i].end;
			/* A page that was dropped and read again is the zero page, whose entry has no soft-dirty bit. */
			if (regions[i].categories & PAGE_IS_PFNZERO || is_of_file(regions[i].start, regions[i].categories))
				hole(regions[i].start, regions[i].end);
			else if (by_scan && regions[i].categories & dirty)
				written(regions[i].start, regions[i].end, state);
		}
		hole(last, argument.walk_end);
		if (last < argument.walk_end)
			last = argument.walk_end;
		at = argument.walk_end;
	}
	hole(last, end);
}

static long scan_written(uint64_t start, uint64_t flags, struct page_region *regions, size_t length, uint64_t *walk_end,
			 uint64_t max_pages)
{
	struct pm_scan_arg argument = {
		.size = sizeof(argument),
		.flags = flags,
		.start = start,
		.end = (uintptr_t)base + size,
		.vec = (uintptr_t)regions,
		.vec_len = length,
		.max_pages = max_pages,
		.category_mask = PAGE_IS_LDT_DIRTY,
		.return_mask = PAGE_IS_LDT_DIRTY,
	};
	long found = ioctl(pagemap, PAGEMAP_SCAN, &argument);

	if (found < 0)
		die("PAGEMAP_SCAN for written pages");
	*walk_end = argument.walk_end;
	return found;
}

/* Collects nothing but written pages, and restarts them, in two steps where nobody can write between these. */
static void scan_for_written(bool stands_still, uint64_t *state)
{
	static struct page_region regions[1 << 16];
	bool apart = stands_still && next(state) % 2;
	uint64_t end = (uintptr_t)base + size, walk_end;
	long count = 0;

	for (uint64_t at = (uintptr_t)base; at < end; at = walk_end) {
		size_t space = 1 + next(state) % (next(state) % 2 ? 1000 : 10);

		if ((size_t)count + space > sizeof(regions) / sizeof(*regions))
			die("too many regions");
		count += scan_written(at, apart ? 0 : PM_SCAN_LDT_RESTART, regions + count, space, &walk_end,
				      next(state) % 3 ? 0 : 1 + next(state) % 3000);
		if (walk_end <= at)
			die("a scan that does not go on");
	}
	if (apart)
		scan_written((uintptr_t)base, PM_SCAN_LDT_RESTART, NULL, 0, &walk_end, 0);
	for (long i = 0; i < count; i++)
		written(regions[i].start, regions[i].end, state);
}

/* CRIU's method: an entry of pagemap for every page, while the trackee is stopped. */
static void read_pagemap_and_restart(uint64_t *state)
{
	static uint64_t entries[512];
	const uint64_t soft_dirty = 1ull << 55, there = 3ull << 62;

	for (uint64_t at = (uintptr_t)base; at < (uintptr_t)base + size;) {
		uint64_t left = ((uintptr_t)base + size - at) / PAGE;
		size_t bytes = (left < 512 ? left : 512) * 8;

		if (pread(pagemap, entries, bytes, (off_t)(at / PAGE * 8)) != (ssize_t)bytes)
			die("reading pagemap");
		for (size_t i = 0; i < bytes / 8; i++, at += PAGE)
			if (entries[i] & soft_dirty && entries[i] & there)
				written(at, at + PAGE, state);
	}
	if (pwrite(clear_refs, "4", 1, 0) != 1)
		die("writing clear_refs");
}

/* Copies the pages that were written since the last collect. */
static void collect(bool stands_still)
{
	static uint64_t state = 88172645463325252ull;

	if (!while_running && !stands_still)
		return;
	collects++;
	if (with_userfaultfd && stands_still)
		register_all();
	scan(&state);
	if (mode == WRITTEN)
		scan_for_written(stands_still, &state);
	if (mode == SOFT_DIRTY)
		read_pagemap_and_restart(&state);
	if (with_userfaultfd && mode != PAGEMAP_SCAN_WRITTEN)
		protect_all();
}

static bool is_zero(const char *page)
{
	return !page[0] && !memcmp(page, page + 1, PAGE - 1);
}

/* Compares the copy of a page with `now`, its content in the trackee. */
static void compare_page(size_t page, const char *now)
{
	const char *copied = copy + page * PAGE;
	size_t i = 0;

	compared_pages++;
	if (!memcmp(now, copied, PAGE))
		return;
	if (is_zero(now) && kind_of((unsigned int)(page / arena_pages)) == ANONYMOUS) {
		/* After MADV_FREE the kernel may have dropped the page just now. The next collect must report it. */
		collect(true);
		if (is_zero(copied)) {
			dropped_pages++;
			return;
		}
	}
	while (now[i] == copied[i])
		i++;
	printf("oracle: MISSED: page %zu (arena %zu), byte %zu: %02x, in the copy %02x; after %lu collects, seed %lu\n", page,
	       page / arena_pages, i, (unsigned char)now[i], (unsigned char)copied[i], collects, seed);
	exit(1);
}

static void compare(void)
{
	static char now[64 * PAGE];

	for (size_t page = 0; page < size / PAGE;) {
		size_t count = size / PAGE - page < 64 ? size / PAGE - page : 64;
		ssize_t got = pread(memory, now, count * PAGE, (off_t)((uintptr_t)base + page * PAGE));

		if (got < (ssize_t)PAGE)
			die("reading the trackee's memory");
		count = (size_t)got / PAGE;
		for (size_t i = 0; i < count; i++)
			compare_page(page + i, now + i * PAGE);
		page += count;
	}
}

static void write_file(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);

	if (fd >= 0) {
		if (write(fd, text, strlen(text)) < 0 && errno != EAGAIN)
			fprintf(stderr, "oracle: %s: %s\n", path, strerror(errno));
		close(fd);
	}
}

/* The trackee's userfaultfd, which only the trackee can create. */
static int userfaultfd_of(pid_t pid)
{
	int process = (int)syscall(SYS_pidfd_open, pid, 0), fd;

	while (!atomic_load(&control->userfaultfd))
		if (waitpid(pid, NULL, WNOHANG))
			die("the trackee has died");
		else
			usleep(1000);
	fd = (int)syscall(SYS_pidfd_getfd, process, atomic_load(&control->userfaultfd), 0);
	if (fd < 0)
		die("pidfd_getfd");
	close(process);
	return fd;
}

static enum mode mode_of(const char *name)
{
	static const char *const names[] = { "scan", "written", "soft-dirty", "pagemap-scan" };

	for (int i = 0; i < 4; i++)
		if (!strcmp(name, names[i]))
			return (enum mode)i;
	fprintf(stderr, "oracle: -m scan, written, soft-dirty or pagemap-scan\n");
	exit(2);
}

static int open_of(pid_t pid, const char *name, int flags)
{
	char path[64];
	int fd;

	snprintf(path, sizeof(path), "/proc/%d/%s", pid, name);
	fd = open(path, flags);
	if (fd < 0)
		die(path);
	return fd;
}

/*
 * Ends tracking, lets the trackee go on without it, and begins anew. What has an entry in a page table must be reported by
 * the next collect, whatever was known of it. Of shared memory that has none nothing is known.
 */
static void begin_anew(pid_t pid, uint64_t *state)
{
	close(pagemap);
	usleep(next(state) % 50000);
	pagemap = open_of(pid, "pagemap", O_RDONLY);
	/* This begins it, and restarts no page. */
	scan_written((uintptr_t)base + size, PM_SCAN_LDT_RESTART, NULL, 0, &(uint64_t){ 0 }, 0);
	for (unsigned int i = 0; i < threads; i++)
		if (kind_of(i) == SHARED_MEMORY)
			read_pages((uintptr_t)arena(i), (uintptr_t)arena(i + 1));
	beginnings++;
}

int main(int argc, char **argv)
{
	const char *name = "scan";
	int option;
	uint64_t state;
	pid_t pid;

	while ((option = getopt(argc, argv, "s:t:p:r:m:ub")) != -1) {
		switch (option) {
		case 's': seconds = strtoul(optarg, NULL, 10); break;
		case 't': threads = (unsigned int)strtoul(optarg, NULL, 10); break;
		case 'p': arena_pages = strtoul(optarg, NULL, 10); break;
		case 'r': seed = strtoul(optarg, NULL, 10); break;
		case 'm': mode = mode_of(name = optarg); break;
		case 'u': with_userfaultfd = true; break;
		case 'b': broken = true; break;
		default: return 2;
		}
	}
	if (!threads || threads > MAX_THREADS || arena_pages < 512) {
		fprintf(stderr, "oracle: 1 to %d threads, 512 pages or more\n", MAX_THREADS);
		return 2;
	}
	while_running = mode != SOFT_DIRTY;
	with_userfaultfd |= mode == PAGEMAP_SCAN_WRITTEN;
	if (mode == SCAN || mode == WRITTEN)
		write_file("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "advise");
	setvbuf(stdout, NULL, _IOLBF, 0);
	state = seed * 7919 + 1;
	size = threads * arena_pages * PAGE;
	control = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	base = mmap(NULL, size + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	copy = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (control == MAP_FAILED || base == MAP_FAILED || copy == MAP_FAILED)
		die("mmap");
	base = (char *)(((uintptr_t)base + HUGE - 1) & -HUGE);
	for (unsigned int i = 0; i < threads; i++) {
		if (kind_of(i) == PRIVATE_FILE) {
			backing[i] = memfd_create("oracle", 0);
			for (unsigned long page = 0; page < arena_pages; page++) {
				char content[PAGE];

				memset(content, (int)page | 1, PAGE);
				if (pwrite(backing[i], content, PAGE, (off_t)(page * PAGE)) != (ssize_t)PAGE)
					die("writing the file");
			}
		} else if (kind_of(i) == SHARED_MEMORY) {
			backing[i] = memfd_create("oracle", 0);
			if (ftruncate(backing[i], (off_t)(arena_pages * PAGE)))
				die("ftruncate");
		}
		map_arena(i, 0, arena_pages);
	}

	pid = fork();
	if (pid < 0)
		die("fork");
	if (!pid)
		trackee();
	pagemap = open_of(pid, "pagemap", O_RDONLY);
	memory = open_of(pid, "mem", O_RDONLY);
	clear_refs = open_of(pid, "clear_refs", O_WRONLY);
	if (with_userfaultfd)
		userfaultfd = userfaultfd_of(pid);
	/* What is written before the first restart leaves no trace when its page leaves. */
	if (mode == SCAN || mode == WRITTEN)
		scan_written((uintptr_t)base, PM_SCAN_LDT_RESTART, NULL, 0, &(uint64_t){ 0 }, 0);
	hole((uintptr_t)base, (uintptr_t)base + size);
	for (unsigned int i = 0; i < threads; i++)
		read_pages((uintptr_t)arena(i), (uintptr_t)arena(i + 1));

	for (time_t end = time(NULL) + (time_t)seconds; broken ? forgotten < FORGOTTEN_MAX : time(NULL) < end;) {
		unsigned long running = next(&state) % 8;

		for (unsigned long i = 0; i < running; i++) {
			usleep(next(&state) % 20000);
			collect(false);
			if ((mode == SCAN || mode == WRITTEN) && next(&state) % 4 == 0)
				begin_anew(pid, &state);
			switch (next(&state) % 12) {
			case 0: write_file("/proc/sys/vm/compact_memory", "1"); break;
			case 1: write_file("/proc/sys/vm/drop_caches", "1"); break;
			/* Restarts soft-dirty at the same time, unless it is the tested mechanism. */
			case 2: if (mode != SOFT_DIRTY && pwrite(clear_refs, "4", 1, 0) != 1 && errno != EINVAL) die("clear_refs"); break;
			case 3: if (pwrite(clear_refs, "1", 1, 0) != 1) die("clear_refs"); break;
			}
		}
		pause_trackee(true);
		collect(true);
		compare();
		pause_trackee(false);
	}
	atomic_store(&control->stop, 1);
	waitpid(pid, NULL, 0);
	printf("oracle: nothing missed: %s, seed %lu, %lu operations, %lu collects, %lu pages reported, %lu compared, %lu dropped meanwhile, %lu begun anew\n",
	       name, seed, atomic_load(&control->operations), collects, reported_pages, compared_pages,
	       dropped_pages, beginnings);
	if (broken) {
		printf("oracle: %lu reports were forgotten, and it did not notice\n", forgotten);
		return 3;
	}
	return 0;
}
