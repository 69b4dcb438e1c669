//! The rules of [`Backend`] as a test that every backend has to pass.

use std::any::Any;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Backend, Lease, LeaseMode, Leased, ListEntry, ListKind};

/// An empty backend, and what has to be kept while it is used.
pub type Fresh = (Arc<dyn Backend>, Box<dyn Any>);

/// Panics if the backend, which is empty, breaks the rule.
type Rule = fn(&Arc<dyn Backend>);

/// Checks the rules on backends that `make` gives, each of which is empty.
///
/// # Panics
/// A rule is broken.
pub fn check(make: &mut dyn FnMut() -> Fresh) {
    let rules: [(&str, Rule); 13] = [
        ("objects are read as they were written", read_as_written),
        ("reads beyond the end fail", reads_beyond_the_end),
        ("names", names),
        ("lists", lists),
        ("what is staged is not visible", staged),
        ("a publication replaces", replaces),
        ("removal", removal),
        ("a lease is held by one alone", leases),
        ("a lease is shared", shared_leases),
        ("readers' leases keep objects", reader_leases),
        ("stamps tell every change", stamps),
        ("no half object is ever seen", never_half),
        ("writers in several threads", writers_in_threads),
    ];
    for (name, rule) in rules {
        eprintln!("rule: {name}");
        let (backend, _keep) = make();
        assert_eq!(backend.list("").expect("a list"), [], "the backend is not empty");
        rule(&backend);
    }
}

fn publish(backend: &dyn Backend, name: &str, content: &[u8]) {
    let mut object = backend.create(name).expect("a new object");
    object.append(&[content]).expect("room");
    object.publish().expect("it is published");
}

/// The content of an object that exists.
fn read(backend: &dyn Backend, name: &str) -> Vec<u8> {
    let object = backend.open(name).expect("it opens").expect("it exists");
    let mut content = vec![0; object.bytes().expect("its length") as usize];
    object.read_at(&mut content, 0).expect("its content");
    content
}

fn names_in(backend: &dyn Backend, directory: &str) -> Vec<String> {
    let entries = backend.list(directory).expect("a list");
    let mut names: Vec<_> =
        entries.into_iter().filter(|entry| entry.kind == ListKind::Object).map(|entry| entry.name).collect();
    names.sort();
    names
}

fn noise(bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

fn read_as_written(backend: &Arc<dyn Backend>) {
    for bytes in [0, 1, 4095, 4096, 100_000, (1 << 20) + 1, 3_000_000] {
        let content = noise(bytes);
        let name = format!("directory/of {bytes} bytes");
        let mut object = backend.create(&name).expect("a new object");
        for piece in content.chunks(70_001) {
            let (first, second) = piece.split_at(piece.len() / 3);
            object.append(&[first, &[], second]).expect("room");
            // What was appended can be read before it is published.
            let end = object.bytes() as usize;
            let begin = end.saturating_sub(100_000);
            let mut last = vec![0; end - begin];
            object.read_at(&mut last, begin as u64).expect("it was appended");
            assert!(last == content[begin..end]);
            assert!(object.read_at(&mut [0; 2], end as u64 - 1).is_err());
        }
        assert_eq!(object.bytes(), bytes as u64);
        object.expect_reads().expect("a hint");
        let finished = object.finish().expect("it ends");
        let check = || {
            assert_eq!(finished.bytes().expect("its length"), bytes as u64);
            let mut all = vec![0; bytes];
            finished.read_at(&mut all, 0).expect("its content");
            assert!(all == content);
        };
        check();
        object.sync().expect("it is durable");
        object.publish().expect("it is published");
        check();
        assert!(read(&**backend, &name) == content);
        assert_eq!(backend.bytes(&name).expect("its length"), Some(bytes as u64));
    }
    backend.sync("directory").expect("it is durable");
}

fn reads_beyond_the_end(backend: &Arc<dyn Backend>) {
    publish(&**backend, "a", &noise(1000));
    let object = backend.open("a").expect("it opens").expect("it exists");
    for (offset, bytes) in [(1000, 1), (999, 2), (0, 1001), (u64::MAX, 1), (u64::MAX - 3, 8)] {
        let error = object.read_at(&mut vec![0; bytes], offset).expect_err("the content ends before that");
        if offset <= 1000 {
            assert_eq!(error.source.kind(), ErrorKind::UnexpectedEof, "{error}");
        }
    }
    object.read_at(&mut [], 1000).expect("nothing to read");
    let mut end = [0; 10];
    object.read_at(&mut end, 990).expect("it is there");
    assert_eq!(end, noise(1000)[990..]);
}

fn names(backend: &Arc<dyn Backend>) {
    let long = "n".repeat(240);
    let odd = [
        "a b",
        " ",
        "%2F",
        "a'b\"c",
        "ümläut 日本",
        "-rf",
        "~",
        "a\nb",
        ".hidden",
        "tmp",
        "x.tmp.y",
        "*?[x]",
        "back\\slash",
        "a/b/c d",
        "a/lock",
        "A",
        "\u{feff}",
        &long,
    ];
    for (number, name) in odd.iter().enumerate() {
        publish(&**backend, name, format!("{number}").as_bytes());
    }
    for (number, name) in odd.iter().enumerate() {
        assert_eq!(read(&**backend, name), format!("{number}").as_bytes(), "{name:?}");
        let last = name.rsplit('/').next().expect("a part").to_owned();
        assert!(names_in(&**backend, super::directory_of(name)).contains(&last), "{name:?}");
        backend.remove(name).expect("it is removed");
        assert!(backend.open(name).expect("no error").is_none(), "{name:?}");
    }
    let too_long = "n".repeat(241);
    for name in
        ["", "/", "a/", "/a", "a//b", ".", "..", "a/../b", "a\0b", "a.tmp", "d/.tmp", "lock", "lock/a", &too_long]
    {
        assert!(backend.create(name).is_err_and(|error| error.source.kind() == ErrorKind::InvalidInput), "{name:?}");
        assert!(backend.open(name).is_err(), "{name:?}");
        assert!(backend.remove(name).is_err(), "{name:?}");
    }
}

fn lists(backend: &Arc<dyn Backend>) {
    assert_eq!(backend.list("nowhere").expect("no error"), []);
    for name in ["one", "a/two", "a/three", "ab/four", "a/b/five"] {
        publish(&**backend, name, b"");
    }
    let list = |directory: &str| {
        let mut entries = backend.list(directory).expect("a list");
        entries.sort();
        entries
    };
    let object = |name: &str| ListEntry { name: name.into(), kind: ListKind::Object };
    let directory = |name: &str| ListEntry { name: name.into(), kind: ListKind::Directory };
    assert_eq!(list(""), [directory("a"), directory("ab"), object("one")]);
    assert_eq!(list("a"), [directory("b"), object("three"), object("two")]);
    assert_eq!(list("a/b"), [object("five")]);
    assert_eq!(list("one"), []);
    assert_eq!(backend.bytes("a/two").expect("its length"), Some(0));
    assert_eq!(backend.bytes("a/six").expect("no error"), None);
}

fn staged(backend: &Arc<dyn Backend>) {
    let mut object = backend.create("a/b").expect("a new object");
    object.append(&[b"content"]).expect("room");
    object.sync().expect("it is durable");
    object.finish().expect("it ends");
    assert_eq!(names_in(&**backend, "a"), [""; 0]);
    assert!(backend.open("a/b").expect("no error").is_none());
    assert_eq!(backend.bytes("a/b").expect("no error"), None);
    assert!(backend.lease_reader("a/b").expect("no error").is_none());
    drop(object);
    assert!(backend.open("a/b").expect("no error").is_none());
    // The name can be used again, also after a writer that died.
    std::mem::forget(backend.create("a/b").expect("a new object"));
    publish(&**backend, "a/b", b"other");
    std::mem::forget(backend.create("a/b").expect("a new object"));
    backend.discard_staged().expect("they are discarded");
    assert_eq!(read(&**backend, "a/b"), b"other");
}

fn replaces(backend: &Arc<dyn Backend>) {
    publish(&**backend, "a", b"the old content");
    publish(&**backend, "a", b"new");
    assert_eq!(read(&**backend, "a"), b"new");
    assert_eq!(names_in(&**backend, ""), ["a"]);
}

fn removal(backend: &Arc<dyn Backend>) {
    backend.remove("nothing").expect("no error");
    assert!(backend.remove_unleased("nothing").expect("no error"));
    publish(&**backend, "a", &noise(100_000));
    let open = backend.open("a").expect("it opens").expect("it exists");
    backend.remove("a").expect("it is removed");
    backend.sync("").expect("it is durable");
    assert!(backend.open("a").expect("no error").is_none());
    assert_eq!(names_in(&**backend, ""), [""; 0]);
    // An open object gives its content, or the error that it is gone.
    publish(&**backend, "a", &[0; 50_000]);
    let mut content = vec![0; 100_000];
    match open.read_at(&mut content, 0) {
        Ok(()) => assert!(content == noise(100_000)),
        Err(error) => assert!(error.is_not_found(), "{error}"),
    }
}

/// The lease `name` for one holder alone; none if it is held.
fn alone(backend: &Arc<dyn Backend>, name: &str, owner: &str) -> Option<Box<dyn Lease>> {
    granted(backend.lease(name, LeaseMode::Alone, owner).expect("no error"))
}

fn granted(leased: Leased) -> Option<Box<dyn Lease>> {
    match leased {
        Leased::Granted(lease) => Some(lease),
        Leased::Held { .. } => None,
    }
}

fn leases(backend: &Arc<dyn Backend>) {
    let lease = alone(backend, "one", "the first").expect("nobody holds it");
    lease.check().expect("it is held");
    let stamp = |mode| match backend.lease("one", mode, "the second").expect("no error") {
        Leased::Granted(_) => panic!("two hold the lease"),
        Leased::Held { owner, stamp } => {
            assert!(owner.is_empty() || owner == "the first", "{owner}");
            stamp
        }
    };
    let before = stamp(LeaseMode::Alone);
    assert_eq!(stamp(LeaseMode::Shared), before);
    lease.show_progress();
    assert_ne!(stamp(LeaseMode::Alone), before);
    let other = alone(backend, "two", "the second").expect("it is another lease");
    assert_eq!(backend.list("").expect("a list"), [], "a lease is no object");
    drop((lease, other));
    assert!(alone(backend, "one", "the third").is_some());
    for wrong in ["", ".hidden", "a/b", "a b", "a\0"] {
        assert!(backend.lease(wrong, LeaseMode::Alone, "x").is_err(), "{wrong:?}");
    }
}

fn shared_leases(backend: &Arc<dyn Backend>) {
    let shared = || granted(backend.lease("one", LeaseMode::Shared, "shares").expect("no error"));
    let (first, second) = (shared().expect("it is free"), shared().expect("it is shared"));
    assert!(alone(backend, "one", "alone").is_none());
    drop(first);
    assert!(alone(backend, "one", "alone").is_none());
    drop(second);
    let only = alone(backend, "one", "alone").expect("nobody holds it");
    assert!(shared().is_none());
    drop(only);
    assert!(shared().is_some());
}

fn reader_leases(backend: &Arc<dyn Backend>) {
    assert!(backend.lease_reader("a").expect("no error").is_none());
    publish(&**backend, "a", b"content");
    publish(&**backend, "b", b"content");
    let leases = [0, 1].map(|_| backend.lease_reader("a").expect("no error").expect("it exists"));
    assert!(alone(backend, "one", "a writer").is_some());
    for lease in leases {
        lease.check().expect("it is held");
        assert!(!backend.remove_unleased("a").expect("no error"));
        assert_eq!(read(&**backend, "a"), b"content");
    }
    assert!(backend.remove_unleased("a").expect("no error"));
    assert!(backend.lease_reader("a").expect("no error").is_none());
    assert!(backend.open("a").expect("no error").is_none());
    assert!(backend.remove_unleased("b").expect("no error"));
}

fn stamps(backend: &Arc<dyn Backend>) {
    // A stamp may be missing at any moment.
    let stamp = || {
        (0..40).find_map(|round| {
            std::thread::sleep(std::time::Duration::from_millis(if round < 2 { 0 } else { 10 }));
            backend.stamp("a")
        })
    };
    publish(&**backend, "a/one", b"");
    let Some(first) = stamp() else { return };
    assert_eq!(stamp(), Some(first), "nothing has changed");
    publish(&**backend, "a/two", b"");
    assert_ne!(backend.stamp("a"), Some(first));
    let second = stamp();
    backend.remove("a/one").expect("it is removed");
    assert!(backend.stamp("a").is_none_or(|stamp| Some(stamp) != second));
}

fn never_half(backend: &Arc<dyn Backend>) {
    const OBJECTS: usize = 60;
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let mut seen = 0;
            loop {
                // What is published before the list begins is in it.
                let ends = is_done.load(Ordering::Acquire);
                let names = names_in(&**backend, "a");
                for name in &names {
                    let Some(object) = backend.open(&format!("a/{name}")).expect("no error") else { continue };
                    let number: usize = name.parse().expect("a whole name");
                    match object.bytes() {
                        Ok(bytes) => assert_eq!(bytes, number as u64 * 1000, "{name} is not whole"),
                        Err(error) => assert!(error.is_not_found(), "{error}"),
                    }
                }
                assert!(names.len() >= seen, "{} objects were there, now {}", seen, names.len());
                seen = names.len();
                if ends {
                    return seen;
                }
            }
        });
        for number in 0..OBJECTS {
            let mut object = backend.create(&format!("a/{number}")).expect("a new object");
            for _ in 0..number {
                object.append(&[&[7; 1000]]).expect("room");
            }
            object.publish().expect("it is published");
        }
        is_done.store(true, Ordering::Release);
        assert_eq!(reader.join().expect("no panic"), OBJECTS);
    });
}

fn writers_in_threads(backend: &Arc<dyn Backend>) {
    let holders = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (backend, holders) = (backend.clone(), &holders);
            scope.spawn(move || {
                for round in 0..10 {
                    let lease = loop {
                        match alone(&backend, "one", &format!("thread {thread}")) {
                            Some(lease) => break lease,
                            None => std::thread::yield_now(),
                        }
                    };
                    assert!(!holders.swap(true, Ordering::AcqRel), "two threads hold the lease");
                    publish(&*backend, &format!("a/{thread} {round}"), &[thread as u8; 10]);
                    assert!(holders.swap(false, Ordering::AcqRel));
                    drop(lease);
                }
            });
        }
    });
    assert_eq!(names_in(&**backend, "a").len(), 40);
}
