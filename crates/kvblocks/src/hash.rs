//! The chain hash: names a full block by all the tokens up to its end, with a secret key.
//!
//! SipHash-1-3 with a 128-bit key and a 128-bit result is a keyed function: without the key, an attacker can neither
//! predict nor construct two prefixes with the same hash, so a request cannot be crafted to hit another tenant's
//! blocks. By accident, with 2^32 distinct blocks alive at once, two share a hash with probability 2^-65.
//!
//! SHA-256 over the same key and bytes, cut to 128 bits, is for users who must name a standardised function; it takes
//! several times as long. A hash without a real key is not offered: with xxHash, a client that knows the seed, or sees
//! enough hashes, can make collisions.

use std::fmt;
use std::hash::Hasher;

use sha2::{Digest, Sha256};
use siphasher::sip128::{Hash128, Hasher128, SipHasher13};

use crate::block::BlockHash;
use crate::hash_pair::{self, HEADER, LENGTHS, TOKENS_PER_WRITE, USUAL_BYTES};

/// The hash function of the chain hash.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum HashAlgorithm {
    /// SipHash-1-3 with a 128-bit key and result.
    #[default]
    SipHash13,
    /// SHA-256 of key and content, of which the first 128 bits are kept.
    Sha256,
}

impl HashAlgorithm {
    /// Its name in configurations.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::SipHash13 => "siphash13",
            Self::Sha256 => "sha256",
        }
    }
}

/// The function, with the key already in it.
#[derive(Clone)]
enum Keyed {
    SipHash13(KeyedSip),
    /// The lengths that every input begins with and the cut to half of the result leave nothing to extend.
    Sha256(Sha256),
}

/// SipHash-1-3 with the key, and the same after it has read the lengths of a block of the usual size: nearly every block
/// is one, and goes on from there.
#[derive(Clone, Copy)]
struct KeyedSip {
    keyed: SipHasher13,
    usual_first: SipHasher13,
    usual: SipHasher13,
    /// The state of `usual`, for blocks that are hashed in step with each other.
    usual_state: [u64; 4],
}

impl KeyedSip {
    fn new(key: [u8; 16]) -> Self {
        let keyed = SipHasher13::new_with_key(&key);
        let after_lengths = |has_parent: bool| {
            let mut hasher = keyed;
            hasher.write(&lengths(TOKENS_PER_WRITE, 0, has_parent));
            hasher
        };
        Self {
            keyed,
            usual_first: after_lengths(false),
            usual: after_lengths(true),
            usual_state: hash_pair::after_lengths(keyed.keys(), lengths(TOKENS_PER_WRITE, 0, true)),
        }
    }

    /// The hash of a block of the usual size without extra keys. All bytes are in one place: the function reads them from
    /// there, without a buffer of its own.
    #[inline]
    fn hash_usual(&self, parent: Option<&BlockHash>, token_ids: &[i32; TOKENS_PER_WRITE]) -> Hash128 {
        let mut bytes = [0; USUAL_BYTES - LENGTHS];
        let (parent_bytes, token_bytes) = bytes.split_at_mut(HEADER - LENGTHS);
        to_bytes(token_ids, token_bytes);
        let Some(parent) = parent else { return self.usual_first.hash(&bytes) };
        parent_bytes.copy_from_slice(&parent.0);
        self.usual.hash(&bytes)
    }
}

/// Hashes full blocks along the chain of a request's prefix. Cheap to clone, usable from any thread.
///
/// ```
/// use kvblocks::ChainHasher;
/// let hasher = ChainHasher::random();
/// let first = hasher.hash_block(None, &[1, 2, 3, 4], b"");
/// let second = hasher.hash_block(Some(&first), &[5, 6, 7, 8], b"");
/// assert_ne!(first, second);
/// assert_eq!(second, hasher.hash_block(Some(&first), &[5, 6, 7, 8], b""));
/// ```
#[derive(Clone)]
pub struct ChainHasher {
    /// Has read the key and nothing else; cloned for each block, so that the key is expanded once.
    keyed: Keyed,
}

impl ChainHasher {
    /// Make a hasher with a given key. Two engines that share blocks need the same key.
    #[must_use]
    pub fn new(key: [u8; 16]) -> Self {
        Self::with_algorithm(HashAlgorithm::default(), key)
    }

    /// A hasher with a given hash function and key.
    #[must_use]
    pub fn with_algorithm(algorithm: HashAlgorithm, key: [u8; 16]) -> Self {
        let keyed = match algorithm {
            HashAlgorithm::SipHash13 => Keyed::SipHash13(KeyedSip::new(key)),
            HashAlgorithm::Sha256 => Keyed::Sha256(Sha256::new_with_prefix(key)),
        };
        Self { keyed }
    }

    /// Make a hasher with a fresh key from the operating system.
    ///
    /// # Panics
    /// The operating system has no random numbers: serving without a secret key would not be safe.
    #[must_use]
    pub fn random() -> Self {
        Self::random_with(HashAlgorithm::default())
    }

    /// A hasher with a given hash function and a random key.
    ///
    /// # Panics
    /// As [`random`](Self::random).
    #[must_use]
    pub fn random_with(algorithm: HashAlgorithm) -> Self {
        let mut key = [0; 16];
        if let Err(error) = getrandom::fill(&mut key) {
            panic!("no random key for the prefix cache: {error}");
        }
        Self::with_algorithm(algorithm, key)
    }

    /// The hashes of two blocks without extra keys, each with its parent, as [`hash_block`](Self::hash_block) gives them.
    ///
    /// Each step of a hash waits for the one before it, so one hash leaves the processor half idle. Two blocks of the
    /// usual size, 16 tokens, take little longer than one.
    #[must_use]
    pub fn hash_pair(&self, parents: [&BlockHash; 2], token_ids: [&[i32]; 2]) -> [BlockHash; 2] {
        if let Keyed::SipHash13(sip) = &self.keyed
            && let (Ok(one), Ok(other)) = (token_ids[0].try_into(), token_ids[1].try_into())
        {
            return hash_pair::hash(sip.usual_state, parents, [one, other]);
        }
        let [one, other] = parents;
        [self.hash_block(Some(one), token_ids[0], b""), self.hash_block(Some(other), token_ids[1], b"")]
    }

    /// The hash of one full block.
    ///
    /// * `parent`: the hash of the block before it; `None` for the first block of a sequence.
    /// * `token_ids`: the tokens of this block.
    /// * `extra_keys`: what else the KV values depend on, already joined to bytes without ambiguity: the `LoRA`
    ///   adapter, digests of multimodal inputs in this block, and in the first block the cache salt (the chain
    ///   carries it on).
    ///
    /// The bytes hashed are an injective encoding of the three arguments (the lengths come first), so equal hashes
    /// mean equal arguments, and by induction equal prefixes and keys.
    #[must_use]
    pub fn hash_block(&self, parent: Option<&BlockHash>, token_ids: &[i32], extra_keys: &[u8]) -> BlockHash {
        match &self.keyed {
            Keyed::SipHash13(sip) => {
                if let (Ok(token_ids), []) = (token_ids.try_into(), extra_keys) {
                    return BlockHash(sip.hash_usual(parent, token_ids).as_bytes());
                }
                let mut hasher = sip.keyed;
                encode(parent, token_ids, extra_keys, |bytes| hasher.write(bytes));
                BlockHash(hasher.finish128().as_bytes())
            }
            Keyed::Sha256(keyed) => {
                let mut hasher = keyed.clone();
                encode(parent, token_ids, extra_keys, |bytes| hasher.update(bytes));
                let mut hash = [0; 16];
                hash.copy_from_slice(&hasher.finalize()[..16]);
                BlockHash(hash)
            }
        }
    }
}

/// The bytes that name a block, piece by piece.
#[inline]
fn encode(parent: Option<&BlockHash>, token_ids: &[i32], extra_keys: &[u8], mut write: impl FnMut(&[u8])) {
    let (first, rest) = token_ids.split_at(token_ids.len().min(TOKENS_PER_WRITE));
    let mut bytes = [0; USUAL_BYTES];
    bytes[..HEADER].copy_from_slice(&header(parent, token_ids.len(), extra_keys.len()));
    to_bytes(first, &mut bytes[HEADER..]);
    write(&bytes[..HEADER + first.len() * 4]);
    for tokens in rest.chunks(TOKENS_PER_WRITE) {
        to_bytes(tokens, &mut bytes);
        write(&bytes[..tokens.len() * 4]);
    }
    write(extra_keys);
}

/// The bytes before the tokens.
#[inline]
fn header(parent: Option<&BlockHash>, num_tokens: usize, num_key_bytes: usize) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    bytes[..LENGTHS].copy_from_slice(&lengths(num_tokens, num_key_bytes, parent.is_some()));
    if let Some(parent) = parent {
        bytes[LENGTHS..].copy_from_slice(&parent.0);
    }
    bytes
}

/// The bytes before the parent.
#[inline]
fn lengths(num_tokens: usize, num_key_bytes: usize, has_parent: bool) -> [u8; LENGTHS] {
    let mut bytes = [0; LENGTHS];
    bytes[..8].copy_from_slice(&(num_tokens as u64).to_le_bytes());
    // The top bit says whether there is a parent: no length reaches it.
    let keys_and_parent = num_key_bytes as u64 | (u64::from(has_parent) << 63);
    bytes[8..].copy_from_slice(&keys_and_parent.to_le_bytes());
    bytes
}

/// Little-endian bytes of the tokens, on every machine.
#[inline]
fn to_bytes(tokens: &[i32], bytes: &mut [u8]) {
    for (bytes, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        bytes.copy_from_slice(&token.to_le_bytes());
    }
}

impl fmt::Debug for ChainHasher {
    /// The key is a secret and is not shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChainHasher").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of the usual size and not, of the default function and not, with parents and tokens of all bits.
    #[test]
    fn a_pair_is_hashed_as_each_alone() {
        for algorithm in [HashAlgorithm::SipHash13, HashAlgorithm::Sha256] {
            let hasher = ChainHasher::with_algorithm(algorithm, *b"\xff0123456789abcd\x80");
            let (mut one, mut other) = (BlockHash([0; 16]), BlockHash([255; 16]));
            for (round, lengths) in [[16, 16], [16, 16], [15, 16], [16, 32], [0, 4]].into_iter().enumerate() {
                let tokens: Vec<i32> =
                    (0..48).map(|at| (at + 48 * round as i32 - 60).wrapping_mul(0x4b1d_5e37)).collect();
                let token_ids = [&tokens[..lengths[0]], &tokens[16..][..lengths[1]]];
                let pair = hasher.hash_pair([&one, &other], token_ids);
                let alone = [(&one, token_ids[0]), (&other, token_ids[1])]
                    .map(|(parent, token_ids)| hasher.hash_block(Some(parent), token_ids, b""));
                assert_eq!(pair, alone, "{algorithm:?}, {lengths:?} tokens");
                assert_ne!(pair[0], pair[1]);
                [one, other] = pair;
            }
        }
    }

    /// With and without a parent; tokens with a sign, and more or fewer than the usual block has.
    #[test]
    fn the_usual_block_is_hashed_as_any_other() {
        let (hasher, parent) = (ChainHasher::new([5; 16]), BlockHash([9; 16]));
        let tokens: Vec<i32> = (-8..24).map(|token_id| token_id * 0x0102_0305).collect();
        for (num_tokens, parent) in [15, 16, 17, 32].into_iter().flat_map(|n| [(n, None), (n, Some(&parent))])
        {
            let mut piecewise = SipHasher13::new_with_key(&[5; 16]);
            let mut num_bytes = 0;
            encode(parent, &tokens[..num_tokens], b"", |bytes| {
                num_bytes += bytes.len();
                piecewise.write(bytes);
            });
            assert_eq!(num_bytes, HEADER + 4 * num_tokens);
            let expected = BlockHash(piecewise.finish128().as_bytes());
            assert_eq!(
                hasher.hash_block(parent, &tokens[..num_tokens], b""),
                expected,
                "{num_tokens} tokens"
            );
        }
    }
}
