//! Two nodes in one process, over the loopback: what the head publishes comes to the ranks of the other node whole and in
//! turn, their answers come back, and an end on either side is known on the other.

use std::{
    net::{TcpListener, TcpStream},
    os::fd::OwnedFd,
    thread,
    time::{Duration, Instant},
};

use step_channel::{NodeLink, Reader, Received, WriteError, Writer};

const LONG: Duration = Duration::from_secs(60);
const COMMAND: u32 = 7;

fn links() -> (NodeLink, NodeLink) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let node = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    let (head, _) = listener.accept().expect("a connection");
    (NodeLink::new(head).expect("a link"), NodeLink::new(node).expect("a link"))
}

/// A reader that answers every frame with the sum of its words, until the channel is closed; how many there were.
fn answer(fd: OwnedFd, rank: usize) -> thread::JoinHandle<u32> {
    thread::spawn(move || {
        let mut reader = Reader::new(fd, rank).expect("a reader");
        let mut frames = 0;
        loop {
            if reader.wait(Some(Duration::from_millis(100))).is_none() {
                if reader.is_closed() {
                    return frames;
                }
                continue;
            }
            let frame = reader.frame().expect("it is whole");
            assert_eq!((frame.number, frame.command), (frames + 1, COMMAND));
            let sum = frame.words.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word));
            reader.take();
            frames += 1;
            reader.finish(sum);
        }
    })
}

/// Rank 1 at the head, ranks 2 and 3 at a node.
fn group() -> (Writer, NodeLink, NodeLink, Vec<thread::JoinHandle<u32>>) {
    let (head, node) = links();
    let mut writer = Writer::new(3).expect("memory");
    head.lead(&mut writer, 2, 2);
    let (fd, _) = node.follow(2).expect("a channel");
    let readers = vec![
        answer(writer.fd().try_clone_to_owned().expect("a descriptor"), 1),
        answer(fd.try_clone().expect("a descriptor"), 1),
        answer(fd, 2),
    ];
    (writer, head, node, readers)
}

#[test]
fn every_rank_of_both_nodes_gets_every_frame_and_its_answer_comes_back() {
    let (mut writer, head, _node, readers) = group();
    for round in 0..500_u64 {
        let words: Vec<u64> = (0..round % 97).map(|index| index * round).collect();
        let number = writer.publish(COMMAND, &words, LONG).expect("published");
        writer.wait_done(number, LONG).expect("done");
        let expected: u64 = words.iter().sum();
        for line in writer.watch().lines() {
            assert_eq!((line.taken, line.done, line.value), (number, number, expected));
        }
    }
    // No answer is waited for: the slots alone hold the head back.
    for round in 0..500_u64 {
        writer.publish(COMMAND, &vec![round; 300], LONG).expect("published");
    }
    writer.wait_done(1000, LONG).expect("done");
    writer.watch().close();
    head.close();
    for reader in readers {
        assert_eq!(reader.join().expect("no panic"), 1000);
    }
}

#[test]
fn texts_go_both_ways_between_frames() {
    let (mut writer, head, node, readers) = group();
    let long = "ä".repeat(300_000);
    for round in 0..20 {
        head.send(&format!("order {round}")).expect("sent");
        writer.publish(COMMAND, &[round], LONG).expect("published");
        node.send(&long).expect("sent");
        assert_eq!(node.receive(LONG), Received::Text(format!("order {round}")));
        assert_eq!(head.receive(LONG), Received::Text(long.clone()));
    }
    assert_eq!(node.receive(Duration::ZERO), Received::Nothing);
    writer.wait_done(20, LONG).expect("done");
    writer.watch().close();
    head.close();
    assert!(matches!(node.receive(LONG), Received::Ended(_)));
    for reader in readers {
        assert_eq!(reader.join().expect("no panic"), 20);
    }
}

#[test]
fn a_node_that_ends_is_known_at_once_and_ends_the_wait_of_the_head() {
    let (mut writer, head, node, readers) = group();
    let number = writer.publish(COMMAND, &[1], LONG).expect("published");
    writer.wait_done(number, LONG).expect("done");
    let began = Instant::now();
    drop(node);
    let Received::Ended(why) = head.receive(LONG) else { panic!("the head hears nothing") };
    assert!(began.elapsed() < Duration::from_secs(2), "{why}");
    writer.watch().give_up();
    let mut late = None;
    for _ in 0..20 {
        if let Err(error) = writer.publish(COMMAND, &[2], LONG) {
            late = Some(error);
            break;
        }
    }
    assert!(matches!(late, Some(WriteError::Node { first: 2, .. } | WriteError::GivenUp)), "{late:?}");
    writer.watch().close();
    for reader in readers {
        reader.join().expect("the channel of each was closed");
    }
}

#[test]
fn a_head_that_ends_closes_the_channel_of_the_node() {
    let (writer, head, node, readers) = group();
    drop(head);
    assert!(matches!(node.receive(LONG), Received::Ended(_)));
    drop(writer);
    for reader in readers {
        assert_eq!(reader.join().expect("no panic"), 0);
    }
}

#[test]
fn a_rank_of_a_node_that_is_late_is_named() {
    let (head, node) = links();
    let mut writer = Writer::new(2).expect("memory");
    head.lead(&mut writer, 1, 2);
    let (fd, _) = node.follow(2).expect("a channel");
    let first = answer(fd.try_clone().expect("a descriptor"), 1);
    let number = writer.publish(COMMAND, &[], LONG).expect("published");
    let late = writer.wait_done(number, Duration::from_millis(200));
    assert!(matches!(late, Err(WriteError::Late { rank: 2, number: 1, .. })), "{late:?}");
    drop((writer, head, node));
    assert_eq!(first.join().expect("no panic"), 1);
}
