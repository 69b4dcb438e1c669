//! The command `criu restore` of a tree: its arguments, and the descriptors that CRIU inherits.

use std::fs::{File, OpenOptions};
use std::io::{IsTerminal, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use pagemark_linux::scratch_directory;
use pagemark_trace::error::Error;

use super::attempt::{LOG, StartedCriu};
use super::images::{Prepared, RestoreOptions, Streams, restore_flags};
use super::io;
use super::running::{Begun, Running, own_children};
use crate::container::{OwnMounts, network};
use crate::criu::stdio::{self, Own};
use crate::criu::{Criu, own_network};
use crate::terminal::Terminal;

/// Descriptors that are handed over get numbers from here on, so that they are clear of CRIU's own.
const HANDED_OVER: RawFd = 64;

/// A `criu restore` that is not started yet.
pub(super) struct Launch<'a> {
    prepared: &'a Prepared,
    options: &'a RestoreOptions,
    pub(super) command: Command,
    /// What CRIU is called, for errors.
    program: PathBuf,
    /// The standard streams of the tree.
    streams: [OwnedFd; 3],
    /// Descriptors that CRIU inherits.
    passed: Vec<OwnedFd>,
    /// The network namespace that the tree gets, if Pagemark gives it one.
    network: Option<OwnedFd>,
    own_mounts: Option<OwnMounts>,
    /// Keeps the images from being swept away. CRIU inherits it, too.
    held: File,
}

impl<'a> Launch<'a> {
    pub(super) fn new(
        prepared: &'a Prepared,
        options: &'a RestoreOptions,
        criu: &Criu,
        streams: [OwnedFd; 3],
    ) -> Result<Launch<'a>, Error> {
        let scratch = prepared.scratch.as_ref().unwrap_or(&prepared.directory);
        let held = scratch_directory::hold(scratch).map_err(io(format!("hold {}", scratch.display())))?;
        let mut command = criu.command("restore", &prepared.directory, LOG);
        command.arg("--restore-detached").args(restore_flags(&prepared.notes));
        if options.as_child {
            command.arg("--restore-sibling");
        }
        if prepared.notes.first_process.is_some() {
            command.arg("--pidfile").arg(prepared.root_pid_file());
        }
        if prepared.notes.shell_job {
            // The session's terminal is found by CRIU's own standard input.
            command.stdin(Stdio::inherit());
        }
        let program = criu.path().to_owned();
        let (passed, network, own_mounts) = (Vec::new(), None, None);
        Ok(Launch { prepared, options, command, program, streams, passed, network, own_mounts, held })
    }

    /// Gives the tree the root directory, if it has one of its own.
    pub(super) fn set_root(&mut self, root: Option<&Path>) -> Result<(), Error> {
        self.own_mounts = root.map(OwnMounts::with_root).transpose().map_err(io("pass the root directory"))?;
        if let Some(root) = root {
            self.command.arg("--root").arg(root);
        }
        Ok(())
    }

    /// Has CRIU open the standard streams of the tree in place of those that led out of it.
    pub(super) fn redirect_streams(&mut self) -> Result<(), Error> {
        let own = |stream: &OwnedFd| Own { descriptor: stream.as_raw_fd(), is_terminal: stream.is_terminal() };
        let own = [own(&self.streams[0]), own(&self.streams[1]), own(&self.streams[2])];
        let passed = &mut self.passed;
        self.command.args(stdio::redirect(
            &self.prepared.directory,
            &self.prepared.notes.outside,
            own,
            &mut |number| {
                // SAFETY: it is one of the streams, which are open.
                let copy = duplicate(unsafe { BorrowedFd::borrow_raw(number) })?;
                passed.push(copy);
                Ok(passed[passed.len() - 1].as_raw_fd())
            },
        )?);
        Ok(())
    }

    /// Gives a tree that had a network of its own the network of the options.
    pub(super) fn set_network(&mut self) -> Result<(), Error> {
        let notes = &self.prepared.notes;
        let Some(had) = &notes.own_network else { return Ok(()) };
        let network = &self.options.network;
        if had.is_saved {
            network.check_saved()?;
        } else if self.prepared.has_own_users() {
            network.check_made_by_criu(had)?;
            own_network::make_by_criu(&self.prepared.directory)?;
        } else {
            let namespace = network.open(had)?;
            self.pass(namespace.as_fd(), network::NAME)?;
            self.network = Some(namespace);
        }
        if !notes.keep_connections {
            self.command.args(network::UNLOCKED);
        }
        Ok(())
    }

    pub(super) fn network(&self) -> Option<BorrowedFd<'_>> {
        self.network.as_ref().map(AsFd::as_fd)
    }

    /// Passes a descriptor to CRIU, which has it as the resource `name` of its images.
    pub(super) fn pass(&mut self, descriptor: BorrowedFd<'_>, name: &str) -> Result<(), Error> {
        let copy = duplicate(descriptor).map_err(io("duplicate a descriptor"))?;
        self.command.args(["--inherit-fd".to_owned(), format!("fd[{}]:{name}", copy.as_raw_fd())]);
        self.passed.push(copy);
        Ok(())
    }

    /// Starts CRIU in the control groups `groups`, and in a session on `terminal` if there is one,
    /// with the process group that had the terminal. `root_pid` is the id that the root process
    /// gets, which is not known of a container.
    pub(super) fn start(
        mut self,
        terminal: Option<&(Terminal, i32)>,
        root_pid: Option<i32>,
        groups: Vec<File>,
    ) -> Result<StartedCriu, Error> {
        let (reports, for_leader) = std::io::pipe().map_err(io("make a pipe"))?;
        let session = terminal.zip(root_pid).and_then(|((terminal, foreground), root_pid)| {
            Some(terminal.session(for_leader.as_raw_fd())?.of_restore(root_pid, *foreground))
        });
        if session.is_some() {
            self.command.stdin(self.streams[0].try_clone().map_err(io("duplicate a standard stream"))?);
        }
        // A job that continues by itself is none of the caller's terminal.
        let options = self.options;
        let shell_job = self.prepared.notes.shell_job;
        let leaves_session = shell_job && options.streams == Streams::Null && !options.as_child;
        let numbers: Vec<RawFd> = self.passed.iter().map(AsRawFd::as_raw_fd).chain([self.held.as_raw_fd()]).collect();
        let own_mounts = self.own_mounts.take();
        // SAFETY: only system calls are made between fork and exec, which is allowed in a child of a
        // process with threads.
        unsafe {
            self.command.pre_exec(move || {
                // What is refused is found afterwards.
                groups.iter().for_each(|mut group| drop(group.write_all(b"0")));
                match session {
                    Some(session) => session.begin()?,
                    None if leaves_session => drop(nix::unistd::setsid()?),
                    None => {}
                }
                own_mounts.as_ref().map_or(Ok(()), OwnMounts::enter)?;
                stdio::keep_open(&numbers)
            });
        }
        let limit = options.time_limit.unwrap_or_else(|| self.prepared.default_time_limit());
        let begin = Instant::now();
        let begun = root_pid.map_or_else(|| Begun::Container { others: own_children() }, Begun::Process);
        let child = self.command.spawn().map_err(io(format!("start {}", self.program.display())))?;
        let Launch { command, streams, passed, network, held, .. } = self;
        drop((command, for_leader, streams, passed, network));
        let running = match session {
            Some(_) => Running::below_leader(child, reports).map_err(io("begin a session"))?,
            None => Running::Criu(child),
        };
        Ok(StartedCriu { running, begun, begin, limit, _held: held })
    }
}

/// Descriptors for the standard streams, clear of the numbers of CRIU's own.
pub(super) fn streams(streams: Streams) -> Result<[OwnedFd; 3], Error> {
    let null = OpenOptions::new().read(true).write(true).open("/dev/null").map_err(io("open /dev/null"))?;
    let duplicate = |number: RawFd| -> Result<OwnedFd, Error> {
        let source = if streams == Streams::Null { null.as_raw_fd() } else { number };
        // SAFETY: borrowed only for the call, which fails if nothing is open under that number.
        let source = unsafe { BorrowedFd::borrow_raw(source) };
        match self::duplicate(source) {
            // A standard stream that is closed here.
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => self::duplicate(null.as_fd()),
            result => result,
        }
        .map_err(io("duplicate a standard stream"))
    };
    Ok([duplicate(0)?, duplicate(1)?, duplicate(2)?])
}

/// Duplicates a descriptor, clear of the numbers of CRIU's own.
pub(super) fn duplicate(descriptor: BorrowedFd<'_>) -> std::io::Result<OwnedFd> {
    use nix::fcntl::{FcntlArg, fcntl};
    let copy = fcntl(descriptor, FcntlArg::F_DUPFD_CLOEXEC(HANDED_OVER))?;
    // SAFETY: the descriptor was just made and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}
