//! `Drafter`: the drafts of a step, of all its requests together.

use crate::{
    brake::Brake,
    choice::{Candidate, Chooser},
    config::DrafterConfig,
    costs::StepCosts,
    history::History,
};

/// After so many steps for which nothing was found, steps may overlap, for so many.
const PATIENCE: u32 = 8;
const OVERLAPPING: u32 = 32;

/// A step that is planned but for its drafts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Round {
    /// The step's number.
    pub step: u64,
    /// Running requests.
    pub num_running: u32,
    /// Rows of the step.
    pub num_rows: u32,
    /// Its tokens, without drafts.
    pub num_tokens: u32,
    /// When its plan was made (monotonic nanoseconds).
    pub now_ns: u64,
}

/// What the drafter has decided so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DrafterStats {
    /// How often drafts were switched off for a while, because they cost more than they gave.
    pub num_pauses: u64,
    /// Whether they are off now.
    pub is_paused: bool,
    /// Drafts that were found and not run, because they would not have paid.
    pub num_withheld: u64,
}

/// One per scheduler. A step is `begin_round`, `propose` for each request that may have drafts, `end_round`, and, once
/// it is over, `end_step`.
#[derive(Debug)]
pub struct Drafter {
    config: DrafterConfig,
    num_speculative_tokens: u32,
    costs: StepCosts,
    brake: Brake,
    chooser: Chooser,
    round: Round,
    /// The step that may be measured: nothing else was in flight.
    measured: Option<Round>,
    candidates: Vec<Candidate>,
    /// Where in `found` the drafts of each candidate begin.
    starts: Vec<usize>,
    found: Vec<i32>,
    num_empty_rounds: u32,
    num_withheld: u64,
}

impl Drafter {
    /// A drafter of at most `num_speculative_tokens` per request and step.
    #[must_use]
    pub fn new(config: DrafterConfig, num_speculative_tokens: u32) -> Self {
        Self {
            config,
            num_speculative_tokens,
            costs: StepCosts::default(),
            brake: Brake::default(),
            chooser: Chooser::default(),
            round: Round::default(),
            measured: None,
            candidates: Vec::new(),
            starts: Vec::new(),
            found: Vec::new(),
            num_empty_rounds: 0,
            num_withheld: 0,
        }
    }

    /// Whether the next step should know the tokens of the one before it: drafts are wanted, and there were some
    /// lately, or it is time to look for some again.
    #[must_use]
    pub fn needs_tokens(&self) -> bool {
        !self.brake.is_on() && self.num_empty_rounds % (PATIENCE + OVERLAPPING) < PATIENCE
    }

    /// Begin a step.
    pub fn begin_round(&mut self, round: Round) {
        self.brake.pass_step();
        self.candidates.clear();
        self.starts.clear();
        self.found.clear();
        // Of two steps in flight neither's time is its own.
        let overlaps = self.measured.take().is_some();
        self.measured = (!overlaps).then_some(round);
        self.round = round;
        self.num_empty_rounds = self.num_empty_rounds.wrapping_add(1);
    }

    /// Look for drafts of the request in place `index` of the step, which holds `tokens` and may have `room` drafts.
    pub fn propose(&mut self, index: u32, history: &mut History, tokens: &[i32], room: u32) {
        let limit = self.num_speculative_tokens.min(self.config.cap(self.round.num_running)).min(room);
        let start = self.found.len();
        history.propose(tokens, limit as usize, &mut self.found);
        let acceptance = history.estimate().acceptance();
        let num_drafts = (self.found.len() - start) as u32;
        if num_drafts > 0 {
            self.candidates.push(Candidate { index, num_drafts, acceptance });
            self.starts.push(start);
        }
    }

    /// The drafts that the step should run: place in the step, tokens.
    pub fn end_round(&mut self) -> impl Iterator<Item = (u32, &[i32])> {
        if !self.candidates.is_empty() {
            self.num_empty_rounds = 0;
        }
        if self.config.adaptive {
            self.withhold();
        }
        let found = &self.found;
        self.candidates.iter().zip(&self.starts).map(|(candidate, &start)| {
            (candidate.index, &found[start..start + candidate.num_drafts as usize])
        })
    }

    /// Keep back what would not pay.
    fn withhold(&mut self) {
        let num_found = self.found.len() as u64;
        let Round { num_rows, num_tokens, .. } = self.round;
        if self.brake.is_on() || self.costs.is_stale(num_tokens) {
            for candidate in &mut self.candidates {
                candidate.num_drafts = 0;
            }
        } else {
            self.chooser.choose(&self.costs, num_rows, num_tokens, &mut self.candidates);
        }
        let num_chosen: u32 = self.candidates.iter().map(|candidate| candidate.num_drafts).sum();
        self.num_withheld += num_found - u64::from(num_chosen);
    }

    /// A step is over: it ran `num_tokens` tokens, drafts among them, and gave `num_generated` in `num_sampled` rows.
    pub fn end_step(
        &mut self,
        step: u64,
        num_tokens: u32,
        num_sampled: u32,
        num_generated: u32,
        now_ns: u64,
    ) {
        let Some(round) = self.measured.take_if(|round| round.step == step) else { return };
        let ns = now_ns.saturating_sub(round.now_ns);
        if num_tokens > round.num_tokens
            && let Some(plain_ns) = self.costs.expected(round.num_tokens)
        {
            self.brake.observe(num_generated, ns, num_sampled, plain_ns);
        }
        self.costs.measure(num_tokens, ns);
    }

    /// What was decided so far.
    #[must_use]
    pub fn stats(&self) -> DrafterStats {
        DrafterStats {
            num_pauses: self.brake.num_pulled(),
            is_paused: self.brake.is_on(),
            num_withheld: self.num_withheld,
        }
    }
}
