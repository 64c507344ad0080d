//! Peers that say what no client says, say nothing, do not read or go at any time: the engine and the others live on.

mod common;

use std::{
    io::Write,
    net::Shutdown,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use common::{Engine, PATIENCE, RawClient, collect, config, finish_of, request, tokens_of, wait_until};
use ipc::{ClientMessage, EngineMessage, Hello, PROTOCOL_VERSION, Refusal};
use scheduler::FinishReason;

/// Numbers that are the same in every run.
struct Random(u64);

fn random() -> Random {
    Random(0x9e37_79b9_7f4a_7c15)
}

/// A number below `limit`.
fn below(rng: &mut Random, limit: usize) -> usize {
    // xorshift64
    rng.0 ^= rng.0 << 13;
    rng.0 ^= rng.0 >> 7;
    rng.0 ^= rng.0 << 17;
    (rng.0 % limit as u64) as usize
}

/// Memory that this process holds.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).map_or(0, |pages: usize| pages * 4096)
}

#[test]
fn garbage_closes_its_own_connection_alone() {
    let engine = Engine::start_with(config(), Duration::from_micros(200), |_| {});
    let client = engine.client();
    let streaming = request(&client, "streaming", 10, 4000);
    client.add_requests(std::slice::from_ref(&streaming)).expect("taken");
    let mut rng = random();
    for round in 0..300 {
        // Half of them are past the handshake.
        let mut peer = if round % 2 == 0 { RawClient::silent(&engine) } else { RawClient::greeted(&engine) };
        let mut frame = Vec::new();
        ClientMessage::AddRequests(vec![peer.request(1, 100)]).encode(&mut frame);
        match round % 5 {
            // Anything at all.
            0 => frame = (0..below(&mut rng, 200)).map(|_| below(&mut rng, 256) as u8).collect(),
            // A request with wrong bytes in it.
            1 => (0..3).for_each(|_| {
                let at = below(&mut rng, frame.len());
                frame[at] ^= 1 << below(&mut rng, 8);
            }),
            // Half a request.
            2 => frame.truncate(below(&mut rng, frame.len())),
            // A frame of four gigabytes.
            3 => frame[..4].fill(0xff),
            // An unknown kind.
            _ => frame[4] = 0x7f,
        }
        let _ = peer.stream.write_all(&frame);
        let _ = peer.stream.shutdown(Shutdown::Write);
        peer.read_to_end();
    }
    let outputs = collect(&client, 1);
    assert_eq!(tokens_of(&outputs, streaming.key).len(), 4000);
    assert_eq!(finish_of(&outputs, streaming.key), Some(FinishReason::Length));
    engine.wait_until_empty();
    let stats = engine.server.stats();
    assert_eq!(stats.num_clients, 1);
    assert!(stats.num_failed > 100, "{stats:?}");
    assert!(client.is_alive());
}

/// What a client says.
type Mistake = fn(&RawClient) -> Vec<u8>;

#[test]
fn every_mistake_has_its_words() {
    let engine = Engine::start();
    let foreign = ipc::key_of(4711, 1);
    let cases: [(&str, Mistake); 6] = [
        ("announced a frame of 4294967295 bytes", |_| vec![0xff, 0xff, 0xff, 0xff, 2]),
        ("frame kind 0x63 is unknown", |_| vec![0, 0, 0, 0, 0x63]),
        ("closed within a frame: 7 of 15 bytes came", |_| vec![10, 0, 0, 0, 2, 1, 2]),
        ("the frame has 1 bytes too many", |_| vec![9, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("a key names one request", |peer| {
            let mut frame = Vec::new();
            ClientMessage::AddRequests(vec![peer.request(1, 9), peer.request(1, 9)]).encode(&mut frame);
            frame
        }),
        ("a client says hello once", |_| {
            let mut frame = Vec::new();
            let hello = Hello { version: PROTOCOL_VERSION, capabilities: 0, nonce: [0; 32], proof: None };
            ClientMessage::Hello(hello).encode(&mut frame);
            frame
        }),
    ];
    for (words, frame) in cases {
        let mut peer = RawClient::greeted(&engine);
        peer.stream.write_all(&frame(&peer)).expect("written");
        peer.stream.shutdown(Shutdown::Write).expect("shut down");
        peer.read_to_end();
        wait_until(words, || engine.server.take_complaints().iter().any(|line| line.contains(words)));
    }
    let mut peer = RawClient::greeted(&engine);
    peer.send(&ClientMessage::Abort(vec![foreign]));
    peer.read_to_end();
    wait_until("a foreign key", || {
        engine.server.take_complaints().iter().any(|line| line.contains("its own requests only"))
    });
    engine.wait_until_empty();
}

#[test]
fn a_key_is_free_again_when_its_request_has_ended() {
    let engine = Engine::start();
    let mut peer = RawClient::greeted(&engine);
    for _ in 0..3 {
        peer.send(&ClientMessage::AddRequests(vec![peer.request(1, 5)]));
        let mut has_ended = false;
        while !has_ended {
            let Some(EngineMessage::Outputs(outputs)) = peer.read() else { panic!("cut off") };
            has_ended = outputs.iter().any(|output| output.finish_reason.is_some());
        }
    }
}

#[test]
fn another_version_and_missing_capabilities_are_refused_with_numbers() {
    let engine = Engine::start();
    let say = |version: u16, capabilities: u64| {
        let mut peer = RawClient::silent(&engine);
        assert!(matches!(peer.read(), Some(EngineMessage::Challenge(_))));
        peer.send(&ClientMessage::Hello(Hello { version, capabilities, nonce: [0; 32], proof: None }));
        let answer = peer.read();
        assert_eq!(peer.read(), None, "closed");
        answer
    };
    let refusal = Refusal::Version { engine: PROTOCOL_VERSION, client: 77 };
    assert_eq!(say(77, 0), Some(EngineMessage::Rejected(refusal)));
    let refusal = Refusal::Capabilities { missing: 1 << 60 };
    assert_eq!(say(PROTOCOL_VERSION, 1 << 60 | 1), Some(EngineMessage::Rejected(refusal)));
    wait_until("both are counted", || engine.server.stats().num_refused == 2);
}

#[test]
fn a_silent_peer_is_cut_off_and_too_many_are_turned_away() {
    let engine = Engine::start_with(config(), Duration::ZERO, |options| {
        options.silence_timeout = Duration::from_millis(50);
        options.max_clients = 2;
    });
    let mut silent = RawClient::silent(&engine);
    silent.read_to_end();
    wait_until("a complaint", || {
        engine.server.take_complaints().iter().any(|line| line.contains("no answer within 0.05 s"))
    });
    let _first = RawClient::greeted(&engine);
    let second = RawClient::greeted(&engine);
    let mut third = RawClient::silent(&engine);
    assert!(matches!(third.read(), Some(EngineMessage::Challenge(_))));
    let hello = Hello { version: PROTOCOL_VERSION, capabilities: 0, nonce: [0; 32], proof: None };
    third.send(&ClientMessage::Hello(hello));
    let refusal = Refusal::TooManyClients { limit: 2 };
    assert_eq!(third.read(), Some(EngineMessage::Rejected(refusal)));
    drop(second);
    wait_until("there is room again", || engine.server.stats().num_clients == 1);
    let _fourth = RawClient::greeted(&engine);
}

/// Set `RUSTVLLM_CUT_CLIENTS=10000` for the long version.
#[test]
fn clients_cut_at_any_byte_leave_nothing_behind() {
    let count = std::env::var("RUSTVLLM_CUT_CLIENTS").ok().and_then(|value| value.parse().ok());
    let engine = Engine::start_with(config(), Duration::from_micros(100), |_| {});
    let mut rng = random();
    let mut resident_before = 0;
    for round in 0..count.unwrap_or(500) {
        if round == 200 {
            resident_before = resident_bytes();
        }
        let mut peer = RawClient::greeted(&engine);
        let mut bytes = Vec::new();
        for counter in 1..=3 {
            ClientMessage::AddRequests(vec![peer.request(counter, 16_000)]).encode(&mut bytes);
        }
        ClientMessage::Abort(vec![ipc::key_of(peer.index, 2)]).encode(&mut bytes);
        let cut = below(&mut rng, bytes.len() + 1);
        peer.stream.write_all(&bytes[..cut]).expect("written");
        if below(&mut rng, 2) == 0 && cut > 200 {
            let _ = peer.read();
        }
    }
    engine.wait_until_empty();
    wait_until("every client is forgotten", || engine.server.stats().num_clients == 0);
    let stats = engine.handle.stats();
    assert_eq!(stats.num_requests, stats.num_finished);
    assert_eq!((stats.num_running, stats.num_waiting), (0, 0));
    let tokens_per_request = stats.num_scheduled_tokens / stats.num_requests.max(1);
    assert!(tokens_per_request < 1000, "{tokens_per_request} tokens per request without a reader");
    let growth = resident_bytes().saturating_sub(resident_before);
    assert!(growth < 20 << 20, "{growth} bytes more than after 200 clients");
}

#[test]
fn a_reader_that_does_not_read_delays_no_other_client_and_is_bounded() {
    let limit = 64 << 10;
    let engine = Engine::start_with(config(), Duration::ZERO, |options| options.max_unsent_bytes = limit);
    let mut slow = RawClient::greeted(&engine);
    for counter in 1..=32 {
        slow.send(&ClientMessage::AddRequests(vec![slow.request(counter, 16_000)]));
    }
    wait_until("it has something to read", || engine.server.stats().num_bytes_sent > 0);
    let client = engine.client();
    let began = Instant::now();
    let quick = request(&client, "quick", 10, 500);
    client.add_requests(std::slice::from_ref(&quick)).expect("taken");
    assert_eq!(tokens_of(&collect(&client, 1), quick.key).len(), 500);
    assert!(began.elapsed() < PATIENCE / 2, "held up by a slow reader");
    // All its tokens are made, and wait: more than the system's buffers hold.
    wait_until("the engine is done", || engine.handle.stats().num_finished == 33);
    // Nothing more is taken from it.
    slow.stream.set_write_timeout(Some(Duration::from_secs(1))).expect("set");
    let mut pings = Vec::new();
    (0..10_000).for_each(|id| ClientMessage::Ping(id).encode(&mut pings));
    let mut refused = false;
    for _ in 0..200 {
        if slow.stream.write_all(&pings).is_err() {
            refused = true;
            break;
        }
    }
    assert!(refused, "the engine goes on reading from a client that does not read");
    // When it reads at last, everything is there, in order.
    let (mut ends, mut num_tokens) = (0, 0);
    while ends < 32 {
        if let Some(EngineMessage::Outputs(outputs)) = slow.read() {
            num_tokens += outputs.len();
            ends += outputs.iter().filter(|output| output.finish_reason.is_some()).count();
        }
    }
    assert_eq!(num_tokens, 32 * 16_000);
    engine.wait_until_empty();
}

#[test]
fn a_stopped_engine_does_not_wait_for_a_reader_that_does_not_read() {
    let mut engine = Engine::start();
    let mut slow = RawClient::greeted(&engine);
    for counter in 1..=32 {
        slow.send(&ClientMessage::AddRequests(vec![slow.request(counter, 16_000)]));
    }
    wait_until("tokens come", || engine.handle.stats().num_steps > 5000);
    let began = Instant::now();
    engine.server.stop();
    assert!(began.elapsed() < Duration::from_secs(2));
    engine.is_paused.store(false, Ordering::Relaxed);
}
