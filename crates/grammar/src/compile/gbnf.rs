//! GBNF, llama.cpp's notation for grammars, as Lark.
//!
//! A rule `name ::= alternatives` becomes a Lark rule; character classes become regular expressions of one character,
//! `root` becomes `start`.

use std::{collections::HashSet, fmt::Write};

use crate::error::GrammarError;

/// Groups within groups at most.
const MAX_DEPTH: usize = 64;

/// A grammar in GBNF, written in Lark.
///
/// # Errors
/// It is not GBNF; the line is named.
pub fn to_lark(text: &str) -> Result<String, GrammarError> {
    let mut reader = Reader { rest: text, line: 1, used: Vec::new() };
    let mut lark = String::new();
    let mut rules = HashSet::new();
    reader.skip(true);
    while !reader.rest.is_empty() {
        let name = reader.name()?;
        reader.skip(true);
        if !reader.take("::=") {
            return Err(reader.error(&format!("expected ::= behind {name}")));
        }
        if !rules.insert(name.clone()) {
            return Err(reader.error(&format!("the rule {name} is there twice")));
        }
        let body = reader.alternatives(0)?;
        let _ = writeln!(lark, "{}: {body}", lark_name(&name));
        reader.skip(true);
    }
    if !rules.contains("root") {
        return Err(reader.error("there is no rule root"));
    }
    match reader.used.iter().find(|(name, _)| !rules.contains(name)) {
        Some((name, line)) => {
            Err(GrammarError::BadGbnf { line: *line, what: format!("there is no rule {name}") })
        }
        None => Ok(lark),
    }
}

/// `root` is where Lark starts; the other names cannot be words of Lark.
fn lark_name(name: &str) -> String {
    if name == "root" {
        return "start".to_owned();
    }
    let mut lark = "r_".to_owned();
    for character in name.chars() {
        match character {
            'a'..='z' | '0'..='9' => lark.push(character),
            // Different names stay different.
            other => {
                let _ = write!(lark, "_{:x}_", u32::from(other));
            }
        }
    }
    lark
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
    /// Names that rules refer to, with their lines.
    used: Vec<(String, usize)>,
}

impl Reader<'_> {
    fn error(&self, what: &str) -> GrammarError {
        GrammarError::BadGbnf { line: self.line, what: what.to_owned() }
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let character = self.peek()?;
        self.rest = &self.rest[character.len_utf8()..];
        self.line += usize::from(character == '\n');
        Some(character)
    }

    fn take(&mut self, prefix: &str) -> bool {
        let rest = self.rest.strip_prefix(prefix);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Pass over spaces and comments, with `lines` over line ends too.
    fn skip(&mut self, lines: bool) {
        while let Some(character) = self.peek() {
            match character {
                '#' => {
                    while self.peek().is_some_and(|character| character != '\n') {
                        self.next();
                    }
                }
                '\n' | '\r' if !lines => return,
                character if character.is_whitespace() => {
                    self.next();
                }
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Result<String, GrammarError> {
        let is_part = |character: char| character.is_ascii_alphanumeric() || "-_".contains(character);
        let end = self.rest.find(|character| !is_part(character)).unwrap_or(self.rest.len());
        if end == 0 {
            return Err(self.error("expected the name of a rule"));
        }
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        Ok(name.to_owned())
    }

    /// Alternatives up to the end of the rule, or of the group at `depth`.
    fn alternatives(&mut self, depth: usize) -> Result<String, GrammarError> {
        if depth > MAX_DEPTH {
            return Err(self.error(&format!("groups are more than {MAX_DEPTH} deep")));
        }
        let mut alternatives = Vec::new();
        loop {
            alternatives.push(self.sequence(depth)?);
            if !self.take("|") {
                return Ok(alternatives.join(" | "));
            }
            self.skip(true);
        }
    }

    fn sequence(&mut self, depth: usize) -> Result<String, GrammarError> {
        let mut parts: Vec<String> = Vec::new();
        loop {
            // A rule ends with its line; a group goes on.
            self.skip(depth > 0);
            let Some(character) = self.peek() else { break };
            let part = match character {
                '"' => self.literal()?,
                '[' => self.class()?,
                '.' => {
                    self.next();
                    "/(?s:.)/".to_owned()
                }
                '(' => {
                    self.next();
                    let group = self.alternatives(depth + 1)?;
                    self.skip(true);
                    if !self.take(")") {
                        return Err(self.error("expected )"));
                    }
                    format!("({group})")
                }
                character if character.is_ascii_alphanumeric() || character == '_' => {
                    let line = self.line;
                    let name = self.name()?;
                    let lark = lark_name(&name);
                    self.used.push((name, line));
                    lark
                }
                _ => break,
            };
            let repeat = self.repeat()?;
            parts.push(part + &repeat);
        }
        if !matches!(self.peek(), None | Some('|' | ')' | '\n' | '\r'))
            || (depth == 0 && self.peek() == Some(')'))
        {
            let found = self.peek().unwrap_or_default();
            return Err(self.error(&format!("{found:?} is not expected here")));
        }
        Ok(if parts.is_empty() { "\"\"".to_owned() } else { parts.join(" ") })
    }

    fn repeat(&mut self) -> Result<String, GrammarError> {
        match self.peek() {
            Some(mark @ ('*' | '+' | '?')) => {
                self.next();
                Ok(mark.to_string())
            }
            Some('{') => {
                let end = self.rest.find('}').ok_or_else(|| self.error("expected }"))?;
                let bounds = &self.rest[1..end];
                let is_bound =
                    |bound: &str| bound.bytes().all(|byte| byte.is_ascii_digit()) && bound.len() < 10;
                let (least, most) = bounds.split_once(',').unwrap_or((bounds, bounds));
                let (least, most) = (least.trim(), most.trim());
                if least.is_empty() || !is_bound(least) || !is_bound(most) {
                    return Err(self.error(&format!("{{{bounds}}} is not a number of repeats")));
                }
                let repeat =
                    if bounds.contains(',') { format!("{{{least},{most}}}") } else { format!("{{{least}}}") };
                self.rest = &self.rest[end + 1..];
                Ok(repeat)
            }
            _ => Ok(String::new()),
        }
    }

    fn literal(&mut self) -> Result<String, GrammarError> {
        self.next();
        let mut text = String::new();
        loop {
            match self.next() {
                None => return Err(self.error("a text is not closed")),
                Some('"') => return Ok(serde_json::Value::String(text).to_string()),
                Some('\\') => text.push(self.escaped()?),
                Some(character) => text.push(character),
            }
        }
    }

    fn class(&mut self) -> Result<String, GrammarError> {
        self.next();
        let mut class = "/[".to_owned();
        if self.take("^") {
            class.push('^');
        }
        let mut is_empty = true;
        loop {
            let character = match self.next() {
                None => return Err(self.error("a class of characters is not closed")),
                Some(']') if is_empty => return Err(self.error("a class of characters is empty")),
                Some(']') => break,
                // A range, unless it stands at an end.
                Some('-') if !is_empty && self.peek() != Some(']') => {
                    class.push('-');
                    continue;
                }
                Some('\\') => self.escaped()?,
                Some(character) => character,
            };
            let _ = write!(class, "\\x{{{:x}}}", u32::from(character));
            is_empty = false;
        }
        Ok(class + "]/")
    }

    fn escaped(&mut self) -> Result<char, GrammarError> {
        let digits = match self.next() {
            Some('n') => return Ok('\n'),
            Some('r') => return Ok('\r'),
            Some('t') => return Ok('\t'),
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            Some(character) if !character.is_ascii_alphanumeric() => return Ok(character),
            other => return Err(self.error(&format!("\\{} is not known", other.unwrap_or_default()))),
        };
        let code = self.rest.get(..digits).and_then(|code| u32::from_str_radix(code, 16).ok());
        let character = code.and_then(char::from_u32);
        let character =
            character.ok_or_else(|| self.error(&format!("expected {digits} hexadecimal digits")))?;
        self.rest = &self.rest[digits..];
        Ok(character)
    }
}

#[cfg(test)]
mod tests {
    use super::to_lark;

    #[test]
    fn gbnf_becomes_lark() {
        let gbnf = "# sums\nroot ::= term (\"+\" term)* end-Mark?\nterm ::= [0-9]{1,3} | \"a\\\"\\x41\" # two\n\
                    end-Mark ::= [^\\]\\-a-] .\n";
        let lark = "start: r_term (\"+\" r_term)* r_end_2d__4d_ark?\n\
                    r_term: /[\\x{30}-\\x{39}]/{1,3} | \"a\\\"A\"\n\
                    r_end_2d__4d_ark: /[^\\x{5d}\\x{2d}\\x{61}\\x{2d}]/ /(?s:.)/\n";
        assert_eq!(to_lark(gbnf).expect("GBNF"), lark);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (gbnf, expected) in [
            ("root = \"a\"", "line 1: expected ::= behind root"),
            ("root ::= \"a\"\n\nroot ::= \"b\"", "line 3: the rule root is there twice"),
            ("a ::= \"a\"", "there is no rule root"),
            ("root ::= a\na ::= b", "line 2: there is no rule b"),
            ("root ::= \"a", "a text is not closed"),
            ("root ::= [a", "not closed"),
            ("root ::= []", "is empty"),
            ("root ::= (\"a\"", "expected )"),
            ("root ::= \"a\")", "')' is not expected here"),
            ("root ::= \"a\"{x}", "{x} is not a number of repeats"),
            ("root ::= \"a\"{2", "expected }"),
            ("root ::= \"\\q\"", "\\q is not known"),
            ("root ::= \"\\x4\"", "expected 2 hexadecimal digits"),
            ("root ::= \"\\uD800\"", "expected 4 hexadecimal digits"),
        ] {
            let error = to_lark(gbnf).expect_err(gbnf).to_string();
            assert!(error.contains(expected), "{error}");
        }
        let deep = format!("root ::= {}\"a\"{}", "(".repeat(100_000), ")".repeat(100_000));
        assert!(to_lark(&deep).expect_err("deep").to_string().contains("more than 64 deep"));
    }
}
