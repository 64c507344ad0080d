//! Which engine gets a request, compared with a router that keeps every prompt and every request in lists.

use std::collections::HashSet;

use ipc::{MAX_REMEMBERED, Placement, PrefixHasher, PrefixTable, slack};
use proptest::{collection::vec, prelude::*};
use scheduler::{ExtraKeys, MultimodalSpan, NewRequest, RequestKey, SamplingParams};

const BLOCK_SIZE: usize = 2;

fn request(key: u64, prompt: &[i32]) -> NewRequest {
    let params = SamplingParams { max_tokens: 1, ..SamplingParams::default() };
    NewRequest::new(RequestKey(key), &key.to_string(), prompt.to_vec(), params)
}

/// Decides as `Placement` does, from lists that are never shortened.
struct Naive {
    prompts: Vec<Vec<Vec<i32>>>,
    live: Vec<Vec<u64>>,
    next: usize,
}

impl Naive {
    fn place(
        &mut self,
        key: u64,
        parent: Option<u64>,
        prompt: &[i32],
        others: &[Option<u32>],
    ) -> Option<usize> {
        let rank = match parent.and_then(|parent| self.rank_of(parent)).filter(|&rank| others[rank].is_some())
        {
            Some(rank) => rank,
            None => self.choose(prompt, others)?,
        };
        self.prompts[rank].push(prompt.to_vec());
        self.live[rank].push(key);
        Some(rank)
    }

    fn rank_of(&self, key: u64) -> Option<usize> {
        self.live.iter().position(|live| live.contains(&key))
    }

    fn loads(&self, others: &[Option<u32>]) -> Vec<Option<u32>> {
        others.iter().zip(&self.live).map(|(others, live)| others.map(|n| n + live.len() as u32)).collect()
    }

    fn choose(&mut self, prompt: &[i32], others: &[Option<u32>]) -> Option<usize> {
        let loads = self.loads(others);
        let least = *loads.iter().flatten().min()?;
        let mut best: Option<(usize, u32, usize)> = None;
        for turn in 0..loads.len() {
            let rank = (self.next + turn) % loads.len();
            let Some(load) = loads[rank].filter(|&load| load <= least + slack(least)) else { continue };
            let hit = self.prompts[rank].iter().map(|seen| common_blocks(seen, prompt)).max().unwrap_or(0);
            let is_better = best.is_none_or(|(best_hit, best_load, _)| {
                hit > best_hit || (hit == best_hit && load < best_load)
            });
            if is_better {
                best = Some((hit, load, rank));
            }
        }
        let (_, _, rank) = best?;
        self.next = (rank + 1) % loads.len();
        Some(rank)
    }

    fn end(&mut self, key: u64) {
        for live in &mut self.live {
            live.retain(|&other| other != key);
        }
    }
}

fn common_blocks(a: &[i32], b: &[i32]) -> usize {
    a.chunks_exact(BLOCK_SIZE).zip(b.chunks_exact(BLOCK_SIZE)).take_while(|(a, b)| a == b).count()
}

#[derive(Clone, Debug)]
enum Operation {
    Add(Vec<i32>),
    /// A fork of the n-th live request.
    Fork(usize),
    End(usize),
    Others(usize, Option<u32>),
    Replace(usize),
}

fn operation() -> impl Strategy<Value = Operation> {
    prop_oneof![
        5 => vec(0..2, 0..14).prop_map(Operation::Add),
        1 => any::<usize>().prop_map(Operation::Fork),
        3 => any::<usize>().prop_map(Operation::End),
        1 => (any::<usize>(), prop::option::weighted(0.8, 0..20u32)).prop_map(|(rank, n)| Operation::Others(rank, n)),
        1 => any::<usize>().prop_map(Operation::Replace),
    ]
}

proptest! {
    #[test]
    fn places_as_a_router_that_remembers_everything(
        num_engines in 2..5usize,
        operations in vec(operation(), 1..120),
    ) {
        let hasher = PrefixHasher::new(BLOCK_SIZE as u32);
        let mut placement = Placement::new(vec![4096; num_engines]);
        let mut naive =
            Naive { prompts: vec![Vec::new(); num_engines], live: vec![Vec::new(); num_engines], next: 0 };
        let mut others = vec![Some(0); num_engines];
        let mut live: Vec<(u64, Vec<i32>)> = Vec::new();
        for (key, operation) in (1u64..).zip(operations) {
            let (prompt, parent) = match operation {
                Operation::Add(prompt) => (prompt, None),
                Operation::Fork(_) | Operation::End(_) if live.is_empty() => continue,
                Operation::Fork(index) => {
                    let (parent, prompt) = live[index % live.len()].clone();
                    (prompt, Some(parent))
                }
                Operation::End(index) => {
                    let (ended, _) = live.swap_remove(index % live.len());
                    placement.end(RequestKey(ended));
                    naive.end(ended);
                    continue;
                }
                Operation::Others(rank, count) => {
                    others[rank % num_engines] = count;
                    continue;
                }
                Operation::Replace(rank) => {
                    placement.forget_prefixes(rank % num_engines);
                    naive.prompts[rank % num_engines].clear();
                    continue;
                }
            };
            let request = NewRequest { fork_from: parent.map(RequestKey), ..request(key, &prompt) };
            let names = hasher.names(&request);
            prop_assert_eq!(names.len(), prompt.len() / BLOCK_SIZE);
            let loads = naive.loads(&others);
            let rank = placement.place(std::slice::from_ref(&request), &names, |rank| others[rank]);
            prop_assert_eq!(rank, naive.place(key, parent, &prompt, &others));
            let Some(rank) = rank else {
                prop_assert!(others.iter().all(Option::is_none), "no engine only when there is none");
                continue;
            };
            prop_assert_eq!(placement.rank_of(RequestKey(key)), Some(rank));
            if parent.is_none() {
                let least = loads.iter().flatten().copied().min().unwrap_or(0);
                prop_assert!(loads[rank].is_some_and(|load| load <= least + slack(least)), "within the slack");
            }
            live.push((key, prompt));
            for rank in 0..num_engines {
                prop_assert_eq!(placement.num_live(rank) as usize, naive.live[rank].len());
            }
        }
    }

    #[test]
    fn without_a_shared_prefix_loads_differ_by_one(num_engines in 2..6usize, ends in vec(any::<usize>(), 0..200)) {
        let hasher = PrefixHasher::new(BLOCK_SIZE as u32);
        let mut placement = Placement::new(vec![4096; num_engines]);
        for key in 0..200u64 {
            let request = request(key, &[key as i32; 6]);
            placement.place(std::slice::from_ref(&request), &hasher.names(&request), |_| Some(0)).expect("an engine");
            let counts: Vec<u32> = (0..num_engines).map(|rank| placement.num_live(rank)).collect();
            prop_assert!(counts.iter().max() <= counts.iter().min().map(|least| least + 1).as_ref(), "{counts:?}");
        }
        // Ends come as they like; what is added next evens the loads out again.
        for end in &ends {
            placement.end(RequestKey((end % 200) as u64));
        }
        let counts = |placement: &Placement| -> Vec<u32> {
            (0..num_engines).map(|rank| placement.num_live(rank)).collect()
        };
        let before = counts(&placement);
        for key in 200..600u64 {
            let request = request(key, &[key as i32; 6]);
            placement.place(std::slice::from_ref(&request), &hasher.names(&request), |_| Some(0)).expect("an engine");
        }
        let after = counts(&placement);
        prop_assert!(after.iter().max() <= after.iter().min().map(|least| least + 1).as_ref(), "{before:?} {after:?}");
    }

    #[test]
    fn a_table_is_bounded_and_knows_what_was_used_last(
        capacity in 2..40usize,
        prompts in vec((0..20u64, 1..30usize), 1..60),
    ) {
        let mut table = PrefixTable::new(capacity);
        let mut ever: HashSet<u64> = HashSet::new();
        for (prompt, length) in prompts {
            let names: Vec<u64> = (0..length as u64).map(|block| prompt << 32 | block).collect();
            table.remember(&names);
            ever.extend(&names);
            prop_assert!(table.len() <= capacity, "{} names of {capacity}", table.len());
            // The set that was just begun may hold one name alone, but the one before it is full.
            prop_assert!(table.longest(&names) >= length.min(capacity / 2), "the beginning of what came last");
            let strange = [u64::MAX];
            prop_assert_eq!(table.longest(&strange), 0);
        }
        prop_assert!(table.len() <= ever.len() * 2);
    }
}

#[test]
fn what_a_prefix_depends_on_is_in_its_name() {
    let hasher = PrefixHasher::new(2);
    let plain = request(1, &[1, 2, 3, 4, 5]);
    let names = hasher.names(&plain);
    assert_eq!(names.len(), 2, "whole blocks alone have names");
    assert_eq!(names, hasher.names(&request(2, &[1, 2, 3, 4, 9])));
    let other_end = hasher.names(&request(3, &[1, 2, 3, 5]));
    assert_eq!((names[0] == other_end[0], names[1] == other_end[1]), (true, false));
    assert_ne!(hasher.names(&request(4, &[2, 2, 3, 4]))[1], names[1], "all tokens before it count");
    let salted = NewRequest { extra_keys: ExtraKeys::new(None, Some("a"), Vec::new()), ..plain.clone() };
    assert_ne!(hasher.names(&salted)[0], names[0]);
    let span = MultimodalSpan { offset: 3, length: 1, digest: [7; 16].into(), ..MultimodalSpan::default() };
    let picture = NewRequest { extra_keys: ExtraKeys::new(None, None, vec![span]), ..plain.clone() };
    let with_picture = hasher.names(&picture);
    assert_eq!((with_picture[0] == names[0], with_picture[1] == names[1]), (true, false));
    assert_ne!(PrefixHasher::new(2).names(&plain), names, "each has its own key");
}

#[test]
fn an_id_that_is_live_goes_where_it_is() {
    let hasher = PrefixHasher::new(2);
    let mut placement = Placement::new(vec![64, 64]);
    let place = |request: &NewRequest, placement: &mut Placement| {
        placement
            .place(std::slice::from_ref(request), &hasher.names(request), |_| Some(0))
            .expect("an engine")
    };
    let first = place(&request(1, &[1, 1]), &mut placement);
    let namesake = NewRequest { request_id: "1".into(), ..request(2, &[2, 2]) };
    assert_eq!(place(&namesake, &mut placement), first);
    assert_eq!(placement.key_of_id("1"), Some(RequestKey(1)));
    placement.end(RequestKey(2));
    assert_eq!(placement.key_of_id("1"), Some(RequestKey(1)), "the end of a namesake is not its own");
    placement.end(RequestKey(1));
    assert_eq!((placement.key_of_id("1"), placement.num_live(first)), (None, 0));
}

#[test]
fn the_memory_of_a_large_pool_is_bounded() {
    let mut placement = Placement::new([u32::MAX, u32::MAX]);
    let names = |prompt: u64| -> Vec<u64> {
        (0..MAX_REMEMBERED as u64 / 2).map(|block| prompt << 32 | block).collect()
    };
    let mut place = |key: u64, prompt: u64, ranks: [Option<u32>; 2]| {
        let rank =
            placement.place(&[request(key, &[1])], &names(prompt), |rank| ranks[rank]).expect("an engine");
        placement.end(RequestKey(key));
        rank
    };
    assert_eq!(place(1, 1, [Some(0), None]), 0);
    assert_eq!(place(2, 2, [Some(0), None]), 0);
    assert_eq!(place(3, 1, [Some(1), Some(0)]), 0, "two prompts of half the memory are known");
    assert_eq!(place(4, 3, [Some(0), None]), 0);
    assert_eq!(place(5, 2, [Some(1), Some(0)]), 1, "what was used longest ago gave way");
}
