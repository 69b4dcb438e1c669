/* What programs rely on in malloc, with threads and forks. Prints "right", or exits with the line that is not. */
#define _GNU_SOURCE
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

enum { WORDS = 1000, FORKS = 10 };

static void *allocate_for_ever(void *unused)
{
    for (;;) {
        free(malloc(100));
        usleep(100);
    }
    return unused;
}

static void check_sizes_and_alignments(void)
{
    /* Unknown to the compiler, which would warn. */
    volatile size_t huge = SIZE_MAX / 2;
    void *object;
    errno = 0;
    CHECK(!malloc(huge + 1) && errno == ENOMEM);
    errno = 0;
    CHECK(!calloc(huge, 3) && errno == ENOMEM);
    errno = 0;
    CHECK(!reallocarray(NULL, huge, 3) && errno == ENOMEM);
    CHECK(posix_memalign(&object, 3, 8) == EINVAL);
    CHECK(posix_memalign(&object, 4096, 10000) == 0 && (uintptr_t)object % 4096 == 0);
    memset(object, 1, 10000);
    free(object);
    CHECK(malloc(0) && !realloc(malloc(5), 0) && malloc_usable_size(NULL) == 0);
    errno = 77;
    free(malloc(3));
    CHECK(errno == 77);
    CHECK((uintptr_t)valloc(5) % 4096 == 0 && (uintptr_t)pvalloc(5) % 4096 == 0);
    CHECK((uintptr_t)aligned_alloc(64, 5) % 64 == 0 && (uintptr_t)memalign(256, 5) % 256 == 0);
    for (size_t size = 1; size < 300000; size += size / 3 + 1) {
        unsigned char *bytes = calloc(1, size);
        CHECK(bytes && malloc_usable_size(bytes) >= size);
        for (size_t at = 0; at < size; at++)
            CHECK(bytes[at] == 0);
        memset(bytes, 0xab, malloc_usable_size(bytes));
        bytes = realloc(bytes, 2 * size);
        CHECK(bytes && bytes[0] == 0xab && bytes[size - 1] == 0xab);
        free(bytes);
    }
}

int main(void)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, allocate_for_ever, NULL) == 0);
    /* A stream, which the C library uses in a child before any handler runs there. */
    FILE *stream = fopen("/dev/null", "w");
    char **words = malloc(WORDS * sizeof *words);
    for (int i = 0; i < WORDS; i++) {
        words[i] = malloc(10 + i);
        sprintf(words[i], "%d", i);
    }
    for (int round = 0; round < FORKS; round++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            fprintf(stream, "child");
            for (int i = 0; i < WORDS; i++) {
                CHECK(atoi(words[i]) == i);
                words[i] = realloc(words[i], 5000);
                strcpy(words[i], "changed by a child");
            }
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        for (int i = 0; i < WORDS; i++)
            CHECK(atoi(words[i]) == i);
    }
    check_sizes_and_alignments();
    puts("right");
    return 0;
}
