//! `Ledger`: what the metrics must be, reckoned from the records that left the scheduler and from nothing else.

use std::collections::{BTreeMap, HashMap};

use scheduler::{EngineCoreOutput, FinishReason, HistogramSnapshot, MetricsSnapshot, NewRequest, RequestKey};

/// What is known of a request.
struct Entry {
    num_prompt: u64,
    max_tokens: u64,
    has_stop_strings: bool,
    group: usize,
    num_tokens: u64,
    had_record: bool,
    token_times: Vec<u64>,
    end: Option<FinishReason>,
}

#[derive(Default)]
pub(super) struct Ledger {
    requests: HashMap<RequestKey, Entry>,
    num_groups: usize,
    /// Prompts and tokens of each update, by its time.
    steps: BTreeMap<u64, u64>,
    num_refused: [u64; 2],
}

impl Ledger {
    /// Requests were taken in together.
    pub(super) fn add(&mut self, requests: &[NewRequest]) {
        let is_one = requests[1..].iter().all(|other| other.fork_from == Some(requests[0].key));
        for (index, request) in requests.iter().enumerate() {
            self.num_groups += usize::from(index == 0 || !is_one);
            let entry = Entry {
                num_prompt: request.prompt_token_ids.len() as u64,
                max_tokens: request.params.max_tokens.into(),
                has_stop_strings: request.has_stop_strings,
                group: self.num_groups,
                num_tokens: 0,
                had_record: false,
                token_times: Vec::new(),
                end: None,
            };
            self.requests.insert(request.key, entry);
        }
    }

    /// Requests were refused, for their number or for their tokens.
    pub(super) fn refuse(&mut self, for_tokens: bool) {
        self.num_refused[usize::from(for_tokens)] += 1;
    }

    pub(super) fn note(&mut self, record: &EngineCoreOutput) {
        let entry = self.requests.get_mut(&record.key).expect("taken in");
        let is_first = !std::mem::replace(&mut entry.had_record, true);
        let has_token = record.new_token_id >= 0;
        let mut num_tokens = u64::from(has_token);
        if is_first && (has_token || record.finish_reason == Some(FinishReason::Length)) {
            num_tokens += entry.num_prompt;
        }
        if num_tokens > 0 {
            *self.steps.entry(record.timestamp_ns).or_default() += num_tokens;
        }
        if has_token {
            entry.num_tokens += 1;
            if entry.token_times.last() != Some(&record.timestamp_ns) {
                entry.token_times.push(record.timestamp_ns);
            }
        }
        entry.end = record.finish_reason;
    }

    /// A front end has said why a request ended that had come to its length or repeated itself.
    pub(super) fn settle(&mut self, key: RequestKey, reason: FinishReason) {
        let entry = self.requests.get_mut(&key).expect("taken in");
        assert!(entry.has_stop_strings, "the engine knows why it ended");
        assert!(matches!(entry.end, Some(FinishReason::Length | FinishReason::Repetition)));
        entry.end = Some(reason);
    }

    /// Every request has ended: hold what was counted against it.
    pub(super) fn check(&self, metrics: &MetricsSnapshot) {
        let counter = |name: &str| {
            let found = metrics.counters.iter().find(|(counter, _)| counter == name);
            found.unwrap_or_else(|| panic!("no counter {name}")).1
        };
        let histogram = |name: &str| {
            let found = metrics.histograms.iter().find(|(histogram, _)| histogram == name);
            &found.unwrap_or_else(|| panic!("no histogram {name}")).1
        };
        let all = || self.requests.values();
        let complete = |entry: &&Entry| {
            let reasons = [FinishReason::Stop, FinishReason::Length, FinishReason::Repetition];
            entry.end.is_some_and(|reason| reasons.contains(&reason))
        };
        let ended = |reason| all().filter(|entry| entry.end == Some(reason)).count() as u64;

        assert_eq!(counter("num_generation_tokens"), all().map(|entry| entry.num_tokens).sum::<u64>());
        assert_eq!(counter("num_finished_stop"), ended(FinishReason::Stop));
        assert_eq!(counter("num_finished_length"), ended(FinishReason::Length));
        assert_eq!(counter("num_finished_repetition"), ended(FinishReason::Repetition));
        assert_eq!(counter("num_finished_abort"), ended(FinishReason::Abort));
        assert_eq!(counter("num_finished_error"), ended(FinishReason::Error));
        assert_eq!(counter("num_rejected_max_num_queued_reqs"), self.num_refused[0]);
        assert_eq!(counter("num_rejected_max_num_queued_tokens"), self.num_refused[1]);
        for gauge in ["num_running", "num_waiting", "num_waiting_for_grammar", "num_queued"] {
            assert_eq!(counter(gauge), 0, "{gauge}");
        }
        let started = || all().filter(|entry| !entry.token_times.is_empty());
        let prefilled = |entry: &&Entry| !entry.token_times.is_empty() || complete(entry);
        let prompts: u64 = all().filter(prefilled).map(|entry| entry.num_prompt).sum();
        assert_eq!(counter("num_prompt_tokens"), prompts);
        assert!(counter("num_prompt_tokens_cached") <= prompts);

        assert_eq!(histogram("time_to_first_token").count(), started().count() as u64);
        let gaps = started().flat_map(|entry| entry.token_times.windows(2).map(|pair| pair[1] - pair[0]));
        check_times("inter_token_latency", histogram("inter_token_latency"), &gaps.collect::<Vec<_>>());
        let decodes = all().filter(complete);
        let spans = decodes.map(|entry| match &entry.token_times[..] {
            [first, .., last] => last - first,
            _ => 0,
        });
        check_times("request_decode_time", histogram("request_decode_time"), &spans.collect::<Vec<_>>());
        check_numbers(histogram("iteration_tokens"), &self.steps.values().copied().collect::<Vec<_>>());

        let of_complete =
            |number: fn(&Entry) -> u64| all().filter(complete).map(number).collect::<Vec<u64>>();
        let num_complete = all().filter(complete).count() as u64;
        for name in
            ["e2e_request_latency", "request_queue_time", "request_inference_time", "request_prefill_time"]
        {
            assert_eq!(histogram(name).count(), num_complete, "{name}");
        }
        check_numbers(histogram("request_prompt_tokens"), &of_complete(|entry| entry.num_prompt));
        check_numbers(histogram("request_generation_tokens"), &of_complete(|entry| entry.num_tokens));
        check_numbers(histogram("request_params_max_tokens"), &of_complete(|entry| entry.max_tokens));
        let several = all().filter(complete).filter(|entry| entry.num_tokens > 1).count() as u64;
        assert_eq!(histogram("request_time_per_output_token").count(), several);
        assert_eq!(histogram("request_num_preemptions").count(), num_complete);
        assert_eq!(histogram("request_prefill_kv_computed_tokens").count(), num_complete);

        let mut groups: HashMap<usize, (u64, Option<u64>)> = HashMap::new();
        for entry in all() {
            let (num_samples, longest) = groups.entry(entry.group).or_default();
            *num_samples += 1;
            if complete(&entry) {
                *longest = Some(longest.unwrap_or(0).max(entry.num_tokens));
            }
        }
        groups.retain(|_, (_, longest)| longest.is_some());
        let sizes = groups.values().map(|(num_samples, _)| *num_samples);
        check_numbers(histogram("request_params_n"), &sizes.collect::<Vec<_>>());
        let longest = groups.values().filter_map(|(_, longest)| *longest);
        check_numbers(histogram("request_max_num_generation_tokens"), &longest.collect::<Vec<_>>());
    }
}

/// Every value in its bucket, found by walking through the bounds.
fn check_numbers(histogram: &HistogramSnapshot, values: &[u64]) {
    let mut counts = vec![0; histogram.bounds.len() + 1];
    for value in values {
        let bucket = histogram.bounds.iter().position(|bound| *value as f64 <= *bound);
        counts[bucket.unwrap_or(histogram.bounds.len())] += 1;
    }
    assert_eq!(histogram.counts, counts);
    // Whole numbers, and small ones: their sum is exact.
    assert_eq!(histogram.sum as u64, values.iter().sum::<u64>());
}

fn check_times(name: &str, histogram: &HistogramSnapshot, values: &[u64]) {
    let mut counts = vec![0; histogram.bounds.len() + 1];
    for nanoseconds in values {
        let seconds = *nanoseconds as f64 / 1e9;
        let bucket = histogram.bounds.iter().position(|bound| seconds <= *bound);
        counts[bucket.unwrap_or(histogram.bounds.len())] += 1;
    }
    assert_eq!(histogram.counts, counts, "{name}");
    let sum = values.iter().sum::<u64>() as f64 / 1e9;
    assert!((histogram.sum - sum).abs() <= 1e-9 * sum.max(1.0), "{name}: {} is not {sum}", histogram.sum);
}
