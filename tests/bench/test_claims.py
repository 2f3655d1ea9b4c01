"""The problems of benchmarks/claims measure what they say: where the answer is known, they give it."""

from __future__ import annotations

import pytest

from benchmarks.claims import clip_higher, dr_grpo, kl_estimators, planted_mismatch, stale_sequences


def test_estimators_of_the_kl_have_the_values_and_gradients_of_theory():
    exact, rows = kl_estimators.compare(0.5, seed=0)
    assert rows["k1"][0] == pytest.approx(exact, abs=1e-9)
    assert rows["k3"][0] == pytest.approx(exact, abs=1e-9)
    assert rows["k3"][1] < rows["k1"][1] / 2
    assert abs(rows["k2"][0] - exact) > 1e-3
    assert rows["k1"][3] < 1e-9
    for name in ("k2", "k1+", "k3+"):
        assert rows[name][2:] == pytest.approx([1.0, 1.0], abs=1e-9)
    assert rows["k3"][2] < 0.99


def test_only_the_mean_of_each_response_makes_wrong_answers_longer():
    right_and_wrong = {
        aggregation: dr_grpo.train(60, 0, 0.3, aggregation, False)
        for aggregation in ("seq-mean-token-mean", "seq-mean-token-sum-norm")
    }
    wrong, right = right_and_wrong["seq-mean-token-mean"]
    assert wrong > 30 and right < 3
    wrong, right = right_and_wrong["seq-mean-token-sum-norm"]
    assert 8 < wrong < 13 and 7 < right < 15
    assert dr_grpo.expected_lengths(dr_grpo.new_policy()) == pytest.approx([9.988, 9.988], abs=1e-3)


def test_without_a_mismatch_nothing_is_corrected_and_whole_weights_correct_everything():
    correct = {
        name: None if keys is None else planted_mismatch.RolloutCorrectionConfig(**keys)
        for name, keys in planted_mismatch.CORRECTIONS.items()
    }
    for config in correct.values():
        assert planted_mismatch.expected_gradient(config, 0.0, 0.1, 2) == pytest.approx((1.0, 1.0), abs=1e-6)
    cosine, length = planted_mismatch.expected_gradient(correct["none"], 3.0, 0.1, 2)
    assert cosine < 0.95 and length != pytest.approx(1.0, abs=0.02)
    whole = planted_mismatch.expected_gradient(correct["weights of sequences, up to 1000"], 1.0, 0.1, 2)
    assert whole == pytest.approx((1.0, 1.0), abs=1e-3)


def test_an_unmoved_policy_has_the_same_gradient_by_every_ratio():
    for mode in ("vanilla", "gspo", "gpg"):
        same, length, _ = stale_sequences.expected_gradient(mode, 0.0, draws=2, prompts=2)
        assert (same, length) == pytest.approx((1.0, 1.0), abs=1e-6)


@pytest.mark.parametrize(
    "claim", ["clip_higher", "dr_grpo", "kl_estimators", "planted_mismatch", "stale_sequences"]
)
def test_every_claim_prints_its_tables(claim, capsys):
    sizes = {
        "clip_higher": ["--steps", "2", "--seeds", "2"],
        "dr_grpo": ["--steps", "2", "--seeds", "2"],
        "kl_estimators": [],
        "planted_mismatch": ["--steps", "2", "--seeds", "2", "--errors", "1"],
        "stale_sequences": [
            "--distances",
            "0.5",
            "--updates",
            "2",
            "--total",
            "4",
            "--seeds",
            "2",
            "--draws",
            "2",
        ],
    }
    module = {"clip_higher": clip_higher, "dr_grpo": dr_grpo, "kl_estimators": kl_estimators}
    module |= {"planted_mismatch": planted_mismatch, "stale_sequences": stale_sequences}
    assert module[claim].main(sizes[claim]) == 0
    assert capsys.readouterr().out.count("| --- |") >= 1
