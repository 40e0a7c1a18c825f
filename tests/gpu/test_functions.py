"""Every elementary function over all 2^32 inputs: CPU against GPU by bytes."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.twins import F32, I32, backends, first_difference

pytestmark = pytest.mark.gpu
CHUNK = 1 << 27


@pytest.mark.parametrize("name", ["exp", "exp2", "log", "sigmoid", "silu", "silu_grad", "rsqrt", "sqrt", "recip", "sin", "cos"])
def test_all_inputs(name: str) -> None:
    cpu, gpu = backends()
    count = torch.arange(CHUNK, dtype=I32)
    host_out = torch.empty(CHUNK, dtype=F32, pin_memory=True)
    device_out, reference = gpu.empty(CHUNK), gpu.empty(CHUNK)
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        bits = count + start
        on_device = bits.cuda()
        gpu.call("mok_function", name=name.encode(), count=CHUNK, **{"in": on_device.view(F32), "out": device_out})
        cpu.call("mok_function", name=name.encode(), count=CHUNK, **{"in": bits.view(F32), "out": host_out})
        reference.copy_(host_out)
        if not torch.equal(device_out.view(I32), reference.view(I32)):
            raise AssertionError(f"{name} from pattern {start & 0xFFFFFFFF:#x}: {first_difference(name, device_out, host_out)}")
