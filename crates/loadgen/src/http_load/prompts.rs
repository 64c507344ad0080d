//! `Prompts`: what is sent, made when its turn comes, so that a run of any length needs little memory.

use std::{fmt::Write, time::Duration};

use scheduler::ConfigError;

use super::{
    options::{MAX_LENGTH, within},
    random::Random,
};
use crate::{
    Trace, TraceError,
    trace::{HASH_BLOCK_TOKENS, PromptContent, TraceRequest},
};

/// Ids below this one are often special; prompts have none of them.
pub const FIRST_ID: u32 = 4;

/// Common words that most vocabularies have as one token with the space before them.
const WORDS: [&str; 64] = [
    "the", "of", "and", "to", "in", "is", "was", "for", "on", "that", "with", "he", "as", "it", "by", "at",
    "from", "his", "an", "are", "were", "which", "this", "be", "had", "not", "first", "but", "has", "their",
    "one", "its", "after", "new", "who", "they", "two", "her", "she", "been", "other", "when", "time", "all",
    "there", "into", "more", "school", "years", "over", "only", "year", "most", "would", "world", "city",
    "some", "where", "between", "later", "three", "state", "such", "then",
];

/// Numbers that keep the prompts of a run's phases apart.
const PREFIX_PURPOSE: u64 = 1 << 62;
const WARMUP_PURPOSE: u64 = 1 << 61;

/// What prompts are made of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Vocabulary {
    /// Token ids from 4 up to this number, which is not one of them.
    Ids(u32),
    /// Plain words; only the server knows how many tokens they are.
    Words,
}

/// Prompts of random content.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct RandomPrompts {
    /// What they are made of.
    pub vocabulary: Vocabulary,
    /// Tokens of the part that is like no other prompt's.
    pub input_len: u32,
    /// Tokens asked for.
    pub output_len: u32,
    /// Both lengths are drawn from `len · (1 − ratio) ..= len · (1 + ratio)`.
    pub range_ratio: f64,
    /// Tokens of the part before it, which several prompts share.
    pub prefix_len: u32,
    /// Such beginnings; each prompt has one of them.
    pub num_prefixes: u32,
}

/// A text with its length.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TextPrompt {
    /// Text.
    pub text: String,
    /// Tokens asked for.
    pub output_len: u32,
}

/// Where prompts come from.
#[derive(Clone, Debug)]
pub enum Prompts {
    /// Made up.
    Random(RandomPrompts),
    /// Given; used again from the beginning when there are too few.
    Texts(Vec<TextPrompt>),
    /// Lengths, times and common beginnings of a recorded trace.
    Trace(Trace, Vocabulary),
}

/// One prompt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Content {
    /// Token ids.
    Ids(Vec<u32>),
    /// Text.
    Text(String),
}

/// One request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LoadRequest {
    /// Prompt.
    pub content: Content,
    /// Tokens of the prompt, where they are known without asking the server.
    pub num_prompt_tokens: Option<u32>,
    /// Tokens asked for.
    pub max_tokens: u32,
    /// When the trace has it come.
    pub arrival: Duration,
}

impl Prompts {
    /// # Errors
    /// A number outside its limits.
    pub fn check(&self) -> Result<(), ConfigError> {
        match self {
            Self::Random(random) => random.check(),
            Self::Texts(texts) => {
                within("prompts of the data set", texts.len(), 1, usize::MAX)?;
                texts.iter().try_for_each(|text| {
                    within("output_len", text.output_len as usize, 1, MAX_LENGTH as usize)
                })
            }
            Self::Trace(_, vocabulary) => vocabulary.check(),
        }
    }

    /// The first `count` requests of a run.
    ///
    /// # Errors
    /// A trace that cannot be read.
    pub fn requests(
        &self,
        seed: u64,
        count: usize,
        is_warmup: bool,
    ) -> Result<Box<dyn Iterator<Item = Result<LoadRequest, TraceError>> + '_>, TraceError> {
        let phase = if is_warmup { WARMUP_PURPOSE } else { 0 };
        Ok(match self {
            Self::Random(random) => {
                let random = *random;
                Box::new((0..count as u64).map(move |index| Ok(random.request(seed, phase + index))))
            }
            Self::Texts(texts) => Box::new(texts.iter().cycle().take(count).map(|text| {
                Ok(LoadRequest {
                    content: Content::Text(text.text.clone()),
                    num_prompt_tokens: None,
                    max_tokens: text.output_len,
                    arrival: Duration::ZERO,
                })
            })),
            Self::Trace(trace, vocabulary) => {
                let vocabulary = *vocabulary;
                let requests = trace.requests()?.take(count);
                Box::new(requests.map(move |request| Ok(from_trace(&request?, seed, vocabulary))))
            }
        })
    }
}

impl RandomPrompts {
    fn check(&self) -> Result<(), ConfigError> {
        self.vocabulary.check()?;
        within("random_input_len", self.input_len as usize, 1, MAX_LENGTH as usize)?;
        within("random_output_len", self.output_len as usize, 1, MAX_LENGTH as usize)?;
        within("prefix_len", self.prefix_len as usize, 0, MAX_LENGTH as usize)?;
        within("num_prefixes", self.num_prefixes as usize, 1, MAX_LENGTH as usize)?;
        if (0.0..1.0).contains(&self.range_ratio) {
            return Ok(());
        }
        let rule = "at least 0 and below 1".to_owned();
        Err(ConfigError { name: "random_range_ratio", rule, value: self.range_ratio.to_string() })
    }

    fn request(&self, seed: u64, number: u64) -> LoadRequest {
        let mut random = Random::new(seed, number);
        let input_len = self.length(self.input_len, &mut random);
        let max_tokens = self.length(self.output_len, &mut random);
        let prefix = PREFIX_PURPOSE + u64::from(random.between(0, self.num_prefixes - 1));
        let mut content = self.vocabulary.empty();
        content.extend(self.prefix_len, self.vocabulary, &mut Random::new(seed, prefix));
        content.extend(input_len, self.vocabulary, &mut random);
        content.into_request(max_tokens, Duration::ZERO)
    }

    fn length(&self, mean: u32, random: &mut Random) -> u32 {
        let low = (f64::from(mean) * (1.0 - self.range_ratio)).floor().max(1.0);
        let high = (f64::from(mean) * (1.0 + self.range_ratio)).ceil();
        random.between(low as u32, high as u32)
    }
}

impl Vocabulary {
    fn check(self) -> Result<(), ConfigError> {
        match self {
            Self::Ids(size) => within("vocab_size", size as usize, FIRST_ID as usize + 2, 1 << 31),
            Self::Words => Ok(()),
        }
    }

    fn empty(self) -> Content {
        match self {
            Self::Ids(_) => Content::Ids(Vec::new()),
            Self::Words => Content::Text(String::new()),
        }
    }
}

impl Content {
    fn extend(&mut self, count: u32, vocabulary: Vocabulary, random: &mut Random) {
        match (self, vocabulary) {
            (Self::Ids(ids), Vocabulary::Ids(size)) => {
                ids.extend((0..count).map(|_| random.between(FIRST_ID, size - 1)));
            }
            (Self::Text(text), _) => {
                for _ in 0..count {
                    if !text.is_empty() {
                        text.push(' ');
                    }
                    text.push_str(WORDS[random.between(0, WORDS.len() as u32 - 1) as usize]);
                }
            }
            (Self::Ids(_), Vocabulary::Words) => {}
        }
    }

    fn into_request(self, max_tokens: u32, arrival: Duration) -> LoadRequest {
        let num_prompt_tokens = match &self {
            Self::Ids(ids) => Some(ids.len() as u32),
            Self::Text(_) => None,
        };
        LoadRequest { content: self, num_prompt_tokens, max_tokens, arrival }
    }
}

/// A recorded request with content of a vocabulary: equal hash ids are equal tokens.
fn from_trace(request: &TraceRequest, seed: u64, vocabulary: Vocabulary) -> LoadRequest {
    let mut content = vocabulary.empty();
    let mut left = request.num_prompt_tokens;
    match &request.content {
        PromptContent::HashIds(ids) => {
            for &id in ids {
                let count = left.min(HASH_BLOCK_TOKENS);
                content.extend(count, vocabulary, &mut Random::new(seed, PREFIX_PURPOSE + id));
                left -= count;
            }
        }
        PromptContent::Unique(number) => {
            content.extend(left, vocabulary, &mut Random::new(seed, *number));
        }
    }
    content.into_request(request.num_output_tokens.max(1), request.arrival)
}

impl LoadRequest {
    /// The body: `fields`, a JSON object without its closing brace, with `max_tokens` and the prompt.
    #[must_use]
    pub fn body(&self, fields: &str, is_chat: bool) -> String {
        let mut body = String::with_capacity(fields.len() + 64 + self.content.size());
        body.push_str(fields);
        if !fields.ends_with('{') {
            body.push(',');
        }
        let _ = write!(body, "\"max_tokens\":{},", self.max_tokens); // a String takes whatever is written
        body.push_str(if is_chat { "\"messages\":[{\"role\":\"user\",\"content\":" } else { "\"prompt\":" });
        match &self.content {
            Content::Ids(ids) => {
                body.push('[');
                for (place, id) in ids.iter().enumerate() {
                    let _ = write!(body, "{}{id}", if place == 0 { "" } else { "," });
                }
                body.push(']');
            }
            Content::Text(text) => body.push_str(&serde_json::Value::from(text.as_str()).to_string()),
        }
        body.push_str(if is_chat { "}]}" } else { "}" });
        body
    }
}

impl Content {
    fn size(&self) -> usize {
        match self {
            Self::Ids(ids) => ids.len() * 7,
            Self::Text(text) => text.len() + 16,
        }
    }
}
