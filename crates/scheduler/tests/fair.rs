//! Scenes of fair scheduling: shares by weight, users of one tenant, and what is charged.

mod common;

use std::collections::HashMap;

use common::{request, scheduler};
use scheduler::{NewRequest, Payer, Scheduler, SchedulerConfig, SchedulingPolicy, StepView, TokenRows};

const PROMPT: u32 = 24;
const OUTPUT: u32 = 8;

/// Every request takes the same: a prompt of 24 tokens that nothing has cached, and 8 tokens of output.
struct Scene {
    scheduler: Scheduler,
    num_added: u32,
    payers: HashMap<String, Payer>,
    /// Ids in the order of their first steps.
    began: Vec<String>,
    /// Tokens that tenants were given: of prompts, and sampled.
    tokens: HashMap<u64, u32>,
}

impl Scene {
    fn new(scheduling_policy: SchedulingPolicy, max_num_seqs: u32) -> Self {
        Self::with(&SchedulerConfig {
            max_num_seqs,
            max_num_batched_tokens: 64,
            scheduling_policy,
            ..SchedulerConfig::new(64, 64)
        })
    }

    fn with(config: &SchedulerConfig) -> Self {
        let (payers, tokens) = (HashMap::new(), HashMap::new());
        Self { scheduler: scheduler(config, 2), num_added: 0, payers, began: Vec::new(), tokens }
    }

    fn fair(max_num_seqs: u32) -> Self {
        Self::new(SchedulingPolicy::Fair, max_num_seqs)
    }

    fn make(&mut self, payer: Payer) -> NewRequest {
        let number = self.num_added;
        self.num_added += 1;
        let id = format!("{}.{number}", payer.tenant);
        self.payers.insert(id.clone(), payer);
        let prompt = (0..PROMPT).map(|i| (1 + number * PROMPT + i) as i32).collect();
        NewRequest { payer, ..request(&self.scheduler, &id, prompt, OUTPUT) }
    }

    fn hand_in(&mut self, request: NewRequest) -> String {
        let id = request.request_id.to_string();
        self.scheduler.handle().add_request(request).expect("a request that fits");
        id
    }

    fn add(&mut self, payer: Payer) -> String {
        let request = self.make(payer);
        self.hand_in(request)
    }

    /// One step; `None` when nothing can run.
    fn step(&mut self) -> Option<StepView> {
        let output = self.scheduler.schedule().expect("a free set")?;
        let view = self.scheduler.step_view(&output).expect("in flight");
        for row in &view.scheduled {
            if row.is_new {
                self.began.push(row.request_id.clone());
            }
            let is_prompt = row.num_computed_tokens < PROMPT;
            let num_tokens = if is_prompt { row.num_scheduled_tokens } else { 0 } + u32::from(row.sampled);
            *self.tokens.entry(self.payers[&row.request_id].tenant).or_default() += num_tokens;
        }
        let sampled = vec![7; output.num_sampled as usize];
        self.scheduler.update_from_output(&output, TokenRows::column(&sampled)).expect("the step in flight");
        self.scheduler.check_invariants();
        Some(view)
    }

    fn run(&mut self) {
        while self.step().is_some() {}
        assert_eq!(self.scheduler.num_unfinished_requests(), 0);
    }

    /// How many others began before a request did.
    fn place(&self, id: &str) -> usize {
        self.began.iter().position(|other| other == id).expect("it began")
    }
}

fn tenant(tenant: u64) -> Payer {
    Payer { tenant, ..Payer::default() }
}

/// 200 requests of one tenant wait; the one of another comes next, where FCFS would have it wait for all of them.
#[test]
fn a_flood_holds_up_no_other_tenant() {
    for (policy, expected) in [(SchedulingPolicy::Fair, 4), (SchedulingPolicy::Fcfs, 200)] {
        let mut scene = Scene::new(policy, 4);
        for _ in 0..200 {
            scene.add(tenant(1));
        }
        scene.step();
        let small = scene.add(tenant(2));
        scene.run();
        assert!(scene.place(&small) <= expected, "{policy:?}: {}", scene.place(&small));
        assert!(expected < 200 || scene.place(&small) == 200, "FCFS has it wait");
    }
}

/// As long as all of them have work waiting, tokens go by the weights.
#[test]
fn tokens_go_by_weight_under_saturation() {
    let mut scene = Scene::fair(8);
    let payers = [(1, 1), (2, 3)].map(|(name, weight)| Payer { weight, ..tenant(name) });
    for payer in payers {
        for _ in 0..400 {
            scene.add(payer);
        }
    }
    for _ in 0..400 {
        scene.step();
    }
    assert!(scene.began.len() > 200 && scene.scheduler.waiting_request_ids().len() > 200, "saturated");
    let share = f64::from(scene.tokens[&2]) / f64::from(scene.tokens[&1]);
    assert!((2.8..=3.2).contains(&share), "{:?}: {share}", scene.tokens);
}

/// Requests that keep coming, one after the other: what one client gets does not shrink with another's number of
/// clients.
#[test]
fn shares_hold_for_clients_that_wait_for_their_answers() {
    let mut scene = Scene::fair(4);
    let mut live: Vec<String> = Vec::new();
    for _ in 0..60 {
        live.push(scene.add(Payer { weight: 1, ..tenant(1) }));
    }
    for _ in 0..8 {
        live.push(scene.add(Payer { weight: 3, ..tenant(2) }));
    }
    for _ in 0..1_000 {
        scene.step().expect("work");
        for id in std::mem::take(&mut live) {
            let ended = scene.scheduler.request_state(&id).is_none();
            let payer = scene.payers[&id];
            live.push(if ended { scene.add(payer) } else { id });
        }
    }
    let share = f64::from(scene.tokens[&2]) / f64::from(scene.tokens[&1]);
    assert!((2.8..=3.2).contains(&share), "{:?}: {share}", scene.tokens);
}

/// Tokens that tenant 1 has when tenant 2 has been given as many as it asked for, with 200 requests of either.
fn tokens_next_to(user_of: impl Fn(u64) -> u64) -> (u32, Vec<bool>) {
    let mut scene = Scene::fair(4);
    for number in 0..200 {
        scene.add(Payer { user: user_of(number), ..tenant(1) });
        scene.add(tenant(2));
    }
    for _ in 0..300 {
        scene.step();
    }
    assert!(scene.began.len() > 100 && scene.scheduler.waiting_request_ids().len() > 100, "saturated");
    let order = scene.began.iter().map(|id| id.starts_with("1.")).collect();
    (scene.tokens[&1], order)
}

/// However many users a tenant invents, it has the same turns as with one.
#[test]
fn invented_users_gain_nothing() {
    let (one, order_of_one) = tokens_next_to(|_| 0);
    let (many, order_of_many) = tokens_next_to(|number| number);
    assert_eq!(order_of_many, order_of_one, "which tenant's turn it is");
    assert_eq!(many, one);
}

/// Users who come while another one's flood waits share the tenant's turns with it, and take none of other tenants.
#[test]
fn users_share_what_their_tenant_gets() {
    let mut scene = Scene::fair(1);
    for _ in 0..20 {
        scene.add(Payer { user: 1, ..tenant(1) });
        scene.add(tenant(2));
    }
    scene.step();
    let newcomer = scene.add(Payer { user: 2, ..tenant(1) });
    scene.run();
    assert!(scene.place(&newcomer) <= 3, "the next turn of its tenant: {}", scene.place(&newcomer));
    let of_the_first: Vec<bool> = scene.began.iter().map(|id| id.starts_with("1.")).collect();
    for pair in of_the_first[..40].chunks(2) {
        assert_eq!(pair.iter().filter(|is_first| **is_first).count(), 1, "the tenants take turns");
    }
}

/// Requests of one user begin in the order in which they came, whatever their output turned out to be.
#[test]
fn one_bucket_is_first_come_first_served() {
    let mut scene = Scene::fair(2);
    let mut ids = Vec::new();
    for number in 0..60 {
        let mut request = scene.make(Payer::default());
        request.params.max_tokens = 1 + number % 7 * 5;
        ids.push(scene.hand_in(request));
        scene.step();
    }
    scene.run();
    assert_eq!(scene.began, ids);
}

/// What was found in the cache is not charged, nor is what a request might have given and did not.
#[test]
fn what_was_not_computed_is_not_charged() {
    let mut scene = Scene::fair(1);
    let first = scene.make(tenant(1));
    let (again, third) = (scene.make(tenant(1)), scene.make(tenant(1)));
    let prompt_token_ids = first.prompt_token_ids.clone();
    scene.hand_in(first);
    let other = scene.add(tenant(2)); // holds the others' places in virtual time
    let again = scene.hand_in(NewRequest { prompt_token_ids, ..again });
    let tag_of = |scene: &Scene, id: &str| scene.scheduler.request_state(id).map(|state| state.fair_tag);
    scene.scheduler.take_arrivals();
    let (guessed, token) = (u64::from(PROMPT + OUTPUT), 65_536);
    assert_eq!(tag_of(&scene, &again), Some(guessed * token), "behind the first, as if nothing was cached");
    while tag_of(&scene, &again).is_some() {
        assert!(tag_of(&scene, &other).is_some() || !scene.began.is_empty());
        scene.step();
    }
    // Another one keeps the clock going; 16 of the 24 tokens were cached.
    let third = scene.hand_in(third);
    scene.scheduler.take_arrivals();
    let charged = u64::from(PROMPT + OUTPUT + PROMPT - 16 + OUTPUT);
    let tag = tag_of(&scene, &third);
    assert!(tag == Some(charged * token) || scene.scheduler.num_unfinished_requests() == 1, "{tag:?}");
}

/// A request that lost its blocks comes back with the turn that it had, before those that came after it.
#[test]
fn who_is_preempted_keeps_its_tag() {
    let config = SchedulerConfig {
        block_size: 4,
        enable_prefix_caching: false,
        scheduling_policy: SchedulingPolicy::Fair,
        ..SchedulerConfig::new(14, 40)
    };
    let mut scene = Scene::with(&config);
    let first = scene.add(tenant(1));
    let second = scene.add(tenant(1));
    let mut tags = Vec::new();
    let mut was_preempted = false;
    while scene.scheduler.num_unfinished_requests() > 0 || tags.is_empty() {
        let view = scene.step().expect("work");
        was_preempted |= view.preempted_req_ids == [second.clone()];
        if was_preempted && scene.num_added == 2 {
            scene.add(tenant(1));
            scene.scheduler.take_arrivals();
            assert_eq!(scene.scheduler.waiting_request_ids(), [second.clone(), "1.2".to_owned()]);
        }
        tags.extend(scene.scheduler.request_state(&second).map(|state| state.fair_tag));
    }
    assert!(was_preempted, "the pool is too small for both, {first} and {second}");
    tags.dedup();
    assert_eq!(tags.len(), 1, "one tag from its arrival to its end: {tags:?}");
}

/// Samples of one request are charged one by one, and the prompt once.
#[test]
fn samples_are_charged_to_their_tenant() {
    let mut scene = Scene::fair(1);
    let parent = scene.make(tenant(1));
    let children = [0, 1].map(|_| {
        let child = scene.make(tenant(1));
        let (prompt_token_ids, fork_from) = (parent.prompt_token_ids.clone(), Some(parent.key));
        NewRequest { prompt_token_ids, fork_from, ..child }
    });
    let [one, two] = children;
    scene.scheduler.handle().add_requests(vec![parent, one, two]).expect("requests that fit");
    let next = scene.add(tenant(1));
    scene.scheduler.take_arrivals();
    let tag = scene.scheduler.request_state(&next).expect("it waits").fair_tag;
    assert_eq!(tag, u64::from(PROMPT + OUTPUT + 2 * (1 + OUTPUT)) * 65_536);
    scene.run();
}

/// What never ran costs nothing: who aborts its flood is not behind it.
#[test]
fn what_is_aborted_before_it_runs_is_given_back() {
    let mut scene = Scene::fair(1);
    scene.add(tenant(2));
    let ids: Vec<String> = (0..100).map(|_| scene.add(tenant(1))).collect();
    for _ in 0..20 {
        scene.add(tenant(2));
    }
    scene.step();
    scene.scheduler.handle().abort_requests(ids.iter().map(String::as_str));
    let again = scene.add(tenant(1));
    scene.run();
    assert!(scene.place(&again) <= 2, "{}", scene.place(&again));
}
