//! The arguments of a call, turned into JSON text while they arrive.

use serde_json::Value;

use super::brace_values::BraceValues;
use super::json_span::{JsonSpan, Span};
use super::progress::Progress;
use super::python_values::PythonValues;
use super::tool::Tool;
use super::xml_values::XmlValues;

/// Reads arguments, in each of the notations.
#[derive(Debug, Clone)]
pub(super) enum Arguments {
    /// As JSON.
    Json(JsonArguments),
    /// Elements.
    Xml(XmlValues),
    /// Python literals with names.
    Python(PythonValues),
    /// In braces, with a special mark for quotes.
    Braces(BraceValues),
}

impl Arguments {
    /// Continue to read; append what is certain to `out`.
    pub(super) fn read(&mut self, text: &str, tool: Option<&Tool>, out: &mut String) -> Progress {
        match self {
            Self::Json(arguments) => arguments.read(text, out),
            Self::Xml(values) => values.read(text, tool, out),
            Self::Python(values) => values.read(text, out),
            Self::Braces(values) => values.read(text, out),
        }
    }

    /// The text has ended within the arguments: append what was held back of a string.
    pub(super) fn cut(&mut self, rest: &str, out: &mut String) {
        match self {
            Self::Json(JsonArguments { part: Part::Single(_, value), .. }) => out.push_str(value),
            Self::Json(_) | Self::Python(_) | Self::Braces(_) => {}
            Self::Xml(values) => values.cut(rest, out),
        }
    }
}

/// JSON that is passed on as it is written.
#[derive(Debug, Clone)]
pub(super) struct JsonArguments {
    part: Part,
    /// Whether further members of the surrounding object may follow.
    in_object: bool,
}

#[derive(Debug, Clone)]
enum Part {
    /// Nothing was read yet.
    Start,
    /// An object or a list, which is passed on.
    Passing(JsonSpan),
    /// Another value, which is interpreted when it is whole.
    Single(JsonSpan, String),
    /// The arguments came before the name.
    Ready(String),
    /// The rest of the surrounding object, which is ignored.
    Rest(JsonSpan),
}

impl JsonArguments {
    /// Read the next value; nothing else belongs to the call.
    pub(super) fn alone() -> Self {
        Self { part: Part::Start, in_object: false }
    }

    /// Read a member of an object: the next value, or one that came before.
    pub(super) fn in_object(before: Option<&str>) -> Self {
        let part = before.map_or(Part::Start, |value| Part::Ready(unwrapped(value)));
        Self { part, in_object: true }
    }

    /// All of the arguments are known.
    pub(super) fn whole(value: &str) -> Self {
        Self { part: Part::Ready(unwrapped(value)), in_object: false }
    }

    fn read(&mut self, text: &str, out: &mut String) -> Progress {
        let mut at = 0;
        loop {
            let rest = &text[at..];
            match &mut self.part {
                Part::Start => {
                    at = text.len() - rest.trim_start().len();
                    match text.as_bytes().get(at) {
                        None => return Progress::Open(at),
                        Some(b'{' | b'[') => self.part = Part::Passing(JsonSpan::default()),
                        Some(_) => self.part = Part::Single(JsonSpan::default(), String::new()),
                    }
                }
                Part::Passing(span) => match span.scan(rest) {
                    Span::Open => {
                        out.push_str(rest);
                        return Progress::Open(text.len());
                    }
                    Span::Breaks(end) => {
                        out.push_str(&rest[..end]);
                        return Progress::Done(at + end);
                    }
                    Span::Ends(end) => {
                        out.push_str(&rest[..end]);
                        at += end;
                        if !self.in_object {
                            return Progress::Done(at);
                        }
                        self.part = Part::Rest(JsonSpan::within(1));
                    }
                },
                Part::Single(span, value) => match span.scan(rest) {
                    Span::Open => {
                        value.push_str(rest);
                        return Progress::Open(text.len());
                    }
                    Span::Ends(end) | Span::Breaks(end) => {
                        value.push_str(&rest[..end]);
                        at += end;
                        self.part = Part::Ready(unwrapped(value));
                    }
                },
                Part::Ready(value) => {
                    out.push_str(value);
                    if !self.in_object {
                        return Progress::Done(at);
                    }
                    self.part = Part::Rest(JsonSpan::within(1));
                }
                Part::Rest(span) => {
                    return match span.scan(rest) {
                        Span::Open => Progress::Open(text.len()),
                        Span::Ends(end) | Span::Breaks(end) => Progress::Done(at + end),
                    };
                }
            }
        }
    }
}

/// If a value stands for an object (a string that holds one, or null), return that object; else the value itself.
fn unwrapped(value: &str) -> String {
    match serde_json::from_str(value) {
        Ok(Value::Null) => "{}".to_owned(),
        Ok(Value::String(text))
            if serde_json::from_str(&text).is_ok_and(|inner: Value| inner.is_object()) =>
        {
            text
        }
        _ => value.to_owned(),
    }
}
