//! KVM's own counts of a machine: exits, page faults and flushes of the TLB (PML, section 2.4).
//!
//! QEMU hands them out (`query-stats`, since 7.1). KVM does not count full page-modification logs;
//! where tracing is permitted, `perf stat -e kvm:kvm_pml_full -p PID` does.

use pagemark_report::samples::Samples;
use serde_json::{Value, json};

/// What KVM has counted since the machine was made, for all its processors together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct KvmCounts {
    exits: u64,
    page_faults: u64,
    tlb_flushes: u64,
}

/// The names of these counts in QEMU's answer.
const EXITS: &str = "exits";
const PAGE_FAULTS: &str = "pf_taken";
const TLB_FLUSHES: &str = "tlb_flush";

impl KvmCounts {
    /// The arguments of `query-stats`.
    pub(super) fn query() -> Value {
        let names = [EXITS, PAGE_FAULTS, TLB_FLUSHES];
        json!({"target": "vcpu", "providers": [{"provider": "kvm", "names": names}]})
    }

    /// Adds up what the processors have in the answer. None if it has no counts of KVM.
    pub(super) fn parse(answer: &Value) -> Option<KvmCounts> {
        let statistics: Vec<&Value> =
            answer.as_array()?.iter().filter_map(|entry| entry["stats"].as_array()).flatten().collect();
        let sum = |name: &str| {
            let values = statistics.iter().filter(|statistic| statistic["name"] == name);
            values.filter_map(|statistic| statistic["value"].as_u64()).sum()
        };
        let has_exits = statistics.iter().any(|statistic| statistic["name"] == EXITS);
        has_exits.then(|| KvmCounts { exits: sum(EXITS), page_faults: sum(PAGE_FAULTS), tlb_flushes: sum(TLB_FLUSHES) })
    }
}

/// Counts for each pass of the machine's program.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub(super) struct CountsPerPass {
    pub(super) exits: Samples,
    pub(super) page_faults: Samples,
    pub(super) tlb_flushes: Samples,
}

impl CountsPerPass {
    /// Adds the difference of two counts, between which the program made `passes` passes.
    pub(super) fn push(&mut self, first: Option<KvmCounts>, last: Option<KvmCounts>, passes: u64) {
        let (Some(first), Some(last), 1..) = (first, last, passes) else { return };
        let per_pass = |first: u64, last: u64| last.saturating_sub(first) as f64 / passes as f64;
        self.exits.push(per_pass(first.exits, last.exits));
        self.page_faults.push(per_pass(first.page_faults, last.page_faults));
        self.tlb_flushes.push(per_pass(first.tlb_flushes, last.tlb_flushes));
    }

    /// True where KVM counts nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.exits.count() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processors_are_added_up() {
        let processor = |exits: u64| {
            let stats = [(EXITS, exits), (PAGE_FAULTS, 2), (TLB_FLUSHES, 1), ("halt_exits", 7)];
            let stats: Vec<Value> = stats.iter().map(|(name, value)| json!({"name": name, "value": value})).collect();
            json!({"provider": "kvm", "qom-path": "/machine/unattached/device[0]", "stats": stats})
        };
        let counts = KvmCounts::parse(&json!([processor(5), processor(6)])).unwrap();
        assert_eq!(counts, KvmCounts { exits: 11, page_faults: 4, tlb_flushes: 2 });
        for without in [json!([]), json!({}), json!([{"provider": "cryptodev", "stats": []}])] {
            assert_eq!(KvmCounts::parse(&without), None);
        }
        let mut per_pass = CountsPerPass::default();
        per_pass.push(None, Some(counts), 3);
        per_pass.push(Some(counts), Some(counts), 0);
        assert!(per_pass.is_empty());
        per_pass.push(Some(KvmCounts::default()), Some(counts), 2);
        assert_eq!(per_pass.exits.median(), 5.5);
    }
}
