// The registers of AVX: over system calls, faults, signals, threads and children, and in signal frames.
#define _GNU_SOURCE
#include <cpuid.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

static volatile int count, seen;

static void load(uint64_t seed)
{
	uint64_t value[4];
	for (int i = 0; i < 4; i++)
		value[i] = seed + i;
	asm volatile("vmovdqu %0, %%ymm15; vmovdqu %%ymm15, %%ymm7; vmovdqu %%ymm15, %%ymm0" ::"m"(value)
		     : "xmm0", "xmm7", "xmm15");
}

// How many of the three registers differ from what `load` has set.
static int wrong(uint64_t seed)
{
	uint64_t a[4], b[4], c[4];
	asm volatile("vmovdqu %%ymm0, %0; vmovdqu %%ymm7, %1; vmovdqu %%ymm15, %2" : "=m"(a), "=m"(b), "=m"(c));
	int differs = 0;
	for (int i = 0; i < 4; i++)
		differs += (a[i] != seed + i) + (b[i] != seed + i) + (c[i] != seed + i);
	return differs;
}

// The upper half of register 7 in a frame: `XSAVE` has it at 576 + 16 * 7.
static uint64_t *upper(ucontext_t *context)
{
	char *state = (char *)context->uc_mcontext.fpregs;
	uint32_t magic;
	memcpy(&magic, state + 464, 4);
	return magic == 0x46505853 ? (uint64_t *)(state + 576 + 16 * 7) : 0;
}

static void clobber(int number, siginfo_t *info, void *context)
{
	count++;
	load(0xdead0000);
	uint64_t *saved = upper(context);
	seen = saved ? (int)saved[0] : -1;
}

static void change(int number, siginfo_t *info, void *context)
{
	uint64_t *saved = upper(context);
	load(0xdead0000);
	if (saved)
		saved[1] = 4242;
}

static void install(int number, void *handler)
{
	struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
	sigaction(number, &action, 0);
}

static void *works(void *argument)
{
	long bad = 0;
	for (int i = 0; i < 200; i++) {
		load((uint64_t)(uintptr_t)argument * 1000);
		asm volatile("syscall" : : "a"(24) : "rcx", "r11", "memory");
		for (volatile int k = 0; k < 2000; k++)
			;
		bad += wrong((uint64_t)(uintptr_t)argument * 1000);
	}
	return (void *)bad;
}

int main(void)
{
	setvbuf(stdout, 0, _IONBF, 0);
	unsigned a, b, c, d;
	__cpuid(1, a, b, c, d);
	printf("xsave %d osxsave %d avx %d\n", c >> 26 & 1, c >> 27 & 1, c >> 28 & 1);
	uint32_t low, high;
	asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
	printf("components %d\n", low & 7);

	load(1);
	asm volatile("syscall" : : "a"(39) : "rcx", "r11", "memory");
	int bad = wrong(1);
	printf("after a call: %d\n", bad);

	char *page = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	load(2);
	*(volatile char *)(page + 8192) = 1;
	bad = wrong(2);
	printf("after a fault: %d\n", bad);

	install(SIGUSR1, clobber);
	long process = getpid();
	load(3);
	asm volatile("syscall" : : "a"(62), "D"(process), "S"((long)SIGUSR1) : "rcx", "r11", "memory");
	bad = wrong(3);
	printf("after a signal: %d, in its frame %d, handlers %d\n", bad, seen, count);

	install(SIGUSR1, change);
	load(4);
	asm volatile("syscall" : : "a"(62), "D"(process), "S"((long)SIGUSR1) : "rcx", "r11", "memory");
	uint64_t value[4];
	asm volatile("vmovdqu %%ymm7, %0" : "=m"(value));
	printf("changed by a handler: %d %d %d\n", (int)value[1], (int)value[2], (int)value[3]);

	install(SIGALRM, clobber);
	count = bad = 0;
	struct itimerval often = {.it_value = {.tv_usec = 5000}, .it_interval = {.tv_usec = 5000}};
	setitimer(ITIMER_REAL, &often, 0);
	while (count < 20) {
		load(5);
		for (volatile int k = 0; k < 1000; k++)
			;
		bad += wrong(5) != 0;
	}
	setitimer(ITIMER_REAL, &(struct itimerval){0}, 0);
	printf("under a timer: %d\n", bad);

	pthread_t threads[4];
	for (long i = 0; i < 4; i++)
		pthread_create(&threads[i], 0, works, (void *)(i + 1));
	for (int i = 0; i < 4; i++) {
		void *result;
		pthread_join(threads[i], &result);
		printf("thread %d: %ld\n", i, (long)result);
	}

	load(6);
	long child;
	asm volatile("syscall" : "=a"(child) : "a"(57) : "rcx", "r11", "memory");
	bad = wrong(6);
	if (!child)
		_exit(bad);
	int status;
	waitpid(child, &status, 0);
	printf("after fork: %d, in the child %d\n", bad, WEXITSTATUS(status));
	return 0;
}
