/* What a program needs that QEMU loads with -kernel, as a multiboot program: the header, and text to the serial port. */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

enum { MAGIC = 0x1BADB002, SERIAL = 0x3f8 };

__attribute__((section(".multiboot"), used)) static const u32 header[] = { MAGIC, 0, -MAGIC };

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
