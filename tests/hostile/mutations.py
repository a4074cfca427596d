"""Ways to break a file: its bytes, its JSON, its Parquet, its arrays. All are drawn from one random generator."""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import json
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Rng = random.Random

# What stands in JSON in the place of a value until the text is made: json.dumps would refuse or repair it.
_RAW = "\ufdd0"
_RAW_TEXTS = (
    "[" * 100_000,
    "[" * 300 + "]" * 300,
    "9" * 5_000,
    "1e999",
    "NaN",
    "-Infinity",
    "01",
    '"\\ud800"',
    "'x'",
    "",
)
_ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    7.5,
    -0.0,
    1e-320,
    1e300,
    float("nan"),
    float("inf"),
    2**15,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**61,
    2**63,
    10**40,
    "",
    "x",
    "0",
    " ",
    "\ud800",
    "\udcff",
    "\0",
    "\x1b[2J\x07",
    "\x9b31m\u202e",
    "a\nb\r",
    "[bold]x[/bold][/]",
    "<script>alert(1)</script>",
    "../../x",
    "/etc/passwd",
    "x" * 5_000,
    "é𝒳",
    [],
    [None],
    ["x"],
    [0, -1],
    [[[]]],
    list(range(300)),
    {},
    {"x": 1},
    {"": None},
    {"\ud800": "\x1b"},
)
_INTEGERS = (0, 1, -1, 2, 127, 255, 65_535, 2**31 - 1, -(2**31), 2**31, 2**32 - 1, 2**62, 2**63 - 1, -(2**63))
_NAMES: tuple[str | bytes, ...] = (
    b"\xff\xfe",
    b"id\xff",
    "",
    "\x1b[2J",
    "prompt",
    "text",
    "x" * 3_000,
    "é",
    "a.b",
    "id",
)
_TYPES = (
    pa.int8(),
    pa.int16(),
    pa.int64(),
    pa.uint32(),
    pa.uint64(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.bool_(),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.binary(4),
    pa.date32(),
    pa.date64(),
    pa.timestamp("s"),
    pa.timestamp("ns"),
    pa.timestamp("us", "Nowhere/Atall"),
    pa.duration("ms"),
    pa.time64("us"),
    pa.decimal128(38, 3),
    pa.null(),
    pa.list_(pa.string()),
    pa.list_(pa.int64()),
    pa.list_(pa.float64()),
    pa.list_(pa.list_(pa.int32())),
    pa.large_list(pa.int32()),
    pa.list_(pa.int32(), 2),
    pa.struct([("x", pa.int32())]),
    pa.map_(pa.string(), pa.int32()),
    pa.dictionary(pa.int32(), pa.string()),
)
_BAD_TEXT = b"\xff\xfe\xed\xa0\x80"


def mutate_bytes(rng: Rng, data: bytes, others: Sequence[bytes]) -> bytes:
    """Flip, set, cut, remove, insert, repeat, swap, or splice in a piece of another file."""
    end = len(data)
    here = rng.randrange(end + 1)
    if end > 64 and rng.random() < 0.4:  # headers and footers say what the rest is
        here = rng.choice([rng.randrange(64), end - 1 - rng.randrange(min(end - 1, 2_000))])
    length = min(rng.choice([1, 1, 2, 4, 8, 16, 64, 256]), max(end - here, 0))
    piece = data[here : here + length]
    match rng.randrange(12):
        case 0 | 1 | 2 if piece:
            flipped = bytearray(data)
            for _ in range(rng.choice([1, 1, 1, 2, 8])):
                flipped[min(end - 1, here + rng.randrange(max(1, length)))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case 3 if piece:
            value = rng.choice([0, 1, 0x7F, 0x80, 0xFF, 0x1B, 0x0A, ord("9"), ord('"')])
            return data[:here] + bytes([value]) * length + data[here + length :]
        case 4:
            return data[:here]
        case 5:
            return data[:here] + data[here + length :]
        case 6:
            return data[:here] + rng.choice([b"\0", b"\xff", b"\x1b[2J", b"\n", b"\r", rng.randbytes(8)]) + data[here:]
        case 7:
            return data[: here + length] + piece * rng.choice([1, 2, 100]) + data[here + length :]
        case 8 if end > 2:
            other = rng.randrange(end)
            low, high = sorted((here, other))
            return data[:low] + data[high:] + data[low:high]
        case 9 if others:
            other_data = rng.choice(others)
            return data[:here] + other_data[rng.randrange(len(other_data) + 1) :]
        case 10:
            width = rng.choice(["<i", "<q", "<h"])
            packed = struct.pack(width, rng.choice(_INTEGERS) & ((1 << (8 * struct.calcsize(width) - 1)) - 1))
            packed = rng.choice([packed, b"\xff" * len(packed)])
            return data[:here] + packed + data[here + len(packed) :]
    return rng.choice([b"", data[: end // 2], data + b"\0", data + data, data[::-1]])


def mutate_text(rng: Rng, text: str) -> str:
    """Replace a piece of a text by an odd one."""
    here = rng.randrange(len(text) + 1)
    odd = rng.choice([one for one in _ODD if isinstance(one, str)])
    return rng.choice([odd, text[:here] + odd + text[here:], text[:here], text.upper(), text + text])


def mutate_json(rng: Rng, value: Any, times: int = 1) -> str:
    """JSON text of a value in which something is another: its type, size or sense."""
    body = {"": copy.deepcopy(value)}
    raw: list[str] = []
    for _ in range(times):
        places = _places(body)
        container, key = rng.choice(places)
        old = container[key]
        match rng.randrange(12):
            case 0 | 1 | 2 | 3 | 4:
                container[key] = copy.deepcopy(rng.choice(_ODD))
            case 5:
                raw.append(rng.choice(_RAW_TEXTS))
                container[key] = f"{_RAW}{len(raw) - 1}{_RAW}"
            case 6 if container is not body:
                if isinstance(container, dict):
                    container[rng.choice(["x", "\ud800", "\x1b", key + "x", ""])] = container.pop(key)
                else:
                    container.insert(key, copy.deepcopy(old))
            case 7 if container is not body:
                del container[key]
            case 8 if isinstance(old, str):
                container[key] = mutate_text(rng, old)
            case 8 if isinstance(old, int | float):
                steps = [old + 1, old - 1, -old, old * 2**40, str(old), [old], float(old) if abs(old) < 1e300 else 0]
                container[key] = rng.choice(steps)
            case 8 if isinstance(old, list) and old:
                container[key] = rng.choice(
                    [old[::-1], old * 2, old[:-1], old * 50, [old], dict.fromkeys(map(str, old))]
                )
            case 9:
                container[key] = copy.deepcopy(_at(rng.choice(places)))
            case 10 if isinstance(old, dict) and old:
                # Twice the same key: which one is meant?
                raw.append(_dump({**old}, raw)[:-1] + f", {json.dumps(rng.choice(list(old)))}: 1}}")
                container[key] = f"{_RAW}{len(raw) - 1}{_RAW}"
            case _:
                other_container, other_key = rng.choice(places)
                container[key], other_container[other_key] = copy.deepcopy((_at((other_container, other_key)), old))
    return _dump(body[""], raw, ascii=rng.random() < 0.8)


def mutate_lines(rng: Rng, data: bytes) -> bytes:
    """JSON lines of which one is another, or stands elsewhere, or not at all."""
    rows = data.splitlines()
    place = rng.randrange(len(rows))
    match rng.randrange(8):
        case 0:
            rows.insert(place, rng.choice(rows))
        case 1:
            del rows[place]
        case 2:
            rng.shuffle(rows)
        case 3:
            rows.insert(
                place, rng.choice([b"", b"{}", b"[]", b"null", b"\0", b"\xff", b"{" * 500, b"\xff\xfe", b'"x"'])
            )
        case _:
            rows[place] = mutate_json(rng, json.loads(rows[place]), rng.choice([1, 1, 2])).encode(
                "utf-8", "surrogatepass"
            )
    return rng.choice([b"\n", b"\n", b"\n", b"\r\n"]).join(rows) + rng.choice([b"\n", b"\n", b""])


def mutate_parquet(rng: Rng, data: bytes, others: Sequence[bytes]) -> bytes:
    """A Parquet file whose columns, values, description, layout or footer are others."""
    table = pq.read_table(io.BytesIO(data))
    if rng.random() < 0.15:  # the footer: counts, offsets, statistics, schema
        size = int.from_bytes(data[-8:-4], "little")
        footer = bytearray(data[-8 - size : -8])
        for _ in range(rng.choice([1, 1, 2, 4])):
            place = rng.randrange(len(footer))
            footer[place] = rng.choice([footer[place] ^ (1 << rng.randrange(8)), 0, 0xFF, 0x7F, rng.randrange(256)])
        return data[: -8 - size] + bytes(footer) + data[-8:]
    if rng.random() < 0.1:  # a name that is not UTF-8 wherever it stands
        name = rng.choice(table.column_names).encode()
        return data.replace(name, rng.choice([b"\xff", b"\xc3", b"\x1b"]) + name[1:])
    for _ in range(rng.choice([1, 1, 1, 2])):
        table = _other_table(rng, table)
    sink = io.BytesIO()
    rows = rng.choice([None, None, None, 1])
    pq.write_table(
        table,
        sink,
        row_group_size=rows,
        compression=rng.choice(["zstd", "zstd", "none", "snappy", "gzip", "brotli"]),
        data_page_version=rng.choice(["1.0", "1.0", "2.0"]),
        use_dictionary=rng.random() < 0.7,
        store_schema=rng.random() < 0.8,
        write_statistics=rng.random() < 0.8,
    )
    found = sink.getvalue()
    return mutate_bytes(rng, found, others) if rng.random() < 0.05 else found


def mutate_metadata(rng: Rng, data: bytes, key: bytes, seal: Callable[[dict[str, Any], Any], None]) -> bytes:
    """A Parquet file whose own JSON description is another; `seal` may put a checksum that fits into it."""
    table = pq.read_table(io.BytesIO(data))
    metadata = dict(table.schema.metadata or {})
    if rng.random() < 0.1:
        text = mutate_bytes(rng, metadata[key], [b"{}"])
    else:
        text = mutate_json(rng, json.loads(metadata[key]), rng.choice([1, 1, 2])).encode("utf-8", "surrogatepass")
        try:
            record = json.loads(text)
            if isinstance(record, dict) and rng.random() < 0.8:
                seal(record, table)
                text = json.dumps(record).encode()
        except (ValueError, RecursionError, TypeError):
            pass  # what cannot be sealed is given as it is
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({**metadata, key: text}), sink)
    return sink.getvalue()


def mutate_array(rng: Rng, data: bytes, dtype: str) -> bytes:
    """A raw array in which some values are others."""
    values = np.frombuffer(data[: len(data) // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize], dtype).copy()
    if not len(values):
        return data
    kind = values.dtype
    if kind.kind == "f":
        odd: list[Any] = [0.0, 1.0, -1.0, 1e-38, 1e30, 3e38, np.nan, np.inf, -np.inf]
    else:
        limits = np.iinfo(kind)
        odd = [limits.min, limits.max, limits.max - 1, 0, 1, len(values), len(values) - 1, min(limits.max, 1 << 20)]
    places = rng.sample(range(len(values)), min(len(values), rng.choice([1, 1, 3, 50])))
    match rng.randrange(6):
        case 0 | 1:
            values[places] = odd[rng.randrange(len(odd))]
        case 2:
            values[:] = odd[rng.randrange(len(odd))]
        case 3:
            values = values[np.random.default_rng(rng.randrange(1 << 30)).permutation(len(values))]
        case 4:
            values = rng.choice([values[::-1], np.sort(values), values[:-1], np.repeat(values, 2), values[:1]])
        case _:
            noise = np.random.default_rng(rng.randrange(1 << 30)).bytes(len(values) * kind.itemsize)
            values = np.frombuffer(noise, kind)
    return np.ascontiguousarray(values).tobytes()


def mutate_npy(rng: Rng, data: bytes) -> bytes:
    """A .npy file whose header, or whose array, is another."""
    size = 10 + int.from_bytes(data[8:10], "little")
    header, body = data[:size], data[size:]
    if rng.random() < 0.4:
        return header + mutate_array(rng, body, "<f4")
    text = header[10:].decode("latin1")
    swaps = {
        "'<f4'": ["'>f4'", "'<f8'", "'<f2'", "'|O'", "'<i4'", "'<U4'", "'|V4'", "'<m8'", "7", "[('x', '<f4')]"],
        "False": ["True", "None", "1"],
        "'shape'": ["'form'", "'shape', 'x'"],
        "(": ["(-", "(9", "(1" + "0" * 12, "(" * 60, "(0, "],
        ")": [", 2)", ", 0)", "", ")" * 3, ", 1000000000000)"],
    }
    old = rng.choice([one for one in swaps if one in text] or [text[:1]])
    text = text.replace(old, rng.choice(swaps.get(old, [""])), 1)
    if rng.random() < 0.2:
        return mutate_bytes(rng, header, [b"{}"]) + body
    encoded = text.encode("latin1")
    return header[:8] + min(len(encoded), 65_535).to_bytes(2, "little") + encoded + body


def mutate_safetensors(rng: Rng, data: bytes) -> bytes:
    """A safetensors file whose header, or whose numbers, are others."""
    size = int.from_bytes(data[:8], "little")
    header, body = data[8 : 8 + size], data[8 + size :]
    if rng.random() < 0.5:
        return data[: 8 + size] + mutate_array(rng, body, "<f4")
    text = mutate_json(rng, json.loads(header), rng.choice([1, 2])).encode("utf-8", "surrogatepass")
    return len(text).to_bytes(8, "little") + text + body


def mutate_packed(rng: Rng, data: bytes, inner: Callable[[Rng, bytes], bytes], others: Sequence[bytes]) -> bytes:
    """A .gz or .zst file that is broken, or holds something broken."""
    if rng.random() < 0.5:
        return mutate_bytes(rng, data, others)
    if data.startswith(b"\x1f\x8b"):
        packed = gzip.compress(inner(rng, gzip.decompress(data)), mtime=0)
    else:
        plain = pa.CompressedInputStream(pa.BufferReader(data), "zstd").read()
        packed = pa.compress(inner(rng, plain), codec="zstd", asbytes=True)
    return rng.choice([packed, packed, packed + packed, packed + b"\0" * 100, packed + b"x"])


def mutate_csv(rng: Rng, data: bytes) -> bytes:
    """A table of text whose quotes, delimiters, names or fields are others."""
    rows = data.split(b"\n")
    place = rng.randrange(len(rows))
    odd = [one.encode("utf-8", "surrogatepass") for one in _ODD if isinstance(one, str)]
    odd += [
        b'"',
        b'""',
        b",",
        b"\t",
        b";",
        b"\r",
        b"\r\n",
        b'"a\nb"',
        b'[1, "x"]',
        b'["w1"',
        b"=1+1",
        b"\xff",
        b"[" * 3_000,
    ]
    match rng.randrange(5):
        case 0:
            fields = rows[place].split(b",")
            fields[rng.randrange(len(fields))] = rng.choice(odd)
            rows[place] = rng.choice([b",", b",", b"\t", b";"]).join(fields)
        case 1:
            here = rng.randrange(len(rows[place]) + 1)
            rows[place] = rows[place][:here] + rng.choice(odd) + rows[place][here:]
        case 2:
            rows.insert(place, rng.choice([*rows, *odd]))
        case 3:
            del rows[place]
        case _:
            rows[place] = rows[place].replace(b",", rng.choice(odd), rng.choice([1, 9]))
    return b"\n".join(rows)


def reseal(store: Path) -> bool:
    """Make a manifest's sizes and checksums fit the files, as a forger would; False where it is beyond that."""
    file = store / "manifest.json"
    try:
        body = json.loads(file.read_bytes())
        for name, record in body["files"].items():
            data = (store / name).read_bytes()
            edges = data[: 1 << 16] + data[-(1 << 16) :]
            record |= {
                "size": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "edges": hashlib.sha256(edges).hexdigest(),
            }
        seal_manifest(body)
        file.write_text(json.dumps(body))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        return False
    return True


def seal_manifest(body: dict[str, Any]) -> None:
    """Give a manifest's JSON the checksum that it should have."""
    rest = {name: value for name, value in body.items() if name != "digest"}
    body["digest"] = hashlib.sha256(json.dumps(rest, sort_keys=True).encode("ascii")).hexdigest()


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) below a value."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        pairs = one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ()
        for key, inner in pairs:
            found.append((one, key))
            waiting.append(inner)
    return found


def _at(place: tuple[Any, Any]) -> Any:
    """What stands at a place, if it is still there."""
    container, key = place
    try:
        return container[key]
    except (KeyError, IndexError):
        return None


def _dump(value: Any, raw: Sequence[str], *, ascii: bool = True) -> str:
    text = json.dumps(value, ensure_ascii=ascii)
    for number in range(len(raw) - 1, -1, -1):
        for mark in (json.dumps(f"{_RAW}{number}{_RAW}"), f'"{_RAW}{number}{_RAW}"'):
            text = text.replace(mark, raw[number])
    return text


def _other_table(rng: Rng, table: pa.Table) -> pa.Table:
    if not table.num_columns:
        return table
    place = rng.randrange(table.num_columns)
    field, column = table.schema.field(place), table.column(place)
    match rng.randrange(10):
        case 0:
            names: list[Any] = list(table.column_names)
            names[place] = rng.choice(_NAMES)
            fields = [one.with_name(name) for one, name in zip(table.schema, names, strict=True)]
            return pa.Table.from_arrays(table.columns, schema=pa.schema(fields, metadata=table.schema.metadata))
        case 1 | 2:
            return _replaced(table, place, _as_type(column, rng.choice(_TYPES)))
        case 3:
            nulls = [rng.random() < rng.choice([0.1, 0.5, 1.0]) for _ in range(len(column))]
            return _replaced(
                table,
                place,
                pa.array(
                    [None if gone else one for one, gone in zip(column.to_pylist(), nulls, strict=True)], field.type
                ),
            )
        case 4:
            return table.drop_columns([field.name])
        case 5:
            return table.append_column(rng.choice([field.name, "x", b"\xff"]), rng.choice(table.columns))
        case 6:
            rows = rng.choice([[], [0] * 3, list(range(len(table)))[::-1], [0]])
            return table.take([row for row in rows if row < len(table)])
        case 7:
            return table.select(rng.sample(table.column_names, table.num_columns))
    return _replaced(table, place, _odd_values(rng, column, field.type))


def _replaced(table: pa.Table, place: int, column: Any) -> pa.Table:
    return table.set_column(place, table.schema.field(place).name, column)


def _as_type(column: Any, kind: pa.DataType) -> Any:
    """A column in another type, or as many values of that type as it has rows."""
    try:
        return column.cast(kind, safe=False)
    except pa.ArrowException:
        pass
    if pa.types.is_dictionary(kind):
        return pa.chunked_array([pa.array(map(str, column.to_pylist())).dictionary_encode()])
    if pa.types.is_temporal(kind):
        width = pa.int32() if kind.bit_width == 32 else pa.int64()
        return pa.chunked_array(
            [pa.array([2**31 - 1 if kind.bit_width == 32 else 2**62] * len(column), width).cast(kind, safe=False)]
        )
    samples: dict[Any, Any] = {pa.struct([("x", pa.int32())]): {"x": 1}, pa.map_(pa.string(), pa.int32()): [("a", 1)]}
    for one in (samples.get(kind), 1, 1.5, True, "x", b"wxyz", [1, 2], ["x"], [1.5], [[1]], None):
        try:
            return pa.chunked_array([pa.array([one] * len(column), kind)])
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue
    return column


def _odd_values(rng: Rng, column: Any, kind: pa.DataType) -> Any:
    values = column.to_pylist()
    if not values:
        return column
    for place in rng.sample(range(len(values)), min(len(values), rng.choice([1, 1, 5, 1_000]))):
        values[place] = _odd_value(rng, kind, values[place])
    if pa.types.is_string(kind) and rng.random() < 0.3:  # Arrow does not look whether text is UTF-8
        plain = [one if one is None else one.encode("utf-8", "replace") for one in values]
        plain[rng.randrange(len(plain))] = _BAD_TEXT
        return pa.chunked_array([_as_text(plain)])
    return pa.chunked_array([pa.array(values, kind)])


def _as_text(values: list[bytes | None]) -> Any:
    binary = pa.array(values, pa.binary())
    return pa.StringArray.from_buffers(len(binary), binary.buffers()[1], binary.buffers()[2], binary.buffers()[0])


def _odd_value(rng: Rng, kind: pa.DataType, old: Any) -> Any:
    if pa.types.is_list(kind):
        length = rng.choice([0, 1, 2, 300])
        some = old or [_odd_value(rng, kind.value_type, None)]
        return [
            _odd_value(rng, kind.value_type, one) if rng.random() < 0.3 else one for one in (some * length)[:length]
        ]
    if pa.types.is_integer(kind):
        top = 2 ** (kind.bit_width - 1) - 1
        near = [] if old is None else [min(old + 1, top), max(old - 1, -top)]
        return rng.choice([0, 1, -1, 7, top, -top - 1, 10**6 if top > 10**6 else 100, *near])
    if pa.types.is_floating(kind):
        return rng.choice([0.0, -1.0, 1e-300, 1e300, float("nan"), float("inf"), -float("inf"), 0.5])
    if pa.types.is_boolean(kind):
        return not old
    if pa.types.is_string(kind):
        texts = [one for one in _ODD if isinstance(one, str) and one.isascii()]
        return rng.choice([*texts, "é", mutate_text(rng, old or "").encode("utf-8", "replace").decode()])
    return old
