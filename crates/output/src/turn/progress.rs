//! How far arguments are.

/// How far arguments are, and how many bytes of the text they have taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// They go on; bytes that are not taken are to come again, with more behind them.
    Open(usize),
    /// They are whole.
    Done(usize),
}
