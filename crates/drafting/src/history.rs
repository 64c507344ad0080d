//! `History`: what one request's drafts are made of.

use crate::{
    config::{DrafterConfig, DraftingMethod},
    estimate::Estimate,
    ngram::NgramIndex,
    prediction::Prediction,
    suffix::SuffixIndex,
};

#[derive(Clone, Debug)]
enum Index {
    Ngram(NgramIndex),
    Suffix(SuffixIndex),
}

/// The tokens of a request, indexed, and how right its drafts were. The tokens themselves stay with the request.
#[derive(Clone, Debug)]
pub struct History {
    index: Index,
    /// Of what the index says.
    estimate: Estimate,
    prediction: Option<Prediction>,
    /// What was guessed last, whether it ran or not, and how many tokens there were then.
    guessed: Vec<i32>,
    guessed_at: usize,
    /// Whether that was out of the prediction.
    is_predicted: bool,
}

impl History {
    /// The history of a request that holds its prompt. `num_tokens` is how many it will about have, `prediction` what
    /// its caller expects as the answer (empty: nothing).
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
        };
        match &mut index {
            Index::Ngram(ngram) => ngram.append(prompt),
            Index::Suffix(suffix) => suffix.append(prompt),
        }
        Self {
            index,
            estimate: Estimate::default(),
            prediction: Prediction::new(prediction, prompt.len(), seed),
            guessed: Vec::new(),
            guessed_at: 0,
            is_predicted: false,
        }
    }

    /// How often guesses were right lately that came from where the last one did.
    #[must_use]
    pub fn estimate(&self) -> Estimate {
        match &self.prediction {
            Some(prediction) if self.is_predicted => prediction.estimate,
            _ => self.estimate,
        }
    }

    /// Whether the last guesses are what the caller predicts.
    #[must_use]
    pub fn is_predicted(&self) -> bool {
        self.is_predicted
    }

    /// Append at most `limit` guesses of what follows `tokens` to `drafts`: what the caller predicts, while the answer
    /// follows that, else what stood behind the same tokens before.
    pub fn propose(&mut self, tokens: &[i32], limit: usize, drafts: &mut Vec<i32>) {
        self.learn(tokens);
        match &mut self.index {
            Index::Ngram(ngram) => ngram.append(tokens),
            Index::Suffix(suffix) => suffix.append(tokens),
        }
        let first = drafts.len();
        if let Some(prediction) = &mut self.prediction {
            drafts.extend(prediction.following(tokens).iter().take(limit));
        }
        self.is_predicted = drafts.len() > first;
        if !self.is_predicted {
            match &self.index {
                Index::Ngram(ngram) => drafts.extend(ngram.following(tokens).iter().take(limit)),
                Index::Suffix(suffix) => suffix.propose(tokens, limit, drafts),
            }
        }
        self.guessed.clear();
        self.guessed.extend_from_slice(&drafts[first..]);
        self.guessed_at = tokens.len();
    }

    /// Compare what was guessed last with what came, also where the guess was not run.
    fn learn(&mut self, tokens: &[i32]) {
        let came = tokens.get(self.guessed_at..).unwrap_or_default();
        let known = came.len().min(self.guessed.len());
        let right =
            self.guessed[..known].iter().zip(came).take_while(|(guess, token_id)| guess == token_id).count();
        if known > 0 {
            let estimate = match &mut self.prediction {
                Some(prediction) if self.is_predicted => &mut prediction.estimate,
                _ => &mut self.estimate,
            };
            estimate.observe(right as u32, right < known);
        }
    }
}
