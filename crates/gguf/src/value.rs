//! A value of the metadata.

use std::io::Read;

use crate::{error::GgufError, source::Source};

/// The most elements of an array. The largest vocabularies have about 300,000 entries, the longest lists of merges as many.
pub const MAX_ELEMENTS: u64 = 1 << 22;

const U8: u32 = 0;
const I8: u32 = 1;
const U16: u32 = 2;
const I16: u32 = 3;
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const TEXT: u32 = 8;
const ARRAY: u32 = 9;
const U64: u32 = 10;
const I64: u32 = 11;
const F64: u32 = 12;

/// What a key stands for. Whole numbers of every width are one kind, and so are fractions.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Without a sign.
    Unsigned(u64),
    /// With a sign.
    Signed(i64),
    /// A number with a fraction.
    Float(f64),
    /// Yes or no.
    Bool(bool),
    /// A string.
    Text(String),
    /// Several.
    Array(Array),
}

/// Values of one kind.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// Without a sign.
    Unsigned(Vec<u64>),
    /// With a sign.
    Signed(Vec<i64>),
    /// With a fraction.
    Float(Vec<f64>),
    /// Yes or no.
    Bool(Vec<bool>),
    /// Strings, all in one.
    Text {
        /// One behind the other.
        joined: String,
        /// Where each ends.
        ends: Vec<u32>,
    },
}

impl Value {
    /// Reads the value of `key`: its type, then itself.
    pub(crate) fn read<R: Read>(key: &str, source: &mut Source<R>) -> Result<Self, GgufError> {
        let what = format!("the value of {key:?}");
        let id = source.u32(&what)?;
        Ok(match id {
            U8 | U16 | U32 | U64 => Self::Unsigned(unsigned(id, &what, source)?),
            I8 | I16 | I32 | I64 => Self::Signed(signed(id, &what, source)?),
            F32 | F64 => Self::Float(float(id, &what, source)?),
            BOOL => Self::Bool(boolean(key, &what, source)?),
            TEXT => Self::Text(source.text(&what, u64::MAX)?),
            ARRAY => Self::Array(Array::read(key, &what, source)?),
            _ => return Err(GgufError::ValueType { key: key.to_owned(), id }),
        })
    }

    /// A whole number that is not negative.
    #[must_use]
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(value) => Some(*value),
            Self::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }
}

impl Array {
    fn read<R: Read>(key: &str, what: &str, source: &mut Source<R>) -> Result<Self, GgufError> {
        let id = source.u32(what)?;
        let count = source.u64(what)?;
        let least = match id {
            U8 | I8 | BOOL => 1,
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 | TEXT => 8,
            _ => return Err(GgufError::ValueType { key: key.to_owned(), id }),
        };
        source.expect(what, count.saturating_mul(least))?;
        if count > MAX_ELEMENTS {
            return Err(GgufError::Count { what: what.to_owned(), count, most: MAX_ELEMENTS });
        }
        Ok(match id {
            U8 | U16 | U32 | U64 => Self::Unsigned(each(count, || unsigned(id, what, source))?),
            I8 | I16 | I32 | I64 => Self::Signed(each(count, || signed(id, what, source))?),
            F32 | F64 => Self::Float(each(count, || float(id, what, source))?),
            BOOL => Self::Bool(each(count, || boolean(key, what, source))?),
            _ => texts(count, what, source)?,
        })
    }

    /// How many values there are.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Unsigned(values) => values.len(),
            Self::Signed(values) => values.len(),
            Self::Float(values) => values.len(),
            Self::Bool(values) => values.len(),
            Self::Text { ends, .. } => ends.len(),
        }
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn each<T>(count: u64, mut read: impl FnMut() -> Result<T, GgufError>) -> Result<Vec<T>, GgufError> {
    (0..count).map(|_| read()).collect()
}

fn texts<R: Read>(count: u64, what: &str, source: &mut Source<R>) -> Result<Array, GgufError> {
    let (mut joined, mut ends) = (Vec::new(), Vec::with_capacity(count as usize));
    for _ in 0..count {
        let length = source.u64(what)?;
        source.append(what, length, &mut joined)?;
        // Fits: the header has far fewer bytes than 32 bits can count.
        ends.push(joined.len() as u32);
    }
    let text = || GgufError::Text(what.to_owned());
    let joined = String::from_utf8(joined).map_err(|_| text())?;
    // Valid together, and cut within no character: valid each.
    if ends.iter().any(|&end| !joined.is_char_boundary(end as usize)) {
        return Err(text());
    }
    Ok(Array::Text { joined, ends })
}

fn unsigned<R: Read>(id: u32, what: &str, source: &mut Source<R>) -> Result<u64, GgufError> {
    Ok(match id {
        U8 => source.take::<1>(what)?[0].into(),
        U16 => u16::from_le_bytes(source.take(what)?).into(),
        U32 => source.u32(what)?.into(),
        _ => source.u64(what)?,
    })
}

fn signed<R: Read>(id: u32, what: &str, source: &mut Source<R>) -> Result<i64, GgufError> {
    Ok(match id {
        I8 => i8::from_le_bytes(source.take(what)?).into(),
        I16 => i16::from_le_bytes(source.take(what)?).into(),
        I32 => i32::from_le_bytes(source.take(what)?).into(),
        _ => i64::from_le_bytes(source.take(what)?),
    })
}

fn float<R: Read>(id: u32, what: &str, source: &mut Source<R>) -> Result<f64, GgufError> {
    Ok(if id == F32 {
        f32::from_le_bytes(source.take(what)?).into()
    } else {
        f64::from_le_bytes(source.take(what)?)
    })
}

fn boolean<R: Read>(key: &str, what: &str, source: &mut Source<R>) -> Result<bool, GgufError> {
    match source.take::<1>(what)?[0] {
        0 => Ok(false),
        1 => Ok(true),
        byte => Err(GgufError::Boolean { key: key.to_owned(), byte }),
    }
}
