// Accesses for which the file of a mapping has no page, by instructions that also access other
// memory, while other threads use pages nearby. Each signal must name the page behind the end.
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MEBIBYTE = 1 << 20, BEHIND = 3 * MEBIBYTE / 2, SIGNALS = 100 };

static sigjmp_buf back;
static char *file, *other;
static volatile long wrong, others;
static volatile int stop;

static void handler(int number, siginfo_t *info, void *context)
{
	char *at = info->si_addr;
	others += number != SIGBUS || info->si_code != BUS_ADRERR;
	wrong += at < file + BEHIND || at >= file + BEHIND + 4096;
	siglongjmp(back, 1);
}

static void *uses_neighbours(void *argument)
{
	while (!stop) {
		madvise(file, MEBIBYTE, MADV_DONTNEED);
		for (int page = 0; page < 256; page += 16)
			(void)*(volatile char *)(file + page * 4096);
	}
	return 0;
}

static void *drops(void *argument)
{
	while (!stop)
		madvise(other, 4096, MADV_DONTNEED);
	return 0;
}

static void access_behind(int way)
{
	char *here = other, *there = file + BEHIND + 8;
	long count = 8;
	switch (way) {
	case 0:
		__asm__ volatile("movsb" : "+S"(here), "+D"(there)::"memory");
		break;
	case 1:
		__asm__ volatile("movsb" : "+S"(there), "+D"(here)::"memory");
		break;
	case 2:
		__asm__ volatile("rep movsb" : "+S"(here), "+D"(there), "+c"(count)::"memory");
		break;
	case 3:
		__asm__ volatile("push (%0)" ::"r"(there) : "memory");
		break;
	case 4:
		__asm__ volatile("lock incl 16(%0,%1,4)" ::"r"(there), "r"(count) : "memory");
		break;
	case 5:
		// Over the end of the page before, which there is.
		(void)*(volatile long *)(file + BEHIND + 4092);
		break;
	}
}

int main(void)
{
	struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
	sigaction(SIGBUS, &action, 0);
	sigaction(SIGSEGV, &action, 0);
	int fd = memfd_create("file", 0);
	ftruncate(fd, MEBIBYTE);
	char *room = mmap(0, 6 * MEBIBYTE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	room = (char *)(((unsigned long)room + 2 * MEBIBYTE - 1) & -2ul * MEBIBYTE);
	file = mmap(room, 2 * MEBIBYTE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
	other = mmap(room + 2 * MEBIBYTE, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	pthread_t threads[2];
	pthread_create(&threads[0], 0, uses_neighbours, 0);
	pthread_create(&threads[1], 0, drops, 0);
	for (volatile int way = 0; way < 6; way++) {
		wrong = others = 0;
		for (volatile int i = 0; i < SIGNALS; i++)
			if (!sigsetjmp(back, 1)) {
				access_behind(way);
				printf("no signal\n");
			}
		printf("way %d: %ld wrong addresses, %ld other signals\n", way, wrong, others);
	}
	stop = 1;
	pthread_join(threads[0], 0);
	pthread_join(threads[1], 0);
	// Code that is not there.
	void (*code)(void) = mmap(0, 4096, PROT_READ | PROT_EXEC, MAP_SHARED, fd, 2 * MEBIBYTE);
	file = (char *)code - BEHIND;
	wrong = others = 0;
	if (!sigsetjmp(back, 1))
		code();
	printf("code: %ld wrong addresses, %ld other signals\n", wrong, others);
	return 0;
}
