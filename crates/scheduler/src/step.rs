//! `Step`: the plan of one step, written into its buffer set as it is made.
//!
//! Rows are appended while requests are scheduled. The rare event that a row leaves the step again
//! (a victim under the priority policy) replays the remaining entries into the set from its start.

use crate::{
    output::SchedulerOutput,
    request::{NO_ROW, Request},
    step_buffers::{ArraySpec, SAMPLING_FLOAT_COLUMNS, SAMPLING_INT_COLUMNS, StepBuffers},
};

/// No difference to the block table.
pub(crate) const UNCHANGED: u32 = u32::MAX;

/// One scheduled request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) slot: u32,
    pub(crate) epoch: u32,
    pub(crate) num_scheduled_tokens: u32,
    /// Blocks from here on are new to the worker.
    pub(crate) block_table_start: u32,
    /// Whether the step yields a token for it.
    pub(crate) sampled: bool,
    /// New or resumed: the worker learns its parameters.
    pub(crate) is_new: bool,
}

impl Entry {
    fn decode(slot: u32, epoch: u32, block_table_start: u32) -> Self {
        Self { slot, epoch, num_scheduled_tokens: 1, block_table_start, sampled: true, is_new: false }
    }
}

/// The plan and its arrays. `output.step == 0` while the set has never been used.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) buffers: StepBuffers,
    pub(crate) output: SchedulerOutput,
    pub(crate) entries: Vec<Entry>,
    num_block_ids: usize,
    num_stop_ids: usize,
    /// Length of `bt_block_ids` and `stop_token_ids`.
    block_ids_capacity: usize,
    stop_ids_capacity: usize,
    max_num_seqs: usize,
    block_size: u32,
    /// Tokens of the plan that was in the set before: its slots are reset to padding.
    previous_num_tokens: usize,
    /// Ids of the requests behind `finished_rows` and slots of those behind `preempted_rows`: for the debug view.
    pub(crate) finished_ids: Vec<Box<str>>,
    pub(crate) preempted_slots: Vec<u32>,
}

impl Step {
    pub(crate) fn new(buffers: StepBuffers, config: &crate::SchedulerConfig) -> Self {
        let specs = StepBuffers::spec(config);
        let capacity = |name| specs.iter().find(|spec| spec.name == name).map_or(0, ArraySpec::num_elements);
        Self {
            buffers,
            output: SchedulerOutput::default(),
            entries: Vec::with_capacity(config.max_num_seqs as usize),
            num_block_ids: 0,
            num_stop_ids: 0,
            block_ids_capacity: capacity("bt_block_ids"),
            stop_ids_capacity: capacity("stop_token_ids"),
            max_num_seqs: config.max_num_seqs as usize,
            block_size: config.block_size,
            // Nothing is known of what is in a set before its first use.
            previous_num_tokens: config.max_num_batched_tokens as usize,
            finished_ids: Vec::with_capacity(config.max_num_seqs as usize),
            preempted_slots: Vec::with_capacity(config.max_num_seqs as usize),
        }
    }

    /// Start the plan of step number `step` in set `buffer_index`.
    pub(crate) fn begin(&mut self, step: u64, buffer_index: u32) {
        // A plan that came to nothing has written nothing: the one before it still marks the set.
        if self.output.total_num_scheduled_tokens > 0 {
            self.previous_num_tokens = self.output.total_num_scheduled_tokens as usize;
        }
        self.entries.clear();
        self.finished_ids.clear();
        self.preempted_slots.clear();
        self.rewind();
        self.output = SchedulerOutput { step, buffer_index, ..SchedulerOutput::default() };
    }

    fn rewind(&mut self) {
        self.num_block_ids = 0;
        self.num_stop_ids = 0;
        let SchedulerOutput { step, buffer_index, .. } = self.output;
        self.output = SchedulerOutput { step, buffer_index, ..SchedulerOutput::default() };
    }

    /// Whether the arrays of variable length have room for an admission.
    pub(crate) fn has_room(&self, num_blocks: usize, num_stop_ids: usize) -> bool {
        self.num_block_ids + num_blocks <= self.block_ids_capacity
            && self.num_stop_ids + num_stop_ids <= self.stop_ids_capacity
    }

    /// The path that nearly every row takes: one token each for the leading requests of `running` whose next
    /// position lies inside a block that they own and does not fill it. Returns how many that were.
    pub(crate) fn push_decodes(&mut self, running: &[u32], requests: &mut [Request], budget: u32) -> usize {
        let count = running.len().min(budget as usize);
        let (index, token) = (self.output.num_reqs as usize, self.output.total_num_scheduled_tokens as usize);
        let sample = self.output.num_sampled as usize;
        let buffers = &mut self.buffers;
        let idx_mapping = buffers.idx_mapping.window(index, count);
        let num_scheduled_tokens = buffers.num_scheduled_tokens.window(index, count);
        let num_computed_tokens = buffers.num_computed_tokens.window(index, count);
        let seq_lens = buffers.seq_lens.window(index, count);
        let query_start_loc = buffers.query_start_loc.window(index, count);
        let input_ids = buffers.input_ids.window(token, count);
        let positions = buffers.positions.window(token, count);
        let slot_mapping = buffers.slot_mapping.window(token, count);
        let logits_indices = buffers.logits_indices.window(sample, count);
        let sampled_rows = buffers.sampled_rows.window(sample, count);
        let mut max_seq_len = self.output.max_seq_len;
        let mut done = 0;
        for (i, &slot) in running[..count].iter().enumerate() {
            let request = &mut requests[slot as usize];
            let computed = request.num_computed_tokens;
            if request.slots_left <= 1 || computed + 1 != request.num_tokens {
                break;
            }
            idx_mapping[i] = request.row as i32;
            num_scheduled_tokens[i] = 1;
            num_computed_tokens[i] = computed as i32;
            seq_lens[i] = computed as i32 + 1;
            query_start_loc[i] = (token + i) as i32;
            input_ids[i] = request.last_token_id;
            positions[i] = computed as i32;
            slot_mapping[i] = request.next_slot as i32;
            logits_indices[i] = (token + i) as i32;
            sampled_rows[i] = request.row as i32;
            max_seq_len = max_seq_len.max(computed + 1);
            self.entries.push(Entry::decode(slot, request.epoch, UNCHANGED));
            request.num_computed_tokens = computed + 1;
            request.next_slot += 1;
            request.slots_left -= 1;
            done += 1;
        }
        self.output.num_reqs += done as u32;
        self.output.total_num_scheduled_tokens += done as u32;
        self.output.num_sampled += done as u32;
        self.output.max_seq_len = max_seq_len;
        done
    }

    /// A decode that fills a block, or begins the new block at `block_table_start`.
    pub(crate) fn push_decode_at_border(
        &mut self,
        slot: u32,
        request: &mut Request,
        block_table_start: Option<u32>,
    ) {
        let entry = Entry::decode(slot, request.epoch, block_table_start.unwrap_or(UNCHANGED));
        self.write_row(&entry, request, request.num_computed_tokens);
        let token = self.output.total_num_scheduled_tokens as usize;
        self.buffers.input_ids.write(token, request.last_token_id);
        self.buffers.positions.write(token, request.num_computed_tokens as i32);
        self.buffers.slot_mapping.write(token, request.next_slot as i32);
        self.count_row(&entry, request, request.num_computed_tokens + 1);
        self.entries.push(entry);
        request.num_computed_tokens += 1;
        request.next_slot += 1;
        request.slots_left -= 1;
    }

    /// Any other row: `num_tokens` tokens, with new blocks from `block_table_start` on if the table grew.
    pub(crate) fn push(
        &mut self,
        slot: u32,
        request: &mut Request,
        num_tokens: u32,
        block_table_start: Option<u32>,
        is_new: bool,
    ) {
        let end = request.num_computed_tokens + num_tokens;
        let entry = Entry {
            slot,
            epoch: request.epoch,
            num_scheduled_tokens: num_tokens,
            block_table_start: block_table_start.unwrap_or(UNCHANGED),
            sampled: end == request.num_tokens && request.num_tokens < request.max_total_tokens,
            is_new,
        };
        self.write(&entry, request, request.num_computed_tokens);
        self.entries.push(entry);
        request.num_computed_tokens = end;
        let (block, offset) = (end / self.block_size, end % self.block_size);
        request.slots_left = 0;
        if request.max_total_tokens == request.num_prompt_tokens {
            return; // It samples nothing, and the fast path always samples.
        }
        if let Some(block) = request.block_table.get(block as usize) {
            request.next_slot = block.0 * self.block_size + offset;
            request.slots_left = self.block_size - offset;
        }
    }

    /// Take a request out of the plan again. Returns its tokens, or `None` when it was not in it.
    pub(crate) fn remove(&mut self, slot: u32) -> Option<u32> {
        let position = self.entries.iter().position(|entry| entry.slot == slot)?;
        Some(self.entries.remove(position).num_scheduled_tokens)
    }

    /// Write the plan again from its entries, after one was removed.
    pub(crate) fn replay(&mut self, requests: &[Request]) {
        self.previous_num_tokens =
            self.previous_num_tokens.max(self.output.total_num_scheduled_tokens as usize);
        self.rewind();
        let entries = std::mem::take(&mut self.entries);
        for entry in &entries {
            let request = &requests[entry.slot as usize];
            self.write(entry, request, request.num_computed_tokens - entry.num_scheduled_tokens);
        }
        self.entries = entries;
    }

    /// Fill the padding and the rows that left; the scalars are final afterwards.
    pub(crate) fn finish(&mut self, finished: &mut Vec<(u32, Box<str>)>, preempted: &mut Vec<(u32, u32)>) {
        let num_tokens = self.output.total_num_scheduled_tokens as usize;
        for index in self.output.num_reqs as usize..=self.max_num_seqs {
            self.buffers.query_start_loc.write(index, num_tokens as i32);
        }
        for token in num_tokens..self.previous_num_tokens {
            self.buffers.slot_mapping.write(token, -1);
        }
        for (index, (row, request_id)) in finished.drain(..).enumerate() {
            self.buffers.finished_rows.write(index, row as i32);
            self.finished_ids.push(request_id);
        }
        for (index, (row, slot)) in preempted.drain(..).enumerate() {
            self.buffers.preempted_rows.write(index, row as i32);
            self.preempted_slots.push(slot);
        }
        self.output.num_finished = self.finished_ids.len() as u32;
        self.output.num_preempted = self.preempted_slots.len() as u32;
        let longest = self.entries.iter().map(|entry| entry.num_scheduled_tokens).max();
        self.output.max_num_scheduled_tokens = longest.unwrap_or(0);
    }

    fn write(&mut self, entry: &Entry, request: &Request, computed: u32) {
        debug_assert_ne!(request.row, NO_ROW, "a scheduled request has a row");
        let end = computed + entry.num_scheduled_tokens;
        let first = self.output.total_num_scheduled_tokens as usize;
        self.write_row(entry, request, computed);
        self.buffers.input_ids.write_from(first, &request.token_ids[computed as usize..end as usize]);
        for (token, position) in (first..).zip(computed..end) {
            let block = request.block_table[(position / self.block_size) as usize];
            self.buffers.positions.write(token, position as i32);
            self.buffers
                .slot_mapping
                .write(token, (block.0 * self.block_size + position % self.block_size) as i32);
        }
        self.count_row(entry, request, end);
    }

    /// The arrays that have one element per request.
    fn write_row(&mut self, entry: &Entry, request: &Request, computed: u32) {
        let index = self.output.num_reqs as usize;
        let buffers = &mut self.buffers;
        buffers.idx_mapping.write(index, request.row as i32);
        buffers.num_scheduled_tokens.write(index, entry.num_scheduled_tokens as i32);
        buffers.num_computed_tokens.write(index, computed as i32);
        buffers.seq_lens.write(index, (computed + entry.num_scheduled_tokens) as i32);
        buffers.query_start_loc.write(index, self.output.total_num_scheduled_tokens as i32);
    }

    /// Count a row whose arrays are written, and add what only some rows have.
    fn count_row(&mut self, entry: &Entry, request: &Request, end: u32) {
        self.output.num_reqs += 1;
        self.output.total_num_scheduled_tokens += entry.num_scheduled_tokens;
        self.output.max_seq_len = self.output.max_seq_len.max(end);
        if entry.sampled {
            let sample = self.output.num_sampled as usize;
            self.buffers.logits_indices.write(sample, self.output.total_num_scheduled_tokens as i32 - 1);
            self.buffers.sampled_rows.write(sample, request.row as i32);
            self.output.num_sampled += 1;
        }
        if entry.is_new {
            self.write_parameters(request);
        }
        if entry.block_table_start != UNCHANGED {
            self.write_block_table(request, entry.block_table_start);
        }
    }

    fn write_parameters(&mut self, request: &Request) {
        let index = self.output.num_new_reqs as usize;
        let params = &request.cold.params;
        let floats: [f32; SAMPLING_FLOAT_COLUMNS.len()] = [
            params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        ];
        let ints: [i64; SAMPLING_INT_COLUMNS.len()] = [
            params.top_k,
            params.seed,
            i64::from(params.min_tokens),
            i64::from(request.num_prompt_tokens),
            params.num_logprobs,
        ];
        self.buffers.new_rows.write(index, request.row as i32);
        self.buffers.sampling_float.write_from(index * floats.len(), &floats);
        self.buffers.sampling_int.write_from(index * ints.len(), &ints);
        self.buffers.stop_indptr.write(index, self.num_stop_ids as i32);
        if params.min_tokens > 0 {
            if params.eos_token_id.is_some() {
                self.buffers.stop_token_ids.write(self.num_stop_ids, request.eos_token_id);
                self.num_stop_ids += 1;
            }
            self.buffers.stop_token_ids.write_from(self.num_stop_ids, &params.stop_token_ids);
            self.num_stop_ids += params.stop_token_ids.len();
        }
        self.buffers.stop_indptr.write(index + 1, self.num_stop_ids as i32);
        self.output.num_new_reqs += 1;
    }

    fn write_block_table(&mut self, request: &Request, start: u32) {
        let index = self.output.num_block_table_updates as usize;
        self.buffers.bt_rows.write(index, request.row as i32);
        self.buffers.bt_starts.write(index, start as i32);
        self.buffers.bt_indptr.write(index, self.num_block_ids as i32);
        for block in &request.block_table[start as usize..] {
            self.buffers.bt_block_ids.write(self.num_block_ids, block.0 as i32);
            self.num_block_ids += 1;
        }
        self.buffers.bt_indptr.write(index + 1, self.num_block_ids as i32);
        self.output.num_block_table_updates += 1;
    }
}
