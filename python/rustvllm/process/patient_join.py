"""``patient_join``: waits for a thread, with a timeout that does not run while the process is stopped."""

import threading
from typing import Final

_SLICE_SECONDS: Final = 0.1


def patient_join(thread: threading.Thread, seconds: float) -> bool:
    """Wait for a thread to end, at most ``seconds`` in which this process runs.

    The clock continues while a process is stopped (Ctrl-Z, a frozen container). One long wait would then time out
    before the thread had run again. This waits in many short slices, of which a pause uses up only one.

    Args:
        thread: The thread; it may have ended already, or be the caller's own.
        seconds: The longest wait.

    Returns:
        Whether the thread has ended; False for the caller's own thread.
    """
    if thread is threading.current_thread():
        return False
    left = seconds
    while thread.is_alive() and left > 0:
        thread.join(min(left, _SLICE_SECONDS))
        left -= _SLICE_SECONDS
    return not thread.is_alive()
