//! Log-probabilities of prompts: each place of a prompt that asks is asked for once, judged by the token before it, and
//! handed on in order and before the request's first token, whatever happens to the request in between.

mod common;

use std::{collections::HashMap, sync::Arc};

use common::{
    Random,
    hard_run::{HardRun, run_hard},
    request, scheduler,
};
use scheduler::{
    EngineCoreOutput, NewRequest, PreemptionMode, PromptLogprobRows, PromptTokens, RequestKey,
    SamplingExtras, Scheduler, SchedulerConfig, SchedulerError, SchedulerOutput, StepRows, TokenRows,
    egress::Consumer,
};

/// Candidates per place that a request with this key wants in addition to the token; −1: it does not ask.
fn wanted(key: RequestKey) -> i64 {
    (key.0 % 4) as i64 - 1
}

/// The first place that a request with this key asks about, if its prompt is long enough.
fn first_judge(key: RequestKey) -> usize {
    if key.0.is_multiple_of(3) { key.0 as usize % 11 } else { 0 }
}

/// Rows of tokens from there on, as far as the prompt goes, for requests that ask for nothing else.
fn named(key: RequestKey, num_prompt_tokens: usize) -> Option<Arc<SamplingExtras>> {
    let start = first_judge(key);
    let num_rows = num_prompt_tokens.saturating_sub(1 + start);
    let ids = vec![5; num_rows].into();
    let tokens = PromptTokens { start: start as u32, is_alone: true, width: 1, ids };
    (start > 0 && num_rows > 0)
        .then(|| Arc::new(SamplingExtras::default().with_prompt_tokens(tokens).expect("rows")))
}

/// A prompt that tells its places apart.
fn prompt_of(key: RequestKey, length: u32) -> Vec<i32> {
    (0..length as i32).map(|place| 100 * (key.0 as i32 % 50) + place).collect()
}

/// What a front end knows of its requests.
#[derive(Default)]
struct Reader {
    prompts: HashMap<RequestKey, Vec<i32>>,
    /// The first places that some ask about.
    starts: HashMap<RequestKey, usize>,
    num_places: HashMap<RequestKey, usize>,
    num_whole: usize,
    num_aborted: usize,
}

impl HardRun for Reader {
    type Said = Said;

    fn num_requests(&self) -> usize {
        self.prompts.len()
    }

    fn request(&mut self, scheduler: &Scheduler, random: &mut Random) -> NewRequest {
        let mut new = request(scheduler, "", vec![1], random.between(0, 12));
        new.request_id = new.key.0.to_string().into();
        // Many prompts have the same beginning, and some fork.
        let like = if random.chance(30) { RequestKey(1) } else { new.key };
        new.prompt_token_ids = prompt_of(like, random.between(1, 28));
        new.params.num_prompt_logprobs = wanted(new.key);
        new.params.extras = named(new.key, new.prompt_token_ids.len());
        if new.params.extras.is_some() {
            self.starts.insert(new.key, first_judge(new.key));
        }
        new.priority = random.between(0, 3) as i32;
        new.fork_from = random.chance(20).then_some(RequestKey(new.key.0.saturating_sub(1)));
        self.prompts.insert(new.key, new.prompt_token_ids.clone());
        new
    }

    fn said_by(&self, scheduler: &Scheduler, output: &SchedulerOutput) -> Said {
        said_by(scheduler, output)
    }

    fn update(&self, scheduler: &mut Scheduler, output: &SchedulerOutput, said: &Said) {
        update(scheduler, output, said);
    }

    fn read(&mut self, consumer: &mut Consumer) {
        consumer.look();
        let Self { prompts, starts, num_places, .. } = self;
        consumer.take_prompt_logprobs(|said| {
            let prompt = &prompts[&said.key];
            let start = starts.get(&said.key).copied().unwrap_or(0);
            let seen = num_places.entry(said.key).or_insert(start);
            assert_eq!(said.first_position as usize, *seen + 1, "places come in order, none twice");
            assert_eq!(i64::from(said.num_columns), 1 + wanted(said.key));
            let width = said.num_columns as usize;
            for (row, &rank) in said.ranks.iter().enumerate() {
                *seen += 1;
                let token_id = prompt[*seen];
                assert_eq!(said.token_ids[row * width], token_id);
                // The "model" makes these of the token that judges.
                assert!((said.logprobs[row * width] + prompt[*seen - 1] as f32).abs() < f32::EPSILON);
                assert_eq!(rank, 1 + token_id as u32);
            }
        });
        consumer.drain_seen(|output: EngineCoreOutput| {
            let prompt = &self.prompts[&output.key];
            let due = if wanted(output.key) < 0 { 0 } else { prompt.len() - 1 };
            let places = self.num_places.get(&output.key).copied().unwrap_or(0);
            let is_whole =
                output.new_token_id >= 0 || output.finish_reason == Some(scheduler::FinishReason::Length);
            if is_whole {
                assert_eq!(places, due, "all of a prompt is there before anything of its output");
                self.num_whole += usize::from(due > 0);
            } else {
                assert!(places <= due);
                self.num_aborted += usize::from(places < due);
            }
        });
    }
}

/// What the worker makes of a step's arrays.
struct Said {
    num_columns: Vec<i32>,
    token_ids: Vec<i32>,
    logprobs: Vec<f32>,
    ranks: Vec<i32>,
}

impl Said {
    fn rows(&self) -> PromptLogprobRows<'_> {
        let Self { num_columns, token_ids, logprobs, ranks } = self;
        PromptLogprobRows { num_columns, token_ids, logprobs, ranks }
    }
}

fn said_by(scheduler: &Scheduler, output: &SchedulerOutput) -> Said {
    let buffers = scheduler.buffers(output).expect("the step is in flight");
    let (reqs, tokens) = (output.num_prompt_logprobs_reqs as usize, output.num_prompt_logprobs as usize);
    let starts = buffers.prompt_logprobs_indptr.to_vec(reqs + 1);
    let indices = buffers.prompt_logprobs_indices.to_vec(tokens);
    let targets = buffers.prompt_logprobs_targets.to_vec(tokens);
    let mut said = Said { num_columns: vec![], token_ids: vec![], logprobs: vec![], ranks: vec![] };
    for (index, &row) in buffers.prompt_logprobs_rows.to_vec(reqs).iter().enumerate() {
        let state = scheduler.request_in_row(row as u32).expect("a request has the row");
        let num_columns = 1 + wanted(RequestKey(state.request_id.parse().expect("ids are keys here"))) as i32;
        said.num_columns.push(num_columns);
        for place in starts[index]..starts[index + 1] {
            let (judge, target) = (indices[place as usize], targets[place as usize]);
            let judging_id = buffers.input_ids.read(judge as usize);
            said.token_ids.push(target);
            said.token_ids.extend(1..num_columns);
            said.logprobs.extend((0..num_columns).map(|column| -(judging_id + column) as f32));
            said.ranks.push(1 + target);
        }
    }
    said
}

fn update(scheduler: &mut Scheduler, output: &SchedulerOutput, said: &Said) {
    let sampled = vec![7; output.num_sampled as usize];
    scheduler
        .update_from_output(
            output,
            StepRows { prompt_logprobs: said.rows(), ..StepRows::from(TokenRows::column(&sampled)) },
        )
        .expect("the oldest step");
    scheduler.check_invariants();
}

#[test]
fn each_place_is_judged_once_and_in_order() {
    for seed in 0..15 {
        for max_steps_in_flight in [1, 2] {
            for mode in [PreemptionMode::Recompute, PreemptionMode::Swap] {
                let mut reader = Reader::default();
                run_hard(&mut reader, seed, max_steps_in_flight, mode);
                assert!(reader.num_whole > 20, "{} prompts", reader.num_whole);
            }
        }
    }
}

#[test]
fn a_preempted_prompt_is_not_judged_again_from_its_beginning() {
    // Blocks for one of the two, whose prompts are computed in turns.
    let config = SchedulerConfig {
        max_num_seqs: 2,
        max_num_batched_tokens: 8,
        long_prefill_token_threshold: 4,
        block_size: 4,
        ..SchedulerConfig::new(9, 32)
    };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let mut consumer = scheduler.take_consumer().expect("the first to ask");
    let mut reader = Reader::default();
    let mut num_asked = 0;
    for key in [RequestKey(3), RequestKey(7)] {
        let mut new = request(&scheduler, &key.0.to_string(), prompt_of(key, 24), 2);
        new.key = key;
        new.params.num_prompt_logprobs = wanted(key);
        reader.prompts.insert(key, new.prompt_token_ids.clone());
        scheduler.handle().add_request(new).expect("it fits");
    }
    while let Some(output) = scheduler.schedule().expect("a free set") {
        let said = said_by(&scheduler, &output);
        num_asked += output.num_prompt_logprobs;
        update(&mut scheduler, &output, &said);
        reader.read(&mut consumer);
    }
    assert!(scheduler.handle().stats().num_preemptions > 0, "the pool is too large for this test");
    assert_eq!((reader.num_whole > 0, num_asked), (true, 2 * 23));
}

#[test]
fn what_is_not_what_the_step_was_asked_for_changes_nothing() {
    let config = SchedulerConfig::new(8, 32);
    let mut scheduler = scheduler(&config, 2);
    let mut new = request(&scheduler, "3", vec![5, 6, 7], 4);
    new.params.num_prompt_logprobs = 1;
    scheduler.handle().add_request(new).expect("it fits");
    let output = scheduler.schedule().expect("a free set").expect("a step");
    assert_eq!((output.num_prompt_logprobs_reqs, output.num_prompt_logprobs), (1, 2));
    let good = PromptLogprobRows {
        num_columns: &[2],
        token_ids: &[6, 1, 7, -1],
        logprobs: &[-1.0, -0.5, -2.0, 0.0],
        ranks: &[2, 1],
    };
    for wrong in [
        PromptLogprobRows::NONE,
        PromptLogprobRows { num_columns: &[], ..good },
        PromptLogprobRows { num_columns: &[0], ..good },
        PromptLogprobRows { num_columns: &[-1], ..good },
        PromptLogprobRows { num_columns: &[1], ..good },
        PromptLogprobRows { num_columns: &[i32::MAX], ..good },
        PromptLogprobRows { num_columns: &[2, 2], ..good },
        PromptLogprobRows { token_ids: &[6, 1, 8, -1], ..good },
        PromptLogprobRows { token_ids: &[6, 1, 7], ..good },
        PromptLogprobRows { logprobs: &[-1.0], ..good },
        PromptLogprobRows { ranks: &[2], ..good },
    ] {
        let sampled = TokenRows::column(&[9]);
        let rows = StepRows { prompt_logprobs: wrong, ..StepRows::from(sampled) };
        let error = scheduler.update_from_output(&output, rows);
        assert!(
            matches!(error, Err(SchedulerError::WrongPromptLogprobs { step: 1, .. })),
            "{wrong:?}: {error:?}"
        );
        scheduler.check_invariants();
    }
    let sampled = TokenRows::column(&[9]);
    scheduler
        .update_from_output(&output, StepRows { prompt_logprobs: good, ..StepRows::from(sampled) })
        .expect("the step in flight");
}
