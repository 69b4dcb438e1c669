// The time, by functions and by system calls: none goes backwards where the other has been, in no
// thread, child or program that is executed. With an argument, what was read before it was executed;
// with "without", the kernel's data is replaced.
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SHOW(what) printf("%d: %s = %ld\n", __LINE__, #what, (long)(what))

static long by_function(int clock)
{
	struct timespec t = {-1, -1};
	return clock_gettime(clock, &t) ? -1 : t.tv_sec * 1000000000 + t.tv_nsec;
}

static long by_call(int clock)
{
	struct timespec t = {-1, -1};
	return syscall(SYS_clock_gettime, clock, &t) ? -1 : t.tv_sec * 1000000000 + t.tv_nsec;
}

// How often the clock goes back, or the two differ by a second.
static long back(int clock, int rounds)
{
	long bad = 0, last = by_call(clock);
	for (int i = 0; i < rounds; i++) {
		long now = i & 1 ? by_call(clock) : by_function(clock);
		// The real time may be set meanwhile, by little.
		long least = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI
				     ? last - 1000000000 : last;
		bad += now < least || now > last + 60 * 1000000000L;
		last = now;
	}
	return bad;
}

static atomic_long latest, bad;

static void *compare(void *argument)
{
	for (int i = 0; i < 500; i++) {
		long before = atomic_load(&latest);
		long now = i & 7 ? by_function(CLOCK_MONOTONIC) : by_call(CLOCK_MONOTONIC);
		bad += now < before;
		while (before < now && !atomic_compare_exchange_weak(&latest, &before, now))
			;
	}
	return 0;
}

int main(int count, char **arguments)
{
	setvbuf(stdout, 0, _IONBF, 0);
	if (count > 1 && !strcmp(arguments[1], "without")) {
		char *vdso = (char *)getauxval(AT_SYSINFO_EHDR);
		if (!vdso) {
			puts("no vDSO");
			return 0;
		}
		SHOW(back(CLOCK_MONOTONIC, 100));
		SHOW(mmap(vdso - 4 * 4096, 4 * 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
		     vdso - 4 * 4096);
		SHOW(back(CLOCK_MONOTONIC_COARSE, 100));
	}
	if (count > 1 && atol(arguments[1]))
		SHOW(by_function(CLOCK_MONOTONIC) > atol(arguments[1]));
	int clocks[] = {CLOCK_REALTIME, CLOCK_MONOTONIC, CLOCK_PROCESS_CPUTIME_ID, CLOCK_THREAD_CPUTIME_ID,
			CLOCK_MONOTONIC_RAW, CLOCK_REALTIME_COARSE, CLOCK_MONOTONIC_COARSE, CLOCK_BOOTTIME,
			CLOCK_REALTIME_ALARM, CLOCK_BOOTTIME_ALARM, 10, CLOCK_TAI, 12, 99, -1};
	for (int i = 0; i < sizeof clocks / sizeof *clocks; i++) {
		struct timespec a = {-1, -1}, b = {-1, -1};
		printf("clock %d\n", clocks[i]);
		SHOW(by_function(clocks[i]) == -1);
		SHOW(back(clocks[i], 300));
		SHOW(clock_getres(clocks[i], &a));
		SHOW(syscall(SYS_clock_getres, clocks[i], &b));
		SHOW(a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec);
	}
	struct timeval now;
	struct timezone zone, zone_of_call;
	for (int i = 0; i < 50; i++) {
		long before = by_call(CLOCK_REALTIME) / 1000;
		gettimeofday(&now, &zone);
		bad += labs(now.tv_sec * 1000000 + now.tv_usec - before) > 60000000;
		bad += labs(time(0) - before / 1000000) > 60;
	}
	syscall(SYS_gettimeofday, 0, &zone_of_call);
	SHOW(memcmp(&zone, &zone_of_call, sizeof zone));
	cpu_set_t all, one;
	sched_getaffinity(0, sizeof all, &all);
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (!CPU_ISSET(cpu, &all))
			continue;
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		sched_setaffinity(0, sizeof one, &one);
		bad += sched_getcpu() != cpu;
	}
	sched_setaffinity(0, sizeof all, &all);
	SHOW(bad);
	pthread_t threads[4];
	for (int i = 0; i < 4; i++)
		pthread_create(&threads[i], 0, compare, 0);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], 0);
	SHOW(bad);
	long before = by_function(CLOCK_MONOTONIC);
	int status;
	pid_t child = fork();
	if (!child) {
		long found = by_function(CLOCK_MONOTONIC);
		_exit(found > before && found < by_call(CLOCK_MONOTONIC) && !back(CLOCK_BOOTTIME, 50) ? 7 : 8);
	}
	waitpid(child, &status, 0);
	SHOW(WEXITSTATUS(status));
	child = vfork();
	if (!child)
		_exit(by_function(CLOCK_MONOTONIC) > before ? 9 : 10);
	waitpid(child, &status, 0);
	SHOW(WEXITSTATUS(status));
	unsigned char random[64] = {0};
	SHOW(getrandom(random, sizeof random, 0));
	// The library is memory of the program.
	char *vdso = (char *)getauxval(AT_SYSINFO_EHDR);
	SHOW(!vdso || !memcmp(vdso, "\177ELF", 4));
	int pipes[2];
	if (vdso && !pipe(pipes))
		SHOW(write(pipes[1], vdso, 64));
	if (count > 1)
		return 0;
	char text[32];
	sprintf(text, "%ld", by_function(CLOCK_MONOTONIC));
	execl(arguments[0], arguments[0], text, (char *)0);
	return 1;
}
