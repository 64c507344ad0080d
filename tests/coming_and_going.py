"""Runs an engine while requests come and leave at given steps."""


def outputs_of(engine, requests, most_steps):
    """Yield every output, until no request is left.

    Args:
        engine: An ``LLMEngine``.
        requests: Of each its id, the ids of its prompt, its parameters, the step before which it comes, and the step
            before which it is aborted (None: it runs to its end).
        most_steps: More steps are an error: the engine makes no progress.
    """
    waiting, aborts, number = list(requests), {}, 0
    while waiting or engine.has_unfinished_requests():
        for request in [request for request in waiting if request[3] <= number]:
            waiting.remove(request)
            request_id, prompt, params, _, abort_at = request
            engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
            if abort_at is not None:
                aborts[request_id] = abort_at
        for request_id in [request_id for request_id, at in aborts.items() if at <= number]:
            del aborts[request_id]
            engine.abort_request(request_id)
        yield from engine.step()
        number += 1
        assert number < most_steps
    engine.engine_core.core.scheduler.check_invariants()
