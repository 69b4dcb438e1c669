//! The tests that plain CRIU passes and Pagemark does not.

use std::collections::BTreeMap;
use std::path::Path;

use super::{Mode, Verdict, Verdicts};
use crate::{Error, Result, exceptions};

const FORM: &str = "TEST MODE,MODE: REASON";

/// Lines `TEST MODE[,MODE…]: REASON`. `uns/*` in place of a test stands for all tests of a flavor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exceptions(BTreeMap<(String, Mode), String>);

impl Exceptions {
    /// Reads the list.
    ///
    /// # Errors
    /// If it cannot be read, or a line is not of the form.
    pub fn read(path: &Path) -> Result<Exceptions> {
        Exceptions::parse(&std::fs::read_to_string(path).map_err(Error::file("read", path))?)
    }

    fn parse(list: &str) -> Result<Exceptions> {
        let mut reasons = BTreeMap::new();
        for line in exceptions::lines(list, FORM) {
            let (trial, reason) = line?;
            let wrong = || exceptions::wrong(&format!("{trial}: {reason}"), FORM);
            let (test, modes) = trial.split_once(' ').ok_or_else(wrong)?;
            for mode in modes.split(',') {
                reasons.insert((test.to_owned(), mode.parse()?), reason.to_owned());
            }
        }
        Ok(Exceptions(reasons))
    }

    /// Why a test does not pass in a mode.
    fn reason(&self, test: &str, mode: Mode) -> Option<&String> {
        let flavor = || Some(format!("{}/*", test.split_once('/')?.0));
        self.0.get(&(test.to_owned(), mode)).or_else(|| self.0.get(&(flavor()?, mode)))
    }

    /// The report about the verdicts, and whether nothing is worse than the list says: what plain
    /// CRIU passes, Pagemark passes or the list has it, and no test that could not be saved was
    /// harmed. Each test that has failed has a verdict for plain CRIU.
    pub fn compare(&self, verdicts: &Verdicts) -> (Vec<String>, bool) {
        let mut report = Vec::new();
        let mut is_good = true;
        for ((test, mode), verdict) in verdicts.iter().filter(|((_, mode), _)| *mode != Mode::Criu) {
            let peer = verdicts.get(&(test.clone(), Mode::Criu)).unwrap_or(&Verdict::Passed);
            let exception = self.reason(test, *mode);
            let line = |word: &str| format!("{word}: {test} {}: {verdict}", mode.name());
            match (verdict, exception) {
                (Verdict::Harmed(_), _) => {
                    report.push(line("a refused save harmed the test"));
                    is_good = false;
                }
                (Verdict::Failed(_) | Verdict::NotStarted(_), None) if *peer == Verdict::Passed => {
                    report.push(line("worse than plain CRIU"));
                    is_good = false;
                }
                (Verdict::Passed, Some(reason)) => report.push(format!("{}, although: {reason}", line("an exception"))),
                _ => {}
            }
        }
        for mode in Mode::ALL {
            let of = |wanted: fn(&Verdict) -> bool| {
                verdicts.iter().filter(|((_, of), verdict)| *of == mode && wanted(verdict)).count()
            };
            let passed = of(|verdict| *verdict == Verdict::Passed);
            let failed = of(|verdict| matches!(verdict, Verdict::Failed(_) | Verdict::Harmed(_)));
            let not_started = of(|verdict| matches!(verdict, Verdict::NotStarted(_)));
            if passed + failed + not_started > 0 {
                report.push(format!("{}: {passed} passed, {failed} failed, {not_started} not started", mode.name()));
            }
        }
        (report, is_good)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(of_pagemark: Verdict, of_criu: Verdict) -> Verdicts {
        let test = "static/aio00".to_owned();
        Verdicts::from([((test.clone(), Mode::Criu), of_criu), ((test, Mode::Lazy), of_pagemark)])
    }

    #[test]
    fn only_what_is_worse_than_criu_and_no_exception_is_bad() {
        let none = Exceptions::parse("# Nothing\n\n").unwrap();
        let listed = Exceptions::parse("static/aio00 attach,lazy: its ring cannot be tracked\n").unwrap();
        let failed = || Verdict::Failed("refused".to_owned());
        let is_good = |exceptions: &Exceptions, verdicts: &Verdicts| exceptions.compare(verdicts).1;
        assert!(is_good(&none, &verdicts(Verdict::Passed, Verdict::Passed)));
        assert!(!is_good(&none, &verdicts(failed(), Verdict::Passed)));
        assert!(!is_good(&none, &verdicts(Verdict::NotStarted(String::new()), Verdict::Passed)));
        assert!(is_good(&none, &verdicts(failed(), failed())));
        assert!(is_good(&listed, &verdicts(failed(), Verdict::Passed)));
        assert!(!is_good(&listed, &verdicts(Verdict::Harmed(String::new()), failed())));
        let (report, is_good) = listed.compare(&verdicts(Verdict::Passed, Verdict::Passed));
        assert!(is_good && report[0].contains("although: its ring"), "{report:?}");
        assert_eq!(report[1..], ["criu: 1 passed, 0 failed, 0 not started", "lazy: 1 passed, 0 failed, 0 not started"]);
    }

    #[test]
    fn an_exception_can_be_for_a_flavor() {
        let listed = Exceptions::parse("uns/* lazy: its network cannot be entered\n").unwrap();
        let verdict = |test: &str, mode| Verdicts::from([((test.to_owned(), mode), Verdict::Failed(String::new()))]);
        assert!(listed.compare(&verdict("uns/static/pipe00", Mode::Lazy)).1);
        assert!(!listed.compare(&verdict("uns/static/pipe00", Mode::Attach)).1);
        assert!(!listed.compare(&verdict("ns/static/pipe00", Mode::Lazy)).1);
    }

    #[test]
    fn a_line_that_is_no_exception_is_an_error() {
        for line in ["static/aio00", "static/aio00 lazy", "static/aio00 never: reason"] {
            assert!(Exceptions::parse(line).is_err(), "{line}");
        }
    }
}
