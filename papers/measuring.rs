//! What measurements share: processor time, random numbers, processes of their own, figures.

pub(crate) mod figures;
pub(crate) mod full_logs;
pub(crate) mod random;
pub(crate) mod redis_server;
pub(crate) mod task;
pub(crate) mod usage;
