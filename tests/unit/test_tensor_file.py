"""Parts read from files equal the same parts of the tensors that were written."""

from __future__ import annotations

import argparse
import json
import os
import struct
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from lightning_fold.checkpoint import tensor_entry
from lightning_fold.checkpoint.owned import merge_halves, read_owned
from lightning_fold.checkpoint.tensor_file import INDEX_NAME, TensorEntry, open_tensors

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
CASES = {"shape": (4, 6, 5)}


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return (torch.rand(shape, generator=generator) * 100).to(dtype)


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """By bytes: fp8 has no comparison."""
    same_kind = a.shape == b.shape and a.dtype == b.dtype
    return same_kind and bytes(flat(a)) == bytes(flat(b))


def flat(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read."""
    counted: list[int] = []
    original = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        counted.append(sum(len(buffer) for buffer in buffers))
        return original(descriptor, buffers, offset)

    monkeypatch.setattr(tensor_entry.os, "preadv", preadv)
    return counted


def lightning_checkpoint() -> dict[str, object]:
    base = drawn(6, 8)
    return {
        "epoch": 3,
        "state_dict": OrderedDict(
            weight=base,
            turned=base.t(),
            rows=base[2:5],
            every_other=base[:, ::2],
            expanded=drawn(3, 1).expand(3, 4),
            turned3=drawn(2, 3, 4).permute(1, 2, 0),
            scalar=torch.tensor(7),
            empty=torch.empty(0, 4),
            parameter=torch.nn.Parameter(drawn(2, 2)),
            _extra_state={"steps": 2},
            **{str(dtype)[6:]: drawn(3, 4, dtype=dtype) for dtype in DTYPES},
        ),
        "optimizer_states": [
            {
                "state": {0: {"step": torch.tensor(2.0), "exp_avg": drawn(4, 3)}},
                "param_groups": [{"params": [0], "betas": (0.9, 0.95)}],
            }
        ],
    }


def test_lightning_checkpoint_is_read_as_torch_loads_it(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save(lightning_checkpoint(), path)
    plain = torch.load(path, weights_only=True)
    file = open_tensors(path)
    assert list(file.entries) == [n for n in plain["state_dict"] if n != "_extra_state"]
    for name, entry in file.entries.items():
        whole = plain["state_dict"][name]
        assert equal(file.read(name), whole), name
        assert (entry.shape, entry.dtype) == (tuple(whole.shape), whole.dtype)
    moments = file.meta["optimizer_states"][0]["state"][0]
    assert equal(file.read(moments["exp_avg"]), drawn(4, 3))
    assert file.read(moments["step"]) == 2.0
    assert file.meta["epoch"] == 3
    assert file.meta["state_dict"]["_extra_state"] == {"steps": 2}
    assert file.meta["optimizer_states"][0]["param_groups"][0]["betas"] == (0.9, 0.95)


def test_opening_a_torch_file_reads_no_tensor(tmp_path: Path, reads: list[int]) -> None:
    torch.save({"weight": drawn(64, 64)}, tmp_path / "a.pt")
    file = open_tensors(tmp_path / "a.pt")
    assert list(file.entries) == ["weight"]
    assert reads == []
    assert all(not isinstance(value, torch.Tensor) for value in file.meta.values())


@pytest.mark.parametrize("kind", ["file", "folder", "indexed"])
def test_safetensors_are_read_as_the_library_writes_them(tmp_path: Path, kind: str) -> None:
    halves = [
        {"a": drawn(3, 4), "scalar": torch.tensor(3), "empty": torch.empty(0, 2)},
        {str(dtype)[6:]: drawn(2, 5, dtype=dtype) for dtype in DTYPES},
    ]
    whole = halves[0] | halves[1]
    target = tmp_path / "model.safetensors"
    if kind == "file":
        save_file(whole, target, metadata={"format": "pt"})
    else:
        target = tmp_path
        for i, half in enumerate(halves):
            save_file(half, tmp_path / f"model-{i}.safetensors")
    if kind == "indexed":
        save_file({"a": drawn(1)}, tmp_path / "stray.safetensors")
        places = {name: f"model-{i}.safetensors" for i, half in enumerate(halves) for name in half}
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
    file = open_tensors(target)
    assert file.entries.keys() == whole.keys()
    assert all(equal(file.read(name), tensor) for name, tensor in whole.items())
    assert file.meta == ({"format": "pt"} if kind == "file" else {})


@st.composite
def dim_index(draw: st.DrawFn, size: int) -> slice | torch.Tensor:
    if draw(st.booleans()):
        bounds = st.integers(0, size)
        return slice(*sorted((draw(bounds), draw(bounds))))
    chosen = draw(st.lists(st.integers(0, size - 1), unique=True))
    return torch.tensor(chosen, dtype=torch.int64)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    whole = drawn(*CASES["shape"])
    path = tmp_path_factory.mktemp("stored") / "a.pt"
    forms = {
        "plain": whole,
        "turned": whole.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "gaps": torch.stack([whole, -whole], dim=3)[..., 0],
    }
    torch.save(forms, path)
    assert not forms["turned"].is_contiguous()
    return {"whole": whole, "file": open_tensors(path)}


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_product_of_indices_is_read_right(data: st.DataObject, stored: dict) -> None:
    index = [data.draw(dim_index(size)) for size in CASES["shape"]]
    each = [torch.arange(n)[i] for n, i in zip(CASES["shape"], index, strict=True)]
    wanted = stored["whole"][torch.meshgrid(*each, indexing="ij")]
    name = data.draw(st.sampled_from(["plain", "turned", "gaps"]))
    read = stored["file"].read(name, index)
    assert read.is_contiguous()
    assert torch.equal(read, wanted)


@pytest.mark.parametrize(
    ("index", "runs"),
    [
        ((slice(1, 3), slice(None), slice(None)), [2 * 30]),
        ((slice(None), slice(None), slice(None)), [120]),
        ((torch.tensor([0, 1, 3]), slice(None), slice(None)), [60, 30]),
        ((slice(2, 4), slice(1, 3), slice(None)), [10, 10]),
        ((slice(0, 1), torch.tensor([0, 1, 3, 4]), slice(None)), [10, 10]),
        ((slice(0, 1), slice(0, 2), slice(2, 4)), [2, 2]),
        ((slice(0, 0), slice(None), slice(None)), []),
        # Rows that end where the next begin are one run, across dimensions too.
        ((torch.tensor([0, 1]), torch.arange(6), torch.arange(5)), [60]),
    ],
)
def test_only_the_needed_runs_are_read(stored: dict, reads: list, index: tuple, runs: list) -> None:
    stored["file"].read("plain", index)
    assert reads == [4 * count for count in runs]


def test_index_beyond_the_tensor_is_refused(stored: dict) -> None:
    rest = [slice(None), slice(None)]
    with pytest.raises(IndexError, match="of 4"):
        stored["file"].read("plain", [torch.tensor([4]), *rest])
    with pytest.raises(ValueError, match="2 indices for a tensor of shape"):
        stored["file"].read("plain", rest)


def test_halves_of_the_live_form_are_two_runs_of_the_users(tmp_path: Path) -> None:
    experts, width, inputs = 4, 6, 3
    whole = drawn(experts, 2 * width, inputs)
    torch.save({"w": whole}, tmp_path / "a.pt")
    index = (slice(2, 4), slice(0, 2), slice(3, 6), slice(0, inputs))
    merged = merge_halves(index, width)
    assert merged[1].tolist() == [3, 4, 5, 9, 10, 11]
    live = whole.unflatten(1, (2, width))
    file = open_tensors(tmp_path / "a.pt")
    assert torch.equal(file.read("w", merged), live[2:4, :, 3:6].flatten(1, 2))
    assert torch.equal(read_owned(file, "w", live, halved=True), live)


def test_live_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    torch.save({"w": drawn(4, 3)}, tmp_path / "a.pt")
    file = open_tensors(tmp_path / "a.pt")
    with pytest.raises(ValueError, match=r"a\.pt: w has shape \(4, 3\), the model has \(3, 4\)"):
        read_owned(file, "w", drawn(3, 4))
    assert torch.equal(read_owned(file, "w", torch.empty(4, 3)), drawn(4, 3))


# Files that are not what they should be.


def header(**entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def truncated_zip(path: Path) -> None:
    torch.save({"w": drawn(40, 40)}, path)
    path.write_bytes(path.read_bytes()[:-100])


def zip_with_a_class(path: Path) -> None:
    torch.save({"state_dict": {}, "args": argparse.Namespace(a=1)}, path)


def zip_of_a_list(path: Path) -> None:
    torch.save([1, 2], path)


def zip_of_sparse(path: Path) -> None:
    torch.save({"w": torch.eye(3).to_sparse()}, path)


def zip_of_meta(path: Path) -> None:
    torch.save({"w": torch.empty(3, device="meta")}, path)


def zip_with_a_short_record(path: Path) -> None:
    """The pickle promises more bytes than its record has."""
    torch.save({"w": torch.zeros(1000, dtype=torch.uint8)}, path)
    text = path.read_bytes()
    size = struct.pack("<H", 1000)
    assert text.count(b"M" + size) >= 1
    path.write_bytes(text.replace(b"M" + size, b"M" + struct.pack("<H", 2000)))


def zip_without_end(path: Path) -> None:
    around: dict = {}
    around["itself"] = around
    torch.save(around, path)


def old_torch(path: Path) -> None:
    torch.save({"w": drawn(2)}, path, _use_new_zipfile_serialization=False)


BAD = {
    "missing": (lambda path: None, "cannot be read: No such file"),
    "empty": (lambda path: path.write_bytes(b""), "is not a file of torch.save or a .safetensors"),
    "noise": (lambda path: path.write_bytes(bytes(range(200)) * 9), "is not a file of torch.save"),
    "zip magic only": (lambda path: path.write_bytes(b"PK\x03\x04" * 9), "damaged or truncated"),
    "truncated zip": (truncated_zip, "damaged or truncated"),
    "class": (zip_with_a_class, "holds a pickle that asks for argparse.Namespace, and no code"),
    "list": (zip_of_a_list, "holds a list and not a state dict"),
    "sparse": (zip_of_sparse, "w is sparse"),
    "meta": (zip_of_meta, "w is sparse, quantized or without data"),
    "short record": (zip_with_a_short_record, "is damaged"),
    "no end": (zip_without_end, "structure has no end"),
    "old torch": (old_torch, "is not in the zip format of torch.save"),
}
BAD_HEADERS = {
    "short": (b"\x10", "header ends after the file"),
    "beyond": ((1 << 40).to_bytes(8, "little") + b"{}", "header ends after the file"),
    "no json": ((4).to_bytes(8, "little") + b"{ab}", "JSON cannot be read"),
    "list": ((2).to_bytes(8, "little") + b"[]", "JSON is no mapping"),
    "dtype": (header(w=entry(dtype="F4")) + bytes(8), "w has dtype F4. Legal: F64"),
    "negative": (header(w=entry(shape=[-2])) + bytes(8), "describes w wrongly"),
    "bool": (header(w=entry(shape=[True, 2])) + bytes(8), "describes w wrongly"),
    "offsets": (header(w=entry(offsets=[0])) + bytes(8), "describes w wrongly"),
    "text": (header(w="tensor") + bytes(8), "describes w wrongly"),
    "bytes": (header(w=entry(offsets=[0, 4])) + bytes(8), "other than the bytes of"),
    "truncated": (header(w=entry()) + bytes(4), "truncated: w ends at byte"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_file_is_one_value_error_that_names_it(tmp_path: Path, case: str) -> None:
    make, message = BAD[case]
    path = tmp_path / "bad.ckpt"
    make(path)
    with pytest.raises(ValueError, match=message) as caught:
        open_tensors(path)
    assert "bad.ckpt" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_bad_safetensors_header_is_refused(tmp_path: Path, case: str) -> None:
    text, message = BAD_HEADERS[case]
    (tmp_path / "bad.safetensors").write_bytes(text)
    with pytest.raises(ValueError, match=message) as caught:
        open_tensors(tmp_path / "bad.safetensors")
    assert "bad.safetensors" in str(caught.value)


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \.safetensors file\.$"):
        open_tensors(tmp_path)
    (tmp_path / ".metadata").touch()
    with pytest.raises(ValueError, match="is a sharded checkpoint, which `lightning-fold convert`"):
        open_tensors(tmp_path)
    for name in "ab":
        save_file({"w": drawn(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"b\.safetensors holds w, as a\.safetensors does"):
        open_tensors(tmp_path)
    for places, message in (
        ({"w": "c.safetensors"}, r"c\.safetensors is missing"),
        ({"w": "../a.safetensors"}, "is missing"),
        ({"v": "a.safetensors"}, r"a\.safetensors lacks v"),
        (["w"], "no `weight_map`"),
    ):
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": places}))
        with pytest.raises(ValueError, match=message):
            open_tensors(tmp_path)


def test_file_that_shrinks_after_opening_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": drawn(100)}, path)
    file = open_tensors(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"a\.safetensors is truncated: it ends at byte"):
        file.read("w")


def test_entries_are_values(tmp_path: Path) -> None:
    save_file({"w": drawn(2, 3)}, tmp_path / "a.safetensors")
    found = open_tensors(tmp_path / "a.safetensors").entries["w"]
    assert isinstance(found, TensorEntry)
    assert (found.shape, found.stride, found.numel) == ((2, 3), (3, 1), 6)
