//! The step channel: what the first rank of a model tells the others, as integers.
//!
//! ```text
//!  rank 0: Writer ── frame n ──▶ slot n mod 4 ── Gate "published" ──▶ Reader 1, Reader 2 …
//!                     ▲                                                     │
//!                     └───────────── each reader's Line: taken, done ◀──────┘
//! ```
//!
//! The memory is a memfd that children inherit: it has no name, so nothing of it can be left behind. A frame lies in a
//! slot, and a slot is written again only once every reader has taken what was in it. A reader looks for a frame for at
//! most 50 µs, then sleeps in a futex, so that waiting costs nothing. One writer, up to 63 readers.
//!
//! Ranks of another node have a channel of their own: a [`NodeLink`] there writes into it what the head sends, and tells
//! the head how far each of its ranks has come.
//!
//! What ranks add and gather on one machine goes through a memory of its own, the [`Meeting`]: there all are alike.
//!
//! | file | noun |
//! |---|---|
//! | `writer.rs`, `reader.rs` | the two ends |
//! | `frame.rs` | what lies in a slot, and its digest |
//! | `step_frame.rs` | a step as a frame: numbers, extents, the used part of each array |
//! | `node_link.rs`, `wire.rs`, `line_record.rs` | one connection between two nodes; its sending half; what it says of a rank |
//! | `control.rs` | who may write and read which slot when |
//! | `meeting.rs` | where ranks add and gather numbers |
//! | `seats.rs` | how far each rank of a meeting has come |
//! | `summand.rs` | the numbers that they add |
//! | `gate.rs` | a number that rises, and those who wait for it |
//! | `memory.rs` | the memfd and its mappings |
//! | `sync.rs` | the door to atomics and futexes, for loom |

mod control;
#[cfg(not(loom))]
mod frame;
mod gate;
#[cfg(not(loom))]
mod line_record;
#[cfg(not(loom))]
mod meeting;
#[cfg(not(loom))]
mod memory;
#[cfg(not(loom))]
mod node_link;
#[cfg(not(loom))]
mod reader;
mod seats;
#[cfg(not(loom))]
mod step_frame;
#[cfg(not(loom))]
mod summand;
mod sync;
#[cfg(not(loom))]
mod wire;
#[cfg(not(loom))]
mod writer;

#[cfg(not(loom))]
pub use {
    control::{MAX_READERS, NUM_SLOTS},
    frame::FrameError,
    meeting::{Kind, Meeting, MeetingEnd, MeetingError},
    node_link::{NodeLink, Received},
    reader::{Frame, ReadError, Reader},
    step_frame::{StepArrays, StepFrame},
    summand::Summand,
    writer::{LineView, Watch, WriteError, Writer},
};
