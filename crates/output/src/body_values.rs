//! Counts what a JSON object's fields hold, without making any of it: a body's cost is known before it is parsed.

/// Fields that are counted one by one; what comes after them is counted as the last one's.
pub const MAX_COUNTED_FIELDS: usize = 256;

/// What a field holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldValues {
    /// Its name, without its escapes; a field that is there twice is counted twice.
    pub name: String,
    /// Values in it at any depth, and itself; names of members are none.
    pub num_values: u64,
    /// Those of them that are objects.
    pub num_objects: u64,
    /// Those of them that are lists.
    pub num_lists: u64,
}

/// What the fields of the object `json` hold, in their order; `None` if it is not an object.
///
/// Each byte is read once, and memory is taken for the names of [`MAX_COUNTED_FIELDS`] fields and for a bit per open
/// bracket. Whether the text is JSON is for its parser to say: what is none is counted in some way.
///
/// ```
/// let counted = output::count_body_values(br#"{"stop": ["a", "b"], "n": 1}"#).unwrap();
/// assert_eq!((counted[0].name.as_str(), counted[0].num_values), ("stop", 3));
/// assert_eq!((counted[1].name.as_str(), counted[1].num_values), ("n", 1));
/// ```
#[must_use]
pub fn count_body_values(json: &[u8]) -> Option<Vec<FieldValues>> {
    let mut at = skip_blanks(json, 0);
    if json.get(at) != Some(&b'{') {
        return None;
    }
    let mut fields = Vec::new();
    let mut open = Brackets::default();
    open.push(true);
    let mut is_name_next = true;
    at += 1;
    while let Some(&byte) = json.get(at) {
        match byte {
            b'"' => {
                let end = end_of_text(json, at);
                if !is_name_next {
                    count(&mut fields, byte);
                } else if open.len() == 1 && fields.len() < MAX_COUNTED_FIELDS {
                    fields.push(FieldValues {
                        name: name_of(&json[at..end]),
                        num_values: 0,
                        num_objects: 0,
                        num_lists: 0,
                    });
                }
                is_name_next = false;
                at = end;
                continue;
            }
            b'{' | b'[' => {
                count(&mut fields, byte);
                open.push(byte == b'{');
                is_name_next = byte == b'{';
            }
            b'}' | b']' => {
                open.pop();
                if open.len() == 0 {
                    break;
                }
                is_name_next = false;
            }
            b',' => is_name_next = open.is_object(),
            b':' | b' ' | b'\n' | b'\r' | b'\t' => {}
            _ => {
                count(&mut fields, byte);
                at = end_of_scalar(json, at);
                continue;
            }
        }
        at += 1;
    }
    Some(fields)
}

/// Count a value of the last field, which begins with this byte.
fn count(fields: &mut [FieldValues], first: u8) {
    if let Some(field) = fields.last_mut() {
        field.num_values += 1;
        field.num_objects += u64::from(first == b'{');
        field.num_lists += u64::from(first == b'[');
    }
}

fn skip_blanks(json: &[u8], from: usize) -> usize {
    json[from..]
        .iter()
        .position(|byte| !byte.is_ascii_whitespace())
        .map_or(json.len(), |blanks| from + blanks)
}

/// Behind the text that begins with the quotation mark at `from`.
fn end_of_text(json: &[u8], from: usize) -> usize {
    let mut at = from + 1;
    while let Some(&byte) = json.get(at) {
        match byte {
            b'"' => return at + 1,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
    json.len()
}

/// Behind a number, `true`, `false`, `null` or whatever stands in their place.
fn end_of_scalar(json: &[u8], from: usize) -> usize {
    let is_end = |byte: &u8| {
        matches!(byte, b',' | b':' | b']' | b'}' | b'[' | b'{' | b'"') || byte.is_ascii_whitespace()
    };
    json[from..].iter().position(is_end).map_or(json.len(), |len| from + len.max(1))
}

/// The text of a name in its quotation marks.
fn name_of(quoted: &[u8]) -> String {
    serde_json::from_slice(quoted).unwrap_or_else(|_| String::from_utf8_lossy(quoted).into_owned())
}

/// Which of the open brackets are those of objects, a bit for each.
#[derive(Default)]
struct Brackets {
    words: Vec<u64>,
    len: usize,
}

impl Brackets {
    fn push(&mut self, is_object: bool) {
        let (word, bit) = (self.len / 64, self.len % 64);
        if word == self.words.len() {
            self.words.push(0);
        }
        self.words[word] = self.words[word] & !(1 << bit) | u64::from(is_object) << bit;
        self.len += 1;
    }

    fn pop(&mut self) {
        self.len -= 1;
    }

    fn len(&self) -> usize {
        self.len
    }

    fn is_object(&self) -> bool {
        let last = self.len - 1;
        self.words[last / 64] >> (last % 64) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// The naive version: of a value that was made.
    fn naive(value: &Value) -> [u64; 3] {
        let (own, inner): ([u64; 3], Vec<&Value>) = match value {
            Value::Object(members) => ([1, 1, 0], members.values().collect()),
            Value::Array(items) => ([1, 0, 1], items.iter().collect()),
            _ => ([1, 0, 0], Vec::new()),
        };
        inner.into_iter().map(naive).fold(own, |sum, of| std::array::from_fn(|kind| sum[kind] + of[kind]))
    }

    fn counted(text: &str) -> Vec<(String, [u64; 3])> {
        let fields = count_body_values(text.as_bytes()).expect("an object");
        fields.into_iter().map(|of| (of.name, [of.num_values, of.num_objects, of.num_lists])).collect()
    }

    fn check(value: &Value) {
        let expected: Vec<_> = value
            .as_object()
            .expect("an object")
            .iter()
            .map(|(name, value)| (name.clone(), naive(value)))
            .collect();
        assert_eq!(counted(&value.to_string()), expected);
        assert_eq!(counted(&format!(" \n{value:#}\t")), expected);
    }

    /// A value of chance, with texts that hold what divides values.
    fn drawn(state: &mut u64, depth: u32) -> Value {
        let mut next = |below: u64| {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (*state >> 33) % below
        };
        let kind = next(if depth == 0 { 5 } else { 8 });
        let len = next(5);
        match kind {
            0 => Value::Null,
            1 => json!(-(len as i64)),
            2 => json!(len as f64 / 3.0),
            3 => json!(true),
            4 => json!(["\"", "[{\\", "a\\\"b,", "\u{7f}é\n:", ""][len as usize]),
            5 | 6 => (0..len).map(|_| drawn(state, depth - 1)).collect(),
            _ => (0..len)
                .map(|at| (format!("\"{at},{{"), drawn(state, depth - 1)))
                .collect::<serde_json::Map<_, _>>()
                .into(),
        }
    }

    #[test]
    fn counts_are_those_of_the_parsed_values() {
        let mut state = 7;
        for _ in 0..2000 {
            let fields: serde_json::Map<_, _> =
                (0..4).map(|at| (format!("f\\{at}\""), drawn(&mut state, 5))).collect();
            check(&fields.into());
        }
    }

    #[test]
    fn a_name_is_found_behind_its_escapes() {
        assert_eq!(
            counted(r#"{"\u0073top": ["a"], "stop": 1}"#),
            [("stop".into(), [2, 0, 1]), ("stop".into(), [1, 0, 0])]
        );
    }

    #[test]
    fn many_fields_are_counted_as_the_last_of_those_that_are_noted() {
        let text: Vec<String> = (0..1000).map(|at| format!("\"{at}\":[{at}]")).collect();
        let fields = counted(&format!("{{{}}}", text.join(",")));
        assert_eq!(fields.len(), MAX_COUNTED_FIELDS);
        assert_eq!(fields.last().map(|field| field.1[0]), Some(2 * (1000 - MAX_COUNTED_FIELDS as u64 + 1)));
    }

    #[test]
    fn depth_costs_a_bit() {
        let text =
            format!("{{\"a\":{}{}}}", "[{\"b\":".repeat(50_000), "1".to_owned() + &"}]".repeat(50_000));
        assert_eq!(counted(&text), [("a".into(), [100_001, 50_000, 50_000])]);
    }

    /// Nothing panics, whatever the text is, and every part of one is counted in bounded time.
    #[test]
    fn what_is_no_json_ends() {
        assert_eq!(count_body_values(b""), None);
        assert_eq!(count_body_values(b"[1]"), None);
        assert_eq!(count_body_values(b" \"a\""), None);
        let whole = br#"{"a": ["b\\", {"c": [1e5, null]}], "d": "\ud800", "e": -1}"#;
        for end in 0..whole.len() {
            let _ = count_body_values(&whole[..end]);
        }
        for odd in
            ["{", "{]", "{}}", "{\"", "{\"\\", "{,,}", "{:1}", "{\"a\" 1 2}", "{1:2}", "{\"a\":\0\u{80}]]}"]
        {
            let _ = count_body_values(odd.as_bytes());
        }
        assert_eq!(counted("{\"a\": tru, \"b\": [1,,2]"), [("a".into(), [1, 0, 0]), ("b".into(), [3, 0, 1])]);
    }
}
