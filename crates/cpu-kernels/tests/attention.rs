//! Every kernel that this machine has against the reference, on random ragged batches, and what must not change a bit.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::num::NonZeroU32;

use common::{Case, Step, cases};
use cpu_kernels::{
    AttentionError, AttentionOptions, BatchError, CacheElement, CacheLayout, Element, Int8Head, Kernel,
    RaggedBatch, Threads, TokenRows, attend,
    reference::{self, PlainHead},
    write_kv,
};
use half::bf16;
use proptest::prelude::*;

/// The reference on the same step, with its own way of writing.
fn expected<E: Element, C: PlainHead + CacheElement<E>>(
    step: &Step<E, C>,
    options: &AttentionOptions<'_>,
) -> Vec<E> {
    let (batch, mut cache) = (step.batch(), step.cache.clone());
    reference::write_kv(&batch, step.rows(&step.key), step.rows(&step.value), &mut cache, step.layout);
    let mut out = vec![E::narrow(0.0); step.query.len()];
    reference::attend(&batch, step.rows(&step.query), step.num_heads, &cache, step.layout, options, &mut out)
        .unwrap();
    out
}

fn assert_close<E: Element>(found: &[E], expected: &[E], tolerance: f32, kernel: &Kernel) {
    assert_eq!(found.len(), expected.len());
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        let (a, b) = (a.widen(), b.widen());
        assert!((a - b).abs() <= tolerance, "{}: out[{i}] is {a}, expected {b}", kernel.name());
    }
}

fn check_all<E: Element, C: PlainHead + CacheElement<E>>(
    case: &Case,
    options: &AttentionOptions<'_>,
    tolerance: f32,
) {
    check_step(&Step::<E, C>::all(case), case, options, tolerance);
}

fn check_step<E: Element, C: PlainHead + CacheElement<E>>(
    step: &Step<E, C>,
    case: &Case,
    options: &AttentionOptions<'_>,
    tolerance: f32,
) {
    let expected = expected(step, options);
    let threads = Threads::new(1).unwrap();
    for kernel in Kernel::available().iter().filter(|kernel| kernel.takes(case.head_dim)) {
        assert_close(&step.run(kernel, &threads, options), &expected, tolerance, kernel);
    }
}

/// A sink per query head: some below all scores, some above them.
fn sinks_of(case: &Case) -> Vec<f32> {
    (0..case.num_kv_heads * case.group).map(|head| [2.0, -1.5, 40.0, -60.0, 0.0][head % 5]).collect()
}

fn bits(out: &[f32]) -> Vec<u32> {
    out.iter().map(|x| x.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Scores of up to 64, known to about 10⁻⁵ in 32 bits.
    #[test]
    fn equals_the_reference(case in cases(), scale in 0.05_f32..0.5) {
        check_all::<f32, f32>(&case, &AttentionOptions::causal(scale), 5e-6);
    }

    /// Sums have 32 bits whatever the cache holds, so what it lost is lost in the reference, too.
    #[test]
    fn equals_the_reference_over_a_cache_in_fewer_bits(case in cases(), scale in 0.05_f32..0.5) {
        let options = AttentionOptions::causal(scale);
        check_all::<f32, bf16>(&case, &options, 5e-6);
        check_all::<f32, Int8Head>(&case, &options, 5e-6);
        check_all::<bf16, Int8Head>(&case, &options, 4e-3);
        let wide = Step::<f32>::all(&case);
        let exact = expected(&wide, &options);
        for (narrow, what) in [
            (expected(&Step::<f32, bf16>::all(&case), &options), "bf16"),
            (expected(&Step::<f32, Int8Head>::all(&case), &options), "int8"),
        ] {
            prop_assert_ne!(bits(&narrow), bits(&exact), "{} rounded nothing", what);
            prop_assert!(narrow.iter().zip(&exact).all(|(a, b)| (a - b).abs() < 0.1), "{} is far off", what);
        }
    }

    /// What `bf16` loses in the output is 2⁻⁹ of numbers up to 1.
    #[test]
    fn equals_the_reference_in_bf16(case in cases()) {
        check_all::<bf16, bf16>(&case, &AttentionOptions::causal(0.3), 4e-3);
    }

    #[test]
    fn equals_the_reference_with_options(
        case in cases(),
        window in prop::option::of(1_u32..200),
        soft_cap in prop::option::of(0.5_f32..30.0),
        alibi in any::<bool>(),
        has_sinks in any::<bool>(),
    ) {
        let slopes: Vec<f32> = (1..=case.num_kv_heads * case.group).map(|head| 0.5_f32.powi(head as i32)).collect();
        let sinks = sinks_of(&case);
        let options = AttentionOptions {
            scale: 0.8,
            sliding_window: window.and_then(NonZeroU32::new),
            soft_cap,
            alibi_slopes: if alibi { &slopes } else { &[] },
            sinks: if has_sinks { &sinks } else { &[] },
        };
        check_all::<f32, f32>(&case, &options, 2e-5);
        check_all::<f32, bf16>(&case, &options, 2e-5);
        check_all::<f32, Int8Head>(&case, &options, 2e-5);
    }

    /// Images, some of which begin before the step; windows may be shorter than they are.
    #[test]
    fn equals_the_reference_where_tokens_see_what_follows(
        case in cases(),
        window in prop::option::of(1_u32..120),
        alibi in any::<bool>(),
        has_sinks in any::<bool>(),
    ) {
        let slopes: Vec<f32> = (1..=case.num_kv_heads * case.group).map(|head| 0.01 * head as f32).collect();
        let sinks = sinks_of(&case);
        let options = AttentionOptions {
            sliding_window: window.and_then(NonZeroU32::new),
            alibi_slopes: if alibi { &slopes } else { &[] },
            sinks: if has_sinks { &sinks } else { &[] },
            ..AttentionOptions::causal(0.5)
        };
        let every: Vec<usize> = (0..case.requests.len()).collect();
        check_step(&Step::<f32, f32>::all(&case).with_images(&case, &every), &case, &options, 2e-5);
        check_step(&Step::<f32, bf16>::all(&case).with_images(&case, &every), &case, &options, 2e-5);
        check_step(&Step::<f32, Int8Head>::all(&case).with_images(&case, &every), &case, &options, 2e-5);
        check_step(&Step::<bf16, bf16>::all(&case).with_images(&case, &every), &case, &options, 4e-3);
        check_step(&Step::<bf16, Int8Head>::all(&case).with_images(&case, &every), &case, &options, 4e-3);
    }

    #[test]
    fn tokens_that_see_what_follows_have_the_same_bits_in_company_and_in_chunks(
        case in cases(),
        cut in any::<prop::sample::Index>(),
    ) {
        check_images::<f32>(&case, cut);
        check_images::<bf16>(&case, cut);
        check_images::<Int8Head>(&case, cut);
    }

    #[test]
    fn a_request_alone_has_the_same_bits_as_in_company(case in cases()) {
        check_alone::<f32>(&case);
        check_alone::<bf16>(&case);
        check_alone::<Int8Head>(&case);
    }

    /// A prompt in two chunks, or with its last token as a decode, has the bits of the whole prompt.
    #[test]
    fn chunks_of_a_prompt_have_the_bits_of_the_whole(case in cases(), cut in any::<prop::sample::Index>()) {
        let total = case.requests[0].0 + case.requests[0].1;
        prop_assume!(total >= 2);
        let whole = Case { requests: vec![(0, total)], ..case.clone() };
        let cut = cut.index(total - 1) + 1;
        check_chunks::<f32>(&whole, cut);
        check_chunks::<bf16>(&whole, cut);
        check_chunks::<Int8Head>(&whole, cut);
    }

    #[test]
    fn writing_touches_the_named_slots_alone(case in cases()) {
        check_writing::<f32>(&case);
        check_writing::<bf16>(&case);
        check_writing::<Int8Head>(&case);
    }
}

/// The cache that queries of `f32` meet holds `C`.
fn check_alone<C: PlainHead + CacheElement<f32>>(case: &Case) {
    let sinks = sinks_of(case);
    let options = AttentionOptions { sinks: &sinks, ..AttentionOptions::causal(0.7) };
    let together = Step::<f32, C>::all(case);
    let (alone, both) = (Threads::new(1).unwrap(), Threads::new(3).unwrap());
    for kernel in Kernel::available().iter().filter(|kernel| kernel.takes(case.head_dim)) {
        let out = bits(&together.run(kernel, &both, &options));
        for request in 0..case.requests.len() {
            let step = Step::<f32, C>::new(case, &[request]);
            let row = step.num_heads * case.head_dim;
            let start = together.query_start_loc[request] as usize * row;
            let own = bits(&step.run(kernel, &alone, &options));
            assert_eq!(&out[start..][..own.len()], &own[..], "{}", kernel.name());
        }
    }
}

/// Likewise. A step may begin within an image, whose first tokens an earlier step has computed with all of it.
fn check_images<C: PlainHead + CacheElement<f32>>(case: &Case, cut: prop::sample::Index) {
    let sliding_window = NonZeroU32::new(1 + (case.seed % 90) as u32);
    let options = AttentionOptions { sliding_window, ..AttentionOptions::causal(0.7) };
    let (one, three) = (Threads::new(1).unwrap(), Threads::new(3).unwrap());
    let every: Vec<usize> = (0..case.requests.len()).collect();
    let together = Step::<f32, C>::all(case).with_images(case, &every);
    let row = together.num_heads * case.head_dim;
    let kernels = Kernel::available().iter().filter(|kernel| kernel.takes(case.head_dim));
    for kernel in kernels {
        let out = bits(&together.run(kernel, &three, &options));
        for &request in &every {
            let mut step = Step::<f32, C>::new(case, &[request]).with_images(case, &[request]);
            let start = together.query_start_loc[request] as usize * row;
            let own = &out[start..][..step.query.len()];
            assert_eq!(own, &bits(&step.run(kernel, &one, &options))[..], "{}", kernel.name());
            let cut = cut.index(case.requests[request].1);
            let rest = bits(&rest_of(&step, cut).run(kernel, &one, &options));
            assert_eq!(&own[cut * row..], &rest[..], "{}", kernel.name());
            // A text says so of each token, or says nothing.
            let first = step.seq_lens[0] - step.query_start_loc[1];
            step.visible = (first + 1..=step.seq_lens[0]).collect();
            let text = bits(&step.run(kernel, &one, &options));
            step.visible.clear();
            assert_eq!(text, bits(&step.run(kernel, &one, &options)), "{}", kernel.name());
        }
    }
}

/// Likewise.
fn check_chunks<C: PlainHead + CacheElement<f32>>(whole: &Case, cut: usize) {
    let step = Step::<f32, C>::all(whole);
    let sinks = sinks_of(whole);
    let sliding_window = NonZeroU32::new(1 + (whole.seed % 90) as u32);
    let options = AttentionOptions { sinks: &sinks, sliding_window, ..AttentionOptions::causal(0.7) };
    let threads = Threads::new(1).unwrap();
    let row = step.num_heads * whole.head_dim;
    for kernel in Kernel::available().iter().filter(|kernel| kernel.takes(whole.head_dim)) {
        let out = bits(&step.run(kernel, &threads, &options));
        let rest = bits(&rest_of(&step, cut).run(kernel, &threads, &options));
        assert_eq!(&out[cut * row..], &rest[..], "{}", kernel.name());
    }
}

/// Numbers that are hard to round among them: halfway between two of `bf16`, too small and too large for it, infinite, NaN.
fn check_writing<C: PlainHead + CacheElement<f32>>(case: &Case) {
    let mut step = Step::<f32, C>::all(case);
    let last = step.key.len() - 1;
    let hard = [0x3f80_8000, 0x3f81_8000, 0x0000_8001, 0x7f7f_ffff, 0xff80_0000, 0x7f80_0001, 0x8000_0000];
    for (i, number) in hard.into_iter().enumerate() {
        let number = f32::from_bits(number);
        if number.is_finite() {
            step.key[(5 * i).min(last)] = number;
        }
        step.value[last - i.min(last)] = number;
    }
    if step.slot_mapping.len() > 1 {
        step.slot_mapping[0] = -1;
    }
    let (batch, mut expected) = (step.batch(), step.cache.clone());
    reference::write_kv(&batch, step.rows(&step.key), step.rows(&step.value), &mut expected, step.layout);
    let bits = |cache: &[C]| -> Vec<u64> {
        let heads = cache.chunks(step.layout.head_dim + C::SCALE_LEN);
        heads.flat_map(C::features).map(f64::to_bits).collect()
    };
    assert!(bits(&expected) != bits(&step.cache), "nothing was written");
    for kernel in Kernel::available() {
        let mut cache = step.cache.clone();
        write_kv(&batch, step.rows(&step.key), step.rows(&step.value), &mut cache, step.layout, kernel)
            .unwrap();
        assert!(bits(&cache) == bits(&expected), "{}", kernel.name());
    }
}

/// The step that computes one request's tokens from `cut` on, those before being in the cache.
fn rest_of<C: PlainHead + CacheElement<f32>>(step: &Step<f32, C>, cut: usize) -> Step<f32, C> {
    let (row, kernel) = (step.layout.row(), Kernel::best_for_products());
    let mut cache = step.cache.clone();
    write_kv(&step.batch(), step.rows(&step.key), step.rows(&step.value), &mut cache, step.layout, kernel)
        .unwrap();
    Step {
        layout: step.layout,
        num_heads: step.num_heads,
        query_start_loc: vec![0, step.query_start_loc[1] - cut as i32],
        seq_lens: step.seq_lens.clone(),
        block_table: step.block_table.clone(),
        slot_mapping: step.slot_mapping[cut..].to_vec(),
        visible: step.visible.get(cut..).unwrap_or_default().to_vec(),
        query: step.query[cut * step.num_heads * step.layout.head_dim..].to_vec(),
        key: step.key[cut * row..].to_vec(),
        value: step.value[cut * row..].to_vec(),
        cache,
    }
}

#[test]
fn this_machine_has_more_than_one_kernel_and_the_best_takes_the_heads() {
    let names: Vec<_> = Kernel::available().iter().map(|kernel| kernel.name()).collect();
    assert!(names.ends_with(&["portable", "scalar"]), "{names:?}");
    for head_dim in [1, 5, 8, 24, 64, 128, 256] {
        assert!(Kernel::best(head_dim).takes(head_dim));
    }
    assert_eq!(Kernel::best(5).name(), "scalar");
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        assert_eq!((Kernel::best(64).name(), Kernel::best(24).name()), ("avx512", "avx2"));
    }
}

#[test]
fn a_sink_takes_its_share_of_the_softmax_and_has_no_value() {
    let case = case(150, 9);
    let step = Step::<f32>::all(&case);
    let threads = Threads::new(1).unwrap();
    let run = |kernel: &Kernel, sinks: &[f32]| {
        step.run(kernel, &threads, &AttentionOptions { sinks, ..AttentionOptions::causal(0.4) })
    };
    for kernel in Kernel::available().iter().filter(|kernel| kernel.takes(case.head_dim)) {
        let without = run(kernel, &[]);
        // A sink that is as good as none changes nothing; one above all scores leaves nothing.
        assert_eq!(bits(&run(kernel, &[f32::NEG_INFINITY; 4])), bits(&without), "{}", kernel.name());
        assert!(run(kernel, &[90.0; 4]).iter().all(|x| x.abs() < 1e-30), "{}", kernel.name());
        let with = run(kernel, &[f32::NEG_INFINITY, 3.0, f32::NEG_INFINITY, 3.0]);
        for (i, (a, b)) in with.chunks(16).zip(without.chunks(16)).enumerate() {
            let share = a[0] / b[0];
            let expected = if i % 2 == 0 { 1.0..=1.0 } else { 0.5..=0.99 };
            assert!(expected.contains(&share), "{share}");
            assert!(
                a.iter().zip(b).all(|(a, b)| (a - share * b).abs() < 1e-6),
                "one factor for all features"
            );
        }
    }
}

/// One request with `computed` + `new` tokens.
fn case(computed: usize, new: usize) -> Case {
    Case { requests: vec![(computed, new)], block_size: 4, num_kv_heads: 2, group: 2, head_dim: 16, seed: 7 }
}

#[test]
fn a_value_that_is_no_number_reaches_the_tokens_that_see_it_and_no_other() {
    check_not_a_number::<f32>();
    check_not_a_number::<bf16>();
    check_not_a_number::<Int8Head>();
}

fn check_not_a_number<C: PlainHead + CacheElement<f32>>() {
    let mut step = Step::<f32, C>::all(&case(0, 70));
    let row = step.layout.row();
    step.key[40 * row..][..16].fill(f32::NAN); // token 40, KV head 0
    for kernel in Kernel::available() {
        let out = step.run(kernel, &Threads::new(1).unwrap(), &AttentionOptions::causal(1.0));
        for (i, x) in out.iter().enumerate() {
            let (token, head) = (i / (4 * 16), i / 16 % 4);
            assert_eq!(x.is_nan(), token >= 40 && head < 2, "{}: token {token}, head {head}", kernel.name());
        }
    }
}

#[test]
fn scores_far_apart_neither_overflow_nor_vanish() {
    let step = Step::<f32>::all(&case(100, 3));
    for scale in [0.0, 1e-30, 500.0, 1e6] {
        let options = AttentionOptions::causal(scale);
        let expected = expected(&step, &options);
        for kernel in Kernel::available() {
            // A score of 10⁶ is known to 0.06 only, so where two are close the weights may be anything between.
            let out = step.run(kernel, &Threads::new(1).unwrap(), &options);
            assert!(out.iter().all(|x| x.abs() <= 1.001));
            if scale <= 500.0 {
                assert_close(&out, &expected, if scale > 1.0 { 2e-3 } else { 3e-6 }, kernel);
            }
        }
    }
}

#[test]
fn queries_may_lie_apart_and_padding_gets_zeros() {
    let mut step = Step::<f32>::all(&case(10, 3));
    let kernel = Kernel::best(16);
    let (threads, options) = (Threads::new(1).unwrap(), AttentionOptions::causal(0.4));
    let close = step.run(kernel, &threads, &options);
    let row = 4 * 16;
    step.slot_mapping.push(-1); // a padded token
    let (batch, mut cache) = (step.batch(), step.cache.clone());
    let apart = |data: &[f32], row: usize| {
        let mut apart = vec![f32::NAN; 3 * row * 4];
        for token in 0..3 {
            apart[token * 3 * row..][..row].copy_from_slice(&data[token * row..][..row]);
        }
        apart
    };
    let (query, key, value) = (apart(&step.query, row), apart(&step.key, 32), apart(&step.value, 32));
    let rows = |data, row| TokenRows { data, stride: 3 * row };
    write_kv(&batch, rows(&key[..], 32), rows(&value[..], 32), &mut cache, step.layout, kernel).unwrap();
    let mut out = vec![f32::NAN; 4 * row];
    attend(&batch, rows(&query[..], row), 4, &cache, step.layout, &options, kernel, &threads, &mut out)
        .unwrap();
    assert_eq!(bits(&out[..3 * row]), bits(&close));
    assert!(out[3 * row..].iter().all(|&x| x == 0.0));
}

#[test]
fn bad_batches_are_refused_with_the_value_and_the_limit() {
    let new = RaggedBatch::new;
    assert_eq!(new(0, &[0], &[], &[], &[]).unwrap_err(), BatchError::BlockSize);
    let error = new(4, &[0, 1], &[9], &[1, 2], &[0]).unwrap_err();
    assert_eq!(error, BatchError::SeqLen { index: 0, value: 9, least: 1, most: 8 });
    assert!(error.to_string().contains("seq_lens[0] is 9"), "{error}");
    assert!(matches!(new(4, &[0, 2], &[1], &[1], &[0, 1]).unwrap_err(), BatchError::SeqLen { least: 2, .. }));
    assert!(matches!(new(4, &[0, 1], &[-1], &[1], &[0]).unwrap_err(), BatchError::SeqLen { value: -1, .. }));
    assert!(matches!(
        new(4, &[0, 2], &[2], &[1], &[0]).unwrap_err(),
        BatchError::QueryStart { index: 1, most: 1, .. }
    ));
    assert!(matches!(
        new(4, &[1, 1], &[1], &[1], &[0]).unwrap_err(),
        BatchError::QueryStart { index: 0, .. }
    ));
    let error = new(4, &[0, 2, 1], &[2, 1], &[1, 1], &[0, 1]).unwrap_err();
    assert!(matches!(error, BatchError::QueryStart { index: 2, value: 1, least: 2, most: 2 }));
    let error = new(4, &[0, 1], &[5], &[1, -2], &[0]).unwrap_err();
    assert_eq!(error, BatchError::Block { request: 0, column: 1, value: -2 });
    assert_eq!(new(4, &[0, 1], &[1], &[1], &[-2]).unwrap_err(), BatchError::Slot { index: 0, value: -2 });
    assert!(matches!(new(4, &[0, 1], &[1, 1], &[1], &[0]).unwrap_err(), BatchError::Length { .. }));
    assert!(matches!(new(4, &[0, 1, 2], &[1, 1], &[1; 3], &[0; 2]).unwrap_err(), BatchError::Length { .. }));
    assert_eq!(new(4, &[0], &[], &[], &[]).unwrap().num_tokens(), 0);
}

#[test]
fn what_tokens_see_is_checked() {
    // A decode, and three tokens behind one that was computed.
    let batch = || RaggedBatch::new(4, &[0, 1, 4], &[3, 4], &[1, 2], &[0, 1, 2, 3, -1]).unwrap();
    batch().seeing(&[3, 2, 3, 4, 0]).unwrap();
    batch().seeing(&[3, 4, 4, 4, -7]).unwrap();
    let refused = |visible: &[i32]| batch().seeing(visible).unwrap_err();
    let wrong = |index, value, least, most| BatchError::Visible { index, value, least, most };
    assert_eq!(refused(&[4, 2, 3, 4, 0]), wrong(0, 4, 3, 3));
    assert_eq!(refused(&[2, 2, 3, 4, 0]), wrong(0, 2, 3, 3));
    assert_eq!(refused(&[-1, 2, 3, 4, 0]), wrong(0, -1, 3, 3));
    assert_eq!(refused(&[3, i32::MAX, 3, 4, 0]), wrong(1, i32::MAX, 2, 4));
    assert_eq!(refused(&[3, 4, 3, 4, 0]), wrong(2, 3, 4, 4));
    assert!(matches!(
        refused(&[3, 2, 3, 4]),
        BatchError::Length { name: "visible", found: 4, expected: 5, .. }
    ));
    assert!(refused(&[4, 2, 3, 4, 0]).to_string().contains("visible[0] is 4"));
}

#[test]
fn arrays_that_do_not_fit_are_refused_and_nothing_is_written() {
    let step = Step::<f32>::all(&case(10, 3));
    let (batch, layout) = (step.batch(), step.layout);
    let (threads, options, kernel) =
        (Threads::new(1).unwrap(), AttentionOptions::causal(0.4), Kernel::best(16));
    let attend_with = |layout: CacheLayout, num_heads, cache: &[f32], query: &[f32], slopes: &[f32], size| {
        let mut out = vec![7.0; size];
        let options = AttentionOptions { alibi_slopes: slopes, ..options };
        let rows = TokenRows { data: query, stride: 64 };
        let error = attend(&batch, rows, num_heads, cache, layout, &options, kernel, &threads, &mut out);
        assert_eq!(error.is_err(), bits(&out) == bits(&vec![7.0; size]));
        error
    };
    let (cache, query) = (&step.cache[..], &step.query[..]);
    attend_with(layout, 4, cache, query, &[], 192).unwrap();
    let is = |error: Result<(), AttentionError>, text: &str| {
        let error = error.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    is(attend_with(layout, 3, cache, query, &[], 192), "num_heads is 3");
    is(attend_with(layout, 0, cache, query, &[], 192), "num_heads is 0");
    is(attend_with(layout, 4, &cache[1..], query, &[], 192), "kv_cache has");
    is(attend_with(layout, 4, cache, &query[1..], &[], 192), "query has 191 elements");
    is(attend_with(layout, 8, cache, query, &[], 384), "lie 64 elements apart, but each has 128");
    is(attend_with(layout, 4, cache, query, &[], 191), "out has 191");
    is(attend_with(layout, 4, cache, query, &[1.0], 192), "alibi_slopes has 1");
    let mut out = vec![7.0; 192];
    let short = AttentionOptions { sinks: &[0.5; 3], ..options };
    let rows = TokenRows { data: query, stride: 64 };
    is(attend(&batch, rows, 4, cache, layout, &short, kernel, &threads, &mut out), "sinks has 3");
    assert_eq!(bits(&out), bits(&[7.0; 192]), "nothing is written");
    is(attend_with(CacheLayout { head_dim: 0, ..layout }, 4, cache, query, &[], 192), "head_dim is 0");
    is(
        attend_with(
            CacheLayout { block_size: 8, num_blocks: layout.num_blocks / 2, ..layout },
            4,
            cache,
            query,
            &[],
            192,
        ),
        "",
    );
    let small = CacheLayout { num_blocks: 2, ..layout };
    is(attend_with(small, 4, &cache[..2 * 2 * 4 * 32], query, &[], 192), "but the cache has 2 blocks");
    let huge = CacheLayout { num_blocks: usize::MAX, ..layout };
    is(attend_with(huge, 4, cache, query, &[], 192), "kv_cache has");
    let odd = CacheLayout { head_dim: 8, num_kv_heads: 4, ..layout };
    let outcome = attend_with(odd, 4, cache, query, &[], 96);
    if kernel.takes(8) {
        outcome.unwrap(); // as AVX2 does, whose vectors have eight lanes
    } else {
        is(outcome, "does not take heads of 8");
    }

    let mut cache = step.cache.clone();
    let short = TokenRows { data: &step.key[1..], stride: 32 };
    is(write_kv(&batch, short, step.rows(&step.value), &mut cache, layout, kernel), "key has 95 elements");
    is(write_kv(&batch, step.rows(&step.key), short, &mut cache, layout, kernel), "value has 95 elements");
    assert_eq!(bits(&cache), bits(&step.cache));
}
