//! `/proc/PID/ksm_stat`: whether the kernel merges equal pages of a process.

use std::io;

/// True if all private memory of the process may be merged (`PR_SET_MEMORY_MERGE`). None where the
/// kernel does not say: before Linux 6.7, or without KSM.
///
/// # Errors
/// `ESRCH`: there is no such process. `EPERM` or `EACCES`: it may not be traced.
pub fn merges_all(pid: i32) -> io::Result<Option<bool>> {
    match super::read(pid, "ksm_stat") {
        Ok(text) => Ok(parse(&text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound && super::exists(pid) => Ok(None),
        Err(error) => Err(error),
    }
}

fn parse(text: &[u8]) -> Option<bool> {
    let text = std::str::from_utf8(text).ok()?;
    match text.lines().find_map(|line| line.strip_prefix("ksm_merge_any:"))?.trim() {
        "yes" => Some(true),
        "no" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_parsed() {
        let stat = "ksm_rmap_items 0\nksm_process_profit 0\nksm_merge_any: yes\nksm_mergeable: no\n";
        assert_eq!(parse(stat.as_bytes()), Some(true));
        assert_eq!(parse(stat.replace("yes", "no").as_bytes()), Some(false));
        for text in ["", "ksm_rmap_items 0\n", "ksm_merge_any: perhaps\n"] {
            assert_eq!(parse(text.as_bytes()), None);
        }
        merges_all(std::process::id() as i32).unwrap();
        merges_all(i32::MAX).unwrap_err();
    }
}
