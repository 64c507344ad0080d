"""``RequestJourney``: what happened to one request, taken from the records of all, and as JSON."""

from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from rustvllm.observe.trace.tracer import TraceRecord

MAX_RECORDS: Final = 4096
"""Records that are kept, the newest."""


class RequestJourney:
    """What happened to one request, oldest first; the steps that it was in are part of it.

    Attributes:
        request_id: Whose.
        num_dropped: Records that were too many: the oldest ones.
    """

    def __init__(self, request_id: str, max_records: int = MAX_RECORDS) -> None:
        self.request_id = request_id
        self.num_dropped = 0
        self._records: deque[TraceRecord] = deque()
        self._max_records = max_records

    @classmethod
    def of(cls, request_id: str, records: Iterable[TraceRecord]) -> "RequestJourney":
        """The journey of a request, from the records of all requests in the order of their time."""
        kept = list(records)
        journey = cls(request_id, max_records=max(1, len(kept)))
        steps = {record.step for record in kept if record.event == "scheduled" and journey.is_mine(record)}
        for record in kept:
            if journey.is_mine(record) or (record.request_id is None and record.step in steps and record.step):
                journey.add(record)
        return journey

    def __len__(self) -> int:
        return len(self._records)

    @property
    def records(self) -> list[TraceRecord]:
        """The records themselves."""
        return list(self._records)

    def is_mine(self, record: TraceRecord) -> bool:
        """Whether a record is of this request, or of one of its samples (``0_id``, ``1_id``, …)."""
        return record.request_id is not None and own_request_id(record.request_id, self.request_id)

    def add(self, record: TraceRecord) -> None:
        """Take a record of the request, or of a step that it was in."""
        if len(self._records) >= self._max_records:
            self._records.popleft()
            self.num_dropped += 1
        self._records.append(record)

    def as_json(self, since: int = 0) -> list[dict[str, Any]]:
        """The records as what ``json.dumps`` takes, with ``index`` (from 0) and ``at_ms``, from the first of them on.

        Args:
            since: Leave out those with a smaller index: what the caller has already.
        """
        if not self._records:
            return []
        records = sorted(enumerate(self._records, self.num_dropped), key=lambda pair: pair[1].timestamp_ns)
        began = records[0][1].timestamp_ns
        return [
            {"index": index, "at_ms": (record.timestamp_ns - began) / 1e6, **record.as_dict()}
            for index, record in records
            if index >= since
        ]


def own_request_id(request_id: str, wanted: str) -> bool:
    """Whether an engine's id is that of a request, or of one of its samples."""
    if request_id == wanted:
        return True
    index, underscore, rest = request_id.partition("_")
    return bool(underscore) and rest == wanted and index.isdigit()
