//! Grammars, as far as the scheduler knows them: what a request asks for is carried, who came and left with one is told,
//! and which tokens it has so far. What a grammar means, `crates/grammar` knows.

use std::sync::Arc;

use crate::{
    output::{RequestKey, SchedulerOutput},
    request::Request,
    scheduler::Scheduler,
};

/// The language of a grammar.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum GrammarKind {
    /// A JSON schema, as JSON text.
    JsonSchema = 0,
    /// Any JSON object; there is no text.
    JsonObject = 1,
    /// A regular expression that the whole output matches.
    Regex = 2,
    /// Texts of which the output is one, as a JSON array.
    Choice = 3,
    /// A context-free grammar in Lark or in GBNF.
    Grammar = 4,
}

impl GrammarKind {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 5] = [Self::JsonSchema, Self::JsonObject, Self::Regex, Self::Choice, Self::Grammar];
}

/// What the output of a request must be. Plain data: it travels with the request and is compiled where it runs.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct GrammarSpec {
    /// The language of `text`.
    pub kind: GrammarKind,
    /// The grammar.
    pub text: Box<str>,
    /// JSON: a regular expression for the whitespace between tokens of the language.
    pub whitespace_pattern: Option<Box<str>>,
    /// JSON: no whitespace at all.
    pub disable_any_whitespace: bool,
    /// JSON: an object has no other properties than those of its schema, where the schema does not say.
    pub disable_additional_properties: bool,
}

impl GrammarSpec {
    /// A grammar without options.
    #[must_use]
    pub fn new(kind: GrammarKind, text: &str) -> Self {
        Self {
            kind,
            text: text.into(),
            whitespace_pattern: None,
            disable_any_whitespace: false,
            disable_additional_properties: false,
        }
    }
}

/// A request with a grammar came or left, in this order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GrammarNews {
    /// It waits for `EngineHandle::grammar_ready`.
    Arrived {
        /// Whose grammar.
        key: RequestKey,
        /// The grammar.
        spec: Arc<GrammarSpec>,
        /// EOS does not end it.
        ignores_eos: bool,
    },
    /// Finished, aborted or failed.
    Left(RequestKey),
}

/// A row of a step whose token must obey a grammar.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConstrainedSample {
    /// Place among the step's samples.
    pub place: u32,
    /// Whose token.
    pub key: RequestKey,
}

impl Scheduler {
    /// Who came and left with a grammar since the last call.
    pub fn take_grammar_news(&mut self) -> Vec<GrammarNews> {
        std::mem::take(&mut self.grammar_news)
    }

    /// The samples of a step in flight that obey a grammar, those of requests that have left since aside.
    #[must_use]
    pub fn constrained_samples(&self, output: &SchedulerOutput) -> Vec<ConstrainedSample> {
        let step = self.steps.of(output).filter(|_| output.num_structured_output_reqs > 0);
        let Some(step) = step else { return Vec::new() };
        let sampled = step.entries.iter().filter(|entry| entry.sampled).zip(0..);
        let live = sampled.filter_map(|(entry, place)| {
            let request = &self.requests[entry.tenant.slot as usize];
            let obeys = request.epoch == entry.tenant.epoch && request.cold.grammar.is_some();
            obeys.then_some(ConstrainedSample { place, key: request.key })
        });
        live.collect()
    }

    /// The known output tokens of a live request, the first `start` aside.
    #[must_use]
    pub fn output_tokens_from(&self, key: RequestKey, start: usize) -> Vec<i32> {
        let Some(slot) = self.requests.slot_of_key(key) else { return Vec::new() };
        let request: &Request = &self.requests[slot as usize];
        let start = request.cold.num_prompt_tokens as usize + start;
        let mut tokens = vec![0; (request.num_tokens as usize).saturating_sub(start)];
        request.copy_tokens(start, &mut tokens);
        tokens
    }
}
