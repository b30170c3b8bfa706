"""What a user wrote, checked key by key: config files and the command line's options.

Invariant: every key at every depth is an argument of the class that it is given to, or is
refused by its full path with the nearest known key. Types and values are the parser's to check;
its messages are made short here. Instantiates nothing.
"""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace

from lightning_fold.cli_errors import PROGRAM, UsageError
from lightning_fold.config import FoldedConfig
from lightning_fold.topology.doctor import nearest

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
CONFIG_OPTIONS = ("--config", "-c")
_NO_KEYS = ("config", "print_config", "help")

_FIELD = re.compile(r'Parser key "([^"]+)":?\s*')
_EXPECTED = re.compile(r"Expected an? (?P<legal>.+?)\. Got value: (?P<value>.*)")
_SUBTYPES = re.compile(
    r"Subtypes: \[(?P<legal>[^\n]*)\]\n.*?Given value: (?P<value>[^\n]*)", re.DOTALL
)
_MISSING = re.compile(r"arguments are required: (?:\w+\.)?(\w+)")
_CLASS = re.compile(r"Problem with given class_path '(?P<name>[^']*)':\s*(?P<reason>[^\n]*)")


class CommandParser(argparse.ArgumentParser):
    """The options of a command that runs no Trainer; refuses them as all commands do.

    Args:
        command: Its name.
        description: What it does, in a sentence.
    """

    def __init__(self, command: str, description: str) -> None:
        super().__init__(f"{PROGRAM} {command}", description=description, allow_abbrev=False)
        self._command = command

    def error(self, message: str) -> NoReturn:
        """Raise `UsageError` where argparse would print and exit."""
        option = message.removeprefix("argument ").partition(":")[0]
        change = f"  Change `{option}`." if message.startswith("argument --") else ""
        raise UsageError(f"{self._command}: {message}.{change}")


def writable(command: str, name: str | None, option: str) -> Path | None:
    """Return the path of a file that a command is to write, None where it is not asked for.

    Raises:
        UsageError: It is a directory, or lies in none, or says that it is no picture.
    """
    if name is None:
        return None
    path = Path(name)
    if option == "--png" and path.suffix.lower() != ".png":
        raise UsageError(
            f"{command}: --png {name!r} would be a PNG under another name. Legal: a name that "
            "ends in .png. Change `--png`."
        )
    if path.is_dir() or not path.parent.is_dir():
        reason = "is a directory" if path.is_dir() else f"lies in no directory ({path.parent})"
        raise UsageError(f"{command}: {option} {name!r} {reason}. Change `{option}`.")
    return path


def in_options(message: str, names: Mapping[str, str]) -> str:
    """Name a command's options where a message names the strategy's arguments, the keys."""
    for name, option in names.items():
        message = message.replace(f"`{name}`", f"`--{option}`")
    return message


def check_arguments(arguments: Iterable[str], known: Namespace) -> None:
    """Refuse unreadable config files, then keys that no class takes.

    Args:
        arguments: The command line after the subcommand.
        known: Every key the subcommand takes, groups as nested namespaces.

    Raises:
        UsageError: Names the file or the key.
    """
    written: dict[str, Any] = {}
    arguments = list(arguments)
    for path in _config_paths(arguments):
        config = read_config(path)
        check_keys(config, known)
        _merge(config, into=written)
    for segments in _options(arguments):
        _put(written, segments)
    check_keys(written, known)


def read_config(path: str) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file.

    Raises:
        UsageError: There is no such file, or it holds something else.
    """
    file = Path(path)
    if not file.is_file():
        kind = "is a directory, not a file" if file.is_dir() else "does not exist"
        raise UsageError(f"config file {path!r} {kind}. Change `--config`.")
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"config file {path!r} cannot be read ({error}). Change `--config`."
        ) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"config file {path!r} is not YAML: {reason}. Change `--config`."
        ) from None
    if isinstance(config, dict) and config:
        return config
    held = f"holds {type(config).__name__} {config!r:.40}" if config else "is empty"
    raise UsageError(
        f"config file {path!r} {held}; it must be a mapping with keys such as trainer, model "
        "and data. Change `--config`."
    )


def check_keys(config: Mapping[Any, Any], known: Namespace, path: str = "") -> None:
    """Refuse the first key of a nested config, in its order, that is not known.

    Raises:
        UsageError: Names the key by its full path, and the nearest known one.
    """
    defaults = vars(known)
    for key, value in config.items():
        place = f"{path}.{key}" if path else str(key)
        if key not in defaults:
            raise UsageError(_explain_unknown(place, str(key), list(defaults)))
        _check_value(value, defaults[key], place)


def explain_parse_error(message: str) -> str:
    """Say in one line what a message of jsonargparse says in many: field, value, legal values."""
    fields = _FIELD.findall(message)
    missing = _MISSING.search(message)
    if missing is not None:
        return f"`{missing[1]}` is missing. Give it in the config file or as `--{missing[1]}`."
    if not fields:
        return " ".join(message.split())
    # The innermost complaint comes last; outer ones repeat it for every type of a union.
    place = ".init_args.".join(fields)
    tail = message[[*_FIELD.finditer(message)][-1].end() :]
    problem = _CLASS.search(tail)
    if problem is not None:
        reason = f"class_path {problem['name']!r}: {problem['reason']}"
        return f"{place}: {reason.rstrip('.')}.  Change `{place}`."
    wrong = _EXPECTED.match(tail) or _SUBTYPES.search(tail)
    if wrong is None:
        return f"{place}: {' '.join(tail.split()).rstrip('.')}.  Change `{place}`."
    value, legal = wrong["value"].strip(), _listed_types(wrong["legal"])
    return f"{place}={value} is not a value of this field. Legal: {legal}.  Change `{place}`."


def _config_paths(arguments: list[str]) -> Iterator[str]:
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        option, is_joined, value = argument.partition("=")
        path = value if is_joined else following
        # The parser reads remote files by itself.
        if option in CONFIG_OPTIONS and "://" not in path:
            yield path


def _options(arguments: list[str]) -> Iterator[list[str]]:
    """Key paths of the options that name a key."""
    for argument in arguments:
        option = argument.partition("=")[0]
        segments = option[2:].split(".")
        if not option.startswith("--") or segments[0] in _NO_KEYS or segments[-1] == "help":
            continue
        # A trailing plus appends to a list.
        if not option.endswith("+"):
            yield segments


def _merge(config: Mapping[str, Any], *, into: dict[str, Any]) -> None:
    for key, value in config.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, Mapping):
            _merge(value, into=old)
        else:
            into[key] = value


def _put(config: dict[str, Any], segments: list[str]) -> None:
    """Enter an option's key; `init_args` may be left out of its path, as the parser allows."""
    node: Any = config
    for depth, segment in enumerate(segments):
        if "class_path" in node and segment not in CLASS_KEYS:
            node = node.setdefault("init_args", {})
        if depth == len(segments) - 1:
            node[segment] = None
            return
        node = node.setdefault(segment, {})
        if not isinstance(node, dict):
            # A list, or a class that only the command line names.
            return


def _check_value(value: object, default: object, path: str) -> None:
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_value(item, None, f"{path}[{index}]")
    elif isinstance(value, Mapping) and "class_path" in value:
        _check_class(value, path)
    elif isinstance(default, Namespace) and isinstance(value, Mapping):
        check_keys(value, default, path)
    elif isinstance(default, Namespace) and value is not None:
        raise UsageError(f"{path}={value!r} must be a mapping of keys to values. Change `{path}`.")


def _check_class(config: Mapping[Any, Any], path: str) -> None:
    for key in config:
        if key not in CLASS_KEYS:
            raise UsageError(_explain_unknown(f"{path}.{key}", str(key), list(CLASS_KEYS)))
    known = _class_arguments(config["class_path"], path)
    init_args = config.get("init_args")
    if known is not None and isinstance(init_args, Mapping):
        check_keys(init_args, known, f"{path}.init_args")


def _class_arguments(class_path: object, path: str) -> Namespace | None:
    """Arguments of a class with their defaults; None where only the parser can tell."""
    module_name, _, name = str(class_path).rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError):
        return None
    if not hasattr(module, name):
        likely = nearest(name, dir(module))
        hint = (
            f"Change it to `{module_name}.{likely}`." if likely else f"Change `{path}.class_path`."
        )
        raise UsageError(f"{path}.class_path={class_path!r}: {module_name} has no {name}. {hint}")
    kind = getattr(module, name)
    if not isinstance(kind, type):
        return None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, None, fail_untyped=False)
    return parser.get_defaults(skip_validation=True)


def _explain_unknown(place: str, key: str, known: list[str]) -> str:
    if "tensor_parallel_size" in known:
        try:
            FoldedConfig.from_mapping({key: None})
        except ValueError as error:
            return f"{place}: {error}"
    likely = nearest(key, known)
    hint = f"Change it to `{likely}`." if likely else f"Legal: {', '.join(known)}."
    return f"`{place}` is not a known key. {hint}"


def _listed_types(legal: str) -> str:
    plain = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", legal).replace("typing.", "")
    return re.sub(r"Literal\[([^]]*)\]", r"\1", plain).replace("NoneType", "null")
