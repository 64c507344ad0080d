//! Ranks as threads: what each gets is the sum, or what all have, in the order of ranks, whichever is slow.

use std::{thread, time::Duration};

use half::bf16;
use step_channel::{Meeting, MeetingError};

const LONG: Duration = Duration::from_secs(60);
const SPIN: Duration = Duration::from_micros(20);

/// Do the same as every rank, each in a thread; what each answers, in order.
fn meet<R: Send>(num_ranks: usize, act: impl Fn(usize, &mut Meeting) -> R + Sync) -> Vec<R> {
    let mut first = Meeting::new(num_ranks, SPIN).expect("memory");
    let others: Vec<_> = (1..num_ranks)
        .map(|rank| {
            let fd = first.fd().try_clone_to_owned().expect("a descriptor");
            Meeting::join(fd, rank, SPIN).expect("a seat")
        })
        .collect();
    thread::scope(|scope| {
        let act = &act;
        let handles: Vec<_> = others
            .into_iter()
            .enumerate()
            .map(|(index, mut meeting)| scope.spawn(move || act(index + 1, &mut meeting)))
            .collect();
        let mut answers = vec![act(0, &mut first)];
        answers.extend(handles.into_iter().map(|handle| handle.join().expect("no rank panicked")));
        answers
    })
}

/// Numbers that no two ranks, rounds or places have in common, and whose sums depend on their order.
fn number(rank: usize, round: usize, place: usize) -> f32 {
    let mixed = (rank * 7919 + round * 104_729 + place * 31 + 1).wrapping_mul(2_654_435_761) % 1_000_003;
    (mixed as f32 - 500_000.0) * [1e-3, 1.0, 1e3][mixed % 3]
}

#[expect(clippy::disallowed_methods, reason = "a rank that is late is what is tested")]
fn rest(time: Duration) {
    thread::sleep(time);
}

/// A rank that is sometimes late, so that others sleep.
fn dawdle(rank: usize, round: usize) {
    if (round * 5 + rank * 3).is_multiple_of(7) {
        rest(Duration::from_micros(300));
    }
}

#[test]
fn sums_are_those_in_the_order_of_ranks_bit_for_bit() {
    // Lengths around a tile and a piece; 70 001 numbers of float32 are two pieces.
    let lengths = [0, 1, 7, 1023, 1024, 1025, 65_536, 65_537, 70_001];
    for num_ranks in 2..=4 {
        let sums = meet(num_ranks, |rank, meeting| {
            let mut found = Vec::new();
            for (round, length) in lengths.iter().cycle().take(3 * lengths.len()).enumerate() {
                dawdle(rank, round);
                let mut data: Vec<f32> = (0..*length).map(|place| number(rank, round, place)).collect();
                meeting.all_reduce(&mut data, LONG).expect("a sum");
                found.push(data);
            }
            found
        });
        for (round, length) in lengths.iter().cycle().take(3 * lengths.len()).enumerate() {
            let expected: Vec<f32> = (0..*length)
                .map(|place| {
                    (1..num_ranks).fold(number(0, round, place), |sum, rank| sum + number(rank, round, place))
                })
                .collect();
            for (rank, found) in sums.iter().enumerate() {
                let is_same = found[round].iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(
                    is_same && found[round].len() == *length,
                    "rank {rank} of {num_ranks}, round {round}"
                );
            }
        }
    }
}

#[test]
fn sums_of_bfloat16_are_rounded_once() {
    // In bfloat16 256 + 1 + 1 is 256, term by term; rounded once it is 258.
    let sums = meet(3, |rank, meeting| {
        let mut data = vec![bf16::from_f32(if rank == 0 { 256.0 } else { 1.0 }); 150_000];
        meeting.all_reduce(&mut data, LONG).expect("a sum");
        data
    });
    assert!(sums.iter().flatten().all(|sum| *sum == bf16::from_f32(258.0)));
}

#[test]
fn what_is_gathered_lies_in_the_order_of_ranks() {
    let num_bytes = (256 << 10) + 11;
    let part = |rank: usize, round: usize| -> Vec<u8> {
        (0..num_bytes).map(|place| (place * 3 + rank * 101 + round * 17) as u8).collect()
    };
    meet(3, |rank, meeting| {
        for round in 0..6 {
            dawdle(rank, round);
            let expected: Vec<u8> = (0..3).flat_map(|rank| part(rank, round)).collect();
            let mut out = vec![0; 3 * num_bytes];
            if round % 2 == 0 {
                meeting.all_gather(&part(rank, round), &mut out, LONG).expect("all parts");
                assert!(out == expected, "rank {rank}, round {round}");
            } else {
                let target = (rank == 0).then_some(&mut out[..]);
                meeting.gather(&part(rank, round), target, LONG).expect("all parts");
                assert!(rank != 0 || out == expected, "round {round}");
            }
        }
    });
}

/// The others run on for two pieces and are held then: nothing is laid over what the first has not read.
#[test]
fn ranks_that_only_give_wait_for_the_one_that_takes() {
    let found = meet(2, |rank, meeting| {
        let mut found = Vec::new();
        for round in 0..50_u8 {
            let mut out = [0; 2];
            if rank == 0 && round % 8 == 0 {
                rest(Duration::from_millis(1));
            }
            meeting
                .gather(&[round + 100 * rank as u8], (rank == 0).then_some(&mut out), LONG)
                .expect("bytes");
            found.push(out);
        }
        found
    });
    assert_eq!(found[0], (0..50).map(|round| [round, round + 100]).collect::<Vec<_>>());
}

#[test]
fn ranks_that_want_different_things_are_named() {
    let errors = meet(2, |rank, meeting| {
        let mut data = vec![1_f32; if rank == 0 { 3 } else { 4 }];
        meeting.all_reduce(&mut data, LONG).expect_err("lengths differ").to_string()
    });
    assert_eq!(errors[0], "rank 0 came to an all_reduce of 12 bytes, rank 1 to an all_reduce of 16");
    assert_eq!(errors[1], "rank 1 came to an all_reduce of 16 bytes, rank 0 to an all_reduce of 12");
    let errors = meet(2, |rank, meeting| {
        let (own, mut out) = ([0; 4], [0; 8]);
        match rank {
            0 => meeting.all_reduce(&mut [0_f32], LONG),
            _ => meeting.all_gather(&own, &mut out, LONG),
        }
        .expect_err("they want different things")
        .to_string()
    });
    assert_eq!(errors[0], "rank 0 came to an all_reduce of 4 bytes, rank 1 to an all_gather of 4");
}

#[test]
fn a_rank_that_does_not_come_is_named_and_an_end_ends_every_wait() {
    let mut first = Meeting::new(3, SPIN).expect("memory");
    let error = first.all_reduce(&mut [1_f32], Duration::from_millis(30)).expect_err("alone");
    assert_eq!(error.to_string(), "rank 1 has not come to an all_reduce within 0.0 s");
    let (end, fd) = (first.end(), first.fd().try_clone_to_owned().expect("a descriptor"));
    let mut second = Meeting::join(fd, 1, SPIN).expect("a seat");
    thread::scope(|scope| {
        let waits = scope.spawn(move || second.all_reduce(&mut [1_f32], LONG));
        rest(Duration::from_millis(20));
        end.give_up();
        assert!(matches!(waits.join().expect("no panic"), Err(MeetingError::GivenUp)));
    });
    assert!(matches!(first.all_reduce(&mut [1_f32], LONG), Err(MeetingError::GivenUp)));
}

#[test]
fn what_is_no_meeting_and_a_seat_that_is_not_there_are_refused() {
    let first = Meeting::new(2, SPIN).expect("memory");
    let fd = || first.fd().try_clone_to_owned().expect("a descriptor");
    let error = Meeting::join(fd(), 2, SPIN).expect_err("two ranks");
    assert_eq!(error.to_string(), "the meeting has 2 ranks, so 2 is not one of them: 0 to 1 are");
    let file = std::fs::File::open("/dev/null").expect("it is there");
    assert!(matches!(Meeting::join(file.into(), 1, SPIN), Err(MeetingError::NoMeeting)));
    let mut first = Meeting::new(2, SPIN).expect("memory");
    let error = first.gather(&[1, 2], Some(&mut [0; 3]), LONG).expect_err("too little room");
    assert_eq!(error.to_string(), "2 ranks with 2 bytes each fill 4, but there are 3");
}
