/*
 * Pagemark for C++20: regions of a program's own memory, with transactions and snapshots, and heaps
 * that survive their program.
 *
 * A thin layer over pagemark.h, whose comments describe each operation. Here, objects free what
 * they own, memory is a std::span, and a call that fails throws pagemark::error. An object that was
 * moved from can be assigned to or destroyed, and nothing else.
 */
#ifndef PAGEMARK_HPP
#define PAGEMARK_HPP

#include <pagemark.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <memory_resource>
#include <new>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace pagemark {

/* A call that failed. what() says what failed, and what to do about it. */
class error : public std::runtime_error {
public:
    explicit error(pagemark_status status) : error(status, pagemark_last_error()) {}
    error(pagemark_status status, const char *what) : std::runtime_error(what), status_(status) {}

    pagemark_status status() const noexcept { return status_; }

private:
    pagemark_status status_;
};

/* Throws unless the status is PAGEMARK_STATUS_OK. */
inline void check(pagemark_status status)
{
    if (status != PAGEMARK_STATUS_OK)
        throw error(status);
}

namespace detail {

template <auto Free> struct deleter {
    template <class Handle> void operator()(Handle *handle) const noexcept { Free(handle); }
};

template <class Handle, auto Free> using owner = std::unique_ptr<Handle, deleter<Free>>;

} // namespace detail

/* Disjoint ranges of offsets in ascending order. */
class ranges {
public:
    ranges() noexcept : ranges_{} {}
    /* Takes ranges over that the library has made. */
    explicit ranges(pagemark_ranges owned) noexcept : ranges_(owned) {}
    ranges(ranges &&other) noexcept : ranges_(std::exchange(other.ranges_, pagemark_ranges{})) {}
    ranges &operator=(ranges &&other) noexcept
    {
        std::swap(ranges_, other.ranges_);
        return *this;
    }
    ~ranges() { pagemark_ranges_free(&ranges_); }

    std::span<const pagemark_range> items() const noexcept { return {ranges_.items, ranges_.count}; }
    const pagemark_range *begin() const noexcept { return ranges_.items; }
    const pagemark_range *end() const noexcept { return ranges_.items + ranges_.count; }
    std::size_t size() const noexcept { return ranges_.count; }
    bool empty() const noexcept { return ranges_.count == 0; }

    bool contains(std::uint64_t offset) const noexcept
    {
        for (const pagemark_range &range : items())
            if (range.start <= offset && offset < range.end)
                return true;
        return false;
    }

private:
    pagemark_ranges ranges_;
};

/* Holds snapshots of any number of regions. */
class store {
public:
    /* 0 stands for chunks of a page, and for no budget. */
    explicit store(std::size_t chunk_bytes = 0, std::uint64_t budget_bytes = 0)
    {
        pagemark_store_options options{};
        options.chunk_bytes = chunk_bytes;
        options.budget_bytes = budget_bytes;
        pagemark_store *made = nullptr;
        check(pagemark_store_new(&options, &made));
        handle_.reset(made);
    }

    pagemark_usage usage() const
    {
        pagemark_usage usage;
        check(pagemark_store_usage(get(), &usage));
        return usage;
    }

    pagemark_store *get() const noexcept { return handle_.get(); }

private:
    detail::owner<pagemark_store, pagemark_store_free> handle_;
};

/* A directory of checkpoints. */
class repository {
public:
    /* Opens the repository, or creates one where there is none. */
    explicit repository(const std::string &path)
    {
        pagemark_repository *opened = nullptr;
        check(pagemark_repository_open(path.c_str(), &opened));
        handle_.reset(opened);
    }

    pagemark_repository *get() const noexcept { return handle_.get(); }

private:
    detail::owner<pagemark_repository, pagemark_repository_free> handle_;
};

/* The content of a region at one time. */
class snapshot {
public:
    /* Takes a snapshot over that the library has made. */
    explicit snapshot(pagemark_snapshot *owned) noexcept : handle_(owned) {}

    /* The newest checkpoint of a job, in a store of its own or in `in`. */
    static snapshot open(const repository &from, const std::string &job, const store *in = nullptr)
    {
        pagemark_snapshot *opened = nullptr;
        check(pagemark_snapshot_open(from.get(), job.c_str(), in ? in->get() : nullptr, &opened));
        return snapshot(opened);
    }

    /* Returns the number of the checkpoint. */
    std::uint64_t save(const repository &to, const std::string &job) const
    {
        std::uint64_t sequence = 0;
        check(pagemark_snapshot_save(get(), to.get(), job.c_str(), &sequence));
        return sequence;
    }

    std::uint64_t size_bytes() const noexcept { return pagemark_snapshot_bytes(get()); }

    /* Copies the content from `offset` on. */
    void read(std::uint64_t offset, std::span<std::byte> to) const
    {
        check(pagemark_snapshot_read(get(), offset, to.data(), to.size()));
    }

    /* The value at `offset`. */
    template <class T> T read(std::uint64_t offset) const
    {
        static_assert(std::is_trivially_copyable_v<T>, "memory holds bytes, not objects with constructors");
        T value;
        check(pagemark_snapshot_read(get(), offset, &value, sizeof value));
        return value;
    }

    ranges diff(const snapshot &other) const
    {
        pagemark_ranges differing{};
        check(pagemark_snapshot_diff(get(), other.get(), &differing));
        return ranges(differing);
    }

    friend bool operator==(const snapshot &a, const snapshot &b) noexcept
    {
        return pagemark_snapshot_equal(a.get(), b.get());
    }

    pagemark_snapshot *get() const noexcept { return handle_.get(); }

private:
    detail::owner<pagemark_snapshot, pagemark_snapshot_free> handle_;
};

/* How a region is tracked. */
struct options {
    /* "auto" is the best mechanism of this machine. */
    std::string mechanism = "auto";
    /* False: a transaction can't be rolled back, and begins where the previous transaction ended. */
    bool rollback = true;
    /* The store of the snapshots; null for a store of the region's own. */
    const pagemark::store *store = nullptr;
    /* The promise of pagemark_options.sole_use. */
    bool sole_use = false;

    /* The same in C, as long as this object. */
    pagemark_options to_c() const noexcept
    {
        pagemark_options result{};
        result.mechanism = mechanism.c_str();
        result.without_rollback = !rollback;
        result.store = store ? store->get() : nullptr;
        result.sole_use = sole_use;
        return result;
    }
};

class changes;

/* Memory whose writes are tracked. */
class region {
public:
    explicit region(std::size_t bytes, const options &chosen = {})
    {
        const pagemark_options in_c = chosen.to_c();
        pagemark_region *made = nullptr;
        check(pagemark_region_new(bytes, &in_c, &made));
        handle_.reset(made);
    }

    /* Makes existing memory a region: see pagemark_region_adopt(). */
    static region adopt(std::span<std::byte> memory, const options &chosen = {})
    {
        const pagemark_options in_c = chosen.to_c();
        pagemark_region *made = nullptr;
        check(pagemark_region_adopt(memory.data(), memory.size(), &in_c, &made));
        return region(made);
    }

    static region from_snapshot(const snapshot &content, const options &chosen = {})
    {
        const pagemark_options in_c = chosen.to_c();
        pagemark_region *made = nullptr;
        check(pagemark_region_from_snapshot(content.get(), &in_c, &made));
        return region(made);
    }

    /* A region with the content of the newest checkpoint of a job. */
    static region open(const repository &from, const std::string &job, const options &chosen = {})
    {
        const pagemark_options in_c = chosen.to_c();
        pagemark_region *opened = nullptr;
        check(pagemark_region_open(from.get(), job.c_str(), &in_c, &opened));
        return region(opened);
    }

    /* The memory. */
    std::span<std::byte> bytes() const noexcept { return {static_cast<std::byte *>(data()), size_bytes()}; }

    /* The memory as an array of as many values as fit. */
    template <class T> std::span<T> as() const noexcept
    {
        static_assert(std::is_trivially_copyable_v<T>, "memory holds bytes, not objects with constructors");
        return {static_cast<T *>(data()), size_bytes() / sizeof(T)};
    }

    void *data() const noexcept { return pagemark_region_data(get()); }
    std::size_t size_bytes() const noexcept { return pagemark_region_bytes(get()); }
    std::string mechanism() const { return pagemark_region_mechanism(get()); }
    std::uint64_t granularity_bytes() const noexcept { return pagemark_region_granularity_bytes(get()); }
    bool in_transaction() const noexcept { return pagemark_region_in_transaction(get()); }

    void begin() { check(pagemark_region_begin(get())); }

    ranges commit()
    {
        pagemark_ranges written{};
        check(pagemark_region_commit(get(), &written));
        return ranges(written);
    }

    inline changes commit_changes();

    ranges rollback()
    {
        pagemark_ranges put_back{};
        check(pagemark_region_rollback(get(), &put_back));
        return ranges(put_back);
    }

    snapshot take_snapshot() const
    {
        pagemark_snapshot *taken = nullptr;
        check(pagemark_region_snapshot(get(), &taken));
        return snapshot(taken);
    }

    /* A snapshot without the content of some ranges. */
    snapshot take_snapshot_without(std::span<const pagemark_range> forget) const
    {
        pagemark_snapshot *taken = nullptr;
        check(pagemark_region_snapshot_without(get(), forget.data(), forget.size(), &taken));
        return snapshot(taken);
    }

    ranges restore(const snapshot &wanted)
    {
        pagemark_ranges written{};
        check(pagemark_region_restore(get(), wanted.get(), &written));
        return ranges(written);
    }

    void read(std::size_t offset, std::span<std::byte> to) const
    {
        check(pagemark_region_read(get(), offset, to.data(), to.size()));
    }

    void write(std::size_t offset, std::span<const std::byte> from)
    {
        check(pagemark_region_write(get(), offset, from.data(), from.size()));
    }

    /* Reads from a file descriptor once; returns the number of bytes, 0 at the end of the file. */
    std::size_t read_from(int file, std::size_t offset, std::size_t bytes)
    {
        std::size_t count = 0;
        check(pagemark_region_read_from(get(), file, offset, bytes, &count));
        return count;
    }

    void discard(std::size_t offset, std::size_t bytes) { check(pagemark_region_discard(get(), offset, bytes)); }

    /* Returns the number of the checkpoint. */
    std::uint64_t save(const repository &to, const std::string &job) const
    {
        std::uint64_t sequence = 0;
        check(pagemark_region_save(get(), to.get(), job.c_str(), &sequence));
        return sequence;
    }

    ranges load(const repository &from, const std::string &job)
    {
        pagemark_ranges loaded{};
        check(pagemark_region_load(get(), from.get(), job.c_str(), &loaded));
        return ranges(loaded);
    }

    pagemark_region *get() const noexcept { return handle_.get(); }

private:
    explicit region(pagemark_region *owned) noexcept : handle_(owned) {}

    detail::owner<pagemark_region, pagemark_region_free> handle_;
};

/* The content of the written ranges after a transaction, and before it if it is known. */
class changes {
public:
    /* Takes changes over that the library has made. */
    explicit changes(pagemark_changes *owned) noexcept : handle_(owned) {}

    /* The changes that encode() has returned. */
    static changes decode(std::span<const std::byte> encoded)
    {
        pagemark_changes *decoded = nullptr;
        check(pagemark_changes_decode(encoded.data(), encoded.size(), &decoded));
        return changes(decoded);
    }

    /* Valid as long as this object. */
    std::span<const pagemark_change> items() const noexcept
    {
        std::size_t count = 0;
        const pagemark_change *first = pagemark_changes_items(get(), &count);
        return {first, count};
    }

    void apply(region &to) const { check(pagemark_changes_apply(get(), to.get())); }
    void revert(region &in) const { check(pagemark_changes_revert(get(), in.get())); }
    void forget_old() { check(pagemark_changes_forget_old(get())); }

    std::vector<std::byte> encode() const
    {
        std::vector<std::byte> encoded(pagemark_changes_encoded_bytes(get()));
        check(pagemark_changes_encode(get(), encoded.data(), encoded.size()));
        return encoded;
    }

    pagemark_changes *get() const noexcept { return handle_.get(); }

private:
    detail::owner<pagemark_changes, pagemark_changes_free> handle_;
};

inline changes region::commit_changes()
{
    pagemark_changes *made = nullptr;
    check(pagemark_region_commit_changes(get(), &made));
    return changes(made);
}

/*
 * A transaction for a block: rolled back at its end unless it was committed, so that an exception
 * undoes it. The transaction of a region without rollback is committed in both cases.
 */
class [[nodiscard]] transaction {
public:
    /* The region must outlive the transaction, and stay where it is. */
    explicit transaction(region &of) : region_(of) { region_.begin(); }
    transaction(const transaction &) = delete;
    transaction &operator=(const transaction &) = delete;

    ~transaction()
    {
        if (is_open_ && pagemark_region_rollback(region_.get(), nullptr) == PAGEMARK_STATUS_NO_ROLLBACK)
            pagemark_region_commit(region_.get(), nullptr);
    }

    ranges commit()
    {
        ranges written = region_.commit();
        is_open_ = false;
        return written;
    }

    changes commit_changes()
    {
        changes made = region_.commit_changes();
        is_open_ = false;
        return made;
    }

    ranges rollback()
    {
        ranges put_back = region_.rollback();
        is_open_ = false;
        return put_back;
    }

private:
    region &region_;
    bool is_open_ = true;
};

/* Lets system calls write to a part of a region as long as it exists; the region must outlive it. */
class [[nodiscard]] writable {
public:
    writable(region &of, std::size_t offset, std::size_t bytes)
    {
        pagemark_writable *made = nullptr;
        check(pagemark_region_make_writable(of.get(), offset, bytes, &made));
        handle_.reset(made);
    }

private:
    detail::owner<pagemark_writable, pagemark_writable_free> handle_;
};

/* How a heap is made. */
struct heap_options {
    /* 0 stands for 16 GiB. They take address space only. A saved heap keeps its capacity. */
    std::uint64_t capacity_bytes = 0;
    /* The version of the program's types. A heap that was made with another one is not opened. */
    std::uint64_t version = 0;
    /* Number of parts of each page whose writes are told apart. */
    std::size_t parts = 1;

    /* The same in C. */
    pagemark_heap_options to_c() const noexcept
    {
        pagemark_heap_options result{};
        result.capacity_bytes = capacity_bytes;
        result.version = version;
        result.parts = parts;
        return result;
    }
};

namespace detail {

/* Containers in a heap hold the address of the resource from which they have their memory. It is an
   object in the heap, too. */
class heap_resource final : public std::pmr::memory_resource {
public:
    explicit heap_resource(pagemark_saved_heap *heap) noexcept : heap_(heap) {}

private:
    void *do_allocate(std::size_t bytes, std::size_t alignment) override
    {
        void *object = pagemark_saved_heap_allocate(heap_, bytes, alignment);
        if (!object)
            throw std::bad_alloc();
        return object;
    }

    void do_deallocate(void *object, std::size_t, std::size_t) override
    {
        pagemark_saved_heap_deallocate(heap_, object);
    }

    bool do_is_equal(const std::pmr::memory_resource &other) const noexcept override
    {
        return this == &other;
    }

    pagemark_saved_heap *heap_;
};

/* What the root of a heap leads to that a program in C++ has made. */
struct heap_root {
    static constexpr std::uint64_t magic_number = 0x2b'2b'70'61'65'68'6d'70; /* "pmheap++" */

    std::uint64_t magic;
    void *root;
    alignas(heap_resource) std::byte resource[sizeof(heap_resource)];
};

} // namespace detail

/* A checkpoint of a heap that is being stored. Its destructor waits until it is. */
class [[nodiscard]] saving {
public:
    /* Takes a checkpoint over that the library has begun. */
    explicit saving(pagemark_saving *owned) noexcept : handle_(owned) {}

    /* True if wait() returns at once. */
    bool is_done() const noexcept { return pagemark_saving_is_done(handle_.get()); }

    /* Returns the number of the checkpoint when it is durable. Is called once. */
    std::uint64_t wait()
    {
        std::uint64_t sequence = 0;
        check(pagemark_saving_wait(handle_.release(), &sequence));
        return sequence;
    }

private:
    detail::owner<pagemark_saving, pagemark_saving_free> handle_;
};

/*
 * A heap that is saved to a repository, and mapped where it was when it is opened again, so that the
 * pointers in it hold: containers of std::pmr with its resource() survive the program.
 *
 *     auto heap = pagemark::saved_heap::open_or_create(repository, "words");
 *     auto &words = heap.root_or_make<std::pmr::map<std::pmr::string, int>>();
 *     words["page"]++;
 *     heap.checkpoint();
 *
 * Objects in it must not hold addresses outside of it, as virtual functions, std::function and
 * references to other objects do. Destructors of objects in it run only if the program destroys
 * them. A heap that was made by a program in C, or by one in Rust, is opened by such a program.
 */
class saved_heap {
public:
    /* Makes a heap for a job that has no checkpoints. Nothing is saved yet. */
    static saved_heap create(const repository &in, const std::string &job, const heap_options &chosen = {})
    {
        const pagemark_heap_options in_c = chosen.to_c();
        pagemark_saved_heap *made = nullptr;
        check(pagemark_saved_heap_create(in.get(), job.c_str(), &in_c, &made));
        saved_heap heap(made);
        void *place = pagemark_saved_heap_allocate(made, sizeof(detail::heap_root), alignof(detail::heap_root));
        if (!place)
            throw std::bad_alloc();
        heap.root_ = ::new (place) detail::heap_root{detail::heap_root::magic_number, nullptr, {}};
        check(pagemark_saved_heap_set_root(made, heap.root_));
        heap.make_resource();
        return heap;
    }

    /* Opens the newest checkpoint of a job. */
    static saved_heap open(const repository &from, const std::string &job, const heap_options &chosen = {})
    {
        const pagemark_heap_options in_c = chosen.to_c();
        pagemark_saved_heap *opened = nullptr;
        check(pagemark_saved_heap_open(from.get(), job.c_str(), &in_c, &opened));
        return opened_heap(opened);
    }

    /* Opens a checkpoint of a job, which need not be the newest. */
    static saved_heap open_at(const repository &from, const std::string &job, std::uint64_t sequence,
                              const heap_options &chosen = {})
    {
        const pagemark_heap_options in_c = chosen.to_c();
        pagemark_saved_heap *opened = nullptr;
        check(pagemark_saved_heap_open_at(from.get(), job.c_str(), sequence, &in_c, &opened));
        return opened_heap(opened);
    }

    /* Opens the newest checkpoint of a job, or makes a heap if the job has none. */
    static saved_heap open_or_create(const repository &in, const std::string &job, const heap_options &chosen = {})
    {
        try {
            return open(in, job, chosen);
        } catch (const error &error) {
            if (error.status() != PAGEMARK_STATUS_NEVER_SAVED)
                throw;
        }
        return create(in, job, chosen);
    }

    /* Saves the heap; when this returns, the checkpoint is durable. Returns its number. */
    std::uint64_t checkpoint()
    {
        std::uint64_t sequence = 0;
        check(pagemark_saved_heap_checkpoint(get(), &sequence));
        return sequence;
    }

    /* As checkpoint(); returns when the memory is copied, after which the program may write again. */
    saving checkpoint_in_background()
    {
        pagemark_saving *begun = nullptr;
        check(pagemark_saved_heap_checkpoint_begin(get(), &begun));
        return saving(begun);
    }

    /* The memory of the heap, for containers that are in it. */
    std::pmr::memory_resource *resource() const noexcept
    {
        return std::launder(reinterpret_cast<detail::heap_resource *>(root_->resource));
    }

    /* An allocator of the memory of the heap. */
    template <class T = std::byte> std::pmr::polymorphic_allocator<T> allocator() const noexcept
    {
        return resource();
    }

    /* What set_root() was given last, also by an earlier program; null in a new heap. */
    template <class T> T *root() const noexcept { return static_cast<T *>(root_->root); }

    /* Sets the address by which the program finds its data: null or an address in the heap. */
    void set_root(void *root)
    {
        if (root && !pagemark_saved_heap_contains(get(), root))
            throw error(PAGEMARK_STATUS_OUT_OF_RANGE, "the root is not in the heap");
        root_->root = root;
    }

    /* The root; if it is null, a new object, which gets the resource if it takes one. */
    template <class T, class... Arguments> T &root_or_make(Arguments &&...arguments)
    {
        if (!root_->root)
            root_->root = allocator().template new_object<T>(std::forward<Arguments>(arguments)...);
        return *root<T>();
    }

    pagemark_saved_heap *get() const noexcept { return handle_.get(); }

private:
    explicit saved_heap(pagemark_saved_heap *owned) noexcept : handle_(owned) {}

    static saved_heap opened_heap(pagemark_saved_heap *owned)
    {
        saved_heap heap(owned);
        void *root = pagemark_saved_heap_root(owned);
        std::uint64_t magic = 0;
        if (root)
            std::memcpy(&magic, root, sizeof magic);
        if (magic != detail::heap_root::magic_number)
            throw error(PAGEMARK_STATUS_OTHER_HEAP, "the heap was made by a program in another language");
        heap.root_ = static_cast<detail::heap_root *>(root);
        heap.make_resource();
        return heap;
    }

    /* In each program anew: its virtual table is where this program has it. */
    void make_resource() noexcept { ::new (root_->resource) detail::heap_resource(get()); }

    detail::owner<pagemark_saved_heap, pagemark_saved_heap_free> handle_;
    detail::heap_root *root_ = nullptr;
};

} // namespace pagemark

#endif /* PAGEMARK_HPP */
