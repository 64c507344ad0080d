"""A CUDA device that is not there: tensors without memory, and a judge of what a step does with the host.

Tensors on ``cuda`` are torch's fake ones, which know shapes, dtypes and strides alone; what needs their numbers cannot
run. Tensors on the CPU are real, because the core reads and writes them. Every operation passes the judge: a copy
between host and device must be from or to pinned memory and must not block, no operation may look at the device's
numbers, none may mix memory of the two. Launches of Triton are caught and their arguments checked (``LAUNCH_CHECKS``).
"""

import inspect
import traceback
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from rustvllm.worker.streams import DeviceStreams

DEVICE = torch.device("cuda", 0)
_WAITS = {  # each copies numbers or a size of the device to the host, and waits for them
    "aten._local_scalar_dense", "aten.nonzero", "aten.nonzero_numpy", "aten.masked_select", "aten._unique2",
    "aten.unique_dim", "aten.unique_consecutive", "aten.bincount", "aten.equal", "aten.is_nonzero", "aten.item",
}  # fmt: skip
_COPIES = {"aten.copy_", "aten._to_copy"}


class FakeStream:
    def __init__(self, device, name):
        self._device, self.name = device, name

    def record_event(self):
        return FakeEvent()

    def wait_event(self, event):
        assert isinstance(event, FakeEvent)


class FakeEvent:
    def query(self):
        return False

    def synchronize(self):
        pass


class FakeCuda(TorchDispatchMode):
    """See the module; enter it as a context, and ``watch`` what must not wait.

    Attributes:
        streams: Of the device.
        faults: What was done within ``watch`` and must not be, with the line that did it.
        launches: Names of the Triton kernels that were launched within ``watch``, in order.
        operations: Names of operations on the device that were neither views nor copies from the host, likewise.
        pinned_by: Files that had memory pinned, likewise.
        fetched: What a copy from the device finds there.
        sizes: Of those copies.
        made_current: Devices that were made the current one.
    """

    def __init__(self, *, fetched=1):
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._pinned = set()
        self._kept = []  # so that no other memory has the address of a pinned one
        self._is_watching = False
        self.current = "compute"
        self.fetched, self.faults, self.launches, self.operations, self.sizes = fetched, [], [], [], []
        self.pinned_by, self.made_current = [], []
        self.streams = DeviceStreams(
            **{name: FakeStream(self, name) for name in ("compute", "inputs", "outputs", "swaps")},
            use=self._use,
            synchronize=lambda: None,
        )

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __enter__(self):
        self._fake.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._fake.__exit__(*error)

    def forget(self):
        """What was seen so far."""
        for seen in (self.faults, self.launches, self.operations, self.sizes, self.pinned_by):
            seen.clear()

    @contextmanager
    def watch(self):
        before, self._is_watching = self._is_watching, True
        try:
            yield
        finally:
            self._is_watching = before

    @contextmanager
    def _use(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    def fault(self, what):
        if self._is_watching:
            frames = [frame for frame in traceback.extract_stack() if "/rustvllm/" in frame.filename]
            at = f"{frames[-1].filename.rsplit('/rustvllm/')[-1]}:{frames[-1].lineno}" if frames else "?"
            self.faults.append(f"{at}: {what}")

    def pin(self, tensor):
        if self._is_watching:
            frames = [frame for frame in traceback.extract_stack() if "/rustvllm/" in frame.filename]
            self.pinned_by += [frame.filename.rpartition("/")[2] for frame in frames[-1:]]
        self._kept.append(tensor)
        self._pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def is_pinned(self, tensor):
        return not tensor.numel() or tensor.untyped_storage().data_ptr() in self._pinned

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = str(func).rpartition(".")[0]
        tensors = _tensors([*args, *kwargs.values()])
        on_device = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device).type == "cuda"
        if name in ("aten._pin_memory", "aten.pin_memory") or kwargs.get("pin_memory"):
            kwargs.pop("pin_memory", None)
            with unset_fake_temporarily():
                return self.pin(args[0].clone() if "pin_memory" in name else func(*args, **kwargs))
        if not on_device and not to_device:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if name.startswith("prim."):
            return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        if name in _COPIES:
            return self._copy(func, name, args, kwargs)
        if name in _WAITS and on_device:
            self.fault(f"{func} waits for the device")
        on_host = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor) and tensor.dim()]
        if on_host and on_device:
            self.fault(f"{func} mixes memory of the host and of the device")
        indices = args[1] if name in ("aten.index", "aten.index_put_", "aten.index_put") else ()
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            self.fault(f"{func} looks for the places of a mask")
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if self._is_watching and not is_view and not name.startswith(("aten.empty", "aten.new_empty")):
            self.operations.append(name.removeprefix("aten."))
        return func(*args, **kwargs)

    def _copy(self, func, name, args, kwargs):
        source = args[1] if name == "aten.copy_" else args[0]
        target = args[0] if name == "aten.copy_" else None
        does_block = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2] is True))
        from_host = not isinstance(source, FakeTensor)
        device = torch.device(kwargs.get("device") or source.device)
        to_host = not isinstance(target, FakeTensor) if target is not None else device.type == "cpu"
        if from_host != to_host and to_host:
            self.sizes.append(tuple(source.shape))
            if does_block or (target is not None and not self.is_pinned(target)) or target is None:
                self.fault(f"{func} of {tuple(source.shape)} to the host blocks, or its memory is not pinned")
            if self.current != "outputs" and self.current != "swaps":
                self.fault(f"{func} to the host in the stream {self.current}")
            with unset_fake_temporarily():
                dtype = kwargs.get("dtype") or source.dtype
                target = torch.empty(tuple(source.shape), dtype=dtype) if target is None else target
                return target.fill_(self.fetched)
        if from_host and not to_host:
            if source.dim() and (does_block or not self.is_pinned(source)):
                self.fault(f"{func} of {tuple(source.shape)} to the device blocks, or its memory is not pinned")
            if target is not None:
                return target
            like = {"dtype": kwargs.get("dtype") or source.dtype, "device": device}
            return torch.empty_strided(source.shape, source.stride(), **like)
        if self._is_watching:
            self.operations.append(name.removeprefix("aten."))
        return func(*args, **kwargs)

    def launch(self, kernel, *args, grid, warmup=False, **kwargs):
        """In the place of Triton's ``JITFunction.run``."""
        parameters = inspect.signature(kernel.fn).parameters
        own = {name: value for name, value in kwargs.items() if name in parameters}
        bound = inspect.signature(kernel.fn).bind(*args, **own).arguments
        assert set(parameters) == set(bound), f"{kernel.fn.__name__}: {set(parameters) - set(bound)} are not given"
        for name, value in bound.items():
            if name.endswith("_ptr"):
                assert isinstance(value, FakeTensor), f"{kernel.fn.__name__}: {name} is {type(value)}"
                assert value.device == DEVICE, f"{kernel.fn.__name__}: {name} lies on {value.device}"
            else:
                assert not isinstance(value, torch.Tensor), f"{kernel.fn.__name__}: {name} is a tensor"
        grid = grid(bound) if callable(grid) else grid
        assert all(isinstance(size, int) and 0 < size < 2**31 for size in grid), f"{kernel.fn.__name__}: grid {grid}"
        assert all(size < 2**16 for size in grid[1:]), f"{kernel.fn.__name__}: grid {grid}"
        LAUNCH_CHECKS[kernel.fn.__name__](bound, (*grid, 1, 1)[:3])
        if self._is_watching:
            self.launches.append(kernel.fn.__name__)


def _tensors(values):
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def use_fake_cuda(monkeypatch, cuda, recorder=None):
    """Have everything that asks for a GPU find the fake one: compute capability 9.0, 132 multiprocessors."""
    import triton

    from rustvllm.kernels import tuning
    from rustvllm.layers import fused
    from rustvllm.worker import worker as worker_module

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", _launcher(cuda))
    monkeypatch.setattr(fused, "_runs_fused", lambda device: device.type == "cuda")
    monkeypatch.setattr(tuning, "capability", lambda device: (9, 0))
    monkeypatch.setattr(tuning, "is_tuned", lambda device: True)
    monkeypatch.setattr(tuning, "num_processors", lambda device: 132)
    monkeypatch.setattr(tuning, "why_no_toolchain", lambda: None)
    monkeypatch.setattr(worker_module, "resolve_device", lambda name, rank: DEVICE)
    monkeypatch.setattr(worker_module, "make_streams", lambda device: cuda.streams)
    monkeypatch.setattr(worker_module, "make_graph_recorder", lambda device: recorder)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (64 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_device", cuda.made_current.append)


def _launcher(cuda):
    """As a plain function, which becomes a method of the kernel."""

    def launch(kernel, *args, **kwargs):
        cuda.launch(kernel, *args, **kwargs)

    return launch


def on_fake_cuda(model, cuda, dtype=None):
    """The model with fake parameters on the device in the place of its own."""
    with cuda:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    kind = dtype or parameter.dtype
                    fake = torch.empty(parameter.shape, dtype=kind, device=DEVICE)
                    module._parameters[name] = torch.nn.Parameter(fake, requires_grad=False)
    return model


def _dtype(bound, name, *dtypes):
    assert bound[name].dtype in dtypes, f"{name} is {bound[name].dtype}, expected one of {dtypes}"


def _numel(bound, name, at_least):
    """So many numbers lie from the tensor's first one to the end of its memory."""
    tensor = bound[name]
    room = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
    assert room >= at_least, f"{name} has room for {room} numbers, the kernel looks at {at_least}"


def _dense(bound, *names):
    for name in names:
        assert bound[name].is_contiguous(), f"{name} has strides {bound[name].stride()}"


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def _norm(bound, grid):
    for name in ("out_ptr", "total_ptr", "x_ptr", "residual_ptr", "weight_ptr", "post_weight_ptr"):
        _dtype(bound, name, *FLOATS)
        _dense(bound, name)
    for name in ("out_ptr", "x_ptr"):
        _numel(bound, name, grid[0] * bound["HIDDEN_SIZE"])
    for name in ("weight_ptr", "post_weight_ptr"):
        _numel(bound, name, bound["HIDDEN_SIZE"])


def _rotary(bound, grid):
    assert bound["x_ptr"].stride(-1) == 1
    assert bound["cos_ptr"].stride(0) == bound["sin_ptr"].stride(0) == bound["stride_angles"]
    assert bound["cos_ptr"].stride(-1) == bound["sin_ptr"].stride(-1) == 1
    _numel(bound, "out_ptr", grid[0] * bound["NUM_HEADS"] * bound["HEAD_DIM"])
    _numel(bound, "cos_ptr", (grid[0] - 1) * bound["stride_angles"] + bound["NUM_PAIRS"])


def _rotary_write(bound, grid):
    for name in ("position_ptr", "slot_ptr"):
        _dtype(bound, name, torch.int32)
        _numel(bound, name, grid[0])
    _dense(bound, "query_ptr", "qkv_ptr", "table_ptr", "cache_ptr")
    heads, kv_heads, head_dim = bound["NUM_HEADS"], bound["NUM_KV_HEADS"], bound["HEAD_DIM"]
    assert bound["qkv_ptr"].shape == (grid[0], heads + 2 * kv_heads, head_dim)
    assert heads == kv_heads or not bound["IS_BY_HEAD"]
    assert bound["query_ptr"].shape == (grid[0], heads, head_dim)
    assert bound["table_ptr"].shape == (bound["last_position"] + 1, 2 * bound["NUM_PAIRS"])
    assert bound["table_ptr"].dtype == bound["qkv_ptr"].dtype
    assert bound["cache_ptr"].shape[3:] == (kv_heads, head_dim)
    assert bound["cache_ptr"].dtype == (torch.uint8 if bound["IS_FP8"] else bound["qkv_ptr"].dtype)
    assert grid[1] * bound["HEADS"] >= heads + 2 * kv_heads
    assert head_dim <= 2 * bound["NUM_PAIRS"] + bound["BLOCK_REST"]
    if bound["HAS_NORM"]:
        for name in ("query_weight_ptr", "key_weight_ptr"):
            assert bound[name].shape == (head_dim,)


def _kv_write(bound, grid):
    _dtype(bound, "slot_ptr", torch.int32)
    _numel(bound, "slot_ptr", grid[0])
    _dense(bound, "cache_ptr")
    for name in ("key", "value"):
        assert bound[f"{name}_ptr"].stride(-1) == 1
        last = (grid[0] - 1) * bound[f"{name}_stride_token"] + bound["HEAD_DIM"]
        _numel(bound, f"{name}_ptr", last)
    assert grid[1] * bound["BLOCK"] >= bound["ROW_SIZE"]
    assert bound["cache_ptr"].dtype == (torch.uint8 if bound["IS_FP8"] else bound["key_ptr"].dtype)


def _attention(bound, grid):
    for name in ("table_ptr", "request_ptr", "first_token_ptr", "query_start_ptr", "seq_len_ptr", "table_row_ptr"):
        _dtype(bound, name, torch.int32)
    for name in ("request_ptr", "first_token_ptr"):
        _numel(bound, name, grid[0])
    _numel(bound, "query_start_ptr", bound["seq_len_ptr"].shape[0] + 1)
    _numel(bound, "table_row_ptr", bound["seq_len_ptr"].shape[0])
    _dense(bound, "out_ptr", "cache_ptr")
    assert bound["table_ptr"].stride(-1) == 1
    assert bound["table_ptr"].stride(0) == bound["table_stride"]
    assert bound["query_ptr"].stride()[:2] == (bound["query_stride_token"], bound["query_stride_head"])
    assert bound["query_ptr"].dtype == bound["out_ptr"].dtype
    assert grid[1] == bound["NUM_KV_HEADS"]
    assert grid[2] == bound["num_splits"]
    assert bound["HEAD_DIM_PADDED"] >= max(16, bound["HEAD_DIM"])
    assert bound["TILE_ROWS"] >= bound["TILE_TOKENS"] * bound["GROUP_SIZE"]
    if bound["num_splits"] > 1:
        parts = grid[0] * bound["TILE_TOKENS"] * bound["NUM_KV_HEADS"] * bound["GROUP_SIZE"] * bound["num_splits"]
        _numel(bound, "partial_out_ptr", parts * bound["HEAD_DIM"])
        _numel(bound, "partial_max_ptr", parts)
        _numel(bound, "partial_sum_ptr", parts)
        assert bound["MAY_SPLIT"]
        _dtype(bound, "counter_ptr", torch.int32)
        _numel(bound, "counter_ptr", grid[0] * grid[1])


def _list_tiles(bound, grid):
    for name in ("request_ptr", "first_token_ptr", "query_start_ptr"):
        _dtype(bound, name, torch.int32)
        _dense(bound, name)
    for name in ("request_ptr", "first_token_ptr"):
        _numel(bound, name, bound["length"])
    _numel(bound, "query_start_ptr", bound["num_requests"] + 1)
    assert grid[0] * bound["BLOCK"] >= bound["length"]
    assert 2 ** bound["num_halvings"] >= bound["num_requests"]


def _gated(bound, grid):
    _dense(bound, "out_ptr")
    assert bound["x_ptr"].shape == (grid[0], 2 * bound["SIZE"])
    _numel(bound, "out_ptr", grid[0] * bound["SIZE"])
    assert grid[1] * bound["BLOCK"] >= bound["SIZE"]


def _penalties(bound, grid):
    _dtype(bound, "logits_ptr", torch.float32)
    _dtype(bound, "row_ptr", torch.int64)
    _dtype(bound, "count_ptr", torch.int32)
    _dtype(bound, "prompt_ptr", torch.bool)
    _dense(bound, "logits_ptr", "count_ptr", "prompt_ptr")
    for name in ("row_ptr", "presence_ptr", "frequency_ptr", "repetition_ptr"):
        _numel(bound, name, grid[0])
    assert grid[1] * bound["BLOCK"] >= bound["vocab_size"]


def _per_row(*names):
    def check(bound, grid):
        _dense(bound, "logits_ptr")
        _dtype(bound, "logits_ptr", torch.float32)
        _numel(bound, "logits_ptr", grid[0] * bound["vocab_size"])
        for name in names:
            _numel(bound, name, grid[0])

    return check


def _adapters(bound, grid):
    _dtype(bound, "ranks_ptr", torch.float32)
    _dtype(bound, "rows_ptr", torch.int32)
    _dtype(bound, "tile_ptr", torch.int32)
    _dtype(bound, "table_ptr", torch.int64)
    _dense(bound, "ranks_ptr", "rows_ptr", "tile_ptr")
    assert bound["tile_ptr"].shape == (grid[0], 3)
    assert bound["table_ptr"].stride() == (bound["table_stride"], 1)
    splits, rows, ranks = bound["ranks_ptr"].shape
    assert bound["rows_ptr"].shape == (rows,)
    assert (bound["split_stride"], bound["ranks_stride"]) == (rows * ranks, ranks)
    return splits, ranks


def _shrink(bound, grid):
    splits, ranks = _adapters(bound, grid)
    assert bound["x_ptr"].stride() == (bound["x_stride"], 1)
    assert bound["x_ptr"].shape[1] == bound["in_features"] <= splits * bound["SPLIT_FEATURES"]
    assert bound["SPLIT_FEATURES"] % bound["TILE_FEATURES"] == 0
    assert grid[1:] == (ranks // bound["TILE_RANKS"], splits)


def _expand(bound, grid):
    splits, _ = _adapters(bound, grid)
    assert bound["num_splits"] == splits
    assert bound["out_ptr"].stride() == (bound["out_stride"], 1)
    assert bound["bias_ptr"].dtype == bound["out_ptr"].dtype
    assert bound["HAS_BIAS"] == (bound["bias_ptr"].dim() == 1)
    assert bound["table_ptr"].shape[1] == bound["FIRST_PART"] + grid[2] * bound["PART_COLUMNS"]


def _quantized_weight(bound):
    outputs, inputs, group = bound["out_features"], bound["in_features"], bound["group_size"]
    groups, tile = -(-inputs // group), bound["TILE_FEATURES"]
    _dense(bound, "number_ptr", "scale_ptr", "offset_ptr")
    is_few = bound["BITS"] == 4
    width = -(-inputs // 64) * 32 if is_few else inputs
    _dtype(bound, "number_ptr", torch.uint8 if is_few else torch.int8)
    assert bound["number_ptr"].shape == (outputs, width)
    assert bound["number_stride"] == width
    assert tile % (64 if is_few else 32) == 0
    assert bound["scale_ptr"].shape == bound["offset_ptr"].shape == (groups, outputs)
    _dtype(bound, "offset_ptr", torch.uint8 if bound["ZEROS"] == "point" else bound["scale_ptr"].dtype)
    if bound["HAS_ONE_GROUP"]:
        together = 32 if is_few and tile == 64 else tile
        assert group >= inputs or group % together == 0


def _quantized(bound, grid):
    _quantized_weight(bound)
    rows, outputs, inputs = bound["num_rows"], bound["out_features"], bound["in_features"]
    _dtype(bound, "x_ptr", *FLOATS)
    _dense(bound, "x_ptr", "out_ptr", "residual_ptr")
    assert bound["x_ptr"].shape == (rows, inputs)
    assert grid[0] * bound["TILE_ROWS"] >= rows
    assert grid[1] * bound["TILE_COLUMNS"] >= outputs
    assert grid[2] * bound["split_features"] >= inputs > (grid[2] - 1) * bound["split_features"]
    assert bound["split_features"] % bound["TILE_FEATURES"] == 0
    assert bound["IS_SPLIT"] == (grid[2] > 1)
    assert bound["out_ptr"].shape == ((grid[2], rows, outputs) if grid[2] > 1 else (rows, outputs))
    assert bound["out_ptr"].dtype == (torch.float32 if grid[2] > 1 else bound["x_ptr"].dtype)
    _added(bound, rows, outputs)


def _added(bound, rows, outputs):
    """A bias and a residual."""
    if bound["HAS_BIAS"]:
        assert bound["bias_ptr"].shape == (outputs,)
        _dtype(bound, "bias_ptr", *FLOATS)
    if bound["HAS_RESIDUAL"]:
        assert bound["residual_ptr"].shape == (rows, outputs)
        _dense(bound, "residual_ptr")


def _sums(bound, grid):
    rows, outputs = bound["num_rows"], bound["out_features"]
    _dtype(bound, "sum_ptr", torch.float32)
    _dense(bound, "sum_ptr", "out_ptr")
    assert bound["sum_ptr"].shape == (bound["num_splits"], rows, outputs)
    assert bound["out_ptr"].shape == (rows, outputs)
    assert grid[0] == rows
    assert grid[1] * bound["BLOCK"] >= outputs
    _added(bound, rows, outputs)


def _unpack(bound, grid):
    _quantized_weight(bound)
    _dense(bound, "out_ptr")
    _dtype(bound, "out_ptr", *FLOATS)
    assert bound["out_ptr"].shape == (bound["num_rows"], bound["in_features"])
    assert bound["first_row"] + bound["num_rows"] <= bound["out_features"]
    assert grid[0] * bound["TILE_COLUMNS"] >= bound["num_rows"]
    assert grid[1] * bound["TILE_FEATURES"] >= bound["in_features"]


def _known_ids(bound, grid):
    for name in ("out_ptr", "id_ptr", "row_ptr", "last_ptr"):
        _dtype(bound, name, torch.int32)
        _dense(bound, name)
    for name in ("out_ptr", "id_ptr", "row_ptr"):
        _numel(bound, name, bound["num_ids"])
    assert grid[0] * bound["BLOCK"] >= bound["num_ids"]


def _verify(bound, grid):
    names = ["out_ptr", "last_ptr", "sampled_ptr", "id_ptr", "start_ptr", "which_ptr", "row_ptr"]
    for name in names:
        _dtype(bound, name, torch.int32)
        assert bound[name].stride(-1) == 1
    num_reqs, width = bound["num_reqs"], bound["width"]
    _numel(bound, "start_ptr", num_reqs + 1)
    _numel(bound, "out_ptr", num_reqs * width)
    assert bound["id_ptr"].shape[0] <= bound["sampled_ptr"].shape[0]
    assert grid[0] * bound["REQUESTS"] >= num_reqs
    assert bound["COLUMNS"] >= width
    if bound["HAS_SETS"]:
        assert bound["out_ptr"].stride(0) == bound["out_stride"] >= num_reqs * width
    _numel(bound, "row_ptr" if bound["HAS_ROWS"] else "last_ptr", num_reqs)


def _draw(bound, grid):
    rows, parts = grid[:2]
    _dense(bound, "logits_ptr")
    _dtype(bound, "logits_ptr", *FLOATS)
    _numel(bound, "logits_ptr", rows * bound["vocab_size"])
    assert parts == bound["num_parts"]
    assert parts * bound["PART"] >= bound["vocab_size"]
    assert bound["PARTS"] >= parts
    assert bound["PART"] % bound["BLOCK"] == 0
    for name, dtype in (("max_ptr", torch.float64), ("sum_ptr", torch.float64), ("id_ptr", torch.int32)):
        _dtype(bound, name, dtype)
        _numel(bound, name, rows * parts)
    _dtype(bound, "counter_ptr", torch.int32)
    _numel(bound, "counter_ptr", rows)
    of_rows = {"greedy": (), "drawn": (("seed_ptr", torch.int64), ("position_ptr", torch.int64))}.get(bound["KIND"])
    if of_rows is None:
        of_rows = [(name, torch.int32) for name in ("seed_low_ptr", "seed_high_ptr", "static_position_ptr", "row_ptr")]
        of_rows += [("temperature_ptr", torch.float32)]
        _dtype(bound, "which_ptr", torch.int32)
        assert bound["out_ptr"].stride(0) == bound["out_stride"] >= rows
    _dtype(bound, "out_ptr", torch.int32 if bound["KIND"] == "each" else torch.int64)
    for name, dtype in of_rows:
        _dtype(bound, name, dtype)
        _numel(bound, name, rows)
        assert bound[name].stride(-1) == 1
    if bound["HAS_LAST"]:
        _dtype(bound, "last_ptr", torch.int32)


LAUNCH_CHECKS = {
    "_norm_kernel": _norm,
    "_rotary_kernel": _rotary,
    "_kv_write_kernel": _kv_write,
    "_attention_kernel": _attention,
    "_list_kernel": _list_tiles,
    "_rotary_write_kernel": _rotary_write,
    "_bend_kernel": _gated,
    "_shrink_kernel": _shrink,
    "_expand_kernel": _expand,
    "_quantized_kernel": _quantized,
    "_sum_kernel": _sums,
    "_unpack_kernel": _unpack,
    "_penalties_kernel": _penalties,
    "_draw_kernel": _draw,
    "_verify_kernel": _verify,
    "_known_ids_kernel": _known_ids,
    "_truncate_kernel": _per_row("top_k_ptr", "top_p_ptr"),
    "_top_n_sigma_kernel": _per_row("top_n_sigma_ptr"),
}
"""By the kernel's name: looks at its arguments by name, and at its grid."""
