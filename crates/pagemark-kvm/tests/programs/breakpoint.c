// A function that somebody traces: the host's kernel puts a breakpoint in its place in all processes.
// With an argument, the program puts one into its own code that its file does not have.
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

__attribute__((noinline, aligned(16))) int traced(int number)
{
	__asm__ volatile("nop");
	return number + 1;
}

static void *body(void *argument)
{
	return (void *)(intptr_t)traced((intptr_t)argument);
}

int main(int argc, char **argv)
{
	if (argc > 1) {
		char *page = (char *)((uintptr_t)traced & -4096ul);
		mprotect(page, 8192, PROT_READ | PROT_WRITE | PROT_EXEC);
		*(volatile unsigned char *)traced = 0xcc;
		mprotect(page, 8192, PROT_READ | PROT_EXEC);
	}
	pthread_t threads[4];
	intptr_t sum = 0;
	for (int i = 0; i < 4; i++)
		pthread_create(&threads[i], 0, body, (void *)(intptr_t)i);
	for (int i = 0; i < 4; i++) {
		void *result;
		pthread_join(threads[i], &result);
		sum += (intptr_t)result;
	}
	fflush(stdout);
	int status = -1;
	pid_t child = fork();
	if (!child)
		_exit(traced(6));
	waitpid(child, &status, 0);
	printf("%d, a child %#x\n", (int)sum, status);
	return 0;
}
