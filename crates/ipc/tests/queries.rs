//! Questions to the thread that steps: answered in order, refused beyond the limits, and never a reason to hang.

mod common;

use std::time::{Duration, Instant};

use common::{Engine, PATIENCE, RawClient, collect, request, tokens_of, wait_until};
use ipc::{
    ClientError, ClientMessage, EngineMessage, HEADER_BYTES, MAX_OPEN_QUERIES, MAX_QUERY_BYTES,
    MAX_QUERY_KIND_BYTES, MAX_REPLY_BYTES, MAX_WAITING_QUERIES, Query,
};

/// Answer with `answer` whatever is asked, until `count` were answered.
fn answer(engine: &Engine, count: usize, answer: impl Fn(Query)) {
    let num_answered = std::cell::Cell::new(0);
    wait_until("everything was asked", || {
        for query in engine.server.queries().take() {
            num_answered.set(num_answered.get() + 1);
            answer(query);
        }
        num_answered.get() >= count
    });
}

fn echo(query: Query) {
    let mut words = query.kind().as_bytes().to_vec();
    words.extend_from_slice(query.payload());
    query.answer(Ok(words));
}

#[test]
fn an_answer_is_that_of_its_question() {
    let engine = Engine::start();
    let clients: Vec<_> = (0..3).map(|_| engine.client()).collect();
    std::thread::scope(|scope| {
        let askers: Vec<_> = clients
            .iter()
            .enumerate()
            .flat_map(|(number, client)| (0..4).map(move |asker| (number, client, asker)))
            .map(|(number, client, asker)| {
                scope.spawn(move || {
                    for round in 0..20 {
                        let payload = format!("{number} {asker} {round}");
                        let answer = client.query("echo ", payload.as_bytes(), PATIENCE).expect("an answer");
                        assert_eq!(answer, format!("echo {payload}").into_bytes());
                    }
                })
            })
            .collect();
        answer(&engine, 3 * 4 * 20, echo);
        for asker in askers {
            asker.join().expect("right answers");
        }
    });
}

#[test]
fn questions_do_not_disturb_requests() {
    let engine = Engine::start_with(common::config(), Duration::from_micros(200), |_| {});
    let client = engine.client();
    let streaming = request(&client, "streaming", 10, 2000);
    client.add_requests(std::slice::from_ref(&streaming)).expect("taken");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..50 {
                assert_eq!(client.query("large", &[], PATIENCE).expect("an answer").len(), 1 << 20);
            }
        });
        answer(&engine, 50, |query| query.answer(Ok(vec![7; 1 << 20])));
    });
    assert_eq!(tokens_of(&collect(&client, 1), streaming.key).len(), 2000);
}

#[test]
fn what_cannot_be_answered_says_why() {
    let engine = Engine::start();
    let client = engine.client();
    let ask = |reply: fn(Query)| {
        std::thread::scope(|scope| {
            let asker = scope.spawn(|| client.query("what", b"", PATIENCE));
            answer(&engine, 1, reply);
            asker.join().expect("an outcome")
        })
    };
    let failed = |error: ClientError| match error {
        ClientError::QueryFailed { message } => message,
        other => panic!("{other}"),
    };
    assert_eq!(
        failed(ask(|query| query.answer(Err("no such thing".to_owned()))).expect_err("refused")),
        "no such thing"
    );
    assert_eq!(failed(ask(drop).expect_err("forgotten")), "the engine gave no answer");
    assert_eq!(
        ask(|query| query.answer(Ok(vec![1; MAX_REPLY_BYTES]))).expect("just fits").len(),
        MAX_REPLY_BYTES
    );
    let message = failed(ask(|query| query.answer(Ok(vec![1; MAX_REPLY_BYTES + 1]))).expect_err("too long"));
    assert_eq!(message, "the answer has 8388609 bytes; the limit is 8388608");
    let error = client.query("what", &vec![0; MAX_QUERY_BYTES + 1], PATIENCE).expect_err("too long");
    assert_eq!(error.to_string(), "the payload of a query has 65537 bytes; the limit is 65536");
    let error = client.query(&"k".repeat(65), b"", PATIENCE).expect_err("too long");
    assert_eq!(error.to_string(), "the kind of a query has 65 bytes; the limit is 64");
}

#[test]
fn an_engine_that_does_not_answer_costs_no_more_than_the_timeout() {
    let engine = Engine::start();
    let client = engine.client();
    let timeout = Duration::from_millis(20);
    for _ in 0..MAX_OPEN_QUERIES {
        let error = client.query("state", b"", timeout).expect_err("the engine does not answer");
        assert!(matches!(error, ClientError::QueryTimeout { .. }), "{error}");
        assert!(error.to_string().contains("no answer within 0.02 s"), "{error}");
    }
    // Those are still open: no other is sent.
    let error = client.query("state", b"", PATIENCE).expect_err("too many");
    assert!(error.to_string().contains("8 queries have no answer yet"), "{error}");
    // The engine goes on, and late answers go nowhere.
    answer(&engine, MAX_OPEN_QUERIES as usize, echo);
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| {
            let began = Instant::now();
            loop {
                match client.query("again", b"", PATIENCE) {
                    Ok(answer) => return answer,
                    Err(error) => assert!(began.elapsed() < PATIENCE, "{error}"),
                }
            }
        });
        answer(&engine, 1, echo);
        assert_eq!(asker.join().expect("an answer"), b"again");
    });
}

#[test]
fn who_asks_for_too_much_is_refused_by_the_engine() {
    let engine = Engine::start();
    let ask = |id| ClientMessage::Query { id, kind: "state".into(), payload: Box::default() };
    let mut greedy = RawClient::greeted(&engine);
    (1..=u64::from(MAX_OPEN_QUERIES) + 1).for_each(|id| greedy.send(&ask(id)));
    let Some(EngineMessage::Reply { id: 9, outcome: Err(message) }) = greedy.read() else {
        panic!("a refusal")
    };
    assert!(message.contains("8 queries of this client have no answer yet; the limit is 8"), "{message}");
    // Many such clients fill the whole queue; they leave, and the answers to their queries are dropped.
    let num_clients = MAX_WAITING_QUERIES / MAX_OPEN_QUERIES as usize;
    let crowd: Vec<RawClient> = (1..num_clients)
        .map(|_| {
            let mut client = RawClient::greeted(&engine);
            (1..=u64::from(MAX_OPEN_QUERIES)).for_each(|id| client.send(&ask(id)));
            // What comes back to a ping says that the queries before it were read.
            client.send(&ClientMessage::Ping(1));
            assert!(matches!(client.read(), Some(EngineMessage::Pong { .. })));
            client
        })
        .collect();
    let mut late = RawClient::greeted(&engine);
    late.send(&ask(1));
    let Some(EngineMessage::Reply { id: 1, outcome: Err(message) }) = late.read() else {
        panic!("a refusal")
    };
    assert!(message.contains("256 queries wait for the engine"), "{message}");
    drop(crowd);
    wait_until("the crowd has gone", || engine.server.stats().num_clients == 2);
    answer(&engine, MAX_WAITING_QUERIES, echo);
    late.send(&ask(2));
    answer(&engine, 1, echo);
    let Some(EngineMessage::Reply { id: 2, outcome: Ok(answer) }) = late.read() else { panic!("an answer") };
    assert_eq!(answer, b"state");
}

#[test]
fn a_dead_engine_answers_at_once() {
    let mut engine = Engine::start();
    let client = engine.client();
    std::thread::scope(|scope| {
        let asker = scope.spawn(|| client.query("state", b"", PATIENCE));
        let held = std::cell::RefCell::new(Vec::new());
        wait_until("it was asked", || {
            held.borrow_mut().extend(engine.server.queries().take());
            !held.borrow().is_empty()
        });
        engine.server.fail("on purpose");
        let error = asker.join().expect("an outcome").expect_err("no answer");
        assert!(matches!(&error, ClientError::Dead { reason } if reason.contains("on purpose")), "{error}");
    });
    wait_until("the client knows", || !client.is_alive());
    let began = Instant::now();
    let error = client.query("state", b"", PATIENCE).expect_err("dead");
    assert!(matches!(&error, ClientError::Dead { reason } if reason.contains("on purpose")), "{error}");
    assert!(began.elapsed() < PATIENCE / 2);
}

/// The bytes of the other kinds are in `codec.rs`.
#[test]
fn the_bytes_of_a_reply_are_these() {
    let answer = EngineMessage::Reply { id: 1, outcome: Ok(vec![0xee]) };
    let refusal = EngineMessage::Reply { id: 2, outcome: Err("no".to_owned()) };
    let mut frames = Vec::new();
    answer.encode(&mut frames);
    assert_eq!(frames, b"\x0e\0\0\0\x8d\x01\0\0\0\0\0\0\0\x01\x01\0\0\0\xee");
    frames.clear();
    refusal.encode(&mut frames);
    assert_eq!(frames, b"\x0f\0\0\0\x8d\x02\0\0\0\0\0\0\0\0\x02\0\0\0no");
}

#[test]
fn a_query_that_is_too_long_is_refused() {
    let decode = |kind: usize, payload: usize| {
        let kind = "k".repeat(kind).into();
        let query = ClientMessage::Query { id: 1, kind, payload: vec![0; payload].into() };
        let mut bytes = Vec::new();
        query.encode(&mut bytes);
        ClientMessage::decode(bytes[4], &bytes[HEADER_BYTES..], 100)
    };
    decode(MAX_QUERY_KIND_BYTES, MAX_QUERY_BYTES).expect("as long as may be");
    let error = decode(MAX_QUERY_KIND_BYTES + 1, 0).expect_err("its kind");
    assert_eq!(error.to_string(), "65 is not a length of a query's kind");
    let error = decode(1, MAX_QUERY_BYTES + 1).expect_err("its payload");
    assert_eq!(error.to_string(), "65537 is not a length of a query");
}
