// What a program must not do: the argument names it. It must die as it does outside.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc < 2)
		return 9;
	const char *what = argv[1];
	uint64_t number = argc > 2 ? strtoull(argv[2], 0, 0) : 0;
	if (!strcmp(what, "jump"))
		((void (*)(void))number)();
	if (!strcmp(what, "read"))
		return *(volatile char *)number;
	if (!strcmp(what, "write"))
		*(volatile char *)number = 1;
	if (!strcmp(what, "stack"))
		asm volatile("mov %0, %%rsp; push %%rax" ::"r"(number));
	if (!strcmp(what, "ud2"))
		asm volatile("ud2");
	if (!strcmp(what, "int3"))
		asm volatile("int3");
	if (!strcmp(what, "int"))
		asm volatile("int $0x21");
	if (!strcmp(what, "int1"))
		asm volatile("int $1");
	if (!strcmp(what, "int 3"))
		asm volatile(".byte 0xcd, 3");
	if (!strcmp(what, "hlt"))
		asm volatile("hlt");
	if (!strcmp(what, "cr3"))
		asm volatile("mov %0, %%cr3" ::"r"(number));
	if (!strcmp(what, "lidt"))
		asm volatile("lidt (%0)" ::"r"(&number));
	if (!strcmp(what, "wrmsr"))
		asm volatile("wrmsr" ::"a"(0), "d"(0), "c"(0xc0000082));
	if (!strcmp(what, "out"))
		asm volatile("out %%al, %%dx" ::"a"(0), "d"(number));
	if (!strcmp(what, "iret")) {
		// To the privilege of a kernel.
		uint64_t frame[5] = {number, 0x10, 0x3202, (uint64_t)&frame, 0x18};
		asm volatile("mov %0, %%rsp; iretq" ::"r"(frame));
	}
	if (!strcmp(what, "segment"))
		asm volatile("mov %0, %%ss" ::"r"((uint32_t)number));
	if (!strcmp(what, "abort"))
		abort();
	if (!strcmp(what, "flags"))
		// Interrupts off and I/O allowed, in vain; then an instruction that would need them.
		asm volatile("push $0x3002; popf; cli");
	if (!strcmp(what, "rsp"))
		// A fault with a stack that is not there.
		asm volatile("mov %0, %%rsp; ud2" ::"r"(number));
	if (!strcmp(what, "gs"))
		asm volatile("swapgs");
	if (!strcmp(what, "sysret"))
		asm volatile("mov %0, %%rcx; sysretq" ::"r"(number));
	if (!strcmp(what, "call"))
		// A system call that has the kernel write to an address of the monitor.
		return syscall(SYS_read, open("/dev/zero", 0), number, 4096) < 0 ? 5 : 6;
	printf("alive\n");
	return 0;
}
