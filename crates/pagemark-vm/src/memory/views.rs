//! Mappings of its memory that QEMU's machine has for itself, made by the library for KVM's log.

use pagemark::{AddressRangeExt, ByteCount, Mechanism, Range};
use pagemark_kvm_log::protocol::VIEWS;
use pagemark_linux::proc::Mapping;

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

/// A mapping of its own by which the machine reaches a part of a block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct View {
    /// Where the machine reaches it.
    pub(crate) range: Range,
    /// Where QEMU has it.
    pub(crate) of: Range,
}

/// The views of the memory at `block`, which lies in one of `mappings`, among `own`: the machine's
/// own mappings.
pub(crate) fn of_block(block: &Range, mappings: &[Mapping], own: &[Mapping]) -> Vec<View> {
    let has = |mapping: &&Mapping| mapping.start <= block.start && block.end <= mapping.end;
    let Some(mapping) = mappings.iter().find(has).filter(|mapping| mapping.shared) else { return Vec::new() };
    let first = mapping.offset + (block.start - mapping.start).get();
    let last = first + block.byte_count().get();
    let of_same = own.iter().filter(|view| (view.device, view.inode) == (mapping.device, mapping.inode));
    let views = of_same.filter_map(|view| {
        let from = view.offset.max(first);
        let to = view.offset.saturating_add(view.range().byte_count().get()).min(last);
        let bytes = ByteCount::new(to.checked_sub(from).filter(|&bytes| bytes > 0)?);
        let start = view.start + ByteCount::new(from - view.offset);
        let of = block.start + ByteCount::new(from - first);
        Some(View { range: start..start + bytes, of: of..of + bytes })
    });
    views.collect()
}

/// Checks that a mechanism finds what the machine writes through mappings of its own.
///
/// # Errors
/// [`ErrorKind::Unsupported`]
pub(crate) fn check(mechanism: Mechanism, mappings: &[Mapping], span: Option<&Range>, pid: i32) -> Result<()> {
    let Some(span) = span else { return Ok(()) };
    let is_view = |mapping: &&Mapping| span.start <= mapping.start && mapping.end <= span.end && !is_reserved(mapping);
    let finds = matches!(mechanism, Mechanism::KvmLog | Mechanism::KvmRing | Mechanism::Full | Mechanism::Compare);
    if finds || !mappings.iter().any(|mapping| is_view(&mapping)) {
        return Ok(());
    }
    let reason = format!("was started for kvm-log or kvm-ring, and {mechanism} does not see what its machine writes");
    Err(Error::about(ErrorKind::Unsupported, Object::Process(pid), reason).help("use the one that it was started for"))
}

fn is_reserved(mapping: &Mapping) -> bool {
    let name = mapping.name.strip_prefix(b"/memfd:");
    name.map(|name| name.strip_suffix(b" (deleted)").unwrap_or(name)) == Some(VIEWS.to_bytes())
}

#[cfg(test)]
mod tests {
    use pagemark::Address;
    use pagemark_linux::proc::maps;

    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000400000 rw-s 00100000 00:01 1027                       /memfd:memory (deleted)
7f0001000000-7f0001100000 rw-p 00000000 00:00 0
7f1000001000-7f1000101000 rw-s 00100000 00:01 1027                       /memfd:memory (deleted)
7f1000102000-7f1000302000 rw-s 00300000 00:01 1027                       /memfd:memory (deleted)
7f1000303000-7f1000403000 rw-s 00100000 00:01 1028                       /memfd:other (deleted)
";

    fn addresses(first: u64, last: u64) -> Range {
        Address::new(first)..Address::new(last)
    }

    #[test]
    fn each_view_is_that_of_the_part_with_the_same_offsets_in_the_file() {
        let all = maps::parse(MAPS.as_bytes()).unwrap();
        let (mappings, own) = all.split_at(2);
        let views = |first: u64, last: u64| of_block(&addresses(first, last), mappings, own);
        let whole = [
            View {
                range: addresses(0x7f10_0000_1000, 0x7f10_0010_1000),
                of: addresses(0x7f00_0000_0000, 0x7f00_0010_0000),
            },
            View {
                range: addresses(0x7f10_0010_2000, 0x7f10_0030_2000),
                of: addresses(0x7f00_0020_0000, 0x7f00_0040_0000),
            },
        ];
        assert_eq!(views(0x7f00_0000_0000, 0x7f00_0040_0000), whole);
        // A block that is a part of its mapping, and parts that no view has.
        let part = View {
            range: addresses(0x7f10_0010_2000, 0x7f10_0010_4000),
            of: addresses(0x7f00_0020_0000, 0x7f00_0020_2000),
        };
        assert_eq!(views(0x7f00_001f_0000, 0x7f00_0020_2000), [part]);
        assert_eq!(views(0x7f00_0010_0000, 0x7f00_0020_0000), []);
        // Private memory has none, and what is not mapped.
        assert_eq!(views(0x7f00_0100_0000, 0x7f00_0110_0000), []);
        assert_eq!(views(0x7f00_0200_0000, 0x7f00_0210_0000), []);
    }
}
