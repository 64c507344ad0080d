//! `ResponseEvents`: one answer as the numbered events of the Responses API.

mod item;

use std::collections::HashSet;
use std::io::Write;
use std::mem::take;
use std::sync::Arc;

use crate::answer_ids::new_call_id;
use crate::custom_input::custom_input;
use crate::response_events::item::{ItemKind, OpenItem, Said};
use crate::shared_bytes::SharedBytes;
use crate::turn::{CallIds, TurnEvent, TurnParser, TurnReading};

/// Events that come before those of the items: `response.created` and `response.in_progress`.
const NUM_OPENING_EVENTS: u64 = 2;

/// Parses the text of one answer and renders the events of its output items.
///
/// Items follow each other, so at most one is open at a time. Text, reasoning and the arguments of a call are all the text
/// of their item. The caller renders what comes before the first item and after the last one.
#[derive(Debug)]
pub struct ResponseEvents {
    /// How the text is parsed; `None`: it is all one message.
    turn: Option<(Arc<TurnReading>, TurnParser)>,
    /// Functions that stand for custom tools.
    custom: HashSet<String>,
    next_number: u64,
    num_items: u32,
    num_calls: u32,
    /// Whether the one call that is passed on is complete.
    has_called: bool,
    has_begun: bool,
    current: Option<OpenItem>,
    /// The JSON of the items that are complete.
    finished: Vec<SharedBytes>,
    /// Log-probabilities whose text is held back, as the inner part of a list.
    pending: Vec<u8>,
}

impl ResponseEvents {
    /// Start at the beginning of an answer. `custom` names the functions that stand for custom tools.
    #[must_use]
    pub fn new(reading: Option<Arc<TurnReading>>, custom: HashSet<String>) -> Self {
        let turn = reading.map(|reading| {
            let parser = reading.parser();
            (reading, parser)
        });
        Self {
            turn,
            custom,
            next_number: NUM_OPENING_EVENTS,
            num_items: 0,
            num_calls: 0,
            has_called: false,
            has_begun: false,
            current: None,
            finished: Vec::new(),
            pending: Vec::new(),
        }
    }

    /// The number of the next event, which the caller renders.
    pub fn take_number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number - 1
    }

    /// Whether this is its first news. The answer has then begun, even if it is not decided yet what it says.
    pub(crate) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.has_begun, true)
    }

    /// Append the events of what has become certain with more text.
    ///
    /// `logprobs`: the log-probabilities of its tokens, as the inner part of a JSON list. Those of messages are passed on.
    pub fn read(&mut self, text: &str, logprobs: &[u8], into: &mut Vec<u8>) {
        if !logprobs.is_empty() {
            if !self.pending.is_empty() {
                self.pending.push(b',');
            }
            self.pending.extend_from_slice(logprobs);
        }
        if let Some((_, parser)) = &mut self.turn {
            let events = parser.push(text);
            self.render(events, into);
        } else if !text.is_empty() || !self.pending.is_empty() {
            self.say(text, into);
        }
    }

    /// The events of what was held back of an answer that has ended, and of the end of its last item. An answer has one item
    /// at least. `is_whole`: it is not cut short.
    pub fn finish(&mut self, is_whole: bool) -> SharedBytes {
        let mut events = SharedBytes::default();
        let into = events.last();
        if let Some((_, parser)) = &mut self.turn {
            let held = parser.finish();
            self.render(held, into);
        }
        let is_message = self.current.as_ref().is_some_and(|item| item.kind == ItemKind::Message);
        if self.num_items == 0 || (is_message && !self.pending.is_empty()) {
            self.say("", into);
        }
        events.append(&self.close(is_whole));
        events
    }

    /// The events of the end of an item that an error has cut short.
    pub fn break_off(&mut self) -> SharedBytes {
        self.close(false)
    }

    /// The JSON list of the items that are complete.
    #[must_use]
    pub fn output(&self) -> SharedBytes {
        let mut output = SharedBytes::default();
        output.last().push(b'[');
        for (index, item) in self.finished.iter().enumerate() {
            if index > 0 {
                output.last().push(b',');
            }
            output.append(item);
        }
        output.last().push(b']');
        output
    }

    fn render(&mut self, events: Vec<TurnEvent>, into: &mut Vec<u8>) {
        for event in events {
            if self.has_called {
                break;
            }
            match event {
                TurnEvent::Content(text) => self.say(&text, into),
                TurnEvent::Reasoning(text) => self.think(&text, into),
                TurnEvent::CallBegin { name, .. } => self.call(&name, into),
                TurnEvent::CallArgs(text) => {
                    self.pending.clear();
                    match &mut self.current {
                        Some(item) if item.kind == ItemKind::CustomToolCall => item.arguments += &text,
                        _ => self.more(&text, &[], into),
                    }
                }
                TurnEvent::CallEnd => {
                    self.has_called = self.turn.as_ref().is_some_and(|(reading, _)| !reading.is_parallel);
                }
            }
        }
    }

    fn say(&mut self, text: &str, into: &mut Vec<u8>) {
        self.within(ItemKind::Message, into);
        let logprobs = take(&mut self.pending);
        if !text.is_empty() || !logprobs.is_empty() {
            self.more(text, &logprobs, into);
        }
    }

    fn think(&mut self, text: &str, into: &mut Vec<u8>) {
        if self.turn.as_ref().is_some_and(|(reading, _)| reading.reasoning_fields.is_empty()) {
            return;
        }
        self.pending.clear();
        self.within(ItemKind::Reasoning, into);
        self.more(text, &[], into);
    }

    fn call(&mut self, name: &str, into: &mut Vec<u8>) {
        self.pending.clear();
        let ids = self.turn.as_ref().map_or(CallIds::Random, |(reading, _)| reading.call_ids);
        let call_id = new_call_id(ids, name, self.num_calls);
        self.num_calls += 1;
        let is_custom = self.custom.contains(name);
        let kind = if is_custom { ItemKind::CustomToolCall } else { ItemKind::FunctionCall };
        self.open(kind, name, &call_id, into);
    }

    /// See that an item of this kind is open.
    fn within(&mut self, kind: ItemKind, into: &mut Vec<u8>) {
        if self.current.as_ref().is_none_or(|item| item.kind != kind) {
            self.open(kind, "", "", into);
        }
    }

    /// Begin an item, which ends the one before it.
    fn open(&mut self, kind: ItemKind, name: &str, call_id: &str, into: &mut Vec<u8>) {
        self.close(true).copy_to(into);
        let item = OpenItem::new(kind, self.num_items, name, call_id);
        self.num_items += 1;
        self.head("response.output_item", "added", into);
        write_all(into, format_args!(r#""output_index":{},"item":"#, item.index));
        item.json("in_progress", None).copy_to(into);
        into.extend_from_slice(b"}\n\n");
        if kind.has_part() {
            self.head("response.content_part", "added", into);
            into.extend_from_slice(&item.place);
            into.extend_from_slice(br#","part":"#);
            item.part(&Said::default()).copy_to(into);
            into.extend_from_slice(b"}\n\n");
        }
        self.current = Some(item);
    }

    /// Append the event of more text of the open item.
    fn more(&mut self, text: &str, logprobs: &[u8], into: &mut Vec<u8>) {
        let Some(kind) = self.current.as_ref().map(|item| item.kind) else { return };
        self.head(kind.events(), "delta", into);
        let Some(item) = &mut self.current else { return };
        into.extend_from_slice(&item.place);
        into.extend_from_slice(br#","delta":"#);
        let start = into.len();
        write_string(text, into);
        item.add(&into[start + 1..into.len() - 1], logprobs);
        if kind == ItemKind::Message {
            into.extend_from_slice(br#","logprobs":["#);
            into.extend_from_slice(logprobs);
            into.push(b']');
        }
        into.extend_from_slice(b"}\n\n");
    }

    /// The events of the end of the open item, if there is one.
    fn close(&mut self, is_whole: bool) -> SharedBytes {
        let mut events = SharedBytes::default();
        if let Some(item) = self.current.as_mut().filter(|item| item.kind == ItemKind::CustomToolCall) {
            let input = custom_input(&take(&mut item.arguments));
            if !input.is_empty() {
                self.more(&input, &[], events.last());
            }
        }
        let Some(mut item) = self.current.take() else { return events };
        let said = item.take_said();

        self.head(item.kind.events(), "done", events.last());
        events.last().extend_from_slice(&item.place);
        write_all(events.last(), format_args!(r#","{}":""#, item.kind.said()));
        events.share(&said.text);
        events.last().push(b'"');
        if item.kind == ItemKind::Message {
            events.last().extend_from_slice(br#","logprobs":["#);
            events.share(&said.logprobs);
            events.last().push(b']');
        } else if item.kind == ItemKind::FunctionCall {
            events.last().extend_from_slice(br#","name":"#);
            events.last().extend_from_slice(&item.name);
        }
        events.last().extend_from_slice(b"}\n\n");

        if item.kind.has_part() {
            self.head("response.content_part", "done", events.last());
            events.last().extend_from_slice(&item.place);
            events.last().extend_from_slice(br#","part":"#);
            events.append(&item.part(&said));
            events.last().extend_from_slice(b"}\n\n");
        }

        let whole = item.json(if is_whole { "completed" } else { "incomplete" }, Some(&said));
        self.head("response.output_item", "done", events.last());
        write_all(events.last(), format_args!(r#""output_index":{},"item":"#, item.index));
        events.append(&whole);
        events.last().extend_from_slice(b"}\n\n");
        self.finished.push(whole);
        events
    }

    /// Append the beginning of an event, with its number.
    fn head(&mut self, subject: &str, what: &str, into: &mut Vec<u8>) {
        let number = self.take_number();
        let kind = format_args!("{subject}.{what}");
        let head = format_args!("event: {kind}\ndata: {{\"type\":\"{kind}\",\"sequence_number\":{number},");
        write_all(into, head);
    }
}

fn write_all(into: &mut Vec<u8>, text: std::fmt::Arguments<'_>) {
    into.write_fmt(text).expect("memory takes it");
}

fn write_string(text: &str, into: &mut Vec<u8>) {
    serde_json::to_writer(into, text).expect("a string is JSON, and memory takes it");
}
