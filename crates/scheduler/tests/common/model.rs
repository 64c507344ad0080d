//! `FakeModel`: a model that is nothing but its cache.
//!
//! It keeps one value per slot. Running a token at a position writes a value made of the token and of the value *read
//! through the block table* at the position before; a sampled token is made of the value at the last position. So every
//! wrong block, stale slot or missing copy changes the tokens. Slots that were never written, whose block was handed to
//! another request, or that hold a draft which was not accepted, are poisoned, and reading one panics.
//!
//! It stands where the worker stands: all that it knows comes from the arrays of the steps, which it may run later than
//! they were planned, and ids that the host did not know are those that it has sampled or drafted itself.

use std::collections::{HashMap, HashSet};

use scheduler::{
    SchedulerConfig, SchedulerOutput, StepBuffers, UNKNOWN_TOKEN, step_buffers::SAMPLING_INT_COLUMNS,
};

use super::{Random, token_of, value_of};

/// Block tables by row, as the differences of the steps make them, and the rows of beams.
#[derive(Default)]
pub struct BlockTables(HashMap<i32, Vec<i32>>, HashSet<i32>);

impl BlockTables {
    /// Apply what a step changes; returns the rows that are new.
    pub fn apply(&mut self, output: &SchedulerOutput, arrays: &StepBuffers) -> Vec<i32> {
        for index in 0..output.num_finished as usize {
            self.0.remove(&arrays.finished_rows.read(index));
        }
        for index in 0..output.num_preempted as usize {
            self.0.remove(&arrays.preempted_rows.read(index));
        }
        let new_rows = arrays.new_rows.to_vec(output.num_new_reqs as usize);
        let column =
            SAMPLING_INT_COLUMNS.iter().position(|&name| name == "beam_width").expect("a beam width");
        for (index, &row) in new_rows.iter().enumerate() {
            self.0.insert(row, Vec::new());
            self.1.remove(&row);
            if arrays.sampling_int.read(index * SAMPLING_INT_COLUMNS.len() + column) > 0 {
                self.1.insert(row);
            }
        }
        for index in 0..output.num_block_table_updates as usize {
            let row = arrays.bt_rows.read(index);
            let (from, to) = (arrays.bt_indptr.read(index), arrays.bt_indptr.read(index + 1));
            let table = self.0.get_mut(&row).expect("a difference names a known row");
            let start = arrays.bt_starts.read(index) as usize;
            if self.1.contains(&row) {
                assert!(start <= table.len(), "a table has no gap");
                table.truncate(start); // a beam takes over another's blocks
            }
            assert_eq!(table.len(), start, "tables of others are append-only");
            table.extend((from..to).map(|i| arrays.bt_block_ids.read(i as usize)));
        }
        new_rows
    }

    /// Block table of a row.
    pub fn of_row(&self, row: u32) -> Vec<u32> {
        let table = self.0.get(&(row as i32));
        table.map_or(Vec::new(), |table| table.iter().map(|&block| block as u32).collect())
    }
}

/// What the worker remembers of a row in addition to its blocks.
#[derive(Clone, Default)]
struct Row {
    seed: i64,
    /// Tokens with a value in the cache: what the host believes, less the drafts it does not know to be rejected.
    num_computed_tokens: i32,
    last_sampled: i32,
    /// Ids that its last step gave: accepted drafts and one more.
    num_sampled: i32,
    /// Drafts of its own, for the next step.
    drafts: Vec<i32>,
}

/// See the module docs.
pub struct FakeModel {
    block_size: i32,
    vocabulary: u64,
    num_speculative_tokens: u32,
    steps_overlap: bool,
    slots: Vec<Option<u64>>,
    cpu_slots: Vec<Option<u64>>,
    tables: BlockTables,
    rows: HashMap<i32, Row>,
    random: Random,
    /// What the cache holds at the last position of each row that the last step has sampled, drafts apart.
    pub last_values: Vec<u64>,
}

impl FakeModel {
    pub fn new(config: &SchedulerConfig, vocabulary: u64) -> Self {
        Self {
            block_size: config.block_size as i32,
            vocabulary,
            num_speculative_tokens: config.num_speculative_tokens,
            steps_overlap: config.max_steps_in_flight > 1,
            slots: vec![None; (config.num_blocks * config.block_size) as usize],
            cpu_slots: vec![None; (config.num_cpu_blocks * config.block_size) as usize],
            tables: BlockTables::default(),
            rows: HashMap::new(),
            random: Random(7),
            last_values: Vec::new(),
        }
    }

    /// Learn of a step that is never run: rows and tables change, nothing is copied and no slot is written.
    pub fn skip(&mut self, output: &SchedulerOutput, arrays: &StepBuffers) {
        self.learn(output, arrays);
        self.poison_new_slots(output, arrays);
    }

    /// The tokens of a row of the last step are not drawn: what the first was made of is computed once more.
    pub fn take_back(&mut self, row: u32) {
        if let Some(row) = self.rows.get_mut(&(row as i32)) {
            row.num_computed_tokens -= row.num_sampled;
        }
    }

    /// Run one step from its arrays; returns a row of ids per sampled request, each of `1 + num_speculative_tokens`,
    /// with −1 behind those that count.
    pub fn execute(&mut self, output: &SchedulerOutput, arrays: &StepBuffers) -> Vec<i32> {
        self.learn(output, arrays);
        self.copy(output, arrays);
        self.poison_new_slots(output, arrays);
        let num_columns = 1 + self.num_speculative_tokens as usize;
        let mut sampled = Vec::new();
        self.last_values.clear();
        let mut logit = 0;
        for index in 0..output.num_reqs as usize {
            let values = self.run_row(index, arrays);
            let row_number = arrays.idx_mapping.read(index);
            let is_sampled = arrays.sampled_rows.to_vec(output.num_sampled as usize).contains(&row_number);
            let num_drafts = self.num_drafts(index, arrays);
            let last = arrays.query_start_loc.read(index + 1) - 1;
            if !is_sampled {
                assert_eq!(num_drafts, 0, "drafts without a sampled token");
                continue;
            }
            for back in (0..=num_drafts as i32).rev() {
                assert_eq!(
                    arrays.logits_indices.read(logit),
                    last - back,
                    "a row of logits per id to be checked"
                );
                logit += 1;
            }
            self.last_values.push(values[values.len() - 1 - num_drafts]);
            let ids = self.sample(row_number, &values, num_drafts);
            sampled.extend((0..num_columns).map(|column| ids.get(column).copied().unwrap_or(-1)));
        }
        assert_eq!(logit, output.num_logits as usize, "no other rows of logits");
        sampled
    }

    fn num_drafts(&self, index: usize, arrays: &StepBuffers) -> usize {
        if self.num_speculative_tokens == 0 { 0 } else { arrays.num_draft_tokens.read(index) as usize }
    }

    fn learn(&mut self, output: &SchedulerOutput, arrays: &StepBuffers) {
        let seed_column = SAMPLING_INT_COLUMNS.iter().position(|&name| name == "seed").expect("a seed");
        for (index, row) in self.tables.apply(output, arrays).into_iter().enumerate() {
            let seed = arrays.sampling_int.read(index * SAMPLING_INT_COLUMNS.len() + seed_column);
            self.rows.insert(row, Row { seed, num_computed_tokens: -1, ..Row::default() });
        }
        for index in 0..output.num_reqs as usize {
            let row = self.rows.get_mut(&arrays.idx_mapping.read(index)).expect("a known row");
            if row.num_computed_tokens < 0 {
                row.num_computed_tokens = arrays.num_computed_tokens.read(index);
            }
        }
    }

    /// Out, then in, then from block to block.
    fn copy(&mut self, output: &SchedulerOutput, arrays: &StepBuffers) {
        let size = self.block_size as usize;
        let pair = |column: &scheduler::step_buffers::Column<i32>, index: usize| {
            (column.read(2 * index) as usize * size, column.read(2 * index + 1) as usize * size)
        };
        for index in 0..output.num_swap_out as usize {
            let (from, to) = pair(&arrays.blocks_to_swap_out, index);
            self.cpu_slots[to..to + size].copy_from_slice(&self.slots[from..from + size]);
        }
        for index in 0..output.num_swap_in as usize {
            let (from, to) = pair(&arrays.blocks_to_swap_in, index);
            self.slots[to..to + size].copy_from_slice(&self.cpu_slots[from..from + size]);
            // It was given up.
            self.cpu_slots[from..from + size].fill(None);
        }
        let in_step: HashSet<i32> = (0..output.num_reqs as usize)
            .flat_map(|index| self.tables.0[&arrays.idx_mapping.read(index)].iter().copied())
            .collect();
        let mut written = HashSet::new();
        for index in 0..output.num_copies as usize {
            let (from, to) = pair(&arrays.blocks_to_copy, index);
            let block = (to / size) as i32;
            assert!(
                written.insert(block),
                "block {block} is copied to twice: a device may do that in any order"
            );
            assert!(
                in_step.contains(&block),
                "block {block} is copied to for a request that is not in the step"
            );
            self.slots.copy_within(from..from + size, to);
        }
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
            let end = self.tables.0[&row].len() as i32 * self.block_size;
            for position in start.max(computed[&row])..end {
                let slot = self.slot(row, position);
                self.slots[slot] = None;
            }
        }
    }

    /// Run the tokens of one request; returns their values.
    fn run_row(&mut self, index: usize, arrays: &StepBuffers) -> Vec<u64> {
        let row_number = arrays.idx_mapping.read(index);
        let row = self.rows[&row_number].clone();
        let (first, num_tokens) =
            (arrays.query_start_loc.read(index), arrays.num_scheduled_tokens.read(index));
        let believed = arrays.num_computed_tokens.read(index);
        let num_drafts = self.num_drafts(index, arrays) as i32;
        assert_eq!(arrays.query_start_loc.read(index + 1) - first, num_tokens, "the two counts agree");
        assert_eq!(arrays.seq_lens.read(index), believed + num_tokens, "seq_lens is computed + scheduled");
        let may_differ = self.steps_overlap && self.num_speculative_tokens > 0;
        assert!(
            believed == row.num_computed_tokens || (may_differ && believed > row.num_computed_tokens),
            "the host believes in {believed} tokens, the cache has {}",
            row.num_computed_tokens
        );
        let mut values = Vec::new();
        for offset in 0..num_tokens {
            let token = (first + offset) as usize;
            assert_eq!(
                arrays.positions.read(token),
                believed + offset,
                "positions follow num_computed_tokens"
            );
            assert_eq!(
                self.slot(row_number, believed + offset) as i32,
                arrays.slot_mapping.read(token),
                "slot_mapping and block table agree"
            );
            let token_id = match arrays.input_ids.read(token) {
                UNKNOWN_TOKEN if offset >= num_tokens - num_drafts => {
                    row.drafts[(offset - (num_tokens - num_drafts)) as usize]
                }
                UNKNOWN_TOKEN => {
                    assert_eq!(offset, num_tokens - num_drafts - 1, "only the last sampled token is unknown");
                    row.last_sampled
                }
                known => known,
            };
            let position = row.num_computed_tokens + offset;
            let previous = if position == 0 { 0 } else { self.read(row_number, position - 1) };
            let value = value_of(previous, token_id, position);
            let slot = self.slot(row_number, position);
            self.slots[slot] = Some(value);
            values.push(value);
            if offset >= num_tokens - num_drafts {
                // Kept for the check of the drafts.
                let drafts = &mut self.rows.get_mut(&row_number).expect("known").drafts;
                let place = (offset - (num_tokens - num_drafts)) as usize;
                drafts.resize(drafts.len().max(place + 1), 0);
                drafts[place] = token_id;
            }
        }
        // Attention reads the whole context: every slot must hold something.
        for position in 0..row.num_computed_tokens + num_tokens {
            self.read(row_number, position);
        }
        self.rows.get_mut(&row_number).expect("known").num_computed_tokens += num_tokens;
        values
    }

    /// The token after the row's known tokens, and after each draft as long as they are right.
    fn sample(&mut self, row_number: i32, values: &[u64], num_drafts: usize) -> Vec<i32> {
        let row = self.rows.get_mut(&row_number).expect("a known row");
        let candidates = &values[values.len() - 1 - num_drafts..];
        let mut ids = vec![token_of(candidates[0], row.seed, self.vocabulary)];
        while ids.len() <= num_drafts && row.drafts[ids.len() - 1] == ids[ids.len() - 1] {
            ids.push(token_of(candidates[ids.len()], row.seed, self.vocabulary));
        }
        let num_rejected = (num_drafts + 1 - ids.len()) as i32;
        let end = row.num_computed_tokens;
        row.num_computed_tokens -= num_rejected;
        row.last_sampled = ids[ids.len() - 1];
        row.num_sampled = ids.len() as i32;
        row.drafts =
            (0..self.num_speculative_tokens).map(|_| (self.random.next() % self.vocabulary) as i32).collect();
        for position in end - num_rejected..end {
            let slot = self.slot(row_number, position);
            self.slots[slot] = None;
        }
        ids
    }

    fn slot(&self, row: i32, position: i32) -> usize {
        let block = self.tables.0[&row][(position / self.block_size) as usize];
        (block * self.block_size + position % self.block_size) as usize
    }

    fn read(&self, row: i32, position: i32) -> u64 {
        let slot = self.slot(row, position);
        self.slots[slot]
            .unwrap_or_else(|| panic!("row {row} reads poisoned slot {slot} at position {position}"))
    }
}
