//! A checkpoint that goes on while the program runs.

use std::io;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::JoinHandle;

use pagemark::job::Taken;

use super::Objects;
use crate::Error;

/// A checkpoint whose memory is copied, and that is being stored:
/// [`SavedHeap::checkpoint_in_background`](crate::SavedHeap::checkpoint_in_background). The memory
/// of the heap stays mapped until it is stored, also if the heap is dropped.
///
/// Dropped, it waits until the checkpoint is stored, and its error is lost.
#[must_use = "the checkpoint is durable, and its errors are known, when `wait` returns"]
#[derive(Debug)]
pub struct Saving {
    thread: Option<JoinHandle<Result<Taken, Error>>>,
    objects: Arc<Objects>,
}

impl Saving {
    /// Runs `save` in a thread until it reports that the memory is copied, or has failed.
    ///
    /// # Errors
    /// No thread could be started.
    pub(super) fn start(
        objects: &Arc<Objects>,
        save: impl FnOnce(Sender<()>) -> Result<Taken, Error> + Send + 'static,
    ) -> io::Result<Saving> {
        let (sender, copied) = channel();
        let thread = std::thread::Builder::new().name("pagemark-saving".into()).spawn(move || save(sender))?;
        // An error: the sender is gone, because the checkpoint has failed.
        _ = copied.recv();
        Ok(Saving { thread: Some(thread), objects: objects.clone() })
    }

    /// True if [`Saving::wait`] returns at once.
    pub fn is_done(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the checkpoint is durable.
    ///
    /// # Errors
    /// Those of [`SavedHeap::checkpoint`](crate::SavedHeap::checkpoint): nothing is lost then, and
    /// the next checkpoint includes it.
    pub fn wait(mut self) -> Result<Taken, Error> {
        if !self.objects.is_here() {
            return Err(Error::forked_child());
        }
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => resume_unwind(panic),
            None => unreachable!("the thread is taken only here and when the value is dropped"),
        }
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        match self.thread.take() {
            // A panic of the thread was reported on stderr.
            Some(thread) if self.objects.is_here() => _ = thread.join(),
            // A child made by fork does not have the thread.
            thread => std::mem::forget(thread),
        }
    }
}
