// Tries to reach the monitor by system calls. Each line of the output must end with `refused`.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static void expect(const char *what, long result, int error)
{
	printf("%s %s\n", what, result == -1 && errno == error ? "refused" : "ALLOWED");
}

// Sends `fd` behind a descriptor of the program.
static void expect_unsent(int socket, int fd)
{
	char control[CMSG_SPACE(2 * sizeof(int))] = {0};
	struct iovec bytes = {"a", 1};
	struct mmsghdr message = {.msg_hdr = {.msg_iov = &bytes,
	                                      .msg_iovlen = 1,
	                                      .msg_control = control,
	                                      .msg_controllen = sizeof control}};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message.msg_hdr);
	*header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(8)};
	memcpy(CMSG_DATA(header), (int[]){socket, fd}, 8);
	expect("sendmsg", sendmsg(socket, &message.msg_hdr, 0), EBADF);
	expect("sendmmsg", sendmmsg(socket, &message, 1, 0), EBADF);
}

int main(void)
{
	// A writable mapping of the monitor.
	char line[512];
	uint64_t start = 0, from, to;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (fgets(line, sizeof line, maps))
		if (sscanf(line, "%lx-%lx rw", &from, &to) == 2 && strstr(line, " rw") && from >= 0x500000000000 && !start)
			start = from;
	fclose(maps);
	if (!start)
		return 1;
	int zero = open("/dev/zero", O_RDWR);
	void *monitor = (void *)start;
	expect("read", read(zero, monitor, 4096), EFAULT);
	struct iovec list = {monitor, 4096};
	expect("readv", readv(zero, &list, 1), EFAULT);
	char own[64];
	struct iovec here = {own, 16}, there = {monitor, 16};
	expect("process_vm_readv", process_vm_readv(getpid(), &here, 1, &there, 1, 0), EFAULT);
	expect("process_vm_writev", process_vm_writev(getpid(), &here, 1, &there, 1, 0), EFAULT);
	expect("process_vm_readv into it", process_vm_readv(getppid(), &there, 1, &here, 1, 0), EFAULT);
	expect("process_vm_readv of a thread", process_vm_readv(syscall(SYS_gettid), &here, 1, &there, 1, 0), EFAULT);
	expect("write", write(zero, monitor, 16), EFAULT);
	expect("munmap", munmap(monitor, 4096), EINVAL);
	expect("mprotect", mprotect(monitor, 4096, PROT_READ), ENOMEM);
	expect("madvise", madvise(monitor, 4096, MADV_DONTNEED), ENOMEM);
	expect("madvise all", madvise((void *)0x10000, (1ul << 47) - 0x10000, MADV_DONTNEED), ENOMEM);
	expect("mmap", (long)mmap(monitor, 4096, 3, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0), ENOMEM);
	expect("mremap", (long)mremap(monitor, 4096, 8192, MREMAP_MAYMOVE), EFAULT);
	expect("uname", syscall(SYS_uname, monitor), EFAULT);
	int pair[2];
	socketpair(AF_UNIX, SOCK_DGRAM, 0, pair);
	send(pair[0], "abc", 3, 0);
	struct msghdr message = {.msg_iov = &list, .msg_iovlen = 1};
	expect("recvmsg", recvmsg(pair[1], &message, MSG_DONTWAIT), EFAULT);
	// Structures that lead to it: the list of PAGEMAP_SCAN, and the name of PROCMAP_QUERY.
	uint64_t page = (uint64_t)own & -4096ul;
	uint64_t scan[12] = {96, 0, page, page + 4096, 0, start, 1, 0, 0, 0, 8, 8};
	expect("PAGEMAP_SCAN", ioctl(open("/proc/self/pagemap", O_RDONLY), 0xc0606610, scan), EFAULT);
	uint64_t query[13] = {104, 0, (uint64_t)main};
	query[10] = 16, query[11] = start;
	expect("PROCMAP_QUERY", ioctl(open("/proc/self/maps", O_RDONLY), 0xc0686611, query), EFAULT);
	// The descriptors of the machine.
	int ours = 0;
	DIR *all = opendir("/proc/self/fd");
	for (struct dirent *entry; (entry = readdir(all));) {
		int fd = atoi(entry->d_name);
		if (fd < 1000)
			continue;
		ours++;
		expect("close", close(fd), EBADF);
		expect("dup", dup(fd), EBADF);
		expect("dup2", dup2(zero, fd), EBADF);
		expect_unsent(pair[0], fd);
	}
	// The device, the machine, a virtual CPU, the monitor's file.
	if (ours < 4)
		return 3;
	if (close_range(100, ~0u, 0))
		return 2;
	return 0;
}
