// Calls that change what is mapped, each checked by what the memory then holds or refuses.
#define _GNU_SOURCE
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

static sigjmp_buf back;
static volatile int code;
static void *volatile where;

static void on_fault(int number, siginfo_t *info, void *context)
{
	(void)context;
	code = number * 100 + info->si_code;
	where = info->si_addr;
	siglongjmp(back, 1);
}

// The signal and its code that an access raises; 0 if none.
static int touch(volatile char *at, int write)
{
	code = 0;
	if (!sigsetjmp(back, 1)) {
		if (write)
			*at = 7;
		else
			(void)*at;
	}
	if (code && where != (void *)at)
		printf("wrong address\n");
	return code;
}

#define SHOW(what) printf("%d: %s = %ld (%d)\n", __LINE__, #what, (long)(what), errno), errno = 0

int main(int argc, char **argv)
{
	struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
	sigaction(SIGSEGV, &action, 0);
	sigaction(SIGBUS, &action, 0);
	char *p = mmap(0, 16 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	SHOW(touch(p + 4096, 1));
	SHOW(mprotect(p + 4096, 4096, PROT_READ));
	SHOW(touch(p + 4096, 1));
	SHOW(touch(p + 4096, 0));
	SHOW(touch(p + 8192, 1));
	SHOW(mprotect(p + 4096, 4096, PROT_NONE));
	SHOW(touch(p + 4096, 0));
	SHOW(mprotect(p + 4096, 4096, PROT_READ | PROT_WRITE));
	SHOW(p[4096]);
	SHOW(munmap(p + 4096, 4096));
	SHOW(touch(p + 4096, 0));
	SHOW(mprotect(p, 12288, PROT_READ));
	SHOW(touch(p, 1));
	SHOW(touch(p + 8192, 1) != 0 || 1);
	char *moved = mremap(p + (4 << 20), 4 << 20, 12 << 20, MREMAP_MAYMOVE);
	moved[0] = 1;
	SHOW(touch(p + (4 << 20), 0));
	SHOW(touch(moved + (11 << 20), 1));
	SHOW(mremap(moved, 12 << 20, 4096, 0) == moved);
	SHOW(touch(moved + 4096, 0));
	SHOW(mremap(moved, 4096, 8192, MREMAP_FIXED, moved) == MAP_FAILED);
	char *fixed = mmap(p + (12 << 20), 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	SHOW(fixed == p + (12 << 20));
	SHOW(touch(fixed, 1));
	SHOW(mmap(fixed, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED);
	SHOW(mmap(fixed + 1, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED);
	SHOW(mmap(0, 0, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);
	SHOW((uintptr_t)mmap(0, 8192, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0) >> 31);
	SHOW(munmap(p + 1, 4096));

	SHOW(mmap(0, 0, PROT_READ, MAP_PRIVATE, 99, 0) == MAP_FAILED);

	// Memory that can only be executed: a function that returns 42.
	char *function = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memcpy(function, "\xb8\x2a\0\0\0\xc3", 6);
	SHOW(mprotect(function, 4096, PROT_EXEC));
	SHOW(((int (*)(void))function)());
	int code_file = memfd_create("code", 0);
	SHOW(write(code_file, "\xb8\x2a\0\0\0\xc3", 6));
	function = mmap(0, 4096, PROT_EXEC, MAP_PRIVATE, code_file, 0);
	SHOW(((int (*)(void))function)());
	SHOW(close(code_file));

	// Shared memory of System V.
	int id = shmget(IPC_PRIVATE, 10000, IPC_CREAT | 0600);
	char *first = shmat(id, 0, 0), *second = shmat(id, 0, SHM_RDONLY);
	strcpy(first + 9000, "in common");
	SHOW(strcmp(second + 9000, "in common"));
	SHOW(touch(second, 1));
	SHOW(touch(first + 12287, 1));
	char *placed = mmap(0, 12288, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	placed[1] = 1;
	SHOW(shmat(id, placed, 0) == (void *)-1);
	SHOW(shmat(id, placed + 1, SHM_REMAP) == (void *)-1);
	SHOW(shmat(id, 0, SHM_REMAP) == (void *)-1);
	SHOW(shmat(id, placed + 1, SHM_REMAP | SHM_RND) == placed);
	SHOW(placed[1]);
	SHOW(strcmp(placed + 9000, "in common"));
	if (!fork()) {
		first[5] = 55;
		_exit(0);
	}
	wait(0);
	SHOW(placed[5]);
	SHOW(shmdt(second));
	SHOW(touch(second, 0));
	SHOW(shmdt(second));
	SHOW(shmdt(first + 4096));
	char *elsewhere = mremap(placed, 12288, 12288, MREMAP_MAYMOVE | MREMAP_FIXED, p + (13 << 20));
	SHOW(elsewhere[5]);
	SHOW(shmdt(placed));
	SHOW(shmdt(elsewhere));
	SHOW(touch(elsewhere, 0));
	SHOW(shmctl(id, IPC_RMID, 0));
	SHOW(first[5]);
	SHOW(shmdt(first));
	SHOW(touch(first, 0));
	SHOW(shmat(id, 0, 0) == (void *)-1);
	SHOW(shmat(-1, 0, 0) == (void *)-1);

	// A file: a shared mapping and the end of the file.
	char name[] = "/tmp/pagemark-kvm-XXXXXX";
	int fd = mkstemp(name);
	unlink(name);
	SHOW(ftruncate(fd, 6000));
	char *shared = mmap(0, 12288, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	char *private = mmap(0, 12288, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	strcpy(shared + 4090, "written");
	char buffer[8] = "";
	SHOW(pread(fd, buffer, 8, 4090));
	SHOW(strcmp(buffer, "written"));
	SHOW(strcmp(private + 4090, "written"));
	private[4090] = 'W';
	SHOW(shared[4090]);
	SHOW(touch(shared + 8192, 0));
	SHOW(touch(shared + 8191, 0));
	SHOW(ftruncate(fd, 12288));
	SHOW(touch(shared + 8192, 1));
	SHOW(ftruncate(fd, 0));
	SHOW(touch(shared, 0));
	SHOW(close(fd));

	// Zeros again.
	char *zeros = mmap(0, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memset(zeros, 5, 4 << 20);
	SHOW(madvise(zeros + 4096, 4096, MADV_DONTNEED));
	SHOW(zeros[4096] + zeros[8192]);
	unsigned char present[4];
	SHOW(mincore(zeros, 4096, present));

	// The heap.
	char *end = sbrk(0);
	SHOW(sbrk(1 << 20) == end);
	end[(1 << 20) - 1] = 3;
	SHOW(sbrk(-(1 << 20)) == end + (1 << 20));
	SHOW(sbrk(8192) == end);
	SHOW(end[8191]);

	// Data is not executable, code is not writable.
	static unsigned char ret[] = {0xc3};
	code = 0;
	if (!sigsetjmp(back, 1))
		((void (*)(void))ret)();
	SHOW(code);
	unsigned char *made = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	memcpy(made, "\xb8\x2a\0\0\0\xc3", 6);
	mprotect(made, 4096, PROT_READ | PROT_EXEC);
	SHOW(((int (*)(void))made)());
	SHOW(touch((char *)made, 1));
	SHOW(touch((char *)main, 1));
	SHOW(touch((char *)8, 0));
	SHOW(touch((char *)0x7fff12345000, 0));

	// System calls on memory that is not there.
	SHOW(syscall(SYS_read, 0, 8, 4) < 0);
	SHOW(syscall(SYS_write, 1, zeros + (512 << 20), 4));
	SHOW(syscall(SYS_uname, 0x7fff12345000));
	SHOW(syscall(SYS_madvise, 0x100000, ~4095ul, MADV_DONTNEED));
	SHOW(munmap((void *)0x10000, 1ul << 47));

	// Copies within the process, and from another.
	char from[] = "some text", to[sizeof from] = "";
	struct iovec here = {to, 4}, there = {from, 4};
	SHOW(process_vm_readv(getpid(), &here, 1, &there, 1, 0));
	SHOW(memcmp(to, "some", 5));
	struct iovec rest[] = {{from + 4, 2}, {from + 6, 4}}, behind = {to + 4, 6};
	SHOW(process_vm_writev(getpid(), rest, 2, &behind, 1, 0));
	SHOW(memcmp(to, from, sizeof from));
	SHOW(process_vm_readv(getpid(), &here, 1, &(struct iovec){(void *)8, 4}, 1, 0));
	SHOW(process_vm_readv(999999999, &here, 1, &there, 1, 0));
	int child = fork();
	if (!child) {
		pause();
		_exit(0);
	}
	memset(from, 0, sizeof from);
	SHOW(process_vm_readv(child, &here, 1, &there, 1, 0));
	SHOW(memcmp(to, "some", 4));
	kill(child, SIGKILL);
	(void)argc, (void)argv;
	return 3;
}
