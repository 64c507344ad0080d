//! Where a text can be cut: `str::floor_char_boundary` of Rust 1.91, which is newer than what this project builds with.

/// The last place at or before `index` where a character of `text` begins, or the end of the text.
#[must_use]
pub fn floor_char_boundary(text: &str, index: usize) -> usize {
    (0..=index.min(text.len())).rev().find(|&place| text.is_char_boundary(place)).unwrap_or(0)
}
