//! `Step`: the plan of one step, written into its buffer set while it is made.
//!
//! Rows are appended while requests are scheduled. In the rare case that a row leaves the plan again (a victim under
//! the priority policy) or loses drafts that were not made, the remaining entries are written again from the start of
//! the set.

mod drafts;
pub(crate) mod rows;
pub(crate) mod token_rows;

use kvblocks::{BlockCopies, BlockId};

use crate::{
    kv_cache_manager::KVCacheManager,
    logprobs::prompt::PromptSpan,
    output::SchedulerOutput,
    request::{NO_ROW, Request, Tenant, UNKNOWN_TOKEN, forced::ForcedTokens},
    requests::{Requests, rows::Rows},
    step_buffers::{ArraySpec, Column, RowFacts, StepBuffers},
};

/// The block table has not changed.
pub(crate) const UNCHANGED: u32 = u32::MAX;

/// One scheduled request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) tenant: Tenant,
    pub(crate) num_scheduled_tokens: u32,
    /// Tokens computed before this step.
    pub(crate) num_computed_tokens: u32,
    /// Blocks from this index on are new to the worker.
    pub(crate) block_table_start: u32,
    /// Where its drafts begin in the step's `draft_token_ids`.
    draft_start: u32,
    /// How many of its tokens, the last ones, are drafts.
    pub(crate) num_draft_tokens: u8,
    /// Whether the step samples a token for it.
    pub(crate) sampled: bool,
    /// Whether that sample was cancelled after the plan was made.
    pub(crate) is_withheld: bool,
    /// Forced tokens that are emitted with the step's tokens.
    pub(crate) forced: ForcedTokens,
    /// New or resumed: the worker must learn its parameters.
    pub(crate) is_new: bool,
}

impl Entry {
    /// Number of placeholders that the row has added to its request.
    pub(crate) fn num_placeholders(&self) -> u32 {
        if self.sampled && !self.is_withheld { 1 + u32::from(self.num_draft_tokens) } else { 0 }
    }
}

/// The properties of a row, apart from its request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    pub(crate) num_tokens: u32,
    /// The first block that is new to the worker, if the table has grown.
    pub(crate) block_table_start: Option<u32>,
    /// Whether it is new or resumed.
    pub(crate) is_new: bool,
}

/// The plan and its arrays. `output.step == 0` until the set is used for the first time.
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
    /// Whether there is room for the whole table of every row.
    fits_all_blocks: bool,
    max_num_seqs: usize,
    max_num_tokens: usize,
    block_size: u32,
    /// Whether a request whose token is being sampled must not be in the plan.
    waits_for_tokens: bool,
    /// Most drafts per request; if it is 0, `num_draft_tokens` stays zero forever.
    num_speculative_tokens: u32,
    /// Number of tokens of the previous plan in this set: these slots are reset to padding.
    previous_num_tokens: usize,
    draft_token_ids: Vec<i32>,
    /// While the plan is written again: the first row of logits, and the first token, of the latest run of decodes.
    decodes_from: (u32, u32),
    /// Rows that need log-probabilities of their prompts, in the order of the entries.
    pub(crate) prompt_spans: Vec<PromptSpan>,
    /// Buffer for a round of decodes: row, index in its table and id of each block that was begun.
    new_blocks: Vec<[u32; 3]>,
    /// Buffer for a round of decodes: slot and known tokens of each that fills a block.
    filled: Vec<(u32, u32)>,
    /// Ids of the requests in `finished_rows` and `preempted_rows`, for the debug view.
    pub(crate) finished_ids: Vec<Box<str>>,
    pub(crate) preempted: Vec<Tenant>,
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
            fits_all_blocks: capacity("bt_block_ids")
                >= (config.max_num_seqs * (1 + config.blocks_per_request())) as usize,
            max_num_seqs: config.max_num_seqs as usize,
            max_num_tokens: config.max_num_batched_tokens as usize,
            block_size: config.block_size,
            waits_for_tokens: config.is_pipeline(),
            num_speculative_tokens: config.num_speculative_tokens,
            // Before its first use, the content of a set is unknown.
            previous_num_tokens: config.max_num_batched_tokens as usize,
            draft_token_ids: Vec::with_capacity(
                (config.max_num_seqs * config.num_speculative_tokens) as usize,
            ),
            decodes_from: (0, 0),
            prompt_spans: Vec::new(),
            new_blocks: Vec::with_capacity(config.max_num_seqs as usize),
            filled: Vec::with_capacity(config.max_num_seqs as usize),
            finished_ids: Vec::with_capacity(config.max_num_seqs as usize),
            preempted: Vec::with_capacity(config.max_num_seqs as usize),
        }
    }

    /// Begin the plan of step number `step` in set `buffer_index`.
    pub(crate) fn begin(&mut self, step: u64, buffer_index: u32) {
        // A plan that was dropped has written nothing, so the one before it still describes the set.
        if self.output.total_num_scheduled_tokens > 0 {
            self.previous_num_tokens = self.output.total_num_scheduled_tokens as usize;
        }
        self.entries.clear();
        self.finished_ids.clear();
        self.preempted.clear();
        self.draft_token_ids.clear();
        self.prompt_spans.clear();
        self.output = SchedulerOutput { step, buffer_index, ..SchedulerOutput::default() };
        self.rewind();
    }

    /// Forget the rows, but not who left with this step.
    fn rewind(&mut self) {
        self.num_block_ids = 0;
        self.num_stop_ids = 0;
        let output = &mut self.output;
        output.num_reqs = 0;
        output.total_num_scheduled_tokens = 0;
        output.max_num_scheduled_tokens = 0;
        output.max_seq_len = 0;
        output.num_sampled = 0;
        output.num_logits = 0;
        output.num_prompt_logprobs_reqs = 0;
        output.num_prompt_logprobs = 0;
        output.num_new_reqs = 0;
        output.num_block_table_updates = 0;
        output.num_structured_output_reqs = 0;
    }

    /// Whether the arrays of variable length have room for an admission.
    pub(crate) fn has_room(&self, num_blocks: usize, num_stop_ids: usize) -> bool {
        self.num_block_ids + num_blocks <= self.block_ids_capacity
            && self.num_stop_ids + num_stop_ids <= self.stop_ids_capacity
    }

    /// Whether they have room for a row of the running list, with `num_blocks_behind` left for the rows after it.
    pub(crate) fn has_room_with(
        &self,
        num_blocks: usize,
        num_blocks_behind: usize,
        num_stop_ids: usize,
    ) -> bool {
        let num_blocks = if self.fits_all_blocks { 0 } else { num_blocks + num_blocks_behind };
        self.has_room(num_blocks, num_stop_ids)
    }

    /// The path of nearly every row: one token each for the leading requests of `running` that are plain decodes and
    /// have, or can get, a block for it. Returns how many there were.
    ///
    /// What differs between rows is written while they are visited; what follows from it is filled in afterwards,
    /// column by column.
    pub(crate) fn push_decodes(
        &mut self,
        running: &[u32],
        requests: &mut Requests,
        kv: &mut KVCacheManager,
        most: usize,
    ) -> usize {
        let count = running.len().min(most);
        let (index, token) = (self.output.num_reqs as usize, self.output.total_num_scheduled_tokens as usize);
        // Slices, so that bounds and addresses are not looked up again for every row.
        let idx_mapping = self.buffers.idx_mapping.window(index, count);
        let num_computed_tokens = self.buffers.num_computed_tokens.window(index, count);
        let input_ids = self.buffers.input_ids.window(token, count);
        let slot_mapping = self.buffers.slot_mapping.window(token, count);
        let columns = idx_mapping.iter_mut().zip(num_computed_tokens).zip(input_ids).zip(slot_mapping);
        let step = self.output.step;
        let mut done = 0;
        for (&slot, (((row, num_computed), input_id), slot_of_token)) in running.iter().zip(columns) {
            let request = &mut requests[slot as usize];
            let computed = request.num_computed_tokens;
            let expected = request.num_expected_tokens;
            if computed + 1 != expected || expected >= request.max_total_tokens || request.is_held {
                break;
            }
            if self.waits_for_tokens && request.num_tokens != expected {
                break;
            }
            let mut block_table_start = UNCHANGED;
            if request.slots_left <= 1 {
                match reach_border(request, kv, self.block_size) {
                    Border::Refused => break,
                    Border::InBlock => {}
                    Border::FillsBlock => self.filled.extend(filled_by(slot, request, self.block_size)),
                    Border::NewBlock(block) => {
                        self.filled.extend(filled_by(slot, request, self.block_size));
                        block_table_start = request.block_table.len() as u32 - 1;
                        self.new_blocks.push([request.row, block_table_start, block.0]);
                    }
                }
            }
            *row = request.row as i32;
            *num_computed = computed as i32;
            // With a placeholder, the token is still being sampled.
            *input_id = if request.num_tokens == expected { request.last_token_id() } else { UNKNOWN_TOKEN };
            *slot_of_token = request.next_slot as i32;
            self.entries.push(Entry {
                tenant: Tenant { slot, epoch: request.epoch },
                num_scheduled_tokens: 1,
                num_computed_tokens: computed,
                block_table_start,
                draft_start: 0,
                num_draft_tokens: 0,
                sampled: true,
                is_withheld: false,
                forced: ForcedTokens::default(),
                is_new: false,
            });
            request.num_computed_tokens = computed + 1;
            request.num_expected_tokens = expected + 1;
            request.num_steps_in_flight += 1;
            request.next_slot += 1;
            request.slots_left -= 1;
            done += 1;
        }
        kv.register_together(requests, &self.filled, step);
        self.filled.clear();
        self.fill_decodes(index, token, done);
        let mut new_blocks = std::mem::take(&mut self.new_blocks);
        for [row, start, block] in new_blocks.drain(..) {
            self.write_block_table(row, start, &[BlockId(block)]);
        }
        self.new_blocks = new_blocks;
        done
    }

    /// Fill the columns of `done` plain decodes that follow from those that `push_decodes` has written.
    fn fill_decodes(&mut self, index: usize, token: usize, done: usize) {
        let sample = self.output.num_sampled as usize;
        let logit = self.output.num_logits as usize;
        let buffers = &mut self.buffers;
        buffers.num_scheduled_tokens.window(index, done).fill(1);
        fill_range(buffers.query_start_loc.window(index, done), token);
        fill_range(buffers.logits_indices.window(logit, done), token);
        let rows = &*buffers.idx_mapping.window(index, done);
        buffers.sampled_rows.window(sample, done).copy_from_slice(rows);
        let computed = &*buffers.num_computed_tokens.window(index, done);
        buffers.positions.window(token, done).copy_from_slice(computed);
        let mut max_seq_len = 0;
        for (seq_len, &computed) in buffers.seq_lens.window(index, done).iter_mut().zip(computed) {
            *seq_len = computed + 1;
            max_seq_len = max_seq_len.max(computed + 1);
        }
        if self.num_speculative_tokens > 0 {
            buffers.num_draft_tokens.window(index, done).fill(0);
        }
        let output = &mut self.output;
        output.num_reqs += done as u32;
        output.total_num_scheduled_tokens += done as u32;
        output.num_sampled += done as u32;
        output.num_logits += done as u32;
        output.max_seq_len = output.max_seq_len.max(max_seq_len as u32);
        output.max_num_scheduled_tokens = output.max_num_scheduled_tokens.max(u32::from(done > 0));
    }

    /// Append any other row.
    pub(crate) fn push(&mut self, slot: u32, request: &mut Request, row: Row) {
        let computed = request.num_computed_tokens;
        let end = computed + row.num_tokens;
        let sampled =
            end >= request.num_expected_tokens && request.num_expected_tokens < request.max_total_tokens;
        let entry = Entry {
            tenant: Tenant { slot, epoch: request.epoch },
            num_scheduled_tokens: row.num_tokens,
            num_computed_tokens: computed,
            block_table_start: row.block_table_start.unwrap_or(UNCHANGED),
            draft_start: 0,
            num_draft_tokens: 0,
            sampled,
            is_withheld: false,
            forced: std::mem::take(&mut request.cold.untold),
            is_new: row.is_new,
        };
        if request.cold.wants_prompt_logprobs {
            self.prompt_spans.extend(request.ask_prompt_logprobs(entry.tenant, end));
        }
        self.write(&entry, request, request.num_expected_tokens);
        self.entries.push(entry);
        request.num_computed_tokens = end;
        request.num_expected_tokens += entry.num_placeholders();
        request.num_steps_in_flight += 1;
        request.locate_next_slot(self.block_size);
    }

    /// Number of blocks for which the array of new blocks still has room.
    pub(crate) fn block_ids_left(&self) -> usize {
        self.block_ids_capacity - self.num_block_ids
    }

    /// The entry of a request in the plan so far.
    pub(crate) fn entry_of(&self, tenant: Tenant) -> Option<&Entry> {
        self.entries.iter().rev().find(|entry| entry.tenant == tenant)
    }

    /// Remove a request from the plan.
    pub(crate) fn remove(&mut self, slot: u32) -> Option<Entry> {
        let position = self.entries.iter().position(|entry| entry.tenant.slot == slot)?;
        Some(self.entries.remove(position))
    }

    /// Forget the prompt positions that a request that leaves the plan needed logits for.
    pub(crate) fn remove_prompt_span(&mut self, tenant: Tenant) -> Option<PromptSpan> {
        let position = self.prompt_spans.iter().position(|span| span.tenant == tenant)?;
        Some(self.prompt_spans.remove(position))
    }

    /// Fill the padding; the scalars are final afterwards.
    pub(crate) fn finish(&mut self) {
        let num_tokens = self.output.total_num_scheduled_tokens as usize;
        let num_reqs = self.output.num_reqs as usize;
        self.buffers
            .query_start_loc
            .window(num_reqs, self.max_num_seqs + 1 - num_reqs)
            .fill(num_tokens as i32);
        let padding = self.previous_num_tokens.saturating_sub(num_tokens);
        self.buffers.slot_mapping.window(num_tokens, padding).fill(-1);
    }

    /// Write the departures: requests that finished since the last step, and those that were preempted for this one.
    pub(crate) fn write_departures(&mut self, rows: &mut Rows) {
        for (index, (row, request_id)) in rows.take_finished().enumerate() {
            self.buffers.finished_rows.write(index, row as i32);
            self.finished_ids.push(request_id);
        }
        for (index, (row, tenant)) in rows.take_preempted().enumerate() {
            self.buffers.preempted_rows.write(index, row as i32);
            self.preempted.push(tenant);
        }
        self.output.num_finished = self.finished_ids.len() as u32;
        self.output.num_preempted = self.preempted.len() as u32;
    }

    /// Write the block copies that the worker makes before it runs the step.
    pub(crate) fn write_copies(&mut self, copies: &BlockCopies) {
        let pairs = copies.blocks_to_swap_out.iter().map(|&(block, cpu_block)| [block.0, cpu_block.0]);
        self.output.num_swap_out = write_pairs(&mut self.buffers.blocks_to_swap_out, pairs);
        let pairs = copies.blocks_to_swap_in.iter().map(|&(cpu_block, block)| [cpu_block.0, block.0]);
        self.output.num_swap_in = write_pairs(&mut self.buffers.blocks_to_swap_in, pairs);
        let pairs = copies.blocks_to_copy.iter().map(|&(from, to)| [from.0, to.0]);
        self.output.num_copies = write_pairs(&mut self.buffers.blocks_to_copy, pairs);
    }

    /// Write one row. `num_expected` is the request's `num_expected_tokens` before the row.
    fn write(&mut self, entry: &Entry, request: &Request, num_expected: u32) {
        debug_assert_ne!(request.row, NO_ROW, "a scheduled request has a row");
        let computed = entry.num_computed_tokens;
        let end = computed + entry.num_scheduled_tokens;
        let first = self.output.total_num_scheduled_tokens as usize;
        self.write_row(entry, request, computed);
        let known = request.num_tokens.clamp(computed, end);
        let ids = self.buffers.input_ids.window(first, entry.num_scheduled_tokens as usize);
        let (known_ids, ids) = ids.split_at_mut((known - computed) as usize);
        request.copy_tokens(computed as usize, known_ids);
        let (unknown_ids, draft_ids) = ids.split_at_mut((num_expected.clamp(known, end) - known) as usize);
        unknown_ids.fill(UNKNOWN_TOKEN);
        draft_ids.copy_from_slice(
            &self.draft_token_ids[entry.draft_start as usize..][..entry.num_draft_tokens as usize],
        );
        fill_range(
            self.buffers.positions.window(first, entry.num_scheduled_tokens as usize),
            computed as usize,
        );
        let (mut token, mut position) = (first, computed);
        while position < end {
            let offset = position % self.block_size;
            let count = (self.block_size - offset).min(end - position);
            let block = request.block_table[(position / self.block_size) as usize];
            let slots = self.buffers.slot_mapping.window(token, count as usize);
            fill_range(slots, (block.0 * self.block_size + offset) as usize);
            token += count as usize;
            position += count;
        }
        self.count_row(entry, request, end);
    }

    /// Write the arrays with one element per request.
    #[inline]
    fn write_row(&mut self, entry: &Entry, request: &Request, computed: u32) {
        let index = self.output.num_reqs as usize;
        let buffers = &mut self.buffers;
        buffers.idx_mapping.write(index, request.row as i32);
        buffers.num_scheduled_tokens.write(index, entry.num_scheduled_tokens as i32);
        buffers.num_computed_tokens.write(index, computed as i32);
        buffers.seq_lens.write(index, (computed + entry.num_scheduled_tokens) as i32);
        buffers.query_start_loc.write(index, self.output.total_num_scheduled_tokens as i32);
        if self.num_speculative_tokens > 0 {
            buffers.num_draft_tokens.write(index, i32::from(entry.num_draft_tokens));
        }
    }

    /// Count a row whose arrays are written, and add what only some rows have.
    fn count_row(&mut self, entry: &Entry, request: &Request, end: u32) {
        if !self.prompt_spans.is_empty() {
            self.write_prompt_span(entry, request);
        }
        let output = &mut self.output;
        output.num_reqs += 1;
        output.total_num_scheduled_tokens += entry.num_scheduled_tokens;
        output.max_num_scheduled_tokens = output.max_num_scheduled_tokens.max(entry.num_scheduled_tokens);
        output.max_seq_len = output.max_seq_len.max(end);
        if entry.sampled {
            let num_logits = entry.num_placeholders();
            let first = output.total_num_scheduled_tokens - num_logits;
            let indices = self.buffers.logits_indices.window(output.num_logits as usize, num_logits as usize);
            fill_range(indices, first as usize);
            self.buffers.sampled_rows.write(output.num_sampled as usize, request.row as i32);
            output.num_logits += num_logits;
            output.num_sampled += 1;
        }
        if entry.is_new {
            self.write_parameters(request);
        }
        if entry.block_table_start != UNCHANGED {
            let start = entry.block_table_start;
            self.write_block_table(request.row, start, &request.block_table[start as usize..]);
        }
    }

    /// Write which logits judge tokens of the prompt, if the row needs that.
    fn write_prompt_span(&mut self, entry: &Entry, request: &Request) {
        let Some(span) = self.prompt_spans.iter().find(|span| span.tenant == entry.tenant) else { return };
        let output = &mut self.output;
        let (index, judge) = (output.num_prompt_logprobs_reqs as usize, output.num_prompt_logprobs as usize);
        let first = output.total_num_scheduled_tokens + span.start - entry.num_computed_tokens;
        let (buffers, count) = (&mut self.buffers, span.count as usize);
        buffers.prompt_logprobs_rows.write(index, request.row as i32);
        fill_range(buffers.prompt_logprobs_indices.window(judge, count), first as usize);
        request.copy_tokens(span.start as usize + 1, buffers.prompt_logprobs_targets.window(judge, count));
        buffers.prompt_logprobs_indptr.write(index, judge as i32);
        buffers.prompt_logprobs_indptr.write(index + 1, (judge + count) as i32);
        output.num_prompt_logprobs_reqs += 1;
        output.num_prompt_logprobs += span.count;
    }

    fn write_parameters(&mut self, request: &Request) {
        let index = self.output.num_new_reqs as usize;
        let params = &request.cold.params;
        let (floats, ints) = (params.floats(), params.ints());
        let facts = RowFacts {
            min_tokens: i64::from(params.min_tokens),
            num_prompt_tokens: i64::from(request.cold.num_prompt_tokens),
            has_extras: i64::from(params.extras.is_some()),
            num_multimodal: request.cold.extra_keys.multimodal().len() as i64,
        }
        .columns();
        let first_int = index * (ints.len() + facts.len());
        self.buffers.new_rows.write(index, request.row as i32);
        self.buffers.sampling_float.write_from(index * floats.len(), &floats);
        self.buffers.sampling_int.write_from(first_int, &ints);
        self.buffers.sampling_int.write_from(first_int + ints.len(), &facts);
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

    /// Write new `blocks` of a row, which begin at index `start` of its table.
    fn write_block_table(&mut self, row: u32, start: u32, blocks: &[BlockId]) {
        let index = self.output.num_block_table_updates as usize;
        self.buffers.bt_rows.write(index, row as i32);
        self.buffers.bt_starts.write(index, start as i32);
        self.buffers.bt_indptr.write(index, self.num_block_ids as i32);
        let ids = self.buffers.bt_block_ids.window(self.num_block_ids, blocks.len());
        for (id, block) in ids.iter_mut().zip(blocks) {
            *id = block.0 as i32;
        }
        self.num_block_ids += blocks.len();
        self.buffers.bt_indptr.write(index + 1, self.num_block_ids as i32);
        self.output.num_block_table_updates += 1;
    }
}

/// The result for a decode whose position is the last of its block or the first of the next, or looks like it.
enum Border {
    /// It is not a plain decode, or there is no block for it; nothing has changed.
    Refused,
    /// It runs in a block that it has.
    InBlock,
    /// It does, and may fill it, or has filled one before it: what is full is to be registered.
    FillsBlock,
    /// It got a new block; what is full is to be registered.
    NewBlock(BlockId),
}

/// Give a decode the block that it needs.
fn reach_border(request: &mut Request, kv: &mut KVCacheManager, block_size: u32) -> Border {
    if request.cold.seat.is_some() {
        return Border::Refused; // Others may hold the block.
    }
    if request.slots_left > 0 {
        return Border::FillsBlock;
    }
    if request.num_computed_tokens == request.capacity_tokens(block_size) {
        let Some(block) = kv.pool.allocate_one() else { return Border::Refused };
        request.block_table.push(block);
        request.locate_next_slot(block_size);
        return Border::NewBlock(block);
    }
    request.locate_next_slot(block_size);
    // Drafts that were rejected may have left it a block.
    if request.slots_left > 1 { Border::InBlock } else { Border::FillsBlock }
}

/// Slot and known tokens of a decode, if these fill blocks that are not registered, the one that it runs in included.
fn filled_by(slot: u32, request: &Request, block_size: u32) -> Option<(u32, u32)> {
    let known = request.num_tokens.min(request.num_computed_tokens + 1);
    (known / block_size > request.num_registered_blocks).then_some((slot, known))
}

/// `start, start + 1, …`
fn fill_range(column: &mut [i32], start: usize) {
    let start = start as i32;
    for (index, value) in column.iter_mut().enumerate() {
        *value = start + index as i32;
    }
}

/// Write pairs; returns how many.
fn write_pairs(column: &mut Column<i32>, pairs: impl Iterator<Item = [u32; 2]>) -> u32 {
    let mut count = 0;
    for pair in pairs {
        column.write_from(2 * count, &pair.map(|id| id as i32));
        count += 1;
    }
    count as u32
}
