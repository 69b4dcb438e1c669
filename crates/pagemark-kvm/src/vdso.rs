//! The vDSO, the kernel's library in each process: functions that tell the time without a system
//! call. The program gets a copy of this process's, before which the kernel's data is mapped.

use std::ops::Range;

/// Functions of the library, and the system calls that do the same with the same arguments.
const CALLS: [(&[u8], i64); 6] = [
    (b"clock_gettime", libc::SYS_clock_gettime),
    (b"gettimeofday", libc::SYS_gettimeofday),
    (b"time", libc::SYS_time),
    (b"clock_getres", libc::SYS_clock_getres),
    (b"getcpu", libc::SYS_getcpu),
    (b"getrandom", libc::SYS_getrandom),
];
/// Some names begin so.
const PREFIX: &[u8] = b"__vdso_";
/// The type of the section of symbols.
const SYMBOLS: u32 = 11;
/// The type of a symbol that is a function.
const FUNCTION: u8 = 2;
const SYMBOL_BYTES: usize = 24;

/// A library as this process has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vdso {
    bytes: Vec<u8>,
    functions: Vec<Function>,
}

/// A function of the library that a system call can replace.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Function {
    place: Range<usize>,
    call: i64,
}

fn number<const BYTES: usize>(bytes: &[u8], at: usize) -> Option<u64> {
    let part: [u8; BYTES] = bytes.get(at..at.checked_add(BYTES)?)?.try_into().ok()?;
    let mut word = [0; 8];
    word[..BYTES].copy_from_slice(&part);
    Some(u64::from_le_bytes(word))
}

/// A section of an ELF file: its type, the section it refers to, its content.
fn section(bytes: &[u8], index: u64) -> Option<(u32, u64, &[u8])> {
    let (headers, size) = (number::<8>(bytes, 0x28)?, number::<2>(bytes, 0x3a)?);
    let header = usize::try_from(headers.checked_add(index.checked_mul(size)?)?).ok()?;
    let field = |offset: usize| number::<8>(bytes, header.checked_add(offset)?);
    let (start, len) = (field(24)?, field(32)?);
    let content = bytes.get(usize::try_from(start).ok()?..usize::try_from(start.checked_add(len)?).ok()?);
    let link = number::<4>(bytes, header.checked_add(40)?)?;
    Some((number::<4>(bytes, header.checked_add(4)?)? as u32, link, content.unwrap_or_default()))
}

/// Instructions that make the system call `number` and return its result.
fn call(number: i64) -> Vec<u8> {
    // endbr64
    let mut code = vec![0xf3, 0x0f, 0x1e, 0xfa];
    // cmp r8, -1; je: whoever asks what the function needs is told that it does not exist.
    if number == libc::SYS_getrandom {
        code.extend([0x49, 0x83, 0xf8, 0xff, 0x74, 0x08]);
    }
    // mov eax, number; syscall; ret
    code.push(0xb8);
    code.extend((number as u32).to_le_bytes());
    code.extend([0x0f, 0x05, 0xc3]);
    if number == libc::SYS_getrandom {
        // mov rax, -ENOSYS; ret
        code.extend([0x48, 0xc7, 0xc0]);
        code.extend((-libc::ENOSYS).to_le_bytes());
        code.push(0xc3);
    }
    code
}

/// Instructions that go on at `address`, with the same arguments.
fn jump(address: u64) -> Vec<u8> {
    // endbr64; mov rax, address; jmp rax
    let mut code = vec![0xf3, 0x0f, 0x1e, 0xfa, 0x48, 0xb8];
    code.extend(address.to_le_bytes());
    code.extend([0xff, 0xe0]);
    code
}

impl Vdso {
    /// The library that has this content. None if it is not as Linux makes it.
    pub fn of(bytes: Vec<u8>) -> Option<Vdso> {
        let sections = number::<2>(&bytes, 0x3c)?;
        let (_, link, symbols) =
            (0..sections).filter_map(|index| section(&bytes, index)).find(|(kind, ..)| *kind == SYMBOLS)?;
        let (_, _, names) = section(&bytes, link)?;
        let mut functions = Vec::new();
        for symbol in symbols.chunks_exact(SYMBOL_BYTES) {
            let name = names.get(number::<4>(symbol, 0)? as usize..)?.split(|byte| *byte == 0).next()?;
            let name = name.strip_prefix(PREFIX).unwrap_or(name);
            let is_function = symbol[4] & 15 == FUNCTION && number::<2>(symbol, 6)? != 0;
            let Some((_, number_of_call)) = CALLS.iter().find(|(known, _)| is_function && *known == name) else {
                continue;
            };
            let start = usize::try_from(number::<8>(symbol, 8)?).ok()?;
            let place = start..start.checked_add(usize::try_from(number::<8>(symbol, 16)?).ok()?)?;
            bytes.get(place.clone()).filter(|code| code.len() >= call(*number_of_call).len())?;
            functions.push(Function { place, call: *number_of_call });
        }
        let vdso = Vdso { bytes, functions };
        (vdso.function(libc::SYS_clock_gettime).is_some() && vdso.function(libc::SYS_getcpu).is_some()).then_some(vdso)
    }

    /// As this process has it.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Where the function is that does what a system call does.
    pub fn function(&self, call: i64) -> Option<u64> {
        self.functions.iter().find(|function| function.call == call).map(|function| function.place.start as u64)
    }

    /// The library for the program: its functions read the kernel's data, or make system calls if
    /// not `has_data`. The number of the processor is asked for in any case, because the machine
    /// does not have it where the function looks.
    pub fn text(&self, has_data: bool) -> Vec<u8> {
        let needs_call = |function: &Function| !has_data || function.call == libc::SYS_getcpu;
        self.text_with(|function| needs_call(function).then(|| call(function.call)))
    }

    /// The library for the program outside of the machine: its functions lead to those of the
    /// kernel's library at `image`, or make system calls where there is no room to do so.
    pub fn text_leading_to(&self, image: u64) -> Vec<u8> {
        self.text_with(|Function { place, call: number }| {
            let code = jump(image + place.start as u64);
            Some(if code.len() <= place.len() { code } else { call(*number) })
        })
    }

    /// The library with other instructions at the begin of functions.
    fn text_with(&self, code_of: impl Fn(&Function) -> Option<Vec<u8>>) -> Vec<u8> {
        let mut text = self.bytes.clone();
        for function in &self.functions {
            if let Some(code) = code_of(function) {
                let start = function.place.start;
                text[start..start + code.len()].copy_from_slice(&code);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::host_vdso;

    fn own() -> Option<Vdso> {
        let own = host_vdso::find().expect("/proc")?;
        Some(Vdso::of(own.image).expect("a vDSO as Linux makes it"))
    }

    /// Calls a function of `text` with up to five arguments.
    fn run(memory: &host_vdso::tests::Executable, at: u64, arguments: [u64; 5]) -> i64 {
        memory.call(at, arguments)
    }

    #[test]
    fn functions_become_system_calls() {
        let Some(vdso) = own() else { pagemark_testing::skip!("this kernel maps no vDSO") };
        let memory = host_vdso::tests::Executable::new(&vdso.text(false));
        let at = |call| vdso.function(call);
        let mut time = [0u64; 2];
        let pointer = time.as_mut_ptr() as u64;
        let (clock, get) = (libc::CLOCK_MONOTONIC as u64, at(libc::SYS_clock_gettime).expect("checked"));
        let now = || std::time::Duration::from_nanos(pagemark_monotonic());
        let before = now();
        assert_eq!(run(&memory, get, [clock, pointer, 0, 0, 0]), 0);
        let found = std::time::Duration::new(time[0], time[1] as u32);
        assert!(before <= found && found <= now(), "{before:?} {found:?}");
        assert_eq!(run(&memory, get, [999, pointer, 0, 0, 0]), -i64::from(libc::EINVAL));
        if let Some(seconds) = at(libc::SYS_time) {
            let found = run(&memory, seconds, [0; 5]);
            // SAFETY: only asks.
            let now = unsafe { libc::time(std::ptr::null_mut()) };
            assert!((now - 60..=now).contains(&found));
        }
        if let Some(random) = at(libc::SYS_getrandom) {
            let mut bytes = [0u8; 32];
            assert_eq!(run(&memory, random, [bytes.as_mut_ptr() as u64, 32, 0, 0, 0]), 32);
            assert_ne!(bytes, [0; 32]);
            assert_eq!(run(&memory, random, [0, 0, 0, pointer, u64::MAX]), -i64::from(libc::ENOSYS));
        }
        let mut processor = u32::MAX;
        let getcpu = at(libc::SYS_getcpu).expect("checked");
        assert_eq!(run(&memory, getcpu, [&raw mut processor as u64, 0, 0, 0, 0]), 0);
        assert_ne!(processor, u32::MAX);
    }

    #[test]
    fn functions_lead_to_those_of_the_kernels_library() {
        let Some(own) = host_vdso::find().expect("/proc") else { pagemark_testing::skip!("this kernel maps no vDSO") };
        let vdso = Vdso::of(own.image).expect("a vDSO as Linux makes it");
        let memory = host_vdso::tests::Executable::new(&vdso.text_leading_to(own.data.end));
        let mut time = [0u64; 2];
        let get = vdso.function(libc::SYS_clock_gettime).expect("checked");
        let before = pagemark_monotonic();
        let arguments = [libc::CLOCK_MONOTONIC as u64, time.as_mut_ptr() as u64, 0, 0, 0];
        assert_eq!(run(&memory, get, arguments), 0);
        let found = time[0] * 1_000_000_000 + time[1];
        assert!((before..=pagemark_monotonic()).contains(&found));
        let mut processor = u32::MAX;
        let getcpu = vdso.function(libc::SYS_getcpu).expect("checked");
        assert_eq!(run(&memory, getcpu, [&raw mut processor as u64, 0, 0, 0, 0]), 0);
        assert_ne!(processor, u32::MAX);
    }

    /// The monotonic clock, by a system call.
    fn pagemark_monotonic() -> u64 {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: fills the value.
        unsafe { libc::syscall(libc::SYS_clock_gettime, libc::CLOCK_MONOTONIC, &mut time) };
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }

    #[test]
    fn damaged_libraries_are_refused() {
        let Some(vdso) = own() else { pagemark_testing::skip!("this kernel maps no vDSO") };
        let bytes = vdso.bytes();
        for len in (0..bytes.len()).step_by(7) {
            let _ = Vdso::of(bytes[..len].to_vec());
        }
        for at in (0..bytes.len()).step_by(3) {
            let mut damaged = bytes.to_vec();
            damaged[at] ^= 0xff;
            if let Some(vdso) = Vdso::of(damaged) {
                vdso.text(false);
            }
        }
        assert_eq!(Vdso::of(Vec::new()), None);
        assert_eq!(Vdso::of(vec![0; 4096]), None);
    }
}
