// SPDX-License-Identifier: GPL-2.0
/*
 * Is lightweight dirty tracking on as long as a file is open through which it was restarted, whoever has the file, and is no
 * write lost then, or when it ends and begins anew?
 *
 *   users [-s SECONDS] [-r SEED] [-b]
 *
 * Trackers open the pagemap file of a trackee, use it, duplicate it, pass it on to each other, leave it in a socket, fork with
 * it, execute with it, close it, and are killed, also for want of memory. A model knows which files are open and have restarted
 * tracking, and which has done so last: each other must be told so, once, when it is used again. All trackers have one copy of
 * the trackee's memory, so that none loses what another has collected. The trackee writes, drops shared memory, swaps out and
 * moves page tables; its threads, and processes that share its memory, ask through files of their own. From time to time it
 * stops. Then
 *   - tracking must be on exactly if the model says so: only then a page of shared memory that was written and dropped counts
 *     as written;
 *   - after one more collect, a copy that was made by the reports alone must be what the trackee has noted that it wrote;
 *   - after two, no page may count as written;
 *   - when tracking was off, each page in memory must count as written at the new beginning.
 * Now and then, a program is collected from as it executes another, is killed, or ends.
 *
 * -b forgets a reported page from time to time, which must be noticed.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096ul
#define TABLE (512 * PAGE)
#define WORDS (PAGE / 8)
/* An arena has three parts of private memory of the size of a page table, of which one is empty, and one of shared memory. */
#define PRIVATE_PARTS 3
#define PARTS 4
#define ARENA (PARTS * TABLE)
#define THREADS 3
#define TRACKERS 5
#define SLOTS 4
#define MAX_KEPT 16
/* More than there can be. */
#define MAX_FILES (SLOTS * (TRACKERS + MAX_KEPT + 1))

#define PAGEMAP_SCAN _IOWR('f', 16, struct pm_scan_arg)
#define PAGE_IS_PRESENT (1 << 3)
#define PAGE_IS_SWAPPED (1 << 4)
#define PAGE_IS_LWD_DIRTY (1 << 9)
#define PM_SCAN_LWD_RESTART (1 << 2)
#define POPULATED (PAGE_IS_PRESENT | PAGE_IS_SWAPPED)

struct page_region {
	uint64_t start, end, categories;
};
struct pm_scan_arg {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages, category_inverted, category_mask,
		category_anyof_mask, return_mask;
};

/* Shared by all; not tracked. `truth` is what the trackee notes of its writes: the last value in each page. */
struct control {
	atomic_uint pause, resting;
	atomic_ulong operations, collects, reported, forgotten;
	pid_t driver;
	/* The trackee drops a written page of shared memory when it is told to, and removes it again. */
	atomic_int probe;
	_Atomic(char *) probed;
	unsigned int empty[THREADS];
	uint64_t truth[THREADS][PARTS][512];
};
static struct control *control;
static char *base, *copy;
static bool broken;
static uint64_t seconds = 20, seed = 1;

static void die(const char *what)
{
	fprintf(stderr, "users: %s: %s\n", what, strerror(errno));
	exit(2);
}

static uint64_t next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

/* How often a restart was told that another file has restarted tracking since. */
static long told_as_stale;

/* A call that looks for pages, and perhaps restarts them. Returns the number of pages, and their ranges if there is room. */
static long scan_once(int file, struct pm_scan_arg *arg)
{
	long count;

	arg->size = sizeof(*arg);
	for (;;) {
		count = ioctl(file, PAGEMAP_SCAN, arg);
		if (count < 0 && errno == ESTALE && arg->flags & PM_SCAN_LWD_RESTART)
			told_as_stale++;
		else if (count >= 0 || errno != EINTR)
			return count;
	}
}

static uint64_t count_pages(int file, uint64_t start, uint64_t end, uint64_t flags, uint64_t mask, uint64_t inverted,
			    uint64_t any)
{
	static struct page_region regions[512];
	uint64_t pages = 0;

	while (start < end) {
		struct pm_scan_arg arg = { .flags = flags, .start = start, .end = end, .vec = (uintptr_t)regions,
					   .vec_len = 512, .category_inverted = inverted, .category_mask = mask,
					   .category_anyof_mask = any, .return_mask = mask | any };
		long count = scan_once(file, &arg);

		if (count < 0)
			die("PAGEMAP_SCAN");
		for (long i = 0; i < count; i++)
			pages += (regions[i].end - regions[i].start) / PAGE;
		start = arg.walk_end;
	}
	return pages;
}

static uint64_t arenas_end(void)
{
	return (uintptr_t)base + THREADS * ARENA;
}

/* Asks what counts as written, which changes nothing. Returns whether another file has restarted tracking meanwhile. */
static bool ask(int file)
{
	struct pm_scan_arg arg = { .start = (uintptr_t)base, .end = arenas_end(), .category_mask = PAGE_IS_LWD_DIRTY,
				   .return_mask = PAGE_IS_LWD_DIRTY };

	if (scan_once(file, &arg) >= 0)
		return false;
	if (errno != ESTALE)
		die("PAGEMAP_SCAN that asks");
	return true;
}

/* Turns tracking on, and restarts no page. */
static void begin(int file)
{
	struct pm_scan_arg arg = { .flags = PM_SCAN_LWD_RESTART, .start = (uintptr_t)base, .end = (uintptr_t)base };

	if (scan_once(file, &arg) < 0)
		die("PAGEMAP_SCAN that begins");
}

/* What cannot be read is not there any more, and will be new when it comes back. */
static void read_pages(pid_t pid, uint64_t start, uint64_t end)
{
	for (; start < end; start += PAGE) {
		struct iovec to = { copy + (start - (uintptr_t)base), PAGE }, from = { (void *)start, PAGE };

		if (process_vm_readv(pid, &to, 1, &from, 1, 0) < 0 && errno != EFAULT)
			die("process_vm_readv");
	}
}

static void collect(int file, pid_t pid, uint64_t *state)
{
	static struct page_region regions[512];
	uint64_t start = (uintptr_t)base;

	while (start < arenas_end()) {
		struct pm_scan_arg arg = { .flags = PM_SCAN_LWD_RESTART, .start = start, .end = arenas_end(),
					   .vec = (uintptr_t)regions, .vec_len = 1 + next(state) % 512,
					   .category_mask = PAGE_IS_LWD_DIRTY, .return_mask = PAGE_IS_LWD_DIRTY };
		long count = scan_once(file, &arg);

		if (count < 0)
			die("PAGEMAP_SCAN with restart");
		for (long i = 0; i < count; i++) {
			uint64_t skipped = 0;

			atomic_fetch_add(&control->reported, (regions[i].end - regions[i].start) / PAGE);
			if (broken && next(state) % 8 == 0) {
				skipped = PAGE;
				atomic_fetch_add(&control->forgotten, 1);
			}
			read_pages(pid, regions[i].start + skipped, regions[i].end);
		}
		start = arg.walk_end;
	}
	atomic_fetch_add(&control->collects, 1);
}

/* The trackee. */

static char *part_of(unsigned int thread, unsigned int part)
{
	return base + thread * ARENA + part * TABLE;
}

static bool has_huge_pages(unsigned int thread)
{
	return thread == 1;
}

static void map_part(unsigned int thread, unsigned int part, int protection)
{
	char *at = part_of(thread, part);

	if (mmap(at, TABLE, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) == MAP_FAILED)
		die("mmap in the arena");
	madvise(at, TABLE, has_huge_pages(thread) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
}

struct worker {
	unsigned int thread;
	uint64_t state, value;
	/* What a process that shares the memory is to do. */
	unsigned int part;
	bool uses, leaves_open;
};

static void write_page(struct worker *worker, unsigned int part, unsigned int page)
{
	volatile uint64_t *words = (uint64_t *)(part_of(worker->thread, part) + page * PAGE);
	uint64_t value = ++worker->value;

	words[1 + value % (WORDS - 1)] = value;
	words[0] = value;
	control->truth[worker->thread][part][page] = value;
}

static void write_pages(struct worker *worker, unsigned int part)
{
	for (unsigned int count = 1 + next(&worker->state) % 64; count; count--)
		write_page(worker, part, next(&worker->state) % 512);
}

static unsigned int full_part(struct worker *worker)
{
	unsigned int part = next(&worker->state) % PARTS;

	return part == control->empty[worker->thread] ? PARTS - 1 : part;
}

static void move_table(struct worker *worker)
{
	unsigned int to = control->empty[worker->thread], from = (to + 1 + next(&worker->state) % 2) % PRIVATE_PARTS;

	if (mremap(part_of(worker->thread, from), TABLE, TABLE, MREMAP_MAYMOVE | MREMAP_FIXED,
		   part_of(worker->thread, to)) == MAP_FAILED)
		die("mremap");
	memcpy(control->truth[worker->thread][to], control->truth[worker->thread][from], sizeof(control->truth[0][0]));
	control->empty[worker->thread] = from;
	map_part(worker->thread, from, PROT_NONE);
}

/* Asks of its own memory, which neither turns tracking on nor takes reports away. */
static void use_own(struct worker *worker, bool leave_open)
{
	int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), other = -1;
	struct pm_scan_arg arg = { .start = (uintptr_t)base, .end = arenas_end(), .category_mask = PAGE_IS_LWD_DIRTY,
				   .return_mask = PAGE_IS_LWD_DIRTY };

	if (file < 0)
		die("/proc/self/pagemap");
	if (next(&worker->state) % 2)
		other = dup(file);
	if (scan_once(file, &arg) < 0)
		die("PAGEMAP_SCAN of oneself");
	if (leave_open)
		return;
	close(file);
	if (other >= 0)
		close(other);
}

/* Shares the memory, though not the files, of the trackee. */
static int relative(void *argument)
{
	struct worker *worker = argument;

	if (worker->uses)
		use_own(worker, worker->leaves_open);
	write_pages(worker, worker->part);
	_exit(0);
}

static void start_relative(struct worker *worker, int flags)
{
	static char stacks[THREADS][1 << 16] __attribute__((aligned(16)));
	pid_t pid;

	worker->part = full_part(worker);
	worker->uses = next(&worker->state) % 2;
	worker->leaves_open = next(&worker->state) % 2;
	pid = clone(relative, stacks[worker->thread + 1] - 64, flags | CLONE_VM | SIGCHLD, worker);
	if (pid < 0)
		die("clone");
	waitpid(pid, NULL, 0);
}

static void fork_and_wait(struct worker *worker)
{
	pid_t pid = fork();

	if (!pid) {
		use_own(worker, true);
		*(volatile char *)part_of(worker->thread, PARTS - 1);
		_exit(0);
	}
	if (pid > 0)
		waitpid(pid, NULL, 0);
}

static void *work(void *argument)
{
	struct worker *worker = argument;
	char *at;

	for (;;) {
		if (atomic_load(&control->pause)) {
			atomic_fetch_add(&control->resting, 1);
			while (atomic_load(&control->pause)) {
				/* The first thread does what it is told. */
				if (worker->thread == 0 && atomic_load(&control->probe) == 1) {
					at = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
					if (at == MAP_FAILED)
						die("mmap");
					*(volatile char *)at = 1;
					madvise(at, PAGE, MADV_DONTNEED);
					atomic_store(&control->probed, at);
					atomic_store(&control->probe, 2);
				} else if (worker->thread == 0 && atomic_load(&control->probe) == 3) {
					munmap(atomic_load(&control->probed), PAGE);
					atomic_store(&control->probe, 0);
				}
				usleep(200);
			}
			atomic_fetch_sub(&control->resting, 1);
		}
		switch (next(&worker->state) % 20) {
		case 0: move_table(worker); break;
		case 1: use_own(worker, false); break;
		case 2: start_relative(worker, CLONE_VFORK); break;
		case 3: start_relative(worker, 0); break;
		case 4: fork_and_wait(worker); break;
		case 5: case 6: case 7:
			at = part_of(worker->thread, PARTS - 1) + next(&worker->state) % 256 * PAGE;
			madvise(at, (1 + next(&worker->state) % 256) * PAGE, MADV_DONTNEED);
			break;
		case 8:
			at = part_of(worker->thread, full_part(worker)) + next(&worker->state) % 480 * PAGE;
			madvise(at, 32 * PAGE, 21 /* MADV_PAGEOUT */);
			break;
		default: write_pages(worker, full_part(worker));
		}
		atomic_fetch_add(&control->operations, 1);
		if (next(&worker->state) % 8 == 0)
			usleep(next(&worker->state) % 2000);
	}
	return NULL;
}

static void trackee(void)
{
	static struct worker workers[THREADS];
	pthread_t thread;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (unsigned int i = 0; i < THREADS; i++) {
		workers[i] = (struct worker){ .thread = i, .state = seed * 31 + i * 7 + 1, .value = i };
		for (unsigned int part = 0; part < PARTS; part++)
			for (unsigned int page = 0; page < 512; page++)
				if (part != control->empty[i])
					write_page(&workers[i], part, page);
		if (pthread_create(&thread, NULL, work, &workers[i]))
			die("pthread_create");
	}
	for (;;)
		pause();
}

static void pause_trackee(bool pause)
{
	atomic_store(&control->pause, pause);
	while (atomic_load(&control->resting) != (pause ? THREADS : 0))
		usleep(200);
}

/* The trackers: processes that do what they are told, and say when it is done. */

enum order { OPEN, CLOSE, DUPLICATE, ASK, COLLECT, GIVE, TAKE, FORK, EXECUTE, ASK_ON, EAT };
struct message {
	enum order order;
	int slot, other;
	long result;
};

/* Sends a message, and a file with it unless it is negative. */
static void send_message(int socket, struct message *message, int file)
{
	union { struct cmsghdr header; char space[CMSG_SPACE(sizeof(int))]; } ancillary = { 0 };
	struct iovec data = { message, sizeof(*message) };
	struct msghdr header = { .msg_iov = &data, .msg_iovlen = 1 };

	if (file >= 0) {
		header.msg_control = &ancillary;
		header.msg_controllen = sizeof(ancillary);
		ancillary.header = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET,
						     .cmsg_type = SCM_RIGHTS };
		memcpy(CMSG_DATA(&ancillary.header), &file, sizeof(int));
	}
	if (sendmsg(socket, &header, 0) != sizeof(*message))
		die("sendmsg");
}

/* Receives a message; false if the other end is gone. */
static bool receive_message(int socket, struct message *message, int *file)
{
	union { struct cmsghdr header; char space[CMSG_SPACE(sizeof(int))]; } ancillary = { 0 };
	struct iovec data = { message, sizeof(*message) };
	struct msghdr header = { .msg_iov = &data, .msg_iovlen = 1, .msg_control = &ancillary,
				 .msg_controllen = sizeof(ancillary) };
	ssize_t got;

	do
		got = recvmsg(socket, &header, 0);
	while (got < 0 && errno == EINTR);
	*file = -1;
	if (got == sizeof(*message) && header.msg_controllen >= CMSG_LEN(sizeof(int)))
		memcpy(file, CMSG_DATA(&ancillary.header), sizeof(int));
	return got == sizeof(*message);
}

static void eat_memory(void)
{
	FILE *group = fopen("/sys/fs/cgroup/users/cgroup.procs", "w");

	if (!group || fprintf(group, "%d", getpid()) < 0 || fclose(group))
		die("the control group");
	for (;;)
		memset(mmap(NULL, TABLE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 1, TABLE);
}

/* The numbers that track() is called with by the new program. */
static void execute_oneself(int socket, pid_t pid, const int *files, uint64_t state)
{
	char numbers[3 + SLOTS][24], *arguments[3 + 3 + SLOTS + 1] = { "users", "track", broken ? "1" : "0" };

	snprintf(numbers[0], 24, "%d", socket);
	snprintf(numbers[1], 24, "%d", pid);
	snprintf(numbers[2], 24, "%lu", state);
	for (int i = 0; i < SLOTS; i++) {
		bool closes = files[i] >= 0 && fcntl(files[i], F_GETFD) & FD_CLOEXEC;

		snprintf(numbers[3 + i], 24, "%d", closes ? -1 : files[i]);
	}
	for (int i = 0; i < 3 + SLOTS; i++)
		arguments[3 + i] = numbers[i];
	execv("/proc/self/exe", arguments);
	die("execv");
}

static void track(int socket, pid_t pid, int *files, uint64_t state)
{
	struct message message;
	char path[64];
	int file;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	snprintf(path, sizeof(path), "/proc/%d/pagemap", pid);
	while (receive_message(socket, &message, &file)) {
		int *slot = &files[message.slot], given = -1;

		message.result = 0;
		switch (message.order) {
		case OPEN:
			*slot = open(path, O_RDONLY | (message.other ? O_CLOEXEC : 0));
			if (*slot < 0)
				die(path);
			break;
		case CLOSE:
			if (close(*slot))
				die("close");
			*slot = -1;
			break;
		case DUPLICATE:
			files[message.other] = dup(*slot);
			if (files[message.other] < 0)
				die("dup");
			break;
		case ASK: message.result = ask(*slot); break;
		case COLLECT:
			told_as_stale = 0;
			collect(*slot, pid, &state);
			message.result = told_as_stale;
			break;
		case GIVE: given = *slot; break;
		case TAKE: *slot = file; break;
		case FORK:
			message.result = fork();
			if (!message.result) {
				/* It outlives its parent. */
				close(socket);
				while (!kill(control->driver, 0))
					usleep(100000);
				_exit(0);
			}
			break;
		case EXECUTE:
			execute_oneself(socket, pid, files, state);
			break;
		case ASK_ON:
			send_message(socket, &message, -1);
			for (;;)
				ask(*slot);
		case EAT: eat_memory();
		}
		send_message(socket, &message, given);
	}
	exit(0);
}

/* The model. */

static struct {
	int references;
	bool used;
} file_of[MAX_FILES];
/* The file that has restarted tracking last, if it is open. */
static int owner = -1;

static struct tracker {
	pid_t pid;
	int socket, files[SLOTS];
	bool closes[SLOTS];
} trackers[TRACKERS];

/* Children of trackers that hold files, and sockets in which files were left. */
static struct kept {
	pid_t pid;
	int sockets[2], files[SLOTS];
} kept[MAX_KEPT];
static int kept_count;

/* Whether tracking was off, as the trackee ran or as it has an entry that was restarted before. */
static bool was_off = true;
static uint64_t random_state;
static pid_t target;
static unsigned long checks, beginnings, deaths, on_count, stale_collects;

static bool is_on(void)
{
	for (int i = 0; i < MAX_FILES; i++)
		if (file_of[i].references && file_of[i].used)
			return true;
	return false;
}

static void drop(int *file)
{
	if (*file >= 0 && !--file_of[*file].references && owner == *file)
		owner = -1;
	*file = -1;
}

static long order(struct tracker *tracker, enum order what, int slot, int other, int *file)
{
	struct message message = { .order = what, .slot = slot, .other = other };
	int received;

	send_message(tracker->socket, &message, what == TAKE ? *file : -1);
	if (!receive_message(tracker->socket, &message, &received)) {
		fprintf(stderr, "users: a tracker has ended at order %d\n", what);
		exit(2);
	}
	if (what == GIVE)
		*file = received;
	return message.result;
}

static void fail(const char *what, unsigned long pages)
{
	printf("users: FAILED: %s (%lu), seed %lu, after %lu checks\n", what, pages, seed, checks);
	exit(1);
}

static bool is_stale(int file)
{
	return file_of[file].used && owner != file;
}

/* Has a tracker collect through a file. */
static void collect_by(struct tracker *tracker, int slot)
{
	int file = tracker->files[slot];
	long told = order(tracker, COLLECT, slot, 0, NULL);

	if (told != is_stale(file))
		fail(told ? "a file is told of a restart by another" : "a file is not told of a restart by another", (unsigned long)told);
	stale_collects += (unsigned long)told;
	file_of[file].used = true;
	owner = file;
}

static void ask_by(struct tracker *tracker, int slot)
{
	if (order(tracker, ASK, slot, 0, NULL) != is_stale(tracker->files[slot]))
		fail("a file that asks is told the wrong thing of restarts by others", 1);
}

static void start_tracker(struct tracker *tracker)
{
	struct message message = { 0 };
	int sockets[2], file;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, sockets))
		die("socketpair");
	fcntl(sockets[0], F_SETFD, FD_CLOEXEC);
	for (int i = 0; i < SLOTS; i++)
		tracker->files[i] = -1;
	tracker->pid = fork();
	if (tracker->pid < 0)
		die("fork");
	if (!tracker->pid) {
		int files[SLOTS] = { -1, -1, -1, -1 };

		/* Neither the other trackers' sockets nor the files that were left in others. */
		for (int i = 3; i < 1024; i++)
			if (i != sockets[1])
				close(i);
		send_message(sockets[1], &message, -1);
		track(sockets[1], target, files, next(&random_state));
	}
	tracker->socket = sockets[0];
	close(sockets[1]);
	/* By then it has none of this program's files. */
	if (!receive_message(sockets[0], &message, &file))
		die("a tracker that does not start");
}

static void reap(struct tracker *tracker)
{
	waitpid(tracker->pid, NULL, 0);
	close(tracker->socket);
	for (int i = 0; i < SLOTS; i++)
		drop(&tracker->files[i]);
	deaths++;
	start_tracker(tracker);
}

static void forget_kept(int index)
{
	struct kept *entry = &kept[index];

	if (entry->pid) {
		kill(entry->pid, SIGKILL);
		/* It is the tracker's child, or that of whoever adopts it: this program. */
		while (waitpid(entry->pid, NULL, 0) < 0 && errno != ECHILD)
			;
		/* As long as its parent lives, only the state says that it has closed its files. */
		for (char path[64], line[512];;) {
			FILE *stat;
			char *state = NULL;

			snprintf(path, sizeof(path), "/proc/%d/stat", entry->pid);
			stat = fopen(path, "r");
			if (!stat)
				break;
			if (fgets(line, sizeof(line), stat))
				state = strrchr(line, ')');
			fclose(stat);
			if (!state || state[2] == 'Z' || state[2] == 'X')
				break;
			usleep(500);
		}
	} else {
		close(entry->sockets[0]);
		close(entry->sockets[1]);
	}
	for (int i = 0; i < SLOTS; i++)
		drop(&entry->files[i]);
	kept[index] = kept[--kept_count];
}

static int slot_with(struct tracker *tracker, bool with_file)
{
	int first = (int)(next(&random_state) % SLOTS);

	for (int i = 0; i < SLOTS; i++)
		if ((tracker->files[(first + i) % SLOTS] >= 0) == with_file)
			return (first + i) % SLOTS;
	return -1;
}

static void open_in(struct tracker *tracker, int slot)
{
	int file = 0;

	while (file_of[file].references)
		file++;
	tracker->closes[slot] = next(&random_state) % 4 == 0;
	order(tracker, OPEN, slot, tracker->closes[slot], NULL);
	file_of[file].references = 1;
	file_of[file].used = false;
	tracker->files[slot] = file;
}

/* A file goes to another tracker, or stays in a socket. */
static void pass_on(struct tracker *from, int slot)
{
	struct tracker *to = &trackers[next(&random_state) % TRACKERS];
	int free_slot = slot_with(to, false), file;

	order(from, GIVE, slot, 0, &file);
	if (next(&random_state) % 3 == 0 && kept_count < MAX_KEPT) {
		struct kept *entry = &kept[kept_count++];
		struct message message = { 0 };

		*entry = (struct kept){ .files = { from->files[slot], -1, -1, -1 } };
		if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, entry->sockets))
			die("socketpair");
		send_message(entry->sockets[0], &message, file);
		file_of[from->files[slot]].references++;
	} else if (free_slot >= 0) {
		order(to, TAKE, free_slot, 0, &file);
		to->files[free_slot] = from->files[slot];
		to->closes[free_slot] = false;
		file_of[from->files[slot]].references++;
	}
	close(file);
}

static void kill_while_it_asks(struct tracker *tracker, int slot)
{
	collect_by(tracker, slot);
	order(tracker, ASK_ON, slot, 0, NULL);
	/* Others go on meanwhile. */
	for (int i = 0; i < TRACKERS; i++) {
		int other = slot_with(&trackers[i], true);

		if (&trackers[i] == tracker || other < 0)
			continue;
		collect_by(&trackers[i], other);
		break;
	}
	usleep(next(&random_state) % 3000);
	kill(tracker->pid, SIGKILL);
	reap(tracker);
}

static void one_step(bool can_eat)
{
	struct tracker *tracker = &trackers[next(&random_state) % TRACKERS];
	int slot = slot_with(tracker, true), free_slot = slot_with(tracker, false);
	unsigned int choice = next(&random_state) % 20;

	if (kept_count && next(&random_state) % 8 == 0)
		forget_kept((int)(next(&random_state) % kept_count));
	if (slot < 0 && choice > 2)
		choice = 0;
	switch (choice) {
	case 0: case 1: case 2:
		if (free_slot >= 0)
			open_in(tracker, free_slot);
		break;
	case 3: case 4: case 5: case 6:
		order(tracker, CLOSE, slot, 0, NULL);
		drop(&tracker->files[slot]);
		break;
	case 7:
		if (free_slot < 0)
			break;
		order(tracker, DUPLICATE, slot, free_slot, NULL);
		tracker->files[free_slot] = tracker->files[slot];
		tracker->closes[free_slot] = false;
		file_of[tracker->files[slot]].references++;
		break;
	case 8:
		ask_by(tracker, slot);
		break;
	case 9: case 10: pass_on(tracker, slot); break;
	case 11:
		if (kept_count == MAX_KEPT)
			break;
		kept[kept_count] = (struct kept){ .pid = (pid_t)order(tracker, FORK, 0, 0, NULL) };
		for (int i = 0; i < SLOTS; i++) {
			kept[kept_count].files[i] = tracker->files[i];
			if (tracker->files[i] >= 0)
				file_of[tracker->files[i]].references++;
		}
		kept_count++;
		break;
	case 12:
		order(tracker, EXECUTE, 0, 0, NULL);
		for (int i = 0; i < SLOTS; i++)
			if (tracker->closes[i])
				drop(&tracker->files[i]);
		break;
	case 13:
		kill(tracker->pid, SIGKILL);
		reap(tracker);
		break;
	case 14:
		if (can_eat && next(&random_state) % 4 == 0) {
			struct message message = { .order = EAT };

			send_message(tracker->socket, &message, -1);
			reap(tracker);
		}
		break;
	case 15: kill_while_it_asks(tracker, slot); break;
	default:
		collect_by(tracker, slot);
	}
	if (!is_on())
		was_off = true;
}

static void compare(void)
{
	for (unsigned int thread = 0; thread < THREADS; thread++)
		for (unsigned int part = 0; part < PARTS; part++)
			for (unsigned int page = 0; page < 512 && part != control->empty[thread]; page++) {
				uint64_t *words = (uint64_t *)(copy + thread * ARENA + part * TABLE + page * PAGE);
				uint64_t truth = control->truth[thread][part][page];

				if (words[0] == truth && words[1 + truth % (WORDS - 1)] == truth)
					continue;
				printf("users: thread %u, part %u, page %u: %lu was written, the copy has %lu; tracking %s\n",
				       thread, part, page, truth, words[0], was_off ? "was off" : "was always on");
				fail("a write was missed", 1);
			}
}

/* Shared memory that has no entry, of which nothing is known when tracking was off. */
static void read_unpopulated(int file)
{
	static struct page_region regions[TABLE / PAGE];

	for (unsigned int thread = 0; thread < THREADS; thread++) {
		struct pm_scan_arg arg = { .start = (uintptr_t)part_of(thread, PARTS - 1),
					   .end = (uintptr_t)part_of(thread, PARTS), .vec = (uintptr_t)regions,
					   .vec_len = TABLE / PAGE, .category_anyof_mask = POPULATED,
					   .return_mask = POPULATED };
		uint64_t at = arg.start;
		long count = scan_once(file, &arg);

		if (count < 0)
			die("PAGEMAP_SCAN of what is populated");
		/* Holes are not reported as such: they are what the populated ranges leave. */
		for (long i = 0; i < count; at = regions[i++].end)
			read_pages(target, at, regions[i].start);
		read_pages(target, at, arg.end);
	}
}

static void check(void)
{
	struct tracker *tracker = &trackers[next(&random_state) % TRACKERS];
	bool model = is_on(), on;
	char path[64];
	int file, first = -1;
	uint64_t left;

	pause_trackee(true);
	snprintf(path, sizeof(path), "/proc/%d/pagemap", target);
	atomic_store(&control->probe, 1);
	while (atomic_load(&control->probe) != 2)
		usleep(200);
	file = open(path, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		die(path);
	on = count_pages(file, (uintptr_t)atomic_load(&control->probed), (uintptr_t)atomic_load(&control->probed) + PAGE, 0,
			 PAGE_IS_LWD_DIRTY, 0, 0);
	atomic_store(&control->probe, 3);
	while (atomic_load(&control->probe))
		usleep(200);
	if (on != model)
		fail(on ? "tracking is on, and no file is open that has restarted it" : "tracking has ended too early", 1);
	on_count += on;
	if (!model) {
		beginnings++;
		first = open(path, O_RDONLY | O_CLOEXEC);
		if (first < 0)
			die(path);
		begin(first);
		left = count_pages(file, (uintptr_t)base, arenas_end(), 0, PAGE_IS_LWD_DIRTY, PAGE_IS_LWD_DIRTY, POPULATED);
		if (left)
			fail("pages that do not count as written at a new beginning", left);
	}
	if (was_off)
		read_unpopulated(file);
	if (slot_with(tracker, true) < 0)
		open_in(tracker, 0);
	if (slot_with(tracker, true) < 0)
		fail("the model has no room", 0);
	for (int i = 0; i < 2; i++) {
		collect_by(tracker, slot_with(tracker, true));
		compare();
	}
	/* Huge pages may be made meanwhile of pages that are swapped out, and then count. */
	for (unsigned int thread = 0; thread < THREADS; thread++) {
		if (has_huge_pages(thread))
			continue;
		left = count_pages(file, (uintptr_t)part_of(thread, 0), (uintptr_t)part_of(thread, PARTS), 0,
				   PAGE_IS_LWD_DIRTY, 0, 0);
		if (left)
			fail("pages that count as written without a write", left);
	}
	close(file);
	/* Others have restarted it since. */
	if (first >= 0)
		close(first);
	was_off = false;
	checks++;
	pause_trackee(false);
}

/* Two trackers collect from a program that ends in the middle. */
static void collect_from_the_dying(bool can_eat)
{
	char *memory = mmap(NULL, 16 * TABLE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	unsigned int way = next(&random_state) % (can_eat ? 4 : 3);
	pid_t dying = fork(), other[2];
	char path[64];

	if (memory == MAP_FAILED || dying < 0)
		die("fork");
	if (!dying) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (int round = 0; round < 200; round++) {
			for (size_t at = 0; at < 16 * TABLE; at += PAGE * (1 + next(&random_state) % 32))
				memory[at] = 1;
			if (round == 20 && way == 1)
				execl("/bin/true", "true", NULL);
			if (round == 20 && way == 2)
				_exit(0);
			if (round == 20 && way == 3)
				eat_memory();
		}
		pause();
	}
	snprintf(path, sizeof(path), "/proc/%d/pagemap", dying);
	for (int i = 0; i < 2; i++) {
		other[i] = fork();
		if (other[i])
			continue;
		for (int file; (file = open(path, O_RDONLY)) >= 0; close(file))
			for (int round = 0; round < 3; round++) {
				struct pm_scan_arg arg = { .flags = round ? PM_SCAN_LWD_RESTART : 0,
							   .start = (uintptr_t)memory,
							   .end = (uintptr_t)memory + 16 * TABLE,
							   .category_mask = PAGE_IS_LWD_DIRTY,
							   .return_mask = PAGE_IS_LWD_DIRTY };

				if (scan_once(file, &arg) < 0)
					die("PAGEMAP_SCAN of a program that ends");
			}
		_exit(errno == ENOENT || errno == ESRCH ? 0 : 1);
	}
	usleep(next(&random_state) % 50000);
	if (way == 0)
		kill(dying, SIGKILL);
	waitpid(dying, NULL, 0);
	for (int i = 0; i < 2; i++) {
		int status;

		waitpid(other[i], &status, 0);
		if (status)
			fail("a tracker of a program that ends has failed", (unsigned long)status);
	}
	munmap(memory, 16 * TABLE);
}

/* Where a process gets no more than 32 MiB. */
static bool make_group(void)
{
	static const char *const settings[][2] = { { "memory.max", "32M" }, { "memory.swap.max", "0" } };
	char path[64];
	FILE *file = fopen("/sys/fs/cgroup/cgroup.subtree_control", "w");

	if (!file || fputs("+memory", file) < 0 || fclose(file))
		return false;
	if (mkdir("/sys/fs/cgroup/users", 0755) && errno != EEXIST)
		return false;
	for (int i = 0; i < 2; i++) {
		snprintf(path, sizeof(path), "/sys/fs/cgroup/users/%s", settings[i][0]);
		file = fopen(path, "w");
		if (file && (fputs(settings[i][1], file) < 0 || fclose(file)) && i == 0)
			return false;
	}
	return true;
}

static void map_all(void)
{
	int memory = memfd_create("users", 0);

	if (memory < 0 || ftruncate(memory, THREADS * TABLE))
		die("memfd_create");
	for (unsigned int thread = 0; thread < THREADS; thread++) {
		control->empty[thread] = 2;
		for (unsigned int part = 0; part < PRIVATE_PARTS; part++)
			map_part(thread, part, part == 2 ? PROT_NONE : PROT_READ | PROT_WRITE);
		if (mmap(part_of(thread, PARTS - 1), TABLE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory,
			 thread * TABLE) == MAP_FAILED)
			die("mmap of shared memory");
	}
	close(memory);
}

/* What a tracker that has executed itself knows. */
static void *inherited(const char *name, size_t size)
{
	int file = shm_open(name, O_RDWR | O_CREAT, 0600);
	void *at;

	if (file < 0 || ftruncate(file, (off_t)size))
		die("shm_open");
	at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (at == MAP_FAILED)
		die("mmap");
	close(file);
	return at;
}

int main(int argc, char **argv)
{
	/* Where the arenas are, in all programs. */
	base = (char *)0x100000000000;
	control = inherited("/users-control", sizeof(*control));
	copy = inherited("/users-copy", THREADS * ARENA);
	if (argc == 6 + SLOTS && !strcmp(argv[1], "track")) {
		struct message message = { .order = EXECUTE };
		int files[SLOTS];

		broken = atoi(argv[2]);
		for (int i = 0; i < SLOTS; i++)
			files[i] = atoi(argv[6 + i]);
		send_message(atoi(argv[3]), &message, -1);
		track(atoi(argv[3]), atoi(argv[4]), files, strtoul(argv[5], NULL, 10));
	}
	for (int option; (option = getopt(argc, argv, "s:r:b")) != -1;) {
		switch (option) {
		case 's': seconds = strtoul(optarg, NULL, 10); break;
		case 'r': seed = strtoul(optarg, NULL, 10); break;
		case 'b': broken = true; break;
		default: return 2;
		}
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	memset(control, 0, sizeof(*control));
	memset(copy, 0, THREADS * ARENA);
	control->driver = getpid();
	random_state = seed * 7919 + 1;
	/* Children of trackers that have ended are this program's. */
	prctl(PR_SET_CHILD_SUBREAPER, 1);
	map_all();
	bool can_eat = make_group();

	target = fork();
	if (target < 0)
		die("fork");
	if (!target)
		trackee();
	for (int i = 0; i < TRACKERS; i++)
		start_tracker(&trackers[i]);
	for (time_t end = time(NULL) + (time_t)seconds; broken ? control->forgotten < 5000 : time(NULL) < end;) {
		unsigned int steps = 1 + next(&random_state) % 12;

		for (unsigned int i = 0; i < steps; i++) {
			usleep(next(&random_state) % 5000);
			one_step(can_eat);
		}
		/* All end at once. */
		if (next(&random_state) % 5 == 0) {
			while (kept_count)
				forget_kept(0);
			for (int i = 0; i < TRACKERS; i++) {
				kill(trackers[i].pid, SIGKILL);
				reap(&trackers[i]);
			}
			was_off = true;
			usleep(next(&random_state) % 20000);
		}
		check();
		if (next(&random_state) % 8 == 0)
			collect_from_the_dying(can_eat);
	}
	while (kept_count)
		forget_kept(0);
	kill(target, SIGKILL);
	for (int i = 0; i < TRACKERS; i++)
		kill(trackers[i].pid, SIGKILL);
	shm_unlink("/users-control");
	shm_unlink("/users-copy");
	printf("users: nothing missed, seed %lu: %lu checks, tracking on in %lu, new beginnings %lu, %lu collects told of others, %lu trackers died%s, %lu operations, %lu collects, %lu pages reported\n",
	       seed, checks, on_count, beginnings, stale_collects, deaths, can_eat ? "" : " (none for want of memory)",
	       atomic_load(&control->operations), atomic_load(&control->collects), atomic_load(&control->reported));
	if (broken) {
		printf("users: %lu reports were forgotten, and it did not notice\n", atomic_load(&control->forgotten));
		return 3;
	}
	return 0;
}
