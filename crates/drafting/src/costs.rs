//! `StepCosts`: what a step takes, by how many tokens it has.

/// Sizes that are kept apart one by one.
const NUM_SINGLE: u32 = 16;

/// Classes of size: the single ones, then four for each doubling up to 2³².
const NUM_CLASSES: usize = NUM_SINGLE as usize + 4 * 28;

/// What a new measurement weighs.
const WEIGHT: f32 = 0.125;

/// What a further token is believed to cost, as a share of the step, where nothing larger was measured.
const SHARE_PER_TOKEN: f32 = 0.03;

/// Steps after which a measurement is taken again.
const MAX_AGE: u64 = 64;

#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    ns: f32,
    count: u32,
    seen_in: u64,
}

/// Running means of what was measured.
#[derive(Clone, Debug)]
pub struct StepCosts {
    by_class: Vec<Measured>,
    num_steps: u64,
}

impl Default for StepCosts {
    fn default() -> Self {
        Self { by_class: vec![Measured::default(); NUM_CLASSES], num_steps: 0 }
    }
}

impl StepCosts {
    /// A step of `num_tokens` tokens took `ns` nanoseconds.
    pub fn measure(&mut self, num_tokens: u32, ns: u64) {
        self.num_steps += 1;
        let measured = &mut self.by_class[class_of(num_tokens)];
        measured.count += 1;
        // The first ones count fully, so that a slow start is forgotten.
        let weight = WEIGHT.max(1.0 / measured.count as f32);
        measured.ns += weight * (ns as f32 - measured.ns);
        measured.seen_in = self.num_steps;
    }

    /// Whether a step of this size should run as it is, to be measured: it never was, or long ago.
    #[must_use]
    pub fn is_stale(&self, num_tokens: u32) -> bool {
        let measured = &self.by_class[class_of(num_tokens)];
        measured.count < 2 || self.num_steps - measured.seen_in >= MAX_AGE
    }

    /// What a step of this size is expected to take (ns); `None` while nothing smaller was measured.
    #[must_use]
    pub fn expected(&self, num_tokens: u32) -> Option<f32> {
        let class = class_of(num_tokens);
        let is_known = |&class: &usize| self.by_class[class].count > 0;
        let below = (0..=class).rev().find(is_known)?;
        let (ns, size) = (self.by_class[below].ns, size_of(below) as f32);
        if below == class {
            return Some(ns);
        }
        let more = size_of(class) as f32 - size;
        let Some(above) = (class..NUM_CLASSES).find(is_known) else {
            return Some(ns * (1.0 + SHARE_PER_TOKEN * more));
        };
        let slope = (self.by_class[above].ns - ns) / (size_of(above) as f32 - size);
        Some(ns + slope * more)
    }
}

/// The class of a size.
fn class_of(num_tokens: u32) -> usize {
    let num_tokens = num_tokens.max(1);
    if num_tokens <= NUM_SINGLE {
        return num_tokens as usize - 1;
    }
    let log = num_tokens.ilog2();
    let quarter = (num_tokens >> (log - 2)) & 3;
    (NUM_SINGLE + 4 * (log - 4) + quarter) as usize
}

/// The smallest size of a class.
fn size_of(class: usize) -> u64 {
    let class = class as u64;
    let single = u64::from(NUM_SINGLE);
    if class < single {
        return class + 1;
    }
    let (log, quarter) = (4 + (class - single) / 4, (class - single) % 4);
    (4 + quarter) << (log - 2)
}

/// Whether two sizes cost the same as far as is known here.
pub(crate) fn same_class(one: u32, other: u32) -> bool {
    class_of(one) == class_of(other)
}
