/* A program whose threads are in each state that a checkpoint of a machine must keep: computing in vector registers,
 * blocked in a read, asleep, waiting for a lock, handling signals; and a child. It checks itself, and writes a line
 * `ok N` to the file `progress` of its directory after each round, or what is wrong to `violated`. */
#define _GNU_SOURCE
#include <errno.h>
#include <immintrin.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *directory;
static atomic_long loops, naps, alarms, turns;
static int to_thread[2], from_thread[2], to_child[2], from_child[2];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static long turn;

static void violated(const char *what, long a, long b)
{
	char path[4096];
	snprintf(path, sizeof path, "%s/violated", directory);
	FILE *file = fopen(path, "w");
	fprintf(file, "%s: %ld, %ld (errno %d)\n", what, a, b, errno);
	fclose(file);
	_exit(3);
}

/* Patterns stay in registers for some milliseconds, without a system call. */
__attribute__((target("avx2"))) static void *compute(void *unused)
{
	for (;;) {
		long seed = atomic_load(&loops), steps = 5000000;
		__m256i pattern = _mm256_set_epi64x(seed, ~seed, seed * 3, seed * 5), kept[4];
		double x = 1.0 + seed;
		__asm__ volatile(
			"vmovdqa %[pattern], %%ymm8\n vpaddq %%ymm8, %%ymm8, %%ymm9\n"
			"vpaddq %%ymm9, %%ymm8, %%ymm10\n vpaddq %%ymm10, %%ymm8, %%ymm15\n"
			"fldl %[x]\n"
			"1: dec %[steps]\n jnz 1b\n"
			"fstpl %[x]\n"
			"vmovdqu %%ymm8, 0(%[kept])\n vmovdqu %%ymm9, 32(%[kept])\n"
			"vmovdqu %%ymm10, 64(%[kept])\n vmovdqu %%ymm15, 96(%[kept])\n"
			: [steps] "+r"(steps), [x] "+m"(x)
			: [pattern] "m"(pattern), [kept] "r"(kept)
			: "xmm8", "xmm9", "xmm10", "xmm15", "memory");
		for (int lane = 0; lane < 4; lane++)
			for (int k = 0; k < 4; k++) {
				int64_t is = ((int64_t *)&kept[k])[lane], was = ((int64_t *)&pattern)[lane];
				if (is != was * (k + 1))
					violated("a vector register", k, lane);
			}
		if (x != 1.0 + seed)
			violated("a floating-point register", seed, 0);
		atomic_fetch_add(&loops, 1);
	}
	return unused;
}

static void *echo(void *unused)
{
	for (;;) {
		long value;
		if (read(to_thread[0], &value, sizeof value) != sizeof value)
			violated("the thread's read", 0, 0);
		if (write(from_thread[1], &value, sizeof value) != sizeof value)
			violated("the thread's write", 0, 0);
	}
	return unused;
}

static void *nap(void *unused)
{
	for (;;) {
		struct timespec time = {0, 30000000};
		while (nanosleep(&time, &time) != 0)
			if (errno != EINTR)
				violated("nanosleep", 0, 0);
		atomic_fetch_add(&naps, 1);
	}
	return unused;
}

static void *take_turns(void *unused)
{
	pthread_mutex_lock(&lock);
	for (;;) {
		while (turn % 2 == 0)
			pthread_cond_wait(&changed, &lock);
		turn++;
		atomic_fetch_add(&turns, 1);
		pthread_cond_broadcast(&changed);
	}
	return unused;
}

static long now(int by_call, int clock)
{
	struct timespec time = {-1, -1};
	if (by_call ? syscall(SYS_clock_gettime, clock, &time) : clock_gettime(clock, &time))
		violated("clock_gettime", by_call, clock);
	return time.tv_sec * 1000000000 + time.tv_nsec;
}

/* The time of functions is that of system calls, and does not go back. */
static void check_time(long *last)
{
	for (int i = 0; i < 20; i++) {
		long time = now(i & 1, CLOCK_MONOTONIC), coarse = now(i & 1, CLOCK_MONOTONIC_COARSE);
		if (time < *last || time - *last > 3600 * 1000000000L)
			violated("the time", *last, time);
		if (coarse > now(1, CLOCK_MONOTONIC) || time - coarse > 10 * 1000000000L)
			violated("the coarse time", coarse, time);
		*last = time;
	}
}

static void on_alarm(int number)
{
	/* The handler's own use of the registers. */
	volatile double x = number;
	for (int i = 0; i < 100; i++)
		x = x * 1.5 - 1;
	atomic_fetch_add(&alarms, 1);
}

static void transfer(int fd, void *value, int writes)
{
	ssize_t done;
	do
		done = writes ? write(fd, value, sizeof(long)) : read(fd, value, sizeof(long));
	while (done < 0 && errno == EINTR);
	if (done != sizeof(long))
		violated(writes ? "a write" : "a read", fd, done);
}

static void ask(int *to, int *from, long value, const char *whom)
{
	long reply;
	transfer(to[1], &value, 1);
	transfer(from[0], &reply, 0);
	if (reply != value)
		violated(whom, reply, value);
}

int main(int count, char **arguments)
{
	static unsigned memory[4 << 20];
	pthread_t thread;
	struct rlimit limit;
	if (count < 2)
		return 2;
	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = 512;
	setrlimit(RLIMIT_NOFILE, &limit);
	directory = arguments[1];
	if (pipe(to_thread) || pipe(from_thread) || pipe(to_child) || pipe(from_child))
		violated("pipe", 0, 0);
	if (fork() == 0) {
		for (;;) {
			long value;
			transfer(to_child[0], &value, 0);
			transfer(from_child[1], &value, 1);
		}
	}
	struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
	sigaction(SIGALRM, &action, NULL);
	void *(*bodies[])(void *) = {compute, echo, nap, take_turns};
	for (int i = 0; i < 4; i++)
		if (pthread_create(&thread, NULL, bodies[i], NULL))
			violated("pthread_create", i, 0);
	struct itimerval interval = {{0, 20000}, {0, 20000}};
	setitimer(ITIMER_REAL, &interval, NULL);
	char path[4096];
	snprintf(path, sizeof path, "%s/progress", directory);
	long last = now(1, CLOCK_MONOTONIC);
	for (long round = 1;; round++) {
		check_time(&last);
		long before[] = {loops, naps, alarms, turns};
		ask(to_thread, from_thread, round, "the thread's reply");
		ask(to_child, from_child, round, "the child's reply");
		for (unsigned i = 0; i < sizeof memory / sizeof *memory; i += 512) {
			if (memory[i] != (round == 1 ? 0 : i * 7919u + (unsigned)round - 1))
				violated("memory", i, memory[i]);
			memory[i] = i * 7919u + (unsigned)round;
		}
		pthread_mutex_lock(&lock);
		turn++;
		pthread_cond_broadcast(&changed);
		while (turn % 2 == 1)
			pthread_cond_wait(&changed, &lock);
		pthread_mutex_unlock(&lock);
		/* Each of the threads goes on. */
		for (int waits = 0; loops == before[0] || naps == before[1] || alarms == before[2]; waits++) {
			if (waits > 60000)
				violated("a thread stands still", loops - before[0], naps - before[1]);
			usleep(1000);
		}
		/* A thread of the monitor may just have the limit raised. */
		struct rlimit now;
		for (int waits = 0; getrlimit(RLIMIT_NOFILE, &now) == 0 && now.rlim_cur != limit.rlim_cur; waits++) {
			if (waits > 1000)
				violated("the limit of descriptors", now.rlim_cur, limit.rlim_cur);
			usleep(1000);
		}
		/* A child that ends. */
		pid_t child = fork();
		if (child == 0)
			_exit(7);
		int status = 0;
		while (waitpid(child, &status, 0) < 0 && errno == EINTR)
			;
		if (!WIFEXITED(status) || WEXITSTATUS(status) != 7)
			violated("a short child", child, status);
		FILE *progress = fopen(path, "a");
		fprintf(progress, "ok %ld\n", round);
		fclose(progress);
	}
}
