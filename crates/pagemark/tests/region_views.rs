//! Regions as arrays of numbers and structs.

use pagemark::region::{Region, View, Writable};
use pagemark::{Address, ErrorKind, PAGE_SIZE};
use pagemark_testing::{assert_oracle, assert_oracle_eq};

#[test]
fn numbers_of_every_size_are_written_and_read_everywhere() {
    let region = Region::new(PAGE_SIZE).unwrap();
    macro_rules! check {
        ($($number:ty),*) => {$(
            let view = region.view_all::<$number>().unwrap();
            assert_eq!(view.len(), PAGE_SIZE / size_of::<$number>());
            for index in 0..view.len() {
                view.set(index, index as $number);
            }
            assert!(view.iter().enumerate().all(|(index, value)| value == index as $number));
            let mut bytes = [0; size_of::<$number>()];
            region.read(3 * bytes.len(), &mut bytes).unwrap();
            assert_eq!(bytes, (3 as $number).to_ne_bytes());
        )*};
    }
    check!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64);
}

#[test]
fn writes_through_a_view_are_tracked() {
    let region = Region::new(8 * PAGE_SIZE).unwrap();
    let view = region.view::<u32>(PAGE_SIZE, 100).unwrap();
    region.begin().unwrap();
    view.set(5, 7);
    assert_oracle!(region.commit().unwrap().contains((PAGE_SIZE + 20).into()), "a write was missed");
    let snapshot = region.snapshot().unwrap();
    view.set(5, 8);
    region.restore(&snapshot).unwrap();
    assert_oracle_eq!(view.get(5), 7, "the content after the restore");
}

#[test]
fn a_view_lies_within_the_region_and_begins_at_a_number() {
    let region = Region::new(PAGE_SIZE).unwrap();
    let kind = |view: Result<View<'_, u64>, pagemark::Error>| view.unwrap_err().kind();
    assert_eq!(kind(region.view(0, PAGE_SIZE / 8 + 1)), ErrorKind::OutOfRange);
    assert_eq!(kind(region.view(8, PAGE_SIZE / 8)), ErrorKind::OutOfRange);
    assert_eq!(kind(region.view(0, usize::MAX)), ErrorKind::OutOfRange);
    assert_eq!(kind(region.view(usize::MAX - 7, 1)), ErrorKind::OutOfRange);
    assert_eq!(kind(region.view(4, 1)), ErrorKind::Unaligned);
    assert!(region.view::<u64>(PAGE_SIZE, 0).unwrap().is_empty());
}

#[test]
#[should_panic(expected = "the index is 3 and the view has 3 values")]
fn an_index_beyond_the_end_is_refused() {
    Region::new(PAGE_SIZE).unwrap().view::<u8>(0, 3).unwrap().set(3, 0);
}

#[derive(Clone, Copy, PartialEq, Debug, bytemuck::Zeroable, bytemuck::Pod)]
#[repr(C)]
struct Particle {
    position: [f32; 3],
    mass: f32,
    id: u64,
}

fn particle(id: u64) -> Particle {
    Particle { position: [id as f32, 0.5, -1.0], mass: 2.0 * id as f32, id }
}

/// 24 bytes, so that some of them cross the border of a page.
#[test]
fn structs_are_tracked_rolled_back_and_read_from_snapshots() {
    let region = Region::new(4 * PAGE_SIZE).unwrap();
    let view = region.view_all::<Particle>().unwrap();
    assert_eq!(view.len(), 4 * PAGE_SIZE / 24);
    (0..view.len()).for_each(|index| view.set(index, particle(index as u64)));
    let snapshot = region.snapshot().unwrap();
    // The one that begins in the first page and ends in the second.
    let crossing = PAGE_SIZE / 24;
    region.begin().unwrap();
    view.set(crossing, particle(1000));
    assert_eq!(view.get(crossing), particle(1000));
    let written = region.commit().unwrap();
    assert_oracle!([PAGE_SIZE - 1, PAGE_SIZE].iter().all(|&at| written.contains(at.into())), "a write was missed");
    let saved: Particle = snapshot.content().read_value(Address::new((crossing * 24) as u64)).unwrap();
    assert_oracle_eq!(saved, particle(crossing as u64), "the content of the snapshot");
    region.restore(&snapshot).unwrap();
    assert_oracle!(
        view.iter().enumerate().all(|(index, value)| value == particle(index as u64)),
        "other content after the restore"
    );
    // Aligned to its largest member, not to its size.
    assert_eq!(region.view::<Particle>(8, 1).unwrap().get(0).position[0], -1.0);
    assert_eq!(region.view::<Particle>(4, 1).unwrap_err().kind(), ErrorKind::Unaligned);
}

/// A number is one access: a reader never sees half of a write.
#[test]
fn threads_read_whole_numbers() {
    let region = Region::new(PAGE_SIZE).unwrap();
    let (view, small) = (region.view::<u64>(0, 1).unwrap(), region.view::<u32>(8, 1).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..20_000u32 {
                view.set(0, u64::from(number % 2).wrapping_neg());
                small.set(0, (number % 2).wrapping_neg());
            }
        });
        for _ in 0..20_000 {
            assert_oracle!(
                [0, u64::MAX].contains(&view.get(0)) && [0, u32::MAX].contains(&small.get(0)),
                "half of a write was seen"
            );
        }
    });
}

/// Guards and views may be held across an `await`, where another thread can continue.
#[test]
fn guards_and_views_go_to_other_threads() {
    fn is_send_and_sync<T: Send + Sync>() {}
    is_send_and_sync::<Writable<'_>>();
    is_send_and_sync::<View<'_, f64>>();
}
