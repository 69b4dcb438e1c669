//! Measurements of Pagemark beside its peers, printed as ratios.
