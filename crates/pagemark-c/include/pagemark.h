/*
 * Pagemark: regions of a program's own memory, with transactions and snapshots, and heaps that
 * survive their program.
 *
 * Made from the Rust sources by `make header`; changes belong there.
 *
 * Every function that can fail returns a pagemark_status; PAGEMARK_STATUS_OK is 0. After an error,
 * pagemark_last_error() on the same thread returns what went wrong and what to do about it, and a
 * region holds what it held before.
 *
 * Pointers may be null only where the documentation allows it; otherwise the status is
 * PAGEMARK_STATUS_NULL_POINTER. A handle is freed once, by the function named after its type, and
 * not used afterwards; freeing null does nothing. A function that makes a handle and fails stores
 * null. Several threads may use a handle at once, and any thread may free it when no other thread
 * uses it. A region must outlive what pagemark_region_make_writable() made of it; snapshots and
 * stores may be freed in any order. A thread that is cancelled (pthread_cancel) in a call ends the
 * call first.
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
     * An argument that can't be: a mechanism of that name, a chunk of that size, a range that ends
     * before it starts.
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
     * The region was made without rollback, or the changes have no old content.
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
     * A mapping to adopt that is longer than its file.
     */
    PAGEMARK_STATUS_BEYOND_FILE,
    /**
     * Shared memory to adopt, without the promise of its sole use.
     */
    PAGEMARK_STATUS_SHARED,
    /**
     * The memory of a region was mapped anew, or its protection was changed.
     */
    PAGEMARK_STATUS_REMAPPED,
    /**
     * Offsets beyond the end, or an address outside of the heap.
     */
    PAGEMARK_STATUS_OUT_OF_RANGE,
    /**
     * The process was forked from the one that made the region, or that has the heap.
     */
    PAGEMARK_STATUS_FORKED_CHILD,
    /**
     * The snapshot belongs to another region.
     */
    PAGEMARK_STATUS_WRONG_REGION,
    /**
     * The snapshots are held by different stores.
     */
    PAGEMARK_STATUS_WRONG_STORE,
    /**
     * Two things are of different lengths: snapshots, regions, changes.
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
     * The job has no checkpoint of a region, or of a heap.
     */
    PAGEMARK_STATUS_NEVER_SAVED,
    /**
     * A new heap for a job that has checkpoints already.
     */
    PAGEMARK_STATUS_EXISTS,
    /**
     * The saved heap was made with another version, another number of parts, or by another version
     * of the allocator.
     */
    PAGEMARK_STATUS_OTHER_HEAP,
    /**
     * Something else is mapped where the saved heap has to be.
     */
    PAGEMARK_STATUS_ADDRESS_TAKEN,
    /**
     * Another program has saved to the job since the heap was opened.
     */
    PAGEMARK_STATUS_SAVED_ELSEWHERE,
    /**
     * Bytes to decode that are cut or damaged, or that a later version of Pagemark has encoded; a
     * saved heap whose tables the program has overwritten.
     */
    PAGEMARK_STATUS_DAMAGED,
    /**
     * The repository could not be read or written.
     */
    PAGEMARK_STATUS_REPOSITORY,
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
 * The content of the written ranges after a transaction, and before it if it is known.
 */
typedef struct pagemark_changes pagemark_changes;

/**
 * A piece of this process's memory whose writes are tracked.
 */
typedef struct pagemark_region pagemark_region;

/**
 * A directory of checkpoints.
 */
typedef struct pagemark_repository pagemark_repository;

/**
 * A heap whose checkpoints are those of a job in a repository, and that is mapped where it was
 * when it is opened again, so that the pointers in it hold.
 *
 * Objects may point to each other, and the root leads to them. What they must not hold are the
 * addresses of anything else: other memory, functions, virtual tables.
 */
typedef struct pagemark_saved_heap pagemark_saved_heap;

/**
 * A checkpoint of a heap that is being stored.
 */
typedef struct pagemark_saving pagemark_saving;

/**
 * What a region held at one time.
 */
typedef struct pagemark_snapshot pagemark_snapshot;

/**
 * Holds snapshots of any number of regions: each chunk of content once, even if several snapshots
 * have it, and no chunks of zeros.
 */
typedef struct pagemark_store pagemark_store;

/**
 * Lets system calls write to a part of a region as long as it exists.
 */
typedef struct pagemark_writable pagemark_writable;

/**
 * The changed content of one range. The pointers are valid as long as the changes.
 */
typedef struct {
    /**
     * The first byte, relative to the start of the region.
     */
    uint64_t offset;
    /**
     * How long the range is.
     */
    size_t bytes;
    /**
     * The content after the transaction.
     */
    const uint8_t *new_content;
    /**
     * The content before the transaction; null if it is not known, because the region was made
     * without rollback or the old content was not encoded.
     */
    const uint8_t *old_content;
} pagemark_change;

/**
 * How a heap is made. All zeros is the default.
 */
typedef struct {
    /**
     * The bytes that a new heap can hold, rounded up to a power of two from 2 MiB to 1 TiB; 0 for
     * 16 GiB. They take address space only. A saved heap keeps its capacity.
     */
    uint64_t capacity_bytes;
    /**
     * The version of the program's data. A heap that was made with another version is not opened.
     */
    uint64_t version;
    /**
     * Number of parts of each page whose writes are told apart: 1, 2, 4 or 8; 0 for 1. A heap that
     * was made with another number is not opened.
     */
    size_t parts;
} pagemark_heap_options;

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
     * The name of a mechanism, as in "pagemap-scan"; null or "auto" for the best mechanism of this
     * machine. A mechanism that does not work is an error; no other mechanism replaces it.
     *
     * Under `mprotect` and `emulate` writes arrive as SIGSEGV. All other faults are passed to the
     * handler that was installed before. Where another part of the program has replaced the action
     * of SIGSEGV, the next pagemark_region_begin, or the next region, installs the handler again
     * and passes such faults to what has replaced it. Until then, a handler that is installed
     * later must pass faults that are not its own to the handler that it replaces. A thread that
     * has SIGSEGV blocked, also by the mask of a signal handler, ends the process by its first
     * write to a page.
     */
    const char *mechanism;
    /**
     * True if no transaction will be rolled back. The region then has no copy of its content, and
     * a transaction begins where the previous transaction ended.
     */
    bool without_rollback;
    /**
     * The store of the snapshots; null for a store of the region's own. It may be freed while the
     * region exists.
     */
    const pagemark_store *store;
    /**
     * True if the memory is written only by threads of this process (by no debugger, no
     * `process_vm_writev` of another process and no child of `vfork`), only at these addresses,
     * and not through a file descriptor, while the region exists. Without this promise shared
     * memory is refused by all mechanisms except `compare` and `full`, because the others do not
     * see writes of other processes. With it, `adaptive` looks at no page in a commit if the
     * process has one thread and had no page fault in the transaction.
     */
    bool sole_use;
} pagemark_options;

/**
 * How a store holds snapshots. All zeros is the default.
 */
typedef struct {
    /**
     * Bytes of a chunk, a power of two from 256 to 65536; 0 for a page. Smaller chunks share more
     * content, and take more memory for tables: about 40 bytes a chunk.
     */
    size_t chunk_bytes;
    /**
     * Maximum number of bytes that the store holds; 0 for no budget. Where it does not suffice,
     * chunks are compressed, or held as a difference.
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
 * As pagemark_region_commit(), and makes the content of the written ranges available, as it is
 * after the transaction and, unless the region was made without rollback, as it was before it.
 * Pages that hold the same content as before are left out. After an error, an open transaction is
 * still open.
 */
pagemark_status pagemark_region_commit_changes(const pagemark_region *region,
                                               pagemark_changes **changes);

/**
 * Frees changes.
 */
void pagemark_changes_free(pagemark_changes *changes);

/**
 * The changes, in ascending order of their offsets; `count` receives how many there are. The array
 * is valid as long as the changes. Null if there are none or if `changes` is null.
 */
const pagemark_change *pagemark_changes_items(const pagemark_changes *changes, size_t *count);

/**
 * Writes the new content to a region of the same length, which then counts as written there.
 * Another thread that commits or takes a snapshot of that region has all of the changes or none.
 */
pagemark_status pagemark_changes_apply(const pagemark_changes *changes,
                                       const pagemark_region *region);

/**
 * Writes the old content to a region: undoes the changes if they are the last that were made.
 * `PAGEMARK_STATUS_NO_ROLLBACK` if the old content is not known.
 */
pagemark_status pagemark_changes_revert(const pagemark_changes *changes,
                                        const pagemark_region *region);

/**
 * Removes the content before the transaction, which a replica does not need.
 */
pagemark_status pagemark_changes_forget_old(pagemark_changes *changes);

/**
 * Length of what pagemark_changes_encode() stores; 0 if `changes` is null.
 */
size_t pagemark_changes_encoded_bytes(const pagemark_changes *changes);

/**
 * Stores the changes as bytes at `to`, for another process or a file. `bytes` is the length of the
 * memory there: pagemark_changes_encoded_bytes() or more.
 */
pagemark_status pagemark_changes_encode(const pagemark_changes *changes, void *to, size_t bytes);

/**
 * Makes changes of the `bytes` bytes at `from` that pagemark_changes_encode() has stored. Any
 * bytes are examined safely: `PAGEMARK_STATUS_DAMAGED` if they are no changes, or were cut or
 * damaged.
 */
pagemark_status pagemark_changes_decode(const void *from, size_t bytes, pagemark_changes **changes);

/**
 * Makes a heap for a job that has no checkpoints: `PAGEMARK_STATUS_EXISTS` if it has some. Nothing
 * is saved yet. `options` may be null.
 */
pagemark_status pagemark_saved_heap_create(const pagemark_repository *repository,
                                           const char *job,
                                           const pagemark_heap_options *options,
                                           pagemark_saved_heap **heap);

/**
 * Opens the newest checkpoint of a job: maps the heap where it was. `PAGEMARK_STATUS_NEVER_SAVED`
 * if the job has no checkpoint, `PAGEMARK_STATUS_ADDRESS_TAKEN` if something else is mapped there,
 * `PAGEMARK_STATUS_OTHER_HEAP` if the heap was made with another version, number of parts, or
 * allocator. `options` may be null.
 */
pagemark_status pagemark_saved_heap_open(const pagemark_repository *repository,
                                         const char *job,
                                         const pagemark_heap_options *options,
                                         pagemark_saved_heap **heap);

/**
 * As pagemark_saved_heap_open(), for a checkpoint that need not be the newest. The next checkpoint
 * of the heap is the newest then.
 */
pagemark_status pagemark_saved_heap_open_at(const pagemark_repository *repository,
                                            const char *job,
                                            uint64_t sequence,
                                            const pagemark_heap_options *options,
                                            pagemark_saved_heap **heap);

/**
 * Unmaps a heap: none of its objects may be used after that. What was not saved is lost.
 */
void pagemark_saved_heap_free(pagemark_saved_heap *heap);

/**
 * Saves the heap as the next checkpoint of its job. When this returns, the checkpoint is durable;
 * after a crash at any instant the newest checkpoint is this one or the one before it, whole. What
 * was written since the last checkpoint is stored. No other thread may write objects meanwhile;
 * threads may allocate and free. The number of the checkpoint is stored in `sequence`, which may
 * be null. After an error nothing is lost: the next checkpoint includes it.
 * `PAGEMARK_STATUS_SAVED_ELSEWHERE` if another program has saved to the job since the heap was
 * opened.
 */
pagemark_status pagemark_saved_heap_checkpoint(const pagemark_saved_heap *heap, uint64_t *sequence);

/**
 * As pagemark_saved_heap_checkpoint(), in the background: returns when the memory is copied, after
 * which the program may write again, and stores the copy in a thread. Errors are those of
 * pagemark_saving_wait(). The first checkpoint of a new heap is stored before this returns.
 */
pagemark_status pagemark_saved_heap_checkpoint_begin(const pagemark_saved_heap *heap,
                                                     pagemark_saving **saving);

/**
 * Waits until the checkpoint is durable, frees `saving`, also after an error, and stores the
 * number of the checkpoint in `sequence`, which may be null. After an error nothing is lost: the
 * next checkpoint includes it. The heap may have been freed meanwhile.
 */
pagemark_status pagemark_saving_wait(pagemark_saving *saving, uint64_t *sequence);

/**
 * True if pagemark_saving_wait() returns at once; false if `saving` is null.
 */
bool pagemark_saving_is_done(const pagemark_saving *saving);

/**
 * Waits as pagemark_saving_wait(), for those who do not want to know how the checkpoint went.
 */
void pagemark_saving_free(pagemark_saving *saving);

/**
 * The address that pagemark_saved_heap_set_root() was given last, also by an earlier program; null
 * in a new heap. Null, with a message in pagemark_last_error(), in a child made by fork.
 */
void *pagemark_saved_heap_root(const pagemark_saved_heap *heap);

/**
 * Sets the address by which the program finds its data: null or an address in the heap, else
 * `PAGEMARK_STATUS_OUT_OF_RANGE`. It belongs to the next checkpoint.
 */
pagemark_status pagemark_saved_heap_set_root(const pagemark_saved_heap *heap, const void *root);

/**
 * True if an address is in the heap, in any of its views.
 */
bool pagemark_saved_heap_contains(const pagemark_saved_heap *heap, const void *address);

/**
 * Allocates an object. `alignment` is a power of two up to 1 GiB; 0 for that of malloc(). Null,
 * with a message in pagemark_last_error(), if the heap is full, and in a child made by fork, which
 * does not have the heap.
 */
void *pagemark_saved_heap_allocate(const pagemark_saved_heap *heap, size_t bytes, size_t alignment);

/**
 * As pagemark_saved_heap_allocate(), filled with zeros.
 */
void *pagemark_saved_heap_allocate_zeroed(const pagemark_saved_heap *heap,
                                          size_t bytes,
                                          size_t alignment);

/**
 * Resizes an object that was allocated with this alignment, and moves it if needed. Null if there
 * is no room, as pagemark_saved_heap_allocate(); then the object is as it was. Allocates an object
 * if `object` is null.
 */
void *pagemark_saved_heap_reallocate(const pagemark_saved_heap *heap,
                                     void *object,
                                     size_t bytes,
                                     size_t alignment);

/**
 * Frees an object; nothing if it is null. A process that frees what is no object of the heap is
 * ended (SIGABRT) before the heap is changed.
 */
void pagemark_saved_heap_deallocate(const pagemark_saved_heap *heap, void *object);

/**
 * The bytes that an object has, all of which may be written; 0 if it is null.
 */
size_t pagemark_saved_heap_usable_bytes(const pagemark_saved_heap *heap, void *object);

/**
 * Frees the ranges, and leaves none.
 */
void pagemark_ranges_free(pagemark_ranges *ranges);

/**
 * Maps a region of `bytes`, rounded up to whole pages. The region holds zeros, and takes memory
 * only where it is written. `options` may be null.
 */
pagemark_status pagemark_region_new(size_t bytes,
                                    const pagemark_options *options,
                                    pagemark_region **region);

/**
 * Makes existing memory a region: whole pages, readable, writable and not executable, that belong
 * to no other region. The content stays as it is. While the region exists, the memory must stay
 * mapped, no other code may change its mapping or protection, no mapped file may become shorter,
 * and the file of a private mapping must not be written. Shared memory needs
 * pagemark_options.sole_use. `options` may be null.
 *
 * Freeing the region ends tracking and keeps the memory, except that `emulate` turns private
 * memory into shared anonymous memory, which children made by fork do not inherit, and which is
 * not locked and has no advice of before (mlock, madvise, mbind). Under `emulate`, no other thread
 * may access the memory during this call. Under `mprotect`, `emulate` and `uffd`, it must hold
 * nothing that the program's allocator or a handler of SIGSEGV writes. Under `mprotect`, children
 * made by fork must inherit it (no MADV_DONTFORK).
 */
pagemark_status pagemark_region_adopt(void *start,
                                      size_t bytes,
                                      const pagemark_options *options,
                                      pagemark_region **region);

/**
 * Maps a region that holds the content of a snapshot, of whichever region it was taken. `options`
 * may be null.
 */
pagemark_status pagemark_region_from_snapshot(const pagemark_snapshot *snapshot,
                                              const pagemark_options *options,
                                              pagemark_region **region);

/**
 * Frees a region: memory that Pagemark mapped is unmapped, and adopted memory is no longer
 * tracked. An open transaction ends without a rollback. Snapshots of the region stay readable.
 */
void pagemark_region_free(pagemark_region *region);

/**
 * The address of the region. The program reads and writes the memory from any thread, in a
 * transaction or not. Null if `region` is null.
 */
void *pagemark_region_data(const pagemark_region *region);

/**
 * How long the region is; 0 if it is null.
 */
size_t pagemark_region_bytes(const pagemark_region *region);

/**
 * The name of the mechanism that finds writes. The string lives as long as the region. Null if
 * `region` is null.
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
 * Ends the transaction and stores the offsets that were written in it. A mechanism may report more
 * than was written, never less. `written` may be null. After an error, an open transaction is
 * still open.
 */
pagemark_status pagemark_region_commit(const pagemark_region *region, pagemark_ranges *written);

/**
 * Ends the transaction, restores the content from its beginning, and stores the restored offsets.
 * `put_back` may be null. After an error, an open transaction is still open.
 */
pagemark_status pagemark_region_rollback(const pagemark_region *region, pagemark_ranges *put_back);

/**
 * Copies `bytes` bytes of the region from `offset` on. `to` must lie outside of the region; it may
 * be null if `bytes` is 0. Unlike an access through pagemark_region_data(), the copy may race with
 * writes of other threads.
 */
pagemark_status pagemark_region_read(const pagemark_region *region,
                                     size_t offset,
                                     void *to,
                                     size_t bytes);

/**
 * Copies `bytes` bytes into the region, from `offset` on. `from` must lie outside of the region;
 * it may be null if `bytes` is
 * 0. See pagemark_region_read().
 */
pagemark_status pagemark_region_write(const pagemark_region *region,
                                      size_t offset,
                                      const void *from,
                                      size_t bytes);

/**
 * Reads from a file, a pipe or a socket into the region, once, as read(2) does, and stores the
 * number of bytes that were read; 0 at the end of the file. Under `mprotect` and `emulate` a plain
 * read(2) into a region fails with EFAULT; this call does not.
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
 * Makes the whole pages within a part of the region hold zeros, which counts as a write, and frees
 * their memory. In a shared mapping of a file this makes a hole in the file. In a private mapping
 * of a file, in parts of huge pages and in locked memory, zeros are written and nothing is freed.
 */
pagemark_status pagemark_region_discard(const pagemark_region *region, size_t offset, size_t bytes);

/**
 * Takes a snapshot. It costs what was written since the last one was taken or restored.
 */
pagemark_status pagemark_region_snapshot(const pagemark_region *region,
                                         pagemark_snapshot **snapshot);

/**
 * Takes a snapshot without the content of the `count` ranges at `forget`, which may be in any
 * order: free memory, or unused stack. The snapshot holds zeros there. `forget` may be null if
 * `count` is 0.
 */
pagemark_status pagemark_region_snapshot_without(const pagemark_region *region,
                                                 const pagemark_range *forget,
                                                 size_t count,
                                                 pagemark_snapshot **snapshot);

/**
 * Restores a snapshot in place. Only differing content is written; stores the offsets of it.
 * `written` may be null. In a transaction, these writes belong to the transaction.
 */
pagemark_status pagemark_region_restore(const pagemark_region *region,
                                        const pagemark_snapshot *snapshot,
                                        pagemark_ranges *written);

/**
 * Opens the repository in a directory, or creates one where there is none.
 */
pagemark_status pagemark_repository_open(const char *path, pagemark_repository **repository);

/**
 * Closes a repository. Regions that were opened from it or saved to it stay.
 */
void pagemark_repository_free(pagemark_repository *repository);

/**
 * Saves a region as the next checkpoint of a job. When this returns, the checkpoint is durable;
 * after a crash at any instant the newest checkpoint is this one or the one before it, whole. Only
 * what was written since the last save to the same job is read and stored. The region must not be
 * in a transaction. The number of the checkpoint is stored in `sequence`, which may be null.
 */
pagemark_status pagemark_region_save(const pagemark_region *region,
                                     const pagemark_repository *repository,
                                     const char *job,
                                     uint64_t *sequence);

/**
 * Opens the newest checkpoint of a job that pagemark_region_save() has written: a new region, at
 * whatever address, that holds what was saved. `PAGEMARK_STATUS_NEVER_SAVED` if the job has no
 * checkpoint. `options` may be null.
 */
pagemark_status pagemark_region_open(const pagemark_repository *repository,
                                     const char *job,
                                     const pagemark_options *options,
                                     pagemark_region **region);

/**
 * Saves a snapshot as the next checkpoint of a job, as pagemark_region_save() saves a region. All
 * of its content is read; what the repository holds already is not stored again. The number of
 * the checkpoint is stored in `sequence`, which may be null.
 */
pagemark_status pagemark_snapshot_save(const pagemark_snapshot *snapshot,
                                       const pagemark_repository *repository,
                                       const char *job,
                                       uint64_t *sequence);

/**
 * Reads the newest checkpoint of a job that pagemark_snapshot_save() or pagemark_region_save() has
 * written into a store; null for a store of the snapshot's own. The snapshot belongs to no region:
 * pagemark_region_from_snapshot() makes one. `PAGEMARK_STATUS_NEVER_SAVED` if the job has no
 * checkpoint.
 */
pagemark_status pagemark_snapshot_open(const pagemark_repository *repository,
                                       const char *job,
                                       const pagemark_store *store,
                                       pagemark_snapshot **snapshot);

/**
 * Makes a region hold what was saved last in a job, in place: for memory that was adopted. The
 * region must be as long as the saved one. Only pages that differ are written; where that was is
 * stored in `loaded`, which may be null.
 */
pagemark_status pagemark_region_load(const pagemark_region *region,
                                     const pagemark_repository *repository,
                                     const char *job,
                                     pagemark_ranges *loaded);

/**
 * Frees a snapshot. What no other snapshot holds is given back.
 */
void pagemark_snapshot_free(pagemark_snapshot *snapshot);

/**
 * How long the region is that it was taken of; 0 if it is null.
 */
uint64_t pagemark_snapshot_bytes(const pagemark_snapshot *snapshot);

/**
 * Reads bytes of the snapshot without restoring it. `to` must lie outside of every region that is
 * tracked, or not be written by other code meanwhile; it may be null if `bytes` is 0.
 */
pagemark_status pagemark_snapshot_read(const pagemark_snapshot *snapshot,
                                       uint64_t offset,
                                       void *to,
                                       size_t bytes);

/**
 * True if both hold the same bytes, even if they are of different regions. The cost is O(1),
 * because equal content of one store is held once. Snapshots of different stores are never equal;
 * null is equal to no snapshot.
 */
bool pagemark_snapshot_equal(const pagemark_snapshot *a, const pagemark_snapshot *b);

/**
 * Stores where two snapshots of one store differ, by the chunk. It costs what differs.
 */
pagemark_status pagemark_snapshot_diff(const pagemark_snapshot *a,
                                       const pagemark_snapshot *b,
                                       pagemark_ranges *differing);

/**
 * The message of the last failed call of this thread: what failed, and what to do. An empty string
 * if no call has failed. The string lives until another call of this thread fails or the thread
 * ends.
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
