//! A short observation of a target: which pages it writes in slices of time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::DirtyCurve;
use crate::id::pages::is_zero_page;
use crate::target::{Captured, Frozen, SpaceId, Target, TargetMemory};
use crate::{AddressRangeExt, ByteCount, Error, PAGE_SIZE, Range, RangeSet};

/// The most pages that are copied to find out what a copy costs.
const SAMPLE_PAGES: u64 = 4096;

/// What a record of a page in a repository has besides its content.
const RECORD: ByteCount = ByteCount::new(48);

/// What a target has written in consecutive slices of time.
#[derive(Clone, Debug, Default)]
pub struct Observation {
    slices: Vec<Slice>,
    /// The shortest time that a collect took.
    walk: Option<Duration>,
    /// What copying a sample of the written pages took, and what it would take up.
    sample: Sample,
    /// What held data before the first slice.
    held: HashMap<SpaceId, RangeSet>,
}

/// What was written in a time.
#[derive(Clone, Debug, Default)]
struct Slice {
    time: Duration,
    written: HashMap<SpaceId, RangeSet>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    pages: u64,
    time: Duration,
    stored: ByteCount,
}

impl Observation {
    /// Observes a target in `count` slices of this length. `wait` waits for a time; if it returns
    /// false, the observation ends with the last whole slice. Nothing may have collected this
    /// memory before, so that the observation begins with all that holds data. Reading a sample of
    /// the written pages is part of it; they are not changed.
    ///
    /// # Errors
    /// Those of the target.
    pub fn take<M: TargetMemory + ?Sized>(
        memory: &mut M,
        slice: Duration,
        count: u32,
        wait: &mut dyn FnMut(Duration) -> bool,
    ) -> Result<Observation, M::Error> {
        let mut observation = Observation { held: collect(memory)?, ..Observation::default() };
        let mut begin = Instant::now();
        for _ in 0..count {
            if !wait(slice) {
                break;
            }
            let before = Instant::now();
            let written = collect(memory)?;
            let took = before.elapsed();
            observation.walk = Some(observation.walk.map_or(took, |least| least.min(took)));
            observation.slices.push(Slice { time: before.duration_since(begin), written });
            begin = before;
        }
        if let Some(last) = observation.slices.iter().max_by_key(|slice| slice.pages()) {
            observation.sample = Sample::take(memory, &last.written)?;
        }
        Ok(observation)
    }

    /// How long the target was observed.
    pub fn time(&self) -> Duration {
        self.slices.iter().map(|slice| slice.time).sum()
    }

    /// Intervals, and the mean number of pages that are written in each: one slice, two slices,
    /// four, and so on.
    pub fn points(&self) -> Vec<(Duration, f64)> {
        let (mut points, mut windows) = (Vec::new(), self.slices.clone());
        while let Some(count) = u32::try_from(windows.len()).ok().filter(|&count| count > 0) {
            let pages: u64 = windows.iter().map(Slice::pages).sum();
            let time: Duration = windows.iter().map(|window| window.time).sum();
            points.push((time / count, pages as f64 / f64::from(count)));
            windows = windows.chunks_exact(2).map(|pair| pair[0].with(&pair[1])).collect();
        }
        points
    }

    /// The curve of the pages that are written in an interval. None if there is no slice.
    pub fn curve(&self) -> Option<DirtyCurve> {
        let pages = |slice: &Slice| slice.pages() as f64;
        let before = Slice { time: Duration::ZERO, written: self.held.clone() };
        let after = self.slices.iter().fold(before.clone(), |held, slice| held.with(slice));
        let growth = (pages(&after) - pages(&before)) / self.time().as_secs_f64().max(1e-9);
        DirtyCurve::fit(&self.points()).map(|curve| curve.below(pages(&after), growth))
    }

    /// The time in which all memory is examined.
    pub fn walk(&self) -> Duration {
        self.walk.unwrap_or_default()
    }

    /// The time in which a written page is copied.
    pub fn copy(&self) -> Duration {
        self.sample.time / u32::try_from(self.sample.pages).unwrap_or(u32::MAX).max(1)
    }

    /// What a written page takes up when it is compressed; less if only its changes are stored.
    pub fn stored(&self) -> ByteCount {
        ByteCount::new(self.sample.stored.get() / self.sample.pages.max(1))
    }
}

impl Slice {
    fn pages(&self) -> u64 {
        self.written.values().map(RangeSet::page_count).sum()
    }

    /// Both slices as one.
    fn with(&self, other: &Slice) -> Slice {
        let mut written = self.written.clone();
        for (space, ranges) in &other.written {
            written.entry(*space).or_default().extend(ranges);
        }
        Slice { time: self.time + other.time, written }
    }
}

impl Sample {
    /// Copies pages of what was written.
    fn take<M: TargetMemory + ?Sized>(
        memory: &mut M,
        written: &HashMap<SpaceId, RangeSet>,
    ) -> Result<Sample, M::Error> {
        let mut sample = Sample::default();
        for (space, ranges) in written {
            let mut wanted: Vec<Range> = Vec::new();
            for range in ranges.iter() {
                let left = ByteCount::of_pages(SAMPLE_PAGES - sample.pages);
                let bytes = range.byte_count().min(left);
                if bytes == ByteCount::ZERO {
                    break;
                }
                sample.pages += bytes.pages_rounded_up();
                wanted.push(range.start..range.start + bytes);
            }
            let bytes = wanted.iter().map(AddressRangeExt::byte_count).fold(ByteCount::ZERO, ByteCount::saturating_add);
            let mut content = vec![0; bytes.to_usize()];
            let begin = Instant::now();
            memory.read(*space, &wanted, &mut content)?;
            sample.time += begin.elapsed();
            let stored = content.chunks_exact(PAGE_SIZE).map(stored).fold(ByteCount::ZERO, ByteCount::saturating_add);
            sample.stored = sample.stored.saturating_add(stored);
        }
        Ok(sample)
    }
}

/// What a page takes up in a repository that does not hold it yet.
fn stored(page: &[u8]) -> ByteCount {
    if is_zero_page(page) {
        return ByteCount::ZERO;
    }
    let compressed = lz4_flex::block::compress(page).len().min(page.len());
    ByteCount::new(compressed as u64).saturating_add(RECORD)
}

/// What was written in each space since the last call, in whole pages.
fn collect<M: TargetMemory + ?Sized>(memory: &mut M) -> Result<HashMap<SpaceId, RangeSet>, M::Error> {
    let mut all = HashMap::new();
    for space in memory.spaces()? {
        let mut written = RangeSet::new();
        memory.collect(space, &mut written)?;
        if !written.is_empty() {
            all.insert(space, written.into_whole_pages());
        }
    }
    Ok(all)
}

/// Freezes by which the time of a stop is found out.
const STOPS: usize = 5;

/// Pause before each of them. Without it, all would meet the target and the machine in the same
/// state.
const STOP_PAUSE: Duration = Duration::from_millis(400);

/// How long a target is frozen besides for memory: the median of five calls to `stop`, each after
/// a call to `wait` with the time to wait.
///
/// # Errors
/// The first of `stop`.
pub fn stop_time<E>(
    wait: &mut dyn FnMut(Duration),
    stop: &mut dyn FnMut() -> Result<Duration, E>,
) -> Result<Duration, E> {
    let mut times = Vec::with_capacity(STOPS);
    for _ in 0..STOPS {
        wait(STOP_PAUSE);
        times.push(stop()?);
    }
    times.sort_unstable();
    Ok(times[STOPS / 2])
}

/// Freezes a target once, and drops what was saved. Returns how long it was frozen.
///
/// # Errors
/// Those of the target. It runs again.
pub fn stop<T: Target>(target: &mut T) -> Result<Duration, Error> {
    let captured = target.freeze(&mut |_| Ok(())).and_then(Frozen::thaw);
    let time = captured.map(|captured| captured.downtime());
    // As after a checkpoint that was not stored.
    target.capture_failed();
    time.map_err(crate::target::TargetError::into_error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Address, PageNumber};

    /// Memory of which `of_slice` says what is written in each slice.
    struct Memory<F> {
        collects: u64,
        of_slice: F,
    }

    impl<F: FnMut(u64) -> Vec<u64>> TargetMemory for Memory<F> {
        type Error = Error;

        fn spaces(&mut self) -> Result<Vec<SpaceId>, Error> {
            Ok(vec![7])
        }

        fn collect(&mut self, _: SpaceId, dirty: &mut RangeSet) -> Result<(), Error> {
            for page in (self.of_slice)(self.collects) {
                dirty.insert(PageNumber::new(page).addresses());
            }
            self.collects += 1;
            Ok(())
        }

        fn read(&mut self, _: SpaceId, ranges: &[Range], buffer: &mut [u8]) -> Result<RangeSet, Error> {
            let mut pages = buffer.chunks_exact_mut(PAGE_SIZE);
            for range in ranges {
                for at in (range.start.get()..range.end.get()).step_by(PAGE_SIZE) {
                    // Page 1 holds zeros, and the others one number.
                    pages.next().unwrap().fill(if Address::new(at).page() == PageNumber::new(1) { 0 } else { 9 });
                }
            }
            Ok(RangeSet::new())
        }
    }

    fn observe(slices: u32, of_slice: impl FnMut(u64) -> Vec<u64>) -> Observation {
        let mut wait = |time: Duration| {
            std::thread::sleep(time);
            true
        };
        Observation::take(&mut Memory { collects: 0, of_slice }, Duration::from_micros(100), slices, &mut wait).unwrap()
    }

    #[test]
    fn longer_intervals_are_slices_together() {
        // Page 0 in each slice, and another one in each.
        let observation = observe(8, |slice| vec![0, 10 + slice]);
        let points: Vec<f64> = observation.points().iter().map(|(_, pages)| *pages).collect();
        assert_eq!(points, [2.0, 3.0, 5.0, 9.0]);
        let times: Vec<Duration> = observation.points().iter().map(|(time, _)| *time).collect();
        assert!(times[0] >= Duration::from_micros(100) && times[3] == observation.time());
        assert!(observation.curve().unwrap().pages(observation.time()) > 8.0);
        assert!(observation.walk() < observation.time());
    }

    #[test]
    fn no_interval_has_more_written_pages_than_hold_data() {
        // 1000 pages hold data, and each slice has 100 others of them: a line, as far as is seen.
        let observation = observe(8, |slice| match slice {
            0 => (0..1000).collect(),
            slice => (slice * 100..(slice + 1) * 100).collect(),
        });
        let curve = observation.curve().unwrap();
        assert!(curve.pages(observation.time()) > 500.0);
        assert_eq!(curve.pages(observation.time() * 1000), 1000.0);
        // A target that grows has more.
        let growing = observe(8, |slice| (slice * 100..(slice + 1) * 100).collect());
        assert!(growing.curve().unwrap().pages(growing.time() * 100) > 10_000.0);
    }

    #[test]
    fn what_was_written_before_is_not_counted() {
        let observation = observe(3, |slice| if slice == 0 { (0..1000).collect() } else { vec![slice] });
        assert_eq!(observation.points()[0].1, 1.0);
        // Of an odd number of slices the last is left out.
        assert_eq!(observation.points()[1].1, 2.0);
    }

    #[test]
    fn a_sample_tells_what_pages_take_up() {
        let zeros = observe(1, |_| vec![1]);
        assert_eq!(zeros.stored(), ByteCount::ZERO);
        let observation = observe(2, |slice| if slice == 2 { (1..3).collect() } else { Vec::new() });
        let stored = observation.stored().get();
        assert!((RECORD.get() / 2..100).contains(&stored), "one of two pages, compressed: {stored}");
        let many = observe(1, |_| (100..100 + 2 * SAMPLE_PAGES).collect());
        assert_eq!(many.sample.pages, SAMPLE_PAGES);
    }

    #[test]
    fn a_stop_takes_the_median_of_spread_freezes() {
        let mut waited = Duration::ZERO;
        let mut micros = [90, 10, 20, 5000, 30].into_iter();
        let mut stop = || Ok::<_, Error>(Duration::from_micros(micros.next().unwrap()));
        let median = stop_time(&mut |time| waited += time, &mut stop).unwrap();
        assert_eq!((median, waited), (Duration::from_micros(30), STOP_PAUSE * STOPS as u32));
        assert!(stop_time(&mut |_| (), &mut || Err(())).is_err());
    }

    #[test]
    fn an_observation_without_a_slice_knows_nothing() {
        let none = observe(0, |_| vec![1]);
        assert!(none.points().is_empty() && none.curve().is_none());
        assert_eq!((none.walk(), none.copy(), none.stored()), (Duration::ZERO, Duration::ZERO, ByteCount::ZERO));
        let mut memory = Memory { collects: 0, of_slice: |_| vec![1] };
        let ended = Observation::take(&mut memory, Duration::ZERO, 9, &mut |_| false).unwrap();
        assert!(ended.points().is_empty());
    }
}
