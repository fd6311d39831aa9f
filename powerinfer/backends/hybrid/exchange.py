"""What crosses between a device and the CPU: one copy each way, through memory that the device reaches directly."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from powerinfer.backends.interface import FloatArray


class Exchange:
    """Page-locked buffers, made once and grown where a batch is larger. On the CPU itself nothing is copied twice."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = device.type != "cpu"
        self._out = self._in = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def _grown(self, buffer: torch.Tensor, nbytes: int) -> torch.Tensor:
        if buffer.numel() >= nbytes:
            return buffer
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)

    def send(self, normed: torch.Tensor, mask: torch.Tensor) -> Sent:
        """Starts one copy of normed, float32 (n_tokens, n_embd), and mask, bool (n_tokens, n_ff), to the CPU."""
        if not self._pinned:
            return Sent(normed.contiguous().numpy(), mask.contiguous().view(torch.uint8).numpy(), None)
        both = torch.cat([normed.contiguous().view(torch.uint8).reshape(-1), mask.view(torch.uint8).reshape(-1)])
        self._out = self._grown(self._out, both.numel())
        here = self._out[: both.numel()]
        here.copy_(both, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        cut = normed.numel() * 4
        values = here[:cut].view(torch.float32).view(normed.shape).numpy()
        return Sent(values, here[cut:].view(mask.shape).numpy(), self._copied)

    def zeros(self, n_tokens: int, n_embd: int) -> FloatArray:
        """What the CPU's part is added to, float32 (n_tokens, n_embd); the same memory each time."""
        nbytes = n_tokens * n_embd * 4
        self._in = self._grown(self._in, nbytes)
        values: FloatArray = self._in[:nbytes].view(torch.float32).view(n_tokens, n_embd).numpy()
        values.fill(0)
        return values

    def receive(self, values: FloatArray) -> torch.Tensor:
        """What `zeros` gave, on the device."""
        return torch.from_numpy(values).to(self.device, non_blocking=True)


class Sent:
    """A copy that may still be under way."""

    def __init__(self, normed: FloatArray, mask: npt.NDArray[np.uint8], copied: torch.cuda.Event | None) -> None:
        self._normed, self._mask, self._copied = normed, mask, copied

    def wait(self) -> tuple[FloatArray, npt.NDArray[np.uint8]]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._normed, self._mask
