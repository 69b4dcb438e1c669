//! Compares random programs with a byte-by-byte shadow copy.

use std::collections::HashSet;

use pagemark_testing::{assert_oracle, assert_oracle_eq};
use proptest::prelude::*;
use proptest::sample::Index;

use super::chunks::ENTRY_BYTES;
use super::nodes::{FAN_OUT, NODE_BYTES};
use super::packing::Packing;
use super::*;
use crate::{AddressRangeExt, Error, ErrorKind, Range};

#[derive(Debug, Clone)]
enum Step {
    Write { area: usize, range: Span, content: Content },
    Take { area: usize, forget: Vec<Span>, over_reported: Vec<Span>, from: Parent },
    Restore { snapshot: Index, knows_current: bool, over_reported: Vec<Span> },
    Drop { snapshot: Index },
    Compare { a: Index, b: Index },
    Read { snapshot: Index, range: Span },
}

/// The base of a snapshot.
#[derive(Debug, Clone, Copy)]
enum Parent {
    Nothing,
    /// The content of the area at its last snapshot or restore.
    Current,
}

#[derive(Debug, Clone)]
enum Content {
    Fill(u8),
    Random(u64),
    CopyOf(Index),
}

/// A part of an area, as shares of its length.
type Span = (Index, Index);

fn span() -> impl Strategy<Value = Span> {
    (any::<Index>(), any::<Index>())
}

fn spans() -> impl Strategy<Value = Vec<Span>> {
    prop::collection::vec(span(), 0..3)
}

fn step() -> impl Strategy<Value = Step> {
    let content = prop_oneof![
        (0u8..3).prop_map(Content::Fill),
        any::<u64>().prop_map(Content::Random),
        any::<Index>().prop_map(Content::CopyOf)
    ];
    let parent = prop_oneof![1 => Just(Parent::Nothing), 4 => Just(Parent::Current)];
    prop_oneof![
        6 => (0usize..2, span(), content).prop_map(|(area, range, content)| Step::Write { area, range, content }),
        6 => (0usize..2, spans(), spans(), parent)
            .prop_map(|(area, forget, over_reported, from)| Step::Take { area, forget, over_reported, from }),
        3 => (any::<Index>(), any::<bool>(), spans())
            .prop_map(|(snapshot, knows_current, over_reported)| Step::Restore { snapshot, knows_current, over_reported }),
        2 => any::<Index>().prop_map(|snapshot| Step::Drop { snapshot }),
        1 => (any::<Index>(), any::<Index>()).prop_map(|(a, b)| Step::Compare { a, b }),
        1 => (any::<Index>(), span()).prop_map(|(snapshot, range)| Step::Read { snapshot, range }),
    ]
}

/// A snapshot and its expected content.
#[derive(Clone)]
struct Taken {
    area: usize,
    snapshot: Snapshot,
    expected: Vec<u8>,
}

struct TestArea {
    memory: Vec<u8>,
    /// The content of the memory at its last snapshot or restore; `dirty` was written since.
    current: Option<Taken>,
    dirty: RangeSet,
}

struct Program {
    store: SnapshotStore,
    areas: Vec<TestArea>,
    taken: Vec<Taken>,
}

fn part(bytes: usize, (a, b): &Span) -> Range {
    let (a, b) = (a.index(bytes + 1), b.index(bytes + 1));
    // Most ranges are short, some are long.
    offsets(if a % 3 == 0 { a.min(b)..a.max(b) } else { a..(a + b % 700).min(bytes) })
}

fn parts(bytes: usize, spans: &[Span]) -> RangeSet {
    spans.iter().map(|span| part(bytes, span)).collect()
}

impl Program {
    fn new(options: SnapshotOptions, lengths: [usize; 2]) -> Program {
        let area = |bytes| TestArea { memory: vec![0; bytes], current: None, dirty: RangeSet::new() };
        Program {
            store: SnapshotStore::with_options(options).unwrap(),
            areas: lengths.map(area).into(),
            taken: Vec::new(),
        }
    }

    fn chunk_bytes(&self) -> usize {
        self.store.options().chunk_bytes
    }

    /// The chunks of an area, clipped to it.
    fn chunks(&self, bytes: usize) -> Vec<Range> {
        let starts = (0..bytes).step_by(self.chunk_bytes());
        starts.map(|start| offsets(start..(start + self.chunk_bytes()).min(bytes))).collect()
    }

    fn run(&mut self, step: &Step) {
        match step {
            Step::Write { area, range, content } => self.write_memory(*area, range, content),
            Step::Take { area, forget, over_reported, from } => self.take(*area, forget, over_reported, *from),
            _ if self.taken.is_empty() => {}
            Step::Restore { snapshot, knows_current, over_reported } => {
                self.restore(snapshot.index(self.taken.len()), *knows_current, over_reported);
            }
            Step::Drop { snapshot } => {
                self.taken.swap_remove(snapshot.index(self.taken.len()));
            }
            Step::Compare { a, b } => self.compare(a.get(&self.taken), b.get(&self.taken)),
            Step::Read { snapshot, range } => {
                let taken = snapshot.get(&self.taken);
                let range = part(taken.expected.len(), range);
                let mut read = vec![0xee; range.byte_count().to_usize()];
                taken.snapshot.read_at(range.start, &mut read).unwrap();
                assert_oracle!(read == taken.expected[range.to_offsets()], "{range:x?} of a snapshot was read wrong");
                if read.len() >= 8 {
                    let word = u64::from_ne_bytes(read[..8].try_into().unwrap());
                    assert_eq!(taken.snapshot.read_value::<u64>(range.start).unwrap(), word);
                }
            }
        }
    }

    fn write_memory(&mut self, area: usize, range: &Span, content: &Content) {
        let area = &mut self.areas[area];
        let range = part(area.memory.len(), range);
        let to = range.to_offsets();
        match content {
            Content::Fill(byte) => area.memory[to].fill(*byte),
            Content::Random(seed) => {
                let mut state = seed | 1;
                area.memory[to].fill_with(|| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (state >> 56) as u8
                });
            }
            Content::CopyOf(from) => {
                let from = from.index(area.memory.len() - to.len() + 1);
                area.memory.copy_within(from..from + to.len(), to.start);
            }
        }
        area.dirty.insert(range);
    }

    fn take(&mut self, index: usize, forget: &[Span], over_reported: &[Span], from: Parent) {
        let before = self.store.usage();
        let bytes = self.areas[index].memory.len();
        let forget = parts(bytes, forget);
        let chunks = self.chunks(bytes);
        let area = &mut self.areas[index];
        let previous = area.current.clone().filter(|_| matches!(from, Parent::Current));
        let mut dirty = area.dirty.clone();
        dirty.extend(&parts(bytes, over_reported));
        let reported = if previous.is_some() { dirty } else { RangeSet::from(offsets(0..bytes)) };
        let mut expected = previous.as_ref().map_or_else(|| area.memory.clone(), |previous| previous.expected.clone());
        for chunk in chunks {
            let is_read = [&reported, &forget].iter().any(|set| set.within(chunk.clone()).next().is_some());
            if is_read {
                expected[chunk.to_offsets()].copy_from_slice(&area.memory[chunk.to_offsets()]);
            }
        }
        forget.iter().for_each(|range| expected[range.to_offsets()].fill(0));

        let previous_snapshot = previous.as_ref().map(|previous| &previous.snapshot);
        let taken = self.store.snapshot(previous_snapshot, &SharedBytes::of(&mut area.memory), &reported, &forget);
        match taken {
            Ok(snapshot) => {
                let taken = Taken { area: index, snapshot, expected };
                area.dirty.clear();
                area.current = Some(taken.clone());
                self.taken.push(taken);
            }
            Err(error) => {
                let ErrorKind::BudgetExceeded { budget_bytes, needed_bytes } = error.kind() else { panic!("{error}") };
                assert!(needed_bytes > budget_bytes);
                let after = self.store.usage();
                assert_eq!((after.chunks, after.nodes), (before.chunks, before.nodes));
                let room = self.all_chunks(&self.areas[index]) * (self.chunk_bytes() as u64 + CHUNK_TABLE_BYTES)
                    + 4 * self.all_chunks(&self.areas[index]) * NODE_BYTES;
                assert!(before.held_bytes + room > budget_bytes, "there was room");
                for taken in &self.taken {
                    self.check_content(taken);
                }
            }
        }
    }

    fn all_chunks(&self, area: &TestArea) -> u64 {
        self.chunks(area.memory.len()).len() as u64
    }

    fn restore(&mut self, wanted: usize, knows_current: bool, over_reported: &[Span]) {
        let wanted = self.taken[wanted].clone();
        let bytes = wanted.expected.len();
        let chunks = self.chunks(bytes);
        let area = &mut self.areas[wanted.area];
        let mut dirty = area.dirty.clone();
        dirty.extend(&parts(bytes, over_reported));
        let current = area.current.clone().filter(|_| knows_current);
        let (mut expected, mut expected_written) = (area.memory.clone(), RangeSet::new());
        for chunk in chunks {
            let at = chunk.to_offsets();
            let is_unknown = dirty.within(chunk.clone()).next().is_some();
            let is_written = match &current {
                Some(current) if !is_unknown => current.expected[at.clone()] != wanted.expected[at.clone()],
                _ => area.memory[at.clone()] != wanted.expected[at.clone()],
            };
            if is_written {
                expected[at.clone()].copy_from_slice(&wanted.expected[at]);
                expected_written.insert(chunk);
            }
        }
        let current = current.as_ref().map(|current| (&current.snapshot, &dirty));
        let written = self.store.restore(&wanted.snapshot, current, &SharedBytes::of(&mut area.memory)).unwrap();
        assert_oracle!(area.memory == expected, "the memory is not what was restored");
        assert_eq!(written, expected_written);
        area.dirty.clear();
        area.current = Some(wanted);
    }

    fn compare(&self, a: &Taken, b: &Taken) {
        let is_equal = a.expected == b.expected;
        assert_oracle_eq!(a.snapshot == b.snapshot, is_equal, "the equality of two snapshots");
        if a.expected.len() != b.expected.len() {
            assert!(matches!(a.snapshot.diff(&b.snapshot), Err(error) if error.kind() == ErrorKind::LengthDiffers));
            return;
        }
        let differs = |chunk: &Range| a.expected[chunk.to_offsets()] != b.expected[chunk.to_offsets()];
        let expected: RangeSet = self.chunks(a.expected.len()).into_iter().filter(differs).collect();
        assert_oracle_eq!(a.snapshot.diff(&b.snapshot).unwrap(), expected, "the difference of two snapshots");
    }

    fn check_content(&self, taken: &Taken) {
        let mut content = vec![0xee; taken.expected.len()];
        taken.snapshot.read_at(Address::MIN, &mut content).unwrap();
        assert_oracle!(content == taken.expected, "a snapshot changed");
    }

    /// Each different chunk, and each different subtree, is held exactly once.
    fn check_usage(&self) {
        let currents = self.areas.iter().filter_map(|area| area.current.as_ref());
        let (mut chunks, mut nodes) = (HashSet::new(), HashSet::new());
        for taken in self.taken.iter().chain(currents) {
            let mut span = self.chunk_bytes();
            chunks.extend(pieces(&taken.expected, span));
            loop {
                span *= FAN_OUT;
                nodes.extend(pieces(&taken.expected, span).map(|below| (span, below)));
                if taken.expected.len() <= span {
                    break;
                }
            }
        }
        let usage = self.store.usage();
        assert_eq!(usage.nodes, nodes.len() as u64);
        match self.store.options().budget_bytes {
            None => {
                assert_eq!(usage.chunks, chunks.len() as u64);
                assert_eq!(usage.content_bytes, usage.chunks * self.chunk_bytes() as u64);
                assert_eq!((usage.compressed_chunks, usage.delta_chunks), (0, 0));
            }
            Some(budget_bytes) => {
                // A delta holds its base, which no snapshot may hold any more.
                assert!(
                    usage.chunks >= chunks.len() as u64 && usage.chunks <= chunks.len() as u64 + usage.delta_chunks
                );
                assert!(usage.held_bytes <= budget_bytes, "{usage:?} with a budget of {budget_bytes}");
            }
        }
    }

    /// Asserts that all memory is freed when no snapshot needs it.
    fn finish(mut self) {
        self.check_usage();
        self.taken.iter().for_each(|taken| self.check_content(taken));
        self.taken.clear();
        self.areas.clear();
        let usage = self.store.usage();
        assert_eq!((usage.chunks, usage.nodes, usage.content_bytes, usage.held_bytes), (0, 0, 0, 0));
        assert_eq!((usage.compressed_chunks, usage.delta_chunks), (0, 0));
    }
}

const CHUNK_TABLE_BYTES: u64 = ENTRY_BYTES + Packing::CHUNK_BYTES;

/// The pieces of that length that are not all zeros, each without the zeros at its end.
fn pieces(content: &[u8], bytes: usize) -> impl Iterator<Item = &[u8]> {
    content.chunks(bytes).filter_map(|piece| piece.iter().rposition(|&byte| byte != 0).map(|last| &piece[..=last]))
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

fn run(options: SnapshotOptions, lengths: [usize; 2], steps: &[Step]) {
    let mut program = Program::new(options, lengths);
    for (index, step) in steps.iter().enumerate() {
        program.run(step);
        if index % 5 == 0 {
            program.check_usage();
        }
    }
    program.finish();
}

pub(super) fn cases(cases: u32) -> ProptestConfig {
    let config = pagemark_testing::cases(cases);
    // Miri, in isolation, has no working directory.
    if cfg!(miri) { ProptestConfig { failure_persistence: None, ..config } } else { config }
}

fn program() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 0..if cfg!(miri) { 12 } else { 60 })
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn snapshots_hold_what_memory_held(
        chunk_bits in 8u32..12, lengths in [1usize..3000, 3000usize..20_000], steps in program(),
    ) {
        run(SnapshotOptions { chunk_bytes: 1 << chunk_bits, budget_bytes: None }, lengths, &steps);
    }

    #[test]
    #[cfg_attr(miri, ignore = "too much memory")]
    fn pages_of_areas_that_are_made_of_pages(pages in [1usize..8, 8usize..24], steps in program()) {
        run(SnapshotOptions::default(), pages.map(|pages| pages * PAGE_SIZE), &steps);
    }

    #[test]
    fn a_tiny_budget_is_kept_or_refused(
        chunk_bits in 8u32..13, budget_bytes in 0u64..60_000, lengths in [1usize..3000, 3000usize..20_000],
        steps in program(),
    ) {
        run(SnapshotOptions { chunk_bytes: 1 << chunk_bits, budget_bytes: Some(budget_bytes) }, lengths, &steps);
    }
}

/// Memory that does not compress.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1du64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    })
    .take(bytes)
    .collect()
}

#[test]
#[cfg_attr(miri, ignore = "too much memory")]
fn changed_pages_become_deltas_and_text_is_compressed() {
    let store =
        SnapshotStore::with_options(SnapshotOptions { budget_bytes: Some(300_000), ..Default::default() }).unwrap();
    let mut memory = noise(64 * PAGE_SIZE);
    for (index, byte) in memory[32 * PAGE_SIZE..].iter_mut().enumerate() {
        *byte = b"pages of text "[index % 14] ^ (index / PAGE_SIZE) as u8;
    }
    let nothing = RangeSet::new();
    let mut taken = vec![store.snapshot(None, &SharedBytes::of(&mut memory), &nothing, &nothing).unwrap()];
    let mut expected = vec![memory.clone()];
    for round in 1..20 {
        // Some bytes of each incompressible page.
        let mut dirty = RangeSet::new();
        for page in 0..32 {
            let at = page * PAGE_SIZE + round * 100;
            memory[at..at + 10].fill(round as u8);
            dirty.insert(offsets(at..at + 10));
        }
        taken.push(store.snapshot(taken.last(), &SharedBytes::of(&mut memory), &dirty, &nothing).unwrap());
        expected.push(memory.clone());
    }
    let usage = store.usage();
    assert!(usage.held_bytes <= 300_000, "{usage:?}");
    assert!(usage.compressed_chunks >= 30, "{usage:?}");
    assert!(usage.delta_chunks >= 500, "{usage:?}");
    for (snapshot, expected) in taken.iter().zip(&expected) {
        let written = store.restore(snapshot, None, &SharedBytes::of(&mut memory)).unwrap();
        assert!(&memory == expected);
        assert!(written.total_bytes() <= ByteCount::of_pages(32));
    }
    // Packed content is found again.
    let again = store.snapshot(None, &SharedBytes::of(&mut expected[3]), &nothing, &nothing).unwrap();
    assert_eq!(again, taken[3]);
}

#[test]
#[cfg_attr(miri, ignore = "too much memory")]
fn content_that_does_not_fit_is_refused_and_nothing_changes() {
    let store =
        SnapshotStore::with_options(SnapshotOptions { budget_bytes: Some(20 * 4096), ..Default::default() }).unwrap();
    let mut memory = noise(40 * PAGE_SIZE);
    let (nothing, mut small) = (RangeSet::new(), memory[..10 * PAGE_SIZE].to_vec());
    let held = store.snapshot(None, &SharedBytes::of(&mut small), &nothing, &nothing).unwrap();
    let before = store.usage();
    let refused = store.snapshot(None, &SharedBytes::of(&mut memory), &nothing, &nothing).unwrap_err();
    let ErrorKind::BudgetExceeded { budget_bytes: 81_920, needed_bytes } = refused.kind() else { panic!("{refused}") };
    assert!(needed_bytes > 81_920);
    // The same with the budget that the error names.
    let enough = SnapshotOptions { budget_bytes: Some(needed_bytes), ..Default::default() };
    let other = SnapshotStore::with_options(enough).unwrap();
    let _held = other.snapshot(None, &SharedBytes::of(&mut small), &nothing, &nothing).unwrap();
    other.snapshot(None, &SharedBytes::of(&mut memory), &nothing, &nothing).unwrap();
    assert!(needed_bytes < 2 * 50 * 4096, "{needed_bytes} for 50 pages");
    assert_eq!(
        Usage { mapped_bytes: 0, overhead_bytes: 0, ..store.usage() },
        Usage { mapped_bytes: 0, overhead_bytes: 0, ..before }
    );
    let mut content = vec![0; 10 * PAGE_SIZE];
    held.read_at(Address::MIN, &mut content).unwrap();
    assert_oracle!(content == small, "a snapshot changed");
}

#[test]
#[cfg_attr(miri, ignore = "too much memory")]
fn refused_content_is_no_base_of_differences() {
    let store =
        SnapshotStore::with_options(SnapshotOptions { budget_bytes: Some(5 * 4096), ..Default::default() }).unwrap();
    let (nothing, mut page, mut pages) = (RangeSet::new(), noise(PAGE_SIZE), noise(10 * PAGE_SIZE));
    let parent = store.snapshot(None, &SharedBytes::of(&mut page), &nothing, &nothing).unwrap();
    page[0] ^= 1;
    let child =
        store.snapshot(Some(&parent), &SharedBytes::of(&mut page), &RangeSet::from(offsets(0..1)), &nothing).unwrap();
    drop(parent);
    // The first page has the number of the parent's page, and differs from the child's page by as few
    // bytes.
    let before = store.usage();
    let refused = store.snapshot(None, &SharedBytes::of(&mut pages), &nothing, &nothing);
    assert!(matches!(refused.map_err(|error| error.kind()), Err(ErrorKind::BudgetExceeded { .. })));
    assert_eq!(store.usage().chunks, before.chunks);
    let mut content = vec![0; PAGE_SIZE];
    child.read_at(Address::MIN, &mut content).unwrap();
    assert_oracle!(content == page, "a snapshot changed");
}

#[test]
fn bad_input_is_refused_with_the_reason() {
    for chunk_bytes in [0, 128, 300, 4095, 1 << 17] {
        let made = SnapshotStore::with_options(SnapshotOptions { chunk_bytes, budget_bytes: None });
        assert!(matches!(made, Err(error) if error.kind() == ErrorKind::ChunkSize), "{chunk_bytes}");
    }
    let (store, other) = (SnapshotStore::new(), SnapshotStore::new());
    let (mut memory, mut longer, nothing) = (vec![1; 9000], vec![1; 9001], RangeSet::new());
    let snapshot = store.snapshot(None, &SharedBytes::of(&mut memory), &nothing, &nothing).unwrap();
    let beyond = RangeSet::from(offsets(8999..9001));

    let area = SharedBytes::of(&mut memory);
    let wrong_store =
        |result: Result<(), Error>| assert!(matches!(result, Err(error) if error.kind() == ErrorKind::WrongStore));
    wrong_store(other.snapshot(Some(&snapshot), &area, &nothing, &nothing).map(drop));
    wrong_store(other.restore(&snapshot, None, &area).map(drop));
    let stranger = other.snapshot(None, &area, &nothing, &nothing).unwrap();
    wrong_store(store.restore(&snapshot, Some((&stranger, &nothing)), &area).map(drop));
    wrong_store(snapshot.diff(&stranger).map(drop));
    assert_ne!(snapshot, stranger);

    let range =
        |result: Result<(), Error>| assert!(matches!(result, Err(error) if error.kind() == ErrorKind::OutOfRange));
    range(store.snapshot(Some(&snapshot), &area, &beyond, &nothing).map(drop));
    range(store.snapshot(None, &area, &nothing, &beyond).map(drop));
    range(store.restore(&snapshot, Some((&snapshot, &beyond)), &area).map(drop));
    range(snapshot.read_at(Address::new(8999), &mut [0; 2]));
    range(snapshot.read_at(Address::MAX, &mut [0; 2]));
    assert_eq!(snapshot.read_value::<u8>(Address::new(8999)).unwrap(), 1);

    let longer = SharedBytes::of(&mut longer);
    let length =
        |result: Result<(), Error>| assert!(matches!(result, Err(error) if error.kind() == ErrorKind::LengthDiffers));
    length(store.snapshot(Some(&snapshot), &longer, &nothing, &nothing).map(drop));
    length(store.restore(&snapshot, None, &longer).map(drop));
}

#[test]
fn an_empty_area_has_snapshots() {
    let store = SnapshotStore::new();
    let nothing = RangeSet::new();
    let a = store.snapshot(None, &SharedBytes::of(&mut []), &nothing, &nothing).unwrap();
    let b = store.snapshot(Some(&a), &SharedBytes::of(&mut []), &nothing, &nothing).unwrap();
    assert_eq!(a, b);
    assert!(store.restore(&a, Some((&b, &nothing)), &SharedBytes::of(&mut [])).unwrap().is_empty());
    a.read_at(Address::MIN, &mut []).unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "too much memory")]
fn a_forgotten_half_is_not_held() {
    let store = SnapshotStore::new();
    let (mut memory, nothing) = (noise(512 * PAGE_SIZE), RangeSet::new());
    let half = RangeSet::from(offsets(100..256 * PAGE_SIZE + 100));
    let snapshot = store.snapshot(None, &SharedBytes::of(&mut memory), &nothing, &half).unwrap();
    assert_eq!(store.usage().chunks, 257);
    assert_eq!(snapshot.read_value::<u128>(Address::new(5000)).unwrap(), 0);
    let written = store.restore(&snapshot, None, &SharedBytes::of(&mut memory)).unwrap();
    assert_eq!(written, RangeSet::from(offsets(0..257 * PAGE_SIZE)));
    assert!(is_zero(&memory[100..256 * PAGE_SIZE + 100]) && memory[99] != 0);
}

#[test]
#[cfg_attr(miri, ignore = "too much memory")]
fn a_base_never_becomes_a_delta() {
    let bytes = 64 * PAGE_SIZE;
    let store =
        SnapshotStore::with_options(SnapshotOptions { budget_bytes: Some(bytes as u64 * 9 / 4), ..Default::default() })
            .unwrap();
    let (nothing, mut memory) = (RangeSet::new(), noise(bytes));
    let everything = RangeSet::from(offsets(0..bytes));
    let (mut taken, mut expected) = (Vec::<Snapshot>::new(), Vec::new());
    for version in 0..12u8 {
        (0..bytes).step_by(PAGE_SIZE).for_each(|page| memory[page + version as usize] ^= 0x55);
        // Using the previous version makes this version the next to be packed.
        let mut content = vec![0; bytes];
        taken.last().iter().for_each(|snapshot| snapshot.read_at(Address::MIN, &mut content).unwrap());
        taken.push(store.snapshot(taken.last(), &SharedBytes::of(&mut memory), &everything, &nothing).unwrap());
        expected.push(memory.clone());
    }
    assert!(store.usage().delta_chunks > 0);
    // Reading checks the depth of each delta.
    for (snapshot, expected) in taken.iter().zip(expected) {
        let mut content = vec![0; bytes];
        snapshot.read_at(Address::MIN, &mut content).unwrap();
        assert_oracle!(content == expected, "a snapshot changed");
    }
}
