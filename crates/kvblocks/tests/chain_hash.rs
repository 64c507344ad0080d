//! The chain hash tells apart whatever could change the KV values of a block.

use std::collections::HashMap;

use kvblocks::{BlockHash, ChainHasher, HashAlgorithm};

const ALGORITHMS: [HashAlgorithm; 2] = [HashAlgorithm::SipHash13, HashAlgorithm::Sha256];

#[test]
fn equal_arguments_and_key_give_equal_hashes() {
    for algorithm in ALGORITHMS {
        let new = |key| ChainHasher::with_algorithm(algorithm, [key; 16]);
        let (one, other) = (new(1), new(1).clone());
        let parent = one.hash_block(None, &[1, 2], b"salt");
        assert_eq!(parent, other.hash_block(None, &[1, 2], b"salt"));
        assert_eq!(one.hash_block(Some(&parent), &[3], b""), other.hash_block(Some(&parent), &[3], b""));
        assert_ne!(parent, new(2).hash_block(None, &[1, 2], b"salt"), "the key counts");
        assert_ne!(
            ChainHasher::random_with(algorithm).hash_block(None, &[1], b""),
            ChainHasher::random_with(algorithm).hash_block(None, &[1], b""),
            "every random key is another one"
        );
    }
}

/// What another implementation gives for the key and one block of 20 tokens: its length, the length of the extra keys
/// with the mark of a parent, the parent, the tokens, the extra keys, all little-endian.
#[test]
fn the_functions_are_what_they_are_called() {
    let tokens: Vec<i32> = (1..=20).collect();
    let hash = |algorithm| {
        let hasher = ChainHasher::with_algorithm(algorithm, *b"0123456789abcdef");
        hasher.hash_block(Some(&BlockHash([7; 16])), &tokens, b"salt").0
    };
    assert_eq!(hash(HashAlgorithm::Sha256), SHA256_OF_THE_BLOCK);
    assert_ne!(hash(HashAlgorithm::SipHash13), SHA256_OF_THE_BLOCK);
    assert_eq!(ChainHasher::new([1; 16]).hash_block(None, &[1], b""), {
        ChainHasher::with_algorithm(HashAlgorithm::SipHash13, [1; 16]).hash_block(None, &[1], b"")
    });
}

/// `hashlib.sha256(key + encoding).digest()[:16]`
const SHA256_OF_THE_BLOCK: [u8; 16] =
    [0x21, 0x04, 0x96, 0x74, 0xd8, 0xd6, 0x3d, 0xb8, 0x05, 0x6a, 0x8b, 0xb7, 0xdd, 0xa4, 0x96, 0xc5];

#[test]
fn the_key_is_not_shown() {
    let shown = format!("{:?}", ChainHasher::new(*b"0123456789abcdef"));
    assert_eq!(shown, "ChainHasher { .. }");
}

/// Every combination of parents, tokens and extra keys from lists in which one's bytes could be taken for another's.
#[test]
fn the_encoding_is_injective() {
    for algorithm in ALGORITHMS {
        check_that_the_encoding_is_injective(&ChainHasher::with_algorithm(algorithm, [3; 16]));
    }
}

fn check_that_the_encoding_is_injective(hasher: &ChainHasher) {
    let parents = [None, Some(BlockHash([0; 16])), Some(BlockHash([1; 16]))];
    let zeros = [0; 40];
    let tokens: Vec<&[i32]> = vec![
        &[],
        &[0],
        &[0, 0],
        &[1],
        &[-1],
        &[256],
        &[1, 0],
        &[0, 1],
        &zeros[..15],
        &zeros[..16],
        &zeros[..17],
        &zeros,
    ];
    let keys: [&[u8]; 8] =
        [b"", b"\0", b"\0\0\0\0", b"\0\0\0\0\0\0\0\0", b"\x01\0\0\0", b"\xff\xff\xff\xff", b"a", b"ab"];
    let mut seen = HashMap::new();
    for parent in &parents {
        for tokens in &tokens {
            for keys in keys {
                let hash = hasher.hash_block(parent.as_ref(), tokens, keys);
                if let Some(other) = seen.insert(hash, (parent, tokens, keys)) {
                    panic!("{other:?} and {:?} have the same hash", (parent, tokens, keys));
                }
            }
        }
    }
    assert_eq!(seen.len(), 3 * 12 * 8);
}

/// The chain carries a difference in any earlier block on to all later ones.
#[test]
fn the_chain_names_the_whole_prefix() {
    let hasher = ChainHasher::new([4; 16]);
    let chain = |tokens: &[i32], salt: &[u8]| {
        let mut parent = None;
        for (n, block) in tokens.chunks(4).enumerate() {
            parent = Some(hasher.hash_block(parent.as_ref(), block, if n == 0 { salt } else { b"" }));
        }
        parent
    };
    let tokens: Vec<i32> = (0..16).collect();
    for changed in 0..16 {
        let mut other = tokens.clone();
        other[changed] += 1;
        assert_ne!(chain(&tokens, b""), chain(&other, b""), "token {changed}");
    }
    assert_ne!(chain(&tokens, b""), chain(&tokens, b"salt"));
    assert_eq!(chain(&tokens, b"salt"), chain(&tokens, b"salt"));
}
