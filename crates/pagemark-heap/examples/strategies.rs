//! Bytes and page faults of an interval, by number of parts and by strategy: a table of 200,000
//! records of 48 to 207 bytes. Each interval updates records, most of them among a tenth of the
//! table, and replaces some. The first row, one part, is tracking by pages.
//!
//! `cargo run --release -p pagemark-heap --example strategies`. With the argument `two-level`, and
//! in the machine of `pagemark-kvm`, the second level of page tables tells the parts apart; the
//! faults are then KVM's.

use std::alloc::{GlobalAlloc, Layout};
use std::error::Error;
use std::time::{Duration, Instant};

use pagemark::{ByteCount, RangeSet};
use pagemark_heap::grouping::{ByCost, ByHistory, Costs, Grouping, Separate};
use pagemark_heap::{Form, Heap, HeapTracker, Parts};

const RECORDS: u64 = 200_000;
const UPDATES: u64 = 20_000;
const REPLACEMENTS: u64 = 500;
const INTERVALS: u32 = 40;

/// Pseudo-random numbers, the same for each row.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % bound
    }
}

struct Record {
    address: *mut u8,
    layout: Layout,
}

impl Record {
    fn new(heap: &Heap, random: &mut Random) -> Result<Record, Box<dyn Error>> {
        let layout = Layout::from_size_align(48 + random.below(160) as usize, 8)?;
        // SAFETY: the layout has a size, and the bytes are the record's.
        unsafe {
            let address = heap.alloc(layout);
            if address.is_null() {
                return Err("the heap is full".into());
            }
            address.write_bytes(1, layout.size());
            Ok(Record { address, layout })
        }
    }
}

fn measure(name: &str, parts: Parts, grouping: Box<dyn Grouping>, form: Form) -> Result<(), Box<dyn Error>> {
    let (heap, mut random) = (Heap::new(parts, ByteCount::new(1 << 30))?, Random(1));
    let mut records = (0..RECORDS).map(|_| Record::new(&heap, &mut random)).collect::<Result<Vec<_>, _>>()?;
    let mut tracker = HeapTracker::with_form(&heap, grouping, form)?;
    tracker.collect_written(&mut RangeSet::new())?;
    let (mut faults, mut bytes, mut ranges, mut moves) = (0, ByteCount::ZERO, 0, 0);
    let (mut program, mut collect) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..INTERVALS {
        let start = Instant::now();
        for update in 0..UPDATES {
            // Nine of ten updates are of a tenth of the records, which lies together.
            let record = random.below(if update % 10 == 0 { RECORDS } else { RECORDS / 10 }) as usize;
            // SAFETY: a record has at least 48 bytes.
            unsafe { records[record].address.add(40).write_volatile(update as u8) };
        }
        for _ in 0..REPLACEMENTS {
            let record = &mut records[random.below(RECORDS) as usize];
            // SAFETY: the record is live, and replaced now.
            unsafe { heap.dealloc(record.address, record.layout) };
            *record = Record::new(&heap, &mut random)?;
        }
        program += start.elapsed();
        let (start, mut written) = (Instant::now(), RangeSet::new());
        let interval = tracker.collect_written(&mut written)?;
        collect += start.elapsed();
        faults += interval.faults;
        bytes += interval.written_bytes;
        ranges += written.range_count();
        moves += interval.merges + interval.splits;
    }
    let per_interval = |total: u64| total / u64::from(INTERVALS);
    println!(
        "{name:22} {:>9} {:>8} {:>8} {:>10} {:>11.2} {:>11.2}",
        per_interval(bytes.get() >> 10),
        per_interval(ranges as u64),
        per_interval(faults),
        per_interval(moves),
        (program / INTERVALS).as_secs_f64() * 1e3,
        (collect / INTERVALS).as_secs_f64() * 1e3,
    );
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let form = match std::env::args().nth(1).as_deref() {
        None => Form::UserLevel,
        Some("two-level") => Form::TwoLevel,
        Some(other) => return Err(format!("{other} is no form").into()),
    };
    println!(
        "{:22} {:>9} {:>8} {:>8} {:>10} {:>11} {:>11}",
        "per interval", "KiB", "ranges", "faults", "regrouped", "program ms", "collect ms"
    );
    for parts in Parts::ALL {
        let name = |strategy: &str| format!("{strategy}, {} parts", parts.count());
        measure(&name("separate"), parts, Box::new(Separate), form)?;
        if parts != Parts::One {
            measure(&name("by history"), parts, Box::new(ByHistory::new(parts)), form)?;
        }
        measure(&name("by cost"), parts, Box::new(ByCost::new(parts, Costs::default())), form)?;
    }
    Ok(())
}
