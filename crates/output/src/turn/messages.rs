//! Turns of gpt-oss (Harmony): messages, each with a head that names its channel and perhaps who it is for.

use std::sync::{Arc, LazyLock};

use aho_corasick::{AhoCorasick, MatchKind};

use super::event::{TurnEvent, push};
use super::tool::Tool;
use crate::char_boundary::floor_char_boundary;

/// Tokens of the format, which are special tokens of its models.
pub(super) const MARKERS: [&str; 7] = [START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN];
pub(super) const START: &str = "<|start|>";
pub(super) const CHANNEL: &str = "<|channel|>";
pub(super) const CONSTRAIN: &str = "<|constrain|>";
pub(super) const MESSAGE: &str = "<|message|>";
pub(super) const END: &str = "<|end|>";
pub(super) const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";
/// Before a recipient.
const TO: &str = "to=";
/// Before the name of a tool.
pub(super) const FUNCTIONS: &str = "functions.";

/// What a message may begin with; the first stands in the prompt, so that a turn may begin with a recipient.
const BEGINS: [&str; 5] = [START, CHANNEL, MESSAGE, CONSTRAIN, TO];
/// What stands behind a message.
const ENDS: [&str; 3] = [END, CALL, RETURN];
/// What ends a text besides: some answers lack the end of a message, or its beginning.
const NEXT: [&str; 4] = [START, "<|channel|>analysis", "<|channel|>commentary", "<|channel|>final"];
/// Most bytes of a head. A longer text is content.
const MAX_HEAD_BYTES: usize = 1024;
/// Room for a marker behind a head.
const MARKER_BYTES: usize = 16;

static TEXT_ENDS: LazyLock<AhoCorasick> = LazyLock::new(|| finder(ENDS.iter().chain(&NEXT)));
static HEAD_ENDS: LazyLock<AhoCorasick> =
    LazyLock::new(|| finder([MESSAGE].iter().chain(&ENDS).chain(&[START])));

fn finder<'a>(markers: impl Iterator<Item = &'a &'static str>) -> AhoCorasick {
    let built = AhoCorasick::builder().match_kind(MatchKind::LeftmostFirst).build(markers);
    built.unwrap_or_else(|_| unreachable!("a few short markers"))
}

/// Splits a turn of messages into content, reasoning and calls. However the text is cut into pieces, the joined events
/// are the same.
#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "what is looked for, and what was found, are independent")]
pub(super) struct Messages {
    finds_calls: bool,
    finds_thoughts: bool,
    tools: Arc<[Tool]>,
    state: State,
    /// Text that is not decided yet.
    held: String,
    has_content: bool,
    has_thoughts: bool,
    num_calls: u32,
    events: Vec<TurnEvent>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before a message; text without a head is content.
    Outside,
    /// In a head, whose text is held.
    Head,
    Text(Kind),
}

/// What the text of a message is, and whether there was some.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Content { has_text: bool },
    Thoughts { has_text: bool },
    Arguments { has_text: bool },
}

enum Step {
    On,
    NeedsMore,
}

impl Messages {
    /// Make a parser for the beginning of a turn.
    ///
    /// `finds_calls`: messages to `tools` and to other functions are calls, else content. `finds_thoughts`: the channel
    /// `analysis` is reasoning, else content. `begins_within`: the turn begins within that channel.
    pub(super) fn new(
        finds_calls: bool,
        finds_thoughts: bool,
        tools: Arc<[Tool]>,
        begins_within: bool,
    ) -> Self {
        let state = if begins_within && finds_thoughts {
            State::Text(Kind::Thoughts { has_text: false })
        } else {
            State::Outside
        };
        Self {
            finds_calls,
            finds_thoughts,
            tools,
            state,
            held: String::new(),
            has_content: false,
            has_thoughts: false,
            num_calls: 0,
            events: Vec::new(),
        }
    }

    /// Take more text; returns the events that have become certain.
    pub(super) fn push(&mut self, text: &str) -> Vec<TurnEvent> {
        self.held.push_str(text);
        let held = std::mem::take(&mut self.held);
        let mut at = 0;
        while let Step::On = self.step(&held, &mut at) {}
        self.held = held;
        self.held.drain(..at);
        std::mem::take(&mut self.events)
    }

    /// The text has ended: returns the events of what was held back. A head without a text is dropped.
    pub(super) fn finish(&mut self) -> Vec<TurnEvent> {
        let rest = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Outside) {
            State::Head if !is_said(&rest) => {}
            State::Outside | State::Head => {
                self.say_more(&rest, Kind::Content { has_text: false });
            }
            State::Text(kind) => {
                // What was held behind a channel's mark would have been its name.
                let is_cut_head = rest.starts_with(CHANNEL);
                let kind = if is_cut_head { kind } else { self.say_last(&rest, kind) };
                if kind == (Kind::Arguments { has_text: false }) {
                    self.emit(TurnEvent::CallArgs, "{}");
                }
            }
        }
        std::mem::take(&mut self.events)
    }

    /// Whether the next text is reasoning.
    pub(super) fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Text(Kind::Thoughts { .. }))
    }

    fn step(&mut self, held: &str, at: &mut usize) -> Step {
        let rest = &held[*at..];
        match self.state {
            State::Outside => self.step_outside(rest, at),
            State::Head => self.step_head(rest, at),
            State::Text(kind) => self.step_text(rest, at, kind),
        }
    }

    fn step_outside(&mut self, rest: &str, at: &mut usize) -> Step {
        let text = rest.trim_start();
        if text.is_empty() {
            return Step::NeedsMore;
        }
        if let Some(end) = ENDS.iter().find(|end| text.starts_with(**end)) {
            *at += rest.len() - text.len() + end.len();
            return Step::On;
        }
        if BEGINS.iter().any(|begin| text.starts_with(begin)) {
            self.state = State::Head;
            return Step::On;
        }
        if BEGINS.iter().chain(&ENDS).any(|literal| literal.starts_with(text)) {
            return Step::NeedsMore;
        }
        self.state = State::Text(Kind::Content { has_text: false });
        Step::On
    }

    fn step_head(&mut self, rest: &str, at: &mut usize) -> Step {
        // The marker with which it begins is part of it.
        let text = rest.trim_start();
        let begin = [START, CHANNEL, CONSTRAIN].into_iter().find(|begin| text.starts_with(begin));
        let skipped = rest.len() - text.len() + begin.map_or(0, str::len);
        let window = &rest[..floor_char_boundary(rest, MAX_HEAD_BYTES + MARKER_BYTES)];
        let found = HEAD_ENDS.find(&window[skipped..]).map(|found| (skipped + found.start(), found.len()));
        match found.filter(|(start, _)| *start <= MAX_HEAD_BYTES) {
            Some((start, len)) => {
                if &rest[start..start + len] == MESSAGE {
                    let head = Head::read(&rest[..start]);
                    *at += start + len;
                    self.begin(&head);
                } else if is_said(&rest[..start]) {
                    self.state = State::Text(Kind::Content { has_text: false });
                } else {
                    // A head without a text: no message. The marker says what comes next.
                    *at += start;
                    self.state = State::Outside;
                }
                Step::On
            }
            None if rest.len() > MAX_HEAD_BYTES + MARKER_BYTES => {
                let end = floor_char_boundary(rest, MAX_HEAD_BYTES);
                *at += end;
                let kind = self.say_more(&rest[..end], Kind::Content { has_text: false });
                self.state = State::Text(kind);
                Step::On
            }
            None => Step::NeedsMore,
        }
    }

    /// Begin the text of a message.
    fn begin(&mut self, head: &Head<'_>) {
        let kind = match self.called(head) {
            Some(name) => {
                push(&mut self.events, TurnEvent::CallBegin { index: self.num_calls, name });
                self.num_calls += 1;
                Kind::Arguments { has_text: false }
            }
            // What the model says to a tool that it does not have is nothing for the user.
            None if self.finds_thoughts && (head.channel == "analysis" || head.is_to_another()) => {
                Kind::Thoughts { has_text: false }
            }
            None => Kind::Content { has_text: false },
        };
        self.state = State::Text(kind);
    }

    /// The tool that a message calls.
    fn called(&self, head: &Head<'_>) -> Option<String> {
        let recipient = head.recipient.filter(|_| self.finds_calls)?;
        let name = recipient.strip_prefix(FUNCTIONS).filter(|name| !name.is_empty());
        let bare = || self.tools.iter().find(|tool| tool.name == recipient).map(|tool| tool.name.as_str());
        name.or_else(bare).map(str::to_owned)
    }

    fn step_text(&mut self, rest: &str, at: &mut usize, kind: Kind) -> Step {
        let Some(found) = TEXT_ENDS.find(rest) else {
            let markers = ENDS.iter().chain(&NEXT);
            let sure = rest.len() - markers.map(|marker| begun(rest, marker)).max().unwrap_or(0);
            // Space at the end of arguments may be dropped.
            let is_call = matches!(kind, Kind::Arguments { .. });
            let sure = if is_call { rest[..sure].trim_end().len() } else { sure };
            *at += sure;
            self.state = State::Text(self.say_more(&rest[..sure], kind));
            return Step::NeedsMore;
        };
        *at += found.start();
        let kind = self.say_last(&rest[..found.start()], kind);
        if let Kind::Arguments { has_text } = kind {
            if !has_text {
                self.emit(TurnEvent::CallArgs, "{}");
            }
            push(&mut self.events, TurnEvent::CallEnd);
        }
        self.state = State::Outside;
        Step::On
    }

    /// Emit more of a message; messages of a kind are lines. Returns its kind, which now knows of the text.
    fn say_more(&mut self, text: &str, kind: Kind) -> Kind {
        if text.is_empty() {
            return kind;
        }
        match kind {
            Kind::Content { has_text } => {
                let is_next = std::mem::replace(&mut self.has_content, true) && !has_text;
                self.emit(TurnEvent::Content, if is_next { "\n" } else { "" });
                self.emit(TurnEvent::Content, text);
                Kind::Content { has_text: true }
            }
            Kind::Thoughts { has_text } => {
                let is_next = std::mem::replace(&mut self.has_thoughts, true) && !has_text;
                self.emit(TurnEvent::Reasoning, if is_next { "\n" } else { "" });
                self.emit(TurnEvent::Reasoning, text);
                Kind::Thoughts { has_text: true }
            }
            Kind::Arguments { has_text } => {
                let text = if has_text { text } else { text.trim_start() };
                self.emit(TurnEvent::CallArgs, text);
                Kind::Arguments { has_text: has_text || !text.is_empty() }
            }
        }
    }

    /// Emit the last of a message.
    fn say_last(&mut self, text: &str, kind: Kind) -> Kind {
        let is_call = matches!(kind, Kind::Arguments { .. });
        self.say_more(if is_call { text.trim_end() } else { text }, kind)
    }

    fn emit(&mut self, kind: fn(String) -> TurnEvent, text: &str) {
        if !text.is_empty() {
            push(&mut self.events, kind(text.to_owned()));
        }
    }
}

/// What a head says.
#[derive(Debug)]
struct Head<'a> {
    channel: &'a str,
    recipient: Option<&'a str>,
}

impl<'a> Head<'a> {
    /// Read `<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json`, of which every part may be
    /// missing, and the recipient may follow the channel.
    fn read(text: &'a str) -> Self {
        let behind = |mark: &str| text.rfind(mark).map(|at| word(&text[at + mark.len()..]));
        Self {
            channel: behind(CHANNEL).unwrap_or_default(),
            recipient: behind(TO).filter(|name| !name.is_empty()),
        }
    }

    /// Whether the message is for a tool and not for the user.
    fn is_to_another(&self) -> bool {
        self.recipient
            .is_some_and(|name| !matches!(name, "user" | "all" | "assistant") && !name.starts_with(FUNCTIONS))
    }
}

/// Whether a head that has no text is one that was said: it has no marker, and looks like a recipient only.
fn is_said(head: &str) -> bool {
    !MARKERS.iter().any(|marker| head.contains(marker))
}

/// The first word, up to a space or a marker.
fn word(text: &str) -> &str {
    let text = text.trim_start();
    let end = text.find(char::is_whitespace).unwrap_or(text.len());
    let end = text.find("<|").map_or(end, |marker| marker.min(end));
    &text[..end]
}

/// Whether an answer to this prompt begins within the channel `analysis`.
pub(super) fn begins_within_thoughts(prompt: &str) -> bool {
    let Some(text) = prompt.rfind(MESSAGE) else { return false };
    if TEXT_ENDS.find(&prompt[text..]).is_some() {
        return false;
    }
    let head = &prompt[..text];
    let begin = head.rfind(START).or_else(|| head.rfind(CHANNEL)).unwrap_or(text);
    Head::read(&head[begin..]).channel == "analysis"
}

/// How many bytes at the end of a text begin a marker.
fn begun(text: &str, marker: &str) -> usize {
    let most = text.len().min(marker.len() - 1);
    (1..=most)
        .rev()
        .find(|&len| text.is_char_boundary(text.len() - len) && marker.starts_with(&text[text.len() - len..]))
        .unwrap_or(0)
}
