// Calls of the page at the end of the address space, as old programs make them.
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 0xffffffffff600000ul

static long call(unsigned long address, void *first, void *second)
{
	return ((long (*)(void *, void *))address)(first, second);
}

static void in_child(const char *what, unsigned long address, void *first)
{
	fflush(stdout);
	pid_t child = fork();
	if (!child) {
		call(address, first, 0);
		_exit(0);
	}
	int status = -1;
	waitpid(child, &status, 0);
	printf("%s: %#x\n", what, status);
}

int main(void)
{
	char *line = 0;
	size_t size = 0;
	int has_page = 0;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (getline(&line, &size, maps) > 0)
		has_page |= __builtin_strstr(line, "[vsyscall]") != 0;
	printf("the page: %d\n", has_page);
	if (has_page) {
		struct timeval now = {0};
		time_t second = 0;
		unsigned cpu = ~0u, node = ~0u;
		printf("gettimeofday %ld", call(PAGE, &now, 0));
		printf(" %d\n", labs(now.tv_sec - time(0)) < 3);
		long result = call(PAGE + 0x400, &second, 0);
		printf("time %d\n", result == second && labs(second - time(0)) < 3);
		printf("getcpu %ld", call(PAGE + 0x800, &cpu, &node));
		printf(" %d %u\n", cpu < (unsigned)sysconf(_SC_NPROCESSORS_CONF), node);
	}
	in_child("not an address", PAGE, (void *)8);
	in_child("in the middle", PAGE + 0x10, 0);
	in_child("behind it", PAGE + 0x1000, 0);
	return 0;
}
