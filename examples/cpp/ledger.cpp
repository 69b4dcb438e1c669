/*
 * A ledger in a region: an exception rolls a booking back, and a second region follows the first
 * one by the changes of each booking.
 *
 *     c++ -std=c++20 -o ledger ledger.cpp $(pkg-config --cflags --libs pagemark)
 *     ./ledger [MECHANISM]
 */
#include <pagemark.hpp>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <span>
#include <stdexcept>
#include <vector>

constexpr std::size_t accounts = 50'000;

static pagemark::changes book(pagemark::region &region, std::size_t from, std::size_t to, std::int64_t amount)
{
    std::span balances = region.as<std::int64_t>();
    pagemark::transaction transaction(region);
    balances[to] += amount;
    balances[from] -= amount;
    if (balances[from] < 0)
        throw std::runtime_error("the account does not cover it");
    return transaction.commit_changes();
}

int main(int argc, char **argv)
try {
    pagemark::options options;
    options.mechanism = argc > 1 ? argv[1] : "auto";
    pagemark::region ledger(accounts * sizeof(std::int64_t), options);
    pagemark::region replica(ledger.size_bytes(), options);

    pagemark::transaction opening(ledger);
    std::span balances = ledger.as<std::int64_t>().first(accounts);
    for (std::int64_t &balance : balances)
        balance = 100;
    opening.commit_changes().apply(replica);
    const pagemark::snapshot opened = ledger.take_snapshot();

    for (std::int64_t amount : {30, 80}) {
        try {
            pagemark::changes changes = book(ledger, 7, 40'000, amount);
            /* A replica in another process receives these bytes. */
            changes.forget_old();
            pagemark::changes::decode(changes.encode()).apply(replica);
            std::cout << amount << ": booked\n";
        } catch (const std::runtime_error &error) {
            std::cout << amount << ": " << error.what() << "\n";
        }
    }
    std::span copy = replica.as<std::int64_t>();
    std::cout << "the replica has " << copy[7] << " and " << copy[40'000] << ", in all "
              << std::accumulate(copy.begin(), copy.end(), std::int64_t{0}) << "\n";

    const pagemark::ranges differing = opened.diff(ledger.take_snapshot());
    std::cout << "account 7 had " << opened.read<std::int64_t>(7 * sizeof(std::int64_t)) << "; since then "
              << differing.size() << " pages differ\n";
    ledger.restore(opened);
    std::cout << "restored: " << balances[7] << " " << balances[40'000] << "\n";
    return 0;
} catch (const pagemark::error &error) {
    std::cerr << error.what() << "\n";
    /* 77: this machine lacks the mechanism. */
    return error.status() == PAGEMARK_STATUS_UNAVAILABLE ? 77 : 1;
}
