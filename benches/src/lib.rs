//! The crate of criterion benches; what they run is in `loadgen`.
