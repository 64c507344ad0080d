"""Every error that rustvllm raises on purpose, as one small tree.

A request-level error (:class:`InvalidRequestError`, :class:`QueueFullError`, :class:`QueueTimeoutError`,
:class:`GrammarsFullError`, :class:`RequestFailedError`) concerns one request and leaves the engine as it was. An
engine-level error (:class:`EngineDeadError`) concerns every request. The Rust core raises these same classes by
importing this module, so it must stay free of imports.
"""


class RustVLLMError(Exception):
    """Base of all errors raised by rustvllm."""


class ConfigError(RustVLLMError, ValueError):
    """An engine argument is wrong, or two of them contradict each other; the message names the value and the limit."""


class ModelLoadError(RustVLLMError):
    """A model cannot be found, fetched or read."""


class ModelNotFoundError(ModelLoadError):
    """No model of that name exists locally or on the hub."""


class ModelAccessError(ModelLoadError):
    """The hub knows the model and refuses access to it: it is gated or private, or the token is wrong."""


class HubUnreachableError(ModelLoadError):
    """The model is not on this machine and the hub cannot be asked, or offline mode is on."""


class InvalidRequestError(RustVLLMError, ValueError):
    """A request that cannot be served as it was asked.

    Attributes:
        param: Name of the offending parameter, or None when no single one is to blame.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(RustVLLMError):
    """The waiting queue is at its limit; the request may be sent again later.

    Attributes:
        retry_after: Seconds after which there should be room; None if unknown.
    """

    retry_after: int | None = None


class QueueTimeoutError(RustVLLMError):
    """The request waited longer than ``queue_timeout`` for its first step; it may be sent again later.

    Attributes:
        retry_after: Seconds after which the requests that wait now should have started; None if unknown.
    """

    retry_after: int | None = None


class GrammarsFullError(RustVLLMError):
    """There is no room for the grammar of the request next to those of others; it may be sent again later.

    Attributes:
        retry_after: Seconds after which there should be room; None if unknown.
    """

    retry_after: int | None = None


class RequestFailedError(RustVLLMError):
    """The engine gave up on a request that had been accepted, for instance because a forward pass raised.

    Attributes:
        outputs: What a call for several prompts produced all the same, in input order; None for a single request.
    """

    def __init__(self, message: str, outputs: object = None) -> None:
        super().__init__(message)
        self.outputs = outputs


class DeviceMemoryError(RustVLLMError):
    """The device has no memory for a step; its requests end with it. The message names what to lower."""


class DeviceFailedError(RustVLLMError):
    """The device failed for good: nothing launched on it from now on would run. The engine ends with it."""


class EngineDeadError(RustVLLMError):
    """The engine has stopped, by an error or by ``shutdown``, and serves no more requests."""


class QueryError(RustVLLMError):
    """An engine did not answer a question about itself; the message says why. Requests are not concerned."""


class QueryTimeoutError(QueryError, TimeoutError):
    """The engine did not answer in time: it is in a long step or has stalled."""


class SchedulerStateError(RustVLLMError, RuntimeError):
    """The scheduler was driven out of order, for instance updated with the output of another step."""


class WrongThreadError(SchedulerStateError):
    """The scheduler was used from a thread that does not own it."""


class TraceError(RustVLLMError, ValueError):
    """A request trace cannot be read, or one of its lines is wrong; the message names file, line, field and value."""
