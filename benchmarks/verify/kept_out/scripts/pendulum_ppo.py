# PPO on a pendulum that is simulated in torch, after CleanRL's single-file style.
# Environments are divided over the processes; their random numbers do not depend on the number of
# processes.     torchrun --nproc-per-node 2 pendulum_ppo.py --num-envs 16
import argparse
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions.normal import Normal
from torch.nn.utils import parameters_to_vector, vector_to_parameters

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--num-envs", type=int, default=16, help="of all processes")
parser.add_argument("--num-steps", type=int, default=32)
parser.add_argument("--iterations", type=int, default=6)
parser.add_argument("--update-epochs", type=int, default=2)
parser.add_argument("--num-minibatches", type=int, default=4)
parser.add_argument("--learning-rate", type=float, default=2e-3)
parser.add_argument("--gamma", type=float, default=0.95)
parser.add_argument("--gae-lambda", type=float, default=0.9)
parser.add_argument("--clip-coef", type=float, default=0.2)
parser.add_argument("--max-grad-norm", type=float, default=0.5)
args = parser.parse_args()


def layer_init(layer, std=math.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(3, 32)), nn.Tanh(), layer_init(nn.Linear(32, 1), std=1.0)
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(3, 32)), nn.Tanh(), layer_init(nn.Linear(32, 1), std=0.01)
        )
        self.log_std = nn.Parameter(torch.zeros(1))

    def value(self, obs):
        return self.critic(obs).squeeze(-1)

    def policy(self, obs):
        return Normal(self.actor(obs).squeeze(-1), self.log_std.exp())


class Pendulums:
    def __init__(self, angle, speed):
        self.angle, self.speed = angle, speed

    def observe(self):
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed / 4], -1)

    def step(self, action):
        torque = 2 * action.clamp(-1, 1)
        off = torch.remainder(self.angle + math.pi, 2 * math.pi) - math.pi
        reward = -(off**2 + 0.1 * self.speed**2 + 0.001 * torque**2) / 8
        self.speed = (self.speed + (10 * self.angle.sin() + 3 * torque) * 0.05).clamp(-8, 8)
        self.angle = self.angle + self.speed * 0.05
        return reward


dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
local_envs = args.num_envs // world_size
mine = slice(rank * local_envs, (rank + 1) * local_envs)

torch.manual_seed(args.seed)
draws = torch.Generator().manual_seed(args.seed)  # the same numbers in all processes
agent = Agent()
flat = parameters_to_vector(agent.parameters()).detach()
dist.broadcast(flat, src=0)
vector_to_parameters(flat, agent.parameters())
optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

start = torch.randn(2, args.num_envs, generator=draws)[:, mine]
envs = Pendulums(math.pi + start[0], start[1])

for iteration in range(args.iterations):
    optimizer.param_groups[0]["lr"] = (1 - iteration / args.iterations) * args.learning_rate

    # rollout
    obs = torch.zeros(args.num_steps, local_envs, 3)
    actions, logprobs, rewards, values = torch.zeros(4, args.num_steps, local_envs).unbind(0)
    noise = torch.randn(args.num_steps, args.num_envs, generator=draws)[:, mine]
    with torch.no_grad():
        for t in range(args.num_steps):
            obs[t] = envs.observe()
            policy, values[t] = agent.policy(obs[t]), agent.value(obs[t])
            actions[t] = policy.mean + policy.stddev * noise[t]
            logprobs[t] = policy.log_prob(actions[t])
            rewards[t] = envs.step(actions[t])
        next_value, last = agent.value(envs.observe()), torch.zeros(local_envs)
        advantages = torch.zeros_like(rewards)
        for t in reversed(range(args.num_steps)):
            delta = rewards[t] + args.gamma * next_value - values[t]
            advantages[t] = last = delta + args.gamma * args.gae_lambda * last
            next_value = values[t]
        returns = advantages + values

    # advantages are normalized over the rollouts of all processes
    moments = torch.stack([advantages.sum(), (advantages**2).sum(), rewards.sum()])
    dist.all_reduce(moments)
    mean, square, reward = moments / (args.num_steps * args.num_envs)
    advantages = (advantages - mean) / ((square - mean**2).sqrt() + 1e-8)

    # update: a minibatch is some time steps of all environments
    losses = torch.zeros(2)
    for _ in range(args.update_epochs):
        order = torch.randperm(args.num_steps, generator=draws)
        for t in order.chunk(args.num_minibatches):
            policy = agent.policy(obs[t])
            ratio = (policy.log_prob(actions[t]) - logprobs[t]).exp()
            clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            pg_loss = torch.max(-advantages[t] * ratio, -advantages[t] * clipped).mean()
            v_loss = 0.5 * ((agent.value(obs[t]) - returns[t]) ** 2).mean()
            loss = pg_loss - 0.001 * policy.entropy().mean() + 0.5 * v_loss

            optimizer.zero_grad()
            loss.backward()
            all_grads = torch.cat([p.grad.view(-1) for p in agent.parameters()])
            dist.all_reduce(all_grads, op=dist.ReduceOp.SUM)
            offset = 0
            for p in agent.parameters():
                grad = all_grads[offset : offset + p.numel()].view_as(p.grad)
                p.grad.copy_(grad / world_size)
                offset += p.numel()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            losses += torch.stack([pg_loss.detach(), v_loss.detach()])

    dist.all_reduce(losses)
    pg, v = losses / (world_size * args.update_epochs * args.num_minibatches)
    if rank == 0:
        print(f"iteration {iteration} reward {reward:.4f} policy {pg:.5f} value {v:.5f}")
dist.destroy_process_group()
