"""The mixes of types that llama.cpp's `quantize` makes.

In k-quant files the matrices whose errors cost most (attn_v, ffn_down, attn_output) get finer types than the rest, in
the first and last layers before the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from powerinfer.formats import GGUFFile, TensorInfo

# Small or sensitive matrices that llama.cpp leaves as they are, by a part of their name.
LEFT_ALONE = ("_norm.weight", "ffn_gate_inp.weight", "position_embd.weight", "token_types.weight", "ssm_conv1d.weight")


class Role(Enum):
    """What a matrix does, as far as mixes care: a part of its name."""

    ATTN_V = re.compile(r"attn_(v|qkv|kv_b)\.weight")
    ATTN_K = re.compile(r"attn_k\.weight")
    ATTN_OUTPUT = re.compile(r"attn_output\.weight")
    FFN_DOWN = re.compile("ffn_down")


@dataclass(frozen=True, slots=True)
class Place:
    """A matrix: the `number`-th (from 0) of `count` in its role. gqa: how many heads of the model share a KV head."""

    number: int
    count: int
    falcon: bool
    gqa: int

    @property
    def sensitive(self) -> bool:
        """In the first or last eighth of the layers, or every third between."""
        eighth = self.count // 8
        return self.number < eighth or self.number >= 7 * self.count // 8 or (self.number - eighth) % 3 == 2

    def first(self, fraction: int) -> bool:
        """Among the first 1 / fraction of the layers."""
        return self.number < self.count // fraction


Rule = Callable[[Place], str | None]  # a type, None for that of the whole file


@dataclass(frozen=True, slots=True)
class FileType:
    """A target: `number` is the value of `general.file_type`, `base` the type of what no rule speaks about."""

    number: int
    base: str
    rules: Mapping[Role, Rule]
    experts_output: str | None = None  # of attn_output in a model of 8 experts


def _sensitive_q6_k(place: Place) -> str | None:
    return "Q6_K" if place.sensitive else None


def _q3_k_m_down(place: Place) -> str | None:
    if place.first(16):
        return "Q5_K"
    return "Q4_K" if place.sensitive or not place.falcon else None


def _q4_k_m_down(place: Place) -> str | None:
    if not place.falcon:
        return _sensitive_q6_k(place)
    if place.first(16):
        return "Q6_K"
    return "Q5_K" if place.sensitive else None


_Q2_K: Mapping[Role, Rule] = {
    Role.ATTN_V: lambda at: "Q4_K" if at.gqa >= 4 else "Q3_K",
    Role.FFN_DOWN: lambda at: "Q3_K",
    Role.ATTN_OUTPUT: lambda at: None if at.falcon else "Q3_K",
}
_Q3_K_M: Mapping[Role, Rule] = {
    Role.ATTN_V: lambda at: "Q5_K" if at.number < 2 else "Q4_K",
    Role.FFN_DOWN: _q3_k_m_down,
    Role.ATTN_OUTPUT: lambda at: None if at.falcon else "Q4_K",
}
_Q3_K_L: Mapping[Role, Rule] = {
    Role.ATTN_V: lambda at: "Q5_K",
    Role.FFN_DOWN: lambda at: "Q4_K" if at.falcon else "Q5_K",
    Role.ATTN_OUTPUT: lambda at: "Q4_K" if at.falcon else "Q5_K",
}
_Q4_K_S: Mapping[Role, Rule] = {
    Role.ATTN_V: lambda at: "Q5_K" if at.number < 4 else None,
    Role.FFN_DOWN: lambda at: "Q5_K" if at.first(8) and not at.falcon else None,
}
_Q4_K_M: Mapping[Role, Rule] = {Role.ATTN_V: _sensitive_q6_k, Role.FFN_DOWN: _q4_k_m_down}
_Q5_K_M: Mapping[Role, Rule] = {Role.ATTN_V: _sensitive_q6_k, Role.FFN_DOWN: _sensitive_q6_k}

FILE_TYPES: Mapping[str, FileType] = {
    "F32": FileType(0, "F32", {}),
    "F16": FileType(1, "F16", {}),
    "Q4_0": FileType(2, "Q4_0", {}),
    "Q4_1": FileType(3, "Q4_1", {}),
    "Q8_0": FileType(7, "Q8_0", {}),
    "Q5_0": FileType(8, "Q5_0", {}),
    "Q5_1": FileType(9, "Q5_1", {}),
    "Q2_K": FileType(10, "Q2_K", _Q2_K, "Q5_K"),
    "Q3_K_S": FileType(11, "Q3_K", {}, "Q5_K"),
    "Q3_K_M": FileType(12, "Q3_K", _Q3_K_M, "Q5_K"),
    "Q3_K_L": FileType(13, "Q3_K", _Q3_K_L),
    "Q4_K_S": FileType(14, "Q4_K", _Q4_K_S, "Q5_K"),
    "Q4_K_M": FileType(15, "Q4_K", _Q4_K_M, "Q5_K"),
    "Q5_K_S": FileType(16, "Q5_K", {}),
    "Q5_K_M": FileType(17, "Q5_K", _Q5_K_M),
    "Q6_K": FileType(18, "Q6_K", {}),
    "BF16": FileType(32, "BF16", {}),
}
"""Targets by name."""


def is_matrix(info: TensorInfo) -> bool:
    """Whether a tensor is quantized at all: two-dimensional weights, and the stacked ones of experts."""
    is_weight = info.name.endswith("weight") and not any(part in info.name for part in LEFT_ALONE)
    return is_weight and info.type is not None and len(info.shape) >= 2 and prod(info.shape[:-1]) > 1


class MixedModel:
    """What rules need to know of a model."""

    def __init__(self, file: GGUFFile) -> None:
        architecture = file.get("general.architecture")

        def first_of(key: str, default: int) -> int:
            """A number, or the first layer's of a list."""
            value = file.get(f"{architecture}.{key}", default)
            try:
                return int(value if isinstance(value, int) else value[0])
            except (TypeError, ValueError, IndexError):
                return default

        self.falcon = architecture == "falcon"
        self._n_layers = first_of("block_count", 0)
        n_head = first_of("attention.head_count", 0)
        n_head_kv = first_of("attention.head_count_kv", n_head)
        self._gqa = n_head // n_head_kv if n_head_kv > 0 else 0
        self._n_experts = first_of("expert_count", 0)
        self._is_70b = architecture == "llama" and self._n_layers == 80 and n_head != n_head_kv
        self._roles: dict[str, Role] = {}
        self._numbers: dict[str, int] = {}
        self._n_attn_v = 0
        self._number_roles(file)

    def _number_roles(self, file: GGUFFile) -> None:
        """Counts the tensors of each role in the order of layers."""
        counts = dict.fromkeys(Role, 0)
        for name in sorted(file.tensors, key=lambda name: (layer_of(name), name)):
            role = next((role for role in Role if role.value.search(name)), None)
            if role is None or not is_matrix(file.tensors[name]):
                continue
            self._roles[name] = role
            self._numbers[name] = counts[role]
            counts[role] += 1
        self._n_attn_v = counts[Role.ATTN_V]

    def mixed(self, info: TensorInfo, file_type: FileType) -> str:
        role = self._roles.get(info.name)
        if role is None:
            return file_type.base
        if self._n_experts == 8 and role in (Role.ATTN_V, Role.ATTN_K):
            return "Q8_0"  # small beside the experts
        if self._n_experts == 8 and role is Role.ATTN_OUTPUT and not self.falcon:
            return file_type.experts_output or file_type.base
        rule = file_type.rules.get(role)
        kind = (rule(self._place(info.name, role)) if rule else None) or file_type.base
        if role is Role.ATTN_V and self._is_70b and kind in ("Q3_K", "Q4_K"):
            return "Q5_K"  # 8 heads share it: finer costs next to nothing
        return kind

    def _place(self, name: str, role: Role) -> Place:
        if role is Role.ATTN_V:
            return Place(self._numbers[name], self._n_attn_v, self.falcon, self._gqa)
        number = layer_of(name) if self._n_experts > 1 else self._numbers[name]
        return Place(number, self._n_layers, self.falcon, self._gqa)


def layer_of(name: str) -> int:
    """The layer in a tensor's name, -1 without one."""
    found = re.match(r"blk\.(\d{1,9})\.", name)
    return int(found.group(1)) if found else -1
