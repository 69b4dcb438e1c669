/*
 * An index of words in a heap that is saved to a repository, in containers of the standard library: killed at any
 * instant, the program continues from the last save when it is started again.
 *
 *     c++ -std=c++20 -o words words.cpp $(pkg-config --cflags --libs pagemark)
 *     ./words REPOSITORY
 */
#include <pagemark.hpp>

#include <cstdint>
#include <iostream>
#include <map>
#include <memory_resource>
#include <string>
#include <vector>

constexpr std::uint64_t lines = 6000, lines_a_save = 200;

/* Where each word is: numbers of lines. */
struct word_index {
    using allocator_type = std::pmr::polymorphic_allocator<>;

    explicit word_index(const allocator_type &allocator) : places(allocator) {}

    std::uint64_t lines = 0;
    std::pmr::map<std::pmr::string, std::pmr::vector<std::uint64_t>> places;
};

/* The words of a line of a text that is the same in each run. */
static std::vector<std::string> words_of(std::uint64_t line)
{
    std::vector<std::string> words;
    for (std::uint64_t number = line + 1; number > 0; number /= 7)
        words.push_back("a word that ends with " + std::to_string(number % 1000));
    return words;
}

int main(int argc, char **argv)
try {
    if (argc != 2) {
        std::cerr << "usage: " << argv[0] << " REPOSITORY\n";
        return 2;
    }
    pagemark::repository repository(argv[1]);
    pagemark::saved_heap heap = pagemark::saved_heap::open_or_create(repository, "words");
    word_index &index = heap.root_or_make<word_index>();
    std::cout << "begins with " << index.lines << std::endl;

    while (index.lines < lines) {
        for (const std::string &word : words_of(index.lines))
            index.places[std::pmr::string(word)].push_back(index.lines);
        if (++index.lines % lines_a_save == 0)
            std::cout << "save " << heap.checkpoint() << std::endl;
    }

    std::uint64_t found = 0, expected = 0;
    for (std::uint64_t line = 0; line < lines; line++)
        expected += words_of(line).size();
    for (const auto &[word, places] : index.places)
        found += places.size();
    if (found != expected) {
        std::cerr << found << " places, not " << expected << '\n';
        return 1;
    }
    std::cout << found << " places of " << index.places.size() << " words\n";
} catch (const pagemark::error &error) {
    std::cerr << error.what() << '\n';
    return error.status() == PAGEMARK_STATUS_UNAVAILABLE ? 77 : 1;
}
