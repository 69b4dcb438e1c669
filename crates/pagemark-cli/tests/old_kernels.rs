//! The command as on older kernels: `as_linux` makes newer interfaces fail as they fail there.

#[path = "support/subject.rs"]
mod subject;
mod support;

use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use pagemark_testing::{LINUX_VERSIONS, as_linux, assert_oracle, reason_without_as_linux, skip};
use serde_json::Value;
use subject::{Steps, Subject, has_criu, is_root, stderr, subject};
use support::{Pagemark, is_alive, kill_and_wait};

/// The interfaces that a version lacks.
fn lacks(version: &str) -> &'static [&'static str] {
    // The oldest first.
    const SINCE: [&str; 14] = [
        "pidfd_open",
        "pidfd_getfd",
        "UFFD_FEATURE_PAGEFAULT_FLAG_WP",
        "faccessat2",
        "fanotify with names",
        "process_madvise",
        "MADV_POPULATE_READ and MADV_POPULATE_WRITE",
        "UFFD_FEATURE_WP_HUGETLBFS_SHMEM",
        "BPF iterator task_vma",
        "BPF iterator task",
        "UFFD_FEATURE_WP_UNPOPULATED",
        "UFFD_FEATURE_WP_ASYNC",
        "PAGEMAP_SCAN",
        "PROCMAP_QUERY",
    ];
    match version {
        "4.18" => &SINCE,
        "5.10" => &SINCE[6..],
        "6.1" => &SINCE[10..],
        other => panic!("what does Linux {other} lack?"),
    }
}

fn run_as_linux(pagemark: &Pagemark, version: &str, arguments: &[&str]) -> Output {
    let mut command = as_linux(version, env!("CARGO_BIN_EXE_pagemark"));
    command.args(arguments).env("PAGEMARK_REPO", pagemark.repository()).current_dir(pagemark.directory());
    command.stdin(Stdio::null()).output().expect("the command runs")
}

fn version(text: &str) -> (u32, u32) {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok());
    (numbers.next().expect("a version"), numbers.next().expect("a version"))
}

#[test]
fn doctor_names_the_mechanisms_of_this_kernel() {
    let found = Pagemark::new().json(&["doctor", "--json"]);
    let release = nix::sys::utsname::uname().expect("a kernel").release().to_string_lossy().into_owned();
    let missing = found["missing"].as_array().expect("a list");
    for interface in pagemark_linux::interface::ALL {
        let named = missing.iter().find(|missing| missing["interface"] == interface.name);
        if version(&release) < version(interface.since) {
            let named = named.unwrap_or_else(|| panic!("{} is not missing on Linux {release}", interface.name));
            assert_eq!(named["is_unknown"], true, "{named}");
        } else if let Some(named) = named {
            assert_eq!(named["is_unknown"], false, "{named} on Linux {release}");
        }
    }
    for mechanism in ["compare", "full", "mprotect", "emulate"] {
        let mechanisms = found["mechanisms"].as_array().expect("a list");
        let finding = mechanisms.iter().find(|finding| finding["mechanism"] == mechanism).expect("every mechanism");
        assert_eq!(finding["works"], true, "{finding}");
        assert_eq!(finding["own_memory"]["works"], true, "{finding}");
    }
    assert!(found["auto"].is_string() && found["auto_own_memory"].is_string(), "{found}");
}

/// The machine of the lab that boots Xen runs this.
#[test]
fn doctor_says_why_a_guest_of_xen_has_no_dirty_bits() {
    if !std::fs::read_to_string("/sys/hypervisor/guest_type").is_ok_and(|guest| guest.trim() == "PV") {
        skip!("this is no paravirtualized guest of Xen");
    }
    let found = Pagemark::new().json(&["doctor", "--json"]);
    let mechanisms = found["mechanisms"].as_array().expect("a list");
    let finding = |name| mechanisms.iter().find(|finding| finding["mechanism"] == name).expect("every mechanism");
    let ldt = finding("ldt");
    assert_eq!(ldt["works"], false, "{ldt}");
    let reason = ldt["reason"].as_str().expect("a reason");
    assert!(reason.contains("paravirtualized guest of Xen"), "{reason}");
    for name in ["pagemap-scan", "uffd", "soft-dirty", "mprotect"] {
        assert_eq!(finding(name)["works"], true, "{}", finding(name));
    }
}

#[test]
fn doctor_reports_the_interfaces_and_mechanisms_of_an_older_kernel() {
    if let Some(reason) = reason_without_as_linux() {
        skip!("{reason}");
    }
    let pagemark = Pagemark::new();
    let here = pagemark.json(&["doctor", "--json"]);
    let finding = |findings: &Value, name: &str| -> Value {
        let mechanisms = findings["mechanisms"].as_array().expect("a list");
        mechanisms.iter().find(|found| found["mechanism"] == name).cloned().unwrap_or_else(|| panic!("no {name}"))
    };
    for version in LINUX_VERSIONS {
        let expected = lacks(version);
        let output = run_as_linux(&pagemark, version, &["doctor", "--json"]);
        assert!(output.status.success(), "{version}: {}", stderr(&output));
        let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let missing: Vec<&str> = found["missing"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|missing| missing["interface"].as_str().expect("a name"))
            .collect();
        let lacks_here = here["missing"].as_array().expect("a list").iter().filter_map(|m| m["interface"].as_str());
        let unexpected: Vec<&&str> = missing.iter().filter(|name| !expected.contains(name)).collect();
        assert!(unexpected.iter().all(|name| lacks_here.clone().any(|here| here == **name)), "{version}: {missing:?}");
        assert!(expected.iter().all(|name| missing.contains(name)), "{version}: {missing:?}");

        // Mechanisms that need no newer interface work.
        for name in ["compare", "full"] {
            assert_eq!(finding(&found, name)["process"]["works"], true, "{version}: {name}: {found}");
        }
        for name in ["mprotect", "emulate", "compare", "full"] {
            assert_eq!(finding(&found, name)["own_memory"]["works"], true, "{version}: {name}: {found}");
        }
        let works = |findings: &Value, name: &str, scope: &str| finding(findings, name)[scope]["works"].clone();
        for scope in ["process", "own_memory"] {
            assert_eq!(works(&found, "soft-dirty", scope), works(&here, "soft-dirty", scope), "{version}: {found}");
        }
        // userfaultfd's write-protection came with 5.7.
        let has_userfaultfd = version != "4.18" && works(&here, "uffd", "own_memory") == true;
        assert_eq!(works(&found, "uffd", "own_memory"), has_userfaultfd, "{version}: {found}");
        for name in ["adaptive", "pagemap-scan", "ldt"] {
            let mechanism = finding(&found, name);
            assert!(mechanism["works"] == false && mechanism["reason"].is_string(), "{version}: {mechanism}");
        }
        let has_soft_dirty = works(&found, "soft-dirty", "process") == true;
        assert_eq!(found["auto"], if has_soft_dirty { "soft-dirty" } else { "compare" }, "{version}");
        assert_eq!(found["auto_own_memory"], if has_userfaultfd { "uffd" } else { "mprotect" }, "{version}");
    }
    let text = String::from_utf8(run_as_linux(&pagemark, "6.1", &["doctor"]).stdout).expect("UTF-8");
    assert!(text.contains(" PAGEMAP_SCAN (Linux 6.7): "), "{text}");
}

/// Gives this thread and its children a /run of their own, because CRIU caches the features of the
/// kernel there.
fn have_own_run_directory() {
    let check = |result: i32| assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    let none = std::ptr::null();
    // SAFETY: the strings live through the calls, which change the mounts that this thread sees.
    unsafe {
        check(libc::unshare(libc::CLONE_NEWNS));
        check(libc::mount(none, c"/".as_ptr(), none, libc::MS_REC | libc::MS_PRIVATE, none.cast()));
        check(libc::mount(c"run".as_ptr(), c"/run".as_ptr(), c"tmpfs".as_ptr(), 0, none.cast()));
    }
}

#[test]
fn a_process_comes_back_as_on_an_older_kernel() {
    if !is_root() || !has_criu() {
        skip!("whole checkpoints need root and CRIU");
    }
    let Some(_) = subject() else { skip!("no C compiler") };
    if let Some(reason) = reason_without_as_linux() {
        skip!("{reason}");
    }
    for version in LINUX_VERSIONS {
        std::thread::Builder::new()
            .name(format!("as Linux {version}"))
            .spawn(move || comes_back(version))
            .expect("a thread")
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    }
}

/// Before Linux 5.5 CRIU asks for the next process id, which another process can get first.
#[test]
fn a_process_comes_back_on_an_older_kernel_while_others_begin() {
    if !is_root() || !has_criu() {
        skip!("whole checkpoints need root and CRIU");
    }
    let Some(_) = subject() else { skip!("no C compiler") };
    if let Some(reason) = reason_without_as_linux() {
        skip!("{reason}");
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                Command::new("true").status().expect("a process");
            }
        });
        let restored = scope.spawn(comes_back_often).join();
        is_over.store(true, Ordering::Relaxed);
        restored.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

fn comes_back_often() {
    const RESTORES: usize = 12;
    have_own_run_directory();
    let pagemark = Pagemark::new();
    let steps = Steps::new(pagemark.directory());
    let mut subject =
        Subject::start_without_restartable_sequences(&steps.arguments(1)).expect("the subject is compiled");
    let pid = subject.pid();
    steps.goes_on(pid);
    let done = |arguments: &[&str]| {
        let output = run_as_linux(&pagemark, "4.18", arguments);
        assert!(output.status.success(), "{arguments:?}: {}", stderr(&output));
    };
    done(&["checkpoint", "--job", "subject", &subject.pid_text()]);
    subject.kill();
    for _ in 0..RESTORES {
        done(&["restore", "--detach", "--yes", "subject"]);
        steps.goes_on(pid);
        kill_and_wait(pid);
    }
}

fn comes_back(version: &str) {
    have_own_run_directory();
    let pagemark = Pagemark::new();
    let steps = Steps::new(pagemark.directory());
    let mut subject =
        Subject::start_without_restartable_sequences(&steps.arguments(16)).expect("the subject is compiled");
    let pid = subject.pid();
    steps.goes_on(pid);
    let done = |arguments: &[&str]| {
        let output = run_as_linux(&pagemark, version, arguments);
        assert!(output.status.success(), "{version}: {arguments:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    for _ in 0..2 {
        done(&["checkpoint", "--job", "subject", &subject.pid_text()]);
        steps.goes_on(pid);
    }
    // Where the C library uses restartable sequences, the message names the remedy.
    let other = Subject::start(&["wait"]).expect("the subject is compiled");
    let output = run_as_linux(&pagemark, version, &["checkpoint", "--job", "other", &other.pid_text()]);
    assert!(output.status.success() || stderr(&output).contains("glibc.pthread.rseq=0"), "{}", stderr(&output));
    other.is_untouched();
    drop(other);
    // In each step the subject compares its memory with the expected content.
    let at = steps.pause();
    done(&["checkpoint", "--job", "subject", &subject.pid_text()]);
    steps.resume();
    steps.goes_on(pid);
    subject.kill();
    steps.order_pause();
    done(&["restore", "--detach", "--yes", "subject"]);
    assert_oracle!(is_alive(pid), "{version}: the program has ended");
    steps.is_paused_at(at);
    steps.resume();
    steps.goes_on(pid);
    kill_and_wait(pid);
    pagemark.verify(&[]);
}
