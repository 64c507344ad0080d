"""``RequestJourney``: the records of one request, as JSON; ``JourneyLog``: those of the requests of late.

::

    journeys = JourneyLog()
    tracer.add_sink(journeys)          # in the engine's process, the front end's, or both
    journeys.journey("cmpl-1")         # RequestJourney or None
    journeys.journey("cmpl-1").as_json(since=12)
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any, Final

from rustvllm.tracing import TraceRecord

MAX_REQUESTS: Final = 64
"""Requests that a :class:`JourneyLog` remembers."""
MAX_RECORDS: Final = 4096
"""Records of each, the newest."""


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
        self._steps: set[int] = set()

    @classmethod
    def of(cls, request_id: str, records: Iterable[TraceRecord]) -> "RequestJourney":
        """The journey of a request, out of everybody's records in the order of their time."""
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

    @property
    def is_finished(self) -> bool:
        """Whether it has left the engine, or its front end has given the last of it."""
        return any(record.event == "finished" for record in self._records)

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


class JourneyLog:
    """Keeps the journeys of the requests seen last, as a sink of a tracer; to be read from any thread."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_records: int = MAX_RECORDS) -> None:
        self._max_requests, self._max_records = max_requests, max_records
        self._journeys: OrderedDict[str, RequestJourney] = OrderedDict()
        self._members: dict[int, list[RequestJourney]] = {}
        self._planned: dict[int, TraceRecord] = {}
        self._lock = threading.Lock()

    def journey(self, request_id: str) -> RequestJourney | None:
        """What is known of a request; None when it is nothing, or forgotten.

        Args:
            request_id: Of a sample where a request has several (``0_id``); what a server calls ``cmpl-x`` its engine
                knows as ``cmpl-x-…``, so that the beginning of an id is enough where only one request has it.
        """
        with self._lock:
            if (found := self._journeys.get(request_id)) is None:
                matching = [key for key in self._journeys if key.startswith(request_id)]
                if len(matching) != 1:
                    return None
                found = self._journeys[matching[0]]
            copy = RequestJourney(found.request_id, self._max_records)
            for record in found.records:
                copy.add(record)
            copy.num_dropped = found.num_dropped
            return copy

    def request_ids(self) -> list[str]:
        """Of whom something is known, the one seen last at the end."""
        with self._lock:
            return list(self._journeys)

    def write(self, record: TraceRecord) -> None:
        """Take a record."""
        with self._lock:
            if record.request_id is not None:
                self._of(record.request_id).add(record)
                if record.event == "scheduled" and record.step is not None:
                    self._join_step(record.request_id, record.step)
            elif record.step is not None:
                self._write_step(record.step, record)

    def flush(self) -> None:
        """Everything can be read at once."""

    def close(self) -> None:
        """What is known stays."""

    def _of(self, request_id: str) -> RequestJourney:
        journey = self._journeys.pop(request_id, None) or RequestJourney(request_id, self._max_records)
        self._journeys[request_id] = journey
        if len(self._journeys) > self._max_requests:
            self._journeys.popitem(last=False)
        return journey

    def _join_step(self, request_id: str, step: int) -> None:
        """A request is in a step: what is said of the step is said of it."""
        journey = self._journeys[request_id]
        self._members.setdefault(step, []).append(journey)
        if (planned := self._planned.get(step)) is not None:
            journey.add(planned)
        while len(self._members) > 4:  # steps in flight, and what never ended
            del self._members[min(self._members)]

    def _write_step(self, step: int, record: TraceRecord) -> None:
        if record.event == "planned":
            self._planned = {key: kept for key, kept in self._planned.items() if key >= step - 4} | {step: record}
        for journey in self._members.get(step, ()):
            journey.add(record)
        if record.event == "updated":
            self._members.pop(step, None)
            self._planned.pop(step, None)


def own_request_id(request_id: str, wanted: str) -> bool:
    """Whether an engine's id is that of a request, or of one of its samples."""
    if request_id == wanted:
        return True
    index, underscore, rest = request_id.partition("_")
    return bool(underscore) and rest == wanted and index.isdigit()
