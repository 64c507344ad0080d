//! What this machine can reach at most, for measurements to compare with: no model runs this code.

pub mod peak;
pub mod reading;
