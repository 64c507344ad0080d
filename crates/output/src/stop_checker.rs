//! Stop strings: looks for several at once, in new text only.
//!
//! Each request has one Aho-Corasick automaton, which its samples share. It reads each new byte once; each sample keeps
//! its state between calls. The state stands for the longest suffix of the text that begins a stop string, which is
//! exactly what must be held back while streaming.
//!
//! The match that ends first wins; if several end at the same place, the one that is first in the list. Every state is
//! at a character boundary of the text, because each stop string begins and ends at one.

use std::collections::HashMap;
use std::sync::Arc;

use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::noncontiguous::NFA;
use aho_corasick::{Anchored, MatchKind};

use crate::error::OutputError;

/// Most bytes of all stop strings of a request together; the automaton takes about 40 bytes for each.
pub const MAX_STOP_BYTES: usize = 64 << 10;

/// Stop strings, prepared for a search in any number of texts. With many of them this takes milliseconds and megabytes,
/// so it is done once for all samples of a request.
#[derive(Debug)]
pub struct StopStrings {
    texts: Vec<String>,
    automaton: NFA,
    start: StateID,
    /// For each state but the start: how many bytes at the end of the text may still begin a stop string.
    num_undecided: HashMap<StateID, usize>,
}

impl StopStrings {
    /// Prepare the search for any of `stop`.
    ///
    /// # Errors
    /// A stop string is empty, or all together are too long.
    pub fn new(stop: Vec<String>) -> Result<Self, OutputError> {
        if let Some(index) = stop.iter().position(String::is_empty) {
            return Err(OutputError::EmptyStopString { index });
        }
        let num_bytes = stop.iter().map(String::len).sum();
        let too_long = || OutputError::StopStringsTooLong { num_bytes, limit: MAX_STOP_BYTES };
        if num_bytes > MAX_STOP_BYTES {
            return Err(too_long());
        }
        let automaton = NFA::builder()
            .match_kind(MatchKind::Standard)
            // Only the start state, in which nearly all of the text is read, gets a table. No prefilter: texts are a
            // few bytes long, and each request builds an automaton.
            .dense_depth(1)
            .prefilter(false)
            .build(&stop)
            .map_err(|_| too_long())?;
        let start = automaton.start_state(Anchored::No).map_err(|_| too_long())?;
        let num_undecided = undecided_by_state(&automaton, start, &stop);
        Ok(Self { texts: stop, automaton, start, num_undecided })
    }

    /// The stop string with an index that [`StopChecker::push`] returned.
    #[must_use]
    pub fn text(&self, index: usize) -> Option<&str> {
        self.texts.get(index).map(String::as_str)
    }
}

/// Finds stop strings in a text that grows.
#[derive(Debug)]
pub struct StopChecker {
    stop: Arc<StopStrings>,
    state: StateID,
    include_stop_str_in_output: bool,
    /// Text that was not released yet.
    held: String,
}

impl StopChecker {
    /// Start at the beginning of a text. `include_stop_str_in_output`: a stop string that is found stays in the text.
    #[must_use]
    pub fn new(stop: Arc<StopStrings>, include_stop_str_in_output: bool) -> Self {
        let state = stop.start;
        Self { stop, state, include_stop_str_in_output, held: String::new() }
    }

    /// The stop strings that it looks for.
    #[must_use]
    pub fn stop(&self) -> &StopStrings {
        &self.stop
    }

    /// Take new text, and append to `released` what can be shown. Returns the index of the stop string that was found;
    /// the text is then cut, and the search is over.
    ///
    /// If `is_armed` is false (fewer than `min_tokens` outputs), a stop string that ends in this text does not count,
    /// but one that begins in it may.
    pub fn push(&mut self, new_text: &str, is_armed: bool, released: &mut String) -> Option<usize> {
        let offset = self.held.len();
        self.held.push_str(new_text);
        for (index, &byte) in new_text.as_bytes().iter().enumerate() {
            self.state = self.stop.automaton.next_state(Anchored::No, self.state, byte);
            if is_armed && self.stop.automaton.is_match(self.state) {
                return Some(self.cut(offset + index + 1, released));
            }
        }
        let num_held = if self.include_stop_str_in_output {
            0
        } else {
            self.stop.num_undecided.get(&self.state).copied().unwrap_or(0)
        };
        let num_released = self.held.len().saturating_sub(num_held);
        released.push_str(&self.held[..num_released]);
        self.held.drain(..num_released);
        None
    }

    /// The text has ended without a match: release what was held back.
    pub fn finish(&mut self, released: &mut String) {
        released.push_str(&self.held);
        self.held.clear();
    }

    /// End the search at a match: release the text before it (or including it) and drop the rest.
    fn cut(&mut self, end: usize, released: &mut String) -> usize {
        let patterns = (0..self.stop.automaton.match_len(self.state))
            .map(|i| self.stop.automaton.match_pattern(self.state, i));
        // A matching state has at least one pattern.
        let first = patterns.min().unwrap_or_default();
        let length = self.stop.automaton.pattern_len(first);
        let end = if self.include_stop_str_in_output { end } else { end.saturating_sub(length) };
        released.push_str(&self.held[..end]);
        self.held.clear();
        first.as_usize()
    }
}

/// For every state, the length of the longest suffix that can still grow into a stop string. This is the state's depth;
/// at the end of a stop string that no other one extends, it is what its shorter suffixes say.
fn undecided_by_state(automaton: &NFA, start: StateID, stop: &[String]) -> HashMap<StateID, usize> {
    let step = |state, &byte| automaton.next_state(Anchored::No, state, byte);
    let mut num_undecided = HashMap::new();
    for pattern in stop {
        let mut state = start;
        for (depth, byte) in pattern.as_bytes().iter().enumerate() {
            if depth > 0 {
                num_undecided.insert(state, depth);
            }
            state = step(state, byte);
        }
    }
    let mut by_length: Vec<&String> = stop.iter().collect();
    by_length.sort_by_key(|pattern| pattern.len());
    for pattern in by_length {
        let end = pattern.as_bytes().iter().fold(start, step);
        if !num_undecided.contains_key(&end) {
            let suffix = pattern.as_bytes()[1..].iter().fold(start, step);
            if let Some(&undecided) = num_undecided.get(&suffix) {
                num_undecided.insert(end, undecided);
            }
        }
    }
    num_undecided
}
