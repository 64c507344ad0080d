//! `Grammars`: the grammars of an engine's requests, from their arrival to their last mask.
//!
//! The thread that steps the engine owns it. Compile threads make a matcher of each grammar from the moment when its
//! request is handed in, and then let it run. Once a step is planned, mask threads take in the tokens that its requests
//! got and compute what may follow, during the forward pass. A sample whose mask is not there when that is done is
//! withheld: the step goes on without it, and its request takes part again once its mask is there.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use scheduler::{
    ConstrainedSample, EngineHandle, GrammarKind, GrammarNews, GrammarProgress, GrammarSpec, GrammarWork,
    RequestError, RequestKey, Scheduler, SchedulerOutput,
};

use crate::{
    compile::{
        jobs::Compiles,
        work_queue::{Threads, WorkQueue},
    },
    sample::{Ahead, Matching, Sample, Verdict, lock},
    vocabulary::Vocabulary,
};

const MASK_STACK_BYTES: usize = 4 << 20;
/// Tokens at most that are appended to a request at once: telling them holds up the others.
const MAX_FORCED_TOKENS: usize = 512;
/// What computes masks that take long leaves processors to steps and to other masks.
const SLOW_MASK_NICENESS: i32 = 10;

/// How long masks may take from the moment their tokens are known, however short the forward pass: that of a small model
/// on a busy machine is over before a thread has woken up.
const MASK_GRACE: Duration = Duration::from_millis(1);

/// See the module docs.
#[derive(Debug)]
pub struct Grammars {
    vocabulary: Arc<Vocabulary>,
    handle: EngineHandle,
    samples: HashMap<RequestKey, Constrained>,
    compiles: Compiles,
    masks: WorkQueue<Arc<Sample>>,
    /// Of samples one of whose masks took long: no other waits behind them.
    slow_masks: WorkQueue<Arc<Sample>>,
    done: Arc<DoneMasks>,
    /// When tokens came last that masks depend on.
    told_at: Instant,
    /// Tokens that have to follow are appended.
    forces_tokens: bool,
}

/// How many masks threads have computed, to be waited for.
#[derive(Debug, Default)]
struct DoneMasks {
    count: Mutex<u64>,
    grew: Condvar,
}

/// Whether steps wait for a sample's mask.
#[derive(Debug, PartialEq, Eq)]
enum Standing {
    /// They do, unless its masks take long.
    Awaited,
    /// One withheld it, and its mask may not be there yet.
    Late,
    /// Its request is held back, and must be let go once its mask is there: one that came fast may have ended the time for which
    /// its masks count as slow.
    Held,
}

#[derive(Debug)]
struct Constrained {
    sample: Arc<Sample>,
    spec: Arc<GrammarSpec>,
    /// Output tokens that the sample has.
    num_told: usize,
    /// There is no grammar, only a gate: what may follow is known at once.
    is_gate: bool,
    standing: Standing,
    /// Tokens or guesses came since a thread was last asked to work on it.
    has_work: bool,
    /// The step whose guesses it has.
    guessed_for: u64,
}

impl Grammars {
    /// Start the threads.
    ///
    /// # Errors
    /// The system starts no further thread.
    pub fn start(handle: EngineHandle, vocabulary: Vocabulary) -> io::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let vocabulary = Arc::new(vocabulary);
        let compiles = Compiles::start(&handle, &vocabulary, (cores / 2).clamp(1, 2))?;
        let done = Arc::new(DoneMasks::default());
        let start_masks = |name, count, niceness| {
            let (vocabulary, done) = (vocabulary.clone(), done.clone());
            let threads = Threads { name, count, stack_bytes: MASK_STACK_BYTES, niceness };
            WorkQueue::start(&threads, move |sample: Arc<Sample>| {
                sample.settle(vocabulary.eos_token_ids(), |_| ());
                done.add();
            })
        };
        // Two at least: the first slow mask of a request takes one of them.
        let masks = start_masks("grammar-mask", (cores / 2).clamp(2, 4), 0)?;
        let slow_masks = start_masks("grammar-slow-mask", (cores / 2).clamp(1, 2), SLOW_MASK_NICENESS)?;
        let (samples, told_at, forces_tokens) = (HashMap::new(), Instant::now(), true);
        Ok(Self { vocabulary, handle, samples, compiles, masks, slow_masks, done, told_at, forces_tokens })
    }

    /// Append no tokens: those that have to follow are sampled one by one, under masks that allow nothing else.
    #[must_use]
    pub fn without_forced_tokens(mut self) -> Self {
        self.forces_tokens = false;
        self
    }

    /// Words of 32 bits that a mask has.
    #[must_use]
    pub fn num_mask_words(&self) -> usize {
        self.vocabulary.num_mask_words()
    }

    /// Take in who came and who left, once a step was planned.
    pub fn take_news(&mut self, scheduler: &mut Scheduler) {
        for news in scheduler.take_grammar_news() {
            match news {
                GrammarNews::Arrived { key, spec, ignores_eos, work } => {
                    let begun = work.and_then(|work| work.into_any().downcast().ok());
                    let sample: Arc<Sample> =
                        begun.unwrap_or_else(|| self.compiles.begin(key, &spec, ignores_eos));
                    if let GrammarProgress::Failed(RequestError::GrammarsFull) = sample.progress() {
                        self.handle.grammars_full(key);
                    }
                    let is_gate = spec.kind == GrammarKind::Anything;
                    self.samples.insert(key, Constrained::new(sample, spec, is_gate));
                }
                GrammarNews::Left(key) => {
                    let own = self.samples.remove(&key).filter(|own| !own.is_gate);
                    if let Some(Constrained { sample, spec, .. }) = own {
                        self.compiles.learn(spec, sample);
                    }
                }
            }
        }
    }

    /// Have the masks of a step's samples computed, as far as their tokens are known.
    pub fn begin_masks(&mut self, scheduler: &Scheduler, output: &SchedulerOutput) {
        for constrained in scheduler.constrained_samples(output) {
            if let Some(own) = self.samples.get_mut(&constrained.key) {
                own.guess(output.step, &constrained.draft_token_ids);
            }
            self.tell(constrained.key, scheduler);
        }
    }

    /// Have the mask behind the tokens of a request that are known computed.
    fn tell(&mut self, key: RequestKey, scheduler: &Scheduler) {
        let Some(own) = self.samples.get_mut(&key) else { return };
        let masks = if own.sample.may_take_long() { &self.slow_masks } else { &self.masks };
        if own.tell(key, scheduler, masks) {
            self.told_at = Instant::now();
        }
    }

    /// Whether tokens came that [`look_ahead`](Self::look_ahead) takes in.
    #[must_use]
    pub fn looks_ahead(&self, scheduler: &Scheduler) -> bool {
        let has_news = |(&key, own): (&RequestKey, &Constrained)| {
            own.is_looked_at_ahead() && !scheduler.output_tokens_from(key, own.num_told).is_empty()
        };
        !scheduler.is_step_in_flight() && self.samples.iter().any(has_news)
    }

    /// Take in the tokens that came, before a step is planned, while none is in flight: tokens that have to follow are
    /// appended, a request whose grammar is complete ends, and threads make the masks of the others. What a step has in
    /// flight, or has masks that take long, is left for later.
    pub fn look_ahead(&mut self, scheduler: &mut Scheduler) {
        if scheduler.is_step_in_flight() {
            return;
        }
        for (&key, own) in self.samples.iter_mut().filter(|(_, own)| own.is_looked_at_ahead()) {
            let tokens = scheduler.output_tokens_from(key, own.num_told);
            if tokens.is_empty() {
                continue;
            }
            self.told_at = Instant::now();
            own.note(&tokens);
            match own.sample.look_ahead(self.vocabulary.eos_token_ids()) {
                Ahead::Open => {}
                Ahead::Tokens(_) if !self.forces_tokens => {}
                Ahead::Tokens(forced) => {
                    let forced = ids_of(&forced);
                    let count = scheduler.force_tokens(None, key, &forced);
                    own.note(&forced[..count]);
                    let is_end =
                        count > 0 && own.sample.look_ahead(self.vocabulary.eos_token_ids()) == Ahead::End;
                    if is_end && count == forced.len() {
                        scheduler.complete(key);
                        continue;
                    }
                }
                Ahead::End => {
                    scheduler.complete(key);
                    continue;
                }
            }
            // With drafts the plan looks at it first, and a thread would be at it then.
            if !scheduler.has_drafter() {
                own.work_on(&self.masks);
            }
        }
    }

    /// Hold requests back that were withheld or whose masks take long, while these are not there: a step with other rows
    /// does not wait for them. Before a step is planned. Returns whether one is held back.
    pub fn hold_slow(&mut self, scheduler: &mut Scheduler) -> bool {
        let may_wait = |(&key, own): (&RequestKey, &Constrained)| own.may_be_held().then_some(key);
        let keys: Vec<RequestKey> = self.samples.iter().filter_map(may_wait).collect();
        let mut any = false;
        for key in keys {
            // The mask behind a token that is under way is not even begun.
            let awaits_token = scheduler.awaits_token(key);
            if !awaits_token {
                self.tell(key, scheduler);
            }
            let Some(own) = self.samples.get_mut(&key) else { continue };
            let is_held = awaits_token || !own.sample.is_settled();
            own.standing = if is_held { Standing::Held } else { Standing::Awaited };
            scheduler.hold_back(key, is_held);
            any |= is_held;
        }
        any
    }

    /// Let all requests run: there is nothing else that would have to wait for their masks.
    pub fn release_slow(&mut self, scheduler: &mut Scheduler) {
        for (&key, own) in self.samples.iter_mut().filter(|(_, own)| own.standing == Standing::Held) {
            own.standing = Standing::Late;
            scheduler.hold_back(key, false);
        }
    }

    /// Wait until all masks of a step are there, for so long at most, but [`MASK_GRACE`] from the moment when the last
    /// tokens came; true once they are.
    pub fn wait_for_masks(
        &mut self,
        scheduler: &Scheduler,
        output: &SchedulerOutput,
        limit: Duration,
    ) -> bool {
        self.begin_masks(scheduler, output);
        let until = (Instant::now() + limit).max(self.told_at + MASK_GRACE);
        let constrained = scheduler.constrained_samples(output);
        let samples = constrained.iter().filter_map(|constrained| self.samples.get(&constrained.key));
        let mut unsettled: Vec<&Sample> = samples.map(|own| &*own.sample).collect();
        self.done.wait(Some(until), || {
            unsettled.retain(|sample| !sample.is_settled());
            unsettled.is_empty()
        })
    }

    /// Wait until the mask of one of some samples is there.
    fn wait_for_one(&self, constrained: &[ConstrainedSample]) {
        let samples = constrained.iter().filter_map(|constrained| self.samples.get(&constrained.key));
        let samples: Vec<&Sample> = samples.map(|own| &*own.sample).collect();
        self.done.wait(None, || samples.is_empty() || samples.iter().any(|sample| sample.is_settled()));
    }

    /// Give the masks of a step's samples to `take`: the place among the step's samples, behind how many drafts, what may
    /// follow, and the mask. What may be anything is left out. Those whose mask is not there are withheld, unless the step has no other
    /// rows, and so are those for which tokens were appended that have to follow.
    pub fn take_masks(
        &mut self,
        scheduler: &mut Scheduler,
        output: &SchedulerOutput,
        mut take: impl FnMut(u32, u32, Verdict, &[u32]),
    ) {
        self.begin_masks(scheduler, output);
        let forces_tokens = self.forces_tokens;
        let samples = scheduler.constrained_samples(output);
        if samples.len() == output.num_reqs as usize {
            self.wait_for_one(&samples);
        }
        for constrained in samples {
            let mut own = self.samples.get_mut(&constrained.key);
            if let Some(own) = &mut own
                && !own.sample.is_settled()
                && scheduler.withhold_sample(output, constrained.key)
            {
                own.standing = Standing::Late;
                take(constrained.place, 0, Verdict::Late, &[]);
                continue;
            }
            let (place, key) = (constrained.place, constrained.key);
            let guesses: Vec<u32> = constrained.draft_token_ids.iter().map(|&id| id as u32).collect();
            let mut is_forced = false;
            let mut settle = |matching: Option<&Matching>| match matching {
                Some(matching) if forces_tokens && force(scheduler, output, key, matching.forced()) => {
                    is_forced = true;
                    take(place, 0, Verdict::Late, &[]);
                }
                Some(matching) => {
                    if matching.verdict() == Verdict::Complete {
                        scheduler.complete(key); // sooner than by the outcome of the step
                    }
                    if matching.verdict() != Verdict::Free {
                        take(place, 0, matching.verdict(), matching.mask());
                    }
                    let mut behind = matching.behind(&guesses).iter();
                    for depth in 1..=guesses.len() as u32 {
                        match behind.next() {
                            Some((Verdict::Free, _)) => {}
                            Some((verdict, mask)) => take(place, depth, *verdict, mask),
                            // The row ends here, if it comes so far.
                            None => take(place, depth, Verdict::Late, &[]),
                        }
                    }
                }
                // It runs without a matcher: no mask can be given in its place.
                None => take(place, 0, Verdict::Rejected, &[]),
            };
            match own {
                Some(own) => own.sample.settle(self.vocabulary.eos_token_ids(), settle),
                None => settle(None),
            }
            if is_forced {
                self.tell(key, scheduler); // what follows them may be worked out while the step runs
            }
        }
    }
}

/// Whether tokens that have to follow were appended to a request, in the place of the one that a step would give it.
fn force(scheduler: &mut Scheduler, output: &SchedulerOutput, key: RequestKey, forced: &[u32]) -> bool {
    scheduler.force_tokens(Some(output), key, &ids_of(forced)) > 0
}

/// As many of them as are appended at once.
fn ids_of(forced: &[u32]) -> Vec<i32> {
    forced.iter().take(MAX_FORCED_TOKENS).map(|&token| token as i32).collect()
}

impl DoneMasks {
    fn add(&self) {
        *lock(&self.count) += 1;
        self.grew.notify_all();
    }

    /// Wait until `is_over`, looking again whenever a mask was computed; false once it is later than `until`.
    fn wait(&self, until: Option<Instant>, mut is_over: impl FnMut() -> bool) -> bool {
        loop {
            // Before the look: what is computed after it is waited for.
            let seen = *lock(&self.count);
            if is_over() {
                return true;
            }
            let mut count = lock(&self.count);
            while *count == seen {
                let Some(until) = until else {
                    count = self.grew.wait(count).unwrap_or_else(PoisonError::into_inner);
                    continue;
                };
                let left = until.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return false;
                }
                count = self.grew.wait_timeout(count, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
    }
}

impl Constrained {
    fn new(sample: Arc<Sample>, spec: Arc<GrammarSpec>, is_gate: bool) -> Self {
        Self {
            sample,
            spec,
            num_told: 0,
            is_gate,
            standing: Standing::Awaited,
            has_work: false,
            guessed_for: 0,
        }
    }

    /// Steps may go on without it, or do.
    fn may_be_held(&self) -> bool {
        self.standing != Standing::Awaited || self.sample.is_slow()
    }

    /// What is known of its next tokens before there is a mask takes no time to find.
    fn is_looked_at_ahead(&self) -> bool {
        !self.is_gate && self.standing == Standing::Awaited && !self.sample.may_take_long()
    }

    /// Its request has further tokens.
    fn note(&mut self, tokens: &[i32]) {
        self.num_told += tokens.len();
        self.sample.push(tokens.iter().map(|&token| token as u32));
        self.has_work |= !tokens.is_empty();
    }

    /// The drafts that a step has for its request; those of a step come once.
    fn guess(&mut self, step: u64, draft_token_ids: &[i32]) {
        if std::mem::replace(&mut self.guessed_for, step) != step && !draft_token_ids.is_empty() {
            self.sample.guess(draft_token_ids.iter().map(|&token| token as u32).collect());
            self.has_work = true;
        }
    }

    /// Have the mask behind the tokens that are known computed; false if that was begun before.
    fn tell(&mut self, key: RequestKey, scheduler: &Scheduler, masks: &WorkQueue<Arc<Sample>>) -> bool {
        self.note(&scheduler.output_tokens_from(key, self.num_told));
        self.work_on(masks)
    }

    /// Have a thread do what there is to do; false if there is nothing new.
    fn work_on(&mut self, masks: &WorkQueue<Arc<Sample>>) -> bool {
        let has_work = std::mem::take(&mut self.has_work);
        if has_work {
            // It is never full. Gates are done in no time, but in turn: the owner waits for both alike.
            let _ = masks.push(self.sample.clone(), usize::MAX);
        }
        has_work
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use scheduler::{
        GrammarKind, GrammarSpec, NewRequest, RequestKey, SamplingParams, Scheduler, SchedulerConfig,
        StepBuffers, TokenRows,
    };

    use super::{Constrained, Grammars, Sample};
    use crate::{
        check::matcher_of_bytes,
        sample::{Matching, SLOW_FOR},
        vocabulary::Vocabulary,
    };

    fn spec() -> Arc<GrammarSpec> {
        Arc::new(GrammarSpec::new(GrammarKind::Regex, "(ab|cd){3}e"))
    }

    /// A scheduler with a request of one step that obeys a grammar, and one that does not.
    fn two_requests() -> (Scheduler, RequestKey) {
        let config = SchedulerConfig::new(64, 256);
        let buffers = (0..config.num_buffer_sets()).map(|_| StepBuffers::owned(&config)).collect();
        let mut scheduler = Scheduler::new(config.clone(), buffers).expect("numbers that fit");
        let handle = scheduler.handle();
        let mut keys = Vec::new();
        for (id, grammar) in [("slow", Some(spec())), ("other", None)] {
            let key = handle.new_key();
            let params = SamplingParams { max_tokens: 8, ..SamplingParams::default() };
            let new = NewRequest { grammar, ..NewRequest::new(key, id, vec![1, 2, 3], params) };
            handle.add_request(new).expect("a request that fits");
            keys.push(key);
        }
        handle.grammar_ready(keys[0]);
        assert_eq!(step(&mut scheduler), 2);
        (scheduler, keys[0])
    }

    /// Rows of the next step, which gives each the letter `a`.
    fn step(scheduler: &mut Scheduler) -> u32 {
        let Some(output) = scheduler.schedule().expect("a free set") else { return 0 };
        let sampled = vec![i32::from(b'a'); output.num_sampled as usize];
        scheduler.update_from_output(&output, TokenRows::column(&sampled)).expect("the step in flight");
        output.num_reqs
    }

    #[test]
    fn a_step_does_not_wait_for_a_slow_row() {
        let (mut scheduler, key) = two_requests();
        let vocabulary = Vocabulary::new(Box::new(|| Err("there is no tokenizer".to_owned())), 256);
        let mut grammars = Grammars::start(scheduler.handle(), vocabulary).expect("threads");
        let sample = Arc::new(Sample::new());
        let matcher = matcher_of_bytes(&spec()).expect("an expression");
        sample.begin(Matching::new(Some(matcher), None, &[], 8, false));
        let own = Constrained::new(sample.clone(), spec(), false);
        grammars.samples.insert(key, own);
        assert!(!grammars.hold_slow(&mut scheduler), "none of its masks took long");
        sample.note_slow();
        let busy = sample.keep_busy();
        assert!(grammars.hold_slow(&mut scheduler), "its mask is not there");
        assert_eq!(step(&mut scheduler), 1, "the other one alone");
        assert!(grammars.hold_slow(&mut scheduler));
        drop(busy);
        while grammars.hold_slow(&mut scheduler) {
            std::thread::yield_now(); // until a thread has made the mask
        }
        assert_eq!(step(&mut scheduler), 2, "both");
        let busy = sample.keep_busy();
        assert!(grammars.hold_slow(&mut scheduler));
        grammars.release_slow(&mut scheduler);
        assert_eq!(step(&mut scheduler), 2, "nothing would have to wait");
        drop(busy);
    }

    #[test]
    fn a_row_that_is_fast_again_while_it_is_held_back_is_let_go() {
        let (mut scheduler, key) = two_requests();
        let vocabulary = Vocabulary::new(Box::new(|| Err("there is no tokenizer".to_owned())), 256);
        let mut grammars = Grammars::start(scheduler.handle(), vocabulary).expect("threads");
        let sample = Arc::new(Sample::new());
        let spec = Arc::new(GrammarSpec::new(GrammarKind::Regex, "a{40}"));
        let matcher = matcher_of_bytes(&spec).expect("an expression");
        sample.begin(Matching::new(Some(matcher), None, &[], 8, false));
        grammars.samples.insert(key, Constrained::new(sample.clone(), spec, false));
        sample.note_slow();
        for _ in 1..SLOW_FOR {
            sample.push(std::iter::once(u32::from(b'a')));
            sample.settle(&[], |_| ());
        }
        assert!(sample.is_slow(), "for one mask more");
        // No thread gets at its mask before it is held back, and then one makes it in no time.
        let busy = sample.keep_busy();
        assert!(grammars.hold_slow(&mut scheduler));
        assert_eq!(step(&mut scheduler), 1, "the other one alone");
        drop(busy);
        while !sample.is_settled() {
            std::thread::yield_now();
        }
        assert!(!sample.is_slow());
        assert!(!grammars.hold_slow(&mut scheduler), "its mask is there");
        assert_eq!(step(&mut scheduler), 2, "both, although its masks do not count as slow any more");
    }
}
