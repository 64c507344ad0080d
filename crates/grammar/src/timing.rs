//! What compiling a grammar and computing its masks costs, for measurements.

use std::{sync::Arc, time::Duration};

use scheduler::GrammarSpec;

use crate::{
    compile::{cache::Cache, compile},
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

/// Of one grammar and one text that obeys it: how much of the text the grammar says by itself.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct ForcedShare {
    /// Tokens of the text, as an output would have them.
    pub num_tokens: usize,
    /// Those that the grammar leaves no choice about.
    pub num_forced: usize,
    /// Rows of such tokens, one behind another.
    pub num_runs: usize,
    /// Whether all tokens were taken.
    pub is_taken: bool,
}

/// Follow a text whose forced tokens are taken as they come, and whose others are those that `encode` makes of the rest.
///
/// # Errors
/// Why the grammar cannot be enforced.
pub fn count_forced(
    vocabulary: &Vocabulary,
    spec: &GrammarSpec,
    text: &str,
    encode: impl Fn(&str) -> Vec<u32>,
) -> Result<ForcedShare, GrammarError> {
    let matcher = compile(spec, vocabulary.factory()?)?;
    let (eos, num_words) = (vocabulary.eos_token_ids(), vocabulary.num_mask_words());
    let mut matching = Matching::new(Some(matcher), None, eos, num_words, false);
    let mut share = ForcedShare::default();
    let mut rest = text;
    let mut own: Vec<u32> = Vec::new();
    while !rest.is_empty() {
        let forced = matching.forced().to_vec();
        let tokens = if forced.is_empty() {
            if own.is_empty() {
                own = encode(rest);
                own.reverse();
            }
            own.pop().into_iter().collect()
        } else {
            own.clear();
            share.num_forced += forced.len();
            share.num_runs += 1;
            forced
        };
        let bytes = vocabulary.bytes_of(&tokens)?;
        let left = rest.as_bytes().strip_prefix(&*bytes).filter(|_| !bytes.is_empty());
        let Some(left) = left.and_then(|left| std::str::from_utf8(left).ok()) else { return Ok(share) };
        rest = left;
        share.num_tokens += tokens.len();
        matching.advance(&tokens, eos);
        if matching.verdict() == Verdict::Rejected {
            return Ok(share);
        }
    }
    share.is_taken = true;
    Ok(share)
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
