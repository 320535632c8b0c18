import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_lora.engine.stop_strings import StopStrings

TEXT = st.text("ab", max_size=24)
STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


def search(text: str, stops: tuple[str, ...], include_in_output: bool) -> tuple[str, str | None]:
    """The definition: the shortest beginning of the text that ends with a stop string."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include_in_output else end - len(stop)], stop
    return text, None


def push_all(pieces: list[str], stops: tuple[str, ...], include_in_output: bool) -> tuple[str, str | None]:
    """What comes out of the stream, with nothing pushed after a stop."""
    stop_strings = StopStrings(stops, include_in_output)
    out = ""
    for piece in pieces:
        text, stop = stop_strings.push(piece)
        out += text
        if stop is not None:
            return out, stop
    return out + stop_strings.flush(), None


@given(st.lists(st.text("abc", max_size=4), max_size=12), STOPS, st.booleans())
def test_the_result_is_that_of_searching_the_full_text_whatever_the_pieces(
    pieces: list[str], stops: tuple[str, ...], include_in_output: bool
) -> None:
    assert push_all(pieces, stops, include_in_output) == search("".join(pieces), stops, include_in_output)


@given(st.lists(st.text("abc", max_size=4), max_size=12), STOPS)
def test_nothing_is_let_out_that_could_begin_a_stop_string(pieces: list[str], stops: tuple[str, ...]) -> None:
    stop_strings = StopStrings(stops, include_in_output=False)
    out, text = "", ""
    for piece in pieces:
        gained, stop = stop_strings.push(piece)
        out, text = out + gained, text + piece
        if stop is not None:
            return
        rest = text[len(out) :]
        assert text.startswith(out)
        assert len(rest) < max(map(len, stops))
        for cut in range(len(out)):
            assert not any(stop.startswith(text[cut:]) for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "out", "stop"),
    [
        ("hello END", ("END",), "hello ", "END"),
        ("hello EN", ("END",), "hello EN", None),
        ("abcdef", ("abcdef", "cd"), "ab", "cd"),
        ("abcdef", ("cd", "abcdef"), "ab", "cd"),
        ("abc", ("abc", "ab"), "", "ab"),
        ("abc", ("c", "bc"), "a", "bc"),
        ("abab", ("b", "ab"), "", "ab"),
        ("aab", ("ab",), "a", "ab"),
        ("ENEND", ("END",), "EN", "END"),
        ("x\n\ny", ("\n\n",), "x", "\n\n"),
        ("é漢字", ("漢",), "é", "漢"),
    ],
)
def test_of_several_the_one_that_ends_first_counts_then_the_longest(
    text: str, stops: tuple[str, ...], out: str, stop: str | None
) -> None:
    assert push_all(list(text), stops, include_in_output=False) == (out, stop)
    assert push_all([text], stops, include_in_output=False) == (out, stop)


def test_the_docstring_example() -> None:
    stop_strings = StopStrings(("END",), include_in_output=False)
    assert stop_strings.push("abE") == ("a", None)
    assert stop_strings.push("ND!") == ("b", "END")


@pytest.mark.parametrize(("include", "out"), [(True, "aEND"), (False, "a")])
def test_the_stop_string_is_part_of_the_output_only_if_asked_for(include: bool, out: str) -> None:
    assert push_all(["aE", "ND", "b"], ("END",), include) == (out, "END")


@given(st.lists(TEXT, max_size=6))
def test_without_stop_strings_nothing_is_held_back(pieces: list[str]) -> None:
    stop_strings = StopStrings((), include_in_output=False)
    assert [stop_strings.push(piece) for piece in pieces] == [(piece, None) for piece in pieces]
    assert stop_strings.flush() == ""


def test_before_min_tokens_nothing_is_searched_or_held_back() -> None:
    stop_strings = StopStrings(("END",), include_in_output=False)
    assert stop_strings.push("aENDE", may_stop=False) == ("aENDE", None)
    assert stop_strings.push("ND") == ("", None)
    assert stop_strings.push("b") == ("N", None)
    assert stop_strings.flush() == "Db"
    assert stop_strings.flush() == ""
