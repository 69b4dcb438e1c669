/*
 * Forks of a program whose other threads track and save the heap, and allocate. Children use the
 * heap at once, track it themselves, and start threads. A program that hangs is ended by its alarm.
 * It is linked with the library.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "pagemark_malloc.h"

extern char **environ;

enum { SECONDS = 300, FORKS = 60, BLOCKS = 64, BLOCK = 700, OTHERS = 3 };

static int file;
static atomic_int stops, tracked;

static int checkpoint(int into)
{
	struct pagemark_heap_checkpoint taken;

	return pagemark_heap_checkpoint(into, &taken);
}

/* Each in a thread of its own, because jemalloc locks its list of threads where one begins. */
static void *track_or_save(void *tracks)
{
	if (tracks) {
		CHECK(pagemark_heap_track(tracked++ % 2 ? "separate" : "by-cost") == 0);
	} else {
		CHECK(checkpoint(-1) == 0);
		CHECK(checkpoint(file) == 0);
		CHECK(ftruncate(file, 0) == 0);
	}
	return NULL;
}

static void in_thread(void *(*function)(void *), void *argument)
{
	pthread_t thread;

	CHECK(pthread_create(&thread, NULL, function, argument) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
}

static void *track_and_save(void *unused)
{
	for (int round = 0; !stops; round++)
		in_thread(track_or_save, round % 2 ? &tracked : NULL);
	return unused;
}

static void *allocate(void *once)
{
	do {
		unsigned char *blocks[BLOCKS];

		for (int block = 0; block < BLOCKS; block++) {
			size_t bytes = 1 + (size_t)block * block * BLOCK / BLOCKS;

			blocks[block] = block % 2 ? malloc(bytes) : calloc(1, bytes);
			CHECK(blocks[block]);
			CHECK(block % 2 || (blocks[block][0] == 0 && blocks[block][bytes - 1] == 0));
			memset(blocks[block], block, bytes);
		}
		for (int block = 0; block < BLOCKS; block++) {
			CHECK(*blocks[block] == block);
			free(blocks[block]);
		}
	} while (!once && !stops);
	return NULL;
}

static int child(const char *text, int forks)
{
	alarm(SECONDS);
	char *copy = strdup(text);
	CHECK(strcmp(copy, "what the parent has written") == 0);
	free(copy);
	CHECK(checkpoint(-1) == EINVAL);
	CHECK(pagemark_heap_track("separate") == 0);
	CHECK(checkpoint(-1) == 0);
	in_thread(allocate, &file);
	if (forks) {
		pid_t pid = fork();

		if (pid == 0)
			_exit(child(text, 0));
		int status;
		CHECK(waitpid(pid, &status, 0) == pid && status == 0);
	}
	return 0;
}

static void wait_for(pid_t pid)
{
	int status = -1;

	CHECK(pid > 0);
	CHECK(waitpid(pid, &status, 0) == pid);
	if (status != 0)
		fprintf(stderr, "a child's status is %#x\n", status);
	CHECK(status == 0);
}

static pid_t start_by_vfork(char *const *arguments)
{
	pid_t pid = vfork();

	if (pid == 0) {
		execvp(arguments[0], arguments);
		_exit(1);
	}
	return pid;
}

static void *forks(void *unused)
{
	char *const arguments[] = { "true", NULL };
	char *text = strdup("what the parent has written");

	for (int round = 0; round < FORKS; round++) {
		pid_t pid = fork();

		if (pid == 0)
			_exit(child(text, round % 8 == 0));
		wait_for(pid);
		if (round % 4 == 0) {
			CHECK(posix_spawnp(&pid, "true", NULL, NULL, arguments, environ) == 0);
			wait_for(pid);
			wait_for(start_by_vfork(arguments));
		}
	}
	free(text);
	return unused;
}

int main(void)
{
	pthread_t threads[OTHERS + 1];
	void *(*const functions[])(void *) = { track_and_save, track_and_save, allocate, forks };

	alarm(SECONDS);
	file = memfd_create("saved", 0);
	CHECK(file >= 0);
	int error = pagemark_heap_track("separate");
	if (error == ENOTSUP) {
		puts("not supported");
		return 0;
	}
	CHECK(error == 0);
	for (int number = 0; number <= OTHERS; number++)
		CHECK(pthread_create(&threads[number], NULL, functions[number], NULL) == 0);
	forks(NULL);
	CHECK(pthread_join(threads[OTHERS], NULL) == 0);
	stops = 1;
	for (int number = 0; number < OTHERS; number++)
		CHECK(pthread_join(threads[number], NULL) == 0);
	puts("all forked");
	return 0;
}
