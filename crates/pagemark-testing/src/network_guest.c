/*
 * A program that runs in a virtual machine without an operating system, and gets packets by a network card, an e1000. It
 * writes "ready" to the serial port, then "packet N" for each packet, and answers those that ask for its address
 * (10.0.2.15, by ARP) instead. Between two looks for a packet it does some work, and waits for an interrupt of a timer, each
 * millisecond. How often it has looked before each packet came stays in its memory, so that memory depends on when the packet
 * came, and on how long it has waited.
 *
 * QEMU loads it with -kernel, as a multiboot program.
 */
#include "machine.h"

typedef unsigned long long u64;

enum { CARD = 0x100e8086, PACKETS = 4096, RING = 8, BYTES = 2048 };
/* Registers, and their bits. */
enum { RECEIVE_CONTROL = 0x100, SEND_CONTROL = 0x400, RECEIVE = 0x2800, SEND = 0x3800, ADDRESS = 0x5400 };
enum { RING_BYTES = 8, HEAD = 0x10, TAIL = 0x18, ENABLE = 2, ALL_PACKETS = 0x8018, PAD = 8 };
enum { DONE = 1, WHOLE_PACKET = 1 | 2 | 8 };
/* The interrupt of the timer, how often it comes (in 1.19 MHz), and the most work between two. */
enum { TIMER = 0x20, PERIOD = 1193, WORK = 2048 };

__attribute__((used)) u32 stack[4096];

struct descriptor {
    u64 address;
    u16 bytes;
    u8 checksum, command, status, errors;
    u16 special;
};

static volatile struct descriptor received[RING] __attribute__((aligned(16))), sent[RING] __attribute__((aligned(16)));
static u8 packets[RING][BYTES] __attribute__((aligned(16)));
static u8 reply[64];
static volatile u32 looks, looks_at[PACKETS], looks_for_send, count, sum, random = 1;
__attribute__((used)) volatile u32 ticks;
static volatile u32 *card;

static u32 configuration(u32 device, u32 at)
{
    u32 value;
    __asm__ volatile("outl %0, %1" : : "a"(0x80000000 | device << 11 | at), "Nd"((u16)0xcf8));
    __asm__ volatile("inl %1, %0" : "=a"(value) : "Nd"((u16)0xcfc));
    return value;
}

static void configure(u32 device, u32 at, u32 value)
{
    __asm__ volatile("outl %0, %1" : : "a"(0x80000000 | device << 11 | at), "Nd"((u16)0xcf8));
    __asm__ volatile("outl %0, %1" : : "a"(value), "Nd"((u16)0xcfc));
}

static void set(u32 at, u32 value) { card[at / 4] = value; }

static void set_ring(u32 at, volatile struct descriptor *ring)
{
    set(at, (u32)ring);
    set(at + 4, 0);
    set(at + RING_BYTES, RING * sizeof *ring);
    set(at + HEAD, 0);
    set(at + TAIL, 0);
}

__attribute__((naked, used)) static void on_timer(void)
{
    __asm__("push %eax\n incl ticks\n mov $0x20, %al\n out %al, $0x20\n pop %eax\n iret");
}

/* Has the timer interrupt the processor. */
static void start_timer(void)
{
    static const u64 segments[] = { 0, 0x00cf9a000000ffff, 0x00cf92000000ffff };
    static u64 gates[TIMER + 1];
    struct { u16 bytes; u32 address; } __attribute__((packed)) table = { sizeof segments - 1, (u32)segments };
    __asm__ volatile("lgdt %0\n ljmp $8, $1f\n 1: mov %1, %%ds\n mov %1, %%es\n mov %1, %%ss" : : "m"(table), "r"(16) : "memory");
    gates[TIMER] = ((u32)on_timer & 0xffff) | 8 << 16 | ((u64)((u32)on_timer & 0xffff0000) | 0x8e00) << 32;
    table.bytes = sizeof gates - 1;
    table.address = (u32)gates;
    __asm__ volatile("lidt %0" : : "m"(table) : "memory");
    static const u8 controllers[][2] = { { 0x20, 0x11 }, { 0xa0, 0x11 }, { 0x21, TIMER }, { 0xa1, TIMER + 8 }, { 0x21, 4 },
                                         { 0xa1, 2 }, { 0x21, 1 }, { 0xa1, 1 }, { 0x21, 0xfe }, { 0xa1, 0xff } };
    for (u32 i = 0; i < sizeof controllers / sizeof *controllers; i++)
        out(controllers[i][0], controllers[i][1]);
    out(0x43, 0x34);
    out(0x40, PERIOD & 0xff);
    out(0x40, PERIOD >> 8);
    __asm__ volatile("sti");
}

static void copy(u8 *to, const u8 *from, u32 bytes)
{
    while (bytes--)
        *to++ = *from++;
}

/* Answers a packet by ARP that asks for an address, and returns 1; 0 if it is another one. */
static int answer(const u8 *packet)
{
    static u32 at;
    /* Ethernet's type, and the operation. */
    if (packet[12] != 8 || packet[13] != 6 || packet[21] != 1)
        return 0;
    u32 address[] = { card[ADDRESS / 4], card[ADDRESS / 4 + 1] };
    copy(reply, packet, 42);
    copy(reply, packet + 6, 6);
    copy(reply + 6, (u8 *)address, 6);
    reply[21] = 2;
    copy(reply + 22, (u8 *)address, 6);
    copy(reply + 28, packet + 38, 4);
    copy(reply + 32, packet + 22, 10);
    sent[at].address = (u32)reply;
    sent[at].bytes = 60;
    sent[at].command = WHOLE_PACKET;
    sent[at].checksum = sent[at].status = 0;
    volatile struct descriptor *done = &sent[at];
    at = (at + 1) % RING;
    __asm__ volatile("" : : : "memory");
    set(SEND + TAIL, at);
    while (!(done->status & DONE))
        looks_for_send++;
    return 1;
}

void run(void)
{
    u32 device = 0;
    while (device < 32 && configuration(device, 0) != CARD)
        device++;
    if (device == 32) {
        print("WRONG: no card\n");
        for (;;)
            __asm__ volatile("hlt");
    }
    configure(device, 4, configuration(device, 4) | 6);
    card = (volatile u32 *)(configuration(device, 0x10) & ~15u);
    for (u32 i = 0; i < RING; i++)
        received[i].address = (u32)packets[i];
    set_ring(RECEIVE, received);
    set_ring(SEND, sent);
    set(SEND_CONTROL, ENABLE | PAD);
    set(RECEIVE_CONTROL, ENABLE | ALL_PACKETS);
    set(RECEIVE + TAIL, RING - 1);
    start_timer();
    print("ready\n");
    for (u32 at = 0;; at = (at + 1) % RING) {
        while (!(received[at].status & DONE)) {
            looks++;
            for (u32 work = (random = random * 1664525 + 1013904223) % WORK; work; work--)
                sum++;
            __asm__ volatile("hlt");
        }
        looks_at[count++ % PACKETS] = looks;
        const u8 *packet = packets[at];
        for (u32 i = 0; i < received[at].bytes; i++)
            sum = sum * 31 + packet[i];
        if (!answer(packet)) {
            print("packet ");
            print_number(count);
            print("\n");
        }
        received[at].status = 0;
        set(RECEIVE + TAIL, at);
    }
}

__attribute__((naked, used)) void _start(void) { __asm__("mov $stack + 16384, %esp\n jmp run"); }
