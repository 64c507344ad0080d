//! The queue of a client's outputs: the I/O threads of its connections push, the front end's thread takes.

use std::sync::{Arc, Mutex, PoisonError};

use scheduler::{
    AddRequestError, EngineCoreOutput, Inbox, PooledVector, PromptLogprobs, RequestKey, TokenLogprobs,
};

use crate::{
    error::{ClientError, EndpointError},
    notifier::Notifier,
};

/// Something that happened to a request.
#[derive(Clone, PartialEq, Debug)]
pub enum ClientOutput {
    /// A token, the request's end, or both.
    Output(EngineCoreOutput),
    /// Log-probabilities of a token that arrives later.
    Logprobs(TokenLogprobs),
    /// Log-probabilities of prompt positions; the request's first token arrives later.
    PromptLogprobs(PromptLogprobs),
    /// The vector of a request; its last output arrives later.
    Pooled(PooledVector),
    /// The engine did not accept the request; no other output follows.
    Refused {
        /// The request's key.
        key: RequestKey,
        /// Why it was refused.
        error: AddRequestError,
    },
    /// The engine is gone; no other output follows.
    Died {
        /// The request's key.
        key: RequestKey,
        /// Why, as [`crate::EngineClient::death`] reports it.
        reason: Arc<str>,
    },
}

impl ClientOutput {
    /// The key of the request that this output belongs to.
    #[must_use]
    pub fn key(&self) -> RequestKey {
        match self {
            Self::Output(output) => output.key,
            Self::Logprobs(logprobs) => logprobs.key,
            Self::PromptLogprobs(logprobs) => logprobs.key,
            Self::Pooled(vector) => vector.key,
            Self::Refused { key, .. } | Self::Died { key, .. } => *key,
        }
    }

    /// Whether this is the request's last output.
    #[must_use]
    pub fn is_last(&self) -> bool {
        match self {
            Self::Output(output) => output.finish_reason.is_some(),
            Self::Logprobs(_) | Self::PromptLogprobs(_) | Self::Pooled(_) => false,
            Self::Refused { .. } | Self::Died { .. } => true,
        }
    }
}

/// The queue of outputs from one engine or several.
#[derive(Debug)]
pub(crate) struct Delivery {
    /// Outputs in batches; lock-free, as in the scheduler.
    outputs: Inbox<Vec<ClientOutput>>,
    pub(crate) notifier: Notifier,
    /// The lock is held only while a pointer is exchanged.
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

    /// Store why a step failed, for the failed outputs that arrive next.
    pub(crate) fn note_step_error(&self, message: Arc<str>) {
        *self.step_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(message);
    }

    /// The error of the last failed step.
    pub(crate) fn last_step_error(&self) -> Option<Arc<str>> {
        self.step_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Pass a batch to the thread that drains.
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
