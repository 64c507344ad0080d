"""Sizes as people read them."""

import pytest

from rustvllm.config.byte_sizes import readable_size


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (0, "0 bytes"),
        (1000, "1000 bytes"),
        (1 << 20, "1.00 MiB"),
        (63 << 20, "63.0 MiB"),
        (1 << 30, "1.00 GiB"),
        (58_950_000_000, "54.9 GiB"),
    ],
)
def test_readable_size(num_bytes, shown):
    assert readable_size(num_bytes) == shown
