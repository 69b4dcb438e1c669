//! Snapshots of one store, taken, restored, read and dropped by many threads at once.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pagemark::address::offsets;
use pagemark::snapshot::{SharedBytes, Snapshot, SnapshotOptions, SnapshotStore};
use pagemark::{Address, Error, ErrorKind, PAGE_SIZE, Range, RangeSet};
use pagemark_testing::{assert_oracle, assert_oracle_eq};

const THREADS: u64 = 8;
const ROUNDS: usize = 200;
const PAGES: usize = 40;

fn is_over_budget(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::BudgetExceeded { .. })
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

/// Writes at a random offset. The threads write much equal content, so that they share chunks and
/// nodes.
fn write(memory: &mut [u8], random: &mut Random) -> Range {
    let start = random.below(memory.len());
    let end = (start + 1 + random.below(3 * PAGE_SIZE)).min(memory.len());
    let value = random.below(4) as u8;
    match random.below(3) {
        0 => memory[start..end].fill(value),
        1 => (start..end).for_each(|at| memory[at] = (at as u8).wrapping_mul(31) ^ value),
        _ => (start..end).for_each(|at| memory[at] = random.below(256) as u8),
    }
    offsets(start..end)
}

/// The work of a thread on an area of its own, which it compares with copies. Returns the largest
/// number of packed chunks that it has seen.
fn work(store: &SnapshotStore, seed: u64) -> u64 {
    let mut random = Random(seed * 0x9e37_79b9 + 1);
    let mut memory = vec![0; PAGES * PAGE_SIZE];
    let nothing = RangeSet::new();
    let mut current = store.snapshot(None, &SharedBytes::of(&mut memory), &nothing, &nothing).unwrap();
    let mut dirty = RangeSet::new();
    let mut taken: Vec<(Snapshot, Vec<u8>)> = vec![(current.clone(), memory.clone())];
    let mut most_packed_chunks = 0;
    for _ in 0..ROUNDS {
        for _ in 0..random.below(4) {
            dirty.insert(write(&mut memory, &mut random));
        }
        let chosen = random.below(taken.len());
        match random.below(4) {
            0 => {
                let (wanted, expected) = taken[chosen].clone();
                store.restore(&wanted, Some((&current, &dirty)), &SharedBytes::of(&mut memory)).unwrap();
                assert_oracle!(memory == expected, "restored something else");
                dirty.clear();
                current = wanted;
            }
            1 if taken.len() > 1 => drop_checked(taken.swap_remove(chosen)),
            _ => match store.snapshot(Some(&current), &SharedBytes::of(&mut memory), &dirty, &nothing) {
                Ok(snapshot) => {
                    for (other, expected) in &taken {
                        assert_oracle_eq!(*other == snapshot, *expected == memory, "the equality of two snapshots");
                    }
                    taken.push((snapshot.clone(), memory.clone()));
                    dirty.clear();
                    current = snapshot;
                }
                // The written offsets stay dirty.
                Err(error) if is_over_budget(&error) && taken.len() > 1 => drop_checked(taken.swap_remove(chosen)),
                Err(error) if is_over_budget(&error) => {}
                Err(error) => panic!("{error}"),
            },
        }
        let usage = store.usage();
        assert!(store.options().budget_bytes.is_none_or(|budget_bytes| usage.held_bytes <= budget_bytes), "{usage:?}");
        most_packed_chunks = most_packed_chunks.max(usage.compressed_chunks + usage.delta_chunks);
    }
    taken.into_iter().for_each(drop_checked);
    most_packed_chunks
}

fn drop_checked((snapshot, expected): (Snapshot, Vec<u8>)) {
    let mut content = vec![0; expected.len()];
    snapshot.read_at(Address::MIN, &mut content).unwrap();
    assert_oracle!(content == expected, "a snapshot changed");
}

fn run_threads(options: SnapshotOptions) -> u64 {
    let store = SnapshotStore::with_options(options).unwrap();
    let most_packed_chunks = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..THREADS)
            .map(|seed| {
                scope.spawn({
                    let store = &store;
                    move || work(store, seed)
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).max().unwrap()
    });
    let usage = store.usage();
    assert_eq!((usage.chunks, usage.nodes, usage.held_bytes), (0, 0, 0), "something was left behind");
    most_packed_chunks
}

#[test]
fn threads_share_a_store_and_leave_nothing_behind() {
    assert_eq!(run_threads(SnapshotOptions::default()), 0);
}

#[test]
fn threads_share_a_store_that_is_short_of_memory() {
    let packed_chunks = run_threads(SnapshotOptions { chunk_bytes: 1024, budget_bytes: Some(1 << 20) });
    assert!(packed_chunks > 100, "only {packed_chunks} chunks were packed");
}

#[test]
fn concurrent_writes_are_held_as_they_were_read() {
    const WORDS: usize = 16 * PAGE_SIZE / 8;
    let memory: Arc<Vec<AtomicU64>> = Arc::new((0..WORDS).map(|_| AtomicU64::new(0)).collect());
    let base = NonNull::new(memory.as_ptr().cast_mut().cast::<u8>()).unwrap();
    let done = Arc::new(AtomicBool::new(false));
    let store = SnapshotStore::new();
    std::thread::scope(|scope| {
        for seed in 1..3u64 {
            let (memory, done) = (memory.clone(), done.clone());
            scope.spawn(move || {
                let mut random = Random(seed);
                while !done.load(Ordering::Relaxed) {
                    let value = random.below(2) as u64;
                    memory[random.below(WORDS)].store(value, Ordering::Relaxed);
                }
            });
        }
        // SAFETY: `memory` outlives the area, and the threads write it by atomic operations only.
        let area = unsafe { SharedBytes::new(base, WORDS * 8) };
        let (nothing, everything) = (RangeSet::new(), RangeSet::from(offsets(0..WORDS * 8)));
        let mut last: Option<Snapshot> = None;
        for _ in 0..300 {
            let snapshot = store.snapshot(last.as_ref(), &area, &everything, &nothing).unwrap();
            let mut content = vec![0; WORDS * 8];
            snapshot.read_at(Address::MIN, &mut content).unwrap();
            // The chunk is held under the id of its own content, not of the content that was hashed.
            assert_oracle_eq!(
                store.snapshot(None, &SharedBytes::of(&mut content), &everything, &nothing).unwrap(),
                snapshot,
                "the snapshot of what a snapshot holds"
            );
            last = Some(snapshot);
        }
        done.store(true, Ordering::Relaxed);
    });
}
