/*
 * A program that runs in a virtual machine without an operating system. It holds 8 MiB of data that changes with each step,
 * checks all of it before each step, and writes "step N" to the serial port, or "WRONG" if a page is not as it must be. If
 * there is an IDE disk, whose content must be zeros at the start, it writes one sector of it in each step, and checks some.
 * In each step it also has QEMU write a word to memory that the program itself only reads: by DMA of the device fw_cfg.
 *
 * QEMU loads it with -kernel, as a multiboot program.
 */
#include "machine.h"

enum { PAGES = 2048, PAGE_WORDS = 1024 };
enum { IDE = 0x1f0, READ = 0x20, WRITE = 0x30, SECTORS = 64, SECTOR_WORDS = 128, STRIDE = 301, CHECKED_SECTORS = 2 };
enum { CONFIG_SELECTOR = 0x510, CONFIG_DATA = 0x511, CONFIG_DMA = 0x514, SIGNATURE = 0, FEATURES = 1, RECEIVED = 4096 };
enum { DMA_FAILED = 1, DMA_READ = 2, DMA_SELECT = 8, HAS_DMA = 2, QEMU = 0x554d4551 };

__attribute__((used)) u32 stack[4096];

static u32 *const data = (u32 *)(4 << 20);

/* The first word of a page, which was last written in the newest step s with s % PAGES == page. */
static u32 expected(u32 step, u32 page)
{
    u32 behind = (step + PAGES - page) % PAGES;
    return behind < step ? (step - behind) * 2654435761u + page : 0;
}

__attribute__((noreturn)) static void wrong(const char *what, u32 number)
{
    print("WRONG ");
    print(what);
    print_number(number);
    print("\n");
    for (;;)
        __asm__ volatile("hlt");
}

static int has_disk(void)
{
    out(IDE + 6, 0xe0);
    u8 status = in(IDE + 7);
    return status != 0xff && (status & 0x40);
}

/* Waits until the disk is not busy, and has all of `bits` in its status. */
static void wait_for_disk(u8 bits)
{
    u8 status;
    while (((status = in(IDE + 7)) & 0x80) || (status & bits) != bits)
        if (status & 0x01)
            wrong("status of the disk ", status);
}

static void command(u32 sector, u8 code)
{
    u32 place = sector * STRIDE;
    wait_for_disk(0x40);
    out(IDE + 6, 0xe0 | place >> 24);
    out(IDE + 2, 1);
    out(IDE + 3, place);
    out(IDE + 4, place >> 8);
    out(IDE + 5, place >> 16);
    out(IDE + 7, code);
    wait_for_disk(0x08);
}

static void write_sector(u32 sector, u32 first)
{
    static u32 words[SECTOR_WORDS];
    const void *from = words;
    u32 count = SECTOR_WORDS * 2;
    for (u32 i = 0; i < SECTOR_WORDS; i++)
        words[i] = first + i;
    command(sector, WRITE);
    __asm__ volatile("rep outsw" : "+S"(from), "+c"(count) : "d"(IDE) : "memory");
    wait_for_disk(0x40);
}

/* As `expected`, of a sector. */
static void check_sector(u32 step, u32 sector)
{
    static u32 words[SECTOR_WORDS];
    void *to = words;
    u32 count = SECTOR_WORDS * 2, behind = (step + SECTORS - sector) % SECTORS;
    u32 first = behind < step ? step - behind : 0;
    command(sector, READ);
    __asm__ volatile("rep insw" : "+D"(to), "+c"(count) : "d"(IDE) : "memory");
    for (u32 i = 0; i < SECTOR_WORDS; i++)
        if (words[i] != (first ? first * 40503 + i : 0))
            wrong("sector ", sector);
}

/* A request to the device, and the words that it has written. The numbers of a request are big-endian. */
static volatile struct {
    u32 control, bytes, high_address, low_address;
} request __attribute__((aligned(16)));
static volatile u32 received[RECEIVED] __attribute__((aligned(4096)));

static int has_dma(void)
{
    __asm__ volatile("outw %0, %1" : : "a"((u16)FEATURES), "d"((u16)CONFIG_SELECTOR));
    return in(CONFIG_DATA) & HAS_DMA;
}

static void receive(u32 word)
{
    request.control = __builtin_bswap32(SIGNATURE << 16 | DMA_SELECT | DMA_READ);
    request.bytes = __builtin_bswap32(sizeof(u32));
    request.high_address = 0;
    request.low_address = __builtin_bswap32((u32)&received[word]);
    __asm__ volatile("outl %0, %1" : : "a"(__builtin_bswap32((u32)&request)), "d"((u16)(CONFIG_DMA + 4)) : "memory");
    while (request.control)
        if (request.control & __builtin_bswap32(DMA_FAILED))
            wrong("request ", word);
}

static void check_received(u32 step)
{
    for (u32 word = 1; word < RECEIVED && word <= step; word++)
        if (received[word] != QEMU)
            wrong("received word ", word);
}

void run(void)
{
    int disk = has_disk(), dma = has_dma();
    for (u32 step = 0;;) {
        for (u32 page = 0; page < PAGES; page++) {
            u32 first = expected(step, page), *words = data + page * PAGE_WORDS;
            for (u32 i = 0; i < PAGE_WORDS; i += 93)
                if (words[i] != (first ? first + i : 0))
                    wrong("page ", page);
        }
        if (dma)
            check_received(step);
        for (u32 i = 0; disk && i < CHECKED_SECTORS; i++)
            check_sector(step, (step * CHECKED_SECTORS + i) % SECTORS);
        print("step ");
        print_number(step);
        print("\n");
        u32 page = ++step % PAGES, first = step * 2654435761u + page;
        for (u32 i = 0; i < PAGE_WORDS; i++)
            data[page * PAGE_WORDS + i] = first ? first + i : 0;
        if (disk)
            write_sector(step % SECTORS, step * 40503);
        if (dma)
            receive(step % RECEIVED);
    }
}

__attribute__((naked, used)) void _start(void) { __asm__("mov $stack + 16384, %esp\n jmp run"); }
