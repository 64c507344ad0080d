//! `StepTimeModel`: how long a model would take for a step, so that a replay knows when the next one starts.

use std::time::Duration;

use scheduler::ConfigError;

use crate::replay_target::StepLoad;

/// One second: more than any term of a step's time needs.
const MAX_US: f64 = 1e6;

/// A base and two slopes. The defaults are round numbers that let the recorded traces be served in about the time that
/// they took: an assumption, not a measurement of any model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepTimeModel {
    /// Microseconds that every step takes: reading the weights.
    pub base_us: f64,
    /// Microseconds per token computed.
    pub per_token_us: f64,
    /// Microseconds per token of context that the step's requests attend to.
    pub per_context_token_us: f64,
}

impl Default for StepTimeModel {
    fn default() -> Self {
        Self { base_us: 5000.0, per_token_us: 10.0, per_context_token_us: 0.01 }
    }
}

impl StepTimeModel {
    /// # Errors
    /// The first number that is negative, not finite or above one second; or all of them zero, with which no time
    /// would pass and a trace's arrivals would mean nothing.
    pub fn check(&self) -> Result<(), ConfigError> {
        let parts = [
            ("base_us", self.base_us),
            ("per_token_us", self.per_token_us),
            ("per_context_token_us", self.per_context_token_us),
        ];
        for (name, value) in parts {
            if !(0.0..=MAX_US).contains(&value) {
                let rule = format!("between 0 and {MAX_US} microseconds");
                return Err(ConfigError { name, rule, value: value.to_string() });
            }
        }
        if self.base_us + self.per_token_us == 0.0 {
            let rule = "above 0 when per_token_us is 0: a step must take time".to_owned();
            return Err(ConfigError { name: "base_us", rule, value: self.base_us.to_string() });
        }
        Ok(())
    }

    /// Time of a step of this load.
    #[must_use]
    pub fn duration(&self, load: &StepLoad) -> Duration {
        let us = self.base_us
            + self.per_token_us * f64::from(load.num_tokens)
            + self.per_context_token_us * load.num_context_tokens as f64;
        Duration::from_nanos((us * 1000.0) as u64)
    }
}
