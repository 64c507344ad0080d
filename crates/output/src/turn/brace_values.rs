//! Arguments in braces, `k:<q>text<q>,n:1}`: names without quotes, and strings between marks that cannot occur in a
//! string.

use std::borrow::Cow;

use serde_json::Value;

use super::members::{Members, Notation, write_nested, write_word};
use super::progress::Progress;

/// Reads them into the members of a JSON object, each when it is whole.
#[derive(Debug, Clone)]
pub(super) struct BraceValues {
    quote: &'static str,
    members: Members,
    depth: u32,
    is_quoted: bool,
}

impl BraceValues {
    pub(super) fn new(quote: &'static str) -> Self {
        Self { quote, members: Members::default(), depth: 0, is_quoted: false }
    }

    pub(super) fn read(&mut self, text: &str, out: &mut String) -> Progress {
        self.members.begin(out);
        let mut at = 0;
        while let Some(char) = text[at..].chars().next() {
            let rest = &text[at..];
            if rest.starts_with(self.quote) {
                self.is_quoted = !self.is_quoted;
                self.members.push_str(self.quote);
                at += self.quote.len();
                continue;
            }
            if self.quote.starts_with(rest) {
                return Progress::Open(at); // more text says whether it is one
            }
            at += char.len_utf8();
            if !self.is_quoted {
                match char {
                    '[' | '{' => self.depth += 1,
                    '}' if self.depth == 0 => {
                        self.end_argument(out);
                        out.push('}');
                        return Progress::Done(at);
                    }
                    ']' | '}' => self.depth = self.depth.saturating_sub(1),
                    ',' if self.depth == 0 => {
                        self.end_argument(out);
                        continue;
                    }
                    _ => {}
                }
            }
            self.members.push(char);
        }
        Progress::Open(text.len())
    }

    fn end_argument(&mut self, out: &mut String) {
        let quote = self.quote;
        self.members.end_argument(
            |argument| {
                let (name, value) = argument.split_once(':')?;
                Some((name.trim().trim_start_matches(quote).trim_end_matches(quote), value))
            },
            |value| json_of(value, quote),
            out,
        );
    }
}

/// A value as JSON text; `None` if it is not a value.
fn json_of(value: &str, quote: &str) -> Option<String> {
    let mut reader = Reader { rest: value, quote, depth: 0 };
    let mut out = String::new();
    reader.value(&mut out)?;
    reader.rest.trim().is_empty().then_some(out)
}

struct Reader<'a> {
    rest: &'a str,
    quote: &'a str,
    depth: u32,
}

impl<'a> Reader<'a> {
    fn text(&mut self) -> Option<&'a str> {
        let inside = self.rest.trim_start().strip_prefix(self.quote)?;
        let (text, rest) = inside.split_once(self.quote)?;
        self.rest = rest;
        Some(text)
    }
}

impl Notation for Reader<'_> {
    fn take(&mut self, wanted: char) -> bool {
        let rest = self.rest.trim_start();
        let taken = rest.strip_prefix(wanted);
        self.rest = taken.unwrap_or(rest);
        taken.is_some()
    }

    fn is_next(&self, wanted: char) -> bool {
        self.rest.trim_start().starts_with(wanted)
    }

    fn value(&mut self, out: &mut String) -> Option<()> {
        if self.take('[') {
            write_nested(self, false, ']', out)
        } else if self.take('{') {
            write_nested(self, true, '}', out)
        } else if let Some(text) = self.text() {
            out.push_str(&Value::from(text).to_string());
            Some(())
        } else {
            let end = self.rest.find([',', ']', '}']).unwrap_or(self.rest.len());
            let (word, rest) = self.rest.split_at(end);
            self.rest = rest;
            write_word(word.trim(), out)
        }
    }

    fn name(&mut self) -> Option<Cow<'_, str>> {
        if let Some(name) = self.text() {
            return Some(Cow::Borrowed(name));
        }
        let (name, rest) = self.rest.split_at(self.rest.find(':')?);
        self.rest = rest;
        Some(Cow::Borrowed(name.trim()))
    }

    fn depth(&mut self) -> &mut u32 {
        &mut self.depth
    }
}

#[cfg(test)]
mod tests {
    use super::json_of;

    #[test]
    fn values_become_json() {
        for (value, json) in [
            ("<q>it's {1,2}: <b><q>", Some(r#""it's {1,2}: <b>""#)),
            ("-1.50", Some("-1.50")),
            ("[<q>a<q>, 2,{b:[true,null]}]", Some(r#"["a", 2, {"b": [true, null]}]"#)),
            ("{a:{},<q>b c<q>:<q><q>}", Some(r#"{"a": {}, "b c": ""}"#)),
            ("Paris", None),
            ("<q>open", None),
            ("[1", None),
            ("{a 1}", None),
            ("1 2", None),
        ] {
            assert_eq!(json_of(value, "<q>").as_deref(), json, "{value}");
        }
        assert_eq!(json_of(&"[".repeat(100_000), "<q>"), None);
    }
}
