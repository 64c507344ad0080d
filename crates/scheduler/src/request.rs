//! `Request`: one request in the scheduler, and what is handed in to make one.
//!
//! A request is two counters racing: `num_computed_tokens` catches up with `num_tokens`, or, while tokens
//! that are being sampled are not known yet, with `num_tokens` plus its placeholders.

pub(crate) mod forced;
pub(crate) mod limits;
pub(crate) mod payer;
pub(crate) mod repetition;
pub(crate) mod sample_group;
pub(crate) mod standing;

use std::sync::Arc;

use drafting::{DrafterConfig, DraftingMethod, History};
use kvblocks::{BlockHash, BlockId, CpuBlockId};

use crate::{
    grammar::{GrammarSpec, GrammarWork},
    kv_cache_manager::extra_keys::ExtraKeys,
    output::{PredictedDrafts, RequestKey},
    request::{
        forced::ForcedTokens, payer::Payer, repetition::RepetitionFinder, sample_group::SampleGroup,
        standing::Standing,
    },
    sampling_params::SamplingParams,
    scheduler::beam_search::Seat,
};

/// No persistent row.
pub(crate) const NO_ROW: u32 = u32::MAX;

/// In `input_ids`: the host does not know this token yet, the worker does.
pub const UNKNOWN_TOKEN: i32 = -1;

/// Where a request is in its life. Order matters: everything above `Preempted` is finished.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum RequestStatus {
    /// In the queue, nothing computed.
    Waiting,
    /// In the queue until its grammar is compiled.
    WaitingForGrammar,
    /// In the running list, owns blocks and a row.
    Running,
    /// Lost its place; its KV is on its way to CPU memory, or there.
    Swapped,
    /// Back in the queue: its blocks were taken, its output is kept.
    Preempted,
    /// EOS or a stop token.
    FinishedStopped,
    /// Out of room or of `max_tokens`.
    FinishedLengthCapped,
    /// Repeated itself.
    FinishedRepetition,
    /// Aborted.
    FinishedAborted,
    /// Failed.
    FinishedError,
}

impl RequestStatus {
    /// The field's name for it.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "WAITING",
            Self::WaitingForGrammar => "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
            Self::Running => "RUNNING",
            Self::Swapped => "SWAPPED",
            Self::Preempted => "PREEMPTED",
            Self::FinishedStopped => "FINISHED_STOPPED",
            Self::FinishedLengthCapped => "FINISHED_LENGTH_CAPPED",
            Self::FinishedRepetition => "FINISHED_REPETITION",
            Self::FinishedAborted => "FINISHED_ABORTED",
            Self::FinishedError => "FINISHED_ERROR",
        }
    }

    /// Whether the request has left the scheduler.
    #[must_use]
    pub fn is_finished(self) -> bool {
        self > Self::Preempted
    }
}

/// What a front end hands in.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
pub struct NewRequest {
    /// Made by `EngineHandle::new_key`.
    pub key: RequestKey,
    /// Unique among live requests.
    pub request_id: Box<str>,
    /// At least one token; ids are checked against the vocabulary by the front end.
    pub prompt_token_ids: Vec<i32>,
    /// How to sample, when to stop.
    pub params: SamplingParams,
    /// Lower is more important; used by the priority policy.
    pub priority: i32,
    /// Whose share it is charged to; used by the fair policy.
    pub payer: Payer,
    /// What the content of its blocks depends on in addition to the tokens.
    pub extra_keys: ExtraKeys,
    /// Compute the whole prompt (it still fills the cache).
    pub skip_reading_prefix_cache: bool,
    /// Tell how far its prompt is, after each step that computed a piece of it.
    pub reports_prompt_progress: bool,
    /// Its front end looks for stop strings: when it ends at its length, or because it repeats itself, that calls
    /// `EngineHandle::settle_end`.
    pub has_stop_strings: bool,
    /// Its output obeys a grammar; it waits until `EngineHandle::grammar_ready`. A request with a `grammar` does
    /// anyway.
    pub waits_for_grammar: bool,
    /// What its output must be; shared by the samples of a request.
    pub grammar: Option<Arc<GrammarSpec>>,
    /// What its answer is expected to be: where the answer follows it, these tokens are its drafts. Ids are checked by
    /// the front end.
    pub prediction: Option<Arc<[i32]>>,
    /// A live request whose tokens begin with this prompt: share its KV instead of computing the prompt again.
    pub fork_from: Option<RequestKey>,
    /// For how long it has been under way when it is handed in (nanoseconds): its prompt was read, tokenised and sent.
    pub age_ns: u64,
}

impl NewRequest {
    /// A request with nothing special about it.
    #[must_use]
    pub fn new(
        key: RequestKey,
        request_id: &str,
        prompt_token_ids: Vec<i32>,
        params: SamplingParams,
    ) -> Self {
        Self {
            key,
            request_id: request_id.into(),
            prompt_token_ids,
            params,
            priority: 0,
            payer: Payer::default(),
            extra_keys: ExtraKeys::default(),
            skip_reading_prefix_cache: false,
            reports_prompt_progress: false,
            has_stop_strings: false,
            waits_for_grammar: false,
            grammar: None,
            prediction: None,
            fork_from: None,
            age_ns: 0,
        }
    }

    /// Whether a drafter may guess tokens for it. What a callable of its own makes of the logits is worked out for one
    /// token at a time, and so is what a grammar allows that its front end keeps. Under one that is known here the guesses
    /// must be known, too: those of a second model are not.
    pub(crate) fn may_have_drafts(&self, drafter: &DrafterConfig) -> bool {
        let has_processors = self.params.extras.as_ref().is_some_and(|extras| extras.attachment().is_some());
        let guesses_are_known = !matches!(drafter.method, DraftingMethod::Model);
        let may_obey = self.grammar.is_some() && guesses_are_known;
        let obeys = self.grammar.is_some() || self.waits_for_grammar;
        !has_processors && (may_obey || !obeys) && self.params.beam_width == 0
    }

    /// Tokens that count while it waits: those of its prompt, but for what it shares with the request that it forks.
    pub(crate) fn num_queued_tokens(&self) -> u32 {
        if self.fork_from.is_some() { 0 } else { self.prompt_token_ids.len() as u32 }
    }
}

/// A slot and its tenant: stale when the tenant has left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tenant {
    pub(crate) slot: u32,
    pub(crate) epoch: u32,
}

/// What is needed once per request or once per block, not once per step.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "facts that have nothing to do with each other")]
pub(crate) struct Cold {
    pub(crate) request_id: Box<str>,
    pub(crate) params: SamplingParams,
    pub(crate) priority: i32,
    pub(crate) payer: Payer,
    pub(crate) standing: Standing,
    /// Place in the order of arrival.
    pub(crate) arrival: u64,
    pub(crate) num_prompt_tokens: u32,
    /// What it counts for in the queue until it is admitted for the first time.
    pub(crate) num_queued_tokens: u32,
    pub(crate) extra_keys: ExtraKeys,
    pub(crate) skip_reading_prefix_cache: bool,
    pub(crate) reports_prompt_progress: bool,
    pub(crate) has_stop_strings: bool,
    /// Whether log-probabilities of its prompt are still to be asked for.
    pub(crate) wants_prompt_logprobs: bool,
    /// Leading tokens of the prompt whose logits a step was asked to judge the next token by.
    pub(crate) num_judges_asked: u32,
    pub(crate) uses_grammar: bool,
    /// `None` although it uses one: the front end that handed it in keeps the grammar.
    pub(crate) grammar: Option<Arc<GrammarSpec>>,
    /// What says which drafts that takes; `None`: it has no drafts, or that is not known here.
    pub(crate) grammar_work: Option<Arc<dyn GrammarWork>>,
    /// Tokens that no step has told yet: the next one that it is in does.
    pub(crate) untold: ForcedTokens,
    /// What became of the drafts of its prediction, until its next record says so.
    pub(crate) predicted: PredictedDrafts,
    /// One per full block of tokens known so far (empty without prefix caching).
    pub(crate) block_hashes: Vec<BlockHash>,
    pub(crate) num_preemptions: u32,
    /// When it came to its front end (monotonic nanoseconds of this process).
    pub(crate) arrival_ns: u64,
    /// When it was handed in.
    pub(crate) queued_ns: u64,
    /// When it was first admitted; 0 before.
    pub(crate) first_scheduled_ns: u64,
    /// When its first token was sampled; 0 before.
    pub(crate) first_token_ns: u64,
    /// Tokens of the prompt that were not computed at the first admission: cached, or shared with what it forks.
    pub(crate) num_prompt_tokens_skipped: u32,
    /// The samples of its request; `None`: it is alone.
    pub(crate) group: Option<Arc<SampleGroup>>,
    /// Prefix statistics and `num_cached_tokens` belong to the first admission.
    pub(crate) admitted_before: bool,
    /// Drafts for the next step; `UNKNOWN_TOKEN`s when the worker alone knows them.
    pub(crate) draft_token_ids: Vec<i32>,
    /// Looks for repetitions in its output; `None`: none ends it.
    pub(crate) repetition: Option<RepetitionFinder>,
    /// What its drafts are made of; `None`: it gets none.
    pub(crate) history: Option<Box<History>>,
    /// Where its KV is while it is swapped out, in the order of the block table.
    pub(crate) cpu_blocks: Vec<CpuBlockId>,
    /// The step whose copies bring it there.
    pub(crate) swapped_out_in: u64,
    /// The last step in which it is spared while there is another victim.
    pub(crate) immune_until: u64,
    /// Admissions of younger requests while it did not fit.
    pub(crate) num_times_passed: u32,
    /// Whose KV it will share.
    pub(crate) fork_parent: Option<Tenant>,
    /// Waiting requests whose `fork_parent` this is.
    pub(crate) num_fork_children: u32,
    /// Its place among the beams of a search.
    pub(crate) seat: Option<Seat>,
    /// Whether another request of its search waits for it: it is in no queue.
    pub(crate) is_follower: bool,
    /// Prompt and output tokens at most, of a beam: its `max_total_tokens` allows one more than there are.
    pub(crate) search_limit: u32,
}

/// The newest tokens that a request keeps next to its counters.
pub(crate) const NUM_RECENT: usize = 4;

/// A request's hot part: one cache line that a decode step reads and writes, and one that it seldom needs.
#[derive(Debug)]
#[repr(C, align(128))]
pub(crate) struct Request {
    // The first line: all that planning a decode and appending its token need.
    /// Tokens whose KV is in the cache, or will be when the steps in flight are done.
    pub(crate) num_computed_tokens: u32,
    /// Prompt and known output.
    pub(crate) num_tokens: u32,
    /// `num_tokens` and the placeholders: tokens that steps in flight are to give.
    pub(crate) num_expected_tokens: u32,
    /// `num_tokens` at which it ends: prompt + `max_tokens`, at most `max_model_len`.
    pub(crate) max_total_tokens: u32,
    /// Slot of position `num_computed_tokens`, while `slots_left > 0`.
    pub(crate) next_slot: u32,
    /// Persistent row while running.
    pub(crate) row: u32,
    /// Tells a slot's tenant from the one before it.
    pub(crate) epoch: u32,
    /// −1: EOS does not end it.
    pub(crate) eos_token_id: i32,
    pub(crate) key: RequestKey,
    /// The newest tokens, not yet in `token_ids`: that is a line of its own, far away, written once for several of
    /// them.
    recent: [i32; NUM_RECENT],
    num_recent: u8,
    /// Steps in flight that it is in.
    pub(crate) num_steps_in_flight: u8,
    /// Positions from `num_computed_tokens` on in the block that `next_slot` lies in; 0 also when the next
    /// row is not a plain decode.
    pub(crate) slots_left: u16,
    pub(crate) status: RequestStatus,
    /// Whether more than EOS and its length may end it: stop ids, or a repetition.
    pub(crate) has_stop_rules: bool,
    /// Whether the first token has told when it was scheduled and what was cached.
    pub(crate) is_introduced: bool,
    /// It runs in no step until it is released: what its next token may be takes long to work out.
    pub(crate) is_held: bool,
    // The second line.
    pub(crate) block_table: Vec<BlockId>,
    /// All tokens but the recent ones.
    token_ids: Vec<i32>,
    pub(crate) cold: Box<Cold>,
    /// Leading blocks that are registered in the prefix index, or were hits.
    pub(crate) num_registered_blocks: u32,
    /// Prompt tokens found in the prefix cache at first admission.
    pub(crate) num_cached_tokens: u32,
}

const _: () = assert!(size_of::<Request>() == 128, "a request's hot part is two cache lines");
const _: () =
    assert!(std::mem::offset_of!(Request, block_table) == 64, "a decode step needs the first of them");

impl Request {
    /// Whether it asked for anything that may exclude tokens, so that none may be left.
    pub(crate) fn may_exclude_tokens(&self) -> bool {
        let params = &self.cold.params;
        self.cold.uses_grammar || params.min_tokens > 0 || params.extras.is_some()
    }

    /// A request that was just taken in.
    pub(crate) fn new(
        prompt_token_ids: Vec<i32>,
        key: RequestKey,
        epoch: u32,
        max_total_tokens: u32,
        block_table: Vec<BlockId>,
        cold: Box<Cold>,
    ) -> Self {
        let num_prompt_tokens = prompt_token_ids.len() as u32;
        Self {
            num_computed_tokens: 0,
            num_tokens: num_prompt_tokens,
            num_expected_tokens: num_prompt_tokens,
            max_total_tokens,
            next_slot: 0,
            row: NO_ROW,
            epoch,
            eos_token_id: cold.params.eos_token_id.unwrap_or(-1),
            key,
            recent: [0; NUM_RECENT],
            num_recent: 0,
            num_steps_in_flight: 0,
            slots_left: 0,
            status: if cold.uses_grammar { RequestStatus::WaitingForGrammar } else { RequestStatus::Waiting },
            has_stop_rules: !cold.params.stop_token_ids.is_empty() || cold.repetition.is_some(),
            is_introduced: false,
            is_held: false,
            block_table,
            token_ids: prompt_token_ids,
            cold,
            num_registered_blocks: 0,
            num_cached_tokens: 0,
        }
    }

    /// Whether a token ends it, whatever its length.
    pub(crate) fn ends_with(&self, token_id: i32) -> bool {
        token_id == self.eos_token_id || self.cold.params.stop_token_ids.contains(&token_id)
    }

    /// Whether its output repeats itself at its end, so that it ends. Below `min_tokens` none does.
    pub(crate) fn repeats_itself(&mut self) -> bool {
        if self.cold.repetition.is_none() {
            return false;
        }
        self.gather_tokens();
        let Cold { repetition, num_prompt_tokens, params, .. } = &mut *self.cold;
        let output = &self.token_ids[*num_prompt_tokens as usize..];
        let repeats = repetition.as_mut().is_some_and(|finder| finder.look(output));
        repeats && output.len() >= params.min_tokens as usize
    }

    /// Append a token that was sampled.
    #[inline]
    pub(crate) fn push_token(&mut self, token_id: i32) {
        if usize::from(self.num_recent) == NUM_RECENT {
            self.gather_tokens();
        }
        self.recent[usize::from(self.num_recent) % NUM_RECENT] = token_id;
        self.num_recent += 1;
        self.num_tokens += 1;
    }

    /// The last known token.
    #[inline]
    pub(crate) fn last_token_id(&self) -> i32 {
        match self.num_recent {
            0 => self.token_ids.last().copied().unwrap_or(UNKNOWN_TOKEN),
            count => self.recent[usize::from(count - 1) % NUM_RECENT],
        }
    }

    /// Bring all known tokens into one place.
    pub(crate) fn gather_tokens(&mut self) {
        self.token_ids.extend_from_slice(&self.recent[..usize::from(self.num_recent)]);
        self.num_recent = 0;
    }

    /// All known tokens, right after [`gather_tokens`](Self::gather_tokens).
    pub(crate) fn gathered_tokens(&self) -> &[i32] {
        debug_assert_eq!(self.num_recent, 0, "gather the tokens first");
        &self.token_ids
    }

    /// What its drafts are made of, and all known tokens in one place; `None`: it gets no drafts.
    pub(crate) fn history_and_tokens(&mut self) -> Option<(&mut History, &[i32])> {
        if self.num_recent > 0 && self.cold.history.is_some() {
            self.gather_tokens();
        }
        let history = self.cold.history.as_deref_mut()?;
        Some((history, &self.token_ids))
    }

    /// All known tokens, copied.
    pub(crate) fn all_tokens(&self) -> Vec<i32> {
        [&self.token_ids, &self.recent[..usize::from(self.num_recent)]].concat()
    }

    /// Copy the known tokens from position `start` on.
    pub(crate) fn copy_tokens(&self, start: usize, into: &mut [i32]) {
        let gathered = self.token_ids.get(start..).unwrap_or_default();
        let from_gathered = gathered.len().min(into.len());
        let (first, rest) = into.split_at_mut(from_gathered);
        first.copy_from_slice(&gathered[..from_gathered]);
        let skipped = (start + from_gathered).saturating_sub(self.token_ids.len());
        for (token_id, &recent) in rest.iter_mut().zip(self.recent.iter().skip(skipped)) {
            *token_id = recent;
        }
    }

    /// Take over all tokens of another.
    pub(crate) fn set_tokens(&mut self, token_ids: Vec<i32>) {
        self.num_tokens = token_ids.len() as u32;
        self.num_expected_tokens = self.num_tokens;
        self.num_recent = 0;
        self.token_ids = token_ids;
    }

    /// Give the memory of a request that has left back.
    pub(crate) fn forget_tokens(&mut self) {
        self.num_recent = 0;
        self.token_ids = Vec::new();
        self.block_table = Vec::new();
        self.cold.block_hashes = Vec::new();
        self.cold.repetition = None;
    }

    /// The hash chain's inputs: tokens, what else the blocks depend on, and the chain so far.
    pub(crate) fn hash_chain(&mut self) -> (&[i32], &ExtraKeys, &mut Vec<BlockHash>) {
        self.gather_tokens();
        let Cold { extra_keys, block_hashes, .. } = &mut *self.cold;
        (&self.token_ids, extra_keys, block_hashes)
    }

    /// Tokens that the block table has room for.
    pub(crate) fn capacity_tokens(&self, block_size: u32) -> u32 {
        self.block_table.len() as u32 * block_size
    }

    /// Tokens that steps in flight are to give, as if every draft was accepted.
    pub(crate) fn num_output_placeholders(&self) -> u32 {
        self.num_expected_tokens - self.num_tokens
    }

    /// Tokens whose KV no step in flight computes: what counts when the request leaves now.
    pub(crate) fn num_settled_tokens(&self) -> u32 {
        self.num_computed_tokens.saturating_sub(self.num_output_placeholders()).min(self.num_tokens)
    }

    /// Whether all tokens that it may have are there or on their way.
    pub(crate) fn is_full(&self) -> bool {
        self.num_expected_tokens >= self.max_total_tokens && self.num_expected_tokens > self.num_tokens
    }

    /// Take back what was scheduled and gives no token: drafts that were rejected or never made, a sample that is withheld.
    pub(crate) fn retract(&mut self, count: u32, block_size: u32) {
        self.num_computed_tokens -= count;
        self.num_expected_tokens -= count;
        if count > 0 {
            self.locate_next_slot(block_size);
        }
    }

    /// How many of some drafts may be run: those that its grammar takes, as far as it says so.
    pub(crate) fn num_drafts_taken(&self, drafts: &[i32]) -> u32 {
        let num_taken = self.cold.grammar_work.as_ref().and_then(|work| work.num_taken(drafts));
        num_taken.unwrap_or(drafts.len()) as u32
    }

    /// Remember where the next position lies, if its block is there.
    pub(crate) fn locate_next_slot(&mut self, block_size: u32) {
        let (block, offset) = (self.num_computed_tokens / block_size, self.num_computed_tokens % block_size);
        self.slots_left = 0;
        if let Some(block) = self.block_table.get(block as usize) {
            self.next_slot = block.0 * block_size + offset;
            self.slots_left = (block_size - offset) as u16;
        }
    }
}
