// A breakpoint in code that its file does not have, as the host's kernel puts it there for a tracer.
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

__attribute__((noinline, aligned(16))) int traced(int number)
{
	__asm__ volatile("nop");
	return number + 1;
}

int main(void)
{
	char *page = (char *)((uintptr_t)traced & -4096ul);
	mprotect(page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC);
	*(volatile unsigned char *)traced = 0xcc;
	mprotect(page, 8192, PROT_READ | PROT_EXEC);
	printf("%d\n", traced(1));
	return 0;
}
