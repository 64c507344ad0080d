"""Reports too little memory, or too few threads, at start-up in one line; libraries would fail with tracebacks."""

import resource

from rustvllm.exceptions import ConfigError

LEAST_ADDRESS_SPACE = 256 << 20
"""The least address space, in bytes, of a process that loads the core and numpy and starts its threads."""
_SIGNS = ("failed to map segment", "cannot allocate memory", "unable to allocate", "returned null without setting")
_NO_THREAD, _TRY_AGAIN = "can't start new thread", "temporarily unavailable"


def check_address_space() -> None:
    """Check that the limit on this process's address space leaves room for the first libraries.

    Raises:
        ConfigError: It does not; names the limit and the need.
    """
    limit = _address_space()
    if limit is not None and limit < LEAST_ADDRESS_SPACE:
        raise ConfigError(
            f"the address space of this process is limited to {_mib(limit)}, but loading the core and numpy takes at "
            f"least {_mib(LEAST_ADDRESS_SPACE)}, and torch several GiB more: raise it (ulimit -v)"
        )


def explain_shortage(error: BaseException) -> str | None:
    """Describe in one line an error at start-up that too little memory has caused, or a limit on threads.

    Args:
        error: The error that a library raised.

    Returns:
        The line; None for any other error.
    """
    text, limit = str(error), _address_space()
    if (limit is None and text == _NO_THREAD) or (isinstance(error, BlockingIOError) and _TRY_AGAIN in text):
        most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        own = "no limit" if most == resource.RLIM_INFINITY else f"{most}"
        return (
            f"the system refused a thread or a process ({text}): this user may have {own} of them (ulimit -u), and a "
            "container or a service may have fewer (docker run --pids-limit, systemd's TasksMax=): raise the limit"
        )
    if not isinstance(error, MemoryError) and not (
        isinstance(error, ImportError | OSError | RuntimeError | SystemError)
        and any(sign in text.lower() for sign in (*_SIGNS, _NO_THREAD))
    ):
        return None
    where = "" if limit is None else f"; its address space is limited to {_mib(limit)}, raise it (ulimit -v)"
    return (
        f"there is not enough memory to start ({text or type(error).__name__}): torch alone reserves up to 4 GiB of "
        f"address space and uses about 600 MiB of memory{where}"
    )


def _address_space() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
