// Handlers, frames, masks, alternate stacks, restarted calls, faults.
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <ucontext.h>
#include <sys/mman.h>
#include <unistd.h>

#define SHOW(what) printf("%d: %s = %ld (%d)\n", __LINE__, #what, (long)(what), errno), errno = 0

static volatile int count, last, on_alternate, nested;
static char alternate[65536];
static sigjmp_buf back;

static void simple(int number)
{
	count++;
	last = number;
}

static void inform(int number, siginfo_t *info, void *context)
{
	ucontext_t *c = context;
	char here;
	count++;
	last = number;
	on_alternate = &here > alternate && &here < alternate + sizeof alternate;
	printf("signal %d code %d value %d self %d stack %d fp %d blocked %d\n", number, info->si_code,
	       info->si_value.sival_int, info->si_pid == getpid(), on_alternate, c->uc_mcontext.fpregs != 0,
	       sigismember(&c->uc_sigmask, SIGUSR2));
}

static void skip(int number, siginfo_t *info, void *context)
{
	ucontext_t *c = context;
	printf("fault %d code %d trap %ld\n", number, info->si_code, (long)c->uc_mcontext.gregs[REG_TRAPNO]);
	c->uc_mcontext.gregs[REG_RIP] += last;
}

// Changes vector registers.
static void clobber(int number)
{
	(void)number;
	double x = 1.0;
	for (int i = 0; i < 100; i++)
		x = x * 1.5 + i;
	char text[64];
	snprintf(text, sizeof text, "%f", x);
	memset(text, 1, sizeof text);
	count++;
}

static void outer(int number)
{
	(void)number;
	nested = count;
	raise(SIGUSR2);
	nested = count - nested;
}

static void jump(int number)
{
	siglongjmp(back, number);
}

static void install(int number, void *handler, int flags)
{
	struct sigaction action = {.sa_sigaction = handler, .sa_flags = flags};
	sigaction(number, &action, 0);
}

int main(void)
{
	setvbuf(stdout, 0, _IOLBF, 0);
	install(SIGUSR1, simple, 0);
	SHOW(raise(SIGUSR1));
	SHOW(count * 100 + last);
	install(SIGUSR1, inform, SA_SIGINFO);
	SHOW(sigqueue(getpid(), SIGUSR1, (union sigval){.sival_int = 77}));
	stack_t stack = {.ss_sp = alternate, .ss_size = sizeof alternate}, old;
	SHOW(sigaltstack(&stack, &old));
	SHOW(old.ss_flags);
	install(SIGUSR1, inform, SA_SIGINFO | SA_ONSTACK);
	SHOW(raise(SIGUSR1));
	SHOW(on_alternate);

	// Masks.
	sigset_t set, pending, empty;
	sigemptyset(&empty);
	sigemptyset(&set);
	sigaddset(&set, SIGUSR2);
	install(SIGUSR2, simple, 0);
	sigprocmask(SIG_BLOCK, &set, 0);
	count = 0;
	raise(SIGUSR2);
	sigpending(&pending);
	SHOW(count + 10 * sigismember(&pending, SIGUSR2));
	raise(SIGUSR1);
	SHOW(count);
	sigsuspend(&empty);
	SHOW(count);
	SHOW(errno);
	raise(SIGUSR2);
	sigprocmask(SIG_UNBLOCK, &set, 0);
	SHOW(count);
	struct sigaction action = {.sa_handler = outer};
	sigaddset(&action.sa_mask, SIGUSR2);
	sigaction(SIGUSR1, &action, 0);
	raise(SIGUSR1);
	SHOW(nested);
	SHOW(count);
	install(SIGUSR1, simple, SA_RESETHAND);
	raise(SIGUSR1);
	sigaction(SIGUSR1, 0, &action);
	SHOW(action.sa_handler == SIG_DFL);
	SHOW(action.sa_flags & ~0x04000000);

	// Interrupted and restarted calls.
	int ends[2];
	pipe(ends);
	install(SIGALRM, simple, 0);
	struct itimerval soon = {.it_value = {.tv_usec = 50000}};
	setitimer(ITIMER_REAL, &soon, 0);
	char byte;
	SHOW(read(ends[0], &byte, 1));
	install(SIGALRM, simple, SA_RESTART);
	struct itimerval often = {.it_value = {.tv_usec = 20000}, .it_interval = {.tv_usec = 20000}};
	count = 0;
	setitimer(ITIMER_REAL, &often, 0);
	struct timespec time = {.tv_nsec = 500000000};
	SHOW(nanosleep(&time, &time));
	SHOW(poll(0, 0, 500));
	// Work while the timer runs: vector registers must survive.
	install(SIGALRM, clobber, SA_RESTART);
	count = 0;
	volatile uint64_t bad = 0;
	double sum = 0;
	while (count < 20) {
		double part = 0;
		for (int i = 1; i <= 1000; i++)
			part += 1.0 / i;
		if (sum && part != sum)
			bad++;
		sum = part;
	}
	setitimer(ITIMER_REAL, &(struct itimerval){0}, 0);
	SHOW(bad);

	// Faults.
	install(SIGFPE, skip, SA_SIGINFO);
	install(SIGILL, skip, SA_SIGINFO);
	install(SIGTRAP, skip, SA_SIGINFO);
	install(SIGSEGV, skip, SA_SIGINFO);
	last = 2;
	asm volatile("xor %%edx, %%edx; xor %%ecx, %%ecx; mov $1, %%eax; div %%ecx" ::: "eax", "ecx", "edx");
	asm volatile("ud2");
	last = 1;
	asm volatile("hlt");
	asm volatile("cli");
	last = 0;
	asm volatile("int3");
	last = 3;
	asm volatile("mov %%cr0, %%rax" ::: "rax");
	last = 2;
	asm volatile("in $0x60, %%al" ::: "rax");
	asm volatile("out %%al, $0x60" ::: "rax");
	asm volatile("out %%al, $0x11" ::: "rax");
	asm volatile("int $0x20");
	asm volatile("wrmsr");
	install(SIGSEGV, jump, SA_NODEFER);
	for (int i = 0; i < 3; i++)
		if (!sigsetjmp(back, 1))
			*(volatile int *)8 = 1;
	SHOW(1);
	// There is no room for the frame: another signal takes its place.
	static char closed[65536] __attribute__((aligned(4096)));
	stack_t without = {.ss_sp = closed, .ss_size = sizeof closed};
	SHOW(sigaltstack(&without, &old));
	SHOW(mprotect(closed, sizeof closed, PROT_READ));
	install(SIGSEGV, simple, 0);
	install(SIGUSR1, inform, SA_SIGINFO | SA_ONSTACK);
	count = 0;
	SHOW(raise(SIGUSR1));
	SHOW(count * 100 + last);
	SHOW(mprotect(closed, sizeof closed, PROT_READ | PROT_WRITE));
	SHOW(sigaltstack(&old, 0));

	// Ignored signals, and one that is waited for.
	signal(SIGUSR1, SIG_IGN);
	SHOW(raise(SIGUSR1));
	sigemptyset(&set);
	sigaddset(&set, SIGRTMIN);
	sigprocmask(SIG_BLOCK, &set, 0);
	sigqueue(getpid(), SIGRTMIN, (union sigval){.sival_int = 5});
	siginfo_t info;
	SHOW(sigwaitinfo(&set, &info) == SIGRTMIN);
	SHOW(info.si_value.sival_int);
	signal(SIGTERM, SIG_DFL);
	raise(SIGTERM);
	return 0;
}
