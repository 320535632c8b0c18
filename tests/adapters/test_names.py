import pytest

from ray_lora.adapters.names import check_adapter_name
from ray_lora.errors import InvalidRequestError


@pytest.mark.parametrize("name", ["a", "sql-v2", "Tenant_7.prod", "-x", "9" * 128])
def test_letters_digits_dot_dash_and_underscore_make_a_name(name: str) -> None:
    check_adapter_name(name)


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "../x", "/etc", "base:x", "a b", "a\n", "é", "a\0", "x" * 129, None, 7]
)
def test_paths_model_ids_and_odd_characters_are_no_names(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_adapter_name(name)
    assert caught.value.param == "lora_name"
