"""Which tensors the Triton kernels serve, the warning where Triton is missing, and private names of other versions."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maingrad.kernels import compat


def like(device: str, dtype: torch.dtype) -> Any:
    """A stand-in for a tensor, with the attributes that the rule reads; needs no GPU."""
    return SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "HAS_TRITON", False)
    compat._warn_without_triton.cache_clear()


def test_kernels_serve_cuda_and_no_fp64() -> None:
    assert compat.runs_on_triton("op", like("cuda", torch.bfloat16)) == compat.HAS_TRITON
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compat.runs_on_triton("op", like("cpu", torch.bfloat16))
        assert not compat.runs_on_triton("op", like("cuda", torch.float64))


@pytest.mark.usefixtures("without_triton")
def test_a_missing_triton_is_said_once_for_each_operation() -> None:
    with pytest.warns(RuntimeWarning, match="grouped_dgrad runs as plain PyTorch.*pip install triton"):
        assert not compat.runs_on_triton("grouped_dgrad", like("cuda", torch.bfloat16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not compat.runs_on_triton("grouped_dgrad", like("cuda", torch.float16))
        # Tensors on a CPU and in fp64 never use Triton: no warning.
        assert not compat.runs_on_triton("grouped_linear", like("cpu", torch.float32))
        assert not compat.runs_on_triton("grouped_linear", like("cuda", torch.float64))
    with pytest.warns(RuntimeWarning, match="grouped_linear runs"):
        compat.runs_on_triton("grouped_linear", like("cuda", torch.bfloat16))


@pytest.mark.gpu(count=2)
def test_a_launch_goes_to_the_tensors_own_device() -> None:
    tensor = torch.ones(4, device="cuda:1")
    with compat.device_of(tensor):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.current_device() == 0


def test_a_cpu_tensor_needs_no_device() -> None:
    with compat.device_of(torch.ones(1)):
        pass


# ---- Private names. ----


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """The names that were asked for, from here on."""
    names: dict[str, bool] = {}
    monkeypatch.setattr(compat, "requested_names", names)
    return names


def test_the_first_spelling_that_exists_is_taken(asked: dict[str, bool]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compat.private_name("json.nothing", "json.decoder.JSONDecoder", loss="-") is json.JSONDecoder
        assert compat.private_name("json.loads", "json.dumps", loss="-") is json.loads
        assert compat.private_name("json.loads", loss="-", use=True, fallback=False) is True
        assert compat.spelling_of("nothing.at.all", "json.dumps", loss="-") == "json.dumps"
    assert asked == {
        "json.nothing or json.decoder.JSONDecoder": False,
        "json.loads or json.dumps": False,
        "json.loads": True,
        "nothing.at.all or json.dumps": True,
    }, "and whether something can take their place"


def test_a_name_that_is_absent_is_said_and_replaced(asked: dict[str, bool]) -> None:
    said = r"json .*has no json\.nothing or json\.none: it is slow"
    with pytest.warns(RuntimeWarning, match=said) as caught:
        assert compat.private_name("json.nothing", "json.none", loss="it is slow", use=True, fallback=3) == 3
    assert len(caught) == 1 and asked == {"json.nothing or json.none": True}
    with pytest.warns(RuntimeWarning, match="has no nothing"):
        assert compat.spelling_of("nothing.at.all", loss="-") is None


def test_a_stand_in_raises_where_it_is_used() -> None:
    with pytest.warns(RuntimeWarning):
        absent = compat.private_name("json.decoder.Nothing", loss="nothing is decoded")
    assert absent.__name__ == "Nothing"
    compat.raise_where_absent(json.JSONDecoder, json.loads, None, 3)
    for use in (absent, lambda: absent(1, a=2), lambda: compat.raise_where_absent(json.loads, absent)):
        with pytest.raises(RuntimeError, match=r"has no json\.decoder\.Nothing: nothing is decoded; use torch 2"):
            use()


def test_a_name_whose_import_takes_long_is_fetched_once_and_late(asked: dict[str, bool]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fetch = compat.on_first_use("json.nothing", loss="-")
        replaced = compat.on_first_use("json.none", loss="-", fallback=4)
    assert asked == {"json.nothing": False, "json.none": True}, "known before"
    with pytest.warns(RuntimeWarning) as caught:
        assert fetch() is fetch() and replaced() == replaced() == 4
    assert len(caught) == 2
    with pytest.raises(RuntimeError):
        fetch()()


def test_names_are_found_in_modules_that_must_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A module that raises while it is imported, or is asked, has no such name."""
    package = tmp_path / "odd_package"
    package.mkdir()
    (package / "__init__.py").write_text("def __getattr__(name):\n    raise OSError(name)\n")
    (package / "inner.py").write_text("VALUE = 5\n")
    (package / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert compat._find("odd_package.inner.VALUE") == 5
    for absent in ("odd_package.broken", "odd_package.broken.VALUE", "odd_package.inner.NONE", "none_such"):
        assert compat._find(absent) is compat._ABSENT
