//! What blocks depend on in addition to their tokens: requests that differ in it share nothing, from the first block
//! that does.

mod common;

use common::{request, scheduler};
use scheduler::{ExtraKeys, MultimodalSpan, Scheduler, SchedulerConfig, TokenRows};

const PROMPT: std::ops::Range<i32> = 0..40;

fn image(offset: u32, digest: &[u8]) -> Vec<MultimodalSpan> {
    vec![MultimodalSpan { offset, length: 10, digest: digest.into(), ..MultimodalSpan::default() }]
}

/// Run a request with these keys to its end; how many of its 40 tokens came from the cache.
fn cached(scheduler: &mut Scheduler, extra_keys: ExtraKeys) -> u32 {
    let id = "a";
    let request = scheduler::NewRequest { extra_keys, ..request(scheduler, id, PROMPT.collect(), 1) };
    scheduler.handle().add_request(request).expect("it fits");
    let output = scheduler.schedule().expect("a free set").expect("work");
    let cached = scheduler.request_state(id).expect("running").num_cached_tokens;
    scheduler.update_from_output(&output, TokenRows::column(&[7])).expect("in flight");
    cached
}

/// Tokens that the second finds when the first has run.
fn shared(first: &ExtraKeys, second: &ExtraKeys) -> u32 {
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    assert_eq!(cached(&mut scheduler, first.clone()), 0);
    let tokens = cached(&mut scheduler, second.clone());
    let prompt: Vec<i32> = PROMPT.collect();
    assert_eq!(
        scheduler.handle().prefix_hint(&prompt, second),
        32,
        "another thread finds the second's blocks"
    );
    assert_eq!(scheduler.prefix_hit_length(&prompt, second), 32);
    tokens
}

#[test]
fn adapters_and_salts_keep_requests_apart() {
    let none = ExtraKeys::default();
    let lora = ExtraKeys::new(Some("x"), None, Vec::new());
    let salt = ExtraKeys::new(None, Some("x"), Vec::new());
    let both = ExtraKeys::new(Some("x"), Some("x"), Vec::new());
    let all = [none, lora, salt, both, ExtraKeys::new(Some(""), None, Vec::new())];
    for (i, first) in all.iter().enumerate() {
        for (j, second) in all.iter().enumerate() {
            assert_eq!(shared(first, second), if i == j { 32 } else { 0 }, "{first:?} and {second:?}");
        }
    }
}

#[test]
fn an_image_matters_from_the_block_that_it_begins_in() {
    let keys = |spans| ExtraKeys::new(None, None, spans);
    // Positions 20 to 29 lie in the second block of 16.
    let cat = keys(image(20, b"cat"));
    assert_eq!(shared(&cat, &keys(image(20, b"cat"))), 32);
    assert_eq!(shared(&cat, &keys(image(20, b"dog"))), 16, "the first block has no image");
    assert_eq!(shared(&cat, &keys(image(21, b"cat"))), 16, "at another place it is other content");
    assert_eq!(shared(&cat, &ExtraKeys::default()), 16);
    // Positions 10 to 19 lie in both.
    assert_eq!(shared(&keys(image(10, b"cat")), &keys(image(10, b"dog"))), 0);
    // Behind the last full block it does not matter.
    assert_eq!(shared(&keys(image(32, b"cat")), &keys(image(32, b"dog"))), 32);
    // The order in which spans are given does not matter either.
    let (one, two) = (image(2, b"cat"), image(25, b"dog"));
    let forth = keys([one.clone(), two.clone()].concat());
    assert_eq!(shared(&forth, &keys([two, one].concat())), 32);
}

#[test]
fn the_digest_names_the_content() {
    let with = |content: &[u8]| MultimodalSpan { content: content.into(), ..image(20, b"cat").remove(0) };
    let keys = |content: &[u8]| ExtraKeys::new(None, None, vec![with(content)]);
    assert_eq!(with(b"one"), with(b"two"), "content is not compared");
    assert_eq!(shared(&keys(b"one"), &keys(b"two")), 32);
    let mut scheduler = scheduler(&SchedulerConfig::new(64, 256), 2);
    let request =
        scheduler::NewRequest { extra_keys: keys(b"one"), ..request(&scheduler, "a", PROMPT.collect(), 1) };
    scheduler.handle().add_request(request).expect("it fits");
    scheduler.schedule().expect("a free set").expect("work");
    let row = scheduler.request_state("a").expect("running").row.expect("a row");
    assert_eq!(&*scheduler.multimodal_in_row(row)[0].content, b"one", "the worker gets it");
    assert!(scheduler.multimodal_in_row(row + 1).is_empty());
}

/// Blocks that several decodes fill in the same step are hashed two by two: each is found under its own tokens and keys.
#[test]
fn decodes_that_fill_blocks_together_are_found_one_by_one() {
    let salt = ExtraKeys::new(None, Some("x"), Vec::new());
    for (num_requests, block_size) in [(2, 16), (5, 16), (6, 4)] {
        let config = SchedulerConfig { block_size, ..SchedulerConfig::new(256, 256) };
        let mut scheduler = scheduler(&config, 2);
        let mut texts: Vec<(Vec<i32>, ExtraKeys)> = (0..num_requests)
            .map(|n| {
                let num_tokens = if n % 2 == 0 { 20 } else { 36 };
                let keys = if n == 4 { salt.clone() } else { ExtraKeys::default() };
                ((0..num_tokens).map(|at| 1000 * n + at).collect(), keys)
            })
            .collect();
        for (n, (prompt, extra_keys)) in texts.iter().enumerate() {
            let request = request(&scheduler, &n.to_string(), prompt.clone(), 100);
            let request = scheduler::NewRequest { extra_keys: extra_keys.clone(), ..request };
            scheduler.handle().add_request(request).expect("it fits");
        }
        for step in 0..60 {
            let output = scheduler.schedule().expect("a free set").expect("work");
            assert_eq!(output.num_sampled, num_requests as u32);
            let sampled: Vec<i32> = (0..num_requests).map(|n| 1000 * n + 100 + step).collect();
            scheduler.update_from_output(&output, TokenRows::column(&sampled)).expect("in flight");
            for ((tokens, _), token_id) in texts.iter_mut().zip(sampled) {
                tokens.push(token_id);
            }
        }
        for (tokens, keys) in &texts {
            let full = (tokens.len() as u32 - 1) / block_size * block_size;
            assert!(full >= 64, "blocks of the answer are among them");
            assert_eq!(scheduler.handle().prefix_hint(tokens, keys), full);
            let other = if *keys == salt { ExtraKeys::default() } else { salt.clone() };
            assert_eq!(scheduler.handle().prefix_hint(tokens, &other), 0);
        }
    }
}
