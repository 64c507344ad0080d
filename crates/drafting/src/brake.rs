//! `Brake`: switches drafts off for a while if they turn out to cost more than they give.

/// Number of steps with drafts that are judged together.
const WINDOW: u32 = 64;

/// Steps without drafts after the first bad window, and the most after later ones.
const FIRST_PAUSE: u32 = 256;
const LONGEST_PAUSE: u32 = 8192;

/// The current window, and the length of the next pause.
#[derive(Clone, Debug)]
pub struct Brake {
    num_steps: u32,
    num_generated: f64,
    ns: f64,
    /// Tokens and time that the same steps would have had without drafts, as far as is known.
    plain_generated: f64,
    plain_ns: f64,
    pause: u32,
    steps_left: u32,
    num_pulled: u64,
}

impl Default for Brake {
    fn default() -> Self {
        Self {
            num_steps: 0,
            num_generated: 0.0,
            ns: 0.0,
            plain_generated: 0.0,
            plain_ns: 0.0,
            pause: FIRST_PAUSE,
            steps_left: 0,
            num_pulled: 0,
        }
    }
}

impl Brake {
    /// Whether drafts are switched off.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.steps_left > 0
    }

    /// How often drafts have been switched off.
    #[must_use]
    pub fn num_pulled(&self) -> u64 {
        self.num_pulled
    }

    /// Count the beginning of a step.
    pub fn pass_step(&mut self) {
        self.steps_left = self.steps_left.saturating_sub(1);
    }

    /// Record a step with drafts that gave `num_generated` tokens in `ns`. Without drafts it would have given one token
    /// for each of `num_rows`, in about `plain_ns`.
    pub fn observe(&mut self, num_generated: u32, ns: u64, num_rows: u32, plain_ns: f32) {
        self.num_steps += 1;
        self.num_generated += f64::from(num_generated);
        self.ns += ns as f64;
        self.plain_generated += f64::from(num_rows);
        self.plain_ns += f64::from(plain_ns);
        if self.num_steps < WINDOW {
            return;
        }
        // Drafts are chosen for a gain, so a window without one was misjudged.
        let is_slower = self.num_generated * self.plain_ns < self.plain_generated * self.ns;
        if is_slower {
            self.steps_left = self.pause;
            self.num_pulled += 1;
        }
        let pause = if is_slower { (2 * self.pause).min(LONGEST_PAUSE) } else { FIRST_PAUSE };
        *self = Self { pause, steps_left: self.steps_left, num_pulled: self.num_pulled, ..Self::default() };
    }
}
