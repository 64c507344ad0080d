//! Several engines behind one client, through real sockets and real schedulers.

mod common;

use std::{collections::HashSet, sync::atomic::Ordering, time::Duration};

use common::{Engine, PATIENCE, collect, config, finish_of, params, request, tokens_of, wait_until};
use ipc::{ClientError, ClientOptions, ClientOutput, Endpoint, EngineRouter, slack};
use scheduler::{AddRequestError, FinishReason, NewRequest, RequestError, RequestKey, SchedulerConfig};

/// More tokens than a test waits for.
const ENDLESS: u32 = 16_000;

fn router(engines: &[Engine]) -> EngineRouter {
    let endpoints = engines.iter().map(|engine| Endpoint::Unix(engine.path.clone())).collect();
    let options = ClientOptions { heartbeat_interval: Duration::from_millis(10), ..ClientOptions::default() };
    EngineRouter::connect(endpoints, options).expect("a client")
}

fn engines(count: usize) -> Vec<Engine> {
    (0..count).map(|_| Engine::start_with(config(), Duration::from_millis(1), |_| {})).collect()
}

/// A prompt that shares no block with another of its kind.
fn unlike(router: &EngineRouter, number: i32, max_tokens: u32) -> NewRequest {
    NewRequest::new(router.new_key(), &number.to_string(), vec![number + 1; 40], params(max_tokens))
}

fn add(router: &EngineRouter, request: &NewRequest) {
    router.add_requests(std::slice::from_ref(request)).expect("taken");
}

fn add_all(router: &EngineRouter, requests: &[NewRequest]) {
    for request in requests {
        add(router, request);
    }
}

fn pause_all(engines: &[Engine], is_paused: bool) {
    for engine in engines {
        engine.is_paused.store(is_paused, Ordering::Relaxed);
    }
}

fn num_requests(engine: &Engine) -> u64 {
    engine.server.stats().num_requests
}

fn wait_for_requests(engines: &[Engine], count: u64) -> Vec<u64> {
    wait_until("all have arrived", || engines.iter().map(num_requests).sum::<u64>() == count);
    engines.iter().map(num_requests).collect()
}

fn wait_until_empty(engines: &[Engine]) {
    for engine in engines {
        engine.wait_until_empty();
    }
}

fn counter(entries: &[(String, u64)], name: &str) -> u64 {
    entries.iter().find(|entry| entry.0 == name).map_or(0, |entry| entry.1)
}

#[test]
fn an_engine_that_is_abandoned_ends_its_requests_alone() {
    let engines = engines(2);
    let router = router(&engines);
    pause_all(&engines, true);
    let requests: Vec<_> = (0..8).map(|number| unlike(&router, number, 20)).collect();
    add_all(&router, &requests);
    let counts = wait_for_requests(&engines, 8);
    assert!(counts.iter().all(|&count| count > 0), "{counts:?}");
    router.abandon(0, "it is silent").expect("a rank");
    let died = usize::try_from(counts[0]).expect("few");
    let outputs = collect(&router, died);
    assert_eq!(outputs.len(), died, "those of the other engine go on");
    for output in &outputs {
        assert!(
            matches!(output, ClientOutput::Died { reason, .. } if &**reason == "it is silent"),
            "{output:?}"
        );
    }
    assert_eq!(router.engine(0).expect("a rank").death(), Some("it is silent"));
    assert!(router.is_alive(), "the other lives");
    pause_all(&engines, false);
    assert_eq!(collect(&router, 8 - died).len(), 20 * (8 - died));
    assert!(router.abandon(2, "").is_err());
    // Another, or the same one when it goes on, may come in its place.
    router.reconnect(0, Endpoint::Unix(engines[0].path.clone()), PATIENCE, None).expect("connected");
    assert!(router.engine(0).expect("a rank").is_alive());
    wait_until_empty(&engines);
}

#[test]
fn requests_are_spread_and_all_end() {
    let engines = engines(3);
    let router = router(&engines);
    assert_eq!(router.num_engines(), 3);
    let requests: Vec<_> = (0..30).map(|number| unlike(&router, number, 20)).collect();
    add_all(&router, &requests);
    let outputs = collect(&router, 30);
    for request in &requests {
        assert_eq!(tokens_of(&outputs, request.key), vec![7; 20]);
        assert_eq!(finish_of(&outputs, request.key), Some(FinishReason::Length));
    }
    let counts = wait_for_requests(&engines, 30);
    assert!(counts.iter().all(|&count| count >= 10 - u64::from(slack(10))), "{counts:?}");
    let stats = router.fresh_stats(PATIENCE);
    assert_eq!(counter(&stats, "num_requests"), 30);
    let blocks: u64 = engines.iter().map(|engine| engine.handle.stats().num_usable_blocks).sum();
    assert_eq!(counter(&stats, "num_usable_blocks"), blocks);
    wait_until_empty(&engines);
}

#[test]
fn one_engine_behind_a_router_is_that_engine() {
    let engines = engines(1);
    let router = router(&engines);
    let (kept, aborted) = (unlike(&router, 0, 20), unlike(&router, 1, ENDLESS));
    add(&router, &kept);
    add(&router, &aborted);
    router.abort_keys(vec![aborted.key]);
    let outputs = collect(&router, 2);
    assert_eq!(tokens_of(&outputs, kept.key).len(), 20);
    assert_eq!(finish_of(&outputs, aborted.key), Some(FinishReason::Abort));
    drop(engines);
    wait_until("it knows", || !router.is_alive());
    assert_eq!(router.death().as_deref(), Some("the engine was shut down"), "the engine's own words");
    let error = router.add_requests(&[unlike(&router, 2, 1)]).expect_err("dead");
    assert!(matches!(error, ClientError::Dead { .. }));
}

#[test]
fn a_group_stays_together_and_a_later_fork_follows() {
    let engines = engines(2);
    let router = router(&engines);
    for round in 0..6u64 {
        let first = NewRequest { request_id: format!("{round}").into(), ..request(&router, "", 300, 500) };
        let sample = |index: u64| NewRequest {
            key: router.new_key(),
            request_id: format!("{round}_{index}").into(),
            fork_from: Some(first.key),
            ..first.clone()
        };
        router.add_requests(&[first.clone(), sample(1), sample(2)]).expect("taken");
        add(&router, &sample(3));
    }
    collect(&router, 24);
    let num_forks: Vec<u64> = engines.iter().map(|engine| engine.handle.stats().num_forks).collect();
    assert_eq!(
        num_forks.iter().sum::<u64>(),
        18,
        "{num_forks:?}: each of the 18 found the one that it forks"
    );
    assert!(num_forks.iter().all(|count| count % 3 == 0 && *count > 0), "{num_forks:?}");
    wait_until_empty(&engines);
}

#[test]
fn aborts_find_the_engine() {
    let engines = engines(2);
    let router = router(&engines);
    let requests: Vec<_> = (0..8).map(|number| unlike(&router, number, ENDLESS)).collect();
    add_all(&router, &requests);
    router.abort_requests(["0", "3", "unknown", "5"]);
    let by_key = [1, 2, 4, 6, 7].map(|index: usize| requests[index].key);
    router.abort_keys([by_key.as_slice(), &[RequestKey(1)]].concat());
    let outputs = collect(&router, 8);
    for request in &requests {
        assert_eq!(finish_of(&outputs, request.key), Some(FinishReason::Abort));
    }
    wait_until_empty(&engines);
}

#[test]
fn an_id_twice_is_refused_as_by_one_engine() {
    let engines = engines(2);
    let router = router(&engines);
    let first = unlike(&router, 1, ENDLESS);
    let second = NewRequest { request_id: first.request_id.clone(), ..unlike(&router, 2, 5) };
    add(&router, &first);
    add(&router, &second);
    let outputs = collect(&router, 1);
    let error = outputs.iter().find_map(|output| match output {
        ClientOutput::Output(output) if output.key == second.key => Some(output.error),
        _ => None,
    });
    assert_eq!(error, Some(RequestError::DuplicateRequestId));
    router.abort_requests(["1"]);
    assert_eq!(finish_of(&collect(&router, 1), first.key), Some(FinishReason::Abort));
}

#[test]
fn refusals_name_the_right_request() {
    let config = SchedulerConfig { max_num_queued_reqs: 2, max_num_seqs: 1, ..config() };
    let engines: Vec<_> =
        (0..2).map(|_| Engine::start_with(config.clone(), Duration::ZERO, |_| {})).collect();
    // The paused ones take nothing in: each has room for two.
    pause_all(&engines, true);
    let router = router(&engines);
    let requests: Vec<_> = (0..6).map(|number| unlike(&router, number, 3)).collect();
    add_all(&router, &requests);
    let refused = collect(&router, 2);
    let keys: HashSet<_> = refused.iter().map(ClientOutput::key).collect();
    let expected = AddRequestError::QueueFull { queued: 2, wanted: 1, limit: 2 };
    assert!(refused.iter().all(|o| matches!(o, ClientOutput::Refused { error, .. } if *error == expected)));
    assert!(keys.len() == 2 && keys.iter().all(|key| requests.iter().any(|request| request.key == *key)));
    pause_all(&engines, false);
    let outputs = collect(&router, 4);
    for request in requests.iter().filter(|request| !keys.contains(&request.key)) {
        assert_eq!(tokens_of(&outputs, request.key).len(), 3);
    }
    let error = router.add_requests(&[request(&router, "long", 20_000, 1)]).expect_err("too long");
    assert!(matches!(error, ClientError::Request(AddRequestError::PromptTooLong { .. })));
    wait_until_empty(&engines);
}

#[test]
fn a_dead_rank_fails_its_own_and_the_others_go_on() {
    let mut engines = engines(2);
    let router = router(&engines);
    let requests: Vec<_> = (0..10).map(|number| unlike(&router, number, 400)).collect();
    add_all(&router, &requests);
    let counts = wait_for_requests(&engines, 10);
    engines[1].server.fail("RuntimeError: out of luck");
    let outputs = collect(&router, 10);
    let dead: Vec<_> = outputs
        .iter()
        .filter_map(|output| match output {
            ClientOutput::Died { reason, .. } => Some(&**reason),
            _ => None,
        })
        .collect();
    assert_eq!(dead, vec!["the engine died: RuntimeError: out of luck"; counts[1] as usize]);
    let finished = requests.iter().filter(|r| finish_of(&outputs, r.key) == Some(FinishReason::Length));
    assert_eq!(finished.count() as u64, counts[0]);
    assert!(router.is_alive() && router.death().is_none(), "an engine is left");
    assert!(!router.engine(1).expect("a rank").is_alive());
    let later: Vec<_> = (100..110).map(|number| unlike(&router, number, 4)).collect();
    add_all(&router, &later);
    assert_eq!(collect(&router, 10).len(), 40, "all go to the one that lives");
    engines[0].server.fail("RuntimeError: that one too");
    wait_until("no engine is left", || !router.is_alive());
    let death = router.death().expect("a reason");
    assert_eq!(
        death,
        "no engine is alive: rank 0: the engine died: RuntimeError: that one too; \
         rank 1: the engine died: RuntimeError: out of luck"
    );
    let error = router.add_requests(&[unlike(&router, 200, 1)]).expect_err("no engine");
    assert_eq!(error.to_string(), death);
}

#[test]
fn a_restarted_engine_takes_the_place_of_the_dead_one() {
    let mut engines = engines(2);
    let router = router(&engines);
    // The new one gives this client another index than the old one did.
    let fresh = Engine::start_with(config(), Duration::from_millis(1), |_| {});
    let (_first, _second) = (fresh.client(), fresh.client());
    let endless: Vec<_> = (0..6).map(|number| unlike(&router, number, ENDLESS)).collect();
    add_all(&router, &endless);
    let counts = wait_for_requests(&engines, 6);
    engines[0].server.fail("gone");
    let dead = collect(&router, counts[0] as usize);
    router.reconnect(0, Endpoint::Unix(fresh.path.clone()), PATIENCE, None).expect("connected");
    engines[0] = fresh;
    assert!(router.engine(0).expect("a rank").is_alive());
    let later: Vec<_> = (100..120).map(|number| unlike(&router, number, 30)).collect();
    add_all(&router, &later);
    let outputs = collect(&router, 20);
    for request in &later {
        assert_eq!(tokens_of(&outputs, request.key).len(), 30);
    }
    assert!(num_requests(&engines[0]) >= 10, "the new one is used as the old one was");
    let died: HashSet<_> =
        dead.iter().filter(|o| matches!(o, ClientOutput::Died { .. })).map(ClientOutput::key).collect();
    assert_eq!(died.len() as u64, counts[0]);
    let survivors = endless.iter().map(|request| request.key).filter(|key| !died.contains(key)).collect();
    router.abort_keys(survivors);
    collect(&router, counts[1] as usize);
    wait_until_empty(&engines);
}

#[test]
fn an_engine_that_is_replaced_alive_ends_what_it_had() {
    let mut engines = engines(1);
    let router = router(&engines);
    let request = unlike(&router, 1, ENDLESS);
    add(&router, &request);
    wait_for_requests(&engines, 1);
    let fresh = Engine::start();
    router.reconnect(0, Endpoint::Unix(fresh.path.clone()), PATIENCE, None).expect("connected");
    let outputs = collect(&router, 1);
    let Some(ClientOutput::Died { key, reason }) = outputs.last() else { panic!("an end") };
    assert_eq!((*key, &**reason), (request.key, "the engine was replaced by another"));
    engines[0].wait_until_empty();
    engines[0] = fresh;
    let request = unlike(&router, 2, 5);
    add(&router, &request);
    assert_eq!(tokens_of(&collect(&router, 1), request.key).len(), 5);
}

#[test]
fn an_engine_that_does_not_answer_the_first_query_is_not_taken() {
    let engines = engines(1);
    let router = router(&engines);
    let (fresh, soon) = (Engine::start(), Duration::from_millis(50));
    let endpoint = || Endpoint::Unix(fresh.path.clone());
    // Nothing answers queries in these engines.
    let error = router.reconnect(0, endpoint(), soon, Some(("kind", b""))).expect_err("no answer");
    assert!(matches!(error, ClientError::QueryTimeout { .. }), "{error}");
    let request = unlike(&router, 1, 5);
    add(&router, &request);
    assert_eq!(tokens_of(&collect(&router, 1), request.key).len(), 5, "by the engine that was there");
    engines[0].wait_until_empty();
    router.reconnect(0, endpoint(), PATIENCE, None).expect("connected");
}

#[test]
fn engines_that_do_not_fit_are_not_put_together() {
    let other = SchedulerConfig { max_num_seqs: 64, ..SchedulerConfig::new(8192, 4096) };
    let engines = [Engine::start(), Engine::start_with(other, Duration::ZERO, |_| {})];
    let endpoint = |index: usize| Endpoint::Unix(engines[index].path.clone());
    let error =
        EngineRouter::connect(vec![endpoint(0), endpoint(1)], ClientOptions::default()).expect_err("no");
    let expected =
        "the engine of rank 1 has max_model_len = 4096, the first one 16384; start all with the same numbers";
    assert_eq!(error.to_string(), expected);
    let none = EngineRouter::connect(Vec::new(), ClientOptions::default()).expect_err("no engine");
    assert_eq!(none.to_string(), "a client needs at least one engine to connect to");
    let router = EngineRouter::connect(vec![endpoint(0)], ClientOptions::default()).expect("a client");
    assert!(matches!(
        router.reconnect(0, endpoint(1), PATIENCE, None),
        Err(ClientError::NotAlike { rank: 0, .. })
    ));
    let error = router.reconnect(3, endpoint(0), PATIENCE, None).expect_err("no such rank");
    assert_eq!(error.to_string(), "there is no engine of rank 3; this client has 1, counted from 0");
    assert!(router.is_alive(), "nothing has changed");
}

#[test]
fn two_clients_of_two_engines_see_each_others_load() {
    let engines = engines(2);
    let (one, two) = (router(&engines), router(&engines));
    // All of the first client's requests are on one engine: the other was not there for a moment.
    let first = request(&one, "0", 40, ENDLESS);
    add(&one, &first);
    let mut forks = vec![first.key];
    for index in 1..20 {
        let key = one.new_key();
        let request_id = index.to_string().into();
        add(&one, &NewRequest { key, request_id, fork_from: Some(first.key), ..first.clone() });
        forks.push(key);
    }
    let counts = wait_for_requests(&engines, 20);
    assert!(counts.contains(&20), "forks stay together: {counts:?}");
    let busy = usize::from(counts[1] == 20);
    let seen = |rank: usize| two.engine(rank).expect("a rank").num_of_others();
    wait_until("the other client knows", || seen(busy) == 20 && seen(1 - busy) == 0);
    let own: Vec<_> = (0..10).map(|number| unlike(&two, number, ENDLESS)).collect();
    add_all(&two, &own);
    let counts = wait_for_requests(&engines, 30);
    assert_eq!(counts[busy], 20, "the idle engine gets them all");
    one.abort_keys(forks);
    two.abort_keys(own.iter().map(|request| request.key).collect());
    let (outputs_of_one, outputs_of_two) = (collect(&one, 20), collect(&two, 10));
    let keys: HashSet<_> = own.iter().map(|request| request.key).collect();
    assert!(outputs_of_two.iter().all(|output| keys.contains(&output.key())), "none of the other's");
    assert!(outputs_of_one.len() >= 20);
    wait_until_empty(&engines);
}

/// Tokens found in the caches when conversations take turns on so many engines, of 10,000. Each turn sends all that was
/// said before; six conversations are under way at any time, drawn at random, the same ones for any number of engines.
fn hits_of_conversations(num_engines: usize) -> u64 {
    let engines: Vec<_> = (0..num_engines).map(|_| Engine::start()).collect();
    let endpoints = engines.iter().map(|engine| Endpoint::Unix(engine.path.clone())).collect();
    // No heartbeat: what it shows depends on its moment, and there are no other clients.
    let options = ClientOptions { heartbeat_interval: Duration::from_secs(3600), ..ClientOptions::default() };
    let router = EngineRouter::connect(endpoints, options).expect("a client");
    let mut prompts: Vec<Vec<i32>> = (0..16).map(|number| vec![number; 320]).collect();
    let mut rng = 1u64;
    for round in 0..100 {
        let mut drawn = HashSet::new();
        while drawn.len() < 6 {
            // Xorshift.
            rng ^= rng << 13;
            rng ^= rng >> 7;
            rng ^= rng << 17;
            let conversation = (rng % prompts.len() as u64) as usize;
            if drawn.insert(conversation) {
                let prompt = &mut prompts[conversation];
                let request_id = conversation.to_string();
                add(&router, &NewRequest::new(router.new_key(), &request_id, prompt.clone(), params(8)));
                // The answer and the next question, which no other conversation has.
                prompt.extend((0..16).map(|index| 1000 * round + index));
            }
        }
        collect(&router, 6);
    }
    let stats = router.fresh_stats(PATIENCE);
    assert_eq!(counter(&stats, "num_requests"), 600);
    counter(&stats, "prefix_cache_hits") * 10_000 / counter(&stats, "prefix_cache_queries")
}

#[test]
fn two_engines_hit_nearly_as_often_as_one() {
    let (one, two) = (hits_of_conversations(1), hits_of_conversations(2));
    assert!(one > 9000, "{one} of 10,000 tokens are in the cache of one engine");
    assert!(two + 300 > one, "{two} of 10,000 tokens with two engines, {one} with one");
}
