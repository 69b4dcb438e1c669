/*
 * A program that takes checkpoints of its heap, and looks for all that it wrote in what was saved.
 * It is linked with the library. Its first argument is a strategy; with a second one, the heap is
 * tracked by the second level of page tables.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "pagemark_malloc.h"

enum { OBJECTS = 5000, INTERVALS = 12, LARGEST = 20000 };

struct object {
	unsigned char *bytes;
	size_t length;
	/* What the checkpoints have of it, in memory that is not in the heap. */
	unsigned char *saved;
};

static struct object *objects[OBJECTS];

static uint64_t random_state = 1;

static uint64_t below(uint64_t bound)
{
	random_state ^= random_state << 13;
	random_state ^= random_state >> 7;
	random_state ^= random_state << 17;
	return random_state % bound;
}

static uintptr_t address(const struct object *object)
{
	return (uintptr_t)pagemark_heap_canonical(object->bytes);
}

static void replace(struct object *object)
{
	free(object->bytes);
	object->length = 1 + below(below(50) ? 600 : LARGEST);
	object->bytes = malloc(object->length);
	CHECK(object->bytes);
	for (size_t at = 0; at < object->length; at++)
		object->bytes[at] = (unsigned char)below(256);
}

static int by_address(const void *left, const void *right)
{
	uintptr_t a = address(*(struct object *const *)left), b = address(*(struct object *const *)right);

	return (a > b) - (a < b);
}

/* Copies what a range has to the objects in it, which ascend. */
static void apply(uintptr_t start, const unsigned char *bytes, size_t length)
{
	size_t first = 0, end = OBJECTS;

	while (first < end) {
		size_t middle = (first + end) / 2;

		if (address(objects[middle]) + objects[middle]->length <= start)
			first = middle + 1;
		else
			end = middle;
	}
	for (; first < OBJECTS && address(objects[first]) < start + length; first++) {
		uintptr_t object = address(objects[first]);
		uintptr_t from = object > start ? object : start;
		uintptr_t to = object + objects[first]->length;

		if (to > start + length)
			to = start + length;
		memcpy(objects[first]->saved + (from - object), bytes + (from - start), to - from);
	}
}

int main(int count, char **arguments)
{
	struct pagemark_heap_checkpoint taken;
	uint64_t all_bytes = 0, least_bytes = UINT64_MAX;
	FILE *file = tmpfile();
	size_t pool_bytes = (size_t)OBJECTS * LARGEST;
	unsigned char *pool = mmap(NULL, pool_bytes, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	int error;

	CHECK(count >= 2 && file && pool != MAP_FAILED);
	CHECK(pagemark_heap_checkpoint(-1, &taken) == EINVAL);
	CHECK(pagemark_heap_track("another") == EINVAL);
	error = count == 2 ? pagemark_heap_track(arguments[1]) : pagemark_heap_track_two_level(arguments[1]);
	if (error == ENOTSUP) {
		printf("not supported\n");
		return 0;
	}
	CHECK(error == 0);
	for (size_t each = 0; each < OBJECTS; each++) {
		objects[each] = calloc(1, sizeof(struct object));
		CHECK(objects[each]);
		objects[each]->saved = pool + each * LARGEST;
		replace(objects[each]);
		all_bytes += objects[each]->length;
	}
	for (int interval = 0; interval < INTERVALS; interval++) {
		for (int written = 0; written < 200; written++) {
			struct object *object = objects[below(OBJECTS)];

			if (below(4))
				object->bytes[below(object->length)] ^= 1 + (unsigned char)below(255);
			else
				replace(object);
		}
		CHECK(pagemark_heap_checkpoint(fileno(file), &taken) == 0);
		if (taken.bytes < least_bytes)
			least_bytes = taken.bytes;
	}
	CHECK(pagemark_heap_checkpoint(1 << 20, &taken) == EBADF);

	/* Objects that were replaced are looked for where they are now. */
	qsort(objects, OBJECTS, sizeof(objects[0]), by_address);
	rewind(file);
	for (uint64_t range[2]; fread(range, sizeof(range), 1, file) == 1;) {
		unsigned char *bytes = mmap(NULL, range[1], PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		CHECK(bytes != MAP_FAILED && fread(bytes, 1, range[1], file) == range[1]);
		apply(range[0], bytes, range[1]);
		munmap(bytes, range[1]);
	}
	for (size_t each = 0; each < OBJECTS; each++)
		CHECK(!memcmp(objects[each]->bytes, objects[each]->saved, objects[each]->length));
	CHECK(least_bytes < all_bytes);
	printf("all was saved\n");
	return 0;
}
