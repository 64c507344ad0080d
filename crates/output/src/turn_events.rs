//! `TurnEvents`: the content, reasoning and tool calls of one answer as server-sent events.

use std::io::Write;
use std::sync::Arc;

use crate::answer_ids::new_call_id;
use crate::event_template::EventTemplate;
use crate::turn::{TurnEvent, TurnParser, TurnReading};

/// Reads the text of one answer and renders an event for each part of it.
///
/// The template's bytes surround the choice's `delta` member, which is made here.
#[derive(Debug, Clone)]
pub struct TurnEvents {
    reading: Arc<TurnReading>,
    parser: TurnParser,
    template: EventTemplate,
    num_calls: u32,
    has_begun: bool,
    /// Whether the one call that is passed on is complete.
    has_called: bool,
}

impl TurnEvents {
    /// Start at the beginning of an answer.
    #[must_use]
    pub fn new(reading: Arc<TurnReading>, template: EventTemplate) -> Self {
        let parser = reading.parser();
        Self { reading, parser, template, num_calls: 0, has_begun: false, has_called: false }
    }

    /// Number of calls that have begun; all of them or only the first are passed on.
    #[must_use]
    pub fn num_calls(&self) -> u32 {
        self.num_calls
    }

    /// Whether this is its first news. The answer has then begun, even if it is not decided yet what it says.
    pub(crate) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.has_begun, true)
    }

    /// Append the events of what has become certain with more text.
    pub fn read(&mut self, text: &str, into: &mut Vec<u8>) {
        let events = self.parser.push(text);
        self.render(events, into);
    }

    /// Append the events of what was held back of a text that has ended.
    pub fn finish(&mut self, into: &mut Vec<u8>) {
        let events = self.parser.finish();
        self.render(events, into);
    }

    fn render(&mut self, events: Vec<TurnEvent>, into: &mut Vec<u8>) {
        for event in events {
            if let TurnEvent::CallBegin { .. } = event {
                self.num_calls += 1;
            }
            if self.has_called {
                continue;
            }
            let is_passed_on = match event {
                TurnEvent::Content(_) | TurnEvent::CallBegin { .. } | TurnEvent::CallArgs(_) => true,
                TurnEvent::Reasoning(_) => !self.reading.reasoning_fields.is_empty(),
                TurnEvent::CallEnd => {
                    self.has_called = !self.reading.is_parallel;
                    false
                }
            };
            if is_passed_on {
                into.extend_from_slice(self.template.before());
                self.render_delta(&event, into);
                into.extend_from_slice(self.template.after());
            }
        }
    }

    fn render_delta(&self, event: &TurnEvent, into: &mut Vec<u8>) {
        let index = self.num_calls.saturating_sub(1);
        match event {
            TurnEvent::Content(text) => {
                into.extend_from_slice(br#","delta":{"content":"#);
                write_string(text, into);
                into.push(b'}');
            }
            TurnEvent::Reasoning(text) => {
                into.extend_from_slice(br#","delta":{"#);
                let mut said = 0..0;
                for (place, field) in self.reading.reasoning_fields.iter().enumerate() {
                    if place > 0 {
                        into.push(b',');
                    }
                    write_string(field, into);
                    into.push(b':');
                    if place > 0 {
                        into.extend_from_within(said.clone());
                        continue;
                    }
                    let start = into.len();
                    write_string(text, into);
                    said = start..into.len();
                }
                into.push(b'}');
            }
            TurnEvent::CallBegin { name, .. } => {
                write_all(into, format_args!(r#","delta":{{"tool_calls":[{{"index":{index},"id":"#));
                write_string(&new_call_id(self.reading.call_ids, name, index), into);
                into.extend_from_slice(br#","type":"function","function":{"name":"#);
                write_string(name, into);
                into.extend_from_slice(br#","arguments":""}}]}"#);
            }
            TurnEvent::CallArgs(text) => {
                write_all(
                    into,
                    format_args!(r#","delta":{{"tool_calls":[{{"index":{index},"function":{{"arguments":"#),
                );
                write_string(text, into);
                into.extend_from_slice(b"}}]}");
            }
            TurnEvent::CallEnd => {}
        }
    }
}

fn write_all(into: &mut Vec<u8>, text: std::fmt::Arguments<'_>) {
    into.write_fmt(text).expect("memory takes it");
}

fn write_string(text: &str, into: &mut Vec<u8>) {
    serde_json::to_writer(into, text).expect("a string is JSON, and memory takes it");
}
