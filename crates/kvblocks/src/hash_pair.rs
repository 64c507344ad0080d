//! SipHash-1-3 of two blocks of the usual size in step with each other: the same hashes as one after the other, in little
//! more than the time of one, because the rounds of one fill the waits of the other.

use crate::block::BlockHash;

/// Tokens turned to bytes at a time: the usual block in one go.
pub(crate) const TOKENS_PER_WRITE: usize = 16;

/// Bytes before the tokens: two lengths and the parent.
pub(crate) const HEADER: usize = 32;

/// Bytes of a block of the usual size.
pub(crate) const USUAL_BYTES: usize = HEADER + TOKENS_PER_WRITE * 4;

/// Bytes of the two lengths: all blocks of the usual size without extra keys begin with the same ones.
pub(crate) const LENGTHS: usize = 16;

/// The four words of a state, for each of so many inputs.
type States<const N: usize> = [[u64; N]; 4];

/// What the function puts into its first state next to the key: ASCII, as its specification has it; the second word is
/// marked for a result of 128 bits.
const INITIAL: [u64; 4] =
    [0x736f_6d65_7073_6575, 0x646f_7261_6e64_6f6d ^ 0xee, 0x6c79_6765_6e65_7261, 0x7465_6462_7974_6573];

/// The last word of every such input: its number of bytes in the top byte, and no bytes that are left over.
const END: u64 = (USUAL_BYTES as u64) << 56;

/// The state after the lengths of a block with a parent.
pub(crate) fn after_lengths(key: (u64, u64), lengths: [u8; LENGTHS]) -> [u64; 4] {
    let key = [key.0, key.1, key.0, key.1];
    let mut states: States<1> = std::array::from_fn(|word| [INITIAL[word] ^ key[word]]);
    let lengths = u128::from_le_bytes(lengths);
    absorb(&mut states, [lengths as u64]);
    absorb(&mut states, [(lengths >> 64) as u64]);
    states.map(|[word]| word)
}

/// The hashes of two blocks with their parents, from the state after the lengths.
#[inline]
pub(crate) fn hash(
    state: [u64; 4],
    parents: [&BlockHash; 2],
    token_ids: [&[i32; TOKENS_PER_WRITE]; 2],
) -> [BlockHash; 2] {
    const { assert!(HEADER == LENGTHS + size_of::<BlockHash>()) };
    let mut states: States<2> = state.map(|word| [word; 2]);
    let parents = parents.map(|parent| parent.words());
    absorb(&mut states, parents.map(|(low, _)| low));
    absorb(&mut states, parents.map(|(_, high)| high));
    for first in (0..TOKENS_PER_WRITE).step_by(2) {
        absorb(&mut states, token_ids.map(|tokens| word_of(tokens[first], tokens[first + 1])));
    }
    absorb(&mut states, [END; 2]);
    let low = finish(&mut states, 2, 0xee);
    let high = finish(&mut states, 1, 0xdd);
    [BlockHash::from_words(low[0], high[0]), BlockHash::from_words(low[1], high[1])]
}

/// Two tokens as the eight bytes that they are hashed as.
#[inline]
fn word_of(first: i32, second: i32) -> u64 {
    u64::from(first as u32) | u64::from(second as u32) << 32
}

/// Take in one word of each input.
#[inline]
fn absorb<const N: usize>(states: &mut States<N>, words: [u64; N]) {
    for input in 0..N {
        states[3][input] ^= words[input];
    }
    round(states);
    for input in 0..N {
        states[0][input] ^= words[input];
    }
}

/// Half of the result; `mark` goes into the word `at` of each state.
#[inline]
fn finish<const N: usize>(states: &mut States<N>, at: usize, mark: u64) -> [u64; N] {
    for word in &mut states[at] {
        *word ^= mark;
    }
    for _ in 0..3 {
        round(states);
    }
    std::array::from_fn(|input| states.iter().fold(0, |mixed, words| mixed ^ words[input]))
}

/// One round of each state.
#[inline]
fn round<const N: usize>(states: &mut States<N>) {
    for input in 0..N {
        let [mut a, mut b, mut c, mut d] = states.map(|words| words[input]);
        a = a.wrapping_add(b);
        c = c.wrapping_add(d);
        b = b.rotate_left(13) ^ a;
        d = d.rotate_left(16) ^ c;
        a = a.rotate_left(32);
        c = c.wrapping_add(b);
        a = a.wrapping_add(d);
        b = b.rotate_left(17) ^ c;
        d = d.rotate_left(21) ^ a;
        c = c.rotate_left(32);
        for (words, word) in states.iter_mut().zip([a, b, c, d]) {
            words[input] = word;
        }
    }
}
