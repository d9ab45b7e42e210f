"""The Muon family: one step is momentum, exchange(orthogonalize), scaled update."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from amo_dist.config import MuonConfig
from amo_dist.distributed.groups import Given, replica_ranks
from amo_dist.engine.adaptive import make_driver
from amo_dist.engine.driver import Driver
from amo_dist.engine.engine import Engine
from amo_dist.engine.gradients import raise_together
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

    The world of an optimizer is the ranks that step together; others take no part, and may run
    optimizers of their own. It is the ranks of the parameters' meshes, where a mesh stands for
    all of the mesh that it is a slice of, so that stages of a pipeline are one world; the whole
    job where all parameters are plain tensors; and, whatever the meshes, ``process_group``.

    A subclass that names another ``rule_class`` is another optimizer of the family.

    Args:
        params: What `amo_dist.param_groups` returns. Groups may be split further.
        lr: Learning rate of all groups; ``lr_scale`` of a group multiplies it.
        weight_decay: Decoupled, of all groups that do not name their own.
        schedule: A name such as ``kj``, a `Schedule`, one for each operator type, or a `Policy`.
        config: Numerics and exchange.
        betas: Of AdamW.
        eps: Of AdamW.
        process_group: The world. Over its ranks plain tensors are replicas, as under DDP: each
            matrix is then orthogonalized once, not once a rank. Without it plain tensors are this
            rank's own. A `DeviceMesh` tells the replicas alone, and is one more mesh of the world.
        own: Hyperparameters of the rule's own, for all groups that do not name theirs.

    Raises:
        ValueError: Groups of another origin, meta tensors, a bad hyperparameter, a process group
            without this rank or without those of a mesh, or settings that the parameters' device
            cannot run; names field, found and expected.
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
        process_group: Given = None,
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
        parameters = resolve(self.param_groups, names, views, replica_ranks(process_group))
        self._process_group = process_group
        self._engine = Engine(
            parameters, self.param_groups, self.state, rule, config, process_group
        )
        self._driver = make_driver(policy, config)
        self._stopwatch = Stopwatch()
        self.tracker: Tracker | None = None
        """Measures every matrix at the steps that it names; set it on all ranks."""
        self._engine.make_state()
        _write_control(self)

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
        """Take one optimizer step: a collective over the world.

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
            RuntimeError: On every rank, where a measurement has failed on one in this step, or
                Newton-Schulz in the one before, as without memory left; names the rank and its
                error. Matrices that were not orthogonalized were only decayed then.

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
        if orders.probes and engine.check is not None:
            # Where a measurement has failed; this step waits anyway, and state may be saved next.
            engine.check.agree_on_text(f"the end of step {orders.step}")

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
            membership = self._engine.membership
            with membership.patience():
                world = agree_on_world(
                    self._engine.parameters, groups, configuration, membership, membership.join()
                )
            self._driver.connect(world)
            # Only now: after an error above all of it is done again.
            self._engine.connect(world)
        assert self._engine.world is not None
        return self._engine.world

    def raise_together(self, what: str, failure: Exception | None) -> None:
        """Raise on every rank what failed on one; see `amo_dist.engine.gradients`."""
        raise_together(what, failure, self._engine.membership, self._engine.check)

    def check_last_update(self) -> None:
        """Look now for what only the next step would tell; a collective over the world.

        For the end of training and for checkpoints: saving communicates nothing, so that one rank
        may save alone, and what a rank left out is known to that rank only.

        Raises:
            NonFiniteUpdateError: On every rank, where the last update of a matrix was left out.
            RuntimeError: On every rank, where Newton-Schulz has failed on one.
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
            RuntimeError: On every rank, where an observation in the background failed on one.
            As `step`: on devices, of the last step, which then was not taken.
        """
        self._driver.begin(self._engine.check, saving=True)
        if self._engine.check is not None:
            self._engine.check.warn_of_updates()
        return controls.control_record(_control(self._driver, self._engine))

    def load_control_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `control_state_dict` returned; all or nothing.

        Nothing here communicates: where only some ranks do it, all raise at their next step.

        Raises:
            ValueError: Names the field, what was found and what was expected.
        """
        _restore(self, state)()

    def state_dict(self) -> dict[str, Any]:
        """As for any PyTorch optimizer; ``control`` of each group is `control_state_dict`."""
        _write_control(self)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on all ranks or on none; a collective over the world.

        Momentum keeps its own dtype, whatever that of the parameter.

        Raises:
            ValueError: On every rank: the state of one is of another structure, optimizer or
                configuration; names the rank.
        """
        load.load_state_dict(self, state_dict, functools.partial(_restore, self))


def _control(driver: Driver, engine: Engine) -> controls.Control:
    counts = driver.steps_taken, driver.steps_skipped
    return controls.Control(*counts, driver.config, driver.policy, engine.chosen)


def _write_control(optimizer: Muon) -> None:
    text = controls.to_text(optimizer.control_state_dict())
    for group in optimizer.param_groups:
        group["control"] = text


def _restore(optimizer: Muon, state: Mapping[str, Any]) -> Callable[[], None]:
    """What restores a state of `Muon.control_state_dict`, once it is known to be good."""
    before, driver_before = optimizer._engine, optimizer._driver
    control = controls.restore(
        state,
        _control(driver_before, before),
        optimizer.operator_types,
        is_alone=len(before.membership.ranks) == 1,
    )
    rule = optimizer.rule_class(control.config)
    engine = Engine(
        before.parameters,
        optimizer.param_groups,
        optimizer.state,
        rule,
        control.config,
        optimizer._process_group,
    )
    engine.take_chosen(control.kernels)
    driver = make_driver(control.policy, control.config, control.steps_taken, control.steps_skipped)

    def restore() -> None:
        if before.world is not None:
            engine.connect(before.world)
            driver.resume(before.world)
        driver_before.discard()
        optimizer._engine, optimizer._driver = engine, driver
        _write_control(optimizer)

    return restore
