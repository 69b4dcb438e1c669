//! Values that all users in a process share. A child made by `fork` makes its own: an open file of
//! `/proc/self` stays with the process that opened it.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::at_fork::hold_off;
use super::this_process::OfThisProcess;

/// A value of this process, as long as somebody uses it.
#[derive(Debug)]
pub struct PerProcess<T> {
    value: Mutex<Option<(OfThisProcess, Weak<T>)>>,
}

impl<T> Default for PerProcess<T> {
    fn default() -> Self {
        PerProcess::new()
    }
}

impl<T> PerProcess<T> {
    /// No value yet.
    pub const fn new() -> Self {
        PerProcess { value: Mutex::new(None) }
    }

    /// The value, which is made if there is none.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn get(&self, make: impl FnOnce() -> io::Result<T>) -> io::Result<Arc<T>> {
        let _forks = hold_off();
        let mut value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        let known = value.as_ref().filter(|(maker, _)| maker.is_here()).and_then(|(_, value)| value.upgrade());
        if let Some(known) = known {
            return Ok(known);
        }
        let made = Arc::new(make()?);
        *value = Some((OfThisProcess::new(), Arc::downgrade(&made)));
        Ok(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_share_the_value_while_there_are_any() {
        let shared = PerProcess::new();
        let first = shared.get(|| Ok(1)).unwrap();
        let second = shared.get(|| Ok(2)).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        drop((first, second));
        assert!(shared.get(|| Err(io::ErrorKind::NotFound.into())).is_err());
        assert_eq!(*shared.get(|| Ok(3)).unwrap(), 3);
    }
}
