//! Paths as text: a path may be any bytes, a manifest is UTF-8.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Encodes a path for a manifest: bytes that are not UTF-8 as `\xNN`, a backslash as `\\`.
pub fn encode_path(path: &Path) -> String {
    let mut text = String::new();
    for chunk in path.as_os_str().as_bytes().utf8_chunks() {
        text.push_str(&chunk.valid().replace('\\', r"\\"));
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
    }
    text
}

/// Decodes a path that [`encode_path`] encoded. None if `text` is not of that form.
pub fn decode_path(text: &str) -> Option<PathBuf> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'\\' {
            decoded.push(byte);
            continue;
        }
        decoded.push(match bytes.next()? {
            b'\\' => b'\\',
            b'x' => {
                let high = char::from(bytes.next()?).to_digit(16)?;
                let low = char::from(bytes.next()?).to_digit(16)?;
                u8::try_from(high * 16 + low).ok()?
            }
            _ => return None,
        });
    }
    Some(PathBuf::from(OsString::from_vec(decoded)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn escapes_only_what_it_must() {
        let path = PathBuf::from(OsString::from_vec(b"/t\xc3\xa9\\mp/\xff a".to_vec()));
        assert_eq!(encode_path(&path), r"/té\\mp/\xff a");
        for bad in [r"/a\", r"/a\n", r"/a\x", r"/a\x1", r"/a\xg0", r"/a\x+1"] {
            assert_eq!(decode_path(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_path_is_read_as_written(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
            let path = PathBuf::from(OsString::from_vec(bytes));
            prop_assert_eq!(decode_path(&encode_path(&path)), Some(path));
        }

        #[test]
        fn any_text_is_read_or_refused(text in ".{0,64}") {
            let _ = decode_path(&text);
            prop_assert_eq!(decode_path(&encode_path(Path::new(&text))), Some(PathBuf::from(text)));
        }
    }
}
