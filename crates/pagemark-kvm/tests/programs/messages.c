// Calls that send and receive several messages at once.
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SHOW(what)                                                         \
	do {                                                                   \
		long result = (long)(what);                                        \
		printf("%d: %s = %ld (%d)\n", __LINE__, #what, result, errno);     \
		errno = 0;                                                         \
	} while (0)
#define COUNT 12

int main(void)
{
	int ends[2];
	SHOW(socketpair(AF_UNIX, SOCK_DGRAM, 0, ends));
	char bytes[COUNT][40], control[COUNT][64];
	struct iovec parts[COUNT][2];
	struct mmsghdr messages[COUNT];
	memset(messages, 0, sizeof messages);
	for (int i = 0; i < COUNT; i++) {
		snprintf(bytes[i], 40, "message %d, its other part", i);
		parts[i][0] = (struct iovec){bytes[i], 9};
		parts[i][1] = (struct iovec){bytes[i] + 9, i};
		messages[i].msg_hdr.msg_iov = parts[i];
		messages[i].msg_hdr.msg_iovlen = 2;
	}
	SHOW(sendmmsg(ends[0], messages, COUNT - 2, 0));
	for (int i = 0; i < COUNT; i++)
		SHOW(messages[i].msg_len);
	memset(bytes, 0, sizeof bytes);
	int on = 1;
	SHOW(setsockopt(ends[1], SOL_SOCKET, SO_PASSCRED, &on, sizeof on));
	for (int i = 0; i < COUNT; i++) {
		messages[i].msg_len = 77;
		messages[i].msg_hdr.msg_control = control[i];
		messages[i].msg_hdr.msg_controllen = 64;
	}
	struct timespec limit = {.tv_sec = 1};
	SHOW(recvmmsg(ends[1], messages, 4, 0, &limit));
	SHOW(recvmmsg(ends[1], messages + 4, COUNT - 4, MSG_DONTWAIT, 0));
	for (int i = 0; i < COUNT; i++) {
		SHOW(messages[i].msg_len);
		SHOW(messages[i].msg_hdr.msg_controllen);
		SHOW(messages[i].msg_hdr.msg_flags);
		SHOW(messages[i].msg_hdr.msg_iov == parts[i]);
		printf("<%s>\n", bytes[i]);
	}
	SHOW(recvmmsg(ends[1], messages, 2, MSG_DONTWAIT, 0));
	SHOW(recvmmsg(ends[1], messages, 0, MSG_DONTWAIT, 0));
	SHOW(sendmmsg(ends[0], 0, 2, 0));
	SHOW(sendmmsg(99, messages, 2, 0));
	// The second message lies where nothing is mapped: the first is sent.
	char *page = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	munmap(page + 4096, 4096);
	struct mmsghdr *last = (struct mmsghdr *)(page + 4096) - 1;
	*last = messages[3];
	last->msg_hdr.msg_controllen = 0;
	SHOW(sendmmsg(ends[0], last, 2, 0));
	SHOW(last->msg_len);
	// Descriptors in one message, and in the second of two.
	int pipes[2];
	SHOW(pipe(pipes));
	for (int i = 0; i < 3; i++) {
		messages[i].msg_hdr.msg_iovlen = 1;
		messages[i].msg_hdr.msg_controllen = i == 1 ? 0 : 64;
		struct cmsghdr *header = (struct cmsghdr *)control[i];
		*header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(8)};
		memcpy(CMSG_DATA(header), pipes, 8);
		messages[i].msg_hdr.msg_controllen = i == 1 ? 0 : CMSG_SPACE(8);
	}
	SHOW(sendmsg(ends[0], &messages[0].msg_hdr, 0));
	SHOW(sendmmsg(ends[0], messages + 1, 2, 0));
	for (int i = 0; i < 5; i++) {
		messages[i].msg_hdr.msg_control = control[i];
		messages[i].msg_hdr.msg_controllen = 64;
		SHOW(recvmsg(ends[1], &messages[i].msg_hdr, MSG_DONTWAIT));
		struct cmsghdr *header = CMSG_FIRSTHDR(&messages[i].msg_hdr);
		int passed[2] = {-1, -1};
		for (; header; header = CMSG_NXTHDR(&messages[i].msg_hdr, header))
			if (header->cmsg_type == SCM_RIGHTS)
				memcpy(passed, CMSG_DATA(header), 8);
		char end = 0;
		SHOW(passed[1] < 0 ? -1 : write(passed[1], "x", 1) + read(pipes[0], &end, 1));
		close(passed[0]);
		close(passed[1]);
	}
	memcpy(CMSG_DATA((struct cmsghdr *)control[0]), (int[]){pipes[0], 99}, 8);
	messages[0].msg_hdr.msg_controllen = CMSG_SPACE(8);
	((struct cmsghdr *)control[0])->cmsg_len = CMSG_LEN(8);
	((struct cmsghdr *)control[0])->cmsg_level = SOL_SOCKET;
	((struct cmsghdr *)control[0])->cmsg_type = SCM_RIGHTS;
	SHOW(sendmsg(ends[0], &messages[0].msg_hdr, 0));
	((struct cmsghdr *)control[0])->cmsg_len = 3;
	SHOW(sendmsg(ends[0], &messages[0].msg_hdr, 0));
	messages[0].msg_hdr.msg_control = 0;
	SHOW(sendmsg(ends[0], &messages[0].msg_hdr, 0));
	messages[0].msg_hdr.msg_control = control[0];
	messages[0].msg_hdr.msg_controllen = 8 << 20;
	SHOW(sendmsg(ends[0], &messages[0].msg_hdr, 0));
	messages[0].msg_hdr.msg_iovlen = 2000;
	SHOW(sendmmsg(ends[0], messages, 1, 0));
	return 0;
}
