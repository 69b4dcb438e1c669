//! Regions of processes with few rights: of another user, of a program that has dropped its rights,
//! and where a seccomp filter refuses system calls. Each mechanism works, or says why it does not.

use std::process::Command;

use pagemark::region::{Region, RegionOptions};
use pagemark::{Address, Error, ErrorKind, Mechanism, PAGE_SIZE};
use pagemark_testing::{assert_oracle, assert_oracle_eq};

const PAGES: usize = 40;
const NOBODY: libc::uid_t = 65_534;
/// `PAGEMAP_SCAN`
const PAGEMAP_SCAN: u32 = 0xc060_6610;

/// A system call, and its second argument if only calls with that one are refused.
type Refused = (&'static str, libc::c_long, Option<u32>);

const REFUSED: [Refused; 8] = [
    ("userfaultfd", libc::SYS_userfaultfd, None),
    ("PAGEMAP_SCAN", libc::SYS_ioctl, Some(PAGEMAP_SCAN)),
    ("ioctl", libc::SYS_ioctl, None),
    ("mprotect", libc::SYS_mprotect, None),
    ("memfd_create", libc::SYS_memfd_create, None),
    ("process_vm_readv", libc::SYS_process_vm_readv, None),
    ("msync", libc::SYS_msync, None),
    ("madvise", libc::SYS_madvise, None),
];

/// Has the kernel refuse a system call of this thread, and those of threads that it makes.
fn refuse((_, number, argument): Refused, error: i32) {
    let jump = |value: u32, otherwise: u8| libc::sock_filter {
        code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16,
        jt: 0,
        jf: otherwise,
        k: value,
    };
    let plain = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let load = |offset: u32| plain(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    // Offsets in `struct seccomp_data`: the number, and the low half of the second argument.
    let mut filter = match argument {
        None => vec![load(0), jump(number as u32, 1)],
        Some(value) => vec![load(0), jump(number as u32, 3), load(24), jump(value, 1)],
    };
    filter.push(plain(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | error as u32));
    filter.push(plain(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program lives through the calls.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

/// A transaction of each kind, a snapshot and its restore.
fn is_right(region: &Region) -> Result<(), Error> {
    let byte = |offset: usize| {
        let mut byte = [0];
        region.read(offset, &mut byte).unwrap();
        byte[0]
    };
    region.write(5000, &[1])?;
    region.begin()?;
    region.write(5000, &[2])?;
    region.write(9 * PAGE_SIZE, &[3])?;
    assert_oracle!(region.rollback()?.contains(Address::new(5000)), "a write was missed");
    assert_oracle_eq!((byte(5000), byte(9 * PAGE_SIZE)), (1, 0), "the content after the rollback");
    region.begin()?;
    region.write(20 * PAGE_SIZE, &[4])?;
    assert_oracle!(region.commit()?.contains(Address::from(20 * PAGE_SIZE)), "a write was missed");
    let snapshot = region.snapshot()?;
    region.write(20 * PAGE_SIZE, &[5])?;
    region.restore(&snapshot)?;
    assert_oracle_eq!(byte(20 * PAGE_SIZE), 4, "the content after the restore");
    region.discard(0..8 * PAGE_SIZE)?;
    assert_oracle_eq!(byte(5000), 0, "the discarded content");
    Ok(())
}

fn with(mechanism: Mechanism) -> Result<Region, Error> {
    let options = RegionOptions { mechanism: Some(mechanism), ..RegionOptions::default() };
    Region::with_options(PAGES * PAGE_SIZE, options)
}

/// Every mechanism works, or is refused by an error of the kinds that are for that.
fn each_mechanism_is_right_or_refused() {
    for mechanism in Mechanism::ALL {
        match with(mechanism).and_then(|region| is_right(&region)) {
            Ok(()) => {}
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::System), "{mechanism}: {error}");
                eprintln!("{mechanism}: {error}");
            }
        }
    }
}

fn become_nobody() {
    // SAFETY: the calls take numbers.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setgroups(0, std::ptr::null()), 0);
            assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
            assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
        }
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0), 0);
    }
}

/// As a daemon that was started by root.
fn after_rights_were_dropped() {
    let before = Region::new(PAGES * PAGE_SIZE).unwrap();
    let chosen = before.mechanism();
    before.begin().unwrap();
    before.write(7, &[1]).unwrap();
    become_nobody();
    before.write(3 * PAGE_SIZE, &[1]).unwrap();
    assert_eq!(before.rollback().unwrap().page_count(), 2);
    is_right(&before).unwrap();
    // The files of `/proc` that the regions share are open.
    is_right(&Region::new(PAGES * PAGE_SIZE).unwrap()).unwrap();
    drop(before);
    let refused = Region::new(PAGES * PAGE_SIZE).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::System);
    assert!(refused.to_string().contains("PR_SET_DUMPABLE"), "{refused}");
    // SAFETY: the call takes numbers.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) }, 0);
    let again = Region::new(PAGES * PAGE_SIZE).unwrap();
    is_right(&again).unwrap();
    assert_eq!(again.mechanism(), chosen);
    each_mechanism_is_right_or_refused();
}

const CASE: &str = "PAGEMARK_RIGHTS_CASE";

#[test]
fn in_a_process_of_its_own() {
    let Ok(case) = std::env::var(CASE) else { return };
    match case.split_once(' ') {
        None => after_rights_were_dropped(),
        Some((name, error)) => {
            refuse(REFUSED.into_iter().find(|refused| refused.0 == name).unwrap(), error.parse().unwrap());
            each_mechanism_is_right_or_refused();
            // Nothing else frees memory.
            if name != "madvise" {
                is_right(&Region::new(PAGES * PAGE_SIZE).unwrap()).unwrap();
            }
        }
    }
    // SAFETY: the call ends the process.
    unsafe { libc::_exit(0) }
}

fn run(case: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "in_a_process_of_its_own", "--nocapture", "--test-threads=1"])
        .env(CASE, case)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{case}: {} {text}", output.status);
    text
}

#[test]
fn a_daemon_that_drops_its_rights_keeps_its_regions() {
    run("dropped");
}

#[test]
fn refused_system_calls_leave_mechanisms_that_work() {
    for (name, ..) in REFUSED {
        for error in [libc::EPERM, libc::ENOSYS] {
            eprintln!("== {name} {error}\n{}", run(&format!("{name} {error}")));
        }
    }
}
