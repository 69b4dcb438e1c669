/* Does one thing for ever and checks that nothing disturbs it. Exits with 99 and a message when something does.
 *
 * usage: steady MODE FILE
 * FILE is mapped shared; its first number counts the rounds. "ready" on stdout says that it runs. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#if __has_include(<sys/rseq.h>)
#include <sys/rseq.h>
#endif

static volatile uint64_t *rounds;
static uint64_t descriptors;

static void violated(const char *what) {
	fprintf(stderr, "violated: %s (errno %d)\n", what, errno);
	_exit(99);
}

static uint64_t open_descriptors(void) {
	uint64_t open = 0;
	for (int fd = 0; fd < 64; fd++)
		if (fcntl(fd, F_GETFD) >= 0)
			open |= 1ull << fd;
	return open;
}

static void check_descriptors(void) {
	if (open_descriptors() != descriptors)
		violated("the descriptors have changed");
}

static void *exits(void *unused) {
	(void)unused;
	pthread_exit(NULL);
}

static void ready(void) {
	descriptors = open_descriptors();
	if (write(1, "ready\n", 6) != 6)
		violated("write");
}

static void counted(void) {
	__atomic_add_fetch(rounds, 1, __ATOMIC_RELAXED);
}

static void sleeping(void) {
	struct timespec time = {0, 300000};
	if (nanosleep(&time, NULL) != 0)
		violated("nanosleep");
}

/* Almost all of the time in a restartable sequence, which starts again when it is aborted. */
static void in_sequence(void) {
#ifdef RSEQ_SIG
	struct rseq *area = (void *)((char *)__builtin_thread_pointer() + __rseq_offset);
	__asm__ volatile(".pushsection __rseq_cs, \"aw\"\n"
			 ".balign 32\n"
			 "10: .long 0, 0\n"
			 ".quad 1f, (2f - 1f), 4f\n"
			 ".popsection\n"
			 "3: leaq 10b(%%rip), %%rax\n"
			 "movq %%rax, %0\n"
			 "1: movl $200000, %%ecx\n"
			 "5: decl %%ecx\n"
			 "jnz 5b\n"
			 "2:\n"
			 ".pushsection __rseq_failure, \"ax\"\n"
			 ".byte 0x0f, 0xb9, 0x3d\n"
			 ".long 0x53053053\n"
			 "4: jmp 3b\n"
			 ".popsection\n"
			 : "=m"(area->rseq_cs)
			 :
			 : "rax", "rcx", "memory", "cc");
#endif
}

static void computing(void) {
	/* Integer, floating-point and vector registers all take part. */
	uint64_t hash = 1469598103934665603ull;
	double sum = 0;
	float lanes[8] = {0};
	for (int i = 0; i < 20000; i++) {
		hash = (hash ^ i) * 1099511628211ull;
		sum += 1.0 / (i + 1);
		for (int lane = 0; lane < 8; lane++)
			lanes[lane] += (float)(i & 7) * lane;
	}
	static uint64_t first_hash;
	static double first_sum;
	static float first_lane;
	if (first_hash == 0) {
		first_sum = sum;
		first_lane = lanes[7];
		first_hash = hash;
	}
	if (hash != first_hash || sum != first_sum || lanes[7] != first_lane)
		violated("a computation");
}

static int poller = -1;

static void polling(void) {
	struct epoll_event event;
	if (epoll_wait(poller, &event, 1, 1) != 0)
		violated("epoll_wait");
}

static void *sleeps(void *unused) {
	for (;;) { sleeping(); check_descriptors(); counted(); }
	return unused;
}
static void *computes(void *unused) {
	for (;;) { computing(); counted(); }
	return unused;
}
static void *polls(void *unused) {
	for (;;) { polling(); counted(); }
	return unused;
}
static void *waits(void *unused) {
	pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
	pthread_cond_t never = PTHREAD_COND_INITIALIZER;
	pthread_mutex_lock(&mutex);
	for (;;) {
		struct timespec until;
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_nsec += 400000;
		if (until.tv_nsec >= 1000000000) { until.tv_sec++; until.tv_nsec -= 1000000000; }
		if (pthread_cond_timedwait(&never, &mutex, &until) != ETIMEDOUT)
			violated("pthread_cond_timedwait");
		counted();
	}
	return unused;
}

static volatile sig_atomic_t alarms;
static void alarmed(int signal) { (void)signal; alarms++; }
static void arrived(int signal) { (void)signal; counted(); }
static void *pauses(void *unused) {
	for (;;) pause();
	return unused;
}

/* Refuses one system call by killing the process. */
static void refuse(int number) {
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = {4, filter};
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		violated("prctl");
}

int main(int count, char **arguments) {
	if (count != 3)
		return 2;
	const char *mode = arguments[1];
	int file = open(arguments[2], O_RDWR | O_CLOEXEC);
	rounds = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (rounds == MAP_FAILED)
		violated("mmap");
	close(file);
	poller = epoll_create1(EPOLL_CLOEXEC);

	if (!strcmp(mode, "sleep")) {
		ready();
		sleeps(NULL);
	} else if (!strcmp(mode, "compute")) {
		ready();
		computes(NULL);
	} else if (!strcmp(mode, "sequence")) {
		ready();
		for (;; counted())
			in_sequence();
	} else if (!strcmp(mode, "poll")) {
		ready();
		polls(NULL);
	} else if (!strcmp(mode, "read") || !strcmp(mode, "strict")) {
		ready();
		if (!strcmp(mode, "strict") && prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT))
			violated("prctl");
		for (char byte, expected = 0;; expected++) {
			ssize_t length = read(0, &byte, 1);
			if (length == 0)
				syscall(SYS_exit, 0);
			if (length != 1 || byte != expected)
				violated("read");
			counted();
		}
	} else if (!strcmp(mode, "threads")) {
		void *(*work[])(void *) = {computes, polls, waits, sleeps, waits};
		pthread_t thread;
		/* The first thread that exits has the C library open another one, with a descriptor for a moment. */
		pthread_create(&thread, NULL, exits, NULL);
		pthread_join(thread, NULL);
		ready();
		for (int i = 0; i < 5; i++)
			pthread_create(&thread, NULL, work[i], NULL);
		/* The main thread exits, the process stays. */
		pthread_exit(NULL);
	} else if (!strcmp(mode, "signals")) {
		struct sigaction action = {.sa_handler = alarmed, .sa_flags = SA_RESTART};
		sigaction(SIGALRM, &action, NULL);
		signal(SIGTRAP, SIG_IGN);
		sigset_t mask, now;
		sigemptyset(&mask);
		sigaddset(&mask, SIGUSR2);
		sigprocmask(SIG_SETMASK, &mask, NULL);
		struct itimerval timer = {{0, 500}, {0, 500}};
		setitimer(ITIMER_REAL, &timer, NULL);
		raise(SIGUSR2);
		ready();
		for (;;) {
			int before = alarms;
			while (alarms == before)
				computing();
			struct sigaction trap;
			sigaction(SIGTRAP, NULL, &trap);
			if (trap.sa_handler != SIG_IGN)
				violated("the disposition of SIGTRAP");
			sigprocmask(SIG_SETMASK, NULL, &now);
			if (memcmp(&now, &mask, 8))
				violated("the signal mask");
			sigpending(&now);
			if (!sigismember(&now, SIGUSR2))
				violated("a pending signal");
			counted();
		}
	} else if (!strcmp(mode, "queued")) {
		/* All signals are the first thread's. */
		sigset_t all, none;
		sigfillset(&all);
		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &all, NULL);
		pthread_t other;
		pthread_create(&other, NULL, pauses, NULL);
		struct sigaction action = {.sa_handler = arrived, .sa_flags = SA_RESTART};
		sigaction(SIGRTMIN, &action, NULL);
		sigprocmask(SIG_SETMASK, &none, NULL);
		ready();
		pauses(NULL);
	} else if (!strcmp(mode, "vfork")) {
		ready();
		/* Until the input ends, the process waits for the child where no tracer stops it. */
		if (vfork() == 0) {
			char byte;
			while (read(0, &byte, 1) > 0)
				;
			_exit(0);
		}
		computes(NULL);
	} else if (!strcmp(mode, "filter")) {
		ready();
		refuse(SYS_userfaultfd);
		sleeps(NULL);
	} else if (!strcmp(mode, "userfaultfd")) {
		if (syscall(SYS_userfaultfd, O_CLOEXEC | 1) < 0)
			violated("userfaultfd");
		ready();
		sleeps(NULL);
	} else if (!strcmp(mode, "full")) {
		while (dup(0) >= 0)
			;
		ready();
		sleeps(NULL);
	}
	return 2;
}
