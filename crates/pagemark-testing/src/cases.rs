//! The number of cases of a property, and of repetitions of a test.

use proptest::test_runner::Config;

/// `cases` cases of a property, times [`factor`]; `$PROPTEST_CASES` replaces the product.
///
/// # Panics
/// Those of [`factor`].
pub fn cases(cases: u32) -> Config {
    let config = Config::default();
    if std::env::var_os("PROPTEST_CASES").is_some() {
        return config;
    }
    Config { cases: cases.saturating_mul(factor()), ..config }
}

/// What the long run of the tests repeats more often: `few` in any other run, `many` in that one,
/// which sets `$PAGEMARK_CASES_FACTOR`.
pub fn repetitions<T>(few: T, many: T) -> T {
    if std::env::var_os("PAGEMARK_CASES_FACTOR").is_some() { many } else { few }
}

/// `$PAGEMARK_CASES_FACTOR`, by which the long run of the tests multiplies their cases; 1 in any
/// other.
///
/// # Panics
/// If `$PAGEMARK_CASES_FACTOR` is no number.
pub fn factor() -> u32 {
    std::env::var("PAGEMARK_CASES_FACTOR")
        .map_or(1, |factor| factor.parse().expect("PAGEMARK_CASES_FACTOR is a number"))
}
