//! Compiled grammars, to be used again: matchers that have seen nothing.

use std::{collections::HashMap, sync::Arc};

use llguidance::Matcher;
use scheduler::GrammarSpec;

/// Grammars at most, and bytes of their texts: the compiled form of a text is some ten times as large.
const MAX_GRAMMARS: usize = 256;
const MAX_TEXT_BYTES: usize = 4 << 20;

/// The grammars that were used last.
#[derive(Default)]
pub(crate) struct Cache {
    grammars: HashMap<Arc<GrammarSpec>, Entry>,
    num_text_bytes: usize,
    clock: u64,
}

struct Entry {
    matcher: Matcher,
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
        self.clock += 1;
        let num_bytes = spec.text.len();
        if self.grammars.insert(spec, Entry { matcher, used: self.clock }).is_none() {
            self.num_text_bytes += num_bytes;
        }
        while self.grammars.len() > MAX_GRAMMARS || self.num_text_bytes > MAX_TEXT_BYTES {
            let oldest =
                self.grammars.iter().min_by_key(|(_, entry)| entry.used).map(|(spec, _)| spec.clone());
            let Some(oldest) = oldest else { return };
            self.grammars.remove(&oldest);
            self.num_text_bytes -= oldest.text.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use llguidance::Matcher;
    use scheduler::{GrammarKind, GrammarSpec};

    use super::{Cache, MAX_GRAMMARS, MAX_TEXT_BYTES};

    fn put(cache: &mut Cache, text: &str) {
        let spec = GrammarSpec::new(GrammarKind::Regex, text);
        cache.put(Arc::new(spec), Matcher::new(Err(std::io::Error::other("a matcher").into())));
    }

    fn has(cache: &mut Cache, text: &str) -> bool {
        cache.get(&GrammarSpec::new(GrammarKind::Regex, text)).is_some()
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
        put(&mut cache, &"a".repeat(MAX_TEXT_BYTES / 2));
        assert!(has(&mut cache, "short"));
        put(&mut cache, &"b".repeat(MAX_TEXT_BYTES / 2));
        assert!(has(&mut cache, "short"));
        assert!(!has(&mut cache, &"a".repeat(MAX_TEXT_BYTES / 2)));
        assert_eq!(cache.num_text_bytes, MAX_TEXT_BYTES / 2 + "short".len());
    }
}
