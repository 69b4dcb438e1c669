//! Files of lines `Name: value`, which many files of `/proc` are.

use std::fs;
use std::io;
use std::path::Path;
use std::str::FromStr;

/// The content of a file of lines `Name: value`, such as `/proc/PID/status`, `/proc/PID/fdinfo/N`
/// or `/proc/meminfo`.
///
/// ```
/// use pagemark_linux::proc::Fields;
///
/// let fields = Fields::parse(b"Name:\tsleep\nVmSwap:\t  12 kB\n".to_vec());
/// assert_eq!(fields.get("Name"), Some("sleep"));
/// assert_eq!(fields.bytes("VmSwap"), Some(12 << 10));
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Fields {
    text: Vec<u8>,
}

impl Fields {
    /// Reads a file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(path: impl AsRef<Path>) -> io::Result<Fields> {
        fs::read(path).map(Fields::parse)
    }

    /// The fields in the content of a file.
    pub fn parse(text: Vec<u8>) -> Fields {
        Fields { text }
    }

    /// The value of the first field of this name, without surrounding white space. None if there is
    /// no such field or its value is not UTF-8.
    pub fn get(&self, name: &str) -> Option<&str> {
        let value = self.text.split(|&byte| byte == b'\n').find_map(|line| {
            let value = line.strip_prefix(name.as_bytes())?;
            value.strip_prefix(b":")
        })?;
        std::str::from_utf8(value).ok().map(str::trim)
    }

    /// The values of all fields of this name that are UTF-8, without surrounding white space.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let values = self.text.split(|&byte| byte == b'\n').filter_map(move |line| {
            let value = line.strip_prefix(name.as_bytes())?.strip_prefix(b":")?;
            std::str::from_utf8(value).ok()
        });
        values.map(str::trim)
    }

    /// The first word of a field, parsed.
    pub fn number<T: FromStr>(&self, name: &str) -> Option<T> {
        self.get(name)?.split_ascii_whitespace().next()?.parse().ok()
    }

    /// The value of a field that the kernel gives in kB (which are 1024 bytes), in bytes.
    pub fn bytes(&self, name: &str) -> Option<u64> {
        self.number::<u64>(name)?.checked_mul(1024)
    }

    /// The value of a field that is written in the given base: 8 for flags of `open`, 16 for sets
    /// of signals.
    pub fn in_base(&self, name: &str, base: u32) -> Option<u64> {
        u64::from_str_radix(self.get(name)?, base).ok()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_have_fields_or_none(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let fields = Fields::parse([&bytes[..], b"\nVm:", &bytes[..]].concat());
            let _ = (fields.get("Vm"), fields.bytes("Vm"), fields.in_base("Vm", 16), fields.get(""));
        }
    }

    #[test]
    fn values_are_found_by_the_whole_name() {
        let fields = Fields::parse(
            b"VmSwapped:\t1 kB\nVmSwap:\t  7 kB\nflags:\t0100002\nbad:\t\xff\nhuge: 18446744073709551615 kB".to_vec(),
        );
        assert_eq!(fields.get("VmSwap"), Some("7 kB"));
        assert_eq!(fields.bytes("VmSwap"), Some(7168));
        assert_eq!(fields.in_base("flags", 8), Some(0o100002));
        assert_eq!(fields.get("Vm"), None);
        assert_eq!(fields.get("bad"), None);
        assert_eq!(fields.bytes("huge"), None);
        assert_eq!(fields.number::<i32>("flags"), Some(100002));
        let fields = Fields::parse(b"lock:\t1: a\npos:\t0\nlock:\t2: b\nlock:\t\xff".to_vec());
        assert_eq!(fields.all("lock").collect::<Vec<_>>(), ["1: a", "2: b"]);
    }
}
