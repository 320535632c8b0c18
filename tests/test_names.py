import pytest

from ray_lora.errors import InvalidRequestError
from ray_lora.names import check_adapter_name, url_scheme, without_credentials


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


@pytest.mark.parametrize(
    ("source", "scheme", "shown"),
    [
        ("/adapters/a", None, "/adapters/a"),
        ("~/a:b//c", None, "~/a:b//c"),
        ("", None, ""),
        ("S3://bucket/a", "s3", "s3://bucket/a"),
        ("s3://KEY:SECRET@bucket/a", "s3", "s3://bucket/a"),
        ("https://me:p@ss@host:8443/a/b?sig=SECRET#SECRET", "https", "https://host:8443/a/b"),
        ("hf://team/adapters@v2/legal", "hf", "hf://team/adapters@v2/legal"),
    ],
)
def test_urls_are_told_from_paths_and_shown_without_credentials(source: str, scheme: str | None, shown: str) -> None:
    assert url_scheme(source) == scheme
    assert without_credentials(source) == shown


def test_what_is_no_url_is_refused_without_showing_it() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        without_credentials("http://[me:SECRET@host/a")
    assert "SECRET" not in str(caught.value)
