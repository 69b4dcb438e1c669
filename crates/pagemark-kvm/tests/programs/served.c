// A file of a file system that a thread of the program serves is mapped with all its pages. The
// thread accesses memory for the first time while the call waits for it.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define BYTES 8192

// 64 MiB, in the midst of which nothing is accessed.
#define FRESH (1 << 26)
static char *fresh;
static int fuse;
static volatile int reads;

static void answer(uint64_t request, int error, void *data, size_t len)
{
	struct fuse_out_header header = {.len = sizeof header + len, .error = -error, .unique = request};
	struct iovec parts[] = {{&header, sizeof header}, {data, len}};
	writev(fuse, parts, 2);
}

static struct fuse_attr about(uint64_t inode)
{
	struct fuse_attr attr = {.ino = inode, .nlink = 1, .mode = inode == 1 ? S_IFDIR | 0755 : S_IFREG | 0644};
	attr.size = BYTES;
	return attr;
}

static void *serve(void *none)
{
	static char request[1 << 18];
	while (read(fuse, request, sizeof request) > 0) {
		struct fuse_in_header *in = (void *)request;
		struct fuse_init_out init = {.major = 7, .minor = 31, .max_write = 4096};
		struct fuse_entry_out entry = {.nodeid = 2, .attr = about(2)};
		struct fuse_attr_out attr = {.attr = about(in->nodeid)};
		struct fuse_open_out opened = {0};
		struct fuse_read_in *asked = (void *)(in + 1);
		if (in->opcode == FUSE_INIT)
			answer(in->unique, 0, &init, sizeof init);
		else if (in->opcode == FUSE_LOOKUP)
			answer(in->unique, 0, &entry, sizeof entry);
		else if (in->opcode == FUSE_GETATTR)
			answer(in->unique, 0, &attr, sizeof attr);
		else if (in->opcode == FUSE_OPEN)
			answer(in->unique, 0, &opened, sizeof opened);
		else if (in->opcode == FUSE_READ) {
			memset(fresh + FRESH / 2, 'a', BYTES);
			reads++;
			answer(in->unique, 0, fresh + FRESH / 2, asked->size < BYTES ? asked->size : BYTES);
		} else if (in->opcode != FUSE_FORGET)
			answer(in->unique, ENOSYS, 0, 0);
	}
	return none;
}

int main(void)
{
	char options[99];
	fresh = mmap(0, FRESH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	fuse = open("/dev/fuse", O_RDWR);
	mkdir("served", 0755);
	snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", fuse);
	if (fuse < 0 || unshare(CLONE_NEWNS) || mount(0, "/", 0, MS_REC | MS_PRIVATE, 0) ||
	    mount("test", "served", "fuse", 0, options)) {
		printf("no file system: %s\n", strerror(errno));
		return 0;
	}
	pthread_t server;
	pthread_create(&server, 0, serve, 0);
	int file = open("served/file", O_RDONLY);
	char *mapped = mmap(0, BYTES, PROT_READ, MAP_PRIVATE | MAP_POPULATE, file, 0);
	if (mapped == MAP_FAILED)
		return 1;
	int before = reads;
	printf("served %d, then %c%c\n", before > 0, mapped[0], mapped[BYTES - 1]);
	printf("read again %d\n", reads != before);
	char *private = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	unsigned char there[2] = {0};
	mincore(private, BYTES, there);
	printf("there %d %d\n", there[0] & 1, there[1] & 1);
	// While the thread is there: the kernel waits for its answers.
	munmap(mapped, BYTES);
	close(file);
	umount2("served", 0);
	pthread_join(server, 0);
	return 0;
}
