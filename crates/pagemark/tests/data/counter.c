/* Writes memory and a file for ever. */
#include <fcntl.h>
#include <unistd.h>

static volatile char grid[3 * 4096] __attribute__((aligned(4096)));

int main(int argc, char **argv) {
    int log = open(argv[1], O_CREAT | O_WRONLY | O_TRUNC, 0600);
    for (unsigned step = 0;; step++) {
        grid[step % sizeof grid] = (char)step;
        if (step % 8 == 0)
            write(log, "a line of the log\n", 18);
        usleep(20000);
    }
}
