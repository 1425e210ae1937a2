"""Tests of the training benchmark."""


def test_the_first_steps_do_not_count_for_the_speed(script):
    train = script("bench_train")
    slow = [{"main_loss": 9.0, "tokens_per_s": 1.0}] * train.WARM_UP
    fast = [{"main_loss": 3.0, "tokens_per_s": 100.0}] * 30
    assert train.summary([*slow, {"val_loss": 4.0}, *fast]) == {"steps": 50, "tokens_per_s": 100.0, "loss": 3.0}
