//! A chunk as its difference from another chunk (SPM, "Conclusion": delta encoding).
//!
//! A delta is a sequence of runs. A run has the number of bytes that equal the base, the number of
//! bytes that differ (two bytes each, little endian), and the differing bytes. The bytes behind the
//! last run equal the base.

/// Number of equal bytes that end a run: the size of the header of another run.
const GAP: usize = 4;

/// Appends the difference of `content` from `base` to `delta`. Both have the same length of at most
/// 64 KiB. False if the difference takes more than `most_bytes`, which is less than 64 KiB; `delta`
/// then holds part of it.
pub(super) fn encode(base: &[u8], content: &[u8], delta: &mut Vec<u8>, most_bytes: usize) -> bool {
    debug_assert!(base.len() == content.len() && content.len() <= 1 << 16);
    let start = delta.len();
    let mut done = 0;
    while let Some(from) = next_difference(base, content, done) {
        let mut end = from + 1;
        while let Some(next) = next_difference(base, content, end)
            && next - end <= GAP
        {
            end = next + 1;
            if end - from > most_bytes {
                return false;
            }
        }
        if delta.len() - start + 4 + end - from > most_bytes {
            return false;
        }
        delta.extend(((from - done) as u16).to_le_bytes());
        delta.extend(((end - from) as u16).to_le_bytes());
        delta.extend(&content[from..end]);
        done = end;
    }
    true
}

/// Applies `delta` to `content`, a copy of the base.
pub(super) fn apply(delta: &[u8], content: &mut [u8]) {
    let (mut rest, mut done) = (delta, 0);
    while let [s0, s1, r0, r1, bytes @ ..] = rest {
        let (same, run) = (u16::from_le_bytes([*s0, *s1]) as usize, u16::from_le_bytes([*r0, *r1]) as usize);
        content[done + same..done + same + run].copy_from_slice(&bytes[..run]);
        (rest, done) = (&bytes[run..], done + same + run);
    }
}

/// The first offset from `at` on at which the two differ.
fn next_difference(base: &[u8], content: &[u8], at: usize) -> Option<usize> {
    let (base, content) = (&base[at..], &content[at..]);
    let equal_words =
        base.as_chunks::<8>().0.iter().zip(content.as_chunks::<8>().0).take_while(|(a, b)| a == b).count();
    let behind = equal_words * 8;
    let place = base[behind..].iter().zip(&content[behind..]).position(|(a, b)| a != b)?;
    Some(at + behind + place)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(crate::snapshot::tests::cases(256))]

        #[test]
        fn applied_to_the_base_gives_the_content(
            bytes in 0usize..600, seed in any::<u8>(), changes in prop::collection::vec((0usize..600, any::<u8>()), 0..40),
            most_bytes in 0usize..700,
        ) {
            let base: Vec<u8> = (0..bytes).map(|at| (at as u8).wrapping_mul(31) ^ seed).collect();
            let mut content = base.clone();
            for (at, byte) in changes {
                if let Some(place) = content.get_mut(at) { *place = byte; }
            }
            let mut delta = vec![9];
            if encode(&base, &content, &mut delta, most_bytes) {
                prop_assert!(delta.len() - 1 <= most_bytes);
                let mut decoded = base;
                apply(&delta[1..], &mut decoded);
                prop_assert_eq!(decoded, content);
            } else {
                let mut whole = Vec::new();
                prop_assert!(encode(&base, &content, &mut whole, u16::MAX.into()));
                prop_assert!(whole.len() > most_bytes, "{} fit into {most_bytes}", whole.len());
            }
        }
    }

    #[test]
    fn the_longest_chunk_can_have_its_last_byte_changed() {
        let base = vec![0; 1 << 16];
        let mut content = base.clone();
        content[(1 << 16) - 1] = 1;
        let mut delta = Vec::new();
        assert!(encode(&base, &content, &mut delta, 100));
        assert_eq!(delta.len(), 5);
        let mut decoded = base;
        apply(&delta, &mut decoded);
        assert_eq!(decoded, content);
    }
}
