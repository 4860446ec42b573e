"""Codes to bfloat16: every backend gives numpy's bits: product and sum rounded to float32, then to bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kernels.dequantize import dequantize

BACKENDS = ("torch", "triton")


def truth(
    codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, at: torch.Tensor, bits: torch.Tensor
) -> npt.NDArray[np.uint16]:
    """The bits by numpy: float32 product, float32 sum, rounding to nearest even on the integer pattern."""
    product = codes.cpu().numpy().astype(np.float32) * scale.cpu().numpy()
    pattern = (product + offset.cpu().numpy()).view(np.uint32)
    rounded = ((pattern + np.uint32(0x7FFF) + ((pattern >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
        np.uint16
    )
    flat = rounded.reshape(-1)
    flat[at.cpu().numpy()] = bits.cpu().view(torch.uint16).numpy()
    return rounded


def case(num_rows: int, num_channels: int, num_exceptions: int, *, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random codes over channels whose scales and offsets span what statistics can give."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-127, 128, (num_rows, num_channels), generator=generator, dtype=torch.int8)
    magnitude = torch.empty(num_channels).uniform_(-20, 8, generator=generator)
    scale = torch.exp2(magnitude) * torch.rand(num_channels, generator=generator)
    offset = torch.exp2(magnitude + 3) * (torch.rand(num_channels, generator=generator) - 0.5)
    at = torch.randperm(num_rows * num_channels, generator=generator)[:num_exceptions].sort().values
    if num_exceptions >= 2:
        at[0], at[-1] = 0, num_rows * num_channels - 1
    # All patterns: NaN with a payload, infinities and subnormals are written as they are.
    bits = torch.randint(-(2**15), 2**15, (num_exceptions,), generator=generator, dtype=torch.int16)
    return {"codes": codes, "scale": scale, "offset": offset, "exception_at": at, "exception_bits": bits}


def bits_of(values: torch.Tensor) -> npt.NDArray[np.uint16]:
    return values.cpu().contiguous().view(torch.int16).numpy().view(np.uint16)


def check(arguments: dict[str, Any], backend: str, out: torch.Tensor | None = None) -> None:
    expected = truth(*arguments.values())
    found = dequantize(**arguments, out=out, backend=backend)
    assert found.dtype == torch.bfloat16
    np.testing.assert_array_equal(bits_of(found), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("num_rows", "num_channels", "num_exceptions"),
    [(1, 1, 0), (1, 1, 1), (7, 33, 5), (40, 252, 300), (9, 2049, 2), (3, 4096, 12288), (130, 576, 40)],
)
def test_bits_are_those_of_numpy(
    num_rows: int, num_channels: int, num_exceptions: int, backend: str, device: torch.device
) -> None:
    """Red when product and sum are fused, the rounding is not to nearest even, or an exception is misplaced."""
    arguments = case(num_rows, num_channels, num_exceptions)
    check({name: tensor.to(device) for name, tensor in arguments.items()}, backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_corners_of_the_rounding(backend: str, device: torch.device) -> None:
    """Red on ties of the bfloat16 rounding, negative zero, subnormal scales and results, or where one fused rounding
    differs from two."""
    up, down = 1 + 2.0**-8, 1 + 3 * 2.0**-8  # halfway between two bfloat16 numbers: to even
    tiny = 2.0**-149
    scale = torch.tensor([up, down, -up, 0.0, tiny, 2.0**-126, 1 + 2.0**-23, 3e38, 0.1])
    offset = torch.tensor([0.0, 0.0, 0.0, -0.0, -0.0, tiny, -1.0, 0.0, -0.1])
    codes = torch.arange(-128, 128).to(torch.int8)[:, None].expand(256, 9).contiguous()
    # 3e38 times more than 1 is infinite: the only code that reaches it is 1.
    codes[:, 7] = codes[:, 7].clamp(-1, 1)
    none = torch.empty(0, dtype=torch.int64, device=device)
    arguments = {
        "codes": codes.to(device), "scale": scale.to(device), "offset": offset.to(device), "exception_at": none,
        "exception_bits": none.to(torch.int16),
    }  # fmt: skip
    check(arguments, backend)
    fused = (codes.double() * scale.double() + offset.double()).float()
    assert bool((fused != codes.float() * scale + offset).any()), "the case must tell one rounding from two"


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_a_larger_batch(backend: str, device: torch.device) -> None:
    """Red when strides of codes or out are ignored: neighbouring rows and columns must stay as they were."""
    arguments = {name: tensor.to(device) for name, tensor in case(20, 40, 30).items()}
    expected = truth(*arguments.values())
    wide = torch.zeros(20, 100, dtype=torch.int8, device=device)
    wide[:, 7:47] = arguments["codes"]
    out = torch.full((24, 64), 5.0, dtype=torch.bfloat16, device=device)
    dequantize(**{**arguments, "codes": wide[:, 7:47]}, out=out[2:22, 3:43], backend=backend)
    np.testing.assert_array_equal(bits_of(out[2:22, 3:43]), expected)
    out[2:22, 3:43] = 5.0
    assert bool((out == 5.0).all())
    rows = torch.empty(30, 40, dtype=torch.bfloat16, device=device)
    check(arguments, backend, out=rows[4:24])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 8), (5, 0)])
def test_nothing_to_do(shape: tuple[int, int], backend: str, device: torch.device) -> None:
    """Red when an empty sample launches an empty grid or divides by its width."""
    arguments = {name: tensor.to(device) for name, tensor in case(*shape, 0).items()}
    assert dequantize(**arguments, backend=backend).shape == shape


def test_uint16_bits_are_taken_too(device: torch.device) -> None:
    """Red when the bits of numpy's dtype are converted as numbers."""
    arguments = {name: tensor.to(device) for name, tensor in case(6, 10, 12).items()}
    arguments["exception_bits"] = arguments["exception_bits"].view(torch.uint16)
    check(arguments, "torch")


def test_refusals() -> None:
    """Red when a wrong argument gives wrong numbers instead of a sentence."""
    good: dict[str, Any] = case(4, 6, 3)
    wrong = {
        "codes must be int8": {"codes": good["codes"].int()},
        "scale must be": {"scale": good["scale"].double()},
        "offset must be": {"offset": good["offset"][:5]},
        "exception_at must be": {"exception_at": good["exception_at"].int()},
        "exception_bits must be": {"exception_bits": good["exception_bits"][:2]},
        "out must be": {"out": torch.empty(4, 6)},
        "stride 1": {"codes": good["codes"].T.contiguous().T},
        "elements 0 .. 23": {"exception_at": torch.tensor([0, 3, 24])},
        "backend 'cuda' is unknown": {"backend": "cuda"},
    }
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=message.replace(".", r"\.")):
            dequantize(**{**good, **changes})


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_long_sample_on_the_gpu(backend: str, cuda: torch.device) -> None:
    """Red when the compiler fuses product and sum, flushes subnormals, or rows past 2^31 elements are misplaced."""
    generator = torch.Generator(device=cuda).manual_seed(0)
    num_rows, num_channels = 2**31 // 12288 + 40, 12288
    arguments: dict[str, Any] = {name: tensor.to(cuda) for name, tensor in case(1, num_channels, 0).items()}
    arguments["codes"] = torch.randint(
        -127, 128, (num_rows, num_channels), device=cuda, generator=generator, dtype=torch.int8
    )
    last = num_rows * num_channels - 1
    arguments["exception_at"] = torch.tensor([0, 5, last], device=cuda)
    arguments["exception_bits"] = torch.tensor([7, -3, 0x7FC1], device=cuda, dtype=torch.int16)
    found = dequantize(**arguments, backend=backend)
    expected = arguments["codes"][-32:].float() * arguments["scale"] + arguments["offset"]
    tail = found[-32:].clone()
    assert found.view(torch.int16).view(-1)[arguments["exception_at"]].tolist() == [7, -3, 0x7FC1]
    tail[-1, -1] = 0
    expected[-1, -1] = 0
    assert torch.equal(tail.view(torch.int16), expected.to(torch.bfloat16).view(torch.int16))
