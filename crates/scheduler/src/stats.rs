//! Counters that any thread may read: written by the scheduler's thread, a few plain stores per step.

use crate::{
    output::FinishReason,
    sync::{AtomicU64, Ordering},
};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Relaxed everywhere: each number is exact by itself, no number orders another.
        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub(crate) $name: AtomicU64,)* }

        /// A copy of all counters.
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        pub struct SchedulerStats { $($(#[$doc])* pub $name: u64,)* }

        impl Counters {
            pub(crate) fn read(&self) -> SchedulerStats {
                SchedulerStats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }

            pub(crate) fn publish(&self, stats: &SchedulerStats) {
                $(self.$name.store(stats.$name, Ordering::Relaxed);)*
            }
        }

        impl SchedulerStats {
            /// Names and values.
            #[must_use]
            pub fn entries(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Steps scheduled.
    num_steps,
    /// Requests in the running list.
    num_running,
    /// Requests in the waiting queue.
    num_waiting,
    /// Requests taken in since the start.
    num_requests,
    /// Requests that left, for whatever reason.
    num_finished,
    /// Requests that were scheduled for the first time.
    num_admitted_requests,
    /// The tokens that these counted for in the queue: their prompts', but for those that fork another.
    num_admitted_tokens,
    /// Tokens of prompts, of requests that got their first token.
    num_prompt_tokens,
    /// Of these, not computed: cached, or shared with the request that was forked.
    num_prompt_tokens_cached,
    /// Tokens sampled.
    num_generation_tokens,
    /// Requests that ended with EOS, a stop token or a stop string.
    num_finished_stop,
    /// Requests that ended because they may have no more tokens.
    num_finished_length,
    /// Requests that were aborted.
    num_finished_abort,
    /// Requests that failed.
    num_finished_error,
    /// Requests that repetition detection ended.
    num_finished_repetition,
    /// Waiting requests whose grammar is not compiled yet.
    num_waiting_for_grammar,
    /// Requests that waited longer than `queue_timeout`.
    num_queue_timeouts,
    /// Preemptions since the start.
    num_preemptions,
    /// Blocks copied for beams that were about to write into one that others hold.
    num_beam_copies,
    /// Victims whose KV moved to CPU memory.
    num_swapped_out,
    /// Requests whose KV came back from there.
    num_swapped_in,
    /// Requests that began with the KV of another.
    num_forks,
    /// Admissions past a request that did not fit.
    num_look_past,
    /// Rows with drafts that were run.
    num_drafts,
    /// Draft tokens that were run.
    num_draft_tokens,
    /// Of these, accepted.
    num_accepted_tokens,
    /// Samples that were not drawn in their step, because what they may be was not known yet.
    num_withheld_samples,
    /// Tokens that a grammar left no choice about, and that no step was spent on.
    num_forced_tokens,
    /// Drafts that were found and not run, because they would not have paid.
    num_withheld_draft_tokens,
    /// How often drafts were switched off for a while, because they cost more than they gave.
    num_draft_pauses,
    /// 1 while they are off.
    is_drafting_paused,
    /// Tokens scheduled since the start.
    num_scheduled_tokens,
    /// Tokens of prompts that were looked up, once per first admission; a request that may not read the cache, or forks
    /// another, looks nothing up.
    prefix_cache_queries,
    /// Of these, tokens found.
    prefix_cache_hits,
    /// Tokens looked up when a preempted request came back.
    preempted_cache_queries,
    /// Of these, tokens found.
    preempted_cache_hits,
    /// Blocks, the null block not counted.
    num_usable_blocks,
    /// Blocks that can be allocated now.
    num_free_blocks,
    /// Blocks in CPU memory that hold nothing.
    num_free_cpu_blocks,
    /// Outputs that found the egress full and wait for room in it.
    num_held_back,
    /// Step that was updated last.
    last_updated_step,
}

impl SchedulerStats {
    /// A request has left, for this reason.
    pub(crate) fn count_end(&mut self, reason: FinishReason) {
        let number = match reason {
            FinishReason::Stop => &mut self.num_finished_stop,
            FinishReason::Length => &mut self.num_finished_length,
            FinishReason::Abort => &mut self.num_finished_abort,
            FinishReason::Error => &mut self.num_finished_error,
            FinishReason::Repetition => &mut self.num_finished_repetition,
        };
        *number += 1;
    }
}
