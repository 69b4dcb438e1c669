//! How often a property is tested.

use proptest::test_runner::Config;

/// So many cases of a property, or as many as `$PROPTEST_CASES` says.
pub fn cases(cases: u32) -> Config {
    let config = Config::default();
    if std::env::var_os("PROPTEST_CASES").is_some() { config } else { Config { cases, ..config } }
}
