// The first thread ends by itself, and another one goes on, as POSIX has it. Each thing that it
// does is in a process of its own.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static int what;
static sigjmp_buf back;
static volatile int caught;

static void catches(int number) { caught = number; }
static void jumps(int number) { siglongjmp(back, 1); }
static void *returns(void *argument) { return argument; }

static void *goes_on(void *argument)
{
	// Until the first thread has ended.
	FILE *state;
	char line[512] = "";
	while (!strstr(line, ") Z")) {
		snprintf(line, sizeof line, "/proc/%d/stat", getpid());
		state = fopen(line, "r");
		fgets(line, sizeof line, state);
		fclose(state);
		usleep(1000);
	}
	struct iovec list = {"written from a list\n", 20};
	pthread_t thread;
	void *result = 0;
	int status = -1, error;
	pid_t child;
	switch (what) {
	case 0:
		if (writev(1, &list, 1) < 0)
			perror("writev");
		break;
	case 1:
		signal(SIGUSR1, catches);
		raise(SIGUSR1);
		printf("caught %d\n", caught);
		break;
	case 2:
		error = pthread_create(&thread, 0, returns, &thread);
		if (!error)
			pthread_join(thread, &result);
		printf("thread: %s, %d\n", strerror(error), result == &thread);
		break;
	case 3:
		signal(SIGSEGV, jumps);
		if (!sigsetjmp(back, 1))
			*(volatile char *)8 = 1;
		char *page = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		page[5] = 1;
		printf("after a fault: %d\n", page[5]);
		break;
	case 4:
		fflush(stdout);
		child = fork();
		if (!child)
			_exit(3);
		waitpid(child, &status, 0);
		printf("fork: %#x\n", status);
		break;
	case 5:
		fflush(stdout);
		execl("/bin/echo", "echo", "executed", (char *)0);
		perror("execl");
	}
	fflush(stdout);
	exit(7);
}

int main(int argc, char **argv)
{
	if (argc > 1) {
		pthread_t thread;
		what = atoi(argv[1]);
		pthread_create(&thread, 0, goes_on, 0);
		pthread_exit(0);
	}
	for (int i = 0; i < 6; i++) {
		char number[4];
		snprintf(number, sizeof number, "%d", i);
		fflush(stdout);
		pid_t child = fork();
		if (!child) {
			alarm(20);
			execl(argv[0], argv[0], number, (char *)0);
		}
		int status = -1;
		waitpid(child, &status, 0);
		printf("%d: %#x\n", i, status);
	}
	return 0;
}
