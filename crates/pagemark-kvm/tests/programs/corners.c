// Corners of calls: several mappings moved at once, numbers of calls with other bits, frames that
// cannot be read, small alternate stacks, entries of the environment without a name, and addresses
// that no processor has.
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

enum { PAGE = 4096 };

extern char **environ;
static sigjmp_buf back;
static volatile int number, code;
static char stack[65536];

static void jumps(int caught, siginfo_t *info, void *context)
{
	number = caught;
	code = info->si_code;
	siglongjmp(back, 1);
}

static void breaks(int caught, siginfo_t *info, void *context)
{
	((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP] = 0x0123456789abcdef;
}

static void returns(int caught) { number = caught; }

static char access_byte(volatile char *at, int writes)
{
	number = code = 0;
	if (!sigsetjmp(back, 1))
		writes ? (void)(*at = 1) : (void)*at;
	return number ? number == SIGBUS ? 'b' : code == SEGV_MAPERR ? 'm' : 'a' : '.';
}

static void moves(const char *what, const int *protections)
{
	char *from = mmap(0, 8 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *to = mmap(0, 8 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(from, 7, 4 * PAGE);
	for (int page = 0; page < 4; page++)
		if (protections[page] < 0)
			munmap(from + page * PAGE, PAGE);
		else
			mprotect(from + page * PAGE, PAGE, protections[page]);
	char *moved = mremap(from, 4 * PAGE, 4 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, to);
	printf("%s: %d, ", what, moved == to);
	for (int page = 0; page < 4 && moved == to; page++)
		printf("%c%c", access_byte(to + page * PAGE, 0), access_byte(to + page * PAGE, 1));
	printf("\n");
}

static int child_of_vfork(void *argument) { _exit(4); }

static void environment(char **argv)
{
	char *entries[] = {"A=b", "without", "=nameless", "", "C=", 0};
	char *arguments[] = {argv[0], "environment", 0};
	fflush(stdout);
	if (!fork())
		execve(argv[0], arguments, entries);
	wait(0);
}

int main(int argc, char **argv)
{
	if (argc > 1) {
		for (char **entry = environ; *entry; entry++)
			printf("<%s>", *entry);
		printf("\n");
		return 0;
	}
	struct sigaction action = {.sa_sigaction = jumps, .sa_flags = SA_SIGINFO | SA_ONSTACK};
	sigaction(SIGSEGV, &action, 0);
	sigaction(SIGBUS, &action, 0);
	moves("one", (int[]){3, 3, 3, 3});
	moves("reads, then writes", (int[]){1, 1, 3, 3});
	moves("writes, then reads", (int[]){3, 3, 1, 1});
	moves("a hole", (int[]){3, -1, -1, 3});

	long result;
	__asm__ volatile("syscall" : "=a"(result) : "a"(0x100000000 + SYS_getpid) : "rcx", "r11", "memory");
	printf("another number: %d\n", result == getpid());

	// No frame is where the stack pointer leads.
	number = code = 0;
	if (!sigsetjmp(back, 1)) {
		stack_t own = {.ss_sp = stack, .ss_size = sizeof stack};
		sigaltstack(&own, 0);
		__asm__ volatile("mov $64, %%rsp\n mov $15, %%eax\n syscall" ::: "memory");
	}
	printf("no frame: signal %d, code %d\n", number, code);
	struct sigaction broken = {.sa_sigaction = breaks, .sa_flags = SA_SIGINFO};
	sigaction(SIGUSR1, &broken, 0);
	number = code = 0;
	if (!sigsetjmp(back, 1))
		raise(SIGUSR1);
	printf("no address of a processor: signal %d, code %d\n", number, code);
	broken.sa_sigaction = (void *)0x0123456789abcdef;
	sigaction(SIGUSR1, &broken, 0);
	number = code = 0;
	if (!sigsetjmp(back, 1))
		raise(SIGUSR1);
	printf("no address of a handler: signal %d, code %d\n", number, code);
	number = code = 0;

	stack_t small = {.ss_sp = stack, .ss_size = 2048}, smaller = {.ss_sp = stack, .ss_size = 2047};
	printf("a small stack: %d, a smaller one: %d\n", sigaltstack(&small, 0), sigaltstack(&smaller, 0));
	fflush(stdout);
	pid_t child = fork();
	if (!child) {
		// The frame has no room there.
		struct sigaction there = {.sa_handler = returns, .sa_flags = SA_ONSTACK};
		stack_t tiny = {.ss_sp = stack + 30000, .ss_size = 2048};
		memset(stack, 0, sizeof stack);
		printf("tiny: %d\n", sigaltstack(&tiny, 0));
		sigaction(SIGUSR1, &there, 0);
		signal(SIGSEGV, SIG_DFL);
		raise(SIGUSR1);
		int written = 0;
		for (int i = 0; i < 30000; i++)
			written += stack[i] != 0;
		printf("delivered: %d, below the stack: %d\n", number, written > 0);
		fflush(stdout);
		_exit(0);
	}
	int status = -1;
	waitpid(child, &status, 0);
	printf("a frame without room: %#x\n", status);

	pid_t id = 77;
	clone(child_of_vfork, stack + sizeof stack, CLONE_VM | CLONE_VFORK | CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID | SIGCHLD,
	      0, 0, 0, &id);
	printf("the number of a child that has ended: %d\n", id);
	wait(0);
	errno = 0;
	result = syscall(SYS_clone, CLONE_SETTLS | SIGCHLD, 0, 0, 0, 0x0123456789abcdef);
	if (!result)
		_exit(0);
	printf("no address of thread-local storage: %ld %s\n", result, strerror(errno));
	environment(argv);
	return 0;
}
