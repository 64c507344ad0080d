//! How one call is written: the shapes that the rows of formats share.

/// How one call is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CallSyntax {
    /// `{"name": "f", "arguments": {…}}`, in a list if `[` stands before the first.
    Object {
        /// What the arguments are called when a grammar writes them; either name is read.
        arguments: &'static str,
    },
    /// `f`, a separator, `{…}`; or, behind a `[` or as `{`, objects as above.
    Named {
        /// Between name and arguments.
        separator: &'static str,
        /// A grammar writes objects.
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
        /// In a list of calls.
        is_listed: bool,
    },
    /// `call:f{k:"text",n:1}`, with a mark of its own for the quotes of texts.
    Braces {
        /// Before and behind a text.
        quote: &'static str,
    },
    /// `f`, words about the message, a separator, `{…}`.
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
    /// Before and behind the name of the tool; what stands before it may be the format's marker instead.
    pub(super) name: [&'static str; 2],
    /// Before and behind the name of an argument.
    pub(super) key: [&'static str; 2],
    /// Before and behind its value.
    pub(super) value: [&'static str; 2],
    /// A line break stands on both sides of a value, which does not belong to it.
    pub(super) has_breaks: bool,
    /// Behind all arguments.
    pub(super) end: &'static str,
    /// Behind the name of an argument: before `true` where its value is text, before `false` where it is JSON.
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

/// As `FUNCTION`, with values that stand between their tags as they are.
pub(super) const SEED_FUNCTION: Elements = Elements { has_breaks: false, ..FUNCTION };
