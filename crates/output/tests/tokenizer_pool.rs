//! The pool against the tokenizer itself: same ids, short texts past long ones, nothing left of cancelled texts.

mod support;

use std::collections::HashMap;
use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};
use std::time::{Duration, Instant};

use output::{EncodedText, LONG_TEXT_BYTES, MAX_WAITING_TEXT_BYTES, OutputError, Tokenizer, TokenizerPool};

const PATIENCE: Duration = Duration::from_secs(60);

fn wait_until(what: &str, mut is_true: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(start.elapsed() < PATIENCE, "{what} did not happen");
        std::thread::yield_now();
    }
}

fn take_all(pool: &TokenizerPool, count: usize) -> Vec<EncodedText> {
    let mut done = Vec::new();
    wait_until("the end of all texts", || {
        done.extend(pool.take());
        done.len() >= count
    });
    done
}

fn long_text(tokenizer: &Tokenizer, bytes: usize) -> String {
    let text = "the rain in Spain ".repeat(bytes / 18 + 1);
    assert!(
        text.len() > LONG_TEXT_BYTES.min(bytes) && !tokenizer.encode(&text, false).expect("ids").is_empty()
    );
    text
}

#[test]
fn ids_are_those_of_the_tokenizer() {
    let tokenizer = support::byte_level();
    let num_told = Arc::new(AtomicUsize::new(0));
    let told = num_told.clone();
    let pool = TokenizerPool::new(tokenizer.clone(), 4, move || {
        told.fetch_add(1, Ordering::Relaxed);
    });
    assert_eq!(pool.num_threads(), 0, "no thread before the first text");
    let texts: Vec<String> = (0..40).map(|n| "héllo the 👋 ".repeat(1 + 97 * n)).collect();
    let expected: HashMap<u64, Vec<u32>> = texts
        .iter()
        .map(|text| {
            let ids = tokenizer.encode(text, true).expect("encodes");
            (pool.submit(text.clone(), true).expect("room"), ids)
        })
        .collect();
    for done in take_all(&pool, texts.len()) {
        assert_eq!(done.result.expect("encodes"), expected[&done.id]);
    }
    wait_until("the last word", || num_told.load(Ordering::Relaxed) == texts.len());
    assert_eq!(pool.num_waiting_bytes(), 0);
    assert!(pool.num_threads() <= 4);
}

#[test]
fn a_short_text_passes_a_row_of_long_ones() {
    let tokenizer = support::byte_level();
    let pool = TokenizerPool::new(tokenizer.clone(), 2, || {});
    let long = long_text(&tokenizer, 1 << 20);
    let long_ids: Vec<u64> = (0..6).map(|_| pool.submit(long.clone(), false).expect("room")).collect();
    let short = pool.submit("the".to_owned(), false).expect("room");
    let order: Vec<u64> = take_all(&pool, 7).iter().map(|done| done.id).collect();
    let place = order.iter().position(|&id| id == short).expect("it is done");
    // One long text may have been ahead of it, and a second one may end while it runs.
    assert!(place <= 2, "the short text came after {place} long ones of {}", long_ids.len());
}

#[test]
fn a_cancelled_text_leaves_nothing() {
    let tokenizer = support::byte_level();
    let pool = TokenizerPool::new(tokenizer.clone(), 2, || {});
    let long = long_text(&tokenizer, 1 << 20);
    let ids: Vec<u64> = (0..8).map(|_| pool.submit(long.clone(), false).expect("room")).collect();
    for &id in &ids {
        pool.cancel(id);
    }
    pool.cancel(12_345);
    wait_until("the texts to be forgotten", || pool.num_waiting_bytes() == 0);
    assert!(pool.take().is_empty());
    let again = pool.submit("the".to_owned(), false).expect("room");
    assert_eq!(take_all(&pool, 1)[0].id, again);
}

#[test]
fn more_than_may_wait_is_refused() {
    let tokenizer = support::byte_level();
    let pool = TokenizerPool::new(tokenizer.clone(), 2, || {});
    let huge = "x".repeat(MAX_WAITING_TEXT_BYTES + 1);
    let error = pool.submit(huge, false).expect_err("too much");
    assert!(matches!(error, OutputError::TokenizerBusy { limit: MAX_WAITING_TEXT_BYTES, .. }), "{error}");
    assert_eq!((pool.num_threads(), pool.num_waiting_bytes()), (0, 0));
    pool.submit("the".to_owned(), false).expect("room");
    assert_eq!(take_all(&pool, 1).len(), 1);
}

#[test]
fn a_pool_that_goes_ends_its_threads() {
    let tokenizer = support::byte_level();
    let alive = Arc::new(());
    let held = alive.clone();
    let pool = TokenizerPool::new(tokenizer.clone(), 3, move || {
        let _ = &held;
    });
    for _ in 0..6 {
        pool.submit(long_text(&tokenizer, 200_000), false).expect("room");
    }
    drop(pool);
    // The notifier goes with the last thread.
    wait_until("the end of the threads", || Arc::strong_count(&alive) == 1);
}
