//! Arguments as Python's literals: `k='text', n=1)`.

use serde_json::Value;

use super::progress::Progress;

/// Reads them into the members of a JSON object, each when it is whole.
#[derive(Debug, Clone, Default)]
pub(super) struct PythonValues {
    has_begun: bool,
    num_values: u32,
    /// What is there of an argument: its name, `=` and its value.
    argument: String,
    depth: u32,
    quote: Option<char>,
    is_escaped: bool,
}

impl PythonValues {
    pub(super) fn read(&mut self, text: &str, out: &mut String) -> Progress {
        if !self.has_begun {
            self.has_begun = true;
            out.push('{');
        }
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
            self.argument.push(char);
        }
        Progress::Open(text.len())
    }

    fn end_argument(&mut self, out: &mut String) {
        let argument = std::mem::take(&mut self.argument);
        let argument = argument.trim();
        if argument.is_empty() {
            return; // a comma behind the last
        }
        let (name, value) = argument.split_once('=').unwrap_or(("", argument));
        if self.num_values > 0 {
            out.push_str(", ");
        }
        self.num_values += 1;
        out.push_str(&Value::from(name.trim()).to_string());
        out.push_str(": ");
        match json_of(value.trim()) {
            Some(json) => out.push_str(&json),
            None => out.push_str(&Value::from(value.trim()).to_string()),
        }
    }
}

/// Most brackets around a part of a literal.
const MAX_DEPTH: u32 = 64;

/// A literal as JSON text; none if it is none. JSON's own words are taken as well.
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
    fn peek(&mut self) -> Option<char> {
        self.rest = self.rest.trim_start();
        self.rest.chars().next()
    }

    fn take(&mut self, wanted: char) -> bool {
        let is_next = self.peek() == Some(wanted);
        if is_next {
            self.rest = &self.rest[wanted.len_utf8()..];
        }
        is_next
    }

    fn value(&mut self, out: &mut String) -> Option<()> {
        match self.peek()? {
            quote @ ('\'' | '"') => out.push_str(&Value::from(self.text(quote)?).to_string()),
            '[' => self.list(']', out)?,
            '(' => self.list(')', out)?,
            '{' => self.object(out)?,
            _ => self.word(out)?,
        }
        Some(())
    }

    fn text(&mut self, quote: char) -> Option<String> {
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

    fn nested(&mut self) -> Option<()> {
        self.rest = &self.rest[1..];
        self.depth += 1;
        (self.depth <= MAX_DEPTH).then_some(())
    }

    fn list(&mut self, end: char, out: &mut String) -> Option<()> {
        self.nested()?;
        out.push('[');
        let mut is_first = true;
        while !self.take(end) {
            if !is_first {
                out.push_str(", ");
            }
            is_first = false;
            self.value(out)?;
            if !self.take(',') && self.peek()? != end {
                return None;
            }
        }
        self.depth -= 1;
        out.push(']');
        Some(())
    }

    fn object(&mut self, out: &mut String) -> Option<()> {
        self.nested()?;
        out.push('{');
        let mut is_first = true;
        while !self.take('}') {
            if !is_first {
                out.push_str(", ");
            }
            is_first = false;
            let quote = self.peek().filter(|char| matches!(char, '\'' | '"'))?;
            out.push_str(&Value::from(self.text(quote)?).to_string());
            if !self.take(':') {
                return None;
            }
            out.push_str(": ");
            self.value(out)?;
            if !self.take(',') && self.peek()? != '}' {
                return None;
            }
        }
        self.depth -= 1;
        out.push('}');
        Some(())
    }

    fn word(&mut self, out: &mut String) -> Option<()> {
        let is_part = |char: char| char.is_ascii_alphanumeric() || matches!(char, '+' | '-' | '.' | '_');
        let end = self.rest.find(|char| !is_part(char)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        out.push_str(match word {
            "True" | "true" => "true",
            "False" | "false" => "false",
            "None" | "null" => "null",
            number => {
                serde_json::from_str::<serde_json::Number>(number).ok()?;
                number
            }
        });
        Some(())
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
