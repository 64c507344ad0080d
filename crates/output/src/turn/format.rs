//! The formats in which models write tool calls and reasoning, one row each.

use super::call_syntax::{ARG_KEY, DSML, FUNCTION, INVOKE, SEED_FUNCTION};
pub(super) use super::call_syntax::{CallSyntax, Elements};

/// The style of the ids of calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallIds {
    /// `call_`, then letters and digits.
    Random,
    /// Exactly 9 letters and digits.
    Short,
    /// `functions.`, the name of the tool, and the number of the call.
    Numbered,
}

impl CallIds {
    /// Its name in Python.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Random => "random",
            Self::Short => "short",
            Self::Numbered => "numbered",
        }
    }
}

/// How a model writes a turn with calls.
#[derive(Debug)]
pub struct TurnFormat {
    /// Its name for `--tool-call-parser`.
    pub name: &'static str,
    /// Other names for it.
    pub aliases: &'static [&'static str],
    /// A chat template that contains one of these writes its calls like this.
    pub(super) signs: &'static [&'static str],
    /// Markers before calls; a grammar writes the first one.
    pub(super) open: &'static [&'static str],
    /// An answer that begins with this character may be a call without a marker.
    pub(super) bare: Option<char>,
    pub(super) syntax: CallSyntax,
    /// What ends a call.
    pub(super) ends: &'static [&'static str],
    /// What separates the calls of a group, after their ends.
    pub(super) separators: &'static [&'static str],
    /// What ends a group.
    pub(super) closers: &'static [&'static str],
    /// Texts around content that do not belong to it.
    pub(super) silent: &'static [&'static str],
    /// What a grammar writes before the first call, between two calls, and after the last.
    pub(super) written: Written,
    /// The style of the ids of calls.
    pub ids: CallIds,
}

/// What a grammar writes around calls.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) before: &'static str,
    pub(super) between: &'static str,
    pub(super) behind: &'static str,
}

/// Each call has its own tags.
const HERMES: TurnFormat = TurnFormat {
    name: "hermes",
    aliases: &["granite4", "ernie45", "longcat"],
    signs: &["<tool_call>"],
    open: &["<tool_call>"],
    bare: None,
    syntax: CallSyntax::Object { arguments: "arguments" },
    ends: &["</tool_call>"],
    separators: &[],
    closers: &[],
    silent: &[],
    written: Written {
        before: "<tool_call>\n",
        between: "\n</tool_call>\n<tool_call>\n",
        behind: "\n</tool_call>",
    },
    ids: CallIds::Random,
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
    silent: &[],
    written: Written { before: "[TOOL_CALLS][", between: ", ", behind: "]" },
    ids: CallIds::Short,
};

const PYTHONIC: TurnFormat = TurnFormat {
    name: "pythonic",
    aliases: &[],
    signs: &["[func_name1(", "[func1("],
    open: &[],
    bare: Some('['),
    syntax: CallSyntax::Python { is_listed: true },
    ends: &[],
    separators: &[","],
    closers: &["]"],
    silent: &[],
    written: Written { before: "[", between: ", ", behind: "]" },
    ids: CallIds::Random,
};

/// Calls in one list after a marker.
const LISTED: TurnFormat = TurnFormat {
    name: "jamba",
    aliases: &["hunyuan_a13b"],
    signs: &["<tool_calls>["],
    open: &["<tool_calls>"],
    bare: None,
    syntax: CallSyntax::Object { arguments: "arguments" },
    ends: &[],
    separators: &[","],
    closers: &["]", "</tool_calls>"],
    silent: &[],
    written: Written { before: "<tool_calls>[", between: ", ", behind: "]</tool_calls>" },
    ids: CallIds::Random,
};

const FUNCTION_GEMMA: TurnFormat = TurnFormat {
    name: "functiongemma",
    aliases: &[],
    signs: &["<start_function_call>"],
    open: &["<start_function_call>"],
    bare: None,
    syntax: CallSyntax::Braces { quote: "<escape>" },
    ends: &["<end_function_call>"],
    separators: &[],
    closers: &[],
    silent: &[],
    written: Written {
        before: "<start_function_call>",
        between: "<end_function_call><start_function_call>",
        behind: "<end_function_call>",
    },
    ids: CallIds::Random,
};

/// Signs of templates with calls that look like those of a known format but differ: Cohere's, functionary's, `MiniMax`
/// M3's.
const FOREIGN_SIGNS: &[&str] =
    &["\"tool_name\": ", "<function=example_function_name>{", "<atem:invoke", "ns_token ~ '<tool_call>'"];

/// A template has the first format whose sign it contains; formats with specific signs come first.
const FORMATS: &[TurnFormat] = &[
    TurnFormat {
        name: "deepseek_v3",
        aliases: &[],
        signs: &["['type'] + '<｜tool▁sep｜>'"],
        open: &["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"],
        bare: None,
        syntax: CallSyntax::Named { separator: "\n```json\n", writes_objects: false },
        ends: &["```", "<｜tool▁call▁end｜>"],
        separators: &["<｜tool▁call▁begin｜>function<｜tool▁sep｜>"],
        closers: &["<｜tool▁calls▁end｜>"],
        silent: &[],
        written: Written {
            before: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            between: "\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            behind: "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        },
        ids: CallIds::Random,
    },
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
        silent: &[],
        written: Written {
            before: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
            between: "<｜tool▁call▁end｜><｜tool▁call▁begin｜>",
            behind: "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        },
        ids: CallIds::Random,
    },
    TurnFormat {
        name: "seed_oss",
        aliases: &[],
        signs: &["<seed:tool_call>"],
        open: &["<seed:tool_call>"],
        syntax: CallSyntax::Xml(&SEED_FUNCTION),
        ends: &["</seed:tool_call>"],
        written: Written {
            before: "<seed:tool_call>\n",
            between: "\n</seed:tool_call>\n<seed:tool_call>\n",
            behind: "\n</seed:tool_call>",
        },
        ..HERMES
    },
    TurnFormat {
        name: "qwen3_coder",
        aliases: &["qwen3_xml", "mimo", "step3p5"],
        signs: &["<function="],
        syntax: CallSyntax::Xml(&FUNCTION),
        ..HERMES
    },
    TurnFormat {
        name: "glm45",
        aliases: &["glm47"],
        signs: &["<arg_key>"],
        syntax: CallSyntax::Xml(&ARG_KEY),
        ends: &[],
        written: Written { before: "<tool_call>", between: "\n<tool_call>", behind: "" },
        ..HERMES
    },
    TurnFormat {
        name: "minimax_m2",
        aliases: &[],
        signs: &["<minimax:tool_call>"],
        open: &["<minimax:tool_call>\n<invoke name=\"", "<minimax:tool_call><invoke name=\""],
        bare: None,
        syntax: CallSyntax::Xml(&INVOKE),
        ends: &[],
        separators: &["<invoke name=\""],
        closers: &["</minimax:tool_call>"],
        silent: &[],
        written: Written {
            before: "<minimax:tool_call>\n<invoke name=\"",
            between: "\n<invoke name=\"",
            behind: "\n</minimax:tool_call>",
        },
        ids: CallIds::Random,
    },
    TurnFormat {
        name: "deepseek_v32",
        aliases: &[],
        signs: &["<｜DSML｜", "dsml_token + 'function_calls>"],
        open: &[
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"",
            "<｜DSML｜function_calls><｜DSML｜invoke name=\"",
        ],
        bare: None,
        syntax: CallSyntax::Xml(&DSML),
        ends: &[],
        separators: &["<｜DSML｜invoke name=\""],
        closers: &["</｜DSML｜function_calls>"],
        silent: &[],
        written: Written {
            before: "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"",
            between: "\n<｜DSML｜invoke name=\"",
            behind: "\n</｜DSML｜function_calls>",
        },
        ids: CallIds::Random,
    },
    FUNCTION_GEMMA,
    TurnFormat {
        name: "gemma4",
        signs: &["<|tool_call>"],
        open: &["<|tool_call>"],
        syntax: CallSyntax::Braces { quote: "<|\"|>" },
        ends: &["<tool_call|>"],
        written: Written {
            before: "<|tool_call>",
            between: "<tool_call|><|tool_call>",
            behind: "<tool_call|>",
        },
        ..FUNCTION_GEMMA
    },
    TurnFormat {
        name: "olmo3",
        signs: &["<function_calls>"],
        open: &["<function_calls>"],
        bare: None,
        syntax: CallSyntax::Python { is_listed: false },
        separators: &[""],
        closers: &["</function_calls>"],
        silent: &[],
        written: Written { before: "<function_calls>", between: "\n", behind: "</function_calls>" },
        ..PYTHONIC
    },
    // gpt-oss: a message for each call, in a channel that names the recipient; see `Messages`.
    TurnFormat {
        name: "openai",
        aliases: &["openai_gptoss"],
        signs: &["<|channel|>"],
        open: &["<|channel|>commentary to=functions."],
        bare: None,
        syntax: CallSyntax::Channel { words: " <|constrain|>json", separator: "<|message|>" },
        ends: &[],
        separators: &[],
        closers: &[],
        silent: &[],
        written: Written {
            before: "<|channel|>commentary to=functions.",
            between: "<|call|><|start|>assistant<|channel|>commentary to=functions.",
            behind: "<|call|>",
        },
        ids: CallIds::Random,
    },
    TurnFormat {
        name: "kimi_k2",
        aliases: &[],
        signs: &["<|tool_call_argument_begin|>"],
        open: &["<|tool_calls_section_begin|><|tool_call_begin|>functions."],
        bare: None,
        syntax: CallSyntax::Numbered { separator: "<|tool_call_argument_begin|>" },
        ends: &["<|tool_call_end|>"],
        separators: &["<|tool_call_begin|>functions."],
        closers: &["<|tool_calls_section_end|>"],
        silent: &[],
        written: Written {
            before: "<|tool_calls_section_begin|><|tool_call_begin|>functions.",
            between: "<|tool_call_end|><|tool_call_begin|>functions.",
            behind: "<|tool_call_end|><|tool_calls_section_end|>",
        },
        ids: CallIds::Numbered,
    },
    TurnFormat {
        name: "lfm2",
        aliases: &[],
        signs: &["<|tool_call_start|>", "<|tool_list_start|>"],
        open: &["<|tool_call_start|>"],
        bare: None,
        closers: &["]", "<|tool_call_end|>"],
        silent: &[],
        written: Written { before: "<|tool_call_start|>[", between: ", ", behind: "]<|tool_call_end|>" },
        ..PYTHONIC
    },
    TurnFormat {
        name: "internlm",
        aliases: &[],
        signs: &["<|action_start|>"],
        open: &["<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"],
        bare: None,
        syntax: CallSyntax::Object { arguments: "parameters" },
        ends: &["<|action_end|>"],
        separators: &[],
        closers: &[],
        silent: &[],
        written: Written {
            before: "<|action_start|><|plugin|>\n",
            between: "<|action_end|><|action_start|><|plugin|>\n",
            behind: "<|action_end|>",
        },
        ids: CallIds::Random,
    },
    TurnFormat {
        name: "granite",
        aliases: &[],
        signs: &["<|tool_call|>"],
        open: &["<|tool_call|>"],
        written: Written { before: "<|tool_call|>[", between: ", ", behind: "]" },
        ..LISTED
    },
    LISTED,
    TurnFormat {
        name: "phi4_mini_json",
        aliases: &[],
        signs: &["functools"],
        open: &["functools"],
        written: Written { before: "functools[", between: ", ", behind: "]" },
        ..LISTED
    },
    // Newer templates of the family put a marker before each call; parsing is the same.
    TurnFormat {
        name: "mistral_args",
        signs: &["[ARGS]"],
        syntax: CallSyntax::Named { separator: "[ARGS]", writes_objects: false },
        written: Written { before: "[TOOL_CALLS]", between: "[TOOL_CALLS]", behind: "" },
        ..MISTRAL
    },
    MISTRAL,
    HERMES,
    PYTHONIC,
    // Chosen by the flag only, because templates of the family mention both of its formats.
    TurnFormat {
        name: "llama4_pythonic",
        aliases: &[],
        signs: &[],
        open: &["<|python_start|>"],
        closers: &["]", "<|python_end|>"],
        ..PYTHONIC
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
        silent: &[],
        written: Written { before: "", between: "; ", behind: "" },
        ids: CallIds::Random,
    },
];

impl TurnFormat {
    /// All formats.
    #[must_use]
    pub fn all() -> &'static [Self] {
        FORMATS
    }

    /// The format of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        FORMATS.iter().find(|format| format.name == name || format.aliases.contains(&name))
    }

    /// The format in which a chat template writes calls; `None` if it does not mention tools.
    #[must_use]
    pub fn of_template(template: &str) -> Option<&'static Self> {
        if !template.contains("tools") && !template.contains("tool_calls") {
            return None;
        }
        if FOREIGN_SIGNS.iter().any(|sign| template.contains(sign)) {
            return None;
        }
        FORMATS.iter().find(|format| format.signs.iter().any(|sign| template.contains(sign)))
    }

    /// Whether a turn consists of messages, of which some are calls.
    #[must_use]
    pub fn is_of_messages(&self) -> bool {
        matches!(self.syntax, CallSyntax::Channel { .. })
    }

    /// The texts that may follow a call.
    pub(super) fn literals(&self) -> impl Iterator<Item = &'static str> {
        [self.ends, self.closers, self.open, self.separators].into_iter().flatten().copied()
    }

    /// Texts that may be single tokens, which a grammar does not treat as text.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let inner = match self.syntax {
            CallSyntax::Named { separator, writes_objects: false } | CallSyntax::Numbered { separator } => {
                vec![separator]
            }
            CallSyntax::Channel { words, separator } => vec![words, separator],
            CallSyntax::Braces { quote } => vec![quote],
            _ => Vec::new(),
        };
        MARKERS.iter().copied().filter(move |marker| {
            let end = if let CallSyntax::Xml(elements) = self.syntax { elements.end } else { "" };
            let texts = [self.written.before, self.written.between, self.written.behind, end];
            texts.iter().chain(self.open).chain(&inner).any(|text| text.contains(marker))
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
    "<|tool_call|>",
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|action_start|>",
    "<|plugin|>",
    "<|action_end|>",
    "<tool_calls>",
    "</tool_calls>",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "functools",
    "<start_function_call>",
    "<end_function_call>",
    "<escape>",
    "<|tool_call>",
    "<tool_call|>",
    "<|\"|>",
    "<function_calls>",
    "</function_calls>",
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
];
