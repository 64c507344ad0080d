//! Which experts compute a token, and the weights of their results: what a router's logits mean to a model.

/// Chosen weights are divided by their sum, or by this if they add up to less, so that scores that are all 0 stay 0.
const LEAST_SUM: f32 = 1e-20;

/// What a router's logits become.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Scores {
    /// A softmax over the logits of all experts.
    #[default]
    Softmax,
    /// The sigmoid of each.
    Sigmoid,
}

/// How a router's logits choose the experts of a token.
#[derive(Debug, Clone, PartialEq)]
pub struct Routing {
    /// What the weights are made of, and what experts are chosen by.
    pub scores: Scores,
    /// Experts that compute a token: those with the largest scores, the first of equals.
    pub num_chosen: usize,
    /// Added to the score of each expert when they are chosen, and not to their weights. Empty: nothing is.
    pub bias: Vec<f32>,
    /// Groups of neighbouring experts of one size.
    pub num_groups: usize,
    /// Groups whose experts may be chosen: those whose two largest scores, with the bias, have the largest sums.
    pub num_chosen_groups: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    pub is_normed: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// Whether the router multiplies in 32 bits where the stream has 16, because small differences of scores choose.
    pub is_wide: bool,
}

impl Routing {
    /// By a softmax over all logits, without groups.
    #[must_use]
    pub fn softmax(num_chosen: usize, is_normed: bool) -> Self {
        Self {
            scores: Scores::Softmax,
            num_chosen,
            bias: Vec::new(),
            num_groups: 1,
            num_chosen_groups: 1,
            is_normed,
            scale: 1.0,
            is_wide: false,
        }
    }

    /// Whether experts are chosen by their logits as they are: a softmax keeps their order.
    fn chooses_by_logits(&self) -> bool {
        self.scores == Scores::Softmax && self.bias.is_empty() && self.num_groups == 1
    }

    /// Numbers per token that `choose` needs room for.
    pub(super) fn room(&self, num_experts: usize) -> usize {
        if self.chooses_by_logits() { 0 } else { num_experts + self.num_groups }
    }

    /// The experts of a token, ascending, with their weights.
    ///
    /// # Arguments
    ///
    /// * `logit`: an expert's logit, by its number.
    /// * `room`: as many numbers as [`Self::room`] says.
    /// * `choices`: as many as are chosen.
    pub(super) fn choose(
        &self,
        num_experts: usize,
        logit: impl Fn(usize) -> f32,
        room: &mut [f32],
        choices: &mut [Choice],
    ) {
        if self.chooses_by_logits() {
            choose_largest((0..num_experts).map(|expert| (expert, logit(expert))), choices);
            let largest = choices[0].weight;
            let all: f32 = (0..num_experts).map(|expert| (logit(expert) - largest).exp()).sum();
            for choice in choices.iter_mut() {
                choice.weight = (choice.weight - largest).exp() / all;
            }
        } else {
            self.choose_by_scores(num_experts, logit, room, choices);
        }
        if self.is_normed {
            let sum: f32 = choices.iter().map(|choice| choice.weight).sum();
            for choice in choices.iter_mut() {
                choice.weight /= sum.max(LEAST_SUM);
            }
        }
        for choice in choices.iter_mut() {
            choice.weight *= self.scale;
        }
        choices.sort_unstable_by_key(|choice| choice.expert);
    }

    fn choose_by_scores(
        &self,
        num_experts: usize,
        logit: impl Fn(usize) -> f32,
        room: &mut [f32],
        choices: &mut [Choice],
    ) {
        let (scores, group_scores) = room.split_at_mut(num_experts);
        match self.scores {
            Scores::Softmax => {
                let largest = (0..num_experts).map(&logit).fold(f32::NEG_INFINITY, f32::max);
                for (expert, score) in scores.iter_mut().enumerate() {
                    *score = (logit(expert) - largest).exp();
                }
                let all: f32 = scores.iter().sum();
                for score in scores.iter_mut() {
                    *score /= all;
                }
            }
            Scores::Sigmoid => {
                for (expert, score) in scores.iter_mut().enumerate() {
                    *score = sigmoid(logit(expert));
                }
            }
        }
        let key = |expert: usize| scores[expert] + self.bias.get(expert).copied().unwrap_or(0.0);
        let group_size = num_experts / self.num_groups;
        if self.num_chosen_groups == self.num_groups {
            choose_largest((0..num_experts).map(|expert| (expert, key(expert))), choices);
        } else {
            for (group, sum) in group_scores.iter_mut().enumerate() {
                let mut two = [f32::NEG_INFINITY; 2];
                for expert in group * group_size..(group + 1) * group_size {
                    let own = key(expert);
                    if own > two[0] {
                        two = [own, two[0]];
                    } else if own > two[1] {
                        two[1] = own;
                    }
                }
                *sum = two[0] + two[1];
            }
            // A group is chosen if fewer than so many come before it; of equal ones, the first do.
            let is_before = |a: usize, b: usize| {
                group_scores[a] > group_scores[b] || (a < b && group_scores[a] >= group_scores[b])
            };
            let is_chosen = |group: usize| {
                (0..self.num_groups).filter(|&other| is_before(other, group)).count() < self.num_chosen_groups
            };
            let own = (0..self.num_groups).filter(|&group| is_chosen(group));
            let experts = own.flat_map(|group| group * group_size..(group + 1) * group_size);
            choose_largest(experts.map(|expert| (expert, key(expert))), choices);
        }
        for choice in choices.iter_mut() {
            choice.weight = scores[choice.expert as usize];
        }
    }
}

/// An expert of a token.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Choice {
    pub(super) expert: u32,
    pub(super) weight: f32,
    /// Among the rows of all experts.
    pub(super) row: u32,
}

/// `1 / (1 + e⁻ˣ)`.
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Those with the largest keys, which take the place of weights, the largest first; of equal ones the first that come.
fn choose_largest(keys: impl Iterator<Item = (usize, f32)>, choices: &mut [Choice]) {
    let is_larger = |key: f32, choice: &Choice| key > choice.weight;
    let mut count = 0;
    for (expert, key) in keys {
        if count == choices.len() && !is_larger(key, &choices[count - 1]) {
            continue;
        }
        let place = choices[..count].iter().take_while(|choice| !is_larger(key, choice)).count();
        count = choices.len().min(count + 1);
        choices[place..count].rotate_right(1);
        choices[place] = Choice { expert: expert as u32, weight: key, row: 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen_by(routing: &Routing, logits: &[f32]) -> Vec<(u32, f32)> {
        let mut choices = vec![Choice::default(); routing.num_chosen];
        let mut room = vec![0.0; routing.room(logits.len())];
        routing.choose(logits.len(), |expert| logits[expert], &mut room, &mut choices);
        choices.iter().map(|choice| (choice.expert, choice.weight)).collect()
    }

    fn chosen(logits: &[f32], num_chosen: usize, is_normed: bool) -> Vec<(u32, f32)> {
        chosen_by(&Routing::softmax(num_chosen, is_normed), logits)
    }

    /// All by sorting, in 64 bits.
    fn naive(routing: &Routing, logits: &[f32]) -> Vec<(u32, f64)> {
        let num_experts = logits.len();
        let wide: Vec<f64> = logits.iter().copied().map(f64::from).collect();
        let all: f64 = wide.iter().map(|x| x.exp()).sum();
        let score = |x: f64| match routing.scores {
            Scores::Softmax => x.exp() / all,
            Scores::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        };
        let scores: Vec<f64> = wide.iter().map(|&x| score(x)).collect();
        let bias = |i: usize| routing.bias.get(i).copied().map_or(0.0, f64::from);
        let keys: Vec<f64> = (0..num_experts).map(|i| scores[i] + bias(i)).collect();
        let descending = |values: &[f64]| {
            let mut order: Vec<usize> = (0..values.len()).collect();
            order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
            order
        };
        let size = num_experts / routing.num_groups;
        let sums: Vec<f64> = keys
            .chunks(size)
            .map(|group| descending(group).iter().take(2).map(|&i| group[i]).sum())
            .collect();
        let groups = &descending(&sums)[..routing.num_chosen_groups];
        let mut experts = descending(&keys);
        experts.retain(|expert| groups.contains(&(expert / size)));
        experts.truncate(routing.num_chosen);
        let sum: f64 = if routing.is_normed { experts.iter().map(|&i| scores[i]).sum() } else { 1.0 };
        experts.sort_unstable();
        experts.iter().map(|&i| (i as u32, scores[i] / sum * f64::from(routing.scale))).collect()
    }

    #[test]
    fn every_routing_chooses_and_weighs_as_a_naive_one_does() {
        let mut state = 7_u64;
        let mut number = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        let (mut num_cases, mut num_moved, mut num_outside) = (0, 0, 0);
        for (num_experts, num_groups, num_chosen_groups) in
            [(6, 1, 1), (8, 4, 1), (8, 4, 2), (12, 3, 2), (16, 8, 4), (16, 4, 4)]
        {
            for scores in [Scores::Softmax, Scores::Sigmoid] {
                for (has_bias, is_normed) in [(false, false), (false, true), (true, false), (true, true)] {
                    for num_chosen in 1..=num_experts / num_groups * num_chosen_groups {
                        let bias =
                            (0..if has_bias { num_experts } else { 0 }).map(|_| number() - 0.5).collect();
                        let routing = Routing {
                            scores,
                            num_chosen,
                            bias,
                            num_groups,
                            num_chosen_groups,
                            is_normed,
                            scale: if is_normed { 2.5 } else { 1.0 },
                            is_wide: false,
                        };
                        let logits: Vec<f32> = (0..num_experts).map(|_| 8.0 * number() - 4.0).collect();
                        let (found, expected) = (chosen_by(&routing, &logits), naive(&routing, &logits));
                        assert_eq!(found.len(), expected.len());
                        for (ours, theirs) in found.iter().zip(&expected) {
                            assert_eq!(ours.0, theirs.0, "{routing:?} of {logits:?}");
                            let error = (f64::from(ours.1) - theirs.1).abs();
                            assert!(error < 1e-5 * theirs.1.max(1e-3), "{routing:?} of {logits:?}: {ours:?}");
                        }
                        let experts =
                            |found: &[(u32, f32)]| found.iter().map(|one| one.0).collect::<Vec<_>>();
                        let largest = experts(&chosen(&logits, num_chosen, false));
                        num_cases += 1;
                        num_moved += usize::from(has_bias && experts(&found) != largest);
                        num_outside += usize::from(!has_bias && experts(&found) != largest);
                    }
                }
            }
        }
        assert!(num_cases > 300 && num_moved > 50, "biases moved {num_moved} choices of {num_cases}");
        assert!(num_outside > 20, "groups kept {num_outside} choices away");
    }

    #[test]
    fn scores_that_are_all_zero_give_weights_of_zero() {
        let sigmoid = Routing { scores: Scores::Sigmoid, ..Routing::softmax(2, true) };
        assert_eq!(chosen_by(&sigmoid, &[-200.0; 4]), [(0, 0.0), (1, 0.0)]);
        assert_eq!(chosen_by(&sigmoid, &[200.0; 4]), [(0, 0.5), (1, 0.5)]);
    }

    #[test]
    fn the_largest_logits_choose_and_weigh() {
        let logits = [0.0, 3.0, 1.0, 2.0];
        let all: f32 = logits.iter().map(|x: &f32| (x - 3.0).exp()).sum();
        let found = chosen(&logits, 2, false);
        assert_eq!(found, [(1, 1.0 / all), (3, (-1.0_f32).exp() / all)]);
        let normed = chosen(&logits, 2, true);
        assert!((normed[0].1 + normed[1].1 - 1.0).abs() < 1e-6);
        assert!((normed[0].1 / normed[1].1 - found[0].1 / found[1].1).abs() < 1e-5);
        let of_all: f32 = chosen(&logits, 4, false).iter().map(|(_, weight)| weight).sum();
        assert!((of_all - 1.0).abs() < 1e-6);
    }

    #[test]
    fn of_equal_logits_the_first_are_chosen() {
        let sigmoid = |num_chosen| Routing { scores: Scores::Sigmoid, ..Routing::softmax(num_chosen, true) };
        let experts = |logits: &[f32], count| -> Vec<u32> {
            let found = chosen(logits, count, true);
            assert_eq!(found.iter().map(|one| one.0).collect::<Vec<_>>(), {
                let by_scores = chosen_by(&sigmoid(count), logits);
                by_scores.iter().map(|one| one.0).collect::<Vec<_>>()
            });
            found.iter().map(|(expert, _)| *expert).collect()
        };
        assert_eq!(experts(&[1.0, 1.0, 1.0, 1.0], 2), [0, 1]);
        assert_eq!(experts(&[0.0, 1.0, 2.0, 1.0, 1.0], 3), [1, 2, 3]);
        assert_eq!(experts(&[-0.0, 0.0, -1.0], 1), [0]);
        assert_eq!(experts(&[f32::NEG_INFINITY; 3], 2), [0, 1]);
        let grouped = Routing { num_groups: 3, num_chosen_groups: 2, ..sigmoid(3) };
        assert_eq!(chosen_by(&grouped, &[1.0; 6]).iter().map(|one| one.0).collect::<Vec<_>>(), [0, 1, 2]);
    }

    #[test]
    fn what_is_no_number_gives_none_and_chooses_as_many() {
        for logits in [[f32::NAN, 1.0, 2.0], [1.0, f32::NAN, 2.0], [f32::NAN; 3], [1.0, f32::INFINITY, 2.0]] {
            let found = chosen(&logits, 2, true);
            assert_eq!(found.len(), 2);
            assert!(found[0].0 < found[1].0 && found.iter().any(|(_, weight)| weight.is_nan()), "{found:?}");
        }
        let grouped = Routing {
            scores: Scores::Sigmoid,
            num_groups: 2,
            num_chosen_groups: 1,
            ..Routing::softmax(2, true)
        };
        let found = chosen_by(&grouped, &[f32::NAN; 6]);
        assert!(found[0].0 < found[1].0 && found.iter().all(|(_, weight)| weight.is_nan()), "{found:?}");
    }
}
