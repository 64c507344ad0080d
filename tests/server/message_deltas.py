"""What a client makes of the events of a chat stream whose answer has thoughts and calls."""


def joined(events):
    """Message and end of a stream's events, as a client puts them together."""
    content, reasoning, calls, end = "", "", [], None
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            assert len({"content", "reasoning", "tool_calls"} & set(delta)) <= 1, "one kind at a time"
            content += delta.get("content", "")
            reasoning += delta.get("reasoning", "")
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(calls)
                    assert call["type"] == "function"
                    calls.append(dict(call["function"]))
                else:
                    assert call["index"] == len(calls) - 1
                    calls[-1]["arguments"] += call["function"]["arguments"]
            end = choice["finish_reason"] or end
    message = {"role": "assistant", "content": content or (None if calls or reasoning else "")}
    if reasoning:
        message.update(reasoning=reasoning, reasoning_content=reasoning)
    return (message | {"tool_calls": calls} if calls else message), end


def without_ids(message):
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return message | {"tool_calls": calls} if calls else message
