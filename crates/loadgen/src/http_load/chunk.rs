//! `Chunk`: what one event of a completions or chat stream says that a measurement needs.
//!
//! The texts themselves are looked at and not kept: a chunk costs one pass over its bytes and no allocation.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};

/// The data that ends a stream.
pub(super) const DONE: &[u8] = b"[DONE]";

/// Tokens as the server counted them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// Of the prompt.
    #[serde(deserialize_with = "number_or_zero")]
    pub prompt_tokens: u64,
    /// Of the answer.
    #[serde(deserialize_with = "number_or_zero")]
    pub completion_tokens: u64,
}

/// One event.
#[derive(Clone, PartialEq, Debug, Default, Deserialize)]
pub struct Chunk {
    /// Its choices, taken together.
    #[serde(default)]
    pub choices: Choices,
    /// Tokens so far; the last one of a stream counts.
    #[serde(default)]
    pub usage: Option<Usage>,
    /// The server's message when it gave up.
    #[serde(default)]
    pub error: Option<StreamError>,
}

/// What the choices of an event bring.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Choices {
    /// Any at all.
    pub any: bool,
    /// Text that is not empty, of an answer, a chain of thought or a tool call.
    pub has_text: bool,
    /// A reason to end.
    pub finished: bool,
}

/// The message of an error inside a stream.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StreamError(pub String);

#[derive(Deserialize, Default)]
#[serde(default)]
struct Choice {
    text: HasText,
    delta: Option<Delta>,
    finish_reason: HasText,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Delta {
    content: HasText,
    reasoning_content: HasText,
    reasoning: HasText,
    tool_calls: HasText,
}

/// Whether a value holds something: a string that is not empty, a list that is not.
#[derive(Clone, Copy, Default)]
struct HasText(bool);

impl<'de> Deserialize<'de> for HasText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Look;
        impl<'de> Visitor<'de> for Look {
            type Value = HasText;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("text, a list or null")
            }

            fn visit_str<E>(self, text: &str) -> Result<HasText, E> {
                Ok(HasText(!text.is_empty()))
            }

            fn visit_unit<E>(self) -> Result<HasText, E> {
                Ok(HasText(false))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<HasText, A::Error> {
                let mut any = false;
                while list.next_element::<IgnoredAny>()?.is_some() {
                    any = true;
                }
                Ok(HasText(any))
            }
        }
        deserializer.deserialize_any(Look)
    }
}

impl<'de> Deserialize<'de> for Choices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Look;
        impl<'de> Visitor<'de> for Look {
            type Value = Choices;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of choices")
            }

            fn visit_unit<E>(self) -> Result<Choices, E> {
                Ok(Choices::default())
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Choices, A::Error> {
                let mut choices = Choices::default();
                while let Some(choice) = list.next_element::<Choice>()? {
                    choices.any = true;
                    choices.finished |= choice.finish_reason.0;
                    choices.has_text |= choice.text.0
                        || choice.delta.is_some_and(|delta| {
                            delta.content.0
                                || delta.reasoning_content.0
                                || delta.reasoning.0
                                || delta.tool_calls.0
                        });
                }
                Ok(choices)
            }
        }
        deserializer.deserialize_any(Look)
    }
}

impl<'de> Deserialize<'de> for StreamError {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Look;
        impl<'de> Visitor<'de> for Look {
            type Value = StreamError;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a message or an object with one")
            }

            fn visit_str<E>(self, text: &str) -> Result<StreamError, E> {
                Ok(StreamError(text.to_owned()))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<StreamError, A::Error> {
                let mut message = None;
                while let Some(key) = map.next_key::<String>()? {
                    if key == "message" {
                        message = map.next_value::<Option<String>>()?;
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(StreamError(message.unwrap_or_else(|| "an error without a message".to_owned())))
            }
        }
        deserializer.deserialize_any(Look)
    }
}

fn number_or_zero<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    Ok(Option::<u64>::deserialize(deserializer)?.unwrap_or(0))
}

impl Chunk {
    /// Read one event's data.
    ///
    /// # Errors
    /// Not a JSON object of this form; says where.
    pub fn parse(data: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(data)
    }
}
