/*
 * A table of accounts in a region: transfers are transactions, a state of the table is a snapshot.
 *
 *     cc -o bank bank.c $(pkg-config --cflags --libs pagemark)
 *     ./bank [MECHANISM]
 */
#include <pagemark.h>

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

enum { ACCOUNTS = 1000, BYTES_PER_ACCOUNT = 4096, OPENING_BALANCE = 100 };

struct account {
    int64_t balance;
    char rest[BYTES_PER_ACCOUNT - sizeof(int64_t)];
};

static void check(pagemark_status status, const char *what)
{
    if (status == PAGEMARK_STATUS_OK)
        return;
    fprintf(stderr, "%s: %s\n", what, pagemark_last_error());
    /* 77: this machine lacks the mechanism. */
    exit(status == PAGEMARK_STATUS_UNAVAILABLE ? 77 : 1);
}

/* Accounts of which something lies in the ranges. */
static size_t count_accounts(const pagemark_ranges *ranges)
{
    size_t accounts = 0;

    for (size_t i = 0; i < ranges->count; i++) {
        uint64_t first = ranges->items[i].start / BYTES_PER_ACCOUNT;
        uint64_t last = (ranges->items[i].end - 1) / BYTES_PER_ACCOUNT;
        accounts += last - first + 1;
    }
    return accounts;
}

static bool contains(const pagemark_ranges *ranges, uint64_t offset)
{
    for (size_t i = 0; i < ranges->count; i++)
        if (ranges->items[i].start <= offset && offset < ranges->items[i].end)
            return true;
    return false;
}

static int64_t total(const struct account *table)
{
    int64_t sum = 0;

    for (size_t i = 0; i < ACCOUNTS; i++)
        sum += table[i].balance;
    return sum;
}

/* Moves an amount, or leaves the table as it was and returns false. */
static bool transfer(pagemark_region *region, size_t from, size_t to, int64_t amount)
{
    struct account *table = pagemark_region_data(region);
    pagemark_ranges written;

    check(pagemark_region_begin(region), "begin");
    table[to].balance += amount;
    table[from].balance -= amount;
    if (table[from].balance < 0) {
        check(pagemark_region_rollback(region, NULL), "roll back");
        return false;
    }
    check(pagemark_region_commit(region, &written), "commit");
    /* Mechanisms may report more than was written, never less. */
    if (!contains(&written, from * sizeof *table) || !contains(&written, to * sizeof *table))
        abort();
    pagemark_ranges_free(&written);
    return true;
}

int main(int argc, char **argv)
{
    pagemark_options options = {0};
    pagemark_region *region;
    pagemark_snapshot *opening, *evening, *again;
    pagemark_ranges differing;
    struct account *table;
    int64_t then;

    options.mechanism = argc > 1 ? argv[1] : "auto";
    check(pagemark_region_new(ACCOUNTS * sizeof *table, &options, &region), "make a region");
    table = pagemark_region_data(region);
    for (size_t i = 0; i < ACCOUNTS; i++)
        table[i].balance = OPENING_BALANCE;
    check(pagemark_region_snapshot(region, &opening), "take a snapshot");

    printf("transfer of 30: %s\n", transfer(region, 1, 2, 30) ? "done" : "refused");
    printf("transfer of 80: %s\n", transfer(region, 1, 3, 80) ? "done" : "refused");
    printf("balances: %" PRId64 " %" PRId64 " %" PRId64 ", in all %" PRId64 "\n", table[1].balance,
           table[2].balance, table[3].balance, total(table));

    /* What changed since the morning, and what an account held then. */
    check(pagemark_region_snapshot(region, &evening), "take a snapshot");
    check(pagemark_snapshot_diff(opening, evening, &differing), "compare");
    printf("accounts that differ from the opening: %zu\n", count_accounts(&differing));
    pagemark_ranges_free(&differing);
    check(pagemark_snapshot_read(opening, 1 * sizeof *table, &then, sizeof then), "read");
    printf("account 1 then: %" PRId64 "\n", then);

    /* Back to the morning, in place. */
    check(pagemark_region_restore(region, opening, NULL), "restore");
    check(pagemark_region_snapshot(region, &again), "take a snapshot");
    printf("restored: %" PRId64 " %" PRId64 " %" PRId64 ", %s\n", table[1].balance, table[2].balance,
           table[3].balance, pagemark_snapshot_equal(opening, again) ? "equal to the opening" : "not equal");

    pagemark_snapshot_free(opening);
    pagemark_snapshot_free(evening);
    pagemark_snapshot_free(again);
    pagemark_region_free(region);
    return 0;
}
