//! The markers around the reasoning of models, one row each.

use super::messages::{self, CHANNEL, MESSAGE};

/// How a model marks its reasoning.
#[derive(Debug, PartialEq, Eq)]
pub struct ReasoningFormat {
    /// Its name for `--reasoning-parser`.
    pub name: &'static str,
    /// Other names for it.
    pub aliases: &'static [&'static str],
    /// Begins the reasoning.
    pub open: &'static str,
    /// Ends the reasoning.
    pub close: &'static str,
    /// Ends it too, and belongs to what follows: a call may begin within the reasoning.
    pub also_ends: Option<&'static str>,
    /// Only a template that also contains this marks its reasoning like this.
    sign: Option<&'static str>,
    /// Whether an answer begins within reasoning unless the prompt says otherwise.
    pub begins_inside: bool,
}

/// Its turns consist of messages, which templates write one by one.
const OF_MESSAGES: &str = "openai_gptoss";
const KIMI_CALLS: &str = "<|tool_calls_section_begin|>";

const THINK: ReasoningFormat = ReasoningFormat {
    name: "qwen3",
    aliases: &["glm45", "deepseek_v3", "hunyuan_a13b", "ernie45", "minimax_m2"],
    open: "<think>",
    close: "</think>",
    also_ends: None,
    sign: None,
    begins_inside: false,
};

const REASONING: &[ReasoningFormat] = &[
    ReasoningFormat {
        name: "kimi_k2",
        aliases: &[],
        also_ends: Some(KIMI_CALLS),
        sign: Some(KIMI_CALLS),
        ..THINK
    },
    THINK,
    ReasoningFormat { name: "deepseek_r1", aliases: &[], begins_inside: true, ..THINK },
    ReasoningFormat { name: "seed_oss", aliases: &[], open: "<seed:think>", close: "</seed:think>", ..THINK },
    ReasoningFormat {
        name: OF_MESSAGES,
        aliases: &["openai"],
        open: "<|channel|>analysis<|message|>",
        close: "<|end|><|start|>assistant",
        ..THINK
    },
    ReasoningFormat { name: "mistral", aliases: &[], open: "[THINK]", close: "[/THINK]", ..THINK },
    ReasoningFormat {
        name: "granite",
        aliases: &[],
        open: "Here is my thought process:",
        close: "Here is my response:",
        ..THINK
    },
];

impl ReasoningFormat {
    /// All formats.
    #[must_use]
    pub fn all() -> &'static [Self] {
        REASONING
    }

    /// The format of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<&'static Self> {
        REASONING.iter().find(|format| format.name == name || format.aliases.contains(&name))
    }

    /// The format in which a chat template marks reasoning; `None` if it does not.
    #[must_use]
    pub fn of_template(template: &str) -> Option<&'static Self> {
        let has = |text: &str| template.contains(text);
        REASONING.iter().find(|format| {
            let is_marked =
                if format.is_of_messages() { has(CHANNEL) && has(MESSAGE) } else { has(format.close) };
            is_marked && format.sign.is_none_or(has)
        })
    }

    /// Whether a turn consists of messages in channels, of which one is reasoning.
    #[must_use]
    pub fn is_of_messages(&self) -> bool {
        self.name == OF_MESSAGES
    }

    /// Texts that may be single tokens, and special ones, which decoding would leave out.
    #[must_use]
    pub fn markers(&self) -> Vec<&'static str> {
        if self.is_of_messages() { messages::MARKERS.into() } else { vec![self.open, self.close] }
    }

    /// Whether an answer to this prompt begins within reasoning; the prompt's last marker decides.
    #[must_use]
    pub fn begins_within(&self, prompt: &str) -> bool {
        if self.is_of_messages() {
            return messages::begins_within_thoughts(prompt);
        }
        match (prompt.rfind(self.open), prompt.rfind(self.close)) {
            (None, None) => self.begins_inside,
            (open, close) => open > close,
        }
    }
}
