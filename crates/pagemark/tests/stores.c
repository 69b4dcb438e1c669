/* Stores of all kinds that compilers emit, to memory that the caller gives. Compiled at each level of optimization, and run
 * on plain memory and on tracked memory, which must hold the same afterwards. */
#include <stdint.h>
#include <string.h>
#include <stdatomic.h>

struct mixed {
	uint8_t byte;
	uint16_t half;
	uint32_t word;
	uint64_t number;
	float single;
	double real;
	uint32_t bits : 5;
	uint32_t more : 11;
	char text[24];
};

static uint64_t step(uint64_t *seed)
{
	*seed ^= *seed << 13;
	*seed ^= *seed >> 7;
	*seed ^= *seed << 17;
	return *seed;
}

void stores_integers(uint8_t *memory, size_t bytes, uint64_t seed)
{
	size_t count = bytes / sizeof(struct mixed);
	struct mixed *items = (struct mixed *)memory;
	for (int round = 0; round < 400; round++) {
		struct mixed *item = &items[step(&seed) % count];
		item->byte += (uint8_t)seed;
		item->half ^= (uint16_t)seed;
		item->word -= (uint32_t)seed;
		item->number |= seed;
		item->number = (item->number << 7) | (item->number >> 57);
		item->bits = (uint32_t)seed;
		item->more += 3;
		item->word = ~item->word;
		item->half++;
		item->byte = seed > item->number;
		item->number *= 3;
		item->text[seed % 24] = 'x';
	}
}

void stores_reals(uint8_t *memory, size_t bytes, uint64_t seed)
{
	size_t count = bytes / sizeof(struct mixed);
	struct mixed *items = (struct mixed *)memory;
	for (int round = 0; round < 200; round++) {
		struct mixed *item = &items[step(&seed) % count];
		item->single = (float)(seed % 1000) / 7;
		item->real = (double)(seed % 1000) / 3 + item->single;
		item->single += 1;
	}
}

void stores_vectors(uint8_t *memory, size_t bytes, uint64_t seed)
{
	float *reals = (float *)memory;
	uint16_t *halves = (uint16_t *)(memory + bytes / 2);
	size_t from = step(&seed) % 64, to = bytes / 64 - step(&seed) % 64;
	for (size_t index = from; index < to; index++)
		reals[index] = (float)(index * 3 + seed % 100);
	for (size_t index = from; index < to; index++)
		halves[index] += (uint16_t)(index ^ seed);
	for (size_t index = from; index < to; index++)
		if (halves[index] & 1)
			halves[index] = (uint16_t)seed;
	for (size_t index = from; index < to; index += 3)
		reals[index] *= 2;
}

void stores_blocks(uint8_t *memory, size_t bytes, uint64_t seed)
{
	for (int round = 0; round < 60; round++) {
		size_t length = step(&seed) % 3000, from = step(&seed) % (bytes - 3000), to = step(&seed) % (bytes - 3000);
		memset(memory + from, (int)seed, length);
		memmove(memory + to, memory + from, length);
		memcpy(memory + to % 500, &seed, sizeof seed);
		__builtin_memset(memory + from, 1, 48);
		((struct mixed *)(memory + to / 64 * 64))[0] = (struct mixed){ .number = seed, .real = 1.5 };
	}
}

void stores_atomics(uint8_t *memory, size_t bytes, uint64_t seed)
{
	_Atomic uint64_t *numbers = (_Atomic uint64_t *)memory;
	_Atomic uint8_t *small = (_Atomic uint8_t *)memory;
	for (int round = 0; round < 200; round++) {
		size_t index = step(&seed) % (bytes / 8);
		uint64_t expected = atomic_load(&numbers[index]);
		atomic_fetch_add(&numbers[index], 3);
		atomic_fetch_sub_explicit(&numbers[index], seed & 7, memory_order_relaxed);
		atomic_fetch_or(&numbers[index], 16);
		atomic_fetch_xor(&numbers[index], atomic_exchange(&numbers[(index + 9) % (bytes / 8)], seed));
		atomic_compare_exchange_strong(&numbers[index], &expected, 5);
		atomic_compare_exchange_strong(&numbers[index], &expected, 6);
		atomic_store(&small[seed % bytes], (uint8_t)round);
		atomic_fetch_add(&small[seed % bytes], 1);
	}
}

/* rep stos and rep movs as such, in each unit. */
void stores_strings(uint8_t *memory, size_t bytes, uint64_t seed)
{
	for (int round = 0; round < 40; round++) {
		void *to = memory + step(&seed) % (bytes / 2 - 9000);
		void *from = memory + bytes / 2 + step(&seed) % (bytes / 2 - 9000);
		size_t count = seed % 1000;
		__asm__ volatile("rep stosb" : "+D"(to), "+c"(count) : "a"(seed) : "memory");
		count = seed % 500;
		__asm__ volatile("rep stosq" : "+D"(to), "+c"(count) : "a"(seed) : "memory");
		__asm__ volatile("stosw" : "+D"(to) : "a"(seed) : "memory");
		count = seed % 400;
		__asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(count) : : "memory");
		count = seed % 300;
		__asm__ volatile("rep movsq" : "+D"(to), "+S"(from), "+c"(count) : : "memory");
		__asm__ volatile("movsl" : "+D"(to), "+S"(from) : : "memory");
		/* Onto itself, ahead: repeats a pattern. */
		from = (uint8_t *)to - 3;
		count = 50;
		__asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(count) : : "memory");
	}
}

/* What is not emulated: it opens pages. */
void stores_x87(uint8_t *memory, size_t bytes, uint64_t seed)
{
	for (int round = 0; round < 20; round++) {
		long double value = (long double)step(&seed) / 3;
		memcpy(memory + seed % (bytes - 16), &value, 10);
		__asm__ volatile("fldt %1\n\tfstpt %0" : "=m"(*(long double *)(memory + seed % (bytes / 16 - 1) * 16)) : "m"(value));
	}
}
