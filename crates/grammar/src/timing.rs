//! What compiling a grammar and computing its masks costs, for measurements.

use std::{sync::Arc, time::Duration};

use scheduler::GrammarSpec;

use crate::{
    cache::Cache,
    compile::compile,
    error::GrammarError,
    matcher::Matcher,
    sample::{Matching, Verdict},
    thread_time::thread_time,
    vocabulary::Vocabulary,
};

/// Of one grammar and one text that obeys it, in processor time of the thread: what else runs on the machine is left out.
#[derive(Debug)]
pub struct MaskTimes {
    /// Until there was a matcher, its first mask computed.
    pub compile: Duration,
    /// To take each token, the next mask computed, by the first request with this grammar.
    pub masks: Vec<Duration>,
    /// To take each token, the next mask computed, by the second request with it.
    pub masks_again: Vec<Duration>,
    /// Whether all tokens were taken.
    pub is_taken: bool,
}

/// Compile a grammar for a vocabulary and follow a text token by token, as an engine does for two requests after another.
///
/// # Errors
/// Why it cannot be enforced.
pub fn time_masks(
    vocabulary: &Vocabulary,
    spec: &GrammarSpec,
    tokens: &[u32],
) -> Result<MaskTimes, GrammarError> {
    let factory = vocabulary.factory()?;
    let began = thread_time();
    let matcher = compile(spec, factory)?;
    let compile = thread_time().saturating_sub(began);
    let (mut cache, spec) = (Cache::default(), Arc::new(spec.clone()));
    let first = matcher.deep_clone();
    cache.put(spec.clone(), matcher);
    let (masks, is_taken, first) = follow(vocabulary, first, tokens);
    if let Some(first) = first {
        cache.learn(&spec, first);
    }
    let masks_again = cache.get(&spec).map_or_else(Vec::new, |second| follow(vocabulary, second, tokens).0);
    Ok(MaskTimes { compile, masks, masks_again, is_taken })
}

/// The time of each token, whether all were taken, and the matcher that has taken them.
fn follow(
    vocabulary: &Vocabulary,
    matcher: Matcher,
    tokens: &[u32],
) -> (Vec<Duration>, bool, Option<Matcher>) {
    let (eos, num_words) = (vocabulary.eos_token_ids(), vocabulary.num_mask_words());
    let mut matching = Matching::new(Some(matcher), None, eos, num_words, false);
    let mut masks = Vec::with_capacity(tokens.len());
    for token in tokens {
        let began = thread_time();
        matching.advance(std::slice::from_ref(token), eos);
        masks.push(thread_time().saturating_sub(began));
    }
    (masks, matching.verdict() != Verdict::Rejected, matching.into_matcher())
}
