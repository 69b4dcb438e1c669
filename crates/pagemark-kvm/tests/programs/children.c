// Children by fork, vfork, posix_spawn and clone; programs that they execute; how they end.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define SHOW(what) printf("%d: %s = %ld\n", __LINE__, #what, (long)(what)), fflush(stdout)

extern char **environ;
static volatile int shared_by_vfork;
static volatile int caught;

static void handler(int number)
{
	caught++;
}

static int status_of(pid_t child)
{
	int status = -1;
	waitpid(child, &status, 0);
	return status;
}

static long stack[4096];

static int exits(void *argument)
{
	return 3;
}

static void *forks(void *argument)
{
	pid_t child = fork();
	if (!child)
		syscall(SYS_exit, 21);
	return (void *)(long)status_of(child);
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "again")) {
		sigset_t mask;
		struct sigaction pipe_action, user_action;
		sigprocmask(SIG_BLOCK, 0, &mask);
		sigaction(SIGPIPE, 0, &pipe_action);
		sigaction(SIGUSR1, 0, &user_action);
		printf("again %s %s %s: blocked %d, pipe %d, user %d, fd %d\n", argv[0], argv[2], getenv("VALUE"),
		       sigismember(&mask, SIGUSR2), pipe_action.sa_handler == SIG_IGN, user_action.sa_handler == SIG_DFL,
		       fcntl(atoi(argv[2]), F_GETFD));
		return 17;
	}
	setvbuf(stdout, 0, _IONBF, 0);
	int *shared = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	char *private = malloc(8 << 20);
	memset(private, 1, 8 << 20);
	signal(SIGUSR1, handler);

	// Memory after fork.
	pid_t child = fork();
	if (!child) {
		*shared = private[5 << 20] + 1;
		private[5 << 20] = 9;
		raise(SIGUSR1);
		*shared += caught * 10;
		char *more = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		more[100] = 1;
		pid_t grandchild = fork();
		if (!grandchild)
			_exit(more[100] + 1);
		*shared += 100 * WEXITSTATUS(status_of(grandchild));
		_exit(5);
	}
	private[5 << 20] = 3;
	SHOW(status_of(child));
	SHOW(*shared);
	SHOW(private[5 << 20]);
	SHOW(caught);

	// Ends by a signal and by a fault.
	child = fork();
	if (!child)
		pause();
	usleep(10000);
	kill(child, SIGTERM);
	SHOW(status_of(child));
	child = fork();
	if (!child)
		*(volatile char *)0 = 1;
	SHOW(status_of(child) & 0x7f);
	child = fork();
	if (!child)
		abort();
	SHOW(status_of(child) & 0x7f);

	// vfork shares memory, and the parent waits.
	child = vfork();
	if (!child) {
		shared_by_vfork = 42;
		_exit(8);
	}
	SHOW(shared_by_vfork);
	SHOW(status_of(child));
	child = vfork();
	if (!child) {
		signal(SIGUSR1, SIG_DFL);
		execl("/nonexistent", "x", (char *)0);
		shared_by_vfork = errno;
		_exit(9);
	}
	SHOW(shared_by_vfork);
	SHOW(status_of(child));
	raise(SIGUSR1);
	SHOW(caught);

	// Another signal at its end, and a descriptor for it.
	signal(SIGUSR1, handler);
	caught = 0;
	int pidfd = -1;
	child = clone(exits, (char *)stack + sizeof stack, CLONE_VM | CLONE_VFORK | CLONE_PIDFD | SIGUSR1, 0, &pidfd);
	siginfo_t info;
	SHOW(waitid(P_PIDFD, pidfd, &info, WEXITED | __WALL));
	SHOW(info.si_status + 100 * (fcntl(pidfd, F_GETFD) == FD_CLOEXEC));
	SHOW(caught);
	signal(SIGUSR1, SIG_IGN);

	// Descriptors of children that nobody waits for.
	signal(SIGCHLD, SIG_IGN);
	int lacking[2] = {0, 0};
	for (int i = 0; i < 20; i++) {
		pidfd = -2;
		clone(exits, (char *)stack + sizeof stack, CLONE_VM | CLONE_VFORK | CLONE_PIDFD | SIGCHLD, 0, &pidfd);
		lacking[0] += pidfd < 0;
		close(pidfd);
		pidfd = -2;
		if (!syscall(SYS_clone, CLONE_PIDFD | SIGCHLD, 0, &pidfd, 0, 0))
			_exit(0);
		lacking[1] += pidfd < 0;
		close(pidfd);
	}
	SHOW(lacking[0]);
	SHOW(lacking[1]);
	SHOW(syscall(SYS_clone, CLONE_PIDFD | SIGCHLD, 0, 8, 0, 0));
	while (wait(0) > 0)
		;
	signal(SIGCHLD, SIG_DFL);

	// posix_spawn, and its error.
	char *arguments[] = {"sh", "-c", "exit 33", 0};
	SHOW(posix_spawn(&child, "/bin/sh", 0, 0, arguments, environ));
	SHOW(status_of(child));
	SHOW(posix_spawn(&child, "/nonexistent", 0, 0, arguments, environ));
	FILE *pipe = popen("echo from a pipe; exit 4", "r");
	char line[100] = "";
	fgets(line, sizeof line, pipe);
	SHOW(strcmp(line, "from a pipe\n"));
	SHOW(pclose(pipe));
	SHOW(system("exit 7"));

	// What exec keeps.
	sigset_t mask;
	sigemptyset(&mask);
	sigaddset(&mask, SIGUSR2);
	sigprocmask(SIG_BLOCK, &mask, 0);
	signal(SIGPIPE, SIG_IGN);
	int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);
	int kept = open("/dev/null", O_RDONLY);
	for (int i = 0; i < 3; i++) {
		char number[10];
		sprintf(number, "%d", i == 0 ? fd : kept);
		char *again[] = {i == 2 ? "another name" : argv[0], "again", number, 0};
		char *environment[] = {"VALUE=value", "LD_UNKNOWN=1", 0};
		if (i == 2)
			signal(SIGPIPE, SIG_DFL);
		child = fork();
		if (!child) {
			execve(argv[0], again, environment);
			_exit(100);
		}
		SHOW(status_of(child));
	}
	SHOW(execve("/dev/null", arguments, environ) + errno);
	SHOW(execve("/", arguments, environ) + errno);
	SHOW(execve((char *)8, arguments, environ) + errno);
	int script = open("script", O_CREAT | O_WRONLY, 0755);
	write(script, "#!/bin/sh\necho script $1\n", 25);
	close(script);
	child = fork();
	if (!child)
		execl("./script", "script", "argument", (char *)0);
	SHOW(status_of(child));
	child = fork();
	if (!child) {
		int directory = open("/bin", O_PATH);
		execveat(directory, "true", arguments, environ, 0);
		_exit(1);
	}
	SHOW(status_of(child));

	// fork in a thread, and the end of its first thread.
	pthread_t thread;
	void *result;
	pthread_create(&thread, 0, forks, 0);
	pthread_join(thread, &result);
	SHOW(result);
	// A child that executes while it has threads.
	child = fork();
	if (!child) {
		pthread_create(&thread, 0, (void *(*)(void *))pause, 0);
		usleep(10000);
		execl("/bin/echo", "echo", "executed", (char *)0);
	}
	SHOW(status_of(child));
	// An orphan's output comes through.
	if (!fork()) {
		if (!fork()) {
			usleep(20000);
			printf("orphan\n");
			*shared = 1234;
		}
		_exit(0);
	}
	wait(0);
	while (*shared != 1234)
		usleep(1000);
	for (int i = 0; i < 20; i++) {
		child = fork();
		if (!child)
			_exit(i);
		if (WEXITSTATUS(status_of(child)) != i)
			printf("wrong\n");
	}
	SHOW(wait(0));
	return 12;
}
