//! Spaces of a checkpoint and their mappings as text.

use pagemark::repository::{SpaceKind, SpaceRecord};
use pagemark_report::escape::printable;
use pagemark_report::table::Table;
use pagemark_report::text;

/// Kind, number and label of a space: `process 42 sleep`.
pub fn space_title(space: &SpaceRecord) -> String {
    let (id, label) = (space.id, printable(&space.label));
    match space.kind {
        SpaceKind::Process { pid } => format!("process {pid} {label}"),
        SpaceKind::RamBlock { .. } => format!("RAM block {id} {label}"),
        SpaceKind::Disk { .. } => format!("disk {id} {label}"),
        SpaceKind::Region { .. } => format!("region {id} {label}"),
        SpaceKind::Heap { .. } => format!("heap {id} {label}"),
        SpaceKind::SharedMemory { inode, .. } => format!("shared memory {inode} {label}"),
    }
}

/// A mapping in a table.
pub struct MappingRow<'a> {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// Permissions as in `/proc/PID/maps`, such as `rw-p`.
    pub permissions: &'a str,
    /// Number of its pages that the table is about.
    pub pages: u64,
    /// Path of the mapped file, a name such as `[heap]`, or nothing.
    pub name: &'a str,
}

/// A table of mappings, which calls their counts of pages `pages_column`. Without mappings it is
/// empty.
pub fn mapping_table<'a>(pages_column: &str, mappings: impl IntoIterator<Item = MappingRow<'a>>) -> String {
    let mut mappings = mappings.into_iter().peekable();
    if mappings.peek().is_none() {
        return String::new();
    }
    let mut table = Table::new(["  address", "", ">size", &format!(">{pages_column}"), "what"]);
    for mapping in mappings {
        table.row([
            format!("  {:012x}", mapping.start),
            mapping.permissions.to_owned(),
            text::bytes(mapping.end.saturating_sub(mapping.start)),
            text::count(mapping.pages),
            mapping.name.to_owned(),
        ]);
    }
    table.to_string()
}
