//! Random store instructions, by the processor and by the mechanisms that execute stores: both
//! leave the same registers, flags and memory.

use std::arch::naked_asm;

use pagemark::track::{OwnMemory, Scope};
use pagemark::{Address, ByteCount, ErrorKind, Mechanism, PAGE_SIZE, RangeSet, Tracker};
use pagemark_linux::own_memory::Mapping;
use pagemark_testing::{assert_oracle, assert_oracle_eq};

const CASES: usize = 3000;
/// Cases between two collects: few, so that hardly a page is opened as it has many stores.
const INTERVAL: usize = 8;
const PAGES: usize = 6;
const BYTES: usize = PAGES * PAGE_SIZE;

/// The numbers of registers in encodings.
const RCX: u8 = 1;
const RSP: u8 = 4;
const RSI: u8 = 6;
const RDI: u8 = 7;

/// Bits of values that are often equal, for instructions that compare.
const FEW: u64 = 0x0101_0101_0101_0101;

/// The arithmetic flags.
const FLAGS: u64 = 0x8d5;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() >> 33) as usize % end
    }

    fn chance(&mut self, of: usize) -> bool {
        self.below(of) == 0
    }

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }
}

/// The state of a thread: registers in the order of encodings, flags, and vector registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
struct State {
    registers: [u64; 16],
    flags: u64,
    unused: u64,
    vectors: [[u64; 2]; 16],
}

/// A store, and the state before it.
#[derive(Debug)]
struct Case {
    code: Vec<u8>,
    state: State,
}

/// What follows the opcode.
#[derive(Clone, Copy)]
struct Shape {
    opcode: &'static [u8],
    /// The operation is in the operand's byte.
    extension: Option<u8>,
    immediate: Immediate,
    /// The operand is a byte.
    is_byte: bool,
    can_lock: bool,
    /// Bytes to which the operand must be aligned.
    alignment: usize,
    /// A prefix that is part of the opcode: the instruction stores a vector register.
    vector_prefix: Option<&'static [u8]>,
}

#[derive(Clone, Copy, PartialEq)]
enum Immediate {
    None,
    Byte,
    /// As large as the operand, up to four bytes.
    Operand,
}

fn shape(random: &mut Random) -> Shape {
    let plain = Shape {
        opcode: &[],
        extension: None,
        immediate: Immediate::None,
        is_byte: false,
        can_lock: false,
        alignment: 1,
        vector_prefix: None,
    };
    const ARITHMETIC: [&[u8]; 14] = [
        &[0x00],
        &[0x01],
        &[0x08],
        &[0x09],
        &[0x10],
        &[0x11],
        &[0x18],
        &[0x19],
        &[0x20],
        &[0x21],
        &[0x28],
        &[0x29],
        &[0x30],
        &[0x31],
    ];
    const SET: [&[u8]; 16] = [
        &[0x0f, 0x90],
        &[0x0f, 0x91],
        &[0x0f, 0x92],
        &[0x0f, 0x93],
        &[0x0f, 0x94],
        &[0x0f, 0x95],
        &[0x0f, 0x96],
        &[0x0f, 0x97],
        &[0x0f, 0x98],
        &[0x0f, 0x99],
        &[0x0f, 0x9a],
        &[0x0f, 0x9b],
        &[0x0f, 0x9c],
        &[0x0f, 0x9d],
        &[0x0f, 0x9e],
        &[0x0f, 0x9f],
    ];
    const EXCHANGE: [&[u8]; 6] = [&[0x86], &[0x87], &[0x0f, 0xb0], &[0x0f, 0xb1], &[0x0f, 0xc0], &[0x0f, 0xc1]];
    let is_byte = |opcode: &[u8]| opcode[opcode.len() - 1].is_multiple_of(2);
    match random.below(15) {
        0 | 1 => {
            let opcode = random.of(&[&[0x88u8][..], &[0x89]]);
            Shape { opcode, is_byte: is_byte(opcode), ..plain }
        }
        2 | 3 => {
            let opcode = random.of(&ARITHMETIC);
            Shape { opcode, is_byte: is_byte(opcode), can_lock: true, ..plain }
        }
        4 => {
            let opcode = random.of(&EXCHANGE);
            Shape { opcode, is_byte: is_byte(opcode), can_lock: true, alignment: 8, ..plain }
        }
        5 => Shape { opcode: random.of(&[&[0x0fu8, 0xa4][..], &[0x0f, 0xac]]), immediate: Immediate::Byte, ..plain },
        6 => Shape { opcode: random.of(&[&[0x0fu8, 0xa5][..], &[0x0f, 0xad]]), ..plain },
        7 => Shape { opcode: random.of(&SET), extension: Some(0), is_byte: true, ..plain },
        8 => {
            let opcode = random.of(&[&[0x80u8][..], &[0x81], &[0x83]]);
            let immediate = if opcode[0] == 0x81 { Immediate::Operand } else { Immediate::Byte };
            let extension = Some(random.below(7) as u8);
            Shape { opcode, extension, immediate, is_byte: opcode[0] == 0x80, can_lock: true, ..plain }
        }
        9 => {
            let opcode = random.of(&[&[0xc6u8][..], &[0xc7]]);
            Shape { opcode, extension: Some(0), immediate: Immediate::Operand, is_byte: is_byte(opcode), ..plain }
        }
        10 => {
            let (opcode, extension) = random.of(&[
                (&[0xfeu8][..], 0),
                (&[0xfe], 1),
                (&[0xff], 0),
                (&[0xff], 1),
                (&[0xf6], 2),
                (&[0xf6], 3),
                (&[0xf7], 2),
                (&[0xf7], 3),
            ]);
            Shape { opcode, extension: Some(extension), is_byte: is_byte(opcode), can_lock: true, ..plain }
        }
        11 => {
            let opcode = random.of(&[&[0xc0u8][..], &[0xc1], &[0xd0], &[0xd1], &[0xd2], &[0xd3]]);
            let immediate = if opcode[0] < 0xd0 { Immediate::Byte } else { Immediate::None };
            let extension = Some(random.of(&[0, 1, 2, 3, 4, 5, 7]));
            Shape { opcode, extension, immediate, is_byte: is_byte(opcode), ..plain }
        }
        12 => {
            let extension = Some(5 + random.below(3) as u8);
            Shape { opcode: &[0x0f, 0xba], extension, immediate: Immediate::Byte, can_lock: true, ..plain }
        }
        13 => Shape { opcode: &[0x0f, 0xc7], extension: Some(1), can_lock: true, alignment: 16, ..plain },
        _ => {
            let (prefix, opcode, alignment) = random.of(&[
                (&[][..], &[0x0fu8, 0x11][..], 1),
                (&[0x66], &[0x0f, 0x11], 1),
                (&[0xf3], &[0x0f, 0x11], 1),
                (&[0xf2], &[0x0f, 0x11], 1),
                (&[], &[0x0f, 0x29], 16),
                (&[0x66], &[0x0f, 0x7f], 16),
                (&[0xf3], &[0x0f, 0x7f], 1),
                (&[0x66], &[0x0f, 0xd6], 1),
                (&[], &[0x0f, 0x13], 1),
                (&[], &[0x0f, 0x17], 1),
                (&[0x66], &[0x0f, 0x7e], 1),
                (&[], &[0x0f, 0x2b], 16),
                (&[0x66], &[0x0f, 0xe7], 16),
            ]);
            Shape { opcode, alignment, vector_prefix: Some(prefix), ..plain }
        }
    }
}

/// A random store to memory that begins at `start`.
fn case(random: &mut Random, start: u64) -> Case {
    let mut state = State {
        registers: std::array::from_fn(|_| if random.chance(3) { random.next() & FEW } else { random.next() }),
        flags: random.next() & FLAGS,
        unused: 0,
        vectors: std::array::from_fn(|_| [random.next(), random.next()]),
    };
    if random.chance(8) {
        return string(random, start, state);
    }
    let shape = shape(random);
    // Not each processor has `cmpxchg16b`.
    let is_wide = random.chance(2) && (shape.opcode != [0x0f, 0xc7] || is_x86_feature_detected!("cmpxchg16b"));
    let is_short = shape.vector_prefix.is_none() && random.chance(4);
    let locks = shape.can_lock && random.chance(3);
    let (base, index) = loop {
        let (base, index) = (random.below(16) as u8, random.below(16) as u8);
        if base != RSP && index != base {
            break (base, (index != RSP).then_some(index));
        }
    };
    let register = loop {
        let register = shape.extension.unwrap_or(random.below(16) as u8);
        // The runner needs its stack.
        if shape.extension.is_some() || shape.vector_prefix.is_some() || register != RSP {
            break register;
        }
    };
    let mut code = Vec::new();
    code.extend(locks.then_some(0xf0));
    // The width of `cmpxchg8b` is that of REX alone.
    code.extend((is_short && !shape.is_byte && shape.opcode != [0x0f, 0xc7]).then_some(0x66));
    code.extend(shape.vector_prefix.unwrap_or_default());
    let rex = u8::from(is_wide) << 3 | register >> 3 << 2 | index.map_or(0, |index| index >> 3) << 1 | base >> 3;
    if rex != 0 || random.chance(3) {
        code.push(0x40 | rex);
    }
    code.extend(shape.opcode);
    let far = random.chance(2);
    let scale = random.below(4) as u8;
    let has_index_byte = index.is_some() || base & 7 == RSP;
    let low = if has_index_byte { RSP } else { base & 7 };
    code.push((if far { 2 } else { 1 }) << 6 | (register & 7) << 3 | low);
    if has_index_byte {
        code.push(scale << 6 | index.map_or(RSP, |index| index & 7) << 3 | base & 7);
    }
    let displacement = if far { random.next() as i32 } else { i32::from(random.next() as i8) };
    code.extend(&displacement.to_le_bytes()[..if far { 4 } else { 1 }]);
    let operand_bytes = match (shape.is_byte, is_wide, is_short) {
        (true, ..) => 1,
        (_, true, _) => 4,
        (_, _, true) => 2,
        _ => 4,
    };
    let immediate_bytes = match shape.immediate {
        Immediate::None => 0,
        Immediate::Byte => 1,
        Immediate::Operand => operand_bytes,
    };
    code.extend(&random.next().to_le_bytes()[..immediate_bytes]);
    let mut offset = random.below(BYTES - 64);
    if random.chance(4) {
        // Across the boundary of two pages.
        offset = (1 + random.below(PAGES - 1)) * PAGE_SIZE - 1 - random.below(15);
    }
    // An atomic operation across two cache lines is not allowed everywhere.
    let alignment = if locks { shape.alignment.max(16) } else { shape.alignment };
    offset = offset / alignment * alignment;
    let scaled = index.map_or(0, |index| state.registers[usize::from(index)] << scale);
    let target = start + offset as u64;
    state.registers[usize::from(base)] = target.wrapping_sub(scaled).wrapping_sub(i64::from(displacement) as u64);
    Case { code, state }
}

/// `stos` or `movs`.
fn string(random: &mut Random, start: u64, mut state: State) -> Case {
    let mut code = Vec::new();
    code.extend(random.chance(2).then_some(0xf3));
    match random.below(3) {
        0 => code.push(0x66),
        1 => code.push(0x48),
        _ => {}
    }
    code.push(random.of(&[0xa4, 0xa5, 0xaa, 0xab]));
    state.registers[usize::from(RCX)] = random.below(60) as u64;
    for register in [RSI, RDI] {
        state.registers[usize::from(register)] = start + random.below(BYTES - 60 * 8) as u64;
    }
    Case { code, state }
}

/// Executes `code`, an instruction and a return, with all registers of `state` but the stack
/// pointer, and puts there what they are afterwards.
#[unsafe(naked)]
unsafe extern "C" fn run(state: *mut State, code: *const u8) {
    naked_asm!(
        "push rbx",
        "push rbp",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "push rdi",
        "push rsi",
        "movups xmm0, [rdi + 144]",
        "movups xmm1, [rdi + 160]",
        "movups xmm2, [rdi + 176]",
        "movups xmm3, [rdi + 192]",
        "movups xmm4, [rdi + 208]",
        "movups xmm5, [rdi + 224]",
        "movups xmm6, [rdi + 240]",
        "movups xmm7, [rdi + 256]",
        "movups xmm8, [rdi + 272]",
        "movups xmm9, [rdi + 288]",
        "movups xmm10, [rdi + 304]",
        "movups xmm11, [rdi + 320]",
        "movups xmm12, [rdi + 336]",
        "movups xmm13, [rdi + 352]",
        "movups xmm14, [rdi + 368]",
        "movups xmm15, [rdi + 384]",
        "push qword ptr [rdi + 128]",
        "popfq",
        "mov rax, [rdi]",
        "mov rcx, [rdi + 8]",
        "mov rdx, [rdi + 16]",
        "mov rbx, [rdi + 24]",
        "mov rbp, [rdi + 40]",
        "mov rsi, [rdi + 48]",
        "mov r8, [rdi + 64]",
        "mov r9, [rdi + 72]",
        "mov r10, [rdi + 80]",
        "mov r11, [rdi + 88]",
        "mov r12, [rdi + 96]",
        "mov r13, [rdi + 104]",
        "mov r14, [rdi + 112]",
        "mov r15, [rdi + 120]",
        "mov rdi, [rdi + 56]",
        "call [rsp]",
        "push rdi",
        "mov rdi, [rsp + 16]",
        "mov [rdi], rax",
        "mov [rdi + 8], rcx",
        "mov [rdi + 16], rdx",
        "mov [rdi + 24], rbx",
        "mov [rdi + 40], rbp",
        "mov [rdi + 48], rsi",
        "mov [rdi + 64], r8",
        "mov [rdi + 72], r9",
        "mov [rdi + 80], r10",
        "mov [rdi + 88], r11",
        "mov [rdi + 96], r12",
        "mov [rdi + 104], r13",
        "mov [rdi + 112], r14",
        "mov [rdi + 120], r15",
        "pop qword ptr [rdi + 56]",
        "pushfq",
        "pop rax",
        "and eax, 0x8d5",
        "mov [rdi + 128], rax",
        "movups [rdi + 144], xmm0",
        "movups [rdi + 160], xmm1",
        "movups [rdi + 176], xmm2",
        "movups [rdi + 192], xmm3",
        "movups [rdi + 208], xmm4",
        "movups [rdi + 224], xmm5",
        "movups [rdi + 240], xmm6",
        "movups [rdi + 256], xmm7",
        "movups [rdi + 272], xmm8",
        "movups [rdi + 288], xmm9",
        "movups [rdi + 304], xmm10",
        "movups [rdi + 320], xmm11",
        "movups [rdi + 336], xmm12",
        "movups [rdi + 352], xmm13",
        "movups [rdi + 368], xmm14",
        "movups [rdi + 384], xmm15",
        "add rsp, 16",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbp",
        "pop rbx",
        "ret",
    )
}

/// The code of all cases, each with a return behind it, in executable memory.
struct Code {
    memory: Mapping,
    starts: Vec<usize>,
}

impl Code {
    fn new(cases: &[Case]) -> Code {
        let memory = Mapping::new((cases.len() * 32).next_multiple_of(PAGE_SIZE)).unwrap();
        let mut starts = Vec::new();
        for (index, case) in cases.iter().enumerate() {
            let mut bytes = case.code.clone();
            bytes.push(0xc3);
            // SAFETY: each case has 32 bytes of the mapping.
            unsafe { memory.start().as_ptr().add(index * 32).copy_from(bytes.as_ptr(), bytes.len()) };
            starts.push(index * 32);
        }
        let protection = libc::PROT_READ | libc::PROT_EXEC;
        // SAFETY: the mapping is this function's.
        assert_eq!(unsafe { libc::mprotect(memory.start().as_ptr().cast(), memory.bytes(), protection) }, 0);
        Code { memory, starts }
    }

    fn run(&self, index: usize, before: &State) -> State {
        let mut state = *before;
        // SAFETY: the instruction writes to the memory of the test, and to registers that `run` saves.
        unsafe { run(&mut state, self.memory.start().as_ptr().add(self.starts[index])) };
        state
    }
}

fn fill(memory: &Mapping) {
    let mut random = Random(77);
    for word in 0..BYTES / 8 {
        // SAFETY: within the mapping, which only this thread uses.
        unsafe { memory.start().as_ptr().cast::<u64>().add(word).write_volatile(random.next() & FEW) };
    }
}

fn content(memory: &Mapping) -> Vec<u8> {
    // SAFETY: the mapping is readable, and no code writes it now.
    unsafe { std::slice::from_raw_parts(memory.start().as_ptr(), BYTES) }.to_vec()
}

#[test]
fn random_stores_are_those_of_the_processor() {
    match std::env::var("PAGEMARK_STORES_SEED") {
        Ok(seed) => compare(seed.parse().expect("a number")),
        // With the second, a copy overlaps what it copies from, by less than a unit.
        Err(_) => [0x1234_5678, 1001].into_iter().for_each(compare),
    }
}

fn compare(seed: u64) {
    for mechanism in [Mechanism::Emulate, Mechanism::KvmEmulate] {
        let memory = Mapping::new(BYTES).unwrap();
        // SAFETY: the mapping is private, lives longer than the tracker, and no code accesses it in a
        // collect.
        let own = unsafe { OwnMemory::new(memory.range()) }.unwrap();
        let mut tracker = match mechanism.tracker(Scope::OwnMemory, &own) {
            Ok(tracker) => tracker,
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                pagemark_testing::skipped(&error.to_string());
                continue;
            }
            Err(error) => panic!("{mechanism}: {error}"),
        };
        assert_eq!(tracker.granularity(), ByteCount::new(8));
        let mut random = Random(seed);
        let cases: Vec<Case> = (0..CASES).map(|_| case(&mut random, memory.range().start.get())).collect();
        let code = Code::new(&cases);
        fill(&memory);
        let expected: Vec<(State, Vec<u8>)> = cases
            .iter()
            .enumerate()
            .map(|(index, case)| {
                (
                    code.run(index, &case.state),
                    if index % INTERVAL == INTERVAL - 1 { content(&memory) } else { Vec::new() },
                )
            })
            .collect();
        fill(&memory);
        let all = RangeSet::from(memory.range());
        tracker.collect(&all, &mut RangeSet::new()).unwrap();
        let mut opened = 0;
        for (first, part) in cases.chunks(INTERVAL).enumerate() {
            let before = content(&memory);
            for (number, case) in part.iter().enumerate() {
                let index = first * INTERVAL + number;
                let state = code.run(index, &case.state);
                assert_oracle_eq!(state, expected[index].0, "{mechanism}: seed {seed}, {index}: {case:x?}");
            }
            let after = content(&memory);
            let expected = &expected[first * INTERVAL + INTERVAL - 1].1;
            assert_oracle!(after == *expected, "{mechanism}: seed {seed}: other memory after {:x?}", codes(part));
            let written = collect(&mut *tracker, &all);
            opened += written.iter().filter(|run| run.end.get() - run.start.get() >= PAGE_SIZE as u64).count();
            for offset in (0..BYTES).filter(|&offset| before[offset] != after[offset]) {
                let address = memory.range().start + ByteCount::from(offset);
                assert_oracle!(
                    written.contains(address),
                    "{mechanism}: seed {seed}: {offset:#x} was missed after {:x?}",
                    codes(part)
                );
            }
        }
        println!("{mechanism}: {CASES} stores, {opened} runs of whole pages");
        assert!(opened < CASES / 20, "{mechanism}: {opened} pages were opened");
    }
}

fn codes(cases: &[Case]) -> Vec<&[u8]> {
    cases.iter().map(|case| &case.code[..]).collect()
}

fn collect(tracker: &mut dyn Tracker, all: &RangeSet<Address>) -> RangeSet<Address> {
    let mut written = RangeSet::new();
    tracker.collect(all, &mut written).unwrap();
    written
}
