//! How far arguments have been read.

/// How far arguments have been read, and how many bytes of the text they have taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// They continue. The bytes that were not taken must be passed again, with more after them.
    Open(usize),
    /// They are complete.
    Done(usize),
}
