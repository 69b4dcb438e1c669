// System calls that the machine does not have give an error that the program can handle.
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(void)
{
	for (int i = 0; i < 2; i++) {
		if (ptrace(PTRACE_TRACEME, 0, 0, 0) != -1 || errno != ENOSYS)
			return 1;
		if (syscall(SYS_bpf, 0, 0, 0) != -1 || errno != ENOSYS)
			return 2;
		if (syscall(SYS_seccomp, 1, 0, 0) != -1 || errno != ENOSYS)
			return 3;
		if (prctl(PR_SET_SECCOMP, 1) != -1 || errno != EINVAL)
			return 4;
		if (syscall(999) != -1 || errno != ENOSYS)
			return 5;
	}
	// As on a kernel without rings, and on a processor without protection keys.
	if (syscall(SYS_io_uring_setup, 1, 0) != -1 || errno != ENOSYS)
		return 9;
	char *page = mmap(0, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (syscall(SYS_pkey_alloc, 0, 0) != -1 || errno != EINVAL)
		return 6;
	if (syscall(SYS_pkey_mprotect, page, 4096, PROT_READ | PROT_WRITE, 0) != -1 || errno != EINVAL)
		return 7;
	if (syscall(SYS_pkey_mprotect, page, 4096, PROT_READ | PROT_WRITE, -1))
		return 8;
	*page = 1;
	return 0;
}
