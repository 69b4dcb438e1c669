//! Mappings of its memory that QEMU's machine has for itself, made by the library for KVM's log.

use pagemark::sys::proc::Mapping;
use pagemark::{Mechanism, Range};
use pagemark_kvm_log::protocol::VIEWS;

use crate::error::{Error, ErrorKind, Object, Result};

/// The addresses between which the machine's own mappings are.
pub(crate) fn span(mappings: &[Mapping]) -> Option<Range> {
    let mut reserved = mappings.iter().filter(|mapping| is_reserved(mapping));
    let first = reserved.next()?;
    Some(first.start..reserved.next_back().unwrap_or(first).end)
}

/// Removes these mappings: the memory is QEMU's, which has its own mapping of it.
pub(crate) fn leave_out(mappings: &mut Vec<Mapping>, span: Option<&Range>) {
    if let Some(span) = span {
        mappings.retain(|mapping| mapping.start < span.start || span.end < mapping.end);
    }
}

/// Checks that a mechanism finds what the machine writes through mappings of its own.
///
/// # Errors
/// [`ErrorKind::Unsupported`]
pub(crate) fn check(mechanism: Mechanism, mappings: &[Mapping], span: Option<&Range>, pid: i32) -> Result<()> {
    let Some(span) = span else { return Ok(()) };
    let is_view = |mapping: &&Mapping| span.start <= mapping.start && mapping.end <= span.end && !is_reserved(mapping);
    let finds = matches!(mechanism, Mechanism::KvmLog | Mechanism::Full | Mechanism::Compare);
    if finds || !mappings.iter().any(|mapping| is_view(&mapping)) {
        return Ok(());
    }
    let reason = format!("was started for kvm-log, and {mechanism} does not see what its machine writes");
    Err(Error::about(ErrorKind::Unsupported, Object::Process(pid), reason).help("use --mechanism kvm-log"))
}

fn is_reserved(mapping: &Mapping) -> bool {
    let name = mapping.name.strip_prefix(b"/memfd:");
    name.map(|name| name.strip_suffix(b" (deleted)").unwrap_or(name)) == Some(VIEWS.to_bytes())
}
