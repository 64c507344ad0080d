//! Arguments as Python literals: `k='text', n=1)`.

use std::borrow::Cow;

use serde_json::Value;

use super::members::{Members, Notation, write_nested, write_word};
use super::progress::Progress;

/// Reads them into the members of a JSON object, each when it is whole.
#[derive(Debug, Clone, Default)]
pub(super) struct PythonValues {
    members: Members,
    depth: u32,
    quote: Option<char>,
    is_escaped: bool,
}

impl PythonValues {
    pub(super) fn read(&mut self, text: &str, out: &mut String) -> Progress {
        self.members.begin(out);
        for (at, char) in text.char_indices() {
            if let Some(quote) = self.quote {
                match char {
                    _ if self.is_escaped => self.is_escaped = false,
                    '\\' => self.is_escaped = true,
                    _ if char == quote => self.quote = None,
                    _ => {}
                }
            } else {
                match char {
                    '\'' | '"' => self.quote = Some(char),
                    '(' | '[' | '{' => self.depth += 1,
                    ')' if self.depth == 0 => {
                        self.end_argument(out);
                        out.push('}');
                        return Progress::Done(at + 1);
                    }
                    ')' | ']' | '}' => self.depth = self.depth.saturating_sub(1),
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
        self.members.end_argument(|argument| argument.split_once('='), json_of, out);
    }
}

/// A literal as JSON text; `None` if it is not a literal. JSON's keywords are accepted too.
fn json_of(literal: &str) -> Option<String> {
    let mut reader = Literal { rest: literal, depth: 0 };
    let mut out = String::new();
    reader.value(&mut out)?;
    reader.rest.trim_start().is_empty().then_some(out)
}

struct Literal<'a> {
    rest: &'a str,
    depth: u32,
}

impl Literal<'_> {
    fn peek(&self) -> Option<char> {
        self.rest.trim_start().chars().next()
    }

    fn text(&mut self, quote: char) -> Option<String> {
        self.rest = self.rest.trim_start();
        let mut text = String::new();
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, char)) = chars.next() {
            match char {
                _ if char == quote => {
                    self.rest = &self.rest[at + 1..];
                    return Some(text);
                }
                '\\' => match chars.next()?.1 {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'b' => text.push('\u{8}'),
                    'f' => text.push('\u{c}'),
                    kind @ ('x' | 'u' | 'U') => {
                        let len = [2, 4, 8][usize::from(kind != 'x') + usize::from(kind == 'U')];
                        let mut unit = 0;
                        for _ in 0..len {
                            unit = unit << 4 | chars.next()?.1.to_digit(16)?;
                        }
                        if (0xD800..0xDC00).contains(&unit) {
                            let mut low = 0;
                            if (chars.next()?.1, chars.next()?.1) != ('\\', 'u') {
                                return None;
                            }
                            for _ in 0..4 {
                                low = low << 4 | chars.next()?.1.to_digit(16)?;
                            }
                            unit = 0x1_0000 + ((unit - 0xD800) << 10) + low.checked_sub(0xDC00)?;
                        }
                        text.push(char::from_u32(unit)?);
                    }
                    other @ ('\\' | '\'' | '"' | '/') => text.push(other),
                    other => text.extend(['\\', other]),
                },
                _ => text.push(char),
            }
        }
        None
    }

    fn word(&mut self, out: &mut String) -> Option<()> {
        self.rest = self.rest.trim_start();
        let is_part = |char: char| char.is_ascii_alphanumeric() || matches!(char, '+' | '-' | '.' | '_');
        let end = self.rest.find(|char| !is_part(char)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        write_word(word, out)
    }
}

impl Notation for Literal<'_> {
    fn take(&mut self, wanted: char) -> bool {
        let rest = self.rest.trim_start();
        let taken = rest.strip_prefix(wanted);
        self.rest = taken.unwrap_or(rest);
        taken.is_some()
    }

    fn is_next(&self, wanted: char) -> bool {
        self.peek() == Some(wanted)
    }

    fn value(&mut self, out: &mut String) -> Option<()> {
        match self.peek()? {
            quote @ ('\'' | '"') => {
                out.push_str(&Value::from(self.text(quote)?).to_string());
                Some(())
            }
            open @ ('[' | '(' | '{') => {
                self.take(open);
                let end = match open {
                    '[' => ']',
                    '(' => ')',
                    _ => '}',
                };
                write_nested(self, open == '{', end, out)
            }
            _ => self.word(out),
        }
    }

    fn name(&mut self) -> Option<Cow<'_, str>> {
        let quote = self.peek().filter(|char| matches!(char, '\'' | '"'))?;
        self.text(quote).map(Cow::Owned)
    }

    fn depth(&mut self) -> &mut u32 {
        &mut self.depth
    }
}

#[cfg(test)]
mod tests {
    use super::json_of;

    #[test]
    fn literals_become_json() {
        for (literal, json) in [
            ("'it\\'s'", Some(r#""it's""#)),
            (r#""a\u00e9\n\/""#, Some(r#""aé\n/""#)),
            (r#""\ud83d\ude00\x41""#, Some(r#""😀A""#)),
            ("[1, -2.5e3, True, None,]", Some("[1, -2.5e3, true, null]")),
            ("{'a': (1, 'x'), \"b\": {}}", Some(r#"{"a": [1, "x"], "b": {}}"#)),
            ("true", Some("true")),
            ("a.b()", None),
            ("'open", None),
            ("1 2", None),
            ("{'a' 1}", None),
            (r#""\ud83d""#, None),
        ] {
            assert_eq!(json_of(literal).as_deref(), json, "{literal}");
        }
        assert_eq!(json_of(&"[".repeat(100_000)), None);
    }
}
