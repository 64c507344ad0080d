//! `NodeLink` for Python: one connection between the head and another node of a model. Its threads need no interpreter.

use std::{
    net::TcpStream,
    os::fd::{AsRawFd, BorrowedFd, OwnedFd},
    sync::{Arc, OnceLock},
    time::Duration,
};

use ::step_channel::{MAX_READERS, NodeLink, Received, Watch};
use ipc::{NodeHandshakeError, Secret, prove_to_head, welcome_node};
use pyo3::{
    exceptions::{PyConnectionError, PyOSError, PyPermissionError, PyTimeoutError, PyValueError},
    prelude::*,
};

use crate::{
    errors::endpoint_error,
    transport::step_channel::{StepWriter, seconds, write_error},
};

pub(crate) fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyNodeLink>()
}

/// A connection whose other side has proved to know the secret.
#[pyclass(frozen, name = "NodeLink", module = "rustvllm._core")]
pub(crate) struct PyNodeLink {
    inner: NodeLink,
    channel: OnceLock<(OwnedFd, Arc<Watch>)>,
    own_host: String,
}

impl PyNodeLink {
    fn after(
        py: Python<'_>,
        fd: i32,
        secret: &[u8],
        limit: f64,
        handshake: fn(&mut TcpStream, &Secret, Duration) -> Result<(), NodeHandshakeError>,
    ) -> PyResult<Self> {
        let (secret, limit) = (Secret::new(secret).map_err(|error| endpoint_error(&error))?, seconds(limit)?);
        if fd < 0 {
            return Err(PyOSError::new_err(format!("{fd} is not a descriptor")));
        }
        // SAFETY: the kernel refuses a number without an open descriptor; this one is borrowed for the call alone.
        let owned = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
        let mut stream = TcpStream::from(owned);
        stream.set_nonblocking(false)?;
        let own_host = stream.local_addr()?.ip().to_string();
        py.detach(|| handshake(&mut stream, &secret, limit)).map_err(|error| handshake_error(&error))?;
        Ok(Self { inner: NodeLink::new(stream)?, channel: OnceLock::new(), own_host })
    }
}

#[pymethods]
impl PyNodeLink {
    /// The head's end of a connection that a node has made: the handshake, within `limit` seconds.
    #[staticmethod]
    fn welcome(py: Python<'_>, fd: i32, secret: &[u8], limit: f64) -> PyResult<Self> {
        Self::after(py, fd, secret, limit, welcome_node)
    }

    /// A node's end of a connection to the head: the handshake, within `limit` seconds.
    #[staticmethod]
    fn prove(py: Python<'_>, fd: i32, secret: &[u8], limit: f64) -> PyResult<Self> {
        Self::after(py, fd, secret, limit, prove_to_head)
    }

    /// This side's address on the connection.
    #[getter]
    fn own_host(&self) -> &str {
        &self.own_host
    }

    /// Send a text.
    fn send(&self, py: Python<'_>, text: &str) -> PyResult<()> {
        py.detach(|| self.inner.send(text)).map_err(|error| PyConnectionError::new_err(error.to_string()))
    }

    /// Wait so many seconds for the next text; None when there was none.
    fn receive(&self, py: Python<'_>, limit: f64) -> PyResult<Option<String>> {
        let limit = seconds(limit)?;
        match py.detach(|| self.inner.receive(limit)) {
            Received::Text(text) => Ok(Some(text)),
            Received::Nothing => Ok(None),
            Received::Ended(why) => Err(PyConnectionError::new_err(why)),
        }
    }

    /// Have this node get every frame that the writer publishes; its ranks are `first` and `count - 1` after it.
    fn lead(&self, writer: &Bound<'_, StepWriter>, first: usize, count: usize) -> PyResult<()> {
        writer.get().add_node(&self.inner, first, count)
    }

    /// Have a step channel for so many ranks of this node, which says what the head's says; its descriptor.
    fn follow(&self, num_ranks: usize) -> PyResult<i32> {
        if !(1..=MAX_READERS).contains(&num_ranks) || self.channel.get().is_some() {
            let message = format!("num_ranks must lie between 1 and {MAX_READERS}, once, got {num_ranks}");
            return Err(PyValueError::new_err(message));
        }
        let (fd, watch) = self.inner.follow(num_ranks).map_err(|error| write_error(&error))?;
        let number = fd.as_raw_fd();
        let _ = self.channel.set((fd, watch));
        Ok(number)
    }

    /// End the channel of this node's ranks: they hear that nothing more comes.
    fn give_up(&self) {
        if let Some((_, watch)) = self.channel.get() {
            watch.give_up();
            watch.close();
        }
    }

    /// Say that nothing more comes from this side; what was sent arrives.
    fn close(&self) {
        self.inner.close();
    }

    /// End the connection on both sides.
    fn cut(&self) {
        self.inner.cut();
    }
}

fn handshake_error(error: &NodeHandshakeError) -> PyErr {
    let message = error.to_string();
    match error {
        NodeHandshakeError::Secret => PyPermissionError::new_err(message),
        NodeHandshakeError::Late { .. } => PyTimeoutError::new_err(message),
        NodeHandshakeError::NotThisProtocol { .. } | NodeHandshakeError::Version { .. } => {
            PyValueError::new_err(message)
        }
        NodeHandshakeError::Io(_) => PyConnectionError::new_err(message),
    }
}
