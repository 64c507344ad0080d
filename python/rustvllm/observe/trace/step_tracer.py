"""``StepTracer``: turns an engine's steps, and what they do to requests, into records of a ``Tracer``.

The scheduler keeps a list of events (``crates/scheduler/src/scheduler/events.rs``), which are taken after each step and
sorted together with the times of the step. Used only by the engine's thread.
"""

from collections.abc import Mapping
from operator import attrgetter
from time import monotonic_ns
from typing import Any, Final

from rustvllm import _core
from rustvllm.observe.steps.times import StepTimes
from rustvllm.observe.trace.tracer import Tracer, TraceRecord

_GIVEN_UP: Final = {"PREEMPTED": "preempted", "SWAPPED": "swapped"}
_COUNTERS: Final = ("num_running", "num_waiting", "kv_cache_usage")


class StepTracer:
    """Observes the steps of one engine.

    Args:
        scheduler: The engine's scheduler; this object must only be called in its thread.
        tracer: Takes the records.
        has_clients: Whether requests come from other processes, so that the scheduler knows them as ``id@client``.
    """

    def __init__(self, scheduler: _core.Scheduler, tracer: Tracer, *, has_clients: bool = False) -> None:
        self._scheduler = scheduler
        self._tracer = tracer
        self._has_clients = has_clients
        self._has_begun = False

    def begin(self) -> None:
        """Call this before each step; the first call makes the scheduler keep events, in the thread that owns it."""
        if not self._has_begun:
            self._has_begun = True
            self._scheduler.set_trace(True, with_tokens=True)

    def end(self) -> None:
        """Make the scheduler stop keeping events."""
        if self._has_begun:
            self._scheduler.set_trace(False)

    def observe(self, times: StepTimes) -> None:
        """Write the records of a step in chronological order (:data:`StepObserver`)."""
        step = times.step
        counters = self._scheduler.stats()
        records = [
            TraceRecord(
                times.schedule_ns,
                "schedule",
                "planned",
                step=step,
                duration_ns=times.prepare_ns - times.schedule_ns,
                extras={"num_reqs": times.num_reqs, "num_scheduled_tokens": times.num_tokens},
            ),
            TraceRecord(
                times.prepare_ns,
                "execute",
                "ran",
                step=step,
                duration_ns=times.sample_ns - times.prepare_ns,
                extras={
                    "prepare_us": (times.forward_ns - times.prepare_ns - times.tower_ns) / 1e3,
                    **({"images_us": times.tower_ns / 1e3} if times.tower_ns else {}),
                    "forward_us": (times.sample_ns - times.forward_ns) / 1e3,
                },
            ),
            TraceRecord(
                times.sample_ns,
                "sample",
                "sampled",
                step=step,
                duration_ns=times.done_ns - times.sample_ns,
                extras={
                    "sample_us": (times.launched_ns - times.sample_ns) / 1e3,
                    "wait_us": (times.done_ns - times.launched_ns) / 1e3,
                },
            ),
            *self._events(times.done_ns),
            TraceRecord(
                times.done_ns,
                "update",
                "updated",
                step=step,
                duration_ns=times.end_ns - times.done_ns,
                extras={name: counters[name] for name in _COUNTERS},
                component="EngineCore",
            ),
        ]
        records.sort(key=attrgetter("timestamp_ns"))
        for record in records:
            self._tracer.write(record)

    def flush(self) -> None:
        """Write what happened outside of steps: there is nothing to run now."""
        for record in self._events(0):
            self._tracer.write(record)
        self._tracer.flush()

    def _events(self, done_ns: int) -> list[TraceRecord]:
        """The scheduler's events since the last call; tokens get the time ``done_ns``."""
        events, num_dropped = self._scheduler.take_events()
        records = [self._record(event, done_ns) for event in events]
        if num_dropped:
            self._tracer.note("update", "dropped", num_events=num_dropped)
        return records

    def _record(self, event: dict[str, Any], done_ns: int) -> TraceRecord:
        timestamp_ns, status, extras = event["timestamp_ns"], event["status"], {}
        request_id, client = event["request_id"], ""
        if self._has_clients:
            request_id, _, client = request_id.rpartition("@")
        if event["kind"] == "token":
            layer, what, timestamp_ns = "sample", "token", done_ns or timestamp_ns
            extras = {"token_id": event["token_id"]}
        elif event["kind"] == "drafts":
            layer, what, timestamp_ns = "sample", "verified", done_ns or timestamp_ns
            num_drafts, num_accepted = event["num_draft_tokens"], event["num_accepted_tokens"]
            extras = {"num_draft_tokens": num_drafts, "num_accepted_tokens": num_accepted}
            extras["num_rejected_tokens"] = num_drafts - num_accepted
        elif event["kind"] == "scheduled":
            layer, what = "schedule", "scheduled"
            extras = {"num_scheduled_tokens": event["num_scheduled_tokens"], "num_blocks": event["num_blocks"]}
            if event["new_block_ids"]:
                extras["new_block_ids"] = event["new_block_ids"]
            if event["num_draft_tokens"]:
                extras["num_draft_tokens"] = event["num_draft_tokens"]
            if event["num_cached_tokens"]:
                extras["num_cached_tokens"] = event["num_cached_tokens"]
        elif status.startswith("FINISHED"):
            layer, what = "update", "finished"
        else:
            layer, what = "queue", _GIVEN_UP.get(status, "waiting")
        if client:
            extras["client"] = int(client)
        return TraceRecord(
            timestamp_ns,
            layer,
            what,
            request_id=request_id,
            step=event["step"] or None,
            status=status,
            num_computed_tokens=event["num_computed_tokens"],
            num_tokens=event["num_tokens"],
            extras=extras,
        )


def note_load(tracer: Tracer, seconds: Mapping[str, float]) -> None:
    """Record how long each part of an engine's start took, now that it has ended."""
    began_ns = monotonic_ns() - int(sum(seconds.values()) * 1e9)
    for name, spent in seconds.items():
        duration_ns = int(spent * 1e9)
        tracer.write(TraceRecord(began_ns, "model_load", name, duration_ns=duration_ns))
        began_ns += duration_ns
