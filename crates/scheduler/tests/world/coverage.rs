//! What a run met.

/// How often the hard cases were met.
#[derive(Default, Debug)]
pub(crate) struct Coverage {
    pub(crate) requests: u64,
    pub(crate) steps: u64,
    pub(crate) preemptions: u64,
    pub(crate) swapped_out: u64,
    pub(crate) swapped_in: u64,
    pub(crate) hit_tokens: u64,
    pub(crate) forks: u64,
    pub(crate) look_past: u64,
    pub(crate) drafts: u64,
    pub(crate) accepted: u64,
    /// Those that the scheduler's own drafter made.
    pub(crate) host_drafts: u64,
    pub(crate) host_accepted: u64,
    pub(crate) failed_steps: u64,
    pub(crate) truncated_steps: u64,
    pub(crate) late_tokens: u64,
    pub(crate) overlapping_steps: u64,
    pub(crate) full_of_tokens: u64,
    pub(crate) overdue: u64,
    pub(crate) settled_ends: u64,
    pub(crate) held: u64,
    pub(crate) withheld: u64,
    pub(crate) forced: u64,
    pub(crate) forced_in_steps: u64,
    pub(crate) repetitions: u64,
    pub(crate) pauses: u64,
    pub(crate) rests: u64,
    pub(crate) aborted_by_pauses: u64,
    pub(crate) rows_of_pauses: u64,
    pub(crate) samples_of_pauses: u64,
}

impl Coverage {
    pub(crate) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.steps += other.steps;
        self.preemptions += other.preemptions;
        self.swapped_out += other.swapped_out;
        self.swapped_in += other.swapped_in;
        self.hit_tokens += other.hit_tokens;
        self.forks += other.forks;
        self.look_past += other.look_past;
        self.drafts += other.drafts;
        self.accepted += other.accepted;
        self.host_drafts += other.host_drafts;
        self.host_accepted += other.host_accepted;
        self.failed_steps += other.failed_steps;
        self.truncated_steps += other.truncated_steps;
        self.late_tokens += other.late_tokens;
        self.overlapping_steps += other.overlapping_steps;
        self.full_of_tokens += other.full_of_tokens;
        self.overdue += other.overdue;
        self.settled_ends += other.settled_ends;
        self.held += other.held;
        self.withheld += other.withheld;
        self.forced += other.forced;
        self.forced_in_steps += other.forced_in_steps;
        self.repetitions += other.repetitions;
        self.pauses += other.pauses;
        self.rests += other.rests;
        self.aborted_by_pauses += other.aborted_by_pauses;
        self.rows_of_pauses += other.rows_of_pauses;
        self.samples_of_pauses += other.samples_of_pauses;
    }

    /// A run that did not meet the hard cases proves nothing.
    pub(crate) fn check(&self, operations: u64) {
        let at_least = |name: &str, count: u64, per_million: u64| {
            let needed = operations * per_million / 1_000_000;
            assert!(count >= needed, "the run met {name} {count} times, needed are {needed}");
        };
        at_least("requests", self.requests, 20_000);
        at_least("preemptions", self.preemptions, 5_000);
        at_least("swap-outs", self.swapped_out, 1_000);
        at_least("swap-ins", self.swapped_in, 500);
        at_least("prefix hits", self.hit_tokens, 20_000);
        at_least("forks", self.forks, 500);
        at_least("look-past", self.look_past, 100);
        at_least("drafts", self.drafts, 10_000);
        at_least("accepted drafts", self.accepted, 3_000);
        at_least("drafts of the scheduler's own", self.host_drafts, 3_000);
        at_least("accepted drafts of its own", self.host_accepted, 1_000);
        at_least("failed steps", self.failed_steps, 1_000);
        at_least("truncated steps", self.truncated_steps, 500);
        at_least("tokens after a preemption", self.late_tokens, 200);
        at_least("overlapping steps", self.overlapping_steps, 30_000);
        at_least("refusals for tokens", self.full_of_tokens, 500);
        at_least("requests that waited too long", self.overdue, 200);
        at_least("ends that a front end settled", self.settled_ends, 1_000);
        at_least("requests that were held back", self.held, 1_000);
        at_least("tokens that were called off", self.withheld, 1_000);
        at_least("tokens that were forced between steps", self.forced, 1_000);
        at_least("tokens that were forced in the place of others", self.forced_in_steps, 1_000);
        at_least("outputs that repeated themselves", self.repetitions, 1_000);
        at_least("pauses", self.pauses, 3000);
        at_least("pauses at rest", self.rests, 3000);
        at_least("requests that pauses aborted", self.aborted_by_pauses, 500);
        at_least("rows while new requests wait", self.rows_of_pauses, 1000);
        at_least("first rows of samples in flight while new requests wait", self.samples_of_pauses, 20);
    }
}
