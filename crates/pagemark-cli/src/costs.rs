//! What a mechanism costs on this machine, for predictions.

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
    Ok(Costs::of(mechanism, &measured))
}
