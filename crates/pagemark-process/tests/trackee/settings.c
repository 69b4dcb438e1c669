/* Threads with settings of their own: the processors on which they run, the priority of their input
 * and output, their slices, their timer slack, their personality, and when they get SIGBUS for lost
 * memory. The process has a filter for core files, and its memory is merged. Once there is a file "ask.N", the program writes
 * what all threads see of themselves to the file "seen.N". */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef PR_SET_MEMORY_MERGE
#define PR_SET_MEMORY_MERGE 67
#define PR_GET_MEMORY_MERGE 68
#endif

enum { THREADS = 4 };

static pthread_barrier_t begin, end;
static char seen[THREADS][400];
static int processors[1024], count;

/* What the scheduler has of this thread, as all kernels have it. */
static _Thread_local struct {
	unsigned size, policy;
	unsigned long flags;
	int nice;
	unsigned priority;
	unsigned long slice[3];
} attributes;

static unsigned long slice(void) {
	memset(&attributes, 0, sizeof attributes);
	syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0);
	return attributes.slice[0];
}

static void look(int number) {
	cpu_set_t set;
	sched_getaffinity(0, sizeof set, &set);
	int length = snprintf(seen[number], sizeof seen[number], "thread %d: processors", number);
	for (int i = 0; i < CPU_SETSIZE && length < 200; i++)
		if (CPU_ISSET(i, &set))
			length += snprintf(seen[number] + length, sizeof seen[number] - length, " %d", i);
	snprintf(seen[number] + length, sizeof seen[number] - length, "; priority %ld; slack %ld; slice %lu; "
		 "personality %x; memory failure %d\n",
		 syscall(SYS_ioprio_get, 1, 0), (long)prctl(PR_GET_TIMERSLACK), slice(), personality(0xffffffff),
		 prctl(PR_MCE_KILL_GET, 0, 0, 0, 0));
}

/* The first thread keeps what it was given. */
static void set(int number) {
	cpu_set_t one;
	if (number == 0)
		return;
	CPU_ZERO(&one);
	CPU_SET(processors[number % count], &one);
	sched_setaffinity(0, sizeof one, &one);
	syscall(SYS_ioprio_set, 1, 0, (number == 3 ? 3 << 13 : 2 << 13 | number));
	prctl(PR_SET_TIMERSLACK, 1000 * number);
	if (number != 3)
		personality(number == 1 ? ADDR_NO_RANDOMIZE | UNAME26 : ADDR_COMPAT_LAYOUT);
	prctl(PR_MCE_KILL, PR_MCE_KILL_SET, number == 1 ? PR_MCE_KILL_EARLY : PR_MCE_KILL_LATE, 0, 0);
	/* Before Linux 6.12, nothing asks for a slice. */
	if (number == 2 && slice()) {
		attributes.slice[0] = 7000000;
		syscall(SYS_sched_setattr, 0, &attributes, 0);
	}
}

static void *run(void *argument) {
	int number = (int)(long)argument;
	set(number);
	for (;;) {
		pthread_barrier_wait(&begin);
		look(number);
		pthread_barrier_wait(&end);
	}
}

static void report(const char *name) {
	char text[4096] = "", line[100] = "", temporary[64];
	FILE *file = fopen("/proc/self/coredump_filter", "r");
	if (file) {
		if (fgets(line, sizeof line, file))
			strcat(strcat(text, "core dump filter "), line);
		fclose(file);
	}
	snprintf(line, sizeof line, "merged %d\n", prctl(PR_GET_MEMORY_MERGE, 0, 0, 0, 0));
	strcat(text, line);
	pthread_barrier_wait(&begin);
	look(0);
	pthread_barrier_wait(&end);
	for (int i = 0; i < THREADS; i++)
		strcat(text, seen[i]);
	snprintf(temporary, sizeof temporary, "%s.new", name);
	file = fopen(temporary, "w");
	fputs(text, file);
	fclose(file);
	rename(temporary, name);
}

int main(void) {
	cpu_set_t all;
	sched_getaffinity(0, sizeof all, &all);
	for (int i = 0; i < CPU_SETSIZE; i++)
		if (CPU_ISSET(i, &all))
			processors[count++] = i;
	FILE *file = fopen("/proc/self/coredump_filter", "w");
	if (file) {
		fputs("0x73", file);
		fclose(file);
	}
	prctl(PR_SET_MEMORY_MERGE, 1, 0, 0, 0);
	pthread_barrier_init(&begin, NULL, THREADS);
	pthread_barrier_init(&end, NULL, THREADS);
	for (long i = 1; i < THREADS; i++) {
		pthread_t thread;
		pthread_create(&thread, NULL, run, (void *)i);
	}
	for (int number = 0;;) {
		char name[32];
		snprintf(name, sizeof name, "ask.%d", number);
		if (access(name, F_OK) == 0) {
			snprintf(name, sizeof name, "seen.%d", number++);
			report(name);
		}
		usleep(2000);
	}
}
