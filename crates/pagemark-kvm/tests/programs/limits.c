// A program that limits its own data, or its addresses, still gets memory, threads and children, and
// executes others.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1ul << 20)

static void *body(void *argument) { return argument; }

static int maps(unsigned long bytes)
{
	char *at = mmap(0, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED)
		return 0;
	munmap(at, bytes);
	return 1;
}

static void show(int what)
{
	struct rlimit limit, same;
	int results[] = {getrlimit(what, &limit), prlimit(getpid(), what, 0, &same)};
	printf("%d %d: %lu %lu, the same: %d\n", results[0], results[1], limit.rlim_cur / MIB, limit.rlim_max / MIB,
	       !memcmp(&limit, &same, sizeof limit));
}

static void change(int what)
{
	struct rlimit wrong = {512 * MIB, 256 * MIB}, lower = {256 * MIB, 512 * MIB}, before = {0};
	printf("wrong: %d", prlimit(0, what, &wrong, 0));
	printf(" %s\n", strerror(errno));
	printf("nowhere: %ld", syscall(SYS_getrlimit, what, 0));
	printf(" %s\n", strerror(errno));
	printf("lower: %d", prlimit(0, what, &lower, &before));
	printf(" %lu\n", before.rlim_cur / MIB);
	show(what);
	printf("300 MiB: %d, 100 MiB: %d\n", maps(300 * MIB), maps(100 * MIB));
	char *part = mmap(0, 100 * MIB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	printf("the same place: %d\n",
	       mmap(part, 100 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == part);
	printf("moved: %d, longer: %d\n", mremap(part, 100 * MIB, 200 * MIB, MREMAP_MAYMOVE) != MAP_FAILED,
	       mremap(part, 100 * MIB, 300 * MIB, MREMAP_MAYMOVE) != MAP_FAILED);
}

int main(int argc, char **argv)
{
	int what = argc > 1 ? RLIMIT_AS : RLIMIT_DATA;
	struct rlimit limit = {512 * MIB, 512 * MIB};
	if (argc > 1 && !strcmp(argv[1], "given")) {
		show(what);
		printf("700 MiB: %d, 300 MiB: %d\n", maps(700 * MIB), maps(300 * MIB));
	}
	printf("limit %d\n", setrlimit(what, &limit));
	char *memory = malloc(64 * MIB);
	printf("memory: %d\n", memory != 0);
	if (memory)
		memset(memory, 1, 64 * MIB);
	fflush(stdout);
	int status = -1;
	pid_t child = fork();
	if (!child) {
		if (argc > 1)
			change(what);
		fflush(stdout);
		_exit(3);
	}
	waitpid(child, &status, 0);
	printf("a child: %d %#x\n", child > 0, status);
	if (argc > 1)
		show(what);
	pthread_t thread;
	int error = pthread_create(&thread, 0, body, 0);
	if (!error)
		pthread_join(thread, 0);
	printf("a thread: %s\n", strerror(error));
	fflush(stdout);
	execl("/bin/sh", "sh", "-c", "echo executed; ulimit -v; ulimit -Hv; /bin/echo again", (char *)0);
	perror("exec");
	return 1;
}
