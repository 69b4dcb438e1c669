//! Restoring a process tree that runs before its memory is there.
//!
//! The tree is restored without its private memory. A page that it touches is delivered at once,
//! the others one after the other. CRIU handles the page faults, with its command `lazy-pages`, and
//! requests the pages from Pagemark over a socket that no other process can reach.
//!
//! Until all pages are delivered the tree depends on the process that delivers them. In place of a
//! page that can no longer be delivered, the kernel would give the tree zeros. A guard process
//! therefore kills the tree when the delivering process ends early, however it ends, before CRIU
//! can notice. The checkpoint is unchanged and can be restored again.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use pagemark::repository::Manifest;
use pagemark::{Address, PAGE_SIZE, PageRangeExt, PageTree, Store};

use super::images::{Memory, Prepared, RestoreOptions, Restored, prepare_with};
use crate::criu::stdio;
use crate::criu::{Criu, errors_in_log};
use crate::error::Error;

/// The log of `criu lazy-pages` in the images directory.
const LOG: &str = "lazy-pages.log";

/// Commands of CRIU's page protocol.
const GET: u32 = 7;
const ADD_WITH_FLAGS: u32 = 6;
const CLOSE: u32 = 0x1023;
const FORCE_CLOSE: u32 = 0x1024;
/// [`ADD_WITH_FLAGS`] with the flag that says that the pages follow.
const ADD_PRESENT: u32 = 4 << 16 | ADD_WITH_FLAGS;

/// Bytes of a message: command, padding, pages, address, process.
const MESSAGE: usize = 32;

/// Pages of one answer at most; CRIU asks again for the rest.
const MAX_PAGES: u64 = 1024;

/// Requests wait in the socket while an answer is written; CRIU does not try twice to send one.
const REQUESTS_BYTES: usize = 4 << 20;

/// How long `criu lazy-pages` may take to start.
const START_LIMIT: Duration = Duration::from_secs(30);

/// Milliseconds between two polls of CRIU's state.
const POLL_MS: u16 = 20;

/// An images directory without the memory that comes later, for process ids that are free.
#[derive(Debug)]
pub struct PreparedLazy {
    prepared: Prepared,
    trees: Trees,
    total_pages: u64,
}

/// The pages of each process.
struct Trees(HashMap<i32, PageTree>);

impl std::fmt::Debug for Trees {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.keys()).finish()
    }
}

/// Writes the images directory of a checkpoint but for what is delivered later. As
/// [`crate::restore::prepare`] otherwise.
///
/// # Errors
/// [`Error`]
pub fn prepare(manifest: &Manifest, store: &(dyn Store + Sync), directory: &Path) -> Result<PreparedLazy, Error> {
    let (prepared, spaces) = prepare_with(manifest, store, directory, Memory::Undeliverable, &mut |_| {})?;
    let trees: HashMap<i32, PageTree> = spaces.into_iter().map(|space| (space.pid, space.tree)).collect();
    let total_pages = trees.values().map(PageTree::page_count).sum();
    Ok(PreparedLazy { prepared, trees: Trees(trees), total_pages })
}

impl PreparedLazy {
    /// The process ids that the tree will have, the root first.
    pub fn pids(&self) -> Vec<i32> {
        self.prepared.pids()
    }

    /// Restores the tree and lets it run. The calling process has to deliver its memory by
    /// [`LazyRestore::deliver`].
    ///
    /// # Errors
    /// As [`Prepared::run`]; also if a page can't be read. Then nothing of the tree is left.
    pub fn run<'a>(
        self,
        criu: &Criu,
        store: &'a dyn Store,
        options: &RestoreOptions,
    ) -> Result<LazyRestore<'a>, Error> {
        self.prepared.check_free()?;
        let directory = self.prepared.directory.clone();
        let io = |what: &str| Error::criu_io(format!("{what} for CRIU"));
        let (socket, client) = UnixStream::pair().map_err(io("make a socket pair"))?;
        setsockopt(&client, sockopt::SndBuf, &REQUESTS_BYTES).map_err(|e| io("size a socket")(e.into()))?;
        let guard = Guard::start(&self.prepared.pids(), &socket).map_err(io("start a guard"))?;
        let mut command = criu.command("lazy-pages", &directory, LOG);
        let number = client.as_raw_fd();
        command.args(["--page-server", "--ps-socket", &number.to_string()]);
        // SAFETY: only system calls are made between fork and exec, which is allowed in a child of a
        // process with threads.
        unsafe {
            command.pre_exec(move || stdio::begin_session_with(&[number]));
        }
        let daemon = command.spawn().map_err(io(&format!("start {}", criu.path().display())))?;
        drop(client);
        let mut server = Server {
            socket,
            daemon,
            guard: Some(guard),
            trees: self.trees,
            store,
            delivered_pages: 0,
            directory,
            finished: false,
        };
        server.wait_started()?;
        let mut serving = Ok(());
        let restored = self.prepared.run_with(criu, options, &["--lazy-pages"], &mut || {
            let served = server.serve_once().map(drop);
            serving = served.as_ref().map(drop).map_err(drop);
            served
        });
        let restored = restored.inspect_err(|_| {
            // CRIU has taken back what it had begun: whatever runs under those ids is not to be killed.
            if serving.is_ok()
                && let Some(guard) = server.guard.take()
            {
                guard.dismiss();
            }
        })?;
        Ok(LazyRestore { restored, server, total_pages: self.total_pages })
    }
}

/// A restored tree whose memory is not all there yet. Dropped before it is, the tree is killed.
#[derive(Debug)]
pub struct LazyRestore<'a> {
    restored: Restored,
    server: Server<'a>,
    total_pages: u64,
}

impl LazyRestore<'_> {
    /// The tree, which runs.
    pub fn restored(&self) -> &Restored {
        &self.restored
    }

    /// Pages that the checkpoint holds. Some came with the restore already, and others may never be
    /// asked for.
    pub fn total_pages(&self) -> u64 {
        self.total_pages
    }

    /// Delivers memory until all of it is there; calls `progress` with the pages delivered so far.
    /// Then the tree needs nothing more. Returns the pages delivered.
    ///
    /// # Errors
    /// A page can't be read, or CRIU failed. The tree is killed, since it can't run without its
    /// memory.
    pub fn deliver(mut self, progress: &mut dyn FnMut(u64)) -> Result<u64, Error> {
        while self.server.serve_once()? {
            progress(self.server.delivered_pages);
        }
        Ok(self.server.delivered_pages)
    }
}

struct Server<'a> {
    socket: UnixStream,
    daemon: Child,
    guard: Option<Guard>,
    trees: Trees,
    store: &'a dyn Store,
    delivered_pages: u64,
    directory: std::path::PathBuf,
    finished: bool,
}

impl std::fmt::Debug for Server<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("delivered_pages", &self.delivered_pages).finish_non_exhaustive()
    }
}

impl Server<'_> {
    /// Waits until `criu restore` can connect.
    fn wait_started(&mut self) -> Result<(), Error> {
        let deadline = Instant::now() + START_LIMIT;
        let listening = self.directory.join("lazy-pages.socket");
        while !listening.exists() {
            if self.daemon.try_wait().map_err(Error::criu_io("wait for CRIU"))?.is_some() {
                return Err(self.failure());
            }
            if Instant::now() >= deadline {
                let what = "listen for the restored processes";
                let limit_s = START_LIMIT.as_secs();
                return Err(Error::criu_no_answer(what, self.daemon.id(), limit_s));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn failure(&self) -> Error {
        let reason = errors_in_log(&self.directory.join(LOG));
        Error::criu_failed("deliver memory on demand", reason)
    }

    /// Waits a while for a request and answers it. False once all memory is delivered.
    fn serve_once(&mut self) -> Result<bool, Error> {
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
        let ready = match poll(&mut fds, PollTimeout::from(POLL_MS)) {
            Ok(ready) => ready > 0,
            Err(nix::errno::Errno::EINTR) => false,
            Err(error) => return Err(Error::criu_io("wait for CRIU")(error.into())),
        };
        if ready && self.answer()? {
            return Ok(true);
        }
        match self.daemon.try_wait().map_err(Error::criu_io("wait for CRIU"))? {
            Some(status) if status.success() => {
                self.finished = true;
                if let Some(guard) = self.guard.take() {
                    guard.dismiss();
                }
                Ok(false)
            }
            Some(_) => Err(self.failure()),
            None => Ok(true),
        }
    }

    /// Answers one request. False if there is none because CRIU has closed the socket.
    fn answer(&mut self) -> Result<bool, Error> {
        let broken = |error| Error::criu_io("talk with CRIU")(error);
        let mut message = [0; MESSAGE];
        match self.socket.read_exact(&mut message) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                std::thread::sleep(Duration::from_millis(u64::from(POLL_MS)));
                return Ok(false);
            }
            Err(error) => return Err(broken(error)),
        }
        let number = |at: usize| message[at..at + 8].iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte));
        let (command, pages, address, pid) = (number(0) as u32, number(8), number(16), number(24));
        match command & 0xffff {
            GET => {
                let tree = self.trees.0.get(&(pid as i32)).ok_or_else(|| {
                    Error::damaged(format!("CRIU asks for memory of process {pid}, which the checkpoint does not have"))
                })?;
                let pages = pages.min(MAX_PAGES);
                let mut answer = Vec::with_capacity(MESSAGE + pages as usize * PAGE_SIZE);
                answer.extend(u64::from(ADD_PRESENT).to_le_bytes());
                [pages, address, pid].iter().for_each(|value| answer.extend(value.to_le_bytes()));
                let mut content = [0; PAGE_SIZE];
                let first = Address::new(address).page();
                for page in (first..first.saturating_add(pages)).pages() {
                    self.store.get_page(tree.get(page), &mut content)?;
                    answer.extend_from_slice(&content);
                }
                self.socket.write_all(&answer).map_err(broken)?;
                self.delivered_pages += pages;
            }
            CLOSE | FORCE_CLOSE => self.socket.write_all(&0_u32.to_le_bytes()).map_err(broken)?,
            _ => {
                let reason = format!("it asks for {command:#x}, which is not known");
                return Err(Error::criu_failed("deliver memory on demand", reason));
            }
        }
        Ok(true)
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        // Without a message, the guard kills the tree first.
        if let Some(guard) = self.guard.take() {
            guard.alarm();
        }
        if !self.finished {
            // Where it waits for a CRIU that has ended, SIGTERM does not end it. It has no process left to serve.
            let _ = self.daemon.kill();
            let _ = self.daemon.wait();
        }
    }
}

/// Kills the tree when the process that delivers its memory ends. It also holds the socket, so that
/// CRIU does not notice before.
struct Guard {
    shell: Child,
    word: ChildStdin,
}

impl Guard {
    fn start(pids: &[i32], socket: &UnixStream) -> std::io::Result<Guard> {
        let pids: Vec<String> = pids.iter().map(i32::to_string).collect();
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "read -r word || kill -KILL \"$@\"", "pagemark-guard"]).args(pids);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let number = socket.as_raw_fd();
        // SAFETY: only system calls are made between fork and exec, which is allowed in a child of a
        // process with threads.
        unsafe {
            command.pre_exec(move || stdio::begin_session_with(&[number]));
        }
        let mut shell = command.spawn()?;
        let word = shell.stdin.take().ok_or(std::io::ErrorKind::BrokenPipe)?;
        Ok(Guard { shell, word })
    }

    /// Ends the guard, and lets the tree live.
    fn dismiss(mut self) {
        let _ = self.word.write_all(b"done\n");
        let _ = self.shell.wait();
    }

    /// Has the tree killed.
    fn alarm(mut self) {
        drop(self.word);
        let _ = self.shell.wait();
    }
}
