//! Shared memory of a machine that the host reclaims between checkpoints: its pages are in a file,
//! and not in QEMU's page table.

#[path = "support/restored.rs"]
mod restored;

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use pagemark::repository::Repository;
use pagemark::track::Scope;
use pagemark::{AddressRangeExt, Job, JobOptions, Mechanism};
use pagemark_linux::pagemap::{Filter, PRESENT, Pagemap};
use pagemark_linux::proc::maps;
use pagemark_testing::{MachinePaths, Qemu, RAM_BYTES, TestMonitor, assert_oracle_eq, guest_program, skip, wait_until};
use pagemark_vm::VmTarget;
use restored::restore;
use serde_json::json;

/// Has the kernel reclaim the memory of a QEMU whose machine is stopped.
fn reclaim(qemu: &Qemu, ram: &Path) {
    // SAFETY: the call takes no memory.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, qemu.pid(), 0) };
    assert!(descriptor >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor is new, and belongs to nothing else.
    let process = unsafe { OwnedFd::from_raw_fd(descriptor as i32) };
    let mappings = maps::read(qemu.pid()).unwrap();
    let name = ram.display().to_string();
    let mapping = mappings.iter().find(|mapping| mapping.name == name.as_bytes() && mapping.shared).unwrap().range();
    let pagemap = Pagemap::of_process(qemu.pid()).unwrap();
    wait_until("the pages to leave the page table", || {
        // Only what is written back can be dropped.
        File::open(ram).unwrap().sync_all().unwrap();
        let part = libc::iovec { iov_base: mapping.start.as_mut_ptr(), iov_len: mapping.byte_count().to_usize() };
        // SAFETY: the kernel reads the range from the structure; the memory is another process's,
        // and keeps its content.
        let advised = unsafe {
            libc::syscall(libc::SYS_process_madvise, process.as_raw_fd(), &raw const part, 1, libc::MADV_PAGEOUT, 0)
        };
        assert!(advised >= 0, "{}", std::io::Error::last_os_error());
        let mut present = 0;
        let filter = Filter { any: PRESENT, ..Filter::default() };
        pagemap.find(&mapping, filter, |run, _| present += run.byte_count().pages_rounded_down()).unwrap();
        present * 4096 < RAM_BYTES / 8
    });
}

#[test]
fn what_the_machine_has_written_is_saved() {
    if guest_program().is_none() {
        skip!("no QEMU, or no compiler for its guest");
    }
    if !nix::unistd::geteuid().is_root() {
        skip!("not root");
    }
    let mechanisms = Mechanism::of_scope(Scope::Process);
    for mechanism in mechanisms.filter(|mechanism| pagemark::track::check(*mechanism, Scope::Process).is_ok()) {
        let paths = MachinePaths::default();
        // On a disk: memory without a file can be reclaimed only where there is swap.
        let ram = paths.join("ram");
        let backend = format!("memory-backend-file,id=ram,size=16M,share=on,mem-path={}", ram.display());
        let qemu = Qemu::start(&paths, &["-machine", "pc,memory-backend=ram", "-object", &backend]);
        let mut own = TestMonitor::connect(&paths.join("test.qmp"));
        let repository = Repository::create(&paths.join("repository")).unwrap();
        let target = VmTarget::attach(&paths.monitor(), mechanism).unwrap();
        let mut job = Job::new(target, repository, JobOptions::new("vm"));
        let mut dumps = Vec::new();
        for _ in 0..3 {
            own.run("stop", json!({}));
            let dump = own.physical_memory(RAM_BYTES, &paths.join("dump"));
            reclaim(&qemu, &ram);
            dumps.push((job.checkpoint().unwrap().sequence, dump));
            // A checkpoint reads pages, which come back for that.
            reclaim(&qemu, &ram);
            own.run("cont", json!({}));
            paths.wait_for_steps(20);
        }
        job.detach();
        drop(qemu);
        let repository = Repository::open(&paths.join("repository")).unwrap();
        for (sequence, dump) in &dumps {
            let _restored = restore(&repository.read("vm", *sequence).unwrap()).unwrap();
            let mut own = TestMonitor::connect(&paths.join("test.qmp"));
            let memory = own.physical_memory(RAM_BYTES, &paths.join("dump"));
            let differs = dump.chunks(4096).zip(memory.chunks(4096)).position(|(one, other)| one != other);
            if let Some(p) = differs {
                eprintln!(
                    "{mechanism} {sequence} {p}: {:x?} / {:x?}, count {}",
                    &dump[p * 4096..p * 4096 + 32],
                    &memory[p * 4096..p * 4096 + 32],
                    dump.chunks(4096).zip(memory.chunks(4096)).filter(|(a, b)| a != b).count()
                );
            }
            assert_oracle_eq!(differs, None, "{mechanism}: checkpoint {sequence}: a page that differs");
        }
    }
}
