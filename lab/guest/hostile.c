// SPDX-License-Identifier: GPL-2.0
/*
 * Do the interfaces of lightweight dirty tracking withstand hostile callers?
 *
 * A target writes pages on command. Its tracker keeps a model of the pages that must count as written, makes random calls
 * with valid and invalid arguments, and checks the result of each call and that the model still holds. In between, others
 * interfere: callers without rights, trackers that are killed or hang in the middle of a call, targets that execute another
 * program, exit, or change their mappings during a scan. After each of these, tracking must be exact again.
 *
 *   hostile [-s SECONDS] [-r SEED] [-b]
 *
 * The same seed gives the same calls. -b makes the target write a page without the model's knowledge; the test must
 * then fail (a test of the test), within BROKEN_ROUNDS rounds, however slow the machine is.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
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

#define PAGE 4096ul
/* Three page tables, so that walks cross their boundaries. */
#define PAGES (3 * 512ul)
#define BROKEN_ROUNDS 100
#define AREA ((char *)0x200000000000ul)
/* Mapped and unmapped during calls; not part of the model. */
#define NOISE ((char *)0x210000000000ul)
#define NOISE_PAGES 2048ul
#define KILLER 65533
#define NOBODY 65534

#define PAGEMAP_SCAN _IOWR('f', 16, struct pm_scan_arg)
#define PAGE_IS_WPALLOWED (1 << 0)
#define PAGE_IS_WRITTEN (1 << 1)
#define PAGE_IS_PRESENT (1 << 3)
#define PAGE_IS_SWAPPED (1 << 4)
#define PAGE_IS_SOFT_DIRTY (1 << 7)
#define PAGE_IS_LDT_DIRTY (1 << 9)
#define PM_SCAN_WP_MATCHING (1 << 0)
#define PM_SCAN_CHECK_WPASYNC (1 << 1)
#define PM_SCAN_LDT_RESTART (1 << 2)

struct page_region {
	uint64_t start, end, categories;
};

struct pm_scan_arg {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

/* State of a page in the model. */
enum state { HOLE, CLEAN, DIRTY };

enum order { WRITE, READ, DROP, UNMAP, MOVE, PROTECT, NOTHING };

struct command {
	uint32_t order, page, count;
};

/* A tracked process, and its tracker's descriptors. */
struct target {
	pid_t pid;
	int orders, answers;	/* ends of pipes */
	int pagemap, clear_refs;
};

static unsigned long seconds = 20, seed = 1;
static bool broken;
static uint64_t random_state;
static enum state model[PAGES];
static struct page_region *regions;
static size_t regions_length = PAGES;
static char *readonly;		/* a read-only page */
static char *half;		/* a page that no mapping follows */
static unsigned long calls, refusals, checks;
static const char *doing = "starting";
static pid_t own;

__attribute__((format(printf, 1, 2), noreturn)) static void die(const char *format, ...)
{
	va_list arguments;
	int error = errno;

	va_start(arguments, format);
	fprintf(stderr, "hostile: ");
	vfprintf(stderr, format, arguments);
	fprintf(stderr, ": %s (while %s)\n", strerror(error), doing);
	va_end(arguments);
	exit(2);
}

/* Ended from outside, because it does not end by itself. */
static void say_where(int signal)
{
	(void)signal;
	if (getpid() == own && write(2, "hostile: stopped while ", 23) > 0 && write(2, doing, strlen(doing)) > 0 && write(2, "\n", 1) > 0)
		_exit(2);
	_exit(2);
}

/* The tested interface misbehaves. */
__attribute__((format(printf, 1, 2), noreturn)) static void wrong(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	printf("hostile: WRONG: ");
	vprintf(format, arguments);
	printf("; while %s, after %lu calls, seed %lu\n", doing, calls, seed);
	va_end(arguments);
	exit(1);
}

static uint64_t next(void)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state;
}

static bool one_of(unsigned int n)
{
	return next() % n == 0;
}

/* The target's side. */

static void map_area(char *at, unsigned long count)
{
	if (mmap(at, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
		die("mmap");
	/* The model has small pages only. */
	madvise(at, count * PAGE, MADV_NOHUGEPAGE);
}

static void obey(const struct command *command)
{
	char *at = AREA + command->page * PAGE;
	volatile char sum = 0;

	for (unsigned long i = 0; i < command->count; i++, at += PAGE) {
		switch (command->order) {
		case WRITE:
			*(volatile uint64_t *)(at + i % 512 * 8) += 1;
			break;
		case READ:
			sum += *(volatile char *)at;
			break;
		case DROP:
			madvise(at, PAGE, MADV_DONTNEED);
			break;
		case UNMAP:
			munmap(at, PAGE);
			map_area(at, 1);
			break;
		case MOVE:
			/* Moves the pages away and back. */
			if (mremap(at, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, NOISE - 16 * PAGE) == MAP_FAILED ||
			    mremap(NOISE - 16 * PAGE, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, at) == MAP_FAILED)
				die("mremap");
			break;
		case PROTECT:
			if (mprotect(at, PAGE, PROT_READ) || mprotect(at, PAGE, PROT_READ | PROT_WRITE))
				die("mprotect");
			break;
		}
	}
}

static atomic_bool noisy;

/* Changes mappings until it is stopped. */
static void *make_noise(void *unused)
{
	uint64_t state = 1234567;

	while (atomic_load(&noisy)) {
		unsigned long page, count;
		char *at;

		state = state * 6364136223846793005ull + 1442695040888963407ull;
		page = (state >> 33) % (NOISE_PAGES - 64);
		count = 1 + (state >> 50) % 64;
		at = NOISE + page * PAGE;
		switch ((state >> 20) % 6) {
		case 0:
			munmap(at, count * PAGE);
			break;
		case 1:
			mmap(at, count * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
			break;
		case 2:
			mremap(at, count * PAGE, count * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, NOISE + NOISE_PAGES * PAGE);
			break;
		case 3:
			madvise(NOISE, NOISE_PAGES * PAGE, MADV_HUGEPAGE);
			break;
		case 4:
			mprotect(at, count * PAGE, PROT_READ);
			break;
		default:
			mmap(at, count * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
			memset(at, 1, count * PAGE);
		}
	}
	return unused;
}

/* Executes commands until the pipe ends. The answer to a command is its first byte. */
static void serve(int orders, int answers)
{
	struct command command;
	pthread_t thread;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	while (read(orders, &command, sizeof(command)) == sizeof(command)) {
		if (command.order == NOTHING && command.count == 1) {
			atomic_store(&noisy, true);
			if (pthread_create(&thread, NULL, make_noise, NULL))
				die("pthread_create");
		} else if (command.order == NOTHING && command.count == 2) {
			atomic_store(&noisy, false);
			pthread_join(thread, NULL);
		} else {
			obey(&command);
		}
		if (write(answers, &command, 1) != 1)
			break;
	}
	_exit(0);
}

/* The tracker's side. */

static int open_of(pid_t pid, const char *name, int flags)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%d/%s", pid, name);
	return open(path, flags | O_CLOEXEC);
}

static void open_files(struct target *target)
{
	target->pagemap = open_of(target->pid, "pagemap", O_RDONLY);
	target->clear_refs = open_of(target->pid, "clear_refs", O_WRONLY);
	if (target->pagemap < 0 || target->clear_refs < 0)
		die("the target's files");
}

static void close_files(struct target *target)
{
	close(target->pagemap);
	close(target->clear_refs);
}

static struct target start(void)
{
	struct target target;
	int orders[2], answers[2];

	if (pipe2(orders, O_CLOEXEC) || pipe2(answers, O_CLOEXEC))
		die("pipe");
	fflush(stdout);
	target.pid = fork();
	if (target.pid < 0)
		die("fork");
	if (!target.pid) {
		close(orders[1]);
		map_area(AREA, PAGES);
		serve(orders[0], answers[1]);
	}
	close(orders[0]);
	close(answers[1]);
	target.orders = orders[1];
	target.answers = answers[0];
	open_files(&target);
	return target;
}

static void order(struct target *target, enum order what, unsigned long page, unsigned long count)
{
	struct command command = { what, (uint32_t)page, (uint32_t)count };
	char answer;

	if (write(target->orders, &command, sizeof(command)) != sizeof(command) || read(target->answers, &answer, 1) != 1)
		die("the target does not answer");
}

static void stop(struct target *target)
{
	int status;

	close(target->orders);
	if (waitpid(target->pid, &status, 0) != target->pid || status)
		wrong("the target has ended with %x", status);
	close(target->answers);
	close_files(target);
}

/* Sends a command to the target, and updates the model. */
static void act(struct target *target)
{
	enum order what = next() % 3 ? WRITE : (enum order)(next() % NOTHING);
	unsigned long count = 1 + next() % (one_of(8) ? 600 : 8);
	unsigned long page = next() % (PAGES - count);

	order(target, what, page, count);
	for (unsigned long i = page; i < page + count; i++) {
		switch (what) {
		case WRITE:
			model[i] = DIRTY;
			break;
		case READ:
			/* A page that did not exist is new. */
			if (model[i] == HOLE)
				model[i] = DIRTY;
			break;
		case DROP:
		case UNMAP:
			model[i] = HOLE;
			break;
		case MOVE:
			if (model[i] != HOLE)
				model[i] = DIRTY;
			break;
		default:
			break;
		}
	}
	if (broken && one_of(20))
		order(target, WRITE, next() % PAGES, 1);
}

static int scan(struct target *target, struct pm_scan_arg *argument)
{
	calls++;
	return ioctl(target->pagemap, PAGEMAP_SCAN, argument) < 0 ? -errno : 0;
}

static struct pm_scan_arg good_arguments(void)
{
	return (struct pm_scan_arg){
		.size = sizeof(struct pm_scan_arg),
		.start = (uintptr_t)AREA,
		.end = (uintptr_t)AREA + PAGES * PAGE,
		.vec = (uintptr_t)regions,
		.vec_len = regions_length,
		.category_mask = PAGE_IS_LDT_DIRTY,
		.return_mask = PAGE_IS_LDT_DIRTY,
	};
}

/*
 * Finds the pages of the area that count as written, without a restart. With another category that none of them can have,
 * the kernel takes another path.
 */
static void scan_all(struct target *target, bool found[PAGES], bool another)
{
	struct pm_scan_arg argument = good_arguments();
	int count;

	if (another) {
		argument.category_inverted = PAGE_IS_WPALLOWED;
		argument.category_mask |= PAGE_IS_WPALLOWED;
	}
	count = ioctl(target->pagemap, PAGEMAP_SCAN, &argument);
	if (count < 0)
		die("PAGEMAP_SCAN");
	memset(found, 0, PAGES * sizeof(*found));
	for (int i = 0; i < count; i++)
		for (uint64_t at = regions[i].start; at < regions[i].end; at += PAGE)
			found[(at - (uintptr_t)AREA) / PAGE] = true;
}

/* Compares the whole area with the model, without a restart. */
static void check(struct target *target)
{
	static bool found[PAGES];

	checks++;
	for (int another = 0; another < 2; another++) {
		scan_all(target, found, another);
		for (size_t i = 0; i < PAGES; i++)
			if (found[i] != (model[i] == DIRTY))
				wrong("PAGEMAP_SCAN%s says of page %zu that it was %swritten",
				      another ? " for two categories" : "", i, found[i] ? "" : "not ");
	}
}

/* Whatever happened before, tracking must be exact from here on: all pages clean, some written, these found. */
static void restart_and_check(struct target *target)
{
	struct pm_scan_arg argument = good_arguments();

	order(target, READ, 0, PAGES);
	argument.flags = PM_SCAN_LDT_RESTART;
	argument.vec = argument.vec_len = 0;
	/* Of the area, or of all memory. */
	if (next() % 2) {
		argument.start = 0;
		argument.end = (1ull << 47) - PAGE;
	}
	if (ioctl(target->pagemap, PAGEMAP_SCAN, &argument) < 0)
		die("restarting by PAGEMAP_SCAN");
	if (argument.walk_end != argument.end)
		wrong("a restart has ended at %" PRIx64, (uint64_t)argument.walk_end);
	for (size_t i = 0; i < PAGES; i++)
		model[i] = CLEAN;
	check(target);
	for (int i = 0; i < 4; i++)
		act(target);
	check(target);
}

static void expect(int got, int expected, const char *what)
{
	if (expected)
		refusals++;
	if (got != expected)
		wrong("%s: %s, expected %s", what, got ? strerror(-got) : "no error", expected ? strerror(-expected) : "none");
}

/* A valid scan: at random of a part, with a short output, of other categories, with a restart. */
static void scan_part(struct target *target)
{
	struct pm_scan_arg argument = good_arguments();
	unsigned long first = next() % PAGES, last = first + 1 + next() % (PAGES - first), at;
	uint64_t wanted = one_of(3) ? 0 : 1 + next() % 100, pages = 0;
	bool slow = one_of(2), clean = one_of(6);
	int count;

	argument.start = (uintptr_t)AREA + first * PAGE;
	/* The end is rounded up. */
	argument.end = (uintptr_t)AREA + last * PAGE - (one_of(3) ? next() % PAGE : 0);
	argument.flags = one_of(2) ? PM_SCAN_LDT_RESTART : 0;
	argument.vec_len = 1 + next() % (one_of(2) ? 10 : regions_length);
	argument.max_pages = wanted;
	argument.walk_end = next();
	/* Also an unaligned output. */
	if (one_of(4) && argument.vec_len < regions_length)
		argument.vec += 1;
	if (slow)
		argument.return_mask |= PAGE_IS_PRESENT;
	if (clean) {
		argument.category_mask |= PAGE_IS_PRESENT;
		argument.category_inverted = PAGE_IS_LDT_DIRTY;
		argument.return_mask = PAGE_IS_PRESENT | PAGE_IS_LDT_DIRTY;
	}
	count = ioctl(target->pagemap, PAGEMAP_SCAN, &argument);
	calls++;
	if (count < 0)
		wrong("a good scan: %s", strerror(errno));
	at = first;
	for (int i = 0; i < count; i++) {
		struct page_region region;

		memcpy(&region, (char *)(uintptr_t)argument.vec + (size_t)i * sizeof(region), sizeof(region));
		if (region.start % PAGE || region.end % PAGE || region.start >= region.end ||
		    region.start < (uintptr_t)AREA + at * PAGE || region.end > (uintptr_t)AREA + last * PAGE)
			wrong("region %d is %" PRIx64 "-%" PRIx64 ", after page %lu, before %lu", i, region.start, region.end,
			      at, last);
		for (; at < (region.start - (uintptr_t)AREA) / PAGE; at++)
			if (model[at] == (clean ? CLEAN : DIRTY))
				wrong("page %lu is left out", at);
		for (; at < (region.end - (uintptr_t)AREA) / PAGE; at++, pages++) {
			if (model[at] != (clean ? CLEAN : DIRTY))
				wrong("page %lu is too much", at);
			if (argument.flags && !clean)
				model[at] = CLEAN;
		}
	}
	if (wanted && pages > wanted)
		wrong("%" PRIu64 " pages, more than %" PRIu64, pages, wanted);
	if (argument.walk_end < (uintptr_t)AREA + at * PAGE || argument.walk_end > (uintptr_t)AREA + last * PAGE)
		wrong("walk_end is %" PRIx64, (uint64_t)argument.walk_end);
	for (; at < (argument.walk_end - (uintptr_t)AREA) / PAGE; at++)
		if (model[at] == (clean ? CLEAN : DIRTY))
			wrong("page %lu is left out at the end", at);
}

/* A scan that must fail, and change nothing. */
static void scan_wrongly(struct target *target)
{
	struct pm_scan_arg argument = good_arguments();
	uint64_t *masks[] = { &argument.category_inverted, &argument.category_mask, &argument.category_anyof_mask,
			      &argument.return_mask };

	argument.flags = PM_SCAN_LDT_RESTART;
	switch (next() % 16) {
	case 0:
		argument.size = one_of(2) ? next() : sizeof(argument) - 8;
		return expect(scan(target, &argument), -EINVAL, "a wrong size");
	case 1:
		argument.flags |= 1ull << (3 + next() % 14);
		return expect(scan(target, &argument), -EINVAL, "an unknown flag");
	case 2:
		argument.flags |= 1ull << (17 + next() % 47);
		return expect(scan(target, &argument), -EINVAL, "an unknown flag");
	case 3:
		*masks[next() % 4] |= 1ull << 8;
		return expect(scan(target, &argument), -EINVAL, "an unknown category");
	case 4:
		*masks[next() % 4] |= 1ull << (10 + next() % 54);
		return expect(scan(target, &argument), -EINVAL, "an unknown category");
	case 5:
		argument.start += 1 + next() % (PAGE - 1);
		return expect(scan(target, &argument), -EINVAL, "a start within a page");
	case 6:
		argument.end = argument.start - PAGE * (1 + next() % 1000);
		return expect(scan(target, &argument), -EFAULT, "an end before the start");
	case 7:
		argument.start |= 1ull << 63;
		return expect(scan(target, &argument), -EFAULT, "a start in the kernel");
	case 8:
		argument.end |= 1ull << 63;
		return expect(scan(target, &argument), -EFAULT, "an end in the kernel");
	case 9:
		argument.vec = 0;
		return expect(scan(target, &argument), -EINVAL, "a length without an output");
	case 10:
		argument.vec |= 1ull << 63;
		return expect(scan(target, &argument), -EFAULT, "an output in the kernel");
	case 11:
		argument.vec_len = next() | 1ull << 63;
		return expect(scan(target, &argument), -EFAULT, "an endless output");
	case 12:
		calls++;
		expect(ioctl(target->pagemap, PAGEMAP_SCAN, next() % PAGE) < 0 ? -errno : 0, -EFAULT, "no argument");
		return expect(ioctl(target->pagemap, PAGEMAP_SCAN, half + PAGE - 8) < 0 ? -errno : 0, -EFAULT,
			      "an argument of which a part is missing");
	case 13:
		calls++;
		return expect(ioctl(target->pagemap, _IOWR('f', 16, uint64_t), &argument) < 0 ? -errno : 0, -EINVAL,
			      "an ioctl of another size");
	case 14:
		argument.flags |= PM_SCAN_CHECK_WPASYNC;
		return expect(scan(target, &argument), -EINVAL, "a restart that may fail half way");
	default:
		calls++;
		return expect(ioctl(target->clear_refs, PAGEMAP_SCAN, &argument) < 0 ? -errno : 0, -ENOTTY,
			      "an ioctl of clear_refs");
	}
}

/* Unusual scans that succeed, and must report nothing and change nothing. */
static void scan_oddly(struct target *target)
{
	struct pm_scan_arg argument = good_arguments();
	int got;

	argument.flags = PM_SCAN_LDT_RESTART;
	switch (next() % 4) {
	case 0:
		argument.end = argument.start;
		break;
	case 1:
		/* The kernel skips a mapping without the write protection that is asked for. */
		argument.flags |= PM_SCAN_WP_MATCHING;
		break;
	case 2:
		/* Between mappings. */
		argument.start = (uintptr_t)NOISE + (1ull << 40) + (next() % (1 << 20)) * PAGE;
		argument.end = argument.start + next() % (1ull << 35);
		break;
	default:
		/* Above the address space of a process, if the kernel accepts it. */
		argument.start = 1ull << (48 + next() % 8);
		argument.end = argument.start + next() % (1ull << 40);
	}
	got = ioctl(target->pagemap, PAGEMAP_SCAN, &argument);
	calls++;
	if (got > 0 || (got < 0 && errno != EFAULT))
		wrong("an odd scan from %" PRIx64 " to %" PRIx64 ": %d", (uint64_t)argument.start, (uint64_t)argument.end, got);
}

/*
 * The output cannot be written. The caller loses the report of the pages that were restarted by then; but no other page
 * may count as written, and pages outside of the call keep their state.
 */
static void lose_output(struct target *target)
{
	struct pm_scan_arg argument = good_arguments();
	unsigned long first = next() % (PAGES - 300), last = first + 300;
	unsigned long dirty = 0, here = 0;
	static bool found[PAGES];
	bool by_argument = one_of(3);
	int got;

	for (unsigned long i = first; i < last; i++)
		dirty += model[i] == DIRTY;
	argument.flags = PM_SCAN_LDT_RESTART;
	argument.start = (uintptr_t)AREA + first * PAGE;
	argument.end = (uintptr_t)AREA + last * PAGE;
	if (by_argument) {
		/* walk_end cannot be written back. */
		mprotect(readonly, PAGE, PROT_READ | PROT_WRITE);
		memcpy(readonly, &argument, sizeof(argument));
		mprotect(readonly, PAGE, PROT_READ);
		got = scan(target, (struct pm_scan_arg *)readonly);
		expect(got, -EFAULT, "an argument that can't be written");
	} else {
		/* The output of the first page that is found, or of a later page. */
		here = next() % 3;
		argument.vec = (uintptr_t)(here ? half + PAGE - here * sizeof(*regions) : readonly);
		got = scan(target, &argument);
		if (got && got != -EFAULT)
			wrong("an output that can't be written: %s", strerror(-got));
		if (!got && dirty > here * 300)
			wrong("an output that can't be written is no error");
		if (got && !dirty)
			wrong("nothing to write, and an error");
	}
	scan_all(target, found, one_of(2));
	for (unsigned long i = first; i < last; i++) {
		if (found[i] && model[i] != DIRTY)
			wrong("page %lu counts as written after a scan that has failed", i);
		if (!found[i] && model[i] == DIRTY)
			model[i] = CLEAN;
	}
}

static void clear(struct target *target)
{
	static const struct {
		const char *text;
		int error;
	} texts[] = {
		{ "6", -EINVAL }, { "0", -EINVAL }, { "-4", -EINVAL }, { "4x", -EINVAL }, { "", -EINVAL },
		/* These values do not concern dirty tracking. */
		{ "1", 0 }, { "2", 0 }, { "3", 0 }, { "4", 0 }, { "5", 0 },
	};
	size_t i = next() % (sizeof(texts) / sizeof(*texts));

	calls++;
	expect(write(target->clear_refs, texts[i].text, strlen(texts[i].text)) < 0 ? -errno : 0, texts[i].error, texts[i].text);
}

/* Without an output, a scan restarts all that it matches. */
static void restart_part(struct target *target)
{
	struct pm_scan_arg argument = good_arguments();
	unsigned long first = next() % PAGES, last = first + 1 + next() % (PAGES - first);

	argument.flags = PM_SCAN_LDT_RESTART;
	argument.start = (uintptr_t)AREA + first * PAGE;
	argument.end = (uintptr_t)AREA + last * PAGE;
	argument.vec = argument.vec_len = 0;
	if (one_of(2))
		argument.return_mask |= PAGE_IS_PRESENT;
	expect(scan(target, &argument), 0, "a restart of a part");
	for (unsigned long i = first; i < last; i++)
		if (model[i] == DIRTY)
			model[i] = CLEAN;
}

/* Valid and invalid calls, with commands to the target between them. */
static void fuzz(struct target *target)
{
	doing = "calling at random";
	for (int i = 0; i < 200; i++) {
		switch (next() % 8) {
		case 0:
		case 1: act(target); break;
		case 2: scan_part(target); break;
		case 3: scan_wrongly(target); break;
		case 4: scan_oddly(target); break;
		case 5: lose_output(target); break;
		case 6: restart_part(target); break;
		default: clear(target);
		}
		if (one_of(4))
			check(target);
	}
	check(target);
}

/* Random arguments. Only the kernel's log shows an error. Returns the number of calls that failed. */
static int call_anyhow(struct target *target, uint64_t *state)
{
	static const uint64_t odd[] = { 0, 1, PAGE, -PAGE, -1ull, 1ull << 47, (1ull << 47) - PAGE, 1ull << 63, 0x200000 };
	struct pm_scan_arg argument = good_arguments();
	uint64_t *fields = (uint64_t *)&argument;
	int refused = 0;

	random_state = *state;
	argument.flags = next() % 8;
	argument.start = (uintptr_t)(one_of(2) ? AREA : NOISE) + next() % PAGES * PAGE;
	argument.end = argument.start + next() % (one_of(4) ? 1ull << 45 : PAGES * PAGE);
	argument.max_pages = one_of(2) ? 0 : next() % 2000;
	argument.vec_len = next() % regions_length;
	argument.category_mask = next() & (0xff | PAGE_IS_LDT_DIRTY) & next() & next();
	argument.category_anyof_mask = one_of(2) ? 0 : next() & (0xff | PAGE_IS_LDT_DIRTY);
	argument.category_inverted = one_of(2) ? 0 : next() & (0xff | PAGE_IS_LDT_DIRTY);
	argument.return_mask = next() & (0xff | PAGE_IS_LDT_DIRTY);
	for (int i = (int)(next() % 3); i > 0; i--)
		fields[1 + next() % 11] = one_of(3) ? next() : odd[next() % (sizeof(odd) / sizeof(*odd))];
	/* The output must not overwrite this program. */
	if (argument.vec != (uintptr_t)regions || argument.vec_len > regions_length)
		argument.vec = argument.vec_len = 0;
	refused += ioctl(target->pagemap, PAGEMAP_SCAN, &argument) < 0;
	if (one_of(16))
		refused += write(target->clear_refs, one_of(2) ? "1" : "4", 1) < 0;
	*state = next();
	return refused;
}

static pid_t fork_caller(struct target *target)
{
	uint64_t state = next();
	pid_t pid = fork();

	if (pid < 0)
		die("fork");
	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;)
		call_anyhow(target, &state);
}

static void kill_and_wait(pid_t pid)
{
	int status;

	kill(pid, SIGKILL);
	if (waitpid(pid, &status, 0) != pid || !WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
		wrong("a caller has ended with %x", status);
}

/* Several callers at once, each killed in the middle of a call, while the target changes its mappings. */
static void storm(struct target *target)
{
	pid_t callers[3];

	doing = "callers are killed in the middle, while mappings change";
	order(target, NOTHING, 0, 1);
	for (int i = 0; i < 3; i++)
		callers[i] = fork_caller(target);
	for (int i = 0; i < 24; i++) {
		usleep(next() % 20000);
		order(target, WRITE, next() % (PAGES - 8), 8);
		kill_and_wait(callers[i % 3]);
		callers[i % 3] = fork_caller(target);
	}
	for (int i = 0; i < 3; i++)
		kill_and_wait(callers[i]);
	order(target, NOTHING, 0, 2);
	restart_and_check(target);
}

/* A call whose output is never stored. */
struct stuck_call {
	int pagemap;
	struct pm_scan_arg argument;
};

static void *call_and_get_stuck(void *data)
{
	struct stuck_call *call = data;

	ioctl(call->pagemap, PAGEMAP_SCAN, &call->argument);
	_exit(4);
}

/* Never returns. Reports through the pipe that its thread hangs. */
static void be_stuck(struct target *target, int ready)
{
	struct stuck_call call = { target->pagemap, good_arguments() };
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register where = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	struct uffd_msg message;
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	void *page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	pthread_t thread;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	where.range.start = (uintptr_t)page;
	where.range.len = PAGE;
	if (fd < 0 || page == MAP_FAILED || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &where))
		die("userfaultfd");
	call.argument.flags = PM_SCAN_LDT_RESTART;
	call.argument.vec = (uintptr_t)page;
	call.argument.vec_len = PAGE / sizeof(*regions);
	if (pthread_create(&thread, NULL, call_and_get_stuck, &call))
		die("pthread_create");
	if (read(fd, &message, sizeof(message)) != sizeof(message) || write(ready, "", 1) != 1)
		die("userfaultfd");
	for (;;)
		pause();
}

/*
 * A tracker hangs between a restart and its end, because its output is memory that another process must provide and does
 * not. Other trackers must neither wait for it nor miss writes after the next restart.
 */
static void get_stuck(struct target *target)
{
	int fds[2];
	char byte;
	pid_t pid;

	doing = "a tracker is stuck in the middle";
	restart_and_check(target);
	order(target, WRITE, 0, PAGES);
	if (pipe2(fds, O_CLOEXEC))
		die("pipe");
	pid = fork();
	if (pid < 0)
		die("fork");
	if (!pid)
		be_stuck(target, fds[1]);
	close(fds[1]);
	if (read(fds[0], &byte, 1) != 1)
		die("nobody got stuck");
	close(fds[0]);
	for (int i = 0; i < 3; i++)
		restart_and_check(target);
	kill_and_wait(pid);
	restart_and_check(target);
}

/* Drops all rights. */
static void become(unsigned int user)
{
	if (syscall(SYS_setgroups, 0, NULL) || setresgid(user, user, user) || setresuid(user, user, user))
		_exit(9);
}

/* Runs as another user, and returns an exit status. */
static int as_user(unsigned int user, int (*what)(struct target *), struct target *target)
{
	int status;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (pid < 0)
		die("fork");
	if (!pid) {
		become(user);
		_exit(what(target));
	}
	if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status))
		wrong("somebody without rights has ended with %x", status);
	return WEXITSTATUS(status);
}

/* A bit for each file that can be opened; 8 if an error is not one of permissions. */
static int open_all(struct target *target)
{
	static const struct {
		const char *name;
		int flags;
	} files[] = { { "pagemap", O_RDONLY }, { "clear_refs", O_WRONLY } };
	int opened = 0;

	for (int i = 0; i < 2; i++) {
		int fd = open_of(target->pid, files[i].name, files[i].flags);

		if (fd >= 0)
			opened |= 1 << i;
		else if (errno != EACCES && errno != EPERM)
			opened |= 8;
	}
	return opened;
}

/* With descriptors that a process with rights opened: permissions are checked when a file is opened. */
static int use_descriptors(struct target *target)
{
	struct pm_scan_arg argument = good_arguments();

	argument.vec = argument.vec_len = 0;
	return ioctl(target->pagemap, PAGEMAP_SCAN, &argument) < 0;
}

static void ask_without_rights(struct target *target)
{
	struct target other = { .orders = -1 };
	int got, ready[2];
	char byte;

	doing = "somebody without rights calls";
	got = as_user(NOBODY, open_all, target);
	if (got)
		wrong("nobody can open files of root's process (%x)", got);
	if (as_user(NOBODY, use_descriptors, target))
		wrong("descriptors that root has opened do not work for nobody");
	check(target);

	/* A user may track an own process; another user may not; nobody may if the process is not dumpable. */
	for (int dumpable = 1; dumpable >= 0; dumpable--) {
		if (pipe(ready))
			die("pipe");
		other.pid = fork();
		if (other.pid < 0)
			die("fork");
		if (!other.pid) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			become(KILLER);
			prctl(PR_SET_DUMPABLE, dumpable);
			if (write(ready[1], "", 1) != 1)
				_exit(1);
			for (;;)
				pause();
		}
		if (read(ready[0], &byte, 1) != 1)
			die("read");
		close(ready[0]);
		close(ready[1]);
		got = as_user(KILLER, open_all, &other);
		if (got != (dumpable ? 3 : 0))
			wrong("a user opens files %x of his own process that is %sdumpable", got, dumpable ? "" : "not ");
		got = as_user(NOBODY, open_all, &other);
		if (got)
			wrong("a user opens files %x of another one's process", got);
		got = open_all(&other);
		if (got != 3)
			wrong("root opens files %x only", got);
		kill_and_wait(other.pid);
	}

	/* There is no address space. */
	other.pid = fork();
	if (!other.pid)
		_exit(0);
	usleep(1000);
	while (waitid(P_PID, (id_t)other.pid, &(siginfo_t){ 0 }, WEXITED | WNOWAIT))
		;
	expect(open_of(other.pid, "pagemap", O_RDONLY) < 0 ? -errno : 0, -ESRCH, "a zombie's pagemap");
	waitpid(other.pid, NULL, 0);
	expect(open_of(other.pid, "pagemap", O_RDONLY) < 0 ? -errno : 0, -ENOENT, "the pagemap of nobody");
	expect(open_of(2, "pagemap", O_RDONLY) < 0 ? -errno : 0, -ESRCH, "the pagemap of a kernel thread");
	check(target);
}

/* The results for descriptors of an address space that no longer exists. */
static void check_gone(struct target *target, bool gone)
{
	struct pm_scan_arg argument = good_arguments();
	ssize_t got;

	argument.flags = PM_SCAN_LDT_RESTART;
	argument.start = 0;
	argument.end = 1ull << 47;
	argument.end -= PAGE;
	argument.category_mask = 0;
	argument.return_mask = PAGE_IS_LDT_DIRTY | PAGE_IS_PRESENT;
	argument.category_anyof_mask = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
	got = ioctl(target->pagemap, PAGEMAP_SCAN, &argument);
	calls++;
	if (got)
		wrong("a scan of memory that is gone: %zd %s", got, got < 0 ? strerror(errno) : "regions");
	/* Without an output, and for written pages alone. */
	argument.vec = argument.vec_len = argument.category_anyof_mask = 0;
	argument.category_mask = argument.return_mask = PAGE_IS_LDT_DIRTY;
	expect(scan(target, &argument), 0, "a restart of memory that is gone");
	if (gone)
		expect(write(target->clear_refs, "4", 1) < 0 ? -errno : 0, -ESRCH, "clear_refs of a process that is gone");
}

/* The target executes this program anew; old descriptors must neither show nor change the new address space. */
static void run_another(void)
{
	struct target target, old;
	char orders_text[16], answers_text[16];
	int orders[2], answers[2];

	doing = "the target has executed a program";
	if (pipe(orders) || pipe(answers))
		die("pipe");
	target.pid = fork();
	if (target.pid < 0)
		die("fork");
	if (!target.pid) {
		struct command command;

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(orders[1]);
		close(answers[0]);
		map_area(AREA, PAGES);
		memset(AREA, 1, PAGES * PAGE);
		if (write(answers[1], "", 1) != 1 || read(orders[0], &command, sizeof(command)) != sizeof(command))
			_exit(1);
		snprintf(orders_text, sizeof(orders_text), "%d", orders[0]);
		snprintf(answers_text, sizeof(answers_text), "%d", answers[1]);
		execl("/proc/self/exe", "hostile", "serve", orders_text, answers_text, NULL);
		_exit(1);
	}
	close(orders[0]);
	close(answers[1]);
	target.orders = orders[1];
	target.answers = answers[0];
	{
		char byte;

		if (read(target.answers, &byte, 1) != 1)
			die("the target");
	}
	open_files(&target);
	old = target;
	/* The first command makes it execute; the new program answers the next one. */
	{
		struct command command = { NOTHING, 0, 0 };

		if (write(target.orders, &command, sizeof(command)) != sizeof(command))
			die("the target");
	}
	order(&target, NOTHING, 0, 0);
	open_files(&target);
	restart_and_check(&target);
	check_gone(&old, false);
	check(&target);
	close_files(&old);
	old = target;
	old.pagemap = dup(target.pagemap);
	old.clear_refs = dup(target.clear_refs);
	stop(&target);
	doing = "the target has exited";
	check_gone(&old, true);
	close_files(&old);
}

/* Processes that execute themselves again and again, or exit, while others open their files and use them. */
static void come_and_go(void)
{
	doing = "targets execute and exit in the middle";
	for (int i = 0; i < 4; i++) {
		pid_t pid, callers[2];
		bool exec = i % 2;

		pid = fork();
		if (pid < 0)
			die("fork");
		if (!pid) {
			map_area(AREA, PAGES);
			memset(AREA, 1, PAGES / 4 * PAGE);
			if (exec)
				execl("/proc/self/exe", "hostile", "again", "2", NULL);
			_exit(0);
		}
		for (int j = 0; j < 2; j++) {
			uint64_t state = next();

			callers[j] = fork();
			if (callers[j] < 0)
				die("fork");
			if (callers[j])
				continue;
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			for (;;) {
				struct target target = { .pid = pid };

				target.pagemap = open_of(pid, "pagemap", O_RDONLY);
				target.clear_refs = open_of(pid, "clear_refs", O_WRONLY);
				for (int k = 0; k < 10; k++)
					call_anyhow(&target, &state);
				close_files(&target);
			}
		}
		waitpid(pid, NULL, 0);
		usleep(2000);
		kill_and_wait(callers[0]);
		kill_and_wait(callers[1]);
	}
}

/* A program's own memory, with the output inside of the tracked range: pages that were not reported must be unchanged. */
static void track_oneself(void)
{
	struct target self = { .pid = getpid() };
	char *copy = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	doing = "the output is in the memory that is tracked";
	if (copy == MAP_FAILED)
		die("mmap");
	open_files(&self);
	map_area(AREA, PAGES);
	memset(AREA, 1, PAGES * PAGE);
	for (int i = 0; i < 40; i++) {
		struct pm_scan_arg argument = good_arguments();

		for (int j = (int)(next() % 300); j > 0; j--)
			((volatile uint64_t *)AREA)[next() % (PAGES * PAGE / 8)] = next();
		argument.flags = PM_SCAN_LDT_RESTART;
		argument.end = argument.start;
		while (argument.end < (uintptr_t)AREA + PAGES * PAGE) {
			char *output = AREA + next() % ((PAGES - 16) * PAGE);
			static struct page_region found[64 * 1024 / sizeof(struct page_region)];
			int count;

			argument.start = argument.end;
			argument.end = (uintptr_t)AREA + PAGES * PAGE;
			argument.vec = (uintptr_t)output;
			argument.vec_len = 1 + next() % 2000;
			count = ioctl(self.pagemap, PAGEMAP_SCAN, &argument);
			calls++;
			if (count < 0)
				die("PAGEMAP_SCAN");
			memcpy(found, output, (size_t)count * sizeof(*found));
			for (int j = 0; j < count; j++)
				memcpy(copy + (found[j].start - (uintptr_t)AREA), (void *)(uintptr_t)found[j].start,
				       found[j].end - found[j].start);
			argument.end = argument.walk_end;
		}
		/* Writes by the calls themselves to pages that were already scanned belong to the next report. */
		if (i % 8 == 7) {
			int count;

			argument = good_arguments();
			argument.flags = PM_SCAN_LDT_RESTART;
			count = ioctl(self.pagemap, PAGEMAP_SCAN, &argument);
			for (int j = 0; j < count; j++)
				memcpy(copy + (regions[j].start - (uintptr_t)AREA), (void *)(uintptr_t)regions[j].start,
				       regions[j].end - regions[j].start);
			for (size_t j = 0; j < PAGES; j++)
				if (memcmp(copy + j * PAGE, AREA + j * PAGE, PAGE))
					wrong("page %zu was written, and never reported", j);
		}
	}
	munmap(AREA, PAGES * PAGE);
	munmap(copy, PAGES * PAGE);
	close_files(&self);
}

int main(int argc, char **argv)
{
	unsigned long rounds = 0;
	struct target target;
	int option;
	time_t end;

	if (argc == 4 && !strcmp(argv[1], "serve")) {
		map_area(AREA, PAGES);
		serve(atoi(argv[2]), atoi(argv[3]));
	}
	if (argc == 3 && !strcmp(argv[1], "again")) {
		char left[16];

		snprintf(left, sizeof(left), "%d", atoi(argv[2]) - 1);
		map_area(AREA, PAGES);
		memset(AREA, 1, 100 * PAGE);
		if (atoi(argv[2]))
			execl("/proc/self/exe", "hostile", "again", left, NULL);
		return 0;
	}
	while ((option = getopt(argc, argv, "s:r:b")) != -1) {
		switch (option) {
		case 's': seconds = strtoul(optarg, NULL, 10); break;
		case 'r': seed = strtoul(optarg, NULL, 10); break;
		case 'b': broken = true; break;
		default: return 2;
		}
	}
	if (geteuid()) {
		fprintf(stderr, "hostile: must be run by root, who becomes others\n");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	own = getpid();
	signal(SIGTERM, say_where);
	random_state = seed * 7919 + 88172645463325252ull;
	regions = malloc((regions_length + 1) * sizeof(*regions));
	readonly = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	half = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (!regions || readonly == MAP_FAILED || half == MAP_FAILED || munmap(half + PAGE, PAGE))
		die("memory");

	target = start();
	end = time(NULL) + (time_t)seconds;
	do {
		doing = "starting a round";
		restart_and_check(&target);
		fuzz(&target);
		ask_without_rights(&target);
		storm(&target);
		get_stuck(&target);
		fuzz(&target);
		run_another();
		come_and_go();
		track_oneself();
		/* run_another() has changed the model. */
		stop(&target);
		target = start();
		memset(model, 0, sizeof(model));
		rounds++;
	} while (broken ? rounds < BROKEN_ROUNDS : time(NULL) < end);
	stop(&target);
	printf("hostile: all as it should be: seed %lu, %lu rounds, %lu calls, %lu refused, %lu checks\n", seed, rounds, calls,
	       refusals, checks);
	return 0;
}
