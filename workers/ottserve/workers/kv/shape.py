"""What a cache must know of a model, and nothing more."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ModelShape:
    """L, J and D of a model (kernels/README.md), its query heads H, and whether its values can be rotated.

    The fingerprint tells its weights from others'; it is empty where only the shape is known. `key_frequencies` are how
    many times a position turns each pair of a key's channels d and d + D/2; empty where they are not turned so.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    can_rotate: bool = True
    fingerprint: str = ""
    key_frequencies: tuple[float, ...] = ()

    def turned(self) -> ModelShape:
        """The same with keys that positions turn: for where nobody has asked the model yet whether they do."""
        return replace(self, key_frequencies=(0.0,) * (self.head_size // 2))
