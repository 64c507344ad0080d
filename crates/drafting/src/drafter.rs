//! `Drafter`: the drafts of a step, for all its requests together.

use std::collections::VecDeque;

use crate::{
    archive::Archive,
    beliefs::Beliefs,
    brake::Brake,
    choice::{Chooser, PlainStep},
    config::{DrafterConfig, DraftingMethod},
    costs::StepCosts,
    credit::Credit,
    history::History,
    likeliest::Candidate,
};

/// After this many steps without a draft that was worth running, steps may overlap until there is one again.
const PATIENCE: u32 = 8;

/// Number of steps with guesses of a second model that are needed to know their time; the first one also loads things.
const TRIALS: u64 = 4;

/// The most that drafts may delay the first token of a request that arrives while a step runs, as a factor.
const MOST_DELAY_OF_NEW: f32 = 1.1;

/// Half of a step that takes no longer than this (ns) is not noticed, however soon the first token comes otherwise.
const UNNOTICED_NS: f32 = 30e6;

/// The time from the step with a request's prompt, or a part of it, to the request's first token.
#[derive(Clone, Copy, Debug, Default)]
struct Newcomers {
    ns: f32,
    count: u32,
}

impl Newcomers {
    /// Record that a step with prompts took this long.
    fn measure(&mut self, ns: u64) {
        let ns = ns as f32;
        self.count = self.count.saturating_add(1);
        self.ns = match self.count {
            1 => ns,
            2 => ns.min(self.ns), // The first step of an engine is slow.
            _ => self.ns + (ns - self.ns) / 8.0,
        };
    }

    /// How long a step may take (ns) if it takes `plain_ns` without drafts: an arriving request waits for half of it,
    /// and then for its first token.
    fn unnoticed_ns(self, plain_ns: f32) -> f32 {
        if self.count == 0 {
            return f32::INFINITY;
        }
        UNNOTICED_NS.max(MOST_DELAY_OF_NEW * plain_ns + 2.0 * (MOST_DELAY_OF_NEW - 1.0) * self.ns)
    }
}

/// The durations of steps, by kind of step.
#[derive(Debug, Default)]
struct DraftingCosts {
    /// Steps that did not overlap, from the plan to the end: decodes and their drafts.
    alone: StepCosts,
    /// Such steps with prompts, in which a token takes another time.
    with_prompts: StepCosts,
    /// Such steps with drafts of a second model, which takes time itself; `None` if there is no second model.
    with_model: Option<StepCosts>,
    /// Steps that overlapped, from the end of one to the end of the next.
    overlapping: StepCosts,
}

impl DraftingCosts {
    /// The durations of non-overlapping steps of this round's kind.
    fn alone(&mut self, round: Round) -> &mut StepCosts {
        if round.has_prompts() { &mut self.with_prompts } else { &mut self.alone }
    }

    /// How long the step takes without drafts (ns), or at least takes, overlapping the previous one if steps do.
    /// `None`: the step should run unchanged, so that it is measured.
    fn plain_ns(&self, round: Round) -> Option<f32> {
        let alone = if round.has_prompts() { &self.with_prompts } else { &self.alone };
        let overlapping = self.overlapping.expected(round.num_tokens);
        match (alone.at_least(round.num_tokens), overlapping) {
            (Some(alone), Some(overlapping)) => Some(alone.min(overlapping)),
            (None, Some(overlapping)) => round.overlaps.then_some(overlapping),
            (alone, None) => alone,
        }
    }

    /// What is known about steps with more tokens than this one, because of drafts.
    fn with_drafts(&self, round: Round) -> &StepCosts {
        let alone = if round.has_prompts() { &self.with_prompts } else { &self.alone };
        match &self.with_model {
            Some(costs) if costs.num_steps() >= TRIALS && costs.expected(round.num_tokens + 1).is_some() => {
                costs
            }
            _ if alone.expected(round.num_tokens).is_some() => alone,
            _ => &self.overlapping,
        }
    }
}

/// A step that is planned except for its drafts.
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
    /// Whether the previous step is still running: drafts can be looked for, but cannot run.
    pub overlaps: bool,
    /// When its plan was made (monotonic nanoseconds).
    pub now_ns: u64,
}

impl Round {
    /// Whether some rows are prompts or parts of prompts.
    fn has_prompts(self) -> bool {
        self.num_tokens > self.num_rows
    }
}

/// Counters of a drafter's decisions.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DrafterStats {
    /// How often drafts were switched off for a while because they cost more than they gave.
    pub num_pauses: u64,
    /// Whether they are off now.
    pub is_paused: bool,
    /// Drafts that were found but did not run, because they would not have paid.
    pub num_withheld: u64,
}

/// Makes the drafts of one scheduler. For each step, call `begin_round`, then `propose` for each request that may have
/// drafts, then `end_round`, and `end_step` when the step has ended.
#[derive(Debug)]
pub struct Drafter {
    config: DrafterConfig,
    num_speculative_tokens: u32,
    archive: Option<Archive>,
    beliefs: Beliefs,
    costs: DraftingCosts,
    newcomers: Newcomers,
    brake: Brake,
    chooser: Chooser,
    round: Round,
    /// Most drafts per request in this round.
    limit: u32,
    /// The steps that have not ended, oldest first.
    in_flight: VecDeque<Round>,
    /// The last step that ended, and when.
    last_end: Option<(u64, u64)>,
    candidates: Vec<Candidate>,
    /// For each candidate, where its drafts begin in `found`.
    starts: Vec<usize>,
    found: Vec<i32>,
    /// Number of rows that were looked at and have no drafts, and the least credit among them.
    num_others: u32,
    others_credit: f32,
    /// Whether all of them may come a little later.
    are_patient: bool,
    /// The credit of rows that are not looked at.
    unseen: Credit,
    /// The time so far, in steps without drafts.
    clock: f64,
    num_rounds: usize,
    num_idle_rounds: u32,
    num_withheld: u64,
}

impl Drafter {
    /// Make a drafter with at most `num_speculative_tokens` drafts per request and step.
    #[must_use]
    pub fn new(config: DrafterConfig, num_speculative_tokens: u32) -> Self {
        let archive = config.num_archived_tokens().map(Archive::new);
        Self {
            num_speculative_tokens,
            archive,
            beliefs: Beliefs::default(),
            costs: DraftingCosts {
                with_model: matches!(config.method, DraftingMethod::Model).then(StepCosts::default),
                ..DraftingCosts::default()
            },
            newcomers: Newcomers::default(),
            brake: Brake::default(),
            chooser: Chooser::default(),
            round: Round::default(),
            limit: 0,
            in_flight: VecDeque::new(),
            last_end: None,
            candidates: Vec::new(),
            starts: Vec::new(),
            found: Vec::new(),
            num_others: 0,
            others_credit: f32::INFINITY,
            are_patient: true,
            unseen: Credit::default(),
            clock: 0.0,
            num_rounds: 0,
            num_idle_rounds: 0,
            num_withheld: 0,
            config,
        }
    }

    /// Whether the next step should wait for the previous one's tokens, because drafts were worth running lately.
    #[must_use]
    pub fn needs_tokens(&self) -> bool {
        !self.brake.is_on() && self.num_idle_rounds < PATIENCE
    }

    /// Begin a step.
    pub fn begin_round(&mut self, round: Round) {
        self.brake.pass_step();
        self.candidates.clear();
        self.starts.clear();
        self.found.clear();
        (self.num_others, self.others_credit, self.are_patient) = (0, f32::INFINITY, true);
        self.limit = self.num_speculative_tokens.min(self.config.cap(round.num_running));
        self.num_rounds += 1;
        self.unseen.count(self.num_rounds, self.clock);
        // A step whose plan was discarded is planned again under the same number.
        self.in_flight.retain(|earlier| earlier.step < round.step);
        self.in_flight.push_back(round);
        self.round = round;
    }

    /// Look for drafts for the request at place `index` of the step. It has `tokens` and may get `room` drafts. While
    /// steps overlap, `tokens` lacks its newest token; the guesses then only show whether drafts would be right.
    pub fn propose(&mut self, index: u32, history: &mut History, tokens: &[i32], room: u32) {
        let limit = self.limit.min(room) as usize;
        let (start, is_choosy) = (self.found.len(), self.config.adaptive);
        if limit > 0 {
            let archive = self.archive.as_ref();
            history.propose(tokens, limit, is_choosy, archive, &mut self.beliefs, &mut self.found);
        }
        if let Some(archive) = &mut self.archive {
            history.archive(archive, tokens, false);
        }
        let num_drafts = (self.found.len() - start) as u32;
        let mut credit = 0.0;
        if is_choosy {
            history.credit.count(tokens.len(), self.clock);
            credit = history.credit.to_spend();
            if num_drafts == 0 {
                self.num_others += 1;
                self.others_credit = self.others_credit.min(credit);
                self.are_patient &= history.credit.is_patient();
            }
        }
        if num_drafts > 0 {
            self.candidates.push(Candidate { index, num_drafts, belief: history.belief(), credit });
            self.starts.push(start);
        }
    }

    /// Record that a request with `tokens` has ended: its answer may become drafts of others.
    pub fn retire(&mut self, history: &mut History, tokens: &[i32]) {
        if let Some(archive) = &mut self.archive {
            history.archive(archive, tokens, true);
        }
    }

    /// The drafts that the step should run: the place in the step, and the tokens.
    pub fn end_round(&mut self) -> impl Iterator<Item = (u32, &[i32])> {
        let num_found = self.found.len() as u64;
        if self.config.adaptive {
            self.choose();
        }
        let num_chosen = self.num_chosen();
        self.num_idle_rounds = if num_chosen > 0 { 0 } else { self.num_idle_rounds.saturating_add(1) };
        if self.round.overlaps {
            self.withhold_all();
        } else {
            self.num_withheld += num_found - u64::from(num_chosen);
        }
        self.clock += self.expected_steps();
        let found = &self.found;
        self.candidates.iter().zip(&self.starts).map(|(candidate, &start)| {
            (candidate.index, &found[start..start + candidate.num_drafts as usize])
        })
    }

    /// Withhold drafts that would not pay.
    fn choose(&mut self) {
        let Round { num_rows, num_tokens, .. } = self.round;
        let plain_ns = self.costs.plain_ns(self.round).filter(|_| !self.brake.is_on());
        let Some(ns) = plain_ns else { return self.withhold_all() };
        let is_looked_at = self.num_others + self.candidates.len() as u32 >= num_rows;
        let credit = if is_looked_at { self.others_credit } else { 0.0 };
        let is_patient = self.are_patient && (is_looked_at || self.unseen.is_patient());
        let unnoticed_ns = self.newcomers.unnoticed_ns(ns);
        let plain = PlainStep { num_rows, num_tokens, ns, credit, is_patient, unnoticed_ns };
        self.chooser.choose(self.costs.with_drafts(self.round), plain, &mut self.candidates);
    }

    fn withhold_all(&mut self) {
        for candidate in &mut self.candidates {
            candidate.num_drafts = 0;
        }
    }

    fn num_chosen(&self) -> u32 {
        self.candidates.iter().map(|candidate| candidate.num_drafts).sum()
    }

    /// The duration of this step, in steps without drafts. Uses expected times, which noise does not change.
    fn expected_steps(&self) -> f64 {
        let num_drafts = self.num_chosen();
        let num_tokens = self.round.num_tokens;
        let expected = self.costs.with_drafts(self.round).expected(num_tokens + num_drafts);
        match (expected, self.costs.plain_ns(self.round)) {
            (Some(ns), Some(plain_ns)) if num_drafts > 0 => f64::from(ns / plain_ns).max(1.0),
            _ => 1.0,
        }
    }

    /// Record that a step has ended: it ran `num_tokens` tokens, including drafts, and gave `num_generated` tokens in
    /// `num_sampled` rows.
    pub fn end_step(
        &mut self,
        step: u64,
        num_tokens: u32,
        num_sampled: u32,
        num_generated: u32,
        now_ns: u64,
    ) {
        let Some(round) = self.in_flight.iter().find(|round| round.step == step).copied() else { return };
        // Older steps failed.
        self.in_flight.retain(|other| other.step > step);
        let last_end = self.last_end.replace((step, now_ns));
        if round.overlaps {
            if let Some((last, at_ns)) = last_end
                && last + 1 == step
                && !round.has_prompts()
            {
                self.costs.overlapping.measure(num_tokens, now_ns.saturating_sub(at_ns));
            }
            return;
        }
        if !self.in_flight.is_empty() {
            return; // Another one was planned meanwhile, so its time is not its own.
        }
        let ns = now_ns.saturating_sub(round.now_ns);
        if num_tokens > round.num_tokens
            && self.config.adaptive
            && let Some(plain_ns) = self.costs.plain_ns(round)
        {
            self.brake.observe(num_generated, ns, num_sampled, plain_ns);
        }
        if round.has_prompts() {
            self.newcomers.measure(ns);
        }
        let has_drafts = num_tokens > round.num_tokens;
        match &mut self.costs.with_model {
            Some(costs) if has_drafts => costs.measure(num_tokens, ns),
            _ => self.costs.alone(round).measure(num_tokens, ns),
        }
    }

    /// The counters of the decisions so far.
    #[must_use]
    pub fn stats(&self) -> DrafterStats {
        DrafterStats {
            num_pauses: self.brake.num_pulled(),
            is_paused: self.brake.is_on(),
            num_withheld: self.num_withheld,
        }
    }
}
