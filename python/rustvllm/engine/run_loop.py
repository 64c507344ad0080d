"""The life of an engine that nobody steps by hand: :func:`run`, the same in a thread and in a process of its own."""

from collections.abc import Callable

from rustvllm import envs
from rustvllm.engine.core import EngineCore
from rustvllm.engine.inspection import Inspection
from rustvllm.engine.queries import QuerySource
from rustvllm.exceptions import EngineDeadError
from rustvllm.logger import init_logger

logger = init_logger(__name__)


def run(core: EngineCore, is_stopping: Callable[[], bool], queries: QuerySource) -> EngineDeadError | None:
    """Step until told to stop, parked in Rust while there is nothing to do.

    Args:
        core: The engine; this thread becomes its scheduler's owner.
        is_stopping: Asked after every step; whoever makes it true calls ``core.handle.wake()``.
        queries: What others want to know of the engine; answered between steps. Who puts one there wakes it, too.

    Returns:
        Why the engine died: the first error that was not one request's or one step's. None if it was told to stop.
    """
    check_invariants = envs.check_invariants()
    inspection = Inspection(core)
    try:
        while not is_stopping():
            num_tokens = core.step()
            for query in queries.take_queries():
                inspection.answer(query)
            if num_tokens == 0:
                if check_invariants:
                    core.scheduler.check_invariants()
                core.flush_trace()
                # Outputs that found the egress full are no reason to stay awake: whoever drains it wakes us.
                core.handle.wait_for_work()
    except BaseException as error:  # a panic of the Rust core is not an Exception
        message = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
        logger.critical("the engine died", exc_info=error)
        death = EngineDeadError(f"the engine died: {message}")
        death.__cause__ = error
        return death
    finally:
        core.flush_trace()
    return None
