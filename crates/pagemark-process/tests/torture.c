/* Checks its own invariants for ever: threads, a mutex, thread-local data, changing mappings, a pending signal and timers. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>
#include <errno.h>

#define THREADS 8

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long counts[THREADS], total;
static __thread long own[64];
static volatile sig_atomic_t ticks, posix_ticks;

static void wrong(const char *what)
{
	int fd = open("wrong", O_CREAT | O_WRONLY | O_TRUNC, 0600);
	dprintf(fd, "%s errno %d", what, errno);
	_exit(99);
}

static void on_tick(int signal) { (void)signal; ticks++; }
static void on_posix_tick(int signal) { (void)signal; posix_ticks++; }

static void *work(void *argument)
{
	long me = (long)argument;
	double f = me + 0.5;
	for (int i = 0; i < 64; i++)
		own[i] = me * 1000 + i;
	for (long n = 1;; n++) {
		pthread_mutex_lock(&lock);
		counts[me]++;
		total++;
		long sum = 0;
		for (int i = 0; i < THREADS; i++)
			sum += counts[i];
		if (sum != total)
			wrong("the sum under the mutex");
		pthread_mutex_unlock(&lock);
		for (int i = 0; i < 64; i++)
			if (own[i] != me * 1000 + i)
				wrong("thread-local data");
		f = f * 2 - (me + 0.5);
		if (f != me + 0.5)
			wrong("floating point");
		if (n % 64 == 0) {
			size_t size = 4096 * (1 + n % 13);
			uint64_t *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
			if (p == MAP_FAILED)
				wrong("mmap");
			for (size_t i = 0; i < size / 8; i++)
				p[i] = i * me;
			p = mremap(p, size, size + 8192, MREMAP_MAYMOVE);
			if (p == MAP_FAILED)
				wrong("mremap");
			for (size_t i = 0; i < size / 8; i++)
				if (p[i] != i * me)
					wrong("remapped memory");
			munmap(p, size + 8192);
		}
		struct timespec t = { 0, 200000 };
		if (nanosleep(&t, NULL) && errno != EINTR)
			wrong("nanosleep");
	}
	return NULL;
}

int main(void)
{
	sigset_t blocked;
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGUSR1);
	pthread_sigmask(SIG_BLOCK, &blocked, NULL);
	kill(getpid(), SIGUSR1);

	struct sigaction action = { .sa_handler = on_tick, .sa_flags = SA_RESTART };
	sigaction(SIGALRM, &action, NULL);
	struct itimerval every = { { 0, 20000 }, { 0, 20000 } };
	setitimer(ITIMER_REAL, &every, NULL);

	action.sa_handler = on_posix_tick;
	sigaction(SIGRTMIN + 3, &action, NULL);
	struct sigevent event = { .sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN + 3 };
	timer_t timer;
	struct itimerspec each = { { 0, 20000000 }, { 0, 20000000 } };
	if (timer_create(CLOCK_MONOTONIC, &event, &timer) || timer_settime(timer, 0, &each, NULL))
		wrong("timer_create");
	int clock = timerfd_create(CLOCK_MONOTONIC, 0);
	if (clock < 0 || timerfd_settime(clock, 0, &each, NULL))
		wrong("timerfd");

	pthread_t threads[THREADS];
	for (long i = 0; i < THREADS; i++)
		if (pthread_create(&threads[i], NULL, work, (void *)i))
			wrong("pthread_create");

	for (long n = 1;; n++) {
		int ticks_before = ticks, posix_before = posix_ticks;
		uint64_t expirations;
		while (read(clock, &expirations, 8) != 8)
			if (errno != EINTR)
				wrong("the timer's descriptor");
		for (int i = 0; ticks == ticks_before || posix_ticks == posix_before; i++) {
			if (i > 3000)
				wrong("a timer that fires no more");
			usleep(10000);
		}
		sigset_t pending;
		sigpending(&pending);
		if (!sigismember(&pending, SIGUSR1))
			wrong("a pending signal that is lost");
		static int count = -1;
		char text[32];
		snprintf(text, sizeof(text), "%-20ld", (long)n);
		if (count < 0) {
			count = open("count.new", O_CREAT | O_RDWR, 0600);
			pwrite(count, text, 20, 0);
			rename("count.new", "count");
		}
		pwrite(count, text, 20, 0);
	}
}
