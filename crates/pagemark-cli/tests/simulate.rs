//! `pagemark simulate`: a machine is recorded, and its intervals are simulated.

mod support;

use pagemark_testing::{MachinePaths, QEMU, guest_program, skip};
use support::Pagemark;

#[test]
fn a_recorded_interval_is_simulated_and_its_result_is_kept() {
    let Some(guest) = guest_program() else { skip!("no QEMU, or no compiler for its guest") };
    let (pagemark, paths) = (Pagemark::new(), MachinePaths::default());
    // The firmware has loaded the guest by then.
    let moments = ["--after", "40M", "--every", "1M", "--intervals", "2"];
    let record = [&["simulate", "record", "--job", "vm"], &moments[..], &["--", QEMU, "-nodefaults"]].concat();
    let serial = format!("file:{}", paths.join("serial").display());
    let machine = ["-m", "16", "-kernel", guest.to_str().expect("a path"), "-serial", &serial];
    pagemark.done(&[&record[..], &machine].concat());

    let listed = pagemark.json(&["simulate", "list", "vm", "--json"]);
    let listed = listed.as_array().expect("intervals");
    assert_eq!(listed.len(), 2);
    assert!(listed.iter().all(|interval| interval["instructions"].as_u64() >= Some(1_000_000)), "{listed:?}");
    let results = pagemark.directory().join("results");
    let results_text = results.to_str().expect("a path");
    let simulate = ["simulate", "interval", "vm@1", "--plugin", "mix", "--results", results_text];
    let done = pagemark.json(&[&simulate[..], &["--json"]].concat());
    assert_eq!(done["instructions"], listed[0]["instructions"]);
    let kept = std::fs::read(results.join("mix/1-2.json")).expect("it was kept");
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&kept).expect("JSON"), done);

    for (wrong, named) in [(["vm@3", "mix"], "no interval begins at vm@3"), (["vm@1", "mixed"], "mix, hot, cache")] {
        let output = pagemark.output(&["simulate", "interval", wrong[0], "--plugin", wrong[1]]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(named), "{text}");
    }
    let refused = pagemark.output(&[&record[..], &machine, &["-smp", "2"]].concat());
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && text.contains("2 processors") && text.contains("-smp 1"), "{text}");
    let left = std::fs::read_dir(&results).expect("the results").count();
    assert_eq!(left, 1, "nothing else was kept");
}
