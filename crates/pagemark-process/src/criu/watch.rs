//! The moment in which CRIU stops the first process of a tree.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use pagemark_linux::proc::Status;

/// Pause between two looks.
const POLL: Duration = Duration::from_micros(200);

/// Sees when the tree is frozen, whatever Pagemark does meanwhile: what is not seen would not count
/// as downtime.
#[derive(Debug)]
pub(super) struct Watch {
    shared: Arc<Watched>,
    thread: Option<std::thread::JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Watched {
    frozen_at: OnceLock<Instant>,
    /// The root was gone before it was frozen. Another process may have its id since.
    is_gone: AtomicBool,
    is_over: AtomicBool,
}

impl Watch {
    pub fn start(pid: i32, criu_pid: i32) -> std::io::Result<Watch> {
        let shared = Arc::new(Watched::default());
        let watched = shared.clone();
        let thread = std::thread::Builder::new().name("pagemark-watch".into()).spawn(move || {
            while !watched.is_over.load(Ordering::Relaxed) {
                match tracer(pid) {
                    Some(tracer) if tracer == criu_pid => {
                        let _ = watched.frozen_at.set(Instant::now());
                        return;
                    }
                    Some(_) => std::thread::sleep(POLL),
                    None => return watched.is_gone.store(true, Ordering::Relaxed),
                }
            }
        })?;
        Ok(Watch { shared, thread: Some(thread) })
    }

    pub fn frozen_at(&self) -> Option<Instant> {
        self.shared.frozen_at.get().copied()
    }

    pub fn is_gone(&self) -> bool {
        self.shared.is_gone.load(Ordering::Relaxed)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It does not panic.
            let _ = thread.join();
        }
    }
}

/// The tracer of a process; zero if there is none. None if the process is gone.
pub(super) fn tracer(pid: i32) -> Option<i32> {
    Status::read(pid).ok().filter(|status| !status.is_dead()).map(|status| status.tracer_pid)
}
