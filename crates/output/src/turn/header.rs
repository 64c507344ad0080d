//! The head of a call: from its beginning to the beginning of its arguments.

use super::arguments::{Arguments, JsonArguments};
use super::brace_values::BraceValues;
use super::format::{CallSyntax, Elements};
use super::json_span::{JsonSpan, Span};
use super::python_values::PythonValues;
use super::xml_values::XmlValues;

/// Most bytes of a head, including arguments that precede their name. A longer text is content.
pub(super) const MAX_HEAD_BYTES: usize = 16 << 10;
/// Most bytes of the name of a tool.
const MAX_NAME_BYTES: usize = 256;

/// The result of reading a text that may begin a call.
#[derive(Debug)]
pub(super) enum Head {
    /// More text is needed.
    Undecided,
    /// Not a head: this many bytes are content, and the rest was not looked at.
    Wrong(usize),
    /// A call.
    Call {
        /// Name of the tool.
        name: String,
        /// Bytes of the head.
        len: usize,
        /// Reads the arguments that follow.
        arguments: Arguments,
    },
}

/// Read a head. `is_bare`: it has no marker, so it must look like a call completely. `may_list`: a list of calls may
/// begin here.
pub(super) fn read_head(syntax: CallSyntax, text: &str, is_bare: bool, may_list: bool) -> Head {
    let mut cursor = Cursor { text, at: 0 };
    let read = match syntax {
        CallSyntax::Object { .. } => cursor.listed_object(is_bare, may_list),
        CallSyntax::Named { separator, .. } => cursor.named(separator, may_list),
        CallSyntax::Numbered { separator } => cursor.numbered(separator),
        CallSyntax::Xml(elements) => cursor.xml(elements),
        CallSyntax::Python { is_listed } => cursor.python(may_list && is_listed),
        CallSyntax::Braces { quote } => cursor.braces(quote),
        CallSyntax::Channel { .. } => Err(Stop::Wrong), // `Messages` reads it
    };
    match read {
        Ok((name, arguments)) => Head::Call { name, len: cursor.at, arguments },
        Err(Stop::Undecided) if text.len() <= MAX_HEAD_BYTES => Head::Undecided,
        Err(_) => Head::Wrong(cursor.at),
    }
}

/// Why a head was not read to its end.
enum Stop {
    Undecided,
    Wrong,
}

type Read<T> = Result<T, Stop>;

struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn skip_space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    /// The next character after whitespace.
    fn peek(&mut self) -> Read<char> {
        self.skip_space();
        self.rest().chars().next().ok_or(Stop::Undecided)
    }

    fn expect(&mut self, literal: &str) -> Read<()> {
        let rest = self.rest();
        if rest.starts_with(literal) {
            self.at += literal.len();
            Ok(())
        } else if literal.starts_with(rest) {
            Err(Stop::Undecided)
        } else {
            Err(Stop::Wrong)
        }
    }

    /// Read a tool's name: at least one character, and something else after it.
    fn name(&mut self) -> Read<String> {
        let is_part =
            |char: char| char.is_ascii_alphanumeric() || matches!(char, '_' | '-' | '.' | '/' | ':');
        let rest = self.rest();
        let end = rest.find(|char| !is_part(char)).unwrap_or(rest.len());
        if end > MAX_NAME_BYTES || (end == 0 && !rest.is_empty()) {
            return Err(Stop::Wrong);
        }
        if end == rest.len() {
            return Err(Stop::Undecided);
        }
        self.at += end;
        Ok(rest[..end].to_owned())
    }

    fn json_text(&mut self) -> Read<String> {
        if self.peek()? != '"' {
            return Err(Stop::Wrong);
        }
        let value = self.json_value()?;
        serde_json::from_str(value).map_err(|_| Stop::Wrong)
    }

    fn json_value(&mut self) -> Read<&'a str> {
        self.skip_space();
        let rest = self.rest();
        match JsonSpan::default().scan(rest) {
            Span::Open => Err(Stop::Undecided),
            Span::Breaks(_) => Err(Stop::Wrong),
            Span::Ends(end) => {
                self.at += end;
                Ok(&rest[..end])
            }
        }
    }

    fn listed_object(&mut self, is_bare: bool, may_list: bool) -> Read<(String, Arguments)> {
        if may_list && !is_bare && self.peek()? == '[' {
            self.at += 1;
        }
        self.object(is_bare)
    }

    fn object(&mut self, is_bare: bool) -> Read<(String, Arguments)> {
        self.peek()?;
        self.expect("{")?;
        let mut name: Option<String> = None;
        let mut arguments: Option<&str> = None;
        loop {
            match self.peek()? {
                '}' => {
                    let name = name.filter(|_| !is_bare || arguments.is_some()).ok_or(Stop::Wrong)?;
                    self.at += 1;
                    return Ok((name, Arguments::Json(JsonArguments::whole(arguments.unwrap_or("{}")))));
                }
                ',' if name.is_some() || arguments.is_some() => self.at += 1,
                _ => {}
            }
            let key = self.json_text()?;
            if self.peek()? != ':' {
                return Err(Stop::Wrong);
            }
            self.at += 1;
            match key.as_str() {
                "name" => {
                    let value = self.json_text()?;
                    if value.is_empty() || value.len() > MAX_NAME_BYTES {
                        return Err(Stop::Wrong);
                    }
                    if let Some(arguments) = arguments {
                        return Ok((value, Arguments::Json(JsonArguments::in_object(Some(arguments)))));
                    }
                    name = Some(value);
                }
                "arguments" | "parameters" => {
                    self.peek()?;
                    if let Some(name) = name {
                        return Ok((name, Arguments::Json(JsonArguments::in_object(None))));
                    }
                    arguments = Some(self.json_value()?);
                }
                _ => {
                    self.json_value()?;
                }
            }
        }
    }

    fn named(&mut self, separator: &str, may_list: bool) -> Read<(String, Arguments)> {
        if may_list && self.peek()? == '[' {
            self.at += 1;
        }
        if self.peek()? == '{' {
            return self.object(false);
        }
        let name = self.name()?;
        if self.peek()? == '{' {
            return Ok((name, Arguments::Json(JsonArguments::alone())));
        }
        self.expect(separator.trim())?;
        self.peek()?;
        Ok((name, Arguments::Json(JsonArguments::alone())))
    }

    fn numbered(&mut self, separator: &str) -> Read<(String, Arguments)> {
        let mut name = self.name()?;
        if let Some((before, number)) = name.rsplit_once(':')
            && !before.is_empty()
            && number.bytes().all(|byte| byte.is_ascii_digit())
        {
            name.truncate(before.len());
        }
        self.expect(separator)?;
        self.peek()?;
        Ok((name, Arguments::Json(JsonArguments::alone())))
    }

    fn xml(&mut self, elements: &'static Elements) -> Read<(String, Arguments)> {
        let [before, behind] = elements.name;
        self.peek()?;
        self.expect(before)?;
        let name = self.name()?;
        self.expect(behind)?;
        if behind.is_empty() {
            // Must be an argument or the end, not a word of a text.
            let at = self.at;
            self.peek()?;
            match self.expect(elements.key[0]) {
                Err(Stop::Wrong) => self.expect(elements.end)?,
                read => read?,
            }
            self.at = at;
        }
        Ok((name, Arguments::Xml(XmlValues::new(elements))))
    }

    fn braces(&mut self, quote: &'static str) -> Read<(String, Arguments)> {
        self.peek()?;
        self.expect("call:")?;
        let name = self.name()?;
        self.peek()?;
        self.expect("{")?;
        Ok((name, Arguments::Braces(BraceValues::new(quote))))
    }

    fn python(&mut self, may_list: bool) -> Read<(String, Arguments)> {
        if may_list {
            self.peek()?;
            self.expect("[")?;
        }
        if !self.peek()?.is_ascii_alphabetic() && self.peek()? != '_' {
            return Err(Stop::Wrong);
        }
        let name = self.name()?;
        self.expect("(")?;
        let arguments = self.at;
        if self.peek()? != ')' {
            // An argument with its name, not a remark in brackets.
            self.name()?;
            self.peek()?;
            self.expect("=")?;
        }
        self.at = arguments;
        Ok((name, Arguments::Python(PythonValues::default())))
    }
}
