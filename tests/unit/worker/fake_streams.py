"""Streams and graphs on the CPU that say which accesses no event puts in order.

Everything runs at once, in the order of the program; what a real device might do in another order is found by vector
clocks. Each stream, and the host, counts its operations and remembers how far it knows the others have come: from the
events it waited for, and a stream from the host that launches its work. Two accesses of the same bytes, one of them a
write, are a race unless the second knows of the first.
"""

from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rustvllm.attention.metadata import AttentionMetadata
from rustvllm.attention.torch_backend import TorchAttentionBackend
from rustvllm.worker.streams import DeviceStreams


class FakeEvent:
    def __init__(self, race_detector, clock):
        self._detector, self._clock, self._is_done = race_detector, dict(clock), False

    def query(self):
        """Never by itself: no code may count on a quick device."""
        return self._is_done

    def synchronize(self):
        self._is_done = True
        self._detector.learn("host", self._clock)


class FakeStream:
    def __init__(self, race_detector, name):
        self._detector, self.name = race_detector, name

    def record_event(self):
        self._detector.launch(self.name)
        return FakeEvent(self._detector, self._detector.clocks[self.name])

    def wait_event(self, event):
        if self.name not in self._detector.deaf:
            self._detector.learn(self.name, event._clock)


@dataclass
class _Access:
    who: str
    count: int  # of that stream
    what: str
    begin: int  # bytes within the storage
    end: int
    write: bool


class RaceDetector(TorchDispatchMode):
    """See the module; enter it as a context.

    Attributes:
        streams: to be given to what is tested.
        races: what was found, as text.
        num_accesses: of each stream, how many were looked at.
        host_memory: data pointers; an operation on one of them is the host's.
        deaf: names of streams that do not heed events, to see whether a test notices.
    """

    def __init__(self, deaf=()):
        super().__init__()
        self.names = ("host", "compute", "inputs", "outputs", "swaps")
        self.clocks = {name: dict.fromkeys(self.names, 0) for name in self.names}
        self.deaf = set(deaf)
        self.races = []
        self.num_accesses = dict.fromkeys(self.names, 0)
        self.host_memory = set()
        self._current = "compute"
        self._accesses = {}  # data pointer of a storage -> accesses that may still race
        self._kept = []  # memory that was freed and used again would look like one that is shared
        self.streams = DeviceStreams(
            **{name: FakeStream(self, name) for name in self.names[1:]}, use=self._use, synchronize=self._synchronize
        )

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # torch would import its compiler to learn that there is nothing to compile

    def learn(self, who, clock):
        mine = self.clocks[who]
        for name, count in clock.items():
            mine[name] = max(mine[name], count)

    def launch(self, stream):
        self.learn(stream, self.clocks["host"])

    def access(self, who, tensor, what, *, write):
        storage = tensor.untyped_storage()
        if not tensor.numel():
            return
        self._kept.append(tensor)
        clock = self.clocks[who]
        clock[who] += 1
        self.num_accesses[who] += 1
        begin = tensor.storage_offset() * tensor.itemsize
        length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        end = begin + length * tensor.itemsize
        before = self._accesses.setdefault(storage.data_ptr(), [])
        overlapping = [other for other in before if other.begin < end and begin < other.end]
        self.races += [
            f"{who}: {what} after {other.who}: {other.what}"
            for other in overlapping
            if (write or other.write) and other.who != who and clock[other.who] < other.count
        ]
        if write:  # who is in order with this is in order with what it replaces
            before[:] = [other for other in before if not (begin <= other.begin and other.end <= end)]
        before.append(_Access(who, clock[who], what, begin, end, write))

    def host_access(self, tensor, what, *, write):
        self.access("host", tensor, what, write=write)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return result  # a view
        named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        touched = {tensor.untyped_storage().data_ptr() for value in named.values() for tensor in _tensors(value)}
        who = "host" if touched & self.host_memory else self._current
        self.launch(who)
        for argument in schema.arguments:
            write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(named.get(argument.name)):
                self.access(who, tensor, str(func), write=write)
        for tensor in _tensors(result):
            self.access(who, tensor, str(func), write=True)
        return result

    @contextmanager
    def _use(self, stream):
        before, self._current = self._current, stream.name
        try:
            yield
        finally:
            self._current = before

    def _synchronize(self):
        for name in self.names:
            self.learn("host", self.clocks[name])


def _tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


class FakeGraph:
    """Runs its forward pass anew at each replay, and leaves the result where the first one did."""

    def __init__(self, forward):
        self._forward = forward
        self.result = forward()
        self.num_replays = 0

    def replay(self):
        self.num_replays += 1
        self.result.copy_(self._forward())


class FakeRecorder:
    def __init__(self):
        self.graphs = []

    def capture(self, forward):
        forward()
        self.graphs.append(FakeGraph(forward))
        return self.graphs[-1]


class StaticTorchBackend(TorchAttentionBackend):
    """Attention whose decode reads a static batch anew at each replay, as a captured kernel does."""

    def plan_static(self, batch):
        return _StaticPlan(self, batch)

    def plan_static_mixed(self, batch):
        return _StaticMixedPlan(self, batch)

    def plan_static_drafts(self, batch):
        return _StaticDraftPlan(self, batch)


class _StaticPlan:
    def __init__(self, backend, batch):
        self._backend, self._batch = backend, batch

    def forward(self, query, key, value, kv_cache, scale, **options):
        batch = self._batch
        metadata = AttentionMetadata(
            block_size=batch.block_size,
            block_table=batch.block_table[batch.table_rows.long()],
            slot_mapping=batch.slot_mapping.clone(),
            query_start_loc=np.arange(batch.seq_lens.shape[0] + 1, dtype=np.int32),
            seq_lens=batch.seq_lens.numpy().copy(),
            has_padding=True,
        )
        return self._backend.plan(metadata).forward(query, key, value, kv_cache, scale, **options)


class _StaticMixedPlan:
    """As a captured one: what is read of a batch is what the device has when the step begins."""

    def __init__(self, backend, batch):
        self._backend, self._batch, self._lengths = backend, batch, None

    def begin_step(self):
        batch = self._batch
        starts, seq_lens = batch.query_start_loc.numpy(), batch.seq_lens.numpy()
        num_reqs = int((seq_lens > 0).sum())
        assert not seq_lens[num_reqs:].any()
        assert num_reqs < seq_lens.size, "one is padding always"
        assert (starts[num_reqs:] == starts[num_reqs]).all(), "padding has no tokens"
        self._lengths = starts[: num_reqs + 1].copy(), seq_lens[:num_reqs].copy()

    def forward(self, query, key, value, kv_cache, scale, **options):
        batch, (starts, seq_lens) = self._batch, self._lengths
        num_tokens = int(starts[-1])
        assert (batch.slot_mapping[num_tokens:] == -1).all(), "tokens of no request are written nowhere"
        out = torch.full_like(query, float("nan"))  # what the kernels leave there is anything
        if num_tokens:
            metadata = AttentionMetadata(
                block_size=batch.block_size,
                block_table=batch.block_table[batch.table_rows[: seq_lens.size].long()],
                slot_mapping=batch.slot_mapping[:num_tokens].clone(),
                query_start_loc=starts,
                seq_lens=seq_lens,
            )
            plan = self._backend.plan(metadata)
            step = (x[:num_tokens] for x in (query, key, value))
            out[:num_tokens] = plan.forward(*step, kv_cache, scale, **options)
        return out


class _StaticDraftPlan(_StaticMixedPlan):
    """As a captured one, which no step begins: each forward pass reads what the device has then."""

    def begin_step(self):
        batch = self._batch
        starts, seq_lens = batch.query_start_loc.numpy(), batch.seq_lens.numpy()
        num_reqs = int((seq_lens > 0).sum())
        assert not seq_lens[num_reqs:].any()
        assert (starts[num_reqs:] == starts[num_reqs]).all(), "padding has no tokens"
        assert np.diff(starts).max() <= batch.width
        self._lengths = starts[: num_reqs + 1].copy(), seq_lens[:num_reqs].copy()

    def forward(self, *args, **options):
        self.begin_step()
        return super().forward(*args, **options)
