/*
 * A hypervisor for one guest, which counts what dirty logging and checkpoints cost a processor with VMX, EPT and
 * page-modification logging (PML, chapters 3 to 5): exits, faults, full logs, flushes, instructions. It is the ROM of
 * an emulated machine (Bochs), and writes a line per run to the first serial port.
 *
 * Each processor runs the guest's program, which writes to pages at random, and calls after each WRITES writes: a
 * step. In each step a copier, which stands for another processor, copies COPIED pages of the last checkpoint. The
 * calls belong to the lab, and are not counted. One in TICK steps also stands for an exit of the guest's own, as for a
 * timer, and is counted. Some ticks are an interval, which ends with what a checkpoint does while the machine is
 * stopped. Processors wait for each other after each step. As in the paper (4.2), the first checkpoint has all pages.
 * What is counted begins after the second interval, in which they are copied.
 *
 * Each write gives a word a value that it never had. So what was written, and what a checkpoint must hold, is known
 * without the mechanism that is counted, and is compared after each interval.
 *
 * Instructions are those that the hypervisor executes on behalf of the guest, by the emulated time-stamp counter, which
 * counts instructions: no instruction takes longer than another, and what an exit costs a real processor is missing.
 *
 * Defined by the compiler's command line: TICK, TICKS, WRITES, COPIED, BUFFER, RUNS, PROCESSORS, GUEST_DATA.
 */
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;

enum { PAGES = 32768, PAGE_BYTES = 4096, TABLE_ENTRIES = 512, LOG_ENTRIES = 512, WARM_UP = 2 };
/* Where the memory of the guest is. */
#define GUEST_MEMORY 0x4000000ul

/* Bits of an entry of the extended page tables. */
enum { READ = 1, WRITE = 2, EXECUTE = 4, WRITE_BACK = 6 << 3, DIRTY = 1 << 9 };

/* Reasons of exits. */
enum { CALL = 18, FAULT = 48, LOG_FULL = 62 };

/* How dirty pages are found, and whether checkpoints copy them, by incremental copy-on-write, while the guest runs. */
enum { NATIVE, LOG_PROTECT, LOG_PML, COPY_PROTECT, COPY_LATE, COPY_EARLY, COPY_BUFFERS, COPY_LAST, MODES };
static const char *const names[MODES] = {
	"native", "log-protect", "log-pml", "copy-protect", "copy-late", "copy-early", "copy-buffers", "copy-last"
};

/* The steps of an interval, and the intervals of a run. */
static const struct {
	u32 steps, intervals;
} runs[] = { RUNS };

struct registers {
	u64 rax, rcx, rdx, rbx, rsi, rdi;
};
long enter(struct registers *guest, long is_launched);
extern u8 exited[], guest_start[], guest_end[];

static u64 root[TABLE_ENTRIES] __attribute__((aligned(4096)));
static u64 directories[TABLE_ENTRIES] __attribute__((aligned(4096)));
static u64 directory[TABLE_ENTRIES] __attribute__((aligned(4096)));
/* The first table has the guest's program, the others its data. */
static u64 entries[TABLE_ENTRIES + PAGES] __attribute__((aligned(4096)));
static u64 *const data = entries + TABLE_ENTRIES;
static u64 logs[PROCESSORS][LOG_ENTRIES] __attribute__((aligned(4096)));
static u8 vmxon_regions[PROCESSORS][4096] __attribute__((aligned(4096)));
static u8 vmcss[PROCESSORS][4096] __attribute__((aligned(4096)));

/* The page was written to since the last checkpoint. */
static u8 dirty[PAGES] __attribute__((aligned(8)));
/* The page belongs to the last checkpoint, and is not copied yet. */
static u8 kept[PAGES] __attribute__((aligned(8)));
/* The page was copied, and is protected until the log takes over at the next checkpoint (late activation). */
static u8 protected[PAGES] __attribute__((aligned(8)));
/* The first word of each page at the last checkpoint. */
static u32 before[PAGES];
/* What the checkpoints hold of each page. */
static u32 image[PAGES];

/* Where a copied page is, before it would be stored. */
static u64 copied_page[PAGE_BYTES / 8];

/* The copier of a checkpoint: the next page, and the pages of its buffer, which the log does not have yet. */
static struct {
	u32 next, filled, pages[BUFFER];
} copier;

static struct {
	u64 exits, faults, full, logged, flushes, dirty, cow, concurrent, rest, handling, stopped, wrong;
} count;

/* The processors exclude each other while they handle exits, and wait for each other after each step. */
static u32 lock, arrived, generation;
/* What the processors remember of the tables must be removed after this step. */
static u32 must_flush;

/* None of eight pages, whose first one is given, has the mark. */
static u32 have_none(const u8 *marks, u32 page)
{
	u64 eight;
	__builtin_memcpy(&eight, marks + page, sizeof eight);
	return !eight;
}

static void acquire(void)
{
	while (__atomic_exchange_n(&lock, 1, __ATOMIC_ACQUIRE))
		__asm__ volatile("pause");
}

static void release(void) { __atomic_store_n(&lock, 0, __ATOMIC_RELEASE); }

/* Instructions until now. */
static u64 now(void)
{
	u32 low, high;
	__asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
	return (u64)high << 32 | low;
}

static inline void out(u16 port, u8 value) { __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port)); }

static inline u8 in(u16 port)
{
	u8 value;
	__asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
	return value;
}

/* Writes to the first serial port. */
static void print(const char *text)
{
	for (; *text; text++) {
		/* Until it takes another character. */
		while (!(in(0x3fd) & 0x20))
			;
		out(0x3f8, *text);
	}
}

static void print_number(u64 number)
{
	char digits[21], *at = digits + 20;
	*at = 0;
	do
		*--at = '0' + number % 10;
	while (number /= 10);
	print(at);
}

static void __attribute__((noreturn)) end(const char *text)
{
	print(text);
	print("\n");
	/* Until all characters are sent. */
	while (!(in(0x3fd) & 0x40))
		;
	for (const char *word = "Shutdown"; *word; word++)
		out(0x8900, *word);
	for (;;)
		__asm__ volatile("hlt");
}

static u64 msr(u32 number)
{
	u32 low, high;
	__asm__ volatile("rdmsr" : "=a"(low), "=d"(high) : "c"(number));
	return (u64)high << 32 | low;
}

static void set(u64 field, u64 value)
{
	u8 failed;
	__asm__ volatile("vmwrite %2, %1; setna %0" : "=qm"(failed) : "r"(field), "r"(value) : "cc");
	if (failed)
		end("error: the processor has no such field");
}

static u64 get(u64 field)
{
	u64 value;
	__asm__ volatile("vmread %1, %0" : "=r"(value) : "r"(field) : "cc");
	return value;
}

static u32 *guest_word(u32 page) { return (u32 *)(GUEST_MEMORY + GUEST_DATA + (u64)page * PAGE_BYTES); }

/* The controls that are wanted, and those that must be on. */
static u32 controls(u32 capability, u32 wanted)
{
	u64 allowed = msr(capability);
	if (wanted & ~(u32)(allowed >> 32))
		end("error: the processor lacks VMX, EPT or PML");
	return wanted | (u32)allowed;
}

/* Processors set bits of entries at the same time. */
static void add_bits(u64 *entry, u64 bits) { __atomic_fetch_or(entry, bits, __ATOMIC_RELAXED); }

static void remove_bits(u64 *entry, u64 bits) { __atomic_fetch_and(entry, ~bits, __ATOMIC_RELAXED); }

/* Removes what this processor remembers of the tables. (The emulated one forgets it at each entry, too.) */
static void flush(void)
{
	struct {
		u64 pointer, zero;
	} context = { get(0x201a), 0 };
	u64 single = 1;
	__asm__ volatile("invept %0, %1" : : "m"(context), "r"(single) : "cc", "memory");
}

/* Marks what the processor has logged as dirty. KVM does so at each exit. */
static void drain(u32 processor)
{
	enum { INDEX = 0x812 };
	const u64 *log = logs[processor];
	u16 next = get(INDEX);
	for (u32 entry = (u16)(next + 1); entry < LOG_ENTRIES; entry++) {
		u64 page = (log[entry] - GUEST_DATA) / PAGE_BYTES;
		if (log[entry] < GUEST_DATA || page >= PAGES)
			end("error: a page was logged that the guest does not have");
		dirty[page] = 1;
		protected[page] = 0;
		count.logged++;
	}
	set(INDEX, LOG_ENTRIES - 1);
}

/* Copies a page to what the checkpoint holds. Only its first word is ever written, so that is all that is kept. */
static void copy(u32 page)
{
	image[page] = *guest_word(page);
	kept[page] = 0;
}

/* As `copy`, and copies the whole page, for what it costs. */
static void copy_before_write(u32 page)
{
	const volatile u64 *from = (u64 *)guest_word(page);
	for (u32 i = 0; i < PAGE_BYTES / 8; i++)
		copied_page[i] = from[i];
	__asm__ volatile("" : : "m"(copied_page));
	copy(page);
}

/* The guest writes to a page that may not be written. */
static void fault(u32 mode, u64 address)
{
	u32 page = (address - GUEST_DATA) / PAGE_BYTES;
	if (address < GUEST_DATA || page >= PAGES)
		end("error: an access to what the guest does not have");
	/* What the processor remembered of the page was older than the tables, and is removed by the fault. */
	if (data[page] & WRITE)
		return;
	if (kept[page]) {
		copy_before_write(page);
		count.cow++;
	}
	dirty[page] = 1;
	protected[page] = 0;
	/* Dirty for the processor too, so that it does not log the page once more. */
	add_bits(&data[page], mode == NATIVE ? WRITE : WRITE | DIRTY);
}

/*
 * The buffer is full, or the copy is complete: the log is made to find the next write to each page of the buffer, and
 * what the processors remember is removed, as the paper's hypervisor does (4.5). With COPY_LAST the pages of a full
 * buffer stay protected, and only those of the last one are logged.
 */
static void activate(u32 mode, u32 is_last)
{
	if (!copier.filled)
		return;
	for (u32 i = 0; i < copier.filled; i++)
		if (mode == COPY_BUFFERS || is_last)
			add_bits(&data[copier.pages[i]], WRITE);
	copier.filled = 0;
	must_flush = 1;
	count.flushes++;
}

/* Copies up to `most` pages of the last checkpoint. Returns how many. */
static u64 copy_kept(u32 mode, u32 most)
{
	u64 copied = 0;
	if (copier.next == PAGES)
		return 0;
	for (; copier.next < PAGES && copied < most; copier.next++) {
		u32 page = copier.next;
		if (page % 8 == 0 && have_none(kept, page))
			copier.next += 7;
		if (!kept[page])
			continue;
		copy(page);
		copied++;
		if (mode == COPY_EARLY) {
			/* Its dirty bit is clear, so the next write to it is logged. More rights need no flush. */
			add_bits(&data[page], WRITE);
		} else if (mode > COPY_EARLY) {
			if (copier.filled == BUFFER)
				activate(mode, 0);
			copier.pages[copier.filled++] = page;
		} else if (mode == COPY_LATE) {
			protected[page] = 1;
		}
	}
	if (copier.next == PAGES)
		activate(mode, 1);
	return copied;
}

/* Compares what was found dirty, and the image of the last checkpoint, with what must be. */
static void check(u32 mode)
{
	u32 copies = mode >= COPY_PROTECT;
	for (u32 page = 0; page < PAGES; page++) {
		if (dirty[page] != (*guest_word(page) != before[page]))
			count.wrong++;
		if (copies && image[page] != before[page])
			count.wrong++;
		before[page] = *guest_word(page);
	}
}

/* What is done while the guest is stopped: what is dirty belongs to the checkpoint, and nothing is dirty any longer. */
static void checkpoint(u32 mode)
{
	u64 begin = now();
	count.rest += copy_kept(mode, PAGES);
	count.stopped += now() - begin;
	check(mode);
	begin = now();
	for (u32 page = 0; page < PAGES; page++) {
		if (page % 8 == 0 && have_none(dirty, page) && have_none(protected, page)) {
			page += 7;
			continue;
		}
		if (mode == COPY_LATE && protected[page])
			add_bits(&data[page], WRITE);
		protected[page] = 0;
		if (!dirty[page])
			continue;
		count.dirty++;
		dirty[page] = 0;
		remove_bits(&data[page], mode == LOG_PML ? DIRTY : DIRTY | WRITE);
		kept[page] = mode >= COPY_PROTECT;
	}
	copier.next = 0;
	must_flush = 1;
	count.flushes++;
	count.stopped += now() - begin;
}

/* What is done when each processor has made a step. */
static void step(u32 mode, u32 steps, u32 interval)
{
	if (mode >= COPY_PROTECT)
		count.concurrent += copy_kept(mode, COPIED);
	if (steps % interval)
		return;
	if (mode != NATIVE)
		checkpoint(mode);
	if (steps == WARM_UP * interval) {
		u64 wrong = count.wrong;
		for (u32 i = 0; i < sizeof count / 8; i++)
			((u64 *)&count)[i] = 0;
		count.wrong = wrong;
	}
}

/* Waits until each processor has made a step. */
static void meet(u32 mode, u32 steps, u32 interval)
{
	u32 last = __atomic_load_n(&generation, __ATOMIC_ACQUIRE);
	acquire();
	if (++arrived == PROCESSORS) {
		arrived = must_flush = 0;
		if (steps)
			step(mode, steps, interval);
		__atomic_store_n(&generation, last + 1, __ATOMIC_RELEASE);
	}
	release();
	while (__atomic_load_n(&generation, __ATOMIC_ACQUIRE) == last)
		__asm__ volatile("pause");
	if (must_flush)
		flush();
}

/* The memory as it is before the guest's first instruction. */
static void begin(u32 mode, u32 pml)
{
	for (u32 i = 0; i < sizeof count / 8; i++)
		((u64 *)&count)[i] = 0;
	root[0] = (u64)directories | READ | WRITE | EXECUTE;
	directories[0] = (u64)directory | READ | WRITE | EXECUTE;
	for (u32 i = 0; i < (TABLE_ENTRIES + PAGES) / TABLE_ENTRIES; i++)
		directory[i] = (u64)(entries + i * TABLE_ENTRIES) | READ | WRITE | EXECUTE;
	for (u32 i = 0; i < TABLE_ENTRIES + PAGES; i++)
		entries[i] = (GUEST_MEMORY + (u64)i * PAGE_BYTES) | READ | WRITE_BACK | EXECUTE;
	for (u32 page = 0; page < PAGES; page++) {
		dirty[page] = mode >= COPY_PROTECT;
		kept[page] = protected[page] = *guest_word(page) = 0;
		/* What is dirty must differ from what was before. */
		before[page] = image[page] = dirty[page] ? ~0u : 0;
		/* Nothing is logged natively, nor what is dirty; protection begins with all pages, the log with none. */
		if (mode == NATIVE || dirty[page])
			add_bits(&data[page], WRITE | DIRTY);
		else if (pml)
			add_bits(&data[page], WRITE);
	}
	for (u8 *from = guest_start, *to = (u8 *)GUEST_MEMORY; from < guest_end;)
		*to++ = *from++;
	copier.next = PAGES;
	copier.filled = 0;
}

/* This processor as it is before the guest's first instruction. */
static void begin_processor(u32 processor, u32 pml)
{
	u8 *vmcs = vmcss[processor], failed;
	u64 region = (u64)vmcs;

	*(u32 *)vmcs = msr(0x480);
	__asm__ volatile("vmclear %1; setna %0" : "=qm"(failed) : "m"(region) : "cc", "memory");
	if (!failed)
		__asm__ volatile("vmptrld %1; setna %0" : "=qm"(failed) : "m"(region) : "cc", "memory");
	if (failed)
		end("error: VMX does not take the VMCS");
	/* Controls. */
	set(0x4000, controls(0x48d, 0));
	set(0x4002, controls(0x48e, 1u << 31));
	/* EPT, an unrestricted guest, PML. */
	set(0x401e, controls(0x48b, 1u << 1 | 1u << 7 | (pml ? 1u << 17 : 0)));
	set(0x400c, controls(0x48f, 1u << 9));
	set(0x4012, controls(0x490, 0));
	set(0x4004, 0);
	/* Tables of four levels, write-back, with dirty bits. */
	set(0x201a, (u64)root | 6 | 3 << 3 | 1 << 6);
	if (pml) {
		set(0x200e, (u64)logs[processor]);
		set(0x812, LOG_ENTRIES - 1);
	}
	/* The guest, in 32-bit mode without paging. */
	set(0x2800, ~0ul);
	set(0x802, 0);
	for (u32 i = 0; i < 6; i++) {
		set(0x800 + 2 * i, i == 1 ? 8 : 16);
		set(0x4800 + 2 * i, 0xffffffff);
		set(0x4814 + 2 * i, i == 1 ? 0xc09b : 0xc093);
		set(0x6806 + 2 * i, 0);
	}
	set(0x80c, 0), set(0x480c, 0), set(0x4820, 0x10000), set(0x6812, 0);
	set(0x80e, 32), set(0x480e, 0x67), set(0x4822, 0x8b), set(0x6814, 0);
	set(0x4810, 0), set(0x6816, 0), set(0x4812, 0), set(0x6818, 0);
	set(0x6800, 0x31), set(0x6802, 0), set(0x6804, 0x2000), set(0x681a, 0x400);
	set(0x681c, 0), set(0x681e, 0), set(0x6820, 2), set(0x6822, 0);
	set(0x6824, 0), set(0x6826, 0);
	set(0x4824, 0), set(0x4826, 0), set(0x482a, 0);
	set(0x6000, 0), set(0x6002, 0), set(0x6004, 0x31), set(0x6006, 0x2000);
	/* The host. */
	u64 cr0, cr3, cr4;
	__asm__("mov %%cr0, %0; mov %%cr3, %1; mov %%cr4, %2" : "=r"(cr0), "=r"(cr3), "=r"(cr4));
	set(0x6c00, cr0), set(0x6c02, cr3), set(0x6c04, cr4);
	set(0xc00, 16), set(0xc02, 24), set(0xc04, 16), set(0xc06, 16), set(0xc08, 16), set(0xc0a, 16), set(0xc0c, 32);
	set(0x6c06, 0), set(0x6c08, 0), set(0x6c0a, 0), set(0x6c0c, 0), set(0x6c0e, 0), set(0x6c10, 0), set(0x6c12, 0);
	set(0x4c00, 0), set(0x6c16, (u64)exited);
	flush();
}

static void run_one(u32 processor, u32 mode, u32 interval, u32 intervals)
{
	struct registers guest = { .rsi = 12345 + 6789 * processor, .rdi = (u64)processor << 29, .rbx = WRITES };
	u32 steps = 0, pml = mode == LOG_PML || mode >= COPY_LATE;
	if (!processor)
		begin(mode, pml);
	meet(mode, 0, 1);
	begin_processor(processor, pml);
	for (long is_launched = 0; steps < interval * (WARM_UP + intervals); is_launched = 1) {
		if (enter(&guest, is_launched)) {
			print_number(get(0x4400));
			end(" error: the guest does not start");
		}
		acquire();
		u64 begin = now();
		u32 reason = get(0x4402), is_call = reason == CALL;
		if (is_call) {
			set(0x681e, get(0x681e) + get(0x440c));
			steps++;
		}
		/* Other calls belong to the lab. */
		if (!is_call || steps % TICK == 0) {
			count.exits++;
			if (pml)
				drain(processor);
			if (reason == FAULT) {
				count.faults++;
				fault(mode, get(0x2400));
			} else if (reason == LOG_FULL) {
				count.full++;
			} else if (!is_call) {
				print_number(reason);
				end(" error: an exit that nobody expects");
			}
			count.handling += now() - begin;
		}
		release();
		if (is_call)
			meet(mode, steps, interval);
	}
	meet(mode, 0, 1);
	if (processor)
		return;
	print(names[mode]);
	const u64 *numbers = (u64 *)&count;
	print(" ");
	print_number(interval);
	print(" ");
	print_number(intervals);
	for (u32 i = 0; i < sizeof count / 8; i++) {
		print(" ");
		print_number(numbers[i]);
	}
	print("\n");
}

/* Starts the other processors: in 16-bit mode at OTHERS of start.S. */
static void start_others(void)
{
	volatile u32 *commands = (u32 *)0xfee00300ul;
	enum { INIT_ALL_OTHERS = 0xc4500, START_ALL_OTHERS = 0xc4608 };
	*commands = INIT_ALL_OTHERS;
	*commands = START_ALL_OTHERS;
}

void run(u32 processor)
{
	u8 *region = vmxon_regions[processor], failed;
	u64 address = (u64)region;
	if (!processor) {
		/* Characters of eight bits. */
		out(0x3fb, 3);
		if (PROCESSORS > 1)
			start_others();
	}
	if (!(msr(0x3a) & 1))
		__asm__ volatile("wrmsr" : : "c"(0x3a), "a"(5), "d"(0));
	*(u32 *)region = msr(0x480);
	__asm__ volatile("vmxon %1; setna %0" : "=qm"(failed) : "m"(address) : "cc", "memory");
	if (failed)
		end("error: the processor does not enter VMX");
	run_one(processor, NATIVE, TICK, TICKS);
	for (u32 i = 0; i < sizeof runs / sizeof *runs; i++)
		for (u32 mode = NATIVE + 1; mode < MODES; mode++)
			run_one(processor, mode, runs[i].steps, runs[i].intervals);
	if (!processor)
		end("end");
}
