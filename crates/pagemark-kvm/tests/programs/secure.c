// A process with another real than effective user executes programs: they get AT_SECURE, and the
// dynamic linker does not load what the user names.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc > 2) {
		printf("%d %d: AT_SECURE %lu, LD_PRELOAD %s, HOME %s, injected %s\n", getuid(), geteuid(),
		       getauxval(AT_SECURE), getenv("LD_PRELOAD") ?: "-", secure_getenv("HOME") ?: "-",
		       getenv("INJECTED") ?: "no");
		fflush(stdout);
		if (!strcmp(argv[2], "last"))
			return 0;
	}
	char preload[4096];
	snprintf(preload, sizeof preload, "LD_PRELOAD=%s", argv[1]);
	char *environment[] = {preload, "HOME=/x", 0};
	// First with the rights of one user, then of two, then of one again.
	char *next = argc < 3 ? "one" : !strcmp(argv[2], "one") ? "two" : "last";
	if (!strcmp(next, "two") && setresuid(65534, 0, 0))
		return 1;
	if (!strcmp(next, "last") && setresuid(0, 0, 0))
		return 2;
	execve(argv[0], (char *[]){argv[0], argv[1], next, 0}, environment);
	return 3;
}
