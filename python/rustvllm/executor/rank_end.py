"""Names a rank and describes its end in messages, for ranks of this machine and of others."""

from rustvllm.exceptions import RustVLLMError


def place_of(rank: int, node_rank: int, pid: int) -> str:
    """A rank's name in messages."""
    return f"worker rank {rank} (node {node_rank}, pid {pid})"


def end_in_words(place: str, error: RustVLLMError | None, death: str | None, end: str) -> str:
    """Describe which rank ended, and why.

    Args:
        place: Its name.
        error: The error that it raised, if it could report one.
        death: Why it ended, in its own words.
        end: How its process ended, in the words of a ``ChildProcess``.
    """
    if error is not None:
        return f"{place}: {error}"
    if death is not None:
        return f"{place} ended: {death}"
    return f"{place} {'was ' if end.startswith('killed') else 'ended '}{end}"
