//! Attention written plainly: one query, one head and one key at a time, in 64 bits. What every kernel is compared with.

use crate::{
    attention::{
        AttentionError, CacheLayout, TokenRows, batch::RaggedBatch, check_attend, options::AttentionOptions,
    },
    element::Element,
    number::Number,
};

/// See [`crate::attend`].
///
/// # Errors
///
/// As there.
pub fn attend<E: Element, C: Number>(
    batch: &RaggedBatch,
    query: TokenRows<'_, E>,
    num_heads: usize,
    cache: &[C],
    layout: CacheLayout,
    options: &AttentionOptions<'_>,
    out: &mut [E],
) -> Result<(), AttentionError> {
    check_attend(batch, &query, num_heads, cache, layout, options, out)?;
    out.fill(E::narrow(0.0));
    let dim = layout.head_dim;
    let (keys, values) = cache.split_at(cache.len() / 2);
    for span in batch.spans() {
        let blocks = batch.blocks(span);
        for i in 0..span.num_tokens {
            let position = span.seq_len - span.num_tokens + i;
            let window = options.sliding_window.map_or(position + 1, |window| window.get() as usize);
            for head in 0..num_heads {
                let q = &query.row(span.start + i, num_heads * dim)[head * dim..][..dim];
                let kv_head = head / (num_heads / layout.num_kv_heads);
                let place = |j: usize| {
                    let slot =
                        blocks[j / layout.block_size] as usize * layout.block_size + j % layout.block_size;
                    (slot * layout.num_kv_heads + kv_head) * dim
                };
                let seen = (position + 1).saturating_sub(window)..position + 1;
                let scores: Vec<f64> = seen
                    .clone()
                    .map(|j| {
                        let mut score = dot(q, &keys[place(j)..][..dim]) * f64::from(options.scale);
                        if let Some(cap) = options.soft_cap {
                            score = f64::from(cap) * (score / f64::from(cap)).tanh();
                        }
                        let slope = options.alibi_slopes.get(head).map_or(0.0, |&slope| f64::from(slope));
                        score - slope * (position - j) as f64
                    })
                    .collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let sum: f64 = weights.iter().sum();
                for d in 0..dim {
                    let terms =
                        seen.clone().zip(&weights).map(|(j, p)| p * f64::from(values[place(j) + d].widen()));
                    let at = ((span.start + i) * num_heads + head) * dim + d;
                    out[at] = E::narrow((terms.sum::<f64>() / sum) as f32);
                }
            }
        }
    }
    Ok(())
}

fn dot<E: Number, C: Number>(a: &[E], b: &[C]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a.widen()) * f64::from(b.widen())).sum()
}

/// See [`crate::write_kv`], of whose checks the caller makes sure.
pub fn write_kv<E: Element, C: Number>(
    batch: &RaggedBatch,
    key: TokenRows<'_, E>,
    value: TokenRows<'_, E>,
    cache: &mut [C],
    layout: CacheLayout,
) {
    let row = layout.row();
    let half = cache.len() / 2;
    for (token, &slot) in batch.slot_mapping().iter().enumerate() {
        if slot >= 0 {
            for d in 0..row {
                cache[slot as usize * row + d] = C::narrow(key.row(token, row)[d].widen());
                cache[half + slot as usize * row + d] = C::narrow(value.row(token, row)[d].widen());
            }
        }
    }
}
