//! Attention written plainly: one query, one head and one key at a time, in 64 bits. What every kernel is compared with.

use half::bf16;

use crate::{
    attention::{
        AttentionError, CacheLayout, TokenRows,
        batch::RaggedBatch,
        cached::{Cached, Int8Head},
        check_attend,
        options::AttentionOptions,
    },
    element::Element,
    number::Number,
};

/// How a cache keeps a head, plainly.
pub trait PlainHead: Cached {
    /// The features of a head.
    fn features(head: &[Self]) -> Vec<f64>;
    /// A head with these features.
    fn kept(features: &[f32]) -> Vec<Self>;
}

impl PlainHead for f32 {
    fn features(head: &[Self]) -> Vec<f64> {
        head.iter().map(|&x| f64::from(x)).collect()
    }
    fn kept(features: &[f32]) -> Vec<Self> {
        features.to_vec()
    }
}

impl PlainHead for bf16 {
    fn features(head: &[Self]) -> Vec<f64> {
        head.iter().map(|x| f64::from(x.to_f32())).collect()
    }
    fn kept(features: &[f32]) -> Vec<Self> {
        features.iter().map(|&x| Self::from_f32(x)).collect()
    }
}

impl PlainHead for Int8Head {
    fn features(head: &[Self]) -> Vec<f64> {
        let (numbers, scale) = head.split_at(head.len() - Self::SCALE_LEN);
        let bytes: Vec<u8> = scale.iter().map(|byte| byte.0.cast_unsigned()).collect();
        let scale = bytes.try_into().map_or(f32::NAN, f32::from_ne_bytes);
        numbers.iter().map(|number| f64::from(number.0) * f64::from(scale)).collect()
    }
    fn kept(features: &[f32]) -> Vec<Self> {
        let mut largest = 0.0_f32;
        for &x in features {
            if !x.is_finite() {
                largest = f32::NAN;
            } else if x.abs() > largest {
                largest = x.abs();
            }
        }
        let is_zero = (127.0 / largest).is_infinite();
        let number = |x: f32| {
            let number = x * (127.0 / largest);
            if is_zero || number.is_nan() { 0 } else { number.round_ties_even() as i8 }
        };
        let scale = if is_zero { 0.0 } else { largest / 127.0 };
        let bytes = scale.to_ne_bytes().map(u8::cast_signed);
        features.iter().map(|&x| number(x)).chain(bytes).map(Self).collect()
    }
}

/// See [`crate::attend`].
///
/// # Errors
///
/// As there.
pub fn attend<E: Element, C: PlainHead>(
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
    let (dim, head_len) = (layout.head_dim, layout.head_dim + C::SCALE_LEN);
    let (keys, values) = cache.split_at(cache.len() / 2);
    for span in batch.spans() {
        let blocks = batch.blocks(span);
        for i in 0..span.num_tokens {
            let position = span.seq_len - span.num_tokens + i;
            let token = span.start + i;
            let end = batch.visible(token..token + 1).first().map_or(position + 1, |&end| end as usize);
            let window = options.sliding_window.map_or(position + 1, |window| window.get() as usize);
            for head in 0..num_heads {
                let q = &query.row(span.start + i, num_heads * dim)[head * dim..][..dim];
                let kv_head = head / (num_heads / layout.num_kv_heads);
                let place = |j: usize| {
                    let slot =
                        blocks[j / layout.block_size] as usize * layout.block_size + j % layout.block_size;
                    let start = (slot * layout.num_kv_heads + kv_head) * head_len;
                    start..start + head_len
                };
                let seen = (position + 1).saturating_sub(window)..end;
                let scores: Vec<f64> = seen
                    .clone()
                    .map(|j| {
                        let mut score = dot(q, &C::features(&keys[place(j)])) * f64::from(options.scale);
                        if let Some(cap) = options.soft_cap {
                            score = f64::from(cap) * (score / f64::from(cap)).tanh();
                        }
                        let slope = options.alibi_slopes.get(head).map_or(0.0, |&slope| f64::from(slope));
                        score + slope * (j as f64 - position as f64)
                    })
                    .collect();
                let sink = options.sinks.get(head).map_or(f64::NEG_INFINITY, |&sink| f64::from(sink));
                let largest = scores.iter().copied().fold(sink, f64::max);
                let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                let sum: f64 = weights.iter().sum::<f64>() + (sink - largest).exp();
                let seen_values: Vec<Vec<f64>> = seen.map(|j| C::features(&values[place(j)])).collect();
                for d in 0..dim {
                    let terms = seen_values.iter().zip(&weights).map(|(value, p)| p * value[d]);
                    let at = ((span.start + i) * num_heads + head) * dim + d;
                    out[at] = E::narrow((terms.sum::<f64>() / sum) as f32);
                }
            }
        }
    }
    Ok(())
}

fn dot<E: Number>(a: &[E], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a.widen()) * b).sum()
}

/// See [`crate::write_kv`], of whose checks the caller makes sure.
pub fn write_kv<E: Element, C: PlainHead>(
    batch: &RaggedBatch,
    key: TokenRows<'_, E>,
    value: TokenRows<'_, E>,
    cache: &mut [C],
    layout: CacheLayout,
) {
    let (row, dim, head_len) = (layout.row(), layout.head_dim, layout.head_dim + C::SCALE_LEN);
    let half = cache.len() / 2;
    for (token, &slot) in batch.slot_mapping().iter().enumerate() {
        if slot >= 0 {
            for head in 0..layout.num_kv_heads {
                let place = (slot as usize * layout.num_kv_heads + head) * head_len;
                for (rows, start) in [(&key, place), (&value, half + place)] {
                    let features: Vec<f32> =
                        rows.row(token, row)[head * dim..][..dim].iter().map(|x| x.widen()).collect();
                    cache[start..start + head_len].copy_from_slice(&C::kept(&features));
                }
            }
        }
    }
}
