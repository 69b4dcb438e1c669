// Guard pages, where the kernel has them and tells of them.
#define _GNU_SOURCE
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

static sigjmp_buf back;
static siginfo_t last;

static void on_fault(int number, siginfo_t *info, void *context)
{
	last = *info;
	siglongjmp(back, number);
}

static void touch(const char *what, volatile char *at)
{
	int number = sigsetjmp(back, 1);
	if (!number)
		*at = 1;
	printf("%s: signal %d, code %d, %d\n", what, number, number ? last.si_code : 0,
	       !number || last.si_addr == (void *)at);
}

int main(void)
{
	struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
	sigaction(SIGSEGV, &action, 0);
	sigaction(SIGBUS, &action, 0);
	char *pages = mmap(0, 4 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	pages[0] = pages[4096] = 1;
	// MADV_GUARD_INSTALL
	if (madvise(pages + 4096, 8192, 102)) {
		puts("no guard pages");
		return 0;
	}
	uint64_t entry = 0;
	pread(open("/proc/self/pagemap", O_RDONLY), &entry, 8, (uintptr_t)(pages + 4096) / 4096 * 8);
	if (!(entry >> 58 & 1)) {
		puts("the kernel does not tell");
		return 0;
	}
	for (int i = 0; i < 4; i++)
		touch("guarded", pages + i * 4096);
	// MADV_GUARD_REMOVE
	printf("removed: %d\n", madvise(pages, 4 * 4096, 103));
	for (int i = 0; i < 4; i++)
		touch("not guarded", pages + i * 4096);
	return 0;
}
