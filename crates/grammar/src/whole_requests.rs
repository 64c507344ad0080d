//! Whole requests through a scheduler and its grammars, as an engine runs them, with tokens drawn by chance under the masks:
//! what has to follow is appended or sampled, and the tokens are the same.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use scheduler::{
    COMPLETED_BY_GRAMMAR, FinishReason, GrammarKind, GrammarSpec, NewRequest, PreemptionMode, SamplingParams,
    Scheduler, SchedulerConfig, SchedulerOutput, SchedulerStats, StepBuffers, TokenRows, egress::Consumer,
};
use serde_json::json;

use crate::{
    Grammars, Verdict, Vocabulary, accepts,
    naive_masks::{EOS, NUM_IDS, Random, spec, tokenizer},
};

const NUM_REQUESTS: u64 = 40;
const MAX_TOKENS: u32 = 40;

/// What a request was given, and why it ended.
type Answer = (Vec<i32>, Option<FinishReason>);

fn specs() -> Vec<Arc<GrammarSpec>> {
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["abc", "b01"],
        "properties": {"abc": {"enum": ["abcabc", "bbb"]}, "b01": {"type": "boolean"}},
    });
    let mut all = vec![GrammarSpec::new(GrammarKind::JsonSchema, &schema.to_string())];
    all[0].disable_any_whitespace = true;
    all.push(GrammarSpec::new(GrammarKind::Choice, r#"["abc01abc01", "abc0", "cc"]"#));
    let mut random = Random(18);
    all.extend((0..6).map(|_| spec(&mut random)));
    all.into_iter().filter(|spec| crate::check(spec).is_ok()).map(Arc::new).collect()
}

struct Engine {
    scheduler: Scheduler,
    grammars: Grammars,
    consumer: Consumer,
    answers: BTreeMap<u64, Answer>,
}

impl Engine {
    /// One with all requests handed in; with `samples` each token comes from the model.
    fn start(config: &SchedulerConfig, samples: bool) -> Self {
        let buffers = (0..config.num_buffer_sets()).map(|_| StepBuffers::owned(config)).collect();
        let mut scheduler = Scheduler::new(config.clone(), buffers).expect("numbers that fit");
        let consumer = scheduler.take_consumer().expect("taken once");
        let tokenizer = tokenizer();
        let vocabulary = Vocabulary::new(Box::new(move || Ok((tokenizer.clone(), vec![EOS]))), NUM_IDS);
        let grammars = Grammars::start(scheduler.handle(), vocabulary).expect("threads");
        let specs = specs();
        let handle = scheduler.handle();
        for number in 0..NUM_REQUESTS {
            let params = SamplingParams {
                max_tokens: 1 + (MAX_TOKENS * (1 + number as u32 % 3)) / 3,
                eos_token_id: Some(EOS as i32),
                presence_penalty: if samples { 1.0 } else { 0.0 },
                ..SamplingParams::default()
            };
            let is_free = number % 8 == 7;
            let grammar = (!is_free).then(|| specs[number as usize % specs.len()].clone());
            let prompt = vec![1; 3 + number as usize % 5];
            let new = NewRequest {
                grammar,
                ..NewRequest::new(handle.new_key(), &number.to_string(), prompt, params)
            };
            handle.add_request(new).expect("a request that fits");
        }
        Self { scheduler, grammars, consumer, answers: BTreeMap::new() }
    }

    /// Run all requests to their ends.
    fn run(mut self, overlaps: bool) -> (BTreeMap<u64, Answer>, SchedulerStats) {
        let mut launched: VecDeque<(SchedulerOutput, Vec<i32>)> = VecDeque::new();
        while self.scheduler.has_unfinished_requests() || !launched.is_empty() {
            self.grammars.look_ahead(&mut self.scheduler);
            let is_held = self.grammars.hold_slow(&mut self.scheduler);
            let mut output = self.scheduler.schedule().expect("a free set");
            if output.is_none() && is_held && launched.is_empty() {
                self.grammars.release_slow(&mut self.scheduler);
                output = self.scheduler.schedule().expect("a free set");
            }
            self.grammars.take_news(&mut self.scheduler);
            if let Some(output) = output {
                let view = self.scheduler.step_view(&output).expect("in flight");
                let rows = view.scheduled.into_iter().filter(|row| row.sampled);
                let rows: Vec<String> = rows.map(|row| row.request_id).collect();
                self.grammars.begin_masks(&self.scheduler, &output);
                while let Some(step) = launched.pop_front() {
                    self.update(&step);
                }
                let sampled = self.sample(&output, &rows);
                launched.push_back((output, sampled));
            } else if launched.is_empty() {
                std::thread::yield_now(); // until a grammar is compiled
            }
            if !overlaps || output.is_none() {
                while let Some(step) = launched.pop_front() {
                    self.update(&step);
                }
            }
            self.scheduler.check_invariants();
            self.note();
        }
        self.note();
        (self.answers, self.scheduler.handle().stats())
    }

    /// A token for each sample of a step, which depends on the request and on how many tokens it has.
    fn sample(&mut self, output: &SchedulerOutput, rows: &[String]) -> Vec<i32> {
        self.grammars.wait_for_masks(&self.scheduler, output, Duration::from_secs(20));
        let mut masks: BTreeMap<u32, (Verdict, Vec<u32>)> = BTreeMap::new();
        self.grammars.take_masks(&mut self.scheduler, output, |place, verdict, mask| {
            masks.insert(place, (verdict, mask.to_vec()));
        });
        rows.iter()
            .zip(0..)
            .map(|(id, place)| {
                let Some(state) = self.scheduler.request_state(id) else { return 0 }; // it has left
                let number: u64 = id.parse().expect("a number");
                let mut random = Random(number << 20 | u64::from(state.num_tokens));
                let allowed: Vec<u32> = match masks.get(&place) {
                    None => (0..EOS).collect(),
                    Some((Verdict::Masked, mask)) => {
                        (0..NUM_IDS).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
                    }
                    Some((Verdict::Complete, _)) => return COMPLETED_BY_GRAMMAR,
                    Some((Verdict::Late, _)) => return 0,
                    Some((verdict, _)) => panic!("request {number}: {verdict:?}"),
                };
                random.pick(&allowed) as i32
            })
            .collect()
    }

    fn update(&mut self, (output, sampled): &(SchedulerOutput, Vec<i32>)) {
        self.scheduler.update_from_output(output, TokenRows::column(sampled)).expect("the oldest step");
    }

    fn note(&mut self) {
        let answers = &mut self.answers;
        self.consumer.drain(|record| {
            // Keys are numbered as they are made.
            let (tokens, end) = answers.entry(record.key.0).or_default();
            assert!(end.is_none(), "nothing follows an end");
            tokens.extend((record.new_token_id >= 0).then_some(record.new_token_id));
            *end = record.finish_reason;
        });
    }
}

#[test]
fn tokens_that_have_to_follow_are_the_same_appended_and_sampled() {
    let roomy = SchedulerConfig { block_size: 4, ..SchedulerConfig::new(512, 64) };
    let tight = SchedulerConfig { num_blocks: 17, max_num_batched_tokens: 24, ..roomy.clone() };
    let (expected, stats) = Engine::start(&roomy, true).run(false);
    assert_eq!(expected.len() as u64, NUM_REQUESTS);
    assert_eq!(stats.num_forced_tokens, 0);
    let tokenizer = tokenizer();
    let specs = specs();
    let mut num_whole = 0;
    for (number, (tokens, end)) in expected.values().enumerate() {
        if number % 8 != 7 && *end == Some(FinishReason::Stop) {
            let bytes = tokens.iter().filter(|&&token| token != EOS as i32);
            let bytes: Vec<u8> = bytes.flat_map(|&token| tokenizer.token_bytes(token as u32)).collect();
            let text = String::from_utf8(bytes).expect("a text");
            assert_eq!(accepts(&specs[number % specs.len()], &text), Ok(true), "{number}: {text:?}");
            num_whole += 1;
        }
    }
    assert!(num_whole > 10, "{num_whole}");
    for overlaps in [false, true] {
        for (config, mode) in [
            (&roomy, PreemptionMode::Recompute),
            (&tight, PreemptionMode::Recompute),
            (&tight, PreemptionMode::Swap),
        ] {
            let config = SchedulerConfig {
                max_steps_in_flight: if overlaps { 2 } else { 1 },
                preemption_mode: mode,
                num_cpu_blocks: 30,
                ..config.clone()
            };
            let (answers, stats) = Engine::start(&config, false).run(overlaps);
            assert_eq!(answers, expected, "overlaps: {overlaps}, {mode:?}");
            assert!(stats.num_forced_tokens > 50, "{}", stats.num_forced_tokens);
            assert!(config.num_blocks > 17 || stats.num_preemptions > 0, "there was room for all");
        }
    }
}
