"""``LoRARequest``: the values that its fields may have."""

import pytest

from rustvllm.exceptions import InvalidRequestError
from rustvllm.lora.request import LoRARequest


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lora_int_id": 0}, "lora_int_id must be an integer of at least 1, got 0"),
        ({"lora_int_id": True}, "lora_int_id must be an integer"),
        ({"lora_path": None}, "lora_path must be a string"),
        ({"is_3d_lora_weight": True}, "is_3d_lora_weight must be False, got True: .* fused experts"),
        ({"is_3d_lora_weight": None}, "is_3d_lora_weight must be False, got None"),
        ({"is_3d_lora_weight": 0}, "is_3d_lora_weight must be False, got 0"),
        ({"is_3d_lora_weight": float("nan")}, "is_3d_lora_weight must be False, got nan"),
        ({"is_3d_lora_weight": "x" * 5000}, "is_3d_lora_weight must be False, got 'xxx"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else next(iter(value)),
)
def test_what_a_field_cannot_be_is_refused_by_name(fields, says):
    with pytest.raises(InvalidRequestError, match=says) as caught:
        LoRARequest(**{"lora_name": "a", "lora_int_id": 1, **fields})
    assert caught.value.param == "lora_request"
    assert len(str(caught.value)) < 300


def test_vllms_fields_by_position():
    request = LoRARequest("a", 3, "/folder", "base", True, False)
    assert (request.name, request.adapter_id, request.path) == ("a", 3, "/folder")
    assert (request.base_model_name, request.load_inplace, request.is_3d_lora_weight) == ("base", True, False)
    assert request == LoRARequest("a", 3)
