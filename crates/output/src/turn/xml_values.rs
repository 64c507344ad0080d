//! Arguments as elements: `<parameter=k>` value `</parameter>` each, then `</function>`, or in similar tags.

use serde_json::Value;

use super::format::Elements;
use super::progress::Progress;
use super::tool::{Tool, is_text, typed};

/// Most bytes of the name of an argument.
const MAX_KEY_BYTES: usize = 4096;

/// Reads them into the members of a JSON object. Strings are passed on as they arrive; other values when they are
/// whole.
#[derive(Debug, Clone)]
pub(super) struct XmlValues {
    elements: &'static Elements,
    has_begun: bool,
    num_values: u32,
    value: Option<OpenValue>,
}

#[derive(Debug, Clone)]
struct OpenValue {
    key: String,
    is_text: bool,
    /// Whether the value is JSON, whatever the schema says.
    is_json: bool,
    /// Whether the opening tag was read, including the line break after it, if any.
    is_inside: bool,
    /// What was read so far of a value that is not a string.
    text: String,
}

impl XmlValues {
    pub(super) fn new(elements: &'static Elements) -> Self {
        Self { elements, has_begun: false, num_values: 0, value: None }
    }

    pub(super) fn read(&mut self, text: &str, tool: Option<&Tool>, out: &mut String) -> Progress {
        if !self.has_begun {
            self.has_begun = true;
            out.push('{');
        }
        let Elements { key: [open, close], end: last, .. } = *self.elements;
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
            if let Some(named) = tag.strip_prefix(open) {
                match named.find(close) {
                    Some(end) if end <= MAX_KEY_BYTES => {
                        at += open.len() + end + close.len();
                        self.begin_value(&named[..end], tool, out);
                        continue;
                    }
                    None if named.len() <= MAX_KEY_BYTES => return Progress::Open(at),
                    _ => {}
                }
            } else if open.starts_with(tag) || (last.starts_with(tag) && tag != last) {
                return Progress::Open(at);
            }
            out.push('}');
            let end = if tag.starts_with(last) { last.len() } else { 0 };
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
        let (key, flag) = match self.elements.text_flag.and_then(|flag| key.split_once(flag)) {
            Some((key, flag)) => (key.trim(), Some(flag)),
            None => (key.trim(), None),
        };
        if self.num_values > 0 {
            out.push_str(", ");
        }
        self.num_values += 1;
        out.push('"');
        push_escaped(key, out);
        out.push_str("\": ");
        let is_text = match flag {
            Some(flag) => flag != "false",
            None => tool.and_then(|tool| tool.parameter(key)).is_none_or(is_text),
        };
        if is_text {
            out.push('"');
        }
        self.value = Some(OpenValue {
            key: key.to_owned(),
            is_text,
            is_json: flag == Some("false"),
            is_inside: false,
            text: String::new(),
        });
    }

    /// Continue to read a value; returns the bytes taken and whether it is whole.
    fn read_value(&mut self, rest: &str, tool: Option<&Tool>, out: &mut String) -> (usize, bool) {
        let Some(value) = &mut self.value else { return (0, true) };
        let Elements { value: [open, close], has_breaks, .. } = *self.elements;
        let mut at = 0;
        if !value.is_inside {
            let inside = if open.is_empty() { rest } else { rest.trim_start() };
            if inside.is_empty() || (inside.len() < open.len() && open.starts_with(inside)) {
                return (0, false);
            }
            value.is_inside = true;
            at = rest.len() - inside.strip_prefix(open).unwrap_or(inside).len();
            if has_breaks {
                if at == rest.len() {
                    value.is_inside = false; // the line break may be still to come
                    return (0, false);
                }
                at += usize::from(rest[at..].starts_with('\n'));
            }
        }
        let inside = &rest[at..];
        let found = inside.find(close);
        let taken = match found {
            Some(end) if has_breaks => inside[..end].strip_suffix('\n').unwrap_or(&inside[..end]),
            Some(end) => &inside[..end],
            None => &inside[..inside.len() - undecided(inside, close, has_breaks)],
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
            let schema = tool.and_then(|tool| tool.parameter(&value.key));
            let anything = Value::Object(serde_json::Map::new());
            let schema = if value.is_json { Some(&anything) } else { schema };
            out.push_str(&typed(schema, &value.text));
        }
        self.value = None;
        (at + end + close.len(), true)
    }
}

/// How many bytes at the end of a value may belong to its end: a line break, and the beginning of a tag.
fn undecided(text: &str, close: &str, has_breaks: bool) -> usize {
    // Compare bytes, because a tag may have characters of several bytes. A match ends where the text does, so at a
    // character boundary.
    let (text_bytes, close) = (text.as_bytes(), close.as_bytes());
    let tag = (1..close.len()).rev().find(|&len| text_bytes.ends_with(&close[..len])).unwrap_or(0);
    tag + usize::from(has_breaks && text[..text.len() - tag].ends_with('\n'))
}

/// Append a text as a part of a JSON string, without its quotes.
fn push_escaped(text: &str, out: &mut String) {
    let quoted = Value::from(text).to_string();
    out.push_str(&quoted[1..quoted.len() - 1]);
}
