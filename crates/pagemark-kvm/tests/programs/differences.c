// What is known to differ in the machine: each argument shows one feature. An exit status of 77 says
// that it cannot be shown here.
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/hw_breakpoint.h>
#include <linux/landlock.h>
#include <linux/perf_event.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <unistd.h>

#define NOBODY 65534
#define CANNOT 77

static char *own;

static void need(int is_there)
{
	if (!is_there)
		_exit(CANNOT);
}

// The kernel is at least as new.
static void need_linux(int version, int revision)
{
	struct utsname about;
	int is[2] = {0};
	uname(&about);
	sscanf(about.release, "%d.%d", &is[0], &is[1]);
	need(is[0] > version || is[0] == version && is[1] >= revision);
}

// A copy of this program, which everybody can find.
static void copy(const char *to, int owner, int mode)
{
	int from = open(own, O_RDONLY), file = open(to, O_CREAT | O_TRUNC | O_WRONLY, 0755);
	while (sendfile(file, from, 0, 1 << 20) > 0)
		;
	need(!fchown(file, owner, owner) && !fchmod(file, mode));
	close(file);
	chmod(".", 0755);
}

static void become_nobody(void)
{
	need(!setgid(NOBODY) && !setuid(NOBODY));
}

static void execute(const char *path, const char *shows)
{
	fflush(stdout);
	execl(path, path, shows, (char *)0);
	printf("%s\n", strerror(errno));
}

static void show_user(void) { printf("the user %d\n", geteuid()); }

static void set_user_id(void)
{
	need(!geteuid());
	copy("copy", NOBODY, 04755);
	execute("./copy", "show-user");
}

static void show_capabilities(void)
{
	struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
	struct __user_cap_data_struct data[2] = {0};
	syscall(SYS_capget, &header, data);
	printf("capabilities %#x\n", data[0].effective);
}

static void file_capabilities(void)
{
	need(!geteuid());
	copy("copy", 0, 0755);
	struct vfs_cap_data data = {VFS_CAP_REVISION_2 | VFS_CAP_FLAGS_EFFECTIVE, {{1 << CAP_CHOWN, 0}, {0, 0}}};
	need(!setxattr("copy", "security.capability", &data, sizeof data, 0));
	become_nobody();
	execute("./copy", "show-capabilities");
}

static void allow(int rules, const char *path)
{
	struct landlock_path_beneath_attr below = {.allowed_access = LANDLOCK_ACCESS_FS_EXECUTE,
	                                           .parent_fd = open(path, O_PATH)};
	syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &below, 0);
	close(below.parent_fd);
}

static void rules_of_landlock(void)
{
	need_linux(6, 14);
	struct landlock_ruleset_attr handled = {.handled_access_fs = LANDLOCK_ACCESS_FS_EXECUTE};
	int rules = syscall(SYS_landlock_create_ruleset, &handled, sizeof handled, 0);
	need(rules >= 0);
	char *paths[] = {"/usr", "/lib", "/lib64", "/bin"};
	for (int i = 0; i < 4; i++)
		allow(rules, paths[i]);
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	need(!syscall(SYS_landlock_restrict_self, rules, 0));
	fflush(stdout);
	execl("/bin/echo", "echo", "executed", (char *)0);
	printf("%s\n", strerror(errno));
}

static void not_readable(void)
{
	need(!geteuid());
	copy("copy", 0, 0711);
	become_nobody();
	execute("./copy", "show-user");
}

static void show_threads(void)
{
	need_linux(6, 14);
	char *line = 0;
	size_t size = 0;
	FILE *status = fopen("/proc/self/status", "r");
	while (getline(&line, &size, status) > 0)
		if (!strncmp(line, "Threads:", 8))
			printf("%s", line);
}

static void limit_of_processes(void)
{
	enum { MOST = 12 };
	// Before, KVM's thread was the kernel's.
	need_linux(6, 14);
	need(!geteuid());
	// Nobody else has processes of this user.
	need(!setuid(1000000000 + getpid()));
	struct rlimit limit = {MOST, MOST};
	setrlimit(RLIMIT_NPROC, &limit);
	pid_t children[MOST];
	int made = 0;
	while (made < MOST && (children[made] = fork()) > 0)
		made++;
	if (made < MOST && !children[made])
		while (1)
			pause();
	printf("%d children: %s\n", made, strerror(errno));
	for (int i = 0; i < made; i++)
		kill(children[i], SIGKILL);
	while (wait(0) > 0)
		;
}

static void no_descriptors(void)
{
	struct rlimit limit = {0, 0};
	setrlimit(RLIMIT_NOFILE, &limit);
	pid_t child = fork();
	if (!child)
		_exit(0);
	printf("%s\n", child > 0 ? "made" : strerror(errno));
}

static void limit_of_addresses(void)
{
	struct rlimit limit = {1ul << 40, 1ul << 40};
	need(!setrlimit(RLIMIT_AS, &limit));
	char line[256];
	FILE *limits = fopen("/proc/self/limits", "r");
	while (fgets(line, sizeof line, limits)) {
		unsigned long long shown;
		if (sscanf(line, "Max address space %llu", &shown) == 1)
			printf("%s\n", shown == limit.rlim_cur ? "the program's" : "more");
	}
}

static void show_stack(void)
{
	char *here = __builtin_frame_address(0);
	*(volatile char *)(here - (1500ul << 20)) = 1;
	printf("large\n");
}

static void large_stack(void)
{
	struct rlimit limit;
	getrlimit(RLIMIT_STACK, &limit);
	limit.rlim_cur = 3ul << 30;
	need(!setrlimit(RLIMIT_STACK, &limit));
	execute(own, "show-stack");
}

static pthread_mutex_t running = PTHREAD_MUTEX_INITIALIZER;

static void *body(void *argument)
{
	pthread_mutex_lock(&running);
	pthread_mutex_unlock(&running);
	return argument;
}

static void many_threads(void)
{
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 64 << 10);
	pthread_t threads[1100];
	int made = 0, error = 0;
	pthread_mutex_lock(&running);
	while (made < 1100 && !error)
		made += !(error = pthread_create(&threads[made], &attributes, body, 0));
	pthread_mutex_unlock(&running);
	for (int i = 0; i < made; i++)
		pthread_join(threads[i], 0);
	printf("%d threads: %s\n", made + 1, strerror(error));
}

static void high_addresses(void)
{
	void *wanted = (void *)0x600000000000;
	void *at = mmap(wanted, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	printf("%s\n", at == wanted ? "mapped" : strerror(errno));
}

static void hardware_breakpoint(void)
{
	static volatile long watched;
	struct perf_event_attr event = {.type = PERF_TYPE_BREAKPOINT, .size = sizeof event, .bp_type = HW_BREAKPOINT_W,
	                                .bp_addr = (uintptr_t)&watched, .bp_len = 8, .exclude_kernel = 1,
	                                .exclude_hv = 1};
	int fd = syscall(SYS_perf_event_open, &event, 0, -1, -1, 0);
	need(fd >= 0);
	for (int i = 0; i < 10; i++)
		watched = i;
	uint64_t count = 0;
	read(fd, &count, sizeof count);
	printf("%d writes\n", (int)count);
}

static void auxiliary_vector(void)
{
	Elf64_auxv_t entry;
	int fd = open("/proc/self/auxv", O_RDONLY);
	while (read(fd, &entry, sizeof entry) == sizeof entry)
		if (entry.a_type == AT_ENTRY)
			printf("%s\n", entry.a_un.a_val == getauxval(AT_ENTRY) ? "the program's" : "another");
}

static void link_of_thread(void)
{
	char path[64], target[4096] = "";
	snprintf(path, sizeof path, "/proc/self/task/%d/exe", gettid());
	readlink(path, target, sizeof target - 1);
	printf("%s\n", strrchr(target, '/') + 1);
}

static void vfork_with_copy(void)
{
	int done[2], said = 0;
	pipe2(done, O_NONBLOCK);
	pid_t child = syscall(SYS_clone, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0);
	if (!child) {
		usleep(300000);
		write(done[1], "x", 1);
		_exit(0);
	}
	printf("%s\n", read(done[0], &said, 1) == 1 ? "has ended" : "runs");
	waitpid(child, 0, 0);
}

static void *kept_stack;

static void code_of_32_bits(void)
{
	unsigned char *page = mmap(0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC,
	                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
	uint32_t low = (uint32_t)(uintptr_t)page;
	// mov $7, %eax; ljmp $0x33, $(page + 64)
	unsigned char code[] = {0xb8, 7, 0, 0, 0, 0xea, 0, 0, 0, 0, 0x33, 0};
	uint32_t back = low + 64;
	memcpy(code + 6, &back, 4);
	memcpy(page, code, sizeof code);
	// jmp *%r12
	memcpy(page + 64, (unsigned char[]){0x41, 0xff, 0xe4}, 3);
	struct { uint32_t offset; uint16_t segment; } __attribute__((packed)) *target = (void *)(page + 128);
	target->offset = low;
	target->segment = 0x23;
	long result = 0;
	__asm__ volatile("lea 1f(%%rip), %%r12\n"
	                 "mov %%rsp, %1\n"
	                 "ljmp *(%2)\n"
	                 "1: mov %1, %%rsp\n"
	                 : "=&a"(result), "+m"(kept_stack)
	                 : "r"(target)
	                 : "r12", "memory");
	printf("%d\n", (int)result);
}

static char *poisoned;

static void on_poison(int number, siginfo_t *info, void *context)
{
	if (info->si_addr == poisoned + 8)
		printf("the address\n");
	else
		printf("%s, code %d\n", info->si_addr == poisoned ? "the page" : "another", info->si_code);
	fflush(stdout);
	_exit(0);
}

static void poison(void)
{
	// struct uffdio_poison, and its feature: headers may be older.
	struct { struct uffdio_range range; uint64_t mode; int64_t updated; } poison = {{0, 4096}};
	struct uffdio_api api = {UFFD_API, 1 << 14};
	struct sigaction action = {.sa_sigaction = on_poison, .sa_flags = SA_SIGINFO};
	sigaction(SIGBUS, &action, 0);
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	need(fd >= 0 && !ioctl(fd, UFFDIO_API, &api));
	poisoned = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct uffdio_register range = {{(uintptr_t)poisoned, 4096}, UFFDIO_REGISTER_MODE_MISSING};
	need(!ioctl(fd, UFFDIO_REGISTER, &range));
	poison.range.start = (uintptr_t)poisoned;
	need(!ioctl(fd, _IOWR(UFFDIO, 8, poison), &poison));
	*(volatile char *)(poisoned + 8);
	printf("no signal\n");
}

static void mapping(void)
{
	char *page = mmap(0, 4096, PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *line = 0, permissions[8];
	size_t size = 0;
	uintptr_t start, end;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (getline(&line, &size, maps) > 0)
		if (sscanf(line, "%lx-%lx %7s", &start, &end, permissions) == 3 && start <= (uintptr_t)page &&
		    (uintptr_t)page < end)
			printf("%s\n", permissions);
}

static void locks(void)
{
	int fd = open("file", O_CREAT | O_RDWR, 0644);
	struct flock lock = {.l_type = F_WRLCK};
	fcntl(fd, F_SETLK, &lock);
	execl("./file", "file", (char *)0);
	fflush(stdout);
	if (!fork()) {
		fcntl(fd, F_GETLK, &lock);
		printf("%s\n", lock.l_type == F_UNLCK ? "not locked" : "locked");
		fflush(stdout);
		_exit(0);
	}
	wait(0);
}

static void change_root(void)
{
	need(!geteuid());
	copy("copy", 0, 0755);
	need(!chroot("."));
	execute("/copy", "show-user");
}

static void show_loaded(void)
{
	int remain = 0;
	char *line = 0;
	size_t size = 0;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (getline(&line, &size, maps) > 0)
		remain += strstr(line, " 00000000 ") && strstr(line, "/counted");
	printf("loaded %d times, %d remain\n", atoi(getenv("LOADED")), remain);
}

static const struct { const char *name; void (*body)(void); } FEATURES[] = {
	{"set-user-id", set_user_id},
	{"show-user", show_user},
	{"file-capabilities", file_capabilities},
	{"show-capabilities", show_capabilities},
	{"landlock", rules_of_landlock},
	{"not-readable", not_readable},
	{"processes", limit_of_processes},
	{"one-thread", show_threads},
	{"no-descriptors", no_descriptors},
	{"addresses", limit_of_addresses},
	{"stack", large_stack},
	{"show-stack", show_stack},
	{"threads", many_threads},
	{"high-addresses", high_addresses},
	{"hardware-breakpoint", hardware_breakpoint},
	{"auxiliary-vector", auxiliary_vector},
	{"link", link_of_thread},
	{"vfork", vfork_with_copy},
	{"32-bits", code_of_32_bits},
	{"poison", poison},
	{"mapping", mapping},
	{"locks", locks},
	{"change-root", change_root},
	{"preloaded", show_loaded},
};

int main(int argc, char **argv)
{
	own = argv[0];
	for (int i = 0; i < sizeof FEATURES / sizeof FEATURES[0]; i++)
		if (!strcmp(argv[1], FEATURES[i].name)) {
			FEATURES[i].body();
			return 0;
		}
	return CANNOT;
}
