//! The option that turns deltas of pages off.

mod support;

use pagemark_testing::wait_for;
use support::Pagemark;

#[test]
fn pages_are_stored_whole_on_request() {
    // The format of a repository says whether it has had a page that is stored as what changed.
    let format = |options: &[&str]| {
        let pagemark = Pagemark::new();
        let counters = "
import mmap, time
memory = mmap.mmap(-1, 256 * 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(256):
    memory[page * 4096:(page + 1) * 4096] = (b'%d' % page * 4096)[:4096]
while True:
    for page in range(256):
        memory[page * 4096 + 8:page * 4096 + 16] = time.monotonic_ns().to_bytes(8, 'little')
    time.sleep(0.001)
";
        let options = [&["--memory-only", "--every", "50ms", "--job", "counters"], options].concat();
        let _runner = pagemark.run(&options, &["python3", "-c", counters]);
        wait_for("some checkpoints", || (pagemark.checkpoints("counters").len() > 6).then_some(()));
        let config: serde_json::Value =
            serde_json::from_slice(&std::fs::read(pagemark.repository().join("config")).expect("it is there"))
                .expect("JSON");
        config["format"].as_u64().expect("a number")
    };
    assert_eq!(format(&[]), 3);
    assert!(format(&["--whole-pages"]) < 3);
}
