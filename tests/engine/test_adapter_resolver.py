"""Adapters found by name: what is inside the directory is, and nothing else."""

from pathlib import Path

import pytest

from ray_lora.engine.adapter_resolver import FILES, DirectoryResolver


def make_adapter(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for file in FILES:
        (directory / file).write_text("")
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_adapter(tmp_path / "root" / "legal")
    make_adapter(tmp_path / "outside")
    return tmp_path / "root"


def find(root: Path, name: str) -> str | None:
    found = DirectoryResolver(root, "base").find(name)
    return found and found.path


def test_a_folder_directly_there_is_found(root: Path) -> None:
    assert find(root, "legal") == str(root / "legal")


OUTSIDE = ("..", "../outside", "legal/..", "legal/../../outside", "/etc", "..%2foutside", "~")
NO_NAMES = ("", ".", "./legal", "legal/", "legal\n", "a\0b", "x" * 300, "base", "absent")


@pytest.mark.parametrize("name", [*OUTSIDE, *NO_NAMES])
def test_no_other_name_leads_anywhere(name: str, root: Path) -> None:
    assert find(root, name) is None


def test_an_absolute_path_is_no_name(root: Path) -> None:
    assert find(root, str(root / "legal")) is None
    assert find(root, str(root.parent / "outside")) is None


def test_a_folder_in_a_folder_is_not_found(root: Path) -> None:
    make_adapter(root / "team" / "legal2")
    assert find(root, "legal2") is None


def test_a_folder_that_links_out_is_not_found(root: Path) -> None:
    (root / "linked").symlink_to(root.parent / "outside")
    assert find(root, "linked") is None


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_links_out_is_not_found(file: str, root: Path) -> None:
    (root / "legal" / file).unlink()
    (root / "legal" / file).symlink_to(root.parent / "outside" / file)
    assert find(root, "legal") is None


def test_links_that_stay_inside_are_followed(root: Path) -> None:
    (root / "law").symlink_to("legal")
    assert find(root, "law") == str(root / "law")


def test_the_directory_itself_may_be_a_link(root: Path) -> None:
    (root.parent / "alias").symlink_to(root)
    assert find(root.parent / "alias", "legal") == str(root / "legal")


@pytest.mark.parametrize("file", FILES)
def test_a_folder_without_both_files_is_not_found(file: str, root: Path) -> None:
    (root / "legal" / file).unlink()
    assert find(root, "legal") is None


def test_a_directory_that_has_vanished_holds_nothing(tmp_path: Path) -> None:
    assert find(tmp_path / "gone", "legal") is None
