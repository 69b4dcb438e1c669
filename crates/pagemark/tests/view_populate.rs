//! Views of memory that populate pages ahead, beside the tracker of views.

use std::ops::Range;

use pagemark::track::view_scan::ViewScan;
use pagemark::{Address, ByteCount, ErrorKind, PageNumber, PageRangeExt, RangeSet};
use pagemark_linux::populate::POPULATE;
use pagemark_linux::views::Views;

#[test]
fn what_is_populated_between_two_collects_counts_as_written() {
    if let Some(error) = POPULATE.refusal() {
        return pagemark_testing::skipped(&error.to_string());
    }
    let views = Views::new(ByteCount::of_pages(64), 2).unwrap();
    // SAFETY: both values are dropped together, the tracker first.
    let scan = match unsafe { ViewScan::new(&views) } {
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            return pagemark_testing::skipped(&error.to_string());
        }
        scan => scan.unwrap(),
    };
    let offsets_of = |pages: Range<u64>| (PageNumber::new(pages.start)..PageNumber::new(pages.end)).addresses();
    views.begin_tracking();
    let written = || {
        let collect = |view: usize| {
            let (mut found, view) = (RangeSet::new(), views.view(view));
            let offset = |address: Address| Address::MIN + (address - view.start);
            scan.collect(&view, &RangeSet::new(), |run| found.insert(offset(run.start)..offset(run.end))).unwrap();
            found
        };
        [collect(0), collect(1)]
    };
    let populated = || {
        let mut pages = RangeSet::new();
        views.take_populated(views.view_bytes(), &mut |page| pages.insert(page));
        pages
    };
    written();
    views.prepare(&offsets_of(5..6));
    let block = RangeSet::from(offsets_of(0..16));
    assert_eq!((written(), populated()), ([block.clone(), block.clone()], block));
    // The block was populated before: only what was asked for is opened again, and only once.
    let run = RangeSet::from(offsets_of(6..8));
    views.prepare(&offsets_of(6..8));
    assert_eq!((written(), populated()), ([run.clone(), run.clone()], run.clone()));
    views.prepare(&offsets_of(6..8));
    views.prepare(&offsets_of(6..8));
    assert_eq!((written(), populated()), ([run.clone(), run.clone()], run));
    // Of a block that is in use, what was freed is opened again, and nothing beside it.
    // SAFETY: nobody needs the content.
    unsafe { views.free(&offsets_of(9..11)).unwrap() };
    views.prepare(&offsets_of(9..11));
    let run = RangeSet::from(offsets_of(9..11));
    assert_eq!((written(), populated()), ([run.clone(), run.clone()], run));
    assert_eq!((written(), populated()), ([RangeSet::new(), RangeSet::new()], RangeSet::new()));
}
