//! The naive scheduler alone, in small scenes with every number written out: what the others are compared with must
//! itself be right, above all where it stands for rules that are easy to get wrong: steps in flight, drafts, swapping,
//! forks.

mod naive;

use naive::{NaiveConfig, NaiveRequest, NaiveScheduler, NaiveStep, Status};
use scheduler::{SchedulerConfig, SchedulingPolicy};

fn config(num_blocks: u32, block_size: u32) -> NaiveConfig {
    NaiveConfig::new(SchedulerConfig { block_size, ..SchedulerConfig::new(num_blocks, 256) })
}

/// Tokens of different ids are different from the first on.
fn request(id: &str, num_prompt: usize, max_tokens: usize) -> NaiveRequest {
    let first = 1000 * i32::from(id.as_bytes()[0]);
    let prompt = (0..num_prompt as i32).map(|i| first + i).collect();
    NaiveRequest { id: id.to_owned(), prompt, max_tokens, ..NaiveRequest::default() }
}

fn rows(step: &NaiveStep) -> Vec<(&str, usize, usize)> {
    step.scheduled.iter().map(|(id, tokens, computed)| (id.as_str(), *tokens, *computed)).collect()
}

/// Every sampled row gets one token.
fn update(scheduler: &mut NaiveScheduler, step: &NaiveStep) {
    scheduler.update(step.number, &vec![vec![7]; step.sampled.len()], &[]);
}

fn run(scheduler: &mut NaiveScheduler) -> Option<NaiveStep> {
    let step = scheduler.schedule()?;
    update(scheduler, &step);
    Some(step)
}

fn run_until(
    scheduler: &mut NaiveScheduler,
    what: &str,
    mut is_there: impl FnMut(&NaiveStep) -> bool,
) -> NaiveStep {
    for _ in 0..1_000 {
        let step = run(scheduler).expect("work");
        if is_there(&step) {
            return step;
        }
    }
    panic!("never: {what}");
}

fn computed(scheduler: &NaiveScheduler, id: &str) -> (usize, usize) {
    let request = scheduler.by_id(id).expect("live");
    (request.num_computed_tokens, request.tokens.len())
}

#[test]
fn the_free_order_after_two_requests_that_share() {
    let mut scheduler = NaiveScheduler::new(config(11, 16));
    let first = request("a", 55, 9);
    let mut second = NaiveRequest { id: "b".to_owned(), ..first.clone() };
    second.prompt.truncate(48);
    second.prompt.extend([1, 2, 3, 4, 5]);
    scheduler.add(first);
    run(&mut scheduler).expect("work");
    scheduler.add(second);
    let step = run(&mut scheduler).expect("work");
    assert_eq!(rows(&step), [("a", 1, 55), ("b", 5, 48)]);
    assert_eq!(scheduler.block_table("a"), [1, 2, 3, 4]);
    assert_eq!(scheduler.block_table("b"), [1, 2, 3, 5]);
    scheduler.abort("a");
    scheduler.abort("b");
    assert!(scheduler.schedule().is_none());
    assert_eq!(scheduler.free_order(), [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]);
    scheduler.add(request("c", 160, 1));
    run(&mut scheduler);
    assert_eq!(scheduler.free_order().len(), 10);
}

#[test]
fn a_life_without_and_with_two_steps_in_flight() {
    for depth in [1, 2] {
        let mut scheduler = NaiveScheduler::new(NaiveConfig { max_steps_in_flight: depth, ..config(64, 16) });
        scheduler.add(request("a", 6, 100));
        let (mut total, mut num_steps, mut in_flight) = (0, 0, Vec::new());
        loop {
            let planned = if in_flight.len() < depth { scheduler.schedule() } else { None };
            if let Some(step) = planned {
                (total, num_steps) = (total + step.scheduled[0].1, num_steps + 1);
                in_flight.push(step);
            } else if in_flight.is_empty() {
                break;
            } else {
                update(&mut scheduler, &in_flight.remove(0));
            }
        }
        assert_eq!((num_steps, total), (100, 105), "no step is wasted, {depth} in flight");
        assert!(scheduler.requests.is_empty());
        assert_eq!(scheduler.free_order().len(), 63);
    }
}

#[test]
fn what_becomes_known_in_flight_is_found_when_the_next_block_is_taken() {
    let mut scheduler = NaiveScheduler::new(NaiveConfig { max_steps_in_flight: 2, ..config(16, 4) });
    scheduler.add(request("a", 3, 9));
    let first = scheduler.schedule().expect("work");
    let second = scheduler.schedule().expect("work");
    assert_eq!((rows(&first), rows(&second)), (vec![("a", 3, 0)], vec![("a", 1, 3)]));
    assert_eq!(scheduler.num_output_placeholders(0), 2);
    update(&mut scheduler, &first);
    let prompt = [&request("a", 3, 9).prompt[..], &[7, 7]].concat();
    assert_eq!(
        scheduler.prefix_hit_length(&prompt, b"", &[]),
        0,
        "its last token was unknown when it was scheduled"
    );
    let third = scheduler.schedule().expect("work");
    assert_eq!(rows(&third), [("a", 1, 4)]);
    assert_eq!(scheduler.prefix_hit_length(&prompt, b"", &[]), 4);
    update(&mut scheduler, &second);
    update(&mut scheduler, &third);
}

#[test]
fn drafts_that_are_rejected_are_set_back() {
    let mut scheduler = NaiveScheduler::new(NaiveConfig { num_speculative_tokens: 3, ..config(16, 4) });
    scheduler.add(request("a", 4, 8));
    let step = scheduler.schedule().expect("work");
    scheduler.update(step.number, &[vec![7]], &[vec![1, 2, 3]]);
    let step = scheduler.schedule().expect("work");
    assert_eq!((rows(&step), step.num_drafts.as_slice()), (vec![("a", 4, 4)], &[3][..]));
    assert_eq!(computed(&scheduler, "a"), (8, 5), "as if all were accepted");
    // One draft was right: its row gives two tokens.
    scheduler.update(step.number, &[vec![1, 9, -1, -1]], &[vec![4, -1, -1]]);
    assert_eq!(computed(&scheduler, "a"), (6, 7));
    assert_eq!(scheduler.block_table("a").len(), 2);
    let step = scheduler.schedule().expect("work");
    assert_eq!((rows(&step), step.num_drafts.as_slice()), (vec![("a", 2, 6)], &[1][..]));
    scheduler.update(step.number, &[vec![4, 5]], &[vec![1, 2, 3]]);
    // 9 of at most 12 tokens: two drafts and the token that follows them fit.
    let step = scheduler.schedule().expect("work");
    assert_eq!((rows(&step), step.num_drafts.as_slice()), (vec![("a", 3, 8)], &[2][..]));
    scheduler.update(step.number, &[vec![1, 2, 3]], &[]);
    assert!(scheduler.requests.is_empty());
}

#[test]
fn drafts_in_flight_are_upper_bounds() {
    let speculative = NaiveConfig { max_steps_in_flight: 2, num_speculative_tokens: 2, ..config(16, 4) };
    let mut scheduler = NaiveScheduler::new(speculative);
    scheduler.add(request("a", 10, 40));
    let first = scheduler.schedule().expect("work");
    let second = scheduler.schedule().expect("work");
    assert_eq!((rows(&first), rows(&second)), (vec![("a", 10, 0)], vec![("a", 3, 10)]));
    assert_eq!(scheduler.num_output_placeholders(0), 4);
    scheduler.update(first.number, &[vec![7]], &[]);
    let third = scheduler.schedule().expect("work");
    assert_eq!(rows(&third), [("a", 3, 13)]);
    // One of two was accepted: the third step really began at 12, and the fourth is planned from there.
    scheduler.update(second.number, &[vec![7, 7]], &[]);
    assert_eq!(computed(&scheduler, "a"), (15, 13));
    let fourth = scheduler.schedule().expect("work");
    assert_eq!(rows(&fourth), [("a", 3, 15)]);
    scheduler.update(third.number, &[vec![7]], &[]);
    assert_eq!(
        computed(&scheduler, "a"),
        (16, 14),
        "14 tokens are known, 13 computed, a row of 3 is in flight"
    );
}

#[test]
fn a_failed_step_takes_those_behind_it_along() {
    let mut scheduler = NaiveScheduler::new(NaiveConfig { max_steps_in_flight: 2, ..config(16, 4) });
    let a = request("a", 9, 9);
    scheduler.add(a.clone());
    let first = scheduler.schedule().expect("work");
    scheduler.add(request("b", 9, 9));
    scheduler.schedule().expect("work");
    scheduler.add(request("c", 9, 9));
    assert_eq!(scheduler.prefix_hit_length(&a.prompt, b"", &[]), 8);
    scheduler.fail(first.number);
    assert_eq!(scheduler.prefix_hit_length(&a.prompt, b"", &[]), 0);
    assert_eq!(scheduler.free_order().len(), 15);
    assert_eq!(rows(&scheduler.schedule().expect("work")), [("c", 9, 0)]);
}

#[test]
fn who_is_preempted_in_flight_gets_its_tokens_and_waits_for_them() {
    let mut scheduler = NaiveScheduler::new(NaiveConfig {
        max_steps_in_flight: 2,
        ..NaiveConfig::new(SchedulerConfig {
            block_size: 4,
            enable_prefix_caching: false,
            ..SchedulerConfig::new(5, 16)
        })
    });
    scheduler.add(request("a", 6, 10));
    scheduler.add(request("b", 6, 10));
    let first = scheduler.schedule().expect("work");
    let second = scheduler.schedule().expect("work");
    assert_eq!(rows(&second), [("a", 1, 6), ("b", 1, 6)]);
    update(&mut scheduler, &first);
    let third = scheduler.schedule().expect("work");
    assert_eq!(rows(&third), [("a", 1, 7), ("b", 1, 7)]);
    update(&mut scheduler, &second);
    let fourth = scheduler.schedule().expect("work");
    assert_eq!((rows(&fourth), fourth.preempted.as_slice()), (vec![("a", 1, 8)], &["b".to_owned()][..]));
    assert_eq!(computed(&scheduler, "b"), (0, 8));
    update(&mut scheduler, &third);
    assert_eq!(computed(&scheduler, "b"), (0, 9), "the token that was in flight");
    assert_eq!(scheduler.by_id("b").expect("live").status, Status::Preempted);
}

#[test]
fn a_victim_is_swapped_out_and_back() {
    for (num_cpu_blocks, status) in [(8, Status::Swapped), (1, Status::Preempted)] {
        let mut swapping = config(7, 4);
        swapping.base.enable_prefix_caching = false;
        let mut scheduler = NaiveScheduler::new(NaiveConfig { swap: true, num_cpu_blocks, ..swapping });
        scheduler.add(request("a", 11, 9));
        scheduler.add(request("b", 11, 9));
        let step = run_until(&mut scheduler, "a preemption", |step| !step.preempted.is_empty());
        assert_eq!((step.preempted.as_slice(), rows(&step)), (&["b".to_owned()][..], vec![("a", 1, 12)]));
        assert_eq!(scheduler.by_id("b").expect("live").status, status);
        if status == Status::Preempted {
            assert!(step.swap_out.is_empty() && computed(&scheduler, "b").0 == 0);
            continue;
        }
        assert_eq!(step.swap_out.len(), 3);
        let kept = computed(&scheduler, "b");
        assert_eq!(kept, (12, 13));
        scheduler.add(request("c", 3, 9));
        let step = run_until(&mut scheduler, "b again", |step| rows(step).iter().any(|row| row.0 == "b"));
        assert_eq!(step.swap_in.len(), 3);
        assert_eq!(rows(&step)[0], ("b", 1, 12), "before the waiting c, and nothing is computed twice");
    }
}

#[test]
fn a_victim_in_flight_is_swapped_out_when_its_steps_are_done() {
    let mut swapping = config(5, 4);
    swapping.base.enable_prefix_caching = false;
    let mut scheduler = NaiveScheduler::new(NaiveConfig {
        swap: true,
        num_cpu_blocks: 8,
        max_steps_in_flight: 2,
        ..swapping
    });
    scheduler.add(request("a", 7, 6));
    scheduler.add(request("b", 7, 6));
    let first = scheduler.schedule().expect("work");
    let second = scheduler.schedule().expect("work");
    update(&mut scheduler, &first);
    assert!(scheduler.schedule().is_none(), "a lacks a block and waits for those of b");
    assert!(scheduler.by_id("b").expect("live").swap_out_pending);
    assert_eq!((scheduler.running_ids(), scheduler.waiting_ids()), (vec!["a".to_owned()], Vec::new()));
    assert_eq!(scheduler.leaving_ids(), ["b"]);
    update(&mut scheduler, &second);
    assert_eq!(computed(&scheduler, "b"), (8, 9), "what was in flight is ordinary");
    let third = scheduler.schedule().expect("work");
    assert_eq!((rows(&third), third.swap_out.len()), (vec![("a", 1, 8)], 2));
    assert_eq!(third.preempted, ["b"]);
}

#[test]
fn children_share_full_blocks_and_copy_the_last_one() {
    let mut scheduler = NaiveScheduler::new(config(32, 16));
    let parent = request("p", 40, 4);
    let child =
        |id: &str| NaiveRequest { id: id.to_owned(), fork_from: Some("p".to_owned()), ..parent.clone() };
    scheduler.add(parent.clone());
    scheduler.add(child("1"));
    scheduler.add(child("2"));
    let step = run(&mut scheduler).expect("work");
    assert_eq!(rows(&step), [("p", 39, 0)], "the children wait for the parent, and it for them");
    let step = run(&mut scheduler).expect("work");
    assert_eq!(rows(&step), [("p", 1, 39), ("1", 1, 39), ("2", 1, 39)]);
    assert_eq!(scheduler.block_table("1"), [1, 2, 4]);
    assert_eq!(scheduler.block_table("2"), [1, 2, 5]);
    assert_eq!(step.copies, [(3, 4), (3, 5)]);
    assert_eq!(scheduler.pool.ref_counts[1], 3);
}

#[test]
fn the_first_child_stands_in_for_a_parent_that_dies_early() {
    let mut chunked = config(32, 16);
    chunked.base.max_num_batched_tokens = 20;
    let mut scheduler = NaiveScheduler::new(chunked);
    let parent = request("p", 40, 4);
    scheduler.add(parent.clone());
    for id in ["1", "2"] {
        scheduler.add(NaiveRequest { id: id.to_owned(), fork_from: Some("p".to_owned()), ..parent.clone() });
    }
    assert_eq!(rows(&run(&mut scheduler).expect("work")), [("p", 20, 0)]);
    scheduler.abort("p");
    assert_eq!(
        rows(&run(&mut scheduler).expect("work")),
        [("1", 20, 16)],
        "it found the block of the parent"
    );
    assert_eq!(rows(&run(&mut scheduler).expect("work")), [("1", 3, 36)]);
    assert_eq!(rows(&run(&mut scheduler).expect("work")), [("1", 1, 39), ("2", 1, 39)]);
}

#[test]
fn a_grammar_that_is_compiled_blocks_no_other() {
    let mut scheduler = NaiveScheduler::new(config(32, 16));
    scheduler.add(NaiveRequest { needs_grammar: true, ..request("g", 5, 4) });
    scheduler.add(request("a", 5, 4));
    assert_eq!(rows(&run(&mut scheduler).expect("work")), [("a", 5, 0)]);
    assert_eq!(scheduler.by_id("g").expect("live").status, Status::WaitingForGrammar);
    scheduler.grammar_is_ready("g");
    assert_eq!(rows(&run(&mut scheduler).expect("work")), [("a", 1, 5), ("g", 5, 0)]);
}

#[test]
fn a_head_that_does_not_fit_is_passed_so_many_times() {
    let mut scheduler =
        NaiveScheduler::new(NaiveConfig { max_look_past: 1, max_times_passed: 2, ..config(9, 4) });
    // "a" leaves 3 blocks, the head "h" needs 5.
    scheduler.add(request("a", 18, 4));
    for (id, num_prompt) in [("h", 18), ("b", 2), ("c", 2), ("d", 2)] {
        scheduler.add(request(id, num_prompt, 2));
    }
    let mut ids = || -> Vec<String> {
        run(&mut scheduler).expect("work").scheduled.into_iter().map(|row| row.0).collect()
    };
    assert_eq!(ids(), ["a", "b"], "one is tried past the head");
    assert_eq!(ids(), ["a", "b", "c"]);
    assert_eq!(ids(), ["a", "c"], "d does not pass the head a third time");
    assert_eq!(ids(), ["a"]);
    assert_eq!(ids(), ["h", "d"]);
}

#[test]
fn who_was_resumed_is_no_victim_for_a_while() {
    // Three requests of up to 5 blocks; 9 blocks: the newest that is not immune gives way.
    let mut scheduler = NaiveScheduler::new(NaiveConfig {
        preemption_immunity_steps: 1_000,
        ..NaiveConfig::new(SchedulerConfig {
            block_size: 2,
            enable_prefix_caching: false,
            ..SchedulerConfig::new(10, 32)
        })
    });
    for id in ["a", "b", "c"] {
        scheduler.add(request(id, 3, 7));
    }
    let step = run_until(&mut scheduler, "a preemption", |step| !step.preempted.is_empty());
    assert_eq!(step.preempted, ["c"]);
    run_until(&mut scheduler, "c again", |step| rows(step).iter().any(|row| row.0 == "c"));
    for id in ["d", "e"] {
        scheduler.add(request(id, 3, 7));
    }
    let mut victims = Vec::new();
    while scheduler.by_id("c").is_some() {
        victims.extend(run(&mut scheduler).expect("work").preempted);
    }
    assert!(!victims.contains(&"c".to_owned()), "{victims:?}");
}

#[test]
fn under_priority_the_best_is_protected_and_the_worst_goes() {
    let mut scheduler = NaiveScheduler::new(NaiveConfig {
        ..NaiveConfig::new(SchedulerConfig {
            block_size: 4,
            enable_prefix_caching: false,
            scheduling_policy: SchedulingPolicy::Priority,
            ..SchedulerConfig::new(5, 16)
        })
    });
    for (id, priority) in [("a", 5), ("b", 0)] {
        scheduler.add(NaiveRequest { priority, ..request(id, 7, 5) });
        run(&mut scheduler);
    }
    let step = run_until(&mut scheduler, "a preemption", |step| !step.preempted.is_empty());
    assert_eq!(step.preempted, ["a"], "it was admitted first, and is less important");
    assert!(rows(&step).iter().all(|row| row.0 == "b") && !step.scheduled.is_empty());
}

#[test]
fn a_plan_in_vain_keeps_no_request_out_of_the_next_one() {
    let mut scheduler = NaiveScheduler::new(NaiveConfig {
        max_steps_in_flight: 2,
        num_speculative_tokens: 4,
        ..NaiveConfig::new(SchedulerConfig {
            block_size: 8,
            enable_prefix_caching: false,
            ..SchedulerConfig::new(7, 64)
        })
    });
    scheduler.add(request("a", 27, 5));
    scheduler.add(request("b", 12, 28));
    let first = scheduler.schedule().expect("work");
    update(&mut scheduler, &first);
    let second = scheduler.schedule().expect("work");
    assert_eq!(rows(&second), [("a", 4, 27), ("b", 4, 12)]);
    assert!(scheduler.schedule().is_none() && scheduler.waiting_ids() == ["b"]);
    update(&mut scheduler, &second);
    assert_eq!(rows(&scheduler.schedule().expect("work")), [("a", 3, 28), ("b", 14, 0)]);
}

fn under_priority(steps_in_flight: usize, caching: bool) -> NaiveScheduler {
    NaiveScheduler::new(NaiveConfig {
        max_steps_in_flight: steps_in_flight,
        ..NaiveConfig::new(SchedulerConfig {
            block_size: 4,
            enable_prefix_caching: caching,
            scheduling_policy: SchedulingPolicy::Priority,
            ..SchedulerConfig::new(4, 12)
        })
    })
}

#[test]
fn who_gives_itself_up_takes_nobodys_turn() {
    let mut scheduler = under_priority(1, false);
    scheduler.add(request("a", 2, 9));
    scheduler.add(NaiveRequest { priority: 5, ..request("b", 3, 9) });
    run(&mut scheduler);
    scheduler.add(NaiveRequest { priority: 1, ..request("c", 2, 9) });
    assert_eq!(rows(&run(&mut scheduler).expect("work")), [("a", 1, 2), ("b", 1, 3), ("c", 2, 0)]);
    let step = run(&mut scheduler).expect("work");
    assert_eq!((rows(&step), step.preempted.as_slice()), (vec![("a", 1, 3), ("c", 1, 2)], &["b".into()][..]));
}

#[test]
fn a_block_that_a_step_in_flight_fills_for_a_victim_is_found() {
    let mut scheduler = under_priority(2, true);
    let victim = NaiveRequest { priority: 5, ..request("v", 3, 5) };
    scheduler.add(victim.clone());
    let first = scheduler.schedule().expect("work");
    scheduler.add(request("w", 4, 5));
    let second = scheduler.schedule().expect("work");
    update(&mut scheduler, &first);
    let third = scheduler.schedule().expect("work");
    assert_eq!((rows(&third), third.preempted.as_slice()), (vec![("w", 1, 4)], &["v".into()][..]));
    let tokens = [&victim.prompt[..], &[7, 7]].concat();
    assert_eq!((scheduler.num_taken_out, scheduler.prefix_hit_length(&tokens, b"", &[])), (1, 4));
    scheduler.fail(second.number);
    assert_eq!(scheduler.prefix_hit_length(&tokens, b"", &[]), 0);
}

#[test]
fn a_tie_of_priorities_goes_to_who_came_first() {
    let mut scheduler = under_priority(1, true);
    for (id, priority, age) in [("a", 0, 0), ("b", 0, 1), ("c", 1, 2)] {
        scheduler.add(NaiveRequest { priority, age, ..request(id, 2, 3) });
    }
    assert_eq!(rows(&run(&mut scheduler).expect("work")), [("b", 2, 0), ("a", 2, 0), ("c", 2, 0)]);
}
