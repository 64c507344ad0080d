//! One sample of a request under a grammar: the tokens that it got, and what the next one may be.

pub(crate) mod thinking;

use std::{
    any::Any,
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use scheduler::{GrammarProgress, GrammarWork, RequestError};

use crate::{
    matcher::Matcher,
    room::Charge,
    sample::thinking::{Next, Thinking},
    thread_time::thread_time,
};

/// A mask that takes longer is not waited for by a step with other rows. Processor time: what else runs on the machine
/// makes no row slow.
const SLOW_MASK: Duration = Duration::from_millis(5);
/// Behind a mask that took long so many are held to take as long. Then they have been fast, and a step takes its row in.
pub(crate) const SLOW_FOR: u32 = 8;

/// What the next token of a sample may be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// One of the ids in its mask.
    Masked,
    /// It is not known yet: the sample is withheld.
    Late,
    /// Any: it thinks, or nothing holds what follows.
    Free,
    /// None: the grammar is complete and nothing can follow.
    Complete,
    /// None: the grammar does not take what was sampled, or has become too complex to follow.
    Rejected,
    /// None: the grammar has become too large where other grammars have need of the memory.
    CrowdedOut,
}

impl Verdict {
    /// No token follows.
    fn is_end(self) -> bool {
        matches!(self, Self::Complete | Self::Rejected | Self::CrowdedOut)
    }
}

/// What is known of the next tokens of a sample before there is a mask.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Ahead {
    /// Nothing.
    Open,
    /// These have to follow; there may be none.
    Tokens(Vec<u32>),
    /// None can follow: the grammar is complete.
    End,
}

/// A matcher and the mask behind the tokens that it has seen.
pub struct Matching {
    /// `None`: what is not thought may be anything.
    matcher: Option<Matcher>,
    /// `None`: the matcher sees all tokens.
    thinking: Option<Thinking>,
    hides_eos: bool,
    mask: Vec<u32>,
    verdict: Verdict,
    /// What has to follow: the grammar leaves one text, and these are its tokens, none where it leaves a choice. `None`:
    /// that was not looked at yet.
    forced: Option<VecDeque<u32>>,
    /// Tokens came, and what may follow them was not computed yet.
    is_behind: bool,
    /// `None`: what it takes of memory is not counted.
    charge: Option<Charge>,
    walk: Walk,
}

/// What may follow each of some guesses, if they come.
#[derive(Default)]
struct Walk {
    guesses: Vec<u32>,
    /// Behind the first of them, behind the second and so on, as far as it is known.
    masks: Vec<(Verdict, Vec<u32>)>,
}

impl std::fmt::Debug for Matching {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matching").field("verdict", &self.verdict).finish_non_exhaustive()
    }
}

impl Matching {
    /// A sample without tokens. With `hides_eos` an id that ends an answer is allowed only where nothing else is.
    #[must_use]
    pub(crate) fn new(
        matcher: Option<Matcher>,
        thinking: Option<Thinking>,
        eos_token_ids: &[u32],
        num_words: usize,
        hides_eos: bool,
    ) -> Self {
        let mask = vec![0; num_words];
        let verdict = Verdict::Masked;
        let (forced, is_behind, charge) = (None, true, None);
        let walk = Walk::default();
        let mut matching =
            Self { matcher, thinking, hides_eos, mask, verdict, forced, is_behind, charge, walk };
        matching.settle(eos_token_ids);
        matching
    }

    /// Count what it takes of memory.
    #[must_use]
    pub(crate) fn charged(mut self, charge: Charge) -> Self {
        self.charge = Some(charge);
        self.count_bytes();
        self
    }

    /// The matcher, with the tokens that it has seen.
    pub(crate) fn into_matcher(self) -> Option<Matcher> {
        self.matcher
    }

    /// Take tokens that were sampled, and compute what may follow.
    pub(crate) fn advance(&mut self, tokens: &[u32], eos_token_ids: &[u32]) {
        self.take(tokens);
        self.settle(eos_token_ids);
    }

    /// Take tokens, and tell what is known before there is a mask, which takes longer.
    pub(crate) fn look_ahead(&mut self, tokens: &[u32], eos_token_ids: &[u32]) -> Ahead {
        self.take(tokens);
        if self.verdict == Verdict::Complete {
            return Ahead::End;
        }
        let may_think = self.thinking.as_ref().is_some_and(|thinking| thinking.next() != Next::Grammar);
        if self.verdict.is_end() || may_think || !self.find_forced(eos_token_ids) {
            return Ahead::Open;
        }
        Ahead::Tokens(self.forced.iter().flatten().copied().collect())
    }

    /// Compute what may follow each of some guesses of the next tokens, and forget them again. Ends before one that may
    /// not come, before one that ends the output or cannot be taken back, and once it has taken long.
    pub(crate) fn walk(&mut self, guesses: &[u32], eos_token_ids: &[u32]) {
        let mut masks = Vec::new();
        let (thinking, forced) = (self.thinking.clone(), self.forced.clone());
        let (mask, verdict) = (self.mask.clone(), self.verdict);
        let (began, mut num_taken) = (thread_time(), 0);
        for &guess in guesses {
            let can_roll_back = self.matcher.as_ref().is_none_or(|matcher| matcher.can_roll_back(guess));
            let may_come = self.may_come(guess) && !eos_token_ids.contains(&guess);
            if !can_roll_back || !may_come || thread_time().saturating_sub(began) > SLOW_MASK {
                break;
            }
            num_taken += usize::from(self.take_one(guess));
            self.compute_mask(eos_token_ids);
            masks.push((self.verdict, self.mask.clone()));
        }
        (self.thinking, self.forced, self.mask, self.verdict) = (thinking, forced, mask, verdict);
        self.walk = Walk { guesses: guesses.to_vec(), masks };
        let rolled_back = self.matcher.as_mut().map_or(Ok(()), |matcher| matcher.roll_back(num_taken));
        if rolled_back.is_err() {
            self.verdict = Verdict::Rejected; // a guess has made it too complex to follow
        }
    }

    /// What may follow each of some guesses, as far as it was computed.
    pub(crate) fn behind(&self, guesses: &[u32]) -> &[(Verdict, Vec<u32>)] {
        if self.walk.guesses == guesses { &self.walk.masks } else { &[] }
    }

    /// How many of some guesses may come, as far as that is known without masks.
    pub(crate) fn num_taken(&mut self, guesses: &[u32]) -> usize {
        let may_think = self.thinking.as_ref().is_some_and(|thinking| thinking.next() != Next::Grammar);
        match &mut self.matcher {
            _ if self.verdict.is_end() => 0,
            Some(matcher) if !may_think => {
                let can_roll_back = |guess: &&u32| matcher.can_roll_back(**guess);
                let guesses = &guesses[..guesses.iter().take_while(can_roll_back).count()];
                let mut forced = self.forced.iter().flatten().zip(guesses);
                let differs = forced.position(|(forced, guess)| forced != guess);
                matcher.num_taken(guesses).unwrap_or(0).min(differs.unwrap_or(guesses.len()))
            }
            _ => guesses.len(),
        }
    }

    /// Whether the mask has an id.
    fn may_come(&self, token: u32) -> bool {
        let is_in_mask = self.mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1);
        self.verdict == Verdict::Free || (self.verdict == Verdict::Masked && is_in_mask)
    }

    fn take(&mut self, tokens: &[u32]) {
        for &token in tokens {
            if self.verdict.is_end() {
                return;
            }
            self.is_behind = true;
            self.take_one(token);
        }
        self.walk = Walk::default();
    }

    /// Take a token; whether the matcher has got it.
    fn take_one(&mut self, token: u32) -> bool {
        let is_thought = self.thinking.as_mut().is_some_and(|thinking| thinking.take(token));
        let Some(matcher) = self.matcher.as_mut().filter(|_| !is_thought) else { return false };
        let expected = self.forced.as_mut().and_then(VecDeque::pop_front);
        self.forced = self.forced.take().filter(|rest| !rest.is_empty());
        if expected.is_some_and(|expected| expected != token)
            || matcher.is_stopped()
            || matcher.take(token).is_err()
        {
            self.verdict = Verdict::Rejected;
        } else if matcher.is_stopped() {
            self.verdict = if matcher.is_complete() { Verdict::Complete } else { Verdict::Rejected };
        }
        true
    }

    /// Compute what may follow the tokens that came.
    fn settle(&mut self, eos_token_ids: &[u32]) {
        if std::mem::take(&mut self.is_behind) {
            self.compute_mask(eos_token_ids);
            self.count_bytes();
        }
    }

    fn count_bytes(&mut self) {
        let (Some(matcher), Some(charge)) = (&self.matcher, &mut self.charge) else { return };
        let has_room = matcher.size().is_ok_and(|size| charge.set(size.num_bytes));
        if !has_room && self.verdict == Verdict::Masked {
            self.verdict = Verdict::CrowdedOut;
        }
    }

    /// What may follow.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// The tokens that have to follow, in their order; none where there is a choice, or where thoughts may come first.
    #[must_use]
    pub fn forced(&self) -> &[u32] {
        let may_think = self.thinking.as_ref().is_some_and(|thinking| thinking.next() != Next::Grammar);
        let forced = self.forced.as_ref().filter(|_| self.verdict == Verdict::Masked && !may_think);
        forced.map_or(&[], |forced| forced.as_slices().0)
    }

    /// The ids that may follow: bit `i % 32` of word `i / 32` is for id `i`.
    #[must_use]
    pub fn mask(&self) -> &[u32] {
        &self.mask
    }

    fn compute_mask(&mut self, eos_token_ids: &[u32]) {
        if self.verdict.is_end() {
            return;
        }
        let next = self.thinking.as_ref().map_or(Next::Grammar, Thinking::next);
        self.verdict = Verdict::Masked;
        match next {
            Next::Any => self.verdict = Verdict::Free,
            Next::AnyButEnd => {
                self.mask.fill(u32::MAX);
                for &eos in eos_token_ids {
                    self.allow(eos, false);
                }
            }
            Next::Only(token) => {
                self.mask.fill(0);
                self.allow(token, true);
            }
            Next::Grammar => self.compute_mask_of_grammar(eos_token_ids),
            Next::GrammarOr(token) => {
                self.compute_mask_of_grammar(eos_token_ids);
                if self.verdict == Verdict::Masked {
                    self.allow(token, true);
                }
            }
        }
    }

    /// Allow or forbid an id.
    fn allow(&mut self, token: u32, is_allowed: bool) {
        let bit = 1 << (token % 32);
        if let Some(word) = self.mask.get_mut(token as usize / 32) {
            *word = if is_allowed { *word | bit } else { *word & !bit };
        }
    }

    /// Look whether the grammar leaves one text; false when it has become too complex to follow.
    fn find_forced(&mut self, eos_token_ids: &[u32]) -> bool {
        let Some(matcher) = self.matcher.as_mut().filter(|_| self.forced.is_none()) else { return true };
        let Ok(tokens) = matcher.forced_tokens() else { return false };
        // An end is not text.
        self.forced = Some(tokens.into_iter().take_while(|token| !eos_token_ids.contains(token)).collect());
        true
    }

    fn compute_mask_of_grammar(&mut self, eos_token_ids: &[u32]) {
        if self.matcher.is_none() {
            self.verdict = Verdict::Free;
            return;
        }
        if !self.find_forced(eos_token_ids) {
            self.verdict = Verdict::Rejected;
            return;
        }
        if let Some(&token) = self.forced.as_ref().and_then(VecDeque::front) {
            self.mask.fill(0);
            self.allow(token, true);
            return;
        }
        let Some(matcher) = &mut self.matcher else { return };
        let Ok(allowed) = matcher.mask() else {
            self.verdict = Verdict::Rejected;
            return;
        };
        let words = allowed.as_slice();
        let count = self.mask.len().min(words.len());
        self.mask[..count].copy_from_slice(&words[..count]);
        self.mask[count..].fill(0);
        let with_eos = self.mask.iter().any(|&word| word != 0);
        let mut hidden = Vec::new();
        for &eos in eos_token_ids {
            let (word, bit) = (eos as usize / 32, 1 << (eos % 32));
            if let Some(word) = self.mask.get_mut(word).filter(|word| **word & bit != 0) {
                *word &= !bit;
                hidden.push(eos);
            }
        }
        let without_eos = self.mask.iter().any(|&word| word != 0);
        let is_over = with_eos || matcher.is_stopped();
        self.verdict = match (without_eos, is_over) {
            (true, _) => Verdict::Masked,
            (false, true) => Verdict::Complete,
            (false, false) => Verdict::Rejected,
        };
        if !self.hides_eos {
            for eos in hidden {
                self.allow(eos, true);
            }
        }
    }
}

/// What a matcher has not seen.
#[derive(Debug, Default)]
struct Pending {
    tokens: Vec<u32>,
    /// What is guessed to follow them; empty: nothing.
    guesses: Vec<u32>,
}

/// A sample as the threads share it: the first one that comes does the work, the second finds it done.
#[derive(Debug)]
pub(crate) struct Sample {
    pending: Mutex<Pending>,
    /// `None` until the grammar is compiled.
    matching: Mutex<Option<Matching>>,
    /// One of its masks took long, or its grammar is so large that one may: no other work waits behind it.
    may_take_long: AtomicBool,
    /// Masks for which steps do not wait, because one took long.
    num_unawaited: AtomicU32,
    /// Why there is no grammar.
    failure: OnceLock<RequestError>,
}

impl GrammarWork for Sample {
    fn progress(&self) -> GrammarProgress {
        if let Some(&error) = self.failure.get() {
            return GrammarProgress::Failed(error);
        }
        // Before its request has arrived, only the thread that begins it takes it, and that one tells the request next.
        match self.matching.try_lock().as_deref() {
            Ok(Some(_)) => GrammarProgress::Ready,
            _ => GrammarProgress::Compiling,
        }
    }

    fn num_taken(&self, token_ids: &[i32]) -> Option<usize> {
        if self.may_take_long() {
            return Some(0); // masks behind guesses would take as long, and come to nothing where a guess is wrong
        }
        let mut matching = self.matching.try_lock().ok()?;
        let matching = matching.as_mut()?;
        let guesses: Vec<u32> = token_ids.iter().map(|&token_id| token_id as u32).collect();
        lock(&self.pending).tokens.is_empty().then(|| matching.num_taken(&guesses))
    }

    fn into_any(self: Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self
    }
}

impl Sample {
    pub(crate) fn new() -> Self {
        Self {
            pending: Mutex::default(),
            matching: Mutex::default(),
            may_take_long: AtomicBool::new(false),
            num_unawaited: AtomicU32::new(0),
            failure: OnceLock::new(),
        }
    }

    /// The grammar cannot be compiled.
    pub(crate) fn fail(&self, error: RequestError) {
        let _ = self.failure.set(error); // it failed before
    }

    /// The grammar is compiled.
    pub(crate) fn begin(&self, matching: Matching) {
        *lock(&self.matching) = Some(matching);
    }

    /// Do what computes a mask, or a part of one, and note it if that takes long.
    fn noting_slow<T>(&self, compute: impl FnOnce() -> T) -> T {
        let began = thread_time();
        let computed = compute();
        if thread_time().saturating_sub(began) > SLOW_MASK {
            self.note_slow();
        } else {
            // Relaxed, and two steps: what computes holds the matching, and another mask more or less does no harm.
            let left = self.num_unawaited.load(Ordering::Relaxed);
            self.num_unawaited.store(left.saturating_sub(1), Ordering::Relaxed);
        }
        computed
    }

    /// Its request has left: what followed it, unless it was not compiled.
    pub(crate) fn end(&self) -> Option<Matching> {
        lock(&self.matching).take()
    }

    /// Tokens that came.
    pub(crate) fn push(&self, tokens: impl Iterator<Item = u32>) {
        lock(&self.pending).tokens.extend(tokens);
    }

    /// What is guessed to follow all tokens that came.
    pub(crate) fn guess(&self, guesses: Vec<u32>) {
        lock(&self.pending).guesses = guesses;
    }

    /// Do what is to be done and look at the outcome; waits for a thread that is at it.
    pub(crate) fn settle<T>(&self, eos_token_ids: &[u32], look: impl FnOnce(Option<&Matching>) -> T) -> T {
        let mut matching = lock(&self.matching);
        let Pending { tokens, guesses } = std::mem::take(&mut *lock(&self.pending));
        if let Some(matching) = &mut *matching {
            if !tokens.is_empty() || matching.is_behind {
                self.noting_slow(|| matching.advance(&tokens, eos_token_ids));
            }
            if !guesses.is_empty() && !self.may_take_long() {
                matching.walk(&guesses, eos_token_ids);
            }
        }
        look(matching.as_ref())
    }

    /// Take the tokens that came and tell what is known before there is a mask; not where a thread is at it.
    pub(crate) fn look_ahead(&self, eos_token_ids: &[u32]) -> Ahead {
        let Ok(mut matching) = self.matching.try_lock() else { return Ahead::Open };
        let Some(matching) = &mut *matching else { return Ahead::Open };
        let tokens = std::mem::take(&mut lock(&self.pending).tokens);
        self.noting_slow(|| matching.look_ahead(&tokens, eos_token_ids))
    }

    /// One of its masks took long.
    pub(crate) fn note_slow(&self) {
        self.note_large();
        // Relaxed: it stands for itself, and comes in time for the next step or the one after it.
        self.num_unawaited.store(SLOW_FOR, Ordering::Relaxed);
    }

    /// Its grammar is so large that a mask may take long.
    pub(crate) fn note_large(&self) {
        self.may_take_long.store(true, Ordering::Relaxed); // as above
    }

    /// Whether what is computed for it may take long: not where others would wait for that.
    pub(crate) fn may_take_long(&self) -> bool {
        self.may_take_long.load(Ordering::Relaxed) // see where it is stored
    }

    /// What a thread holds that computes its mask.
    #[cfg(test)]
    pub(crate) fn keep_busy(&self) -> MutexGuard<'_, Option<Matching>> {
        lock(&self.matching)
    }

    /// Whether one of its last masks took so long that steps are planned without it until it has the next one.
    pub(crate) fn is_slow(&self) -> bool {
        self.num_unawaited.load(Ordering::Relaxed) > 0 // see where it is stored
    }

    /// Whether the mask behind all tokens that came is there, without waiting.
    pub(crate) fn is_settled(&self) -> bool {
        // What takes tokens holds the matching before and while it does.
        let matching = match self.matching.try_lock() {
            Err(TryLockError::WouldBlock) => return false,
            Err(TryLockError::Poisoned(matching)) => matching.into_inner(),
            Ok(matching) => matching,
        };
        let pending = lock(&self.pending);
        let is_told = pending.tokens.is_empty() && pending.guesses.is_empty();
        matching.as_ref().is_none_or(|matching| !matching.is_behind) && is_told
    }
}

/// A thread that panicked has left whole values behind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use scheduler::{GrammarKind, GrammarSpec, GrammarWork};

    use super::{Matching, SLOW_FOR, Sample};
    use crate::check::matcher_of_bytes;

    #[test]
    fn a_sample_whose_masks_are_fast_again_is_awaited_again() {
        let spec = GrammarSpec::new(GrammarKind::Regex, "[ab]{40}");
        let sample = Sample::new();
        let matcher = matcher_of_bytes(&spec).expect("an expression");
        sample.begin(Matching::new(Some(matcher), None, &[], 8, false));
        let (a, b) = (i32::from(b'a'), i32::from(b'b'));
        assert_eq!(sample.num_taken(&[a, b, 0, a]), Some(2));
        sample.note_slow();
        for number in 0..SLOW_FOR {
            assert!(sample.is_slow(), "{number}");
            assert_eq!(sample.num_taken(&[a, b]), Some(0), "masks behind drafts would take as long");
            sample.push(std::iter::once(u32::from(b'a')));
            sample.settle(&[], |_| ());
        }
        assert!(!sample.is_slow() && sample.may_take_long());
    }
}
