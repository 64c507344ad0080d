//! `Outbox`: which output of a request waits to be taken, and when it may go.

use crate::delivery::{Delivery, Pieces};

/// The output of one request that waits to be taken.
#[derive(Debug)]
pub(crate) struct Outbox {
    pub(crate) delivery: Delivery,
    /// The pieces of the text that goes out as events.
    pieces: Pieces,
    /// How many tokens go out together, from the second on.
    stream_interval: u32,
    /// How many tokens go out together next: one at first.
    next_interval: u32,
    /// Tokens that wait for others of their interval.
    num_waiting: u32,
    /// Whether there is output that was not taken yet.
    has_changed: bool,
    /// Whether the request is in the queue of those whose output can be taken.
    pub(crate) is_queued: bool,
    /// Whether its reader is busy.
    pub(crate) is_held: bool,
}

impl Outbox {
    pub(crate) fn new(delivery: Delivery, stream_interval: u32) -> Self {
        Self {
            delivery,
            pieces: Pieces::default(),
            stream_interval,
            next_interval: 1,
            num_waiting: 0,
            has_changed: false,
            is_queued: false,
            is_held: false,
        }
    }

    fn makes_events(&self) -> bool {
        matches!(self.delivery, Delivery::Events(_) | Delivery::Turn(_) | Delivery::Response(_))
    }

    /// Count a record of the request, whose text that waits now has `num_bytes` bytes.
    pub(crate) fn note(&mut self, is_token: bool, is_finished: bool, num_bytes: usize) {
        if is_finished || !is_token {
            self.has_changed = true; // the last token's text goes with the end
            return;
        }
        self.num_waiting += 1;
        if self.num_waiting < self.next_interval || (self.makes_events() && !self.pieces.push(num_bytes)) {
            return; // a token without certain text waits for the next one's
        }
        self.has_changed = true;
        self.num_waiting = 0;
        self.next_interval = self.stream_interval;
    }

    /// End a piece at byte `num_bytes` of the text that waits.
    pub(crate) fn end_piece(&mut self, num_bytes: usize) {
        self.pieces.push(num_bytes);
    }

    /// Let tokens go out that wait for others of their interval; `num_bytes` bytes of text wait.
    pub(crate) fn flush(&mut self, num_bytes: usize) {
        self.has_changed |=
            if self.makes_events() { self.pieces.push(num_bytes) } else { self.num_waiting > 0 };
    }

    /// Whether the request must be put into the queue: there is output, its caller waits for it, and it is not in the queue
    /// yet.
    pub(crate) fn queue_up(&mut self, is_finished: bool) -> bool {
        let is_wanted = match &self.delivery {
            Delivery::Deltas => true,
            Delivery::AtTheEnd => is_finished,
            Delivery::Events(_) | Delivery::Turn(_) | Delivery::Response(_) => {
                is_finished || self.pieces.end() > 0
            }
        };
        let queues_up = is_wanted && self.has_changed && !self.is_held && !self.is_queued;
        self.is_queued |= queues_up;
        queues_up
    }

    /// Take the pieces of the text; of a delivery that is not events, all that waits is taken.
    pub(crate) fn take(&mut self) -> Pieces {
        self.has_changed = false;
        if !self.makes_events() {
            self.num_waiting = 0;
        }
        std::mem::take(&mut self.pieces)
    }
}
