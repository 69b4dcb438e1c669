/* The C++ header: what objects own, what exceptions undo, and what calls throw. Ends with 0 if each is as expected. */
#include "expect.hpp"

#include <filesystem>
#include <type_traits>
#include <unistd.h>
#include <utility>

static_assert(!std::is_copy_constructible_v<pagemark::region> && std::is_nothrow_move_constructible_v<pagemark::region>);
static_assert(!std::is_copy_constructible_v<pagemark::snapshot> && std::is_nothrow_move_assignable_v<pagemark::ranges>);
static_assert(!std::is_move_constructible_v<pagemark::transaction>);

static void transactions(const pagemark::options &options)
{
    pagemark::region region(5000, options);
    std::span words = region.as<std::uint32_t>();
    TRUE(words.size_bytes() == 8192 && region.bytes().size() == 8192 && region.granularity_bytes() > 0);
    TRUE(options.mechanism == "auto" || region.mechanism() == options.mechanism);
    {
        pagemark::transaction transaction(region);
        words[1] = 7;
        TRUE(region.in_transaction());
        pagemark::ranges written = transaction.commit();
        TRUE(written.contains(4) && !written.empty() && written.begin()->start <= 4);
        pagemark::ranges moved(std::move(written));
        TRUE(moved.size() > 0 && written.empty());
        written = std::move(moved);
        TRUE(written.contains(4));
    }
    TRUE(!region.in_transaction() && words[1] == 7);
    try {
        pagemark::transaction transaction(region);
        words[1] = 8;
        throw 5;
    } catch (int) {
    }
    TRUE(!region.in_transaction() && words[1] == 7);
    {
        pagemark::transaction transaction(region);
        words[1] = 9;
        TRUE(transaction.rollback().contains(4) && words[1] == 7);
    }
    {
        pagemark::transaction open(region);
        THROWS(TRANSACTION_OPEN, "nest", pagemark::transaction second(region));
        THROWS(TRANSACTION_OPEN, "nest", region.begin());
    }
    THROWS(NO_TRANSACTION, "begin first", region.commit());
    THROWS(NO_TRANSACTION, "begin first", region.commit_changes());

    pagemark::options chained = options;
    chained.rollback = false;
    pagemark::region without(4096, chained);
    {
        pagemark::transaction transaction(without);
        without.as<char>()[0] = 'a';
        THROWS(NO_ROLLBACK, "without rollback", transaction.rollback());
    }
    TRUE(!without.in_transaction() && without.as<char>()[0] == 'a');
}

static void content(const pagemark::options &options)
{
    pagemark::store store(256);
    pagemark::options shared = options;
    shared.store = &store;
    pagemark::region region(3 * 4096, shared);
    const char text[] = "snapshot";
    region.write(5000, std::as_bytes(std::span(text)));
    char back[sizeof text];
    region.read(5000, std::as_writable_bytes(std::span(back)));
    TRUE(std::strcmp(back, text) == 0);
    THROWS(OUT_OF_RANGE, "not within", region.write(3 * 4096, std::as_bytes(std::span(text))));

    const pagemark::snapshot first = region.take_snapshot();
    TRUE(first == region.take_snapshot() && store.usage().chunks == 1 && first.size_bytes() == 3 * 4096);
    region.as<char>()[5000] = 'S';
    const pagemark::snapshot second = region.take_snapshot();
    TRUE(!(first == second) && first.diff(second).contains(5000));
    TRUE(first.read<char>(5000) == 's' && second.read<char>(5000) == 'S');
    const pagemark_range all{0, 3 * 4096};
    TRUE(region.take_snapshot_without({&all, 1}).read<char>(5000) == 0);
    TRUE(region.restore(first).contains(5000) && region.as<char>()[5000] == 's');
    TRUE(pagemark::region::from_snapshot(second, options).as<char>()[5000] == 'S');

    int ends[2];
    TRUE(pipe(ends) == 0 && write(ends[1], "abc", 3) == 3);
    TRUE(region.read_from(ends[0], 10, 2) == 2);
    {
        pagemark::writable writable(region, 12, 1);
        TRUE(read(ends[0], region.bytes().data() + 12, 1) == 1);
    }
    TRUE(std::memcmp(region.data(), "\0\0\0\0\0\0\0\0\0\0abc", 13) == 0);
    close(ends[0]);
    close(ends[1]);
    region.discard(0, 4096);
    TRUE(region.as<char>()[10] == 0);

    pagemark::region moved(std::move(region));
    TRUE(moved.as<char>()[5000] == 's');
    moved = pagemark::region(4096, options);
    TRUE(moved.size_bytes() == 4096);
}

static void repositories(const pagemark::options &options)
{
    char directory[] = "/tmp/pagemark-cpp-XXXXXX";
    TRUE(mkdtemp(directory) != nullptr);
    {
        pagemark::repository repository(std::string(directory) + "/repository");
        pagemark::region region(4096, options);
        region.as<int>()[3] = 4;
        TRUE(region.save(repository, "job") == 1);
        TRUE(pagemark::region::open(repository, "job", options).as<int>()[3] == 4);
        TRUE(pagemark::snapshot::open(repository, "job").read<int>(12) == 4);
        region.as<int>()[3] = 5;
        TRUE(region.load(repository, "job").contains(12) && region.as<int>()[3] == 4);
        TRUE(region.take_snapshot().save(repository, "job") == 2);
        THROWS(NEVER_SAVED, "none", pagemark::region::open(repository, "none"));
    }
    std::filesystem::remove_all(directory);
}

static void changes(const pagemark::options &options)
{
    pagemark::region region(4096, options), replica(4096, options);
    region.begin();
    region.as<int>()[1] = 2;
    const pagemark::changes changes = region.commit_changes();
    TRUE(changes.items().size() == 1 && changes.items()[0].old_content != nullptr);
    changes.apply(replica);
    TRUE(replica.as<int>()[1] == 2);
    changes.revert(replica);
    TRUE(replica.as<int>()[1] == 0);
    THROWS(DAMAGED, "damaged", pagemark::changes::decode(std::as_bytes(std::span("no changes"))));
}

int main(int argc, char **argv)
{
    pagemark::options options;
    options.mechanism = argc > 1 ? argv[1] : "auto";
    try {
        pagemark::region probe(1, options);
    } catch (const pagemark::error &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return error.status() == PAGEMARK_STATUS_UNAVAILABLE ? 77 : 1;
    }
    THROWS(INVALID_ARGUMENT, "guess", pagemark::region(1, pagemark::options{.mechanism = "guess"}));
    transactions(options);
    content(options);
    repositories(options);
    changes(options);
    return failures != 0;
}
