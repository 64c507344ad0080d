//! Whole requests through a scheduler and its grammars, as an engine runs them, with tokens drawn by chance under the masks:
//! what has to follow is appended or sampled, with drafts and without, and the tokens are the same.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};

use scheduler::{
    COMPLETED_BY_GRAMMAR, DrafterConfig, DraftingMethod, FinishReason, GrammarKind, GrammarSpec, NewRequest,
    PreemptionMode, SamplingParams, Scheduler, SchedulerConfig, SchedulerOutput, SchedulerStats, StepBuffers,
    TokenRows, WITHHELD_SAMPLE, egress::Consumer,
};
use serde_json::json;

use crate::{
    Grammars, Verdict, Vocabulary, accepts,
    naive_masks::{EOS, NUM_IDS, Random, spec, tokenizer},
};

const NUM_REQUESTS: u64 = 40;
const MAX_TOKENS: u32 = 40;
const NUM_DRAFTS: u32 = 4;

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
    num_columns: usize,
}

/// A row of a step that is sampled: whose, and its drafts.
type SampledRow = (String, Vec<i32>);

impl Engine {
    /// One with all requests handed in; with `samples` each token comes from the model. `predicted`: what some of them
    /// expect to be answered, by their number.
    fn start(config: &SchedulerConfig, samples: bool, predicted: &BTreeMap<u64, Arc<[i32]>>) -> Self {
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
                prediction: predicted.get(&number).cloned(),
                ..NewRequest::new(handle.new_key(), &number.to_string(), prompt, params)
            };
            handle.add_request(new).expect("a request that fits");
        }
        let num_columns = 1 + config.num_speculative_tokens as usize;
        Self { scheduler, grammars, consumer, answers: BTreeMap::new(), num_columns }
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
                let rows: Vec<SampledRow> = rows.map(|row| (row.request_id, row.spec_token_ids)).collect();
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

    /// Tokens for each sample of a step, each of which depends on the request and on how many tokens it has.
    fn sample(&mut self, output: &SchedulerOutput, rows: &[SampledRow]) -> Vec<i32> {
        self.grammars.wait_for_masks(&self.scheduler, output, Duration::from_secs(20));
        let mut masks: BTreeMap<(u32, u32), (Verdict, Vec<u32>)> = BTreeMap::new();
        self.grammars.take_masks(&mut self.scheduler, output, |place, depth, verdict, mask| {
            masks.insert((place, depth), (verdict, mask.to_vec()));
        });
        let mut sampled = Vec::new();
        for ((id, drafts), place) in rows.iter().zip(0..) {
            let num_tokens = self.scheduler.request_state(id).map_or(0, |state| state.num_tokens);
            let start = sampled.len();
            for depth in 0..=drafts.len() {
                let token = draw(id, num_tokens + depth as u32, masks.get(&(place, depth as u32)));
                sampled.push(token);
                if drafts.get(depth) != Some(&token) {
                    break;
                }
            }
            sampled.resize(start + self.num_columns, -1);
        }
        sampled
    }

    fn update(&mut self, (output, sampled): &(SchedulerOutput, Vec<i32>)) {
        let rows = TokenRows { token_ids: sampled, num_columns: self.num_columns };
        self.scheduler.update_from_output(output, rows).expect("the oldest step");
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

/// What a request with so many tokens is given under a mask.
fn draw(id: &str, num_tokens: u32, mask: Option<&(Verdict, Vec<u32>)>) -> i32 {
    let number: u64 = id.parse().expect("a number");
    let mut random = Random(number << 20 | u64::from(num_tokens));
    let allowed: Vec<u32> = match mask {
        None => (0..EOS).collect(),
        Some((Verdict::Masked, mask)) => {
            (0..NUM_IDS).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
        }
        Some((Verdict::Complete, _)) => return COMPLETED_BY_GRAMMAR,
        Some((Verdict::Late, _)) => return WITHHELD_SAMPLE,
        Some((verdict, _)) => panic!("request {number}: {verdict:?}"),
    };
    random.pick(&allowed) as i32
}

/// The ways to run that must not matter, with their names.
fn ways_to_run(roomy: &SchedulerConfig) -> Vec<(String, SchedulerConfig)> {
    let tight = SchedulerConfig { num_blocks: 17, max_num_batched_tokens: 24, ..roomy.clone() };
    let mut ways = Vec::new();
    for overlaps in [false, true] {
        for (config, mode) in [
            (roomy, PreemptionMode::Recompute),
            (&tight, PreemptionMode::Recompute),
            (&tight, PreemptionMode::Swap),
        ] {
            let config = SchedulerConfig {
                max_steps_in_flight: if overlaps { 2 } else { 1 },
                preemption_mode: mode,
                num_cpu_blocks: 30,
                ..config.clone()
            };
            ways.push((format!("overlaps: {overlaps}, {mode:?}, {} blocks", config.num_blocks), config));
        }
    }
    ways
}

#[test]
fn drafts_change_no_token_under_a_grammar() {
    let roomy = SchedulerConfig { block_size: 4, ..SchedulerConfig::new(512, 64) };
    let (expected, _) = Engine::start(&roomy, true, &BTreeMap::new()).run(false);
    // What is expected is right but for one token, and of some it is nothing at all.
    let mut random = Random(5);
    let mut predicted = BTreeMap::new();
    for (number, (tokens, _)) in (0..).zip(expected.values()).filter(|(number, _)| number % 5 != 4) {
        let mut tokens = tokens.clone();
        let place = random.pick(&[3, 6, 9]);
        if let Some(token) = tokens.get_mut(place) {
            *token = (*token + 1) % EOS as i32;
        }
        predicted.insert(number, tokens.into());
    }
    let drafter = DrafterConfig {
        method: DraftingMethod::Ngram { min: 1, max: 3 },
        caps: Vec::new(),
        num_archived_requests: 0,
        adaptive: false,
    };
    let with_drafts =
        SchedulerConfig { drafter: Some(drafter), num_speculative_tokens: NUM_DRAFTS, ..roomy.clone() };
    for (name, config) in ways_to_run(&with_drafts) {
        for samples in [false, true] {
            let (answers, stats) =
                Engine::start(&config, samples, &predicted).run(config.max_steps_in_flight > 1);
            assert_eq!(answers, expected, "{name}");
            let (drafted, accepted) = (stats.num_draft_tokens, stats.num_accepted_tokens);
            println!("{name}, sampled {samples}: {drafted} drafts, {accepted} accepted");
            assert!(
                accepted > 50 && drafted > accepted + 10,
                "{name}: {drafted} drafts, {accepted} accepted"
            );
            assert!(config.num_blocks > 17 || stats.num_preemptions > 0, "{name}: there was room for all");
            assert_eq!(stats.num_forced_tokens > 0, !samples, "{name}");
        }
    }
}

#[test]
fn tokens_that_have_to_follow_are_the_same_appended_and_sampled() {
    let roomy = SchedulerConfig { block_size: 4, ..SchedulerConfig::new(512, 64) };
    let (expected, stats) = Engine::start(&roomy, true, &BTreeMap::new()).run(false);
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
    for (name, config) in ways_to_run(&roomy) {
        let overlaps = config.max_steps_in_flight > 1;
        let (answers, stats) = Engine::start(&config, false, &BTreeMap::new()).run(overlaps);
        assert_eq!(answers, expected, "{name}");
        assert!(stats.num_forced_tokens > 50, "{}", stats.num_forced_tokens);
        assert!(config.num_blocks > 17 || stats.num_preemptions > 0, "there was room for all");
    }
}
