"""Building a model whose parameters have no values, and noticing the values that get lost so.

A value that an initialiser draws is drawn again once the model is sharded. One that a constructor
sets by itself would be lost without a word; it is noted here, with its place, and refused by
`materialise`. A model that somebody builds under `torch.device("meta")` is not watched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

INITIALISERS = ("_init_weights", "init_weights")
"""Methods of a model that fill the module they are given."""

_MARK = "_lightning_fold_set_at"
_KEEPS_VALUES = ("requires_grad_", "share_memory_", "detach_", "rename_", "retain_grad")


@contextmanager
def parameters_on_meta() -> Generator[None, None, None]:
    """Move every parameter to meta as a module takes it; buffers keep the values they are given.

    Unlike `torch.device("meta")`, which leaves rotary tables, masks and metrics without values. At
    most one parameter is real at a time, and untouched memory of one costs nothing.
    """
    # A tensor that two modules take stays one parameter.
    taken: Any = WeakTensorKeyDictionary()
    writes = _Writes()

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if type(param) is not nn.Parameter or param.is_meta:
            return None
        if param not in taken:
            twin = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            twin.__dict__.update(param.__dict__)
            taken[param] = twin
            writes.watch(twin, module)
            if module._parameters.get(name) is not None:
                # A value in place of the one that the module's own initialiser gives.
                _note(twin, sys._getframe(1))
        meta: nn.Parameter = taken[param]
        return meta

    # The stub says that the hook returns None; its documentation allows a parameter.
    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with writes:
            yield
    finally:
        handle.remove()


def values_set_outside(module: nn.Module) -> dict[str, str]:
    """Where parameters got values that no initialiser would give them again, by name."""
    return {
        name: getattr(param, _MARK)
        for name, param in module.named_parameters()
        if hasattr(param, _MARK)
    }


class _Writes(TorchFunctionMode):
    """Notes each write to a watched parameter that comes from no initialiser."""

    def __init__(self) -> None:
        super().__init__()
        # By storage, which `param.data` and views share.
        self._watched: dict[int, tuple[nn.Parameter, nn.Module]] = {}

    def watch(self, param: nn.Parameter, owner: nn.Module) -> None:
        self._watched[param.untyped_storage()._cdata] = (param, owner)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        found = None
        frame = sys._getframe(1)
        if isinstance(target, Tensor) and target.is_meta and (_writes(func) or _fills(frame)):
            found = self._watched.get(target.untyped_storage()._cdata)
        if found is not None and not _is_initialising(found[1], frame):
            _note(found[0], frame)
        return func(*args, **kwargs)


def _writes(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__set__":
        return getattr(func, "__self__", None) is torch.Tensor.data
    in_place = name.endswith("_") and not name.endswith("__")
    return (in_place and name not in _KEEPS_VALUES) or name == "__setitem__"


def _fills(frame: FrameType) -> bool:
    """Whether a function of torch.nn.init asks: some return early where a tensor is on meta."""
    name = frame.f_code.co_name
    return frame.f_globals.get("__name__") == "torch.nn.init" and name.endswith("_")


def _is_initialising(owner: nn.Module, frame: FrameType | None) -> bool:
    """Whether the owner's `reset_parameters` runs, or a model's initialiser of modules."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "reset_parameters" and frame.f_locals.get("self") is owner:
            return True
        if code.co_name in INITIALISERS and {"module", "m"} & set(code.co_varnames[1:2]):
            return True
        frame = frame.f_back
    return False


def _note(param: nn.Parameter, frame: FrameType | None) -> None:
    """Note the line of the user's code: the first one outside torch and this file."""
    while frame is not None and _is_inside(frame):
        frame = frame.f_back
    if frame is not None:
        path = Path(frame.f_code.co_filename)
        setattr(param, _MARK, f"{path.name}:{frame.f_lineno}, in {frame.f_code.co_name}")


def _is_inside(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__"))
    return name == __name__ or name.partition(".")[0] in ("torch", "contextlib")
