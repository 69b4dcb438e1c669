/*
 * A program that runs in a virtual machine without an operating system. It writes "turn N" to the serial port, and waits
 * for a line there, which it sends back. How often it has looked before each byte came stays in its memory, so that memory
 * depends on the instruction at which the byte came.
 *
 * QEMU loads it with -kernel, as a multiboot program.
 */
#include "machine.h"

enum { BYTES = 4096 };

__attribute__((used)) u32 stack[4096];

static volatile u32 looks, looks_at[BYTES], count;

static u8 read_byte(void)
{
    while (!(in(SERIAL + 5) & 1))
        looks++;
    looks_at[count++ % BYTES] = looks;
    return in(SERIAL);
}

void run(void)
{
    /* 8 bits, at 115,200 baud: the state of the port has not the form that it has before it was set. */
    out(SERIAL + 3, 0x83);
    out(SERIAL, 1);
    out(SERIAL + 1, 0);
    out(SERIAL + 3, 3);
    /* Queues of 16 bytes. */
    out(SERIAL + 2, 1);
    for (u32 turn = 1;; turn++) {
        print("turn ");
        print_number(turn);
        print("\n");
        for (u8 byte = 0; byte != '\n';) {
            byte = read_byte();
            char text[] = { byte, 0 };
            print(text);
        }
    }
}

__attribute__((naked, used)) void _start(void) { __asm__("mov $stack + 16384, %esp\n jmp run"); }
