"""The job config: read, checked value by value, and as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from torchtitan.config import ConfigManager

from amo_dist.schedule.schedule_file import read_toml
from torchtitan_ext import learning_rate
from torchtitan_ext.data import loader
from torchtitan_ext.plugin import geometry, optimizers, sections

_DEFAULTS = {
    "job.custom_config_module": "torchtitan_ext.job_config",
    "experimental.custom_import": "torchtitan_ext",
}

WITHOUT_VALIDATOR = ("deepseek_v3",)
"""Models that torchtitan cannot validate: it would stop at an assertion."""


def parse(args: Sequence[str]) -> Any:
    """The job config of a command line, as torchtitan's ``JobConfig`` with the project's fields.

    Names ``torchtitan_ext`` as config module and import where neither the command line nor the
    file does, so that a config written for plain torchtitan works too.

    Args:
        args: torchtitan's arguments, such as ``["--job.config_file", "x.toml"]``.

    Raises:
        ValueError: For a file that cannot be read, an unknown field, a value of a wrong type or a
            combination that cannot work.
        SystemExit: For a mistake among the arguments, already explained on standard error.
    """
    manager = Manager()
    # torchtitan logs the traceback of a config file that it cannot read; the error says it all.
    path = argument(args, "job.config_file")
    values = {} if path is None else read_toml("job.config_file", path)
    with _quiet_unless_first():
        config = manager.parse_args([*args, *missing_defaults(args, values)])
    learning_rate.resolve(config.optimizer)  # now, so that a logged config shows the rate
    validate(config)
    return config


def validate(config: Any) -> None:
    """Check the fields that depend on one another.

    Raises:
        ValueError: Naming the field, what was found and what was expected.
    """
    optimizers.validate(config.optimizer)
    geometry.validate(config)
    _check_sizes(config.training)
    loader.validate(config)
    _check_validator(config)
    if config.fault_tolerance.enable:
        raise ValueError("fault_tolerance.enable: found true, torchft is not supported")
    if config.optimizer.name != "AMO" or config.optimizer.allow_unlocked:
        return
    if config.optimizer.amo.observe_only:  # which has no plan to lock
        return
    lock_step, steps = config.optimizer.amo.lock_step, config.training.steps
    if steps < lock_step:
        raise ValueError(
            f"training.steps: found {steps}, expected at least observe_until + transition_steps = "
            f"{lock_step} of [optimizer.amo], where the plan locks "
            "(or optimizer.allow_unlocked = true)"
        )


def _check_validator(config: Any) -> None:
    if config.validation.enable and config.model.name in WITHOUT_VALIDATOR:
        raise ValueError(
            "validation.enable: found true, expected false: torchtitan has no validator for "
            f"model.name = {config.model.name!r}"
        )


def _check_sizes(training: Any) -> None:
    for field in ("steps", "seq_len", "local_batch_size"):
        found = getattr(training, field)
        if found < 1:
            raise ValueError(f"training.{field}: found {found}, expected an integer >= 1")
    found = training.global_batch_size
    if found < 1 and found != -1:
        raise ValueError(
            f"training.global_batch_size: found {found}, expected an integer >= 1, or -1 for "
            "local_batch_size times the data-parallel degree"
        )


def check_values(cls: type, data: dict[str, Any], section: str = "") -> None:
    """Check names and types of TOML values against a config dataclass, sections included.

    Raises:
        ValueError: For the first unknown field (with the nearest known one) or wrong type.
    """
    hints = typing.get_type_hints(cls)
    known = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    for name, value in data.items():
        where = f"{section}.{name}" if section else name
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise ValueError(f"{where}: unknown field; {hint}")
        expected = known[name]
        if dataclasses.is_dataclass(expected) and isinstance(value, dict):
            check_values(typing.cast(type, expected), value, where)
        elif not _matches(value, expected):
            raise ValueError(f"{where}: found {value!r}, expected {_describe(expected)}")


def _matches(value: object, expected: Any) -> bool:
    origin, parameters = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, one) for one in parameters)
    if origin is typing.Literal:
        return value in parameters
    if origin is list:
        return isinstance(value, list) and all(_matches(one, parameters[0]) for one in value)
    if expected is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(expected, type) or isinstance(value, expected)


def _describe(expected: Any) -> str:
    if typing.get_origin(expected) is typing.Literal:
        return f"one of {', '.join(map(repr, typing.get_args(expected)))}"
    if dataclasses.is_dataclass(expected):
        return "a section"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return names.get(expected, str(expected))


class Manager(ConfigManager):
    """torchtitan's parser with readable errors, and with sections that agree."""

    def parse_args(self, args: Sequence[str] = ()) -> Any:
        """The job config of arguments and file."""
        config: Any = super().parse_args([*args])
        given = sections.given_fields(args, self._maybe_load_toml([*args]) or {})
        sections.settle(config.optimizer, given)
        return config

    def _dict_to_dataclass(self, cls: type, data: dict[str, Any]) -> Any:
        if cls.__name__.endswith("JobConfig"):  # the root; sections follow by recursion
            check_values(cls, data)
        try:
            return super()._dict_to_dataclass(cls, data)
        except ValueError as error:
            # A section that checks itself names its field, but not where it stands.
            raise ValueError(f"{_section_of(cls)}{error}") from None

    def _validate_config(self) -> None:
        # torchtitan looks for tokenizer files here, of which the byte tokenizer has none.
        if self.config.data.tokenizer != "byte":
            super()._validate_config()


def _section_of(cls: type) -> str:
    name = {"AMOConfig": "optimizer.amo", "MuonSection": "optimizer.muon"}.get(cls.__name__)
    return f"[{name}] " if name else ""


def argument(args: Sequence[str], name: str) -> str | None:
    """The value of ``--name value`` or ``--name=value``, with either ``_`` or ``-``."""
    for index, arg in enumerate(args):
        key, equals, value = arg.partition("=")
        if key.replace("-", "_") == f"__{name}":
            return value if equals else (args[index + 1] if index + 1 < len(args) else None)
    return None


def missing_defaults(args: Sequence[str], values: dict[str, Any]) -> list[str]:
    """Arguments that name ``torchtitan_ext`` where the arguments and the file name nothing."""
    found = []
    for name, default in _DEFAULTS.items():
        section, field = name.split(".")
        if not (argument(args, name) or values.get(section, {}).get(field)):
            found.append(f"--{name}={default}")
    return found


@contextlib.contextmanager
def _quiet_unless_first() -> Iterator[None]:
    """Drop what is printed by all ranks but the first: they all read the same command line."""
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield
