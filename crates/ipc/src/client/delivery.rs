//! Where a client's outputs arrive: pushed by the I/O threads of its connections, taken by the front end's thread.

use std::sync::{Arc, Mutex, PoisonError};

use scheduler::{AddRequestError, EngineCoreOutput, Inbox, PromptLogprobs, RequestKey, TokenLogprobs};

use crate::{
    error::{ClientError, EndpointError},
    notifier::Notifier,
};

/// What became of requests.
#[derive(Clone, PartialEq, Debug)]
pub enum ClientOutput {
    /// A token, an end, or both.
    Output(EngineCoreOutput),
    /// Log-probabilities of a token that follows.
    Logprobs(TokenLogprobs),
    /// Log-probabilities of places of a prompt; the request's first token comes later.
    PromptLogprobs(PromptLogprobs),
    /// The engine did not take the request; there is no other output.
    Refused {
        /// Which.
        key: RequestKey,
        /// Why.
        error: AddRequestError,
    },
    /// The engine has gone. There is no other output.
    Died {
        /// Whose last output this is.
        key: RequestKey,
        /// Why, as [`crate::EngineClient::death`] says it.
        reason: Arc<str>,
    },
}

impl ClientOutput {
    /// The request that this is about.
    #[must_use]
    pub fn key(&self) -> RequestKey {
        match self {
            Self::Output(output) => output.key,
            Self::Logprobs(logprobs) => logprobs.key,
            Self::PromptLogprobs(logprobs) => logprobs.key,
            Self::Refused { key, .. } | Self::Died { key, .. } => *key,
        }
    }

    /// Whether nothing else comes for the request.
    #[must_use]
    pub fn is_last(&self) -> bool {
        match self {
            Self::Output(output) => output.finish_reason.is_some(),
            Self::Logprobs(_) | Self::PromptLogprobs(_) => false,
            Self::Refused { .. } | Self::Died { .. } => true,
        }
    }
}

/// Where outputs arrive, of one engine or of several.
#[derive(Debug)]
pub(crate) struct Delivery {
    /// In batches; lock-free, as in the scheduler.
    outputs: Inbox<Vec<ClientOutput>>,
    pub(crate) notifier: Notifier,
    /// Held for as long as it takes to exchange a pointer.
    step_error: Mutex<Option<Arc<str>>>,
}

impl Delivery {
    pub(crate) fn new() -> Result<Arc<Self>, ClientError> {
        let notifier = Notifier::new().map_err(|source| {
            let what = "a client's I/O thread".to_owned();
            EndpointError::System { action: "make an eventfd for", what, source }
        })?;
        Ok(Arc::new(Self { outputs: Inbox::new(), notifier, step_error: Mutex::default() }))
    }

    /// Why outputs that come next say that a step failed.
    pub(crate) fn note_step_error(&self, message: Arc<str>) {
        *self.step_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(message);
    }

    /// What the last step that failed raised.
    pub(crate) fn last_step_error(&self) -> Option<Arc<str>> {
        self.step_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Hand a batch to the thread that drains.
    pub(crate) fn deliver(&self, batch: Vec<ClientOutput>) {
        if !batch.is_empty() {
            self.outputs.push(batch);
            self.notifier.notify();
        }
    }

    /// Take everything that has arrived, oldest first.
    pub(crate) fn drain(&self, mut receive: impl FnMut(ClientOutput)) {
        self.notifier.clear();
        self.outputs.take(|batch| batch.into_iter().for_each(&mut receive));
    }
}
