//! `BeamSearch`: decides which beams of a request continue and which have ended, given the likeliest tokens after each.
//!
//! The rules are those of transformers' `generate(num_beams=…, early_stopping=False)`. Of all continuations, the best
//! `(1 + stop ids, at least 2) · width` are looked at, so that `width` of them continue however many of the others end.
//! A continuation that ends counts only if it is among the best `width`. Its score is the sum of its log-probabilities
//! divided by `length ^ length_penalty`, where the length is that of its output. The search is over when `width` beams
//! have ended and the best that continues, at its present length, scores no better than the worst of these.

/// The place of a request among the beams of its search.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Seat {
    pub(crate) group: u32,
    /// Number of the beam; 0 is the leader.
    pub(crate) place: u32,
}

/// The likeliest tokens after a beam with their log-probabilities, likeliest first.
pub(crate) type Candidates = Vec<(i32, f32)>;

/// A token of a beam, as the front end receives it.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct BeamToken {
    pub(crate) logprob: f32,
    /// Number of tokens that were likelier after the same beam, plus one.
    pub(crate) rank: u32,
}

/// A beam that continues.
#[derive(Clone, Debug, Default)]
struct Beam {
    /// Sum of its log-probabilities.
    score: f64,
    tokens: Vec<BeamToken>,
}

/// A beam that has ended.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Hypothesis {
    /// Including the length penalty.
    pub(crate) score: f64,
    /// Its output, including the token that ended it.
    pub(crate) token_ids: Vec<i32>,
    /// Data for each of these tokens.
    pub(crate) tokens: Vec<BeamToken>,
    /// Whether its last token ends an output; otherwise it has reached the length limit.
    pub(crate) is_stopped: bool,
}

/// The new beam of a place: the beam of `parent` with one more token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Continuation {
    pub(crate) parent: usize,
    pub(crate) token_id: i32,
}

/// The result of a round.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Round {
    /// The new beam of each place. A parent with children keeps its place with one of them.
    GoOn(Vec<Continuation>),
    /// The best beams are known.
    Over,
    /// There were too few candidates to continue, or their log-probabilities were not numbers.
    Stuck,
}

/// See the module docs.
#[derive(Debug)]
pub(crate) struct BeamSearch {
    width: usize,
    length_penalty: f64,
    /// Most tokens of an output.
    max_tokens: u32,
    /// Tokens that end an output.
    stop_token_ids: Vec<i32>,
    /// The beams by place: one before the first round, then `width`.
    beams: Vec<Beam>,
    /// Best first, at most `width`.
    ended: Vec<Hypothesis>,
    /// Tokens of each beam.
    num_tokens: u32,
}

/// A continuation with its score.
struct Scored {
    parent: usize,
    token_id: i32,
    token: BeamToken,
    score: f64,
}

impl BeamSearch {
    pub(crate) fn new(width: u32, length_penalty: f32, max_tokens: u32, stop_token_ids: Vec<i32>) -> Self {
        Self {
            width: width as usize,
            length_penalty: f64::from(length_penalty),
            max_tokens,
            stop_token_ids,
            beams: vec![Beam::default()],
            ended: Vec::new(),
            num_tokens: 0,
        }
    }

    /// Number of beams that continue and need candidates.
    pub(crate) fn num_beams(&self) -> usize {
        self.beams.len()
    }

    /// Run one round. `candidates` are those of each beam; `output_of` returns the tokens of the beam in a place.
    pub(crate) fn advance(
        &mut self,
        candidates: &[Candidates],
        output_of: impl Fn(usize) -> Vec<i32>,
    ) -> Round {
        let num_kept = num_candidates(self.width, self.stop_token_ids.len());
        let best = self.best(candidates, num_kept);
        if best.iter().any(|scored| scored.score.is_nan()) {
            return Round::Stuck;
        }
        self.num_tokens += 1;
        let is_last = self.num_tokens >= self.max_tokens;
        let mut going_on = Vec::with_capacity(self.width);
        for (place, scored) in best.into_iter().enumerate() {
            let is_stopped = self.stop_token_ids.contains(&scored.token_id);
            if is_stopped || is_last {
                if place < self.width {
                    self.end(&scored, is_stopped, &output_of);
                }
            } else if going_on.len() < self.width {
                going_on.push(scored);
            }
        }
        if is_last || self.is_decided(&going_on) {
            return if self.ended.is_empty() { Round::Stuck } else { Round::Over };
        }
        if going_on.len() < self.width {
            return Round::Stuck;
        }
        Round::GoOn(self.settle(going_on))
    }

    /// Take the beams that have ended, best first.
    pub(crate) fn take_ended(&mut self) -> Vec<Hypothesis> {
        std::mem::take(&mut self.ended)
    }

    /// The best continuations of all beams, best first; among equals, that of the first beam.
    fn best(&self, candidates: &[Candidates], num_kept: usize) -> Vec<Scored> {
        let mut all: Vec<Scored> = Vec::with_capacity(candidates.len() * num_kept);
        for (parent, (beam, row)) in self.beams.iter().zip(candidates).enumerate() {
            for (rank, &(token_id, logprob)) in (1..).zip(row.iter().take(num_kept)) {
                let score = beam.score + f64::from(logprob);
                all.push(Scored { parent, token_id, token: BeamToken { logprob, rank }, score });
            }
        }
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all.truncate(num_kept);
        all
    }

    /// End a continuation; it is kept if it is better than one of those that have ended.
    fn end(&mut self, scored: &Scored, is_stopped: bool, output_of: impl Fn(usize) -> Vec<i32>) {
        let score = scored.score / f64::from(self.num_tokens).powf(self.length_penalty);
        let place = self.ended.partition_point(|other| other.score >= score);
        if place >= self.width {
            return;
        }
        let mut token_ids = output_of(scored.parent);
        token_ids.push(scored.token_id);
        let mut tokens = self.beams[scored.parent].tokens.clone();
        tokens.push(scored.token);
        self.ended.insert(place, Hypothesis { score, token_ids, tokens, is_stopped });
        self.ended.truncate(self.width);
    }

    /// Whether no continuing beam can become better than those that have ended.
    fn is_decided(&self, going_on: &[Scored]) -> bool {
        let Some(worst) = self.ended.get(self.width - 1) else { return false };
        let Some(best) = going_on.first() else { return true };
        best.score / f64::from(self.num_tokens).powf(self.length_penalty) <= worst.score
    }

    /// Give each continuing beam a place: the first child takes its parent's, the others take those of beams without
    /// children.
    fn settle(&mut self, going_on: Vec<Scored>) -> Vec<Continuation> {
        let mut children: Vec<Option<Scored>> = (0..self.width).map(|_| None).collect();
        let mut others = Vec::new();
        for scored in going_on {
            if children[scored.parent].is_none() {
                let place = scored.parent;
                children[place] = Some(scored);
            } else {
                others.push(scored);
            }
        }
        let mut others = others.into_iter();
        let children: Vec<Scored> =
            children.into_iter().filter_map(|child| child.or_else(|| others.next())).collect();
        let mut beams = Vec::with_capacity(self.width);
        for child in &children {
            let mut tokens = Vec::with_capacity(self.num_tokens as usize + 16);
            tokens.extend_from_slice(&self.beams[child.parent].tokens);
            tokens.push(child.token);
            beams.push(Beam { score: child.score, tokens });
        }
        self.beams = beams;
        children.iter().map(|child| Continuation { parent: child.parent, token_id: child.token_id }).collect()
    }
}

/// Number of candidates per beam that the search looks at.
pub(crate) fn num_candidates(width: usize, num_stop_token_ids: usize) -> usize {
    width * (1 + num_stop_token_ids).max(2)
}

#[cfg(test)]
mod tests {
    use super::{BeamSearch, Continuation, Round};

    const EOS: i32 = 9;

    fn search(width: u32, length_penalty: f32, max_tokens: u32) -> BeamSearch {
        BeamSearch::new(width, length_penalty, max_tokens, vec![EOS])
    }

    fn go_on(continuations: &[(usize, i32)]) -> Round {
        let made = continuations.iter().map(|&(parent, token_id)| Continuation { parent, token_id });
        Round::GoOn(made.collect())
    }

    #[test]
    fn the_first_child_keeps_its_parents_place() {
        let mut search = search(2, 1.0, 8);
        let rows = [vec![(1, -0.5), (2, -1.0), (3, -2.0), (4, -3.0)]];
        assert_eq!(search.advance(&rows, |_| vec![]), go_on(&[(0, 1), (0, 2)]));
        // Both that continue come from the second beam, which keeps the better one.
        let rows = [
            vec![(1, -5.0), (2, -6.0), (3, -7.0), (4, -8.0)],
            vec![(5, -0.1), (6, -0.2), (7, -4.0), (8, -5.0)],
        ];
        assert_eq!(search.advance(&rows, |_| vec![]), go_on(&[(1, 6), (1, 5)]));
    }

    #[test]
    fn what_ends_counts_only_among_the_best() {
        let mut search = search(2, 0.0, 8);
        // The end is third among the first beam's candidates: not among the best two.
        let rows = [vec![(1, -0.5), (2, -1.0), (EOS, -2.0), (4, -3.0)]];
        assert_eq!(search.advance(&rows, |_| vec![]), go_on(&[(0, 1), (0, 2)]));
        assert!(search.take_ended().is_empty());
        let rows = [
            vec![(EOS, -0.1), (2, -0.7), (3, -4.0), (4, -4.0)],
            vec![(5, -0.4), (6, -3.0), (7, -4.0), (8, -5.0)],
        ];
        assert_eq!(search.advance(&rows, |_| vec![1]), go_on(&[(0, 2), (1, 5)]));
        let [ended] = &search.take_ended()[..] else { panic!("one has ended") };
        assert_eq!((&ended.token_ids[..], ended.is_stopped), (&[1, EOS][..], true));
        assert_eq!(ended.tokens.iter().map(|token| token.rank).collect::<Vec<_>>(), [1, 1]);
    }

    #[test]
    fn the_search_is_over_when_nothing_can_become_better() {
        // One beam: the end scores -0.5; the continuation scores -0.6, and no better with its length of one.
        let mut over = search(1, 1.0, 8);
        assert_eq!(over.advance(&[vec![(EOS, -0.5), (2, -0.6)]], |_| vec![]), Round::Over);
        // The search continues, because a beam may still become better than the one that has ended.
        let mut goes_on = search(2, 1.0, 8);
        let rows = [vec![(EOS, -3.0), (2, -3.1), (3, -3.2), (4, -9.0)]];
        assert_eq!(goes_on.advance(&rows, |_| vec![]), go_on(&[(0, 2), (0, 3)]));
    }

    #[test]
    fn the_longest_output_ends_all() {
        let mut search = search(2, 2.0, 1);
        let rows = [vec![(1, -0.5), (2, -1.0), (3, -2.0), (4, -3.0)]];
        assert_eq!(search.advance(&rows, |_| vec![]), Round::Over);
        let ended = search.take_ended();
        assert_eq!(ended.iter().map(|one| one.token_ids[0]).collect::<Vec<_>>(), [1, 2]);
        assert!(ended.iter().all(|one| !one.is_stopped));
    }

    #[test]
    fn too_few_candidates_and_no_numbers_are_noticed() {
        assert_eq!(search(2, 1.0, 8).advance(&[vec![(1, -0.5)]], |_| vec![]), Round::Stuck);
        let rows = [vec![(1, f32::NAN), (2, -1.0), (3, -2.0), (4, -3.0)]];
        assert_eq!(search(2, 1.0, 8).advance(&rows, |_| vec![]), Round::Stuck);
    }
}
