//! Grammars that passed a check not long ago: most of a server's requests ask for the same few.

use std::{
    collections::{HashSet, VecDeque},
    sync::Arc,
};

use scheduler::GrammarSpec;

/// Grammars at most, and bytes of their texts.
const MAX_GRAMMARS: usize = 256;
const MAX_TEXT_BYTES: usize = 1 << 20;

/// The last ones, whole: two grammars are the same if their texts are.
#[derive(Debug, Default)]
pub(crate) struct Passed {
    grammars: HashSet<Arc<GrammarSpec>>,
    oldest_first: VecDeque<Arc<GrammarSpec>>,
    num_text_bytes: usize,
}

impl Passed {
    pub(crate) fn has(&self, spec: &GrammarSpec) -> bool {
        self.grammars.contains(spec)
    }

    /// Remember a grammar; the ones that came first make room.
    pub(crate) fn put(&mut self, spec: GrammarSpec) {
        let spec = Arc::new(spec);
        if !self.grammars.insert(spec.clone()) {
            return;
        }
        self.num_text_bytes += spec.text.len();
        self.oldest_first.push_back(spec);
        while self.oldest_first.len() > MAX_GRAMMARS || self.num_text_bytes > MAX_TEXT_BYTES {
            let Some(oldest) = self.oldest_first.pop_front() else { return };
            self.num_text_bytes -= oldest.text.len();
            self.grammars.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use scheduler::{GrammarKind, GrammarSpec};

    use super::{MAX_GRAMMARS, MAX_TEXT_BYTES, Passed};

    fn spec(text: &str) -> GrammarSpec {
        GrammarSpec::new(GrammarKind::Regex, text)
    }

    #[test]
    fn the_first_make_room_for_many_and_for_long_ones() {
        let mut passed = Passed::default();
        for index in 0..MAX_GRAMMARS {
            passed.put(spec(&index.to_string()));
        }
        passed.put(spec("0")); // it is there already, and stays the oldest
        assert!(passed.has(&spec("0")) && !passed.has(&spec("x")));
        assert!(!passed.has(&GrammarSpec::new(GrammarKind::Grammar, "0")), "of another kind");
        passed.put(spec("x"));
        assert!(!passed.has(&spec("0")) && passed.has(&spec("1")) && passed.has(&spec("x")));
        passed.put(spec(&"a".repeat(MAX_TEXT_BYTES)));
        assert!(!passed.has(&spec("x")) && passed.has(&spec(&"a".repeat(MAX_TEXT_BYTES))));
        assert_eq!(passed.num_text_bytes, MAX_TEXT_BYTES);
        passed.put(spec(&"b".repeat(MAX_TEXT_BYTES + 1)));
        assert_eq!((passed.num_text_bytes, passed.grammars.len()), (0, 0), "too long to be remembered");
    }
}
