"""``RequestJourney``: the records of one request, selected from those of all, and as JSON."""

from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from rustvllm.observe.trace.tracer import TraceRecord

MAX_RECORDS: Final = 4096
"""The most records that are kept; the newest are kept."""


class RequestJourney:
    """The records of one request, oldest first, including those of its steps.

    Attributes:
        request_id: The request's id.
        num_dropped: How many records, the oldest ones, were dropped because there were too many.
    """

    def __init__(self, request_id: str, max_records: int = MAX_RECORDS) -> None:
        self.request_id = request_id
        self.num_dropped = 0
        self._records: deque[TraceRecord] = deque()
        self._max_records = max_records

    @classmethod
    def of(cls, request_id: str, records: Iterable[TraceRecord]) -> "RequestJourney":
        """The journey of a request, from the records of all requests in chronological order."""
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
        """Whether a record belongs to this request, or to one of its samples (``0_id``, ``1_id``, …)."""
        return record.request_id is not None and own_request_id(record.request_id, self.request_id)

    def add(self, record: TraceRecord) -> None:
        """Add a record of the request, or of one of its steps."""
        if len(self._records) >= self._max_records:
            self._records.popleft()
            self.num_dropped += 1
        self._records.append(record)

    def as_json(self, since: int = 0) -> list[dict[str, Any]]:
        """The records for ``json.dumps``, with ``index`` (from 0) and ``at_ms``, the time since the first kept record.

        Args:
            since: Leave out records with a smaller index, which the caller already has.
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
    """Whether an engine's id belongs to a request, or to one of its samples."""
    if request_id == wanted:
        return True
    index, underscore, rest = request_id.partition("_")
    return bool(underscore) and rest == wanted and index.isdigit()
