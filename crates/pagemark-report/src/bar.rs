//! Bars of characters.

/// A bar of `cells` characters, of which `share` (0 to 1; values beyond are clamped, NaN is 0) is
/// filled.
pub fn bar(share: f64, cells: usize) -> String {
    let filled = (share.clamp(0.0, 1.0) * cells as f64) as usize;
    (0..cells).map(|cell| if cell < filled { '█' } else { '·' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_filled() {
        assert_eq!(bar(0.5, 4), "██··");
        assert_eq!([bar(-1.0, 2), bar(0.0, 2), bar(f64::NAN, 2)], ["··", "··", "··"]);
        assert_eq!([bar(1.0, 2), bar(f64::INFINITY, 2)], ["██", "██"]);
    }
}
