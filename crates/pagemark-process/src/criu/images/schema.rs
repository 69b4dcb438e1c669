//! The messages of CRIU's images, as far as Pagemark reads or writes them.
//!
//! They are declared as in CRIU's `images/*.proto`, with CRIU's names, so that its documentation
//! applies to them. A test compares each declaration with those files.

use prost::Message;

/// The Rust type of a field, by its label and type.
macro_rules! field_type {
    (required $type:tt $(($of:ident))?) => { field_type!($type $($of)?) };
    (optional $type:tt $(($of:ident))?) => { Option<field_type!($type $($of)?)> };
    (repeated $type:tt $(($of:ident))?) => { Vec<field_type!($type $($of)?)> };
    (message $of:ident) => { $of };
    (bool) => { bool };
    (int32 $of:ident) => { i32 };
    (string) => { String };
    (bytes) => { Vec<u8> };
    (uint32) => { u32 };
    (uint64) => { u64 };
}

/// Declares messages, and in tests a table of them. `int32(NAME)` is a field of CRIU's enumeration
/// NAME. `=> NAME` also declares a constant that is the field's number, for those fields that are
/// changed in encoded messages.
macro_rules! messages {
    ($(
        $(#[$doc:meta])*
        message $message:ident = $file:literal $name:ident {
            $( $(#[$field_doc:meta])* $label:ident $type:ident $(($of:ident))? $field:ident = $number:tt $(=> $constant:ident)?; )*
        }
    )*) => {
        $(
            $(#[$doc])*
            #[derive(Clone, PartialEq, Message)]
            pub struct $message {
                $( $(#[$field_doc])* #[prost($type, $label, tag = $number)] pub $field: field_type!($label $type $(($of))?), )*
            }

            impl $message {
                $( $( #[doc = concat!("Number of the field `", stringify!($field), "`.")] pub(crate) const $constant: u32 = $number; )? )*
            }
        )*

        #[cfg(test)]
        const MESSAGES: &[tests::Declaration] = &[
            $( tests::Declaration {
                message: stringify!($message),
                file: $file,
                name: stringify!($name),
                fields: &[
                    $( tests::Field {
                        label: stringify!($label),
                        type_name: stringify!($type),
                        of: concat!($(stringify!($of))?),
                        name: stringify!($field),
                        number: $number,
                    }, )*
                ],
            }, )*
        ];
    };
}

/// Declares values of CRIU's enumerations, and in tests a table of them.
macro_rules! values {
    ($( $(#[$doc:meta])* const $constant:ident = $file:literal $enumeration:ident $name:ident $number:tt; )*) => {
        $( $(#[$doc])* pub const $constant: i32 = $number; )*

        #[cfg(test)]
        const VALUES: &[tests::Value] = &[
            $( tests::Value {
                file: $file,
                enumeration: stringify!($enumeration),
                name: stringify!($name),
                number: $number,
            }, )*
        ];
    };
}

values! {
    /// Type of an open file that was opened by its path.
    const FILE_REGULAR = "fdinfo.proto" fd_types REG 1;
    /// Type of a terminal whose other end is outside the saved processes.
    const TERMINAL_EXTERNAL = "tty.proto" TtyType EXT_TTY 5;
    /// Kind of the loopback interface.
    const LOOPBACK = "netdev.proto" nd_type LOOPBACK 1;
    /// A socket that was shut down in both directions.
    const SHUTDOWN_BOTH = "sk-opts.proto" sk_shutdown BOTH 3;
}

/// Flag of a Unix socket: no saved process has it, but one is connected to it.
pub const SOCKET_OUTSIDE: u32 = 1;

/// Flag of a run of pages: a previous image holds its content.
pub const PAGE_IN_PARENT: u32 = 1;
/// Flag of a run of pages: its content may be delivered after the restore.
pub const PAGE_LAZY: u32 = 2;
/// Flag of a run of pages: the pages image holds its content.
pub const PAGE_PRESENT: u32 = 4;

messages! {
    /// The first message of `pagemap-PID.img`.
    message PagemapHead = "pagemap.proto" pagemap_head {
        /// N of the `pages-N.img` that holds the content.
        required uint32 pages_id = 1;
    }

    /// A further message of `pagemap-PID.img`: a run of pages.
    message PagemapEntry = "pagemap.proto" pagemap_entry {
        /// First address.
        required uint64 vaddr = 1 => VADDR;
        /// Number of pages in images of CRIU before 4.2; zero otherwise.
        required uint32 compat_nr_pages = 2 => COMPAT_NR_PAGES;
        /// In old images: same meaning as [`PAGE_IN_PARENT`].
        optional bool in_parent = 3;
        /// [`PAGE_IN_PARENT`], [`PAGE_LAZY`], [`PAGE_PRESENT`].
        optional uint32 flags = 4 => FLAGS;
        /// Number of pages.
        optional uint64 nr_pages = 5 => NR_PAGES;
    }

    /// A descriptor of `fdinfo-N.img`.
    message FdinfoEntry = "fdinfo.proto" fdinfo_entry {
        /// The open file's id in `files.img`.
        required uint32 id = 1;
        /// Type of the open file.
        required int32(fd_types) r#type = 3 => TYPE;
        /// Number of the descriptor.
        required uint32 fd = 4;
    }

    /// `stats-dump`: the statistics of a dump.
    message StatsEntry = "stats.proto" stats_entry {
        /// The statistics.
        optional message(DumpStatsEntry) dump = 1;
    }

    /// The times that a dump took.
    message DumpStatsEntry = "stats.proto" dump_stats_entry {
        /// Time from the request to freeze until all processes were frozen, microseconds.
        required uint32 freezing_time = 1;
        /// Time for which the processes were frozen, microseconds.
        required uint32 frozen_time = 2;
    }

    /// An open file of `files.img`. Of the messages for the different types only those are declared
    /// that Pagemark uses.
    message FileEntry = "fdinfo.proto" file_entry {
        /// Type of the open file.
        required int32(fd_types) r#type = 1;
        /// Its id.
        required uint32 id = 2;
        /// A file that was opened by its path.
        optional message(RegFileEntry) reg = 3 => REG;
        /// An Internet socket.
        optional message(InetSocketEntry) isk = 4;
        /// A timer's descriptor.
        optional message(TimerfdEntry) tfd = 12 => TFD;
        /// A Unix socket.
        optional message(UnixSocketEntry) usk = 16 => USK;
        /// An end of a pipe.
        optional message(PipeEntry) pipe = 18;
        /// A terminal.
        optional message(TtyFileEntry) tty = 19;
    }

    /// A file that was opened by its path.
    message RegFileEntry = "regfile.proto" reg_file_entry {
        /// Its id.
        required uint32 id = 1;
        /// Flags as `open` takes them.
        required uint32 flags = 2;
        /// Position, bytes; all ones for none.
        required uint64 pos = 3 => POS;
        /// Whom the kernel signals.
        required message(FownEntry) fown = 5;
        /// Path.
        required string name = 6;
        /// Length at the dump, bytes. A restore refuses another length, if this is given.
        optional uint64 size = 8 => SIZE;
        /// True if the restoring command provides the file.
        optional bool ext = 9;
    }

    /// A file of `remap-fpath.img`: at the dump its path did not lead to it.
    message RemapEntry = "remap-file-path.proto" remap_file_path_entry {
        /// Its id.
        required uint32 orig_id = 1;
    }

    /// An Internet socket.
    message InetSocketEntry = "sk-inet.proto" inet_sk_entry {
        /// Address family as `socket` takes it.
        required uint32 family = 3;
        /// Type as `socket` takes it.
        required uint32 r#type = 4;
        /// Protocol as `socket` takes it.
        required uint32 proto = 5;
        /// State, by the kernel's numbers of TCP's states.
        required uint32 state = 6;
        /// Own port.
        required uint32 src_port = 7;
        /// Port of the peer; zero for none.
        required uint32 dst_port = 8;
        /// Own address, in words as the kernel has them in memory.
        repeated uint32 src_addr = 11;
        /// Address of the peer, likewise.
        repeated uint32 dst_addr = 12;
        /// True if the socket takes only IPv6 connections.
        optional bool v6only = 15;
        /// Options of the protocol.
        optional message(IpOptions) ip_opts = 16;
    }

    /// Options of the Internet Protocol.
    message IpOptions = "sk-inet.proto" ip_opts_entry {
        /// True if the socket may have an address that the machine lacks.
        optional bool freebind = 1;
    }

    /// A Unix socket.
    message UnixSocketEntry = "sk-unix.proto" unix_sk_entry {
        /// Its id.
        required uint32 id = 1;
        /// Its inode.
        required uint32 ino = 2;
        /// Type as `socket` takes it.
        required uint32 r#type = 3;
        /// State, by the kernel's numbers of TCP's states.
        required uint32 state = 4 => STATE;
        /// Flags as `open` takes them.
        required uint32 flags = 5;
        /// [`SOCKET_OUTSIDE`], and others.
        required uint32 uflags = 6;
        /// Inode of the socket that it is connected to, or 0.
        required uint32 peer = 8 => PEER;
        /// Whom the kernel signals.
        required message(FownEntry) fown = 9;
        /// Name: a path that ends with a zero byte, or an abstract name, which begins with one.
        required bytes name = 11 => NAME;
        /// The directions that were shut down.
        optional int32(sk_shutdown) shutdown = 12 => SHUTDOWN;
        /// Directory that a relative path begins at.
        optional string name_dir = 14 => NAME_DIR;
        /// True if the name was removed.
        optional bool deleted = 15 => DELETED;
    }

    /// The message of `netns-N.img`.
    message NetworkEntry = "netdev.proto" netns_entry {
        /// The name of a namespace that the restoring command provides.
        optional string ext_key = 8 => EXT_KEY;
    }

    /// A network interface of `netdev-N.img`.
    message InterfaceEntry = "netdev.proto" net_device_entry {
        /// Its kind.
        required int32(nd_type) r#type = 1;
        /// Its number.
        required uint32 ifindex = 2;
        /// The largest packet, bytes.
        required uint32 mtu = 3;
        /// Its flags, as the kernel's IFF_UP and others.
        required uint32 flags = 4;
        /// Its name.
        required string name = 5;
    }

    /// A timer's descriptor.
    message TimerfdEntry = "timerfd.proto" timerfd_entry {
        /// Its id.
        required uint32 id = 1;
        /// Flags as `open` takes them.
        required uint32 flags = 2;
        /// Whom the kernel signals.
        required message(FownEntry) fown = 3;
        /// The clock.
        required uint32 clockid = 4;
        /// Expirations that were not read yet.
        required uint64 ticks = 5;
        /// Flags as `timerfd_settime` takes them.
        required uint32 settime_flags = 6;
        /// Time to the next expiration: seconds.
        required uint64 vsec = 7;
        /// Time to the next expiration: nanoseconds.
        required uint64 vnsec = 8;
        /// Interval: seconds.
        required uint64 isec = 9;
        /// Interval: nanoseconds.
        required uint64 insec = 10;
    }

    /// Whom the kernel signals when a file is ready.
    message FownEntry = "fown.proto" fown_entry {
        /// User.
        required uint32 uid = 1;
        /// Effective user.
        required uint32 euid = 2;
        /// The signal.
        required uint32 signum = 3;
        /// Whether `pid` is a process, a thread or a process group.
        required uint32 pid_type = 4;
        /// Process, thread or process group.
        required uint32 pid = 5;
    }

    /// An end of a pipe.
    message PipeEntry = "pipe.proto" pipe_entry {
        /// Its id.
        required uint32 id = 1;
        /// The pipe's inode.
        required uint32 pipe_id = 2;
        /// Flags as `open` takes them.
        required uint32 flags = 3;
        /// Whom the kernel signals.
        required message(FownEntry) fown = 4;
    }

    /// An open terminal.
    message TtyFileEntry = "tty.proto" tty_file_entry {
        /// Its id.
        required uint32 id = 1;
        /// The terminal's id in `tty-info.img`.
        required uint32 tty_info_id = 2;
        /// Flags as `open` takes them.
        required uint32 flags = 3;
        /// Whom the kernel signals.
        required message(FownEntry) fown = 4;
    }

    /// A terminal of `tty-info.img`.
    message TtyInfoEntry = "tty.proto" tty_info_entry {
        /// Its id.
        required uint32 id = 1;
        /// [`TERMINAL_EXTERNAL`] if the dump left it out.
        required int32(TtyType) r#type = 2;
        /// The session whose controlling terminal it is, or 0.
        required uint32 sid = 6 => SID;
        /// Its process group in the foreground, or 0.
        required uint32 pgrp = 7 => PGRP;
        /// Its mode; none if it has hung up.
        optional message(TermiosEntry) termios = 9 => TERMIOS;
        /// Its size.
        optional message(WinsizeEntry) winsize = 11 => WINSIZE;
        /// Its owner.
        optional uint32 uid = 14 => UID;
        /// Its group.
        optional uint32 gid = 15 => GID;
    }

    /// The size of a terminal.
    message WinsizeEntry = "tty.proto" winsize_entry {
        /// Rows.
        required uint32 ws_row = 1;
        /// Columns.
        required uint32 ws_col = 2;
        /// Width of a row, pixels.
        required uint32 ws_xpixel = 3;
        /// Height of a column, pixels.
        required uint32 ws_ypixel = 4;
    }

    /// The mode of a terminal.
    message TermiosEntry = "tty.proto" termios_entry {
        /// Flags of the input.
        required uint32 c_iflag = 1;
        /// Flags of the output.
        required uint32 c_oflag = 2;
        /// Flags of the line.
        required uint32 c_cflag = 3;
        /// Further flags.
        required uint32 c_lflag = 4;
        /// The line discipline.
        required uint32 c_line = 5;
        /// Speed of the input.
        required uint32 c_ispeed = 6;
        /// Speed of the output.
        required uint32 c_ospeed = 7;
        /// The control characters.
        repeated uint32 c_cc = 8;
    }

    /// A process of `pstree.img`.
    message PstreeEntry = "pstree.proto" pstree_entry {
        /// Process id.
        required uint32 pid = 1;
        /// The parent's process id.
        required uint32 ppid = 2;
        /// Its process group.
        required uint32 pgid = 3;
        /// Its session.
        required uint32 sid = 4;
        /// Ids of its threads, the first thread included.
        repeated uint32 threads = 5;
    }

    /// `mm-PID.img`: the address space of a process.
    message MmEntry = "mm.proto" mm_entry {
        /// Id of the program's file in `files.img`.
        required uint32 exe_file_id = 12 => EXE_FILE_ID;
        /// The auxiliary vector, in pairs.
        repeated uint64 mm_saved_auxv = 13;
        /// The mappings.
        repeated message(VmaEntry) vmas = 14 => VMAS;
    }

    /// A mapping of `mm-PID.img`.
    message VmaEntry = "vma.proto" vma_entry {
        /// First address.
        required uint64 start = 1;
        /// Address after the last.
        required uint64 end = 2 => END;
        /// Id of the mapped file in `files.img`, or of shared memory.
        required uint64 shmid = 4;
        /// Protection as `mmap` takes it.
        required uint32 prot = 5 => PROT;
        /// Flags as `mmap` takes them.
        required uint32 flags = 6;
        /// What kind of mapping it is, and how CRIU restores it, a bit for each.
        required uint32 status = 7 => STATUS;
        /// Advice as `madvise` takes it, a bit for each.
        optional uint64 madv = 9;
    }

    /// `core-TID.img`: a thread, and in the first thread's image also the process.
    message CoreEntry = "core.proto" core_entry {
        /// The processor's registers.
        optional message(ThreadInfoX86) thread_info = 2 => THREAD_INFO;
        /// The process; only in the first thread's image.
        optional message(TaskCoreEntry) tc = 3;
        /// The thread.
        optional message(ThreadCoreEntry) thread_core = 5;
    }

    /// What a process has but its threads have not.
    message TaskCoreEntry = "core.proto" task_core_entry {
        /// Whether it ran, was stopped or was a zombie.
        required uint32 task_state = 1;
        /// Short name of the program.
        required string comm = 6;
        /// Signals that are pending for the process.
        optional message(SignalQueueEntry) signals_s = 10;
    }

    /// What each thread has.
    message ThreadCoreEntry = "core.proto" thread_core_entry {
        /// Blocked signals, one bit each.
        optional uint64 blk_sigset = 6;
        /// Signals that are pending for the thread.
        optional message(SignalQueueEntry) signals_p = 9;
        /// Its credentials.
        optional message(CredsEntry) creds = 10;
    }

    /// Pending signals.
    message SignalQueueEntry = "siginfo.proto" signal_queue_entry {
        /// In the order of delivery.
        repeated message(SiginfoEntry) signals = 1;
    }

    /// A pending signal.
    message SiginfoEntry = "siginfo.proto" siginfo_entry {
        /// The kernel's `siginfo_t`.
        required bytes siginfo = 1;
    }

    /// The credentials of a thread.
    message CredsEntry = "creds.proto" creds_entry {
        /// User.
        required uint32 uid = 1;
        /// Group.
        required uint32 gid = 2;
    }

    /// Registers of an x86-64 processor.
    message ThreadInfoX86 = "core-x86.proto" thread_info_x86 {
        /// General registers.
        required message(UserX86RegsEntry) gpregs = 2 => GPREGS;
        /// Floating-point registers.
        required message(UserX86FpregsEntry) fpregs = 3;
    }

    /// General registers, described in the processor's manual.
    #[allow(missing_docs, reason = "the processor's manual describes them")]
    message UserX86RegsEntry = "core-x86.proto" user_x86_regs_entry {
        required uint64 r15 = 1;
        required uint64 r14 = 2;
        required uint64 r13 = 3;
        required uint64 r12 = 4;
        required uint64 bp = 5;
        required uint64 bx = 6;
        required uint64 r11 = 7;
        required uint64 r10 = 8;
        required uint64 r9 = 9;
        required uint64 r8 = 10;
        required uint64 ax = 11 => AX;
        required uint64 cx = 12;
        required uint64 dx = 13;
        required uint64 si = 14;
        required uint64 di = 15;
        required uint64 orig_ax = 16;
        required uint64 ip = 17 => IP;
        required uint64 cs = 18;
        required uint64 flags = 19;
        required uint64 sp = 20;
        required uint64 ss = 21;
        required uint64 fs_base = 22;
        required uint64 gs_base = 23;
        required uint64 ds = 24;
        required uint64 es = 25;
        required uint64 fs = 26;
        required uint64 gs = 27;
    }

    /// Floating-point registers, in the layout of the instruction `fxsave`.
    #[allow(missing_docs, reason = "the processor's manual describes them")]
    message UserX86FpregsEntry = "core-x86.proto" user_x86_fpregs_entry {
        required uint32 cwd = 1;
        required uint32 swd = 2;
        required uint32 twd = 3;
        required uint32 fop = 4;
        required uint64 rip = 5;
        required uint64 rdp = 6;
        required uint32 mxcsr = 7;
        required uint32 mxcsr_mask = 8;
        repeated uint32 st_space = 9;
        repeated uint32 xmm_space = 10;
        optional message(UserX86XsaveEntry) xsave = 13;
    }

    /// The state that `xsave` adds to `fxsave`.
    message UserX86XsaveEntry = "core-x86.proto" user_x86_xsave_entry {
        /// Bit set of the parts in use.
        required uint64 xstate_bv = 1;
        /// Upper halves of the vector registers.
        repeated uint32 ymmh_space = 2;
    }
}

impl PagemapEntry {
    /// Number of pages of the run.
    pub fn pages(&self) -> u64 {
        self.nr_pages.unwrap_or(u64::from(self.compat_nr_pages))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::path::{Path, PathBuf};

    use prost_types::field_descriptor_proto::{Label, Type};
    use prost_types::{DescriptorProto, FileDescriptorProto};

    use super::{MESSAGES, VALUES};

    /// A message as it is declared here.
    pub(super) struct Declaration {
        /// Name of the Rust type.
        pub message: &'static str,
        /// CRIU's file.
        pub file: &'static str,
        /// CRIU's name of the message.
        pub name: &'static str,
        pub fields: &'static [Field],
    }

    /// A field as it is declared here.
    pub(super) struct Field {
        pub label: &'static str,
        pub type_name: &'static str,
        /// The Rust type of a message, or CRIU's name of an enumeration.
        pub of: &'static str,
        pub name: &'static str,
        pub number: i32,
    }

    /// A value of an enumeration as it is declared here.
    pub(super) struct Value {
        pub file: &'static str,
        pub enumeration: &'static str,
        pub name: &'static str,
        pub number: i32,
    }

    /// How a field differs from CRIU's message, if it does. `Type::Unknown` in `found` is a message
    /// or an enumeration: which of them the parser of a single file does not know.
    fn difference(field: &Field, criu: &DescriptorProto, files: &HashMap<&str, FileDescriptorProto>) -> Option<String> {
        let name = field.name.trim_start_matches("r#");
        let Some(found) = criu.field.iter().find(|found| found.name() == name) else {
            return Some("is not in CRIU's message".into());
        };
        if found.number() != field.number {
            return Some(format!("has the number {} and CRIU's has {}", field.number, found.number()));
        }
        let label = match found.label() {
            Label::Required => "required",
            Label::Optional => "optional",
            Label::Repeated => "repeated",
        };
        if label != field.label {
            return Some(format!("is {} and CRIU's is {label}", field.label));
        }
        let (declared, of) = match (found.r#type, found.type_name()) {
            (Some(scalar), "") => match Type::try_from(scalar) {
                Ok(Type::Bool) => ("bool", ""),
                Ok(Type::String) => ("string", ""),
                Ok(Type::Uint32) => ("uint32", ""),
                Ok(Type::Uint64) => ("uint64", ""),
                Ok(Type::Bytes) => ("bytes", ""),
                other => return Some(format!("has a type that is not used here: {other:?}")),
            },
            (_, named) if is_enumeration(named, files) => ("int32", named),
            (_, named) => ("message", MESSAGES.iter().find(|m| m.name == named).map_or(named, |m| m.message)),
        };
        let differs = (declared, of) != (field.type_name, field.of);
        differs.then(|| format!("has the type {} {} and CRIU's has {declared} {of}", field.type_name, field.of))
    }

    fn is_enumeration(name: &str, files: &HashMap<&str, FileDescriptorProto>) -> bool {
        files.values().any(|file| file.enum_type.iter().any(|enumeration| enumeration.name() == name))
    }

    /// The differences between the declarations here and CRIU's files in `directory`.
    fn differences(directory: &Path, messages: &[Declaration], values: &[Value]) -> Vec<String> {
        let mut files = HashMap::new();
        for name in messages.iter().map(|message| message.file).chain(values.iter().map(|value| value.file)) {
            let source = std::fs::read_to_string(directory.join(name)).expect(name);
            files.insert(name, protox_parse::parse(name, &source).expect(name));
        }
        let mut differences = Vec::new();
        for message in messages {
            let Some(criu) = files[message.file].message_type.iter().find(|criu| criu.name() == message.name) else {
                differences.push(format!("{} has no message {}", message.file, message.name));
                continue;
            };
            let fields = message.fields.iter();
            let found = fields.filter_map(|field| Some((field.name, difference(field, criu, &files)?)));
            differences.extend(found.map(|(field, difference)| format!("{}.{field} {difference}", message.name)));
        }
        for value in values {
            let enumerations = files[value.file].enum_type.iter().filter(|criu| criu.name() == value.enumeration);
            let mut found = enumerations.flat_map(|criu| &criu.value).filter(|found| found.name() == value.name);
            if found.next().map(|found| found.number()) != Some(value.number) {
                differences.push(format!("{}.{} is not {}", value.enumeration, value.name, value.number));
            }
        }
        differences
    }

    #[test]
    fn the_declarations_are_those_of_criu() {
        let directories = super::super::super::cache_directories().map(|cache| cache.join("pagemark/criu/images"));
        let has_files = |directory: &&PathBuf| directory.join("pagemap.proto").exists();
        let Some(directory) = directories.iter().find(has_files) else {
            let directory = &directories[0];
            let reason = format!("CRIU's .proto files are not in {}: run `make criu`", directory.display());
            return pagemark_testing::skipped(&reason);
        };
        let differences = differences(directory, MESSAGES, VALUES);
        assert!(differences.is_empty(), "{differences:#?}");
    }

    #[test]
    fn each_kind_of_difference_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let source = "syntax = \"proto2\"; enum colour { RED = 1; } message other { required uint32 id = 1; }
                      message entry { required uint32 id = 1; optional colour colour = 2; optional other other = 3; }";
        std::fs::write(directory.path().join("a.proto"), source).unwrap();
        let field = |label, type_name, of, name, number| Field { label, type_name, of, name, number };
        let check = |name, fields: Vec<Field>, number| {
            let fields: &'static [Field] = Vec::leak(fields);
            let value = Value { file: "a.proto", enumeration: "colour", name: "RED", number };
            let messages = [Declaration { message: "Entry", file: "a.proto", name, fields }];
            differences(directory.path(), &messages, &[value]).len()
        };
        let id = || field("required", "uint32", "", "id", 1);
        let colour = field("optional", "int32", "colour", "colour", 2);
        assert_eq!(check("entry", vec![id(), colour, field("optional", "message", "other", "other", 3)], 1), 0);
        assert_eq!(check("entry", vec![id()], 2), 1);
        assert_eq!(check("missing", vec![id()], 1), 1);
        for wrong in [
            field("required", "uint32", "", "missing", 1),
            field("required", "uint32", "", "id", 2),
            field("optional", "uint32", "", "id", 1),
            field("required", "uint64", "", "id", 1),
            field("optional", "uint32", "", "colour", 2),
            field("optional", "int32", "shade", "colour", 2),
            field("optional", "message", "entry", "other", 3),
        ] {
            assert_eq!(check("entry", vec![wrong], 1), 1);
        }
    }
}
