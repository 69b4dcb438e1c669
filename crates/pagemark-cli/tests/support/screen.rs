//! A terminal in which a shell runs, and that a test reads and types on.
#![allow(dead_code, reason = "each story uses a part")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex};

use nix::fcntl::OFlag;
use nix::pty::{Winsize, grantpt, posix_openpt, ptsname_r, unlockpt};
use nix::sys::termios::{LocalFlags, Termios, tcgetattr};
use pagemark_testing::{wait_for, wait_for_described};

use crate::support::{Pagemark, children};

nix::ioctl_write_ptr_bad!(
    /// Sets the size of a terminal.
    set_size,
    libc::TIOCSWINSZ,
    Winsize
);

/// A terminal in which a shell runs that controls jobs.
pub struct Screen {
    pub master: File,
    pub shell: Child,
    shown: Arc<Mutex<String>>,
}

impl Screen {
    pub fn open(pagemark: &Pagemark) -> Screen {
        // Programs that other tests start meanwhile must not inherit it.
        let master = posix_openpt(OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC).expect("a terminal");
        grantpt(&master).and_then(|()| unlockpt(&master)).expect("a terminal");
        let name = ptsname_r(&master).expect("a name");
        let slave = File::options().read(true).write(true).custom_flags(libc::O_NOCTTY).open(name).expect("its slave");
        let master = master.as_fd().try_clone_to_owned().map(File::from).expect("a copy");
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        // SAFETY: the structure lives through the call.
        unsafe { set_size(master.as_raw_fd(), &size) }.expect("a size");
        let [input, output, errors] = [0, 1, 2].map(|_| slave.try_clone().expect("a copy"));
        let mut shell = Command::new("bash");
        shell.args(["--norc", "--noprofile", "--noediting", "-i"]).current_dir(pagemark.directory());
        shell.env("PAGEMARK_REPO", pagemark.repository()).env("PS1", "outer> ").env_remove("PROMPT_COMMAND");
        shell.env("PM", env!("CARGO_BIN_EXE_pagemark")).stdin(input).stdout(output).stderr(errors);
        // SAFETY: only system calls are made between fork and exec.
        unsafe {
            shell.pre_exec(move || {
                nix::unistd::setsid()?;
                nix::errno::Errno::result(libc::ioctl(0, libc::TIOCSCTTY, 0))?;
                // A job in the background of a shell without job control ignores them, and so would all
                // that it starts.
                for signal in [libc::SIGINT, libc::SIGQUIT] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                Ok(())
            });
        }
        let shell = shell.spawn().expect("bash starts");
        let shown = Arc::new(Mutex::new(String::new()));
        let (mut reader, all) = (master.try_clone().expect("a copy"), shown.clone());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = reader.read(&mut buffer) {
                all.lock().unwrap().push_str(&String::from_utf8_lossy(&buffer[..length]));
            }
        });
        let mut screen = Screen { master, shell, shown };
        screen.expect("outer> ");
        screen
    }

    /// Types, and forgets what was shown before.
    pub fn types(&mut self, keys: &str) {
        self.shown.lock().unwrap().clear();
        self.master.write_all(keys.as_bytes()).expect("typed");
    }

    /// Waits until the screen shows this. Returns all that it has shown since the last key.
    pub fn expect(&mut self, text: &str) -> String {
        let screen = self.shown.clone();
        // What it shows comes first: it says more than the list of processes.
        let event = || format!("{text:?} on the screen, which shows {:?}", screen.lock().unwrap());
        let found = wait_for_described(event, || {
            let shown = self.shown.lock().unwrap().clone();
            if shown.contains(text) {
                Some(Ok(shown))
            } else {
                self.shell.try_wait().expect("a child").map(|_| Err(shown))
            }
        });
        found.unwrap_or_else(|shown| panic!("the shell has ended before it showed {text:?}: {shown}"))
    }

    pub fn mode(&self) -> Termios {
        tcgetattr(&self.master).expect("a mode")
    }

    /// Waits until the mode is as a shell expects it, or as the relay sets it.
    pub fn wait_for_lines(&self, are_wanted: bool) {
        wait_for("the mode of the terminal", || {
            (self.mode().local_flags.contains(LocalFlags::ICANON) == are_wanted).then_some(())
        });
    }

    /// The only child of the shell with this name.
    pub fn child(&self, name: &str) -> i32 {
        let found = |pid: &i32| {
            let comm = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            comm.trim_end() == name
        };
        wait_for(name, || children(self.shell.id() as i32).into_iter().find(found))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the screen: {:?}, its mode: {:?}", self.shown, tcgetattr(&self.master));
        }
        let _ = self.shell.kill();
        let _ = self.shell.wait();
    }
}
