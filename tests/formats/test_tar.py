"""What makes a sample in a tar, and what is an error instead of half of one."""

from __future__ import annotations

import contextlib
import io
import tarfile
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import BOTH, DATA, Sample, archive, indexed, streamed

from bucketfeed.errors import FormatError
from bucketfeed.formats import tar

Read = Callable[[bytes, str], list[Sample]]

both_ways = pytest.mark.parametrize("read", BOTH)


def case(name: str) -> tuple[bytes, str]:
    return (DATA / name).read_bytes(), name


def fields(samples: list[Sample]) -> list[tuple[str, set[str]]]:
    return [(sample["__key__"], sample.keys() - {"__key__"}) for sample in samples]


@both_ways
def test_c058_the_first_dot_of_the_base_name_ends_the_key(read: Read) -> None:
    assert fields(read(*case("dots.tar"))) == [
        ("train.v1/0001", {"cls", "jpg"}),
        ("train.v1/0002", {"cls", "seg.png"}),
        ("train.v1/take 2", {"0 (b).mp3", "0 (b).json"}),
    ]


@both_ways
def test_c059_members_that_are_not_adjacent_are_an_error_and_never_halves(read: Read) -> None:
    with pytest.raises(FormatError, match=r"interleaved\.tar: member '0\.b' at byte 2048 .* sample '0'"):
        read(*case("interleaved.tar"))


@both_ways
def test_c062_gnu_long_names_are_whole(read: Read) -> None:
    first, second = read(*case("long-gnu.tar"))
    assert len(first["__key__"]) == 116
    assert second == {"__key__": "z", "jpg": b"Z", "cls": second["cls"]}


@both_ways
def test_c062_pax_names_are_whole(read: Read) -> None:
    first, _ = read(*case("long-pax.tar"))
    assert len(first["__key__"]) == 187
    assert first["__key__"].count("\u00fc") == 100


@both_ways
def test_c062_ustar_prefix_and_name_are_joined(read: Read) -> None:
    (sample,) = read(*case("long-ustar-prefix.tar"))
    assert len(sample["__key__"]) == 173


@both_ways
@pytest.mark.parametrize("name", ["cut-in-data.tar", "cut-in-header.tar"])
def test_c063_a_cut_tar_is_an_error_that_names_it(read: Read, name: str) -> None:
    with pytest.raises(FormatError, match=rf"{name}: ends too early, inside .* at byte 2560"):
        read(*case(name))


def test_c063_whole_samples_before_a_cut_come_first() -> None:
    samples = tar.iter_tar([archive([(f"{i}.txt", bytes(700)) for i in range(3)])[:3700]], "s.tar")
    assert next(samples)["__key__"] == "0"
    with pytest.raises(FormatError):
        list(samples)


@both_ways
@pytest.mark.parametrize("name", ["no-end-blocks.tar", "junk-after-end.tar"])
def test_c063_neither_a_missing_end_mark_nor_bytes_after_it_matter(read: Read, name: str) -> None:
    assert [(s["__key__"], len(s["txt"])) for s in read(*case(name))] == [("0", 700), ("1", 700)]


@both_ways
def test_a_second_archive_behind_the_end_mark_is_left_out_with_a_word(
    read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(read(archive([("a.txt", b"1")]) + archive([("b.txt", b"2")]), "s.tar")) == 1
    assert "s.tar: another archive follows the end mark, at byte 10240" in caplog.text
    caplog.clear()
    read(*case("junk-after-end.tar"))
    assert not caplog.text


@both_ways
def test_c063_an_archive_of_end_blocks_has_no_samples(read: Read) -> None:
    assert read(*case("only-end-blocks.tar")) == []


@both_ways
def test_c063_an_empty_object_is_an_error(read: Read) -> None:
    with pytest.raises(FormatError, match=r"zero-bytes\.tar: an empty object is not a tar"):
        read(*case("zero-bytes.tar"))


@both_ways
def test_c063_an_html_page_is_not_a_tar(read: Read) -> None:
    with pytest.raises(FormatError, match=r"html-not-tar\.tar: not a tar archive, it starts with b'<html>"):
        read(*case("html-not-tar.tar"))


@both_ways
def test_c065_folders_links_dot_files_and_bare_names_make_no_sample(read: Read) -> None:
    samples = read(*case("junk-members.tar"))
    assert fields(samples) == [("imgs/0001", {"jpg", "cls"}), ("imgs/0002", {"jpg", "txt"})]
    assert samples[1]["txt"] == b""


@both_ways
def test_a_dot_file_between_the_members_of_a_sample_does_not_part_them(read: Read) -> None:
    data = archive([("a.jpg", b"1"), ("._a.cls", b"mac"), ("a.cls", b"2"), ("b.jpg", b"3")])
    assert read(data, "s.tar") == [{"__key__": "a", "jpg": b"1", "cls": b"2"}, {"__key__": "b", "jpg": b"3"}]


@both_ways
def test_a_field_twice_is_an_error(read: Read) -> None:
    with pytest.raises(FormatError, match=r"sample 'a' has field 'jpg' twice, again at byte 1024"):
        read(archive([("a.jpg", b"1"), ("a.JPG", b"2")]), "s.tar")


@both_ways
def test_a_damaged_header_is_an_error(read: Read) -> None:
    data = bytearray(archive([("a.jpg", b"1"), ("b.jpg", b"2")]))
    data[1024 + 3] ^= 0x20
    with pytest.raises(FormatError, match=r"s\.tar: damaged tar header at byte 1024"):
        read(bytes(data), "s.tar")


@both_ways
def test_a_compressed_tar_is_told_to_be_unpacked(read: Read) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz"):
        pass
    with pytest.raises(FormatError, match=r"not a tar archive.*unpack it"):
        read(file.getvalue(), "s.tar")


@both_ways
def test_a_global_pax_header_is_fine_unless_it_speaks_of_members(read: Read) -> None:
    def with_global(headers: dict[str, str]) -> bytes:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as out:
            out.addfile(tarfile.TarInfo("a.txt"))
        return file.getvalue()

    assert read(with_global({"comment": "by hand"}), "s.tar") == [{"__key__": "a", "txt": b""}]
    with pytest.raises(FormatError, match="global PAX header at byte 0 sets 'path'"):
        read(with_global({"path": "b.txt"}), "s.tar")


@both_ways
def test_sizes_may_stand_in_base_256(read: Read) -> None:
    data = bytearray(archive([("a.jpg", b"12345"), ("b.jpg", b"2")]))
    data[124:136] = b"\x80" + (5).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    assert read(bytes(data), "s.tar")[0] == {"__key__": "a", "jpg": b"12345"}


@both_ways
def test_a_size_beyond_all_objects_is_an_error(read: Read) -> None:
    data = bytearray(archive([("a.jpg", b"12345")]))
    data[124:136] = b"\x80" + (1 << 70).to_bytes(11, "big")
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    with pytest.raises(FormatError, match=r"s\.tar.*1180591620717411303424 bytes"):
        read(bytes(data), "s.tar")


@both_ways
def test_names_that_are_not_utf_8_stay_apart(read: Read) -> None:
    data = archive([("\udcff.jpg", b"1"), ("\udcfe.jpg", b"2")])
    first, second = read(data, "s.tar")
    assert first["__key__"] != second["__key__"]


def test_a_stream_holds_no_more_than_two_samples() -> None:
    given_out = 0

    def buffers() -> object:
        nonlocal given_out
        data = archive([(f"{i}.bin", bytes(10_000)) for i in range(100)])
        for at in range(0, len(data), 4096):
            given_out = at + 4096
            yield data[at : at + 4096]

    ends = [given_out for _ in tar.iter_tar(buffers(), "s.tar")]  # type: ignore[arg-type]
    assert max(end - 10_752 * (i + 1) for i, end in enumerate(ends)) <= 10_752 + 2 * 4096


keys = st.text(st.characters(exclude_characters="./\0", exclude_categories=["Cs", "Cc"]), min_size=1, max_size=150)
names = st.lists(
    st.tuples(st.lists(keys, max_size=2), keys, st.sets(st.sampled_from(["jpg", "cls", "seg.png", "x"]), min_size=1)),
    max_size=6,
    unique_by=lambda row: ("/".join(row[0]), row[1]),
)
formats = st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])


@st.composite
def tars(draw: st.DrawFn) -> tuple[bytes, list[Sample]]:
    samples: list[Sample] = []
    members = []
    for folders, base, extensions in draw(names):
        sample: Sample = {"__key__": "/".join([*folders, base])}
        for extension in sorted(extensions):
            sample[extension] = draw(st.binary(max_size=1500))
            members.append((f"{sample['__key__']}.{extension}", sample[extension]))
        samples.append(sample)
    try:
        return archive(members, draw(formats)), samples
    except ValueError:  # a name that is too long for ustar
        return archive(members, tarfile.PAX_FORMAT), samples


@settings(max_examples=150, deadline=None)
@given(tars(), st.integers(1, 3000))
def test_any_tar_gives_what_was_written_both_ways(made: tuple[bytes, list[Sample]], step: int) -> None:
    data, samples = made
    assert streamed(data, step=step) == samples
    assert indexed(data, step=step) == samples


@settings(max_examples=150, deadline=None)
@given(tars(), st.data())
def test_a_tar_cut_anywhere_gives_whole_samples_or_an_error(
    made: tuple[bytes, list[Sample]], draw: st.DataObject
) -> None:
    data, samples = made
    cut = data[: draw.draw(st.integers(1, len(data)))]
    got: list[Sample] = []
    failed = False
    try:
        for sample in tar.iter_tar([cut], "s.tar"):
            got.append(sample)
    except FormatError:
        failed = True
    # A cut between two members cannot be told from a missing end mark: only then the last sample lacks fields.
    whole = got[:-1] if got and got[-1] not in samples else got
    assert whole == samples[: len(whole)]
    if whole != got:
        last = samples[len(whole)]
        assert not failed
        assert got[-1].items() < last.items()
    try:
        assert indexed(cut) == got
        assert not failed
    except FormatError:
        assert failed


@settings(max_examples=150, deadline=None)
@given(tars(), st.data())
def test_damage_anywhere_is_never_anything_but_a_format_error(
    made: tuple[bytes, list[Sample]], draw: st.DataObject
) -> None:
    data = bytearray(made[0])
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    for read in BOTH:
        with contextlib.suppress(FormatError):
            read(bytes(data))
