//! Arguments as elements: `<parameter=k>` value `</parameter>` each, then `</function>`.

use serde_json::Value;

use super::progress::Progress;
use super::tool::{Tool, is_text, typed};

const OPEN: &str = "<parameter=";
const CLOSE: &str = "</parameter>";
const END: &str = "</function>";
/// Most bytes of the name of an argument.
const MAX_KEY_BYTES: usize = 4096;

/// Reads them into the members of a JSON object. Texts pass as they come; values of other types when they are whole.
#[derive(Debug, Clone, Default)]
pub(super) struct XmlValues {
    has_begun: bool,
    num_values: u32,
    value: Option<OpenValue>,
}

#[derive(Debug, Clone)]
struct OpenValue {
    key: String,
    is_text: bool,
    /// The line break behind the opening tag is passed, if there was one.
    is_inside: bool,
    /// The part read so far of a value that is not text.
    text: String,
}

impl XmlValues {
    pub(super) fn read(&mut self, text: &str, tool: Option<&Tool>, out: &mut String) -> Progress {
        if !self.has_begun {
            self.has_begun = true;
            out.push('{');
        }
        let mut at = 0;
        loop {
            let rest = &text[at..];
            if self.value.is_some() {
                let (len, is_whole) = self.read_value(rest, tool, out);
                at += len;
                if !is_whole {
                    return Progress::Open(at);
                }
                continue;
            }
            let tag = rest.trim_start();
            at = text.len() - tag.len();
            if let Some(named) = tag.strip_prefix(OPEN) {
                match named.find('>') {
                    Some(end) if end <= MAX_KEY_BYTES => {
                        at += OPEN.len() + end + 1;
                        self.begin_value(&named[..end], tool, out);
                        continue;
                    }
                    None if named.len() <= MAX_KEY_BYTES => return Progress::Open(at),
                    _ => {}
                }
            } else if OPEN.starts_with(tag) || (END.starts_with(tag) && tag != END) {
                return Progress::Open(at);
            }
            out.push('}');
            let end = if tag.starts_with(END) { END.len() } else { 0 };
            return Progress::Done(at + end);
        }
    }

    /// The text has ended within a value.
    pub(super) fn cut(&mut self, rest: &str, out: &mut String) {
        if self.value.as_ref().is_some_and(|value| value.is_text) {
            push_escaped(rest, out);
        }
    }

    fn begin_value(&mut self, key: &str, tool: Option<&Tool>, out: &mut String) {
        let key = key.trim();
        if self.num_values > 0 {
            out.push_str(", ");
        }
        self.num_values += 1;
        out.push('"');
        push_escaped(key, out);
        out.push_str("\": ");
        let is_text = tool.and_then(|tool| tool.parameter(key)).is_none_or(is_text);
        if is_text {
            out.push('"');
        }
        self.value = Some(OpenValue { key: key.to_owned(), is_text, is_inside: false, text: String::new() });
    }

    /// Read on within a value: the bytes taken, and whether it is whole.
    fn read_value(&mut self, rest: &str, tool: Option<&Tool>, out: &mut String) -> (usize, bool) {
        let Some(value) = &mut self.value else { return (0, true) };
        let mut at = 0;
        if !value.is_inside {
            if rest.is_empty() {
                return (0, false);
            }
            value.is_inside = true;
            at = usize::from(rest.starts_with('\n'));
        }
        let inside = &rest[at..];
        let found = inside.find(CLOSE);
        let taken = match found {
            Some(end) => inside[..end].strip_suffix('\n').unwrap_or(&inside[..end]),
            None => &inside[..inside.len() - undecided(inside)],
        };
        if value.is_text {
            push_escaped(taken, out);
        } else {
            value.text.push_str(taken);
        }
        let Some(end) = found else { return (at + taken.len(), false) };
        if value.is_text {
            out.push('"');
        } else {
            out.push_str(&typed(tool.and_then(|tool| tool.parameter(&value.key)), &value.text));
        }
        self.value = None;
        (at + end + CLOSE.len(), true)
    }
}

/// How many bytes at the end of a value may belong to what ends it: a line break, and the beginning of a tag.
fn undecided(text: &str) -> usize {
    let tag = (1..CLOSE.len()).rev().find(|&len| text.ends_with(&CLOSE[..len])).unwrap_or(0);
    tag + usize::from(text[..text.len() - tag].ends_with('\n'))
}

/// A text as a part of a JSON string, without its quotes.
fn push_escaped(text: &str, out: &mut String) {
    let quoted = Value::from(text).to_string();
    out.push_str(&quoted[1..quoted.len() - 1]);
}
