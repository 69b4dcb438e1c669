//! What QEMU itself cannot save of a machine, and disks that a checkpoint cannot read, asked before
//! anything is changed.
//!
//! QEMU dies if it is told to save a device that it cannot save.

use serde_json::{Value, json};

use crate::error::{Error, ErrorKind, Object, Result, printable};
use crate::qemu::command::{Command, text};
use crate::qemu::drive::Drive;
use crate::qemu::qmp::Monitor;

/// The first version of QEMU that says what it cannot save.
const SAYS_REASONS: u64 = 6;

/// Devices that earlier versions cannot save, by their types.
const UNSAVED_DEVICES: [&str; 8] =
    ["nvme", "amd-iommu", "usb-uas", "usb-mtp", "usb-host", "ccid-card-emulated", "vfio-pci", "vhost-scsi-pci"];

/// Devices that QEMU dies of when it saves or loads them (7.2), and does not say so.
const FAULTY_DEVICES: [&str; 3] = ["pci-serial-2x", "vmbus-bridge", "isa-cirrus-vga"];

/// How QEMU refuses a format of images, whose tables the next host would have another copy of. A
/// restore opens the image anew. One that the machine can write to is refused by its format.
const FORMAT_REASON: &str = " does not support live migration";

/// Properties by which a device has threads of its own for disks.
const THREADS: [&str; 2] = ["iothread", "iothread-vq-mapping"];

/// How far a disk can be from the device that has the threads.
const MAX_BUSES: usize = 8;

/// Checks that QEMU can save all devices. `migration` is its reply to [`list_reasons`].
///
/// # Errors
/// [`ErrorKind::Unsupported`] with QEMU's own reasons.
pub(crate) fn check_saved(migration: &Value, pid: i32) -> Result<()> {
    match &reasons(migration)[..] {
        [] => Ok(()),
        reasons => Err(refused(pid, format!("cannot save its machine: {}", printable(&reasons.join("; "))))),
    }
}

/// Like [`check_saved`], by the table of devices, of a QEMU whose major version is `version`.
///
/// # Errors
/// [`ErrorKind::Unsupported`]
pub(crate) fn check_types(devices: &str, version: u64, pid: i32) -> Result<()> {
    let is_present = |name: &&&str| devices.lines().any(|line| line.trim_start().starts_with(&format!("dev: {name},")));
    let unsaved = UNSAVED_DEVICES.iter().filter(|_| version < SAYS_REASONS);
    match FAULTY_DEVICES.iter().chain(unsaved).find(is_present) {
        Some(name) => Err(refused(pid, format!("cannot save a {name} device"))),
        None => Ok(()),
    }
}

/// Checks that the machine has no TPM, whose state another program has.
///
/// # Errors
/// [`ErrorKind::Unsupported`] names it.
pub(crate) fn check_no_tpm(answer: Result<Value>) -> Result<()> {
    match answer {
        Ok(list) => tpm_of(&list).map_or(Ok(()), Err),
        // A QEMU that was built without.
        Err(error) if error.kind() == ErrorKind::Command => Ok(()),
        Err(error) => Err(error),
    }
}

/// The command by which QEMU lists its TPMs.
pub(crate) fn list_tpms() -> Command {
    Command::new("query-tpm", json!({}))
}

fn tpm_of(list: &Value) -> Option<Error> {
    let tpm = list.as_array()?.first()?;
    let reason = format!("is a TPM ({}), whose state is not in QEMU", printable(&text(tpm, "model")));
    let error = Error::about(ErrorKind::Unsupported, Object::Device(text(tpm, "id")), reason);
    Some(error.help("start QEMU without -tpmdev and its device"))
}

/// The command by which QEMU says what it cannot save, and how far a migration is.
pub(crate) fn list_reasons() -> Command {
    Command::new("query-migrate", json!({}))
}

fn refused(pid: i32, reason: String) -> Error {
    let error = Error::about(ErrorKind::Unsupported, Object::Process(pid), reason);
    error.help("start it without what it names; what the guest has mounted from the host can be unmounted there")
}

/// Why QEMU cannot save its machine.
fn reasons(migration: &Value) -> Vec<&str> {
    let listed = migration.get("blocked-reasons").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let is_of_format = |reason: &&str| reason.contains("format used by node") && reason.ends_with(FORMAT_REASON);
    listed
        .iter()
        .map(|reason| reason.as_str().unwrap_or("it does not say why"))
        .filter(|reason| !is_of_format(reason))
        .collect()
}

/// True if devices can have threads of their own.
pub(crate) fn has_threads(monitor: &mut Monitor) -> Result<bool> {
    let threads = monitor.execute("query-iothreads", json!({}))?;
    Ok(threads.as_array().is_none_or(|threads| !threads.is_empty()))
}

/// Checks that QEMU's main thread works on a disk. If another one does, QEMU 7.2 dies when it
/// serves the disk, and QEMU 10.0 hangs.
///
/// # Errors
/// [`ErrorKind::Unsupported`] names the disk and the thread.
pub(crate) fn check_thread(monitor: &mut Monitor, drive: &Drive) -> Result<()> {
    let mut device = drive.device.clone();
    for _ in 0..MAX_BUSES {
        for property in THREADS {
            if let Some(thread) = get(monitor, &device, property)?.as_ref().and_then(thread_of) {
                return Err(on_thread(&drive.label, &device, property, &thread));
            }
        }
        // A bus is a child of the device that has it.
        let bus = get(monitor, &device, "parent_bus")?;
        match bus.as_ref().and_then(Value::as_str).and_then(|bus| bus.rsplit_once('/')) {
            Some((parent, _)) if !parent.is_empty() => device = parent.to_owned(),
            _ => break,
        }
    }
    Ok(())
}

fn on_thread(label: &str, device: &str, property: &str, thread: &str) -> Error {
    let reason = format!("belongs to the iothread {}: checkpoints hold disks of QEMU's main thread", printable(thread));
    let error = Error::about(ErrorKind::Unsupported, Object::Disk(label.to_owned()), reason);
    let name = device.trim_end_matches("/virtio-backend").rsplit('/').next().unwrap_or_default();
    let of = if name.starts_with("device[") { String::new() } else { format!(" of the device {}", printable(name)) };
    error.help(format!("start QEMU without `{property}`{of}"))
}

/// A property of an object. None if it has no such.
fn get(monitor: &mut Monitor, object: &str, property: &str) -> Result<Option<Value>> {
    match monitor.execute("qom-get", json!({"path": object, "property": property})) {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == ErrorKind::Command => Ok(None),
        Err(error) => Err(error),
    }
}

/// The name of a thread in the value of a property: a link, or a list of threads for queues.
fn thread_of(value: &Value) -> Option<String> {
    let name = match value {
        Value::Array(threads) => threads.iter().map(|thread| text(thread, "iothread")).collect::<Vec<_>>().join(", "),
        link => link.as_str()?.rsplit('/').next()?.to_owned(),
    };
    Some(name).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_qemu_cannot_save_is_refused_in_its_own_words() {
        let check = |reasons: &[&str]| check_saved(&json!({ "blocked-reasons": reasons }), 7);
        let error = check(&["non-migratable device: 0000:00:02.0/nvme"]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("non-migratable device: 0000:00:02.0/nvme"), "{error}");
        let error = check(&["path '\u{1b}[2J' is mounted", "another"]).unwrap_err();
        assert!(error.to_string().contains(r"\u{1b}[2J' is mounted; another") && !error.to_string().contains('\u{1b}'));
        // An image that is opened anew.
        let format = "The vdi format used by node '#block1' does not support live migration";
        check(&[format]).unwrap();
        assert!(check(&[format, "9p"]).unwrap_err().to_string().contains("machine: 9p"));
        for odd in [json!({"blocked-reasons": 7}), json!(null)] {
            check_saved(&odd, 7).unwrap();
        }
        assert!(check_saved(&json!({"blocked-reasons": [7]}), 7).is_err());
    }

    #[test]
    fn a_tpm_is_refused_by_its_name() {
        let tpm = json!([{"id": "t", "model": "tpm-tis", "options": {"type": "emulator"}}]);
        let error = tpm_of(&tpm).unwrap().to_string();
        assert!(error.contains("the device t is a TPM (tpm-tis)"), "{error}");
        assert!(tpm_of(&json!([])).is_none() && tpm_of(&json!(null)).is_none());
    }

    #[test]
    fn versions_that_do_not_say_it_are_refused_by_types() {
        let devices = "  bus: pci.0\n    type PCI\n      dev: nvme, id \"n0\"\n";
        assert!(check_types(devices, 5, 7).unwrap_err().to_string().contains("nvme"));
        check_types(devices, 7, 7).unwrap();
        assert!(check_types("dev: vmbus-bridge, id \"\"\n", 10, 7).is_err());
        check_types("dev: nvme-ns, id \"nvme\"\n", 5, 7).unwrap();
    }

    #[test]
    fn threads_are_named_by_links_and_by_lists() {
        let named = |value: Value| thread_of(&value);
        assert_eq!(named(json!("/objects/io1")).as_deref(), Some("io1"));
        assert_eq!(named(json!([{"iothread": "a", "vqs": [0]}, {"iothread": "b"}])).as_deref(), Some("a, b"));
        for none in [json!(""), json!([]), json!(null), json!({}), json!([7])] {
            assert_eq!(named(none), None);
        }
    }
}
