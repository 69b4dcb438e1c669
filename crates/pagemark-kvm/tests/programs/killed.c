// Children that share the memory and are killed at any instant: the parent goes on.
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 8 << 20, ROUNDS = 12 };

static volatile pid_t child_id;
static volatile int round_number;

static void *killer(void *argument)
{
	for (int round = 1; round <= ROUNDS; round++) {
		while (round_number < round || !child_id)
			usleep(100);
		usleep(2000 + round * 700);
		kill(child_id, SIGKILL);
		child_id = 0;
	}
	return 0;
}

static char *mapped(void)
{
	return mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
}

int main(void)
{
	pthread_t thread;
	pthread_create(&thread, 0, killer, 0);
	char *kept = mapped();
	memset(kept, 5, BYTES);
	for (int round = 1; round <= ROUNDS; round++) {
		pid_t child = vfork();
		if (!child) {
			child_id = getpid();
			round_number = round;
			for (;;) {
				char *memory = mapped();
				memory[round] = 1;
				munmap(memory, BYTES);
			}
		}
		int status;
		waitpid(child, &status, 0);
		char *memory = mapped();
		memory[100] = 1;
		int bad = 0;
		for (int i = 0; i < BYTES; i += 4096)
			bad += kept[i] != 5 || memory[i];
		munmap(memory, BYTES);
		printf("round %d: %d %d\n", round, WTERMSIG(status), bad);
	}
	pthread_join(thread, 0);
	return 4;
}
