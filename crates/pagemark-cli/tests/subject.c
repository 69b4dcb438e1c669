/*
 * subject MODE: a process to attach to. It prints "ready" and goes on for ever.
 *
 *   plain            does nothing
 *   userfaultfd      has a userfaultfd of its own
 *   refuses, kills   forbids itself the system call userfaultfd by a seccomp filter
 *   data MIB FILE    holds MIB of random data, checks it again and again, and adds a byte to FILE each time it is right;
 *                    with SIGUSR1 it gets as much again. If anything is wrong, it adds "!" and ends with 99.
 *   steps MIB FILE   holds MIB of data that changes with each step, checks all of it, and writes into FILE how many steps it
 *                    has made, and "paused" while it makes none because there is a file FILE.pause. Ends with 99 if anything is wrong.
 *   exits MS         writes memory for MS milliseconds, then exits with status 7
 */
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t more;

static void want_more(int signal) { (void)signal; more = 1; }

static uint64_t draw(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void forbid(uint32_t how)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_userfaultfd, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, how),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { sizeof filter / sizeof *filter, filter };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
        perror("seccomp");
        exit(98);
    }
}

static void add_to(const char *path, const char *text)
{
    int file = open(path, O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (file < 0 || write(file, text, 1) != 1)
        exit(98);
    close(file);
}

static void hold_data(size_t words, const char *path)
{
    uint64_t *parts[2] = { 0, 0 };
    for (int count = 0;;) {
        if (count < 1 || (more && count < 2)) {
            uint64_t state = 88172645463325252u + count;
            uint64_t *part = mmap(0, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (part == MAP_FAILED)
                exit(98);
            for (size_t i = 0; i < words; i++)
                part[i] = draw(&state);
            parts[count++] = part;
        }
        for (int part = 0; part < count; part++) {
            uint64_t state = 88172645463325252u + part;
            for (size_t i = 0; i < words; i++)
                if (parts[part][i] != draw(&state)) {
                    add_to(path, "!");
                    exit(99);
                }
        }
        add_to(path, count == 1 ? "." : "+");
        usleep(5000);
    }
}

static void take_steps(size_t words, const char *path)
{
    enum { PAGE_WORDS = 512 };
    size_t pages = words / PAGE_WORDS;
    uint64_t *data = mmap(0, words * 8, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int file = open(path, O_RDWR | O_CREAT, 0600);
    char pause_path[4096], text[64];
    snprintf(pause_path, sizeof pause_path, "%s.pause", path);
    if (data == MAP_FAILED || file < 0)
        exit(98);
    for (uint64_t steps = 0;;) {
        /* Page p was written last in the newest step s with s % pages == p. */
        for (size_t i = 0; i < words; i++) {
            size_t behind = (steps + pages - i / PAGE_WORDS) % pages;
            if (data[i] != (behind < steps ? (steps - behind) * 0x9e3779b97f4a7c15u + i : 0))
                exit(99);
        }
        int paused = !access(pause_path, F_OK);
        snprintf(text, sizeof text, "%-20llu%-10s", (unsigned long long)steps, paused ? "paused" : "");
        if (pwrite(file, text, 30, 0) != 30)
            exit(98);
        if (!paused) {
            uint64_t *page = data + ++steps % pages * PAGE_WORDS;
            for (size_t i = 0; i < PAGE_WORDS; i++)
                page[i] = steps * 0x9e3779b97f4a7c15u + (page - data) + i;
        }
        usleep(1000);
    }
}

static void exit_after(int ms)
{
    struct timespec begin, now;
    static volatile char memory[64 << 12];
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do {
        for (size_t i = 0; i < sizeof memory; i += 4096)
            memory[i]++;
        usleep(200);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while ((now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1000000 < ms);
    exit(7);
}

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    signal(SIGUSR1, want_more);
    /* The tests may run under nohup. */
    signal(SIGHUP, SIG_DFL);
    signal(SIGINT, SIG_DFL);
    signal(SIGTERM, SIG_DFL);
    if (!strcmp(mode, "userfaultfd") && syscall(__NR_userfaultfd, O_CLOEXEC) < 0) {
        perror("userfaultfd");
        return 98;
    }
    if (!strcmp(mode, "refuses"))
        forbid(SECCOMP_RET_ERRNO | 1);
    if (!strcmp(mode, "kills"))
        forbid(SECCOMP_RET_KILL_PROCESS);
    puts("ready");
    fflush(stdout);
    if (!strcmp(mode, "data") && argc > 3)
        hold_data((size_t)atoi(argv[2]) << 17, argv[3]);
    if (!strcmp(mode, "steps") && argc > 3)
        take_steps((size_t)atoi(argv[2]) << 17, argv[3]);
    if (!strcmp(mode, "exits") && argc > 2)
        exit_after(atoi(argv[2]));
    for (;;)
        usleep(5000);
}
