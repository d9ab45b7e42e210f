"""The Muon family: one step is momentum, exchange(orthogonalize), scaled update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.agreement import world_group
from amo_dist.engine.adaptive import make_driver
from amo_dist.engine.driver import Driver
from amo_dist.engine.engine import Engine
from amo_dist.engine.orders import Probe
from amo_dist.engine.parameters import check_groups, describe_group, resolve
from amo_dist.engine.rule import UpdateRule
from amo_dist.engine.timing import Stopwatch
from amo_dist.engine.world import World, agree_on_world
from amo_dist.optimizers.arguments import as_policy, check_each_group, check_hyperparameters
from amo_dist.schedule.policies import Policy
from amo_dist.schedule.types import Schedule
from amo_dist.state import control as controls
from amo_dist.state import load

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Measures every matrix at some steps; see `amo_dist.tools.tracker.GeometryTracker`."""

    def is_due(self, step: int) -> bool:
        """Whether to measure at a step; the same on every rank."""

    def measure(self, name: str, momentum: Tensor, result: Tensor) -> None:
        """Measure one matrix that this rank owns."""

    def collect(self, step: int, world: World) -> None:
        """Bring the measurements together; a collective over the world."""


class Muon(torch.optim.Optimizer):
    """Muon over any layout: momentum stays sharded, each matrix is orthogonalized by one rank.

    ``B <- momentum * B + G``; ``M = G + momentum * B`` with Nesterov, else ``B``;
    ``W <- W * (1 - lr * weight_decay) - lr * 0.2 * sqrt(max(m, n)) * orthogonalize(M)``. The rest
    of the parameters goes through PyTorch's own AdamW with the same learning rate.

    State is made at once, for every parameter, with its placements, so that all ranks have the
    same keys: ``momentum_buffer`` (``config.momentum_dtype``) for matrices, ``step``, ``exp_avg``
    and ``exp_avg_sq`` for the rest. The state of the schedule rides as a JSON string, the same on
    every rank, under ``control`` of each parameter group.

    A subclass that names another ``rule_class`` is another optimizer of the family.

    Args:
        params: What `amo_dist.param_groups` returns. Groups may be split further.
        lr: Learning rate of all groups; ``lr_scale`` of a group multiplies it.
        weight_decay: Decoupled, of all groups that do not name their own.
        schedule: A name such as ``kj``, a `Schedule`, one for each operator type, or a `Policy`.
        config: Numerics and exchange.
        betas: Of AdamW.
        eps: Of AdamW.
        process_group: Ranks over which plain tensors are replicas, as under DDP: each matrix is
            then orthogonalized once, not once a rank. Without it plain tensors are this rank's own.
        own: Hyperparameters of the rule's own, for all groups that do not name theirs.

    Raises:
        ValueError: Groups of another origin, meta tensors, a bad hyperparameter, or settings that
            the parameters' device cannot run; names field, found and expected.
    """

    rule_class: ClassVar[type[UpdateRule]] = UpdateRule

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        *,
        schedule: str | Schedule | Mapping[str, Schedule] | Policy = "kj",
        config: MuonConfig | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        process_group: dist.ProcessGroup | None = None,
        **own: float,
    ) -> None:
        groups = check_groups(params)
        config = MuonConfig() if config is None else config
        policy = as_policy(schedule)
        views = [group.pop("matrix_views", {}) for group in groups]
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
        }
        check_hyperparameters(defaults)
        if unknown := sorted(set(own) - set(self.rule_class.defaults)):
            raise TypeError(f"{type(self).__name__} got unexpected keyword arguments {unknown}")
        defaults |= {"lr_scale": 1.0, "control": "", **self.rule_class.defaults, **own}
        self._is_built = False
        super().__init__(groups, defaults)
        self._is_built = True
        check_each_group(self.param_groups)
        rule = self.rule_class(config)
        for group in self.param_groups:
            rule.check(group)
        # Out of the groups: checkpoint helpers take no lists of strings there.
        names = [group.pop("param_names") for group in self.param_groups]
        parameters = resolve(self.param_groups, names, views, _replica_ranks(process_group))
        self._process_group = process_group
        self._engine = Engine(parameters, self.param_groups, self.state, rule, config)
        self._driver = make_driver(policy, config)
        self._stopwatch = Stopwatch()
        self.tracker: Tracker | None = None
        """Measures every matrix at the steps that it names; set it on all ranks."""
        self._engine.make_state()
        self._write_control()

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

    # ---------------------------------------------------------------- one step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step: a collective over all ranks.

        Args:
            closure: Evaluates the model again and returns the loss, as for any PyTorch optimizer.

        Returns:
            What ``closure`` returned, else None.

        Raises:
            NonFiniteGradientError: On every rank, before anything has changed, where a gradient
                of any rank is NaN, inf, or so large that state would overflow, and
                ``config.nonfinite`` is ``error``.
            NonFiniteUpdateError: On every rank, before anything has changed, where the update of
                a matrix was NaN or inf in the step before, and left out: see `check_last_update`.
            MissingGradientError: On every rank, where a parameter has a gradient on some of its
                ranks only.
            RankMismatchError: On every rank, where ranks hold different structures, schedules or
                hyperparameters.

        On devices nothing here waits for the device in most steps: what is wrong with a step
        leaves parameters and state as they were, and is raised by the next one, or when state is
        saved. Steps wait that observe, measure a residual, deal matrices anew, or bring gradients
        to the placements of their parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._stopwatch.measure(self._engine.parameters.device):
            self._step()
        return loss

    def _step(self) -> None:
        engine, driver, world = self._engine, self._driver, self._connect()
        driver.begin(engine.check)
        orders = driver.orders(engine.parameters.matrix_names)
        tracker = self.tracker
        if tracker is not None and tracker.is_due(orders.step):
            names = frozenset(info.name for info in world.registry)
            orders = orders.with_probe(Probe(names, tracker.measure, is_wide=True))
        else:
            tracker = None
        agreed = engine.agree(orders, driver.describe(orders))
        if agreed.fault:
            logger.warning("step %d skipped: %s", orders.step, agreed.fault)
        else:
            engine.run(orders, agreed)
        driver.finish(orders, skipped=bool(agreed.fault))
        if tracker is not None:
            tracker.collect(orders.step, world)

    def _connect(self) -> World:
        """Agree with all ranks on the structure; once, at the first step."""
        if self._engine.world is None:
            configuration = {
                **self.config.to_dict(),
                "optimizer": type(self).__name__,
                "policy": self.policy.name,
            }
            own = self.rule_class.defaults
            groups = [describe_group(group, own) for group in self.param_groups]
            parameters = self._engine.parameters
            world = agree_on_world(parameters, groups, configuration, self._process_group)
            self._driver.connect(world)
            # Only now: after an error above all of it is done again.
            self._engine.connect(world)
        assert self._engine.world is not None
        return self._engine.world

    def check_last_update(self) -> None:
        """Look now for what only the next step would tell; a collective over the world.

        For the end of training and for checkpoints: saving communicates nothing, so that one rank
        may save alone, and what a rank left out is known to that rank only.

        Raises:
            NonFiniteUpdateError: On every rank, where the last update of a matrix was left out.
        """
        self._driver.settle(self._engine.check)
        if self._engine.check is not None:
            self._engine.check.agree_on_updates()

    # ---------------------------------------------------------------- what it holds

    @property
    def config(self) -> MuonConfig:
        """The settings in force."""
        return self._driver.config

    @property
    def policy(self) -> Policy:
        """Which schedule when."""
        return self._driver.policy

    @property
    def world(self) -> World | None:
        """What all ranks agreed on at the first step; None before."""
        return self._engine.world

    @property
    def operator_types(self) -> tuple[str, ...]:
        """Operator type of each matrix of this process."""
        return self._engine.parameters.operator_types

    @property
    def params_by_name(self) -> dict[str, Tensor]:
        """The parameters of this process by their cleaned names, in the order of the groups."""
        return {entry.name: entry.param for entry in self._engine.parameters.entries}

    @property
    def num_steps_taken(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._driver.steps_taken

    @property
    def phase(self) -> str:
        """Phase of the last step taken; that of the first before there is one."""
        return self.policy.phase(max(self.num_steps_taken, 1))

    def metrics(self) -> dict[str, float]:
        """Plain numbers for a logger, about the last step taken."""
        driver, step, found = self._driver, max(self.num_steps_taken, 1), {}
        if self.world is not None:
            names = self._engine.parameters.matrix_names
            found = self.policy.metrics(step)
            found |= self._engine.metrics(driver.schedules_of(names, step))
        return {
            **found,
            "newton_schulz/residual": driver.residual,
            "optimizer/steps_skipped": float(driver.steps_skipped),
            "optimizer/seconds": self._stopwatch.seconds(),
            "optimizer/observe_seconds": driver.observe_seconds,
        }

    def sent_bytes_by_peer(self) -> dict[int, int]:
        """Bytes of matrices that this rank sent in the last step, by global rank of the peer."""
        return self._engine.sent_bytes_by_peer()

    # ---------------------------------------------------------------- checkpoints

    def control_state_dict(self) -> dict[str, Any]:
        """The state of the schedule as JSON values, the same on every rank.

        With ``observe_in_background`` a collective over the world after a step of observation.
        A rank that left out an update in the last step logs a warning, and raises nothing: see
        `check_last_update`.

        Raises:
            RankMismatchError: On every rank, where an observation in the background failed on some.
            As `step`: on devices, of the last step, which then was not taken.
        """
        self._driver.begin(self._engine.check, saving=True)
        if self._engine.check is not None:
            self._engine.check.warn_of_updates()
        return controls.control_record(_control(self._driver, self._engine))

    def load_control_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `control_state_dict` returned; all or nothing.

        Raises:
            ValueError: Names the field, what was found and what was expected.
        """
        before, world = self._engine, self._engine.world
        control = controls.restore(
            state,
            _control(self._driver, before),
            self.operator_types,
            is_alone=world_group() is None,
        )
        rule = self.rule_class(control.config)
        engine = Engine(before.parameters, self.param_groups, self.state, rule, control.config)
        driver = make_driver(
            control.policy, control.config, control.steps_taken, control.steps_skipped
        )
        engine.take_chosen(control.kernels)
        if world is not None:
            engine.connect(world)
            driver.resume(world)
        self._driver.discard()
        self._engine, self._driver = engine, driver
        self._write_control()

    def _write_control(self) -> None:
        text = controls.to_text(self.control_state_dict())
        for group in self.param_groups:
            group["control"] = text

    def state_dict(self) -> dict[str, Any]:
        """As for any PyTorch optimizer; ``control`` of each group is `control_state_dict`."""
        self._write_control()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; all or nothing.

        Momentum keeps its own dtype, whatever that of the parameter. Nothing here communicates: a
        rank that fails raises alone, and the ranks that did not raise at their next step.

        Raises:
            ValueError: The state is of another structure, optimizer or configuration.
        """
        load.load_state_dict(self, state_dict)


def _control(driver: Driver, engine: Engine) -> controls.Control:
    counts = driver.steps_taken, driver.steps_skipped
    return controls.Control(*counts, driver.config, driver.policy, engine.chosen)


def _replica_ranks(process_group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks over which plain tensors are replicas."""
    if process_group is not None:
        return dist.get_process_group_ranks(process_group)
    is_distributed = dist.is_available() and dist.is_initialized()
    return [dist.get_rank() if is_distributed else 0]
