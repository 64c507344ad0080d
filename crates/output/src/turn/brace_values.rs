//! Arguments in braces, `k:<q>text<q>,n:1}`: names without quotes, and texts between marks that no text has in it.

use serde_json::Value;

use super::progress::Progress;

/// Most brackets around a part of a value.
const MAX_DEPTH: u32 = 64;

/// Reads them into the members of a JSON object, each when it is whole.
#[derive(Debug, Clone)]
pub(super) struct BraceValues {
    quote: &'static str,
    has_begun: bool,
    num_values: u32,
    /// What is there of an argument: its name, `:` and its value.
    argument: String,
    depth: u32,
    is_quoted: bool,
}

impl BraceValues {
    pub(super) fn new(quote: &'static str) -> Self {
        Self { quote, has_begun: false, num_values: 0, argument: String::new(), depth: 0, is_quoted: false }
    }

    pub(super) fn read(&mut self, text: &str, out: &mut String) -> Progress {
        if !self.has_begun {
            self.has_begun = true;
            out.push('{');
        }
        let mut at = 0;
        while let Some(char) = text[at..].chars().next() {
            let rest = &text[at..];
            if rest.starts_with(self.quote) {
                self.is_quoted = !self.is_quoted;
                self.argument.push_str(self.quote);
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
        let (name, value) = argument.split_once(':').unwrap_or(("", argument));
        let name = name.trim().trim_start_matches(self.quote).trim_end_matches(self.quote);
        if self.num_values > 0 {
            out.push_str(", ");
        }
        self.num_values += 1;
        out.push_str(&Value::from(name).to_string());
        out.push_str(": ");
        match json_of(value.trim(), self.quote) {
            Some(json) => out.push_str(&json),
            None => out.push_str(&Value::from(value.trim()).to_string()),
        }
    }
}

/// A value as JSON text; none if it is none.
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
    fn take(&mut self, wanted: char) -> bool {
        let rest = self.rest.trim_start();
        let taken = rest.strip_prefix(wanted);
        self.rest = taken.unwrap_or(rest);
        taken.is_some()
    }

    fn text(&mut self) -> Option<&'a str> {
        let inside = self.rest.trim_start().strip_prefix(self.quote)?;
        let (text, rest) = inside.split_once(self.quote)?;
        self.rest = rest;
        Some(text)
    }

    fn value(&mut self, out: &mut String) -> Option<()> {
        if self.take('[') {
            self.members(']', '[', out)
        } else if self.take('{') {
            self.members('}', '{', out)
        } else if let Some(text) = self.text() {
            out.push_str(&Value::from(text).to_string());
            Some(())
        } else {
            let end = self.rest.find([',', ']', '}']).unwrap_or(self.rest.len());
            let (word, rest) = self.rest.split_at(end);
            self.rest = rest;
            out.push_str(match word.trim() {
                word @ ("true" | "false" | "null") => word,
                "None" => "null",
                number => {
                    serde_json::from_str::<serde_json::Number>(number).ok()?;
                    number
                }
            });
            Some(())
        }
    }

    /// Of a list or an object, behind its bracket.
    fn members(&mut self, end: char, begin: char, out: &mut String) -> Option<()> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return None;
        }
        out.push(begin);
        let mut is_first = true;
        while !self.take(end) {
            if !is_first {
                out.push_str(", ");
            }
            is_first = false;
            if begin == '{' {
                let name = if let Some(name) = self.text() {
                    name
                } else {
                    let (name, rest) = self.rest.split_at(self.rest.find(':')?);
                    self.rest = rest;
                    name.trim()
                };
                if !self.take(':') {
                    return None;
                }
                out.push_str(&Value::from(name).to_string());
                out.push_str(": ");
            }
            self.value(out)?;
            if !self.take(',') && !self.rest.trim_start().starts_with(end) {
                return None;
            }
        }
        self.depth -= 1;
        out.push(end);
        Some(())
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
