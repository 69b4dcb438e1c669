//! The tests, from CRIU's source package, built.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::archive::{self, Apt};
use crate::{Error, Result, cache, command, packages, progress};

/// What building the tests needs.
const PACKAGES: [&str; 10] = [
    "gcc",
    "make",
    "pkg-config",
    "libaio-dev",
    "libbsd-dev",
    "libcap-dev",
    "libnl-3-dev",
    "libprotobuf-c-dev",
    "protobuf-c-compiler",
    "protobuf-compiler",
];
/// What some tests run: `ip`, `iptables` and `nft` arrange their networks.
const PROGRAMS: [&str; 3] = ["iproute2", "iptables", "nftables"];

/// The directory `test` of CRIU's source, with the tests built. It is in the cache.
///
/// # Errors
/// If the source cannot be fetched, or the library of the tests cannot be built. A test that cannot
/// be built is left out: some need libraries or kernel headers that a host may not have.
pub fn built() -> Result<PathBuf> {
    packages::install(&PACKAGES)?;
    packages::install(&PROGRAMS)?;
    let _lock = cache::lock("zdtm.lock")?;
    let directory = cache::project().join("zdtm");
    let tree = directory.join("test");
    if tree.join("zdtm/lib/libzdtmtst.a").is_file() {
        return Ok(tree);
    }
    cache::remove(&directory)?;
    let work = directory.join("work");
    cache::create(&work)?;
    progress!("fetching CRIU's source and building its tests (three minutes)");
    let apt = Apt::new(&directory.join("apt"), &archive::address()?, "unstable", &["deb-src"])?;
    apt.unpack_source("criu", &work, &[], "test/zdtm/static")?;
    // With `--keep-going`, its status says only whether all of them could be built.
    let log = directory.join("build.log");
    let mut make = Command::new("make");
    make.args(["--keep-going", "-C", "test/zdtm"]).current_dir(&work);
    let built = command::logged(&mut make, &log, "building CRIU's tests", "the log is beside the tests");
    if !work.join("test/zdtm/lib/libzdtmtst.a").is_file() {
        return built.and(Err(Error::unmet("CRIU's tests have no library", format!("see {}", log.display()))));
    }
    // The tests include headers of the source, but need it no more once they are built.
    let finished = work.join("test");
    std::fs::rename(&finished, &tree).map_err(Error::file("rename", &finished))?;
    cache::remove(&work)?;
    cache::remove(&directory.join("apt"))?;
    Ok(tree)
}

/// What the names of copies begin with; the id of their process follows.
pub const COPY: &str = "pagemark-zdtm";

/// A copy of the tests, in which one of them runs at a time; removed when it is dropped.
pub struct Copy {
    directory: PathBuf,
    tests: PathBuf,
}

impl Copy {
    /// Copies the tests to where all users can reach them: some tests change their user.
    pub fn new(tree: &Path) -> Result<Copy> {
        static COPIES: AtomicU32 = AtomicU32::new(0);
        let number = COPIES.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("{COPY}.{}.{number}", std::process::id()));
        let tests = directory.join("test");
        let copy = Copy { directory, tests };
        cache::create(&copy.directory)?;
        let mut copying = Command::new("cp");
        copying.args(["-a", "--reflink=auto"]).arg(tree).arg(&copy.tests);
        command::output(&mut copying, "copying CRIU's tests", "the disk may be full")?;
        Ok(copy)
    }

    /// The copy of CRIU's directory `test`.
    pub fn path(&self) -> &Path {
        &self.tests
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        // What remains is removed by the next run.
        let _ = cache::remove(&self.directory);
    }
}
