//! The marks in which models write thoughts, one row each.

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
        name: "openai_gptoss",
        aliases: &["openai"],
        open: "<|channel|>analysis<|message|>",
        close: "<|end|><|start|>assistant",
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
