import copy, dataclasses
from amo_dist.state import checkpoint
from amo_dist.state.checkpoint import to_text


@dataclasses.dataclass(frozen=True)
class Control:
    steps_taken: int
    steps_skipped: int
    config: object
    policy: object


def control_record(c):
    return checkpoint.control_state(
        steps_taken=c.steps_taken, steps_skipped=c.steps_skipped, config=c.config, policy=c.policy
    )


def restore(state, running, operator_types, is_alone):
    found = checkpoint.check_control(state, config=running.config, policy=running.policy)

    class O:
        pass

    o = O()
    o.policy = copy.copy(running.policy)
    if hasattr(o.policy, "controller"):
        o.policy.controller = copy.copy(o.policy.controller)
    o.config = running.config
    o.operator_types = operator_types

    class W:
        pass

    o.world = None
    if running.policy._registry is not None:
        o.world = W()
        o.world.registry = running.policy._registry
    return Control(
        found.steps_taken, found.steps_skipped, found.config, checkpoint.restore_policy(found, o)
    )
