"""How messages name a rank and its end, whether its process is of this machine or of another one."""

from rustvllm.exceptions import RustVLLMError


def place_of(rank: int, node_rank: int, pid: int) -> str:
    """A rank's name in messages."""
    return f"worker rank {rank} (node {node_rank}, pid {pid})"


def end_in_words(place: str, error: RustVLLMError | None, death: str | None, end: str) -> str:
    """Which rank ended and why.

    Args:
        place: Its name.
        error: What it raised, if it could say so.
        death: Why it ended, in its own words.
        end: How its process ended, as a ``ChildProcess`` says it.
    """
    if error is not None:
        return f"{place}: {error}"
    if death is not None:
        return f"{place} ended: {death}"
    return f"{place} {'was ' if end.startswith('killed') else 'ended '}{end}"
