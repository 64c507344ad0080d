//! `step_cost`: what one step costs the control plane, in Rust alone.

use std::time::Duration;

use scheduler::{ConfigError, SchedulerError};
use thiserror::Error;

use crate::{
    KeepGoing,
    decoding::{Decoding, DecodingOptions},
};

/// Steps measured at most.
const MAX_STEPS: u32 = 1_000_000;

/// Steps between two questions whether to go on.
const STEPS_PER_CHECK: usize = 64;

/// Why nothing was measured.
#[derive(Debug, Error)]
pub enum StepCostError {
    /// A number outside its limits.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The scheduler could not be made.
    #[error(transparent)]
    Scheduler(#[from] SchedulerError),
    /// The caller ended it.
    #[error("interrupted")]
    Interrupted,
}

/// Medians over `num_steps` steps.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct StepCost {
    /// Blocks in the pool.
    pub num_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Of one `schedule`.
    pub schedule: Duration,
    /// Of one `update_from_output`.
    pub update: Duration,
    /// Of both together.
    pub total: Duration,
}

/// Measure `num_steps` steps of the steady state.
///
/// # Errors
/// A number outside its limits; `Interrupted` when `keep_going` says so.
pub fn step_cost(
    options: DecodingOptions,
    num_steps: u32,
    keep_going: &mut KeepGoing<'_>,
) -> Result<StepCost, StepCostError> {
    if !(1..=MAX_STEPS).contains(&num_steps) {
        let rule = format!("between 1 and {MAX_STEPS}");
        return Err(ConfigError { name: "num_steps", rule, value: num_steps.to_string() }.into());
    }
    let mut decoding = Decoding::new(options)?;
    let num_steps = num_steps as usize;
    let [mut schedule, mut update, mut total] = [(); 3].map(|()| Vec::with_capacity(num_steps));
    while total.len() < num_steps {
        if total.len().is_multiple_of(STEPS_PER_CHECK) && !keep_going() {
            return Err(StepCostError::Interrupted);
        }
        let (_, times) = decoding.step();
        schedule.push(times.schedule);
        update.push(times.update);
        total.push(times.schedule + times.update);
    }
    let config = decoding.scheduler.config();
    Ok(StepCost {
        num_blocks: config.num_blocks,
        block_size: config.block_size,
        schedule: median(&mut schedule),
        update: median(&mut update),
        total: median(&mut total),
    })
}

fn median(times: &mut [Duration]) -> Duration {
    let middle = times.len() / 2;
    *times.select_nth_unstable(middle).1
}
