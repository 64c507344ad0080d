//! `RepetitionDetection`: which outputs end because they repeat themselves.

use thiserror::Error;

/// The longest pattern that a request may look for. Each token is compared with as many earlier ones.
pub const MAX_PATTERN_SIZE: u32 = 1024;

/// An output ends at the token that completes a pattern of so many tokens so many times in a row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RepetitionDetection {
    min_pattern_size: u32,
    max_pattern_size: u32,
    min_count: u32,
}

/// Why numbers are refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum RepetitionDetectionError {
    /// No such pattern, or too long a one.
    #[error(
        "repetition_detection looks for patterns of 1 to {MAX_PATTERN_SIZE} tokens, got min_pattern_size {min} and max_pattern_size {max}"
    )]
    PatternSizes {
        /// `min_pattern_size`.
        min: u32,
        /// `max_pattern_size`.
        max: u32,
    },
    /// A pattern that comes once does not repeat itself.
    #[error("min_count of repetition_detection must be at least 2, got {got}")]
    Count {
        /// `min_count`.
        got: u32,
    },
}

impl RepetitionDetection {
    /// Look for patterns of `min_pattern_size` to `max_pattern_size` tokens that come `min_count` times.
    ///
    /// # Errors
    /// The first number that is wrong.
    pub fn new(
        min_pattern_size: u32,
        max_pattern_size: u32,
        min_count: u32,
    ) -> Result<Self, RepetitionDetectionError> {
        if !(1..=max_pattern_size).contains(&min_pattern_size) || max_pattern_size > MAX_PATTERN_SIZE {
            let (min, max) = (min_pattern_size, max_pattern_size);
            return Err(RepetitionDetectionError::PatternSizes { min, max });
        }
        if min_count < 2 {
            return Err(RepetitionDetectionError::Count { got: min_count });
        }
        Ok(Self { min_pattern_size, max_pattern_size, min_count })
    }

    /// Fewest tokens of a pattern.
    #[must_use]
    pub fn min_pattern_size(self) -> u32 {
        self.min_pattern_size
    }

    /// Most tokens of a pattern.
    #[must_use]
    pub fn max_pattern_size(self) -> u32 {
        self.max_pattern_size
    }

    /// How many times in a row a pattern must come.
    #[must_use]
    pub fn min_count(self) -> u32 {
        self.min_count
    }
}

#[cfg(test)]
mod tests {
    use super::{MAX_PATTERN_SIZE, RepetitionDetection};

    #[test]
    fn numbers_that_are_wrong_are_named_with_their_limit() {
        for (numbers, expected) in [
            ((0, 4, 2), Some("of 1 to 1024 tokens, got min_pattern_size 0 and max_pattern_size 4")),
            ((0, 0, 2), Some("got min_pattern_size 0 and max_pattern_size 0")),
            ((5, 4, 2), Some("got min_pattern_size 5 and max_pattern_size 4")),
            ((1, MAX_PATTERN_SIZE + 1, 2), Some("max_pattern_size 1025")),
            ((u32::MAX, u32::MAX, u32::MAX), Some("max_pattern_size 4294967295")),
            ((1, 1, 1), Some("min_count of repetition_detection must be at least 2, got 1")),
            ((1, 1, 0), Some("got 0")),
            ((1, 1, 2), None),
            ((MAX_PATTERN_SIZE, MAX_PATTERN_SIZE, u32::MAX), None),
        ] {
            let (min, max, count) = numbers;
            match (RepetitionDetection::new(min, max, count), expected) {
                (Ok(made), None) => {
                    let got = (made.min_pattern_size(), made.max_pattern_size(), made.min_count());
                    assert_eq!(got, numbers);
                }
                (Err(error), Some(expected)) => assert!(error.to_string().contains(expected), "{error}"),
                (got, expected) => panic!("{got:?}, not {expected:?}"),
            }
        }
    }
}
