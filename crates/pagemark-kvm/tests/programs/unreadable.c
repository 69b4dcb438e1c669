// Mappings that may be written or executed, and of which nobody says that they may be read.
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static sigjmp_buf back;

static void handler(int number, siginfo_t *info, void *context)
{
	printf("signal %d, code %d\n", number, info->si_code);
	siglongjmp(back, 1);
}

// The first segment with code of a copy of this program cannot be read.
static void execute_unreadable(char *own)
{
	static char bytes[1 << 20];
	int from = open(own, O_RDONLY), to = open("copy", O_CREAT | O_TRUNC | O_WRONLY, 0755);
	ssize_t len = read(from, bytes, sizeof bytes);
	Elf64_Ehdr *header = (Elf64_Ehdr *)bytes;
	Elf64_Phdr *segments = (Elf64_Phdr *)(bytes + header->e_phoff);
	for (int i = 0; i < header->e_phnum; i++)
		if (segments[i].p_type == PT_LOAD && segments[i].p_flags & PF_X)
			segments[i].p_flags = PF_X;
	write(to, bytes, len);
	close(to);
	fflush(stdout);
	execl("./copy", "copy", "again", (char *)0);
}

int main(int argc, char **argv)
{
	if (argc > 1) {
		printf("executed\n");
		return 3;
	}
	struct sigaction action = {.sa_sigaction = handler, .sa_flags = SA_SIGINFO};
	sigaction(SIGSEGV, &action, 0);
	sigaction(SIGBUS, &action, 0);
	char *pages = mmap(0, 5 * 4096, PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (!sigsetjmp(back, 1))
		printf("read %d\n", *(volatile char *)pages);
	pages[4096] = 5;
	if (!sigsetjmp(back, 1))
		printf("read after a write: %d\n", *(volatile char *)(pages + 4096));
	// Lists and paths that the monitor reads.
	struct iovec *list = (struct iovec *)(pages + 8192);
	list[0] = (struct iovec){"text\n", 5};
	fflush(stdout);
	printf("writev %zd\n", writev(1, list, 1));
	strcpy(pages + 3 * 4096, "/etc/passwd");
	printf("open %d\n", open(pages + 3 * 4096, O_RDONLY) >= 0);
	mprotect(pages, 4096, PROT_NONE);
	mprotect(pages, 4096, PROT_WRITE);
	if (!sigsetjmp(back, 1))
		printf("read again: %d\n", *(volatile char *)pages);
	mprotect(pages, 4096, PROT_NONE);
	if (!sigsetjmp(back, 1))
		printf("read %d\n", *(volatile char *)pages);
	execute_unreadable(argv[0]);
	return 1;
}
