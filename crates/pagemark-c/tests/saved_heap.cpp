/* Saved heaps in C++: containers that come back, and what calls throw. Ends with 0 if each is as expected. */
#include "expect.hpp"

#include <map>
#include <memory_resource>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

static_assert(!std::is_copy_constructible_v<pagemark::saved_heap>);
static_assert(std::is_nothrow_move_constructible_v<pagemark::saved_heap>);

using strings = std::pmr::vector<std::pmr::string>;
using index_of = std::pmr::unordered_map<std::pmr::string, strings>;

static std::pmr::string text(int number)
{
    return std::pmr::string(static_cast<std::size_t>(number % 40 + 1), static_cast<char>('a' + number % 26));
}

/* Compares the heap with `model`, which is what the programs before have saved, and changes both. */
static void take_turn(pagemark::saved_heap &heap, std::map<std::string, std::vector<std::string>> &model, int number)
{
    index_of &index = heap.root_or_make<index_of>();
    TRUE(index.get_allocator().resource() == heap.resource());
    std::size_t words = 0;
    for (const auto &[key, values] : model) {
        const auto found = index.find(std::pmr::string(key));
        TRUE(found != index.end() && std::vector<std::string>(found->second.begin(), found->second.end()) == values);
        words++;
    }
    TRUE(words == index.size());
    for (int step = 0; step < 200; step++) {
        const int key = (number * 7919 + step * 31) % 500;
        if (step % 5 == 0) {
            index.erase(text(key));
            model.erase(std::string(text(key)));
        } else {
            strings &values = index[text(key)];
            TRUE(values.get_allocator().resource() == heap.resource());
            values.push_back(text(step));
            TRUE(pagemark_saved_heap_contains(heap.get(), values.back().c_str()));
            model[std::string(text(key))].emplace_back(text(step));
        }
    }
}

int main(int argc, char **argv)
try {
    if (argc != 2)
        return 2;
    pagemark::repository repository(argv[1]);
    const pagemark::heap_options options{.capacity_bytes = 32 << 20, .version = 5, .parts = 2};
    THROWS(NEVER_SAVED, "heap", pagemark::saved_heap::open(repository, "heap", options));
    std::map<std::string, std::vector<std::string>> model, first;
    for (int number = 0; number < 5; number++) {
        auto heap = pagemark::saved_heap::open_or_create(repository, "heap", options);
        take_turn(heap, model, number);
        if (number == 0)
            first = model;
        auto saving = heap.checkpoint_in_background();
        /* Not saved. */
        heap.root<index_of>()->clear();
        TRUE(saving.wait() == static_cast<std::uint64_t>(number) + 1);
        pagemark::saved_heap moved(std::move(heap));
        TRUE(moved.root<index_of>()->empty() && moved.allocator().resource() == moved.resource());
    }
    {
        auto heap = pagemark::saved_heap::open_at(repository, "heap", 1, options);
        take_turn(heap, first, 5);
        int local = 0;
        THROWS(OUT_OF_RANGE, "not in the heap", heap.set_root(&local));
        heap.set_root(nullptr);
        TRUE(heap.root<int>() == nullptr);
        int &number = heap.root_or_make<int>(7);
        TRUE(number == 7 && &heap.root_or_make<int>(8) == &number);
        try {
            std::pmr::vector<char> too_long(64 << 20, heap.resource());
            TRUE(!"longer than the heap");
        } catch (const std::bad_alloc &) {
        }
    }
    THROWS(EXISTS, "heap", pagemark::saved_heap::create(repository, "heap", options));
    THROWS(OTHER_HEAP, "version", pagemark::saved_heap::open(repository, "heap", {.version = 6, .parts = 2}));

    pagemark_saved_heap *in_c = nullptr;
    pagemark::check(pagemark_saved_heap_create(repository.get(), "in-c", nullptr, &in_c));
    pagemark::check(pagemark_saved_heap_checkpoint(in_c, nullptr));
    pagemark_saved_heap_free(in_c);
    THROWS(OTHER_HEAP, "another language", pagemark::saved_heap::open(repository, "in-c"));
    return failures != 0;
} catch (const pagemark::error &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return error.status() == PAGEMARK_STATUS_UNAVAILABLE ? 77 : 1;
}
