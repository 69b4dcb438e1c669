// What a program gets from its caller: ignored signals, the signal mask, closed descriptors.
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	struct rlimit files;
	getrlimit(RLIMIT_NOFILE, &files);
	sigset_t mask;
	sigprocmask(SIG_BLOCK, 0, &mask);
	for (int number = 1; number < 32; number++) {
		struct sigaction action = {0};
		sigaction(number, 0, &action);
		if (action.sa_handler != SIG_DFL || sigismember(&mask, number))
			printf("%d: handler %ld, blocked %d\n", number, (long)action.sa_handler, sigismember(&mask, number));
	}
	for (int fd = 0; fd < 16; fd++)
		if (fcntl(fd, F_GETFD) >= 0)
			printf("open %d\n", fd);
	printf("%ld %ld\n", (long)files.rlim_cur, (long)files.rlim_max);
	fflush(stdout);
	if (argc > 1)
		execl(argv[0], argv[0], (char *)0);
	return 0;
}
