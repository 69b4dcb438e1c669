//! What the fuzz targets in `fuzz/` call: readers that are private otherwise.

use crate::{elf, vdso::Vdso};

/// Reads the headers of a program.
pub fn elf(file: &[u8]) {
    let header = &file[..file.len().min(elf::HEADER_BYTES)];
    let Ok((offset, bytes)) = elf::program_headers(header) else { return };
    let headers = usize::try_from(offset).ok().and_then(|offset| file.get(offset..)?.get(..bytes));
    let Some(Ok(elf)) = headers.map(|headers| elf::parse(header, headers)) else { return };
    let (start, end) = elf.span();
    assert!(start < end && end <= (1 << 47));
    for segment in &elf.segments {
        assert!(segment.address >= start && segment.address + segment.memory_bytes <= end);
        assert!(segment.file_bytes <= segment.memory_bytes);
    }
}

/// Reads a vDSO, and changes its functions.
pub fn vdso(image: &[u8]) {
    if let Some(vdso) = Vdso::of(image.to_vec()) {
        for text in [vdso.text(false), vdso.text(true), vdso.text_leading_to(0x7fff_0000_0000)] {
            assert_eq!(text.len(), image.len());
        }
    }
}
