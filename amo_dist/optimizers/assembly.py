"""How an optimizer is put together: from its groups, as a copy, and around swapped parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from amo_dist.config import MuonConfig
from amo_dist.distributed.groups import Given, Kept, replica_ranks
from amo_dist.distributed.layout import local_tensor
from amo_dist.engine.adaptive import make_driver
from amo_dist.engine.driver import Driver
from amo_dist.engine.engine import Engine
from amo_dist.engine.parameters import Parameters, check_swap, resolve, take_apart
from amo_dist.engine.rule import UpdateRule
from amo_dist.engine.timing import Stopwatch
from amo_dist.optimizers.arguments import check_each_group, check_keys
from amo_dist.schedule.policies import Policy, named_policy
from amo_dist.state import control as controls
from amo_dist.state.control import Control


class Assembly(torch.optim.Optimizer):
    """What PyTorch and trainers do to any optimizer: build, copy and print it, swap its parameters.

    Args:
        params: Groups from `amo_dist.param_groups`.
        defaults: Of hyperparameters that groups do not name.
        policy: Which schedule when.
        config: The settings.
        process_group: As for `Muon`.
        allow_no_matrices: Whether AdamW may have all parameters.

    Raises:
        ValueError: Names what was found and what was expected.
    """

    rule_class: ClassVar[type[UpdateRule]] = UpdateRule

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        policy: Policy,
        config: MuonConfig,
        process_group: Given,
        allow_no_matrices: bool,
    ) -> None:
        groups, structure = take_apart(params, replica_ranks(process_group))
        if allow_no_matrices and not any(structure.views) and not policy.is_fixed:
            policy = named_policy("kj")  # there is nothing to observe or to fit
        self._is_built = False
        super().__init__(groups, {**defaults, "lr_scale": 1.0, "control": ""})
        self._is_built = True
        # PyTorch's schedulers that cycle a momentum take `betas` where there are any: AdamW's, and
        # not Muon's. Groups have `momentum` where they, or a scheduler, name it.
        del self.defaults["betas"]
        self.defaults |= {"momentum": config.momentum, "nesterov": config.nesterov}
        check_each_group(self.param_groups)
        rule = self.rule_class(config)
        for group in self.param_groups:
            rule.check(group)
        self._structure, self._allow_no_matrices = structure, allow_no_matrices
        self._process_group, self._stopwatch = process_group, Stopwatch()
        self._assemble(Control(0, 0, config, policy))
        self._check_keys(self.param_groups)
        if len(self._engine.membership.ranks) == 1:
            self._check_matrices(len(self._engine.parameters.matrices))
        self._engine.make_state()

    def _assemble(self, control: Control) -> None:
        """Make all that is not copied, and that knows the parameters in the groups."""
        parameters = resolve(self.param_groups, self._structure)
        self._engine, self._driver = self._parts(control, parameters)

    def _parts(self, control: Control, parameters: Parameters) -> tuple[Engine, Driver]:
        """An engine and a driver that go on from a control state."""
        counts = control.steps_taken, control.steps_skipped
        driver = make_driver(control.policy, control.config, *counts)
        rule = self.rule_class(control.config)
        engine = Engine(
            parameters, self.param_groups, self.state, rule, control.config, self._process_group
        )
        engine.take_chosen(control.kernels)
        return engine, driver

    def _control(self) -> Control:
        driver, chosen = self._driver, self._engine.chosen
        counts = driver.steps_taken, driver.steps_skipped
        return Control(*counts, driver.config, driver.policy, dict(chosen))

    def _restoring(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """What restores a state of `control_state_dict`, once it is known to be good."""
        before, driver_before = self._engine, self._driver
        is_alone = len(before.membership.ranks) == 1
        types = before.parameters.operator_types
        control = controls.restore(state, self._control(), types, is_alone=is_alone)
        engine, driver = self._parts(control, before.parameters)

        def restore() -> None:
            if before.world is not None:
                engine.connect(before.world)
                driver.resume(before.world)
            driver_before.discard()
            self._engine, self._driver = engine, driver
            self._write_control(controls.control_record(self._control()))

        return restore

    def _write_control(self, record: Mapping[str, Any]) -> None:
        text = controls.to_text(record)
        for group in self.param_groups:
            group["control"] = text

    def _follow(self) -> None:
        """Take the parameters that a trainer has put into the groups, before the first step.

        Accelerate does so: it shards the model after the optimizer was built. Layouts and state
        are made anew then.

        Raises:
            ValueError: They have other shapes, or come too late; or a parameter was cast or moved.
        """
        engine = self._engine
        before = engine.parameters
        if engine.is_over(self.param_groups, self.state) and before.are_in(self.param_groups):
            before.check_unchanged()
            return
        check_swap(before, self.param_groups)
        if self._driver.steps_taken or engine.world is not None or _holds_values(self.state):
            raise ValueError(
                f"{_first_swapped(before, self.param_groups)}: found another tensor in "
                "param_groups than before, or another param_groups or state, after the first step "
                "or after a state was loaded, expected the same: swap parameters (as fully_shard "
                "and trainers do) first, then load and step"
            )
        self.state.clear()
        self._assemble(self._control())
        self._engine.make_state()

    def _fault(self) -> str:
        """Why groups and parameters cannot be used as they are now, or nothing."""
        try:
            self._follow()
            self._check_keys(self.param_groups)
        except ValueError as error:
            return str(error)
        return ""

    def _check_keys(self, groups: Sequence[Mapping[str, Any]]) -> None:
        check_keys(groups, self.rule_class.defaults)

    def _check_matrices(self, num_matrices: int) -> None:
        """Refuse to train by AdamW alone, unless told so."""
        if num_matrices or self._allow_no_matrices:
            return
        entries = self._engine.parameters.entries
        shapes = {entry.name: tuple(entry.layout.shape) for entry in entries}
        # What might be a matrix comes first.
        told = sorted(shapes.items(), key=lambda pair: len(pair[1]) < 2)[:3]
        some = ", ".join(f"{name} {shape}" for name, shape in told)
        raise ValueError(
            f"params: found no matrix among {len(shapes)} parameters ({some}...), expected at "
            "least one: name yours by param_groups(model, patterns={...}), or have AdamW train "
            "all of them by allow_no_matrices=True"
        )

    # ---------------------------------------------------------------- as PyTorch's optimizers

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction; later the structure is fixed.

        Raises:
            ValueError: After construction.
        """
        if getattr(self, "_is_built", False):
            raise ValueError(
                "add_param_group: found a group after construction, expected all groups at once: "
                "ranks agree on the structure only once"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: as for any PyTorch optimizer without hooks.

        A collective where `Muon.control_state_dict` is.
        """
        self._follow()
        self._driver.begin(self._engine.check, saving=True)
        given = Kept(self._process_group, self._engine.membership.ranks)
        kept = {"_structure": self._structure, "_allow_no_matrices": self._allow_no_matrices}
        kept |= {"_is_built": True, "_process_group": given, "control": self._control()}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Build a copy, which agrees with all ranks at its first step, as a new optimizer does."""
        rest = {key: value for key, value in state.items() if key != "control"}
        given = state["_process_group"].given
        super().__setstate__({**rest, "_process_group": given, "tracker": None})
        self._stopwatch = Stopwatch()
        self._assemble(state["control"])

    def __repr__(self) -> str:
        """As for any PyTorch optimizer, without the long text of ``control``."""
        lines = super().__repr__().split("\n")
        return "\n".join(line for line in lines if not line.startswith("    control: "))


def _first_swapped(before: Parameters, groups: list[dict[str, Any]]) -> str:
    """The name of the first parameter that is another tensor now; else of the first of all."""
    found = [param for group in groups for param in group["params"]]
    entries = before.entries
    pairs = zip(entries, found, strict=True)
    return next((entry.name for entry, param in pairs if entry.param is not param), entries[0].name)


def _holds_values(state: Mapping[Any, Mapping[str, torch.Tensor]]) -> bool:
    """Whether any tensor of the state is not all zero; waits for the device."""
    tensors = (local_tensor(value) for own in state.values() for value in own.values())
    return any(bool(tensor.any()) for tensor in tensors)
