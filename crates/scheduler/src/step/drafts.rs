//! The drafts in a step's plan: how they are added to rows, dropped again, and written.

use super::{Entry, Step, UNCHANGED, fill_range};
use crate::{request::Request, requests::Requests};

impl Step {
    /// Let the row in batch position `index` run drafts after its token; call `replay` afterwards. `block_table_start`:
    /// the first block that is new to the worker, if the table has grown for them.
    pub(crate) fn add_drafts(
        &mut self,
        index: usize,
        request: &mut Request,
        drafts: &[i32],
        block_table_start: Option<u32>,
    ) {
        let count = drafts.len() as u32;
        let entry = &mut self.entries[index];
        entry.draft_start = self.draft_token_ids.len() as u32;
        entry.num_draft_tokens = count as u8;
        entry.num_scheduled_tokens += count;
        if entry.block_table_start == UNCHANGED {
            entry.block_table_start = block_table_start.unwrap_or(UNCHANGED);
        }
        self.draft_token_ids.extend_from_slice(drafts);
        request.num_computed_tokens += count;
        request.num_expected_tokens += count;
        request.locate_next_slot(self.block_size);
    }

    /// The drafts of a row.
    pub(crate) fn drafts_of(&self, entry: &Entry) -> &[i32] {
        &self.draft_token_ids[entry.draft_start as usize..][..entry.num_draft_tokens as usize]
    }

    /// Drop the last drafts of the row in batch position `index`; call `replay` afterwards. Returns how many were
    /// dropped.
    pub(crate) fn truncate_drafts(&mut self, index: usize, num_kept: u32) -> u32 {
        let entry = &mut self.entries[index];
        let dropped = u32::from(entry.num_draft_tokens).saturating_sub(num_kept);
        entry.num_draft_tokens -= dropped as u8;
        entry.num_scheduled_tokens -= dropped;
        dropped
    }

    /// Write the plan again from its entries, after one was removed or changed.
    pub(crate) fn replay(&mut self, requests: &Requests) {
        self.previous_num_tokens =
            self.previous_num_tokens.max(self.output.total_num_scheduled_tokens as usize);
        self.rewind();
        let entries = std::mem::take(&mut self.entries);
        for entry in &entries {
            let request = &requests[entry.tenant.slot as usize];
            if self.is_known_decode(entry, request) {
                self.write_decode(entry, request);
            } else {
                self.write(entry, request, request.num_expected_tokens - entry.num_placeholders());
            }
        }
        self.entries = entries;
    }

    /// Whether a row is only the newest token of its request and drafts, and the worker learns nothing else: nearly all
    /// rows of a step with drafts are.
    fn is_known_decode(&self, entry: &Entry, request: &Request) -> bool {
        entry.sampled
            && !entry.is_withheld
            && !entry.is_new
            && entry.num_scheduled_tokens == entry.num_placeholders()
            && request.num_tokens == entry.num_computed_tokens + 1
            && self.prompt_spans.is_empty()
    }

    /// Write such a row: what [`write`](Self::write) does, without its special cases.
    fn write_decode(&mut self, entry: &Entry, request: &Request) {
        let (computed, count) = (entry.num_computed_tokens as usize, entry.num_scheduled_tokens as usize);
        let (first, first_logit) =
            (self.output.total_num_scheduled_tokens as usize, self.output.num_logits as usize);
        self.write_row(entry, request, entry.num_computed_tokens);
        let buffers = &mut self.buffers;
        let (newest, draft_ids) = buffers.input_ids.window(first, count).split_at_mut(1);
        newest[0] = request.last_token_id();
        draft_ids.copy_from_slice(&self.draft_token_ids[entry.draft_start as usize..][..count - 1]);
        fill_range(buffers.positions.window(first, count), computed);
        fill_range(buffers.logits_indices.window(first_logit, count), first);
        let (block_size, mut slots) = (self.block_size as usize, buffers.slot_mapping.window(first, count));
        let (mut block, mut offset) = (computed / block_size, computed % block_size);
        while !slots.is_empty() {
            let (in_block, behind) = slots.split_at_mut(slots.len().min(block_size - offset));
            fill_range(in_block, request.block_table[block].0 as usize * block_size + offset);
            (slots, block, offset) = (behind, block + 1, 0);
        }
        buffers.sampled_rows.write(self.output.num_sampled as usize, request.row as i32);
        let output = &mut self.output;
        let num_tokens = entry.num_scheduled_tokens;
        output.num_reqs += 1;
        output.total_num_scheduled_tokens += num_tokens;
        output.max_num_scheduled_tokens = output.max_num_scheduled_tokens.max(num_tokens);
        output.max_seq_len = output.max_seq_len.max(entry.num_computed_tokens + num_tokens);
        output.num_logits += num_tokens;
        output.num_sampled += 1;
        if entry.block_table_start != UNCHANGED {
            let start = entry.block_table_start;
            self.write_block_table(request.row, start, &request.block_table[start as usize..]);
        }
    }
}
