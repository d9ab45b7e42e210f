"""The Muon family: one step is momentum, exchange(orthogonalize), scaled update."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.config import AMOConfig, MuonConfig
from amo_dist.distributed.exchange import Exchange
from amo_dist.distributed.spans import span
from amo_dist.engine import adamw, driver, metrics
from amo_dist.engine.batches import Batches
from amo_dist.engine.exchange_planning import plan_exchanges
from amo_dist.engine.gradients import StepGuard
from amo_dist.engine.observer import Observer
from amo_dist.engine.parameters import check_groups, describe_group, local_tensor, resolve
from amo_dist.engine.step import StepWork, kernels_of
from amo_dist.engine.timing import Stopwatch
from amo_dist.engine.world import World, agree_on_world
from amo_dist.optimizers.arguments import as_policy, check_each_group, check_hyperparameters
from amo_dist.schedule.policies import Policy
from amo_dist.schedule.types import Schedule
from amo_dist.state import checkpoint
from amo_dist.tools.tracker import GeometryTracker

logger = logging.getLogger(__name__)


class Muon(torch.optim.Optimizer):
    """Muon over any layout: momentum stays sharded, each matrix is orthogonalized by one rank.

    ``B <- momentum * B + G``; ``M = G + momentum * B`` with Nesterov, else ``B``;
    ``W <- W * (1 - lr * weight_decay) - lr * 0.2 * sqrt(max(m, n)) * orthogonalize(M)``. The rest
    of the parameters goes through PyTorch's own AdamW with the same learning rate.

    State is made at once, for every parameter, with its placements, so that all ranks have the
    same keys: ``momentum_buffer`` (``config.momentum_dtype``) for matrices, ``step``, ``exp_avg``
    and ``exp_avg_sq`` for the rest. The state of the schedule rides as a JSON string, the same on
    every rank, under ``control`` of each parameter group.

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

    Raises:
        ValueError: Groups of another origin, meta tensors, a bad hyperparameter, or settings that
            the parameters' devices cannot run; names field, found and expected.
    """

    _work_class: type[StepWork] = StepWork

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
    ) -> None:
        groups = check_groups(params)
        self.config = MuonConfig() if config is None else config
        self.policy = as_policy(schedule)
        self._process_group = process_group
        views = [group.pop("matrix_views", {}) for group in groups]
        defaults = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        check_hyperparameters(defaults)
        self._is_built = False
        super().__init__(groups, {**defaults, "lr_scale": 1.0, "control": ""})
        self._is_built = True
        check_each_group(self.param_groups)
        # Out of the groups: checkpoint helpers take no lists of strings there.
        names = [group.pop("param_names") for group in self.param_groups]
        self._parameters = resolve(self.param_groups, names, views, self._replica_ranks())
        self._kernels = kernels_of(self._parameters, self.config)
        self._batches = Batches(self._parameters, self._kernels)
        self._num_steps_taken = 0
        self._num_steps_skipped = 0
        self._world: World | None = None
        self._guard: StepGuard | None = None
        self._exchanges: list[Exchange] = []
        self._exchange_key: object = None
        self._digested_schedules: object = None
        self._digest = ""
        in_background = isinstance(self.config, AMOConfig) and self.config.observe_in_background
        self._observer = Observer(in_background=in_background)
        self._observation_under_way: tuple[int, tuple[str, ...]] | None = None
        self._residuals: dict[str, Tensor] = {}
        self._last_residual = 0.0
        self._stopwatch = Stopwatch()
        self.tracker: GeometryTracker | None = None
        self._make_state()
        self._write_control()

    # ---------------------------------------------------------------- structure and state

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

    def _replica_ranks(self) -> list[int]:
        if self._process_group is not None:
            return dist.get_process_group_ranks(self._process_group)
        is_distributed = dist.is_available() and dist.is_initialized()
        return [dist.get_rank() if is_distributed else 0]

    def _matrix_state(self, param: Tensor) -> dict[str, Tensor]:
        """New state of a parameter with matrices, in its placements."""
        dtype = getattr(torch, self.config.momentum_dtype)
        return {"momentum_buffer": torch.zeros_like(param, dtype=dtype)}

    def _make_state(self) -> None:
        for entry in self._parameters.entries:
            if entry.views:
                state = self._matrix_state(entry.param)
            else:
                state = adamw.make_state(entry.param, self.config.adamw_implementation)
            for value in state.values():
                value.requires_grad_(False)
            self.state[entry.param] = state

    def _prepare(self) -> tuple[World, StepGuard]:
        """Agree with all ranks on the structure; once, at the first step."""
        if self._world is None or self._guard is None:
            configuration = {
                **self.config.to_dict(),
                "optimizer": type(self).__name__,
                "policy": self.policy.name,
            }
            groups = [describe_group(group) for group in self.param_groups]
            world = agree_on_world(self._parameters, groups, configuration, self._process_group)
            driver.check_state_alike(self.policy, self._num_steps_taken, world)
            self.policy.bind(world.registry)
            driver.plan_where_due(self.policy, self._num_steps_taken, world)
            # Only now: after an error above all of it is done again.
            self._world = world
            self._guard = StepGuard(world, self._parameters.entries, self.config)
        return self._world, self._guard

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
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._stopwatch.measure("optimizer", self._device()):
            self._step()
        return loss

    def check_last_update(self) -> None:
        """Look now for what only the next step would tell; a collective over the world.

        For the end of training and for checkpoints: saving communicates nothing, so that one rank
        may save alone, and what a rank left out is known to that rank only.

        Raises:
            NonFiniteUpdateError: On every rank, where the last update of a matrix was left out.
        """
        if self._guard is not None:
            self._guard.agree_on_updates()

    def _step(self) -> None:
        world, guard = self._prepare()
        self._finish_observation()
        step = self._num_steps_taken + 1
        sample = self.policy.sample(step)
        guarded = driver.guarded_matrix(world.registry, step, self.config.ns_guard_every)
        verdict, grads = guard.agree(
            self._intent(step, sample),
            [entry.param for entry in self._parameters.entries],
            skips=self.config.nonfinite == "skip_step",
        )
        if verdict.skips:
            self._num_steps_skipped += 1
            logger.warning("step %d skipped: %s", step, verdict.reason)
            self._residuals = {}
        else:
            self._update(step, grads, sample, guarded)
        self._num_steps_taken = step
        if guarded is not None:
            self._check_residual(step, guarded, world)
        if sample:
            self._observation_under_way = step, tuple(sample)
            if not self._observer.in_background:
                self._finish_observation()
        if self.tracker is not None and self._tracks(step):
            self.tracker.collect(step, world)

    def _intent(self, step: int, sample: Sequence[str]) -> str:
        """What this rank is about to do; ranks that differ, as after a load by one, must not go on.

        That includes whether it plans an exchange: planning is a collective.
        """
        schedules = self.policy.schedules(step)
        # By value: which object it is depends on what else was asked for, as by one rank's logger.
        if schedules != self._digested_schedules:
            self._digest = self.policy.digest(step)
            self._digested_schedules = schedules
        plans = self._key_of_exchange(step, sample) != self._exchange_key
        # Elsewhere, as between stages of a pipeline, ranks have groups of their own.
        groups = self.param_groups if self._prepare()[0].shares_all else []
        return "\n".join(
            [
                f"step {step}",
                f"schedules and state {self._digest}",
                f"observed matrices {list(sample)}",
                f"{'a new' if plans else 'the last'} exchange plan",
                *(f"group {index}: {describe_group(one)}" for index, one in enumerate(groups)),
            ]
        )

    def _update(
        self,
        step: int,
        grads: Sequence[Tensor | None],
        sample: Sequence[str],
        guarded: str | None,
    ) -> None:
        entries = self._parameters.entries
        world, guard = self._prepare()
        with span("amo::momentum"):
            moving = [i for i, entry in enumerate(entries) if entry.views and grads[i] is not None]
            buffers = [
                local_tensor(self.state[entries[i].param]["momentum_buffer"]) for i in moving
            ]
            moved = [grads[i] for i in moving]
            self._kernels.update_momentum(buffers, moved, self.config.momentum)  # type: ignore[arg-type]
        self._batches.begin_step(self._schedules_by_matrix(step))
        work = self._work_class(
            state=self.state,
            parameters=self._parameters,
            params=[local_tensor(entry.param) for entry in entries],
            grads=grads,
            buffers=dict(zip(moving, buffers, strict=True)),
            groups=self.param_groups,
            config=self.config,
            batches=self._batches,
            observed=frozenset(sample),
            observer=self._observer,
            guarded=guarded,
            tracker=self.tracker if self._tracks(step) else None,
            kernels=self._kernels,
        )
        exchanges = self._exchanges_for(step, sample)
        for index, exchange in enumerate(exchanges):
            is_first = index == 0
            exchange.run(
                work.read,
                work.compute,
                work.write,
                meanwhile=(lambda: self._step_adamw(grads)) if is_first else None,
            )
        if not exchanges:
            self._step_adamw(grads)
        work.finish(world.groups_by_ranks)
        self._residuals = work.residuals
        guard.report_updates(work.nonfinite)

    def _step_adamw(self, grads: Sequence[Tensor | None]) -> None:
        adamw.step_adamw(
            self._parameters.entries,
            grads,
            self.state,
            self.param_groups,
            self.config.adamw_implementation,
        )

    # ---------------------------------------------------------------- exchange

    def _exchanges_for(self, step: int, sample: Sequence[str]) -> list[Exchange]:
        """The exchanges of this step: kept until the observed matrices or the lock change."""
        key = self._key_of_exchange(step, sample)
        if key != self._exchange_key:
            self._exchanges = plan_exchanges(
                self._parameters,
                self._schedules_by_matrix(step),
                frozenset(self._wide(step, sample)),
                world=self._prepare()[0],
                config=self.config,
                device=self._device(),
            )
            self._exchange_key = key
        return self._exchanges

    def _key_of_exchange(self, step: int, sample: Sequence[str]) -> object:
        return tuple(self._wide(step, sample)), self.policy.phase(step) == "locked"

    def _tracks(self, step: int) -> bool:
        return self.tracker is not None and self.tracker.is_due(step)

    def _wide(self, step: int, sample: Sequence[str]) -> Sequence[str]:
        """Names of the matrices that travel in the dtype of momentum."""
        tracks = self._tracks(step)
        return [info.name for info in self._prepare()[0].registry] if tracks else sample

    def _schedules_by_matrix(self, step: int) -> list[Schedule]:
        schedules, matrices = self.policy.schedules(step), self._parameters.matrices
        return [schedules[self.policy.group_of(matrix.name)] for matrix in matrices]

    def _device(self) -> torch.device:
        return self._parameters.entries[0].param.device

    # ---------------------------------------------------------------- observation

    def _check_residual(self, step: int, guarded: str, world: World) -> None:
        (residual,) = driver.agree_on_values(self._residuals, [guarded], world).values()
        self._last_residual = 0.0 if math.isnan(residual) else residual
        driver.check_residual(
            step, guarded, residual, config=self.config, policy=self.policy, world=world
        )

    def _finish_observation(self) -> None:
        """Agree on what was observed, and plan where it is time to; a collective, if there is one.

        In the background that is before the next step, or before state is saved.
        """
        if self._observation_under_way is None:
            return
        step, sample = self._observation_under_way
        self._observation_under_way = None
        world, guard = self._prepare()
        found = self._collect(step, guard)
        self._stopwatch.put("observe", self._observer.reset_seconds())
        with span("amo::observe"):
            self.policy.record(step, driver.agree_on_values(found, sample, world))
        driver.plan_where_due(self.policy, step, world)

    def _collect(self, step: int, guard: StepGuard) -> dict[str, Tensor]:
        """What this rank measured at a step; a collective in the background.

        There a rank may have failed since, or know of no observation: then all raise.
        """
        if not self._observer.in_background:
            return self._observer.collect()
        found: dict[str, Tensor] = {}
        failure: Exception | None = None
        try:
            found = self._observer.collect()
        except Exception as error:
            failure = error
        outcome = "done" if failure is None else f"{type(failure).__name__}: {failure}"
        guard.agree_on_observation(f"observation of step {step}: {outcome}")
        if failure is not None:
            raise failure
        return found

    # ---------------------------------------------------------------- checkpoint and metrics

    @property
    def world(self) -> World | None:
        """What all ranks agreed on at the first step; None before."""
        return self._world

    @property
    def operator_types(self) -> tuple[str, ...]:
        """Operator type of each matrix of this process."""
        return self._parameters.operator_types

    @property
    def params_by_name(self) -> dict[str, Tensor]:
        """The parameters of this process by their cleaned names, in the order of the groups."""
        return {entry.name: entry.param for entry in self._parameters.entries}

    @property
    def num_steps_taken(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._num_steps_taken

    @property
    def phase(self) -> str:
        """Phase of the last step taken; that of the first before there is one."""
        return self.policy.phase(max(self._num_steps_taken, 1))

    def control_state_dict(self) -> dict[str, Any]:
        """The state of the schedule as JSON values, the same on every rank.

        With ``observe_in_background`` a collective over the world after a step of observation.
        A rank that left out an update in the last step logs a warning, and raises nothing: see
        `check_last_update`.

        Raises:
            RankMismatchError: On every rank, where an observation in the background failed on some.
        """
        self._finish_observation()
        if self._guard is not None:
            self._guard.warn_of_updates()
        return checkpoint.control_state(
            steps_taken=self._num_steps_taken,
            steps_skipped=self._num_steps_skipped,
            config=self.config,
            policy=self.policy,
        )

    def load_control_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `control_state_dict` returned; all or nothing.

        Raises:
            ValueError: Names the field, what was found and what was expected.
        """
        control = checkpoint.check_control(state, config=self.config, policy=self.policy)
        kernels = kernels_of(self._parameters, control.config)
        self.policy = checkpoint.restore_policy(control, self)
        self.config, self._kernels = control.config, kernels
        self._batches = Batches(self._parameters, kernels)
        if self._world is not None:
            self._guard = StepGuard(self._world, self._parameters.entries, self.config)
        self._observer.discard()
        self._observation_under_way = None
        self._num_steps_taken = control.steps_taken
        self._num_steps_skipped = control.steps_skipped
        self._exchange_key = self._digested_schedules = None
        self._write_control()

    def _write_control(self) -> None:
        text = checkpoint.to_text(self.control_state_dict())
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
        checkpoint.load_state_dict(self, state_dict)

    def sent_bytes_by_peer(self) -> dict[int, int]:
        """Bytes of matrices that this rank sent in the last step, by global rank of the peer."""
        return dict(sum((exchange.sent_bytes for exchange in self._exchanges), Counter[int]()))

    def metrics(self) -> dict[str, float]:
        """Plain numbers for a logger, about the last step taken."""
        step, found = max(self._num_steps_taken, 1), {}
        if self._world is not None:
            work = self._parameters, self._schedules_by_matrix(step)
            found = metrics.of_schedules(self.policy, step, *work, self._kernels)
        return {
            **found,
            "newton_schulz/residual": self._last_residual,
            "optimizer/steps_skipped": float(self._num_steps_skipped),
            "optimizer/seconds": self._stopwatch.seconds("optimizer"),
            "optimizer/observe_seconds": self._stopwatch.seconds("observe"),
            **metrics.of_exchanges(self._exchanges),
        }
