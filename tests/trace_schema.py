"""What a trace file must be for Perfetto and Chrome: keys of each kind of event, order and nesting on each track."""

import json

KEYS = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "b": {"name", "cat", "ts", "pid", "tid", "id"},
    "e": {"name", "cat", "ts", "pid", "tid", "id"},
    "C": {"name", "ts", "pid", "tid", "args"},
}


def check_trace(text, *, is_complete=True):
    """Read a file strictly, check it, and return its events; one that was cut short is read as the viewers do."""
    if not is_complete:
        text = text.rstrip().rstrip(",").removesuffix("]") + "]"
    events = json.loads(text)
    named = {(event["pid"], event["tid"]) for event in events if event["name"] in ("process_name", "thread_name")}
    last, open_slices, open_spans = {}, {}, {}
    for event in events:
        assert event.keys() >= KEYS[event["ph"]], event
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            continue
        assert (event["pid"], event["tid"]) in named, "no name for its track"
        if event["ph"] in "be":
            track = (event["cat"], event["id"], event["pid"])
        elif event["ph"] == "C":
            track = (event["name"], event["pid"])
        else:
            track = (event["pid"], event["tid"])
        assert event["ts"] >= last.get(track, 0), f"{event} is earlier than the one before it on {track}"
        last[track] = event["ts"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            stack = open_slices.setdefault(track, [])
            while stack and stack[-1] <= event["ts"] + 1e-3:
                stack.pop()
            end = event["ts"] + event["dur"]
            assert not stack or end <= stack[-1] + 1e-3, f"{event} ends after what it lies in"
            stack.append(end)
        elif event["ph"] == "b":
            open_spans.setdefault(track, []).append(event["name"])
        elif event["ph"] == "e":
            assert open_spans[track].pop() == event["name"]
        else:
            assert all(isinstance(value, int | float) for value in event["args"].values())
    if is_complete:
        assert not any(open_spans.values()), open_spans
    return events
