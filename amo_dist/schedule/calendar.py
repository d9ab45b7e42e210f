"""When AMO observes and when it plans, as a function of the configuration and the last plan."""

from __future__ import annotations

import dataclasses

from amo_dist.config import AMOConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Calendar:
    """Steps of observations and plans.

    Observations toward the first plan come every ``observe_every`` steps up to ``observe_until``,
    where it is made. With ``replan_every`` another plan follows that many steps after each; its
    observations begin at the lock of the plan before.

    Attributes:
        config: Of the run.
        replanned_at: The step at which a changed configuration dropped a plan; 0 where none did.
            The first plan needs at least one observation made after it.
    """

    config: AMOConfig
    replanned_at: int = 0

    def following(self, step: int) -> int:
        """The first multiple of ``observe_every`` after ``step``."""
        every = self.config.interval
        return (step // every + 1) * every

    @property
    def first_plan(self) -> int:
        """The step within which the first plan is made."""
        return max(self.config.observe_until, self.following(self.replanned_at))

    def next_plan(self, plan_step: int | None) -> int | None:
        """The step within which the plan after that of ``plan_step`` is made; None for never."""
        if plan_step is None:
            return self.first_plan
        if not self.config.replan_every:
            return None
        return self.following(plan_step + self.config.replan_every - 1)

    def next_observation(self, plan_step: int | None, last: int | None) -> int | None:
        """The step of the next observation; None where none is due before the next plan is made.

        Args:
            plan_step: At which the plan in force was made; None before the first.
            last: Of the last observation toward the next plan; None before the first of them.
        """
        until, done = self.next_plan(plan_step), self.replanned_at
        if plan_step is not None:
            done = plan_step + self.config.transition_steps - 1
        due = self.following(max(done, last or 0))
        return None if until is None or due > until else due

    def observes(self, step: int, plan_step: int | None) -> bool:
        """Whether a step toward the plan after that of ``plan_step`` is one of observation."""
        return step == self.next_observation(plan_step, step - 1)
