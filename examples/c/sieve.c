/*
 * A sieve of Eratosthenes in a region that is saved to a repository after each prime: killed at any instant, the program
 * continues from the last save when it is started again.
 *
 *     cc -o sieve sieve.c $(pkg-config --cflags --libs pagemark)
 *     ./sieve REPOSITORY
 */
#include <pagemark.h>

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

enum { LIMIT = 1 << 20 };

struct sieve {
    /* The number to look at next; everything below it is done. */
    uint64_t next;
    unsigned char is_composite[LIMIT];
};

static void check(pagemark_status status, const char *what)
{
    if (status == PAGEMARK_STATUS_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, pagemark_last_error());
    exit(1);
}

int main(int argc, char **argv)
{
    pagemark_repository *repository;
    pagemark_region *region;
    pagemark_status status;
    struct sieve *sieve;
    uint64_t primes = 0, sequence;

    if (argc != 2) {
        fprintf(stderr, "usage: %s REPOSITORY\n", argv[0]);
        return 2;
    }
    check(pagemark_repository_open(argv[1], &repository), "opening the repository");
    status = pagemark_region_open(repository, "sieve", NULL, &region);
    if (status == PAGEMARK_STATUS_NEVER_SAVED)
        status = pagemark_region_new(sizeof(struct sieve), NULL, &region);
    check(status, "opening the region");
    sieve = pagemark_region_data(region);
    if (sieve->next == 0)
        sieve->next = 2;
    printf("begins at %" PRIu64 "\n", sieve->next);
    fflush(stdout);

    while (sieve->next * sieve->next < LIMIT) {
        uint64_t prime = sieve->next;

        for (uint64_t multiple = prime * prime; multiple < LIMIT; multiple += prime)
            sieve->is_composite[multiple] = 1;
        do
            sieve->next++;
        while (sieve->is_composite[sieve->next]);
        check(pagemark_region_save(region, repository, "sieve", &sequence), "saving the region");
        printf("save %" PRIu64 "\n", sequence);
        fflush(stdout);
    }
    for (uint64_t number = 2; number < LIMIT; number++)
        primes += !sieve->is_composite[number];
    printf("%" PRIu64 " primes below %d\n", primes, LIMIT);

    pagemark_region_free(region);
    pagemark_repository_free(repository);
    return 0;
}
