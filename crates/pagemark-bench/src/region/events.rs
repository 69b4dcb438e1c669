//! What happens for a transaction in the machine of `pagemark-kvm`: exits and faults, as the
//! monitor and KVM count them.

use std::path::Path;

use pagemark::sys::own_machine::Counts;
use pagemark_report::samples::Samples;

/// Whether KVM uses the processor's log of written pages.
const HAS_LOG: &str = "/sys/module/kvm_intel/parameters/pml";
/// Where the kernel's tracing can be, and the event of a full log in it.
const TRACING: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
const FULL_LOG: &str = "events/kvm/kvm_pml_full";

/// Events for each transaction.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub(super) struct Events {
    /// System calls.
    pub(super) calls: Samples,
    /// Exceptions that the monitor resolved: page faults of the program, stores that it executes.
    pub(super) exceptions: Samples,
    /// Exits to KVM, which include those to the monitor.
    pub(super) exits: Samples,
    /// Page faults that KVM resolved.
    pub(super) faults: Samples,
    /// Flushes of translations that KVM made.
    pub(super) flushes: Samples,
}

impl Events {
    /// Adds the difference of two counts, between which there were `transactions`.
    pub(super) fn push(&mut self, first: Option<Counts>, last: Option<Counts>, transactions: u32) {
        let (Some(first), Some(last), 1..) = (first, last, transactions) else { return };
        let of_each = |first: u64, last: u64| last.saturating_sub(first) as f64 / f64::from(transactions);
        self.calls.push(of_each(first.calls, last.calls));
        self.exceptions.push(of_each(first.exceptions, last.exceptions));
        if let (Some(first), Some(last)) = (first.of_kvm, last.of_kvm) {
            self.exits.push(of_each(first.exits, last.exits));
            self.faults.push(of_each(first.faults, last.faults));
            self.flushes.push(of_each(first.flushes, last.flushes));
        }
    }

    /// True outside of the machine.
    pub(super) fn is_empty(&self) -> bool {
        self.calls.count() == 0
    }

    /// The columns of a table, and what they have in a row.
    pub(super) fn columns() -> [&'static str; 5] {
        [">calls", ">exceptions", ">exits", ">faults in KVM", ">flushes"]
    }

    /// The cells below [`Events::columns`].
    pub(super) fn cells(&self) -> Vec<String> {
        let of = |samples: &Samples| match samples.count() {
            0 => "?".to_owned(),
            _ => format!("{:.1}", samples.median()),
        };
        [&self.calls, &self.exceptions, &self.exits, &self.faults, &self.flushes].map(of).to_vec()
    }
}

/// What can be said of full logs of the processor's, which KVM's statistics do not have.
pub(super) fn full_logs() -> String {
    if !std::fs::read_to_string(HAS_LOG).is_ok_and(|text| text.starts_with('Y')) {
        return "full logs of written pages (kvm_pml_full): none, as KVM uses no such log of the processor's here"
            .to_owned();
    }
    if TRACING.iter().any(|tracing| Path::new(tracing).join(FULL_LOG).is_dir()) {
        let count = "perf stat -e kvm:kvm_pml_full -p PID";
        return format!("full logs of written pages: `{count}` counts them; KVM's statistics do not have them");
    }
    "full logs of written pages (kvm_pml_full): not known, as tracing is not permitted here".to_owned()
}

#[cfg(test)]
mod tests {
    use pagemark::sys::own_machine::CountsOfKvm;

    use super::*;

    #[test]
    fn events_are_for_each_transaction() {
        let counts = |calls, of_kvm| Some(Counts { calls, exceptions: 3 * calls, of_kvm });
        let of_kvm = |exits| Some(CountsOfKvm { exits, faults: 2 * exits, flushes: 0 });
        let mut events = Events::default();
        events.push(None, counts(1, None), 3);
        events.push(counts(1, None), counts(5, None), 0);
        assert!(events.is_empty());
        events.push(counts(1, None), counts(5, None), 2);
        assert_eq!(events.cells(), ["2.0", "6.0", "?", "?", "?"]);
        events.push(counts(1, of_kvm(10)), counts(5, of_kvm(20)), 2);
        assert_eq!(events.cells(), ["2.0", "6.0", "5.0", "10.0", "0.0"]);
        assert_eq!(events.cells().len(), Events::columns().len());
    }
}
