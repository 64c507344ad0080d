//! The bytes of a frame of metrics; that what goes in comes out is in `codec.rs`.

use ipc::EngineMessage;
use scheduler::{HistogramSnapshot, MetricsSnapshot};

/// A change here is a change of `PROTOCOL_VERSION`.
#[test]
fn the_bytes_of_a_frame_of_metrics_are_these() {
    let histogram = HistogramSnapshot { bounds: vec![1.0], counts: vec![3, 4], sum: -2.0 };
    let metrics =
        MetricsSnapshot { counters: vec![("a".into(), 2)], histograms: vec![("b".into(), histogram)] };
    let mut frame = Vec::new();
    EngineMessage::Metrics { id: 1, metrics }.encode(&mut frame);
    let expected: [&[u8]; 12] = [
        &[0x46, 0, 0, 0, 0x8c],
        &1u64.to_le_bytes(),
        &[1, 0, 0, 0],
        &[1, 0, 0, 0, b'a'],
        &2u64.to_le_bytes(),
        &[1, 0, 0, 0],
        &[1, 0, 0, 0, b'b'],
        &[1, 0, 0, 0],
        &1f64.to_le_bytes(),
        &3u64.to_le_bytes(),
        &4u64.to_le_bytes(),
        &(-2f64).to_le_bytes(),
    ];
    assert_eq!(frame, expected.concat());
}
