// Children where there may be no more of them: `fork` fails, and no child is killed.
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	int what = atoi(argv[1]), made = 0, killed = 0, error = 0, ends[2], status;
	// The end of all children is sent to the group.
	if (setpgid(0, 0))
		return 2;
	// Each child begins.
	pipe(ends);
	alarm(20);
	// A user of its own has no other processes.
	struct rlimit limit = {atoi(argv[2]), atoi(argv[2])};
	if (setrlimit(what, &limit) || what == RLIMIT_NPROC && setuid(100000 + getpid()))
		return 1;
	for (int i = 0; i < 20; i++) {
		pid_t child = fork();
		if (!child) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			write(ends[1], "", 1);
			pause();
			_exit(0);
		}
		if (child < 0) {
			error = errno;
			break;
		}
		made++;
	}
	for (int i = 0; i < made; i++)
		read(ends[0], &status, 1);
	signal(SIGTERM, SIG_IGN);
	kill(0, SIGTERM);
	while (wait(&status) > 0)
		killed += WIFSIGNALED(status) && WTERMSIG(status) != SIGTERM;
	printf("%s children, then: %s; %d were killed\n", made ? "some" : "no", strerror(error), killed);
	return 0;
}
