//! The common part of several notations: collects arguments as members of a JSON object, and reads nested values.

use std::borrow::Cow;

use serde_json::Value;

/// Most nested brackets in a value.
const MAX_DEPTH: u32 = 64;

/// Arguments on their way into a JSON object; each is written when it is whole.
#[derive(Debug, Clone, Default)]
pub(super) struct Members {
    has_begun: bool,
    num_values: u32,
    /// The current argument so far: its name, the separator and its value.
    argument: String,
}

/// An argument without a value has an empty one.
type NameAndValue<'a> = Option<(&'a str, &'a str)>;

impl Members {
    /// Begin the object, at the first text of its arguments.
    pub(super) fn begin(&mut self, out: &mut String) {
        if !std::mem::replace(&mut self.has_begun, true) {
            out.push('{');
        }
    }

    /// Append to the current argument.
    pub(super) fn push(&mut self, char: char) {
        self.argument.push(char);
    }

    /// Append to the current argument.
    pub(super) fn push_str(&mut self, text: &str) {
        self.argument.push_str(text);
    }

    /// End the current argument: `split` separates name and value, and `json_of` turns the value into JSON; if it
    /// cannot, the value is a string.
    pub(super) fn end_argument(
        &mut self,
        split: impl FnOnce(&str) -> NameAndValue<'_>,
        json_of: impl FnOnce(&str) -> Option<String>,
        out: &mut String,
    ) {
        let argument = std::mem::take(&mut self.argument);
        let argument = argument.trim();
        if argument.is_empty() {
            return; // a comma behind the last
        }
        let (name, value) = split(argument).unwrap_or(("", argument));
        if self.num_values > 0 {
            out.push_str(", ");
        }
        self.num_values += 1;
        write_name(name.trim(), out);
        let value = value.trim();
        match json_of(value) {
            Some(json) => out.push_str(&json),
            None => out.push_str(&Value::from(value).to_string()),
        }
    }
}

/// Reads the values of a notation.
pub(super) trait Notation {
    /// If the next character after whitespace is `wanted`, take it.
    fn take(&mut self, wanted: char) -> bool;

    /// Whether the next character after whitespace is `wanted`.
    fn is_next(&self, wanted: char) -> bool;

    /// Read a value and write it as JSON; `None` if there is no value.
    fn value(&mut self, out: &mut String) -> Option<()>;

    /// The name of a member of an object.
    fn name(&mut self) -> Option<Cow<'_, str>>;

    /// Number of brackets around the next value.
    fn depth(&mut self) -> &mut u32;
}

/// Write the rest of a list or an object, after its opening bracket; `end` closes it in this notation.
pub(super) fn write_nested(
    notation: &mut impl Notation,
    is_object: bool,
    end: char,
    out: &mut String,
) -> Option<()> {
    *notation.depth() += 1;
    if *notation.depth() > MAX_DEPTH {
        return None;
    }
    out.push(if is_object { '{' } else { '[' });
    let mut is_first = true;
    while !notation.take(end) {
        if !std::mem::take(&mut is_first) {
            out.push_str(", ");
        }
        if is_object {
            write_name(&notation.name()?, out);
            if !notation.take(':') {
                return None;
            }
        }
        notation.value(out)?;
        if !notation.take(',') && !notation.is_next(end) {
            return None;
        }
    }
    *notation.depth() -= 1;
    out.push(if is_object { '}' } else { ']' });
    Some(())
}

/// Write a JSON keyword or a number unchanged.
pub(super) fn write_word(word: &str, out: &mut String) -> Option<()> {
    out.push_str(match word {
        "true" | "True" => "true",
        "false" | "False" => "false",
        "null" | "None" => "null",
        number => {
            serde_json::from_str::<serde_json::Number>(number).ok()?;
            number
        }
    });
    Some(())
}

fn write_name(name: &str, out: &mut String) {
    out.push_str(&Value::from(name).to_string());
    out.push_str(": ");
}
