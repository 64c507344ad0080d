//! The header of one file, read and checked.

use std::{collections::HashSet, io::Read};

use crate::{error::GgufError, source::Source, tensor_type::TensorType, value::Value};

/// The longest header that is read. Those of the field, whose vocabulary is most of them, have about 15 MB.
pub const MAX_HEADER_BYTES: u64 = 64 << 20;
/// The most tensors of a file. The largest models have a few thousand.
pub const MAX_TENSORS: u64 = 1 << 16;
/// The most keys.
const MAX_KEYS: u64 = 1 << 16;
/// The longest name of a key, as the format has it, and of a tensor.
const MAX_NAME: u64 = (1 << 16) - 1;
const MAX_ALIGNMENT: u64 = 1 << 16;
const DEFAULT_ALIGNMENT: u64 = 32;
const MAX_DIMENSION: u64 = 1 << 40;
const MAX_DIMENSIONS: u32 = 4;

/// Where a tensor lies in its file, and what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Rows first, as in numpy; the numbers of a row lie side by side.
    pub shape: Vec<u64>,
    /// How its numbers are written down.
    pub tensor_type: TensorType,
    /// Of its first byte in the file.
    pub offset: u64,
    /// That it takes there.
    pub num_bytes: u64,
}

/// What a file says before its weights.
#[derive(Debug)]
pub struct Header {
    /// Of the layout.
    pub version: u32,
    /// Keys and values in their order.
    pub metadata: Vec<(String, Value)>,
    /// In their order.
    pub tensors: Vec<TensorInfo>,
    /// What every offset is a multiple of.
    pub alignment: u64,
}

impl Header {
    /// The value of a key.
    #[must_use]
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(known, _)| known == key).map(|(_, value)| value)
    }
}

/// Reads the header of a file of `size` bytes.
///
/// # Errors
///
/// Whatever is wrong with it; no more memory is taken than a header that is right needs for as many bytes.
pub fn parse<R: Read>(reader: R, size: u64) -> Result<Header, GgufError> {
    let mut source = Source::new(reader, size.min(MAX_HEADER_BYTES));
    let magic = source.take("the magic number")?;
    if &magic != b"GGUF" {
        return Err(GgufError::Magic(magic));
    }
    let version = source.u32("the version")?;
    if version != 0 && version.trailing_zeros() >= 16 {
        return Err(GgufError::BigEndian(version));
    }
    if !(2..=3).contains(&version) {
        return Err(GgufError::Version(version));
    }
    let num_tensors = source.u64("the number of tensors")?;
    let num_keys = source.u64("the number of keys")?;
    for (what, count, most) in
        [("the header: tensors", num_tensors, MAX_TENSORS), ("the header: keys", num_keys, MAX_KEYS)]
    {
        if count > most {
            return Err(GgufError::Count { what: what.to_owned(), count, most });
        }
    }
    let metadata = read_metadata(&mut source, num_keys)?;
    let alignment = match metadata.iter().find(|(key, _)| key == "general.alignment") {
        None => DEFAULT_ALIGNMENT,
        Some((_, value)) => match value.as_u64() {
            Some(alignment) if alignment.is_power_of_two() && alignment <= MAX_ALIGNMENT => alignment,
            Some(other) => return Err(GgufError::Alignment(other.to_string())),
            None => return Err(GgufError::Alignment("no whole number".to_owned())),
        },
    };
    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    for _ in 0..num_tensors {
        let tensor = read_tensor(&mut source, alignment)?;
        if !names.insert(tensor.name.clone()) {
            return Err(GgufError::Duplicate { kind: "tensor", name: tensor.name });
        }
        tensors.push(tensor);
    }
    let start = source.position().next_multiple_of(alignment);
    place(&mut tensors, start, size)?;
    Ok(Header { version, metadata, tensors, alignment })
}

fn read_metadata<R: Read>(source: &mut Source<R>, count: u64) -> Result<Vec<(String, Value)>, GgufError> {
    let mut metadata = Vec::new();
    let mut keys = HashSet::new();
    for _ in 0..count {
        let key = source.text("a key", MAX_NAME)?;
        let value = Value::read(&key, source)?;
        if !keys.insert(key.clone()) {
            return Err(GgufError::Duplicate { kind: "key", name: key });
        }
        metadata.push((key, value));
    }
    Ok(metadata)
}

/// A tensor whose offset is still that behind the header.
fn read_tensor<R: Read>(source: &mut Source<R>, alignment: u64) -> Result<TensorInfo, GgufError> {
    let name = source.text("the name of a tensor", MAX_NAME)?;
    let what = format!("the tensor {name:?}");
    let num_dimensions = source.u32(&what)?;
    if !(1..=MAX_DIMENSIONS).contains(&num_dimensions) {
        let count = u64::from(num_dimensions);
        return Err(GgufError::Count {
            what: format!("{what}: dimensions"),
            count,
            most: u64::from(MAX_DIMENSIONS),
        });
    }
    let mut shape = (0..num_dimensions).map(|_| source.u64(&what)).collect::<Result<Vec<_>, _>>()?;
    let id = source.u32(&what)?;
    let offset = source.u64(&what)?;
    let refused = || GgufError::Shape { tensor: name.clone(), shape: shape.clone() };
    if shape.iter().any(|&dimension| dimension == 0 || dimension > MAX_DIMENSION) {
        return Err(refused());
    }
    let Some(tensor_type) = TensorType::from_id(id) else {
        return Err(GgufError::TensorType { tensor: name, id });
    };
    let (block, block_bytes) = (tensor_type.block() as u64, tensor_type.block_bytes() as u64);
    if !shape[0].is_multiple_of(block) {
        return Err(GgufError::Blocks { tensor: name, row: shape[0], type_name: tensor_type.name(), block });
    }
    let num_numbers = shape.iter().try_fold(1_u64, |product, &dimension| product.checked_mul(dimension));
    let num_bytes =
        num_numbers.and_then(|numbers| (numbers / block).checked_mul(block_bytes)).ok_or_else(refused)?;
    if !offset.is_multiple_of(alignment) {
        return Err(GgufError::Offset { tensor: name, offset, alignment });
    }
    shape.reverse();
    Ok(TensorInfo { name, shape, tensor_type, offset, num_bytes })
}

/// Turns offsets behind the header into offsets in the file, and holds that no tensor lies outside of it or in another.
fn place(tensors: &mut [TensorInfo], start: u64, size: u64) -> Result<(), GgufError> {
    for tensor in tensors.iter_mut() {
        let offset = tensor.offset.checked_add(start);
        match offset.and_then(|offset| offset.checked_add(tensor.num_bytes)) {
            Some(end) if end <= size => tensor.offset += start,
            end => {
                let end = end.unwrap_or(u64::MAX);
                return Err(GgufError::Outside { tensor: tensor.name.clone(), end, size });
            }
        }
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|tensor| tensor.offset);
    for pair in order.windows(2) {
        if pair[0].offset + pair[0].num_bytes > pair[1].offset {
            let (first, second) = (pair[0].name.clone(), pair[1].name.clone());
            return Err(GgufError::Overlap { first, second });
        }
    }
    Ok(())
}
