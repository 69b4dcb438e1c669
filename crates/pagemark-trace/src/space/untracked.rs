//! The mappings of a process that cannot be tracked as the others.

use std::io;

use pagemark::RangeSet;
use pagemark::repository::MappingException;
use pagemark_linux::proc::{Mapping, MappingKind, smaps};

/// The mappings that have a [`MappingException`].
#[derive(Debug, Default)]
pub(super) struct UntrackedMappings {
    unregistrable: RangeSet,
    droppable: RangeSet,
    /// What the kernel did not register, in either of the two.
    refused: RangeSet,
    /// Anonymous mappings that were examined without registering them.
    examined: RangeSet,
}

impl UntrackedMappings {
    /// The mappings whose writes cannot be tracked.
    pub(super) fn unregistrable(&self) -> &RangeSet {
        &self.unregistrable
    }

    /// Leaves out of `ranges` what has an exception.
    pub(super) fn without(&self, mut ranges: RangeSet) -> RangeSet {
        ranges.subtract(&self.unregistrable);
        ranges.subtract(&self.droppable);
        ranges
    }

    /// The exception of a mapping.
    pub(super) fn exception(&self, mapping: &Mapping) -> Option<MappingException> {
        if self.droppable.contains(mapping.start) {
            Some(MappingException::Droppable)
        } else {
            self.unregistrable.contains(mapping.start).then_some(MappingException::Unregistrable)
        }
    }

    /// Records the mappings that the kernel did not register. Those of anonymous memory are
    /// examined for being droppable.
    pub(super) fn set_refused(&mut self, thread: i32, mappings: &[Mapping], refused: RangeSet) -> io::Result<()> {
        if refused != self.refused {
            let anonymous = Mapping::ranges(mappings, MappingKind::Anonymous);
            self.droppable = smaps::droppable(thread, &refused.intersection(&anonymous))?;
            self.unregistrable = refused.clone();
            self.unregistrable.subtract(&self.droppable);
            self.refused = refused;
        }
        Ok(())
    }

    /// Finds the droppable mappings without registering any. Reading their flags costs a walk of
    /// the page tables, so only mappings that are new since the last call are examined; in a freeze
    /// also those that were droppable, because other memory may have come in their place.
    pub(super) fn find_droppable(&mut self, thread: i32, mappings: &[Mapping], is_frozen: bool) -> io::Result<()> {
        if !smaps::has_droppable() {
            return Ok(());
        }
        let anonymous: RangeSet =
            mappings.iter().filter(|mapping| may_be_droppable(mapping)).map(Mapping::range).collect();
        let unknown = mappings.iter().filter(|mapping| may_be_droppable(mapping) && !self.has_examined(mapping));
        let mut unknown: RangeSet = unknown.map(Mapping::range).collect();
        let mut known = self.droppable.intersection(&anonymous);
        if is_frozen {
            unknown.extend(&std::mem::take(&mut known));
        }
        known.extend(&smaps::droppable(thread, &unknown)?);
        self.droppable = known;
        self.examined = anonymous;
        Ok(())
    }

    /// True if a part of the mapping was examined: a mapping that grows keeps its kind.
    fn has_examined(&self, mapping: &Mapping) -> bool {
        self.examined.within(mapping.range()).next().is_some()
    }
}

/// False for mappings that cannot have been made by `mmap(MAP_DROPPABLE)`.
fn may_be_droppable(mapping: &Mapping) -> bool {
    mapping.is_private_anonymous() && !matches!(&mapping.name[..], b"[heap]" | b"[stack]")
}
