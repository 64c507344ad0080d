//! The scheduler as plainly as it can be written: slow, and easy to believe.
//!
//! It says what the real one has to do, without saying how: a request keeps its tokens, blocks are found by
//! comparing tokens, queues are sorted when they are looked at, budgets, placeholders and free rows are counted
//! anew each time, and there is one path for every request. Nothing is cached that can be recomputed.
//!
//! | file | noun |
//! |---|---|
//! | `pool.rs` | blocks and what they hold |
//! | `running.rs` | the turns of running requests |
//! | `admission.rs` | the walk over the queue: prefix hits, swap-in, fork |
//! | `fair.rs` | whose turn it is under FAIR |
//! | `intake.rs` | what is handed in, and aborted |
//! | `inputs.rs` | multimodal inputs, which may have to be computed in one step |
//! | `held.rs` | who is held back, and whose token is withheld |
//! | `preemption.rs` | who gives way, and how: recompute or swap |
//! | `update.rs` | what tokens, failures and ends change |

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

mod admission;
mod fair;
mod held;
mod inputs;
mod intake;
mod pool;
mod preemption;
mod running;
mod update;

use std::{cmp::Reverse, collections::HashMap};

use fair::{Fairness, Standing};
use inputs::{Cuts, Input};
use pool::NaivePool;
use scheduler::{
    PauseState, Payer, PreemptionMode, RequestStatus, SchedulerConfig, SchedulingPolicy, StepBuffers,
};

/// The configuration of the real one, in the widths that are natural here.
#[derive(Clone, Debug)]
pub struct NaiveConfig {
    pub base: SchedulerConfig,
    /// 1 is synchronous.
    pub max_steps_in_flight: usize,
    pub swap: bool,
    pub num_cpu_blocks: usize,
    pub num_speculative_tokens: usize,
    /// A resumed request is spared up to this many steps later, unless all are immune.
    pub preemption_immunity_steps: u64,
    pub max_look_past: usize,
    pub max_times_passed: usize,
}

impl NaiveConfig {
    pub fn new(base: SchedulerConfig) -> Self {
        Self {
            max_steps_in_flight: base.max_steps_in_flight as usize,
            swap: base.preemption_mode == PreemptionMode::Swap,
            num_cpu_blocks: base.num_cpu_blocks as usize,
            num_speculative_tokens: base.num_speculative_tokens as usize,
            preemption_immunity_steps: u64::from(base.preemption_immunity_steps),
            max_look_past: base.max_look_past as usize,
            max_times_passed: base.max_times_passed as usize,
            base,
        }
    }

    fn block_size(&self) -> usize {
        self.base.block_size as usize
    }

    fn max_model_len(&self) -> usize {
        self.base.max_model_len as usize
    }

    fn max_num_batched_tokens(&self) -> usize {
        self.base.max_num_batched_tokens as usize
    }

    fn max_num_seqs(&self) -> usize {
        self.base.max_num_seqs as usize
    }

    fn is_async(&self) -> bool {
        self.max_steps_in_flight > 1
    }

    /// Block ids that one step's arrays can name.
    fn max_block_ids(&self) -> usize {
        let specs = StepBuffers::spec(&self.base);
        specs.iter().find(|spec| spec.name == "bt_block_ids").expect("it is there").num_elements()
    }
}

/// What is handed in.
#[derive(Clone, Debug, Default)]
pub struct NaiveRequest {
    pub id: String,
    pub prompt: Vec<i32>,
    pub max_tokens: usize,
    pub eos_token_id: Option<i32>,
    pub stop_token_ids: Vec<i32>,
    pub priority: i32,
    pub payer: Payer,
    pub extra_keys: Vec<u8>,
    /// In the order of their positions; apart from these, two are the same.
    pub inputs: Vec<Input>,
    pub skip_reading_prefix_cache: bool,
    /// Waits until `grammar_is_ready`.
    pub needs_grammar: bool,
    /// Id of the live request whose blocks it may share.
    pub fork_from: Option<String>,
    /// For how long it was under way before it was handed in: longer than any run takes, or 0.
    pub age: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    Waiting,
    WaitingForGrammar,
    Running,
    /// Its blocks are in CPU memory, or will be when its last step in flight is done.
    Swapped,
    Preempted,
}

impl Status {
    /// Whether the real one's status is the same.
    pub fn is(self, real: RequestStatus) -> bool {
        real.as_str()
            == match self {
                Self::Waiting => "WAITING",
                Self::WaitingForGrammar => "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR",
                Self::Running => "RUNNING",
                Self::Swapped => "SWAPPED",
                Self::Preempted => "PREEMPTED",
            }
    }
}

/// A request that has not finished.
#[derive(Clone, Debug)]
pub struct Live {
    pub new: NaiveRequest,
    /// Place in the order of arrival; names the request, whose id may be used again when it is gone.
    pub arrival: u64,
    pub status: Status,
    /// Prompt and output.
    pub tokens: Vec<i32>,
    /// As if every draft in flight will be accepted.
    pub num_computed_tokens: usize,
    pub blocks: Vec<u32>,
    /// Leading blocks that were hits or were registered once.
    pub num_offered_blocks: usize,
    pub num_cached_tokens: usize,
    pub num_preemptions: usize,
    /// CPU blocks while swapped out.
    pub cpu_blocks: Vec<u32>,
    /// Whether it must still be swapped out: it has left the running list and keeps blocks and row.
    pub swap_out_pending: bool,
    /// The step with the copies out.
    swapped_out_in: u64,
    admitted_in: u64,
    /// The step in which it was resumed or swapped in last.
    resumed_in: Option<u64>,
    /// Counts recomputations: a row of an earlier life gives tokens, but says nothing of what is computed now.
    life: usize,
    /// Drafts for its next row; −1 is one that only the worker knows.
    pub next_drafts: Vec<i32>,
    times_passed: usize,
    /// Arrival of the request to fork from, while it waits for that.
    parent: Option<u64>,
    was_admitted: bool,
    /// Tokens that its first admission found or shared.
    num_skipped: usize,
    /// It has no turns for now.
    pub is_held: bool,
    pub standing: Standing,
}

impl Live {
    /// It has no row.
    fn waits(&self) -> bool {
        self.status != Status::Running && !self.swap_out_pending
    }

    fn max_total_tokens(&self, config: &NaiveConfig) -> usize {
        (self.new.prompt.len() + self.new.max_tokens).min(config.max_model_len())
    }
}

/// Why a request is gone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Leave {
    Finished,
    Aborted,
    Failed,
}

/// A request's part of a step.
#[derive(Clone, Debug)]
struct Row {
    arrival: u64,
    life: usize,
    num_tokens: usize,
    computed_before: usize,
    sampled: bool,
    num_drafts: usize,
    /// It gives no token after all.
    is_withheld: bool,
    /// Blocks that the worker learns.
    num_new_blocks: usize,
    offered_before: usize,
}

/// A step that is being planned or in flight.
#[derive(Clone, Debug)]
struct Step {
    number: u64,
    rows: Vec<Row>,
    /// Of a pipeline: what leaves as many requests for the steps in its other stages.
    max_rows: usize,
}

impl Step {
    fn has_row_left(&self) -> bool {
        self.rows.len() < self.max_rows
    }
}

/// What a step does, in people's terms.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NaiveStep {
    pub number: u64,
    /// Id, tokens to run, tokens computed before; in batch order.
    pub scheduled: Vec<(String, usize, usize)>,
    /// Drafts of each scheduled request.
    pub num_drafts: Vec<usize>,
    /// Ids of the rows that give tokens.
    pub sampled: Vec<String>,
    pub preempted: Vec<String>,
    pub finished: Vec<String>,
    /// `(GPU, CPU)`.
    pub swap_out: Vec<(u32, u32)>,
    /// `(CPU, GPU)`.
    pub swap_in: Vec<(u32, u32)>,
    /// `(from, to)`.
    pub copies: Vec<(u32, u32)>,
}

enum Message {
    Add(NaiveRequest),
    Abort(String),
    GrammarIsReady(String),
}

/// See the module's documentation.
pub struct NaiveScheduler {
    pub config: NaiveConfig,
    pub pool: NaivePool,
    /// By arrival.
    pub requests: HashMap<u64, Live>,
    /// In admission order.
    running: Vec<u64>,
    /// Oldest first.
    in_flight: Vec<Step>,
    /// For each row given up, the newest step that may name it.
    retiring_rows: Vec<u64>,
    inbox: Vec<Message>,
    num_arrivals: u64,
    last_step: u64,
    /// What the next step tells in addition to its rows.
    notes: NaiveStep,
    /// The requests that are gone, as they were.
    pub left: Vec<(Leave, Live)>,
    /// Victims that had had their turn in the same step: how often the rarest path was taken.
    pub num_taken_out: usize,
    /// Blocks that they had made findable.
    pub num_withdrawn: usize,
    /// Admissions right after a plan that preempted and came to nothing.
    pub num_after_vain_plan: usize,
    /// Turns behind a request that gave up its own blocks.
    pub num_behind_who_gave_up: usize,
    /// Drafts that there was no room, no budget or no spare block for.
    pub num_cut_drafts: usize,
    /// Blocks that a step in flight fills for a victim.
    pub num_filled_in_flight: usize,
    /// Prompts longer than the threshold that ran whole, because they may not be cut.
    pub num_long_and_whole: usize,
    /// Tokens looked up by first admissions, and by later ones.
    pub num_queried: [usize; 2],
    /// Admissions that looked nothing up.
    pub num_unasked: usize,
    /// Of two with one priority, the one handed in later was tried first.
    pub num_overtaken: usize,
    /// Under FAIR, admissions at a turn that another request of the tenant brought.
    pub num_turns_of_others: usize,
    pub cuts: Cuts,
    /// Who may run.
    pub pause_state: PauseState,
    fairness: Fairness,
}

impl NaiveScheduler {
    pub fn new(config: NaiveConfig) -> Self {
        Self {
            pool: NaivePool::new(config.base.num_blocks as usize),
            config,
            requests: HashMap::new(),
            running: Vec::new(),
            in_flight: Vec::new(),
            retiring_rows: Vec::new(),
            inbox: Vec::new(),
            num_arrivals: 0,
            last_step: 0,
            notes: NaiveStep::default(),
            left: Vec::new(),
            num_taken_out: 0,
            num_withdrawn: 0,
            num_after_vain_plan: 0,
            num_behind_who_gave_up: 0,
            num_cut_drafts: 0,
            num_filled_in_flight: 0,
            num_long_and_whole: 0,
            num_queried: [0; 2],
            num_unasked: 0,
            num_overtaken: 0,
            num_turns_of_others: 0,
            cuts: Cuts::default(),
            pause_state: PauseState::Unpaused,
            fairness: Fairness::default(),
        }
    }

    /// Taken in with the next step or update, like aborts.
    pub fn add(&mut self, request: NaiveRequest) {
        self.inbox.push(Message::Add(request));
    }

    pub fn abort(&mut self, id: &str) {
        self.inbox.push(Message::Abort(id.to_owned()));
    }

    pub fn grammar_is_ready(&mut self, id: &str) {
        self.inbox.push(Message::GrammarIsReady(id.to_owned()));
    }

    /// Plan the next step; `None` when nothing can run now.
    pub fn schedule(&mut self) -> Option<NaiveStep> {
        assert!(self.in_flight.len() < self.config.max_steps_in_flight, "a step must be updated first");
        self.drain_inbox();
        if self.pause_state == PauseState::PausedAll {
            return None;
        }
        let mut plan = Step { number: self.last_step + 1, rows: Vec::new(), max_rows: usize::MAX };
        // What a plan that came to nothing preempted comes with this one, but no preemption of this one.
        let told_late = self.notes.preempted.len();
        self.swap_out_pending(&plan);
        let stages = self.config.base.pipeline_stages as usize;
        if stages > 1 {
            let wanted = (self.running.len() + self.waiting().len()).min(self.config.max_num_seqs());
            plan.max_rows = wanted.div_ceil(stages).max(1);
        }
        self.plan_running(&mut plan);
        let preempted = self.notes.preempted.len() > told_late;
        if (!preempted || self.running.is_empty()) && !self.is_swap_out_pending() {
            let num_before = self.running.len();
            self.plan_waiting(&mut plan);
            if told_late > 0 && num_before > 0 {
                self.num_after_vain_plan += self.running.len() - num_before;
            }
        }
        self.plan_drafts(&mut plan);
        if plan.rows.is_empty() {
            return None;
        }
        let mut step = std::mem::take(&mut self.notes);
        step.number = plan.number;
        for row in &plan.rows {
            let id = self.requests[&row.arrival].new.id.clone();
            step.num_drafts.push(row.num_drafts);
            if row.sampled {
                step.sampled.push(id.clone());
            }
            step.scheduled.push((id, row.num_tokens, row.computed_before));
        }
        self.last_step = plan.number;
        self.in_flight.push(plan);
        Some(step)
    }

    /// Whether no step runs, or will run before the pause ends.
    pub fn is_at_rest(&self) -> bool {
        let runs_on = match self.pause_state {
            PauseState::Unpaused => true,
            PauseState::PausedNew => self.requests.values().any(|request| request.was_admitted),
            PauseState::PausedAll => false,
        };
        !runs_on && self.in_flight.is_empty()
    }

    /// Forget every cached block; `false` while one is held.
    pub fn reset_prefix_cache(&mut self, preempt_running: bool) -> bool {
        if preempt_running {
            self.preempt_all();
        }
        self.pool.reset_prefix_cache()
    }

    pub fn free_order(&self) -> &[u32] {
        &self.pool.free
    }

    pub fn by_id(&self, id: &str) -> Option<&Live> {
        self.arrival_of(id).map(|arrival| &self.requests[&arrival])
    }

    /// # Panics
    /// If there is no such request.
    pub fn block_table(&self, id: &str) -> &[u32] {
        &self.by_id(id).expect("a live request").blocks
    }

    pub fn prefix_hit_length(&self, tokens: &[i32], extra_keys: &[u8], inputs: &[Input]) -> usize {
        self.pool.longest_prefix(extra_keys, inputs, tokens, self.config.block_size()).len()
            * self.config.block_size()
    }

    pub fn running_ids(&self) -> Vec<String> {
        self.running.iter().map(|arrival| self.requests[arrival].new.id.clone()).collect()
    }

    pub fn waiting_ids(&self) -> Vec<String> {
        self.waiting().iter().map(|arrival| self.requests[arrival].new.id.clone()).collect()
    }

    /// Who has left the running list and is not swapped out yet.
    pub fn leaving_ids(&self) -> Vec<String> {
        let leaving = self.requests.values().filter(|request| request.swap_out_pending);
        leaving.map(|request| request.new.id.clone()).collect()
    }

    pub fn num_steps_in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Tokens that steps in flight will give a request, if every draft is accepted.
    pub fn num_output_placeholders(&self, arrival: u64) -> usize {
        self.rows_in_flight(arrival)
            .filter(|row| row.sampled && !row.is_withheld)
            .map(|row| 1 + row.num_drafts)
            .sum()
    }

    /// What it met, by the name of the case, and how often.
    pub fn met(&self) -> [(&'static str, usize); 13] {
        [
            ("victims taken out of the step", self.num_taken_out),
            ("registrations they took along", self.num_withdrawn),
            ("admissions after a plan in vain", self.num_after_vain_plan),
            ("turns behind who gave up", self.num_behind_who_gave_up),
            ("cut drafts", self.num_cut_drafts),
            ("blocks filled in flight for victims", self.num_filled_in_flight),
            ("long prompts that ran whole", self.num_long_and_whole),
            ("admissions without a look-up", self.num_unasked),
            ("overtaken by who came first", self.num_overtaken),
            ("turns of others", self.num_turns_of_others),
            ("chunks that end before an input", self.cuts.shorter.get()),
            ("inputs that wait for a step with room", self.cuts.waiting.get()),
            ("chunks that begin within an input", self.cuts.begun_within.get()),
        ]
    }

    /// What is computed once everything that has been updated is counted, and nothing else.
    fn num_computed_for_sure(&self, arrival: u64) -> usize {
        let in_flight: usize = self.rows_in_flight(arrival).map(|row| row.num_tokens).sum();
        self.requests[&arrival].num_computed_tokens - in_flight
    }

    fn rows_in_flight(&self, arrival: u64) -> impl Iterator<Item = &Row> {
        self.in_flight.iter().flat_map(|step| &step.rows).filter(move |row| row.arrival == arrival)
    }

    fn is_in_flight(&self, arrival: u64) -> bool {
        self.rows_in_flight(arrival).count() > 0
    }

    /// All that lack a row, in the order in which they are tried.
    fn waiting(&self) -> Vec<u64> {
        let mut waiting: Vec<u64> =
            self.requests.values().filter(|request| request.waits()).map(|request| request.arrival).collect();
        if self.is_fair() {
            return self.turns_of_waiting(&waiting).into_iter().map(|(_, arrival)| arrival).collect();
        }
        waiting.sort_by_key(|&arrival| self.queue_key(arrival));
        waiting
    }

    fn is_fair(&self) -> bool {
        self.config.base.scheduling_policy == SchedulingPolicy::Fair
    }

    /// Under PRIORITY, of two that are as important the one that came to its front end first.
    fn queue_key(&self, arrival: u64) -> (i64, Reverse<u64>, u64) {
        let request = &self.requests[&arrival];
        match self.config.base.scheduling_policy {
            SchedulingPolicy::Fcfs => {
                (if request.status == Status::Swapped { -1 } else { 0 }, Reverse(0), arrival)
            }
            SchedulingPolicy::Priority => (request.new.priority.into(), Reverse(request.new.age), arrival),
            SchedulingPolicy::Fair => {
                let (tag, brought_by) = request.standing.turn;
                (tag as i64, Reverse(0), brought_by)
            }
        }
    }

    fn budget_left(&self, plan: &Step) -> usize {
        let planned: usize = plan.rows.iter().map(|row| row.num_tokens).sum();
        self.config.max_num_batched_tokens() - planned
    }

    /// How many of `wanted` tokens a request may run from `start` on: the threshold counts only with other requests, and
    /// only where prompts may be cut.
    fn clip(&self, arrival: u64, start: usize, wanted: usize, plan: &Step) -> usize {
        let base = &self.config.base;
        let threshold = base.long_prefill_token_threshold as usize;
        let cuts = threshold > 0 && base.enable_chunked_prefill && self.requests.len() > 1;
        let limit = if cuts { threshold } else { usize::MAX };
        self.without_cutting(arrival, start, wanted.min(limit).min(self.budget_left(plan)))
    }

    fn num_blocks_for(&self, num_tokens: usize) -> usize {
        num_tokens.div_ceil(self.config.block_size())
    }

    /// Make the blocks that the first `num_tokens` tokens fill findable.
    fn register(&mut self, arrival: u64, num_tokens: usize, step: u64) {
        if !self.config.base.enable_prefix_caching {
            return;
        }
        let block_size = self.config.block_size();
        let request = self.requests.get_mut(&arrival).expect("a live request");
        for index in request.num_offered_blocks..num_tokens / block_size {
            let prefix = &request.tokens[..(index + 1) * block_size];
            self.pool.register(
                request.blocks[index],
                &request.new.extra_keys,
                &request.new.inputs,
                prefix,
                step,
            );
        }
        request.num_offered_blocks = request.num_offered_blocks.max(num_tokens / block_size);
    }

    fn request(&mut self, arrival: u64) -> &mut Live {
        self.requests.get_mut(&arrival).expect("a live request")
    }

    fn arrival_of(&self, id: &str) -> Option<u64> {
        self.requests.values().find(|request| request.new.id == id).map(|request| request.arrival)
    }
}
