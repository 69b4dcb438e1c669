// userfaultfd: missing pages, write protection that waits, and written pages by PAGEMAP_SCAN.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SHOW(what) printf("%d: %s = %ld\n", __LINE__, #what, (long)(what)), fflush(stdout)

enum { PAGE = 4096, PAGES = 64 };

static int fd;
static volatile int missing, protected;

static void *serve(void *argument)
{
	for (;;) {
		struct uffd_msg message;
		if (read(fd, &message, sizeof message) != sizeof message)
			return 0;
		unsigned long at = message.arg.pagefault.address & -PAGE;
		if (message.arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WP) {
			protected++;
			struct uffdio_writeprotect release = {.range = {at, PAGE}};
			ioctl(fd, UFFDIO_WRITEPROTECT, &release);
		} else {
			static char page[PAGE] __attribute__((aligned(PAGE)));
			missing++;
			memset(page, 'a' + missing % 26, PAGE);
			struct uffdio_copy copy = {.dst = at, .src = (unsigned long)page, .len = PAGE};
			ioctl(fd, UFFDIO_COPY, &copy);
		}
	}
}

int main(int argc, char **argv)
{
	// Only the program's own accesses: the machine allows the kernel's too.
	fd = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_PAGEFAULT_FLAG_WP};
	SHOW(ioctl(fd, UFFDIO_API, &api));
	char *memory = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct uffdio_register range = {.range = {(unsigned long)memory, PAGES * PAGE},
					.mode = UFFDIO_REGISTER_MODE_MISSING | UFFDIO_REGISTER_MODE_WP};
	SHOW(ioctl(fd, UFFDIO_REGISTER, &range));
	pthread_t thread;
	pthread_create(&thread, 0, serve, 0);
	for (int i = 0; i < PAGES; i += 2)
		if (memory[i * PAGE + 5] != 'a' + (i / 2 + 1) % 26)
			printf("page %d is wrong\n", i);
	SHOW(missing);
	memory[PAGE] = 1;
	SHOW(missing);
	struct uffdio_writeprotect protect = {.range = {(unsigned long)memory, PAGES * PAGE},
					      .mode = UFFDIO_WRITEPROTECT_MODE_WP};
	SHOW(ioctl(fd, UFFDIO_WRITEPROTECT, &protect));
	for (int i = 0; i < PAGES; i += 4)
		memory[i * PAGE] = 'x';
	SHOW(protected);
	SHOW(memory[4 * PAGE] == 'x' && memory[4 * PAGE + 1] == 'a' + 3);
	return 0;
}
