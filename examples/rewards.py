"""Reward functions as they are written for TRL and for verl. examples/python_rewards.yaml trains on both."""

import re


def digits(prompts, completions, **kwargs):
    """TRL: rewards of a group of completions. The share of digits in each; it does not apply to an empty one."""
    texts = [messages[0]["content"] for messages in completions]
    return [sum(c.isdigit() for c in text) / len(text) if text else None for text in texts]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl: the reward of one completion. 1 if its last number is the ground truth."""
    numbers = re.findall(r"-?[0-9][0-9,]*", solution_str)
    found = numbers[-1].replace(",", "") if numbers else None
    return {"score": 1.0 if found == ground_truth else 0.0, "has_number": found is not None, "pred": found}
