//! Log-probabilities next to the records: each goes with its token, none with a token that was not emitted.

mod common;

use std::collections::{HashMap, VecDeque};

use common::{Random, request, scheduler};
use scheduler::{
    EngineCoreOutput, LogprobRows, PooledRows, PromptLogprobRows, RequestKey, Scheduler, SchedulerConfig,
    SchedulerError, SchedulerOutput, StepRows, TokenLogprobs, TokenRows, egress::Consumer,
};

/// What a front end does: join what comes next to the records to the tokens, request by request.
#[derive(Default)]
struct Reader {
    waiting: HashMap<RequestKey, VecDeque<TokenLogprobs>>,
    num_joined: usize,
}

impl Reader {
    fn read(&mut self, consumer: &mut Consumer, asks: impl Fn(RequestKey) -> bool) {
        consumer.look();
        consumer.take_logprobs(|found| self.waiting.entry(found.key).or_default().push_back(found));
        consumer.drain_seen(|output: EngineCoreOutput| {
            if output.new_token_id < 0 {
                return;
            }
            let found = self.waiting.get_mut(&output.key).and_then(VecDeque::pop_front);
            assert_eq!(found.is_some(), asks(output.key), "one for each token of those that ask");
            if let Some(found) = found {
                assert_eq!(found.entries[0].0, output.new_token_id);
                self.num_joined += 1;
            }
        });
    }

    fn is_empty(&self) -> bool {
        self.waiting.values().all(VecDeque::is_empty)
    }
}

/// Every second request asks.
fn asks(key: RequestKey) -> bool {
    key.0.is_multiple_of(2)
}

/// A step and whose tokens it samples.
fn schedule(scheduler: &mut Scheduler) -> Option<(SchedulerOutput, Vec<RequestKey>)> {
    let output = scheduler.schedule().expect("a free set")?;
    let buffers = scheduler.buffers(&output).expect("the step is in flight");
    let rows = buffers.sampled_rows.to_vec(output.num_sampled as usize);
    let key_of = |&row: &i32| {
        let state = scheduler.request_in_row(row as u32).expect("a request has the row");
        RequestKey(state.request_id.parse().expect("ids are keys here"))
    };
    let keys = rows.iter().map(key_of).collect();
    Some((output, keys))
}

fn update(
    scheduler: &mut Scheduler,
    (output, keys): &(SchedulerOutput, Vec<RequestKey>),
    random: &mut Random,
    num_columns: usize,
) -> Result<usize, SchedulerError> {
    let (mut ids, mut places, mut found, mut values) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (row, &key) in keys.iter().enumerate() {
        let num_tokens = 1 + random.between(0, num_columns as u32 - 1) as usize;
        for column in 0..num_columns {
            let id = random.between(0, 40) as i32;
            ids.push(if column < num_tokens { id } else { -1 });
            if column < num_tokens && asks(key) {
                places.push((row * num_columns + column) as i32);
                found.extend([id, 3, -1]);
                values.extend([-1.5, -0.5, 0.0]);
            }
        }
    }
    let ranks = vec![2; places.len()];
    // The next step's drafts: only behind drafts may a row have several tokens.
    let drafts: Vec<i32> =
        (0..keys.len() * (num_columns - 1)).map(|_| random.between(0, 40) as i32).collect();
    let rows = StepRows {
        sampled: TokenRows { token_ids: &ids, num_columns },
        drafts: TokenRows { token_ids: &drafts, num_columns: num_columns - 1 },
        logprobs: LogprobRows {
            places: &places,
            token_ids: &found,
            logprobs: &values,
            ranks: &ranks,
            num_columns: 3,
        },
        prompt_logprobs: PromptLogprobRows::NONE,
        pooled: PooledRows::NONE,
    };
    scheduler.update_from_output(output, rows)
}

/// Steps overlap, requests are aborted and preempted, some end in the middle of a step's tokens, and the reader is
/// late.
fn run(seed: u64, num_columns: usize, max_steps_in_flight: u32) -> usize {
    let config = SchedulerConfig {
        max_num_seqs: 6,
        max_num_batched_tokens: 24,
        max_steps_in_flight,
        num_speculative_tokens: num_columns as u32 - 1,
        ..SchedulerConfig::new(14, 32)
    };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let mut consumer = scheduler.take_consumer().expect("the first to ask");
    let mut random = Random(seed);
    let (mut reader, mut in_flight, mut num_added) = (Reader::default(), VecDeque::new(), 0);
    for _ in 0..600 {
        if num_added < 60 && random.chance(30) {
            num_added += 1;
            let prompt = (0..random.between(1, 12) as i32).collect();
            let mut new = request(&scheduler, "", prompt, random.between(1, 14));
            new.request_id = new.key.0.to_string().into();
            new.params.num_logprobs = if asks(new.key) { 1 } else { -1 };
            new.params.eos_token_id = Some(7);
            scheduler.handle().add_request(new).expect("it fits");
        }
        if random.chance(5) {
            scheduler.handle().abort_key(RequestKey(u64::from(random.between(1, 60))));
        }
        if in_flight.len() < max_steps_in_flight as usize
            && let Some(output) = schedule(&mut scheduler)
        {
            in_flight.push_back(output);
        }
        if (in_flight.len() == max_steps_in_flight as usize || random.chance(50))
            && let Some(output) = in_flight.pop_front()
        {
            update(&mut scheduler, &output, &mut random, num_columns).expect("the oldest step");
            scheduler.check_invariants();
        }
        if random.chance(20) {
            reader.read(&mut consumer, asks);
        }
    }
    while let Some(output) = in_flight.pop_front().or_else(|| schedule(&mut scheduler)) {
        update(&mut scheduler, &output, &mut random, num_columns).expect("the oldest step");
        reader.read(&mut consumer, asks);
    }
    reader.read(&mut consumer, asks);
    assert!(reader.is_empty(), "nothing is left of what has no token");
    reader.num_joined
}

#[test]
fn each_goes_with_its_token() {
    for seed in 0..20 {
        for (num_columns, max_steps_in_flight) in [(1, 1), (1, 2), (3, 1)] {
            assert!(run(seed, num_columns, max_steps_in_flight) > 50);
        }
    }
}

#[test]
fn what_does_not_fit_the_step_changes_nothing() {
    let config = SchedulerConfig::new(8, 32);
    let mut scheduler = scheduler(&config, 2);
    let new = request(&scheduler, "a", vec![1, 2, 3], 4);
    scheduler.handle().add_request(new).expect("it fits");
    let output = scheduler.schedule().expect("a free set").expect("a step");
    let sampled = TokenRows::column(&[5]);
    let good = LogprobRows {
        places: &[0],
        token_ids: &[5, 6],
        logprobs: &[-1.0, -0.5],
        ranks: &[2],
        num_columns: 2,
    };
    for wrong in [
        LogprobRows { places: &[1], ..good },
        LogprobRows { places: &[-1], ..good },
        LogprobRows { places: &[0, 0], ..good },
        LogprobRows { token_ids: &[6, 5], ..good },
        LogprobRows { token_ids: &[5], ..good },
        LogprobRows { logprobs: &[-1.0], ..good },
        LogprobRows { ranks: &[], ..good },
        LogprobRows { num_columns: 0, token_ids: &[], logprobs: &[], ..good },
        LogprobRows { num_columns: usize::MAX, ..good },
        LogprobRows {
            places: &[0, 0],
            token_ids: &[5, 6, 5, 6],
            logprobs: &[0.0; 4],
            ranks: &[1, 1],
            num_columns: 2,
        },
    ] {
        let rows = StepRows { logprobs: wrong, ..StepRows::from(sampled) };
        let error = scheduler.update_from_output(&output, rows);
        assert!(matches!(error, Err(SchedulerError::WrongLogprobs { step: 1, .. })), "{wrong:?}: {error:?}");
        scheduler.check_invariants();
    }
    scheduler
        .update_from_output(&output, StepRows { logprobs: good, ..StepRows::from(sampled) })
        .expect("the step in flight");
}

#[test]
fn a_consumer_that_does_not_look_for_them_keeps_none() {
    let config = SchedulerConfig::new(8, 32);
    let mut scheduler = scheduler(&config, 2);
    let mut consumer = scheduler.take_consumer().expect("the first to ask");
    scheduler.handle().add_request(request(&scheduler, "2", vec![1], 2)).expect("it fits");
    let output = scheduler.schedule().expect("a free set").expect("a step");
    let good = LogprobRows { places: &[0], token_ids: &[5], logprobs: &[-1.0], ranks: &[1], num_columns: 1 };
    scheduler
        .update_from_output(&output, StepRows { logprobs: good, ..StepRows::from(TokenRows::column(&[5])) })
        .expect("the step in flight");
    consumer.drain(drop);
    consumer.look();
    consumer.take_logprobs(|found| panic!("{found:?} was left"));
}
