//! Files that are wrong: each is refused by name, and none costs memory or time for what it only announces.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod writer;

use std::{fs, path::PathBuf};

use gguf::{GgufError, GgufFile, Value, parse};
use proptest::prelude::*;
use writer::{Writer, sample};

fn refusal(bytes: &[u8]) -> GgufError {
    parse(bytes, bytes.len() as u64).expect_err("it must be refused")
}

#[test]
fn a_right_file_is_read() {
    let bytes = sample().bytes();
    let header = parse(&bytes[..], bytes.len() as u64).unwrap();
    assert_eq!((header.version, header.alignment), (3, 32));
    assert_eq!(header.get("general.architecture"), Some(&Value::Text("llama".to_owned())));
    let names: Vec<_> =
        header.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.shape.clone())).collect();
    assert_eq!(names, [("a.weight", vec![3, 32]), ("b.weight", vec![5])]);
    assert!(header.tensors.iter().all(|tensor| tensor.offset % 32 == 0));
}

#[test]
fn another_kind_of_file_is_refused() {
    assert!(matches!(refusal(b"PK\x03\x04 and so on and on"), GgufError::Magic(_)));
    assert!(matches!(refusal(b"GG"), GgufError::Length { .. }));
}

#[test]
fn versions_and_byte_orders_that_are_not_read_are_refused() {
    for version in [0_u32, 1, 4, u32::MAX] {
        assert!(
            matches!(refusal(&Writer { version, ..sample() }.bytes()), GgufError::Version(_)),
            "{version}"
        );
    }
    let error = refusal(&Writer { version: 3_u32.swap_bytes(), ..sample() }.bytes());
    assert!(matches!(error, GgufError::BigEndian(_)), "{error}");
}

#[test]
fn counts_beyond_all_measure_are_refused() {
    let error = refusal(&Writer { num_tensors: Some(1 << 60), ..sample() }.bytes());
    assert!(matches!(error, GgufError::Count { count, .. } if count == 1 << 60), "{error}");
    let error = refusal(&Writer { num_keys: Some(u64::MAX), ..sample() }.bytes());
    assert!(matches!(error, GgufError::Count { count: u64::MAX, .. }), "{error}");
}

#[test]
fn lengths_beyond_the_file_are_refused() {
    let mut text = sample();
    text.raw_value("general.name", 8, &(1_u64 << 63).to_le_bytes());
    let mut array = sample();
    array.raw_value("x", 9, &[&8_u32.to_le_bytes()[..], &(1_u64 << 61).to_le_bytes()].concat());
    for writer in [text, array] {
        let error = refusal(&writer.bytes());
        assert!(matches!(error, GgufError::Length { .. }), "{error}");
    }
}

#[test]
fn alignments_that_are_none_are_refused() {
    for alignment in [0, 3, 1 << 20] {
        let mut writer = sample();
        writer.u32("general.alignment", alignment);
        let error = refusal(&writer.bytes());
        assert!(matches!(error, GgufError::Alignment(_)), "{alignment}: {error}");
    }
    let mut writer = sample();
    writer.text("general.alignment", "32");
    assert!(matches!(refusal(&writer.bytes()), GgufError::Alignment(_)));
}

#[test]
fn places_that_are_wrong_are_refused() {
    let with_offset = |offset| {
        let mut writer = sample();
        writer.tensors[1].offset = Some(offset);
        refusal(&writer.bytes())
    };
    assert!(matches!(with_offset(0), GgufError::Overlap { .. }));
    assert!(matches!(with_offset(33), GgufError::Offset { .. }));
    assert!(matches!(with_offset(1 << 40), GgufError::Outside { .. }));
    assert!(matches!(with_offset(u64::MAX / 32 * 32), GgufError::Outside { .. }));
    let bytes = sample().bytes();
    let error = refusal(&bytes[..bytes.len() - 1]);
    assert!(matches!(error, GgufError::Outside { .. }), "{error}");
}

#[test]
fn shapes_and_types_that_are_wrong_are_refused() {
    let with = |shape: &[u64], id| {
        let mut writer = sample();
        (writer.tensors[0].shape, writer.tensors[0].id) = (shape.to_vec(), id);
        refusal(&writer.bytes())
    };
    assert!(matches!(with(&[], 0), GgufError::Count { .. }));
    assert!(matches!(with(&[1; 5], 0), GgufError::Count { .. }));
    assert!(matches!(with(&[32, 0], 0), GgufError::Shape { .. }));
    assert!(matches!(with(&[1 << 40, 1 << 40], 0), GgufError::Shape { .. }));
    assert!(matches!(with(&[1 << 40, 1 << 23], 0), GgufError::Shape { .. }));
    assert!(matches!(with(&[33, 3], 8), GgufError::Blocks { .. }));
    assert!(matches!(with(&[32, 3], 4), GgufError::TensorType { id: 4, .. }));
}

#[test]
fn values_that_are_wrong_are_refused() {
    let with = |id: u32, bytes: &[u8]| {
        let mut writer = sample();
        writer.raw_value("x", id, bytes);
        refusal(&writer.bytes())
    };
    assert!(matches!(with(7, &[2]), GgufError::Boolean { byte: 2, .. }));
    assert!(matches!(with(13, &[]), GgufError::ValueType { id: 13, .. }));
    let nested = [&9_u32.to_le_bytes()[..], &0_u64.to_le_bytes()].concat();
    assert!(matches!(with(9, &nested), GgufError::ValueType { id: 9, .. }));
    assert!(matches!(with(8, &[&1_u64.to_le_bytes()[..], &[0xff]].concat()), GgufError::Text(_)));
    // Two strings that are valid together alone: é in halves.
    let one = 1_u64.to_le_bytes();
    let halves = [&8_u32.to_le_bytes()[..], &2_u64.to_le_bytes(), &one, &[0xc3], &one, &[0xa9]].concat();
    assert!(matches!(with(9, &halves), GgufError::Text(_)));
}

#[test]
fn names_that_are_there_twice_are_refused() {
    let mut writer = sample();
    writer.text("general.architecture", "gpt2");
    assert!(matches!(refusal(&writer.bytes()), GgufError::Duplicate { kind: "key", .. }));
    let mut writer = sample();
    writer.tensors[1].name = "a.weight".to_owned();
    assert!(matches!(refusal(&writer.bytes()), GgufError::Duplicate { kind: "tensor", .. }));
}

/// A folder that goes with its owner.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("gguf-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn part(number: u32, count: u32, tensor: &str) -> Vec<u8> {
    let mut writer = sample();
    writer.u32("split.no", number);
    writer.u32("split.count", count);
    writer.u32("split.tensors.count", 4);
    writer.tensors[0].name = format!("{tensor}.a");
    writer.tensors[1].name = format!("{tensor}.b");
    writer.bytes()
}

#[test]
fn the_files_of_one_model_are_held_together() {
    let folder = Folder::new("parts");
    let path = |number: u32| folder.0.join(format!("m-{number:05}-of-00002.gguf"));
    fs::write(path(1), part(0, 2, "x")).unwrap();
    assert!(matches!(GgufFile::open(&path(1)), Err(GgufError::PartMissing { .. })));
    fs::write(path(2), part(1, 2, "y")).unwrap();
    let file = GgufFile::open(&path(1)).unwrap();
    let places: Vec<_> = file.tensors().map(|tensor| (tensor.info.name.clone(), tensor.file)).collect();
    assert_eq!(places, [("x.a".into(), 0), ("x.b".into(), 0), ("y.a".into(), 1), ("y.b".into(), 1)]);

    let error = GgufFile::open(&path(2)).unwrap_err();
    assert!(
        matches!(&error, GgufError::NotTheFirst { first, .. } if first == "m-00001-of-00002.gguf"),
        "{error}"
    );
    fs::write(path(2), part(1, 2, "x")).unwrap();
    assert!(matches!(GgufFile::open(&path(1)), Err(GgufError::Duplicate { .. })));
    fs::write(path(2), part(0, 2, "y")).unwrap();
    assert!(matches!(GgufFile::open(&path(1)), Err(GgufError::PartMixed { .. })));
    fs::write(path(2), b"nothing").unwrap();
    assert!(matches!(GgufFile::open(&path(1)), Err(GgufError::Part { .. })));
    let renamed = folder.0.join("renamed.gguf");
    fs::write(&renamed, part(0, 2, "x")).unwrap();
    assert!(matches!(GgufFile::open(&renamed), Err(GgufError::PartName { count: 2 })));
}

fn cases() -> ProptestConfig {
    let asked = std::env::var("RUSTVLLM_TEST_MUTATIONS").ok().and_then(|number| number.parse().ok());
    ProptestConfig { cases: asked.unwrap_or(4000), failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases())]

    /// Whatever is done to a file's bytes, it is read or refused; what is read lies within the file.
    #[test]
    fn mutations_are_read_or_refused(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0_u8..4), 1..12),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = sample().bytes();
        for (place, byte, how) in changes {
            let at = place.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                1 => bytes[at] ^= 1 << (byte % 8),
                2 => bytes.insert(at, byte),
                _ => bytes[at] = 0xff,
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()) + 1);
        }
        if let Ok(header) = parse(&bytes[..], bytes.len() as u64) {
            for tensor in &header.tensors {
                prop_assert!(tensor.offset + tensor.num_bytes <= bytes.len() as u64);
            }
        }
    }
}
