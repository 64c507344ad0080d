//! How a call is written: the shapes that several formats share.

/// The notation of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallSyntax {
    /// `{"name": "f", "arguments": {…}}`, in a list if a `[` precedes the first.
    Object {
        /// The name of the arguments that a grammar writes; the parser accepts either name.
        arguments: &'static str,
    },
    /// `f`, a separator, `{…}`; or, after a `[` or as `{`, objects as above.
    Named {
        /// Between name and arguments.
        separator: &'static str,
        /// Whether a grammar writes objects.
        writes_objects: bool,
    },
    /// `f:0`, a separator, `{…}`: names with the numbers of their calls.
    Numbered {
        /// Between number and arguments.
        separator: &'static str,
    },
    /// `f` and elements, one for each argument.
    Xml(&'static Elements),
    /// `f(k='text', n=1)`.
    Python {
        /// Whether it is in a list of calls.
        is_listed: bool,
    },
    /// `call:f{k:"text",n:1}`, with a special mark in place of the quotes.
    Braces {
        /// Before and after a string.
        quote: &'static str,
    },
    /// `f`, words about the message, a separator, `{…}`: a message of a turn that consists of messages.
    Channel {
        /// What a grammar writes between name and separator.
        words: &'static str,
        /// Before the arguments.
        separator: &'static str,
    },
}

impl CallSyntax {
    /// Whether a further call of a group may begin with this character.
    pub(super) fn begins_with(self, char: char) -> bool {
        match self {
            Self::Object { .. } => char == '{',
            Self::Named { .. } | Self::Python { .. } => {
                char == '{' || char == '_' || char.is_ascii_alphabetic()
            }
            Self::Numbered { .. } => char == '_' || char.is_ascii_alphabetic(),
            Self::Xml(elements) => elements.name[0].is_empty() && (char == '_' || char.is_ascii_alphabetic()),
            Self::Braces { .. } | Self::Channel { .. } => false,
        }
    }
}

/// The tags of a call whose arguments are elements.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Elements {
    /// Before and after the name of the tool; the format's marker may take the place of the first.
    pub(super) name: [&'static str; 2],
    /// Before and after the name of an argument.
    pub(super) key: [&'static str; 2],
    /// Before and after its value.
    pub(super) value: [&'static str; 2],
    /// Whether a line break on each side of a value does not belong to it.
    pub(super) has_breaks: bool,
    /// After all arguments.
    pub(super) end: &'static str,
    /// An attribute after an argument's name: followed by `true` if its value is text, by `false` if it is JSON.
    pub(super) text_flag: Option<&'static str>,
}

pub(super) const FUNCTION: Elements = Elements {
    name: ["<function=", ">"],
    key: ["<parameter=", ">"],
    value: ["", "</parameter>"],
    has_breaks: true,
    end: "</function>",
    text_flag: None,
};

pub(super) const ARG_KEY: Elements = Elements {
    name: ["", ""],
    key: ["<arg_key>", "</arg_key>"],
    value: ["<arg_value>", "</arg_value>"],
    has_breaks: false,
    end: "</tool_call>",
    text_flag: None,
};

pub(super) const INVOKE: Elements = Elements {
    name: ["", "\">"],
    key: ["<parameter name=\"", "\">"],
    value: ["", "</parameter>"],
    has_breaks: false,
    end: "</invoke>",
    text_flag: None,
};

pub(super) const DSML: Elements = Elements {
    name: ["", "\">"],
    key: ["<｜DSML｜parameter name=\"", "\">"],
    value: ["", "</｜DSML｜parameter>"],
    has_breaks: false,
    end: "</｜DSML｜invoke>",
    text_flag: Some("\" string=\""),
};

/// Like `FUNCTION`, but everything between the tags belongs to the value.
pub(super) const SEED_FUNCTION: Elements = Elements { has_breaks: false, ..FUNCTION };
