/*
 * Forks of a program that has an open stream, which the C library uses in the child at once. One
 * thread has a write barrier, by mprotect and SIGSEGV, which it passes at any moment of a fork; the
 * thread that forks has SIGSEGV blocked in each second fork. The library is preloaded.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { FORKS = 400, PAGE = 4096 };

static volatile char *page;
static atomic_int stops;

static void on_segv(int number, siginfo_t *info, void *context)
{
	char *at = info->si_addr;

	(void)context;
	if (at >= page && at < page + PAGE)
		mprotect((void *)page, PAGE, PROT_READ | PROT_WRITE);
	else
		signal(number, SIG_DFL);
}

static void *pass_barrier(void *unused)
{
	while (!stops) {
		CHECK(mprotect((void *)page, PAGE, PROT_READ) == 0);
		page[0]++;
	}
	return unused;
}

static int is_blocked(void)
{
	sigset_t now;

	CHECK(pthread_sigmask(SIG_BLOCK, NULL, &now) == 0);
	return sigismember(&now, SIGSEGV);
}

int main(void)
{
	struct sigaction action = { .sa_sigaction = on_segv, .sa_flags = SA_SIGINFO }, now;
	FILE *stream = fopen("/dev/null", "r");
	pthread_t thread;
	sigset_t all, before;
	int wrong = 0;

	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(stream && page != MAP_FAILED);
	CHECK(sigaction(SIGSEGV, &action, NULL) == 0);
	CHECK(pthread_create(&thread, NULL, pass_barrier, NULL) == 0);
	sigfillset(&all);
	for (int number = 0; number < FORKS; number++) {
		int blocks = number % 2, status;
		pid_t child;

		CHECK(pthread_sigmask(blocks ? SIG_SETMASK : SIG_BLOCK, blocks ? &all : NULL, &before) == 0);
		child = fork();
		CHECK(child >= 0);
		if (child == 0)
			_exit(is_blocked() != blocks);
		CHECK(is_blocked() == blocks);
		CHECK(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
		CHECK(waitpid(child, &status, 0) == child);
		wrong += status != 0;
	}
	CHECK(sigaction(SIGSEGV, NULL, &now) == 0 && now.sa_sigaction == on_segv);
	stops = 1;
	CHECK(pthread_join(thread, NULL) == 0);
	if (wrong)
		printf("%d of %d children are wrong\n", wrong, FORKS);
	else
		puts("right");
	return fclose(stream) != 0;
}
