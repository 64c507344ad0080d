//! Multimodal inputs that must be computed in one step: where chunks end, and what could never be computed.

mod common;

use common::{request, scheduler};
use scheduler::{
    AddRequestError, ExtraKeys, MultimodalSpan, NewRequest, Scheduler, SchedulerConfig, TokenRows,
};

fn config() -> SchedulerConfig {
    SchedulerConfig {
        max_num_batched_tokens: 16,
        max_num_seqs: 8,
        block_size: 4,
        disable_chunked_mm_input: true,
        ..SchedulerConfig::new(64, 128)
    }
}

fn with_inputs(scheduler: &Scheduler, id: &str, num_prompt: i32, inputs: &[(u32, u32)]) -> NewRequest {
    let span = |&(offset, length): &(u32, u32)| MultimodalSpan {
        offset,
        length,
        digest: Box::new([length as u8]),
        ..MultimodalSpan::default()
    };
    let extra_keys = ExtraKeys::new(None, None, inputs.iter().map(span).collect());
    NewRequest { extra_keys, ..request(scheduler, id, (0..num_prompt).collect(), 4) }
}

/// Run steps until nothing is left; which tokens of which requests each had.
fn steps(scheduler: &mut Scheduler) -> Vec<Vec<(String, u32, u32)>> {
    let mut steps = Vec::new();
    while let Some(output) = scheduler.schedule().expect("a free set") {
        let view = scheduler.step_view(&output).expect("in flight");
        let rows = view.scheduled.iter().map(|row| {
            (
                row.request_id.clone(),
                row.num_computed_tokens,
                row.num_computed_tokens + row.num_scheduled_tokens,
            )
        });
        steps.push(rows.collect());
        let sampled = vec![7; output.num_sampled as usize];
        scheduler.update_from_output(&output, TokenRows::column(&sampled)).expect("in flight");
        assert!(steps.len() < 100, "the requests never end");
    }
    steps
}

fn chunks_of(steps: &[Vec<(String, u32, u32)>], id: &str) -> Vec<(u32, u32)> {
    steps.iter().flatten().filter(|row| row.0 == id).map(|row| (row.1, row.2)).collect()
}

#[test]
fn a_chunk_ends_before_an_input_that_does_not_fit() {
    let inputs = [(10, 10), (20, 16), (37, 2)];
    for (disable_chunked_mm_input, expected) in
        [(true, vec![(0, 10), (10, 20), (20, 36), (36, 45)]), (false, vec![(0, 16), (16, 32), (32, 45)])]
    {
        let config = SchedulerConfig { disable_chunked_mm_input, ..config() };
        let mut scheduler = scheduler(&config, 2);
        let new = with_inputs(&scheduler, "a", 45, &inputs);
        scheduler.handle().add_request(new).expect("it fits");
        let chunks = chunks_of(&steps(&mut scheduler), "a");
        assert_eq!(chunks[..expected.len()], expected);
    }
}

#[test]
fn an_input_waits_for_a_step_that_has_room_and_others_run_meanwhile() {
    let mut scheduler = scheduler(&config(), 2);
    for (id, num_prompt, inputs) in
        [("decodes", 3, &[][..]), ("all of it", 20, &[(2, 16)][..]), ("text", 9, &[][..])]
    {
        scheduler.handle().add_request(with_inputs(&scheduler, id, num_prompt, inputs)).expect("it fits");
    }
    let steps = steps(&mut scheduler);
    assert_eq!(chunks_of(&steps, "all of it")[..3], [(0, 2), (2, 18), (18, 20)]);
    // While the first decodes, 15 tokens are left for an input of 16: the third runs with them, and ends first.
    let ends = |id: &str| steps.iter().rposition(|rows| rows.iter().any(|row| row.0 == id)).expect("it ran");
    assert!(ends("decodes") < ends("all of it"));
    assert!(ends("text") < ends("all of it"));
    // One that begins with its input is admitted only then.
    scheduler.handle().add_request(with_inputs(&scheduler, "d", 3, &[])).expect("it fits");
    scheduler.handle().add_request(with_inputs(&scheduler, "e", 17, &[(0, 16)])).expect("it fits");
    let later = self::steps(&mut scheduler);
    assert_eq!(chunks_of(&later, "e")[0], (0, 16));
    let starts = later.iter().position(|rows| rows.iter().any(|row| row.0 == "e"));
    assert_eq!(starts, Some(chunks_of(&later, "d").len()));
}

#[test]
fn what_the_cache_has_of_an_input_is_not_computed_again() {
    let mut scheduler = scheduler(&config(), 2);
    scheduler.handle().add_request(with_inputs(&scheduler, "a", 24, &[(3, 14)])).expect("it fits");
    assert_eq!(chunks_of(&steps(&mut scheduler), "a")[..2], [(0, 3), (3, 19)]);
    // Three blocks are shared, and the third ends within the input: the rest of it runs in one step.
    let mut other = with_inputs(&scheduler, "b", 24, &[(3, 14)]);
    other.prompt_token_ids[13] = 99;
    scheduler.handle().add_request(other).expect("it fits");
    let steps = steps(&mut scheduler);
    assert_eq!(chunks_of(&steps, "b")[0], (12, 24), "a start within the input");
    // Where a step has room for two more tokens, the five that are left of the input wait for another.
    scheduler.handle().add_request(with_inputs(&scheduler, "text", 14, &[])).expect("it fits");
    let mut third = with_inputs(&scheduler, "c", 24, &[(3, 14)]);
    third.prompt_token_ids[13] = 98;
    scheduler.handle().add_request(third).expect("it fits");
    let steps = self::steps(&mut scheduler);
    assert_eq!(chunks_of(&steps, "text")[0], (0, 14));
    assert_eq!(chunks_of(&steps, "c")[0], (12, 24), "a start within the input is not cut");
}

#[test]
fn inputs_that_no_step_can_compute_are_refused() {
    let refused = |config: SchedulerConfig, num_prompt, inputs: &[(u32, u32)]| {
        let scheduler = scheduler(&config, 2);
        scheduler.handle().add_request(with_inputs(&scheduler, "a", num_prompt, inputs)).err()
    };
    let wrong = |offset, length, most, num_prompt_tokens| {
        Some(AddRequestError::InputNotWhole { offset, length, most, num_prompt_tokens })
    };
    assert_eq!(refused(config(), 40, &[(2, 16), (18, 16)]), None);
    assert_eq!(refused(config(), 40, &[(2, 16), (20, 17)]), wrong(20, 17, 16, 40));
    assert_eq!(refused(config(), 40, &[(2, 16), (17, 3)]), wrong(17, 3, 16, 40), "within another");
    assert_eq!(refused(config(), 18, &[(2, 16)]), wrong(2, 16, 16, 18), "nothing behind it");
    assert_eq!(refused(config(), 18, &[(u32::MAX, u32::MAX)]), wrong(u32::MAX, u32::MAX, 16, 18));
    let threshold = SchedulerConfig { long_prefill_token_threshold: 8, ..config() };
    assert_eq!(refused(threshold.clone(), 40, &[(2, 8)]), None);
    assert_eq!(refused(threshold.clone(), 40, &[(2, 9)]), wrong(2, 9, 8, 40));
    let whole = SchedulerConfig { enable_chunked_prefill: false, ..threshold };
    assert_eq!(refused(whole, 16, &[(2, 9)]), None, "the threshold is that of chunks");
    let cut = SchedulerConfig { disable_chunked_mm_input: false, ..config() };
    assert_eq!(refused(cut, 40, &[(2, 30), (3, 37)]), None);
    let message = wrong(20, 17, 16, 40).expect("an error").to_string();
    assert!(
        message.contains("17 tokens at position 20") && message.contains("at most 16 tokens"),
        "{message}"
    );
}
