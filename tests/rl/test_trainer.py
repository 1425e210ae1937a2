"""Steps of the trainer: what they measure and change, and that they repeat bit for bit."""

import math
from dataclasses import replace
from statistics import mean, pstdev

import pytest
import torch

import octile.rl.trainer
from octile.checkpoint.hugging_face import load
from octile.rl.batch import compare_log_probs, estimate_kl
from octile.rl.config import RLConfig
from octile.rl.grpo import completion_mean
from octile.rl.prompts import ArithmeticPrompts, Prompt
from octile.rl.rewards import Rewards
from octile.rl.trainer import RLTrainer

CONFIG = RLConfig(prompts_per_step=2, group_size=4, max_new_tokens=10, lr=1e-3)
CPU = torch.device("cpu")


def make_trainer(folder, reward_file, **changes) -> RLTrainer:
    config = replace(CONFIG, **changes)
    return RLTrainer(config, folder, ArithmeticPrompts(config.seed), Rewards(reward_file), CPU)


def without_times(line):
    return {name: value for name, value in line.items() if "seconds" not in name}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.slow
def test_with_the_recipe_exact_all_log_probabilities_have_equal_bits_after_each_step(exact_folder, reward_file):
    trainer = make_trainer(exact_folder, reward_file)
    assert trainer.is_exact
    for step in range(1, 4):
        line = trainer.step()
        assert line["step"] == step
        assert line["delta_equal"] == line["delta_tokens"] > 0
        assert (line["delta_mean"], line["delta_largest"], line["delta_kl"], line["clipped"]) == (0, 0, 0, 0)
        assert (line["kl"] == 0) == (step == 1)
        assert line["entropy"] > 0
        assert line["grad_norm"] > 0


@pytest.mark.slow
def test_with_another_recipe_the_differences_are_measured_and_can_be_corrected(usual_folder, reward_file):
    lines = [make_trainer(usual_folder, reward_file, importance_limit=limit).step() for limit in (None, 2.0)]
    assert all(0 < line["delta_mean"] <= line["delta_largest"] for line in lines)
    assert all(0 < line["delta_kl"] < line["delta_largest"] for line in lines)
    assert lines[0]["delta_equal"] < lines[0]["delta_tokens"]
    assert lines[0]["grad_norm"] != lines[1]["grad_norm"]
    assert "weight_mean" not in lines[0]


@pytest.mark.slow
def test_importance_weights_of_equal_bits_are_reported_as_one(exact_folder, reward_file):
    lines = [make_trainer(exact_folder, reward_file, importance_limit=limit).step() for limit in (1.5, 0.5)]
    assert [(line["weight_mean"], line["weight_truncated"]) for line in lines] == [(1, 0), (0.5, 1)]


@pytest.mark.slow
def test_equal_rewards_change_nothing_at_the_beginning(exact_folder, tmp_path):
    (tmp_path / "reward.py").write_text("def reward(prompt, completion, answer):\n    return 1\n")
    trainer = make_trainer(exact_folder, tmp_path / "reward.py")
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    line = trainer.step()
    assert (line["reward"], line["reward_std"], line["equal_groups"], line["grad_norm"]) == (1, 0, 1, 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.slow
def test_steps_raise_the_reward(exact_folder, tmp_path):
    (tmp_path / "reward.py").write_text("def reward(prompt, completion, answer):\n    return completion.count('1')\n")
    trainer = make_trainer(exact_folder, tmp_path / "reward.py", group_size=16, lr=3e-3, kl_coefficient=0.0)
    rewards = [trainer.step()["reward"] for _ in range(8)]
    assert rewards[-1] > 2 * rewards[0] + 1


def test_without_a_penalty_there_is_no_reference_and_no_divergence(exact_folder, reward_file):
    trainer = make_trainer(exact_folder, reward_file, kl_coefficient=0.0)
    assert "kl" not in trainer.step()


@pytest.mark.slow
def test_micro_batches_change_the_gradient_by_rounding_alone(exact_folder, reward_file):
    norms = [make_trainer(exact_folder, reward_file, micro_batches=n).step()["grad_norm"] for n in (1, 3)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)  # FP8 wgrad quantizes other tiles


@pytest.mark.slow
def test_with_several_updates_differences_are_those_of_the_weights_that_have_sampled(exact_folder, reward_file):
    trainer = make_trainer(exact_folder, reward_file, updates=2, lr=1e-2)
    lines = [trainer.step() for _ in range(2)]
    assert all(line["delta_equal"] == line["delta_tokens"] for line in lines)
    assert any(line["clipped"] for line in lines)


def recorded(monkeypatch, name):
    """Return a list to which each call of a function in the trainer adds its arguments and its result."""
    calls, function = [], getattr(octile.rl.trainer, name)

    def call(*args):
        calls.append((args, function(*args)))
        return calls[-1][1]

    monkeypatch.setattr(octile.rl.trainer, name, call)
    return calls


@pytest.mark.slow
def test_each_step_has_its_own_prompts_and_seeds(exact_folder, reward_file, monkeypatch):
    calls = recorded(monkeypatch, "sampling_seeds")
    trainer = make_trainer(exact_folder, reward_file, seed=3)
    for step in range(2):
        trainer.step()
        assert [scored.completion.prompt for scored in trainer.last[::4]] == ArithmeticPrompts(3).of_step(step, 2)
    assert [args for args, _ in calls] == [(3, 0, 8), (3, 1, 8)]


@pytest.mark.slow
def test_short_completions_are_all_sampled_at_once(exact_folder, reward_file):
    trainer = make_trainer(exact_folder, reward_file, group_size=16)
    trainer.step()
    longest = max(len(each.completion.tokens) for each in trainer.last)
    assert trainer.engine.stats().steps <= longest + 2  # that of the prompts, and one after a cancellation


@pytest.mark.slow
def test_entropy_is_measured_on_the_sampled_tokens_alone(exact_folder, reward_file):
    trainer = make_trainer(exact_folder, reward_file)
    line = trainer.step()
    log_probs = [value for scored in trainer.last for value in scored.completion.log_probs]
    assert line["entropy"] == pytest.approx(-math.fsum(log_probs) / len(log_probs))


def test_metrics_of_completions_are_those_of_what_was_sampled_and_scored(exact_folder, reward_file):
    trainer = make_trainer(exact_folder, reward_file)
    line = trainer.step()
    groups = [[scored.reward for scored in trainer.last[i : i + 4]] for i in (0, 4)]
    assert line["reward"] == pytest.approx(mean(groups[0] + groups[1]))
    assert line["reward_std"] == pytest.approx(mean(map(pstdev, groups)))
    assert line["length"] == mean(len(scored.completion.tokens) for scored in trainer.last)
    assert line["cut_off"] == mean(not scored.completion.is_ended for scored in trainer.last) != 0.5


def test_importance_weights_are_those_of_trainer_over_engine(usual_folder, reward_file, monkeypatch):
    calls = recorded(monkeypatch, "importance_weights")
    trainer = make_trainer(usual_folder, reward_file, importance_limit=2.0)
    trainer.step()
    (((_, engine_BT, _), _),) = calls
    found = sorted(engine_BT[engine_BT != 0].tolist())
    assert found == sorted(value for scored in trainer.last for value in scored.completion.log_probs)


@pytest.mark.slow
def test_gradients_of_each_update_are_its_own_and_are_clipped(exact_folder, reward_file, monkeypatch):
    norms, factors = (recorded(monkeypatch, name) for name in ("gradient_norm", "clip_factor"))
    trainer = make_trainer(exact_folder, reward_file, updates=2, lr=0.0)
    losses = recorded(monkeypatch, "completion_mean")
    line = trainer.step()
    first, second = (found.norm.item() for _, found in norms)
    assert line["grad_norm"] == pytest.approx((first + second) / 2)
    assert [(args[0].item(), args[1]) for args, _ in factors] == [(first, 1.0), (second, 1.0)]
    assert len(losses) == 2
    # weights have not changed, so a trainer whose first update has no advantage has the second's gradient
    monkeypatch.setattr(
        octile.rl.trainer, "completion_mean", lambda loss, mask: completion_mean(loss, mask) * scale.pop()
    )
    scale = [1.0, 0.0]
    alone = make_trainer(exact_folder, reward_file, updates=2, lr=0.0).step()["grad_norm"]
    assert 2 * alone == pytest.approx(second, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["exact_folder", "usual_folder"])
def test_a_restored_trainer_repeats_the_steps_bit_for_bit(folder, reward_file, request):
    folder = request.getfixturevalue(folder)
    trainer = make_trainer(folder, reward_file)
    trainer.step()
    tensors, state = trainer.state()
    saved = {name: tensor.clone() for name, tensor in tensors.items()}
    expected = [without_times(trainer.step()) for _ in range(2)]
    other = make_trainer(folder, reward_file)
    other.restore(saved, state)
    assert [without_times(other.step()) for _ in range(2)] == expected
    (first, _), (second, _) = trainer.state(), other.state()
    assert first.keys() == second.keys()
    assert all(bits(first[name]) == bits(second[name]) for name in first)


def test_the_policy_is_trained_and_the_reference_is_not(exact_folder, reward_file):
    trainer = make_trainer(exact_folder, reward_file)
    trainer.step()
    start = load(exact_folder).state_dict()
    reference = trainer._reference.state_dict()
    assert all(torch.equal(tensor, reference[name]) for name, tensor in start.items())
    assert not all(torch.equal(tensor, start[name]) for name, tensor in trainer.model.state_dict().items())
    assert all(torch.equal(t, start[name]) for name, t in trainer.model.state_dict().items() if "bias" in name)


@pytest.mark.slow
def test_the_first_completion_of_each_prompt_is_stored_with_its_reward(exact_folder, reward_file):
    trainer = make_trainer(exact_folder, reward_file)
    trainer.step()
    prompts = ArithmeticPrompts(0).of_step(0, 2)
    texts = trainer.texts()
    assert [Prompt(text["prompt"], text["answer"]) for text in texts] == prompts
    assert [text["reward"] for text in texts] == [len(set(text["completion"])) / 10 for text in texts]


def test_a_context_that_is_too_short_is_refused(exact_folder, reward_file, monkeypatch):
    with pytest.raises(ValueError, match="max_new_tokens must be at most 505 after the longest prompt of 7 tokens"):
        make_trainer(exact_folder, reward_file, max_new_tokens=506)
    monkeypatch.setattr(ArithmeticPrompts, "longest", lambda self: [Prompt("1 " * 600, "")])
    with pytest.raises(ValueError, match=r"prompts must leave room for completions .* of 512 tokens, but the longest"):
        make_trainer(exact_folder, reward_file, max_new_tokens=1)
    monkeypatch.setattr(ArithmeticPrompts, "longest", lambda self: [Prompt("", "", (1,) * 511), Prompt("1", "")])
    with pytest.raises(ValueError, match="max_new_tokens must be at most 1 after the longest prompt of 511 tokens"):
        make_trainer(exact_folder, reward_file, max_new_tokens=2)


def test_gradients_that_are_not_finite_stop_the_run_before_the_update(exact_folder, reward_file, monkeypatch):
    trainer = make_trainer(exact_folder, reward_file)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    monkeypatch.setattr("octile.rl.trainer.completion_mean", lambda loss, mask: loss.sum() * float("inf"))
    with pytest.raises(FloatingPointError, match="the gradient is not finite at step 1"):
        trainer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())


def test_a_tensor_of_no_part_of_the_state_is_refused(exact_folder, reward_file):
    trainer = make_trainer(exact_folder, reward_file)
    tensors, values = trainer.state()
    with pytest.raises(ValueError, match=r"must belong to one of model, optimizer, not be ema\.norm\.weight"):
        trainer.restore(tensors | {"ema.norm.weight": torch.ones(1)}, values)


def test_equal_bits_are_counted_and_not_equal_values():
    found = compare_log_probs(torch.tensor([0.0, -1.0, -2.0]), torch.tensor([-0.0, -1.0, -2.5]))
    assert found == (3, 1, 0.5 / 3, 0.5)


def test_the_divergence_of_two_policies_is_estimated_by_samples_of_the_first():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.2, 0.4])
    sampled = torch.multinomial(p, 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    assert estimate_kl(p.log()[sampled], q.log()[sampled]) == pytest.approx(float((p * (p / q).log()).sum()), abs=1e-3)
