/* A program whose second thread confines itself in the way that HOW names, once there is a file
 * "confine". Then it writes the file "confined", and nothing if the kernel lacks that way. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LANDLOCK, DISPATCH, THREAD_KEY, PROCESS_KEY, SESSION_KEY, EMPTY_SESSION };

static volatile char selector;
static volatile int thread;

static int confine(void) {
	if (HOW == LANDLOCK) {
		/* It may execute nothing. */
		uint64_t handled = 1;
		int rules = syscall(444, &handled, sizeof handled, 0);
		return rules < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(446, rules, 0) || close(rules);
	}
	if (HOW == DISPATCH)
		return prctl(59, 1, 0, 0, &selector);
	/* Names, and a session of its own. */
	if (HOW >= SESSION_KEY && syscall(SYS_keyctl, 1, 0) < 0)
		return 1;
	if (HOW == EMPTY_SESSION)
		return 0;
	int keyring = HOW == THREAD_KEY ? -1 : HOW == PROCESS_KEY ? -2 : -3;
	return syscall(SYS_add_key, "user", "pagemark", "x", 1, keyring) < 0;
}

static void *run(void *unused) {
	while (access("confine", F_OK))
		usleep(1000);
	thread = syscall(SYS_gettid);
	int failed = confine();
	char text[] = "0000000\n";
	for (int i = 6, left = thread; i >= 0; i--, left /= 10)
		text[i] = '0' + left % 10;
	int file = open("new", O_CREAT | O_WRONLY, 0600);
	if (!failed)
		write(file, text, 8);
	close(file);
	rename("new", "confined");
	for (;;)
		pause();
}

int main(void) {
	pthread_t second;
	pthread_create(&second, 0, run, 0);
	for (;;)
		pause();
}
