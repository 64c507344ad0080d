//! A model that is nothing but its cache, and a reference that is nothing but its definition.
//!
//! `FakeModel` keeps one value per slot. Running a token at a position writes a value made of the token and
//! of the value *read through the block table* at the position before; a sampled token is made of the value
//! at the last position. So every wrong block, stale slot or missing copy changes the tokens. Slots that
//! were never written, or whose block was handed to somebody else, are poisoned, and reading one panics.
//! `reference_tokens` computes the same tokens from the definition, one request at a time, with no cache.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::collections::HashMap;

use scheduler::{NewRequest, SamplingParams, Scheduler, SchedulerConfig, SchedulerOutput, StepBuffers};

/// A small, fast, good enough generator (splitmix64), so that a seed names a run for ever.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number in `low..=high`.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        low + (self.next() % u64::from(high - low + 1)) as u32
    }

    pub fn chance(&mut self, percent: u32) -> bool {
        self.between(1, 100) <= percent
    }
}

pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn value_of(previous: u64, token_id: i32, position: i32) -> u64 {
    mix(previous ^ mix((token_id as u64) << 32 | position as u64))
}

fn token_of(value: u64, vocabulary: u64) -> i32 {
    (mix(value ^ 0x5EED) % vocabulary) as i32
}

/// Output of one request by the definition. `vocabulary` is the number of token ids.
pub fn reference_tokens(
    prompt: &[i32],
    params: &SamplingParams,
    max_model_len: u32,
    vocabulary: u64,
) -> Vec<i32> {
    let mut value = 0;
    for (position, &token_id) in prompt.iter().enumerate() {
        value = value_of(value, token_id, position as i32);
    }
    let mut output = Vec::new();
    while (output.len() as u32) < params.max_tokens && ((prompt.len() + output.len()) as u32) < max_model_len
    {
        let token_id = token_of(value, vocabulary);
        value = value_of(value, token_id, (prompt.len() + output.len()) as i32);
        output.push(token_id);
        if params.eos_token_id == Some(token_id) || params.stop_token_ids.contains(&token_id) {
            break;
        }
    }
    output
}

/// The worker's side: persistent rows, fed by the step arrays alone.
pub struct FakeModel {
    block_size: i32,
    vocabulary: u64,
    slots: Vec<Option<u64>>,
    tables: HashMap<i32, Vec<i32>>,
}

impl FakeModel {
    pub fn new(config: &SchedulerConfig, vocabulary: u64) -> Self {
        let num_slots = config.num_blocks * config.block_size;
        Self {
            block_size: config.block_size as i32,
            vocabulary,
            slots: vec![None; num_slots as usize],
            tables: HashMap::new(),
        }
    }

    /// Block table of a row, as the deltas made it.
    pub fn block_table(&self, row: u32) -> Vec<u32> {
        self.tables
            .get(&(row as i32))
            .map_or(Vec::new(), |table| table.iter().map(|&block| block as u32).collect())
    }

    fn slot(&self, row: i32, position: i32) -> usize {
        let block = self.tables[&row][(position / self.block_size) as usize];
        (block * self.block_size + position % self.block_size) as usize
    }

    /// Learn of a step that is never run: rows and tables change, no slot is written.
    pub fn skip(&mut self, output: &SchedulerOutput, arrays: &StepBuffers) -> Vec<i32> {
        self.apply(output, arrays);
        self.poison_new_slots(output, arrays);
        vec![-1; output.num_sampled as usize]
    }

    fn apply(&mut self, output: &SchedulerOutput, arrays: &StepBuffers) {
        for index in 0..output.num_finished as usize {
            self.tables.remove(&arrays.finished_rows.read(index));
        }
        for index in 0..output.num_preempted as usize {
            self.tables.remove(&arrays.preempted_rows.read(index));
        }
        for index in 0..output.num_new_reqs as usize {
            self.tables.insert(arrays.new_rows.read(index), Vec::new());
        }
        for index in 0..output.num_block_table_updates as usize {
            let row = arrays.bt_rows.read(index);
            let (from, to) = (arrays.bt_indptr.read(index), arrays.bt_indptr.read(index + 1));
            let table = self.tables.get_mut(&row).expect("a difference names a known row");
            assert_eq!(table.len() as i32, arrays.bt_starts.read(index), "tables are append-only");
            table.extend((from..to).map(|i| arrays.bt_block_ids.read(i as usize)));
        }
    }

    /// Run one step from its arrays; returns one token per sampled row.
    pub fn execute(&mut self, output: &SchedulerOutput, arrays: &StepBuffers) -> Vec<i32> {
        self.apply(output, arrays);
        let num_reqs = output.num_reqs as usize;
        self.poison_new_slots(output, arrays);
        let mut last_values = HashMap::new();
        for index in 0..num_reqs {
            let row = arrays.idx_mapping.read(index);
            let first = arrays.query_start_loc.read(index);
            let computed = arrays.num_computed_tokens.read(index);
            assert_eq!(
                arrays.query_start_loc.read(index + 1) - first,
                arrays.num_scheduled_tokens.read(index),
                "query_start_loc and num_scheduled_tokens agree"
            );
            for offset in 0..arrays.num_scheduled_tokens.read(index) {
                let token = (first + offset) as usize;
                let position = arrays.positions.read(token);
                assert_eq!(position, computed + offset, "positions follow num_computed_tokens");
                let slot = self.slot(row, position);
                assert_eq!(
                    slot as i32,
                    arrays.slot_mapping.read(token),
                    "slot_mapping and block table agree"
                );
                let previous = if position == 0 { 0 } else { self.read(row, position - 1) };
                let value = value_of(previous, arrays.input_ids.read(token), position);
                self.slots[slot] = Some(value);
                last_values.insert(token as i32, value);
            }
            let end = computed + arrays.num_scheduled_tokens.read(index);
            assert_eq!(arrays.seq_lens.read(index), end, "seq_lens is computed + scheduled");
            // Attention reads the whole context: every slot must hold something.
            for position in 0..end {
                self.read(row, position);
            }
        }
        let sampled = 0..output.num_sampled as usize;
        sampled.map(|i| token_of(last_values[&arrays.logits_indices.read(i)], self.vocabulary)).collect()
    }

    fn read(&self, row: i32, position: i32) -> u64 {
        let slot = self.slot(row, position);
        self.slots[slot]
            .unwrap_or_else(|| panic!("row {row} reads poisoned slot {slot} at position {position}"))
    }

    /// What a request gets beyond its computed tokens is not its own yet. A block that another row of the
    /// step fills is shared below `num_computed_tokens` of the sharer, so it is not touched here twice.
    fn poison_new_slots(&mut self, output: &SchedulerOutput, arrays: &StepBuffers) {
        let computed: HashMap<i32, i32> = (0..output.num_reqs as usize)
            .map(|index| (arrays.idx_mapping.read(index), arrays.num_computed_tokens.read(index)))
            .collect();
        for index in 0..output.num_block_table_updates as usize {
            let row = arrays.bt_rows.read(index);
            let start = arrays.bt_starts.read(index) * self.block_size;
            let end = self.tables[&row].len() as i32 * self.block_size;
            for position in start.max(computed[&row])..end {
                let slot = self.slot(row, position);
                self.slots[slot] = None;
            }
        }
    }
}

/// A scheduler with `num_sets` buffer sets of its own memory.
pub fn scheduler(config: &SchedulerConfig, num_sets: usize) -> Scheduler {
    let buffers = (0..num_sets).map(|_| StepBuffers::owned(config)).collect();
    Scheduler::new(config.clone(), buffers).expect("a valid configuration")
}

/// A greedy request that nothing but `max_tokens` stops.
pub fn request(scheduler: &Scheduler, id: &str, prompt: Vec<i32>, max_tokens: u32) -> NewRequest {
    NewRequest {
        key: scheduler.handle().new_key(),
        request_id: id.into(),
        prompt_token_ids: prompt,
        params: SamplingParams { max_tokens, ..SamplingParams::default() },
        priority: 0,
        extra_keys: Box::new([]),
        skip_reading_prefix_cache: false,
    }
}
