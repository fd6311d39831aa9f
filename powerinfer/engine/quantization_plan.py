"""Which type each tensor of a file gets when the file is quantized.

The head is finer than the rest, predictors are apart, and k-quant files have a mix, all as in llama.cpp and PowerInfer.
"""

from __future__ import annotations

from dataclasses import dataclass

from powerinfer.engine.quantization_mix import FILE_TYPES, FileType, MixedModel, is_matrix
from powerinfer.errors import UsageError, shown
from powerinfer.formats import GGUFFile, TensorInfo
from powerinfer.quantization import TYPES, QuantType

COPY = "COPY"
POWERINFER = "powerinfer"
ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}

# Types whose blocks are longer than a row become these; if that does not help, F16.
FALLBACKS = {"Q2_K": "Q4_0", "Q3_K": "Q4_1", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}

# Types of fc1 and fc2 by target, and in other quantized files. The share of firing neurons that predictors of a type
# still name, where F16 names all (synthetic models of n_embd 512 and 1024; each type has 14 % of the neurons active):
#   Q4_0 0.91 (4.5 bits), Q5_0 0.954 (5.5), Q5_1 0.957 (6), Q5_K 0.963 (5.5), Q6_K 0.981 (6.6), Q8_0 0.994 (8.5)
# A Q4_0 file keeps PowerInfer's type, so that it is what PowerInfer would have made.
PREDICTORS = {"Q4_0": "Q4_0", "Q8_0": "Q8_0"}
PREDICTOR = "Q6_K"
PREDICTORS_OF_POWERINFER = {"Q4_0": "Q4_0"}
PREDICTOR_OF_POWERINFER = "Q5_0"


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """What changes a plan, and how it is carried out.

    allow_requantize: also tensors that are quantized already. pure: every matrix gets the target's own type. The types
    (names of tensor types, of any case) override the mix for `output.weight`, `token_embd.weight` and the predictors;
    predictor_type may also be `powerinfer`: what its own tool makes. dry_run: only plan. n_threads: 0 for all.
    """

    allow_requantize: bool = False
    leave_output_tensor: bool = False
    pure: bool = False
    n_threads: int = 0
    output_tensor_type: str | None = None
    token_embedding_type: str | None = None
    predictor_type: str | None = None
    dry_run: bool = False


def parse_file_type(name: str) -> str:
    """A target's name in capitals, from a name in any case or the number of `general.file_type`.

    Raises UsageError for another word.
    """
    upper = name.upper()
    if upper == COPY or upper in FILE_TYPES:
        return upper
    if upper in ALIASES:
        return ALIASES[upper]
    for known, file_type in FILE_TYPES.items():
        if name == str(file_type.number):
            return known
    known_names = ", ".join(f"{n} ({t.number})" for n, t in FILE_TYPES.items())
    raise UsageError(f"unknown type {shown(name)}: choose one of {known_names}, COPY")


def parse_tensor_type(name: str) -> QuantType:
    """A type that tensors can be converted to, by its name in any case. Raises UsageError for another word."""
    known = {kind.name: kind for kind in TYPES if kind.quantize is not None}
    if name.upper() not in known:
        raise UsageError(f"unknown tensor type {shown(name)}: choose one of {', '.join(known)}")
    return known[name.upper()]


def is_predictor(info: TensorInfo) -> bool:
    return info.name.endswith((".fc1.weight", ".fc2.weight"))


class Plan:
    """The type of each tensor of a file. `fallbacks`: tensors that could not have their type, and what instead."""

    def __init__(self, file: GGUFFile, target: str, options: QuantizeOptions) -> None:
        """target: as `parse_file_type` gives it. Raises UsageError for an unknown type among the options."""
        self._target, self._options = target, options
        self._model = MixedModel(file)
        self._file_type = None if target == COPY else FILE_TYPES[target]
        self._tied = "output.weight" not in file.tensors
        self._overrides = self._parse_overrides()
        self.fallbacks: dict[str, str] = {}

    def _parse_overrides(self) -> dict[str, str]:
        options = self._options
        predictor = options.predictor_type
        if predictor is not None and predictor.lower() == POWERINFER:
            predictor = PREDICTORS_OF_POWERINFER.get(self._target, PREDICTOR_OF_POWERINFER)
        asked = {"output": options.output_tensor_type, "token_embd": options.token_embedding_type}
        asked["predictor"] = predictor
        return {what: parse_tensor_type(name).name for what, name in asked.items() if name is not None}

    def type_of(self, info: TensorInfo) -> QuantType | None:
        """The type to convert to, None to leave the tensor as it is.

        Raises UsageError where it is quantized already and may not be again.
        """
        leave = self._options.leave_output_tensor and info.name == "output.weight"
        if self._file_type is None or not is_matrix(info) or leave:
            return None
        wanted = TYPES.by_name(self._override(info) or self._mixed(info, self._file_type))
        kind = fitting(info, wanted)
        if kind is not wanted:
            self.fallbacks[info.name] = kind.name
        if info.type is kind:
            return None
        if info.type is not None and info.type.block_size > 1 and not self._options.allow_requantize:
            raise UsageError(
                f"{info.name} is {info.type_name} already: quantize the original, or lose precision twice with "
                "--allow-requantize"
            )
        return kind

    def _override(self, info: TensorInfo) -> str | None:
        if is_predictor(info):
            return self._overrides.get("predictor")
        if info.name == "token_embd.weight":
            return self._overrides.get("token_embd")
        return self._overrides.get("output") if info.name == "output.weight" else None

    def _mixed(self, info: TensorInfo, file_type: FileType) -> str:
        if self._options.pure or TYPES.by_name(file_type.base).block_size == 1:
            return file_type.base
        if info.name == ("token_embd.weight" if self._tied else "output.weight"):
            if "output" in self._overrides:
                return self._overrides["output"]
            if self._model.falcon or info.shape[-1] % 256 or file_type.base == "Q8_0":
                return "Q8_0"
            return "Q6_K"
        if is_predictor(info):
            return PREDICTORS.get(self._target, PREDICTOR)
        return self._model.mixed(info, file_type)


def fitting(info: TensorInfo, wanted: QuantType) -> QuantType:
    """`wanted`, or a type whose blocks divide the row."""
    for name in (wanted.name, FALLBACKS.get(wanted.name, wanted.name)):
        kind = TYPES.by_name(name)
        if info.shape[-1] % kind.block_size == 0:
            return kind
    return TYPES.by_name("F16")
