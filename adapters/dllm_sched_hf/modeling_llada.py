"""LLaDA in transformers' own style: one file, the published tensor names, two ways to run it.

``LLaDAModelLM.forward`` runs a plain ``[batch, length]`` tensor and is differentiable: training
and forward parity use it. ``LLaDAModelLM.forward_packed`` serves: the new tokens of all rows lie
behind each other on one axis for everything that works token by token (embedding, norms, linear
layers), and only attention goes row by row, over the row's own keys in a :class:`KVCache`. A long
prompt that joins a batch thus costs its own tokens and never pads its neighbours.

What a token may attend to is always explicit. There is no ``attention_mask``: LLaDA code in the
wild ignores it or turns it into something else, which makes padded batches silently wrong.

Source: Nie et al., "Large Language Diffusion Models" (arXiv 2502.09992) for the model; own code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from dllm_sched.errors import ConfigError
from dllm_sched_hf.loops import compiled

__all__ = [
    "AttentionGroup",
    "KVCache",
    "LLaDAConfig",
    "LLaDAModelLM",
    "PackedLayout",
    "block_causal_mask",
]

# Published options that this implementation has no code for, with the only value it accepts.
# A checkpoint that needs another one is refused rather than run wrongly.
_FIXED = {
    "activation_type": "silu",
    "alibi": False,
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "embedding_dropout": 0.0,
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "multi_query_attention": None,
    "residual_dropout": 0.0,
    "rope": True,
    "rope_full_precision": True,
    "scale_logits": False,
    "weight_tying": False,
}


_MAX_FLOAT32 = torch.finfo(torch.float32).max

# A product of so many multiplications for each thread is large.
_LARGE = 2**20
_ONEDNN: Any = (
    getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if torch.backends.mkldnn.is_available()
    else None
)


class LLaDAConfig(PreTrainedConfig):
    """The published LLaDA ``config.json``, key for key.

    Attributes:
        d_model: Width of the residual stream.
        n_layers: Number of transformer blocks.
        n_heads: Query heads; ``d_model`` is a multiple of it and the head width is even.
        n_kv_heads: Key/value heads, a divisor of ``n_heads``; None = ``n_heads``.
        mlp_hidden_size: Width of the feed-forward layer; None = ``mlp_ratio * d_model``.
        vocab_size: Number of token ids.
        embedding_size: Rows of the embedding and of the head, >= ``vocab_size``; None = equal.
        max_sequence_length: Longest sequence in tokens that the model was trained on.
        rope_theta: Base of the rotary frequencies.
        rms_norm_eps: Added to the mean square in every norm.
        mask_token_id: The id that stands for "not yet decoded".
        eos_token_id: End of text; another id than the mask.
        pad_token_id: Padding in training data, or None; serving never pads with it.
        init_std: Standard deviation of fresh weights.

    The other published keys are accepted with the one value that this code implements.

    Raises:
        ConfigError: If a value is one this code cannot run; names the key and the value it takes.
    """

    model_type = "llada"
    attribute_map = {  # noqa: RUF012 - transformers reads it as a plain class attribute
        "hidden_size": "d_model",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length",
    }

    def __init__(
        self,
        *,
        d_model: int = 4096,
        n_layers: int = 32,
        n_heads: int = 32,
        n_kv_heads: int | None = None,
        mlp_ratio: int = 4,
        mlp_hidden_size: int | None = None,
        vocab_size: int = 126464,
        embedding_size: int | None = None,
        max_sequence_length: int = 4096,
        rope_theta: float = 500_000.0,
        rms_norm_eps: float = 1e-5,
        mask_token_id: int = 126336,
        eos_token_id: int = 126081,
        pad_token_id: int | None = 126081,
        init_std: float = 0.02,
        **kwargs: Any,
    ) -> None:
        for key, value in _FIXED.items():
            if kwargs.setdefault(key, value) != value:
                raise ConfigError(
                    f"config.json: {key} is {kwargs[key]!r}, but this implementation has code for "
                    f"{value!r} only"
                )
        _check_int("d_model", d_model, 1)
        _check_int("mlp_ratio", mlp_ratio, 1)
        self.d_model = d_model
        self.n_layers = n_layers
        self.n_heads = n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.mlp_ratio = mlp_ratio
        self.mlp_hidden_size = mlp_ratio * d_model if mlp_hidden_size is None else mlp_hidden_size
        self.vocab_size = vocab_size
        self.embedding_size = vocab_size if embedding_size is None else embedding_size
        self.max_sequence_length = max_sequence_length
        self.rope_theta = rope_theta
        self.rms_norm_eps = rms_norm_eps
        self.mask_token_id = mask_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.init_std = init_std
        self._check()
        super().__init__(**kwargs)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.n_heads

    def _check(self) -> None:
        for key in (
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "mlp_hidden_size",
            "vocab_size",
            "embedding_size",
            "max_sequence_length",
        ):
            _check_int(key, getattr(self, key), 1)
        for key in ("rope_theta", "rms_norm_eps", "init_std"):
            value = getattr(self, key)
            if not _is_number(value) or not 0 < value <= _MAX_FLOAT32:
                raise ConfigError(f"config.json: {key} must be a number above 0, got {value!r:.80}")
        if self.d_model % self.n_heads or self.head_dim % 2:
            raise ConfigError(
                f"config.json: d_model {self.d_model} must be n_heads {self.n_heads} times an "
                "even head width"
            )
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                f"config.json: n_kv_heads {self.n_kv_heads} must divide n_heads {self.n_heads}"
            )
        if self.embedding_size < self.vocab_size:
            raise ConfigError(
                f"config.json: embedding_size {self.embedding_size} must be >= vocab_size "
                f"{self.vocab_size}"
            )
        self._check_special_ids()

    def _check_special_ids(self) -> None:
        for key in ("mask_token_id", "eos_token_id", "pad_token_id"):
            if key == "pad_token_id" and self.pad_token_id is None:
                continue
            _check_int(key, getattr(self, key), 0)
            if getattr(self, key) >= self.vocab_size:
                raise ConfigError(
                    f"config.json: {key} {getattr(self, key)} is not in the vocabulary of "
                    f"{self.vocab_size} ids"
                )
        if self.eos_token_id == self.mask_token_id:
            raise ConfigError(
                f"config.json: eos_token_id {self.eos_token_id} is the mask_token_id as well: no "
                "answer could ever end"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_int(key: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**31:
        raise ConfigError(
            f"config.json: {key} must be an int >= {low} (and below 2**31), got {value!r:.80}"
        )


def block_causal_mask(
    prompt_len: int, block_length: int, length: int, *, device: torch.device | str | None = None
) -> Tensor:
    """Return which positions see which: all of their own block and of the blocks before it.

    The prompt is block 0; block k covers ``block_length`` positions, counted from the prompt's end.

    Args:
        prompt_len: Tokens of the prompt, >= 0.
        block_length: Tokens of each later block, >= 1.
        length: Total number of positions.
        device: Where the mask is made.

    Returns:
        bool ``[length, length]``; ``[i, j]`` is True where position i attends to position j.

    Source: Wang et al., "Discrete Diffusion Forcing" (arXiv 2508.09192), block-causal attention.
    """
    position = torch.arange(length, device=device)
    block = (position - prompt_len).div(block_length, rounding_mode="floor") + 1
    block = block.clamp_(min=0)
    return block[None, :] <= block[:, None]


class KVCache(NamedTuple):
    """Keys and values of every slot, allocated once.

    Writes go to absolute positions, so what lies beyond a row's finished blocks is scratch that the
    row's next forward overwrites: there is nothing to roll back after a failed step.
    """

    layers: tuple[Tensor, ...]
    """Per layer ``[slots, max_len, 2 * n_kv_heads, head_dim]``: the rotated keys of a position and
    its values behind them, so that one write serves both."""

    @classmethod
    def allocate(
        cls,
        config: LLaDAConfig,
        num_slots: int,
        max_len: int,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> KVCache:
        """Return a zeroed cache of ``2 * n_layers * num_slots * max_len`` key/value vectors."""
        shape = (config.n_layers, num_slots, max_len, 2 * config.n_kv_heads, config.head_dim)
        # Zeros, not garbage: a masked position still enters the products, and 0 * nan is nan.
        with torch.inference_mode(mode=False):  # rows are also written outside of forwards
            return cls(torch.zeros(shape, device=device, dtype=dtype).unbind(0))


class AttentionGroup(NamedTuple):
    """Rows of similar size whose attention runs as one call."""

    start: int  #: the group's queries are ``start..stop-1`` of the packed axis
    stop: int
    slots: slice | Tensor
    """Cache slots of its g rows, in packed order; without a cache the rows' own new tokens."""
    num_keys: int  #: longest row of the group, new tokens included
    pad: Tensor | None  #: int64 ``[g, max_q]`` into the group's tokens; None = nothing to pad
    unpad: Tensor | None  #: int64 ``[stop - start]`` into the ``g * max_q`` padded queries
    num_rows: int
    bias: Tensor | None  #: ``[g, 1, max_q, num_keys]``, 0 or -inf; None = everything is visible


class PackedLayout(NamedTuple):
    """Where the packed tokens of one forward belong."""

    positions: Tensor  #: int64 ``[tokens]``, position of each token in its own row
    write_index: Tensor | None
    """int64 ``[tokens]``, ``slot * max_len + position``; None = without a cache."""
    groups: tuple[AttentionGroup, ...]  #: cover the packed axis in order
    wanted: Tensor | None = None
    """int64 ``[c]``, tokens whose hidden states are asked for, ascending; None = all. The last
    layer computes no others."""
    wanted_groups: tuple[AttentionGroup, ...] | None = None
    """Cover the wanted tokens in order, for a last layer with their queries alone; None = attention
    is for all tokens there too."""
    copied: tuple[Tensor, Tensor] | None = None
    """int64 ``[n]`` each, as ``write_index``: places of the cache, after the new tokens have been
    written, and where what is there goes as well."""


# (layer, q [..., heads, head_dim], k and v [..., kv_heads, head_dim]) -> [..., heads, head_dim]
_Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
_Floats = NDArray[np.float32]
_Ints = NDArray[np.int64]


class LLaDARMSNorm(nn.Module):
    """Root-mean-square norm: computed in at least float32, scaled in the working dtype."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(config.d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normed ``x`` (``[..., d_model]``) in its own dtype."""
        return _rms_norm(x, self.weight, self.eps)


class _Norm(NamedTuple):
    """The same norm for serving, without the look-ups of a module."""

    weight: Tensor  #: ``[d_model]``
    eps: float

    def __call__(self, x: Tensor, *, loops: bool) -> Tensor:
        """Return the normed ``x`` (``[tokens, d_model]``) in its own dtype."""
        if loops:
            return torch.from_numpy(_norm(x.numpy(), self.weight.to(x.dtype).numpy(), self.eps))
        return _rms_norm(x, self.weight, self.eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * F.rms_norm(wide, (x.shape[-1],), eps=eps).to(x.dtype)


@partial(compiled, reorder=True)
def _norm(x: _Floats, weight: _Floats, eps: float) -> _Floats:
    """Return the normed ``x``; float32 ``[tokens, d_model]`` each, and ``[d_model]``."""
    out = np.empty_like(x)
    tokens, width = x.shape
    for token in range(tokens):
        squares = np.float32(0)
        for i in range(width):
            squares += x[token, i] * x[token, i]
        scale = np.float32(1 / np.sqrt(squares / width + eps))
        for i in range(width):
            out[token, i] = x[token, i] * scale * weight[i]
    return out


class _Rotary(NamedTuple):
    """Cosines and signed sines of one forward: ``[tokens, 1, head_dim]``, at least float32."""

    cos: Tensor
    sin: Tensor
    both: Tensor  #: ``[tokens, 2, 1, head_dim]`` where they are

    @classmethod
    def table(cls, length: int, frequency: Tensor) -> Tensor:
        """Return those of the first ``length`` positions, float32 ``[length, 2, 1, head_dim]``."""
        angle = torch.arange(length, device=frequency.device)[:, None] * frequency
        sin, cos = angle.sin(), angle.cos()
        # The half-split layout turns the pairs (j, j + head_dim / 2).
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)[:, :, None]

    @classmethod
    def at(cls, table: Tensor, positions: Tensor, dtype: torch.dtype) -> _Rotary:
        """Return those of some positions for queries and keys of a dtype."""
        wide = torch.promote_types(dtype, torch.float32)
        both = table.index_select(0, positions).to(wide)
        cos, sin = both.unbind(1)
        return cls(cos, sin, both)

    def turn(self, x: Tensor) -> Tensor:
        """Rotate ``x`` ``[..., heads, head_dim]``; back in its own dtype."""
        wide = x.to(self.cos.dtype)
        swapped = wide.roll(x.shape[-1] // 2, -1)
        return torch.addcmul(wide * self.cos, swapped, self.sin).to(x.dtype)

    def turn_(self, x: Tensor) -> None:
        """Rotate ``x`` in place."""
        if x.dtype == self.cos.dtype:
            swapped = x.roll(x.shape[-1] // 2, -1)
            x.mul_(self.cos).addcmul_(swapped, self.sin)
        else:
            x.copy_(self.turn(x))


@compiled
def _turn_and_write(
    qkv: _Floats, num_heads: int, turns: _Floats, places: _Floats, index: _Ints
) -> None:
    """Rotate queries in place, and write rotated keys and the values behind them.

    Args:
        qkv: float32 ``[tokens, heads, head_dim]``, queries first.
        num_heads: Of the queries.
        turns: float32 ``[tokens, 2, 1, head_dim]``, cosines and signed sines.
        places: float32 ``[places, 2 * n_kv_heads, head_dim]``; written.
        index: int64 ``[tokens]`` which place is whose.
    """
    # Number by number: to assign a slice costs as much as turning ten heads.
    tokens, heads, width = qkv.shape
    half, kv_heads = width // 2, (heads - num_heads) // 2
    for token in range(tokens):
        x, kv = qkv[token], places[index[token]]
        cos, sin = turns[token, 0, 0], turns[token, 1, 0]
        for head in range(num_heads + kv_heads):
            turned, to = (x, head) if head < num_heads else (kv, head - num_heads)
            for low in range(half):
                high = half + low
                a, b = x[head, low], x[head, high]
                turned[to, low] = a * cos[low] + b * sin[low]
                turned[to, high] = b * cos[high] + a * sin[high]
        for head in range(kv_heads):
            for i in range(width):
                kv[kv_heads + head, i] = x[num_heads + kv_heads + head, i]


class _Joined(NamedTuple):
    """Weights of one block as it multiplies with them, those of one input behind each other.

    Views of the parameters, ``[in, out]``; None = a LoRA is in the way.
    """

    attn_norm: _Norm
    qkv: Tensor | None  #: ``[d_model, (n_heads + 2 * n_kv_heads) * head_dim]``
    out: Tensor | None  #: ``[d_model, d_model]``
    ff_norm: _Norm
    ff: Tensor | None  #: ``[d_model, 2 * mlp_hidden_size]``
    ff_out: Tensor | None  #: ``[mlp_hidden_size, d_model]``


class LLaDABlock(nn.Module):
    """One pre-norm transformer block, with the published flat module names."""

    def __init__(self, config: LLaDAConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.joined: _Joined | None = None
        kv_width = config.n_kv_heads * config.head_dim
        self.attn_norm = LLaDARMSNorm(config)
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.k_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.v_proj = nn.Linear(config.d_model, kv_width, bias=False)
        self.attn_out = nn.Linear(config.d_model, config.d_model, bias=False)
        self.ff_norm = LLaDARMSNorm(config)
        self.ff_proj = nn.Linear(config.d_model, config.mlp_hidden_size, bias=False)
        self.up_proj = nn.Linear(config.d_model, config.mlp_hidden_size, bias=False)
        self.ff_out = nn.Linear(config.mlp_hidden_size, config.d_model, bias=False)

    def forward(self, x: Tensor, rotary: _Rotary, attend: _Attend) -> Tensor:
        """Return the next residual stream ``[..., d_model]``."""
        h = self.attn_norm(x)
        heads = (-1, self.head_dim)
        q = rotary.turn(self.q_proj(h).unflatten(-1, heads))
        k = rotary.turn(self.k_proj(h).unflatten(-1, heads))
        v = self.v_proj(h).unflatten(-1, heads)
        x = x + self.attn_out(attend(self.layer, q, k, v).flatten(-2))
        h = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(h)) * self.up_proj(h))

    def join_weights(self) -> _Joined:
        """Lay weights that multiply the same input behind each other, if they are not yet.

        The modules keep their parameters, as views: names, values and memory stay what they were.
        """
        had = self.joined
        self.joined = _Joined(
            _serving(self.attn_norm),
            _join([self.q_proj, self.k_proj, self.v_proj], had and had.qkv),
            _join([self.attn_out], had and had.out),
            _serving(self.ff_norm),
            _join([self.ff_proj, self.up_proj], had and had.ff),
            _join([self.ff_out], had and had.ff_out),
        )
        return self.joined

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy takes along: it joins its own weights."""
        return {**self.__dict__, "joined": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LLaDABlock:  # noqa: FBT001, FBT002 - torch's signature
        self.joined = None  # the parameters are about to move elsewhere
        return super()._apply(fn, recurse)

    def forward_packed(
        self,
        x: Tensor,
        rotary: _Rotary,
        layout: PackedLayout,
        cache: Tensor | None,
        parts: Parts,
        *,
        last: bool,
    ) -> Tensor:
        """Return the next residual stream ``[tokens, d_model]``; the last block: of those wanted.

        Args:
            x: ``[tokens, d_model]``, overwritten.
            rotary: Of the tokens' positions.
            layout: As for the model.
            cache: This layer's.
            parts: What is done before attention and after it, and how.
            last: Whether no block comes after this one.
        """
        before, after, loops = parts
        heads = self.n_heads
        q = before(self, x, rotary, loops=loops)
        kv = self._write(q, rotary, layout, cache, loops=loops)
        groups, wanted = layout.groups, layout.wanted if last else None
        if wanted is not None:
            x = x.index_select(0, wanted)
            if layout.wanted_groups is not None:
                q, groups, wanted = q.index_select(0, wanted), layout.wanted_groups, None
        cached = cache is not None
        outs = [_attend_group(group, q, kv, heads, cached=cached) for group in groups]
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        if wanted is not None:
            out = out.index_select(0, wanted)
        return after(self, x, out, loops=loops)

    def before_attention(self, x: Tensor, rotary: _Rotary, *, loops: bool) -> Tensor:
        """Return queries, keys and values ``[tokens, n_heads + 2 * n_kv_heads, head_dim]``.

        Those that loops are to rotate are not rotated yet.
        """
        joined = self.joined or self.join_weights()
        h = joined.attn_norm(x, loops=loops)
        if joined.qkv is None:
            qkv = torch.cat((self.q_proj(h), self.k_proj(h), self.v_proj(h)), -1)
        else:
            qkv = _times(h, joined.qkv)
        turned = self.n_heads + self.n_kv_heads
        qkv = qkv.view(-1, turned + self.n_kv_heads, self.head_dim)
        if not loops:
            rotary.turn_(qkv[:, :turned])
        return qkv

    def _write(
        self,
        qkv: Tensor,
        rotary: _Rotary,
        layout: PackedLayout,
        cache: Tensor | None,
        *,
        loops: bool,
    ) -> Tensor:
        """Put new keys and values where they belong; return the cache or, without one, them."""
        kv, index = qkv[:, self.n_heads :], layout.write_index
        places = None if cache is None else cache.flatten(0, 1)
        if loops:
            if places is None or index is None:
                places = kv = torch.empty_like(kv, memory_format=torch.contiguous_format)
                index = torch.arange(len(kv))
            turns, kv_places = rotary.both.numpy(), places.numpy()
            _turn_and_write(qkv.numpy(), self.n_heads, turns, kv_places, index.numpy())
        elif places is not None and index is not None:
            places.index_copy_(0, index, kv)
        if places is not None and layout.copied is not None:
            source, target = layout.copied
            places.index_copy_(0, target, places.index_select(0, source))
        return kv if cache is None else cache

    def after_attention(self, x: Tensor, out: Tensor, *, loops: bool) -> Tensor:
        """Add attention's output and the feed-forward layer to ``x``, in place, and return it."""
        joined = self.joined or self.join_weights()
        if joined.out is None:
            x += self.attn_out(out)
        else:
            _add_times(x, out, joined.out)
        h = joined.ff_norm(x, loops=loops)
        if joined.ff is None:
            gate, up = self.ff_proj(h), self.up_proj(h)
        else:
            gate, up = _times(h, joined.ff).chunk(2, -1)
        h = F.silu(gate).mul_(up)
        if joined.ff_out is None:
            x += self.ff_out(h)
        else:
            _add_times(x, h, joined.ff_out)
        return x


def warm_up() -> None:
    """Run the loops of a forward once, so that no request waits until they are compiled."""
    x = np.ones((1, 3, 2), np.float32)
    _norm(x[0], x[0, 0], 1.0)
    _turn_and_write(x, 1, np.ones((1, 2, 1, 2), np.float32), x[:, :2].copy(), np.zeros(1, np.int64))


class Parts(NamedTuple):
    """What a block does before attention and after it, and by what."""

    before: Callable[..., Tensor] = LLaDABlock.before_attention
    after: Callable[..., Tensor] = LLaDABlock.after_attention
    loops: bool = False
    """Whether by compiled loops where torch would take several operations: for float32 on a CPU."""


PARTS = Parts()


@functools.cache
def compiled_parts() -> Parts:
    """Return them through ``torch.compile``: once for any number of tokens and every block.

    Attention stays as it is: it would be compiled for every layout of a batch.
    """
    return Parts(torch.compile(PARTS.before), torch.compile(PARTS.after))


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product ``[n, out]`` of ``x`` (``[n, in]``) and a weight (``[in, out]``)."""
    if not _is_large(x, weight):
        return torch.mm(x, weight)
    # Code is generated, and kept, for every n: let there be at most 8 from one power of two to the
    # next.
    missing = -len(x) % (1 << max(len(x).bit_length() - 4, 0))
    padded = torch.cat((x, x[:missing])) if missing else x.contiguous()
    product: Tensor = _ONEDNN(padded, weight.t(), None, "none", [], "")
    return product[: len(x)]


def _add_times(x: Tensor, h: Tensor, weight: Tensor) -> None:
    """Add the product of ``h`` and a weight to ``x``, in place."""
    if _is_large(h, weight):
        x += _times(h, weight)
    else:
        x.addmm_(h, weight)


def _is_large(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN is to do a product in place of what ``torch.mm`` calls.

    On a CPU torch leaves float32 to MKL, which has no AVX-512 code for other makers' processors
    than its own: there oneDNN does large products in half the time, and takes longer to start.
    """
    if torch.compiler.is_compiling():
        return False
    size = x.shape[0] * weight.numel()
    return (
        size >= _LARGE
        and _ONEDNN is not None
        and x.is_cpu
        and x.dtype == torch.float32
        and size >= _LARGE * torch.get_num_threads()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
        and weight.t().is_contiguous()  # other strides take a thousand times as long
    )


def _serving(norm: LLaDARMSNorm) -> _Norm:
    return _Norm(norm.weight.detach(), float(norm.eps))


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.bias is None


def _join(linears: list[nn.Module], had: Tensor | None) -> Tensor | None:
    """Make the weights views of one tensor, and return it transposed.

    Returns:
        None if one of the modules is no plain linear layer.
    """
    weights = [x.weight for x in linears if _is_plain(x)]
    if len(weights) < len(linears):
        return None
    if len(weights) == 1:
        return weights[0].detach().t()
    sizes = [len(x) for x in weights]
    if had is not None:
        views = zip(weights, had.t().split(sizes), strict=True)
        if all(
            weight.data_ptr() == view.data_ptr() and weight.stride() == view.stride()
            for weight, view in views
        ):
            return had
    with torch.inference_mode(mode=False):  # weights stay what can be trained and loaded anew
        whole = torch.cat([x.detach() for x in weights])
        for weight, view in zip(weights, whole.split(sizes), strict=True):
            weight.data = view
        return whole.t()


class LLaDATransformer(nn.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.embedding_size, config.d_model)
        self.blocks = nn.ModuleList(LLaDABlock(config, i) for i in range(config.n_layers))
        self.ln_f = LLaDARMSNorm(config)
        self.ff_out = nn.Linear(config.d_model, config.embedding_size, bias=False)


class LLaDAModel(nn.Module):
    """Only there for the published tensor names, ``model.transformer...``."""

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__()
        self.transformer = LLaDATransformer(config)


class LLaDAModelLM(PreTrainedModel):
    """LLaDA with its language-model head; loads the published checkpoint layout unchanged.

    PEFT adapters attach to ``q_proj``, ``k_proj``, ``v_proj`` and ``attn_out``.

    Source: arXiv 2502.09992 and the published checkpoint's config; own code.
    """

    config_class = LLaDAConfig
    config: LLaDAConfig
    base_model_prefix = "model"
    _no_split_modules = ["LLaDABlock"]  # noqa: RUF012 - read by transformers as a plain list

    def __init__(self, config: LLaDAConfig) -> None:
        super().__init__(config)
        self.model = LLaDAModel(config)
        self._turns: Tensor | None = None  # of positions, as many as anybody has asked for
        self.post_init()

    def _rotary(self, positions: Tensor, dtype: torch.dtype, length: int = 0) -> _Rotary:
        """Return the turns of some positions, all below ``length`` or the model's window."""
        # Made when first used, never a module buffer: buffers that no checkpoint holds are what
        # loading on the meta device breaks.
        turns, length = self._turns, max(length, self.config.max_sequence_length)
        if turns is None or turns.device != positions.device or len(turns) < length:
            head_dim = self.config.head_dim
            even = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
            frequency = 1.0 / self.config.rope_theta ** (even / head_dim)
            self._turns = turns = _Rotary.table(length, frequency)
        return _Rotary.at(turns, positions, dtype)

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the token embedding."""
        return self.model.transformer.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.model.transformer.wte = value

    def get_output_embeddings(self) -> nn.Linear:
        """Return the head."""
        return self.model.transformer.ff_out

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replace the head."""
        self.model.transformer.ff_out = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_bias: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        attention_mask: None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> MaskedLMOutput | tuple[Tensor, ...]:
        """Run whole sequences; row i of the logits predicts position i (no shift).

        Args:
            input_ids: int64 ``[batch, length]``; or give ``inputs_embeds``.
            attention_bias: What may be attended to, broadcastable to ``[batch, n_heads, length,
                length]``: bool (True = visible) or float (added to the scores). None = everything
                sees everything. Rows of one batch that differ in length must be told apart here.
            inputs_embeds: ``[batch, length, d_model]`` in place of ``input_ids``.
            attention_mask: Refused: use ``attention_bias``.
            output_hidden_states: Also return the input of every layer and, last, the output of
                the final norm: ``n_layers + 1`` tensors ``[batch, length, d_model]``.
            return_dict: False = a plain tuple.

        Returns:
            ``logits`` ``[batch, length, embedding_size]`` and, if asked for, ``hidden_states``.

        Raises:
            ConfigError: If an ``attention_mask`` is given.
        """
        if attention_mask is not None:
            raise ConfigError(
                "attention_mask is refused: LLaDA is bidirectional, pass an attention_bias "
                "[batch, 1, length, length] that says what each position may see"
            )
        parts = self.model.transformer
        x = parts.wte(input_ids) if inputs_embeds is None else inputs_embeds

        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=attention_bias,
                enable_gqa=k.shape[2] != q.shape[2],
            )
            return out.transpose(1, 2)

        length = x.shape[1]
        rotary = self._rotary(torch.arange(length, device=x.device), x.dtype, length)
        hidden: list[Tensor] | None = [] if output_hidden_states else None
        for block in parts.blocks:
            if hidden is not None:
                hidden.append(x)
            x = block(x, rotary, attend)
        x = parts.ln_f(x)
        if hidden is not None:
            hidden.append(x)
        output = MaskedLMOutput(
            logits=parts.ff_out(x), hidden_states=None if hidden is None else tuple(hidden)
        )
        return output.to_tuple() if return_dict is False else output

    def join_weights(self) -> None:
        """Lay weights that multiply the same input behind each other; every engine does so.

        ``forward_packed`` then multiplies once instead of three times and twice. Parameters stay
        what they were, as views, and moving the model undoes it. A LoRA that is not merged keeps
        its layers apart. Values may change in place at any time; after a parameter was given other
        data, or a module took another's place, call this again.

        Raises:
            ConfigError: If two of the weights to be joined are one: each would go its own way.
        """
        blocks: list[Any] = list(self.model.transformer.blocks)
        seen: set[nn.Parameter] = set()
        for number, block in enumerate(blocks):
            for name in ("q_proj", "k_proj", "v_proj", "ff_proj", "up_proj"):
                weight = getattr(block, name).weight
                if weight in seen:
                    raise ConfigError(
                        f"blocks[{number}].{name}.weight is the weight of another layer as well, "
                        "and layers that share one cannot be served: give this one a copy"
                    )
                seen.add(weight)
        for block in blocks:
            block.join_weights()

    def forward_packed(
        self,
        input_ids: Tensor,
        layout: PackedLayout,
        cache: KVCache | None,
        parts: Parts = PARTS,
    ) -> Tensor:
        """Run the new tokens of all rows once, and leave their keys and values in the cache.

        Not differentiable: it works in place.

        Args:
            input_ids: int64 ``[tokens]``, the rows' new tokens behind each other.
            layout: Where each token belongs, what each row may see, which tokens are wanted.
            cache: Written where the layout says, then read; None = rows see their new tokens only.
            parts: What every block does before and after attention, and how.

        Returns:
            Hidden states ``[tokens or c, d_model]`` after the final norm; :meth:`logits` takes any
            selection of them. Linear layers cost O(tokens), attention O(padded group sizes).
        """
        model = self.model.transformer
        x = model.wte(input_ids)
        rotary = self._rotary(layout.positions, x.dtype)
        blocks: list[Any] = list(model.blocks)
        for number, block in enumerate(blocks, 1 - len(blocks)):
            layer = None if cache is None else cache.layers[number - 1]
            x = block.forward_packed(x, rotary, layout, layer, parts, last=number == 0)
        return _serving(model.ln_f)(x, loops=parts.loops)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the head's logits ``[..., embedding_size]`` of any final hidden states."""
        head = self.model.transformer.ff_out
        if hidden.dim() == 2 and _is_plain(head) and not torch.is_grad_enabled():
            return _times(hidden, head.weight.t())
        return head(hidden)


def _attend_group(
    group: AttentionGroup, q: Tensor, kv: Tensor, heads: int, *, cached: bool
) -> Tensor:
    """Attend for one group of rows; ``[stop - start, heads * head_dim]``.

    Args:
        group: The group.
        q: ``[tokens, >= heads, head_dim]``, queries first.
        kv: A layer's cache, or the keys and values of the new tokens.
        heads: Of the queries.
        cached: Whether it is the cache.
    """
    slots = group.slots if cached and group.pad is None else None
    if isinstance(slots, slice):
        q, keys, values = _views(group, slots.start, q, kv, heads)
    else:
        q, keys, values = _gathered(group, q[:, :heads], kv, cached=cached)
    # Query heads that share a key head become more queries of that head: no key is copied.
    share, length, head_dim = q.shape[-3:]
    q = q.flatten(-3, -2)
    bias = group.bias
    if bias is not None and share > 1:
        bias = bias.repeat(1, 1, share, 1)
    out = F.scaled_dot_product_attention(q, keys, values, attn_mask=bias)
    out = out.view(-1, heads, length, head_dim).transpose(1, 2).reshape(-1, heads * head_dim)
    return out if group.unpad is None else out[group.unpad]


def _views(
    group: AttentionGroup, slot: int, q: Tensor, cache: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as :func:`_gathered` where slots from ``slot`` on lie beside each other.

    Three calls in place of ten, for every group in every layer.
    """
    rows, num_keys = group.num_rows, group.num_keys
    kv_heads, head_dim = cache.shape[2] // 2, cache.shape[3]
    length, share = (group.stop - group.start) // rows, heads // kv_heads
    far, near, head, _ = cache.stride()
    shape, stride = (rows, kv_heads, num_keys, head_dim), (far, head, near, 1)
    start = cache.storage_offset() + slot * far
    keys = cache.as_strided(shape, stride, start)
    values = cache.as_strided(shape, stride, start + kv_heads * head)
    near, head, _ = q.stride()
    q = q.as_strided(
        (rows, kv_heads, share, length, head_dim),
        (length * near, share * head, head, near, 1),
        q.storage_offset() + group.start * near,
    )
    return q, keys, values


def _gathered(
    group: AttentionGroup, q: Tensor, kv: Tensor, *, cached: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a group's queries, keys and values.

    Returns:
        ``[g, kv_heads, share, max_q, head_dim]``, and ``[g, kv_heads, num_keys, head_dim]`` twice.
    """
    q, kv_heads = q[group.start : group.stop], kv.shape[-2] // 2
    if cached:
        kv = kv[group.slots, : group.num_keys]
    elif group.pad is None:
        kv = kv[group.slots].unflatten(0, (group.num_rows, -1))
    else:
        kv = kv[group.slots][group.pad]
    q = q.unflatten(0, (group.num_rows, -1)) if group.pad is None else q[group.pad]
    keys, values = kv.transpose(1, 2).split(kv_heads, 1)
    return q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4), keys, values
