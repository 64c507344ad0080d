//! `History`: the sources of one request's drafts.

use crate::{
    archive::{Archive, PIECE},
    beliefs::{Beliefs, Kind, NUM_FIRST, NUM_KINDS},
    config::{DrafterConfig, DraftingMethod},
    credit::Credit,
    estimate::{Belief, Estimate},
    matches::SuffixLimits,
    ngram::NgramIndex,
    prediction::Prediction,
    suffix::{MatchedBy, SuffixIndex},
};

/// After this many tokens without a match, search only once in this many tokens.
const PATIENCE: u32 = 8;
const STRIDE: usize = 4;

#[derive(Clone, Debug)]
enum Index {
    Ngram(NgramIndex),
    Suffix(SuffixIndex),
    /// A second model guesses.
    Model,
}

/// Stands for a guess that a second model makes when the step runs.
pub const UNKNOWN_GUESS: i32 = -1;

/// After this many tokens without a verified guess of the second model, forget how good its guesses were: they may have
/// become better.
const FORGOTTEN_AFTER: usize = 512;

impl Index {
    fn append(&mut self, tokens: &[i32]) {
        match self {
            Self::Ngram(ngram) => ngram.append(tokens),
            Self::Suffix(suffix) => suffix.append(tokens),
            Self::Model => {}
        }
    }
}

/// An index of a request's tokens, and how often its drafts were right. The request itself keeps the tokens.
#[derive(Clone, Debug)]
pub struct History {
    index: Index,
    /// Whether the controller asks how often guesses are right.
    learns: bool,
    /// How often guesses of each kind were right.
    estimates: [Estimate; NUM_KINDS],
    /// For each kind, how many guesses have counted for other requests.
    num_counted: [u8; NUM_KINDS],
    prediction: Option<Prediction>,
    /// The last guesses, whether they ran or not, and the number of tokens at that time.
    guessed: Vec<i32>,
    guessed_at: usize,
    kind: Kind,
    /// The share of right guesses that was assumed for that kind before anything was known.
    prior: f32,
    /// Separates requests that must not learn from each other.
    seed: u64,
    num_prompt_tokens: usize,
    /// Tokens that need not be archived any more: the prompt, and the archived part of the answer.
    num_archived: usize,
    /// How many searches in a row found nothing.
    num_misses: u32,
    /// Number of tokens when guesses of a second model were last verified.
    verified_at: usize,
    pub(crate) credit: Credit,
}

impl History {
    /// Make the history of a request with its prompt. `num_tokens` is about how many it will have, `prediction` the
    /// answer that its caller expects (may be empty).
    #[must_use]
    pub fn new(
        config: &DrafterConfig,
        prompt: &[i32],
        prediction: &[i32],
        num_tokens: usize,
        seed: u64,
    ) -> Self {
        let mut index = match config.method {
            DraftingMethod::Ngram { min, max } => Index::Ngram(NgramIndex::new(min, max, seed)),
            DraftingMethod::Suffix(limits) => Index::Suffix(SuffixIndex::new(limits, num_tokens, seed)),
            DraftingMethod::Model => Index::Model,
        };
        index.append(prompt);
        Self {
            index,
            learns: config.adaptive,
            estimates: [Estimate::default(); NUM_KINDS],
            num_counted: [0; NUM_KINDS],
            prediction: Prediction::new(prediction, prompt.len(), seed),
            guessed: Vec::new(),
            guessed_at: 0,
            kind: Kind::default(),
            prior: 0.0,
            seed,
            num_prompt_tokens: prompt.len(),
            num_archived: prompt.len(),
            num_misses: 0,
            verified_at: prompt.len(),
            credit: Credit::default(),
        }
    }

    /// How likely the last guesses are to be right, if the configuration is `adaptive`.
    #[must_use]
    pub fn belief(&self) -> Belief {
        self.estimates[self.kind as usize].belief(self.prior)
    }

    /// Whether the last guesses come from the caller's prediction.
    #[must_use]
    pub fn is_predicted(&self) -> bool {
        self.kind == Kind::Prediction
    }

    /// Append to `drafts` at most `limit` guesses of what follows `tokens`: the caller's prediction while the answer
    /// follows it; else what followed the same tokens before in this request; else what followed them in other answers.
    /// With `is_choosy`, append no more than are likely to be reached. `beliefs` gives the assumptions about new
    /// requests, and learns from this one.
    pub fn propose(
        &mut self,
        tokens: &[i32],
        limit: usize,
        is_choosy: bool,
        archive: Option<&Archive>,
        beliefs: &mut Beliefs,
        drafts: &mut Vec<i32>,
    ) {
        if self.learns {
            self.learn(tokens, beliefs);
        }
        self.index.append(tokens);
        let first = drafts.len();
        let may_search = self.may_search(tokens.len());
        if let Some(prediction) = &mut self.prediction {
            drafts.extend(prediction.following(tokens).iter().take(limit));
            self.take_for(Kind::Prediction, beliefs);
            drafts.truncate(first + self.within(limit, is_choosy));
        }
        if drafts.len() == first && may_search {
            let kind = match &mut self.index {
                Index::Ngram(ngram) => {
                    drafts.extend(ngram.following(tokens).iter().take(limit));
                    Kind::Some
                }
                Index::Suffix(suffix) => match suffix.propose(tokens, limit, drafts) {
                    MatchedBy::Few => Kind::Few,
                    MatchedBy::Some => Kind::Some,
                    MatchedBy::Many => Kind::Many,
                },
                Index::Model => {
                    if tokens.len() >= self.verified_at + FORGOTTEN_AFTER {
                        self.estimates[Kind::Model as usize] = Estimate::default();
                        self.verified_at = tokens.len();
                    }
                    drafts.resize(first + limit, UNKNOWN_GUESS);
                    Kind::Model
                }
            };
            self.take_for(kind, beliefs);
            drafts.truncate(first + self.within(limit, is_choosy));
        }
        if (drafts.len() == first || self.kind == Kind::Few)
            && may_search
            && let Some(archive) = archive
        {
            self.propose_others(archive, tokens, limit, is_choosy, beliefs, first, drafts);
        }
        self.num_misses = if drafts.len() == first { self.num_misses.saturating_add(1) } else { 0 };
        if self.learns {
            self.guessed.clear();
            self.guessed.extend_from_slice(&drafts[first..]);
        }
        self.guessed_at = tokens.len();
    }

    /// Replace the guesses in `drafts`, from `first` on, by those from other answers, if there are any: a match of three
    /// tokens there is worth more than a match of two in this request.
    #[expect(clippy::too_many_arguments, reason = "what `propose` was called with")]
    fn propose_others(
        &mut self,
        archive: &Archive,
        tokens: &[i32],
        limit: usize,
        is_choosy: bool,
        beliefs: &Beliefs,
        first: usize,
        drafts: &mut Vec<i32>,
    ) {
        let Some(limits) = self.limits() else { return };
        let num_weak = drafts.len() - first;
        let before = std::mem::replace(&mut self.kind, Kind::Archive);
        self.take_for(Kind::Archive, beliefs);
        archive.propose(self.seed, &limits, tokens, self.within(limit, is_choosy), drafts);
        if num_weak == 0 || drafts.len() > first + num_weak {
            drafts.drain(first..first + num_weak);
        } else {
            self.take_for(before, beliefs);
        }
    }

    /// Record a step that ran guesses of the second model: `num_right` were right, and if `missed`, the next one was
    /// wrong. For other kinds this does nothing, because the guesses are known here.
    pub fn verify(&mut self, num_right: u32, missed: bool) {
        if self.kind == Kind::Model {
            self.estimates[self.kind as usize].observe(num_right, missed);
            self.verified_at = self.guessed_at;
        }
    }

    /// Note the kind of the guesses. Guesses after a longer match are assumed to be right at least as often as those
    /// after shorter matches of the same text.
    fn take_for(&mut self, kind: Kind, beliefs: &Beliefs) {
        self.kind = kind;
        if !self.learns {
            return;
        }
        self.prior = beliefs.share(kind);
        if let Kind::Some | Kind::Many = kind
            && let shorter = &self.estimates[..kind as usize]
            && let Some(known) = shorter.iter().rfind(|estimate| !estimate.is_new())
        {
            self.prior = self.prior.max(known.belief(beliefs.share(Kind::Few)).acceptance());
        }
    }

    /// How many of `limit` guesses are likely to be reached.
    fn within(&self, limit: usize, is_choosy: bool) -> usize {
        if is_choosy { limit.min(self.belief().reach()) } else { limit }
    }

    /// Compare the last guesses with the tokens that came, even if the guesses did not run.
    fn learn(&mut self, tokens: &[i32], beliefs: &mut Beliefs) {
        if self.kind == Kind::Model {
            return; // They were not known here.
        }
        let came = tokens.get(self.guessed_at..).unwrap_or_default();
        let known = came.len().min(self.guessed.len());
        if known > 0 {
            let right = common_prefix(&self.guessed[..known], &came[..known]);
            let kind = self.kind as usize;
            self.estimates[kind].observe(right as u32, right < known);
            if self.num_counted[kind] < NUM_FIRST {
                self.num_counted[kind] += 1;
                beliefs.observe(self.kind, right > 0);
            }
        }
    }

    /// Archive what was answered since the last call: whole pieces, and with `is_over` also the rest. What the same
    /// request repeats from its own answer is archived already and left out.
    #[inline]
    pub fn archive(&mut self, archive: &mut Archive, tokens: &[i32], is_over: bool) {
        if tokens.len() >= self.num_archived + if is_over { 1 } else { PIECE } {
            self.archive_pieces(archive, tokens, is_over);
        }
    }

    fn archive_pieces(&mut self, archive: &mut Archive, tokens: &[i32], is_over: bool) {
        while tokens.len() >= self.num_archived + if is_over { 1 } else { PIECE } {
            let (first, end) = (self.num_archived, tokens.len().min(self.num_archived + PIECE));
            let is_there = match &self.index {
                Index::Suffix(suffix) => suffix.repeats(first, end, self.num_prompt_tokens),
                Index::Ngram(_) | Index::Model => false,
            };
            if !is_there {
                archive.add(self.seed, tokens, first);
            }
            self.num_archived += PIECE;
        }
    }

    /// Whether to search after this many tokens: after many misses, only now and then.
    fn may_search(&self, num_tokens: usize) -> bool {
        self.num_misses < PATIENCE || num_tokens.is_multiple_of(STRIDE)
    }

    fn limits(&self) -> Option<SuffixLimits> {
        match &self.index {
            Index::Suffix(suffix) => Some(suffix.limits()),
            Index::Ngram(_) | Index::Model => None,
        }
    }
}

/// How many leading tokens of two texts of the same length are equal.
fn common_prefix(one: &[i32], other: &[i32]) -> usize {
    if one == other {
        return one.len();
    }
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}
