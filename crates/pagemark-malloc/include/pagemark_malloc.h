/* SPDX-License-Identifier: MIT OR Apache-2.0 */
/*
 * The heap of libpagemark_malloc.so, for the program that uses it.
 *
 * The library replaces malloc and its relatives. A program has it by `-lpagemark_malloc`, or is
 * preloaded with it and finds the functions with dlsym(RTLD_DEFAULT, ...). The environment
 * variables PAGEMARK_HEAP_PARTS (1, 2, 4 or 8) and PAGEMARK_HEAP_GIB choose the number of parts
 * of a page and the capacity.
 *
 *     struct pagemark_heap_checkpoint taken;
 *     int error = pagemark_heap_track("by-cost");
 *     ...
 *     error = pagemark_heap_checkpoint(file, &taken);
 */
#ifndef PAGEMARK_MALLOC_H
#define PAGEMARK_MALLOC_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What was written in an interval, and what a checkpoint of it has cost. */
struct pagemark_heap_checkpoint {
	/* Armed parts of pages that were written. */
	uint64_t faults;
	/* Parts that are no longer armed. */
	uint64_t merges;
	/* Parts that are armed again. */
	uint64_t splits;
	/* Bytes that were reported as written, and in how many ranges. */
	uint64_t bytes;
	uint64_t ranges;
	/* Time of finding and of saving them, nanoseconds. */
	uint64_t collect_ns;
	uint64_t save_ns;
};

/*
 * Starts to track the heap. The strategy is "separate" (all parts stay separate), "by-history"
 * (parts that are written together are merged) or "by-cost" (parts whose faults cost more than
 * saving them in vain are not armed).
 *
 * Returns 0, EINVAL for another strategy, ENOMEM if there is no heap, or ENOTSUP if the kernel
 * cannot track it (Linux 6.7 or later can).
 */
int pagemark_heap_track(const char *strategy);

/*
 * As pagemark_heap_track, by the second level of page tables, in a program that `pagemark-kvm`
 * runs. ENOTSUP elsewhere, and in a machine that keeps rings.
 */
int pagemark_heap_track_two_level(const char *strategy);

/*
 * Finds what was written to the heap since the last call, or since tracking began: all of it, the
 * first time. If `file` is not -1, appends it there and waits until it is on disk: for each range
 * its address and its length, 8 bytes each, and its bytes. No other thread should write objects
 * meanwhile.
 *
 * Returns 0, EINVAL if nothing is tracked, EIO if the kernel did not report what was written, or
 * the error of the write.
 */
int pagemark_heap_checkpoint(int file, struct pagemark_heap_checkpoint *taken);

/*
 * Returns the address by which a checkpoint has the byte at `address`. Each page of the heap is
 * mapped several times, and an object has its address in one of these mappings.
 */
const void *pagemark_heap_canonical(const void *address);

#ifdef __cplusplus
}
#endif

#endif
