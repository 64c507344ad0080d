//! Pooling: a pooled request runs its whole prompt, in chunks and again after a preemption, ends with one vector that is
//! there before its last record, and needs no room for a token.

mod common;

use std::collections::HashMap;

use common::{
    Random,
    hard_run::{HardRun, MAX_MODEL_LEN, run_hard},
    request, scheduler,
};
use scheduler::{
    AddRequestError, EngineCoreOutput, FinishReason, NewRequest, POOLED, PooledRows, PreemptionMode,
    RequestKey, Scheduler, SchedulerConfig, SchedulerError, SchedulerOutput, StepRows, TokenRows,
    egress::Consumer,
};

const WIDTH: usize = 2;

/// A prompt that tells its places apart.
fn prompt_of(key: RequestKey, length: u32) -> Vec<i32> {
    (0..length as i32).map(|place| 1 + 7 * (key.0 as i32 % 50) + place).collect()
}

fn pooled_request(scheduler: &Scheduler, length: u32) -> NewRequest {
    let mut new = request(scheduler, "", vec![1], 0);
    new.request_id = new.key.0.to_string().into();
    new.prompt_token_ids = prompt_of(new.key, length);
    new.params.pooling = 1;
    new
}

/// The vector of a sample: its request, and the last token that the step ran of it.
fn vectors(scheduler: &Scheduler, output: &SchedulerOutput) -> Vec<f32> {
    let buffers = scheduler.buffers(output).expect("the step is in flight");
    let rows = buffers.sampled_rows.to_vec(output.num_sampled as usize);
    let places = buffers.logits_indices.to_vec(output.num_logits as usize);
    assert_eq!(rows.len(), places.len());
    let of_sample = |(row, place): (&i32, &i32)| {
        let state = scheduler.request_in_row(*row as u32).expect("a request has the row");
        [state.request_id.parse().expect("ids are keys here"), buffers.input_ids.read(*place as usize) as f32]
    };
    rows.iter().zip(&places).flat_map(of_sample).collect()
}

fn update(scheduler: &mut Scheduler, output: &SchedulerOutput, values: &[f32]) {
    let sampled = vec![POOLED; output.num_sampled as usize];
    let pooled = PooledRows { values, width: if values.is_empty() { 0 } else { WIDTH } };
    scheduler
        .update_from_output(output, StepRows { pooled, ..StepRows::from(TokenRows::column(&sampled)) })
        .expect("the oldest step");
    scheduler.check_invariants();
}

/// What a front end knows of its requests.
#[derive(Default)]
struct Reader {
    prompts: HashMap<RequestKey, Vec<i32>>,
    vectors: HashMap<RequestKey, Box<[f32]>>,
    num_pooled: usize,
    num_aborted: usize,
}

impl HardRun for Reader {
    type Said = Vec<f32>;

    fn num_requests(&self) -> usize {
        self.prompts.len()
    }

    fn request(&mut self, scheduler: &Scheduler, random: &mut Random) -> NewRequest {
        let mut new = pooled_request(scheduler, random.between(1, MAX_MODEL_LEN));
        new.priority = random.between(0, 3) as i32;
        self.prompts.insert(new.key, new.prompt_token_ids.clone());
        new
    }

    fn said_by(&self, scheduler: &Scheduler, output: &SchedulerOutput) -> Vec<f32> {
        vectors(scheduler, output)
    }

    fn update(&self, scheduler: &mut Scheduler, output: &SchedulerOutput, values: &Vec<f32>) {
        update(scheduler, output, values);
    }

    fn read(&mut self, consumer: &mut Consumer) {
        consumer.look();
        consumer.take_pooled(|vector| {
            let before = self.vectors.insert(vector.key, vector.values);
            assert_eq!(before, None, "one vector each");
        });
        consumer.drain_seen(|output: EngineCoreOutput| {
            assert_eq!(output.new_token_id, -1, "no token comes of it");
            if output.finish_reason == Some(FinishReason::Stop) {
                let last = *self.prompts[&output.key].last().expect("a prompt") as f32;
                assert_eq!(*self.vectors[&output.key], [output.key.0 as f32, last]);
                self.num_pooled += 1;
            } else {
                assert_eq!(output.finish_reason, Some(FinishReason::Abort));
                assert!(!self.vectors.contains_key(&output.key));
                self.num_aborted += 1;
            }
        });
    }
}

#[test]
fn each_request_ends_with_its_own_vector() {
    let mut num_preemptions = 0;
    for seed in 0..15 {
        for max_steps_in_flight in [1, 2] {
            for mode in [PreemptionMode::Recompute, PreemptionMode::Swap] {
                let mut reader = Reader::default();
                let stats = run_hard(&mut reader, seed, max_steps_in_flight, mode);
                let num_requests = reader.prompts.len();
                assert_eq!(reader.num_pooled + reader.num_aborted, num_requests, "every request ends");
                assert!(reader.num_pooled > 20, "{} were pooled", reader.num_pooled);
                assert_eq!(stats.num_generation_tokens, 0);
                num_preemptions += stats.num_preemptions;
            }
        }
    }
    assert!(num_preemptions > 50, "the pool is too large for this test: {num_preemptions} preemptions");
}

#[test]
fn a_prompt_may_fill_the_whole_context_and_its_tokens_are_counted() {
    let config = SchedulerConfig::new(8, 32);
    let mut scheduler = scheduler(&config, 2);
    let whole = pooled_request(&scheduler, 32);
    let mut has_output = whole.clone();
    (has_output.key, has_output.params.pooling, has_output.params.max_tokens) =
        (scheduler.handle().new_key(), 0, 1);
    let error = scheduler.handle().add_request(has_output);
    assert!(matches!(error, Err(AddRequestError::PromptTooLong { .. })), "{error:?}");
    let mut longer = whole.clone();
    longer.prompt_token_ids.push(1);
    let error = scheduler.handle().add_request(longer);
    assert!(matches!(error, Err(AddRequestError::PromptTooLong { .. })), "{error:?}");

    scheduler.handle().add_request(whole).expect("it fits");
    let output = scheduler.schedule().expect("a free set").expect("a step");
    assert_eq!((output.total_num_scheduled_tokens, output.num_sampled, output.num_logits), (32, 1, 1));
    let values = vectors(&scheduler, &output);
    update(&mut scheduler, &output, &values);
    let stats = scheduler.handle().stats();
    assert_eq!((stats.num_prompt_tokens, stats.num_generation_tokens), (32, 0));
    assert!(!scheduler.has_unfinished_requests());
}

#[test]
fn a_failed_row_ends_with_an_error_and_without_a_vector() {
    let config = SchedulerConfig::new(8, 32);
    let mut scheduler = scheduler(&config, 2);
    let mut consumer = scheduler.take_consumer().expect("the first to ask");
    for _ in 0..2 {
        let new = pooled_request(&scheduler, 5);
        scheduler.handle().add_request(new).expect("it fits");
    }
    let output = scheduler.schedule().expect("a free set").expect("a step");
    let pooled = PooledRows { values: &[f32::NAN, 0.0, 1.0, 2.0], width: WIDTH };
    let sampled = TokenRows::column(&[-1, POOLED]);
    scheduler
        .update_from_output(&output, StepRows { pooled, ..StepRows::from(sampled) })
        .expect("the step in flight");
    consumer.look();
    let mut given = Vec::new();
    consumer.take_pooled(|vector| given.push(vector.values));
    assert_eq!(given, [[1.0, 2.0].into()]);
    let mut ends = Vec::new();
    consumer.drain_seen(|output| ends.extend(output.finish_reason));
    assert_eq!(ends, [FinishReason::Error, FinishReason::Stop]);
}

#[test]
fn what_does_not_fit_the_samples_changes_nothing() {
    let config = SchedulerConfig::new(8, 32);
    let mut scheduler = scheduler(&config, 2);
    let new = pooled_request(&scheduler, 3);
    scheduler.handle().add_request(new).expect("it fits");
    let output = scheduler.schedule().expect("a free set").expect("a step");
    for wrong in [
        PooledRows::NONE,
        PooledRows { values: &[1.0], width: WIDTH },
        PooledRows { values: &[1.0, 2.0, 3.0, 4.0], width: WIDTH },
        PooledRows { values: &[1.0], width: usize::MAX },
        PooledRows { values: &[1.0], width: 0 },
    ] {
        let rows = StepRows { pooled: wrong, ..StepRows::from(TokenRows::column(&[POOLED])) };
        let error = scheduler.update_from_output(&output, rows);
        assert!(
            matches!(error, Err(SchedulerError::WrongPooledRows { step: 1, .. })),
            "{wrong:?}: {error:?}"
        );
        scheduler.check_invariants();
    }
    update(&mut scheduler, &output, &[1.0, 2.0]);
}
