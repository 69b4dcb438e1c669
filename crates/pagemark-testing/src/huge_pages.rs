//! Huge pages for a test.

use std::fs;

/// Huge pages of hugetlbfs for the tests of a program, until it is dropped.
pub struct HugePages {
    before: String,
}

impl HugePages {
    const SETTING: &str = "/proc/sys/vm/nr_hugepages";

    /// Reserves 16 huge pages. None where that is not permitted, or where memory is too fragmented.
    pub fn reserve() -> Option<HugePages> {
        let before = fs::read_to_string(Self::SETTING).ok()?;
        let wanted = before.trim().parse::<u32>().ok()? + 16;
        fs::write(Self::SETTING, wanted.to_string()).ok()?;
        let pages = HugePages { before };
        let now: u32 = fs::read_to_string(Self::SETTING).ok()?.trim().parse().ok()?;
        (now >= wanted).then_some(pages)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(Self::SETTING, self.before.trim());
    }
}
