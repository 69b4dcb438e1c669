// Threads that cannot be made, more of them than a machine has virtual CPUs, and then one that can.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static void *body(void *argument) { return argument; }

static void try(const char *limits, int resource, rlim_t limit, int times)
{
	struct rlimit before, low;
	pthread_t thread;
	int failed = 0;
	getrlimit(resource, &before);
	low = before;
	low.rlim_cur = limit;
	setrlimit(resource, &low);
	for (int i = 0; i < times; i++) {
		int error = pthread_create(&thread, 0, body, 0);
		failed += error != 0;
		if (!error)
			pthread_join(thread, 0);
	}
	setrlimit(resource, &before);
	int error = pthread_create(&thread, 0, body, 0);
	if (!error)
		pthread_join(thread, 0);
	// The library keeps stacks, for which no addresses are needed.
	printf("%s: %d failed, then: %s\n", limits, resource == RLIMIT_AS ? -1 : failed, strerror(error));
}

int main(void)
{
	// The limit does not hold for root.
	if (setuid(100000 + getpid()))
		return 1;
	try("processes", RLIMIT_NPROC, 1, 1100);
	try("addresses", RLIMIT_AS, 1 << 20, 100);
	return 0;
}
