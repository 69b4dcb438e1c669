/*
 * A binary tree in a heap that is saved to a repository: killed at any instant, the program continues from the last save
 * when it is started again. The nodes point to each other as in any program.
 *
 *     cc -o tree tree.c $(pkg-config --cflags --libs pagemark)
 *     ./tree REPOSITORY
 */
#include <pagemark.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { NUMBERS = 20000, NUMBERS_A_SAVE = 500 };

struct node {
    uint32_t number;
    struct node *smaller, *greater;
};

struct tree {
    uint64_t count;
    struct node *top;
};

static void check(pagemark_status status, const char *what)
{
    if (status == PAGEMARK_STATUS_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, pagemark_last_error());
    exit(status == PAGEMARK_STATUS_UNAVAILABLE ? 77 : 1);
}

static void *allocate(pagemark_saved_heap *heap, size_t bytes)
{
    void *object = pagemark_saved_heap_allocate_zeroed(heap, bytes, 0);

    if (object == NULL) {
        fprintf(stderr, "allocating: %s\n", pagemark_last_error());
        exit(1);
    }
    return object;
}

/* Each number below 2^32 once, in an order that seems to be random. */
static uint32_t number_at(uint64_t index)
{
    return (uint32_t)index * UINT32_C(2654435761);
}

static void insert(pagemark_saved_heap *heap, struct tree *tree, uint32_t number)
{
    struct node *node = allocate(heap, sizeof *node), **place = &tree->top;

    node->number = number;
    while (*place)
        place = number < (*place)->number ? &(*place)->smaller : &(*place)->greater;
    *place = node;
    tree->count++;
}

/* The number of nodes. Ends the program if they are not in order. */
static uint64_t count(const struct node *node, uint64_t from, uint64_t to)
{
    if (node == NULL)
        return 0;
    if (node->number < from || node->number >= to) {
        fprintf(stderr, "%" PRIu32 " is in the wrong place\n", node->number);
        exit(1);
    }
    return count(node->smaller, from, node->number) + 1 + count(node->greater, (uint64_t)node->number + 1, to);
}

int main(int argc, char **argv)
{
    pagemark_repository *repository;
    pagemark_saved_heap *heap;
    pagemark_status status;
    struct tree *tree;
    uint64_t sequence;

    if (argc != 2) {
        fprintf(stderr, "usage: %s REPOSITORY\n", argv[0]);
        return 2;
    }
    check(pagemark_repository_open(argv[1], &repository), "opening the repository");
    status = pagemark_saved_heap_open(repository, "tree", NULL, &heap);
    if (status == PAGEMARK_STATUS_NEVER_SAVED)
        status = pagemark_saved_heap_create(repository, "tree", NULL, &heap);
    check(status, "opening the heap");
    tree = pagemark_saved_heap_root(heap);
    if (tree == NULL) {
        tree = allocate(heap, sizeof *tree);
        check(pagemark_saved_heap_set_root(heap, tree), "setting the root");
    }
    printf("begins with %" PRIu64 "\n", tree->count);
    fflush(stdout);

    while (tree->count < NUMBERS) {
        insert(heap, tree, number_at(tree->count));
        if (tree->count % NUMBERS_A_SAVE == 0) {
            check(pagemark_saved_heap_checkpoint(heap, &sequence), "saving the heap");
            printf("save %" PRIu64 "\n", sequence);
            fflush(stdout);
        }
    }
    if (count(tree->top, 0, UINT64_C(1) << 32) != tree->count) {
        fprintf(stderr, "numbers are missing\n");
        return 1;
    }
    printf("%" PRIu64 " numbers in order\n", tree->count);

    pagemark_saved_heap_free(heap);
    pagemark_repository_free(repository);
    return 0;
}
