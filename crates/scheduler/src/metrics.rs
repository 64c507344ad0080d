//! `Metrics`: what the scheduler's thread measures of requests and steps, for any thread to read (`docs/metrics.md`).
//!
//! The scheduler sees each request arrive, start, get its tokens and leave. So it is counted here, once, however many
//! front ends there are. This takes no lock and no allocation, and one comparison for the token of a decode: the tokens
//! of all requests that were also in the previous step are one observation.

pub(crate) mod histogram;
pub(crate) mod stats;

use std::{
    borrow::Cow,
    // std's atomics also under loom: the numbers order nothing.
    sync::atomic::{AtomicU64, Ordering},
};

use crate::{
    config::{MAX_SPECULATIVE_TOKENS, SchedulerConfig},
    metrics::{
        histogram::{Histogram, HistogramSnapshot, Unit},
        stats::SchedulerStats,
    },
    output::{EngineCoreOutput, FinishReason},
    request::{Request, limits::AddRequestError},
};

/// Bounds for whole requests and their parts: vLLM's from 0.3 on, with finer ones for fast models below.
const LATENCY: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0,
    20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
];
/// vLLM's from 0.001 on.
const FIRST_TOKEN: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0,
    2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];
/// vLLM's from 0.01 on.
const BETWEEN_TOKENS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0015, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2,
    0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
const STEP_TOKENS: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
const SAMPLES: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];
/// Every possible number of accepted drafts except the last.
const ACCEPTED_DRAFTS: &[f64] = &{
    let mut bounds = [0.0; MAX_SPECULATIVE_TOKENS as usize];
    let mut number = 0;
    while number < bounds.len() {
        bounds[number] = number as f64;
        number += 1;
    }
    bounds
};
/// Including 0, for all requests that were never preempted.
const PREEMPTIONS: &[f64] = &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0];
const STEP: &[f64] = &[
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1.0, 2.0, 5.0, 10.0, 30.0,
];

/// The parts of a step, in order: planning; copying its arrays to the device; the forward pass; sampling; waiting for
/// the sampled ids; applying them; passing them to the output side.
pub const STEP_PHASES: [&str; NUM_STEP_PHASES] =
    ["schedule", "prepare", "forward", "sample", "wait", "update", "output"];
pub(crate) const NUM_STEP_PHASES: usize = 7;

/// 1, 2, 5, 10, … up to `largest`.
fn one_two_five(largest: u32) -> Vec<f64> {
    let series = (0..10).flat_map(|power| [1, 2, 5].map(|digit| digit * 10u64.pow(power)));
    series.take_while(|&bound| bound <= u64::from(largest)).map(|bound| bound as f64).collect()
}

macro_rules! histograms {
    ($($(#[$doc:meta])* $name:ident: $unit:ident, $bounds:expr;)*) => {
        /// Written only by the scheduler's thread.
        #[derive(Debug)]
        pub(crate) struct Histograms { $($(#[$doc])* pub(crate) $name: Histogram,)* }

        impl Histograms {
            fn new(config: &SchedulerConfig) -> Self {
                let tokens = &*one_two_five(config.max_model_len);
                Self { $($name: Histogram::new(Unit::$unit, ($bounds)(tokens)),)* }
            }

            fn snapshot(&self) -> Vec<(Cow<'static, str>, HistogramSnapshot)> {
                vec![$((Cow::Borrowed(stringify!($name)), self.$name.snapshot()),)*]
            }
        }
    };
}

histograms! {
    /// From arrival to the first token.
    time_to_first_token: Time, |_| FIRST_TOKEN;
    /// From one token to the next.
    inter_token_latency: Time, |_| BETWEEN_TOKENS;
    /// The mean of that over a request with at least two tokens.
    request_time_per_output_token: Time, |_| BETWEEN_TOKENS;
    /// From arrival to the end.
    e2e_request_latency: Time, |_| LATENCY;
    /// From its submission to its first step.
    request_queue_time: Time, |_| LATENCY;
    /// From its first step to its last token.
    request_inference_time: Time, |_| LATENCY;
    /// From its first step to its first token.
    request_prefill_time: Time, |_| LATENCY;
    /// From its first token to its last.
    request_decode_time: Time, |_| LATENCY;
    /// Tokens of its prompt.
    request_prompt_tokens: Count, |tokens| tokens;
    /// Tokens that were sampled for it.
    request_generation_tokens: Count, |tokens| tokens;
    /// The most tokens that were sampled for one of its samples.
    request_max_num_generation_tokens: Count, |tokens| tokens;
    /// Tokens of its prompt that were computed: neither cached nor shared with another request.
    request_prefill_kv_computed_tokens: Count, |tokens| tokens;
    /// Drafts of one request that were accepted in one step with drafts.
    accepted_drafts: Count, |_| ACCEPTED_DRAFTS;
    /// Samples.
    request_params_n: Count, |_| SAMPLES;
    /// The most tokens that it may have.
    request_params_max_tokens: Count, |tokens| tokens;
    /// How often it was preempted.
    request_num_preemptions: Count, |_| PREEMPTIONS;
    /// Tokens of one step: of the prompts that it completed, and those that it sampled.
    iteration_tokens: Count, |_| STEP_TOKENS;
    /// A step, from before its planning until its tokens were passed on.
    step_time: Time, |_| STEP;
    /// Planning a step.
    step_schedule_time: Time, |_| STEP;
    /// Copying its arrays to the device.
    step_prepare_time: Time, |_| STEP;
    /// The forward pass.
    step_forward_time: Time, |_| STEP;
    /// Sampling.
    step_sample_time: Time, |_| STEP;
    /// Waiting for the sampled ids.
    step_wait_time: Time, |_| STEP;
    /// Appending the tokens, applying the stop rules, freeing.
    step_update_time: Time, |_| STEP;
    /// Passing the tokens to the output side.
    step_output_time: Time, |_| STEP;
}

/// The state that the owner and all handles share.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// `None`: nothing is measured, only counted.
    histograms: Option<Histograms>,
    // Requests that were refused; written by the threads that submit them.
    rejected_for_requests: AtomicU64,
    rejected_for_tokens: AtomicU64,
    // Requests with stop strings whose end was open, by what their front ends reported afterwards.
    settled_as_stop: AtomicU64,
    settled_as_length: AtomicU64,
    settled_as_repetition: AtomicU64,
}

/// All metrics, at about one moment.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct MetricsSnapshot {
    /// Names and values: the scheduler's counters, and those that only metrics need.
    pub counters: Vec<(Cow<'static, str>, u64)>,
    /// Names and histograms; empty if nothing is measured.
    pub histograms: Vec<(Cow<'static, str>, HistogramSnapshot)>,
}

impl Metrics {
    pub(crate) fn new(config: &SchedulerConfig) -> Self {
        Self {
            histograms: config.collect_metrics.then(|| Histograms::new(config)),
            rejected_for_requests: AtomicU64::new(0),
            rejected_for_tokens: AtomicU64::new(0),
            settled_as_stop: AtomicU64::new(0),
            settled_as_length: AtomicU64::new(0),
            settled_as_repetition: AtomicU64::new(0),
        }
    }

    /// Count the end of a request with stop strings that was open: at one of them, or for the engine's own reason.
    pub(crate) fn settle_end(&self, reason: FinishReason) {
        let number = match reason {
            FinishReason::Length => &self.settled_as_length,
            FinishReason::Repetition => &self.settled_as_repetition,
            FinishReason::Stop | FinishReason::Abort | FinishReason::Error => &self.settled_as_stop,
        };
        // Relaxed: nothing is ordered by it.
        number.fetch_add(1, Ordering::Relaxed);
    }

    /// Add these ends to the counters of the scheduler's thread.
    pub(crate) fn add_settled(&self, stats: &mut SchedulerStats) {
        stats.num_finished_stop += self.settled_as_stop.load(Ordering::Relaxed);
        stats.num_finished_length += self.settled_as_length.load(Ordering::Relaxed);
        stats.num_finished_repetition += self.settled_as_repetition.load(Ordering::Relaxed);
    }

    /// Count a request, with its samples, that was refused.
    pub(crate) fn count_rejection(&self, error: &AddRequestError) {
        let number = match error {
            AddRequestError::QueueFull { .. } => &self.rejected_for_requests,
            AddRequestError::QueueTokensFull { .. } => &self.rejected_for_tokens,
            _ => return,
        };
        // Relaxed: nothing is ordered by it.
        number.fetch_add(1, Ordering::Relaxed);
    }

    /// Count the accepted drafts of a row.
    pub(crate) fn observe_accepted(&self, num_accepted: u32) {
        if let Some(histograms) = &self.histograms {
            histograms.accepted_drafts.observe(num_accepted.into());
        }
    }

    /// Record how long the parts of a step took: see `Scheduler::record_step_phases`.
    pub(crate) fn observe_step_phases(&self, times_ns: &[u64; NUM_STEP_PHASES + 1]) {
        let Some(histograms) = &self.histograms else { return };
        let parts = [
            &histograms.step_schedule_time,
            &histograms.step_prepare_time,
            &histograms.step_forward_time,
            &histograms.step_sample_time,
            &histograms.step_wait_time,
            &histograms.step_update_time,
            &histograms.step_output_time,
        ];
        for (histogram, times) in parts.into_iter().zip(times_ns.windows(2)) {
            histogram.observe(times[1].saturating_sub(times[0]));
        }
        histograms.step_time.observe(times_ns[NUM_STEP_PHASES].saturating_sub(times_ns[0]));
    }

    pub(crate) fn snapshot(&self, stats: &SchedulerStats) -> MetricsSnapshot {
        let mut counters: Vec<_> =
            stats.entries().into_iter().map(|(name, value)| (Cow::Borrowed(name), value)).collect();
        for (name, number) in [
            ("num_rejected_max_num_queued_reqs", &self.rejected_for_requests),
            ("num_rejected_max_num_queued_tokens", &self.rejected_for_tokens),
        ] {
            counters.push((Cow::Borrowed(name), number.load(Ordering::Relaxed)));
        }
        let histograms = self.histograms.as_ref().map(Histograms::snapshot);
        MetricsSnapshot { counters, histograms: histograms.unwrap_or_default() }
    }
}

/// What the owner remembers between steps.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    /// By slot: when the request got its last token; 0: it has none. Empty if nothing is measured.
    last_token_ns: Vec<u64>,
    /// When tokens were last applied.
    previous_ns: u64,
    /// Of the step that is being applied: the tokens of prompts that it completed, and its sampled tokens.
    num_step_tokens: u64,
}

impl Meter {
    /// Reset a slot for a new request.
    pub(crate) fn arrive(&mut self, slot: u32) {
        if self.last_token_ns.len() <= slot as usize {
            self.last_token_ns.resize(slot as usize + 1, 0);
        }
        self.last_token_ns[slot as usize] = 0;
    }

    /// Count a record of a request, with or without a token. `completes_prompt`: this is its first record, and the
    /// prompt is computed.
    pub(crate) fn count(
        &mut self,
        metrics: &Metrics,
        slot: u32,
        request: &Request,
        record: &EngineCoreOutput,
        completes_prompt: bool,
    ) {
        let (has_token, now) = (record.new_token_id >= 0, record.timestamp_ns);
        if completes_prompt {
            self.num_step_tokens += u64::from(request.cold.num_prompt_tokens);
        }
        self.num_step_tokens += u64::from(has_token);
        let Some(histograms) = &metrics.histograms else { return };
        if has_token && let Some(place) = self.last_token_ns.get_mut(slot as usize) {
            let last_ns = std::mem::replace(place, now);
            if last_ns == 0 {
                histograms.time_to_first_token.observe(now.saturating_sub(request.cold.arrival_ns));
            } else if last_ns != now {
                // Several tokens of one step count once, as in vLLM.
                histograms.inter_token_latency.observe(now - last_ns);
            }
        }
        if let Some(reason) = record.finish_reason {
            let last_ns = self.last_token_ns.get(slot as usize).copied().unwrap_or(0);
            histograms.observe_end(request, reason, last_ns, now);
        }
    }

    /// Record that all tokens of a step have been counted.
    pub(crate) fn end_step(&mut self, metrics: &Metrics, now: u64) {
        let num_tokens = std::mem::take(&mut self.num_step_tokens);
        if num_tokens > 0 {
            self.previous_ns = now;
            if let Some(histograms) = &metrics.histograms {
                histograms.iteration_tokens.observe(num_tokens);
            }
        }
    }

    /// A counter for the tokens of a step's decodes, all made at `now`.
    pub(crate) fn decodes<'a>(&'a mut self, metrics: &'a Metrics, now: u64) -> DecodeMeter<'a> {
        DecodeMeter {
            last_token_ns: &mut self.last_token_ns,
            previous_ns: self.previous_ns,
            now,
            num_steady: 0,
            num_step_tokens: &mut self.num_step_tokens,
            inter_token_latency: metrics.histograms.as_ref().map(|all| &all.inter_token_latency),
        }
    }
}

/// See [`Meter::decodes`].
pub(crate) struct DecodeMeter<'a> {
    last_token_ns: &'a mut [u64],
    previous_ns: u64,
    now: u64,
    /// Tokens of requests that also had one in the previous step.
    num_steady: u64,
    num_step_tokens: &'a mut u64,
    inter_token_latency: Option<&'a Histogram>,
}

impl DecodeMeter<'_> {
    /// Count one more token of a request that already has one.
    #[inline]
    pub(crate) fn count(&mut self, slot: u32) {
        let Some(last_ns) = self.last_token_ns.get_mut(slot as usize) else { return };
        let last_ns = std::mem::replace(last_ns, self.now);
        if last_ns == self.previous_ns {
            self.num_steady += 1;
        } else if let Some(histogram) = self.inter_token_latency {
            histogram.observe(self.now.saturating_sub(last_ns));
        }
    }

    /// Record that these were all, `num_tokens` in number.
    pub(crate) fn finish(self, num_tokens: usize) {
        *self.num_step_tokens += num_tokens as u64;
        if self.num_steady > 0
            && let Some(histogram) = self.inter_token_latency
        {
            histogram.observe_times(self.now.saturating_sub(self.previous_ns), self.num_steady);
        }
    }
}

impl Histograms {
    /// Record what is measured once per request, for requests that were completed.
    fn observe_end(&self, request: &Request, reason: FinishReason, last_token_ns: u64, now: u64) {
        let cold = &request.cold;
        let num_tokens = request.num_tokens - cold.num_prompt_tokens;
        let is_complete =
            matches!(reason, FinishReason::Stop | FinishReason::Length | FinishReason::Repetition);
        let longest = match &cold.group {
            None => is_complete.then_some(num_tokens),
            Some(group) => group.end_sample(is_complete.then_some(num_tokens)),
        };
        if let Some(longest) = longest {
            self.request_params_n.observe(cold.group.as_ref().map_or(1, |group| group.num_samples.into()));
            self.request_max_num_generation_tokens.observe(longest.into());
        }
        if !is_complete {
            return;
        }
        let last_ns = if last_token_ns == 0 { now } else { last_token_ns };
        let first_ns = if cold.first_token_ns == 0 { now } else { cold.first_token_ns };
        let decode_ns = last_ns.saturating_sub(first_ns);
        self.e2e_request_latency.observe(now.saturating_sub(cold.arrival_ns));
        self.request_queue_time.observe(cold.first_scheduled_ns.saturating_sub(cold.queued_ns));
        self.request_inference_time.observe(last_ns.saturating_sub(cold.first_scheduled_ns));
        self.request_prefill_time.observe(first_ns.saturating_sub(cold.first_scheduled_ns));
        self.request_decode_time.observe(decode_ns);
        if num_tokens > 1 {
            self.request_time_per_output_token.observe(decode_ns / u64::from(num_tokens - 1));
        }
        self.request_prompt_tokens.observe(cold.num_prompt_tokens.into());
        self.request_generation_tokens.observe(num_tokens.into());
        let num_computed = cold.num_prompt_tokens - cold.num_prompt_tokens_skipped;
        self.request_prefill_kv_computed_tokens.observe(num_computed.into());
        self.request_params_max_tokens.observe(cold.params.max_tokens.into());
        self.request_num_preemptions.observe(cold.num_preemptions.into());
    }
}
