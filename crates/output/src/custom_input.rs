//! The input of a custom tool: its function has one text argument, and that text is what the client gets.

use serde_json::Value;

/// Read the input out of the arguments, a JSON object with the text `input`.
///
/// Arguments that are cut short are completed, so that all of the text that exists is shown. Arguments of another shape
/// are returned as they are. Half of a character, which JSON can escape and UTF-8 cannot express, becomes U+FFFD.
#[must_use]
pub fn custom_input(arguments: &str) -> String {
    let arguments_with_whole_characters = with_whole_characters(arguments);
    for end in ["", "\"}", "}"] {
        let object = serde_json::from_str(&format!("{arguments_with_whole_characters}{end}"));
        if let Ok(Value::Object(mut members)) = object
            && let Some(Value::String(input)) = members.remove("input")
        {
            return input;
        }
    }
    arguments.to_owned()
}

/// Replace the escapes of halves of characters that have no other half next to them.
fn with_whole_characters(json: &str) -> String {
    let mut whole = String::with_capacity(json.len());
    let mut rest = json;
    while let Some(at) = rest.find('\\') {
        whole.push_str(&rest[..at]);
        rest = &rest[at..];
        let first = escaped_unit(rest);
        let second = first.and_then(|_| escaped_unit(&rest[6..]));
        let len = match (first, second) {
            (Some(0xD800..=0xDBFF), Some(0xDC00..=0xDFFF)) => 12,
            (Some(0xD800..=0xDFFF), _) => {
                whole.push_str("\\ufffd");
                rest = &rest[6..];
                continue;
            }
            (Some(_), _) => 6,
            // What a backslash escapes does not begin another escape.
            (None, _) => 1 + rest[1..].chars().next().map_or(0, char::len_utf8),
        };
        whole.push_str(&rest[..len]);
        rest = &rest[len..];
    }
    whole + rest
}

/// The UTF-16 unit of an escape `\uXXXX` at the beginning of a text.
fn escaped_unit(text: &str) -> Option<u16> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    let is_number = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_number.then(|| u16::from_str_radix(digits, 16).ok()).flatten()
}
