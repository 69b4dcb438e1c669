// A program that limits its own data still gets memory, threads and children, and executes others.
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

static void *body(void *argument) { return argument; }

int main(void)
{
	struct rlimit limit = {512 << 20, 512 << 20};
	printf("limit %d\n", setrlimit(RLIMIT_DATA, &limit));
	char *memory = malloc(64 << 20);
	printf("memory: %d\n", memory != 0);
	if (memory)
		memset(memory, 1, 64 << 20);
	fflush(stdout);
	int status = -1;
	pid_t child = fork();
	if (!child)
		_exit(3);
	waitpid(child, &status, 0);
	printf("a child: %d %#x\n", child > 0, status);
	pthread_t thread;
	int error = pthread_create(&thread, 0, body, 0);
	if (!error)
		pthread_join(thread, 0);
	printf("a thread: %s\n", strerror(error));
	fflush(stdout);
	execl("/bin/echo", "echo", "executed", (char *)0);
	perror("exec");
	return 1;
}
