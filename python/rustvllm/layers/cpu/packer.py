"""Gives every dense layer of a model on the CPU its kernel, one layer at a time, and logs the memory that this takes.

While a model is loaded, each layer is packed for the core as soon as its last number has arrived, and its weight is
freed, so no weight exists twice. When all have arrived, the contenders are measured for each shape of layer
(``trials``, ``choice``), and layers that another kernel computes faster are packed again for that kernel. An embedding
that is also the head is looked up in the head's packed weight if that has the stored numbers; otherwise the embedding
stays, in addition to the head's copy. In a float32 model, weights that are stored in 16 bits keep their 16 bits.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rustvllm import _core
from rustvllm.layers.cpu.choice import PLAIN, Choice
from rustvllm.layers.cpu.embedding import NarrowEmbedding, PackedEmbedding
from rustvllm.layers.cpu.linear import CORE_DTYPES, CoreLinear, LinearByRows, WeightKind
from rustvllm.layers.cpu.log import log_narrow_products, log_rounding
from rustvllm.layers.cpu.narrow import NARROW_KINDS, NarrowLayers
from rustvllm.layers.cpu.options import LinearOptions, make_kernel
from rustvllm.layers.cpu.trials import LinearTrials, Shape
from rustvllm.layers.cpu.whole import WholeLayers
from rustvllm.layers.linear import Embedding, Linear, LinearKernel, empty_parameter_like
from rustvllm.layers.parallel import RowLinear
from rustvllm.layers.whole_rows import LayerRows, TableRows, WholeForm, storage_of
from rustvllm.logger import init_logger

logger = init_logger(__name__)

NOT_WORTH_PACKING = 1 << 16
"""torch computes weights with fewer numbers, because a call costs more than the product."""
NOT_WORTH_MEASURING = 1 << 19
"""The core computes other weights with fewer numbers, because they stay in the caches and there is little to gain."""


class LinearPacker:
    """See the module.

    Args:
        threads: The threads for the core's products.
        options: What the flags and the environment ask for.
        outline: The model, which may have no memory yet (on the meta device).
        embedding: Its embedding, if that is also the head.
        room: Bytes for copies in addition to the weights from which they were made.
    """

    leaves_weights_out = False

    def __init__(
        self,
        threads: _core.CpuThreads,
        options: LinearOptions,
        outline: nn.Module,
        embedding: Tensor | None,
        room: int,
    ) -> None:
        self._threads = threads
        self._options = options
        linears = [module for module in outline.modules() if isinstance(module, Linear)]
        weights = [linear.weight for linear in linears if not linear.keeps_numbers]
        self._count = Counter(_shape(weight) for weight in weights if weight is not embedding)
        self._plain_bytes = sum(weight.nbytes for weight in weights if weight is not embedding)
        self._head_bytes = 0 if embedding is None else embedding.nbytes
        self._room = room
        self._saved_bytes = self._saved_table_bytes = 0
        self._narrow: dict[int, torch.dtype] = {}  # storages of weights in float32 whose numbers all have 16 bits
        self._missing: dict[int, tuple[Linear, list[int]]] = {}
        self._to_measure: dict[Shape, list[Linear]] = {}
        self._to_tune: dict[tuple[Shape, int | None, str], list[Linear]] = {}  # with group and kind
        self._whole: WholeLayers | None = None
        self._as_stored: NarrowLayers | None = None
        self._packed: list[tuple[str, int, int]] = []  # kernels, bytes of copies, bytes of second copies

    def resident_bytes(self, plain_bytes: int) -> int:
        """The least memory that a model takes once it is packed.

        Args:
            plain_bytes: The memory that it takes unpacked.
        """
        plain_bytes -= self._saved_table_bytes
        form = self._options.form
        if form is None:
            return plain_bytes - self._saved_bytes
        packed = sum(count * form.num_bytes(*shape) for shape, count in self._count.items())
        return plain_bytes - self._plain_bytes + packed

    def plan(
        self,
        model: nn.Module,
        embedding: Tensor | None,
        forms: Sequence[tuple[Tensor, WholeForm | None]],
        narrow: Sequence[tuple[Tensor, torch.dtype]] = (),
    ) -> None:
        """Choose the layers that keep their stored numbers; call this again for every model.

        Args:
            model: With or without memory.
            embedding: See the constructor.
            forms: Every stored tensor of the model, with the form of its scales if its numbers are integers.
            narrow: The stored tensors of 16 bits, with their types.
        """
        self._whole, self._as_stored, self._narrow = None, None, {}
        self._saved_bytes = self._saved_table_bytes = 0
        if self._options.kernel not in (None, "core") or _model_dtype(model) not in CORE_DTYPES:
            return
        rounds = self._options.round_activations
        whole = WholeLayers(self._threads, model, embedding, forms, round_activations=rounds)
        self._whole = whole if len(whole) else None
        if _model_dtype(model) == torch.float32:
            parts = Counter(storage_of(tensor) for tensor, _ in forms)
            found = Counter((storage_of(tensor), dtype) for tensor, dtype in narrow)
            self._narrow = {storage: dtype for (storage, dtype), count in found.items() if count == parts[storage]}
        modules = [module for module in model.modules() if isinstance(module, Linear | Embedding)]
        linears = [module for module in modules if isinstance(module, Linear) and module.weight is not embedding]
        looked_up = [module.weight for module in modules if isinstance(module, Embedding)]
        tables = [
            table for table in looked_up if table is not embedding and self._narrow.get(storage_of(table)) is not None
        ]
        kept = [linear.weight for linear in linears if self._kept_kind(linear.weight, linear) is not None]
        types = [(weight, self._narrow[storage_of(weight)]) for weight in (*kept, *tables)]
        self._as_stored = NarrowLayers(self._threads, types, tables, [tensor for tensor, _ in forms])
        for module in modules:
            if isinstance(module, Embedding) and (table := whole.form_of(module.weight)) is not None:
                self._saved_table_bytes += module.weight.nbytes - table.num_bytes(*_shape(module.weight))
            elif isinstance(module, Embedding) and storage_of(module.weight) in self._narrow:
                self._saved_table_bytes += module.weight.nbytes // 2
            if not isinstance(module, Linear) or module.weight is embedding:
                continue
            form = whole.form_of(module.weight)
            if form is not None:
                self._saved_bytes += module.weight.nbytes - form.num_bytes(*_shape(module.weight))
            elif self._kept_kind(module.weight, module) is not None:
                self._saved_bytes += module.weight.nbytes // 2

    def _kept_kind(self, weight: Tensor, linear: Linear | None = None) -> WeightKind | None:
        """The 16-bit format in which a float32 model's weight is packed without loss, because it was stored so."""
        dtype = self._narrow.get(storage_of(weight))
        is_grouped = linear is not None and linear.is_grouped
        is_small = weight.numel() < NOT_WORTH_PACKING and not is_grouped
        if dtype is None or self._options.kind is not None or is_small:
            return None
        return NARROW_KINDS[dtype]

    @property
    def packs_rows(self) -> bool:
        """Whether the loader must pass some layers as they are stored."""
        return self._whole is not None or bool(self._as_stored)

    @property
    def num_whole_layers(self) -> int:
        """How many layers were passed as integers, including the head."""
        return 0 if self._whole is None else len(self._whole)

    @property
    def described_whole_layers(self) -> str:
        """The bits and groups in which they are kept."""
        return "none" if self._whole is None else self._whole.described()

    def block_packer_of(self, target: Tensor) -> NarrowLayers | WholeLayers | None:
        """What takes a tensor's rows as they are stored; None: its values are wanted."""
        if self._as_stored is not None and self._as_stored.takes(target):
            return self._as_stored
        return self.whole_packer_of(target)

    def whole_packer_of(self, target: Tensor) -> WholeLayers | None:
        """What takes a quantised tensor as integers and scales; None: its values are wanted."""
        return self._whole if self._whole is not None and self._whole.form_of(target) is not None else None

    def pack_files(self, layers: list[LayerRows], tables: list[TableRows]) -> tuple[int, Exception] | None:
        """See ``_core.pack_files``."""
        arrays = [(table.numpy(), rows) for table, rows in tables]
        return _core.pack_files(self._threads, layers, arrays)

    def make_room(self, model: nn.Module) -> None:
        """See ``LayerPacker.make_room``; pages take no memory until they are written to."""
        for module in model.modules():
            for name, shape in list(module.named_parameters(recurse=False)):
                if not shape.is_meta or self.block_packer_of(shape) is not None:
                    continue
                narrow = self._narrow.pop(storage_of(shape), None)
                parameter = empty_parameter_like(shape, "cpu")
                setattr(module, name, parameter)
                if narrow is not None:
                    self._narrow[storage_of(parameter)] = narrow

    def watch(self, model: nn.Module, embedding: Tensor | None) -> None:
        """Register what must be filled before each layer can be packed; ``filled`` then packs it.

        Args:
            model: With memory, except for layers that keep their stored numbers.
            embedding: See the constructor.
        """
        for linear in model.modules():
            if isinstance(linear, Linear) and linear.weight is not embedding:
                tensors = [linear.weight, *([] if linear.bias is None else [linear.bias])]
                entry = (linear, [sum(tensor.numel() for tensor in tensors)])
                self._missing |= {storage_of(tensor): entry for tensor in tensors}

    def filled(self, target: Tensor) -> None:
        """Note that a parameter, or a part of one, has its values; packs the layer if it is now complete."""
        linear, left = self._missing.get(storage_of(target), (None, [0]))
        if linear is None:
            return
        left[0] -= target.numel()
        if left[0] == 0:
            for tensor in (linear.weight, linear.bias):
                if tensor is not None:
                    self._missing.pop(storage_of(tensor), None)
            self._pack(linear)

    def finish(self, model: nn.Module, embedding: Tensor | None) -> LinearKernel | None:
        """Pack the remaining layers, measure, and log the memory of everything.

        Args:
            model: Filled.
            embedding: See the constructor; None if the checkpoint turned out to have a separate head.

        Returns:
            The kernel of a head that is the embedding and not a separate layer.
        """
        self._missing.clear()
        modules = [module for module in model.modules() if isinstance(module, Linear | Embedding)]
        linears = [module for module in modules if isinstance(module, Linear)]
        heads = [linear for linear in linears if linear.weight is embedding]
        for linear in linears:
            if linear.weight is not embedding and linear.kernel is None:
                self._pack(linear)
        begin = time.perf_counter()
        measured = [linear for alike in (*self._to_measure.values(), *self._to_tune.values()) for linear in alike]
        num_choices = sum(map(_is_measured, self._count)) + (self._head_bytes > 0)
        trials = LinearTrials(self._threads, self._options, measured, num_choices)
        for (_, group, _), alike in self._to_tune.items():
            _tune(alike, group, trials)
        for shape, alike in self._to_measure.items():
            self._choose(shape, alike, trials)
        self._to_measure.clear()
        self._to_tune.clear()
        head, has_stored_numbers = (None, False) if embedding is None else self._make_head(embedding, trials)
        for linear in heads:
            linear.kernel = head
        for module in modules:
            if isinstance(module, Embedding):
                packed = head if has_stored_numbers and module.weight is embedding else None
                self._shrink(module, packed)
        self._log_summary(time.perf_counter() - begin)
        kernels = [linear.kernel for linear in linears]
        kernels += [] if heads else [head]
        if self._options.round_activations:
            log_rounding(kernels)
        if _model_dtype(model) == torch.bfloat16:
            log_narrow_products(kernels)
        return None if heads else head

    def _pack(self, linear: Linear) -> None:
        weight, name = linear.weight, self._options.kernel
        if self._whole is not None and (whole := self._whole.take(weight, linear.bias)) is not None:
            self._packed.append(("core", whole.nbytes, 0))
            linear.kernel = whole
            if _is_measured(_shape(weight)):
                key = (_shape(weight), self._group_of(weight), whole.packed.kind)
                self._to_tune.setdefault(key, []).append(linear)
            linear.release_weight()
            return
        if (kind := self._kept_kind(weight, linear)) is not None:
            kernel = None if self._as_stored is None else self._as_stored.take(weight, linear.bias)
            linear.kernel = kernel = kernel or CoreLinear(self._threads, weight, linear.bias, kind)
            self._packed.append(("core", kernel.nbytes, 0))
            if _is_measured(_shape(weight)):
                self._to_tune.setdefault((_shape(weight), None, kind), []).append(linear)
            linear.release_weight()
            return
        if linear.keeps_numbers and name in (None, "core") and weight.dtype in CORE_DTYPES:
            stored = self._narrow.get(storage_of(weight))
            kind = None if stored is None else NARROW_KINDS[stored]
            linear.kernel = kernel = CoreLinear(self._threads, weight, linear.bias, kind)
            self._packed.append(("core", kernel.nbytes, 0))
            linear.release_weight()
            return
        if name is None and weight.dtype in CORE_DTYPES and linear.is_grouped:
            name = "core"
        if name is None and weight.dtype in CORE_DTYPES and weight.numel() >= NOT_WORTH_PACKING:
            # A measurement next to other work may be wrong, and only layers of the core can run in the single call.
            is_best = CoreLinear.is_as_fast_as_the_processor(weight.dtype)
            name = "core" if is_best or weight.numel() < NOT_WORTH_MEASURING else None
        if name is None and weight.dtype in CORE_DTYPES and _is_measured(_shape(weight)):
            name = "core"
            self._to_measure.setdefault(_shape(weight), []).append(linear)
            linear.kernel = make_kernel(name, self._threads, self._options, weight, linear.bias)
        else:
            linear.kernel = self._with_common_scales(linear)
            if linear.kernel is None:
                linear.kernel = self._kernel(Choice.always(name or PLAIN), weight, linear.bias, has_plain=False)
            if name == "core" and _is_measured(_shape(weight)):
                packed_as = "" if not isinstance(linear.kernel, CoreLinear) else linear.kernel.packed.kind
                self._to_tune.setdefault((_shape(weight), None, packed_as), []).append(linear)
        if name not in (None, PLAIN):
            linear.release_weight()

    def _with_common_scales(self, linear: Linear) -> LinearKernel | None:
        """A kernel with the scales of whole rows, if ranks share rows that have one scale each.

        With a scale for only its own inputs, a rank would round to other numbers than a single process does.
        """
        kind = self._options.packed_kind
        if kind not in ("int8", "w8a8") or self._options.group_size is not None or linear.weight.shape[1] == 0:
            return None
        if not isinstance(linear, RowLinear) or linear.group.size == 1:
            return None
        numbers, scales = linear.whole_numbers()
        packed = _core.PackedLinear(self._threads, *_shape(linear.weight), kind)
        packed.pack_whole(0, numbers.numpy(), scales.numpy())
        kernel = CoreLinear.of_packed(packed, linear.bias)
        self._packed.append(("core", kernel.nbytes, 0))
        return kernel

    def _group_of(self, weight: Tensor) -> int | None:
        form = None if self._whole is None else self._whole.form_of(weight)
        return None if form is None else form.group_size

    def _choose(self, shape: Shape, linears: list[Linear], trials: LinearTrials) -> None:
        """Measure the contenders for layers of a shape, and pack them again if the core is not the best."""
        dtype, each = linears[0].weight.dtype, linears[0].weight.nbytes * len(linears)
        room = self._room - self._head_bytes  # the copy of a tied head comes before second copies of layers
        piece = trials.piece_of(_core_kernel(linears[0]), dtype).to(dtype)
        choice = trials.choose(piece, shape, has_plain=False, room_for=room // each)
        self._room -= (len(choice.layouts) - 1) * each
        for linear in linears:
            if choice.layouts == ("core",):
                kernel = _core_kernel(linear)
                kernel.use_matrix_unit(choice.matrix_rows)
                self._packed.append(("core", kernel.nbytes, 0))
                continue
            weight = _core_kernel(linear).unpack(shape[0]).to(dtype)
            linear.kernel = None  # frees its memory before more is allocated
            linear.kernel = self._kernel(choice, weight, linear.bias, has_plain=False)
            if PLAIN in choice.layouts:
                linear.weight = nn.Parameter(weight, requires_grad=False)

    def _shrink(self, table: Embedding, packed: LinearKernel | None) -> None:
        """Keep an embedding in its stored form, or free it if a packed copy has its numbers."""
        dtype = table.weight.dtype
        if isinstance(packed, CoreLinear):
            table.kernel = PackedEmbedding(packed, dtype)
        elif self._whole is not None and (kept := self._whole.take_table(table.weight)) is not None:
            table.kernel = kept
        elif self._as_stored is not None and (narrow := self._as_stored.take_table(table.weight)) is not None:
            table.kernel = narrow
        elif (stored := self._narrow.get(storage_of(table.weight))) is not None:
            table.kernel = NarrowEmbedding(table.weight.to(stored), dtype)
        else:
            return
        table.release_weight()

    def _measures_head(self, embedding: Tensor) -> bool:
        """Whether contenders are measured for a head that is also the embedding."""
        is_kept = self._kept_kind(embedding) is not None or (
            self._whole is not None and self._whole.form_of(embedding) is not None
        )
        is_open = self._options.kernel is None and embedding.dtype in CORE_DTYPES
        return is_open and not is_kept and _is_measured(_shape(embedding))

    def _make_head(self, embedding: Tensor, trials: LinearTrials) -> tuple[LinearKernel, bool]:
        """The kernel of a head that is also the embedding, and whether it keeps the stored numbers."""
        if self._whole is not None and (whole := self._whole.take(embedding, None)) is not None:
            self._packed.append(("core", whole.nbytes, 0))
            if _is_measured(_shape(embedding)):
                whole.use_matrix_unit(trials.matrix_rows_of(whole, embedding.dtype, self._group_of(embedding)))
            return whole, True
        if (kind := self._kept_kind(embedding)) is not None:
            kernel = CoreLinear(self._threads, embedding, None, kind)
            self._packed.append(("core", kernel.nbytes, 0))
            if _is_measured(_shape(embedding)):
                kernel.use_matrix_unit(trials.matrix_rows_of(kernel, embedding.dtype, None))
            return kernel, True
        shape, choice = _shape(embedding), Choice.always(self._options.kernel or PLAIN)
        if self._measures_head(embedding):
            piece = embedding[: trials.num_sampled(shape, embedding.dtype)]
            choice = trials.choose(piece, shape, has_plain=True, room_for=self._room // embedding.nbytes)
        head = self._kernel(choice, embedding, None, has_plain=True)
        if self._options.kernel == "core" and isinstance(head, CoreLinear) and _is_measured(shape):
            head.use_matrix_unit(trials.matrix_rows_as_asked(head, embedding.dtype))
        return head, False

    def _kernel(self, choice: Choice, weight: Tensor, bias: Tensor | None, *, has_plain: bool) -> LinearKernel:
        made = {name: make_kernel(name, self._threads, self._options, weight, bias) for name in choice.layouts}
        if isinstance(core := made.get("core"), CoreLinear):
            core.use_matrix_unit(choice.matrix_rows)
        copies = [kernel.nbytes for kernel in made.values() if kernel.nbytes]
        second = copies if has_plain or PLAIN in made else copies[1:]
        self._packed.append((" and ".join(made), sum(copies), sum(second)))
        if len(made) == 1:
            return made[choice.names[0]]
        return LinearByRows([made[name] for name in choice.names])

    def _log_summary(self, seconds: float) -> None:
        by_whom = Counter(names for names, _, _ in self._packed)
        logger.info(
            "dense layers: %s; packed copies %.1f MiB, %.1f MiB of them second copies (chosen in %.2f s)",
            ", ".join(f"{count} by {names}" for names, count in by_whom.most_common()) or "none",
            sum(copies for _, copies, _ in self._packed) / 2**20,
            sum(second for _, _, second in self._packed) / 2**20,
            seconds,
        )


def _tune(linears: list[Linear], group: int | None, trials: LinearTrials) -> None:
    """Let layers of a shape that the core computes in any case use the matrix unit where that is faster."""
    matrix_rows = trials.matrix_rows_of(_core_kernel(linears[0]), linears[0].weight.dtype, group)
    for linear in linears:
        _core_kernel(linear).use_matrix_unit(matrix_rows)


def _core_kernel(linear: Linear) -> CoreLinear:
    assert isinstance(linear.kernel, CoreLinear)
    return linear.kernel


def _model_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's parameters."""
    return next(model.parameters()).dtype


def _shape(weight: Tensor) -> Shape:
    return weight.shape[0], weight.shape[1]


def _is_measured(shape: Shape) -> bool:
    return shape[0] * shape[1] >= NOT_WORTH_MEASURING
