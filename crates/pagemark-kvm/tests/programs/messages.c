// Calls that send and receive several messages at once.
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SHOW(what) printf("%d: %s = %ld (%d)\n", __LINE__, #what, (long)(what), errno), errno = 0
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
	messages[0].msg_hdr.msg_iovlen = 2000;
	SHOW(sendmmsg(ends[0], messages, 1, 0));
	return 0;
}
