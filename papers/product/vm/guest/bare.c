/*
 * A program that runs in a virtual machine without an operating system. It fills its memory from 16 MiB on with words that
 * differ, and then writes one word of each page of a working set, again and again. After each pass it writes a dot to the
 * serial port. Its command line has two numbers: the MiB that it fills, and the pages of the working set.
 *
 * QEMU loads it with -kernel, as a multiboot program.
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

enum { MAGIC = 0x1BADB002, SERIAL = 0x3f8, PAGE_WORDS = 1024, COMMAND_LINE = 4 };

__attribute__((section(".multiboot"), used)) static const u32 header[] = { MAGIC, 0, -MAGIC };

__attribute__((used)) u32 stack[4096];

static u32 *const data = (u32 *)(16 << 20);

static void out(u16 port, u8 value) { __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port)); }

static u8 in(u16 port)
{
    u8 value;
    __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
    return value;
}

static void print(u8 byte)
{
    while (!(in(SERIAL + 5) & 0x20))
        ;
    out(SERIAL, byte);
}

/* The number that begins at *text, after other characters. */
static u32 number(const char **text)
{
    u32 value = 0;
    while (**text && (**text < '0' || **text > '9'))
        ++*text;
    for (; **text >= '0' && **text <= '9'; ++*text)
        value = value * 10 + (u32)(**text - '0');
    return value;
}

__attribute__((used)) void run(const u32 *information)
{
    /* The name of the program comes first. */
    const char *line = (const char *)information[COMMAND_LINE];
    while (*line && *line != ' ')
        line++;
    u32 words = number(&line) << 18, pages = number(&line);
    for (u32 i = 0; i < words; i++)
        data[i] = i * 2654435761u + 1;
    for (u32 pass = 1;; pass++) {
        for (u32 page = 0; page < pages; page++)
            data[page * PAGE_WORDS + pass % PAGE_WORDS] = pass;
        print('.');
    }
}

__asm__(".text\n.globl _start\n_start:\n  mov $stack + 16384, %esp\n  push %ebx\n  call run\n");
