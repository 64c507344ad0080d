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
    /// The tokens for which these counted in the queue: those of their prompts, except for forks.
    num_admitted_tokens,
    /// Prompt tokens of requests that got their first token.
    num_prompt_tokens,
    /// How many of these were not computed, because they were cached or shared with the request that was forked.
    num_prompt_tokens_cached,
    /// Tokens sampled.
    num_generation_tokens,
    /// Requests that ended with EOS, a stop token or a stop string.
    num_finished_stop,
    /// Requests that ended because they had reached their length limit.
    num_finished_length,
    /// Requests that were aborted.
    num_finished_abort,
    /// Requests that failed.
    num_finished_error,
    /// Requests that ended because they repeated themselves.
    num_finished_repetition,
    /// Waiting requests whose grammar is not compiled yet.
    num_waiting_for_grammar,
    /// Requests that waited longer than `queue_timeout`.
    num_queue_timeouts,
    /// Preemptions since the start.
    num_preemptions,
    /// Blocks that were copied because a beam was about to write to one that others hold.
    num_beam_copies,
    /// Preempted requests whose KV moved to CPU memory.
    num_swapped_out,
    /// Requests whose KV came back from there.
    num_swapped_in,
    /// Requests that started with the KV of another.
    num_forks,
    /// Admissions that overtook a request that did not fit.
    num_look_past,
    /// Rows that ran drafts.
    num_drafts,
    /// Draft tokens that ran.
    num_draft_tokens,
    /// How many of these were accepted.
    num_accepted_tokens,
    /// Samples that were not taken in their step, because it was not known yet which tokens were allowed.
    num_withheld_samples,
    /// Tokens that a grammar left no choice about, and for which no step was spent.
    num_forced_tokens,
    /// Drafts that were found but did not run, because they would not have paid.
    num_withheld_draft_tokens,
    /// How often drafts were switched off for a while because they cost more than they gave.
    num_draft_pauses,
    /// 1 while drafts are switched off.
    is_drafting_paused,
    /// 1 while the scheduler is paused.
    is_paused,
    /// Tokens scheduled since the start.
    num_scheduled_tokens,
    /// Prompt tokens that were looked up, once per first admission. Requests that may not read the cache, and forks,
    /// look nothing up.
    prefix_cache_queries,
    /// How many of these were found.
    prefix_cache_hits,
    /// Tokens looked up when a preempted request came back.
    preempted_cache_queries,
    /// How many of these were found.
    preempted_cache_hits,
    /// Number of blocks, without the null block.
    num_usable_blocks,
    /// Blocks that can be allocated now.
    num_free_blocks,
    /// Free blocks in CPU memory.
    num_free_cpu_blocks,
    /// Outputs that found the egress full and wait for room.
    num_held_back,
    /// The step that was updated last.
    last_updated_step,
}

impl SchedulerStats {
    /// Count the end of a request, by its reason.
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
