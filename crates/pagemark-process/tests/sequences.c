/* Threads that are nearly always in a restartable sequence. Each advances a number in every sequence and checks that
 * the number advanced once. `count` has the sum; `wrong` says what was wrong; `none` says that the C library registers
 * no area for restartable sequences. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#if __has_include(<sys/rseq.h>)
#include <sys/rseq.h>
#endif

#define THREADS 3

static volatile uint64_t advanced[THREADS];

static void say(const char *name, const char *text) {
	int file = open(name, O_WRONLY | O_CREAT, 0600);
	if (write(file, text, strlen(text)) < 0)
		_exit(98);
	close(file);
}

#ifdef RSEQ_SIG
static void advance(volatile uint64_t *number) {
	struct rseq *area = (void *)((char *)__builtin_thread_pointer() + __rseq_offset);
	__asm__ volatile(".pushsection __rseq_cs, \"aw\"\n"
			 ".balign 32\n"
			 "10: .long 0, 0\n"
			 ".quad 1f, (2f - 1f), 4f\n"
			 ".popsection\n"
			 "3: leaq 10b(%%rip), %%rax\n"
			 "movq %%rax, %[area]\n"
			 "1: movq %[number], %%rdx\n"
			 "incq %%rdx\n"
			 "movl $200000, %%ecx\n"
			 "5: decl %%ecx\n"
			 "jnz 5b\n"
			 "movq %%rdx, %[number]\n"
			 "2:\n"
			 ".pushsection __rseq_failure, \"ax\"\n"
			 ".byte 0x0f, 0xb9, 0x3d\n"
			 ".long 0x53053053\n"
			 "4: jmp 3b\n"
			 ".popsection\n"
			 : [area] "=m"(area->rseq_cs), [number] "+m"(*number)
			 :
			 : "rax", "rcx", "rdx", "memory", "cc");
}

static void *advances(void *argument) {
	volatile uint64_t *number = argument;
	for (uint64_t expected = 1;; expected++) {
		advance(number);
		if (*number != expected) {
			say("wrong", "a number did not advance by one");
			_exit(99);
		}
	}
}
#endif

int main(void) {
#ifdef RSEQ_SIG
	if (__rseq_size != 0) {
		int count = open("count", O_RDWR | O_CREAT, 0600);
		for (int i = 0; i < THREADS; i++) {
			pthread_t thread;
			if (pthread_create(&thread, NULL, advances, (void *)&advanced[i]))
				return 98;
		}
		for (;;) {
			char text[32];
			uint64_t sum = 0;
			for (int i = 0; i < THREADS; i++)
				sum += advanced[i];
			int length = snprintf(text, sizeof text, "%020llu", (unsigned long long)sum);
			if (pwrite(count, text, length, 0) != length)
				return 98;
			usleep(5000);
		}
	}
#endif
	say("none", "none");
	return 0;
}
