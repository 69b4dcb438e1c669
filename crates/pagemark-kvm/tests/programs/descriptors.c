// A program that has as many files open as it may: threads and children need none.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static void *body(void *argument) { return argument; }

int main(void) {
  struct rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = 40;
  setrlimit(RLIMIT_NOFILE, &limit);
  int last = -1;
  for (int fd; (fd = open("/dev/null", O_RDONLY)) >= 0;) last = fd;
  printf("the last is %d: %s\n", last, strerror(errno));
  pthread_t thread;
  void *result = NULL;
  int error = pthread_create(&thread, NULL, body, &limit);
  if (!error) pthread_join(thread, &result);
  printf("thread: %s, %d\n", strerror(error), result == &limit);
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    error = pthread_create(&thread, NULL, body, &limit);
    _exit(error ? 1 : 7);
  }
  int status = -1;
  waitpid(child, &status, 0);
  printf("child: %#x\n", status);
  // A descriptor of a child is one more.
  int pidfd = -2;
  errno = 0;
  child = syscall(SYS_clone, CLONE_PIDFD | SIGCHLD, 0, &pidfd, 0, 0);
  if (child == 0) _exit(0);
  printf("pidfd: %d, %s, %d\n", child > 0, strerror(errno), wait(&status) > 0);
  getrlimit(RLIMIT_NOFILE, &limit);
  printf("limit: %d, another: %d\n", (int)limit.rlim_cur, open("/dev/null", O_RDONLY));
  fflush(stdout);
  for (int fd = 3; fd <= last; fd++) fcntl(fd, F_SETFD, FD_CLOEXEC);
  execl("/bin/echo", "echo", "executed", (char *)0);
  printf("exec: %s\n", strerror(errno));
  return 1;
}
