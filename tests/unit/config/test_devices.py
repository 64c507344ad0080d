"""Why there is no GPU: each reason with what helps."""

import pytest

from rustvllm.config import devices


@pytest.mark.parametrize(
    ("hidden", "has_cuda", "has_driver", "says"),
    [
        ("", True, True, "CUDA_VISIBLE_DEVICES is '', which hides every GPU; unset it"),
        ("-1", False, False, "CUDA_VISIBLE_DEVICES is '-1'"),
        (None, False, True, "built without CUDA; install a build with CUDA"),
        ("0", True, False, "there is no NVIDIA driver"),
        (None, True, True, "nvidia-smi shows which CUDA it supports"),
    ],
)
def test_why_there_is_no_gpu(monkeypatch, tmp_path, hidden, has_cuda, has_driver, says):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(devices, "torch_has_cuda", lambda: has_cuda)
    monkeypatch.setattr(devices, "_CONTROL_DEVICES", (tmp_path if has_driver else tmp_path / "nvidiactl",))
    assert says in devices.why_no_cuda()
