from amo_dist.state.checkpoint import load_state_dict
