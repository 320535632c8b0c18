import pytest

from ray_lora.errors import InvalidRequestError
from ray_lora.names import check_adapter_name


@pytest.mark.parametrize("name", ["a", "sql-v2", "Tenant_7.prod", "_x", "9" * 128])
def test_letters_digits_dot_dash_and_underscore_make_a_name(name: str) -> None:
    check_adapter_name(name, "base")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "../x",
        "/etc",
        "base:x",
        "a b",
        "a\n",
        "é",
        "a\0",
        "x" * 129,
        "-x",
        "base",
        None,
        7,
    ],
)
def test_paths_model_ids_and_odd_characters_are_no_names(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_adapter_name(name, "base")  # type: ignore[arg-type]
    assert caught.value.param == "lora_name"
