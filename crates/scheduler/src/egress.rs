//! `Egress`: how what a step produced leaves the scheduler's thread.
//!
//! A ring of `Copy` records for one producer and one consumer. The producer writes a whole step and
//! publishes it with one store; both sides are wait-free. A full ring is back-pressure: `push` says
//! no, and the scheduler keeps the record and offers it again with the next step.

use std::mem::MaybeUninit;

use crate::{
    output::EngineCoreOutput,
    sync::{AtomicUsize, Ordering, UnsafeCell},
};

/// Keeps producer and consumer counters on cache lines of their own (two, for the adjacent-line prefetcher).
#[repr(align(128))]
#[derive(Debug)]
struct Padded<T>(T);

/// The ring. Positions count up for ever; `position & mask` is the place.
#[derive(Debug)]
pub struct Egress {
    ring: Box<[UnsafeCell<MaybeUninit<EngineCoreOutput>>]>,
    mask: usize,
    /// Everything before it is published. Written by the producer.
    tail: Padded<AtomicUsize>,
    /// Everything before it is consumed. Written by the consumer.
    head: Padded<AtomicUsize>,
}

// SAFETY: a place is written only by the producer while it lies in [tail, head + capacity) and read only
// by the consumer while it lies in [head, tail); the two counters hand it over with Release/Acquire.
// `Producer` and `Consumer` below are the only doors and neither is `Clone`.
unsafe impl Sync for Egress {}

impl Egress {
    /// A ring of at least `capacity` records.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.next_power_of_two().max(2);
        Self {
            ring: (0..capacity).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
            mask: capacity - 1,
            tail: Padded(AtomicUsize::new(0)),
            head: Padded(AtomicUsize::new(0)),
        }
    }

    /// How many records wait to be consumed: at most so many as seen by the producer, at least so many as seen by
    /// the consumer, a hint for others.
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
    /// Next position to write; published by `publish`.
    position: usize,
    /// Last seen `head`, so that the consumer's line is read only when the ring looks full.
    seen_head: usize,
}

/// The output side's end.
#[derive(Debug)]
pub struct Consumer {
    egress: std::sync::Arc<Egress>,
}

/// Both ends of a new ring.
#[must_use]
pub fn channel(capacity: usize) -> (Producer, Consumer) {
    let egress = std::sync::Arc::new(Egress::new(capacity));
    (Producer { egress: egress.clone(), position: 0, seen_head: 0 }, Consumer { egress })
}

impl Producer {
    /// How many records `push` would find a place for.
    #[inline]
    pub fn room(&mut self) -> usize {
        // Acquire: pairs with the Release in `Consumer::drain`; the consumer has finished reading
        // the places that it gave up before they are written again.
        self.seen_head = self.egress.head.0.load(Ordering::Acquire);
        self.egress.mask + 1 - self.position.wrapping_sub(self.seen_head)
    }

    /// Whether `push` would find a place.
    #[inline]
    pub fn has_room(&mut self) -> bool {
        self.position.wrapping_sub(self.seen_head) <= self.egress.mask || self.room() > 0
    }

    /// Write a record; `false` when the ring is full. Invisible until `publish`.
    #[inline]
    pub fn push(&mut self, record: EngineCoreOutput) -> bool {
        if !self.has_room() {
            return false;
        }
        // SAFETY: the place is free (checked above) and only this producer writes.
        self.egress.ring[self.position & self.egress.mask]
            .with_mut(|place| unsafe { (*place).write(record) });
        self.position = self.position.wrapping_add(1);
        true
    }

    /// Make everything pushed so far visible.
    pub fn publish(&mut self) {
        // Release: pairs with the Acquire in `Consumer::drain`; the records are whole before they are seen.
        self.egress.tail.0.store(self.position, Ordering::Release);
    }

    /// Whether anything published waits for the consumer.
    #[must_use]
    pub fn has_published(&self) -> bool {
        !self.egress.is_empty()
    }
}

impl Consumer {
    /// Consume everything published, oldest first.
    pub fn drain(&mut self, mut receive: impl FnMut(EngineCoreOutput)) {
        // Relaxed: only this consumer writes `head`.
        let mut position = self.egress.head.0.load(Ordering::Relaxed);
        // Acquire: pairs with the Release in `Producer::publish`.
        let tail = self.egress.tail.0.load(Ordering::Acquire);
        while position != tail {
            // SAFETY: positions in [head, tail) were written and published, and are read by this consumer alone.
            let record = self.egress.ring[position & self.egress.mask]
                .with(|place| unsafe { (*place).assume_init_read() });
            position = position.wrapping_add(1);
            receive(record);
        }
        // Release: pairs with the Acquire in `Producer::has_room`; reading is over before the places are free again.
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
        timestamp_ns: n,
        error: crate::RequestError::None,
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::{channel, record};

    #[test]
    fn a_full_ring_says_so_and_loses_nothing() {
        let (mut producer, mut consumer) = channel(4);
        assert!((0..4).all(|n| producer.push(record(n))));
        assert!(!producer.push(record(4)));
        assert!(consumer.is_empty(), "nothing is visible before it is published");
        producer.publish();
        let mut received = Vec::new();
        consumer.drain(|record| received.push(record.key.0));
        assert_eq!(received, [0, 1, 2, 3]);
        assert!(producer.push(record(4)));
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
    use super::{channel, record};

    /// A ring of two, overrun while it is drained: in order, none lost, no place read while it is written.
    #[test]
    fn nothing_is_lost_when_the_ring_wraps() {
        loom::model(|| {
            let (mut producer, mut consumer) = channel(2);
            let sender = loom::thread::spawn(move || {
                let mut refused = 0;
                for n in 0..3 {
                    if !producer.push(record(n)) {
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
