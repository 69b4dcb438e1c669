//! What is checkpointed.
