//! Freeze, collect, save state, copy, thaw.
