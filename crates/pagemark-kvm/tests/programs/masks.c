// While a handler runs that interrupts a call with a mask of its own, that mask holds, and the
// signals of the handler's action.
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <unistd.h>

static volatile int handled, of_first[2], order[4];

static void handler(int number)
{
	sigset_t now;
	sigprocmask(SIG_BLOCK, 0, &now);
	order[handled++ & 3] = number;
	if (number == SIGUSR1) {
		of_first[0] = sigismember(&now, SIGUSR2);
		of_first[1] = sigismember(&now, SIGHUP);
	}
}

int main(void)
{
	struct sigaction action = {.sa_handler = handler};
	sigaction(SIGUSR1, &action, 0);
	sigaction(SIGUSR2, &action, 0);
	sigset_t both, none, hang_up, pending, after;
	sigemptyset(&none);
	sigemptyset(&both);
	sigaddset(&both, SIGUSR1);
	sigaddset(&both, SIGUSR2);
	sigemptyset(&hang_up);
	sigaddset(&hang_up, SIGHUP);
	const char *names[] = {"sigsuspend", "ppoll", "pselect", "epoll_pwait", "epoll_pwait2", "ppoll without a mask"};
	for (int way = 0; way < 6; way++) {
		struct epoll_event event;
		struct timespec soon = {0, 1000000};
		int fd = epoll_create1(0), result = 0;
		sigprocmask(SIG_SETMASK, way == 5 ? &hang_up : &both, 0);
		handled = 0;
		memset((void *)order, 0, sizeof order);
		of_first[0] = of_first[1] = -1;
		if (way < 5) {
			raise(SIGUSR1);
			raise(SIGUSR2);
		}
		errno = 0;
		switch (way) {
		case 0:
			result = sigsuspend(&hang_up);
			break;
		case 1:
			result = ppoll(0, 0, 0, &hang_up);
			break;
		case 2:
			result = pselect(0, 0, 0, 0, 0, &hang_up);
			break;
		case 3:
			result = epoll_pwait(fd, &event, 1, -1, &hang_up);
			break;
		case 4:
			result = syscall(SYS_epoll_pwait2, fd, &event, 1, 0, &hang_up, 8);
			break;
		case 5:
			result = ppoll(0, 0, &soon, 0);
			raise(SIGUSR1);
		}
		close(fd);
		sigpending(&pending);
		sigprocmask(SIG_SETMASK, &none, &after);
		printf("%s: %d %s, handled %d: %d %d; in the first: USR2 blocked %d, HUP blocked %d; pending %d; after it %d %d\n",
		       names[way], result, strerror(result < 0 ? errno : 0), handled, order[0], order[1], of_first[0],
		       of_first[1], sigismember(&pending, SIGUSR2), sigismember(&after, SIGUSR1), sigismember(&after, SIGHUP));
	}
	return 0;
}
