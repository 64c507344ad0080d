//! Ids that an answer gives out: of calls, in the style of the model's template, and of items.

use std::hash::{BuildHasher, RandomState};

use crate::turn::CallIds;

const ID_CHARS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
const RANDOM_ID_CHARS: usize = 24;
const SHORT_ID_CHARS: usize = 9;

/// Make the id of a call: in the style that a model's template may require, else an id that no other call has.
pub(crate) fn new_call_id(ids: CallIds, name: &str, index: u32) -> String {
    match ids {
        CallIds::Numbered => format!("functions.{name}:{index}"),
        CallIds::Short => random_chars(SHORT_ID_CHARS),
        CallIds::Random => format!("call_{}", random_chars(RANDOM_ID_CHARS)),
    }
}

/// Make an id that nothing else has: `prefix` and 128 random bits in hexadecimal digits.
pub(crate) fn new_id(prefix: &str) -> String {
    let hash = RandomState::new();
    format!("{prefix}{:016x}{:016x}", hash.hash_one(0), hash.hash_one(1))
}

/// Random letters and digits. The keys of the standard library's hash are random and differ each time.
fn random_chars(len: usize) -> String {
    let hash = RandomState::new();
    let mut chars = String::with_capacity(len);
    let mut number = 0;
    for place in 0..len {
        // A 64-bit number gives ten characters.
        if place % 10 == 0 {
            number = hash.hash_one(place);
        }
        chars.push(char::from(ID_CHARS[(number % 62) as usize]));
        number /= 62;
    }
    chars
}
