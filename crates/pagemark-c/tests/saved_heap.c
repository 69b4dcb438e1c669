/* A saved heap in C: its calls, and the error for each misuse. Ends with 0 if each is as expected. */
#define _DEFAULT_SOURCE
#include "expect.h"

#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

static void null_pointers(pagemark_repository *repository)
{
    pagemark_saved_heap *made = (pagemark_saved_heap *)repository;
    pagemark_saving *saving = (pagemark_saving *)repository;
    uint64_t sequence = 7;

    FAILS(pagemark_saved_heap_create(repository, "job", NULL, NULL), NULL_POINTER, "heap is null");
    FAILS(pagemark_saved_heap_create(NULL, "job", NULL, &made), NULL_POINTER, "repository is null");
    TRUE(made == NULL);
    FAILS(pagemark_saved_heap_open(repository, NULL, NULL, &made), NULL_POINTER, "job is null");
    FAILS(pagemark_saved_heap_open_at(repository, NULL, 1, NULL, &made), NULL_POINTER, "job is null");
    FAILS(pagemark_saved_heap_checkpoint(NULL, &sequence), NULL_POINTER, "heap is null");
    TRUE(sequence == 0);
    FAILS(pagemark_saved_heap_checkpoint_begin(NULL, &saving), NULL_POINTER, "heap is null");
    FAILS(pagemark_saving_wait(saving, &sequence), NULL_POINTER, "saving is null");
    TRUE(saving == NULL && !pagemark_saving_is_done(saving));
    pagemark_saving_free(saving);
    FAILS(pagemark_saved_heap_set_root(NULL, NULL), NULL_POINTER, "heap is null");
    TRUE(pagemark_saved_heap_root(NULL) == NULL && !pagemark_saved_heap_contains(NULL, &made));
    TRUE(pagemark_saved_heap_allocate(NULL, 1, 0) == NULL && pagemark_saved_heap_reallocate(NULL, NULL, 1, 0) == NULL);
    TRUE(pagemark_saved_heap_usable_bytes(NULL, NULL) == 0);
    pagemark_saved_heap_deallocate(NULL, NULL);
    pagemark_saved_heap_free(NULL);
}

static void objects(pagemark_saved_heap *heap)
{
    unsigned char *object, *moved, local;

    for (size_t alignment = 1; alignment <= 1 << 20; alignment *= 2) {
        object = pagemark_saved_heap_allocate(heap, 3, alignment);
        TRUE(object && (uintptr_t)object % alignment == 0 && pagemark_saved_heap_contains(heap, object));
        TRUE(pagemark_saved_heap_usable_bytes(heap, object) >= 3);
        pagemark_saved_heap_deallocate(heap, object);
    }
    TRUE(!pagemark_saved_heap_contains(heap, &local) && !pagemark_saved_heap_contains(heap, NULL));
    TRUE((uintptr_t)pagemark_saved_heap_allocate(heap, 1, 0) % 16 == 0);
    TRUE(pagemark_saved_heap_allocate(heap, 0, 0) != NULL);
    for (size_t bytes = 1; bytes < 1 << 20; bytes = bytes * 3 + 1) {
        object = pagemark_saved_heap_allocate(heap, bytes, 0);
        memset(object, 0xee, bytes);
        pagemark_saved_heap_deallocate(heap, object);
        object = pagemark_saved_heap_allocate_zeroed(heap, bytes, 0);
        for (size_t at = 0; at < bytes; at++)
            TRUE(object[at] == 0);
        object[0] = object[bytes - 1] = 5;
        moved = pagemark_saved_heap_reallocate(heap, object, 4 * bytes, 0);
        TRUE(moved && moved[0] == 5 && moved[bytes - 1] == 5);
        pagemark_saved_heap_deallocate(heap, moved);
    }
    TRUE(pagemark_saved_heap_allocate(heap, 3, 48) == NULL && strstr(pagemark_last_error(), "48 is no alignment"));
    TRUE(pagemark_saved_heap_allocate(heap, SIZE_MAX, 0) == NULL && strstr(pagemark_last_error(), "no room"));
    TRUE(pagemark_saved_heap_allocate(heap, SIZE_MAX / 2 - 64, 0) == NULL);
    TRUE(pagemark_saved_heap_allocate(heap, 32 << 20, 0) == NULL);
    object = pagemark_saved_heap_allocate(heap, 1, 0);
    TRUE(pagemark_saved_heap_reallocate(heap, object, 32 << 20, 0) == NULL);
    pagemark_saved_heap_deallocate(heap, object);
}

static void forked_child(pagemark_saved_heap *heap)
{
    int status;
    pid_t child = fork();

    if (child == 0) {
        int before = failures;

        FAILS(pagemark_saved_heap_checkpoint(heap, NULL), FORKED_CHILD, NULL);
        TRUE(pagemark_saved_heap_allocate(heap, 1, 0) == NULL);
        TRUE(pagemark_saved_heap_root(heap) == NULL && strstr(pagemark_last_error(), "parent"));
        FAILS(pagemark_saved_heap_set_root(heap, NULL), FORKED_CHILD, NULL);
        _exit(failures != before);
    }
    TRUE(waitpid(child, &status, 0) == child && status == 0);
}

/* A process that frees what is no object is ended. The child has no heap of its parent, and makes one. */
static void no_object(const char *path)
{
    pagemark_repository *repository;
    pagemark_saved_heap *heap;
    int status;
    pid_t child = fork();

    if (child == 0) {
        if (pagemark_repository_open(path, &repository) || !freopen("/dev/null", "w", stderr) ||
            pagemark_saved_heap_create(repository, "ended", NULL, &heap))
            _exit(1);
        pagemark_saved_heap_deallocate(heap, (char *)pagemark_saved_heap_allocate(heap, 64, 0) + 8);
        _exit(2);
    }
    TRUE(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

static void saving(pagemark_repository *repository)
{
    pagemark_heap_options options = {.capacity_bytes = 16 << 20, .version = 3, .parts = 4};
    pagemark_saved_heap *heap, *second;
    pagemark_saving *saving;
    uint64_t sequence;
    char **root, *place, local;
    void *taken;

    options.parts = 3;
    FAILS(pagemark_saved_heap_create(repository, "heap", &options, &heap), INVALID_ARGUMENT, "not 3");
    options.parts = 4;
    options.capacity_bytes = UINT64_MAX;
    FAILS(pagemark_saved_heap_create(repository, "heap", &options, &heap), NO_MEMORY, NULL);
    options.capacity_bytes = 16 << 20;
    FAILS(pagemark_saved_heap_open(repository, "heap", &options, &heap), NEVER_SAVED, NULL);
    WORKS(pagemark_saved_heap_create(repository, "heap", &options, &heap));
    TRUE(pagemark_saved_heap_root(heap) == NULL);
    objects(heap);
    forked_child(heap);
    root = pagemark_saved_heap_allocate(heap, sizeof *root, 0);
    *root = pagemark_saved_heap_allocate(heap, 6, 0);
    strcpy(*root, "first");
    FAILS(pagemark_saved_heap_set_root(heap, &local), OUT_OF_RANGE, NULL);
    WORKS(pagemark_saved_heap_set_root(heap, root));
    WORKS(pagemark_saved_heap_checkpoint(heap, &sequence));
    TRUE(sequence == 1);
    (*root)[0] = 'F';
    WORKS(pagemark_saved_heap_checkpoint_begin(heap, &saving));
    (*root)[0] = '?';
    WORKS(pagemark_saving_wait(saving, &sequence));
    TRUE(sequence == 2);
    FAILS(pagemark_saved_heap_create(repository, "heap", &options, &second), EXISTS, NULL);
    FAILS(pagemark_saved_heap_open(repository, "heap", &options, &second), ADDRESS_TAKEN, NULL);
    TRUE(second == NULL);
    pagemark_saved_heap_free(heap);

    place = (char *)root;
    WORKS(pagemark_saved_heap_open(repository, "heap", &options, &heap));
    root = pagemark_saved_heap_root(heap);
    TRUE((char *)root == place && strcmp(*root, "First") == 0);
    pagemark_saved_heap_free(heap);
    WORKS(pagemark_saved_heap_open_at(repository, "heap", 1, &options, &heap));
    TRUE(strcmp(*(char **)pagemark_saved_heap_root(heap), "first") == 0);
    WORKS(pagemark_saved_heap_checkpoint_begin(heap, &saving));
    pagemark_saved_heap_free(heap);
    while (!pagemark_saving_is_done(saving))
        usleep(1000);
    pagemark_saving_free(saving);
    WORKS(pagemark_saved_heap_open_at(repository, "heap", 3, &options, &heap));
    pagemark_saved_heap_free(heap);

    FAILS(pagemark_saved_heap_open_at(repository, "heap", 9, &options, &heap), REPOSITORY, NULL);
    options.version = 4;
    FAILS(pagemark_saved_heap_open(repository, "heap", &options, &heap), OTHER_HEAP, "3");
    options.version = 3;
    options.parts = 8;
    FAILS(pagemark_saved_heap_open(repository, "heap", &options, &heap), OTHER_HEAP, "parts");
    options.parts = 4;
    taken = mmap((void *)((uintptr_t)place & -4096), 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    TRUE(taken != MAP_FAILED);
    FAILS(pagemark_saved_heap_open(repository, "heap", &options, &heap), ADDRESS_TAKEN, NULL);
    munmap(taken, 4096);
}

static void other_content(pagemark_repository *repository)
{
    pagemark_region *region;
    pagemark_saved_heap *heap;

    WORKS(pagemark_region_new(4096, NULL, &region));
    WORKS(pagemark_region_save(region, repository, "region", NULL));
    pagemark_region_free(region);
    FAILS(pagemark_saved_heap_open(repository, "region", NULL, &heap), NEVER_SAVED, NULL);
    FAILS(pagemark_region_open(repository, "heap", NULL, &region), NEVER_SAVED, NULL);
    FAILS(pagemark_saved_heap_create(repository, "a/b", NULL, &heap), INVALID_ARGUMENT, NULL);
}

int main(int argc, char **argv)
{
    pagemark_repository *repository;
    pagemark_saved_heap *probe;
    pagemark_status made;

    if (argc != 2)
        return 2;
    WORKS(pagemark_repository_open(argv[1], &repository));
    made = pagemark_saved_heap_create(repository, "probe", NULL, &probe);
    if (made == PAGEMARK_STATUS_UNAVAILABLE) {
        fprintf(stderr, "%s\n", pagemark_last_error());
        return 77;
    }
    WORKS(made);
    pagemark_saved_heap_free(probe);
    no_object(argv[1]);
    null_pointers(repository);
    saving(repository);
    other_content(repository);
    pagemark_repository_free(repository);
    return failures != 0;
}
