/* A program that locks all its memory locks what it uses, not what its heap may once have. Prints "right", or exits with
 * the line that is not. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { MIB = 1 << 20, USED = 20, MORE = 40, SMALL = 10000 };

/* MiB of a line of /proc/self/smaps_rollup. */
static long mib(const char *name)
{
    char line[200];
    long kib = -1;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    CHECK(file);
    while (kib < 0 && fgets(line, sizeof line, file))
        if (strncmp(line, name, strlen(name)) == 0)
            sscanf(line + strlen(name), ": %ld", &kib);
    fclose(file);
    CHECK(kib >= 0);
    return kib / 1024;
}

int main(void)
{
    char *used = malloc(USED * MIB);
    CHECK(used);
    memset(used, 1, USED * MIB);
    if (mlockall(MCL_CURRENT | MCL_FUTURE)) {
        puts("not permitted");
        return 0;
    }
    /* The program itself, and pieces that are opened at once. */
    CHECK(mib("Pss") < USED + 40);
    CHECK(mib("Locked") >= USED);
    used = realloc(used, MORE * MIB);
    CHECK(used);
    memset(used + USED * MIB, 2, (MORE - USED) * MIB);
    for (int i = 0; i < SMALL; i++) {
        char *small = malloc(1 + i % 500);
        CHECK(small);
        memset(small, 3, 1 + i % 500);
    }
    CHECK(used[0] == 1 && used[MORE * MIB - 1] == 2);
    for (size_t size = MIB / 8; size < USED * MIB; size += MIB / 8) {
        char *locked = malloc(size);
        CHECK(locked);
        errno = 77;
        /* The kernel refuses to free its pages. */
        free(locked);
        CHECK(errno == 77);
    }
    /* A large object may move, and leave its old place to others, locked. */
    CHECK(mib("Pss") < USED + MORE + 50);
    CHECK(mib("Locked") >= MORE);
    pid_t child = fork();
    if (child == 0) {
        used = realloc(used, 2 * MORE * MIB);
        _exit(!(used && used[0] == 1 && used[MORE * MIB - 1] == 2));
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    puts("right");
    return 0;
}
