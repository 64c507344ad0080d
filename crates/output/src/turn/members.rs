//! What notations of arguments have in common: `Arguments` that become the members of a JSON object one by one, and
//! values within values.

use std::borrow::Cow;

use serde_json::Value;

/// Most brackets around a part of a value.
const MAX_DEPTH: u32 = 64;

/// Arguments on their way into a JSON object, each written when it is whole.
#[derive(Debug, Clone, Default)]
pub(super) struct Members {
    has_begun: bool,
    num_values: u32,
    /// What is there of an argument: its name, what stands behind it, and its value.
    argument: String,
}

/// A name without a value is an empty one.
type NameAndValue<'a> = Option<(&'a str, &'a str)>;

impl Members {
    /// The object begins, with the first text of its arguments.
    pub(super) fn begin(&mut self, out: &mut String) {
        if !std::mem::replace(&mut self.has_begun, true) {
            out.push('{');
        }
    }

    /// More of the argument.
    pub(super) fn push(&mut self, char: char) {
        self.argument.push(char);
    }

    /// More of the argument.
    pub(super) fn push_str(&mut self, text: &str) {
        self.argument.push_str(text);
    }

    /// The argument is whole: `split` takes it apart, and `json_of` makes JSON of its value; anything else is a text.
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

/// What reads the values of a notation.
pub(super) trait Notation {
    /// Take a character, behind whitespace, if it is the next.
    fn take(&mut self, wanted: char) -> bool;

    /// Whether a character, behind whitespace, is the next.
    fn is_next(&self, wanted: char) -> bool;

    /// Read a value and write it as JSON; none if it is none.
    fn value(&mut self, out: &mut String) -> Option<()>;

    /// The name of a member of an object.
    fn name(&mut self) -> Option<Cow<'_, str>>;

    /// Brackets around what comes.
    fn depth(&mut self) -> &mut u32;
}

/// Write the rest of a list or an object, behind the bracket that begins it; `end` ends it in the notation.
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

/// JSON's own words, and numbers as they stand.
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
