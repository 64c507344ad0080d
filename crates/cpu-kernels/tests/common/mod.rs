//! Random ragged batches for the tests: requests whose blocks lie scattered in a cache full of NaN.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(unreachable_pub, reason = "a module of tests; each test that names it sees all of it")]

mod numbers;

use cpu_kernels::{
    AttentionOptions, CacheElement, CacheLayout, Element, Kernel, RaggedBatch, Threads, TokenRows, attend,
    reference::PlainHead, write_kv,
};
use numbers::Numbers;
use proptest::prelude::*;

/// Shape of a case; everything else follows from the seed.
#[derive(Debug, Clone)]
pub struct Case {
    /// (tokens computed before, new tokens) of each request.
    pub requests: Vec<(usize, usize)>,
    pub block_size: usize,
    pub num_kv_heads: usize,
    pub group: usize,
    pub head_dim: usize,
    pub seed: u64,
}

pub fn cases() -> impl Strategy<Value = Case> {
    let request = prop_oneof![
        (0_usize..300).prop_map(|computed| (computed, 1)),
        (1_usize..80).prop_map(|new| (0, new)),
        (0_usize..150, 1_usize..150),
    ];
    (
        prop::collection::vec(request, 1..5),
        prop::sample::select(vec![1, 4, 16]),
        1_usize..3,
        prop::sample::select(vec![1, 2, 4]),
        prop::sample::select(vec![8, 16, 24, 64, 80, 128, 5]),
        any::<u64>(),
    )
        .prop_map(|(requests, block_size, num_kv_heads, group, head_dim, seed)| Case {
            requests,
            block_size,
            num_kv_heads,
            group,
            head_dim,
            seed,
        })
}

/// Arrays of a step: queries, keys and values of `E`, a cache of `C`.
pub struct Step<E, C = E> {
    pub layout: CacheLayout,
    pub num_heads: usize,
    pub query_start_loc: Vec<i32>,
    pub seq_lens: Vec<i32>,
    pub block_table: Vec<i32>,
    pub slot_mapping: Vec<i32>,
    /// See [`RaggedBatch::seeing`]; empty: no token sees further than itself.
    pub visible: Vec<i32>,
    pub query: Vec<E>,
    pub key: Vec<E>,
    pub value: Vec<E>,
    /// With what was computed before; all else is NaN.
    pub cache: Vec<C>,
}

impl<E: Element, C: PlainHead + CacheElement<E>> Step<E, C> {
    /// The requests of a case, or some of them: a request's numbers are the same with any others.
    pub fn new(case: &Case, chosen: &[usize]) -> Self {
        let mut order = Numbers(case.seed);
        let requests: Vec<(usize, usize)> = chosen.iter().map(|&i| case.requests[i]).collect();
        let blocks_of = |&(computed, new): &(usize, usize)| (computed + new).div_ceil(case.block_size);
        let num_blocks = 3 + requests.iter().map(blocks_of).sum::<usize>();
        let mut free: Vec<usize> = (1..num_blocks).collect();
        for i in (1..free.len()).rev() {
            free.swap(i, order.bits() as usize % (i + 1));
        }
        let columns = 2 + requests.iter().map(blocks_of).max().unwrap_or(0);
        let layout = CacheLayout {
            num_blocks,
            block_size: case.block_size,
            num_kv_heads: case.num_kv_heads,
            head_dim: case.head_dim,
        };
        let (row, kept_row) = (layout.row(), layout.kept_row::<C>());
        let half = num_blocks * case.block_size * kept_row;
        let mut step = Self {
            layout,
            num_heads: case.num_kv_heads * case.group,
            query_start_loc: vec![0],
            seq_lens: Vec::new(),
            block_table: vec![i32::MAX; columns * requests.len()], // what is stale must not be read
            slot_mapping: Vec::new(),
            visible: Vec::new(),
            query: Vec::new(),
            key: Vec::new(),
            value: Vec::new(),
            cache: C::kept(&vec![f32::NAN; case.head_dim]).repeat(2 * half / kept_row * case.num_kv_heads),
        };
        for (index, (&which, request)) in chosen.iter().zip(&requests).enumerate() {
            let mut numbers = Numbers(case.seed ^ (which as u64 + 1));
            let blocks = free.split_off(free.len() - blocks_of(request));
            for (column, &block) in blocks.iter().enumerate() {
                step.block_table[index * columns + column] = block as i32;
            }
            for position in 0..request.0 + request.1 {
                let slot = blocks[position / case.block_size] * case.block_size + position % case.block_size;
                let (key, value) = (numbers.many::<E>(row), numbers.many::<E>(row));
                if position < request.0 {
                    for (numbers, start) in [(&key, slot * kept_row), (&value, half + slot * kept_row)] {
                        let wide: Vec<f32> = numbers.iter().map(|x| x.widen()).collect();
                        let kept: Vec<C> = wide.chunks(case.head_dim).flat_map(C::kept).collect();
                        step.cache[start..start + kept_row].copy_from_slice(&kept);
                    }
                } else {
                    step.slot_mapping.push(slot as i32);
                    step.key.extend(key);
                    step.value.extend(value);
                    step.query.extend(numbers.many::<E>(step.num_heads * case.head_dim));
                }
            }
            step.query_start_loc.push(step.slot_mapping.len() as i32);
            step.seq_lens.push((request.0 + request.1) as i32);
        }
        step
    }

    pub fn all(case: &Case) -> Self {
        Self::new(case, &(0..case.requests.len()).collect::<Vec<_>>())
    }

    /// Put images into the requests that are chosen: each token of an image sees up to its end. A request has the same images
    /// with any others, and its new tokens may begin within one.
    pub fn with_images(mut self, case: &Case, chosen: &[usize]) -> Self {
        self.visible.clear();
        for &which in chosen {
            let (computed, new) = case.requests[which];
            let mut numbers = Numbers(case.seed ^ ((0x1a6e << 16) | (which as u64 + 1)));
            let mut ends: Vec<usize> = (1..=computed + new).collect();
            let mut place = 0;
            loop {
                let start = place + numbers.bits() as usize % 40;
                place = start + 1 + numbers.bits() as usize % 90;
                if place > ends.len() {
                    break;
                }
                ends[start..place].fill(place);
            }
            self.visible.extend(ends[computed..].iter().map(|&end| end as i32));
        }
        self
    }

    pub fn batch(&self) -> RaggedBatch {
        let batch = RaggedBatch::new(
            self.layout.block_size,
            &self.query_start_loc,
            &self.seq_lens,
            &self.block_table,
            &self.slot_mapping,
        )
        .unwrap();
        if self.visible.is_empty() { batch } else { batch.seeing(&self.visible).unwrap() }
    }

    pub fn rows<'a>(&self, data: &'a [E]) -> TokenRows<'a, E> {
        TokenRows { data, stride: data.len() / self.slot_mapping.len() }
    }

    /// Write, then attend.
    pub fn run(&self, kernel: &Kernel, threads: &Threads, options: &AttentionOptions<'_>) -> Vec<E> {
        let (batch, mut cache) = (self.batch(), self.cache.clone());
        write_kv(&batch, self.rows(&self.key), self.rows(&self.value), &mut cache, self.layout, kernel)
            .unwrap();
        let mut out = vec![E::narrow(f32::NAN); self.query.len()];
        let query = self.rows(&self.query);
        attend(&batch, query, self.num_heads, &cache, self.layout, options, kernel, threads, &mut out)
            .unwrap();
        out
    }
}
