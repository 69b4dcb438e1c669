/*
 * Pagemark: regions of a program's own memory, with transactions and snapshots.
 *
 * Made from the Rust sources by `make header`; changes belong there.
 *
 * Every function that can fail returns a pagemark_status; PAGEMARK_STATUS_OK is 0. What went wrong, and what to do about it,
 * is then said by pagemark_last_error() on the same thread. After an error a region holds what it held before.
 *
 * Pointers may be null only where that is said; otherwise the answer is PAGEMARK_STATUS_NULL_POINTER. A handle is freed
 * once, by the function named after its type, and not used afterwards; freeing null does nothing. Where a function that makes
 * a handle fails, it stores null. Handles may be used by several threads at once, and freed by any thread when no other one
 * uses them. A region must outlive what pagemark_region_make_writable() made of it; snapshots and stores need no order.
 *
 * Offsets and ranges are in bytes from the start of the region.
 */

#ifndef PAGEMARK_H
#define PAGEMARK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * How a call went.
 */
typedef enum {
    /**
     * As asked.
     */
    PAGEMARK_STATUS_OK = 0,
    /**
     * A pointer that is needed is null.
     */
    PAGEMARK_STATUS_NULL_POINTER,
    /**
     * An argument that can't be: a mechanism of that name, a chunk of that size, a range that ends before it starts.
     */
    PAGEMARK_STATUS_INVALID_ARGUMENT,
    /**
     * Commit or rollback without begin.
     */
    PAGEMARK_STATUS_NO_TRANSACTION,
    /**
     * Begin in a transaction.
     */
    PAGEMARK_STATUS_TRANSACTION_OPEN,
    /**
     * The region was made without rollback.
     */
    PAGEMARK_STATUS_NO_ROLLBACK,
    /**
     * Memory to adopt that is not made of whole pages.
     */
    PAGEMARK_STATUS_UNALIGNED,
    /**
     * Memory to adopt that belongs to a region already.
     */
    PAGEMARK_STATUS_OVERLAPS,
    /**
     * Not everything is mapped.
     */
    PAGEMARK_STATUS_NOT_MAPPED,
    /**
     * Memory to adopt that is not readable, writable and not executable.
     */
    PAGEMARK_STATUS_NOT_DATA,
    /**
     * Offsets beyond the end.
     */
    PAGEMARK_STATUS_OUT_OF_RANGE,
    /**
     * The process was forked from the one that made the region.
     */
    PAGEMARK_STATUS_FORKED_CHILD,
    /**
     * The snapshot is one of another region.
     */
    PAGEMARK_STATUS_WRONG_REGION,
    /**
     * The snapshots are held by different stores.
     */
    PAGEMARK_STATUS_WRONG_STORE,
    /**
     * The snapshots are of different lengths.
     */
    PAGEMARK_STATUS_LENGTH_DIFFERS,
    /**
     * The store's budget can't be kept.
     */
    PAGEMARK_STATUS_BUDGET_EXCEEDED,
    /**
     * The store has no numbers left for more.
     */
    PAGEMARK_STATUS_STORE_FULL,
    /**
     * The mechanism does not work here.
     */
    PAGEMARK_STATUS_UNAVAILABLE,
    /**
     * The kernel gives no memory.
     */
    PAGEMARK_STATUS_NO_MEMORY,
    /**
     * A system call failed.
     */
    PAGEMARK_STATUS_SYSTEM,
    /**
     * A defect of Pagemark. The region and its handles should not be used any more.
     */
    PAGEMARK_STATUS_INTERNAL,
} pagemark_status;

/**
 * A piece of this process's memory whose writes are tracked.
 */
typedef struct pagemark_region pagemark_region;

/**
 * What a region held at one time.
 */
typedef struct pagemark_snapshot pagemark_snapshot;

/**
 * Holds snapshots of any number of regions: each chunk of content once, whichever snapshots hold it, and zeros not at all.
 */
typedef struct pagemark_store pagemark_store;

/**
 * Lets system calls write to a part of a region as long as it exists.
 */
typedef struct pagemark_writable pagemark_writable;

/**
 * Offsets from `start` up to, not including, `end`.
 */
typedef struct {
    /**
     * The first.
     */
    uint64_t start;
    /**
     * Behind the last.
     */
    uint64_t end;
} pagemark_range;

/**
 * Disjoint ranges in ascending order. To be freed by pagemark_ranges_free().
 */
typedef struct {
    /**
     * The ranges; null if there are none.
     */
    pagemark_range *items;
    /**
     * How many.
     */
    size_t count;
} pagemark_ranges;

/**
 * How a region is tracked. All zeros is the default.
 */
typedef struct {
    /**
     * The name of a mechanism, as in "pagemap-scan"; null or "auto" for the one that serves best. One that does not work
     * here is an error, never replaced by another one.
     *
     * Under `mprotect` and `emulate` writes arrive as SIGSEGV. Everything else goes on to the handler that was there before
     * the first region; a handler that comes later must call the one that it replaces for what is not its own.
     */
    const char *mechanism;
    /**
     * No transaction will be rolled back. Then no copy of the region is kept, and a transaction begins where the last one
     * ended.
     */
    bool without_rollback;
    /**
     * Where snapshots are held; null for a store of the region's own. It may be freed while the region exists.
     */
    const pagemark_store *store;
} pagemark_options;

/**
 * How a store holds snapshots. All zeros is the default.
 */
typedef struct {
    /**
     * Bytes of a chunk, a power of two from 256 to 65536; 0 for a page. Smaller chunks share more and cost more: some 40 bytes
     * a chunk.
     */
    size_t chunk_bytes;
    /**
     * Most bytes that may be held; 0 for no budget. Where that is not enough, chunks are compressed, or held as a
     * difference.
     */
    uint64_t budget_bytes;
} pagemark_store_options;

/**
 * What a store holds.
 */
typedef struct {
    /**
     * Different chunks, without that of zeros.
     */
    uint64_t chunks;
    /**
     * Those of them that are compressed.
     */
    uint64_t compressed_chunks;
    /**
     * Those of them that are held as the difference from another one.
     */
    uint64_t delta_chunks;
    /**
     * Bytes of memory that the content takes.
     */
    uint64_t content_bytes;
    /**
     * Bytes of memory that everything else takes.
     */
    uint64_t overhead_bytes;
    /**
     * What the budget limits.
     */
    uint64_t held_bytes;
} pagemark_usage;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The library's version, such as "0.1.0".
 */
const char *pagemark_version(void);

/**
 * Frees the ranges, and leaves none.
 */
void pagemark_ranges_free(pagemark_ranges *ranges);

/**
 * Maps a region of `bytes`, rounded up to whole pages. It holds zeros, and takes memory only as it is written. `options` may be
 * null.
 */
pagemark_status pagemark_region_new(size_t bytes,
                                    const pagemark_options *options,
                                    pagemark_region **region);

/**
 * Makes memory that is there already a region: whole pages, readable and writable and not executable, that belong to no
 * other region. While the region exists, the memory must stay mapped, and nobody else may change its mapping or protection.
 * `options` may be null.
 *
 * When the region is freed the memory is as it was before, except that `emulate` turns private memory into shared anonymous
 * memory that children made by fork do not have.
 */
pagemark_status pagemark_region_adopt(void *start,
                                      size_t bytes,
                                      const pagemark_options *options,
                                      pagemark_region **region);

/**
 * Frees a region: memory that Pagemark mapped is unmapped, and adopted memory is no longer tracked. An open transaction ends
 * without a rollback. Snapshots of the region stay readable.
 */
void pagemark_region_free(pagemark_region *region);

/**
 * Where the region begins. The program reads and writes there as it likes, from any thread, in a transaction or not. Null
 * if `region` is.
 */
void *pagemark_region_data(const pagemark_region *region);

/**
 * How long the region is; 0 if it is null.
 */
size_t pagemark_region_bytes(const pagemark_region *region);

/**
 * The name of the mechanism that finds what is written, for as long as the region exists; null if the region is.
 */
const char *pagemark_region_mechanism(const pagemark_region *region);

/**
 * Smallest unit in which a write is reported, bytes; 0 if the region is null.
 */
uint64_t pagemark_region_granularity_bytes(const pagemark_region *region);

/**
 * True between begin and commit or rollback; false if the region is null.
 */
bool pagemark_region_in_transaction(const pagemark_region *region);

/**
 * Begins a transaction. Transactions do not nest.
 */
pagemark_status pagemark_region_begin(const pagemark_region *region);

/**
 * Ends the transaction and stores what was written in it, and more where the mechanism can't tell. `written` may be
 * null. After an error the transaction, if there is one, is still open.
 */
pagemark_status pagemark_region_commit(const pagemark_region *region,
                                       pagemark_ranges *written);

/**
 * Ends the transaction, puts back what the region held when it began, and stores where that was. `put_back` may be null. After an
 * error the transaction, if there is one, is still open.
 */
pagemark_status pagemark_region_rollback(const pagemark_region *region,
                                         pagemark_ranges *put_back);

/**
 * Copies `bytes` bytes of the region from `offset` on. `to` must lie outside of the region; it may be null if `bytes` is 0.
 * Unlike an access through pagemark_region_data(), it may race with others' writes, and is an error where the region was
 * unmapped.
 */
pagemark_status pagemark_region_read(const pagemark_region *region,
                                     size_t offset,
                                     void *to,
                                     size_t bytes);

/**
 * Copies `bytes` bytes into the region, from `offset` on. `from` must lie outside of the region; it may be null if `bytes` is
 * 0. See pagemark_region_read().
 */
pagemark_status pagemark_region_write(const pagemark_region *region,
                                      size_t offset,
                                      const void *from,
                                      size_t bytes);

/**
 * Reads from a file, a pipe or a socket into the region, once, as read(2) does, and stores how many bytes were read; 0 is the
 * end. Under `mprotect` and `emulate` a plain read(2) into a region fails with EFAULT, and this does not.
 */
pagemark_status pagemark_region_read_from(const pagemark_region *region,
                                          int file,
                                          size_t offset,
                                          size_t bytes,
                                          size_t *read);

/**
 * Lets system calls write to a part of the region until pagemark_writable_free(), for those that
 * pagemark_region_read_from() does not make. The pages there count as written meanwhile.
 */
pagemark_status pagemark_region_make_writable(const pagemark_region *region,
                                              size_t offset,
                                              size_t bytes,
                                              pagemark_writable **writable);

/**
 * Ends what pagemark_region_make_writable() began.
 */
void pagemark_writable_free(pagemark_writable *writable);

/**
 * Frees the memory behind the whole pages in a part of the region: they hold zeros afterwards, which counts as a write.
 */
pagemark_status pagemark_region_discard(const pagemark_region *region,
                                        size_t offset,
                                        size_t bytes);

/**
 * Takes a snapshot. It costs what was written since the last one was taken or restored.
 */
pagemark_status pagemark_region_snapshot(const pagemark_region *region,
                                         pagemark_snapshot **snapshot);

/**
 * Takes a snapshot in which the `count` ranges at `forget`, in any order, need not be saved: memory that is free, or stack
 * that is not in use. It holds zeros there. `forget` may be null if `count` is 0.
 */
pagemark_status pagemark_region_snapshot_without(const pagemark_region *region,
                                                 const pagemark_range *forget,
                                                 size_t count,
                                                 pagemark_snapshot **snapshot);

/**
 * Makes the region hold what the snapshot holds, in place, and stores what was written for that: only what differed.
 * `written` may be null. In a transaction, it counts as written in it.
 */
pagemark_status pagemark_region_restore(const pagemark_region *region,
                                        const pagemark_snapshot *snapshot,
                                        pagemark_ranges *written);

/**
 * Frees a snapshot. What no other snapshot holds is given back.
 */
void pagemark_snapshot_free(pagemark_snapshot *snapshot);

/**
 * How long the region is that it was taken of; 0 if it is null.
 */
uint64_t pagemark_snapshot_bytes(const pagemark_snapshot *snapshot);

/**
 * Reads bytes as they were, without restoring anything. `to` must lie outside of every region that is tracked, or not be
 * written by anybody else meanwhile; it may be null if `bytes` is 0.
 */
pagemark_status pagemark_snapshot_read(const pagemark_snapshot *snapshot,
                                       uint64_t offset,
                                       void *to,
                                       size_t bytes);

/**
 * True if both hold the same bytes, whichever regions they are of. It costs nothing, whatever their size: equal content of one
 * store is held once. Snapshots of different stores are never equal, nor is null to anything.
 */
bool pagemark_snapshot_equal(const pagemark_snapshot *a,
                             const pagemark_snapshot *b);

/**
 * Stores where two snapshots of one store differ, by the chunk. It costs what differs.
 */
pagemark_status pagemark_snapshot_diff(const pagemark_snapshot *a,
                                       const pagemark_snapshot *b,
                                       pagemark_ranges *differing);

/**
 * What went wrong in the last call on this thread that failed, and what to do about it; an empty string if none did. It
 * stays until another call on this thread fails or the thread ends.
 */
const char *pagemark_last_error(void);

/**
 * Makes an empty store. `options` may be null.
 */
pagemark_status pagemark_store_new(const pagemark_store_options *options, pagemark_store **store);

/**
 * Frees a store. Regions and snapshots that use it go on doing so.
 */
void pagemark_store_free(pagemark_store *store);

/**
 * Stores what a store holds, and what that takes.
 */
pagemark_status pagemark_store_usage(const pagemark_store *store, pagemark_usage *usage);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PAGEMARK_H */
