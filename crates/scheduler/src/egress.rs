//! `Egress`: the way of a step's outputs out of the scheduler's thread.
//!
//! A ring of small `Copy` records for one producer and one consumer. The producer writes a whole step and publishes it
//! with one store; both sides are wait-free. A full ring is back-pressure: `push` returns false, and the scheduler
//! keeps the record and offers it again with the next step.
//!
//! Nearly every record is the token of a decode, and a step has a thousand of them. What they have in common (the
//! time), and what only a request's first record has (when it was scheduled, what was cached), are therefore records of
//! their own. The consumer combines them to [`EngineCoreOutput`]s again.
//!
//! Log-probabilities, which few requests ask for, do not fit into a record. They lie in an [`Inbox`] next to the ring.
//! They are pushed before the step is published, and taken after the published records were seen, so they are never
//! later than their token.

pub(crate) mod outgoing;

use std::mem::MaybeUninit;

use crate::{
    Inbox, PooledVector, PromptLogprobs, TokenLogprobs,
    output::{EngineCoreOutput, FinishReason, PredictedDrafts, RequestError, RequestKey},
    sync::{AtomicUsize, Ordering, UnsafeCell},
};

/// The content of a place in the ring.
#[derive(Clone, Copy)]
enum Record {
    /// The time when the records after it were made.
    Time(u64),
    /// Facts that few records have; they belong to the next record.
    Facts { first_scheduled_ns: u64, num_cached_tokens: u32, predicted: PredictedDrafts },
    /// A token that does not end its request.
    Decode { key: RequestKey, new_token_id: i32 },
    /// Anything else.
    Other {
        key: RequestKey,
        new_token_id: i32,
        stop_reason: i32,
        finish_reason: Option<FinishReason>,
        error: RequestError,
    },
}

const _: () = assert!(size_of::<Record>() == 24, "a step writes a record per request");

/// Most places that one `EngineCoreOutput` takes.
const MAX_PLACES: usize = 3;

/// Keeps producer and consumer counters on cache lines of their own (two, for the adjacent-line prefetcher).
#[repr(align(128))]
#[derive(Debug)]
struct Padded<T>(T);

/// The ring. Positions count up forever; `position & mask` is the place.
#[derive(Debug)]
pub struct Egress {
    ring: Box<[UnsafeCell<MaybeUninit<Record>>]>,
    mask: usize,
    /// Everything before this position is published. Written by the producer.
    tail: Padded<AtomicUsize>,
    /// Everything before this position is consumed. Written by the consumer.
    head: Padded<AtomicUsize>,
    /// Next to the ring; see the module docs.
    logprobs: Inbox<TokenLogprobs>,
    /// Likewise, for prompts.
    prompt_logprobs: Inbox<PromptLogprobs>,
    /// Likewise, of requests that end with a vector.
    pooled: Inbox<PooledVector>,
}

// SAFETY: a place is written only by the producer while it lies in [tail, head + capacity) and read only
// by the consumer while it lies in [head, tail); the two counters hand it over with Release/Acquire.
// `Producer` and `Consumer` below are the only doors and neither is `Clone`.
unsafe impl Sync for Egress {}

impl Egress {
    /// Make a ring of at least `capacity` places.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(MAX_PLACES).next_power_of_two();
        Self {
            ring: (0..capacity).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
            mask: capacity - 1,
            tail: Padded(AtomicUsize::new(0)),
            head: Padded(AtomicUsize::new(0)),
            logprobs: Inbox::new(),
            prompt_logprobs: Inbox::new(),
            pooled: Inbox::new(),
        }
    }

    /// Number of places that wait to be consumed: an upper bound for the producer, a lower bound for the consumer, and
    /// a hint for other threads.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tail.0.load(Ordering::Relaxed).wrapping_sub(self.head.0.load(Ordering::Relaxed))
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The scheduler's end.
#[derive(Debug)]
pub struct Producer {
    egress: std::sync::Arc<Egress>,
    /// The next position to write; visible to the consumer after `publish`.
    position: usize,
    /// The last seen `head`, so that the consumer's cache line is read only when the ring looks full.
    seen_head: usize,
    /// The time that the consumer will know at `position`.
    time: u64,
}

/// The output side's end.
#[derive(Debug)]
pub struct Consumer {
    egress: std::sync::Arc<Egress>,
    /// The time of the last `Time` record.
    time: u64,
    /// Everything before this position was published when the consumer last looked.
    seen_tail: usize,
}

/// Make a ring; returns both ends.
#[must_use]
pub fn channel(capacity: usize) -> (Producer, Consumer) {
    let egress = std::sync::Arc::new(Egress::new(capacity));
    (
        Producer { egress: egress.clone(), position: 0, seen_head: 0, time: 0 },
        Consumer { egress, time: 0, seen_tail: 0 },
    )
}

impl Producer {
    /// Free places.
    fn room(&mut self) -> usize {
        // Acquire: pairs with the Release in `Consumer::drain_seen`: the consumer has finished reading the freed places
        // before they are written again.
        self.seen_head = self.egress.head.0.load(Ordering::Acquire);
        self.egress.mask + 1 - self.position.wrapping_sub(self.seen_head)
    }

    /// Whether `push` would find room.
    #[must_use]
    pub fn has_room(&mut self) -> bool {
        let taken = self.position.wrapping_sub(self.seen_head);
        taken + MAX_PLACES <= self.egress.mask + 1 || self.room() >= MAX_PLACES
    }

    /// Write an output; `false` if the ring is full. Invisible until `publish`.
    pub fn push(&mut self, output: EngineCoreOutput) -> bool {
        if !self.has_room() {
            return false;
        }
        let EngineCoreOutput { key, new_token_id, finish_reason, stop_reason, error, .. } = output;
        self.set_time(output.timestamp_ns);
        let EngineCoreOutput { first_scheduled_ns, num_cached_tokens, predicted, .. } = output;
        if (first_scheduled_ns, num_cached_tokens, predicted) != (0, 0, PredictedDrafts::NONE) {
            self.write(Record::Facts { first_scheduled_ns, num_cached_tokens, predicted });
        }
        self.write(Record::Other { key, new_token_id, stop_reason, finish_reason, error });
        true
    }

    /// Add a token's log-probabilities; call this before its record is pushed. Allocates.
    pub fn push_logprobs(&mut self, logprobs: TokenLogprobs) {
        self.egress.logprobs.push(logprobs);
    }

    /// Add log-probabilities of a prompt; call this before the record of the request's first token is pushed.
    pub fn push_prompt_logprobs(&mut self, logprobs: PromptLogprobs) {
        self.egress.prompt_logprobs.push(logprobs);
    }

    /// Add the vector of a request; call this before its last record is pushed.
    pub fn push_pooled(&mut self, vector: PooledVector) {
        self.egress.pooled.push(vector);
    }

    /// A writer for decode tokens that were all made at one time, for as many as there is room.
    pub(crate) fn decodes(&mut self, timestamp_ns: u64) -> Decodes<'_> {
        if self.has_room() {
            self.set_time(timestamp_ns);
        }
        let room = if self.time == timestamp_ns { self.room() } else { 0 };
        Decodes { ring: &self.egress.ring, mask: self.egress.mask, position: &mut self.position, room }
    }

    fn set_time(&mut self, timestamp_ns: u64) {
        if self.time != timestamp_ns {
            self.time = timestamp_ns;
            self.write(Record::Time(timestamp_ns));
        }
    }

    fn write(&mut self, record: Record) {
        // SAFETY: the caller has checked that the place is free, and only this producer writes.
        self.egress.ring[self.position & self.egress.mask]
            .with_mut(|place| unsafe { (*place).write(record) });
        self.position = self.position.wrapping_add(1);
    }

    /// Make everything pushed so far visible.
    pub fn publish(&mut self) {
        // Release: pairs with the Acquire in `Consumer::look`: records are complete before they are seen.
        self.egress.tail.0.store(self.position, Ordering::Release);
    }

    /// Whether published records wait for the consumer.
    #[must_use]
    pub fn has_published(&self) -> bool {
        !self.egress.is_empty()
    }
}

/// See [`Producer::decodes`].
pub(crate) struct Decodes<'a> {
    ring: &'a [UnsafeCell<MaybeUninit<Record>>],
    mask: usize,
    position: &'a mut usize,
    /// How many tokens may be pushed.
    pub(crate) room: usize,
}

impl Decodes<'_> {
    /// Write the token of a decode. Call it at most `room` times.
    #[inline]
    pub(crate) fn push(&mut self, key: RequestKey, new_token_id: i32) {
        debug_assert!(self.room > 0, "more decodes than there is room for");
        self.room -= 1;
        // SAFETY: `Producer::decodes` has seen `room` free places from `position` on, and only this producer writes.
        self.ring[*self.position & self.mask]
            .with_mut(|place| unsafe { (*place).write(Record::Decode { key, new_token_id }) });
        *self.position = self.position.wrapping_add(1);
    }
}

impl Consumer {
    /// Consume everything published, oldest first; log-probabilities and vectors are dropped.
    pub fn drain(&mut self, receive: impl FnMut(EngineCoreOutput)) {
        self.look();
        self.take_logprobs(drop);
        self.take_prompt_logprobs(drop);
        self.take_pooled(drop);
        self.drain_seen(receive);
    }

    /// Note what is published, for the calls below.
    pub fn look(&mut self) {
        // Acquire: pairs with the Release in `Producer::publish`.
        self.seen_tail = self.egress.tail.0.load(Ordering::Acquire);
    }

    /// Consume the log-probabilities of all tokens seen by `look`, and perhaps some of later tokens.
    pub fn take_logprobs(&mut self, receive: impl FnMut(TokenLogprobs)) {
        if !self.egress.logprobs.is_empty() {
            self.egress.logprobs.take(receive);
        }
    }

    /// Consume the log-probabilities of the prompts of all first tokens seen by `look`, and perhaps some of later ones.
    pub fn take_prompt_logprobs(&mut self, receive: impl FnMut(PromptLogprobs)) {
        if !self.egress.prompt_logprobs.is_empty() {
            self.egress.prompt_logprobs.take(receive);
        }
    }

    /// Consume the vectors of all requests whose last records were seen by `look`, and perhaps some of later ones.
    pub fn take_pooled(&mut self, receive: impl FnMut(PooledVector)) {
        if !self.egress.pooled.is_empty() {
            self.egress.pooled.take(receive);
        }
    }

    /// Consume everything seen by `look`, oldest first.
    pub fn drain_seen(&mut self, mut receive: impl FnMut(EngineCoreOutput)) {
        // Relaxed: only this consumer writes `head`.
        let mut position = self.egress.head.0.load(Ordering::Relaxed);
        let tail = self.seen_tail;
        // The `Facts` belong to the record after them, which was published with them.
        let mut facts = (0, 0, PredictedDrafts::NONE);
        while position != tail {
            // SAFETY: positions in [head, tail) were written and published, and are read by this consumer alone.
            let record = self.egress.ring[position & self.egress.mask]
                .with(|place| unsafe { (*place).assume_init_read() });
            position = position.wrapping_add(1);
            let (first_scheduled_ns, num_cached_tokens, predicted) = facts;
            let mut output = EngineCoreOutput {
                key: RequestKey(0),
                new_token_id: -1,
                finish_reason: None,
                stop_reason: -1,
                num_cached_tokens,
                first_scheduled_ns,
                timestamp_ns: self.time,
                error: RequestError::None,
                predicted,
            };
            match record {
                Record::Time(time) => {
                    self.time = time;
                    continue;
                }
                Record::Facts { first_scheduled_ns, num_cached_tokens, predicted } => {
                    facts = (first_scheduled_ns, num_cached_tokens, predicted);
                    continue;
                }
                Record::Decode { key, new_token_id } => {
                    output.key = key;
                    output.new_token_id = new_token_id;
                }
                Record::Other { key, new_token_id, stop_reason, finish_reason, error } => {
                    output =
                        EngineCoreOutput { key, new_token_id, finish_reason, stop_reason, error, ..output };
                }
            }
            facts = (0, 0, PredictedDrafts::NONE);
            receive(output);
        }
        // Release: pairs with the Acquire in `Producer::room`: reading is finished before the places are free again.
        self.egress.head.0.store(position, Ordering::Release);
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.egress.is_empty()
    }
}

#[cfg(test)]
fn record(n: u64) -> EngineCoreOutput {
    EngineCoreOutput {
        key: crate::RequestKey(n),
        new_token_id: n as i32,
        finish_reason: None,
        stop_reason: -1,
        num_cached_tokens: 0,
        first_scheduled_ns: 0,
        timestamp_ns: 1,
        error: crate::RequestError::None,
        predicted: PredictedDrafts::NONE,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{channel, record};
    use crate::output::{EngineCoreOutput, FinishReason, PredictedDrafts};

    #[test]
    fn a_full_ring_says_so_and_loses_nothing() {
        // Of eight places, one is for the time, and two are kept for the facts of a first token.
        let (mut producer, mut consumer) = channel(8);
        assert!((0..5).all(|n| producer.push(record(n))));
        assert!(!producer.push(record(5)));
        assert!(consumer.is_empty(), "nothing is visible before it is published");
        producer.publish();
        let mut received = Vec::new();
        consumer.drain(|record| received.push(record.key.0));
        assert_eq!(received, [0, 1, 2, 3, 4]);
        assert!(producer.push(record(5)));
    }

    #[test]
    fn outputs_are_put_together_again() {
        let (mut producer, mut consumer) = channel(64);
        let first =
            EngineCoreOutput { first_scheduled_ns: 5, num_cached_tokens: 16, timestamp_ns: 7, ..record(1) };
        let last = EngineCoreOutput {
            finish_reason: Some(FinishReason::Stop),
            stop_reason: 3,
            timestamp_ns: 8,
            predicted: PredictedDrafts { num_accepted: 2, num_rejected: 1 },
            ..record(1)
        };
        assert!(producer.push(first));
        let mut decodes = producer.decodes(8);
        decodes.push(crate::RequestKey(2), 2);
        assert!(producer.push(last));
        producer.publish();
        let mut received = Vec::new();
        consumer.drain(|output| received.push(output));
        assert_eq!(received, [first, EngineCoreOutput { timestamp_ns: 8, ..record(2) }, last]);
    }

    #[test]
    fn records_cross_threads_in_order() {
        let (mut producer, mut consumer) = channel(64);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for n in 0..100_000 {
                    while !producer.push(record(n)) {
                        producer.publish();
                        std::thread::yield_now();
                    }
                }
                producer.publish();
            });
            let mut next = 0;
            while next < 100_000 {
                consumer.drain(|record| {
                    assert_eq!(record.key.0, next);
                    next += 1;
                });
            }
        });
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::{EngineCoreOutput, channel, record};

    /// A small ring, overrun while it is drained: in order, none lost, no place read while it is written. Each output
    /// takes three of its four places, so that the second one is written over what is read at the same time.
    #[test]
    fn nothing_is_lost_when_the_ring_wraps() {
        loom::model(|| {
            let (mut producer, mut consumer) = channel(4);
            let sender = loom::thread::spawn(move || {
                let mut refused = 0;
                for n in 0..3 {
                    let all_parts = EngineCoreOutput {
                        timestamp_ns: 1 + n,
                        num_cached_tokens: 1 + n as u32,
                        ..record(n)
                    };
                    if !producer.push(all_parts) {
                        refused += 1;
                    }
                    producer.publish();
                }
                refused
            });
            let mut received = Vec::new();
            consumer.drain(|record| received.push(record.key.0));
            let refused = sender.join().unwrap();
            consumer.drain(|record| received.push(record.key.0));
            assert_eq!(received.len() + refused, 3);
            assert!(received.is_sorted() && received[0] == 0);
        });
    }
}
