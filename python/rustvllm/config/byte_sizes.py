"""Sizes of memory as people read them."""


def readable_size(num_bytes: int) -> str:
    """``54.9 GiB``, ``18.5 MiB`` or ``1000 bytes``: the largest unit that has one before the point."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.{1 if num_bytes >= 10 * unit else 2}f} {name}"
    return f"{num_bytes} bytes"
