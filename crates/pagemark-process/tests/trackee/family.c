/* A family of processes that share anonymous memory. Each has a slot of 8 bytes in every page of it,
 * and records in private memory what it has written there. After every some writes it compares all
 * of its slots with the record: a difference goes to the file "bad", and the number of comparisons to
 * the file "round.N". */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 1500, OWN_PAGES = 200, FAMILY = 4, OF_CHILD = 8 };

static int me;
static uint64_t random_state;
static char *shared, *own;
static uint64_t record[PAGES], child_record[PAGES], own_record[OWN_PAGES];
static uint64_t value, rounds;

static uint64_t random_below(uint64_t limit) {
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state % limit;
}

static void fail(const char *what) {
	char text[200];
	int length = snprintf(text, sizeof text, "%d: %s, %s\n", me, what, strerror(errno));
	int file = open("bad", O_WRONLY | O_CREAT | O_APPEND, 0600);
	if (write(file, text, length) != length)
		_exit(3);
	_exit(2);
}

static void check(int holds, const char *what) {
	if (!holds)
		fail(what);
}

static volatile uint64_t *slot(uint64_t page, int number) {
	return (uint64_t *)(shared + page * PAGE) + number;
}

static void write_slots(uint64_t count) {
	for (uint64_t i = 0; i < count; i++) {
		uint64_t page = random_below(PAGES);
		record[page] = ++value;
		*slot(page, me) = value;
	}
}

static void compare(void) {
	char text[100];
	for (uint64_t page = 0; page < PAGES; page++) {
		if (*slot(page, me) != record[page] || *slot(page, me + OF_CHILD) != child_record[page]) {
			snprintf(text, sizeof text, "page %lu is %lu, child's %lu, not %lu and %lu", page, *slot(page, me),
				 *slot(page, me + OF_CHILD), record[page], child_record[page]);
			fail(text);
		}
	}
	for (uint64_t page = 0; own && page < OWN_PAGES; page++)
		check(*(volatile uint64_t *)(own + page * PAGE) == own_record[page], "own memory");
}

static void count(void) {
	char text[100];
	rounds++;
	snprintf(text, sizeof text, "round.%d", me);
	int file = open(text, O_WRONLY | O_CREAT, 0600);
	int length = snprintf(text, sizeof text, "%-20lu", rounds);
	check(pwrite(file, text, length, 0) == length, "round");
	close(file);
}

/* Moves all of the mapping. */
static void move(void) {
	char *target = mmap(0, PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	check(target != MAP_FAILED, "mmap");
	shared = mremap(shared, PAGES * PAGE, PAGES * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target);
	check(shared != MAP_FAILED, "mremap");
}

/* Unmaps the end after writing there, and maps it again. */
static void cut(void) {
	uint64_t rest = 1 + random_below(PAGES - 1);
	for (uint64_t page = rest; page < PAGES && page < rest + 20; page++) {
		record[page] = ++value;
		*slot(page, me) = value;
	}
	check(munmap(shared + rest * PAGE, (PAGES - rest) * PAGE) == 0, "munmap");
	usleep(random_below(30000));
	shared = mremap(shared, rest * PAGE, PAGES * PAGE, MREMAP_MAYMOVE);
	check(shared != MAP_FAILED, "mremap to a longer mapping");
}

/* A child writes and exits, perhaps after a while. */
static void have_child(void) {
	uint64_t from = random_below(PAGES), count = random_below(40), wrote = ++value, waits = random_below(3);
	pid_t child = fork();
	if (child == 0) {
		for (uint64_t page = from; page < from + count && page < PAGES; page++)
			*slot(page, me + OF_CHILD) = wrote;
		usleep(waits * 15000);
		_exit(0);
	}
	check(child > 0 && waitpid(child, 0, 0) == child, "child");
	for (uint64_t page = from; page < from + count && page < PAGES; page++)
		child_record[page] = wrote;
}

/* Has one page mapped. Maps one page more at a time, compares and writes it, and unmaps all but one. */
static void grow_and_shrink(void) {
	for (uint64_t page = 0; page < PAGES; page++) {
		if (page) {
			shared = mremap(shared, page * PAGE, (page + 1) * PAGE, MREMAP_MAYMOVE);
			check(shared != MAP_FAILED, "mremap by a page");
		}
		check(*slot(page, me) == record[page], "a mapping that grows");
		record[page] = ++value;
		*slot(page, me) = value;
	}
	check(munmap(shared + PAGE, (PAGES - 1) * PAGE) == 0, "munmap");
}

static void change_protection(void) {
	uint64_t first = random_below(PAGES - 10);
	check(mprotect(shared + first * PAGE, 10 * PAGE, random_below(2) ? PROT_READ : PROT_NONE) == 0, "mprotect");
	usleep(random_below(10000));
	check(mprotect(shared + first * PAGE, 10 * PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
}

/* Pages leave the page table after they were written; what was written stays. */
static void drop(void) {
	uint64_t first = random_below(PAGES - 600), count = random_below(600);
	write_slots(20);
	for (uint64_t page = first; page < first + count; page += 1 + random_below(50)) {
		record[page] = ++value;
		*slot(page, me) = value;
	}
	check(madvise(shared + first * PAGE, count * PAGE, MADV_DONTNEED) == 0, "madvise");
}

/* Memory that this process alone has: made, written, freed, unmapped. */
static void use_own(void) {
	if (!own) {
		int zero = open("/dev/zero", O_RDWR);
		int by_name = random_below(2);
		own = mmap(0, OWN_PAGES * PAGE, PROT_READ | PROT_WRITE, by_name ? MAP_SHARED : MAP_SHARED | MAP_ANONYMOUS,
			   by_name ? zero : -1, 0);
		check(own != MAP_FAILED, "mmap");
		close(zero);
		memset(own_record, 0, sizeof own_record);
	} else if (random_below(6) == 0) {
		check(munmap(own, OWN_PAGES * PAGE) == 0, "munmap");
		own = 0;
		return;
	} else if (random_below(3) == 0) {
		uint64_t page = random_below(OWN_PAGES);
		check(madvise(own + page * PAGE, PAGE, MADV_REMOVE) == 0, "madvise");
		own_record[page] = ++value;
		*(volatile uint64_t *)(own + page * PAGE) = value;
	}
	for (int i = 0; i < 20; i++) {
		uint64_t page = random_below(OWN_PAGES);
		own_record[page] = ++value;
		*(volatile uint64_t *)(own + page * PAGE) = value;
	}
}

int main(void) {
	shared = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	check(shared != MAP_FAILED, "mmap");
	for (int i = 1; i < FAMILY; i++) {
		if (fork() == 0) {
			me = i;
			break;
		}
	}
	random_state = 88172645463325252ULL + 7919 * me;
	int is_growing = me == FAMILY - 1;
	if (is_growing)
		check(munmap(shared + PAGE, (PAGES - 1) * PAGE) == 0, "munmap");
	for (;;) {
		if (is_growing) {
			grow_and_shrink();
			count();
			usleep(random_below(10000));
			continue;
		}
		write_slots(1 + random_below(100));
		switch (random_below(12)) {
		case 0: move(); break;
		case 1: cut(); break;
		case 2: case 3: have_child(); break;
		case 4: change_protection(); break;
		case 5: drop(); break;
		default: use_own(); break;
		}
		compare();
		count();
		usleep(random_below(4000));
	}
}
