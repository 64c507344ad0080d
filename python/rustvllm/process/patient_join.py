"""``patient_join``: wait for the end of a thread for a time that a pause of the process does not use up."""

import threading
from typing import Final

_SLICE_SECONDS: Final = 0.1


def patient_join(thread: threading.Thread, seconds: float) -> bool:
    """Wait for a thread to end, so many seconds while this process runs.

    The clock goes on while a process is stopped (Ctrl-Z, a container that is frozen), so one long wait would be over
    when it goes on, before the thread had its turn. Of many short ones, a pause uses up one.

    Args:
        thread: It may have ended, or be the caller's own.
        seconds: How long to wait at most.

    Returns:
        Whether it has ended; False for the caller's own.
    """
    if thread is threading.current_thread():
        return False
    left = seconds
    while thread.is_alive() and left > 0:
        thread.join(min(left, _SLICE_SECONDS))
        left -= _SLICE_SECONDS
    return not thread.is_alive()
