//! The registers of a machine's processors, from the state that QEMU writes.

use crate::error::{Error, ErrorKind, Object, Result};

/// Kind of a section that is written at once.
const SECTION_FULL: u8 = 4;

/// What is behind each section, with its number.
pub(crate) const SECTION_FOOTER: u8 = 0x7e;

/// The name of a processor's section.
const NAME: &[u8] = b"\x03cpu";

/// The version of the section, since 2008.
const VERSION: u32 = 12;

/// The flag of 64-bit mode among [`Registers::hidden_flags`].
const LONG_MODE: u32 = 1 << 14;

/// A segment register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct SegmentRegister {
    pub(crate) selector: u32,
    pub(crate) base: u64,
    pub(crate) limit: u32,
    pub(crate) flags: u32,
}

/// Registers of an x86-64 processor.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Registers {
    /// In the order of their numbers: RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub(crate) general: [u64; 16],
    pub(crate) rip: u64,
    pub(crate) flags: u64,
    /// What QEMU derives from other registers.
    hidden_flags: u32,
    /// ES, CS, SS, DS, FS, GS.
    pub(crate) segments: [SegmentRegister; 6],
    /// LDT, task, GDT, IDT.
    pub(crate) tables: [SegmentRegister; 4],
    /// CR0, CR2, CR3, CR4.
    pub(crate) control: [u64; 4],
    /// The base of GS that `swapgs` exchanges.
    pub(crate) kernel_gs_base: u64,
}

impl Registers {
    /// True if the processor is in 64-bit mode, or in its compatibility mode.
    pub(crate) fn is_long_mode(&self) -> bool {
        self.hidden_flags & LONG_MODE != 0
    }

    /// Reads the content of a section. None if it is too short.
    fn read(content: &[u8]) -> Option<Registers> {
        let mut reader = Reader(content);
        let mut registers = Registers::default();
        for register in &mut registers.general {
            *register = reader.long()?;
        }
        registers.rip = reader.long()?;
        registers.flags = reader.long()?;
        registers.hidden_flags = reader.word()?;
        // The floating-point unit: four words of control, and eight registers of 10 bytes.
        reader.skip(4 * 2 + 8 * 10)?;
        for segment in registers.segments.iter_mut().chain(&mut registers.tables) {
            *segment = reader.segment()?;
        }
        // SYSENTER.
        reader.skip(4 + 2 * 8)?;
        for register in &mut registers.control {
            *register = reader.long()?;
        }
        // The debug registers, A20, MXCSR, 16 registers of 16 bytes, EFER, and four of SYSCALL.
        reader.skip(8 * 8 + 4 + 4 + 16 * 16 + 8 + 4 * 8)?;
        registers.kernel_gs_base = reader.long()?;
        Some(registers)
    }
}

/// Reads numbers, the most significant byte first.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn skip(&mut self, bytes: usize) -> Option<&'a [u8]> {
        let (skipped, rest) = self.0.split_at_checked(bytes)?;
        self.0 = rest;
        Some(skipped)
    }

    fn word(&mut self) -> Option<u32> {
        self.skip(4)?.try_into().ok().map(u32::from_be_bytes)
    }

    fn long(&mut self) -> Option<u64> {
        self.skip(8)?.try_into().ok().map(u64::from_be_bytes)
    }

    fn segment(&mut self) -> Option<SegmentRegister> {
        Some(SegmentRegister { selector: self.word()?, base: self.long()?, limit: self.word()?, flags: self.word()? })
    }
}

/// The registers of each processor of an x86-64 machine, in the order of their numbers, from the
/// state of the devices as QEMU writes it. Sections say nothing of their length, so those of
/// processors are found by their headers. They come before what a guest can fill.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if the state has no processor in the known form.
pub(crate) fn of_processors(devices: &[u8]) -> Result<Vec<Registers>> {
    let mut processors = Vec::new();
    let mut rest = devices;
    while let Some(at) = rest.windows(NAME.len()).position(|window| window == NAME) {
        let (before, behind) = (&rest[..at], &rest[at + NAME.len()..]);
        // A section begins with its kind and its number, behind the footer of another one.
        let is_section = before.len().checked_sub(5).is_some_and(|start| before[start] == SECTION_FULL);
        let mut header = Reader(behind);
        let instance = header.word().and_then(|instance| usize::try_from(instance).ok());
        if is_section
            && instance == Some(processors.len())
            && header.word() == Some(VERSION)
            && let Some(registers) = Registers::read(header.0)
        {
            processors.push(registers);
        }
        rest = behind;
    }
    if processors.is_empty() {
        let reason = "has no state of an x86-64 processor in a form that is known here";
        return Err(Error::about(ErrorKind::Unsupported, Object::Device("cpu".into()), reason));
    }
    Ok(processors)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes of a section's content that is read.
    const READ_BYTES: usize = 864;

    fn section(instance: u32, version: u32, content: &[u8]) -> Vec<u8> {
        let mut bytes = vec![SECTION_FULL];
        bytes.extend((7 + instance).to_be_bytes());
        bytes.extend(NAME);
        bytes.extend(instance.to_be_bytes());
        bytes.extend(version.to_be_bytes());
        bytes.extend(content);
        bytes
    }

    /// Content whose bytes are numbers, each 8 times.
    fn content() -> Vec<u8> {
        (0..READ_BYTES).map(|at| (at / 8) as u8).collect()
    }

    #[test]
    fn registers_are_at_their_places() {
        let devices = [&b"QEVM"[..], &section(0, VERSION, &content()), &section(1, VERSION, &[1; 2000])].concat();
        let processors = of_processors(&devices).unwrap();
        assert_eq!(processors.len(), 2);
        let first = &processors[0];
        let number = |byte: u8| u64::from_be_bytes([byte; 8]);
        assert_eq!((first.general[0], first.general[15]), (0, number(15)));
        assert_eq!((first.rip, first.flags, first.hidden_flags), (number(16), number(17), 0x12121212));
        // Behind 18 longs, a word, and 88 bytes.
        let at = 18 * 8 + 4 + 88;
        let bytes = content();
        assert_eq!(first.segments[0].selector.to_be_bytes(), bytes[at..at + 4]);
        assert_eq!(first.tables[3].flags.to_be_bytes(), bytes[at + 196..at + 200]);
        assert_eq!(first.control[0].to_be_bytes(), bytes[456..464]);
        assert_eq!(first.kernel_gs_base.to_be_bytes(), bytes[856..864]);
        assert_eq!(processors[1].general, [u64::from_be_bytes([1; 8]); 16]);
        assert!(!first.is_long_mode());
        assert!(Registers { hidden_flags: 0x4000, ..Registers::default() }.is_long_mode());
    }

    #[test]
    fn what_is_no_section_of_a_processor_is_left_out() {
        let good = section(0, VERSION, &content());
        let without_kind = [&[9][..], &good[1..]].concat();
        let cut = &good[..good.len() - 1];
        for other in [&without_kind[..], cut, &section(1, VERSION, &content()), &section(0, 11, &content()), b""] {
            assert_eq!(of_processors(other).unwrap_err().kind(), ErrorKind::Unsupported);
        }
        let repeated = [good.clone(), good].concat();
        assert_eq!(of_processors(&repeated).unwrap().len(), 1);
    }

    proptest! {
        #[test]
        fn nothing_panics(bytes in prop::collection::vec(prop_oneof![Just(4u8), Just(3), Just(b'c'), any::<u8>()], 0..2000)) {
            let _ = of_processors(&bytes);
            let _ = of_processors(&section(0, VERSION, &bytes));
        }
    }
}
