//! Both ends in one process: every frame arrives whole and in turn, whichever is slow; what is wrong is refused by name.

use std::{
    convert::Infallible,
    os::fd::OwnedFd,
    ptr::NonNull,
    thread,
    time::{Duration, Instant},
};

use scheduler::{SchedulerOutput, step_buffers::SAMPLING_INT_COLUMNS};
use step_channel::{FrameError, NUM_SLOTS, ReadError, Reader, StepArrays, StepFrame, WriteError, Writer};

const LONG: Duration = Duration::from_secs(60);
const STEP: u32 = 5;
const MOST: usize = 40;

/// The same numbers on every machine (`SplitMix64`).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: u64) -> u32 {
        (self.next() % end) as u32
    }
}

/// Arrays of one set that own their memory.
struct Owned {
    memory: Vec<Vec<u64>>,
    arrays: StepArrays,
}

impl Owned {
    fn new(num_elements: usize) -> Self {
        let mut memory = Vec::new();
        // SAFETY: each place is the heap memory of a Vec that is kept with the addresses and never grows; a test
        // touches it in one thread.
        let arrays = unsafe {
            StepArrays::new(|name| {
                let wide = name == "sampling_int";
                let count = if wide { num_elements * SAMPLING_INT_COLUMNS.len() } else { 2 * num_elements };
                let mut words = vec![0_u64; count];
                let start = NonNull::new(words.as_mut_ptr().cast::<u8>()).expect("a place");
                memory.push(words);
                Ok::<_, Infallible>((start, if wide { 8 } else { 4 }, count))
            })
        };
        Self { memory, arrays: arrays.expect("nothing fails") }
    }

    fn set(&mut self, name: &str, index: usize, value: i32) {
        let words = &mut self.memory[place(name)];
        let shift = 32 * (index % 2);
        words[index / 2] = words[index / 2] & !(0xFFFF_FFFF << shift) | u64::from(value as u32) << shift;
    }

    fn part(&self, name: &str, len: usize) -> Vec<i32> {
        let words = &self.memory[place(name)];
        (0..len).map(|index| (words[index / 2] >> (32 * (index % 2))) as i32).collect()
    }
}

fn place(name: &str) -> usize {
    StepArrays::NAMES.iter().position(|each| *each == name).expect("an array of a step")
}

fn pair(num_readers: usize) -> (Writer, Vec<Reader>) {
    let writer = Writer::new(num_readers).expect("memory");
    let readers =
        (1..=num_readers).map(|rank| Reader::new(descriptor(&writer), rank).expect("a reader")).collect();
    (writer, readers)
}

fn descriptor(writer: &Writer) -> OwnedFd {
    writer.fd().try_clone_to_owned().expect("a descriptor")
}

/// A step of random sizes, its arrays filled with random numbers.
fn random_step(random: &mut Random, number: u64, owned: &mut Owned) -> StepFrame {
    let most = MOST as u64;
    let (reqs, updates) = (random.below(most - 1), random.below(most / 2));
    for words in &mut owned.memory {
        words.fill_with(|| random.next());
    }
    let mut end = 0;
    for index in 0..=updates as usize {
        owned.set("bt_indptr", index, end);
        end += random.below(2) as i32;
    }
    StepFrame {
        output: SchedulerOutput {
            step: number,
            num_reqs: reqs,
            total_num_scheduled_tokens: random.below(most),
            max_seq_len: random.below(most),
            num_sampled: random.below(most),
            num_logits: random.below(most),
            num_new_reqs: random.below(most),
            num_block_table_updates: updates,
            num_finished: random.below(most),
            num_swap_out: random.below(most),
            num_copies: random.below(most),
            ..SchedulerOutput::default()
        },
        graph_size: random.below(9),
    }
}

#[test]
fn every_reader_gets_every_step_as_it_was_planned() {
    let seed = std::env::var("RUSTVLLM_TEST_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(7);
    println!("seed {seed}");
    let (mut writer, readers) = pair(3);
    let num_steps = 500;
    let threads: Vec<_> = readers
        .into_iter()
        .enumerate()
        .map(|(index, mut reader)| {
            thread::spawn(move || {
                let mut own = Owned::new(MOST);
                let mut planned = Owned::new(MOST);
                let mut random = Random(seed);
                let mut pace = Random(index as u64);
                for number in 1..=num_steps {
                    let wanted = random_step(&mut random, number, &mut planned);
                    assert!(reader.wait(Some(LONG)).is_some(), "step {number} did not come");
                    let words = reader.frame().expect("a whole frame").words.to_vec();
                    let got = StepFrame::read(&words, |_| Some(&mut own.arrays)).expect("it fits");
                    reader.take();
                    assert_eq!(got, wanted, "step {number}");
                    let output = got.output;
                    let updates = output.num_block_table_updates as usize;
                    let block_ids = planned.part("bt_indptr", updates + 1)[updates] as usize;
                    for (name, len) in [
                        ("idx_mapping", output.num_reqs as usize),
                        ("input_ids", output.total_num_scheduled_tokens as usize),
                        ("sampled_rows", output.num_sampled as usize),
                        ("bt_block_ids", if updates == 0 { 0 } else { block_ids }),
                        ("blocks_to_swap_out", 2 * output.num_swap_out as usize),
                        ("blocks_to_copy", 2 * output.num_copies as usize),
                    ] {
                        assert_eq!(own.part(name, len), planned.part(name, len), "{name} of step {number}");
                    }
                    let rows = output.num_new_reqs as usize * SAMPLING_INT_COLUMNS.len();
                    assert_eq!(
                        own.memory[place("sampling_int")][..rows],
                        planned.memory[place("sampling_int")][..rows]
                    );
                    for _ in 0..pace.below(2000) {
                        std::hint::spin_loop();
                    }
                    reader.finish(number);
                }
            })
        })
        .collect();
    let mut random = Random(seed);
    let mut planned = Owned::new(MOST);
    writer.make_room(&planned.arrays).expect("memory");
    for number in 1..=num_steps {
        let step = random_step(&mut random, number, &mut planned);
        writer.publish_step(STEP, &step, &planned.arrays, LONG).expect("it is published");
    }
    writer.wait_done(writer.number(), LONG).expect("all are done");
    assert!(writer.watch().lines().iter().all(|line| line.value == num_steps && !line.failed));
    for thread in threads {
        thread.join().expect("no reader failed");
    }
}

#[test]
fn a_slot_that_is_not_taken_is_not_written_and_the_late_rank_is_named() {
    let (mut writer, mut readers) = pair(2);
    for number in 1..=NUM_SLOTS {
        assert_eq!(writer.publish(1, &[u64::from(number)], LONG).expect("room"), number);
    }
    for _ in 0..NUM_SLOTS {
        readers[0].take();
    }
    let late = writer.publish(1, &[99], Duration::from_millis(30)).expect_err("rank 2 took nothing");
    let next = NUM_SLOTS + 1;
    assert!(late.to_string().contains(&format!("rank 2 has not taken frame {next} within 0.0 s")), "{late}");
    assert_eq!(readers[1].frame().expect("it is whole").words, [1]);
    readers[1].take();
    assert_eq!(writer.publish(1, &[u64::from(next)], LONG).expect("room"), next);
    assert!(writer.blocked() >= Duration::from_millis(30));
    let words: Vec<u64> = (2..=next)
        .map(|_| {
            let word = readers[1].frame().expect("it is whole").words[0];
            readers[1].take();
            word
        })
        .collect();
    assert!(words.iter().copied().eq(2..=u64::from(next)));
}

#[test]
fn what_is_given_up_waits_no_more() {
    let (writer, _readers) = pair(1);
    let mut writer = writer;
    let number = writer.publish(1, &[], LONG).expect("room");
    let watch = writer.watch();
    let began = Instant::now();
    let ender = thread::spawn(move || watch.give_up());
    assert!(matches!(writer.wait_done(number, LONG), Err(WriteError::GivenUp)));
    assert!(began.elapsed() < LONG);
    ender.join().expect("it ends");
}

#[test]
fn a_reader_hears_of_the_end_and_of_no_frame() {
    let (writer, mut readers) = pair(1);
    assert_eq!(readers[0].wait(Some(Duration::from_millis(1))), None);
    assert!(matches!(
        readers[0].frame(),
        Err(ReadError::Frame(FrameError::Overwritten { wanted: 1, got: 0 }))
    ));
    drop(writer);
    assert_eq!(readers[0].wait(Some(LONG)), None);
    assert!(readers[0].is_closed());
}

#[test]
fn what_a_reader_waits_in_is_seen_and_counted() {
    let (writer, readers) = pair(2);
    readers[1].note_activity(2);
    let line = writer.watch().lines()[1];
    assert_eq!((line.activity, line.activities), (2, 0));
    assert!(line.since_ns > 0);
    readers[1].note_activity(0);
    let line = writer.watch().lines()[1];
    assert_eq!((line.activity, line.activities), (0, 1));
    readers[0].fail();
    assert!(writer.watch().lines()[0].failed);
}

#[test]
fn a_step_that_does_not_fit_is_refused_on_either_side() {
    let (mut writer, mut readers) = pair(1);
    let (mut large, mut small) = (Owned::new(MOST), Owned::new(2));
    writer.make_room(&large.arrays).expect("memory");
    let mut step = StepFrame { output: SchedulerOutput::default(), graph_size: 0 };
    step.output.num_reqs = 1000;
    let error = writer.publish_step(STEP, &step, &large.arrays, LONG).expect_err("no room");
    assert_eq!(error.to_string(), "idx_mapping of the step has 1000 elements, but this rank has room for 80");
    step.output.num_reqs = 10;
    writer.publish_step(STEP, &step, &large.arrays, LONG).expect("it fits");
    let words = readers[0].frame().expect("it is whole").words;
    let error = StepFrame::read(words, |_| Some(&mut small.arrays)).expect_err("too small");
    assert_eq!(error, FrameError::Extent { name: "idx_mapping", got: 10, room: 4 });
    assert!(matches!(StepFrame::read(words, |_| None), Err(FrameError::Extent { name: "buffer_index", .. })));
    for len in 0..words.len() {
        assert!(matches!(
            StepFrame::read(&words[..len], |_| Some(&mut large.arrays)),
            Err(FrameError::Short { .. })
        ));
    }
}

#[test]
fn a_descriptor_of_something_else_is_refused() {
    let (writer, _) = pair(1);
    assert!(matches!(
        Reader::new(descriptor(&writer), 2),
        Err(ReadError::NoLine { rank: 2, num_readers: 1 })
    ));
    assert!(matches!(Reader::new(descriptor(&writer), 0), Err(ReadError::NoLine { .. })));
    let file = std::fs::File::open("/dev/null").expect("there is one");
    assert!(matches!(Reader::new(file.into(), 1), Err(ReadError::NoChannel)));
}
