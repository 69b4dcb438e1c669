//! The system calls that the kernel carries out as they are, and what their arguments are.

use std::collections::HashMap;
use std::sync::LazyLock;

/// What an argument of a call is, as far as the machine has to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A number, whatever it means.
    Value,
    /// A file descriptor.
    Descriptor,
    /// An address, or a number that cannot be mistaken for an address of the monitor.
    Pointer,
    /// The path of a file whose links are followed.
    Path,
    /// The start of a range of memory, whose length is the next argument.
    Range,
}

/// A call that the kernel carries out.
#[derive(Clone, Debug)]
pub struct Passed {
    /// The call's name.
    pub name: &'static str,
    /// Its arguments.
    pub kinds: Vec<Kind>,
}

/// Number, name, and a letter for each argument: v(alue), f(ile descriptor), p(ointer), n(ame of a
/// file), r(ange).
macro_rules! table {
    ($($number:ident $name:ident $kinds:literal)*) => {
        &[$((libc::$number, stringify!($name), $kinds)),*]
    };
}

#[rustfmt::skip]
const TABLE: &[(i64, &str, &str)] = table! {
    SYS_read read "fpv"  SYS_write write "fpv"  SYS_open open "nvv"  SYS_stat stat "np"  SYS_fstat fstat "fp"
    SYS_lstat lstat "pp"  SYS_poll poll "pvv"  SYS_lseek lseek "fvv"  SYS_ioctl ioctl "fvp"
    SYS_pread64 pread64 "fpvv"  SYS_pwrite64 pwrite64 "fpvv"  SYS_access access "nv"  SYS_pipe pipe "p"
    SYS_select select "vpppp"  SYS_sched_yield sched_yield ""  SYS_msync msync "rvv"  SYS_mincore mincore "rvp"
    SYS_madvise madvise "rvv"  SYS_shmget shmget "vvv"  SYS_shmctl shmctl "vvp"  SYS_dup dup "f"  SYS_pause pause ""
    SYS_nanosleep nanosleep "pp"  SYS_getitimer getitimer "vp"  SYS_alarm alarm "v"  SYS_setitimer setitimer "vpp"
    SYS_getpid getpid ""  SYS_sendfile sendfile "ffpv"  SYS_socket socket "vvv"  SYS_connect connect "fpv"
    SYS_accept accept "fpp"  SYS_sendto sendto "fpvvpv"  SYS_recvfrom recvfrom "fpvvpp"  SYS_shutdown shutdown "fv"
    SYS_bind bind "fpv"  SYS_listen listen "fv"  SYS_getsockname getsockname "fpp"
    SYS_getpeername getpeername "fpp"  SYS_socketpair socketpair "vvvp"  SYS_setsockopt setsockopt "fvvpv"
    SYS_getsockopt getsockopt "fvvpp"  SYS_wait4 wait4 "vpvp"  SYS_kill kill "vv"  SYS_uname uname "p"
    SYS_semget semget "vvv"  SYS_semop semop "vpv"  SYS_semctl semctl "vvvp"  SYS_msgget msgget "vv"
    SYS_msgsnd msgsnd "vpvv"  SYS_msgrcv msgrcv "vpvvv"  SYS_msgctl msgctl "vvp"  SYS_fcntl fcntl "fvp"
    SYS_flock flock "fv"  SYS_fsync fsync "f"  SYS_fdatasync fdatasync "f"  SYS_truncate truncate "nv"
    SYS_ftruncate ftruncate "fv"  SYS_getdents getdents "fpv"  SYS_getcwd getcwd "pv"  SYS_chdir chdir "p"
    SYS_fchdir fchdir "f"  SYS_rename rename "pp"  SYS_mkdir mkdir "pv"  SYS_rmdir rmdir "p"  SYS_creat creat "pv"
    SYS_link link "pp"  SYS_unlink unlink "p"  SYS_symlink symlink "pp"  SYS_chmod chmod "nv"  SYS_fchmod fchmod "fv"
    SYS_chown chown "nvv"  SYS_fchown fchown "fvv"  SYS_lchown lchown "pvv"  SYS_umask umask "v"
    SYS_gettimeofday gettimeofday "pp"  SYS_getrlimit getrlimit "vp"  SYS_getrusage getrusage "vp"
    SYS_sysinfo sysinfo "p"  SYS_times times "p"  SYS_getuid getuid ""  SYS_syslog syslog "vpv"  SYS_getgid getgid ""
    SYS_setuid setuid "v"  SYS_setgid setgid "v"  SYS_geteuid geteuid ""  SYS_getegid getegid ""
    SYS_setpgid setpgid "vv"  SYS_getppid getppid ""  SYS_getpgrp getpgrp ""  SYS_setsid setsid ""
    SYS_setreuid setreuid "vv"  SYS_setregid setregid "vv"  SYS_getgroups getgroups "vp"
    SYS_setgroups setgroups "vp"  SYS_setresuid setresuid "vvv"  SYS_getresuid getresuid "ppp"
    SYS_setresgid setresgid "vvv"  SYS_getresgid getresgid "ppp"  SYS_getpgid getpgid "v"  SYS_setfsuid setfsuid "v"
    SYS_setfsgid setfsgid "v"  SYS_getsid getsid "v"  SYS_capget capget "pp"  SYS_capset capset "pp"
    SYS_rt_sigprocmask rt_sigprocmask "vppv"  SYS_rt_sigpending rt_sigpending "pv"
    SYS_rt_sigtimedwait rt_sigtimedwait "pppv"  SYS_rt_sigqueueinfo rt_sigqueueinfo "vvp"
    SYS_rt_sigsuspend rt_sigsuspend "pv"  SYS_utime utime "np"  SYS_mknod mknod "pvv"  SYS_statfs statfs "np"
    SYS_fstatfs fstatfs "fp"  SYS_sysfs sysfs "vpp"  SYS_getpriority getpriority "vv"
    SYS_setpriority setpriority "vvv"  SYS_sched_setparam sched_setparam "vp"
    SYS_sched_getparam sched_getparam "vp"  SYS_sched_setscheduler sched_setscheduler "vvp"
    SYS_sched_getscheduler sched_getscheduler "v"  SYS_sched_get_priority_max sched_get_priority_max "v"
    SYS_sched_get_priority_min sched_get_priority_min "v"  SYS_sched_rr_get_interval sched_rr_get_interval "vp"
    SYS_mlock mlock "rv"  SYS_munlock munlock "rv"  SYS_vhangup vhangup ""  SYS_pivot_root pivot_root "pp"
    SYS_adjtimex adjtimex "p"  SYS_setrlimit setrlimit "vp"  SYS_chroot chroot "p"  SYS_sync sync ""  SYS_acct acct "p"
    SYS_settimeofday settimeofday "pp"  SYS_mount mount "pppvp"  SYS_umount2 umount2 "pv"
    SYS_swapon swapon "pv"  SYS_swapoff swapoff "p"  SYS_sethostname sethostname "pv"
    SYS_setdomainname setdomainname "pv"  SYS_quotactl quotactl "vpvp"  SYS_gettid gettid ""
    SYS_readahead readahead "fvv"  SYS_setxattr setxattr "nppvv"  SYS_lsetxattr lsetxattr "pppvv"
    SYS_fsetxattr fsetxattr "fppvv"  SYS_getxattr getxattr "nppv"  SYS_lgetxattr lgetxattr "pppv"
    SYS_fgetxattr fgetxattr "fppv"  SYS_listxattr listxattr "npv"  SYS_llistxattr llistxattr "ppv"
    SYS_flistxattr flistxattr "fpv"  SYS_removexattr removexattr "np"  SYS_lremovexattr lremovexattr "pp"
    SYS_fremovexattr fremovexattr "fp"  SYS_tkill tkill "vv"  SYS_time time "p"  SYS_futex futex "pvvppv"
    SYS_sched_setaffinity sched_setaffinity "vvp"  SYS_sched_getaffinity sched_getaffinity "vvp"
    SYS_epoll_create epoll_create "v"  SYS_getdents64 getdents64 "fpv"  SYS_semtimedop semtimedop "vpvp"
    SYS_fadvise64 fadvise64 "fvvv"  SYS_timer_create timer_create "vpp"  SYS_timer_settime timer_settime "vvpp"
    SYS_timer_gettime timer_gettime "vp"  SYS_timer_getoverrun timer_getoverrun "v"
    SYS_timer_delete timer_delete "v"  SYS_clock_settime clock_settime "vp"  SYS_clock_gettime clock_gettime "vp"
    SYS_clock_getres clock_getres "vp"  SYS_clock_nanosleep clock_nanosleep "vvpp"
    SYS_epoll_wait epoll_wait "fpvv"  SYS_epoll_ctl epoll_ctl "fvfp"  SYS_tgkill tgkill "vvv"
    SYS_utimes utimes "np"  SYS_mbind mbind "rvvpvv"  SYS_set_mempolicy set_mempolicy "vpv"
    SYS_get_mempolicy get_mempolicy "ppvpv"  SYS_mq_open mq_open "pvvp"  SYS_mq_unlink mq_unlink "p"
    SYS_mq_timedsend mq_timedsend "fpvvp"  SYS_mq_timedreceive mq_timedreceive "fpvpp"
    SYS_mq_notify mq_notify "fp"  SYS_mq_getsetattr mq_getsetattr "fpp"  SYS_waitid waitid "vvpvp"
    SYS_add_key add_key "pppvv"  SYS_request_key request_key "pppv"  SYS_keyctl keyctl "vpppp"
    SYS_ioprio_set ioprio_set "vvv"  SYS_ioprio_get ioprio_get "vv"  SYS_inotify_init inotify_init ""
    SYS_inotify_add_watch inotify_add_watch "fnv"  SYS_inotify_rm_watch inotify_rm_watch "fv"
    SYS_openat openat "fnvv"  SYS_mkdirat mkdirat "fpv"  SYS_mknodat mknodat "fpvv"
    SYS_fchownat fchownat "fpvvv"  SYS_futimesat futimesat "fpp"  SYS_newfstatat newfstatat "fppv"
    SYS_unlinkat unlinkat "fpv"  SYS_renameat renameat "fpfp"  SYS_linkat linkat "fpfpv"
    SYS_symlinkat symlinkat "pfp"  SYS_fchmodat fchmodat "fpv"  SYS_faccessat faccessat "fnv"
    SYS_pselect6 pselect6 "vppppp"  SYS_ppoll ppoll "pvppv"  SYS_set_robust_list set_robust_list "pv"
    SYS_get_robust_list get_robust_list "vpp"  SYS_splice splice "fpfpvv"  SYS_tee tee "ffvv"
    SYS_sync_file_range sync_file_range "fvvv"  SYS_utimensat utimensat "fppv"
    SYS_epoll_pwait epoll_pwait "fpvvpv"  SYS_signalfd signalfd "fpv"  SYS_timerfd_create timerfd_create "vv"
    SYS_eventfd eventfd "v"  SYS_fallocate fallocate "fvvv"  SYS_timerfd_settime timerfd_settime "fvpp"
    SYS_timerfd_gettime timerfd_gettime "fp"  SYS_accept4 accept4 "fppv"  SYS_signalfd4 signalfd4 "fpvv"
    SYS_eventfd2 eventfd2 "vv"  SYS_epoll_create1 epoll_create1 "v"  SYS_pipe2 pipe2 "pv"
    SYS_inotify_init1 inotify_init1 "v"  SYS_rt_tgsigqueueinfo rt_tgsigqueueinfo "vvvp"
    SYS_perf_event_open perf_event_open "pvvfv"  SYS_fanotify_init fanotify_init "vv"
    SYS_fanotify_mark fanotify_mark "fvvfp"  SYS_prlimit64 prlimit64 "vvpp"
    SYS_name_to_handle_at name_to_handle_at "fpppv"  SYS_open_by_handle_at open_by_handle_at "fpv"
    SYS_clock_adjtime clock_adjtime "vp"  SYS_syncfs syncfs "f"  SYS_setns setns "fv"  SYS_unshare unshare "v"
    SYS_getcpu getcpu "ppp"  SYS_kcmp kcmp "vvvvv"  SYS_sched_setattr sched_setattr "vpv"
    SYS_sched_getattr sched_getattr "vpvv"  SYS_renameat2 renameat2 "fpfpv"  SYS_getrandom getrandom "pvv"
    SYS_memfd_create memfd_create "pv"  SYS_membarrier membarrier "vvv"  SYS_mlock2 mlock2 "rvv"
    SYS_munlockall munlockall ""  SYS_copy_file_range copy_file_range "fpfpvv"  SYS_statx statx "fpvvp"
    SYS_pidfd_send_signal pidfd_send_signal "fvpv"  SYS_pidfd_open pidfd_open "vv"
    SYS_open_tree open_tree "fpv"  SYS_move_mount move_mount "fpfpv"  SYS_fsopen fsopen "pv"
    SYS_fsconfig fsconfig "fvppv"  SYS_fsmount fsmount "fvv"  SYS_fspick fspick "fpv"
    SYS_openat2 openat2 "fnpv"  SYS_faccessat2 faccessat2 "fnvv"  SYS_epoll_pwait2 epoll_pwait2 "fpvppv"
    SYS_mount_setattr mount_setattr "fpvpv"  SYS_landlock_create_ruleset landlock_create_ruleset "pvv"
    SYS_landlock_add_rule landlock_add_rule "fvpv"  SYS_landlock_restrict_self landlock_restrict_self "fv"
    SYS_userfaultfd userfaultfd "v"  SYS_futex_waitv futex_waitv "pvvpv"  SYS_fchmodat2 fchmodat2 "fpvv"
};

static CALLS: LazyLock<HashMap<u64, Passed>> = LazyLock::new(|| {
    let kind = |letter| match letter {
        'f' => Kind::Descriptor,
        'p' => Kind::Pointer,
        'n' => Kind::Path,
        'r' => Kind::Range,
        _ => Kind::Value,
    };
    let entry = |&(number, name, kinds): &(i64, &'static str, &str)| {
        (number as u64, Passed { name, kinds: kinds.chars().map(kind).collect() })
    };
    TABLE.iter().map(entry).collect()
});

/// Makes the table, so that no thread does so during a `fork`.
pub fn prepare() {
    LazyLock::force(&CALLS);
}

/// The call of this number, if the kernel carries it out as it is.
pub fn passed(number: u64) -> Option<&'static Passed> {
    CALLS.get(&number)
}

/// Names of calls that the monitor carries out, or that the machine does not have, for its reports.
#[rustfmt::skip]
const OTHERS: &[(i64, &str)] = &[
    (libc::SYS_ptrace, "ptrace"), (libc::SYS_io_setup, "io_setup"), (libc::SYS_io_destroy, "io_destroy"),
    (libc::SYS_io_submit, "io_submit"), (libc::SYS_io_getevents, "io_getevents"), (libc::SYS_io_cancel, "io_cancel"),
    (libc::SYS_remap_file_pages, "remap_file_pages"), (libc::SYS_seccomp, "seccomp"), (libc::SYS_bpf, "bpf"),
    (libc::SYS_modify_ldt, "modify_ldt"), (libc::SYS_iopl, "iopl"),
    (libc::SYS_ioperm, "ioperm"), (libc::SYS_io_uring_setup, "io_uring_setup"), (libc::SYS_mlockall, "mlockall"),
    (libc::SYS_io_uring_enter, "io_uring_enter"), (libc::SYS_io_uring_register, "io_uring_register"),
    (libc::SYS_pkey_mprotect, "pkey_mprotect"), (libc::SYS_pkey_alloc, "pkey_alloc"), (libc::SYS_pkey_free, "pkey_free"),
    (libc::SYS_memfd_secret, "memfd_secret"), (libc::SYS_shmat, "shmat"), (libc::SYS_shmdt, "shmdt"),
    (libc::SYS_migrate_pages, "migrate_pages"), (libc::SYS_move_pages, "move_pages"), (libc::SYS_pidfd_getfd, "pidfd_getfd"),
    (libc::SYS_set_thread_area, "set_thread_area"), (libc::SYS_init_module, "init_module"),
    (libc::SYS_finit_module, "finit_module"), (libc::SYS_delete_module, "delete_module"),
    (libc::SYS_kexec_load, "kexec_load"), (libc::SYS_kexec_file_load, "kexec_file_load"), (libc::SYS_reboot, "reboot"),
    (libc::SYS_process_madvise, "process_madvise"), (libc::SYS_process_mrelease, "process_mrelease"),
    (libc::SYS_clone3, "clone3"), (libc::SYS_clone, "clone"), (libc::SYS_fork, "fork"), (libc::SYS_vfork, "vfork"),
    (libc::SYS_execve, "execve"), (libc::SYS_execveat, "execveat"), (libc::SYS_rseq, "rseq"), (libc::SYS_personality, "personality"),
    (libc::SYS_process_vm_readv, "process_vm_readv"), (libc::SYS_process_vm_writev, "process_vm_writev"),
    (libc::SYS_prctl, "prctl"), (libc::SYS_mmap, "mmap"), (libc::SYS_munmap, "munmap"),
    (libc::SYS_mprotect, "mprotect"), (libc::SYS_mremap, "mremap"), (libc::SYS_arch_prctl, "arch_prctl"),
    (libc::SYS_sendmmsg, "sendmmsg"), (libc::SYS_recvmmsg, "recvmmsg"),
];

/// The name of a call; its number if that has no name here.
pub fn name(number: u64) -> String {
    let named = OTHERS.iter().find(|entry| entry.0 as u64 == number).map(|entry| entry.1);
    named.or_else(|| passed(number).map(|call| call.name)).map_or_else(|| format!("number {number}"), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_is_in_the_table_once() {
        assert_eq!(CALLS.len(), TABLE.len());
        assert!(OTHERS.iter().all(|entry| passed(entry.0 as u64).is_none()));
        assert!(TABLE.iter().all(|entry| entry.2.len() <= 6 && entry.2.chars().all(|kind| "vfpnr".contains(kind))));
        assert!(TABLE.iter().all(|entry| !entry.2.ends_with('r')), "a range has a length");
    }
}
