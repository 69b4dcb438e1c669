/* A program that locks all its memory locks what it uses of a saved heap, not what the heap may once have. The argument is
 * the repository. Ends with 0 if so, with 77 where it may not lock memory or track a heap. */
#define _DEFAULT_SOURCE
#include "expect.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { MIB = 1 << 20 };

static long pss_mib(void)
{
    char line[200];
    long kib = -1;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    TRUE(file != NULL);
    while (kib < 0 && fgets(line, sizeof line, file))
        sscanf(line, "Pss: %ld", &kib);
    fclose(file);
    TRUE(kib >= 0);
    return kib / 1024;
}

int main(int argc, char **argv)
{
    pagemark_repository *repository;
    pagemark_saved_heap *heap;
    pagemark_heap_options options = {.parts = 4, .capacity_bytes = 1 << 30};
    pagemark_status status;
    char *object;

    TRUE(argc == 2);
    /* One heap is made after the memory is locked, and opened again; another one before. */
    for (int round = 0; round < 3; round++) {
        const char *job = round == 2 ? "before" : "after";
        if (round != 2 && mlockall(MCL_CURRENT | MCL_FUTURE)) {
            fprintf(stderr, "memory cannot be locked\n");
            return 77;
        }
        WORKS(pagemark_repository_open(argv[1], &repository));
        status = round == 1 ? pagemark_saved_heap_open(repository, job, &options, &heap)
                            : pagemark_saved_heap_create(repository, job, &options, &heap);
        if (status == PAGEMARK_STATUS_UNAVAILABLE) {
            fprintf(stderr, "%s\n", pagemark_last_error());
            return 77;
        }
        TRUE(status == 0);
        if (round == 2)
            TRUE(mlockall(MCL_CURRENT | MCL_FUTURE) == 0);
        object = pagemark_saved_heap_allocate(heap, 2 * MIB, 0);
        TRUE(object != NULL);
        memset(object, 5, 2 * MIB);
        for (int i = 0; i < 1000; i++)
            TRUE(pagemark_saved_heap_allocate(heap, 1 + i % 100, 0) != NULL);
        WORKS(pagemark_saved_heap_checkpoint(heap, NULL));
        TRUE(pss_mib() < 100);
        pagemark_saved_heap_free(heap);
        pagemark_repository_free(repository);
        TRUE(munlockall() == 0);
    }
    return failures != 0;
}
