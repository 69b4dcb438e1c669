//! Page trees of any nodes that name one another, also one node many times: they are loaded,
//! counted, listed and compared in bounded time and memory, and all agree.

#![no_main]

use std::collections::BTreeMap;

use libfuzzer_sys::fuzz_target;
use pagemark::{Blob, ByteCount, ContentId, Error, Kind, MemoryStore, PageNumber, PageTree, Store};

/// Trees of more pages are not listed.
const FEW: u64 = 10_000;

fuzz_target!(|data: &[u8]| {
    let mut store = MemoryStore::with_key([1; 32]);
    // The nodes of each level. Those below a leaf are pages.
    let mut levels: Vec<Vec<ContentId>> = vec![(1..=4).map(|byte| ContentId([byte; 16])).collect()];
    let mut roots = vec![ContentId::ZERO];
    for node in data.as_chunks::<6>().0.iter().take(64) {
        let [level, present, more_present, first, step, shift] = *node;
        // One above the highest, if not below. Some nodes say another level than they have.
        let level = usize::from(level % 17).min(levels.len() - 1);
        let children = u16::from_le_bytes([present, more_present]).max(1);
        let below = &levels[level];
        let mut bytes = vec![level as u8 ^ u8::from(shift > 250)];
        bytes.extend(children.to_le_bytes());
        for child in (0..16).filter(|child| children & 1 << child != 0) {
            let place = usize::from(first) + usize::from(step) * child;
            bytes.extend(below[place % below.len()].0);
        }
        let id = store.put(Kind::Node, &bytes).unwrap();
        if levels.len() == level + 1 {
            levels.push(Vec::new());
        }
        levels[level + 1].push(id);
        roots.push(id);
    }
    let trees: Vec<(ContentId, PageTree)> =
        roots.iter().rev().take(8).filter_map(|&root| Some((root, PageTree::load(root, &store).ok()?))).collect();
    for (root, tree) in &trees {
        let some = PageNumber::new(3)..PageNumber::new(3 + FEW);
        let listed = PageTree::read_pages(*root, std::slice::from_ref(&some), &store).unwrap();
        assert_eq!(listed.len() as u64, tree.count(some.clone()));
        assert_eq!(listed, tree.range(some).collect::<Vec<_>>());
        assert_eq!(tree.is_before(PageNumber::MIN), tree.page_count() == 0);
    }
    for pair in trees.windows(2) {
        let [(a, old), (b, new)] = pair else { continue };
        let stop = || Error::system("enough")(std::io::ErrorKind::Other.into());
        let mut found = BTreeMap::new();
        let mut last = None;
        let compared = PageTree::diff(&store, *a, *b, &mut |page, before, after| {
            assert!(last.is_none_or(|last| last < page));
            assert!(before != after && (before, after) == (old.get(page), new.get(page)));
            last = Some(page);
            found.insert(page, (before, after));
            if found.len() as u64 > FEW { Err(stop()) } else { Ok(()) }
        });
        if old.page_count().max(new.page_count()) > FEW / 2 {
            continue;
        }
        compared.unwrap();
        let mut expected: BTreeMap<PageNumber, (ContentId, ContentId)> =
            old.iter().map(|(page, id)| (page, (id, ContentId::ZERO))).collect();
        new.iter().for_each(|(page, id)| expected.entry(page).or_default().1 = id);
        expected.retain(|_, (before, after)| before != after);
        assert_eq!(found, expected);
        let blob = |root| Blob { bytes: ByteCount::of_pages(FEW), root };
        let ranges = blob(*a).diff(&blob(*b), &store).unwrap();
        let bytes: u64 = ranges.iter().map(|range| (range.end - range.start).get()).sum();
        let below = expected.keys().filter(|page| page.get() < FEW).count() as u64;
        assert_eq!(bytes, ByteCount::of_pages(below).get());
    }
});
