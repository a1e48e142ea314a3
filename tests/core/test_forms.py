"""Forms as browsers and libraries send them, in pieces of any size."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay.core import limits
from forebay.core.errors import Invalid
from forebay.core.s3rules.compat.forms import Field, FileEnds, FileStarts, FormParser, parse_boundary

BOUNDARY = b"----WebKitFormBoundary7MA4YWxkTrZu0gW"


def part(name, value, filename=None, content_type=None):
    head = f'Content-Disposition: form-data; name="{name}"'
    if filename is not None:
        head += f'; filename="{filename}"'
    if content_type:
        head += f"\r\nContent-Type: {content_type}"
    return b"--" + BOUNDARY + b"\r\n" + head.encode() + b"\r\n\r\n" + value + b"\r\n"


END = b"--" + BOUNDARY + b"--\r\n"


def read(body, cuts=()):
    """Fields, the file's name and the file's bytes, of a body cut at these places."""
    parser = FormParser(BOUNDARY)
    fields, name, data, ended = [], None, b"", 0
    for start, stop in itertools.pairwise([0, *sorted(cuts), len(body)]):
        for event in parser.feed(body[start:stop]):
            if isinstance(event, Field):
                assert name is None, "a field behind the file"
                fields.append(tuple(event))
            elif isinstance(event, FileStarts):
                assert name is None
                name = event.filename
            elif isinstance(event, FileEnds):
                ended += 1
            else:
                assert name is not None
                assert not ended
                assert event
                data += event
    parser.finish()
    assert ended == 1
    return fields, name, data


def test_fields_then_the_file():
    body = part("Key", b"a/${filename}") + part("x-amz-meta-who", "Zoë".encode()) + part("empty", b"")
    body += part("file", b"\r\n--\r\nbytes\x00\r\n-", "photo.jpg", "image/jpeg") + part("submit", b"Send") + END
    assert read(body) == (
        [("key", "a/${filename}"), ("x-amz-meta-who", "Zoë"), ("empty", "")],
        "photo.jpg",
        b"\r\n--\r\nbytes\x00\r\n-",
    )


BODY = part("key", b"k\r\nl") + part("file", b"\r\n--" + BOUNDARY[:-1] + b"\r\r\n\r\n", "f") + part("late", b"x") + END


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, len(BODY)), max_size=12))
@example(list(range(len(BODY))))
def test_the_cuts_do_not_matter(cuts):
    assert read(BODY, cuts) == ([("key", "k\r\nl")], "f", b"\r\n--" + BOUNDARY[:-1] + b"\r\r\n\r\n")


_near = st.sampled_from([b"\r", b"\n", b"\r\n", b"-", b"\r\n--", b"\r\n--" + BOUNDARY[:5], b"x", b"\x00\xff"])


@settings(max_examples=150, deadline=None)
@given(st.lists(_near, max_size=12).map(b"".join), st.integers(1, 9))
def test_a_file_that_looks_like_boundaries_arrives_whole(data, step):
    body = b"preamble\r\n" + part("file", data) + END + b"epilogue"
    assert read(body, range(step, len(body), step)) == ([], "", data)


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_parts_without_a_body_are_empty(step):
    bare = b"--" + BOUNDARY + b'\r\nContent-Disposition: form-data; name="%b"\r\n\r\n'
    body = bare % b"note" + bare % b"file" + END
    assert read(body, range(step, len(body), step)) == ([("note", "")], "", b"")


@pytest.mark.parametrize(
    "given_name, understood",
    [
        ("/pictures/photo.jpg", "photo.jpg"),
        ("C:\\\\pictures\\\\photo.jpg", "photo.jpg"),
        ("C:\\pictures\\photo.jpg", "photo.jpg"),
        ("say %22cheese%22.jpg", 'say "cheese".jpg'),
        ('say \\"cheese\\".jpg', 'say "cheese".jpg'),
        ("photo;name=x.jpg", "photo;name=x.jpg"),
        ("../", ""),
    ],
)
def test_names_of_files_lose_their_directories(given_name, understood):
    assert read(part("file", b"x", given_name) + END)[1] == understood


def test_parameters_are_read_in_any_order_and_case():
    body = b"--" + BOUNDARY + b" \t\r\ncontent-type: a/b\r\nCONTENT-DISPOSITION: form-data;filename=a.txt; NAME=FILE"
    assert read(body + b"\r\n\r\nx\r\n" + END) == ([], "a.txt", b"x")


@pytest.mark.parametrize(
    "body, code",
    [
        (b"", "MalformedPOSTRequest"),
        (part("file", b"cut short")[:-9], "MalformedPOSTRequest"),
        (part("file", b"no end"), "MalformedPOSTRequest"),
        (part("key", b"k") + END, "InvalidArgument"),
        (END, "InvalidArgument"),
        (b"--" + BOUNDARY + b"junk\r\n" + END, "MalformedPOSTRequest"),
        (b"--" + BOUNDARY + b"\r\nContent-Type: a/b\r\n\r\nx\r\n" + END, "MalformedPOSTRequest"),
        (b"--" + BOUNDARY + b"\r\nContent-Disposition: attachment; name=x\r\n\r\nx\r\n" + END, "MalformedPOSTRequest"),
        (part("", b"no name") + END, "MalformedPOSTRequest"),
        (part("key", b"\xff") + END, "MalformedPOSTRequest"),
        (part("key", b"k" * 21_000) + part("file", b"") + END, "MaxPostPreDataLengthExceededError"),
        (part("a", b"k") * 300 + part("file", b"") + END, "MaxPostPreDataLengthExceededError"),
        (b"\0" * 30_000, "MaxPostPreDataLengthExceededError"),
        (part("file", b"") + part("late", b"k" * 30_000) + END, "MaxPostPreDataLengthExceededError"),
    ],
)
@pytest.mark.parametrize("step", [7, 100_000])
def test_what_is_no_form_is_refused(body, code, step):
    with pytest.raises(Invalid) as caught:
        read(body, range(step, len(body), step))
    assert caught.value.code == code


def test_little_is_held_however_long_the_file():
    parser = FormParser(BOUNDARY)
    parser.feed(part("file", b"")[:-2])
    for _ in range(50):
        (piece,) = parser.feed(b"x" * 65_536 + b"\r\n--")[-1:]
        assert len(piece) >= 65_536
    assert len(parser._held) <= limits.FORM_BYTES_MAX


@pytest.mark.parametrize(
    "header, boundary",
    [
        ("multipart/form-data; boundary=abc", b"abc"),
        ('Multipart/Form-Data; charset=utf-8; boundary="a b"', b"a b"),
        ("multipart/form-data;boundary=abc; charset=x", b"abc"),
    ],
)
def test_the_boundary_is_read_from_the_header(header, boundary):
    assert parse_boundary(header) == boundary


@pytest.mark.parametrize(
    "header", ["", "text/plain", "multipart/form-data", "multipart/form-data; boundary=" + "b" * 71]
)
def test_a_header_without_a_boundary_is_refused(header):
    with pytest.raises(Invalid) as caught:
        parse_boundary(header)
    assert caught.value.code == "MalformedPOSTRequest"


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(BODY) - 1), st.integers(0, 12), st.binary(max_size=8), st.integers(1, 50))
def test_a_damaged_form_is_read_or_refused(at, removed, added, step):
    damaged = BODY[:at] + added + BODY[at + removed :]
    code = ""
    try:
        read(damaged, range(step, len(damaged), step))
    except Invalid as error:
        code = error.code
    assert code in ("", "MalformedPOSTRequest", "InvalidArgument", "MaxPostPreDataLengthExceededError")
