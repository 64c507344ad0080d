//! Steps of a pipeline, by a clock of their own: each stage has work once as many requests run as there are stages.

mod common;

use std::collections::VecDeque;

use common::{request, scheduler};
use scheduler::{SchedulerConfig, TokenRows};

/// What the stages did, in units of one stage's time for a step.
struct Run {
    steps: usize,
    end: usize,
    most_rows: u32,
    outputs: usize,
}

/// Run equal requests: a step takes each stage one unit, and is planned once the first stage is free and fewer steps
/// are in flight than there are stages.
fn run(stages: u32, num_requests: u32, max_tokens: u32) -> Run {
    let config = SchedulerConfig {
        max_steps_in_flight: stages,
        pipeline_stages: stages,
        max_num_seqs: num_requests,
        ..SchedulerConfig::new(64 * 80, 1280)
    };
    let mut scheduler = scheduler(&config, config.num_buffer_sets());
    let mut consumer = scheduler.take_consumer().expect("taken once");
    for i in 0..num_requests {
        let prompt = (0..7).map(|token| token + 10 * i as i32).collect();
        scheduler
            .handle()
            .add_request(request(&scheduler, &i.to_string(), prompt, max_tokens))
            .expect("fits");
    }
    let mut free_at = vec![0; stages as usize];
    let mut in_flight = VecDeque::new();
    let mut run = Run { steps: 0, end: 0, most_rows: 0, outputs: 0 };
    let mut now = 0;
    loop {
        let planned =
            if in_flight.len() < stages as usize { scheduler.schedule().expect("a free set") } else { None };
        if let Some(output) = planned {
            let mut end = now;
            for free_at in &mut free_at {
                end = end.max(*free_at) + 1;
                *free_at = end;
            }
            run.steps += 1;
            run.most_rows = run.most_rows.max(output.num_reqs);
            run.end = end;
            in_flight.push_back((output, end));
            continue;
        }
        let Some((output, end)) = in_flight.pop_front() else { break };
        now = now.max(end);
        let sampled = vec![5; output.num_sampled as usize];
        scheduler.update_from_output(&output, TokenRows::column(&sampled)).expect("in flight");
        consumer.drain(|_| run.outputs += 1);
    }
    assert_eq!(scheduler.num_unfinished_requests(), 0);
    run
}

#[test]
fn stages_wait_for_the_first_and_the_last_step_only() {
    for stages in [2, 4, 8] {
        for per_stage in [1, 3] {
            let (num_requests, max_tokens) = (stages * per_stage, 40);
            let run = run(stages, num_requests, max_tokens);
            assert!(run.outputs >= (num_requests * max_tokens) as usize, "every request ran to its end");
            assert_eq!(run.most_rows, per_stage, "requests are spread over the steps");
            let idle = 1.0 - run.steps as f64 / run.end as f64;
            let filling = f64::from(stages - 1);
            let least = filling / (run.steps as f64 + filling);
            println!("{stages} stages, {num_requests} requests: idle {idle:.3}, at least {least:.3}");
            assert!(idle <= least + 0.05);
        }
    }
}

#[test]
fn one_request_is_in_one_step_at_a_time() {
    let run = run(4, 1, 20);
    assert_eq!((run.most_rows, run.steps), (1, 20));
    assert_eq!(run.end, 4 * run.steps, "its next step begins with the token that the last stage gives");
}
