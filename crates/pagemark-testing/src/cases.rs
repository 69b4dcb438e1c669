//! The number of cases of a property.

use proptest::test_runner::Config;

/// `cases` cases of a property, times `$PAGEMARK_CASES_FACTOR`; `$PROPTEST_CASES` replaces the
/// product.
///
/// # Panics
/// If `$PAGEMARK_CASES_FACTOR` is no number.
pub fn cases(cases: u32) -> Config {
    let config = Config::default();
    if std::env::var_os("PROPTEST_CASES").is_some() {
        return config;
    }
    let factor = std::env::var("PAGEMARK_CASES_FACTOR")
        .map_or(1, |factor| factor.parse().expect("PAGEMARK_CASES_FACTOR is a number"));
    Config { cases: cases.saturating_mul(factor), ..config }
}
