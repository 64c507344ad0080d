//! The events of a turn, in their order.

/// A new part of a turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TurnEvent {
    /// Content for the user.
    Content(String),
    /// Reasoning.
    Reasoning(String),
    /// A tool call begins; calls are numbered from 0.
    CallBegin {
        /// The number of the call.
        index: u32,
        /// The name of the tool.
        name: String,
    },
    /// More of the arguments of the last call, as JSON text.
    CallArgs(String),
    /// The last call is complete. Missing if the turn was cut off.
    CallEnd,
}

/// Append an event; consecutive text of the same kind is joined.
pub(super) fn push(events: &mut Vec<TurnEvent>, event: TurnEvent) {
    match (events.last_mut(), event) {
        (Some(TurnEvent::Content(said)), TurnEvent::Content(text))
        | (Some(TurnEvent::Reasoning(said)), TurnEvent::Reasoning(text))
        | (Some(TurnEvent::CallArgs(said)), TurnEvent::CallArgs(text)) => said.push_str(&text),
        (_, event) => events.push(event),
    }
}
