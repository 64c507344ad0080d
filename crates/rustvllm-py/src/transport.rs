//! What carries messages between the processes of an engine, for Python.

pub(crate) mod client;
pub(crate) mod meeting;
pub(crate) mod node_link;
pub(crate) mod server;
pub(crate) mod step_channel;
