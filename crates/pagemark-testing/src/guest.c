/*
 * A program that runs in a virtual machine without an operating system. It holds 16 MiB of data that changes with each step,
 * checks all of it before each step, and writes "step N" to the serial port, or "WRONG" if a page is not as it must be.
 *
 * QEMU loads it with -kernel, as a multiboot program.
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

enum { MAGIC = 0x1BADB002, SERIAL = 0x3f8, PAGES = 4096, PAGE_WORDS = 1024 };

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

static void print(const char *text)
{
    for (; *text; text++) {
        while (!(in(SERIAL + 5) & 0x20))
            ;
        out(SERIAL, *text);
    }
}

static void print_number(u32 number)
{
    char text[12];
    int at = 11;
    text[at] = 0;
    do
        text[--at] = '0' + number % 10;
    while (number /= 10);
    print(text + at);
}

/* The first word of a page, which was last written in the newest step s with s % PAGES == page. */
static u32 expected(u32 step, u32 page)
{
    u32 behind = (step + PAGES - page) % PAGES;
    return behind < step ? (step - behind) * 2654435761u + page : 0;
}

void run(void)
{
    for (u32 step = 0;;) {
        for (u32 page = 0; page < PAGES; page++) {
            u32 first = expected(step, page), *words = data + page * PAGE_WORDS;
            for (u32 i = 0; i < PAGE_WORDS; i += 93)
                if (words[i] != (first ? first + i : 0)) {
                    print("WRONG page ");
                    print_number(page);
                    print("\n");
                    for (;;)
                        __asm__ volatile("hlt");
                }
        }
        print("step ");
        print_number(step);
        print("\n");
        u32 page = ++step % PAGES, first = step * 2654435761u + page;
        for (u32 i = 0; i < PAGE_WORDS; i++)
            data[page * PAGE_WORDS + i] = first ? first + i : 0;
    }
}

__attribute__((naked, used)) void _start(void) { __asm__("mov $stack + 16384, %esp\n jmp run"); }
