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

// SAFETY: a place is written only by the producer while it lies in [head + capacity, …) and read only
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

    /// How many records wait to be consumed; exact for either side, a hint for others.
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
    /// Write a record; `false` when the ring is full. Invisible until `publish`.
    #[inline]
    pub fn push(&mut self, record: EngineCoreOutput) -> bool {
        if self.position.wrapping_sub(self.seen_head) > self.egress.mask {
            // Acquire: pairs with the Release in `Consumer::drain`; the consumer has finished reading
            // the places that it gave up before they are written again.
            self.seen_head = self.egress.head.0.load(Ordering::Acquire);
            if self.position.wrapping_sub(self.seen_head) > self.egress.mask {
                return false;
            }
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
        // Release: pairs with the Acquire in `Producer::push`; reading is over before the places are free again.
        self.egress.head.0.store(position, Ordering::Release);
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.egress.is_empty()
    }
}
