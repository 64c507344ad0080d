//! The formats in which models write calls and thoughts, one row each.

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
    /// `<function=f>`, then `<parameter=k>` value `</parameter>` each, then `</function>`.
    Xml,
    /// `f(k='text', n=1)` in a list of calls.
    Python,
}

impl CallSyntax {
    /// Whether a further call of a group may begin with this character.
    pub(super) fn begins_with(self, char: char) -> bool {
        match self {
            Self::Object { .. } => char == '{',
            Self::Named { .. } | Self::Python => char == '{' || char == '_' || char.is_ascii_alphabetic(),
            Self::Xml => false,
        }
    }
}

/// How a model's turn with calls is written.
#[derive(Debug)]
pub struct TurnFormat {
    /// What `--tool-call-parser` calls it.
    pub name: &'static str,
    /// Other names for it.
    pub aliases: &'static [&'static str],
    /// A template that has one of these writes its calls so.
    pub(super) signs: &'static [&'static str],
    /// Texts that calls stand behind; the first is what a grammar writes.
    pub(super) open: &'static [&'static str],
    /// An answer that begins with this character may be a call without a marker.
    pub(super) bare: Option<char>,
    pub(super) syntax: CallSyntax,
    /// What ends a call.
    pub(super) ends: &'static [&'static str],
    /// What stands between calls of a group, behind their ends.
    pub(super) separators: &'static [&'static str],
    /// What ends a group.
    pub(super) closers: &'static [&'static str],
    /// A grammar's texts: before the first call, between two of them, and behind the last.
    pub(super) written: Written,
    /// Ids of calls have 9 letters and digits, and nothing else.
    pub has_short_ids: bool,
}

/// What a grammar writes around calls.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) before: &'static str,
    pub(super) between: &'static str,
    pub(super) behind: &'static str,
}

/// Each call within tags of its own.
const HERMES: TurnFormat = TurnFormat {
    name: "hermes",
    aliases: &["granite4", "longcat"],
    signs: &["<tool_call>"],
    open: &["<tool_call>"],
    bare: None,
    syntax: CallSyntax::Object { arguments: "arguments" },
    ends: &["</tool_call>"],
    separators: &[],
    closers: &[],
    written: Written {
        before: "<tool_call>\n",
        between: "\n</tool_call>\n<tool_call>\n",
        behind: "\n</tool_call>",
    },
    has_short_ids: false,
};

const MISTRAL: TurnFormat = TurnFormat {
    name: "mistral",
    aliases: &[],
    signs: &["[TOOL_CALLS]"],
    open: &["[TOOL_CALLS]"],
    bare: None,
    syntax: CallSyntax::Named { separator: "[ARGS]", writes_objects: true },
    ends: &[],
    separators: &[","],
    closers: &["]"],
    written: Written { before: "[TOOL_CALLS][", between: ", ", behind: "]" },
    has_short_ids: true,
};

/// The first whose sign a template has is the template's: those with signs of their own come first.
const FORMATS: &[TurnFormat] = &[
    TurnFormat {
        name: "deepseek_v31",
        aliases: &[],
        signs: &["<｜tool▁sep｜>"],
        open: &["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"],
        bare: None,
        syntax: CallSyntax::Named { separator: "<｜tool▁sep｜>", writes_objects: false },
        ends: &["<｜tool▁call▁end｜>"],
        separators: &["<｜tool▁call▁begin｜>"],
        closers: &["<｜tool▁calls▁end｜>"],
        written: Written {
            before: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            between: "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
            behind: "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        },
        has_short_ids: false,
    },
    TurnFormat {
        name: "qwen3_coder",
        aliases: &["qwen3_xml", "mimo", "step3p5"],
        signs: &["<function="],
        syntax: CallSyntax::Xml,
        ..HERMES
    },
    // Its newer templates write each call behind a marker of its own; what is read is the same.
    TurnFormat {
        name: "mistral_args",
        signs: &["[ARGS]"],
        syntax: CallSyntax::Named { separator: "[ARGS]", writes_objects: false },
        written: Written { before: "[TOOL_CALLS]", between: "[TOOL_CALLS]", behind: "" },
        ..MISTRAL
    },
    MISTRAL,
    HERMES,
    TurnFormat {
        name: "pythonic",
        aliases: &[],
        signs: &["[func_name1(", "[func1("],
        open: &[],
        bare: Some('['),
        syntax: CallSyntax::Python,
        ends: &[],
        separators: &[","],
        closers: &["]"],
        written: Written { before: "[", between: ", ", behind: "]" },
        has_short_ids: false,
    },
    TurnFormat {
        name: "llama3_json",
        aliases: &["llama4_json"],
        signs: &["<|python_tag|>", "\"parameters\": "],
        open: &["<|python_tag|>"],
        bare: Some('{'),
        syntax: CallSyntax::Object { arguments: "parameters" },
        ends: &[],
        separators: &[";", ","],
        closers: &[],
        written: Written { before: "", between: "; ", behind: "" },
        has_short_ids: false,
    },
];

impl TurnFormat {
    /// All of them.
    #[must_use]
    pub fn all() -> &'static [Self] {
        FORMATS
    }

    /// The format of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        FORMATS.iter().find(|format| format.name == name || format.aliases.contains(&name))
    }

    /// The format in which a chat template writes calls; none if it knows of no tools.
    #[must_use]
    pub fn of_template(template: &str) -> Option<&'static Self> {
        if !template.contains("tools") && !template.contains("tool_calls") {
            return None;
        }
        FORMATS.iter().find(|format| format.signs.iter().any(|sign| template.contains(sign)))
    }

    /// What may stand behind a call.
    pub(super) fn literals(&self) -> impl Iterator<Item = &'static str> {
        [self.ends, self.closers, self.open, self.separators].into_iter().flatten().copied()
    }

    /// Texts that may be tokens of their own, which are not text to a grammar.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let separator = match self.syntax {
            CallSyntax::Named { separator, writes_objects: false } => Some(separator),
            _ => None,
        };
        MARKERS.iter().copied().filter(move |marker| {
            let texts = [self.written.before, self.written.between, self.written.behind];
            texts.iter().chain(self.open).any(|text| text.contains(marker)) || separator == Some(*marker)
        })
    }
}

/// Every marker that may be one token.
const MARKERS: &[&str] = &[
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "<|python_tag|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
];

/// How a model marks its thoughts.
#[derive(Debug, PartialEq, Eq)]
pub struct ReasoningFormat {
    /// What `--reasoning-parser` calls it.
    pub name: &'static str,
    /// Other names for it.
    pub aliases: &'static [&'static str],
    /// Begins them.
    pub open: &'static str,
    /// Ends them.
    pub close: &'static str,
    /// An answer begins within them wherever the prompt does not say otherwise.
    pub begins_inside: bool,
}

const THINK: ReasoningFormat = ReasoningFormat {
    name: "qwen3",
    aliases: &["glm45", "deepseek_v3", "hunyuan_a13b", "ernie45", "minimax_m2"],
    open: "<think>",
    close: "</think>",
    begins_inside: false,
};

const REASONING: &[ReasoningFormat] = &[
    THINK,
    ReasoningFormat { name: "deepseek_r1", aliases: &[], begins_inside: true, ..THINK },
    ReasoningFormat {
        name: "seed_oss",
        aliases: &[],
        open: "<seed:think>",
        close: "</seed:think>",
        begins_inside: false,
    },
    ReasoningFormat {
        name: "mistral",
        aliases: &[],
        open: "[THINK]",
        close: "[/THINK]",
        begins_inside: false,
    },
];

impl ReasoningFormat {
    /// All of them.
    #[must_use]
    pub fn all() -> &'static [Self] {
        REASONING
    }

    /// The format of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        REASONING.iter().find(|format| format.name == name || format.aliases.contains(&name))
    }

    /// The format in which a chat template marks thoughts; none if it does not.
    #[must_use]
    pub fn of_template(template: &str) -> Option<&'static Self> {
        REASONING.iter().find(|format| template.contains(format.close))
    }

    /// Whether an answer to this prompt begins within thoughts: its last marker decides.
    #[must_use]
    pub fn begins_within(&self, prompt: &str) -> bool {
        match (prompt.rfind(self.open), prompt.rfind(self.close)) {
            (None, None) => self.begins_inside,
            (open, close) => open > close,
        }
    }
}
