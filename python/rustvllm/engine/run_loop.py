"""The loop of an engine that runs by itself: :func:`run`, the same in a thread and in a process of its own."""

from collections.abc import Callable

from rustvllm import envs
from rustvllm.engine import pausing
from rustvllm.engine.adapters import EngineAdapters
from rustvllm.engine.core import EngineCore
from rustvllm.exceptions import EngineDeadError
from rustvllm.logger import init_logger
from rustvllm.lora import queries as adapter_queries
from rustvllm.observe.inspect.inspection import Inspection
from rustvllm.observe.inspect.queries import QuerySource

logger = init_logger(__name__)


def run(core: EngineCore, is_stopping: Callable[[], bool], queries: QuerySource) -> EngineDeadError | None:
    """Step until told to stop, parked in Rust while there is nothing to do.

    Args:
        core: The engine; this thread becomes its scheduler's owner.
        is_stopping: Called after every step; the thread that makes it true also calls ``core.handle.wake()``.
        queries: Questions about the engine, answered between steps. The thread that adds one also wakes the engine.

    Returns:
        Why the engine died: the first error that was not one request's or one step's. None after a shutdown.
    """
    check_invariants = envs.check_invariants()
    adapters = EngineAdapters(core)
    inspection = Inspection(core, adapters)
    pause = pausing.EnginePause(core)
    try:
        while not is_stopping():
            num_tokens = core.step()
            for query in queries.take_queries():
                if query.kind in adapter_queries.KINDS:
                    adapters.answer(query)
                elif query.kind in pausing.KINDS:
                    pause.answer(query)
                else:
                    inspection.answer(query)
            adapters.tend()
            if num_tokens == 0:
                if check_invariants:
                    core.scheduler.check_invariants()
                core.watch.flush()
                # A full egress is not a reason to stay awake: its reader wakes this thread.
                core.handle.wait_for_work()
    except BaseException as error:  # a panic of the Rust core is not an Exception
        message = str(error) if isinstance(error, EngineDeadError) else f"{type(error).__name__}: {error}"
        logger.critical("the engine died", exc_info=error)
        death = EngineDeadError(f"the engine died: {message}")
        death.__cause__ = error
        return death
    finally:
        core.watch.flush()
    return None
