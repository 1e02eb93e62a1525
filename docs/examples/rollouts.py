"""GRPO on a toy policy: four processes sample groups of answers, the loop trains."""

import torch

import swpipe
from swpipe.loops import worker_processes

ANSWERS, GROUP = 10, 8


def new_policy():
    torch.manual_seed(0)
    return torch.nn.Linear(4, ANSWERS)


def rollout(weights, prompt):
    """Return a group of answers to one prompt, and the reward of each: 1 for the right one."""
    torch.set_num_threads(1)
    draws = torch.Generator().manual_seed(prompt)  # a rollout depends on weights and prompt alone
    state = torch.randn(4, generator=draws)
    probabilities = torch.softmax(weights["weight"] @ state + weights["bias"], 0)
    answers = torch.multinomial(probabilities, GROUP, replacement=True, generator=draws)
    right = int(state.argmax())
    return state, answers, (answers == right).float()


def train(**options):
    policy = new_policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.05)
    rewards, oldest = [], 0
    workers = worker_processes(rollout, 4)
    with swpipe.feed(
        range(960), workers, policy=policy.state_dict, batch=16, staleness=2, **options
    ) as batches:
        for batch in batches:
            oldest = max(oldest, batch.staleness)
            parts = zip(*batch.values, strict=True)
            states, answers, reward = map(torch.stack, parts)
            advantage = reward - reward.mean(1, keepdim=True)  # within each group
            chosen = torch.log_softmax(policy(states), 1).gather(1, answers)
            loss = -(advantage * chosen).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rewards.append(reward.mean().item())
    return batches, rewards, oldest, policy.weight.detach()


if __name__ == "__main__":
    run, rewards, oldest, weight = train(order="completed")
    print("at most 2 versions behind:", oldest <= 2)
    print("more right answers at the end:", sum(rewards[-10:]) > 2 * sum(rewards[:10]))

    _, _, _, again = train(replay=run.arrivals)
    print("the replay has the same bits:", torch.equal(weight, again))
