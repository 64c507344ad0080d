"""A hundred adapters of which eight may run at once, in steps that take no time: how full they are, and who waits."""

import random
import statistics
from collections import defaultdict

from rustvllm.config.engine_args import EngineArgs
from rustvllm.engine.core import EngineCore

MAX_LORAS, ROWS, OUTSTANDING, LENGTH, STEPS = 8, 32, 256, 16, 1500


class ClosedLoop:
    """An engine in which each request that ends is followed by one whose adapter is drawn by Zipf's law.

    Attributes:
        waits: Steps from arrival to admission, by adapter.
        num_running: Of each step.
    """

    def __init__(self, num_adapters, **options):
        self._core = EngineCore(
            EngineArgs(
                executor="sim", enable_lora=True, max_loras=MAX_LORAS, max_num_seqs=ROWS, num_gpu_blocks_override=2000,
                enable_prefix_caching=False, skip_tokenizer_init=True, **options,
            ).create_engine_config("llm_class")
        )  # fmt: skip
        self._random = random.Random(1)
        self._adapters = range(1, num_adapters + 1)
        self._unadmitted = {}
        self.waits, self.num_running = defaultdict(list), []
        live = set()
        try:
            for step in range(STEPS):
                while len(live) < OUTSTANDING:
                    live.add(self._add(step))
                self._core.step()
                self._core.scheduler.take_outputs()
                running = {request.request_id for request in self._core.scheduler.running}
                self.num_running.append(len(running))
                for request_id in running & self._unadmitted.keys():
                    adapter, arrival = self._unadmitted.pop(request_id)
                    self.waits[adapter].append(step - arrival)
                live &= running | {request.request_id for request in self._core.scheduler.waiting}
        finally:
            self._core.shutdown()

    def _add(self, step):
        key = self._core.handle.new_key()
        [adapter] = self._random.choices(self._adapters, [1 / number for number in self._adapters])
        self._core.handle.add_request(key, f"r{key}", [5] * 32, max_tokens=LENGTH, temperature=0.0, adapter=adapter)
        self._unadmitted[f"r{key}"] = adapter, step
        return f"r{key}"


def test_many_adapters_fill_the_steps_as_few_do_and_the_rarest_wait_little_longer_than_others():
    few, many = ClosedLoop(MAX_LORAS), ClosedLoop(100)
    assert len(many.waits) > 90, "nearly all adapters had a turn"
    assert statistics.mean(few.num_running) > 0.9 * ROWS
    assert statistics.mean(many.num_running) >= 0.9 * statistics.mean(few.num_running)
    waits = [wait for of_one in many.waits.values() for wait in of_one]
    rarest = [wait for adapter, of_one in many.waits.items() if adapter > 90 for wait in of_one]
    assert len(rarest) > 20
    assert statistics.mean(rarest) <= 3 * statistics.mean(waits)
    assert max(waits) <= 3 * statistics.mean(waits), "one was forgotten"
