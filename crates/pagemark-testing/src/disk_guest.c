/*
 * A program that runs in a virtual machine without an operating system, and writes to its disks by virtio-blk (at most two,
 * of at least 1 MiB, whose content must be zeros at the start). In each step it reads and checks a block of each disk, writes
 * another one, and then "step N" to the serial port, or "WRONG". A disk that is read-only may hold anything. How often it has looked whether a request is complete stays
 * in its memory, so that memory depends on when the disks answer.
 *
 * QEMU loads it with -kernel, as a multiboot program.
 */
#include "machine.h"

typedef unsigned long long u64;

enum { DISKS = 2, BLOCKS = 256, BLOCK_WORDS = 1024, BLOCK_SECTORS = 8, WORK = 4000 };
enum { VIRTIO = 0x1af4, DISK = 0x1042, CAPABILITY = 9, COMMON = 1, NOTIFY = 2 };
enum { ACKNOWLEDGE = 1, DRIVER = 2, DRIVER_OK = 4, FEATURES_OK = 8, QUEUE = 4, NEXT = 1, WRITABLE = 2, READ = 0, WRITE = 1, READ_ONLY = 5 };

__attribute__((used)) u32 stack[4096];

struct common {
    u32 device_feature_select, device_feature, driver_feature_select, driver_feature;
    u16 msix_config, queues;
    u8 status, generation;
    u16 queue_select, queue_size, queue_msix, queue_enable, queue_notify_off;
    u64 descriptors, available, used;
} __attribute__((packed));

struct disk {
    volatile struct common *common;
    volatile u16 *notify;
    volatile struct { u64 address; u32 bytes; u16 flags, next; } descriptors[QUEUE] __attribute__((aligned(16)));
    volatile struct { u16 flags, index, ring[QUEUE]; } available __attribute__((aligned(16)));
    volatile struct { u16 flags, index; struct { u32 id, bytes; } ring[QUEUE]; } used __attribute__((aligned(16)));
    struct { u32 type, reserved; u64 sector; } header __attribute__((aligned(16)));
    volatile u8 status;
    int is_read_only;
    u32 versions[BLOCKS];
};

static struct disk disks[DISKS];
static u32 block[BLOCK_WORDS] __attribute__((aligned(4096)));
static volatile u32 looks, sum, random = 1;

__attribute__((noreturn)) static void wrong(const char *what, u32 number)
{
    print("WRONG ");
    print(what);
    print_number(number);
    print("\n");
    for (;;)
        __asm__ volatile("hlt");
}

static u32 configuration(u32 device, u32 at)
{
    u32 value;
    __asm__ volatile("outl %0, %1" : : "a"(0x80000000 | device << 11 | (at & 0xfc)), "Nd"((u16)0xcf8));
    __asm__ volatile("inl %1, %0" : "=a"(value) : "Nd"((u16)0xcfc));
    return value >> (at & 3) * 8;
}

static void configure(u32 device, u32 at, u32 value)
{
    __asm__ volatile("outl %0, %1" : : "a"(0x80000000 | device << 11 | at), "Nd"((u16)0xcf8));
    __asm__ volatile("outl %0, %1" : : "a"(value), "Nd"((u16)0xcfc));
}

static void open(struct disk *disk, u32 device)
{
    u32 notify = 0, multiplier = 0;
    configure(device, 4, configuration(device, 4) | 6);
    for (u32 at = configuration(device, 0x34) & 0xff; at; at = configuration(device, at + 1) & 0xff) {
        u32 kind = configuration(device, at + 3) & 0xff, bar = configuration(device, at + 4) & 0xff;
        if ((configuration(device, at) & 0xff) != CAPABILITY || bar > 5)
            continue;
        u32 place = (configuration(device, 0x10 + bar * 4) & ~15u) + configuration(device, at + 8);
        if (kind == COMMON)
            disk->common = (volatile struct common *)place;
        if (kind == NOTIFY) {
            notify = place;
            multiplier = configuration(device, at + 16);
        }
    }
    volatile struct common *common = disk->common;
    if (!common || !notify)
        wrong("disk ", device);
    common->status = 0;
    common->status = ACKNOWLEDGE | DRIVER;
    common->device_feature_select = 0;
    disk->is_read_only = common->device_feature >> READ_ONLY & 1;
    common->driver_feature_select = 0;
    common->driver_feature = disk->is_read_only << READ_ONLY;
    common->driver_feature_select = 1;
    common->driver_feature = 1;
    common->status = ACKNOWLEDGE | DRIVER | FEATURES_OK;
    common->queue_select = 0;
    if (common->queue_size > QUEUE)
        common->queue_size = QUEUE;
    common->descriptors = (u32)disk->descriptors;
    common->available = (u32)&disk->available;
    common->used = (u32)&disk->used;
    common->queue_enable = 1;
    disk->notify = (volatile u16 *)(notify + common->queue_notify_off * multiplier);
    common->status = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
}

static void request(struct disk *disk, u32 type, u32 number)
{
    disk->header.type = type;
    disk->header.sector = number * BLOCK_SECTORS;
    u32 addresses[] = { (u32)&disk->header, (u32)block, (u32)&disk->status };
    u32 bytes[] = { sizeof disk->header, sizeof block, 1 };
    u16 flags[] = { NEXT, NEXT | (type == READ ? WRITABLE : 0), WRITABLE };
    for (u32 i = 0; i < 3; i++) {
        disk->descriptors[i].address = addresses[i];
        disk->descriptors[i].bytes = bytes[i];
        disk->descriptors[i].flags = flags[i];
        disk->descriptors[i].next = i + 1;
    }
    disk->status = 255;
    disk->available.ring[disk->available.index % QUEUE] = 0;
    __asm__ volatile("" : : : "memory");
    disk->available.index++;
    *disk->notify = 0;
    while (disk->used.index != disk->available.index)
        looks++;
    __asm__ volatile("" : : : "memory");
    if (disk->status)
        wrong("request to block ", number);
}

static u32 next(void) { return random = random * 1664525 + 1013904223; }

void run(void)
{
    u32 count = 0;
    for (u32 device = 0; device < 32 && count < DISKS; device++)
        if ((configuration(device, 0) & 0xffff) == VIRTIO && (configuration(device, 2) & 0xffff) == DISK)
            open(&disks[count++], device);
    if (!count)
        wrong("disks: ", count);
    for (u32 step = 1;; step++) {
        for (u32 i = 0; i < count; i++) {
            struct disk *disk = &disks[i];
            u32 number = next() >> 24;
            request(disk, READ, number);
            if (disk->is_read_only) {
                sum += block[number];
                continue;
            }
            for (u32 word = 0; word < BLOCK_WORDS; word++)
                if (block[word] != (disk->versions[number] ? disk->versions[number] + word : 0))
                    wrong("block ", number);
            number = next() >> 24;
            disk->versions[number] = step * 4096 + i;
            for (u32 word = 0; word < BLOCK_WORDS; word++)
                block[word] = disk->versions[number] + word;
            request(disk, WRITE, number);
        }
        for (u32 i = 0; i < WORK; i++)
            sum += next();
        print("step ");
        print_number(step);
        print("\n");
    }
}

__attribute__((naked, used)) void _start(void) { __asm__("mov $stack + 16384, %esp\n jmp run"); }
