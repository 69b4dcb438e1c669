/*
 * Measures how long a program waits for the kernel while its written pages are collected: at a page fault, and at a
 * change of its mappings, which takes the lock of the address space for writing.
 *
 *   waits [-m MIB] [-r ROUNDS]
 *
 * In each round the program writes one byte of each page, and then faults and maps memory again and again, while another
 * one, in turns,
 *   - leaves it alone, but keeps a processor busy as long as a collect takes;
 *   - collects and restarts with `ldt`;
 *   - looks for present pages by PAGEMAP_SCAN, which any kernel since 6.7 can, and which holds the lock all the time.
 * The machine needs two processors. Where the clock counts instructions it has one, and nobody waits for another: there,
 * only how long the calls take is of use.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Of linux/fs.h with the series. */
struct page_region {
	uint64_t start, end, categories;
};
struct pm_scan_arg {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted, category_mask,
		category_anyof_mask, return_mask;
};
#define PAGEMAP_SCAN _IOWR('f', 16, struct pm_scan_arg)
#define PAGE_IS_PRESENT (1 << 3)
#define PAGE_IS_LWD_DIRTY (1 << 9)
#define PM_SCAN_LWD_RESTART (1 << 2)

#define PAGE 4096ul
#define CHUNK (64ul << 20)
#define MOST_WAITS (1 << 20)

enum manner { ALONE, COLLECT, LOOK, MANNERS };
static const char *const names[MANNERS] = { "left alone", "ldt, collect and restart", "PAGEMAP_SCAN of present pages" };

enum state { IDLE, WRITE, WRITTEN, RUN, STOP, STOPPED };

/* What the two share. The waits are those of one round, in nanoseconds. */
struct shared {
	_Atomic int state;
	uint32_t fault_count, map_count;
	uint32_t faults[MOST_WAITS], maps[MOST_WAITS];
};
static struct shared *shared;
static char *memory;
static size_t bytes;

static void die(const char *what)
{
	fprintf(stderr, "waits: %s: %s\n", what, strerror(errno));
	exit(2);
}

static uint64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static void await(int state)
{
	while (atomic_load(&shared->state) != state)
		usleep(100);
}

/* Faults in a page that was dropped, and maps and unmaps another, as long as it is told to. */
static void measure_waits(void)
{
	size_t pages = bytes / PAGE, page = 0;
	uint64_t before;

	shared->fault_count = shared->map_count = 0;
	atomic_store(&shared->state, RUN);
	while (atomic_load(&shared->state) == RUN && shared->map_count < MOST_WAITS) {
		/* One of each page table in turn. */
		page = (page + 512) % pages + (page + 512 >= pages);
		if (madvise(memory + page * PAGE, PAGE, MADV_DONTNEED))
			die("madvise");
		before = now();
		*(volatile char *)(memory + page * PAGE) = 1;
		shared->faults[shared->fault_count++] = now() - before;
		before = now();
		void *other = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		shared->maps[shared->map_count++] = now() - before;
		if (other == MAP_FAILED || munmap(other, PAGE))
			die("mmap");
	}
	await(STOP);
	atomic_store(&shared->state, STOPPED);
}

static void target(void)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;) {
		await(WRITE);
		for (size_t at = 0; at < bytes; at += PAGE)
			*(volatile char *)(memory + at) = 2;
		atomic_store(&shared->state, WRITTEN);
		measure_waits();
	}
}

/* One collect of what the target has, in calls that end where they end for want of room in the output. Returns ns. */
static uint64_t collect(int pagemap, enum manner manner)
{
	static struct page_region regions[4096];
	uint64_t mask = manner == COLLECT ? PAGE_IS_LWD_DIRTY : PAGE_IS_PRESENT, before = now();
	struct pm_scan_arg argument = {
		.size = sizeof(argument),
		.flags = manner == COLLECT ? PM_SCAN_LWD_RESTART : 0,
		.start = (uintptr_t)memory,
		.end = (uintptr_t)memory + bytes,
		.vec = (uintptr_t)regions,
		.vec_len = 4096,
		.category_mask = mask,
		.return_mask = mask,
	};

	while (argument.start < argument.end) {
		if (ioctl(pagemap, PAGEMAP_SCAN, &argument) < 0)
			die("PAGEMAP_SCAN");
		argument.start = argument.walk_end;
	}
	return now() - before;
}

static int by_size(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

/* The samples of several rounds. */
struct samples {
	uint32_t *values;
	size_t count, most;
};

static void add(struct samples *samples, const uint32_t *values, size_t count)
{
	if (samples->count + count > samples->most) {
		samples->most = 2 * (samples->count + count);
		samples->values = realloc(samples->values, samples->most * sizeof(*values));
		if (!samples->values)
			die("realloc");
	}
	memcpy(samples->values + samples->count, values, count * sizeof(*values));
	samples->count += count;
}

static void print(const char *name, struct samples *samples)
{
	size_t count = samples->count;

	if (!count)
		return;
	qsort(samples->values, count, sizeof(*samples->values), by_size);
	printf("  %-16s %8zu, ns: median %u, 99 %% %u, 99.9 %% %u, longest %u\n", name, count, samples->values[count / 2],
	       samples->values[count * 99 / 100], samples->values[count * 999 / 1000], samples->values[count - 1]);
}

int main(int argc, char **argv)
{
	static struct samples faults[MANNERS], maps[MANNERS], calls[MANNERS];
	int rounds = 20, option, pagemap;
	char path[64];
	pid_t child;

	bytes = 256ul << 20;
	while ((option = getopt(argc, argv, "m:r:")) != -1) {
		if (option == 'm')
			bytes = strtoul(optarg, NULL, 10) << 20;
		else if (option == 'r')
			rounds = atoi(optarg);
		else
			return 2;
	}
	if (bytes < CHUNK || rounds < 1) {
		fprintf(stderr, "waits: at least 64 MiB and one round\n");
		return 2;
	}
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (shared == MAP_FAILED || memory == MAP_FAILED)
		die("mmap");
	madvise(memory, bytes, MADV_NOHUGEPAGE);
	child = fork();
	if (child < 0)
		die("fork");
	if (!child)
		target();
	snprintf(path, sizeof(path), "/proc/%d/pagemap", child);
	pagemap = open(path, O_RDONLY);
	if (pagemap < 0)
		die(path);

	uint64_t last = 10000000;
	/* The first round brings everything into memory. */
	for (int round = -1; round < rounds; round++) {
		for (enum manner manner = 0; manner < MANNERS; manner++) {
			atomic_store(&shared->state, WRITE);
			while (atomic_load(&shared->state) != RUN)
				usleep(100);
			uint64_t taken, begin = now();

			if (manner == ALONE)
				while (now() - begin < last)
					;
			else
				last = collect(pagemap, manner);
			taken = now() - begin;
			atomic_store(&shared->state, STOP);
			await(STOPPED);
			if (round < 0)
				continue;
			uint32_t call = taken > UINT32_MAX ? UINT32_MAX : taken;

			add(&calls[manner], &call, 1);
			add(&faults[manner], shared->faults, shared->fault_count);
			add(&maps[manner], shared->maps, shared->map_count);
		}
	}
	printf("%lu MiB, all pages written\n", bytes >> 20);
	for (enum manner manner = 0; manner < MANNERS; manner++) {
		printf("%s\n", names[manner]);
		print("whole collect", &calls[manner]);
		print("page fault", &faults[manner]);
		print("mmap", &maps[manner]);
	}
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	return 0;
}
