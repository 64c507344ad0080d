//! `Client`: connections to one server, kept open and used again.

use std::{cell::RefCell, io, rc::Rc};

use bytes::Bytes;
use http_body_util::Full;
use hyper::{
    Method, Request, Response,
    body::Incoming,
    client::conn::http1::{SendRequest, handshake},
    header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue},
};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::{record::Failure, target::Target};

/// An open connection that answers one request at a time.
pub(super) type Connection = SendRequest<Full<Bytes>>;

/// Belongs to one thread; its connections are driven by tasks of the `LocalSet` that it is used in.
pub(super) struct Client {
    target: Target,
    host: HeaderValue,
    authorization: Option<HeaderValue>,
    idle: RefCell<Vec<Connection>>,
}

impl Client {
    /// `None` when a header cannot carry the key or the host.
    pub(super) fn new(target: Target, api_key: Option<&str>) -> Option<Rc<Self>> {
        let host = HeaderValue::from_str(&target.authority).ok()?;
        let authorization = match api_key {
            None => None,
            Some(key) => {
                let mut value = HeaderValue::from_str(&format!("Bearer {key}")).ok()?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        Some(Rc::new(Self { target, host, authorization, idle: RefCell::default() }))
    }

    /// Open a connection.
    pub(super) async fn connect(&self) -> Result<Connection, Failure> {
        let failed = |error: io::Error| Failure::Connect { error: error.to_string() };
        let stream =
            TcpStream::connect((self.target.host.as_str(), self.target.port)).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        let (connection, driver) = handshake(TokioIo::new(stream))
            .await
            .map_err(|error| Failure::Connect { error: error.to_string() })?;
        // What ends the driver ends the request that is under way, which then says so itself.
        tokio::task::spawn_local(async move { drop(driver.await) });
        Ok(connection)
    }

    /// Send a request over a connection that was open already or a new one, and wait for the answer's head.
    ///
    /// A server may close an idle connection at any moment: a request that could not be sent for that is sent again.
    pub(super) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<(Response<Incoming>, Connection), Failure> {
        let mut request = self.request(method, path, body)?;
        while let Some(mut connection) = self.take_idle() {
            match connection.try_send_request(request).await {
                Ok(response) => return Ok((response, connection)),
                Err(mut error) => match error.take_message() {
                    Some(unsent) => request = unsent,
                    None => return Err(Failure::Cut { error: error.into_error().to_string() }),
                },
            }
        }
        let mut connection = self.connect().await?;
        let response = connection
            .send_request(request)
            .await
            .map_err(|error| Failure::Cut { error: error.to_string() })?;
        Ok((response, connection))
    }

    /// Keep a connection whose answer has been read to its end.
    pub(super) fn keep(&self, connection: Connection) {
        self.idle.borrow_mut().push(connection);
    }

    fn take_idle(&self) -> Option<Connection> {
        let mut idle = self.idle.borrow_mut();
        idle.retain(|connection| !connection.is_closed());
        // One that is still finishing its last answer is looked at again later.
        let place = idle.iter().rposition(Connection::is_ready)?;
        Some(idle.swap_remove(place))
    }

    fn request(&self, method: Method, path: &str, body: Bytes) -> Result<Request<Full<Bytes>>, Failure> {
        let mut builder = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.target.path))
            .header(HOST, &self.host)
            .header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.authorization {
            builder = builder.header(AUTHORIZATION, key);
        }
        builder.body(Full::new(body)).map_err(|error| Failure::Connect { error: error.to_string() })
    }
}
