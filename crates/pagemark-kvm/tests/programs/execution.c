// Which file is executed: by descriptors, by links to them, without a name, under another name, and
// under rules of Landlock, which allow the directory in the argument. Works in the present directory.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/landlock.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static char *own;

static void copy(const char *from, int to)
{
	int fd = open(from, O_RDONLY);
	while (sendfile(to, fd, 0, 1 << 20) > 0)
		;
	close(fd);
}

static void copy_to(const char *from, const char *to)
{
	int fd = open(to, O_CREAT | O_TRUNC | O_WRONLY, 0755);
	copy(from, fd);
	close(fd);
}

static void run(const char *what, void (*body)(void))
{
	fflush(stdout);
	pid_t child = fork();
	if (!child) {
		body();
		printf("%s: %s\n", what, strerror(errno));
		fflush(stdout);
		_exit(99);
	}
	int status = -1;
	waitpid(child, &status, 0);
	printf("%s: %#x\n", what, status);
}

static char *shows[] = {"shown", "show", 0};

static void by_path(const char *form, int flags)
{
	char path[64];
	snprintf(path, sizeof path, form, open(own, flags));
	execve(path, shows, environ);
}

static void proc_link(void) { by_path("/proc/self/fd/%d", O_RDONLY); }
static void closed_proc_link(void) { by_path("/proc/self/fd/%d", O_RDONLY | O_CLOEXEC); }
static void closed_dev_link(void) { by_path("/dev/fd/./%d", O_RDONLY | O_CLOEXEC); }
static void no_descriptor(void) { by_path("/proc/self/fd/99%d", O_RDONLY); }
static void place(void) { fexecve(open(own, O_PATH | O_CLOEXEC), shows, environ); }

static void no_place(void) { syscall(SYS_execveat, 999, "", shows, environ, AT_EMPTY_PATH); }
static void present_directory(void) { syscall(SYS_execveat, AT_FDCWD, "", shows, environ, AT_EMPTY_PATH); }

static void without_name(void)
{
	int fd = memfd_create("nameless", MFD_CLOEXEC);
	copy(own, fd);
	fexecve(fd, shows, environ);
}

static void relative(void)
{
	execveat(open(".", O_PATH), "./subject", shows, environ, 0);
}

static void link_refused(void)
{
	symlink("subject", "link");
	execveat(AT_FDCWD, "link", shows, environ, AT_SYMLINK_NOFOLLOW);
}

static void script(void)
{
	execl("./script", "x", "first", (char *)0);
}

static void script_by_descriptor(void)
{
	char *arguments[] = {"x", "first", 0};
	fexecve(open("./script", O_RDONLY), arguments, environ);
}

static void closed_script(void)
{
	char *arguments[] = {"x", "first", 0};
	fexecve(open("./script", O_RDONLY | O_CLOEXEC), arguments, environ);
}

static void removed(void)
{
	copy_to(own, "removed");
	execl("./removed", "removed", "remove", (char *)0);
}

// The name leads to another program after the change of the root directory.
static void another_root(void)
{
	char path[4096], target[8192], *here = getcwd(path, sizeof path);
	copy_to("/bin/true", "which");
	copy_to("/bin/false", "another");
	mkdir("root", 0755);
	snprintf(target, sizeof target, "root%s/which", here);
	if (unshare(CLONE_NEWNS) || mount(0, "/", 0, MS_REC | MS_PRIVATE, 0) ||
	    mount("/", "root", 0, MS_BIND | MS_REC, 0) || mount("another", target, 0, MS_BIND, 0))
		perror("mount");
	int fd = open("which", O_PATH | O_CLOEXEC);
	if (chroot("root") || chdir("/"))
		perror("chroot");
	char *arguments[] = {"which", 0};
	fexecve(fd, arguments, environ);
}

static void being_written(void)
{
	open("subject", O_WRONLY);
	execl("./subject", "subject", "show", (char *)0);
}

static void allow(int rules, const char *path)
{
	struct landlock_path_beneath_attr below = {.allowed_access = LANDLOCK_ACCESS_FS_EXECUTE,
	                                           .parent_fd = open(path, O_PATH)};
	syscall(SYS_landlock_add_rule, rules, LANDLOCK_RULE_PATH_BENEATH, &below, 0);
	close(below.parent_fd);
}

static void forbidden(void) { execl("./which", "which", (char *)0); }
static void allowed(void) { execl("/bin/true", "true", (char *)0); }

static void under_rules(char *monitor)
{
	struct landlock_ruleset_attr handled = {.handled_access_fs = LANDLOCK_ACCESS_FS_EXECUTE};
	int rules = syscall(SYS_landlock_create_ruleset, &handled, sizeof handled, 0);
	if (rules < 0)
		return;
	char *paths[] = {"/usr", "/lib", "/lib64", "/bin", monitor};
	for (int i = 0; i < 5; i++)
		allow(rules, paths[i]);
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	if (syscall(SYS_landlock_restrict_self, rules, 0))
		return;
	run("forbidden by rules", forbidden);
	run("allowed by rules", allowed);
}

static int show(int argc, char **argv)
{
	char name[32] = "", path[4096] = "";
	prctl(PR_GET_NAME, name);
	int fd = open("/proc/self/exe", O_RDONLY);
	struct stat file, same;
	stat("/proc/self/exe", &file);
	printf("%s: name %s, itself %d %s, next descriptor %d\n", argv[1], name, (int)file.st_size > 1000,
	       !fd || !fstat(fd, &same) && same.st_ino == file.st_ino ? "open" : strerror(errno), fd);
	close(fd);
	readlink("/proc/self/exe", path, sizeof path - 1);
	printf("link %s\n", strstr(path, "memfd") ? path : strrchr(path, '/'));
	fflush(stdout);
	if (!strcmp(argv[1], "remove")) {
		unlink("removed");
		char *again[] = {"again", "show", 0};
		execve("/proc/self/exe", again, environ);
		perror("/proc/self/exe");
	}
	return 5;
}

int main(int argc, char **argv)
{
	own = argv[0];
	if (argc > 2 && !strcmp(argv[1], "rules"))
		return under_rules(argv[2]), 0;
	if (!strcmp(argv[1], "show") || !strcmp(argv[1], "remove"))
		return show(argc, argv);
	copy_to(own, "subject");
	int fd = open("script", O_CREAT | O_WRONLY, 0755);
	dprintf(fd, "#!/bin/sh\necho $0 $@; read name < /proc/self/comm; echo $name\n");
	close(fd);
	run("a link in /proc", proc_link);
	run("a link to what is closed", closed_proc_link);
	run("a link in /dev to what is closed", closed_dev_link);
	run("a link to nothing", no_descriptor);
	run("a place", place);
	run("no place", no_place);
	run("the present directory", present_directory);
	run("no name", without_name);
	run("relative", relative);
	run("a link that is not followed", link_refused);
	run("a script", script);
	run("a script by its descriptor", script_by_descriptor);
	run("a script that is closed", closed_script);
	run("a removed program", removed);
	run("another root", another_root);
	run("being written", being_written);
	fflush(stdout);
	execl(own, own, "rules", argv[1], (char *)0);
	return 1;
}
