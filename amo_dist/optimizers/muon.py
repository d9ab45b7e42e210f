"""The Muon family: one step is momentum, exchange(orthogonalize), scaled update."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from amo_dist.config import MuonConfig
from amo_dist.distributed.absence import name_absent
from amo_dist.distributed.agreement import check_alike
from amo_dist.distributed.groups import Given
from amo_dist.engine.gradients import raise_together
from amo_dist.engine.orders import Probe
from amo_dist.engine.parameters import describe_group
from amo_dist.engine.world import World, agree_on_world
from amo_dist.optimizers.arguments import as_policy, check_hyperparameters
from amo_dist.optimizers.assembly import Assembly
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


class Muon(Assembly):
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

    Groups may name ``lr``, ``lr_scale``, ``weight_decay``, ``betas``, ``eps``, ``momentum`` and
    ``nesterov`` of their own, which schedulers may move: numbers, or tensors of one on the CPU
    (elsewhere each step waits for all but ``lr``). ``momentum`` and ``nesterov`` are those of
    matrices, and of ``config`` where a group does not name them; PyTorch's ``OneCycleLR`` and
    ``CyclicLR`` cycle this momentum, and leave ``betas`` alone.

    A trainer may swap the parameters in the groups for others of the same shapes, sharded ones for
    instance, before the first step: layouts and state are made anew then. `copy.deepcopy` and
    pickle give an optimizer that goes on alike.

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
        allow_no_matrices: Accept a world without any matrix, all of which AdamW trains. By default
            that is an error, as names that `amo_dist.param_groups` does not know lead to it.
        own: Hyperparameters of the rule's own, for all groups that do not name theirs.

    Raises:
        ValueError: Groups of another origin or with an unknown key, meta tensors, no matrix, a bad
            hyperparameter, a process group without this rank or without those of a mesh, or
            settings that the parameters' device cannot run; names field, found and expected.
    """

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
        allow_no_matrices: bool = False,
        **own: float,
    ) -> None:
        config = MuonConfig() if config is None else config
        policy = as_policy(schedule)
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        check_hyperparameters(defaults)
        if unknown := sorted(set(own) - set(self.rule_class.defaults)):
            raise TypeError(f"{type(self).__name__} got unexpected keyword arguments {unknown}")
        defaults |= {**self.rule_class.defaults, **own}
        super().__init__(params, defaults, policy, config, process_group, allow_no_matrices)
        self.tracker: Tracker | None = None
        """Measures every matrix at the steps that it names; set it on all ranks."""
        self._write_control(self.control_state_dict())

    # ---------------------------------------------------------------- one step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step: a collective over the world.

        `torch.compile` leaves it to Python, and compiles what is around it and in ``closure``.

        Args:
            closure: Evaluates the model again and returns the loss, as for any PyTorch optimizer.

        Returns:
            What ``closure`` returned, else None.

        Raises:
            ValueError: On every rank, before anything has changed, where parameters were cast,
                moved or swapped too late, a group has an unknown key, or there is no matrix.
            NonFiniteGradientError: On every rank, before anything has changed, where a gradient
                of any rank is NaN, inf, or so large that state would overflow, and
                ``config.nonfinite`` is ``error``.
            NonFiniteUpdateError: On every rank, before anything has changed, where the update of
                a matrix was NaN or inf in the step before, and left out: see `check_last_update`.
            MissingGradientError: On every rank, where a parameter has a gradient on some of its
                ranks only, or no matrix has had one on any rank in any step so far.
            RankMismatchError: On every rank, where ranks hold different structures, schedules or
                hyperparameters.
            RuntimeError: On every rank, where something has failed on one, as without memory left:
                a measurement or a new exchange in this step, or else the step before, which is
                incomplete then: matrices that were not orthogonalized were only decayed, and what
                failed was left out. Names the rank and its error.
            AbsentRanksError: A collective failed or timed out, as ranks are gone; names them.

        On devices nothing here waits for the device in most steps: what is wrong with a step
        leaves parameters and state as they were, and is raised by the next one, or when state is
        saved. Steps wait that observe, measure a residual, deal matrices anew, or bring gradients
        to the placements of their parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @_disable_dynamo
    def _step(self) -> None:
        with self._stopwatch.measure(self._engine.parameters.device):
            try:
                fault = self._fault()
                self._run(self._connect(fault), fault)
            except RuntimeError as error:
                what = f"step {self.num_steps_taken + 1} of the optimizer"
                name_absent(error, what, self._engine.membership.ranks)
                raise

    def _run(self, world: World, fault: str) -> None:
        engine, driver = self._engine, self._driver
        driver.begin(engine.check)
        if fault:
            assert engine.check is not None
            engine.check.agree_on_text(fault)
            raise ValueError(fault)
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

    def _connect(self, fault: str) -> World:
        """Agree with all ranks on the structure; once, at the first step."""
        if self._engine.world is None:
            if fault:  # which another rank may not have: it meets this one in its own check
                check_alike("configuration", fault, self._engine.membership.join())
                raise ValueError(fault)
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
            self._check_matrices(len(world.registry))
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
            RuntimeError: On every rank, where the last step has failed on one.
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
        self._follow()
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
        self._follow()
        self._driver.begin(self._engine.check, saving=True)
        if self._engine.check is not None:
            self._engine.check.warn_of_updates()
        return controls.control_record(self._control())

    def load_control_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `control_state_dict` returned; all or nothing.

        Nothing here communicates: where only some ranks do it, all raise at their next step.

        Raises:
            ValueError: Names the field, what was found and what was expected.
        """
        self._follow()
        self._restoring(state)()

    def state_dict(self) -> dict[str, Any]:
        """As for any PyTorch optimizer; ``control`` of each group is `control_state_dict`."""
        self._write_control(self.control_state_dict())
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on all ranks or on none; a collective over the world.

        Momentum keeps its own dtype, whatever that of the parameter.

        Raises:
            ValueError: On every rank: the state of one is of another structure, optimizer or
                configuration; names the rank.
        """
        load.load_state_dict(self, state_dict, self._restoring, self._check_keys)
