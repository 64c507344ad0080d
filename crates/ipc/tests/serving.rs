//! Requests, aborts and ends through a real socket and a real scheduler.

mod common;

use std::{collections::HashSet, sync::atomic::Ordering, time::Duration};

use common::{Engine, collect, config, finish_of, params, pause, request, tokens_of, wait_until};
use ipc::{ClientError, ClientOptions, ClientOutput, Endpoint, EngineClient, Listener, Secret};
use scheduler::{
    AddRequestError, FinishReason, NewRequest, RepetitionDetection, RequestError, SchedulerConfig,
};

#[test]
fn a_request_streams_and_ends() {
    let engine = Engine::start();
    let client = engine.client();
    assert_eq!(client.facts().limits.max_model_len, 16_384);
    assert_eq!(client.facts().pid, std::process::id());
    assert_eq!(&*client.facts().info, b"{\"model\": \"made up\"}");
    let request = request(&client, "a", 40, 100);
    client.add_requests(std::slice::from_ref(&request)).expect("taken");
    let outputs = collect(&client, 1);
    assert_eq!(tokens_of(&outputs, request.key), vec![7; 100]);
    assert_eq!(finish_of(&outputs, request.key), Some(FinishReason::Length));
    let ClientOutput::Output(first) = outputs[0] else { panic!("a token") };
    assert!(first.first_scheduled_ns > 0 && first.timestamp_ns >= first.first_scheduled_ns);
    engine.wait_until_empty();
}

#[test]
fn a_socket_whose_directory_was_removed_is_there_again_for_new_clients() {
    let engine = Engine::start();
    let client = engine.client();
    let directory = engine.path.parent().expect("a directory");
    std::fs::remove_dir_all(directory).expect("removed");
    wait_until("it listens again", || engine.path.exists());
    let another = engine.client();
    assert_eq!(collect_one(&another), 5);
    assert_eq!(collect_one(&client), 5, "those that were connected stay");
    wait_until("it says so", || {
        let complaints = engine.server.take_complaints();
        complaints.iter().any(|line| line.contains("was removed") && line.contains("listens there again"))
    });
}

/// Tokens of a request that is handed in and read to its end.
fn collect_one(client: &EngineClient) -> usize {
    client.add_requests(&[request(client, "a", 8, 5)]).expect("taken");
    collect(client, 1).len()
}

#[test]
fn a_client_says_why_a_request_with_stop_strings_ended_at_its_length() {
    let engine = Engine::start();
    let ends = || {
        let stats = engine.handle.stats();
        (stats.num_finished, stats.num_finished_stop, stats.num_finished_length)
    };
    let (client, other) = (engine.client(), engine.client());
    let run = |client: &EngineClient, id: &str| {
        let request = NewRequest { has_stop_strings: true, ..request(client, id, 8, 3) };
        client.add_requests(std::slice::from_ref(&request)).expect("taken");
        let outputs = collect(client, 1);
        assert_eq!(finish_of(&outputs, request.key), Some(FinishReason::Length));
        let is_unsettled = |output: &ClientOutput| matches!(output, ClientOutput::Output(output) if output.unsettled_reason().is_some());
        assert_eq!(outputs.iter().filter(|output| is_unsettled(output)).count(), 1);
        request.key
    };
    let (first, second) = (run(&client, "a"), run(&client, "b"));
    run(&other, "c");
    assert_eq!(ends(), (3, 0, 0), "no client has said why");
    client.settle_end(first, true);
    client.settle_end(first, true);
    client.settle_end(second, false);
    wait_until("both are settled", || ends() == (3, 1, 1));
    drop(other);
    wait_until("who has gone says nothing more", || ends() == (3, 1, 2));
    assert_eq!(
        client.fresh_stats(Duration::from_secs(5)).len(),
        client.stats().len(),
        "it is still connected"
    );
    assert_eq!(ends(), (3, 1, 2), "once is enough");
}

#[test]
fn an_end_by_repetition_is_counted_as_what_its_client_finds() {
    let engine = Engine::start();
    let ends = || {
        let stats = engine.handle.stats();
        (stats.num_finished_stop, stats.num_finished_length, stats.num_finished_repetition)
    };
    let (client, other) = (engine.client(), engine.client());
    let run = |client: &EngineClient, has_stop_strings: bool| {
        let mut request = NewRequest { has_stop_strings, ..request(client, "a", 8, 100) };
        request.params.repetition_detection = RepetitionDetection::new(1, 4, 5).ok();
        client.add_requests(std::slice::from_ref(&request)).expect("taken");
        let outputs = collect(client, 1);
        assert_eq!(finish_of(&outputs, request.key), Some(FinishReason::Repetition));
        assert_eq!(tokens_of(&outputs, request.key), [7; 5]);
        request.key
    };
    run(&client, false);
    assert_eq!(ends(), (0, 0, 1), "no client looks for a stop string");
    let (first, second) = (run(&client, true), run(&client, true));
    run(&other, true);
    assert_eq!(ends(), (0, 0, 1), "no client has said why");
    client.settle_end(first, true);
    client.settle_end(second, false);
    wait_until("both are settled", || ends() == (1, 0, 2));
    drop(other);
    wait_until("who has gone says nothing more", || ends() == (1, 0, 3));
}

#[test]
fn a_group_forks_and_shares_its_prompt() {
    let engine = Engine::start();
    let client = engine.client();
    let first = request(&client, "a", 300, 5);
    let mut group = vec![first.clone()];
    for index in 1..4 {
        let request_id = format!("{index}_a").into();
        group.push(NewRequest {
            key: client.new_key(),
            request_id,
            fork_from: Some(first.key),
            ..first.clone()
        });
    }
    client.add_requests(&group).expect("taken");
    let outputs = collect(&client, 4);
    for request in &group {
        assert_eq!(tokens_of(&outputs, request.key).len(), 5);
    }
    assert_eq!(engine.handle.stats().num_forks, 3);
}

#[test]
fn two_clients_with_the_same_ids_do_not_meet() {
    let engine = Engine::start();
    let clients = [engine.client(), engine.client()];
    assert_ne!(clients[0].client_index(), clients[1].client_index());
    let mut keys = Vec::new();
    for round in 0..20 {
        for client in &clients {
            let request = request(client, &round.to_string(), 10, 50);
            keys.push(request.key);
            client.add_requests(&[request]).expect("taken");
        }
    }
    for (index, client) in clients.iter().enumerate() {
        let outputs = collect(client, 20);
        for key in keys.iter().skip(index).step_by(2) {
            assert_eq!(tokens_of(&outputs, *key).len(), 50);
        }
        assert_eq!(outputs.len(), 20 * 50, "none of the other's");
    }
    engine.wait_until_empty();
}

#[test]
fn an_id_twice_from_one_client_is_an_error_of_the_second() {
    let engine = Engine::start();
    let client = engine.client();
    let (first, second) = (request(&client, "a", 10, 10_000), request(&client, "a", 10, 10));
    client.add_requests(std::slice::from_ref(&first)).expect("taken");
    client.add_requests(std::slice::from_ref(&second)).expect("sent");
    let outputs = collect(&client, 1);
    let end = outputs.iter().find_map(|output| match output {
        ClientOutput::Output(output) if output.key == second.key => Some(output.error),
        _ => None,
    });
    assert_eq!(end, Some(RequestError::DuplicateRequestId));
    client.abort_requests(["a", "unknown"]);
    let outputs = collect(&client, 1);
    assert_eq!(finish_of(&outputs, first.key), Some(FinishReason::Abort));
}

#[test]
fn what_the_client_can_check_is_refused_by_the_call() {
    let engine = Engine::start();
    let client = engine.client();
    let refused = |request: NewRequest| client.add_requests(&[request]).expect_err("refused");
    let error = refused(request(&client, "a", 20_000, 1));
    let expected = AddRequestError::PromptTooLong { num_prompt_tokens: 20_000, max_model_len: 16_384 };
    assert_eq!(error.to_string(), expected.to_string());
    assert!(matches!(error, ClientError::Request(error) if error == expected));
    let foreign = NewRequest { key: scheduler::RequestKey(5), ..request(&client, "a", 1, 1) };
    assert!(matches!(refused(foreign), ClientError::ForeignKey { key: 5 }));
    let long_id = NewRequest { request_id: "x".repeat(5 << 20).into(), ..request(&client, "a", 1, 1) };
    assert!(matches!(refused(long_id), ClientError::RequestTooLarge { .. }));
    assert!(client.is_alive());
}

#[test]
fn a_full_queue_comes_back_as_a_refusal() {
    let config = SchedulerConfig { max_num_queued_reqs: 4, max_num_seqs: 1, ..config() };
    let engine = Engine::start_with(config, Duration::ZERO, |_| {});
    engine.is_paused.store(true, Ordering::Relaxed);
    let client = engine.client();
    for index in 0..6 {
        client.add_requests(&[request(&client, &index.to_string(), 4, 2)]).expect("sent");
    }
    let outputs = collect(&client, 2);
    let error = AddRequestError::QueueFull { queued: 4, wanted: 1, limit: 4 };
    assert!(
        outputs.iter().all(|output| matches!(output, ClientOutput::Refused { error: e, .. } if *e == error))
    );
    let five = (0..5).map(|index| request(&client, &format!("b{index}"), 4, 2)).collect::<Vec<_>>();
    let error = client.add_requests(&five).expect_err("more than the queue holds");
    assert!(matches!(error, ClientError::Request(AddRequestError::QueueFull { limit: 4, .. })));
    engine.is_paused.store(false, Ordering::Relaxed);
    assert_eq!(collect(&client, 4).len(), 8);
}

#[test]
fn aborts_by_key_and_by_id_give_one_last_output_each() {
    let engine = Engine::start();
    let client = engine.client();
    let requests: Vec<NewRequest> =
        (0..10).map(|index| request(&client, &index.to_string(), 10, 16_000)).collect();
    client.add_requests(&requests).expect("taken");
    client.abort_keys(requests[..5].iter().map(|request| request.key).collect());
    client.abort_requests(["5", "6", "7", "8", "9"]);
    let outputs = collect(&client, 10);
    for request in &requests {
        assert_eq!(finish_of(&outputs, request.key), Some(FinishReason::Abort));
    }
    engine.wait_until_empty();
}

#[test]
fn a_request_waits_for_its_grammar() {
    let engine = Engine::start();
    let client = engine.client();
    let wait = |id| NewRequest { waits_for_grammar: true, ..request(&client, id, 10, 3) };
    let (good, bad) = (wait("good"), wait("bad"));
    client.add_requests(&[good.clone(), bad.clone()]).expect("taken");
    client.grammar_failed(bad.key);
    let outputs = collect(&client, 1);
    assert_eq!(finish_of(&outputs, bad.key), Some(FinishReason::Error));
    client.grammar_ready(good.key);
    assert_eq!(tokens_of(&collect(&client, 1), good.key).len(), 3);
}

#[test]
fn a_client_that_goes_takes_its_requests_along() {
    let engine = Engine::start();
    let (gone, stays) = (engine.client(), engine.client());
    engine.is_paused.store(true, Ordering::Relaxed);
    for index in 0..50 {
        gone.add_requests(&[request(&gone, &index.to_string(), 10, 16_000)]).expect("taken");
    }
    let kept = request(&stays, "kept", 10, 20);
    stays.add_requests(std::slice::from_ref(&kept)).expect("taken");
    wait_until("all are taken", || engine.server.stats().num_requests == 51);
    drop(gone);
    wait_until("it has gone", || engine.server.stats().num_clients == 1);
    engine.is_paused.store(false, Ordering::Relaxed);
    assert_eq!(tokens_of(&collect(&stays, 1), kept.key).len(), 20);
    engine.wait_until_empty();
    let num_scheduled = engine.handle.stats().num_scheduled_tokens;
    assert!(num_scheduled < 1000, "{num_scheduled} tokens without a reader");
}

#[test]
fn closing_a_client_ends_its_own_requests_at_once() {
    let engine = Engine::start();
    let client = engine.client();
    client.add_requests(&[request(&client, "a", 10, 16_000)]).expect("taken");
    client.close();
    let outputs = collect(&client, 1);
    assert!(matches!(outputs.last(), Some(ClientOutput::Died { .. })));
    assert_eq!(client.death(), Some("this client was closed"));
    let error = client.add_requests(&[request(&client, "b", 1, 1)]).expect_err("closed");
    assert!(matches!(error, ClientError::Dead { .. }));
    engine.wait_until_empty();
}

#[test]
fn every_client_learns_why_the_engine_died() {
    let mut engine = Engine::start_with(config(), Duration::from_millis(1), |_| {});
    let clients = [engine.client(), engine.client()];
    for client in &clients {
        let requests: Vec<_> = (0..3).map(|index| request(client, &index.to_string(), 10, 16_000)).collect();
        client.add_requests(&requests).expect("taken");
    }
    engine.server.fail("RuntimeError: CUDA error: out of patience");
    assert!(!engine.server.is_alive());
    for client in &clients {
        let outputs = collect(client, 3);
        let dead: HashSet<_> = outputs
            .iter()
            .filter_map(|output| match output {
                ClientOutput::Died { key, .. } => Some(*key),
                _ => None,
            })
            .collect();
        assert_eq!(dead.len(), 3);
        assert_eq!(client.death(), Some("the engine died: RuntimeError: CUDA error: out of patience"));
    }
}

#[test]
fn a_server_that_stops_says_goodbye_and_takes_its_socket_away() {
    let mut engine = Engine::start();
    let client = engine.client();
    engine.server.stop();
    wait_until("the client knows", || !client.is_alive());
    assert_eq!(client.death(), Some("the engine was shut down"));
    assert!(!engine.path.exists());
    assert!(!engine.path.parent().expect("a directory").exists());
    let options = ClientOptions { connect_timeout: Duration::from_millis(50), ..ClientOptions::default() };
    let error = EngineClient::connect(Endpoint::Unix(engine.path.clone()), options).expect_err("no engine");
    assert!(error.to_string().starts_with("cannot connect to the engine at /"), "{error}");
}

#[test]
fn the_heartbeat_tells_a_stalled_engine_from_an_idle_one() {
    let engine = Engine::start();
    let options = ClientOptions { heartbeat_interval: Duration::from_millis(10), ..ClientOptions::default() };
    let client = EngineClient::connect(Endpoint::Unix(engine.path.clone()), options).expect("a connection");
    pause(Duration::from_millis(150));
    // On a busy machine a heartbeat may be late; those of a stalled engine would never be young again.
    wait_until("idle is not stalled", || {
        let idle = client.health();
        idle.step_age < Duration::from_millis(50) && idle.heartbeat_age < Duration::from_millis(100)
    });
    engine.is_paused.store(true, Ordering::Relaxed);
    engine.handle.wake();
    client.add_requests(&[request(&client, "a", 10, 3)]).expect("sent");
    wait_until("the age of the step grows", || client.health().step_age > Duration::from_millis(100));
    assert!(client.health().heartbeat_age < Duration::from_secs(1), "its process lives all the same");
    engine.is_paused.store(false, Ordering::Relaxed);
    collect(&client, 1);
    wait_until("it is young again", || client.health().step_age < Duration::from_millis(50));
    // The last token arrives before the heartbeat that counts its step.
    wait_until("its steps are counted", || client.health().num_steps >= 3);
    let stats = client.fresh_stats(Duration::from_secs(5));
    let value = |name: &str| stats.iter().find(|entry| entry.0 == name).map(|entry| entry.1);
    assert_eq!(value("num_requests"), Some(1));
    assert_eq!(value("num_queued"), Some(0));
    assert_eq!(client.stats().len(), stats.len());
}

#[test]
fn tcp_with_the_secret_serves_and_without_it_does_not() {
    let secret = Secret::new(b"a secret of many bytes").expect("long enough");
    let listener = Listener::tcp("127.0.0.1:0".parse().expect("an address"), secret.clone()).expect("a port");
    let address = listener.tcp_address().expect("a TCP listener");
    let engine = Engine::start_with(config(), Duration::ZERO, |options| options.listeners.push(listener));
    let client =
        EngineClient::connect(Endpoint::Tcp { address, secret }, ClientOptions::default()).expect("welcome");
    let request = request(&client, "a", 10, 30);
    client.add_requests(std::slice::from_ref(&request)).expect("taken");
    assert_eq!(tokens_of(&collect(&client, 1), request.key).len(), 30);
    let wrong = Secret::new(b"some other secret bytes").expect("long enough");
    let error = EngineClient::connect(Endpoint::Tcp { address, secret: wrong }, ClientOptions::default())
        .expect_err("refused");
    assert!(error.to_string().contains("the shared secret is wrong"), "{error}");
    wait_until("it is counted", || engine.server.stats().num_refused == 1);
    let complaints = engine.server.take_complaints();
    assert!(complaints[0].contains("secret"), "{complaints:?}");
    assert!(client.is_alive());
}

#[test]
fn a_client_waits_for_an_engine_that_starts() {
    let path = common::socket_path();
    let its_path = path.clone();
    let connecting =
        std::thread::spawn(move || EngineClient::connect(Endpoint::Unix(its_path), ClientOptions::default()));
    pause(Duration::from_millis(100));
    let engine = Engine::start_with(config(), Duration::ZERO, |options| {
        options.listeners.push(Listener::unix(&path).expect("a second listener"));
    });
    let client = connecting.join().expect("no panic").expect("connected");
    let request = NewRequest::new(client.new_key(), "a", vec![1, 2], params(1));
    client.add_requests(&[request]).expect("taken");
    collect(&client, 1);
    drop(engine);
}
