//! The choice of drafts against a search of every choice there is.

use drafting::{Belief, Candidate, Chooser, PlainStep, StepCosts};

/// Of the tokens per second of the best choice, where nothing is given up for a shorter step, and where it is.
const LEAST_SHARE: f32 = 0.985;
const LEAST_SHARE_IF_SHORTENED: f32 = 0.92;

/// A step with drafts, as the naive search sees it.
#[derive(Clone, Copy, Debug)]
struct Choice {
    ns: f32,
    rate: f32,
}

/// What the rows of a step gain by so many drafts of each: tokens beyond their own.
fn gain_of(candidate: &Candidate, num_drafts: u32) -> f32 {
    let (mut gain, mut survival) = (0.0, 1.0);
    for depth in 0..num_drafts {
        survival *= candidate.belief.acceptance_after(depth);
        gain += survival;
    }
    gain
}

/// What a step with so many drafts takes: no less than one with fewer.
fn ns_with(costs: &StepCosts, plain: &PlainStep, num_drafts: u32) -> f32 {
    let sizes = plain.num_tokens + 1..=plain.num_tokens + num_drafts;
    sizes.filter_map(|size| costs.expected(size)).fold(plain.ns, f32::max)
}

/// A choice, unless a row's next token comes too late by it, or it gains too little. `slack`: of what is exact to a
/// rounding.
fn judge(
    costs: &StepCosts,
    plain: &PlainStep,
    candidates: &[Candidate],
    num_drafts: &[u32],
    slack: f32,
) -> Option<Choice> {
    let ns = ns_with(costs, plain, num_drafts.iter().sum());
    let longer = ns / plain.ns;
    let gains: Vec<f32> =
        candidates.iter().zip(num_drafts).map(|(candidate, &count)| gain_of(candidate, count)).collect();
    let in_time = candidates
        .iter()
        .zip(&gains)
        .all(|(candidate, gain)| longer <= 1.03 * (1.0 + gain) + candidate.credit + slack);
    let has_others = plain.num_rows as usize > candidates.len();
    let others = if plain.is_patient { 1.025 } else { 1.0 } + plain.credit;
    let gain: f32 = gains.iter().sum();
    let (rows, drafting) = (plain.num_rows as f32, candidates.len() as f32);
    let pays = (drafting + gain) / drafting >= (1.03 - slack) * longer
        && (rows + gain) / rows > (1.0 - slack) * longer;
    let is_allowed = in_time && pays && (!has_others || longer <= others + slack);
    is_allowed.then(|| Choice { ns, rate: (rows + gain) / ns })
}

/// The choice that gives the most tokens per nanosecond, of all there are; none: no drafts.
fn best_of_all(costs: &StepCosts, plain: &PlainStep, candidates: &[Candidate]) -> Option<Choice> {
    let mut num_drafts = vec![0; candidates.len()];
    let mut best: Option<Choice> = None;
    loop {
        // The next one, as a number whose digits count up to what was found.
        let place = num_drafts.iter().zip(candidates).position(|(&count, found)| count < found.num_drafts)?;
        num_drafts[..place].fill(0);
        num_drafts[place] += 1;
        if let Some(choice) = judge(costs, plain, candidates, &num_drafts, 0.0)
            && best.as_ref().is_none_or(|best| choice.rate > best.rate)
        {
            best = Some(choice);
        }
        if num_drafts.iter().zip(candidates).all(|(&count, found)| count == found.num_drafts) {
            return best;
        }
    }
}

struct Source(u64);

impl Source {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    fn share(&mut self) -> f32 {
        self.below(1 << 20) as f32 / (1 << 20) as f32
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize]
    }
}

/// Up to four rows with up to four drafts each, next to others, and what steps take: with a jump somewhere, or chance.
fn scene(source: &mut Source) -> (StepCosts, PlainStep, Vec<Candidate>) {
    let num_drafting = 1 + source.below(4) as u32;
    let num_rows = num_drafting + source.one_of(&[0, 0, 0, 1, 5, 28]);
    let num_tokens = num_rows + source.one_of(&[0, 0, 0, 70]);
    let (per_token, jump_at) = (source.one_of(&[2_000, 10_000, 30_000, 200_000]), source.below(48) as u32);
    let jump = source.one_of(&[0, 0, 200_000]);
    let noise = source.one_of(&[0, 100_000]);
    let mut costs = StepCosts::default();
    for size in num_tokens..num_tokens + 20 {
        let is_behind = size > num_tokens + jump_at / 3;
        let ns =
            1_000_000 + per_token * u64::from(size) + u64::from(is_behind) * jump + source.below(noise + 1);
        costs.measure(size, ns);
        costs.measure(size, ns);
    }
    let ns = costs.expected(num_tokens).expect("it was measured");
    let candidates = (0..num_drafting)
        .map(|index| Candidate {
            index,
            num_drafts: 1 + source.below(4) as u32,
            belief: Belief::new(
                source.one_of(&[0.05, 0.3, 0.6, 0.9, 0.99]),
                source.one_of(&[2.0, 10.0, 1e6]),
            ),
            credit: source.one_of(&[0.0, 0.0, 0.05, 0.5]),
        })
        .collect();
    let plain = PlainStep {
        num_rows,
        num_tokens,
        ns,
        credit: if num_rows == num_drafting { f32::INFINITY } else { source.one_of(&[0.0, 0.0, 0.1, 0.5]) },
        is_patient: source.below(4) > 0,
        unnoticed_ns: ns
            * source.one_of(&[f32::INFINITY, f32::INFINITY, 1.1, 1.3])
            * (1.0 + source.share() / 4.0),
    };
    (costs, plain, candidates)
}

#[test]
fn a_choice_is_allowed_and_nearly_as_good_as_the_best_of_all() {
    let mut source = Source(1);
    let mut chooser = Chooser::default();
    let (mut num_chosen, mut num_shared_out, mut num_shortened, mut num_without) = (0, 0, 0, 0);
    for case in 0..20_000 {
        let (costs, plain, found) = scene(&mut source);
        let mut chosen = found.clone();
        chooser.choose(&costs, plain, &mut chosen);
        let num_drafts: Vec<u32> = chosen.iter().map(|candidate| candidate.num_drafts).collect();
        assert!(num_drafts.iter().zip(&found).all(|(&count, found)| count <= found.num_drafts), "{case}");
        let best = best_of_all(&costs, &plain, &found);
        if num_drafts.iter().sum::<u32>() == 0 {
            num_without += 1;
            // A gain that is exact to a rounding may be seen or not.
            let plain_rate = plain.num_rows as f32 / plain.ns;
            let missed = best.filter(|best| plain_rate < LEAST_SHARE * best.rate);
            assert!(missed.is_none(), "{case}: {missed:?} of {plain:?} {found:?}");
            continue;
        }
        num_chosen += 1;
        let choice = judge(&costs, &plain, &found, &num_drafts, 1e-4);
        let choice =
            choice.unwrap_or_else(|| panic!("{case}: {num_drafts:?} is not allowed: {plain:?} {found:?}"));
        let Some(best) = best else { continue };
        let may_shorten = best.ns > plain.unnoticed_ns;
        let least = if may_shorten { LEAST_SHARE_IF_SHORTENED } else { LEAST_SHARE };
        assert!(
            choice.rate >= least * best.rate,
            "{case}: {choice:?} next to {best:?} of {plain:?} {found:?}"
        );
        num_shortened += u32::from(may_shorten && choice.ns < best.ns);
        // Whether a likelier draft had to make room for one whose row would have been too late.
        let survival = |row: usize, depth: u32| gain_of(&found[row], depth + 1) - gain_of(&found[row], depth);
        let rows = || 0..found.len();
        let left = rows()
            .filter(|&row| num_drafts[row] < found[row].num_drafts)
            .map(|row| survival(row, num_drafts[row]));
        let last = rows().filter(|&row| num_drafts[row] > 0).map(|row| survival(row, num_drafts[row] - 1));
        num_shared_out += u32::from(left.fold(0.0, f32::max) > 1.05 * last.fold(1.0, f32::min));
    }
    println!(
        "{num_chosen} with drafts, {num_shared_out} not the likeliest, {num_shortened} shortened, {num_without} without"
    );
    assert!(num_chosen > 5000 && num_without > 2000, "{num_chosen} {num_without}");
    assert!(num_shared_out > 50 && num_shortened > 100, "{num_shared_out} {num_shortened}");
}
