"""Architectures without a file here, run by transformers' modelling code over our paged KV cache.

A step's tokens run as one sequence, ``[1, num_tokens]``, each with its own position and without transformers' cache.
Where a layer would compute attention, it calls our plan with the layer's paged cache. A trace on the meta device
(``trace``) finds out beforehand what a model needs; a model that mixes tokens in any other way is refused.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rustvllm.attention.backend import AttentionPlan
from rustvllm.attention.metadata import AttentionMetadata, KVCacheSpec
from rustvllm.attention.torch_backend import TorchAttentionBackend
from rustvllm.exceptions import ModelLoadError
from rustvllm.layers.linear import Linear
from rustvllm.models.fallback.code import find_model_code
from rustvllm.models.fallback.trace import (
    ATTENTION_NAME,
    LAYER_ATTRIBUTE,
    NUM_TRACED_TOKENS,
    LayerShape,
    PagedLayer,
    PagedStep,
    UnreachableAttentionError,
    register_attention,
    trace_attention,
)
from rustvllm.models.hf_config import HFConfig
from rustvllm.models.interface import CausalLM

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

_DERIVED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(.*\.)?h\.\d+\.attn\.(bias|masked_bias)")
_SELF_CHECK_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.5, torch.float16: 0.5}
"""How far a hidden state may move, relative to its length, when its token gets other neighbours. Rounding moves it by
less, even if it changes a router's choice of experts; a layer that reads a neighbour moves it by more."""


class TransformersForCausalLM(CausalLM):
    """A causal language model of transformers, or of a model's own trusted code.

    Args:
        hf_config: ``config.json``, including overrides.
        max_model_len: The most tokens of a sequence.
        architecture: Name of the model class.
        folder: The model's folder, which has its code.
        trust_remote_code: Whether that code may run.
    """

    has_parameters_alone = False  # transformers' code makes other tensors, too

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        max_model_len: int,
        *,
        architecture: str,
        folder: Path | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """See ``CausalLM.__init__``.

        Raises:
            ModelLoadError: The architecture cannot be found, or cannot run over a paged cache; the message says why.
        """
        super().__init__(hf_config, max_model_len)
        HFConfig(hf_config).refuse_unless("quantization_config", supported=None)
        self.architecture = architecture
        self._code = (hf_config, architecture, folder, trust_remote_code)
        register_attention()
        outline = self._build(torch.device("meta"))
        self.max_positions = _pin_rope(outline)
        self._refuse_other_state(outline)
        layers, self.vocab_size, self._output_type = self._trace(outline)
        head_dim = max(max(layer.key_dim, layer.value_dim) for layer in layers)
        self.kv_cache_spec = KVCacheSpec(len(layers), layers[0].num_kv_heads, head_dim)

        device = torch.get_default_device()
        self.model = outline if device.type == "meta" else self._build(device)
        _pin_rope(self.model)
        self._step = PagedStep()
        for index, layer in enumerate(layers):
            module = self.model.get_submodule(layer.module_name)
            setattr(module, LAYER_ATTRIBUTE, PagedLayer(self._step, index, layer, head_dim))
        self._decoder = _Decoder(_decoder_of(self.model))
        prefix = self.model.base_model_prefix
        self.prefixes = (f"{prefix}.",)
        self._conversions = _conversions(self.model)
        names = _tensor_names(self.model)
        self._tied = {alias: names[0] for names in names.values() for alias in names[1:]}
        embedding = self.model.get_input_embeddings()
        # Not through nn.Module's registration, because transformers has registered it elsewhere.
        self.__dict__["embed_tokens"] = embedding
        self.embed_tokens_name = self._without_prefix(names[id(embedding.weight)][0])
        self.lm_head = None
        self._expected = frozenset(self.checkpoint_tensors()) | self.tied_tensors().keys()

    def _build(self, device: torch.device) -> PreTrainedModel:
        """Build transformers' model on a device, with uninitialized parameters but filled buffers."""
        from transformers.initialization import no_init_weights

        hf_config, architecture, folder, trust = self._code
        config, model_class = find_model_code(hf_config, architecture, folder, trust_remote_code=trust)
        dtype = torch.get_default_dtype()
        try:
            with device, no_init_weights():
                # AutoModelForCausalLM.from_config of transformers calls this, too.
                make: Any = model_class._from_config  # noqa: SLF001
                model: PreTrainedModel = make(config, attn_implementation=ATTENTION_NAME, dtype=dtype)
        except Exception as error:  # modelling code may raise anything for unexpected values
            raise self._unreachable(
                f"transformers cannot build it from this config.json: {_one_line(error)}"
            ) from error
        model.tie_weights()
        model.requires_grad_(requires_grad=False)
        with device:
            _use_our_linears(model)
        model.train(mode=False)
        return model

    def _refuse_other_state(self, outline: PreTrainedModel) -> None:
        """Refuse models that visibly keep a state of earlier tokens other than keys and values."""
        if outline.config.is_encoder_decoder:
            raise self._unreachable("it is an encoder-decoder model, and rustvllm only serves decoders")
        if outline._is_stateful:  # noqa: SLF001 -- there is no public name
            raise self._unreachable("it keeps a recurrent state, which the paged KV cache cannot hold")
        for name, module in outline.named_modules():
            if isinstance(module, nn.Conv1d | nn.RNNBase):
                raise self._unreachable(f"{name} ({type(module).__name__}) mixes tokens outside attention")
        decoder = _decoder_of(outline)
        if decoder is outline:
            raise self._unreachable("its decoder cannot be separated from its head")
        if "position_ids" not in inspect.signature(type(decoder).forward).parameters:
            raise self._unreachable(
                "it does not accept position_ids, so it cannot tell the tokens of several sequences apart"
            )

    def _trace(self, outline: PreTrainedModel) -> tuple[list[LayerShape], int, type]:
        """All attention layers in order, the width of the logits, and the class of the decoder's result."""
        seen: list[Any] = []
        hook = _decoder_of(outline).register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        device = torch.device("meta")
        try:
            with trace_attention(outline) as trace, torch.inference_mode(), device:
                output = outline(
                    input_ids=torch.zeros((1, NUM_TRACED_TOKENS), dtype=torch.int64),
                    attention_mask=torch.ones((1, NUM_TRACED_TOKENS), dtype=torch.int64),
                    position_ids=torch.arange(NUM_TRACED_TOKENS)[None],
                    use_cache=False,
                )
        except UnreachableAttentionError as error:
            raise self._unreachable(str(error)) from error
        except Exception as error:  # the model's code may fail in ways of its own
            raise self._unreachable(f"a run without weights fails: {_one_line(error)}") from error
        finally:
            hook.remove()
        config = outline.config.get_text_config(decoder=True)
        if len(trace.layers) != config.num_hidden_layers:
            raise self._unreachable(
                f"{len(trace.layers)} of its {config.num_hidden_layers} layers use transformers' attention interface"
            )
        if len({layer.num_kv_heads for layer in trace.layers}) > 1:
            raise self._unreachable("its layers have different numbers of KV heads")
        if len(seen) != 1 or getattr(seen[0], "last_hidden_state", None) is None:
            raise self._unreachable("its decoder does not return one last_hidden_state")
        return trace.layers, int(output.logits.shape[-1]), type(seen[0])

    def _unreachable(self, why: str) -> ModelLoadError:
        return ModelLoadError(
            f"transformers' modelling code of {self.architecture} cannot run over the paged KV cache: {why}; use an "
            "architecture that rustvllm has, or one whose layers all use transformers' attention interface"
        )

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[Tensor], attention: AttentionPlan
    ) -> Tensor:
        """See ``CausalLM.forward``."""
        with self._attending(attention, kv_caches):
            output = self._decoder.module(
                input_ids=input_ids[None].long(), position_ids=positions[None].long(), use_cache=False
            )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    @contextmanager
    def _attending(self, plan: AttentionPlan, kv_caches: Sequence[Tensor]) -> Iterator[None]:
        self._step.plan, self._step.kv_caches = plan, kv_caches
        try:
            yield
        finally:
            self._step.plan, self._step.kv_caches = None, ()

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:  # noqa: ARG002 -- makes its own
        """Logits of some rows, including everything the architecture does between its decoder and its logits."""
        output = self._output_type(last_hidden_state=hidden[None])
        with self._decoder.returning(output):
            ids = torch.zeros((1, hidden.shape[0]), dtype=torch.int64, device=hidden.device)
            logits: Tensor = self.model(input_ids=ids, use_cache=False).logits[0]
        return logits

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """See ``CausalLM.checkpoint_tensors``: everything that transformers would save, except tied tensors."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if name not in self._tied:
                tensors |= self._conversions.stored(self._without_prefix(name), tensor)
        return tensors

    def tied_tensors(self) -> dict[str, str]:
        """See ``CausalLM.tied_tensors``."""
        return {self._without_prefix(alias): self._without_prefix(name) for alias, name in self._tied.items()}

    @property
    def tied_embedding(self) -> Tensor | None:
        """See ``CausalLM.tied_embedding``."""
        is_tied = self.embed_tokens_name in self.tied_tensors().values()
        return self.embed_tokens.weight if is_tied else None

    def untie(self, name: str) -> Tensor:
        """See ``CausalLM.untie``."""
        alias = next(alias for alias in self._tied if self._without_prefix(alias) == name)
        del self._tied[alias]
        module_name, _, parameter_name = alias.rpartition(".")
        module = self.model.get_submodule(module_name)
        parameter = nn.Parameter(torch.empty_like(getattr(module, parameter_name)), requires_grad=False)
        setattr(module, parameter_name, parameter)
        return parameter

    def checkpoint_name(self, name: str) -> str:
        """See ``CausalLM.checkpoint_name``: applies the renamings that transformers applies while loading."""
        return self._conversions.rename(name)

    def is_ignored(self, name: str) -> bool:
        """Whether the configuration determines this tensor (frequencies, masks), or transformers ignores it."""
        if name in self._expected:  # transformers' patterns are for unexpected tensors, and match more
            return False
        patterns = self.model._keys_to_ignore_on_load_unexpected or ()  # noqa: SLF001 -- as documented for model authors
        return _DERIVED.fullmatch(name) is not None or any(re.search(pattern, name) for pattern in patterns)

    def _without_prefix(self, name: str) -> str:
        return name.removeprefix(self.prefixes[0])

    @torch.inference_mode()
    def check_filled(self) -> None:
        """See ``CausalLM.check_filled``: a token's result must depend only on its own sequence.

        The check computes four tokens together; then three of them with another request in the batch; then the fourth
        with the cache of these three.

        Raises:
            ModelLoadError: The results differ: the model mixes tokens or counts positions in a way no trace shows.
        """
        weight = self.embed_tokens.weight
        device, dtype, block_size = weight.device, weight.dtype, 4
        spec = self.kv_cache_spec
        backend = TorchAttentionBackend(spec, dtype)
        shape = spec.layer_shape(4, block_size)
        caches = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]

        def run(rows: list[tuple[int, list[int], list[int]]]) -> Tensor:
            """Run rows of a block, its new positions and their tokens."""
            lens = [len(positions) for _, positions, _ in rows]
            flat = [(block, p, t) for block, positions, tokens in rows for p, t in zip(positions, tokens, strict=True)]
            metadata = AttentionMetadata(
                block_size,
                torch.tensor([[block] for block, _, _ in rows], dtype=torch.int32, device=device),
                torch.tensor([block * block_size + p for block, p, _ in flat], dtype=torch.int32, device=device),
                np.concatenate(([0], np.cumsum(lens))).astype(np.int32),
                np.array([positions[-1] + 1 for _, positions, _ in rows], np.int32),
            )
            ids = torch.tensor([t % self.vocab_size for _, _, t in flat], device=device)
            positions = torch.tensor([p for _, p, _ in flat], device=device)
            return self.forward(ids, positions, caches, backend.plan(metadata))

        tokens = [11, 23, 5, 17]
        together = run([(1, [0, 1, 2, 3], tokens)])
        mixed = run([(2, [0, 1], [7, 3]), (3, [0, 1, 2], tokens[:3])])
        alone = run([(3, [3], tokens[3:])])
        expected, actual = together.float(), torch.cat((mixed[2:], alone)).float()
        moved = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-12)
        if not bool((moved <= _SELF_CHECK_TOLERANCE[dtype]).all()):  # written so that a NaN fails, too
            raise self._unreachable(
                f"a token's result depends on its neighbours or on its prompt's chunks (by {float(moved.max()):.3g} of "
                "its length): something other than attention reads or counts other tokens"
            )


class _Decoder:
    """A model's decoder that can also return an earlier result, so that the head runs separately."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._given: Any = None
        forward = module.forward

        def dispatch(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs) if self._given is None else self._given

        module.forward = dispatch

    @contextmanager
    def returning(self, output: Any) -> Iterator[None]:
        """Make the decoder return ``output`` inside the block."""
        self._given = output
        try:
            yield
        finally:
            self._given = None


class _Conversions:
    """How a checkpoint's names and shapes differ from the model's, as declared by transformers.

    Args:
        renamings: Applied in order to a stored name.
        merges: For a part of a tensor's name, the names of the stored parts, with ``*`` for the expert.
    """

    def __init__(self, renamings: Sequence[Any], merges: Mapping[str, Sequence[str]]) -> None:
        self._renamings = renamings
        self._merges = merges

    def rename(self, name: str) -> str:
        """The model's name for a stored tensor."""
        for renaming in self._renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def stored(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The views of a tensor that a checkpoint stores separately, such as the experts of a stack."""
        for target, sources in self._merges.items():
            if target not in name:
                continue
            views = {}
            for expert, matrix in enumerate(tensor):
                for source, part in zip(sources, matrix.chunk(len(sources)), strict=True):
                    views[name.replace(target, source.replace("*", str(expert)))] = part
            return views
        return {name: tensor}


def _conversions(model: PreTrainedModel) -> _Conversions:
    """The conversions that transformers declares for a model's checkpoints.

    Raises:
        ModelLoadError: It declares unsupported operations.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    renamings: list[Any] = []
    merges: dict[str, list[str]] = {}
    for transform in get_model_conversion_mapping(model):
        if not isinstance(transform, WeightConverter):
            renamings.append(transform)
            continue
        kinds = [type(operation) for operation in transform.operations]
        dims = [getattr(operation, "dim", None) for operation in transform.operations]
        stacks = (kinds, dims) in (([MergeModulelist], [0]), ([MergeModulelist, Concatenate], [0, 1]))
        if not stacks or len(transform.target_patterns) != 1:
            names = ", ".join(kind.__name__ for kind in kinds)
            raise ModelLoadError(
                f"{type(model).__name__}: its checkpoints have another format than the model's parameters ({names} of "
                f"{', '.join(transform.source_patterns)}), which rustvllm cannot convert"
            )
        merges[transform.target_patterns[0]] = list(transform.source_patterns)
    return _Conversions(renamings, merges)


def _tensor_names(model: PreTrainedModel) -> dict[int, list[str]]:
    """All names of each tensor that a checkpoint contains; the embedding's own name comes first."""
    names: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    return names


def _use_our_linears(model: nn.Module) -> None:
    """Replace torch's plain linear layers by our own; names and tensors stay."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            with torch.device("meta"):
                linear = Linear(child.in_features, child.out_features, bias=child.bias is not None)
            for own in ("weight", "bias"):
                setattr(linear, own, getattr(child, own))
            setattr(parent, name, linear)


def _pin_rope(model: PreTrainedModel) -> int | None:
    """Make rotary frequencies independent of the longest sequence of a batch.

    Returns:
        The longest sequence for which the frequencies are still right; None if there is no limit.
    """
    longest = None
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        config = getattr(module, "config", None)
        if kinds is None or config is None:
            continue
        parameters = getattr(config, "rope_parameters", None) or {}
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            limit = None
            if "dynamic" in str(kind):
                limit = config.max_position_embeddings
            elif kind == "longrope":
                own = parameters if layer_type is None else parameters[layer_type]
                limit = own.get("original_max_position_embeddings") or config.max_position_embeddings
            if limit is not None:
                longest = limit if longest is None else min(longest, limit)
        if longest is not None:
            pinned: Any = dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"
            module.rope_type = pinned
    return longest


def _decoder_of(model: PreTrainedModel) -> nn.Module:
    """The part of a model below its head."""
    find: Any = model.get_decoder
    decoder: nn.Module = find()
    return decoder


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
