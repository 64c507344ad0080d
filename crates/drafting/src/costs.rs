//! `StepCosts`: how long a step takes, depending on its number of tokens.

/// Sizes with a class of their own: with few rows, each further one matters.
const NUM_SINGLE: u32 = 64;

/// Classes per doubling of the size beyond that.
const PER_DOUBLING: u32 = 16;

/// Number of classes, for sizes up to 2³².
const NUM_CLASSES: usize = (NUM_SINGLE + PER_DOUBLING * (32 - NUM_SINGLE.ilog2())) as usize;

/// The weight of a new measurement.
const WEIGHT: f32 = 0.125;

/// The assumed cost of a further token if nothing larger was measured, as a share of a step of one token.
const SHARE_PER_TOKEN: f32 = 0.03;

/// A step this many times as large says little about this size: it may have been a prompt, and the first of its kind.
const FAR: u64 = 4;

/// A measurement that is this many steps old is made again.
const MAX_AGE: u64 = 128;

/// A step that took this many times as long as expected was delayed by something else, and counts for no more than
/// this.
const OUTLIER: f32 = 1.5;

/// Sizes within this factor give a lower bound for each other.
const NEAR: u64 = 2;

#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    ns: f32,
    count: u32,
    seen_in: u64,
}

/// Running means of the measurements.
#[derive(Clone, Debug)]
pub struct StepCosts {
    by_class: Vec<Measured>,
    /// A bit for each class that was measured.
    known: [u64; NUM_CLASSES.div_ceil(64)],
    num_steps: u64,
}

impl Default for StepCosts {
    fn default() -> Self {
        Self {
            by_class: vec![Measured::default(); NUM_CLASSES],
            known: [0; NUM_CLASSES.div_ceil(64)],
            num_steps: 0,
        }
    }
}

impl StepCosts {
    /// Record that a step of `num_tokens` tokens took `ns` nanoseconds.
    pub fn measure(&mut self, num_tokens: u32, ns: u64) {
        self.num_steps += 1;
        let class = class_of(num_tokens);
        self.known[class / 64] |= 1 << (class % 64);
        let is_old = self.by_class[class].count > 2 && !self.is_sure(class);
        let measured = &mut self.by_class[class];
        measured.count = if is_old { 2 } else { measured.count } + 1;
        let ns = if measured.count > 2 { (ns as f32).min(OUTLIER * measured.ns) } else { ns as f32 };
        // Of the first two measurements the faster one counts, so that a slow start is forgotten.
        let weight = WEIGHT.max(1.0 / (measured.count - 1).max(1) as f32);
        if measured.count != 2 || ns < measured.ns {
            measured.ns += weight * (ns - measured.ns);
        }
        measured.seen_in = self.num_steps;
    }

    /// Number of steps that were measured.
    pub(crate) fn num_steps(&self) -> u64 {
        self.num_steps
    }

    /// Whether a class was measured more than once, and recently.
    fn is_sure(&self, class: usize) -> bool {
        let measured = &self.by_class[class];
        measured.count >= 2 && self.num_steps - measured.seen_in < MAX_AGE
    }

    /// How long a step of this size takes (ns), or at least takes, judging by steps of nearly this size. `None`: the
    /// step should run unchanged, so that it is measured.
    #[must_use]
    pub fn at_least(&self, num_tokens: u32) -> Option<f32> {
        let (class, size) = (class_of(num_tokens), u64::from(num_tokens));
        let below = self.sure_up_to(class).filter(|&below| NEAR * size_of(below) >= size);
        if below == Some(class) {
            return Some(self.by_class[class].ns);
        }
        let above = self.sure_from(class).filter(|&above| size_of(above) <= NEAR * size);
        let of_below = below.map(|below| self.by_class[below].ns);
        let of_above = above.map(|above| self.by_class[above].ns * size as f32 / size_of(above) as f32);
        match (of_below, of_above) {
            (Some(below), Some(above)) => Some(below.max(above)),
            (below, above) => below.or(above),
        }
    }

    /// How long a step of this size is expected to take (ns); `None` while nothing smaller was measured. A measurement
    /// that was made once, or long ago, may be chance. If neighbouring classes give less, their value is used until
    /// this size is tried again.
    #[must_use]
    pub fn expected(&self, num_tokens: u32) -> Option<f32> {
        let class = class_of(num_tokens);
        let Measured { ns: own, count, .. } = self.by_class[class];
        if self.is_sure(class) {
            return Some(own);
        }
        let own = if count > 0 { own } else { f32::INFINITY };
        let below = self.sure_up_to(class).or_else(|| self.known_up_to(class))?;
        if below == class {
            return Some(own);
        }
        let (ns, size) = (self.by_class[below].ns, size_of(below) as f32);
        let more = size_of(class) as f32 - size;
        let believed = ns * (1.0 + more * SHARE_PER_TOKEN / (1.0 + SHARE_PER_TOKEN * (size - 1.0)));
        let Some(above) = self.sure_from(class) else { return Some(believed.min(own)) };
        let slope = (self.by_class[above].ns - ns) / (size_of(above) as f32 - size);
        let is_far = size_of(above) >= FAR * size_of(class);
        Some((ns + slope * more).min(if is_far { believed } else { f32::INFINITY }).min(own))
    }

    /// The largest class up to this one with a reliable measurement.
    fn sure_up_to(&self, class: usize) -> Option<usize> {
        let below = |class: usize| class.checked_sub(1).and_then(|below| self.known_up_to(below));
        std::iter::successors(self.known_up_to(class), |&class| below(class))
            .find(|&class| self.is_sure(class))
    }

    /// The smallest class from this one on with a reliable measurement.
    fn sure_from(&self, class: usize) -> Option<usize> {
        let above = |class: usize| (class + 1 < NUM_CLASSES).then(|| self.known_from(class + 1)).flatten();
        std::iter::successors(self.known_from(class), |&class| above(class))
            .find(|&class| self.is_sure(class))
    }

    /// The largest class up to this one that was measured.
    fn known_up_to(&self, class: usize) -> Option<usize> {
        let word = class / 64;
        let first = self.known[word] & (u64::MAX >> (63 - class % 64));
        let rest = self.known[..word].iter().rev().copied();
        let found = std::iter::once(first).chain(rest).enumerate().find(|&(_, bits)| bits != 0);
        found.map(|(distance, bits)| 64 * (word - distance) + 63 - bits.leading_zeros() as usize)
    }

    /// The smallest class from this one on that was measured.
    fn known_from(&self, class: usize) -> Option<usize> {
        let word = class / 64;
        let first = self.known[word] & (u64::MAX << (class % 64));
        let rest = self.known[word + 1..].iter().copied();
        let found = std::iter::once(first).chain(rest).enumerate().find(|&(_, bits)| bits != 0);
        found.map(|(distance, bits)| 64 * (word + distance) + bits.trailing_zeros() as usize)
    }
}

/// The class of a size.
fn class_of(num_tokens: u32) -> usize {
    let num_tokens = num_tokens.max(1);
    if num_tokens <= NUM_SINGLE {
        return num_tokens as usize - 1;
    }
    let log = num_tokens.ilog2();
    let part = (num_tokens >> (log - PER_DOUBLING.ilog2())) & (PER_DOUBLING - 1);
    (NUM_SINGLE + PER_DOUBLING * (log - NUM_SINGLE.ilog2()) + part) as usize
}

/// The smallest size of a class.
fn size_of(class: usize) -> u64 {
    let class = class as u64;
    let (single, parts) = (u64::from(NUM_SINGLE), u64::from(PER_DOUBLING));
    if class < single {
        return class + 1;
    }
    let log = u64::from(NUM_SINGLE.ilog2()) + (class - single) / parts;
    (parts + (class - single) % parts) << (log - u64::from(PER_DOUBLING.ilog2()))
}

/// The largest size in the same class, which costs the same as far as is known.
pub(crate) fn last_of_class(num_tokens: u32) -> u32 {
    if num_tokens <= NUM_SINGLE {
        return num_tokens;
    }
    (size_of(class_of(num_tokens) + 1) - 1) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_follow_each_other_and_begin_where_they_say() {
        for size in 1..5000u32 {
            let class = class_of(size);
            assert!(size_of(class) <= u64::from(size), "{size}");
            assert!(class_of(size + 1) - class <= 1, "{size}");
            let last = last_of_class(size);
            assert_eq!((class_of(last), class_of(last + 1)), (class, class + 1), "{size}");
        }
        assert_eq!(class_of(u32::MAX), NUM_CLASSES - 1);
    }

    #[test]
    fn the_nearest_measurements_are_found_across_words() {
        let mut costs = StepCosts::default();
        assert_eq!(costs.expected(500), None);
        for _ in 0..2 {
            costs.measure(3, 1000);
            costs.measure(3000, 5000);
        }
        for size in [3, 4, 64, 65, 500, 2047] {
            let class = class_of(size);
            assert_eq!(costs.known_up_to(class), Some(2), "{size}");
            assert_eq!(costs.known_from(class + usize::from(size == 3)), Some(class_of(3000)), "{size}");
        }
        assert_eq!(costs.expected(2), None);
        assert_eq!(costs.known_from(class_of(4000)), None);
        assert!(costs.expected(500).is_some_and(|ns| ns > 1000.0 && ns < 5000.0));
    }
}
