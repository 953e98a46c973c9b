"""Bytes of a field to values: one rule for each kind, and a named error for all that is damaged."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import bucketfeed as bf
from bucketfeed.errors import ConfigError, DecodeError
from bucketfeed.formats import decoders

PICTURES = Path(__file__).parents[1] / "data" / "pictures"


def picture(name: str) -> bytes:
    return (PICTURES / name).read_bytes()


def saved(image: Image.Image, format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def colour(pixel: np.ndarray) -> str:
    return {(True, False, False): "R", (False, True, False): "G", (False, False, True): "B"}.get(
        tuple((pixel > 127).tolist()), "W"
    )


@pytest.mark.parametrize(
    ("orientation", "width", "height", "corners"),
    [
        (1, 48, 32, "RGBW"),
        (2, 48, 32, "GRWB"),
        (3, 48, 32, "WBGR"),
        (4, 48, 32, "BWRG"),
        (5, 32, 48, "RBGW"),
        (6, 32, 48, "BRWG"),
        (7, 32, 48, "WGBR"),
        (8, 32, 48, "GWRB"),
    ],
)
@pytest.mark.parametrize("mode", ["RGB", None])
def test_c087_pictures_stand_upright(orientation: int, width: int, height: int, corners: str, mode: Any) -> None:
    pixels = decoders.image(picture(f"exif-{orientation}.jpg"), mode)
    assert pixels.shape == (height, width, 3)
    spots = [pixels[2, 2], pixels[2, -3], pixels[-3, 2], pixels[-3, -3]]
    assert "".join(colour(spot) for spot in spots) == corners


def test_c087_the_orientation_of_a_tiff_is_applied_once() -> None:
    stored = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    pixels = decoders.image(saved(stored, "TIFF", tiffinfo={0x0112: 6}), None)
    assert pixels[:, :, 0].tolist() == [[3, 0], [4, 1], [5, 2]]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF:UserWarning")
def test_a_damaged_exif_block_does_not_lose_the_picture() -> None:
    data = saved(Image.new("RGB", (4, 3)), "JPEG", exif=b"Exif\0\0MM\0*\0\0\xff\xff\xff\xff")
    assert decoders.image(data).shape == (3, 4, 3)


def test_c089_16_bit_grey_is_kept_or_scaled_by_rule() -> None:
    values = [[0, 255, 256], [32767, 32768, 65535]]
    kept = decoders.image(picture("gray16.png"), None)
    assert kept.dtype == np.uint16
    assert kept[:, :, 0].tolist() == values
    scaled = decoders.image(picture("gray16.png"))
    assert scaled.dtype == np.uint8
    assert scaled[:, :, 0].tolist() == [[round(value / 257) for value in row] for row in values]
    assert (scaled == scaled[:, :, :1]).all()
    assert decoders.image(picture("gray16.png"), "RGBA")[:, :, 3].tolist() == [[255] * 3] * 2


def test_c089_16_bit_colour_gives_its_high_byte() -> None:
    assert decoders.image(picture("rgb16.png"))[0].tolist() == [[255, 1, 0], [255, 2, 0]]


@pytest.mark.parametrize("mode", ["RGB", "L", None])
def test_c089_one_bit_becomes_0_and_255(mode: Any) -> None:
    assert decoders.image(picture("one-bit.png"), mode)[:, :, 0].tolist() == [[0, 255], [255, 0]]


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("half.jpg", r"not a whole picture \(2145 bytes"),
        ("no-end-mark.jpg", r"not a whole picture \(4289 bytes"),
        ("zero.jpg", r"not a picture \(0 bytes\)"),
        ("html.jpg", r"not a picture \(61 bytes that start with b\"<\?xml"),
        ("flipped-byte.png", r"not a whole picture \(12420 bytes"),
    ],
)
def test_c091_a_broken_picture_is_an_error_that_says_what_it_is(name: str, start: str) -> None:
    with pytest.raises(DecodeError, match=start):
        decoders.image(picture(name))


def test_c091_a_good_picture_decodes() -> None:
    pixels = decoders.image(picture("good.jpg"))
    assert (pixels.shape, pixels.dtype, pixels.flags.writeable) == ((64, 64, 3), np.uint8, True)


def test_c091_a_broken_picture_is_named_by_object_and_by_shard(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "half.jpg").write_bytes(picture("half.jpg"))
    dataset = bf.open_dataset(tmp_path / "raw", decode=decoders.auto, cache=None)
    with pytest.raises(DecodeError, match=r"sample 'half'.*raw/half\.jpg.*field 'jpg': not a whole picture"):
        dataset[0]


@pytest.mark.parametrize("stored", ["L", "LA", "P", "1", "RGBA", "CMYK"])
def test_every_kind_of_picture_becomes_rgb(stored: str) -> None:
    red = Image.new("RGB", (4, 3), (255, 0, 0)).convert("RGBA" if stored == "LA" else "RGB").convert(stored)
    data = saved(red, "TIFF" if stored in ("CMYK", "LA") else "PNG")
    pixels = decoders.image(data)
    assert (pixels.shape, pixels.dtype) == ((3, 4, 3), np.uint8)
    if stored in ("P", "RGBA", "CMYK"):
        assert (pixels == [255, 0, 0]).all()
    assert decoders.image(data, "L").shape == (3, 4, 1)


def test_transparency_is_dropped_and_not_blended() -> None:
    data = saved(Image.new("RGBA", (1, 1), (10, 20, 30, 0)), "PNG")
    assert decoders.image(data).tolist() == [[[10, 20, 30]]]
    assert decoders.image(data, "RGBA").tolist() == [[[10, 20, 30, 0]]]


def test_values_without_a_range_are_given_only_as_they_are() -> None:
    data = saved(Image.fromarray(np.array([[0.5, -3.0]], np.float32)), "TIFF")
    assert decoders.image(data, None).tolist() == [[[0.5], [-3.0]]]
    with pytest.raises(DecodeError, match=r"'F'.*pass mode=None"):
        decoders.image(data)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ConfigError, match="not 'BGR'"):
        decoders.image(picture("good.jpg"), "BGR")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:Corrupt EXIF:UserWarning", "ignore:Truncated File Read:UserWarning")
@pytest.mark.parametrize("format", ["PNG", "WEBP", "BMP", "TIFF", "JPEG", "GIF"])
def test_a_picture_cut_anywhere_is_an_error_or_all_of_its_pixels(format: str) -> None:
    pixels = np.random.default_rng(5).integers(0, 256, (16, 16, 3), np.uint8)
    data = saved(Image.fromarray(pixels), format)
    whole = decoders.image(data)
    errors = 0
    cuts = range(0, len(data), 7)
    for cut in cuts:
        try:
            got = decoders.image(data[:cut])
        except DecodeError:
            errors += 1
        else:
            np.testing.assert_array_equal(got, whole)  # what was cut off was an end mark
    assert errors >= len(cuts) - 3


def test_json_text_and_class_numbers() -> None:
    assert decoders.json('\ufeff{"a": "\u00fc"}'.encode()) == {"a": "\u00fc"}
    assert decoders.text(memoryview("\ufeff\u00fc\n".encode())) == "\u00fc\n"
    assert decoders.cls(b" 17\n") == 17


@pytest.mark.parametrize(
    ("decode", "data", "what"),
    [
        (decoders.json, b'{"a":', "JSON"),
        (decoders.json, b"", "JSON"),
        (decoders.text, b"\xff\xfe", "UTF-8 text"),
        (decoders.cls, b"cat", "class number"),
        (decoders.cls, b"", "class number"),
        (decoders.npy, b"\x93NUMPY", "npy"),
    ],
)
def test_what_does_not_fit_says_what_was_expected(decode: Any, data: bytes, what: str) -> None:
    with pytest.raises(DecodeError, match=what):
        decode(data)


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def test_arrays_come_back_in_native_byte_order() -> None:
    array = decoders.npy(npy(np.arange(6, dtype=">i4").reshape(2, 3)))
    assert array.dtype.isnative
    assert array.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_pickled_and_cut_arrays_are_refused() -> None:
    with pytest.raises(DecodeError, match="Object arrays cannot be loaded"):
        decoders.npy(npy(np.array([{}])))
    with pytest.raises(DecodeError, match="npy"):
        decoders.npy(npy(np.arange(100))[:-8])


def test_auto_goes_by_the_last_extension_and_leaves_the_rest() -> None:
    sample = {
        "__key__": "a.cls",
        "seg.png": picture("one-bit.png"),
        "cls": b"3",
        "json": b"[1]",
        "npy": npy(np.zeros(2)),
        "mp4": b"film",
        "txt": b"t",
    }
    decoded = decoders.auto(sample)
    assert decoded["seg.png"].shape == (2, 2, 3)
    assert decoded["npy"].tolist() == [0.0, 0.0]
    assert {name: decoded[name] for name in ("__key__", "cls", "json", "mp4", "txt")} == {
        "__key__": "a.cls",
        "cls": 3,
        "json": [1],
        "mp4": b"film",
        "txt": "t",
    }


def test_auto_names_the_field_that_failed() -> None:
    with pytest.raises(DecodeError, match="field 'cls': not a class number"):
        decoders.auto({"__key__": "a", "cls": b"cat"})
