// A program that gives up root, and so the right to /dev/kvm: children and programs that it executes.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void)
{
	setvbuf(stdout, 0, _IONBF, 0);
	printf("%d %d %d\n", setgroups(0, 0), setgid(65534), setuid(65534));
	printf("%d %d\n", open("/dev/kvm", O_RDWR), errno);
	int status = -1;
	pid_t child = fork();
	if (!child) {
		child = fork();
		if (!child)
			_exit(6);
		waitpid(child, &status, 0);
		_exit(WEXITSTATUS(status) + 1);
	}
	waitpid(child, &status, 0);
	printf("fork: %d\n", status);
	child = vfork();
	if (!child) {
		execl("/bin/sh", "sh", "-c", "id -u; (exit 8)", (char *)0);
		_exit(100);
	}
	waitpid(child, &status, 0);
	printf("vfork: %d\n", status);
	execl("/bin/sh", "sh", "-c", "echo executed; id -g; exit 9", (char *)0);
	return 101;
}
