//! BTF: the kernel's description of its own types, `/sys/kernel/btf/vmlinux`. Only what is needed
//! to find fields and functions is read.

use std::io;

/// Where the kernel has its description.
const PATH: &str = "/sys/kernel/btf/vmlinux";

const MAGIC: u16 = 0xeb9f;
/// Bytes of the part of a type that every kind has.
const TYPE_BYTES: usize = 12;
/// Bytes of a field of a structure.
const FIELD_BYTES: usize = 12;
/// How many anonymous structures may be in each other.
const MAX_DEPTH: u32 = 16;

const KIND_STRUCT: u32 = 4;
const KIND_UNION: u32 = 5;
const KIND_FUNCTION: u32 = 12;

/// The types of the kernel.
#[derive(Debug)]
pub(super) struct Btf {
    bytes: Vec<u8>,
    /// Begin and end of the names in `bytes`.
    names: (usize, usize),
    /// Where each type begins in `bytes`; type 1 is the first one.
    types: Vec<usize>,
}

/// A type without what its kind adds.
#[derive(Clone, Copy)]
struct Type {
    /// Where it begins.
    at: usize,
    name: u32,
    kind: u32,
    /// How many fields, parameters or the like follow.
    count: usize,
    /// Offsets of fields also have the size of bit fields.
    has_bit_sizes: bool,
}

impl Btf {
    /// The description of the running kernel.
    ///
    /// # Errors
    /// The kernel has none (`CONFIG_DEBUG_INFO_BTF`), or it is not in a known form.
    pub(super) fn of_kernel() -> io::Result<Btf> {
        let garbled = || io::Error::new(io::ErrorKind::InvalidData, format!("{PATH} is not in a known form"));
        Btf::parse(std::fs::read(PATH)?).ok_or_else(garbled)
    }

    fn parse(bytes: Vec<u8>) -> Option<Btf> {
        let header = |at| word(&bytes, at).and_then(|word| usize::try_from(word).ok());
        if u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?) != MAGIC {
            return None;
        }
        let begin = header(4)?;
        let (type_begin, type_bytes) = (begin.checked_add(header(8)?)?, header(12)?);
        let (name_begin, name_bytes) = (begin.checked_add(header(16)?)?, header(20)?);
        let names = (name_begin, name_begin.checked_add(name_bytes)?);
        let end = type_begin.checked_add(type_bytes)?;
        if end > bytes.len() || names.1 > bytes.len() {
            return None;
        }
        let mut btf = Btf { bytes, names, types: Vec::new() };
        let mut at = type_begin;
        while at < end {
            let parsed = btf.type_at(at)?;
            btf.types.push(at);
            at += TYPE_BYTES + parsed.added_bytes()?;
        }
        Some(btf)
    }

    fn type_at(&self, at: usize) -> Option<Type> {
        let info = word(&self.bytes, at + 4)?;
        let name = word(&self.bytes, at)?;
        Some(Type {
            at,
            name,
            kind: info >> 24 & 0x1f,
            count: (info & 0xffff) as usize,
            has_bit_sizes: info >> 31 == 1,
        })
    }

    /// True if the name at an offset among the names is this one.
    fn is_named(&self, offset: u32, name: &str) -> bool {
        let names = &self.bytes[self.names.0..self.names.1];
        let rest = names.get(offset as usize..).unwrap_or_default();
        rest.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
    }

    fn find(&self, kinds: &[u32], name: &str) -> Option<(u32, Type)> {
        let types = self.types.iter().zip(1..).filter_map(|(&at, id)| Some((id, self.type_at(at)?)));
        types.into_iter().find(|(_, found)| kinds.contains(&found.kind) && self.is_named(found.name, name))
    }

    /// The number of the type of a function.
    pub(super) fn function(&self, name: &str) -> Option<u32> {
        self.find(&[KIND_FUNCTION], name).map(|(id, _)| id)
    }

    /// Offset of a field from the begin of a structure, bytes. The field may be in an anonymous
    /// structure or union in it.
    pub(super) fn field_offset(&self, structure: &str, field: &str) -> Option<u16> {
        let (_, found) = self.find(&[KIND_STRUCT], structure)?;
        let bits = self.field_bits(found, field, MAX_DEPTH)?;
        if bits.is_multiple_of(8) { u16::try_from(bits / 8).ok() } else { None }
    }

    fn field_bits(&self, structure: Type, field: &str, depth: u32) -> Option<u32> {
        let fields = (0..structure.count).map(|index| structure.at + TYPE_BYTES + index * FIELD_BYTES);
        for at in fields {
            let (name, id, offset) = (word(&self.bytes, at)?, word(&self.bytes, at + 4)?, word(&self.bytes, at + 8)?);
            let offset = if structure.has_bit_sizes { offset & 0xff_ffff } else { offset };
            if self.is_named(name, field) {
                return Some(offset);
            }
            if !self.is_named(name, "") || depth == 0 {
                continue;
            }
            let inner = self.types.get((id as usize).wrapping_sub(1)).and_then(|&at| self.type_at(at));
            let inner = inner.filter(|inner| matches!(inner.kind, KIND_STRUCT | KIND_UNION));
            if let Some(inner_offset) = inner.and_then(|inner| self.field_bits(inner, field, depth - 1)) {
                return offset.checked_add(inner_offset);
            }
        }
        None
    }
}

impl Type {
    /// Bytes that follow [`TYPE_BYTES`]. None for an unknown kind.
    fn added_bytes(&self) -> Option<usize> {
        Some(match self.kind {
            // Integers, variables, tags of declarations.
            1 | 14 | 17 => 4,
            // Pointers, forward declarations, typedefs and qualifiers, functions, floats, tags of types.
            2 | 7..=12 | 16 | 18 => 0,
            // Arrays.
            3 => 12,
            KIND_STRUCT | KIND_UNION => self.count * FIELD_BYTES,
            // Enumerations, parameters.
            6 | 13 => self.count * 8,
            // Sections, enumerations of 64 bits.
            15 | 19 => self.count * 12,
            _ => return None,
        })
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `struct outer { int first; union { int a; struct { int b; int c; }; }; }` and `void f()`.
    fn sample() -> Vec<u8> {
        let names = b"\0outer\0first\0a\0b\0c\0f\0";
        let info = |kind: u32, count: u32| kind << 24 | count;
        let types: [u32; 36] = [
            // 1: int
            0,
            info(1, 0),
            4,
            32,
            // 2: outer; its second field has type 3
            1,
            info(KIND_STRUCT, 2),
            16,
            7,
            1,
            0,
            0,
            3,
            32,
            // 3: union
            0,
            info(KIND_UNION, 2),
            8,
            13,
            1,
            0,
            0,
            4,
            0,
            // 4: struct
            0,
            info(KIND_STRUCT, 2),
            8,
            15,
            1,
            0,
            17,
            1,
            32,
            // 5: f
            19,
            info(KIND_FUNCTION, 0),
            0,
            // 6: a pointer, and the begin of nothing
            0,
            info(2, 0),
        ];
        let mut types: Vec<u8> = types.iter().flat_map(|word| word.to_ne_bytes()).collect();
        types.extend(0_u32.to_ne_bytes());
        let mut bytes = Vec::new();
        bytes.extend(MAGIC.to_ne_bytes());
        bytes.extend([1, 0]);
        for word in [24, 0, types.len(), types.len(), names.len()] {
            bytes.extend((word as u32).to_ne_bytes());
        }
        bytes.extend(types);
        bytes.extend(names);
        bytes
    }

    #[test]
    fn fields_and_functions_are_found() {
        let btf = Btf::parse(sample()).unwrap();
        assert_eq!(btf.field_offset("outer", "first"), Some(0));
        assert_eq!(btf.field_offset("outer", "a"), Some(4));
        assert_eq!(btf.field_offset("outer", "c"), Some(8));
        assert_eq!(btf.field_offset("outer", "d"), None);
        assert_eq!(btf.field_offset("f", "a"), None);
        assert_eq!(btf.function("f"), Some(5));
        assert_eq!(btf.function("outer"), None);
    }

    #[test]
    fn no_bytes_cause_a_panic() {
        let whole = sample();
        for length in 0..whole.len() {
            // Without its end the names are not whole.
            assert!(Btf::parse(whole[..length].to_vec()).is_none());
        }
        for at in 0..whole.len() {
            for value in [0, 1, 0x80, 0xff] {
                let mut changed = whole.clone();
                changed[at] = value;
                if let Some(btf) = Btf::parse(changed) {
                    let _ = (btf.field_offset("outer", "c"), btf.function("f"));
                }
            }
        }
    }
}
