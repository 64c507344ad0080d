"""The pixels of all requests under way have a limit in a server's process."""

from types import SimpleNamespace

import pytest

from rustvllm.engine.request_table import RequestTable
from rustvllm.exceptions import QueueFullError


def table_of(most):
    return RequestTable(SimpleNamespace(), None, max_image_bytes=most)


def test_requests_with_images_wait_their_turn():
    table = table_of(100)
    table._check_room_for_images(1000)  # alone it is let in: its own size was checked with its images
    table._image_bytes["a"] = 60
    table._check_room_for_images(40)
    table._check_room_for_images(0)
    with pytest.raises(
        QueueFullError, match=r"requests under way take 60 bytes; 41 more .* the limit of 100: try again"
    ):
        table._check_room_for_images(41)


def test_without_a_limit_any_number_comes_in():
    table = table_of(None)
    table._image_bytes["a"] = 1 << 40
    table._check_room_for_images(1 << 40)
