//! The step channel: through it the first rank of a model sends its commands and steps, as integers, to the other
//! ranks.
//!
//! ```text
//!  rank 0: Writer ── frame n ──▶ slot n mod 16 ── Gate "published" ──▶ Reader 1, Reader 2 …
//!                     ▲                                                     │
//!                     └───────────── each reader's Line: taken, done ◀──────┘
//! ```
//!
//! The memory is a memfd that children inherit. It has no name, so nothing can be left behind. A slot is written again
//! only when every reader has taken the frame in it. A reader spins for at most 50 µs, then sleeps in a futex, so that
//! waiting costs nothing. There is one writer, and up to 63 readers.
//!
//! The ranks of another node have a channel of their own: a [`NodeLink`] there writes into it what the head sends, and
//! reports to the head how far each of its ranks has come.
//!
//! Tensors that the ranks of one machine add or gather go through another shared memory, the [`Meeting`], in which all
//! ranks are equal.
//!
//! | file | noun |
//! |---|---|
//! | `writer.rs`, `reader.rs` | the two ends |
//! | `frame.rs` | the content of a slot, and its digest |
//! | `step_frame.rs` | a step as a frame: numbers, extents, the used part of each array |
//! | `node_link.rs`, `wire.rs`, `line_record.rs` | one connection between two nodes; its sending half; its report on a rank |
//! | `control.rs` | who may write and read which slot when |
//! | `meeting.rs` | where ranks add and gather numbers |
//! | `seats.rs` | how far each rank of a meeting has come |
//! | `summand.rs` | the numbers that they add |
//! | `gate.rs` | a number that rises, and waiting for it |
//! | `memory.rs` | the memfd and its mappings |
//! | `sync.rs` | the only access to atomics and futexes, for loom |

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
