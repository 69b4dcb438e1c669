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
    Pointer(Target),
    /// The path of a file whose links are followed.
    Path,
    /// The start of a range of memory, whose length is the next argument.
    Range,
    /// Like [`Kind::Range`]; what is in it may change.
    Advised,
}

/// What the kernel does where an address leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Anything.
    Unknown,
    /// It reads.
    Read,
    /// It may write a structure of at most a page.
    Structure,
    /// It may write as many bytes as the next argument says.
    Buffer,
    /// It may write as many elements as the next argument says, of at most 16 bytes each.
    Elements,
    /// It may write a bit for each descriptor below the first argument.
    Set,
}

/// A call that the kernel carries out.
#[derive(Clone, Debug)]
pub struct KernelCall {
    /// The call's name.
    pub name: &'static str,
    /// Its arguments.
    pub kinds: Vec<Kind>,
}

/// Number, name, and a letter for each argument: v(alue), f(ile descriptor), n(ame of a file),
/// r(ange), (a)d(vised range), and addresses: p(ointer to anything), i(nput), o(utput of at most a
/// page), b(uffer), a(rray of elements), s(et of descriptors).
///
/// A letter that says less than the kernel writes makes trackers miss it; `p` never does.
macro_rules! table {
    ($($number:ident $name:ident $kinds:literal)*) => {
        &[$((libc::$number, stringify!($name), $kinds)),*]
    };
}

#[rustfmt::skip]
const TABLE: &[(i64, &str, &str)] = table! {
    SYS_read read "fbv"  SYS_write write "fiv"  SYS_open open "nvv"  SYS_stat stat "no"  SYS_fstat fstat "fo"
    SYS_lstat lstat "io"  SYS_poll poll "avv"  SYS_lseek lseek "fvv"  SYS_ioctl ioctl "fvp"
    SYS_pread64 pread64 "fbvv"  SYS_pwrite64 pwrite64 "fivv"  SYS_access access "nv"  SYS_pipe pipe "o"
    SYS_select select "vssso"  SYS_sched_yield sched_yield ""  SYS_msync msync "rvv"  SYS_mincore mincore "rvp"
    SYS_madvise madvise "dvv"  SYS_shmget shmget "vvv"  SYS_shmctl shmctl "vvo"  SYS_dup dup "f"  SYS_pause pause ""
    SYS_nanosleep nanosleep "io"  SYS_getitimer getitimer "vo"  SYS_alarm alarm "v"  SYS_setitimer setitimer "vio"
    SYS_getpid getpid ""  SYS_sendfile sendfile "ffov"  SYS_socket socket "vvv"  SYS_connect connect "fiv"
    SYS_accept accept "foo"  SYS_sendto sendto "fivviv"  SYS_recvfrom recvfrom "fbvvoo"  SYS_shutdown shutdown "fv"
    SYS_bind bind "fiv"  SYS_listen listen "fv"  SYS_getsockname getsockname "foo"
    SYS_getpeername getpeername "foo"  SYS_socketpair socketpair "vvvo"  SYS_setsockopt setsockopt "fvvpv"
    SYS_getsockopt getsockopt "fvvpp"  SYS_wait4 wait4 "vovo"  SYS_kill kill "vv"  SYS_uname uname "o"
    SYS_semget semget "vvv"  SYS_semop semop "viv"  SYS_semctl semctl "vvvp"  SYS_msgget msgget "vv"
    SYS_msgsnd msgsnd "vivv"  SYS_msgrcv msgrcv "vpvvv"  SYS_msgctl msgctl "vvo"  SYS_fcntl fcntl "fvo"
    SYS_flock flock "fv"  SYS_fsync fsync "f"  SYS_fdatasync fdatasync "f"  SYS_truncate truncate "nv"
    SYS_ftruncate ftruncate "fv"  SYS_getdents getdents "fbv"  SYS_getcwd getcwd "bv"  SYS_chdir chdir "i"
    SYS_fchdir fchdir "f"  SYS_rename rename "ii"  SYS_mkdir mkdir "iv"  SYS_rmdir rmdir "i"  SYS_creat creat "iv"
    SYS_link link "ii"  SYS_unlink unlink "i"  SYS_symlink symlink "ii"  SYS_chmod chmod "nv"  SYS_fchmod fchmod "fv"
    SYS_chown chown "nvv"  SYS_fchown fchown "fvv"  SYS_lchown lchown "ivv"  SYS_umask umask "v"
    SYS_gettimeofday gettimeofday "oo"  SYS_getrlimit getrlimit "vo"  SYS_getrusage getrusage "vo"
    SYS_sysinfo sysinfo "o"  SYS_times times "o"  SYS_getuid getuid ""  SYS_syslog syslog "vbv"  SYS_getgid getgid ""
    SYS_setuid setuid "v"  SYS_setgid setgid "v"  SYS_geteuid geteuid ""  SYS_getegid getegid ""
    SYS_setpgid setpgid "vv"  SYS_getppid getppid ""  SYS_getpgrp getpgrp ""  SYS_setsid setsid ""
    SYS_setreuid setreuid "vv"  SYS_setregid setregid "vv"  SYS_getgroups getgroups "vp"
    SYS_setgroups setgroups "vi"  SYS_setresuid setresuid "vvv"  SYS_getresuid getresuid "ooo"
    SYS_setresgid setresgid "vvv"  SYS_getresgid getresgid "ooo"  SYS_getpgid getpgid "v"  SYS_setfsuid setfsuid "v"
    SYS_setfsgid setfsgid "v"  SYS_getsid getsid "v"  SYS_capget capget "oo"  SYS_capset capset "oi"
    SYS_rt_sigprocmask rt_sigprocmask "viov"  SYS_rt_sigpending rt_sigpending "ov"
    SYS_rt_sigtimedwait rt_sigtimedwait "ioiv"  SYS_rt_sigqueueinfo rt_sigqueueinfo "vvi"
    SYS_rt_sigsuspend rt_sigsuspend "iv"  SYS_utime utime "ni"  SYS_mknod mknod "ivv"  SYS_statfs statfs "no"
    SYS_fstatfs fstatfs "fo"  SYS_sysfs sysfs "vpp"  SYS_getpriority getpriority "vv"
    SYS_setpriority setpriority "vvv"  SYS_sched_setparam sched_setparam "vi"
    SYS_sched_getparam sched_getparam "vo"  SYS_sched_setscheduler sched_setscheduler "vvi"
    SYS_sched_getscheduler sched_getscheduler "v"  SYS_sched_get_priority_max sched_get_priority_max "v"
    SYS_sched_get_priority_min sched_get_priority_min "v"  SYS_sched_rr_get_interval sched_rr_get_interval "vo"
    SYS_mlock mlock "rv"  SYS_munlock munlock "rv"  SYS_vhangup vhangup ""  SYS_pivot_root pivot_root "ii"
    SYS_adjtimex adjtimex "o"  SYS_setrlimit setrlimit "vi"  SYS_chroot chroot "i"  SYS_sync sync ""  SYS_acct acct "i"
    SYS_settimeofday settimeofday "ii"  SYS_mount mount "iiivi"  SYS_umount2 umount2 "iv"
    SYS_swapon swapon "iv"  SYS_swapoff swapoff "i"  SYS_sethostname sethostname "iv"
    SYS_setdomainname setdomainname "iv"  SYS_quotactl quotactl "vivp"  SYS_gettid gettid ""
    SYS_readahead readahead "fvv"  SYS_setxattr setxattr "niivv"  SYS_lsetxattr lsetxattr "iiivv"
    SYS_fsetxattr fsetxattr "fiivv"  SYS_getxattr getxattr "nibv"  SYS_lgetxattr lgetxattr "iibv"
    SYS_fgetxattr fgetxattr "fibv"  SYS_listxattr listxattr "nbv"  SYS_llistxattr llistxattr "ibv"
    SYS_flistxattr flistxattr "fbv"  SYS_removexattr removexattr "ni"  SYS_lremovexattr lremovexattr "ii"
    SYS_fremovexattr fremovexattr "fi"  SYS_tkill tkill "vv"  SYS_time time "o"  SYS_futex futex "ovviov"
    SYS_sched_setaffinity sched_setaffinity "vvi"  SYS_sched_getaffinity sched_getaffinity "vvo"
    SYS_epoll_create epoll_create "v"  SYS_getdents64 getdents64 "fbv"  SYS_semtimedop semtimedop "vivi"
    SYS_fadvise64 fadvise64 "fvvv"  SYS_timer_create timer_create "vio"  SYS_timer_settime timer_settime "vvio"
    SYS_timer_gettime timer_gettime "vo"  SYS_timer_getoverrun timer_getoverrun "v"
    SYS_timer_delete timer_delete "v"  SYS_clock_settime clock_settime "vi"  SYS_clock_gettime clock_gettime "vo"
    SYS_clock_getres clock_getres "vo"  SYS_clock_nanosleep clock_nanosleep "vvio"
    SYS_epoll_wait epoll_wait "favv"  SYS_epoll_ctl epoll_ctl "fvfi"  SYS_tgkill tgkill "vvv"
    SYS_utimes utimes "ni"  SYS_mbind mbind "rvvivv"  SYS_set_mempolicy set_mempolicy "viv"
    SYS_get_mempolicy get_mempolicy "ppvpv"  SYS_mq_open mq_open "ivvi"  SYS_mq_unlink mq_unlink "i"
    SYS_mq_timedsend mq_timedsend "fivvi"  SYS_mq_timedreceive mq_timedreceive "fbvoi"
    SYS_mq_notify mq_notify "fi"  SYS_mq_getsetattr mq_getsetattr "fio"  SYS_waitid waitid "vvovo"
    SYS_add_key add_key "iiivv"  SYS_request_key request_key "iiiv"  SYS_keyctl keyctl "vpppp"
    SYS_ioprio_set ioprio_set "vvv"  SYS_ioprio_get ioprio_get "vv"  SYS_inotify_init inotify_init ""
    SYS_inotify_add_watch inotify_add_watch "fnv"  SYS_inotify_rm_watch inotify_rm_watch "fv"
    SYS_openat openat "fnvv"  SYS_mkdirat mkdirat "fiv"  SYS_mknodat mknodat "fivv"
    SYS_fchownat fchownat "fivvv"  SYS_futimesat futimesat "fii"  SYS_newfstatat newfstatat "fnov"
    SYS_unlinkat unlinkat "fiv"  SYS_renameat renameat "fifi"  SYS_linkat linkat "fifiv"
    SYS_symlinkat symlinkat "ifi"  SYS_fchmodat fchmodat "fiv"  SYS_faccessat faccessat "fnv"
    SYS_pselect6 pselect6 "vsssoi"  SYS_ppoll ppoll "avoiv"  SYS_set_robust_list set_robust_list "iv"
    SYS_get_robust_list get_robust_list "voo"  SYS_splice splice "fofovv"  SYS_tee tee "ffvv"
    SYS_sync_file_range sync_file_range "fvvv"  SYS_utimensat utimensat "fiiv"
    SYS_epoll_pwait epoll_pwait "favviv"  SYS_signalfd signalfd "fiv"  SYS_timerfd_create timerfd_create "vv"
    SYS_eventfd eventfd "v"  SYS_fallocate fallocate "fvvv"  SYS_timerfd_settime timerfd_settime "fvio"
    SYS_timerfd_gettime timerfd_gettime "fo"  SYS_accept4 accept4 "foov"  SYS_signalfd4 signalfd4 "fivv"
    SYS_eventfd2 eventfd2 "vv"  SYS_epoll_create1 epoll_create1 "v"  SYS_pipe2 pipe2 "ov"
    SYS_inotify_init1 inotify_init1 "v"  SYS_rt_tgsigqueueinfo rt_tgsigqueueinfo "vvvi"
    SYS_perf_event_open perf_event_open "ovvfv"  SYS_fanotify_init fanotify_init "vv"
    SYS_fanotify_mark fanotify_mark "fvvfi"  SYS_prlimit64 prlimit64 "vvio"
    SYS_name_to_handle_at name_to_handle_at "fioov"  SYS_open_by_handle_at open_by_handle_at "fiv"
    SYS_clock_adjtime clock_adjtime "vo"  SYS_syncfs syncfs "f"  SYS_setns setns "fv"  SYS_unshare unshare "v"
    SYS_getcpu getcpu "ooo"  SYS_kcmp kcmp "vvvvv"  SYS_sched_setattr sched_setattr "vov"
    SYS_sched_getattr sched_getattr "vovv"  SYS_renameat2 renameat2 "fifiv"  SYS_getrandom getrandom "bvv"
    SYS_memfd_create memfd_create "iv"  SYS_membarrier membarrier "vvv"  SYS_mlock2 mlock2 "rvv"
    SYS_munlockall munlockall ""  SYS_copy_file_range copy_file_range "fofovv"  SYS_statx statx "fnvvo"
    SYS_pidfd_send_signal pidfd_send_signal "fviv"  SYS_pidfd_open pidfd_open "vv"
    SYS_open_tree open_tree "fiv"  SYS_move_mount move_mount "fifiv"  SYS_fsopen fsopen "iv"
    SYS_fsconfig fsconfig "fviiv"  SYS_fsmount fsmount "fvv"  SYS_fspick fspick "fiv"
    SYS_openat2 openat2 "fniv"  SYS_faccessat2 faccessat2 "fnvv"  SYS_epoll_pwait2 epoll_pwait2 "faviiv"
    SYS_mount_setattr mount_setattr "fiviv"  SYS_landlock_create_ruleset landlock_create_ruleset "ivv"
    SYS_landlock_add_rule landlock_add_rule "fviv"  SYS_landlock_restrict_self landlock_restrict_self "fv"
    SYS_userfaultfd userfaultfd "v"  SYS_futex_waitv futex_waitv "ivviv"  SYS_fchmodat2 fchmodat2 "fivv"
};

static CALLS: LazyLock<HashMap<u64, KernelCall>> = LazyLock::new(|| {
    let kind = |letter| match letter {
        'f' => Kind::Descriptor,
        'p' => Kind::Pointer(Target::Unknown),
        'i' => Kind::Pointer(Target::Read),
        'o' => Kind::Pointer(Target::Structure),
        'b' => Kind::Pointer(Target::Buffer),
        'a' => Kind::Pointer(Target::Elements),
        's' => Kind::Pointer(Target::Set),
        'd' => Kind::Advised,
        'n' => Kind::Path,
        'r' => Kind::Range,
        _ => Kind::Value,
    };
    let entry = |&(number, name, kinds): &(i64, &'static str, &str)| {
        (number as u64, KernelCall { name, kinds: kinds.chars().map(kind).collect() })
    };
    TABLE.iter().map(entry).collect()
});

/// Makes the table, so that no thread does so during a `fork`.
pub fn prepare() {
    LazyLock::force(&CALLS);
}

/// The call of this number, if the kernel carries it out as it is.
pub fn passed(number: u64) -> Option<&'static KernelCall> {
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
        assert!(
            TABLE.iter().all(|entry| entry.2.len() <= 6 && entry.2.chars().all(|kind| "vfpnriobasd".contains(kind)))
        );
        let has_length = ['r', 'd', 'b', 'a'];
        assert!(TABLE.iter().all(|entry| !entry.2.ends_with(has_length)), "a range has a length");
        let of_set = TABLE.iter().filter(|entry| entry.2.contains('s'));
        assert!(of_set.map(|entry| entry.1).eq(["select", "pselect6"]), "the first argument is their length");
    }
}
