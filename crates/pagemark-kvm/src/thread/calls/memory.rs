//! System calls that change what is mapped. The guest's entries are cleared before the host's
//! mapping changes, with the space locked.

use crate::layout::{PAGE, PROGRAM_END, PROGRAM_START, TABLE_SPAN, is_program, page_ceil, page_floor};
use crate::machine::{Machine, Space};
use crate::mappings::{Protection, on_host};
use crate::sys::{descriptors, host_call, limits};

use super::Refusal;
use super::populate::Populate;

/// What a call returns, or how it is refused.
pub type Result = std::result::Result<i64, Refusal>;

const MAP_32BIT_END: u64 = 0x8000_0000;

fn is_page(address: u64) -> bool {
    address.is_multiple_of(PAGE)
}

/// Bytes of a segment of shared memory, in whole pages.
fn bytes_of_segment(id: u64) -> std::result::Result<u64, i32> {
    let mut about = std::mem::MaybeUninit::<libc::shmid_ds>::uninit();
    // SAFETY: fills the value if it succeeds.
    let bytes = unsafe {
        if libc::shmctl(id as i32, libc::IPC_STAT, about.as_mut_ptr()) < 0 {
            return Err(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EINVAL));
        }
        about.assume_init().shm_segsz as u64
    };
    page_ceil(bytes).filter(|bytes| *bytes > 0).ok_or(libc::EINVAL)
}

/// Makes a call on memory of the program.
pub(super) fn host(number: i64, arguments: [u64; 6]) -> std::result::Result<i64, i32> {
    // SAFETY: the callers pass ranges of the program's addresses only, where no value of the
    // monitor lies.
    let result = unsafe { host_call::immediate(number, arguments) };
    host_call::errno(result).map_or(Ok(result), Err)
}

/// `ENOMEM` if the program's limit does not allow it to have `bytes` more.
fn check_limit(space: &Space, bytes: u64) -> std::result::Result<(), Refusal> {
    let limit = limits::of_program();
    let is_allowed = limit == libc::RLIM_INFINITY || space.mappings.bytes().saturating_add(bytes) <= limit;
    if is_allowed { Ok(()) } else { Err(libc::ENOMEM.into()) }
}

/// How many bytes of `start..end` are mapped.
fn bytes_within(space: &Space, start: u64, end: u64) -> u64 {
    space.mappings.within(start, end).iter().map(|part| part.end - part.start).sum()
}

impl Machine {
    fn reload_or_fail(&self, space: &mut Space) -> std::result::Result<(), Refusal> {
        self.reload(space).map_err(|error| Refusal::lacking(libc::ENOMEM, error.to_string()))
    }

    /// `mmap`.
    pub fn mmap(&self, [hint, len, protection, flags, fd, offset]: [u64; 6]) -> Result {
        let (populate, flags) = Populate::of(len, protection, flags);
        let start = self.map([hint, len, protection, flags, fd, offset])?;
        if let Some(populate) = populate {
            populate.make(start);
        }
        Ok(start)
    }

    fn map(&self, [hint, len, protection, flags, fd, offset]: [u64; 6]) -> Result {
        let has = |flag: i32| flags & flag as u64 != 0;
        if has(libc::MAP_GROWSDOWN) {
            return Err(Refusal::lacking(libc::EINVAL, "MAP_GROWSDOWN"));
        }
        if !has(libc::MAP_ANONYMOUS) && descriptors::is_ours(fd as i32) {
            return Err(libc::EBADF.into());
        }
        if len == 0 {
            // Linux looks for the file first.
            // SAFETY: only asks.
            let is_open = has(libc::MAP_ANONYMOUS) || unsafe { libc::fcntl(fd as i32, libc::F_GETFD) } >= 0;
            return Err(if is_open { libc::EINVAL } else { libc::EBADF }.into());
        }
        let huge = match (has(libc::MAP_HUGETLB), flags >> libc::MAP_HUGE_SHIFT & 63) {
            (false, _) => PAGE,
            (true, 0) => 2 << 20,
            (true, log) => 1u64.checked_shl(log as u32).filter(|size| *size <= 1 << 30).ok_or(libc::EINVAL)?,
        };
        let len = len.checked_next_multiple_of(huge).filter(|len| *len <= PROGRAM_END).ok_or(libc::ENOMEM)?;
        let protection = on_host(protection);
        let mut space = self.space();
        let is_fixed = has(libc::MAP_FIXED) || has(libc::MAP_FIXED_NOREPLACE);
        let start = if is_fixed {
            if !is_page(hint) {
                return Err(libc::EINVAL.into());
            }
            if !is_program(hint, len) {
                return Err(if hint < PROGRAM_START { libc::EPERM } else { libc::ENOMEM }.into());
            }
            if has(libc::MAP_FIXED_NOREPLACE) && !space.mappings.is_free(hint, hint + len) {
                // A child does not have what its parent has mapped with MADV_DONTFORK.
                self.reload_or_fail(&mut space)?;
                if !space.mappings.is_free(hint, hint + len) {
                    return Err(libc::EEXIST.into());
                }
            }
            hint
        } else {
            let align = if len >= TABLE_SPAN { huge.max(TABLE_SPAN) } else { huge };
            let place = match (has(libc::MAP_32BIT), hint) {
                (true, _) => space.mappings.free_below(MAP_32BIT_END, len, align),
                (false, 0) => space.mappings.place_aligned(len, align),
                (false, hint) => {
                    let hint = page_floor(hint) / huge * huge;
                    let end = hint.checked_add(len).filter(|_| is_program(hint, len));
                    match end {
                        Some(end) if space.mappings.is_free(hint, end) => Some(hint),
                        _ => space.mappings.place_aligned(len, align),
                    }
                }
            };
            place.ok_or(libc::ENOMEM)?
        };
        check_limit(&space, len - bytes_within(&space, start, start + len))?;
        let was_free = space.mappings.is_free(start, start + len);
        self.clear(&mut space, start, start + len);
        // Where nothing is known to be mapped, nothing may be replaced.
        let placed = (flags & !(libc::MAP_32BIT as u64))
            | if was_free { libc::MAP_FIXED_NOREPLACE } else { libc::MAP_FIXED } as u64;
        let mut result = host(libc::SYS_mmap, [start, len, protection, placed, fd, offset]);
        if result == Err(libc::EEXIST) && was_free && !has(libc::MAP_FIXED_NOREPLACE) {
            // The kernel has a mapping there that was not known.
            self.reload_or_fail(&mut space)?;
            let start = if is_fixed { Some(start) } else { space.mappings.place_aligned(len, huge) };
            let start = start.ok_or(libc::ENOMEM)?;
            let placed = (flags & !(libc::MAP_32BIT as u64)) | libc::MAP_FIXED as u64;
            self.clear(&mut space, start, start + len);
            result = host(libc::SYS_mmap, [start, len, protection, placed, fd, offset]);
        }
        match result {
            Ok(at) => {
                space.mappings.insert(at as u64, at as u64 + len, Protection::new(protection));
                Ok(at)
            }
            Err(error) => {
                if !was_free {
                    self.reload_or_fail(&mut space)?;
                }
                Err(error.into())
            }
        }
    }

    /// `munmap`.
    pub fn munmap(&self, start: u64, len: u64) -> Result {
        let len = page_ceil(len).filter(|len| *len > 0).ok_or(libc::EINVAL)?;
        if !is_page(start) || start.checked_add(len).is_none_or(|end| end > PROGRAM_END) {
            return Err(libc::EINVAL.into());
        }
        let mut space = self.space();
        self.clear(&mut space, start, start + len);
        match host(libc::SYS_munmap, [start, len, 0, 0, 0, 0]) {
            Ok(result) => {
                space.mappings.remove(start, start + len);
                Ok(result)
            }
            Err(error) => {
                self.reload_or_fail(&mut space)?;
                Err(error.into())
            }
        }
    }

    /// `mprotect`.
    pub fn mprotect(&self, start: u64, len: u64, protection: u64) -> Result {
        if !is_page(start) {
            return Err(libc::EINVAL.into());
        }
        let end = page_ceil(len).and_then(|len| start.checked_add(len)).ok_or(libc::ENOMEM)?;
        if end > PROGRAM_END {
            return Err(libc::ENOMEM.into());
        }
        let mut space = self.space();
        let mut start = start;
        let mut protection = protection;
        if protection & libc::PROT_GROWSDOWN as u64 != 0 {
            // The stack does not grow: the whole of it is mapped.
            protection &= !(libc::PROT_GROWSDOWN as u64);
            start = space.mappings.find(start).ok_or(libc::ENOMEM)?.start;
        }
        let protection = on_host(protection);
        self.clear_to_protect(&mut space, start, end);
        match host(libc::SYS_mprotect, [start, end - start, protection, 0, 0, 0]) {
            Ok(result) => {
                space.mappings.protect(start, end, Protection::new(protection));
                Ok(result)
            }
            Err(error) => {
                // Part of it may have changed.
                self.reload_or_fail(&mut space)?;
                Err(error.into())
            }
        }
    }

    /// `mremap`.
    pub fn mremap(&self, [old, old_len, new_len, flags, target, _]: [u64; 6]) -> Result {
        let may_move = flags & libc::MREMAP_MAYMOVE as u64 != 0;
        let is_fixed = flags & libc::MREMAP_FIXED as u64 != 0;
        let keeps = flags & libc::MREMAP_DONTUNMAP as u64 != 0;
        let known = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP) as u64;
        let (old_len, new_len) = (page_ceil(old_len), page_ceil(new_len).filter(|len| *len > 0));
        let (old_len, new_len) = (old_len.ok_or(libc::EINVAL)?, new_len.ok_or(libc::EINVAL)?);
        if !is_page(old) || flags & !known != 0 || (is_fixed || keeps) && !may_move {
            return Err(libc::EINVAL.into());
        }
        if !is_program(old, old_len.max(PAGE)) {
            return Err(libc::EFAULT.into());
        }
        let mut space = self.space();
        let Some(mapping) = space.mappings.find(old) else { return Err(libc::EFAULT.into()) };
        let protection = mapping.protection;
        if !is_fixed && !keeps && new_len <= old_len {
            if new_len == old_len {
                return Ok(old as i64);
            }
            drop(space);
            return self.munmap(old + new_len, old_len - new_len).map(|_| old as i64);
        }
        check_limit(&space, if keeps { new_len } else { new_len.saturating_sub(old_len) })?;
        let in_place = !is_fixed && !keeps && old_len > 0 && is_program(old, new_len);
        if in_place && space.mappings.is_free(old + old_len, old + new_len) {
            match host(libc::SYS_mremap, [old, old_len, new_len, 0, 0, 0]) {
                Ok(_) => {
                    space.mappings.insert(old + old_len, old + new_len, protection);
                    return Ok(old as i64);
                }
                Err(libc::ENOMEM) if may_move => {}
                Err(error) => return Err(error.into()),
            }
        }
        if !may_move {
            return Err(libc::ENOMEM.into());
        }
        let target = if is_fixed {
            if !is_page(target) || !is_program(target, new_len) {
                return Err(libc::EINVAL.into());
            }
            target
        } else {
            let align = if new_len >= TABLE_SPAN { TABLE_SPAN } else { PAGE };
            space.mappings.place_aligned(new_len, align).ok_or(libc::ENOMEM)?
        };
        // Linux 6.17 moves several mappings at once, and what is between them stays at the target.
        let is_one = old + old_len <= mapping.end;
        self.clear(&mut space, old, old + old_len);
        self.clear(&mut space, target, target + new_len);
        let flags = flags | libc::MREMAP_FIXED as u64;
        match host(libc::SYS_mremap, [old, old_len, new_len, flags, target, 0]) {
            Ok(at) if is_one => {
                if !keeps {
                    space.mappings.remove(old, old + old_len);
                }
                space.mappings.insert(target, target + new_len, protection);
                Ok(at)
            }
            moved => {
                self.reload_or_fail(&mut space)?;
                Ok(moved?)
            }
        }
    }

    /// `shmat`.
    pub fn shmat(&self, [id, hint, flags, ..]: [u64; 6]) -> Result {
        let has = |flag: i32| flags & flag as u64 != 0;
        let len = bytes_of_segment(id)?;
        let hint = if has(libc::SHM_RND) { page_floor(hint) } else { hint };
        if !is_page(hint) || hint == 0 && has(libc::SHM_REMAP) || hint != 0 && !is_program(hint, len) {
            return Err(libc::EINVAL.into());
        }
        let may_write = if has(libc::SHM_RDONLY) { 0 } else { libc::PROT_WRITE };
        let may_execute = if has(libc::SHM_EXEC) { libc::PROT_EXEC } else { 0 };
        let protection = Protection::new((libc::PROT_READ | may_write | may_execute) as u64);
        let mut space = self.space();
        check_limit(&space, if hint == 0 { len } else { len - bytes_within(&space, hint, hint + len) })?;
        // Where the kernel has a mapping that was not known, there is another place.
        for is_last in [false, true] {
            let start = if hint != 0 { hint } else { space.mappings.place_aligned(len, PAGE).ok_or(libc::ENOMEM)? };
            if !space.mappings.is_free(start, start + len) && !has(libc::SHM_REMAP) {
                return Err(libc::EINVAL.into());
            }
            self.clear(&mut space, start, start + len);
            match host(libc::SYS_shmat, [id, start, flags, 0, 0, 0]) {
                Ok(at) => {
                    space.mappings.insert(start, start + len, protection);
                    return Ok(at);
                }
                Err(error) => {
                    self.reload_or_fail(&mut space)?;
                    if is_last || error != libc::EINVAL || hint != 0 {
                        return Err(error.into());
                    }
                }
            }
        }
        Err(libc::EINVAL.into())
    }

    /// `shmdt`.
    pub fn shmdt(&self, start: u64) -> Result {
        let mut space = self.space();
        let Some(mapping) = space.mappings.find(start) else { return Err(libc::EINVAL.into()) };
        // The kernel knows how long it is. Other entries are made again.
        self.clear_entries(&mut space, start, mapping.end);
        let result = host(libc::SYS_shmdt, [start, 0, 0, 0, 0, 0])?;
        self.reload_or_fail(&mut space)?;
        Ok(result)
    }

    /// `brk`: the end of the heap, which is changed to `end` if that is possible.
    pub fn brk(&self, end: u64) -> Result {
        let mut space = self.space();
        let now = space.heap_end;
        if end < space.heap_start || end > PROGRAM_END - PAGE {
            return Ok(now as i64);
        }
        let (old_page, new_page) = (now.next_multiple_of(PAGE), end.next_multiple_of(PAGE));
        if new_page > old_page {
            let has_room = check_limit(&space, new_page - old_page).is_ok();
            if !has_room || !space.mappings.is_free(old_page, new_page) {
                return Ok(now as i64);
            }
            let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
            let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE) as u64;
            if host(libc::SYS_mmap, [old_page, new_page - old_page, protection, flags, u64::MAX, 0]).is_err() {
                return Ok(now as i64);
            }
            space.mappings.insert(old_page, new_page, Protection::new(protection));
        } else if new_page < old_page {
            self.clear(&mut space, new_page, old_page);
            if host(libc::SYS_munmap, [new_page, old_page - new_page, 0, 0, 0, 0]).is_err() {
                return Ok(now as i64);
            }
            space.mappings.remove(new_page, old_page);
        }
        space.heap_end = end;
        Ok(end as i64)
    }
}
