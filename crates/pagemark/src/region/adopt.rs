//! Adoption: existing memory becomes a region.

use std::ptr::NonNull;

use pagemark_linux::memory::Memory;
use pagemark_linux::own_mappings::{self, OwnMapping};

use super::claim::Claim;
use super::{Region, RegionMemory, RegionOptions};
use crate::track::{OwnMemory, Scope};
use crate::{Address, AddressRangeExt, ByteCount, Error, Mechanism, PAGE_SIZE, Range, RangeSet};

impl Region {
    /// Makes existing memory a region: whole pages, in one or several mappings, readable, writable
    /// and not executable. The content stays as it is, also the content of files that the page
    /// table does not have yet. Memory of hugetlb is adopted in whole huge pages.
    ///
    /// Dropping the region ends tracking and keeps the memory, except that `emulate` turns private
    /// memory into shared anonymous memory, which children made by `fork` do not inherit, and which
    /// is not locked and has no advice and no memory policy of before (`mlock`, `madvise`,
    /// `mbind`), also where the call fails after that.
    ///
    /// Shared memory is refused, because most mechanisms do not see writes of other processes, or
    /// through other mappings of this process. `compare` and `full` see all writes and accept it;
    /// for the others see [`Region::adopt_shared`].
    ///
    /// # Errors
    /// `ErrorKind::Unaligned`, `ErrorKind::Overlaps`, `ErrorKind::NotMapped`,
    /// `ErrorKind::NotData`, `ErrorKind::BeyondFile`, `ErrorKind::Shared`,
    /// `ErrorKind::Unavailable`, `ErrorKind::System`. After an error the memory is unchanged.
    ///
    /// # Safety
    /// While the region exists, the memory stays mapped, no other code changes its mapping or
    /// protection, and no mapped file becomes shorter. The file of a private mapping is not
    /// written. No Rust reference to the memory is used while a call of the region may write it
    /// ([`Region::rollback`], [`Region::restore`], [`Region::discard`], [`Region::write`],
    /// [`Region::read_from`], [`Region::load`]). While a call reads it (a commit, a snapshot, a
    /// save among them), no reference through which it may be written is used, and other threads
    /// write it only by atomic operations, or in ways that the compiler does not see. Under
    /// `emulate`, no other code accesses the memory during this call. Under `mprotect`, `emulate`
    /// and `uffd`, it holds nothing that the program's allocator or a handler of SIGSEGV writes:
    /// the handling of a write would wait for itself. Under `mprotect`, children made by `fork`
    /// inherit the memory (no `MADV_DONTFORK`): a child that drops the region makes the addresses
    /// writable, whatever it has mapped there.
    pub unsafe fn adopt(start: NonNull<u8>, bytes: usize, options: RegionOptions) -> Result<Region, Error> {
        // SAFETY: the caller guarantees it.
        unsafe { adopt(start, bytes, options, false) }
    }

    /// Like [`Region::adopt`], also for shared memory, of which the caller promises the sole use. A
    /// mechanism other than `compare` and `full` does not report writes that break the promise:
    /// they are missing in commits and snapshots, and rollback does not undo them.
    ///
    /// # Errors
    /// Those of [`Region::adopt`], without `ErrorKind::Shared`. `emulate` cannot track shared
    /// memory.
    ///
    /// # Safety
    /// Those of [`Region::adopt`]. While the region exists, the memory is written only by this
    /// process and only at these addresses: not by another process, not through another mapping and
    /// not through a file descriptor.
    pub unsafe fn adopt_shared(start: NonNull<u8>, bytes: usize, options: RegionOptions) -> Result<Region, Error> {
        // SAFETY: the caller guarantees it.
        unsafe { adopt(start, bytes, RegionOptions { sole_use: true, ..options }, true) }
    }
}

/// # Safety
/// Those of [`Region::adopt`]; with `sole_use` as for [`Region::adopt_shared`].
unsafe fn adopt(start: NonNull<u8>, bytes: usize, options: RegionOptions, sole_use: bool) -> Result<Region, Error> {
    let address = Address::of(start.as_ptr());
    let unaligned = |page_bytes| Error::unaligned(address, bytes, page_bytes);
    let end = address.checked_add(ByteCount::from(bytes));
    let aligned = address.is_page_aligned() && bytes.is_multiple_of(PAGE_SIZE) && bytes > 0;
    let range = address..end.filter(|_| aligned).ok_or_else(|| unaligned(ByteCount::PAGE))?;
    let claim = Claim::new(range.clone())?;
    let mappings = own_mappings::describe(&range).map_err(Error::system("reading /proc/self/maps"))?;
    check_mappings(&range, &mappings)?;
    // The kernel maps, protects and frees huge pages as a whole. Mappings end at such pages.
    let splits_page = |mapping: &&OwnMapping| {
        let part = mapping.range.overlap(&range);
        [part.start, part.end].iter().any(|border| !border.get().is_multiple_of(mapping.page_bytes.get()))
    };
    if let Some(split) = mappings.iter().find(splits_page) {
        return Err(unaligned(split.page_bytes));
    }
    check_files(&range, &mappings)?;
    let mechanism = options.mechanism.unwrap_or_else(|| Mechanism::choose(Scope::OwnMemory));
    let shared = mappings.iter().find(|mapping| mapping.is_shared);
    if let Some(shared) = shared.filter(|_| !sole_use && !mechanism.entry().sees_other_mappings) {
        return Err(Error::shared(shared.range.overlap(&range), mechanism));
    }
    // SAFETY: the range was checked, and the caller guarantees the rest.
    let memory = unsafe { OwnMemory::of_mappings(range, &mappings) };
    Region::track(RegionMemory { claim, start, _mapping: None }, memory, options)
}

/// Checks that all of `range` is mapped, and plain data.
fn check_mappings(range: &Range, mappings: &[OwnMapping]) -> Result<(), Error> {
    let mapped: RangeSet = mappings.iter().map(|mapping| mapping.range.clone()).collect();
    if !mapped.covers(range.clone()) {
        return Err(Error::not_mapped(range.clone()));
    }
    if !mappings.iter().all(OwnMapping::is_data) {
        return Err(Error::not_data(range.clone()));
    }
    Ok(())
}

/// Checks that files are as long as their mappings. An access beyond the page in which a file ends
/// raises SIGBUS, so the last page of each mapping decides.
fn check_files(range: &Range, mappings: &[OwnMapping]) -> Result<(), Error> {
    let mut content = [0; PAGE_SIZE];
    for mapping in mappings.iter().filter(|mapping| mapping.file.is_some()) {
        let part = mapping.range.overlap(range);
        let last = part.end - ByteCount::of_pages(1)..part.end;
        let missing = Memory::of_this_process()
            .and_then(|memory| memory.read(&[last], &mut content))
            .map_err(Error::system("reading /proc/self/mem"))?;
        if !missing.is_empty() {
            return Err(Error::beyond_file(part));
        }
    }
    Ok(())
}
