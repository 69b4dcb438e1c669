/*
 * Measures how long a program waits for the kernel while its written pages are collected: at a page fault, and at a
 * change of its mappings, which takes the lock of the address space for writing.
 *
 *   waits [-m MIB] [-r ROUNDS]
 *
 * The program writes one byte of each page, and then takes page faults, or maps memory, again and again, while another one,
 * in turns,
 *   - leaves it alone, but keeps a processor busy as long as a collect takes;
 *   - collects and restarts with `ldt`;
 *   - collects and write-protects by PAGEMAP_SCAN (`pagemap-scan`);
 *   - write-protects by clear_refs (soft-dirty), without reading which pages were written.
 *
 * All page faults are measured before the first mapping: the kernel frees what it has removed later, some hundred at a time
 * after a tick of its clock, and whoever wants the processor then waits for that, too.
 *
 * On a machine with one processor, as where the clock counts instructions, the program sleeps before each fault, and then
 * takes the processor from the other one. Its wait is counted from the end of the sleep: as long as a lock forbids preemption,
 * the program waits.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
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
#define PAGE_IS_WRITTEN (1 << 1)
#define PAGE_IS_LWD_DIRTY (1 << 9)
#define PM_SCAN_WP_MATCHING (1 << 0)
#define PM_SCAN_LWD_RESTART (1 << 2)
/* Of linux/userfaultfd.h since Linux 6.4 and 6.7. */
#define WP_UNPOPULATED (1 << 13)
#define WP_ASYNC (1 << 15)

#define PAGE 4096ul
#define CHUNK (64ul << 20)
#define MOST_WAITS (1 << 20)

enum manner { ALONE, LDT, SCAN, CLEAR, MANNERS };
static const char *const names[MANNERS] = { "left alone", "ldt: collect and restart",
	"pagemap-scan: collect and write-protect", "soft-dirty: clear_refs" };

enum state { IDLE, WRITE, WRITTEN, RUN, STOP, STOPPED };

enum event { FAULT, MAP, EVENTS };
static const char *const event_names[EVENTS] = { "page fault", "mmap" };

/* What the two share. The waits are those of one round, in nanoseconds. */
struct shared {
	_Atomic int state;
	enum manner manner;
	enum event event;
	uint32_t wait_count, waits[MOST_WAITS];
};
static struct shared *shared;
static char *memory;
static size_t bytes;
static int one_processor;

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

/* As the processor is never idle, an emulated clock goes on with the instructions, and not with the time of the host. */
static void spin_until(int state)
{
	while (atomic_load(&shared->state) != state)
		;
}

/* Right after the start of a machine, sleeps end only with the ticks of its clock. */
static void await_exact_sleeps(void)
{
	struct timespec time = { 0, 50000 };

	for (int exact = 0, tries = 0; exact < 10; tries++) {
		uint64_t before = now();

		nanosleep(&time, NULL);
		exact = now() - before < 1000000 ? exact + 1 : 0;
		if (tries == 10000) {
			fprintf(stderr, "waits: this machine has no exact timers\n");
			exit(2);
		}
	}
}

/* Sleeps for 20 to 84 microseconds if the other program would not run otherwise. Returns when a wait begins. */
static uint64_t begin_wait(void)
{
	static uint64_t random = 1;
	uint64_t end;

	if (!one_processor)
		return now();
	random = random * 6364136223846793005ull + 1442695040888963407ull;
	end = now() + 20000 + (random >> 48);
	struct timespec time = { end / 1000000000, end % 1000000000 };

	clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL);
	return end;
}

/* Faults in pages that were dropped, or maps and unmaps others, as long as it is told to. */
static void measure_waits(void)
{
	size_t pages = bytes / PAGE, page = 0;
	uint64_t before;

	shared->wait_count = 0;
	atomic_store(&shared->state, RUN);
	while (atomic_load(&shared->state) == RUN && shared->wait_count < MOST_WAITS) {
		if (shared->event == MAP) {
			before = begin_wait();
			void *other = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			shared->waits[shared->wait_count++] = now() - before;
			if (other == MAP_FAILED || munmap(other, PAGE))
				die("mmap");
			continue;
		}
		/* One of each page table in turn. */
		page = (page + 512) % pages + (page + 512 >= pages);
		if (madvise(memory + page * PAGE, PAGE, MADV_DONTNEED))
			die("madvise");
		before = begin_wait();
		*(volatile char *)(memory + page * PAGE) = 1;
		shared->waits[shared->wait_count++] = now() - before;
	}
	await(STOP);
	atomic_store(&shared->state, STOPPED);
}

static int open_userfaultfd(void)
{
	struct uffdio_api api = { .api = UFFD_API, .features = WP_ASYNC | WP_UNPOPULATED };
	int userfaultfd = syscall(SYS_userfaultfd, O_CLOEXEC);

	if (userfaultfd < 0 || ioctl(userfaultfd, UFFDIO_API, &api))
		die("userfaultfd");
	return userfaultfd;
}

static void target(void)
{
	int userfaultfd = open_userfaultfd(), registered = 0;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	/* Sleeps end when they should. */
	prctl(PR_SET_TIMERSLACK, 1);
	for (;;) {
		await(WRITE);
		/* Only its own collects find the mapping registered: that costs the others something. */
		struct uffdio_register range = { .range = { (uintptr_t)memory, bytes }, .mode = UFFDIO_REGISTER_MODE_WP };

		if (registered && ioctl(userfaultfd, UFFDIO_UNREGISTER, &range.range))
			die("UFFDIO_UNREGISTER");
		registered = shared->manner == SCAN;
		if (registered && ioctl(userfaultfd, UFFDIO_REGISTER, &range))
			die("UFFDIO_REGISTER");
		for (size_t at = 0; at < bytes; at += PAGE)
			*(volatile char *)(memory + at) = 2;
		atomic_store(&shared->state, WRITTEN);
		measure_waits();
	}
}

/* One collect of what the target has, in calls that end where they end for want of room in the output. */
static void collect(int pagemap, enum manner manner)
{
	static struct page_region regions[4096];
	uint64_t mask = manner == LDT ? PAGE_IS_LWD_DIRTY : PAGE_IS_WRITTEN;
	struct pm_scan_arg argument = {
		.size = sizeof(argument),
		.flags = manner == LDT ? PM_SCAN_LWD_RESTART : PM_SCAN_WP_MATCHING,
		.start = (uintptr_t)memory,
		.end = (uintptr_t)memory + bytes,
		.vec = (uintptr_t)regions,
		.vec_len = 4096,
		.category_mask = mask,
		.return_mask = mask,
	};
	uint64_t found = 0;

	while (argument.start < argument.end) {
		long count = ioctl(pagemap, PAGEMAP_SCAN, &argument);

		if (count < 0)
			die("PAGEMAP_SCAN");
		for (long region = 0; region < count; region++)
			found += regions[region].end - regions[region].start;
		argument.start = argument.walk_end;
	}
	/* All pages were written. The target drops and writes some again meanwhile. */
	if (found + (shared->wait_count + 1) * PAGE < bytes) {
		fprintf(stderr, "waits: %s: %lu of %lu pages were found\n", names[manner], found / PAGE, bytes / PAGE);
		exit(1);
	}
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
	static struct samples waits[MANNERS][EVENTS], calls[MANNERS];
	int rounds = 20, option, pagemap;
	char path[64];
	pid_t child;

	bytes = 256ul << 20;
	one_processor = sysconf(_SC_NPROCESSORS_ONLN) == 1;
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
	/* Each end of a sleep of the target takes the processor from this program at once. */
	if (one_processor && sched_setscheduler(0, SCHED_IDLE, &(struct sched_param){ 0 }))
		die("sched_setscheduler");
	snprintf(path, sizeof(path), "/proc/%d/pagemap", child);
	pagemap = open(path, O_RDONLY);
	if (pagemap < 0)
		die(path);

	snprintf(path, sizeof(path), "/proc/%d/clear_refs", child);
	int clear_refs = open(path, O_WRONLY);

	if (clear_refs < 0)
		die(path);
	if (one_processor)
		await_exact_sleeps();
	uint64_t last = 10000000;
	/* The first round of each brings everything into memory. */
	for (int turn = 0, turns = (rounds + 1) * MANNERS; turn < EVENTS * turns; turn++) {
		enum manner manner = turn % MANNERS;

		shared->manner = manner;
		shared->event = turn / turns;
		atomic_store(&shared->state, WRITE);
		spin_until(RUN);
		uint64_t taken, begin = now();

		if (manner == ALONE)
			while (now() - begin < last)
				;
		else if (manner != CLEAR)
			collect(pagemap, manner);
		else if (write(clear_refs, "4", 1) != 1)
			die("clear_refs");
		taken = now() - begin;
		if (manner == LDT)
			last = taken;
		atomic_store(&shared->state, STOP);
		spin_until(STOPPED);
		if (turn % turns < MANNERS)
			continue;
		uint32_t call = taken > UINT32_MAX ? UINT32_MAX : taken;

		add(&calls[manner], &call, 1);
		add(&waits[manner][shared->event], shared->waits, shared->wait_count);
	}
	printf("%lu MiB, all pages written\n", bytes >> 20);
	for (enum manner manner = 0; manner < MANNERS; manner++) {
		printf("%s\n", names[manner]);
		print("whole collect", &calls[manner]);
		for (enum event event = 0; event < EVENTS; event++)
			print(event_names[event], &waits[manner][event]);
	}
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	return 0;
}
