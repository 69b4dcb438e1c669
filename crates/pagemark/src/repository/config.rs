//! The object `config`, which makes a backend a repository and holds the key of every hash, and its
//! copy.
//!
//! Without the key nothing in the repository can be checked or read, so a writer keeps the copy
//! equal to `config`. A reader that finds `config` missing or damaged reads the copy. The format
//! number of the copy is never lower than that of `config`, so a program that knows only lower
//! formats is refused by either.

use serde::{Deserialize, Serialize};

use super::format::{CONFIG, CONFIG_COPY, DELTAS, Format, PROCESSES_ONLY, hash16};
use super::{Inner, is_newer};
use crate::backend::{Backend, BackendError};
use crate::error::{Error, ErrorKind, Object};
use crate::id::{from_hex, to_hex};

/// The longest `config` that is read.
const MAX_CONFIG_BYTES: u64 = 64 << 10;

/// The values of `config`.
pub(super) struct Config {
    pub(super) format: Format,
    /// The number of the format.
    pub(super) number: u32,
    /// Why the copy was read instead.
    pub(super) damage: Option<String>,
}

/// `config` as JSON.
#[derive(Serialize, Deserialize)]
struct Document {
    format: u32,
    id: String,
    key: String,
    check: String,
}

/// The part of `config` that all formats have.
#[derive(Deserialize)]
struct DocumentFormat {
    format: u64,
}

/// Reads `config`, or its copy where `config` is missing or damaged.
pub(super) fn read(backend: &dyn Backend) -> Result<Config, Error> {
    let failure = match read_object(backend, CONFIG) {
        Ok(Some(config)) => return Ok(config),
        Ok(None) => {
            let path = Object::Path(backend.location().to_owned());
            Error::about(ErrorKind::NotARepository, path, "is no repository: it has no file `config`")
        }
        Err(error) if is_newer(&error) => return Err(error),
        Err(error) => error,
    };
    match read_object(backend, CONFIG_COPY) {
        Ok(Some(copy)) => Ok(Config { damage: Some(damage(&failure)), ..copy }),
        Err(error) if is_newer(&error) => Err(error),
        // The object that is missing or damaged in the first place is reported.
        Ok(None) | Err(_) => Err(failure),
    }
}

/// Why `config` cannot be read, in a sentence about it.
fn damage(failure: &Error) -> String {
    match failure.kind() {
        ErrorKind::NotARepository => "it is missing".into(),
        ErrorKind::DamagedConfig => failure.reason(),
        _ => failure.to_string(),
    }
}

/// Writes `config` and its copy where there are none.
pub(super) fn create(backend: &dyn Backend, format: &Format) -> Result<(), Error> {
    write(backend, CONFIG, format, PROCESSES_ONLY)?;
    write(backend, CONFIG_COPY, format, PROCESSES_ONLY)?;
    Ok(backend.sync("")?)
}

/// Why the copy of `config` cannot replace it; none if it can, or if there is none, as in a
/// repository that an earlier version wrote last.
pub(super) fn damage_of_copy(backend: &dyn Backend, format: &Format) -> Option<String> {
    match read_object(backend, CONFIG_COPY) {
        Ok(Some(copy)) if (copy.format.id, copy.format.key) != (format.id, format.key) => {
            Some("it belongs to another repository".into())
        }
        Ok(_) => None,
        Err(error) => Some(damage(&error)),
    }
}

impl Inner {
    /// Makes sure that programs which know only lower formats refuse the repository: a prune by one
    /// would take needed content for garbage. Only for who has the right to write.
    pub(super) fn require_format(&self, number: u32) -> Result<(), Error> {
        if read(&*self.backend)?.number >= number {
            return Ok(());
        }
        let _lock = self.lock_config()?;
        if read(&*self.backend)?.number < number {
            write(&*self.backend, CONFIG_COPY, &self.format, number)?;
            write(&*self.backend, CONFIG, &self.format, number)?;
            self.backend.sync("")?;
        }
        Ok(())
    }

    /// Writes `config` again from its copy, or the copy from `config`, where one of the two is
    /// missing or damaged. Only for who has the right to write.
    pub(super) fn repair_config(&self) -> Result<(), Error> {
        if self.damaged_config()?.is_none() {
            return Ok(());
        }
        let _lock = self.lock_config()?;
        let Some((name, format, number)) = self.damaged_config()? else { return Ok(()) };
        let backend = &*self.backend;
        // Whatever has the name but is no object makes way.
        if backend.bytes(name)?.is_none() {
            backend.remove(name)?;
        }
        write(backend, name, &format, number)?;
        Ok(backend.sync("")?)
    }
}

impl Inner {
    /// Which of the two objects is to be written again, if one is, and with what.
    fn damaged_config(&self) -> Result<Option<(&'static str, Format, u32)>, Error> {
        let Config { format, number, damage } = read(&*self.backend)?;
        Ok(match (damage, read_object(&*self.backend, CONFIG_COPY)) {
            (Some(_), _) => Some((CONFIG, format, number)),
            // The copy of another repository's `config` may be the only one that is left.
            (None, Ok(Some(copy))) if copy.number >= number || copy.format.id != format.id => None,
            (None, _) => Some((CONFIG_COPY, format, number)),
        })
    }
}

fn check_value(format: &Format, number: u32) -> [u8; 16] {
    hash16(&format.key, &[b"pagemark config", &number.to_le_bytes(), &format.id])
}

fn write(backend: &dyn Backend, name: &str, format: &Format, number: u32) -> Result<(), Error> {
    let (id, key, check) = (to_hex(&format.id), to_hex(&format.key), to_hex(&check_value(format, number)));
    let text = serde_json::to_string_pretty(&Document { format: number, id, key, check })
        .map_err(|error| BackendError::new("encode", name)(error.into()))?;
    let mut object = backend.create(name)?;
    object.append(&[text.as_bytes(), b"\n"])?;
    Ok(object.publish()?)
}

/// Reads `config` or its copy. None if the object does not exist.
fn read_object(backend: &dyn Backend, name: &str) -> Result<Option<Config>, Error> {
    let Some(object) = backend.open(name)? else { return Ok(None) };
    let damaged = |check: String| {
        let file = Object::Path(backend.location().join(name));
        Error::about(ErrorKind::DamagedConfig, file, "is damaged and has no intact copy")
            .caused_by(check)
            .help("put back a backup of it; the content of the repository cannot be checked without it")
    };
    let bytes = object.bytes()?;
    if bytes > MAX_CONFIG_BYTES {
        return Err(damaged(format!("{bytes} bytes are more than it can have")));
    }
    let mut text = vec![0; bytes as usize];
    object.read_at(&mut text, 0)?;
    let DocumentFormat { format: found } = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    if found > u64::from(DELTAS) {
        let operation = format!("{} has the format {found}", backend.location().display());
        return Err(Error::newer_format(found, u64::from(DELTAS)).during(operation));
    }
    let document: Document = serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let format = from_hex(&document.key).zip(from_hex(&document.id)).map(|(key, id)| Format { key, id });
    let number = document.format;
    format
        .filter(|format| from_hex(&document.check) == Some(check_value(format, number)))
        .map(|format| Some(Config { format, number, damage: None }))
        .ok_or_else(|| damaged("its check does not fit".into()))
}
