"""The Muon family: one step is momentum, exchange(orthogonalize), scaled update."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from amo_dist.compat import disable_dynamo
from amo_dist.config import AMOConfig, MuonConfig, fail, require
from amo_dist.distributed.ranks import (
    GroupLike,
    PicklableGroup,
    check_alike,
    failure_text,
    replica_ranks,
)
from amo_dist.engine.ballot import Verdict
from amo_dist.engine.hyperparameters import check_hyperparameters, check_keys, read_groups
from amo_dist.engine.observe import (
    GUARD_BOUND,
    agreed_residual,
    coefficient_table,
    matrix_to_check,
    observe,
)
from amo_dist.engine.parameters import (
    Parameters,
    check_swap,
    lay_out,
    split_groups,
)
from amo_dist.engine.rule import UpdateRule
from amo_dist.engine.step import Engine, Orders, Step
from amo_dist.engine.world import World, gather_world
from amo_dist.kernels.newton_schulz import has_bfloat16
from amo_dist.operators.groups import param_groups
from amo_dist.operators.patterns import format_patterns
from amo_dist.schedule.plan import Plan
from amo_dist.schedule.source import Source, as_source
from amo_dist.schedule.types import Measurement, Schedule
from amo_dist.state import control as controls
from amo_dist.state import load
from amo_dist.state.control import ScheduleState

logger = logging.getLogger(__name__)


_Config = TypeVar("_Config", bound=MuonConfig)

# Defaults of the optimizer's own hyperparameters; a rule may have others.
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
)


# Arguments of other Muons, and what takes their place.
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "ns_steps": "schedule names the Newton-Schulz steps and their coefficients: 'kj' has five",
        "ns_coefficients": "schedule=Schedule(...) has the coefficients of each step",
        "fused": "devices run fused kernels by themselves",
        "foreach": "kernels run over lists of tensors by themselves",
        "momentum": "its place is config, or the key of a parameter group",
        "nesterov": "its place is config, or the key of a parameter group",
    }
)
# Optimizers that were made in this process over the same ranks and names.
_num_made: Counter[object] = Counter()


class Muon(torch.optim.Optimizer):
    """Muon over any layout: momentum stays sharded, each matrix is orthogonalized by one rank.

    ``B <- momentum * B + G``; ``M = G + momentum * B`` with Nesterov, else ``B``;
    ``W <- W * (1 - lr * weight_decay) - lr * 0.2 * sqrt(max(m, n)) * orthogonalize(M)``. The rest
    of the parameters goes through PyTorch's own AdamW with the same learning rate.

    State is made at once, for every parameter, with its placements, so that all ranks have the
    same keys: ``momentum_buffer`` (float32) for matrices, ``step``, ``exp_avg``
    and ``exp_avg_sq`` for the rest. The state of the schedule rides as a JSON string, the same on
    every rank, under ``control`` of each parameter group of ``state_dict()``.

    The world of an optimizer is the ranks that step together; others take no part, and may run
    optimizers of their own. It is the ranks of the parameters' meshes, where a mesh stands for
    all of the mesh that it is a slice of, so that stages of a pipeline are one world; the whole
    job where all parameters are plain tensors; and, whatever the meshes, ``process_group``.

    Groups may name ``lr``, ``muon_lr_factor``, ``weight_decay``, ``betas``, ``eps``, ``momentum``
    and ``nesterov`` of their own, which schedulers may move: numbers, or tensors of one on the CPU
    (elsewhere each step waits for all but ``lr``). ``momentum`` and ``nesterov`` are those of
    matrices, and of ``config`` where a group does not name them; PyTorch's ``OneCycleLR`` and
    ``CyclicLR`` cycle this momentum, and leave ``betas`` alone.

    A trainer may swap the parameters in the groups for others of the same shapes, sharded ones for
    instance, before the first step: layouts and state are made anew then. `copy.deepcopy` and
    pickle give an optimizer that goes on alike.

    A subclass that names another ``rule_class`` is another optimizer of the family.

    Args:
        params: The model, or groups that `amo_dist.param_groups` returns for it, which may be split
            further.
        lr: Learning rate of groups that do not name their own, 1e-3 by default; ``muon_lr_factor``
            of a group multiplies it.
        weight_decay: Decoupled weight decay of groups that do not name their own, 0.1 by default.
        schedule: A name such as ``kj``, a `Schedule`, one for each operator type, or a `Source`.
        config: Mathematics, exchange and checks.
        betas: Betas of AdamW, (0.9, 0.95) by default.
        eps: Epsilon of AdamW, 1e-8 by default.
        process_group: The world. Plain tensors are replicas over its ranks, as under DDP: each
            matrix is then orthogonalized once, not once per rank. Without it each rank has plain
            tensors of its own. A `DeviceMesh` only says which ranks hold replicas, and counts as
            one more mesh of the world.
        allow_no_matrices: Accept a world without any matrix, in which AdamW trains everything. By
            default that is an error: `amo_dist.param_groups` may not know the model's names. Leave
            it off if other stages of a pipeline have matrices.
        own: Hyperparameters of the rule, for groups that do not name their own.

    Raises:
        ValueError: Groups of another origin or with an unknown key, meta tensors, no matrix, a bad
            hyperparameter, a process group without this rank or without those of a mesh, or
            settings that the parameters' device cannot run; names field, found and expected.
    """

    rule_class: ClassVar[type[UpdateRule]] = UpdateRule

    @torch.inference_mode(False)  # state outlives the caller's mode
    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        weight_decay: float | None = None,
        *,
        schedule: str | Schedule | Mapping[str, Schedule] | Source = "kj",
        config: MuonConfig | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        process_group: GroupLike = None,
        allow_no_matrices: bool = False,
        **own: float,
    ) -> None:
        config, source = check_config(config, MuonConfig), as_source(schedule)
        if isinstance(config, AMOConfig) and source.name != "amo":
            fail("config", type(config).__name__, "a MuonConfig: only AMO reads an AMOConfig")
        if unknown := sorted(set(own) - set(self.rule_class.defaults)):
            hints = [_ELSEWHERE[name] for name in unknown if name in _ELSEWHERE]
            text = "; ".join([*hints, f"settings go into config={type(config).__name__}(...)"])
            raise TypeError(f"{type(self).__name__} got unexpected arguments {unknown}: {text}")
        if isinstance(params, torch.nn.Module):
            params = param_groups(params)
        groups, structure = split_groups(params, replica_ranks(process_group))
        arguments = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        defaults = {**_DEFAULTS, **self.rule_class.defaults, **own}
        defaults |= {name: value for name, value in arguments.items() if value is not None}
        check_hyperparameters(defaults)
        defaults |= {"momentum": config.momentum, "nesterov": config.nesterov}
        check_keys(groups, self.rule_class.defaults)
        super().__init__(groups, defaults | {"muon_lr_factor": 1.0, "control": ""})
        # PyTorch's schedulers that cycle a momentum take `betas` where there are any: AdamW's, and
        # not Muon's.
        del self.defaults["betas"]
        self._structure, self._allow_no_matrices = structure, allow_no_matrices
        self._process_group, self._given_dtypes = (
            process_group,
            (config.ns_dtype, config.wire_dtype),
        )
        self._assemble(ScheduleState(config, copy.copy(source)))
        self._count()
        read_groups(self.param_groups, self._engine.check, self.rule_class.defaults)
        if len(self._engine.membership.ranks) == 1:
            self._check_matrices(len(self._engine.parameters.matrices))
        self._engine.make_state(self.state)

    @classmethod
    def for_trainer(cls) -> Callable[..., Muon]:
        """Give the ``Trainer`` of transformers a function that makes the optimizer of its model.

        ``Trainer(..., optimizer_cls_and_kwargs=(Muon.for_trainer, {"lr": 2e-3}))``, from version
        5.2 on. This is the way under FSDP, where ``Trainer`` refuses ``optimizers``, and for a
        model that it loads by name. It reads neither ``learning_rate`` nor ``weight_decay`` of
        ``TrainingArguments``. Earlier versions do not pass the model: write
        ``(Muon, {"model": model, "lr": 2e-3})``.

        Returns:
            The class, with all ranks as its ``process_group`` unless the caller passes another,
            since the plain tensors of these trainers are replicas.
        """
        return functools.partial(cls, process_group=dist.group.WORLD)

    def _count(self) -> None:
        """Number this optimizer among those that the process has made over the same ranks."""
        ranks = self._engine.membership.ranks
        _num_made[ranks] += 1
        self._number = _num_made[ranks]

    def _name(self) -> str:
        """Name of this optimizer, alike on all ranks, unless they step two in other orders."""
        return f"{type(self).__name__} number {self._number}"

    def _assemble(self, state: ScheduleState, parameters: Parameters | None = None) -> None:
        """Make the engine, which goes on from a state of schedules."""
        parameters = parameters or lay_out(self.param_groups, self._structure)
        config = state.config.in_force(has_bfloat16=has_bfloat16(parameters.matrix_device))
        self.defaults |= {"momentum": config.momentum, "nesterov": config.nesterov}
        rule, group = self.rule_class(config), self._process_group
        self._engine = Engine(parameters, self.param_groups, rule, config, group)
        self._schedule_state = dataclasses.replace(state, config=config)
        # Verdict on the last step, and the state from which to go on if it changed nothing.
        self._verdict: Verdict | None = None
        self._state_if_undone = self._schedule_state
        # Key of each matrix of this process; see `Source.key`.
        self._keys: Sequence[str] | None = None
        # Version of the source, and what `_decide` returned for it.
        self._decision: tuple[int, Sequence[Schedule], str, bool] | None = None
        self._residual = self._observe_seconds = 0.0

    # ---------------------------------------------------------------- one step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step: a collective over the world.

        `torch.compile` leaves it to Python, and compiles what is around it and in ``closure``.

        Args:
            closure: Evaluates the model again and returns the loss, as for any PyTorch optimizer.

        Returns:
            What ``closure`` returned, else None.

        Raises:
            ValueError: Before anything has changed: parameters were cast, moved or swapped too
                late, a group has a bad hyperparameter, or a parameter lost its state. Every rank
                raises it and names the rank at fault.
            NonFiniteGradientError: On every rank, before anything has changed, where a gradient
                of any rank is NaN, inf, or so large that state would overflow, and
                ``config.nonfinite`` is ``error``.
            NonFiniteUpdateError: On every rank, before anything has changed, where the update of
                a matrix was NaN or inf in the step before, and left out: see `check_last_update`.
            MissingGradientError: On every rank, if a parameter has a gradient on some of its ranks
                only, if no matrix has one in ten steps in a row, or if the first step with
                gradients has none of a matrix. A step without any gradient changes nothing, and
                before the first gradient it does not count.
            RankMismatchError: On every rank, where ranks hold different structures, schedules or
                hyperparameters.
            RuntimeError: On every rank, where something has failed on one, as without memory left:
                new buffers in this step, or else the step before, which is incomplete then:
                matrices that were not orthogonalized were only decayed, and what failed was left
                out. Names the rank and its error.

        On devices most steps do not wait for the device, and raise a step later what they would
        raise here; a bad step leaves parameters and state as they were all the same. A step waits
        if it observes, measures a residual, assigns owners, moves gradients to the placements of
        their parameters, or if the parameters are in host memory.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kind = self._engine.matrix_device.type
        # The caller's autocast would compute products in another dtype than `ns_dtype`.
        is_cast = torch.is_autocast_enabled(kind)
        with torch.autocast(kind, enabled=False) if is_cast else contextlib.nullcontext():
            self._step()
        return loss

    @disable_dynamo
    @torch.inference_mode(False)  # buffers outlive the caller's mode
    @torch.no_grad()
    def _step(self) -> None:
        if not self._engine.is_connected:
            self._connect()
        if self._verdict is not None and not self._verdict.is_known:
            self._settle()
        engine, state = self._engine, self._schedule_state
        number = state.steps_taken + 1
        try:
            self._adopt_swapped_parameters()
            step = engine.prepare(self._orders(number), self.param_groups, self.state)
        except Exception as error:
            step = engine.give_up(number, error)
        self._state_if_undone = state  # `_settle` goes back to it if the next step reads an error
        verdict = self._verdict = engine.vote(step)
        if verdict.is_before_first_gradient:
            return
        if not verdict.is_skipped:
            engine.run(step, verdict)
        skipped = state.steps_skipped + verdict.is_skipped
        state = dataclasses.replace(state, steps_taken=number, steps_skipped=skipped)
        self._schedule_state = state
        if step.orders is not None and step.orders.measures:
            with torch.profiler.record_function("amo::observe"):
                self._measure(step.orders, None if verdict.is_skipped else step)

    def _settle(self) -> None:
        """Read the verdict on the last step, if nobody has read it.

        Raises:
            As `Ballots.vote`, for that step, which then counts as not taken.
        """
        assert self._verdict is not None
        try:
            self._verdict.settle()
        except Exception:
            self._schedule_state = self._state_if_undone
            raise
        state = self._schedule_state
        skipped = state.steps_skipped + self._verdict.is_skipped
        self._schedule_state = dataclasses.replace(state, steps_skipped=skipped)

    def _orders(self, number: int) -> Orders:
        """The orders of the coming step."""
        source, config = self._schedule_state.source, self._schedule_state.config
        schedules, digest, is_locked = self._decide(number)
        sample = source.sample(number)
        # Weighted owners change once, at the lock, as new ones make all ranks wait.
        has_new_owners = is_locked and config.ownership == "balanced"
        every, checked = config.ns_guard_every, None
        if every:
            checked = matrix_to_check(self._engine.world.registry, number, every)
        return Orders(
            step=number,
            schedules=schedules,
            digest=digest,
            owners_of="locked" if has_new_owners else "first",
            sample=sample,
            candidates=coefficient_table(source.candidates()) if sample else None,
            checked=checked,
            measures=bool(sample) or checked is not None,
        )

    def _decide(self, number: int) -> tuple[Sequence[Schedule], str, bool]:
        """Schedule of each matrix, a digest of all that ranks share, and whether AMO is locked.

        They are made anew where the version of the source changes.
        """
        source = self._schedule_state.source
        version = source.version(number)
        if self._decision is None or self._decision[0] != version:
            by_key = source.schedules(number)
            if self._keys is None:  # once: there may be tens of thousands
                infos = {info.name: info for info in self._engine.world.registry}
                names = [matrix.name for matrix in self._engine.parameters.matrices]
                self._keys = [source.key(infos[name]) for name in names]
            schedules = list(map(by_key.__getitem__, self._keys))
            digests = {key: schedule.digest() for key, schedule in by_key.items()}
            config = self.config.to_dict()
            values = {"config": config, "schedules": digests, "source": source.state()}
            digest = hashlib.sha256(controls.to_text(values).encode()).hexdigest()
            is_locked = source.phase(number) == "locked"
            self._decision = version, schedules, digest, is_locked
        return self._decision[1:]

    def _measure(self, orders: Orders, step: Step | None) -> None:
        """Observe and measure what the orders ask for; a collective.

        Args:
            orders: Orders of the step.
            step: The step that has run; None for one that was skipped, which measures nothing.
        """
        engine = self._engine
        if orders.sample:
            self._record(orders.step, observe(engine, step) if step else {})
            self._observe_seconds = step.observe_seconds if step else 0.0
        if orders.checked is not None:
            self._check_residual(orders, agreed_residual(engine, step) if step else 0.0)

    def _record(self, step: int, observed: Mapping[str, Measurement]) -> None:
        """Hand an observation to the source, which plans at the last one; each rank by itself."""
        state, world = self._schedule_state, self._engine.world
        source = copy.copy(state.source)
        try:
            remarks = source.record(step, observed)
        except Exception as error:
            self._engine.ballots.report_failure(f"step {step}: recording an observation", error)
            return
        self._schedule_state = dataclasses.replace(state, source=source)
        if world.speaks:
            # Under a plan nothing is observed: it is new.
            if (plan := getattr(source, "plan", None)) is not None:
                logger.info("the plan, beside the uniform schedule:\n%s", plan)
            for line in remarks:
                logger.warning("%s", line)

    def _check_residual(self, orders: Orders, residual: float) -> None:
        """Warn of a residual above the bound."""
        self._residual, name, step = residual, orders.checked, orders.step
        if not (residual > GUARD_BOUND and self._engine.world.speaks):
            return
        info = next(matrix for matrix in self._engine.world.registry if matrix.name == name)
        schedule = self.source.schedules(step)[self.source.key(info)]
        logger.warning(
            "step %d: %s, of type %s, is left with a Newton-Schulz residual of %.4g, above %g, "
            "by %d steps: %s",
            *(step, name, info.operator_type, residual, GUARD_BOUND, schedule.num_steps, schedule),
        )

    def _connect(self) -> None:
        """Agree with all ranks on the structure; once, at the first step.

        Raises:
            ValueError: On every rank, for a mistake on one.
            RankMismatchError: On every rank; names the field that differs.
        """
        with self.raise_on_all_ranks("the first step"):
            self._adopt_swapped_parameters()
            engine = self._engine
            engine.parameters.tensors(self.state)
            settings = read_groups(self.param_groups, engine.check, self.rule_class.defaults)
            params = engine.parameters.params
            multipliers = [float(self.param_groups[p.group]["muon_lr_factor"]) for p in params]
            pairs = zip(engine.parameters.matrices, engine.update_scales, strict=True)
            rates = [multipliers[matrix.param] * scale for matrix, scale in pairs]
            values = {**self.config.to_dict(), "source": self.source.name}
            values["optimizer"] = self._name()
            is_new = self.source.name != "fixed" and not self.num_steps_taken
            holds_values = is_new and self._holds_values()
        self._compare_text(
            "\n".join(f"{key} = {json.dumps(values[key])}" for key in sorted(values))
        )
        group = engine.membership.world_group(engine.matrix_device)
        texts = [own.text for own in settings]
        world = gather_world(engine.parameters, rates, texts, engine.membership, group)
        is_plain = all(len(param.layout.ranks) == 1 for param in params)
        if self._process_group is None and len(world.ranks) > 1 and is_plain and world.speaks:
            logger.warning(
                "the parameters are plain tensors, and %d ranks run: each of them orthogonalizes "
                "every matrix. Where they are replicas, as under DDP, write process_group="
                "dist.group.WORLD in %s(...), and each matrix is orthogonalized once",
                *(len(world.ranks), type(self).__name__),
            )
        if holds_values and world.speaks:
            logger.warning(
                "%s begins at step 0, with momentum of an earlier run: to resume that, call "
                "load_state_dict, or load_control_state_dict for state that was filled in place",
                type(self).__name__,
            )
        state = self._schedule_state
        source = copy.copy(state.source)
        with self.raise_on_all_ranks("the schedules of these matrices"):
            self._check_matrices(len(world.registry))
            source.bind(world.registry)
        self._schedule_state = dataclasses.replace(state, source=source)
        if engine.matrix_device.type != "cpu":
            # The first all-to-all opens NCCL's channels to all peers, in gigabytes that PyTorch's
            # allocator does not see and may have kept for itself.
            torch.accelerator.empty_cache()
        # Only now: after an error above all of it is done again.
        engine.connect(world, self._name())

    def _adopt_swapped_parameters(self) -> None:
        """Take the parameters that a trainer has put into the groups, before the first step.

        Accelerate does so: it shards the model after the optimizer was built. Layouts and state
        are made anew then.

        Raises:
            ValueError: They have other shapes, or come too late; or a parameter was cast or moved.
        """
        engine, before = self._engine, self._engine.parameters
        held = [id(tensor) for group in self.param_groups for tensor in group["params"]]
        if held == [id(param.tensor) for param in before.params]:
            return
        check_swap(before, self.param_groups)
        if self.num_steps_taken or engine.is_connected or self._holds_values():
            tensors = [tensor for group in self.param_groups for tensor in group["params"]]
            pairs = zip(before.params, tensors, strict=True)
            names = [param.name for param, tensor in pairs if param.tensor is not tensor]
            other = "another tensor in param_groups after the first step, or after a state was "
            other += "loaded"
            expected = "the same: swap parameters (as fully_shard and trainers do) first, then load"
            require(False, [*names, before.params[0].name][0], other, expected)
        self.state.clear()
        state = self._state_to_save()
        # The others may lie on another device, where other dtypes are in force.
        ns_dtype, wire_dtype = self._given_dtypes
        config = dataclasses.replace(state.config, ns_dtype=ns_dtype, wire_dtype=wire_dtype)
        self._assemble(dataclasses.replace(state, config=config))
        self._engine.make_state(self.state)

    def _holds_values(self) -> bool:
        """Whether any tensor of the state is not all zero; waits for the device."""
        _, states = self._engine.parameters.tensors(self.state)
        return any(bool(value.any()) for own in states for value in own.values())

    def _check_matrices(self, num_matrices: int) -> None:
        """Refuse to train by AdamW alone unless the user allows it."""
        if num_matrices or self._allow_no_matrices:
            return
        params = self._engine.parameters.params
        shapes = {param.name: tuple(param.layout.shape) for param in params}
        # Parameters that might hold a matrix come first.
        first = sorted(shapes.items(), key=lambda pair: len(pair[1]) < 2)[:3]
        examples = ", ".join(f"{name} {shape}" for name, shape in first)
        large = {name: shape for name, shape in shapes.items() if len(shape) > 1}
        raise ValueError(
            f"params: found no matrix among {len(shapes)} parameters ({examples}...), expected at "
            "least one: name yours by param_groups(model, patterns={...}), take all by "
            "unknown='matrix', or have AdamW train all of them by allow_no_matrices=True"
            + (f". To paste and to edit:\n{format_patterns(large)}" if large else "")
        )

    @contextlib.contextmanager
    def raise_on_all_ranks(self, activity: str) -> Iterator[None]:
        """Raise on every rank what the body raises on one; a collective over the world.

        A rank that is at its next step meanwhile meets this there, and raises, too.

        Args:
            activity: Name of the body, for the error; the body must change nothing.

        Raises:
            ValueError: On every rank, where the body raises one; names the rank and its error.
            RuntimeError: On every rank, for any other failure.
            RankMismatchError: On every rank, where another one does something else.
        """
        try:
            yield
        except Exception as error:
            self._compare_text(failure_text(activity, error))
            raise
        self._compare_text(activity)

    def _compare_text(self, text: str) -> None:
        """Raise on every rank where texts differ, or one is a `failure_text`; a collective."""
        engine = self._engine
        if len(engine.membership.ranks) == 1:
            return
        if engine.is_connected:
            engine.ballots.vote_on_text(text)
        else:  # the first step of another rank begins with this collective, too
            check_alike("the first step", text, engine.membership.world_group(engine.matrix_device))

    def check_last_update(self) -> None:
        """Raise now what the next step would raise of the last one; a collective over the world.

        Call it at the end of training, and before checkpoints: saving communicates nothing, so
        that one rank may save alone, and only the owner knows of an update that was left out.

        Raises:
            NonFiniteUpdateError: On every rank, where the last update of a matrix was left out.
            RuntimeError: On every rank, where the last step has failed on one.
        """
        if self._verdict is not None and not self._verdict.is_known:
            self._settle()
        if self._engine.is_connected:
            self._engine.ballots.vote_on_text("the last update", with_updates=True)

    # ---------------------------------------------------------------- what it holds

    @property
    def config(self) -> MuonConfig:
        """The settings in force."""
        return self._schedule_state.config

    @property
    def source(self) -> Source:
        """Source of the schedules of each step."""
        return self._schedule_state.source

    @property
    def plan(self) -> Plan | None:
        """The plan in force, if any."""
        return getattr(self.source, "plan", None)

    @property
    def world(self) -> World | None:
        """Structure on which all ranks agreed at the first step; None before."""
        return self._engine.world if self._engine.is_connected else None

    @property
    def operator_types(self) -> tuple[str, ...]:
        """Operator type of each matrix of this process."""
        return self._engine.parameters.operator_types

    @property
    def params_by_name(self) -> dict[str, Tensor]:
        """The parameters of this process by their cleaned names, in the order of the groups."""
        self._adopt_swapped_parameters()
        return {param.name: param.tensor for param in self._engine.parameters.params}

    @property
    def num_steps_taken(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._schedule_state.steps_taken

    @property
    def phase(self) -> str:
        """Phase of the last step taken; that of the first before there is one."""
        return self.source.phase(max(self.num_steps_taken, 1))

    def schedules_by_type(self, step: int) -> Mapping[str, Schedule]:
        """The schedule of each operator type (of `ROOT`: shape) at a step, counted from 1.

        Raises:
            ValueError: Before the first step, when no rank knows all matrices, or for a step whose
                schedule is not known yet.
        """
        is_known, early = self.world is not None, "a call before the first step"
        expected = "one after it: the ranks learn of all matrices then"
        require(is_known, "schedules_by_type", early, expected)
        return self.source.schedules(step)

    def metrics(self) -> dict[str, float]:
        """Plain numbers for a logger, about the last step taken."""
        values: dict[str, float] = {}
        if self.world is not None:
            step = max(self.num_steps_taken, 1)
            values = self.source.metrics(step)
        return {
            **values,
            "newton_schulz/bounded": float(self._engine.num_bounded()),
            "exchange/sent_bytes": float(self._engine.sent_bytes),
            "newton_schulz/residual": self._residual,
            "optimizer/steps_skipped": float(self._schedule_state.steps_skipped),
            "optimizer/observe_seconds": self._observe_seconds,
        }

    # ---------------------------------------------------------------- checkpoints

    def control_state_dict(self) -> dict[str, Any]:
        """The state of the schedule as JSON values, the same on every rank.

        Communicates nothing, waits for the last step, and raises nothing for it: a last step that
        changed nothing, or left out an update on this rank, is logged. See `check_last_update`.
        """
        self._adopt_swapped_parameters()
        return controls.control_record(self._state_to_save())

    def _state_to_save(self) -> ScheduleState:
        """The state of schedules for a checkpoint, or for a copy."""
        state, outcome = self._schedule_state, None
        if self._verdict is not None:
            self._engine.ballots.log_updates()
            outcome = self._verdict.pending_outcome()
        if outcome == "undone":
            return self._state_if_undone
        skipped = state.steps_skipped + (outcome == "skipped")
        return dataclasses.replace(state, steps_skipped=skipped)

    @torch.inference_mode(False)
    def load_control_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `control_state_dict` returned; all or nothing.

        Nothing here communicates: where only some ranks do it, all raise at their next step.

        Raises:
            ValueError: Names the field, what was found and what was expected.
        """
        self._adopt_swapped_parameters()
        self._go_on_from(self._restored(state))

    def _restored(self, record: Mapping[str, Any]) -> ScheduleState:
        """A state from `control_state_dict`'s values, after all checks; changes nothing."""
        state = controls.restore(record, self._schedule_state, self._given_dtypes)
        self.rule_class(state.config)  # refuses settings
        return state

    def _go_on_from(self, state: ScheduleState) -> None:
        world = self.world
        self._assemble(state, self._engine.parameters)
        if world is not None:
            self._engine.connect(world, self._name())

    def state_dict(self) -> dict[str, Any]:
        """The state, as for any PyTorch optimizer; ``control`` of groups is `control_state_dict`.

        ``param_names`` lists the names of each group's parameters, by which loading orders state.
        """
        text = controls.to_text(self.control_state_dict())
        state = super().state_dict()
        for group in state["param_groups"]:
            group["control"] = text
        # A caller who edits what is returned must not edit the optimizer's own dictionaries. A hook
        # may have put other values beside them.
        state["state"] = {key: copy.copy(own) for key, own in state["state"].items()}
        state["param_names"] = [list(names) for names in self._structure.names]
        return state

    @torch.inference_mode(False)  # what is made here lasts longer than the caller's mode
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, on all ranks or on none; a collective over the world.

        Momentum keeps its own dtype, whatever that of the parameter.

        Raises:
            ValueError: On every rank: the state of one is of another structure, optimizer or
                configuration; names the rank.
        """
        with self.raise_on_all_ranks("load_state_dict"):
            params_by_name, params = self.params_by_name, self._engine.parameters.params
            own = {
                p.name: {key: self.state[p.tensor][key] for key in p.state_forms} for p in params
            }
            loaded = load.read(self, params_by_name, self._structure.names, own, state_dict)
            schedule_state = self._restored(loaded.control)
            # Last: state of another optimizer has been named by then.
            kept, pairs = (
                loaded.control["config"],
                zip(self.param_groups, loaded.groups, strict=True),
            )
            groups = [{**own, **saved} for own, saved in pairs]
            for group, saved in zip(groups, loaded.groups, strict=True):
                for key in ("momentum", "nesterov"):  # those of the settings, unless it was moved
                    if key not in saved or saved[key] == kept[key]:
                        group[key] = getattr(schedule_state.config, key)
            read_groups(groups, self._engine.check, self.rule_class.defaults)
        self._go_on_from(schedule_state)
        with self.raise_on_all_ranks("load_state_dict: filling the state"):
            dataclasses.replace(loaded, groups=groups).fill(self)

    # ---------------------------------------------------------------- as PyTorch's optimizers

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group during construction; later the structure is fixed.

        Raises:
            ValueError: After construction.
        """
        late, is_built = "a group after construction", hasattr(self, "_engine")
        expected = "all groups at once: build a new optimizer, and copy old.state into new.state"
        require(not is_built, "add_param_group", late, expected)
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """The state to copy or pickle, as for any PyTorch optimizer without hooks."""
        self._adopt_swapped_parameters()
        group = PicklableGroup(self._process_group, self._engine.membership.ranks)
        kept = {
            "_structure": self._structure,
            "_given_dtypes": self._given_dtypes,
            "_allow_no_matrices": self._allow_no_matrices,
            "_process_group": group,
            "control": self._state_to_save(),
            "forms": [param.state_forms for param in self._engine.parameters.params],
        }
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Build a copy, which agrees with all ranks at its first step, as a new optimizer does."""
        kept = {key: value for key, value in state.items() if key not in ("control", "forms")}
        group = state["_process_group"].group
        super().__setstate__({**kept, "_process_group": group})
        self._assemble(state["control"])
        self._count()
        for param, form in zip(self._engine.parameters.params, state["forms"], strict=True):
            param.state_forms = form

    def __repr__(self) -> str:
        """The text of any PyTorch optimizer, without the key of groups that only files fill."""
        lines = super().__repr__().split("\n")
        return "\n".join(line for line in lines if not line.startswith("    control: "))


def check_config(config: Any, kind: type[_Config]) -> _Config:
    """The settings that a user gave, or those by default.

    Raises:
        ValueError: They are of another class than ``kind``.
    """
    if config is None:
        return kind()
    if not isinstance(config, kind):
        own, name = type(config).__name__, kind.__name__
        raise ValueError(f"config: found a {own}, expected an {name}: config={name}(...)")
    return config
