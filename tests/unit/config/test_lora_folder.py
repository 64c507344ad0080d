"""The folder of an adapter: errors say once what is wrong with it."""

import pytest

from rustvllm.config.lora import check_adapter_folder
from rustvllm.exceptions import ConfigError


def test_a_missing_folder_is_reported_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        check_adapter_folder("polite", tmp_path / "none")
    assert str(error.value) == f"adapter 'polite': there is no folder {tmp_path}/none"


@pytest.mark.parametrize("path", ["a\0b", "~no-such-user-here/adapter"])
def test_a_path_that_the_system_refuses_is_an_error(path):
    with pytest.raises(ConfigError, match=r"^adapter 'polite': (the folder .* cannot be read|there is no folder)"):
        check_adapter_folder("polite", path)
