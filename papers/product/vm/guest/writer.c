/*
 * Fills memory with words that differ, and then writes one word of each page of a working set,
 * again and again. After each pass it writes a dot. Its arguments are the MiB that it fills, and the
 * pages of the working set.
 */
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE_WORDS = 1024 };

int main(int count, char **arguments)
{
    if (count != 3)
        return 2;
    size_t words = strtoul(arguments[1], NULL, 10) << 18, pages = strtoul(arguments[2], NULL, 10);
    if (pages * PAGE_WORDS > words)
        return 2;
    volatile uint32_t *data = mmap(NULL, words * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED)
        return 1;
    for (size_t i = 0; i < words; i++)
        data[i] = (uint32_t)i * 2654435761u + 1;
    for (uint32_t pass = 1;; pass++) {
        for (size_t page = 0; page < pages; page++)
            data[page * PAGE_WORDS + pass % PAGE_WORDS] = pass;
        if (write(1, ".", 1) != 1)
            return 1;
    }
}
