//! One step's ragged batch: checked once, copied, and then trusted by every layer.

use std::ops::Range;

use thiserror::Error;

/// Tokens of a prompt that one tile computes: enough to use a chunk of keys often, few enough to share out.
pub(crate) const TILE_TOKENS: usize = 32;

/// What is wrong with a batch.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum BatchError {
    /// Blocks of no tokens.
    #[error("block_size is 0, but a block holds at least one token")]
    BlockSize,
    /// Arrays that contradict each other in length.
    #[error("{name} has {found} elements, but {expected} are expected for {num_reqs} requests")]
    Length {
        /// The array.
        name: &'static str,
        /// Its length.
        found: usize,
        /// What it should be.
        expected: usize,
        /// Requests, by `seq_lens`.
        num_reqs: usize,
    },
    /// `query_start_loc` does not start at 0, decreases, or leaves the batch.
    #[error("query_start_loc[{index}] is {value}, but it must lie between {least} and {most}")]
    QueryStart {
        /// Where.
        index: usize,
        /// What is there.
        value: i32,
        /// Least that fits.
        least: usize,
        /// Most that fits.
        most: usize,
    },
    /// A sequence shorter than its new tokens, or longer than its row of the block table.
    #[error(
        "seq_lens[{index}] is {value}, but it must lie between {least}, its new tokens, and {most}, what its row of the block table holds"
    )]
    SeqLen {
        /// Which request.
        index: usize,
        /// Its length.
        value: i32,
        /// Its new tokens.
        least: usize,
        /// What its blocks hold.
        most: usize,
    },
    /// A row that the block table does not have.
    #[error("table_rows[{request}] is {value}, but the block table has {num_rows} rows")]
    Row {
        /// Which request.
        request: usize,
        /// What is there.
        value: i32,
        /// Rows of the table.
        num_rows: usize,
    },
    /// A negative block id.
    #[error("block_table[{request}, {column}] is {value}, but a block id is 0 or more")]
    Block {
        /// Which request.
        request: usize,
        /// Which of its blocks.
        column: usize,
        /// What is there.
        value: i32,
    },
    /// A token that sees less than itself, more than there is, or less than the token before it.
    #[error(
        "visible[{index}] is {value}, but it must lie between {least} and {most}: a token sees itself and at most its sequence, and no fewer tokens than the one before it"
    )]
    Visible {
        /// Which token.
        index: usize,
        /// What is there.
        value: i32,
        /// Least that fits.
        least: usize,
        /// Most that fits.
        most: usize,
    },
    /// A slot below −1.
    #[error("slot_mapping[{index}] is {value}, but a slot is 0 or more, or -1 for a token that is not kept")]
    Slot {
        /// Which token.
        index: usize,
        /// What is there.
        value: i32,
    },
}

/// New tokens of one request, and what they attend to.
#[derive(Debug)]
pub(crate) struct Span {
    /// First new token in the flattened batch.
    pub(crate) start: usize,
    pub(crate) num_tokens: usize,
    pub(crate) seq_len: usize,
    first_block: usize,
    num_blocks: usize,
}

/// A part of a request's new tokens that one thread computes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    pub(crate) span: usize,
    /// First token, counted from the start of the span.
    pub(crate) first: usize,
    pub(crate) num_tokens: usize,
}

/// Requests whose new tokens lie one after another in a flattened batch; all their keys and values are in the cache once
/// the new ones are written.
#[derive(Debug)]
pub struct RaggedBatch {
    block_size: usize,
    num_tokens: usize,
    spans: Vec<Span>,
    parts: Vec<Part>,
    blocks: Vec<u32>,
    slot_mapping: Vec<i32>,
    /// Where what each token sees ends, in its sequence; empty: behind the token itself.
    visible: Vec<u32>,
    num_blocks: usize,
    num_pairs: usize,
}

impl RaggedBatch {
    /// Check and keep a step.
    ///
    /// # Arguments
    ///
    /// * `block_size`: tokens of a block.
    /// * `query_start_loc`: first token of each request, and the end of the last.
    /// * `seq_lens`: tokens of each request, new ones included.
    /// * `block_table`: `[num_reqs, columns]`; entries beyond a sequence are not looked at.
    /// * `slot_mapping`: where each token of the flattened batch is kept, −1: nowhere. It may have more tokens than the
    ///   requests: padding.
    ///
    /// # Errors
    ///
    /// See [`BatchError`].
    pub fn new(
        block_size: usize,
        query_start_loc: &[i32],
        seq_lens: &[i32],
        block_table: &[i32],
        slot_mapping: &[i32],
    ) -> Result<Self, BatchError> {
        Self::of_rows(block_size, query_start_loc, seq_lens, block_table, None, slot_mapping)
    }

    /// As [`Self::new`], of requests that have some of the table's rows.
    ///
    /// # Arguments
    ///
    /// * `rows`: how many the table has, and the one of each request. None: it has those of the requests, in order.
    ///
    /// # Errors
    ///
    /// See [`BatchError`].
    pub fn of_rows(
        block_size: usize,
        query_start_loc: &[i32],
        seq_lens: &[i32],
        block_table: &[i32],
        rows: Option<(usize, &[i32])>,
        slot_mapping: &[i32],
    ) -> Result<Self, BatchError> {
        if block_size == 0 {
            return Err(BatchError::BlockSize);
        }
        let num_reqs = seq_lens.len();
        let num_rows = rows.map_or(num_reqs, |(num_rows, _)| num_rows);
        let wrong_length =
            |name, found, expected| Err(BatchError::Length { name, found, expected, num_reqs });
        if query_start_loc.len() != num_reqs + 1 {
            return wrong_length("query_start_loc", query_start_loc.len(), num_reqs + 1);
        }
        let columns = block_table.len().checked_div(num_rows).unwrap_or(0);
        if columns * num_rows != block_table.len() {
            return wrong_length("block_table", block_table.len(), columns * num_rows);
        }
        if let Some((_, rows)) = rows
            && rows.len() != num_reqs
        {
            return wrong_length("table_rows", rows.len(), num_reqs);
        }
        let row_of = |request: usize| match rows {
            None => Ok(request),
            Some((_, rows)) => usize::try_from(rows[request])
                .ok()
                .filter(|row| *row < num_rows)
                .ok_or(BatchError::Row { request, value: rows[request], num_rows }),
        };
        let mut batch = Self {
            block_size,
            num_tokens: slot_mapping.len(),
            spans: Vec::with_capacity(num_reqs),
            parts: Vec::with_capacity(num_reqs),
            blocks: Vec::new(),
            slot_mapping: slot_mapping.to_vec(),
            visible: Vec::new(),
            num_blocks: 0,
            num_pairs: 0,
        };
        let mut start = 0;
        for (index, &value) in query_start_loc.iter().enumerate() {
            let most = if index == 0 { 0 } else { slot_mapping.len() };
            match usize::try_from(value) {
                Ok(end) if (start..=most).contains(&end) => {
                    if index > 0 {
                        let row = &block_table[row_of(index - 1)? * columns..][..columns];
                        batch.add(index - 1, start, end - start, seq_lens[index - 1], row)?;
                    }
                    start = end;
                }
                _ => return Err(BatchError::QueryStart { index, value, least: start, most }),
            }
        }
        for (index, &value) in slot_mapping.iter().enumerate() {
            match value {
                -1 => {}
                0.. => batch.num_blocks = batch.num_blocks.max(value as usize / block_size + 1),
                _ => return Err(BatchError::Slot { index, value }),
            }
        }
        batch.split();
        Ok(batch)
    }

    /// The same step, in which some tokens also see tokens behind them: those of an image see all of it.
    ///
    /// # Arguments
    ///
    /// * `visible`: `[num_tokens]`, how many tokens of its sequence each token sees, from the first on: at least its own
    ///   position + 1. In a request it must not decrease. Of padding it is not looked at.
    ///
    /// # Errors
    ///
    /// See [`BatchError`].
    pub fn seeing(mut self, visible: &[i32]) -> Result<Self, BatchError> {
        if visible.len() != self.num_tokens {
            let (found, expected) = (visible.len(), self.num_tokens);
            return Err(BatchError::Length { name: "visible", found, expected, num_reqs: self.spans.len() });
        }
        let mut ends = vec![0; self.num_tokens];
        for span in &self.spans {
            let mut least = span.seq_len - span.num_tokens;
            for index in span.start..span.start + span.num_tokens {
                least = least.max(span.seq_len - span.num_tokens + index - span.start + 1);
                let (value, most) = (visible[index], span.seq_len);
                let end = usize::try_from(value).ok().filter(|end| (least..=most).contains(end));
                least = end.ok_or(BatchError::Visible { index, value, least, most })?;
                ends[index] = least as u32;
            }
        }
        self.visible = ends;
        self.split();
        Ok(self)
    }

    fn add(
        &mut self,
        request: usize,
        start: usize,
        num_tokens: usize,
        seq_len: i32,
        row: &[i32],
    ) -> Result<(), BatchError> {
        let most = row.len().saturating_mul(self.block_size);
        let length = usize::try_from(seq_len).ok().filter(|length| (num_tokens..=most).contains(length));
        let Some(length) = length else {
            return Err(BatchError::SeqLen { index: request, value: seq_len, least: num_tokens, most });
        };
        let first_block = self.blocks.len();
        let row = &row[..length.div_ceil(self.block_size)];
        for (column, &value) in row.iter().enumerate() {
            let Ok(block) = u32::try_from(value) else {
                return Err(BatchError::Block { request, column, value });
            };
            self.num_blocks = self.num_blocks.max(block as usize + 1);
            self.blocks.push(block);
        }
        self.spans.push(Span { start, num_tokens, seq_len: length, first_block, num_blocks: row.len() });
        Ok(())
    }

    /// The last part of a prompt attends to most: it comes first, so that no thread ends long after the others.
    fn split(&mut self) {
        self.parts.clear();
        self.num_pairs = 0;
        for (index, span) in self.spans.iter().enumerate() {
            let num_parts = span.num_tokens.div_ceil(TILE_TOKENS);
            for part in (0..num_parts).rev() {
                let first = part * TILE_TOKENS;
                let num_tokens = TILE_TOKENS.min(span.num_tokens - first);
                let position = span.seq_len - span.num_tokens + first;
                let last = span.start + first + num_tokens - 1;
                let seen = self.visible.get(last).map_or(position + num_tokens, |&end| end as usize);
                self.num_pairs = self.num_pairs.saturating_add(num_tokens.saturating_mul(seen));
                self.parts.push(Part { span: index, first, num_tokens });
            }
        }
    }

    /// Tokens of the flattened batch, padding included.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Tokens of a block.
    #[must_use]
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks a cache needs to have for this batch.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Pairs of a query token and a token that it attends to, about: what attention costs per query head.
    #[must_use]
    pub fn num_pairs(&self) -> usize {
        self.num_pairs
    }

    pub(crate) fn spans(&self) -> &[Span] {
        &self.spans
    }

    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }

    pub(crate) fn blocks(&self, span: &Span) -> &[u32] {
        &self.blocks[span.first_block..][..span.num_blocks]
    }

    /// Where what each of some tokens sees ends; empty: behind the token itself.
    pub(crate) fn visible(&self, tokens: Range<usize>) -> &[u32] {
        if self.visible.is_empty() { &[] } else { &self.visible[tokens] }
    }

    pub(crate) fn slot_mapping(&self) -> &[i32] {
        &self.slot_mapping
    }
}
