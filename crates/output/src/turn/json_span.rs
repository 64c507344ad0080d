//! Finds where a JSON value ends while it arrives; looks at each byte once.

/// The state of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Span {
    /// It continues after the text.
    Open,
    /// It ends before this byte of the text.
    Ends(usize),
    /// This byte of the text is not valid JSON.
    Breaks(usize),
}

/// Follows one value from its first byte on; counts brackets but does not match their kinds.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct JsonSpan {
    depth: u32,
    in_text: bool,
    is_escaped: bool,
    in_scalar: bool,
}

impl JsonSpan {
    /// Start within this many open brackets.
    pub(super) fn within(depth: u32) -> Self {
        Self { depth, ..Self::default() }
    }

    /// Read more of the value.
    pub(super) fn scan(&mut self, text: &str) -> Span {
        for (at, byte) in text.bytes().enumerate() {
            if self.in_text {
                match byte {
                    _ if self.is_escaped => self.is_escaped = false,
                    b'\\' => self.is_escaped = true,
                    b'"' => {
                        self.in_text = false;
                        if self.depth == 0 {
                            return Span::Ends(at + 1);
                        }
                    }
                    _ => {}
                }
                continue;
            }
            let is_scalar = byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
            if self.depth == 0 && self.in_scalar && !is_scalar {
                return Span::Ends(at);
            }
            match byte {
                b'"' => self.in_text = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' if self.depth > 0 => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Span::Ends(at + 1);
                    }
                }
                b',' | b':' | b' ' | b'\n' | b'\r' | b'\t' if self.depth > 0 => {}
                _ if is_scalar => self.in_scalar = self.depth == 0,
                _ => return Span::Breaks(at),
            }
        }
        Span::Open
    }
}

#[cfg(test)]
mod tests {
    use super::{JsonSpan, Span};

    #[test]
    fn a_value_ends_where_it_ends_however_it_comes() {
        for (text, end) in [
            (r#"{"a": [1, "]}"]} tail"#, Span::Ends(16)),
            (r#""a\"b\\" tail"#, Span::Ends(8)),
            ("-1.5e3, 2", Span::Ends(6)),
            ("true}", Span::Ends(4)),
            (r#"{"a": 1<"#, Span::Breaks(7)),
            ("}", Span::Breaks(0)),
            (r#"{"a": "<"#, Span::Open),
        ] {
            assert_eq!(JsonSpan::default().scan(text), end, "{text}");
            let mut span = JsonSpan::default();
            let found =
                text.char_indices().find_map(|(at, char)| match span.scan(&text[at..at + char.len_utf8()]) {
                    Span::Open => None,
                    Span::Ends(end) => Some(Span::Ends(at + end)),
                    Span::Breaks(end) => Some(Span::Breaks(at + end)),
                });
            assert_eq!(found.unwrap_or(Span::Open), end, "{text}");
        }
    }
}
