// What the machine reports goes to the standard error stream, and nowhere else: a daemon has its data
// where that was, or nobody reads it.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <unistd.h>

static volatile int broken;

static void handler(int number) { broken++; }

int main(int argc, char **argv)
{
	signal(SIGPIPE, handler);
	int ends[2];
	if (argc > 1) {
		pipe(ends);
		dup2(ends[1], 2);
		if (!strcmp(argv[1], "executed")) {
			close(ends[1]);
			// The stream of the program that is executed.
			execl(argv[0], argv[0], "broken", (char *)0);
		}
	}
	if (argc > 1) {
		// All ends for reading are closed.
		for (int fd = 3; fd < 10; fd++)
			close(fd);
	} else {
		close(2);
		open("data", O_RDWR | O_CREAT | O_TRUNC, 0600);
		write(2, "HEADER", 6);
	}
	ptrace(PTRACE_TRACEME, 0, 0, 0);
	mlockall(MCL_CURRENT);
	char text[500];
	ssize_t bytes = argc > 1 ? 0 : pread(2, text, sizeof text, 0);
	printf("%zd bytes: %.*s; %d broken pipes\n", bytes, bytes < 0 ? 0 : (int)bytes, text, broken);
	return 0;
}
