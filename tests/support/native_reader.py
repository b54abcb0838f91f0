"""An extension in C++ that reads tensors as compiled extensions do: no ``__torch_function__`` is asked.

It takes a tensor's address through DLPack's exchange table, which torch gives compiled code. Such an extension needs
none of torch's own headers, and is built in half a second; one with ``torch/extension.h`` takes half a minute.
"""

import atexit
import functools
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import cpp_extension

__all__ = ["build_native_reader", "read_natively"]

_SOURCE = """
#include <Python.h>
#include <ATen/dlpack.h>
#include <cstring>

static bool look(PyObject* tensor, DLTensor* seen) {
  PyObject* capsule = PyObject_GetAttrString((PyObject*)Py_TYPE(tensor), "__dlpack_c_exchange_api__");
  if (capsule == nullptr) return false;
  auto api = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DECREF(capsule);
  return api != nullptr && api->dltensor_from_py_object_no_sync(tensor, seen) == 0;
}

static PyObject* copy(PyObject*, PyObject* args) {
  PyObject *to, *from;
  DLTensor target, source;
  if (!PyArg_ParseTuple(args, "OO", &to, &from) || !look(to, &target) || !look(from, &source)) return nullptr;
  int64_t nbytes = source.dtype.bits / 8;
  for (int i = 0; i < source.ndim; ++i) nbytes *= source.shape[i];
  std::memcpy(static_cast<char*>(target.data) + target.byte_offset,
              static_cast<char*>(source.data) + source.byte_offset, nbytes);
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"copy", copy, METH_VARARGS, ""}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "native_reader_built", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_native_reader_built() { return PyModule_Create(&module); }
"""


@functools.cache
def build_native_reader() -> str:
    """Path of the extension, built once by each process that asks; skips the test where nothing can build it."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler: there is no $CXX, c++, g++ or clang++")
    headers = sysconfig.get_paths()["include"]
    if not Path(headers, "Python.h").is_file():
        pytest.skip(f"needs Python's headers: there is no Python.h in {headers}")
    folder = Path(tempfile.mkdtemp(prefix="native-reader-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    source, built = folder / "reader.cpp", folder / "native_reader_built.so"
    source.write_text(_SOURCE)
    includes = [f"-I{path}" for path in (headers, *cpp_extension.include_paths())]
    shared = ["-bundle", "-undefined", "dynamic_lookup"] if os.uname().sysname == "Darwin" else ["-shared"]
    command = [compiler, "-std=c++17", "-fPIC", *shared, *includes, str(source), "-o", str(built)]
    subprocess.run(command, check=True, timeout=60)
    return str(built)


def read_natively(built: str, tensor: Tensor) -> Tensor:
    """A copy of a contiguous CPU tensor's values, read by the extension at that path."""
    with torch._C.DisableTorchFunctionSubclass():  # nothing is asked of the tensor but its shape
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
    _load(built).copy(values, tensor)
    return values


@functools.cache
def _load(built: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("native_reader_built", built)
    spec = importlib.util.spec_from_file_location("native_reader_built", built, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
