// Threads: shared memory, locks, thread-local storage, signals, cancellation, ends.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SHOW(what) printf("%d: %s = %ld\n", __LINE__, #what, (long)(what))
#define THREADS 8

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static pthread_barrier_t barrier;
static long counter, turns;
static _Thread_local long own;
static atomic_long handled, atomic, bad;
static pthread_t last_handler;

static void *count(void *argument)
{
	double x = (long)argument;
	own = (long)argument;
	pthread_barrier_wait(&barrier);
	for (int i = 0; i < 20000; i++) {
		pthread_mutex_lock(&lock);
		counter++;
		pthread_mutex_unlock(&lock);
		atomic++;
		x = x * 1.0 + 0.0;
	}
	if (own != (long)argument || x != (double)(long)argument)
		bad++;
	return (void *)(own * 2);
}

// Maps and unmaps memory while others do the same.
static void *map(void *argument)
{
	for (int i = 0; i < 200; i++) {
		size_t size = 4096 * (1 + (i * 7 + (long)argument) % 64);
		char *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		for (size_t at = 0; at < size; at += 4096) {
			if (p[at])
				bad++;
			p[at] = (char)(long)argument + 1;
		}
		for (size_t at = 0; at < size; at += 4096)
			if (p[at] != (char)(long)argument + 1)
				bad++;
		mprotect(p, size, PROT_READ);
		munmap(p, size);
	}
	return 0;
}

static void *turn(void *argument)
{
	for (int i = 0; i < 100; i++) {
		pthread_mutex_lock(&lock);
		while (turns % 2 != (long)argument)
			pthread_cond_wait(&condition, &lock);
		turns++;
		pthread_cond_broadcast(&condition);
		pthread_mutex_unlock(&lock);
	}
	return 0;
}

static void handler(int number)
{
	handled++;
	last_handler = pthread_self();
}

static void *spin(void *argument)
{
	while (!handled)
		;
	return 0;
}

static void *sleeper(void *argument)
{
	for (;;)
		pause();
}

// A group that the other thread changes meanwhile.
static void *group(void *argument)
{
	pthread_barrier_wait(&barrier);
	pthread_barrier_wait(&barrier);
	return (void *)syscall(SYS_getegid);
}

static pthread_mutex_t robust;

static atomic_int holds, taken;

static void *dies(void *argument)
{
	pthread_mutex_lock(&robust);
	taken = 1;
	while (holds)
		usleep(100);
	return 0;
}

static void *waits_for_robust(void *argument)
{
	return (void *)(long)pthread_mutex_lock(&robust);
}

static void *finish(void *argument)
{
	usleep(50000);
	printf("the last thread\n");
	fflush(stdout);
	syscall(SYS_exit_group, 6);
	return 0;
}

int main(void)
{
	pthread_t threads[THREADS];
	void *result;
	long sum = 0;
	pthread_barrier_init(&barrier, 0, THREADS);
	for (long i = 0; i < THREADS; i++)
		pthread_create(&threads[i], 0, count, (void *)i);
	for (int i = 0; i < THREADS; i++) {
		pthread_join(threads[i], &result);
		sum += (long)result;
	}
	SHOW(sum);
	SHOW(counter);
	SHOW(atomic);
	SHOW(own);
	for (long i = 0; i < THREADS; i++)
		pthread_create(&threads[i], 0, map, (void *)i);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], 0);
	SHOW(bad);
	pthread_create(&threads[0], 0, turn, (void *)0);
	pthread_create(&threads[1], 0, turn, (void *)1);
	pthread_join(threads[0], 0);
	pthread_join(threads[1], 0);
	SHOW(turns);

	// The C library has all threads change their group: it sends them a signal of its own.
	gid_t before = getegid();
	pthread_barrier_init(&barrier, 0, 2);
	pthread_create(&threads[0], 0, group, 0);
	pthread_barrier_wait(&barrier);
	SHOW(setegid(geteuid() ? before : 7));
	pthread_barrier_wait(&barrier);
	pthread_join(threads[0], &result);
	SHOW(result);
	SHOW(setegid(before));

	// Many threads, one after another.
	for (int i = 0; i < 200; i++) {
		pthread_barrier_init(&barrier, 0, 1);
		pthread_create(&threads[0], 0, turn, (void *)(long)(turns % 2));
		pthread_cancel(threads[0]);
		turns = 0;
		pthread_join(threads[0], &result);
		pthread_mutex_init(&lock, 0);
		turns = 0;
	}

	// A signal for a thread that computes, and for one that waits.
	struct sigaction action = {.sa_handler = handler};
	sigaction(SIGUSR1, &action, 0);
	pthread_create(&threads[0], 0, spin, 0);
	usleep(20000);
	SHOW(pthread_kill(threads[0], SIGUSR1));
	pthread_join(threads[0], 0);
	SHOW(pthread_equal(last_handler, threads[0]) != 0);
	pthread_create(&threads[0], 0, sleeper, 0);
	usleep(20000);
	pthread_kill(threads[0], SIGUSR1);
	while (handled != 2)
		usleep(1000);
	SHOW(pthread_cancel(threads[0]));
	pthread_join(threads[0], &result);
	SHOW(result == PTHREAD_CANCELED);
	pthread_mutexattr_t attributes;
	pthread_mutexattr_init(&attributes);
	pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(&robust, &attributes);
	pthread_create(&threads[0], 0, dies, 0);
	pthread_join(threads[0], 0);
	SHOW(pthread_mutex_lock(&robust));
	// Each time right after the join, and its stack, where the list is, may go. A waiter is woken.
	int found = 0, waiters = 0;
	for (int i = 0; i < 100; i++) {
		size_t bytes = 256 << 10;
		char *stack = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		pthread_attr_t own;
		pthread_attr_init(&own);
		pthread_attr_setstack(&own, stack, bytes);
		memset(&robust, 0, sizeof robust);
		if (i % 3 == 1)
			pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_INHERIT);
		else
			pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_NONE);
		pthread_mutex_init(&robust, &attributes);
		holds = i % 3 == 2;
		pthread_create(&threads[0], &own, dies, 0);
		if (holds) {
			while (!taken)
				usleep(100);
			pthread_create(&threads[1], 0, waits_for_robust, 0);
			usleep(1000);
			holds = 0;
			pthread_join(threads[1], &result);
			waiters += (long)result == EOWNERDEAD;
		}
		pthread_join(threads[0], 0);
		munmap(stack, bytes);
		if (i % 3 != 2)
			found += pthread_mutex_trylock(&robust) == EOWNERDEAD;
		taken = 0;
	}
	SHOW(found);
	SHOW(waiters);
	SHOW(syscall(SYS_gettid) == getpid());
	fflush(stdout);
	pthread_create(&threads[0], 0, finish, 0);
	pthread_exit(0);
}
