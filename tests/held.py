"""A policy with its state and its groups, as the engine holds them: for tests without tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from amo_dist.config import AMOConfig, MuonConfig
from amo_dist.schedule.amo import AMOPolicy
from amo_dist.schedule.grouping import Groups
from amo_dist.schedule.observation import Observation, Observed
from amo_dist.schedule.plan import Plan, StepsAndElls
from amo_dist.schedule.policies import Policy
from amo_dist.schedule.types import MatrixInfo, Schedule


class Held:
    """A run of a policy: what `amo_dist.schedule.policies.Policy` says, with the state kept here.

    Args:
        policy: Any.
        registry: Of the matrices; may come later, by `bind`.
        state: What the policy remembers; its start by default.
    """

    def __init__(
        self, policy: Policy, registry: Sequence[MatrixInfo] | None = None, state: Any = None
    ) -> None:
        self.policy = policy
        self.state = policy.start() if state is None else state
        self.known: Groups | None = None
        if registry is not None:
            self.bind(registry)

    def bind(self, registry: Sequence[MatrixInfo]) -> None:
        """Take the matrices, and check that the state fits them."""
        groups = self.policy.groups(registry)
        self.state = self.policy.from_dict(self.state_dict(), groups)
        self.known = groups

    @property
    def groups(self) -> Groups:
        assert self.known is not None
        return self.known

    @property
    def plan(self) -> Plan | None:
        return self.state.plan  # type: ignore[no-any-return]

    @property
    def observations(self) -> tuple[Observation, ...]:
        return self.state.observations  # type: ignore[no-any-return]

    @property
    def config(self) -> AMOConfig:
        assert isinstance(self.policy, AMOPolicy)
        return self.policy.config

    def group_of(self, name: str) -> str:
        return self.groups.group_of[name]

    def schedules(self, step: int) -> Mapping[str, Schedule]:
        return self.policy.schedules(self.state, self.groups, step)

    def state_at(self, step: int) -> StepsAndElls:
        assert isinstance(self.policy, AMOPolicy)
        return self.policy.state_at(self.state, self.groups, step)

    def phase(self, step: int) -> str:
        return self.policy.phase(self.state, step)

    def next_change(self, step: int) -> float:
        return self.policy.next_change(self.state, step)

    def sample(self, step: int) -> tuple[str, ...]:
        return self.policy.sample(self.state, self.groups, step)

    def trials(self) -> tuple[Schedule, ...]:
        return self.policy.trials()

    def record(self, step: int, observed: Mapping[str, Observed]) -> None:
        self.state = self.policy.record(self.state, self.groups, step, observed)

    def plan_due(self) -> bool:
        return self.policy.plan_due(self.state)

    def make_plan(self) -> str:
        return self.policy.make_plan(self.state, self.groups)

    def adopt_plan(self, payload: str) -> None:
        self.state = self.policy.adopt_plan(self.state, self.groups, payload)

    def digest(self, step: int) -> str:
        return self.policy.digest(self.state, self.groups, step)

    def metrics(self, step: int) -> dict[str, float]:
        return self.policy.metrics(self.state, self.groups, step)

    def state_dict(self) -> dict[str, Any]:
        return self.policy.to_dict(self.state)

    def load_state_dict(self, found: Any) -> None:
        self.state = self.policy.from_dict(found, self.known)

    def resumed(
        self,
        found: Any,
        *,
        steps_taken: int,
        config: MuonConfig,
        changed: Collection[str] = (),
    ) -> Held:
        """Another that goes on from a saved state, bound where this one is."""
        options: dict[str, Any] = {"steps_taken": steps_taken, "config": config}
        policy, state = self.policy.resumed(found, self.known, changed=changed, **options)
        return Held(policy, None if self.known is None else self.known.matrices, state)
