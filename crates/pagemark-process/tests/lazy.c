/*
 * Waits for the file "go". Then threads write, drop, unmap, move, grow and shrink memory, and fork
 * children that do the same, and compare all of it with what they did. The file "half" says that half
 * of the steps are done, the file "result" how it ended.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 4
#define SLOTS 6
#define PAGES 192
#define MAX_PAGES 256
#define STEPS 400
#define PAGE 4096
#define WORDS (PAGE / 8)

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

struct slot {
	uint64_t *memory;
	long pages;
	/* What each page was filled from; 0 for zeros. */
	uint64_t seeds[MAX_PAGES];
};

/* In shared memory, which is not delivered lazily. */
static struct shared {
	struct slot slots[THREADS][SLOTS];
	long steps[THREADS];
	uint64_t other[WORDS];
} *shared;

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
	x = (x ^ x >> 27) * 0x94d049bb133111eb;
	return x ^ x >> 31;
}

static void report(const char *format, ...)
{
	char text[200];
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(text, sizeof text, format, arguments);
	va_end(arguments);
	int file = open("result.new", O_CREAT | O_WRONLY | O_TRUNC, 0600);
	if (write(file, text, strlen(text)) < 0 || rename("result.new", "result"))
		_exit(3);
	_exit(2);
}

static uint64_t word(uint64_t seed, int i) { return seed ? mix(seed + i) : 0; }

static void fill(struct slot *slot, long page, uint64_t seed)
{
	uint64_t *memory = slot->memory + page * WORDS;
	for (int i = 0; i < WORDS; i++)
		memory[i] = word(seed, i);
	slot->seeds[page] = seed;
}

static void check(struct slot *slot, long page, const char *who)
{
	uint64_t *memory = slot->memory + page * WORDS;
	for (int i = 0; i < WORDS; i++)
		if (memory[i] != word(slot->seeds[page], i))
			report("%s: page %ld of %p, word %d is %lx and not %lx", who, page, (void *)slot->memory, i,
			       memory[i], word(slot->seeds[page], i));
}

static void check_all(struct slot *slots, const char *who)
{
	for (int s = 0; s < SLOTS; s++)
		for (long page = 0; page < slots[s].pages; page++)
			check(&slots[s], page, who);
}

static void *map(void *at, long pages, int flags)
{
	void *memory = mmap(at, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
	if (memory == MAP_FAILED)
		report("mmap fails");
	return memory;
}

static void moved(struct slot *slot, void *memory)
{
	if (memory == MAP_FAILED)
		report("mremap fails");
	slot->memory = memory;
}

/* One step in the memory of a thread. */
static void step(struct slot *slots, uint64_t *random, const char *who)
{
	uint64_t r = *random = mix(*random);
	struct slot *slot = &slots[r % SLOTS];
	r >>= 8;
	long first = r % slot->pages;
	r >>= 16;
	long count = 1 + r % 16;
	if (count > slot->pages - first)
		count = slot->pages - first;
	r >>= 8;
	long size = slot->pages * PAGE;
	/* Until all memory is there, what was mapped since the restore is a mapping of its own, and Linux
	   moves one mapping at a time. */
	int split = slot - slots >= SLOTS / 2;
	switch (r % 10) {
	case 0: case 1:
		for (long page = first; page < first + count; page++)
			fill(slot, page, r + page + 1);
		break;
	case 2: case 3: case 4:
		for (long page = first; page < first + count; page++)
			check(slot, page, who);
		break;
	case 5:
		madvise((char *)slot->memory + first * PAGE, count * PAGE, MADV_DONTNEED);
		memset(slot->seeds + first, 0, count * 8);
		break;
	case 6:
		/* What was there is unmapped. */
		if (!split)
			break;
		map((char *)slot->memory + first * PAGE, count, MAP_FIXED);
		memset(slot->seeds + first, 0, count * 8);
		break;
	case 7: {
		/* A part of it, and then all of it. */
		if (split)
			break;
		char *place = map(NULL, slot->pages, 0);
		if (mremap((char *)slot->memory + first * PAGE, count * PAGE, count * PAGE,
			   MREMAP_MAYMOVE | MREMAP_FIXED, place + first * PAGE) == MAP_FAILED ||
		    (first && mremap(slot->memory, first * PAGE, first * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED,
				     place) == MAP_FAILED))
			report("mremap of a part fails");
		first += count;
		count = slot->pages - first;
		if (count && mremap((char *)slot->memory + first * PAGE, count * PAGE, count * PAGE,
				    MREMAP_MAYMOVE | MREMAP_FIXED, place + first * PAGE) == MAP_FAILED)
			report("mremap of the rest fails");
		moved(slot, place);
		break;
	}
	case 8: {
		/* The old place is mapped, and empty. */
		if (!split)
			break;
		void *place = map(NULL, slot->pages, 0);
		uint64_t *old = slot->memory;
		if (mremap(old, PAGE, PAGE, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, place) == MAP_FAILED) {
			munmap(place, size);
			break;
		}
		if (old[3] != 0)
			report("%s: a page is at two places", who);
		munmap(place, size);
		memset(slot->seeds, 0, 8);
		break;
	}
	case 9: {
		/* Grows or shrinks, if it is one mapping. */
		long pages = slot->pages + count <= MAX_PAGES ? slot->pages + count : slot->pages - count;
		void *memory = mremap(slot->memory, size, pages * PAGE, MREMAP_MAYMOVE);
		if (memory == MAP_FAILED)
			break;
		for (long page = slot->pages; page < pages; page++)
			slot->seeds[page] = 0;
		slot->pages = pages;
		moved(slot, memory);
		break;
	}
	}
}

/* A child does the same in its own memory, and a child of that child checks it. */
static void with_children(struct slot *slots, uint64_t random, int depth)
{
	pid_t pid = fork();
	if (pid == 0) {
		/* Of its own from here on. */
		struct slot *own = mmap(NULL, sizeof(struct slot) * SLOTS, PROT_READ | PROT_WRITE,
					MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		memcpy(own, slots, sizeof(struct slot) * SLOTS);
		for (int i = 0; i < 30; i++)
			step(own, &random, "child");
		if (depth < 2)
			with_children(own, random, depth + 1);
		check_all(own, "child");
		_exit(0);
	}
	int status;
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		report("fork fails");
	if (status != 0)
		_exit(4);
}

static void *work(void *argument)
{
	long me = (long)argument;
	struct slot *slots = shared->slots[me];
	uint64_t random = me + 1;
	while (access("go", F_OK))
		usleep(1000);
	for (long n = 0; n < STEPS; n++) {
		step(slots, &random, "thread");
		if (n % 100 == 50)
			with_children(slots, random, 0);
		__atomic_store_n(&shared->steps[me], n, __ATOMIC_RELEASE);
	}
	check_all(slots, "at the end");
	return NULL;
}

int main(void)
{
	pthread_t threads[THREADS];
	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (int t = 0; t < THREADS; t++)
		for (int s = 0; s < SLOTS; s++) {
			struct slot *slot = &shared->slots[t][s];
			slot->pages = PAGES;
			slot->memory = map(NULL, PAGES, 0);
			if (s == 1)
				madvise(slot->memory, PAGES * PAGE, MADV_HUGEPAGE);
			for (long page = 0; page < PAGES; page++)
				if (page % 7)
					fill(slot, page, mix(t * 1000 + s * 100 + page) | 1);
		}
	/* Explicit huge pages, where there are any. */
	long *huge = mmap(NULL, 2 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
	if (huge != MAP_FAILED)
		huge[1000] = 1000;
	for (int i = 0; i < WORDS; i++)
		shared->other[i] = mix(i);
	for (long t = 0; t < THREADS; t++)
		pthread_create(&threads[t], NULL, work, (void *)t);
	close(open("ready", O_CREAT | O_WRONLY, 0600));
	for (int t = 0; t < THREADS; t++)
		while (__atomic_load_n(&shared->steps[t], __ATOMIC_ACQUIRE) < STEPS / 2)
			usleep(1000);
	close(open("half", O_CREAT | O_WRONLY, 0600));
	for (int t = 0; t < THREADS; t++)
		pthread_join(threads[t], NULL);
	if (huge != MAP_FAILED && huge[1000] != 1000)
		report("the huge page is wrong");
	for (int i = 0; i < WORDS; i++)
		if (shared->other[i] != mix(i))
			report("shared memory is wrong");
	report("right");
}
