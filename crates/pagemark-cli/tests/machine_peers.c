/* A process puts values into the memory of its child, in turns by a call and by the file of that memory. The child
 * checks all of them in each round, and writes a line `ok N` to the file `progress` of the directory, or what is wrong
 * to `violated`. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

enum { PAGES = 256, PAGE = 4096 };

static int to_child[2], from_child[2];

static void transfer(int fd, void *value, int writes)
{
	ssize_t done = writes ? write(fd, value, sizeof(long)) : read(fd, value, sizeof(long));
	if (done != sizeof(long))
		_exit(2);
}

static void check(const char *directory, char *memory)
{
	char path[4096];
	long expected[PAGES] = {0};
	for (long number = 1;; number++) {
		long value;
		transfer(to_child[0], &value, 0);
		expected[number % PAGES] = number;
		for (int page = 0; page < PAGES; page++) {
			long found = *(long *)(memory + page * PAGE);
			if (found != expected[page]) {
				snprintf(path, sizeof path, "%s/violated", directory);
				FILE *file = fopen(path, "w");
				fprintf(file, "round %ld: page %d has %ld, not %ld\n", number, page, found, expected[page]);
				fclose(file);
				_exit(3);
			}
		}
		snprintf(path, sizeof path, "%s/progress", directory);
		int file = open(path, O_WRONLY | O_CREAT | O_APPEND, 0644);
		dprintf(file, "ok %ld\n", number);
		close(file);
		transfer(from_child[1], &number, 1);
	}
}

int main(int argc, char **argv)
{
	char *memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char path[64];
	if (argc < 2 || pipe(to_child) || pipe(from_child))
		return 1;
	pid_t child = fork();
	if (!child)
		check(argv[1], memory);
	snprintf(path, sizeof path, "/proc/%d/mem", child);
	int file = open(path, O_WRONLY);
	for (long number = 1;; number++) {
		void *place = memory + number % PAGES * PAGE;
		struct iovec here = {&number, sizeof number}, there = {place, sizeof number};
		/* A restored process may have no such file. */
		if (number % 2 || pwrite(file, &number, sizeof number, (off_t)place) != sizeof number)
			if (process_vm_writev(child, &here, 1, &there, 1, 0) != sizeof number)
				return 4;
		long value = number;
		transfer(to_child[1], &value, 1);
		transfer(from_child[0], &value, 0);
		usleep(5000);
	}
}
