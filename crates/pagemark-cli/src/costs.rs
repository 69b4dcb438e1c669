//! What a mechanism costs on this machine, for predictions.

use std::time::Duration;

use pagemark::Mechanism;
use pagemark::model::Costs;
use pagemark::track::{self, Scope};

use crate::failure::Failure;

/// What a mechanism costs in a scope.
///
/// # Errors
/// It does not work here.
pub fn costs(mechanism: Mechanism, scope: Scope) -> Result<Costs, Failure> {
    let measured = match scope {
        Scope::Machine => pagemark_vm::cost(mechanism),
        _ => track::cost(mechanism, scope),
    };
    let measured = measured.map_err(|error| Failure::of(format!("cannot measure what {mechanism} costs"), error))?;
    let nanos = |ns: f64| Duration::from_nanos(ns as u64);
    let hot_after = mechanism.entry().process.and_then(|process| process.hot_after).map(|count| count as u32);
    let (first_write, collect) = (nanos(measured.first_write_ns), nanos(measured.collect_ns));
    Ok(Costs { first_write, collect, copy: collect, hot_after, ..Costs::default() })
}
