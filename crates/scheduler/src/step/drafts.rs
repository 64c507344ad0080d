//! The drafts in a step's plan: how they are added to rows, dropped again, and written.

use super::{Entry, Step, UNCHANGED, fill_range};
use crate::{request::Request, requests::Requests};

/// Numbers that `Ranges` writes at once: a row has few, for which a loop that writes exactly so many costs more.
const PIECE: usize = 16;

/// The rest of a column, for ranges of numbers one behind the other.
struct Ranges<'a>(&'a mut [i32]);

impl Ranges<'_> {
    /// Write `start, start + 1, …`, `count` numbers, and, where there is room, some more: what comes next overwrites them.
    #[inline]
    fn write(&mut self, count: usize, start: usize) {
        let mut left = count;
        let mut next = start as i32;
        let mut rest = std::mem::take(&mut self.0);
        loop {
            let Some(piece) = rest.first_chunk_mut::<PIECE>() else {
                fill_range(&mut rest[..left], next as usize);
                break;
            };
            for (value, offset) in piece.iter_mut().zip(0..) {
                *value = next + offset;
            }
            if left <= PIECE {
                break;
            }
            rest = &mut rest[PIECE..];
            (left, next) = (left - PIECE, next + PIECE as i32);
        }
        self.0 = &mut rest[left..];
    }
}

impl Step {
    /// Let a row run drafts after its token; it is to be written again. `block_table_start`: the first block that is new
    /// to the worker, if the table has grown for them.
    pub(crate) fn add_drafts(
        &mut self,
        entry: &mut Entry,
        request: &mut Request,
        drafts: &[i32],
        block_table_start: Option<u32>,
    ) {
        let count = drafts.len() as u32;
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
        let entries = self.begin_rewrite();
        for entry in &entries {
            self.write_again(entry, &requests[entry.tenant.slot as usize]);
        }
        self.end_rewrite(entries);
    }

    /// Begin to write the plan again. Call `write_again` for each of the returned entries, then `end_rewrite`.
    pub(crate) fn begin_rewrite(&mut self) -> Vec<Entry> {
        self.previous_num_tokens =
            self.previous_num_tokens.max(self.output.total_num_scheduled_tokens as usize);
        self.rewind();
        self.begin_decodes();
        std::mem::take(&mut self.entries)
    }

    /// Write the next row again.
    #[inline]
    pub(crate) fn write_again(&mut self, entry: &Entry, request: &Request) {
        if self.is_known_decode(entry, request) {
            self.write_decode(entry, request);
        } else {
            self.end_decodes();
            self.write(entry, request, request.num_expected_tokens - entry.num_placeholders());
            self.begin_decodes();
        }
    }

    /// The rows are written; `entries` is what `begin_rewrite` gave.
    pub(crate) fn end_rewrite(&mut self, entries: Vec<Entry>) {
        self.end_decodes();
        self.entries = entries;
    }

    /// The next rows may be written by `write_decode`.
    fn begin_decodes(&mut self) {
        self.decodes_from = (self.output.num_logits, self.output.total_num_scheduled_tokens);
    }

    /// Write what all tokens of such rows have in common: each has a row of logits.
    fn end_decodes(&mut self) {
        let (first_logit, first) = self.decodes_from;
        let count = (self.output.num_logits - first_logit) as usize;
        fill_range(self.buffers.logits_indices.window(first_logit as usize, count), first as usize);
        // `Ranges` may have written this far.
        let written = self.output.total_num_scheduled_tokens as usize + PIECE;
        self.previous_num_tokens = self.previous_num_tokens.max(written.min(self.max_num_tokens));
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

    /// Write such a row: what [`write`](Self::write) does, without its special cases and `logits_indices`.
    #[inline]
    fn write_decode(&mut self, entry: &Entry, request: &Request) {
        let (computed, count) = (entry.num_computed_tokens as usize, entry.num_scheduled_tokens as usize);
        let first = self.output.total_num_scheduled_tokens as usize;
        self.write_row(entry, request, entry.num_computed_tokens);
        let buffers = &mut self.buffers;
        if let [newest, draft_ids @ ..] = buffers.input_ids.window(first, count) {
            *newest = request.last_token_id();
            draft_ids.copy_from_slice(&self.draft_token_ids[entry.draft_start as usize..][..count - 1]);
        }
        let block_size = self.block_size as usize;
        let (mut block, mut offset) = (computed / block_size, computed % block_size);
        // Room for whole pieces, although later rows have their places there: they are written later.
        let span = (count + PIECE).min(self.max_num_tokens - first);
        let mut positions = Ranges(buffers.positions.window(first, span));
        let mut slots = Ranges(buffers.slot_mapping.window(first, span));
        let mut done = 0;
        while done < count {
            let in_block = (count - done).min(block_size - offset);
            positions.write(in_block, computed + done);
            slots.write(in_block, request.block_table[block].0 as usize * block_size + offset);
            (done, block, offset) = (done + in_block, block + 1, 0);
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
