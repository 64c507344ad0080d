//! `LineRecord`: a node's report to the head about one of its ranks.

use crate::{control::Line, sync::Ordering, writer::LineView};

/// Bytes of a record.
pub(crate) const RECORD_BYTES: usize = 40;

/// What a rank reports, except for times of a clock that the head does not share.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct LineRecord {
    taken: u32,
    done: u32,
    failed: u32,
    activity: u32,
    activity_ns: u64,
    activities: u64,
    value: u64,
}

impl LineRecord {
    pub(crate) fn of(view: &LineView) -> Self {
        Self {
            taken: view.taken,
            done: view.done,
            failed: view.failed.into(),
            activity: view.activity,
            activity_ns: view.activity_ns,
            activities: view.activities,
            value: view.value,
        }
    }

    pub(crate) fn encode(&self, body: &mut Vec<u8>) {
        for number in [self.taken, self.done, self.failed, self.activity] {
            body.extend_from_slice(&number.to_le_bytes());
        }
        for number in [self.activity_ns, self.activities, self.value] {
            body.extend_from_slice(&number.to_le_bytes());
        }
    }

    pub(crate) fn decode(body: &[u8; RECORD_BYTES]) -> Self {
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| body[4 * at + index]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| body[16 + 8 * at + index]));
        Self {
            taken: word(0),
            done: word(1),
            failed: word(2),
            activity: word(3),
            activity_ns: long(0),
            activities: long(1),
            value: long(2),
        }
    }

    /// Write this record into the head's line of the rank.
    pub(crate) fn write(&self, line: &Line) {
        line.failed.store(self.failed, Ordering::Relaxed);
        line.activity.store(self.activity, Ordering::Relaxed);
        line.activity_ns.store(self.activity_ns, Ordering::Relaxed);
        line.activities.store(self.activities, Ordering::Relaxed);
        line.value.store(self.value, Ordering::Relaxed); // published by the number, as a reader's own
        if line.taken.number() != self.taken {
            line.taken.raise(self.taken);
        }
        if line.done.number() != self.done {
            line.done.raise(self.done);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_comes_out_as_it_went_in() {
        let record = LineRecord {
            taken: 1,
            done: 2,
            failed: 3,
            activity: 4,
            activity_ns: 5,
            activities: 6,
            value: u64::MAX,
        };
        let mut body = Vec::new();
        record.encode(&mut body);
        assert_eq!(LineRecord::decode(body.as_slice().try_into().expect("the length")), record);
        let line = Line::default();
        record.write(&line);
        assert_eq!(
            (line.taken.number(), line.done.number(), line.value.load(Ordering::Relaxed)),
            (1, 2, u64::MAX)
        );
    }
}
