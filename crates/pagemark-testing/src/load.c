/*
 * A program that runs in a virtual machine without an operating system, on as many processors as the last character of its
 * command line says. Each processor has 8 MiB of its own, of which it checks and rewrites one page after the other, at random.
 * The first processor writes "step N" to the serial port when each has rewritten further pages, or "WRONG" if a page of any
 * is not as it must be.
 *
 * QEMU loads it with -kernel, as a multiboot program.
 */
#include "machine.h"

enum { PROCESSORS = 8, PAGES = 2048, PAGE_WORDS = 1024, STEP_PAGES = 256 };
enum { STACK_BYTES = 4096, START_PAGE = 0x8000, HAS_COMMAND_LINE = 4 };

__attribute__((used)) u8 stacks[(PROCESSORS + 1) * STACK_BYTES];
__attribute__((used)) u32 started;

/* How often each page was rewritten. */
static u32 versions[PROCESSORS][PAGES];
static volatile u32 rewritten[PROCESSORS];
static volatile u32 wrong;

static u32 *const data = (u32 *)(16 << 20);
static volatile u32 *const interrupts = (u32 *)0xfee00300;

/* Checks a page unless nothing is known of it, and rewrites all of it. */
static void rewrite(u32 processor, u32 page)
{
    volatile u32 *words = data + (processor * PAGES + page) * PAGE_WORDS;
    u32 version = versions[processor][page], first = version * 2654435761u + page;
    for (u32 i = 0; i < PAGE_WORDS; i++)
        if (version && words[i] != first + i * 7)
            wrong = 1 + processor;
    first = ++versions[processor][page] * 2654435761u + page;
    for (u32 i = 0; i < PAGE_WORDS; i++)
        words[i] = first + i * 7;
}

/* Rewrites pages for ever, or `count` of them. */
static void work(u32 processor, u32 *random, u32 count)
{
    for (u32 done = 0; !count || done < count; done++) {
        *random = *random * 1664525 + 1013904223;
        rewrite(processor, (*random >> 16) % PAGES);
        rewritten[processor]++;
    }
}

/* Where all processors but the first begin. */
__attribute__((used)) void work_for_ever(u32 processor)
{
    u32 random = 12345 + processor;
    work(processor, &random, 0);
}

/*
 * Where those processors begin in 16-bit mode, once it is at START_PAGE: it enters 32-bit mode, and takes the next number and
 * its stack.
 */
__asm__(".text\n"
        ".code16\n"
        "trampoline: cli\n"
        "xor %ax, %ax\n"
        "mov %ax, %ds\n"
        "lgdtl 0x8000 + (table - trampoline)\n"
        "mov %cr0, %eax\n"
        "or $1, %al\n"
        "mov %eax, %cr0\n"
        "ljmpl $8, $entry\n"
        ".balign 4\n"
        "table: .word 23\n"
        ".long segments\n"
        "trampoline_end:\n"
        ".code32\n"
        "entry: mov $16, %ax\n"
        "mov %ax, %ds\n"
        "mov %ax, %es\n"
        "mov %ax, %ss\n"
        "mov $1, %eax\n"
        "lock xadd %eax, started\n"
        "inc %eax\n"
        "mov %eax, %esp\n"
        "inc %esp\n"
        "shl $12, %esp\n"
        "add $stacks, %esp\n"
        "push %eax\n"
        "call work_for_ever\n"
        ".balign 8\n"
        "segments: .quad 0, 0x00cf9a000000ffff, 0x00cf92000000ffff\n");

extern const u8 trampoline[], trampoline_end[];

/* Starts the other processors. */
static void start(u32 count)
{
    for (u32 i = 0; i < (u32)(trampoline_end - trampoline); i++)
        ((volatile u8 *)START_PAGE)[i] = trampoline[i];
    /* To all but this one: initialize, then start at page 8. */
    interrupts[0] = 0x000c4500;
    for (u32 i = 0; i < 100000; i++)
        in(0x80);
    interrupts[0] = 0x000c4608;
    while (*(volatile u32 *)&started + 1 < count)
        ;
}

__attribute__((used)) void run(const u32 *information)
{
    u32 count = 1, random = 12345, before[PROCESSORS] = { 0 };
    if (information[0] & HAS_COMMAND_LINE) {
        const char *line = (const char *)information[4];
        while (line[1])
            line++;
        count = *line - '0';
    }
    if (count > 1)
        start(count);
    for (u32 step = 0;; step++) {
        u32 going;
        work(0, &random, STEP_PAGES);
        do {
            going = 0;
            for (u32 i = 0; i < count; i++)
                going += rewritten[i] != before[i];
        } while (going < count);
        for (u32 i = 0; i < count; i++)
            before[i] = rewritten[i];
        if (wrong) {
            print("WRONG memory of processor ");
            print_number(wrong - 1);
            print("\n");
        }
        print("step ");
        print_number(step);
        print("\n");
    }
}

__attribute__((naked, used)) void _start(void)
{
    __asm__("mov $stacks + 4096, %esp\n push %ebx\n call run");
}
