// A program raises the limit of its stack, as compilers and linkers do, and uses it. An overflow is
// an access where nothing is mapped.
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static sigjmp_buf back;
static volatile int number, code;
static char alternate[65536];

static void handler(int caught, siginfo_t *info, void *context)
{
	number = caught;
	code = info->si_code;
	siglongjmp(back, 1);
}

__attribute__((noinline)) static long deep(long times)
{
	volatile char room[4000];
	memset((char *)room, 1, sizeof room);
	return times ? deep(times - 1) + room[times % 4000] : 0;
}

// The kernel writes to a part of the stack that was not used.
__attribute__((noinline)) static long far(void)
{
	char room[20 << 20];
	__asm__ volatile("" ::"r"(room) : "memory");
	return gethostname(room, 64);
}

static void use(const char *what, long times)
{
	number = code = 0;
	if (!sigsetjmp(back, 1))
		deep(times);
	printf("%s: signal %d, code %d\n", what, number, code);
}

int main(int argc, char **argv)
{
	if (argc < 2) {
		struct rlimit limit = {8 << 20, RLIM_INFINITY};
		setrlimit(RLIMIT_STACK, &limit);
		execl(argv[0], argv[0], "again", (char *)0);
	}
	stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate};
	sigaltstack(&stack, 0);
	struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO | SA_ONSTACK};
	sigaction(SIGSEGV, &action, 0);
	sigaction(SIGBUS, &action, 0);
	use("4 MiB", 4 << 8);
	use("an overflow", 1 << 20);
	struct rlimit limit;
	getrlimit(RLIMIT_STACK, &limit);
	limit.rlim_cur = 64 << 20;
	printf("setrlimit %d\n", setrlimit(RLIMIT_STACK, &limit));
	use("40 MiB", 40 << 8);
	printf("far: %ld\n", far());
	use("another overflow", 1 << 20);
	limit.rlim_cur = 100 << 20;
	printf("prlimit %d\n", prlimit(0, RLIMIT_STACK, &limit, 0));
	use("80 MiB", 80 << 8);
	return 0;
}
