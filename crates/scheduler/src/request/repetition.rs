//! `RepetitionFinder`: tells whether an output repeats itself at its end, one token at a time.
//!
//! An output ends with `count` copies of a pattern of `size` tokens exactly if each of its last `size * (count - 1)`
//! tokens equals the one `size` places before it. So for each size it is enough to know how many of the newest tokens do.
//! A token costs one comparison per size, whatever came before it and however often a pattern must come.

use crate::sampling_params::{SamplingParams, repetition_detection::RepetitionDetection};

/// What is known of the output so far.
#[derive(Debug)]
pub(crate) struct RepetitionFinder {
    /// Patterns of `min_size` to `max_size` tokens are looked for.
    min_size: usize,
    max_size: usize,
    /// How many times in a row a pattern must come.
    min_count: u32,
    /// How many tokens of the output were looked at.
    num_seen: usize,
    /// For each size, the largest first: how many of the newest tokens equal the one so many places before. Empty until
    /// there is a token.
    runs: Vec<u32>,
}

impl RepetitionFinder {
    /// The finder of a request with these parameters; `None` if it looks for no repetition, or cannot find one.
    pub(crate) fn of(params: &SamplingParams, max_tokens: u32) -> Option<Self> {
        params.repetition_detection.and_then(|wanted| Self::new(wanted, max_tokens))
    }

    /// A finder for an output of at most `max_tokens`; `None` if no pattern can come often enough in that.
    fn new(wanted: RepetitionDetection, max_tokens: u32) -> Option<Self> {
        let min_size = wanted.min_pattern_size();
        let max_size = wanted.max_pattern_size().min(max_tokens / wanted.min_count());
        (min_size <= max_size).then(|| Self {
            min_size: min_size as usize,
            max_size: max_size as usize,
            min_count: wanted.min_count(),
            num_seen: 0,
            runs: Vec::new(),
        })
    }

    /// Look at an output that has grown since the last call; whether it repeats itself at its end.
    pub(crate) fn look(&mut self, output: &[i32]) -> bool {
        if self.runs.is_empty() {
            self.runs = vec![0; self.max_size - self.min_size + 1];
        }
        let mut repeats = false;
        for end in self.num_seen + 1..=output.len() {
            repeats = self.push(&output[..end]);
        }
        self.num_seen = output.len();
        repeats
    }

    /// Look at the last token.
    fn push(&mut self, output: &[i32]) -> bool {
        let Some((&token_id, before)) = output.split_last() else { return false };
        let longest = before.len().min(self.max_size);
        if longest < self.min_size {
            return false;
        }
        // Larger sizes reach further back than there are tokens.
        let runs = &mut self.runs[self.max_size - longest..];
        let compared = &before[before.len() - longest..=before.len() - self.min_size];
        let num_repeats = self.min_count - 1;
        let mut needed = longest as u32 * num_repeats; // at most the length of the output, see `new`
        let mut repeats = false;
        for (run, &earlier) in runs.iter_mut().zip(compared) {
            *run = if earlier == token_id { *run + 1 } else { 0 };
            repeats |= *run >= needed;
            needed -= num_repeats;
        }
        repeats
    }
}

#[cfg(test)]
mod tests {
    use super::RepetitionFinder;
    use crate::sampling_params::repetition_detection::RepetitionDetection;

    /// By the definition: some pattern stands at the end, as often as it must.
    fn repeats(output: &[i32], wanted: RepetitionDetection) -> bool {
        let count = wanted.min_count() as usize;
        (wanted.min_pattern_size() as usize..=wanted.max_pattern_size() as usize).any(|size| {
            let Some(start) = output.len().checked_sub(size.saturating_mul(count)) else { return false };
            let pattern = &output[output.len() - size..];
            output[start..].chunks(size).all(|piece| piece == pattern)
        })
    }

    /// Random numbers that are the same in every run (xorshift64).
    struct Random(u64);

    impl Random {
        fn between(&mut self, low: usize, high: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            low + (self.0 % (high - low + 1) as u64) as usize
        }
    }

    /// Few different tokens, and now and then what came before once more.
    fn random_output(random: &mut Random) -> Vec<i32> {
        let mut output = Vec::new();
        for _ in 0..random.between(1, 8) {
            let back = random.between(1, 12);
            let copies = random.between(0, 1) == 0 && back <= output.len();
            for _ in 0..if copies { random.between(1, 40) } else { random.between(1, 4) } {
                let token_id = if copies { output[output.len() - back] } else { random.between(0, 2) as i32 };
                output.push(token_id);
            }
        }
        output
    }

    #[test]
    fn it_finds_what_is_there() {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let (mut num_found, mut num_without) = (0, 0);
        for _ in 0..5_000 {
            let output = random_output(&mut random);
            let (min, count) = (random.between(1, 10), [2, 3, 4, 7, u32::MAX][random.between(0, 4)]);
            let max = min + random.between(0, 12);
            let wanted = RepetitionDetection::new(min as u32, max as u32, count).expect("in range");
            let expected: Vec<bool> = (1..=output.len()).map(|end| repeats(&output[..end], wanted)).collect();
            let Some(mut finder) = RepetitionFinder::new(wanted, output.len() as u32) else {
                assert!(!expected.contains(&true), "{output:?} {wanted:?}");
                num_without += 1;
                continue;
            };
            // It sees tokens one by one, or several at once.
            let (most_at_once, mut end) = (random.between(1, 5), 0);
            while end < output.len() {
                end = (end + random.between(1, most_at_once)).min(output.len());
                let found = finder.look(&output[..end]);
                assert_eq!(found, expected[end - 1], "{wanted:?} at {end} of {output:?}");
                num_found += usize::from(found);
            }
        }
        assert!(num_found > 5_000 && num_without > 500, "{num_found} found, {num_without} without a finder");
    }

    #[test]
    fn the_first_token_that_completes_a_pattern_is_found() {
        let wanted = RepetitionDetection::new(2, 3, 3).expect("in range");
        let mut finder = RepetitionFinder::new(wanted, 100).expect("there is room");
        let output = [9, 9, 9, 1, 2, 1, 2, 1, 2, 1, 7, 5, 6, 7, 5, 6, 7, 5, 6, 6, 6, 6, 6, 6];
        let found: Vec<usize> = (1..=output.len()).filter(|&end| finder.look(&output[..end])).collect();
        assert_eq!(found, [9, 10, 19, 24], "a pattern of one token is none of two before it comes six times");
    }

    #[test]
    fn what_cannot_come_often_enough_is_not_looked_for() {
        let of = |min, max, count, max_tokens| {
            let wanted = RepetitionDetection::new(min, max, count).expect("in range");
            RepetitionFinder::new(wanted, max_tokens).map(|finder| finder.max_size)
        };
        assert_eq!(of(1, 1024, 2, 4096), Some(1024));
        assert_eq!(of(1, 1024, 2, 2047), Some(1023));
        assert_eq!(of(20, 1024, 3, 60), Some(20));
        assert_eq!(of(20, 1024, 3, 59), None);
        assert_eq!(of(1, 1024, u32::MAX, u32::MAX), Some(1));
        assert_eq!(of(1, 1024, 2, 0), None);
    }
}
