// The link to the program in /proc, with which the kernel does what it is told about links.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int main(int count, char **arguments)
{
	struct stat self, opened;
	stat(arguments[0], &self);
	// None, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS
	for (uint64_t resolve = 0; resolve <= 4; resolve += 2) {
		uint64_t how[3] = {O_RDONLY, 0, resolve};
		long fd = syscall(SYS_openat2, AT_FDCWD, "/proc/self/exe", how, sizeof how);
		int error = fd < 0 ? errno : 0;
		int same = fd >= 0 && !fstat(fd, &opened) && opened.st_ino == self.st_ino;
		printf("resolve %d: %d, errno %d, the program %d\n", (int)resolve, fd >= 0, error, same);
	}
	return 0;
}
