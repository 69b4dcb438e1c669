//! What the monitor passes to itself when the program executes another.

use std::ffi::{CStr, CString};
use std::os::fd::RawFd;

/// The first argument: what follows is [`MonitorDescriptors`], the program's path, and its
/// arguments.
pub const EXECUTE: &CStr = c"--exec";

/// Descriptors that the monitor leaves open for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MonitorDescriptors {
    /// The device of KVM.
    pub device: RawFd,
    /// The monitor's own file.
    pub monitor: RawFd,
    /// The program, which is not looked up again.
    pub program: RawFd,
    /// Its dynamic linker, if it has one.
    pub linker: Option<RawFd>,
}

impl MonitorDescriptors {
    /// As an argument.
    pub fn to_argument(self) -> CString {
        let MonitorDescriptors { device, monitor, program, linker } = self;
        let linker = linker.map_or_else(String::new, |linker| format!(",{linker}"));
        CString::new(format!("{device},{monitor},{program}{linker}")).unwrap_or_default()
    }

    /// What the argument says; `None` if it is not one.
    pub fn of_argument(text: &str) -> Option<MonitorDescriptors> {
        let numbers: Result<Vec<RawFd>, _> = text.split(',').map(str::parse).collect();
        match numbers.ok()?[..] {
            [device, monitor, program] => Some(MonitorDescriptors { device, monitor, program, linker: None }),
            [device, monitor, program, linker] => {
                Some(MonitorDescriptors { device, monitor, program, linker: Some(linker) })
            }
            _ => None,
        }
    }
}

/// Before names of variables that would concern the monitor's own dynamic linker and C library.
const HIDDEN: &[u8] = b"PAGEMARK_KVM_KEEPS_";

/// The variable by which a program in the machine has `LD_PRELOAD`, and the monitor has not.
pub const PRELOAD: &str = "PAGEMARK_KVM_KEEPS_LD_PRELOAD";

/// An entry of the environment as it is passed through the monitor.
pub fn hidden(entry: &CStr) -> CString {
    let bytes = entry.to_bytes();
    let concerns = [&b"LD_"[..], b"GLIBC_TUNABLES=", b"MALLOC_", b"GCONV_PATH=", b"RUST_"];
    if !concerns.iter().any(|start| bytes.starts_with(start)) {
        return entry.to_owned();
    }
    CString::new([HIDDEN, bytes].concat()).unwrap_or_default()
}

/// This environment without what is meant for the program and would disturb the monitor: that is
/// passed through. A variable of which the program has its own, passed through, is the monitor's.
pub fn undisturbed(entries: &[CString]) -> Vec<CString> {
    let passed = passed(entries);
    let is_own = |entry: &CString| passed.iter().any(|passed| name(passed) == name(entry.to_bytes()));
    entries.iter().map(|entry| if is_own(entry) { entry.clone() } else { hidden(entry) }).collect()
}

fn passed(entries: &[CString]) -> Vec<&[u8]> {
    entries.iter().filter_map(|entry| entry.to_bytes().strip_prefix(HIDDEN)).collect()
}

/// The program's environment, made of the monitor's. A variable that is passed through has the
/// place of the monitor's own.
pub fn shown(entries: &[CString]) -> Vec<CString> {
    let passed = passed(entries);
    let shown = entries.iter().filter_map(|entry| match entry.to_bytes().strip_prefix(HIDDEN) {
        Some(bytes) => CString::new(bytes).ok(),
        None => (!passed.iter().any(|passed| name(passed) == name(entry.to_bytes()))).then(|| entry.clone()),
    });
    shown.collect()
}

/// The name of the variable of an entry.
fn name(entry: &[u8]) -> &[u8] {
    entry.split(|&byte| byte == b'=').next().unwrap_or(entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_come_through() {
        for linker in [None, Some(57_353)] {
            let inherited = MonitorDescriptors { device: 57_344, monitor: 57_350, program: 57_352, linker };
            let argument = inherited.to_argument();
            assert_eq!(MonitorDescriptors::of_argument(argument.to_str().expect("digits")), Some(inherited));
        }
        for text in ["", "1", "1,2", "1,2,", ",1,2", "1,2,3,4,5", "a,b,c", "1,2,99999999999"] {
            assert_eq!(MonitorDescriptors::of_argument(text), None, "{text}");
        }
    }

    #[test]
    fn the_environment_comes_through() {
        let entries = [c"A=b", c"LD_PRELOAD=x", c"LD_=", c"PATH=LD_PRELOAD", c"GLIBC_TUNABLES=a=b"].map(CString::from);
        let undisturbing = undisturbed(&entries);
        assert_eq!(undisturbed(&undisturbing), undisturbing);
        assert_eq!(shown(&undisturbing), entries);
        assert_eq!(shown(&entries.each_ref().map(|entry| hidden(entry))), entries);
        assert_eq!(hidden(c"LD_PRELOAD=x").to_str(), Ok(&*format!("{PRELOAD}=x")));
    }

    #[test]
    fn what_is_passed_through_replaces_what_the_monitor_has() {
        let passed = CString::new(format!("{PRELOAD}=of the program")).expect("no zero");
        let monitors = [c"A=b".to_owned(), c"LD_PRELOAD=of the monitor".to_owned(), c"LD_PRELOADED=c".to_owned()];
        let expected = [c"A=b", c"LD_PRELOADED=c", c"LD_PRELOAD=of the program"].map(CString::from);
        assert_eq!(shown(&[&monitors[..], &[passed]].concat()), expected);
        assert_eq!(shown(&monitors), monitors);
        let own = [&monitors[..], &[c"PAGEMARK_KVM_KEEPS_LD_PRELOAD=x".to_owned()]].concat();
        assert_eq!(undisturbed(&own)[1], monitors[1]);
        assert_ne!(undisturbed(&monitors)[1], monitors[1]);
    }
}
