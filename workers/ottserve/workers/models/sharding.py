"""A model cut into shares, one a rank: each has heads and a part of every MLP of its own, and all have the rest.

The first matrices of an attention layer or an MLP are cut by output, the last one by input; what the ranks make of it
is summed, so that behind it every rank knows the same. Embeddings, norms and head are whole on all.
Source: Megatron-LM (arXiv 1909.08053), section 3. Knows no cache and no step.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ottserve.workers.kv.shape import ModelShape
from ottserve.workers.models.projections import Projections, Rows, attention_layers, find_projections
from ottserve.workers.models.sums import GroupSums, Sums

# Names of an MLP's matrices: those cut by output, how many matrices lie in each of them, and the one cut by input.
MLPS = (
    (("gate_proj", "up_proj"), 1, "down_proj"),
    (("gate_up_proj",), 2, "down_proj"),
    (("fc1",), 1, "fc2"),
    (("c_fc",), 1, "c_proj"),
)


@dataclass(frozen=True, slots=True)
class Share:
    """One of `num_ranks` equal parts of a model."""

    rank: int = 0
    num_ranks: int = 1

    def of(self, rows: slice) -> slice:
        """This rank's part of so many rows, which divide evenly."""
        each = (rows.stop - rows.start) // self.num_ranks
        return slice(rows.start + self.rank * each, rows.start + (self.rank + 1) * each)


WHOLE = Share()


class SummedLinear(nn.Linear):
    """A linear layer over this rank's part of its input; what the ranks make of theirs is summed.

    Attributes:
        weight: `[m, n / num_ranks]`; bias: `[m]` on rank 0, None on the others.
        sums, turn: by which way, and its turn there.
    """

    def __init__(self, whole: nn.Linear, share: Share) -> None:
        super().__init__(whole.in_features // share.num_ranks, whole.out_features, bias=False, device="meta")
        self.weight = _frozen(whole.weight[:, share.of(slice(0, whole.in_features))])
        self.register_parameter("bias", whole.bias if share.rank == 0 else None)
        self.sums: Sums = GroupSums()
        self.turn = 0

    @torch.compiler.disable
    def forward(self, input: Tensor) -> Tensor:
        """`[…, n / num_ranks]` → `[…, m]`, the same on all ranks, which have to call it together."""
        return self.sums.linear(input, self.weight, self.bias, self.turn)


@dataclass(frozen=True, slots=True)
class _Block:
    """What is cut as one: matrices whose outputs are shared out, and the one that takes them all."""

    parent: nn.Module
    wide: Sequence[Rows]
    narrow: nn.Linear


def shard(model: PreTrainedModel, shape: ModelShape, share: Share) -> ModelShape:
    """Leave of a model what one rank computes; ranks sum over the default group of `torch.distributed`.

    Args:
        model: the whole one, as transformers makes it; changed in place.
        shape: of the whole one.
        share: of the rank; of one rank alone nothing is changed.

    Returns:
        The shape of what is left, that of its heads.

    Raises:
        ValueError: it can't be cut so; names the setting, the architecture and what stands against it.
    """
    if share.num_ranks == 1:
        return shape
    try:
        found = [_projections(attention, shape) for attention in attention_layers(model)]
        blocks = [_Block(each.attention, (each.queries, each.keys, each.values), each.output) for each in found]
        blocks += [block for module in model.modules() for block in _mlps(module)]
        _refuse_uncuttable(blocks, shape, share.num_ranks)
    except ValueError as error:
        raise ValueError(f"model.tensor_parallel={share.num_ranks}: {type(model).__name__}: {error}") from error
    for block in blocks:
        _cut(block, share)
    left = replace(
        shape, num_heads=shape.num_heads // share.num_ranks, num_kv_heads=shape.num_kv_heads // share.num_ranks
    )
    for projections in found:
        _tell_heads(projections, left)
    return left


def _projections(attention: nn.Module, shape: ModelShape) -> Projections:
    found = find_projections(attention, shape)
    if found is None:
        raise ValueError(f"the matrices of {type(attention).__name__} are not known")
    for name, child in attention.named_children():
        over = [parameter.shape for parameter in child.parameters() if not isinstance(child, nn.Linear)]
        if any(size.numel() != shape.head_size for size in over):
            raise ValueError(f"{name} spans all heads")
    return found


def _mlps(module: nn.Module) -> list[_Block]:
    """The module as a block, if it is an MLP."""
    for names, num_inside, narrow in MLPS:
        layers = [getattr(module, name, None) for name in (*names, narrow)]
        linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
        if len(linear) == len(layers):
            return [_Block(module, [rows for layer in linear[:-1] for rows in _inside(layer, num_inside)], linear[-1])]
    return []


def _inside(layer: nn.Linear, num_inside: int) -> list[Rows]:
    """The matrices that lie in one, one after the other."""
    size = layer.out_features // num_inside
    return [Rows(layer, slice(index * size, (index + 1) * size)) for index in range(num_inside)]


def _refuse_uncuttable(blocks: list[_Block], shape: ModelShape, num_ranks: int) -> None:
    if len(blocks) != 2 * shape.num_layers:
        raise ValueError("the matrices of its MLPs are not known")
    sizes = {f"{shape.num_kv_heads} KV heads": shape.num_kv_heads}
    sizes |= {f"{block.narrow.in_features} channels of an MLP": block.narrow.in_features for block in blocks}
    for what, size in sizes.items():
        if size % num_ranks:
            raise ValueError(f"{what} do not divide evenly over {num_ranks} ranks")


def _cut(block: _Block, share: Share) -> None:
    layers = {id(rows.layer): rows.layer for rows in block.wide}
    for layer in layers.values():
        kept = [share.of(rows.rows) for rows in block.wide if rows.layer is layer]
        layer.weight = _frozen(torch.cat([layer.weight[rows] for rows in kept]))
        if layer.bias is not None:
            layer.bias = _frozen(torch.cat([layer.bias[rows] for rows in kept]))
        layer.out_features = layer.weight.shape[0]
    name = next(name for name, child in block.parent.named_children() if child is block.narrow)
    setattr(block.parent, name, SummedLinear(block.narrow, share))


def _tell_heads(projections: Projections, shape: ModelShape) -> None:
    """Fused matrices are taken apart by what the layer's configuration says of heads."""
    if projections.queries.layer is not projections.values.layer:
        return
    config = copy.copy(projections.attention.config)
    config.num_attention_heads, config.num_key_value_heads = shape.num_heads, shape.num_kv_heads  # type: ignore[union-attr]
    projections.attention.config = config
    projections.attention.num_key_value_heads = shape.num_kv_heads  # type: ignore[assignment]


def _frozen(weight: Tensor) -> nn.Parameter:
    """A parameter of its own: a view would keep the whole one."""
    return nn.Parameter(weight.detach().clone(), requires_grad=False)


def sum_by(module: nn.Module, sums: Sums) -> None:
    """Have a share sum by a way that all ranks have found together; layers take turns in the order they are computed.

    There are two in each layer of a decoder, so the first follows the last as any other does.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, SummedLinear)]
    for number, layer in enumerate(layers):
        layer.sums, layer.turn = sums, number % 2
