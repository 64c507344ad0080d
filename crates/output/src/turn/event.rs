//! What a turn is made of, in the order in which it comes.

/// Something new of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TurnEvent {
    /// Text for the reader.
    Content(String),
    /// Text of the model's thoughts.
    Reasoning(String),
    /// A tool is called; calls are numbered from 0.
    CallBegin {
        /// Which call it is.
        index: u32,
        /// Which tool.
        name: String,
    },
    /// More of the arguments of the call that began last, as JSON text.
    CallArgs(String),
    /// The call that began last is whole. Missing where the turn was cut short.
    CallEnd,
}

/// Append an event; text of one kind is joined.
pub(super) fn push(events: &mut Vec<TurnEvent>, event: TurnEvent) {
    match (events.last_mut(), event) {
        (Some(TurnEvent::Content(said)), TurnEvent::Content(text))
        | (Some(TurnEvent::Reasoning(said)), TurnEvent::Reasoning(text))
        | (Some(TurnEvent::CallArgs(said)), TurnEvent::CallArgs(text)) => said.push_str(&text),
        (_, event) => events.push(event),
    }
}
