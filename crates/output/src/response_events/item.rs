//! `OpenItem`: an output item of the Responses API while its text arrives, and its JSON.

use std::sync::Arc;

use crate::answer_ids::new_id;
use crate::shared_bytes::SharedBytes;

/// What an item is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ItemKind {
    Message,
    Reasoning,
    FunctionCall,
    /// A call of a function that stands for a custom tool, whose input is one text.
    CustomToolCall,
}

impl ItemKind {
    fn name(self) -> &'static str {
        match self {
            Self::Message => "message",
            Self::Reasoning => "reasoning",
            Self::FunctionCall => "function_call",
            Self::CustomToolCall => "custom_tool_call",
        }
    }

    fn id_prefix(self) -> &'static str {
        match self {
            Self::Message => "msg_",
            Self::Reasoning => "rs_",
            Self::FunctionCall => "fc_",
            Self::CustomToolCall => "ctc_",
        }
    }

    /// What the types of the events of its text begin with.
    pub(crate) fn events(self) -> &'static str {
        match self {
            Self::Message => "response.output_text",
            Self::Reasoning => "response.reasoning_text",
            Self::FunctionCall => "response.function_call_arguments",
            Self::CustomToolCall => "response.custom_tool_call_input",
        }
    }

    /// The member that holds all of its text.
    pub(crate) fn said(self) -> &'static str {
        match self {
            Self::Message | Self::Reasoning => "text",
            Self::FunctionCall => "arguments",
            Self::CustomToolCall => "input",
        }
    }

    /// Whether its text stands in a part of it.
    pub(crate) fn has_part(self) -> bool {
        matches!(self, Self::Message | Self::Reasoning)
    }
}

/// What an item has said: the inner part of a JSON string, and that of a JSON list.
#[derive(Debug, Clone, Default)]
pub(crate) struct Said {
    pub(crate) text: Arc<Vec<u8>>,
    pub(crate) logprobs: Arc<Vec<u8>>,
}

/// The item that is open.
#[derive(Debug, Clone)]
pub(crate) struct OpenItem {
    pub(crate) kind: ItemKind,
    pub(crate) index: u32,
    id: String,
    /// Of the tool, as JSON.
    pub(crate) name: Vec<u8>,
    /// As JSON.
    call_id: Vec<u8>,
    /// The members of its events that say where they belong.
    pub(crate) place: Vec<u8>,
    /// As in [`Said`].
    text: Vec<u8>,
    logprobs: Vec<u8>,
    /// Arguments of a custom tool, whose input can only be read out of all of them.
    pub(crate) arguments: String,
}

impl OpenItem {
    pub(crate) fn new(kind: ItemKind, index: u32, name: &str, call_id: &str) -> Self {
        let id = new_id(kind.id_prefix());
        let mut place = format!(r#""item_id":"{id}","output_index":{index}"#).into_bytes();
        if kind.has_part() {
            place.extend_from_slice(br#","content_index":0"#);
        }
        Self {
            kind,
            index,
            id,
            name: json_string(name),
            call_id: json_string(call_id),
            place,
            text: Vec::new(),
            logprobs: Vec::new(),
            arguments: String::new(),
        }
    }

    /// Add text, the inner part of a JSON string, and log-probabilities, that of a list.
    pub(crate) fn add(&mut self, text: &[u8], logprobs: &[u8]) {
        self.text.extend_from_slice(text);
        if !logprobs.is_empty() {
            if !self.logprobs.is_empty() {
                self.logprobs.push(b',');
            }
            self.logprobs.extend_from_slice(logprobs);
        }
    }

    /// Take what it has said.
    pub(crate) fn take_said(&mut self) -> Said {
        let (text, logprobs) = (&mut self.text, &mut self.logprobs);
        Said { text: Arc::new(std::mem::take(text)), logprobs: Arc::new(std::mem::take(logprobs)) }
    }

    /// The JSON of its part.
    pub(crate) fn part(&self, said: &Said) -> SharedBytes {
        let mut part = SharedBytes::default();
        let is_message = self.kind == ItemKind::Message;
        let kind = if is_message { "output_text" } else { "reasoning_text" };
        part.last().extend_from_slice(format!(r#"{{"type":"{kind}","text":""#).as_bytes());
        part.share(&said.text);
        part.last().push(b'"');
        if is_message {
            part.last().extend_from_slice(br#","annotations":[],"logprobs":["#);
            part.share(&said.logprobs);
            part.last().push(b']');
        }
        part.last().push(b'}');
        part
    }

    /// Its JSON. Without `said` it is new, and has no part yet.
    pub(crate) fn json(&self, status: &str, said: Option<&Said>) -> SharedBytes {
        let mut json = SharedBytes::default();
        let (id, kind) = (&self.id, self.kind.name());
        json.last()
            .extend_from_slice(format!(r#"{{"id":"{id}","type":"{kind}","status":"{status}""#).as_bytes());
        let (before, after): (&[u8], &[u8]) = match self.kind {
            ItemKind::Message => (br#","role":"assistant","content":["#, b"]}"),
            ItemKind::Reasoning => (br#","summary":[],"content":["#, br#"],"encrypted_content":null}"#),
            ItemKind::FunctionCall | ItemKind::CustomToolCall => {
                for (member, value) in [("call_id", &self.call_id), ("name", &self.name)] {
                    json.last().extend_from_slice(format!(r#","{member}":"#).as_bytes());
                    json.last().extend_from_slice(value);
                }
                json.last().extend_from_slice(format!(r#","{}":""#, self.kind.said()).as_bytes());
                (b"", b"\"}")
            }
        };
        json.last().extend_from_slice(before);
        match said {
            None => {}
            Some(said) if self.kind.has_part() => json.append(&self.part(said)),
            Some(said) => json.share(&said.text),
        }
        json.last().extend_from_slice(after);
        json
    }
}

fn json_string(text: &str) -> Vec<u8> {
    serde_json::to_vec(text).expect("a string is JSON, and memory takes it")
}
