//! What happens for a transaction in the machine of `pagemark-kvm`: exits and faults, as the
//! monitor and KVM count them.

use pagemark_kvm_protocol::machine_calls::Counts;
use pagemark_report::samples::Samples;

use crate::measuring::full_logs::FullLogs;

/// Whether KVM uses the processor's log of written pages.
const HAS_LOG: &str = "/sys/module/kvm_intel/parameters/pml";

/// What the monitor and KVM have counted, and how often the processor's log was full.
type Seen = (Option<Counts>, Option<u64>);

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
    /// How often the processor's log of written pages was full (PML).
    pub(super) full_logs: Samples,
}

impl Events {
    /// Adds the difference of two counts, between which there were `transactions`.
    pub(super) fn push(&mut self, (first, first_full): Seen, (last, last_full): Seen, transactions: u32) {
        let (Some(first), Some(last), 1..) = (first, last, transactions) else { return };
        let of_each = |first: u64, last: u64| last.saturating_sub(first) as f64 / f64::from(transactions);
        self.calls.push(of_each(first.calls, last.calls));
        self.exceptions.push(of_each(first.exceptions, last.exceptions));
        if let (Some(first), Some(last)) = (first.of_kvm, last.of_kvm) {
            self.exits.push(of_each(first.exits, last.exits));
            self.faults.push(of_each(first.faults, last.faults));
            self.flushes.push(of_each(first.flushes, last.flushes));
        }
        if let (Some(first), Some(last)) = (first_full, last_full) {
            self.full_logs.push(of_each(first, last));
        }
    }

    /// True outside of the machine.
    pub(super) fn is_empty(&self) -> bool {
        self.calls.count() == 0
    }

    /// The columns of a table, and what they have in a row.
    pub(super) fn columns() -> [&'static str; 6] {
        [">calls", ">exceptions", ">exits", ">faults in KVM", ">flushes", ">full logs"]
    }

    /// The cells below [`Events::columns`].
    pub(super) fn cells(&self) -> Vec<String> {
        let of = |samples: &Samples| match samples.count() {
            0 => "?".to_owned(),
            _ => format!("{:.2}", samples.median()),
        };
        [&self.calls, &self.exceptions, &self.exits, &self.faults, &self.flushes, &self.full_logs].map(of).to_vec()
    }
}

/// Why there are no counts of full logs, if so: lines below the table.
pub(super) fn on_full_logs() -> String {
    if !std::fs::read_to_string(HAS_LOG).is_ok_and(|text| text.starts_with('Y')) {
        return "full logs: none, as KVM uses no log of the processor's (PML) here\n".to_owned();
    }
    let reason = FullLogs::of(std::process::id() as i32).err();
    reason.map(|reason| format!("full logs: not counted: {reason}\n")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use pagemark_kvm_protocol::machine_calls::CountsOfKvm;

    use super::*;

    #[test]
    fn events_are_for_each_transaction() {
        let counts = |calls, of_kvm| Some(Counts { calls, exceptions: 3 * calls, of_kvm });
        let of_kvm = |exits| Some(CountsOfKvm { exits, faults: 2 * exits, flushes: 0 });
        let mut events = Events::default();
        events.push((None, None), (counts(1, None), None), 3);
        events.push((counts(1, None), None), (counts(5, None), None), 0);
        assert!(events.is_empty());
        events.push((counts(1, None), None), (counts(5, None), Some(1)), 2);
        assert_eq!(events.cells(), ["2.00", "6.00", "?", "?", "?", "?"]);
        events.push((counts(1, of_kvm(10)), Some(1)), (counts(5, of_kvm(20)), Some(2)), 2);
        assert_eq!(events.cells(), ["2.00", "6.00", "5.00", "10.00", "0.00", "0.50"]);
        assert_eq!(events.cells().len(), Events::columns().len());
    }
}
