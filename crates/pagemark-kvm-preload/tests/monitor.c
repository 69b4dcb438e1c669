/*
 * A small virtual machine monitor, whose machine has a ring of as many bytes as its argument says. With "first" as its
 * argument, it is number 1 of a namespace of process ids. It does what it reads from its standard input, a command a
 * line, and answers each with a line: "ok" and what was asked for, or "error" and a number of errno.
 *
 *   slot NUMBER ADDRESS PAGES BUFFER FLAGS   sets a memory slot, to the begin of a buffer; 0 pages drop it
 *   write ADDRESS COUNT STRIDE               the machine writes to a byte of each page
 *   poke BUFFER PAGE                         the monitor itself writes
 *   get NUMBER PAGES                         reads the log of a slot: the pages
 *   clear NUMBER FIRST PAGES                 clears a part of it
 *   mode OPTIONS                             the manual mode
 *   protect BUFFER                           has userfaultfd tell of writes to a buffer, and ends that
 *   where                                    the addresses of the buffers
 *   fork                                     a child reads the log of slot 1, and executes another program
 *   nest SOCKET                              a child, which is number 1 of its own namespace of process ids, reads
 *                                            that log, and makes a machine with a library that is asked at a socket
 *   load SEED                                a thread lets the machine write to slot 2 all the time
 *   follow ROUNDS                            copies what the log of slot 2 says, again and again
 *   drop ROUNDS                              drops slot 4 and sets it again, again and again
 *   settle                                   ends the load, and compares the copy with the memory
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE = 4096, BUFFERS = 4, BUFFER_PAGES = 1024, BOOT_BYTES = 2 << 20 };

static int machine, processor;
static struct kvm_run *run;
static char *buffers[BUFFERS], *copy;
static atomic_int loading;
static pthread_t loader;
static uint64_t random_state;

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static int set_slot(uint32_t slot, uint64_t address, uint64_t bytes, void *memory, uint32_t flags)
{
	struct kvm_userspace_memory_region region = {
		.slot = slot, .flags = flags, .guest_phys_addr = address, .memory_size = bytes, .userspace_addr = (uintptr_t)memory,
	};

	return ioctl(machine, KVM_SET_USER_MEMORY_REGION, &region);
}

/* The machine increments a byte of each page. */
static int let_write(uint64_t address, uint64_t count, uint64_t stride)
{
	struct kvm_regs registers = {
		.rip = 0x8000, .rsp = 0x7000, .rflags = 2, .rdi = address, .rcx = count, .rsi = stride * PAGE,
	};

	if (ioctl(processor, KVM_SET_REGS, &registers))
		return -1;
	/* A tracer's stop ends the call. */
	while (ioctl(processor, KVM_RUN, 0))
		if (errno != EINTR)
			return -1;
	if (run->exit_reason != KVM_EXIT_HLT) {
		fprintf(stderr, "exit %u\n", run->exit_reason);
		errno = EPROTO;
		return -1;
	}
	return 0;
}

/* With a ring of so many bytes in place of the log, if any. */
static void make_machine(uint64_t ring_bytes)
{
	struct kvm_enable_cap ring = { .cap = KVM_CAP_DIRTY_LOG_RING, .args = { ring_bytes } };
	static const unsigned char program[] = {
		0xfe, 0x07,       /* incb (%rdi) */
		0x48, 0x01, 0xf7, /* add %rsi, %rdi */
		0x48, 0xff, 0xc9, /* dec %rcx */
		0x75, 0xf6,       /* jnz */
		0xf4,             /* hlt */
	};
	struct kvm_segment code = { .limit = ~0u, .selector = 8, .present = 1, .type = 11, .s = 1, .l = 1, .g = 1 };
	struct kvm_segment data = { .limit = ~0u, .selector = 16, .present = 1, .type = 3, .s = 1, .db = 1, .g = 1 };
	struct kvm_sregs registers;
	int device = open("/dev/kvm", O_RDWR | O_CLOEXEC);
	char *boot = mmap(NULL, BOOT_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint64_t *top = (void *)(boot + 0x1000), *middle = (void *)(boot + 0x2000), *low = (void *)(boot + 0x3000);

	if (device < 0 || boot == MAP_FAILED)
		die("/dev/kvm");
	machine = ioctl(device, KVM_CREATE_VM, 0);
	if (machine < 0)
		die("KVM_CREATE_VM");
	if (ring_bytes && ioctl(machine, KVM_ENABLE_CAP, &ring)) {
		printf("error %d\n", errno);
		exit(1);
	}
	for (int i = 0; i < BUFFERS; i++) {
		/* The last is shared. */
		int kind = i == BUFFERS - 1 ? MAP_SHARED : MAP_PRIVATE;

		buffers[i] = mmap(NULL, BUFFER_PAGES * PAGE, PROT_READ | PROT_WRITE, kind | MAP_ANONYMOUS, -1, 0);
		if (buffers[i] == MAP_FAILED)
			die("mmap");
		madvise(buffers[i], BUFFER_PAGES * PAGE, MADV_NOHUGEPAGE);
		memset(buffers[i], 1, BUFFER_PAGES * PAGE);
	}
	copy = calloc(BUFFER_PAGES, PAGE);
	/* The first GiB, by pages of 2 MiB that are marked as used and written. */
	top[0] = 0x2067;
	middle[0] = 0x3067;
	for (uint64_t i = 0; i < 512; i++)
		low[i] = i << 21 | 0xe7;
	memcpy(boot + 0x8000, program, sizeof(program));
	if (set_slot(0, 0, BOOT_BYTES, boot, 0))
		die("slot 0");
	processor = ioctl(machine, KVM_CREATE_VCPU, 0);
	if (processor < 0)
		die("KVM_CREATE_VCPU");
	run = mmap(NULL, ioctl(device, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, processor, 0);
	if (run == MAP_FAILED || ioctl(processor, KVM_GET_SREGS, &registers))
		die("processor");
	registers.cr3 = 0x1000;
	registers.cr4 = 0x20;
	registers.cr0 = 0x80050033;
	registers.efer = 0x500;
	registers.cs = code;
	registers.ds = registers.es = registers.fs = registers.gs = registers.ss = data;
	if (ioctl(processor, KVM_SET_SREGS, &registers))
		die("KVM_SET_SREGS");
}

static uint64_t next(uint64_t below)
{
	random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
	return (random_state >> 33) % below;
}

static void *load(void *unused)
{
	while (atomic_load(&loading)) {
		uint64_t first = next(BUFFER_PAGES), stride = 1 + next(8), most = (BUFFER_PAGES - 1 - first) / stride + 1;

		if (let_write(0x20000000 + first * PAGE, 1 + next(most > 16 ? 16 : most), stride))
			die("load");
	}
	return unused;
}

static int get(uint32_t slot, uint64_t *bits)
{
	struct kvm_dirty_log log = { .slot = slot, .dirty_bitmap = bits };

	return ioctl(machine, KVM_GET_DIRTY_LOG, &log);
}

static int clear(uint32_t slot, uint64_t first, uint32_t pages, uint64_t *bits)
{
	struct kvm_clear_dirty_log log = { .slot = slot, .first_page = first, .num_pages = pages, .dirty_bitmap = bits };

	return ioctl(machine, KVM_CLEAR_DIRTY_LOG, &log);
}

/* Copies what was written in slot 2 since the last call. In the manual mode, the pages are cleared first, in two parts. */
static int follow(int is_manual)
{
	uint64_t bits[BUFFER_PAGES / 64];

	if (get(2, bits))
		return -1;
	if (is_manual && (clear(2, 0, 512, bits) || clear(2, 512, 512, bits + 8)))
		return -1;
	for (int page = 0; page < BUFFER_PAGES; page++)
		if (bits[page / 64] >> page % 64 & 1)
			memcpy(copy + page * PAGE, buffers[2] + page * PAGE, PAGE);
	return 0;
}

/* Goes on as number 1 of a new namespace of process ids; the caller waits for it. */
static void become_first(void)
{
	pid_t child;
	int status;

	if (unshare(CLONE_NEWPID)) {
		printf("error %d\n", errno);
		exit(1);
	}
	child = fork();
	if (child < 0)
		die("fork");
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		return;
	}
	waitpid(child, &status, 0);
	exit(!!status);
}

/* 0, if a child that has the process id of this process is another process for the library. */
static int nest(const char *socket)
{
	uint64_t bits[BUFFER_PAGES / 64];
	int status;
	pid_t parent = getpid(), child = fork();

	if (!child) {
		become_first();
		if (getpid() != parent)
			_exit(3);
		/* KVM refuses a process that has not made the machine. */
		if (get(1, bits) != -1 || errno != EIO)
			_exit(4);
		if (setenv("PAGEMARK_KVM_LOG", socket, 1))
			_exit(5);
		make_machine(0);
		/* The socket is there before the machine is. */
		_exit(access(socket, F_OK) ? 6 : 0);
	}
	if (waitpid(child, &status, 0) != child)
		return -1;
	return status;
}

int main(int argc, char **argv)
{
	static uint64_t bits[BUFFER_PAGES / 64];
	static const uint64_t full[BUFFER_PAGES / 64] = { [0 ... BUFFER_PAGES / 64 - 1] = ~0ull };
	unsigned long a, b, c, d, e;
	int is_manual = 0;
	char line[256], path[201];

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc > 1 && !strcmp(argv[1], "first"))
		become_first();
	make_machine(argc > 1 ? strtoul(argv[1], NULL, 10) : 0);
	printf("ok\n");
	while (fgets(line, sizeof(line), stdin)) {
		int failed = 0;

		if (sscanf(line, "slot %lu %lx %lu %lu %lu", &a, &b, &c, &d, &e) == 5) {
			failed = set_slot(a, b, c * PAGE, c ? buffers[d] : NULL, e);
		} else if (sscanf(line, "write %lx %lu %lu", &a, &b, &c) == 3) {
			failed = let_write(a, b, c);
		} else if (sscanf(line, "poke %lu %lu", &a, &b) == 2) {
			buffers[a][b * PAGE]++;
		} else if (sscanf(line, "get %lu %lu", &a, &b) == 2) {
			failed = get(a, bits);
			if (!failed) {
				printf("ok");
				for (unsigned long page = 0; page < b; page++)
					if (bits[page / 64] >> page % 64 & 1)
						printf(" %lu", page);
				printf("\n");
				continue;
			}
		} else if (sscanf(line, "clear %lu %lu %lu", &a, &b, &c) == 3) {
			failed = clear(a, b, c, (uint64_t *)full);
		} else if (sscanf(line, "mode %lu", &a) == 1) {
			struct kvm_enable_cap request = { .cap = KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2, .args = { a } };

			failed = ioctl(machine, KVM_ENABLE_CAP, &request);
			is_manual = !failed ? a != 0 : is_manual;
		} else if (sscanf(line, "protect %lu", &a) == 1) {
			struct uffdio_api api = { .api = UFFD_API };
			struct uffdio_register range = {
				.range = { (uintptr_t)buffers[a], BUFFER_PAGES * PAGE }, .mode = UFFDIO_REGISTER_MODE_MISSING,
			};
			int userfaultfd = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);

			failed = userfaultfd < 0 || ioctl(userfaultfd, UFFDIO_API, &api) ||
				 ioctl(userfaultfd, UFFDIO_REGISTER, &range);
			int error = errno;
			close(userfaultfd);
			errno = error;
		} else if (!strcmp(line, "where\n")) {
			printf("ok %lu %lu %lu %lu\n", (unsigned long)buffers[0], (unsigned long)buffers[1],
			       (unsigned long)buffers[2], (unsigned long)buffers[3]);
			continue;
		} else if (!strcmp(line, "fork\n")) {
			int status;
			pid_t child = fork();

			if (!child) {
				/* KVM refuses a process that has not made the machine. */
				if (get(1, bits) != -1 || errno != EIO)
					_exit(1);
				execlp("true", "true", NULL);
				_exit(2);
			}
			failed = waitpid(child, &status, 0) != child || status;
			errno = ECHILD;
		} else if (sscanf(line, "nest %200s", path) == 1) {
			failed = nest(path);
			errno = ECHILD;
		} else if (sscanf(line, "load %lu", &a) == 1) {
			random_state = a;
			atomic_store(&loading, 1);
			failed = pthread_create(&loader, NULL, load, NULL);
		} else if (sscanf(line, "follow %lu", &a) == 1) {
			for (unsigned long i = 0; i < a && !failed; i++) {
				failed = follow(is_manual);
				usleep(500);
			}
		} else if (sscanf(line, "drop %lu", &a) == 1) {
			for (unsigned long i = 0; i < a && !failed; i++) {
				failed = set_slot(4, 0x38000000, 64 * PAGE, buffers[3], i & 1) || set_slot(4, 0, 0, NULL, 0);
				usleep(200);
			}
		} else if (!strcmp(line, "settle\n")) {
			atomic_store(&loading, 0);
			pthread_join(loader, NULL);
			failed = follow(is_manual);
			if (!failed && memcmp(copy, buffers[2], BUFFER_PAGES * PAGE)) {
				failed = 1;
				errno = EILSEQ;
			}
		} else {
			failed = 1;
			errno = EINVAL;
		}
		if (failed)
			printf("error %d\n", errno);
		else
			printf("ok\n");
	}
	return 0;
}
