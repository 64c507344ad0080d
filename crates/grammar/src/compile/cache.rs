//! Compiled grammars, to be used again: matchers without tokens, with what outputs have found out about the grammar.

use std::{collections::HashMap, sync::Arc};

use scheduler::GrammarSpec;

use crate::matcher::Matcher;

/// Grammars at most, and what they take.
const MAX_GRAMMARS: usize = 256;
const MAX_BYTES: usize = 64 << 20;
/// A matcher tells the bytes of its lexer. What the parser has made of a text it does not, but that grows with the text: a
/// list of choices takes twenty times its text, and an object's optional properties 75 times theirs.
const BYTES_PER_TEXT_BYTE: usize = 64;
/// States of a lexer that one request leaves to the next: a tenth of what a request may have, so that whether a grammar
/// is too complex does not depend on what others found out about it, and each copy is quick.
const MAX_LEARNT_STATES: usize = 5000;

/// The grammars that were used last.
#[derive(Default)]
pub(crate) struct Cache {
    grammars: HashMap<Arc<GrammarSpec>, Entry>,
    num_bytes: usize,
    clock: u64,
}

struct Entry {
    matcher: Matcher,
    num_bytes: usize,
    num_states: usize,
    used: u64,
}

impl Cache {
    /// A matcher of its own for a grammar that was compiled before.
    pub(crate) fn get(&mut self, spec: &GrammarSpec) -> Option<Matcher> {
        self.clock += 1;
        let entry = self.grammars.get_mut(spec)?;
        entry.used = self.clock;
        Some(entry.matcher.deep_clone())
    }

    /// Remember a grammar; the ones that were not used for longest make room.
    pub(crate) fn put(&mut self, spec: Arc<GrammarSpec>, matcher: Matcher) {
        let Ok(size) = matcher.size() else { return };
        let num_bytes = size.num_bytes + BYTES_PER_TEXT_BYTE * spec.text.len();
        let num_states = size.num_states;
        self.clock += 1;
        self.remove(&spec);
        if num_bytes > MAX_BYTES {
            return; // the others stay
        }
        self.num_bytes += num_bytes;
        self.grammars.insert(spec, Entry { matcher, num_bytes, num_states, used: self.clock });
        while self.grammars.len() > MAX_GRAMMARS || self.num_bytes > MAX_BYTES {
            let oldest =
                self.grammars.iter().min_by_key(|(_, entry)| entry.used).map(|(spec, _)| spec.clone());
            let Some(oldest) = oldest else { return };
            self.remove(&oldest);
        }
    }

    /// Keep what an output has found out about a grammar: the next one with it has its masks sooner. `matcher` has followed
    /// that output.
    pub(crate) fn learn(&mut self, spec: &Arc<GrammarSpec>, mut matcher: Matcher) {
        let Some(num_states) = self.grammars.get(&**spec).map(|entry| entry.num_states) else { return };
        let is_more = matcher
            .size()
            .is_ok_and(|size| size.num_states > num_states && size.num_states <= MAX_LEARNT_STATES);
        if is_more && matcher.reset().is_ok() {
            self.put(spec.clone(), matcher);
        }
    }

    fn remove(&mut self, spec: &GrammarSpec) {
        if let Some(entry) = self.grammars.remove(spec) {
            self.num_bytes -= entry.num_bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use scheduler::{GrammarKind, GrammarSpec};

    use super::{BYTES_PER_TEXT_BYTE, Cache, MAX_BYTES, MAX_GRAMMARS};
    use crate::check::matcher_of_bytes;

    fn spec(text: &str) -> GrammarSpec {
        GrammarSpec::new(GrammarKind::Regex, text)
    }

    fn put(cache: &mut Cache, text: &str) {
        cache.put(Arc::new(spec(text)), matcher_of_bytes(&spec("a+b")).expect("an expression"));
    }

    fn has(cache: &mut Cache, text: &str) -> bool {
        cache.get(&spec(text)).is_some()
    }

    #[test]
    fn what_was_not_used_for_longest_makes_room() {
        let mut cache = Cache::default();
        for index in 0..MAX_GRAMMARS {
            put(&mut cache, &index.to_string());
        }
        assert!(has(&mut cache, "0"));
        put(&mut cache, "one more");
        assert!(has(&mut cache, "0") && has(&mut cache, "one more"));
        assert!(!has(&mut cache, "1"), "it was the oldest");
    }

    #[test]
    fn long_texts_make_room_too() {
        let mut cache = Cache::default();
        put(&mut cache, "short");
        // Two fit but for what their lexers take.
        let half = MAX_BYTES / BYTES_PER_TEXT_BYTE / 2;
        put(&mut cache, &"a".repeat(half));
        assert!(has(&mut cache, "short"));
        put(&mut cache, &"b".repeat(half));
        assert!(has(&mut cache, "short"));
        assert!(!has(&mut cache, &"a".repeat(half)));
        let of_texts = (half + "short".len()) * BYTES_PER_TEXT_BYTE;
        let of_lexers = cache.num_bytes - of_texts;
        assert!(0 < of_lexers && of_lexers < MAX_BYTES / 100, "{of_lexers}");
        put(&mut cache, &"c".repeat(2 * half + 1));
        assert_eq!(cache.num_bytes, of_texts + of_lexers, "one that takes too much by itself moves no other");
        assert!(!has(&mut cache, &"c".repeat(2 * half + 1)));
    }

    #[test]
    fn what_one_output_found_out_the_next_one_knows() {
        let spec = Arc::new(spec("(ab|cd){3}e"));
        let mut cache = Cache::default();
        cache.put(spec.clone(), matcher_of_bytes(&spec).expect("an expression"));
        let mut first = cache.get(&spec).expect("it was put there");
        let follow = |matcher: &mut crate::matcher::Matcher| {
            for byte in *b"abcdab" {
                matcher.take(u32::from(byte)).expect("it is of the expression");
                matcher.mask().expect("something follows");
            }
        };
        let before = first.size().expect("it is whole").num_states;
        follow(&mut first);
        let found = first.size().expect("it is whole").num_states;
        assert!(found > before);
        cache.learn(&spec, first);
        let mut second = cache.get(&spec).expect("it is still there");
        assert_eq!(second.size().expect("it is whole").num_states, found);
        assert!(second.takes(u32::from(b'c')).expect("it follows"), "it has no tokens");
        assert!(!second.takes(u32::from(b'e')).expect("it follows"));
        follow(&mut second);
        assert_eq!(second.size().expect("it is whole").num_states, found, "nothing new");
        cache.learn(&Arc::new(GrammarSpec::new(GrammarKind::Regex, "other")), second);
        assert_eq!(cache.grammars.len(), 1, "a grammar that was let go stays away");
    }
}
