"""What a body costs grows with its length, whatever is in it."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable

import pytest

from api.http.body import MAX_ENTRIES, parse_json
from api.http.fields import WrongPicture, decode_data_url

SIZE = 2**22
MOST_TIMES = 8


def repeated(begin: str, part: str, end: str) -> str:
    """A text of about four megabytes in which one part comes again and again."""
    return begin + part * ((SIZE - len(begin) - len(end)) // len(part.encode())) + end


@pytest.mark.parametrize(
    ("begin", "part", "end"),
    [
        ("[", "{},", "0]"),
        ("[", "[],", "0]"),
        ("[", "1,", "0]"),
        ("", "[", ""),
        ("", '{"":', ""),
        ("{", '"a":1,', "}"),
        ('{"prompt":"', "a", '"}'),
        ('{"prompt":"', ",", '"}'),
        ('{"prompt":"', "\\u0041", '"}'),
        ('{"prompt":"', "\\ud83d\\ude00", '"}'),
        ('{"prompt":"', "\\ud83d", '"}'),
        ('{"prompt":"', "😀", '"}'),
        ('{"prompt":"😀', "a", '"}'),
        ('{"', "a", '":1}'),
        ('{"seed":', "1", "}"),
        ('{"seed":0.', "1", "}"),
        ('{"prompt":"', '\\"', '"}'),
        ("", " ", "{}"),
    ],
)
def test_a_json_text_takes_a_few_times_its_length(begin: str, part: str, end: str) -> None:
    text = repeated(begin, part, end)
    assert peak(lambda: parse_json(text)) < MOST_TIMES * SIZE


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        ("data:image/png", ";"),
        ("data:image/png;base64,", "A"),
        ("data:image/png;base64,", "_"),
        ("data:image/png;base64,", "\n"),
        ("data:image/png;base64,", "A \n"),
        ("data:image/png;base64,", "="),
        ("", " "),
        ("", "data:image/png;base64,"),
    ],
)
def test_a_data_url_takes_a_few_times_its_length(begin: str, part: str) -> None:
    url = repeated(begin, part, "")
    assert peak(lambda: decode_data_url(url)) < MOST_TIMES * SIZE


def peak(read: Callable[[], object]) -> int:
    """The most bytes that reading takes beside what it reads."""
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError, RecursionError, WrongPicture):
            read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_as_many_entries_as_may_be_are_read() -> None:
    assert len(parse_json("[" + "0," * (MAX_ENTRIES - 1) + "0]")) == MAX_ENTRIES
    with pytest.raises(ValueError, match=f"more than {MAX_ENTRIES} commas"):
        parse_json("[" + "0," * MAX_ENTRIES + "0]")
