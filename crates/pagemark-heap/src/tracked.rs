//! What a tracker has to know of a heap.

use std::fmt;

use pagemark::ByteCount;
use pagemark_linux::views::Views;

use crate::Parts;
use crate::crossings::Crossings;

/// Memory whose objects are tracked by parts of pages.
pub(crate) trait Tracked: fmt::Debug {
    fn views(&self) -> &Views;

    /// Which objects reach from one part into the next.
    fn crossings(&self) -> &Crossings;

    /// The bytes, from the beginning of each view, that may hold data.
    fn used(&self) -> ByteCount;

    fn parts(&self) -> Parts;
}
