//! Parses a turn while it arrives.

use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};

use super::arguments::Arguments;
use super::event::{TurnEvent, push};
use super::format::TurnFormat;
use super::header::{Head, read_head};
use super::messages::Messages;
use super::progress::Progress;
use super::reasoning::ReasoningFormat;
use super::tool::Tool;

/// Splits the text of one turn into content, reasoning and calls. However the text is cut into pieces, the joined
/// events are the same.
#[derive(Debug, Clone)]
pub struct TurnParser {
    /// Reads a turn of messages; the rest is not used then.
    messages: Option<Box<Messages>>,
    format: Option<&'static TurnFormat>,
    reasoning: Option<&'static ReasoningFormat>,
    tools: Arc<[Tool]>,
    /// Finds what begins a call (first), what surrounds content (next), and what begins reasoning (last).
    markers: Option<AhoCorasick>,
    marker_texts: Vec<&'static str>,
    state: State,
    /// Text that is not decided yet.
    held: String,
    /// Whitespace after content, or before any content: dropped if a call follows.
    space: String,
    /// Whether only whitespace and reasoning came so far.
    is_first: bool,
    /// Reasoning comes before the answer or not at all; a later marker is text.
    thinks_once: bool,
    may_think: bool,
    num_calls: u32,
    events: Vec<TurnEvent>,
}

#[derive(Debug, Clone)]
enum State {
    Content,
    /// Whether there was any reasoning yet; line breaks before it are dropped.
    Reasoning {
        has_text: bool,
    },
    /// Line breaks after reasoning are dropped.
    BehindReasoning,
    /// Bytes of the marker at the beginning of `held`, whether a list may begin after it, and whether it follows a call.
    Head {
        marker_len: usize,
        may_list: bool,
        follows_call: bool,
    },
    Arguments {
        reader: Arguments,
        tool: Option<usize>,
    },
    /// After a call; whether its group may continue without a marker.
    Between {
        may_go_on: bool,
    },
}

/// Whether a step of the parser changed anything.
enum Step {
    On,
    NeedsMore,
}

impl TurnParser {
    /// Make a parser for the beginning of a turn.
    ///
    /// `format`: look for calls. `reasoning`: look for reasoning; the turn begins within it if `begins_within`.
    #[must_use]
    pub fn new(
        format: Option<&'static TurnFormat>,
        reasoning: Option<&'static ReasoningFormat>,
        tools: Arc<[Tool]>,
        begins_within: bool,
    ) -> Self {
        let is_of_messages = format.map_or_else(
            || reasoning.is_some_and(ReasoningFormat::is_of_messages),
            TurnFormat::is_of_messages,
        );
        let messages = is_of_messages.then(|| {
            let tools = Arc::clone(&tools);
            Box::new(Messages::new(format.is_some(), reasoning.is_some(), tools, begins_within))
        });
        let mut marker_texts: Vec<&'static str> =
            format.map_or_else(Vec::new, |format| [format.open, format.silent].concat());
        marker_texts.extend(reasoning.map(|reasoning| reasoning.open));
        let markers = AhoCorasick::builder().match_kind(MatchKind::LeftmostFirst).build(&marker_texts);
        let is_inside = begins_within && reasoning.is_some();
        Self {
            messages,
            format,
            reasoning,
            tools,
            markers: markers.ok().filter(|_| !marker_texts.is_empty()),
            marker_texts,
            state: if is_inside { State::Reasoning { has_text: false } } else { State::Content },
            held: String::new(),
            space: String::new(),
            is_first: true,
            thinks_once: false,
            may_think: true,
            num_calls: 0,
            events: Vec::new(),
        }
    }

    /// Expect reasoning only at the beginning of an answer: later, what looks like its marker is text.
    #[must_use]
    pub fn thinking_once(mut self) -> Self {
        self.thinks_once = true;
        self
    }

    /// Take more text; returns the events that have become certain.
    pub fn push(&mut self, text: &str) -> Vec<TurnEvent> {
        if let Some(messages) = &mut self.messages {
            return messages.push(text);
        }
        self.held.push_str(text);
        let mut at = 0;
        let held = std::mem::take(&mut self.held);
        while let Step::On = self.step(&held, &mut at) {}
        self.held = held;
        self.held.drain(..at);
        std::mem::take(&mut self.events)
    }

    /// The text has ended: returns the events of what was held back.
    pub fn finish(&mut self) -> Vec<TurnEvent> {
        if let Some(messages) = &mut self.messages {
            return messages.finish();
        }
        let rest = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Content) {
            State::Content | State::Head { follows_call: false, .. } | State::BehindReasoning => {
                // All that is left may be a line break that was dropped, or would have been dropped before a call.
                let rest = std::mem::take(&mut self.space) + &rest;
                self.emit(TurnEvent::Content, &rest);
            }
            State::Reasoning { .. } => self.emit(TurnEvent::Reasoning, rest.trim_end_matches('\n')),
            State::Arguments { mut reader, .. } => {
                let mut out = String::new();
                reader.cut(&rest, &mut out);
                self.emit(TurnEvent::CallArgs, &out);
            }
            // What is left begins what may follow a call: a marker, or another call. An answer that was cut there says none
            // of it.
            State::Between { .. } | State::Head { follows_call: true, .. } => {}
        }
        std::mem::take(&mut self.events)
    }

    /// Whether the next text is reasoning.
    #[must_use]
    pub fn is_reasoning(&self) -> bool {
        match &self.messages {
            Some(messages) => messages.is_reasoning(),
            None => matches!(self.state, State::Reasoning { .. }),
        }
    }

    fn step(&mut self, held: &str, at: &mut usize) -> Step {
        let rest = &held[*at..];
        match self.state {
            State::Content => self.step_content(rest, at),
            State::Reasoning { has_text } => self.step_reasoning(rest, at, has_text),
            State::BehindReasoning => {
                let text = rest.trim_start_matches('\n');
                *at += rest.len() - text.len();
                if text.is_empty() {
                    return Step::NeedsMore;
                }
                self.state = State::Content;
                Step::On
            }
            State::Head { marker_len, may_list, .. } => self.step_head(rest, at, marker_len, may_list),
            State::Arguments { .. } => self.step_arguments(rest, at),
            State::Between { may_go_on } => self.step_between(rest, at, may_go_on),
        }
    }

    fn step_content(&mut self, rest: &str, at: &mut usize) -> Step {
        let mut rest = rest;
        if self.is_first
            && let Some(bare) = self.format.and_then(|format| format.bare)
        {
            let text = rest.trim_start();
            self.space.push_str(&rest[..rest.len() - text.len()]);
            *at += rest.len() - text.len();
            if text.starts_with(bare) {
                self.state = State::Head { marker_len: 0, may_list: true, follows_call: false };
                return Step::On;
            }
            rest = text;
        }
        let found = self.markers.as_ref().and_then(|markers| markers.find(rest));
        let Some(found) = found else {
            let sure = rest.len() - self.undecided(rest);
            *at += sure;
            self.say(&rest[..sure]);
            return Step::NeedsMore;
        };
        *at += found.start();
        self.say(&rest[..found.start()]);
        let num_open = self.format.map_or(0, |format| format.open.len());
        let is_reasoning =
            self.reasoning.is_some() && found.pattern().as_usize() + 1 == self.marker_texts.len();
        if is_reasoning && !self.may_think {
            *at += found.len();
            self.say(&rest[found.range()]);
        } else if is_reasoning {
            if self.is_first {
                self.space.clear();
            }
            *at += found.len();
            self.state = State::Reasoning { has_text: false };
        } else if found.pattern().as_usize() < num_open {
            self.state = State::Head { marker_len: found.len(), may_list: true, follows_call: false };
        } else {
            *at += found.len();
        }
        Step::On
    }

    /// How many bytes at the end of a text may begin a marker.
    fn undecided(&self, text: &str) -> usize {
        self.marker_texts.iter().map(|marker| begun(text, marker)).max().unwrap_or(0)
    }

    fn step_reasoning(&mut self, rest: &str, at: &mut usize, has_text: bool) -> Step {
        let close = self.reasoning.map_or("", |reasoning| reasoning.close);
        // Where calls are looked for, one may begin before the reasoning has ended.
        let also = self.reasoning.and_then(|reasoning| reasoning.also_ends).filter(|_| self.format.is_some());
        let text = if has_text { rest } else { rest.trim_start_matches('\n') };
        *at += rest.len() - text.len();
        let closed = text.find(close).map(|end| (end, close.len()));
        let left = also.and_then(|also| text.find(also)).map(|end| (end, 0));
        if let Some((end, len)) = closed.into_iter().chain(left).min() {
            self.emit(TurnEvent::Reasoning, text[..end].trim_end_matches('\n'));
            *at += end + len;
            self.may_think = !self.thinks_once;
            self.state = State::BehindReasoning;
            return Step::On;
        }
        let held = also.map_or(0, |also| begun(text, also)).max(begun(text, close));
        let sure = text[..text.len() - held].trim_end_matches('\n');
        *at += sure.len();
        self.state = State::Reasoning { has_text: has_text || !sure.is_empty() };
        self.emit(TurnEvent::Reasoning, sure);
        Step::NeedsMore
    }

    fn step_head(&mut self, rest: &str, at: &mut usize, marker_len: usize, may_list: bool) -> Step {
        let Some(format) = self.format else { return Step::NeedsMore };
        let is_bare = marker_len == 0 && may_list;
        match read_head(format.syntax, &rest[marker_len..], is_bare, may_list) {
            Head::Undecided => return Step::NeedsMore,
            Head::Wrong(len) => {
                *at += marker_len + len;
                self.state = State::Content;
                self.say(&rest[..marker_len + len]);
                self.is_first = false;
            }
            Head::Call { name, len, arguments } => {
                *at += marker_len + len;
                self.space.clear();
                self.is_first = false;
                let tool = self.tools.iter().position(|tool| tool.name == name);
                self.state = State::Arguments { reader: arguments, tool };
                push(&mut self.events, TurnEvent::CallBegin { index: self.num_calls, name });
                self.num_calls += 1;
            }
        }
        Step::On
    }

    fn step_arguments(&mut self, rest: &str, at: &mut usize) -> Step {
        let State::Arguments { reader, tool } = &mut self.state else { return Step::NeedsMore };
        let mut out = String::new();
        let tool = tool.and_then(|index| self.tools.get(index));
        let progress = reader.read(rest, tool, &mut out);
        self.emit(TurnEvent::CallArgs, &out);
        match progress {
            Progress::Open(len) => {
                *at += len;
                Step::NeedsMore
            }
            Progress::Done(len) => {
                *at += len;
                push(&mut self.events, TurnEvent::CallEnd);
                self.state = State::Between { may_go_on: true };
                Step::On
            }
        }
    }

    fn step_between(&mut self, rest: &str, at: &mut usize, may_go_on: bool) -> Step {
        let Some(format) = self.format else { return Step::NeedsMore };
        let text = rest.trim_start();
        *at += rest.len() - text.len();
        if text.is_empty() {
            return Step::NeedsMore;
        }
        let begins =
            |literals: &[&'static str]| literals.iter().find(|literal| text.starts_with(**literal)).copied();
        if let Some(end) = begins(format.ends) {
            *at += end.len();
            return Step::On;
        }
        if let Some(closer) = begins(format.closers) {
            *at += closer.len();
            self.state = State::Between { may_go_on: false };
            return Step::On;
        }
        if let Some(open) = begins(format.open) {
            self.state = State::Head { marker_len: open.len(), may_list: true, follows_call: true };
            return Step::On;
        }
        if may_go_on && let Some(separator) = begins(format.separators) {
            // What follows decides whether it is a separator.
            let next = text[separator.len()..].trim_start();
            if next.is_empty() {
                return Step::NeedsMore;
            }
            if next.starts_with(|char: char| format.syntax.begins_with(char)) {
                *at += text.len() - next.len();
                self.state = State::Head { marker_len: 0, may_list: false, follows_call: true };
                return Step::On;
            }
        }
        if format.literals().any(|literal| literal.starts_with(text)) {
            return Step::NeedsMore;
        }
        self.state = State::Content;
        Step::On
    }

    /// Emit content; whitespace at its end waits.
    fn say(&mut self, text: &str) {
        let said = text.trim_end();
        if !said.is_empty() {
            let space = std::mem::take(&mut self.space);
            self.emit(TurnEvent::Content, &space);
            self.emit(TurnEvent::Content, said);
            self.is_first = false;
            self.may_think &= !self.thinks_once;
        }
        self.space.push_str(&text[said.len()..]);
    }

    fn emit(&mut self, kind: fn(String) -> TurnEvent, text: &str) {
        if !text.is_empty() {
            push(&mut self.events, kind(text.to_owned()));
        }
    }
}

/// How many bytes at the end of a text begin a marker.
fn begun(text: &str, marker: &str) -> usize {
    let lens = marker.char_indices().map(|(len, _)| len).rev();
    lens.filter(|&len| len > 0).find(|&len| text.ends_with(&marker[..len])).unwrap_or(0)
}
